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

from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.groups import GroupedCalibration, fit_grouped
from qualms.calibration.methods import PowerCalibration, extrapolate_std, variance_scale
from qualms.calibration.selection import confidence_intervals, cross_validate

__all__ = [
    "METHODS",
    "Calibration",
    "CalibrationData",
    "GroupedCalibration",
    "PowerCalibration",
    "calibration_data",
    "confidence_intervals",
    "cross_validate",
    "extrapolate_std",
    "fit_calibration",
    "fit_grouped",
    "variance_scale",
]
