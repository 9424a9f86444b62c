"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, and tables of all kinds."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties
from ase.stress import full_3x3_to_voigt_6_stress, voigt_6_to_full_3x3_stress

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
from qualms.io.predictions import EXTRAPOLATES, write_csv, write_npz
from qualms.io.xyz import DOF

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
    dof : float, optional
        Degrees of freedom of the errors, `Prediction.dof`, if the file has them.
    shape, member_shape, order : tuples of int, str or None
        Shapes of the stored value and members of one structure or atom; order of the members.
    columns : mapping of str to tuple of str
        The keys, or columns, of the first file that the values of a key were read from.
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
    dof: float | None
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
        arrays: dict[str, Any] = {
            name: array[chosen]
            for name, array in vars(self).items()
            if isinstance(array, np.ndarray)
        }
        return replace(self, **arrays)

    def pooled(self, isotropy: float | None) -> tuple[Float64Array, IntArray, Float64Array]:
        """Return standard deviations of whole vectors; those of the points themselves for None.

        The isotropy is that of `qualms.calibration.vectors.component_share`.

        Returns
        -------
        std : (n,) array
            Ensemble standard deviations that a calibration is applied to.
        count : (n,) array of int
            Numbers of members with standard deviations as accurate: a vector has more degrees of
            freedom than a component, as if there were more members.
        share : (n,) array
            σ of a point relative to that of its vector; 0 for components on which all members
            agree, because of symmetry.
        """
        if isotropy is None or self.vector_std is None or self.component is None:
            return self.std, self.count, np.ones(len(self))
        m = MULTIPLICITY[self.n_components]
        share = component_share(
            self.std, self.vector_std, isotropy, m[self.component] / m.mean()
        ) * (self.std > 0)
        count = self.count
        if self.members is not None:
            count = 1 + INDEPENDENT_COMPONENTS * (count - 1)
        return self.vector_std, count, share

    def unusable(self) -> dict[str, BoolArray]:
        """Return, by reason, which points have no mean and standard deviation."""
        whole = self.std if self.vector_std is None else self.vector_std
        lacking = ~np.isfinite(self.mean + self.std + whole)
        if self.members is None:
            return {"with NaN or infinite predictions": lacking}
        which = "" if self.absent is None else "out-of-bag "
        return {f"with fewer than {MIN_ABSENT} finite {which}members": lacking}


def read_ensemble(
    source: str | Path | Sequence[Source],
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
    source : path, or sequence of results of `read_source`
        Keys are those of structures, or columns of tables. Keys ``{key}_0``, ``{key}_1``, … or
        ``{key}_x``, ``{key}_y``, ``{key}_z`` belong together; ``{target}_0``, … without others are
        members of a scalar. Several sources have the same rows in the same order: their values
        under ``{target}``, or the one of `members`, are members, and other keys add to those of the
        first.
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
    sources = [read_source(source)] if isinstance(source, (str, Path)) else [*source]
    _check_same_structures(sources)
    reference = reference or f"REF_{target}"
    others = [key for key in (reference, absent, by) if key]
    find = partial(_find, target=target, members=members, mean=mean, std=std, others=others)
    files = [
        _table_rows(file, find) if isinstance(file, DataTable) else _frame_rows(file, find, target)
        for file in sources
    ]
    rows = files[0] if len(files) == 1 else _merged(files, target, reference)
    if members and not any(fnmatchcase(name, members) for name in rows.keys):
        raise rows.unknown("members", members, "predictions")
    for parameter, name in (("mean", mean), ("std", std)):
        if name and name not in rows.keys:
            raise rows.unknown(parameter, name, "predictions")
    key, n = rows.predicted(target), len(rows.structure)
    uncertainties = [name for name in (target + e for e in UNCERTAINTIES) if name in rows.arrays]
    if reference in rows.arrays:
        y = rows.numbers(reference)
        sizes = [np.prod(rows.numbers(name).shape[1:]) for name in (key, *uncertainties)]
        if target == "stress" and np.prod(y.shape[1:]) == 9 and any(k % 9 for k in sizes):
            # Predictions have the six components that ASE makes of nine.
            y = full_3x3_to_voigt_6_stress(y.reshape(-1, 3, 3))  # type: ignore[no-untyped-call]
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
    extrapolates = None
    if EXTRAPOLATES in rows.arrays:
        extrapolates = np.repeat(rows.numbers(EXTRAPOLATES) > 0, k)
    dof = np.empty(0)
    if f"{target}{DOF}" in rows.arrays:
        dof = np.unique(rows.numbers(f"{target}{DOF}"))
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
        per_atom=rows.per_atom,
        labels=None if by is None else np.repeat(_labels(rows, by), k),
        sizes=None if rows.sizes is None else np.repeat(rows.sizes, k),
        extrapolates=extrapolates,
        dof=float(dof[0]) if len(dof) == 1 and dof[0] > 0 else None,
        shape=shape,
        member_shape=member_shape,
        order=member_order,
        columns=rows.columns,
        stored_mean=stored_mean,
        uncertainties=tuple(uncertainties),
        remarks=tuple(remarks),
    )


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
    if len(fits) == 1 or (len(inner) > 1 and len(rows.columns.get(key, ())) != 1):
        # Members that were joined, from several keys or files, are on the second axis.
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
    """Return values as a flat array; reject other numbers of components than this shape has."""
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
        raise rows.unknown("by", by, "labels of structures or atoms")
    return np.asarray(labels).astype(str)


@dataclass(frozen=True)
class _Rows:
    """Values of files, with a row for each structure or atom.

    `arrays` are those that are read, by key, and `columns` the keys, or columns, that each was
    joined from: see `_find`. `keys` are all keys of the files. If rows are atoms, which `per_atom`
    states, `symbols` are their elements, and `sizes` numbers of atoms of their structures.
    """

    arrays: dict[str, Any]
    columns: dict[str, tuple[str, ...]]
    keys: Collection[str]
    structure: IntArray
    atom: IntArray
    per_atom: bool
    symbols: StrArray | None
    sizes: IntArray | None

    def predicted(self, target: str) -> str:
        """Return the key of the members, or else of the uncertainties."""
        keys = predicted_keys(target)
        usable = keys if target in self.arrays else keys[: len(MEMBERS)]
        for key in usable:
            if key in self.arrays:
                return key
        raise InputError(
            f"There are no predictions of {target!r}: they are read from {', '.join(keys)} "
            f"(uncertainties with {target} beside them), or {target}_0, … {self.listed()}"
            f"{did_you_mean(target, self.keys)}",
            parameter="target",
        )

    def unknown(self, parameter: str, key: str, what: str) -> InputError:
        """Return the error of a key that the file does not have."""
        message = f"There are no {what} under {key!r}. {self.listed()}"
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

    def listed(self) -> str:
        """Return a sentence with all keys of the file, those with numbers by the ends."""
        stems: dict[str, list[str]] = {}
        for key in sorted(self.keys, key=_natural):
            stems.setdefault(re.sub(r"\d+$", "", key), []).append(key)
        names = [n if len(n) < 4 else [n[0], f"… {n[-1]}"] for n in stems.values()]
        return f"The file has: {', '.join(itertools.chain(*names)) or 'no keys'}."


def predicted_keys(target: str) -> list[str]:
    """Return the keys of members and uncertainties."""
    return [f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES)]


#: Finds the keys, or columns, among those of a file that the values of each key are joined from.
_Find = Callable[[Collection[str]], dict[str, tuple[str, ...]]]


def _find(
    names: Collection[str],
    *,
    target: str,
    members: str | None,
    mean: str | None,
    std: str | None,
    others: Sequence[str],
) -> dict[str, tuple[str, ...]]:
    """Return the names in a file that the values of each key that is read are joined from.

    Parameters are those of `read_ensemble`; `others` are further keys to read.
    """
    columns: dict[str, tuple[str, ...]] = {}
    predicted = predicted_keys(target)
    for key in (*others, target, *predicted, f"{target}_absent", EXTRAPOLATES, f"{target}{DOF}"):
        parts = (key,) if key in names else _numbered(names, key) or _components(names, key)
        if parts:
            columns[key] = parts
    joined: tuple[str, ...] = ()
    if members:
        matching = (n for n in names if fnmatchcase(n, members) and n not in others)
        joined = tuple(sorted(matching, key=_natural))
    elif columns.keys().isdisjoint(predicted):
        joined = _numbered(names, target)
    if joined or std is not None:
        columns = {key: parts for key, parts in columns.items() if key not in predicted}
    if joined:
        if columns.get(target) == joined:  # these are members, not components
            del columns[target]
        columns[f"{target}{MEMBERS[0]}"] = joined
    for key, name in ((target, mean), (f"{target}_std", std)):
        if name is not None and name in names:
            columns[key] = (name,)
    return columns


def _joined(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """Return an array, or several of one shape on a new second axis."""
    _check_one_shape({part.shape for part in parts}, names)
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


def _check_one_shape(shapes: Collection[tuple[int, ...]], names: Sequence[str]) -> None:
    """Reject values under these keys that have several shapes."""
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        message = f"All values of {', '.join(names)} must have one shape; there are {listed}."
        raise InputError(message, parameter=names[0])


def _merged(files: Sequence[_Rows], target: str, reference: str) -> _Rows:
    """Join files with the same rows: each has a member, or adds other keys."""
    key, first = f"{target}{MEMBERS[0]}", files[0]
    arrays: dict[str, Any] = {}
    columns: dict[str, tuple[str, ...]] = {}
    parts: list[Float64Array] = []
    for i, rows in enumerate(files, 1):
        if len(rows.structure) != len(first.structure):
            raise InputError(
                f"File {i} has {len(rows.structure)} rows, and the first {len(first.structure)}. "
                "All files must have the same rows in the same order.",
                parameter="predictions",
            )
        if key in rows.arrays:
            parts.append(rows.numbers(key))
        elif target in rows.arrays and target != reference:
            parts.append(rows.numbers(target))
        elif rows.arrays.keys() <= arrays.keys():
            message = f"File {i} adds no predictions of {target!r}, and nothing else."
            raise InputError(f"{message} {rows.listed()}", parameter="predictions")
        arrays, columns = rows.arrays | arrays, rows.columns | columns
    if len(parts) > 1:
        for name in (key, target, f"{target}{DOF}"):
            arrays.pop(name, None)
            columns.pop(name, None)
        arrays[key] = _joined(parts, [target])
    keys = {name for rows in files for name in rows.keys}
    return replace(first, arrays=arrays, columns=columns, keys=keys)


def _check_same_structures(sources: Sequence[Source]) -> None:
    """Reject files of different structures, or in another order."""
    first, *others = [source for source in sources if not isinstance(source, DataTable)] or [[]]
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


def _frame_rows(frames: Sequence[Atoms], find: _Find, target: str) -> _Rows:
    """Collect the values of all structures, or of their atoms if atoms have predictions."""
    values = [with_results(atoms) for atoms in frames]
    of_structures = {key: None for info, _ in values for key in info}
    of_atoms = {key: None for _, arrays in values for key in arrays}
    columns = find(of_structures | of_atoms)
    predicted = [name for key in predicted_keys(target) for name in columns.get(key, ())]
    per_atom = not of_atoms.keys().isdisjoint(predicted or columns.get(target, ()))
    columns = find(of_structures | of_atoms if per_atom else of_structures)
    counts = [len(atoms) if per_atom else 1 for atoms in frames]
    arrays = {
        key: _joined([_frame_column(n, values, counts, per_atom) for n in names], names)
        for key, names in columns.items()
    }
    return _Rows(
        arrays,
        columns,
        (of_structures | of_atoms).keys() - {"numbers", "positions"},
        np.repeat(np.arange(len(frames)), counts),
        np.concatenate([np.arange(n) for n in counts]),
        per_atom,
        np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None,
        np.repeat([len(atoms) for atoms in frames], counts),
    )


def _frame_column(
    key: str,
    values: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    counts: Sequence[int],
    per_atom: bool,
) -> Any:
    """Return the values of a key; NaN, or no label, where a structure has none.

    Parameters
    ----------
    key : str
    values : sequence of pairs of dicts
        ``info`` and ``arrays`` of each structure.
    counts : sequence of int
        Rows of each structure.
    per_atom : bool
        Whether rows are atoms; all atoms of a structure have its values in ``info``.
    """
    parts: list[Any] = []
    for (info, arrays), n in zip(values, counts, strict=True):
        if per_atom and key in arrays:
            parts.append(np.asarray(arrays[key]))
        else:
            parts.append(np.repeat(np.asarray(info[key])[None], n, 0) if key in info else None)
    present = [part for part in parts if part is not None]
    _check_one_shape({part.shape[1:] for part in present}, [key])
    missing: Any = "" if any(part.dtype.kind in "US" for part in present) else np.nan
    return np.concatenate(
        [
            np.full((n, *present[0].shape[1:]), missing) if part is None else part
            for part, n in zip(parts, counts, strict=True)
        ]
    )


# Tables.


@dataclass(frozen=True)
class DataTable:
    """A table: CSV, Parquet, or arrays (NPZ, NPY, JSON), which are written as NPZ.

    `content` has columns as they are written again: text (CSV), those of pyarrow, or arrays.
    `columns` are arrays by name.
    """

    suffix: str
    content: dict[str, Any]
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
        """Write the table in the same format with columns changed, added (last) or left out.

        Parameters
        ----------
        path : path
        changes : mapping of str to (n, …) arrays, or to columns of `content`
        without : collection of str
            Columns to leave out.
        force : bool
            Whether an existing file may be replaced.
        """
        content = {name: self.content[name] for name in self.content if name not in without}
        content |= changes
        with atomic_output(path, force=force) as stream:
            if self.suffix == ".npz":
                write_npz(stream, content)
            elif self.suffix == ".parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(pyarrow.table(content), stream)
            else:
                write_csv(stream, content, separator=self.separator)


#: Contents of a file: structures, or the columns of a table.
Source = list[Atoms] | DataTable

TABLES = (".csv", ".tsv", ".npz", ".npy", ".json", ".parquet")


def read_source(path: str | Path) -> Source:
    """Read a whole file: extended XYZ, or any other format of ASE, or a table.

    Tables are ``.csv`` or ``.tsv`` with commas, semicolons or tabs, ``.parquet``, ``.npz``,
    ``.npy`` (one array, whose name is that of the file) and ``.json`` (an object of lists, a list
    of objects, or one list as in ``.npy``).
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in TABLES:
        return read_frames(path)
    check_input(file)
    try:
        if suffix in (".csv", ".tsv"):
            table = _read_text(file, suffix)
        elif suffix == ".parquet":
            table = _read_parquet(file)
        else:
            arrays = _read_json(file) if suffix == ".json" else _read_arrays(file)
            table = DataTable(".npz", arrays, {name: a for name, a in arrays.items() if a.ndim})
    except ImportError:
        message = f"Reading {str(file)!r} needs pyarrow: pip install 'qualms[tables]'."
        raise InputError(message, parameter="path") from None
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
        return {file.stem: loaded}
    with loaded as archive:
        return dict(archive)


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        names = dict.fromkeys(name for row in content for name in row)
        content = {name: [row.get(name) for row in content] for name in names}
    elif isinstance(content, list):
        content = {file.stem: content}
    if not isinstance(content, dict) or not all(isinstance(v, list) for v in content.values()):
        raise ValueError("neither lists nor objects of lists")
    arrays = {}
    for name, values in content.items():
        arrays[name] = np.array(values)
        if arrays[name].dtype.kind not in "biuf":
            try:
                arrays[name] = np.array(values, dtype=float)  # null is NaN
            except (TypeError, ValueError):
                arrays[name] = np.array(values, dtype=str)
    return arrays


def _read_text(file: Path, suffix: str) -> DataTable:
    text = file.read_bytes().decode("utf-8-sig")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header, *rows = filter(None, lines)
    if any(len(row) != len(header) for row in rows):
        raise ValueError("rows have other numbers of cells than the header")
    if len({*header}) < len(header):
        raise ValueError("columns have the same name")
    content = dict(zip(header, map(list, zip(*rows, strict=True)), strict=False))
    columns = {name: _parsed(cells, separator) for name, cells in content.items()}
    return DataTable(suffix, content, columns, separator)


def _read_parquet(file: Path) -> DataTable:
    from pyarrow import parquet, types

    table, columns = parquet.read_table(file), {}
    content = {name: table.column(name) for name in table.column_names}
    for name, column in content.items():
        numeric = (types.is_integer, types.is_floating, types.is_boolean)
        if not any(is_type(column.type) for is_type in numeric):
            columns[name] = np.array([*map(str, column.to_pylist())], dtype=str)
        else:  # null is NaN
            numbers = column.cast("float64", safe=False) if column.null_count else column
            columns[name] = numbers.to_numpy()
    return DataTable(".parquet", content, columns)


def _parsed(cells: list[str], separator: str) -> Any:
    """Return cells as integers or floats, empty ones as NaN; or else as text."""
    words = {"true": "1", "false": "0", "": "nan", "na": "nan", "none": "nan", "null": "nan"}
    numbers = [words.get(cell.strip().lower(), cell) for cell in cells]
    with contextlib.suppress(ValueError):
        return np.array([*map(int, numbers)])
    if separator != ",":
        numbers = [cell.replace(",", ".") for cell in numbers]
    with contextlib.suppress(ValueError):
        return np.array([*map(float, numbers)])
    return np.array(cells, dtype=str)


def _table_rows(table: DataTable, find: _Find) -> _Rows:
    """Join columns that belong together, and find the structure and the atom of each row."""
    columns = find(table.columns)
    arrays = {
        key: _joined([table.columns[name] for name in names], names)
        for key, names in columns.items()
    }
    n = len(next(iter(arrays.values()), ()))
    labels = {name: column for name, column in table.columns.items() if column.shape == (n,)}
    owner = _structures_of_atoms(table.columns, n)
    if owner is not None:  # atoms have the values of their structures
        sizes = table.columns["n_atoms"]
        arrays = {key: a[owner] if len(a) == len(sizes) else a for key, a in arrays.items()}
        atom = np.arange(n) - np.searchsorted(owner, owner)
        labels = {"atom": atom} | labels | {"structure": owner, "n_atoms": sizes[owner]}
    structure = labels.get("structure", labels.get("index", np.arange(n)))
    if structure.dtype.kind not in "iu":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom = labels.get("atom", np.zeros(n, dtype=int))
    symbols, sizes = labels.get("symbol"), labels.get("n_atoms")
    per_atom = symbols is not None or "atom" in labels
    return _Rows(arrays, columns, table.columns, structure, atom, per_atom, symbols, sizes)


def _structures_of_atoms(columns: Mapping[str, Any], n: int) -> IntArray | None:
    """Return the structure of each of n atoms, if other arrays have a row for each structure.

    NPZ files of predictions have both. If not all atoms of the structures are predicted, or the
    target belongs to atoms, there is a column `structure`.
    """
    sizes, owner = columns.get("n_atoms", np.empty(0)), columns.get("structure")
    if sizes.dtype.kind not in "iu" or sizes.ndim > 1 or len(sizes) == n:
        return None
    if owner is None and np.all((sizes >= 0) & (sizes <= n)) and sizes.sum() == n:
        owner = np.repeat(np.arange(len(sizes)), sizes)
    if owner is None or owner.dtype.kind not in "iu" or owner.shape != (n,):
        return None
    return owner if np.all((owner >= 0) & (owner < len(sizes))) else None


def _numbered(names: Collection[str], stem: str) -> tuple[str, ...]:
    """Return ``{stem}_0``, ``{stem}_1`` and so on, as far as they are among the names."""
    number = re.compile(re.escape(stem) + r"_\d+")
    return tuple(sorted(filter(number.fullmatch, names), key=_natural))


def _natural(name: str) -> list[Any]:
    """Return a sorting key with which a2 comes before a10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _components(names: Collection[str], stem: str) -> tuple[str, ...]:
    """Return ``{stem}_x``, ``{stem}_y``, …, or those of a tensor, if all are among the names."""
    for components in reversed(COMPONENTS.values()):
        parts = tuple(f"{stem}_{component}" for component in components)
        if all(part in names for part in parts):
            return parts
    return ()
