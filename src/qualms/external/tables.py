"""Tables in files: CSV, Parquet and NPZ. What is not replaced is written again as it was."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qualms.errors import InputError
from qualms.external.parquet import append_array, arrow_array, read_parquet, write_parquet
from qualms.storage.files import atomic_output

#: Cells of CSV that are no numbers, and yet are.
_WORDS = {"true": 1.0, "false": 0.0} | dict.fromkeys(("", "na", "n/a", "none", "null"), np.nan)
#: What other programs put between cells.
_SEPARATORS = (";", "\t", "|")


class Table(Mapping[str, Any], ABC):
    """The columns of a file by name. Only those that somebody asks for become arrays."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)
        self._arrays: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        """Return a column as an array, its rows on the first axis."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._arrays:
            self._arrays[name] = self._array(name)
        return self._arrays[name]

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of rows, of the longest column if they differ."""

    @abstractmethod
    def _array(self, name: str) -> Any:
        """Read a column."""

    @abstractmethod
    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        """Write the table with these columns replaced or added, and without those."""

    def write(
        self,
        path: str | Path,
        changes: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        force: bool = False,
    ) -> None:
        """Write the table, completely or not at all, with some columns changed.

        Parameters
        ----------
        path : path
            Of the same format.
        changes : mapping of str to arrays
            Columns that replace those of their names, in their places, or that come last.
        without : collection of str
            Columns that are left out.
        force : bool
            Whether an existing file may be replaced.
        """
        with atomic_output(path, force=force) as stream:
            self._write(stream, changes, without)


class _CSVTable(Table):
    def __init__(self, rows: list[list[str]]) -> None:
        header, *body = rows or [[]]
        super().__init__(header)
        self._body = [row for row in body if row]

    @property
    def n_rows(self) -> int:
        return len(self._body)

    def _cells(self, name: str) -> list[str]:
        i = self._names.index(name)
        return [row[i] for row in self._body]

    def _array(self, name: str) -> Any:
        return _parsed(self._cells(name))

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        new = _flat(changes)
        kept = {name: self._cells(name) for name in self if name not in {*without, *new}}
        places = [name for name in self if name in kept or name in new]
        columns = {name: kept.get(name, new.get(name)) for name in [*places, *new]}
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        stream.write(text.getvalue().encode())


class _NPZTable(Table):
    def __init__(self, stored: Mapping[str, Any]) -> None:
        super().__init__([name for name, array in stored.items() if np.ndim(array)])
        self._stored = dict(stored)

    @property
    def n_rows(self) -> int:
        return max((len(self._stored[name]) for name in self), default=0)

    def _array(self, name: str) -> Any:
        return self._stored[name]

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        arrays = {n: a for n, a in self._stored.items() if n not in without} | dict(changes)
        # As `numpy.savez`, which has parameters of its own that a column may share its name with.
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


class _ParquetTable(Table):
    def __init__(self, table: Any) -> None:
        super().__init__(table.column_names)
        self._table = table

    @property
    def n_rows(self) -> int:
        return int(self._table.num_rows)

    def _array(self, name: str) -> Any:
        return arrow_array(name, self._table.column(name))

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        table = self._table.drop_columns([n for n in self if n in without and n not in changes])
        for name, array in changes.items():
            table = append_array(table, name, np.asarray(array))
        write_parquet(table, stream)


def is_table(path: str | Path) -> bool:
    """Whether a file is a table by its name."""
    return Path(path).suffix.lower() in _READERS


def read_columns(path: str | Path) -> Table:
    """Return the columns of a table by name; those of an NPZ file may differ in length.

    Columns of a CSV file are numbers if all of their cells are (an empty one is NaN), else text.
    Nothing is ever unpickled.
    """
    file = Path(path)
    try:
        table = _READERS[file.suffix.lower()](file)
    except OSError as error:
        raise InputError(
            "path", f"'{file}' ({error.strerror or error})", "a file to read"
        ) from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError("path", f"'{file}' ({reason})", f"a {file.suffix} file") from None
    if not table.n_rows:
        raise InputError("path", f"'{file}' (no rows)", "a table with at least one row")
    return table


def write_columns(path: str | Path, columns: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a new table, completely or not at all; the suffix says how."""
    suffix = Path(path).suffix.lower()
    table: Table = _CSVTable([])
    if suffix != ".csv":
        table = _NPZTable({}) if suffix == ".npz" else _ParquetTable(read_parquet(None))
    table.write(path, columns, force=force)


def _flat(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Give every column of a matrix a name of its own, with a number at the end."""
    flat: dict[str, list[Any]] = {}
    for name, array in columns.items():
        values = np.asarray(array)
        if values.ndim == 1:
            flat[name] = values.tolist()
        else:
            parts = values.reshape(len(values), -1)
            flat |= {f"{name}_{i}": parts[:, i].tolist() for i in range(parts.shape[1])}
    return flat


def _parsed(cells: list[str]) -> Any:
    """Return cells as whole numbers, as numbers, or as the text that they are."""
    if all(re.fullmatch(r"\s*[+-]?\d{1,18}\s*", cell) for cell in cells):
        return np.array([int(cell) for cell in cells])
    try:
        numbers = [
            _WORDS[c] if (c := cell.strip().lower()) in _WORDS else float(c) for cell in cells
        ]
    except ValueError:
        return np.array(cells, dtype=str)
    return np.array(numbers)


def _read_csv(file: Path) -> Table:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.reader(stream))
    header, *body = rows or [[]]
    ragged = next((i for i, row in enumerate(body) if row and len(row) != len(header)), None)
    if ragged is not None:
        raise ValueError(f"row {ragged + 1} has {len(body[ragged])} cells, not {len(header)}")
    if len(set(header)) < len(header):
        raise ValueError("two columns have the same name")
    other = next((sign for sign in _SEPARATORS if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        raise ValueError(f"cells seem to be separated by {other!r} rather than by commas")
    return _CSVTable(rows)


def _read_npz(file: Path) -> Table:
    with np.load(file, allow_pickle=False) as archive:
        return _NPZTable({name: archive[name] for name in archive.files})


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".parquet": lambda file: _ParquetTable(read_parquet(file)),
    ".npz": _read_npz,
}
