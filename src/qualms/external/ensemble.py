"""What an ensemble says about each point, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qualms.core.calibration import CalibrationData, calibration_data
from qualms.core.calibration.base import rounding_of
from qualms.core.resampling import MIN_ABSENT, committee, internal_prediction
from qualms.core.typing import BoolArray, Float64Array, IntArray, StrArray
from qualms.errors import CalibrationError, InputError, counted
from qualms.external.components import Layout
from qualms.prediction import Prediction


@dataclass(frozen=True)
class Ensemble:
    """Predictions of n points: structures, atoms, or components of vectors of atoms.

    Attributes
    ----------
    target : str
    kind : {"structure", "atom", "component"}
    mean, std : (n,) arrays
        Of the members; or as they were given, if there are no members.
    members : (n, R) array, optional
    y : (n,) array
        Reference values; NaN where there is none.
    absent : (n, R) array of bool, optional
        Whether the member did not see the point in its training.
    structure, atom : (n,) arrays of int
        Where each point belongs; `atom` is zero where that has no meaning.
    component : (n,) array of int, optional
        Which of the values of its structure or atom a point is, if they are several.
    key : str
        Where members, or error bars, were found.
    shape : tuple of int
        Of the values of one structure or atom, as they are stored: each of them is a point.
    layout : Layout, optional
        How members are stored.
    columns : mapping of str to tuple of str
        The columns of a table that values of a key were found in, if they are several.
    per_atom : bool
        Whether they are those of atoms.
    labels : (n,) array of str, optional
        What points are grouped by.
    remarks : tuple of str
        What was noticed while reading.
    beside : (n,) array, optional
        What was found under the name of the target itself, beside members; NaN where there is none.
    has_bars : bool
        Whether there are error bars beside the members.
    has_stated_spread : bool
        Whether the members have the spread that ``{target}_uncertainty`` states, as after a
        calibration was applied to them.
    """

    target: str
    kind: str
    mean: Float64Array
    std: Float64Array
    members: Float64Array | None
    y: Float64Array
    absent: BoolArray | None
    structure: IntArray
    atom: IntArray
    component: IntArray | None = None
    key: str = ""
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_atom: bool = False
    labels: StrArray | None = None
    remarks: tuple[str, ...] = ()
    beside: Float64Array | None = None
    has_bars: bool = False
    has_stated_spread: bool = False

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def n_members(self) -> int | None:
        """R, or None if there are only error bars."""
        return None if self.members is None else int(self.members.shape[1])

    @property
    def n_components(self) -> int:
        """Points of one structure or atom."""
        return int(np.prod(self.shape))

    def counted(self, n: int | None = None) -> str:
        """Return a number of points, all of them by default, in words."""
        return counted(len(self) if n is None else n, self.kind)

    def some(self, chosen: BoolArray) -> Ensemble:
        """Return some of the points."""
        arrays = (
            "mean",
            "std",
            "members",
            "y",
            "absent",
            "structure",
            "atom",
            "labels",
            "beside",
            "component",
        )
        taken: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[chosen]
            for name in arrays
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class Points:
    """The points of an ensemble that a calibration can be fitted to and judged on.

    Attributes
    ----------
    ensemble : Ensemble
        These points alone; all have a reference.
    data : CalibrationData
        Their residuals and spreads, by the members that did not see them.
    dropped : dict of str to int
        How many points were left out, and why.
    """

    ensemble: Ensemble
    data: CalibrationData
    dropped: dict[str, int]

    @property
    def mean(self) -> Float64Array:
        """What the members that did not see a point say: (n,)."""
        return self.ensemble.y - self.data.residuals

    def prediction(self, std: Float64Array) -> Prediction:
        """Return the predictions with these standard deviations, and before with the spreads."""
        return as_prediction(self.mean, std, as_prediction(self.mean, self.data.spread))


def usable_points(ensemble: Ensemble) -> Points:
    """Leave out, and count, points that say nothing about errors.

    These are points without a reference, with a prediction that is not finite, that too many
    members have seen, and without any spread.
    """
    dropped: dict[str, int] = {}

    def keep(found: Ensemble, chosen: BoolArray, why: str) -> Ensemble:
        if not chosen.all():
            dropped[why] = int(np.count_nonzero(~chosen))
        if np.count_nonzero(chosen) < 2:
            reasons = "; ".join(f"{ensemble.counted(n)} {reason}" for reason, n in dropped.items())
            number = "Only one point" if chosen.any() else "No point"
            needed = "at least 2 are needed"
            raise CalibrationError(f"{number} can be used to calibrate ({reasons or needed}).")
        return found if chosen.all() else found.some(chosen)

    found = keep(ensemble, np.isfinite(ensemble.y), "without a reference value")
    found = keep(found, finite(found), "with NaN or infinite predictions")
    if found.members is None:
        refuse_negative(found)
        found = keep(found, found.std > 0, "with an error bar of zero")
        return Points(found, _from_error_bars(found), dropped)
    if found.absent is not None:
        enough = found.absent.sum(axis=1) >= MIN_ABSENT
        # What the others say does not matter; it may as well be missing.
        known = np.where(found.absent, found.members, 0.0)
        found = replace(found, members=known)
        found = keep(found, enough, f"that fewer than {MIN_ABSENT} members had not seen")
    assert found.members is not None
    spread = found.std
    if found.absent is not None:
        spread = internal_prediction(found.members, found.absent).std
    found = keep(found, spread > rounding_of(found.members), "about which all members agree")
    assert found.members is not None
    return Points(found, calibration_data(found.y, found.members, found.absent), dropped)


def as_prediction(
    mean: Float64Array, std: Float64Array, uncalibrated: Prediction | None = None
) -> Prediction:
    """Return a prediction with this mean and standard deviation, of two members ȳ ± σ/√2."""
    offset = std / np.sqrt(2.0)
    return Prediction(np.stack([mean - offset, mean + offset], axis=-1), uncalibrated=uncalibrated)


def with_members(target: str, kind: str, members: Float64Array, **fields: Any) -> Ensemble:
    """Return the ensemble of members (n, R); mean and spread follow from them, Eq. (4)."""
    if members.shape[1] < 2:
        raise InputError(
            target,
            "an ensemble of one member",
            "at least 2 members",
            f"Or store the error bar as {target}_uncertainty.",
        )
    with np.errstate(invalid="ignore"):
        mean, std = committee(members)
    return Ensemble(target, kind, mean, std, members, **fields)


def finite(ensemble: Ensemble) -> BoolArray:
    """Whether there is a prediction by all members that count: those that did not see the point."""
    if ensemble.members is None:
        return np.isfinite(ensemble.mean) & np.isfinite(ensemble.std)
    counts = True if ensemble.absent is None else ensemble.absent
    return np.asarray(np.all(np.isfinite(ensemble.members) | ~np.asarray(counts), axis=1))


def refuse_negative(ensemble: Ensemble) -> None:
    """Refuse standard deviations below zero."""
    negative = int(np.count_nonzero(ensemble.std < 0))
    if negative:
        raise InputError(
            ensemble.key,
            counted(negative, "negative value"),
            "standard deviations",
        )


def _from_error_bars(ensemble: Ensemble) -> CalibrationData:
    residuals = ensemble.y - ensemble.mean
    if not np.any(residuals):
        raise CalibrationError(
            "All residuals are exactly zero, so no scale of the errors can be found."
        )
    # Of error bars alone nobody knows how many members made them: see `ERROR_BAR_METHODS`.
    n_members = np.full(len(residuals), 2)
    return CalibrationData(residuals, ensemble.std, n_members, np.ones(len(residuals)))
