"""The HTML report: what it says, that it is safe, and that it stands alone."""

import gzip
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import ase.io
import numpy as np
import pytest
import typer
from ase import Atoms
from ase.build import bulk, molecule
from atomistic_fixtures import contents
from rich.console import Console
from typer.testing import CliRunner

from qualms import InputError, Prediction, calibrate, score
from qualms.calibration.methods import LinearCalibration
from qualms.cli.report import report
from qualms.metrics import bootstrap_scores, far_points
from qualms.report import AtomValues, Judged, interval_records, write_report
from qualms.report import structure_map as maps
from qualms.report.tables import interval_table
from qualms.report.assessment import judge
from qualms.report.report import make_page, render
from qualms.report.tables import write_number

EVIL = '<script>alert("1")</script> & </title><img src=x onerror=alert(2)>'


def committee(n, *, spread=1.0, error=1.0, n_members=16, seed=0):
    """Truth, and members about the same mean; the truth is `error` σ away, members `spread` σ."""
    rng = np.random.default_rng(seed)
    sigma = np.exp(0.5 * rng.normal(size=n))
    center = 10 * rng.normal(size=n)
    members = center[:, None] + spread * sigma[:, None] * rng.normal(size=(n, n_members))
    return center + error * sigma * rng.normal(size=n), Prediction(members)


def frames_of(n):
    some = [molecule("H2O"), molecule("CH4"), molecule("C6H6"), bulk("NaCl", "rocksalt", a=5.6)]
    return [some[i % 4].copy() for i in range(n)]


def judged(n=200, **changes):
    """A well calibrated prediction of structures."""
    given = {
        "target": "energy",
        "units": "eV",
        "title": "Energies",
        "frames": frames_of(n),
        "structure": np.arange(n),
    }
    y, raw = committee(n, spread=0.5)
    if "prediction" not in changes:
        given["prediction"] = calibrate(y, raw).apply(raw)
    return Judged(**({"y": y} | given | changes))


def judged_atoms(n_structures=12, **changes):
    """The same for atoms."""
    frames = frames_of(n_structures)
    structure = np.repeat(np.arange(n_structures), [len(atoms) for atoms in frames])
    atom = np.concatenate([np.arange(len(atoms)) for atoms in frames])
    n = len(atom)
    y, raw = committee(n)
    return judged(n, y=y, prediction=raw, frames=frames, structure=structure, atom=atom, **changes)


class Parsed(HTMLParser):
    """Tags, attributes and text of a page; scripts and styles aside."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self.scripts, self.open = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        hidden = bool(self.open) and self.open[-1] in ("script", "style")
        (self.scripts if hidden else self.words).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def written(tmp_path):
    """Write a report and read it."""

    def write(given, **options):
        path = write_report(given, tmp_path / "report.html", force=True, **options)[0]
        return Parsed(path.read_text(encoding="utf-8"))

    return write


@pytest.fixture
def quick(monkeypatch):
    """Leave out the pictures, which take most of the time."""
    monkeypatch.setattr("qualms.report.report.draw_pictures", lambda judged: [])


@pytest.fixture
def without_chemiscope(monkeypatch):
    monkeypatch.setitem(sys.modules, "chemiscope", None)


# what it says


def test_all_parts_are_there(written):
    rows = {"raw": score(*committee(200)), "linear [x]": score(*committee(200, seed=1))}
    given = judged(rows=rows, facts={"members": "16 of them"}, remarks=["Two were skipped."])
    page = written(given)
    for heading in ("Scores", "Figures", "Map of structures", "Worst predictions", "Details"):
        assert heading in page.text
    assert "energy in eV: 200 predictions by 16 members" in page.text
    for words in ("The error bars hold", "Two were skipped.", "16 of them", "linear [x]"):
        assert words in page.text
    assert [a["alt"] != "" for a in page.all("img")] == [True] * 5
    assert "95 % intervals] from 200 resamples of 200 structures" in page.text


@pytest.mark.usefixtures("quick")
def test_scores_and_the_worst_are_those_of_the_prediction(written):
    given = judged()
    page = written(given, n_worst=7)
    z = given.y - given.prediction.mean
    ratio = np.abs(z) / given.prediction.std
    assert page.text.count("C6H6") >= 1
    assert f"{ratio.max():.2f}" in page.text
    worst = make_page(given, n_worst=7)
    assert [int(row[0]) for row in worst.surprises.rows] == np.argsort(-ratio)[:7].tolist()
    assert [int(row[0]) for row in worst.errors.rows] == np.argsort(-np.abs(z))[:7].tolist()
    after = worst.intervals["after calibration"].scores
    assert after == score(given.y, given.prediction)
    assert worst.intervals["before calibration"].scores == score(
        given.y, given.prediction.uncalibrated
    )


@pytest.mark.parametrize(
    ("spread", "grade", "words"),
    [
        (1.0, "hold", "The error bars hold"),
        (0.5, "small", "too small, by a factor of about 2.04 [1.9"),
        (2.0, "large", "too large, by a factor of about 1.95 [1.8"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_verdict(spread, grade, words):
    y, raw = committee(2000, spread=spread, n_members=64)
    verdict = make_page(judged(2000, y=y, prediction=raw, frames=None)).verdict
    assert verdict.grade == grade
    assert words in verdict.sentence
    assert "68.3 % should" in verdict.sentence
    assert any("not been calibrated" in text for text in verdict.details)
    assert any("Larger error bars go with larger errors" in text for text in verdict.details)


@pytest.mark.usefixtures("quick")
def test_verdict_of_few_points_says_so():
    verdict = make_page(judged(12)).verdict
    assert verdict.grade == "unknown"
    assert verdict.sentence.startswith("Too few points")


@pytest.mark.usefixtures("quick")
def test_verdict_counts_structures():
    y, raw = committee(300, n_members=64)
    few = judged(300, y=y, prediction=raw, frames=None, structure=np.arange(300) % 5)
    verdict = make_page(few).verdict
    assert verdict.grade == "unknown"
    assert verdict.sentence.startswith("Too few structures")


@pytest.mark.usefixtures("quick")
def test_verdict_names_a_point_that_is_far_off():
    y, raw = committee(300, n_members=64)
    y[7] += 1e6
    verdict = make_page(judged(300, y=y, prediction=raw)).verdict
    assert verdict.grade == "doubtful"
    assert "hold, but not for 1 of 300 points" in verdict.sentence
    assert "1 point far off: structure 7 by " in verdict.details[0]


@pytest.mark.usefixtures("quick")
def test_verdict_is_rough_if_the_interval_excludes_the_claim():
    y, raw = committee(4000, spread=1.09, n_members=64)
    verdict = make_page(judged(4000, y=y, prediction=raw, frames=None)).verdict
    assert verdict.sentence.startswith("The error bars hold roughly: 7")


@pytest.mark.usefixtures("quick")
def test_verdict_is_doubtful_if_large_errors_are_too_frequent():
    # Of the right size in the middle: 68 % within one σ, and 91 % within two.
    rng = np.random.default_rng(0)
    y, raw = committee(4000, n_members=64)
    wide = rng.random(4000) < 0.12
    z = np.where(wide, 3.5, 0.88) * (y - raw.mean)
    given = judged(4000, y=raw.mean + z, prediction=raw, frames=None)
    verdict = make_page(given).verdict
    assert verdict.grade == "doubtful"
    assert "but large errors are more frequent than they say" in verdict.sentence


@pytest.mark.usefixtures("quick")
def test_verdict_of_few_points_does_not_say_that_error_bars_are_useless():
    details = ""
    for seed in range(5):
        y, raw = committee(8, seed=seed)
        scores = bootstrap_scores(y, raw.mean, raw.std)
        details += " ".join(judge(judged(8, y=y, prediction=raw), scores).details)
    assert "cannot be told from so few points" in details
    assert "hardly tell" not in details


def test_no_honest_point_is_far_off():
    """Not even those of few members, whose spread is often far too small."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        s = np.exp(rng.normal(size=2000))
        members = s[:, None] * rng.normal(size=(2000, 4))
        z = s * rng.normal(size=2000) - members.mean(axis=1)
        assert len(far_points(z, 1.7 * members.std(axis=1, ddof=1))) <= 1


@pytest.mark.usefixtures("quick")
def test_verdict_of_thirty_points_is_careful():
    y, raw = committee(30)
    assert "so few points" in make_page(judged(30, y=y, prediction=raw)).verdict.sentence


@pytest.mark.parametrize(("spread", "grade"), [(1.0, "hold"), (0.7, "small"), (1.4, "large")])
def test_verdict_is_right_nearly_always(spread, grade):
    grades = []
    for seed in range(20):
        y, raw = committee(300, spread=spread, n_members=64, seed=seed)
        scores = bootstrap_scores(y, raw.mean, raw.std, n_bootstrap=50)
        grades.append(judge(judged(300, y=y, prediction=raw), scores, n_bootstrap=50).grade)
    assert grades.count(grade) >= 18


@pytest.mark.usefixtures("quick")
def test_verdict_tells_that_error_bars_order_nothing():
    rng = np.random.default_rng(0)
    members = np.exp(0.5 * rng.normal(size=(500, 1))) * rng.normal(size=(500, 8))
    members -= members.mean(axis=1, keepdims=True)
    y = rng.normal(size=500)
    page = make_page(judged(500, y=y, prediction=Prediction(members), frames=None))
    assert any("hardly tell" in text for text in page.verdict.details)


@pytest.mark.usefixtures("quick")
def test_atoms_of_one_structure_count_as_one(written):
    """Copies of a few points say no more than the few do."""
    y, raw = committee(20)
    members = np.repeat(raw.members, 15, axis=0)
    given = judged(
        300,
        y=np.repeat(y, 15),
        prediction=Prediction(members),
        structure=np.repeat(np.arange(20), 15),
        frames=None,
    )
    assert "so few points" in make_page(given).verdict.sentence
    assert "300 predictions for 20 structures" in written(given).text


@pytest.mark.usefixtures("quick")
def test_a_prediction_that_was_never_calibrated_has_one_column():
    y, raw = committee(100)
    page = make_page(judged(100, y=y, prediction=raw, frames=None))
    assert page.scores.headers == ("Score", "as predicted", "ideal")


# the map


@pytest.mark.usefixtures("quick")
def test_map_of_structures_has_predictions_and_errors(tmp_path):
    given = judged(40)
    paths = write_report(given, tmp_path / "a.html")
    assert [path.name for path in paths] == ["a.html", "a.chemiscope.json.gz"]
    data = json.loads(gzip.decompress(paths[1].read_bytes()))
    assert len(data["structures"]) == 40
    assert data["structures"][3]["cell"] == pytest.approx(given.frames[3].cell.array.ravel())
    assert "cell" not in data["structures"][0]
    values = {name: entry["values"] for name, entry in data["properties"].items()}
    z, std = given.residuals, given.prediction.std
    np.testing.assert_allclose(values["predicted"], given.prediction.mean, rtol=1e-7)
    np.testing.assert_allclose(values["error"], z, rtol=1e-7)
    np.testing.assert_allclose(values["|error|/σ"], np.abs(z) / std, rtol=1e-7)
    assert data["settings"]["map"]["color"]["property"] == "σ"
    assert data["settings"]["pinned"] == [int(np.argmax(np.abs(z) / std))]
    assert {entry.get("units") for entry in data["properties"].values()} == {"eV", None}
    page = paths[0].read_text(encoding="utf-8")
    embedded = re.search(r'id="map-data">(.*?)</script>', page, re.DOTALL).group(1)
    assert json.loads(embedded) == data


def test_map_of_points_in_any_order():
    given = judged(40)
    order = np.random.default_rng(0).permutation(40)
    shuffled = judged(40, y=given.y[order], prediction=given.prediction[order], structure=order)
    first, second = (maps.make_map(g, [0]).data["properties"] for g in (given, shuffled))
    assert first == second


def test_map_of_atoms_has_environments():
    given = judged_atoms()
    shown = maps.make_map(given, [5])
    assert shown.of_atoms
    places = [(e["structure"], e["center"]) for e in shown.data["environments"]]
    assert places == list(zip(given.structure.tolist(), given.atom.tolist(), strict=True))
    assert shown.data["settings"]["target"] == "atom"


def test_atoms_that_only_their_novelty_is_known_of():
    given = judged(8)
    sizes = [len(atoms) for atoms in given.frames]
    known = [AtomValues(np.linspace(0, 2, n)) for n in sizes]
    given = replace(given, atom_values=lambda some: [known[i] for i in some], atom_units="eV")
    properties = maps.make_map(given, [0]).data["properties"]
    of_atoms = {name: one for name, one in properties.items() if one["target"] == "atom"}
    assert list(of_atoms) == ["novelty (relative)"]
    assert "units" not in of_atoms["novelty (relative)"]
    more = [AtomValues(*(factor * novelty for factor in (1, 2, 3, 4))) for novelty, *_ in known]
    given = replace(given, atom_values=lambda some: [more[i] for i in some])
    properties = maps.make_map(replace(given, force_units="eV/Å"), [0]).data["properties"]
    for name, factor, units in (
        ("σ of what the atom contributes", 2, "eV"),
        ("σ shared with neighbours", 3, "eV"),
        ("σ of the force on the atom", 4, "eV/Å"),
    ):
        assert (properties[name]["target"], properties[name]["units"]) == ("atom", units)
        expected = factor * np.concatenate([novelty for novelty, *_ in known])
        np.testing.assert_allclose(properties[name]["values"], expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("values", "bright", "beyond"),
    [
        (np.linspace(0.002, 0.25, 99), 0.25, "no atom is beyond"),
        (np.append(np.linspace(0, 0.1, 990), np.full(9, 7.0)), 0.1, "9 of 999 atoms are beyond"),
        (np.linspace(1.5, 8, 99), 7.9, "99 of 99 atoms are beyond"),
        (np.zeros(9), 1.0, "no atom is beyond"),
    ],
    ids=["all are known", "a few are strange", "all are strange", "all are the same"],
)
def test_colours_of_atoms_have_the_range_of_their_novelty(values, bright, beyond):
    chain = Atoms(np.full(values.size, 6), positions=np.arange(values.size)[:, None] * [1.5, 0, 0])
    one = {"frames": [chain], "structure": np.zeros(8, dtype=int)}
    given = judged(8, **one, atom_values=lambda some: [AtomValues(values)])
    shown = maps.make_map(given, [0])
    color = shown.data["settings"]["structure"][0]["color"]
    assert (color["min"], color["max"]) == (0, pytest.approx(bright))
    assert f"to {bright:g} (bright)" in shown.note
    assert f"At 1 extrapolation begins: {beyond}." in shown.note
    assert "other colours" not in shown.note


def test_too_many_atoms_become_structures(monkeypatch):
    monkeypatch.setattr(maps, "MAX_ENVIRONMENTS", 20)
    given = judged_atoms()
    shown = maps.make_map(given, [5])
    assert not shown.of_atoms
    assert "averaged" in shown.note
    z = given.residuals
    rms = [np.sqrt(np.mean(z[given.structure == i] ** 2)) for i in range(12)]
    np.testing.assert_allclose(shown.data["properties"]["RMS error"]["values"], rms, rtol=1e-7)


def test_components_of_one_atom_become_structures():
    atoms = judged_atoms()
    doubled = {name: np.repeat(getattr(atoms, name), 2) for name in ("structure", "atom", "y")}
    members = np.repeat(atoms.prediction.members, 2, axis=0)
    given = judged(len(members), prediction=Prediction(members), frames=atoms.frames, **doubled)
    assert not maps.make_map(given, [0]).of_atoms


@pytest.mark.usefixtures("quick")
def test_large_maps_take_the_worst_and_a_sample(written):
    given = judged(120)
    page = written(given, n_worst=3, max_structures=30)
    assert "30 of 120 structures are on the map" in page.text
    first, again = (maps.make_map(given, [7, 99], max_structures=30, seed=1) for _ in "ab")
    other = maps.make_map(given, [7, 99], max_structures=30, seed=2)
    assert first.places == again.places != other.places
    assert {7, 99} <= set(first.places)
    assert len(first.data["structures"]) == 30
    tiny = maps.make_map(given, [7, 99], max_structures=1)
    assert tiny.places == {7: 0}


@pytest.mark.usefixtures("quick")
def test_rows_of_the_worst_lead_to_the_map(written):
    page = written(judged(40), n_worst=4)
    buttons = [a for a in page.all("button") if "data-structure" in a]
    assert len(buttons) == 8
    atoms = [a for a in written(judged_atoms(), n_worst=4).all("button") if "data-atom" in a]
    assert len(atoms) == 8


@pytest.mark.usefixtures("quick")
def test_without_structures_there_is_no_map(tmp_path):
    paths = write_report(judged(frames=None), tmp_path / "a.html")
    page = Parsed(paths[0].read_text(encoding="utf-8"))
    assert len(paths) == 1
    assert not page.scripts[1:]
    assert "chemiscope" not in page.text


@pytest.mark.usefixtures("quick")
def test_without_chemiscope_there_is_a_report_and_a_hint(tmp_path, without_chemiscope):
    paths = write_report(judged(), tmp_path / "a.html")
    assert contents(tmp_path).keys() == {"a.html"}
    page = Parsed(paths[0].read_text(encoding="utf-8"))
    assert "pip install 'qualms[report]'" in page.text
    assert page.all("button") == []


# that it is safe, and stands alone


def test_text_from_users_is_escaped(written):
    given = judged(
        30,
        target=EVIL,
        units=EVIL,
        title=EVIL,
        facts={EVIL: EVIL},
        remarks=[EVIL],
        rows={EVIL: score(*committee(30))},
    )
    page = written(given)
    assert len(page.all("script")) == 3
    assert page.all("title") == [{}]
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert page.text.count('<script>alert("1")</script>') >= 6
    data = maps.make_map(given, [0]).data
    assert "<" not in json.dumps(data["meta"]) + json.dumps(data["properties"])


def test_nothing_is_loaded_from_elsewhere(written):
    page = written(judged(30))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/"))
    policy = next(a for a in page.all("meta") if a.get("http-equiv"))["content"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert not re.search(r"@import|url\(", page.scripts[0])


@pytest.mark.usefixtures("quick")
def test_structure_of_the_page_for_those_who_do_not_see_it(written):
    page = written(judged(30))
    assert len(page.all("h1")) == 1
    assert page.all("html") == [{"lang": "en"}]
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(a["href"][1:] in ids for a in page.all("a"))
    assert "BSD 3-clause licence" in page.text
    assert "Redistribution and use in source and binary forms" in page.text


def test_same_input_same_files(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        write_report(judged(300), tmp_path / name / "report.html")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("n", [1, 2, 3, 15])
def test_few_points_give_no_nan(written, n):
    y, raw = committee(n)
    page = written(judged(n, y=y, prediction=raw))
    assert not re.search(r"\b(nan|NaN|inf|None)\b", page.text)


@pytest.mark.parametrize(
    "change",
    [
        {"y": np.zeros(40)},
        {"prediction": Prediction(np.tile([1.0, 2.0, 3.0], (40, 1)))},
        {"structure": np.zeros(40, int)},
        {"units": "", "title": "", "target": "x"},
        {"y": np.r_[1e12, np.zeros(39)]},
    ],
)
def test_awkward_points_give_no_nan(written, change):
    page = written(judged(40, **change))
    assert not re.search(r"\b(nan|NaN|inf|None)\b", page.text)


@pytest.mark.usefixtures("quick")
def test_points_without_error_bars_are_left_out_and_counted(written):
    y, raw = committee(60)
    members = raw.members.copy()
    members[:4] = 3.0
    page = written(judged(60, y=y, prediction=Prediction(members)))
    assert "4 of 60 points have σ = 0 and are left out of this report." in page.text
    assert "56 predictions" in page.text


# bad input


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"y": np.zeros(3)}, "prediction"),
        ({"y": np.zeros((40, 2))}, "y"),
        ({"y": np.full(40, np.nan)}, "y"),
        ({"prediction": np.zeros(40)}, "prediction"),
        ({"structure": np.arange(7)}, "structure"),
        ({"structure": np.linspace(0, 1, 40)}, "structure"),
        ({"structure": np.arange(40) + 1}, "structure"),
        ({"atom": np.full(40, 2)}, "atom"),
        ({"prediction": Prediction(np.ones((40, 4)))}, "prediction"),
    ],
)
def test_bad_input(tmp_path, change, named):
    with pytest.raises(InputError, match=f"^{named}"):
        write_report(judged(40, **change), tmp_path / "a.html")
    assert contents(tmp_path) == {}


def test_bad_options(tmp_path):
    with pytest.raises(InputError, match=r"ends in \.html"):
        write_report(judged(20), tmp_path / "a.pdf")
    with pytest.raises(InputError, match="n_worst"):
        write_report(judged(20), tmp_path / "a.html", n_worst=0)
    with pytest.raises(InputError, match="max_structures"):
        write_report(judged(20), tmp_path / "a.html", max_structures=0)
    assert contents(tmp_path) == {}


def test_existing_files_stay(tmp_path):
    for name in ("a.html", "a.chemiscope.json.gz"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match="--force"):
            write_report(judged(20), tmp_path / "a.html")
        assert contents(tmp_path) == {name: b"mine"}
        (tmp_path / name).unlink()


# the table of intervals


def columns():
    y, raw = committee(120, spread=0.5)
    after = LinearCalibration(alpha=2.0).apply(raw)
    return {
        name: bootstrap_scores(y, p.mean, p.std, n_bootstrap=20)
        for name, p in (("before", raw), ("after", after))
    }


def test_interval_table_fits_a_terminal():
    given = columns()
    file = io.StringIO()
    Console(file=file, width=100).print(interval_table(given, units="eV", title="Scores [x]"))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    for words in ("Scores [x]", "before", "after", "Root mean squared error, eV", "68 %"):
        assert words in text
    assert "20 resamples" in text


def test_interval_records_are_json():
    given = columns()
    records = interval_records(given)
    json.dumps(records, allow_nan=False)
    assert len(records) == 22
    one = next(r for r in records if r["column"] == "after" and r["score"] == "crps")
    assert one["value"] == given["after"].scores.crps
    assert (one["low"], one["high"]) == given["after"].intervals["crps"]


def test_interval_table_refuses_other_things():
    with pytest.raises(InputError, match="columns"):
        interval_table({})
    with pytest.raises(InputError, match="columns"):
        interval_table({"x": score(*committee(20))})
    y, raw = committee(50)
    fewer = bootstrap_scores(y, raw.mean, raw.std, n_bootstrap=20)
    with pytest.raises(InputError, match="same points"):
        interval_table(columns() | {"other": fewer})


@pytest.mark.parametrize(
    ("value", "uncertainty", "text"),
    [
        (1.23456, 0.012, "1.235"),
        (-1234.5, 30.0, "−1234"),
        (0.0, 0.01, "0.000"),
        (0.0, None, "0.00"),
        (3.2e-7, 1e-8, "3.20e−07"),
        (0.00456, None, "0.00456"),
        (-np.inf, None, "−∞"),
        (12.0, np.inf, "12.0"),
    ],
)
def test_numbers_are_written_as_finely_as_they_are_known(value, uncertainty, text):
    assert write_number(value, uncertainty) == text


# the command


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run `report` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(report)

    def run(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return run


def test_command_of_energies(command, energy_model, molecules):
    energy_model.save("model.safetensors")
    ase.io.write("test.xyz", molecules[120:170], format="extxyz")
    ended = command("model.safetensors", "test.xyz", "-o", "report.html", "--threads", 1)
    assert ended.exit_code == 0, ended.output
    assert "report.chemiscope.json.gz" in ended.output
    page = Parsed(Path("report.html").read_text(encoding="utf-8"))
    assert "atomization_energy: model.safetensors on test.xyz" in page.text
    for words in ("eV/atom: 50 predictions", "GPR PP", "trained on", "(internal): to the"):
        assert words in page.text
    again = command("model.safetensors", "test.xyz", "-o", "report.html")
    assert isinstance(again.exception, InputError)


def test_command_of_atoms_prints_json(command, shift_model, molecules):
    shift_model.save("model.safetensors")
    frames = [atoms.copy() for atoms in molecules[60:80]]
    shift = frames[3].arrays["shift"]
    hydrogens = np.flatnonzero(frames[3].numbers == 1)
    shift[hydrogens[0]] = np.nan
    ase.io.write("test.xyz", frames, format="extxyz")
    options = ("--threads", 1, "--json", "--validation", "test.xyz")
    ended = command("model.safetensors", "test.xyz", "-o", "report.html", *options)
    assert ended.exit_code == 0, ended.output
    document = json.loads(ended.stdout)
    n_hydrogens = sum(int(np.sum(atoms.numbers == 1)) for atoms in frames)
    assert document["n_points"] == n_hydrogens - 1
    assert document["verdict"]["grade"] in ("hold", "doubtful", "small", "large", "unknown")
    assert any("1 without a label" in remark for remark in document["remarks"])
    data = json.loads(gzip.decompress(Path("report.chemiscope.json.gz").read_bytes()))
    centers = {(e["structure"], e["center"]) for e in data["environments"]}
    assert (3, int(hydrogens[0])) not in centers
    assert all(frames[i].numbers[atom] == 1 for i, atom in centers)


def test_command_refuses_what_it_cannot_write_before_it_works(command):
    ended = command("no-model", "no-test", "-o", "report.pdf")
    assert isinstance(ended.exception, InputError)
    assert ".html" in str(ended.exception)


def test_what_chance_allows_goes_by_structures():
    given = judged_atoms(12)
    page = make_page(given)
    n = given.y.size
    (area,) = [row for row in page.scores.rows if row[0] == "Miscalibration area"]
    low, high = (float(end) for end in area[-1].split(" to "))
    assert low == pytest.approx(0.31 / n**0.5, rel=0.05)
    assert high == pytest.approx(0.31 / 12**0.5, rel=0.05)
    captions = " ".join(picture.caption for picture in page.pictures)
    assert "if the 12 structures are independent" in captions
    assert "if points are independent" in " ".join(
        p.caption for p in make_page(judged(30)).pictures
    )


def test_other_quantities_have_sections_of_their_own(written):
    forces = judged_atoms(12, component_names=("x", "y", "z"), target="forces", units="eV/Å")
    three = replace(forces, component=np.arange(forces.y.size) % 3)
    given = judged(12, frames=three.frames)
    page = make_page(given, others={"forces": three, EVIL: forces})
    assert list(page.others) == ["forces", EVIL]
    alone = make_page(three)
    assert page.others["forces"].scores == alone.scores
    assert page.others["forces"].verdict == alone.verdict
    assert {row[3] for row in page.others["forces"].errors.rows} <= {"x", "y", "z"}
    text = render(page)
    assert EVIL not in text
    parsed = Parsed(text)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert "forces" in ids
    assert len(ids) == len(set(ids))
    assert "Forces" in [w.strip() for w in parsed.words]
    assert f"Forces : {alone.verdict.sentence}" in parsed.text
