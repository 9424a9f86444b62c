"""Fitting a calibration by name, and building it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from qualms.arrays import BoolArray, Float64Array, FloatArray, check_integer, check_number
from qualms.calibration.base import (
    Calibratable,
    Calibration,
    CalibrationData,
    P_co,
)
from qualms.calibration.members import calibrated_members, with_equal_members
from qualms.calibration.methods import (
    LinearCalibration,
    NoCalibration,
    PowerCalibration,
    StudentCalibration,
)
from qualms.calibration.shrinkage import ShrinkageCalibration
from qualms.calibration.sources import SourcesCalibration
from qualms.errors import CalibrationError, InputError, unknown_choice
from qualms.metrics import gaussian_log_density

#: Calibrations by name.
METHODS: dict[str, type[Calibration]] = {
    cls.method: cls
    for cls in (
        NoCalibration,
        LinearCalibration,
        PowerCalibration,
        StudentCalibration,
        ShrinkageCalibration,
    )
}
#: Calibrations of sparse Gaussian processes, which have further sources of variance.
MODEL_METHODS: dict[str, type[Calibration]] = METHODS | {"sources": SourcesCalibration}
#: Numbers that each method fits.
N_PARAMETERS = {method: cls.n_parameters for method, cls in METHODS.items()}
#: Methods that neglect the sampling error of ŝ, the absences that the paper then requires, and the
#: smallest number of such points.
_EXACT, PAPER_ABSENT, _ENOUGH = ("linear", "power"), 5, 30


def class_of(method: str) -> type[Calibration]:
    """Return the calibration of this name."""
    if method not in MODEL_METHODS:
        raise unknown_choice("method", method, MODEL_METHODS)
    return MODEL_METHODS[method]


#: Ranges of parameters; others are between 0 and `_LARGEST`. Logarithms are those of standard
#: deviations.
_LARGEST = 1e100
_RANGES = {
    "gamma": (0.0, 5.0),
    "centre": (0.0, 1.0),
    "log_likelihood": (-_LARGEST, _LARGEST),
    "log_std_mean": (-300.0, 300.0),
    "log_std_slope": (-100.0, 100.0),
    "log_std_std": (1e-6, 100.0),
    "n_components": (1.0, 10.0),
    "n_calibrated": (0.0, 0.0),  # that of a model follows from its calibrations
    "inverse_dof": (0.0, 0.5 - 1e-6),
}


def build_calibration(method: str, parameters: Mapping[str, Any]) -> Calibration:
    """Build a calibration from the result of `Calibration.parameters`; numbers are checked."""
    for name, value in parameters.items():
        low, high = _RANGES.get(name, (0.0, _LARGEST))
        if check_number(name, value, low) > high:
            raise InputError(f"`{name}` is {value}; it is at most {high:g}.", parameter=name)
        if name in ("n_points", "n_subsampled"):
            check_integer(name, value, 0)
    return class_of(method)(**parameters)


def fit_calibration(
    data: CalibrationData, method: str = "student", near: Calibration | None = None
) -> Calibration:
    """Fit one calibration by name; `near`, a fit to similar points, may be a start."""
    found = class_of(method)
    if method != "none" and not np.any(data.residuals[data.weights > 0]):
        raise CalibrationError(
            f"All residuals are exactly zero, so no scale can be found (points: "
            f"{len(data.residuals)}). Use more points."
        )
    return found.fit(data, near)


def out_of_bag_points(data: CalibrationData, method: str) -> BoolArray:
    """Return which out-of-bag points (n,) a method is fitted to.

    E[z²/ŝ²] ∝ (c − 1)/(c − 3) is infinite for c = 3 members. Methods that neglect the sampling
    error of ŝ are fitted to points absent from five members or more, as in the paper; if there are
    few such points, to all. The others account for c and use all points.
    """
    often_absent: BoolArray = data.n_members >= PAPER_ABSENT
    if method in _EXACT and np.count_nonzero(often_absent) >= _ENOUGH:
        return often_absent
    return np.ones(len(data.n_members), dtype=bool)


def fit_out_of_bag(data: CalibrationData, method: str = "student") -> Calibration:
    """Fit one calibration by name to out-of-bag points: Eq. (12)."""
    return fit_calibration(data.some(out_of_bag_points(data, method)), method)


def best_method(data: CalibrationData, fitted: Mapping[str, Calibration]) -> str:
    """Return the method whose Gaussians have the highest likelihood out of bag, by AIC."""

    def score(method: str) -> float:
        density = gaussian_log_density(data.residuals, fitted[method].std_of(data))
        return data.n_independent * data.mean(density) - fitted[method].n_parameters

    methods = [m for m in ("sources", "shrinkage", "student") if m in fitted]
    return max(methods, key=score, default="none")


def fit_best(data: CalibrationData, methods: Collection[str]) -> Calibration:
    """Fit those of some methods that can be fitted to out-of-bag points; return the best."""
    fitted: dict[str, Calibration] = {"none": NoCalibration()}
    for method in methods:
        with suppress(CalibrationError):
            fitted[method] = fit_out_of_bag(data, method)
    return fitted[best_method(data, fitted)]


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

    def members(
        self, members: FloatArray, *, novelty_std: FloatArray | None = None
    ) -> Float64Array:
        """Scale the members (…, T, N_R) about their means, output by output; q is (…, T)."""
        if members.ndim < 2 or members.shape[-2] != len(self.outputs):
            raise InputError(
                f"The `prediction` has shape {members.shape[:-1]}; the calibration is for "
                f"{len(self.outputs)} outputs on the last axis. For some of these, apply their own "
                "calibrations, outputs[t].",
                parameter="prediction",
            )
        scaled = [
            calibrated_members(
                c,
                members[..., t, :],
                novelty_std=None if novelty_std is None else novelty_std[..., t],
            )
            for t, c in enumerate(with_equal_members(self.outputs, members.shape[-1]))
        ]
        return np.stack(scaled, axis=-2)

    @property
    def needs_novelty(self) -> bool:
        """Whether q is a source of an output."""
        return any(c.needs_novelty for c in self.outputs)

    def apply(self, prediction: Calibratable[P_co]) -> P_co:
        """Return the calibrated prediction."""
        return prediction.calibrated(self)
