"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, CSV, Parquet and NPZ."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.atomistic.structures import read_frames
from qualms.calibration.base import rounding_of
from qualms.errors import InputError, counted
from qualms.gp.ensemble import MIN_ABSENT, ensemble_mean_std, out_of_bag_prediction
from qualms.io.files import atomic_output
from qualms.io.predictions import write_npz

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
        Mean, standard deviation (ddof = 1) and number of the members, of the out-of-bag members if
        there are flags; NaN where a prediction is not finite or too few are out-of-bag. Without
        members, the stored values, and 2.
    members, absent : (n, N_R) arrays, optional
        Predictions, and whether the point is out-of-bag for the member.
    y : (n,) array
        Reference values; NaN where there is none.
    structure, atom, component : (n,) arrays of int
        Origin of each point; `atom` is zero for properties of structures, `component` may be None.
    per_atom : bool
        Whether the values belong to atoms.
    labels : (n,) array of str, optional
        Group of each point.
    shape, member_shape, order : tuples of int, str or None
        Shapes of the stored value and members of one structure or atom; order of the members.
    columns : mapping of str to tuple of str
        The columns of a table that the values of a key were joined from.
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
    members: Float64Array | None
    absent: BoolArray | None
    y: Float64Array
    structure: IntArray
    atom: IntArray
    component: IntArray | None
    per_atom: bool
    labels: StrArray | None
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

    def unusable(self) -> dict[str, BoolArray]:
        """Return, by reason, which points have no mean and standard deviation."""
        few = self.count < (0 if self.absent is None else MIN_ABSENT)
        return {
            f"with fewer than {MIN_ABSENT} out-of-bag members": few,
            "with NaN or infinite predictions": ~few & ~np.isfinite(self.mean + self.std),
        }


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
        together; columns ``{target}_0``, … without others are members of a scalar.
    target : str
        Name of the property: members under ``{target}_ensemble`` or ``{target}_comm``, or a value
        under ``{target}`` with ``{target}_uncertainty``, ``_std``, or ``_var`` for a variance.
    reference : str, optional
        Key of the reference values; ``REF_{target}`` by default.
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
        raise InputError("order", repr(order), "'member' or 'component'")
    source = read_source(source) if isinstance(source, (str, Path)) else source
    reference = reference or f"REF_{target}"
    asked = [reference, *(key for key in (absent, by) if key is not None)]
    if isinstance(source, Table):
        rows = _table_rows(source, target, asked)
    else:
        rows = _frame_rows(source, target, asked)
    key, n = rows.predicted(target), len(rows.structure)
    if reference in rows.arrays:
        y = rows.numbers(reference)
        shape: tuple[int, ...] = y.shape[1:]
    elif n_components is not None:
        y = np.full((n, n_components), np.nan)
        shape = () if n_components == 1 else (n_components,)
    else:
        raise InputError("reference", repr(reference), "a key of the file", rows.known())
    stored_mean = None
    if target in rows.arrays:
        mean = rows.numbers(target)
        stored_mean = _like(target, mean, shape)
        shape = mean.shape[1:] if np.prod(mean.shape[1:]) == np.prod(shape) else shape
    k = int(np.prod(shape))
    names = [name for name in (target + end for end in UNCERTAINTIES) if name in rows.arrays]
    members, flags, member_order = None, None, None
    member_shape: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    if key in names:
        assert stored_mean is not None
        mean, std, count = stored_mean, _like(key, rows.numbers(key), shape), np.full(n * k, 2)
        if np.any(std < 0):
            raise InputError(key, "negative values", "uncertainties ≥ 0")
        std = np.sqrt(std) if key.endswith("_var") else std
    else:
        stored = rows.numbers(key)
        member_shape = stored.shape[1:]
        member_order, assumed = _member_order(rows, target, key, k, order)
        if member_order == "member":
            stored = stored.reshape(n, -1, k).transpose(0, 2, 1)
        members = stored.reshape(n * k, -1)
        flags = _absent(rows, target, absent, k, members.shape[1])
        mean, std, count = _moments(members, flags)
        confirmed = stored_mean is not None and np.allclose(
            stored_mean, members.mean(axis=1), rtol=1e-7, atol=1e-7, equal_nan=True
        )
        if assumed and not confirmed:
            remarks = (
                f"{key} is read member by member (m0x m0y m0z m1x …). If it is stored component "
                "by component (m0x m1x … m0y …), use --order component; --order member confirms "
                "the order.",
            )
    return Ensemble(
        target=target,
        key=key,
        mean=mean,
        std=std,
        count=count,
        members=members,
        absent=flags,
        y=y.reshape(-1),
        structure=np.repeat(rows.structure, k),
        atom=np.repeat(rows.atom, k),
        component=np.tile(np.arange(k), n) if k > 1 else None,
        per_atom=rows.symbols is not None,
        labels=None if by is None else np.repeat(_labels(rows, by), k),
        shape=shape,
        member_shape=member_shape,
        order=member_order,
        columns=rows.columns,
        stored_mean=stored_mean,
        uncertainties=tuple(names),
        remarks=remarks,
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
        raise InputError(key, f"shape {(n, *inner)}", f"{expected}, with N_R ≥ 2")
    if k == 1:
        return None, False
    if f"{target}_0" in rows.columns.get(key, ()):
        raise InputError(target, f"columns {target}_0, …", f"members of vectors in {key}_0, …")
    if len(fits) == 1:
        return fits[0], False
    return "component" if order == "component" else "member", order is None


def _moments(
    members: Float64Array, absent: BoolArray | None
) -> tuple[Float64Array, Float64Array, IntArray]:
    """Return mean, standard deviation and number of the (out-of-bag) members of each point."""
    n, n_members = members.shape
    with np.errstate(invalid="ignore"):
        if absent is None:
            mean, std = ensemble_mean_std(members)
            count = np.full(n, n_members)
        else:
            # Members that were trained on a point need not predict it.
            members = np.where(absent, members, 0.0)
            found = out_of_bag_prediction(members, absent)
            mean, std, count = np.full(n, np.nan), np.full(n, np.nan), absent.sum(axis=1)
            mean[found.used], std[found.used] = found.mean, found.std
        # Members that differ by rounding are identical.
        return mean, np.where(std <= rounding_of(members), 0.0, std), count


def _like(key: str, values: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """Return all values in one array, if they have as many components as this shape."""
    if key == "stress" and values.shape[1:] == (6,) and np.prod(shape) == 9:
        # ASE turns the nine numbers of a stress into six.
        values = voigt_6_to_full_3x3_stress(values)  # type: ignore[no-untyped-call]
    if np.prod(values.shape[1:]) != np.prod(shape):
        raise InputError(key, f"shape {values.shape[1:]}", f"the shape of the others, {shape}")
    return values.reshape(-1)


def _absent(rows: _Rows, target: str, key: str | None, k: int, n_members: int) -> BoolArray | None:
    """Return out-of-bag flags of all points (n·k, N_R)."""
    name = key or f"{target}_absent"
    if name not in rows.arrays:
        if key is None:
            return None
        raise InputError("absent", repr(key), "a key of the file", rows.known())
    flags = rows.numbers(name).reshape(len(rows.structure), -1)
    if flags.shape[1] != n_members or not np.all((flags == 0) | (flags == 1)):
        given = f"{name} of shape {flags.shape}"
        raise InputError("absent", given, f"0 or 1 (false or true) for each of {n_members} members")
    return np.repeat(flags.astype(bool), k, axis=0)


def _labels(rows: _Rows, by: str) -> StrArray:
    """Return the group of each row."""
    symbols = rows.symbols if by == "element" else None
    labels = rows.arrays.get(by) if symbols is None else symbols
    if labels is None or labels.shape != rows.structure.shape:
        expected = "element, for properties of atoms, or a key of one label per structure or atom"
        raise InputError("by", repr(by), expected, rows.known())
    return np.asarray(labels).astype(str)


@dataclass(frozen=True)
class _Rows:
    """Arrays by key, with a row for each structure or atom.

    `symbols` are elements, if rows are atoms; `keys` are all keys of the file; `columns` are the
    columns of a table that an array was joined from.
    """

    arrays: Mapping[str, Any]
    structure: IntArray
    atom: IntArray
    symbols: StrArray | None
    keys: Collection[str]
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def predicted(self, target: str) -> str:
        """Return the key of the members, or else of the uncertainties."""
        keys = predicted_keys(target)
        usable = keys if target in self.arrays else keys[: len(MEMBERS)]
        found = next((key for key in usable if key in self.arrays), None)
        if found is None:
            expected = f"one of {', '.join(keys)} (uncertainties beside {target})"
            raise InputError("target", repr(target), expected, self.known())
        return found

    def numbers(self, key: str) -> Float64Array:
        """Return an array of real numbers with one row per structure or atom."""
        n = len(self.structure)
        try:
            numbers = np.asarray(self.arrays[key]).astype(np.float64, casting="same_kind")
        except (TypeError, ValueError):
            raise InputError(key, "text or complex numbers", "real numbers") from None
        if len(numbers) != n:
            remedy = "Is it transposed?" if n in numbers.shape else ""
            raise InputError(key, f"shape {numbers.shape}", f"{n} rows", remedy)
        return numbers

    def known(self) -> str:
        """Return a sentence with all keys of the file."""
        return f"The file has: {', '.join(sorted(self.keys)) or 'no keys'}."


def predicted_keys(target: str) -> list[str]:
    """Return the keys of members and uncertainties."""
    return [f"{target}{suffix}" for suffix in (*MEMBERS, *UNCERTAINTIES)]


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


def _frame_rows(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> _Rows:
    """Collect the values of all structures; NaN, or no label, where a structure has none."""
    found = [with_results(atoms) for atoms in frames]
    per_atom = any(key in arrays for _, arrays in found for key in predicted_keys(target))
    counts = [len(atoms) if per_atom else 1 for atoms in frames]
    collected = {}
    for key in dict.fromkeys([target, *predicted_keys(target), f"{target}_absent", *asked]):
        parts: list[Any] = []
        for (info, arrays), n in zip(found, counts, strict=True):
            if per_atom and key in arrays:
                parts.append(np.asarray(arrays[key]))
            else:
                parts.append(np.repeat(np.asarray(info[key])[None], n, 0) if key in info else None)
        known = [part for part in parts if part is not None]
        shapes = {part.shape[1:] for part in known}
        if len(shapes) > 1:
            given = f"values of shapes {' and '.join(map(str, sorted(shapes)))}"
            raise InputError(key, given, "one shape in all structures")
        if known:
            missing: Any = "" if any(part.dtype.kind in "US" for part in known) else np.nan
            collected[key] = np.concatenate(
                [
                    np.full((n, *known[0].shape[1:]), missing) if part is None else part
                    for part, n in zip(parts, counts, strict=True)
                ]
            )
    return _Rows(
        collected,
        np.repeat(np.arange(len(frames)), counts),
        np.concatenate([np.arange(n) for n in counts]),
        np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None,
        {key for pair in found for part in pair for key in part} - {"numbers", "positions"},
    )


# Tables.


@dataclass(frozen=True)
class Table:
    """A CSV, Parquet or NPZ file.

    `content` is a data frame, of text for CSV so that it can be written back unchanged, or a dict
    of arrays; `columns` are arrays by name.
    """

    suffix: str
    content: Any
    columns: dict[str, Any]

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
            if self.suffix == ".csv":
                frame.to_csv(stream, index=False, lineterminator="\n")
            else:
                frame.to_parquet(stream)


#: Contents of a file: structures, or the columns of a table.
Source = list[Atoms] | Table


def read_source(path: str | Path) -> Source:
    """Read a whole file: extended XYZ or any other format of ASE, CSV, Parquet or NPZ."""
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in (".csv", ".parquet", ".npz"):
        return read_frames(path)
    try:
        content, columns = _read_npz(file) if suffix == ".npz" else _read_frame(file, suffix)
    except ImportError:
        remedy = "Or install pandas and pyarrow: pip install 'qualms[tables]'."
        raise InputError("path", f"'{file}'", "an .xyz or .npz file", remedy) from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        # Errors of pandas and pyarrow are ValueErrors or OSErrors.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise InputError("path", f"'{file}' ({reason})", f"a {file.suffix} file") from None
    if not any(len(column) for column in columns.values()):
        raise InputError("path", f"'{file}' (no rows)", "a table with at least one row")
    return Table(suffix, content, columns)


def _read_npz(file: Path) -> tuple[Any, dict[str, Any]]:
    with np.load(file, allow_pickle=False) as archive:
        arrays = dict(archive)
    return arrays, {name: array for name, array in arrays.items() if array.ndim}


def _read_frame(file: Path, suffix: str) -> tuple[Any, dict[str, Any]]:
    import pandas

    if suffix == ".csv":
        content = pandas.read_csv(file, dtype=str, keep_default_na=False).fillna("")
        if not isinstance(content.index, pandas.RangeIndex):
            raise ValueError("rows have more cells than the header")
        return content, {name: _parsed(column.tolist()) for name, column in content.items()}
    content, columns = pandas.read_parquet(file, dtype_backend="pyarrow"), {}
    for name, column in content.items():
        if column.dtype.kind not in "biuf":
            columns[name] = column.astype(str).to_numpy(dtype=str)
        else:
            missing = {"dtype": float, "na_value": np.nan} if column.hasnans else {}
            columns[name] = column.to_numpy(**missing)
    return content, columns


def _parsed(cells: list[str]) -> Any:
    """Return cells as integers or floats, empty ones as NaN; or else as text."""
    words = {"true": "1", "false": "0", "": "nan", "na": "nan", "none": "nan", "null": "nan"}
    numbers = [words.get(cell.strip().lower(), cell) for cell in cells]
    for kind in (int, float):
        try:
            return np.array([*map(kind, numbers)])
        except ValueError:
            continue
    return np.array(cells, dtype=str)


def _table_rows(table: Table, target: str, asked: Sequence[str]) -> _Rows:
    """Join columns that belong together, and find the structure and the atom of each row."""
    columns = table.columns
    arrays, joined = {}, {}
    for key in (*asked, target, *predicted_keys(target), f"{target}_absent"):
        if key in columns:
            arrays[key] = columns[key]
        elif names := _numbered(columns, key) or _named(columns, key):
            joined[key], arrays[key] = names, np.column_stack([columns[name] for name in names])
    members = _numbered(columns, target)
    if members and not any(key in arrays for key in predicted_keys(target)):
        if target in joined:
            del joined[target], arrays[target]
        key = f"{target}{MEMBERS[0]}"
        joined[key], arrays[key] = members, np.column_stack([columns[name] for name in members])
    n = len(next(iter(arrays.values()), ()))
    found = {name: c for name, c in columns.items() if c.shape == (n,)}
    structure = found.get("structure", found.get("index", np.arange(n)))
    if structure.dtype.kind not in "iu":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom = found.get("atom", np.zeros(n, dtype=int))
    return _Rows(arrays, structure, atom, found.get("symbol"), columns, joined)


def _numbered(columns: Collection[str], stem: str) -> tuple[str, ...]:
    """Return the numbered columns ``{stem}_0``, ``{stem}_1`` and so on."""
    found = {re.fullmatch(re.escape(stem) + r"_(\d+)", name): name for name in columns}
    matches = sorted((match for match in found if match), key=lambda match: int(match[1]))
    return tuple(found[match] for match in matches)


def _named(columns: Collection[str], stem: str) -> tuple[str, ...]:
    """Return the columns ``{stem}_x``, ``{stem}_y``, …, or those of a tensor."""
    for names in reversed(COMPONENTS.values()):
        found = tuple(f"{stem}_{name}" for name in names)
        if all(name in columns for name in found):
            return found
    return ()
