"""One calibration factor for each group of points, shrunk towards that of all points.

A calibration of all points may be too wide for one element and too narrow for another. Group g gets
a factor f_g on top of it, σ → f_g σ. By itself it would maximise the likelihood of the points of
the group, p(z | ŝ) → p(z/f | ŝ)/f, at e_g = ln f_g with a variance v_g of about v/n_g, and with a
bias, both as if it were the logarithm of the root mean square of 1/(2v_g) numbers. Between groups
ln f is taken to be N(0, τ²), whose τ² matches the scatter of the e_g (DerSimonian & Laird, Control.
Clin. Trials 7, 177 (1986)), so that

    ln f_g = e_g τ² / (τ² + v_g):

small groups are shrunk towards the common calibration.

The common calibration must not be fitted as if there were no groups: differences between groups
look like long tails, or like another exponent. So both are fitted in turn, the calibration to z/f_g
and the factors to z, until they no longer change; the mean of ln f goes into the calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qualms.arrays import Float64Array, IntArray, StrArray
from qualms.calibration.methods import Calibration, fit_calibration, log_std_moments
from qualms.calibration.points import CalibrationData
from qualms.errors import InputError
from qualms.gp.ensemble import group_scatter

#: Step of the derivatives in ln f.
_STEP = 3e-3


@dataclass(frozen=True)
class GroupFactor:
    """The factor of a group.

    `factor` is f_g after shrinkage, `alone` the same from the points of the group only.
    """

    factor: float
    alone: float
    n_points: int


@dataclass(frozen=True)
class GroupedCalibration:
    """A calibration of all points, and a factor for each kind of them.

    Labels that are not among `groups` have a factor of one.
    """

    overall: Calibration
    groups: Mapping[str, GroupFactor]

    def factors(self, labels: Sequence[str] | StrArray) -> Float64Array:
        """Return the factor of each point."""
        factors = {label: group.factor for label, group in self.groups.items()}
        return np.array([factors.get(str(label), 1.0) for label in labels])

    def common(self, data: CalibrationData, labels: Sequence[str] | StrArray) -> CalibrationData:
        """Return errors without the factors, z/f, to which the overall calibration is fitted."""
        return data.divided(self.factors(labels))

    def std_of(self, data: CalibrationData, labels: Sequence[str] | StrArray) -> Float64Array:
        """Return the calibrated standard deviations of points (n,) of data with these labels."""
        return self.factors(labels) * self.overall.std_of(data)


def fit_grouped(
    data: CalibrationData,
    method: str,
    labels: Sequence[str] | StrArray,
    near: GroupedCalibration | None = None,
) -> GroupedCalibration:
    """Fit a calibration and the factor of each group together.

    Parameters
    ----------
    data : CalibrationData
        n points.
    method : str
    labels : sequence of n str
        The group of each.
    near : GroupedCalibration, optional
        A fit to similar points, to begin with.

    Returns
    -------
    GroupedCalibration
        The likelihood of its `overall` is that of the points with their factors.
    """
    grouped = near
    if grouped is None:
        grouped = fit_groups(data, fit_calibration(data, method), labels)
    for _ in range(20):
        before = _centered(grouped)
        overall = fit_calibration(before.common(data, labels), method, before.overall)
        grouped = fit_groups(data, overall, labels, before)
        names = [*grouped.groups]
        change = np.log(grouped.factors(names) / before.factors(names))
        if np.all(np.abs(change) < 2e-3):
            break
    overall = grouped.overall.fitted_to(grouped.common(data, labels))
    return replace(grouped, overall=overall)


def _centered(grouped: GroupedCalibration) -> GroupedCalibration:
    """Return factors of which the logarithm is zero on average, groups counting alike."""
    mean = np.mean([np.log(group.factor) for group in grouped.groups.values()])
    groups = {
        name: replace(group, factor=float(group.factor * np.exp(-mean)))
        for name, group in grouped.groups.items()
    }
    return replace(grouped, groups=groups)


def fit_groups(
    data: CalibrationData,
    overall: Calibration,
    labels: Sequence[str] | StrArray,
    near: GroupedCalibration | None = None,
) -> GroupedCalibration:
    """Find the factor of each group, on top of a calibration of all points.

    Parameters
    ----------
    data : CalibrationData
        n points; those of one group are correlated, and count for fewer than they are.
    overall : Calibration
        Of all points.
    labels : sequence of n str
        The group of each.
    near : GroupedCalibration, optional
        A fit to similar points, to begin with.
    """
    names = np.asarray(labels, dtype=str)
    n = len(data.residuals)
    if names.shape != (n,):
        raise InputError(
            f"`labels` have shape {names.shape}; there must be one for each of {n} points.",
            parameter="labels",
        )
    variance = _variance_per_point(data, overall)
    kinds, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    start = np.zeros(len(kinds)) if near is None else np.log(near.factors(kinds))
    alone = _log_factors(data, overall, which, start)
    # The scale of k points, ½ ln(χ²_k/k), has a mean below zero and a variance above 1/(2k).
    k = counts / (2 * max(variance, 1e-9))
    bias, v = log_std_moments(k)
    alone -= bias
    tau2 = max(float(np.sum(alone**2 / v) - len(kinds)) / float(np.sum(1 / v)), 0.0)
    shrunk = alone * tau2 / (tau2 + v)
    groups = {
        str(kind): GroupFactor(float(np.exp(f)), float(np.exp(e)), int(count))
        for kind, f, e, count in zip(kinds, shrunk, alone, counts, strict=True)
    }
    return GroupedCalibration(overall, groups)


def _densities(
    data: CalibrationData, overall: Calibration, log_factor: float | Float64Array
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return ln p(z | ŝ) (n,) with σ multiplied by a factor, a step below it, and a step above."""
    shifts = (log_factor, log_factor - _STEP, log_factor + _STEP)
    here, below, above = (
        overall.density_of(replace(data, residuals=data.residuals * np.exp(-x))) - x for x in shifts
    )
    return here, below, above


def _log_factors(
    data: CalibrationData, overall: Calibration, which: IntArray, start: Float64Array
) -> Float64Array:
    """Return the ln f (G,) that maximises the likelihood of each group, by Newton's method."""
    x = start.copy()
    for _ in range(20):
        here, below, above = (
            np.bincount(which, data.weights * d) for d in _densities(data, overall, x[which])
        )
        curvature = (above - 2 * here + below) / _STEP**2
        slope = (above - below) / (2 * _STEP)
        uphill = np.sign(slope)  # by one, where the likelihood is not concave
        step = np.divide(-slope, curvature, out=uphill, where=curvature < 0).clip(-1.0, 1.0)
        previous, x = x, np.clip(x + step, -7.0, 7.0)
        if np.all(np.abs(x - previous) <= 1e-5):
            break
    return x


def _variance_per_point(data: CalibrationData, overall: Calibration) -> float:
    """Return n times the variance of ln f, were all points one group: H⁻¹ J H⁻¹."""
    here, below, above = _densities(data, overall, 0.0)
    curvature = -data.mean(above - 2 * here + below) / _STEP**2
    slope = data.weights * (above - below) / (2 * _STEP)
    scatter = float(group_scatter(slope[:, None], data.codes)[0, 0])
    return scatter / float(data.weights.sum()) / max(curvature, 1e-3) ** 2
