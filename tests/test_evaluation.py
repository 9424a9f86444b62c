"""Evaluation of models: scores of all calibrations, and only of what has a reference value."""

import os
from pathlib import Path

import numpy as np
import pytest
from atomistic_fixtures import ENERGY, copies, reference_values
from checks import rejects

from qualms import AtomisticModel, Prediction, score
from qualms.atomistic.bulk import Output, predict_batches
from qualms.atomistic.evaluation import evaluate, find_references, kernel_components
from qualms.atomistic.structures import read_frames
from qualms.ensembles import apply_calibration, calibrate_ensemble, evaluate_ensemble, read_ensemble
from qualms.ensembles.calibration_file import make_document
from qualms.evaluation import Evaluation, check_errors, energy_factor
from qualms.io.predictions import open_writer
from qualms.report.assessment import assess

#: Molecular crystals with chemical shieldings; by default beside the checkout.
CRYSTALS = Path(__file__).parents[2] / "shared/data/csd/CSD-1000R_500.extxyz.gz"
CRYSTALS = Path(os.environ.get("QUALMS_CSD", CRYSTALS))
SCORES = [
    "raw",
    "linear (out-of-bag)",
    "power (out-of-bag)",
    "student (out-of-bag)",
    "shrinkage (out-of-bag)",
    "sources (out-of-bag)",
    "GPR PP",
    "GPR PP, posterior part",
]


def test_every_calibration_is_scored(molecules, energy_model):
    test = copies(molecules[120:160])
    del test[5].info[ENERGY]
    found = evaluate(energy_model, test)
    assert set(found) == {"energy"}
    result = found["energy"]
    assert list(result.scores) == SCORES
    assert (result.target, result.quantity, result.units) == (ENERGY, "energy", "eV/atom")
    assert (len(result), result.n_structures, result.n_unlabelled) == (39, 39, 1)
    labelled = [atoms for i, atoms in enumerate(test) if i != 5]
    n_atoms = [len(atoms) for atoms in labelled]
    np.testing.assert_array_equal(result.structure, [i for i in range(40) if i != 5])
    np.testing.assert_allclose(result.y * n_atoms, reference_values(labelled))
    expected = energy_model.predict(labelled)
    np.testing.assert_allclose(result.prediction.mean * n_atoms, expected.mean)
    np.testing.assert_allclose(result.prediction.std * n_atoms, expected.std)
    own = result.scores["sources (out-of-bag)"]
    assert own.log_likelihood == pytest.approx(score(result.y, result.prediction).log_likelihood)
    by_other = energy_model.with_calibration("linear").predict(labelled)
    expected = score(reference_values(labelled), by_other).sharpness
    per_structure = evaluate(energy_model, test, per="structure")["energy"]
    assert per_structure.scores["linear (out-of-bag)"].sharpness == pytest.approx(expected)
    mean, std = energy_model.predict_pp(labelled)
    z = (mean / n_atoms - result.y) / (std / n_atoms)
    pp = -np.mean(0.5 * z**2 + np.log(std / n_atoms) + 0.5 * np.log(2 * np.pi))
    assert result.scores["GPR PP"].log_likelihood == pytest.approx(pp)


def test_only_labelled_atoms_are_scored(molecules, shift_model):
    test = copies(molecules[120:140])
    test[0].arrays["shift"][:] = np.nan
    for atoms in test[1:]:
        hydrogen = np.flatnonzero(atoms.numbers == 1)
        atoms.arrays["shift"][hydrogen[1::2]] = np.nan
    y = np.concatenate([a.arrays["shift"][a.numbers == 1] for a in test])
    result = evaluate(shift_model, test)["energy"]
    known = np.isfinite(y)
    np.testing.assert_array_equal(result.y, y[known])
    expected = shift_model.predict(test)[known]
    np.testing.assert_allclose(
        result.prediction.mean, expected.mean, atol=1e-6 * expected.std.min()
    )
    assert result.n_unlabelled == np.count_nonzero(~known)
    for value, structure, atom in zip(result.y, result.structure, result.atom, strict=True):
        assert test[structure].arrays["shift"][atom] == value


def test_forces_and_stresses_are_scored_by_component(alloys, force_model):
    test = copies(alloys[26:])
    test[0].arrays["force"][1] = np.nan
    del test[1].arrays["force"]
    del test[2].info["virtual"]
    del test[3].info["energy"]
    found = evaluate(force_model, test)
    assert {name: len(one) for name, one in found.items()} == {
        "energy": 9,
        "forces": 10 * 12 - 3 - 12,
        "stress": 9 * 6,
    }
    assert [one.n_unlabelled for one in found.values()] == [1, 15, 6]
    assert [one.units for one in found.values()] == ["eV/atom", "eV/Å", "eV/Å³"]
    assert [one.target for one in found.values()] == ["energy", "force", "virtual"]
    forces, stress = found["forces"], found["stress"]
    for i in range(0, len(forces), 7):
        atoms = test[forces.structure[i]]
        assert atoms.arrays["force"][forces.atom[i], forces.component[i]] == forces.y[i]
    predicted = force_model.predict(test, stress=True, forces=True)
    known = [i for i in range(10) if i != 2]
    expected = predicted.stress[known]
    # Weights of posterior members are large and cancel: rounding depends on the batch.
    atol = 1e-6 * expected.std.min()
    members = stress.prediction.members.reshape(9, 6, -1)
    np.testing.assert_allclose(members, expected.members, atol=atol)
    np.testing.assert_allclose(stress.y.reshape(9, 6), [test[i].info["virtual"] for i in known])
    assert [*stress.component_names] == ["xx", "yy", "zz", "yz", "xz", "xy"]
    for one in (forces, stress):
        own = one.scores["sources (out-of-bag)"].log_likelihood
        assert own == pytest.approx(score(one.y, one.prediction).log_likelihood)


def test_references_are_checked_before_training(molecules, energy_model):
    test = copies(molecules[120:130])
    del test[0].info[ENERGY]
    found = find_references(test, energy_model.settings, [1, 6, 7, 8, 9])
    assert len(found["energy"].y) == 9
    test[4].numbers[0] = 17
    with rejects("frames"):
        find_references(test, energy_model.settings, [1, 6, 7, 8, 9])
    test[4].positions[:] = 0.0
    with rejects("frames[4]"):
        evaluate(energy_model, test)


def test_other_units(molecules, energy_model):
    test = molecules[120:150]
    own = evaluate(energy_model, test)["energy"]
    found = evaluate(energy_model, test, units="meV", per="structure")["energy"]
    sizes = np.array([len(atoms) for atoms in test])
    assert (own.units, found.units) == ("eV/atom", "meV")
    np.testing.assert_allclose(found.y, [1000 * atoms.info[ENERGY] for atoms in test])
    np.testing.assert_allclose(found.prediction.std, 1000 * sizes * own.prediction.std)
    np.testing.assert_allclose(found.y / found.factor, own.y / own.factor)
    for name, scores in own.scores.items():
        shifted = scores.log_likelihood - np.mean(np.log(1000 * sizes))
        assert found.scores[name].log_likelihood == pytest.approx(shifted)
        assert found.scores[name].coverage_68 == scores.coverage_68
    for parameter, options in (("per", {"per": "mole"}), ("in_units", {"units": "furlong"})):
        with rejects(parameter):
            evaluate(energy_model, test, **options)
    assert energy_factor("kcal/mol/atom", "eV") == (pytest.approx(0.0433641), "eV/atom")
    with rejects("in_units"):
        energy_factor("", "meV")


def test_structures_out_of_distribution_are_counted(molecules, energy_model):
    test = copies(molecules[120:150])
    for atoms in test[:4]:
        atoms.positions *= 0.6
    found = evaluate(energy_model, test)["energy"]
    np.testing.assert_array_equal(found.extrapolates, energy_model.predict(test).extrapolates)
    assert found.n_extrapolating >= 4
    assert len(found.remarks()) == 1
    test[7].numbers[0] = 17
    with rejects("frames"):
        evaluate(energy_model, test)
    found = evaluate(energy_model, test, unknown_species="skip")["energy"]
    assert (len(found), found.n_unknown) == (29, 1)
    assert 7 not in found.structure


# --- the type itself ---


def test_points_of_an_evaluation_can_be_chosen(molecules):
    rng = np.random.default_rng(0)
    whole = Evaluation(
        target="u",
        y=rng.normal(size=6),
        prediction=Prediction(rng.normal(size=(6, 4))),
        structure=[0, 0, 1, 1, 2, 2],
        atom=[0, 1] * 3,
        frames=molecules[:3],
        scores={"raw": None},
    )
    np.testing.assert_allclose(whole.residuals, whole.y - whole.prediction.mean)
    part = whole.some(whole.structure > 0)
    assert (len(part), part.n_structures, part.scores) == (4, 2, {})
    np.testing.assert_array_equal(part.prediction.members, whole.prediction.members[2:])
    np.testing.assert_array_equal(part.atom, [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("y", {"y": np.ones((3, 1))}),
        ("y", {"y": [1.0, np.nan, 2.0]}),
        ("prediction", {"prediction": Prediction(np.ones((2, 4)))}),
        ("structure", {"structure": [0, 1]}),
        ("structure", {"structure": [0.0, 1.0, 2.0]}),
        ("structure", {"structure": [0, 1, 3], "frames": True}),
        ("atom", {"atom": [0, 0, 99], "frames": True}),
        ("component", {"component": [0, 1]}),
    ],
)
def test_inconsistent_evaluations(molecules, parameter, values):
    given = {"target": "u", "y": np.arange(3.0), "structure": [0, 1, 2]}
    given["prediction"] = Prediction(np.random.default_rng(0).normal(size=(3, 4)))
    if values.get("frames"):
        values = values | {"frames": molecules[:3]}
    with rejects(parameter):
        Evaluation(**(given | values))


# --- a public data set that does not come with the package ---


@pytest.mark.slow
@pytest.mark.skipif(not CRYSTALS.exists(), reason=f"needs CSD-1000R: QUALMS_CSD, or {CRYSTALS}")
def test_shieldings_of_new_crystals():
    crystals = read_frames(CRYSTALS)
    chosen = np.random.default_rng(0).permutation(len(crystals))[:150]
    train, test = ([crystals[i] for i in part] for part in (chosen[:120], chosen[120:]))
    given = {"species": "H", "representation": "nmr", "n_representatives": 1000, "units": "ppm"}
    found = evaluate(AtomisticModel("CS_total", "atomic", **given).fit(train), test)["energy"]
    own = found.scores["student (out-of-bag)"]
    assert own.rmse < 0.3 * np.std(found.y)
    assert 0.6 < own.coverage_68 < 0.8


def test_kernel_principal_components(molecules, energy_model):
    frames, model = molecules[:40], energy_model
    found = np.concatenate(kernel_components(model, frames))
    assert found.shape == (40, 2)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-9)
    assert abs(np.corrcoef(found.T)[0, 1]) < 1e-6
    # The same as the eigenvectors of the centred kernel between structures.
    basis = model.fitted.basis
    K_XM = np.concatenate([chunk.rows() for chunk in model.chunks(frames)])
    K = K_XM @ np.linalg.pinv(basis.environment_rows(basis.representatives), rcond=1e-9) @ K_XM.T
    centering = np.eye(40) - 1 / 40
    values, vectors = np.linalg.eigh(centering @ K @ centering)
    expected = vectors[:, [-1, -2]] * np.sqrt(values[[-1, -2]])
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-3 * np.abs(found).max())
    # The order of structures does not matter.
    again = np.concatenate(kernel_components(model, frames[::-1]))[::-1]
    np.testing.assert_allclose(again, found, atol=1e-6)


@pytest.mark.parametrize("suffix", ["xyz", "csv", "parquet", "npz"])
@pytest.mark.parametrize("method", ["sources", "student"])
def test_degrees_of_freedom_are_those_of_the_model(
    molecules, energy_model, tmp_path, method, suffix
):
    """Also those of predictions in files, until these are calibrated again."""
    path, output = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    test, model = molecules[120:150], energy_model.with_calibration(method)
    expected = model.predict(test).dof
    assert expected > 2
    of_model = evaluate(model, test, per="structure")["energy"]
    assert of_model.prediction.dof == expected
    (batch,) = predict_batches(model, enumerate(test), Output())
    batch.arguments["extra"][f"REF_{ENERGY}"] = reference_values(test).tolist()
    with open_writer(path, ENERGY, kind="structure", ensemble=False) as writer:
        writer.write(**batch.arguments)
    points = read_ensemble(path, ENERGY)
    found = evaluate_ensemble(points)
    assert found.prediction.dof == expected
    dofs = [[s.dof for s in assess(evaluation).scores.values()] for evaluation in (found, of_model)]
    assert dofs[0][-1] == dofs[1][-1] == expected
    document = make_document(calibrate_ensemble(points, "linear"), points, None)
    apply_calibration(document, path, output)
    assert read_ensemble(output, ENERGY).dof is None


def test_degrees_of_freedom_of_forces_are_in_files(alloys, force_model, tmp_path):
    output, test = Output(forces=True, stress=True), copies(alloys[26:])
    test[0].cell, test[0].pbc = None, False
    with open_writer(tmp_path / "a.npz", "energy", kind="structure", ensemble=False) as writer:
        for batch in predict_batches(force_model, enumerate(test), output):
            writer.write(**batch.arguments)
    arrays, predicted = (
        np.load(tmp_path / "a.npz"),
        force_model.predict(test, forces=True, stress=True),
    )
    for name in ("energy", "forces", "stress"):
        assert set(arrays[f"{name}_dof"]) == {getattr(predicted, name).dof}


def test_a_bias_of_all_points_or_of_a_group_is_found():
    rng, structure = np.random.default_rng(0), np.arange(400)
    z, kinds = rng.normal(size=400), {"composition": (structure % 4).astype(str)}
    std = np.exp(rng.normal(size=400))
    assert not check_errors(z, std, structure, kinds)
    assert len(check_errors(z + 3, std, structure, kinds)) == 1
    (of_one,) = check_errors(z + 2 * (structure % 4 == 1), std, structure, kinds)
    assert "composition: 1 (mean error +" in of_one
    # The errors of one structure are one error.
    assert not check_errors(z + 3, std, structure // 100, kinds)


def test_groups_without_a_bias_are_seldom_said_to_be_biased():
    """Many small groups are many tests."""
    rng, structure = np.random.default_rng(0), np.arange(1000)
    kinds = {"composition": (structure // 20).astype(str)}
    found = [
        check_errors(rng.normal(size=1000), np.ones(1000), structure, kinds) for _ in range(100)
    ]
    assert sum(map(bool, found)) <= 3
    biased = rng.normal(size=1000) + 2.0 * (structure // 20 == 7)
    assert check_errors(biased, np.ones(1000), structure, kinds)
