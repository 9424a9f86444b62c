"""What both selections ask of their arguments."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from qualms.core.checks import check_integer
from qualms.core.typing import FloatArray
from qualms.errors import InputError

#: Rows that are looked at, or multiplied, at once.
ROWS = 2048


class RowSource(Protocol):
    """A table of float32 or float64 that need not be in memory: rows are read when they are needed.

    Unlike an array it has no ``__array__``.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> FloatArray:
        """Return one row, a slice, or rows by their indices, as an array."""
        ...


def as_float(X: FloatArray, name: str) -> FloatArray:
    """`X` as it is if float32 or float64, otherwise as float64."""
    array = np.asarray(X)
    if array.dtype not in (np.float32, np.float64):
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(name, f"an array of {array.dtype}", "real numbers") from error
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(name, f"an array of shape {array.shape}", "a table with rows and columns")
    return array


def check_finite(X: FloatArray, name: str) -> None:
    """Refuse NaN and infinite values, naming the first row that has one."""
    for begin in range(0, len(X), ROWS):
        finite = np.isfinite(X[begin : begin + ROWS]).all(axis=1)
        if not finite.all():
            row = begin + int(finite.argmin())
            raise InputError(name, f"a non-finite value in row {row}", "finite numbers")


def check_kernel(K: FloatArray) -> FloatArray:
    """Return K as float if it can be a kernel; symmetry is checked on three rows, as K is large."""
    K = as_float(K, "K")
    if K.shape[0] != K.shape[1]:
        raise InputError("K", f"an array of shape {K.shape}", "a square matrix")
    check_finite(K, "K")
    diagonal = np.diagonal(K)
    if (diagonal < 0).any():
        raise InputError("K", f"a diagonal down to {diagonal.min():.3g}", "a diagonal ≥ 0")
    scale = np.sqrt(float(np.finfo(K.dtype).eps)) * float(diagonal.max())
    for row in (0, len(K) // 2, len(K) - 1):
        asymmetry = float(np.abs(K[row] - K[:, row]).max())
        if asymmetry > scale:
            raise InputError("K", f"an asymmetry of {asymmetry:.3g}", "a symmetric matrix")
    return K


def check_counts(name: str, size: int, n: int, start: int) -> None:
    """Refuse more picks than rows, and a start that is not a row."""
    if check_integer("n", n, 1) > size:
        raise InputError("n", n, f"from 1 to the {size} rows of {name}")
    if check_integer("start", start, 0) >= size:
        raise InputError("start", start, f"from 0 to {size - 1}, a row of {name}")
