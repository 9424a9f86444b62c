"""How certain α and γ are.

A maximum likelihood estimate θ is off by H⁻¹ Σ s, where H is minus the second derivative of the log
likelihood and s the gradient that each point contributes, so that its covariance is H⁻¹ J H⁻¹ with
J = Σ s sᵀ (the "sandwich": White, Econometrica 50, 1 (1982)). It holds for errors that are not
distributed as the method assumes, and, with s summed over groups first, for points whose errors
are correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from qualms.core.calibration.base import Calibration, CalibrationData
from qualms.core.calibration.fitting import fit_calibration
from qualms.core.calibration.scaling import PowerCalibration, is_constant, power_scores
from qualms.core.calibration.shrinkage import ShrinkageCalibration, shrinkage_scores
from qualms.core.calibration.student import StudentCalibration, student_scores
from qualms.core.resampling import group_codes, group_scatter
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError

#: Step of the derivative of gradients, in ln α, γ, m and ln τ.
_STEP = 1e-4
#: Spreads whose logarithms scatter by less than this, τ, are alike.
_ALIKE = 0.01


@dataclass(frozen=True)
class ConfidenceIntervals:
    """Intervals (lower, upper) of the parameters of a calibration, and their probability.

    That of γ is None if it cannot be told, because all spreads are alike.
    """

    alpha: tuple[float, float]
    gamma: tuple[float, float] | None
    level: float


def bootstrap_intervals(
    data: CalibrationData,
    method: str = "student",
    *,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Resample the points with replacement and fit the calibration each time.

    Parameters
    ----------
    data : CalibrationData
    method : str
    n_bootstrap : int
        Number of resampled fits, at least 20.
    level : float
        Probability covered, in (0, 1).
    rng : numpy.random.Generator, optional
        Seeded with 0 if not given.
    groups : (n,) array, optional
        Labels of points whose errors are correlated: whole groups are then resampled.
    """
    if n_bootstrap < 20:
        raise InputError("n_bootstrap", n_bootstrap, "at least 20")
    if not 0 < level < 1:
        raise InputError("level", level, "a probability between 0 and 1")
    rng = np.random.default_rng(0) if rng is None else rng
    n = len(data.residuals)
    codes = group_codes(groups, n)
    n_groups = int(codes.max()) + 1
    pairs = np.empty((n_bootstrap, 2))
    near = fit_calibration(data, method)
    for b in range(n_bootstrap):
        times = np.bincount(rng.integers(n_groups, size=n_groups), minlength=n_groups)[codes]
        fitted = fit_calibration(data.reweighted(data.weights * times), method, near)
        pairs[b] = fitted.alpha, fitted.gamma
    lower, upper = np.quantile(pairs, [(1 - level) / 2, (1 + level) / 2], axis=0)
    gamma = (float(lower[1]), float(upper[1]))
    untold = near.n_parameters > 1 and _tells_no_exponent(near, data)
    return ConfidenceIntervals((float(lower[0]), float(upper[0])), None if untold else gamma, level)


def confidence_intervals(
    calibration: Calibration,
    data: CalibrationData,
    *,
    level: float = 0.95,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Return intervals of α and γ from the curvature of the likelihood.

    Where that is not defined (a parameter on a bound, spreads all alike) the points are resampled
    instead, by `bootstrap_intervals`.

    Parameters
    ----------
    calibration : Calibration
        Fitted to these data.
    data : CalibrationData
    level : float
        Probability covered, in (0, 1).
    groups : (n,) array, optional
        Labels of points whose errors are correlated.
    """
    if not 0 < level < 1:
        raise InputError("level", level, "a probability between 0 and 1")
    if calibration.n_parameters == 0:
        return ConfidenceIntervals((1.0, 1.0), (1.0, 1.0), level)
    if isinstance(calibration, StudentCalibration) and calibration.alpha == 0:
        return ConfidenceIntervals((0.0, _largest_alpha(data, level)), (1.0, 1.0), level)
    theta, scores = _scores(calibration, data)
    n = len(data.residuals)
    codes = group_codes(groups, n)
    untold = calibration.n_parameters > 1 and _tells_no_exponent(calibration, data)
    if untold:
        # Whatever γ is, α makes up for it: what is known is α at this γ.
        rest, all_scores = theta[1:], scores
        theta, scores = theta[:1], lambda at: all_scores(np.append(at, rest))[:, :1]
    variances = _sandwich(theta, scores, data.weights, codes)
    on_a_bound = len(theta) > 1 and not 1e-3 < calibration.gamma < 5 - 1e-3
    if variances is None or on_a_bound:
        return bootstrap_intervals(data, calibration.method, level=level, groups=groups)
    half = -float(stdtrit(max(int(codes.max()), 1), (1 - level) / 2)) * np.sqrt(variances)
    log_alpha = theta[0]
    gamma: tuple[float, float] = (calibration.gamma, calibration.gamma)
    if len(theta) > 1:
        gamma = (max(float(theta[1] - half[1]), 0.0), float(theta[1] + half[1]))
    alpha = (float(np.exp(log_alpha - half[0])), float(np.exp(log_alpha + half[0])))
    return ConfidenceIntervals(alpha, None if untold else gamma, level)


def _tells_no_exponent(calibration: Calibration, data: CalibrationData) -> bool:
    """Whether all spreads are alike; for shrinkage, once the noise is taken out of them."""
    if isinstance(calibration, ShrinkageCalibration):
        return calibration.log_spread_std < _ALIKE
    return is_constant(data)


def _scores(
    calibration: Calibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return the parameters θ, and the gradient of each point's log likelihood as a function."""
    if isinstance(calibration, PowerCalibration):
        return power_scores(calibration, data)
    if isinstance(calibration, StudentCalibration):
        return student_scores(calibration, data)
    assert isinstance(calibration, ShrinkageCalibration)
    return shrinkage_scores(calibration, data)


def _sandwich(
    theta: Float64Array,
    scores: Callable[[Float64Array], Float64Array],
    weights: Float64Array,
    codes: IntArray,
) -> Float64Array | None:
    """Return the diagonal of H⁻¹ J H⁻¹, or None if the likelihood has no maximum inside."""
    steps = _STEP * np.eye(len(theta))
    slopes = [weights @ (scores(theta - h) - scores(theta + h)) / (2 * _STEP) for h in steps]
    H = np.stack(slopes)
    H = 0.5 * (H + H.T)
    values = np.linalg.eigvalsh(H)
    if not np.all(np.isfinite(H)) or values[0] <= 1e-9 * values[-1]:
        return None
    # At a maximum inside the bounds the gradients sum to zero, up to what the search left.
    J = group_scatter(weights[:, None] * scores(theta), codes)
    half = np.linalg.solve(H, J)
    variances: Float64Array = np.maximum(np.diag(np.linalg.solve(H, half.T)), 0.0)
    return variances


def _largest_alpha(data: CalibrationData, level: float) -> float:
    """Return the α at which the log likelihood is half a quantile of χ² below that of α = 0."""

    def log_likelihood(alpha: float) -> float:
        densities = StudentCalibration(alpha=alpha).log_density(
            data.residuals, data.spread, data.n_members
        )
        return float(data.weights @ densities)

    floor = log_likelihood(0.0) - 0.5 * float(ndtri(0.5 * (1 + level))) ** 2
    largest = 1.0
    while log_likelihood(largest) > floor:
        largest *= 2
    return float(brentq(lambda alpha: log_likelihood(alpha) - floor, 0.0, largest, xtol=1e-6))
