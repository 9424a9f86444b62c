"""Power spectra and their derivatives by positions and strain, as featomic computes them.

The power spectrum of an environment changes with the atoms in it alone, and the features of a pair
of species αα′ change with atoms of α and of α′ and with the centre alone. So derivatives come in
blocks, one for each species at the centre and pair of species around it, with one entry for each
atom that matters to each environment. They stay like that: a dense array would mostly hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms

from qualms.atomistic.engines import FeatomicEngine
from qualms.atomistic.environments import offsets_of
from qualms.atomistic.surroundings import Cutting, Surroundings
from qualms.core.typing import Float64Array, IntArray

#: Environments whose derivatives are in memory at once: some 50 MB in a dense crystal.
BATCH = 64


@dataclass(frozen=True)
class Environments:
    """Environments of some structures, or of a part of one.

    Attributes
    ----------
    structures : (n_structures,) array of int
        Indices of the structures.
    frames : list of Atoms
    centers : list of arrays of int
        Atoms of each structure whose environments these are.
    surroundings : list of Surroundings
        What is around them in each structure.
    """

    structures: IntArray
    frames: list[Atoms]
    centers: list[IntArray]
    surroundings: list[Surroundings]

    def cut_out(self, cutoff: float) -> list[Cutting]:
        """Return what featomic needs to know of each structure."""
        pairs = zip(self.surroundings, self.centers, strict=True)
        return [surroundings.around(centers, cutoff) for surroundings, centers in pairs]

    @property
    def offsets(self) -> IntArray:
        """Environments of the structures: those of the s-th are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of([len(chosen) for chosen in self.centers])

    @property
    def atom_offsets(self) -> IntArray:
        """Atoms of the structures, counted through all of them."""
        return offsets_of([len(atoms) for atoms in self.frames])

    @property
    def owners(self) -> IntArray:
        """Structure of each environment, counted from 0 in this batch."""
        return np.repeat(np.arange(len(self.frames)), [len(chosen) for chosen in self.centers])

    @property
    def center_atoms(self) -> IntArray:
        """Atom at the centre of each environment, counted through the batch."""
        return np.concatenate(self.centers) + self.atom_offsets[self.owners]


@dataclass(frozen=True)
class GradientBlock:
    """Features of one pair of species, and their derivatives.

    Attributes
    ----------
    columns : slice
        Which features of a scale these c are.
    rows : (n,) array of int
        Environments that have them, counted through the batch.
    values : (n, c) array
    edges : (n + 1,) array of int
        Derivatives of the k-th of these environments are ``edges[k]:edges[k + 1]``.
    atoms : (g,) array of int
        Atom that moves, counted through the batch.
    positions : (g, 3, c) array
        ∂p/∂r in 1/Å.
    strain : (n, 3, 3, c) array, optional
        ∂p/∂ε, for r → (1 + ε) r and a cell that goes along.
    """

    columns: slice
    rows: IntArray
    values: Float64Array
    edges: IntArray
    atoms: IntArray
    positions: Float64Array
    strain: Float64Array | None


def batches(frames: Iterable[Atoms], size: int = BATCH) -> Iterator[Environments]:
    """Group environments: several small structures at a time, or a large one in parts."""
    group: list[tuple[int, Surroundings, IntArray]] = []
    count = 0
    for index, atoms in enumerate(frames):
        surroundings = Surroundings(atoms)
        for centers in surroundings.parts(size):
            if group and count + len(centers) > size:
                yield _environments(group)
                group, count = [], 0
            group.append((index, surroundings, centers))
            count += len(centers)
    if group:
        yield _environments(group)


def _environments(group: Sequence[tuple[int, Surroundings, IntArray]]) -> Environments:
    indices, surroundings, centers = zip(*group, strict=True)
    frames = [one.atoms for one in surroundings]
    return Environments(np.array(indices), frames, list(centers), list(surroundings))


def gradient_blocks(
    engine: FeatomicEngine, batch: Environments, *, strain: bool = False
) -> Iterator[GradientBlock]:
    """Yield features and derivatives of a batch, in float64, as they are needed."""
    cut = batch.cut_out(engine.scale.cutoff)
    # Atom of the batch that each atom of what was cut out is, or is an image of.
    first_atom = batch.atom_offsets
    atom_of = np.concatenate([first_atom[k] + one.origins for k, one in enumerate(cut)])
    first_cut = offsets_of([len(one.origins) for one in cut])
    wanted = ["positions", "strain"] if strain else ["positions"]
    given = ([one.atoms for one in cut], [one.centers for one in cut])
    for columns, rows, block in engine.blocks(*given, wanted):
        moved = block.gradient("positions")
        owner, system, atom = np.asarray(moved.samples.values).T
        yield GradientBlock(
            columns=columns,
            rows=rows,
            values=np.asarray(block.values),
            # Entries come environment by environment.
            edges=np.searchsorted(owner, np.arange(len(rows) + 1)),
            atoms=atom_of[first_cut[system] + atom],
            positions=np.asarray(moved.values),
            strain=np.asarray(block.gradient("strain").values) if strain else None,
        )


def power_spectra(blocks: Sequence[GradientBlock], n: int, n_features: int) -> Float64Array:
    """Return the power spectra of the n environments of a batch: (n, D)."""
    P = np.zeros((n, n_features))
    for block in blocks:
        P[block.rows, block.columns] = block.values
    return P
