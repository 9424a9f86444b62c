"""SOAP features and their derivatives, by featomic: the `DifferentiableFeatures` of SOAP.

featomic expands the density of each species α around an atom in coefficients c_αnlm. They are
contracted here to the power spectrum p_αnα′n′l ∝ Σ_m c_αnlm c_α′n′lm, of which y = pP are the raw
features, with the projection P. A moving atom changes the density of its own species alone, so that

    Δy = Σ_α′ (Σ_m Δc_αnlm c_α′n′lm) Q_αα′,

where the rows of Q_αα′ are those of P that belong to α and α′, in the order of l, n and n′. Kernel
rows take this for all neighbours of an environment (forward). Predictions take the derivatives
∂e/∂c of R energies, and multiply them with Δc (backward).

featomic, given some atoms of a large structure, still spends time on all others. Large structures
are therefore cut to parts, each with everything within the cutoff. Images of atoms across a
periodic boundary become atoms of their own until derivatives by their positions, which are those
by the positions of the atoms, have been computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement, product

import numpy as np
from ase import Atoms
from scipy.sparse import csc_array
from scipy.spatial import cKDTree

from qualms.arrays import BoolArray, Float64Array, IntArray, whole_blocks
from qualms.features.base import VOIGT, Changes, Tape
from qualms.features.soap import FeatomicEngine, in_cell, order_factor

#: Structures of fewer atoms are not cut.
LARGE = 256
#: Environments in memory at once: with derivatives, some 50 MB in a dense crystal; and without.
BATCH, VALUES = 64, 1024
#: Products of densities that are made at once; backward, few enough for a cache.
PRODUCTS, CACHED = 2_000_000, 300_000


# --- parts of large structures ---


@dataclass(frozen=True, eq=False)
class Surroundings:
    """A structure that can be cut to parts, with everything within a cutoff (Å) of them.

    It has a number among all structures, and a `first` atom among those of all.
    """

    atoms: Atoms
    cutoff: float
    number: int = 0
    first: int = 0

    def parts(self, size: int) -> Iterator[IntArray]:
        """Yield all atoms, at most `size` at a time; if they are many, close to one another."""
        everything = np.arange(len(self.atoms))
        if len(self.atoms) < LARGE:
            yield from np.array_split(everything, -(-len(everything) // size))
        else:
            yield from _compact(self._wrapped.positions, everything, size)

    def around(self, centers: IntArray) -> tuple[Atoms, IntArray, IntArray]:
        """Return some atoms and all that are within the cutoff of them, and perhaps others.

        Parameters
        ----------
        centers : (n,) array of int
            In ascending order.

        Returns
        -------
        cutout : Atoms
            Without a cell, unless it is the whole structure.
        origins : array of int
            The atoms of the structure that those of the cut-out are, or are images of.
        places : (n,) array of int
            Where the centres are in the cut-out.
        """
        n = len(self.atoms)
        # In a narrow cell an environment may have two images of an atom: they stay one atom.
        if n < LARGE or np.any(self._widths[self.atoms.pbc] < 2 * self._reach):
            return self.atoms, np.arange(n), centers
        positions, origins, tree = self._images
        neighbours = tree.query_ball_point(positions[centers], self._reach)
        near = np.unique(np.concatenate([np.asarray(some, dtype=np.intp) for some in neighbours]))
        atoms = Atoms(self.atoms.numbers[origins[near]], positions[near])
        return atoms, origins[near], np.searchsorted(near, centers)

    @property
    def _reach(self) -> float:
        """The cutoff, and the error of distances after atoms were moved by a lattice vector."""
        return self.cutoff + 1e-6

    @cached_property
    def _wrapped(self) -> Atoms:
        """The structure with its atoms in the cell, along periodic directions."""
        numbers, cell, pbc = self.atoms.numbers, self.atoms.cell.complete(), self.atoms.pbc
        wrapped = Atoms(numbers, self.atoms.positions, cell=cell, pbc=pbc)
        wrapped.wrap(eps=0)  # type: ignore[no-untyped-call]
        return wrapped

    @cached_property
    def _widths(self) -> Float64Array:
        """Distances between the faces of the cell: (3,), in Å."""
        widths: Float64Array = 1 / np.linalg.norm(self._wrapped.cell.reciprocal(), axis=1)
        return widths

    @cached_property
    def _images(self) -> tuple[Float64Array, IntArray, cKDTree]:
        """All atoms, and then their images that are within the cutoff of the cell."""
        inside = self._wrapped.get_scaled_positions(wrap=False)  # type: ignore[no-untyped-call]
        margins = self._reach / self._widths
        scaled, origins = [], []
        for shift in product(*[(0, -1, 1) if along else (0,) for along in self.atoms.pbc]):
            moved = inside + shift
            # Along directions that are not periodic atoms may be anywhere.
            near = ((moved >= -margins) & (moved <= 1 + margins)) | (np.array(shift) == 0)
            origins.append(np.flatnonzero(near.all(axis=1)))
            scaled.append(moved[origins[-1]])
        positions = np.concatenate(scaled) @ self._wrapped.cell.array
        return positions, np.concatenate(origins), cKDTree(positions)


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


def batches(
    frames: Sequence[Atoms], cutoff: float, size: int
) -> Iterator[list[tuple[Surroundings, IntArray]]]:
    """Yield about `size` environments at a time: structures, each once, and atoms of them."""
    batch: list[tuple[Surroundings, IntArray]] = []
    first = 0
    for number, atoms in enumerate(frames):
        surroundings = Surroundings(atoms, cutoff, number, first)
        first += len(atoms)
        for centers in surroundings.parts(size):
            if batch and sum(len(some) for _, some in batch) + len(centers) > size:
                yield batch
                batch = []
            batch.append((surroundings, centers))
    if batch:
        yield batch


# --- densities and their changes, and the chain rule through contraction and projection ---


@dataclass(frozen=True, eq=False)
class SoapTape(Tape):
    """Densities of one scale around a batch of atoms, and the features that follow from them.

    Atoms of a structure are in the order of their species, and environments in that of atoms. See
    `FeatomicEngine.expand` for species, coefficients and strain.
    """

    features: ScaleFeatures
    species: tuple[int, ...]
    coefficients: list[Float64Array]
    strain: list[Float64Array]
    moves: Moves | None

    @cached_property
    def columns(self) -> IntArray:
        """Features of pairs of the species around these atoms."""
        return self.features.columns(combinations_with_replacement(self.species, 2))

    @cached_property
    def y(self) -> Float64Array:
        """Raw features: (n, q)."""
        scale, K = self.features.engine.scale, len(self.species)
        n_radial, (first, second) = scale.n_radial, np.triu_indices(K)
        shape = len(self.owners), len(first), scale.l_max + 1, n_radial, n_radial
        spectra = np.empty(shape)
        for order, c in enumerate(self.coefficients):
            products = (c.transpose(0, 2, 1) @ c).reshape(-1, K, n_radial, K, n_radial)
            spectra[:, :, order] = products.swapaxes(2, 3)[:, first, second]
        y = np.zeros((len(spectra), self.features.n_features))
        for pair, (a, b) in enumerate(combinations_with_replacement(self.species, 2)):
            columns, matrix = self.features.coupling(a, b)
            flat = spectra[:, pair].reshape(len(y), -1)
            y[:, columns] += flat @ matrix / (1 + (a == b))
        return y

    def pull_back(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[Float64Array, Float64Array | None]:
        """Return derivatives by positions, and perhaps by strain."""
        assert self.moves is not None
        moves, K, R = self.moves, len(self.species), slopes.shape[1]
        changes = np.concatenate([d.reshape(*d.shape[:2], -1) for d in moves.densities], axis=2)
        g = len(changes)
        pulled = np.empty((g, 3, R))
        size, done = max(1, CACHED // (R * K**2 * self.features.engine.n_products)), 0
        for key, begin, end in _runs(moves.owners * K + moves.species):
            i, a = divmod(key, K)
            if i >= done:
                first, done = i, i + size
                by_density = self._by_density(slopes, columns, slice(first, done))
            into = pulled[begin:end].reshape(-1, R)
            flat = changes[begin:end].reshape(len(into), -1)
            np.matmul(flat, by_density[i - first, a].T, out=into)
        pulled[moves.is_center] = 0.0
        # An atom that is pushed pulls the centre of the environment.
        rows = np.stack([moves.atoms, self.centers[moves.owners]], axis=1)
        edges, signs = 2 * np.arange(g + 1), np.tile([1.0, -1.0], g)
        sums = csc_array((signs, rows.ravel(), edges), shape=(len(self.atoms), g))
        positions = np.asarray(sums @ pulled.reshape(g, 3 * R)).reshape(-1, 3, R)
        if not self.strain:
            return positions, None
        strain = np.zeros((len(self.structures), 6, R))
        each = self.push_strain()[:, :, columns] @ slopes.transpose(0, 2, 1)
        np.add.at(strain, self.owners, each)
        return positions, strain

    def _by_density(self, slopes: Float64Array, columns: IntArray, atoms: slice) -> Float64Array:
        """Return ∂e/∂c around some atoms, l by l: (n, K, R, Σ_l (2l + 1) n_radial)."""
        scale, species = self.features.engine.scale, self.species
        slopes, K, n_radial = slopes[atoms], len(species), scale.n_radial
        n, R, _ = slopes.shape
        lifted = np.empty((scale.l_max + 1, n, R, K, n_radial, K, n_radial))
        for a, b in combinations_with_replacement(range(K), 2):
            features, matrix = self.features.coupling(species[a], species[b])
            by_features = slopes[:, :, np.searchsorted(columns, features)]
            flat = by_features.reshape(n * R, -1) @ matrix.T
            of_pair = flat.reshape(n, R, -1, n_radial, n_radial).transpose(2, 0, 1, 3, 4)
            lifted[:, :, :, a, :, b] = of_pair
            if a != b:
                lifted[:, :, :, b, :, a] = of_pair.swapaxes(3, 4)
        parts = []
        for c, of_order in zip(self.coefficients, lifted, strict=True):
            flat = of_order.reshape(n, R * K * n_radial, -1) @ c[atoms].transpose(0, 2, 1)
            turned = flat.reshape(n, R, K, n_radial, -1).transpose(0, 2, 1, 4, 3)
            parts.append(turned.reshape(n, K, R, -1))
        return np.concatenate(parts, axis=3)

    def push_forward(self) -> Iterator[Changes]:
        """Yield the changes of y, of one species of moving atoms at a time."""
        assert self.moves is not None
        moves, K = self.moves, len(self.species)
        size = PRODUCTS // (3 * K * self.features.engine.n_products)
        # Of whole environments.
        edges = np.append(np.flatnonzero(np.diff(moves.owners, prepend=-1)), len(moves.owners))
        for first, last in whole_blocks(edges, size):
            begin, end = int(edges[first]), int(edges[last])
            owners, atoms = moves.owners[begin:end], moves.atoms[begin:end]
            products = self._products([d[begin:end] for d in moves.densities], owners)
            for a, z in enumerate(self.species):
                has_species = (moves.species[begin:end] == a) & ~moves.is_center[begin:end]
                if len(rows := np.flatnonzero(has_species)):
                    columns, values = self._projected(products[rows], z)
                    yield Changes(owners[rows], atoms[rows], columns, values)

    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, q)."""
        n, n_radial = len(self.owners), self.features.engine.scale.n_radial
        changes = np.zeros((n, 6, self.features.n_features))
        for a, z in enumerate(self.species):
            radial = slice(a * n_radial, (a + 1) * n_radial)
            densities = [d[:, *VOIGT][..., radial] for d in self.strain]
            columns, values = self._projected(self._products(densities, np.arange(n)), z)
            changes[:, :, columns] += values
        return changes

    def _products(self, densities: Sequence[Float64Array], owners: IntArray) -> Float64Array:
        """Return Σ_m Δc_nlm c_α′n′lm of changes (g, d, 2l + 1, n): (g, d, α′, (l, n, n′)).

        The environments that they belong to are in ascending order.
        """
        (g, d, _, n_radial), K = densities[0].shape, len(self.species)
        products = np.empty((g, d, K, len(densities), n_radial, n_radial))
        runs, each = list(_runs(owners)), d * n_radial
        for order, (change, c) in enumerate(zip(densities, self.coefficients, strict=True)):
            turned = change.swapaxes(2, 3).reshape(g * each, -1)
            flat = np.empty((g * each, K * n_radial))
            for i, begin, end in runs:
                part = slice(begin * each, end * each)
                np.matmul(turned[part], c[i], out=flat[part])
            of_order = flat.reshape(g, d, n_radial, K, n_radial)
            products[:, :, :, order] = of_order.swapaxes(2, 3)
        return products.reshape(g, d, K, -1)

    def _projected(self, products: Float64Array, z: int) -> tuple[IntArray, Float64Array]:
        """Return which features (k,) the density of a species changes, and how: (g, d, k)."""
        g, d, K, c = products.shape
        columns = self.features.columns((z, other) for other in self.species)
        changes, rows = np.zeros((g * d, len(columns))), products.reshape(g * d, K, c)
        for o, other in enumerate(self.species):
            of_pair, matrix = self.features.coupling(z, other)
            changes[:, np.searchsorted(columns, of_pair)] += rows[:, o] @ matrix
        return columns, changes.reshape(g, d, -1)


@dataclass(frozen=True, eq=False)
class Moves:
    """Changes of the densities around atoms with the positions of g atoms near them.

    Environment by environment, and in each of them species by species.
    """

    owners: IntArray  #: (g,): the environment
    atoms: IntArray  #: (g,): the atom that moves, a place in `SoapTape.atoms`
    species: IntArray  #: (g,): its species, a place in `SoapTape.species`
    is_center: BoolArray  #: (g,): whether it is the centre: these changes are not meaningful
    densities: list[Float64Array]  #: (g, 3, 2l + 1, n_radial), in 1/Å, for each l


def _runs(keys: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield the keys (n,), equal ones of which are next to each other, and where they are."""
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    if len(keys):
        yield from zip(keys[edges[:-1]].tolist(), edges[:-1], edges[1:], strict=True)


@dataclass(frozen=True, eq=False)
class ScaleFeatures:
    """The features of one scale.

    Attributes
    ----------
    engine : FeatomicEngine
    projection : (D, q) array, optional
        P of compressed features.
    feature_scale : float, optional
        y is divided by this; None if features are normalised.
    """

    engine: FeatomicEngine
    projection: Float64Array | None
    feature_scale: float | None
    _couplings: dict[tuple[int, int], tuple[IntArray, Float64Array]] = field(default_factory=dict)

    @property
    def n_features(self) -> int:
        """Number q of features."""
        return self.engine.n_features if self.projection is None else self.projection.shape[1]

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[SoapTape]:
        """Yield all environments in batches; those of a large structure are in several of them."""
        for batch in batches(frames, self.engine.scale.cutoff, BATCH if gradients else VALUES):
            yield self._tape(batch, gradients)

    def _tape(
        self, batch: Sequence[tuple[Surroundings, IntArray]], gradients: Sequence[str]
    ) -> SoapTape:
        """Expand the densities of a batch."""
        cutouts, samples, origins = [], [], []
        for s, (surroundings, centers) in enumerate(batch):
            cutout, origin, places = surroundings.around(centers)
            order = np.argsort(cutout.numbers, kind="stable")
            centers = np.sort(np.argsort(order)[places])
            samples.append(np.stack([np.full_like(centers, s), centers], axis=1))
            origins.append(surroundings.first + origin[order])
            numbers, positions = cutout.numbers[order], cutout.positions[order]
            ordered = Atoms(numbers, positions, cell=cutout.cell, pbc=cutout.pbc)
            cutouts.append(in_cell(ordered, self.engine.scale))
        owners, local = (every := np.concatenate(samples)).T
        # The atom that each atom of the cut-outs is, or is an image of.
        atoms, place = np.unique(np.concatenate(origins), return_inverse=True)
        first = np.cumsum([0, *map(len, origins)])
        centers = place[first[owners] + local]
        expansion = self.engine.expand(cutouts, every, strain="strain" in gradients)
        moves = None
        if gradients:
            which, densities = self.engine.expand_neighbours(cutouts, every)
            sample, system, atom = which.T
            here = first[system] + atom
            number = np.concatenate([cutout.numbers for cutout in cutouts])[here]
            species = np.searchsorted(expansion[0], number)
            moves = Moves(sample, place[here], species, atom == local[sample], densities)
        structures = np.array([surroundings.number for surroundings, _ in batch])
        shared = structures, atoms, owners, centers, self.feature_scale
        return SoapTape(*shared, self, *expansion, moves)

    def columns(self, pairs: Iterable[tuple[int, int]]) -> IntArray:
        """Return the features that depend on pairs of species, in ascending order."""
        return np.unique(np.concatenate([self.coupling(*pair)[0] for pair in pairs]))

    def coupling(self, z: int, other: int) -> tuple[IntArray, Float64Array]:
        """Return how features depend on the density of a species, together with another one.

        Returns
        -------
        columns : (k,) array of int
            Features in y that do, in ascending order.
        matrix : ((l, n, n′), k) array
            Q_αα′ of the module.
        """
        if (z, other) not in self._couplings:
            self._couplings[z, other] = self._coupling(z, other)
        return self._couplings[z, other]

    def _coupling(self, z: int, other: int) -> tuple[IntArray, Float64Array]:
        """Compute a coupling by the weights of both elements in pairs of pseudo-species k ≤ m."""
        W, scale = self.engine.weights, self.engine.scale
        n, n_orders = scale.n_radial, scale.l_max + 1
        a, b = np.searchsorted(self.engine.species, (z, other))
        k, m = np.array([*combinations_with_replacement(range(W.shape[1]), 2)]).T
        # Pairs of different species are stored once, times √2.
        root = np.where(k == m, 1.0, np.sqrt(2.0))
        direct, exchanged = root * W[a, k] * W[b, m], root * W[b, k] * W[a, m]
        pairs = np.flatnonzero((direct != 0) | (exchanged != 0))
        columns = np.concatenate([[*self.engine.pair_columns.values()][pair] for pair in pairs])
        if self.projection is None:
            rows = np.eye(len(columns))
        else:
            rows = self.projection[columns]
            columns = np.flatnonzero(np.any(rows != 0, axis=0))
            rows = rows[:, columns]
        rows = rows.reshape(len(pairs), n_orders, n, n, len(columns))
        matrix = np.tensordot(direct[pairs], rows, axes=1)
        matrix = matrix + np.tensordot(exchanged[pairs], rows, axes=1).swapaxes(1, 2)
        for order in range(n_orders):
            matrix[order] *= order_factor(order)
        return columns, matrix.reshape(self.engine.n_products, len(columns))
