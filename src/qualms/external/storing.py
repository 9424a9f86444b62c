"""Where calibrated values go: into the keys and columns that they came from, beside all else."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.core.typing import BoolArray, Float64Array
from qualms.external.columns import component_endings
from qualms.external.ensemble import Ensemble
from qualms.external.sources import ERROR_BARS, MEMBERS, VARIANCES, Source, with_results
from qualms.external.tables import Table

#: What ASE reads and writes as matrices, and as nothing else.
_MATRICES = ("stress", "virial")
#: Values that are closer to the mean than this part of the spread are that mean, written rounded.
_THE_SAME = 0.05


@dataclass(frozen=True)
class CalibratedValues:
    """Mean and calibrated standard deviation (n,) of points, and members (n, R) if wanted."""

    mean: Float64Array
    std: Float64Array
    members: Float64Array | None

    def some(self, chosen: slice) -> CalibratedValues:
        """Return those of some of the points."""
        members = None if self.members is None else self.members[chosen]
        return CalibratedValues(self.mean[chosen], self.std[chosen], members)

    def among(self, chosen: BoolArray) -> CalibratedValues:
        """Return values of all points, of which these are some: NaN for the others."""

        def filled(values: Float64Array) -> Float64Array:
            rows: Float64Array = np.full((len(chosen), *values.shape[1:]), np.nan)
            rows[chosen] = values
            return rows

        members = None if self.members is None else filled(self.members)
        return CalibratedValues(filled(self.mean), filled(self.std), members)


# --- what must not be overwritten ---


def references_beside(source: Source, ensemble: Ensemble, mean: Float64Array) -> set[str]:
    """Return the keys that hold references, and would be taken for predictions of the members.

    That is the target itself, if what is stored under its name is not what the members say. ASE
    reads keys that it knows, such as energy and forces, as results of one calculation: whatever
    stands beside such a reference, or beside no prediction at all, is not of these members either.
    """
    name = ensemble.target
    if ensemble.members is None:
        return set()  # the value under that name is the prediction
    frames = source if isinstance(source, list) else []
    keys = {key for atoms in frames for part in with_results(atoms) for key in part}
    keys |= set() if isinstance(source, list) else {*source, *ensemble.columns}
    is_reference = _is_reference(ensemble, mean) and f"REF_{name}" not in keys
    aside = {name} if is_reference else set()
    if name in all_properties and frames and (is_reference or name not in keys):
        for key in keys.intersection(all_properties) - {name}:
            predicted = any(f"{key}{suffix}" in keys for suffix in (*MEMBERS, *ERROR_BARS))
            if f"REF_{key}" not in keys and (is_reference or not predicted):
                aside.add(key)
    return aside


def _is_reference(ensemble: Ensemble, mean: Float64Array) -> bool:
    """Whether what stands under the name of the target is not a prediction of the members.

    A value with an error bar beside it is an earlier prediction, and so is the mean of the members.
    """
    if ensemble.beside is None or ensemble.has_bars:
        return False
    found = False
    for center in (mean, ensemble.mean):
        known = np.isfinite(ensemble.beside) & np.isfinite(center) & np.isfinite(ensemble.std)
        if known.any():
            found = True
            distance = np.median(np.abs(ensemble.beside - center)[known])
            rounding = 1e-9 * np.median(np.abs(center[known]))
            if distance <= _THE_SAME * np.median(ensemble.std[known]) + rounding:
                return False
    return found


# --- what is written ---


def _entries(
    ensemble: Ensemble, stored: Container[str], found: CalibratedValues
) -> dict[str, Float64Array]:
    """Return what is to be stored, by key, a row for each structure or atom, in its old shape.

    Error bars that are `stored` under another key would contradict the new ones: they become new.
    """
    name, shape = ensemble.target, (-1, *ensemble.shape)
    std = found.std.reshape(shape)
    entries = {name: found.mean.reshape(shape), f"{name}_uncertainty": std}
    for suffix in ERROR_BARS:
        if f"{name}{suffix}" in stored:
            entries[f"{name}{suffix}"] = std**2 if suffix in VARIANCES else std
    if found.members is not None:
        assert ensemble.layout is not None
        entries[ensemble.key] = ensemble.layout.stored(found.members)
    return entries


def changed_columns(
    source: Table, ensemble: Ensemble, found: CalibratedValues, aside: Collection[str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the columns of a table that are new or have new values, and those that are no more.

    Parameters
    ----------
    source : Table
        The columns as they are.
    ensemble : Ensemble
        What was read of them.
    found : CalibratedValues
    aside : collection of str
        Keys that are to be kept under another name.
    """
    known, without = dict(ensemble.columns), set[str]()
    changes = {f"REF_{n}": source[n] for key in aside for n in known.get(key, (key,))}
    endings = _endings(ensemble)
    if ensemble.members is not None:
        old = known.get(ensemble.key, (ensemble.key,))
        # Numbered members of vectors take the names of numbered components.
        clash = not {f"{ensemble.target}{ending}" for ending in endings}.isdisjoint(old)
        if clash:
            endings = component_endings(ensemble.n_components)
        if found.members is None or (clash and not endings):
            without.update(old)
            known.pop(ensemble.key, None)
    for key, values in _entries(ensemble, {*source, *known}, found).items():
        flat = values.reshape(len(values), -1)
        names = known.get(key, tuple(f"{key}{ending}" for ending in endings))
        if key not in source and values.ndim > 1 and len(names) == flat.shape[1]:
            changes |= {column: flat[:, i] for i, column in enumerate(names)}
        else:
            changes[key] = values
    return changes, without


def _endings(ensemble: Ensemble) -> tuple[str, ...]:
    """Return how the components of values are called here, after the key; nothing if by no name."""
    members = (ensemble.key, f"{ensemble.target}_absent")
    stem = next((key for key in ensemble.columns if key not in members), "")
    return tuple(name.removeprefix(stem) for name in ensemble.columns.get(stem, ()))


def store(
    atoms: Atoms, ensemble: Ensemble, found: CalibratedValues, aside: Collection[str]
) -> None:
    """Put calibrated values into a structure, in the place of those that it came with.

    Parameters
    ----------
    atoms : Atoms
    ensemble : Ensemble
        What was read of all structures.
    found : CalibratedValues
        Of this one.
    aside : collection of str
        Keys that are to be kept under another name.
    """
    # Keys that ASE knows were read into a calculator; they belong back into the file.
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
    for key in _MATRICES:
        if key in atoms.info:
            atoms.info[key] = _matrix(atoms.info[key])


def _matrix(value: Any) -> Any:
    """Return a tensor as (3, 3): ASE reads nine numbers as a matrix, and no others at all."""
    numbers = np.asarray(value)
    if numbers.shape == (6,):
        return voigt_6_to_full_3x3_stress(numbers)  # type: ignore[no-untyped-call]
    return numbers.reshape(3, 3) if numbers.shape == (9,) else value
