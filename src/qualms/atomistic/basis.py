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

from qualms.atomistic.environments import structure_blocks
from qualms.core.kernels import Kernel, sum_over_structures
from qualms.core.typing import Float64Array, FloatArray, IntArray

#: Elements of a kernel block: 64 MB of float64.
_ELEMENTS = 8_000_000


@dataclass(frozen=True)
class Basis:
    """Representative environments, and the kernel with them.

    Attributes
    ----------
    kernel : Kernel
        Between environments.
    representatives : (r, d) array of float32
    scale : float
        Factor of Eq. (17), Musil et al. 2019, for targets of unit variance.
    per_atom : bool
        Whether rows are environments rather than averages over structures.
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
        own: Sequence[IntArray] | None = None,
    ) -> Float64Array:
        """Return the kernel rows K_XM of a batch: (n_structures, r), or (n_environments, r).

        Parameters
        ----------
        features : (n_environments, d) array
        offsets : (n_structures + 1,) array of int
            Environments of structure s are rows ``offsets[s]:offsets[s + 1]``.
        novelty : (n_structures, 2) array, optional
            Is filled with how unlike every representative the strangest environment of each
            structure is, and its environments on average, from 0 to 1: one minus the largest
            normalised kernel with a representative.
        own : sequence of arrays of int, optional
            Representatives of each structure that its novelty does not count: those that come from
            itself.
        """
        n = len(features) if self.per_atom else len(offsets) - 1
        rows = np.empty((n, len(self.representatives)))
        for first, last in structure_blocks(offsets, _ELEMENTS // len(self.representatives)):
            begin, end = offsets[first], offsets[last]
            block = features[begin:end]
            K = self.kernel(block, self.representatives)
            if novelty is not None:
                likeness = self._likeness(K, block)
                for s in range(first, last):
                    part = likeness[offsets[s] - begin : offsets[s + 1] - begin]
                    novelty[s] = _novelty(part, None if own is None else own[s])
            if self.per_atom:
                rows[begin:end] = K
            else:
                local = offsets[first : last + 1] - begin
                rows[first:last] = sum_over_structures(K, local, average=True)
        rows *= self.scale
        return rows

    def environment_rows(self, features: FloatArray) -> Float64Array:
        """Return the kernel rows of single environments (n, d): (n, r)."""
        return (
            np.asarray(self.kernel(features, self.representatives), dtype=np.float64) * self.scale
        )

    def novelty(self, features: FloatArray) -> Float64Array:
        """Return how unlike every representative environments (n, d) are, from 0 to 1: (n,)."""
        found = np.empty(len(features))
        step = max(_ELEMENTS // len(self.representatives), 1)
        for start in range(0, len(features), step):
            block = features[start : start + step]
            K = self.kernel(block, self.representatives)
            found[start : start + step] = _novelties(self._likeness(K, block))
        return found

    def prior_variance(self, features: FloatArray, offsets: IntArray) -> Float64Array:
        """Return the diagonal of the kernel: (n_structures,), or (n_environments,)."""
        if self.per_atom:
            diagonal = np.asarray(self.kernel.diag(features), dtype=np.float64)
        else:
            diagonal = np.empty(len(offsets) - 1)
            for s, (begin, end) in enumerate(pairwise(offsets)):
                block = features[begin:end]
                diagonal[s] = np.mean(self.kernel(block, block), dtype=np.float64)
        return diagonal * self.scale

    def _likeness(self, K: FloatArray, features: FloatArray) -> FloatArray:
        """Return the normalised kernel; K itself if the kernel is normalised."""
        own = np.sqrt(self.kernel.diag(self.representatives))
        norms = np.sqrt(self.kernel.diag(features))
        if np.allclose(own, 1, atol=1e-4) and np.allclose(norms, 1, atol=1e-4):
            return K
        own, norms = np.where(own > 0, own, 1.0), np.where(norms > 0, norms, 1.0)
        return np.asarray(K / own / norms[:, None], dtype=K.dtype)


def _novelty(likeness: FloatArray, own: IntArray | None) -> tuple[float, float]:
    """Return the novelty of the strangest of some environments (n, r), and their mean novelty."""
    if not len(likeness):
        return 0.0, 0.0
    if own is not None and len(own):
        likeness = likeness.copy()
        likeness[:, own] = 0.0
    each = _novelties(likeness)
    return float(each.max()), float(each.mean(dtype=np.float64))


def _novelties(likeness: FloatArray) -> FloatArray:
    """Return one minus the largest likeness of each environment, given (n, r): (n,)."""
    novelties: FloatArray = np.clip(1.0 - likeness.max(axis=1), 0.0, 1.0)
    return novelties
