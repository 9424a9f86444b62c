"""Reproductions on a disk without room, of too many seeds, and begun anew with --force."""

import errno
import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from atomistic_fixtures import qualms
from reproduce_fixtures import plain_seed, small_results

from qualms.atomistic.memory import format_bytes
from qualms.atomistic.training import FeatureStage, Resources, Training
from qualms.atomistic.training_set import make_training_set
from qualms.cli import app
from qualms.errors import InputError
from qualms.progress import Stages
from qualms.reproduce import kernels, problems, run, session
from qualms.reproduce.kept import Kept
from qualms.reproduce.places import Workplace, is_out_of_room, naming
from qualms.reproduce.problems import qm9_problem
from qualms.reproduce.results import read_results

QM9 = "reproduce qm9 --scale small --threads 1 -o out"
#: What NumPy raises: it has no number.
SHORT = "1000000 requested and 785392 written"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """A hundredth of the paper, in a directory of its own."""
    monkeypatch.setitem(problems.DIVISORS, "small", 100)
    monkeypatch.chdir(tmp_path)


def full(*args, **kwargs):
    raise OSError(SHORT)


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def files(directory):
    return {path.name for path in Path(directory).rglob("*") if path.is_file()}


def prepared(problem, said):
    return kernels.prepare(problem, Path("kernels"), Resources(1), Stages(), said.append)


# --- kernel rows that cannot be kept ---


@pytest.mark.parametrize(
    ("owner", "name", "kept"),
    [
        (Kept, "save_array", set()),
        (Kept, "save_tensors", set()),
        (kernels.AtomisticModel, "save", {"K_NM.npy", "whitening.npy", "basis"}),
    ],
)
def test_a_run_goes_on_if_kernel_rows_cannot_be_kept(owner, name, kept, monkeypatch):
    problem, said = qm9_problem("subset", "small"), []
    monkeypatch.setattr(owner, name, full)
    found = prepared(problem, said)
    assert len(found.test.y) == 50
    (text,) = said
    assert re.match(r"Kernel rows are not kept: they take \d.* [MG]B, and kernels has ", text)
    assert SHORT in text
    assert files("kernels") == kept | {"manifest.json"}
    stages = json.loads(Path("kernels/manifest.json").read_text())["stages"]
    assert set(stages) == ({"rows"} if kept else set())


def test_features_make_room_for_kernel_rows(monkeypatch):
    """They have served: what a full disk has of them is deleted before rows are given up."""
    problem, said = qm9_problem("subset", "small"), []
    save = Kept.save_array

    def crowded(self, name, array):
        if (self.directory / "stages").exists():
            raise OSError(SHORT)
        save(self, name, array)

    monkeypatch.setattr(Kept, "save_array", crowded)
    prepared(problem, said)
    assert said == []
    assert "K_NM.npy" in files("kernels")
    monkeypatch.setattr(Training, "kernel_rows", lambda self: pytest.fail("computed again"))
    prepared(problem, said)


def test_results_have_room_before_kernel_rows(monkeypatch):
    problem, said = qm9_problem("subset", "small"), []
    monkeypatch.setattr(kernels, "_RESERVE", 1e18)
    prepared(problem, said)
    assert "results would have no room" in said[0]
    assert files("kernels") == {"manifest.json"}


def test_features_that_do_not_fit_are_done_without(monkeypatch):
    problem, said = qm9_problem("subset", "small"), []
    monkeypatch.setattr("qualms.atomistic.training._store", no_room)
    assert len(prepared(problem, said).test.y) == 50
    assert said == ["The disk has no room for features: an interrupted run computes them again."]
    assert "K_NM.npy" in files("kernels")
    # Another error of the system is none of a full disk.
    shutil.rmtree("kernels")

    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(FeatureStage, "_fill", broken)
    with pytest.raises(OSError, match="Input/output"):
        prepared(problem, said)


def test_what_is_kept_is_what_was_announced():
    problem = qm9_problem("subset", "small")
    prepared(problem, [])
    taken = sum(path.stat().st_size for path in Path("kernels").rglob("*"))
    data = make_training_set(problem.train, problem.settings)
    plan = Training(data, problem.settings, Resources(1), Stages()).plan
    assert kernels.bytes_on_disk(problem, plan) == pytest.approx(taken, rel=0.15)


# --- what is said of it beforehand ---


def test_kernel_rows_that_are_still_to_be_written_are_counted():
    results = small_results(plain_seed(0), plain_seed(1, sizes=(10,)))
    keep, discard = (Workplace(Path("out"), keep_kernels=keep) for keep in (True, False))
    assert run.bytes_left(results, 4, 1e6, keep) == 3e6  # the first seed is complete
    assert run.bytes_left(results, 4, 1e6, discard) == 1e6
    assert run.bytes_left(results, 1, 1e6, discard) == 0
    directory = keep.kernels("qm9", 1)
    directory.mkdir(parents=True)
    (directory / "K_NM.npy").write_bytes(bytes(400_000))
    assert run.bytes_left(results, 2, 1e6, keep) == 6e5


def test_room_is_announced_before_the_work(monkeypatch):
    def stop(*args):
        raise InputError("work", "anything", "nothing")

    monkeypatch.setattr(session, "run_problem", stop)
    monkeypatch.setattr(session, "bytes_on_disk", lambda problem, plan: 2.1e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9e9, 4e9, 5e9))
    said = "Kernel rows take about 4.2 GB on disk; out has 5.0 GB free\n"
    assert said in qualms(f"{QM9} --seeds 2").err
    said = "about 6.3 GB on disk; out has 5.0 GB free: what does not fit is not kept\n"
    assert said in qualms(f"{QM9} --seeds 3").err
    said = "about 2.1 GB on disk while they serve; out has 5.0 GB free\n"
    assert said in qualms(f"{QM9} --seeds 3 --discard-kernels").err


@pytest.mark.parametrize("place", ["run.write_results", "run.save_estimates", "pictures.style"])
def test_a_full_disk_is_named_if_results_have_no_room(place, monkeypatch):
    monkeypatch.setattr(f"qualms.reproduce.{place}", no_room)
    ended = qualms(QM9)
    assert ended.code == 2
    free = format_bytes(shutil.disk_usage(".").free).split(".")[0]
    last = ended.err.splitlines()[-1]
    assert (
        f"'out' cannot be used: expected a directory with room for results: it has {free}" in last
    )
    assert "goes on where it was" in last


def test_other_errors_of_a_system_stay_what_they_are():
    assert is_out_of_room(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_out_of_room(OSError(SHORT))
    assert not is_out_of_room(OSError(errno.EACCES, "not to be written"))
    with pytest.raises(OSError, match="denied"), naming(Path()):
        raise OSError(errno.EACCES, "denied")


# --- seeds ---


def test_seeds_without_end_are_refused():
    ended = qualms(f"{QM9} --seeds 100000000")
    assert ended.code == 2
    assert "--seeds" in ended.err
    assert re.search(r"\b1000\b", ended.err)
    assert not Path("out").exists()


# --- --force ---


@pytest.mark.parametrize(
    ("words", "forced"),
    [
        ("--force", True),
        ("-f", True),
        ("-qf -o out", True),
        ("-o f", False),
        ("-of", False),
        ("--scale small --quiet", False),
    ],
)
def test_an_interrupted_run_says_how_it_goes_on(words, forced, monkeypatch):
    monkeypatch.setattr(app.sys, "argv", ["qualms", "reproduce", "qm9", *words.split()])
    assert ("without --force goes on" in app._interrupted()) == forced
    assert "goes on where it was" in app._interrupted()
    monkeypatch.setattr(app.sys, "argv", ["qualms", "predict", *words.split()])
    assert "goes on" not in app._interrupted()


def test_what_was_begun_anew_goes_on_without_force(monkeypatch):
    monkeypatch.setattr(session, "draw_figures", lambda *args: [])
    assert qualms(QM9).code == 0
    before = read_results("out/qm9.json")

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "_judge", interrupted)
        ended = qualms(f"{QM9} --force")
        assert ended.code == 130
        assert "The same command without --force goes on where it was." in ended.err
    with monkeypatch.context() as patch:  # before there is anything of the new run
        patch.setattr(run, "prepare", interrupted)
        assert qualms(f"{QM9} --force").code == 130
    assert read_results("out/qm9.json").seeds == []
    judged, judge = [], run._judge
    monkeypatch.setattr(run, "_judge", lambda *args: judged.append(args) or judge(*args))
    assert qualms(QM9).code == 0
    assert len(judged) == 6
    after = read_results("out/qm9.json")
    assert [s.n for s in after.seeds[0].schemes] == [s.n for s in before.seeds[0].schemes]


def test_a_run_that_cannot_start_does_not_replace_results(monkeypatch):
    monkeypatch.setattr(session, "draw_figures", lambda *args: [])
    assert qualms(QM9).code == 0
    before = Path("out/qm9.json").read_bytes()
    ended = qualms(f"{QM9} --force --memory 1MB")
    assert ended.code == 2
    assert "memory" in ended.err
    assert Path("out/qm9.json").read_bytes() == before


@pytest.mark.parametrize("content", [b"{", b'{"name": "qm9"}', b"\xff"])
def test_damaged_results_say_how_to_go_on(content):
    Path("out").mkdir()
    Path("out/qm9.json").write_bytes(content)
    ended = qualms(QM9)
    assert ended.code == 2
    assert "out/qm9.json" in ended.err
    assert "Use another directory, or --force to start anew." in ended.err
    assert Path("out/qm9.json").read_bytes() == content
