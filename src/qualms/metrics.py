"""How probable the truth is under a prediction and its error bar: Musil et al. 2019, Eqs. (5)–(8).

The paper prints Eq. (6) as a mean and Eqs. (7) and (8) as sums; every log likelihood here is the
mean per point, so that test sets of different size can be compared. Logarithms are natural, and the
densities have the units of 1/y.

Residuals are z = y − ȳ. They may have any shape, (n,) or (n, n_targets); the standard deviations
have the same shape, and every entry counts as one point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, erf, ndtri, stdtr, stdtrit

from qualms.arrays import (
    BoolArray,
    Float64Array,
    IntArray,
    check_dof,
    check_integer,
    check_members,
    check_points,
    check_std,
)
from qualms.errors import InputError

_LOG_2PI = float(np.log(2.0 * np.pi))


def gaussian_log_density(residuals: ArrayLike, std: ArrayLike) -> Float64Array:
    """Logarithm of the Gaussian density of each true value: Eq. (5), Musil et al. 2019.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    std : array_like of the same shape
        σ > 0, in the units of y.

    Returns
    -------
    ndarray of the same shape
        ln P(y_n | X_n). Minus infinity where z²/σ² exceeds the largest float64.
    """
    z = check_points("residuals", residuals)
    return _scaled_log_density(z, check_std(std, z.shape), 1.0)


def log_likelihood(residuals: ArrayLike, std: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean Gaussian log likelihood per point: Eqs. (6) and (7), Musil et al. 2019.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    std : array_like of the same shape
        σ > 0, in the units of y.
    weights : array_like of the same shape, optional
        Non-negative weights of the mean; they need not add up to one.

    Returns
    -------
    float
        The higher, the better. Comparable only between models of the same points and units.
    """
    return _weighted_mean(gaussian_log_density(residuals, std), weights)


def scaled_log_likelihood(
    residuals: ArrayLike,
    std: ArrayLike,
    variance_scale: float,
    weights: ArrayLike | None = None,
) -> float:
    """Mean log likelihood when every variance is multiplied by v: Eq. (8), Musil et al. 2019.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    std : array_like of the same shape
        σ > 0 before scaling, in the units of y.
    variance_scale : float
        v > 0, dimensionless: σ² → v σ². Highest at v₀ = mean(z²/σ²), Eq. (9).
    weights : array_like of the same shape, optional
        Non-negative weights of the mean.

    Returns
    -------
    float
    """
    z = check_points("residuals", residuals)
    sigma = check_std(std, z.shape)
    if not (np.isfinite(variance_scale) and variance_scale > 0.0):
        raise InputError("variance_scale", variance_scale, "a finite number > 0")
    return _weighted_mean(_scaled_log_density(z, sigma, variance_scale), weights)


def student_log_density(residuals: ArrayLike, scale: ArrayLike, dof: ArrayLike) -> Float64Array:
    """Logarithm of the Student t density of each true value.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    scale : array_like of the same shape
        s > 0, in the units of y: z/s has the standard t distribution, whose standard deviation is
        not s but s·sqrt(ν/(ν−2)), for ν > 2.
    dof : float or array_like of the same shape
        ν > 0, the degrees of freedom, of all points or of each.

    Returns
    -------
    ndarray of the same shape
    """
    z = check_points("residuals", residuals)
    s = check_std(scale, z.shape, parameter="scale")
    nu = check_dof(dof, z.shape)
    # ln(1 + z²/(s²ν)) through logarithms: z² or 1/s² alone could overflow, and where z = 0 the
    # logarithm is −∞, which logaddexp turns into the right answer, 0.
    with np.errstate(divide="ignore"):
        log_ratio = 2.0 * (np.log(np.abs(z)) - np.log(s)) - np.log(nu)
    tail = 0.5 * (nu + 1.0) * np.logaddexp(0.0, log_ratio)
    # Γ((ν+1)/2) / (Γ(ν/2) √π) = 1/B(ν/2, 1/2). The beta function stays accurate at large ν, where
    # the difference of two ln Γ would cancel.
    density: Float64Array = -betaln(0.5 * nu, 0.5) - 0.5 * np.log(nu) - np.log(s) - tail
    return density


def gaussian_log_error_density(ln_error: ArrayLike, ln_sigma: ArrayLike) -> Float64Array:
    """Density of ln|ε| when ε is Gaussian with zero mean and variance σ².

    With t = ln ε − ln σ it is sqrt(2/π)·exp(t − e^{2t}/2): the half-normal density of ε times the
    Jacobian dε/d ln ε = ε. Its mode is at ε = σ.

    Parameters
    ----------
    ln_error, ln_sigma : array_like
        Broadcast against each other; ε and σ in the same units.

    Returns
    -------
    ndarray
        Of the broadcast shape; the reference for Eq. (18), Musil et al. 2019.
    """
    t = check_points("ln_error", ln_error) - check_points("ln_sigma", ln_sigma)
    with np.errstate(over="ignore"):
        density: Float64Array = np.sqrt(2.0 / np.pi) * np.exp(t - 0.5 * np.exp(2.0 * t))
    return density


def covering_levels(
    residuals: ArrayLike, std: ArrayLike, dof: ArrayLike | None = None
) -> Float64Array:
    """Return the level of the smallest central interval that holds each true value.

    For a calibrated prediction these are uniform on [0, 1]. They are to central intervals what the
    probability integral transform u is to quantiles: the level is |2u − 1|.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    std : array_like of the same shape
        σ ≥ 0, in the units of y. A prediction with σ = 0 holds the truth at every level if z = 0,
        which gives 0, and at none otherwise, which gives 1.
    dof : float or array_like of the same shape, optional
        Degrees of freedom ν > 2 of a Student t predictive distribution whose standard deviation is
        ``std`` (its scale is then σ·sqrt((ν−2)/ν)). Gaussian by default.

    Returns
    -------
    ndarray of shape (n_points,)
        Flattened, in the order of the points.
    """
    z = np.abs(check_points("residuals", residuals))
    sigma = check_std(std, z.shape, allow_zero=True)
    t = np.where(z > 0.0, np.inf, 0.0)
    with np.errstate(over="ignore"):
        np.divide(z, sigma, out=t, where=sigma > 0.0)
    if dof is None:
        return np.asarray(erf(t / np.sqrt(2.0)), dtype=np.float64).ravel()
    nu = check_dof(dof, z.shape, above=2.0)
    level = 1.0 - 2.0 * stdtr(nu, -t * np.sqrt(nu / (nu - 2.0)))
    return np.asarray(np.clip(level, 0.0, 1.0), dtype=np.float64).ravel()


def root_mean_square(values: Float64Array) -> float:
    """Square root of the mean square of an array, safe from overflow and underflow."""
    largest = float(np.max(np.abs(values)))
    if largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.mean(np.square(values / largest))))


def rms_and_stderr(values: Float64Array) -> tuple[float, float]:
    """Root mean square r and its standard error, that of the mean square divided by 2 r."""
    rms = root_mean_square(values)
    if values.size == 1:
        return rms, np.inf
    if rms == 0.0:
        return 0.0, 0.0
    relative = float(np.std(np.square(values / rms), ddof=1)) / np.sqrt(values.size)
    return rms, 0.5 * rms * float(relative)


def _scaled_log_density(z: Float64Array, std: Float64Array, scale: float) -> Float64Array:
    """Terms of Eq. (8): the Gaussian log density at variance v σ², for checked arguments."""
    # Divided before it is squared, so that neither z² nor σ² can overflow on its own.
    with np.errstate(over="ignore"):
        chi2 = np.square(z / std) / scale
    density: Float64Array = -0.5 * (chi2 + _LOG_2PI + np.log(scale)) - np.log(std)
    return density


def _weighted_mean(values: Float64Array, weights: ArrayLike | None) -> float:
    """Mean of the values under non-negative weights that need not add up to one."""
    if weights is None:
        return float(np.mean(values))
    w = check_points("weights", weights, values.shape)
    if np.any(w < 0.0) or not np.any(w > 0.0):
        raise InputError("weights", f"minimum {np.min(w):g}", "numbers >= 0, not all of them 0")
    used = w > 0.0  # 0 × (−∞) is not a number: what has no weight must not be multiplied
    w = w[used] / np.max(w)
    return float(np.sum(w * values[used]) / np.sum(w))


# Scores of single points, whose means are those of `qualms.metrics`.
def gaussian_half_width(level: float) -> float:
    """Half width of the central interval of a standard normal."""
    # Minus the lower quantile rather than the upper: 1 − level keeps its digits when it is small.
    return -float(ndtri(0.5 * (1.0 - level)))


def gaussian_crps(z: Float64Array, sigma: Float64Array) -> Float64Array:
    """Continuous ranked probability score of N(0, σ²) at the distance z = |y − ȳ|; |z| if σ = 0."""
    t = np.full(z.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(z, sigma, out=t, where=sigma > 0.0)
        # σ [t erf(t/√2) + 2 φ(t) − 1/√π] with σ t written as |z|, so that σ → 0 needs no limit.
        density = np.exp(-0.5 * t * t) / np.sqrt(2.0 * np.pi)
    crps: Float64Array = z * erf(t / np.sqrt(2.0)) + sigma * (2.0 * density - 1.0 / np.sqrt(np.pi))
    return crps


def ensemble_crps(truth: Float64Array, members: Float64Array, *, fair: bool) -> Float64Array:
    """Continuous ranked probability score of members (n, R) at the truth (n,): see `crps_ensemble`.

    Between the k-th and the next of the sorted members lie k (R − k) of the pairs, so the gaps
    weighted by that sum up all distances: R log R instead of R², and no term cancels another.
    """
    x = np.sort(members, axis=1)
    n_members = x.shape[1]
    k = np.arange(1, n_members)
    pair_distances = np.diff(x, axis=1) @ (k * (n_members - k)).astype(np.float64)
    distance = np.mean(np.abs(x - truth[:, None]), axis=1)
    # Each pair occurs twice in Σ_ij, which takes the 1/2 away.
    n_pairs = n_members * (n_members - 1) if fair else n_members**2
    # Neither score is negative: with k members below x < y their integrands are (k/R)² and
    # k(k−1)/(R(R−1)), and likewise above. Only rounding could make it so.
    crps: Float64Array = np.maximum(distance - pair_distances / n_pairs, 0.0)
    return crps


def interval_scores(z: Float64Array, half_width: Float64Array, level: float) -> Float64Array:
    """Interval score of ȳ ± half width at z = |y − ȳ|: the width, and what a miss costs."""
    missed = np.maximum(z - half_width, 0.0)
    scores: Float64Array = 2.0 * half_width + 2.0 / (1.0 - level) * missed
    return scores


# Where error bars are right and where they are not: numbers for pictures, drawn elsewhere.
#: Where ln(ε/σ) of a Gaussian lies, but for a thousandth.
_GAUSSIAN_RANGE = (-7.0, 1.5)
#: Bins per bandwidth before smoothing, which changes its square by at most 1/400.
_BINS_PER_BANDWIDTH = 10
#: No axis is resolved more finely than this fraction of its range, which bounds time and memory.
_FINEST = 1.0 / 200.0
#: Nor more finely than this, in units of ln σ and ln ε: one per cent.
_SMALLEST_BANDWIDTH = 0.01
#: How far the default grid reaches beyond the data, in bandwidths.
_MARGIN = 4.0


@dataclass(frozen=True)
class CalibrationCurve:
    """Claimed against actual coverage of central intervals.

    Attributes
    ----------
    expected : ndarray of shape (n_levels,)
        The levels p: the coverage that the prediction claims.
    observed : ndarray of shape (n_levels,)
        The fraction of points inside their central interval of level p. For a calibrated prediction
        of independent points it is ``expected`` with standard error sqrt(p(1−p)/n_points).
    n_points : int
        How many points were counted.
    """

    expected: Float64Array
    observed: Float64Array
    n_points: int


@dataclass(frozen=True)
class BinnedErrors:
    """Actual against predicted errors in bins of σ, from the smallest σ to the largest.

    Attributes
    ----------
    rmv : ndarray of shape (n_bins,)
        Root mean variance sqrt(mean σ²) of each bin, in the units of y.
    rmse : ndarray of shape (n_bins,)
        Root mean squared residual of each bin, in the units of y.
    counts : ndarray of int, of shape (n_bins,)
        Points in each bin.
    rmv_stderr, rmse_stderr : ndarray of shape (n_bins,)
        Standard errors of the two within these bins; infinite for a bin of one point.
    """

    rmv: Float64Array
    rmse: Float64Array
    counts: IntArray
    rmv_stderr: Float64Array
    rmse_stderr: Float64Array


@dataclass(frozen=True)
class ConditionalDensity:
    """P(ln ε | ln σ) on a grid: Eq. (18), Musil et al. 2019.

    Attributes
    ----------
    ln_sigma : ndarray of shape (n_sigma,)
        Grid of ln σ, with σ in the units of y.
    ln_error : ndarray of shape (n_error,)
        Grid of ln ε, with ε in the units of y.
    density : ndarray of shape (n_sigma, n_error)
        ``density[i, j]`` = P(ln_error[j] | ln_sigma[i]). Each supported row integrates to one over
        ln ε; the others are zero.
    marginal : ndarray of shape (n_sigma,)
        P(ln σ), which integrates to one over ln σ.
    supported : ndarray of bool, of shape (n_sigma,)
        Where enough points lie within a bandwidth of ln σ for the conditional to mean something.
    n_dropped : int
        Errors left out because ε or σ is zero and has no logarithm.
    """

    ln_sigma: Float64Array
    ln_error: Float64Array
    density: Float64Array
    marginal: Float64Array
    supported: BoolArray
    n_dropped: int


@dataclass(frozen=True)
class ErrorDensities:
    """Eq. (18) for the actual errors and for those that the model expects, on one grid.

    Attributes
    ----------
    true : ConditionalDensity
        Of ε_t = |y − ȳ|, one per point.
    model : ConditionalDensity
        Of ε_m = |y⁽ⁱ⁾ − ȳ|, one per point and member; or Gaussian, without members.
    bandwidth : tuple of two floats
        Standard deviations of the smoothing kernel along ln σ and ln ε.
    """

    true: ConditionalDensity
    model: ConditionalDensity
    bandwidth: tuple[float, float]


def calibration_curve(
    residuals: ArrayLike,
    std: ArrayLike,
    levels: ArrayLike | None = None,
    dof: ArrayLike | None = None,
) -> CalibrationCurve:
    """Coverage of the central intervals of a prediction, against the coverage they claim.

    Parameters
    ----------
    residuals, std, dof
        As in `qualms.metrics.covering_levels`.
    levels : array_like of shape (n_levels,), optional
        Levels within (0, 1); 0.01, 0.02, … 0.99 by default.

    Returns
    -------
    CalibrationCurve
    """
    expected = np.arange(1, 100) / 100.0 if levels is None else check_points("levels", levels)
    if expected.ndim != 1 or expected.min() <= 0.0 or expected.max() >= 1.0:
        given = f"shape {expected.shape} from {expected.min():g} to {expected.max():g}"
        raise InputError("levels", given, "a list of numbers within (0, 1)")
    covered = np.sort(covering_levels(residuals, std, dof))
    observed = np.searchsorted(covered, expected, side="right") / covered.size
    return CalibrationCurve(expected, np.asarray(observed, dtype=np.float64), int(covered.size))


def binned_errors(residuals: ArrayLike, std: ArrayLike, n_bins: int | None = None) -> BinnedErrors:
    """Root mean squared residual against predicted σ, in bins of equal count.

    Points of equal σ are never separated, because their order would be arbitrary. With many equal
    σ there are therefore fewer bins than asked for; with constant σ there is one.

    Parameters
    ----------
    residuals : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ, in the units of y.
    std : array_like of the same shape
        σ ≥ 0, in the units of y.
    n_bins : int, optional
        Number of bins, at most the number of points. By default 10, or as many as leave ten points
        in each.

    Returns
    -------
    BinnedErrors
    """
    z = check_points("residuals", residuals)
    sigma = check_std(std, z.shape, allow_zero=True).ravel()
    n = sigma.size
    if n_bins is None:
        n_bins = int(np.clip(n // 10, 1, 10))
    if not 1 <= n_bins <= n:
        raise InputError("n_bins", n_bins, f"between 1 and the number of points, {n}")
    order = np.argsort(sigma, kind="stable")
    sigma, z = sigma[order], z.ravel()[order]
    # A boundary inside a run of equal σ moves to where the run begins.
    cuts = sigma[np.arange(n_bins) * n // n_bins]
    starts = np.append(np.unique(np.searchsorted(sigma, cuts, side="left")), n)
    spans = [slice(a, b) for a, b in pairwise(starts)]
    predicted = np.array([rms_and_stderr(sigma[s]) for s in spans])
    actual = np.array([rms_and_stderr(z[s]) for s in spans])
    return BinnedErrors(
        rmv=predicted[:, 0],
        rmse=actual[:, 0],
        counts=np.diff(starts),
        rmv_stderr=predicted[:, 1],
        rmse_stderr=actual[:, 1],
    )


def conditional_error_density(
    y: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    members: ArrayLike | None = None,
    *,
    bandwidth: tuple[float, float] | None = None,
    ln_sigma: ArrayLike | None = None,
    ln_error: ArrayLike | None = None,
    min_points: float = 10.0,
) -> ErrorDensities:
    """P(ln ε | ln σ) of the actual and of the expected errors: Eq. (18), Musil et al. 2019.

    Kernel density estimates: P(ln ε, ln σ) and P(ln σ) are smoothed by the same Gaussian, and their
    ratio taken. True and model errors share grid and bandwidth, so that they differ only where the
    distributions do.

    Parameters
    ----------
    y, mean, std : array_like of shape (n,) or (n, n_targets)
        True values, predictions and their standard deviations, in the same units.
    members : array_like of shape y.shape + (n_members,), optional
        Predictions of the members. Without them the model is taken as Gaussian.
    bandwidth : tuple of two floats, optional
        Standard deviations of the kernel along ln σ and ln ε. By default Scott's rule,
        n^(−1/6) times the standard deviation of the n points along each axis, but at least 0.01 and
        1/200 of the range.
    ln_sigma, ln_error : array_like of shape (n_sigma,) and (n_error,), optional
        Grids, for instance to compare models; by default the data's range in half bandwidths.
    min_points : float
        A row is supported if the sum over the points of exp(−Δ²/2h²), Δ being their distance in
        ln σ, is at least this: about as many points within 1.25 bandwidths on either side.

    Returns
    -------
    ErrorDensities
    """
    truth = check_points("y", y)
    center = check_points("mean", mean, truth.shape).ravel()
    sigma = check_std(std, truth.shape, allow_zero=True).ravel()
    if not np.any(sigma > 0.0):
        raise InputError("std", f"0 for all {sigma.size} points", "standard deviations > 0")
    true = _LogErrors.of(np.abs(truth.ravel() - center)[:, None], sigma)
    # Without members there is no error to count: one of size σ per point holds their place.
    errors = sigma[:, None]
    if members is not None:
        errors = np.abs(check_members(members, truth.shape) - center[:, None])
    model = _LogErrors.of(errors, sigma)
    for parameter, kept in (("y", true), ("members", model)):
        if kept.ln_error.size == 0:
            raise InputError(parameter, "all equal to mean", "errors other than 0 where std > 0")
    if not min_points > 0.0:
        raise InputError("min_points", min_points, "a number > 0")
    if bandwidth is not None and np.shape(bandwidth) != (2,):
        raise InputError("bandwidth", bandwidth, "two numbers, along ln σ and along ln ε")
    h_sigma, h_error = (None, None) if bandwidth is None else bandwidth
    margins = _GAUSSIAN_RANGE if members is None else (0.0, 0.0)
    axes = (
        _make_axis("ln_sigma", true.ln_sigma, model.ln_sigma, (0.0, 0.0), h_sigma, ln_sigma),
        _make_axis("ln_error", true.ln_error, model.ln_error, margins, h_error, ln_error),
    )
    model_joint = _joint_histogram(model, axes)
    if members is None:
        model_joint = _gaussian_joint(model_joint.sum(axis=1), axes)
    return ErrorDensities(
        true=_estimate(_joint_histogram(true, axes), true, axes, min_points),
        model=_estimate(model_joint, model, axes, min_points),
        bandwidth=(axes[0].bandwidth, axes[1].bandwidth),
    )


@dataclass(frozen=True)
class _LogErrors:
    """Pairs (ln σ, ln ε) of all errors that have a logarithm; ``n_columns`` errors per point."""

    ln_sigma: Float64Array
    ln_error: Float64Array
    n_columns: int
    n_dropped: int

    @classmethod
    def of(cls, errors: Float64Array, sigma: Float64Array) -> _LogErrors:
        """Take errors (n, n_columns) ≥ 0 and standard deviations (n,) ≥ 0."""
        kept = (errors > 0.0) & (sigma > 0.0)[:, None]
        pairs = np.broadcast_to(sigma[:, None], errors.shape)[kept]
        n_dropped = int(errors.size - pairs.size)
        return cls(np.log(pairs), np.log(errors[kept]), errors.shape[1], n_dropped)


@dataclass(frozen=True)
class _Axis:
    """One axis of a density: its bins, its kernel, and the grid on which it is evaluated."""

    low: float
    width: float
    n_bins: int
    bandwidth: float
    grid: Float64Array

    @property
    def centers(self) -> Float64Array:
        return self.low + self.width * np.arange(self.n_bins, dtype=np.float64)

    def share(self, x: Float64Array) -> tuple[IntArray, Float64Array]:
        """Return the bin whose centre is below each x, and the share of x that the next gets."""
        position = (x - self.low) / self.width
        index = np.clip(position.astype(np.intp), 0, self.n_bins - 2)
        return index, position - index

    def kernel(self) -> Float64Array:
        """Gaussian weights (n_grid, n_bins) with which each bin acts on each grid point."""
        u = (self.grid[:, None] - self.centers) / self.bandwidth
        weights: Float64Array = np.exp(-0.5 * u * u) / (np.sqrt(2.0 * np.pi) * self.bandwidth)
        return weights


def _make_axis(
    name: str,
    true: Float64Array,
    model: Float64Array,
    margins: tuple[float, float],
    bandwidth: float | None,
    grid: ArrayLike | None,
) -> _Axis:
    """Make one axis, its bandwidth from the true errors, its range from both."""
    low = min(float(true.min()), float(model.min()) + margins[0])
    span = max(float(true.max()), float(model.max()) + margins[1]) - low
    if bandwidth is None:
        # Scott's rule in two dimensions; members of one point share its σ and are no more points.
        scott = float(np.std(true, ddof=1)) * true.size ** (-1.0 / 6.0) if true.size > 1 else 0.0
        bandwidth = max(scott, _FINEST * span, _SMALLEST_BANDWIDTH)
    elif not (np.isfinite(bandwidth) and bandwidth > 0.2 * _FINEST * span):
        least = f"more than a thousandth of the range, {0.2 * _FINEST * span:g}"
        raise InputError("bandwidth", bandwidth, f"a finite number, {least}")
    if grid is None:
        reach = _MARGIN * bandwidth
        n_grid = int(np.ceil(2.0 * (span + 2.0 * reach) / bandwidth)) + 1
        points = np.linspace(low - reach, low + span + reach, n_grid)
    else:
        points = check_points(name, grid)
        if points.ndim != 1 or np.any(np.diff(points) <= 0.0):
            raise InputError(name, f"shape {points.shape}", "a list of increasing numbers")
    n_gaps = 1 + int(_BINS_PER_BANDWIDTH * min(span / bandwidth, 1.0 / _FINEST))
    width = span / n_gaps if span > 0.0 else float(bandwidth)
    return _Axis(low, width, n_gaps + 1, float(bandwidth), points)


def _joint_histogram(errors: _LogErrors, axes: tuple[_Axis, _Axis]) -> Float64Array:
    """Histogram (n_bins of ln σ, n_bins of ln ε) that adds up to one.

    Each pair is shared between the four nearest centres so that its own position is their mean.
    Smoothing then errs in the second order of the bin width only.
    """
    sigma, error = axes
    i, u = sigma.share(errors.ln_sigma)
    j, v = error.share(errors.ln_error)
    cells = i * error.n_bins + j
    size = sigma.n_bins * error.n_bins
    joint = np.bincount(cells, (1.0 - u) * (1.0 - v), size)
    joint += np.bincount(cells + 1, (1.0 - u) * v, size)
    joint += np.bincount(cells + error.n_bins, u * (1.0 - v), size)
    joint += np.bincount(cells + error.n_bins + 1, u * v, size)
    return np.asarray(joint.reshape(sigma.n_bins, -1) / errors.ln_sigma.size, dtype=np.float64)


def _gaussian_joint(marginal: Float64Array, axes: tuple[_Axis, _Axis]) -> Float64Array:
    """Joint histogram of a model that is Gaussian at each σ, given that of ln σ."""
    density = gaussian_log_error_density(axes[1].centers[None, :], axes[0].centers[:, None])
    joint: Float64Array = marginal[:, None] * density / density.sum(axis=1, keepdims=True)
    return joint


def _estimate(
    joint: Float64Array, errors: _LogErrors, axes: tuple[_Axis, _Axis], min_points: float
) -> ConditionalDensity:
    """Eq. (18), Musil et al. 2019: the smoothed joint histogram over its smoothed marginal."""
    sigma, error = axes
    # The Gaussian kernel is a product: smoothing is one matrix product along each axis.
    smooth = sigma.kernel() @ joint
    marginal = smooth.sum(axis=1)
    # marginal = near / (n h sqrt(2π)), where near counts the n points by their closeness in ln σ.
    n_points = errors.ln_sigma.size / errors.n_columns
    near = marginal * n_points * sigma.bandwidth * np.sqrt(2.0 * np.pi)
    supported: BoolArray = near >= min_points
    density = np.zeros((sigma.grid.size, error.grid.size))
    density[supported] = smooth[supported] @ error.kernel().T / marginal[supported, None]
    n_dropped = errors.n_dropped
    return ConditionalDensity(sigma.grid, error.grid, density, marginal, supported, n_dropped)


# How good predictions and their error bars are, each as one number.
def rmse(residuals: ArrayLike) -> float:
    """Root mean squared error, in the units of y."""
    return root_mean_square(check_points("residuals", residuals))


def mae(residuals: ArrayLike) -> float:
    """Mean absolute error, in the units of y."""
    return float(np.mean(np.abs(check_points("residuals", residuals))))


def sharpness(std: ArrayLike) -> float:
    """Root mean predicted variance, in the units of y: the error that the model expects."""
    return root_mean_square(check_std(std, allow_zero=True))


def crps_gaussian(residuals: ArrayLike, std: ArrayLike) -> float:
    """Mean continuous ranked probability score of Gaussian predictions.

    The integral over x of (F(x) − [x ≥ y])², F being the predicted distribution function: zero for
    a certain and right prediction, |z| for a certain and wrong one. The lower, the better; unlike
    the log likelihood it forgives a single surprise.

    Parameters
    ----------
    residuals, std : array_like of one shape
        σ may be zero, which gives |z|.

    Returns
    -------
    float
        In the units of y.
    """
    z = np.abs(check_points("residuals", residuals))
    sigma = check_std(std, z.shape, allow_zero=True)
    return float(np.mean(gaussian_crps(z, sigma)))


def crps_ensemble(y: ArrayLike, members: ArrayLike, *, fair: bool = True) -> float:
    """Mean continuous ranked probability score of an ensemble taken as it is.

    mean_i |x_i − y| − c · Σ_ij |x_i − x_j|, with c = 1/(2R(R−1)) if fair and 1/(2R²) if not.

    Parameters
    ----------
    y : array_like of shape (n,) or (n, n_targets)
        True values.
    members : array_like of shape y.shape + (n_members,)
        Predictions of the R members.
    fair : bool
        Whether to score the distribution that the members were drawn from, without bias (Ferro
        2014), rather than the members themselves as R equal spikes. It needs two members.

    Returns
    -------
    float
        In the units of y. The lower, the better.
    """
    truth = check_points("y", y)
    x = check_members(members, truth.shape)
    if x.shape[1] < 2 and fair:
        raise InputError("members", "1 member", "at least 2 members", "Or set fair=False.")
    return float(np.mean(ensemble_crps(truth.ravel(), x, fair=fair)))


def miscalibration_area(
    residuals: ArrayLike, std: ArrayLike, dof: ArrayLike | None = None
) -> float:
    """Area between the calibration curve of the central intervals and the diagonal.

    ∫₀¹ |C(p) − p| dp, where C(p) is the fraction of points inside their central interval of level p
    (:func:`~qualms.metrics.calibration_curve`). C is a staircase, and the integral is
    exact. It lies between 0 and 1/2. Even calibrated predictions of n independent points have
    about 0.31/√n, so compare with that, not with zero.

    Parameters
    ----------
    residuals, std : array_like of one shape
        σ may be zero.
    dof : float or array_like of that shape, optional
        Degrees of freedom > 2 of a Student t distribution of standard deviation ``std``.

    Returns
    -------
    float
    """
    covered = np.sort(covering_levels(residuals, std, dof))
    # C = k/n between the k-th covering level and the next. With G(u) = u|u|/2, whose derivative is
    # |u|, each step contributes G(right − k/n) − G(left − k/n).
    steps = np.arange(covered.size + 1) / covered.size
    right = np.append(covered, 1.0) - steps
    left = np.insert(covered, 0, 0.0) - steps
    return float(0.5 * np.sum(right * np.abs(right) - left * np.abs(left)))


def ence(residuals: ArrayLike, std: ArrayLike, n_bins: int | None = None) -> float:
    """Mean over bins of σ of |RMV − RMSE| / RMV: the expected normalised calibration error.

    Levi et al. 2022, on the bins of :func:`~qualms.metrics.binned_errors`. Even calibrated
    Gaussian predictions of n points have about sqrt(n_bins / (π n)), so compare with that, and only
    between equal numbers of bins.

    Parameters
    ----------
    residuals, std : array_like of one shape
        At least one σ > 0 in every bin.
    n_bins : int, optional
        Number of bins; by default 10, or as many as leave ten points in each.

    Returns
    -------
    float
        Dimensionless.
    """
    bins = binned_errors(residuals, std, n_bins)
    if np.any(bins.rmv == 0.0):
        n_zero = int(np.count_nonzero(np.asarray(std) == 0.0))
        given = f"0 for {n_zero} points, among them a whole bin"
        raise InputError("std", given, "standard deviations > 0", "Drop those points.")
    return float(np.mean(np.abs(bins.rmv - bins.rmse) / bins.rmv))


def coverage(
    residuals: ArrayLike, std: ArrayLike, level: float, dof: ArrayLike | None = None
) -> float:
    """Fraction of points inside their central interval ȳ ± qσ of the given level.

    Parameters
    ----------
    residuals, std : array_like of one shape
        σ may be zero: the interval then holds its mean alone.
    level : float
        Claimed coverage, within (0, 1).
    dof : float or array_like of that shape, optional
        Degrees of freedom > 2 of a Student t distribution of standard deviation ``std``.

    Returns
    -------
    float
        Between 0 and 1; equal to ``level`` for a calibrated prediction.
    """
    z, half_width = _central_intervals(residuals, std, level, dof)
    return float(np.mean(z <= half_width))


def interval_score(
    residuals: ArrayLike, std: ArrayLike, level: float, dof: ArrayLike | None = None
) -> float:
    """Mean interval score of the central intervals (Gneiting and Raftery 2007).

    The width of the interval plus 2/(1−level) times the distance by which it misses the truth.

    Parameters
    ----------
    residuals, std, level, dof
        As in :func:`coverage`.

    Returns
    -------
    float
        In the units of y. The lower, the better.
    """
    z, half_width = _central_intervals(residuals, std, level, dof)
    return float(np.mean(interval_scores(z, half_width, level)))


def spearman(residuals: ArrayLike, std: ArrayLike) -> float:
    """Spearman rank correlation of |z| and σ: do larger error bars go with larger errors.

    Even a perfect σ does not reach one, because z is random: with σ spread over many orders of
    magnitude it approaches one, with constant σ there is nothing to rank.

    Parameters
    ----------
    residuals, std : array_like of one shape
        σ may be zero.

    Returns
    -------
    float
        Between −1 and 1; 0 if all |z| or all σ are equal, which orders nothing.
    """
    z = np.abs(check_points("residuals", residuals))
    sigma = check_std(std, z.shape, allow_zero=True)
    a, b = _centered_ranks(z), _centered_ranks(sigma)
    norm = np.sqrt(np.sum(a * a) * np.sum(b * b))
    return float(np.clip(np.sum(a * b) / norm, -1.0, 1.0)) if norm > 0.0 else 0.0


@dataclass(frozen=True)
class Scores:
    """All scores of one set of predictions, made by :func:`score_arrays`.

    Attributes
    ----------
    n_points : int
        Number of points.
    rmse, mae : float
        Errors of the mean prediction, in the units of y.
    log_likelihood : float
        Mean Gaussian log likelihood, Eq. (6), Musil et al. 2019.
    crps : float
        Continuous ranked probability score of the Gaussian predictions, in the units of y.
    crps_ensemble : float or None
        The fair one of the members; None without members.
    miscalibration_area, ence : float
        Distances from calibration; see the functions of those names.
    sharpness : float
        Root mean predicted variance, in the units of y.
    coverage_68, coverage_95 : float
        Coverage of the central intervals of level 0.68 and 0.95.
    spearman : float
        Rank correlation of |z| and σ.
    interval_score_95 : float
        Interval score at level 0.95, in the units of y.
    """

    n_points: int
    rmse: float
    mae: float
    log_likelihood: float
    crps: float
    crps_ensemble: float | None
    miscalibration_area: float
    ence: float
    sharpness: float
    coverage_68: float
    coverage_95: float
    spearman: float
    interval_score_95: float

    def as_dict(self) -> dict[str, int | float | None]:
        """Return the scores by name, in the order of the fields."""
        return asdict(self)

    def __str__(self) -> str:
        values = {
            name: "-" if value is None else f"{value:.6g}" for name, value in self.as_dict().items()
        }
        name_width, value_width = max(map(len, values)), max(map(len, values.values()))
        rows = (f"{n:<{name_width}}  {v:>{value_width}}" for n, v in values.items())
        return "\n".join(rows)


def score_arrays(
    y: ArrayLike, mean: ArrayLike, std: ArrayLike, members: ArrayLike | None = None
) -> Scores:
    """Compute all scores of a set of predictions.

    Parameters
    ----------
    y, mean, std : array_like of shape (n,) or (n, n_targets)
        True values, predictions and standard deviations > 0, in the same units. Several targets are
        scored together, as if they were more points.
    members : array_like of shape y.shape + (n_members,), optional
        Predictions of at least two members, for ``crps_ensemble``.

    Returns
    -------
    Scores
    """
    truth = check_points("y", y)
    z = truth - check_points("mean", mean, truth.shape)
    sigma = check_std(std, truth.shape)
    return Scores(
        n_points=int(z.size),
        rmse=rmse(z),
        mae=mae(z),
        log_likelihood=log_likelihood(z, sigma),
        crps=crps_gaussian(z, sigma),
        crps_ensemble=None if members is None else crps_ensemble(truth, members),
        miscalibration_area=miscalibration_area(z, sigma),
        ence=ence(z, sigma),
        sharpness=sharpness(sigma),
        coverage_68=coverage(z, sigma, 0.68),
        coverage_95=coverage(z, sigma, 0.95),
        spearman=spearman(z, sigma),
        interval_score_95=interval_score(z, sigma, 0.95),
    )


class _MeanAndStd(Protocol):
    """A prediction: see `qualms.Prediction`."""

    @property
    def mean(self) -> Float64Array: ...
    @property
    def std(self) -> Float64Array: ...
    @property
    def members(self) -> Any: ...


def score(
    y: ArrayLike,
    prediction: _MeanAndStd | None = None,
    *,
    mean: ArrayLike | None = None,
    std: ArrayLike | None = None,
) -> Scores:
    """Score predictions against reference values.

    Parameters
    ----------
    y : (n,) or (n, T) array
        Reference values.
    prediction : Prediction of the shape of y
    mean, std : arrays of the shape of y
        Instead of a prediction: predicted values and standard deviations > 0.

    Returns
    -------
    Scores
        Root mean squared error, log likelihood, coverage and the other scores, by name.

    Examples
    --------
    >>> round(score([1.0, 2.0], mean=[1.1, 1.8], std=[0.1, 0.2]).mae, 6)
    0.15
    """
    if prediction is None:
        if mean is None or std is None:
            raise InputError("prediction", None, "a Prediction, or mean and std")
        return score_arrays(y, mean, std)
    if mean is not None or std is not None:
        raise InputError("mean", "a prediction and mean or std", "one or the other")
    if not hasattr(prediction, "members"):
        given = type(prediction).__name__
        raise InputError("prediction", given, "a Prediction", "Or use mean= and std=.")
    if np.shape(y) != prediction.mean.shape:
        raise InputError("y", f"shape {np.shape(y)}", f"{prediction.mean.shape}, as predicted")
    return score_arrays(y, prediction.mean, prediction.std, prediction.members)


def _central_intervals(
    residuals: ArrayLike, std: ArrayLike, level: float, dof: ArrayLike | None
) -> tuple[Float64Array, Float64Array]:
    """Distances |z| of the truth and half widths of the central intervals of one level."""
    z = np.abs(check_points("residuals", residuals))
    sigma = check_std(std, z.shape, allow_zero=True)
    if not 0.0 < level < 1.0:
        raise InputError("level", level, "a number within (0, 1)")
    if dof is None:
        return z, gaussian_half_width(level) * sigma
    nu = check_dof(dof, z.shape, above=2.0)
    quantile = -np.asarray(stdtrit(nu, 0.5 * (1.0 - level)), dtype=np.float64)
    return z, quantile * np.sqrt((nu - 2.0) / nu) * sigma


def _centered_ranks(values: Float64Array) -> Float64Array:
    """Ranks minus their mean, equal values sharing the average of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Twice the rank of a group is an integer: constant values give zeros, not rounding errors.
    twice = 2 * np.cumsum(counts) - counts + 1
    return 0.5 * (twice[which.ravel()] - (values.size + 1)).astype(np.float64)


# Points whose errors are not of the same kind as those of the others.
#: So many times its error bar, and so many times the size of most errors, is far.
FAR = 10.0
#: Half of all Gaussian errors are smaller than this part of their standard deviation.
_MEDIAN = 0.6745


def far_points(residuals: ArrayLike, std: ArrayLike) -> IntArray:
    """Return the points that are far off, both for their error bars and for an error, worst first.

    A point may be many error bars off because members happened to agree about it, and its error may
    be large where all errors are; only both together are a sign of a wrong label.

    Parameters
    ----------
    residuals, std : array_like of shape (n,)
        z = y − ȳ and σ > 0, in the units of y.

    Returns
    -------
    (m,) array of int
        Those with |z| > 10 σ and |z| > 10 times the median of |z|/0.67.
    """
    z = np.abs(check_points("residuals", residuals))
    with np.errstate(over="ignore"):
        t = z / check_std(std, z.shape)
    found = np.flatnonzero((t > FAR) & (z > FAR * np.median(z) / _MEDIAN))
    return found[np.argsort(-t[found], kind="stable")]


# How well so many points determine a score: bootstrap intervals of all scores at once.
#: Scores that measure a distance from calibration. They are never negative, and noise, that of the
#: resampling included, makes them larger: see `bootstrap_scores`.
DISTANCES = ("miscalibration_area", "ence")
#: Fraction of the truths within one σ of a calibrated Gaussian prediction.
EXPECTED_WITHIN = float(erf(np.sqrt(0.5)))


@dataclass(frozen=True)
class ScoreIntervals:
    """Scores with confidence intervals, made by :func:`bootstrap_scores`.

    Attributes
    ----------
    scores : Scores
        Of all points.
    intervals : mapping of str to tuple of two floats
        Lower and upper end for each score, by its name; each holds the score itself. Empty if
        there is but one group to draw from, which says nothing about others.
    level : float
        Claimed coverage of the intervals.
    n_bootstrap : int
        Number of resamples.
    n_groups : int
        What was drawn in each: so many groups, or points.
    """

    scores: Scores
    intervals: Mapping[str, tuple[float, float]]
    level: float
    n_bootstrap: int
    n_groups: int


def bootstrap_scores(
    y: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    members: ArrayLike | None = None,
    *,
    groups: ArrayLike | None = None,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> ScoreIntervals:
    """Compute all scores of a set of predictions, with bootstrap confidence intervals.

    The intervals are quantiles of the scores of resamples. The two distances from calibration,
    miscalibration area and ENCE, are larger in a resample than in the data, by as much as they are
    larger in the data than in the limit of many points; their intervals are those quantiles
    reflected at the score (the "basic" bootstrap), not below zero, and stretched to hold the score.

    Parameters
    ----------
    y, mean, std : array_like of shape (n,) or (n, n_targets)
        True values, predictions and standard deviations > 0, in the same units.
    members : array_like of shape y.shape + (n_members,), optional
        Predictions of at least two members, for ``crps_ensemble``.
    groups : array_like of y.shape or of shape (n,), optional
        Labels of points that belong together, such as the atoms of one structure, and are drawn
        together. Each row by itself by default.
    n_bootstrap : int
        Number of resamples, at least 20.
    level : float
        Coverage of the intervals, within (0, 1).
    rng : numpy Generator, optional
        The same generator gives the same intervals; seeded with 0 by default.

    Returns
    -------
    ScoreIntervals
    """
    check_integer("n_bootstrap", n_bootstrap, 20)
    if not 0.0 < level < 1.0:
        raise InputError("level", level, "a number within (0, 1)")
    scores = score_arrays(y, mean, std, members)
    truth = check_points("y", y)
    group_of = _group_numbers(groups, truth)
    n_groups = int(group_of.max()) + 1
    if n_groups < 2:
        return ScoreIntervals(scores, {}, level, n_bootstrap, n_groups)
    z, sigma = (truth - np.asarray(mean)).ravel(), check_std(std, truth.shape).ravel()
    ensemble = None
    if members is not None:
        ensemble = ensemble_crps(truth.ravel(), check_members(members, truth.shape), fair=True)
    parts: list[Callable[[Float64Array], dict[str, float]]]
    parts = [_Means(z, sigma, ensemble), _Area(z, sigma)]
    parts += [_Ence(z, sigma), _Spearman(z, sigma)]
    draw = np.random.default_rng(0) if rng is None else rng
    resampled: dict[str, list[float]] = {}
    for _ in range(n_bootstrap):
        counts = _counts(draw, n_groups, group_of)
        for part in parts:
            for name, value in part(counts).items():
                resampled.setdefault(name, []).append(value)
    intervals = {
        field.name: _interval(field.name, getattr(scores, field.name), resampled[field.name], level)
        for field in fields(Scores)
        if field.name in resampled
    }
    return ScoreIntervals(scores, intervals, level, n_bootstrap, n_groups)


@dataclass(frozen=True)
class OneSigma:
    """How the truth lies to intervals of ±σ, made by :func:`bootstrap_one_sigma`.

    Attributes
    ----------
    within : float
        Fraction of points with |z| ≤ σ; `EXPECTED_WITHIN` if Gaussian and calibrated.
    within_interval : tuple of two floats, or None
        Its confidence interval; None if there is but one group of points.
    factor : float
        By which σ must be multiplied for that fraction to be right: above one if error bars are too
        small. Unlike the root mean square of z/σ, a few far errors do not change it.
    factor_interval : tuple of two floats, or None
    """

    within: float
    within_interval: tuple[float, float] | None
    factor: float
    factor_interval: tuple[float, float] | None


def bootstrap_one_sigma(
    residuals: ArrayLike,
    std: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> OneSigma:
    """Count truths within one σ, and find the factor that would make the count right.

    Parameters
    ----------
    residuals, std : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ and σ > 0, in the units of y.
    groups, n_bootstrap, level, rng
        As in :func:`bootstrap_scores`.

    Returns
    -------
    OneSigma
    """
    z = check_points("residuals", residuals)
    with np.errstate(over="ignore"):
        t = (np.abs(z) / check_std(std, z.shape)).ravel()
    group_of = _group_numbers(groups, z)
    n_groups = int(group_of.max()) + 1
    order = np.argsort(t, kind="stable")
    t, group_of = t[order], group_of[order]
    inside = int(np.searchsorted(t, 1.0, side="right"))

    def count(weights: Float64Array) -> tuple[float, float]:
        covered = np.cumsum(weights)
        last = np.searchsorted(covered, EXPECTED_WITHIN * covered[-1])
        return float(np.sum(weights[:inside]) / covered[-1]), float(t[last])

    within, factor = count(np.ones(t.size))
    if n_groups < 2:
        return OneSigma(within, None, factor, None)
    draw = np.random.default_rng(0) if rng is None else rng
    resampled = [count(_counts(draw, n_groups, group_of)) for _ in range(n_bootstrap)]
    tail = 0.5 * (1.0 - level)
    (a, b), (c, d) = np.quantile(resampled, [tail, 1.0 - tail], axis=0).T.tolist()
    return OneSigma(within, (a, b), factor, (c, d))


def _counts(draw: np.random.Generator, n_groups: int, group_of: IntArray) -> Float64Array:
    """Draw as many groups as there are, and return how often each point was drawn."""
    drawn = np.bincount(draw.integers(n_groups, size=n_groups), minlength=n_groups)
    counts: Float64Array = drawn[group_of].astype(np.float64)
    return counts


def _group_numbers(groups: ArrayLike | None, truth: Float64Array) -> IntArray:
    """Return the group of each point, numbered from 0."""
    labels = np.arange(len(truth)) if groups is None else np.asarray(groups)
    if labels.shape not in (truth.shape, truth.shape[:1]):
        raise InputError("groups", f"shape {labels.shape}", f"{truth.shape}, a label per point")
    if labels.shape != truth.shape:
        labels = np.repeat(labels, truth[0].size)
    return np.unique(labels.ravel(), return_inverse=True)[1].ravel()


def _interval(name: str, score: float, resampled: list[float], level: float) -> tuple[float, float]:
    """Return the interval of one score from its values in the resamples."""
    tail = 0.5 * (1.0 - level)
    low, high = (float(q) for q in np.quantile(resampled, [tail, 1.0 - tail]))
    if name in DISTANCES:
        low, high = max(2.0 * score - high, 0.0), max(2.0 * score - low, 0.0)
    return min(low, score), max(high, score)


class _Means:
    """Scores that are means over points, or square roots of such."""

    def __init__(self, z: Float64Array, sigma: Float64Array, ensemble: Float64Array | None) -> None:
        # Squares of numbers that are at most one cannot overflow.
        self._largest = {"rmse": max(float(np.abs(z).max()), 1e-300), "sharpness": sigma.max()}
        with np.errstate(over="ignore"):
            t = np.abs(z) / sigma
        terms = {
            "rmse": np.square(z / self._largest["rmse"]),
            "mae": np.abs(z),
            # Minus infinity times a count of zero would not be a number.
            "log_likelihood": np.maximum(gaussian_log_density(z, sigma), -1e300),
            "crps": gaussian_crps(np.abs(z), sigma),
            "sharpness": np.square(sigma / self._largest["sharpness"]),
            "coverage_68": t <= gaussian_half_width(0.68),
            "coverage_95": t <= gaussian_half_width(0.95),
            "interval_score_95": interval_scores(
                np.abs(z), gaussian_half_width(0.95) * sigma, 0.95
            ),
        }
        if ensemble is not None:
            terms["crps_ensemble"] = ensemble
        self._names = tuple(terms)
        self._terms = np.stack([np.asarray(v, dtype=np.float64) for v in terms.values()])

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        means = dict(zip(self._names, (self._terms @ counts / counts.sum()).tolist(), strict=True))
        for name, largest in self._largest.items():
            means[name] = float(largest * np.sqrt(means[name]))
        return means


class _Area:
    """The miscalibration area: an integral over the covering levels in their order."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        levels = covering_levels(z, sigma)
        self._order = np.argsort(levels)
        self._right = np.append(levels[self._order], 1.0)
        self._left = np.insert(levels[self._order], 0, 0.0)

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        covered = np.cumsum(counts[self._order])
        steps = np.insert(covered / covered[-1], 0, 0.0)
        right, left = self._right - steps, self._left - steps
        area = 0.5 * np.sum(right * np.abs(right) - left * np.abs(left))
        return {"miscalibration_area": float(area)}


class _Ence:
    """The expected normalised calibration error, in bins of equal count in the order of σ."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        order = np.argsort(sigma, kind="stable")
        sigma = sigma[order]
        self._order = order
        # Where the run of equal σ begins that each point belongs to: runs are not divided.
        self._run = np.searchsorted(sigma, sigma, side="left")
        # In units of the largest, squares cannot overflow.
        largest = max(float(np.abs(z).max()), 1e-300)
        self._squares = np.square(np.stack([sigma / sigma[-1], z[order] / largest]))
        self._ratio = largest / float(sigma[-1])
        self._n_bins = int(np.clip(sigma.size // 10, 1, 10))

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        w = counts[self._order]
        ends = np.cumsum(w)
        n = int(ends[-1])
        n_bins = min(self._n_bins, n)
        first = np.searchsorted(ends, np.arange(n_bins) * n // n_bins, side="right")
        starts = np.unique(self._run[first])
        variance, square = np.add.reduceat(self._squares * w, starts, axis=1)
        # Each bin has points, but their squares can underflow if σ differ by 150 decades.
        known = variance > 0.0
        ratio = self._ratio * np.sqrt(square[known] / variance[known])
        return {"ence": float(np.mean(np.abs(1.0 - ratio)))}


class _Spearman:
    """The rank correlation of |z| and σ, equal values sharing the average of their ranks."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        self._which = [np.unique(v, return_inverse=True)[1].ravel() for v in (np.abs(z), sigma)]

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        a, b = (self._centered_ranks(which, counts) for which in self._which)
        # Sums rather than products of vectors, which BLAS would hand to several threads.
        weighted = a * counts
        norm = np.sqrt(np.sum(weighted * a) * np.sum(b * b * counts))
        if norm == 0.0:
            return {"spearman": 0.0}
        return {"spearman": float(np.clip(np.sum(weighted * b) / norm, -1.0, 1.0))}

    @staticmethod
    def _centered_ranks(which: IntArray, counts: Float64Array) -> Float64Array:
        of_value = np.bincount(which, weights=counts)
        ranks = np.cumsum(of_value) - 0.5 * (of_value + counts.sum())
        centered: Float64Array = ranks[which]
        return centered
