"""How good predictions and their error bars are, each as one number.

Residuals are z = y − ȳ and σ their predicted standard deviations, both in the units of y and of one
shape, (n,) or (n, n_targets); every entry counts as one point. Unless said otherwise a score is a
mean over points, and a prediction may claim to be exact (σ = 0) where the score has a limit there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from qualms.core.checks import check_dof, check_members, check_points, check_std
from qualms.core.diagnostics import binned_errors
from qualms.core.likelihood import covering_levels, log_likelihood, root_mean_square
from qualms.core.pointwise import (
    ensemble_crps,
    gaussian_crps,
    gaussian_half_width,
    interval_scores,
)
from qualms.core.typing import Float64Array
from qualms.errors import InputError


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
    (:func:`~qualms.core.diagnostics.calibration_curve`). C is a staircase, and the integral is
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

    Levi et al. 2022, on the bins of :func:`~qualms.core.diagnostics.binned_errors`. Even calibrated
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
