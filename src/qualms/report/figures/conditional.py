"""The figure of the paper: which errors occur, and which the model expects, at each error bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_points
from qualms.core.diagnostics import ConditionalDensity, ErrorDensities, conditional_error_density
from qualms.core.typing import BoolArray, Float64Array
from qualms.errors import InputError
from qualms.prediction import Prediction
from qualms.report.figures._axes import draw_diagonal, log_limits, set_log_scale
from qualms.report.figures._base import Display, truth_and_residuals
from qualms.report.figures._style import ACCENT, GREY, GUIDE, INK, axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        From `qualms.core.diagnostics.conditional_error_density`, which also takes a Gaussian model
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
