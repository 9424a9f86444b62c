"""From the power spectra of one scale to what its kernel sees, and derivatives back.

An environment with power spectrum p, in raw features, has y = pP and x = y/|y|. P compresses. In a
model without compression it only takes together what is the same: featomic has the features nn′ and
n′n of two atoms of one species twice, (p_nn′, p_n′n) → √2 p_nn′, which changes no product of two
power spectra.

The features of a pair of species are zero in all environments that lack one of the two, and change
only if an atom of these species, or the centre, moves. So P is kept in parts, one for each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import block_diag

from qualms.atomistic.engines import FeatomicEngine, make_engine
from qualms.atomistic.representation import Representation
from qualms.core.typing import Float64Array, FloatArray, IntArray


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
