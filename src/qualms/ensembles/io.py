"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, CSV, Parquet and NPZ."""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.atomistic.structures import read_frames
from qualms.errors import InputError, counted
from qualms.gp.ensemble import committee
from qualms.io.files import atomic_output
from qualms.io.predictions import write_npz

#: Endings of the keys of members, of standard deviations and of variances.
MEMBERS = ("_ensemble", "_comm")
UNCERTAINTIES = ("_uncertainty", "_std", "_var", "_variance")
VARIANCES = ("_var", "_variance")
#: Keys of reference values that are tried if none is given.
REFERENCES = ("REF_{}", "{}_ref", "{}_reference", "{}_true")
Order = Literal["member", "component"]
ORDERS: tuple[Order, ...] = ("member", "component")
#: Names of components: of vectors, of symmetric tensors (as ASE orders them), and of tensors.
_COMPONENTS = (
    ("x", "y", "z"),
    ("xx", "yy", "zz", "yz", "xz", "xy"),
    ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz"),
)


@dataclass(frozen=True)
class Layout:
    """The order of the members of one structure or atom in a file.

    Attributes
    ----------
    shape : tuple of int
        Shape of the numbers of one row.
    n_components : int
        k.
    order : {"member", "component"}, optional
        Which of the two axes comes first; None for scalars.
    """

    shape: tuple[int, ...]
    n_components: int
    order: Order | None

    def points(self, stored: Float64Array) -> Float64Array:
        """Return members (n·k, N_R) of stored members (n, *shape)."""
        n, k = len(stored), self.n_components
        if self.order == "member":
            stored = stored.reshape(n, -1, k).transpose(0, 2, 1)
        return stored.reshape(n * k, -1)

    def stored(self, points: Float64Array) -> Float64Array:
        """Return members (n, *shape) of members (n·k, N_R)."""
        by_component = points.reshape(-1, self.n_components, points.shape[1])
        if self.order == "member":
            by_component = by_component.transpose(0, 2, 1)
        return by_component.reshape(-1, *self.shape)


@dataclass(frozen=True)
class Ensemble:
    """Predictions of n points: structures, atoms, or components of vectors and tensors.

    Attributes
    ----------
    target : str
    kind : {"structure", "atom", "component"}
    mean, std : (n,) arrays
        Mean and standard deviation (ddof = 1) of the members, or as they are stored.
    members : (n, N_R) array, optional
    y : (n,) array
        Reference values; NaN where there is none.
    absent : (n, N_R) array of bool, optional
        Whether the point is out-of-bag for the member.
    structure, atom : (n,) arrays of int
        Origin of each point; `atom` is zero for properties of structures.
    component : (n,) array of int, optional
        Component of a vector or tensor.
    key : str
        Key of the members, or of the uncertainties if there are no members.
    shape : tuple of int
        Shape of the stored values of one structure or atom.
    layout : Layout, optional
        Order of the stored members.
    columns : mapping of str to tuple of str
        The columns of a table that the values of a key were joined from.
    per_atom : bool
        Whether the values belong to atoms.
    labels : (n,) array of str, optional
        Group of each point.
    remarks : tuple of str
        Warnings for the user.
    stored_mean : (n,) array, optional
        Values under the name of the target itself, beside members; NaN where there is none.
    has_uncertainty : bool
        Whether uncertainties are stored beside the members.
    """

    target: str
    kind: str
    mean: Float64Array
    std: Float64Array
    members: Float64Array | None
    y: Float64Array
    absent: BoolArray | None
    structure: IntArray
    atom: IntArray
    component: IntArray | None = None
    key: str = ""
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_atom: bool = False
    labels: StrArray | None = None
    remarks: tuple[str, ...] = ()
    stored_mean: Float64Array | None = None
    has_uncertainty: bool = False

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def n_members(self) -> int | None:
        """N_R, or None if there are only uncertainties."""
        return None if self.members is None else int(self.members.shape[1])

    @property
    def n_components(self) -> int:
        """Number of points of one structure or atom."""
        return int(np.prod(self.shape))

    @property
    def is_finite(self) -> BoolArray:
        """Whether all predictions of a point are finite; with `absent`, the out-of-bag ones."""
        if self.members is None:
            return np.isfinite(self.mean) & np.isfinite(self.std)
        counts = np.ones_like(self.members, bool) if self.absent is None else self.absent
        return np.asarray(np.all(np.isfinite(self.members) | ~counts, axis=1))

    def counted(self, n: int | None = None) -> str:
        """Return the number of points, all of them by default, with a noun."""
        return counted(len(self) if n is None else n, self.kind)

    def some(self, chosen: BoolArray) -> Ensemble:
        """Return the chosen points."""
        arrays = {name: array for name, array in vars(self).items() if np.ndim(array)}
        names = arrays.keys() - {"shape", "remarks"}
        return replace(self, **{name: arrays[name][chosen] for name in names})


def read_ensemble(
    source: str | Path | Source,
    target: str,
    reference: str | None = None,
    *,
    absent: str | None = None,
    by: str | None = None,
    order: str | None = None,
    n_components: int | None = None,
) -> Ensemble:
    """Read the predictions of an ensemble and the reference values.

    Parameters
    ----------
    source : path, or the result of `read_source`
        Extended XYZ (or any format that ASE reads), ``.csv``, ``.parquet`` or ``.npz``. In tables,
        columns ``{key}_0``, ``{key}_1``, … or ``{key}_x``, ``{key}_y``, ``{key}_z`` belong
        together; columns ``{target}_0``, … without others are members.
    target : str
        Name of the property: members under ``{target}_ensemble`` or ``{target}_comm``, or a value
        under ``{target}`` with ``{target}_uncertainty``, ``_std``, or ``_var`` for a variance.
    reference : str, optional
        Key of the reference values; ``REF_{target}`` and the like by default.
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
    if order is not None and order not in ORDERS:
        raise InputError("order", repr(order), f"one of {', '.join(ORDERS)}")
    found = read_source(source) if isinstance(source, (str, Path)) else source
    references = [reference] if reference else [name.format(target) for name in REFERENCES]
    asked = [key for key in (absent, by) if key is not None and key != "element"]
    if isinstance(found, Table):
        values = _of_table(found, target, asked, references)
    else:
        values = _of_frames(found, target, asked, references)

    predicted = values.predicted(target)
    mean = values.numbers(target) if target in values.arrays else None
    y, shape = _reference(values, references, reference, target, mean, n_components)
    k = int(np.prod(shape))
    n, per_atom = len(values), values.symbols is not None
    uncertainties = {
        key: _like(key, values.numbers(key), (n, *shape))
        for key in (f"{target}{suffix}" for suffix in UNCERTAINTIES)
        if key in values.arrays
    }
    flat_mean = None if mean is None else _like(target, mean, (n, *shape))
    fields: dict[str, Any] = {
        "kind": "component" if k > 1 else "atom" if per_atom else "structure",
        "y": y.reshape(-1),
        "structure": np.repeat(values.structure, k),
        "atom": np.repeat(values.atom, k),
        "component": np.tile(np.arange(k), n) if k > 1 else None,
        "key": predicted,
        "shape": shape,
        "per_atom": per_atom,
        "labels": _labels(values, by, k),
        "columns": values.columns,
    }
    if predicted in uncertainties:
        assert flat_mean is not None
        std, remarks = _standard_deviations(predicted, uncertainties[predicted])
        return Ensemble(
            target, mean=flat_mean, std=std, members=None, absent=None, remarks=remarks, **fields
        )
    layout, remarks = _layout(values, predicted, k, order)
    members = layout.points(values.numbers(predicted))
    if members.shape[1] < 2:
        remedy = f"Or store the standard deviation as {target}_uncertainty."
        raise InputError(target, "an ensemble of one member", "at least 2 members", remedy)
    with np.errstate(invalid="ignore"):
        means, std = committee(members)
    if flat_mean is not None and np.allclose(flat_mean, means, rtol=1e-7, atol=1e-7):
        remarks = ()  # the stored mean confirms the order
    return Ensemble(
        target,
        mean=means,
        std=std,
        members=members,
        absent=_absent(values, target, absent, k, members.shape[1]),
        layout=layout,
        remarks=remarks,
        stored_mean=flat_mean,
        has_uncertainty=bool(uncertainties),
        **fields,
    )


def _reference(
    values: _Values,
    keys: Sequence[str],
    reference: str | None,
    target: str,
    mean: Float64Array | None,
    n_components: int | None,
) -> tuple[Float64Array, tuple[int, ...]]:
    """Return the reference values (rows, k), NaN where there are none, and the shape of a row."""
    key = next((key for key in keys if key in values.arrays), None)
    if key is not None:
        y = values.numbers(key)
        shape: tuple[int, ...] = y.shape[1:]
    elif n_components is not None:
        y = np.full((len(values), n_components), np.nan)
        shape = () if n_components == 1 else (n_components,)
        members = values.numbers(values.predicted(target))
        if members.ndim == 4:  # matrices
            matrices = (members.shape[2:], members.shape[1:-1])
            shape = next((s for s in matrices if np.prod(s) == n_components), shape)
    else:
        expected = f"the key of the reference values of {target}"
        raise InputError("reference", reference or "none", expected, values.known())
    if mean is not None and np.prod(mean.shape[1:]) == np.prod(shape):
        shape = mean.shape[1:]
    return y.reshape(len(values), -1), shape


def _layout(values: _Values, key: str, k: int, order: str | None) -> tuple[Layout, tuple[str, ...]]:
    """Return the order of stored members, and a remark if it is assumed."""
    n, *inner = values.numbers(key).shape
    n_members, rest = divmod(int(np.prod(inner)), k)
    axes: dict[Order, int] = {"member": inner[0], "component": inner[-1]} if inner else {}
    fits = [order for order in ORDERS if len(inner) == 1 or axes.get(order) == n_members]
    if k == 1 and sum(size > 1 for size in inner) > 1:
        fits = []
    if rest or not n_members or not fits:
        expected = f"({n}, N_R)" if k == 1 else f"({n}, N_R, {k}) or ({n}, {k}, N_R)"
        raise InputError(key, f"shape {(n, *inner)}", expected)
    shape = tuple(inner)
    named = _order_of(values.columns.get(key, ("",)))
    if k == 1 or len(fits) == 1 or named or n_members == 1:
        return Layout(shape, k, None if k == 1 else named or fits[0]), ()
    chosen = next(o for o in ORDERS if o == (order or "member"))
    if order is not None:
        return Layout(shape, k, chosen), ()
    return Layout(shape, k, chosen), (
        f"{key} is read member by member (m0x m0y m0z m1x …). If it is stored component by "
        "component (m0x m1x … m0y …), use --order component; --order member confirms the order.",
    )


def _standard_deviations(key: str, stored: Float64Array) -> tuple[Float64Array, tuple[str, ...]]:
    """Return standard deviations, and a remark if variances are stored."""
    negative = int(np.count_nonzero(stored < 0))
    if negative:
        raise InputError(key, counted(negative, "negative value"), "uncertainties ≥ 0")
    if not key.endswith(VARIANCES):
        return stored, ()
    return np.sqrt(stored), (f"{key} holds variances: their square roots are used.",)


def _like(key: str, values: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """Return all values in one array, if they are as many as in an array of this shape."""
    if key.startswith("stress") and values.shape[1:] == (6,) and np.prod(shape[1:]) == 9:
        # ASE turns the nine numbers of a stress into six.
        values = voigt_6_to_full_3x3_stress(values)  # type: ignore[no-untyped-call]
    if np.prod(values.shape[1:]) != np.prod(shape[1:]):
        raise InputError(key, f"shape {values.shape}", f"the shape of the other values, {shape}")
    return values.reshape(-1)


def _absent(
    values: _Values, target: str, key: str | None, k: int, n_members: int
) -> BoolArray | None:
    """Return out-of-bag flags of all points (n·k, N_R)."""
    name = key or f"{target}_absent"
    if name not in values.arrays:
        if key is None:
            return None
        raise InputError("absent", repr(key), "a key of the file", values.known())
    flags = values.numbers(name).reshape(len(values), -1)
    if flags.shape[1] != n_members or not np.all((flags == 0) | (flags == 1)):
        given = f"{name} of shape {flags.shape}"
        raise InputError("absent", given, f"0 or 1 (false or true) for each of {n_members} members")
    return np.repeat(flags.astype(bool), k, axis=0)


def _labels(values: _Values, by: str | None, k: int) -> StrArray | None:
    """Return the group of each point."""
    if by is None:
        return None
    if by == "element" and values.symbols is not None:
        labels = values.symbols
    elif by in values.arrays:
        labels = np.asarray(values.arrays[by]).astype(str)
    else:
        element = "element, for properties of atoms, or " if by == "element" else ""
        raise InputError("by", repr(by), f"{element}a key of the file", values.known())
    if labels.shape != (len(values),):
        raise InputError("by", repr(by), "a key of one label per structure or atom")
    return np.repeat(labels, k)


@dataclass(frozen=True)
class _Values:
    """Arrays by key, with a row for each structure or atom.

    Attributes
    ----------
    arrays : mapping of str to arrays
        First axis: rows.
    structure, atom : (n_rows,) arrays of int
    symbols : (n_rows,) array of str, optional
        Elements, if rows are atoms.
    keys : set of str
        All keys of the file, for messages.
    columns : mapping of str to tuple of str
        The columns of a table that an array was joined from.
    """

    arrays: Mapping[str, Any]
    structure: IntArray
    atom: IntArray
    symbols: StrArray | None
    keys: frozenset[str]
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.structure)

    def predicted(self, target: str) -> str:
        """Return the key of the members, or else of the uncertainties."""
        suffixes = MEMBERS + (UNCERTAINTIES if target in self.arrays else ())
        for suffix in suffixes:
            if f"{target}{suffix}" in self.arrays:
                return f"{target}{suffix}"
        tried = ", ".join(f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES))
        expected = f"members or uncertainties under one of {tried} (these beside {target})"
        raise InputError("target", repr(target), expected, self.known())

    def numbers(self, key: str) -> Float64Array:
        """Return an array of real numbers with one row per structure or atom."""
        array = self.arrays[key]
        try:
            if np.iscomplexobj(array):
                raise TypeError
            numbers = np.asarray(array, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(key, "text or complex numbers", "real numbers") from None
        if numbers.ndim == 0 or len(numbers) != len(self):
            remedy = "Is it transposed?" if len(self) in numbers.shape else ""
            raise InputError(key, f"shape {numbers.shape}", f"{len(self)} rows", remedy)
        return numbers

    def known(self) -> str:
        """Return a sentence with all keys of the file."""
        return f"The file has: {', '.join(sorted({*self.arrays, *self.keys})) or 'no keys'}."


# Structures.


def with_results(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``info`` and ``arrays``, with the keys that ASE has read into a calculator."""
    info, arrays = dict(atoms.info), dict(atoms.arrays)
    for key, value in getattr(atoms.calc, "results", {}).items():
        (arrays if key in per_atom_properties else info).setdefault(key, value)
    return info, arrays


def _of_frames(
    frames: Sequence[Atoms], target: str, asked: Sequence[str], references: Sequence[str]
) -> _Values:
    """Collect the values of all structures."""
    _move_members(frames, target, references)
    found = [with_results(atoms) for atoms in frames]
    predicted = [f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES)]
    per_atom = any(key in arrays for _, arrays in found for key in predicted)
    n_atoms = [len(atoms) for atoms in frames]
    counts = n_atoms if per_atom else [1] * len(frames)
    collected = {}
    for key in dict.fromkeys([target, *predicted, f"{target}_absent", *asked, *references]):
        rows = [_rows(key, *pair, n, per_atom) for pair, n in zip(found, n_atoms, strict=True)]
        if any(row is not None for row in rows):
            collected[key] = _joined(key, rows, counts)
    symbols = np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None
    keys = {key for pair in found for part in pair for key in part} - {"numbers", "positions"}
    return _Values(
        collected,
        np.repeat(np.arange(len(frames)), counts),
        np.concatenate([np.arange(n) for n in counts]),
        symbols,
        frozenset(keys),
    )


def _move_members(frames: Sequence[Atoms], target: str, references: Sequence[str]) -> None:
    """Move members (N_R, n_atoms, 3) of structures, as MACE's calculator returns them, to atoms.

    They become (n_atoms, N_R, 3). For structures of three atoms, (N_R, 3, 3) are members of tensors
    of structures, unless the target is known to be a property of atoms.
    """
    of_atoms = target in per_atom_properties or any(
        key in atoms.arrays for atoms in frames for key in references
    )
    if not of_atoms and all(len(atoms) == 3 for atoms in frames):
        return
    for key in (f"{target}{suffix}" for suffix in MEMBERS):
        stored = [(atoms, np.asarray(atoms.info[key])) for atoms in frames if key in atoms.info]
        if all(v.ndim == 3 and v.shape[1:] == (len(atoms), 3) for atoms, v in stored):
            for atoms, value in stored:
                del atoms.info[key]
                atoms.arrays[key] = value.transpose(1, 0, 2)


def _rows(
    key: str, info: dict[str, Any], arrays: dict[str, Any], n_atoms: int, per_atom: bool
) -> Any | None:
    """Return the value of a key as rows of one structure: one row, or one per atom."""
    if per_atom and key in arrays:
        return np.asarray(arrays[key])
    if key not in info:
        return None
    value = np.asarray(info[key])
    return np.repeat(value[None], n_atoms, axis=0) if per_atom else value[None]


def _joined(key: str, rows: Sequence[Any | None], counts: Sequence[int]) -> Any:
    """Join the rows of all structures; NaN, or no label, where a structure has none."""
    known = [row for row in rows if row is not None]
    shapes = {row.shape[1:] for row in known}
    if len(shapes) > 1:
        given = f"values of shapes {' and '.join(map(str, sorted(shapes)))}"
        raise InputError(key, given, "one shape in all structures")
    text = any(row.dtype.kind in "US" for row in known)
    missing: Any = "" if text else np.nan
    filled = [
        np.full((n, *known[0].shape[1:]), missing) if row is None else row
        for row, n in zip(rows, counts, strict=True)
    ]
    return np.concatenate([np.asarray(row, dtype=str) if text else row for row in filled])


# Tables.


class Table(Mapping[str, Any]):
    """Columns of a CSV, Parquet or NPZ file by name; they become arrays when they are used.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self.suffix = file.suffix.lower()
        self._arrays: dict[str, Any] = {}
        self._separator = ","
        try:
            if self.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    self._data: Any = {name: archive[name] for name in archive.files}
            elif self.suffix == ".csv":
                self._data = self._read_csv(file)
            else:
                self._data = _pandas().read_parquet(file, dtype_backend="pyarrow")
        except InputError:
            raise
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            # Errors of pandas and pyarrow are ValueErrors or OSErrors.
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise InputError("path", f"'{file}' ({reason})", f"a {file.suffix} file") from None
        if not self.n_rows:
            raise InputError("path", f"'{file}' (no rows)", "a table with at least one row")

    def _read_csv(self, file: Path) -> Any:
        """Return the cells as text, such that they can be written back unchanged."""
        with file.open(encoding="utf-8-sig") as stream:
            header = stream.readline()
        self._separator = max(",;\t|", key=header.count)
        rows = _pandas().read_csv(
            file,
            sep=self._separator,
            header=None,
            dtype=object,
            keep_default_na=False,
            encoding="utf-8-sig",
        )
        if not rows.iloc[0].is_unique:
            raise ValueError("two columns have the same name")
        return rows[1:].reset_index(drop=True).set_axis(rows.iloc[0].tolist(), axis=1)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._data if self.suffix != ".npz" or np.ndim(self._data[name]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        """Return a column as an array, its rows on the first axis."""
        if name not in self._arrays:
            column = self._data[name]
            if self.suffix == ".csv":
                column = _parsed(column.tolist())
            elif self.suffix == ".parquet":
                column = _unpacked(name, column)
            self._arrays[name] = column
        return self._arrays[name]

    @property
    def n_rows(self) -> int:
        """Number of rows, of the longest array of an NPZ file."""
        return max((len(self._data[name]) for name in self), default=0)

    def write(
        self,
        path: str | Path,
        changes: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        force: bool = False,
    ) -> None:
        """Write the table in the same format, completely or not at all, with some columns changed.

        Parameters
        ----------
        path : path
        changes : mapping of str to arrays
            Columns that replace those of the same names in their places, or that come last.
        without : collection of str
            Columns that are left out.
        force : bool
            Whether an existing file may be replaced.
        """
        kept = {n: self._data[n] for n in self._data if n not in without or n in changes}
        with atomic_output(path, force=force) as stream:
            if self.suffix == ".npz":
                write_npz(stream, kept | dict(changes))
            elif self.suffix == ".csv":
                frame = _pandas().DataFrame(kept | _flat(changes))
                frame.to_csv(stream, sep=self._separator, index=False, lineterminator="\n")
            else:
                new = {name: _packed(array, kept.get(name)) for name, array in changes.items()}
                _pandas().DataFrame(kept | new, index=self._data.index).to_parquet(stream)


#: Contents of a file: structures, or the columns of a table.
Source = list[Atoms] | Table


def is_table(path: str | Path) -> bool:
    """Return whether a file is a table by its name."""
    return Path(path).suffix.lower() in (".csv", ".parquet", ".npz")


def read_source(path: str | Path) -> Source:
    """Read a whole file: extended XYZ or any other format of ASE, CSV, Parquet or NPZ."""
    return Table(path) if is_table(path) else read_frames(path)


def _pandas() -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError:
        remedy = "Or install pandas and pyarrow: pip install 'qualms[tables]'."
        raise InputError(
            "path", "a .csv or .parquet file", "an .xyz or .npz file", remedy
        ) from None
    return pandas


def _parsed(cells: list[str]) -> Any:
    """Return cells as integers or floats, empty ones as NaN; or else as text."""
    words = {"true": "1", "false": "0"} | dict.fromkeys(("", "na", "n/a", "none", "null"), "nan")
    numbers = [words.get(cell.strip().lower(), cell) for cell in cells]
    for kind in (int, float):
        try:
            return np.array([kind(cell) for cell in numbers])
        except ValueError:
            continue
    return np.array(cells, dtype=str)


def _unpacked(name: str, column: Any) -> Any:
    """Return a column of Arrow: lists become further axes, NaN where one is missing."""
    import pyarrow

    if not pyarrow.types.is_nested(column.dtype.pyarrow_dtype):
        if column.dtype.kind in "biuf":
            return (
                column.to_numpy(dtype=float, na_value=np.nan)
                if column.hasnans
                else (column.to_numpy())
            )
        return column.astype(str).to_numpy(dtype=str)
    known = column.notna().to_numpy(dtype=bool)
    try:
        lists = np.array(pyarrow.array(column[known]).to_pylist(), dtype=float)
    except (TypeError, ValueError):
        raise InputError(
            name, "lists of text or of different lengths", "lists of numbers"
        ) from None
    filled = np.full((len(column), *lists.shape[1:]), np.nan)
    filled[known] = lists
    return filled


def _packed(array: Any, before: Any | None) -> Any:
    """Return an array as a column of Arrow; further axes become lists of the type before."""
    import pyarrow

    values = np.asarray(array)
    packed = pyarrow.array(values.tolist())
    if before is not None and values.ndim > 1:
        packed = packed.cast(before.dtype.pyarrow_dtype)
    return _pandas().arrays.ArrowExtensionArray(packed)


def _flat(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Give every column of a matrix a name of its own, with a number at the end."""
    flat: dict[str, Any] = {}
    for name, array in columns.items():
        values = np.asarray(array)
        parts = values.reshape(len(values), -1)
        many = {f"{name}_{i}": parts[:, i] for i in range(parts.shape[1])}
        flat |= {name: values} if values.ndim == 1 else many
    return flat


def _of_table(
    table: Table, target: str, asked: Sequence[str], references: Sequence[str]
) -> _Values:
    """Join columns that belong together, and find the structure and the atom of each row."""
    arrays, joined = _joined_columns(table, target, [*asked, *references])
    predicted = [f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES)]
    key = next((key for key in (*references, target, *predicted) if key in arrays), None)
    n = table.n_rows if key is None else len(arrays[key])

    def column(name: str) -> Any:
        found = np.asarray(table.get(name, ()))
        return found if found.shape == (n,) else None

    structure = next((c for c in map(column, ("structure", "index")) if c is not None), None)
    structure = np.arange(n) if structure is None else structure
    if structure.dtype.kind not in "iu":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom, symbols = column("atom"), column("symbol")
    if atom is None or atom.dtype.kind not in "iu":
        atom = np.zeros(n, dtype=int)
    symbols = None if symbols is None else symbols.astype(str)
    return _Values(arrays, structure, atom, symbols, frozenset(table), joined)


def _joined_columns(
    table: Table, target: str, asked: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return arrays by key, and the columns that they were joined from."""
    members = [f"{target}{suffix}" for suffix in MEMBERS]
    uncertainties = [f"{target}{suffix}" for suffix in UNCERTAINTIES]
    stems = [*members, *uncertainties, f"{target}_absent", *asked]
    arrays = {key: table[key] for key in (target, *stems) if key in table}
    joined = {}

    def join(stem: str, key: str, forms: Sequence[str]) -> None:
        found = join_columns(table, stem, forms)
        if found is not None and key not in arrays:
            joined[key], arrays[key] = found

    for stem in stems:
        join(stem, stem, ("i", "c", "ic", "ci"))
    join(target, target, ("c",))
    # Numbered columns of the target are members, or components of the prediction if there are
    # members, or uncertainties, and as many columns of uncertainties or reference values.
    numbered = join_columns(table, target, ("i", "ic", "ci"))
    if numbered is not None:
        values = numbered[1]
        alike = {key for key in joined if np.shape(arrays[key]) == values.shape}
        alike -= {*members, f"{target}_absent"}
        has_members = any(key in arrays for key in members)
        if values.ndim == 2 and alike and (has_members or alike.intersection(uncertainties)):
            join(target, target, ("i",))
        elif not has_members:
            join(target, members[0], ("i", "ic", "ci"))
    return arrays, joined


def join_columns(
    columns: Mapping[str, Any], stem: str, forms: Sequence[str]
) -> tuple[tuple[str, ...], Any] | None:
    """Join columns with one stem into one array.

    Parameters
    ----------
    columns : mapping of str to arrays
    stem : str
    forms : sequence of {"i", "c", "ic", "ci"}
        Numbers (``e_0`` or ``e0``), components (``f_x``), or both (``f_0_x``, ``f_x_0``): the first
        form that exists is used.

    Returns
    -------
    names : tuple of str
        The columns, in the order of the flattened array.
    values : (n, …) array
        (n, N_R), (n, k), (n, N_R, k) or (n, k, N_R).
    """
    number, axis = r"(\d+)", r"([xyz]{1,2})"
    patterns = {"i": f"_?{number}", "c": f"_{axis}", "ic": f"_{number}_{axis}",
                "ci": f"_{axis}_{number}"}  # fmt: skip
    for form in forms:
        matches = [(re.fullmatch(re.escape(stem) + patterns[form], name), name) for name in columns]
        found = {m.groups(): name for m, name in matches if m and np.ndim(columns[name]) == 1}
        axes = []
        for kind, labels in zip(form, zip(*found, strict=True), strict=False):
            if kind == "i":
                axes.append(sorted(set(labels), key=int))
            else:
                axes += [list(known) for known in _COMPONENTS if set(labels) == set(known)]
        if found and len(axes) == len(form) and len(found) == np.prod([*map(len, axes)]):
            names = tuple(found[key] for key in itertools.product(*axes))
            if len({len(columns[name]) for name in names}) > 1:
                raise InputError(stem, f"{names[0]}, … of different lengths", "one length")
            values = np.column_stack([columns[name] for name in names])
            return names, values.reshape(-1, *map(len, axes))
    return None


def _order_of(names: Sequence[str]) -> Order | None:
    """Return the order of members that names of columns imply, if they do."""
    if all(re.search(r"\d_[xyz]{1,2}$", name) for name in names):
        return "member"
    return "component" if all(re.search(r"_[xyz]{1,2}_\d+$", name) for name in names) else None


def component_endings(k: int) -> tuple[str, ...]:
    """Return the endings of the names of k components, such as ``_x``; empty if there are none."""
    return next((tuple(f"_{c}" for c in names) for names in _COMPONENTS if len(names) == k), ())
