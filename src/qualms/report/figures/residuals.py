"""How residuals are distributed, in units of their error bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_dof, check_points, check_std
from qualms.core.likelihood import gaussian_log_density, root_mean_square, student_log_density
from qualms.core.typing import Float64Array
from qualms.prediction import Prediction
from qualms.report.figures._axes import write_corner
from qualms.report.figures._base import Display, truth_and_residuals
from qualms.report.figures._style import ACCENT, GREY, GUIDE, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        if dof is None and prediction.n_members > 3:
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
