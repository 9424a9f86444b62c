"""Calibrations of ensemble standard deviations. Eqs. (8), (9), (12) and (19)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import digamma, gammaln, polygamma, stdtrit

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import rescaled
from qualms.metrics import gaussian_log_density, student_log_density

#: Exponents tried by the power calibration. A larger standard deviation never
#: means a smaller error.
_GAMMA_RANGE = (0.0, 5.0)
#: Φ(1): the probability below +σ of a Gaussian.
_ONE_SIGMA = 0.8413447460685429


@dataclass(frozen=True, kw_only=True)
class PowerCalibration(Calibration):
    """σ → α σ^γ, Eq. (19), Musil et al. 2019; α has the units of σ^(1−γ)."""

    method = "power"
    n_parameters = 2

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over α and γ. Eq. (19), Musil et al. 2019.

        For fixed γ the best α² is the mean of z²/σ^2γ. The rest, −½ ln α²(γ) − γ mean(ln σ), is
        concave in γ, because the logarithm of a sum of exponentials is convex: one maximum, found
        by a bounded search.
        """
        log_std = np.log(data.ensemble_std)
        center = data.mean(log_std)
        log_std = log_std - center  # so that powers neither overflow nor vanish

        def alpha2(gamma: float) -> float:
            return data.mean(data.residuals**2 * np.exp(-2 * gamma * log_std))

        gamma = 1.0
        if cls().is_identifiable(data):
            found = minimize_scalar(
                lambda gamma: 0.5 * np.log(alpha2(gamma)),  # mean(ln σ) is 0 after centring
                bounds=_GAMMA_RANGE,
                method="bounded",
                options={"xatol": 1e-8},
            )
            gamma = float(found.x)
        alpha = alpha2(gamma) ** 0.5 * float(np.exp(-gamma * center))
        return cls(alpha=alpha, gamma=gamma).fitted_to(data)

    def std(self, ensemble_std: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return α σ^γ."""
        return self.alpha * np.asarray(ensemble_std, dtype=np.float64) ** self.gamma

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return the Gaussian ln p(z | ŝ), Eq. (5), per point."""
        return gaussian_log_density(residuals, self.std(ensemble_std, n_members))

    def scores(
        self, data: CalibrationData
    ) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
        """Return θ = (ln α, γ), or ln α alone, and the gradient of ln p(z | ŝ) of each point.

        With ln σ = ln α + γ ln ŝ it is (z²/σ² − 1) ∂ ln σ/∂θ.
        """
        design = np.stack([np.ones_like(data.ensemble_std), np.log(data.ensemble_std)], axis=1)

        def gradient(at: Float64Array) -> Float64Array:
            full = np.append(at, self.gamma)[:2]
            t2 = data.residuals**2 * np.exp(-2 * (design @ full))
            return np.asarray((t2 - 1)[:, None] * design[:, : len(at)])

        return np.array([np.log(self.alpha), self.gamma])[: self.n_parameters], gradient


@dataclass(frozen=True, kw_only=True)
class LinearCalibration(PowerCalibration):
    """σ → α σ with α² = v₀, Eqs. (8) and (9), Musil et al. 2019; out of bag, Eq. (12)."""

    method = "linear"
    n_parameters = 1

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Return α = √v₀ in closed form. Eqs. (9) and (12), Musil et al. 2019."""
        v_0 = variance_scale(data.residuals, data.ensemble_std, data.weights)
        return cls(alpha=v_0**0.5).fitted_to(data)


@dataclass(frozen=True, kw_only=True)
class NoCalibration(PowerCalibration):
    """σ as it is."""

    method = "none"
    n_parameters = 0

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Return the identity, with its likelihood."""
        return cls().fitted_to(data)


def variance_scale(
    residuals: FloatArray, std: FloatArray, weights: FloatArray | None = None
) -> float:
    """Return v₀ = mean(z²/σ²), which maximises Eq. (8). Eqs. (9) and (12), Musil et al. 2019."""
    return float(np.average((np.asarray(residuals) / np.asarray(std)) ** 2, weights=weights))


def log_std_moments(dof: FloatArray) -> tuple[Float64Array, Float64Array]:
    """Return mean and variance of ln ŝ − ln s = ½ ln(χ²_ν/ν) for ν degrees of freedom."""
    half = np.asarray(dof, dtype=np.float64) / 2
    return 0.5 * (digamma(half) - np.log(half)), 0.25 * polygamma(1, half)


def require_three_members(data: CalibrationData, method: str) -> None:
    """Reject points with two members."""
    if data.n_members.min() < 3:
        raise CalibrationError(
            f"Some points have only {data.n_members.min()} members; {method=} needs at least 3. "
            "Use more members, or method='linear'."
        )


@dataclass(frozen=True, kw_only=True)
class StudentCalibration(Calibration):
    """Student's t predictive with scale ŝ√(α² + λ²/N_R) and N_R − 1 degrees of freedom.

    λ²ŝ²/N_R is the variance of a prediction of which a share λ is the mean over the members. `std`
    is that of this t: the variance is (N_R−1)/(N_R−3) (α² + λ²/N_R) ŝ². With two or three members t
    has no variance; `std` is then the half-width of its central 68 % interval.
    """

    method = "student"
    n_parameters = 1

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over α, each point with its own number of members."""
        require_three_members(data, cls.method)
        nu = data.n_members - 1.0
        t2 = (data.residuals / data.ensemble_std) ** 2
        offset = data.mean(gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi))

        def negative_log_likelihood(log_alpha: float) -> float:
            k2 = np.exp(2 * log_alpha) + data.centre**2 / data.n_members
            tails = (nu + 1) * np.log1p(t2 / (nu * k2))
            return 0.5 * data.mean(np.log(k2) + tails) - offset

        # No scale outside of these bounds could explain the residuals.
        widest = 0.5 * float(np.log(np.max(t2)))
        bounds = (min(widest, 0.0) - 20, max(widest, 0.0) + 5)
        found = minimize_scalar(
            negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9}
        )
        # If z is smaller than the standard error of the ensemble mean, α = 0.
        at_zero = data.centre > 0 and negative_log_likelihood(-np.inf) <= found.fun
        alpha = 0.0 if at_zero else float(np.exp(found.x))
        return cls(alpha=alpha, centre=data.centre).fitted_to(data)

    def scale(self, ensemble_std: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the scale of the t distribution, ŝ√(α² + λ²/N_R)."""
        k2 = self.alpha**2 + self.centre**2 / np.asarray(n_members, dtype=np.float64)
        return np.asarray(ensemble_std, dtype=np.float64) * np.sqrt(k2)

    def std(self, ensemble_std: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the calibrated standard deviation."""
        nu = np.asarray(n_members, dtype=np.float64) - 1
        of_variance = np.sqrt(nu / np.where(nu > 2, nu - 2, 1.0))
        ratio = np.where(nu > 2, of_variance, stdtrit(nu, _ONE_SIGMA))
        return np.asarray(ratio * self.scale(ensemble_std, n_members))

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ) of Student's t, per point."""
        dof = np.asarray(n_members, dtype=np.float64) - 1
        return student_log_density(residuals, self.scale(ensemble_std, n_members), dof)

    def scores(
        self, data: CalibrationData
    ) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
        """Return θ = (ln α,), and the gradient of ln p(z | ŝ) of each point.

        With k² = α² + λ²/c and u = z²/(ν k² ŝ²) the density is −½ ln k² − ½(ν+1) ln(1 + u) plus a
        constant, and its derivative in ln α is (α²/k²)((ν+1) u/(1+u) − 1).
        """
        nu = data.n_members - 1.0

        def gradient(at: Float64Array) -> Float64Array:
            alpha2 = np.exp(2 * at[0])
            k2 = alpha2 + data.centre**2 / data.n_members
            u = (data.residuals / data.ensemble_std) ** 2 / (nu * k2)
            return np.asarray((alpha2 / k2 * ((nu + 1) * u / (1 + u) - 1))[:, None])

        return np.array([np.log(self.alpha)]), gradient


# One factor for all components of a vector or a tensor, so that directions do not matter.
#: How often components are in a vector (x, y, z), and in a symmetric tensor (xx, yy, zz, yz, xz,
#: xy), by how many there are.
_MULTIPLICITY = {3: np.ones(3), 6: np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])}


def vector_std(ensemble_std: FloatArray) -> Float64Array:
    """Return the standard deviation r (…) of vectors or tensors, given components (…, 3 or 6)."""
    w = _MULTIPLICITY[ensemble_std.shape[-1]]
    return np.asarray(np.sqrt(np.asarray(ensemble_std, dtype=np.float64) ** 2 @ (w / w.sum())))


@dataclass(frozen=True)
class VectorCalibration:
    """A calibration of vectors or tensors, one factor for all components; a `MemberTransform`.

    `calibration` is fitted to components multiplied by r/ŝ_k.
    """

    calibration: Calibration

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (…, 3 or 6, N_R) about their mean, all components by one factor."""
        return self.calibration.transform(members, _of_whole_vectors)


def _of_whole_vectors(std: Float64Array) -> Float64Array:
    """Return the standard deviation of the vector for each of its components (…, 3 or 6)."""
    return np.broadcast_to(vector_std(std)[..., None], std.shape)


@dataclass(frozen=True)
class Scaled:
    """Scaling of members about their mean by given factors; a `MemberTransform`.

    `factors` is one number, or one for each of the first axis: (n,). The members are those that
    `calibration` scales.
    """

    factors: float | Float64Array
    calibration: Calibration

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (n, …, N_R)."""
        points = members.shape[:-1]
        factors = np.reshape(self.factors, (-1, *[1] * (len(points) - 1)))
        return rescaled(self.calibration.own(members), np.broadcast_to(factors, points))


@dataclass(frozen=True)
class StdExtrapolation:
    """The power law σ_n ∝ n^(−β) √(1 − n/N), with β = `exponent` and N = `n_train`."""

    exponent: float
    n_train: int

    def alpha(self, subsample: int) -> float:
        """Return the factor from the standard deviation of subsamples of this size to N."""
        if not 0 < subsample < self.n_train:
            raise InputError("subsample", subsample, f"0 < n < N = {self.n_train}")
        ratio = subsample / self.n_train
        return float(ratio**self.exponent / (1 - ratio) ** 0.5)


def extrapolate_std(
    subsamples: Sequence[int], ensemble_stds: Sequence[FloatArray], n_train: int
) -> StdExtrapolation:
    """Fit a power law of the subsample size to ensemble standard deviations (Politis et al. 1999).

    The factor √(1 − n/N) of drawing without replacement is not part of the extrapolation to N.

    Parameters
    ----------
    subsamples : sequence of int
        At least two different sizes n < N.
    ensemble_stds : sequence of arrays
        For each size σ_n > 0 of the same test points; their geometric mean is fitted.
    n_train : int
        N.
    """
    n = np.asarray(subsamples, dtype=np.float64)
    if len(np.unique(n)) < 2 or len(n) != len(ensemble_stds) or n.min() < 1 or n.max() >= n_train:
        expected = f"at least two sizes 1 ≤ n < N = {n_train}, one per array"
        raise InputError("subsamples", list(subsamples), expected)
    if not all(
        np.size(s) and np.all(np.isfinite(s)) and np.all(np.asarray(s) > 0) for s in ensemble_stds
    ):
        raise InputError("ensemble_stds", "values ≤ 0 or not finite", "positive finite values")
    log_sigma = np.array([np.mean(np.log(s)) for s in ensemble_stds]) - 0.5 * np.log(
        1 - n / n_train
    )
    return StdExtrapolation(-float(np.polyfit(np.log(n), log_sigma, 1)[0]), n_train)
