"""Calibrations of ensemble standard deviations. Eqs. (8), (9), (12) and (19)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import digamma, gammaln, polygamma, stdtrit

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.errors import CalibrationError, InputError
from qualms.metrics import gaussian_log_density, student_log_density

#: Exponents tried by the power calibration. A larger standard deviation never
#: means a smaller error.
GAMMA_RANGE = (0.0, 5.0)
#: Standard deviations whose logarithms differ by less than this are equal.
_EQUAL = 1e-6
#: Φ(1): the probability below +σ of a Gaussian.
_ONE_SIGMA = 0.8413447460685429
#: Rounds of the moment estimate of the distribution of ln s, and its smallest variance τ².
_ROUNDS, _LEAST = 20, 1e-3
#: Values of ln ŝ further from the median than this multiple of the median distance are moved there.
_LIMIT = 6.0
#: Scatter of ln p that is too small to depend on.
_ALIKE = 0.05


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
        if np.ptp(log_std) >= _EQUAL:
            found = minimize_scalar(
                log_scale, bounds=GAMMA_RANGE, method="bounded", options={"xatol": 1e-8}
            )
            gamma = min((float(found.x), *GAMMA_RANGE), key=log_scale)  # it ends beside a bound
        alpha = float(np.exp(log_scale(gamma) - gamma * center))
        return cls(alpha=alpha, gamma=gamma).fitted_to(data)

    def std(
        self, ensemble_std: FloatArray, n_members: int | IntArray, *_: Any, **__: Any
    ) -> Float64Array:
        """Return α σ^γ."""
        return self.alpha * np.asarray(ensemble_std, dtype=np.float64) ** self.gamma

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return the Gaussian ln p(z | ŝ), Eq. (5), per point."""
        return gaussian_log_density(residuals, self.std(ensemble_std, n_members))


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


def log_std_moments(dof: float | FloatArray) -> tuple[Float64Array, Float64Array]:
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
    limit = _LIMIT * float(np.median(np.abs(log_s - median)))
    log_s = np.clip(log_s, median - limit, median + limit)
    design, typical = np.ones((len(log_s), 1)), 0.0
    if of_posterior and data.posterior_std is not None and np.all(data.posterior_std > 0):
        log_p = np.log(data.posterior_std)
        typical = float(np.mean(log_p))
        if np.std(log_p) > _ALIKE:
            design = np.column_stack([design, log_p - typical])
    tau2 = 1.0
    for _ in range(_ROUNDS):
        w = data.weights / (v + tau2)
        root = np.sqrt(w)
        coefficients = np.linalg.lstsq(design * root[:, None], log_s * root, rcond=None)[0]
        residuals = log_s - design @ coefficients
        tau2 = max(float(np.average(residuals**2 - v, weights=w)), _LEAST)
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
        require_three_members(data, cls.method)
        m, _, tau = fit_log_std_prior(replace(data, n_components=1.0))
        dof = 2 * _inverse_trigamma(4 * tau**2)
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
        found = minimize_scalar(
            negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9}
        )
        # If z is smaller than the standard error of the ensemble mean, α = 0.
        at_zero = data.centre > 0 and negative_log_likelihood(-np.inf) <= found.fun
        return replace(self, alpha=0.0 if at_zero else float(np.exp(found.x))).fitted_to(data)

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
        ratio = np.where(nu > 2, of_variance, stdtrit(nu, _ONE_SIGMA))
        return np.asarray(ratio * self.scale(ensemble_std, n_members))

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ) of Student's t, per point."""
        scale = self.scale(ensemble_std, n_members)
        return student_log_density(residuals, scale, self.dof(n_members))

    def typical_factor(self, n_members: int) -> float | None:
        """Return σ/ŝ at the geometric mean of s."""
        if self.prior_dof == 0:
            return super().typical_factor(n_members)
        typical = np.asarray(self.prior_std * np.exp(-log_std_moments(self.prior_dof)[0]))
        return float(self.std(typical, n_members) / typical)


def _inverse_trigamma(value: float) -> float:
    """Return the x at which ψ′(x) has this value, by bisection of ln x."""
    return float(np.exp(brentq(lambda x: float(polygamma(1, np.exp(x))) - value, -20.0, 20.0)))


@dataclass(frozen=True)
class StdExtrapolation:
    """The power law σ_n ∝ n^(−β) √(1 − n/N), with β = `exponent` and N = `n_train`."""

    exponent: float
    n_train: int

    def alpha(self, subsample: int) -> float:
        """Return the factor from the standard deviation of subsamples of this size to N."""
        if not 0 < subsample < self.n_train:
            raise InputError(
                f"`subsample` is {subsample}; it must lie between 0 and N = {self.n_train}.",
                parameter="subsample",
            )
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
        raise InputError(
            f"`subsamples` are {list(subsamples)}; at least two different sizes 1 ≤ n < N = "
            f"{n_train} are needed, one for each array of standard deviations.",
            parameter="subsamples",
        )
    if not all(
        np.size(s) and np.all(np.isfinite(s)) and np.all(np.asarray(s) > 0) for s in ensemble_stds
    ):
        raise InputError(
            "Some of the `ensemble_stds` are not positive finite numbers.",
            parameter="ensemble_stds",
        )
    log_sigma = np.array([np.mean(np.log(s)) for s in ensemble_stds]) - 0.5 * np.log(
        1 - n / n_train
    )
    return StdExtrapolation(-float(np.polyfit(np.log(n), log_sigma, 1)[0]), n_train)
