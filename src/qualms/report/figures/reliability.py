"""How often intervals hold the truth, and how often they claim to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.diagnostics import CalibrationCurve, calibration_curve
from qualms.core.scores import miscalibration_area
from qualms.core.typing import Float64Array
from qualms.prediction import Prediction
from qualms.report.figures._axes import draw_diagonal
from qualms.report.figures._base import Display, truth_and_residuals
from qualms.report.figures._style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        From `qualms.core.diagnostics.calibration_curve`.
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
