"""Derivatives of calibrated members, and of their spread, from those of the members as they are.

A calibration scales members E_i about their mean by a factor that may depend on their spread s:

    E_i' = Ē + f(s) d_i,     d_i = E_i − Ē,     s² = Σ d_i² / (N_R − 1),     σ = f(s) s

so with g_i = ∇E_i and γ_i = g_i − ḡ

    ∇ ln s = Σ_i d_i γ_i / ((N_R − 1) s²)
    ∇E_i'  = ḡ + f γ_i + (df/d ln s) d_i ∇ ln s
    ∇σ     = (f + df/d ln s) s ∇ ln s

For a constant factor the second terms vanish. Forces and stresses are such derivatives up to a
common factor, which these formulas do not care about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qualms.core.calibration import Calibration
from qualms.core.resampling import committee
from qualms.core.typing import Float64Array

#: Step of the central difference in ln s: its error is about the square of that.
_STEP = 1e-4


@dataclass(frozen=True)
class CalibratedPoint:
    """One prediction, and how its calibration changes with it.

    Attributes
    ----------
    members : (N_R,) array
        E_i, before calibration.
    factor : float
        f(s).
    slope : float
        df/d ln s.
    """

    members: Float64Array
    factor: float
    slope: float

    def member_gradients(self, gradients: Float64Array) -> Float64Array:
        """Return ∇E_i' (…, N_R), given ∇E_i of the same shape."""
        mean = gradients.mean(axis=-1, keepdims=True)
        deviations = self.members - self.members.mean()
        along = self._log_spread_gradient(gradients)[..., None]
        calibrated: Float64Array = (
            mean + self.factor * (gradients - mean) + self.slope * deviations * along
        )
        return calibrated

    def std_gradient(self, gradients: Float64Array) -> Float64Array:
        """Return ∇σ (…), given ∇E_i (…, N_R); zero where all members agree."""
        scale = (self.factor + self.slope) * self._spread
        gradient: Float64Array = scale * self._log_spread_gradient(gradients)
        return gradient

    @property
    def _spread(self) -> float:
        return float(committee(self.members)[1])

    def _log_spread_gradient(self, gradients: Float64Array) -> Float64Array:
        deviations = self.members - self.members.mean()
        square = float(deviations @ deviations)  # (N_R − 1) s²
        if square == 0.0:
            return np.zeros(gradients.shape[:-1])
        gradient: Float64Array = gradients @ deviations / square  # Σ d_i ḡ = 0
        return gradient


def calibrated_point(
    raw: Float64Array, calibrated: Float64Array, calibration: Calibration | None, scale: float = 1.0
) -> CalibratedPoint:
    """Describe one prediction.

    Parameters
    ----------
    raw, calibrated : (N_R,) arrays
        Members before and after calibration.
    calibration : Calibration or None
        What came between; None for a factor that does not depend on the spread.
    scale : float
        What was multiplied by after calibration: the number of atoms, for an extensive property.
    """
    before, after = (float(committee(members)[1]) for members in (raw, calibrated))
    factor, slope = (after / before if before > 0.0 else 1.0), 0.0
    if calibration is not None and before > 0.0:
        spreads = before / scale * np.exp([-_STEP, _STEP])
        low, high = (calibration.std(spreads, len(raw)) / spreads).tolist()
        slope = (high - low) / (2 * _STEP)
    return CalibratedPoint(raw, factor, slope)
