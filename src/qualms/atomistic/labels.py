"""Targets: where the labels of structures and of atoms are, and which are missing.

A label ``key`` of a structure is looked for in ``atoms.info[key]``, then in
``atoms.info["REF_" + key]``, a custom that keeps ASE from touching it, and last among the stored
results of a calculator, where ASE moves energies, magnetic moments and so on when it reads a file.
For a label of atoms it is ``atoms.arrays`` instead of ``atoms.info``. Nothing is ever calculated.
None and NaN mean that there is no label, and so do values that a model predicted: see
`qualms.io.xyz`.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.structures import VOIGT, symbols_of
from qualms.errors import InputError, QualmsWarning
from qualms.features.soap import offsets_of
from qualms.io.xyz import is_prediction

#: A sum over atoms, an average over atoms, or a value for each atom.
KINDS = ("extensive", "intensive", "atomic")
#: How data sets tag the atoms in vacuum that energies are counted from, in lower case.
ISOLATED = ("isolated_atom", "isolatedatom")

_RESULTS = "calc.results"


@dataclass(frozen=True)
class Labelled:
    """What there is to learn from.

    Attributes
    ----------
    frames : (n_frames,) array of int
        Structures with at least one label, isolated atoms left out.
    values : (n,) array of float64
        Their labels, finite, in the units of the data: one for each structure, or those of all
        labelled atoms, structure after structure.
    rows : list of n_frames arrays of int
        The labelled atoms of each structure; empty unless the labels are of atoms.
    n_unlabelled : int
        Structures, or atoms of the wanted species, that have no label.
    n_isolated : int
        Structures tagged as isolated atoms.
    isolated : dict of int to float
        The label of the isolated atom of each atomic number that has one.
    """

    frames: IntArray
    values: Float64Array
    rows: list[IntArray]
    n_unlabelled: int
    n_isolated: int
    isolated: dict[int, float]


def labelled(
    frames: Sequence[Atoms], key: str, kind: str, species: Sequence[int] | None = None
) -> Labelled:
    """Return which structures, or atoms, have a label, and the labels.

    Structures of one atom whose ``info["config_type"]`` is "isolated_atom" or "IsolatedAtom" tell
    what energies are counted from. They are not to be learned, and returned by themselves.

    Parameters
    ----------
    frames : sequence of ase.Atoms
    key : str
        Name of the label.
    kind : {"extensive", "intensive", "atomic"}
        Whether the label is of structures, as a sum or an average over atoms, or of atoms.
    species : sequence of int, optional
        Atomic numbers of the atoms that are wanted, if the labels are of atoms; all by default.

    Returns
    -------
    Labelled
    """
    check_kind(kind)
    if kind == "atomic":
        values = atomic_targets(frames, key, species)
    elif species is None:
        values = list(structure_targets(frames, key)[:, None])
    else:
        raise InputError("species", symbols_of(species), "none, unless kind='atomic'")
    isolated = [is_isolated(atoms) for atoms in frames]
    rows = [np.flatnonzero(np.isfinite(v)) for v in values]
    used = [i for i in range(len(frames)) if len(rows[i]) and not isolated[i]]
    if not used:
        of = "" if species is None else f" of {symbols_of(species)}"
        what = f"atom{of}" if kind == "atomic" else "structure"
        besides = ", isolated atoms aside" if any(isolated) else ""
        raise InputError("key", repr(key), f"a label of at least one {what}{besides}")
    return Labelled(
        frames=np.array(used, dtype=np.intp),
        values=np.concatenate([values[i][rows[i]] for i in used]),
        rows=[rows[i] for i in used] if kind == "atomic" else [],
        n_unlabelled=_n_wanted(frames, isolated, kind, species) - sum(len(rows[i]) for i in used),
        n_isolated=sum(isolated),
        isolated=_isolated_values(frames, values, isolated, key),
    )


def check_kind(kind: str) -> None:
    """Refuse what is not a kind of target."""
    if kind not in KINDS:
        raise InputError("kind", repr(kind), f"one of {', '.join(map(repr, KINDS))}")


def structure_targets(frames: Sequence[Atoms], key: str) -> Float64Array:
    """Return the label of each structure, in the units of the data.

    Returns
    -------
    (N,) array of float64
        NaN where there is no label.
    """
    found = _find_all(frames, key, per_atom=False)
    values = np.full(len(frames), np.nan)
    for i, (value, place) in found.items():
        values[i] = _as_number(value, f"frames[{i}].{place}", len(frames[i]))
    return values


def atomic_targets(
    frames: Sequence[Atoms], key: str, species: Sequence[int] | None = None
) -> list[Float64Array]:
    """Return the labels of the atoms of each structure, in the units of the data.

    Parameters
    ----------
    frames : sequence of N ase.Atoms
    key : str
        Name of the label.
    species : sequence of int, optional
        Atomic numbers of the atoms that are wanted; all by default.

    Returns
    -------
    list of N arrays (n_atoms,) of float64
        NaN where there is no label, and for atoms of other species.
    """
    found = _find_all(frames, key, per_atom=True)
    values = [np.full(len(atoms), np.nan) for atoms in frames]
    for i, (value, place) in found.items():
        wanted = _is_wanted(frames[i], species)
        values[i][wanted] = _as_numbers(value, f"frames[{i}].{place}", len(frames[i]))[wanted]
        if np.any(np.isinf(values[i])):
            atom = int(np.flatnonzero(np.isinf(values[i]))[0])
            raise InputError(f"frames[{i}].{place}[{atom}]", values[i][atom], "a finite number")
    return values


def _find_all(
    frames: Sequence[Atoms], key: str, *, per_atom: bool
) -> dict[int, tuple[object, str]]:
    """Return the label, as it is stored, and its place, for each structure that has one."""
    if len(frames) == 0:
        raise InputError("frames", "no structures", "at least one")
    found = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, per_atom))}
    if not found:
        _refuse_key(frames, key, per_atom)
    check_shared_calculators(frames, [i for i in found if found[i][1].startswith(_RESULTS)])
    places = Counter(place for _, place in found.values())
    predicted = sum(_is_predicted(atoms, key, per_atom) for atoms in frames)
    if predicted:
        warnings.warn(
            f"{key!r} has {key}_uncertainty beside it in {predicted} structures: these are "
            f"predictions, not labels; REF_{key} is used where there is one.",
            QualmsWarning,
            stacklevel=4,
        )
    if len(places) > 1:
        several = ", ".join(f"{place} ({n} structures)" for place, n in places.most_common())
        warnings.warn(
            f"{key!r} is in several places: {several}. Are these labels of the same origin?",
            QualmsWarning,
            stacklevel=4,
        )
    return found


def find_label(atoms: Atoms, key: str, per_atom: bool) -> tuple[object, str] | None:
    """Return the label of one structure and its place; see the top of this module."""
    store, name = (atoms.arrays, "arrays") if per_atom else (atoms.info, "info")
    for k in (key, f"REF_{key}"):
        if k in store and not is_prediction(atoms, k, store[k]):
            return store[k], f"{name}[{k!r}]"
    results = stored_results(atoms)
    if key in results and not is_prediction(atoms, key, results[key], atoms.calc):
        return results[key], f"{_RESULTS}[{key!r}]"
    return None


def _is_predicted(atoms: Atoms, key: str, per_atom: bool) -> bool:
    """Whether a structure has a value under this key that is no label."""
    store, results = atoms.arrays if per_atom else atoms.info, stored_results(atoms)
    return (key in store and is_prediction(atoms, key, store[key])) or (
        key in results and is_prediction(atoms, key, results[key], atoms.calc)
    )


def stored_results(atoms: Atoms) -> dict[str, Any]:
    """Return what a calculator has stored. Asking it for a property might start a calculation."""
    return dict(getattr(atoms.calc, "results", None) or {})


def check_shared_calculators(frames: Sequence[Atoms], indices: Sequence[int]) -> None:
    """Refuse one calculator for several structures: it stores the results of the last one only."""
    owners: dict[int, int] = {}
    for i in indices:
        j = owners.setdefault(id(frames[i].calc), i)
        if frames[i] is not frames[j]:
            raise InputError(
                f"frames[{i}].calc",
                f"the calculator of frames[{j}]",
                "one calculator for each structure, because it stores one set of results",
                "Copy each result to atoms.info or atoms.arrays when it is computed.",
            )


def _as_number(value: object, name: str, n_atoms: int) -> float:
    """Return the label of a structure, NaN for None."""
    array = as_array(np.nan if value is None else value)
    if array.dtype.kind not in "iuf" or array.shape not in ((), (1,)):
        hint = _per_atom_hint() if array.ndim > 0 and len(array) == n_atoms else _bool_hint(array)
        raise InputError(name, describe(array), "one number", hint)
    number = float(array.reshape(()))
    if np.isinf(number):
        raise InputError(name, number, "a finite number")
    return number


def _as_numbers(value: object, name: str, n_atoms: int) -> Float64Array:
    """Return the labels of the atoms of a structure: (n_atoms,), NaN for None."""
    array = as_array(value)
    if array.dtype == object:
        # Mixed with numbers None gives NaN; with strings it gives strings, which are refused.
        array = np.array([np.nan if v is None else v for v in array.ravel()]).reshape(array.shape)
    if array.dtype.kind not in "iuf" or array.shape not in ((n_atoms,), (n_atoms, 1)):
        hint = _per_structure_hint() if array.ndim == 0 else _bool_hint(array)
        raise InputError(name, describe(array), f"one number for each of {n_atoms} atoms", hint)
    return array.reshape(n_atoms).astype(np.float64)


def as_array(value: object) -> np.ndarray[Any, Any]:
    """Return any value as an array; what cannot be one becomes a string, which is no number."""
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.asarray(str(value))


def describe(array: np.ndarray[Any, Any]) -> str:
    """Return the value if it is short, else what it is made of."""
    if array.ndim == 0:
        return repr(array.item())[:40]
    return f"an array of {array.dtype.name} of shape {array.shape}"


def _bool_hint(array: np.ndarray[Any, Any]) -> str:
    """Return a word on the commonest cause of booleans."""
    if array.dtype != bool:
        return ""
    return "In extended XYZ a key without a value means True: leave out keys of missing labels."


def _per_atom_hint() -> str:
    return "It is a per-atom array: use kind='atomic' / --per-atom-target."


def _per_structure_hint() -> str:
    return "It is a number per structure: use kind='extensive' or 'intensive' / --target."


def _refuse_key(frames: Sequence[Atoms], key: str, per_atom: bool) -> NoReturn:
    """Say which keys there are instead."""
    present = _present(frames, per_atom)
    if any(_is_predicted(atoms, key, per_atom) for atoms in frames):
        raise InputError(
            "key",
            repr(key),
            f"labels; those with {key}_uncertainty beside them are predictions",
            f"Keep labels as REF_{key}, or remove {key}_uncertainty where it is out of date.",
        )
    folded = {k.casefold(): k for k in present}
    close = difflib.get_close_matches(key.casefold(), list(folded), n=1)
    hint = f"Did you mean {folded[close[0]]!r}?" if close else ""
    if {key, f"REF_{key}"} & _present(frames, not per_atom):
        hint = _per_structure_hint() if per_atom else _per_atom_hint()
    keys = ", ".join(map(repr, sorted(present))) or "there is none"
    whose = "atoms" if per_atom else "structures"
    raise InputError("key", repr(key), f"a label that {whose} have ({keys})", hint)


def _present(frames: Sequence[Atoms], per_atom: bool) -> set[str]:
    """Return the keys that any structure has a value for."""
    keys: set[str] = set()
    for atoms in frames:
        keys.update(map(str, atoms.arrays if per_atom else atoms.info))
        for k, value in stored_results(atoms).items():
            if (np.ndim(value) > 0 and len(value) == len(atoms)) == per_atom:
                keys.add(k)
    return keys - {"numbers", "positions"} if per_atom else keys


def _is_wanted(atoms: Atoms, species: Sequence[int] | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    numbers = np.asarray(atoms.numbers)
    return np.ones(len(numbers), dtype=bool) if species is None else np.isin(numbers, species)


def _n_wanted(
    frames: Sequence[Atoms], isolated: Sequence[bool], kind: str, species: Sequence[int] | None
) -> int:
    """Return the number of labels if there were no gaps."""
    rest = [atoms for atoms, alone in zip(frames, isolated, strict=True) if not alone]
    if kind != "atomic":
        return len(rest)
    return sum(int(np.count_nonzero(_is_wanted(atoms, species))) for atoms in rest)


def is_isolated(atoms: Atoms) -> bool:
    """Whether a structure is an atom in vacuum, by its own account."""
    return len(atoms) == 1 and str(atoms.info.get("config_type")).lower() in ISOLATED


def _isolated_values(
    frames: Sequence[Atoms], values: Sequence[Float64Array], isolated: Sequence[bool], key: str
) -> dict[int, float]:
    """Return the label of each isolated atom, if all labels of its species agree."""
    found: dict[int, float] = {}
    for i in np.flatnonzero(isolated).tolist():
        z, value = int(frames[i].numbers[0]), float(values[i][0])
        if np.isnan(value):
            continue
        if not np.isclose(found.setdefault(z, value), value, rtol=1e-8, atol=0.0):
            raise InputError(
                f"frames[{i}]",
                f"an isolated {symbols_of([z])} atom with {key}={value:.10g}",
                f"{found[z]:.10g}, as in the isolated {symbols_of([z])} atom before it",
            )
    return found


# Forces and stresses to learn from: where they are, and which are missing.
#: A matrix whose halves differ by more than this, relative to its largest number, is no stress.
_SYMMETRY = 1e-3


@dataclass(frozen=True)
class ForceLabels:
    """Forces and virials of the structures of a training set; a row for each known component.

    Rows of a structure are those of its forces, atom after atom, and then those of its virial.

    Attributes
    ----------
    forces : list of (n_atoms, 3) arrays
        NaN where there is none.
    virials : (n_structures, 6) array
        Vσ per atom, in the units of the energy; NaN where there is none.
    """

    forces: list[Float64Array]
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

    @cached_property
    def structure(self) -> IntArray:
        """Structure of each row."""
        return np.repeat(np.arange(len(self.forces)), np.diff(self.offsets))

    @cached_property
    def is_virial(self) -> BoolArray:
        """Whether a row is a component of a virial rather than of a force."""
        return np.concatenate([np.arange(len(mask))[mask] >= len(mask) - 6 for mask in self.known])

    @cached_property
    def whole(self) -> IntArray:
        """Which force, or virial, each row is a component of: numbers in the order of rows."""
        sizes = [len(forces) for forces in self.forces]
        firsts = offsets_of([n + 1 for n in sizes])[:-1]  # n forces and a virial each
        parts = [
            first + np.minimum(np.flatnonzero(mask) // 3, n)
            for first, n, mask in zip(firsts.tolist(), sizes, self.known, strict=True)
        ]
        return np.concatenate(parts)

    @cached_property
    def multiplicity(self) -> Float64Array:
        """How often each row is in its force, once, or in its virial, twice if off the diagonal."""
        parts = [np.where(np.flatnonzero(mask) >= len(mask) - 3, 2.0, 1.0) for mask in self.known]
        return np.concatenate(parts)

    @property
    def n_without(self) -> int:
        """Structures without any force."""
        return sum(not np.isfinite(forces).any() for forces in self.forces)

    @property
    def n_without_virial(self) -> int:
        """Structures without a stress."""
        return len(self.virials) - self.n_with_virial

    @property
    def n_with_virial(self) -> int:
        """Structures with a stress."""
        return int(np.count_nonzero(np.isfinite(self.virials).any(axis=1)))

    @property
    def _components(self) -> list[Float64Array]:
        pairs = zip(self.forces, self.virials, strict=True)
        return [np.concatenate([forces.ravel(), virial]) for forces, virial in pairs]


def force_labels(
    frames: Sequence[Atoms], used: IntArray, forces: str | None, stress: str | None
) -> ForceLabels:
    """Return the forces and virials of the structures that are used.

    Parameters
    ----------
    frames : sequence of Atoms
        All that were given.
    used : (n_structures,) array of int
        Those with an energy.
    forces, stress : str, optional
        Keys.
    """
    chosen = [frames[i] for i in used]
    found = [np.full((len(atoms), 3), np.nan) for atoms in chosen]
    virials = np.full((len(chosen), 6), np.nan)
    if forces is not None:
        known = find_forces(frames, forces)
        found = [known.get(i, empty) for i, empty in zip(used.tolist(), found, strict=True)]
        _warn_of_unused(frames, known, used, forces)
        _warn_of_zeros(chosen, found, forces)
    if stress is not None:
        known = find_stresses(frames, stress)
        for row, i in enumerate(used.tolist()):
            if i in known:
                virials[row] = known[i] * frames[i].cell.volume / len(frames[i])
        _warn_of_constant([known[i] for i in used.tolist() if i in known], stress)
    labels = ForceLabels(found, virials)
    if not len(labels.y):
        name, key = ("forces", forces) if forces is not None else ("stress", stress)
        raise InputError(name, repr(key), "a label of at least one structure with an energy")
    return labels


def find_forces(frames: Sequence[Atoms], key: str) -> dict[int, Float64Array]:
    """Return the forces (n_atoms, 3) of each structure that has some."""
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, True))}
    if not places:
        _refuse_forces(frames, key)
    _check_misplaced(frames, places, key)
    check_shared_calculators(frames, [i for i in places if places[i][1].startswith("calc")])
    found = {}
    for i, (value, place) in places.items():
        values = _numbers(value, f"frames[{i}].{place}", (len(frames[i]), 3), "three for each atom")
        if np.isfinite(values).any():
            found[i] = values
    return found


def find_stresses(frames: Sequence[Atoms], key: str) -> dict[int, Float64Array]:
    """Return the stress (6,) of each structure that has one and a volume.

    That is as ASE has it: slabs and wires have a stress if their cells have a volume, vacuum
    included. Zeros beside a structure that is not periodic stand for what nobody computed.
    """
    if "virial" in key.casefold() and "stress" not in key.casefold():
        raise InputError(
            "stress",
            repr(key),
            "the key of a stress, (1/V) ∂E/∂ε, rather than of a virial, −V times that",
            f"Convert it: atoms.info['stress'] = -atoms.info[{key!r}] / atoms.get_volume().",
        )
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, False))}
    if not places:
        stores = ({**atoms.info, **stored_results(atoms)} for atoms in frames)
        present = {str(k) for store in stores for k, v in store.items() if _is_tensor(v)}
        _refuse("stress", key, "six numbers, or a symmetric matrix", present)
    check_shared_calculators(frames, [i for i in places if places[i][1].startswith("calc")])
    values = {i: _voigt(value, f"frames[{i}].{place}") for i, (value, place) in places.items()}
    known = {i: v for i, v in values.items() if frames[i].pbc.any() or np.nan_to_num(v).any()}
    known = {i: value for i, value in known.items() if np.isfinite(value).any()}
    found = {i: value for i, value in known.items() if frames[i].cell.rank == 3}
    unused = sorted({*known} - {*found})
    if unused:
        warnings.warn(
            f"{len(unused)} structures (first frames[{unused[0]}]) have {key!r} but no cell with a "
            "volume; their stress is not used.",
            QualmsWarning,
            stacklevel=6,
        )
    return found


def has_forces(frames: Sequence[Atoms], key: str) -> bool:
    """Return whether some structure has values of atoms under a key."""
    return any(find_label(atoms, key, True) for atoms in frames)


def has_stresses(frames: Sequence[Atoms], key: str) -> bool:
    """Return whether some structure with a volume has a value under a key."""
    return any(atoms.cell.rank == 3 and find_label(atoms, key, False) for atoms in frames)


def _is_tensor(value: object) -> bool:
    """Return whether a value may be a stress, by its shape."""
    return as_array(value).shape in ((6,), (9,), (3, 3))


def _voigt(value: object, name: str) -> Float64Array:
    """Return a stress as six numbers, from six or nine."""
    array = as_array(value)
    if array.size != 9:
        return _numbers(value, name, (6,), "6 numbers (xx, yy, zz, yz, xz, xy) or a 3 × 3 matrix")
    matrix = _numbers(array.reshape(-1), name, (9,), "6 or 9 numbers").reshape(3, 3)
    if np.abs(matrix - matrix.T).max() > _SYMMETRY * np.abs(matrix).max():
        raise InputError(name, "a matrix that is not symmetric", "a stress, which is")
    return np.asarray((matrix + matrix.T)[VOIGT] / 2)


def _numbers(value: object, name: str, shape: tuple[int, ...], expected: str) -> Float64Array:
    array = as_array(value)
    if array.dtype.kind not in "iuf" or array.shape != shape:
        raise InputError(name, describe(array), f"{expected}, an array of shape {shape}")
    values = array.astype(np.float64)
    if np.isinf(values).any():
        raise InputError(name, "infinite values", "finite numbers, or NaN where there is none")
    return values


def _refuse_forces(frames: Sequence[Atoms], key: str) -> NoReturn:
    """Say which arrays look like forces."""
    present = {name for atoms in frames for name in _vectors(atoms)}
    _refuse("forces", key, "three numbers for each atom", present)


def _refuse(name: str, key: str, expected: str, present: set[str]) -> NoReturn:
    folded = {k.casefold(): k for k in sorted(present)}
    close = difflib.get_close_matches(key.casefold(), list(folded), n=1)
    hint = f"Did you mean {folded[close[0]]!r}?" if close else ""
    keys = ", ".join(map(repr, sorted(present))) or "there is none"
    raise InputError(name, repr(key), f"{expected} ({keys})", hint)


def _vectors(atoms: Atoms) -> list[str]:
    """Return the keys of three numbers for each atom, positions left out."""
    stores: list[dict[str, Any]] = [atoms.arrays, stored_results(atoms)]
    return [
        str(name)
        for store in stores
        for name, value in store.items()
        if np.shape(value) == (len(atoms), 3) and name != "positions"
    ]


def _check_misplaced(frames: Sequence[Atoms], places: dict[int, Any], key: str) -> None:
    """Refuse forces that are with the structure rather than with its atoms, such as flat ones."""
    for i, atoms in enumerate(frames):
        if i not in places and (hit := find_label(atoms, key, False)):
            value = as_array(hit[0])
            if value.dtype.kind in "iuf" and value.size == 3 * len(atoms):
                raise InputError(
                    f"frames[{i}].{hit[1]}",
                    describe(value),
                    f"an array of atoms, of shape {(len(atoms), 3)}, as in other structures",
                    f"Move it: atoms.arrays[{key!r}] = atoms.info.pop(…).reshape(-1, 3).",
                )


def _warn_of_unused(
    frames: Sequence[Atoms], known: dict[int, Float64Array], used: IntArray, key: str
) -> None:
    """Tell of forces without an energy, from which nothing is learned."""
    unused = [i for i in known if i not in set(used.tolist()) and not is_isolated(frames[i])]
    if unused:
        warnings.warn(
            f"{len(unused)} structures (first frames[{unused[0]}]) have {key!r} but no energy, and "
            "are not learned from.",
            QualmsWarning,
            stacklevel=5,
        )


def _warn_of_zeros(frames: Sequence[Atoms], forces: Sequence[Float64Array], key: str) -> None:
    """Tell of forces that are all zero, which they hardly are."""
    several = [f for atoms, f in zip(frames, forces, strict=True) if len(atoms) > 1]
    known = [f for f in several if np.isfinite(f).any()]
    if known and not any(np.any(np.nan_to_num(f)) for f in known):
        warnings.warn(
            f"All forces in {key!r} are zero. If they stand for unknown ones, leave them out, or "
            "write NaN: models believe them.",
            QualmsWarning,
            stacklevel=5,
        )


def _warn_of_constant(stresses: Sequence[Float64Array], key: str) -> None:
    """Tell of stresses that are all the same, which those of different structures hardly are."""
    if len(stresses) > 1 and np.all(np.ptp(np.nan_to_num(stresses), axis=0) == 0):
        what = "the same" if np.any(np.nan_to_num(stresses[0])) else "zero"
        warnings.warn(
            f"All stresses in {key!r} are {what}. If they stand for unknown ones, leave them out, "
            "or write NaN: models believe them.",
            QualmsWarning,
            stacklevel=5,
        )
