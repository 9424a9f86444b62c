"""A part of a large structure, cut out with all that is around it.

Environments end at the cutoff. featomic, given some atoms of a structure, still spends time on all
the others, for each environment anew; a part without the rest makes that time independent of the
size of the structure. Images of atoms across a periodic boundary become atoms of their own, until
derivatives by their positions have been computed, which are those by the positions of the atoms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from ase import Atoms
from scipy.linalg import block_diag
from scipy.spatial import cKDTree

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.features.soap import FeatomicEngine, Representation, make_engine, offsets_of

#: Structures of fewer atoms are not worth it.
LARGE = 256
#: What distances may be wrong by after atoms have been moved by a lattice vector, in Å.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Cutting:
    """Atoms around some atoms of a structure.

    Attributes
    ----------
    atoms : Atoms
        Without a cell, if it was cut out.
    origins : (n,) array of int
        Which atom of the structure each of them is, or is an image of.
    centers : array of int
        Where the atoms in the middle are among them.
    """

    atoms: Atoms
    origins: IntArray
    centers: IntArray


@dataclass(frozen=True, eq=False)
class Surroundings:
    """A structure that can be cut to pieces.

    Attributes
    ----------
    atoms : Atoms
    """

    atoms: Atoms

    def parts(self, size: int) -> Iterator[IntArray]:
        """Yield all atoms, at most so many at a time; if they are many, near to one another."""
        if len(self.atoms) < LARGE:
            yield from np.array_split(np.arange(len(self.atoms)), -(-len(self.atoms) // size))
        else:
            yield from _compact(self._inside, np.arange(len(self.atoms)), size)

    def around(self, centers: IntArray, cutoff: float) -> Cutting:
        """Return some atoms, all that are within the cutoff (Å) of them, and perhaps others."""
        n = len(self.atoms)
        widths = self._widths[np.asarray(self.atoms.pbc)]
        # In a narrow cell an environment may have two images of an atom: they stay one atom.
        if n < LARGE or np.any(widths < 2 * (cutoff + _ROUNDING)):
            return Cutting(self.atoms, np.arange(n), centers)
        images = self._images(cutoff)
        found = images.tree.query_ball_point(images.positions[centers], cutoff + _ROUNDING)
        near = np.unique(np.concatenate([np.asarray(some, dtype=np.intp) for some in found]))
        origins = images.origins[near]
        atoms = Atoms(self.atoms.numbers[origins], images.positions[near])
        return Cutting(atoms, origins, np.searchsorted(near, centers))

    @cached_property
    def _cell(self) -> Float64Array:
        return np.asarray(self.atoms.cell.complete().array, dtype=np.float64)

    @cached_property
    def _widths(self) -> Float64Array:
        """Distances between the faces of the cell: (3,), in Å."""
        widths: Float64Array = 1 / np.linalg.norm(np.linalg.pinv(self._cell), axis=0)
        return widths

    @cached_property
    def _scaled(self) -> Float64Array:
        """Positions in units of the cell, moved into it along periodic directions."""
        scaled = np.linalg.solve(self._cell.T, self.atoms.positions.T).T
        periodic = np.asarray(self.atoms.pbc)
        scaled[:, periodic] -= np.floor(scaled[:, periodic])
        return scaled

    @property
    def _inside(self) -> Float64Array:
        positions: Float64Array = self._scaled @ self._cell
        return positions

    @cached_property
    def _known(self) -> dict[float, _Images]:
        return {}

    def _images(self, cutoff: float) -> _Images:
        """Return all atoms, and then their images that are within the cutoff of the cell."""
        if cutoff not in self._known:
            margins = (cutoff + _ROUNDING) / self._widths
            shifts = [(0, -1, 1) if periodic else (0,) for periodic in self.atoms.pbc]
            scaled, origins = [], []
            for shift in product(*shifts):
                moved = self._scaled + np.array(shift)
                inside = (moved >= -margins) & (moved <= 1 + margins)
                # Along directions that are not periodic atoms may be anywhere.
                near = np.all(inside | (np.array(shift) == 0), axis=1)
                scaled.append(moved[near])
                origins.append(np.flatnonzero(near))
            positions = np.concatenate(scaled) @ self._cell
            self._known[cutoff] = _Images(positions, np.concatenate(origins))
        return self._known[cutoff]


@dataclass(frozen=True, eq=False)
class _Images:
    positions: Float64Array
    origins: IntArray

    @cached_property
    def tree(self) -> cKDTree:
        return cKDTree(self.positions)


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


# Power spectra and their derivatives by positions and strain, as featomic computes them.
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


# From the power spectra of one scale to what its kernel sees, and derivatives back.
@dataclass(frozen=True)
class PairMap:
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

    def applied(self, changes: Float64Array) -> Float64Array:
        """Return Δp P for raw features (n, c): (n, k)."""
        return changes if self.part is None else changes @ self.part

    def lifted(self, slopes: Float64Array) -> Float64Array:
        """Return P b for b (n, R, k): (n, R, c)."""
        if self.part is None:
            return slopes
        n, R, k = slopes.shape
        return (slopes.reshape(n * R, k) @ self.part.T).reshape(n, R, -1)


@dataclass(frozen=True)
class ScaleFeatures:
    """From the power spectra of one scale to what its kernel sees.

    Attributes
    ----------
    engine : FeatomicEngine
    exponent : float
        ζ.
    share : float
        Weight of this scale in the kernel.
    columns : slice
        Its features among those of all scales, as representatives are stored.
    projection : (D, q) array, optional
        P, if there is compression.
    feature_scale : float, optional
        What y is divided by; None if features are normalised.
    """

    engine: FeatomicEngine
    exponent: float
    share: float
    columns: slice
    projection: Float64Array | None
    feature_scale: float | None

    @cached_property
    def maps(self) -> list[PairMap]:
        """P, part by part."""
        if self.projection is None:
            return _folds(self.engine)
        maps = []
        for rows in self.engine.pair_blocks:
            part = self.projection[rows]
            columns = np.flatnonzero(np.any(part != 0, axis=0))
            maps.append(PairMap(rows, columns, np.ascontiguousarray(part[:, columns])))
        return maps

    @cached_property
    def width(self) -> int:
        """Length of x, q."""
        if self.projection is not None:
            return int(self.projection.shape[1])
        return sum(len(one.columns) for one in self.maps)

    def features(self, P: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return x (n, q) and what y has been divided by (n, 1), for power spectra (n, D)."""
        y = self.projected(P)
        if self.feature_scale is not None:
            lengths = np.full((len(y), 1), self.feature_scale)
        else:
            lengths = np.linalg.norm(y, axis=1, keepdims=True)
            lengths[lengths == 0] = 1.0
        return y / lengths, lengths

    def representatives(self, stored: FloatArray) -> Float64Array:
        """Return the x of representatives (M, q), as a model stores those of all scales."""
        mine = stored[:, self.columns].astype(np.float64)
        return mine if self.projection is not None else self.projected(mine)

    def present(self, P: Float64Array) -> list[int]:
        """Return the pairs of species that some of the environments have, given (n, D)."""
        return [k for k, one in enumerate(self.maps) if np.any(P[:, one.rows])]

    def used(self, pairs: Sequence[int]) -> IntArray:
        """Return the columns of x that depend on the features of some pairs of species."""
        columns = [self.maps[k].columns for k in pairs]
        return np.unique(np.concatenate([np.empty(0, dtype=np.intp), *columns]))

    def projected(self, changes: Float64Array, pairs: Sequence[int] | None = None) -> Float64Array:
        """Return Δp P for changes of the raw features of all or some pairs of species.

        Parameters
        ----------
        changes : (n, c) array
            Features of these pairs, one after the other.
        pairs : sequence of int, optional
            Which of the pairs of species they are.

        Returns
        -------
        (n, q) or (n, k) array
            The columns `used` by these pairs; others do not change.
        """
        used = np.arange(self.width) if pairs is None else self.used(pairs)
        projected = np.zeros((len(changes), len(used)))
        first = 0
        for one in self.maps if pairs is None else [self.maps[k] for k in pairs]:
            last = first + one.rows.stop - one.rows.start
            projected[:, _places(used, one.columns)] += one.applied(changes[:, first:last])
            first = last
        return projected

    def lifted(
        self, slopes: Float64Array, used: IntArray, pairs: Sequence[int]
    ) -> dict[int, Float64Array]:
        """Return P b for b (n, R, k), of which the columns that are used are given.

        Returns
        -------
        dict of (n, R, c) arrays
            By the first raw feature of each pair of species that is asked for.
        """
        chosen = [self.maps[k] for k in pairs]
        return {
            one.rows.start: one.lifted(slopes[:, :, _places(used, one.columns)]) for one in chosen
        }

    def powers(self, products: Float64Array) -> Float64Array:
        """Return (x·X)^(ζ−1) for products x·X, of which rounding may have made some negative.

        Compression may have, too. If ζ is fractional they count as zero, as they do in the kernel.
        """
        if not float(self.exponent).is_integer():
            products = np.maximum(products, 0.0)
        powers: Float64Array = products ** (self.exponent - 1)
        return powers


def scale_features(representation: Representation) -> list[ScaleFeatures]:
    """Return the features of each scale of a representation by featomic."""
    soap = representation.soap
    weights = np.array([scale.weight for scale in soap.scales])
    ends = np.cumsum(representation.widths).tolist()
    found = []
    for s, scale in enumerate(soap.scales):
        engine = make_engine("featomic", scale, representation.species)
        assert isinstance(engine, FeatomicEngine)
        projections = representation.projections
        found.append(
            ScaleFeatures(
                engine=engine,
                exponent=soap.exponent,
                share=float(weights[s] / weights.sum()),
                columns=slice(ends[s] - representation.widths[s], ends[s]),
                projection=projections[s].matrix.astype(np.float64) if projections else None,
                feature_scale=None if soap.normalize else representation.feature_scale,
            )
        )
    return found


def _places(used: IntArray, columns: IntArray) -> IntArray | slice:
    """Return where some columns are among those that are used: a slice, if they are neighbours."""
    places = np.searchsorted(used, columns)
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def _folds(engine: FeatomicEngine) -> list[PairMap]:
    """Return the map that takes equal features together, pair by pair."""
    maps, first = [], 0
    for (one, other), rows in engine.pair_columns.items():
        part = _fold(engine.scale.n_radial, engine.scale.l_max) if one == other else None
        size = rows.stop - rows.start if part is None else part.shape[1]
        maps.append(PairMap(rows, np.arange(first, first + size), part))
        first += size
    return maps


def _fold(n_radial: int, l_max: int) -> Float64Array:
    """Return (p_nn′, p_n′n) → (p_nn′ + p_n′n)/√2, for features in the order l, n, n′."""
    n, other = np.triu_indices(n_radial)
    same = np.zeros((n_radial, n_radial, len(n)))
    column = np.arange(len(n))
    same[n, other, column] = same[other, n, column] = np.where(n == other, 1.0, np.sqrt(0.5))
    fold: Float64Array = block_diag(*[same.reshape(-1, len(n))] * (l_max + 1))
    return fold
