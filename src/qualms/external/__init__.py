"""Ensembles that others made: read, calibrated, judged, and written with error bars that hold."""

from qualms.external.applying import apply_calibration
from qualms.external.calibrating import Calibrated, calibrate_ensemble
from qualms.external.calibration_file import (
    CalibrationDocument,
    read_calibration,
    write_calibration,
)
from qualms.external.ensemble import Ensemble
from qualms.external.reading import read_ensemble

__all__ = [
    "Calibrated",
    "CalibrationDocument",
    "Ensemble",
    "apply_calibration",
    "calibrate_ensemble",
    "read_calibration",
    "read_ensemble",
    "write_calibration",
]
