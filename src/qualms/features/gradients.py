"""Power spectra with their derivatives, and the chain rule through compression and normalisation.

An environment with power spectrum p, in raw features, has y = pP with the projection P, and the
kernel sees x = y/|y|, or y/c for features that are not normalised. Changes of p are projected to
those of y; derivatives by y are taken back to p by Pᵀ. Both go pair of species by pair of species:
an environment has features of the pairs of its own species only, and a projection may have few
components of each pair.

featomic, given some atoms of a large structure, still spends time on all others. Large structures
are therefore cut to parts, each with everything within the cutoff. Images of atoms across a
periodic boundary become atoms of their own until derivatives by their positions, which are those
by the positions of the atoms, have been computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from ase import Atoms
from scipy.linalg import block_diag
from scipy.spatial import cKDTree

from qualms.arrays import Float64Array, IntArray
from qualms.features.representation import offsets_of
from qualms.features.soap import (
    FeatomicEngine,
    PseudoSpeciesEngine,
    SoapRepresentation,
    make_engine,
)

#: Structures of fewer atoms are not cut.
LARGE = 256
#: Environments whose derivatives are in memory at once: some 50 MB in a dense crystal.
BATCH = 64
#: Error of distances after atoms have been moved by a lattice vector, in Å.
_ROUNDING = 1e-6


# --- parts of large structures ---


class Cutout(NamedTuple):
    """Some atoms of a structure with everything around them, without a cell unless it is whole.

    `origins` (n,) are the atoms of the structure that they are, or are images of; `centers` the
    places of the atoms in the middle among them.
    """

    atoms: Atoms
    origins: IntArray
    centers: IntArray


@dataclass(frozen=True, eq=False)
class Surroundings:
    """A structure that can be cut to parts."""

    atoms: Atoms

    def parts(self, size: int) -> Iterator[IntArray]:
        """Yield all atoms, at most `size` at a time; if they are many, close to one another."""
        everything = np.arange(len(self.atoms))
        if len(self.atoms) < LARGE:
            yield from np.array_split(everything, -(-len(everything) // size))
        else:
            yield from _compact(self._wrapped.positions, everything, size)

    def around(self, centers: IntArray, cutoff: float) -> Cutout:
        """Return some atoms and all that are within the cutoff (Å) of them, and perhaps others."""
        n, cutoff = len(self.atoms), cutoff + _ROUNDING
        # In a narrow cell an environment may have two images of an atom: they stay one atom.
        if n < LARGE or np.any(self._widths[self.atoms.pbc] < 2 * cutoff):
            return Cutout(self.atoms, np.arange(n), centers)
        positions, origins, tree = self._images(cutoff)
        found = tree.query_ball_point(positions[centers], cutoff)
        near = np.unique(np.concatenate([np.asarray(some, dtype=np.intp) for some in found]))
        atoms = Atoms(self.atoms.numbers[origins[near]], positions[near])
        return Cutout(atoms, origins[near], np.searchsorted(near, centers))

    @cached_property
    def _wrapped(self) -> Atoms:
        """The structure with its atoms in the cell, along periodic directions."""
        given = self.atoms
        atoms = Atoms(given.numbers, given.positions, cell=given.cell.complete(), pbc=given.pbc)
        atoms.wrap(eps=0)  # type: ignore[no-untyped-call]
        return atoms

    @cached_property
    def _widths(self) -> Float64Array:
        """Distances between the faces of the cell: (3,), in Å."""
        widths: Float64Array = 1 / np.linalg.norm(self._wrapped.cell.reciprocal(), axis=1)
        return widths

    @cached_property
    def _known(self) -> dict[float, tuple[Float64Array, IntArray, cKDTree]]:
        return {}

    def _images(self, cutoff: float) -> tuple[Float64Array, IntArray, cKDTree]:
        """Return all atoms, and then their images that are within the cutoff of the cell."""
        if cutoff not in self._known:
            inside = self._wrapped.get_scaled_positions(wrap=False)  # type: ignore[no-untyped-call]
            margins = cutoff / self._widths
            scaled, origins = [], []
            for shift in product(*[(0, -1, 1) if along else (0,) for along in self.atoms.pbc]):
                moved = inside + shift
                # Along directions that are not periodic atoms may be anywhere.
                near = ((moved >= -margins) & (moved <= 1 + margins)) | (np.array(shift) == 0)
                origins.append(np.flatnonzero(near.all(axis=1)))
                scaled.append(moved[origins[-1]])
            positions = np.concatenate(scaled) @ self._wrapped.cell.array
            self._known[cutoff] = positions, np.concatenate(origins), cKDTree(positions)
        return self._known[cutoff]


def _compact(positions: Float64Array, chosen: IntArray, size: int) -> Iterator[IntArray]:
    """Halve a structure along its longest side until the pieces are small enough."""
    n_parts = -(-len(chosen) // size)
    if n_parts <= 1:
        yield np.sort(chosen)
        return
    axis = int(np.argmax(np.ptp(positions[chosen], axis=0)))
    order = chosen[np.argsort(positions[chosen, axis], kind="stable")]
    middle = len(chosen) * (n_parts // 2) // n_parts
    for half in (order[:middle], order[middle:]):
        yield from _compact(positions, half, size)


# --- derivatives of power spectra, by featomic ---


@dataclass(frozen=True)
class Environments:
    """A batch of environments: of some `centers` of structures, each of which is in it once.

    `structures` (n_structures,) are their indices.
    """

    structures: IntArray
    surroundings: Sequence[Surroundings]
    centers: Sequence[IntArray]

    @cached_property
    def frames(self) -> list[Atoms]:
        """The structures."""
        return [one.atoms for one in self.surroundings]

    def __len__(self) -> int:
        return sum(map(len, self.centers))

    @cached_property
    def atom_offsets(self) -> IntArray:
        """Atoms of the structures, counted through all of them."""
        return offsets_of([len(atoms) for atoms in self.frames])

    @cached_property
    def owners(self) -> IntArray:
        """Structure of each environment, counted from 0 in this batch."""
        return np.repeat(np.arange(len(self.frames)), [len(chosen) for chosen in self.centers])

    @cached_property
    def center_atoms(self) -> IntArray:
        """Atom at the centre of each environment, counted through the batch."""
        return np.concatenate(self.centers) + self.atom_offsets[self.owners]


def batches(frames: Iterable[Atoms], size: int = BATCH) -> Iterator[Environments]:
    """Group environments: several small structures at a time, or a large one in parts."""
    group: list[tuple[int, Surroundings, IntArray]] = []

    def batch() -> Environments:
        structures, surroundings, centers = zip(*group, strict=True)
        return Environments(np.array(structures), surroundings, centers)

    for index, atoms in enumerate(frames):
        surroundings = Surroundings(atoms)
        for centers in surroundings.parts(size):
            if group and sum(len(some) for *_, some in group) + len(centers) > size:
                yield batch()
                group = []
            group.append((index, surroundings, centers))
    if group:
        yield batch()


class GradientBlock(NamedTuple):
    """Features of one pair of species, and their derivatives.

    Attributes
    ----------
    columns : slice
        Which features of a scale these c are.
    rows : (n,) array of int
        Environments that have them, counted through the batch.
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
    edges: IntArray
    atoms: IntArray
    positions: Float64Array
    strain: Float64Array | None


def spectra(engine: FeatomicEngine, batch: Environments) -> Float64Array:
    """Return the power spectra of a batch, without derivatives: (n, D)."""
    atoms, _, centers = _cut(engine, batch)
    (piece,) = engine.pieces(atoms, centers, dtype=np.float64)
    return np.asarray(piece.values, dtype=np.float64)


def spectra_and_gradients(
    engine: FeatomicEngine, batch: Environments, *, strain: bool = False
) -> tuple[Float64Array, list[GradientBlock]]:
    """Return the power spectra of a batch (n, D), and blocks of their derivatives."""
    frames, origins, centers = _cut(engine, batch)
    # Atom of the batch that each atom of the cut-outs is, or is an image of.
    atom_of = np.concatenate([batch.atom_offsets[k] + some for k, some in enumerate(origins)])
    first_cut = offsets_of([len(some) for some in origins])
    P, blocks = np.zeros((len(batch), engine.n_features)), []
    wanted = ["positions", "strain"][: 1 + strain]
    for columns, rows, block in engine.blocks(frames, centers, wanted):
        moved = block.gradient("positions")
        owner, system, atom = np.asarray(moved.samples.values).T
        P[rows, columns] = block.values
        # Entries come environment by environment.
        edges = np.searchsorted(owner, np.arange(len(rows) + 1))
        atoms, positions = atom_of[first_cut[system] + atom], np.asarray(moved.values)
        strains = np.asarray(block.gradient("strain").values) if strain else None
        blocks.append(GradientBlock(columns, rows, edges, atoms, positions, strains))
    return P, blocks


def _cut(
    engine: FeatomicEngine, batch: Environments
) -> tuple[list[Atoms], list[IntArray], list[IntArray]]:
    """Return the atoms, origins and centres of cut-outs of all structures."""
    pairs = zip(batch.surroundings, batch.centers, strict=True)
    cut = [one.around(centers, engine.scale.cutoff) for one, centers in pairs]
    return [c.atoms for c in cut], [c.origins for c in cut], [c.centers for c in cut]


# --- from the power spectra of one scale to the features of the kernel, and back ---


class PairMap(NamedTuple):
    """The part of P that belongs to one pair of species.

    Attributes
    ----------
    rows : slice
        Raw features of the pair.
    columns : (k,) array of int
        Features in y that depend on them, in ascending order.
    part : (c, k) array, optional
        P of these rows and columns; None for the identity.
    """

    rows: slice
    columns: IntArray
    part: Float64Array | None


@dataclass(frozen=True)
class ScaleFeatures:
    """From the power spectra of one scale to the features x of its kernel.

    Attributes
    ----------
    engine : FeatomicEngine
    exponent : float
        ζ.
    share : float
        Weight of this scale in the kernel.
    columns : slice
        Its features among those of all scales, as representatives are stored.
    projection : (D, q) array
        P, of compressed features or of pseudo-species. Otherwise it takes equal features together,
        p_nn′ and p_n′n of one species, which changes no product and saves a third of the
        multiplications.
    compressed : bool
        Whether representatives are multiplied by P already, as those of compressed features and
        of pseudo-species are.
    feature_scale : float, optional
        y is divided by this; None if features are normalised.
    """

    engine: FeatomicEngine
    exponent: float
    share: float
    columns: slice
    projection: Float64Array
    feature_scale: float | None
    compressed: bool

    @cached_property
    def maps(self) -> list[PairMap]:
        """P, one pair of species after the other."""
        maps = []
        for (one, other), rows in self.engine.pair_columns.items():
            columns = np.flatnonzero(np.any(self.projection[rows] != 0, axis=0))
            is_identity = not self.compressed and one != other
            part = None if is_identity else self.projection[rows][:, columns]
            maps.append(PairMap(rows, columns, part))
        return maps

    def features(self, P: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return x (n, q) and the divisors of y (n, 1), for power spectra (n, D)."""
        y = self.projected(P)
        if self.feature_scale is not None:
            lengths = np.full((len(y), 1), self.feature_scale)
        else:
            lengths = np.linalg.norm(y, axis=1, keepdims=True)
            lengths[lengths == 0] = 1.0
        return y / lengths, lengths

    def present(self, P: Float64Array) -> list[int]:
        """Return the pairs of species that some of the environments have, given (n, D)."""
        return [k for k, one in enumerate(self.maps) if np.any(P[:, one.rows])]

    def used(self, pairs: Sequence[int]) -> IntArray:
        """Return the columns of x that depend on the features of some pairs of species."""
        columns = [self.maps[k].columns for k in pairs]
        return np.unique(np.concatenate([np.empty(0, dtype=np.intp), *columns]))

    def projected(self, changes: Float64Array, pairs: Sequence[int] | None = None) -> Float64Array:
        """Return Δp P for changes (n, c) of the raw features of all or some pairs of species.

        They are given one pair after the other. Of some pairs, only the columns that they have
        `used` are returned; others do not change.
        """
        used = np.arange(self.projection.shape[1]) if pairs is None else self.used(pairs)
        projected, first = np.zeros((len(changes), len(used))), 0
        for one in self.maps if pairs is None else [self.maps[k] for k in pairs]:
            last = first + one.rows.stop - one.rows.start
            own = changes[:, first:last]
            own = own if one.part is None else own @ one.part
            projected[:, _places(used, one.columns)] += own
            first = last
        return projected

    def lifted(
        self, slopes: Float64Array, used: IntArray, pairs: Sequence[int]
    ) -> dict[int, Float64Array]:
        """Return b Pᵀ for b (n, R, k), of which the columns that are used are given.

        They are (n, R, c) arrays, by the first raw feature of each of the given pairs of species.
        """
        found = {}
        for rows, columns, part in (self.maps[k] for k in pairs):
            b = slopes[:, :, _places(used, columns)]
            if part is not None:
                b = (b.reshape(-1, b.shape[2]) @ part.T).reshape(*b.shape[:2], -1)
            found[rows.start] = b
        return found


def scale_features(representation: SoapRepresentation) -> list[ScaleFeatures]:
    """Return the features of each scale of a representation by featomic."""
    soap, projections = representation.soap, representation.projections
    total = sum(scale.weight for scale in soap.scales)
    found = []
    for s, scale in enumerate(soap.scales):
        engine = make_engine("featomic", scale, representation.species)
        assert isinstance(engine, FeatomicEngine)
        compressed = bool(projections)
        matrix = projections[s].matrix.astype(np.float64) if projections else None
        if isinstance(engine, PseudoSpeciesEngine):
            matrix, engine, compressed = engine.mixed(matrix), engine.plain, True
        elif matrix is None:
            matrix = _fold(engine)
        length = None if soap.normalize else representation.feature_scale
        columns, share = representation.columns[s], scale.weight / total
        found.append(
            ScaleFeatures(engine, soap.exponent, share, columns, matrix, length, compressed)
        )
    return found


def _fold(engine: FeatomicEngine) -> Float64Array:
    """Return (p_nn′, p_n′n) → (p_nn′ + p_n′n)/√2 for pairs of one species: (D, q)."""
    n_radial, n_blocks = engine.scale.n_radial, engine.scale.l_max + 1
    n, other = np.triu_indices(n_radial)
    same, column = np.zeros((n_radial, n_radial, len(n))), np.arange(len(n))
    same[n, other, column] = same[other, n, column] = np.where(n == other, 1.0, np.sqrt(0.5))
    of_one, of_two = (
        block_diag(*[same.reshape(-1, len(n))] * n_blocks),
        np.eye(n_radial**2 * n_blocks),
    )
    return np.asarray(block_diag(*[of_one if a == b else of_two for a, b in engine.pair_columns]))


def _places(used: IntArray, columns: IntArray) -> IntArray | slice:
    """Return where some columns are among those that are used: a slice, if they are neighbours."""
    places = np.searchsorted(used, columns)
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places
