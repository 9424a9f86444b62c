"""Methods of calibration. Eqs. (8), (9), (12) and (19), Musil et al. 2019, and beyond."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import digamma, gammaln, logsumexp, ndtr, polygamma, stdtrit

from qualms.arrays import (
    Float64Array,
    FloatArray,
    IntArray,
    check_integer,
    check_number,
    row_blocks,
)
from qualms.calibration.conformal import Conformal, fit_conformal
from qualms.calibration.points import CalibrationData, make_folds, n_effective
from qualms.errors import CalibrationError, InputError, unknown_choice, warn
from qualms.metrics import gaussian_log_density, student_log_density

#: Exponents of ŝ that are tried. A larger standard deviation never means a smaller error.
GAMMA_RANGE = (0.0, 5.0)
P_co = TypeVar("P_co", covariant=True)


class Calibratable(Protocol[P_co]):
    """Something that lets a calibration be applied to it, such as `qualms.Prediction`."""

    def calibrated(self, calibration: Any) -> P_co:
        """Return a calibrated copy."""


@dataclass(frozen=True, kw_only=True)
class Calibration(ABC):
    """A rule that turns the ensemble standard deviation into a calibrated one.

    Attributes
    ----------
    alpha, gamma : float
        Scale and exponent; see the methods.
    n_points : int
        Number of points the calibration was fitted to.
    log_likelihood : float
        Mean over these points of ln p(z | ŝ) under the predictive density of the method.
    centre : float
        λ, the share of the ensemble mean in the prediction: see `CalibrationData`.
    n_subsampled : int
        Number of members that ŝ is taken over, the first; 0 if there are no others. The others, of
        a sparse Gaussian process, are drawn from the posterior of the full model.
    n_calibrated : int
        Number of members of a calibrated prediction; 0: as many as σ has independent sources of.
        See `qualms.calibration.members`.
    """

    method: ClassVar[str]
    n_parameters: ClassVar[int]
    #: whether σ depends on the number of members, of which there must be three
    needs_members: ClassVar[bool] = True

    alpha: float = 1.0
    gamma: float = 1.0
    n_points: int = 0
    log_likelihood: float = 0.0
    centre: float = 1.0
    n_subsampled: int = 0
    n_calibrated: int = 0

    @classmethod
    @abstractmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood of the data; `near`, a fit to similar points, may be a start."""

    @abstractmethod
    def std(
        self,
        ensemble_std: FloatArray,
        n_members: int | IntArray,
        posterior_std: FloatArray | None = None,
        novelty_std: FloatArray | None = None,
        n_posterior: int | None = None,
    ) -> Float64Array:
        """Return σ (…), a function of ŝ, c, p and q.

        Parameters
        ----------
        ensemble_std : (…) array
            ŝ.
        n_members : int or (…) array of int
            c, the number of members that ŝ is taken over.
        posterior_std, novelty_std : (…) arrays, optional
            p and q, which most methods ignore.
        n_posterior : int, optional
            Number of posterior members that p is taken over; p is exact if not given.
        """

    def density_of(self, data: CalibrationData) -> Float64Array:
        """Return ln p(z | ŝ) of each point of the data, of a Gaussian, Eq. (5), or other: (n,)."""
        return gaussian_log_density(data.residuals, self.std_of(data))

    def std_of(self, data: CalibrationData) -> Float64Array:
        """Return the calibrated standard deviation of each point of the data: (n,)."""
        return self.std(data.ensemble_std, data.n_members, data.posterior_std, data.novelty_std)

    def conformal(self, data: CalibrationData) -> Conformal:
        """Return the distribution of |z|/σ of the points of the data.

        Few points are left out of the calibration that gives their σ: parameters that are fitted to
        them make their scores smaller than those of new points.
        """
        std, codes = self.std_of(data), data.codes
        if len(codes) <= 500 and codes.max() >= 4:
            for out in make_folds(codes, 5):
                with suppress(CalibrationError):  # if the others are too few
                    std[out] = self.fit(data.some(~out), self).std_of(data.some(out))
        return fit_conformal(np.abs(data.residuals) / std, codes)

    def fitted_to(self, data: CalibrationData) -> Self:
        """Return the calibration with the number and the likelihood of these points."""
        likelihood = data.mean(self.density_of(data) - np.log(data.scale))
        return replace(self, n_points=len(data.residuals), log_likelihood=likelihood)

    def typical_factor(self, n_members: int) -> float | None:
        """Return the usual σ/ŝ of so many members, if it is known."""
        return self.constant_factor(n_members)

    def constant_factor(self, n_members: int) -> float | None:
        """Return σ/ŝ of so many members, if it does not depend on ŝ."""
        stds = np.array([1e-3, 1.0])
        low, high = (self.std(stds, n_members) / stds).tolist()
        return float(high) if np.isclose(low, high, rtol=1e-12, atol=0.0) else None

    def kinds(self, n_members: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return number and weight of the subsampled members, the first, and of the others.

        The covariance of the members that are scaled is the sum of those of both kinds, times the
        squares of the weights.
        """
        n = self.n_subsampled or n_members
        return (n, 1.0), (n_members - n, 0.0)

    @property
    def needs_novelty(self) -> bool:
        """Whether σ depends on the novelty q."""
        return False

    def apply(self, prediction: Calibratable[P_co]) -> P_co:
        """Return the calibrated prediction."""
        return prediction.calibrated(self)

    @property
    def aic(self) -> float:
        """Akaike's criterion 2k − 2 ln L; the smaller the better."""
        return 2 * self.n_parameters - 2 * self.n_points * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion k ln n − 2 ln L; the smaller the better."""
        return self.aic + self.n_parameters * (float(np.log(max(self.n_points, 1))) - 2)

    def predictive_dof(self, n_members: int) -> float | None:
        """Return ν of the t distribution of errors predicted by so many members, if it is known."""
        return self.n_subsampled - 1.0 if self.n_subsampled else None

    def describe(self) -> str:
        """Return the method and its parameters in a line."""
        return f"{self.method}, α = {_short(self.alpha)}, γ = {_short(self.gamma)}"

    def parameters(self) -> dict[str, Any]:
        """Return everything needed to build the calibration again, as plain numbers."""
        return asdict(self)


def _short(value: float) -> str:
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


# --- none, linear, power --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerCalibration(Calibration):
    """σ → α σ^γ, Eq. (19), Musil et al. 2019; α has the units of σ^(1−γ)."""

    method = "power"
    n_parameters = 2
    needs_members = False

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over α and γ. Eq. (19), Musil et al. 2019.

        For fixed γ the best α² is the mean of z²/σ^2γ. The rest, −½ ln α²(γ) − γ mean(ln σ), is
        concave in γ, because the logarithm of a sum of exponentials is convex: one maximum, found
        by a bounded search.
        """
        log_std = np.log(data.ensemble_std)
        center = data.mean(log_std)  # so that powers neither overflow nor vanish

        def log_scale(gamma: float) -> float:
            """Return ln α + γ center of the best α: minus the log likelihood and a constant."""
            squares = data.residuals**2 * np.exp(-2 * gamma * (log_std - center))
            return 0.5 * float(np.log(data.mean(squares)))

        gamma = 1.0
        if np.ptp(log_std) >= 1e-6:  # or all are equal
            optimum = minimize_scalar(
                log_scale, bounds=GAMMA_RANGE, method="bounded", options={"xatol": 1e-8}
            )
            gamma = min((float(optimum.x), *GAMMA_RANGE), key=log_scale)  # it ends beside a bound
        alpha = float(np.exp(log_scale(gamma) - gamma * center))
        return cls(alpha=alpha, gamma=gamma).fitted_to(data)

    def std(
        self, ensemble_std: FloatArray, n_members: int | IntArray, *_: Any, **__: Any
    ) -> Float64Array:
        """Return α σ^γ."""
        return self.alpha * np.asarray(ensemble_std, dtype=np.float64) ** self.gamma


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
    """Return v₀ = mean(z²/σ²), which maximises Eq. (8). Eqs. (9) and (12), Musil et al. 2019.

    Parameters
    ----------
    residuals, std : (n,) arrays
        z and σ.
    weights : (n,) array, optional
        How often each point counts.
    """
    return float(np.average((np.asarray(residuals) / np.asarray(std)) ** 2, weights=weights))


# --- student --------------------------------------------------------------------------------------


def log_std_moments(dof: float | FloatArray) -> tuple[Float64Array, Float64Array]:
    """Return mean and variance of ln ŝ − ln s = ½ ln(χ²_ν/ν) for ν degrees of freedom."""
    half = np.asarray(dof, dtype=np.float64) / 2
    return 0.5 * (digamma(half) - np.log(half)), 0.25 * polygamma(1, half)


def fit_log_std_prior(
    data: CalibrationData, of_posterior: bool = False
) -> tuple[float, float, float]:
    """Return m, β and τ of ln s ~ N(m + β ln p, τ²), by the method of moments.

    Weighted least squares of ln ŝ, whose variance is v + τ²; τ² is what the scatter has beyond v. β
    is zero unless `of_posterior` is set and all p are known.
    """
    bias, v = log_std_moments(data.n_components * (data.n_members - 1))
    log_s = np.log(data.ensemble_std) - bias
    # Points that all members agree on, such as isolated atoms, must not determine τ.
    median = np.median(log_s)
    limit = 6 * float(np.median(np.abs(log_s - median)))
    log_s = np.clip(log_s, median - limit, median + limit)
    design, typical = np.ones((len(log_s), 1)), 0.0
    if of_posterior and data.posterior_std is not None and np.all(data.posterior_std > 0):
        log_p = np.log(data.posterior_std)
        typical = float(np.mean(log_p))
        if np.std(log_p) > 0.05:  # or there is nothing to depend on
            design = np.column_stack([design, log_p - typical])
    tau2 = 1.0
    for _ in range(20):
        w = data.weights / (v + tau2)
        root = np.sqrt(w)
        coefficients = np.linalg.lstsq(design * root[:, None], log_s * root, rcond=None)[0]
        residuals = log_s - design @ coefficients
        tau2 = max(float(np.average(residuals**2 - v, weights=w)), 1e-3)
    m, beta = [*coefficients.tolist(), 0.0][:2]
    return m - beta * typical, beta, tau2**0.5


@dataclass(frozen=True, kw_only=True)
class StudentCalibration(Calibration):
    """Student's t with ν₀ + N_R − 1 degrees of freedom and scale s̃√(α² + λ²/N_R).

    Members of a point have a variance s², of which νŝ²/s² ~ χ²_ν with ν = N_R − 1 is known. That of
    all points is distributed as ν₀s₀²/s² ~ χ²_ν₀, the conjugate prior. Given ŝ, therefore,

        s² ~ (ν₀ + ν) s̃²/χ²_{ν₀+ν},     s̃² = (ν₀s₀² + νŝ²)/(ν₀ + ν)

    ("moderated t": Smyth, Stat. Appl. Genet. Mol. Biol. 3, 3 (2004)), and with
    z ~ N(0, (α² + λ²/N_R) s²), where λ is the share of the ensemble mean in the prediction,
    z/(s̃√(α² + λ²/N_R)) is t with ν₀ + ν degrees of freedom.

    `std` is that of this t. E[ln N(z; 0, σ²) | ŝ] is highest at σ² = E[z² | ŝ], so no other
    function of ŝ has a Gaussian of higher expected likelihood; and E[σ²] = E[z²]. Without the prior
    (ν₀ = 0) the same σ is √(ν/(ν − 2)) times too wide for most points: it accounts for the few
    whose ŝ is small by chance.

    Attributes
    ----------
    prior_dof, prior_std : float
        ν₀ and s₀, of which ν₀ = 0 means no prior; s₀ has the units of y.
    """

    method = "student"
    n_parameters = 1

    prior_dof: float = 0.0
    prior_std: float = 1.0

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over α, each point with its own number of members.

        The prior matches mean m and variance τ² of ln s, which follow from ŝ alone: ln s is
        ln s₀ − ½ ln(χ²_ν₀/ν₀), so that τ² = ¼ψ′(ν₀/2).
        """
        m, _, tau = fit_log_std_prior(replace(data, n_components=1.0))
        log_half = brentq(lambda x: float(polygamma(1, np.exp(x))) - 4 * tau**2, -20.0, 20.0)
        dof = 2 * float(np.exp(log_half))
        prior_std = float(np.exp(m + log_std_moments(dof)[0]))
        self = cls(centre=data.centre, prior_dof=dof, prior_std=prior_std)
        nu, scale = self.dof(data.n_members), self._shrunk(data.ensemble_std, data.n_members)
        t2 = (data.residuals / scale) ** 2
        offset = data.mean(gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi))

        def negative_log_likelihood(log_alpha: float) -> float:
            k2 = np.exp(2 * log_alpha) + data.centre**2 / data.n_members
            tails = (nu + 1) * np.log1p(t2 / (nu * k2))
            return 0.5 * data.mean(np.log(k2) + tails) - offset

        # No scale outside of these bounds could explain the residuals.
        widest = 0.5 * float(np.log(np.max(t2)))
        bounds = (min(widest, 0.0) - 20, max(widest, 0.0) + 5)
        optimum = minimize_scalar(
            negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9}
        )
        # If z is smaller than the standard error of the ensemble mean, α = 0.
        at_zero = data.centre > 0 and negative_log_likelihood(-np.inf) <= optimum.fun
        return replace(self, alpha=0.0 if at_zero else float(np.exp(optimum.x))).fitted_to(data)

    def dof(self, n_members: int | IntArray) -> Float64Array:
        """Return the degrees of freedom ν₀ + N_R − 1."""
        return self.prior_dof + np.asarray(n_members, dtype=np.float64) - 1

    def predictive_dof(self, n_members: int) -> float:
        """Return ν₀ + N_R − 1 of the subsampled members."""
        return float(self.dof(self.n_subsampled or n_members))

    def _shrunk(self, ensemble_std: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return s̃, of which the square is the weighted mean of ŝ² and s₀²."""
        share = self.prior_dof / self.dof(n_members)
        s2 = np.asarray(ensemble_std, dtype=np.float64) ** 2
        return np.asarray(np.sqrt(share * self.prior_std**2 + (1 - share) * s2))

    def scale(self, ensemble_std: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the scale of the t distribution, s̃√(α² + λ²/N_R)."""
        k2 = self.alpha**2 + self.centre**2 / np.asarray(n_members, dtype=np.float64)
        return self._shrunk(ensemble_std, n_members) * np.sqrt(k2)

    def std(
        self, ensemble_std: FloatArray, n_members: int | IntArray, *_: Any, **__: Any
    ) -> Float64Array:
        """Return the standard deviation; the half-width of 68 % where t has no variance."""
        nu = self.dof(n_members)
        of_variance = np.sqrt(nu / np.where(nu > 2, nu - 2, 1.0))
        ratio = np.where(nu > 2, of_variance, stdtrit(nu, ndtr(1.0)))
        return np.asarray(ratio * self.scale(ensemble_std, n_members))

    def density_of(self, data: CalibrationData) -> Float64Array:
        """Return ln p(z | ŝ) of Student's t, of each point of the data: (n,)."""
        scale = self.scale(data.ensemble_std, data.n_members)
        return student_log_density(data.residuals, scale, self.dof(data.n_members))

    def typical_factor(self, n_members: int) -> float | None:
        """Return σ/ŝ at the geometric mean of s."""
        if self.prior_dof == 0:
            return super().typical_factor(n_members)
        typical = np.asarray(self.prior_std * np.exp(-log_std_moments(self.prior_dof)[0]))
        return float(self.std(typical, n_members) / typical)


# --- shrinkage ------------------------------------------------------------------------------------

#: Nodes of the quadrature of shrinkage.
NODES = np.linspace(-4.5, 4.5, 61)
#: Points that are integrated at once, whose arrays fit in the cache.
_CHUNK = 512
#: Size of the subset that the start of a larger fit of shrinkage is taken from.
START_POINTS = 2000
#: Bounds of ln α (after scaling by the typical standard deviation), γ, m and ln τ.
_SHRINKAGE_BOUNDS = [(-15.0, 15.0), GAMMA_RANGE, (-10.0, 10.0), (-6.0, 3.0)]


@dataclass(frozen=True, kw_only=True)
class ShrinkageCalibration(Calibration):
    """The variance of a new point is the posterior mean of α²s^{2γ} + λ²s²/N_R given its ŝ.

    Empirical Bayes: ŝ of each point is shrunk towards the distribution of all points,

        ln s ~ N(m, τ²),     (c−1)ŝ²/s² ~ χ²_{c−1},     z ~ N(0, α²s^{2γ} + λ²s²/c).

    α, γ, m and τ maximise the likelihood of the observed (z, ŝ), integrated over u = ln s by the
    trapezoidal rule, which for a smooth integrand that decays on both sides converges
    exponentially. The nodes follow the Gaussian approximation of the posterior, of width
    w = (2(c−1) + 1/τ²)^(−1/2): u = center + w sinh(x) with even x. They are dense where the
    posterior is large, and reach 45 w, for skewed posteriors and outlying z.

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
        n = len(data.residuals)
        if near is None and n > 2 * START_POINTS:
            near = cls.fit(data.some(np.arange(n) % (n // START_POINTS) == 0))
        log_unit = data.mean(np.log(data.ensemble_std))
        unit = np.exp(log_unit)
        scaled = replace(
            data, residuals=data.residuals / unit, ensemble_std=data.ensemble_std / unit
        )
        if isinstance(near, ShrinkageCalibration):
            m, tau, power = near.log_std_mean, near.log_std_std, near.gamma
            log_alpha, m = np.log(near.alpha) - (1 - power) * log_unit, m - log_unit
        else:
            m, _, tau = fit_log_std_prior(replace(scaled, n_components=1.0))
            # The median resists the tails that small ν gives to z²/ŝ².
            v = float(np.median((scaled.residuals / scaled.ensemble_std) ** 2)) / 0.455
            log_alpha, power, tau = 0.5 * np.log(max(v, 1e-12)), 1.0, max(tau, 0.1)
        theta = np.array([log_alpha, power, m, np.log(tau)])
        theta = np.clip(theta, *np.transpose(_SHRINKAGE_BOUNDS))
        for _ in range(5):
            previous = theta
            theta = minimize(
                _shrinkage_objective,
                theta,
                (scaled, theta[2], np.exp(theta[3])),
                jac=True,
                method="L-BFGS-B",
                bounds=_SHRINKAGE_BOUNDS,
            ).x
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
        least = np.exp(self.log_std_mean - 3 * self.log_std_std)
        flat, counts = np.maximum(s.reshape(-1), least), c.reshape(-1)
        variance = np.empty(flat.shape)
        for part in row_blocks(flat.size, _CHUNK):
            log_post, v = self._posterior(flat[part], counts[part])
            post = np.exp(log_post - log_post.max(axis=1, keepdims=True))
            variance[part] = np.sum(post * v, axis=1) / post.sum(axis=1)
        return np.sqrt(variance).reshape(s.shape)

    def density_of(self, data: CalibrationData) -> Float64Array:
        """Return ln p(z | ŝ), a mixture of Gaussians of all variances that ŝ allows: (n,)."""
        density = np.empty(len(data.residuals))
        for part in row_blocks(density.size, _CHUNK):
            log_post, v = self._posterior(data.ensemble_std[part], data.n_members[part])
            joint = log_post - 0.5 * (np.log(2 * np.pi * v) + data.residuals[part, None] ** 2 / v)
            density[part] = logsumexp(joint, axis=1) - logsumexp(log_post, axis=1)
        return density

    def _posterior(
        self, ensemble_std: Float64Array, c: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return ln p(u|ŝ), but for a constant, and the variance of z at the nodes."""
        m, tau = self.log_std_mean, self.log_std_std
        u, s2, log_weight = _quadrature(ensemble_std, c, m, tau)
        v = np.exp(2 * (np.log(self.alpha) + self.gamma * u))
        v += self.centre**2 * s2 / c[:, None]
        return log_weight - 0.5 * ((u - m) / tau) ** 2, v


def _quadrature(
    ensemble_std: Float64Array, c: IntArray, m: float, tau: float
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return nodes u, s² = exp(2u), and the logarithms of their weights, (n, Q) each.

    ∫ p(ŝ|u) f(u) du is the weighted sum of f(u). The nodes are placed at the posterior of u given
    ŝ, for a prior of mean m and width τ.

    q = (c−1)ŝ²/s² is χ² with ν = c−1, so the density of ln ŝ is 2q f_χ²(q) ∝ q^{ν/2} e^{−q/2}.
    """
    nu = (c - 1.0)[:, None]
    log_s = np.log(ensemble_std)[:, None]
    precision = 2 * nu + tau**-2
    center = (2 * nu * log_s + m / tau**2) / precision
    width = 1 / np.sqrt(precision)
    u = center + width * np.sinh(NODES)
    log_q = np.log(nu) + 2 * (log_s - u)
    q = np.exp(log_q)
    log_step = np.log(2 * (NODES[1] - NODES[0]) * np.cosh(NODES)) + np.log(width)
    constant = gammaln(nu / 2) + 0.5 * nu * np.log(2)
    log_weight = 0.5 * (nu * log_q - q) + (log_step - constant)
    return u, nu * ensemble_std[:, None] ** 2 / q, log_weight


def _shrinkage_objective(
    theta: Float64Array, data: CalibrationData, m_nodes: float, tau_nodes: float
) -> tuple[float, Float64Array]:
    """Return minus the mean ln p(z, ŝ), and its gradient in θ = (ln α, γ, m, ln τ).

    The nodes are those of a fixed m and τ, so the gradient is the posterior mean of the gradient of
    the integrand.
    """
    log_alpha, gamma, m, log_tau = theta
    tau2 = np.exp(2 * log_tau)
    n = len(data.residuals)
    log_density, gradients = np.empty(n), np.empty((n, 4))
    for part in row_blocks(n, _CHUNK):
        s, c = data.ensemble_std[part], data.n_members[part]
        u, s2, log_weight = _quadrature(s, c, m_nodes, tau_nodes)
        scaled_part = np.exp(2 * (log_alpha + gamma * u))
        v = scaled_part + data.centre**2 * s2 / c[:, None]
        ratio = data.residuals[part, None] ** 2 / v
        offset = u - m
        prior2 = offset**2 / tau2
        exponent = log_weight - 0.5 * (prior2 + ratio)
        largest = exponent.max(axis=1, keepdims=True)
        # 1/√v differs between the nodes by far less than what underflows.
        posterior = np.exp(exponent - largest) / np.sqrt(v)
        total = posterior.sum(axis=1, keepdims=True)
        posterior /= total
        log_density[part] = (np.log(total) + largest)[:, 0] - log_tau - np.log(2 * np.pi)
        d_log_v = posterior * (ratio - 1) * scaled_part / v
        gradients[part, 0] = d_log_v.sum(axis=1)
        gradients[part, 1] = np.einsum("bq,bq->b", d_log_v, u)
        gradients[part, 2] = np.einsum("bq,bq->b", posterior, offset) / tau2
        gradients[part, 3] = np.einsum("bq,bq->b", posterior, prior2) - 1
    return -data.mean(log_density), -(data.weights @ gradients) / data.weights.sum()


# --- sources --------------------------------------------------------------------------------------

#: Fewest independent points that determine several parameters, such as coefficients of sources.
MIN_POINTS = 20
#: Points that are enough to choose the sources, and to fit ν.
_N_SOURCES = 5000
#: Sources that are this close to the smallest AIC describe the points as well.
_AS_GOOD = 4.0
#: Share of out-of-bag points whose p is below the onset of the excess, and the most of their mean
#: log likelihood that the excess may cost.
_ONSET, _COST = 0.95, 0.02


@dataclass(frozen=True, kw_only=True)
class SourcesCalibration(Calibration):
    """Sum of several sources of variance of a sparse Gaussian process.

        σ² = (a² + λ²/c) s² + b² p² + c² q² + d²

    s is the standard deviation of subsampled members (disagreement), p that of the posterior of the
    full model (label-free: σ²φA⁻¹φᵀ), q what the representatives cannot describe (novelty), d a
    constant. Coefficients are not negative and maximise the Gaussian likelihood of out-of-bag
    points. E[ln N(z; 0, σ²)] is highest at σ² = E[z²], however z is distributed: σ is a standard
    deviation.

    Extrapolation. Beyond p₀, the 95 % quantile of p of the out-of-bag points, no data determine how
    σ² grows, and sources other than p hardly do. There, σ² is larger by the excess

        e² (p² − p₀²)₊,     e² = mean(z²/p²) of the out-of-bag points.

    where the smallest 5 % of p are set to the 5 % quantile. It is smaller if p differs by orders of
    magnitude and does not describe the errors, such as those of noisy labels: the mean log
    likelihood of the out-of-bag points is at most 0.02 lower than without the excess.

    Heavy tails. z/σ is taken to be Student's t of unit variance with ν > 2 degrees of freedom,

        ln p(z | σ) = ln t_ν(z/s) − ln s,     s² = σ² (ν − 2)/ν,

    whose ν maximises the likelihood at these σ; a Gaussian, 1/ν = 0, if that is better by AIC. Of
    such errors more than 68 % lie within ± σ: 77 % for ν = 4. Intervals follow from ν.

    The finite ensemble. Only ŝ is known, over c members: (c−1)ŝ²/s² ~ χ²_{c−1}, so that ln ŝ has a
    known bias and variance v about ln s. With the prior ln s ~ N(m + β ln p, τ²), estimated from
    all points, ln s given ŝ is about Gaussian, and s² is replaced by its posterior mean. It depends
    on c, which is smaller for out-of-bag points than for predictions.

    Attributes
    ----------
    posterior, novelty, floor : float
        b, c, and d in the units of y; a is `alpha`.
    log_std_mean, log_std_slope, log_std_std : float
        m, β and τ of the prior of ln s.
    n_components : float
        Independent components of vectors: their standard deviation has so many times c − 1 degrees
        of freedom.
    typical : float
        Root mean square of σ over that of the members weighted by a and b, without c, d and the
        prior.
    inverse_dof : float
        1/ν of Student's t, of standard deviation σ, that the errors follow; 0 for a Gaussian.
    excess, onset : float
        e and p₀; e = 0 without an excess.
    """

    method: ClassVar[str] = "sources"
    n_parameters: ClassVar[int] = 4

    posterior: float = 0.0
    novelty: float = 0.0
    floor: float = 0.0
    log_std_mean: float = 0.0
    log_std_slope: float = 0.0
    log_std_std: float = 1.0
    n_components: float = 1.0
    typical: float = 1.0
    inverse_dof: float = 0.0
    excess: float = 0.0
    onset: float = 0.0

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over the coefficients of those sources that pay by AIC.

        `near`, a fit to similar points, has chosen the sources.
        """
        n = len(data.residuals)
        if n < MIN_POINTS:
            raise CalibrationError(
                f"{n} points are too few to distinguish sources of variance; {MIN_POINTS} are "
                "needed. Use more data, or the calibration 'student'."
            )
        m, beta, tau = fit_log_std_prior(data, of_posterior=True)
        prior = cls(
            centre=data.centre,
            log_std_mean=m,
            log_std_slope=beta,
            log_std_std=tau,
            n_components=data.n_components,
        )
        s2 = prior.expected_square(data.ensemble_std, data.n_members, data.posterior_std)
        columns = {"alpha": s2, "floor": np.ones(n)}
        for name, std in (("posterior", data.posterior_std), ("novelty", data.novelty_std)):
            if std is not None and np.any(std > 0):
                columns[name] = std**2
        offset = data.centre**2 * s2 / data.n_members
        sources: tuple[str, ...] = ()
        if isinstance(near, SourcesCalibration):
            sources = tuple(name for name in columns if getattr(near, name))
        sources = sources or _choose_sources(data, columns, offset)
        X = np.stack([columns[name] for name in sources], axis=1)
        squares = _fit_variances(data.residuals, data.weights, X, offset)[0]
        coefficients: dict[str, Any] = dict(zip(sources, np.sqrt(squares).tolist(), strict=True))
        inside = replace(prior, **{"alpha": 0.0, **coefficients})
        excess, onset = fit_excess(data, inside.std_of(data))
        fitted = replace(inside, excess=excess, onset=onset).fitted_to(data)
        tails = fit_inverse_dof(data.residuals / fitted.std_of(data), data.weights)
        weighted = (fitted.alpha**2 + fitted.centre**2 / data.n_members) * data.ensemble_std**2
        if data.posterior_std is not None:
            weighted = weighted + (fitted.posterior * data.posterior_std) ** 2
        total, of_members = data.mean((data.scale * fitted.std_of(data)) ** 2), data.mean(weighted)
        typical = (total / of_members) ** 0.5 if of_members > 0 else 1.0
        return replace(fitted, typical=typical, inverse_dof=tails)

    def constant_factor(self, n_members: int) -> None:
        """Return none: σ is not ∝ ŝ."""

    def typical_factor(self, n_members: int) -> float:
        """Return the usual factor of the members weighted by a and b."""
        return self.typical

    def expected_square(
        self,
        ensemble_std: FloatArray,
        n_members: int | IntArray,
        posterior_std: FloatArray | None = None,
        n_posterior: int | None = None,
    ) -> Float64Array:
        """Return the posterior mean of s² given ŝ and p.

        Parameters
        ----------
        ensemble_std, n_members, posterior_std, n_posterior
            As in `std`. The sampling error of p adds to τ².
        """
        bias, v = log_std_moments(self.n_components * (np.asarray(n_members) - 1))
        tiny = np.finfo(np.float64).tiny
        log_s = np.log(np.maximum(ensemble_std, tiny)) - bias
        log_p, tau2 = np.zeros(np.shape(log_s)), np.asarray(self.log_std_std**2)
        if posterior_std is not None:
            log_p = np.log(np.maximum(posterior_std, tiny))
            if n_posterior is not None:
                bias_p, v_p = log_std_moments(self.n_components * (np.asarray(n_posterior) - 1))
                log_p, tau2 = log_p - bias_p, tau2 + self.log_std_slope**2 * v_p
        share = tau2 / (tau2 + v)
        prior = self.log_std_mean + self.log_std_slope * log_p
        return np.asarray(np.exp(2 * (share * log_s + (1 - share) * prior) + 2 * share * v))

    def std(
        self,
        ensemble_std: FloatArray,
        n_members: int | IntArray,
        posterior_std: FloatArray | None = None,
        novelty_std: FloatArray | None = None,
        n_posterior: int | None = None,
    ) -> Float64Array:
        """Return the calibrated standard deviation.

        Parameters
        ----------
        ensemble_std : (…) array
            ŝ.
        n_members : int or (…) array of int
            Number of members that ŝ is taken over.
        posterior_std, novelty_std : (…) arrays, optional
            p and q; ŝ is p if all members are drawn from the posterior.
        n_posterior : int, optional
            Number of posterior members that p is taken over; p is exact if not given.
        """
        if posterior_std is None and (self.posterior or self.excess):
            # All members are drawn from the posterior.
            posterior_std, n_posterior = ensemble_std, None
        s2 = self.expected_square(ensemble_std, n_members, posterior_std, n_posterior)
        n = np.asarray(n_members, dtype=np.float64)
        variance = (self.alpha**2 + self.centre**2 / n) * s2 + self.floor**2
        if posterior_std is not None:
            p2 = np.asarray(posterior_std, dtype=np.float64) ** 2
            variance = variance + self.posterior**2 * p2
            variance = variance + self.excess**2 * np.maximum(p2 - self.onset**2, 0.0)
        if novelty_std is not None:
            variance = variance + (self.novelty * np.asarray(novelty_std)) ** 2
        return np.asarray(np.sqrt(variance))

    def predictive_dof(self, n_members: int) -> float:
        """Return ν of the errors; infinite if they are Gaussian."""
        return 1 / self.inverse_dof if self.inverse_dof else np.inf

    def describe(self) -> str:
        """Return the coefficients of all sources that are used, and ν of heavy tails."""
        a2, symbols = self.alpha**2, {"posterior": "p", "novelty": "q"}
        if self.n_subsampled:
            a2 += self.centre**2 / self.n_subsampled
        used = [f"({a2**0.5:.3g} ŝ)²"] if a2 else []
        used += [f"({value:.3g} {symbols[n]})²" for n in symbols if (value := getattr(self, n))]
        used += [f"{self.floor:.3g}²"] if self.floor else []
        used += [f"{self.excess:.3g}² (p² − {self.onset:.3g}²)₊"] if self.excess else []
        tails = f", ν = {1 / self.inverse_dof:.3g}" if self.inverse_dof else ""
        return f"{self.method}, σ² = {' + '.join(used)}{tails}"

    def kinds(self, n_members: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return number and weight, a and b, of the subsampled and of the posterior members."""
        n = self.n_subsampled or n_members
        a, b = (self.alpha**2 + self.centre**2 / n) ** 0.5, self.posterior
        if n == n_members:  # all are of one kind
            a = float(np.hypot(a, b))
        if not (a or (b and n_members > n)):
            a = b = 1.0  # σ has other sources alone
        return (n, a), (n_members - n, b)

    @property
    def needs_novelty(self) -> bool:
        """Whether q is a source that is used."""
        return self.novelty > 0


def fit_excess(data: CalibrationData, std: Float64Array) -> tuple[float, float]:
    """Return e and p₀ of the excess of `SourcesCalibration`; zeros if p is not known, or zero.

    Parameters
    ----------
    data : CalibrationData
    std : (n,) array
        σ without the excess.
    """
    p = data.posterior_std
    if p is None:
        return 0.0, 0.0
    order = np.argsort(p, kind="stable")
    share = np.cumsum(data.weights[order]) / data.weights.sum()
    low, onset = p[order[np.searchsorted(share, [1 - _ONSET, _ONSET])]].tolist()
    if not low:
        return 0.0, 0.0
    excess = variance_scale(data.residuals, np.maximum(p, low), data.weights) ** 0.5
    beyond = p > onset
    z2, v, p2 = data.residuals[beyond] ** 2, std[beyond] ** 2, p[beyond] ** 2 - onset**2
    share = data.weights[beyond] / data.weights.sum()

    def cost(e: float) -> float:
        """Return by how much the excess lowers the mean log likelihood, less what it may."""
        ratio = 1 + e**2 * p2 / v
        return float(share @ (np.log(ratio) + (1 / ratio - 1) * z2 / v)) / 2 - _COST

    if cost(excess) > 0:
        excess = float(brentq(cost, 0.0, excess))
    return excess, onset


def fit_inverse_dof(z_scores: Float64Array, weights: Float64Array) -> float:
    """Return 1/ν of the t distribution of unit variance that z/σ (n,) follow; 0 for a Gaussian.

    ν maximises the likelihood. A Gaussian has one parameter fewer, so that n times the gain of the
    mean log likelihood has to exceed 1 (Akaike) for n points, (Σw)²/Σw² of their weights w (n,).
    """
    some = slice(None, None, -(-len(z_scores) // _N_SOURCES))
    u, n = z_scores[some], n_effective(weights)
    share = weights[some] / weights[some].sum()

    def minus_log_likelihood(x: float) -> float:
        scale = np.full(len(u), np.sqrt(1 - 2 * x))  # s/σ = √((ν − 2)/ν)
        return -float(share @ student_log_density(u, scale, 1 / x))

    # t has no variance at 1/ν = 1/2, and cannot be told from a Gaussian near 0.
    fit = minimize_scalar(minus_log_likelihood, bounds=(1e-4, 0.5 - 1e-4), method="bounded")
    gaussian = -float(share @ gaussian_log_density(u, np.ones(len(u))))
    return float(fit.x) if n * (gaussian - float(fit.fun)) > 1 else 0.0


def _choose_sources(
    data: CalibrationData, columns: Mapping[str, Float64Array], offset: Float64Array
) -> tuple[str, ...]:
    """Return the sources that describe the points, and of these the ones of most p.

    Akaike's criterion is 2k − 2 ln L + 2k(k + 1)/(n − k − 1) of n points, (Σw)²/Σw² of weights w:
    those of groups, or of atoms and components, whose errors are less correlated. Sets of sources
    whose criterion exceeds the smallest by no more than `_AS_GOOD` are equally good for points like
    these. Elsewhere p, which grows with the distance from the training set, is better. `columns`
    are multiplied by the squares of the coefficients; `offset` is added.
    """
    z, weights, n = data.residuals, data.weights, n_effective(data.weights)
    if data.element is None and data.component_std is None:
        n = data.n_independent  # copies, and others of a group, count as one
    some = slice(None, None, -(-len(z) // _N_SOURCES))

    def assess(names: tuple[str, ...]) -> tuple[float, float]:
        """Return Akaike's criterion, and the share of p in the mean variance."""
        k, X = len(names), np.stack([columns[name][some] for name in names], axis=1)
        theta, minus_log_l = _fit_variances(z[some], weights[some], X, offset[some], n_starts=1)
        parts = theta * (weights[some] @ X)
        share = parts[names.index("posterior")] / parts.sum() if "posterior" in names else 0.0
        return 2 * k + 2 * n * minus_log_l + 2 * k * (k + 1) / max(n - k - 1, 1e-9), float(share)

    subsets = (names for k in range(1, len(columns) + 1) for names in combinations(columns, k))

    def possible(names: tuple[str, ...]) -> bool:
        """Return whether no point is without all of them; q of new points may be zero."""
        return names != ("novelty",) and bool(np.all(sum(columns[n] for n in names) + offset > 0))

    assessed = {names: assess(names) for names in subsets if possible(names)}
    limit = min(aic for aic, _ in assessed.values()) + _AS_GOOD
    as_good = [names for names, (aic, _) in assessed.items() if aic <= limit]
    # Without p, or with as much of it to a percent, the smallest criterion.
    return max(as_good, key=lambda names: (round(assessed[names][1], 2), -assessed[names][0]))


def _fit_variances(
    z: Float64Array,
    weights: Float64Array,
    X: Float64Array,
    offset: Float64Array,
    n_starts: int | None = None,
) -> tuple[Float64Array, float]:
    """Return θ ≥ 0 that maximises the likelihood of z ~ N(0, Xθ + offset), and −ln L per point.

    The logarithms of the shares t of the mean square error are varied, from even shares and from
    each alone, or from some of these: the likelihood may have several maxima.
    """
    share = weights / weights.sum()
    square = float(share @ z**2)
    unit = square / (share @ X)
    k = X.shape[1]

    def objective(t: Float64Array) -> tuple[float, Float64Array]:
        parts = X * (unit * np.exp(t))
        v = parts.sum(axis=1) + offset
        ratio = z**2 / v
        gradient = (share * 0.5 * (1 - ratio) / v) @ parts
        return float(share @ (np.log(v) + ratio)) / 2, gradient

    starts = [np.full(k, -np.log(k))]
    if k > 1:
        starts += [np.where(np.arange(k) == j, 0.0, -5.0) for j in range(k)]
    fits = [
        minimize(objective, t, jac=True, method="L-BFGS-B", bounds=[(-20.0, 5.0)] * k)
        for t in starts[:n_starts]
    ]
    best = min(fits, key=lambda fit: float(fit.fun))
    return unit * np.exp(best.x), float(best.fun) + 0.5 * float(np.log(2 * np.pi))


# --- registry -------------------------------------------------------------------------------------


#: Calibrations by name.
METHODS: dict[str, type[Calibration]] = {
    cls.method: cls
    for cls in (
        NoCalibration,
        LinearCalibration,
        PowerCalibration,
        StudentCalibration,
        ShrinkageCalibration,
    )
}
#: Calibrations of sparse Gaussian processes, which have further sources of variance.
MODEL_METHODS = METHODS | {SourcesCalibration.method: SourcesCalibration}
#: Numbers that each method fits.
N_PARAMETERS = {method: cls.n_parameters for method, cls in MODEL_METHODS.items()}
#: Methods for which ŝ is exact, so that they need no members, and those that account for their
#: number.
STD_METHODS = tuple(m for m, cls in MODEL_METHODS.items() if not cls.needs_members)
MEMBER_METHODS = tuple(m for m, cls in MODEL_METHODS.items() if cls.needs_members)


def class_of(method: str) -> type[Calibration]:
    """Return the calibration of this name."""
    if method not in MODEL_METHODS:
        raise unknown_choice("method", method, MODEL_METHODS)
    return MODEL_METHODS[method]


def check_ensemble_method(method: str, *, has_members: bool) -> None:
    """Reject names other than "auto" and those of methods for ensembles, with or without members.

    Parameters
    ----------
    method : str
    has_members : bool
        Whether there are members, and not only their standard deviations.
    """
    usable = tuple(METHODS) if has_members else STD_METHODS
    if method in ("auto", *usable):
        return
    if method not in MODEL_METHODS:
        raise unknown_choice("method", method, ("auto", *usable))
    lacking = "members, and there are standard deviations only"
    if method not in METHODS:
        lacking = "the variances of a sparse Gaussian process, which no ensemble of others has"
    raise InputError(
        f"The method {method!r} needs {lacking}. Use `method='auto'`, or one of "
        f"{', '.join(usable)}.",
        parameter="method",
    )


#: Ranges of parameters; others are between 0 and 10¹⁰⁰. Logarithms are those of standard
#: deviations.
_RANGES = {
    "gamma": GAMMA_RANGE,
    "centre": (0.0, 1.0),
    "log_likelihood": (-1e100, 1e100),
    "log_std_mean": (-300.0, 300.0),
    "log_std_slope": (-100.0, 100.0),
    "log_std_std": (1e-6, 100.0),
    "n_components": (1.0, 10.0),
    "n_calibrated": (0.0, 0.0),  # that of a model follows from its calibrations
    "inverse_dof": (0.0, 0.5 - 1e-6),
}


def build_calibration(method: str, parameters: Mapping[str, Any]) -> Calibration:
    """Build a calibration from the result of `Calibration.parameters`; numbers are checked."""
    for name, value in parameters.items():
        low, high = _RANGES.get(name, (0.0, 1e100))
        if check_number(name, value, low) > high:
            raise InputError(f"`{name}` is {value}; it is at most {high:g}.", parameter=name)
        if name in ("n_points", "n_subsampled"):
            check_integer(name, value, 0)
    return class_of(method)(**parameters)


def fit_calibration(
    data: CalibrationData, method: str = "student", near: Calibration | None = None
) -> Calibration:
    """Fit one calibration by name.

    Parameters
    ----------
    data : CalibrationData
    method : str
    near : Calibration, optional
        A fit to similar points, which may be a start.
    """
    cls = class_of(method)
    if method != "none" and not np.any(data.residuals[data.weights > 0]):
        raise CalibrationError(
            f"All residuals are exactly zero, so no scale can be found (points: "
            f"{len(data.residuals)}). Use more points."
        )
    if cls.needs_members and data.n_members.min() < 3:
        raise CalibrationError(
            f"Some points have only {data.n_members.min()} members; {method=} needs at least 3. "
            "Use more members, or method='linear'."
        )
    return cls.fit(data, near)


def with_enough_points(method: str, n: int) -> str:
    """Return the method, or `student`, with a warning, if n points are too few for it."""
    if n >= MIN_POINTS or method in STD_METHODS or N_PARAMETERS.get(method) == 1:
        return method
    warn(
        f"{n} out-of-bag points are too few for the {method} calibration; {MIN_POINTS} are needed. "
        "The student calibration is used."
    )
    return "student"
