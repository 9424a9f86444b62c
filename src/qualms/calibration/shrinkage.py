"""Empirical-Bayes calibration: ŝ of each point is shrunk towards the distribution of all points.

    ln s ~ N(m, τ²),     (c−1)ŝ²/s² ~ χ²_{c−1},     z ~ N(0, α²s^{2γ} + s²/c).

α, γ, m and τ maximise the likelihood of the observed (z, ŝ), integrated over u = ln s by the
trapezoidal rule, which for a smooth integrand that decays on both sides converges exponentially.
The nodes follow the Gaussian approximation of the posterior, of width w = (2(c−1) + 1/τ²)^(−1/2):
u = center + w sinh(x) with even x. They are dense where the posterior is large, and reach 45 w, for
skewed posteriors and outlying z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import digamma, gammaln, polygamma

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration, CalibrationData, with_likelihood
from qualms.errors import CalibrationError

#: The even nodes x.
_NODES = np.linspace(-4.5, 4.5, 61)
_SINH = np.sinh(_NODES)
#: Points at a time: their arrays fit in the cache.
_CHUNK = 512
#: Size of the subset that the start of a larger fit is taken from.
_ENOUGH = 2000
#: Nodes of at most so many points are cached: 150 MB.
_KEPT = 100_000
#: Step of the derivative of gradients.
_STEP = 1e-3
_LOG_2PI = float(np.log(2 * np.pi))
#: Bounds of ln α (after scaling by the typical spread), γ, m and ln τ.
_BOUNDS = [(-15.0, 15.0), (0.0, 5.0), (-10.0, 10.0), (-6.0, 3.0)]


@dataclass(frozen=True)
class _Nodes:
    """Quadrature over u = ln s for some points: ∫ p(ŝ|u) f(u) du ≈ Σ_q exp(log_weight) f(u)."""

    u: Float64Array  # (b, Q)
    s2: Float64Array  # (b, Q): exp(2u)
    log_weight: Float64Array  # (b, Q)


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
        for part in _parts(flat.size):
            # A null spread has no logarithm; one far below all others has the same effect.
            nodes, log_post = self._posterior(np.maximum(flat[part], 1e-300), counts[part])
            post = np.exp(log_post - log_post.max(axis=1, keepdims=True))
            v = self._variance(nodes, counts[part])
            variance[part] = np.sum(post * v, axis=1) / post.sum(axis=1)
        return np.sqrt(variance).reshape(s.shape)

    def log_density(
        self, residuals: FloatArray, spread: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ), a mixture of Gaussians of all variances that ŝ allows, per point."""
        z = np.asarray(residuals, dtype=np.float64)
        s, c = np.broadcast_arrays(np.asarray(spread, dtype=np.float64), n_members)
        density = np.empty(z.shape)
        for part in _parts(z.size):
            nodes, log_post = self._posterior(s[part], c[part])
            v = self._variance(nodes, c[part])
            joint = log_post - 0.5 * (np.log(v) + z[part, None] ** 2 / v)
            density[part] = _log_sum(joint) - _log_sum(log_post) - 0.5 * _LOG_2PI
        return density

    def _posterior(self, spread: Float64Array, c: IntArray) -> tuple[_Nodes, Float64Array]:
        """Return the nodes of some points, and ln p(u|ŝ) at each but for a constant."""
        m, tau = self.log_spread_mean, self.log_spread_std
        nodes = _quadrature(spread, c, m, tau)
        return nodes, nodes.log_weight - 0.5 * ((nodes.u - m) / tau) ** 2

    def _variance(self, nodes: _Nodes, c: IntArray) -> Float64Array:
        variance: Float64Array = (
            np.exp(2 * (np.log(self.alpha) + self.gamma * nodes.u)) + nodes.s2 / c[:, None]
        )
        return variance


def _parts(n: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, n, _CHUNK))


def _log_sum(logs: Float64Array) -> Float64Array:
    """Return ln Σ exp over the nodes, of finite numbers: (b,)."""
    largest = logs.max(axis=1)
    total: Float64Array = largest + np.log(np.exp(logs - largest[:, None]).sum(axis=1))
    return total


def _quadrature(spread: Float64Array, c: IntArray, m: float, tau: float) -> _Nodes:
    """Place the nodes at the posterior of u given ŝ, and weigh them with p(ŝ|u).

    q = (c−1)ŝ²/s² is χ² with ν = c−1, so the density of ln ŝ is 2q f_χ²(q) ∝ q^{ν/2} e^{−q/2}.
    """
    nu = (c - 1.0)[:, None]
    log_s = np.log(spread)[:, None]
    precision = 2 * nu + tau**-2
    center = (2 * nu * log_s + m / tau**2) / precision
    width = 1 / np.sqrt(precision)
    u = center + width * _SINH
    log_q = np.log(nu) + 2 * (log_s - u)
    q = np.exp(log_q)
    log_step = np.log(2 * (_NODES[1] - _NODES[0]) * np.cosh(_NODES)) + np.log(width)
    constant = gammaln(nu / 2) + 0.5 * nu * np.log(2)
    log_weight = 0.5 * (nu * log_q - q) + (log_step - constant)
    return _Nodes(u, nu * spread[:, None] ** 2 / q, log_weight)


@dataclass(frozen=True)
class _AllNodes:
    """The nodes of all points, some points at a time: cached, or recomputed if there are many."""

    data: CalibrationData
    m: float
    tau: float
    kept: tuple[_Nodes, ...] | None

    def __iter__(self) -> Iterator[tuple[slice, _Nodes]]:
        parts = _parts(len(self.data.residuals))
        return zip(parts, self.found() if self.kept is None else self.kept, strict=True)

    def found(self) -> Iterator[_Nodes]:
        for part in _parts(len(self.data.residuals)):
            yield _quadrature(self.data.spread[part], self.data.n_members[part], self.m, self.tau)


def _placed(data: CalibrationData, theta: Float64Array) -> _AllNodes:
    """Place the nodes of all points by the m and the τ of some θ."""
    nodes = _AllNodes(data, float(theta[2]), float(np.exp(theta[3])), None)
    return replace(nodes, kept=tuple(nodes.found())) if len(data.residuals) <= _KEPT else nodes


def fit_shrinkage(
    data: CalibrationData, near: ShrinkageCalibration | None = None
) -> ShrinkageCalibration:
    """Maximise the likelihood of (z, ŝ) over α, γ, m and τ.

    Spreads are measured in units of their geometric mean, so that α and m are of order one; the
    nodes are placed again by the last m and τ until these have converged. For many points, the
    start is a fit to a subset.

    Parameters
    ----------
    data : CalibrationData
    near : ShrinkageCalibration, optional
        A fit to similar points, to start from.
    """
    if data.n_members.min() < 3:
        raise CalibrationError(
            f"Some points have only {data.n_members.min()} members; method='shrinkage' needs at "
            "least 3. Use more members, or method='linear'."
        )
    n = len(data.residuals)
    if near is None and n > 2 * _ENOUGH:
        near = fit_shrinkage(data.some(np.arange(n) % (n // _ENOUGH) == 0))
    unit = float(np.exp(data.mean(np.log(data.spread))))
    scaled = replace(data, residuals=data.residuals / unit, spread=data.spread / unit)
    theta = _initial_guess(scaled) if near is None else _in_units(near, unit)
    for _ in range(5):
        previous = theta
        theta = _maximum(scaled, theta)
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


def _maximum(data: CalibrationData, theta: Float64Array) -> Float64Array:
    """Return the most likely θ, with nodes that are placed by the one to begin with."""
    nodes = _placed(data, theta)
    found = _newton(data, nodes, theta) if len(data.residuals) > 2 * _ENOUGH else None
    if found is not None:
        return found
    found = minimize(
        _objective, theta, args=(data, nodes), jac=True, method="L-BFGS-B", bounds=_BOUNDS
    ).x
    return np.asarray(found, dtype=np.float64)


def _newton(data: CalibrationData, nodes: _AllNodes, theta: Float64Array) -> Float64Array | None:
    """Search in coordinates in which the likelihood is round, which takes a few steps only.

    A subset of the points determines its curvature H = LLᵀ well enough: θ → θ + L⁻ᵀφ. Bounds are
    no longer bounds of single coordinates; None is returned where they would matter.
    """
    n = len(data.residuals)
    some = data.some(np.arange(n) % (n // _ENOUGH) == 0)
    near = _placed(some, theta)
    steps = _STEP * np.eye(4)
    slopes = [
        (_objective(theta + h, some, near)[1] - _objective(theta - h, some, near)[1]) / (2 * _STEP)
        for h in steps
    ]
    H = 0.5 * (np.stack(slopes) + np.transpose(slopes))
    values = np.linalg.eigvalsh(H)
    if not np.all(np.isfinite(H)) or values[0] < 1e-6 * values[-1]:
        return None
    L = np.linalg.cholesky(H)

    def moved(phi: Float64Array) -> Float64Array:
        there: Float64Array = theta + solve_triangular(L, phi, lower=True, trans="T")
        return there

    def objective(phi: Float64Array) -> tuple[float, Float64Array]:
        value, slope = _objective(moved(phi), data, nodes)
        return value, solve_triangular(L, slope, lower=True)

    found = minimize(objective, np.zeros(4), jac=True, method="L-BFGS-B", bounds=[(-1, 1)] * 4)
    best = moved(found.x)
    lowest, highest = np.transpose(_BOUNDS)
    is_inside = np.all(np.abs(found.x) < 0.999) and np.all((best > lowest) & (best < highest))
    return best if found.success and is_inside else None


def _in_units(calibration: ShrinkageCalibration, unit: float = 1.0) -> Float64Array:
    """Return θ = (ln α, γ, m, ln τ) for z and s measured in this unit."""
    log_unit = np.log(unit)
    theta = np.array(
        [
            np.log(calibration.alpha) - (1 - calibration.gamma) * log_unit,
            calibration.gamma,
            calibration.log_spread_mean - log_unit,
            np.log(calibration.log_spread_std),
        ]
    )
    clipped: Float64Array = np.clip(theta, *np.transpose(_BOUNDS)) if unit != 1.0 else theta
    return clipped


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
    theta: Float64Array, data: CalibrationData, nodes: _AllNodes
) -> tuple[float, Float64Array]:
    """Return minus the mean log likelihood of (z, ŝ) and its gradient in (ln α, γ, m, ln τ)."""
    log_density, gradients = _joint_density(theta, data, nodes)
    mean_gradient: Float64Array = data.weights @ gradients / data.total
    return -data.mean(log_density), -mean_gradient


def _joint_density(
    theta: Float64Array, data: CalibrationData, nodes: _AllNodes
) -> tuple[Float64Array, Float64Array]:
    """Return ln p(z, ŝ) of each point (n,), and its gradient in θ = (ln α, γ, m, ln τ): (n, 4).

    The nodes are fixed, so the gradient is the posterior mean of the gradient of the integrand.
    """
    n = len(data.residuals)
    log_density, gradients = np.empty(n), np.empty((n, 4))
    for part, some in nodes:
        z2, c = data.residuals[part, None] ** 2, data.n_members[part, None]
        log_density[part], gradients[part] = _joint_part(theta, z2, c, some)
    return log_density, gradients


def _joint_part(
    theta: Float64Array, z2: Float64Array, c: IntArray, nodes: _Nodes
) -> tuple[Float64Array, Float64Array]:
    """Return ln p(z, ŝ) of some points (b,), and its gradient (b, 4)."""
    log_alpha, gamma, m, log_tau = theta
    tau2 = np.exp(2 * log_tau)
    spread_part = np.exp(2 * (log_alpha + gamma * nodes.u))
    v = spread_part + nodes.s2 / c
    ratio = z2 / v
    offset = nodes.u - m
    prior2 = offset**2 / tau2
    exponent = nodes.log_weight - 0.5 * (prior2 + ratio)
    largest = exponent.max(axis=1, keepdims=True)
    # 1/√v differs between the nodes by far less than what underflows.
    posterior = np.exp(exponent - largest) / np.sqrt(v)
    total = posterior.sum(axis=1, keepdims=True)
    posterior /= total
    log_density = (np.log(total) + largest)[:, 0] - log_tau - _LOG_2PI
    d_log_v = posterior * (ratio - 1) * spread_part / v
    gradients = [
        d_log_v.sum(axis=1),
        np.einsum("bq,bq->b", d_log_v, nodes.u),
        np.einsum("bq,bq->b", posterior, offset) / tau2,
        np.einsum("bq,bq->b", posterior, prior2) - 1,
    ]
    return log_density, np.stack(gradients, axis=1)


def shrinkage_scores(
    calibration: ShrinkageCalibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return θ = (ln α, γ, m, ln τ), and the gradient in θ of ln p(z, ŝ) of each point."""
    theta = _in_units(calibration)
    nodes = _placed(data, theta)
    return theta, lambda at: _joint_density(at, data, nodes)[1]
