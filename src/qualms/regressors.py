"""Regressors with calibrated uncertainties for scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MetaEstimatorMixin, MultiOutputMixin, RegressorMixin, clone
from sklearn.utils import check_array, check_consistent_length, check_random_state, get_tags
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    has_fit_parameter,
    validate_data,
)

from qualms.arrays import (
    BoolArray,
    DistinctRows,
    Float64Array,
    FloatArray,
    IntArray,
    check_integer,
    check_number,
    distinct_rows,
    joined_groups,
    reject_masked,
    row_blocks,
)
from qualms.calibration.choice import fit_best
from qualms.calibration.conformal import Conformal
from qualms.calibration.members import PerOutputCalibration
from qualms.calibration.methods import (
    METHODS,
    MIN_POINTS,
    MODEL_METHODS,
    Calibration,
    NoCalibration,
    with_enough_points,
)
from qualms.calibration.points import (
    FullModelData,
    calibration_data,
    leave_groups_out,
    out_of_bag_residuals,
)
from qualms.calibration.vectors import QuantityCalibration, calibrate_points
from qualms.errors import (
    CalibrationError,
    ExactFitError,
    InputError,
    counted,
    unknown_choice,
    warn,
)
from qualms.gp.ensemble import (
    MIN_ABSENT,
    N_KEPT,
    centred,
    draw_blocks,
    draw_members,
    fit_full_model,
    fit_members,
    group_codes,
    keep_groups,
    predictive_weights,
    resolve_centre,
)
from qualms.gp.kernels import (
    Kernel,
    LinearKernel,
    PowerKernel,
    RBFKernel,
    median_length_scale,
    normalize_rows,
    unit_scale,
)
from qualms.gp.representatives import select_representatives
from qualms.gp.sparse_gp import (
    Whitening,
    novelty_variance,
    novelty_without_own,
    whiten,
)
from qualms.gp.sums import BlockSums, Draw, KeptRows, RowSums
from qualms.prediction import Prediction


@dataclass(frozen=True)
class KernelBasis:
    """A kernel and the representatives (r, d) that span the model.

    `scale` is the factor of Eq. (17), Musil et al. 2019, for y of unit variance: the scaled kernel
    has a mean diagonal of one over the training points, of which `indices` (r,) are representatives
    (for the power kernel, rows of unit length).
    """

    kernel: Kernel
    scale: float
    representatives: FloatArray
    indices: IntArray
    whitening: Whitening

    def rows(self, X: FloatArray) -> tuple[Float64Array, Float64Array]:
        """Return the kernel rows (n, r) and prior variances (n,) of X (n, d)."""
        X = X.astype(np.float64, copy=False)
        if isinstance(self.kernel, PowerKernel):
            X = normalize_rows(X)
        K, k_xx = self.kernel(X, self.representatives), self.kernel.diag(X)
        return np.asarray(K, np.float64) * self.scale, np.asarray(k_xx, np.float64) * self.scale

    def features(self, X: FloatArray) -> tuple[Float64Array, Float64Array]:
        """Return the whitened features Φ (n, r) and prior variances (n,) of X (n, d)."""
        K, k_xx = self.rows(X)
        return np.asarray(self.whitening.features(K, overwrite=True)), k_xx

    @cached_property
    def leading(self) -> Whitening:
        """Whitening by the first 256 representatives, with which novelty is measured.

        All would cost as much as the kernel.
        """
        return self.whitening.leading(256)

    def novelty(self, K: Float64Array, k_xx: Float64Array) -> Float64Array:
        """Return q² of kernel rows (n, r) with prior variances (n,), by the leading: (n,)."""
        return novelty_variance(self.leading.features(K[:, : self.leading.effective_rank]), k_xx)

    def map(
        self, X: FloatArray, *functions: Callable[[Float64Array, Float64Array], Float64Array]
    ) -> list[Float64Array]:
        """Return functions of the kernel rows (n, r) and prior variances (n,) of X (n, d).

        Points are taken in blocks: the kernel rows of all might not fit into memory.
        """
        blocks = (self.rows(X[block]) for block in row_blocks(len(X)))
        parts = [[function(*block) for function in functions] for block in blocks]
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    def contract(self, X: FloatArray, weights: Float64Array) -> Float64Array:
        """Return Σ_m k(x, m) w_m for X (n, d) and kernel weights (r, …): (n, …)."""
        return self.map(X, lambda K, _: np.tensordot(K, weights, 1))[0]


def _relative(q2: Float64Array, k_xx: Float64Array) -> Float64Array:
    """Return q² (n,) as a share of the prior variances (n,)."""
    return np.asarray(q2 / np.maximum(k_xx, np.finfo(np.float64).tiny))


def build_basis(
    kernel: Kernel,
    X: FloatArray,
    weight: Float64Array,
    n: int | None,
    selection: str,
    rng: np.random.Generator,
) -> KernelBasis:
    """Choose n representatives among distinct points, and whiten their kernel.

    Parameters
    ----------
    kernel : Kernel
    X : (n_points, d) array
    weight : (n_points,) array
        Weights of the points in the mean of the kernel's diagonal.
    n : int, optional
        Number of representatives, at most 1000 by default.
    selection : {"fps", "cur", "random"}
        As in `select_representatives`.
    rng : numpy.random.Generator
    """
    features = normalize_rows(X) if isinstance(kernel, PowerKernel) else X
    if n is not None and check_integer("n_representatives", n, 1) > len(X):
        raise InputError(
            f"`n_representatives` is {n}, but there are only {len(X)} distinct training points. "
            "Use at most as many, or None.",
            parameter="n_representatives",
        )
    chosen = select_representatives(features, n or 1000, selection, kernel, rng)
    if selection == "random":
        chosen = np.sort(chosen)
    if n is not None and len(chosen) < n:
        warn(f"Only {len(chosen)} of n_representatives={n} are independent in the kernel.")
    exact = features[chosen].astype(np.float64)
    scale = unit_scale(1.0, kernel.diag(features), weight)
    # The rounding of kernel rows in float32 limits which representatives are still independent.
    whitening = whiten(kernel(exact, exact), rtol=1e-6 if X.dtype == np.float32 else None)
    whitening = replace(whitening, factor=whitening.factor * np.sqrt(scale))
    if whitening.effective_rank == 1 and len(X) > 1 and n != 1:
        warn(
            "The kernel does not distinguish the training points. The power kernel depends on "
            "directions only: use kernel='rbf' for a single feature."
        )
    indices = chosen[whitening.pivots]
    return KernelBasis(kernel, scale, features[indices], indices, whitening)


@dataclass(frozen=True)
class TrainingRows:
    """Rows of a training set and the distinct points among them.

    `rows` (n_rows,) are those given to ``fit`` whose weight is not zero; `X`, `y` (n_rows, T),
    `weight` and `inverse`, the point of each row, are of these. `first` (n_points,) is a row of
    each point, and `groups` (n_points,) its group: the point itself, if there are no groups.
    `single_output`: y was one-dimensional.
    """

    rows: IntArray
    X: Any
    y: Float64Array
    weight: Float64Array
    inverse: IntArray
    first: IntArray
    groups: IntArray
    single_output: bool

    @cached_property
    def point_weight(self) -> Float64Array:
        """Total weight of each point: (n_points,)."""
        return np.bincount(self.inverse, self.weight, minlength=len(self.groups)).astype(np.float64)

    @cached_property
    def point_y(self) -> Float64Array:
        """Weighted mean of the targets of each point: (n_points, T)."""
        sums = np.zeros((len(self.groups), self.y.shape[1]))
        np.add.at(sums, self.inverse, self.weight[:, None] * self.y)
        return sums / self.point_weight[:, None]

    def replicate_variance(self) -> Float64Array:
        """Return the variance (T,) of rows about the mean of their point; equal rows are one."""
        deviations = self.y - self.point_y[self.inverse]
        different = distinct_rows(np.column_stack([self.inverse, self.y]))
        dof = max(len(different.first) - len(self.groups), 1)
        return np.asarray(self.weight @ deviations**2 / dof)

    @property
    def row_groups(self) -> IntArray:
        """Group of the point of each row: (n_rows,)."""
        return self.groups[self.inverse]

    @property
    def mean(self) -> Float64Array:
        """Weighted mean of the targets: (T,)."""
        return np.asarray(np.average(self.y, axis=0, weights=self.weight))

    def take(self, points: BoolArray) -> TrainingRows:
        """Return the rows of the chosen points (n_points,)."""
        rows, place = np.flatnonzero(points[self.inverse]), np.cumsum(points) - 1
        return TrainingRows(
            self.rows[rows],
            None,
            self.y[rows],
            self.weight[rows],
            place[self.inverse[rows]],
            self.first[points],
            self.groups[points],
            self.single_output,
        )

    def check_draw(self, replace: bool) -> None:
        """Raise an error if members cannot be drawn from these points."""
        if not isinstance(replace, (bool, np.bool_)):
            raise InputError(
                f"`replace` is {replace!r}; it must be True or False.", parameter="replace"
            )
        if len(np.unique(self.groups)) < 2:
            parameter = "X" if len(self.groups) < 2 else "groups"
            what = {"X": "rows of `X` are the same", "groups": "samples are in one of `groups`"}
            raise InputError(
                f"All {what[parameter]}; subsamples are drawn from at least 2 different ones.",
                parameter=parameter,
            )

    def member_rows(self, counts: IntArray) -> list[IntArray]:
        """Return the rows, as given to ``fit``, in the training set of each member."""
        return [np.repeat(self.rows, times) for times in counts[self.inverse].T]

    def of_rows(self, full: Sequence[FullModelData]) -> list[FullModelData]:
        """Return the full model without the point of each row, given that without each point."""
        deviations = (self.y - self.point_y[self.inverse]).T
        return [
            replace(
                of_points.some(self.inverse),
                residuals=of_points.residuals[self.inverse] + deviation,
                residuals_with_own=of_points.residuals_with_own[self.inverse] + deviation,
            )
            for of_points, deviation in zip(full, deviations, strict=True)
        ]

    def resolve_centre(
        self,
        centre: str | float,
        members: Float64Array,
        absent: BoolArray,
        full: Sequence[FullModelData],
    ) -> Float64Array:
        """Return the share of the ensemble mean in the prediction of each output: (T,).

        Parameters
        ----------
        centre : {"auto", "full", "members"} or float
        members, absent, full
            As in `calibrate`.
        """
        enough = np.count_nonzero(absent.sum(axis=1) >= MIN_ABSENT) >= MIN_POINTS
        shares = []
        for t, of_output in enumerate(full):
            points = self.y[:, t], members[:, t], absent, of_output, self.row_groups, self.weight
            residuals = [out_of_bag_residuals(*points)] if enough else []
            shares.append(resolve_centre(centre, residuals, members.shape[-1]))
        return np.array(shares)

    def calibrate(
        self,
        members: Float64Array,
        absent: BoolArray,
        method: str,
        full: Sequence[FullModelData | None],
        n_posterior: int = 0,
    ) -> tuple[Calibration | PerOutputCalibration, Conformal | None]:
        """Calibrate on out-of-bag rows; return the errors of a single output as well.

        Parameters
        ----------
        members : (n_rows, T, N_R) array
            Predictions of the rows.
        absent : (n_rows, N_R) array of bool
            Whether the row is out-of-bag for the member.
        method : str
        full : sequence of T FullModelData, or None for members alone
            The full model without each row.
        n_posterior : int
            Posterior members of a prediction.
        """
        n = members.shape[-1]
        none = QuantityCalibration(NoCalibration(n_subsampled=n if n_posterior else 0))

        def calibration_of(t: int, of_output: FullModelData | None) -> QuantityCalibration:
            y = self.y[:, t]
            if np.ptp(y) == 0:
                return none  # all members predict the constant
            try:
                points = calibration_data(
                    y,
                    members[:, t],
                    absent,
                    sample_weight=self.weight,
                    full=of_output,
                    groups=self.row_groups,
                )
            except CalibrationError as error:
                if method == "none":
                    return none
                if len(self.groups) >= MIN_POINTS and not isinstance(error, ExactFitError):
                    raise
                warn(f"{error} The ensemble standard deviation is used as it is.")
                return none
            name = with_enough_points(method, len(points.residuals))
            if name == "auto":
                name = fit_best(points, METHODS if of_output is None else MODEL_METHODS).method
            return calibrate_points(points, name, n_subsampled=n, n_posterior=n_posterior)

        outputs = [calibration_of(t, of_output) for t, of_output in enumerate(full)]
        if self.single_output:
            return outputs[0].calibration, outputs[0].conformal
        return PerOutputCalibration(tuple(output.calibration for output in outputs)), None


def sum_points(
    basis: KernelBasis, X: FloatArray, data: TrainingRows, draw: Draw, kept: BoolArray
) -> tuple[BlockSums, KeptRows, Float64Array]:
    """Return the sums over distinct points by block; rows and prior variances of those kept.

    Parameters
    ----------
    basis : KernelBasis
    X : (n_points, d) array
    data : TrainingRows
    draw : Draw
    kept : (n_points,) array of bool
    """
    order, some = np.argsort(draw.block, kind="stable"), np.flatnonzero(kept)
    columns = np.column_stack([data.point_y - data.mean, np.ones(len(X))])
    weight, place = data.point_weight, np.cumsum(kept) - 1
    sums: dict[int, RowSums] = {}
    Phi, k_xx = np.empty((len(some), basis.whitening.effective_rank)), np.empty(len(some))
    for block in row_blocks(len(order)):
        points = order[block]
        rows, diagonal = basis.features(X[points])
        for b, part in draw.take(points).sum_blocks(rows, columns[points], weight[points]).items():
            sums[b] = sums[b] + part if b in sums else part
        chosen = kept[points]
        Phi[place[points[chosen]]], k_xx[place[points[chosen]]] = rows[chosen], diagonal[chosen]
    of_kept = KeptRows(
        Phi,
        columns[some],
        {"y": np.arange(len(some))},
        data.groups[some],
        draw.take(some),
        weight[some],
        data.y.shape[1],
    )
    return BlockSums.of({"y": sums}, draw.n_blocks), of_kept, k_xx


def training_set(
    estimator: Any,
    X: ArrayLike,
    y: ArrayLike,
    groups: Sequence[object] | None,
    sample_weight: ArrayLike | None,
    *,
    dtype: Any = "numeric",
    keep_frames: bool = False,
) -> TrainingRows:
    """Validate the arguments of ``fit`` and collect the distinct points of non-zero weight.

    Parameters
    ----------
    estimator : estimator
        Whose attributes and tags scikit-learn sets and asks for.
    X, y, groups, sample_weight
        As in ``fit``.
    dtype : type or list of types
        Types of numbers that X may have.
    keep_frames : bool
        Whether data frames are handed on as they are.
    """
    reject_masked("X", X)
    reject_masked("y", y)
    _reject_text(y)
    if keep_frames and is_frame(X):
        # Columns have names and types that a pipeline may need: members get them unchanged.
        X, y = validate_data(estimator, X, y, skip_check_array=True)
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", ensure_min_samples=2)
        check_consistent_length(X, y)
    else:
        checks = {"dtype": dtype, "multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        X, y = validate_data(estimator, X, y, ensure_all_finite=finite_or_nan(estimator), **checks)
    y = np.asarray(y)
    n, largest, single_output = len(y), float(np.max(np.abs(y))), y.ndim == 1
    if largest and not 1e-140 < largest < 1e140:
        raise InputError(
            f"The largest value of `y` is {largest:.1e}, whose square cannot be represented. Use "
            "units in which it lies between 1e-140 and 1e140.",
            parameter="y",
        )
    weight = _check_sample_weight(
        sample_weight, np.empty((n, 1)), dtype=np.float64, ensure_non_negative=True
    )
    rows = np.flatnonzero(weight > 0)
    if len(rows) < 2:
        raise InputError(
            f"`sample_weight` has {counted(len(rows), 'positive weight')}; at least 2 are needed.",
            parameter="sample_weight",
        )
    X = X if len(rows) == n else take_rows(X, rows)
    points = _distinct_rows_of(X)
    targets = np.asarray(y, dtype=np.float64).reshape(n, -1)[rows]
    constant = np.flatnonzero(np.ptp(targets, axis=0) == 0)
    if constant.size:
        which = "y is" if single_output else f"outputs {constant.tolist()} of y are"
        warn(f"{which} constant: there is nothing to learn, and the uncertainty is zero.")
    joined = np.arange(len(points.first))
    if groups is not None:
        joined = joined_groups(points.inverse, group_codes(groups, n)[rows])
    return TrainingRows(
        rows, X, targets, weight[rows], points.inverse, points.first, joined, single_output
    )


def _reject_text(y: Any) -> None:
    """Reject targets that are not numbers; scikit-learn checks everything else."""
    others = [value for value in np.asarray(y).ravel().tolist() if not isinstance(value, Number)]
    if y is not None and others:
        raise InputError(f"`y` holds {others[0]!r}; its values must be numbers.", parameter="y")


def is_frame(X: Any) -> bool:
    """Whether X is a data frame, with columns."""
    return hasattr(X, "iloc") and hasattr(X, "columns") and len(X.columns) > 0


def finite_or_nan(estimator: Any) -> bool | str:
    """Return `ensure_all_finite` of `validate_data`: NaN passes if the estimator allows it."""
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
    # Objects: compared by their hash; those without one are equal to themselves only.
    codes: dict[Any, int] = {}
    keys = [v if isinstance(v, Hashable) else id(v) for v in values]
    return np.array([codes.setdefault(key, len(codes)) for key in keys], dtype=np.float64)


def new_generator(random_state: Any) -> np.random.Generator:
    """Return a generator seeded in scikit-learn's way."""
    return np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))


def _check_choice(
    name: str,
    value: object,
    choices: Sequence[str],
    highest: float = np.inf,
    *,
    strict: bool = False,
) -> None:
    """Raise an error unless a parameter is one of the choices, or a number ≥ 0 (> 0 if strict)."""
    if isinstance(value, str):
        if value not in choices:
            raise unknown_choice(name, value, (*choices, "a number"))
    elif check_number(name, value, 0, strict=strict) > highest:
        raise InputError(f"`{name}` is {value}; it is at most {highest:g}.", parameter=name)


def check_calibration_name(calibration: str | None, methods: Collection[str] = METHODS) -> str:
    """Return the name of a known method, or "auto"; None means "none"."""
    name = "none" if calibration is None else calibration
    if not isinstance(name, str) or name not in (*methods, "auto"):
        raise unknown_choice("calibration", calibration, (*methods, "auto"))
    return name


class ProjectedProcessRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Sparse Gaussian process regression with uncertainties from an ensemble of subsampled models.

    All members share one set of representatives, so that mean, standard deviation and members of a
    prediction cost one row of the kernel. The standard deviations are calibrated out-of-bag; no
    data need be set aside. Musil et al., J. Chem. Theory Comput. 15, 906 (2019).

    Parameters
    ----------
    kernel : {"power", "rbf", "linear"} or kernel object
        "power" is ``(x·x′)^exponent`` of rows scaled to unit length, which forgets their length:
        features that are summed over atoms lose the number of atoms. "rbf" is a Gaussian of the
        distance, and "linear" the inner product, of rows as they are. Any callable
        ``kernel(X, Y)`` with a method ``diag(X)`` will do, such as those of
        `sklearn.gaussian_process.kernels`; their hyper-parameters are used as they are.
    exponent : float
        ζ ≥ 1 of the power kernel.
    offset : float or "auto"
        c of the power kernel ``((x·x′ + c)/(1 + c))^exponent``. "auto" is 0 where no product of
        training points (the first 2048) is negative, as for SOAP vectors, else 1, because an even
        power of negative products does not distinguish x from −x. c of the linear kernel
        ``x·x′ + c``, where "auto" is the mean of |x|².
    length_scale : float, optional
        ℓ of the "rbf" kernel; the median distance between training points by default.
    n_representatives : int, optional
        M; at most 1000 by default.
    selection : {"fps", "cur", "random"}
        How representatives are chosen: farthest points, leverage scores, or at random.
    noise : "loo" or float
        Noise variance σ², selected by leave-one-out errors or given in the units of y² (with
        several outputs: for their mean variance).
    n_members : int
        N_R ≥ 2, or 0 for the projected process of Eq. (3), whose uncertainty is not calibrated.
    subsample : float or int
        Size n of the subsamples: a fraction of the distinct training points (or groups), or a
        number of them.
    replace : bool
        Bootstrap (n = N with replacement; `subsample` is not used) instead of subsampling.
    n_posterior : int
        Number of members that are drawn from the posterior of the full model; 0 for none.
    centre : {"auto", "full", "members"} or float
        Prediction: the full model, the mean of the subsampled members, or a blend with this share
        of the latter; by default the share of smallest out-of-bag error.
    calibration : {"sources", "student", "shrinkage", "linear", "power", "none", "auto"} or None
        Calibration of the standard deviation; "auto": sources, shrinkage or student, by likelihood.
    random_state : int, RandomState instance or None
        Seed of the subsamples and posterior members (and of a random selection).

    Attributes
    ----------
    representative_indices_ : (r,) array of int
        Training rows that are representatives; those that are numerically null are left out.
    effective_rank_ : int
        r, the rank of the kernel of the representatives.
    noise_variance_ : float or (T,) array
        σ², in the units of y².
    weights_ : (r, N_R + K) or (r, T, N_R + K) array
        Kernel weights of subsampled and posterior members; both have the prediction as their mean.
    intercept_ : (N_R + K,) or (T, N_R + K) array
    centre_ : float or (T,) array
        Share λ of the ensemble mean in the prediction.
    member_indices_ : list of N_R arrays of int
        Training rows of each member.
    calibration_ : Calibration
        With ``alpha`` and ``gamma``.
    pp_weights_, pp_intercept_ : arrays
        The same for the full projected process: (r,) or (r, T), and a float or (T,).
    basis_ : KernelBasis
        Kernel, representatives and whitening.
    n_features_in_ : int

    Notes
    -----
    Rows with the same features count as one point, in or out of a subsample together, and the
    result does not depend on the order of the rows.
    """

    def __init__(
        self,
        kernel: str | Kernel = "power",
        exponent: float = 2,
        *,
        offset: float | str = "auto",
        length_scale: float | None = None,
        n_representatives: int | None = None,
        selection: str = "fps",
        noise: str | float = "loo",
        n_members: int = 16,
        subsample: float = 0.5,
        replace: bool = False,
        n_posterior: int = 64,
        centre: str | float = "auto",
        calibration: str | None = "sources",
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.exponent = exponent
        self.offset = offset
        self.length_scale = length_scale
        self.n_representatives = n_representatives
        self.selection = selection
        self.noise = noise
        self.n_members = n_members
        self.subsample = subsample
        self.replace = replace
        self.n_posterior = n_posterior
        self.centre = centre
        self.calibration = calibration
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        groups: Sequence[object] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> ProjectedProcessRegressor:
        """Choose representatives and noise, solve all members, and calibrate.

        Parameters
        ----------
        X : (N, d) array
        y : (N,) or (N, T) array
        groups : (N,) array, optional
            Labels of samples that belong together, such as atoms of one crystal: in or out of a
            subsample together.
        sample_weight : (N,) array, optional
            Not negative; sample n has noise σ²/w_n. A weight of k is the same as k copies of the
            sample.
        """
        method = self._check_parameters()
        data = training_set(self, X, y, groups, sample_weight, dtype=[np.float64, np.float32])
        self._single_output = data.single_output
        if self.n_members:
            data.check_draw(self.replace)
        rng = new_generator(self.random_state)
        points, mean = data.X[data.first], data.mean
        self.basis_ = basis = build_basis(
            self._make_kernel(points),
            points,
            data.point_weight,
            self.n_representatives,
            self.selection,
            rng,
        )
        self.representative_indices_ = data.rows[data.first[basis.indices]]
        self.effective_rank_ = basis.whitening.effective_rank
        draw = draw_blocks(
            data.groups,
            rng,
            n_members=self.n_members,
            subsample=self.subsample,
            replace=self.replace,
            n_rows=len(points),
        )
        some = keep_groups(data.groups, np.ones(len(points), dtype=np.intp), N_KEPT, rng)
        sums, kept, k_xx = sum_points(basis, points, data, draw, some)
        # Without its own representatives, as a new point.
        owners, m = data.groups[basis.indices], basis.leading.effective_rank
        q2 = novelty_without_own(kept.Phi, k_xx, basis.whitening, kept.groups, owners, m)
        # Beyond rounding, more novel than 99 % of the training points were.
        self._novelty_limit = float(np.quantile(_relative(q2, k_xx), 0.99)) + 1e-6
        variance = data.replicate_variance()
        full = fit_full_model(kept, sums, {"y": self.noise}, mean=mean, replicate_variance=variance)
        for name in ("weights_", "intercept_", "centre_", "member_indices_", "calibration_"):
            self.__dict__.pop(name, None)  # of an earlier fit with members
        if self.n_members:
            T = len(mean)
            columns = np.repeat(np.eye(T + 1, T)[:, :, None], self.n_members, axis=2)
            full, weights, means = fit_members(full, sums, kept, columns)
            intercepts = mean[:, None] + means
            sample = data.take(some)
            predicted = (np.tensordot(kept.Phi, weights, 1) + intercepts)[sample.inverse]
            absent = kept.draw.counts[sample.inverse] == 0
            of_points = leave_groups_out(
                full, kept, basis.whitening, owners, np.sqrt(q2), self.n_posterior > 0
            )
            without = sample.of_rows(of_points)
            centre = sample.resolve_centre(self.centre, predicted, absent, without)
            blended = predictive_weights(
                full, weights, centre, self.n_posterior, rng, basis.whitening.pivots
            )
            intercepts = centred(intercepts, mean, centre, np.zeros(self.n_posterior))
            self.centre_ = self._outputs(centre)
            self.weights_ = self._outputs(basis.whitening.kernel_weights(blended), axis=1)
            self.intercept_ = self._outputs(intercepts, axis=0)
            self.member_indices_ = data.member_rows(draw.counts)
            blends = [replace(z, centre=float(c)) for z, c in zip(without, centre, strict=True)]
            self.calibration_, self._conformal = sample.calibrate(
                predicted, absent, method, blends, self.n_posterior
            )
        self.pp_weights_ = self._outputs(basis.whitening.kernel_weights(full.weights))
        self.pp_intercept_ = self._outputs(mean)
        self.noise_variance_ = self._outputs(full.process.noise_variance * full.scale**2)
        self._process, self._scale = full.process, full.scale
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> Float64Array | tuple[Float64Array, Float64Array]:
        """Predict, with a calibrated standard deviation.

        The prediction is a blend of the full model, Eq. (3), and the ensemble mean, Eq. (4): see
        `centre`. Without members, both are those of the full projected process.

        Parameters
        ----------
        X : (n, d) array
        return_std : bool
            Return the standard deviation, too: two arrays (n,) or (n, T).
        """
        if not self._has_members():
            return (self.pp_mean(X), self.pp_std(X)) if return_std else self.pp_mean(X)
        if return_std:
            prediction = self.predict_ensemble(X)
            return prediction.mean, prediction.std
        mean = self.basis_.contract(self._validated(X), self.weights_.mean(axis=-1))
        return np.asarray(mean + self.intercept_.mean(axis=-1))

    def predict_ensemble(self, X: ArrayLike) -> Prediction:
        """Return the calibrated predictions of all members for X (n, d)."""
        if not self._has_members():
            raise InputError(
                "The model was fitted with `n_members=0` and has no ensemble. Fit it with at least "
                "2 members.",
                parameter="n_members",
            )
        members, *q2 = self.basis_.map(
            self._validated(X),
            lambda K, _: np.tensordot(K, self.weights_, 1) + self.intercept_,
            *[self.basis_.novelty] * self.calibration_.needs_novelty,
        )
        q = self._outputs(np.sqrt(q2[0])[:, None] * self._scale) if q2 else None
        return Prediction(members).calibrated(self.calibration_, self._conformal, novelty_std=q)

    def extrapolates(self, X: ArrayLike) -> BoolArray:
        """Return whether each point is more novel than 99 % of the training points were: (n,).

        The novelty is the share of the prior variance that the representatives cannot describe. If
        they span all features, as those of a power kernel of few features do, no point is novel.
        """
        X, basis = self._validated(X), self.basis_

        def relative(K: Float64Array, k_xx: Float64Array) -> Float64Array:
            return _relative(basis.novelty(K, k_xx), k_xx)

        return np.asarray(basis.map(X, relative)[0] > self._novelty_limit)

    def pp_mean(self, X: ArrayLike) -> Float64Array:
        """Predict with the full projected process, Eq. (3): (n,) or (n, T)."""
        mean = self.basis_.contract(self._validated(X), self.pp_weights_)
        return np.asarray(mean + self.pp_intercept_)

    def pp_std(self, X: ArrayLike) -> Float64Array:
        """Return σ_PP of Eq. (3) for a noisy observation, not calibrated: (n,) or (n, T)."""
        X, basis, process = self._validated(X), self.basis_, self._process
        (variance,) = basis.map(
            X,
            lambda K, k_xx: process.variance(basis.whitening.features(K, overwrite=True), k_xx),
        )
        return np.asarray(self._outputs(np.sqrt(variance)[:, None] * self._scale))

    def _check_parameters(self) -> str:
        """Validate parameters before the data; return the name of the calibration."""
        if self.selection not in ("fps", "cur", "random"):
            raise unknown_choice("selection", self.selection, ("fps", "cur", "random"))
        _check_choice("noise", self.noise, ("loo",), strict=True)
        _check_choice("offset", self.offset, ("auto",))
        _check_choice("centre", self.centre, ("auto", "full", "members"), highest=1.0)
        for name in ("n_members", "n_posterior"):
            if check_integer(name, getattr(self, name), 0) == 1:
                raise InputError(
                    f"`{name}` is 1; a standard deviation needs at least 2. Use 0 for none.",
                    parameter=name,
                )
        return check_calibration_name(self.calibration, MODEL_METHODS)

    def _make_kernel(self, X: FloatArray) -> Kernel:
        """Return the kernel, given by name or as an object, with parameters that X suggests."""
        kernel, offset, length_scale = self.kernel, self.offset, self.length_scale
        if not isinstance(kernel, str):
            if not (callable(kernel) and hasattr(kernel, "diag")):
                raise InputError(
                    f"`kernel` is {kernel!r}; it must be a name, or a callable kernel(X, Y) with a "
                    "method diag(X).",
                    parameter="kernel",
                )
            return kernel
        if kernel == "rbf":
            return RBFKernel(median_length_scale(X) if length_scale is None else length_scale)
        if kernel not in ("power", "linear"):
            raise unknown_choice("kernel", kernel, ("power", "rbf", "linear", "a kernel object"))
        if kernel == "linear":
            squares = np.einsum("ij,ij->i", X, X, dtype=np.float64)
            return LinearKernel(float(squares.mean()) if isinstance(offset, str) else offset)
        if isinstance(offset, str):
            rows = normalize_rows(X[:2048])  # distinct points come in random order
            offset = 1.0 if np.min(rows @ rows.T) < -1e-5 else 0.0  # negative beyond rounding
        return PowerKernel(self.exponent, offset)

    def _has_members(self) -> bool:
        check_is_fitted(self)
        return hasattr(self, "weights_")

    def _validated(self, X: ArrayLike) -> FloatArray:
        check_is_fitted(self)
        reject_masked("X", X)
        validated: FloatArray = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return validated

    def _outputs(self, values: Float64Array, axis: int = -1) -> Any:
        """Drop the axis of outputs if y was one-dimensional."""
        return np.take(values, 0, axis=axis) if self._single_output else values


class ResamplingRegressor(MetaEstimatorMixin, MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Calibrated uncertainties for any regressor, from members trained on subsamples.

    Parameters
    ----------
    estimator : regressor
        Anything with ``fit`` and ``predict``: gradient boosting, a random forest, a neural network,
        a pipeline. It is cloned, never fitted itself.
    n_members : int
        N_R ≥ 2. The prediction is the mean over the members.
    subsample : float or int
        Size n of the subsamples: a fraction of the distinct training points (or groups), or a
        number of them. The larger, the more accurate the members, and the fewer of them are
        out-of-bag for a point: calibration uses points that are out-of-bag for at least three.
    calibration : {"shrinkage", "student", "linear", "power", "none", "auto"} or None
        Calibration of the standard deviation. Shrinkage needs few out-of-bag members, and copes
        with errors, such as noise, that the members do not differ by.
    replace, random_state
        As in `ProjectedProcessRegressor`; the estimators are seeded, too.
    n_jobs : int, optional
        Number of members that are trained at the same time, as in joblib.

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
    Rows with the same features are in or out of a subsample together, and the result does not
    depend on the order of the rows, if that of the estimator does not.
    """

    def __init__(
        self,
        estimator: Any,
        n_members: int = 16,
        subsample: float = 0.75,
        replace: bool = False,
        calibration: str | None = "shrinkage",
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
        *,
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
            Labels of samples that belong together: in or out of a subsample together.
        sample_weight : (N,) array, optional
            Not negative; handed on to the estimator, which must accept them.
        """
        method = check_calibration_name(self.calibration)
        check_integer("n_members", self.n_members, 2, "at least 2, for a standard deviation")
        if not _is_regressor(self.estimator):
            raise InputError(
                f"`estimator` is {self.estimator!r}; it must be an object with methods fit and "
                "predict, such as Ridge().",
                parameter="estimator",
            )
        if sample_weight is not None and not has_fit_parameter(self.estimator, "sample_weight"):
            raise InputError(
                f"{type(self.estimator).__name__}.fit takes no `sample_weight`. Fit without, or "
                "use another estimator.",
                parameter="sample_weight",
            )
        data = training_set(self, X, y, groups, sample_weight, keep_frames=True)
        self._single_output, self._n_outputs = data.single_output, data.y.shape[1]
        rng = new_generator(self.random_state)
        data.check_draw(self.replace)
        counts = draw_members(
            len(data.first),
            self.n_members,
            self.subsample,
            rng,
            replace=self.replace,
            groups=data.groups,
        )
        self.member_indices_ = data.member_rows(counts)
        # Points come in an order of their own, so that the order of the rows does not matter.
        order = np.argsort(data.inverse, kind="stable")
        times = counts[data.inverse][order]
        seeds = rng.integers(2**31 - 1, size=self.n_members)

        def job(i: int) -> Any:
            rows = np.repeat(order, times[:, i])
            targets = data.y[rows, 0] if self._single_output else data.y[rows]
            weight = {} if sample_weight is None else {"sample_weight": data.weight[rows]}
            member = _seeded(clone(self.estimator), int(seeds[i]))
            return delayed(member.fit)(take_rows(data.X, rows), targets, **weight)

        # Jobs are made one by one, so that not all copies of the data are in memory at once.
        self.estimators_ = Parallel(n_jobs=self.n_jobs)(job(i) for i in range(self.n_members))
        absent = counts[data.inverse] == 0
        self.calibration_, self._conformal = data.calibrate(
            self._members(data.X), absent, method, [None] * self._n_outputs
        )
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> Float64Array | tuple[Float64Array, Float64Array]:
        """Predict the ensemble mean and its calibrated standard deviation.

        Parameters
        ----------
        X : (n, d) array
        return_std : bool
            Return the standard deviation, too: two arrays (n,) or (n, T).
        """
        prediction = self.predict_ensemble(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_ensemble(self, X: ArrayLike) -> Prediction:
        """Return the calibrated predictions of all members for X (n, d)."""
        check_is_fitted(self)
        reject_masked("X", X)
        if is_frame(X):
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            X = validate_data(self, X, reset=False, ensure_all_finite=finite_or_nan(self))
        members = self._members(X)
        members = members[:, 0] if self._single_output else members
        return Prediction(members).calibrated(self.calibration_, self._conformal)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if _is_regressor(self.estimator):
            tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        return tags

    def _members(self, X: Any) -> Float64Array:
        """Return the predictions of each member: (n, T, N_R)."""
        predicted = [np.asarray(e.predict(X), dtype=np.float64) for e in self.estimators_]
        shape, name = (len(X), self._n_outputs), type(self.estimator).__name__
        for values in predicted:
            if values.size != len(X) * self._n_outputs or values.shape[:1] != shape[:1]:
                raise InputError(
                    f"{name}.predict returned an array of shape {values.shape} for {len(X)} rows "
                    f"and {counted(self._n_outputs, 'output')}.",
                    parameter="estimator",
                )
            if not np.all(np.isfinite(values)):
                raise InputError(
                    f"{name}.predict returned values that are not finite.", parameter="estimator"
                )
        return np.stack([values.reshape(shape) for values in predicted], axis=-1)


def _is_regressor(estimator: Any) -> bool:
    """Whether an estimator, rather than its class, has fit and predict."""
    return not isinstance(estimator, type) and all(
        hasattr(estimator, name) for name in ("fit", "predict")
    )


def _seeded(estimator: Any, seed: int) -> Any:
    """Seed everything that takes a ``random_state``, at any depth, each differently."""
    random = np.random.default_rng(seed)
    keys = [k for k in sorted(estimator.get_params()) if k.split("__")[-1] == "random_state"]
    if keys:
        estimator.set_params(**{key: int(random.integers(2**31 - 1)) for key in keys})
    return estimator
