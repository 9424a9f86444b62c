"""Calibration that knows that a committee is finite.

With c members that did not see a point,

    y⁽ⁱ⁾ ~ N(μ, s²), i = 1 … c,      y ~ N(μ, α²s²),      z = y − mean(y⁽ⁱ⁾).

z is Gaussian with variance (α² + 1/c)s², because the mean of the committee is itself uncertain;
(c−1)ŝ²/s² is χ² with c−1 degrees of freedom and independent of z. Hence

    z / (ŝ √(α² + 1/c))  ~  Student's t with c−1 degrees of freedom.

The linear calibration, Eq. (9), ignores both: small c inflates its z²/ŝ², so calibrating on the few
absent members of a large sub-sample overestimates the errors of the whole committee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, stdtrit

from qualms.core.calibration.base import (
    Calibration,
    CalibrationData,
    refuse_exact,
    with_likelihood,
)
from qualms.core.likelihood import student_log_density
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import CalibrationError

#: Φ(1): the probability below +σ of a Gaussian.
_ONE_SIGMA = 0.8413447460685429


@dataclass(frozen=True, kw_only=True)
class StudentCalibration(Calibration):
    """Student's t predictive with scale ŝ√(α² + 1/N_R) and N_R − 1 degrees of freedom.

    As a Gaussian error bar it has the variance of that t, (N_R−1)/(N_R−3) (α² + 1/N_R) ŝ². With two
    or three members t has no variance; the error bar is then the half-width of its central 68 %
    interval.
    """

    method = "student"
    n_parameters = 1

    def scale(self, spread: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the scale of the t distribution, ŝ√(α² + 1/N_R)."""
        n = np.asarray(n_members, dtype=np.float64)
        return np.asarray(spread, dtype=np.float64) * np.sqrt(self.alpha**2 + 1 / n)

    def std(self, spread: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the calibrated standard deviation."""
        nu = np.asarray(n_members, dtype=np.float64) - 1
        has_variance = nu > 2
        ratio = np.where(
            has_variance,
            np.sqrt(nu / np.where(has_variance, nu - 2, 1.0)),
            stdtrit(nu, _ONE_SIGMA),
        )
        widened: Float64Array = ratio * self.scale(spread, n_members)
        return widened

    def log_density(
        self, residuals: FloatArray, spread: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ) of Student's t, per point."""
        dof = np.asarray(n_members, dtype=np.float64) - 1
        return student_log_density(residuals, self.scale(spread, n_members), dof)


def fit_student(data: CalibrationData) -> StudentCalibration:
    """Maximise the likelihood of Student's t over α, each point with its own number of members."""
    if data.n_members.min() < 3:
        raise CalibrationError(
            f"Some points have only {data.n_members.min()} members; method='student' needs at "
            "least 3. Use more members, or method='linear'."
        )
    refuse_exact(data)
    nu = data.n_members - 1.0
    t2 = (data.residuals / data.spread) ** 2
    offset = data.mean(gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi))

    def negative_log_likelihood(log_alpha: float) -> float:
        k2 = np.exp(2 * log_alpha) + 1 / data.n_members
        tails = (nu + 1) * np.log1p(t2 / (nu * k2))
        return 0.5 * data.mean(np.log(k2) + tails) - offset

    # No scale outside of these bounds could explain the residuals.
    widest = 0.5 * float(np.log(np.max(t2)))
    bounds = (min(widest, 0.0) - 20, max(widest, 0.0) + 5)
    found = minimize_scalar(
        negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9}
    )
    # The truth may be less spread than the mean of the members is uncertain: then α = 0.
    at_zero = negative_log_likelihood(-np.inf) <= found.fun
    alpha = 0.0 if at_zero else float(np.exp(found.x))
    return with_likelihood(StudentCalibration(alpha=alpha), data)


def student_scores(
    calibration: StudentCalibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return θ = (ln α,), and the gradient of ln p(z | ŝ) of each point.

    With k² = α² + 1/c and u = z²/(ν k² ŝ²) the density is −½ ln k² − ½(ν+1) ln(1 + u) + constant,
    and its derivative in ln α is (α²/k²)((ν+1) u/(1+u) − 1).
    """
    nu = data.n_members - 1.0
    t2 = (data.residuals / data.spread) ** 2

    def scores(at: Float64Array) -> Float64Array:
        alpha2 = np.exp(2 * at[0])
        k2 = alpha2 + 1 / data.n_members
        u = t2 / (nu * k2)
        gradient: Float64Array = (alpha2 / k2 * ((nu + 1) * u / (1 + u) - 1))[:, None]
        return gradient

    return np.array([np.log(calibration.alpha)]), scores
