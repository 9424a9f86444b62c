"""The paper's tables again, small: problems, runs that go on where they were, and the page."""

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
from atomistic_fixtures import labelled_crystals, organic_crystals, qualms

from qualms.atomistic.training import Resources
from qualms.data import csd
from qualms.errors import InputError
from qualms.progress import Stages
from qualms.reproduce import kernels, problems, run
from qualms.reproduce.claims import check_claims
from qualms.reproduce.complete import missing
from qualms.reproduce.over_seeds import VERDICTS, sub_samples
from qualms.reproduce.page import make_page
from qualms.reproduce.problems import csd_problem, qm9_problem
from qualms.reproduce.published import COLUMNS, CSD, PROCESS, QM9, SIZES, published
from qualms.reproduce.results import read_results, write_results
from qualms.reproduce.study import held_out_rows, member_estimates, reference_estimates
from qualms.reproduce.tables import is_published, member_rows, reference_rows
from qualms.reproduce.targets import WITHIN

COMMAND = Path(sys.executable).with_name("qualms")
#: The target of shrinkage is to be at least equal to N-L. One seed may fall behind by so much: four
#: parameters are fitted to the 4,200 points that the largest sub-samples leave, which costs
#: 4/(2 · 4,200) = 0.0005 in the mean; by chance, and with test points, it may be some times that.
#: The largest found was 0.0034. The page says where the target is missed.
DEVIATION = 0.004
#: Columns of members: the paper's, and ours.
MEMBERS = {*COLUMNS, "student", "shrinkage"}


@pytest.fixture
def tiny(monkeypatch):
    """A hundredth of the paper."""
    monkeypatch.setitem(problems.DIVISORS, "small", 100)


@pytest.fixture
def crystal_file(tmp_path):
    path = tmp_path / "crystals.extxyz"
    ase.io.write(path, organic_crystals(60), format="extxyz")
    return path


# --- data ---


def test_published_values_are_found_where_the_paper_prints_them():
    assert published(QM9, 5_000, "N-L") == 4.673
    assert published(CSD, PROCESS, "CV") == -0.255
    assert published(CSD, PROCESS, "Int.") is None
    assert published(QM9, 5_000, "student") is None
    assert published(QM9, 7, "CV") is None
    assert all(len(table[n]) == len(COLUMNS) for table in (QM9, CSD) for n in SIZES)


def test_crystals_are_read_from_extended_xyz_and_from_chemiscope(tmp_path, crystal_file):
    frames = csd(crystal_file)
    document = {
        "meta": {"name": "crystals"},
        "structures": [
            {
                "size": len(a),
                "names": a.get_chemical_symbols(),
                **{axis: a.positions[:, i].tolist() for i, axis in enumerate("xyz")},
                "cell": a.cell.array.ravel().tolist(),
            }
            for a in frames
        ],
        "environments": [
            {"structure": s, "center": int(i), "cutoff": 3.5}
            for s, a in enumerate(frames)
            for i in np.flatnonzero(a.numbers == 1)
        ],
    }
    values = [a.arrays["shielding"][a.numbers == 1] for a in frames]
    document["properties"] = {
        "CS_total": {"target": "atom", "values": np.concatenate(values).tolist()},
        "energy": {"target": "structure", "values": [0.0] * len(frames)},
    }
    path = tmp_path / "crystals.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    again = csd(path)
    for before, after in zip(frames, again, strict=True):
        hydrogen = before.numbers == 1
        assert np.all(after.pbc)
        assert np.allclose(before.cell, after.cell)
        np.testing.assert_allclose(after.positions, before.positions)
        np.testing.assert_allclose(
            after.arrays["shielding"][hydrogen], before.arrays["shielding"][hydrogen]
        )
        assert np.isnan(after.arrays["shielding"][~hydrogen]).all()


def test_failed_calculations_are_left_out(tmp_path):
    frames = organic_crystals(3)
    for atoms, status in zip(frames, ("PASSING", "FAILED", "PASSING"), strict=True):
        atoms.info["STATUS"] = status
        atoms.arrays["cs_iso"] = atoms.arrays.pop("CS_total")
    path = tmp_path / "relaxed.extxyz"
    ase.io.write(path, frames, format="extxyz")
    assert len(csd(path)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.json", b"{}", "a data set of chemiscope"),
        ("bad.json.gz", b"not zipped", "a data set of chemiscope"),
        ("missing.xyz", None, "a file of crystals"),
    ],
)
def test_what_is_no_set_of_crystals_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        csd(path)


def test_crystals_without_shieldings_are_refused_by_the_names_there_are(tmp_path):
    path = tmp_path / "salt.extxyz"
    ase.io.write(path, labelled_crystals(2), format="extxyz")
    with pytest.raises(InputError, match="none of CS_total, cs_iso"):
        csd(path)


# --- problems ---


def labels(frames, key="shielding"):
    return [a.arrays[key][np.isfinite(a.arrays[key])] for a in frames]


def test_atoms_are_divided_without_overlap(tiny, crystal_file):
    crystals = csd(crystal_file)
    problem = csd_problem(crystals, "atoms", "small", seed=1)
    parts = [np.concatenate(labels(p)) for p in (problem.train, problem.validation, problem.test)]
    assert [len(p) for p in parts] == [200, 50, 50]
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == 300  # the labels of this set all differ
    assert problem.settings.resample == "atoms"
    assert problem.sizes == (10, 50, 100, 150, 180)
    again = csd_problem(crystals, "atoms", "small", seed=1)
    np.testing.assert_array_equal(np.concatenate(labels(again.test)), parts[2])
    other = csd_problem(crystals, "atoms", "small", seed=2)
    assert not np.array_equal(np.concatenate(labels(other.test)), parts[2])


def test_crystals_are_divided_whole(tiny, crystal_file):
    crystals = csd(crystal_file)
    problem = csd_problem(crystals, "crystals", "small")
    parts = [problem.train, problem.validation, problem.test]
    positions = [{a.positions.tobytes() for a in part} for part in parts]
    assert not positions[0] & positions[1]
    assert not positions[0] & positions[2]
    for atoms in problem.train:
        assert np.isfinite(atoms.arrays["shielding"]).sum() == np.sum(atoms.numbers == 1)
    counts = [sum(map(len, labels(part))) for part in parts]
    assert 200 <= counts[0] < 220
    assert problem.settings.resample == "structures"
    assert max(problem.sizes) < len(problem.train)


def test_too_few_shieldings_are_refused(crystal_file):
    with pytest.raises(InputError, match="at least 30000"):
        csd_problem(csd(crystal_file), "atoms")


# --- runs ---


def run_small(problem, directory, **kept):
    workplace = run.Workplace(directory, **kept)
    results = run.start_results(problem, workplace, force=False)
    said = []
    found = run.run_problem(
        problem, results, workplace, Resources(), Stages(), lambda text: said.append(text)
    )
    return found, said


def test_a_run_judges_every_size_and_estimator(tiny, tmp_path):
    problem = qm9_problem("subset", "small")
    results, said = run_small(problem, tmp_path)
    (seed,) = results.seeds
    assert [(s.n, s.replace) for s in seed.schemes] == [
        *((n, False) for n in problem.sizes),
        (200, True),
    ]
    assert all(set(s.columns) == MEMBERS for s in seed.schemes)
    assert all(set(s.reference) == set(COLUMNS) for s in seed.schemes)
    assert set(seed.process) == {"Raw", "CV", "N-L"}
    assert len(said) == 6
    assert said[0].startswith("n = 10: Raw")
    assert read_results(tmp_path / "qm9.json").seeds[0].schemes[0].n == 10
    # Linear scaling does not change which points are more certain than others.
    scheme = seed.schemes[2]
    assert scheme.columns["Raw"].scores["spearman"] == scheme.columns["CV"].scores["spearman"]
    assert scheme.columns["CV"].gamma == 1.0
    claims = check_claims(results)
    assert len(claims) == 10
    # One seed leaves nothing open.
    assert {claim.holds for claim in claims} <= {"yes", "no", "from a quarter on"}


def test_a_run_is_resumed_without_computing_anything_twice(tiny, tmp_path, monkeypatch):
    problem = qm9_problem("subset", "small")
    judge = run._judge
    calls = []

    def interrupted(problem, prepared, n, *rest):
        calls.append(n)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judge(problem, prepared, n, *rest)

    monkeypatch.setattr(run, "_judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_small(problem, tmp_path / "a")
    assert len(read_results(tmp_path / "a" / "qm9.json").seeds[0].schemes) == 2
    monkeypatch.setattr(
        kernels.Training, "kernel_rows", lambda self: pytest.fail("kernels are computed once")
    )
    resumed, _ = run_small(problem, tmp_path / "a")
    assert calls == [10, 50, 100, 100, 150, 180, 200]
    monkeypatch.undo()
    monkeypatch.setitem(problems.DIVISORS, "small", 100)
    whole, _ = run_small(problem, tmp_path / "b", keep_kernels=False)
    for a, b in zip(resumed.seeds[0].schemes, whole.seeds[0].schemes, strict=True):
        for column in MEMBERS:
            assert a.columns[column].scores["log_likelihood"] == pytest.approx(
                b.columns[column].scores["log_likelihood"], rel=1e-5
            )
    assert (tmp_path / "a" / "kernels").is_dir()
    assert not (tmp_path / "b" / "kernels" / "qm9-0").exists()
    done, said = run_small(problem, tmp_path / "a")
    assert said == ["Seed 0 is complete."]
    assert [s.n for s in done.seeds[0].schemes] == [s.n for s in resumed.seeds[0].schemes]


def test_results_of_another_problem_are_not_continued(tiny, tmp_path, crystal_file):
    problem = qm9_problem("subset", "small")
    run_small(problem, tmp_path)
    other = problems.replace(problem, source="elsewhere")
    with pytest.raises(InputError, match="the same source"):
        run.start_results(other, run.Workplace(tmp_path), force=False)
    assert run.start_results(other, run.Workplace(tmp_path), force=True).seeds == []


def test_damaged_results_say_so(tmp_path):
    path = tmp_path / "qm9.json"
    path.write_text('{"name": "qm9"}')
    with pytest.raises(InputError, match="results of qualms reproduce"):
        read_results(path)


def test_only_labelled_atoms_are_predicted(tiny, crystal_file, tmp_path):
    problem = csd_problem(csd(crystal_file), "atoms", "small")
    prepared = kernels.prepare(problem, tmp_path, Resources(), Stages())
    assert len(prepared.test.y) == len(prepared.test.K_XM) == 50
    estimates = member_estimates(prepared.fitted, prepared.validation, prepared.test)
    # The rows are those of the labels: predictions follow them.
    assert np.corrcoef(estimates["CV"].mean, prepared.test.y)[0, 1] > 0.8
    direct = held_out_rows(prepared.fitted, problem.test, 1)
    np.testing.assert_array_equal(direct.K_XM, prepared.test.K_XM)


def test_the_paper_s_error_bars_are_about_the_full_model(tiny, tmp_path):
    problem = qm9_problem("subset", "small")
    prepared = kernels.prepare(problem, tmp_path, Resources(), Stages())
    solver, fitted = prepared.solver, prepared.fitted
    outcome = solver.solve(prepared.settings, np.random.default_rng(0))
    residuals = solver.left_out_residuals(prepared.settings)
    about = member_estimates(outcome.fitted, prepared.validation, prepared.test)
    found = reference_estimates(outcome, residuals, prepared.validation, prepared.test)
    assert list(found) == list(COLUMNS)
    full = fitted.pp_mean(prepared.test.K_XM, prepared.test.design)
    raw = found["Raw"]
    np.testing.assert_allclose(raw.mean, full, rtol=1e-12)
    np.testing.assert_allclose(raw.std, about["Raw"].std, rtol=1e-9)
    np.testing.assert_allclose(raw.members.mean(axis=1), full, rtol=1e-12)
    # CV, by its definition, Eq. (9): the root mean square of z/σ on the validation set.
    held = prepared.validation
    spread = outcome.fitted.members(held.K_XM, held.design).std(axis=1, ddof=1)
    z = held.y - fitted.pp_mean(held.K_XM, held.design)
    assert found["CV"].calibration.alpha == pytest.approx(np.sqrt(np.mean((z / spread) ** 2)))
    # Int.: the same of training points by the members that lack them, and the model without them.
    absent = outcome.fitted.membership == 0
    used = absent.sum(axis=1) >= 5
    members = np.where(absent, outcome.predicted, np.nan)[used]
    ratios = residuals[used] / np.nanstd(members, axis=1, ddof=1)
    assert found["Int."].calibration.alpha == pytest.approx(np.sqrt(np.mean(ratios**2)))
    assert np.abs(residuals).mean() > np.abs(prepared.data.y - full.mean()).mean() / 100


def test_crystals_are_left_out_as_a_whole(tiny, crystal_file, tmp_path):
    problem = csd_problem(csd(crystal_file), "crystals", "small")
    prepared = kernels.prepare(problem, tmp_path, Resources(), Stages())
    atoms = prepared.settings.model_copy(update={"resample": "atoms"})
    whole = np.abs(prepared.solver.left_out_residuals(prepared.settings)).mean()
    assert whole > 1.05 * np.abs(prepared.solver.left_out_residuals(atoms)).mean()


def test_what_lacks_a_column_is_judged_again(tiny, tmp_path):
    problem = qm9_problem("subset", "small")
    results, _ = run_small(problem, tmp_path)
    seed = results.seeds[0]
    partial = seed.schemes[2].model_copy(update={"reference": {}})
    schemes = [partial if s is seed.schemes[2] else s for s in seed.schemes]
    damaged = results.with_seed(seed.model_copy(update={"schemes": schemes}))
    write_results(tmp_path / "qm9.json", damaged)
    again, said = run_small(problem, tmp_path)
    assert any("5 of 6 sizes are there" in text for text in said)
    assert not missing(again, again.seeds[0])
    assert len(again.seeds[0].schemes) == 6


# --- the page ---


@pytest.fixture
def found(tiny, tmp_path):
    results = None
    for seed in (0, 1):
        problem = qm9_problem("subset", "small", seed)
        results, _ = run_small(problem, tmp_path)
    return results


@pytest.mark.parametrize("about", ["reference", "columns"])
def test_tables_show_means_and_standard_errors(found, about):
    rows = dict(reference_rows(found) if about == "reference" else member_rows(found))
    columns = [getattr(seed.schemes[0], about)["CV"] for seed in found.seeds]
    values = [column.scores["log_likelihood"] for column in columns]
    error = abs(values[0] - values[1]) / 2
    assert rows["10"][1] == f"{np.mean(values):.3f} ± {error:.3f}".replace("-", "−")
    labels = {"10", "50", "100", "150", "180", "bootstrap"}
    assert set(rows) == (labels | {PROCESS} if about == "reference" else labels)


def test_what_the_paper_prints_stands_beside_its_columns(found):
    assert not is_published(found)
    at_paper_scale = found.model_copy(update={"scale": "paper", "sizes": list(SIZES)})
    assert is_published(at_paper_scale)
    assert dict(reference_rows(at_paper_scale))["1,000"][1].endswith("[4.651]")
    assert "[" not in dict(member_rows(at_paper_scale))["1,000"][1]


def test_the_page_of_a_run_has_no_gaps(found):
    page = make_page([found], figures="figures/")
    assert "nan" not in page
    assert "None" not in page
    assert "figures/qm9-linear.png" in page
    assert sum(page.count(f"| {word} |") for word in VERDICTS) == 10


# --- at full scale ---


def check_internal(seed):
    """Check internal calibration against that on a validation set, at every size."""
    for scheme in seed.schemes:
        found = {c: scheme.columns[c].scores["log_likelihood"] for c in MEMBERS}
        assert abs(found["student"] - found["CV"]) <= WITHIN
        assert found["shrinkage"] >= found["N-L"] - DEVIATION


@pytest.mark.slow
def test_qm9_at_full_scale(tmp_path):
    """20,000 molecules, 5,000 representatives: 20 minutes on two cores, 10 GB."""
    source = os.environ.get("QUALMS_QM9", "qm9pack")
    started = time.perf_counter()
    results, _ = run_small(qm9_problem(source, "paper"), tmp_path, keep_kernels=False)
    assert time.perf_counter() - started < 20 * 60
    (seed,) = results.seeds
    assert seed.wall < 20 * 60
    assert seed.memory < 10e9
    check_internal(seed)
    assert max(s.columns["CV"].scores["log_likelihood"] for s in sub_samples(seed)) >= 4.95
    assert min(s.columns["student"].scores["mae"] for s in seed.schemes) < 1.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("split", ["atoms", "crystals"])
def test_crystals_at_full_scale(split, tmp_path):
    """20,000 hydrogen atoms, 10,000 representatives: about a quarter of an hour on two cores."""
    path = os.environ.get("QUALMS_CSD")
    if not path:
        pytest.skip("QUALMS_CSD does not name a file of crystals with shieldings")
    results, _ = run_small(csd_problem(csd(path), split, "paper"), tmp_path, keep_kernels=False)
    (seed,) = results.seeds
    assert seed.memory < 10e9
    check_internal(seed)
    if split == "atoms":
        assert seed.process["Raw"].scores["rmse"] < 0.30
        assert max(s.columns["N-L"].scores["log_likelihood"] for s in sub_samples(seed)) >= -0.10


# --- the command ---


def processor_seconds():
    """Return what all processes started and ended from here have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_command_reproduces_qm9_small(tmp_path):
    """As a user runs it: the whole way within two minutes, then at once."""
    command = [COMMAND, "reproduce", "qm9", "--scale", "small", "--shift", "-o", "out"]
    started, busy = time.perf_counter(), processor_seconds()
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    taken, busy = time.perf_counter() - started, processor_seconds() - busy
    assert ended.returncode == 0, ended.stderr
    # By the clock; where other work has the processor, by what it would have taken alone on a core.
    assert min(taken, busy) < 120
    assert "about" in ended.stderr
    assert "n = 1,800" in ended.stderr
    assert "bootstrap" in ended.stdout
    made = set(os.listdir(tmp_path / "out"))
    assert {"qm9.json", "reproduction.md", "qm9-linear.png", "qm9-shift.png"} <= made
    results = read_results(tmp_path / "out" / "qm9.json")
    (seed,) = results.seeds
    for scheme in seed.schemes[1:]:
        columns = scheme.columns
        student, cv = (columns[c].scores["log_likelihood"] for c in ("student", "CV"))
        # Not the target, which is for the size of the paper: α of student is fitted to as few as
        # 400 points, that of CV to 500, each known to some 4 %, and 500 points test them.
        assert abs(student - cv) < 0.03
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    assert "Seed 0 is complete." in again.stderr
    page = [COMMAND, "reproduce", "page", "out/qm9.json", "-o", "page.md"]
    assert subprocess.run(page, cwd=tmp_path, check=False).returncode == 0
    assert "out/qm9-linear.png" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_the_command_reproduces_crystals_both_ways(tiny, crystal_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relaxed = organic_crystals(30, seed=1)
    ase.io.write("relaxed.extxyz", relaxed, format="extxyz")
    monkeypatch.setitem(problems.DIVISORS, "small", 100)
    ended = qualms(
        f"reproduce csd --data {crystal_file.name} --relaxed relaxed.extxyz --scale small "
        "--threads 1 -o out --discard-kernels"
    )
    assert ended.code == 0, ended.err
    for name in ("csd-atoms", "csd-crystals"):
        assert (Path("out") / f"{name}-power.png").stat().st_size > 1000
    shift = read_results("out/csd-crystals.json").shift
    assert [s.label for s in shift.sets] == ["rattled crystals, held out", "relaxed crystals"]
    assert not any(Path("out/kernels").rglob("*.npy"))
    shutil.rmtree("out")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reproduce qm9 --scale huge", "paper or small"),
        ("reproduce qm9 --data nowhere.npz", "nowhere.npz"),
        ("reproduce csd --data nowhere.xyz", "a file of crystals"),
        ("reproduce csd --data {crystals} --split molecules", "atoms, crystals or both"),
        ("reproduce csd --data {crystals}", "shieldings of hydrogen"),
        ("reproduce page nowhere.json -o page.md", "nowhere.json"),
    ],
)
def test_bad_input_is_refused(command, message, crystal_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = qualms(command.format(crystals=crystal_file))
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
