"""Which calibration fits best: information criteria, and likelihoods of points left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qualms.core.calibration.base import Calibration, CalibrationData
from qualms.core.calibration.fitting import METHODS, fit_calibration
from qualms.core.calibration.grouped import GroupedCalibration, fit_grouped
from qualms.core.resampling import group_codes, group_scatter
from qualms.core.typing import BoolArray, Float64Array, IntArray, StrArray
from qualms.errors import CalibrationError, InputError

#: Differences of the mean log likelihood that are none.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class Candidate:
    """One method, judged on points that it was not fitted to.

    Attributes
    ----------
    calibration : Calibration
        Fitted to all points; it has the information criteria.
    grouped : GroupedCalibration, optional
        The same with a factor for each group, if there are groups.
    log_likelihood : float
        Mean of ln p(z | ŝ) over points left out, under the predictive density of the method.
    behind, standard_error : float
        How far that is behind the best method, and the standard error of this difference.
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
        By method, what was fitted to the others each time; without groups if there are none.
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
        Parts that are left out in turn.
    seed : int
        Of the division into parts.
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
    """Divide points into parts that share no group: masks of the points to leave out.

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
