"""From an ensemble with references to a calibration, and to how good it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qualms.core.calibration import (
    METHODS,
    N_PARAMETERS,
    Calibration,
    Candidate,
    Comparison,
    ConfidenceIntervals,
    GroupedCalibration,
    confidence_intervals,
    cross_validate,
)
from qualms.core.resampling import group_codes
from qualms.core.scores import Scores, score_arrays
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import CalibrationError, InputError
from qualms.external.doubts import FEW, doubts_about
from qualms.external.ensemble import Ensemble, Points, usable_points
from qualms.prediction import Prediction

#: Methods for error bars without members: the others count members.
ERROR_BAR_METHODS = ("none", "linear", "power")
#: Methods of at most one parameter, for few points.
_MODEST = ("none", "linear", "student")
N_FOLDS = 5


@dataclass(frozen=True)
class ScaleInterval:
    """The α of the most likely method that has one, where the error bars are left as they are."""

    method: str
    alpha: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return f"by {self.method}, α = {self.alpha:.3g}, between {low:.3g} and {high:.3g}"


@dataclass(frozen=True)
class Calibrated:
    """A calibration, and what is known about it.

    Attributes
    ----------
    points : Points
        What it was fitted to.
    calibration : Calibration
    grouped : GroupedCalibration, optional
        With a factor for each group.
    intervals : ConfidenceIntervals
        Of α and γ.
    scale : ScaleInterval, optional
        What a scale of the error bars would be, if the method has none.
    comparison : Comparison
        All methods on points left out.
    std : (n,) array
        Calibrated error bars of the points, each by a calibration that was fitted to others.
    before, after : Scores
        With the spread as it is, and with `std`.
    reason : str
        Why this method.
    remarks : tuple of str
        What the user must know.
    """

    points: Points
    calibration: Calibration
    grouped: GroupedCalibration | None
    intervals: ConfidenceIntervals
    scale: ScaleInterval | None
    comparison: Comparison
    std: Float64Array
    before: Scores
    after: Scores
    reason: str
    remarks: tuple[str, ...]

    @property
    def prediction(self) -> Prediction:
        """The points with calibrated error bars, and before calibration."""
        return self.points.prediction(self.std)


def calibrate_ensemble(
    ensemble: Ensemble,
    method: str = "auto",
    *,
    level: float = 0.95,
    seed: int = 0,
    on_method: Callable[[int], object] | None = None,
) -> Calibrated:
    """Fit a calibration, for each group if there are labels, and judge it on points left out.

    Parameters
    ----------
    ensemble : Ensemble
        With references. If it says who saw what, every point is predicted by the members that did
        not see it; if not, no member must have seen any.
    method : {"auto", "none", "linear", "power", "student", "shrinkage"}
        "auto" takes the method of fewest parameters among those that are, on points left out, as
        likely as the best.
    level : float
        Of the confidence intervals.
    seed : int
        Of the division into parts that are left out in turn.
    on_method : callable, optional
        Called with the number of methods that have been compared.
    """
    if method not in ("auto", *METHODS):
        raise InputError("method", repr(method), f"one of auto, {', '.join(METHODS)}")
    points = usable_points(ensemble)
    clusters = _clusters(points.ensemble)
    comparison = _compared(points, clusters, method, seed, on_method)
    chosen = comparison.chosen.calibration.method if method == "auto" else method
    candidate = next(c for c in comparison.candidates if c.calibration.method == chosen)
    intervals = _intervals(points, candidate, level, clusters)
    scale = _scale(points, comparison, level, clusters) if not candidate.n_parameters else None
    std = _left_out_std(points, comparison, chosen)
    y, mean = points.ensemble.y, points.mean
    return Calibrated(
        points=points,
        calibration=candidate.calibration,
        grouped=candidate.grouped,
        intervals=intervals,
        scale=scale,
        comparison=comparison,
        std=std,
        before=score_arrays(y, mean, points.data.spread),
        after=score_arrays(y, mean, std),
        reason=_reason(
            comparison,
            chosen,
            asked=method != "auto",
            independent=int(clusters.max()) + 1 == len(clusters),
        ),
        remarks=(
            *ensemble.remarks,
            *(f"{ensemble.counted(n)} {why}: left out." for why, n in points.dropped.items()),
            *doubts_about(
                points,
                candidate.calibration,
                known_parameters(candidate.calibration, intervals, scale),
                std,
                n_independent=int(clusters.max()) + 1,
            ),
        ),
    )


def known_parameters(
    calibration: Calibration, intervals: ConfidenceIntervals, scale: ScaleInterval | None
) -> str:
    """Say in words what is known of the parameters, be they used or not."""
    if scale is not None:
        return f"{scale} ({intervals.level:.0%} confidence)"
    if calibration.n_parameters == 0:
        return ""
    known = "α lies between {:.3g} and {:.3g}".format(*intervals.alpha)
    if calibration.n_parameters > 1 and intervals.gamma is not None:
        known += ", γ between {:.3g} and {:.3g}".format(*intervals.gamma)
    return f"{known} ({intervals.level:.0%} confidence)"


def _intervals(
    points: Points, candidate: Candidate, level: float, clusters: IntArray
) -> ConfidenceIntervals:
    """Return intervals of what all points have in common: factors of groups are taken as known."""
    data, labels = points.data, points.ensemble.labels
    if candidate.grouped is not None and labels is not None:
        data = candidate.grouped.common(data, labels)
    return confidence_intervals(candidate.calibration, data, level=level, groups=clusters)


def _scale(
    points: Points, comparison: Comparison, level: float, clusters: IntArray
) -> ScaleInterval | None:
    """Find out how certain a scale of the error bars would be."""
    for candidate in comparison.candidates:
        if candidate.n_parameters == 1:
            one = candidate.calibration
            interval = _intervals(points, candidate, level, clusters).alpha
            return ScaleInterval(one.method, one.alpha, interval)
    return None


def _clusters(ensemble: Ensemble) -> IntArray:
    """Return groups of points whose errors are correlated: structures; atoms, if there is one."""
    codes = group_codes(ensemble.structure, len(ensemble))
    if codes.max() == 0:
        codes = group_codes(ensemble.atom, len(ensemble))
    return codes if codes.max() > 0 else np.arange(len(ensemble))


def _compared(
    points: Points,
    clusters: IntArray,
    method: str,
    seed: int,
    on_method: Callable[[int], object] | None,
) -> Comparison:
    methods = tuple(METHODS)
    if points.ensemble.members is None:
        methods = ERROR_BAR_METHODS
        if method not in ("auto", *methods):
            raise InputError(
                "method",
                repr(method),
                f"one of auto, {', '.join(methods)}",
                "The others need the predictions of the members, not only an error bar.",
            )
    if clusters.max() + 1 < FEW and method == "auto":
        methods = tuple(m for m in methods if m in _MODEST)
    if len(clusters) < 2 or clusters.max() < 1:
        raise CalibrationError("One point is not enough to calibrate on; at least 2 are needed.")
    _refuse_too_few(len(clusters), method)
    methods = tuple(m for m in methods if N_PARAMETERS[m] < len(clusters))
    comparison = cross_validate(
        points.data,
        methods,
        groups=clusters,
        labels=points.ensemble.labels,
        n_folds=N_FOLDS,
        seed=seed,
        on_method=on_method,
    )
    if method in comparison.failures:
        raise CalibrationError(comparison.failures[method])
    return comparison


def _refuse_too_few(n: int, method: str) -> None:
    """Refuse a fit of as many parameters as points, which says nothing about others."""
    needed = N_PARAMETERS.get(method, 0)
    if n <= needed:
        raise CalibrationError(
            f"{n} points are too few for method='{method}', which has {needed} parameters: "
            f"at least {needed + 1} are needed. Use more points, or method='linear'."
        )


def _left_out_std(points: Points, comparison: Comparison, method: str) -> Float64Array:
    """Return the calibrated error bar of each point by a calibration that did not see it."""
    data, labels = points.data, points.ensemble.labels
    std = np.empty(len(data.residuals))
    for left_out, fitted in zip(
        comparison.folds, comparison.fold_calibrations[method], strict=True
    ):
        rest = data.some(left_out)
        std[left_out] = fitted.overall.std(rest.spread, rest.n_members)
        if labels is not None:
            std[left_out] *= fitted.factors(labels[left_out])
    return std


def _reason(comparison: Comparison, chosen: str, *, asked: bool, independent: bool) -> str:
    """Say in words why this method; BIC counts points, and is right if they are independent."""
    found = {c.calibration.method: c for c in comparison.candidates}
    best = comparison.candidates[0].calibration.method
    mine = found[chosen]
    if chosen == best:
        others = [c for c in comparison.candidates if c.calibration.method != chosen]
        ahead = (
            f", {others[0].behind:.3f} ahead of {others[0].calibration.method}" if others else ""
        )
        why = f"the most likely on points left out{ahead}"
    elif mine.is_as_good:
        why = (
            f"as likely as {best} on points left out "
            f"({mine.behind:.3f} ± {mine.standard_error:.3f} behind), with fewer parameters"
        )
    else:
        why = (
            f"{best} is more likely on points left out, "
            f"by {mine.behind:.3f} ± {mine.standard_error:.3f} per point"
        )
    by_bic = min(found.values(), key=lambda c: c.calibration.bic).calibration.method
    other = f" (BIC prefers {by_bic}.)" if independent and by_bic != chosen else ""
    return f"{chosen}{', as asked' if asked else ''}: {why}.{other}"
