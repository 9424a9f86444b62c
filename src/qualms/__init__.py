"""Honest error bars for chemical machine learning.

>>> from qualms import ProjectedProcessRegressor
>>> model = ProjectedProcessRegressor(random_state=0)  # doctest: +SKIP
>>> mean, std = model.fit(X, y).predict(X_new, return_std=True)  # doctest: +SKIP
"""

from qualms.core.calibration import Calibration
from qualms.core.selection import farthest_points
from qualms.errors import CalibrationError, InputError, NumericalError, QualmsError, QualmsWarning
from qualms.estimators import ProjectedProcessRegressor, ResamplingRegressor
from qualms.prediction import Prediction, calibrate, score

__version__ = "0.1.0.dev0"

__all__ = [
    "Calibration",
    "CalibrationError",
    "InputError",
    "NumericalError",
    "Prediction",
    "ProjectedProcessRegressor",
    "QualmsError",
    "QualmsWarning",
    "ResamplingRegressor",
    "calibrate",
    "farthest_points",
    "score",
]
