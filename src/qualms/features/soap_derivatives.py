"""SOAP features and their derivatives: the `DifferentiableFeatures` of SOAP.

The density of each species α around an atom is expanded in coefficients c_αnlm by
`qualms.features.densities`. They are contracted to the power spectrum p_αnα′n′l ∝ Σ_m c_αnlm
c_α′n′lm, of which y = pP are the raw features, with the projection P. A moving atom changes the
density of its own species alone, so that

    Δy = Σ_α′ (Σ_m Δc_αnlm c_α′n′lm) Q_αα′,

where the rows of Q_αα′ are those of P that belong to α and α′, in the order of l, n and n′. Kernel
rows take this for all neighbours of an environment (forward). Predictions take the derivatives of R
energies by features to those by spectra, by densities, and then by positions (backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import ClassVar

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.features.base import Changes, Tape, offsets_of, ranges
from qualms.features.densities import (
    Environments,
    NeighbourMemory,
    Neighbours,
    batches,
    environments_of,
    find_neighbours,
)
from qualms.features.soap import FeatomicEngine

#: Environments in memory at once: with derivatives, and without.
BATCH, VALUES = 128, 1024
#: Elements of an array of slopes by spectra: few enough for a cache.
CACHED = 100_000
#: Distance in Å by which neighbours in simulations may be further than the cutoff.
SKIN = 0.5


@dataclass(frozen=True, eq=False)
class SoapTape(Tape):
    """Densities of one scale around a batch of atoms, and the features that follow from them.

    Species are elements, or pseudo-species, into which the densities of elements are mixed.
    """

    features: ScaleFeatures
    environments: Environments
    has_strain: bool  #: whether derivatives by strain are computed

    @cached_property
    def species(self) -> tuple[int, ...]:
        """The K species that the features have pairs of: elements of the batch, or all pseudo-."""
        engine = self.features.engine
        if engine.scale.pseudo_species is None:
            return tuple(self.environments.elements.tolist())
        return tuple(range(engine.weights.shape[1]))

    @cached_property
    def mixing(self) -> Float64Array | None:
        """Weights of elements in pseudo-species, (E, K); None of elements."""
        engine = self.features.engine
        if engine.scale.pseudo_species is None:
            return None
        weights: Float64Array = engine.weights[
            np.searchsorted(engine.species, self.environments.elements)
        ]
        return weights

    @cached_property
    def densities(self) -> Float64Array:
        """Densities of species: (n, (l_max + 1)², K, n_radial)."""
        c, W = self.environments.densities, self.mixing
        return c if W is None else np.ascontiguousarray(W.T @ c)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of species, in the order of spectra."""
        return [*combinations_with_replacement(self.species, 2)]

    @cached_property
    def columns(self) -> IntArray:
        """Features of pairs of the species around these atoms."""
        return np.unique(np.concatenate([self.features.block(*pair)[0] for pair in self.pairs]))

    @cached_property
    def y(self) -> Float64Array:
        """Raw features: (n, q)."""
        engine = self.features.engine
        spectra = engine.contract(self.densities)
        y = np.zeros((len(spectra), self.features.n_features))
        for pair, (a, b) in enumerate(self.pairs):
            columns, matrix = self.features.block(a, b)
            flat = spectra[:, pair].reshape(len(y), -1)
            y[:, columns] += flat if matrix is None else flat @ matrix
        return y

    def pull_back(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[Float64Array, Float64Array | None]:
        """Return derivatives by positions, and perhaps by strain."""
        from qualms.features import pair_core

        some, c, W = self.environments, self.densities, self.mixing
        (n, R, _), E, K = slopes.shape, len(some.elements), len(self.species)
        engine, (_, q, _, n_radial) = self.features.engine, c.shape
        positions = np.zeros((len(self.atoms), 3, R))
        strain = np.zeros((len(self.structures) * self.has_strain, 6, R))
        step = max(1, CACHED // (R * len(self.pairs) * engine.n_products))
        for begin in range(0, n, step):
            part = slice(begin, begin + step)
            by_spectra = self._by_spectra(slopes[part], columns)
            g = np.empty((len(by_spectra), K, q, n_radial, R))
            pair_core.pull_spectra(c[part], by_spectra, engine.factors, g)
            if W is not None:
                g = np.einsum("ak,ikqnr->iaqnr", W, g, optimize=True)
            edges = some.start[begin * E : (begin + len(g)) * E + 1]
            pair_core.pull_densities(
                edges, some.vectors, *some.arguments, np.ascontiguousarray(g),
                some.centers[part], some.neighbours, positions, some.owners[part], strain,
            )  # fmt: skip
        return positions, strain if self.has_strain else None

    def _by_spectra(self, slopes: Float64Array, columns: IntArray) -> Float64Array:
        """Return derivatives by spectra: (n, pairs, l_max + 1, n_radial, n_radial, R)."""
        scale, (n, R, _) = self.features.engine.scale, slopes.shape
        shape = scale.l_max + 1, scale.n_radial, scale.n_radial
        lifted = np.empty((n, len(self.pairs), self.features.engine.n_products, R))
        for pair, (a, b) in enumerate(self.pairs):
            features, matrix = self.features.block(a, b)
            by_features = slopes[:, :, np.searchsorted(columns, features)]
            if matrix is None:
                lifted[:, pair] = by_features.swapaxes(1, 2)
            elif R == 1:
                lifted[:, pair, :, 0] = by_features[:, 0] @ matrix.T
            else:
                np.matmul(matrix, by_features.swapaxes(1, 2), out=lifted[:, pair])
        return lifted.reshape(n, len(self.pairs), *shape, R)

    def push_forward(self) -> Iterator[Changes]:
        """Yield the changes of y, of one element of moving atoms at a time."""
        some, E = self.environments, len(self.environments.elements)
        sizes = np.diff(some.start)
        for a in range(E):
            owners = np.repeat(np.arange(len(self.owners)), sizes[a::E])
            if not len(owners):
                continue
            columns, values, _ = self._pushed(a, len(owners), 0)
            atoms = some.neighbours[ranges(some.start, np.arange(a, len(sizes), E))]
            # An atom does not move relative to its own images.
            moves = atoms != self.centers[owners]
            if not moves.all():
                owners, atoms, values = owners[moves], atoms[moves], values[moves]
            yield Changes(owners, atoms, columns, values)

    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, q)."""
        n = len(self.owners)
        changes = np.zeros((n, 6, self.features.n_features))
        for a in range(len(self.environments.elements)):
            columns, _, strain = self._pushed(a, 0, n)
            changes[:, :, columns] += strain
        return changes

    def _pushed(
        self, a: int, n_pairs: int, n_strained: int
    ) -> tuple[IntArray, Float64Array, Float64Array]:
        """Return which features (k,) the density of an element changes, and how.

        With the vectors to neighbours of the element, (n_pairs, 3, k), and with strain,
        (n_strained, 6, k): all of them or none.
        """
        from qualms.features import pair_core

        some, z = self.environments, int(self.environments.elements[a])
        couplings = [self.features.coupling(z, other) for other in self.species]
        columns = np.unique(np.concatenate([of_pair for of_pair, _ in couplings]))
        places = np.searchsorted(columns, np.concatenate([of_pair for of_pair, _ in couplings]))
        values = np.zeros((n_pairs, 3, len(columns)))
        strain = np.zeros((n_strained, 6, len(columns)))
        pair_core.push_densities(
            some.start, some.vectors, a, len(some.elements), *some.arguments, self.densities,
            np.concatenate([matrix for _, matrix in couplings]),
            offsets_of([len(of_pair) for of_pair, _ in couplings]), places, values, strain,
        )  # fmt: skip
        return columns, values, strain


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
    find : callable
        Returns the neighbours in a structure within a cutoff (Å).
    """

    engine: FeatomicEngine
    projection: Float64Array | None
    feature_scale: float | None
    concurrent: ClassVar[bool] = True
    find: Callable[[Atoms, float], Neighbours] = find_neighbours
    _blocks: dict[tuple[int, int], tuple[IntArray, Float64Array | None]] = field(
        default_factory=dict
    )
    _couplings: dict[tuple[int, int], tuple[IntArray, Float64Array]] = field(default_factory=dict)

    @property
    def n_features(self) -> int:
        """Number q of features."""
        return self.engine.n_features if self.projection is None else self.projection.shape[1]

    def following(self) -> ScaleFeatures:
        """Return the same features for structures that change little from one to the next."""
        return replace(self, find=NeighbourMemory(SKIN))

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[SoapTape]:
        """Yield all environments in batches; those of a large structure are in several of them."""
        radial, size = self.engine.radial, BATCH if gradients else VALUES
        for batch in batches(frames, self.engine.scale.cutoff, size, self.find):
            some = environments_of(radial, batch)
            places = some.structures, some.atoms, some.owners, some.centers
            yield SoapTape(*places, self.feature_scale, self, some, "strain" in gradients)

    def block(self, a: int, b: int) -> tuple[IntArray, Float64Array | None]:
        """Return the features (k,) of a pair of species a ≤ b, and the rows of P for them.

        These are (n_products, k), and None if features are not compressed.
        """
        if (a, b) not in self._blocks:
            columns, rows = self.engine.pair_columns[a, b], None
            if self.projection is not None:
                rows = self.projection[columns]
                columns = np.flatnonzero(np.any(rows != 0, axis=0))
                rows = np.ascontiguousarray(rows[:, columns])
            self._blocks[a, b] = columns, rows
        return self._blocks[a, b]

    def coupling(self, z: int, other: int) -> tuple[IntArray, Float64Array]:
        """Return how features depend on the density of an element, together with a species.

        Returns
        -------
        columns : (k,) array of int
            Features in y that do, in ascending order.
        matrix : (k, (l, n, n′)) array
            Transpose of Q_αα′ of the module.
        """
        if (z, other) not in self._couplings:
            self._couplings[z, other] = self._coupling(z, other)
        return self._couplings[z, other]

    def _coupling(self, z: int, other: int) -> tuple[IntArray, Float64Array]:
        """Compute a coupling by the weights of the element in species."""
        engine = self.engine
        shape = engine.scale.l_max + 1, engine.scale.n_radial, engine.scale.n_radial
        total = np.zeros((*shape, self.n_features))
        weights = {z: 1.0}
        if engine.scale.pseudo_species is not None:
            row = engine.weights[engine.species.index(z)]
            weights = {k: float(w) for k, w in enumerate(row) if w}
        for k, w in weights.items():
            columns, matrix = self.block(min(k, other), max(k, other))
            matrix = np.eye(len(columns)) if matrix is None else matrix
            rows = matrix.reshape(*shape, len(columns))
            exchanged = rows.swapaxes(1, 2)
            if k == other:
                rows = rows + exchanged
            elif k > other:
                rows = exchanged
            factors = engine.factors[int(k != other)][:, None, None, None]
            total[..., columns] += w * factors * rows
        flat = total.reshape(engine.n_products, -1)
        columns = np.flatnonzero(np.any(flat != 0, axis=0))
        return columns, np.ascontiguousarray(flat[:, columns].T)
