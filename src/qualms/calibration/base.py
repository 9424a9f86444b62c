"""Calibrations and the data that they are fitted to."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, check_members, check_points
from qualms.errors import CalibrationError, ExactFitError, InputError, QualmsWarning, counted
from qualms.gp.ensemble import MIN_ABSENT, committee, internal_prediction, stretched

P_co = TypeVar("P_co", covariant=True)
C = TypeVar("C", bound="Calibration")


class MemberTransform(Protocol):
    """A transformation of the predictions of members."""

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale the members about their mean so that their standard deviation is calibrated."""
        ...


class Calibratable(Protocol[P_co]):
    """Something that lets a calibration be applied to it, such as `qualms.Prediction`."""

    def calibrated(self, calibration: MemberTransform) -> P_co:
        """Return a calibrated copy."""
        ...


@dataclass(frozen=True)
class CalibrationData:
    """Residuals and ensemble standard deviations of points with reference values.

    Attributes
    ----------
    residuals : (n,) array
        z = y − mean over the (out-of-bag) members.
    spread : (n,) array
        ŝ, the standard deviation (ddof = 1) over the same members; positive.
    n_members : (n,) array of int
        c, the number of these members.
    weights : (n,) array
        How often each point counts; all ones, except in a bootstrap or with sample weights.
    """

    residuals: Float64Array
    spread: Float64Array
    n_members: IntArray
    weights: Float64Array

    @property
    def total(self) -> float:
        """Number of points, by weight."""
        return float(self.weights.sum())

    def mean(self, values: FloatArray) -> float:
        """Return the weighted mean over points."""
        return float(self.weights @ values) / self.total

    def some(self, chosen: BoolArray) -> CalibrationData:
        """Return some of the points."""
        return CalibrationData(
            self.residuals[chosen],
            self.spread[chosen],
            self.n_members[chosen],
            self.weights[chosen],
        )

    def reweighted(self, weights: Float64Array) -> CalibrationData:
        """Return the same points, counted differently."""
        return CalibrationData(self.residuals, self.spread, self.n_members, weights)


def calibration_data(
    y: FloatArray,
    members: FloatArray,
    absent: BoolArray | None = None,
    *,
    min_absent: int = MIN_ABSENT,
    sample_weight: FloatArray | None = None,
) -> CalibrationData:
    """Collect residuals and ensemble standard deviations, out-of-bag with `absent`: Eqs. (10)–(12).

    Parameters
    ----------
    y : (n,) array
        Targets.
    members : (n, N_R) array
        Predictions of each member.
    absent : (n, N_R) array of bool, optional
        Whether the point is out-of-bag for the member. If not given, it is for all members.
    min_absent : int
        Points that fewer members are absent from are left out.
    sample_weight : (n,) array, optional
    """
    targets = check_points("y", y)
    if targets.ndim != 1:
        raise InputError("y", f"shape {targets.shape}", "one value per point, shape (n,)")
    predicted = check_members(members, targets.shape)
    weights = np.ones(len(targets))
    if sample_weight is not None:
        weights = check_points("sample_weight", sample_weight, targets.shape)
        if np.any(weights < 0) or not np.any(weights > 0):
            raise InputError(
                "sample_weight", f"minimum {weights.min():.3g}", "weights ≥ 0, not all of them 0"
            )
    rounding = rounding_of(predicted)
    if absent is None:
        mean, spread = committee(predicted)
        c = np.full(len(targets), predicted.shape[1])
        return _with_spread(CalibrationData(targets - mean, spread, c, weights), rounding)
    internal = internal_prediction(predicted, absent, min_absent=min_absent)
    if not internal.used.any():
        raise CalibrationError(
            f"No point is absent from at least {min_absent} members, so there is nothing to "
            "calibrate on. Increase n_members or decrease subsample."
        )
    residuals = targets[internal.used] - internal.mean
    data = CalibrationData(residuals, internal.std, internal.n_absent, weights[internal.used])
    return _with_spread(data, rounding[internal.used])


def rounding_of(members: FloatArray) -> Float64Array:
    """Return the spread (n,) below which members (n, N_R) differ by the last digits alone."""
    rounding: Float64Array = 16 * np.finfo(np.float64).eps * np.abs(members).max(axis=1)
    return rounding


def _with_spread(data: CalibrationData, rounding: Float64Array) -> CalibrationData:
    """Leave out, with a warning, points without spread, whose likelihood is not defined."""
    keep = (data.spread > rounding) & (data.weights > 0)
    n_without = int(np.sum(data.spread <= rounding))
    if np.all(np.maximum(np.abs(data.residuals), data.spread) <= 1e4 * rounding):
        raise ExactFitError("The members are exact to rounding: there is no error to calibrate.")
    if keep.sum() < 2:
        raise CalibrationError(
            f"{keep.sum()} of {keep.size} points can be used; for {n_without} all members predict "
            "the same. At least 2 are needed: use more data, groups or members, or no calibration."
        )
    if not np.any(data.residuals[keep]):
        raise CalibrationError(
            "All residuals are exactly zero, so no scale of the errors can be found. "
            "Are the targets predictions of the same members?"
        )
    if n_without:
        warnings.warn(
            f"{n_without} of {keep.size} points have no spread between members "
            "and are left out of the calibration.",
            QualmsWarning,
            stacklevel=2,
        )
    return CalibrationData(
        data.residuals[keep], data.spread[keep], data.n_members[keep], data.weights[keep]
    )


def reject_exact(data: CalibrationData) -> None:
    """Reject points without any error, which do not determine a scale."""
    if not np.any(data.residuals[data.weights > 0]):
        n = len(data.residuals)
        raise CalibrationError(
            f"All residuals of {counted(n, 'point')} are exactly zero, so no scale can be found. "
            "Use more points."
        )


@dataclass(frozen=True, kw_only=True)
class Calibration(ABC):
    """A rule that turns the ensemble standard deviation into a calibrated one.

    Attributes
    ----------
    alpha, gamma : float
        Scale and exponent; see the methods.
    n_points : int
        Number of points the calibration was fitted to.
    log_likelihood : float
        Mean over these points of ln p(z | ŝ) under the predictive density of the method.
    """

    method: ClassVar[str]
    n_parameters: ClassVar[int]

    alpha: float = 1.0
    gamma: float = 1.0
    n_points: int = 0
    log_likelihood: float = 0.0

    @abstractmethod
    def std(self, spread: FloatArray, n_members: int | IntArray) -> Float64Array:
        """Return the calibrated standard deviation for ŝ of so many members."""

    @abstractmethod
    def log_density(
        self, residuals: FloatArray, spread: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ) under the predictive density of the method, per point."""

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale the members (…, N_R) about their mean to the calibrated standard deviation.

        Eq. (19), Musil et al. 2019, for any calibration. Members that agree are not changed.
        """
        mean, spread = committee(members)
        positive = spread > 0
        std = self.std(spread[positive], members.shape[-1])
        factor = np.ones_like(spread)
        factor[positive] = std / spread[positive]
        return stretched(members, factor, mean)

    def apply(self, prediction: Calibratable[P_co]) -> P_co:
        """Return the calibrated prediction."""
        return prediction.calibrated(self)

    @property
    def aic(self) -> float:
        """Akaike's criterion 2k − 2 ln L; the smaller the better."""
        return 2 * self.n_parameters - 2 * self.n_points * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion k ln n − 2 ln L; the smaller the better."""
        penalty = self.n_parameters * float(np.log(max(self.n_points, 1)))
        return penalty - 2 * self.n_points * self.log_likelihood

    def parameters(self) -> dict[str, Any]:
        """Return everything needed to build the calibration again, as plain numbers."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def with_likelihood(calibration: C, data: CalibrationData) -> C:
    """Return the calibration with the number and the likelihood of the points it was fitted to."""
    densities = calibration.log_density(data.residuals, data.spread, data.n_members)
    return replace(calibration, n_points=len(data.residuals), log_likelihood=data.mean(densities))
