"""Features of all environments of a training set: kept in memory, or on disk.

Files are read with plain reads, never mapped: mapped pages would count as memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from qualms.core.typing import FloatArray, IntArray

#: Environments whose features are read, and multiplied, at once.
BLOCK = 4096


def offsets_of(sizes: Sequence[int] | IntArray) -> IntArray:
    """Return where each of consecutive parts begins, and the last one ends: (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


class KeptFeatures:
    """Features (n, d) in memory, filled in order; a `RowSource`."""

    def __init__(self, n: int, d: int) -> None:
        self._rows = np.empty((n, d), dtype=np.float32)
        self._filled = 0
        self.shape = (n, d)
        self.dtype = self._rows.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> FloatArray:
        taken: FloatArray = self._rows[rows]
        return taken

    def append(self, block: FloatArray) -> None:
        """Add rows after those there are."""
        self._rows[self._filled : self._filled + len(block)] = block
        self._filled += len(block)


class SpilledFeatures:
    """Features in a file: rows of float32, one after the other, and nothing else; a `RowSource`."""

    def __init__(self, path: Path, n: int, d: int) -> None:
        self.path = path
        self.shape = (n, d)
        self.dtype = np.dtype(np.float32)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._end = 0

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def _row_bytes(self) -> int:
        return 4 * self.shape[1]

    def append(self, block: FloatArray) -> None:
        """Add rows after those there are."""
        if len(block) == 0:
            return  # nothing cannot be viewed as bytes
        view = np.ascontiguousarray(block, dtype=np.float32).data.cast("B")
        while view:
            written = os.pwrite(self._descriptor, view, self._end)
            view, self._end = view[written:], self._end + written

    def flush(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._descriptor)

    def __getitem__(self, rows: Any) -> FloatArray:
        if isinstance(rows, (int, np.integer)):
            row: FloatArray = self._read(int(rows), 1)[0]
            return row
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._read(start, max(stop - start, 0))
            rows = np.arange(start, stop, step)
        return self._gather(np.asarray(rows, dtype=np.intp))

    def _read(self, start: int, n: int) -> FloatArray:
        block = np.empty((n, self.shape[1]), dtype=np.float32)
        if n:
            self._fill(block.data.cast("B"), start)
        return block

    def _fill(self, view: memoryview, row: int) -> None:
        position = row * self._row_bytes
        while view:
            read = os.preadv(self._descriptor, [view], position)
            if read == 0:
                raise OSError(f"{self.path} is shorter than it should be")
            view, position = view[read:], position + read

    def _gather(self, rows: IntArray) -> FloatArray:
        """Read scattered rows in the order of the file, runs of neighbours at once."""
        order = np.argsort(rows, kind="stable")
        inorder = rows[order]
        sorted_block = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        breaks = np.flatnonzero(np.diff(inorder) != 1) + 1
        edges = np.concatenate([[0], breaks, [len(rows)]]).tolist()
        for begin, end in pairwise(edges):
            if end > begin:
                self._fill(sorted_block[begin:end].data.cast("B"), int(inorder[begin]))
        block = np.empty_like(sorted_block)
        block[order] = sorted_block
        return block

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def structure_blocks(offsets: IntArray, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive structures with about `size` environments each.

    Parameters
    ----------
    offsets : (N + 1,) array of int
        Environments of structure s are rows ``offsets[s]:offsets[s + 1]``.
    """
    first, n = 0, len(offsets) - 1
    while first < n:
        last = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        last = min(max(last, first + 1), n)
        yield first, last
        first = last
