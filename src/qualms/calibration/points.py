"""Points that calibrations are fitted to, and how they are collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from qualms.errors import CalibrationError, ExactFitError, InputError, warn
from qualms.gp.ensemble import (
    MIN_ABSENT,
    FullModel,
    Residuals,
    ensemble_mean_std,
    group_codes,
    out_of_bag_prediction,
)
from qualms.gp.sparse_gp import Whitening, leave_out
from qualms.gp.sums import KeptRows

D = TypeVar("D", "CalibrationData", "FullModelData")


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
        p and q of a sparse Gaussian process: see `SourcesCalibration`.
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
    def codes(self) -> IntArray:
        """Groups (n,) as integers 0 … G−1; without groups, each point is one."""
        return group_codes(self.groups, len(self.weights))

    @property
    def n_independent(self) -> float:
        """Effective number of independent points, or of groups."""
        return n_effective(np.bincount(self.codes, self.weights))

    def some(self, chosen: BoolArray) -> CalibrationData:
        """Return the chosen points (n,)."""
        return _with_arrays(self, lambda values: values[chosen])

    def divided(self, factors: Float64Array) -> CalibrationData:
        """Return points whose residuals are divided by factors (n,)."""
        scale = self.scale * factors
        return replace(self, residuals=self.residuals / factors, divided_by=scale)


@dataclass(frozen=True)
class FullModelData:
    """The full model of a sparse Gaussian process without each of n points.

    Attributes
    ----------
    residuals, posterior_std, novelty_std : (n,) arrays
        Of the model that lacks the representatives of the point as well, as it would for a new
        point; `novelty_std` may not be known.
    residuals_with_own : (n,) array
        Residuals of the model that has them, as out-of-bag members do: for comparison with these.
    centre : float
        λ, the share of the mean over members in the prediction.
    has_posterior : bool
        Whether there are posterior members; p of new points is not known without.
    """

    residuals: Float64Array
    posterior_std: Float64Array
    novelty_std: Float64Array | None
    residuals_with_own: Float64Array
    centre: float = 0.0
    has_posterior: bool = True

    @property
    def without_representatives(self) -> BoolArray:
        """Whether a point has no representatives of its own: (n,)."""
        return np.asarray(self.residuals_with_own == self.residuals)

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
            n_members=np.full(n, 1_000_000),  # a standard deviation without sampling error
            weights=np.ones(n),
            posterior_std=self.posterior_std if self.has_posterior else None,
            novelty_std=self.novelty_std,
            centre=0.0,
            groups=groups,
            rows=np.arange(n),
        )
        points = data.some(data.ensemble_std > 0)
        if len(points.residuals) < 2 or not np.any(points.residuals):
            raise CalibrationError(
                "The posterior variance, or the error, of all points is zero: there is nothing to "
                "calibrate on."
            )
        return points

    def scaled(self, factor: float | Float64Array) -> FullModelData:
        """Return everything multiplied by a factor."""
        return _with_arrays(self, lambda values: values * factor)

    def some(self, chosen: BoolArray | IntArray) -> FullModelData:
        """Return the chosen points: a mask (n,), or their places."""
        return _with_arrays(self, lambda values: values[chosen])


def _with_arrays(data: D, change: Callable[[Any], Any]) -> D:
    """Return data with each array changed."""
    arrays = {k: change(v) for k, v in vars(data).items() if isinstance(v, np.ndarray)}
    return replace(data, **arrays)


def leave_groups_out(
    full: FullModel,
    kept: KeptRows,
    whitening: Whitening,
    owners: IntArray,
    novelty_std: Float64Array,
    has_posterior: bool,
) -> list[FullModelData]:
    """Return, for each output, the full model without the group of each row that is kept.

    The representatives of the group are left out as well: a new point is none.

    Parameters
    ----------
    full : FullModel
    kept : KeptRows
        N rows of whole groups.
    whitening : Whitening
    owners : (r,) array of int
        Group of each representative.
    novelty_std : (N,) array
        q of the rows, without the representatives of their group, for a prior of unit variance.
    has_posterior : bool
        Whether predictions have posterior members.
    """
    left_out = leave_out(
        full.process,
        kept.Phi,
        full.y,
        sample_weight=full.weight,
        groups=kept.groups,
        group_columns=whitening.columns_of(kept.groups, owners),
    )
    p, outputs = np.sqrt(left_out.variance), (left_out.residuals.T, left_out.same_basis.T)
    return [
        FullModelData(z, p, novelty_std, with_own, has_posterior=has_posterior).scaled(scale)
        for z, with_own, scale in zip(*outputs, full.scale, strict=True)
    ]


def out_of_bag_residuals(
    y: Float64Array,
    members: Float64Array,
    absent: BoolArray,
    full: FullModelData,
    groups: IntArray,
    sample_weight: Float64Array | None = None,
) -> Residuals:
    """Return the residuals of points by the full model and by their out-of-bag members.

    Those of points that have no representatives of their own, if these are at least half of all:
    the weight of a representative of a point that is left out is not determined by data, so that
    errors are larger than those of new points, above all without an average over members.

    Parameters
    ----------
    y : (n,) array
        Reference values.
    members : (n, N_R) array
        Predictions of each member.
    absent : (n, N_R) array of bool
        Whether the point is out-of-bag for the member.
    full : FullModelData
    groups : (n,) array of int
        Points of one group are not independent.
    sample_weight : (n,) array, optional
    """
    used, mean, std, n_absent = out_of_bag_prediction(members, absent)
    root = np.sqrt(np.ones(len(y)) if sample_weight is None else sample_weight)[used]
    z = full.residuals_with_own[used] * root, (y[used] - mean) * root
    residuals = Residuals(*z, std * root, n_absent, groups[used])
    preferred = full.without_representatives[used]
    if 2 * np.count_nonzero(preferred) < len(preferred):
        return residuals
    some: Any = (of_points[preferred] for of_points in residuals)
    return Residuals(*some)


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
    if absent is None:
        used, n_absent = np.ones(targets.shape, bool), np.full(targets.shape, predicted.shape[1])
        mean, ensemble_std = ensemble_mean_std(predicted)
    else:
        used, mean, ensemble_std, n_absent = out_of_bag_prediction(predicted, absent)
        if not used.any():
            raise CalibrationError(
                f"No point is absent from at least {MIN_ABSENT} members, so there is nothing to "
                "calibrate on. Increase n_members or decrease subsample."
            )
        predicted = np.where(absent, predicted, 0.0)
    data = CalibrationData(
        targets[used] - mean,
        ensemble_std,
        n_absent,
        weights[used],
        groups=None if groups is None else groups[used],
        rows=np.flatnonzero(used),
    )
    if full is not None:
        data = full.blended(data, used)
    rounding = rounding_of(predicted[used])
    if np.all(np.maximum(np.abs(data.residuals), data.ensemble_std) <= 1e4 * rounding):
        raise ExactFitError("The members are exact to rounding: there is no error to calibrate.")
    differ = data.ensemble_std > rounding
    n_without, points = int(np.sum(~differ)), data.some(differ & (data.weights > 0))
    if len(points.residuals) < 2:
        raise CalibrationError(
            f"{len(points.residuals)} of {differ.size} points can be used; for {n_without} all "
            "members predict the same. At least 2 are needed: use more data, groups or members, "
            "smaller subsamples, or no calibration."
        )
    if not np.any(points.residuals):
        raise CalibrationError(
            "All residuals are exactly zero, so no scale of the errors can be found. "
            "Are the targets predictions of the same members?"
        )
    if n_without:
        warn(
            f"{n_without} of {differ.size} points have members that all agree "
            "and are left out of the calibration."
        )
    return points


def rounding_of(members: FloatArray) -> Float64Array:
    """Return the standard deviation (n,) below which members (n, N_R) differ by rounding alone."""
    rounding: Float64Array = 16 * np.finfo(np.float64).eps * np.abs(members).max(axis=1)
    return rounding


def n_effective(weights: FloatArray | IntArray) -> float:
    """Return (Σw)²/Σw², the number of points of equal weight that count as much (Kish)."""
    return float(weights.sum() ** 2 / (weights @ weights))


def make_folds(codes: IntArray, n_folds: int, seed: int = 0) -> list[BoolArray]:
    """Split points into folds that share no group; return masks of the points to leave out.

    Parameters
    ----------
    codes : (n,) array of int
        Groups of the points, 0 … G−1.
    n_folds : int
        Number of folds; G if there are fewer groups.
    seed : int
        Seed of the random split.
    """
    if n_folds < 2:
        raise InputError(f"`n_folds` is {n_folds}; at least 2 are needed.", parameter="n_folds")
    n_groups = int(codes.max()) + 1
    if n_groups < 2:
        raise InputError(
            "All points belong to one of the `groups`; at least 2 are needed, so that one can be "
            "left out.",
            parameter="groups",
        )
    n_folds = min(n_folds, n_groups)
    fold = (np.random.default_rng(seed).permutation(n_groups) % n_folds)[codes]
    return [fold == k for k in range(n_folds)]
