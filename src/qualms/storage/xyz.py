"""Structures as extended XYZ, all numbers exact."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.io.extxyz import output_column_format
from numpy.typing import NDArray

AnyArray = NDArray[Any]

#: Names that mean something else, in the comment line or among the columns.
IN_COMMENT = ("Lattice", "Properties", "pbc")
IN_COLUMNS = ("numbers", "positions", "symbols", "species", "pos", "Z", "move_mask")
#: How columns of an XYZ file are written, by kind of array. Text of a float is its shortest exact
#: representation, where the eight decimals of ASE would turn an error bar of 1e-9 into zero.
_COLUMN_FORMATS = {"f": "%16s", "i": "%8d", "b": "%.1s", "U": "%-2s"}


def xyz_text(atoms: Atoms) -> str:
    """Return a structure in extended XYZ, all numbers exact: ASE writes eight decimals."""
    fixed = [c.index for c in atoms.constraints if isinstance(c, FixAtoms)]
    arrays = {"symbols": np.array([*atoms.symbols], dtype=str), "positions": atoms.positions}
    if fixed:
        arrays["move_mask"] = ~np.isin(np.arange(len(atoms)), np.concatenate(fixed))
    for name, array in atoms.arrays.items():
        if name not in IN_COLUMNS and array.size:
            arrays[name] = _xyz_column(array)
    info = {str(key): _xyz_value(value) for key, value in atoms.info.items()}
    atoms.info = {key: value for key, value in info.items() if key not in IN_COMMENT}
    comment, *_ = output_column_format(atoms, [*arrays], arrays)  # type: ignore[no-untyped-call]
    columns = [(c, a.dtype.kind) for a in arrays.values() for c in np.atleast_2d(a.T)]
    line = " ".join(_COLUMN_FORMATS[kind] for _, kind in columns) + "\n"
    rows = zip(*(column.tolist() for column, _ in columns), strict=True)
    return "".join([f"{len(atoms)}\n{comment}\n", *(line % row for row in rows)])


def _xyz_column(array: AnyArray) -> AnyArray:
    """Return an array of atoms as booleans, integers, floats or words, with at most two axes."""
    if array.ndim > 2:
        array = array.reshape(len(array), -1)
    if array.dtype.kind == "u":
        return array.astype(np.int64)
    if array.dtype.kind in "bif":
        return array
    # A blank would start another column.
    words = [re.sub(r"\s+", "_", str(value)) or "_" for value in array.ravel()]
    return np.array(words, dtype=str).reshape(array.shape)


def _xyz_value(value: Any) -> Any:
    """Return a value such that ASE reads it, and the rest of the line, as it was.

    It would not after empty strings, nor after line ends and backslashes in strings or in JSON.
    """
    awkward = isinstance(value, str) and (not value or re.search(r"[^\S ]|\\", value))
    if awkward or isinstance(value, (list, tuple, dict)):
        with contextlib.suppress(TypeError):
            return "_JSON " + json.dumps(value).replace("\\", "\\\\")
    return value
