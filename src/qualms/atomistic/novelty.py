"""Which atoms make a structure uncertain.

Three questions have three answers. *Where has the model nothing to go by?* The novelty of an atom
is how unlike those that the model knows its environment is. It needs no energies, so that it does
not matter how an energy is divided between atoms, and it finds the bond that is too long. It is
relative, and no error bar.

*Which force may be wrong?* That on an atom, unlike a part of an energy, is something that can be
measured, and has an error bar. In models that learned from forces, the norm of it over directions
is large where something is strange, too. Models without derivatives have none.

*What is the error bar of a part?* Members' contributions have one. But a model that has seen
energies of structures alone is sure of sums over atoms, and not of their parts: members that agree
about a methyl group differ by tenths of an eV about how much of it is carbon. That says nothing
about the structure, and hides what does. Once each atom shares its contribution with its neighbours
most of it cancels; even so, differences of this kind between groups of atoms remain, and the
largest error bar is rarely at the bond that is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array
from scipy.spatial import cKDTree

from qualms.arrays import Float64Array, IntArray, check_number
from qualms.atomistic.forces import has_forces
from qualms.atomistic.model import AtomisticModel, atom_contributions
from qualms.errors import InputError
from qualms.prediction import Prediction

#: How far contributions are shared, Å: about the length of a bond.
WIDTH = 1.5
#: Beyond so many widths nothing is shared: there the weight is below 4e-6.
_REACH = 5.0
#: Images of a cell that nobody wants to wait for.
_MANY = 1e5


def atom_novelty(
    model: AtomisticModel, frames: Sequence[Atoms], *, unknown_species: str = "error"
) -> list[Float64Array]:
    """Return how strange each atom of each structure is to a model.

    The novelty of an environment is one minus its largest normalised kernel with a representative.
    It is given in units of that of the strangest environment of a training structure which only one
    training structure in a hundred exceeds. Up to one, an atom is like those that the model was
    trained on; beyond, it makes its structure an extrapolation, as `AtomisticModel.extrapolates`
    says of structures.

    Parameters
    ----------
    model : AtomisticModel
    frames : sequence of Atoms
    unknown_species : {"error", "ignore"}
        As in `AtomisticModel.predict`; atoms that are ignored have no value.

    Returns
    -------
    list of (n_atoms,) arrays
        For a property of atoms, those of `AtomisticModel.target_atoms`.
    """
    chunks = model.stream(frames, unknown_species=unknown_species)
    return [novelty for chunk in chunks for novelty in chunk.atom_novelty()]


def atom_force_std(model: AtomisticModel, frames: Sequence[Atoms]) -> list[Float64Array]:
    """Return the error bar of the force on each atom of each structure, as a number.

    It is the norm √(σ_x² + σ_y² + σ_z²) of the calibrated error bars of the components, which does
    not depend on how the structure is turned.

    Parameters
    ----------
    model : AtomisticModel
        With forces, as for `AtomisticModel.predict_forces`; best if it has learned from some.
    frames : sequence of Atoms

    Returns
    -------
    list of (n_atoms,) arrays
        Units of the energy per Å.
    """
    return [force_norm(found.forces.std) for found in model.predict_forces(frames)]


def force_norm(std: Float64Array) -> Float64Array:
    """Return √(σ_x² + σ_y² + σ_z²), (n_atoms,), of the error bars of forces (n_atoms, 3)."""
    norm: Float64Array = np.linalg.norm(std, axis=1)
    return norm


class Attribution(NamedTuple):
    """What is known of the atoms of one structure, (n_atoms,) each.

    Attributes
    ----------
    novelty : array
        As `atom_novelty`.
    std : array
        Error bar of what each atom contributes, as `AtomisticModel.predict_atoms`.
    local_std : array
        The same once contributions are shared with neighbours, as `local_contributions`.
    force_std : array, optional
        Error bar of the force on each atom, as `atom_force_std`; None if the model has no forces,
        or if its cutoff is not smooth, so that they are not continuous.
    """

    novelty: Float64Array
    std: Float64Array
    local_std: Float64Array
    force_std: Float64Array | None = None


def attributions(model: AtomisticModel, frames: Sequence[Atoms]) -> list[Attribution]:
    """Return novelty and error bars of all atoms of structures, from features made once.

    Forces, if the model has any, take features of their own, with derivatives.

    Parameters
    ----------
    model : AtomisticModel
        Of a property of structures.
    frames : sequence of Atoms
    """
    found = []
    for chunk in model.stream(frames):
        forces: Sequence[Float64Array | None] = [None] * len(chunk.frames)
        if has_forces(model.fitted):
            forces = atom_force_std(model, chunk.frames)
        parts = zip(chunk.atom_novelty(), atom_contributions(chunk), forces, strict=True)
        for atoms, (novelty, contributions, force) in zip(chunk.frames, parts, strict=True):
            local = local_contributions(atoms, contributions).std
            found.append(Attribution(novelty, contributions.std, local, force))
    return found


def local_contributions(
    atoms: Atoms, contributions: Prediction, *, width: float = WIDTH
) -> Prediction:
    """Share what each atom contributes with the atoms around it.

    Atom i gets Σ_j K_ij e_j, where K_ij ∝ Σ exp(−r_ij²/2w²) over all periodic images of j, and
    Σ_i K_ij = 1, so that the sum over atoms stays what it was, member by member. What an atom of a
    crystal gets does not depend on the choice of the cell.

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
    K = _weights(atoms, w)
    return contributions.map(lambda e: K @ e)


def _weights(atoms: Atoms, w: float) -> csr_array:
    """Return K_ij, (n_atoms, n_atoms), from the neighbours of each atom alone."""
    n, reach = len(atoms), _REACH * w
    positions, images, origins = _with_images(atoms, reach)
    pairs = cKDTree(positions).sparse_distance_matrix(cKDTree(images), reach, output_type="ndarray")
    overlap = np.exp(-0.5 * (pairs["v"] / w) ** 2)
    # Several images of an atom have one place: their overlaps are summed.
    K = csr_array((overlap, (pairs["i"], origins[pairs["j"]])), shape=(n, n))
    return csr_array(K.multiply(1.0 / K.sum(axis=0)[None, :]))


def _with_images(atoms: Atoms, reach: float) -> tuple[Float64Array, Float64Array, IntArray]:
    """Return positions in the cell, those of all atoms within reach, and whose images they are."""
    cell = atoms.cell.complete().array
    periodic = np.asarray(atoms.pbc) & (atoms.cell.lengths() > 0)
    inverse = np.linalg.inv(cell)
    f = atoms.positions @ inverse
    f -= np.where(periodic, np.floor(f), 0.0)
    # Columns of the inverse are normal to faces: their norms are inverse distances between these.
    margin = reach * np.linalg.norm(inverse, axis=0)
    n = np.where(periodic, np.ceil(margin), 0).astype(int)
    if np.prod(2.0 * n + 1) > _MANY:
        raise InputError("width", f"{reach / _REACH:.6g}", "a few Å, as bonds are long")
    shifts = np.stack(np.meshgrid(*(np.arange(-k, k + 1) for k in n), indexing="ij"), axis=-1)
    moved = f + shifts.reshape(-1, 1, 3)
    near = np.all(~periodic | ((moved > -margin) & (moved < 1 + margin)), axis=2)
    return f @ cell, moved[near] @ cell, np.nonzero(near)[1]
