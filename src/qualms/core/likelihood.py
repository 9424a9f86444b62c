"""How probable the truth is under a prediction and its error bar: Musil et al. 2019, Eqs. (5)–(8).

The paper prints Eq. (6) as a mean and Eqs. (7) and (8) as sums; every log likelihood here is the
mean per point, so that test sets of different size can be compared. Logarithms are natural, and the
densities have the units of 1/y.

Residuals are z = y − ȳ. They may have any shape, (n,) or (n, n_targets); the standard deviations
have the same shape, and every entry counts as one point.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, erf, stdtr

from qualms.core.checks import check_dof, check_points, check_std
from qualms.core.typing import Float64Array
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
