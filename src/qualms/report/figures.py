"""One look for all figures: for one column of a journal, legible in black and white.

A figure that a display makes for itself gets this look entirely; axes that the caller gives keep
their letters. The settings hold inside a ``with`` block and are gone after it; nothing here touches
pyplot.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.arrays import (
    BoolArray,
    Float64Array,
    IntArray,
    check_dof,
    check_integer,
    check_points,
    check_std,
)
from qualms.errors import InputError
from qualms.metrics import (
    BinnedErrors,
    CalibrationCurve,
    ConditionalDensity,
    ErrorDensities,
    Scores,
    binned_errors,
    calibration_curve,
    conditional_error_density,
    gaussian_log_density,
    mae,
    miscalibration_area,
    rmse,
    root_mean_square,
    student_log_density,
)
from qualms.prediction import Prediction
from qualms.report.judged import Judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure


#: Width of one column, in inches.
COLUMN_WIDTH: Final = 3.3

INK: Final = "black"
ACCENT: Final = "#D55E00"
GREY: Final = "0.82"
GUIDE: Final = "0.45"

#: Fonts that come with matplotlib, so that a figure looks the same everywhere.
_FONT: Final = ("STIXGeneral", "DejaVu Sans")
_FONT_SIZE: Final = 9.0

#: TrueType in PDF, because journals refuse Type 3; a fixed salt, because the same figure must give
#: the same file.
_LOOK: Final[dict[str, Any]] = {
    "figure.dpi": 200.0,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "patch.linewidth": 0.6,
    "xtick.direction": "in",
    "ytick.direction": "in",
    "xtick.top": True,
    "ytick.right": True,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "legend.borderaxespad": 0.6,
    "pdf.fonttype": 42,
    "svg.hashsalt": "qualms",
}

# Colours of Okabe and Ito, which the colour-blind can tell apart; without any colour the dashes and
# the markers still differ.
_LINES: Final[tuple[tuple[str, Any, str], ...]] = (
    (INK, "-", "o"),
    ("#0072B2", "--", "s"),
    (ACCENT, "-.", "^"),
    ("#009E73", (0, (1, 1)), "D"),
    ("#AA4499", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("0.5", "-", "X"),
    ("#E69F00", (0, (3, 1)), "P"),
    ("#56B4E9", (0, (8, 2)), "<"),
)


@contextmanager
def style() -> Iterator[None]:
    """Make figures in the look of this package inside a ``with`` block.

    It starts from matplotlib's defaults, whatever the user's own settings are, which come back
    afterwards.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> with style():
    ...     left, right = Figure(figsize=(6.6, 2.8), layout="constrained").subplots(1, 2)
    """
    from matplotlib.style import context

    with context(["default", _LOOK | _text(_FONT, _FONT_SIZE, "stix")]):
        yield


@contextmanager
def style_of(ax: Axes) -> Iterator[None]:
    """Make artists in the look of this package, but in the letters that the axes already have."""
    from matplotlib.style import context

    label = ax.xaxis.label
    size = float(label.get_fontsize())
    with context(_LOOK | _text(label.get_fontfamily(), size, label.get_math_fontfamily())):
        yield


def _text(family: Sequence[str], size: float, mathtext: str) -> dict[str, Any]:
    """Return the settings of text whose axis labels have the given size, in points."""
    small = size * 8.0 / 9.0
    return {
        "font.family": list(family),
        "mathtext.fontset": mathtext,
        "font.size": size,
        "axes.labelsize": size,
        "axes.titlesize": size,
        "xtick.labelsize": small,
        "ytick.labelsize": small,
        "legend.fontsize": small,
    }


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the line number ``index``, for matplotlib's ``plot``.

    Eight lines differ; then the styles repeat.
    """
    color, dashes, marker = _LINES[index % len(_LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker}


def axis_label(quantity: str, *, target: str = "", units: str = "") -> str:
    """Return an axis label such as "Error ε of the shielding (ppm)"."""
    of_target = f" of {target}" if target else ""
    in_units = f" ({units})" if units else ""
    return f"{quantity}{of_target}{in_units}"


# Limits that one outlier cannot spoil, and logarithmic axes that keep readable numbers.
#: Fraction of the points on either side that may lie outside of the limits.
_OUTSIDE = 0.002
#: Below so many decades, powers of ten alone would be too few ticks; below one, even 1, 2 and 5.
_FEW_DECADES, _NO_DECADE = 2.2, 0.7


def robust_limits(values: Float64Array, pad: float = 0.05) -> tuple[float, float]:
    """Return limits of a linear axis that hold all points but far outliers.

    Points as far as a quarter of the range beyond the 0.2 and 99.8 % quantiles are still shown.

    Parameters
    ----------
    values : ndarray
        What the axis shows, in its units.
    pad : float
        Empty margin on either side, as a fraction of the range shown.
    """
    low, high = (float(q) for q in np.quantile(values, [_OUTSIDE, 1.0 - _OUTSIDE]))
    reach = 0.25 * (high - low)
    low = max(float(np.min(values)), low - reach)
    high = min(float(np.max(values)), high + reach)
    # A single value has no range: any will do that its own digits can resolve.
    span = high - low if high > low else max(abs(low), 1.0)
    return low - pad * span, high + pad * span


def log_limits(
    values: Float64Array, *, least: float = 2.0, pad: float = 0.06
) -> tuple[float, float]:
    """Return limits of a logarithmic axis that hold all values and span at least a factor.

    Parameters
    ----------
    values : ndarray
        Positive numbers, at least one.
    least : float
        The smallest ratio of the two limits, before padding.
    pad : float
        Empty margin on either side, as a fraction of the logarithmic range.
    """
    low, high = float(np.log(np.min(values))), float(np.log(np.max(values)))
    missing = max(np.log(least) - (high - low), 0.0)
    margin = 0.5 * missing + pad * (high - low + missing)
    return float(np.exp(low - margin)), float(np.exp(high + margin))


def set_log_scale(
    ax: Axes, which: Literal["x", "y"], limits: tuple[float, float], *, shared: bool = False
) -> None:
    """Make one axis logarithmic, with few and plain numbers at the ticks.

    matplotlib labels 2 × 10⁻¹, 3 × 10⁻¹ … on axes of less than a decade, and these overlap.

    Parameters
    ----------
    ax : matplotlib Axes
    which : {"x", "y"}
    limits : tuple of two floats
        Positive.
    shared : bool
        Whether another display has drawn there before: its limits are then kept and widened.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    if shared and axis.get_scale() == "log":
        before = ax.get_xlim() if which == "x" else ax.get_ylim()
        limits = min(limits[0], before[0]), max(limits[1], before[1])
    ax.set(**{f"{which}scale": "log", f"{which}lim": limits})
    decades = np.log10(limits[1] / limits[0])
    if decades < _FEW_DECADES:
        axis.set_major_formatter(FuncFormatter(_plain_number))
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0)))
    if decades < _NO_DECADE:
        axis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axis.set_minor_formatter(NullFormatter())


def draw_diagonal(ax: Axes) -> None:
    """Draw the line of equality, as far as the axes reach."""
    ax.axline((1.0, 1.0), (2.0, 2.0), color=GUIDE, linewidth=0.8, linestyle=":", zorder=2.0)


def set_even_ticks(*axes: Axis) -> None:
    """Give linear axes at most six ticks, at multiples of 1, 2 or 5; equal limits, equal ticks."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))


def write_corner(ax: Axes, lines: Sequence[str]) -> None:
    """Write short lines into the upper left corner of the axes."""
    from matplotlib import rcParams

    size = rcParams["legend.fontsize"]
    place: dict[str, Any] = {"va": "top", "transform": ax.transAxes, "zorder": 4.0}
    ax.text(0.04, 0.96, "\n".join(lines), fontsize=size, linespacing=1.1, **place)


def _plain_number(value: float, _: int | None = None) -> str:
    """Write a tick label as a plain number where that is short."""
    if 1e-3 <= abs(value) < 1e4 or value == 0.0:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    digits = f"{float(mantissa):g}"
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if digits == "1" else rf"${digits}\times{power}$"


# What all displays share: where they draw, how they are saved, and how they read predictions.
#: Dates would make every file of the same figure a different one.
_UNDATED: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


class Display(ABC):
    """Numbers for one picture, and the picture.

    As in scikit-learn, a display is made by a class method that computes its numbers, or of numbers
    directly; `plot` draws them, as often as one likes, and importing it does not import matplotlib.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Where `plot` last drew.
    figure_ : matplotlib Figure
        The figure of these axes.
    """

    ax_: Axes
    figure_: Figure | SubFigure
    _owns_figure: bool = False

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Self:
        """Draw on the axes given, or on a new figure of one column's width."""

    def save(self, file: str | PathLike[str] | IO[bytes], **kwargs: Any) -> None:
        """Save the figure, drawing it first if need be; the same figure gives the same bytes.

        Parameters
        ----------
        file : path or binary file
            Its extension, or ``format=``, says what is written: pdf, svg, png, …
        **kwargs
            Passed to ``Figure.savefig``.
        """
        if not hasattr(self, "figure_"):
            self.plot()
        suffix = Path(file).suffix[1:] if isinstance(file, str | PathLike) else ""
        undated = _UNDATED.get(str(kwargs.get("format") or suffix).lower(), {})
        kwargs["metadata"] = undated | (kwargs.get("metadata") or {})
        with style():
            self.ax_.figure.figure.savefig(file, **kwargs)

    def _repr_png_(self) -> bytes | None:
        # Notebooks show the figures of pyplot by themselves; this one is unknown to pyplot.
        if hasattr(self, "figure_") and not self._owns_figure:
            return None
        picture = io.BytesIO()
        self.save(picture, format="png")
        return picture.getvalue()

    @contextmanager
    def _drawing(self, ax: Axes | None, aspect: float) -> Iterator[Axes]:
        """Give the axes to draw on, new ones in our look if there are none, and remember them.

        ``aspect`` is the height of a new figure over its width.
        """
        self._owns_figure = ax is None
        if ax is not None:
            self.ax_, self.figure_ = ax, ax.figure
            with style_of(ax):
                yield ax
            return
        from matplotlib.figure import Figure

        with style():
            figure = Figure(figsize=(COLUMN_WIDTH, aspect * COLUMN_WIDTH), layout="constrained")
            self.ax_, self.figure_ = figure.add_subplot(), figure
            yield self.ax_


def truth_and_residuals(y: ArrayLike, prediction: Prediction) -> tuple[Float64Array, Float64Array]:
    """Return the true values and z = y − ȳ, both of the shape of the prediction."""
    if not isinstance(prediction, Prediction):
        raise InputError(
            "prediction",
            type(prediction).__name__,
            "a Prediction",
            "Make one of members; of mean and standard deviation alone, give the numbers that "
            "qualms.core computes of them to the display itself.",
        )
    if np.shape(y) != prediction.shape:
        raise InputError("y", f"shape {np.shape(y)}", f"that of the prediction, {prediction.shape}")
    truth = check_points("y", y)
    return truth, truth - prediction.mean


# How large errors are where a given error bar was predicted.
@dataclass(eq=False)
class BinnedErrorDisplay(Display):
    """Root mean squared error against root mean variance, in bins of σ, both logarithmic.

    On the line error bars are right; above it they are too small.

    Parameters
    ----------
    bins : BinnedErrors
        From `qualms.metrics.binned_errors`.
    units, target : str
        For the labels.
    """

    bins: BinnedErrors
    units: str = ""
    target: str = ""

    @classmethod
    def from_prediction(
        cls,
        y: ArrayLike,
        prediction: Prediction,
        *,
        n_bins: int | None = None,
        units: str = "",
        target: str = "",
    ) -> Self:
        """Sort the points of a prediction by σ into bins of equal count.

        Parameters
        ----------
        y : array of the shape of the prediction
            True values; every entry counts as one point.
        prediction : Prediction
        n_bins : int, optional
            Number of bins; by default 10, or as many as leave ten points in each.
        units, target : str
            For the labels.
        """
        _, z = truth_and_residuals(y, prediction)
        return cls(binned_errors(z, prediction.std, n_bins), units=units, target=target)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        reference: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Draw one point per bin, with standard errors, and the line of equality.

        Bins whose actual or predicted error is zero have no place on logarithmic axes; their number
        is written on the figure.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default. Both axes become logarithmic.
        label : str
            Name of the points in the legend.
        reference : bool
            Whether to draw the line; False for a second set of points on the same axes.
        **kwargs
            Passed to ``Axes.errorbar``.
        """
        shown: BoolArray = (self.bins.rmv > 0.0) & (self.bins.rmse > 0.0)
        with self._drawing(ax, aspect=0.97) as axes:
            self._set_axes(axes, shown)
            if reference:
                draw_diagonal(axes)
            if shown.any():
                self._draw_bins(axes, shown, {"label": label or None} | kwargs)
            n_hidden = int(np.count_nonzero(~shown))
            if n_hidden:
                note = f"{n_hidden} of {shown.size} bins at zero"
                axes.text(0.96, 0.05, note, ha="right", transform=axes.transAxes)
            if label:
                axes.legend(loc="upper left")
        return self

    def _draw_bins(self, ax: Axes, shown: BoolArray, kwargs: dict[str, Any]) -> None:
        b = self.bins
        markers: dict[str, Any] = {
            "color": INK,
            "marker": "o",
            "linestyle": "none",
            "elinewidth": 0.8,
        }
        ax.errorbar(
            b.rmv[shown],
            b.rmse[shown],
            xerr=_log_bars(b.rmv[shown], b.rmv_stderr[shown]),
            yerr=_log_bars(b.rmse[shown], b.rmse_stderr[shown]),
            **markers | kwargs,
        )

    def _set_axes(self, ax: Axes, shown: BoolArray) -> None:
        """Give both axes the same limits."""
        b = self.bins
        values = np.ones(1)
        if shown.any():
            below, above = _log_bars(b.rmse[shown], b.rmse_stderr[shown])
            ends = (b.rmv[shown], b.rmse[shown] - below, b.rmse[shown] + above)
            values = np.concatenate(ends)
        limits = log_limits(values, least=3.0)
        shared = ax.has_data()
        set_log_scale(ax, "x", limits, shared=shared)
        set_log_scale(ax, "y", limits, shared=shared)
        ax.set_aspect("equal")
        ax.set_xlabel(axis_label("Root mean variance", target=self.target, units=self.units))
        ax.set_ylabel(axis_label("RMSE", target=self.target, units=self.units))


def _log_bars(values: Float64Array, stderr: Float64Array) -> Float64Array:
    """Return lengths (2, n) of error bars that are even on a logarithmic axis; zero if unknown.

    The standard error of ln r is that of r over r. Bars that are even in r itself could reach below
    zero.
    """
    known = np.isfinite(stderr)
    factor = np.exp(np.divide(stderr, values, out=np.zeros_like(values), where=known))
    return np.stack([values - values / factor, values * factor - values])


# The figure of the paper: which errors occur, and which the model expects, at each error bar.
#: Densities per unit of ln ε at which contours are drawn. That of a Gaussian model is at most
#: sqrt(2/(πe)) = 0.48, at ε = σ, whatever the units: the same levels serve for all figures.
_LEVELS = (0.05, 0.15, 0.25, 0.35)
_NAME = r"{}, $P(\ln\epsilon_{}\,|\,\ln\sigma)$"
#: The smallest error worth showing, in units of σ: the density of a Gaussian is 0.0008 there.
_SMALLEST_ERROR = 1e-3
#: Height of the marginal, as a fraction of the axes.
_MARGINAL_HEIGHT = 0.22


@dataclass(eq=False)
class ConditionalErrorDisplay(Display):
    """P(ln ε | ln σ) of true and of model errors: Eq. (18), Musil et al. 2019, as in its figures.

    If error bars are right at each σ, not only on average, the solid and the dashed contours agree.

    Parameters
    ----------
    densities : ErrorDensities
        From `qualms.metrics.conditional_error_density`, which also takes a Gaussian model
        without members.
    units : str
        Units of ε and σ, for the labels.
    target : str
        What was predicted, for the labels.
    """

    densities: ErrorDensities
    units: str = ""
    target: str = ""

    @classmethod
    def from_prediction(
        cls,
        y: ArrayLike,
        prediction: Prediction,
        *,
        bandwidth: tuple[float, float] | None = None,
        min_points: float = 20.0,
        units: str = "",
        target: str = "",
    ) -> Self:
        """Estimate the densities of the errors of a prediction and of its members.

        Parameters
        ----------
        y : array of the shape of the prediction
            True values; every entry counts as one point.
        prediction : Prediction
            Its members make the model errors ε_m = |y⁽ⁱ⁾ − ȳ|.
        bandwidth : tuple of two floats, optional
            Of the smoothing along ln σ and ln ε; Scott's rule by default.
        min_points : float
            Contours are drawn where about as many points lie within a bandwidth of ln σ.
        units, target : str
            For the labels.
        """
        truth, _ = truth_and_residuals(y, prediction)
        densities = conditional_error_density(
            truth,
            prediction.mean,
            prediction.std,
            prediction.members,
            bandwidth=bandwidth,
            min_points=min_points,
        )
        return cls(densities, units=units, target=target)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        levels: ArrayLike = _LEVELS,
        legend: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Draw contours of the true errors (solid) and of the model's (dashed), and P(ln σ) (grey).

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default. Both axes become logarithmic.
        levels : array_like of float
            Densities per unit of ln ε at which contours are drawn, the same for both.
        legend : bool
            Whether to say which line is which.
        **kwargs
            Passed to ``Axes.contour``, for both densities.
        """
        heights = np.unique(check_points("levels", levels))
        if heights[0] <= 0.0:
            raise InputError("levels", f"{heights[0]:g} at least", "densities > 0")
        true, model = self.densities.true, self.densities.model
        with self._drawing(ax, aspect=0.95) as axes:
            self._set_axes(axes, float(heights[0]))
            self._draw_marginal(axes)
            _draw_contours(axes, true, heights, {"colors": INK, "linestyles": "-"} | kwargs)
            _draw_contours(axes, model, heights, {"colors": ACCENT, "linestyles": "--"} | kwargs)
            if not self._supported.any():
                axes.text(0.05, 0.9, "too few points for contours", transform=axes.transAxes)
            if legend:
                _add_legend(axes)
        return self

    @property
    def _supported(self) -> BoolArray:
        """Where either density means something."""
        supported: BoolArray = self.densities.true.supported | self.densities.model.supported
        return supported

    def _set_axes(self, ax: Axes, lowest: float) -> None:
        """Show the range of σ with contours, and that of ε down to below the lowest of them."""
        true, model = self.densities.true, self.densities.model
        shown = self._supported if self._supported.any() else np.ones(true.ln_sigma.shape, bool)
        sigma = np.exp(true.ln_sigma[shown])
        # Half the lowest level leaves room around the contours, above all for the marginal below.
        seen = np.maximum(true.density, model.density).max(axis=0) > 0.5 * lowest
        errors = np.exp(true.ln_error[seen]) if seen.any() else sigma
        # Members that agree to rounding make errors of 1e-15, which would squeeze all others.
        errors = np.maximum(errors, _SMALLEST_ERROR * sigma.min())
        set_log_scale(ax, "x", log_limits(sigma, pad=0.0))
        set_log_scale(ax, "y", log_limits(errors, pad=0.08))
        ax.set_xlabel(axis_label(r"Predicted error $\sigma$", target=self.target, units=self.units))
        ax.set_ylabel(axis_label(r"Error $\epsilon$", target=self.target, units=self.units))

    def _draw_marginal(self, ax: Axes) -> None:
        """Draw P(ln σ) at the foot of the axes, scaled to a fixed height, and the line ε = σ."""
        sigma = np.exp(self.densities.true.ln_sigma)
        marginal = self.densities.true.marginal
        height: Float64Array = _MARGINAL_HEIGHT * marginal / marginal.max()
        foot = ax.get_xaxis_transform()  # x in data, y as a fraction of the axes
        ax.fill_between(sigma, height, color=GREY, linewidth=0.0, transform=foot, zorder=0.5)
        draw_diagonal(ax)


def _draw_contours(
    ax: Axes, conditional: ConditionalDensity, levels: Float64Array, kwargs: dict[str, Any]
) -> None:
    """Draw contours where the density is supported, open at the ends of these ranges of σ."""
    # Unsupported rows are unknown, not zero: a contour around them would be an invention.
    density = np.where(conditional.supported[:, None], conditional.density, np.nan).T
    if conditional.supported.sum() < 2:
        return
    # Without a level to draw matplotlib would warn, for instance of a density that is very flat.
    crossed = levels[(levels > np.nanmin(density)) & (levels < np.nanmax(density))]
    if crossed.size:
        x, y = np.exp(conditional.ln_sigma), np.exp(conditional.ln_error)
        ax.contour(x, y, density, **{"levels": crossed, "linewidths": 0.9} | kwargs)


def _add_legend(ax: Axes) -> None:
    """Name lines and shading, above the axes, where they cover nothing."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=INK, linestyle="-", label=_NAME.format("true", "t")),
        Line2D([], [], color=ACCENT, linestyle="--", label=_NAME.format("model", "m")),
        Patch(facecolor=GREY, label=r"$P(\ln\sigma)$"),
        Line2D([], [], color=GUIDE, linestyle=":", label=r"$\epsilon=\sigma$"),
    ]
    legend = ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for line in legend.get_lines():
        line.set_linewidth(0.9)


# How scores change with the size of the sub-samples and of the training set.
_REFERENCE_DASHES = ((0, (1, 2)), (0, (6, 2, 1, 2)), (0, (10, 3)))


@dataclass(eq=False)
class SubsampleSizeDisplay(Display):
    """Log likelihood against sub-sample size, a line for each estimator: the paper's tables.

    Parameters
    ----------
    sizes : array of shape (n_sizes,)
        Sizes of the sub-samples, as numbers or as fractions of the training set.
    log_likelihoods : mapping from str to array of shape (n_sizes,)
        Mean log likelihood per point of each estimator at each size; NaN where there is none.
    references : mapping from str to float, optional
        Log likelihoods that do not depend on the size, such as that of the projected process.
    """

    sizes: Float64Array
    log_likelihoods: Mapping[str, Float64Array]
    references: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = _check_sizes("sizes", self.sizes)
        self.log_likelihoods = {
            name: _check_likelihoods(f"log_likelihoods[{name!r}]", values, self.sizes.size)
            for name, values in self.log_likelihoods.items()
        }
        if not self.log_likelihoods:
            raise InputError("log_likelihoods", "nothing", "at least one estimator")
        self.references = {
            name: float(_check_likelihoods(f"references[{name!r}]", [value], 1)[0])
            for name, value in self.references.items()
        }

    @classmethod
    def from_table(
        cls,
        rows: Mapping[Any, Mapping[str, float | None]],
        *,
        references: Mapping[str, float] | None = None,
    ) -> Self:
        """Take the numbers that `qualms.report.paper_table` takes.

        Parameters
        ----------
        rows : mapping from size to mapping from estimator to log likelihood
            Sizes must be numbers; an estimator may be missing or None at some of them.
        references : mapping from str to float, optional
        """
        for size in rows:
            if isinstance(size, str):
                raise InputError(
                    "rows", repr(size), "sizes that are numbers", "Give this row as references."
                )
        names = dict.fromkeys(name for row in rows.values() for name in row)
        columns = {
            name: [np.nan if row.get(name) is None else row[name] for row in rows.values()]
            for name in names
        }
        lines = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
        return cls(np.array(list(rows)), lines, references or {})

    def plot(self, ax: Axes | None = None, *, legend: bool = True, **kwargs: Any) -> Self:
        """Draw one line per estimator.

        Values far below the others would hide how these differ. They lie outside of the axes, and
        triangles at the bottom show where; a reference there has its value in the legend.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.
        legend : bool
            Whether to name the lines, above the axes.
        **kwargs
            Passed to ``Axes.plot``, for all lines.
        """
        low, high = self._limits()
        order = np.argsort(self.sizes)
        with self._drawing(ax, aspect=0.9) as axes:
            for i, (name, values) in enumerate(self.log_likelihoods.items()):
                line = line_style(i) | {"label": name, "linewidth": 1.0} | kwargs
                axes.plot(self.sizes[order], values[order], **line)
                self._mark_below(axes, values, low, line["color"])
            for i, (name, value) in enumerate(self.references.items()):
                label = name if value >= low else f"{name}: {_written(value)}"
                dashes = _REFERENCE_DASHES[i % len(_REFERENCE_DASHES)]
                axes.axhline(value, color=GUIDE, linewidth=1.0, linestyle=dashes, label=label)
            axes.set_ylim(low, high)
            axes.margins(x=0.08)
            set_even_ticks(axes.xaxis)
            axes.set(xlabel=r"Sub-sample size $n$", ylabel="Log likelihood per point")
            if legend:
                axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return self

    def _mark_below(self, ax: Axes, values: Float64Array, low: float, color: str) -> None:
        """Put triangles where values lie below the axes, and write the values above them."""
        foot = ax.get_xaxis_transform()  # x in data, y as a fraction of the axes
        n_below = np.sum([line < low for line in self.log_likelihoods.values()], axis=0)
        for size, value, n in zip(self.sizes, values, n_below, strict=True):
            if value < low:
                ax.plot([size], [0.03], color=color, marker="v", transform=foot)
            if value < low and n == 1:  # the values of several would cover each other
                place: dict[str, Any] = {"transform": foot, "ha": "center"}
                ax.text(size, 0.055, _written(value), size="small", color=color, **place)

    def _limits(self) -> tuple[float, float]:
        """Return limits that hold all values but those far below, by Tukey's rule."""
        values = np.concatenate([*self.log_likelihoods.values(), list(self.references.values())])
        values = values[np.isfinite(values)]
        if values.size == 0:
            return 0.0, 1.0
        first, third = np.quantile(values, [0.25, 0.75])
        kept = values[values >= first - 3.0 * (third - first)]
        low, high = float(kept.min()), float(kept.max())
        margin = 0.1 * (high - low) if high > low else 0.1 * max(abs(low), 1.0)
        # Twice as much below, for the triangles.
        return low - 2.0 * margin, high + margin


@dataclass(eq=False)
class LearningCurveDisplay(Display):
    """Actual and predicted error against the number of training points, both logarithmic.

    Parameters
    ----------
    n_train : array of shape (n_sizes,)
        Numbers of training points.
    rmse : array of shape (n_sizes,)
        Root mean squared errors > 0.
    predicted : array of shape (n_sizes,), optional
        Root mean predicted variances > 0, in the same units: what the model takes its error for.
    rmse_stderr : array of shape (n_sizes,), optional
        Standard errors of ``rmse``.
    units, target : str
        For the labels.
    """

    n_train: Float64Array
    rmse: Float64Array
    predicted: Float64Array | None = None
    rmse_stderr: Float64Array | None = None
    units: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        self.n_train = _check_sizes("n_train", self.n_train)
        shape = self.n_train.shape
        self.rmse = check_std(self.rmse, shape, parameter="rmse")
        if self.predicted is not None:
            self.predicted = check_std(self.predicted, shape, parameter="predicted")
        if self.rmse_stderr is not None:
            self.rmse_stderr = check_std(
                self.rmse_stderr, shape, allow_zero=True, parameter="rmse_stderr"
            )

    @classmethod
    def from_scores(
        cls,
        rows: Mapping[int, Scores | Sequence[Scores]],
        *,
        units: str = "",
        target: str = "",
    ) -> Self:
        """Take errors and sharpness of models of several sizes.

        Parameters
        ----------
        rows : mapping from the number of training points to Scores, or to several of them
            Several are repetitions with other training points: their means are drawn, with the
            standard error of the mean.
        units, target : str
            For the labels.
        """
        repeats = [[s] if isinstance(s, Scores) else list(s) for s in rows.values()]
        if not all(repeats):
            raise InputError("rows", "a size without scores", "at least one Scores for each size")
        errors = [np.array([s.rmse for s in scores]) for scores in repeats]
        stderr = [e.std(ddof=1) / np.sqrt(e.size) if e.size > 1 else 0.0 for e in errors]
        return cls(
            np.array(list(rows), dtype=np.float64),
            np.array([e.mean() for e in errors]),
            predicted=np.array([np.mean([s.sharpness for s in scores]) for scores in repeats]),
            rmse_stderr=np.array(stderr),
            units=units,
            target=target,
        )

    def plot(self, ax: Axes | None = None, *, label: str = "", **kwargs: Any) -> Self:
        """Draw the actual errors (solid, filled) and the predicted ones (dashed, open).

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default. Both axes become logarithmic.
        label : str
            Name of the model in the legend.
        **kwargs
            Passed to ``Axes.plot``, for both lines.
        """
        prefix = f"{label}, " if label else ""
        line: dict[str, Any] = {"color": INK, "marker": "o", "linewidth": 1.0} | kwargs
        order = np.argsort(self.n_train)
        x = self.n_train[order]
        with self._drawing(ax, aspect=0.78) as axes:
            shared = axes.has_data()
            axes.plot(x, self.rmse[order], label=f"{prefix}actual (RMSE)", **line)
            if self.rmse_stderr is not None:
                bars: dict[str, Any] = {"color": line["color"], "elinewidth": 0.8, "fmt": "none"}
                axes.errorbar(x, self.rmse[order], self.rmse_stderr[order], **bars)
            if self.predicted is not None:
                dashed = line | {"linestyle": "--", "markerfacecolor": "white"}
                axes.plot(x, self.predicted[order], label=f"{prefix}predicted (RMV)", **dashed)
            self._set_axes(axes, shared=shared)
            axes.legend(loc="best")
        return self

    def _set_axes(self, ax: Axes, *, shared: bool) -> None:
        bars = 0.0 if self.rmse_stderr is None else self.rmse_stderr
        # A bar that reaches below zero has no lower end here; the upper one always fits.
        drawn = [self.rmse, self.rmse + bars, np.maximum(self.rmse - bars, 0.5 * self.rmse)]
        if self.predicted is not None:
            drawn.append(self.predicted)
        set_log_scale(ax, "x", log_limits(self.n_train), shared=shared)
        set_log_scale(ax, "y", log_limits(np.concatenate(drawn)), shared=shared)
        ax.set_xlabel(r"Number of training points $N$")
        ax.set_ylabel(axis_label("Error", target=self.target, units=self.units))


def _check_sizes(parameter: str, values: ArrayLike) -> Float64Array:
    """Return sizes (n,) in float64, if they are positive and no two of them equal."""
    sizes = check_points(parameter, values)
    if sizes.ndim != 1 or np.any(sizes <= 0.0) or np.unique(sizes).size < sizes.size:
        raise InputError(parameter, sizes.tolist(), "a list of different numbers > 0")
    return sizes


def _check_likelihoods(parameter: str, values: ArrayLike, n_sizes: int) -> Float64Array:
    """Return log likelihoods (n_sizes,) in float64; unlike other numbers, NaN and −∞ may pass."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (n_sizes,):
        raise InputError(parameter, f"shape {array.shape}", f"one number per size, {n_sizes}")
    return array


def _written(value: float) -> str:
    """Write a number as the ticks do, with a minus sign in place of the hyphen."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


# Predictions against the truth, with error bars.
#: Cells along each axis of the density that stands for many points.
_CELLS = 60


@dataclass(eq=False)
class ParityDisplay(Display):
    """Predicted against true values, with error bars of ±σ.

    Parameters
    ----------
    y, mean, std : arrays of one shape
        True values, predictions and their standard deviations ≥ 0, in the same units.
    units, target : str
        For the labels.
    """

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    units: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        shape = np.shape(self.y)
        self.y = check_points("y", self.y).ravel()
        self.mean = check_points("mean", self.mean, shape).ravel()
        self.std = check_std(self.std, shape, allow_zero=True).ravel()

    @classmethod
    def from_prediction(
        cls, y: ArrayLike, prediction: Prediction, *, units: str = "", target: str = ""
    ) -> Self:
        """Take the values of a prediction.

        Parameters
        ----------
        y : array of the shape of the prediction
            True values; every entry counts as one point.
        prediction : Prediction
        units, target : str
            For the labels.
        """
        truth, _ = truth_and_residuals(y, prediction)
        return cls(truth, prediction.mean, prediction.std, units=units, target=target)

    @property
    def rmse(self) -> float:
        """Root mean squared error, in the units of y."""
        return rmse(self.y - self.mean)

    @property
    def mae(self) -> float:
        """Mean absolute error, in the units of y."""
        return mae(self.y - self.mean)

    def plot(
        self, ax: Axes | None = None, *, max_points: int = 300, n_bars: int = 30, **kwargs: Any
    ) -> Self:
        """Draw every point with its error bar, or, if there are too many, their density.

        The density is in logarithmic grey, so that single points can still be seen, and some points
        evenly chosen along y have their error bars drawn over it. Far outliers lie outside of the
        axes; their number is written on the figure.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.
        max_points : int
            How many points are still drawn one by one.
        n_bars : int
            How many error bars are drawn over a density.
        **kwargs
            Passed to ``Axes.errorbar``.
        """
        crowded = self.y.size > check_integer("max_points", max_points, 0)
        limits = robust_limits(np.concatenate([self.y, self.mean]))
        chosen = self._evenly_along_y(check_integer("n_bars", n_bars, 0) if crowded else None)
        bars: dict[str, Any] = {"color": INK, "marker": "o"}
        bars |= {"linestyle": "none", "markersize": 2.0, "elinewidth": 0.6, "zorder": 3.0}
        with self._drawing(ax, aspect=0.97) as axes:
            draw_diagonal(axes)
            if crowded:
                self._draw_density(axes, limits)
            axes.errorbar(self.y[chosen], self.mean[chosen], yerr=self.std[chosen], **bars | kwargs)
            axes.set(xlim=limits, ylim=limits, aspect="equal")
            set_even_ticks(axes.xaxis, axes.yaxis)
            what = self.target or "value"
            axes.set_xlabel(axis_label(f"Reference {what}", units=self.units))
            axes.set_ylabel(axis_label(f"Predicted {what}", units=self.units))
            self._write_summary(axes, limits)
        return self

    def _evenly_along_y(self, count: int | None) -> IntArray:
        """Return the indices of so many points, evenly in the order of y, its ends among them."""
        order = np.argsort(self.y, kind="stable")
        if count is None or count >= order.size:
            return order
        return order[np.linspace(0, order.size - 1, count).round().astype(np.intp)]

    def _draw_density(self, ax: Axes, limits: tuple[float, float]) -> None:
        """Count points in hexagons, with a key in the lower right, which parity leaves empty."""
        from matplotlib.colors import LinearSegmentedColormap

        # Not from white, or single points would be lost; not to black, or the error bars would.
        greys = LinearSegmentedColormap.from_list("greys", ["0.88", "0.5"])
        cells = ax.hexbin(
            self.y,
            self.mean,
            gridsize=_CELLS,
            extent=(*limits, *limits),
            bins="log",
            mincnt=1,
            cmap=greys,
            linewidths=0.35,
            edgecolors="face",
        )
        counts = np.asarray(cells.get_array())
        cells.set_clim(1.0, max(10.0, float(counts.max())))  # a decade at least, for the key
        key = ax.inset_axes((0.62, 0.13, 0.32, 0.03))
        bar = ax.figure.colorbar(cells, cax=key, orientation="horizontal")
        key.tick_params(which="both", direction="out", top=False, length=1.5, pad=1.0)
        key.tick_params(labelsize="small")
        key.set_title("points per cell", fontsize="small", pad=2.0)
        bar.outline.set_linewidth(0.4)

    def _write_summary(self, ax: Axes, limits: tuple[float, float]) -> None:
        """Write the errors in the upper left, which parity leaves empty."""
        errors = {"RMSE": self.rmse, "MAE": self.mae}
        lines = [f"{name} {error:.3g} {self.units}".rstrip() for name, error in errors.items()]
        lines.append(f"$n={self.y.size}$")
        pairs = np.stack([self.y, self.mean])
        n_outside = int(np.any((pairs < limits[0]) | (pairs > limits[1]), axis=0).sum())
        if n_outside:
            lines.append(f"{n_outside} outside")
        write_corner(ax, lines)


# How often intervals hold the truth, and how often they claim to.
#: Half-width, in standard errors, of the band that 95 % of calibrated curves stay within, at each
#: p.
_BAND = 1.96


@dataclass(eq=False)
class ReliabilityDisplay(Display):
    """Observed against nominal coverage of central intervals.

    Below the diagonal error bars are too small, above it too large. The grey band is where the
    curve of a calibrated prediction lies with a probability of 95 % at each level, if the errors of
    its points, or of so many of them, are independent.

    Parameters
    ----------
    curve : CalibrationCurve
        From `qualms.metrics.calibration_curve`.
    area : float, optional
        The miscalibration area, to be written beside the label.
    n_independent : int, optional
        How many points have independent errors, for the band: all of them by default.
    """

    curve: CalibrationCurve
    area: float | None = None
    n_independent: int | None = None

    @classmethod
    def from_prediction(
        cls,
        y: ArrayLike,
        prediction: Prediction,
        *,
        levels: ArrayLike | None = None,
        dof: ArrayLike | None = None,
        n_independent: int | None = None,
    ) -> Self:
        """Count how often the intervals of a prediction hold the truth.

        Parameters
        ----------
        y : array of the shape of the prediction
            True values; every entry counts as one point.
        prediction : Prediction
        levels : array_like of shape (n_levels,), optional
            Nominal coverages within (0, 1); 0.01, 0.02, … 0.99 by default.
        dof : float or array_like of the shape of the prediction, optional
            Degrees of freedom > 2 of Student's t, of which ``prediction.std`` is the standard
            deviation; for the student calibration, N_R − 1. Gaussian by default.
        n_independent : int, optional
            Number of structures, if points are their atoms or components: errors within one are
            correlated.
        """
        _, z = truth_and_residuals(y, prediction)
        curve = calibration_curve(z, prediction.std, levels, dof)
        return cls(curve, miscalibration_area(z, prediction.std, dof), n_independent)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        reference: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Draw the curve, on the diagonal and its band.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.
        label : str
            Name of the curve in the legend, which gives the area beside it.
        reference : bool
            Whether to draw the diagonal and the band; False for a second curve on the same axes.
        **kwargs
            Passed to ``Axes.plot``, for instance `line_style(1)` for a second curve.
        """
        area = "" if self.area is None else f"area {self.area:.3f}"
        text = ", ".join(part for part in (label, area) if part)
        with self._drawing(ax, aspect=0.97) as axes:
            if reference:
                self._draw_reference(axes)
            line: dict[str, Any] = {"color": INK, "linewidth": 1.2, "label": text or None} | kwargs
            # Markers of a `line_style` would cover a curve of so many levels.
            axes.plot(*self._closed(), **line | {"marker": ""})
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.set(xlabel="Nominal coverage", ylabel="Observed coverage")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left")
        return self

    def _closed(self) -> tuple[Float64Array, Float64Array]:
        """Return the curve together with its ends, which hold of themselves."""
        order = np.argsort(self.curve.expected)
        x, y = self.curve.expected[order], self.curve.observed[order]
        # Nothing lies in an empty interval, and everything in an infinite one.
        return np.concatenate([[0.0], x, [1.0]]), np.concatenate([[0.0], y, [1.0]])

    def _draw_reference(self, ax: Axes) -> None:
        """Draw the diagonal, and the band of ±1.96 standard errors sqrt(p(1−p)/n) about it."""
        p = np.linspace(0.0, 1.0, 201)
        half = _BAND * np.sqrt(p * (1.0 - p) / (self.n_independent or self.curve.n_points))
        low, high = np.clip(p - half, 0.0, 1.0), np.clip(p + half, 0.0, 1.0)
        label = "calibrated, 95 %"
        ax.fill_between(p, low, high, color=GREY, linewidth=0.0, zorder=0.5, label=label)
        draw_diagonal(ax)


# How residuals are distributed, in units of their error bars.
#: The axis ends at the 99 % quantile of |z/σ|, but between these.
_LEAST_REACH, _MOST_REACH = 4, 10


@dataclass(eq=False)
class ZScoreDisplay(Display):
    """Histogram of z/σ against the standard normal and Student's t.

    Parameters
    ----------
    z_scores : array of any shape
        Residuals over their predicted standard deviations.
    dof : float, optional
        Degrees of freedom ν > 2 of a Student t distribution to compare with, scaled to unit
        variance because σ is its standard deviation. None by default.

    Attributes
    ----------
    edges : ndarray of shape (n_bins + 1,)
        Edges of the bins, symmetric about zero.
    density : ndarray of shape (n_bins,)
        Fraction of all points per unit of z/σ in each bin.
    n_outside : int
        Points beyond the edges, which count in the fractions all the same.
    rms : float
        Root mean square of z/σ: one if calibrated; the α that the linear calibration would find.
    """

    z_scores: Float64Array
    dof: float | None = None
    edges: Float64Array = field(init=False, repr=False)
    density: Float64Array = field(init=False, repr=False)
    n_outside: int = field(init=False)
    rms: float = field(init=False)

    def __post_init__(self) -> None:
        z = self.z_scores = check_points("z_scores", self.z_scores).ravel()
        if self.dof is not None:
            self.dof = float(check_dof(self.dof, (), above=2.0))
        self.edges = _bin_edges(z)
        counts, _ = np.histogram(z, self.edges)
        self.density = counts / (z.size * np.diff(self.edges))
        self.n_outside = int(z.size - counts.sum())
        self.rms = root_mean_square(z)

    @classmethod
    def from_prediction(
        cls, y: ArrayLike, prediction: Prediction, *, dof: float | None = None
    ) -> Self:
        """Divide the residuals of a prediction by its standard deviations.

        Parameters
        ----------
        y : array of the shape of the prediction
            True values; every entry counts as one point.
        prediction : Prediction
            With standard deviations > 0.
        dof : float, optional
            Degrees of freedom of Student's t; by default N_R − 1, as in the student calibration, if
            that is more than 2.
        """
        _, z = truth_and_residuals(y, prediction)
        sigma = check_std(prediction.std, prediction.shape)
        if dof is None and prediction.n_members is not None and prediction.n_members > 3:
            dof = prediction.n_members - 1.0
        with np.errstate(over="ignore"):
            return cls(z / sigma, dof=dof)

    def plot(self, ax: Axes | None = None, *, log: bool = False, **kwargs: Any) -> Self:
        """Draw the histogram and the two densities.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.
        log : bool
            Whether the density is on a logarithmic axis, which shows the tails.
        **kwargs
            Passed to ``Axes.stairs``, which draws the histogram.
        """
        with self._drawing(ax, aspect=0.78) as axes:
            bars: dict[str, Any] = {
                "fill": True,
                "facecolor": GREY,
                "edgecolor": GUIDE,
                "linewidth": 0.6,
            }
            axes.stairs(self.density, self.edges, **bars | kwargs)
            highest = max(self._draw_references(axes), float(self.density.max()))
            axes.set_xlim(self.edges[0], self.edges[-1])
            if log:
                # The lowest bin that may hold a point is at one over the number of points.
                lowest = 0.5 / (self.z_scores.size * (self.edges[1] - self.edges[0]))
                axes.set(yscale="log", ylim=(min(lowest, 1e-3), 10.0 * highest))
            else:
                axes.set_ylim(0.0, 1.3 * highest)
            axes.set(xlabel=r"$z/\sigma$", ylabel="Density")
            axes.legend(loc="upper right")
            self._write_summary(axes)
        return self

    def _draw_references(self, ax: Axes) -> float:
        """Draw the densities to compare with, and return the height of the highest."""
        x = np.linspace(self.edges[0], self.edges[-1], 401)
        ones = np.ones_like(x)
        normal = np.exp(gaussian_log_density(x, ones))
        ax.plot(x, normal, color=INK, linewidth=1.2, label="normal")
        if self.dof is None:
            return float(normal.max())
        scale = np.sqrt((self.dof - 2.0) / self.dof) * ones
        student = np.exp(student_log_density(x, scale, self.dof))
        label = rf"Student, $\nu={self.dof:g}$"
        ax.plot(x, student, color=ACCENT, linewidth=1.2, linestyle="--", label=label)
        return float(max(normal.max(), student.max()))

    def _write_summary(self, ax: Axes) -> None:
        lines = [f"rms {self.rms:.2f}", f"$n={self.z_scores.size}$"]
        if self.n_outside:
            lines.append(f"{self.n_outside} outside")
        write_corner(ax, lines)


def _bin_edges(z: Float64Array) -> Float64Array:
    """Return edges, symmetric about zero, of bins as wide as so many points can resolve."""
    reach = np.ceil(np.clip(np.quantile(np.abs(z), 0.99), _LEAST_REACH, _MOST_REACH))
    # Scott's rule for a standard normal, within what can be seen and what makes sense.
    width = np.clip(3.49 * z.size ** (-1.0 / 3.0), 0.1, 1.0)
    half = int(np.ceil(reach / width))
    edges: Float64Array = np.linspace(-reach, reach, 2 * half + 1)
    return edges


# The figures of a report, drawn by the displays and kept as bytes.
#: A drawing of more bytes is kept as pixels, which take less.
_MOST_VECTOR = 300_000
_DPI = 220


@dataclass(frozen=True)
class Picture:
    """One figure.

    Attributes
    ----------
    title : str
    caption : str
        What it shows and how to read it.
    alt : str
        What is seen, for those who do not see it.
    kind : str
        Media type: "image/svg+xml" or "image/png".
    data : bytes
        The same for the same numbers.
    """

    title: str
    caption: str
    alt: str
    kind: str
    data: bytes


def draw_pictures(judged: Judged) -> Sequence[Picture]:
    """Draw all figures of a report.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    """
    return [make(judged) for make in _PICTURES]


def _conditional(judged: Judged) -> Picture:
    display = ConditionalErrorDisplay.from_prediction(
        judged.y, judged.prediction, units=judged.units
    ).plot()
    return _picture(
        display,
        "Errors at each error bar",
        "Which errors occur (solid) and which the model expects (dashed) where it predicts a given "
        "σ; grey is how often it does. Where both sets of contours agree, error bars are right at "
        "each σ, not only on average. Eq. (18) of Musil et al. 2019.",
        f"Contours of the density of errors at given σ, {judged.y.size} points",
    )


def _reliability(judged: Judged) -> Picture:
    n_structures = int(np.unique(judged.structure).size)
    what = "points" if n_structures == judged.y.size else f"the {n_structures} structures"
    display = ReliabilityDisplay.from_prediction(
        judged.y, judged.prediction, n_independent=n_structures
    )
    display.plot(label="after" if judged.is_calibrated else "")
    if judged.is_calibrated:
        before = ReliabilityDisplay.from_prediction(judged.y, judged.prediction.uncalibrated)
        before.plot(display.ax_, label="before", reference=False, **line_style(1))
    return _picture(
        display,
        "Reliability",
        "How often intervals hold the truth, against how often they claim to. Below the diagonal "
        "error bars are too small, above it too large; the grey band is what chance allows if "
        f"{what} are independent.",
        f"Observed against nominal coverage, miscalibration area {display.area:.3f}",
    )


def _binned(judged: Judged) -> Picture:
    def bins(prediction: Prediction) -> BinnedErrorDisplay:
        return BinnedErrorDisplay.from_prediction(judged.y, prediction, units=judged.units)

    display = bins(judged.prediction).plot(label="after" if judged.is_calibrated else "")
    if judged.is_calibrated:
        open_squares = line_style(1) | {"linestyle": "none", "markerfacecolor": "white"}
        bins(judged.prediction.uncalibrated).plot(
            display.ax_, label="before", reference=False, **open_squares
        )
    return _picture(
        display,
        "Actual against predicted error",
        "Points sorted by σ into bins: the root mean squared error of each bin against the one "
        "that was predicted. On the line error bars are right; above it they are too small.",
        f"Root mean squared error against root mean variance in {display.bins.counts.size} bins",
    )


def _parity(judged: Judged) -> Picture:
    display = ParityDisplay.from_prediction(judged.y, judged.prediction, units=judged.units).plot()
    return _picture(
        display,
        "Predictions",
        "Predicted against true values, with error bars of ±σ. Many points are shown as their "
        "density, some of them with error bars.",
        f"Predicted against true values, RMSE {display.rmse:.3g} {judged.units}".rstrip(),
    )


def _z_scores(judged: Judged) -> Picture:
    # A prediction may stand for a committee of another size.
    dof = judged.n_members - 1.0 if judged.n_members is not None and judged.n_members > 3 else None
    display = ZScoreDisplay.from_prediction(judged.y, judged.prediction, dof=dof).plot()
    return _picture(
        display,
        "Errors in units of σ",
        "Histogram of z/σ against the standard normal distribution and, for a committee of this "
        "size, Student's. If error bars hold, the root mean square is one.",
        f"Histogram of errors over σ, root mean square {display.rms:.2f}",
    )


_PICTURES: tuple[Callable[[Judged], Picture], ...] = (
    _conditional,
    _reliability,
    _binned,
    _z_scores,
    _parity,
)


def _picture(display: Display, title: str, caption: str, alt: str) -> Picture:
    """Save a figure as a drawing, or as pixels if the drawing has too many parts."""
    file = io.BytesIO()
    display.save(file, format="svg")
    if file.tell() <= _MOST_VECTOR:
        return Picture(title, caption, alt, "image/svg+xml", file.getvalue())
    file = io.BytesIO()
    display.save(file, format="png", dpi=_DPI)
    return Picture(title, caption, alt, "image/png", file.getvalue())
