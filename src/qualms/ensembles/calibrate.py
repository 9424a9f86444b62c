"""Calibrating an ensemble: choice of the method, fit, and sanity checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.calibration.base import Calibration, CalibrationData, calibration_data, rounding_of
from qualms.calibration.fitting import METHODS, N_PARAMETERS
from qualms.calibration.groups import GroupedCalibration
from qualms.calibration.selection import (
    Candidate,
    Comparison,
    ConfidenceIntervals,
    confidence_intervals,
    cross_validate,
)
from qualms.ensembles.io import Ensemble
from qualms.errors import CalibrationError, InputError
from qualms.gp.ensemble import MIN_ABSENT, group_codes, internal_prediction
from qualms.metrics import Scores, far_points, score_arrays, spearman
from qualms.prediction import Prediction

#: Methods for standard deviations without members: the others need the number of members.
STD_METHODS = ("none", "linear", "power")
#: Methods of at most one parameter, for few points.
_SIMPLE = ("none", "linear", "student")
N_FOLDS = 5
#: A calibration set with fewer independent points is small.
FEW = 20
#: Methods that neglect the sampling error of the ensemble standard deviation need more members.
_FEW_MEMBERS = 10
#: A rank correlation below this is negligible.
_UNCORRELATED = 0.2
#: Number of outliers that are named.
_NAMED = 5
#: Ratio of errors to standard deviations beyond which units are suspected to differ.
_SUSPICIOUS = 30.0
_CONVERSIONS = {
    27.2114: "Hartree and eV",
    23.0605: "kcal/mol and eV",
    627.509: "Hartree and kcal/mol",
    96.4853: "kJ/mol and eV",
    51.4221: "Hartree/Bohr and eV/Å",
    1000.0: "eV and meV",
}


@dataclass(frozen=True)
class Points:
    """The points that a calibration is fitted to.

    Attributes
    ----------
    ensemble : Ensemble
        These points only; all have a reference value.
    data : CalibrationData
        Their residuals and ensemble standard deviations, out-of-bag if there are flags.
    dropped : dict of str to int
        Numbers of points that were left out, by reason.
    """

    ensemble: Ensemble
    data: CalibrationData
    dropped: dict[str, int]

    @property
    def mean(self) -> Float64Array:
        """Mean of the members, out-of-bag if there are flags: (n,)."""
        return self.ensemble.y - self.data.residuals


def usable_points(ensemble: Ensemble) -> Points:
    """Leave out, and count, the points that a calibration cannot be fitted to."""
    dropped: dict[str, int] = {}

    def keep(found: Ensemble, chosen: BoolArray, reason: str) -> Ensemble:
        if not chosen.all():
            dropped[reason] = int(np.count_nonzero(~chosen))
        if np.count_nonzero(chosen) < 2:
            reasons = "; ".join(f"{ensemble.counted(n)} {why}" for why, n in dropped.items())
            left = f"{np.count_nonzero(chosen)} of {ensemble.counted()} can be used"
            raise CalibrationError(f"{left}, at least 2 are needed. {reasons}".rstrip())
        return found.some(chosen)

    found = keep(ensemble, np.isfinite(ensemble.y), "without a reference value")
    found = keep(found, found.is_finite, "with NaN or infinite predictions")
    if found.members is None:
        found = keep(found, found.std > 0, "with a standard deviation of zero")
        residuals = found.y - found.mean
        if not np.any(residuals):
            raise CalibrationError("All residuals are zero: no scale of the errors can be fitted.")
        # The number of members is unknown; no method of `STD_METHODS` uses it.
        counts = np.full(len(residuals), 2)
        data = CalibrationData(residuals, found.std, counts, np.ones(len(residuals)))
        return Points(found, data, dropped)
    std, members, absent = found.std, found.members, found.absent
    if absent is not None:
        enough = absent.sum(axis=1) >= MIN_ABSENT
        found = keep(found, enough, f"with fewer than {MIN_ABSENT} out-of-bag members")
        absent = absent[enough]
        # Members that were trained on a point need not predict it.
        members = np.where(absent, members[enough], 0.0)
        std = internal_prediction(members, absent).std
    varied = std > rounding_of(members)
    found = keep(replace(found, members=members), varied, "with identical members")
    return Points(found, calibration_data(found.y, members[varied], found.absent), dropped)


@dataclass(frozen=True)
class ScaleInterval:
    """The scale α of the most likely method that has one, if the method chosen has none."""

    method: str
    alpha: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return f"α = {self.alpha:.3g} by {self.method}, between {low:.3g} and {high:.3g}"


@dataclass(frozen=True)
class Calibrated:
    """A calibration and its assessment.

    Attributes
    ----------
    points : Points
        The points that it was fitted to.
    calibration : Calibration
    grouped : GroupedCalibration, optional
        With a factor for each group.
    intervals : ConfidenceIntervals
        Of α and γ.
    scale : ScaleInterval, optional
        The scale that another method would have fitted, if the method has none.
    comparison : Comparison
        Cross-validation of all methods.
    std : (n,) array
        Calibrated standard deviations of the points, each by a calibration fitted to other points.
    before, after : Scores
        With the ensemble standard deviation, and with `std`.
    reason : str
        Why the method was chosen.
    remarks : tuple of str
        Warnings for the user.
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
        """The points with cross-validated standard deviations, and before calibration."""
        mean = self.points.mean
        raw = Prediction(mean=mean, std=self.points.data.spread)
        return Prediction(mean=mean, std=self.std, uncalibrated=raw)


def calibrate_ensemble(
    ensemble: Ensemble,
    method: str = "auto",
    *,
    level: float = 0.95,
    seed: int = 0,
    on_method: Callable[[int], object] | None = None,
) -> Calibrated:
    """Fit a calibration, with a factor for each group if there are labels, and cross-validate it.

    Parameters
    ----------
    ensemble : Ensemble
        With reference values. With out-of-bag flags, every point is predicted by its out-of-bag
        members; without, no member must have been trained on any of the points.
    method : {"auto", "none", "linear", "power", "student", "shrinkage"}
        "auto" chooses the method of fewest parameters among those with the highest cross-validated
        log likelihood, within its standard error.
    level : float
        Probability of the confidence intervals.
    seed : int
        Of the folds.
    on_method : callable, optional
        Called with the number of methods that have been compared.
    """
    if method not in ("auto", *METHODS):
        raise InputError("method", repr(method), f"one of auto, {', '.join(METHODS)}")
    points = usable_points(ensemble)
    clusters = _clusters(points.ensemble)
    n_independent = int(clusters.max()) + 1
    comparison = _compare(points, clusters, method, seed, on_method)
    chosen = comparison.chosen.calibration.method if method == "auto" else method
    candidate = next(c for c in comparison.candidates if c.calibration.method == chosen)
    intervals = _intervals(points, candidate, level, clusters)
    scale = None
    scaled = next((c for c in comparison.candidates if c.n_parameters == 1), None)
    if candidate.n_parameters == 0 and scaled is not None:
        interval = _intervals(points, scaled, level, clusters).alpha
        scale = ScaleInterval(scaled.calibration.method, scaled.calibration.alpha, interval)
    std = _left_out_std(points, comparison, chosen)
    y, mean = points.ensemble.y, points.mean
    known = known_parameters(candidate.calibration, intervals, scale)
    dropped = (f"{ensemble.counted(n)} {why}: left out." for why, n in points.dropped.items())
    checks = _checks(points, candidate.calibration, known, std, n_independent)
    reason = _reason(comparison, chosen, asked=method != "auto")
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
        reason=reason,
        remarks=(*ensemble.remarks, *dropped, *checks),
    )


def known_parameters(
    calibration: Calibration, intervals: ConfidenceIntervals, scale: ScaleInterval | None
) -> str:
    """Return the confidence intervals of the parameters in words."""
    if scale is not None:
        return f"{scale} ({intervals.level:.0%} confidence)"
    if calibration.n_parameters == 0:
        return ""
    known = "α is between {:.3g} and {:.3g}".format(*intervals.alpha)
    if calibration.n_parameters > 1 and intervals.gamma is not None:
        known += ", γ between {:.3g} and {:.3g}".format(*intervals.gamma)
    return f"{known} ({intervals.level:.0%} confidence)"


def _clusters(ensemble: Ensemble) -> IntArray:
    """Return groups of points with correlated errors: structures; atoms, if there is only one."""
    for origin in (ensemble.structure, ensemble.atom):
        codes = group_codes(origin, len(ensemble))
        if codes.max() > 0:
            return codes
    return np.arange(len(ensemble))


def _compare(
    points: Points,
    clusters: IntArray,
    method: str,
    seed: int,
    on_method: Callable[[int], object] | None,
) -> Comparison:
    """Cross-validate all methods that the points allow."""
    n = len(clusters)
    methods = STD_METHODS if points.ensemble.members is None else tuple(METHODS)
    if method not in ("auto", *methods):
        remedy = "The other methods need the predictions of the members."
        raise InputError("method", repr(method), f"one of auto, {', '.join(methods)}", remedy)
    if n <= N_PARAMETERS.get(method, 0):
        raise CalibrationError(
            f"{n} points are too few for method='{method}' with {N_PARAMETERS[method]} "
            "parameters. Use more points, or method='linear'."
        )
    if clusters.max() + 1 < FEW and method == "auto":
        methods = tuple(m for m in methods if m in _SIMPLE)
    comparison = cross_validate(
        points.data,
        tuple(m for m in methods if N_PARAMETERS[m] < n),
        groups=clusters,
        labels=points.ensemble.labels,
        n_folds=N_FOLDS,
        seed=seed,
        on_method=on_method,
    )
    if method in comparison.failures:
        raise CalibrationError(comparison.failures[method])
    return comparison


def _intervals(
    points: Points, candidate: Candidate, level: float, clusters: IntArray
) -> ConfidenceIntervals:
    """Return intervals of the common parameters, with the factors of groups taken as known."""
    data, labels = points.data, points.ensemble.labels
    if candidate.grouped is not None and labels is not None:
        data = candidate.grouped.common(data, labels)
    return confidence_intervals(candidate.calibration, data, level=level, groups=clusters)


def _left_out_std(points: Points, comparison: Comparison, method: str) -> Float64Array:
    """Return the standard deviation of each point by the calibration fitted to other folds."""
    data, labels = points.data, points.ensemble.labels
    std = np.empty(len(data.residuals))
    fitted = comparison.fold_calibrations[method]
    for left_out, calibration in zip(comparison.folds, fitted, strict=True):
        some = data.some(left_out)
        std[left_out] = calibration.overall.std(some.spread, some.n_members)
        if labels is not None:
            std[left_out] *= calibration.factors(labels[left_out])
    return std


def _reason(comparison: Comparison, chosen: str, *, asked: bool) -> str:
    """Return a sentence about why the method was chosen."""
    best, *others = comparison.candidates
    mine = next(c for c in comparison.candidates if c.calibration.method == chosen)
    difference = f"Δ = {mine.behind:.3f} ± {mine.standard_error:.3f} per point"
    if mine is best:
        second = (
            f" (Δ = {others[0].behind:.3f} to {others[0].calibration.method})" if others else ""
        )
        why = f"highest cross-validated log likelihood{second}"
    elif mine.is_as_good:
        why = f"as good as {best.calibration.method} ({difference}), with fewer parameters"
    else:
        why = (
            f"{best.calibration.method} has a higher cross-validated log likelihood ({difference})"
        )
    return f"{chosen}{', as requested' if asked else ''}: {why}."


# Sanity checks. They change nothing.


def _checks(
    points: Points,
    calibration: Calibration,
    known: str,
    std: Float64Array,
    n_independent: int,
) -> Iterator[str]:
    """Yield warnings about a calibration.

    Parameters
    ----------
    points : Points
    calibration : Calibration
    known : str
        Confidence intervals of its parameters, in words.
    std : (n,) array
        Cross-validated standard deviations of the points.
    n_independent : int
        Number of independent points, such as structures.
    """
    if n_independent < FEW:
        within = f": {known}" if known else ""
        yield f"Only {n_independent} independent points{within}. Calibrate on more points."
    c = int(np.median(points.data.n_members))
    has_members = points.ensemble.members is not None
    if has_members and calibration.method in ("linear", "power") and c < _FEW_MEMBERS:
        parameter, better = (
            ("α", "student")
            if calibration.method == "linear"
            else (
                "γ",
                "shrinkage",
            )
        )
        yield (
            f"'{calibration.method}' neglects the sampling error of the standard deviation of {c} "
            f"members: {parameter} is biased. Consider '{better}'."
        )
    yield from _outliers(points, std)
    yield from _uncorrelated(points.data, n_independent)
    yield from _units(points.data)
    bias = points.data.mean(points.data.residuals)
    rms = float(np.sqrt(points.data.mean(points.data.residuals**2)))
    if abs(bias) > 0.5 * rms and len(points.data.residuals) >= FEW:
        yield (
            f"Errors are biased: their mean is {bias:+.3g}, {abs(bias) / rms:.0%} of their root "
            "mean square. Subtract it first. (Another zero of energy?)"
        )


def _outliers(points: Points, std: Float64Array) -> Iterator[str]:
    """Name points with errors far beyond their standard deviation, such as wrong labels."""
    far = far_points(points.data.residuals, std).tolist()
    if not far:
        return
    ensemble, places = points.ensemble, []
    for i in far[:_NAMED]:
        place = f"structure {ensemble.structure[i]}"
        if ensemble.per_atom:
            place += f", atom {ensemble.atom[i]}"
        if ensemble.component is not None:
            place += f", component {ensemble.component[i]}"
        places.append(f"{place} ({abs(points.data.residuals[i]) / std[i]:.3g} σ)")
    more = ", …" if len(far) > _NAMED else ""
    yield (
        f"{len(far)} of {ensemble.counted()} may have wrong reference values: "
        f"{', '.join(places)}{more}. (Counted from 0.)"
    )


def _uncorrelated(data: CalibrationData, n_independent: int) -> Iterator[str]:
    """Check whether the ensemble standard deviation is correlated with the size of errors.

    The inverse hyperbolic tangent of a rank correlation has a standard error of about 1.03/√(n − 3)
    (Fieller, Hartley and Pearson, Biometrika 44, 470 (1957)).
    """
    if n_independent < 5:
        return
    rank = spearman(data.residuals, data.spread)
    half = 1.96 * 1.03 / np.sqrt(n_independent - 3)
    low, high = np.tanh(np.arctanh(np.clip(rank, -0.999, 0.999)) + np.array([-half, half]))
    found = f"rank correlation {rank:.2f}, between {low:.2f} and {high:.2f}".replace("-", "−")
    if high < _UNCORRELATED:
        yield (
            "The ensemble standard deviation does not indicate the size of the error "
            f"({found}): uncertainties are right on average only."
        )
    elif low <= 0:
        yield (
            "Too few points to determine whether the ensemble standard deviation indicates the "
            f"size of the error ({found})."
        )


def _units(data: CalibrationData) -> Iterator[str]:
    """Check the ratio of errors to standard deviations; half of |z| is below 0.67 σ."""
    typical = float(np.median(np.abs(data.residuals))) / 0.6745
    ratio = typical / float(np.median(data.spread))
    factor = max(ratio, 1 / ratio) if ratio > 0 else 1.0
    if factor < _SUSPICIOUS:
        return
    closest = min(_CONVERSIONS, key=lambda c: abs(np.log(factor / c)))
    hint = f" ({_CONVERSIONS[closest]}: {closest:g})" if 0.25 < factor / closest < 4 else ""
    size = "larger" if ratio > 1 else "smaller"
    yield (
        f"Errors are {factor:.3g} times {size} than the standard deviations: are the units the "
        f"same{hint}?"
    )
