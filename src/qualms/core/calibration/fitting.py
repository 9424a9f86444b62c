"""Fitting a calibration by name, comparing them, and saying how certain α and γ are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qualms.core.calibration.base import (
    Calibratable,
    Calibration,
    CalibrationData,
    P_co,
    calibration_data,
)
from qualms.core.calibration.scaling import (
    LinearCalibration,
    NoCalibration,
    PowerCalibration,
    fit_linear,
    fit_none,
    fit_power,
)
from qualms.core.calibration.shrinkage import ShrinkageCalibration, fit_shrinkage
from qualms.core.calibration.student import StudentCalibration, fit_student
from qualms.core.resampling import MIN_ABSENT, group_codes
from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray
from qualms.errors import InputError

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
    """Build a calibration again from what `Calibration.parameters` said about it."""
    if method not in _CLASSES:
        raise InputError("method", repr(method), f"one of {', '.join(_CLASSES)}")
    return _CLASSES[method](**parameters)


def fit_calibration(data: CalibrationData, method: str = "student") -> Calibration:
    """Fit one calibration by name to residuals and spreads."""
    if method not in METHODS:
        raise InputError("method", repr(method), f"one of {', '.join(METHODS)}")
    return METHODS[method](data)


def calibrate(
    y: FloatArray,
    members: FloatArray,
    *,
    absent: BoolArray | None = None,
    method: str = "student",
    min_absent: int = MIN_ABSENT,
    sample_weight: FloatArray | None = None,
) -> Calibration | PerOutputCalibration:
    """Find out how the spread between members relates to the true errors.

    Parameters
    ----------
    y : (n,) or (n, T) array
        Targets.
    members : (n, N_R) or (n, T, N_R) array
        What each member predicts for them.
    absent : (n, N_R) array of bool, optional
        Whether a point was absent from the training set of a member. With it, training points serve
        for the calibration, each predicted only by the members that did not see it (Eqs. 10–12,
        Musil et al. 2019). Without it the points must be new to all members.
    method : {"student", "shrinkage", "linear", "power", "none"}
    min_absent : int
        Leave out points that fewer members are absent from.
    sample_weight : (n,) array, optional
        How much each point counts.

    Returns
    -------
    Calibration
        With ``.alpha``, ``.gamma`` and ``.apply(prediction)``; one per output if y has T columns.
    """
    y = np.asarray(y, dtype=np.float64)
    members = np.asarray(members, dtype=np.float64)

    def fit_one(targets: FloatArray, predicted: FloatArray) -> Calibration:
        data = calibration_data(
            targets, predicted, absent, min_absent=min_absent, sample_weight=sample_weight
        )
        return fit_calibration(data, method)

    if y.ndim == 2 and members.ndim == 3 and members.shape[:2] == y.shape:
        return PerOutputCalibration(
            tuple(fit_one(y[:, t], members[:, t]) for t in range(y.shape[1]))
        )
    return fit_one(y, members)


def compare_calibrations(
    data: CalibrationData, methods: Sequence[str] = tuple(METHODS), *, criterion: str = "bic"
) -> list[Calibration]:
    """Fit several calibrations to the same data and order them, best first, by AIC or BIC.

    All likelihoods are those of z given ŝ, so they can be compared.
    """
    if criterion not in ("aic", "bic"):
        raise InputError("criterion", repr(criterion), '"aic" or "bic"')
    fitted = [fit_calibration(data, method) for method in methods]
    return sorted(fitted, key=lambda c: c.aic if criterion == "aic" else c.bic)


@dataclass(frozen=True)
class ConfidenceIntervals:
    """Percentile bootstrap intervals (lower, upper) of the parameters of a calibration."""

    alpha: tuple[float, float]
    gamma: tuple[float, float]
    level: float


def bootstrap_intervals(
    data: CalibrationData,
    method: str = "student",
    *,
    n_bootstrap: int = 200,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
    groups: Sequence[object] | IntArray | None = None,
) -> ConfidenceIntervals:
    """Resample the points with replacement and fit the calibration each time.

    Parameters
    ----------
    data : CalibrationData
    method : str
    n_bootstrap : int
        Number of resampled fits, at least 20.
    level : float
        Probability covered, in (0, 1).
    rng : numpy.random.Generator, optional
        Seeded with 0 if not given.
    groups : (n,) array, optional
        Labels of points whose errors are correlated: whole groups are then resampled.
    """
    if n_bootstrap < 20:
        raise InputError("n_bootstrap", n_bootstrap, "at least 20")
    if not 0 < level < 1:
        raise InputError("level", level, "a probability between 0 and 1")
    rng = np.random.default_rng(0) if rng is None else rng
    n = len(data.residuals)
    codes = np.arange(n) if groups is None else group_codes(groups, n)
    n_groups = int(codes.max()) + 1
    pairs = np.empty((n_bootstrap, 2))
    for b in range(n_bootstrap):
        times = np.bincount(rng.integers(n_groups, size=n_groups), minlength=n_groups)[codes]
        fitted = fit_calibration(data.reweighted(data.weights * times), method)
        pairs[b] = fitted.alpha, fitted.gamma
    lower, upper = np.quantile(pairs, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ConfidenceIntervals(
        (float(lower[0]), float(upper[0])), (float(lower[1]), float(upper[1])), level
    )
