"""Figures of predictions and their uncertainties.

As in scikit-learn, a display holds the numbers of one figure, which `qualms.metrics` computes, and
`plot` draws them. matplotlib is imported when something is drawn; pyplot is not used.
"""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from qualms.evaluation import Evaluation
from qualms.metrics import (
    BinnedErrors,
    CalibrationCurve,
    ConditionalDensity,
    ErrorDensities,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

#: Width of one column of a journal, in inches.
COLUMN_WIDTH: Final = 3.3

INK: Final = "black"
ACCENT: Final = "#D55E00"
GREY: Final = "0.82"
GUIDE: Final = "0.45"

#: Fonts that come with matplotlib, so that a figure looks the same everywhere; sizes in points.
_FONTS: Final[dict[str, Any]] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
}
#: TrueType in PDF, because journals reject Type 3; a fixed salt, so that the same figure gives the
#: same file.
_STYLE: Final[dict[str, Any]] = {
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

# Colours of Okabe and Ito, which are distinct for colour-blind readers; dashes and markers differ
# in black and white.
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
    """Use the style of this package inside a ``with`` block, whatever the user's settings are.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> with style():
    ...     left, right = Figure(figsize=(6.6, 2.8), layout="constrained").subplots(1, 2)
    """
    from matplotlib.style import context

    with context(["default", _STYLE | _FONTS]):
        yield


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dashes and marker of line ``index`` for ``Axes.plot``; eight lines differ."""
    color, dashes, marker = _LINES[index % len(_LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker}


def axis_label(quantity: str, *, target: str = "", units: str = "") -> str:
    """Return an axis label such as "Error ε of the shielding (ppm)"."""
    of_target = f" of {target}" if target else ""
    in_units = f" ({units})" if units else ""
    return f"{quantity}{of_target}{in_units}"


#: Fraction of the points on either side that may lie outside of the limits.
_OUTSIDE = 0.002
#: Below so many decades, powers of ten are too few ticks; below the second, even 1, 2 and 5.
_FEW_DECADES, _NO_DECADE = 2.2, 0.7


def robust_limits(values: Float64Array, pad: float = 0.05) -> tuple[float, float]:
    """Return limits of a linear axis that contain all points but far outliers.

    Points up to a quarter of the range beyond the 0.2 and 99.8 % quantiles are still shown. `pad`
    is the margin on either side, as a fraction of the range.
    """
    low, high = (float(q) for q in np.quantile(values, [_OUTSIDE, 1.0 - _OUTSIDE]))
    reach = 0.25 * (high - low)
    low = max(float(np.min(values)), low - reach)
    high = min(float(np.max(values)), high + reach)
    # A single value has no range: use one that its own digits can resolve.
    span = high - low if high > low else max(abs(low), 1.0)
    return low - pad * span, high + pad * span


def log_limits(
    values: Float64Array, *, least: float = 2.0, pad: float = 0.06
) -> tuple[float, float]:
    """Return limits of a logarithmic axis that contain all positive values.

    Their ratio is at least `least` before a margin of `pad` times the logarithmic range is added.
    """
    low, high = float(np.log(np.min(values))), float(np.log(np.max(values)))
    missing = max(np.log(least) - (high - low), 0.0)
    margin = 0.5 * missing + pad * (high - low + missing)
    return float(np.exp(low - margin)), float(np.exp(high + margin))


def set_log_scale(
    ax: Axes, which: Literal["x", "y"], limits: tuple[float, float], *, shared: bool = False
) -> None:
    """Make one axis logarithmic, with few and plain numbers at the ticks.

    matplotlib labels 2 × 10⁻¹, 3 × 10⁻¹ … on axes of less than a decade, and these overlap. With
    `shared`, limits that another display has set are widened rather than replaced.
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


def set_even_ticks(*axes: Axis) -> None:
    """Give linear axes at most six ticks, at multiples of 1, 2 or 5."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))


def _plain_number(value: float, _: int | None = None) -> str:
    """Write a tick label as a plain number where that is short."""
    if 1e-3 <= abs(value) < 1e4 or value == 0.0:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    digits, power = f"{float(mantissa):g}", f"10^{{{int(exponent)}}}"
    return f"${power}$" if digits == "1" else rf"${digits}\times{power}$"


def _draw_diagonal(ax: Axes) -> None:
    """Draw the line of equality."""
    ax.axline((1.0, 1.0), (2.0, 2.0), color=GUIDE, linewidth=0.8, linestyle=":", zorder=2.0)


def _write_corner(ax: Axes, lines: Sequence[str]) -> None:
    """Write short lines into the upper left corner of the axes."""
    from matplotlib import rcParams

    place: dict[str, Any] = {"va": "top", "transform": ax.transAxes, "zorder": 4.0}
    size = rcParams["legend.fontsize"]
    ax.text(0.04, 0.96, "\n".join(lines), fontsize=size, linespacing=1.1, **place)


#: Without dates, the same figure gives the same file.
_UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


@dataclass(eq=False, kw_only=True)
class Display(ABC):
    """The numbers of one figure, and how to draw them.

    Parameters
    ----------
    units, target : str
        For the axis labels.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Where `plot` last drew.
    figure_ : matplotlib Figure
        The figure of these axes.
    """

    units: str = ""
    target: str = ""

    ax_: Axes = field(init=False, repr=False)
    figure_: Figure | SubFigure = field(init=False, repr=False)
    _owns_figure: bool = field(default=False, init=False, repr=False)

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Self:
        """Draw on the given axes, or on a new figure of one column's width."""

    def save(self, file: str | PathLike[str] | IO[bytes], **kwargs: Any) -> None:
        """Save the figure, after drawing it if needed; the same figure gives the same bytes.

        Parameters
        ----------
        file : path or binary file
            Its extension, or ``format=``, selects pdf, svg, png, …
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
        # Notebooks show figures of pyplot by themselves; ours is unknown to pyplot.
        if hasattr(self, "figure_") and not self._owns_figure:
            return None
        file = io.BytesIO()
        self.save(file, format="png")
        return file.getvalue()

    @contextmanager
    def _axes(self, ax: Axes | None, aspect: float) -> Iterator[Axes]:
        """Yield the axes to draw on; a new figure has the height `aspect` times its width."""
        from matplotlib.figure import Figure
        from matplotlib.style import context

        self._owns_figure = ax is None
        if ax is not None:
            self.ax_, self.figure_ = ax, ax.figure
            with context(_STYLE):
                yield ax
            return
        with style():
            figure = Figure(figsize=(COLUMN_WIDTH, aspect * COLUMN_WIDTH), layout="constrained")
            self.ax_, self.figure_ = figure.add_subplot(), figure
            yield self.ax_

    def _label(self, quantity: str) -> str:
        return axis_label(quantity, target=self.target, units=self.units)


def _checked(y: ArrayLike, prediction: object) -> tuple[Float64Array, Float64Array]:
    """Return reference values and residuals, of the shape of the prediction."""
    if not isinstance(prediction, Prediction):
        remedy = "Use Prediction(members), or Prediction(mean=..., std=...)."
        raise InputError("prediction", type(prediction).__name__, "a Prediction", remedy)
    reference = check_points("y", y, prediction.shape)
    return reference, reference - prediction.mean


@dataclass(eq=False)
class BinnedErrorDisplay(Display):
    """RMSE against root mean variance in bins of σ, on logarithmic axes.

    On the diagonal uncertainties are calibrated; above it they are too small.

    Parameters
    ----------
    bins : BinnedErrors
        From `qualms.metrics.binned_errors`.
    """

    bins: BinnedErrors

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
        """Sort points by σ into `n_bins` bins of equal count; by default 10, with ≥ 10 points."""
        _, z = _checked(y, prediction)
        return cls(binned_errors(z, prediction.std, n_bins), units=units, target=target)

    def plot(
        self, ax: Axes | None = None, *, label: str = "", reference: bool = True, **kwargs: Any
    ) -> Self:
        """Draw one point per bin, with standard errors, and with `reference` the diagonal.

        Bins with zero error have no place on logarithmic axes; their number is written. `label` is
        for the legend; `kwargs` are passed to ``Axes.errorbar``.
        """
        b = self.bins
        shown: BoolArray = (b.rmv > 0.0) & (b.rmse > 0.0)
        x, y = b.rmv[shown], b.rmse[shown]
        x_bars, y_bars = _log_bars(x, b.rmv_stderr[shown]), _log_bars(y, b.rmse_stderr[shown])
        ends = np.concatenate([x, y - y_bars[0], y + y_bars[1]])
        bars: dict[str, Any] = {"color": INK, "marker": "o", "linestyle": "none", "elinewidth": 0.8}
        with self._axes(ax, aspect=0.97) as axes:
            limits = log_limits(ends if ends.size else np.ones(1), least=3.0)
            shared = axes.has_data()
            set_log_scale(axes, "x", limits, shared=shared)
            set_log_scale(axes, "y", limits, shared=shared)
            axes.set(aspect="equal", xlabel=self._label("Root mean variance"))
            axes.set_ylabel(self._label("RMSE"))
            if reference:
                _draw_diagonal(axes)
            if shown.any():
                bars |= {"label": label or None} | kwargs
                axes.errorbar(x, y, xerr=x_bars, yerr=y_bars, **bars)
            if not shown.all():
                note = f"{np.count_nonzero(~shown)} of {shown.size} bins at zero"
                axes.text(0.96, 0.05, note, ha="right", transform=axes.transAxes)
            if label:
                axes.legend(loc="upper left")
        return self


def _log_bars(values: Float64Array, stderr: Float64Array) -> Float64Array:
    """Return lengths (2, n) of error bars, symmetric on a logarithmic axis; 0 if unknown."""
    known = np.isfinite(stderr)
    factor = np.exp(np.divide(stderr, values, out=np.zeros_like(values), where=known))
    return np.stack([values - values / factor, values * factor - values])


#: Densities per unit of ln ε at which contours are drawn. That of a Gaussian model is at most
#: sqrt(2/(πe)) = 0.48, at ε = σ, whatever the units: the same levels serve all figures.
_LEVELS = (0.05, 0.15, 0.25, 0.35)
#: The smallest error shown, in units of σ: the density of a Gaussian is 0.0008 there.
_SMALLEST_ERROR = 1e-3
#: Height of P(ln σ), as a fraction of the axes.
_MARGINAL_HEIGHT = 0.22


@dataclass(eq=False)
class ConditionalErrorDisplay(Display):
    """P(ln ε | ln σ) of actual and of model errors: Eq. (18), Musil et al. 2019.

    If uncertainties are calibrated at each σ, solid and dashed contours agree.

    Parameters
    ----------
    densities : ErrorDensities
        From `qualms.metrics.conditional_error_density`.
    """

    densities: ErrorDensities

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

        Without members, the model errors are Gaussian.

        Parameters
        ----------
        y, prediction
        bandwidth : tuple of two floats, optional
            Of the smoothing along ln σ and ln ε; Scott's rule by default.
        min_points : float
            Contours are drawn where about as many points lie within a bandwidth of ln σ.
        units, target : str
        """
        reference, _ = _checked(y, prediction)
        mean, std, members = prediction.mean, prediction.std, prediction.members
        options: dict[str, Any] = {"bandwidth": bandwidth, "min_points": min_points}
        densities = conditional_error_density(reference, mean, std, members, **options)
        return cls(densities, units=units, target=target)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        levels: ArrayLike = _LEVELS,
        legend: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Draw contours of actual (solid) and of model errors (dashed), and P(ln σ) (grey).

        `levels` are densities per unit of ln ε; `kwargs` are passed to ``Axes.contour``.
        """
        heights = np.unique(check_points("levels", levels))
        if heights[0] <= 0.0:
            raise InputError("levels", f"{heights[0]:g} at least", "densities > 0")
        true, model = self.densities.true, self.densities.model
        with self._axes(ax, aspect=0.95) as axes:
            supported: BoolArray = true.supported | model.supported
            self._set_axes(axes, supported, float(heights[0]))
            foot = axes.get_xaxis_transform()  # x in data, y as a fraction of the axes
            height = _MARGINAL_HEIGHT * true.marginal / true.marginal.max()
            grey: dict[str, Any] = {"color": GREY, "linewidth": 0.0, "zorder": 0.5}
            axes.fill_between(np.exp(true.ln_sigma), height, transform=foot, **grey)
            _draw_diagonal(axes)
            _draw_contours(axes, true, heights, {"colors": INK, "linestyles": "-"} | kwargs)
            _draw_contours(axes, model, heights, {"colors": ACCENT, "linestyles": "--"} | kwargs)
            if not supported.any():
                axes.text(0.05, 0.9, "too few points for contours", transform=axes.transAxes)
            if legend:
                _conditional_legend(axes)
        return self

    def _set_axes(self, ax: Axes, supported: BoolArray, lowest: float) -> None:
        """Show the range of σ with contours, and that of ε down to below the lowest of them."""
        true, model = self.densities.true, self.densities.model
        sigma = np.exp(true.ln_sigma[supported] if supported.any() else true.ln_sigma)
        # Half the lowest level leaves room around the contours.
        seen = np.maximum(true.density, model.density).max(axis=0) > 0.5 * lowest
        errors = np.exp(true.ln_error[seen]) if seen.any() else sigma
        # Members that agree to rounding have errors of 1e-15, which would squeeze all others.
        errors = np.maximum(errors, _SMALLEST_ERROR * sigma.min())
        set_log_scale(ax, "x", log_limits(sigma, pad=0.0))
        set_log_scale(ax, "y", log_limits(errors, pad=0.08))
        ax.set_xlabel(self._label(r"Predicted uncertainty $\sigma$"))
        ax.set_ylabel(self._label(r"Error $\epsilon$"))


def _draw_contours(
    ax: Axes, conditional: ConditionalDensity, levels: Float64Array, kwargs: dict[str, Any]
) -> None:
    """Draw contours where the density is supported, open at the ends of these ranges of σ."""
    if conditional.supported.sum() < 2:
        return
    # Unsupported rows are unknown, not zero.
    density = np.where(conditional.supported[:, None], conditional.density, np.nan).T
    # matplotlib warns if no level crosses the density.
    crossed = levels[(levels > np.nanmin(density)) & (levels < np.nanmax(density))]
    if crossed.size:
        x, y = np.exp(conditional.ln_sigma), np.exp(conditional.ln_error)
        ax.contour(x, y, density, **{"levels": crossed, "linewidths": 0.9} | kwargs)


def _conditional_legend(ax: Axes) -> None:
    """Name lines and shading above the axes, where they cover nothing."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    name = r"{}, $P(\ln\epsilon_{}\,|\,\ln\sigma)$"
    thin: dict[str, Any] = {"linewidth": 0.9}
    handles = [
        Line2D([], [], color=INK, linestyle="-", label=name.format("actual", "t"), **thin),
        Line2D([], [], color=ACCENT, linestyle="--", label=name.format("model", "m"), **thin),
        Patch(facecolor=GREY, label=r"$P(\ln\sigma)$"),
        Line2D([], [], color=GUIDE, linestyle=":", label=r"$\epsilon=\sigma$", **thin),
    ]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


#: Half-width, in standard errors, of the band that contains 95 % of calibrated curves at each p.
_BAND = 1.96


@dataclass(eq=False)
class ReliabilityDisplay(Display):
    """Observed against nominal coverage of central intervals.

    Below the diagonal uncertainties are too small, above it too large. The grey band contains the
    curve of a calibrated prediction with a probability of 95 % at each level.

    Parameters
    ----------
    curve : CalibrationCurve
        From `qualms.metrics.calibration_curve`.
    area : float, optional
        Miscalibration area, for the legend.
    n_independent : int, optional
        Number of points with independent errors, for the band; all by default.
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
        """Compute the coverage of the intervals of a prediction.

        Parameters
        ----------
        y, prediction
        levels : array_like of shape (n_levels,), optional
            Nominal coverages within (0, 1); 0.01, 0.02, … 0.99 by default.
        dof : float or array_like of the shape of the prediction, optional
            Degrees of freedom > 2 of Student's t with the standard deviation ``prediction.std``;
            N_R − 1 for the student calibration. Gaussian by default.
        n_independent : int, optional
            Number of structures, if points are their atoms or components.
        """
        _, z = _checked(y, prediction)
        curve = calibration_curve(z, prediction.std, levels, dof)
        return cls(curve, miscalibration_area(z, prediction.std, dof), n_independent)

    def plot(
        self, ax: Axes | None = None, *, label: str = "", reference: bool = True, **kwargs: Any
    ) -> Self:
        """Draw the curve, and with `reference` the diagonal and its band.

        `label` is for the legend, beside the area; `kwargs` are passed to ``Axes.plot``, for
        instance `line_style(1)` for a second curve on the same axes.
        """
        area = "" if self.area is None else f"area {self.area:.3f}"
        text = ", ".join(part for part in (label, area) if part)
        order = np.argsort(self.curve.expected)
        x = np.concatenate([[0.0], self.curve.expected[order], [1.0]])
        y = np.concatenate([[0.0], self.curve.observed[order], [1.0]])
        with self._axes(ax, aspect=0.97) as axes:
            if reference:
                p = np.linspace(0.0, 1.0, 201)
                half = _BAND * np.sqrt(p * (1.0 - p) / (self.n_independent or self.curve.n_points))
                low, high = np.clip(p - half, 0.0, 1.0), np.clip(p + half, 0.0, 1.0)
                grey: dict[str, Any] = {"color": GREY, "linewidth": 0.0, "zorder": 0.5}
                axes.fill_between(p, low, high, label="calibrated, 95 %", **grey)
                _draw_diagonal(axes)
            line: dict[str, Any] = {"color": INK, "linewidth": 1.2, "label": text or None} | kwargs
            # Markers of a `line_style` would cover a curve of so many levels.
            axes.plot(x, y, **line | {"marker": ""})
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.set(xlabel="Nominal coverage", ylabel="Observed coverage")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left")
        return self


#: The axis ends at the 99 % quantile of |z/σ|, but between these.
_LEAST_REACH, _MOST_REACH = 4, 10


@dataclass(eq=False)
class ZScoreDisplay(Display):
    """Histogram of z/σ, compared with the standard normal and Student's t distribution.

    Parameters
    ----------
    z_scores : array of any shape
        Residuals over their predicted standard deviations.
    dof : float, optional
        Degrees of freedom ν > 2 of Student's t, scaled to unit variance. None: not drawn.

    Attributes
    ----------
    edges, density : ndarrays of shape (n_bins + 1,) and (n_bins,)
        The histogram: fraction of all points per unit of z/σ.
    n_outside : int
        Points beyond the edges, which are counted in the fractions.
    rms : float
        Root mean square of z/σ; 1 if calibrated.
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
        """Divide residuals by standard deviations > 0; `dof` is N_R − 1 by default, if > 2."""
        _, z = _checked(y, prediction)
        sigma = check_std(prediction.std, prediction.shape)
        if dof is None and prediction.n_members is not None and prediction.n_members > 3:
            dof = prediction.n_members - 1.0
        with np.errstate(over="ignore"):
            return cls(z / sigma, dof=dof)

    def plot(self, ax: Axes | None = None, *, log: bool = False, **kwargs: Any) -> Self:
        """Draw the histogram and the densities; `log` makes the density axis logarithmic.

        Further arguments are passed to ``Axes.stairs``.
        """
        x = np.linspace(self.edges[0], self.edges[-1], 401)
        curves = {"normal": np.exp(gaussian_log_density(x, np.ones_like(x)))}
        if self.dof is not None:
            scale = np.full_like(x, np.sqrt((self.dof - 2.0) / self.dof))
            student = np.exp(student_log_density(x, scale, self.dof))
            curves[rf"Student, $\nu={self.dof:g}$"] = student
        highest = max(float(values.max()) for values in (self.density, *curves.values()))
        bars: dict[str, Any] = {"fill": True, "facecolor": GREY, "edgecolor": GUIDE}
        with self._axes(ax, aspect=0.78) as axes:
            axes.stairs(self.density, self.edges, **bars | {"linewidth": 0.6} | kwargs)
            for (label, values), color, dashes in zip(
                curves.items(), (INK, ACCENT), ("-", "--"), strict=False
            ):
                axes.plot(x, values, color=color, linewidth=1.2, linestyle=dashes, label=label)
            axes.set_xlim(self.edges[0], self.edges[-1])
            if log:
                # A bin with one point has a density of one over the number of points.
                lowest = 0.5 / (self.z_scores.size * (self.edges[1] - self.edges[0]))
                axes.set(yscale="log", ylim=(min(lowest, 1e-3), 10.0 * highest))
            else:
                axes.set_ylim(0.0, 1.3 * highest)
            axes.set(xlabel=r"$z/\sigma$", ylabel="Density")
            axes.legend(loc="upper right")
            outside = [f"{self.n_outside} outside"] if self.n_outside else []
            _write_corner(axes, [f"rms {self.rms:.2f}", f"$n={self.z_scores.size}$", *outside])
        return self


def _bin_edges(z: Float64Array) -> Float64Array:
    """Return edges, symmetric about zero, by Scott's rule for a standard normal."""
    reach = np.ceil(np.clip(np.quantile(np.abs(z), 0.99), _LEAST_REACH, _MOST_REACH))
    width = np.clip(3.49 * z.size ** (-1.0 / 3.0), 0.1, 1.0)
    half = int(np.ceil(reach / width))
    edges: Float64Array = np.linspace(-reach, reach, 2 * half + 1)
    return edges


#: Cells along each axis of the density that replaces many points.
_CELLS = 60


@dataclass(eq=False)
class ParityDisplay(Display):
    """Predicted against reference values, with error bars of ±σ.

    Parameters
    ----------
    y, mean, std : arrays of one shape
        Reference values, predictions and standard deviations ≥ 0, in the same units.
    """

    y: Float64Array
    mean: Float64Array
    std: Float64Array

    def __post_init__(self) -> None:
        shape = np.shape(self.y)
        self.y = check_points("y", self.y).ravel()
        self.mean = check_points("mean", self.mean, shape).ravel()
        self.std = check_std(self.std, shape, allow_zero=True).ravel()

    @classmethod
    def from_prediction(
        cls, y: ArrayLike, prediction: Prediction, *, units: str = "", target: str = ""
    ) -> Self:
        """Take the values of a prediction."""
        reference, _ = _checked(y, prediction)
        return cls(reference, prediction.mean, prediction.std, units=units, target=target)

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
        """Draw every point with its error bar or, of more than `max_points`, their density.

        Over a density, `n_bars` points at even ranks of y have error bars. Far outliers lie
        outside of the axes; their number is written. `kwargs` are passed to ``Axes.errorbar``.
        """
        crowded = self.y.size > check_integer("max_points", max_points, 0)
        limits = robust_limits(np.concatenate([self.y, self.mean]))
        chosen: IntArray = np.argsort(self.y, kind="stable")
        if crowded and check_integer("n_bars", n_bars, 0) < chosen.size:
            chosen = chosen[np.linspace(0, chosen.size - 1, n_bars).round().astype(np.intp)]
        bars: dict[str, Any] = {"color": INK, "marker": "o", "linestyle": "none"}
        bars |= {"markersize": 2.0, "elinewidth": 0.6, "zorder": 3.0} | kwargs
        with self._axes(ax, aspect=0.97) as axes:
            _draw_diagonal(axes)
            if crowded:
                self._draw_density(axes, limits)
            axes.errorbar(self.y[chosen], self.mean[chosen], yerr=self.std[chosen], **bars)
            axes.set(xlim=limits, ylim=limits, aspect="equal")
            set_even_ticks(axes.xaxis, axes.yaxis)
            what = self.target or "value"
            axes.set_xlabel(axis_label(f"Reference {what}", units=self.units))
            axes.set_ylabel(axis_label(f"Predicted {what}", units=self.units))
            _write_corner(axes, self._summary(limits))
        return self

    def _draw_density(self, ax: Axes, limits: tuple[float, float]) -> None:
        """Count points in hexagons, with a colour bar in the lower right corner."""
        from matplotlib.colors import LinearSegmentedColormap

        # Not from white, or single points would be invisible; not to black, or error bars would.
        greys = LinearSegmentedColormap.from_list("greys", ["0.88", "0.5"])
        drawn: dict[str, Any] = {"bins": "log", "mincnt": 1, "linewidths": 0.35}
        drawn |= {"gridsize": _CELLS, "extent": (*limits, *limits), "edgecolors": "face"}
        cells = ax.hexbin(self.y, self.mean, cmap=greys, **drawn)
        counts = np.asarray(cells.get_array())
        cells.set_clim(1.0, max(10.0, float(counts.max())))
        key = ax.inset_axes((0.62, 0.13, 0.32, 0.03))
        bar = ax.figure.colorbar(cells, cax=key, orientation="horizontal")
        key.tick_params(which="both", direction="out", top=False, length=1.5, pad=1.0)
        key.tick_params(labelsize="small")
        key.set_title("points per cell", fontsize="small", pad=2.0)
        bar.outline.set_linewidth(0.4)

    def _summary(self, limits: tuple[float, float]) -> list[str]:
        errors = {"RMSE": self.rmse, "MAE": self.mae}
        lines = [f"{name} {error:.3g} {self.units}".rstrip() for name, error in errors.items()]
        pairs = np.stack([self.y, self.mean])
        n_outside = int(np.any((pairs < limits[0]) | (pairs > limits[1]), axis=0).sum())
        return [*lines, f"$n={self.y.size}$", *([f"{n_outside} outside"] if n_outside else [])]


_REFERENCE_DASHES = ((0, (1, 2)), (0, (6, 2, 1, 2)), (0, (10, 3)))


@dataclass(eq=False)
class SubsampleSizeDisplay(Display):
    """Log likelihood against subsample size, one line per estimator: the tables of the paper.

    Parameters
    ----------
    sizes : array of shape (n_sizes,)
        Numbers of points, or fractions of the training set.
    log_likelihoods : mapping of str to array of shape (n_sizes,)
        Mean log likelihood per point of each estimator; NaN where missing.
    references : mapping of str to float
        Log likelihoods that do not depend on the size, such as that of the projected process.
    """

    sizes: Float64Array
    log_likelihoods: Mapping[str, Float64Array]
    references: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes = check_points("sizes", self.sizes)
        if sizes.ndim != 1 or np.any(sizes <= 0.0) or np.unique(sizes).size < sizes.size:
            raise InputError("sizes", sizes.tolist(), "a list of different numbers > 0")
        if not self.log_likelihoods:
            raise InputError("log_likelihoods", "nothing", "at least one estimator")
        lines = {k: np.asarray(v, dtype=np.float64) for k, v in self.log_likelihoods.items()}
        for name, values in lines.items():
            if values.shape != sizes.shape:
                expected = f"one number per size, {sizes.size}"
                raise InputError(f"log_likelihoods[{name!r}]", f"shape {values.shape}", expected)
        self.log_likelihoods = lines

    @classmethod
    def from_table(
        cls,
        rows: Mapping[Any, Mapping[str, float | None]],
        *,
        references: Mapping[str, float] | None = None,
    ) -> Self:
        """Take the numbers of `qualms.report.paper_table`; sizes must be numbers."""
        for size in rows:
            if isinstance(size, str):
                remedy = "Pass this row as references."
                raise InputError("rows", repr(size), "sizes that are numbers", remedy)
        names = dict.fromkeys(name for row in rows.values() for name in row)
        lines = {
            name: np.array([row.get(name) for row in rows.values()], dtype=np.float64)
            for name in names
        }
        return cls(np.array(list(rows)), lines, references or {})

    def plot(self, ax: Axes | None = None, *, legend: bool = True, **kwargs: Any) -> Self:
        """Draw one line per estimator.

        Values far below the others lie outside of the axes; triangles at the bottom mark them, and
        a reference has its value in the legend. `kwargs` are passed to ``Axes.plot``.
        """
        low, high = self._limits()
        order = np.argsort(self.sizes)
        with self._axes(ax, aspect=0.9) as axes:
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
            axes.set(xlabel=r"Subsample size $n$", ylabel="Log likelihood per point")
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
            if value < low and n == 1:  # several values would cover each other
                place: dict[str, Any] = {"transform": foot, "ha": "center"}
                ax.text(size, 0.055, _written(value), size="small", color=color, **place)

    def _limits(self) -> tuple[float, float]:
        """Return limits that contain all values but those far below, by Tukey's rule."""
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


def _written(value: float) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


#: A vector graphic of more bytes is rasterised.
_MAX_SVG = 300_000
_DPI = 220


def report_figures(evaluation: Evaluation) -> dict[str, str]:
    """Draw the figures of a report, for points with σ > 0, and return them as data URIs."""
    y, prediction, units = evaluation.y, evaluation.prediction, evaluation.units
    raw = None if prediction.uncalibrated is prediction else prediction.uncalibrated
    label = "" if raw is None else "after"
    n = evaluation.n_structures
    reliability = ReliabilityDisplay.from_prediction(y, prediction, n_independent=n)
    reliability.plot(label=label)
    binned = BinnedErrorDisplay.from_prediction(y, prediction, units=units).plot(label=label)
    if raw is not None:
        second: dict[str, Any] = {"label": "before", "reference": False, **line_style(1)}
        ReliabilityDisplay.from_prediction(y, raw).plot(reliability.ax_, **second)
        second |= {"linestyle": "none", "markerfacecolor": "white"}
        BinnedErrorDisplay.from_prediction(y, raw, units=units).plot(binned.ax_, **second)
    displays = {
        "conditional": ConditionalErrorDisplay.from_prediction(y, prediction, units=units),
        "reliability": reliability,
        "binned": binned,
        "z_scores": ZScoreDisplay.from_prediction(y, prediction),
        "parity": ParityDisplay.from_prediction(y, prediction, units=units),
    }
    return {name: _data_uri(display) for name, display in displays.items()}


def _data_uri(display: Display) -> str:
    """Save a figure as SVG, or as PNG if that would be too large."""
    file = io.BytesIO()
    display.save(file, format="svg")
    kind = "svg+xml"
    if file.tell() > _MAX_SVG:
        file, kind = io.BytesIO(), "png"
        display.save(file, format="png", dpi=_DPI)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
