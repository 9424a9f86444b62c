"""Labels: where those of structures and atoms are, which are missing, and the rows they make.

A label ``key`` of a structure is looked up in ``atoms.info[key]``, then in
``atoms.info["REF_" + key]``, which ASE does not touch, and last among the stored results of a
calculator, where ASE moves energies, forces and so on when it reads a file. Labels of atoms are in
``atoms.arrays`` instead. Nothing is ever calculated. None and NaN mean that there is no label, and
so do values that a model predicted: see `qualms.io.xyz`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.structures import (
    symbols_of,
)
from qualms.errors import InputError, did_you_mean, warn
from qualms.features.base import VOIGT, offsets_of
from qualms.io.xyz import is_prediction

#: How data sets tag the isolated atoms that energies are counted from, in lower case.
ISOLATED = ("isolated_atom", "isolatedatom")
#: A matrix whose halves differ by more than this, relative to its largest number, is no stress.
_SYMMETRY = 1e-3
_RESULTS = "calc.results"
_PER_ATOM = "It is an array of atoms: use `kind='atomic'`."
_PER_STRUCTURE = "It is a number per structure, and `kind='atomic'` is for values of atoms."


# --- labels of structures and atoms ---------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """Labels of one key."""

    frames: IntArray  #: (n_frames,): structures with at least one label, isolated atoms left out
    #: (n,): their labels, finite, in the units of the data: one for each structure, or those of all
    #: labelled atoms, structure after structure
    values: Float64Array
    #: the labelled atoms of each structure; empty unless the labels are of atoms
    rows: list[IntArray]
    n_unlabelled: int  #: structures, or atoms of the species of the target, without a label
    n_isolated: int  #: structures tagged as isolated atoms
    isolated: dict[int, float]  #: the label of the isolated atom of each atomic number that has one


def labelled(
    frames: Sequence[Atoms],
    key: str,
    kind: str,
    species: Sequence[int] | None = None,
    *,
    required: bool = True,
) -> Labelled:
    """Return which structures, or atoms of some species, have a label, and the labels.

    Structures of one atom whose ``info["config_type"]`` is "isolated_atom" or "IsolatedAtom" are
    not learned from; their labels are returned apart.

    Parameters
    ----------
    frames : sequence of Atoms
    key : str
    kind : str
        Kind of the property; labels belong to atoms if it is "atomic".
    species : sequence of int, optional
        Atomic numbers of the atoms whose labels are used; all, unless given.
    required : bool
        Whether it is an error if there is no label.
    """
    per_atom = kind == "atomic"
    values = find_targets(frames, key, per_atom=per_atom, species=species, required=required)
    isolated = [is_isolated(atoms) for atoms in frames]
    rows = [np.flatnonzero(np.isfinite(v)) for v in values]
    used = [i for i in range(len(frames)) if len(rows[i]) and not isolated[i]]
    if not used and required:
        of = "" if species is None else f" of {symbols_of(species)}"
        what = f"atom{of}" if per_atom else "structure"
        raise InputError(
            f"No {what} has a label {key!r}, other than isolated atoms; at least one is needed.",
            parameter="key",
        )
    rest = [atoms for atoms, alone in zip(frames, isolated, strict=True) if not alone]
    n_labelable = len(rest)
    if per_atom:
        n_labelable = sum(int(np.count_nonzero(_is_of_species(atoms, species))) for atoms in rest)
    return Labelled(
        frames=np.array(used, dtype=np.intp),
        values=np.concatenate([np.empty(0), *(values[i][rows[i]] for i in used)]),
        rows=[rows[i] for i in used] if per_atom else [],
        n_unlabelled=n_labelable - sum(len(rows[i]) for i in used),
        n_isolated=sum(isolated),
        isolated=agreeing(
            (int(frames[i].numbers[0]), float(values[i][0]))
            for i in np.flatnonzero(isolated).tolist()
            if len(rows[i])
        ),
    )


def find_targets(
    frames: Sequence[Atoms],
    key: str,
    *,
    per_atom: bool = False,
    species: Sequence[int] | None = None,
    required: bool = True,
) -> list[Float64Array]:
    """Return the label of each structure (1,), or those of its atoms (n_atoms,), NaN for none.

    Parameters
    ----------
    frames : sequence of Atoms
    key : str
    per_atom : bool
        Whether labels belong to atoms.
    species : sequence of int, optional
        Atomic numbers of the atoms whose labels are used; all, unless given.
    required : bool
        Whether it is an error if there is no label.
    """
    values = [np.full(len(atoms) if per_atom else 1, np.nan) for atoms in frames]
    for i, (value, place) in _find_all(frames, key, per_atom, required=required).items():
        n, of_species = len(values[i]), np.ones(1, dtype=bool)
        if per_atom:
            of_species = _is_of_species(frames[i], species)
        expected = f"one number for each of {n} atoms" if per_atom else "one number"
        shapes: list[tuple[int, ...]] = [(n,), (n, 1)] if per_atom else [(), (1,)]
        shape, hint = _as_array(value).shape, ""
        if shape[:1] == (() if per_atom else (len(frames[i]),)):
            hint = _PER_STRUCTURE if per_atom else _PER_ATOM
        numbers = _numbers(value, f"frames[{i}].{place}", shapes, expected, hint).reshape(n)
        values[i][of_species] = _finite(numbers[of_species], f"frames[{i}].{place}")
    return values


def _find_all(
    frames: Sequence[Atoms], key: str, per_atom: bool, *, required: bool
) -> dict[int, tuple[object, str]]:
    """Return the label, as it is stored, and its place, for each structure that has one."""
    if len(frames) == 0:
        raise InputError("There are no structures; at least one is needed.", parameter="frames")
    labels = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, per_atom))}
    predicted = sum(any(p for *_, p in _stored(atoms, key, per_atom)) for atoms in frames)
    if not labels and required:
        _reject_key(frames, key, per_atom, predicted=predicted > 0)
    _check_shared_calculators(frames, labels)
    if predicted:
        warn(
            f"{key!r} has {key}_uncertainty beside it in {predicted} structures: these values are "
            f"predictions, not labels; REF_{key} is used where it exists."
        )
    places = Counter(place for _, place in labels.values())
    if len(places) > 1:
        several = ", ".join(f"{place} ({n} structures)" for place, n in places.most_common())
        warn(f"{key!r} is in several places: {several}. Check that the origin is the same.")
    return labels


def find_label(atoms: Atoms, key: str, per_atom: bool) -> tuple[object, str] | None:
    """Return the label of one structure and its place; see the top of this module.

    Parameters
    ----------
    atoms : Atoms
    key : str
    per_atom : bool
        Whether the label is an array of atoms.
    """
    stored = _stored(atoms, key, per_atom)
    return next(((value, place) for value, place, predicted in stored if not predicted), None)


def _stored(atoms: Atoms, key: str, per_atom: bool) -> Iterator[tuple[object, str, bool]]:
    """Yield the values under a key, their places, and whether they are predictions."""
    store, name = (atoms.arrays, "arrays") if per_atom else (atoms.info, "info")
    results = _stored_results(atoms)
    stored = [(k, store[k], f"{name}[{k!r}]", None) for k in (key, f"REF_{key}") if k in store]
    if key in results:
        stored.append((key, results[key], f"{_RESULTS}[{key!r}]", atoms.calc))
    for k, value, place, calculator in stored:
        stores = (atoms.info, atoms.arrays, results)
        uncertain = any(f"{k}_uncertainty" in entries for entries in stores)
        yield value, place, uncertain and is_prediction(atoms, k, value, calculator)


def _stored_results(atoms: Atoms) -> dict[str, Any]:
    """Return stored results; asking a calculator for a property might start a calculation."""
    return dict(getattr(atoms.calc, "results", None) or {})


def _check_shared_calculators(
    frames: Sequence[Atoms], labels: dict[int, tuple[object, str]]
) -> None:
    """Reject one calculator of several structures: it stores the results of the last one only."""
    owners: dict[int, int] = {}
    for i in (i for i, (_, place) in labels.items() if place.startswith(_RESULTS)):
        j = owners.setdefault(id(frames[i].calc), i)
        if frames[i] is not frames[j]:
            raise InputError(
                f"Structure {i} and structure {j} share a calculator, which stores the results of "
                "one structure only. Copy each result to atoms.info or atoms.arrays when it is "
                "computed.",
                parameter=f"frames[{i}].calc",
            )


def _numbers(
    value: object, name: str, shapes: Sequence[tuple[int, ...]], expected: str, hint: str = ""
) -> Float64Array:
    """Return a label as float64, NaN for None."""
    array = _as_array(np.nan if value is None else value)
    if array.dtype == object:
        # Mixed with numbers None gives NaN; with strings it gives strings, which are rejected.
        array = np.array([np.nan if v is None else v for v in array.ravel()]).reshape(array.shape)
    if array.dtype.kind not in "iuf" or array.shape not in shapes:
        if array.dtype == bool:
            hint = "In extended XYZ a key without a value means True: omit keys of missing labels."
        value = f"an array of {array.dtype.name} of shape {array.shape}"
        value = value if array.ndim else repr(array.item())[:40]
        raise InputError(
            f"The label {name} is {value}; it must be {expected}. {hint}", parameter=name
        )
    return array.astype(np.float64)


def _finite(values: Float64Array, name: str) -> Float64Array:
    """Return values that are finite or NaN."""
    if np.isinf(values).any():
        raise InputError(
            f"The label {name} has infinite values. Write finite numbers, or NaN where there is no "
            "label.",
            parameter=name,
        )
    return values


def _as_array(value: object) -> np.ndarray[Any, Any]:
    """Return any value as an array, masked numbers as NaN.

    What cannot be an array becomes a string, which is no number.
    """
    if np.ma.is_masked(value):
        return np.ma.filled(np.ma.asarray(value).astype(np.float64), np.nan)
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.asarray(str(value))


def _reject_key(frames: Sequence[Atoms], key: str, per_atom: bool, *, predicted: bool) -> NoReturn:
    """Raise an error that lists the keys that exist."""
    if predicted:
        raise InputError(
            f"All values of {key!r} have {key}_uncertainty beside them: they are predictions, not "
            f"labels. Store labels as REF_{key}, or remove an outdated {key}_uncertainty.",
            parameter="key",
        )
    if {key, f"REF_{key}"} & _present(frames, not per_atom):
        hint = _PER_STRUCTURE if per_atom else _PER_ATOM
        what = "atoms" if per_atom else "structures"
        raise InputError(f"{key!r} is not a label of {what}. {hint}", parameter="key")
    _reject("key", key, "label of atoms" if per_atom else "label", _present(frames, per_atom))


def _reject(name: str, key: str, what: str, present: set[str]) -> NoReturn:
    """Raise an error that lists the keys that exist, and suggests a similar one."""
    raise InputError(
        f"No structure has a {what} {key!r}.{did_you_mean(key, present)} {listed(present)}",
        parameter=name,
    )


def listed(keys: set[str]) -> str:
    """Return a sentence with keys that exist."""
    return (
        f"Keys present: {', '.join(map(repr, sorted(keys)))}."
        if keys
        else "There are no such keys."
    )


def _present(frames: Sequence[Atoms], per_atom: bool, *shapes: tuple[int, ...]) -> set[str]:
    """Return the keys that any structure has a value for, of some shapes after the atoms."""
    keys: set[str] = set()
    for atoms in frames:
        store, results = atoms.arrays if per_atom else atoms.info, _stored_results(atoms)
        for k, value in {**results, **store}.items():
            shape = _as_array(value).shape
            fits = k in store or (shape[:1] == (len(atoms),)) == per_atom
            if fits and (not shapes or shape[per_atom:] in shapes):
                keys.add(str(k))
    return keys - {"numbers", "positions"} if per_atom else keys


def _is_of_species(atoms: Atoms, species: Sequence[int] | None) -> BoolArray:
    numbers = np.asarray(atoms.numbers)
    return np.ones(len(numbers), dtype=bool) if species is None else np.isin(numbers, species)


def is_isolated(atoms: Atoms) -> bool:
    """Whether a structure is tagged as an isolated atom."""
    return len(atoms) == 1 and str(atoms.info.get("config_type")).lower() in ISOLATED


def agreeing(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the energy of isolated atoms by atomic number; all of an element must agree."""
    energies: dict[int, float] = {}
    for z, value in values:
        if not math.isclose(energies.setdefault(z, value), value, rel_tol=1e-8):
            raise InputError(
                f"There are isolated {symbols_of([z])} atoms with energies {energies[z]:.10g} and "
                f"{value:.10g}. Keep one for each element.",
                parameter="frames",
            )
    return energies


# --- labels of forces and stresses ----------------------------------------------------------------


@dataclass(frozen=True)
class ForceLabels:
    """Forces and virials of the structures of a training set; a row for each known component.

    Rows of a structure are those of its forces, atom after atom, and then those of its virial.
    """

    forces: list[Float64Array]  #: NaN where there is none
    #: (n_structures, 6): Vσ per atom, in the units of the energy; NaN where there is none
    virials: Float64Array

    @cached_property
    def known(self) -> list[BoolArray]:
        """Which of the 3n + 6 components of each structure have a row."""
        return [np.isfinite(values) for values in self._components]

    @cached_property
    def offsets(self) -> IntArray:
        """Rows of structure s are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of([int(np.count_nonzero(mask)) for mask in self.known])

    @cached_property
    def y(self) -> Float64Array:
        """Labels of all rows."""
        pairs = zip(self._components, self.known, strict=True)
        return np.concatenate([values[mask] for values, mask in pairs])

    @property
    def n_with_virial(self) -> int:
        """Structures with a stress."""
        return int(np.count_nonzero(np.isfinite(self.virials).any(axis=1)))

    @property
    def _components(self) -> list[Float64Array]:
        pairs = zip(self.forces, self.virials, strict=True)
        return [np.concatenate([forces.ravel(), virial]) for forces, virial in pairs]


def force_labels(
    frames: Sequence[Atoms],
    used: IntArray,
    forces: str | None,
    stress: str | None,
    *,
    required: bool = True,
) -> ForceLabels:
    """Return the forces and virials of the structures with an energy.

    Parameters
    ----------
    frames : sequence of Atoms
    used : (n,) array of int
        Structures with an energy.
    forces, stress : str or None
        Keys; None if they are not learned.
    required : bool
        Whether it is an error if there is no label, and a warning if all are zero.
    """
    of_frames = [np.full((len(frames[i]), 3), np.nan) for i in used]
    virials = np.full((len(used), 6), np.nan)
    if forces is not None:
        vectors = find_forces(frames, forces, required=required)
        unused = [i for i in vectors if i not in set(used.tolist()) and not is_isolated(frames[i])]
        if unused:
            warn(
                f"{len(unused)} structures (first frames[{unused[0]}]) have {forces!r} but no "
                "energy; their forces are not used."
            )
        of_frames = [
            vectors.get(i, empty) for i, empty in zip(used.tolist(), of_frames, strict=True)
        ]
        if required:
            _warn_if_zero([f for f in of_frames if len(f) > 1], forces)
    if stress is not None:
        stresses = find_stresses(frames, stress, required=required)
        for row, i in enumerate(used.tolist()):
            if i in stresses:
                virials[row] = stresses[i] * frames[i].cell.volume / len(frames[i])
        if required:
            _warn_if_zero([*virials], stress)
    labels = ForceLabels(of_frames, virials)
    if required and not len(labels.y):
        name, key = ("forces", forces) if forces is not None else ("stress", stress)
        reject_without_energy(name, str(key))
    return labels


def reject_without_energy(name: str, key: str) -> NoReturn:
    """Raise an error about forces, or stresses, of structures without an energy."""
    raise InputError(
        f"No structure with an energy has {name} under {key!r}; at least one is needed.",
        parameter=name,
    )


def _warn_if_zero(labels: Sequence[Float64Array], key: str) -> None:
    """Warn if all forces, or stresses, are zero, which stands for unknown in some data sets."""
    arrays = [values for values in labels if np.isfinite(values).any()]
    if len(arrays) > 1 and not any(np.any(np.nan_to_num(values)) for values in arrays):
        warn(f"All values of {key!r} are zero. If they are unknown, omit them or write NaN.")


def find_forces(
    frames: Sequence[Atoms], key: str, *, required: bool = True
) -> dict[int, Float64Array]:
    """Return the forces (n_atoms, 3) of each structure that has some.

    Parameters
    ----------
    frames : sequence of Atoms
    key : str
    required : bool
        Whether it is an error if no structure has forces.
    """
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, True))}
    if not places and required:
        _reject("forces", key, "label of three numbers for each atom", _present(frames, True, (3,)))
    _check_shared_calculators(frames, places)
    forces = {}
    for i, (value, place) in places.items():
        name = f"frames[{i}].{place}"
        shape, expected = (len(frames[i]), 3), "three numbers for each atom"
        forces[i] = _finite(_numbers(value, name, [shape], expected), name)
    return {i: values for i, values in forces.items() if np.isfinite(values).any()}


def find_stresses(
    frames: Sequence[Atoms], key: str, *, required: bool = True
) -> dict[int, Float64Array]:
    """Return the stress (6,) of each structure that has one and a cell with a volume.

    Zeros beside a structure that is not periodic are taken as unknown.

    Parameters
    ----------
    frames : sequence of Atoms
    key : str
    required : bool
        Whether it is an error if no structure has a stress, and a warning if a cell has no volume.
    """
    if "virial" in key.casefold() and "stress" not in key.casefold():
        raise InputError(
            f"{key!r} seems to be a virial, which is −V times the stress (1/V) ∂E/∂ε that is "
            f"learned. Convert it: atoms.info['stress'] = -atoms.info[{key!r}] / "
            "atoms.get_volume().",
            parameter="stress",
        )
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, False))}
    if not places and required:
        tensors = _present(frames, False, (6,), (9,), (3, 3))
        _reject("stress", key, "label of six numbers, or a symmetric matrix,", tensors)
    _check_shared_calculators(frames, places)
    values = {i: voigt(value, f"frames[{i}].{place}") for i, (value, place) in places.items()}
    labels = {i: v for i, v in values.items() if frames[i].pbc.any() or np.nan_to_num(v).any()}
    labels = {i: value for i, value in labels.items() if np.isfinite(value).any()}
    stresses = {i: value for i, value in labels.items() if frames[i].cell.rank == 3}
    unused = sorted({*labels} - {*stresses})
    if unused and required:
        warn(
            f"{len(unused)} structures (first frames[{unused[0]}]) have {key!r} but no cell with a "
            "volume; their stress is not used."
        )
    return stresses


def voigt(value: object, name: str) -> Float64Array:
    """Return a stress as six numbers, from six or nine."""
    array = _as_array(value)
    if array.size != 9:
        six = _numbers(
            value, name, [(6,)], "six numbers (xx, yy, zz, yz, xz, xy) or a 3 × 3 matrix"
        )
        return _finite(six, name)
    matrix = _finite(_numbers(array.reshape(3, 3), name, [(3, 3)], "a 3 × 3 matrix"), name)
    if np.abs(matrix - matrix.T).max() > _SYMMETRY * np.abs(matrix).max():
        raise InputError(
            f"The stress {name} is a matrix that is not symmetric; stresses are.", parameter=name
        )
    return np.asarray((matrix + matrix.T)[VOIGT] / 2)


#: Functions that find labels of derivatives.
FINDERS = {"forces": find_forces, "stress": find_stresses}
