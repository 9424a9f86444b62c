"""Scores of single points, whose means are those of `qualms.core.scores`.

Arrays are taken as checked: |z| and σ of one shape, in the units of y.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf, ndtri

from qualms.core.typing import Float64Array


def gaussian_half_width(level: float) -> float:
    """Half width of the central interval of a standard normal."""
    # Minus the lower quantile rather than the upper: 1 − level keeps its digits when it is small.
    return -float(ndtri(0.5 * (1.0 - level)))


def gaussian_crps(z: Float64Array, sigma: Float64Array) -> Float64Array:
    """Continuous ranked probability score of N(0, σ²) at the distance z = |y − ȳ|; |z| if σ = 0."""
    t = np.full(z.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(z, sigma, out=t, where=sigma > 0.0)
        # σ [t erf(t/√2) + 2 φ(t) − 1/√π] with σ t written as |z|, so that σ → 0 needs no limit.
        density = np.exp(-0.5 * t * t) / np.sqrt(2.0 * np.pi)
    crps: Float64Array = z * erf(t / np.sqrt(2.0)) + sigma * (2.0 * density - 1.0 / np.sqrt(np.pi))
    return crps


def ensemble_crps(truth: Float64Array, members: Float64Array, *, fair: bool) -> Float64Array:
    """Continuous ranked probability score of members (n, R) at the truth (n,): see `crps_ensemble`.

    Between the k-th and the next of the sorted members lie k (R − k) of the pairs, so the gaps
    weighted by that sum up all distances: R log R instead of R², and no term cancels another.
    """
    x = np.sort(members, axis=1)
    n_members = x.shape[1]
    k = np.arange(1, n_members)
    pair_distances = np.diff(x, axis=1) @ (k * (n_members - k)).astype(np.float64)
    distance = np.mean(np.abs(x - truth[:, None]), axis=1)
    # Each pair occurs twice in Σ_ij, which takes the 1/2 away.
    n_pairs = n_members * (n_members - 1) if fair else n_members**2
    # Neither score is negative: with k members below x < y their integrands are (k/R)² and
    # k(k−1)/(R(R−1)), and likewise above. Only rounding could make it so.
    crps: Float64Array = np.maximum(distance - pair_distances / n_pairs, 0.0)
    return crps


def interval_scores(z: Float64Array, half_width: Float64Array, level: float) -> Float64Array:
    """Interval score of ȳ ± half width at z = |y − ȳ|: the width, and what a miss costs."""
    missed = np.maximum(z - half_width, 0.0)
    scores: Float64Array = 2.0 * half_width + 2.0 / (1.0 - level) * missed
    return scores
