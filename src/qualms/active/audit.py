"""What labels that were drawn at random say: how large the errors are, and whether σ is right.

Structures that were selected by their uncertainty say nothing about the mean error of those that
were explored. Audit labels do: a random sample of the n explored structures of all N. Few of them
determine a mean square error badly, because errors vary from structure to structure. The calibrated
σ of all N is known, and most of this variation is in it. The mean square error is therefore

    θ = R ⟨σ²⟩_N,        R = ⟨e²⟩ / ⟨σ²⟩,

with R from the audits alone: y_i = e_i² and x_i = σ_i², means over the components of structure i,

    R = Σ y_i / Σ x_i,  s² = Σ d_i² / (Σ y_i)²,  d_i = (y_i − R x_i)/(1 − h_i),  h_i = x_i / Σ x_i.

R is the regression of y on x through the origin with variances that are proportional to x, h_i the
leverage of a structure, and s the standard error of ln R that is robust against other variances
(HC3: MacKinnon & White, J. Econometrics 29, 305 (1985)). A ratio estimate is as a control variate:
if σ says nothing about the error (all σ are equal) it is the mean over the audits. The bound is

    θ_max = R ⟨σ²⟩_N exp(s (t + max(g, 0) (2t² + 1) / 6)),        g = Σ d_i³ / (Σ d_i²)^(3/2),

with t the quantile of Student's t for n_eff − 1 degrees of freedom, n_eff = (Σ y)² / Σ y². All of
this is because squares of errors have a tail on one side: samples that lack large errors have both
R and s too small, and an interval without logarithm, skewness (Johnson, J. Am. Stat. Assoc. 73, 536
(1978)) and effective number is too low twice. No bound sees what no audit has: large errors of rare
structures, fewer than some 3/n of all, that σ does not know of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from qualms.arrays import check_points, check_std
from qualms.calibration.points import n_effective
from qualms.errors import InputError
from qualms.evaluation import Evaluation
from qualms.metrics import covering_levels


def upper_bound(
    errors: ArrayLike, std: ArrayLike, explored_std: ArrayLike, level: float = 0.95
) -> float:
    """Return an upper confidence bound of the root mean square error of what was explored.

    The module derives it. All values are root mean squares over the components of a structure (of
    its forces), or those of its energy per atom; each structure counts equally.

    Parameters
    ----------
    errors, std : (n,) arrays
        Errors and calibrated standard deviations of audits: structures drawn at random from those
        that were explored, predicted by a model that was not trained on them.
    explored_std : (N,) array
        Calibrated standard deviations of all that were explored.
    level : float
        Probability that the error is below the bound.

    Returns
    -------
    float
        In the units of the errors; infinite for one audit, whose scatter is not known.

    Notes
    -----
    Audits of earlier rounds were predicted by other models. They say what R is, if errors are as
    many times σ now as they were then: divide their errors and std by the root mean square of the
    σ that was explored in their round, those of this round by that of this round, and multiply the
    bound for ``explored_std=[1.0]`` by the latter. `CalibrationTest` tells when this is not so.

    Examples
    --------
    >>> round(upper_bound([0.1, 0.2, 0.1, 0.3], [0.1, 0.2, 0.1, 0.3], [0.1, 0.2, 0.2]), 3)
    0.173
    >>> round(upper_bound([0.1, 0.2, 0.2, 0.2], [0.1, 0.2, 0.1, 0.3], [0.1, 0.2, 0.2]), 3)
    0.44
    """
    if not 0.0 < level < 1.0:
        raise InputError(
            f"`level` is {level!r}; use a probability between 0 and 1.", parameter="level"
        )
    e = check_points("errors", errors)
    if e.ndim != 1:
        raise InputError(
            f"`errors` have the shape {e.shape}; there must be one for each structure.",
            parameter="errors",
        )
    x, scale = np.square(check_std(std, e.shape)), float(np.abs(e).max())
    explored = check_std(explored_std, parameter="explored_std")
    if scale == 0.0:
        return 0.0
    if len(e) == 1:
        return float("inf")
    y = np.square(e / scale)  # safe from underflow
    R, h = y.sum() / x.sum(), x / x.sum()
    d = (y - R * x) / (1 - h)
    norm = float(np.sqrt(d @ d))
    s, g = norm / y.sum(), max(float(np.sum(d**3)) / norm**3 if norm else 0.0, 0.0)
    # One of many may have all of the error: there is no t of less than one degree of freedom.
    t = float(stdtrit(max(n_effective(y) - 1, 1.0), level))
    with np.errstate(over="ignore"):
        return float(
            scale
            * np.sqrt(R * np.mean(explored**2))
            * np.exp(0.5 * s * (t + g * (2 * t**2 + 1) / 6))
        )


class Coverage(NamedTuple):
    """Shares of reference values within the central intervals of 68.3 and 95 %, of n."""

    within_68: float
    within_95: float
    n: int


def coverage(evaluation: Evaluation) -> Coverage:
    """Return the shares of reference values that the intervals of a prediction contain.

    Intervals are those of the distribution that the model predicts, Gaussian or Student's t.

    Parameters
    ----------
    evaluation : Evaluation
        Of audit labels: ``evaluate(model, frames, compare=False)["forces"]``. Components of a
        structure are correlated, so that shares of few structures scatter more than those of n
        independent values.
    """
    prediction = evaluation.prediction
    dof = prediction.dof if prediction.dof is not None and 2 < prediction.dof < np.inf else None
    levels = covering_levels(evaluation.residuals, prediction.std, dof)
    within_68, within_95 = (float(np.mean(levels <= level)) for level in (0.6827, 0.95))
    return Coverage(within_68, within_95, len(levels))
