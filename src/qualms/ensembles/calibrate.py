"""Reasons to distrust a calibration, in words. Nothing is ever changed because of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from qualms.arrays import Float64Array, IntArray
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.fitting import METHODS, N_PARAMETERS
from qualms.calibration.groups import GroupedCalibration
from qualms.calibration.methods import fit_power
from qualms.calibration.selection import (
    Candidate,
    Comparison,
    ConfidenceIntervals,
    confidence_intervals,
    cross_validate,
)
from qualms.ensembles.io import Ensemble, Points, usable_points
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import group_codes
from qualms.metrics import Scores, far_points, score_arrays, spearman
from qualms.prediction import Prediction

#: Fewer independent points than these are few.
FEW = 20
#: The spread of fewer members is too noisy to be taken for exact.
_FEW_MEMBERS = 10
#: Fewer have no interval of a rank correlation.
_RANKED = 5
#: A rank correlation below this orders next to nothing.
_NO_ORDER = 0.2
#: So many of the points that are far off are named.
_NAMED = 5
#: Residuals and spreads that differ by more than this factor are hardly in the same units.
_SUSPICIOUS = 30.0
#: Variances explain errors to within this factor, where standard deviations do not; by more than
#: this power of e better than these; and with an exponent below this.
_PLAUSIBLE, _CLEARLY, _ROOT = 8.0, 0.5, 0.65
#: Predictions that are correlated with the truth like this follow it.
_FOLLOWS = 0.9
#: What units are confused with what.
_CONVERSIONS = {
    27.2114: "Hartree and eV",
    23.0605: "kcal/mol and eV",
    627.509: "Hartree and kcal/mol",
    96.4853: "kJ/mol and eV",
    51.4221: "Hartree/Bohr and eV/Å",
    1000.0: "eV and meV",
}


def doubts_about(
    points: Points,
    calibration: Calibration,
    known: str,
    std: Float64Array,
    *,
    n_independent: int,
) -> Iterator[str]:
    """Yield what the user must know.

    Parameters
    ----------
    points : Points
        What the calibration was fitted to.
    calibration : Calibration
    known : str
        What is known of its parameters, in words.
    std : (n,) array
        Error bars of the points, by calibrations that did not see them.
    n_independent : int
        Structures, or what else is independent.
    """
    data = points.data
    yield from _few(known, n_independent)
    yield from _few_members(calibration, data, points.ensemble.members is not None)
    yield from _far(points, std)
    yield from _uninformative(data, n_independent)
    if points.ensemble.members is None:
        yield from _variance(data, points.ensemble.target)
    yield from _units(data)
    yield from _other_units(points)
    yield from _biased(data)


def _few(known: str, n_independent: int) -> Iterator[str]:
    if n_independent < FEW:
        within = f": {known}" if known else ""
        yield f"Only {n_independent} independent points{within}. Calibrate on more."


def _few_members(
    calibration: Calibration, data: CalibrationData, has_members: bool
) -> Iterator[str]:
    """Methods that take the spread for exact turn its noise into error: see `core.calibration`."""
    c = int(np.median(data.n_members))
    if not has_members or calibration.method not in ("linear", "power") or c >= _FEW_MEMBERS:
        return
    better = "student" if calibration.method == "linear" else "shrinkage"
    if calibration.method == "power":
        how = "noise makes γ smaller than it is, and α is not that of the truth"
    elif c > 3:
        excess = np.sqrt((c - 1) / (c - 3))
        how = f"even of perfect data α comes out {excess:.3g} times too large or more"
    else:
        how = "α grows with the number of points, without a limit"
    yield (
        f"{calibration.method} takes the spread of {c} members for exact, and it is not: {how}. "
        f"{better} knows how noisy it is."
    )


def _far(points: Points, std: Float64Array) -> Iterator[str]:
    """One wrong label is the commonest mistake, and spoils every mean square."""
    far = far_points(points.data.residuals, std).tolist()
    if not far:
        return
    ensemble, places = points.ensemble, []
    for i in far[:_NAMED]:
        atom = f", atom {ensemble.atom[i]}" if ensemble.per_atom else ""
        if ensemble.component is not None:
            atom += f", component {ensemble.component[i]}"
        off = abs(points.data.residuals[i]) / std[i]
        places.append(f"structure {ensemble.structure[i]}{atom} ({off:.3g} error bars)")
    more = ", …" if len(far) > _NAMED else ""
    yield (
        f"{len(far)} of {ensemble.counted()} {'is' if len(far) == 1 else 'are'} far off, as if the "
        f"reference were wrong: {', '.join(places)}{more}. (Counted from 0.)"
    )


def _uninformative(data: CalibrationData, n_independent: int) -> Iterator[str]:
    """Say that the spread orders nothing if that is known, and that it may not if that is not.

    The inverse hyperbolic tangent of a rank correlation scatters by about 1.03/√(n − 3) (Fieller,
    Hartley and Pearson, Biometrika 44, 470 (1957)).
    """
    if n_independent < _RANKED:
        return
    rank = spearman(data.residuals, data.spread)
    half = 1.96 * 1.03 / np.sqrt(n_independent - 3)
    low, high = np.tanh(np.arctanh(np.clip(rank, -0.999, 0.999)) + np.array([-half, half]))
    found = f"rank correlation {rank:.2f}, between {low:.2f} and {high:.2f}".replace("-", "−")
    if high < _NO_ORDER:
        yield (
            f"The spread says {'little' if low > 0 else 'nothing'} about the size of the error "
            f"({found}): error bars are right on average only."
        )
    elif low <= 0:
        yield (
            "Whether the spread says anything about the size of the error cannot be told from so "
            f"few points ({found})."
        )


def _variance(data: CalibrationData, target: str) -> Iterator[str]:
    """If the roots of σ have the size of the errors, and σ does not, σ is a variance.

    Errors then grow as the root of σ, or more slowly: noise in σ makes any exponent smaller, also
    that of an honest σ, which is why an exponent of about one half proves nothing.
    """
    if np.ptp(np.log(data.spread)) < 0.1:
        return
    gamma = fit_power(data).gamma
    as_std, as_variance = _log_ratio(data, data.spread), _log_ratio(data, np.sqrt(data.spread))
    plausible = abs(as_variance) < np.log(_PLAUSIBLE) < abs(as_std)
    if gamma < _ROOT and plausible and abs(as_variance) + _CLEARLY < abs(as_std):
        yield (
            "The error bars look like variances: their roots have the size of the errors, which "
            f"are {_times(as_std)} they are, and grow as a power of {gamma:.2f} of them. "
            f"They are used as they are; store the roots, or name the key {target}_var."
        )


def _log_ratio(data: CalibrationData, spread: Float64Array) -> float:
    """Return how many times larger than a spread errors are, ln; half of |z| is below 0.67 σ."""
    typical = max(float(np.median(np.abs(data.residuals))), np.finfo(float).tiny) / 0.6745
    return float(np.log(typical / np.median(spread)))


def _times(log_ratio: float) -> str:
    return f"{np.exp(abs(log_ratio)):.3g} times {'larger' if log_ratio > 0 else 'smaller'} than"


def _units(data: CalibrationData) -> Iterator[str]:
    log_ratio = _log_ratio(data, data.spread)
    if not np.any(data.residuals) or abs(log_ratio) < np.log(_SUSPICIOUS):
        return
    factor = float(np.exp(abs(log_ratio)))
    closest = min(_CONVERSIONS, key=lambda c: abs(np.log(factor / c)))
    hint = f" ({_CONVERSIONS[closest]}: {closest:g})" if 0.25 < factor / closest < 4 else ""
    yield f"Errors are {_times(log_ratio)} the spread: are the units the same{hint}?"


def _other_units(points: Points) -> Iterator[str]:
    """If all members are in other units than the truth, errors and spread may still agree."""
    y, mean = points.ensemble.y, points.mean
    if len(y) < FEW or not np.ptp(y) or not np.ptp(mean):
        return
    slope = float(np.cov(y, mean)[0, 1] / np.var(mean, ddof=1))
    if np.corrcoef(y, mean)[0, 1] < _FOLLOWS or not slope > 0:
        return
    factor = max(slope, 1 / slope)
    closest = min(_CONVERSIONS, key=lambda c: abs(np.log(factor / c)))
    if 0.8 < factor / closest < 1.25:
        yield (
            f"True values grow {slope:.3g} times as fast as predictions: are the units the same "
            f"({_CONVERSIONS[closest]}: {closest:g})?"
        )


def _biased(data: CalibrationData) -> Iterator[str]:
    bias = data.mean(data.residuals)
    rms = float(np.sqrt(data.mean(data.residuals**2)))
    if abs(bias) > 0.5 * rms and len(data.residuals) >= FEW:
        yield (
            f"Errors are {bias:+.3g} on average, {abs(bias) / rms:.0%} of their root mean square: "
            "no error bar can make up for that. (Another zero of energy?)"
        )


# From an ensemble with references to a calibration, and to how good it is.
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
