"""One calibration for each kind of point, small groups leaning on the whole.

A calibration of all points may be too wide for one element and too narrow for another. Group g gets
a factor f_g on top of it, σ → f_g σ. By itself it would maximise the likelihood of the points of
the group, p(z | ŝ) → p(z/f | ŝ)/f, at e_g = ln f_g with a variance v/n_g. Between groups ln f is
taken to be N(0, τ²), whose τ² matches the scatter of the e_g (DerSimonian & Laird, Control. Clin.
Trials 7, 177 (1986)), so that

    ln f_g = e_g τ² / (τ² + v/n_g):

large groups keep what is their own, small ones take what is common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from qualms.core.calibration.base import Calibration, CalibrationData
from qualms.core.resampling import group_codes, group_scatter, stretched
from qualms.core.typing import Float64Array, FloatArray, IntArray, StrArray
from qualms.errors import InputError

#: ln f is looked for within ± so much.
_WIDEST = 7.0
_STEP = 1e-3


@dataclass(frozen=True)
class GroupFactor:
    """What a group adds to the calibration of all points.

    Attributes
    ----------
    factor : float
        f_g, after shrinkage.
    alone : float
        What its own points would say.
    n_points : int
    """

    factor: float
    alone: float
    n_points: int


@dataclass(frozen=True)
class GroupedCalibration:
    """A calibration of all points, and a factor for each kind of them.

    Attributes
    ----------
    overall : Calibration
    groups : mapping of str to GroupFactor
        Labels that are not among them have a factor of one.
    """

    overall: Calibration
    groups: Mapping[str, GroupFactor]

    def factors(self, labels: Sequence[str] | StrArray) -> Float64Array:
        """Return the factor of each point."""
        known = {label: group.factor for label, group in self.groups.items()}
        return np.array([known.get(str(label), 1.0) for label in labels])

    def std(
        self, spread: FloatArray, n_members: int | IntArray, labels: Sequence[str] | StrArray
    ) -> Float64Array:
        """Return the calibrated standard deviations of points (n,) with these labels."""
        scaled: Float64Array = self.factors(labels) * self.overall.std(spread, n_members)
        return scaled

    def transform(self, members: FloatArray, labels: Sequence[str] | StrArray) -> Float64Array:
        """Scale members (n, N_R) about their means so that they have the calibrated spread."""
        return stretched(self.overall.transform(members), self.factors(labels))


def fit_groups(
    data: CalibrationData,
    overall: Calibration,
    labels: Sequence[str] | StrArray,
    *,
    clusters: Sequence[object] | IntArray | None = None,
) -> GroupedCalibration:
    """Find the factor of each group.

    Parameters
    ----------
    data : CalibrationData
        n points.
    overall : Calibration
        Fitted to all of them.
    labels : sequence of n str
        The group of each.
    clusters : (n,) array, optional
        Labels of points whose errors are correlated, such as atoms of one structure: they count
        for fewer than they are.
    """
    names = np.asarray(labels, dtype=str)
    n = len(data.residuals)
    if names.shape != (n,):
        raise InputError("labels", f"shape {names.shape}", f"one label for each of {n} points")
    codes = group_codes(clusters, n)
    variance = _variance_per_point(data, overall, codes)
    kinds, counts = np.unique(names, return_counts=True)
    alone = np.array([_log_factor(data.some(names == kind), overall) for kind in kinds])
    v = variance / counts
    tau2 = max(float(np.sum(alone**2 / v) - len(kinds)) / float(np.sum(1 / v)), 0.0)
    shrunk = alone * tau2 / (tau2 + v)
    groups = {
        str(kind): GroupFactor(float(np.exp(f)), float(np.exp(e)), int(count))
        for kind, f, e, count in zip(kinds, shrunk, alone, counts, strict=True)
    }
    return GroupedCalibration(overall, groups)


def _densities(data: CalibrationData, overall: Calibration, log_factor: float) -> Float64Array:
    """Return ln p(z | ŝ) of each point if its error bar were wider by a factor."""
    z = data.residuals * np.exp(-log_factor)
    density: Float64Array = overall.log_density(z, data.spread, data.n_members) - log_factor
    return density


def _log_factor(data: CalibrationData, overall: Calibration) -> float:
    """Return the ln f that maximises the likelihood of the points of one group."""
    found = minimize_scalar(
        lambda x: -data.mean(_densities(data, overall, x)),
        bounds=(-_WIDEST, _WIDEST),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(found.x)


def _variance_per_point(data: CalibrationData, overall: Calibration, codes: IntArray) -> float:
    """Return n times the variance of ln f, were all points one group: H⁻¹ J H⁻¹."""
    below, here, above = (_densities(data, overall, h) for h in (-_STEP, 0.0, _STEP))
    curvature = -data.mean(above - 2 * here + below) / _STEP**2
    slope = data.weights * (above - below) / (2 * _STEP)
    scatter = float(group_scatter(slope[:, None], codes)[0, 0])
    return scatter / data.total / max(curvature, 1e-3) ** 2
