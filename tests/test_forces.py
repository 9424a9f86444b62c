"""Forces and stress: derivatives of every member's energy, whatever the model is made of."""

from dataclasses import replace
from functools import cache
from time import process_time

import numpy as np
import oracle_forces
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from atomistic_fixtures import ENERGY, labelled_crystals, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from threadpoolctl import threadpool_limits

from qualms import InputError
from qualms.atomistic import forces as potential
from qualms.atomistic.forces import ScalePotential, derivatives, make_potential
from qualms.atomistic.kernel_rows import derivative_rows, scale_rows
from qualms.atomistic.structures import VOIGT
from qualms.data import qm9
from qualms.features import gradients
from qualms.features.gradients import scale_features

SMOOTH = {"cutoff": 3.5, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}
TWO_SCALES = {
    "engine": "featomic",
    "scales": (
        {"cutoff": 3.0, "smoothing": 0.5, "n_radial": 3, "l_max": 2},
        {"cutoff": 4.5, "smoothing": 1.0, "n_radial": 2, "l_max": 3, "weight": 2.0},
    ),
}
#: Settings that take different ways through the code.
VARIANTS = {
    "ζ = 1": {"representation": SMOOTH | {"exponent": 1}},
    "ζ = 2": {"representation": SMOOTH},
    "ζ = 2, a quadratic form": {
        "representation": SMOOTH | {"compression": {"n_features": 20}},
    },
    "ζ = 3.5": {"representation": SMOOTH | {"exponent": 3.5}},
    "ζ = 3, compressed": {
        "representation": SMOOTH | {"exponent": 3, "compression": {"n_features": 60}},
    },
    "ζ = 3.5, compressed": {
        "representation": SMOOTH | {"exponent": 3.5, "compression": {"n_features": 20}},
    },
    "ζ = 3.5, compressed by pairs": {
        "representation": SMOOTH
        | {"exponent": 3.5, "compression": {"method": "pairs", "n_features": 24}},
    },
    "chosen columns": {
        "representation": SMOOTH | {"compression": {"method": "fps", "n_features": 30}},
    },
    "two scales": {"representation": TWO_SCALES},
    "two scales, compressed": {
        "representation": TWO_SCALES | {"compression": {"n_features": 40}, "exponent": 3},
    },
    "not normalised": {"representation": SMOOTH | {"normalize": False}},
    "no baseline": {"representation": SMOOTH, "baseline": "none"},
    "ζ = 2, 16 members": {"representation": SMOOTH, "n_members": 16},
}
CRYSTALS = {
    "ζ = 1": {"representation": SMOOTH | {"cutoff": 5.0, "exponent": 1}},
    "ζ = 2": {"representation": SMOOTH | {"cutoff": 5.0}},
    "ζ = 3.5": {"representation": SMOOTH | {"cutoff": 5.0, "exponent": 3.5}},
    "ζ = 3.5, compressed": {
        "representation": SMOOTH
        | {"cutoff": 5.0, "exponent": 3.5, "compression": {"n_features": 10}},
        # Weights so small that rounding of energies does not show in their differences.
        "noise": 1e-4,
    },
    "isolated atoms": {
        "representation": SMOOTH | {"cutoff": 5.0},
        "baseline": {"Na": -2.0, "Cl": -3.5},
    },
    "two scales, compressed": {
        "representation": TWO_SCALES | {"compression": {"n_features": 15}},
    },
}
#: Of finite differences, in Å or relative.
STEP = 5e-4
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices are small here, and threads that wait for each other slow."""
    with threadpool_limits(1):
        yield


@cache
def molecular(name):
    settings = {"n_representatives": 60, "n_members": 4} | VARIANTS[name]
    return make_model(**settings).fit(qm9(n=50))


@cache
def crystalline(name):
    settings = {"n_representatives": 40, "n_members": 4} | CRYSTALS[name]
    return make_model("energy", **settings).fit(labelled_crystals(40))


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


def assert_same(found, expected, rtol=1e-6):
    """The largest difference, in units of the largest number."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < rtol * np.abs(expected).max()


def numerical_forces(fitted, atoms):
    forces = np.empty((len(atoms), 3, fitted.weights.shape[1]))
    for atom in range(len(atoms)):
        for axis in range(3):
            forces[atom, axis] = -oracle_forces.derivative(
                lambda by, atom=atom, axis=axis: oracle_forces.member_energies(
                    fitted, oracle_forces.moved(atoms, atom, axis, by)
                ),
                STEP,
            )
    return forces


def assert_forces_are_derivatives(model, atoms):
    found = model.predict_forces([atoms])
    expected = numerical_forces(model.fitted, atoms)
    energies = oracle_forces.member_energies(model.fitted, atoms)
    assert_same(found.energy.uncalibrated.members[0], energies, 1e-10)
    assert np.abs(expected).max() > 0.01
    for i in range(expected.shape[-1]):
        assert_same(found.forces.uncalibrated.members[..., i], expected[..., i])
    assert_same(found.forces.mean, expected.mean(axis=-1))


# --- derivatives of what they should be derivatives of ---


@pytest.mark.parametrize("name", VARIANTS)
def test_forces_of_every_member_are_the_derivatives_of_its_energy(name):
    assert_forces_are_derivatives(molecular(name), some_molecule())


@pytest.mark.parametrize("name", ["ζ = 3.5, compressed", "ζ = 3.5, compressed by pairs"])
def test_products_that_compression_made_negative_count_as_zero_everywhere(name):
    fitted, atoms = molecular(name).fitted, some_molecule()
    representation, X = fitted.representation, fitted.representatives.astype(float)
    x = np.array(oracle_forces.features(representation, 0, atoms))
    negative = x @ X.T < -1e-4
    assert negative.any()
    assert np.all(np.asarray(representation.kernel(x, X))[negative] == 0)
    rows = derivative_rows(scale_rows(representation, X), next(gradients.batches([atoms])))
    kernel = np.asarray(representation.kernel(x, X)).sum(axis=0)
    np.testing.assert_allclose(rows.energies[0], kernel, rtol=1e-10)
    # Those are the features from which energies alone are predicted, too.
    alone, found = molecular(name).predict([atoms]), molecular(name).predict_forces([atoms])
    np.testing.assert_allclose(found.energy.members, alone.members, rtol=1e-5)


@pytest.mark.parametrize("name", CRYSTALS)
def test_forces_in_a_crystal_smaller_than_the_cutoff(name):
    assert_forces_are_derivatives(crystalline(name), some_crystal())


def test_forces_on_a_slab():
    slab = Atoms("NaClNaCl", [[0, 0, 0], [2.8, 0, 0.2], [2.8, 2.8, 3.0], [0, 2.8, 2.7]])
    slab.set_cell([5.6, 5.6, 0])
    slab.pbc = [True, True, False]
    assert_forces_are_derivatives(crystalline("ζ = 2"), slab)


@pytest.mark.parametrize("name", CRYSTALS)
def test_stress_of_every_member_is_the_derivative_of_its_energy(name):
    model, atoms = crystalline(name), some_crystal()
    found = model.predict_forces([atoms], stress=True)
    expected = np.empty((6, 4))
    for k, (a, b) in enumerate(zip(*VOIGT, strict=True)):
        change = oracle_forces.derivative(
            lambda by, a=a, b=b: oracle_forces.member_energies(
                model.fitted, oracle_forces.strained(atoms, a, b, by)
            ),
            STEP,
        )
        expected[k] = change / atoms.get_volume()
    for i in range(4):
        assert_same(found.stress.uncalibrated.members[0, :, i], expected[:, i])


def test_a_stretched_crystal_is_under_tension():
    # ASE's sign: the cell would shrink, and the stress is positive. The pair potential of the
    # training set is repulsive, so here it is the other way round.
    model = crystalline("ζ = 2")
    stress = model.predict_forces([bulk("NaCl", "rocksalt", a=5.2)], stress=True).stress
    assert np.all(stress.mean[0, :3] < 0)
    assert np.all(np.abs(stress.mean[0, 3:]) < 1e-6)


def test_energies_are_those_of_predict():
    model, frames = molecular("ζ = 2"), qm9(n=60)[50:]
    found, alone = model.predict_forces(frames), model.predict(frames)
    np.testing.assert_allclose(found.energy.members, alone.members, rtol=1e-5)
    np.testing.assert_allclose(found.energy.std, alone.std, rtol=1e-2)


# --- invariances ---


@settings(max_examples=10)
@given(seed=seeds)
def test_forces_turn_with_the_molecule_and_do_not_depend_on_where_it_is(seed):
    rng = np.random.default_rng(seed)
    model, atoms = molecular("ζ = 3.5"), some_molecule()
    rotation = Rotation.random(random_state=int(rng.integers(2**31))).as_matrix()
    order = rng.permutation(len(atoms))
    turned = atoms.copy()
    turned.positions = turned.positions @ rotation.T + rng.normal(scale=10, size=3)
    before, after = model.predict_forces([atoms]), model.predict_forces([turned[order]])
    expected = np.einsum("ab,jbr->jar", rotation, before.forces.members)[order]
    assert_same(after.forces.members, expected, 1e-8)
    assert_same(after.energy.members, before.energy.members, 1e-10)


@settings(max_examples=10)
@given(seed=seeds)
def test_stress_turns_with_the_crystal_and_does_not_depend_on_the_cell(seed):
    rng = np.random.default_rng(seed)
    model, atoms = crystalline("ζ = 2"), some_crystal()
    rotation = Rotation.random(random_state=int(rng.integers(2**31))).as_matrix()
    other = atoms.repeat([1, 2, 1])
    other.set_cell(other.cell.array @ rotation.T, scale_atoms=True)
    other.positions += rng.normal(size=3)
    one = model.predict_forces([atoms], stress=True)
    two = model.predict_forces([other], stress=True)
    assert_same(two.energy.members, 2 * one.energy.members, 1e-10)
    expected = np.einsum("ab,jbr->jar", rotation, one.forces.members)
    assert_same(two.forces.members, np.concatenate([expected, expected]), 1e-7)
    assert_same(
        matrix(two.stress.mean[0]), rotation @ matrix(one.stress.mean[0]) @ rotation.T, 1e-7
    )


def matrix(voigt):
    full = np.empty((3, 3))
    full[VOIGT] = voigt
    full[VOIGT[1], VOIGT[0]] = voigt
    return full


@pytest.mark.parametrize("name", VARIANTS)
def test_forces_on_all_atoms_cancel_for_every_member(name):
    forces = molecular(name).predict_forces([some_molecule()]).forces
    assert np.abs(forces.members.sum(axis=0)).max() < 1e-10 * np.abs(forces.members).max()


# --- many structures ---


def test_structures_are_independent_and_in_order(monkeypatch):
    model = molecular("two scales")
    frames = qm9(n=56)[50:]
    together = model.predict_forces(frames)
    assert together.forces.shape == (sum(map(len, frames)), 3)
    assert len(together) == len(frames)
    # Large structures come in parts: here all of them do.
    monkeypatch.setattr(gradients.batches, "__defaults__", (7,))
    for atoms, (energy, forces, stress) in zip(frames, together, strict=True):
        alone = model.predict_forces([atoms])
        np.testing.assert_allclose(energy.members, alone.energy.members[0], rtol=1e-12)
        assert_same(forces.members, alone.forces.members, 1e-11)
        assert stress is None
    np.testing.assert_array_equal(together[-1].forces.members, forces.members)
    with pytest.raises(IndexError):
        together[len(frames)]


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_hold_every_environment_once_and_few_of_them(size):
    frames = [Atoms(f"H{n}") for n in (1, 3, 70, 2, 2, 130, 1)]
    seen = []
    for batch in gradients.batches(frames, size):
        assert len(np.concatenate(batch.centers)) <= size
        assert len(set(batch.structures.tolist())) == len(batch.structures)
        for s, centers in zip(batch.structures, batch.centers, strict=True):
            seen += [(s, c) for c in centers]
    assert seen == [(s, c) for s, atoms in enumerate(frames) for c in range(len(atoms))]


def test_the_mean_alone_is_the_mean_of_the_members():
    fitted, frames = molecular("ζ = 3.5").fitted, [some_molecule()]
    mean = derivatives(make_potential(fitted, fitted.mean_weights[:, None]), frames)
    every = derivatives(make_potential(fitted, fitted.weights), frames)
    assert_same(mean.forces[..., 0], every.forces.mean(axis=-1), 1e-9)


WAYS = [
    *[(variant, "_by_products") for variant in ("ζ = 2", "ζ = 3.5", "two scales, compressed")],
    *[(variant, "_by_forms") for variant in ("ζ = 2", "ζ = 2, a quadratic form", "two scales")],
]


@pytest.mark.parametrize(("variant", "way"), WAYS)
@pytest.mark.parametrize("name", ["CH3CH2OH", "N2"])  # all pairs of species, or few of them
def test_all_ways_to_multiply_agree(variant, way, name, monkeypatch):
    fitted, frames = molecular(variant).fitted, [molecule(name)]

    def found(way):
        monkeypatch.setattr(ScalePotential, "_quickest", lambda self, n, c: getattr(self, way))
        return derivatives(make_potential(fitted, fitted.weights), frames, strain=True)

    fast, by_definition = found(way), found("_by_representatives")
    for array in ("energies", "forces", "virials"):
        assert_same(getattr(fast, array), getattr(by_definition, array), 1e-9)


@pytest.mark.parametrize(
    ("n", "q", "way"),
    [(64, 192, "forms"), (24, 1026, "representatives"), (64, 1026, "products")],
)
def test_matrices_of_all_members_must_fit_and_pay_off(n, q, way, monkeypatch):
    fitted = molecular("ζ = 2").fitted
    (scale,) = make_potential(fitted, fitted.weights).scales
    scale = replace(scale, representatives=np.zeros((1000, q)), weights=np.zeros((1000, 16)))
    assert scale._quickest(n, q) == getattr(scale, f"_by_{way}")
    monkeypatch.setattr(potential, "_ROOM", 0.0)
    assert scale._quickest(n, q) == scale._by_representatives


def test_features_that_are_the_same_count_once_and_change_no_kernel():
    fitted = molecular("two scales").fitted
    stored = fitted.representatives.astype(np.float64)
    for scale in scale_features(fitted.representation):
        raw, x = stored[:, scale.columns], scale.representatives(stored)
        n, l_max, n_species = scale.engine.scale.n_radial, scale.engine.scale.l_max, 5
        same, different = n * (n + 1) // 2 * n_species, n**2 * n_species * (n_species - 1) // 2
        assert x.shape[1] == scale.width == (same + different) * (l_max + 1) < raw.shape[1]
        np.testing.assert_allclose(x @ x.T, raw @ raw.T, atol=1e-6)  # they are stored in float32


@pytest.mark.slow  # times depend on who else uses the machine
@pytest.mark.parametrize("exponent", [1, 2, 3.5])
def test_members_take_little_longer_than_the_mean_alone(exponent):
    # docs/forces.md has 1.1 to 1.4. Whoever else uses the machine may get in the way once or twice.
    chosen = {"engine": "featomic", "smoothing": 0.5, "exponent": exponent}
    model = make_model(representation=chosen, n_representatives=800).fit(qm9(n=90))
    fitted, frames = model.fitted, qm9(n=96)[90:]
    mean = make_potential(fitted, fitted.mean_weights[:, None])
    derivatives(mean, frames), model.predict_forces(frames)
    ratios = []
    for _ in range(8):
        begin = process_time()
        derivatives(mean, frames)
        middle = process_time()
        assert model.predict_forces(frames).forces.std.shape == (sum(map(len, frames)), 3)
        ratios.append((process_time() - middle) / (middle - begin))
        if len(ratios) > 2 and np.median(ratios) < 1.4:
            return
    assert np.median(ratios) < 1.4, ratios


def test_features_are_compressed_if_there_are_forces():
    smooth = {"engine": "featomic", "smoothing": 0.5, "n_radial": 5, "l_max": 4}
    energies = make_model(representation=smooth, n_representatives=20).fit(qm9(n=30))
    assert energies.fitted.representation.n_features == 480
    assert "PCA of pairs of species" in energies.summary()
    whole = make_model(representation=smooth | {"compression": None}, n_representatives=20)
    assert whole.fit(qm9(n=30)).fitted.representation.n_features == 1875
    sharp = make_model(representation={"engine": "featomic"}, n_representatives=20)
    assert not sharp.fit(qm9(n=30)).fitted.representation.projections


def test_an_atom_with_no_features_at_all():
    # Without a weight of its own, an atom far from all others has no features to change.
    chosen = SMOOTH | {"center_weight": 0.0}
    model = make_model(representation=chosen, n_representatives=30, n_members=4).fit(qm9(n=40))
    found = model.predict_forces([Atoms("C")])
    np.testing.assert_array_equal(found.forces.members, 0)
    assert_forces_are_derivatives(model, some_molecule())


# --- error bars ---


def test_without_training_on_forces_they_are_scaled_as_the_energy_is():
    model = molecular("ζ = 2")
    found = model.predict_forces([some_molecule(), molecule("CH4")])
    for energy, forces, _ in found:
        factor = energy.std / energy.uncalibrated.std
        np.testing.assert_allclose(forces.std, factor * forces.uncalibrated.std, rtol=1e-9)
        np.testing.assert_allclose(forces.mean, forces.uncalibrated.mean, atol=1e-9)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_far_from_the_training_set_energies_are_finite_and_error_bars_large(factor):
    model, frames = molecular("ζ = 2, 16 members"), qm9(n=70)[50:]
    far = [Atoms(atoms.numbers, factor * atoms.positions) for atoms in frames]
    usual, strange = model.predict_forces(frames), model.predict_forces(far)
    assert np.all(np.isfinite(strange.forces.members))
    assert np.median(strange.energy.std) > 3 * np.median(usual.energy.std)


def test_an_atom_without_neighbours_feels_no_force():
    alone = Atoms("CHO", [[0, 0, 0], [30, 0, 0], [0, 30, 0]])
    found = molecular("ζ = 2").predict_forces([alone])
    np.testing.assert_array_equal(found.forces.members, 0)


# --- what has no forces ---


def test_what_has_no_forces_is_refused(energy_model, shift_model, molecules):
    with pytest.raises(InputError, match=r"engine.*'dscribe'.*'featomic'"):
        energy_model.predict_forces(molecules[:1])
    with pytest.raises(InputError, match=r"kind.*'atomic'.*'extensive'"):
        shift_model.predict_forces(molecules[:1])
    model = molecular("ζ = 2")
    with pytest.raises(InputError, match=r"frames.*no structures"):
        model.predict_forces([])
    with pytest.raises(InputError, match="frames"):
        model.predict_forces(molecules[0])
    with pytest.raises(InputError, match="known species"):
        model.predict_forces([molecule("SiH4")])
    close = Atoms("H2", [[0, 0, 0], [0, 0, 0.01]])
    with pytest.raises(InputError, match=r"frames\[1\].*apart"):
        model.predict_forces([some_molecule(), close])


def test_stress_needs_a_volume():
    model = crystalline("ζ = 2")
    slab = fcc111("Cu", (1, 1, 2))
    slab.symbols[:] = ["Na", "Cl"]
    with pytest.raises(InputError, match=r"frames\[1\].cell.*volume"):
        model.predict_forces([some_crystal(), slab], stress=True)


def test_units_and_targets_are_those_of_the_energy():
    model = molecular("ζ = 2")
    assert model.settings.target == ENERGY
    found = model.predict_forces([some_molecule()])
    assert found.forces.shape == (6, 3)
    assert found.energy.shape == (1,)
