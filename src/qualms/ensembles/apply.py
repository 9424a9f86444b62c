"""Applying a calibration: predictions are written again with calibrated uncertainties."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.calibration.base import rounding_of
from qualms.ensembles.calibration_file import CalibrationDocument
from qualms.ensembles.io import (
    MEMBERS,
    UNCERTAINTIES,
    VARIANCES,
    Ensemble,
    Source,
    Table,
    component_endings,
    is_table,
    read_ensemble,
    read_source,
    with_results,
)
from qualms.errors import InputError
from qualms.evaluation import Evaluation
from qualms.gp.ensemble import MIN_ABSENT, internal_prediction, stretched
from qualms.io.files import atomic_output
from qualms.io.xyz import xyz_text
from qualms.prediction import Prediction

#: Values closer to the mean than this fraction of the standard deviation are that mean, rounded.
_THE_SAME = 0.05


@dataclass(frozen=True)
class Applied:
    """Summary of an output file.

    Attributes
    ----------
    n_points, n_members : int
    remarks : tuple of str
        Warnings for the user.
    """

    n_points: int
    n_members: int | None
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Values:
    """Mean and calibrated standard deviation (n,) of points, and members (n, N_R) if wanted."""

    mean: Float64Array
    std: Float64Array
    members: Float64Array | None

    def some(self, chosen: slice) -> _Values:
        members = None if self.members is None else self.members[chosen]
        return _Values(self.mean[chosen], self.std[chosen], members)


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
    """Write predictions again, with calibrated uncertainties and, if there are any, members.

    ``{target}_uncertainty`` becomes the calibrated standard deviation, ``{target}_ensemble`` (or
    the key that the file has) the members, rescaled about their mean, and ``{target}`` that mean.
    All other values are copied; reference values under the name of the prediction are kept as
    ``REF_{target}``. With out-of-bag flags, mean and standard deviation are out-of-bag.

    Parameters
    ----------
    document : CalibrationDocument
    predictions, output : path
        Of the same format.
    target : str, optional
        Name of the property, if it is not that of the calibration.
    absent : str, optional
        Key of one flag per member: whether the point was *not* in its training set;
        ``{target}_absent`` by default, if there is one.
    order : {"member", "component"}, optional
        Order of the members of vectors where the shape leaves it open; that of the calibration by
        default.
    members : bool
        Whether to write members.
    force : bool
        Whether an existing file may be replaced.
    """
    formats = [is_table(path) and Path(path).suffix.lower() for path in (predictions, output)]
    if formats[0] != formats[1]:
        expected = f"the format of the predictions ({Path(predictions).suffix})"
        raise InputError("output", f"'{output}'", expected)
    source = read_source(predictions)
    ensemble = read_ensemble(
        source,
        target or document.target,
        absent=absent,
        by=document.by,
        order=order or document.order,
        n_components=document.n_components,
    )
    found, remarks = _calibrated(document, ensemble, members)
    aside = _references(source, ensemble, found.mean)
    if aside:
        kept = ", ".join(f"{key} as REF_{key}" for key in sorted(aside))
        remarks = (
            f"Not predictions of these members, so kept under another name: {kept}.",
            *remarks,
        )
    if isinstance(source, Table):
        changes, without = _changed_columns(source, ensemble, found, aside)
        source.write(output, changes, without=without, force=force)
    else:
        ends = np.searchsorted(ensemble.structure, np.arange(len(source) + 1)).tolist()
        with atomic_output(output, force=force) as stream:
            for atoms, begin, end in zip(source, ends[:-1], ends[1:], strict=True):
                _store(atoms, ensemble, found.some(slice(begin, end)), aside)
                stream.write(xyz_text(atoms).encode())
    return Applied(len(ensemble), ensemble.n_members, remarks)


def recalibrate(
    evaluation: Evaluation, document: CalibrationDocument, *, extensive: bool = False
) -> Prediction:
    """Apply a calibration file to the predictions of a model, which are calibrated already.

    Parameters
    ----------
    evaluation : Evaluation
        With frames, if the calibration has groups or the target is extensive.
    document : CalibrationDocument
        Fitted to the output of `qualms predict`.
    extensive : bool
        Whether the values of the evaluation are per atom and those of the calibration are totals.
    """
    kind = "component" if evaluation.component is not None else "structure"
    kind = "atom" if kind == "structure" and evaluation.atom is not None else kind
    if (document.target, document.kind) != (evaluation.target, kind):
        given = f"made for {document.target} of {document.kind}s"
        raise InputError("calibration", given, f"one for {evaluation.target} of {kind}s")
    labels, sizes = None, np.ones(len(evaluation))
    frames = [] if evaluation.frames is None else evaluation.frames
    if extensive:
        sizes = np.array([len(frames[i]) for i in evaluation.structure])
    if document.by is not None:
        atoms = evaluation.structure if evaluation.atom is None else evaluation.atom
        pairs = zip(evaluation.structure, atoms, strict=True)
        labels = np.array([_label(frames[i], document.by, j) for i, j in pairs])
    prediction = evaluation.prediction
    std = document.std(prediction.std * sizes, prediction.n_members, labels) / sizes
    return Prediction(mean=prediction.mean, std=std)


def _label(frame: Atoms, by: str, atom: int) -> str:
    """Return the group of an atom, or of its structure."""
    if by == "element":
        return str(frame.symbols[atom])
    return str(frame.arrays[by][atom] if by in frame.arrays else frame.info.get(by, ""))


def _calibrated(
    document: CalibrationDocument, ensemble: Ensemble, members: bool
) -> tuple[_Values, tuple[str, ...]]:
    """Return calibrated values, NaN where there are none, and warnings."""
    made_for = (document.kind, document.n_components)
    if made_for != (ensemble.kind, ensemble.n_components):
        given = f"made for {document.kind}s, {document.n_components} per row"
        expected = f"one for {ensemble.kind}s, {ensemble.n_components} per row"
        raise InputError("calibration", given, expected)
    usable, remarks = _usable(ensemble)
    some = ensemble.some(usable)
    mean, spread, count = _committee(some)
    std = document.std(spread, count, some.labels)
    found = [mean, std]
    if some.members is not None and members:
        factor = np.divide(std, spread, out=np.zeros_like(std), where=spread > 0)
        found.append(stretched(some.members, factor, mean))
    filled: list[Any] = [np.full((len(usable), *values.shape[1:]), np.nan) for values in found]
    for all_rows, values in zip(filled, found, strict=True):
        all_rows[usable] = values
    checks = _checks(document, ensemble, spread)
    return _Values(*filled, *[None] * (3 - len(filled))), (*ensemble.remarks, *remarks, *checks)


def _usable(ensemble: Ensemble) -> tuple[BoolArray, tuple[str, ...]]:
    """Return which points (n,) can be calibrated, and warnings about the others."""
    bad = ~ensemble.is_finite
    reasons = {"with NaN or infinite predictions": bad}
    if ensemble.absent is not None:
        few = ensemble.absent.sum(axis=1) < MIN_ABSENT
        reasons[f"with fewer than {MIN_ABSENT} out-of-bag members"] = few & ~bad
        bad = bad | few
    found = [f"{ensemble.counted(int(w.sum()))} {why}" for why, w in reasons.items() if w.any()]
    hint = ""
    if ensemble.absent is None and ensemble.members is not None:
        known = np.isfinite(ensemble.members)
        if np.any(known.any(axis=1) & ~known.all(axis=1)):
            hint = f"Flags of out-of-bag members are read from {ensemble.target}_absent."
    if bad.all():
        raise InputError(ensemble.key, ", ".join(found), "finite predictions of new points", hint)
    return ~bad, tuple(f"{text}: NaN is written for them. {hint}".strip() for text in found)


def _committee(ensemble: Ensemble) -> tuple[Float64Array, Float64Array, int | IntArray | None]:
    """Return mean, standard deviation and number of the (out-of-bag) members of each point."""
    if ensemble.members is None:
        return ensemble.mean, ensemble.std, None
    members, mean, std = ensemble.members, ensemble.mean, ensemble.std
    count: int | IntArray | None = ensemble.n_members
    if ensemble.absent is not None:
        members = np.where(ensemble.absent, members, 0.0)
        found = internal_prediction(members, ensemble.absent)
        mean, std, count = found.mean, found.std, found.n_absent
    # Members that differ by rounding are identical.
    return mean, np.where(std > rounding_of(members), std, 0.0), count


def _checks(
    document: CalibrationDocument, ensemble: Ensemble, spread: Float64Array
) -> Iterator[str]:
    """Yield warnings about predictions that differ from those of the calibration."""
    if ensemble.n_members != document.n_members:
        yield (
            f"The calibration was fitted to {document.n_members or 'an unknown number of'} members;"
            f" the file has {ensemble.n_members or 'only uncertainties'}."
        )
    if ensemble.labels is not None:
        new = sorted(set(ensemble.labels.tolist()) - set(document.groups))
        if new:
            yield f"Groups without a factor in the calibration: {', '.join(new)}."
    low, high = document.std_range
    typical = float(np.median(spread))
    if typical > 0 and not low / 10 < typical < 10 * high:
        yield (
            f"The median standard deviation, {typical:.3g}, is far from the range of the "
            f"calibration, {low:.3g} to {high:.3g} {document.units}".rstrip()
            + ": are the units the same?"
        )
    zero = int(np.count_nonzero(spread == 0))
    if zero:
        yield f"{ensemble.counted(zero)} with identical members: their uncertainty is zero."


# Values that must not be overwritten.


def _references(source: Source, ensemble: Ensemble, mean: Float64Array) -> set[str]:
    """Return keys of reference values that would be overwritten, or look like predictions.

    That is the target itself, if the value under its name is not the mean of the members. ASE reads
    keys that it knows, such as energy and forces, as results of one calculation: values beside such
    a reference value, or beside no prediction at all, were not predicted by these members either.
    """
    name = ensemble.target
    if ensemble.members is None:
        return set()  # the value under that name is the prediction
    frames = [] if isinstance(source, Table) else source
    keys = {key for atoms in frames for part in with_results(atoms) for key in part}
    keys |= {*source, *ensemble.columns} if isinstance(source, Table) else set()
    is_reference = f"REF_{name}" not in keys and _is_reference(ensemble, mean)
    aside = {name} if is_reference else set()
    if name in all_properties and frames and (is_reference or name not in keys):
        for key in keys.intersection(all_properties) - {name}:
            predicted = any(f"{key}{suffix}" in keys for suffix in (*MEMBERS, *UNCERTAINTIES))
            if f"REF_{key}" not in keys and (is_reference or not predicted):
                aside.add(key)
    return aside


def _is_reference(ensemble: Ensemble, mean: Float64Array) -> bool:
    """Return whether values under the name of the target are not the mean of the members.

    A value beside an uncertainty is an earlier prediction.
    """
    if ensemble.stored_mean is None or ensemble.has_uncertainty:
        return False
    found = False
    for center in (mean, ensemble.mean):
        known = np.isfinite(ensemble.stored_mean) & np.isfinite(center) & np.isfinite(ensemble.std)
        if known.any():
            found = True
            distance = np.median(np.abs(ensemble.stored_mean - center)[known])
            rounding = 1e-9 * np.median(np.abs(center[known]))
            if distance <= _THE_SAME * np.median(ensemble.std[known]) + rounding:
                return False
    return found


# Values that are written.


def _entries(
    ensemble: Ensemble, stored: Collection[str], found: _Values
) -> dict[str, Float64Array]:
    """Return values by key, a row for each structure or atom, in the shape that they had.

    Uncertainties that are `stored` under other keys are replaced, too.
    """
    name, shape = ensemble.target, (-1, *ensemble.shape)
    std = found.std.reshape(shape)
    entries = {name: found.mean.reshape(shape), f"{name}_uncertainty": std}
    for suffix in UNCERTAINTIES:
        if f"{name}{suffix}" in stored:
            entries[f"{name}{suffix}"] = std**2 if suffix in VARIANCES else std
    if found.members is not None:
        assert ensemble.layout is not None
        entries[ensemble.key] = ensemble.layout.stored(found.members)
    return entries


def _changed_columns(
    table: Table, ensemble: Ensemble, found: _Values, aside: Collection[str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the columns that are new or have new values, and those that are left out.

    Parameters
    ----------
    table : Table
    ensemble : Ensemble
        The values that were read from it.
    found : _Values
    aside : collection of str
        Keys that are kept under another name.
    """
    known, without = dict(ensemble.columns), set[str]()
    changes = {f"REF_{n}": table[n] for key in aside for n in known.get(key, (key,))}
    # New columns of vectors are named after columns of the same kind: `_x` or `_0`.
    stems = (key for key in known if key not in (ensemble.key, f"{ensemble.target}_absent"))
    stem = next(stems, "")
    endings = tuple(name.removeprefix(stem) for name in known.get(stem, ()))
    if ensemble.members is not None:
        old = known.get(ensemble.key, (ensemble.key,))
        # Numbered members of vectors have the names of numbered components.
        clash = not {f"{ensemble.target}{ending}" for ending in endings}.isdisjoint(old)
        if clash:
            endings = component_endings(ensemble.n_components)
        if found.members is None or (clash and not endings):
            without.update(old)
            known.pop(ensemble.key, None)
    for key, values in _entries(ensemble, {*table, *known}, found).items():
        flat = values.reshape(len(values), -1)
        names = known.get(key, tuple(f"{key}{ending}" for ending in endings))
        if key not in table and values.ndim > 1 and len(names) == flat.shape[1]:
            changes |= {column: flat[:, i] for i, column in enumerate(names)}
        else:
            changes[key] = values
    return changes, without


def _store(atoms: Atoms, ensemble: Ensemble, found: _Values, aside: Collection[str]) -> None:
    """Put calibrated values into a structure, in the place of those that it has.

    Parameters
    ----------
    atoms : Atoms
    ensemble : Ensemble
        The values of all structures.
    found : _Values
        Of this structure.
    aside : collection of str
        Keys that are kept under another name.
    """
    # ASE has read the keys that it knows into a calculator; they belong into the file.
    atoms.info, arrays = with_results(atoms)
    atoms.arrays.update(arrays)
    atoms.calc = None
    for place in (atoms.info, atoms.arrays):
        for key in aside:
            if key in place:
                place[f"REF_{key}"] = place.pop(key)
    place = atoms.arrays if ensemble.per_atom else atoms.info
    if found.members is None and ensemble.members is not None:
        place.pop(ensemble.key, None)
    for key, rows in _entries(ensemble, place, found).items():
        place[key] = rows if ensemble.per_atom else rows[0]
    for key in ("stress", "virial"):
        # ASE reads nine numbers as a matrix, and no other number of them.
        value = np.asarray(atoms.info.get(key, ()))
        if value.shape == (6,):
            atoms.info[key] = voigt_6_to_full_3x3_stress(value)  # type: ignore[no-untyped-call]
        elif value.shape == (9,):
            atoms.info[key] = value.reshape(3, 3)
