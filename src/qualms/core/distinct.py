"""Distinct points of a training set, in an order that does not depend on how the rows came.

Two rows with the same features are one point: a model that saw one has seen the other, so they must
be in or out of a sub-sample together, or internal calibration would be fooled. Taking the points in
the order of a hash of their contents makes everything that follows, random draws included,
independent of the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from qualms.core.typing import FloatArray, IntArray


@dataclass(frozen=True)
class DistinctRows:
    """Which rows are the same.

    Attributes
    ----------
    first : (n_distinct,) array of int
        A row of each distinct point.
    inverse : (n,) array of int
        The distinct point of each row.
    """

    first: IntArray
    inverse: IntArray


def distinct_rows(X: FloatArray | IntArray) -> DistinctRows:
    """Find the distinct rows of X (n, d)."""
    hashes = hash_rows(X)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return DistinctRows(first.astype(np.intp), inverse.reshape(-1).astype(np.intp))


def joined_groups(inverse: IntArray, codes: IntArray) -> IntArray:
    """Return a group for each point, such that neither a group nor a point is divided: (n_points,).

    Groups that share a point are joined: they are not independent of each other.

    Parameters
    ----------
    inverse : (n,) array of int
        Point of each row.
    codes : (n,) array of int
        Group of each row, 0 … G−1.
    """
    n_groups, n_points = int(codes.max()) + 1, int(inverse.max()) + 1
    links = coo_array(
        (np.ones(len(codes)), (codes, n_groups + inverse)), shape=(n_groups + n_points,) * 2
    )
    return connected_components(links, directed=False)[1][n_groups:].astype(np.intp)


def hash_rows(X: FloatArray | IntArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return a 64-bit hash of each row: equal rows, equal hashes; different rows, different ones.

    A random linear form of the bit patterns modulo 2⁶⁴, so two given rows collide with a
    probability of about 2⁻⁶⁴ times the number of factors two in their difference. The words are
    mixed first, because the low bits of short numbers are all zero.
    """
    coefficients = np.random.default_rng(20190214).integers(
        1, 2**63, size=X.shape[1], dtype=np.uint64
    )
    coefficients = coefficients * np.uint64(2) + np.uint64(1)
    hashes = np.zeros(len(X), dtype=np.uint64)
    # Integers and floats of the same value are the same, unless the integers are too long for that.
    long = X.dtype.kind in "iu" and X.size > 0 and int(np.max(np.abs(X))) > 2**53
    for start in range(0, len(X), 2048):
        # Float64 holds every float32 exactly; adding zero turns −0.0 into 0.0.
        block = X[start : start + 2048].astype(np.int64 if long else np.float64, order="C") + 0
        bits = block.view(np.uint64)
        bits = bits ^ (bits >> np.uint64(32))
        hashes[start : start + 2048] = np.sum(bits * coefficients, axis=1, dtype=np.uint64)
    return hashes
