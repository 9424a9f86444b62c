"""How large errors are where a given error bar was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.diagnostics import BinnedErrors, binned_errors
from qualms.core.typing import BoolArray, Float64Array
from qualms.prediction import Prediction
from qualms.report.figures._axes import draw_diagonal, log_limits, set_log_scale
from qualms.report.figures._base import Display, truth_and_residuals
from qualms.report.figures._style import INK, axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(eq=False)
class BinnedErrorDisplay(Display):
    """Root mean squared error against root mean variance, in bins of σ, both logarithmic.

    On the line error bars are right; above it they are too small.

    Parameters
    ----------
    bins : BinnedErrors
        From `qualms.core.diagnostics.binned_errors`.
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
