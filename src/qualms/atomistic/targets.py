"""Targets: where the labels of structures and of atoms are, and which are missing.

A label ``key`` of a structure is looked for in ``atoms.info[key]``, then in
``atoms.info["REF_" + key]``, a custom that keeps ASE from touching it, and last among the stored
results of a calculator, where ASE moves energies, magnetic moments and so on when it reads a file.
For a label of atoms it is ``atoms.arrays`` instead of ``atoms.info``. Nothing is ever calculated.
None and NaN mean that there is no label, and so do values that a model predicted: see
`qualms.storage.origin`.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.atomistic.structures import symbols_of
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError, QualmsWarning
from qualms.storage.origin import is_prediction

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
