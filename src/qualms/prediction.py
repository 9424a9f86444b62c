"""Predictions that keep the values of all ensemble members, so that errors stay correlated.

An error that a member makes for one molecule it makes, in much the same way, for a similar one.
Arithmetic therefore acts member by member, and ``(p[0] - p[1]).std`` is the uncertainty of the
difference: smaller than the two uncertainties added in quadrature, the more so the more similar the
two structures are. Members of different models are combined in pairs: independent errors add in
quadrature, up to sampling noise. Those of predictions with different numbers of members are taken
to be independent.

A calibration scales the members of each point about their mean by a factor that depends on the
ensemble standard deviation of that point. If the factor is the same for all points (linear),
scaling and summing commute. Otherwise (power with γ ≠ 1, student, shrinkage) they do not.
Predictions are calibrated first and combined afterwards: the calibrated covariance between points
is D C D, where C is the covariance of the uncalibrated members and D the diagonal matrix of
factors. It is positive semi-definite and has the calibrated variances on its diagonal. To calibrate
a combination itself, combine the uncalibrated predictions, `Prediction.uncalibrated`, and fit and
apply a calibration to the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike
from scipy.special import ndtri, stdtrit

from qualms.arrays import Float64Array, check_members, check_number, check_points, check_std
from qualms.calibration.choice import choose_calibration, fit_out_of_bag
from qualms.calibration.conformal import Conformal
from qualms.calibration.members import (
    PerOutputCalibration,
    calibrated_members,
    combined_members,
    source_members,
)
from qualms.calibration.methods import Calibration, check_ensemble_method, fit_calibration
from qualms.calibration.points import CalibrationData, calibration_data
from qualms.errors import InputError, QualmsError, unknown_choice, warn
from qualms.gp.ensemble import ensemble_mean_std, group_codes, rescaled
from qualms.notebooks import html_table

if TYPE_CHECKING:
    import pandas


class Prediction(NDArrayOperatorsMixin):
    """Mean and standard deviation of each point, with or without the values of ensemble members.

    Indexing, operators, NumPy's element-wise functions and `map` act member by member.

    Parameters
    ----------
    members : (…, N_R) array, optional
        Predictions of each of N_R ≥ 2 members, on the last axis: (n, N_R) for n points, (n, T, N_R)
        for T outputs.
    mean, std : (…) arrays, optional
        Instead of members: means and standard deviations. Such a prediction can be indexed and
        concatenated, and constants can be added to it and multiplied with it. Points cannot be
        combined, because their correlation is not known.
    uncalibrated : Prediction or callable returning one, optional
        The same predictions before calibration.
    conformal : Conformal, optional
        Distribution of out-of-bag errors, for `interval`. Indexing, concatenation and the addition
        and multiplication of constants keep it; combinations of points lose it.
    dof : float, optional
        Degrees of freedom of Student's t, for `interval`: those of the errors, if a model has found
        them, infinite for Gaussian ones; N_R − 1 by default. Kept as `conformal`.

    Examples
    --------
    >>> p = Prediction([[1.0, 1.2, 1.1], [2.0, 2.2, 2.1]])
    >>> p.mean
    array([1.1, 2.1])
    >>> p.std
    array([0.1, 0.1])
    >>> difference = p[1] - p[0]
    >>> print(f"{difference.mean:.2f} ± {difference.std:.2f}")
    1.00 ± 0.00
    """

    def __init__(
        self,
        members: ArrayLike | None = None,
        *,
        mean: ArrayLike | None = None,
        std: ArrayLike | None = None,
        uncalibrated: Prediction | Callable[[], Prediction] | None = None,
        conformal: Conformal | None = None,
        dof: float | None = None,
    ) -> None:
        self._uncalibrated = uncalibrated
        self.conformal, self.dof = conformal, dof
        if members is not None:
            if mean is not None or std is not None:
                raise InputError("Give either `members`, or `mean` and `std`.", parameter="mean")
            self._members: Float64Array | None = _read_only(members, "members")
            if self._members.ndim < 1 or self._members.shape[-1] < 2:
                raise InputError(
                    f"`members` have shape {self._members.shape}; their last axis must have at "
                    "least 2 members.",
                    parameter="members",
                )
        elif mean is None or std is None:
            raise InputError("Give `members`, or `mean` and `std`.", parameter="members")
        else:
            self._members = None
            self._moments = _read_only(mean, "mean"), _read_only(std, "std")
            if self.std.size:
                check_std(self.std, self.mean.shape, allow_zero=True)

    @cached_property
    def _moments(self) -> tuple[Float64Array, Float64Array]:
        """Mean and standard deviation, computed on demand from the members."""
        assert self._members is not None
        return ensemble_mean_std(self._members)

    @property
    def members(self) -> Any:  # not None for code that makes predictions with members
        """Predictions of each member, after calibration: (…, N_R); None without members."""
        return self._members

    @property
    def n_members(self) -> int | None:
        """N_R; None without members."""
        return None if self._members is None else int(self._members.shape[-1])

    @property
    def mean(self) -> Float64Array:
        """The prediction: mean over the members, Eq. (4), Musil et al. 2019."""
        return self._moments[0]

    @property
    def std(self) -> Float64Array:
        """Its standard deviation: that of the calibrated members, ddof = 1."""
        return self._moments[1]

    @property
    def uncalibrated(self) -> Prediction:
        """The prediction before calibration; itself if it is not calibrated."""
        if self._uncalibrated is None:
            return self
        if not isinstance(self._uncalibrated, Prediction):
            # Computed on demand: after `map` it can cost as much as the prediction itself.
            self._uncalibrated = self._uncalibrated()
        return self._uncalibrated

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `mean` and `std`."""
        return self.mean.shape if self._members is None else self._members.shape[:-1]

    # Predictions are compared by identity: equality of numbers that have errors means little.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single prediction has no length")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Prediction]:
        return (self[i] for i in range(len(self)))

    def __reduce__(self) -> tuple[Callable[[], Prediction], tuple[()]]:
        arguments: dict[str, Any] = {"members": self._members}
        if self._members is None:
            arguments = {"mean": self.mean, "std": self.std}
        if self._uncalibrated is not None:
            # A callable cannot be pickled: compute the uncalibrated prediction now.
            arguments["uncalibrated"] = self.uncalibrated
        return partial(Prediction, **arguments, conformal=self.conformal, dof=self.dof), ()

    def interval(
        self, level: float = 0.95, method: str = "gaussian"
    ) -> tuple[Float64Array, Float64Array]:
        """Return lower and upper limits (…) of central intervals.

        Parameters
        ----------
        level : float
            Probability of the reference value to be inside, between 0 and 1.
        method : {"gaussian", "student", "conformal"}
            Of a Gaussian, or of Student's t with `dof` degrees of freedom, of this mean and
            standard deviation; or from the errors of out-of-bag points, whose coverage does not
            depend on their distribution: see `qualms.calibration.conformal`.
        """
        if not 0 < check_number("level", level, 0) < 1:
            raise InputError(
                f"`level` is {level}; it must be a probability between 0 and 1.", parameter="level"
            )
        if method == "gaussian":
            factor = float(ndtri((1 + level) / 2))
        elif method == "student":
            dof = self.dof or (self.n_members or 0) - 1.0
            if dof <= 2:
                raise InputError(
                    "Intervals of Student's t need a prediction by at least 4 members. Use "
                    "`method='gaussian'`.",
                    parameter="method",
                )
            factor = float(stdtrit(dof, (1 + level) / 2) * np.sqrt(1 - 2 / dof))
        elif method == "conformal":
            if self.conformal is None:
                raise InputError(
                    "Conformal intervals need single points predicted by a model with out-of-bag "
                    "errors. Use `method='gaussian'`.",
                    parameter="method",
                )
            factor = self.conformal.quantile(level)
        else:
            raise unknown_choice("method", method, ("gaussian", "student", "conformal"))
        return self.mean - factor * self.std, self.mean + factor * self.std

    @property
    def factor_95(self) -> float | None:
        """Half the width of conformal 95 % intervals in units of `std`; None if it is not known."""
        if self.conformal is None or self.conformal.probabilities[-1] < 0.95:
            return None
        return self.conformal.quantile(0.95)

    def covariance(self) -> Float64Array:
        """Return the covariance of the errors of all points over the members (ddof = 1): (n, n).

        Several outputs are in the order of ``mean.ravel()``. The rank is at most N_R − 1: use it
        for combinations of predictions, not as a matrix to invert.
        """
        members = _members_of(self, "covariance")
        return np.atleast_2d(np.cov(members.reshape(-1, members.shape[-1])))

    def lowest(self, *, n_draws: int = 10_000, seed: int = 0) -> Float64Array:
        """Return the probability of each of n points to be the lowest: (n,).

        Of Gaussian errors with the mean and the `covariance` of the points, of which `n_draws` are
        drawn: the errors of similar points cancel.
        """
        members = _members_of(self, "lowest")
        if members.ndim != 2:
            raise InputError(
                f"The `prediction` has the shape {self.shape}; the lowest is one of n points.",
                parameter="prediction",
            )
        deviations = members - members.mean(axis=1, keepdims=True)
        rng, R, count = np.random.default_rng(seed), members.shape[1], np.zeros(len(members))
        for first in range(0, n_draws, 1000):
            weights = rng.normal(size=(R, min(1000, n_draws - first))) / np.sqrt(R - 1)
            drawn = self.mean[:, None] + deviations @ weights
            count += np.bincount(drawn.argmin(axis=0), minlength=len(count))
        return count / n_draws

    def calibrated(
        self,
        calibration: Calibration | PerOutputCalibration,
        conformal: Conformal | None = None,
        **options: Any,
    ) -> Prediction:
        """Return the prediction with its members scaled about their mean by a calibration.

        A calibrated prediction is calibrated again from its uncalibrated members. Without members,
        the standard deviation is calibrated, by a method that does not depend on their number.

        Parameters
        ----------
        calibration : Calibration
            Or one for each output.
        conformal : Conformal, optional
            Distribution of out-of-bag errors after this calibration.
        **options
            Of `qualms.calibration.members.calibrated_members`: novelty of the points, isotropy of
            vectors, factors of elements.
        """
        raw, dof = self.uncalibrated, None
        if isinstance(calibration, PerOutputCalibration):
            members = calibration.members(_members_of(raw, "calibrated"), **options)
        elif raw.members is None and not calibration.needs_members:
            std = calibration.std(raw.std, 2)
            return Prediction(mean=raw.mean, std=std, uncalibrated=raw, conformal=conformal)
        else:
            members = _members_of(raw, "calibrated")
            dof = calibration.predictive_dof(members.shape[-1])
            members = calibrated_members(calibration, members, **options)
        return Prediction(members, uncalibrated=raw, conformal=conformal, dof=dof)

    def scaled(
        self,
        calibration: Calibration,
        factors: float | Float64Array,
        conformal: Conformal | None = None,
    ) -> Prediction:
        """Return the prediction with the members that a calibration uses, scaled by factors.

        Parameters
        ----------
        calibration : Calibration
        factors : float or (n,) array
            Of the members about their mean, for all points or along the first axis: those that
            calibrate another quantity.
        conformal : Conformal, optional
            Distribution of out-of-bag errors after this calibration.
        """
        raw = _members_of(self, "scaled")
        members, dof = source_members(calibration, raw), calibration.predictive_dof(raw.shape[-1])
        f = np.reshape(factors, (-1, *[1] * (members.ndim - 2)))
        scaled = rescaled(members, np.broadcast_to(f, members.shape[:-1]))
        return Prediction(scaled, uncalibrated=self, conformal=conformal, dof=dof)

    def map(self, f: Callable[[Float64Array], ArrayLike]) -> Prediction:
        """Apply a function to the predictions of each member, one member at a time.

        Parameters
        ----------
        f : callable
            Takes the predictions of one member, an array of shape `shape`, and returns a number or
            an array. The mean of the result is not ``f`` of the mean if ``f`` is not linear.
        """
        return _combined(
            "map", lambda m: stack_members([f(x) for x in np.moveaxis(m, -1, 0)]), self
        )

    def sum(self, axis: int | None = None) -> Prediction:
        """Sum over points, member by member; ``numpy.sum`` does the same."""
        n_axes = len(self.shape)
        if axis is not None and not (isinstance(axis, int) and -n_axes <= axis < n_axes):
            raise InputError(
                f"`axis` is {axis}; the prediction has shape {self.shape}.", parameter="axis"
            )
        # Never the last axis of the members.
        axes = tuple(range(n_axes)) if axis is None else (axis % n_axes,)
        return _combined("sum", lambda members: members.sum(axis=axes), self)

    @staticmethod
    def concatenate(predictions: Sequence[Prediction]) -> Prediction:
        """Join predictions of one model along the first axis."""
        counts = sorted({p.n_members for p in predictions if p.n_members is not None})
        if len(counts) > 1:
            raise InputError(
                f"Predictions by {' and '.join(map(str, counts))} members are not of one model, "
                "and cannot be joined.",
                parameter="predictions",
            )
        return _rearranged(lambda *parts: np.concatenate(parts), *predictions)

    def __getitem__(self, index: Any) -> Prediction:
        key = index if isinstance(index, tuple) else (index,)
        if not any(k is Ellipsis for k in key):
            key = (*key, Ellipsis)
        # The members are the last axis and cannot be indexed away.
        return _rearranged(lambda values: values[(*key, slice(None))], self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a NumPy function member by member; members of several predictions go in pairs."""
        if kwargs.get("out") == (self,):
            kwargs.pop("out")  # p += 1 makes a new prediction, as it does for other numbers
        if method != "__call__" or kwargs or ufunc.nout != 1:
            return NotImplemented
        if ufunc is np.matmul:
            return _linear_combination(*inputs)
        predictions = [x for x in inputs if isinstance(x, Prediction)]
        inverted = ufunc is np.divide and inputs[1] is self
        is_affine = len(predictions) == 1 and ufunc in _AFFINE and not inverted
        name = ufunc.__name__

        def of_members(*members: Float64Array) -> Float64Array:
            m = iter(members)
            operands = [
                next(m) if isinstance(x, Prediction) else np.asarray(x)[..., None] for x in inputs
            ]
            try:
                values: Float64Array = ufunc(*operands)
            except ValueError:
                raise _shape_error(name, inputs) from None
            if values.dtype.kind not in "fiu":
                raise TypeError(f"{name} of a Prediction is not a number: use .mean or .members")
            return values

        if self._members is None and is_affine:
            scaled = ufunc in (np.multiply, np.divide)
            result = _lifted(lambda p: _affine(of_members, p, scaled=scaled), self)
        else:
            result = _combined(name, of_members, *predictions)
        if is_affine:
            result.conformal, result.dof = self.conformal, self.dof
        return result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Support ``numpy.sum`` and ``numpy.concatenate`` only."""
        if func is np.sum:
            return args[0].sum(*args[1:], **kwargs)
        if func is np.concatenate and len(args) == 1 and not kwargs:
            return Prediction.concatenate(*args)
        raise TypeError(
            f"numpy.{func.__name__} of a Prediction is not defined: use .map to apply it to each "
            "member, or take the arrays .mean, .std or .members"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Prediction is not an array: take .mean, .std or .members")

    def __str__(self) -> str:
        """Return a single prediction with two digits of its standard deviation; else `repr`."""
        if self.shape:
            return repr(self)
        mean, std = float(self.mean), float(self.std)
        if std <= 1e-13 * abs(mean):  # rounding
            return f"{mean:.6g} ± 0"
        digits = decimals(std)
        return f"{mean:.{digits}f} ± {std:.{digits}f}"

    def __format__(self, spec: str) -> str:
        """Return mean ± standard deviation of a single prediction, as in ``f"{p[0]:.3f}"``."""
        if self.shape and spec:
            raise TypeError("the format is for a single prediction: take p[i]")
        if not spec:
            return str(self)
        return f"{float(self.mean):{spec}} ± {float(self.std):{spec}}"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with the columns ``mean`` and ``std``, and a row for each value.

        The index has a level for each axis of the prediction.
        """
        try:
            import pandas
        except ImportError as error:
            raise QualmsError("to_pandas needs pandas: pip install pandas.") from error
        index = None
        if len(self.shape) > 1:
            index = pandas.MultiIndex.from_product([range(n) for n in self.shape])
        columns = {"mean": np.ravel(self.mean), "std": np.ravel(self.std)}
        return pandas.DataFrame(columns, index=index)

    def _repr_html_(self) -> str:
        """Return mean and standard deviation of the first ten values, for notebooks."""
        indices = [*itertools.islice(np.ndindex(self.shape), 10)]
        rows = [(", ".join(map(str, i)), *str(self[i]).split(" ± ")) for i in indices]
        hidden = int(np.prod(self.shape)) - len(rows)
        note = f"and {hidden} more; {self!r}" if hidden else repr(self)
        return html_table(("", "mean", "std"), rows, note=note)

    def __repr__(self) -> str:
        members = "without members" if self._members is None else f"by {self.n_members} members"
        calibrated = "" if self._uncalibrated is None else ", calibrated"
        return f"<Prediction of shape {self.shape} {members}{calibrated}>"


def _read_only(values: ArrayLike, name: str) -> Float64Array:
    """Return a read-only copy in float64, if all values are finite."""
    array = np.array(check_points(name, values) if np.size(values) else values, dtype=np.float64)
    array.flags.writeable = False
    return array


def decimals(*errors: float) -> int:
    """Return how many decimals show two digits of the smallest error above 1 % of the largest."""
    smallest = min(error for error in errors if error > 0.01 * max(errors))
    return max(0, 1 - int(np.floor(np.log10(smallest))))


def stack_members(results: Sequence[ArrayLike | None]) -> Float64Array:
    """Return the results of a function for each of N_R members, of one shape, as (…, N_R)."""
    if any(result is None for result in results):
        raise InputError("`f` returned None; it must return numbers.", parameter="f")
    arrays = [np.asarray(result, dtype=float) for result in results]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise InputError(
                f"`f` returned shape {array.shape} for member {i}, and {arrays[0].shape} for "
                "member 0; the shapes must be the same.",
                parameter="f",
            )
    return np.stack(arrays, axis=-1)


def _members_of(prediction: Prediction, operation: str) -> Float64Array:
    """Return the members, which an operation on several points or predictions needs."""
    if prediction.members is None:
        raise InputError(
            f"The `prediction` has no members, so that the correlation of its errors is not known: "
            f"{operation} is not possible.",
            parameter="prediction",
        )
    return np.asarray(prediction.members)


def _combined(
    operation: str, f: Callable[..., Float64Array], *predictions: Prediction
) -> Prediction:
    """Combine the members of predictions and, on demand, their members before calibration.

    Predictions by different numbers of members are of different models, whose errors are
    independent: the fewer are spread over as many as the others have.
    """

    def of(*parts: Prediction) -> Prediction:
        members = [_members_of(p, operation) for p in parts]
        n = max(m.shape[-1] for m in members)
        return Prediction(f(*(combined_members(m, [(m.shape[-1], 1.0)], n) for m in members)))

    return _lifted(of, *predictions)


def _lifted(f: Callable[..., Prediction], *predictions: Prediction) -> Prediction:
    """Return f of predictions and, on demand, of the same predictions before calibration."""
    result = f(*predictions)
    if any(p._uncalibrated is not None for p in predictions):
        result._uncalibrated = lambda: f(*(p.uncalibrated for p in predictions))
    return result


def _rearranged(f: Callable[..., Float64Array], *predictions: Prediction) -> Prediction:
    """Apply a function that moves points, and does not combine them, to members or mean and std."""

    def of(*parts: Prediction) -> Prediction:
        mean, std = (f(*(getattr(p, x)[..., None] for p in parts))[..., 0] for x in ("mean", "std"))
        return Prediction(mean=mean, std=std)

    if any(p.members is not None for p in predictions):
        result = _combined("concatenate", f, *predictions)
    else:
        result = _lifted(of, *predictions)
    first, *others = predictions
    if all(p.conformal == first.conformal for p in others):
        result.conformal = first.conformal
    if all(p.dof == first.dof for p in others):
        result.dof = first.dof
    return result


#: Functions of a prediction and a constant that are affine, but for the division of the latter.
_AFFINE = (np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive)


def _affine(
    f: Callable[[Float64Array], Float64Array], prediction: Prediction, *, scaled: bool
) -> Prediction:
    """Return an affine function of a prediction without members.

    Parameters
    ----------
    f : callable
        Takes values (…, 1) in the place of members.
    prediction : Prediction
    scaled : bool
        Whether f multiplies by a constant, and with it the standard deviation.
    """
    mean = f(prediction.mean[..., None])[..., 0]
    std = prediction.std
    if scaled:
        std = np.abs(f(std[..., None])[..., 0])
    return Prediction(mean=mean, std=np.broadcast_to(std, mean.shape))


def _linear_combination(a: Any, b: Any) -> Prediction:
    """Return C @ p or p @ c, such as stoichiometric sums."""
    if isinstance(a, Prediction) and isinstance(b, Prediction):
        raise TypeError("the product of two predictions is not linear: use map")

    def of_members(members: Float64Array) -> Float64Array:
        try:
            if isinstance(b, Prediction):
                return np.asarray(np.tensordot(a, members, axes=(-1, 0)))
            # The product leaves the members in front of the columns of b: they belong last.
            return np.moveaxis(np.tensordot(members, b, axes=(-2, 0)), len(a.shape) - 1, -1)
        except (ValueError, IndexError):
            raise _shape_error("matmul", (a, b)) from None

    return _combined("matmul", of_members, b if isinstance(b, Prediction) else a)


def _shape_error(operation: str, operands: Sequence[Any]) -> InputError:
    shapes = [x.shape if isinstance(x, Prediction) else np.shape(x) for x in operands]
    return InputError(
        f"Shapes {' and '.join(map(str, shapes))} of the `prediction` and the other operand cannot "
        f"be broadcast, for {operation}.",
        parameter="prediction",
    )


def calibrate(
    y: ArrayLike,
    members: ArrayLike | Prediction | None = None,
    *,
    mean: ArrayLike | None = None,
    std: ArrayLike | None = None,
    absent: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    method: str = "auto",
    pool: bool | None = None,
) -> Calibration | PerOutputCalibration:
    """Fit how the ensemble standard deviation relates to the actual errors.

    Parameters
    ----------
    y : (n,) or (n, T) array
        Reference values.
    members : (n, N_R) or (n, T, N_R) array, or Prediction
        Predictions of each member, NaN where it has none; of a Prediction, those before
        calibration.
    mean, std : arrays of the shape of y, optional
        Instead of members: predictions and standard deviations > 0, for methods "linear", "power"
        and "none".
    absent : (n, N_R) array of bool, optional
        Whether a point was absent from the training set of a member. With it, the calibration is
        out-of-bag: it uses training points, each predicted by the members whose training sets lack
        it. Without it the points must be new to all members.
    groups : (n,) array, optional
        Labels of points whose errors are correlated, which "auto" leaves out together.
    method : {"auto", "student", "shrinkage", "linear", "power", "none"}
        "auto" chooses the method of fewest parameters among those with the highest cross-validated
        log likelihood, within its standard error.
    pool : bool, optional
        Whether T outputs are components of a vector or tensor, which have one calibration; True
        for T = 3 by default. Otherwise every output has its own.

    Returns
    -------
    Calibration
        With ``.alpha``, ``.gamma`` and ``.apply(prediction)``; one per output if y has T columns.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> calibration = calibrate(rng.normal(size=500), mean=np.zeros(500), std=np.full(500, 0.5))
    >>> round(float(calibration.apply(Prediction(mean=[1.0], std=[0.5])).std[0]), 1)
    1.0
    """
    targets = check_points("y", y)
    if isinstance(members, Prediction):
        raw = members.uncalibrated
        members = raw.members
        mean, std = (raw.mean, raw.std) if members is None else (mean, std)
    if (members is None) == (mean is None) or (mean is None) != (std is None):
        raise InputError("Give either `members`, or `mean` and `std`.", parameter="members")
    if targets.ndim not in (1, 2):
        raise InputError(
            f"`y` has shape {targets.shape}; it must be (n,) or (n, T).", parameter="y"
        )
    check_ensemble_method(method, has_members=members is not None)
    n, n_outputs = len(targets), targets.size // len(targets)
    # One column for each calibration: of n points, or of all components of n vectors.
    shape = (n * n_outputs, 1) if pool or (pool is None and n_outputs == 3) else (n, n_outputs)
    repeats = shape[0] // n
    labels = None
    if groups is not None or repeats > 1:
        codes = group_codes(None if groups is None else np.asarray(groups), n)
        labels = np.repeat(codes, repeats)
    data: list[CalibrationData] = []
    if mean is not None and std is not None:
        z = targets - check_points("mean", mean, targets.shape)
        stds = check_std(std, targets.shape).reshape(shape)
        for pair in zip(z.reshape(shape).T, stds.T, strict=True):
            counts = np.full(shape[0], 2), np.ones(shape[0])
            data.append(CalibrationData(*pair, *counts, groups=labels))
    elif members is not None:
        values = np.asarray(members, dtype=np.float64)
        missing = np.isnan(values)
        values = check_members(np.where(missing, 0.0, values), targets.shape)
        predicted, used = values.reshape(*shape, -1), ~missing.reshape(*shape, -1)
        if absent is not None:
            unseen = np.asarray(absent, dtype=bool)
            if unseen.shape != (n, values.shape[-1]):
                raise InputError(
                    f"`absent` has shape {unseen.shape}; it must be ({n}, {values.shape[-1]}), as "
                    "the members.",
                    parameter="absent",
                )
            used &= np.repeat(unseen, repeats, axis=0)[:, None, :]
        all_used = absent is None and not missing.any()
        for k, column in enumerate(targets.reshape(shape).T):
            absences = None if all_used else used[:, k]
            data.append(calibration_data(column, predicted[:, k], absences, groups=labels))
    few = min(d.n_independent for d in data)
    if few < 10:
        warn(f"Only {few:.0f} independent points: the calibration is poorly determined.")
    fit = fit_calibration if absent is None else fit_out_of_bag
    fits = [choose_calibration(d) if method == "auto" else fit(d, method) for d in data]
    is_single = targets.ndim == 1 or shape[1] < n_outputs
    return fits[0] if is_single else PerOutputCalibration((*fits,))
