"""Limits that one outlier cannot spoil, and logarithmic axes that keep readable numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qualms.core.typing import Float64Array
from qualms.report.figures._style import GUIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

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
