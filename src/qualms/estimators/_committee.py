"""What both estimators share: training points, their members, and calibrated predictions."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array, check_consistent_length, check_random_state, get_tags
from sklearn.utils.validation import _check_sample_weight, validate_data

from qualms.core.calibration import (
    METHODS,
    Calibration,
    NoCalibration,
    PerOutputCalibration,
    calibration_data,
    fit_internally,
)
from qualms.core.checks import check_integer
from qualms.core.distinct import DistinctRows, distinct_rows, joined_groups
from qualms.core.noise import Replicates
from qualms.core.resampling import draw_members, group_codes, membership_counts
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import ExactFitError, InputError, QualmsWarning


@dataclass(frozen=True)
class TrainingSet:
    """Rows of a training set and the distinct points among them.

    Attributes
    ----------
    rows : (n_rows,) array of int
        Rows, as given to ``fit``, whose weight is not zero.
    X : (n_rows, d) array or data frame
        Features of the rows.
    y : (n_rows, T) array
        Targets of the rows.
    weight : (n_rows,) array
        Weights of the rows.
    inverse : (n_rows,) array of int
        Point of each row.
    first : (n_points,) array of int
        A row of each point.
    groups : (n_points,) array of int, optional
        Group of each point.
    single_output : bool
        Whether y was one-dimensional.
    """

    rows: IntArray
    X: Any
    y: Float64Array
    weight: Float64Array
    inverse: IntArray
    first: IntArray
    groups: IntArray | None
    single_output: bool

    @property
    def n_points(self) -> int:
        """Number of distinct points."""
        return len(self.first)

    @cached_property
    def points(self) -> Any:
        """Features of the distinct points: (n_points, d)."""
        return take_rows(self.X, self.first)

    @cached_property
    def point_weight(self) -> Float64Array:
        """Total weight of each point: (n_points,)."""
        return np.bincount(self.inverse, self.weight, minlength=self.n_points).astype(np.float64)

    @cached_property
    def point_y(self) -> Float64Array:
        """Targets averaged over the rows of each point, by weight: (n_points, T)."""
        sums = np.zeros((self.n_points, self.y.shape[1]))
        np.add.at(sums, self.inverse, self.weight[:, None] * self.y)
        return sums / self.point_weight[:, None]

    def replicates(self) -> Replicates:
        """Return the scatter of rows about the mean of their point; equal rows count as one."""
        deviations = self.y - self.point_y[self.inverse]
        different = distinct_rows(np.column_stack([self.inverse, self.y]))
        return Replicates(
            dof=len(different.first) - self.n_points,
            sum_of_squares=self.weight @ deviations**2,
        )

    def row_counts(self, counts: IntArray) -> IntArray:
        """Repeat what is known of the points (n_points, …) for each of their rows."""
        repeated: IntArray = counts[self.inverse]
        return repeated

    def member_rows(self, counts: IntArray) -> list[IntArray]:
        """Return the rows, as given to ``fit``, in the training set of each member."""
        times = self.row_counts(counts)
        return [np.repeat(self.rows, times[:, i]) for i in range(times.shape[1])]


def training_set(
    estimator: Any,
    X: ArrayLike,
    y: ArrayLike,
    groups: Sequence[object] | None,
    sample_weight: ArrayLike | None,
    *,
    dtype: Any = "numeric",
    keep_frames: bool = False,
) -> TrainingSet:
    """Validate what was given to ``fit`` and collect the distinct points of non-zero weight."""
    if keep_frames and is_frame(X):
        # Columns have names and types that a pipeline may ask for: members get them as they are.
        X, y = validate_data(estimator, X, y, skip_check_array=True)
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", ensure_min_samples=2)
        check_consistent_length(X, y)
    else:
        X, y = validate_data(
            estimator,
            X,
            y,
            dtype=dtype,
            multi_output=True,
            y_numeric=True,
            ensure_min_samples=2,
            ensure_all_finite=finite_or_nan(estimator),
        )
    largest = float(np.max(np.abs(y)))
    if largest and not 1e-140 < largest < 1e140:
        raise InputError("y", f"values of {largest:.1e}", "numbers whose squares are numbers, too")
    data = _distinct_points(X, y, groups, sample_weight)
    warn_if_constant(data)
    return data


def _distinct_points(
    X: Any, y: Any, groups: Sequence[object] | None, sample_weight: Any
) -> TrainingSet:
    weight = _check_sample_weight(
        sample_weight, np.empty((len(X), 1)), dtype=np.float64, ensure_non_negative=True
    )
    labels = None if groups is None else group_codes(groups, len(X))
    rows = np.flatnonzero(weight > 0)
    if len(rows) < 2:
        raise InputError(
            "sample_weight", f"{len(rows)} positive weights", "at least 2 samples with weight"
        )
    kept = X if len(rows) == len(X) else take_rows(X, rows)
    points = _distinct_rows_of(kept)
    return TrainingSet(
        rows=rows,
        X=kept,
        y=np.asarray(y, dtype=np.float64).reshape(len(X), -1)[rows],
        weight=weight[rows],
        inverse=points.inverse,
        first=points.first,
        groups=None if labels is None else joined_groups(points.inverse, labels[rows]),
        single_output=y.ndim == 1,
    )


def is_frame(X: Any) -> bool:
    """Whether X is a data frame, with columns."""
    return hasattr(X, "iloc") and hasattr(X, "columns") and len(X.columns) > 0


def finite_or_nan(estimator: Any) -> bool | str:
    """Return what scikit-learn's checks may let pass: NaN where the estimator takes it."""
    return "allow-nan" if get_tags(estimator).input_tags.allow_nan else True


def take_rows(X: Any, rows: IntArray) -> Any:
    """Return some rows of an array or of a data frame."""
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def _distinct_rows_of(X: Any) -> DistinctRows:
    """Find the distinct rows of an array, or of a data frame with columns of any type."""
    if not hasattr(X, "iloc"):
        return distinct_rows(X)
    columns = [_column_of_numbers(np.asarray(X.iloc[:, j])) for j in range(X.shape[1])]
    return distinct_rows(np.stack(columns, axis=1))


def _column_of_numbers(values: Any) -> Float64Array:
    """Return numbers that are equal where the values of a column are."""
    long = values.dtype.kind in "iu" and int(np.max(np.abs(values), initial=0)) > 2**53
    if values.dtype.kind in "biuf" and not long:
        return np.asarray(values, dtype=np.float64)
    if long or all(isinstance(v, str) for v in values):
        return np.unique(values, return_inverse=True)[1].astype(np.float64)
    # Objects: equal if they say so; what cannot be compared is equal to itself alone.
    codes: dict[Any, int] = {}
    keys = [v if isinstance(v, Hashable) else id(v) for v in values]
    return np.array([codes.setdefault(key, len(codes)) for key in keys], dtype=np.float64)


def draw_counts(
    data: TrainingSet, n_members: int, subsample: float, replace: bool, rng: np.random.Generator
) -> IntArray:
    """Draw the members and return how often each point is in each: (n_points, N_R)."""
    check_integer("n_members", n_members, 2, "at least 2 members, so that there is a spread")
    if not isinstance(replace, (bool, np.bool_)):
        raise InputError("replace", repr(replace), "True or False")
    if data.n_points < 2:
        raise InputError(
            "X",
            "a single distinct row",
            "at least 2 distinct rows to draw sub-samples from",
            "Use n_members=0 where that is offered.",
        )
    indices = draw_members(
        data.n_points, n_members, subsample, rng, replace=replace, groups=data.groups
    )
    return membership_counts(indices, data.n_points)


def new_generator(random_state: Any) -> np.random.Generator:
    """Return a generator seeded in scikit-learn's way."""
    return np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))


def check_calibration_name(calibration: str | None) -> str:
    """Return the name of a known method; None means "none"."""
    name = "none" if calibration is None else calibration
    if not isinstance(name, str) or name not in METHODS:
        raise InputError("calibration", repr(calibration), f"None or one of {', '.join(METHODS)}")
    return name


def internal_calibration(
    data: TrainingSet, members: Float64Array, counts: IntArray, method: str
) -> Calibration | PerOutputCalibration:
    """Calibrate internally, on the rows as they were given.

    Parameters
    ----------
    members : (n_rows, T, N_R) array
        Predictions of the rows by all members.
    counts : (n_points, N_R) array
    """
    absent = data.row_counts(counts) == 0

    def of_output(t: int) -> Calibration:
        if method == "none" or np.ptp(data.y[:, t]) == 0:
            return NoCalibration()  # all members predict a constant, without any spread
        y, weight = data.y[:, t], data.weight
        try:
            calibration_set = calibration_data(y, members[:, t], absent, sample_weight=weight)
        except ExactFitError as error:
            warnings.warn(f"{error} The spread is used as it is.", QualmsWarning, stacklevel=5)
            return NoCalibration()
        return fit_internally(calibration_set, method)

    outputs = tuple(of_output(t) for t in range(data.y.shape[1]))
    return outputs[0] if data.single_output else PerOutputCalibration(outputs)


def warn_if_constant(data: TrainingSet) -> None:
    """Say that there is nothing to learn."""
    constant = np.flatnonzero(np.ptp(data.y, axis=0) == 0)
    if constant.size:
        what = "y is" if data.single_output else f"outputs {constant.tolist()} of y are"
        warnings.warn(
            f"{what} constant: there is nothing to learn, and the error bar is zero.",
            QualmsWarning,
            stacklevel=4,
        )
