"""A sequential test of whether σ still describes the errors of new labels, valid at any time.

The score of a structure is T = ⟨z²/σ²⟩, the mean over its components, which are correlated: one
number for one structure. If σ is right, scores of new labels are exchangeable with those of
out-of-bag structures, whatever their distribution is, and whatever σ is: labels may have been
chosen by σ. The rank k of a new score among the m scores before it and itself, the largest first,
is then uniform on 1 … m + 1, and independent of the ranks before (Vovk, Nouretdinov & Gammerman,
ICML 2003). A bet on small ranks, with the density κ u^(κ−1) of u = k/(m + 1),

    b_κ(k) = (m + 1) [(k/(m + 1))^κ − ((k − 1)/(m + 1))^κ],        0 < κ < 1,

has the expectation one. If errors are smaller than σ says it is less: the test is one-sided.

Bets that begin at label s, and are multiplied from there on, detect a change at s. The weights of
all s sum to one, w_s = 1/log₂(s + 1) − 1/log₂(s + 2), s = 1, 2, …, so that

    e_t = Σ_{s ≤ t} w_s ⟨Π_{i=s…t} b_κ(k_i)⟩_κ + 1/log₂(t + 2)

is not negative and has the expectation one, given all before: it ever reaches 1/level with at most
the probability `level` (Ville). w_s falls slowly, as 1/(s ln² s): a change at label 400 costs ten
units of ln e, and one at the first label half a unit.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from qualms.arrays import Float64Array, IntArray, check_number, check_points, check_std
from qualms.errors import InputError

#: Exponents κ of the bets: from changes that make every score one of the largest to slight ones.
_EXPONENTS = np.array([0.2, 0.4, 0.6, 0.8])


def structure_means(values: ArrayLike, structure: ArrayLike) -> Float64Array:
    """Return the mean of values (n,) over each structure, in the order of the numbers: (S,).

    Parameters
    ----------
    values : (n,) array
        Of components, such as z²/σ².
    structure : (n,) array of int
        Number of the structure of each.
    """
    x = check_points("values", values)
    codes: IntArray = np.unique(np.asarray(structure), return_inverse=True)[1].reshape(-1)
    if codes.shape != x.shape:
        raise InputError(
            f"`structure` has {codes.size} numbers; `values` have the shape {x.shape}.",
            parameter="structure",
        )
    return np.asarray(np.bincount(codes, x) / np.bincount(codes))


def calibration_scores(residuals: ArrayLike, std: ArrayLike, structure: ArrayLike) -> Float64Array:
    """Return ⟨z²/σ²⟩ of each structure, in the order of the numbers: (S,).

    Parameters
    ----------
    residuals, std : (n,) arrays
        z = y − ȳ and σ > 0 of components, in the units of y.
    structure : (n,) array of int
        Number of the structure of each.
    """
    z = check_points("residuals", residuals)
    return structure_means(np.square(z / check_std(std, z.shape)), structure)


class CalibrationTest:
    """A test of whether errors are larger than their σ, label by label, with an alarm.

    Parameters
    ----------
    reference : (m,) array
        Scores, `calibration_scores`, of out-of-bag structures.
    level : float
        Probability of a false alarm, however many labels there are.
    tolerance : float
        Factor, at least one, by which σ may be too small without being a reason for an alarm.

    Attributes
    ----------
    e_value : float
        Evidence against the calibration: if it holds, it ever exceeds x with at most the
        probability 1/x.
    alarm : bool
        Whether the evidence has reached 1/level at any label.
    n_labels : int

    Notes
    -----
    Labels must be as good as independent: neighbouring frames of a trajectory are one label that is
    counted several times. A slight error of σ that is the same everywhere becomes significant with
    hundreds of labels: the tolerance is for that.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> test = CalibrationTest(rng.chisquare(10, 100) / 10)
    >>> test.update(rng.chisquare(10, 300) / 10)
    False
    >>> test.update(1.6**2 * rng.chisquare(10, 30) / 10)  # σ is too small by a factor of 1.6
    True
    """

    def __init__(
        self, reference: ArrayLike, *, level: float = 0.05, tolerance: float = 1.1
    ) -> None:
        self.level = check_number("level", level, 0, strict=True)
        if self.level >= 1:
            raise InputError(
                f"`level` is {level!r}; use a probability between 0 and 1.", parameter="level"
            )
        self.tolerance = check_number("tolerance", tolerance, 1)
        self.n_labels, self.alarm = 0, False
        self._log_bets = np.full(len(_EXPONENTS), -np.inf)  # Σ_s w_s Π b_κ(k_i), by κ
        self._log_e = 0.0
        self.renew(reference)

    @property
    def e_value(self) -> float:
        """Evidence against the calibration."""
        with np.errstate(over="ignore"):
            return float(np.exp(self._log_e))

    def renew(self, reference: ArrayLike) -> None:
        """Replace the reference by the out-of-bag structures of a model that was trained again.

        These contain the labels so far, if it was trained with them; the evidence stays.

        Parameters
        ----------
        reference : (m,) array
        """
        self._reference: list[float] = sorted(_scores("reference", reference).tolist())

    def update(self, scores: ArrayLike) -> bool:
        """Add the scores of new labels, in their order, and return whether there is an alarm.

        Parameters
        ----------
        scores : float or (n,) array
            `calibration_scores` of structures that the model was not trained on.
        """
        for score in _scores("scores", scores) / self.tolerance**2:
            self._add(float(score))
        return self.alarm

    def _add(self, score: float) -> None:
        self.n_labels += 1
        # Of equal scores the new one is the last: ranks are too large rather than too small.
        m = len(self._reference)
        k = m - bisect_left(self._reference, score) + 1
        insort(self._reference, score)
        ranks = np.array([k, k - 1]) / (m + 1)
        powers = ranks[:, None] ** _EXPONENTS
        unused, after = 1 / np.log2(self.n_labels + np.array([1, 2]))
        new = (unused - after) / len(_EXPONENTS)
        self._log_bets = np.logaddexp(self._log_bets, np.log(new))
        self._log_bets += np.log((m + 1) * (powers[0] - powers[1]))
        self._log_e = float(logsumexp([*self._log_bets, np.log(after)]))
        self.alarm |= self._log_e >= -np.log(self.level)

    def __repr__(self) -> str:
        """Return the state of the test in words."""
        state = "no longer holds" if self.alarm else "is not in doubt"
        return (
            f"<CalibrationTest: the calibration {state} after {self.n_labels} labels, "
            f"e = {self.e_value:.3g}>"
        )


def _scores(name: str, values: ArrayLike) -> Float64Array:
    scores = np.atleast_1d(check_points(name, values))
    if scores.ndim != 1 or np.any(scores < 0):
        raise InputError(
            f"`{name}` must be a list of means of z²/σ², which are not negative; see "
            "`calibration_scores`.",
            parameter=name,
        )
    return scores
