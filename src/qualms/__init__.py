"""Honest error bars for chemical machine learning.

>>> from qualms import ProjectedProcessRegressor
>>> model = ProjectedProcessRegressor(random_state=0)  # doctest: +SKIP
>>> mean, std = model.fit(X, y).predict(X_new, return_std=True)  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qualms.calibration.base import Calibration
from qualms.errors import CalibrationError, InputError, NumericalError, QualmsError, QualmsWarning
from qualms.gp.representatives import farthest_points
from qualms.metrics import score
from qualms.prediction import Prediction, calibrate

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
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


#: What takes a second to import, and where it is: only who wants it pays for that.
_LAZY = {
    "AtomisticModel": "qualms.atomistic",
    "ProjectedProcessRegressor": "qualms.regressors",
    "ResamplingRegressor": "qualms.regressors",
}


#: Modules that are there without an import of their own.
_MODULES = ("ase", "thermo")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"qualms.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
