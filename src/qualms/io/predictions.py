"""Writing predictions to files, batch by batch: structures may be more than fit into memory.

The suffix of the file decides: extended XYZ, which keeps the structures and all their properties,
CSV, or NPZ. ``docs/file-formats.md`` lists the keys of each format.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress
from numpy.typing import NDArray

from qualms.arrays import Float64Array, IntArray
from qualms.errors import InputError
from qualms.io.files import AnyPath, atomic_output
from qualms.io.xyz import IN_COLUMNS, IN_COMMENT, set_aside_references, was_predicted, xyz_text
from qualms.prediction import Prediction

Kind = Literal["structure", "atomic"]
AnyArray = NDArray[Any]

#: Names with another meaning in tables.
_IN_TABLES = ("index", "formula", "n_atoms", "structure", "atom", "symbol")
#: ASE expects tensors, or text, under these names, and cannot read a file with numbers there.
_TENSORS = ("stress", "virial", "uid")


@dataclass(frozen=True)
class _Batch:
    """Predictions of some structures, checked.

    Attributes
    ----------
    start : int
        Number of structures written before.
    frames : sequence of Atoms
    rows : list of arrays of int, or None
        For properties of atoms, the predicted atoms of each structure.
    values : dict of arrays
        Prediction (n,), its standard deviation (n,) and perhaps members (n, N_R), by name.
    extra, tensors : dict of arrays
        One value, or one row, per structure, by name.
    arrays : dict of arrays
        One row per atom of all structures, by name.
    """

    start: int
    frames: Sequence[Atoms]
    rows: list[IntArray] | None
    values: dict[str, Float64Array]
    extra: dict[str, AnyArray]
    arrays: dict[str, AnyArray]
    tensors: dict[str, AnyArray]

    @property
    def parts(self) -> list[slice]:
        """The rows of `values` that belong to each structure."""
        counts = [1] * len(self.frames) if self.rows is None else [len(r) for r in self.rows]
        return _slices(counts)

    def extra_of(self, i: int) -> dict[str, Any]:
        """Return the extra values of one structure, as Python objects."""
        return {name: column[i].item() for name, column in self.extra.items()}


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these lengths."""
    return [slice(*bounds) for bounds in pairwise(np.cumsum([0, *counts]).tolist())]


class PredictionWriter(ABC):
    """Writes predictions to a file; made by `open_writer`."""

    def __init__(self, stream: BinaryIO, target: str, *, kind: Kind, ensemble: bool) -> None:
        self._stream = stream
        self._target = target
        self._kind = kind
        self._ensemble = ensemble
        self._columns: tuple[str, ...] | None = None
        self.n_structures = 0

    def write(
        self,
        frames: Sequence[Atoms],
        prediction: Prediction,
        *,
        rows: Sequence[IntArray] | None = None,
        extra: Mapping[str, Sequence[Any]] | None = None,
        arrays: Mapping[str, AnyArray] | None = None,
        tensors: Mapping[str, AnyArray] | None = None,
    ) -> None:
        """Write the next batch.

        Parameters
        ----------
        frames : sequence of Atoms
            Structures; they are not changed.
        prediction : Prediction
            For structures, of shape (n_frames,). For atoms, those of all frames, concatenated.
        rows : sequence of arrays of int, optional
            For atoms: the indices of those that are predicted, for each frame. All by default.
        extra : mapping of sequences, optional
            More columns, of one number, boolean or string per frame.
        arrays : mapping of arrays, optional
            Further predictions for atoms, such as forces: one row per atom of all frames.
        tensors : mapping of arrays, optional
            Further predictions for structures, such as stresses: one row per frame.
        """
        atoms = self._atoms(frames, rows)
        n = len(frames) if atoms is None else sum(len(indices) for indices in atoms)
        if prediction.shape != (n,):
            expected = f"({n},), one prediction per {'structure' if atoms is None else 'atom'}"
            raise InputError("prediction", f"shape {prediction.shape}", expected)
        values = {self._target: prediction.mean, f"{self._target}_uncertainty": prediction.std}
        if self._ensemble:
            values[f"{self._target}_ensemble"] = prediction.members
        columns = {name: np.asarray(column) for name, column in (extra or {}).items()}
        for name, column in columns.items():
            check_name("extra", name, values)
            if column.shape != (len(frames),) or column.dtype.kind not in "biufU":
                given = f"{name}: {column.dtype} of shape {column.shape}"
                raise InputError("extra", given, f"{len(frames)} numbers, booleans or strings")
        for parameter, given_rows, n_rows in (
            ("arrays", arrays or {}, sum(map(len, frames))),
            ("tensors", tensors or {}, len(frames)),
        ):
            for name, array in given_rows.items():
                if len(array) != n_rows:
                    raise InputError(parameter, f"{name}: {len(array)} rows", f"{n_rows} rows")
        of_atoms, of_frames = dict(arrays or {}), dict(tensors or {})
        self._check_columns([*_flat_names(values), *columns, *of_atoms, *of_frames])
        self._write(_Batch(self.n_structures, frames, atoms, values, columns, of_atoms, of_frames))
        self.n_structures += len(frames)

    def _atoms(
        self, frames: Sequence[Atoms], rows: Sequence[IntArray] | None
    ) -> list[IntArray] | None:
        """Return the predicted atoms of each frame, or None if structures are predicted."""
        if self._kind == "structure":
            if rows is not None:
                raise InputError("rows", "indices of atoms", 'None, or a writer of kind="atomic"')
            return None
        if rows is None:
            return [np.arange(len(frame)) for frame in frames]
        if len(rows) != len(frames):
            raise InputError("rows", f"{len(rows)} arrays", f"one for each of {len(frames)} frames")
        return [_atom_indices(indices, len(f)) for indices, f in zip(rows, frames, strict=True)]

    def _check_columns(self, columns: list[str]) -> None:
        """Check that all batches have the same columns."""
        if self._columns is None:
            self._columns = tuple(columns)
        if self._columns != tuple(columns):
            raise InputError("columns", columns, f"those of the first batch, {[*self._columns]}")

    @abstractmethod
    def _write(self, batch: _Batch) -> None:
        """Write a batch that has been checked."""

    def _finish(self) -> None:  # noqa: B027
        """Write the parts that depend on all batches."""


@contextlib.contextmanager
def open_writer(
    path: AnyPath, target: str, *, kind: Kind, ensemble: bool, force: bool = False
) -> Iterator[PredictionWriter]:
    """Open a file for predictions. It appears under its name when the block ends without an error.

    Parameters
    ----------
    path : path
        Ends in ``.xyz``, ``.extxyz`` (both also with ``.gz``), ``.csv`` or ``.npz``.
    target : str
        Key of the predictions in the file.
    kind : {"structure", "atomic"}
        Whether predictions are for structures or for atoms.
    ensemble : bool
        Whether to write the predictions of all members, too.
    force : bool
        Whether an existing file may be replaced.

    Yields
    ------
    PredictionWriter
    """
    name = Path(path).name.lower()
    compressed = name.endswith(".gz")
    writer_type = _WRITERS.get(Path(name.removesuffix(".gz")).suffix)
    if writer_type is None or (compressed and writer_type is not _XYZWriter):
        suffixes = ", ".join([*_WRITERS, ".xyz.gz"])
        raise InputError("path", path, f"a name that ends in one of {suffixes}")
    if kind not in ("structure", "atomic"):
        raise InputError("kind", repr(kind), "'structure' or 'atomic'")
    check_name("target", target)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(atomic_output(path, force=force))
        if compressed:
            # No name and no date inside, so that the same predictions give the same file.
            file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=stream, mtime=0)
            stream = cast(BinaryIO, stack.enter_context(file))
        writer = writer_type(stream, target, kind=kind, ensemble=ensemble)
        yield writer
        writer._finish()


class _XYZWriter(PredictionWriter):
    """Extended XYZ: the structures with all their properties, and the predictions."""

    def _write(self, batch: _Batch) -> None:
        of_atoms = _slices([len(frame) for frame in batch.frames])
        for i, (frame, part) in enumerate(zip(batch.frames, batch.parts, strict=True)):
            atoms = frame.copy()  # type: ignore[no-untyped-call]
            predicted = atoms.info if batch.rows is None else atoms.arrays
            set_aside_references(atoms, frame, predicted, self._target)
            for name, values in batch.values.items():
                if batch.rows is None:
                    predicted[name] = values[i] if values.ndim == 2 else float(values[i])
                else:
                    predicted[name] = np.full((len(atoms), *values.shape[1:]), np.nan)
                    predicted[name][batch.rows[i]] = values[part]
            atoms.info.update(batch.extra_of(i))
            arrays = {name: rows[of_atoms[i]] for name, rows in batch.arrays.items()}
            _add_further(atoms.arrays, arrays, frame, frame.arrays)
            tensors = {name: rows[i] for name, rows in batch.tensors.items()}
            for name in tensors:  # members of an earlier prediction
                atoms.info.pop(f"{name}_ensemble", None)
            known = {name: row for name, row in tensors.items() if not np.isnan(row).all()}
            if "stress" in known:  # ASE reads nine numbers, and no others
                known["stress"] = voigt_6_to_full_3x3_stress(known["stress"])  # type: ignore[no-untyped-call]
            _add_further(atoms.info, known, frame, frame.info)
            self._stream.write(xyz_text(atoms).encode())


def _add_further(
    store: dict[str, Any], values: dict[str, AnyArray], frame: Atoms, before: dict[str, Any]
) -> None:
    """Add further predictions; earlier predictions of the same names are no reference values."""
    for name in values:
        store.pop(f"{name}_ensemble", None)
        if f"REF_{name}" not in before and was_predicted(frame, before, name):
            store.pop(f"REF_{name}", None)
    store.update(values)


class _CSVWriter(PredictionWriter):
    """A row per structure, or per predicted atom."""

    def __init__(self, stream: BinaryIO, target: str, *, kind: Kind, ensemble: bool) -> None:
        super().__init__(stream, target, kind=kind, ensemble=ensemble)
        self._csv = csv.writer(codecs.getwriter("utf-8")(stream), lineterminator="\n")
        self._has_header = False

    def _write(self, batch: _Batch) -> None:
        if batch.arrays or batch.tensors:
            raise InputError("path", "a table in CSV", "a name that ends in .xyz or .npz")
        self._write_header()
        numbers = np.column_stack([*batch.values.values()]).tolist()
        for i, (frame, part) in enumerate(zip(batch.frames, batch.parts, strict=True)):
            if batch.rows is None:
                about = [(frame.get_chemical_formula(), len(frame))]  # type: ignore[no-untyped-call]
            else:
                symbols = [*frame.symbols]
                about = [(atom, symbols[atom]) for atom in batch.rows[i].tolist()]
            extra = batch.extra_of(i).values()
            rows = zip(about, numbers[part], strict=True)
            self._csv.writerows([batch.start + i, *a, *row, *extra] for a, row in rows)

    def _finish(self) -> None:
        self._write_header()

    def _write_header(self) -> None:
        if not self._has_header:
            about = "formula n_atoms" if self._kind == "structure" else "atom symbol"
            columns = self._columns or (self._target, f"{self._target}_uncertainty")
            self._csv.writerow(["index", *about.split(), *columns])
            self._has_header = True


class _NPZWriter(PredictionWriter):
    """Arrays by name. The predictions, not the structures, stay in memory until the end."""

    def __init__(self, stream: BinaryIO, target: str, *, kind: Kind, ensemble: bool) -> None:
        super().__init__(stream, target, kind=kind, ensemble=ensemble)
        self._arrays: dict[str, list[AnyArray]] = {}

    def _write(self, batch: _Batch) -> None:
        arrays: dict[str, AnyArray] = batch.values | batch.extra | batch.arrays | batch.tensors
        arrays["n_atoms"] = np.array([len(frame) for frame in batch.frames], dtype=np.int64)
        if batch.rows is not None:
            counts = [len(indices) for indices in batch.rows]
            arrays["structure"] = batch.start + np.repeat(np.arange(len(counts)), counts)
            arrays["atom"] = np.concatenate([*batch.rows, np.empty(0, dtype=np.intp)])
        for name, array in arrays.items():
            self._arrays.setdefault(name, []).append(array)

    def _finish(self) -> None:
        write_npz(self._stream, {n: np.concatenate(parts) for n, parts in self._arrays.items()})


_WRITERS: dict[str, type[PredictionWriter]] = {
    ".xyz": _XYZWriter,
    ".extxyz": _XYZWriter,
    ".csv": _CSVWriter,
    ".npz": _NPZWriter,
}


def write_npz(stream: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write arrays as `numpy.savez` does, whose own parameters restrict the names of arrays."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def check_name(parameter: str, name: str, taken: Mapping[str, object] | None = None) -> None:
    """Check that every format can hold a key, and that it is not taken."""
    reserved = (*IN_COMMENT, *IN_COLUMNS, *_IN_TABLES, *_TENSORS)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) or name in reserved:
        expected = "letters, digits, _ and -, and no name that file formats reserve"
        raise InputError(parameter, repr(name), expected)
    if taken and name in taken:
        raise InputError(parameter, repr(name), f"another name than {', '.join(taken)}")


def _flat_names(values: Mapping[str, Float64Array]) -> list[str]:
    """Return a name for every column of numbers: the members are numbered."""
    names = []
    for name, array in values.items():
        names += [name] if array.ndim == 1 else [f"{name}_{i}" for i in range(array.shape[1])]
    return names


def _atom_indices(indices: IntArray, n_atoms: int) -> IntArray:
    """Return indices of atoms, each of which occurs once."""
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, dtype=np.intp)
    valid = array.ndim == 1 and array.dtype.kind in "iu"
    if not valid or array.min() < 0 or array.max() >= n_atoms or len({*array}) < len(array):
        raise InputError("rows", array, f"different indices of {n_atoms} atoms")
    return array.astype(np.intp)
