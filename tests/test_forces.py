"""Forces and stresses: derivatives of kernels and of every member's energy, and calibration."""

from dataclasses import replace
from functools import cache

import numpy as np
import oracle_forces
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from atomistic_fixtures import SMOOTH as METAL
from atomistic_fixtures import (
    copies,
    labelled_alloys,
    labelled_by_emt,
    labelled_crystals,
    make_force_model,
    make_model,
    membership,
    problem_of,
    set_constant,
)
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from threadpoolctl import threadpool_limits

from qualms import AtomisticModel, Prediction, QualmsWarning, score
from qualms.atomistic.bulk import Output, predict_batches
from qualms.atomistic.forces import (
    derivatives,
    fill_rows,
    kernel_terms,
    make_potential,
    packed_labels,
)
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.settings import make_settings
from qualms.calibration.members import source_members
from qualms.data import qm9
from qualms.features import soap_derivatives
from qualms.features.base import VOIGT
from qualms.gp.kernels import pack
from qualms.io.predictions import EXTRAPOLATES

pytestmark = pytest.mark.filterwarnings("ignore:The training set has too few compositions")

SMOOTH = {"cutoff": 3.5, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}
TWO_SCALES = {
    "engine": "featomic",
    "scales": (
        {"cutoff": 3.0, "smoothing": 0.5, "n_radial": 3, "l_max": 2},
        {"cutoff": 4.5, "smoothing": 1.0, "n_radial": 2, "l_max": 3, "weight": 2.0},
    ),
}
#: Settings that take different branches of the code: representations, and others.
VARIANTS = {
    "ζ = 1": {"exponent": 1},
    "ζ = 2": {},
    "ζ = 2, a quadratic form": {"compression": {"n_features": 20}},
    "ζ = 3.5": {"exponent": 3.5},
    "ζ = 3, compressed": {"exponent": 3, "compression": {"n_features": 60}},
    "ζ = 3.5, compressed": {"exponent": 3.5, "compression": {"n_features": 20}},
    "ζ = 3.5, compressed by pairs": {
        "exponent": 3.5,
        "compression": {"method": "pairs", "n_features": 24},
    },
    "two scales": TWO_SCALES,
    "two scales, compressed": TWO_SCALES | {"compression": {"n_features": 40}, "exponent": 3},
    "not normalised": {"normalize": False},
    "pseudo-species": {"pseudo_species": 2},
    "pseudo-species, compressed": {
        "pseudo_species": 3,
        "compression": {"method": "pairs", "n_features": 24},
    },
}
CRYSTALS = {
    "ζ = 1": {"exponent": 1},
    "ζ = 2": {},
    "ζ = 2, a quadratic form": {"compression": {"n_features": 20}},
    "ζ = 3.5": {"exponent": 3.5},
    "ζ = 3.5, compressed": {"exponent": 3.5, "compression": {"n_features": 10}},
    "two scales, compressed": TWO_SCALES | {"compression": {"n_features": 15}},
    "pseudo-species": {"pseudo_species": 2},
}
#: Of finite differences, in Å or relative.
STEP = 5e-4
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices are multiplied faster by one thread."""
    with threadpool_limits(1):
        yield


def representation(changes, standard):
    return changes if "scales" in changes else standard | changes


@cache
def molecular(name, n_members=4):
    given = representation(VARIANTS[name], SMOOTH)
    settings = {"n_representatives": 60, "n_members": n_members}
    if n_members == 4:  # few points have enough absences
        settings["calibration"] = "student"
    return make_model(representation=given, **settings).fit(qm9(n=50))


@cache
def crystalline(name):
    # Weights so small that rounding of energies does not show in their differences.
    given = representation(CRYSTALS[name], SMOOTH | {"cutoff": 5.0})
    settings = {"n_representatives": 40, "n_members": 4, "noise": 1e-4, "calibration": "student"}
    # A potential with energies of isolated atoms has the same derivatives.
    settings["baseline"] = {"Na": -2.0, "Cl": -3.5} if name == "ζ = 3.5" else "composition"
    return make_model("energy", representation=given, **settings).fit(labelled_crystals(40))


def some_molecule():
    atoms = molecule("CH3OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def some_crystal():
    """A primitive cell, much smaller than the cutoff, sheared and with an atom out of its place."""
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    shear = [[1, 0.03, 0], [0, 1.02, -0.02], [0.04, 0, 0.97]]
    atoms.set_cell(atoms.cell.array @ shear, scale_atoms=True)
    atoms.positions[1] += [0.4, 0.3, -0.2]
    return atoms


def test_atoms_without_neighbours_are_reported():
    model = molecular(next(iter(VARIANTS)))
    far = some_molecule() + Atoms("O", positions=[[0, 0, 20.0]])
    with pytest.warns(QualmsWarning):
        found = model.predict([far], forces=True)
    assert not found.forces.std[-1].any()
    model.predict([molecule("CO2"), Atoms("O")], forces=True)  # zero by symmetry: no warning


def assert_same(found, expected, rtol=1e-6):
    """The largest difference, in units of the largest number."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < rtol * np.abs(expected).max()


def force_by_differences(fitted, atoms, atom, axis, step=STEP):
    """The force on an atom along an axis by each member, from energies of the oracle."""
    return -oracle_forces.derivative(
        lambda by: oracle_forces.member_energies(
            fitted, oracle_forces.moved(atoms, atom, axis, by)
        ),
        step,
    )


def virial_by_differences(fitted, atoms, v):
    a, b = VOIGT[0][v], VOIGT[1][v]
    return oracle_forces.derivative(
        lambda by: oracle_forces.member_energies(fitted, oracle_forces.strained(atoms, a, b, by)),
        STEP,
    )


def assert_forces_are_derivatives(model, atoms):
    found = model.predict([atoms], forces=True)
    expected = np.array(
        [
            [force_by_differences(model.fitted, atoms, atom, axis) for axis in range(3)]
            for atom in range(len(atoms))
        ]
    )
    energies = oracle_forces.member_energies(model.fitted, atoms)
    assert_same(found.energy.uncalibrated.members[0], energies, 1e-10)
    assert np.abs(expected).max() > 0.01
    for i in range(expected.shape[-1]):
        assert_same(found.forces.uncalibrated.members[..., i], expected[..., i])
    assert_same(found.forces.mean, expected.mean(axis=-1))


# --- derivatives of the energies of all members ---


SLAB = Atoms("NaClNaCl", [[0, 0, 0], [2.8, 0, 0.2], [2.8, 2.8, 3.0], [0, 2.8, 2.7]])
SLAB.set_cell([5.6, 5.6, 0])
SLAB.pbc = [True, True, False]


@pytest.mark.parametrize(
    ("train", "name", "atoms"),
    [
        *((molecular, name, some_molecule()) for name in VARIANTS),
        *((crystalline, name, some_crystal()) for name in CRYSTALS),  # smaller than the cutoff
        (crystalline, "ζ = 2", SLAB),
    ],
)
def test_forces_of_every_member_are_the_derivatives_of_its_energy(train, name, atoms):
    assert_forces_are_derivatives(train(name), atoms)


@pytest.mark.parametrize("name", ["ζ = 3.5, compressed", "ζ = 3.5, compressed by pairs"])
def test_products_that_compression_made_negative_count_as_zero_everywhere(name):
    fitted, atoms = molecular(name).fitted, some_molecule()
    representation, X = fitted.representation, fitted.representatives.astype(float)
    for seed in range(20):  # until there is one
        x = np.array(oracle_forces.features(representation, 0, atoms))
        if (negative := x @ X.T < -1e-4).any():
            break
        atoms.rattle(0.1, seed=seed)
    assert negative.any()
    assert np.all(np.asarray(representation.kernel(x, X))[negative] == 0)
    rows = oracle_forces.kernel_rows(kernel_terms(representation, X), [atoms])
    kernel = np.asarray(representation.kernel(x, X)).sum(axis=0)
    np.testing.assert_allclose(rows.energies[0], kernel, rtol=1e-10)
    # Those are the features from which energies alone are predicted, too.
    alone, found = molecular(name).predict([atoms]), molecular(name).predict([atoms], forces=True)
    np.testing.assert_allclose(found.energy.members, alone.members, rtol=1e-5)


@pytest.mark.parametrize("name", CRYSTALS)
def test_stress_of_every_member_is_the_derivative_of_its_energy(name):
    model, atoms = crystalline(name), some_crystal()
    found = model.predict([atoms], stress=True, forces=True)
    virials = [virial_by_differences(model.fitted, atoms, v) for v in range(6)]
    expected = np.array(virials) / atoms.get_volume()
    assert expected.shape[1] == model.fitted.weights.shape[1]
    for i in range(20):
        assert_same(found.stress.uncalibrated.members[0, :, i], expected[:, i])


# --- invariances ---


@settings(max_examples=5)
@given(seed=seeds)
def test_forces_turn_with_the_molecule_and_do_not_depend_on_where_it_is(seed):
    rng = np.random.default_rng(seed)
    model, atoms = molecular("ζ = 3.5"), some_molecule()
    rotation = Rotation.random(random_state=int(rng.integers(2**31))).as_matrix()
    order = rng.permutation(len(atoms))
    turned = atoms.copy()
    turned.positions = turned.positions @ rotation.T + rng.normal(scale=10, size=3)
    before, after = model.predict([atoms], forces=True), model.predict([turned[order]], forces=True)
    expected = np.einsum("ab,jbr->jar", rotation, before.forces.members)[order]
    assert_same(after.forces.members, expected, 1e-8)
    assert_same(after.energy.members, before.energy.members, 1e-10)


# --- other ways to the same numbers ---


@pytest.mark.parametrize("variant", ["ζ = 2", "ζ = 3, compressed", "pseudo-species", "two scales"])
def test_forces_do_not_depend_on_what_is_in_memory_at_once(variant, monkeypatch):
    fitted, frames = molecular(variant).fitted, [molecule("CH3CH2OH"), molecule("HCN")]
    potential = make_potential(fitted, fitted.weights)
    whole = derivatives(potential, frames)
    monkeypatch.setattr(soap_derivatives, "CACHED", 1)
    monkeypatch.setattr(soap_derivatives, "BATCH", 5)
    parts = derivatives(potential, frames)
    assert_same(parts.energies, whole.energies, 1e-12)
    assert_same(parts.forces, whole.forces, 1e-9)


def test_an_atom_with_no_features_at_all():
    # Without a weight of its own, an atom far from all others has no features to change.
    chosen = SMOOTH | {"center_weight": 0.0}
    given = {"n_representatives": 30, "n_members": 4, "calibration": "student"}
    model = make_model(representation=chosen, **given).fit(qm9(n=40))
    found = model.predict([Atoms("C")], forces=True)
    np.testing.assert_array_equal(found.forces.members, 0)
    assert_forces_are_derivatives(model, some_molecule())


# --- calibration ---


def own_std(model, prediction):
    """Standard deviations of the members that the calibration of the energy scales."""
    members = source_members(model.fitted.calibration, prediction.uncalibrated.members)
    return members.std(axis=-1, ddof=1)


@pytest.mark.parametrize("n_members", [4, 16])
def test_without_training_on_them_forces_and_stress_are_scaled_as_the_energy(n_members):
    model = molecular("ζ = 2", n_members)
    assert model.fitted.calibration.method == ("student" if n_members == 4 else "sources")
    found = model.predict([some_molecule(), molecule("CH4")], forces=True)
    for one in found:
        forces, factor = one.forces, one.std / own_std(model, one)
        np.testing.assert_allclose(forces.std, factor * own_std(model, forces), rtol=1e-9)
        np.testing.assert_allclose(forces.mean, forces.uncalibrated.mean, atol=1e-9)
    assert trained().fitted.calibration_of("stress") is None
    found = trained().predict(alloys()[26:], stress=True, forces=True)
    factors = found.energy.std / own_std(trained(), found.energy)
    expected = own_std(trained(), found.stress) * factors[:, None]
    np.testing.assert_allclose(found.stress.std, expected)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_far_from_the_training_set_uncertainties_are_large(factor):
    model, frames = molecular("ζ = 2", n_members=16), qm9(n=70)[50:]
    far = [Atoms(atoms.numbers, factor * atoms.positions) for atoms in frames]
    usual, strange = model.predict(frames, forces=True), model.predict(far, forces=True)
    assert np.all(np.isfinite(strange.forces.members))
    assert np.median(strange.energy.std) > 3 * np.median(usual.energy.std)


# --- kernel rows of forces and virials ---

ROWS = {
    "ζ = 2": METAL,
    "ζ = 3.5": METAL | {"exponent": 3.5},
    "compressed": METAL | {"compression": {"n_features": 12}},
    "ζ = 3.5, compressed": METAL | {"exponent": 3.5, "compression": {"n_features": 6}},
    "not normalised": METAL | {"normalize": False},
    "two scales": {key: value for key, value in TWO_SCALES.items() if key != "engine"},
}


alloys = cache(labelled_alloys)


@cache
def trained(stress=None, **settings):
    given = {"units": "eV", "n_members": 16, "stress": stress}
    return make_force_model(**given, **settings).fit(alloys()[:26])


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_the_derivatives_of_the_kernel_with_each_representative(name):
    given = {"n_representatives": 5, "calibration": "student", "basis": "environments"}
    fitted = make_force_model(representation=ROWS[name], **given).fit(alloys()[:12]).fitted
    r = len(fitted.weights)
    # Members that have one representative each, and no baseline.
    bare = replace(
        fitted,
        weights=np.eye(r),
        intercepts=np.zeros(r),
        baseline=replace(fitted.baseline, members=np.zeros((2, r))),
        kernel_scale=1.0,
    )
    atoms = alloys()[20]
    kernels = kernel_terms(fitted.representation, fitted.representatives)
    rows = oracle_forces.kernel_rows(kernels, [atoms], strain=True)
    energies = oracle_forces.member_energies(bare, atoms)
    np.testing.assert_allclose(rows.energies[0], energies, rtol=1e-10)
    for atom, axis in ((0, 0), (1, 2), (3, 1)):
        expected = force_by_differences(bare, atoms, atom, axis)
        np.testing.assert_allclose(rows.forces[atom, axis], expected, rtol=1e-6, atol=1e-8)
    for v in (0, 4):
        expected = virial_by_differences(bare, atoms, v)
        np.testing.assert_allclose(rows.virials[0, v], expected, rtol=1e-6, atol=1e-7)


def test_rows_have_the_order_of_the_labels(monkeypatch):
    fitted, frames = trained(basis="environments").fitted, alloys()[:5]
    forces = [atoms.arrays["force"].copy() for atoms in frames]
    forces[1][:] = np.nan
    forces[3][2, 1] = np.nan
    virials = np.array([atoms.info["virtual"] for atoms in frames])
    virials[2:] = np.nan
    labels, M = ForceLabels(forces, virials), len(fitted.weights)
    kernels = kernel_terms(fitted.representation, fitted.representatives)
    energies, others = np.ones((5, M)), np.zeros((59, M))
    fill_rows(energies, others, frames, labels, kernels)
    expected = []
    for s, atoms in enumerate(frames):
        rows = oracle_forces.kernel_rows(kernels, [atoms], strain=True)
        np.testing.assert_allclose(energies[s], rows.energies[0] / 4, atol=1e-12)
        whole = np.concatenate([rows.forces.reshape(12, -1), rows.virials[0] / 4])
        expected.append(whole[np.isfinite(np.concatenate([forces[s].ravel(), virials[s]]))])
    np.testing.assert_allclose(others, np.concatenate(expected), atol=1e-11)
    # Structures in parts give the same.
    monkeypatch.setattr(soap_derivatives, "BATCH", 3)
    again = np.zeros_like(others)
    fill_rows(energies, again, frames, labels, kernels)
    np.testing.assert_allclose(again, others, atol=1e-11)


# --- labels as the basis ---

SQUARES = [name for name in ROWS if "3.5" not in name]
#: Alloys that the exact process is trained on: labels of different ones are independent.
N_EXACT = 12


@pytest.mark.parametrize("name", SQUARES)
def test_kernels_with_labels_are_the_derivatives_of_kernels(name):
    """The inner product of packed labels with the square of X is the kernel row of X."""
    given = {"n_representatives": 5, "calibration": "student", "basis": "environments"}
    fitted = make_force_model(representation=ROWS[name], **given).fit(alloys()[:12]).fitted
    terms = kernel_terms(fitted.representation, fitted.representatives)
    atoms, known = alloys()[20], np.ones(18, dtype=bool)
    known[[2, 7, 13]] = False
    forces = np.where(known[:12], 1.0, np.nan).reshape(4, 3)
    labels = ForceLabels([forces], np.where(known[12:], 1.0, np.nan)[None])
    energies, others = np.empty((1, len(fitted.weights))), np.zeros((15, len(fitted.weights)))
    fill_rows(energies, others, [atoms], labels, terms)
    squares = [
        term.share**0.5 * pack(np.einsum("mi,mj->mij", *2 * [term.representatives]))
        for term in terms
    ]
    rows = packed_labels(terms, atoms, known) @ np.concatenate(squares, axis=1).T
    np.testing.assert_allclose(rows, np.concatenate([energies, others]), atol=1e-11)


def labels_of(frames):
    """Energies per atom, then forces and virials per atom of each structure."""
    energies = [atoms.info["energy"] / 4 for atoms in frames]
    derivatives = [
        np.append(atoms.arrays["force"], atoms.info["virtual"] * atoms.cell.volume / 4)
        for atoms in frames
    ]
    return np.concatenate([energies, *derivatives])


class ExactProcess:
    """Eqs. (1) and (2), Musil et al. 2019, for labels of alloys, by explicit inverses."""

    def __init__(self, fitted, frames, variances):
        n = len(frames)
        self.fitted, self.V, self.y = fitted, self.rows(fitted, frames), labels_of(frames)
        kinds = np.concatenate([np.zeros(n, int), np.tile(np.repeat([1, 2], [12, 6]), n)])
        self.groups = np.concatenate([np.arange(n), np.repeat(np.arange(n), 18)])
        self.variances = np.array(variances)[kinds]
        # Eq. (17): the prior has the mean square of the derivatives.
        self.prior = np.sum(self.y[n:] ** 2) / np.sum(self.V[n:] ** 2)

    @staticmethod
    def rows(fitted, frames):
        terms = kernel_terms(fitted.representation, fitted.representatives)
        known = np.ones(18, dtype=bool)
        rows = [packed_labels(terms, atoms, known) for atoms in frames]
        V = np.concatenate([[r[0] for r in rows], *(r[1:] for r in rows)])
        return fitted.kernel_scale**0.5 * V

    def predict(self, V, used=slice(None)):
        """Mean and variance of labels (n, p), from some of the training labels."""
        k = self.prior * V @ self.V[used].T
        K = self.prior * self.V[used] @ self.V[used].T + np.diag(self.variances[used])
        gain = k @ np.linalg.inv(K)
        return gain @ self.y[used], self.prior * np.sum(V**2, axis=1) - np.sum(gain * k, axis=1)


@cache
def exact():
    """A model of all labels of some alloys, without baseline, and the exact process."""
    noise = {"noise": 1e-5, "forces_noise": 1e-3, "stress_noise": 1e-4}
    given = {"forces": "force", "stress": "virtual", "baseline": "none", "basis": "labels"}
    given |= {"representation": METAL, "uncertainty": "posterior", "calibration": "linear"}
    frames = alloys()[:N_EXACT]
    with pytest.MonkeyPatch.context() as patch:
        set_constant(patch, "_NEGLIGIBLE", 0.0)
        model = make_model("energy", n_representatives=10_000, **given, **noise).fit(frames)
    return model, ExactProcess(model.fitted, frames, [*noise.values()])


def test_all_labels_as_basis_are_the_exact_process():
    model, process = exact()
    new = alloys()[26:30]
    mean, _ = process.predict(process.rows(model.fitted, new))
    predicted = model.predict(new, forces=True, stress=True)
    volumes = np.array([atoms.cell.volume for atoms in new])
    derivatives = mean[4:].reshape(4, 18)
    np.testing.assert_allclose(predicted.mean / 4, mean[:4], rtol=1e-6)
    forces = predicted.forces.mean.reshape(4, 12)
    np.testing.assert_allclose(forces, derivatives[:, :12], atol=1e-6)
    stress = derivatives[:, 12:] * 4 / volumes[:, None]
    np.testing.assert_allclose(predicted.stress.mean, stress, atol=1e-7)


def test_labels_without_their_structure_are_predicted_by_the_others():
    """Residuals and posterior variances of out-of-bag points, by as many models."""
    model, process = exact()
    points = model.fitted.points
    for s in range(N_EXACT):
        out = process.groups == s
        mean, variance = process.predict(process.V[out], ~out)
        for name, rows in {"energy": slice(0, 1), "forces": slice(1, 13)}.items():
            of_structure = points[name].structure == s
            residuals = process.y[out][rows] - mean[rows]
            found = points[name].residuals[of_structure]
            np.testing.assert_allclose(np.sort(found), np.sort(residuals), rtol=1e-4, atol=1e-7)
            # Of forces, the mean over the components of a vector.
            p = np.sqrt(np.mean(variance[rows].reshape(-1, 1 if name == "energy" else 3), axis=1))
            found = np.unique(points[name].ensemble_std[of_structure].round(9))
            np.testing.assert_allclose(found, np.unique(p.round(9)), rtol=1e-3)


@pytest.mark.parametrize("name", SQUARES)
def test_forces_of_label_models_are_derivatives_of_energies(name):
    model = make_force_model(
        representation=ROWS[name], n_representatives=40, calibration="student", basis="labels"
    ).fit(alloys()[:12])
    fitted, atoms = model.fitted, alloys()[20]
    raw = derivatives(model.potential, [atoms], strain=True)
    learned = raw.energies[0] + fitted.intercepts * 4
    baseline = fitted.baseline.members[[fitted.baseline.species.index(z) for z in atoms.numbers]]
    energies = oracle_forces.member_energies(fitted, atoms)
    np.testing.assert_allclose(learned + baseline.sum(axis=0), energies, rtol=1e-9)
    for atom, axis in ((0, 0), (1, 2)):
        expected = force_by_differences(fitted, atoms, atom, axis)
        np.testing.assert_allclose(raw.forces[atom, axis], expected, rtol=1e-5, atol=1e-7)
    expected = virial_by_differences(fitted, atoms, 4)
    np.testing.assert_allclose(raw.virials[0, 4], expected, rtol=1e-5, atol=1e-6)


def test_models_of_labels_in_files(tmp_path):
    model, new = trained(stress="virtual"), alloys()[26:]
    assert model.fitted.has_label_basis
    model.save(tmp_path / "model.safetensors")
    expected = model.predict(new, forces=True, stress=True)
    found = AtomisticModel.load(tmp_path / "model.safetensors").predict(
        new, forces=True, stress=True
    )
    np.testing.assert_array_equal(found.members, expected.members)
    np.testing.assert_array_equal(found.forces.members, expected.forces.members)
    with rejects("keep_pp"):
        model.predict_pp(new)


def test_labels_span_models_of_squares_with_derivatives():
    with rejects("basis"):
        make_model("energy", basis="labels").fit(alloys()[:12])
    cubes = METAL | {"exponent": 3}
    with rejects("basis"):
        make_force_model(representation=cubes, basis="labels").fit(alloys()[:12])
    cubic = make_force_model(representation=cubes, calibration="student").fit(alloys()[:12])
    assert not cubic.fitted.has_label_basis


@pytest.mark.parametrize(
    ("n", "changes", "basis"),
    [
        (3, {"compression": {"n_features": 10}}, "labels"),  # 13 labels each, of 55 products
        (12, {"compression": {"n_features": 10}}, "environments"),
        (3, {"compression": None, "n_radial": 12, "l_max": 9}, "environments"),  # 3000 features
    ],
)
def test_few_labels_are_the_basis_by_default(n, changes, basis, monkeypatch):
    given = {"target": "energy", "forces": "force", "representation": METAL | changes}
    assert problem_of(alloys()[:n], make_settings(given)).settings.basis == basis
    set_constant(monkeypatch, "_MOST", {"default": 9})  # 18 of squares: of at most 36 labels
    assert problem_of(alloys()[:n], make_settings(given)).settings.basis == "environments"


def test_labels_of_some_atoms_stresses_alone_and_forces_that_vanish():
    frames, new = copies(alloys()[:26]), alloys()[26:]
    for i, atoms in enumerate(frames):
        atoms.arrays["force"][i % 4] = np.nan
    frames[3].arrays["force"][:] = np.nan
    symmetric = labelled_by_emt(bulk("Cu", cubic=True))  # all forces are zero
    models = [
        make_force_model(stress="virtual", n_members=16).fit([*frames, symmetric]),
        make_model("energy", representation=METAL, stress="virtual").fit(alloys()[:26]),
    ]
    for model in models:
        assert model.fitted.has_label_basis
        predicted = model.predict(new, forces=True, stress=True)
        for values in (predicted.members, predicted.forces.members, predicted.stress.members):
            assert np.all(np.isfinite(values))


def test_few_labels_are_all_in_the_basis_if_some_structures_have_few():
    frames = copies(alloys()[:26])
    for atoms in frames[::2]:
        del atoms.arrays["force"]
    model = make_force_model(basis="labels", n_representatives="auto", n_members=16).fit(frames)
    # Forces on the four atoms of a structure sum to zero, and some combinations depend on others.
    assert 26 + 13 * 8 < model.record.effective_rank <= 26 + 13 * 9


@pytest.mark.filterwarnings("ignore::qualms.QualmsWarning")  # there is little to learn
@pytest.mark.parametrize("uncertainty", ["subsampling", "posterior"])
@pytest.mark.parametrize("basis", ["labels", "environments"])
def test_forces_that_are_all_zero_by_symmetry_are_not_calibrated(basis, uncertainty):
    crystals = [
        labelled_by_emt(bulk("Cu", a=float(a), cubic=True)) for a in np.linspace(3.5, 3.8, 12)
    ]
    model = make_force_model(basis=basis, uncertainty=uncertainty, n_members=16).fit(crystals)
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.05, seed=0)
    assert np.all(model.predict([atoms], forces=True).forces.std < 1.0)


@pytest.mark.filterwarnings("ignore::qualms.QualmsWarning")
@pytest.mark.parametrize("basis", ["labels", "environments"])
def test_perfect_crystals_do_not_hide_the_forces_of_others(basis):
    crystals = [bulk("Cu", a=float(a), cubic=True) for a in np.linspace(3.6, 3.9, 12)]
    moved, rng = [], np.random.default_rng(0)
    for _ in range(12):
        atoms = bulk("Cu", a=rng.uniform(3.7, 4.0), cubic=True)
        atoms.positions += 0.1 * rng.normal(size=(4, 3))
        moved.append(atoms)
    frames = [labelled_by_emt(atoms) for atoms in crystals + moved]
    soap = {"cutoff": 4.5, "pseudo_species": None}
    settings = {"representation": soap, "n_representatives": "auto", "calibration": "none"}
    model = make_force_model(basis=basis, **settings).fit(frames[:15])
    forces = np.concatenate([atoms.arrays["force"] for atoms in frames[15:]])
    errors = model.predict(frames[15:], forces=True).forces.mean - forces
    assert np.abs(errors).mean() < 0.1 * np.abs(forces).mean()


@pytest.mark.parametrize("basis", ["labels", "environments"])
def test_a_single_labelled_structure_is_rejected(basis):
    with rejects("frames"):
        make_force_model(basis=basis).fit(alloys()[:1])


def test_labels_of_an_element_that_one_structure_has():
    rare = bulk("Cu", cubic=True)
    rare.symbols[0] = "Ag"
    rare.rattle(0.05, seed=1)
    frames = [*alloys()[:25], labelled_by_emt(rare)]
    model = make_force_model(n_members=16, basis="labels").fit(frames)
    rare.rattle(0.02, seed=2)
    predicted = model.predict([rare, *alloys()[26:28]], forces=True)
    assert np.all(np.isfinite(predicted.members))
    assert np.all(predicted.forces.std[0] > 0)


# --- parts of large structures ---


def large_crystal(pbc=True, *, repeat=(3, 3, 3), oblique=0.0, seed=0):
    """Copper with some aluminium: atoms in no order, some of them outside the cell."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True).repeat(repeat)
    cell = atoms.cell.array.copy()
    cell[1] += oblique * cell[0]
    cell[2] -= oblique * cell[1]
    atoms.set_cell(cell, scale_atoms=True)
    atoms.symbols[::3] = "Al"
    atoms.positions += 0.1 * rng.normal(size=(len(atoms), 3))
    for axis in np.flatnonzero(atoms.pbc & np.broadcast_to(pbc, 3)):
        atoms.positions += rng.integers(-1, 2, size=(len(atoms), 1)) * cell[axis]
    atoms.pbc = pbc
    return atoms[rng.permutation(len(atoms))]


LARGE = {
    "an oblique crystal": {"oblique": 0.3},
    "an oblique slab": {"pbc": (True, False, True), "oblique": 0.2},
    "a wire": {"pbc": (False, True, False)},
    "a cluster": {"pbc": False},
    "a narrow crystal": {"repeat": (1, 5, 3)},
}


@pytest.mark.parametrize("name", LARGE)
def test_parts_have_the_derivatives_of_the_whole(name, monkeypatch):
    frames, fitted = [alloys()[0], large_crystal(**LARGE[name])], trained().fitted
    potential = make_potential(fitted, fitted.weights[:, :3])
    kernels = kernel_terms(fitted.representation, fitted.representatives[::10])

    def found(size):
        monkeypatch.setattr(soap_derivatives, "BATCH", size)
        both = derivatives(potential, frames, strain=True, atoms=True)
        arrays = [both.energies, both.forces, both.virials, both.atoms]
        if name == "an oblique crystal":
            arrays += oracle_forces.kernel_rows(kernels, frames, strain=True)[:3]
        return arrays

    for part, whole in zip(found(50), found(10**9), strict=True):
        assert_same(part, whole, 1e-9)


# --- models that learned forces and stresses ---


def stresses(frames):
    return np.array([atoms.info["virtual"] for atoms in frames])


def test_stress_is_calibrated_out_of_bag():
    known = alloys()[:26]
    model = trained("virtual", uncertainty="subsampling", centre="members")
    members = model.predict(known, stress=True, forces=True).stress.uncalibrated.members
    of_stress = model.fitted.with_calibration("linear").calibrations["stress"]
    found, u = of_stress.calibration, of_stress.isotropy
    inside = membership(known, model)
    counts = np.sum(inside == 0, axis=1)
    odds = u / (1 - u) * 15 / (counts[counts >= 3].mean() - 1)
    u = odds / (1 + odds)  # for out-of-bag members, which are fewer
    terms = []  # z_k²/(r² share²) of all components of all stresses, one by one
    for y, one, seen in zip(stresses(known), members, inside, strict=True):
        absent = one[:, seen == 0]
        z, variances = y - absent.mean(axis=1), absent.var(axis=1, ddof=1)
        r2 = np.mean(variances[[[0, 5, 4], [5, 1, 3], [4, 3, 2]]])
        share2 = (1 - u) * variances / r2 + u * 1.5 / np.array([1, 1, 1, 2, 2, 2])
        if absent.shape[1] >= 5:
            terms.append(z**2 / (r2 * share2))
    assert found.alpha == pytest.approx(np.sqrt(np.mean(terms)), rel=1e-4)
    assert model.fitted.calibration_of("stress").n_points == 26 * 6
    assert model.fitted.calibration_of("stress") != model.fitted.calibration_of("forces")


def test_uncertainties_of_stresses_cover_the_errors():
    new = alloys(40, seed=5)
    predicted = trained("virtual").predict(new, stress=True, forces=True).stress
    fitted = trained("virtual").fitted
    calibration, isotropy = fitted.calibration_of("stress"), fitted.calibrations["stress"].isotropy
    again = predicted.calibrated(calibration, isotropy=isotropy)
    np.testing.assert_allclose(predicted.std, again.std)
    flat = Prediction(predicted.members.reshape(-1, predicted.n_members))
    # Components of 40 stresses are correlated: a standard error of about a tenth.
    assert 0.5 < score(stresses(new).ravel(), flat).coverage_68 < 0.9


def test_forces_of_each_species_have_their_own_uncertainty():
    """Labels of one species have noise that the features cannot know of."""
    covered = []
    for seed in range(3, 8):
        rng, frames = np.random.default_rng(seed), copies(alloys(60, seed=seed))
        for atoms in frames:
            noise = 0.3 * rng.normal(size=(4, 3))
            atoms.arrays["force"] += (atoms.numbers == 29)[:, None] * noise
        model = make_force_model(n_representatives=200, n_members=16).fit(frames[:40])
        factors, new = model.fitted.calibrations["forces"].elements, frames[40:]
        assert factors["Cu"] > 5 * factors["Al"]
        numbers = np.concatenate([atoms.numbers for atoms in new])
        y = np.concatenate([atoms.arrays["force"] for atoms in new])
        found = model.predict(new, forces=True).forces
        inside = np.abs(found.mean - y) < found.std
        covered.append([np.mean(inside[numbers == number]) for number in (13, 29)])
    assert np.all(np.mean(covered, axis=0) > 0.55)
    assert np.all(np.mean(covered, axis=0) < 0.85)


# One alloy is 60 times further from its out-of-bag prediction than usual.
@pytest.mark.filterwarnings("ignore:energy. possible label errors")
@pytest.mark.parametrize("n_members", [6, 8])
def test_uncertainties_of_forces_with_few_members(n_members):
    """Few members without a point differ little in some direction, by chance."""
    frames, new = alloys(60, seed=3), alloys(40, seed=5)
    model = make_force_model(n_representatives=200, n_members=n_members).fit(frames)
    predicted = model.predict(new, forces=True).forces
    z = np.abs(predicted.mean - np.concatenate([atoms.arrays["force"] for atoms in new]))
    assert 0.55 < np.mean(z < predicted.std) < 0.82


def test_almost_symmetric_forces_have_almost_no_uncertainty():
    model, atoms = molecular("ζ = 2", 8), molecule("C2H4")  # planar
    std = []
    for height in (0.0, 1e-4, 1e-3):
        moved = atoms.copy()
        moved.positions[0, 0] += height
        std.append(model.predict([moved], forces=True).forces.std)
    assert np.all(std[0][:, 0] < 1e-8 * std[0].max())
    assert np.all(std[1][:, 0] < 0.03 * std[1].max())
    assert std[2][:, 0].max() > std[1][:, 0].max()


def test_a_model_learns_from_the_stress_of_slabs():
    frames = []
    for i in range(24):
        atoms = bulk("Cu", cubic=True)
        atoms.set_cell(atoms.cell.array * (0.97 + 0.0025 * i), scale_atoms=True)
        atoms.center(vacuum=2.5, axis=2)
        atoms.pbc = [True, True, False]
        atoms.rattle(0.08, seed=i)
        frames.append(labelled_by_emt(atoms))
    found = make_force_model(stress="virtual", calibration="student").fit(frames[::2])
    errors = found.predict(frames[1::2], stress=True, forces=True).stress.mean - stresses(
        frames[1::2]
    )
    assert np.sqrt(np.mean(errors**2)) < 0.2 * np.std(stresses(frames))


def test_noisy_stresses_do_not_spoil_forces():
    noisy, rng, new = copies(alloys()[:26]), np.random.default_rng(0), alloys()[26:]
    for atoms in noisy:
        atoms.info["virtual"] = atoms.info["virtual"] + 0.05 * rng.normal(size=6)
    with_noise = make_force_model(stress="virtual").fit(noisy)

    def error(model):
        reference = np.concatenate([atoms.arrays["force"] for atoms in new])
        return np.sqrt(np.mean((model.predict(new, forces=True).forces.mean - reference) ** 2))

    # With one noise variance for both, errors of forces would be five times as large.
    assert error(with_noise) < 2 * error(make_force_model().fit(noisy))


# --- models and structures without forces ---


def test_models_and_structures_without_forces_are_rejected(energy_model, shift_model, molecules):
    model, slab = crystalline("ζ = 2"), fcc111("Cu", (1, 1, 2))
    slab.symbols[:] = ["Na", "Cl"]
    close = Atoms("NaCl", [[0, 0, 0], [0, 0, 0.01]])
    cases = [
        ("engine", lambda: energy_model.predict(molecules[:1], forces=True)),
        ("kind", lambda: shift_model.predict(molecules[:1], forces=True)),
        ("frames", lambda: model.predict([], forces=True)),
        ("frames", lambda: model.predict([molecule("SiH4")], forces=True)),
        ("frames[1]", lambda: model.predict([some_crystal(), close], forces=True)),
    ]
    for parameter, predict in cases:
        with rejects(parameter):
            predict()


def test_features_are_computed_once_for_forces(force_model, alloys, monkeypatch):
    """The novelty of structures comes from the pass that computes their forces."""
    frames, calls = alloys[26:], []
    monkeypatch.setattr(force_model, "threads", 1)  # features are computed in this process
    expected = force_model.predict(frames).extrapolates
    forces = force_model.predict(frames, forces=True).forces

    def count(kind, name):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, **k: calls.append(name) or method(*a, **k))

    count(type(force_model.fitted.representation), "features")
    for kind in {type(term.features) for term in force_model.potential}:
        count(kind, "tapes")
    [batch] = predict_batches(force_model, enumerate(frames), Output(forces=True, atoms=True))
    assert calls == ["tapes"] * len(force_model.potential)
    assert batch.arguments["extra"][EXTRAPOLATES] == expected.tolist()
    np.testing.assert_array_equal(batch.arguments["arrays"]["forces"], forces.mean)
    calls.clear()
    [batch] = predict_batches(force_model, enumerate(frames), Output())
    assert calls == ["tapes"] * len(force_model.potential)  # energies are quadratic forms
    assert batch.arguments["extra"][EXTRAPOLATES] == expected.tolist()
