"""The energy of environments as a function of their power spectra, and its derivative.

An environment with power spectrum p, in raw features, has y = pP (P compresses; without it, y = p),
x = y/|y|, and for each member the energy

    e(p) = Σ_s Σ_m w_sm (x_s·X_sm)^ζ        s: scales, m: representatives.

With b = ∂e/∂x = Σ_m ζ w_m (x·X_m)^(ζ−1) X_m, the chain back to the raw features is

    ∂e/∂p = P (b − (x·b) x) / |y|           for normalised features,
    ∂e/∂p = P b / c                         for features divided by a constant c.

The kernel is homogeneous in x, so that x·b = ζe: energies come with their derivatives. All members
share representatives, so that b of all members is one matrix product, of (x·X)^(ζ−1) and of w X
for all members side by side. If ζ = 1, b is the same for all environments. If ζ = 2 the energy is a
quadratic form in x, with a matrix for each member; with fewer features than representatives, that
is less work, and the same. Both need memory that grows with features times members. Where there is
too little of it, w (x·X)^(ζ−1) is multiplied with X instead. Then the features of those pairs of
species suffice that some environment at hand has: others do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qualms.atomistic.engines import FeatomicEngine, make_engine
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.representation import Representation
from qualms.core.typing import Float64Array, IntArray

#: Bytes that matrices of all members, made once, may take.
_ROOM = 256e6
#: How much longer a multiplication takes without them.
_SLOWER = 1.5


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
        Its features among those of all scales.
    projection : (D, q) array, optional
        P.
    feature_scale : float, optional
        c; None if features are normalised.
    """

    engine: FeatomicEngine
    exponent: float
    share: float
    columns: slice
    projection: Float64Array | None
    feature_scale: float | None

    def features(self, P: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return x (n, q) and what y has been divided by (n, 1), for power spectra (n, D)."""
        y = P if self.projection is None else P @ self.projection
        if self.feature_scale is not None:
            lengths = np.full((len(y), 1), self.feature_scale)
        else:
            lengths = np.linalg.norm(y, axis=1, keepdims=True)
            lengths[lengths == 0] = 1.0
        return y / lengths, lengths

    def present(self, P: Float64Array) -> list[int]:
        """Return the pairs of species that some of the environments have, given (n, D)."""
        blocks = self.engine.pair_blocks
        return [k for k, rows in enumerate(blocks) if np.any(P[:, rows])]

    def used(self, pairs: Sequence[int]) -> IntArray:
        """Return the columns of x that depend on the features of some pairs of species."""
        blocks, q = self.engine.pair_blocks, self.columns.stop - self.columns.start
        if self.projection is None:
            parts = [np.arange(blocks[k].start, blocks[k].stop) for k in pairs]
        else:
            parts = [np.arange(q)[self._blocks[k][1]] for k in pairs]
        return np.unique(np.concatenate([np.empty(0, dtype=np.intp), *parts]))

    def lifted(
        self, slopes: Float64Array, used: IntArray, pairs: Sequence[int]
    ) -> dict[int, Float64Array]:
        """Return P b for b (n, R, c), of which some columns are given.

        Returns
        -------
        dict of (n, R, D/n_pairs) arrays
            By the first feature of each pair of species that is asked for.
        """
        n, R, _ = slopes.shape
        lifted = {}
        for k in pairs:
            rows = self.engine.pair_blocks[k]
            if self.projection is None:
                begin = int(np.searchsorted(used, rows.start))
                lifted[rows.start] = slopes[:, :, begin : begin + rows.stop - rows.start]
                continue
            _, columns, part = self._blocks[k]
            mine = slopes
            if not isinstance(columns, slice):
                mine = np.take(slopes, np.searchsorted(used, columns), axis=2)
            lifted[rows.start] = (mine.reshape(n * R, -1) @ part.T).reshape(n, R, -1)
        return lifted

    def projected(self, changes: Float64Array, pairs: Sequence[int]) -> Float64Array:
        """Return Δp P for rows of changes (n, …) of the features of some pairs of species: (n, q).

        Parameters
        ----------
        changes : (n, c) array
            Features of these pairs, one after the other.
        pairs : sequence of int
            Which of the pairs of species they are.
        """
        assert self.projection is not None
        projected = np.zeros((len(changes), self.projection.shape[1]))
        first = 0
        for pair in pairs:
            rows, columns, part = self._blocks[pair]
            size = rows.stop - rows.start
            projected[:, columns] += changes[:, first : first + size] @ part
            first += size
        return projected

    @cached_property
    def _blocks(self) -> list[tuple[slice, IntArray | slice, Float64Array]]:
        """Features of each pair of species, the columns of P that need them, and that part of P."""
        P, blocks = self.projection, []
        assert P is not None
        for rows in self.engine.pair_blocks:
            used = np.flatnonzero(np.any(P[rows] != 0, axis=0))
            columns: IntArray | slice = slice(None) if len(used) == P.shape[1] else used
            blocks.append((rows, columns, np.ascontiguousarray(P[rows][:, columns])))
        return blocks

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


#: From x (n, c), and the features that these c are, to e (n, R) and b (n, R, c).
_Way = Callable[[Float64Array, IntArray], tuple[Float64Array, Float64Array]]


@dataclass(frozen=True)
class ScalePotential:
    """What one scale adds to the energy of an environment, for R weight columns.

    Attributes
    ----------
    scale : ScaleFeatures
    representatives : (M, q) array
    weights : (M, R) array
    """

    scale: ScaleFeatures
    representatives: Float64Array
    weights: Float64Array

    def energies(self, P: Float64Array) -> Float64Array:
        """Return e (n, R) for power spectra (n, D)."""
        x, _ = self.scale.features(P)
        products = x @ self.representatives.T
        energies: Float64Array = (products * self.scale.powers(products)) @ self.weights
        return energies

    def slopes(self, P: Float64Array) -> tuple[Float64Array, dict[int, Float64Array]]:
        """Return e (n, R) and ∂e/∂p, as `ScaleFeatures.lifted`, for power spectra (n, D)."""
        x, lengths = self.scale.features(P)
        pairs = self.scale.present(P)
        used = self.scale.used(pairs)
        by = self._least_work(len(used))
        if by in (self._by_forms, self._by_products):
            used = np.arange(x.shape[1])
        x = x if len(used) == x.shape[1] else x[:, used]
        energies, slopes = by(x, used)
        if self.scale.feature_scale is None:
            slopes -= (self.scale.exponent * energies)[:, :, None] * x[:, None, :]
        slopes *= (1 / lengths)[:, :, None]
        return energies, self.scale.lifted(slopes, used, pairs)

    def _least_work(self, c: int) -> _Way:
        """Return how to find e and b with the fewest multiplications, c features being there."""
        (M, q), R = self.representatives.shape, self.weights.shape[1]
        if self.scale.exponent == 1:
            return self._by_sums
        work = {self._by_representatives: _SLOWER * M * c}
        if 8.0 * R * M * q <= _ROOM:
            work[self._by_products] = M * q
        if self.scale.exponent == 2 and 8.0 * R * q**2 <= _ROOM:
            work[self._by_forms] = q**2
        return min(work, key=work.__getitem__)

    def _by_representatives(
        self, x: Float64Array, used: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and b (n, R, c), by their definition."""
        (n, c), R = x.shape, self.weights.shape[1]
        X = self._columns(used)
        products = x @ X.T
        powers = self.scale.powers(products)
        energies = (products * powers) @ self.weights
        powers *= self.scale.exponent
        terms = powers[:, None, :] * self.weights.T
        return energies, (terms.reshape(n * R, -1) @ X).reshape(n, R, c)

    def _by_products(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same with all features: what is multiplied with powers is made once."""
        products = x @ self.representatives.T
        powers = self.scale.powers(products)
        energies = (products * powers) @ self.weights
        powers *= self.scale.exponent
        return energies, (powers @ self._weighted).reshape(len(x), -1, x.shape[1])

    def _by_sums(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same for ζ = 1: b is Xᵀw."""
        b = self._sums[:, used]
        return x @ b.T, np.repeat(b[None], len(x), axis=0)

    def _by_forms(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same for ζ = 2, with all features: b is 2 Xᵀ diag(w) X x."""
        slopes = (x @ self._forms).reshape(len(x), -1, x.shape[1])
        return (slopes @ x[:, :, None])[:, :, 0] / 2, slopes

    def _columns(self, used: IntArray) -> Float64Array:
        """Return some columns of the representatives."""
        X = self.representatives
        return X if len(used) == X.shape[1] else X[:, used]

    @cached_property
    def _sums(self) -> Float64Array:
        """The vectors Xᵀw of all columns: (R, q)."""
        return np.ascontiguousarray(self.weights.T @ self.representatives)

    @cached_property
    def _weighted(self) -> Float64Array:
        """The matrices diag(w) X of all columns, side by side: (M, R·q)."""
        weighted = self.weights[:, :, None] * self.representatives[:, None, :]
        return weighted.reshape(len(weighted), -1)

    @cached_property
    def _forms(self) -> Float64Array:
        """The matrices 2 Xᵀ diag(w) X of all columns, side by side: (q, R·q)."""
        X = self.representatives
        return np.concatenate([2 * X.T @ (w[:, None] * X) for w in self.weights.T], axis=1)


@dataclass(frozen=True)
class Potential:
    """The energy of environments by all members of a model, or by some combination of them.

    Attributes
    ----------
    scales : sequence of ScalePotential
    """

    scales: Sequence[ScalePotential]

    @property
    def n_columns(self) -> int:
        """R."""
        return int(self.scales[0].weights.shape[1])


def make_potential(fitted: Fitted, weights: Float64Array) -> Potential:
    """Return the potential of a trained model.

    Parameters
    ----------
    fitted : Fitted
        With features by featomic.
    weights : (M, R) array
        Of its representatives; those of its members, or a mean of them.
    """
    scales = [
        ScalePotential(
            scale=scale,
            representatives=fitted.representatives[:, scale.columns].astype(np.float64),
            weights=weights * (fitted.kernel_scale * scale.share),
        )
        for scale in scale_features(fitted.representation)
    ]
    return Potential(tuple(scales))
