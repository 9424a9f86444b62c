"""Writing predictions to files, batch by batch: structures may be more than fit into memory.

The suffix of the file decides: extended XYZ, which keeps the structures and all their properties,
CSV, Parquet, or NPZ. ``docs/file-formats.md`` lists the keys of each format.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress
from numpy.typing import NDArray

from qualms.arrays import IntArray
from qualms.errors import InputError
from qualms.io.files import AnyPath, atomic_output
from qualms.io.xyz import (
    IN_COLUMNS,
    IN_COMMENT,
    LIMITS,
    set_aside_references,
    was_predicted,
    xyz_text,
)
from qualms.prediction import Prediction

Kind = Literal["structure", "atomic"]
Arrays = Mapping[str, NDArray[Any]]

#: Key of the flag of structures that are out of distribution.
EXTRAPOLATES = "qualms_extrapolates"
#: Key of the reasons, a text; empty, and absent from XYZ, if a structure is no extrapolation.
REASON = "qualms_extrapolation_reason"

#: Rows of a table that are written to Parquet together.
ROW_GROUP = 10_000


class _Batch(NamedTuple):
    """Predictions of some structures.

    `numbers` are those of the structures in tables. `rows` are the predicted atoms of each
    structure, for properties of atoms. `ends` are where the rows of each structure begin and end in
    `values`: prediction, standard deviation and members.
    """

    numbers: IntArray
    frames: Sequence[Atoms]
    rows: list[IntArray] | None
    ends: list[int]
    values: Arrays
    extra: Arrays
    arrays: Arrays
    tensors: Arrays


class PredictionWriter:
    """Writes predictions to a file; made by `open_writer`."""

    def __init__(
        self, stream: IO[Any], target: str, *, kind: Kind, ensemble: bool, interval: float | None
    ) -> None:
        self._stream = stream
        self._target = target
        self._kind = kind
        self._ensemble = ensemble
        self._interval = interval
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self.n_structures = 0

    def write(
        self,
        frames: Sequence[Atoms],
        prediction: Prediction,
        *,
        numbers: Sequence[int] | None = None,
        rows: Sequence[IntArray] | None = None,
        extra: Mapping[str, Sequence[Any]] | None = None,
        arrays: Arrays | None = None,
        tensors: Arrays | None = None,
    ) -> None:
        """Write the next batch; all batches must have the same columns.

        Parameters
        ----------
        frames : sequence of Atoms
            Structures; they are not changed.
        prediction : Prediction
            For structures, of shape (n_frames,). For atoms, those of all frames, concatenated.
        numbers : sequence of int, optional
            The index of each frame in tables; by default they are counted from 0.
        rows : sequence of arrays of int, optional
            For atoms: the indices of those that are predicted, for each frame. All by default.
        extra : mapping of sequences, optional
            More columns, of one number, boolean or string per frame.
        arrays : mapping of arrays, optional
            Further predictions for atoms, such as forces: one row per atom of all frames.
        tensors : mapping of arrays, optional
            Further predictions for structures, such as stresses: one row per frame.
        """
        atoms, counts = None, [1] * len(frames)
        if self._kind == "atomic":
            chosen = [np.arange(len(frame)) for frame in frames] if rows is None else rows
            atoms = [np.asarray(indices, dtype=np.intp) for indices in chosen]
            counts = [len(indices) for indices in atoms]
        if prediction.shape != (sum(counts),) or len(counts) != len(frames):
            expected = f"({sum(counts)},), one per {self._kind} row of {len(frames)} frames"
            raise InputError(
                f"`prediction` has the shape {prediction.shape}, not {expected}.",
                parameter="prediction",
            )
        values = {self._target: prediction.mean, f"{self._target}_uncertainty": prediction.std}
        if self._interval is not None:
            limits = prediction.interval(self._interval, "conformal")
            names = [f"{self._target}{ending}" for ending in LIMITS]
            values |= dict(zip(names, limits, strict=True))
        if self._ensemble:
            values[f"{self._target}_ensemble"] = prediction.members
        columns = {name: np.asarray(column) for name, column in (extra or {}).items()}
        ends = np.cumsum([0, *counts]).tolist()
        parts = (columns, arrays or {}, tensors or {})
        lengths = (len(frames), sum(map(len, frames)), len(frames))
        for parameter, part, n in zip(("extra", "arrays", "tensors"), parts, lengths, strict=True):
            for name, array in part.items():
                if len(array) != n:
                    raise InputError(
                        f"{name!r} of `{parameter}` has {len(array)} rows, not {n}.",
                        parameter=parameter,
                    )
        first = self.n_structures
        index = range(first, first + len(frames)) if numbers is None else numbers
        self._write(_Batch(np.array(index), frames, atoms, ends, values, *parts))
        self.n_structures += len(frames)

    def _write(self, batch: _Batch) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Write the parts that depend on all batches."""

    def _collect(self, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._arrays.setdefault(name, []).append(array)

    def _collected(self) -> Arrays:
        """Return the arrays of all batches since the last time, each as one."""
        arrays = {name: np.concatenate(parts) for name, parts in self._arrays.items()}
        self._arrays = {}
        return arrays


@contextlib.contextmanager
def open_writer(
    path: AnyPath,
    target: str,
    *,
    kind: Kind,
    ensemble: bool,
    interval: float | None = None,
    force: bool = False,
) -> Iterator[PredictionWriter]:
    """Open a file for predictions. It appears under its name when the block ends without an error.

    Parameters
    ----------
    path : path
        Ends in ``.xyz``, ``.extxyz`` (both also with ``.gz``), ``.csv``, ``.parquet`` or
        ``.npz``.
    target : str
        Key of the predictions in the file.
    kind : {"structure", "atomic"}
        Whether predictions are for structures or for atoms.
    ensemble : bool
        Whether to write the predictions of all members, too.
    interval : float, optional
        Probability of conformal intervals to write, too.
    force : bool
        Whether an existing file may be replaced.
    """
    name = Path(path).name.lower()
    compressed = name.endswith(".gz")
    writer_type = _WRITERS.get(Path(name.removesuffix(".gz")).suffix)
    if writer_type is None or (compressed and writer_type is not _XYZWriter):
        suffixes = ", ".join([*_WRITERS, ".xyz.gz"])
        raise InputError(
            f"Predictions cannot be written to {os.fspath(path)!r}: its name must end in one of "
            f"{suffixes}.",
            parameter="path",
        )
    check_name("target", target)
    with contextlib.ExitStack() as stack:
        stream: IO[Any] = stack.enter_context(atomic_output(path, force=force))
        if compressed:
            # No name and no date inside, so that the same predictions give the same file.
            file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=stream, mtime=0)
            stream = cast(IO[Any], stack.enter_context(file))
        writer = writer_type(stream, target, kind=kind, ensemble=ensemble, interval=interval)
        yield writer
        writer._finish()


class _XYZWriter(PredictionWriter):
    """Extended XYZ: the structures with all their properties, and the predictions."""

    def _write(self, batch: _Batch) -> None:
        atoms_before = 0
        for i, frame in enumerate(batch.frames):
            atoms = frame.copy()  # type: ignore[no-untyped-call]
            predicted = atoms.info if batch.rows is None else atoms.arrays
            set_aside_references(atoms, frame, predicted, self._target)
            for name, values in batch.values.items():
                if batch.rows is None:
                    predicted[name] = values[i] if values.ndim == 2 else float(values[i])
                else:
                    predicted[name] = np.full((len(atoms), *values.shape[1:]), np.nan)
                    part = slice(batch.ends[i], batch.ends[i + 1])
                    predicted[name][batch.rows[i]] = values[part]
            extra = {name: column[i].item() for name, column in batch.extra.items()}
            # ASE writes an empty text as JSON. That of an earlier prediction must not remain.
            atoms.info = {k: v for k, v in (atoms.info | extra).items() if extra.get(k) != ""}
            part = slice(atoms_before, atoms_before := atoms_before + len(frame))
            arrays = {name: rows[part] for name, rows in batch.arrays.items()}
            _add_further(atoms.arrays, arrays, frame, frame.arrays)
            tensors = {name: rows[i] for name, rows in batch.tensors.items()}
            if "stress" in tensors:  # ASE reads nine numbers, and no others
                tensors["stress"] = voigt_6_to_full_3x3_stress(tensors["stress"])  # type: ignore[no-untyped-call]
            _add_further(atoms.info, tensors, frame, frame.info)
            self._stream.write(xyz_text(atoms).encode())


def _add_further(
    store: dict[str, Any], values: Arrays, frame: Atoms, before: dict[str, Any]
) -> None:
    """Add further predictions; earlier predictions of the same names are no reference values."""
    for name, value in values.items():
        store.pop(f"{name}_ensemble", None)
        if f"REF_{name}" not in before and was_predicted(frame, before, name):
            store.pop(f"REF_{name}", None)
        if not np.isnan(value).all():  # there is no stress without a volume
            store[name] = value


def _table(batch: _Batch) -> Arrays:
    """Return the columns of a table: a row per structure, or per predicted atom."""
    if batch.arrays or batch.tensors:
        raise InputError(
            "Tables have no columns for forces, stresses and values of atoms: write them to a file "
            "that ends in .xyz or .npz.",
            parameter="path",
        )
    counts = np.diff(batch.ends)
    columns: dict[str, NDArray[Any]] = {"index": np.repeat(batch.numbers, counts)}
    if batch.rows is None:
        formulas = [frame.get_chemical_formula() for frame in batch.frames]  # type: ignore[no-untyped-call]
        columns |= {"formula": np.array(formulas), "n_atoms": np.array([*map(len, batch.frames)])}
    else:
        pairs = list(zip(batch.frames, batch.rows, strict=True))
        symbols = [frame.symbols[i] for frame, rows in pairs for i in rows]
        columns |= {"atom": np.concatenate(batch.rows), "symbol": np.array(symbols, dtype=str)}
    for name, values in batch.values.items():
        if values.ndim == 1:
            columns[name] = values
        else:
            columns |= {f"{name}_{i}": member for i, member in enumerate(values.T)}
    return columns | {name: np.repeat(column, counts) for name, column in batch.extra.items()}


class _CSVWriter(PredictionWriter):
    """A table as text."""

    def _write(self, batch: _Batch) -> None:
        write_csv(self._stream, _table(batch), header=self._stream.tell() == 0)


class _ParquetWriter(PredictionWriter):
    """Writes predictions as a Parquet table, in groups of at least 10,000 rows."""

    _writer: Any = None
    _n_rows = 0

    def __init__(self, stream: IO[Any], target: str, **options: Any) -> None:
        super().__init__(stream, target, **options)
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise InputError(
                "Parquet files need pyarrow, which is not installed: pip install 'qualms[tables]'.",
                parameter="path",
            ) from error

    def _write(self, batch: _Batch) -> None:
        columns = _table(batch)
        self._collect(columns)
        self._n_rows += len(columns["index"])
        if self._n_rows >= ROW_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(self._collected())
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._stream, table.schema)
        self._writer.write_table(table)
        self._n_rows = 0

    def _finish(self) -> None:
        if self._arrays or self._writer is None:
            self._write_group()
        self._writer.close()


class _NPZWriter(PredictionWriter):
    """Arrays by name. The predictions, not the structures, stay in memory until the end."""

    def _write(self, batch: _Batch) -> None:
        arrays = {**batch.values, **batch.extra, **batch.arrays, **batch.tensors}
        arrays["n_atoms"] = np.array([len(frame) for frame in batch.frames], dtype=np.int64)
        if batch.rows is not None:
            structures = self.n_structures + np.arange(len(batch.frames))
            arrays["structure"] = np.repeat(structures, np.diff(batch.ends))
            arrays["atom"] = np.concatenate([*batch.rows, np.empty(0, dtype=np.intp)])
        self._collect(arrays)

    def _finish(self) -> None:
        write_npz(self._stream, self._collected())


_WRITERS: dict[str, type[PredictionWriter]] = {
    ".xyz": _XYZWriter,
    ".extxyz": _XYZWriter,
    ".csv": _CSVWriter,
    ".parquet": _ParquetWriter,
    ".npz": _NPZWriter,
}


def write_csv(
    stream: IO[Any], columns: Mapping[str, Any], *, separator: str = ",", header: bool = True
) -> None:
    """Write a table as text, with the shortest exact representation of numbers.

    Parameters
    ----------
    stream : binary file
    columns : mapping of str to arrays or lists
        Of one length.
    separator : str
        Between cells.
    header : bool
        Whether to write the names of the columns.
    """
    text = codecs.getwriter("utf-8")(stream)
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    if header:
        writer.writerow(columns)
    cells = (c.tolist() if isinstance(c, np.ndarray) else c for c in columns.values())
    writer.writerows(zip(*cells, strict=True))


def write_npz(stream: IO[Any], arrays: Mapping[str, Any]) -> None:
    """Write arrays as `numpy.savez` does, whose own parameters restrict the names of arrays."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def check_name(parameter: str, name: str) -> None:
    """Check that every format can hold a key."""
    in_tables = ("index", "formula", "n_atoms", "structure", "atom", "symbol")
    # ASE expects tensors, or text, and cannot read a file with numbers there.
    of_ase = ("stress", "virial", "uid")
    why = (
        "" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) else "it may have A-Z, a-z, 0-9, _, -"
    )
    if name in (*IN_COMMENT, *IN_COLUMNS, *in_tables, *of_ase):
        why = "file formats reserve it"
    if why:
        raise InputError(
            f"{name!r} cannot be the key of a property in files: {why}.", parameter=parameter
        )
