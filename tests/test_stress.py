"""Stresses with error bars of their own: calibrated apart, kept with the model, judged."""

import json
import re
import warnings
from dataclasses import replace

import ase.io
import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import copies, labelled_by_emt
from test_forces_training import alloys, errors, model
from threadpoolctl import threadpool_limits

from qualms import AtomisticModel, InputError, Prediction, QualmsWarning, score
from qualms.ase import Calculator
from qualms.atomistic.evaluation import (
    evaluate_derivatives,
    evaluate_forces,
    evaluate_stress,
    unjudged,
)
from qualms.atomistic.labels import find_stresses
from qualms.atomistic.model import describe
from qualms.atomistic.model_file import FORMAT, PROTOCOL
from qualms.calibration.base import calibration_data
from qualms.calibration.fitting import fit_calibration, fit_internally
from qualms.cli.train import summary_document
from qualms.gp.ensemble import MIN_ABSENT
from qualms.io.tensors import Document, read_tensors, write_tensors


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def trained():
    return model(stress="virtual", n_members=16, units="eV").fit(alloys()[:26])


class Anything(Document, extra="allow"):
    """A document whose fields nobody looks at."""


def stresses(frames):
    return np.array([atoms.info["virtual"] for atoms in frames])


# --- calibration ---


def test_stress_is_calibrated_by_members_that_did_not_see_the_structure(trained):
    fitted, known = trained.fitted, alloys()[:26]
    said = trained.predict_forces(known, stress=True).stress.uncalibrated.members
    absent = np.repeat(fitted.membership == 0, 6, axis=0)
    data = calibration_data(stresses(known).ravel(), said.reshape(-1, 16), absent)
    for method in ("student", "linear"):
        expected = fit_internally(data, method)
        assert fitted.stress_calibrations[method].alpha == pytest.approx(expected.alpha, rel=1e-4)
    assert fitted.stress_calibration.n_points == 26 * 6
    assert fitted.stress_calibration != fitted.forces_calibration
    assert trained.record.stress_rmse == pytest.approx(np.sqrt(np.mean(data.residuals**2)))


def test_error_bars_of_stresses_hold(trained):
    new = alloys(40, seed=5)
    predicted = trained.predict_forces(new, stress=True).stress
    own = trained.fitted.stress_calibration.apply(predicted.uncalibrated)
    np.testing.assert_allclose(predicted.std, own.std)
    flat = Prediction(predicted.members.reshape(-1, 16))
    assert 0.5 < score(stresses(new).ravel(), flat).coverage_68 < 0.85


def test_a_model_that_saw_no_stress_scales_it_as_the_energy():
    found = model().fit(alloys()[:26])
    assert found.fitted.stress_calibration is None
    predicted = found.predict_forces(alloys()[26:], stress=True)
    factors = predicted.energy.std / predicted.energy.uncalibrated.std
    np.testing.assert_allclose(
        predicted.stress.std, predicted.stress.uncalibrated.std * factors[:, None]
    )


def test_too_few_stresses_are_scaled_as_energies_are_and_that_is_said():
    frames = copies(alloys()[:16])
    seen = model(subsample=0.8).fit(frames).fitted.membership > 0
    # All but two members at most saw this structure, and there is nothing to calibrate on.
    always = int(np.flatnonzero((~seen).sum(axis=1) < 3)[0])
    for i, atoms in enumerate(frames):
        if i != always:
            del atoms.info["virtual"]
    with pytest.warns(QualmsWarning, match="Stresses.*scaled as those of energies"):
        found = model(stress="virtual", subsample=0.8).fit(frames)
    assert found.record.n_virial_rows == 6
    assert found.record.n_without_stress == 15
    assert found.fitted.stress_calibrations == {}
    assert "stress' bars" not in found.summary()


def without(key, n, frames):
    """Return copies of structures, only some of which have a label."""
    kept = copies(frames)
    for atoms in kept[n:]:
        atoms.info.pop(key, None)
        atoms.arrays.pop(key, None)
    return kept


@pytest.mark.parametrize(
    ("key", "n", "match"),
    [
        ("virtual", 1, "Stresses of 1 structure that .* scaled as those of energies"),
        ("virtual", 8, r"Stresses of \d structures that .* poorly known"),
        ("force", 8, r"Forces of \d structures that .* scaled as those of energies"),
    ],
)
def test_labels_of_a_few_structures_are_calibrated_with_a_warning_or_not_at_all(key, n, match):
    with pytest.warns(QualmsWarning, match=match):
        found = model(stress="virtual").fit(without(key, n, alloys()[:26])).fitted
    own = {"virtual": found.stress_calibrations, "force": found.forces_calibrations}
    assert bool(own.pop(key)) == ("poorly" in match)
    assert all(own.values())


def test_a_single_stress_does_not_make_energies_worse():
    def error(n, seed):
        frames, new = alloys(), alloys(20, seed=5)
        frames = without("virtual", 1, frames[seed:] + frames[:seed])
        found = model(stress="virtual" if n else None).fit(frames)
        return np.abs(found.predict_mean(new) - [a.info["energy"] for a in new]).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QualmsWarning)
        ratios = [error(1, seed) / error(0, seed) for seed in (8, 16, 20)]
    assert max(ratios) < 1.25


def test_components_that_are_zero_by_symmetry_do_not_count():
    frames = copies(alloys()[:20])
    for a in np.linspace(3.5, 3.7, 6):
        atoms = bulk("Cu", a=a, cubic=True)
        frames.append(labelled_by_emt(atoms))
    found = model(stress="virtual").fit(frames)
    assert found.record.n_virial_rows == 26 * 6
    judged = (found.fitted.membership == 0).sum(axis=1) >= MIN_ABSENT
    rattled, perfect = int(judged[:20].sum()), int(judged[20:].sum())
    assert perfect > 2
    assert found.fitted.stress_calibration.n_points == 6 * rattled + 3 * perfect
    assert found.fitted.forces_calibration.n_points == 12 * rattled
    assert found.record.forces_internal == rattled
    assert found.record.stress_internal == rattled + perfect
    scored = evaluate_derivatives(found, frames[20:] + alloys()[26:30])
    assert len(scored["stress"].y) == 6 * 3 + 4 * 6
    assert len(scored["forces"].y) == 4 * 12
    assert list(evaluate_derivatives(found, frames[20:])) == ["stress"]
    with pytest.raises(InputError, match="zero by symmetry"):
        evaluate_forces(found, frames[20:])


def test_the_summary_counts_structures_rather_than_components(trained):
    summary = trained.summary()
    assert "(312 components of 26 structures)" in summary
    assert "(156 components of 26 structures)" in summary
    assert "eV/Å³ (internal)" in summary
    document = summary_document(trained)
    assert document["stress_calibrations"]["student"]["n_points"] == 156
    json.dumps(document)


# --- files ---


def test_the_summary_of_a_model_of_stresses_alone_does_not_speak_of_forces():
    found = model(forces=None, stress="virtual", units="eV").fit(alloys()[:26])
    assert re.search(r"^stresses +156 components", found.summary(), re.MULTILINE)
    assert not re.search(r"^forces", found.summary(), re.MULTILINE)


def test_small_factors_are_not_written_as_zero(trained):
    calibration = replace(trained.fitted.calibration, alpha=1.234e-5)
    fitted = replace(trained.fitted, calibrations={"student": calibration})
    fitted = replace(fitted, settings=fitted.settings.model_copy(update={"calibration": "student"}))
    assert "α = 1.23e-05" in describe(fitted, trained.record, trained.provenance)


def test_slices_of_what_is_predicted_are_of_several_structures(trained):
    every = trained.predict_forces(alloys()[26:32], stress=True)
    for chosen in (slice(1, 3), slice(None, None, -2), slice(4, 4)):
        some = every[chosen]
        assert len(some) == len(range(6)[chosen])
        for one, s in zip(some, range(6)[chosen], strict=True):
            for found, expected in zip(one, every[s], strict=True):
                np.testing.assert_array_equal(found.members, expected.members)


def test_the_calibration_of_stresses_is_kept_with_the_model(trained, tmp_path):
    trained.save(tmp_path / "model.safetensors")
    again = AtomisticModel.load(tmp_path / "model.safetensors", threads=1)
    assert again.fitted.stress_calibrations == trained.fitted.stress_calibrations
    assert again.summary() == trained.summary()
    new = alloys()[26:28]
    np.testing.assert_array_equal(
        again.predict_forces(new, stress=True).stress.members,
        trained.predict_forces(new, stress=True).stress.members,
    )


def test_files_of_the_protocol_before_are_read(trained, tmp_path):
    path = tmp_path / "new.safetensors"
    trained.save(path)
    tensors, stored = read_tensors(path, Anything, format=FORMAT, version=PROTOCOL)
    document = stored.model_dump()
    del document["stress_calibrations"]
    new = "n_without_stress stress_rmse stress_mae virial_noise forces_internal stress_internal"
    for name in new.split():
        del document["record"][name]
    write_tensors(
        tmp_path / "old.safetensors", tensors, Anything(**document), format=FORMAT, version=2
    )
    old = AtomisticModel.load(tmp_path / "old.safetensors", threads=1)
    assert old.fitted.stress_calibration is None
    new = alloys()[26:28]
    np.testing.assert_array_equal(
        old.predict_forces(new).forces.members, trained.predict_forces(new).forces.members
    )
    assert "(312 rows)" in old.summary()


# --- evaluation ---


def test_evaluation_of_stresses_counts_components(trained):
    frames = copies(alloys()[26:])
    frames[0].info["virtual"] = np.where(np.isin(np.arange(6), [1, 4]), np.nan, stresses(frames)[0])
    del frames[1].info["virtual"]
    found = evaluate_stress(trained, frames)
    assert found.units == "eV/Å³"
    assert (len(found.y), found.n_structures, found.n_unlabelled) == (10 * 6 - 8, 9, 8)
    assert found.atom is None
    np.testing.assert_array_equal(found.component[:4], [0, 2, 3, 5])
    np.testing.assert_array_equal(np.unique(found.structure), [0, *range(2, 10)])
    expected = score(found.y, found.prediction)
    assert found.rows["student (internal)"].coverage_68 == pytest.approx(expected.coverage_68)


def test_forces_and_stresses_are_judged_in_one_pass(trained, monkeypatch):
    frames = copies(alloys()[26:])
    del frames[3].info["virtual"]
    del frames[4].arrays["force"]
    asked = []
    predict = trained.predict_forces

    def counting(some, *, stress=False):
        asked.extend([stress] * len(some))
        return predict(some, stress=stress)

    monkeypatch.setattr(trained, "predict_forces", counting)
    found = evaluate_derivatives(trained, frames)
    assert sorted(asked) == [False] + [True] * 9
    alone = evaluate_stress(trained, frames)
    np.testing.assert_array_equal(found["stress"].y, alone.y)
    forces = found["forces"]
    assert forces.n_structures == 9
    known = [atoms.arrays["force"] for atoms in frames if "force" in atoms.arrays]
    np.testing.assert_array_equal(forces.y, np.concatenate(known).ravel())
    rows = (forces.structure == 3) & (forces.atom == 2) & (forces.component == 1)
    assert forces.y[rows] == frames[3].arrays["force"][2, 1]


def test_calibrations_of_a_validation_set_are_fitted_to_it(trained):
    frames, others = alloys()[26:], alloys(20, seed=5)
    found = evaluate_derivatives(trained, frames, others)
    alone = evaluate_derivatives(trained, frames)
    for name, k in (("forces", 12), ("stress", 6)):
        assert found[name].validation == f"{20 * k} validation points"
        assert alone[name].validation == "the other half of the test set"
        by_hand = evaluate_derivatives(trained, others)[name]
        calibration = fit_calibration(
            calibration_data(by_hand.y, by_hand.prediction.uncalibrated.members), "linear"
        )
        expected = score(found[name].y, calibration.apply(found[name].prediction.uncalibrated))
        rows = found[name].rows
        assert rows["linear (validation)"].log_likelihood == pytest.approx(expected.log_likelihood)
        assert rows["raw"] == alone[name].rows["raw"]
        assert rows["linear (validation)"] != alone[name].rows["linear (validation)"]


def test_a_test_set_without_stresses_is_judged_by_its_forces(trained):
    frames = copies(alloys()[26:30])
    for atoms in frames:
        del atoms.info["virtual"]
    found = evaluate_derivatives(trained, frames)
    assert list(found) == ["forces"]
    (said,) = unjudged(trained, found)
    assert said.startswith("No structure has 'virtual'")
    for atoms in frames:
        del atoms.arrays["force"]
    assert evaluate_derivatives(trained, frames) == {}


# --- noise ---


def test_stresses_full_of_noise_spoil_nothing_else():
    noisy, rng = copies(alloys()[:26]), np.random.default_rng(0)
    for atoms in noisy:
        atoms.info["virtual"] = atoms.info["virtual"] + 0.05 * rng.normal(size=6)
    with pytest.warns(QualmsWarning, match=r"stress='virtual'.*more than noise\?"):
        with_noise = model(stress="virtual").fit(noisy)
    without = model().fit(noisy)
    pairs = zip(errors(with_noise, alloys()[26:]), errors(without, alloys()[26:]), strict=True)
    # With one noise for both, errors of forces would be five times as large.
    assert all(some < 2 * others for some, others in pairs)
    assert with_noise.record.virial_noise > 3 * with_noise.record.forces_noise
    assert "per atom of virials" in with_noise.summary()


def test_noises_that_are_given_are_those_of_forces_and_of_virials_per_atom():
    given = model(stress="virtual", noise=1e-6, forces_noise=4e-4, stress_noise=9e-4)
    record = given.fit(copies(alloys()[:8])).record
    assert record.forces_noise == pytest.approx(2e-2)
    assert record.virial_noise == pytest.approx(3e-2)


# --- which structures have a stress ---


def test_stresses_of_slabs_are_learned_and_those_without_a_volume_are_counted():
    frames = copies(alloys()[:6])
    frames[1].pbc = [True, True, False]
    frames[2].pbc = False
    frames[3].pbc, frames[3].info["virtual"] = False, np.zeros(6)  # nobody computed it
    frames[4].pbc = [True, True, False]
    frames[4].cell[2] = 0.0
    frames[5].info["virtual"] = np.full(6, np.nan)
    with pytest.warns(QualmsWarning, match=r"1 structures \(first frames\[4\]\).*volume"):
        found = find_stresses(frames, "virtual")
    assert sorted(found) == [0, 1, 2]


def test_a_model_learns_from_the_stress_of_slabs():
    frames = []
    for i in range(24):
        atoms = bulk("Cu", cubic=True)
        atoms.set_cell(atoms.cell.array * (0.97 + 0.0025 * i), scale_atoms=True)
        atoms.center(vacuum=2.5, axis=2)
        atoms.pbc = [True, True, False]
        atoms.rattle(0.08, seed=i)
        frames.append(labelled_by_emt(atoms))
    known, new = frames[::2], frames[1::2]
    found = model(stress="virtual").fit(known)
    assert found.record.n_virial_rows == 6 * 12
    predicted = found.predict_forces(new, stress=True).stress.mean
    truth = stresses(new)
    assert np.sqrt(np.mean((predicted - truth) ** 2)) < 0.2 * np.std(truth)


# --- ASE ---


def test_the_calculator_has_error_bars_of_stresses(trained):
    atoms = alloys()[30].copy()
    atoms.calc = Calculator(trained, uncertainty_threshold={"stress_uncertainty": 1e3})
    found = trained.predict_forces([atoms], stress=True).stress
    np.testing.assert_allclose(atoms.get_stress(), found.mean[0], rtol=1e-12)
    calc = atoms.calc
    np.testing.assert_allclose(calc.get_property("stress_uncertainty", atoms), found.std[0])
    np.testing.assert_allclose(calc.get_property("stress_ensemble", atoms), found.members[0])
    flat = atoms.info["stress_ensemble"].reshape(16, 6)
    np.testing.assert_allclose(flat.T, found.members[0])


def test_limits_of_stresses(trained):
    atoms = alloys()[30].copy()
    atoms.calc = Calculator(trained, uncertainty_threshold={"stress_uncertainty": 1e-9})
    atoms.get_forces()
    with pytest.warns(QualmsWarning, match="stress_uncertainty = .* exceeds"):
        atoms.get_stress()


def test_a_stress_computed_again_is_a_label_and_a_predicted_one_is_not(trained, tmp_path):
    atoms = alloys()[30].copy()
    del atoms.info["virtual"], atoms.info["energy"]
    atoms.calc = Calculator(trained)
    atoms.get_stress()
    ase.io.write(tmp_path / "predicted.xyz", atoms)
    with pytest.raises(InputError, match="stress"):
        find_stresses([ase.io.read(tmp_path / "predicted.xyz")], "stress")
    reference = stresses(alloys()[30:31])[0]
    atoms.calc = SinglePointCalculator(atoms, energy=0.0, stress=reference)
    ase.io.write(tmp_path / "computed.xyz", atoms)
    again = ase.io.read(tmp_path / "computed.xyz")
    np.testing.assert_allclose(find_stresses([again], "stress")[0], reference, atol=1e-8)
