"""A scikit-learn regressor that gives any other one calibrated error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.utils import get_tags
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted, has_fit_parameter, validate_data

from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError
from qualms.estimators._committee import (
    TrainingSet,
    check_calibration_name,
    draw_counts,
    finite_or_nan,
    internal_calibration,
    is_frame,
    new_generator,
    take_rows,
    training_set,
)
from qualms.prediction import Prediction


class ResamplingRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):
    """Calibrated error bars for any regressor, from members trained on sub-samples.

    Parameters
    ----------
    estimator : regressor
        Anything with ``fit`` and ``predict``: gradient boosting, a random forest, a neural network,
        a pipeline. It is cloned, never fitted itself.
    n_members : int
        N_R ≥ 2.
    subsample : float or int
        Size n of the sub-samples: a fraction of the distinct training points (or groups), or a
        number of them.
    replace : bool
        Bootstrap (n = N with replacement; `subsample` is not used) instead of sub-sampling.
    calibration : {"student", "shrinkage", "linear", "power", "none"} or None
        How the spread between members is turned into an error bar, on the training points that
        members did not see.
    n_jobs : int, optional
        Number of members that are trained at the same time, as in joblib.
    random_state : int, RandomState instance or None
        Seed of the sub-samples and of the members.

    Attributes
    ----------
    estimators_ : list of N_R regressors
    member_indices_ : list of N_R arrays of int
        Training rows of each member.
    calibration_ : Calibration
        With ``alpha`` and ``gamma``.
    n_features_in_ : int

    Notes
    -----
    Rows with the same features count as one point, in or out of a sub-sample together, and the
    result does not depend on the order of the rows, if that of the estimator does not.
    """

    def __init__(
        self,
        estimator: Any,
        n_members: int = 16,
        subsample: float = 0.5,
        replace: bool = False,
        calibration: str | None = "student",
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.n_members = n_members
        self.subsample = subsample
        self.replace = replace
        self.calibration = calibration
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: Sequence[object] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> ResamplingRegressor:
        """Train all members and calibrate.

        Parameters
        ----------
        X : (N, d) array or data frame
            A data frame is handed on as it is, with its column names and types.
        y : (N,) or (N, T) array
        groups : (N,) array, optional
            Labels of samples that belong together: in or out of a sub-sample together.
        sample_weight : (N,) array, optional
            Not negative; handed on to the estimator, which must accept them.

        Returns
        -------
        self
        """
        method = check_calibration_name(self.calibration)
        if sample_weight is not None and not has_fit_parameter(self.estimator, "sample_weight"):
            raise InputError(
                "sample_weight",
                "an array",
                f"None, because {type(self.estimator).__name__}.fit takes no sample_weight",
            )
        data = training_set(self, X, y, groups, sample_weight, keep_frames=True)
        self._single_output = data.single_output
        rng = new_generator(self.random_state)
        counts = draw_counts(data, self.n_members, self.subsample, self.replace, rng)
        self.member_indices_ = data.member_rows(counts)
        self.estimators_ = self._fit_members(data, counts, sample_weight is not None, rng)
        self.calibration_ = internal_calibration(data, self._members(data.X), counts, method)
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> Float64Array | tuple[Float64Array, Float64Array]:
        """Predict the mean of the committee and, if asked for, its calibrated error bar.

        Parameters
        ----------
        X : (n, d) array
        return_std : bool

        Returns
        -------
        mean : (n,) or (n, T) array
        std : array of the same shape
            Only if `return_std`.
        """
        prediction = self.predict_ensemble(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_ensemble(self, X: ArrayLike) -> Prediction:
        """Predict with every member, calibrated.

        Parameters
        ----------
        X : (n, d) array

        Returns
        -------
        Prediction
        """
        check_is_fitted(self)
        if is_frame(X):
            validate_data(self, X, reset=False, skip_check_array=True)
            members = self._members(X)
        else:
            finite = finite_or_nan(self)
            members = self._members(validate_data(self, X, reset=False, ensure_all_finite=finite))
        members = members[:, 0] if self._single_output else members
        return Prediction(members).calibrated(self.calibration_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def _fit_members(
        self, data: TrainingSet, counts: IntArray, weighted: bool, rng: np.random.Generator
    ) -> list[Any]:
        """Train a clone of the estimator, with a seed of its own, on the rows of each member."""
        # Points come in an order of their own, so that the order of the rows does not matter.
        order = np.argsort(data.inverse, kind="stable")
        times = data.row_counts(counts)[order]
        seeds = rng.integers(2**31 - 1, size=self.n_members)

        def job(i: int) -> Any:
            rows = np.repeat(order, times[:, i])
            y = data.y[rows, 0] if self._single_output else data.y[rows]
            weight = data.weight[rows] if weighted else None
            member = _seeded(clone(self.estimator), int(seeds[i]))
            return delayed(_fit_one)(member, take_rows(data.X, rows), y, weight)

        # One after the other, so that not all copies of the data are in memory at once.
        fitted: list[Any] = Parallel(n_jobs=self.n_jobs)(job(i) for i in range(self.n_members))
        return fitted

    def _members(self, X: Any) -> Float64Array:
        """Return what each member predicts: (n, T, N_R)."""
        predicted = [np.asarray(e.predict(X), dtype=np.float64) for e in self.estimators_]
        return np.stack([p.reshape(len(X), -1) for p in predicted], axis=-1)


def _seeded(estimator: Any, seed: int) -> Any:
    """Seed everything that takes a ``random_state``, at any depth, each differently."""
    keys = [
        k for k in sorted(estimator.get_params(deep=True)) if k.split("__")[-1] == "random_state"
    ]
    random = np.random.default_rng(seed)
    if keys:
        estimator.set_params(**{key: int(random.integers(2**31 - 1)) for key in keys})
    return estimator


def _fit_one(estimator: Any, X: Any, y: Float64Array, weight: Float64Array | None) -> Any:
    return estimator.fit(X, y) if weight is None else estimator.fit(X, y, sample_weight=weight)
