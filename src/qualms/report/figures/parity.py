"""Predictions against the truth, with error bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_integer, check_points, check_std
from qualms.core.scores import mae, rmse
from qualms.core.typing import Float64Array, IntArray
from qualms.prediction import Prediction
from qualms.report.figures._axes import draw_diagonal, robust_limits, set_even_ticks, write_corner
from qualms.report.figures._base import Display, truth_and_residuals
from qualms.report.figures._style import INK, axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
