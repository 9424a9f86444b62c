"""Chemical machine learning with calibrated uncertainties.

>>> from qualms import ProjectedProcessRegressor
>>> model = ProjectedProcessRegressor(random_state=0)  # doctest: +SKIP
>>> mean, std = model.fit(X, y).predict(X_new, return_std=True)  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.calibration.methods import Calibration
    from qualms.errors import (
        CalibrationError,
        InputError,
        NumericalError,
        QualmsError,
        QualmsWarning,
    )
    from qualms.gp.representatives import farthest_points
    from qualms.metrics import score
    from qualms.prediction import Prediction, calibrate
    from qualms.regressors import ProjectedProcessRegressor, ResamplingRegressor


__version__ = "0.1.0"


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


#: Module of each public name. They are imported when they are used, so that importing `qualms`, and
#: with it the help of the command line, takes no time.
_LAZY = {
    "AtomisticModel": "qualms.atomistic.model",
    "Calibration": "qualms.calibration.methods",
    "CalibrationError": "qualms.errors",
    "InputError": "qualms.errors",
    "NumericalError": "qualms.errors",
    "Prediction": "qualms.prediction",
    "ProjectedProcessRegressor": "qualms.regressors",
    "QualmsError": "qualms.errors",
    "QualmsWarning": "qualms.errors",
    "ResamplingRegressor": "qualms.regressors",
    "calibrate": "qualms.prediction",
    "farthest_points": "qualms.gp.representatives",
    "score": "qualms.metrics",
}


#: Modules that are attributes without an import of their own.
_MODULES = ("ase", "thermo")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"qualms.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
