"""Forces and stresses to learn from: where they are, and which are missing.

Forces are looked for as other labels of atoms are (see `qualms.atomistic.targets`): three numbers
for each atom, the negative derivative of the energy, in its units per Å. Stresses are labels of
structures in ASE's convention: (1/V) ∂E/∂ε, positive under tension, as six numbers (xx, yy, zz, yz,
xz, xy) or as a symmetric matrix, in units of the energy per Å³. NaN means that there is no label:
of a structure some components may be known and others not.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.atomistic.environments import offsets_of
from qualms.atomistic.mechanics import VOIGT
from qualms.atomistic.targets import (
    as_array,
    check_shared_calculators,
    describe,
    find_label,
    is_isolated,
    stored_results,
)
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.errors import InputError, QualmsWarning

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
