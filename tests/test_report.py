"""Tables, figures and reports: their numbers, awkward data, and that the page is safe."""

import gzip
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
import scipy.stats
from ase.build import bulk, molecule
from checks import rejects
from matplotlib.figure import Figure
from rich.console import Console

from qualms import Prediction, calibrate, score
from qualms.evaluation import Evaluation
from qualms.metrics import bootstrap_scores
from qualms.report import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    ReliabilityDisplay,
    ResidualDisplay,
    Table,
    ZScoreDisplay,
    assess,
    interval_table,
    line_style,
    score_table,
    write_report,
)
from qualms.report.structure_map import make_map
from qualms.report.tables import interval_records, score_records, write_number

OF_PREDICTIONS = [
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    ResidualDisplay,
    ReliabilityDisplay,
    ZScoreDisplay,
]
EVIL = '<script>alert("1")</script> & </title><img src=x onerror=alert(2)>'


def ensemble(n=400, n_members=16, *, ensemble_std=1.0, error=1.0, width=0.5, seed=0, outputs=()):
    """Reference values and members; their deviations are `error` and `ensemble_std` times σ."""
    rng = np.random.default_rng(seed)
    sigma = np.exp(width * rng.normal(size=(n, *outputs)))
    center = 10 * rng.normal(size=sigma.shape)
    members = center[..., None] + ensemble_std * sigma[..., None] * rng.normal(
        size=(*sigma.shape, n_members)
    )
    return center + error * sigma * rng.normal(size=sigma.shape), Prediction(members)


def frames_of(n):
    some = [molecule("H2O"), molecule("CH4"), molecule("C6H6"), bulk("NaCl", "rocksalt", a=5.6)]
    return [some[i % 4].copy() for i in range(n)]


def evaluation(n=200, **changes):
    """A calibrated prediction of structures."""
    y, raw = ensemble(n, ensemble_std=0.5)
    arguments = {"target": "energy", "units": "eV", "y": y, "structure": np.arange(n)}
    arguments["frames"] = frames_of(n)
    if "prediction" not in changes:
        arguments["prediction"] = calibrate(y, raw).apply(raw)
    return Evaluation(**arguments | changes)


def evaluation_of_atoms(n_structures=12, **changes):
    frames = frames_of(n_structures)
    structure = np.repeat(np.arange(n_structures), [len(atoms) for atoms in frames])
    atom = np.concatenate([np.arange(len(atoms)) for atoms in frames])
    y, raw = ensemble(len(atom))
    places = {"frames": frames, "structure": structure, "atom": atom}
    return evaluation(len(atom), y=y, prediction=raw, **places, **changes)


def png(display):
    file = io.BytesIO()
    display.save(file, format="png")
    return file.getvalue()


def printed(table, width=100):
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


# --- numbers of the figures ---


def test_reliability_is_the_coverage():
    y, p = ensemble()
    display = ReliabilityDisplay.from_prediction(y, p)
    t = np.abs(y - p.mean) / p.std
    levels = display.curve.expected
    expected = [np.mean(t <= scipy.stats.norm.ppf(0.5 + level / 2)) for level in levels]
    np.testing.assert_allclose(display.curve.observed, expected)
    assert display.area == pytest.approx(score(y, p).miscalibration_area)
    x, observed = display.plot().ax_.lines[-1].get_data()
    np.testing.assert_allclose(x, [0, *levels, 1])
    np.testing.assert_allclose(observed, [0, *expected, 1])


def test_z_scores_and_their_histogram():
    y, p = ensemble(500)
    y[0] = p.mean[0] + 50 * p.std[0]
    display = ZScoreDisplay.from_prediction(y, p)
    z = (y - p.mean) / p.std
    np.testing.assert_allclose(display.z_scores, z)
    assert display.dof == 15
    ax = display.plot().ax_
    density, edges, _ = ax.patches[0].get_data()
    n_outside = np.sum(np.abs(z) > edges[-1])
    assert n_outside >= 1
    assert np.sum(density * np.diff(edges)) == pytest.approx(1 - n_outside / 500)
    text = ax.texts[0].get_text()
    assert f"rms {np.sqrt(np.mean(z**2)):.2f}" in text
    assert f"{n_outside} outside" in text


def test_z_scores_are_compared_with_densities_of_unit_variance():
    ax = ZScoreDisplay(np.zeros(10), dof=5).plot().ax_
    x, normal = ax.lines[0].get_data()
    np.testing.assert_allclose(normal, scipy.stats.norm.pdf(x))
    student = scipy.stats.t(5, scale=np.sqrt(3 / 5))
    np.testing.assert_allclose(ax.lines[1].get_ydata(), student.pdf(x))
    assert ZScoreDisplay.from_prediction(*ensemble(9, n_members=3)).dof is None


# --- drawing ---

AWKWARD = {
    "no members": (np.zeros(60), Prediction(mean=np.linspace(-1, 1, 60), std=np.full(60, 0.5))),
    "one point": ensemble(1),
    "two members": ensemble(2, n_members=2),
    "same scale": ensemble(300, width=0.0),
    "two outputs": ensemble(300, outputs=(2,)),
    "uncalibrated": ensemble(300, error=100.0),
    "exact": ensemble(300, error=1e-9),
    "same std": (np.arange(60.0), Prediction(np.arange(60.0)[:, None] + [-1.0, 0.5, 1.0])),
    "all the same": (np.zeros(400), Prediction(np.tile([1.0, 2.0], (400, 1)))),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_data_can_be_drawn(case):
    figure = Figure()
    for ax, cls in zip(figure.subplots(1, 5), OF_PREDICTIONS, strict=True):
        cls.from_prediction(*AWKWARD[case]).plot(ax)
    figure.savefig(io.BytesIO(), format="png")


def test_a_display_draws_on_given_axes():
    ax = Figure().add_subplot()
    display = ReliabilityDisplay.from_prediction(*ensemble(error=3.0))
    assert display.plot(ax, label="raw") is display
    assert (display.ax_, display.figure_) == (ax, ax.figure)
    assert display._repr_png_() is None
    n_lines = len(ax.lines)
    display.plot(ax, label="again", reference=False, **line_style(1))
    assert len(ax.lines) == n_lines + 1


def test_drawing_leaves_the_settings_as_they_are():
    y, p = ensemble(50)
    before = dict(mpl.rcParams)
    plain = png(ZScoreDisplay.from_prediction(y, p))
    assert dict(mpl.rcParams) == before
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "red"}):
        assert png(ZScoreDisplay.from_prediction(y, p)) == plain
    assert ZScoreDisplay.from_prediction(y, p)._repr_png_() == plain


@pytest.mark.parametrize("suffix", ["pdf", "svg"])
def test_the_same_figure_gives_the_same_file(tmp_path, suffix):
    y, p = ensemble(100, n_members=4)
    for i in range(2):
        ConditionalErrorDisplay.from_prediction(y, p).save(tmp_path / f"{i}.{suffix}")
    assert (tmp_path / f"0.{suffix}").read_bytes() == (tmp_path / f"1.{suffix}").read_bytes()


def test_bad_predictions():
    y, p = ensemble(20)
    bad = {"prediction": (y, p.mean), "y": (y[1:], p)}
    for cls in OF_PREDICTIONS:
        for parameter, arguments in bad.items():
            with rejects(parameter):
                cls.from_prediction(*arguments)


# --- tables ---


def columns():
    y, p = ensemble(100)
    predictions = {
        "before": Prediction(mean=p.mean, std=0.5 * p.std),
        "after": Prediction(mean=p.mean, std=p.std),
    }
    groups = np.arange(100) // 2
    return {
        name: bootstrap_scores(y, prediction, n_bootstrap=20, groups=groups)
        for name, prediction in predictions.items()
    }


def test_a_table_has_three_forms():
    table = Table(["", "a|b\nc"], [["x [y]", "1.0*"], ["z", "2"]], title="T", note="N")
    text = printed(table)
    for cell in ("x [y]", "1.0*", "T", "N"):
        assert cell in text
    assert table.markdown().splitlines()[0] == r"|  | a\|b c |"
    assert len(table.markdown().splitlines()) == 4


def test_scores_as_a_table():
    y, p = ensemble()
    rows = {"raw": score(y, p), "pp": score(y, mean=p.mean, std=2 * p.std)}
    table = score_table(rows, units="eV")
    assert [row[0] for row in table.rows] == ["raw", "pp"]
    best = max(rows, key=lambda name: rows[name].log_likelihood)
    assert [row[0] for row in table.rows if row[3].endswith("*")] == [best]
    assert float(table.rows[0][1]) == pytest.approx(rows["raw"].rmse, rel=5e-3)
    assert max(map(len, printed(score_table(rows, units="eV/atom"), 80).splitlines())) <= 80


def test_records_are_json():
    y, p = ensemble(50)
    rows = {"a": score(y, p), "b": score(y, mean=p.mean, std=1e-200 * p.std)}
    records = score_records(rows)
    json.dumps(records, allow_nan=False)
    assert records[0]["rmse"] == rows["a"].rmse
    assert records[1]["log_likelihood"] is None
    compared = columns()
    records = interval_records(compared)
    json.dumps(records, allow_nan=False)
    record = next(r for r in records if r["column"] == "after" and r["score"] == "crps")
    assert record["value"] == compared["after"].scores.crps
    assert (record["low"], record["high"]) == compared["after"].intervals["crps"]


def test_intervals_as_a_table():
    table = interval_table(columns(), units="eV")
    assert list(table.headers) == ["Score", "before", "after", "ideal"]
    (area,) = [row for row in table.rows if row[0] == "Miscalibration area"]
    low, high = (float(end) for end in area[-1].split(" to "))
    assert low == pytest.approx(0.31 / 10, rel=0.05)
    assert high == pytest.approx(0.31 / 50**0.5, rel=0.05)


def test_numbers_have_the_digits_of_their_uncertainty():
    for value, uncertainty, text in (
        (1.23456, 0.012, "1.235"),
        (-1234.5, 30.0, "−1234"),
        (0.0, None, "0.00"),
        (3.2e-7, 1e-8, "3.20e−07"),
        (0.00456, None, "0.00456"),
        (-np.inf, None, "−∞"),
        (12.0, np.inf, "12.0"),
    ):
        assert write_number(value, uncertainty) == text


# --- assessment ---


@pytest.mark.parametrize(
    ("ensemble_std", "grade"), [(1.0, "calibrated"), (0.6, "wrong"), (1.7, "wrong")]
)
def test_the_assessment_is_right_nearly_always(ensemble_std, grade):
    grades = []
    for seed in range(20):
        y, raw = ensemble(300, ensemble_std=ensemble_std, n_members=64, seed=seed)
        prediction = Prediction(mean=raw.mean, std=raw.std)
        points = evaluation(300, y=y, prediction=prediction, frames=None)
        grades.append(assess(points, n_bootstrap=100).grade)
    assert grades.count(grade) >= 18


def test_few_structures_are_not_assessed():
    y, raw = ensemble(300, n_members=64)
    structure = np.arange(300) % 5
    assert assess(evaluation(12)).grade == "approximate"
    few = evaluation(300, y=y, prediction=raw, frames=None, structure=structure)
    assert assess(few).grade == "approximate"


def grade_of(z, std, frames=None):
    """Return the grade of errors z with standard deviations std."""
    z, std = np.broadcast_arrays(z, std)
    mean = 10 * np.random.default_rng(1).normal(size=len(z))
    prediction = Prediction(mean=mean, std=std)
    points = evaluation(len(z), y=mean + z, prediction=prediction, frames=frames)
    return assess(points, n_bootstrap=20).grade


def test_the_assessment_cannot_be_fooled():
    rng = np.random.default_rng(0)
    z = rng.normal(size=1000)
    assert grade_of(z, 1.0) == "calibrated"
    for within in (0.49, 0.027, 0.91):  # fraction of the errors within σ
        assert grade_of(z, np.quantile(np.abs(z), within)) == "wrong"
    assert grade_of(z, 1.15) == "approximate"
    # The right coverage on average, of σ that are too small for one half and too large for others.
    assert grade_of(z, np.where(np.arange(1000) % 2, 0.5, 2.0)) == "wrong"
    # 95 % intervals that are right, because σ is far too large for most.
    assert grade_of(np.where(rng.random(1000) < 0.06, 20, 0.1) * z, 1.0) == "wrong"
    assert grade_of(z + 4, 1.0) == "wrong"
    assert grade_of(0.3 * z + 0.95, 1.0) != "calibrated"  # a bias within the uncertainty
    outlier = z.copy()
    outlier[7] += 1e6
    assert grade_of(outlier, 1.0) == "approximate"
    # Points without uncertainty, and with errors, are not assessed; those without are no matter.
    for error, grade in ((1.0, "approximate"), (0.0, "calibrated")):
        some = np.arange(1000) < 20
        assert grade_of(np.where(some, error, z), np.where(some, 0.0, 1.0)) == grade


def test_figures_state_what_they_show():
    y, p = ensemble(600)
    legend = ConditionalErrorDisplay.from_prediction(y, p).plot().ax_.get_legend()
    assert "0.05, 0.15, 0.25, 0.35" in legend.get_title().get_text()
    for display in (BinnedErrorDisplay, ResidualDisplay):
        ax = display.from_prediction(y, p).plot().ax_
        assert len(ax.get_legend().get_texts()) == 1


def test_coordinates_and_types_on_the_map():
    points = evaluation(30)
    for i, atoms in enumerate(points.frames):
        atoms.info["config_type"] = ["bulk", "<b>slab</b>"][i % 2]
    shown = make_map(
        points, [0], coordinates=lambda some: [np.array([[i, -2.0 * i]]) for i in some]
    )
    first, second = (f"kernel principal component {k}" for k in (1, 2))
    settings = shown.data["settings"]["map"]
    assert (settings["x"]["property"], settings["y"]["property"]) == (first, second)
    assert settings["symbol"] == "config_type"
    properties = shown.data["properties"]
    assert properties[second]["values"] == [-2.0 * i for i in range(30)]
    assert properties["config_type"]["values"][:2] == ["bulk", "bslab/b"]
    of_atoms = evaluation_of_atoms(5)
    elements = make_map(of_atoms, [0]).element_colors
    symbols = [a.symbols[j] for a in of_atoms.frames for j in range(len(a))]
    assert len(elements) == len(set(symbols))
    assert "rgb(255,13,13)" in dict(elements).values() or "O" not in symbols


def test_calibrated_uncertainties_cover_what_they_should():
    rng = np.random.default_rng(0)
    mean, z = rng.normal(size=(2, 5000))
    prediction = Prediction(mean=mean, std=np.full(5000, 1.08))
    assessment = assess(evaluation(5000, y=mean + z, prediction=prediction, frames=None))
    # The miscalibration area is negligible, but the interval of the coverage excludes 68.3 %.
    assert assessment.grade == "approximate"
    assert "too large by a factor of about 1.0" in assessment.sentence


def test_groups_with_a_bias_of_their_own_are_named():
    rng = np.random.default_rng(0)
    frames = [molecule(name) for name in ["CH3COOH", "CH3CH2OH", "H2O"] for _ in range(60)]
    z = rng.normal(size=180)
    assert grade_of(z, 1.0, frames) == "calibrated"
    z += np.repeat([1.7, -1.5, 0.0], 60)
    points = evaluation(180, y=z, prediction=Prediction(mean=0 * z, std=0 * z + 1), frames=frames)
    (warning,) = points.checked()
    assert "C2H4O2" in warning
    assert "C2H6O" in warning
    assert "H2O" not in warning
    for i, atoms in enumerate(frames):
        atoms.info["config_type"] = "abc"[i % 3]
    assert points.checked() == [warning]
    (other,) = replace(points, y=rng.normal(size=180) + np.tile([2.0, -2.0, 0.0], 60)).checked()
    assert "config_type" in other
    # A bias of all points is stated once.
    assert len(replace(points, y=z + 9).checked()) == 1


def test_a_better_calibration_is_named():
    y, raw = ensemble(400, n_members=16)
    better = {"shrinkage (out-of-bag)": score(y, raw), "raw": score(y, raw)}
    wide = Prediction(mean=raw.mean, std=2 * raw.std)
    assessments = [
        assess(evaluation(400, y=y, prediction=p, frames=None, scores=better), n_bootstrap=20)
        for p in (wide, raw)
    ]
    assert ["shrinkage" in a.details[-1] for a in assessments] == [True, False]


def test_scores_are_those_before_and_after_calibration():
    points = evaluation()
    scores, raw = assess(points).scores, points.prediction.uncalibrated
    assert scores["before calibration"].scores == score(points.y, raw)
    assert scores["after calibration"].scores == score(points.y, points.prediction)
    y, raw = ensemble(50)
    assert list(assess(evaluation(50, y=y, prediction=raw)).scores) == ["as predicted"]


# --- report ---


class Parsed(HTMLParser):
    """Tags, attributes and text of a page, without scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def write(path, points, **options):
    report = write_report(path, {"energy": points}, force=True, **options)
    return report, Parsed(path.read_text(encoding="utf-8"))


def test_a_report_has_all_sections(tmp_path):
    scores = {"raw": score(*ensemble(200)), "linear [x]": score(*ensemble(200, seed=1))}
    table = Table(["name", "value"], [["one", "42.5 [1, 2]"]], note="A note.")
    report, page = write(
        tmp_path / "a.html",
        evaluation(scores=scores),
        title="Energies",
        facts={"members": "16 of them"},
        remarks=["Two were skipped."],
        tables={"Further": table},
    )
    ids = [attributes["id"] for attributes in page.all("section")]
    assert ids == ["scores", "figures", "map", "worst", "table-1", "others", "details"]
    for text in ("Energies", "16 of them", "Two were skipped.", "linear [x]", "42.5", "A note."):
        assert text in page.text
    images = page.all("img")
    assert len(images) == 5
    assert all(i["alt"] and i["src"].startswith("data:image/") for i in images)
    anchors = {a["href"].removeprefix("#") for a in page.all("a")}
    assert anchors == set(ids)
    assert [path.name for path in report.paths] == ["a.html", "a.chemiscope.json.gz"]


@pytest.mark.usefixtures("no_figures")
def test_the_worst_predictions_are_listed(tmp_path):
    points = evaluation()
    z = np.abs(points.residuals)
    report, page = write(tmp_path / "a.html", points)
    by_ratio, by_error = report.sections["energy"].worst.values()
    order = np.argsort(-z / points.prediction.std)[:20].tolist()
    assert [int(row[0]) for row in by_ratio.rows] == order
    assert [int(row[0]) for row in by_error.rows] == np.argsort(-z)[:20].tolist()
    buttons = [int(b["data-structure"]) for b in page.all("button")]
    assert buttons[:20] == order


@pytest.mark.usefixtures("no_figures")
def test_quantities_have_their_own_sections(tmp_path):
    forces = evaluation_of_atoms(target="forces", units="eV/Å", component_names=("x", "y", "z"))
    forces = Evaluation(**vars(forces) | {"component": np.arange(len(forces)) % 3})
    evaluations = {"energy": evaluation(12, frames=forces.frames), "forces": forces}
    report = write_report(tmp_path / "a.html", evaluations)
    page = Parsed((tmp_path / "a.html").read_text(encoding="utf-8"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert "quantity-forces" in ids
    assert len(ids) == len(set(ids))
    labels = [tag["aria-label"] for tag in page.all("div") if "aria-label" in tag]
    assert len(labels) == len(set(labels))
    section = report.sections["forces"]
    assert section.assessment == assess(forces)
    assert {row[3] for row in section.worst["Largest errors"].rows} <= {"x", "y", "z"}


@pytest.mark.usefixtures("no_figures")
def test_nothing_in_the_data_becomes_markup(tmp_path):
    frames = frames_of(30)
    points = evaluation(30, frames=frames, target=EVIL, units=EVIL)
    points = Evaluation(**vars(points) | {"scores": {EVIL: score(points.y, points.prediction)}})
    write_report(
        tmp_path / "a.html",
        {"energy": points, EVIL: points},
        title=EVIL,
        facts={EVIL: EVIL},
        remarks=[EVIL],
        tables={EVIL: Table([EVIL], [[EVIL]], note=EVIL)},
        atom_values=lambda some: {EVIL: (np.ones(sum(len(frames[i]) for i in some)), EVIL)},
    )
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    page = Parsed(text)
    assert EVIL in page.text
    assert {a["src"] for a in page.all("img")} == {"data:,"}
    assert len(page.all("script")) == 3
    assert not [a for _, a in page.tags if "onerror" in a]
    data = re.search(r'id="map-data">(.*?)</script>', text, re.DOTALL).group(1)
    assert "<" not in data
    # Nothing is loaded from elsewhere.
    assert not [a for _, a in page.tags if str(a.get("src", "")).startswith("http")]
    (policy,) = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert "default-src 'none'" in policy


@pytest.mark.usefixtures("no_figures")
def test_the_same_report_gives_the_same_bytes(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        write(folder / "report.html", evaluation(30))
    for name in ("report.html", "report.chemiscope.json.gz"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_points_without_uncertainty_are_left_out(tmp_path):
    y, raw = ensemble(30)
    members = raw.members.copy()
    members[4] = members[4, 0]
    report, _ = write(tmp_path / "a.html", evaluation(30, y=y, prediction=Prediction(members)))
    assert len(report.sections["energy"].evaluation) == 29
    assert len(report.remarks) == 1
    same = evaluation(30, y=y, prediction=Prediction(np.ones((30, 4))))
    with rejects("prediction"):
        write(tmp_path / "b.html", same)


@pytest.mark.usefixtures("no_figures")
def test_without_chemiscope_there_is_no_map(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "chemiscope", None)
    report, page = write(tmp_path / "a.html", evaluation(30))
    assert report.map is None
    assert len(report.remarks) == 1
    assert not page.all("script")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.usefixtures("no_figures")
def test_tables_have_no_map(tmp_path):
    """Nor need they have members."""
    y, p = ensemble(30)
    raw = Prediction(mean=p.mean, std=p.std)
    calibrated = Prediction(mean=p.mean, std=2 * p.std, uncalibrated=raw)
    points = evaluation(30, y=y, frames=None, prediction=calibrated)
    report, _ = write(tmp_path / "a.html", points)
    assert (report.map, report.remarks) == (None, [])
    after = report.sections["energy"].assessment.scores["after calibration"].scores
    assert after == score(y, mean=p.mean, std=2 * p.std)


def test_bad_reports(tmp_path):
    points = evaluation(30)
    (tmp_path / "old.html").write_text("old")
    for parameter, name, options in (
        ("path", "a.pdf", {}),
        ("path", "old.html", {}),
        ("max_structures", "a.html", {"max_structures": 0}),
    ):
        with rejects(parameter):
            write_report(tmp_path / name, {"energy": points}, **options)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


# --- map of structures ---


@pytest.mark.usefixtures("no_figures")
def test_the_map_has_predictions_and_errors(tmp_path):
    points = evaluation(40)
    report, _ = write(tmp_path / "a.html", points)
    data = json.loads(gzip.decompress(report.paths[1].read_bytes()))
    assert len(data["structures"]) == 40
    assert data["structures"][3]["cell"] == pytest.approx(points.frames[3].cell.array.ravel())
    assert "cell" not in data["structures"][0]
    values = {name: entry["values"] for name, entry in data["properties"].items()}
    ratio = np.abs(points.residuals) / points.prediction.std
    np.testing.assert_allclose(values["predicted"], points.prediction.mean, rtol=1e-7)
    np.testing.assert_allclose(values["error"], points.residuals, rtol=1e-7)
    np.testing.assert_allclose(values["|error|/σ"], ratio, rtol=1e-7)
    assert data["settings"]["pinned"] == [int(np.argmax(ratio))]
    text = report.paths[0].read_text(encoding="utf-8")
    embedded = re.search(r'id="map-data">(.*?)</script>', text, re.DOTALL).group(1)
    assert json.loads(embedded) == data


def test_a_map_of_atoms_has_environments():
    points = evaluation_of_atoms()
    shown = make_map(points, [5])
    assert shown.of_atoms
    places = [(e["structure"], e["center"]) for e in shown.data["environments"]]
    assert places == list(zip(points.structure.tolist(), points.atom.tolist(), strict=True))


def test_components_are_averaged_over_structures():
    points = evaluation_of_atoms()
    points = Evaluation(**vars(points) | {"atom": None})
    shown = make_map(points, [0])
    rms = [np.sqrt(np.mean(points.residuals[points.structure == i] ** 2)) for i in range(12)]
    np.testing.assert_allclose(shown.data["properties"]["RMS error"]["values"], rms, rtol=1e-7)
    axes = shown.data["settings"]["map"]
    assert [axes[axis]["property"] for axis in "xy"] == ["RMS σ", "RMS error"]


def test_large_maps_have_the_worst_and_a_sample():
    points = evaluation(100)
    worst = [50, 3, 99]
    shown = make_map(points, worst, max_structures=10, seed=1)
    assert len(shown.data["structures"]) == 10
    assert {*worst} <= {*shown.places}
    assert make_map(points, worst, max_structures=10, seed=1).data == shown.data
    assert set(make_map(points, worst, max_structures=2).places) == {50, 3}


def test_heavy_tails_that_the_calibration_found_are_expected():
    # Errors of Student's t with ν = 8 lie within ±σ more often than those of a Gaussian: 72 %.
    z = np.random.default_rng(0).standard_t(8, size=4000) / np.sqrt(8 / 6)
    grades = []
    for dof in (8.0, np.inf):
        prediction = Prediction(np.random.default_rng(1).normal(size=(4000, 8)), dof=dof)
        y = prediction.mean + z * prediction.std
        grades.append(assess(evaluation(4000, y=y, prediction=prediction, frames=None)).grade)
    assert grades == ["calibrated", "approximate"]
