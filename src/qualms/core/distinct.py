"""Distinct points of a training set, in an order that does not depend on how the rows came.

Two rows with the same features are one point: a model that saw one has seen the other, so they must
be in or out of a sub-sample together, or internal calibration would be fooled. Taking the points in
the order of a hash of their contents makes everything that follows, random draws included,
independent of the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


def distinct_rows(X: FloatArray, labels: IntArray | None = None) -> DistinctRows:
    """Find the distinct rows of X (n, d); rows with different labels (n,) count as different."""
    hashes = hash_rows(X)
    if labels is not None:
        hashes = hashes + np.asarray(labels, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return DistinctRows(first.astype(np.intp), inverse.reshape(-1).astype(np.intp))


def hash_rows(X: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
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
    for start in range(0, len(X), 2048):
        # Float64 holds every float32 exactly; adding zero turns −0.0 into 0.0.
        block = np.ascontiguousarray(X[start : start + 2048], dtype=np.float64) + 0.0
        bits = block.view(np.uint64)
        bits = bits ^ (bits >> np.uint64(32))
        hashes[start : start + 2048] = np.sum(bits * coefficients, axis=1, dtype=np.uint64)
    return hashes
