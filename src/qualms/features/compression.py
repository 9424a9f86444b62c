"""Fewer features that keep the kernel: principal components.

The kernel of Eq. (13) is an inner product of power spectra, so what a linear map of the features
must keep is x·x′, not distances from a mean: nothing is centred. With X = U S Vᵀ the best q
features are X V_q. Components of each pair of species by itself keep a little less, but a map of
blocks, one for each pair, takes less time to go forth and, with derivatives, back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from qualms.arrays import Float64Array, FloatArray
from qualms.gp.kernels import normalize_rows

#: Environments from which a compression is found: a quarter of them, but so many.
_SAMPLE = (5_000, 20_000)


@dataclass(frozen=True)
class Projection:
    """A linear map (D, q) in float32 from all features to fewer.

    `kernel_error` is the root mean squared change of x·x′ (of unit vectors) between environments
    that it was not made from.
    """

    matrix: FloatArray
    kernel_error: float


def sample_size(n_environments: int) -> int:
    """Return how many environments a compression is found from."""
    return min(int(np.clip(n_environments // 4, *_SAMPLE)), n_environments)


def fit_projection(
    X: FloatArray, method: str, n_features: int, blocks: Sequence[slice] = ()
) -> Projection:
    """Fit a projection of the features X (n, D), rows of about unit length.

    A tenth of the rows is set aside to measure the change of the kernel. The method is "pca" or
    "pairs"; the blocks are the columns of each pair of species, for the latter.
    """
    step = max(10, len(X) // 2000)
    held_out = normalize_rows(X[::step])
    seen = X if len(X) < 20 else np.delete(X, np.s_[::step], axis=0)
    q = min(n_features, X.shape[1])
    by_pair = method == "pairs"
    components = components_of_pairs(seen, q, blocks) if by_pair else principal_components(seen, q)
    matrix = components.astype(np.float32)
    reduced = normalize_rows(held_out @ matrix)
    change = held_out @ held_out.T - reduced @ reduced.T
    return Projection(matrix, float(np.sqrt(np.mean(change.astype(np.float64) ** 2))))


def principal_components(X: FloatArray, q: int) -> Float64Array:
    """Return the q leading right singular vectors of X (n, D): (D, q).

    Columns that are zero throughout (pairs of species that never meet) are left out of the
    eigenvalue problem, whose cost is cubic.
    """
    used = np.flatnonzero(np.any(X != 0, axis=0))
    Y = X if len(used) == X.shape[1] else X[:, used]
    gram = (Y.T @ Y).astype(np.float64)
    first = max(len(used) - q, 0)
    _, V = scipy.linalg.eigh(gram, subset_by_index=(first, len(used) - 1), check_finite=False)
    components = np.zeros((X.shape[1], V.shape[1]))
    components[used] = V[:, ::-1]
    return components


def components_of_pairs(X: FloatArray, q: int, blocks: Sequence[slice]) -> Float64Array:
    """Return the q largest principal components of single blocks of columns: (D, q).

    The largest first, each of them zero in all blocks but its own.
    """
    sizes, found = [], []
    for block in blocks:
        Y = X[:, block]
        values, V = scipy.linalg.eigh((Y.T @ Y).astype(np.float64), check_finite=False)
        sizes.append(values)
        found += [(block, v) for v in V.T]
    largest = np.argsort(-np.concatenate(sizes), kind="stable")[:q]
    components = np.zeros((X.shape[1], len(largest)))
    for column, i in enumerate(largest):
        block, v = found[i]
        components[block, column] = v
    return components
