"""Tables by column: CSV, Parquet and NPZ."""

from __future__ import annotations

import csv
import io
import itertools
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qualms.errors import InputError
from qualms.storage.files import atomic_output

_SUFFIXES = (".csv", ".parquet", ".npz")
#: How components may be called: of vectors, of symmetric tensors (as ASE has them), and of tensors.
_COMPONENTS = (
    ("x", "y", "z"),
    ("xx", "yy", "zz", "yz", "xz", "xy"),
    ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz"),
)


def is_table(path: str | Path) -> bool:
    """Whether a file is a table by its name."""
    return Path(path).suffix.lower() in _SUFFIXES


def read_columns(path: str | Path) -> dict[str, Any]:
    """Return the columns of a table by name; those of an NPZ file may differ in length.

    Columns of a CSV file are numbers if all of their cells are (an empty one is NaN), else text.
    Nothing is ever unpickled.
    """
    file = Path(path)
    reader = {".csv": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}[file.suffix.lower()]
    try:
        columns = reader(file)
    except OSError as error:
        raise InputError(
            "path", f"'{file}' ({error.strerror or error})", "a file to read"
        ) from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError("path", f"'{file}' ({reason})", f"a {file.suffix} file") from None
    arrays = {name: column for name, column in columns.items() if np.ndim(column)}
    if not any(map(len, arrays.values())):
        raise InputError("path", f"'{file}' (no rows)", "a table with at least one row")
    return arrays


def write_columns(path: str | Path, columns: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a table, completely or not at all; the suffix says how."""
    file = Path(path)
    with atomic_output(file, force=force) as stream:
        if file.suffix.lower() == ".npz":
            with zipfile.ZipFile(stream, "w") as archive:
                for name, array in columns.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            return
        flat = _flat(columns)
        if file.suffix.lower() == ".parquet":
            arrow, parquet = _pyarrow()
            parquet.write_table(arrow.table(flat), stream)
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(flat)
        writer.writerows(zip(*(column.tolist() for column in flat.values()), strict=True))
        stream.write(text.getvalue().encode())


def join_columns(columns: Mapping[str, Any], stem: str) -> tuple[tuple[str, ...], Any] | None:
    """Join columns that are called after one stem into one array with a row for each of theirs.

    These are numbered ones, ``e_0`` (or ``e0``), ``e_1``, …; components, ``f_x``, ``f_y``, ``f_z``;
    and components of members, ``f_0_x``, … or ``f_x_0``, …, which become arrays (n, R, k) or
    (n, k, R).

    Returns
    -------
    names : tuple of str
        The columns, in the order of the flattened array.
    values : (n, …) array
    """
    plain = {name: c for name, c in columns.items() if np.ndim(c) == 1}
    pattern = (
        rf"{re.escape(stem)}(?:_?(\d+)|_([xyz]{{1,2}})|_(\d+)_([xyz]{{1,2}})|_([xyz]{{1,2}})_(\d+))"
    )
    found: dict[tuple[str, ...], str] = {}
    for name in plain:
        match = re.fullmatch(pattern, name)
        if match:
            found[tuple(part for part in match.groups() if part)] = name
    for form in ("i", "c", "ic", "ci"):
        axes = _axes([key for key in found if _form(key) == form], form)
        if axes:
            keys = list(itertools.product(*axes))
            names = tuple(found[key] for key in keys)
            if len({len(plain[name]) for name in names}) > 1:
                raise InputError(stem, f"{names[0]}, … of different lengths", "one length")
            values = np.column_stack([plain[name] for name in names])
            return names, values.reshape(-1, *map(len, axes))
    return None


def order_of(names: Sequence[str]) -> str | None:
    """Return which comes first in columns of members, if their names tell: member or component."""
    if all(re.search(r"\d_[xyz]{1,2}$", name) for name in names):
        return "member"
    return "component" if all(re.search(r"_[xyz]{1,2}_\d+$", name) for name in names) else None


def _form(key: tuple[str, ...]) -> str:
    return "".join("i" if part.isdigit() else "c" for part in key)


def _axes(keys: list[tuple[str, ...]], form: str) -> list[list[str]]:
    """Return the labels of each axis, in order; none if they are not all of a known set."""
    axes = []
    for kind, labels in zip(form, zip(*keys, strict=True), strict=False):
        present = set(labels)
        if kind == "i":
            axes.append(sorted(present, key=int))
        else:
            axes += [list(known) for known in _COMPONENTS if present == set(known)]
    complete = len(axes) == len(form) and len(keys) == np.prod([len(axis) for axis in axes])
    return axes if complete else []


def _flat(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Give every column of a matrix a name of its own, with a number at the end."""
    flat: dict[str, Any] = {}
    for name, array in columns.items():
        values = np.asarray(array)
        if values.ndim == 1:
            flat[name] = values
        else:
            parts = values.reshape(len(values), -1)
            flat |= {f"{name}_{i}": parts[:, i] for i in range(parts.shape[1])}
    return flat


def _read_csv(file: Path) -> dict[str, Any]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.reader(stream))
    if not rows:
        return {}
    header, *body = rows
    ragged = next((i for i, row in enumerate(body) if row and len(row) != len(header)), None)
    if ragged is not None:
        raise ValueError(f"row {ragged + 1} has {len(body[ragged])} cells, not {len(header)}")
    if len(set(header)) < len(header):
        raise ValueError("two columns have the same name")
    body = [row for row in body if row]
    return {name: _parsed([row[i] for row in body]) for i, name in enumerate(header)}


def _parsed(cells: list[str]) -> Any:
    words = {"true": 1.0, "false": 0.0, "": np.nan}
    try:
        numbers = [words[c] if (c := cell.strip().lower()) in words else float(c) for cell in cells]
    except ValueError:
        return np.array(cells, dtype=str)
    return np.array(numbers)


def _read_npz(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _read_parquet(file: Path) -> dict[str, Any]:
    arrow, parquet = _pyarrow()
    try:
        table = parquet.read_table(file)
    except arrow.lib.ArrowException as error:
        raise ValueError(str(error)) from None
    columns = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if arrow.types.is_list(column.type) or arrow.types.is_fixed_size_list(column.type):
            columns[name] = np.array(column.to_pylist(), dtype=np.float64)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "path",
            "a .parquet file",
            ".csv or .npz",
            "Or install pyarrow: pip install qualms[parquet]",
        ) from None
    return pyarrow, pyarrow.parquet
