"""Empirical-Bayes calibration: the true spread of a point is known only to within its neighbours.

    ln s ~ N(m, τ²),     (c−1)ŝ²/s² ~ χ²_{c−1},     z ~ N(0, α²s^{2γ} + s²/c).

A spread ŝ of few members is noisy; what all points have in common, m and τ, says how far to shrink
it. α, γ, m and τ maximise the likelihood of the observed (z, ŝ), integrated over u = ln s by the
trapezoidal rule, which for a smooth integrand that decays on both sides converges exponentially.
The nodes follow the Gaussian approximation of the posterior, of width w = (2(c−1) + 1/τ²)^(−1/2):
u = center + w sinh(x) with even x. They are dense where the posterior is, and still reach 45 w, to
where a skewed posterior or an outlying z may pull it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize
from scipy.special import digamma, gammaln, logsumexp, polygamma

from qualms.core.calibration.base import Calibration, CalibrationData, with_likelihood
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import CalibrationError

#: The even nodes x, before stretching.
_NODES = np.linspace(-4.5, 4.5, 61)
_CHUNK = 50_000
_LOG_2PI = float(np.log(2 * np.pi))
#: Bounds of ln α (after scaling by the typical spread), γ, m and ln τ.
_BOUNDS = [(-15.0, 15.0), (0.0, 5.0), (-10.0, 10.0), (-6.0, 3.0)]


@dataclass(frozen=True)
class _Nodes:
    """Quadrature over u = ln s for each point: ∫ p(ŝ|u) f(u) du ≈ Σ_q exp(log_weight) f(u)."""

    u: Float64Array  # (n, Q)
    log_weight: Float64Array  # (n, Q)


@dataclass(frozen=True, kw_only=True)
class ShrinkageCalibration(Calibration):
    """The variance of a new point is the posterior mean of α²s^{2γ} + s²/N_R given its ŝ.

    Attributes
    ----------
    log_spread_mean, log_spread_std : float
        m and τ: where ln s of all points lies, for s in the units of y.
    """

    method = "shrinkage"
    n_parameters = 4

    log_spread_mean: float = 0.0
    log_spread_std: float = 1.0

    def std(self, spread: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the calibrated standard deviation."""
        s, c = np.broadcast_arrays(np.asarray(spread, dtype=np.float64), n_members)
        flat, counts = s.reshape(-1), c.reshape(-1)
        variance = np.empty(flat.shape)
        for start in range(0, flat.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            # A null spread has no logarithm; one far below all others carries the same message.
            nodes, log_prior = self._posterior(np.maximum(flat[part], 1e-300), counts[part])
            v = self._variance(nodes.u, counts[part])
            log_post = nodes.log_weight + log_prior
            log_post -= logsumexp(log_post, axis=1, keepdims=True)
            variance[part] = np.sum(np.exp(log_post) * v, axis=1)
        return np.sqrt(variance).reshape(s.shape)

    def log_density(
        self, residuals: FloatArray, spread: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ), a mixture of Gaussians of all variances that ŝ allows, per point."""
        z = np.asarray(residuals, dtype=np.float64)[:, None]
        s, c = np.broadcast_arrays(np.asarray(spread, dtype=np.float64), n_members)
        nodes, log_prior = self._posterior(s, c)
        v = self._variance(nodes.u, c)
        log_post = nodes.log_weight + log_prior
        joint = log_post - 0.5 * (np.log(v) + z**2 / v + _LOG_2PI)
        density: Float64Array = logsumexp(joint, axis=1) - logsumexp(log_post, axis=1)
        return density

    def _posterior(self, spread: Float64Array, c: IntArray) -> tuple[_Nodes, Float64Array]:
        m, tau = self.log_spread_mean, self.log_spread_std
        nodes = _quadrature(spread, c, m, tau)
        return nodes, -0.5 * ((nodes.u - m) / tau) ** 2

    def _variance(self, u: Float64Array, c: IntArray) -> Float64Array:
        variance: Float64Array = (
            np.exp(2 * (np.log(self.alpha) + self.gamma * u)) + np.exp(2 * u) / c[:, None]
        )
        return variance


def _quadrature(spread: Float64Array, c: IntArray, m: float, tau: float) -> _Nodes:
    """Place the nodes at the posterior of u given ŝ, and weigh them with p(ŝ|u).

    q = (c−1)ŝ²/s² is χ² with ν = c−1, so the density of ln ŝ is 2q f_χ²(q) ∝ q^{ν/2} e^{−q/2}.
    """
    nu = (c - 1.0)[:, None]
    log_s = np.log(spread)[:, None]
    precision = 2 * nu + tau**-2
    center = (2 * nu * log_s + m / tau**2) / precision
    width = 1 / np.sqrt(precision)
    u = center + width * np.sinh(_NODES)
    log_q = np.log(nu) + 2 * (log_s - u)
    log_likelihood = 0.5 * nu * (log_q - np.log(2)) - 0.5 * np.exp(log_q) - gammaln(nu / 2)
    step = width * np.cosh(_NODES) * (_NODES[1] - _NODES[0])
    return _Nodes(u, log_likelihood + np.log(2 * step))


def fit_shrinkage(data: CalibrationData) -> ShrinkageCalibration:
    """Maximise the likelihood of (z, ŝ) over α, γ, m and τ.

    Spreads are measured in units of their geometric mean, so that α and m are of order one; the
    nodes are placed anew, from the last m and τ, until these no longer move.
    """
    if data.n_members.min() < 3:
        raise CalibrationError(
            f"Some points have only {data.n_members.min()} members; method='shrinkage' needs at "
            "least 3. Use more members, or method='linear'."
        )
    unit = float(np.exp(data.mean(np.log(data.spread))))
    scaled = replace(data, residuals=data.residuals / unit, spread=data.spread / unit)
    theta = _initial_guess(scaled)
    for _ in range(5):
        previous = theta
        nodes = _quadrature(scaled.spread, scaled.n_members, theta[2], float(np.exp(theta[3])))
        theta = minimize(
            _objective, theta, args=(scaled, nodes), jac=True, method="L-BFGS-B", bounds=_BOUNDS
        ).x
        if np.all(np.abs(theta - previous)[2:] < 0.02):
            break
    log_alpha, gamma, m, log_tau = (float(value) for value in theta)
    log_unit = float(np.log(unit))
    fitted = ShrinkageCalibration(
        alpha=float(np.exp(log_alpha + (1 - gamma) * log_unit)),
        gamma=gamma,
        log_spread_mean=m + log_unit,
        log_spread_std=float(np.exp(log_tau)),
    )
    return with_likelihood(fitted, data)


def _initial_guess(data: CalibrationData) -> Float64Array:
    """Match moments: ln ŝ = ln s + ½ ln(χ²_ν/ν) has known mean and variance about ln s."""
    nu = data.n_members - 1.0
    bias = 0.5 * (digamma(nu / 2) - np.log(nu / 2))
    noise = 0.25 * polygamma(1, nu / 2)
    log_s = np.log(data.spread) - bias
    m = data.mean(log_s)
    tau2 = max(data.mean((log_s - m) ** 2 - noise), 0.01)
    # The median resists the tails that small ν gives to z²/ŝ².
    v = max(float(np.median((data.residuals / data.spread) ** 2)) / 0.455, 1e-12)
    guess = np.array([0.5 * np.log(v), 1.0, m, 0.5 * np.log(tau2)])
    clipped: Float64Array = np.clip(guess, *np.transpose(_BOUNDS))
    return clipped


def _objective(
    theta: Float64Array, data: CalibrationData, nodes: _Nodes
) -> tuple[float, Float64Array]:
    """Return minus the mean log likelihood of (z, ŝ) and its gradient in (ln α, γ, m, ln τ)."""
    log_density, gradients = _joint_density(theta, data, nodes)
    mean_gradient: Float64Array = data.weights @ gradients / data.total
    return -data.mean(log_density), -mean_gradient


def _joint_density(
    theta: Float64Array, data: CalibrationData, nodes: _Nodes
) -> tuple[Float64Array, Float64Array]:
    """Return ln p(z, ŝ) of each point (n,), and its gradient in (ln α, γ, m, ln τ): (n, 4).

    The nodes are fixed, so the gradient is the posterior mean of the gradient of the integrand.
    """
    log_alpha, gamma, m, log_tau = theta
    u, c, z2 = nodes.u, data.n_members[:, None], data.residuals[:, None] ** 2
    tau2 = np.exp(2 * log_tau)
    spread_part = np.exp(2 * (log_alpha + gamma * u))
    v = spread_part + np.exp(2 * u) / c
    ratio = z2 / v
    prior2 = (u - m) ** 2 / tau2
    integrand = nodes.log_weight - 0.5 * (prior2 + np.log(v) + ratio) - log_tau - _LOG_2PI
    log_total: Float64Array = logsumexp(integrand, axis=1)
    posterior = np.exp(integrand - log_total[:, None])
    d_log_v = 0.5 * (ratio - 1) * spread_part / v * 2
    gradients = np.stack(
        [
            np.sum(posterior * d_log_v, axis=1),
            np.sum(posterior * d_log_v * u, axis=1),
            np.sum(posterior * (u - m), axis=1) / tau2,
            np.sum(posterior * (prior2 - 1), axis=1),
        ],
        axis=1,
    )
    return log_total, gradients


def shrinkage_scores(
    calibration: ShrinkageCalibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return θ = (ln α, γ, m, ln τ), and the gradient in θ of ln p(z, ŝ) of each point."""
    nodes = _quadrature(
        data.spread, data.n_members, calibration.log_spread_mean, calibration.log_spread_std
    )
    theta = np.array(
        [
            np.log(calibration.alpha),
            calibration.gamma,
            calibration.log_spread_mean,
            np.log(calibration.log_spread_std),
        ]
    )
    return theta, lambda at: _joint_density(at, data, nodes)[1]
