"""Calibrations of energies, forces and stresses by members that did not see a structure.

Energies, components of forces and components of stresses are calibrated apart. A stress is Vσ per
atom where it is learned, but is calibrated as what it is asked for, in units of the energy per Å³.
Components of one force, or of one stress, share a factor (see `qualms.core.calibration.whole`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import numpy as np

from qualms.atomistic.force_labels import ForceLabels
from qualms.core.calibration import (
    METHODS,
    Calibration,
    CalibrationData,
    NoCalibration,
    calibration_data,
    fit_internally,
    internal_points,
)
from qualms.core.resampling import MIN_ABSENT, internal_prediction
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.errors import CalibrationError, ExactFitError, QualmsWarning, counted

#: Components that members agree about to this share of the largest label are zero by symmetry; and
#: to this number, whatever the units of the energy are, if all of them are.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Structures from which on components are calibrated by themselves, and from which on that is
#: nothing to warn of. Those of one structure err together. The factor of energies, of which there
#: are more, does for forces as well or better than one from fewer than ten structures; for stresses
#: it is often too small by half, and three structures tell more.
_ENOUGH = {"Forces": 10, "Stresses": 3}
_WELL = 10
#: Labels whose errors, in units of the spread, are so many times those of energies are doubted: a
#: model that is trained on them learns next to nothing about those of other structures.
_DOUBTFUL = 10.0


@dataclass(frozen=True)
class Derived:
    """What is known of components of forces, or of stresses.

    Attributes
    ----------
    internal : CalibrationData, optional
        Residuals and spreads of those that enough members had not seen.
    calibrations : dict of str to Calibration
        By that; empty if there are none.
    n_structures : int
        How many structures these components are of: those of one structure are not independent.
    """

    internal: CalibrationData | None = None
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    n_structures: int = 0


def calibrate_forces(
    labels: ForceLabels, predicted: Float64Array, counts: IntArray, wanted: str
) -> Derived:
    """Calibrate components of forces; if they are too few, they have no calibration.

    Parameters
    ----------
    labels : ForceLabels
    predicted : (n_rows, N_R) array
        What members say about them.
    counts : (n_structures, N_R) array of int
        How often each structure is in each member.
    wanted : str
        The method that must work.
    """
    rows = np.flatnonzero(~labels.is_virial)
    if not len(rows):
        return Derived()
    ratios = _ratios(labels, predicted, counts)
    rows = _telling(rows, labels.y[rows], predicted[rows])
    if _too_few("Forces", labels, rows, counts, wanted):
        return Derived()
    what, seen = "components of forces", counts[labels.structure[rows]]
    y, members = labels.y[rows], predicted[rows]
    internal = internal_data(y, members, seen, wanted, what, level=6)
    found = _fit_whole(internal, y, members, seen == 0, ratios[rows], wanted)
    return Derived(internal, found, _n_structures(labels, rows, counts))


def calibrate_stresses(
    labels: ForceLabels,
    predicted: Float64Array,
    counts: IntArray,
    per_volume: Float64Array,
    wanted: str,
) -> Derived:
    """Calibrate components of stresses; if they are too few, they have no calibration.

    Parameters
    ----------
    labels, predicted, counts, wanted
        As in `calibrate_forces`.
    per_volume : (n_structures,) array
        Atoms per Å³, which Vσ per atom is multiplied by.
    """
    rows = np.flatnonzero(labels.is_virial)
    if not len(rows):
        return Derived()
    ratios = _ratios(labels, predicted, counts)
    rows = _telling(rows, labels.y[rows], predicted[rows])
    if _too_few("Stresses", labels, rows, counts, wanted):
        return Derived()
    factors = per_volume[labels.structure[rows]]
    y, members = labels.y[rows] * factors, predicted[rows] * factors[:, None]
    absent = counts[labels.structure[rows]] == 0
    try:
        data = calibration_data(y, members, absent)
        found = _fit_whole(data, y, members, absent, ratios[rows], wanted)
    except CalibrationError as error:
        if wanted != "none":
            warnings.warn(
                f"Stresses: {error} Their error bars are scaled as those of energies are.",
                QualmsWarning,
                stacklevel=5,
            )
        return Derived()
    return Derived(data, found, _n_structures(labels, rows, counts))


def _ratios(labels: ForceLabels, predicted: Float64Array, counts: IntArray) -> Float64Array:
    """Return r/ŝ of all rows (n_rows,): the spread of the whole force, or virial, by their own.

    Of the whole as far as it is labelled; one where there is no spread.
    """
    found = internal_prediction(predicted, counts[labels.structure] == 0)
    spread = np.zeros(len(predicted))
    spread[found.used] = found.std
    w, whole = labels.multiplicity, labels.whole
    squares = np.bincount(whole, w * spread**2) / np.maximum(np.bincount(whole, w), 1.0)
    ratios = np.ones_like(spread)
    return np.divide(np.sqrt(squares)[whole], spread, out=ratios, where=spread > 0)


def _fit_whole(
    internal: CalibrationData | None,
    y: Float64Array,
    members: Float64Array,
    absent: BoolArray,
    ratios: Float64Array,
    wanted: str,
) -> dict[str, Calibration]:
    """Fit every method to components (n,) that are multiplied by r/ŝ.

    The density of z is r/ŝ times that of z r/ŝ, and so likelihoods are those of components.
    """
    if internal is None:
        return fit_calibrations(None, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows without a spread, which have been warned of
        data = calibration_data(y * ratios, members * ratios[:, None], absent)
    calibrations = {}
    for method, found in fit_calibrations(data, wanted).items():
        after, before = (of.some(internal_points(of, method)) for of in (data, internal))
        shift = after.mean(np.log(after.spread)) - before.mean(np.log(before.spread))
        calibrations[method] = replace(found, log_likelihood=found.log_likelihood + shift)
    return calibrations


def doubt_labels(
    name: str, key: str, of: Derived, energies: dict[str, Calibration], n_members: int
) -> None:
    """Warn if members are much more wrong about forces, or stresses, than they are about energies.

    Parameters
    ----------
    name : {"forces", "stress"}
    key : str
        Where the labels are.
    of : Derived
    energies : dict of str to Calibration
    n_members : int
        N_R.
    """
    # Of the methods that have one factor: with a power, it has units.
    method = next((m for m in ("student", "linear") if m in of.calibrations and m in energies), "")
    if not method:
        return
    # Error bars in units of the spread: α alone may be zero where the mean of members is right.
    of_labels, of_energies = (
        float(found[method].std(np.ones(1), n_members)[0]) for found in (of.calibrations, energies)
    )
    ratio = of_labels / max(of_energies, np.finfo(np.float64).tiny)
    if ratio >= _DOUBTFUL:
        warnings.warn(
            f"{name}={key!r}: errors of members are {ratio:.0f} times as large in units of their "
            "spread as those of energies. Are these labels derivatives of the same energies, of "
            "the same structures, in the right order, and more than noise?",
            QualmsWarning,
            stacklevel=5,
        )


def telling(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree about up to rounding.

    Components that are zero by symmetry have neither an error nor an error bar.
    """
    largest = float(np.abs(y).max(initial=0.0))
    apart: BoolArray = np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY)
    return apart


def _telling(rows: IntArray, y: Float64Array, members: Float64Array) -> IntArray:
    """Return the rows that say something; all, if none does."""
    apart = telling(y, members)
    return rows[apart] if apart.any() else rows


def _too_few(what: str, labels: ForceLabels, rows: IntArray, counts: IntArray, wanted: str) -> bool:
    """Return whether energies tell more about error bars than some components, and say so."""
    n = _n_structures(labels, rows, counts)
    judged = int(np.count_nonzero(_judged(counts)))
    too_few = n < min(_ENOUGH[what], judged)
    if wanted != "none" and n < min(_WELL, judged):
        known = f"{what} of {counted(n, 'structure')} that members had not seen are"
        scaled = f"too few to calibrate error bars, which takes {_ENOUGH[what]}: they are scaled as"
        warnings.warn(
            f"{known} {scaled} those of energies are."
            if too_few
            else f"{known} few to calibrate their error bars, whose factor is poorly known.",
            QualmsWarning,
            stacklevel=7,
        )
    return too_few


def _judged(counts: IntArray) -> BoolArray:
    """Return which structures enough members had not seen: (n_structures,)."""
    judged: BoolArray = (counts == 0).sum(axis=1) >= MIN_ABSENT
    return judged


def _n_structures(labels: ForceLabels, rows: IntArray, counts: IntArray) -> int:
    """Return how many structures are judged by the members that had not seen them."""
    return int(np.count_nonzero(_judged(counts)[np.unique(labels.structure[rows])]))


def internal_data(
    y: Float64Array,
    predicted: Float64Array,
    counts: IntArray,
    wanted: str,
    what: str = "targets",
    *,
    level: int = 5,
) -> CalibrationData | None:
    """Return what members that did not see a row say about it, if there is an error at all.

    Parameters
    ----------
    y : (n,) array
    predicted : (n, N_R) array
    counts : (n, N_R) array of int
        How often each row is in each member.
    wanted : str
        Method of calibration.
    what : str
        What the rows are.
    level : int
        How far up the stack a warning belongs.
    """
    if np.ptp(y) == 0:
        warnings.warn(
            f"All {what} are the same: there is nothing to learn, and the error bar is zero.",
            QualmsWarning,
            stacklevel=level,
        )
        return None
    try:
        return calibration_data(y, predicted, counts == 0)
    except CalibrationError as error:
        if wanted != "none" and not isinstance(error, ExactFitError):
            raise
        warnings.warn(f"{error} The spread is used as it is.", QualmsWarning, stacklevel=level)
        return None


def fit_calibrations(internal: CalibrationData | None, wanted: str) -> dict[str, Calibration]:
    """Fit every method, so that they can be compared later; the one that is wanted must work."""
    if internal is None:
        return {"none": NoCalibration(), wanted: NoCalibration()}
    calibrations: dict[str, Calibration] = {}
    for method in METHODS:
        try:
            calibrations[method] = fit_internally(internal, method)
        except CalibrationError:
            if method == wanted:
                raise
    return calibrations
