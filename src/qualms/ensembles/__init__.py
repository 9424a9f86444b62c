"""Ensembles of other programs: read, calibrated, and written with calibrated uncertainties."""

from qualms.ensembles.apply import apply_calibration
from qualms.ensembles.calibrate import Calibrated, calibrate_ensemble, evaluate_ensemble
from qualms.ensembles.calibration_file import (
    CalibrationDocument,
    read_calibration,
    write_calibration,
)
from qualms.ensembles.io import Ensemble, read_ensemble

__all__ = [
    "Calibrated",
    "CalibrationDocument",
    "Ensemble",
    "apply_calibration",
    "calibrate_ensemble",
    "evaluate_ensemble",
    "read_calibration",
    "read_ensemble",
    "write_calibration",
]
