"""Kernel rows of forces and virials, in a stream.

A force is a derivative of an energy, so its kernel with a representative environment is the
derivative of that of the energy. With the symbols of `qualms.atomistic.potential`, the force on
atom j has the row

    K_jm = −Σ_i ∂(x_i·X_m)^ζ/∂r_j = −Σ_i a_im (∂y_i/∂r_j·X_m − (∂y_i/∂r_j·x_i) x_i·X_m),

a_im = ζ (x_i·X_m)^(ζ−1)/|y_i|; for features that are not normalised the second term is missing. The
first product is the work: (environments × neighbours × 3) × features × representatives. Two things
make it less. The derivative by the position of an atom of species α changes pairs of species with
α in them alone, so that atoms are taken species by species, with these features. And if all atoms
move alike nothing changes, so that the derivative by the position of the centre, which changes
them all, is minus the sum of the others.

Everything is float64: rows of forces lie in directions in which representatives hardly differ, and
that is what whitening amplifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array

from qualms.atomistic.force_labels import ForceLabels
from qualms.atomistic.gradients import (
    Environments,
    GradientBlock,
    batches,
    gradient_blocks,
    power_spectra,
)
from qualms.atomistic.mechanics import VOIGT
from qualms.atomistic.representation import Representation
from qualms.atomistic.scale_features import ScaleFeatures, scale_features
from qualms.core.typing import Float64Array, FloatArray, IntArray


@dataclass(frozen=True)
class Rows:
    """Kernel rows of a batch of environments: what they add to those of their structures.

    Attributes
    ----------
    energies : (n_structures, M) array
        Sums over environments.
    forces : (n_atoms, 3, M) array
    virials : (n_structures, 6, M) array, optional
        Derivatives by the strain, in the order of `qualms.atomistic.mechanics.VOIGT`.
    """

    energies: Float64Array
    forces: Float64Array
    virials: Float64Array | None


@dataclass(frozen=True)
class Pairs:
    """Derivatives of power spectra by the positions of atoms of one species.

    Attributes
    ----------
    owners, atoms : (p,) arrays of int
        Environment, and atom that is not its centre, counted through the batch.
    pairs : list of int
        Pairs of species that this species is in, among all of them.
    changes : (p, 3, c) array
        Of their features, one pair after the other.
    """

    owners: IntArray
    atoms: IntArray
    pairs: list[int]
    changes: Float64Array


def derivative_rows(
    scales: Sequence[ScaleRows], batch: Environments, *, strain: bool = False
) -> Rows:
    """Return the kernel rows of a batch, summed over scales."""
    M, n_structures = len(scales[0].representatives), len(batch.frames)
    rows = Rows(
        energies=np.zeros((n_structures, M)),
        forces=np.zeros((int(batch.atom_offsets[-1]), 3, M)),
        virials=np.zeros((n_structures, 6, M)) if strain else None,
    )
    for scale in scales:
        scale.add_to(rows, batch)
    return rows


def fill_rows(
    energies: Float64Array,
    others: Float64Array,
    frames: Sequence[Atoms],
    labels: ForceLabels,
    scales: Sequence[ScaleRows],
    on_environments: Callable[[int], object] = lambda done: None,
) -> None:
    """Fill in the kernel rows of a training set.

    Parameters
    ----------
    energies : (n_structures, M) array
        Is filled with averages over environments.
    others : (n_rows, M) array of zeros
        Is filled with the rows of forces, and of virials per atom, that have labels.
    frames, labels
        Of the training set.
    scales : sequence of ScaleRows
    on_environments : callable, optional
        Called with the number of environments done so far.
    """
    strain = labels.n_with_virial > 0
    energies[:] = 0.0
    done = 0
    for batch in batches(frames):
        found = derivative_rows(scales, batch, strain=strain)
        atom_offsets = batch.atom_offsets
        for k, s in enumerate(batch.structures):
            sizes = len(frames[s])
            energies[s] += found.energies[k] / sizes
            of_atoms = found.forces[atom_offsets[k] : atom_offsets[k + 1]]
            parts = [of_atoms.reshape(3 * sizes, -1)]
            if found.virials is not None:
                parts.append(found.virials[k] / sizes)
            mask = labels.known[s][: sum(map(len, parts))]
            others[labels.offsets[s] : labels.offsets[s + 1]] += np.concatenate(parts)[mask]
        done += int(batch.offsets[-1])
        on_environments(done)


def scale_rows(representation: Representation, representatives: FloatArray) -> list[ScaleRows]:
    """Return what computes the rows of each scale, for representatives (M, d)."""
    return [
        ScaleRows(scale, scale.representatives(representatives))
        for scale in scale_features(representation)
    ]


@dataclass(frozen=True)
class ScaleRows:
    """Kernel rows of one scale.

    Attributes
    ----------
    scale : ScaleFeatures
    representatives : (M, q) array
    """

    scale: ScaleFeatures
    representatives: Float64Array

    def add_to(self, rows: Rows, batch: Environments) -> None:
        """Add what this scale contributes."""
        scale, n = self.scale, int(batch.offsets[-1])
        blocks = list(gradient_blocks(scale.engine, batch, strain=rows.virials is not None))
        x, lengths = scale.features(power_spectra(blocks, n, scale.engine.n_features))
        products = x @ self.representatives.T
        powers = scale.share * scale.powers(products)
        products *= powers
        sums = csr_array((np.ones(n), (batch.owners, np.arange(n))), shape=(len(rows.energies), n))
        rows.energies[:] += np.asarray(sums @ products)
        powers *= scale.exponent / lengths
        # Of features that are not normalised there is no second term.
        products *= scale.exponent / lengths if scale.feature_scale is None else 0.0
        forces = rows.forces.reshape(-1, len(self.representatives))
        for z in scale.engine.species:
            pairs = _pairs(blocks, batch, scale, z)
            if len(pairs.atoms):
                self._add_forces(forces, pairs, batch, x, powers, products)
        if rows.virials is not None:
            self._add_virials(rows.virials, blocks, sums, x, powers, products)

    def _add_forces(
        self,
        forces: Float64Array,
        pairs: Pairs,
        batch: Environments,
        x: Float64Array,
        powers: Float64Array,
        products: Float64Array,
    ) -> None:
        """Add the rows −Σ_i a_i (∂y_i/∂r_j·X − (∂y_i/∂r_j·x_i) x_i·X) of one species, (3n, M)."""
        owners, (p, _, c) = pairs.owners, pairs.changes.shape
        changes = self.scale.projected(pairs.changes.reshape(3 * p, c), pairs.pairs)
        used = self.scale.used(pairs.pairs)
        along = np.einsum("pcf,pf->pc", changes.reshape(p, 3, -1), x[:, used][owners])
        terms = changes @ self.representatives[:, used].T
        terms.reshape(p, 3, -1)[:] *= powers[owners, None, :]
        # What pushes atom j pulls the centre.
        axes = np.arange(3)
        on_atoms = (3 * pairs.atoms[:, None] + axes).ravel()
        on_centers = (3 * batch.center_atoms[owners][:, None] + axes).ravel()
        rows, ones = np.concatenate([on_atoms, on_centers]), np.ones(3 * p)
        entries = np.tile(np.arange(3 * p), 2)
        signs = np.concatenate([-ones, ones])
        shape = (len(forces), 3 * p)
        forces += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ terms)
        second = signs * np.tile(-along.ravel(), 2)
        environments = np.tile(np.repeat(owners, 3), 2)
        shape = (len(forces), len(x))
        forces += np.asarray(csr_array((second, (rows, environments)), shape=shape) @ products)

    def _add_virials(
        self,
        virials: Float64Array,
        blocks: Sequence[GradientBlock],
        sums: csr_array,
        x: Float64Array,
        powers: Float64Array,
        products: Float64Array,
    ) -> None:
        """Add the rows Σ_i a_i (∂y_i/∂ε·X − (∂y_i/∂ε·x_i) x_i·X)."""
        n, D = len(x), self.scale.engine.n_features
        raw = np.zeros((n, 6, D))
        for block in blocks:
            if block.strain is not None:
                raw[block.rows, :, block.columns] = block.strain[:, *VOIGT]
        changes = self.scale.projected(raw.reshape(6 * n, D)).reshape(n, 6, -1)
        along = np.einsum("ivf,if->iv", changes, x)
        for v in range(6):
            terms = (changes[:, v] @ self.representatives.T) * powers
            terms -= along[:, v, None] * products
            virials[:, v] += np.asarray(sums @ terms)


def _pairs(
    blocks: Sequence[GradientBlock], batch: Environments, scale: ScaleFeatures, z: int
) -> Pairs:
    """Collect derivatives by the positions of atoms of atomic number z, centres left out."""
    pair_columns = scale.engine.pair_columns
    pairs = [k for k, pair in enumerate(pair_columns) if z in pair]
    blocks_of_pairs = [list(pair_columns.values())[k] for k in pairs]
    with_z = {columns.start: k for k, columns in enumerate(blocks_of_pairs)}
    numbers = np.concatenate([atoms.numbers for atoms in batch.frames])
    found = []
    for block in blocks:
        if block.columns.start in with_z:
            owners = np.repeat(block.rows, np.diff(block.edges))
            wanted = (numbers[block.atoms] == z) & (batch.center_atoms[owners] != block.atoms)
            found.append((block, wanted, owners[wanted] * len(numbers) + block.atoms[wanted]))
    keys, places = np.unique(
        np.concatenate([keys for *_, keys in found] or [np.empty(0, dtype=np.intp)]),
        return_inverse=True,
    )
    size = blocks_of_pairs[0].stop - blocks_of_pairs[0].start
    changes = np.zeros((len(keys), 3, size * len(pairs)))
    first = 0
    for block, wanted, own in found:
        k = with_z[block.columns.start]
        here = places[first : first + len(own)]
        changes[here, :, k * size : (k + 1) * size] = block.positions[wanted]
        first += len(own)
    return Pairs(keys // len(numbers), keys % len(numbers), pairs, changes)
