"""The reproduction of the paper: splits, estimators, results, tables and figures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
from atomistic_fixtures import labelled_crystals, organic_crystals
from checks import rejects
from typer.testing import CliRunner

from paper import figures, problems
from paper.__main__ import app
from paper.csd import csd
from paper.problems import csd_problem, csd_shift, qm9_problem
from paper.results import Results, read_results
from paper.study import TrainedOnce, out_of_bag_calibrations
from paper.tables import (
    OUR_COLUMNS,
    PAPER_COLUMNS,
    PUBLISHED,
    full_model_table,
    out_of_bag_table,
    write_tables,
)
from qualms import AtomisticModel

COMMITTED = Path(__file__).parents[1] / "docs/reproduction"


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """Make the small scale a hundredth of the paper's, and draw one of the slow figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(problems.DIVISORS, "small", 100)
        patch.setattr(figures, "PANELS", {"N-L": "power"})
        yield


@pytest.fixture(scope="module")
def crystal_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("crystals") / "crystals.extxyz"
    ase.io.write(path, organic_crystals(60), format="extxyz")
    return path


@pytest.fixture(scope="module")
def crystals(crystal_file):
    return csd(crystal_file)


def run(*arguments):
    """Run `python -m paper`; return standard output, or raise what it raised."""
    ended = CliRunner().invoke(app, [str(a) for a in arguments])
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


# --- crystals ---


def test_crystals_are_read_from_extended_xyz_and_from_chemiscope(tmp_path):
    path = tmp_path / "crystals.extxyz"
    ase.io.write(path, organic_crystals(5), format="extxyz")
    frames = csd(path)
    columns = [
        {axis: a.positions[:, i].tolist() for i, axis in enumerate("xyz")}
        | {"names": a.get_chemical_symbols(), "cell": a.cell.array.ravel().tolist()}
        for a in frames
    ]
    places = [(s, int(i)) for s, a in enumerate(frames) for i in np.flatnonzero(a.numbers == 1)]
    values = [frames[s].arrays["shielding"][i] for s, i in places]
    document = {
        "structures": columns,
        "environments": [{"structure": s, "center": i} for s, i in places],
        "properties": {"CS_total": {"target": "atom", "values": values}},
    }
    packed = tmp_path / "crystals.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(document).encode()))
    for ours, theirs in zip(csd(packed), frames, strict=True):
        assert ours.get_chemical_symbols() == theirs.get_chemical_symbols()
        np.testing.assert_allclose(ours.cell.array, theirs.cell.array)
        hydrogen = theirs.numbers == 1
        np.testing.assert_array_equal(
            ours.arrays["shielding"][hydrogen], theirs.arrays["shielding"][hydrogen]
        )
        assert np.isnan(ours.arrays["shielding"][~hydrogen]).all()
    frames[0].info["STATUS"] = "FAILED"
    ase.io.write(path, frames, format="extxyz")
    assert len(csd(path)) == 4
    document["environments"][0]["center"] = -1
    packed.write_bytes(gzip.compress(json.dumps(document).encode()))
    with rejects("data"):
        csd(packed)


def test_files_that_are_no_crystals_with_shieldings(tmp_path):
    bare = organic_crystals(2)
    bare[1].pbc = False
    ase.io.write(tmp_path / "bare.extxyz", bare)
    ase.io.write(tmp_path / "salt.extxyz", labelled_crystals(2))
    (tmp_path / "damaged.json").write_text("{}")
    for name in ("bare.extxyz", "salt.extxyz", "damaged.json", "missing.extxyz"):
        with rejects("data"):
            csd(tmp_path / name)


# --- problems ---


def labels(frames):
    values = [atoms.arrays["shielding"] for atoms in frames]
    return np.concatenate([v[np.isfinite(v)] for v in values])


def test_a_split_over_atoms_does_not_overlap(crystals):
    problem = csd_problem(crystals, "atoms", "small", seed=1)
    parts = [labels(part) for part in (problem.train, problem.validation, problem.test)]
    assert [len(part) for part in parts] == [200, 50, 50]
    assert len(np.unique(np.concatenate(parts))) == 300  # all labels differ
    again = csd_problem(crystals, "atoms", "small", seed=1)
    np.testing.assert_array_equal(labels(again.test), parts[2])
    other = csd_problem(crystals, "atoms", "small", seed=2)
    assert not np.array_equal(labels(other.test), parts[2])


def test_a_split_over_crystals_keeps_them_whole(crystals):
    problem = csd_problem(crystals, "crystals", "small")
    parts = [problem.train, problem.validation, problem.test]
    positions = [{atoms.positions.tobytes() for atoms in part} for part in parts]
    assert not positions[0] & (positions[1] | positions[2])
    for atoms in problem.train:
        assert np.isfinite(atoms.arrays["shielding"]).sum() == np.sum(atoms.numbers == 1)
    assert 200 <= len(labels(problem.train)) < 220
    assert len(problem.train) > max(problem.sizes)


def test_bad_problems_name_their_parameter(crystals, tmp_path):
    with rejects("data"):
        csd_problem(crystals, "atoms", "paper")
    with rejects("data"):
        csd_problem(crystals[:20], "crystals", "small")
    constant = [atoms.copy() for atoms in crystals]
    for atoms in constant:
        atoms.arrays["shielding"][:] = 30.0
    with rejects("data"):
        csd_problem(constant, "atoms", "small")
    strange = crystals[0].copy()
    strange.numbers[0] = 17
    with rejects("relaxed"):
        csd_shift(crystals, [strange], "small")
    archive = tmp_path / "dsgdb9nsd.xyz.tar.bz2"
    archive.write_bytes(b"BZh9")
    with rejects("data"):
        qm9_problem(archive, "small")


# --- estimators ---


@pytest.fixture(scope="module")
def once():
    problem = qm9_problem("subset", "small")
    once = TrainedOnce(problem.train, problem.settings)
    return once, once.points(problem.validation, "validation"), once.points(problem.test, "test")


def root_mean_square(values):
    return pytest.approx(np.sqrt(np.mean(values**2)))


def gaussian(z, std):
    return np.mean(-0.5 * (z / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi))


def test_the_paper_s_columns_are_centred_on_the_full_model(once):
    trained, validation, test = once
    ensemble, residuals = trained.ensemble(100), trained.leave_one_out_residuals()
    process, members = ensemble.projected_process(test), ensemble.ensemble_mean(test)
    seen, calibrations = (
        ensemble.full_model(validation),
        ensemble.full_model_calibrations(residuals),
    )
    estimates = ensemble.full_model(test).compare(seen, calibrations)
    assert tuple(estimates) == PAPER_COLUMNS
    np.testing.assert_allclose(estimates["Raw"].mean, process.mean, rtol=1e-12)
    np.testing.assert_allclose(estimates["Raw"].std, members.members.std(axis=1, ddof=1), rtol=1e-9)
    # CV is the root mean square of z/σ on the validation set, Eq. (9).
    process, members = ensemble.projected_process(validation), ensemble.ensemble_mean(validation)
    ratios = (validation.y - process.mean) / members.members.std(axis=1, ddof=1)
    assert estimates["CV"].calibration.alpha == root_mean_square(ratios)
    # Int. is the same of out-of-bag points, by members without them and the model without them.
    used = ensemble.absent.sum(axis=1) >= 5
    without = np.where(ensemble.absent, ensemble.training_members, np.nan)[used]
    ratios = residuals[used] / np.nanstd(without, axis=1, ddof=1)
    assert estimates["Int."].calibration.alpha == root_mean_square(ratios)


def test_estimates_centred_on_the_ensemble_mean_and_projected_process(once):
    trained, validation, test = once
    ensemble = trained.ensemble(100)
    raw, seen = ensemble.ensemble_mean(test), ensemble.ensemble_mean(validation)
    estimates = raw.compare(seen, out_of_bag_calibrations(ensemble.fitted))
    assert tuple(estimates) == OUR_COLUMNS
    for estimate in estimates.values():
        np.testing.assert_allclose(estimate.mean, raw.members.mean(axis=1))
    z, std = test.y - estimates["CV"].mean, estimates["CV"].std
    result = estimates["CV"].result()
    assert result.log_likelihood == pytest.approx(gaussian(z, std))
    assert result.beyond_4_sigma == np.mean(np.abs(z) > 4 * std)
    seen = ensemble.projected_process(validation)
    process = ensemble.projected_process(test).compare(seen)
    ratios = (validation.y - seen.mean) / seen.std
    assert process["CV"].calibration.alpha == root_mean_square(ratios)
    np.testing.assert_allclose(
        process["CV"].std, process["CV"].calibration.alpha * process["Raw"].std
    )


def test_groups_are_left_out_as_a_whole(crystals):
    """Leave-one-out errors are larger without the other atoms of the same crystal."""
    problem = csd_problem(crystals, "crystals", "small")
    mean = {}
    for resample in ("structures", "atoms"):
        settings = problem.settings.model_copy(update={"resample": resample, "noise": 1e-3})
        residuals = TrainedOnce(problem.train, settings).leave_one_out_residuals()
        mean[resample] = np.abs(residuals).mean()
    assert mean["structures"] > 1.05 * mean["atoms"]


def test_a_study_trains_the_same_model_as_fit(once):
    problem = qm9_problem("subset", "small")
    ensemble = once[0].ensemble(0.5)
    free = problem.settings.model_dump() | {"draw": "free"}
    predicted = AtomisticModel(**free, threads=1).fit(problem.train).predict(problem.test)
    np.testing.assert_allclose(ensemble.sources(once[2]).mean, predicted.mean, rtol=1e-6)
    # Columns of the paper are those of the members alone, centred on their mean.
    paper = {"uncertainty": "subsampling", "centre": "members", "calibration": "student"}
    predicted = AtomisticModel(**free | paper, threads=1).fit(problem.train).predict(problem.test)
    student = out_of_bag_calibrations(ensemble.fitted)["student"]
    raw = ensemble.ensemble_mean(once[2])
    estimate = raw.compare(ensemble.ensemble_mean(once[1]), {"student": student})["student"]
    expected = gaussian(predicted.mean - once[2].y, predicted.std)
    assert estimate.log_likelihood == pytest.approx(expected, rel=1e-4)


# --- commands ---


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    output = tmp_path_factory.mktemp("qm9")
    command = ("qm9", "--scale", "small", "--seeds", 2, "--shift", "--threads", 1, "-o", output)
    return output, command, run(*command, "--json")


def test_qm9_writes_results_tables_and_figures(reproduced):
    output, command, printed = reproduced
    results = read_results(output / "qm9.json")
    stored = Results.model_validate(json.loads(printed)["qm9"])
    assert stored.seeds[1].projected_process.keys() == {"Raw", "CV", "N-L"}
    assert [seed.seed for seed in results.seeds] == [0, 1]
    assert [e.n for e in results.seeds[0].ensembles] == [10, 50, 100, 150, 180, 200]
    assert [e.replace for e in results.seeds[0].ensembles] == 5 * [False] + [True]
    ensemble = results.seeds[0].ensembles[2]
    assert tuple(ensemble.ensemble_mean) == OUR_COLUMNS
    assert 0 < ensemble.n_out_of_bag_linear < ensemble.n_out_of_bag <= 200
    assert ensemble.student_t == pytest.approx(
        ensemble.ensemble_mean["student"].log_likelihood, abs=0.2
    )
    assert results.shift is not None
    assert [test_set.label.split()[0] for test_set in results.shift.sets] == ["≤", "9"]
    assert len(results.shift.sets[0].estimators) == len(OUR_COLUMNS) + 4
    names = ("qm9.json", "qm9.md", "qm9-shift.md")
    drawn = (f"qm9-{end}.png" for end in ("power", "sizes", "shift"))
    assert {path.name for path in output.iterdir()} == {*names, *drawn}
    with rejects("path"):
        run(*command)


def test_tables_are_written_again_from_results(reproduced, tmp_path):
    output = reproduced[0]
    run("tables", output / "qm9.json", "-o", tmp_path)
    for name in ("qm9.md", "qm9-shift.md"):
        assert (tmp_path / name).read_text() == (output / name).read_text()
    assert (tmp_path / "qm9-sizes.png").stat().st_size > 10_000
    with rejects("path"):
        run("tables", output / "qm9.json", "-o", tmp_path)


def test_crystals_with_both_splits_and_relaxed_ones(crystal_file, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "PANELS", {})
    options = ("--scale", "small", "--relaxed", crystal_file, "-o", tmp_path, "--threads", 1)
    printed = json.loads(run("csd", "--data", crystal_file, *options, "--json"))
    assert list(printed) == ["csd-atoms", "csd-crystals"]
    assert printed["csd-atoms"]["shift"] is None
    shift = printed["csd-crystals"]["shift"]
    assert [s["label"] for s in shift["sets"]] == ["rattled crystals, held out", "relaxed crystals"]
    assert shift["source"] == crystal_file.name
    sizes = [e["n"] for e in printed["csd-crystals"]["seeds"][0]["ensembles"]]
    assert sizes == sorted(sizes)


def test_bad_options_name_their_parameter(tmp_path, crystal_file):
    with rejects("scale"):
        run("qm9", "--scale", "large", "-o", tmp_path)
    with rejects("memory"):
        run("qm9", "--memory", "much", "-o", tmp_path)
    with rejects("split"):
        run("csd", "--data", crystal_file, "--split", "neither")
    with rejects("output"):
        run("qm9", "--scale", "small", "-o", crystal_file)


def test_damaged_results_are_rejected(reproduced, tmp_path):
    document = json.loads((reproduced[0] / "qm9.json").read_text())
    path = tmp_path / "damaged.json"
    with rejects("results"):
        read_results(path)
    repeated = 2 * document["seeds"][:1]
    for changes in ({"version": 1}, {"seeds": []}, {"seeds": repeated}, {"further": 1}):
        path.write_text(json.dumps(document | changes))
        with rejects("results"):
            read_results(path)


# --- tables ---


@pytest.mark.parametrize("name", ["qm9", "csd-atoms", "csd-crystals"])
def test_committed_tables_are_those_of_the_committed_results(name, tmp_path):
    results = read_results(COMMITTED / f"{name}.json")
    for path in write_tables(tmp_path, results, force=False):
        assert path.read_text() == (COMMITTED / path.name).read_text()
    has_brackets = "[" in full_model_table(results).markdown()
    assert has_brackets == (name in PUBLISHED)
    # Out of bag, student is as good as linear calibration on a validation set, and shrinkage
    # agrees with power.
    for row in out_of_bag_table(results).rows:
        student, shrinkage = (float(c.split(" ±")[0].replace("−", "-")) for c in row[3:5])
        assert student > -0.01
        assert abs(shrinkage) < 0.01
