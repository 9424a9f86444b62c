"""Empirical-Bayes calibration: ŝ of each point is shrunk towards the distribution of all points.

    ln s ~ N(m, τ²),     (c−1)ŝ²/s² ~ χ²_{c−1},     z ~ N(0, α²s^{2γ} + λ²s²/c).

α, γ, m and τ maximise the likelihood of the observed (z, ŝ), integrated over u = ln s by the
trapezoidal rule, which for a smooth integrand that decays on both sides converges exponentially.
The nodes follow the Gaussian approximation of the posterior, of width w = (2(c−1) + 1/τ²)^(−1/2):
u = center + w sinh(x) with even x. They are dense where the posterior is large, and reach 45 w, for
skewed posteriors and outlying z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.optimize import minimize
from scipy.special import gammaln

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.methods import GAMMA_RANGE, fit_log_std_prior, require_three_members

#: The even nodes x.
_NODES = np.linspace(-4.5, 4.5, 61)
#: Points at a time: their arrays fit in the cache.
_CHUNK = 512
#: Size of the subset that the start of a larger fit is taken from.
_ENOUGH = 2000
#: Nodes of at most so many points are cached: 150 MB.
_KEPT = 100_000
#: Standard deviations τ below the mean of ln s that ln ŝ is taken to be at least.
_WIDTHS = 3.0
_LOG_2PI = float(np.log(2 * np.pi))
#: Bounds of ln α (after scaling by the typical standard deviation), γ, m and ln τ.
_BOUNDS = [(-15.0, 15.0), GAMMA_RANGE, (-10.0, 10.0), (-6.0, 3.0)]


class _Nodes(NamedTuple):
    """Quadrature over u = ln s for some points: ∫ p(ŝ|u) f(u) du ≈ Σ_q exp(log_weight) f(u)."""

    u: Float64Array  # (b, Q)
    s2: Float64Array  # (b, Q): exp(2u)
    log_weight: Float64Array  # (b, Q)


#: Makes the nodes of all points, some points at a time.
_AllNodes = Callable[[], Iterable[tuple[slice, _Nodes]]]


@dataclass(frozen=True, kw_only=True)
class ShrinkageCalibration(Calibration):
    """The variance of a new point is the posterior mean of α²s^{2γ} + λ²s²/N_R given its ŝ.

    Attributes
    ----------
    log_std_mean, log_std_std : float
        m and τ: where ln s of all points lies, for s in the units of y.
    """

    method = "shrinkage"
    n_parameters = 4

    log_std_mean: float = 0.0
    log_std_std: float = 1.0

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood of (z, ŝ) over α, γ, m and τ.

        Standard deviations are in units of their geometric mean, so that α and m are of order one;
        the nodes are placed again by the last m and τ until these have converged. For many points,
        the start is a fit to a subset.
        """
        require_three_members(data, cls.method)
        n = len(data.residuals)
        if near is None and n > 2 * _ENOUGH:
            near = cls.fit(data.some(np.arange(n) % (n // _ENOUGH) == 0))
        log_unit = data.mean(np.log(data.ensemble_std))
        unit = np.exp(log_unit)
        scaled = replace(
            data, residuals=data.residuals / unit, ensemble_std=data.ensemble_std / unit
        )
        if isinstance(near, ShrinkageCalibration):
            shift = np.array([(1 - near.gamma) * log_unit, 0.0, log_unit, 0.0])
            theta = near._theta() - shift
        else:
            theta = _initial_guess(scaled)
        theta = np.clip(theta, *np.transpose(_BOUNDS))
        for _ in range(5):
            previous = theta
            args = (scaled, _placed(scaled, theta))
            theta = minimize(_objective, theta, args, jac=True, method="L-BFGS-B", bounds=_BOUNDS).x
            if np.all(np.abs(theta - previous)[2:] < 0.02):
                break
        log_alpha, power, m, log_tau = theta.tolist()
        return cls(
            alpha=float(np.exp(log_alpha + (1 - power) * log_unit)),
            gamma=power,
            log_std_mean=m + log_unit,
            log_std_std=float(np.exp(log_tau)),
            centre=data.centre,
        ).fitted_to(data)

    def std(
        self, ensemble_std: FloatArray, n_members: int | IntArray, *_: Any, **__: Any
    ) -> Float64Array:
        """Return the calibrated standard deviation."""
        s, c = np.broadcast_arrays(np.asarray(ensemble_std, dtype=np.float64), n_members)
        # Members may agree by chance: ŝ is not taken to be smaller than nearly all s are.
        least = np.exp(self.log_std_mean - _WIDTHS * self.log_std_std)
        flat, counts = np.maximum(s.reshape(-1), least), c.reshape(-1)
        variance = np.empty(flat.shape)
        for part in _parts(flat.size):
            log_post, v = self._posterior(flat[part], counts[part])
            post = np.exp(log_post - log_post.max(axis=1, keepdims=True))
            variance[part] = np.sum(post * v, axis=1) / post.sum(axis=1)
        return np.sqrt(variance).reshape(s.shape)

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ), a mixture of Gaussians of all variances that ŝ allows, per point."""
        z = np.asarray(residuals, dtype=np.float64)
        s, c = np.broadcast_arrays(np.asarray(ensemble_std, dtype=np.float64), n_members)
        density = np.empty(z.shape)
        for part in _parts(z.size):
            log_post, v = self._posterior(s[part], c[part])
            joint = log_post - 0.5 * (np.log(v) + z[part, None] ** 2 / v)
            density[part] = _log_sum(joint) - _log_sum(log_post) - 0.5 * _LOG_2PI
        return density

    def _theta(self) -> Float64Array:
        logs = np.log([self.alpha, self.log_std_std])
        return np.array([logs[0], self.gamma, self.log_std_mean, logs[1]])

    def _posterior(
        self, ensemble_std: Float64Array, c: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return ln p(u|ŝ), but for a constant, and the variance of z at the nodes."""
        m, tau = self.log_std_mean, self.log_std_std
        nodes = _quadrature(ensemble_std, c, m, tau)
        v = np.exp(2 * (np.log(self.alpha) + self.gamma * nodes.u))
        v += self.centre**2 * nodes.s2 / c[:, None]
        return nodes.log_weight - 0.5 * ((nodes.u - m) / tau) ** 2, v


def _parts(n: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, n, _CHUNK))


def _log_sum(logs: Float64Array) -> Float64Array:
    """Return ln Σ exp over the nodes: (b,). SciPy's takes twice the time."""
    largest = logs.max(axis=1)
    return np.asarray(largest + np.log(np.exp(logs - largest[:, None]).sum(axis=1)))


def _quadrature(ensemble_std: Float64Array, c: IntArray, m: float, tau: float) -> _Nodes:
    """Place the nodes at the posterior of u given ŝ, and weigh them with p(ŝ|u).

    q = (c−1)ŝ²/s² is χ² with ν = c−1, so the density of ln ŝ is 2q f_χ²(q) ∝ q^{ν/2} e^{−q/2}.
    """
    nu = (c - 1.0)[:, None]
    log_s = np.log(ensemble_std)[:, None]
    precision = 2 * nu + tau**-2
    center = (2 * nu * log_s + m / tau**2) / precision
    width = 1 / np.sqrt(precision)
    u = center + width * np.sinh(_NODES)
    log_q = np.log(nu) + 2 * (log_s - u)
    q = np.exp(log_q)
    log_step = np.log(2 * (_NODES[1] - _NODES[0]) * np.cosh(_NODES)) + np.log(width)
    constant = gammaln(nu / 2) + 0.5 * nu * np.log(2)
    log_weight = 0.5 * (nu * log_q - q) + (log_step - constant)
    return _Nodes(u, nu * ensemble_std[:, None] ** 2 / q, log_weight)


def _placed(data: CalibrationData, theta: Float64Array) -> _AllNodes:
    """Place the nodes of all points by the m and the τ of some θ; they are cached if few."""
    n, m, tau = len(data.residuals), float(theta[2]), float(np.exp(theta[3]))

    def nodes() -> Iterator[tuple[slice, _Nodes]]:
        for part in _parts(n):
            yield part, _quadrature(data.ensemble_std[part], data.n_members[part], m, tau)

    if n > _KEPT:
        return nodes
    kept = list(nodes())
    return lambda: kept


def _initial_guess(data: CalibrationData) -> Float64Array:
    """Return a start of (ln α, γ, m, ln τ): moments of ln ŝ, and the median of z²/ŝ²."""
    m, _, tau = fit_log_std_prior(replace(data, n_components=1.0))
    # The median resists the tails that small ν gives to z²/ŝ².
    v = max(float(np.median((data.residuals / data.ensemble_std) ** 2)) / 0.455, 1e-12)
    return np.array([0.5 * np.log(v), 1.0, m, np.log(max(tau, 0.1))])


def _objective(
    theta: Float64Array, data: CalibrationData, nodes: _AllNodes
) -> tuple[float, Float64Array]:
    """Return minus the mean log likelihood of (z, ŝ) and its gradient in (ln α, γ, m, ln τ)."""
    log_density, gradients = _joint_density(theta, data, nodes)
    return -data.mean(log_density), -(data.weights @ gradients) / data.weights.sum()


def _joint_density(
    theta: Float64Array, data: CalibrationData, nodes: _AllNodes
) -> tuple[Float64Array, Float64Array]:
    """Return ln p(z, ŝ) of each point (n,), and its gradient in θ = (ln α, γ, m, ln τ): (n, 4).

    The nodes are fixed, so the gradient is the posterior mean of the gradient of the integrand.
    """
    log_alpha, gamma, m, log_tau = theta
    tau2 = np.exp(2 * log_tau)
    n = len(data.residuals)
    log_density, gradients = np.empty(n), np.empty((n, 4))
    for part, (u, s2, log_weight) in nodes():
        scaled_part = np.exp(2 * (log_alpha + gamma * u))
        v = scaled_part + data.centre**2 * s2 / data.n_members[part, None]
        ratio = data.residuals[part, None] ** 2 / v
        offset = u - m
        prior2 = offset**2 / tau2
        exponent = log_weight - 0.5 * (prior2 + ratio)
        largest = exponent.max(axis=1, keepdims=True)
        # 1/√v differs between the nodes by far less than what underflows.
        posterior = np.exp(exponent - largest) / np.sqrt(v)
        total = posterior.sum(axis=1, keepdims=True)
        posterior /= total
        log_density[part] = (np.log(total) + largest)[:, 0] - log_tau - _LOG_2PI
        d_log_v = posterior * (ratio - 1) * scaled_part / v
        gradients[part, 0] = d_log_v.sum(axis=1)
        gradients[part, 1] = np.einsum("bq,bq->b", d_log_v, u)
        gradients[part, 2] = np.einsum("bq,bq->b", posterior, offset) / tau2
        gradients[part, 3] = np.einsum("bq,bq->b", posterior, prior2) - 1
    return log_density, gradients
