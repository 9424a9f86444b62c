"""Pseudo-species: few combinations of elements, in which the densities of many are expanded.

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

import numpy as np
from ase.data import covalent_radii

from qualms.arrays import Float64Array

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
#: s_r in Å, s_χ, and the share η by which elements differ however similar they are.
_RADIUS, _DIFFERENCE, _OWN = 0.2, 0.3, 0.1


def mixing_weights(species: Sequence[int], n_pseudo: int) -> Float64Array:
    """Return the weights W of elements (S atomic numbers) in K pseudo-species: (S, K), unit rows.

    If there are more elements than pseudo-species, K of them represent all: W = κ_SK κ_KK^(−1/2).
    The first is the one least similar to all, each of the others the one that those before it
    describe worst. The symmetric root is unique, so that weights are the same on every machine.
    """
    heaviest = len(_ELECTRONEGATIVITY)  # all heavier ones are like it
    known = np.minimum(np.asarray(species, dtype=int), heaviest)
    radii, electronegativity = covalent_radii[known], np.array(_ELECTRONEGATIVITY)[known - 1]
    scaled = np.stack([radii / _RADIUS, electronegativity / _DIFFERENCE], axis=1)
    distance = np.sum((scaled[:, None] - scaled) ** 2, axis=2)
    kappa = (1 - _OWN) * np.exp(-distance / 2) + _OWN * np.eye(len(scaled))
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
