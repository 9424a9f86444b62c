"""How well so many points determine a score: bootstrap intervals of all scores at once.

Points are drawn with replacement, or whole groups of them where their errors are correlated, as
those of the atoms of one structure are. A resample is nothing but how often each point counts, so
that what takes time, the sorting, is done once: every score of a resample is a sum with these
counts as weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf

from qualms.core.checks import check_integer, check_members, check_points, check_std
from qualms.core.likelihood import covering_levels, gaussian_log_density
from qualms.core.pointwise import (
    ensemble_crps,
    gaussian_crps,
    gaussian_half_width,
    interval_scores,
)
from qualms.core.scores import Scores, score_arrays
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError

#: Scores that measure a distance from calibration. They are never negative, and noise, that of the
#: resampling included, makes them larger: see `bootstrap_scores`.
DISTANCES = ("miscalibration_area", "ence")
#: Fraction of the truths within one σ of a calibrated Gaussian prediction.
EXPECTED_WITHIN = float(erf(np.sqrt(0.5)))


@dataclass(frozen=True)
class ScoreIntervals:
    """Scores with confidence intervals, made by :func:`bootstrap_scores`.

    Attributes
    ----------
    scores : Scores
        Of all points.
    intervals : mapping of str to tuple of two floats
        Lower and upper end for each score, by its name; each holds the score itself. Empty if
        there is but one group to draw from, which says nothing about others.
    level : float
        Claimed coverage of the intervals.
    n_bootstrap : int
        Number of resamples.
    n_groups : int
        What was drawn in each: so many groups, or points.
    """

    scores: Scores
    intervals: Mapping[str, tuple[float, float]]
    level: float
    n_bootstrap: int
    n_groups: int


def bootstrap_scores(
    y: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    members: ArrayLike | None = None,
    *,
    groups: ArrayLike | None = None,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> ScoreIntervals:
    """Compute all scores of a set of predictions, with bootstrap confidence intervals.

    The intervals are quantiles of the scores of resamples. The two distances from calibration,
    miscalibration area and ENCE, are larger in a resample than in the data, by as much as they are
    larger in the data than in the limit of many points; their intervals are those quantiles
    reflected at the score (the "basic" bootstrap), not below zero, and stretched to hold the score.

    Parameters
    ----------
    y, mean, std : array_like of shape (n,) or (n, n_targets)
        True values, predictions and standard deviations > 0, in the same units.
    members : array_like of shape y.shape + (n_members,), optional
        Predictions of at least two members, for ``crps_ensemble``.
    groups : array_like of y.shape or of shape (n,), optional
        Labels of points that belong together, such as the atoms of one structure, and are drawn
        together. Each row by itself by default.
    n_bootstrap : int
        Number of resamples, at least 20.
    level : float
        Coverage of the intervals, within (0, 1).
    rng : numpy Generator, optional
        The same generator gives the same intervals; seeded with 0 by default.

    Returns
    -------
    ScoreIntervals
    """
    check_integer("n_bootstrap", n_bootstrap, 20)
    if not 0.0 < level < 1.0:
        raise InputError("level", level, "a number within (0, 1)")
    scores = score_arrays(y, mean, std, members)
    truth = check_points("y", y)
    group_of = _group_numbers(groups, truth)
    n_groups = int(group_of.max()) + 1
    if n_groups < 2:
        return ScoreIntervals(scores, {}, level, n_bootstrap, n_groups)
    z, sigma = (truth - np.asarray(mean)).ravel(), check_std(std, truth.shape).ravel()
    ensemble = None
    if members is not None:
        ensemble = ensemble_crps(truth.ravel(), check_members(members, truth.shape), fair=True)
    parts: list[Callable[[Float64Array], dict[str, float]]]
    parts = [_Means(z, sigma, ensemble), _Area(z, sigma)]
    parts += [_Ence(z, sigma), _Spearman(z, sigma)]
    draw = np.random.default_rng(0) if rng is None else rng
    resampled: dict[str, list[float]] = {}
    for _ in range(n_bootstrap):
        counts = _counts(draw, n_groups, group_of)
        for part in parts:
            for name, value in part(counts).items():
                resampled.setdefault(name, []).append(value)
    intervals = {
        field.name: _interval(field.name, getattr(scores, field.name), resampled[field.name], level)
        for field in fields(Scores)
        if field.name in resampled
    }
    return ScoreIntervals(scores, intervals, level, n_bootstrap, n_groups)


@dataclass(frozen=True)
class OneSigma:
    """How the truth lies to intervals of ±σ, made by :func:`bootstrap_one_sigma`.

    Attributes
    ----------
    within : float
        Fraction of points with |z| ≤ σ; `EXPECTED_WITHIN` if Gaussian and calibrated.
    within_interval : tuple of two floats, or None
        Its confidence interval; None if there is but one group of points.
    factor : float
        By which σ must be multiplied for that fraction to be right: above one if error bars are too
        small. Unlike the root mean square of z/σ, a few far errors do not change it.
    factor_interval : tuple of two floats, or None
    """

    within: float
    within_interval: tuple[float, float] | None
    factor: float
    factor_interval: tuple[float, float] | None


def bootstrap_one_sigma(
    residuals: ArrayLike,
    std: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> OneSigma:
    """Count truths within one σ, and find the factor that would make the count right.

    Parameters
    ----------
    residuals, std : array_like of shape (n,) or (n, n_targets)
        z = y − ȳ and σ > 0, in the units of y.
    groups, n_bootstrap, level, rng
        As in :func:`bootstrap_scores`.

    Returns
    -------
    OneSigma
    """
    z = check_points("residuals", residuals)
    with np.errstate(over="ignore"):
        t = (np.abs(z) / check_std(std, z.shape)).ravel()
    group_of = _group_numbers(groups, z)
    n_groups = int(group_of.max()) + 1
    order = np.argsort(t, kind="stable")
    t, group_of = t[order], group_of[order]
    inside = int(np.searchsorted(t, 1.0, side="right"))

    def count(weights: Float64Array) -> tuple[float, float]:
        covered = np.cumsum(weights)
        last = np.searchsorted(covered, EXPECTED_WITHIN * covered[-1])
        return float(np.sum(weights[:inside]) / covered[-1]), float(t[last])

    within, factor = count(np.ones(t.size))
    if n_groups < 2:
        return OneSigma(within, None, factor, None)
    draw = np.random.default_rng(0) if rng is None else rng
    resampled = [count(_counts(draw, n_groups, group_of)) for _ in range(n_bootstrap)]
    tail = 0.5 * (1.0 - level)
    (a, b), (c, d) = np.quantile(resampled, [tail, 1.0 - tail], axis=0).T.tolist()
    return OneSigma(within, (a, b), factor, (c, d))


def _counts(draw: np.random.Generator, n_groups: int, group_of: IntArray) -> Float64Array:
    """Draw as many groups as there are, and return how often each point was drawn."""
    drawn = np.bincount(draw.integers(n_groups, size=n_groups), minlength=n_groups)
    counts: Float64Array = drawn[group_of].astype(np.float64)
    return counts


def _group_numbers(groups: ArrayLike | None, truth: Float64Array) -> IntArray:
    """Return the group of each point, numbered from 0."""
    labels = np.arange(len(truth)) if groups is None else np.asarray(groups)
    if labels.shape not in (truth.shape, truth.shape[:1]):
        raise InputError("groups", f"shape {labels.shape}", f"{truth.shape}, a label per point")
    if labels.shape != truth.shape:
        labels = np.repeat(labels, truth[0].size)
    return np.unique(labels.ravel(), return_inverse=True)[1].ravel()


def _interval(name: str, score: float, resampled: list[float], level: float) -> tuple[float, float]:
    """Return the interval of one score from its values in the resamples."""
    tail = 0.5 * (1.0 - level)
    low, high = (float(q) for q in np.quantile(resampled, [tail, 1.0 - tail]))
    if name in DISTANCES:
        low, high = max(2.0 * score - high, 0.0), max(2.0 * score - low, 0.0)
    return min(low, score), max(high, score)


class _Means:
    """Scores that are means over points, or square roots of such."""

    def __init__(self, z: Float64Array, sigma: Float64Array, ensemble: Float64Array | None) -> None:
        # Squares of numbers that are at most one cannot overflow.
        self._largest = {"rmse": max(float(np.abs(z).max()), 1e-300), "sharpness": sigma.max()}
        with np.errstate(over="ignore"):
            t = np.abs(z) / sigma
        terms = {
            "rmse": np.square(z / self._largest["rmse"]),
            "mae": np.abs(z),
            # Minus infinity times a count of zero would not be a number.
            "log_likelihood": np.maximum(gaussian_log_density(z, sigma), -1e300),
            "crps": gaussian_crps(np.abs(z), sigma),
            "sharpness": np.square(sigma / self._largest["sharpness"]),
            "coverage_68": t <= gaussian_half_width(0.68),
            "coverage_95": t <= gaussian_half_width(0.95),
            "interval_score_95": interval_scores(
                np.abs(z), gaussian_half_width(0.95) * sigma, 0.95
            ),
        }
        if ensemble is not None:
            terms["crps_ensemble"] = ensemble
        self._names = tuple(terms)
        self._terms = np.stack([np.asarray(v, dtype=np.float64) for v in terms.values()])

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        means = dict(zip(self._names, (self._terms @ counts / counts.sum()).tolist(), strict=True))
        for name, largest in self._largest.items():
            means[name] = float(largest * np.sqrt(means[name]))
        return means


class _Area:
    """The miscalibration area: an integral over the covering levels in their order."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        levels = covering_levels(z, sigma)
        self._order = np.argsort(levels)
        self._right = np.append(levels[self._order], 1.0)
        self._left = np.insert(levels[self._order], 0, 0.0)

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        covered = np.cumsum(counts[self._order])
        steps = np.insert(covered / covered[-1], 0, 0.0)
        right, left = self._right - steps, self._left - steps
        area = 0.5 * np.sum(right * np.abs(right) - left * np.abs(left))
        return {"miscalibration_area": float(area)}


class _Ence:
    """The expected normalised calibration error, in bins of equal count in the order of σ."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        order = np.argsort(sigma, kind="stable")
        sigma = sigma[order]
        self._order = order
        # Where the run of equal σ begins that each point belongs to: runs are not divided.
        self._run = np.searchsorted(sigma, sigma, side="left")
        # In units of the largest, squares cannot overflow.
        largest = max(float(np.abs(z).max()), 1e-300)
        self._squares = np.square(np.stack([sigma / sigma[-1], z[order] / largest]))
        self._ratio = largest / float(sigma[-1])
        self._n_bins = int(np.clip(sigma.size // 10, 1, 10))

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        w = counts[self._order]
        ends = np.cumsum(w)
        n = int(ends[-1])
        n_bins = min(self._n_bins, n)
        first = np.searchsorted(ends, np.arange(n_bins) * n // n_bins, side="right")
        starts = np.unique(self._run[first])
        variance, square = np.add.reduceat(self._squares * w, starts, axis=1)
        # Each bin has points, but their squares can underflow if σ differ by 150 decades.
        known = variance > 0.0
        ratio = self._ratio * np.sqrt(square[known] / variance[known])
        return {"ence": float(np.mean(np.abs(1.0 - ratio)))}


class _Spearman:
    """The rank correlation of |z| and σ, equal values sharing the average of their ranks."""

    def __init__(self, z: Float64Array, sigma: Float64Array) -> None:
        self._which = [np.unique(v, return_inverse=True)[1].ravel() for v in (np.abs(z), sigma)]

    def __call__(self, counts: Float64Array) -> dict[str, float]:
        a, b = (self._centered_ranks(which, counts) for which in self._which)
        # Sums rather than products of vectors, which BLAS would hand to several threads.
        weighted = a * counts
        norm = np.sqrt(np.sum(weighted * a) * np.sum(b * b * counts))
        if norm == 0.0:
            return {"spearman": 0.0}
        return {"spearman": float(np.clip(np.sum(weighted * b) / norm, -1.0, 1.0))}

    @staticmethod
    def _centered_ranks(which: IntArray, counts: Float64Array) -> Float64Array:
        of_value = np.bincount(which, weights=counts)
        ranks = np.cumsum(of_value) - 0.5 * (of_value + counts.sum())
        centered: Float64Array = ranks[which]
        return centered
