"""Confidence intervals of α and γ, and the choice of a method.

A maximum likelihood estimate θ is off by H⁻¹ Σ s, where H is minus the second derivative of the log
likelihood and s the gradient that each point contributes, so that its covariance is H⁻¹ J H⁻¹ with
J = Σ s sᵀ (the "sandwich": White, Econometrica 50, 1 (1982)). It holds for errors that are not
distributed as the method assumes, and, with s summed over groups first, for points whose errors
are correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.groups import GroupedCalibration, fit_grouped
from qualms.calibration.methods import (
    PowerCalibration,
    StudentCalibration,
    is_constant,
    power_scores,
    student_scores,
)
from qualms.calibration.shrinkage import ShrinkageCalibration, shrinkage_scores
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import group_codes, group_scatter

#: Step of the derivative of gradients, in ln α, γ, m and ln τ.
_STEP = 1e-4
#: Spreads whose logarithms scatter by less than this, τ, are equal.
_ALIKE = 0.01


@dataclass(frozen=True)
class ConfidenceIntervals:
    """Intervals (lower, upper) of the parameters of a calibration, and their probability.

    That of γ is None if all spreads are equal, so that γ is not identifiable.
    """

    alpha: tuple[float, float]
    gamma: tuple[float, float] | None
    level: float


def bootstrap_intervals(
    data: CalibrationData,
    method: str = "student",
    *,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Resample the points with replacement and fit the calibration each time.

    Parameters
    ----------
    data : CalibrationData
    method : str
    n_bootstrap : int
        Number of resampled fits, at least 20.
    level : float
        Probability covered, in (0, 1).
    rng : numpy.random.Generator, optional
        Seeded with 0 if not given.
    groups : (n,) array, optional
        Labels of points whose errors are correlated: whole groups are then resampled.
    """
    if n_bootstrap < 20:
        raise InputError("n_bootstrap", n_bootstrap, "at least 20")
    if not 0 < level < 1:
        raise InputError("level", level, "a probability between 0 and 1")
    rng = np.random.default_rng(0) if rng is None else rng
    n = len(data.residuals)
    codes = group_codes(groups, n)
    n_groups = int(codes.max()) + 1
    pairs = np.empty((n_bootstrap, 2))
    near = fit_calibration(data, method)
    for b in range(n_bootstrap):
        times = np.bincount(rng.integers(n_groups, size=n_groups), minlength=n_groups)[codes]
        fitted = fit_calibration(data.reweighted(data.weights * times), method, near)
        pairs[b] = fitted.alpha, fitted.gamma
    lower, upper = np.quantile(pairs, [(1 - level) / 2, (1 + level) / 2], axis=0)
    gamma = (float(lower[1]), float(upper[1]))
    unidentifiable = near.n_parameters > 1 and _has_no_exponent(near, data)
    return ConfidenceIntervals(
        (float(lower[0]), float(upper[0])), None if unidentifiable else gamma, level
    )


def confidence_intervals(
    calibration: Calibration,
    data: CalibrationData,
    *,
    level: float = 0.95,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Return intervals of α and γ from the curvature of the likelihood.

    Where that is not defined (a parameter on a bound, spreads all alike) the points are resampled
    instead, by `bootstrap_intervals`.

    Parameters
    ----------
    calibration : Calibration
        Fitted to these data.
    data : CalibrationData
    level : float
        Probability covered, in (0, 1).
    groups : (n,) array, optional
        Labels of points whose errors are correlated.
    """
    if not 0 < level < 1:
        raise InputError("level", level, "a probability between 0 and 1")
    if calibration.n_parameters == 0:
        return ConfidenceIntervals((1.0, 1.0), (1.0, 1.0), level)
    if isinstance(calibration, StudentCalibration) and calibration.alpha == 0:
        return ConfidenceIntervals((0.0, _largest_alpha(data, level)), (1.0, 1.0), level)
    theta, scores = _scores(calibration, data)
    n = len(data.residuals)
    codes = group_codes(groups, n)
    unidentifiable = calibration.n_parameters > 1 and _has_no_exponent(calibration, data)
    if unidentifiable:
        # α and γ are not identifiable together: the interval is that of α at this γ.
        rest, all_scores = theta[1:], scores
        theta, scores = theta[:1], lambda at: all_scores(np.append(at, rest))[:, :1]
    variances = _sandwich(theta, scores, data.weights, codes)
    on_a_bound = len(theta) > 1 and not 1e-3 < calibration.gamma < 5 - 1e-3
    if variances is None or on_a_bound:
        return bootstrap_intervals(data, calibration.method, level=level, groups=groups)
    half = -float(stdtrit(max(int(codes.max()), 1), (1 - level) / 2)) * np.sqrt(variances)
    log_alpha = theta[0]
    gamma: tuple[float, float] = (calibration.gamma, calibration.gamma)
    if len(theta) > 1:
        gamma = (max(float(theta[1] - half[1]), 0.0), float(theta[1] + half[1]))
    alpha = (float(np.exp(log_alpha - half[0])), float(np.exp(log_alpha + half[0])))
    return ConfidenceIntervals(alpha, None if unidentifiable else gamma, level)


def _has_no_exponent(calibration: Calibration, data: CalibrationData) -> bool:
    """Whether all spreads are equal; for shrinkage, apart from sampling noise."""
    if isinstance(calibration, ShrinkageCalibration):
        return calibration.log_spread_std < _ALIKE
    return is_constant(data)


def _scores(
    calibration: Calibration, data: CalibrationData
) -> tuple[Float64Array, Callable[[Float64Array], Float64Array]]:
    """Return the parameters θ, and the gradient of each point's log likelihood as a function."""
    if isinstance(calibration, PowerCalibration):
        return power_scores(calibration, data)
    if isinstance(calibration, StudentCalibration):
        return student_scores(calibration, data)
    assert isinstance(calibration, ShrinkageCalibration)
    return shrinkage_scores(calibration, data)


def _sandwich(
    theta: Float64Array,
    scores: Callable[[Float64Array], Float64Array],
    weights: Float64Array,
    codes: IntArray,
) -> Float64Array | None:
    """Return the diagonal of H⁻¹ J H⁻¹, or None if the likelihood has no maximum inside."""
    steps = _STEP * np.eye(len(theta))
    slopes = [weights @ (scores(theta - h) - scores(theta + h)) / (2 * _STEP) for h in steps]
    H = np.stack(slopes)
    H = 0.5 * (H + H.T)
    values = np.linalg.eigvalsh(H)
    if not np.all(np.isfinite(H)) or values[0] <= 1e-9 * values[-1]:
        return None
    # At a maximum inside the bounds the gradients sum to zero, up to the accuracy of the search.
    J = group_scatter(weights[:, None] * scores(theta), codes)
    half = np.linalg.solve(H, J)
    variances: Float64Array = np.maximum(np.diag(np.linalg.solve(H, half.T)), 0.0)
    return variances


def _largest_alpha(data: CalibrationData, level: float) -> float:
    """Return the α at which the log likelihood is half a quantile of χ² below that of α = 0."""

    def log_likelihood(alpha: float) -> float:
        densities = StudentCalibration(alpha=alpha).log_density(
            data.residuals, data.spread, data.n_members
        )
        return float(data.weights @ densities)

    floor = log_likelihood(0.0) - 0.5 * float(ndtri(0.5 * (1 + level))) ** 2
    largest = 1.0
    while log_likelihood(largest) > floor:
        largest *= 2
    return float(brentq(lambda alpha: log_likelihood(alpha) - floor, 0.0, largest, xtol=1e-6))


# Choice of a method: information criteria, and cross-validation.
#: Negligible differences of the mean log likelihood.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class Candidate:
    """One method, evaluated on points that it was not fitted to.

    Attributes
    ----------
    calibration : Calibration
        Fitted to all points; it has the information criteria.
    grouped : GroupedCalibration, optional
        The same with a factor for each group, if there are groups.
    log_likelihood : float
        Mean of ln p(z | ŝ) over points left out, under the predictive density of the method.
    behind, standard_error : float
        Difference to the best method, and its standard error.
    """

    calibration: Calibration
    log_likelihood: float
    behind: float
    standard_error: float
    grouped: GroupedCalibration | None = None

    @property
    def n_parameters(self) -> int:
        """Numbers that the method fits, factors of groups aside."""
        return self.calibration.n_parameters

    @property
    def is_as_good(self) -> bool:
        """Whether the best is ahead by no more than one standard error."""
        return self.behind <= max(self.standard_error, _NEGLIGIBLE)


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same points.

    Attributes
    ----------
    candidates : tuple of Candidate
        Those that could be fitted, the highest likelihood of points left out first.
    failures : dict of str to str
        Why the others could not be.
    folds : tuple of (n,) arrays of bool
        The points that were left out in turn.
    fold_calibrations : dict of str to tuple of GroupedCalibration
        By method, the fits to the other points; without groups if there are none.
    """

    candidates: tuple[Candidate, ...]
    failures: dict[str, str]
    folds: tuple[BoolArray, ...]
    fold_calibrations: dict[str, tuple[GroupedCalibration, ...]]

    @property
    def chosen(self) -> Candidate:
        """The method of fewest parameters among those as good as the best."""
        as_good = [c for c in self.candidates if c.is_as_good]
        return min(as_good, key=lambda c: c.calibration.n_parameters)


def compare_calibrations(
    data: CalibrationData, methods: Sequence[str] = tuple(METHODS), *, criterion: str = "bic"
) -> list[Calibration]:
    """Fit several calibrations to the same data and order them, best first, by AIC or BIC.

    All likelihoods are those of z given ŝ, so they can be compared.
    """
    if criterion not in ("aic", "bic"):
        raise InputError("criterion", repr(criterion), '"aic" or "bic"')
    fitted = [fit_calibration(data, method) for method in methods]
    return sorted(fitted, key=lambda c: c.aic if criterion == "aic" else c.bic)


def cross_validate(
    data: CalibrationData,
    methods: Sequence[str] = tuple(METHODS),
    *,
    groups: Sequence[object] | IntArray | None = None,
    labels: Sequence[str] | StrArray | None = None,
    n_folds: int = 5,
    seed: int = 0,
    on_method: Callable[[int], object] | None = None,
) -> Comparison:
    """Compare methods by the likelihood of points that they were not fitted to.

    Parameters
    ----------
    data : CalibrationData
    methods : sequence of str
    groups : (n,) array, optional
        Labels of points whose errors are correlated: they are left out together.
    labels : (n,) array of str, optional
        Kinds of points, each of which gets a factor of its own with every method.
    n_folds : int
        Number of folds.
    seed : int
        Of the split into folds.
    on_method : callable, optional
        Called with the number of methods that have been fitted.
    """
    n = len(data.residuals)
    codes = group_codes(groups, n)
    folds = make_folds(codes, n_folds, seed)
    densities: dict[str, Float64Array] = {}
    fitted: dict[str, GroupedCalibration] = {}
    parts: dict[str, tuple[GroupedCalibration, ...]] = {}
    failures: dict[str, str] = {}
    kinds = None if labels is None else np.asarray(labels, dtype=str)
    for done, method in enumerate(methods, start=1):
        try:
            fitted[method] = _fitted(data, method, kinds, codes)
            near = fitted[method]
            parts[method] = tuple(_fitted(data, method, kinds, codes, out, near) for out in folds)
            densities[method] = _left_out_densities(data, parts[method], folds, kinds)
        except CalibrationError as error:
            failures[method] = str(error)
        if on_method is not None:
            on_method(done)
    if not densities:
        raise CalibrationError(next(iter(failures.values())))
    means = {method: data.mean(density) for method, density in densities.items()}
    best = max(means, key=means.__getitem__)
    candidates = [
        Candidate(
            calibration=fitted[method].overall,
            log_likelihood=means[method],
            behind=means[best] - means[method],
            standard_error=_standard_error(densities[best] - density, data.weights, codes),
            grouped=None if labels is None else fitted[method],
        )
        for method, density in densities.items()
    ]
    candidates.sort(key=lambda c: -c.log_likelihood)
    return Comparison(tuple(candidates), failures, tuple(folds), parts)


def make_folds(codes: IntArray, n_folds: int, seed: int = 0) -> list[BoolArray]:
    """Split points into folds that share no group: masks of the points to leave out.

    Parameters
    ----------
    codes : (n,) array of int
        Groups 0 … G−1.
    n_folds : int
        At least 2; no more than there are groups are made.
    seed : int
    """
    if n_folds < 2:
        raise InputError("n_folds", n_folds, "at least 2")
    n_groups = int(codes.max()) + 1
    if n_groups < 2:
        raise InputError(
            "groups", "one group", "at least 2, so that one can be left out", "Add structures."
        )
    order = np.random.default_rng(seed).permutation(n_groups)
    fold = (order % min(n_folds, n_groups))[codes]
    return [fold == k for k in range(min(n_folds, n_groups))]


def _fitted(
    data: CalibrationData,
    method: str,
    kinds: StrArray | None,
    codes: IntArray,
    left_out: BoolArray | None = None,
    near: GroupedCalibration | None = None,
) -> GroupedCalibration:
    """Fit a method, with a factor for each kind of points if there are kinds."""
    if left_out is not None:
        data, codes = data.some(~left_out), codes[~left_out]
        kinds = None if kinds is None else kinds[~left_out]
    if kinds is not None:
        return fit_grouped(data, method, kinds, clusters=codes, near=near)
    overall = None if near is None else near.overall
    return GroupedCalibration(fit_calibration(data, method, overall), {})


def _left_out_densities(
    data: CalibrationData,
    calibrations: Sequence[GroupedCalibration],
    folds: Sequence[BoolArray],
    kinds: StrArray | None,
) -> Float64Array:
    density = np.empty(len(data.residuals))
    for left_out, fitted in zip(folds, calibrations, strict=True):
        rest = data.some(left_out)
        one = (rest.residuals, rest.spread, rest.n_members)
        if kinds is None:
            density[left_out] = fitted.overall.log_density(*one)
        else:
            density[left_out] = fitted.log_density(*one, kinds[left_out])
    return density


def _standard_error(differences: Float64Array, weights: Float64Array, codes: IntArray) -> float:
    """Return the standard error of a weighted mean of points in groups."""
    total = float(weights.sum())
    centered = weights * (differences - float(weights @ differences) / total)
    return float(np.sqrt(group_scatter(centered[:, None], codes)[0, 0])) / total
