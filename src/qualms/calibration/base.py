"""Calibrations and the data that they are fitted to."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from qualms.arrays import (
    BoolArray,
    Float64Array,
    FloatArray,
    IntArray,
    StrArray,
    check_members,
    check_points,
)
from qualms.calibration.conformal import Conformal, fit_conformal
from qualms.errors import CalibrationError, ExactFitError, InputError, QualmsWarning
from qualms.gp.ensemble import (
    MIN_ABSENT,
    ensemble_mean_std,
    out_of_bag_prediction,
)

#: Number of members whose standard deviation has no sampling error.
_EXACT = 1_000_000
#: Points up to which calibrations that conformal scores refer to are cross-fitted, and folds.
_FEW_POINTS, _N_FOLDS = 500, 5
P_co = TypeVar("P_co", covariant=True)


class Calibratable(Protocol[P_co]):
    """Something that lets a calibration be applied to it, such as `qualms.Prediction`."""

    def calibrated(self, calibration: Any) -> P_co:
        """Return a calibrated copy."""


@dataclass(frozen=True)
class CalibrationData:
    """Residuals and standard deviations of points with reference values.

    Attributes
    ----------
    residuals : (n,) array
        z = y − prediction, by the (out-of-bag) members and, for a blend, the full model without
        the point.
    ensemble_std : (n,) array
        ŝ, the standard deviation (ddof = 1) over the same members; positive.
    n_members : (n,) array of int
        c, the number of these members.
    weights : (n,) array
        How often each point counts; all ones, except in a bootstrap or with sample weights.
    posterior_std, novelty_std : (n,) arrays, optional
        p and q of a sparse Gaussian process: see `qualms.calibration.sources`.
    centre : float
        λ, the share of the mean over members in the prediction: 1 without a full model.
    groups : (n,) array of int, optional
        Points of one group are not independent.
    n_components : float
        Independent components of the vectors, or tensors, whose standard deviation ŝ is.
    rows : (n,) array of int, optional
        Places of the points among those that they were taken from.
    divided_by : (n,) array, optional
        Factors that the residuals were divided by: likelihoods are those of the residuals before.
    component_std, multiplicity : (n,) arrays, optional
        Of components of vectors or tensors: ŝ of the component itself, `ensemble_std` and
        `posterior_std` being those of the whole vector; and how often it is in its tensor, relative
        to the mean. See `qualms.calibration.vectors`.
    structure : (n,) array of int, optional
        Number of the structure.
    element : (n,) array of str, optional
        Chemical symbol of the atom, if the points belong to atoms.
    """

    residuals: Float64Array
    ensemble_std: Float64Array
    n_members: IntArray
    weights: Float64Array
    posterior_std: Float64Array | None = None
    novelty_std: Float64Array | None = None
    centre: float = 1.0
    groups: IntArray | None = None
    n_components: float = 1.0
    rows: IntArray | None = None
    divided_by: Float64Array | None = None
    component_std: Float64Array | None = None
    multiplicity: Float64Array | None = None
    structure: IntArray | None = None
    element: StrArray | None = None

    @property
    def scale(self) -> Float64Array:
        """Factors (n,) that the residuals were divided by."""
        return np.ones(len(self.weights)) if self.divided_by is None else self.divided_by

    def mean(self, values: FloatArray) -> float:
        """Return the weighted mean over points."""
        return float(self.weights @ values / self.weights.sum())

    @property
    def n_independent(self) -> float:
        """Number of independent points, or of groups, (Σw)²/Σw² of their weights w (Kish)."""
        groups = np.arange(len(self.weights)) if self.groups is None else self.groups
        w = np.bincount(np.unique(groups, return_inverse=True)[1], self.weights)
        return float(w.sum() ** 2 / (w @ w))

    def some(self, chosen: BoolArray) -> CalibrationData:
        """Return some of the points."""
        arrays: dict[str, Any] = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return replace(self, **arrays)


@dataclass(frozen=True)
class FullModelData:
    """The full model of a sparse Gaussian process without each of n points.

    Attributes
    ----------
    residuals, posterior_std, novelty_std : (n,) arrays
        Of the model that lacks the representatives of the point as well, as it would for a new
        point; `novelty_std` may not be known.
    kept : (n,) array
        Residuals of the model that keeps them, as out-of-bag members do: for comparison with these.
    centre : float
        λ, the share of the mean over members in the prediction.
    has_posterior : bool
        Whether there are posterior members; p of new points is not known without.
    """

    residuals: Float64Array
    posterior_std: Float64Array
    novelty_std: Float64Array | None
    kept: Float64Array
    centre: float = 0.0
    has_posterior: bool = True

    @property
    def without_representatives(self) -> BoolArray:
        """Whether a point has no representatives of its own: (n,)."""
        return np.asarray(self.kept == self.residuals)

    def blended(self, data: CalibrationData, used: BoolArray) -> CalibrationData:
        """Return data of the points used, with the residuals of the blend."""
        z = (1 - self.centre) * self.residuals[used] + self.centre * data.residuals
        q = None if self.novelty_std is None else self.novelty_std[used]
        p = self.posterior_std[used] if self.has_posterior else None
        return replace(data, residuals=z, posterior_std=p, novelty_std=q, centre=self.centre)

    def alone(self, groups: IntArray | None = None) -> CalibrationData:
        """Return data without subsampled members: p takes the place of ŝ, and is exact."""
        n = len(self.residuals)
        data = CalibrationData(
            residuals=self.residuals,
            ensemble_std=self.posterior_std,
            n_members=np.full(n, _EXACT),
            weights=np.ones(n),
            novelty_std=self.novelty_std,
            centre=0.0,
            groups=groups,
            rows=np.arange(n),
        )
        known = data.some(data.ensemble_std > 0)
        if len(known.residuals) < 2 or not np.any(known.residuals):
            raise CalibrationError(
                "The posterior variance, or the error, of all points is zero: there is nothing to "
                "calibrate on."
            )
        return known

    def scaled(self, factor: float | Float64Array) -> FullModelData:
        """Return everything multiplied by a factor."""
        q = None if self.novelty_std is None else self.novelty_std * factor
        z, p, kept = (a * factor for a in (self.residuals, self.posterior_std, self.kept))
        return replace(self, residuals=z, posterior_std=p, novelty_std=q, kept=kept)

    def some(self, chosen: BoolArray | IntArray) -> FullModelData:
        """Return some of the points."""
        q = None if self.novelty_std is None else self.novelty_std[chosen]
        z, p, kept = self.residuals[chosen], self.posterior_std[chosen], self.kept[chosen]
        return replace(self, residuals=z, posterior_std=p, novelty_std=q, kept=kept)


def calibration_data(
    y: FloatArray,
    members: FloatArray,
    absent: BoolArray | None = None,
    *,
    sample_weight: FloatArray | None = None,
    full: FullModelData | None = None,
    groups: IntArray | None = None,
) -> CalibrationData:
    """Collect residuals and ensemble standard deviations, out-of-bag with `absent`: Eqs. (10)–(12).

    A warning is issued if points without standard deviation are left out: their likelihood is not
    defined.

    Parameters
    ----------
    y : (n,) array
        Reference values.
    members : (n, N_R) array
        Predictions of each member.
    absent : (n, N_R) array of bool, optional
        Whether the point is out-of-bag for the member. If not given, it is for all members.
        Points that fewer than three members are absent from are left out.
    sample_weight : (n,) array, optional
    full : FullModelData, optional
        Of a model whose prediction is a blend of ensemble mean and full model.
    groups : (n,) array of int, optional
        Points of one group are not independent.
    """
    targets = check_points("y", y)
    if targets.ndim != 1:
        raise InputError(
            f"`y` has shape {targets.shape}; it must have one value per point.", parameter="y"
        )
    predicted = check_members(members, targets.shape)
    weights = np.ones(len(targets))
    if sample_weight is not None:
        weights = check_points("sample_weight", sample_weight, targets.shape)
        if np.any(weights < 0) or not np.any(weights > 0):
            raise InputError(
                "`sample_weight` must not be negative, nor zero for all points; its smallest value "
                f"is {weights.min():.3g}.",
                parameter="sample_weight",
            )
    rounding = rounding_of(predicted if absent is None else np.where(absent, predicted, 0.0))
    rows = np.arange(len(targets))
    if absent is None:
        mean, ensemble_std = ensemble_mean_std(predicted)
        data = CalibrationData(
            targets - mean, ensemble_std, np.full(len(targets), predicted.shape[1]), weights
        )
    else:
        found = out_of_bag_prediction(predicted, absent)
        if not found.used.any():
            raise CalibrationError(
                f"No point is absent from at least {MIN_ABSENT} members, so there is nothing to "
                "calibrate on. Increase n_members or decrease subsample."
            )
        residuals = targets[found.used] - found.mean
        data = CalibrationData(residuals, found.std, found.n_absent, weights[found.used])
        rounding, rows = rounding[found.used], np.flatnonzero(found.used)
        if full is not None:
            data = full.blended(data, found.used)
        groups = None if groups is None else groups[found.used]
    data = replace(data, groups=groups, rows=rows)
    if np.all(np.maximum(np.abs(data.residuals), data.ensemble_std) <= 1e4 * rounding):
        raise ExactFitError("The members are exact to rounding: there is no error to calibrate.")
    differ = data.ensemble_std > rounding
    n_without, kept = int(np.sum(~differ)), data.some(differ & (data.weights > 0))
    if len(kept.residuals) < 2:
        raise CalibrationError(
            f"{len(kept.residuals)} of {differ.size} points can be used; for {n_without} all "
            "members predict the same. At least 2 are needed: use more data, groups or members, "
            "smaller subsamples, or no calibration."
        )
    if not np.any(kept.residuals):
        raise CalibrationError(
            "All residuals are exactly zero, so no scale of the errors can be found. "
            "Are the targets predictions of the same members?"
        )
    if n_without:
        warnings.warn(
            f"{n_without} of {differ.size} points have members that all agree "
            "and are left out of the calibration.",
            QualmsWarning,
            stacklevel=2,
        )
    return kept


def rounding_of(members: FloatArray) -> Float64Array:
    """Return the standard deviation (n,) below which members (n, N_R) differ by rounding alone."""
    rounding: Float64Array = 16 * np.finfo(np.float64).eps * np.abs(members).max(axis=1)
    return rounding


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
    centre : float
        λ, the share of the ensemble mean in the prediction: see `CalibrationData`.
    n_subsampled : int
        Number of members that ŝ is taken over, the first; 0 if there are no others. The others, of
        a sparse Gaussian process, are drawn from the posterior of the full model.
    n_calibrated : int
        Number of members of a calibrated prediction; 0: as many as σ has independent sources of.
        See `qualms.calibration.members`.
    """

    method: ClassVar[str]
    n_parameters: ClassVar[int]
    needs_members: ClassVar[bool] = True  #: whether σ depends on the number of members

    alpha: float = 1.0
    gamma: float = 1.0
    n_points: int = 0
    log_likelihood: float = 0.0
    centre: float = 1.0
    n_subsampled: int = 0
    n_calibrated: int = 0

    @classmethod
    @abstractmethod
    def fit(cls, data: CalibrationData, near: Calibration | None = None) -> Self:
        """Maximise the likelihood of the data; `near`, a fit to similar points, may be a start."""

    @abstractmethod
    def std(
        self,
        ensemble_std: FloatArray,
        n_members: int | IntArray,
        posterior_std: FloatArray | None = None,
        novelty_std: FloatArray | None = None,
        n_posterior: int | None = None,
    ) -> Float64Array:
        """Return σ (…), a function of ŝ over c members, p and q; most methods ignore p and q.

        p is exact, or the standard deviation of so many posterior members.
        """

    @abstractmethod
    def log_density(
        self, residuals: FloatArray, ensemble_std: FloatArray, n_members: int | IntArray
    ) -> Float64Array:
        """Return ln p(z | ŝ) under the predictive density of the method, per point."""

    def density_of(self, data: CalibrationData) -> Float64Array:
        """Return ln p(z | ŝ) of each point of the data: (n,)."""
        return self.log_density(data.residuals, data.ensemble_std, data.n_members)

    def std_of(self, data: CalibrationData) -> Float64Array:
        """Return the calibrated standard deviation of each point of the data: (n,)."""
        return self.std(data.ensemble_std, data.n_members, data.posterior_std, data.novelty_std)

    def conformal(self, data: CalibrationData) -> Conformal:
        """Return the distribution of |z|/σ of the points of the data.

        Few points are left out of the calibration that gives their σ: parameters that are fitted to
        them make their scores smaller than those of new points.
        """
        n = len(data.residuals)
        groups = np.arange(n) if data.groups is None else data.groups
        std, codes = self.std_of(data), np.unique(groups, return_inverse=True)[1]
        order = np.random.default_rng(0).permutation(int(codes.max()) + 1)
        if n <= _FEW_POINTS and len(order) >= _N_FOLDS:
            for fold in range(_N_FOLDS):
                out = order[codes] % _N_FOLDS == fold
                with suppress(CalibrationError):  # if the others are too few
                    std[out] = self.fit(data.some(~out), self).std_of(data.some(out))
        return fit_conformal(np.abs(data.residuals) / std, groups)

    def fitted_to(self, data: CalibrationData) -> Self:
        """Return the calibration with the number and the likelihood of these points."""
        likelihood = data.mean(self.density_of(data) - np.log(data.scale))
        return replace(self, n_points=len(data.residuals), log_likelihood=likelihood)

    def typical_factor(self, n_members: int) -> float | None:
        """Return the usual σ/ŝ of so many members, if it is known."""
        return self.constant_factor(n_members)

    def constant_factor(self, n_members: int) -> float | None:
        """Return σ/ŝ of so many members, if it does not depend on ŝ."""
        stds = np.array([1e-3, 1.0])
        low, high = (self.std(stds, n_members) / stds).tolist()
        return float(high) if np.isclose(low, high, rtol=1e-12, atol=0.0) else None

    def kinds(self, n_members: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return number and weight of the subsampled members, the first, and of the others.

        The covariance of the members that are scaled is the sum of those of both kinds, times the
        squares of the weights.
        """
        n = self.n_subsampled or n_members
        return (n, 1.0), (n_members - n, 0.0)

    @property
    def needs_novelty(self) -> bool:
        """Whether σ depends on the novelty q."""
        return False

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
        return self.aic + self.n_parameters * (float(np.log(max(self.n_points, 1))) - 2)

    def predictive_dof(self, n_members: int) -> float | None:
        """Return ν of the t distribution of errors predicted by so many members, if it is known."""
        return self.n_subsampled - 1.0 if self.n_subsampled else None

    def describe(self) -> str:
        """Return the method and its parameters in a line."""
        return f"{self.method}, α = {_short(self.alpha)}, γ = {_short(self.gamma)}"

    def parameters(self) -> dict[str, Any]:
        """Return everything needed to build the calibration again, as plain numbers."""
        return asdict(self)


def _short(value: float) -> str:
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"
