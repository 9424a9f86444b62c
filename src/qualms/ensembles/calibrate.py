"""Calibrating an ensemble: choice of the method, fit, and sanity checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, IntArray
from qualms.calibration.choice import (
    Candidate,
    Comparison,
    ConfidenceIntervals,
    candidate_methods,
    confidence_intervals,
    cross_validate,
)
from qualms.calibration.groups import GroupedCalibration
from qualms.calibration.methods import (
    METHODS,
    MIN_POINTS,
    N_PARAMETERS,
    STD_METHODS,
    Calibration,
    check_ensemble_method,
    fit_calibration,
)
from qualms.calibration.points import CalibrationData
from qualms.calibration.vectors import ISOTROPIES
from qualms.ensembles.io import COMPONENTS, Ensemble
from qualms.errors import CalibrationError, InputError, unknown_choice
from qualms.evaluation import (
    Evaluation,
    check_errors,
    describe_outliers,
    energy_factor,
    kinds_of,
    per_atom_units,
)
from qualms.gp.ensemble import group_codes
from qualms.metrics import Scores, score, spearman
from qualms.prediction import Prediction

Frames: TypeAlias = Sequence[Atoms]


@dataclass(frozen=True)
class Calibrated:
    """A calibration and its assessment.

    `ensemble` are the n points that it is fitted to. `isotropy` is that of vectors, if σ is a
    function of the standard deviation of whole vectors. `std` (n,) are cross-validated standard
    deviations: each is by a calibration that was fitted to other points. `before` and `after` are
    scores of the ensemble standard deviations and of `std`. `comparison` is the cross-validation of
    all methods, `reason` why this one was chosen, and `remarks` are warnings for the user.
    """

    ensemble: Ensemble
    calibration: Calibration
    isotropy: float | None
    grouped: GroupedCalibration | None
    intervals: ConfidenceIntervals
    comparison: Comparison
    std: Float64Array
    before: Scores
    after: Scores
    reason: str
    remarks: tuple[str, ...]

    @property
    def prediction(self) -> Prediction:
        """The points with cross-validated standard deviations, and before calibration."""
        raw = Prediction(mean=self.ensemble.mean, std=self.ensemble.std)
        return Prediction(mean=self.ensemble.mean, std=self.std, uncalibrated=raw)


def calibrate_ensemble(
    ensemble: Ensemble,
    method: str = "auto",
    *,
    frames: Frames | None = None,
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
    frames : sequence of Atoms, optional
        The structures, whose compositions and config_types are tested for a bias.
    seed : int
        Random seed for the folds.
    on_method : callable, optional
        Called with the number of methods that have been compared.
    """
    check_ensemble_method(method, has_members=ensemble.members is not None)
    methods = STD_METHODS if ensemble.members is None else tuple(METHODS)
    points, left_out = usable_points(ensemble)
    if np.array_equal(points.y, points.mean):
        raise CalibrationError("The reference values equal the predictions: all errors are zero.")
    clusters, labels = _clusters(points), points.labels
    if len(points) <= N_PARAMETERS.get(method, 0):
        raise CalibrationError(
            f"{len(points)} points are too few for method='{method}' with {N_PARAMETERS[method]} "
            "parameters. Use more points, or method='linear'."
        )
    isotropy = _isotropy(points, method)
    data = replace(_data(points, isotropy), groups=clusters)
    if method == "auto":
        methods = candidate_methods(data)
    comparison = cross_validate(
        data,
        tuple(m for m in methods if N_PARAMETERS[m] < len(points)),
        labels=labels,
        n_folds=5,
        seed=seed,
        on_method=on_method,
    )
    if method in comparison.failures:
        raise CalibrationError(comparison.failures[method])
    chosen = comparison.chosen.calibration.method if method == "auto" else method
    candidate = next(c for c in comparison.candidates if c.calibration.method == chosen)
    # Intervals are those of the common parameters, with the factors of groups taken as known.
    common = data
    if candidate.grouped is not None and labels is not None:
        common = candidate.grouped.common(data, labels)
    calibration = candidate.calibration
    intervals = confidence_intervals(calibration, common)
    std, kinds = np.empty(len(points)), np.full(len(points), "") if labels is None else labels
    for out, fitted in zip(comparison.folds, comparison.fold_calibrations[chosen], strict=True):
        std[out] = fitted.std_of(data.some(out), kinds[out]) * data.scale[out]
    checks = _checks(points, calibration.method, std, int(clusters.max()) + 1)
    return Calibrated(
        ensemble=points,
        calibration=calibration,
        isotropy=isotropy,
        grouped=candidate.grouped,
        intervals=intervals,
        comparison=comparison,
        std=std,
        before=score(points.y, mean=points.mean, std=points.std),
        after=score(points.y, mean=points.mean, std=std),
        reason=_reason(comparison, candidate, asked=method != "auto"),
        remarks=(*ensemble.remarks, *left_out, *_check_data(points, frames), *checks),
    )


def _data(points: Ensemble, isotropy: float | None) -> CalibrationData:
    """Return errors and standard deviations of points, of whole vectors with an isotropy."""
    std, count, share = points.pooled(isotropy)
    z = (points.y - points.mean) / share
    return CalibrationData(z, std, count, np.ones(len(points)), divided_by=share)


def _isotropy(points: Ensemble, method: str) -> float | None:
    """Return the isotropy of vectors with the highest likelihood; None if they are not pooled."""
    if points.vector_std is None or method == "none":
        return None
    if method == "auto":
        method = "linear" if points.members is None or points.count.min() < 3 else "student"
    fits: dict[float | None, float] = {}
    for isotropy in (None, *ISOTROPIES[1:]):
        with suppress(CalibrationError):
            fits[isotropy] = fit_calibration(_data(points, isotropy), method).log_likelihood
    return max(fits, key=lambda isotropy: fits[isotropy], default=None)


def evaluate_ensemble(
    points: Ensemble,
    prediction: Prediction | None = None,
    *,
    frames: Frames | None = None,
    units: str = "",
    in_units: str | None = None,
    per: str | None = None,
) -> Evaluation:
    """Return the evaluation of usable points, as predicted or with another prediction.

    Parameters
    ----------
    points : Ensemble
    prediction : Prediction, optional
        Of the points; that of the ensemble by default.
    frames : sequence of Atoms, optional
        Structures of the points.
    units, in_units : str
        Units of the data, and of energy to evaluate in, such as meV.
    per : {"atom", "structure"}, optional
        Evaluate properties of structures per atom.
    """
    if per not in (None, "atom", "structure"):
        raise unknown_choice("per", per, ("atom", "structure"))
    factor, units = energy_factor(units, in_units)
    factors = np.full(len(points), factor)
    if per == "atom":
        if points.kind != "structure":
            message = f"{points.target} is a property of {points.kind}s, not of structures: it "
            message += "cannot be divided by numbers of atoms."
            raise InputError(message, parameter="per")
        if points.sizes is None:
            message = f"The numbers of atoms, by which {points.target} is divided, are not known: "
            message += "the table needs a column n_atoms."
            raise InputError(message, parameter="per")
        factors, units = factors / points.sizes, per_atom_units(units)
    if prediction is None:
        members = points.members if points.absent is None else None
        if members is not None and np.isfinite(members).all():
            prediction = Prediction(members, dof=points.dof)
        else:
            prediction = Prediction(mean=points.mean, std=points.std, dof=points.dof)
    return Evaluation(
        target=points.target,
        y=points.y * factors,
        prediction=prediction * factors,
        structure=points.structure,
        atom=points.atom if points.per_atom else None,
        component=points.component,
        component_names=COMPONENTS.get(points.n_components, ()),
        units=units,
        factor=factors,
        frames=frames,
        warnings=_check_data(points, frames),
        extrapolates=points.extrapolates,
    )


def usable_points(ensemble: Ensemble) -> tuple[Ensemble, list[str]]:
    """Leave out points without a reference value or σ > 0, and return remarks about them."""
    reasons = {
        "without a reference value": ~np.isfinite(ensemble.y),
        **ensemble.unusable(),
        "with identical members or a standard deviation of zero": ensemble.std == 0,
    }
    dropped, left = {}, np.ones(len(ensemble), dtype=bool)
    for reason, where in reasons.items():
        if np.any(left & where):
            dropped[reason] = int(np.count_nonzero(left & where))
        left &= ~where
    if np.count_nonzero(left) < 2:
        why = "; ".join(f"{ensemble.counted(n)} {reason}" for reason, n in dropped.items())
        usable = f"{np.count_nonzero(left)} of {ensemble.counted()} can be used"
        raise CalibrationError(f"{usable}, at least 2 are needed. {why}".rstrip())
    remarks = [f"{ensemble.counted(n)} {why}: left out." for why, n in dropped.items()]
    return ensemble.some(left), remarks


def _clusters(ensemble: Ensemble) -> IntArray:
    """Return groups of points with correlated errors: structures; atoms, if there is only one."""
    for origin in (ensemble.structure, ensemble.atom):
        codes = group_codes(origin, len(ensemble))
        if codes.max() > 0:
            return codes
    return np.arange(len(ensemble))


def _reason(comparison: Comparison, chosen: Candidate, *, asked: bool) -> str:
    """Return a sentence about why the method was chosen."""
    best, *others = comparison.candidates
    name = chosen.calibration.method + (", as requested" if asked else "")
    difference = f"Δ = {chosen.behind:.3f} ± {chosen.standard_error:.3f} per point"
    other = best.calibration.method
    if chosen is best:
        second = "".join(f" (Δ = {o.behind:.3f} to {o.calibration.method})" for o in others[:1])
        return f"{name}: highest cross-validated log likelihood{second}."
    if chosen.is_as_good:
        fewer = ", with fewer parameters" if chosen.n_parameters < best.n_parameters else ""
        return f"{name}: as good as {other} ({difference}){fewer}."
    return f"{name}: {other} has a higher cross-validated log likelihood ({difference})."


# Sanity checks. They change nothing.


def _checks(
    ensemble: Ensemble, method: str, std: Float64Array, n_independent: int
) -> Iterator[str]:
    """Yield warnings; `std` is cross-validated."""
    if n_independent < MIN_POINTS:
        yield f"Only {n_independent} independent points. Calibrate on more points."
    better = {"linear": "student", "power": "shrinkage"}.get(method)
    c = int(np.median(ensemble.count))
    if ensemble.members is not None and better is not None and c < 10:
        yield (
            f"'{method}' neglects the sampling error of the standard deviation of {c} members, "
            f"and its parameters are biased. Consider '{better}'."
        )
    z, atom = ensemble.y - ensemble.mean, ensemble.atom if ensemble.per_atom else None
    yield from describe_outliers(z, std, ensemble.structure, atom, ensemble.component)
    if n_independent < 5:
        return
    # The inverse hyperbolic tangent of a rank correlation has a standard error of 1.03/√(n − 3)
    # (Fieller, Hartley and Pearson, Biometrika 44, 470 (1957)).
    rank = spearman(z, ensemble.std)
    half = 1.96 * 1.03 / np.sqrt(n_independent - 3)
    low, high = np.tanh(np.arctanh(np.clip(rank, -0.999, 0.999)) + np.array([-half, half]))
    if high < 0.2:
        interval = f"{rank:.2f}, between {low:.2f} and {high:.2f}".replace("-", "−")
        yield (
            "The ensemble standard deviation does not indicate the size of the error "
            f"(rank correlation {interval}): uncertainties are right on average only."
        )


def _check_data(ensemble: Ensemble, frames: Frames | None) -> list[str]:
    """Return warnings about members, units and bias, with which no calibration is right."""
    if warnings := _check_members(ensemble):
        return warnings
    kinds = {}
    if frames is not None:
        atom = ensemble.atom if ensemble.per_atom else None
        kinds = kinds_of(frames, ensemble.structure, atom)
    if ensemble.labels is not None:
        kinds["group"] = ensemble.labels
    return check_errors(ensemble.y - ensemble.mean, ensemble.std, ensemble.structure, kinds)


def _check_members(ensemble: Ensemble) -> list[str]:
    """Compare the members with each other, and with the reference values."""
    if ensemble.members is None:
        return []
    members = ensemble.members
    if ensemble.absent is not None:
        members = np.where(ensemble.absent, members, np.nan)
    equal = np.flatnonzero(np.nanmedian(np.abs(members - ensemble.y[:, None]), axis=0) == 0)
    if equal.size:
        return [f"The reference values equal those of member {equal[0]}."]
    low, high = np.nanquantile(members, [0.25, 0.75], axis=0)
    sizes = high - low
    if np.all(sizes > 0) and sizes.max() > 3 * sizes.min():
        ratio = sizes.max() / sizes.min()
        return [
            f"Values of member {np.argmax(sizes)} vary {ratio:.2g} times more than those of member "
            f"{np.argmin(sizes)}. Are the units the same?"
        ]
    deviations = members - np.nanmedian(members, axis=1, keepdims=True)
    low, middle, high = np.nanquantile(deviations, [0.25, 0.5, 0.75], axis=0)
    if np.any((high > low) & (np.abs(middle) > 10 * (high - low))):
        listed = ", ".join(f"{value:+.3g}" for value in middle)
        return [
            f"Members differ from one another by constants: {listed} from their median. "
            "Do they have the same zero of energy?"
        ]
    return []
