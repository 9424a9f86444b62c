"""Intervals whose coverage does not depend on the distribution of errors: conformal prediction.

Scores |z|/σ of out-of-bag points are exchangeable with that of a new point, whatever their
distribution, but for parameters that are fitted to the same points (compare jackknife+ after
bootstrap: Kim, Xu & Barber, NeurIPS 2020). Points of one structure are
not independent, but structures are: each of G groups has the weight 1/(G + 1), its points share it,
and the rest belongs to a score of infinity (hierarchical conformal prediction: Lee, Barber &
Willett, 2023). With single points this is the quantile of rank ⌈level (n + 1)⌉.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qualms.arrays import Float64Array, IntArray
from qualms.errors import InputError


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sorted scores |z|/σ (m,), and the probability (m,) of a smaller or equal one."""

    scores: Float64Array
    probabilities: Float64Array

    def __eq__(self, other: object) -> bool:
        """Whether all scores are equal, as those of a copy from another process are."""
        return isinstance(other, Conformal) and (
            np.array_equal(self.scores, other.scores)
            and np.array_equal(self.probabilities, other.probabilities)
        )

    __hash__ = None  # type: ignore[assignment]

    def quantile(self, level: float) -> float:
        """Return the smallest score whose probability is at least `level`."""
        k = int(np.searchsorted(self.probabilities, level * (1 - 1e-12)))
        if k == len(self.scores):
            raise InputError(
                f"`level` is {level}; so few out-of-bag points determine intervals up to "
                f"{self.probabilities[-1]:.4g}. Use a smaller level, or train on more data.",
                parameter="level",
            )
        return float(self.scores[k])


def fit_conformal(scores: Float64Array, groups: IntArray) -> Conformal:
    """Return the distribution of scores (n,) of points that belong to groups (n,).

    At most 1000 scores are stored, which makes intervals wider, by little.
    """
    codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    order = np.argsort(scores, kind="stable")
    probabilities = np.cumsum(1 / sizes[codes[order]]) / (len(sizes) + 1)
    n = len(scores)
    ranks = np.unique(np.linspace(0, n - 1, min(1000, n)).round().astype(int))
    return Conformal(scores[order][ranks], probabilities[ranks])
