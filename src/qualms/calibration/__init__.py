"""From ensemble standard deviations to calibrated ones: Eqs. (8), (9), (12), (19) and beyond.

| method | assumption | parameters |
|---|---|---|
| none | σ = ŝ | |
| linear | z ~ N(0, α²ŝ²), Eqs. (9) and (12) | α |
| power | z ~ N(0, α²ŝ^2γ), Eq. (19) | α, γ |
| student | as linear, for a finite ensemble | α |
| shrinkage | as power, and ŝ itself is noisy (empirical Bayes) | α, γ, m, τ |
"""

from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import (
    METHODS,
    N_PARAMETERS,
    PerOutputCalibration,
    build_calibration,
    calibrate,
    fit_calibration,
    fit_internally,
    internal_points,
)
from qualms.calibration.groups import GroupedCalibration, GroupFactor, fit_grouped, fit_groups
from qualms.calibration.methods import (
    LinearCalibration,
    NoCalibration,
    PowerCalibration,
    Scaled,
    SpreadExtrapolation,
    StudentCalibration,
    WholeCalibration,
    extrapolate_spread,
    variance_scale,
    whole_spread,
)
from qualms.calibration.selection import (
    Candidate,
    Comparison,
    ConfidenceIntervals,
    bootstrap_intervals,
    compare_calibrations,
    confidence_intervals,
    cross_validate,
)
from qualms.calibration.shrinkage import ShrinkageCalibration

__all__ = [
    "METHODS",
    "N_PARAMETERS",
    "Calibration",
    "CalibrationData",
    "Candidate",
    "Comparison",
    "ConfidenceIntervals",
    "GroupFactor",
    "GroupedCalibration",
    "LinearCalibration",
    "NoCalibration",
    "PerOutputCalibration",
    "PowerCalibration",
    "Scaled",
    "ShrinkageCalibration",
    "SpreadExtrapolation",
    "StudentCalibration",
    "WholeCalibration",
    "bootstrap_intervals",
    "build_calibration",
    "calibrate",
    "calibration_data",
    "compare_calibrations",
    "confidence_intervals",
    "cross_validate",
    "extrapolate_spread",
    "fit_calibration",
    "fit_grouped",
    "fit_groups",
    "fit_internally",
    "internal_points",
    "variance_scale",
    "whole_spread",
]
