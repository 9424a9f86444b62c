"""Reproductions that were interrupted, damaged, or are of other data than they seem."""

import json
import shutil
import time
from itertools import pairwise

import numpy as np
import pytest
from reproduce_fixtures import MEMBERS, made_column, plain_scheme, plain_seed, small_results

from qualms.atomistic.training import FeatureStage, Resources, Training
from qualms.errors import InputError
from qualms.progress import Stages
from qualms.reproduce import kept, kernels, pictures, problems, run, size_picture
from qualms.reproduce.complete import check_together, complete_part, missing, size_note
from qualms.reproduce.places import Workplace
from qualms.reproduce.predictions import load_estimates
from qualms.reproduce.problems import qm9_problem
from qualms.reproduce.results import Shift, Shifted


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A hundredth of the paper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(problems.DIVISORS, "small", 100)
        yield


@pytest.fixture
def problem():
    return qm9_problem("subset", "small")


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory):
    """Results of two seeds, and their directory."""
    directory = tmp_path_factory.mktemp("finished")
    results = None
    for seed in (0, 1):
        results, _ = run_seed(qm9_problem("subset", "small", seed), directory, results)
    return results, directory


@pytest.fixture
def finished(two_seeds, tmp_path):
    """A copy of them, to be damaged."""
    results, directory = two_seeds
    return results, shutil.copytree(directory, tmp_path / "finished")


def run_seed(problem, directory, results=None, **kept):
    workplace = Workplace(directory, **kept)
    if results is None:
        results = run.start_results(problem, workplace, force=False)
    said = []
    return run.run_problem(problem, results, workplace, Resources(), Stages(), said.append), said


# --- which seeds are complete ---


@pytest.mark.parametrize(
    ("update", "why"),
    [
        ({}, ""),
        ({"schemes": [plain_scheme(10), plain_scheme(50)]}, "2 of 3 sizes"),
        ({"schemes": []}, "0 of 3 sizes"),
        ({"schemes": [plain_scheme(n) for n in (10, 50, 100, 150)]}, "4 sizes rather than 3"),
        ({"schemes": [plain_scheme(10), plain_scheme(50), plain_scheme(100)]}, "no bootstrap"),
        ({"process": {}}, "GPR PP lacks Raw"),
        ({"process": {"Raw": made_column(), "CV": made_column()}}, "GPR PP lacks N-L"),
    ],
)
def test_what_a_seed_lacks_is_said(update, why):
    found = missing(small_results(), plain_seed(**update))
    assert why in found
    assert bool(found) == bool(why)


def test_a_column_or_a_score_may_be_missing():
    seed = plain_seed()
    short = {k: v for k, v in seed.schemes[1].columns.items() if k != "student"}
    schemes = [seed.schemes[0], seed.schemes[1].model_copy(update={"columns": short})]
    lacking = seed.model_copy(update={"schemes": schemes + seed.schemes[2:]})
    assert missing(small_results(), lacking) == "n = 50 lacks student"
    bare = made_column().model_copy(update={"scores": {"log_likelihood": 1.0}})
    process = {"Raw": bare, "CV": made_column(), "N-L": made_column()}
    assert "mae of Raw" in missing(small_results(), plain_seed(process=process))


def test_incomplete_seeds_are_left_out_with_a_word():
    said = []
    partial = plain_seed(0, sizes=(10, 50))
    whole = plain_seed(1, sizes=(11, 52, 104))
    kept = complete_part(small_results(partial, whole, name="csd-crystals"), "a.json", said.append)
    assert [seed.seed for seed in kept.seeds] == [1]
    assert kept.sizes == [11, 52, 104]  # those of the seed that is shown
    assert len(said) == 1
    assert "seed 0: 2 of 3 sizes" in said[0]
    assert kept.machine["processor"] == "unknown"


def test_sizes_that_depend_on_the_seed_are_said():
    assert size_note(small_results(plain_seed(0), plain_seed(1))) == ""
    said = size_note(small_results(plain_seed(0), plain_seed(1, sizes=(11, 52, 1040))))
    assert "those of seed 0" in said
    assert "11, 52, 1,040 (seed 1)" in said


@pytest.mark.parametrize("seeds", [(), (plain_seed(0, sizes=(10,)),)])
def test_results_without_a_complete_seed_are_refused(seeds):
    with pytest.raises(InputError, match=r"a\.json.*complete seed.*goes on where it was"):
        complete_part(small_results(*seeds), "a.json", pytest.fail)


def test_a_shift_without_error_bars_is_left_out():
    sets = [Shifted(label="x", n=1, flagged=0.0, bias=0.0, columns={"Raw": made_column()})]
    shift = Shift(trained_on="y", n_train=1, sets=sets, seconds=1.0)
    said = []
    assert complete_part(small_results(plain_seed(), shift=shift), "a", said.append).shift is None
    assert "x lacks student" in said[0]
    empty = shift.model_copy(update={"sets": []})
    assert complete_part(small_results(plain_seed(), shift=empty), "a", said.append).shift is None
    complete = {"Raw": made_column(), "student": made_column()}
    good = shift.model_copy(update={"sets": [sets[0].model_copy(update={"columns": complete})]})
    kept = complete_part(small_results(plain_seed(), shift=good), "a", pytest.fail)
    assert kept.shift == good


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([small_results(), small_results()], "qm9 more than once"),
        ([small_results(name="water")], "those of 'water'"),
        ([small_results(scale="huge")], "scale 'huge'"),
        ([small_results(representation={"cutoff": "far"})], "the representation of qm9"),
    ],
)
def test_what_does_not_make_a_page_is_refused(found, message):
    with pytest.raises(InputError, match=message):
        check_together(found)


# --- figures ---


def test_panels_are_all_of_the_first_seed(finished, monkeypatch):
    results, directory = finished
    workplace = Workplace(directory)
    panels = {}
    monkeypatch.setattr(
        pictures, "_draw_panels", lambda path, shown, units: panels.update({path.name: shown})
    )
    pictures.draw_figures(results, workplace, pytest.fail)
    assert list(panels["qm9-linear.png"]) == [
        *(f"n = {n}" for n in results.sizes),
        "GPR PP",
    ]
    for label, ending in (("n = 50", "50"), ("GPR PP", "process")):
        first = load_estimates(workplace.predictions("qm9", 0, ending))["CV"]
        np.testing.assert_array_equal(panels["qm9-linear.png"][label].mean, first.mean)
    # Predictions of something else under the right name are noticed: the next seed is shown.
    other = workplace.predictions("qm9", 1, "50")
    workplace.predictions("qm9", 0, "50").write_bytes(other.read_bytes())
    pictures.draw_figures(results, workplace, pytest.fail)
    second = load_estimates(other)["CV"]
    np.testing.assert_array_equal(panels["qm9-linear.png"]["n = 10"].y, second.y)


def test_predictions_of_an_earlier_version_are_drawn_if_they_belong(finished, drawn):
    """Their names have no seed; they are those of the last one. Panels share ticks and legend."""
    results, directory = finished
    for path in (directory / "predictions").iterdir():
        if path.name.startswith("qm9-0-"):
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("qm9-1-", "qm9-")))
    assert len(pictures.draw_figures(results, Workplace(directory), pytest.fail)) == 4
    figure = drawn[1]  # after the one of sizes
    assert len({tuple(ax.get_xticks()) for ax in figure.axes}) == 1
    assert len({tuple(ax.get_ylim()) for ax in figure.axes}) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts][:2] == ["true errors", "errors of the model"]


def test_sizes_show_the_t_density_the_bootstrap_and_standard_errors(tmp_path, drawn):
    seeds = [plain_seed(0), plain_seed(1)]
    path = tmp_path / "sizes.png"
    size_picture.draw_sizes(path, small_results(*seeds, name="csd-crystals"))
    about_full_model, ax = drawn[0].axes
    assert about_full_model.get_ylim() == ax.get_ylim()
    assert "crystals" in ax.get_xlabel()
    (legend,) = drawn[0].legends
    named = [text.get_text() for text in legend.texts]
    assert {*MEMBERS, "Student's t", "GPR PP, CV", "GPR PP, N-L"} == set(named)
    # Seeds differ by 1: the standard error is 1/2, of eight lines.
    bars = [c for c in ax.collections if len(c.get_segments()) == 3]
    lengths = [np.ptp(segment[:, 1]) for bar in bars for segment in bar.get_segments()]
    assert np.allclose(lengths, 1.0)
    assert len(bars) == len(MEMBERS) + 1
    # Of the bootstrap there is a symbol for each, beyond the line that sets it apart.
    (text,) = [t for t in ax.texts if t.get_text() == "bootstrap"]
    apart = 150.0
    caps = "_"
    lines = [line for line in ax.lines if line.get_marker() != caps]
    symbols = [line for line in lines if len(line.get_xdata()) == 1]
    assert len([s for s in symbols if s.get_xdata()[0] > apart]) == len(MEMBERS) + 1
    assert any(list(line.get_xdata()) == [apart, apart] for line in ax.lines)
    assert text.get_position()[0] > 200.0
    size_picture.draw_sizes(path, small_results(seeds[0]))
    assert "crystals" not in drawn[1].axes[0].get_xlabel()
    assert not drawn[1].axes[0].containers


def test_tick_labels_of_a_shift_do_not_overlap(tmp_path, drawn):
    bins = [(0.2 * 1.25**i, 0.3 * 1.2**i) for i in range(10)]
    columns = {"student": made_column().model_copy(update={"bins": bins})}
    sets = [Shifted(label="relaxed", n=9, flagged=0.0, bias=0.0, columns=columns)]
    shift = Shift(trained_on="rattled", n_train=9, sets=sets, seconds=1.0)
    pictures._draw_shift(tmp_path / "shift.png", small_results(plain_seed(), shift=shift))
    figure = drawn[0]
    figure.canvas.draw()
    axis = figure.axes[0].xaxis
    texts = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
    boxes = [t.get_window_extent() for t in texts if t.get_text()]
    inside = sorted((b.x0, b.x1) for b in boxes)
    assert len(inside) > 2
    assert all(a[1] < b[0] for a, b in pairwise(inside))


# --- interruptions ---


def prepared_rows(problem, directory, said=None):
    say = pytest.fail if said is None else said.append
    return kernels.prepare(problem, directory, Resources(), Stages(), say)


def forbid(monkeypatch, owner, *names):
    for name in names:
        monkeypatch.setattr(owner, name, lambda *args, name=name: pytest.fail(f"{name} again"))


def interrupt(monkeypatch, owner, name):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def test_features_and_representatives_outlive_an_interruption(
    problem, finished, tmp_path, monkeypatch
):
    whole = prepared_rows(problem, finished[1] / "kernels" / "qm9-0")
    with monkeypatch.context() as patch:
        interrupt(patch, Training, "_kernel_rows")
        with pytest.raises(KeyboardInterrupt):
            prepared_rows(problem, tmp_path / "a")
    with monkeypatch.context() as patch:
        forbid(patch, FeatureStage, "_fill")
        patch.setattr(
            "qualms.atomistic.training.select_representatives",
            lambda *args: pytest.fail("representatives are chosen once"),
        )
        resumed = prepared_rows(problem, tmp_path / "a")
    np.testing.assert_allclose(resumed.solver.Phi, whole.solver.Phi, rtol=1e-6, atol=1e-9)
    assert not (tmp_path / "a" / "stages").exists()  # gigabytes that have served
    assert {"Power spectra", "Representatives", "Kernel rows"} <= set(resumed.seconds)


@pytest.mark.parametrize("owner", ["Solver", "held_out_rows"])
def test_kernel_rows_outlive_an_interruption(problem, finished, tmp_path, monkeypatch, owner):
    whole = prepared_rows(problem, finished[1] / "kernels" / "qm9-0")
    with monkeypatch.context() as patch:
        target = (kernels.Solver, "solve") if owner == "Solver" else (kernels, owner)
        interrupt(patch, *target)
        with pytest.raises(KeyboardInterrupt):
            prepared_rows(problem, tmp_path / "a")
    with monkeypatch.context() as patch:
        forbid(patch, Training, "kernel_rows")
        if owner == "held_out_rows":
            forbid(patch, kernels.Solver, "solve")
        resumed = prepared_rows(problem, tmp_path / "a")
    np.testing.assert_array_equal(resumed.test.K_XM, whole.test.K_XM)
    np.testing.assert_allclose(resumed.fitted.weights, whole.fitted.weights, rtol=1e-6, atol=1e-9)
    assert "Kernel rows" in resumed.seconds
    assert not any(name.startswith("Reading") for name in resumed.seconds)


def test_a_damaged_checkpoint_is_not_used(problem, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, Training, "_kernel_rows")
        with pytest.raises(KeyboardInterrupt):
            prepared_rows(problem, tmp_path)
    (tmp_path / "stages" / "selection").write_bytes(b"nothing")
    said = []
    assert len(prepared_rows(problem, tmp_path, said).test.y) == 50
    assert "is not used" in said[0]


def test_sizes_that_leave_nothing_to_calibrate_on_are_refused_before_the_work(
    problem, tmp_path, monkeypatch
):
    forbid(monkeypatch, Training, "kernel_rows")
    greedy = problems.replace(problem, sizes=(10, 199))
    with pytest.raises(InputError, match="sub-samples of 199 and for internal calibration"):
        prepared_rows(greedy, tmp_path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def shorten(path):
    np.save(path, np.load(path)[1:])


def spoil(path):
    array = np.load(path)
    array.flat[3] = np.nan
    np.save(path, array)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("K_NM.npy", cut),
        ("K_NM.npy", shorten),
        ("K_NM.npy", spoil),
        ("whitening.npy", empty),
        ("whitening.npy", shorten),
        ("model.safetensors", cut),
        ("validation_k_xx.npy", shorten),
        ("test_K_XM.npy", lambda path: path.unlink()),
        ("manifest.json", empty),
    ],
)
def test_damaged_kernel_rows_are_computed_again(problem, finished, name, damage):
    directory = finished[1] / "kernels" / "qm9-0"
    whole = prepared_rows(problem, directory)
    damage(directory / name)
    said = []
    again = prepared_rows(problem, directory, said)
    np.testing.assert_allclose(again.solver.Phi, whole.solver.Phi, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(again.test.K_XM, whole.test.K_XM)
    np.testing.assert_array_equal(again.validation.k_xx, whole.validation.k_xx)
    if name != "manifest.json":
        assert "computed again" in said[0]
    prepared_rows(problem, directory)  # all of it is whole again


def test_kernel_rows_of_an_earlier_version_are_used(problem, finished, monkeypatch):
    directory = finished[1] / "kernels" / "qm9-0"
    whole = prepared_rows(problem, directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["stages"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "basis").unlink()
    forbid(monkeypatch, Training, "kernel_rows")
    again = prepared_rows(problem, directory)
    np.testing.assert_allclose(again.solver.Phi, whole.solver.Phi, rtol=1e-12)


def test_kernel_rows_of_a_finished_run_can_be_discarded(problem, finished):
    results, directory = finished
    assert (directory / "kernels" / "qm9-0" / "K_NM.npy").exists()
    run_seed(problem, directory, results, keep_kernels=False)
    assert not (directory / "kernels" / "qm9-0").exists()


def test_memory_is_the_largest_and_time_the_sum_of_all_processes(problem, tmp_path, monkeypatch):
    judge, calls = run._judge, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judge(*args)

    monkeypatch.setattr(run, "_judge", interrupted)
    monkeypatch.setattr(run, "peak_memory", lambda: 9e9)
    with pytest.raises(KeyboardInterrupt):
        run_seed(problem, tmp_path)
    before = run.start_results(problem, Workplace(tmp_path), force=False)
    monkeypatch.setattr(run, "peak_memory", lambda: 1e9)
    results, said = run_seed(problem, tmp_path)
    assert said[0] == "Seed 0 goes on where it was: 2 of 6 sizes are there."
    assert results.seeds[0].memory == 9e9
    assert results.seeds[0].wall > before.seeds[0].wall > 0
    assert run.seeds_left(before, 2) == pytest.approx(1 + 4 / 6)
    assert run.seeds_left(results, 2) == 1


def test_what_was_prepared_before_an_interruption_counts(problem, tmp_path, monkeypatch):
    hold, solve = 0.3, kernels._Work._solve

    def interrupted(self, solver):
        time.sleep(hold)
        with self.stages.stage("Half a model"):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels._Work, "_solve", interrupted)
    monkeypatch.setattr(kept, "peak_memory", lambda: 9e9)
    with pytest.raises(KeyboardInterrupt):
        run_seed(problem, tmp_path)
    noted = json.loads((tmp_path / "kernels" / "qm9-0" / "manifest.json").read_bytes())["costs"]
    assert noted["wall"] > hold
    monkeypatch.setattr(kernels._Work, "_solve", solve)
    monkeypatch.setattr(kept, "peak_memory", lambda: 1e9)
    monkeypatch.setattr(run, "peak_memory", lambda: 2e9)
    results, _ = run_seed(problem, tmp_path)
    seed = results.seeds[0]
    assert seed.memory == 9e9
    assert seed.wall > noted["wall"] + sum(s.seconds for s in seed.schemes)
    assert {"Kernel rows", "Full model"} <= set(seed.seconds)


def test_results_of_other_labels_are_not_passed_off_as_new(problem, finished):
    results, directory = finished
    problem.test[3].info["atomization_energy_per_atom"] += 0.1
    other = problems.replace(problem)
    with pytest.raises(InputError, match=r"same data.*--force"):
        run.start_results(other, Workplace(directory), force=False)
    with pytest.raises(InputError, match="same data"):
        run_seed(other, directory, results)
    assert run.start_results(other, Workplace(directory), force=True).seeds == []
    # Results of an earlier version have no digest.
    seed = results.seeds[0].model_copy(update={"digest": ""})
    assert run_seed(other, directory, results.with_seed(seed))[1] == ["Seed 0 is complete."]
