"""Fitting a calibration by name, and building it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qualms.arrays import BoolArray, Float64Array, FloatArray
from qualms.calibration.base import (
    Calibratable,
    Calibration,
    CalibrationData,
    P_co,
    calibration_data,
)
from qualms.calibration.methods import (
    LinearCalibration,
    NoCalibration,
    PowerCalibration,
    StudentCalibration,
    fit_linear,
    fit_none,
    fit_power,
    fit_student,
)
from qualms.calibration.shrinkage import ShrinkageCalibration, fit_shrinkage
from qualms.errors import InputError
from qualms.gp.ensemble import MIN_ABSENT

#: Calibrations by name.
METHODS: dict[str, Callable[[CalibrationData], Calibration]] = {
    "none": fit_none,
    "linear": fit_linear,
    "power": fit_power,
    "student": fit_student,
    "shrinkage": fit_shrinkage,
}

_CLASSES: dict[str, type[Calibration]] = {
    cls.method: cls
    for cls in (
        NoCalibration,
        LinearCalibration,
        PowerCalibration,
        StudentCalibration,
        ShrinkageCalibration,
    )
}
#: Methods that neglect the sampling error of ŝ, the absences that the paper then requires, and the
#: smallest number of such points.
_EXACT, PAPER_ABSENT, _ENOUGH = ("linear", "power"), 5, 30
#: Numbers that each method fits.
N_PARAMETERS = {method: cls.n_parameters for method, cls in _CLASSES.items()}


@dataclass(frozen=True)
class PerOutputCalibration:
    """One calibration for each output of a model with several: their units need not be the same."""

    outputs: tuple[Calibration, ...]

    @property
    def method(self) -> str:
        """Name of the method; an output that is constant has none."""
        return next((c.method for c in self.outputs if c.method != "none"), "none")

    @property
    def alpha(self) -> Float64Array:
        """α of each output: (T,)."""
        return np.array([c.alpha for c in self.outputs])

    @property
    def gamma(self) -> Float64Array:
        """γ of each output: (T,)."""
        return np.array([c.gamma for c in self.outputs])

    @property
    def log_likelihood(self) -> Float64Array:
        """Mean log likelihood of each output: (T,)."""
        return np.array([c.log_likelihood for c in self.outputs])

    def std(self, spread: FloatArray, n_members: int) -> Float64Array:
        """Return the calibrated standard deviations for spreads (…, T)."""
        self._check_outputs(spread.shape)
        columns = [c.std(spread[..., t], n_members) for t, c in enumerate(self.outputs)]
        return np.stack(columns, axis=-1)

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale the members (…, T, N_R) about their means, output by output."""
        self._check_outputs(members.shape[:-1])
        scaled = [c.transform(members[..., t, :]) for t, c in enumerate(self.outputs)]
        return np.stack(scaled, axis=-2)

    def apply(self, prediction: Calibratable[P_co]) -> P_co:
        """Return the calibrated prediction."""
        return prediction.calibrated(self)

    def _check_outputs(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != len(self.outputs):
            raise InputError(
                "prediction",
                f"shape {shape}",
                f"{len(self.outputs)} outputs on the last axis",
                "For some of the outputs, apply their own calibrations, .outputs[t].",
            )


def build_calibration(method: str, parameters: Mapping[str, Any]) -> Calibration:
    """Build a calibration from the result of `Calibration.parameters`."""
    if method not in _CLASSES:
        raise InputError("method", repr(method), f"one of {', '.join(_CLASSES)}")
    return _CLASSES[method](**parameters)


def fit_calibration(
    data: CalibrationData, method: str = "student", near: Calibration | None = None
) -> Calibration:
    """Fit one calibration by name.

    Parameters
    ----------
    data : CalibrationData
    method : str
    near : Calibration, optional
        A fit to similar points, to start the search from.
    """
    if method not in METHODS:
        raise InputError("method", repr(method), f"one of {', '.join(METHODS)}")
    if method == ShrinkageCalibration.method and isinstance(near, ShrinkageCalibration):
        return fit_shrinkage(data, near)
    return METHODS[method](data)


def internal_points(data: CalibrationData, method: str) -> BoolArray:
    """Return which out-of-bag points (n,) a method is fitted to.

    E[z²/ŝ²] ∝ (c − 1)/(c − 3) is infinite for c = 3 members. Methods that neglect the sampling
    error of ŝ are fitted to points absent from five members or more, as in the paper; if there are
    few such points, to all. The others account for c and use all points.
    """
    often_absent: BoolArray = data.n_members >= PAPER_ABSENT
    if method in _EXACT and np.count_nonzero(often_absent) >= _ENOUGH:
        return often_absent
    return np.ones(len(data.n_members), dtype=bool)


def fit_internally(data: CalibrationData, method: str = "student") -> Calibration:
    """Fit one calibration by name to out-of-bag points: Eq. (12)."""
    return fit_calibration(data.some(internal_points(data, method)), method)


def calibrate(
    y: FloatArray,
    members: FloatArray,
    *,
    absent: BoolArray | None = None,
    method: str = "student",
    min_absent: int | None = None,
    sample_weight: FloatArray | None = None,
) -> Calibration | PerOutputCalibration:
    """Fit a calibration to members (n, N_R) or (n, T, N_R): see `qualms.calibrate`.

    Parameters
    ----------
    y, members, absent, method
        As in `qualms.calibrate`.
    min_absent : int, optional
        Leave out points absent from fewer members; by default 3, and 5 for "linear" and "power",
        which neglect the sampling error of ŝ, as in the paper.
    sample_weight : (n,) array, optional
    """
    y = np.asarray(y, dtype=np.float64)
    members = np.asarray(members, dtype=np.float64)

    def fit_one(targets: FloatArray, predicted: FloatArray) -> Calibration:
        least = MIN_ABSENT if min_absent is None else min_absent
        data = calibration_data(
            targets, predicted, absent, min_absent=least, sample_weight=sample_weight
        )
        by_default = absent is not None and min_absent is None
        return fit_internally(data, method) if by_default else fit_calibration(data, method)

    if y.ndim == 2 and members.ndim == 3 and members.shape[:2] == y.shape:
        return PerOutputCalibration(
            tuple(fit_one(y[:, t], members[:, t]) for t in range(y.shape[1]))
        )
    return fit_one(y, members)
