"""Array types, checks of array arguments, and distinct rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from qualms.errors import InputError, counted

#: Any floating-point array: features and kernels may be float32 to save time and memory.
FloatArray = NDArray[np.floating[Any]]
#: Everything that is solved, scored or calibrated is float64.
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]
#: Labels.
StrArray = NDArray[np.str_]


#: Rows that are processed at once, so that temporary arrays stay small.
BLOCK = 2048


def row_blocks(n: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices of n rows, `size` at a time, `BLOCK` by default."""
    step = size or BLOCK
    return (slice(start, start + step) for start in range(0, n, step))


def whole_blocks(edges: IntArray, size: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive groups of rows, with about `size` rows each, or `BLOCK`.

    Rows of group g, such as the environments of a structure, are ``edges[g]:edges[g + 1]``.
    """
    first, n = 0, len(edges) - 1
    while first < n:
        last = int(np.searchsorted(edges, edges[first] + (size or BLOCK), side="right")) - 1
        last = min(max(last, first + 1), n)
        yield first, last
        first = last


def check_integer(parameter: str, value: object, lowest: int, what: str = "") -> int:
    """Return an integer; floats and booleans are rejected.

    Parameters
    ----------
    parameter : str
        Its name, for the error message.
    value : object
    lowest : int
        Smallest value.
    what : str
        Description of the right values, if "an integer ≥ …" is not enough.
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or int(value) < lowest:  # type: ignore[call-overload]
        right = what or f"an integer ≥ {lowest}"
        raise InputError(f"`{parameter}` is {value!r}; use {right}.", parameter=parameter)
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_number(parameter: str, value: object, lowest: float, *, strict: bool = False) -> float:
    """Return a finite number.

    Parameters
    ----------
    parameter : str
        Its name, for the error message.
    value : object
    lowest : float
        Smallest value.
    strict : bool
        Whether the number must be larger than that.
    """
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not np.isfinite(value) or value < lowest or (strict and value == lowest):  # type: ignore[call-overload, operator]
        bound = f" {'>' if strict else '≥'} {lowest:g}" if np.isfinite(lowest) else ""
        message = f"`{parameter}` is {value!r}; use a finite number{bound}."
        raise InputError(message, parameter=parameter)
    return float(value)  # type: ignore[arg-type]


def as_targets(y: FloatArray, n: int) -> Float64Array:
    """Return y (n,) or (n, T) as finite float64 of shape (n, T)."""
    Y = check_points("y", y)
    if Y.ndim not in (1, 2) or len(Y) != n:
        raise InputError(
            f"`y` has the shape {Y.shape}; for {n} points it is ({n},) or ({n}, n_outputs).",
            parameter="y",
        )
    return Y[:, None] if Y.ndim == 1 else Y


def check_sample_weight(sample_weight: FloatArray | None, n: int) -> Float64Array:
    """Return the weights (n,) as float64, ones if not given; none may be zero or negative."""
    if sample_weight is None:
        return np.ones(n)
    w = check_points("sample_weight", sample_weight, (n,))
    if np.any(w <= 0):
        raise InputError(
            f"`sample_weight` goes down to {w.min():.3g}, but weights must be positive. Leave out "
            "the points that shall not count.",
            parameter="sample_weight",
        )
    return w


def reject_masked(parameter: str, values: Any) -> None:
    """Reject masked numbers: NumPy and scikit-learn would use what is below the mask."""
    if np.ma.is_masked(values):
        n = int(np.sum(np.ma.getmaskarray(values)))
        raise InputError(
            f"`{parameter}` has {counted(n, 'masked value')}. Drop those points.",
            parameter=parameter,
        )


def check_points(
    parameter: str, values: ArrayLike, shape: tuple[int, ...] | None = None
) -> Float64Array:
    """Return real, finite, non-empty values in float64.

    Parameters
    ----------
    parameter : str
        Their name, for the error message.
    values : array
    shape : tuple of int, optional
        Expected shape.
    """
    reject_masked(parameter, values)
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError
        array = array.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise InputError(
            f"`{parameter}`, of type {type(values).__name__}, is not an array of real numbers.",
            parameter=parameter,
        ) from None
    if shape is not None and array.shape != shape:
        raise InputError(
            f"`{parameter}` has the shape {array.shape} instead of {shape}, one value per point.",
            parameter=parameter,
        )
    if array.size == 0:
        raise InputError(
            f"`{parameter}` has the shape {array.shape}; it needs at least one point.",
            parameter=parameter,
        )
    n_bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if n_bad:
        raise InputError(
            f"`{parameter}` is NaN or infinite at {n_bad} of {counted(array.size, 'point')}. Drop "
            "those points.",
            parameter=parameter,
        )
    return array


def check_std(
    values: ArrayLike,
    shape: tuple[int, ...] | None = None,
    *,
    allow_zero: bool = False,
    parameter: str = "std",
) -> Float64Array:
    """Return finite standard deviations in float64.

    Parameters
    ----------
    values : array
    shape : tuple of int, optional
        Expected shape.
    allow_zero : bool
        Whether zero is accepted, where σ → 0 has a limit.
    parameter : str
        Their name, for the error message.
    """
    std = check_points(parameter, values, shape)
    n_bad = int(np.count_nonzero(std < 0.0 if allow_zero else std <= 0.0))
    if n_bad:
        raise InputError(
            f"`{parameter}` is {'negative' if allow_zero else 'zero or negative'} at {n_bad} of "
            f"{counted(std.size, 'point')}. Drop those points, or check why all members agree on "
            "them.",
            parameter=parameter,
        )
    return std


def check_dof(dof: ArrayLike, shape: tuple[int, ...], above: float = 0.0) -> Float64Array:
    """Return degrees of freedom in float64.

    Parameters
    ----------
    dof : float or array
        One number, or one per point.
    shape : tuple of int
        That of the points.
    above : float
        They must be larger; 2 for a variance.
    """
    nu = check_points("dof", dof, None if np.ndim(dof) == 0 else shape)
    if np.any(nu <= above):
        raise InputError(
            f"The degrees of freedom `dof` go down to {float(np.min(nu)):g}; they must be more "
            f"than {above:g}.",
            parameter="dof",
        )
    return nu


def check_members(members: ArrayLike, shape: tuple[int, ...]) -> Float64Array:
    """Return the predictions of members, given as ``shape`` + (n_members,), as (n, n_members)."""
    array = check_points("members", members)
    if array.shape[:-1] != shape or array.ndim == 0:
        raise InputError(
            f"`members` has the shape {array.shape}; it needs the shape {shape} of the points and "
            "a last axis for the members.",
            parameter="members",
        )
    return array.reshape(-1, array.shape[-1])


# Distinct points of a training set, in a pseudo-random order that does not depend on that of rows.
@dataclass(frozen=True)
class DistinctRows:
    """Equal rows.

    `first` (n_distinct,) is a row of each distinct point, `inverse` (n,) the point of each row.
    """

    first: IntArray
    inverse: IntArray


def distinct_rows(X: FloatArray | IntArray) -> DistinctRows:
    """Find the distinct rows of X (n, d)."""
    hashes = hash_rows(X)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return DistinctRows(first.astype(np.intp), inverse.reshape(-1).astype(np.intp))


def joined_groups(inverse: IntArray, codes: IntArray) -> IntArray:
    """Return a group for each point, such that neither groups nor points are split: (n_points,).

    Groups that share a point are joined, because they are not independent. `inverse` (n,) is the
    point of each row, `codes` (n,) its group, 0 … G−1.
    """
    n_groups, n_points = int(codes.max()) + 1, int(inverse.max()) + 1
    links = coo_array(
        (np.ones(len(codes)), (codes, n_groups + inverse)), shape=(n_groups + n_points,) * 2
    )
    return connected_components(links, directed=False)[1][n_groups:].astype(np.intp)


def hash_rows(X: FloatArray | IntArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return a 64-bit hash of each row.

    A random linear form of the bit patterns modulo 2⁶⁴: two different rows collide with a
    probability of about 2⁻⁶⁴ times the number of factors two in their difference. Words are mixed
    first, because the low bits of short numbers are zero. Faster than sorting rows of thousands of
    columns (`numpy.unique`), and the order of hashes is a fixed shuffle of the points.
    """
    coefficients = np.random.default_rng(20190214).integers(
        1, 2**63, size=X.shape[1], dtype=np.uint64
    )
    coefficients = coefficients * np.uint64(2) + np.uint64(1)
    hashes = np.zeros(len(X), dtype=np.uint64)
    # Integers and floats of the same value are the same, unless the integers are too long for that.
    long = X.dtype.kind in "iu" and X.size > 0 and int(np.max(np.abs(X))) > 2**53
    for rows in row_blocks(len(X)):
        # Float64 holds every float32 exactly; adding zero turns −0.0 into 0.0.
        block = X[rows].astype(np.int64 if long else np.float64, order="C") + 0
        bits = block.view(np.uint64)
        bits = bits ^ (bits >> np.uint64(32))
        hashes[rows] = np.sum(bits * coefficients, axis=1, dtype=np.uint64)
    return hashes
