"""Which atoms make a structure uncertain.

The novelty of an atom measures how different its environment is from those of the representatives.
It needs no energies, so that it does not depend on how an energy is divided between atoms, and it
finds a bond that is too long. It is relative, and no uncertainty.

The force on an atom, unlike a part of an energy, can be measured, and has an uncertainty. In models
that learned from forces, its norm over directions is large where an environment is novel, too.

Contributions of atoms to an energy have an ensemble standard deviation as well. But a model that
has seen energies of structures alone determines sums over atoms, not their parts: members that
agree on a methyl group differ by tenths of an eV on the share of its carbon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array
from qualms.atomistic.forces import has_forces
from qualms.atomistic.model import AtomisticModel, atom_contributions


def atom_novelty(
    model: AtomisticModel, frames: Sequence[Atoms], *, unknown_species: str = "error"
) -> list[Float64Array]:
    """Return the novelty of each atom of each structure.

    The novelty of an environment is one minus its largest normalised kernel with a representative.
    It is given in units of the largest novelty in a structure that only one training structure in a
    hundred exceeds: beyond one, an atom makes its structure an extrapolation. For an atomic
    property, atoms are those of `AtomisticModel.target_atoms`.
    """
    chunks = model.stream(frames, unknown_species=unknown_species)
    return [novelty for chunk in chunks for novelty in chunk.atom_novelty()]


def atom_force_std(model: AtomisticModel, frames: Sequence[Atoms]) -> list[Float64Array]:
    """Return the uncertainty of the force on each atom of each structure, as a number.

    It is the norm √(σ_x² + σ_y² + σ_z²) of the calibrated uncertainties of the components, in the
    units of the energy per Å, which does not depend on the orientation of the structure.
    """
    return [force_norm(found.forces.std) for found in model.predict_forces(frames)]


def force_norm(std: Float64Array) -> Float64Array:
    """Return √(σ_x² + σ_y² + σ_z²), (n_atoms,), for uncertainties of forces (n_atoms, 3)."""
    return np.asarray(np.linalg.norm(std, axis=1))


class Attribution(NamedTuple):
    """Novelty, uncertainty of the contribution and of the force of each atom: (n_atoms,) each.

    There is no uncertainty of forces if the model has no continuous forces.
    """

    novelty: Float64Array
    std: Float64Array
    force_std: Float64Array | None = None


def attributions(model: AtomisticModel, frames: Sequence[Atoms]) -> list[Attribution]:
    """Return novelty and uncertainties of all atoms, for a property of structures."""
    found = []
    for chunk in model.stream(frames):
        forces: Sequence[Float64Array | None] = [None] * len(chunk.frames)
        if has_forces(model.fitted):
            forces = atom_force_std(model, chunk.frames)
        parts = zip(chunk.atom_novelty(), atom_contributions(chunk), forces, strict=True)
        found += [Attribution(novelty, atoms.std, force) for novelty, atoms, force in parts]
    return found
