"""Means over seeds, their standard errors, and whether these leave a question open.

Seeds divide the same data anew, each for all estimators alike. Differences between estimators are
therefore taken seed by seed: what a division does to both of them cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from qualms.arrays import Float64Array
from qualms.reproduce.markdown import minus
from qualms.reproduce.results import Column, Results, Scheme, Seed

#: Upper end of a 68.3 % confidence interval, as a quantile.
_UPPER = 0.8413
#: What a size says of a claim.
NO, UNDECIDED, YES = -1, 0, 1
#: Verdicts in words.
ALL, SOME, NONE = "yes", "from a quarter on", "no"
OPEN, SOME_OPEN = "undecided", "undecided from a quarter on"
VERDICTS = (ALL, SOME, OPEN, SOME_OPEN, NONE)


def sub_samples(seed: Seed) -> list[Scheme]:
    """Return what was judged of sub-samples, by size."""
    return sorted((s for s in seed.schemes if not s.replace), key=lambda s: s.n)


def bootstrap_of(seed: Seed) -> Scheme:
    """Return what was judged of the bootstrap of a complete seed."""
    return next(s for s in seed.schemes if s.replace)


def mean_of_members(scheme: Scheme) -> Mapping[str, Column]:
    """Return columns of error bars about the mean of the members, which is what qualms predicts."""
    return scheme.columns


def full_model(scheme: Scheme) -> Mapping[str, Column]:
    """Return columns of error bars about the full model, as the paper has them."""
    return scheme.reference


def likelihood(column: Column) -> float:
    """Return the mean log likelihood of the test points."""
    return column.scores["log_likelihood"]


def likelihoods(
    results: Results, column: str, about: Callable[[Scheme], Mapping[str, Column]] = mean_of_members
) -> Float64Array:
    """Return the log likelihoods of a column: (n_seeds, n_sizes)."""
    found = [[likelihood(about(s)[column]) for s in sub_samples(seed)] for seed in results.seeds]
    return np.array(found, dtype=np.float64)


def standard_error(values: ArrayLike) -> Float64Array | None:
    """Return the standard error of the mean over the first axis; None of a single seed."""
    found = np.asarray(values, dtype=np.float64)
    if len(found) < 2:
        return None
    return np.asarray(found.std(axis=0, ddof=1) / np.sqrt(len(found)), dtype=np.float64)


def half_width(values: ArrayLike) -> Float64Array | None:
    """Return half the 68 % confidence interval of the mean, by Student's t; None of a single seed.

    Of two seeds it is 1.84 standard errors, of three 1.32.
    """
    found = np.asarray(values, dtype=np.float64)
    error = standard_error(found)
    if error is None:
        return None
    return np.asarray(error * stdtrit(len(found) - 1, _UPPER), dtype=np.float64)


def written(values: ArrayLike, form: str) -> str:
    """Write mean ± standard error over the first axis of values, for each of the others.

    Parameters
    ----------
    values : (n_seeds,) or (n_seeds, n_sizes) array
    form : str
        Format of the means, such as "+.3f"; standard errors have no sign.
    """
    found = np.asarray(values, dtype=np.float64).reshape(len(np.asarray(values)), -1)
    means = [format(mean, form) for mean in found.mean(axis=0)]
    error = standard_error(found)
    if error is not None:
        unsigned = form.replace("+", "")
        means = [f"{m} ± {format(e, unsigned)}" for m, e in zip(means, error, strict=True)]
    return minus(", ".join(means))


def states(margins: ArrayLike, *, strict: bool = False) -> list[int]:
    """Say of each size whether a criterion is met, is not, or lies within the 68 % interval.

    Parameters
    ----------
    margins : (n_seeds,) or (n_seeds, n_sizes) array
        By how much it is met; negative where it is not.
    strict : bool
        Whether a margin of exactly zero does not do.
    """
    found = np.asarray(margins, dtype=np.float64).reshape(len(np.asarray(margins)), -1)
    mean, width = found.mean(axis=0), half_width(found)
    met = mean > 0 if strict else mean >= 0
    verdicts = np.where(met, YES, NO)
    if width is not None:
        # Seeds that agree to the last digit have no error, and leave nothing open.
        verdicts[(np.abs(mean) <= width) & (width > 0)] = UNDECIDED
    return [int(v) for v in verdicts]


def verdict(found: Sequence[int]) -> str:
    """Say whether something holds for all sizes, for all but the smallest, or not; or is open.

    Parameters
    ----------
    found : sequence of int
        From `states`, by size; or of several things that all must hold.
    """
    if all(s == YES for s in found):
        return ALL
    rest = found[1:] if len(found) > 1 else found
    if all(s == YES for s in rest):
        return SOME
    if NO in rest:
        return NONE
    return SOME_OPEN if found[0] == NO else OPEN
