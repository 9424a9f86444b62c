"""The energy of environments as a function of their power spectra, and its derivative.

An environment with power spectrum p, in raw features, has y = pP (P compresses; without it, y = p),
x = y/|y|, and for each member the energy

    e(p) = Σ_s Σ_m w_sm (x_s·X_sm)^ζ        s: scales, m: representatives.

With b = ∂e/∂x = Σ_m ζ w_m (x·X_m)^(ζ−1) X_m, the chain back to the raw features is

    ∂e/∂p = P (b − (x·b) x) / |y|           for normalised features,
    ∂e/∂p = P b / c                         for features divided by a constant c.

The kernel is homogeneous in x, so that x·b = ζe: energies come with their derivatives. All members
share representatives, so that b of all members is one matrix product, in which −(x·b) x is the term
of one more representative, x itself. If ζ = 2 the energy is a quadratic form in x, with a matrix
for each member; if there are fewer features than representatives, that is less work, and the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qualms.atomistic.engines import FeatomicEngine, make_engine
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.representation import Representation
from qualms.core.typing import Float64Array, IntArray

#: Bytes that the quadratic forms of all members may take.
_QUADRATIC = 256e6


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

    def lifted(self, slopes: Float64Array) -> Float64Array:
        """Return P b for rows b (n, q): (n, D)."""
        if self.projection is None:
            return slopes
        lifted = np.empty((len(slopes), len(self.projection)))
        for rows, columns, part in self._blocks:
            lifted[:, rows] = slopes[:, columns] @ part.T
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
        """Return (x·X)^(ζ−1) for products x·X, of which rounding may have made some negative."""
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

    def slopes(self, P: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and ∂e/∂p (n, R, D) for power spectra (n, D)."""
        x, lengths = self.scale.features(P)
        if self._is_quadratic:
            energies, slopes = self._by_forms(x, 1 / lengths)
        else:
            energies, slopes = self._by_representatives(x, 1 / lengths)
        n, R, q = slopes.shape
        return energies, self.scale.lifted(slopes.reshape(n * R, q)).reshape(n, R, -1)

    def _by_representatives(
        self, x: Float64Array, factors: Float64Array
    ) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R), and b − (x·b) x times factors (n, 1), or b, by its definition."""
        (n, q), (M, R), zeta = x.shape, self.weights.shape, self.scale.exponent
        products = x @ self.representatives.T
        powers = self.scale.powers(products)
        energies = (products * powers) @ self.weights
        if self.scale.feature_scale is None:
            # Environment i has a representative of its own, x_i.
            terms = np.zeros((n, R, M + n))
            terms[np.arange(n), :, M + np.arange(n)] = -zeta * factors * energies
            X = np.concatenate([self.representatives, x])
        else:
            terms, X = np.empty((n, R, M)), self.representatives
        np.multiply((zeta * factors * powers)[:, None, :], self.weights.T, out=terms[:, :, :M])
        return energies, (terms.reshape(n * R, -1) @ X).reshape(n, R, q)

    def _by_forms(
        self, x: Float64Array, factors: Float64Array
    ) -> tuple[Float64Array, Float64Array]:
        """Return the same for ζ = 2."""
        slopes = (x @ self._forms).reshape(len(x), -1, x.shape[1])
        along = (slopes @ x[:, :, None])[:, :, 0]
        if self.scale.feature_scale is None:
            slopes -= along[:, :, None] * x[:, None, :]
        slopes *= factors[:, :, None]
        return along / 2, slopes

    @property
    def _is_quadratic(self) -> bool:
        M, q = self.representatives.shape
        room = 8.0 * self.weights.shape[1] * q**2 < _QUADRATIC
        return self.scale.exponent == 2 and q <= M and room

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
