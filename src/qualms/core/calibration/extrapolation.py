"""Extrapolating the spread of sub-samples of size n to n = N by a power law (Politis et al. 1999).

The spread of models trained on independent samples of size n falls as n^(−β). Sub-samples of one
training set of size N are not independent: drawn without replacement, they share so much that their
spread is smaller by √(1 − n/N), the finite-population correction, and vanishes at n = N. Undoing
that factor first leaves the power law, whose exponent is found by linear regression of ln σ on ln
n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.core.calibration.scaling import LinearCalibration
from qualms.core.typing import FloatArray
from qualms.errors import InputError


@dataclass(frozen=True)
class SpreadExtrapolation:
    """The power law σ_n = e^a n^(−β) √(1 − n/N) and what follows from it.

    Attributes
    ----------
    exponent : float
        β.
    exponent_error : float
        Standard error of β from the regression; zero if only two sizes were given.
    log_prefactor : float
        a.
    n_train : int
        N.
    finite_population : bool
        Whether the factor √(1 − n/N) is part of the law.
    """

    exponent: float
    exponent_error: float
    log_prefactor: float
    n_train: int
    finite_population: bool

    def alpha(self, subsample: int) -> float:
        """Return the factor that turns the spread of sub-samples of this size into that of N."""
        correction = 1 - subsample / self.n_train if self.finite_population else 1.0
        if not 0 < subsample <= self.n_train or correction <= 0:
            raise InputError("subsample", subsample, f"0 < n < N = {self.n_train}")
        return float((subsample / self.n_train) ** self.exponent / correction**0.5)

    def calibration(self, subsample: int) -> LinearCalibration:
        """Return the calibration of committees of this sub-sample size; no target was looked at."""
        return LinearCalibration(alpha=self.alpha(subsample))


def extrapolate_spread(
    subsamples: Sequence[int],
    spreads: Sequence[FloatArray],
    n_train: int,
    *,
    finite_population: bool = True,
) -> SpreadExtrapolation:
    """Fit the power law to the spreads at several sub-sample sizes.

    Parameters
    ----------
    subsamples : sequence of int
        At least two different sizes n < N.
    spreads : sequence of arrays
        For each size the spreads σ_n > 0 of the same test points; their geometric mean is fitted.
    n_train : int
        N.
    finite_population : bool
        Whether to undo the factor √(1 − n/N) of drawing without replacement.
    """
    n = np.asarray(subsamples, dtype=np.float64)
    if len(np.unique(n)) < 2 or len(n) != len(spreads):
        raise InputError("subsamples", list(subsamples), "at least two sizes, one per spread")
    if np.any(n < 1) or np.any(n >= n_train):
        raise InputError("subsamples", list(subsamples), f"1 ≤ n < N = {n_train}")
    means = []
    for spread in spreads:
        sigma = np.asarray(spread, dtype=np.float64)
        if sigma.size == 0 or not np.all(np.isfinite(sigma)) or np.any(sigma <= 0):
            raise InputError("spreads", "values ≤ 0 or not finite", "positive finite spreads")
        means.append(float(np.mean(np.log(sigma))))
    log_sigma = np.array(means)
    if finite_population:
        log_sigma -= 0.5 * np.log(1 - n / n_train)
    x = np.log(n) - np.mean(np.log(n))
    slope = float(x @ log_sigma / (x @ x))
    intercept = float(np.mean(log_sigma) - slope * np.mean(np.log(n)))
    residual = log_sigma - intercept - slope * np.log(n)
    error = float(np.sqrt(residual @ residual / (len(n) - 2) / (x @ x))) if len(n) > 2 else 0.0
    return SpreadExtrapolation(-slope, error, intercept, n_train, finite_population)
