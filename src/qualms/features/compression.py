"""Fewer features that keep the kernel: principal components, or a choice of columns.

The kernel of Eq. (13) is an inner product of power spectra, so what a linear map of the features
must keep is x·x′, not distances from a mean: nothing is centred. With X = U S Vᵀ the best q
features are X V_q; of a choice of columns, combinations are taken that stand for the columns left
out. Components of each pair of species by itself keep a little less, but a map of blocks, one for
each pair, takes less time to go forth and, with derivatives, back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from qualms.arrays import Float64Array, FloatArray
from qualms.gp.kernels import normalize_rows
from qualms.gp.representatives import cur, farthest_points

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

    A tenth of the rows is set aside to measure the change of the kernel. The blocks are the
    columns of each pair of species, for the method "pairs".
    """
    step = max(10, len(X) // 2000)
    held_out = normalize_rows(X[::step])
    seen = X if len(X) < 20 else np.delete(X, np.s_[::step], axis=0)
    q = min(n_features, X.shape[1])
    if method == "pairs":
        found = components_of_pairs(seen, q, blocks)
    elif method == "pca":
        found = principal_components(seen, q)
    else:
        found = chosen_columns(seen, q, method)
    matrix = found.astype(np.float32)
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


def chosen_columns(X: FloatArray, q: int, method: str) -> Float64Array:
    """Return a map that needs only q columns C of X (n, D): (D, q), zero in all other rows.

    All columns are, as far as they can be, combinations of the chosen ones, X ≈ C P with
    P = C⁺X, so that XXᵀ ≈ C (PPᵀ) Cᵀ: the map is the symmetric root of PPᵀ (Imbalzano et al.,
    J. Chem. Phys. 148, 241730 (2018)).
    """
    candidates = np.ascontiguousarray(X.T)
    if method == "cur":
        columns = cur(candidates, q)
    else:
        largest = int(np.argmax(np.einsum("ij,ij->i", candidates, candidates)))
        columns = farthest_points(candidates, q, start=largest).indices
    chosen = X[:, columns].astype(np.float64)
    P = scipy.linalg.lstsq(chosen.T @ chosen, chosen.T @ X, cond=1e-12, check_finite=False)[0]
    values, U = scipy.linalg.eigh(P @ P.T, check_finite=False)
    matrix = np.zeros((X.shape[1], len(columns)))
    matrix[columns] = (U * np.sqrt(np.maximum(values, 0.0))) @ U.T
    # Rotated to principal axes, the largest first, as those of `principal_components` are.
    return matrix @ principal_components(X @ matrix.astype(np.float32), len(columns))
