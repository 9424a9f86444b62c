"""What `qualms reproduce` is given that cannot be used, and what it must not lose."""

import json
import os
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import organic_crystals, qualms

from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.training import Resources
from qualms.cli import reproduce as command
from qualms.data import csd
from qualms.errors import InputError
from qualms.features.hypers import make_soap
from qualms.progress import Stages
from qualms.reproduce import problems, session, shift
from qualms.reproduce.places import check_page
from qualms.reproduce.problems import csd_problem, csd_settings, qm9_settings
from qualms.reproduce.results import Shift, read_results


@pytest.fixture
def tiny(monkeypatch):
    """A hundredth of the paper, with a representation that takes no time."""
    monkeypatch.setitem(problems.DIVISORS, "small", 100)
    for split in ("atoms", "crystals"):
        quick = {"preset": "nmr", "cutoff": 3.0, "n_radial": 3, "l_max": 2}
        monkeypatch.setitem(problems.REPRESENTATIONS, split, quick)


def crystals(n, seed=0, shielding=None):
    """Crystals as they are read."""
    frames = organic_crystals(n, seed, shielding)
    for atoms in frames:
        atoms.arrays["shielding"] = atoms.arrays["CS_total"].copy()
    return frames


def written(path, frames):
    frames = [atoms.copy() for atoms in frames]
    for atoms in frames:
        del atoms.arrays["shielding"]
    ase.io.write(path, frames, format="extxyz")
    return path


# --- chemiscope ---


def chemiscope(**changes):
    frames = crystals(2)
    structures = [
        {
            "size": len(a),
            "names": a.get_chemical_symbols(),
            **{axis: a.positions[:, i].tolist() for i, axis in enumerate("xyz")},
            "cell": a.cell.array.ravel().tolist(),
        }
        for a in frames
    ]
    places = [{"structure": s, "center": i} for s, a in enumerate(frames) for i in range(len(a))]
    values = np.concatenate([a.arrays["shielding"] for a in frames]).tolist()
    document = {
        "structures": structures,
        "environments": places,
        "properties": {"CS_total": {"target": "atom", "values": values}},
    }
    return document | changes


def without_cell(document):
    for structure in document["structures"]:
        del structure["cell"]


def short(document):
    document["properties"]["CS_total"]["values"].pop()


def negative(document):
    document["environments"][0]["center"] = -1


def far(document):
    document["environments"][0]["structure"] = 2


def listed(document):
    document["properties"] = [document["properties"]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_cell, "structure 0 of .* without a cell"),
        (short, "CS_total has .* values for .* environments"),
        (negative, "no atom -1 of structure 0"),
        (far, "structure 2"),
        (listed, "a data set of chemiscope"),
    ],
)
def test_chemiscope_that_does_not_fit_is_refused(tmp_path, damage, message):
    path = tmp_path / "set.json"
    document = chemiscope()
    path.write_text(json.dumps(document))
    assert len(csd(path)) == 2
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message):
        csd(path)


def test_words_and_gaps_in_chemiscope_are_no_shieldings(tmp_path):
    document = chemiscope()
    n = len(document["environments"])
    document["properties"]["element"] = {"target": "atom", "values": ["C"] * n}
    document["properties"]["CS_total"]["values"][0] = None
    path = tmp_path / "set.json"
    path.write_text(json.dumps(document))
    first = csd(path)[0]
    assert "element" not in first.arrays
    assert np.isnan(first.arrays["shielding"]).tolist() == [True] + [False] * (len(first) - 1)


def test_files_without_candidates_say_what_is_expected(tmp_path):
    path = tmp_path / "bare.extxyz"
    ase.io.write(path, Atoms("H2", cell=[5.0] * 3, pbc=True, positions=[[0] * 3, [1] * 3]))
    with pytest.raises(InputError, match="a file with numbers for each atom"):
        csd(path)
    renamed = crystals(2)
    for atoms in renamed:
        atoms.arrays["sigma"] = atoms.arrays.pop("CS_total")
    with pytest.raises(InputError, match=r"one of sigma. Rename the shieldings to CS_total"):
        csd(written(path, renamed))
    assert len(csd(path, target="sigma")) == 2
    failed = crystals(2)
    for atoms in failed:
        atoms.info["STATUS"] = "FAILED"
    with pytest.raises(InputError, match=r"2 structures in .*PASSING"):
        csd(written(path, failed))


# --- divisions ---


@pytest.mark.parametrize("n_atoms", [100, 300, 1000])
def test_few_large_crystals_cannot_be_divided(tiny, n_atoms):
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(max(300 // n_atoms, 1) + 1):
        atoms = Atoms(f"H{n_atoms}", rng.uniform(0, 20, (n_atoms, 3)), cell=[20.0] * 3, pbc=True)
        atoms.arrays["shielding"] = rng.normal(30, 1, n_atoms)
        frames.append(atoms)
    with pytest.raises(InputError, match="crystals"):
        csd_problem(frames, "crystals", "small")


def test_no_crystals_cannot_be_divided(tiny):
    with pytest.raises(InputError, match="0 shieldings"):
        csd_problem([], "crystals", "small")


@pytest.mark.parametrize("split", ["atoms", "crystals"])
def test_constant_shieldings_are_refused(tiny, split):
    with pytest.raises(InputError, match="shieldings that differ"):
        csd_problem(crystals(60, shielding=30.0), split, "small")


def test_sizes_in_crystals_are_shares_of_the_training_set(tiny):
    for seed in range(3):
        problem = csd_problem(crystals(60), "crystals", "small", seed)
        n = len(problem.train)
        total = sum(np.count_nonzero(a.numbers == 1) for a in problem.train)
        assert problem.sizes[1:] == tuple(round(m * n / total) for m in (50, 100, 150, 180))


def test_a_small_run_has_smaller_features():
    assert csd_settings("atoms", "paper").representation.compression.n_features == 2_000
    assert csd_settings("atoms", "small").representation == make_soap("nmr")
    assert qm9_settings("small").n_representatives == 500


# --- far from home ---


def test_the_shift_uses_what_it_may_and_shows_progress(tiny, tmp_path, monkeypatch):
    made, shown = {}, []
    fit = AtomisticModel.fit

    class Display:
        def begin(self, stage, total):
            shown.append(stage)

        def advance(self, done):
            pass

        def end(self, seconds):
            pass

    def watched(self, frames, **kwargs):
        made.update(threads=self.threads, memory=self.memory, **kwargs)
        return fit(self, frames, **kwargs)

    monkeypatch.setattr(AtomisticModel, "fit", watched)
    settings = csd_settings("crystals", "small").model_copy(update={"n_representatives": 50})
    checkpoint = tmp_path / "kernels" / "shift"
    means = shift.Means(Resources(1, "3GB"), Stages(Display()), checkpoint, lambda text: None)
    found = shift.csd_shift(crystals(40), crystals(30, seed=1), "small", settings, means)
    assert (made["threads"], made["memory"]) == (1, "3GB")
    assert made["checkpoint"] == checkpoint
    assert "Kernel rows" in shown
    assert not checkpoint.exists()
    assert found.digest == shift.digest_of(crystals(30, seed=1))
    # What is damaged in a checkpoint is not used.
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{")
    said = []
    means = shift.Means(Resources(1), Stages(), checkpoint, said.append)
    shift.csd_shift(crystals(40), crystals(30, seed=1), "small", settings, means)
    assert "is not used" in said[0]


def test_unknown_elements_are_found_before_the_work(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("rattled.extxyz", crystals(60))
    strange = crystals(5, seed=1)
    strange[3].numbers[0] = 53
    written("relaxed.extxyz", strange)
    monkeypatch.setattr(session, "run_problem", lambda *args: pytest.fail("the work has started"))
    ended = qualms(
        "reproduce csd --data rattled.extxyz --relaxed relaxed.extxyz --scale small -o out"
    )
    assert ended.code == 2
    assert "crystals with I" in ended.err


# --- the command ---


def test_the_time_of_all_of_the_work_is_said_before_it_starts(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("rattled.extxyz", crystals(60))
    written("relaxed.extxyz", crystals(30, seed=1))
    monkeypatch.setattr(session, "expected_seconds", lambda problem, plan: 1000.0)
    monkeypatch.setattr(command, "share_of_training", lambda *crystals: 0.0)

    def stop(*args):
        raise InputError("work", "anything", "nothing")

    monkeypatch.setattr(session, "run_problem", stop)
    one = "reproduce csd --data rattled.extxyz --scale small -o out --threads 1 --split atoms"
    assert "In all about 17 min, kernel rows kept" in qualms(one).err
    assert "In all about 33 min" in qualms(one.replace("atoms", "both")).err
    assert "In all about 1.7 h" in qualms(one.replace("atoms", "both") + " --seeds 3").err
    monkeypatch.setattr(session, "expected_seconds", lambda problem, plan: 2.0)
    assert "about 2 s a seed, 1 to go" in qualms(one).err
    monkeypatch.setattr(command, "share_of_training", lambda *crystals: 1e6)
    ended = qualms(f"{one} --relaxed relaxed.extxyz --discard-kernels")
    assert " h, predictions far from home included\n" in ended.err


@pytest.fixture
def out(tiny, tmp_path, monkeypatch):
    """A finished run of crystals, divided over crystals; figures are not the subject here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "draw_figures", lambda *args, **kwargs: [])
    written("rattled.extxyz", crystals(60))
    ended = qualms(CSD)
    assert ended.code == 0, ended.err
    assert "In all about" in ended.err
    assert "0 min" not in ended.err
    return tmp_path / "out"


CSD = "reproduce csd --data rattled.extxyz --split crystals --scale small --threads 1 -o out"


def test_what_is_there_is_kept_and_what_is_stale_is_not(out, monkeypatch):
    # Another problem in the same directory: the page has both.
    ended = qualms("reproduce qm9 --scale small --threads 1 -o out --quiet")
    assert ended.code == 0, ended.err
    page = (out / "reproduction.md").read_text(encoding="utf-8")
    assert "QM9" in page
    assert "divided over crystals" in page
    # Another file of relaxed crystals: predicted again, and only then.
    predicted = []

    def predict(rattled, relaxed, *args):
        predicted.append(len(relaxed))
        known = {"digest": shift.digest_of(relaxed), "n_representatives": 5}
        return Shift(trained_on="", n_train=1, sets=[], seconds=1.0, **known)

    monkeypatch.setattr(command, "csd_shift", predict)
    monkeypatch.setattr(session, "write_page", lambda path, *_, **__: path.touch())
    for n in (5, 5, 6):
        written("relaxed.extxyz", crystals(n, seed=1))
        assert qualms(f"{CSD} --relaxed relaxed.extxyz").code == 0
        (out / "reproduction.md").unlink()
    assert predicted == [5, 6]
    assert read_results(out / "csd-crystals.json").shift.source == "relaxed.extxyz"
    # Other labels of the same name are not passed off as these.
    changed = crystals(60)
    changed[0].arrays["CS_total"] += 1.0
    written("rattled.extxyz", changed)
    ended = qualms(CSD)
    assert ended.code == 2
    assert "results of the same data" in ended.err


def test_partial_results_are_left_out_and_notes_are_not_lost(out):
    document = json.loads((out / "csd-crystals.json").read_text())
    partial = document["seeds"][0] | {"seed": 1, "schemes": document["seeds"][0]["schemes"][:2]}
    document["seeds"].append(partial)
    (out / "csd-crystals.json").write_text(json.dumps(document))
    ended = qualms(CSD)
    assert ended.code == 0, ended.err
    assert "seed 1: 2 of 5 sizes" in ended.err
    ended = qualms("reproduce page out/csd-crystals.json -o page.md")
    assert ended.code == 0, ended.err
    document["seeds"] = [partial]
    Path("partial.json").write_text(json.dumps(document))
    ended = qualms("reproduce page partial.json -o other.md")
    assert ended.code == 2
    assert "complete seed" in ended.err
    ended = qualms("reproduce page out/csd-crystals.json out/csd-crystals.json -o other.md")
    assert ended.code == 2
    assert "more than once" in ended.err
    (out / "reproduction.md").write_text("My notes.\n")
    ended = qualms(CSD)
    assert ended.code == 2
    assert "--force" in ended.err
    assert (out / "reproduction.md").read_text() == "My notes.\n"


def test_pages_that_were_typed_are_not_replaced(tmp_path):
    page = tmp_path / "reproduction.md"
    check_page(page, force=False)
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="made by this command"):
        check_page(page, force=False)
    check_page(page, force=True)


@pytest.mark.parametrize("place", ["afile", "afile/below"])
def test_a_file_is_no_directory(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("something")
    ended = qualms(f"reproduce qm9 --scale small -o {place}")
    assert ended.code == 2
    assert "a directory, or a name for a new one" in ended.err


def test_a_directory_that_cannot_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    ended = qualms(f"reproduce qm9 --scale small -o {tmp_path}")
    assert ended.code == 2
    assert "nothing can be written there" in ended.err
