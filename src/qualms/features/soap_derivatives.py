"""SOAP features and their derivatives, by featomic: the `DifferentiableFeatures` of SOAP.

featomic expands the density of each species α around an atom in coefficients c_αnlm. They are
contracted here to the power spectrum p_αnα′n′l ∝ Σ_m c_αnlm c_α′n′lm, of which y = pP are the raw
features, with the projection P. A moving atom changes the density of its own species alone, so that

    Δy = Σ_α′ (Σ_m Δc_αnlm c_α′n′lm) Q_αα′,

where the rows of Q_αα′ are those of P that belong to α and α′, in the order of l, n and n′. This is
either computed for all neighbours of an environment (forward), or the other way round the
derivatives ∂e/∂c of R energies are, and multiplied with Δc (backward): whatever takes less time.

featomic, given some atoms of a large structure, still spends time on all others. Large structures
are therefore cut to parts, each with everything within the cutoff. Images of atoms across a
periodic boundary become atoms of their own until derivatives by their positions, which are those
by the positions of the atoms, have been computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import numpy as np
from ase import Atoms
from scipy.linalg import block_diag
from scipy.sparse import csc_array
from scipy.spatial import cKDTree

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.features.base import VOIGT, Changes, Pulled, offsets_of
from qualms.features.soap import (
    Expansion,
    FeatomicEngine,
    PseudoSpeciesEngine,
    SoapRepresentation,
    System,
    make_engine,
    order_factor,
)

#: Structures of fewer atoms are not cut.
LARGE = 256
#: Environments whose derivatives are in memory at once: some 50 MB in a dense crystal.
BATCH = 64
#: Environments whose features are in memory at once, without derivatives.
VALUES = 1024
#: Products of densities that are made at once; in predictions, few enough for a cache.
_ELEMENTS, _CACHED = 2_000_000, 300_000
#: Multiplications that take as long as copying a number.
_COPY = 10
#: How much longer a multiplication takes backward: the arrays are larger.
_SLOWER = 1.3
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


# --- batches of environments ---


@dataclass(frozen=True)
class Environments:
    """A batch of environments: of some `centers` of structures, each of which is in it once.

    `structures` (n_structures,) are their indices, and `first` (n_structures,) their first atoms,
    counted through all structures.
    """

    structures: IntArray
    first: IntArray
    surroundings: Sequence[Surroundings]
    centers: Sequence[IntArray]

    def __len__(self) -> int:
        return sum(map(len, self.centers))

    def cut(self, cutoff: float) -> list[Cutout]:
        """Return a cut-out of each structure."""
        pairs = zip(self.surroundings, self.centers, strict=True)
        return [one.around(centers, cutoff) for one, centers in pairs]


def batches(frames: Sequence[Atoms], size: int = BATCH) -> Iterator[Environments]:
    """Group environments: several small structures at a time, or a large one in parts."""
    group: list[tuple[int, int, Surroundings, IntArray]] = []

    def batch() -> Environments:
        structures, first, surroundings, centers = zip(*group, strict=True)
        return Environments(np.array(structures), np.array(first), surroundings, centers)

    first = offsets_of([len(atoms) for atoms in frames]).tolist()
    for index, atoms in enumerate(frames):
        surroundings = Surroundings(atoms)
        for centers in surroundings.parts(size):
            if group and sum(len(some) for *_, some in group) + len(centers) > size:
                yield batch()
                group = []
            group.append((index, first[index], surroundings, centers))
    if group:
        yield batch()


# --- densities and their changes, and the chain rule through contraction and projection ---


@dataclass(frozen=True, eq=False)
class SoapTape:
    """Densities of one scale around a batch of atoms, and the features that follow from them.

    Atoms of a structure are in the order of their species, and environments in that of atoms.
    """

    features: ScaleFeatures
    structures: IntArray
    atoms: IntArray
    owners: IntArray
    centers: IntArray
    expansion: Expansion
    moves: Moves | None

    @cached_property
    def columns(self) -> IntArray:
        """Features of pairs of the species around these atoms."""
        return self.features.used(self.expansion.species)

    @cached_property
    def x(self) -> Float64Array:
        """Features of the kernel: (n, q)."""
        x: Float64Array = self._raw / self.lengths
        return x

    @cached_property
    def lengths(self) -> Float64Array:
        """Divisors of y: (n, 1)."""
        if self.features.feature_scale is not None:
            return np.full((len(self._raw), 1), self.features.feature_scale)
        lengths: Float64Array = np.sqrt(np.einsum("ij,ij->i", self._raw, self._raw))[:, None]
        lengths[lengths == 0] = 1.0
        return lengths

    @property
    def normalized(self) -> bool:
        """Whether `lengths` are |y|, and not constants."""
        return self.features.feature_scale is None

    @cached_property
    def _raw(self) -> Float64Array:
        """The features y (n, q)."""
        scale, species = self.features.engine.scale, self.expansion.species
        K, n_radial = len(species), scale.n_radial
        first, second = np.triu_indices(K)
        n_orders = scale.l_max + 1
        spectra = np.empty((len(self.owners), len(first), n_orders, n_radial, n_radial))
        for order, c in enumerate(self.expansion.coefficients):
            products = (c.transpose(0, 2, 1) @ c).reshape(-1, K, n_radial, K, n_radial)
            spectra[:, :, order] = products.swapaxes(2, 3)[:, first, second]
        y = np.zeros((len(spectra), self.features.n_features))
        for pair, (a, b) in enumerate(combinations_with_replacement(species, 2)):
            coupling = self.features.coupling(a, b)
            y[:, coupling.columns] += coupling.project(spectra[:, pair]) / (1 + (a == b))
        return y

    def pull_back(self, slopes: Float64Array, columns: IntArray) -> Pulled:
        """Return derivatives by positions, and perhaps by strain."""
        x, R = self.x[:, columns], slopes.shape[1]
        along = slopes @ x[:, :, None] * self.normalized
        # ∂e/∂y = (b − (x·b) x)/|y|: the sum is taken later, of fewer numbers.
        slopes = np.concatenate([slopes, x[:, None, :]], axis=1)

        def combined(owners: IntArray, changes: Float64Array) -> Float64Array:
            both = changes[..., :R] - changes[..., R:] * along[owners].swapaxes(1, 2)
            both /= self.lengths[owners][:, :, None]
            return both

        pull = self._pull_forward if self._prefers_forward(R) else self._pull_backward
        owners, atoms, changes = pull(slopes, columns)
        changes, g = combined(owners, changes), len(owners)
        # An atom that is pushed pulls the centre of the environment.
        rows, signs = np.stack([atoms, self.centers[owners]], axis=1), np.tile([1.0, -1.0], g)
        edges, shape = 2 * np.arange(g + 1), (len(self.atoms), g)
        sums = csc_array((signs, rows.ravel(), edges), shape=shape)
        positions = np.asarray(sums @ changes.reshape(g, 3 * R)).reshape(-1, 3, R)
        if not self.expansion.strain:
            return Pulled(positions, None)
        strain = np.zeros((len(self.structures), 6, R))
        each = self.push_strain()[:, :, columns] @ slopes.transpose(0, 2, 1)
        np.add.at(strain, self.owners, combined(np.arange(len(each)), each))
        return Pulled(positions, strain)

    def _prefers_forward(self, R: int) -> bool:
        """Whether derivatives of R energies take less time forward: multiplications are counted."""
        assert self.moves is not None
        n, rows, species = len(self.owners), 3 * len(self.moves.owners), self.expansion.species
        scale, K = self.features.engine.scale, len(species)
        density = scale.n_radial * (scale.l_max + 1) ** 2
        contract = density * scale.n_radial * K
        project = self.features.cost(species)
        k = sum(len(self.features.used_with(z, species)) for z in species) / K
        forward = rows * (contract + 2 * project / (K + 1) + k * R)
        backward = n * R * (K * contract + project) + rows * density * R
        return bool(forward < _SLOWER * backward)

    def _pull_forward(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[IntArray, IntArray, Float64Array]:
        """Return environments, atoms, and ∂e/∂r (g, 3, R) for slopes ∂e/∂y (n, R, k)."""
        owners, atoms, found = [], [], [np.empty((0, 3, slopes.shape[1]))]
        for changes in self._changes(_CACHED):
            values, lowest = changes.values, changes.owners[0]
            b = slopes[lowest : changes.owners[-1] + 1, :, _places(columns, changes.columns)]
            pulled = np.empty((*values.shape[:2], b.shape[1]))
            for i, begin, end in _runs(changes.owners):
                into = pulled[begin:end].reshape(-1, b.shape[1])
                np.matmul(values[begin:end].reshape(len(into), -1), b[i - lowest].T, out=into)
            owners.append(changes.owners)
            atoms.append(changes.atoms)
            found.append(pulled)
        return _joined(owners), _joined(atoms), np.concatenate(found)

    def _pull_backward(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[IntArray, IntArray, Float64Array]:
        """Return the same by way of the derivatives by densities."""
        assert self.moves is not None
        moves, K, R = self.moves, len(self.expansion.species), slopes.shape[1]
        changes = np.concatenate([d.reshape(*d.shape[:2], -1) for d in moves.densities], axis=2)
        pulled = np.empty((len(changes), 3, R))
        size, done = max(1, _CACHED // (R * K * self._n_products)), 0
        for key, begin, end in _runs(moves.owners * K + moves.species):
            i, a = divmod(key, K)
            if i >= done:
                first, done = i, i + size
                by_density = self._by_density(slopes, columns, slice(first, done))
            into = pulled[begin:end].reshape(-1, R)
            flat = changes[begin:end].reshape(len(into), -1)
            np.matmul(flat, by_density[i - first, a].T, out=into)
        pulled[moves.is_center] = 0.0
        return moves.owners, moves.atoms, pulled

    def _by_density(self, slopes: Float64Array, columns: IntArray, some: slice) -> Float64Array:
        """Return ∂e/∂c around some atoms, l by l: (n, K, R, Σ_l (2l + 1) n_radial)."""
        scale, species = self.features.engine.scale, self.expansion.species
        slopes, K, n_radial = slopes[some], len(species), scale.n_radial
        n, R, _ = slopes.shape
        lifted = np.empty((scale.l_max + 1, n, R, K, n_radial, K, n_radial))
        for a, b in combinations_with_replacement(range(K), 2):
            coupling = self.features.coupling(species[a], species[b])
            own = slopes[:, :, _places(columns, coupling.columns)].reshape(n * R, -1)
            of_pair = coupling.lift(own).reshape(n, R, -1, n_radial, n_radial)
            of_pair = of_pair.transpose(2, 0, 1, 3, 4)
            lifted[:, :, :, a, :, b] = of_pair
            if a != b:
                lifted[:, :, :, b, :, a] = of_pair.swapaxes(3, 4)
        found = []
        for c, of_order in zip(self.expansion.coefficients, lifted, strict=True):
            flat = of_order.reshape(n, R * K * n_radial, -1) @ c[some].transpose(0, 2, 1)
            turned = flat.reshape(n, R, K, n_radial, -1).transpose(0, 2, 1, 4, 3)
            found.append(turned.reshape(n, K, R, -1))
        return np.concatenate(found, axis=3)

    def push_forward(self) -> Iterator[Changes]:
        """Yield the changes of y, of one species of moving atoms at a time."""
        yield from self._changes(_ELEMENTS)

    def _changes(self, size: int) -> Iterator[Changes]:
        """Yield the changes of y with about so many products of densities at a time."""
        assert self.moves is not None
        moves, species = self.moves, self.expansion.species
        for begin, end in moves.parts(size // (3 * self._n_products)):
            owners, atoms = moves.owners[begin:end], moves.atoms[begin:end]
            products = self._products([d[begin:end] for d in moves.densities], owners)
            for a, z in enumerate(species):
                is_own = (moves.species[begin:end] == a) & ~moves.is_center[begin:end]
                if len(own := np.flatnonzero(is_own)):
                    columns, values = self._projected(products[own], z)
                    yield Changes(owners[own], atoms[own], columns, values)

    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, q)."""
        n, species = len(self.owners), self.expansion.species
        n_radial = self.features.engine.scale.n_radial
        changes = np.zeros((n, 6, self.features.n_features))
        for a, z in enumerate(species):
            own = slice(a * n_radial, (a + 1) * n_radial)
            densities = [d[:, *VOIGT][..., own] for d in self.expansion.strain]
            columns, values = self._projected(self._products(densities, np.arange(n)), z)
            changes[:, :, columns] += values
        return changes

    @property
    def _n_products(self) -> int:
        """Numbers that one change of a density makes."""
        scale = self.features.engine.scale
        return len(self.expansion.species) * (scale.l_max + 1) * scale.n_radial**2

    def _products(self, densities: Sequence[Float64Array], owners: IntArray) -> Float64Array:
        """Return Σ_m Δc_nlm c_α′n′lm of changes (g, d, 2l + 1, n): (g, d, α′, (l, n, n′)).

        The environments that they belong to are in ascending order.
        """
        (g, d, _, n_radial), K = densities[0].shape, len(self.expansion.species)
        products = np.empty((g, d, K, len(densities), n_radial, n_radial))
        runs, each = list(_runs(owners)), d * n_radial
        for order, (change, c) in enumerate(
            zip(densities, self.expansion.coefficients, strict=True)
        ):
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
        species = self.expansion.species
        columns = self.features.used_with(z, species)
        changes, rows = np.zeros((g * d, len(columns))), products.reshape(g * d, K, c)
        for o, other in enumerate(species):
            coupling = self.features.coupling(z, other)
            changes[:, _places(columns, coupling.columns)] += coupling.project(rows[:, o])
        return columns, changes.reshape(g, d, -1)


@dataclass(frozen=True, eq=False)
class Moves:
    """Changes of the densities around atoms with the positions of g atoms near them.

    Environment by environment, and in each of them species by species.
    """

    owners: IntArray  #: (g,): the environment
    atoms: IntArray  #: (g,): the atom that moves, a place in `SoapTape.atoms`
    species: IntArray  #: (g,): its species, a place in `Expansion.species`
    is_center: BoolArray  #: (g,): whether it is the centre: these changes are not meaningful
    densities: list[Float64Array]  #: (g, 3, 2l + 1, n_radial), in 1/Å, for each l

    def parts(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of about `size` changes, with all those of an environment."""
        edges = np.append(np.flatnonzero(np.diff(self.owners, prepend=-1)), len(self.owners))
        first = 0
        while first < len(edges) - 1:
            last = int(np.searchsorted(edges, edges[first] + size, side="right")) - 1
            last = max(last, first + 1)
            yield int(edges[first]), int(edges[last])
            first = last


def _runs(keys: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield the keys (n,), equal ones of which are next to each other, and where they are."""
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    if len(keys):
        yield from zip(keys[edges[:-1]].tolist(), edges[:-1], edges[1:], strict=True)


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.intp), *parts])


@dataclass(frozen=True)
class Coupling:
    """From products of two densities, of n and n′ for each l, to the features of their species.

    Attributes
    ----------
    columns : (k,) array of int
        Features in y that depend on them, in ascending order.
    matrix : (c, k) array, optional
        Q_αα′ of the module; None if it is the identity, or, if `turned`, exchanges n and n′.
    factors : (n_orders, 1, 1) array
        Factors of each l if there is no matrix.
    """

    columns: IntArray
    matrix: Float64Array | None
    factors: Float64Array
    turned: bool

    @property
    def cost(self) -> int:
        """Multiplications of one row; a copy takes as long as some of them."""
        return _COPY * len(self.columns) if self.matrix is None else self.matrix.size

    def project(self, products: Float64Array) -> Float64Array:
        """Return the changes of y (g, k), for products (g, (l, n, n′))."""
        if self.matrix is not None:
            flat: Float64Array = products.reshape(len(products), -1) @ self.matrix
            return flat
        return self._scaled(products)

    def lift(self, slopes: Float64Array) -> Float64Array:
        """Return derivatives by products (g, (l, n, n′)), for those by y (g, k)."""
        return slopes @ self.matrix.T if self.matrix is not None else self._scaled(slopes)

    def _scaled(self, values: Float64Array) -> Float64Array:
        n_radial = round((values[0].size / len(self.factors)) ** 0.5) if len(values) else 1
        scaled = values.reshape(-1, len(self.factors), n_radial, n_radial) * self.factors
        scaled = scaled.swapaxes(2, 3) if self.turned else scaled
        return scaled.reshape(len(values), -1)


@dataclass(frozen=True, eq=False)
class ScaleFeatures:
    """The features of one scale.

    Attributes
    ----------
    engine : FeatomicEngine
        Of elements, those of pseudo-species as well.
    projection : (D, q) array
        P, of compressed features or of pseudo-species. Otherwise it takes equal features together,
        p_nn′ and p_n′n of one species, which changes no product and saves a third of the
        multiplications.
    order : (q,) array of int
        Features as representatives are stored, in this order: those of a pair of species next to
        each other.
    compressed : bool
        Whether representatives are multiplied by P already, as those of compressed features and
        of pseudo-species are.
    feature_scale : float, optional
        y is divided by this; None if features are normalised.
    """

    engine: FeatomicEngine
    projection: Float64Array
    order: IntArray
    feature_scale: float | None
    compressed: bool

    @property
    def n_features(self) -> int:
        """Number q of features."""
        return int(self.projection.shape[1])

    def representatives(self, X: Float64Array) -> Float64Array:
        """Return the features x (M, q) of representatives, as stored (M, d)."""
        if self.compressed:
            return X[:, self.order]
        x = np.zeros((len(X), self.n_features))
        for rows in self.engine.pair_columns.values():
            columns = np.flatnonzero(np.any(self.projection[rows] != 0, axis=0))
            x[:, columns] += X[:, rows] @ self.projection[rows][:, columns]
        return x

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[SoapTape]:
        """Yield all environments in batches; those of a large structure are in several of them."""
        for batch in batches(frames) if gradients else batches(frames, VALUES):
            yield self._tape(batch, gradients)

    def _tape(self, batch: Environments, gradients: Sequence[str]) -> SoapTape:
        """Expand the densities of a batch."""
        systems, samples, origins = [], [], []
        for s, cut in enumerate(batch.cut(self.engine.scale.cutoff)):
            order = np.argsort(cut.atoms.numbers, kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            centers = np.sort(place[cut.centers])
            samples.append(np.stack([np.full_like(centers, s), centers], axis=1))
            origins.append(batch.first[s] + cut.origins[order])
            numbers, positions, cell = System.of(cut.atoms, self.engine.scale)
            systems.append(System(numbers[order], positions[order], cell))
        owners, local = (every := np.concatenate(samples)).T
        # The atom that each atom of the cut-outs is, or is an image of.
        atoms, place = np.unique(np.concatenate(origins), return_inverse=True)
        first = offsets_of([len(some) for some in origins])
        centers = place[first[owners] + local]
        expansion = self.engine.expand(systems, every, strain="strain" in gradients)
        moves = None
        if gradients:
            sample, system, atom, densities = self.engine.expand_neighbours(systems, every)
            here = first[system] + atom
            number = np.concatenate([one.numbers for one in systems])[here]
            species = np.searchsorted(expansion.species, number)
            is_center = atom == local[sample]
            moves = Moves(sample, place[here], species, is_center, densities)
        return SoapTape(self, batch.structures, atoms, owners, centers, expansion, moves)

    def used(self, species: tuple[int, ...]) -> IntArray:
        """Return the features that depend on pairs of some species, in ascending order."""
        return self._union(tuple(combinations_with_replacement(species, 2)))

    def used_with(self, z: int, species: tuple[int, ...]) -> IntArray:
        """Return the features that depend on one species together with some others."""
        return self._union(tuple((z, other) for other in species))

    def cost(self, species: tuple[int, ...]) -> float:
        """Return the multiplications that features of pairs of some species take."""
        pairs = combinations_with_replacement(species, 2)
        return float(sum(self.coupling(*pair).cost for pair in pairs))

    def _union(self, pairs: tuple[tuple[int, int], ...]) -> IntArray:
        if pairs not in self._unions:
            columns = [self.coupling(*pair).columns for pair in pairs]
            self._unions[pairs] = np.unique(np.concatenate(columns))
        return self._unions[pairs]

    @cached_property
    def _unions(self) -> dict[tuple[tuple[int, int], ...], IntArray]:
        return {}

    @cached_property
    def _couplings(self) -> dict[tuple[int, int], Coupling]:
        return {}

    def coupling(self, z: int, other: int) -> Coupling:
        """Return how features depend on the density of one species, together with another one."""
        if (z, other) not in self._couplings:
            self._couplings[z, other] = self._coupling(z, other)
        return self._couplings[z, other]

    def _coupling(self, z: int, other: int) -> Coupling:
        scale, turned = self.engine.scale, z > other
        rows = self.engine.pair_columns[min(z, other), max(z, other)]
        columns = np.flatnonzero(np.any(self.projection[rows] != 0, axis=0))
        factors = np.array([order_factor(order) for order in range(scale.l_max + 1)])
        factors = (factors * (1.0 if z == other else np.sqrt(2.0)))[:, None, None]
        if z != other and not self.compressed:
            return Coupling(columns, None, factors, turned)
        shape = (scale.l_max + 1, scale.n_radial, scale.n_radial, len(columns))
        matrix = self.projection[rows][:, columns].reshape(shape) * factors[..., None]
        if turned:
            matrix = matrix.swapaxes(1, 2)
        elif z == other:  # both densities change
            matrix = matrix + matrix.swapaxes(1, 2)
        # Species that are never together have no columns.
        matrix = matrix.reshape(math.prod(shape[:3]), len(columns))
        return Coupling(columns, matrix, factors, turned)


def scale_features(representation: SoapRepresentation) -> list[ScaleFeatures]:
    """Return the features of each scale of a representation by featomic."""
    soap, projections = representation.soap, representation.projections
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
        pairs = [np.any(matrix[rows] != 0, axis=0) for rows in engine.pair_columns.values()]
        order = np.argsort(np.argmax(pairs, axis=0), kind="stable")  # by the first pair
        found.append(ScaleFeatures(engine, matrix[:, order], order, length, compressed))
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
