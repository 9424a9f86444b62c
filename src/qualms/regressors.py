"""Regressors with calibrated uncertainties for scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
)
from qualms.calibration.choice import fit_best, fit_out_of_bag
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
from qualms.calibration.points import FullModelData, calibration_data
from qualms.errors import (
    CalibrationError,
    ExactFitError,
    InputError,
    QualmsWarning,
    counted,
    unknown_choice,
)
from qualms.gp.ensemble import (
    N_KEPT,
    FullModel,
    Residuals,
    centred,
    draw_blocks,
    draw_members,
    fit_centre,
    fit_full_model,
    fit_members,
    group_codes,
    keep_groups,
    out_of_bag_prediction,
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
from qualms.gp.representatives import cur, farthest_points
from qualms.gp.sparse_gp import (
    Whitening,
    leave_out,
    novelty_variance,
    novelty_without_own,
    posterior_deviations,
    whiten,
)
from qualms.gp.sums import BlockSums, Draw, KeptRows, RowSums
from qualms.prediction import Prediction

#: Inputs whose kernel rows are held at once.
_BLOCK = 2048
#: Number of representatives if none is given.
_DEFAULT_REPRESENTATIVES = 1000
#: Number of representatives that novelty is measured with.
_LEADING = 256
SELECTIONS = ("fps", "cur", "random")
#: Share of the training points that would not count as extrapolation if they were new, and the
#: rounding of their novelty.
_NOT_NOVEL, _ROUNDING = 0.99, 1e-6


@dataclass(frozen=True)
class Basis:
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

    def blocks(self, X: FloatArray) -> Iterator[FloatArray]:
        """Yield X (n, d) in blocks of float64 rows, normalised for the power kernel."""
        for start in range(0, len(X), _BLOCK):
            block = X[start : start + _BLOCK].astype(np.float64, copy=False)
            yield normalize_rows(block) if isinstance(self.kernel, PowerKernel) else block

    def kernel_rows(self, block: FloatArray) -> Float64Array:
        """Return the kernel between a block (b, d) and the representatives: (b, r)."""
        rows = np.asarray(self.kernel(block, self.representatives), dtype=np.float64)
        rows *= self.scale
        return rows

    def features(self, X: FloatArray) -> Float64Array:
        """Return the whitened features Φ of X (n, d): (n, r)."""
        K = np.empty((len(X), len(self.representatives)))
        for i, block in enumerate(self.blocks(X)):
            K[i * _BLOCK : (i + 1) * _BLOCK] = self.kernel_rows(block)
        return np.asarray(self.whitening.features(K, overwrite=True))

    def prior_variance(self, block: FloatArray) -> Float64Array:
        """Return the diagonal of the scaled kernel for a block (b, d): (b,)."""
        return np.asarray(self.kernel.diag(block), dtype=np.float64) * self.scale

    def whitened(self, X: FloatArray) -> Iterator[tuple[Float64Array, Float64Array]]:
        """Yield whitened features (b, r) and prior variances (b,) of X (n, d) in blocks."""
        for block in self.blocks(X):
            Phi = self.whitening.features(self.kernel_rows(block), overwrite=True)
            yield np.asarray(Phi), self.prior_variance(block)

    @cached_property
    def leading(self) -> Whitening:
        """Whitening by the first representatives, with which novelty is measured.

        All would cost as much as the kernel.
        """
        return self.whitening.leading(_LEADING)

    def novelty(self, X: FloatArray) -> Float64Array:
        """Return q² and the prior variance of X (n, d), by the leading representatives: (n, 2)."""
        m = self.leading.effective_rank
        leading = replace(self, representatives=self.representatives[:m], whitening=self.leading)
        novelty = np.empty((len(X), 2))
        leading.contract(X, np.empty((m, 0)), novelty)
        return novelty

    def contract(
        self, X: FloatArray, weights: Float64Array, novelty: Float64Array | None = None
    ) -> Float64Array:
        """Return Σ_m k(x, m) w_m for X (n, d) and kernel weights (r, …): (n, …).

        `novelty` (n, 2) is filled with q² and the prior variance of each point, if it is given.
        """
        flat = weights.reshape(len(weights), -1)
        m, products = self.leading.effective_rank, np.empty((len(X), flat.shape[1]))
        for i, block in enumerate(self.blocks(X)):
            rows, K = slice(i * _BLOCK, (i + 1) * _BLOCK), self.kernel_rows(block)
            products[rows] = K @ flat
            if novelty is not None:
                novelty[rows, 1] = self.prior_variance(block)
                Phi = self.leading.features(K[:, :m])
                novelty[rows, 0] = novelty_variance(Phi, novelty[rows, 1])
        return products.reshape(len(X), *weights.shape[1:])


def _relative(novelty: Float64Array) -> Float64Array:
    """Return q² as a share of the prior variance, given both for each point (n, 2): (n,)."""
    return np.asarray(novelty[:, 0] / np.maximum(novelty[:, 1], np.finfo(np.float64).tiny))


def build_basis(
    kernel: Kernel,
    X: FloatArray,
    weight: Float64Array,
    n: int | None,
    selection: str,
    rng: np.random.Generator,
) -> Basis:
    """Choose n representatives among distinct points X (n, d) and whiten their kernel.

    The weights (n,) of the points are for the mean of the diagonal.
    """
    features = normalize_rows(X) if isinstance(kernel, PowerKernel) else X
    chosen = _choose(kernel, features, n, selection, rng)
    exact = features[chosen].astype(np.float64)
    scale = unit_scale(1.0, kernel.diag(features), weight)
    # The rounding of kernel rows in float32 limits which representatives are still independent.
    whitening = whiten(kernel(exact, exact), rtol=1e-6 if X.dtype == np.float32 else None)
    whitening = replace(whitening, factor=whitening.factor * np.sqrt(scale))
    if whitening.effective_rank == 1 and len(X) > 1 and n != 1:
        message = (
            "The kernel does not distinguish the training points. The power kernel depends on "
            "directions only: use kernel='rbf' for a single feature."
        )
        warnings.warn(message, QualmsWarning, stacklevel=2)
    indices = chosen[whitening.pivots]
    return Basis(kernel, scale, features[indices], indices, whitening)


def _choose(
    kernel: Kernel, X: FloatArray, n: int | None, selection: str, rng: np.random.Generator
) -> IntArray:
    """Return the indices of n representatives, selected by name; the default is at most 1000.

    Farthest points are far in the space of the features; leverage scores are those of the kernel.
    """
    if n is not None and check_integer("n_representatives", n, 1) > len(X):
        raise InputError(
            f"`n_representatives` is {n}, but there are only {len(X)} distinct training points. "
            "Use at most as many, or None.",
            parameter="n_representatives",
        )
    wanted = min(len(X), _DEFAULT_REPRESENTATIVES) if n is None else n
    if selection == "random":
        return np.sort(rng.permutation(len(X))[:wanted]).astype(np.intp)
    if selection == "fps":
        chosen = farthest_points(X, wanted).indices
    else:
        # Features whose products approximate the kernel, which need not fit into memory. With as
        # many landmarks as points they are exact.
        landmarks = farthest_points(X, min(2 * wanted, len(X))).indices
        exact = X[landmarks].astype(np.float64)
        whitening = whiten(kernel(exact, exact))
        K = np.asarray(kernel(X, X[landmarks[whitening.pivots]]), dtype=np.float64)
        chosen = cur(whitening.features(K, overwrite=True), wanted)
    if n is not None and len(chosen) < n:
        message = f"Only {len(chosen)} of n_representatives={n} are independent in the kernel."
        warnings.warn(message, QualmsWarning, stacklevel=2)
    return chosen


# Training points, their members and their calibration, for both regressors.
@dataclass(frozen=True)
class TrainingRows:
    """Rows of a training set and the distinct points among them.

    `rows` (n_rows,) are those given to ``fit`` whose weight is not zero; `X`, `y` (n_rows, T),
    `weight` and `inverse`, the point of each row, are of these. `first` (n_points,) is a row of
    each point, and `groups` (n_points,) its group. `single_output`: y was one-dimensional.
    """

    rows: IntArray
    X: Any
    y: Float64Array
    weight: Float64Array
    inverse: IntArray
    first: IntArray
    groups: IntArray | None
    single_output: bool

    @cached_property
    def point_weight(self) -> Float64Array:
        """Total weight of each point: (n_points,)."""
        return np.bincount(self.inverse, self.weight, minlength=len(self.first)).astype(np.float64)

    @cached_property
    def point_y(self) -> Float64Array:
        """Weighted mean of the targets of each point: (n_points, T)."""
        sums = np.zeros((len(self.first), self.y.shape[1]))
        np.add.at(sums, self.inverse, self.weight[:, None] * self.y)
        return sums / self.point_weight[:, None]

    def replicate_variance(self) -> Float64Array:
        """Return the variance (T,) of rows about the mean of their point; equal rows are one."""
        deviations = self.y - self.point_y[self.inverse]
        different = distinct_rows(np.column_stack([self.inverse, self.y]))
        dof = max(len(different.first) - len(self.first), 1)
        return np.asarray(self.weight @ deviations**2 / dof)

    @property
    def mean(self) -> Float64Array:
        """Weighted mean of the targets: (T,)."""
        return np.asarray(np.average(self.y, axis=0, weights=self.weight))

    def take(self, points: IntArray) -> TrainingRows:
        """Return the rows of some points (n,), in increasing order."""
        place = np.full(len(self.first), -1)
        place[points] = np.arange(len(points))
        rows = np.flatnonzero(place[self.inverse] >= 0)
        row_of = np.full(len(self.inverse), -1)
        row_of[rows] = np.arange(len(rows))
        return TrainingRows(
            self.rows[rows],
            None,
            self.y[rows],
            self.weight[rows],
            place[self.inverse[rows]],
            row_of[self.first[points]],
            None if self.groups is None else self.groups[points],
            self.single_output,
        )

    def check_draw(self, n_members: int, replace: bool) -> None:
        """Reject parameters of the draw of members, and points that are too few for it."""
        check_integer("n_members", n_members, 2, "at least 2 members, for a standard deviation")
        if not isinstance(replace, (bool, np.bool_)):
            raise InputError(
                f"`replace` is {replace!r}; it must be True or False.", parameter="replace"
            )
        if len(self.first) < 2:
            raise InputError(
                "All rows of `X` are the same: at least 2 distinct ones are needed to draw "
                "subsamples from.",
                parameter="X",
            )
        if self.groups is not None and len(np.unique(self.groups)) < 2:
            raise InputError(
                "All samples are in one group, but subsamples are drawn from at least 2 `groups`.",
                parameter="groups",
            )

    @property
    def point_groups(self) -> IntArray:
        """Group of each distinct point: its own, if there are no groups."""
        return np.arange(len(self.first)) if self.groups is None else self.groups

    @property
    def row_groups(self) -> IntArray:
        """Group of each row: (n_rows,)."""
        return self.point_groups[self.inverse]

    def member_rows(self, counts: IntArray) -> list[IntArray]:
        """Return the rows, as given to ``fit``, in the training set of each member."""
        return [np.repeat(self.rows, times) for times in counts[self.inverse].T]

    def centred(
        self,
        centre: str | float,
        members: Float64Array,
        counts: IntArray,
        full: Sequence[FullModelData],
    ) -> list[FullModelData]:
        """Return full models with the share of the ensemble mean in the prediction, by output.

        `members` (n_rows, T, N_R) are predictions of the rows.
        """
        if centre != "auto":
            share = {"full": 0.0, "members": 1.0}.get(str(centre))
            share = float(centre) if share is None else share
            return [replace(one, centre=share) for one in full]
        found = out_of_bag_prediction(members, counts[self.inverse] == 0)
        if np.count_nonzero(found.used) < MIN_POINTS:
            return list(full)
        root, outputs = np.sqrt(self.weight[found.used]), []
        groups = self.row_groups[found.used]
        for t, one in enumerate(full):
            z_f, z_m = one.residuals_with_own[found.used], self.y[found.used, t] - found.mean[:, t]
            scaled = z_f * root, z_m * root, found.std[:, t] * root
            residuals = Residuals(*scaled, found.n_absent, groups)
            residuals = residuals.mostly(one.without_representatives[found.used])
            outputs.append(replace(one, centre=fit_centre([residuals], members.shape[-1])))
        return outputs

    def calibrate(
        self,
        members: Float64Array,
        counts: IntArray,
        method: str,
        full: Sequence[FullModelData] | None = None,
    ) -> tuple[Calibration | PerOutputCalibration, Conformal | None]:
        """Calibrate on out-of-bag rows, given predictions of the rows (n_rows, T, N_R).

        Also returns the distribution of their errors, of a single output.
        """
        absent = counts[self.inverse] == 0
        n = members.shape[-1] if full and full[0].has_posterior else 0
        groups = self.row_groups
        none = NoCalibration(n_subsampled=n)

        def of_output(t: int) -> tuple[Calibration, Conformal | None]:
            y, own = self.y[:, t], None if full is None else full[t]
            if np.ptp(y) == 0:
                return none, None  # all members predict the constant
            try:
                found = calibration_data(
                    y, members[:, t], absent, sample_weight=self.weight, full=own, groups=groups
                )
            except CalibrationError as error:
                if method == "none":
                    return none, None
                if len(counts) >= MIN_POINTS and not isinstance(error, ExactFitError):
                    raise
                message = f"{error} The ensemble standard deviation is used as it is."
                warnings.warn(message, QualmsWarning, stacklevel=2)
                return none, None
            name = with_enough_points(method, len(found.residuals))
            if name == "auto":
                fitted = fit_best(found, METHODS if own is None else MODEL_METHODS)
            else:
                fitted = fit_out_of_bag(found, name)
            return replace(fitted, n_subsampled=n), fitted.conformal(found)

        outputs = [of_output(t) for t in range(self.y.shape[1])]
        if self.single_output:
            return outputs[0]
        return PerOutputCalibration(tuple(calibration for calibration, _ in outputs)), None


def sum_points(
    basis: Basis, X: FloatArray, data: TrainingRows, draw: Draw, kept: IntArray
) -> tuple[BlockSums, KeptRows]:
    """Return the sums over distinct points X (n, d) by block, and the rows of some of them."""
    order = np.argsort(draw.block, kind="stable")
    columns = np.column_stack([data.point_y - data.mean, np.ones(len(X))])
    sums: dict[int, RowSums] = {}
    Phi, place = np.empty((len(kept), basis.whitening.effective_rank)), np.full(len(X), -1)
    place[kept] = np.arange(len(kept))
    weight = data.point_weight
    for start in range(0, len(order), _BLOCK):
        some = order[start : start + _BLOCK]
        rows = basis.features(X[some])
        for b, part in draw.take(some).sum_blocks(rows, columns[some], weight[some]).items():
            sums[b] = sums[b] + part if b in sums else part
        chosen = np.flatnonzero(place[some] >= 0)
        Phi[place[some[chosen]]] = rows[chosen]
    of_kept = KeptRows(
        Phi,
        columns[kept],
        {"y": np.arange(len(kept))},
        data.point_groups[kept],
        draw.take(kept),
        weight[kept],
        data.y.shape[1],
    )
    return BlockSums.of({"y": sums}, draw.n_blocks), of_kept


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
    """Validate the arguments of ``fit`` and collect the distinct points of non-zero weight."""
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
    labels = None if groups is None else group_codes(groups, n)
    rows = np.flatnonzero(weight > 0)
    if len(rows) < 2:
        raise InputError(
            f"`sample_weight` has {counted(len(rows), 'positive weight')}; at least 2 are needed.",
            parameter="sample_weight",
        )
    kept = X if len(rows) == n else take_rows(X, rows)
    points = _distinct_rows_of(kept)
    targets = np.asarray(y, dtype=np.float64).reshape(n, -1)[rows]
    constant = np.flatnonzero(np.ptp(targets, axis=0) == 0)
    if constant.size:
        which = "y is" if single_output else f"outputs {constant.tolist()} of y are"
        message = f"{which} constant: there is nothing to learn, and the uncertainty is zero."
        warnings.warn(message, QualmsWarning, stacklevel=2)
    joined = None if labels is None else joined_groups(points.inverse, labels[rows])
    return TrainingRows(
        rows, kept, targets, weight[rows], points.inverse, points.first, joined, single_output
    )


def _reject_text(y: Any) -> None:
    """Reject targets that are not numbers; scikit-learn checks everything else."""
    values = np.asarray(y)
    try:
        if values.dtype.kind == "O":
            values = values.astype(np.float64)
    except (TypeError, ValueError):
        pass
    if y is not None and values.dtype.kind not in "biufc":
        first = next(iter(values.ravel().tolist()), None)
        raise InputError(f"`y` holds {first!r}; its values must be numbers.", parameter="y")


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
    basis_ : Basis
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
        rng = new_generator(self.random_state)
        points, weight = data.X[data.first], data.point_weight
        self.basis_ = basis = build_basis(
            self._make_kernel(points), points, weight, self.n_representatives, self.selection, rng
        )
        self.representative_indices_ = data.rows[data.first[basis.indices]]
        self.effective_rank_ = basis.whitening.effective_rank
        codes = data.point_groups
        if self.n_members:
            data.check_draw(self.n_members, self.replace)
        draw = draw_blocks(
            codes,
            rng,
            n_members=self.n_members,
            subsample=self.subsample,
            replace=self.replace,
            n_rows=len(codes),
        )
        chosen = keep_groups(codes, np.ones(len(codes), dtype=np.intp), N_KEPT, rng)
        some, mean = np.flatnonzero(chosen), data.mean
        sums, kept = sum_points(basis, points, data, draw, some)
        k_xx = np.concatenate([basis.prior_variance(b) for b in basis.blocks(points[some])])
        m = basis.leading.effective_rank
        # Without its own representatives, as a new point.
        owners = codes[basis.indices]
        q2 = novelty_without_own(kept.Phi, k_xx, basis.whitening, kept.groups, owners, m)
        relative = _relative(np.column_stack([q2, k_xx]))
        self._novelty_limit = float(np.quantile(relative, _NOT_NOVEL))
        variance = data.replicate_variance()
        full = fit_full_model(kept, sums, {"y": self.noise}, mean=mean, replicate_variance=variance)
        for fitted in ("weights_", "intercept_", "centre_", "member_indices_", "calibration_"):
            if hasattr(self, fitted):
                delattr(self, fitted)  # of an earlier fit with members
        if self.n_members:
            T = len(mean)
            columns = np.repeat(np.eye(T + 1, T)[:, :, None], self.n_members, axis=2)
            full, weights, means = fit_members(full, sums, kept, columns)
            intercepts = mean[:, None] + means
            sample, counts = data.take(some), draw.counts[some]
            predicted = (np.tensordot(kept.Phi, weights, 1) + intercepts)[sample.inverse]
            n_posterior = self.n_posterior
            without = self._without_each_point(full, kept, sample, owners, np.sqrt(q2))
            without = sample.centred(self.centre, predicted, counts, without)
            centre = np.array([one.centre for one in without])
            # The posteriors of several outputs are independent.
            draws = [
                posterior_deviations(full.process, n_posterior, rng, basis.whitening.pivots)
                for _ in full.scale
            ]
            drawn = np.stack(draws, axis=1) * full.scale[:, None]
            blended = centred(weights, full.weights, centre, drawn)
            intercepts = centred(intercepts, mean, centre, np.zeros(n_posterior))
            self.centre_ = self._outputs(centre)
            self.weights_ = self._outputs(basis.whitening.kernel_weights(blended), axis=1)
            self.intercept_ = self._outputs(intercepts, axis=0)
            self.member_indices_ = data.member_rows(draw.counts)
            self.calibration_, self._conformal = sample.calibrate(
                predicted, counts, method, without
            )
        self.pp_weights_ = self._outputs(basis.whitening.kernel_weights(full.weights))
        self.pp_intercept_ = self._outputs(mean)
        self.noise_variance_ = self._outputs(full.process.noise_variance * full.scale**2)
        self._process, self._scale = full.process, full.scale
        return self

    def _without_each_point(
        self,
        full: FullModel,
        kept: KeptRows,
        data: TrainingRows,
        owners: IntArray,
        novelty: Float64Array,
    ) -> list[FullModelData]:
        """Return, for each output, the full model without the point of each row, or its group.

        The representatives among these points are left out as well.
        """
        left_out = leave_out(
            full.process,
            kept.Phi,
            full.y,
            sample_weight=full.weight,
            groups=kept.groups,
            group_columns=self.basis_.whitening.columns_of(kept.groups, owners),
        )
        predicted = (
            data.point_y - z * full.scale for z in (left_out.residuals, left_out.same_basis)
        )
        z, of_kept = (data.y - of_points[data.inverse] for of_points in predicted)
        p, q = np.sqrt(left_out.variance)[data.inverse], novelty[data.inverse]
        drawn = self.n_posterior > 0
        return [
            FullModelData(z[:, t], p * scale, q * scale, of_kept[:, t], has_posterior=drawn)
            for t, scale in enumerate(full.scale)
        ]

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
        X = self._validated(X)
        novelty = np.empty((len(X), 2)) if self.calibration_.needs_novelty else None
        members = self.basis_.contract(X, self.weights_, novelty) + self.intercept_
        q = None if novelty is None else self._outputs(np.sqrt(novelty[:, :1]) * self._scale)
        raw = Prediction(members)
        return raw.calibrated(self.calibration_, self._conformal, novelty_std=q)

    def extrapolates(self, X: ArrayLike) -> BoolArray:
        """Return whether each point is more novel than 99 % of the training points were: (n,).

        The novelty is the share of the prior variance that the representatives cannot describe. If
        they span all features, as those of a power kernel of few features do, no point is novel.
        """
        X = self._validated(X)
        return np.asarray(_relative(self.basis_.novelty(X)) > self._novelty_limit + _ROUNDING)

    def pp_mean(self, X: ArrayLike) -> Float64Array:
        """Predict with the full projected process, Eq. (3): (n,) or (n, T)."""
        mean = self.basis_.contract(self._validated(X), self.pp_weights_)
        return np.asarray(mean + self.pp_intercept_)

    def pp_std(self, X: ArrayLike) -> Float64Array:
        """Return σ_PP of Eq. (3) for a noisy observation, not calibrated: (n,) or (n, T)."""
        std = [
            np.sqrt(self._process.variance(Phi, k_xx))[:, None] * self._scale
            for Phi, k_xx in self.basis_.whitened(self._validated(X))
        ]
        return np.asarray(self._outputs(np.concatenate(std)))

    def _check_parameters(self) -> str:
        """Validate parameters before the data; return the name of the calibration."""
        if self.selection not in SELECTIONS:
            raise unknown_choice("selection", self.selection, SELECTIONS)
        if isinstance(self.noise, (int, float, np.number)):
            check_number("noise", self.noise, 0, strict=True)
        elif self.noise != "loo":
            raise unknown_choice("noise", self.noise, ("loo", "a positive number"))
        for name in ("n_members", "n_posterior"):
            if check_integer(name, getattr(self, name), 0) == 1:
                raise InputError(
                    f"`{name}` is 1; a standard deviation needs at least 2. Use 0 for none.",
                    parameter=name,
                )
        if isinstance(self.centre, str):
            if self.centre not in ("auto", "full", "members"):
                choices = ("auto", "full", "members", "a number between 0 and 1")
                raise unknown_choice("centre", self.centre, choices)
        elif check_number("centre", self.centre, 0) > 1:
            raise InputError(
                f"`centre` is {self.centre}; the share of the ensemble mean lies between 0 and 1.",
                parameter="centre",
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
        if isinstance(offset, str) and offset != "auto":
            raise unknown_choice("offset", offset, ("auto", "a number that is not negative"))
        if kernel == "linear":
            squares = np.einsum("ij,ij->i", X, X, dtype=np.float64)
            return LinearKernel(float(squares.mean()) if isinstance(offset, str) else offset)
        if isinstance(offset, str):
            rows = normalize_rows(X[:_BLOCK])  # distinct points come in random order
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
        data.check_draw(self.n_members, self.replace)
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
        found = data.calibrate(self._members(data.X), counts, method)
        self.calibration_, self._conformal = found
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
