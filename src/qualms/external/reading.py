"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, CSV, Parquet and NPZ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties

from qualms.atomistic.structures import read_frames
from qualms.core.typing import Float64Array, StrArray
from qualms.errors import InputError
from qualms.external.columns import is_table, read_columns
from qualms.external.ensemble import Ensemble, with_members

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
    """

    arrays: Mapping[str, Any]
    structure: Any
    atom: Any
    symbols: StrArray | None
    others: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.structure)


#: What a file holds: structures, or the columns of a table by name.
Source = list[Atoms] | dict[str, Any]


def read_source(path: str | Path) -> Source:
    """Read all of a file: extended XYZ or whatever else ASE reads, CSV, Parquet or NPZ."""
    return read_columns(path) if is_table(path) else read_frames(path)


def read_ensemble(
    source: str | Path | Source,
    target: str,
    reference: str | None = None,
    *,
    absent: str | None = None,
    by: str | None = None,
    n_components: int | None = None,
) -> Ensemble:
    """Read the predictions of an ensemble, and the truth.

    Parameters
    ----------
    source : path, or what `read_source` returned
        Extended XYZ (or whatever else ASE reads), ``.csv``, ``.parquet`` or ``.npz``.
    target : str
        Name of the property: members under ``{target}_ensemble`` or ``{target}_comm`` (in tables
        also as columns ``{target}_ensemble_0`` …, ``{target}_0`` …), or a value under ``{target}``
        and an error bar under ``{target}_uncertainty``, ``_std`` or ``_var``.
    reference : str, optional
        Key of the true values; ``REF_{target}`` and the like if not given.
    absent : str, optional
        Key of flags, one for each member: whether it did *not* see the point in its training;
        ``{target}_absent`` if there is one.
    by : str, optional
        What to group points by: ``element``, or a key such as ``config_type``.
    n_components : int, optional
        If given, true values are not needed, and there are so many for each row.
    """
    found = read_source(source) if isinstance(source, (str, Path)) else source
    if isinstance(found, dict):
        values = _of_table(found, target)
    else:
        asked = [key for key in (reference, absent, by) if key is not None and key != "element"]
        values = _of_frames(found, target, asked)
    return _ensemble(values, target, reference, absent, by, n_components)


# --- from arrays by key to points ---


def _ensemble(
    values: Values,
    target: str,
    reference: str | None,
    absent: str | None,
    by: str | None,
    n_components: int | None,
) -> Ensemble:
    found = _predictions(values, target)
    wanted = _reference(values, target, reference, n_components)
    k = 1 if wanted.ndim == 1 else wanted.shape[1]
    if found.mean is not None and found.mean.shape != wanted.shape:
        raise InputError(
            target, f"shape {found.mean.shape}", f"that of the reference, {wanted.shape}"
        )
    kind = "component" if k > 1 else "structure" if values.symbols is None else "atom"
    fields: dict[str, Any] = {
        "y": wanted.reshape(-1),
        "structure": np.repeat(values.structure, k),
        "atom": np.repeat(values.atom, k),
        "key": found.key,
        "n_components": k,
        "per_atom": values.symbols is not None,
        "labels": _labels(values, by, k),
        "remarks": found.remarks,
    }
    if found.members is None:
        assert found.mean is not None
        assert found.std is not None
        mean, std = found.mean.reshape(-1), found.std.reshape(-1)
        return Ensemble(target, kind, mean, std, members=None, absent=None, **fields)
    guide = wanted if found.mean is None else found.mean
    members = _by_component(found.members, k, found.key, guide)
    n_members = members.shape[2]
    flags = _absent(values, target, absent, n_members)
    return with_members(
        target,
        kind,
        members.reshape(-1, n_members),
        absent=None if flags is None else np.repeat(flags, k, axis=0),
        **fields,
    )


@dataclass(frozen=True)
class _Found:
    """Members (rows, ·), or mean and standard deviation, the key, and what is to be said of it."""

    key: str
    members: Float64Array | None = None
    mean: Float64Array | None = None
    std: Float64Array | None = None
    remarks: tuple[str, ...] = ()


def _predictions(values: Values, target: str) -> _Found:
    mean = _numbers(values, target) if target in values.arrays else None
    for suffix in MEMBERS:
        key = f"{target}{suffix}"
        if key in values.arrays:
            return _Found(key, _numbers(values, key), mean)
    for suffix in ERROR_BARS:
        key = f"{target}{suffix}"
        if key in values.arrays and mean is not None:
            std = _numbers(values, key)
            if std.shape != mean.shape:
                raise InputError(key, f"shape {std.shape}", f"that of {target}, {mean.shape}")
            if suffix not in VARIANCES:
                return _Found(key, None, mean, std)
            if np.any(std < 0):
                raise InputError(key, f"{np.count_nonzero(std < 0)} negative", "variances")
            remark = f"{key} is taken to be a variance: its root is the error bar."
            return _Found(key, None, mean, np.sqrt(std), (remark,))
    tried = ", ".join(f"{target}{suffix}" for suffix in (*MEMBERS, *ERROR_BARS))
    raise InputError(
        "target",
        repr(target),
        f"members or error bars under one of {tried} (the error bars with a value under {target})",
        f"There are: {_known(values)}.",
    )


def _by_component(members: Float64Array, k: int, key: str, guide: Float64Array) -> Float64Array:
    """Return members (rows, k, R) of k columns that may be in either order.

    Member by member, m0x m0y m0z m1x …, unless the other order is much closer to the mean that is
    stored, or else to the truth.
    """
    rows = len(members)
    if members.ndim == 3 and k in members.shape[1:]:
        return members if members.shape[1] == k else members.transpose(0, 2, 1)
    members = members.reshape(rows, -1)
    width = members.shape[1]
    if width % k:
        raise InputError(key, f"{width} columns", f"a multiple of the {k} components")
    by_member = members.reshape(rows, width // k, k).transpose(0, 2, 1)
    if k == 1 or not np.any(np.isfinite(guide)):
        return by_member
    by_part = members.reshape(rows, k, width // k)
    known = guide.reshape(rows, k)

    def distance(ordered: Float64Array) -> float:
        middle = np.nanmedian(np.where(np.isfinite(ordered), ordered, np.nan), axis=2)
        return float(np.nanmean(np.abs(middle - known)))

    return by_part if distance(by_part) < 0.5 * distance(by_member) else by_member


def _reference(
    values: Values, target: str, reference: str | None, n_components: int | None
) -> Float64Array:
    """Return the true values (rows,) or (rows, k); NaN where there are none."""
    names = [reference] if reference is not None else [name.format(target) for name in REFERENCES]
    for name in names:
        if name in values.arrays:
            return _numbers(values, name)
    if n_components is None:
        raise InputError(
            "reference",
            repr(reference) if reference is not None else "none",
            f"the key of the true values of {target}",
            f"There are: {_known(values)}.",
        )
    return np.full((len(values),) if n_components == 1 else (len(values), n_components), np.nan)


def _absent(
    values: Values, target: str, key: str | None, n_members: int
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    name = key if key is not None else f"{target}_absent"
    if name not in values.arrays:
        if key is None:
            return None
        raise InputError("absent", repr(key), f"one of {_known(values)}")
    flags = _numbers(values, name).reshape(len(values), -1)
    if flags.shape[1] != n_members or not np.all((flags == 0) | (flags == 1)):
        raise InputError(
            "absent",
            f"{name} of shape {flags.shape}",
            f"a 0 or 1 (false or true) for each of {n_members} members",
        )
    return flags.astype(bool)


def _labels(values: Values, by: str | None, k: int) -> StrArray | None:
    if by is None:
        return None
    if by == "element" and values.symbols is not None:
        labels = values.symbols
    elif by in values.arrays:
        labels = np.asarray(values.arrays[by]).astype(str)
        if labels.ndim != 1:
            raise InputError("by", repr(by), "a key of one label for each structure or atom")
    else:
        extra = "element, " if values.symbols is not None else ""
        raise InputError("by", repr(by), f"one of {extra}{_known(values)}")
    return np.repeat(labels, k)


def _numbers(values: Values, key: str) -> Float64Array:
    try:
        numbers = np.asarray(values.arrays[key], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(key, "text", "numbers") from None
    if len(numbers) != len(values):
        raise InputError(key, f"shape {numbers.shape}", f"{len(values)} rows, as the predictions")
    return numbers


def _known(values: Values) -> str:
    return ", ".join(sorted({*values.arrays, *values.others})) or "no keys at all"


# --- from structures ---


def _of_frames(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> Values:
    """Collect the values of all structures under the keys that may matter."""
    found = [_values(atoms) for atoms in frames]
    keys = {key for info, arrays in found for key in (*info, *arrays)}
    wanted = [target, *(f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS, "_absent")), *asked]
    wanted += [name.format(target) for name in REFERENCES]
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
    if value.shape == (3, 3):
        value = value.ravel(order="F")  # how ASE reads nine numbers
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


def _of_table(columns: Mapping[str, Any], target: str) -> Values:
    """Join numbered columns into members, and find out what the rows are."""
    arrays = dict(columns)
    for stem in (*(f"{target}{suffix}" for suffix in MEMBERS), target, f"{target}_absent"):
        numbered = sorted(
            (name for name in columns if re.fullmatch(re.escape(stem) + r"_?\d+", name)),
            key=lambda name: int(re.findall(r"\d+$", name)[0]),
        )
        if numbered:
            key = f"{target}{MEMBERS[0]}" if stem == target else stem
            arrays.setdefault(key, np.column_stack([columns[name] for name in numbered]))
    predicted = (f"{target}{suffix}" for suffix in (*MEMBERS, *ERROR_BARS, ""))
    n = next((len(arrays[key]) for key in predicted if key in arrays), 0)
    n = n or max(map(len, arrays.values()))

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
    )
