"""Fewer features: principal components that keep the kernel, and combinations of elements.

The kernel of Eq. (13) is an inner product of power spectra, so what a linear map of the features
must keep is x·x′, not distances from a mean: nothing is centred. With X = U S Vᵀ the best q
features are X V_q. Components of each pair of species by itself keep a little less, but a map of
blocks, one for each pair, takes less time to go forth and, with derivatives, back.

Pseudo-species are few combinations of elements, in which the densities of many are expanded.
Elements α and β of covalent radii r and electronegativities χ have the similarity

    κ_αβ = (1 − η) exp(−(r_α − r_β)²/2s_r² − (χ_α − χ_β)²/2s_χ²) + η δ_αβ

(Willatt, Musil & Ceriotti, Phys. Chem. Chem. Phys. 20, 29661 (2018)). With weights W Wᵀ ≈ κ the
density of pseudo-species k is the sum over elements of W_αk times the density of α. Their power
spectra have a number of features that does not depend on the number of elements, and similar
elements learn from one another. The weights follow from the elements, and these constants are part
of the meaning of a model file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from ase.data import covalent_radii

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.gp.kernels import normalize_rows

# --- principal components ---


@dataclass(frozen=True)
class Projection:
    """A linear map (D, q) in float32 from all features to fewer.

    `kernel_error` is the root mean squared change of x·x′ (of unit vectors) between environments
    that it was not made from.
    """

    matrix: FloatArray
    kernel_error: float


def sample_size(n_environments: int) -> int:
    """Return how many environments a compression is found from: a quarter, within limits."""
    return min(int(np.clip(n_environments // 4, 5_000, 20_000)), n_environments)


def fit_projection(
    X: FloatArray, method: str, n_features: int, blocks: Sequence[IntArray] = ()
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


def components_of_pairs(X: FloatArray, q: int, blocks: Sequence[IntArray]) -> Float64Array:
    """Return the q largest principal components of single blocks of columns: (D, q).

    The largest first, each of them zero in all blocks but its own.
    """
    sizes, vectors = [], []
    for block in blocks:
        Y = X[:, block]
        values, V = scipy.linalg.eigh((Y.T @ Y).astype(np.float64), check_finite=False)
        sizes.append(values)
        vectors += [(block, v) for v in V.T]
    largest = np.argsort(-np.concatenate(sizes), kind="stable")[:q]
    components = np.zeros((X.shape[1], len(largest)))
    for column, i in enumerate(largest):
        block, v = vectors[i]
        components[block, column] = v
    return components


# --- pseudo-species ---

#: Pauling's electronegativities of H to Cm; Allen's for He, Ne and Ar. Those that are not known are
#: set to the value of a neighbour.
# fmt: off
_ELECTRONEGATIVITY = (
    2.20, 4.16,
    0.98, 1.57, 2.04, 2.55, 3.04, 3.44, 3.98, 4.79,
    0.93, 1.31, 1.61, 1.90, 2.19, 2.58, 3.16, 3.24,
    0.82, 1.00, 1.36, 1.54, 1.63, 1.66, 1.55, 1.83, 1.88, 1.91, 1.90, 1.65,
    1.81, 2.01, 2.18, 2.55, 2.96, 3.00,
    0.82, 0.95, 1.22, 1.33, 1.60, 2.16, 1.90, 2.20, 2.28, 2.20, 1.93, 1.69,
    1.78, 1.96, 2.05, 2.10, 2.66, 2.60,
    0.79, 0.89, 1.10, 1.12, 1.13, 1.14, 1.13, 1.17, 1.20, 1.20, 1.20, 1.22, 1.23, 1.24, 1.25,
    1.10, 1.27, 1.30, 1.50, 2.36, 1.90, 2.20, 2.20, 2.28, 2.54, 2.00,
    1.62, 2.33, 2.02, 2.00, 2.20, 2.20,
    0.70, 0.90, 1.10, 1.30, 1.50, 1.38, 1.36, 1.28, 1.30, 1.30,
)
# fmt: on


def mixing_weights(species: Sequence[int], n_pseudo: int) -> Float64Array:
    """Return the weights W of elements (S atomic numbers) in K pseudo-species: (S, K), unit rows.

    If there are more elements than pseudo-species, K of them represent all: W = κ_SK κ_KK^(−1/2).
    The first is the one least similar to all, each of the others the one that those before it
    describe worst. The symmetric root is unique, so that weights are the same on every machine.
    """
    s_r, s_chi, eta = 0.2, 0.3, 0.1  # in Å; and how much elements differ, however similar they are
    heaviest = len(_ELECTRONEGATIVITY)  # all heavier ones are like it
    numbers = np.minimum(np.asarray(species, dtype=int), heaviest)
    radii, electronegativity = covalent_radii[numbers], np.array(_ELECTRONEGATIVITY)[numbers - 1]
    scaled = np.stack([radii / s_r, electronegativity / s_chi], axis=1)
    distance = np.sum((scaled[:, None] - scaled) ** 2, axis=2)
    kappa = (1 - eta) * np.exp(-distance / 2) + eta * np.eye(len(scaled))
    chosen = [int(np.argmin(kappa.sum(axis=0)))]
    left = kappa
    while len(chosen) < min(n_pseudo, len(kappa)):
        column = left[:, chosen[-1]]
        left = left - np.outer(column, column) / column[chosen[-1]]
        unexplained = np.diag(left).copy()
        unexplained[chosen] = -1.0
        chosen.append(int(np.argmax(unexplained)))
    chosen.sort()
    values, V = np.linalg.eigh(kappa[np.ix_(chosen, chosen)])  # at least η
    W = kappa[:, chosen] @ (V / np.sqrt(values)) @ V.T
    return np.asarray(W / np.linalg.norm(W, axis=1, keepdims=True))
