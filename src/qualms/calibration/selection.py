"""Confidence intervals of α and γ, and the choice of a method.

A maximum likelihood estimate θ is off by H⁻¹ Σ s, where H is minus the second derivative of the log
likelihood and s the gradient that each point contributes, so that its covariance is H⁻¹ J H⁻¹ with
J = Σ s sᵀ (the "sandwich": White, Econometrica 50, 1 (1982)). It holds for errors that are not
distributed as the method assumes, and, with s summed over groups first, for points whose errors
are correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.fitting import METHODS, N_PARAMETERS, fit_calibration
from qualms.calibration.groups import GroupedCalibration, fit_grouped
from qualms.calibration.methods import GAMMA_RANGE
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import group_codes, group_scatter
from qualms.metrics import gaussian_log_density

#: Step of the derivative of gradients, in ln α, γ, m and ln τ.
_STEP = 1e-4
#: γ closer to a bound than this is at the bound.
_AT_BOUND = 1e-3
#: A calibration set with fewer independent points is small.
FEW = 20
#: Negligible differences of the mean log likelihood.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class ConfidenceIntervals:
    """Intervals (lower, upper) of the parameters of a calibration, and their probability.

    An interval is None if the data do not determine the parameter, such as γ if all standard
    deviations are equal.
    """

    alpha: tuple[float, float] | None
    gamma: tuple[float, float] | None
    level: float


def confidence_intervals(
    calibration: Calibration,
    data: CalibrationData,
    *,
    level: float = 0.95,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Return intervals of α and γ from the curvature of the likelihood.

    At a bound (α = 0, γ = 0) they are from the profile likelihood: all values at which the highest
    log likelihood is less than half a quantile of χ² below its maximum. The interval of α is then
    that at the γ of the calibration. Groups count as one point each.

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
        raise InputError(
            f"`level` is {level}; it must be a probability between 0 and 1.", parameter="level"
        )
    if calibration.n_parameters == 0:
        return ConfidenceIntervals((1.0, 1.0), (1.0, 1.0), level)
    codes = group_codes(groups, len(data.residuals))
    n_groups = int(codes.max()) + 1
    if calibration.alpha == 0:

        def of_alpha(alpha: float) -> float:
            return data.mean(replace(calibration, alpha=alpha).density_of(data))

        alpha = _profile(of_alpha, 0.0, np.inf, n_groups, level)
        return ConfidenceIntervals(alpha, (1.0, 1.0), level)
    theta, scores = calibration.scores(data)
    gamma: tuple[float, float] | None = (calibration.gamma, calibration.gamma)
    bounds = [bound for bound in GAMMA_RANGE if abs(calibration.gamma - bound) < _AT_BOUND]
    if calibration.n_parameters > 1 and (bounds or not calibration.is_identifiable(data)):
        # γ is not varied: the interval is that of α at this γ.
        rest, all_scores = theta[1:], scores
        theta, scores = theta[:1], lambda at: all_scores(np.append(at, rest))[:, :1]
        gamma = None
        for bound in bounds:
            other = sum(GAMMA_RANGE) - bound
            gamma = _profile(
                lambda g: type(calibration).profile(data, g)[0], bound, other, n_groups, level
            )
    variances = _sandwich(theta, scores, data.weights, codes)
    if variances is None:
        return ConfidenceIntervals(None, gamma, level)
    half = -float(stdtrit(max(n_groups - 1, 1), (1 - level) / 2)) * np.sqrt(variances)
    lower, upper = theta - half, theta + half
    if len(theta) > 1:
        gamma = (max(float(lower[1]), 0.0), float(upper[1]))
    return ConfidenceIntervals((float(np.exp(lower[0])), float(np.exp(upper[0]))), gamma, level)


def _profile(
    log_likelihood: Callable[[float], float], bound: float, other: float, n: int, level: float
) -> tuple[float, float]:
    """Return the values from a bound, where the likelihood is highest, towards the other one.

    `log_likelihood` is the mean over points, of which n are independent.
    """
    floor = log_likelihood(bound) - 0.5 * float(ndtri(0.5 * (1 + level))) ** 2 / n
    end = other
    if not np.isfinite(end):
        end = 1.0
        while log_likelihood(end) > floor:
            end *= 2
    if log_likelihood(end) < floor:
        end = float(brentq(lambda x: log_likelihood(x) - floor, bound, end, xtol=1e-4))
    return (min(bound, end), max(bound, end))


def _sandwich(
    theta: Float64Array,
    scores: Callable[[Float64Array], Float64Array],
    weights: Float64Array,
    codes: IntArray,
) -> Float64Array | None:
    """Return the diagonal of H⁻¹ J H⁻¹, or None if the likelihood has no maximum inside."""
    steps = _STEP * np.eye(len(theta))
    H = np.stack([weights @ (scores(theta - h) - scores(theta + h)) / (2 * _STEP) for h in steps])
    H = 0.5 * (H + H.T)
    values = np.linalg.eigvalsh(H)
    if not np.all(np.isfinite(H)) or values[0] <= 1e-9 * values[-1]:
        return None
    # At a maximum inside the bounds the gradients sum to zero, up to the accuracy of the search.
    J = group_scatter(weights[:, None] * scores(theta), codes)
    half = np.linalg.solve(H, J)
    return np.asarray(np.maximum(np.diag(np.linalg.solve(H, half.T)), 0.0))


@dataclass(frozen=True)
class Candidate:
    """One method, evaluated on points that it was not fitted to.

    Attributes
    ----------
    calibration : Calibration
        Fitted to all points; it has the information criteria.
    log_likelihood : float
        Mean over points left out of ln N(z; 0, σ²), the Gaussian of the calibrated σ.
    behind, standard_error : float
        Difference to the best method, and its standard error.
    grouped : GroupedCalibration, optional
        The calibration with a factor for each group, if there are groups.
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
        """The method of fewest parameters, of at least one, among those as good as the best."""
        best = self.candidates[0]
        fitted = (c for c in self.candidates if c.is_as_good and c.n_parameters)
        return best if not best.n_parameters else min(fitted, key=lambda c: c.n_parameters)


def candidate_methods(data: CalibrationData, n_independent: int) -> tuple[str, ...]:
    """Return the methods to choose from for data of so many independent points.

    `student` and `shrinkage` are `linear` and `power` that account for the number of members, if
    there are three or more. Few points determine one parameter.
    """
    methods = ("none", "student", "shrinkage")
    if data.n_members.min() < 3:
        methods = ("none", "linear", "power")
    most = len(data.residuals) - 1 if n_independent >= FEW else 1
    return tuple(m for m in methods if N_PARAMETERS[m] <= most)


def choose_calibration(data: CalibrationData) -> Calibration:
    """Return the calibration that cross-validation, with the groups of the data, chooses."""
    codes = group_codes(data.groups, len(data.residuals))
    methods = candidate_methods(data, int(codes.max()) + 1)
    return cross_validate(data, methods, groups=codes).chosen.calibration


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
    kinds = np.full(n, "") if labels is None else np.asarray(labels, dtype=str)

    def fit(
        method: str, kept: BoolArray, near: GroupedCalibration | None = None
    ) -> GroupedCalibration:
        some = data.some(kept)
        if labels is not None:
            return fit_grouped(some, method, kinds[kept], clusters=codes[kept], near=near)
        overall = None if near is None else near.overall
        return GroupedCalibration(fit_calibration(some, method, overall), {})

    densities: dict[str, Float64Array] = {}
    fitted: dict[str, GroupedCalibration] = {}
    parts: dict[str, tuple[GroupedCalibration, ...]] = {}
    failures: dict[str, str] = {}
    for done, method in enumerate(methods, start=1):
        try:
            near = fitted[method] = fit(method, np.ones(n, dtype=bool))
            parts[method] = tuple(fit(method, ~left_out, near) for left_out in folds)
            density = np.empty(n)
            for left_out, part in zip(folds, parts[method], strict=True):
                some = data.some(left_out)
                std = part.std_of(some, kinds[left_out])
                density[left_out] = gaussian_log_density(some.residuals, std) - np.log(some.scale)
            densities[method] = density
        except CalibrationError as error:
            failures[method] = str(error)
        if on_method is not None:
            on_method(done)
    if not densities:
        raise CalibrationError(next(iter(failures.values())))
    best = max(densities, key=lambda method: data.mean(densities[method]))
    candidates = []
    for method, density in densities.items():
        differences = densities[best] - density
        behind, total = data.mean(differences), float(data.weights.sum())
        scatter = group_scatter((data.weights * (differences - behind))[:, None], codes)
        candidates.append(
            Candidate(
                calibration=fitted[method].overall,
                log_likelihood=data.mean(density),
                behind=behind,
                standard_error=float(np.sqrt(scatter[0, 0])) / total,
                grouped=None if labels is None else fitted[method],
            )
        )
    candidates.sort(key=lambda c: -c.log_likelihood)
    return Comparison(tuple(candidates), failures, tuple(folds), parts)


def make_folds(codes: IntArray, n_folds: int, seed: int = 0) -> list[BoolArray]:
    """Split points with group codes (n,), 0 … G−1, into folds that share no group.

    Return masks of the points to leave out; no more than there are groups.
    """
    if n_folds < 2:
        raise InputError(f"`n_folds` is {n_folds}; at least 2 are needed.", parameter="n_folds")
    n_groups = int(codes.max()) + 1
    if n_groups < 2:
        raise InputError(
            "All points belong to one of the `groups`; at least 2 are needed, so that one can be "
            "left out.",
            parameter="groups",
        )
    n_folds = min(n_folds, n_groups)
    fold = (np.random.default_rng(seed).permutation(n_groups) % n_folds)[codes]
    return [fold == k for k in range(n_folds)]
