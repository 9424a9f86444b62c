"""The energy of environments as a function of their power spectra, and its derivative.

An environment with power spectrum p, in raw features, has y = pP, x = y/|y| (see
`qualms.atomistic.scale_features`), and for each member the energy

    e(p) = Σ_s Σ_m w_sm (x_s·X_sm)^ζ        s: scales, m: representatives.

With b = ∂e/∂x = Σ_m ζ w_m (x·X_m)^(ζ−1) X_m, the chain back to the raw features is

    ∂e/∂p = P (b − (x·b) x) / |y|           for normalised features,
    ∂e/∂p = P b / c                         for features divided by a constant c.

The kernel is homogeneous in x, so that x·b = ζe: energies come with their derivatives. All members
share representatives, so that b of all members is one matrix product, of w (x·X)^(ζ−1) for all
members and X. Features suffice of those pairs of species that some environment at hand has: others
do not change. Or else w X of all members is made once, side by side, and (x·X)^(ζ−1) multiplied
with it. If ζ = 1, b is the same for all environments. If ζ = 2 the energy is a quadratic form in x,
with a matrix for each member; with fewer features than representatives, that is less work. Matrices
made once need memory, and time to be read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qualms.atomistic.fitted import Fitted
from qualms.atomistic.scale_features import ScaleFeatures, scale_features
from qualms.core.typing import Float64Array, IntArray

#: Bytes that matrices of all members, made once, may take.
_ROOM = 256e6
#: Multiplications that take as long as reading a number from memory, and as making one w (x·X)^ζ.
_READING, _MAKING = 36, 80
#: How much longer a multiplication takes without matrices made once: the products are smaller.
_SLOWER = 1.7
#: Environments whose w (x·X)^ζ are made at a time, few enough for a cache.
_CHUNK = 8


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
        by = self._quickest(len(x), len(used))
        if by in (self._by_forms, self._by_products):
            used = np.arange(x.shape[1])
        x = x if len(used) == x.shape[1] else x[:, used]
        energies, slopes = by(x, used)
        if self.scale.feature_scale is None:
            slopes -= (self.scale.exponent * energies)[:, :, None] * x[:, None, :]
        slopes *= (1 / lengths)[:, :, None]
        return energies, self.scale.lifted(slopes, used, pairs)

    def _quickest(self, n: int, c: int) -> _Way:
        """Return how to find e and b of n environments soonest, c features being there.

        Time is counted in multiplications, as measured with 16 members. Reading a number from
        memory takes as long as many of them, so that matrices of all members, which no cache holds,
        pay off for many environments at a time only.
        """
        (M, q), R = self.representatives.shape, self.weights.shape[1]
        if self.scale.exponent == 1:
            return self._by_sums
        work = {self._by_representatives: n * M * (_SLOWER * c + _MAKING)}
        if 8.0 * R * M * q <= _ROOM:
            work[self._by_products] = M * q * (n + _READING)
        if self.scale.exponent == 2 and 8.0 * R * q**2 <= _ROOM:
            work[self._by_forms] = q**2 * (n + _READING)
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
        slopes, terms = np.empty((n, R, c)), np.empty((min(_CHUNK, n), R, len(X)))
        for start in range(0, n, _CHUNK):
            some = powers[start : start + _CHUNK, None, :]
            made = np.multiply(some, self.weights.T, out=terms[: len(some)])
            into = slopes[start : start + _CHUNK].reshape(len(some) * R, c)
            np.matmul(made.reshape(len(some) * R, -1), X, out=into)
        return energies, slopes

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
            representatives=scale.representatives(fitted.representatives),
            weights=weights * (fitted.kernel_scale * scale.share),
        )
        for scale in scale_features(fitted.representation)
    ]
    return Potential(tuple(scales))
