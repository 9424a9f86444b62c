"""The energy of environments as a function of their power spectra, and its derivative.

An environment with power spectrum p, in raw features, has y = pP (P compresses; without it, y = p),
x = y/|y|, and for each member the energy

    e(p) = Σ_s Σ_m w_sm (x_s·X_sm)^ζ        s: scales, m: representatives.

With b = ∂e/∂x = Σ_m ζ w_m (x·X_m)^(ζ−1) X_m, the chain back to the raw features is

    ∂e/∂p = P (b − x (x·b)) / |y|           for normalised features,
    ∂e/∂p = P b / c                         for features divided by a constant c.

The kernel is homogeneous in x, so that x·b = ζe: energies come with their derivatives. All members
share representatives, so that b of all members is one matrix product. If ζ = 2 the energy is a
quadratic form in x, with a matrix for each member; if there are fewer features than
representatives, that is less work, and the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qualms.atomistic.engines import FeatomicEngine, make_engine
from qualms.atomistic.fitted import Fitted
from qualms.core.kernels import normalize_rows
from qualms.core.typing import Float64Array

#: Bytes that the quadratic forms of all members may take.
_QUADRATIC = 256e6


@dataclass(frozen=True)
class ScalePotential:
    """What one scale adds to the energy of an environment, for R weight columns.

    Attributes
    ----------
    engine : FeatomicEngine
    representatives : (M, q) array
    weights : (M, R) array
    exponent : float
        ζ.
    projection : (D, q) array, optional
        P.
    feature_scale : float, optional
        c; None if features are normalised.
    """

    engine: FeatomicEngine
    representatives: Float64Array
    weights: Float64Array
    exponent: float
    projection: Float64Array | None
    feature_scale: float | None

    def energies_and_slopes(self, P: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and ∂e/∂p (n, R, D) for power spectra (n, D)."""
        y = P if self.projection is None else P @ self.projection
        x = self._normalized(y)
        slopes = self._slopes(x)
        along = np.einsum("irf,if->ir", slopes, x)
        if self.feature_scale is None:
            slopes -= along[:, :, None] * x[:, None, :]
            lengths = np.linalg.norm(y, axis=1)
            slopes /= np.where(lengths > 0, lengths, 1.0)[:, None, None]
        else:
            slopes /= self.feature_scale
        if self.projection is not None:
            n, R, q = slopes.shape
            slopes = (slopes.reshape(n * R, q) @ self.projection.T).reshape(n, R, -1)
        return along / self.exponent, slopes

    def _normalized(self, y: Float64Array) -> Float64Array:
        if self.feature_scale is None:
            return np.asarray(normalize_rows(y), dtype=np.float64)
        return y / self.feature_scale

    def _slopes(self, x: Float64Array) -> Float64Array:
        """Return ∂e/∂x: (n, R, q)."""
        (n, q), R = x.shape, self.weights.shape[1]
        if self._is_quadratic:
            return (x @ self._forms).reshape(n, R, q)
        kernel = x @ self.representatives.T
        if not float(self.exponent).is_integer():
            np.maximum(kernel, 0.0, out=kernel)  # rounding; negative products are no such kernel
        kernel = self.exponent * kernel ** (self.exponent - 1)
        terms = kernel[:, None, :] * self.weights.T
        return (terms.reshape(n * R, -1) @ self.representatives).reshape(n, R, q)

    @property
    def _is_quadratic(self) -> bool:
        M, q = self.representatives.shape
        return self.exponent == 2 and 2 * q <= M and 8.0 * self.weights.shape[1] * q**2 < _QUADRATIC

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
    representation = fitted.representation
    soap = representation.soap
    shares = np.array([scale.weight for scale in soap.scales])
    ends = np.cumsum(representation.widths)
    scales = []
    for s, scale in enumerate(soap.scales):
        engine = make_engine("featomic", scale, representation.species)
        assert isinstance(engine, FeatomicEngine)
        columns = slice(int(ends[s]) - representation.widths[s], int(ends[s]))
        projections = representation.projections
        scales.append(
            ScalePotential(
                engine=engine,
                representatives=fitted.representatives[:, columns].astype(np.float64),
                weights=weights * (fitted.kernel_scale * shares[s] / shares.sum()),
                exponent=soap.exponent,
                projection=projections[s].matrix.astype(np.float64) if projections else None,
                feature_scale=None if soap.normalize else representation.feature_scale,
            )
        )
    return Potential(tuple(scales))
