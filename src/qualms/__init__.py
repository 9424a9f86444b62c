"""Honest error bars for chemical machine learning.

>>> from qualms import ProjectedProcessRegressor
>>> model = ProjectedProcessRegressor(random_state=0)  # doctest: +SKIP
>>> mean, std = model.fit(X, y).predict(X_new, return_std=True)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from qualms.core.calibration import Calibration
from qualms.core.selection import farthest_points
from qualms.errors import CalibrationError, InputError, NumericalError, QualmsError, QualmsWarning
from qualms.estimators import ProjectedProcessRegressor, ResamplingRegressor
from qualms.prediction import Prediction, calibrate, score

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from qualms.atomistic import AtomisticModel

__all__ = [
    "AtomisticModel",
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


def __getattr__(name: str) -> Any:
    # ASE and the engines take a second to import: only who wants structures pays for that.
    if name == "AtomisticModel":
        from qualms.atomistic import AtomisticModel

        return AtomisticModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
