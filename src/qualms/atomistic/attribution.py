"""Which atoms make a structure uncertain.

A model that has seen energies of structures alone is sure of sums over atoms, and not of their
parts: members that agree about a methyl group differ by tenths of an eV about how much of it is
carbon. That says nothing about the structure. What is uncertain about a place shows once each atom
shares its contribution with its neighbours: such differences cancel, and others do not.
"""

from __future__ import annotations

import numpy as np
from ase import Atoms

from qualms.core.checks import check_number
from qualms.errors import InputError
from qualms.prediction import Prediction

#: How far contributions are shared, Å: about the length of a bond.
WIDTH = 1.5


def local_contributions(
    atoms: Atoms, contributions: Prediction, *, width: float = WIDTH
) -> Prediction:
    """Share what each atom contributes with the atoms around it.

    Atom i gets Σ_j K_ij e_j, where K_ij ∝ exp(−r_ij²/2w²) and Σ_i K_ij = 1, so that the sum over
    atoms stays what it was, member by member.

    Parameters
    ----------
    atoms : Atoms
    contributions : Prediction of shape (n_atoms,)
        As `AtomisticModel.predict_atoms` gives them.
    width : float
        w in Å.

    Returns
    -------
    Prediction of shape (n_atoms,)
    """
    if contributions.shape != (len(atoms),):
        given = f"shape {contributions.shape}"
        raise InputError("contributions", given, f"({len(atoms)},), one for each atom")
    w = check_number("width", width, 0, strict=True)
    distances = atoms.get_all_distances(mic=bool(np.any(atoms.pbc)))  # type: ignore[no-untyped-call]
    K = np.exp(-0.5 * (distances / w) ** 2)
    shared: Prediction = (K / K.sum(axis=0)) @ contributions
    return shared
