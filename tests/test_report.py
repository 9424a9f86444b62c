"""Figures and tables: the numbers they show, and that they can be made of awkward data."""

import doctest
import importlib
import io
import json
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import scipy.stats
from matplotlib.container import ErrorbarContainer
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from rich.console import Console

from qualms import InputError, Prediction, calibrate, score
from qualms.calibration.methods import LinearCalibration, PowerCalibration
from qualms.calibration.selection import ConfidenceIntervals
from qualms.metrics import conditional_error_density, score_arrays
from qualms.report import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    LearningCurveDisplay,
    ParityDisplay,
    ReliabilityDisplay,
    SubsampleSizeDisplay,
    ZScoreDisplay,
    calibration_table,
    line_style,
    paper_table,
    score_records,
    score_table,
    style,
)
from qualms.report.figures import _plain_number, log_limits, robust_limits

OF_PREDICTIONS = [
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    ParityDisplay,
    ReliabilityDisplay,
    ZScoreDisplay,
]

#: Log likelihoods of Musil et al. 2019 for chemical shieldings, sub-samples of 20 000 points.
PAPER = {
    1000: {"Raw": -0.554, "CV": -0.398, "N-L": -0.356, "Int.": -0.398, "Int. N-L": -0.356},
    5000: {"Raw": -0.389, "CV": -0.381, "N-L": -0.338, "Int.": -0.382, "Int. N-L": -0.337},
    18000: {"Raw": -18.75, "CV": -0.412, "N-L": -0.308, "Int.": -0.517, "Int. N-L": -0.351},
}
GPR_PP = {"Raw": -8.771, "CV": -0.255, "N-L": -0.251, "Int.": None}


def committee(n=400, n_members=16, *, spread=0.7, error=1.0, seed=0, outputs=()):
    """Truth and members spread about one mean by the same σ, the truth by `error` times as much."""
    rng = np.random.default_rng(seed)
    sigma = np.exp(spread * rng.normal(size=(n, *outputs)))
    center = 10 * rng.normal(size=sigma.shape)
    members = sigma[..., None] * rng.normal(size=(*sigma.shape, n_members))
    return center + error * sigma * rng.normal(size=sigma.shape), Prediction(
        center[..., None] + members
    )


def displays(y, prediction):
    return [cls.from_prediction(y, prediction) for cls in OF_PREDICTIONS]


def png(display, **kwargs):
    file = io.BytesIO()
    display.save(file, format="png", **kwargs)
    return file.getvalue()


def text_of(renderable, width=80):
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


# the numbers of the displays


def test_conditional_display_has_the_densities_of_true_and_member_errors():
    y, p = committee()
    options = {"bandwidth": (0.3, 0.3), "min_points": 5}
    shown = ConditionalErrorDisplay.from_prediction(y, p, **options).densities
    direct = conditional_error_density(y, p.mean, p.std, p.members, **options)
    np.testing.assert_array_equal(shown.true.density, direct.true.density)
    np.testing.assert_array_equal(shown.model.density, direct.model.density)


def test_conditional_display_draws_two_sets_of_contours_where_supported():
    y, p = committee(2000)
    ax = ConditionalErrorDisplay.from_prediction(y, p, units="ppm").plot(levels=[0.1, 0.3]).ax_
    contours = [c for c in ax.get_children() if isinstance(c, ContourSet)]
    assert [list(c.levels) for c in contours] == [[0.1, 0.3]] * 2
    assert len({str(c.get_linestyle()) for c in contours}) == 2
    # Of Gaussian members the contour is where sqrt(2/π) exp(t − e^2t/2) = 0.1, t = ln ε/σ.
    x, error = contours[1].get_paths()[0].vertices.T
    t = np.log(error / x)
    assert np.all(np.minimum(abs(t + 2.07), abs(t - 0.79)) < 0.5)  # smoothing makes it wider
    assert ax.get_xlabel() == r"Predicted error $\sigma$ (ppm)"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_conditional_display_of_a_gaussian_model_without_members():
    y, p = committee()
    ConditionalErrorDisplay(conditional_error_density(y, p.mean, p.std), target="E").plot()


def test_reliability_display_counts():
    y, p = committee()
    display = ReliabilityDisplay.from_prediction(y, p, levels=[0.9, 0.5])
    t = np.abs(y - p.mean) / p.std
    expected = [np.mean(t <= scipy.stats.norm.ppf(0.5 + level / 2)) for level in (0.9, 0.5)]
    np.testing.assert_allclose(display.curve.observed, expected)
    assert display.area == pytest.approx(score(y, p).miscalibration_area)
    x, observed = display.plot(label="raw").ax_.lines[-1].get_data()
    np.testing.assert_allclose(x, [0, 0.5, 0.9, 1])
    np.testing.assert_allclose(observed, [0, expected[1], expected[0], 1])


def test_reliability_of_student_intervals():
    y, p = committee(4000, n_members=5)
    # z ~ N(0, 1 + 1/5) over a spread with 4 degrees of freedom, whose t has variance 2.
    calibrated = Prediction(p.mean[:, None] + np.sqrt(2.4) * (p.members - p.mean[:, None]))
    student = ReliabilityDisplay.from_prediction(y, calibrated, dof=4)
    assert student.area < 0.02 < ReliabilityDisplay.from_prediction(y, calibrated).area


def test_binned_display_has_root_mean_squares():
    y, p = committee(100)
    display = BinnedErrorDisplay.from_prediction(y, p, n_bins=4)
    order = np.argsort(p.std).reshape(4, 25)
    np.testing.assert_allclose(display.bins.rmv, np.sqrt(np.mean(p.std[order] ** 2, axis=1)))
    rms = np.sqrt(np.mean((y - p.mean)[order] ** 2, axis=1))
    np.testing.assert_allclose(display.bins.rmse, rms)
    (bars,) = [c for c in display.plot().ax_.containers if isinstance(c, ErrorbarContainer)]
    np.testing.assert_allclose(bars.lines[0].get_ydata(), rms)


def test_parity_display_keeps_the_values():
    y, p = committee(50, outputs=(2,))
    display = ParityDisplay.from_prediction(y, p, units="eV", target="energy")
    np.testing.assert_array_equal(display.y, y.ravel())
    assert display.rmse == pytest.approx(np.sqrt(np.mean((y - p.mean) ** 2)))
    assert display.mae == pytest.approx(np.mean(np.abs(y - p.mean)))
    ax = display.plot().ax_
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Reference energy (eV)", "Predicted energy (eV)")
    assert len(ax.containers[0].lines[0].get_xdata()) == 100


def test_many_points_become_a_density_with_some_error_bars():
    y, p = committee(1000)
    y[0] = 1e6
    ax = ParityDisplay.from_prediction(y, p).plot(n_bars=11).ax_
    assert len(ax.containers[0].lines[0].get_xdata()) == 11
    counts = ax.collections[0].get_array()
    assert counts.sum() == 999  # all but the outlier, which the text owns up to
    assert "1 outside" in ax.texts[-1].get_text()
    assert ax.get_xlim()[1] < 100


def test_z_scores_and_their_histogram():
    y, p = committee(500)
    y[0] = p.mean[0] + 50 * p.std[0]
    display = ZScoreDisplay.from_prediction(y, p)
    z = (y - p.mean) / p.std
    np.testing.assert_allclose(display.z_scores, z)
    assert display.rms == pytest.approx(np.sqrt(np.mean(z**2)))
    assert display.dof == 15
    assert display.n_outside == np.sum(np.abs(z) > display.edges[-1]) >= 1
    inside = np.sum(display.density * np.diff(display.edges))
    assert inside == pytest.approx(1 - display.n_outside / 500)
    np.testing.assert_allclose(display.edges, -display.edges[::-1])


def test_z_scores_are_compared_with_densities_of_unit_variance():
    ax = ZScoreDisplay(np.zeros(10), dof=5).plot().ax_
    x, normal = ax.lines[0].get_data()
    np.testing.assert_allclose(normal, scipy.stats.norm.pdf(x))
    student = scipy.stats.t(5, scale=np.sqrt(3 / 5))
    assert student.std() == pytest.approx(1)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), student.pdf(x))
    assert len(ZScoreDisplay(np.zeros(10)).plot(log=True).ax_.lines) == 1
    assert ZScoreDisplay.from_prediction(*committee(9, n_members=3)).dof is None


def test_subsample_sizes_of_the_paper():
    rows = {size: PAPER[size] for size in (5000, 1000, 18000)}
    rows[5000] = rows[5000] | {"student": -0.3}
    display = SubsampleSizeDisplay.from_table(rows, references={"GPR PP": -0.25, "raw": -8.771})
    np.testing.assert_array_equal(display.sizes, [5000, 1000, 18000])
    np.testing.assert_array_equal(display.log_likelihoods["CV"], [-0.381, -0.398, -0.412])
    np.testing.assert_array_equal(display.log_likelihoods["student"], [-0.3, np.nan, np.nan])
    ax = display.plot().ax_
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1000, 5000, 18000])
    low, high = ax.get_ylim()
    assert -1 < low < -0.554
    assert -0.25 < high < 0
    assert [t.get_text() for t in ax.texts] == ["−18.8"]
    names = [t.get_text() for t in ax.get_legend().get_texts()]
    assert names == ["Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "GPR PP", "raw: −8.77"]


def test_learning_curve_of_repeated_scores():
    scores = [score(*committee(50, seed=s)) for s in range(3)]
    display = LearningCurveDisplay.from_scores({200: scores[0], 100: scores[1:]}, units="K")
    errors = [s.rmse for s in scores[1:]]
    np.testing.assert_allclose(display.rmse, [scores[0].rmse, np.mean(errors)])
    np.testing.assert_allclose(display.predicted[0], scores[0].sharpness)
    np.testing.assert_allclose(display.rmse_stderr, [0, abs(errors[0] - errors[1]) / 2])
    ax = display.plot(label="A").ax_
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [100, 200])
    before = ax.get_xlim()
    LearningCurveDisplay([1000, 5000], [0.1, 0.05]).plot(ax, label="B", **line_style(1))
    assert ax.get_xlim()[0] == before[0]
    assert ax.get_xlim()[1] > 5000
    names = [t.get_text() for t in ax.get_legend().get_texts()]
    assert names == ["A, actual (RMSE)", "A, predicted (RMV)", "B, actual (RMSE)"]


# drawing


@pytest.mark.parametrize(
    "data",
    [
        committee(1),
        committee(2, n_members=2),
        committee(12),
        committee(500, spread=0.0),
        committee(500, outputs=(3,)),
        committee(500, error=100.0),
        committee(500, error=1e-9),
        (np.arange(60.0), Prediction(np.arange(60.0)[:, None] + [-1.0, 0.5, 1.0])),
        (np.zeros(400), Prediction(np.tile([1.0, 2.0], (400, 1)))),
    ],
    ids=["1", "2", "12", "same-scale", "outputs", "raw", "sure", "same-std", "same-everything"],
)
def test_awkward_data_can_be_drawn(data):
    for display in displays(*data):
        assert png(display.plot()).startswith(b"\x89PNG")


def test_bins_of_one_point_and_of_no_error_can_be_drawn():
    y, p = committee(5)
    y[np.argmin(p.std)] = p.mean[np.argmin(p.std)]
    display = BinnedErrorDisplay.from_prediction(y, p, n_bins=5).plot()
    assert np.isinf(display.bins.rmse_stderr).all()
    assert display.ax_.texts[0].get_text() == "1 of 5 bins at zero"
    png(display)
    png(BinnedErrorDisplay.from_prediction(p.mean, p))


def test_densities_flatter_than_all_levels_can_be_drawn():
    y, p = committee(300)
    png(ConditionalErrorDisplay.from_prediction(y, p).plot(levels=[5.0, 6.0], legend=False))


def test_likelihoods_without_a_finite_value_can_be_drawn():
    png(SubsampleSizeDisplay([0.1, 0.5], {"a": [np.nan, -np.inf]}).plot(legend=False))
    png(SubsampleSizeDisplay([0.1], {"a": [-1.0]}))


def test_display_draws_on_axes_given_and_keeps_their_letters():
    figure = Figure()
    for ax, display in zip(figure.subplots(1, 5), displays(*committee()), strict=True):
        size = ax.xaxis.label.get_fontsize()
        assert display.plot(ax) is display
        assert display.ax_ is ax
        assert display.figure_ is figure
        assert display._repr_png_() is None  # whoever made the figure shows it
        for text in ax.get_legend().get_texts() if ax.get_legend() else []:
            assert text.get_fontsize() == pytest.approx(size * 8 / 9)


def test_two_curves_share_axes():
    ax = ReliabilityDisplay.from_prediction(*committee(error=3.0)).plot(label="raw").ax_
    second = ReliabilityDisplay(ReliabilityDisplay.from_prediction(*committee(seed=1)).curve)
    second.plot(ax, label="student", reference=False, **line_style(1))
    names = [t.get_text().split(",")[0] for t in ax.get_legend().get_texts()]
    assert names == ["calibrated", "raw", "student"]
    bare = second.plot(reference=False).ax_
    assert bare.get_legend() is None
    ax = BinnedErrorDisplay.from_prediction(*committee()).plot(label="raw").ax_
    wide = BinnedErrorDisplay.from_prediction(*committee(error=50.0))
    wide.plot(ax, label="bad", reference=False)
    assert ax.get_ylim()[1] > wide.bins.rmse.max()


def test_drawing_leaves_no_trace():
    pyplot = importlib.import_module("matplotlib.pyplot")
    before = dict(mpl.rcParams)
    for display in displays(*committee()):
        png(display.plot())
    assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == []


def test_user_settings_do_not_change_the_figures():
    y, p = committee()
    plain = png(ZScoreDisplay.from_prediction(y, p))
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "red"}):
        assert png(ZScoreDisplay.from_prediction(y, p)) == plain


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_the_same_figure_gives_the_same_file(tmp_path, suffix):
    y, p = committee(500)
    for cls in OF_PREDICTIONS:
        files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
        for file in files:
            cls.from_prediction(y, p).save(file)
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_notebook_shows_the_figure():
    display = ZScoreDisplay(np.arange(-2.0, 3.0))
    assert display._repr_png_().startswith(b"\x89PNG")
    assert display.figure_.get_size_inches()[0] == pytest.approx(3.3)


def test_importing_the_report_does_not_import_matplotlib():
    code = "import sys, qualms.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_limits_and_ticks():
    values = np.append(np.linspace(0, 1, 1000), [1.1, 50.0])
    low, high = robust_limits(values, pad=0.0)
    assert (low, 1.1 <= high < 1.3) == (0.0, True)
    assert robust_limits(np.full(3, 7.0))[0] < 7.0 < robust_limits(np.full(3, 7.0))[1]
    low, high = log_limits(np.array([2.0]), least=4.0, pad=0.0)
    np.testing.assert_allclose([low, high], [1.0, 4.0])
    labels = [_plain_number(v) for v in (0.0, 0.02, 30, 1e-5, 2e5)]
    assert labels == ["0", "0.02", "30", "$10^{-5}$", r"$2\times10^{5}$"]
    assert len({str(line_style(i)) for i in range(8)}) == 8
    assert line_style(8) == line_style(0)


def test_docstring_examples():
    assert doctest.testmod(sys.modules[style.__module__]).failed == 0


# bad input


@pytest.mark.parametrize("cls", OF_PREDICTIONS)
def test_bad_predictions_are_refused(cls):
    y, p = committee(20)
    with pytest.raises(InputError, match="a Prediction"):
        cls.from_prediction(y, p.mean)
    with pytest.raises(InputError, match=r"shape \(19,\)"):
        cls.from_prediction(y[1:], p)
    with pytest.raises(InputError, match="NaN"):
        cls.from_prediction(np.full(20, np.nan), p)


def test_bad_numbers_are_refused():
    y, p = committee(20)
    with pytest.raises(InputError, match="dof"):
        ZScoreDisplay(y, dof=2.0)
    with pytest.raises(InputError, match="std=0 for 20 of 20"):
        ZScoreDisplay.from_prediction(y, Prediction(np.zeros((20, 4))))
    with pytest.raises(InputError, match="mean"):
        ParityDisplay(y, p.mean[1:], p.std)
    with pytest.raises(InputError, match="n_bars"):
        ParityDisplay.from_prediction(y, p).plot(max_points=10, n_bars=-1)
    with pytest.raises(InputError, match="levels"):
        ConditionalErrorDisplay.from_prediction(y, p).plot(levels=[0.0, 0.1])
    with pytest.raises(InputError, match="n_train"):
        LearningCurveDisplay([10, 10], [1.0, 2.0])
    with pytest.raises(InputError, match="rmse"):
        LearningCurveDisplay([10, 20], [1.0, 0.0])
    with pytest.raises(InputError, match="without scores"):
        LearningCurveDisplay.from_scores({10: []})
    with pytest.raises(InputError, match=r"log_likelihoods\['a'\]"):
        SubsampleSizeDisplay([1, 2], {"a": [0.0]})
    with pytest.raises(InputError, match="at least one estimator"):
        SubsampleSizeDisplay([1, 2], {})
    with pytest.raises(InputError, match="as references"):
        SubsampleSizeDisplay.from_table({"GPR PP": GPR_PP})


# tables


def several_scores():
    y, p = committee(500, error=2.0)
    methods = ("none", "linear", "power", "student", "shrinkage")
    return {m: score(y, calibrate(y[:200], p[:200], method=m).apply(p)) for m in methods}


@pytest.mark.parametrize("width", [80, 120])
def test_score_table_says_it_all(width):
    rows = several_scores()
    text = text_of(score_table(rows, units="ppm", title="Shieldings"), width)
    assert "…" not in text
    title, head, units, _, *body, caption = text.rstrip().splitlines()
    assert title.strip() == "Shieldings"
    assert head.split() == ["RMSE", "MAE", "CRPS", "cov.", "cov.", "rank"]
    assert units.split()[:5] == ["ppm", "ppm", "LL", "ppm", "area"]
    assert caption.strip() == "* highest log likelihood"
    best = max(rows, key=lambda name: round(rows[name].log_likelihood, 3))
    for (name, s), line in zip(rows.items(), body, strict=True):
        cells = line.replace("*", "").split()
        assert cells[0] == name
        shown = [s.rmse, s.mae, s.log_likelihood, s.crps, s.miscalibration_area, s.ence]
        shown += [100 * s.coverage_68, 100 * s.coverage_95, s.spearman]
        np.testing.assert_allclose([float(c) for c in cells[1:]], shown, rtol=5e-3, atol=6e-3)
        assert ("*" in line) >= (name == best)


def test_the_best_likelihood_is_bold_and_ties_are_shared():
    a, b = (score_arrays([0.0, 1.0], [0.1, 1.1], np.full(2, std)) for std in (0.1, 0.3))
    table = score_table({"a": a, "[b]": b, "a again": a}, columns=["log_likelihood", "n_points"])
    cells = list(table.columns[1].cells)
    assert [c.plain[-1] for c in cells] == ["*", " ", "*"]
    assert [str(c.style) for c in cells] == ["bold", "", "bold"]
    assert "[b]" in text_of(table)  # not taken for markup
    assert "* highest log likelihood" in text_of(table)
    assert "*" not in text_of(score_table({"a": a}, columns=["log_likelihood"]))
    other = score(*committee(9))  # of other points: nothing to compare
    assert "*" not in text_of(score_table({"a": a, "other": other}, units="[eV]"))
    assert "[eV]" in text_of(score_table({"a": a, "other": other}, units="[eV]"))


@pytest.mark.parametrize(
    ("scale", "cell"), [(1e-6, "1.00e-07"), (1e-3, "0.000100"), (1.0, "0.100"), (1e5, "10000")]
)
def test_errors_have_three_significant_digits(scale, cell):
    one = score_arrays([0.0, scale], [0.1 * scale, 1.1 * scale], np.full(2, scale))
    assert cell in text_of(score_table({"a": one}, columns=["rmse", "crps_ensemble"])).split()


def test_score_records_are_json():
    y, p = committee(50)
    certain = score_arrays([0.0, 1e200], [0.0, 0.0], [1.0, 1e-200])
    records = json.loads(
        json.dumps(score_records({"a": score(y, p), "b": certain}), allow_nan=False)
    )
    assert records[0] == {"name": "a", **score(y, p).as_dict()}
    assert (records[1]["log_likelihood"], records[1]["crps_ensemble"]) == (None, None)


def test_calibration_table_lists_parameters():
    y, p = committee(200, outputs=(2,))
    rows = {
        "cv": LinearCalibration(alpha=2.5, n_points=40, log_likelihood=-1.25),
        "n-l": PowerCalibration(alpha=1e-4, gamma=0.75),
        "two": calibrate(y, p, method="none"),
    }
    interval = ConfidenceIntervals(alpha=(2.0, 3.0), gamma=(1.0, 1.0), level=0.95)
    table = calibration_table(rows, title="[fits]", intervals={"cv": interval})
    lines = [line.split() for line in text_of(table).splitlines()]
    assert lines[0] == ["[fits]"]
    assert lines[3] == ["cv", "linear", "2.500", "[2,", "3]", "1", "40", "-1.250"]
    assert lines[4] == ["n-l", "power", "1.00e-04", "0.750", "0", "–"]
    assert lines[5][:5] == ["two[0]", "none", "1", "1", "200"]
    assert lines[6][0] == "two[1]"


@pytest.mark.parametrize("width", [80, 120])
def test_paper_table_looks_like_the_paper_s(width):
    ours = {"shrinkage": -0.3, "student": -0.31, "GPR PP": -0.255}
    ours |= {"mine": -0.4} if width > 80 else {}
    rows = {size: row | ours for size, row in PAPER.items()} | {"GPR PP": GPR_PP, 0.25: {}}
    text = text_of(paper_table(rows), width)
    lines = text.splitlines()
    order = ["Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage", "GPR PP"]
    order += ["mine"] if width > 80 else []
    positions = [lines[0].index(name) for name in order]
    assert positions == sorted(positions)
    assert lines[2].split()[:4] == ["1k", "-0.554", "-0.398", "-0.356"]
    assert [line.split()[0] for line in lines[2:7]] == ["1k", "5k", "18k", "GPR", "0.25"]
    assert [line.count("*") for line in lines[2:7]] == [1, 1, 1, 1, 0]
    assert "-0.251*" in lines[5]
    assert lines[5].count("–") == len(order) - 3
    assert "…" not in text


def test_bad_tables_are_refused():
    y, p = committee(20)
    with pytest.raises(InputError, match=r"rows\['a'\]=float"):
        score_table({"a": 1.0})
    with pytest.raises(InputError, match="at least one name"):
        score_records({})
    with pytest.raises(InputError, match=r"columns=\['r2'\]"):
        score_table({"a": score(y, p)}, columns=["rmse", "r2"])
    interval = ConfidenceIntervals((0, 1), (0, 1), 0.9)
    with pytest.raises(InputError, match="intervals"):
        calibration_table({"a": LinearCalibration()}, intervals={"b": interval})
    with pytest.raises(InputError, match="at least one sub-sample size"):
        paper_table({})
    with pytest.raises(InputError, match="student"):
        paper_table(PAPER, columns=["Raw", "student"])
