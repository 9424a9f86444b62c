"""Kernel rows of structures, or of atoms, in a stream.

A property of a structure is an average over its environments, and so is its kernel with a
representative environment. An extensive property is the number of atoms times an average, so that
extensive and intensive properties share one model of averages, with noise per atom. A property of
an atom has the kernel of its environment.

Kernel blocks are (environments of a batch) × (representatives) and are reduced at once: the largest
array is (labels) × (representatives), never (all environments) × (representatives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from qualms.arrays import Float64Array, FloatArray, IntArray, whole_blocks
from qualms.gp.kernels import Kernel, average_over_structures

#: Elements of a kernel block: 64 MB of float64.
_ELEMENTS = 8_000_000


@dataclass(frozen=True)
class Basis:
    """Representative environments (M, d), and the kernel with them.

    The kernel is scaled by the factor of Eq. (17), Musil et al. 2019, for targets of unit variance.
    Rows are averages over structures, or single environments if `per_atom`.
    """

    kernel: Kernel
    representatives: FloatArray
    scale: float
    per_atom: bool

    def rows(
        self,
        features: FloatArray,
        offsets: IntArray,
        *,
        novelty: Float64Array | None = None,
        sizes: Sequence[int] = (),
        own: Sequence[IntArray] | None = None,
    ) -> Float64Array:
        """Return the kernel rows K_XM of a batch: (n_structures, M), or (n_environments, M).

        Parameters
        ----------
        features : (n_environments, d) array
        offsets : (n_structures + 1,) array of int
        novelty : (n_environments,) or (n_environments, n_sizes) array, optional
            Is filled with the novelty of each environment: one minus the largest normalised kernel
            with a representative, from 0 to 1.
        sizes : sequence of int
            Numbers of leading representatives, increasing, that novelty refers to; all of them,
            unless given.
        own : sequence of arrays of int, optional
            Representatives that come from each structure itself; its novelty leaves them out.
        """
        n = len(features) if self.per_atom else len(offsets) - 1
        M = len(self.representatives)
        rows, edges = np.empty((n, M)), [0, *(sizes or [M])]
        for first, last in whole_blocks(offsets, _ELEMENTS // M):
            begin, end = offsets[first], offsets[last]
            block, local = features[begin:end], offsets[first : last + 1] - begin
            K = self.kernel(block, self.representatives)
            if novelty is not None:
                diagonals = self.kernel.diag(block), self.kernel.diag(self.representatives)
                similarity, removed = normalized(K, *diagonals), []
                if own is not None:
                    for s, (a, b) in enumerate(pairwise(local), first):
                        if len(own[s]):
                            removed.append((a, b, own[s], similarity[a:b, own[s]]))
                            similarity[a:b, own[s]] = 0.0
                each = [novelty_of(similarity[:, i:j]) for i, j in pairwise(edges)]
                of_sizes = np.minimum.accumulate(each, axis=0).T
                novelty[begin:end] = of_sizes.reshape(novelty[begin:end].shape)
                for a, b, columns, values in removed:  # it may be K itself
                    similarity[a:b, columns] = values
            if self.per_atom:
                rows[begin:end] = K
            else:
                rows[first:last] = average_over_structures(K, local)
        rows *= self.scale
        return rows

    def environment_rows(self, features: FloatArray) -> Float64Array:
        """Return the kernel rows of single environments (n, d): (n, M)."""
        rows: Float64Array = np.asarray(self.kernel(features, self.representatives), np.float64)
        return rows * self.scale

    def prior_variance(self, features: FloatArray, offsets: IntArray) -> Float64Array:
        """Return the diagonal of the kernel: (n_structures,), or (n_environments,)."""
        if self.per_atom:
            diagonal = np.asarray(self.kernel.diag(features), dtype=np.float64)
        else:
            blocks = (features[begin:end] for begin, end in pairwise(offsets))
            diagonal = np.array([np.mean(self.kernel(b, b), dtype=np.float64) for b in blocks])
        return diagonal * self.scale


def normalized(K: FloatArray, of_rows: FloatArray, of_columns: FloatArray) -> FloatArray:
    """Return the kernel divided by √(k_xx k_mm); K itself if all of these are one.

    Parameters
    ----------
    K : (n, M) array
    of_rows, of_columns : (n,) and (M,) arrays
        k_xx and k_mm.
    """
    norms = [np.sqrt(diagonal) for diagonal in (of_rows, of_columns)]
    if all(np.allclose(norm, 1, atol=1e-4) for norm in norms):
        return K
    rows, columns = (np.where(norm > 0, norm, 1.0) for norm in norms)
    return np.asarray(K / columns / rows[:, None], dtype=K.dtype)


def structure_novelty(novelty: Float64Array, offsets: IntArray) -> Float64Array:
    """Return the largest and the mean novelty of the environments of structures.

    Given that of all environments, (n,) or (n, k): (n_structures, 2), or (n_structures, k, 2); zero
    for structures without environments.
    """
    values = np.zeros((len(offsets) - 1, *novelty.shape[1:], 2))
    for s, (a, b) in enumerate(pairwise(offsets)):
        if b > a:
            values[s, ..., 0], values[s, ..., 1] = (
                novelty[a:b].max(axis=0),
                novelty[a:b].mean(axis=0),
            )
    return values


def novelty_of(similarity: FloatArray) -> FloatArray:
    """Return one minus the largest normalised kernel (n, M) of each environment: (n,)."""
    novelty: FloatArray = np.clip(1.0 - similarity.max(axis=1), 0.0, 1.0)
    return novelty
