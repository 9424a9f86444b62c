"""From the spread between members to error bars that hold: Eqs. (8), (9), (12), (19) and beyond.

| method | what it assumes | parameters |
|---|---|---|
| none | the spread is the error | |
| linear | z ~ N(0, α²ŝ²), Eqs. (9) and (12) | α |
| power | z ~ N(0, α²ŝ^2γ), Eq. (19) | α, γ |
| student | as linear, for a committee that is finite | α |
| shrinkage | as power, and ŝ itself is noisy (empirical Bayes) | α, γ, m, τ |
"""

from qualms.core.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.core.calibration.comparison import (
    Candidate,
    Comparison,
    compare_calibrations,
    cross_validate,
)
from qualms.core.calibration.extrapolation import SpreadExtrapolation, extrapolate_spread
from qualms.core.calibration.fitting import (
    METHODS,
    N_PARAMETERS,
    PerOutputCalibration,
    build_calibration,
    calibrate,
    fit_calibration,
    fit_internally,
    internal_points,
)
from qualms.core.calibration.grouped import (
    GroupedCalibration,
    GroupFactor,
    fit_grouped,
    fit_groups,
)
from qualms.core.calibration.intervals import (
    ConfidenceIntervals,
    bootstrap_intervals,
    confidence_intervals,
)
from qualms.core.calibration.scaling import (
    LinearCalibration,
    NoCalibration,
    PowerCalibration,
    variance_scale,
)
from qualms.core.calibration.shrinkage import ShrinkageCalibration
from qualms.core.calibration.student import StudentCalibration
from qualms.core.calibration.whole import Scaled, WholeCalibration, whole_spread

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
