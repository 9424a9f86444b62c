"""The paper's own calibrations: σ → ασ and σ → ασ^γ. Eqs. (8), (9), (12) and (19)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from qualms.core.calibration.base import (
    Calibration,
    CalibrationData,
    refuse_exact,
    with_likelihood,
)
from qualms.core.likelihood import gaussian_log_density
from qualms.core.typing import Float64Array, FloatArray, IntArray

#: Exponents tried by the power calibration. A larger spread never means a smaller error.
_GAMMA_RANGE = (0.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class PowerCalibration(Calibration):
    """σ → α σ^γ, Eq. (19), Musil et al. 2019; α has the units of σ^(1−γ)."""

    method = "power"
    n_parameters = 2

    def std(self, spread: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return α σ^γ."""
        return self.alpha * np.asarray(spread, dtype=np.float64) ** self.gamma

    def log_density(
        self, residuals: FloatArray, spread: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return the Gaussian ln p(z | ŝ), Eq. (5), per point."""
        return gaussian_log_density(residuals, self.std(spread, n_members))


@dataclass(frozen=True, kw_only=True)
class LinearCalibration(PowerCalibration):
    """σ → α σ with α² = v₀, Eqs. (8) and (9), Musil et al. 2019; internally, Eq. (12)."""

    method = "linear"
    n_parameters = 1


@dataclass(frozen=True, kw_only=True)
class NoCalibration(PowerCalibration):
    """σ as it is."""

    method = "none"
    n_parameters = 0


def variance_scale(
    residuals: FloatArray, std: FloatArray, weights: FloatArray | None = None
) -> float:
    """Return v₀ = mean(z²/σ²), which maximises Eq. (8). Eqs. (9) and (12), Musil et al. 2019."""
    return float(np.average((np.asarray(residuals) / np.asarray(std)) ** 2, weights=weights))


def fit_none(data: CalibrationData) -> NoCalibration:
    """Return the identity, with its likelihood."""
    return with_likelihood(NoCalibration(), data)


def fit_linear(data: CalibrationData) -> LinearCalibration:
    """Return α = √v₀ in closed form. Eqs. (9) and (12), Musil et al. 2019."""
    refuse_exact(data)
    v_0 = variance_scale(data.residuals, data.spread, data.weights)
    return with_likelihood(LinearCalibration(alpha=v_0**0.5), data)


def fit_power(data: CalibrationData) -> PowerCalibration:
    """Maximise the likelihood over α and γ. Eq. (19), Musil et al. 2019.

    For fixed γ the best α² is the mean of z²/σ^2γ. What is left, −½ ln α²(γ) − γ mean(ln σ), is
    concave in γ, because the logarithm of a sum of exponentials is convex: one maximum, found by a
    bounded search.
    """
    refuse_exact(data)
    log_spread = np.log(data.spread)
    center = data.mean(log_spread)
    log_spread = log_spread - center  # so that powers neither overflow nor vanish
    if is_constant(data):
        gamma = 1.0  # a constant spread cannot tell α from γ
    else:

        def negative_profile(gamma: float) -> float:
            scaled = data.residuals**2 * np.exp(-2 * gamma * log_spread)
            return 0.5 * float(np.log(data.mean(scaled)))  # mean(ln σ) is 0 after centring

        gamma = float(
            minimize_scalar(
                negative_profile, bounds=_GAMMA_RANGE, method="bounded", options={"xatol": 1e-8}
            ).x
        )
    alpha_centred = data.mean(data.residuals**2 * np.exp(-2 * gamma * log_spread)) ** 0.5
    alpha = alpha_centred * float(np.exp(-gamma * center))
    return with_likelihood(PowerCalibration(alpha=alpha, gamma=gamma), data)


def is_constant(data: CalibrationData) -> bool:
    """Whether all spreads are alike, so that no exponent can be found."""
    return float(np.ptp(np.log(data.spread))) < 1e-6


def power_scores(
    calibration: PowerCalibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return θ = (ln α, γ), or ln α alone, and the gradient of ln p(z | ŝ) of each point.

    With ln σ = ln α + γ ln ŝ it is (z²/σ² − 1) ∂ ln σ/∂θ.
    """
    log_spread = np.log(data.spread)
    design = np.stack([np.ones_like(log_spread), log_spread], axis=1)
    theta = np.array([np.log(calibration.alpha), calibration.gamma])

    def scores(at: Float64Array) -> Float64Array:
        full = np.append(at, calibration.gamma)[:2]
        t2 = data.residuals**2 * np.exp(-2 * (design @ full))
        gradient: Float64Array = (t2 - 1)[:, None] * design[:, : len(at)]
        return gradient

    return theta[: calibration.n_parameters], scores
