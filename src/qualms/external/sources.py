"""What is in a file: structures with values, or the columns of a table, as arrays by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties

from qualms.atomistic.structures import read_frames
from qualms.core.typing import StrArray
from qualms.errors import InputError
from qualms.external.columns import join_columns
from qualms.external.tables import Table, is_table, read_columns

#: Keys of members, of standard deviations and of variances, after the name of the target.
MEMBERS = ("_ensemble", "_comm")
ERROR_BARS = ("_uncertainty", "_std", "_var", "_variance")
VARIANCES = ("_var", "_variance")
#: Keys of reference values that are tried if none is given.
REFERENCES = ("REF_{}", "{}_ref", "{}_reference", "{}_true")


@dataclass(frozen=True)
class Values:
    """Arrays by key, a row for each structure or atom, and what is known about the rows.

    Attributes
    ----------
    arrays : mapping of str to arrays
        First axis: rows.
    structure, atom : (n_rows,) arrays of int
    symbols : (n_rows,) array of str, optional
        Elements, if rows are atoms.
    others : set of str
        Further keys, to be named if something is missing.
    columns : mapping of str to tuple of str
        The columns of a table that some of the arrays were joined from.
    """

    arrays: Mapping[str, Any]
    structure: Any
    atom: Any
    symbols: StrArray | None
    others: frozenset[str] = frozenset()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.structure)


#: What a file holds: structures, or the columns of a table by name.
Source = list[Atoms] | Table


def read_source(path: str | Path) -> Source:
    """Read all of a file: extended XYZ or whatever else ASE reads, CSV, Parquet or NPZ."""
    return read_columns(path) if is_table(path) else read_frames(path)


# --- from structures ---


def of_frames(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> Values:
    """Collect the values of all structures under the keys that may matter."""
    _move_members(frames, target, asked)
    found = [_values(atoms) for atoms in frames]
    keys = {key for info, arrays in found for key in (*info, *arrays)}
    wanted = [target, *(f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS, "_absent")), *asked]
    predicted = [f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS)]
    per_atom = any(key in arrays for _, arrays in found for key in predicted)
    n_atoms = np.array([len(atoms) for atoms in frames])
    structure = np.repeat(np.arange(len(frames)), n_atoms) if per_atom else np.arange(len(frames))
    collected: dict[str, Any] = {}
    for key in wanted:
        if key in keys:
            rows = [_rows(key, *pair, n, per_atom) for pair, n in zip(found, n_atoms, strict=True)]
            if any(row is not None for row in rows):
                counts = n_atoms if per_atom else np.ones_like(n_atoms)
                collected[key] = _joined(key, rows, counts)
    symbols = np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None
    atom = np.concatenate([np.arange(n) for n in n_atoms]) if per_atom else np.zeros_like(structure)
    return Values(collected, structure, atom, symbols, frozenset(keys))


def _move_members(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> None:
    """Move members (R, n_atoms, 3) of structures, as calculators return them, to the atoms.

    They become (n_atoms, R, 3), the columns that an extended XYZ file has for them. (R, 3, 3) may
    as well be tensors of structures of three atoms, unless the target is known to be one of atoms.
    """
    of_atoms = target in per_atom_properties or any(k in a.arrays for a in frames for k in asked)
    if not of_atoms and all(len(atoms) == 3 for atoms in frames):
        return
    for key in (f"{target}{suffix}" for suffix in MEMBERS):
        stored = [np.asarray(atoms.info.get(key, ())) for atoms in frames]
        fit = [
            value.ndim == 3 and value.shape[1:] == (len(atoms), 3)
            for atoms, value in zip(frames, stored, strict=True)
            if value.size
        ]
        if fit and all(fit):
            for atoms, value in zip(frames, stored, strict=True):
                if value.size:
                    del atoms.info[key]
                    atoms.arrays[key] = value.transpose(1, 0, 2)


def with_results(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``info`` and ``arrays``, with the keys that ASE has read into a calculator."""
    info, arrays = dict(atoms.info), dict(atoms.arrays)
    for key, value in getattr(atoms.calc, "results", {}).items():
        (arrays if key in per_atom_properties else info).setdefault(key, value)
    return info, arrays


def _values(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is known of a structure and of its atoms, but for the geometry."""
    info, arrays = with_results(atoms)
    for key in ("numbers", "positions"):
        arrays.pop(key, None)
    return info, arrays


def _rows(
    key: str, info: dict[str, Any], arrays: dict[str, Any], n_atoms: int, per_atom: bool
) -> Any | None:
    """Return the value of a key as rows of one structure: one row, or one for each atom."""
    if per_atom and key in arrays:
        return np.asarray(arrays[key])
    if key not in info:
        return None
    value = np.asarray(info[key])
    return np.repeat(value[None], n_atoms, axis=0) if per_atom else value[None]


def _joined(key: str, rows: Sequence[Any | None], counts: Any) -> Any:
    """Join the rows of all structures; NaN, or no label, where a structure has none."""
    shapes = {row.shape[1:] for row in rows if row is not None}
    if len(shapes) > 1:
        first = next(r.shape[1:] for r in rows if r is not None)
        other = next(i for i, r in enumerate(rows) if r is not None and r.shape[1:] != first)
        raise InputError(
            key,
            f"{first} values in the first structure and {rows[other].shape[1:]} in number {other}",  # type: ignore[union-attr]
            "the same number in all structures",
        )
    shape = shapes.pop()
    text = any(row is not None and row.dtype.kind in "US" for row in rows)
    missing: Any = "" if text else np.nan
    filled = [
        np.full((n, *shape), missing) if row is None else row
        for row, n in zip(rows, counts, strict=True)
    ]
    return np.concatenate([np.asarray(row, dtype=str) if text else row for row in filled])


# --- from tables ---


def of_table(columns: Table, target: str, asked: Sequence[str], truths: Sequence[str]) -> Values:
    """Join columns that belong together, and find out what the rows are."""
    arrays, joined = _joined_columns(columns, target, [*asked, *truths])
    about = [*(f"{target}{suffix}" for suffix in (*MEMBERS, *ERROR_BARS, "")), *truths]
    lengths = Counter(len(arrays[key]) for key in about if key in arrays)
    # Most of what belongs together has as many rows as it should: the rest is to blame.
    n = lengths.most_common(1)[0][0] if lengths else columns.n_rows
    _refuse_transposed(arrays, [f"{target}{s}" for s in MEMBERS], [*truths, target])

    def column(name: str) -> Any:
        found = np.asarray(columns.get(name, ()))
        return found if found.shape == (n,) else None

    structure = next((c for c in map(column, ("structure", "index")) if c is not None), None)
    structure = np.arange(n) if structure is None else structure
    if structure.dtype.kind not in "iuf":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom, symbols = column("atom"), column("symbol")
    if atom is None or atom.dtype.kind not in "iuf":
        atom = np.zeros(n)
    return Values(
        arrays,
        structure.astype(np.intp),
        atom.astype(np.intp),
        None if symbols is None else np.asarray(symbols).astype(str),
        others=frozenset(columns),
        columns=joined,
    )


def _joined_columns(
    columns: Mapping[str, Any], target: str, asked: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return arrays by key, and the columns that they were joined from."""
    stems = [*(f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS, "_absent")), *asked]
    arrays = {key: columns[key] for key in (target, *stems) if key in columns}
    joined = {}
    for stem in stems:
        found = join_columns(columns, stem)
        if found is not None and stem not in arrays:
            joined[stem], arrays[stem] = found
    found = join_columns(columns, target, ("c",))
    if found is not None and target not in arrays:
        joined[target], arrays[target] = found
    found = join_columns(columns, target, ("i", "ic", "ci"))
    if found is not None:
        names, values = found
        alike = [key for key in joined if np.shape(arrays[key]) == values.shape]
        key = _meaning(target, values.ndim == 3, arrays, alike)
        if key is not None and key not in arrays:
            joined[key], arrays[key] = names, values
    return arrays, joined


def _meaning(
    target: str, of_members: bool, arrays: Mapping[str, Any], alike: Sequence[str]
) -> str | None:
    """Return the key that numbered columns called after the target itself belong to, if any.

    They are members, unless there are other members, or error bars of as many components: then they
    are components of the prediction, if that is how many there are of the truth or of error bars.
    """
    members = [f"{target}{suffix}" for suffix in MEMBERS]
    bars = [f"{target}{suffix}" for suffix in ERROR_BARS]
    if any(key in arrays for key in members):
        has_as_many = any(key not in (*members, f"{target}_absent") for key in alike)
        return target if has_as_many and not of_members else None
    return target if any(key in bars for key in alike) and not of_members else members[0]


def _refuse_transposed(
    arrays: Mapping[str, Any], members: Sequence[str], others: Sequence[str]
) -> None:
    """If all else has as many rows as the members have columns, it is they that are wrong."""
    lengths = {len(arrays[key]) for key in others if key in arrays}
    for key in members:
        shape = np.shape(arrays.get(key, ()))
        if len(shape) > 1 and len(lengths) == 1 and shape[0] not in lengths:
            (n,) = lengths
            if n in shape[1:]:
                which = next(name for name in others if name in arrays)
                raise InputError(
                    key, f"shape {shape}", f"{n} rows, as {which}", "Is it transposed?"
                )
