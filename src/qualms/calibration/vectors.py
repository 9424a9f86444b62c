"""Vectors and tensors: their standard deviations do not depend on how they are turned.

The covariance Ĉ of few members of a vector is more anisotropic than that of many, so that it is
shrunk towards a sphere:

    Σ = σ²(r)/r² [(1 − u) Ĉ + u s̄ I],

r² being the mean square of ŝ over components, s̄ the mean eigenvalue of Ĉ, and u the isotropy.
Tensors are vectors of six components, those off the diagonal multiplied by √2. In directions in
which the members agree, because of symmetry, there is no uncertainty: I is ∝ Ĉ/(Ĉ + κ s̄) with a
small κ, such that Σ has the trace of Ĉ σ²/r². The calibration σ(r) is fitted to components divided
by `component_share`.
"""

from __future__ import annotations

import numpy as np

from qualms.arrays import Float64Array, FloatArray
from qualms.gp.ensemble import calibration_factors

#: How often components are in a vector (x, y, z), and in a symmetric tensor (xx, yy, zz, yz, xz,
#: xy) or any other (xx, xy, xz, …), by how many there are.
MULTIPLICITY = {3: np.ones(3), 6: np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), 9: np.ones(9)}
#: Independent components of a vector or tensor: fewer than there are, since they are correlated.
INDEPENDENT_COMPONENTS = 2
#: Shares of a sphere that are tried in the covariance of the members of a vector.
ISOTROPIES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: κ, the share of its variance below which the members of a vector agree in a direction.
_SYMMETRIC = 0.01


def vector_std(ensemble_std: FloatArray) -> Float64Array:
    """Return the standard deviation r (…) of vectors or tensors, of components (…, 3, 6 or 9)."""
    w = MULTIPLICITY[ensemble_std.shape[-1]]
    return np.asarray(np.sqrt(np.asarray(ensemble_std, dtype=np.float64) ** 2 @ (w / w.sum())))


def component_share(
    ensemble_std: Float64Array, pooled: Float64Array, isotropy: float, multiplicity: Float64Array
) -> Float64Array:
    """Return σ_k/σ of components (n,) of vectors, or tensors: √((1 − u) ŝ_k²/r² + u/m_k).

    ŝ_k (n,) are their standard deviations, r (n,) those of their vectors, u is the isotropy, and
    m_k (n,) how often a component is in its tensor, relative to the mean.
    """
    squares = calibration_factors(ensemble_std, pooled) ** 2
    return np.asarray(np.sqrt((1 - isotropy) * squares + isotropy / multiplicity))


def shrink_towards_sphere(members: Float64Array, isotropy: float) -> Float64Array:
    """Return members (…, 3, 6 or 9, N) of vectors of which the covariance is that of the sphere.

    To the share u, `isotropy`; the rest is the covariance of the members.
    """
    root = MULTIPLICITY[members.shape[-2]][:, None] ** 0.5
    mean = members.mean(axis=-1, keepdims=True)
    X = (members - mean) * root
    variances, axes = np.linalg.eigh(X @ np.swapaxes(X, -1, -2))
    variances = np.maximum(variances, 0.0)
    mean_variance = variances.mean(axis=-1, keepdims=True) + np.finfo(np.float64).tiny
    sphere = variances / (variances + _SYMMETRIC * mean_variance)
    sphere /= sphere.mean(axis=-1, keepdims=True) + np.finfo(np.float64).tiny
    target = (1 - isotropy) * variances + isotropy * mean_variance * sphere
    factors = np.sqrt(calibration_factors(target, variances))
    L = axes * factors[..., None, :] @ np.swapaxes(axes, -1, -2)  # Σ^½ Ĉ^−½ r/σ
    return np.asarray(mean + L @ X / root)
