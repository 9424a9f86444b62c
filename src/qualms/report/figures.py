"""Figures of predictions and their uncertainties.

As in scikit-learn, a display holds the numbers of one figure, which `qualms.metrics` computes, and
`plot` draws them. matplotlib is imported when something is drawn; pyplot is not used.
"""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.arrays import BoolArray, Float64Array, IntArray, check_points, check_std
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
    miscalibration_area,
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
    "xtick.top": True,
    "ytick.right": True,
    **{
        f"{axis}tick.{name}": value
        for axis in "xy"
        for name, value in {
            "direction": "in",
            "major.size": 3.0,
            "minor.size": 1.5,
            "major.width": 0.6,
            "minor.width": 0.4,
        }.items()
    },
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.25,
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
    ("#882255", "-", "*"),
)


@contextmanager
def style() -> Iterator[None]:
    """Use the style of this package inside a ``with`` block, whatever the user's settings are."""
    from matplotlib.style import context

    with context(["default", _STYLE | _FONTS]):
        yield


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dashes and marker of line ``index`` for ``Axes.plot``; nine lines differ."""
    color, dashes, marker = _LINES[index % len(_LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker}


def axis_label(quantity: str, *, target: str = "", units: str = "") -> str:
    """Return an axis label such as "Error ε of the shielding (ppm)".

    Parameters
    ----------
    quantity : str
        What the axis shows.
    target, units : str
        Name of the property and its units; they may be empty.
    """
    return quantity + (f" of {target}" if target else "") + (f" ({units})" if units else "")


def robust_limits(values: Float64Array) -> tuple[float, float]:
    """Return limits of a linear axis, with a margin, that contain all points but far outliers.

    Points up to a quarter of the range beyond the 0.2 and 99.8 % quantiles are still shown.
    """
    low, high = (float(q) for q in np.quantile(values, [0.002, 0.998]))
    reach = 0.25 * (high - low)
    low, high = max(float(values.min()), low - reach), min(float(values.max()), high + reach)
    # A single value has no range: use one that its own digits can resolve.
    margin = 0.05 * (high - low if high > low else max(abs(low), 1.0))
    return low - margin, high + margin


def log_limits(values: Float64Array, least: float = 2.0, pad: float = 0.06) -> tuple[float, float]:
    """Return limits of a logarithmic axis that contain all values.

    Parameters
    ----------
    values : array
        All > 0.
    least : float
        Smallest ratio of the limits.
    pad : float
        Margin as a fraction of the axis.
    """
    low, high = np.log(np.min(values)), np.log(np.max(values))
    missing = max(np.log(least) - (high - low), 0.0)
    margin = 0.5 * missing + pad * (high - low + missing)
    return float(np.exp(low - margin)), float(np.exp(high + margin))


def set_log_scale(ax: Axes, which: Literal["x", "y"], limits: tuple[float, float]) -> None:
    """Make one axis logarithmic, with few and plain numbers at the ticks.

    matplotlib labels 2 × 10⁻¹, 3 × 10⁻¹ … on axes of less than a decade, and these overlap.

    Parameters
    ----------
    ax : matplotlib Axes
    which : {"x", "y"}
    limits : tuple of two floats
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    ax.set(**{f"{which}scale": "log", f"{which}lim": limits})
    decades = np.log10(limits[1] / limits[0])
    if decades < 2.2:
        axis.set_major_formatter(FuncFormatter(_plain_number))
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0)))
    if decades < 0.7:
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


def _write_corner(ax: Axes, lines: Sequence[str], n: int, n_outside: int) -> None:
    """Write lines and numbers of points into the upper left corner of the axes."""
    text = [*lines, f"$n={n}$", *([f"{n_outside} outside"] if n_outside else [])]
    place: dict[str, Any] = {"va": "top", "transform": ax.transAxes, "zorder": 4.0}
    ax.text(0.04, 0.96, "\n".join(text), fontsize=8.0, linespacing=1.1, **place)


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
    #: Height of a new figure over its width.
    _aspect: ClassVar[float] = 0.97
    _owns_figure: bool = field(default=False, init=False, repr=False)

    @classmethod
    def from_prediction(
        cls, y: ArrayLike, prediction: Prediction, *, units: str = "", target: str = ""
    ) -> Self:
        """Compute the numbers of the figure.

        Parameters
        ----------
        y : array
            Reference values.
        prediction : Prediction of the shape of y
        units, target : str
            For the axis labels.
        """
        if not isinstance(prediction, Prediction):
            raise InputError(
                f"`prediction` is a {type(prediction).__name__}, not a Prediction. Use "
                "Prediction(members), or Prediction(mean=..., std=...).",
                parameter="prediction",
            )
        numbers = cls._compute(check_points("y", y, prediction.shape), prediction)
        return cls(*numbers, units=units, target=target)

    @classmethod
    @abstractmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        """Return the positional arguments of the constructor."""

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> Self:
        """Draw on the given axes, or on a new figure of one column's width.

        Further arguments are passed to the matplotlib function that draws. Reliability curves and
        binned errors have a `label` for the legend, and with ``reference=False`` the diagonal is
        not drawn again.
        """
        from matplotlib.figure import Figure
        from matplotlib.style import context

        self._owns_figure = ax is None
        with style() if ax is None else context(_STYLE):
            if ax is None:
                size = (COLUMN_WIDTH, self._aspect * COLUMN_WIDTH)
                ax = Figure(figsize=size, layout="constrained").add_subplot()
            self.ax_, self.figure_ = ax, ax.figure
            self._draw(ax, **kwargs)
        return self

    @abstractmethod
    def _draw(self, ax: Axes, **kwargs: Any) -> None:
        """Draw on axes."""

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
        date = {"pdf": "CreationDate", "svg": "Date"}
        key = date.get(str(kwargs.get("format") or suffix).lower())
        with style():
            metadata = {} if key is None else {key: None}
            self.ax_.figure.figure.savefig(file, **{"metadata": metadata} | kwargs)

    def _repr_png_(self) -> bytes | None:
        # Notebooks show figures of pyplot by themselves; ours is unknown to pyplot.
        if hasattr(self, "figure_") and not self._owns_figure:
            return None
        file = io.BytesIO()
        self.save(file, format="png")
        return file.getvalue()

    def _label(self, quantity: str) -> str:
        return axis_label(quantity, target=self.target, units=self.units)


@dataclass(eq=False)
class BinnedErrorDisplay(Display):
    """RMSE against root mean variance in bins of σ, on logarithmic axes.

    On the diagonal uncertainties are calibrated; above it they are too small. Bars are standard
    errors. Bins with zero error have no place on logarithmic axes; their number is written.

    Parameters
    ----------
    bins : BinnedErrors
        From `qualms.metrics.binned_errors`.
    """

    bins: BinnedErrors

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        return (binned_errors(y - prediction.mean, prediction.std),)

    def _draw(self, ax: Axes, *, label: str = "", reference: bool = True, **kwargs: Any) -> None:
        b = self.bins
        shown: BoolArray = (b.rmv > 0.0) & (b.rmse > 0.0)
        x, y = b.rmv[shown], b.rmse[shown]
        x_bars, y_bars = _log_bars(x, b.rmv_stderr[shown]), _log_bars(y, b.rmse_stderr[shown])
        ends = np.concatenate([x, y - y_bars[0], y + y_bars[1]])
        low, high = log_limits(ends if ends.size else np.ones(1), least=3.0)
        if ax.has_data():
            low, high = min(low, ax.get_xlim()[0]), max(high, ax.get_xlim()[1])
        set_log_scale(ax, "x", (low, high))
        set_log_scale(ax, "y", (low, high))
        ax.set(aspect="equal", xlabel=self._label("Root mean variance"), ylabel=self._label("RMSE"))
        if reference:
            _draw_diagonal(ax)
        if shown.any():
            look: dict[str, Any] = {"color": INK, "marker": "o", "linestyle": "none"}
            look |= {"elinewidth": 0.8, "label": label or "bins, ± standard error"} | kwargs
            ax.errorbar(x, y, xerr=x_bars, yerr=y_bars, **look)
        if not shown.all():
            note = f"{np.count_nonzero(~shown)} of {shown.size} bins at zero"
            ax.text(0.96, 0.05, note, ha="right", transform=ax.transAxes)
        if shown.any():
            ax.legend(loc="upper left")


def _log_bars(values: Float64Array, stderr: Float64Array) -> Float64Array:
    """Return lengths (2, n) of error bars, symmetric on a logarithmic axis; 0 if unknown."""
    factor = np.exp(np.nan_to_num(stderr / values, posinf=0.0))
    return np.stack([values - values / factor, values * factor - values])


#: Densities per unit of ln ε at which contours are drawn. That of a Gaussian model is at most
#: sqrt(2/(πe)) = 0.48, at ε = σ, whatever the units: the same levels serve all figures.
_LEVELS = (0.05, 0.15, 0.25, 0.35)


@dataclass(eq=False)
class ConditionalErrorDisplay(Display):
    """P(ln ε | ln σ) of actual and of model errors: Eq. (18), Musil et al. 2019.

    If uncertainties are calibrated at each σ, solid and dashed contours agree; P(ln σ) is grey.
    `plot` accepts ``levels``, densities per unit of ln ε, and ``legend=False``.

    Parameters
    ----------
    densities : ErrorDensities
        From `qualms.metrics.conditional_error_density`.
    """

    densities: ErrorDensities
    _aspect: ClassVar[float] = 0.95

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        mean, std, members = prediction.mean, prediction.std, prediction.members
        return (conditional_error_density(y, mean, std, members, min_points=20.0),)

    def _draw(
        self, ax: Axes, *, levels: ArrayLike = _LEVELS, legend: bool = True, **kwargs: Any
    ) -> None:
        heights: Float64Array = np.asarray(levels, dtype=np.float64)
        true, model = self.densities.true, self.densities.model
        supported: BoolArray = true.supported | model.supported
        self._set_axes(ax, supported, float(heights.min()))
        height = 0.22 * true.marginal / true.marginal.max()
        grey: dict[str, Any] = {"color": GREY, "linewidth": 0.0, "zorder": 0.5}
        # x in data, y as a fraction of the axes
        foot = ax.get_xaxis_transform()
        ax.fill_between(np.exp(true.ln_sigma), height, transform=foot, **grey)
        _draw_diagonal(ax)
        _draw_contours(ax, true, heights, {"colors": INK, "linestyles": "-"} | kwargs)
        _draw_contours(ax, model, heights, {"colors": ACCENT, "linestyles": "--"} | kwargs)
        if not supported.any():
            ax.text(0.05, 0.9, "too few points for contours", transform=ax.transAxes)
        if legend:
            _conditional_legend(ax, heights)

    def _set_axes(self, ax: Axes, supported: BoolArray, lowest: float) -> None:
        """Show the range of σ with contours, and that of ε down to below the lowest of them."""
        true, model = self.densities.true, self.densities.model
        sigma = np.exp(true.ln_sigma[supported] if supported.any() else true.ln_sigma)
        # Half the lowest level leaves room around the contours.
        seen = np.maximum(true.density, model.density).max(axis=0) > 0.5 * lowest
        errors = np.exp(true.ln_error[seen]) if seen.any() else sigma
        # Members that agree to rounding have errors of 1e-15, which would squeeze all others. At
        # 1e-3 σ the density of a Gaussian is 0.0008.
        errors = np.maximum(errors, 1e-3 * sigma.min())
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


def _conditional_legend(ax: Axes, levels: Float64Array) -> None:
    """Name lines, their levels and shading above the axes, where they cover nothing."""
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
    title = rf"contours at {', '.join(f'{level:g}' for level in levels)} per unit of $\ln\epsilon$"
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
    ax.legend(handles=handles, title=title, title_fontsize="small", **place)


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
        Number of points with independent errors, for the band, such as the number of structures if
        points are their atoms; all by default.
    """

    curve: CalibrationCurve
    area: float | None = None
    n_independent: int | None = None

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        z, std = y - prediction.mean, prediction.std
        return calibration_curve(z, std), miscalibration_area(z, std)

    def _draw(self, ax: Axes, *, label: str = "", reference: bool = True, **kwargs: Any) -> None:
        area = "" if self.area is None else f"area {self.area:.3f}"
        text = ", ".join(part for part in (label, area) if part)
        x, y = (
            np.concatenate([[0.0], coverage, [1.0]])
            for coverage in (self.curve.expected, self.curve.observed)
        )
        if reference:
            p = np.linspace(0.0, 1.0, 201)
            half = 1.96 * np.sqrt(p * (1.0 - p) / (self.n_independent or self.curve.n_points))
            low, high = np.clip(p - half, 0.0, 1.0), np.clip(p + half, 0.0, 1.0)
            grey: dict[str, Any] = {"color": GREY, "linewidth": 0.0, "zorder": 0.5}
            ax.fill_between(p, low, high, label="calibrated, 95 %", **grey)
            _draw_diagonal(ax)
        look: dict[str, Any] = {"color": INK, "linewidth": 1.2, "label": text or None} | kwargs
        # Markers of a `line_style` would cover a curve of so many levels.
        ax.plot(x, y, **look | {"marker": ""})
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.set(xlabel="Nominal coverage", ylabel="Observed coverage")
        if ax.get_legend_handles_labels()[0]:
            # Above the curve of uncertainties that are too small, below that of others.
            ax.legend(loc="upper left" if np.mean(y - x) <= 0.0 else "lower right")


@dataclass(eq=False)
class ZScoreDisplay(Display):
    """Histogram of z/σ, compared with the standard normal and Student's t distribution.

    It is the fraction of all points per unit of z/σ; those beyond the axis are counted in it, and
    their number is written, with the root mean square of z/σ, 1 if calibrated.

    Parameters
    ----------
    z_scores : (n,) array
        Residuals over their predicted standard deviations.
    dof : float, optional
        Degrees of freedom ν > 2 of Student's t, scaled to unit variance; `Prediction.dof`, or
        N_R − 1 for an ensemble. None: not drawn.

    """

    z_scores: Float64Array
    dof: float | None = None
    _aspect: ClassVar[float] = 0.78

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        sigma = check_std(prediction.std, prediction.shape)
        dof = prediction.dof or (prediction.n_members or 0) - 1.0
        with np.errstate(over="ignore"):
            return ((y - prediction.mean) / sigma).ravel(), dof if 2.0 < dof < np.inf else None

    def _draw(self, ax: Axes, **kwargs: Any) -> None:
        z = self.z_scores
        # The axis ends at the 99 % quantile, within 4 and 10; the width follows Scott's rule.
        reach = np.ceil(np.clip(np.quantile(np.abs(z), 0.99), 4, 10))
        width = np.clip(3.49 * z.size ** (-1.0 / 3.0), 0.1, 1.0)
        edges = np.linspace(-reach, reach, 2 * int(np.ceil(reach / width)) + 1)
        counts, _ = np.histogram(z, edges)
        density = counts / (z.size * np.diff(edges))
        x = np.linspace(-reach, reach, 401)
        curves = {"normal": np.exp(gaussian_log_density(x, np.ones_like(x)))}
        if self.dof is not None:
            scale = np.full_like(x, np.sqrt((self.dof - 2.0) / self.dof))
            student = np.exp(student_log_density(x, scale, self.dof))
            curves[rf"Student, $\nu={self.dof:.3g}$"] = student
        bars: dict[str, Any] = {"fill": True, "facecolor": GREY, "edgecolor": GUIDE}
        ax.stairs(density, edges, **bars | {"linewidth": 0.6} | kwargs)
        for (label, values), color, dashes in zip(
            curves.items(), (INK, ACCENT), ("-", "--"), strict=False
        ):
            ax.plot(x, values, color=color, linewidth=1.2, linestyle=dashes, label=label)
        highest = max(float(values.max()) for values in (density, *curves.values()))
        ax.set(xlim=(-reach, reach), ylim=(0.0, 1.3 * highest))
        ax.set(xlabel=r"$z/\sigma$", ylabel="Density")
        ax.legend(loc="upper right")
        n_outside = int(z.size - counts.sum())
        _write_corner(ax, [f"rms {root_mean_square(z):.2f}"], z.size, n_outside)


@dataclass(eq=False)
class ResidualDisplay(Display):
    """Errors, reference minus prediction, against predicted values, with error bars of ±σ.

    Bars that cross zero contain the reference value. Of more than 300 points the density is drawn,
    and 30 of them, at even ranks of the prediction, have error bars. Far outliers lie outside of
    the axes; their number is written.

    Parameters
    ----------
    y, mean, std : arrays of one shape
        Reference values, predictions and standard deviations ≥ 0, in the same units.
    """

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    _aspect: ClassVar[float] = 0.9

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        return y.ravel(), prediction.mean.ravel(), prediction.std.ravel()

    def _draw(self, ax: Axes, **kwargs: Any) -> None:
        z = self.y - self.mean
        low, high = robust_limits(z)
        reach = max(abs(low), abs(high))
        # Room above the points, for numbers and the legend.
        limits = robust_limits(self.mean), (-1.2 * reach, 1.7 * reach)
        chosen: IntArray = np.argsort(self.mean, kind="stable")
        ax.axhline(0.0, color=GUIDE, linewidth=0.8, linestyle=":", zorder=2.0)
        label = r"error $\pm\sigma$"
        if chosen.size > 300:
            chosen = chosen[np.linspace(0, chosen.size - 1, 30).round().astype(np.intp)]
            self._draw_density(ax, z, limits)
            label += ", 30 points"
        bars: dict[str, Any] = {"color": INK, "marker": "o", "linestyle": "none", "label": label}
        bars |= {"markersize": 2.0, "elinewidth": 0.6, "zorder": 3.0} | kwargs
        ax.errorbar(self.mean[chosen], z[chosen], yerr=self.std[chosen], **bars)
        ax.set(xlim=limits[0], ylim=limits[1])
        set_even_ticks(ax.xaxis, ax.yaxis)
        ax.set_xlabel(axis_label(f"Predicted {self.target or 'value'}", units=self.units))
        ax.set_ylabel(axis_label("Reference − predicted", units=self.units))
        ax.legend(loc="upper right")
        errors = {"RMSE": root_mean_square(z), "MAE": float(np.mean(np.abs(z)))}
        lines = [f"{name} {error:.3g} {self.units}".rstrip() for name, error in errors.items()]
        outside = [
            (values < low) | (values > high)
            for values, (low, high) in zip((self.mean, z), limits, strict=True)
        ]
        _write_corner(ax, lines, z.size, int(np.any(outside, axis=0).sum()))

    def _draw_density(
        self, ax: Axes, z: Float64Array, limits: tuple[tuple[float, float], tuple[float, float]]
    ) -> None:
        """Count points in hexagons, with a colour bar in the lower right corner."""
        from matplotlib.colors import LinearSegmentedColormap

        # Not from white, or single points would be invisible; not to black, or error bars would.
        greys = LinearSegmentedColormap.from_list("greys", ["0.88", "0.5"])
        drawn: dict[str, Any] = {"bins": "log", "mincnt": 1, "linewidths": 0.35}
        drawn |= {"gridsize": 60, "extent": (*limits[0], *limits[1]), "edgecolors": "face"}
        cells = ax.hexbin(self.mean, z, cmap=greys, **drawn)
        cells.set_clim(1.0, max(10.0, float(np.max(np.asarray(cells.get_array())))))
        key = ax.inset_axes((0.62, 0.1, 0.32, 0.03))
        bar = ax.figure.colorbar(cells, cax=key, orientation="horizontal")
        key.tick_params(which="both", direction="out", top=False, length=1.5, pad=1.0)
        key.tick_params(labelsize="small")
        key.set_title("points per cell", fontsize="small", pad=2.0)
        bar.outline.set_linewidth(0.4)


@dataclass(eq=False)
class LearningCurveDisplay(Display):
    """Errors of a loop against the number of labels: expected, bounded, and observed.

    Parameters
    ----------
    labels : (n,) array
        Of each round.
    curves : mapping of str to (n,) arrays
        By their labels; NaN where there is none. The last is drawn as points.
    goal : float
        The target.
    after : (n,) array
        What was expected after the labels of each round; NaN if nothing was.
    """

    labels: Float64Array
    curves: Mapping[str, Float64Array]
    goal: float
    after: Float64Array
    _aspect: ClassVar[float] = 0.8

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]], goal: float) -> Self:
        """Take the numbers from the records of rounds of `qualms.active.loop`."""

        def column(get: Callable[[Mapping[str, Any]], float | None]) -> Float64Array:
            values = [get(record) for record in records]
            return np.array([np.nan if v is None else v for v in values], dtype=np.float64)

        curves = {
            "by σ": column(lambda r: r["expected"]),
            "expected error": column(lambda r: r["estimate"]),
            "upper 95 % bound": column(lambda r: r["bound"]),
            "audit labels": column(lambda r: r.get("audit", {}).get("rmse")),
        }
        after = column(lambda r: r.get("next"))
        return cls(column(lambda r: r["labels"]), curves, goal, after, units="eV/Å")

    @classmethod
    def _compute(cls, y: Float64Array, prediction: Prediction) -> tuple[Any, ...]:
        raise NotImplementedError

    def _draw(self, ax: Axes, **kwargs: Any) -> None:
        sigma, estimate, *_ = self.curves.values()
        now = np.where(np.isfinite(estimate), estimate, sigma)
        following = np.append(self.labels[1:], self.labels[-1] + np.diff(self.labels[-2:]).sum())
        for x, y in zip(
            np.transpose([self.labels, following]), np.transpose([now, self.after]), strict=True
        ):
            ax.plot(x, y, color=GUIDE, linewidth=0.8)
        ax.plot([], [], color=GUIDE, linewidth=0.8, label="expected of a batch")
        for i, (label, values) in enumerate(self.curves.items()):
            look = line_style(i) | {"label": label} | kwargs
            if i == len(self.curves) - 1:
                look |= {"linestyle": "none", "markersize": 5.0, "markerfacecolor": "white"}
            if np.isfinite(values).any():
                ax.plot(self.labels, values, **look)
        ax.axhline(self.goal, color=GUIDE, linewidth=0.8, linestyle=":", label="target")
        every = np.concatenate([*self.curves.values(), [self.goal], self.after])
        low, high = log_limits(every[np.isfinite(every) & (every > 0)])
        set_log_scale(ax, "y", (low, high * (high / low) ** 0.4))  # room for the legend
        set_even_ticks(ax.xaxis)
        ax.set(xlabel="Labels", ylabel=axis_label("RMSE of forces", units=self.units))
        ax.legend(loc="upper right", ncols=2, fontsize="small", columnspacing=1.0)

    def data_uri(self) -> str:
        """Return the figure as it stands in a page."""
        return _data_uri(self)


def report_figures(evaluation: Evaluation) -> dict[str, str]:
    """Draw the figures of a report, for points with σ > 0, and return them as data URIs."""
    y, prediction, units = evaluation.y, evaluation.prediction, evaluation.units
    kinds: dict[str, type[Display]] = {
        "conditional": ConditionalErrorDisplay,
        "reliability": ReliabilityDisplay,
        "binned": BinnedErrorDisplay,
        "z_scores": ZScoreDisplay,
        "residuals": ResidualDisplay,
    }
    displays = {k: kind.from_prediction(y, prediction, units=units) for k, kind in kinds.items()}
    displays["reliability"].n_independent = evaluation.n_structures  # type: ignore[attr-defined]
    raw = prediction.uncalibrated
    if raw is not prediction:
        look = line_style(1) | {"label": "before", "reference": False}
        hollow = {"linestyle": "none", "markerfacecolor": "white"}
        for name, more in {"reliability": {}, "binned": hollow}.items():
            ax = displays[name].plot(label="after").ax_
            with style():
                kinds[name].from_prediction(y, raw, units=units).plot(ax, **look | more)
    return {name: _data_uri(display) for name, display in displays.items()}


def _data_uri(display: Display) -> str:
    """Save a figure as SVG, or as PNG if that would have more than 300 kB."""
    file = io.BytesIO()
    display.save(file, format="svg")
    kind = "svg+xml"
    if file.tell() > 300_000:
        file, kind = io.BytesIO(), "png"
        display.save(file, format="png", dpi=220)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
