"""Calibration of three sources of variance of a sparse Gaussian process.

    σ² = (a² + λ²/c) s² + b² p² + c² q² + d²

s is the standard deviation of subsampled members (disagreement), p that of the posterior of the
full model (label-free: σ²φA⁻¹φᵀ), q what the representatives cannot describe (novelty), d a
constant. Coefficients are not negative and maximise the Gaussian likelihood of out-of-bag points.
E[ln N(z; 0, σ²)] is highest at σ² = E[z²], however z is distributed: σ is a standard deviation.

Heavy tails. z/σ is taken to be Student's t of unit variance with ν > 2 degrees of freedom,

    ln p(z | σ) = ln t_ν(z/s) − ln s,     s² = σ² (ν − 2)/ν,

whose ν maximises the likelihood at these σ; a Gaussian, 1/ν = 0, if that is better by AIC. Of such
errors more than 68 % lie within ± σ: 77 % for ν = 4. Intervals follow from ν.

The finite ensemble. Only ŝ is known, over c members: (c−1)ŝ²/s² ~ χ²_{c−1}, so that ln ŝ has a
known bias and variance v about ln s. With the prior ln s ~ N(m + β ln p, τ²), estimated from all
points, ln s given ŝ is about Gaussian, and s² is replaced by its posterior mean. It depends on c,
which is smaller for out-of-bag points than for predictions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Self

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.methods import fit_log_std_prior, log_std_moments, require_three_members
from qualms.errors import CalibrationError, QualmsWarning
from qualms.metrics import gaussian_log_density, student_log_density

#: Fewest points for which the coefficients of several sources can be distinguished.
MIN_POINTS = 20
#: Points that are enough to choose the sources, and to fit ν.
_ENOUGH = 5000
#: Bounds of the logarithm of the share of a source in the mean square error.
_BOUNDS = (-20.0, 5.0)
#: Bounds of 1/ν: t has no variance at 1/2, and cannot be told from a Gaussian below the first.
_TAILS = (1e-4, 0.5 - 1e-4)


@dataclass(frozen=True, kw_only=True)
class SourcesCalibration(Calibration):
    """σ² = (α² + λ²/c) s² + b² p² + c² q² + d².

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

    @classmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood over the coefficients of those sources that pay by AIC.

        `near`, a fit to similar points, has chosen the sources.
        """
        require_three_members(data, cls.method)
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
        known = data.centre**2 * s2 / data.n_members
        sources: tuple[str, ...] = ()
        if isinstance(near, SourcesCalibration):
            sources = tuple(name for name in columns if getattr(near, name))
        sources = sources or _choose(data, columns, known)
        X = np.stack([columns[name] for name in sources], axis=1)
        squares = _fit_variances(data.residuals, data.weights, X, known)[0]
        found: dict[str, Any] = dict(zip(sources, np.sqrt(squares).tolist(), strict=True))
        fitted = replace(prior, **{"alpha": 0.0, **found}).fitted_to(data)
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
        """Return the posterior mean of s² given ŝ of so many members, and p.

        p is exact, or the standard deviation of so many posterior members, whose sampling error
        adds to τ².
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
        """Return the calibrated standard deviation; p is exact if `n_posterior` is not given."""
        s2 = self.expected_square(ensemble_std, n_members, posterior_std, n_posterior)
        n = np.asarray(n_members, dtype=np.float64)
        variance = (self.alpha**2 + self.centre**2 / n) * s2 + self.floor**2
        if posterior_std is not None:
            variance = variance + (self.posterior * np.asarray(posterior_std)) ** 2
        if novelty_std is not None:
            variance = variance + (self.novelty * np.asarray(novelty_std)) ** 2
        return np.asarray(np.sqrt(variance))

    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return the Gaussian ln p(z | ŝ) per point, of the ensemble and the constant alone."""
        return gaussian_log_density(residuals, self.std(ensemble_std, n_members))

    def density_of(self, data: CalibrationData) -> Float64Array:
        """Return the Gaussian ln p(z | ŝ, p, q) of each point of the data: (n,)."""
        return gaussian_log_density(data.residuals, self.std_of(data))

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
        tails = f", ν = {1 / self.inverse_dof:.3g}" if self.inverse_dof else ""
        return f"{self.method}, σ² = {' + '.join(used)}{tails}"

    def kinds(self, n_members: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return number and weight, a and b, of the subsampled and of the posterior members."""
        n = self.n_subsampled or n_members
        a, b = (self.alpha**2 + self.centre**2 / n) ** 0.5, self.posterior
        if not (a or (b and n_members > n)):
            a = b = 1.0  # σ has other sources alone
        return (n, a), (n_members - n, b)

    @property
    def needs_novelty(self) -> bool:
        """Whether q is a source that is used."""
        return self.novelty > 0


def fit_inverse_dof(z_scores: Float64Array, weights: Float64Array) -> float:
    """Return 1/ν of the t distribution of unit variance that z/σ (n,) follow; 0 for a Gaussian.

    ν maximises the likelihood. A Gaussian has one parameter fewer, so that n times the gain of the
    mean log likelihood has to exceed 1 (Akaike) for n points, (Σw)²/Σw² of their weights w (n,).
    """
    some = slice(None, None, -(-len(z_scores) // _ENOUGH))
    u, n = z_scores[some], float(weights.sum() ** 2 / (weights @ weights))
    share = weights[some] / weights[some].sum()

    def minus_log_likelihood(x: float) -> float:
        scale = np.full(len(u), np.sqrt(1 - 2 * x))  # s/σ = √((ν − 2)/ν)
        return -float(share @ student_log_density(u, scale, 1 / x))

    fit = minimize_scalar(minus_log_likelihood, bounds=_TAILS, method="bounded")
    gaussian = -float(share @ gaussian_log_density(u, np.ones(len(u))))
    return float(fit.x) if n * (gaussian - float(fit.fun)) > 1 else 0.0


def with_enough_points(method: str, n: int) -> str:
    """Return the method, or `student`, with a warning, if n points are too few for it."""
    if method not in ("sources", "shrinkage", "auto") or n >= MIN_POINTS:
        return method
    warnings.warn(
        f"{n} out-of-bag points are too few for the {method} calibration; {MIN_POINTS} are needed. "
        "The student calibration is used.",
        QualmsWarning,
        stacklevel=2,
    )
    return "student"


def _choose(
    data: CalibrationData, columns: Mapping[str, Float64Array], known: Float64Array
) -> tuple[str, ...]:
    """Return those sources whose AIC is the smallest.

    2k − 2 ln L + 2k(k + 1)/(n − k − 1) of n points, (Σw)²/Σw² of their weights w. `columns` are the
    squares that the squares of the coefficients multiply; `known` is added.
    """
    z, weights = data.residuals, data.weights
    n = float(weights.sum() ** 2 / (weights @ weights))
    some = slice(None, None, -(-len(z) // _ENOUGH))

    def aic(names: tuple[str, ...]) -> float:
        k, X = len(names), np.stack([columns[name][some] for name in names], axis=1)
        minus_log_likelihood = _fit_variances(z[some], weights[some], X, known[some], n_starts=1)[1]
        return 2 * k + 2 * n * minus_log_likelihood + 2 * k * (k + 1) / max(n - k - 1, 1e-9)

    subsets = (names for k in range(1, len(columns) + 1) for names in combinations(columns, k))

    def possible(names: tuple[str, ...]) -> bool:
        """Return whether no point is without all of them; q of new points may be zero."""
        return names != ("novelty",) and bool(np.all(sum(columns[n] for n in names) + known > 0))

    return min(filter(possible, subsets), key=aic)


def _fit_variances(
    z: Float64Array,
    weights: Float64Array,
    X: Float64Array,
    known: Float64Array,
    n_starts: int | None = None,
) -> tuple[Float64Array, float]:
    """Return θ ≥ 0 that maximises the likelihood of z ~ N(0, Xθ + known), and −ln L per point.

    The logarithms of the shares t of the mean square error are varied, from even shares and from
    each alone, or from some of these: the likelihood may have several maxima.
    """
    share = weights / weights.sum()
    square = float(share @ z**2)
    unit = square / (share @ X)
    k = X.shape[1]

    def objective(t: Float64Array) -> tuple[float, Float64Array]:
        parts = X * (unit * np.exp(t))
        v = parts.sum(axis=1) + known
        ratio = z**2 / v
        gradient = (share * 0.5 * (1 - ratio) / v) @ parts
        return float(share @ (np.log(v) + ratio)) / 2, gradient

    starts = [np.full(k, -np.log(k))]
    if k > 1:
        starts += [np.where(np.arange(k) == j, 0.0, -5.0) for j in range(k)]
    fits = [
        minimize(objective, t, jac=True, method="L-BFGS-B", bounds=[_BOUNDS] * k)
        for t in starts[:n_starts]
    ]
    best = min(fits, key=lambda fit: float(fit.fun))
    return unit * np.exp(best.x), float(best.fun) + 0.5 * float(np.log(2 * np.pi))
