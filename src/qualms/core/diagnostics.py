"""Where error bars are right and where they are not: numbers for pictures, drawn elsewhere.

Three views of the same residuals z = y − ȳ and standard deviations σ:

- the calibration curve: how often central intervals hold the truth, and how often they claim to;
- the binned errors: the size of the actual errors where a given σ was predicted;
- Eq. (18) of Musil et al. 2019: the whole distribution of the errors at each σ, both of the actual
  errors and of those that the model itself expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_members, check_points, check_std
from qualms.core.likelihood import covering_levels, gaussian_log_error_density, rms_and_stderr
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.errors import InputError

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
        As in `qualms.core.likelihood.covering_levels`.
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
