"""From ensemble standard deviations to calibrated ones: Eqs. (8), (9), (12), (19) and beyond.

| method | assumption | parameters |
|---|---|---|
| none | σ = ŝ | |
| linear | z ~ N(0, α²ŝ²), Eqs. (9) and (12) | α |
| power | z ~ N(0, α²ŝ^2γ), Eq. (19) | α, γ |
| student | z ~ N(0, α²s²), and ŝ of few members is an estimate of s | α |
| shrinkage | z ~ N(0, α²s^2γ), the same | α, γ, m, τ |
| sources | sum of variances: ensemble, posterior, novelty, constant | a, b, c, d |
"""

from qualms.calibration.choice import confidence_intervals, cross_validate
from qualms.calibration.groups import GroupedCalibration, fit_grouped
from qualms.calibration.methods import (
    METHODS,
    Calibration,
    PowerCalibration,
    fit_calibration,
    variance_scale,
)
from qualms.calibration.points import CalibrationData, calibration_data

__all__ = [
    "METHODS",
    "Calibration",
    "CalibrationData",
    "GroupedCalibration",
    "PowerCalibration",
    "calibration_data",
    "confidence_intervals",
    "cross_validate",
    "fit_calibration",
    "fit_grouped",
    "variance_scale",
]
