"""Predictions that remember what each member said, so that errors stay correlated.

Errors of two predictions by one model are correlated: what a member gets wrong for a molecule it
gets wrong, in much the same way, for one like it. Arithmetic therefore acts member by member, and
``(p[0] - p[1]).std`` is the error bar of the difference: smaller than the two error bars in
quadrature, the more so the more alike the two are. Members of different models go in pairs as well:
if nothing connects their errors, error bars add in quadrature, up to chance.

What a calibration does to sums
-------------------------------
A calibration scales the members of each point about their mean, by a factor that depends on the
spread of that point. If the factor is the same for all points (linear, student), scaling and
summing commute: it does not matter which comes first. If it is not (power with γ ≠ 1, shrinkage),
it does. Predictions are calibrated first and combined afterwards: the calibrated covariance between
points is D C D, where C is the covariance of the members as they are and D the diagonal matrix of
factors, which is positive semi-definite and has the calibrated variances on its diagonal. If a
combination is what you care about, calibrate that combination instead: combine the uncalibrated
predictions, `Prediction.uncalibrated`, and fit and apply a calibration to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike

from qualms.arrays import Float64Array, check_points
from qualms.calibration.base import Calibration, MemberTransform
from qualms.calibration.fitting import PerOutputCalibration
from qualms.calibration.fitting import calibrate as calibrate_arrays
from qualms.errors import InputError
from qualms.gp.ensemble import committee
from qualms.metrics import Scores, score_arrays

#: Errors that are a smaller part of a mean are those of arithmetic; and of a larger error, nothing.
_ROUNDING, _MATTERS = 1e-13, 1e-2


class Prediction(NDArrayOperatorsMixin):
    """Predictions of a committee: a value and an error bar per point, and what every member said.

    Indexing, the operators, NumPy's functions of numbers and `map` act member by member.

    Parameters
    ----------
    members : (…, N_R) array
        Predictions of each of N_R ≥ 2 members, on the last axis: (n, N_R) for n points, (n, T, N_R)
        for T outputs.
    uncalibrated : Prediction or callable returning one, optional
        The same predictions before calibration.

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
    ) -> None:
        self._mean_std: tuple[Float64Array, Float64Array] | None = None
        if members is None:
            self._mean_std = (np.asarray(mean, dtype=float), np.asarray(std, dtype=float))
            self._members: Any = None
            self._uncalibrated = uncalibrated
            return
        array = np.array(members, dtype=np.float64)
        if array.ndim < 1 or array.shape[-1] < 2:
            raise InputError(
                "members", f"shape {array.shape}", "at least 2 members on the last axis"
            )
        n_bad = array.size - int(np.count_nonzero(np.isfinite(array)))
        if n_bad:
            raise InputError("members", f"{n_bad} NaN or infinite values", "finite predictions")
        array.flags.writeable = False
        self._members = array
        self._uncalibrated = uncalibrated

    @property
    def members(self) -> Any:
        """Predictions of each member, after calibration: (…, N_R), read-only; or None."""
        return self._members

    @property
    def n_members(self) -> Any:
        """N_R, or None."""
        return None if self._members is None else int(self._members.shape[-1])

    @property
    def mean(self) -> Float64Array:
        """The prediction: mean over the members, Eq. (4), Musil et al. 2019."""
        return self._mean_std[0] if self._mean_std else committee(self._members)[0]

    @property
    def std(self) -> Float64Array:
        """Its standard deviation: that of the members after calibration, ddof = 1."""
        return self._mean_std[1] if self._mean_std else committee(self._members)[1]

    @property
    def uncalibrated(self) -> Prediction:
        """The same prediction before calibration; itself if it never was calibrated."""
        if self._uncalibrated is None:
            return self
        if not isinstance(self._uncalibrated, Prediction):
            # Computed when asked for: after `map` it can cost as much as the prediction itself.
            self._uncalibrated = self._uncalibrated()
        return self._uncalibrated

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `mean` and `std`."""
        return self.mean.shape if self._mean_std else self._members.shape[:-1]

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

    def __getstate__(self) -> dict[str, Any]:
        # What is computed when asked for cannot be pickled: ask for it now.
        return {
            "members": self._members,
            "uncalibrated": None if self._uncalibrated is None else self.uncalibrated,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def covariance(self) -> Float64Array:
        """Return the covariance of the errors of all points over the members (ddof = 1): (n, n).

        Several outputs are taken in the order of ``mean.ravel()``. The rank is at most N_R − 1: use
        it for combinations of predictions, not as a matrix to invert.
        """
        flat = self._members.reshape(-1, self.n_members)
        deviations = flat - flat.mean(axis=1, keepdims=True)
        covariance: Float64Array = deviations @ deviations.T / (self.n_members - 1)
        return covariance

    def calibrated(self, calibration: MemberTransform) -> Prediction:
        """Return the prediction with its members scaled about their mean by a calibration.

        A prediction that is calibrated already is calibrated anew from its uncalibrated members.
        """
        raw = self.uncalibrated
        return Prediction(calibration.transform(raw.members), uncalibrated=raw)

    def map(self, f: Callable[[Float64Array], ArrayLike]) -> Prediction:
        """Apply a function to what each member predicts, one member at a time.

        Parameters
        ----------
        f : callable
            Takes the predictions of one member, an array of shape `shape`, and returns a number or
            an array.

        Returns
        -------
        Prediction
            Of whatever shape `f` returns. Its mean is the mean of ``f``, which for a non-linear
            function is not ``f`` of the mean.
        """

        def of_each_member(members: Float64Array) -> Float64Array:
            return stack_members([f(members[..., i]) for i in range(self.n_members)])

        return _combined(of_each_member, self)

    def sum(self, axis: int | None = None) -> Prediction:
        """Sum over points, member by member; ``numpy.sum`` does the same."""
        n_axes = len(self.shape)
        if axis is None:
            axes = tuple(range(n_axes))
        elif isinstance(axis, int) and -n_axes <= axis < n_axes:
            axes = (axis % n_axes,)  # never the last axis of the members
        else:
            raise InputError("axis", axis, f"an axis of a prediction of shape {self.shape}")
        return _combined(lambda members: members.sum(axis=axes), self)

    @staticmethod
    def concatenate(predictions: Sequence[Prediction]) -> Prediction:
        """Join predictions of one model along the first axis."""
        return _combined(lambda *members: np.concatenate(members), *predictions)

    def __getitem__(self, index: Any) -> Prediction:
        if self._mean_std:
            raw = None if self._uncalibrated is None else self.uncalibrated[index]
            return Prediction(mean=self.mean[index], std=self.std[index], uncalibrated=raw)
        key = index if isinstance(index, tuple) else (index,)
        if not any(k is Ellipsis for k in key):
            key = (*key, Ellipsis)
        # The members are the last axis and cannot be indexed away.
        return _combined(lambda members: members[(*key, slice(None))], self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a NumPy function member by member; members of several predictions go in pairs."""
        if kwargs.get("out") == (self,):
            kwargs.pop("out")  # p += 1 makes a new prediction, as it does for other numbers
        if method != "__call__" or kwargs or ufunc.nout != 1:
            return NotImplemented
        if ufunc is np.matmul:
            return _linear_combination(*inputs)
        predictions = [x for x in inputs if isinstance(x, Prediction)]

        def of_members(*members: Float64Array) -> Float64Array:
            remaining = iter(members)
            arrays = [
                next(remaining) if isinstance(x, Prediction) else np.asarray(x)[..., None]
                for x in inputs
            ]
            try:
                result: Float64Array = ufunc(*arrays)
            except ValueError:
                raise _misfit(ufunc.__name__, inputs) from None
            if result.dtype.kind not in "fiu":
                raise TypeError(
                    f"{ufunc.__name__} of a Prediction is not a number: use .mean or .members"
                )
            return result

        return _combined(of_members, *predictions)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Understand ``numpy.sum`` and ``numpy.concatenate``; refuse the rest, with advice."""
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
        """Return a single prediction with its error bar, to two digits of that; else `repr`."""
        if self.shape:
            return repr(self)
        mean, std = float(self.mean), float(self.std)
        if std <= _ROUNDING * abs(mean):
            return f"{mean:.6g} ± 0"
        digits = decimals(std)
        return f"{mean:.{digits}f} ± {std:.{digits}f}"

    def __repr__(self) -> str:
        calibrated = "" if self._uncalibrated is None else ", calibrated"
        return f"<Prediction of shape {self.shape} by {self.n_members} members{calibrated}>"


def decimals(*errors: float) -> int:
    """Return how many decimals show two digits of the smallest error that matters beside others."""
    largest = max(errors)
    smallest = min(error for error in errors if error > _MATTERS * largest)
    return max(0, 1 - int(np.floor(np.log10(smallest))))


def stack_members(results: Sequence[ArrayLike | None]) -> Float64Array:
    """Return what a function found for each member as one array, members last.

    Parameters
    ----------
    results : sequence of N_R numbers or arrays of one shape
    """
    if any(result is None for result in results):
        raise InputError("f", "a function that returns None", "one that returns numbers")
    arrays = [np.asarray(result, dtype=float) for result in results]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            given = f"shape {array.shape} for member {i}, {arrays[0].shape} for member 0"
            raise InputError("f", given, "a function whose results have one shape for all members")
    return np.stack(arrays, axis=-1)


def _combined(f: Callable[..., Float64Array], *predictions: Prediction) -> Prediction:
    """Combine the members of predictions, and, when asked for, their members before calibration."""
    counts = sorted({p.n_members for p in predictions})
    if len(counts) > 1:
        raise InputError(
            "n_members", counts, "predictions by the members of one and the same model"
        )
    members = f(*(p.members for p in predictions))
    if all(p._uncalibrated is None for p in predictions):
        return Prediction(members)
    return Prediction(
        members,
        uncalibrated=lambda: Prediction(f(*(p.uncalibrated.members for p in predictions))),
    )


def _linear_combination(a: Any, b: Any) -> Prediction:
    """Return C @ p or p @ c, such as stoichiometric sums."""
    if isinstance(a, Prediction) and isinstance(b, Prediction):
        raise TypeError("the product of two predictions is not linear: use map")

    def of_members(members: Float64Array) -> Float64Array:
        if isinstance(b, Prediction):
            combined: Float64Array = np.tensordot(a, members, axes=(-1, 0))
            return combined
        # The product leaves the members in front of the columns of b: they belong last.
        combined = np.tensordot(members, b, axes=(-2, 0))
        return np.moveaxis(combined, len(a.shape) - 1, -1)

    try:
        return _combined(of_members, b if isinstance(b, Prediction) else a)
    except (ValueError, IndexError):
        raise _misfit("matmul", (a, b)) from None


def _misfit(operation: str, operands: Sequence[Any]) -> InputError:
    """Return what to say of shapes that do not go together."""
    shapes = [x.shape if isinstance(x, Prediction) else np.shape(x) for x in operands]
    given = f"shapes {' and '.join(map(str, shapes))} for {operation}"
    return InputError("prediction", given, "shapes that go together by the rules of NumPy")


def score(y: ArrayLike, prediction: Prediction) -> Scores:
    """Judge a prediction against the truth.

    Parameters
    ----------
    y : array of the shape of the prediction
        True values.
    prediction : Prediction

    Returns
    -------
    Scores
        Root mean squared error, log likelihood, coverage and the other scores, by name.
    """
    if not isinstance(prediction, Prediction):
        raise InputError(
            "prediction", type(prediction).__name__, "a Prediction", "Make one of members."
        )
    if np.shape(y) != prediction.shape:
        raise InputError("y", f"shape {np.shape(y)}", f"that of the prediction, {prediction.shape}")
    return score_arrays(y, prediction.mean, prediction.std, prediction.members)


def calibrate(
    y: ArrayLike,
    members: ArrayLike | Prediction,
    *,
    absent: ArrayLike | None = None,
    method: str = "student",
) -> Calibration | PerOutputCalibration:
    """Find out how the spread between members relates to the true errors.

    Parameters
    ----------
    y : (n,) or (n, T) array
        Targets.
    members : (n, N_R) or (n, T, N_R) array, or Prediction
        What each member predicts for them; of a Prediction, before calibration.
    absent : (n, N_R) array of bool, optional
        Whether a point was absent from the training set of a member. With it, training points serve
        for the calibration, each predicted only by the members that did not see it. Without it the
        points must be new to all members.
    method : {"student", "shrinkage", "linear", "power", "none"}

    Returns
    -------
    Calibration
        With ``.alpha``, ``.gamma`` and ``.apply(prediction)``; one per output if y has T columns.
    """
    if isinstance(members, Prediction):
        members = members.uncalibrated.members
    return calibrate_arrays(
        check_points("y", y),
        check_points("members", members),
        absent=None if absent is None else np.asarray(absent, dtype=bool),
        method=method,
    )
