"""Scores of predictions and their standard deviations: Eqs. (5)–(9) and (18), Musil et al. 2019.

The paper prints Eq. (6) as a mean and Eqs. (7) and (8) as sums; every log likelihood here is the
mean per point, so that test sets of different size can be compared. Logarithms are natural, and
densities have the units of 1/y.

Residuals are z = y − ȳ. They may have any shape, (n,) or (n, n_targets); standard deviations have
the same shape, and every entry counts as one point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, erf, ndtri, stdtr

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
from qualms.errors import InputError, counted
from qualms.notebooks import html_table


# Densities.
def gaussian_log_density(residuals: ArrayLike, std: ArrayLike) -> Float64Array:
    """Return ln P(y_n | X_n) of each point, Eq. (5), Musil et al. 2019.

    Parameters
    ----------
    residuals : (n,) or (n, n_targets) array
        z = y − ȳ, in the units of y.
    std : array of the same shape
        σ > 0. The density is minus infinity where z²/σ² exceeds the largest float64.
    """
    z = check_points("residuals", residuals)
    sigma = check_std(std, z.shape)
    # Divided before it is squared, so that neither z² nor σ² can overflow on its own.
    with np.errstate(over="ignore"):
        density: Float64Array = -0.5 * (np.square(z / sigma) + np.log(2.0 * np.pi)) - np.log(sigma)
    return density


def log_likelihood(residuals: ArrayLike, std: ArrayLike) -> float:
    """Return the mean Gaussian log likelihood per point: Eqs. (6) and (7), Musil et al. 2019.

    With σ² → vσ² it is Eq. (8), which is highest at v₀ = mean(z²/σ²), Eq. (9).
    """
    return float(np.mean(gaussian_log_density(residuals, std)))


def student_log_density(residuals: ArrayLike, scale: ArrayLike, dof: ArrayLike) -> Float64Array:
    """Return the logarithm of the Student t density of each point.

    Parameters
    ----------
    residuals : (n,) or (n, n_targets) array
        z = y − ȳ, in the units of y.
    scale : array of the same shape
        s > 0: z/s has the standard t distribution, of standard deviation sqrt(ν/(ν−2)) for ν > 2.
    dof : float or array of the same shape
        ν > 0.
    """
    z = check_points("residuals", residuals)
    s = check_std(scale, z.shape, parameter="scale")
    nu = check_dof(dof, z.shape)
    # ln(1 + z²/(s²ν)) through logarithms: z² or 1/s² alone could overflow.
    with np.errstate(divide="ignore"):
        log_ratio = 2.0 * (np.log(np.abs(z)) - np.log(s)) - np.log(nu)
    tail = 0.5 * (nu + 1.0) * np.logaddexp(0.0, log_ratio)
    # Γ((ν+1)/2) / (Γ(ν/2) √π) = 1/B(ν/2, 1/2), which does not cancel at large ν.
    density: Float64Array = -betaln(0.5 * nu, 0.5) - 0.5 * np.log(nu) - np.log(s) - tail
    return density


# Scores.
def root_mean_square(values: Float64Array) -> float:
    """Return the root mean square of an array, safe from overflow and underflow."""
    largest = float(np.max(np.abs(values)))
    if largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.mean(np.square(values / largest))))


def covering_levels(
    residuals: ArrayLike, std: ArrayLike, dof: ArrayLike | None = None
) -> Float64Array:
    """Return the level of the smallest central interval that contains each reference value: (n,).

    They are uniform on [0, 1] for a calibrated prediction.

    Parameters
    ----------
    residuals, std : (n,) or (n, n_targets) arrays
        z = y − ȳ and σ ≥ 0. With σ = 0 the level is 0 if z = 0 and 1 otherwise.
    dof : float or array of the same shape, optional
        Degrees of freedom ν > 2 of a Student t distribution of standard deviation ``std`` (its
        scale is then σ·sqrt((ν−2)/ν)). Gaussian by default.
    """
    z = np.abs(check_points("residuals", residuals))
    sigma = check_std(std, z.shape, allow_zero=True)
    t = np.where(z > 0.0, np.inf, 0.0)
    with np.errstate(over="ignore"):
        t = np.divide(z, sigma, out=t, where=sigma > 0.0).ravel()
    if dof is None:
        return np.asarray(erf(t / np.sqrt(2.0)))
    nu = np.broadcast_to(check_dof(dof, z.shape, above=2.0), z.shape).ravel()
    return np.clip(1.0 - 2.0 * stdtr(nu, -t * np.sqrt(nu / (nu - 2.0))), 0.0, 1.0)


def miscalibration_area(
    residuals: ArrayLike, std: ArrayLike, dof: ArrayLike | None = None
) -> float:
    """Area between the calibration curve of the central intervals and the diagonal.

    ∫₀¹ |C(p) − p| dp, where C(p) is the fraction of points inside their central interval of level
    p, see :func:`calibration_curve`. It lies between 0 and 1/2. Calibrated predictions of n
    independent points have about 0.31/√n.

    Parameters
    ----------
    residuals, std, dof
        As in :func:`covering_levels`.
    """
    return _area(covering_levels(residuals, std, dof))


def _area(levels: Float64Array) -> float:
    """Integrate |C(p) − p| exactly: C is a staircase with steps at the covering levels."""
    covered = np.sort(levels)
    # C = k/n between the k-th level and the next. With G(u) = u|u|/2, whose derivative is |u|, each
    # step contributes G(right − k/n) − G(left − k/n).
    steps = np.arange(covered.size + 1) / covered.size
    right = np.append(covered, 1.0) - steps
    left = np.insert(covered, 0, 0.0) - steps
    return float(0.5 * np.sum(right * np.abs(right) - left * np.abs(left)))


#: Mean of the miscalibration area of calibrated predictions, times √n: that of the integral of |B|
#: over a Brownian bridge B, of standard deviation 0.138.
AREA_BY_CHANCE = 0.313


@dataclass(frozen=True)
class ConditionalArea:
    """Mean over bins of σ of the miscalibration area, made by :func:`conditional_area`.

    `by_chance` is its mean for calibrated predictions, and `limit` the value that these exceed with
    a probability of about 1 %.
    """

    area: float
    by_chance: float
    limit: float
    n_bins: int

    @property
    def excess(self) -> float:
        """The area without the part by chance, which adds in quadrature."""
        return float(np.sqrt(max(self.area**2 - self.by_chance**2, 0.0)))


def conditional_area(
    residuals: ArrayLike,
    std: ArrayLike,
    groups: ArrayLike | None = None,
    dof: float | None = None,
) -> ConditionalArea:
    """Return the mean miscalibration area in bins of σ, of equal count.

    There are up to five bins, of at least 100 independent points. The area is at least that of all
    points together: uncertainties that are too small for some points and too large for others do
    not cancel.

    Parameters
    ----------
    residuals, std : (n,) arrays
        z = y − ȳ and σ ≥ 0.
    groups : (n,) array, optional
        Labels of correlated points. Those in one bin count as one point for what is due to chance.
    dof : float, optional
        As in :func:`covering_levels`.
    """
    levels, sigma = covering_levels(residuals, std, dof), np.asarray(std, dtype=np.float64)
    labels = np.arange(levels.size) if groups is None else np.asarray(groups)
    n_bins = int(np.clip(np.unique(labels).size // 100, 1, 5))
    order = np.argsort(sigma, kind="stable")
    bins = np.split(order, _bin_starts(sigma[order], n_bins)[1:])
    area = float(np.mean([_area(levels[rows]) for rows in bins]))
    noise = np.array([np.unique(labels[rows]).size for rows in bins]) ** -0.5
    by_chance = AREA_BY_CHANCE * float(np.mean(noise))
    scatter = 0.138 * float(np.sqrt(np.sum(noise**2))) / len(bins)
    return ConditionalArea(area, by_chance, by_chance + 2.5 * scatter, len(bins))


def _bin_starts(sigma: Float64Array, n_bins: int) -> IntArray:
    """Return where bins of equal count of sorted σ begin; equal σ are never separated."""
    # A boundary inside a run of equal σ moves to where the run begins.
    cuts = sigma[np.arange(n_bins) * sigma.size // n_bins]
    return np.unique(np.searchsorted(sigma, cuts, side="left"))


def default_bins(n: int) -> int:
    """Return the number of bins of n points for their errors: 10, or as many as have ten points."""
    return int(np.clip(n // 10, 1, 10))


def ence(residuals: ArrayLike, std: ArrayLike, n_bins: int | None = None) -> float:
    """Mean over bins of σ of |RMV − RMSE| / RMV, the expected normalised calibration error.

    Levi et al. 2022, on the bins of :func:`binned_errors`. Calibrated Gaussian predictions of n
    points have about sqrt(n_bins / (π n)); compare only between equal numbers of bins.

    Parameters
    ----------
    residuals, std, n_bins
        As in :func:`binned_errors`; at least one σ > 0 in every bin.
    """
    bins = binned_errors(residuals, std, n_bins)
    if np.any(bins.rmv == 0.0):
        n_zero = int(np.count_nonzero(np.asarray(std) == 0.0))
        raise InputError(
            f"The standard deviation is 0 for {counted(n_zero, 'point')}, among them a whole bin. "
            "Drop those points.",
            parameter="std",
        )
    return float(np.mean(np.abs(bins.rmv - bins.rmse) / bins.rmv))


def spearman(residuals: ArrayLike, std: ArrayLike) -> float:
    """Spearman rank correlation of |z| and σ; 0 if all |z| or all σ are equal.

    Even a perfect σ does not reach one, because z is random.
    """
    from scipy.stats import rankdata  # slow to import

    z = np.abs(check_points("residuals", residuals)).ravel()
    sigma = check_std(std, np.shape(residuals), allow_zero=True).ravel()
    # Ranks are multiples of ½: those of constant values become zeros, not rounding errors.
    a, b = (rankdata(values) - 0.5 * (z.size + 1) for values in (z, sigma))
    norm = np.sqrt(np.sum(a * a) * np.sum(b * b))
    return float(np.clip(np.sum(a * b) / norm, -1.0, 1.0)) if norm > 0.0 else 0.0


def _gaussian_crps(z: Float64Array, sigma: Float64Array) -> Float64Array:
    """CRPS of N(0, σ²) at z ≥ 0: σ [t erf(t/√2) + 2 φ(t) − 1/√π] with t = z/σ."""
    with np.errstate(over="ignore"):
        t = z / sigma
        density = np.exp(-0.5 * t * t) / np.sqrt(2.0 * np.pi)
    # σ t is written as z, so that σ → 0 needs no limit.
    crps: Float64Array = z * erf(t / np.sqrt(2.0)) + sigma * (2.0 * density - 1.0 / np.sqrt(np.pi))
    return crps


def _ensemble_crps(reference: Float64Array, members: Float64Array) -> Float64Array:
    """Fair CRPS of members (n, R) at reference values (n,) (Ferro 2014).

    It is mean_i |x_i − y| − Σ_ij |x_i − x_j| / (2R(R−1)), without bias for the distribution that
    the members were drawn from. k (R − k) of the pairs lie on both sides of the gap between the
    k-th and the next of the sorted members, so the gaps weighted by that sum up all distances:
    R log R instead of R².
    """
    x = np.sort(members, axis=1)
    R = x.shape[1]
    k = np.arange(1, R)
    pair_distances = np.diff(x, axis=1) @ (k * (R - k)).astype(np.float64)
    distance = np.mean(np.abs(x - reference[:, None]), axis=1)
    # Each pair occurs twice in Σ_ij. The score is not negative; only rounding could make it so.
    return np.asarray(np.maximum(distance - pair_distances / (R * (R - 1)), 0.0))


@dataclass(frozen=True)
class Scores:
    """Scores of one set of predictions, made by :func:`qualms.score`; errors have the units of y.

    Attributes
    ----------
    rmse, mae : float
        Errors of the mean prediction.
    log_likelihood : float
        Mean Gaussian log likelihood, Eq. (6), Musil et al. 2019.
    crps : float
        Continuous ranked probability score of the Gaussian predictions: the integral over x of
        (F(x) − [x ≥ y])², F being the predicted distribution function.
    crps_ensemble : float or None
        The fair one of the members (Ferro 2014); None without members.
    miscalibration_area, ence : float
        Distances from calibration; see the functions of those names.
    rms_calibration_error : float
        Root mean square of C(p) − p, C(p) as in :func:`miscalibration_area`, over 100 even levels p
        from 0 to 1, as uncertainty-toolbox computes it.
    sharpness : float
        Root mean predicted variance.
    coverage_68, coverage_95 : float
        Coverage of the central intervals of level 0.68 and 0.95.
    coverage_95_conformal : float or None
        Coverage of the conformal intervals of level 0.95; None without out-of-bag errors.
    spearman : float
        Rank correlation of |z| and σ.
    interval_score_95 : float
        Mean interval score of the central intervals of level 0.95 (Gneiting and Raftery 2007): the
        width of the interval plus 2/0.05 times the distance by which it misses the reference value.
    """

    n_points: int
    rmse: float
    mae: float
    log_likelihood: float
    crps: float
    crps_ensemble: float | None
    miscalibration_area: float
    rms_calibration_error: float
    ence: float
    sharpness: float
    coverage_68: float
    coverage_95: float
    coverage_95_conformal: float | None
    spearman: float
    interval_score_95: float

    def as_dict(self) -> dict[str, int | float | None]:
        """Return the scores by name, in the order of the fields."""
        return asdict(self)

    def __str__(self) -> str:
        values = {k: "-" if v is None else f"{v:.6g}" for k, v in self.as_dict().items()}
        name_width, value_width = max(map(len, values)), max(map(len, values.values()))
        return "\n".join(f"{n:<{name_width}}  {v:>{value_width}}" for n, v in values.items())

    def _repr_html_(self) -> str:
        """Return the scores as a table, for notebooks."""
        return html_table((), (line.split() for line in str(self).splitlines()))


class _MeanAndStd(Protocol):
    """A prediction: see `qualms.Prediction`."""

    @property
    def mean(self) -> Float64Array: ...
    @property
    def std(self) -> Float64Array: ...
    @property
    def members(self) -> Any: ...
    @property
    def factor_95(self) -> float | None: ...


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
        Reference values. Several targets are scored together, as if they were more points.
    prediction : Prediction of the shape of y
    mean, std : arrays of the shape of y
        Instead of a prediction: predicted values and standard deviations > 0.

    Examples
    --------
    >>> round(score([1.0, 2.0], mean=[1.1, 1.8], std=[0.1, 0.2]).mae, 6)
    0.15
    """
    if prediction is None and mean is not None and std is not None:
        return _scores(_terms(y, mean, std))
    if prediction is None or mean is not None or std is not None:
        message = "Give either a `prediction`, or `mean` and `std`."
        raise InputError(message, parameter="prediction")
    if not hasattr(prediction, "members"):
        raise InputError(
            f"`prediction`, of type {type(prediction).__name__}, is not a Prediction. Arrays are "
            "given as `mean` and `std`.",
            parameter="prediction",
        )
    p = prediction
    return _scores(_terms(y, p.mean, p.std, p.members, p.factor_95))


def _terms(
    y: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    members: ArrayLike | None = None,
    factor_95: float | None = None,
) -> dict[str, Float64Array]:
    """Return z, σ, covering levels, and the terms that scores are the means of: (n,) by name.

    Parameters
    ----------
    y, mean, std : (n,) or (n, n_targets) arrays
        Reference values, predictions and standard deviations > 0, in the same units.
    members : array of shape y.shape + (n_members,), optional
        Predictions of at least two members, for ``crps_ensemble``.
    factor_95 : float, optional
        Half the width of conformal 95 % intervals, in units of the standard deviation.
    """
    reference = check_points("y", y)
    z = (reference - check_points("mean", mean, reference.shape)).ravel()
    sigma = check_std(std, reference.shape).ravel()
    distance = np.abs(z)
    half_68, half_95 = (ndtri(0.5 * (1.0 + level)) * sigma for level in (0.68, 0.95))
    terms = {
        "residuals": z,
        "std": sigma,
        "level": covering_levels(z, sigma),
        "mae": distance,
        "log_likelihood": gaussian_log_density(z, sigma),
        "crps": _gaussian_crps(distance, sigma),
        "coverage_68": (distance <= half_68).astype(np.float64),
        "coverage_95": (distance <= half_95).astype(np.float64),
        "interval_score_95": 2.0 * half_95 + 2.0 / 0.05 * np.maximum(distance - half_95, 0.0),
    }
    if members is not None:
        x = check_members(members, reference.shape)
        if x.shape[1] < 2:
            raise InputError(
                f"`members` has {counted(x.shape[1], 'member')}; at least 2 are needed.",
                parameter="members",
            )
        terms["crps_ensemble"] = _ensemble_crps(reference.ravel(), x)
    if factor_95 is not None:
        terms["coverage_95_conformal"] = (distance <= factor_95 * sigma).astype(np.float64)
    return terms


def _scores(terms: dict[str, Float64Array], n_bins: int | None = None) -> Scores:
    """Return the scores of points, or of a resample of them, given their terms."""
    terms = dict(terms)
    z, sigma, levels = (terms.pop(name) for name in ("residuals", "std", "level"))
    means = {name: float(np.mean(values)) for name, values in terms.items()}
    p = np.linspace(0.0, 1.0, 100)
    observed = np.searchsorted(np.sort(levels), p, side="right") / levels.size
    return Scores(
        n_points=int(z.size),
        rmse=root_mean_square(z),
        sharpness=root_mean_square(sigma),
        miscalibration_area=_area(levels),
        rms_calibration_error=root_mean_square(observed - p),
        ence=ence(z, sigma, n_bins),
        spearman=spearman(z, sigma),
        **({"crps_ensemble": None, "coverage_95_conformal": None} | means),  # type: ignore[arg-type]
    )


# Diagnostics: numbers for figures.
@dataclass(frozen=True)
class CalibrationCurve:
    """Nominal levels p, `expected`, and coverage of the central intervals, `observed`: (n_levels,).

    For a calibrated prediction of independent points `observed` is p with standard error
    sqrt(p(1−p)/n_points).
    """

    expected: Float64Array
    observed: Float64Array
    n_points: int


@dataclass(frozen=True)
class BinnedErrors:
    """Actual and predicted errors in bins of σ, from the smallest σ to the largest: (n_bins,).

    Root mean variance sqrt(mean σ²) and root mean squared residual, in the units of y, points in
    each bin, and standard errors of the two, which are infinite for a bin of one point. Shares of
    residuals within 1 σ and 1.96 σ, and the largest σ, or other value that bins are made by.
    """

    rmv: Float64Array
    rmse: Float64Array
    counts: IntArray
    rmv_stderr: Float64Array
    rmse_stderr: Float64Array
    within_68: Float64Array
    within_95: Float64Array
    largest: Float64Array


@dataclass(frozen=True)
class ConditionalDensity:
    """P(ln ε | ln σ) on a grid: Eq. (18), Musil et al. 2019.

    Attributes
    ----------
    ln_sigma, ln_error : (n_sigma,) and (n_error,) arrays
        Grids of ln σ and ln ε, both in the units of y.
    density : (n_sigma, n_error) array
        Each supported row integrates to one over ln ε; the others are zero.
    marginal : (n_sigma,) array
        P(ln σ), which integrates to one.
    supported : (n_sigma,) array of bool
        Whether enough points lie within a bandwidth of ln σ.
    """

    ln_sigma: Float64Array
    ln_error: Float64Array
    density: Float64Array
    marginal: Float64Array
    supported: BoolArray


@dataclass(frozen=True)
class ErrorDensities:
    """Eq. (18) for actual errors |y − ȳ| and for predicted errors, on one grid.

    The latter are |y⁽ⁱ⁾ − ȳ|, one per point and member; Gaussian without members. `bandwidth` has
    the standard deviations of the smoothing kernel along ln σ and ln ε.
    """

    true: ConditionalDensity
    model: ConditionalDensity
    bandwidth: tuple[float, float]


def calibration_curve(
    residuals: ArrayLike, std: ArrayLike, dof: ArrayLike | None = None
) -> CalibrationCurve:
    """Return the observed coverage of central intervals of levels 0.01, 0.02, … 0.99.

    Parameters
    ----------
    residuals, std, dof
        As in :func:`covering_levels`.
    """
    expected = np.arange(1, 100) / 100.0
    covered = np.sort(covering_levels(residuals, std, dof))
    observed = np.searchsorted(covered, expected, side="right") / covered.size
    return CalibrationCurve(expected, np.asarray(observed, dtype=np.float64), int(covered.size))


def binned_errors(
    residuals: ArrayLike,
    std: ArrayLike,
    n_bins: int | None = None,
    by: ArrayLike | None = None,
) -> BinnedErrors:
    """Return root mean squared residuals and predicted σ in bins of equal count.

    Points of equal σ are never separated, because their order would be arbitrary. With many equal
    σ there are therefore fewer bins than requested.

    Parameters
    ----------
    residuals, std : arrays of one shape
        z = y − ȳ and σ ≥ 0, in the units of y.
    n_bins : int, optional
        At most the number of points. By default 10, or as many as leave ten points in each.
    by : array of the same shape, optional
        Bins are of this value, such as the novelty, rather than of σ.
    """
    z = check_points("residuals", residuals)
    sigma = check_std(std, z.shape, allow_zero=True).ravel()
    n = sigma.size
    values = sigma if by is None else check_points("by", by, z.shape).ravel()
    if n_bins is None:
        n_bins = default_bins(n)
    if not 1 <= n_bins <= n:
        raise InputError(
            f"`n_bins` is {n_bins!r}; use at least 1 bin and at most one per point, {n}.",
            parameter="n_bins",
        )
    order = np.argsort(values, kind="stable")
    sigma, z, values = sigma[order], z.ravel()[order], values[order]
    starts = _bin_starts(values, n_bins)
    counts = np.diff(starts, append=n)

    def rms_and_stderr(values: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the root mean square r and its standard error, that of the mean square over 2r."""
        scale = np.maximum.reduceat(np.abs(values), starts)
        scale = np.where(scale > 0.0, scale, 1.0)  # safe from overflow and underflow
        squares = np.square(values / np.repeat(scale, counts))
        mean = np.add.reduceat(squares, starts) / counts
        scatter = np.add.reduceat(np.square(squares - np.repeat(mean, counts)), starts)
        variance = np.where(counts > 1, scatter / np.maximum(counts - 1, 1), np.inf) / counts
        root = np.sqrt(mean)
        return scale * root, 0.5 * scale * np.sqrt(variance) / np.where(root > 0.0, root, 1.0)

    rmv, rmv_stderr = rms_and_stderr(sigma)
    rmse, rmse_stderr = rms_and_stderr(z)
    within_68, within_95 = (
        np.add.reduceat(np.abs(z) <= factor * sigma, starts, dtype=np.intp) / counts
        for factor in (1.0, 1.96)
    )
    largest = values[starts + counts - 1]
    bins = rmv, rmse, counts, rmv_stderr, rmse_stderr, within_68, within_95, largest
    return BinnedErrors(*bins)


def conditional_error_density(
    y: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    members: ArrayLike | None = None,
    *,
    min_points: float = 10.0,
) -> ErrorDensities:
    """Estimate P(ln ε | ln σ) of actual and of predicted errors: Eq. (18), Musil et al. 2019.

    Histograms of (ln σ, ln ε), smoothed by a Gaussian and divided by the smoothed marginal. Actual
    and predicted errors share grid and bandwidth: Scott's rule, n^(−1/6) times the standard
    deviation of the n points along each axis, but at least 0.01 and 1/200 of the range.

    Parameters
    ----------
    y, mean, std : (n,) or (n, n_targets) arrays
        Reference values, predictions and standard deviations, in the same units.
    members : array of shape y.shape + (n_members,), optional
        Predictions of the members. Without them the predicted errors are Gaussian.
    min_points : float
        A row is supported if the sum over the points of exp(−Δ²/2h²), Δ being their distance in
        ln σ, is at least this.
    """
    reference = check_points("y", y)
    center = check_points("mean", mean, reference.shape).ravel()
    sigma = check_std(std, reference.shape, allow_zero=True).ravel()
    if not np.any(sigma > 0.0):
        raise InputError(
            f"The standard deviation is 0 at all points, {sigma.size} of them.",
            parameter="std",
        )
    if not min_points > 0.0:
        raise InputError(
            f"`min_points` is {min_points!r}; use a number > 0.", parameter="min_points"
        )
    actual = np.abs(reference.ravel() - center)[:, None]
    # Without members, an error of size σ marks the place of each point along ln σ.
    expected = sigma[:, None]
    if members is not None:
        expected = np.abs(check_members(members, reference.shape) - center[:, None])
    pairs = []
    for name, errors in (("y", actual), ("members", expected)):
        used = (errors > 0.0) & (sigma > 0.0)[:, None]
        if not used.any():
            raise InputError(
                f"`{name}` equals the mean wherever `std` is positive: there are no errors whose "
                "density could be estimated.",
                parameter=name,
            )
        rows, columns = np.nonzero(used)
        pairs.append(np.log(np.stack([sigma[rows], errors[rows, columns]])))
    # ln(ε/σ) of a Gaussian lies between −7 and 1.5, except for a probability of 0.001.
    low, high = (-7.0, 1.5) if members is None else (0.0, 0.0)
    h_sigma, x = _density_axis(pairs[0][0], pairs[1][0])
    h_error, e = _density_axis(pairs[0][1], np.append(pairs[1][1] + low, pairs[1][1] + high))
    histograms = [np.histogram2d(p[0], p[1], bins=[x, e])[0] / p.shape[1] for p in pairs]
    if members is None:
        # For t = ln ε − ln σ of a Gaussian, the half-normal density of ε times dε/d ln ε = ε.
        t = _centers(e)[None, :] - _centers(x)[:, None]
        with np.errstate(over="ignore"):
            shape = np.exp(t - 0.5 * np.exp(2.0 * t))
        histograms[1] = histograms[1].sum(axis=1)[:, None] * shape / shape.sum(axis=1)[:, None]

    def estimate(joint: Float64Array, pairs: Float64Array, n_columns: int) -> ConditionalDensity:
        from scipy.ndimage import gaussian_filter1d  # only figures need it

        # A bandwidth has eight bins, and the grid every fourth of them.
        smooth = gaussian_filter1d(joint, 8, axis=0, mode="constant", truncate=6)
        smooth = smooth[::4] / (x[1] - x[0])
        marginal = smooth.sum(axis=1)
        # marginal = near / (n h sqrt(2π)), where near counts the n points by their closeness.
        near = marginal * (pairs.shape[1] / n_columns) * h_sigma * np.sqrt(2.0 * np.pi)
        supported: BoolArray = near >= min_points
        density = gaussian_filter1d(smooth, 8, axis=1, mode="constant")[:, ::4]
        density /= np.where(supported, marginal, np.inf)[:, None] * (e[1] - e[0])
        return ConditionalDensity(_centers(x)[::4], _centers(e)[::4], density, marginal, supported)

    return ErrorDensities(
        estimate(histograms[0], pairs[0], 1),
        estimate(histograms[1], pairs[1], expected.shape[1]),
        (h_sigma, h_error),
    )


def _density_axis(true: Float64Array, model: Float64Array) -> tuple[float, Float64Array]:
    """Return the bandwidth, from the actual errors, and the edges of bins for all errors.

    A bandwidth has eight bins, and the bins exceed the errors by four bandwidths.
    """
    low = min(float(true.min()), float(model.min()))
    span = max(float(true.max()), float(model.max())) - low
    # Scott's rule in two dimensions; members of one point share its σ and are no more points.
    scott = float(np.std(true, ddof=1)) * true.size ** (-1.0 / 6.0) if true.size > 1 else 0.0
    bandwidth = max(scott, span / 200.0, 0.01)
    width = bandwidth / 8
    n_bins = int(np.ceil(span / width)) + 64
    start = low + 0.5 * span - 0.5 * n_bins * width
    return bandwidth, start + width * np.arange(n_bins + 1, dtype=np.float64)


def _centers(edges: Float64Array) -> Float64Array:
    return np.asarray(0.5 * (edges[1:] + edges[:-1]))


def outlying_points(residuals: ArrayLike, std: ArrayLike) -> IntArray:
    """Return outliers, worst first: errors large both for their σ and among all errors.

    |z| ≫ σ alone may be due to members that agree by chance, and a large error may be one of many;
    both together indicate a wrong label. Outliers are points with |z| > 10 σ and |z| > 10 times the
    median of |z|/0.67.

    Parameters
    ----------
    residuals, std : (n,) arrays
        z = y − ȳ and σ > 0, in the units of y.
    """
    z = np.abs(check_points("residuals", residuals))
    with np.errstate(over="ignore"):
        t = z / check_std(std, z.shape)
    outliers = np.flatnonzero((t > 10.0) & (z > 10.0 * np.median(z) / 0.6745))
    return outliers[np.argsort(-t[outliers], kind="stable")]


# Bootstrap confidence intervals, clustered by group.


@dataclass(frozen=True)
class OneSigma:
    """Coverage of ±σ, with confidence intervals.

    `within` is the fraction of points with |z| ≤ σ, and `expected` that of calibrated predictions,
    Gaussian or of Student's t. `factor` is that of σ which makes the fraction right: above one if σ
    is too small. Unlike the root mean square of z/σ it is robust against a few large errors. The
    intervals are None if there is only one group.
    """

    expected: float
    within: float
    within_interval: tuple[float, float] | None
    factor: float
    factor_interval: tuple[float, float] | None


@dataclass(frozen=True)
class ScoreIntervals:
    """Scores of all points with confidence intervals, made by :func:`bootstrap_scores`.

    `intervals` has the lower and upper end for each score, by name; each contains the score itself.
    It is empty if there is only one group. `one_sigma` is the coverage of ±σ; `dof` are the degrees
    of freedom of the Student's t that coverages are compared with, None for a Gaussian. `level` is
    the nominal coverage of all intervals, and `n_groups` the number of groups, or points, drawn in
    each of `n_bootstrap` resamples.
    """

    scores: Scores
    intervals: Mapping[str, tuple[float, float]]
    one_sigma: OneSigma
    dof: float | None
    level: float
    n_bootstrap: int
    n_groups: int


def bootstrap_scores(
    y: ArrayLike,
    prediction: _MeanAndStd,
    *,
    groups: ArrayLike | None = None,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
    dof: float | None = None,
) -> ScoreIntervals:
    """Compute all scores with bootstrap confidence intervals.

    The intervals are quantiles of the scores of resamples. The distances from calibration, such as
    miscalibration area and ENCE, are larger in a resample than in the data, by as much as they are
    larger in the data than in the limit of many points; their intervals are those quantiles
    reflected at the score (the "basic" bootstrap), not below zero, and extended to the score.

    Parameters
    ----------
    y, prediction
        As in :func:`qualms.score`.
    groups : array of y.shape or of shape (n,), optional
        Labels of points that are drawn together, such as the atoms of one structure. Each row by
        itself by default.
    n_bootstrap : int
        Number of resamples, at least 20.
    level : float
        Nominal coverage of the intervals, within (0, 1).
    rng : numpy Generator, optional
        Seeded with 0 by default.
    dof : float, optional
        As in :func:`covering_levels`, for the expected coverage of ±σ.
    """
    check_integer("n_bootstrap", n_bootstrap, 20)
    if not 0.0 < level < 1.0:
        raise InputError(
            f"`level` is {level!r}; use a probability between 0 and 1.", parameter="level"
        )
    p = prediction
    terms = _terms(y, p.mean, p.std, p.members, p.factor_95)
    scores = _scores(terms)
    # Minus infinity has no quantiles.
    terms["log_likelihood"] = np.maximum(terms["log_likelihood"], -1e300)
    n_bins = default_bins(scores.n_points)
    expected = float(covering_levels([1.0], [1.0], dof)[0])
    with np.errstate(over="ignore"):
        ratios = np.abs(terms["residuals"]) / terms["std"]

    def one_sigma(t: Float64Array) -> tuple[float, float]:
        # The smallest factor that covers at least the expected fraction.
        k = max(int(np.ceil(expected * t.size - 1e-9)), 1) - 1
        return float(np.mean(t <= 1.0)), float(np.partition(t, k)[k])

    within, factor = one_sigma(ratios)
    codes = _point_groups(groups, np.shape(y))
    n_groups = int(codes.max()) + 1
    if n_groups < 2:
        coverage = OneSigma(expected, within, None, factor, None)
        return ScoreIntervals(scores, {}, coverage, dof, level, n_bootstrap, n_groups)
    draw = np.random.default_rng(0) if rng is None else rng
    resampled, one_sigmas = [], []
    for _ in range(n_bootstrap):
        counts = np.bincount(draw.integers(n_groups, size=n_groups), minlength=n_groups)
        rows = np.repeat(np.arange(codes.size), counts[codes])
        drawn = {name: values[rows] for name, values in terms.items()}
        resampled.append(_scores(drawn, min(n_bins, rows.size)))
        one_sigmas.append(one_sigma(ratios[rows]))
    tails = [0.5 * (1.0 - level), 0.5 * (1.0 + level)]
    intervals = {}
    for name, value in scores.as_dict().items():
        if name == "n_points" or value is None:
            continue
        low, high = np.quantile([getattr(each, name) for each in resampled], tails).tolist()
        if name in ("miscalibration_area", "rms_calibration_error", "ence"):
            low, high = max(2.0 * value - high, 0.0), max(2.0 * value - low, 0.0)
        intervals[name] = (min(low, value), max(high, value))
    (a, b), (c, d) = np.quantile(one_sigmas, tails, axis=0).T.tolist()
    coverage = OneSigma(expected, within, (a, b), factor, (c, d))
    return ScoreIntervals(scores, intervals, coverage, dof, level, n_bootstrap, n_groups)


def _point_groups(groups: ArrayLike | None, shape: tuple[int, ...]) -> IntArray:
    """Return the group of each point, 0 … G−1, of reference values of this shape, flattened."""
    labels = np.arange(shape[0]) if groups is None else np.asarray(groups)
    if labels.shape not in (shape, shape[:1]):
        raise InputError(
            f"`groups` has the shape {labels.shape} instead of {shape}, a label per point.",
            parameter="groups",
        )
    if labels.shape != shape:
        labels = np.repeat(labels, int(np.prod(shape[1:])))
    return np.unique(labels.ravel(), return_inverse=True)[1].ravel()
