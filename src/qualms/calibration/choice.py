"""The choice of a method, by likelihood or cross-validation, and confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, stdtrit

from qualms.arrays import BoolArray, Float64Array, StrArray
from qualms.calibration.groups import GroupedCalibration, fit_grouped
from qualms.calibration.methods import (
    MEMBER_METHODS,
    METHODS,
    MIN_POINTS,
    N_PARAMETERS,
    STD_METHODS,
    Calibration,
    NoCalibration,
    fit_calibration,
)
from qualms.calibration.points import CalibrationData, make_folds
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import group_scatter
from qualms.metrics import gaussian_log_density


def out_of_bag_points(data: CalibrationData, method: str) -> BoolArray:
    """Return which out-of-bag points (n,) a method is fitted to.

    E[z²/ŝ²] ∝ (c − 1)/(c − 3) is infinite for c = 3 members. Methods that neglect the sampling
    error of ŝ are fitted to points absent from five members or more, as in the paper; if there are
    fewer than 30 such points, to all. The others account for c and use all points.
    """
    often_absent: BoolArray = data.n_members >= 5
    neglects = method in STD_METHODS and N_PARAMETERS[method] > 0
    if neglects and np.count_nonzero(often_absent) >= 30:
        return often_absent
    return np.ones(len(data.n_members), dtype=bool)


def fit_out_of_bag(data: CalibrationData, method: str = "student") -> Calibration:
    """Fit one calibration by name to out-of-bag points: Eq. (12)."""
    return fit_calibration(data.some(out_of_bag_points(data, method)), method)


def fit_best(data: CalibrationData, methods: Collection[str]) -> Calibration:
    """Fit some methods to out-of-bag points; return the one of highest likelihood, by AIC.

    Likelihoods are those of Gaussians. Methods that do not account for the number of members are
    left out, as are those that cannot be fitted; the result is "none" if no other is left.
    """
    fitted: list[Calibration] = []
    for method in reversed(MEMBER_METHODS):
        if method in methods:
            with suppress(CalibrationError):
                fitted.append(fit_out_of_bag(data, method))

    def score(calibration: Calibration) -> float:
        density = gaussian_log_density(data.residuals, calibration.std_of(data))
        return data.n_independent * data.mean(density) - calibration.n_parameters

    return max(fitted, key=score) if fitted else NoCalibration.fit(data)


@dataclass(frozen=True)
class ConfidenceIntervals:
    """Intervals (lower, upper) of the parameters of a calibration, and their probability.

    An interval is None if the data do not determine the parameter, such as γ if all standard
    deviations are equal, or any if all points are of one group.
    """

    alpha: tuple[float, float] | None
    gamma: tuple[float, float] | None
    level: float


def confidence_intervals(
    calibration: Calibration,
    data: CalibrationData,
    *,
    level: float = 0.95,
) -> ConfidenceIntervals:
    """Return intervals of α and γ from a bootstrap over the groups of the data.

    The calibration is fitted again to G groups drawn with replacement, 200 times, and the intervals
    are quantiles of its parameters. Those of few groups are too narrow by the factor that
    Student's t is wider than a Gaussian, so that their quantiles lie further out ("expanded
    percentiles": Hesterberg, Am. Stat. 69, 371 (2015)). Of more than 1000 points, the G groups are
    drawn from a subset of so many points, and of at least 50 groups, and deviations are those from
    the fit to the subset ("little bootstrap": Kleiner et al., J. R. Stat. Soc. B 76, 795 (2014)).

    Parameters
    ----------
    calibration : Calibration
        Fitted to these data.
    data : CalibrationData
        Points of one group are drawn together.
    level : float
        Probability covered, in (0, 1).
    """
    if not 0 < level < 1:
        raise InputError(
            f"`level` is {level}; it must be a probability between 0 and 1.", parameter="level"
        )
    n, codes = len(data.residuals), data.codes
    n_groups = int(codes.max()) + 1
    if n_groups < 2:
        return ConfidenceIntervals(None, None, level)
    rng = np.random.default_rng(0)
    n_subset = min(n_groups, max(n_groups * 1000 // n, 50))
    codes = rng.permutation(n_groups)[codes]
    subset, codes = data.some(codes < n_subset), codes[codes < n_subset]

    def refit(weights: Float64Array) -> list[float]:
        drawn = replace(subset, weights=weights).some(weights > 0)
        fitted = fit_calibration(drawn, calibration.method, calibration)
        return [fitted.alpha, fitted.gamma]

    try:
        parameters = [refit(subset.weights)]
    except CalibrationError:  # few errors are not zero
        return ConfidenceIntervals(None, None, level)
    for _ in range(200):
        counts = np.bincount(rng.integers(n_subset, size=n_groups), minlength=n_subset)
        with suppress(CalibrationError):
            parameters.append(refit(subset.weights * counts[codes]))
    tail = ndtr(np.sqrt(n_groups / (n_groups - 1)) * stdtrit(n_groups - 1, 0.5 * (1 - level)))
    quantiles = np.quantile(parameters, [tail, 1 - tail], axis=0)
    shift = np.array([calibration.alpha, calibration.gamma]) - parameters[0]
    low, high = np.maximum(quantiles + shift, 0.0).tolist()
    # γ matters if σ ∝ s^γ depends on the point, by one per cent.
    proportional = replace(calibration, gamma=1.0, centre=0.0).std_of(data)
    varied = calibration.n_parameters < 2 or np.ptp(np.log(proportional)) > 0.01
    return ConfidenceIntervals((low[0], high[0]), (low[1], high[1]) if varied else None, level)


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
        """Whether the best is ahead by no more than one standard error, or by next to nothing."""
        return self.behind <= max(self.standard_error, 1e-4)


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


def candidate_methods(data: CalibrationData) -> tuple[str, ...]:
    """Return the methods to choose from.

    `student` and `shrinkage` are `linear` and `power` that account for the number of members, if
    there are three or more. Few points, or groups of them, determine one parameter.
    """
    similar = MEMBER_METHODS if data.n_members.min() >= 3 else STD_METHODS
    most = len(data.residuals) - 1 if data.codes.max() + 1 >= MIN_POINTS else 1
    return tuple(m for m in METHODS if m in ("none", *similar) and N_PARAMETERS[m] <= most)


def choose_calibration(data: CalibrationData) -> Calibration:
    """Return the calibration that cross-validation chooses."""
    return cross_validate(data, candidate_methods(data)).chosen.calibration


def cross_validate(
    data: CalibrationData,
    methods: Sequence[str] = tuple(METHODS),
    *,
    labels: Sequence[str] | StrArray | None = None,
    n_folds: int = 5,
    seed: int = 0,
    on_method: Callable[[int], object] | None = None,
) -> Comparison:
    """Compare methods by the likelihood of points that they were not fitted to.

    Parameters
    ----------
    data : CalibrationData
        Points of one group are left out together.
    methods : sequence of str
    labels : (n,) array of str, optional
        Kinds of points, each of which gets a factor of its own with every method.
    n_folds : int
        Number of folds.
    seed : int
        Of the split into folds.
    on_method : callable, optional
        Called with the number of methods that have been fitted.
    """
    n, codes = len(data.residuals), data.codes
    folds = make_folds(codes, n_folds, seed)
    kinds = np.full(n, "") if labels is None else np.asarray(labels, dtype=str)

    def fit(
        method: str, chosen: BoolArray, near: GroupedCalibration | None = None
    ) -> GroupedCalibration:
        some = data.some(chosen)
        if labels is not None:
            return fit_grouped(some, method, kinds[chosen], near)
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
