"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, and tables of all kinds."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.atomistic.structures import read_frames
from qualms.calibration.points import rounding_of
from qualms.calibration.vectors import (
    INDEPENDENT_COMPONENTS,
    MULTIPLICITY,
    component_share,
    vector_std,
)
from qualms.errors import InputError, counted, did_you_mean, unknown_choice
from qualms.gp.ensemble import MIN_ABSENT, ensemble_mean_std, out_of_bag_prediction
from qualms.io.files import atomic_output, check_input
from qualms.io.predictions import EXTRAPOLATES, write_npz

#: Endings of the keys of members and of uncertainties; the last is a variance.
MEMBERS = ("_ensemble", "_comm")
UNCERTAINTIES = ("_uncertainty", "_std", "_var")
Order = Literal["member", "component"]
#: Names of components: of vectors, of symmetric tensors (as ASE orders them), and of tensors.
COMPONENTS: dict[int, tuple[str, ...]] = {
    3: ("x", "y", "z"),
    6: ("xx", "yy", "zz", "yz", "xz", "xy"),
    9: ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz"),
}


class Pooled(NamedTuple):
    """What a calibration of n points is applied to: σ is `share` times that of `std`."""

    std: Float64Array  #: (n,): standard deviations, of whole vectors if they are pooled
    n_members: IntArray  #: (n,): numbers of members whose standard deviations are as accurate
    share: Float64Array  #: (n,)


@dataclass(frozen=True)
class Ensemble:
    """Predictions of n points: structures, atoms, or components of vectors and tensors.

    Attributes
    ----------
    target : str
    key : str
        Key of the members, or of the uncertainties if there are no members.
    mean, std, count : (n,) arrays
        Mean, standard deviation (ddof = 1) and number of the members with a finite prediction, of
        the out-of-bag members if there are flags; NaN where these are too few. Without members,
        the stored values, and 2.
    vector_std : (n,) array, optional
        Root mean square of `std` over the components of the vector, or tensor, of each point.
    members, absent : (n, N_R) arrays, optional
        Predictions, NaN where a member has none, and whether the point is out-of-bag for it.
    y : (n,) array
        Reference values; NaN where there is none.
    structure, atom, component : (n,) arrays of int
        Origin of each point; `atom` is zero for properties of structures, `component` may be None.
    per_atom : bool
        Whether the values belong to atoms.
    labels : (n,) array of str, optional
        Group of each point.
    sizes, extrapolates : (n,) arrays, optional
        Number of atoms of the structure of each point, and whether it is out of distribution, if
        the file has these.
    shape, member_shape, order : tuples of int, str or None
        Shapes of the stored value and members of one structure or atom; order of the members.
    columns : mapping of str to tuple of str
        The keys, or columns, that the values of a key were joined from.
    stored_mean, uncertainties : (n,) array or None, tuple of str
        Values under the name of the target itself; keys of stored uncertainties.
    remarks : tuple of str
        Warnings for the user.
    """

    target: str
    key: str
    mean: Float64Array
    std: Float64Array
    count: IntArray
    vector_std: Float64Array | None
    members: Float64Array | None
    absent: BoolArray | None
    y: Float64Array
    structure: IntArray
    atom: IntArray
    component: IntArray | None
    per_atom: bool
    labels: StrArray | None
    sizes: IntArray | None
    extrapolates: BoolArray | None
    shape: tuple[int, ...]
    member_shape: tuple[int, ...]
    order: Order | None
    columns: Mapping[str, tuple[str, ...]]
    stored_mean: Float64Array | None
    uncertainties: tuple[str, ...]
    remarks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def kind(self) -> Literal["structure", "atom", "component"]:
        """What a point is."""
        return "component" if self.n_components > 1 else "atom" if self.per_atom else "structure"

    @property
    def n_members(self) -> int | None:
        """N_R, or None if there are only uncertainties."""
        return None if self.members is None else int(self.members.shape[1])

    @property
    def n_components(self) -> int:
        """Number of points of one structure or atom."""
        return int(np.prod(self.shape))

    def counted(self, n: int | None = None) -> str:
        """Return the number of points, all of them by default, with a noun."""
        return counted(len(self) if n is None else n, self.kind)

    def some(self, chosen: BoolArray) -> Ensemble:
        """Return the chosen points."""
        arrays = {n: a for n, a in vars(self).items() if isinstance(a, np.ndarray)}
        some: dict[str, Any] = {name: array[chosen] for name, array in arrays.items()}
        return replace(self, **some)

    def pooled(self, isotropy: float | None) -> Pooled:
        """Return standard deviations of whole vectors; those of the points themselves for None.

        The isotropy is that of `qualms.calibration.vectors.component_share`. A vector has more
        degrees of freedom than a component, as if there were more members. Components on which all
        members agree, because of symmetry, have no share.
        """
        if isotropy is None or self.vector_std is None or self.component is None:
            return Pooled(self.std, self.count, np.ones(len(self)))
        m = MULTIPLICITY[self.n_components]
        share = component_share(
            self.std, self.vector_std, isotropy, m[self.component] / m.mean()
        ) * (self.std > 0)
        count = self.count
        if self.members is not None:
            count = 1 + INDEPENDENT_COMPONENTS * (count - 1)
        return Pooled(self.vector_std, count, share)

    def unusable(self) -> dict[str, BoolArray]:
        """Return, by reason, which points have no mean and standard deviation."""
        whole = self.std if self.vector_std is None else self.vector_std
        known = np.isfinite(self.mean + self.std + whole)
        if self.members is None:
            return {"with NaN or infinite predictions": ~known}
        which = "" if self.absent is None else "out-of-bag "
        return {f"with fewer than {MIN_ABSENT} finite {which}members": ~known}


def read_ensemble(
    source: str | Path | Source | Sequence[Source],
    target: str,
    reference: str | None = None,
    *,
    members: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    absent: str | None = None,
    by: str | None = None,
    order: str | None = None,
    n_components: int | None = None,
) -> Ensemble:
    """Read the predictions of an ensemble and the reference values.

    Parameters
    ----------
    source : path, result of `read_source`, or sequence of such results
        Keys are those of structures, or columns of tables. Keys ``{key}_0``, ``{key}_1``, … or
        ``{key}_x``, ``{key}_y``, ``{key}_z`` belong together; ``{target}_0``, … without others are
        members of a scalar. Several sources have the same rows in the same order: their values
        under ``{target}``, or of `members`, are members, and other keys add to those of the first.
    target : str
        Name of the property: members under ``{target}_ensemble`` or ``{target}_comm``, or a value
        under ``{target}`` with ``{target}_uncertainty``, ``_std``, or ``_var`` for a variance.
    reference : str, optional
        Key of the reference values; ``REF_{target}`` by default.
    members : str, optional
        Pattern of the keys of members, such as ``MACE*_energy``.
    mean, std : str, optional
        Keys of predictions and standard deviations, if they are not those above.
    absent : str, optional
        Key of one flag per member: whether the point was *not* in its training set;
        ``{target}_absent`` by default, if there is one.
    by : str, optional
        Groups of points: ``element``, or a key such as ``config_type``.
    order : {"member", "component"}, optional
        Order of the members of vectors where the shape leaves it open: member by member (``m0x m0y
        m0z m1x …``, the default) or component by component (``m0x m1x … m0y …``).
    n_components : int, optional
        If given, no reference values are needed, and each row has so many components.
    """
    if order not in (None, "member", "component"):
        raise unknown_choice("order", order, ("member", "component"))
    if members is not None and std is not None:
        message = "`members` and `std` exclude each other: give members or a standard deviation."
        raise InputError(message, parameter="members")
    sources = _sources(source)
    reference = reference or f"REF_{target}"
    names = _Names(target, members, mean, std, (reference, *(k for k in (absent, by) if k)))
    _check_same_structures(sources)
    rows = _merged([names.rows(one) for one in sources], names)
    key, n = rows.predicted(target), len(rows.structure)
    if reference in rows.arrays:
        y = rows.numbers(reference)
        shape: tuple[int, ...] = y.shape[1:]
    elif n_components is not None:
        y = np.full((n, n_components), np.nan)
        shape = () if n_components == 1 else (n_components,)
    else:
        raise rows.unknown("reference", reference, "reference values")
    stored_mean = None
    if target in rows.arrays:
        stored = rows.numbers(target)
        stored_mean = _like(target, stored, shape)
        shape = stored.shape[1:] if np.prod(stored.shape[1:]) == np.prod(shape) else shape
    k = int(np.prod(shape))
    uncertainties = [name for name in (target + e for e in UNCERTAINTIES) if name in rows.arrays]
    values, flags, member_order = None, None, None
    member_shape: tuple[int, ...] = ()
    remarks: list[str] = []
    if key in uncertainties:
        assert stored_mean is not None
        centre, width, count = stored_mean, _like(key, rows.numbers(key), shape), np.full(n * k, 2)
        if np.any(width < 0):
            message = f"Some values of {key} are negative; uncertainties are not."
            raise InputError(message, parameter=key)
        width = np.sqrt(width) if key.endswith("_var") else width
    else:
        stored = rows.numbers(key)
        member_shape = stored.shape[1:]
        member_order, assumed = _member_order(rows, target, key, k, order)
        if member_order == "member":
            stored = stored.reshape(n, -1, k).transpose(0, 2, 1)
        values = stored.reshape(n * k, -1)
        flags = _absent(rows, target, absent, k, values.shape[1])
        centre, width, count = _moments(values, flags)
        partly = ~np.isfinite(values).all(axis=1) & (count >= MIN_ABSENT)
        if partly.any() and flags is None:
            remarks.append(
                f"{np.count_nonzero(partly)} of {n * k} points lack the predictions of some "
                "members (NaN); the other members are used."
            )
        confirmed = stored_mean is not None and np.allclose(
            stored_mean, values.mean(axis=1), rtol=1e-7, atol=1e-7, equal_nan=True
        )
        if assumed and not confirmed:
            remarks.append(
                f"{key} is read member by member (m0x m0y m0z m1x …). If it is stored component "
                "by component (m0x m1x … m0y …), use --order component; --order member confirms "
                "the order.",
            )
    return Ensemble(
        target=target,
        key=key,
        mean=centre,
        std=width,
        count=count,
        vector_std=np.repeat(vector_std(width.reshape(n, k)), k) if k in MULTIPLICITY else None,
        members=values,
        absent=flags,
        y=y.reshape(-1),
        structure=np.repeat(rows.structure, k),
        atom=np.repeat(rows.atom, k),
        component=np.tile(np.arange(k), n) if k > 1 else None,
        per_atom=rows.symbols is not None,
        labels=None if by is None else np.repeat(_labels(rows, by), k),
        sizes=None if rows.sizes is None else np.repeat(rows.sizes, k),
        extrapolates=np.repeat(rows.numbers(EXTRAPOLATES) > 0, k)
        if EXTRAPOLATES in rows.arrays
        else None,
        shape=shape,
        member_shape=member_shape,
        order=member_order,
        columns=rows.columns,
        stored_mean=stored_mean,
        uncertainties=tuple(uncertainties),
        remarks=tuple(remarks),
    )


def _sources(given: str | Path | Source | Sequence[Source]) -> list[Source]:
    if isinstance(given, (str, Path)):
        return [read_source(given)]
    if isinstance(given, Table):
        return [given]
    found: list[Any] = [*given]
    return [found] if isinstance(found[0], Atoms) else found


def _member_order(
    rows: _Rows, target: str, key: str, k: int, order: str | None
) -> tuple[Order | None, bool]:
    """Return the order of stored members of vectors, and whether it is assumed."""
    n, *inner = rows.numbers(key).shape
    n_members, rest = divmod(int(np.prod(inner)), k)
    fits: list[Order] = []
    if inner and (len(inner) == 1 or inner[0] == n_members):
        fits.append("member")
    if inner and (len(inner) == 1 or inner[-1] == n_members):
        fits.append("component")
    if rest or n_members < 2 or not fits:
        expected = f"({n}, N_R)" if k == 1 else f"({n}, N_R, {k}) or ({n}, {k}, N_R)"
        message = f"{key} has the shape {(n, *inner)}; N_R ≥ 2 members have the shape {expected}."
        raise InputError(message, parameter=key)
    if k == 1:
        return None, False
    if len(inner) == 1 and f"{target}_0" in rows.columns.get(key, ()):
        raise InputError(
            f"The columns {target}_0, … are components of a vector or members of a number. Members "
            f"of vectors belong into the columns {key}_0, …",
            parameter=target,
        )
    if len(fits) == 1 or key in rows.stacked:
        return fits[0], False
    return "component" if order == "component" else "member", order is None


def _moments(
    members: Float64Array, absent: BoolArray | None
) -> tuple[Float64Array, Float64Array, IntArray]:
    """Return mean, standard deviation and number of the finite (out-of-bag) members of points."""
    used = np.isfinite(members) if absent is None else absent & np.isfinite(members)
    count, members = used.sum(axis=1), np.where(used, members, 0.0)
    mean, std = np.full((2, len(members)), np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        some, every = out_of_bag_prediction(members, used), used.all(axis=1)
        mean[some.used], std[some.used] = some.mean, some.std
        if absent is None:  # without flags, two members are enough
            mean[every], std[every] = ensemble_mean_std(members[every])
        # Members that differ by rounding are identical.
        return mean, np.where(std <= rounding_of(members), 0.0, std), count


def _like(key: str, values: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """Return all values in one array, if they have as many components as this shape."""
    if key == "stress" and values.shape[1:] == (6,) and np.prod(shape) == 9:
        # ASE turns the nine numbers of a stress into six.
        values = voigt_6_to_full_3x3_stress(values)  # type: ignore[no-untyped-call]
    if np.prod(values.shape[1:]) != np.prod(shape):
        message = f"{key} has the shape {values.shape[1:]} per row, and the other values {shape}."
        raise InputError(message, parameter=key)
    return values.reshape(-1)


def _absent(rows: _Rows, target: str, key: str | None, k: int, n_members: int) -> BoolArray | None:
    """Return out-of-bag flags of all points (n·k, N_R)."""
    name = key or f"{target}_absent"
    if name not in rows.arrays:
        if key is None:
            return None
        raise rows.unknown("absent", key, "flags of out-of-bag members")
    flags = rows.numbers(name).reshape(len(rows.structure), -1)
    if flags.shape[1] != n_members or not np.all((flags == 0) | (flags == 1)):
        raise InputError(
            f"{name} must have a flag, 0 or 1, for each of {n_members} members; its shape is "
            f"{flags.shape}, and its values are from {np.min(flags):g} to {np.max(flags):g}.",
            parameter="absent",
        )
    return np.repeat(flags.astype(bool), k, axis=0)


def _labels(rows: _Rows, by: str) -> StrArray:
    """Return the group of each row."""
    symbols = rows.symbols if by == "element" else None
    labels = rows.arrays.get(by) if symbols is None else symbols
    if labels is None or labels.shape != rows.structure.shape:
        if by == "element":
            message = "Groups by element are for properties of atoms, with structures in the file."
            raise InputError(message, parameter="by")
        raise rows.unknown("by", by, "one label per structure or atom")
    return np.asarray(labels).astype(str)


@dataclass(frozen=True)
class _Rows:
    """Arrays by key, with a row for each structure or atom.

    `symbols` are elements, if rows are atoms; `sizes` are numbers of atoms of their structures;
    `keys` are all keys of the file; `columns` are the keys that an array was joined from. The
    members in `stacked` arrays are on the second axis.
    """

    arrays: dict[str, Any]
    structure: IntArray
    atom: IntArray
    symbols: StrArray | None
    sizes: IntArray | None
    keys: Collection[str]
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Collection[str] = ()

    def predicted(self, target: str) -> str:
        """Return the key of the members, or else of the uncertainties."""
        keys = predicted_keys(target)
        usable = keys if target in self.arrays else keys[: len(MEMBERS)]
        found = next((key for key in usable if key in self.arrays), None)
        if found is None:
            raise InputError(
                f"There are no predictions of {target!r}: they are read from {', '.join(keys)} "
                f"(uncertainties with {target} beside them), or {target}_0, … {self.known()}"
                f"{did_you_mean(target, self.keys)}",
                parameter="target",
            )
        return found

    def unknown(self, parameter: str, key: str, what: str) -> InputError:
        """Return the error of a key that the file does not have."""
        message = f"There are no {what} under {key!r}. {self.known()}"
        return InputError(message + did_you_mean(key, self.keys), parameter=parameter)

    def numbers(self, key: str) -> Float64Array:
        """Return an array of real numbers with one row per structure or atom."""
        n = len(self.structure)
        try:
            numbers = np.asarray(self.arrays[key]).astype(np.float64, casting="same_kind")
        except (TypeError, ValueError):
            message = f"{key} has text or complex numbers in the place of real numbers."
            raise InputError(message, parameter=key) from None
        if len(numbers) != n:
            message = f"{key} has the shape {numbers.shape}, but there are {n} rows."
            message += " Is it transposed?" if n in numbers.shape else ""
            raise InputError(message, parameter=key)
        return numbers

    def known(self) -> str:
        """Return a sentence with all keys of the file."""
        return f"The file has: {', '.join(sorted(self.keys)) or 'no keys'}."


def predicted_keys(target: str) -> list[str]:
    """Return the keys of members and uncertainties."""
    return [f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES)]


@dataclass(frozen=True)
class _Names:
    """Where predictions are, as given to `read_ensemble`; `others` are further keys to read."""

    target: str
    members: str | None
    mean: str | None
    std: str | None
    others: tuple[str, ...]

    @property
    def stems(self) -> list[str]:
        """Keys of values, or of numbered parts of values."""
        named = [name for name in (self.mean, self.std) if name is not None]
        read = [self.target, *predicted_keys(self.target), f"{self.target}_absent", EXTRAPOLATES]
        return list(dict.fromkeys([*self.others, *named, *read]))

    def is_member(self, key: str) -> bool:
        """Whether the pattern of members matches a key."""
        return bool(self.members) and fnmatchcase(key, str(self.members)) and key not in self.others

    def is_read(self, key: str) -> bool:
        """Whether a key, perhaps numbered, is read."""
        return self.is_member(key) or not {key, _stem(key)}.isdisjoint(self.stems)

    def is_predicted(self, key: str) -> bool:
        """Whether a key, perhaps numbered, is that of predictions."""
        keys = {*predicted_keys(self.target), self.mean, self.std}
        numbered = _stem(key) != key and _stem(key) in {*keys, self.target}
        return self.is_member(key) or key in keys or numbered

    def join(self, found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
        """Return arrays by the keys that are read, and the keys that they were joined from."""
        arrays: dict[str, Any] = {}
        joined: dict[str, tuple[str, ...]] = {}

        def add(key: str, names: Sequence[str]) -> None:
            parts = [found[name] for name in names]
            shapes = {np.shape(part) for part in parts}
            if len(shapes) > 1:
                listed = " and ".join(map(str, sorted(shapes)))
                message = f"{', '.join(names)} must have one shape; they have {listed}."
                raise InputError(message, parameter=key)
            arrays[key] = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
            joined[key] = tuple(names)

        for key in self.stems:
            if key in found:
                arrays[key] = found[key]
            elif names := _numbered(found, key) or _named(found, key):
                add(key, names)
        members: Sequence[str] = sorted(filter(self.is_member, found), key=_natural)
        if not self.members and not any(key in arrays for key in predicted_keys(self.target)):
            members = _numbered(found, self.target)
        if self.std is not None or members:
            for key in predicted_keys(self.target):
                arrays.pop(key, None)
                joined.pop(key, None)
        if members:
            if joined.get(self.target, ()) == _numbered(found, self.target) != ():
                # These are members, not components.
                del joined[self.target], arrays[self.target]
            add(f"{self.target}{MEMBERS[0]}", members)
        for key, name in ((self.target, self.mean), (f"{self.target}_std", self.std)):
            if name is not None and name in found:
                add(key, [name])
        return arrays, joined

    def rows(self, source: Source) -> _Rows:
        """Return the values of all structures or atoms."""
        if isinstance(source, Table):
            return _table_rows(source, self)
        return _frame_rows(source, self)


def _merged(found: Sequence[_Rows], names: _Names) -> _Rows:
    """Join files with the same rows: their predictions are members; other keys are added."""
    first, *others = found
    keys = {key for rows in found for key in rows.keys}
    for asked, name in (("members", names.members), ("mean_column", names.mean)):
        if name and not any(fnmatchcase(key, name) for key in keys):
            raise first.unknown(asked, name, "predictions")
    if names.std is not None and names.std not in keys:
        raise first.unknown("std_column", names.std, "standard deviations")
    if not others:
        return first
    key = f"{names.target}{MEMBERS[0]}"
    arrays: dict[str, Any] = {}
    parts: list[Float64Array] = []
    for i, rows in enumerate(found, 1):
        before = len(parts), len(arrays)
        arrays = rows.arrays | arrays
        if key in rows.arrays:
            one_member = names.members and len(rows.columns.get(key, ())) == 1
            parts.append(rows.numbers(key)[:, None] if one_member else rows.numbers(key))
        elif names.target in rows.arrays and names.target not in names.others:
            parts.append(rows.numbers(names.target)[:, None])
        if before == (len(parts), len(arrays)):
            message = f"File {i} adds no predictions of {names.target!r}, and nothing else."
            raise InputError(f"{message} {rows.known()}", parameter="predictions")
        if len(rows.structure) != len(first.structure):
            raise InputError(
                f"File {i} has {len(rows.structure)} rows, and the first {len(first.structure)}. "
                "All files must have the same rows in the same order.",
                parameter="predictions",
            )
    columns, stacked = dict(first.columns), first.stacked
    if len(parts) > 1:
        arrays.pop(names.target, None)
        columns = {k: v for k, v in columns.items() if k not in (key, names.target)}
        try:
            arrays[key], stacked = np.concatenate(parts, axis=1), (key,)
        except ValueError:
            listed = " and ".join(str(part.shape[2:]) for part in parts)
            message = f"Values of {names.target} have different shapes in the files: {listed}."
            raise InputError(message, parameter="predictions") from None
    return replace(first, arrays=arrays, columns=columns, keys=keys, stacked=stacked)


def _check_same_structures(sources: Sequence[Source]) -> None:
    """Reject files of different structures, or in another order."""
    first, *others = [source for source in sources if not isinstance(source, Table)] or [[]]
    for frames in others:
        for i, (a, b) in enumerate(zip(first, frames, strict=False)):
            same = np.array_equal(a.numbers, b.numbers)
            if not same or not np.allclose(a.positions, b.positions, atol=1e-3):
                message = f"Structure {i} differs between two files. All files must have the same"
                message += " structures in the same order."
                raise InputError(message, parameter="predictions")


# Structures.


def with_results(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``info`` and ``arrays``, with the keys that ASE has read into a calculator.

    Members of vectors as MACE's calculator returns them, (N_R, n_atoms, 3), become columns of
    ``arrays``, member by member.
    """
    info, arrays = dict(atoms.info), dict(atoms.arrays)
    for key in [key for key in info if key.endswith(MEMBERS)]:
        if np.shape(info[key])[1:] == (len(atoms), 3):
            members = np.moveaxis(np.asarray(info.pop(key)), 0, 1)
            arrays[key] = members.reshape(len(atoms), -1)
    for key, value in getattr(atoms.calc, "results", {}).items():
        (arrays if key in per_atom_properties else info).setdefault(key, value)
    return info, arrays


def _frame_rows(frames: Sequence[Atoms], names: _Names) -> _Rows:
    """Collect the values of all structures; NaN, or no label, where a structure has none."""
    found = [with_results(atoms) for atoms in frames]
    keys = {key: None for pair in found for part in pair for key in part}
    predicted = [key for key in keys if names.is_predicted(key)] or [names.target]
    per_atom = any(key in arrays for _, arrays in found for key in predicted)
    counts = [len(atoms) if per_atom else 1 for atoms in frames]
    collected = {}
    for key in keys:
        if not names.is_read(key):
            continue
        parts: list[Any] = []
        for (info, arrays), n in zip(found, counts, strict=True):
            if per_atom and key in arrays:
                parts.append(np.asarray(arrays[key]))
            else:
                parts.append(np.repeat(np.asarray(info[key])[None], n, 0) if key in info else None)
        known = [part for part in parts if part is not None]
        shapes = {part.shape[1:] for part in known}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            message = f"{key} must have one shape in all structures; it has {listed}."
            raise InputError(message, parameter=key)
        if known:
            missing: Any = "" if any(part.dtype.kind in "US" for part in known) else np.nan
            collected[key] = np.concatenate(
                [
                    np.full((n, *known[0].shape[1:]), missing) if part is None else part
                    for part, n in zip(parts, counts, strict=True)
                ]
            )
    arrays, joined = names.join(collected)
    return _Rows(
        arrays,
        np.repeat(np.arange(len(frames)), counts),
        np.concatenate([np.arange(n) for n in counts]),
        np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None,
        np.repeat([len(atoms) for atoms in frames], counts),
        {*keys} - {"numbers", "positions"},
        joined,
        [key for key in joined if arrays[key].ndim > 2],
    )


# Tables.


@dataclass(frozen=True)
class Table:
    """A table: CSV, Parquet, or arrays (NPZ, NPY, JSON), which are written as NPZ.

    `content` is a data frame, of text for CSV so that it can be written back unchanged, or a dict
    of arrays; `columns` are arrays by name.
    """

    suffix: str
    content: Any
    columns: dict[str, Any]
    separator: str = ","

    def write(
        self,
        path: str | Path,
        changes: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        force: bool = False,
    ) -> None:
        """Write the table in the same format with columns changed, added (last) or left out."""
        with atomic_output(path, force=force) as stream:
            if self.suffix == ".npz":
                kept = {name: self.content[name] for name in self.content if name not in without}
                write_npz(stream, kept | dict(changes))
                return
            frame = self.content.drop(columns=[*without]).assign(**changes)
            if self.suffix in _TEXT:
                frame.to_csv(stream, sep=self.separator, index=False, lineterminator="\n")
            else:
                frame.to_parquet(stream)


#: Contents of a file: structures, or the columns of a table.
Source = list[Atoms] | Table


_TEXT, _ARRAYS = (".csv", ".tsv"), (".npz", ".npy", ".json")
TABLES = (*_TEXT, *_ARRAYS, ".parquet")


def read_source(path: str | Path) -> Source:
    """Read a whole file: extended XYZ, or any other format of ASE, or a table.

    Tables are ``.csv`` or ``.tsv`` with commas, semicolons or tabs, ``.parquet``, ``.npz``,
    ``.npy`` (one array, whose name is that of the file, or named fields) and ``.json`` (an object
    of lists, a list of objects, or one list as in ``.npy``).
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in TABLES:
        return read_frames(path)
    check_input(file)
    try:
        if suffix in _TEXT:
            table = _read_text(file, suffix)
        elif suffix == ".parquet":
            table = _read_parquet(file)
        else:
            arrays = _read_json(file) if suffix == ".json" else _read_arrays(file)
            if arrays is None:
                return read_frames(path)
            table = Table(".npz", arrays, {name: a for name, a in arrays.items() if a.ndim})
    except ImportError:
        raise InputError(
            f"Reading {str(file)!r} needs pandas and pyarrow: pip install 'qualms[tables]'. Files "
            ".xyz and .npz are read without.",
            parameter="path",
        ) from None
    except Exception as error:
        # Readers of damaged files raise anything.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        message = f"{str(file)!r} cannot be read as a {file.suffix} file: {reason.rstrip('.')}."
        raise InputError(message, parameter="path") from None
    if not any(len(column) for column in table.columns.values()):
        raise InputError(f"The table {str(file)!r} has no rows.", parameter="path")
    return table


def _read_arrays(file: Path) -> dict[str, Any]:
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        fields = loaded.dtype.names
        return {n: loaded[n] for n in fields} if fields else {file.stem: loaded}
    with loaded as archive:
        return dict(archive)


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return arrays by name; None for structures, as ASE writes them."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "ids" in content:
        return None
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        names = dict.fromkeys(name for row in content for name in row)
        content = {name: [row.get(name) for row in content] for name in names}
    elif isinstance(content, list):
        content = {file.stem: content}
    if not isinstance(content, dict) or not all(isinstance(v, list) for v in content.values()):
        raise ValueError("neither lists nor objects of lists")
    arrays = {}
    for name, values in content.items():
        array = np.array(values)
        if array.dtype.kind not in "biuf":
            try:
                array = np.array(values, dtype=float)  # null is NaN
            except (TypeError, ValueError):
                array = np.array(values, dtype=str)
        arrays[name] = array
    return arrays


def _read_text(file: Path, suffix: str) -> Table:
    import pandas

    with file.open(encoding="utf-8") as stream:
        header = stream.readline()
    separator = max(",;\t", key=header.count)
    content = pandas.read_csv(file, sep=separator, dtype=str, keep_default_na=False).fillna("")
    if not isinstance(content.index, pandas.RangeIndex):
        raise ValueError("rows have more cells than the header")
    columns = {name: _parsed(column.tolist(), separator) for name, column in content.items()}
    return Table(suffix, content, columns, separator)


def _read_parquet(file: Path) -> Table:
    import pandas

    content, columns = pandas.read_parquet(file, dtype_backend="pyarrow"), {}
    for name, column in content.items():
        if column.dtype.kind not in "biuf":
            columns[name] = np.array([*map(str, column)], dtype=str)
        else:
            missing = {"dtype": float, "na_value": np.nan} if column.hasnans else {}
            columns[name] = column.to_numpy(**missing)
    return Table(".parquet", content, columns)


def _parsed(cells: list[str], separator: str) -> Any:
    """Return cells as integers or floats, empty ones as NaN; or else as text."""
    words = {"true": "1", "false": "0", "": "nan", "na": "nan", "none": "nan", "null": "nan"}
    numbers = [words.get(cell.strip().lower(), cell) for cell in cells]
    decimal_points = [] if separator == "," else [cell.replace(",", ".") for cell in numbers]
    for kind, given in ((int, numbers), (float, numbers), (float, decimal_points)):
        with contextlib.suppress(ValueError):
            if given:
                return np.array([*map(kind, given)])
    return np.array(cells, dtype=str)


def _table_rows(table: Table, names: _Names) -> _Rows:
    """Join columns that belong together, and find the structure and the atom of each row."""
    columns = table.columns
    arrays, joined = names.join(columns)
    n = len(next(iter(arrays.values()), ()))
    found = {name: c for name, c in columns.items() if c.shape == (n,)}
    structure = found.get("structure", found.get("index", np.arange(n)))
    if structure.dtype.kind not in "iu":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom = found.get("atom", np.zeros(n, dtype=int))
    sizes = found.get("n_atoms")
    stacked = [key for key in joined if arrays[key].ndim > 2]
    return _Rows(arrays, structure, atom, found.get("symbol"), sizes, columns, joined, stacked)


def _numbered(columns: Collection[str], stem: str) -> tuple[str, ...]:
    """Return the numbered columns ``{stem}_0``, ``{stem}_1`` and so on."""
    found = {re.fullmatch(re.escape(stem) + r"_(\d+)", name): name for name in columns}
    matches = sorted((match for match in found if match), key=lambda match: int(match[1]))
    return tuple(found[match] for match in matches)


def _stem(name: str) -> str:
    """Return a name without the number at its end."""
    return re.sub(r"_\d+$", "", name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key with which a2 comes before a10."""
    return [(int(part or 0) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _named(columns: Collection[str], stem: str) -> tuple[str, ...]:
    """Return the columns ``{stem}_x``, ``{stem}_y``, …, or those of a tensor."""
    for names in reversed(COMPONENTS.values()):
        found = tuple(f"{stem}_{name}" for name in names)
        if all(name in columns for name in found):
            return found
    return ()
