"""Models of energies and forces: labels, rows, solutions, noises and error bars."""

import re
import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import oracle_forces
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import Interrupt, copies, labelled_by_emt, make_model
from threadpoolctl import threadpool_limits

from qualms import AtomisticModel, InputError, Prediction, QualmsWarning, score
from qualms.atomistic import memory as plan
from qualms.atomistic.evaluation import evaluate_forces
from qualms.atomistic.forces import (
    derivative_rows,
    derivatives,
    fill_rows,
    make_potential,
    scale_rows,
)
from qualms.atomistic.label_checks import factor_between, order_of_shear
from qualms.atomistic.labels import ForceLabels, find_forces, find_stresses
from qualms.atomistic.memory import make_plan
from qualms.atomistic.settings import SMOOTHING, make_settings
from qualms.atomistic.structures import VOIGT
from qualms.atomistic.training import fit_joint_members, fit_joint_model
from qualms.features.gradients import batches

SMOOTH = {"cutoff": 3.8, "n_radial": 3, "l_max": 2, "smoothing": 0.8}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with threadpool_limits(1):
        yield


@cache
def alloys(n=36, seed=0):
    """Small cells of Cu and Al, with energies, forces and stresses by EMT; not to be changed."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(n):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[: 1 + i % 2] = "Al"
        atoms.set_cell(atoms.cell.array * (1 + 0.02 * rng.normal()), scale_atoms=True)
        atoms.positions += rng.normal(scale=0.08, size=(4, 3))
        frames.append(labelled_by_emt(atoms))
    return frames


def model(**settings):
    given = {"representation": SMOOTH, "n_representatives": 60, "n_members": 8, "forces": "force"}
    return make_model("energy", **(given | settings))


@cache
def trained():
    return model(units="eV").fit(alloys()[:26])


def errors(fitted_model, frames, *, stress=False):
    """Root mean squared errors of energies per atom, forces, and stresses."""
    found = fitted_model.predict_forces(frames, stress=stress)
    energy = found.energy.mean - [atoms.info["energy"] for atoms in frames]
    forces = found.forces.mean - np.concatenate([atoms.arrays["force"] for atoms in frames])
    rms = [np.sqrt(np.mean(energy**2)) / 4, np.sqrt(np.mean(forces**2))]
    if stress:
        z = found.stress.mean - [atoms.info["virtual"] for atoms in frames]
        rms.append(np.sqrt(np.mean(z**2)))
    return rms


# --- rows ---

ROWS = {
    "ζ = 2": SMOOTH,
    "ζ = 3.5": SMOOTH | {"exponent": 3.5},
    "compressed": SMOOTH | {"compression": {"n_features": 12}},
    "ζ = 3.5, compressed": SMOOTH | {"exponent": 3.5, "compression": {"n_features": 6}},
    "not normalised": SMOOTH | {"normalize": False},
    "two scales": {
        "scales": (
            {"cutoff": 3.0, "smoothing": 0.5, "n_radial": 3, "l_max": 2},
            {"cutoff": 4.5, "smoothing": 1.0, "n_radial": 2, "l_max": 3, "weight": 2.0},
        ),
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_the_derivatives_of_the_kernel_with_each_representative(name):
    fitted = model(representation=ROWS[name], n_representatives=5).fit(alloys()[:12]).fitted
    r = len(fitted.weights)
    # Members that have one representative each, and nothing else.
    baseline = replace(fitted.baseline, members=np.zeros((2, r)))
    bare = replace(
        fitted, weights=np.eye(r), intercepts=np.zeros(r), baseline=baseline, kernel_scale=1.0
    )
    atoms = alloys()[20]
    rows = derivative_rows(
        scale_rows(fitted.representation, fitted.representatives),
        next(batches([atoms])),
        strain=True,
    )
    energies = oracle_forces.member_energies(bare, atoms)
    np.testing.assert_allclose(rows.energies[0], energies, rtol=1e-10)
    for atom, axis in ((0, 0), (1, 2), (3, 1)):
        change = oracle_forces.derivative(
            lambda by, atom=atom, axis=axis: oracle_forces.member_energies(
                bare, oracle_forces.moved(atoms, atom, axis, by)
            ),
            5e-4,
        )
        np.testing.assert_allclose(rows.forces[atom, axis], -change, rtol=1e-6, atol=1e-8)
    for v in (0, 4):
        a, b = VOIGT[0][v], VOIGT[1][v]
        change = oracle_forces.derivative(
            lambda by, a=a, b=b: oracle_forces.member_energies(
                bare, oracle_forces.strained(atoms, a, b, by)
            ),
            5e-4,
        )
        np.testing.assert_allclose(rows.virials[0, v], change, rtol=1e-6, atol=1e-7)


def test_rows_times_weights_are_what_is_predicted():
    fitted, frames = trained().fitted, alloys()[26:32]
    found = derivatives(make_potential(fitted, fitted.weights), frames, strain=True)
    rows = derivative_rows(
        scale_rows(fitted.representation, fitted.representatives),
        next(batches(frames)),
        strain=True,
    )
    weights = fitted.weights * fitted.kernel_scale
    np.testing.assert_allclose(rows.forces @ weights, found.forces, atol=1e-8)
    np.testing.assert_allclose(rows.virials @ weights, found.virials, atol=1e-7)


def test_labelled_rows_are_in_the_order_of_the_labels(monkeypatch):
    fitted, frames = trained().fitted, alloys()[:5]
    forces = [atoms.arrays["force"].copy() for atoms in frames]
    forces[1][:] = np.nan
    forces[3][2, 1] = np.nan
    virials = np.array([atoms.info["virtual"] for atoms in frames])
    virials[2:] = np.nan
    labels = ForceLabels(forces, virials)
    assert labels.n_without == 1
    assert labels.n_with_virial == 2
    assert len(labels.y) == 4 * 12 - 1 + 12
    np.testing.assert_array_equal(labels.structure, np.repeat(np.arange(5), [18, 6, 12, 11, 12]))
    np.testing.assert_array_equal(np.flatnonzero(labels.is_virial), [*range(12, 24)])
    scales = scale_rows(fitted.representation, fitted.representatives)
    energies, others = np.ones((5, len(fitted.weights))), np.zeros((59, len(fitted.weights)))
    fill_rows(energies, others, frames, labels, scales)
    expected = []
    for s, atoms in enumerate(frames):
        rows = derivative_rows(scales, next(batches([atoms])), strain=True)
        np.testing.assert_allclose(energies[s], rows.energies[0] / 4, atol=1e-12)
        whole = np.concatenate([rows.forces.reshape(12, -1), rows.virials[0] / 4])
        expected.append(whole[np.isfinite(np.concatenate([forces[s].ravel(), virials[s]]))])
    np.testing.assert_allclose(others, np.concatenate(expected), atol=1e-11)
    # Structures in parts give the same.
    monkeypatch.setattr(batches, "__defaults__", (3,))
    again = np.zeros_like(others)
    fill_rows(energies, again, frames, labels, scales)
    np.testing.assert_allclose(again, others, atol=1e-11)


# --- solving ---


@pytest.mark.parametrize("noise_per", ["atom", "structure"])
def test_every_member_is_the_weighted_least_squares_solution_of_its_structures(noise_per):
    noise, forces_noise = 1e-3, 3e-2
    frames = [twice(atoms) if i % 3 == 0 else atoms for i, atoms in enumerate(alloys()[:14])]
    found = model(
        noise=noise**2,
        forces_noise=forces_noise**2,
        noise_per=noise_per,
        baseline="none",
        n_representatives=25,
    ).fit(frames)
    fitted = found.fitted
    scales = scale_rows(fitted.representation, fitted.representatives)
    rows = derivative_rows(scales, next(batches(frames, 200)))
    M, sizes = len(fitted.representatives), np.array([len(atoms) for atoms in frames])
    K_E, K_F = rows.energies / sizes[:, None], rows.forces.reshape(-1, M)
    X = fitted.representatives.astype(float)
    K_MM = np.asarray(fitted.representation.kernel(X, X))
    y_E = np.array([atoms.info["energy"] for atoms in frames]) / sizes
    y_F = np.concatenate([atoms.arrays["force"].ravel() for atoms in frames])
    # Per structure: the same noise of the whole energy, that of a structure of mean size.
    noises = noise * (sizes.mean() / sizes if noise_per == "structure" else np.ones(14))
    # The prior that gives forces the variance that they have.
    L = np.linalg.cholesky(K_MM)
    prior = np.sum(y_F**2) / np.sum(np.linalg.solve(L, K_F.T) ** 2)
    new = derivative_rows(scales, next(batches(alloys()[30:33])))
    predicted = found.predict_forces(alloys()[30:33])
    for i in range(8):
        seen = fitted.membership[:, i].astype(bool)
        mine = np.repeat(seen, 3 * sizes)
        # Errors in units of their noise, and wᵀK_MMw in units of the prior, are least.
        A_E = K_E[seen] / noises[seen, None]
        A = np.concatenate([A_E, K_F[mine] / forces_noise, L.T / np.sqrt(prior)])
        b = np.concatenate([y_E[seen] / noises[seen], y_F[mine] / forces_noise, np.zeros(M)])
        w = np.linalg.lstsq(A, b, rcond=None)[0]
        np.testing.assert_allclose(
            predicted.energy.uncalibrated.members[:, i], new.energies @ w, rtol=1e-6
        )
        np.testing.assert_allclose(
            predicted.forces.uncalibrated.members[..., i], new.forces @ w, atol=1e-6
        )


def twice(atoms):
    """Two cells of a crystal, as one structure."""
    double = atoms.repeat((2, 1, 1))
    double.info["energy"] = 2 * atoms.info["energy"]
    return double


@pytest.mark.parametrize("subsample", [0.2, 0.5, 0.9])
def test_members_by_any_solver_are_those_of_the_direct_one(subsample):
    rng = np.random.default_rng(0)
    n, r, atoms = 60, 20, 4
    labels = ForceLabels([rng.normal(size=(atoms, 3)) for _ in range(n)], np.full((n, 6), np.nan))
    Phi = rng.normal(size=(n * (1 + 3 * atoms), r))
    energies = rng.normal(size=n)
    settings = make_settings({"target": "e", "forces": "f", "noise": 0.1, "forces_noise": 0.5})
    joint = fit_joint_model(Phi, energies, labels, np.arange(n), settings)
    counts = (rng.random((n, 5)) < subsample).astype(int)
    members = fit_joint_members(
        joint, Phi, np.repeat(energies[:, None], 5, 1), counts, centered=True
    )
    prior = joint.full.scale[0] ** 2
    for i in range(5):
        mine = counts[:, i].astype(bool)
        mean = energies[mine].mean()
        rows = np.concatenate([mine, np.repeat(mine, 3 * atoms)])
        y = np.concatenate([energies - mean, labels.y])[rows]
        weight = np.concatenate([np.full(n, 1 / 0.1), np.full(n * 3 * atoms, 1 / 0.5)])[rows]
        A = Phi[rows].T @ (weight[:, None] * Phi[rows]) + np.eye(r) / prior
        expected = np.linalg.solve(A, Phi[rows].T @ (weight * y))
        spread = members.weights[:, 0].std(axis=1).max()
        np.testing.assert_allclose(members.weights[:, 0, i], expected, atol=1e-2 * spread)
        assert members.intercepts[0, i] == pytest.approx(mean)


# --- learning ---


def test_forces_teach_energies_and_forces():
    known, new = alloys()[:20], alloys()[26:]
    alone = model(forces=None, representation=SMOOTH | {"engine": "featomic"}).fit(known)
    both = model().fit(known)
    assert errors(both, new)[0] < 0.5 * errors(alone, new)[0]
    assert errors(both, new)[1] < 0.5 * errors(alone, new)[1]


def test_stress_has_ase_s_sign_and_units_and_can_be_learned():
    known, new = alloys()[:20], alloys()[26:]
    with_stress = model(stress="virtual").fit(known)
    assert with_stress.record.n_virial_rows == 6 * 20
    of_truth = np.std([atoms.info["virtual"] for atoms in new])
    assert errors(with_stress, new, stress=True)[2] < 0.05 * of_truth
    only = model(forces=None, stress="virtual").fit(known)
    assert errors(only, new, stress=True)[2] < 0.2 * of_truth
    assert only.fitted.forces_calibration is None


def test_error_bars_of_energies_and_forces_hold_and_differ():
    found = model(n_members=16).fit(alloys()[:26])
    new = alloys(40, seed=5)
    predicted = found.predict_forces(new)
    truth = np.concatenate([atoms.arrays["force"] for atoms in new])
    flat = Prediction(predicted.forces.members.reshape(-1, 16))
    assert 0.5 < score(truth.ravel(), flat).coverage_68 < 0.85
    assert found.fitted.forces_calibration is not None
    assert found.fitted.forces_calibration != found.fitted.calibration
    assert found.fitted.forces_calibration.n_points == 26 * 12
    spread = predicted.forces.uncalibrated
    own = found.fitted.forces_calibration.apply(spread)
    np.testing.assert_allclose(predicted.forces.std, own.std)


def test_evaluation_of_forces_counts_components():
    frames = copies(alloys()[26:])
    frames[0].arrays["force"][1] = np.nan
    del frames[1].arrays["force"]
    found = evaluate_forces(trained(), frames)
    assert found.units == "eV/Å"
    assert len(found.y) == 10 * 12 - 3 - 12
    assert found.n_unlabelled == 15
    assert {"raw", "student (internal)"} <= set(found.rows)
    expected = score(found.y, found.prediction)
    assert found.rows["student (internal)"].coverage_68 == pytest.approx(expected.coverage_68)


# --- what there is of labels ---


def test_components_without_a_label_are_left_out():
    frames = copies(alloys()[:16])
    for i, atoms in enumerate(frames):
        atoms.arrays["force"][i % 4, 1] = np.nan
    del frames[3].arrays["force"]
    found = model().fit(frames)
    assert found.record.n_force_rows == 16 * 12 - 12 - 15
    assert found.record.n_without_forces == 1
    assert "1 structures without" in found.summary()


def test_forces_without_an_energy_are_not_used_and_that_is_said():
    frames = copies(alloys()[:16])
    del frames[2].info["energy"]
    with pytest.warns(QualmsWarning, match=r"1 structures \(first frames\[2\]\)"):
        found = model().fit(frames)
    assert found.record.n_structures == 15
    assert found.record.n_force_rows == 15 * 12


def test_forces_of_calculators_are_found():
    frames = []
    for atoms in copies(alloys()[:14]):
        atoms.calc = SinglePointCalculator(
            atoms,
            energy=atoms.info.pop("energy"),
            forces=atoms.arrays.pop("force"),
            stress=atoms.info.pop("virtual"),
        )
        frames.append(atoms)
    by_calculator = model(forces="forces", stress="stress").fit(frames)
    plain = model(stress="virtual").fit(alloys()[:14])
    np.testing.assert_allclose(
        by_calculator.predict(alloys()[20:]).members, plain.predict(alloys()[20:]).members
    )


def test_a_misspelt_key_gets_those_that_look_like_forces():
    frames = copies(alloys()[:5])
    for atoms in frames:
        atoms.arrays["velocity"] = np.zeros((4, 3))
        atoms.arrays["charge"] = np.zeros(4)
    with pytest.raises(InputError, match=r"'forced'.*'force', 'velocity'.*mean 'force'") as caught:
        find_forces(frames, "forced")
    assert "charge" not in str(caught.value)
    with pytest.raises(InputError, match=r"stress.*'virtaul'.*mean 'virtual'") as caught:
        find_stresses(frames, "virtaul")
    # A single number is no stress.
    assert "energy" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros((4, 2)), r"shape \(4, 2\).*\(4, 3\)"),
        (np.zeros(4), r"shape \(4,\).*\(4, 3\)"),
        (np.full((4, 3), np.inf), "infinite"),
        (np.full((4, 3), "x"), "str"),
    ],
)
def test_forces_of_another_shape_are_refused(value, match):
    frames = copies(alloys()[:3])
    del frames[1].arrays["force"]
    frames[1].arrays["force"] = value
    with pytest.raises(InputError, match=rf"frames\[1\].arrays\['force'\].*{match}"):
        find_forces(frames, "force")


def test_a_stress_may_be_a_matrix_but_must_be_symmetric():
    frames = copies(alloys()[:3])
    for atoms in frames[:2]:
        xx, yy, zz, yz, xz, xy = atoms.info["virtual"]
        atoms.info["virtual"] = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    frames[1].info["virtual"] = frames[1].info["virtual"].ravel()
    frames[2].cell[2] = 0.0
    frames[2].pbc = [True, True, False]
    with pytest.warns(QualmsWarning, match=r"1 structures \(first frames\[2\]\).*no cell"):
        found = find_stresses(frames, "virtual")
    assert list(found) == [0, 1]
    for i in found:
        np.testing.assert_allclose(found[i], alloys()[i].info["virtual"])
    frames[0].info["virtual"] = np.arange(9.0).reshape(3, 3)
    with pytest.raises(InputError, match="symmetric"):
        find_stresses(frames, "virtual")
    frames[0].info["virtual"] = np.arange(5.0)
    with pytest.raises(InputError, match="6 numbers"):
        find_stresses(frames, "virtual")


# --- signs and units ---


def relabelled(*, forces=1.0, stress=1.0):
    frames = copies(alloys()[:24])
    for atoms in frames:
        atoms.arrays["force"] *= forces
        atoms.info["virtual"] = atoms.info["virtual"] * stress
    return frames


@pytest.mark.parametrize(
    ("factors", "match"),
    [
        ({"forces": -1.0}, r"forces='force'.*opposite sign"),
        ({"forces": 23.06}, r"forces='force'.*2\d\.?\d? times.*kcal/mol/Å"),
        ({"forces": 1 / 51.42}, r"forces='force'.*Hartree/Bohr"),
        ({"stress": -1.0}, r"stress='virtual'.*opposite sign.*positive under tension"),
        ({"stress": 160.2}, r"stress='virtual'.*GPa"),
        ({"stress": -1602.0}, r"stress='virtual'.*opposite sign.* and .*kbar"),
    ],
)
def test_labels_of_another_sign_or_unit_than_the_energies_say_are_doubted(factors, match):
    with pytest.warns(QualmsWarning) as caught:
        model(stress="virtual").fit(relabelled(**factors))
    (said,) = [w for w in caught if "the energies say" in str(w.message)]
    assert re.search(match, str(said.message))


def test_labels_are_not_doubted_where_energies_do_not_tell():
    rng = np.random.default_rng(0)
    frames = relabelled()
    for atoms in frames:
        atoms.info["energy"] = rng.normal()
    model().fit(frames)  # warnings are errors
    few = relabelled(forces=-1.0)[:8]
    model(n_representatives=10).fit(few)


@pytest.mark.parametrize("factor", [1.0, 0.02, -3.0])
def test_the_factor_is_between_the_two_regressions(factor):
    rng = np.random.default_rng(1)
    truth = rng.normal(size=4000)
    noisy = factor_between(factor * truth, truth + 0.5 * rng.normal(size=4000))
    shrunk = factor_between(factor * (truth + 0.5 * rng.normal(size=4000)), truth)
    for found in (noisy, shrunk):
        low, high = sorted([abs(found.a), abs(found.b)])
        assert 0.97 * low < abs(factor) < 1.03 * high
        assert found.is_one == (factor == 1)
    assert factor_between(np.zeros(3), np.ones(3)).is_one


def test_a_key_that_says_virial_is_refused():
    frames = relabelled()
    for atoms in frames:
        atoms.info["REF_virial"] = -atoms.info["virtual"] * atoms.get_volume()
        atoms.info["virial_stress"] = atoms.info["virtual"]
    with pytest.raises(InputError, match=r"'REF_virial'.*Convert it.*/ atoms.get_volume\(\)"):
        find_stresses(frames, "REF_virial")
    assert len(find_stresses(frames, "virial_stress")) == len(frames)


def test_forces_that_are_all_zero_are_doubted():
    with pytest.warns(QualmsWarning) as caught:
        model().fit(relabelled(forces=0.0))
    said = [str(warning.message) for warning in caught]
    assert any("All forces in 'force' are zero" in text for text in said)
    assert not any("All targets" in text for text in said)


@pytest.mark.parametrize(("value", "match"), [(0.0, "are zero"), (0.01, "are the same")])
def test_stresses_that_are_all_the_same_are_doubted(value, match):
    frames = relabelled()
    for atoms in frames:
        atoms.info["virtual"] = np.full(6, value)
    with pytest.warns(QualmsWarning) as caught:
        model(stress="virtual").fit(frames)
    assert any(f"All stresses in 'virtual' {match}" in str(w.message) for w in caught)


def test_stresses_in_another_order_are_doubted():
    frames = relabelled()
    for atoms in frames:  # xx, yy, zz, xy, yz, zx
        atoms.info["virtual"] = atoms.info["virtual"][[0, 1, 2, 5, 3, 4]]
    with pytest.warns(QualmsWarning) as caught:
        model(stress="virtual").fit(frames)
    (said,) = [w for w in caught if "order xx, yy, zz, xy, yz, xz." in str(w.message)]
    assert said.filename == __file__  # where `fit` is called


def test_an_order_is_believed_only_if_it_is_clear():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(200, 6))
    labels = truth[:, [0, 1, 2, 4, 3, 5]]
    labels[:5, 3] = np.nan
    assert order_of_shear(labels, truth) == ("xz", "yz", "xy")
    assert order_of_shear(truth, truth) == ("yz", "xz", "xy")
    noisy = truth + 3 * rng.normal(size=truth.shape)
    assert order_of_shear(labels, noisy) == ("yz", "xz", "xy")
    alike = np.repeat(truth[:, 3:4], 6, axis=1) + 0.1 * truth
    assert order_of_shear(alike[:, [0, 1, 2, 4, 3, 5]], alike) == ("yz", "xz", "xy")


@pytest.mark.parametrize("key", ["force", "positions"])
def test_forces_that_belong_to_nothing_are_doubted(key):
    frames = relabelled()
    of_others = [atoms.arrays["force"] for atoms in frames[1:] + frames[:1]]
    for atoms, forces in zip(frames, of_others, strict=True):
        atoms.arrays["force"] = forces
    with pytest.warns(QualmsWarning) as caught:
        model(forces=key).fit(frames)
    (said,) = [w for w in caught if "of the same energies, of the same" in str(w.message)]
    assert f"forces={key!r}" in str(said.message)
    assert said.filename == __file__


def test_forces_that_are_flat_in_one_structure_are_refused():
    frames = relabelled()
    frames[3].info["REF_force"] = frames[3].arrays.pop("force").ravel()
    match = r"frames\[3\].info\['REF_force'\].*shape \(4, 3\).*reshape"
    with pytest.raises(InputError, match=match):
        model().fit(frames)


def test_no_labels_at_all():
    frames = copies(alloys()[:6])
    for atoms in frames:
        atoms.arrays["force"][:] = np.nan
    with pytest.raises(InputError, match=r"forces.*at least one structure"):
        model().fit(frames)


def test_settings_of_forces():
    settings = make_settings({"target": "e", "forces": "f"})
    assert settings.representation.resolved_engine == "featomic"
    assert [scale.smoothing for scale in settings.representation.scales] == [SMOOTHING]
    given = make_settings({"target": "e", "stress": "s", "representation": SMOOTH})
    assert [scale.smoothing for scale in given.representation.scales] == [0.8]
    assert make_settings(settings.model_dump()) == settings
    with pytest.raises(InputError, match=r"engine.*featomic"):
        make_settings({"target": "e", "forces": "f", "representation": {"engine": "dscribe"}})
    with pytest.raises(InputError, match=r"forces.*kind='intensive'.*extensive"):
        make_settings({"target": "e", "kind": "intensive", "forces": "f"})


def test_molecules_and_isolated_atoms():
    frames = []
    rng = np.random.default_rng(0)
    for i in range(16):
        atoms = molecule(("H2O", "NH3", "CH4", "CO")[i % 4])
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        atoms.calc = EMT()
        atoms.info["energy"], atoms.arrays["force"] = (
            atoms.get_potential_energy(),
            atoms.get_forces(),
        )
        atoms.calc = None
        frames.append(atoms)
    for symbol in "HCNO":
        alone = Atoms(symbol, info={"energy": -1.0, "config_type": "isolated_atom"})
        alone.arrays["force"] = np.zeros((1, 3))
        frames.append(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(baseline="atoms").fit(frames)
    assert found.record.n_isolated == 4
    assert found.record.n_force_rows == 3 * sum(map(len, frames[:16]))
    np.testing.assert_array_equal(found.fitted.baseline.full, -1.0)


# --- files and plans ---


def test_a_model_of_forces_survives_its_file(tmp_path):
    path = tmp_path / "model.safetensors"
    trained().save(path)
    loaded = AtomisticModel.load(path, threads=1)
    new = alloys()[26:30]
    one = trained().predict_forces(new, stress=True)
    two = loaded.predict_forces(new, stress=True)
    for a, b in pairwise((one, two)):
        np.testing.assert_array_equal(a.energy.members, b.energy.members)
        np.testing.assert_array_equal(a.forces.members, b.forces.members)
        np.testing.assert_array_equal(a.stress.members, b.stress.members)
    np.testing.assert_array_equal(trained().predict_pp(new), loaded.predict_pp(new))
    np.testing.assert_array_equal(trained().predict(new).members, loaded.predict(new).members)
    assert loaded.summary() == trained().summary()


def test_predict_says_the_same_as_predict_forces():
    # Kernel rows of such models are float64 throughout: rounding of float32 would be amplified.
    new = alloys()[26:]
    np.testing.assert_allclose(
        trained().predict(new).members, trained().predict_forces(new).energy.members, rtol=1e-7
    )
    assert errors(trained(), new)[0] < 2e-3


def test_forces_of_a_model_that_learned_them_are_derivatives_of_its_energy():
    # Its weights are large and cancel, so that smaller steps would show rounding.
    fitted, atoms = trained().fitted, alloys()[30]
    found = trained().predict_forces([atoms]).forces.uncalibrated.members
    for atom, axis in ((0, 1), (2, 2), (3, 0)):
        expected = -oracle_forces.derivative(
            lambda by, atom=atom, axis=axis: oracle_forces.member_energies(
                fitted, oracle_forces.moved(atoms, atom, axis, by)
            ),
            2e-3,
        )
        np.testing.assert_allclose(found[atom, axis], expected, atol=1e-6 * np.abs(found).max())


def test_the_same_seed_gives_the_same_model():
    again = model(units="eV").fit(alloys()[:26])
    new = alloys()[26:28]
    np.testing.assert_array_equal(
        again.predict_forces(new).forces.members, trained().predict_forces(new).forces.members
    )


def test_the_plan_counts_the_rows_of_forces():
    plans = []
    model().fit(alloys()[:20], on_plan=lambda found, data: plans.append(found))
    model(forces=None).fit(alloys()[:20], on_plan=lambda found, data: plans.append(found))
    assert plans[0].n_rows == 20 * 13
    assert plans[1].n_rows == 20
    assert plans[0].seconds > plans[1].seconds
    sizes = {"n_features": 300, "n_raw_features": 1296, "n_representatives": 2000}
    sizes |= {"n_environments": 24_000, "n_members": 16, "n_workers": 1, "memory": "64GB"}
    energies = make_plan(n_rows=1000, **sizes)
    forces = make_plan(n_rows=73_000, n_pairs=400_000, **sizes)
    assert forces.memory > energies.memory + 8 * 72_000 * 2000
    assert forces.seconds > energies.seconds + 20


@pytest.mark.parametrize("mode", ["spill", "recompute"])
def test_wherever_features_live_the_model_is_the_same(mode, monkeypatch):
    monkeypatch.setattr(plan, "_choose", lambda *given: mode)
    found = model(units="eV").fit(alloys()[:26])
    new = alloys()[26:28]
    np.testing.assert_allclose(
        found.predict_forces(new).forces.members,
        trained().predict_forces(new).forces.members,
        atol=1e-6,
    )


def test_an_interrupted_run_goes_on(tmp_path):
    where = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        model(units="eV").fit(alloys()[:26], checkpoint=where, progress=Interrupt("Rows of forces"))
    found = model(units="eV").fit(alloys()[:26], checkpoint=where, resume=True)
    new = alloys()[26:28]
    np.testing.assert_array_equal(
        found.predict_forces(new).forces.members, trained().predict_forces(new).forces.members
    )
    assert not where.exists()


def test_other_labels_are_another_run(tmp_path):
    where = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        model().fit(alloys()[:26], checkpoint=where, progress=Interrupt("Rows of forces"))
    frames = copies(alloys()[:26])
    frames[5].arrays["force"][2, 1] += 0.1
    with pytest.raises(InputError, match="same data"):
        model().fit(frames, checkpoint=where, resume=True)


def test_copies_and_groups_are_in_or_out_together():
    frames = alloys()[:16]
    labels = [i // 2 for i in range(16)]
    found = model().fit(frames, labels)
    membership = found.fitted.membership
    np.testing.assert_array_equal(membership[::2], membership[1::2])
