"""Columns of Parquet files as arrays, and back. pyarrow is imported only where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qualms.errors import InputError


def read_parquet(file: Path | None) -> Any:
    """Return a table of pyarrow; one without columns if there is no file."""
    arrow, parquet = _pyarrow()
    if file is None:
        return arrow.table({})
    try:
        return parquet.read_table(file)
    except arrow.lib.ArrowException as error:
        raise ValueError(str(error)) from None


def write_parquet(table: Any, stream: BinaryIO) -> None:
    """Write a table of pyarrow."""
    _pyarrow()[1].write_table(table, stream)


def arrow_array(name: str, column: Any) -> Any:
    """Return a column as an array: lists of numbers on further axes, NaN where there is no list.

    Parameters
    ----------
    name : str
        Of the column, for messages.
    column : pyarrow.ChunkedArray
    """
    arrow, _ = _pyarrow()
    array = column.combine_chunks()
    if isinstance(array, arrow.ChunkedArray):  # of no chunks
        return np.empty(0)
    if arrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not _is_list(array.type):
        return array.to_numpy(zero_copy_only=False)
    known = array.is_valid().to_numpy(zero_copy_only=False)
    lists = _lists(name, array.drop_null())
    filled = np.full((len(array), *lists.shape[1:]), np.nan)
    filled[known] = lists
    return filled


def _lists(name: str, array: Any) -> Any:
    """Return lists of lists of … numbers, none of them missing, as one array."""
    import pyarrow.compute

    shape = [len(array)]
    while _is_list(array.type):
        sizes = pyarrow.compute.list_value_length(array).to_numpy(zero_copy_only=False)
        other = np.flatnonzero(sizes != sizes[:1])
        if len(other) or not np.all(np.isfinite(sizes)):
            given = f"{sizes[0]:g} values in one row and {sizes[other[0]]:g} in another"
            raise InputError(name, given, "the same number in all rows")
        shape.append(int(sizes[0]) if len(sizes) else 0)
        array = array.flatten()
    numbers = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "biuf":
        raise InputError(name, "lists of text", "lists of numbers")
    return numbers.astype(np.float64).reshape(shape)


def append_array(table: Any, name: str, array: Any) -> Any:
    """Return the table with a column in the place of that of its name, or as its last.

    Further axes become lists, of the kind that the column had before.
    """
    arrow, _ = _pyarrow()
    old = table.schema.field(name).type if name in table.column_names else None
    values = arrow.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        n, size = int(np.prod(array.shape[:axis])), array.shape[axis]
        if old is not None and arrow.types.is_fixed_size_list(old):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        else:
            offsets = np.arange(0, (n + 1) * size, size, dtype=np.int32)[: n + 1]
            values = arrow.ListArray.from_arrays(arrow.array(offsets), values)
    if not table.num_columns:
        return arrow.table({name: values})
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _is_list(kind: Any) -> bool:
    types = _pyarrow()[0].types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


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
