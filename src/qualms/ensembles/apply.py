"""Giving the predictions in a file calibrated error bars."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, StrArray
from qualms.atomistic.labels import labelled
from qualms.atomistic.model import AtomisticModel
from qualms.calibration.base import rounding_of
from qualms.ensembles.calibration_file import CalibrationDocument, read_calibration
from qualms.ensembles.io import (
    CalibratedValues,
    Ensemble,
    Table,
    changed_columns,
    finite,
    is_table,
    read_ensemble,
    read_source,
    references_beside,
    refuse_negative,
    store,
)
from qualms.errors import InputError
from qualms.gp.ensemble import MIN_ABSENT, internal_prediction, stretched
from qualms.io.files import atomic_output
from qualms.io.xyz import xyz_text


@dataclass(frozen=True)
class Applied:
    """What was written.

    Attributes
    ----------
    n_points, n_members : int
    remarks : tuple of str
    """

    n_points: int
    n_members: int | None
    remarks: tuple[str, ...]


def apply_calibration(
    document: CalibrationDocument,
    predictions: str | Path,
    output: str | Path,
    *,
    target: str | None = None,
    absent: str | None = None,
    order: str | None = None,
    members: bool = True,
    force: bool = False,
) -> Applied:
    """Write predictions again, with error bars, and members if there are any, that are calibrated.

    ``{target}_uncertainty`` becomes the calibrated standard deviation, ``{target}_ensemble`` (or
    whatever the key is) the members scaled about their mean to have it, ``{target}`` that mean. All
    else is copied; references that have the name of the prediction are kept as ``REF_{target}``.
    Where members are marked that did not see a point, mean and spread are theirs.

    Parameters
    ----------
    document : CalibrationDocument
    predictions, output : path
        Of one format.
    target : str, optional
        If it has another name here than when the calibration was made.
    absent : str, optional
        Key of flags, one for each member: whether it did *not* see the point in its training;
        ``{target}_absent`` if there is one.
    order : {"member", "component"}, optional
        Which comes first in members of vectors; that of the calibration if the file does not tell.
    members : bool
        Whether to write members, too.
    force : bool
        Whether an existing file may be replaced.
    """
    name = target or document.target
    _check_formats(Path(predictions), Path(output))
    source = read_source(predictions)
    ensemble = read_ensemble(
        source,
        name,
        absent=absent,
        by=document.by,
        order=order,
        n_components=document.n_components,
        likely_order=document.order,
    )
    found, remarks = _calibrated(document, ensemble, members)
    aside = references_beside(source, ensemble, found.mean)
    if isinstance(source, Table):
        changes, without = changed_columns(source, ensemble, found, aside)
        source.write(output, changes, without=without, force=force)
    else:
        ends = np.searchsorted(ensemble.structure, np.arange(len(source) + 1))
        with atomic_output(output, force=force) as stream:
            for atoms, begin, end in zip(source, ends[:-1], ends[1:], strict=True):
                store(atoms, ensemble, found.some(slice(int(begin), int(end))), aside)
                stream.write(xyz_text(atoms).encode())
    return Applied(len(ensemble), ensemble.n_members, (*_kept(aside), *remarks))


def _check_formats(predictions: Path, output: Path) -> None:
    given, wanted = (is_table(path) and path.suffix.lower() for path in (predictions, output))
    if given != wanted:
        raise InputError(
            "output", f"'{output}'", f"the format of the predictions ({predictions.suffix})"
        )


def _calibrated(
    document: CalibrationDocument, ensemble: Ensemble, members: bool
) -> tuple[CalibratedValues, tuple[str, ...]]:
    """Return calibrated values, NaN where there are none, and what the user must know."""
    if document.kind != ensemble.kind:
        raise InputError(
            "calibration",
            f"made for a property of each {document.kind}",
            f"one for each {ensemble.kind}, as {ensemble.target} is here",
        )
    if document.n_components != ensemble.n_components:
        raise InputError(
            "calibration",
            f"made for {document.n_components} components",
            f"one for {ensemble.n_components}, as {ensemble.target} has here",
        )
    usable = _usable(ensemble)
    mean, spread, count = _committee(ensemble.some(usable.mask))
    labels = None if ensemble.labels is None else ensemble.labels[usable.mask]
    std = document.std(spread, count, labels)
    found = CalibratedValues(mean, std, None)
    if ensemble.members is not None and members:
        factor = np.divide(std, spread, out=np.zeros_like(std), where=spread > 0)
        stretched_members = stretched(ensemble.members[usable.mask], factor, mean)
        found = replace(found, members=stretched_members)
    remarks = (*usable.remarks, *_doubts(document, ensemble, spread))
    return found.among(usable.mask), remarks


@dataclass(frozen=True)
class _Usable:
    """Which points (n,) an error bar can be given to, and why not to the others."""

    mask: BoolArray
    remarks: tuple[str, ...]


def _usable(ensemble: Ensemble) -> _Usable:
    """Find the predictions that an error bar can be given to; refuse if there are none."""
    bad = ~finite(ensemble)
    reasons = {"with NaN or infinite predictions": bad}
    if ensemble.absent is not None:
        few = ensemble.absent.sum(axis=1) < MIN_ABSENT
        reasons[f"that fewer than {MIN_ABSENT} members had not seen"] = few & ~bad
        bad = bad | few
    counts = {why: int(np.count_nonzero(which)) for why, which in reasons.items()}
    found = [f"{ensemble.counted(n)} {why}" for why, n in counts.items() if n]
    hint = ""
    if ensemble.absent is None and ensemble.members is not None and _partly(ensemble.members):
        hint = f"If members are missing that saw a point, say so under {ensemble.target}_absent."
    if bad.all():
        raise InputError(ensemble.key, ", ".join(found), "finite predictions of new points", hint)
    if ensemble.members is None:
        refuse_negative(ensemble.some(~bad))
    return _Usable(
        ~bad, tuple(f"{text}: NaN is written for them. {hint}".strip() for text in found)
    )


def _partly(members: Float64Array) -> bool:
    """Whether some of the members say something about a point, and others do not."""
    known = np.isfinite(members)
    return bool(np.any(known.any(axis=1) & ~known.all(axis=1)))


def _committee(
    ensemble: Ensemble,
) -> tuple[Float64Array, Float64Array, int | IntArray | None]:
    """Return mean and spread of the members that did not see a point, and how many they are."""
    if ensemble.members is None:
        return ensemble.mean, ensemble.std, None
    if ensemble.absent is None:
        rounding = rounding_of(ensemble.members)
        # What differs by rounding agrees.
        spread = np.where(ensemble.std > rounding, ensemble.std, 0.0)
        return ensemble.mean, spread, ensemble.n_members
    known = np.where(ensemble.absent, ensemble.members, 0.0)
    internal = internal_prediction(known, ensemble.absent)
    spread = np.where(internal.std > rounding_of(known), internal.std, 0.0)
    return internal.mean, spread, internal.n_absent


def _kept(aside: Collection[str]) -> Iterator[str]:
    if aside:
        kept = ", ".join(f"{key} as REF_{key}" for key in sorted(aside))
        yield f"Not predicted by these members, so kept under another name: {kept}."


def _doubts(
    document: CalibrationDocument, ensemble: Ensemble, spread: Float64Array
) -> tuple[str, ...]:
    """Say what does not fit the calibration."""
    remarks = list(ensemble.remarks)
    if ensemble.has_stated_spread and not document.stated:
        remarks.append(
            f"The members have the spread that {ensemble.target}_uncertainty states: if they are "
            "calibrated already, they are now so twice."
        )
    if ensemble.n_members != document.n_members:
        remarks.append(
            f"The calibration was made for {document.n_members or 'an unknown number of'} members, "
            f"and there are {ensemble.n_members or 'only error bars'} here."
        )
    if ensemble.labels is not None:
        new = sorted(set(ensemble.labels.tolist()) - set(document.groups))
        if new:
            remarks.append(f"Not seen in the calibration, so without a factor: {', '.join(new)}.")
    low, high = document.spread
    typical = float(np.median(spread))
    if typical > 0 and not low / 10 < typical < 10 * high:
        remarks.append(
            f"The spread, {typical:.3g} on average, is far from that of the calibration, "
            f"{low:.3g} to {high:.3g} {document.units}".rstrip()
            + ": are the units the same?"
        )
    zero = int(np.count_nonzero(spread == 0))
    if zero:
        remarks.append(f"{ensemble.counted(zero)} without any spread: no error bar but zero.")
    return tuple(remarks)


# A calibration file on what a model of qualms predicts.
#: Labels may be alike by chance.
_BY_CHANCE = 0.1


@dataclass(frozen=True)
class ModelCalibration:
    """A calibration of certain points: the labelled ones of some structures.

    Attributes
    ----------
    name : str
        Of the file, and the method.
    document : CalibrationDocument
    labels : (n,) array of str, optional
        The group of each point, if the calibration has groups.
    n_members : int
        Of the model.
    """

    name: str
    document: CalibrationDocument
    labels: StrArray | None
    n_members: int

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (n, N_R) about their means so that they have the calibrated spread."""
        scaled = self.document.transform(members)
        return (
            scaled if self.labels is None else stretched(scaled, self.document.factors(self.labels))
        )

    def remarks(self, labels_seen: Float64Array) -> list[str]:
        """Say what the calibration was fitted to, and if it may have been these very points."""
        n_points = self.document.parameters.get("n_points", "an unknown number of")
        remarks = [f"{self.name}: fitted to {n_points} points."]
        seen = self.document.seen(labels_seen)
        if seen > _BY_CHANCE:
            remarks = [
                f"{self.name}: fitted to {n_points} points, of which about {seen:.0%} have the "
                "label of a point here. If they are the same points, its scores are too good."
            ]
        if self.document.n_members != self.n_members:
            n_members = self.document.n_members
            given = f"{n_members} members" if n_members else "error bars alone"
            remarks.append(
                f"{self.name}: made of {given}, and the model has {self.n_members} members."
            )
        if self.labels is not None:
            new = sorted(set(self.labels.tolist()) - set(self.document.groups))
            if new:
                names = ", ".join(name or "(none)" for name in new)
                remarks.append(f"{self.name}: not seen there, so without a factor: {names}.")
        return remarks


def calibration_for(path: Path, model: AtomisticModel, frames: Sequence[Atoms]) -> ModelCalibration:
    """Read a calibration, see that it is one of what the model predicts, and find the groups.

    Parameters
    ----------
    path : path
        Of the calibration.
    model : AtomisticModel
    frames : sequence of Atoms
        Structures that the model is to be judged on.
    """
    document, settings = read_calibration(path), model.settings
    if document.target != settings.target:
        raise InputError("--calibration", f"one of {document.target}", settings.target)
    kind = "atom" if model.fitted.per_atom else "structure"
    if document.kind != kind:
        raise InputError("--calibration", f"one of {document.kind}s", f"one of {kind}s")
    labels = None
    if document.by is not None:
        found = labelled(frames, settings.target, settings.kind, settings.species)
        rows: list[Any] = [*found.rows] or [None] * len(found.frames)
        pairs = zip(found.frames.tolist(), rows, strict=True)
        labels = np.concatenate([_labels(frames[i], document.by, some) for i, some in pairs])
        if not labels.astype(bool).any():
            expected = f"structures with a {document.by}"
            raise InputError("--calibration", f"one by {document.by}", expected)
    name = f"{path.name} ({document.method})"
    return ModelCalibration(name, document, labels, settings.n_members)


def _labels(atoms: Atoms, by: str, rows: Any | None) -> StrArray:
    """Return the group of a structure, or of some of its atoms; empty where it has none."""
    if rows is None or by not in ("element", *atoms.arrays):
        return np.full(1 if rows is None else len(rows), str(atoms.info.get(by, "")))
    values = np.array([*atoms.symbols]) if by == "element" else atoms.arrays[by]
    labels: StrArray = values.astype(str)[rows]
    return labels
