"""One factor for all components of a vector or a tensor, so that directions do not matter.

A calibration whose factor depends on the spread (power, shrinkage) would, taken component by
component, stretch the three components of a force by three factors: another choice of axes, and
the members differ. The factor is therefore that of the spread of the whole, the root mean square
of the spreads ŝ_k of its components,

    r² = Σ_k ŝ_k² / 3  for vectors,      r² = Σ_ij ŝ_ij² / 9  for tensors,

which no rotation changes, since it is the trace of a covariance, and component k gets the error bar
f(r) ŝ_k. What is applied is what must be fitted: with the residual z_k of a component,

    z_k ~ f(r) ŝ_k   ⇔   (r/ŝ_k) z_k ~ f(r) r,

so that components that are multiplied by r/ŝ_k, the truth and all members alike, have the spread r
and are calibrated as any other points are. If f is the same for all spreads (linear, student), that
changes nothing, at fitting or afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qualms.core.calibration.base import Calibration
from qualms.core.resampling import committee, stretched
from qualms.core.typing import Float64Array, FloatArray

#: How often components are in a vector (x, y, z), and in a symmetric tensor (xx, yy, zz, yz, xz,
#: xy), by how many there are.
MULTIPLICITY = {3: np.ones(3), 6: np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])}


def whole_spread(spread: FloatArray) -> Float64Array:
    """Return the spread r (…) of vectors or tensors whose components have spreads (…, 3 or 6)."""
    w = MULTIPLICITY[spread.shape[-1]]
    r: Float64Array = np.sqrt(np.asarray(spread, dtype=np.float64) ** 2 @ (w / w.sum()))
    return r


@dataclass(frozen=True)
class WholeCalibration:
    """A calibration of vectors or tensors by the spread of the whole; a `MemberTransform`.

    Attributes
    ----------
    calibration : Calibration
        Fitted to components that were multiplied by r/ŝ_k.
    """

    calibration: Calibration

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (…, 3 or 6, N_R) about their mean, all components by one factor."""
        mean, spread = committee(members)
        r = whole_spread(spread)
        positive = r > 0
        factor = np.ones_like(r)
        factor[positive] = self.calibration.std(r[positive], members.shape[-1]) / r[positive]
        return stretched(members, np.broadcast_to(factor[..., None], spread.shape), mean)


@dataclass(frozen=True)
class Scaled:
    """Scales members about their mean by factors from elsewhere; a `MemberTransform`.

    Attributes
    ----------
    factors : float or (n,) array
        One for all, or one for each of the first axis.
    """

    factors: float | Float64Array

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (n, …, N_R)."""
        points = members.shape[:-1]
        factors = np.reshape(self.factors, (-1, *[1] * (len(points) - 1)))
        return stretched(members, np.broadcast_to(factors, points))
