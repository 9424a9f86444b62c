"""Limits beyond which a structure is an extrapolation, from out-of-bag structures.

Three measures: the standard deviation of the model (p of posterior members, or ŝ), and the largest
and the mean novelty of the environments of a structure. Each has a limit; together they are such
that 1 % of the out-of-bag structures exceed one of them or another. So a limit is not the 99 %
quantile of its measure: up to 3 % would exceed one. All limits are quantiles of the same level.

Environments of hydrogen differ less than those of carbon. So the largest novelty is that relative
to a scale of each element: the novelty that 1 % of the structures with it would exceed if it were
log-normal, at most the largest of any element. Few structures determine that, unlike the extremes
of each element, one or another of which new structures exceed the more often the more elements
there are.

Some training structures may be unlike all others. Out of bag they are extrapolations themselves,
and a few of them among hundreds would decide on the limits of all new structures. So limits are not
above those that 1 % would exceed if the measures were log-normally distributed, with the median and
the 90 % quantile of the out-of-bag structures, but never so low that 5 % of these exceed one.

A molecule that is larger than all those of the training set is an extrapolation as well. Out of
bag, that holds for the largest one, which is one of the 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from qualms.arrays import BoolArray, Float64Array, IntArray

#: Share of out-of-bag structures that are extrapolations, and the most if some are unlike others.
SHARE, MOST = 0.01, 0.05
#: Rounding of novelties.
ROUNDING = 1e-6
#: Samples of the standard deviation of posterior members, in which it scatters as predicted ones.
_SAMPLES = 16


def element_scales(novelty: Float64Array) -> Float64Array:
    """Return the scale of the largest novelty of each element: (S,).

    Parameters
    ----------
    novelty : (n, S) array
        Largest novelty of the atoms of each element, in out-of-bag structures; zero without any.
    """
    scales = np.zeros(novelty.shape[1])
    for k, column in enumerate(novelty.T):
        if len(values := column[column > 0]):
            scales[k] = log_normal_limits(values[None], SHARE)[0]
    scales[scales == 0] = scales.max()  # such as elements whose atoms have no target
    return np.asarray(np.minimum(scales, novelty.max()))


def fit_limits(
    measures: Sequence[Float64Array], largest: BoolArray | None = None, n_samples: int = 1
) -> list[float]:
    """Return the limits of measures beyond which a structure is an extrapolation.

    Fewer than 100 structures do not determine more than their largest values.

    Parameters
    ----------
    measures : sequence of (n,) arrays
        Of out-of-bag structures.
    largest : (n,) array of bool, optional
        Structures that are extrapolations, whatever their measures are.
    n_samples : int
        How often each structure is among the n.
    """
    limits = limits_of_share(measures, largest, SHARE)
    if SHARE * len(measures[0]) < n_samples:
        return limits
    usual = log_normal_limits(np.stack(measures), SHARE)
    least = limits_of_share(measures, largest, MOST)
    return [float(limit) for limit in np.clip(usual, least, limits)]


def log_normal_limits(measures: Float64Array, share: float) -> Float64Array:
    """Return the limits that a share would exceed if all measures (k, n) were log-normal: (k,).

    The largest of the k logarithms of a structure, relative to their medians and 90 % quantiles, is
    taken to be Gaussian.
    """
    logs = np.log(np.maximum(measures, np.finfo(np.float64).tiny))
    median, high = np.quantile(logs, [0.5, 0.9], axis=1)
    scale = np.maximum(high - median, 1e-6)
    u = ((logs - median[:, None]) / scale[:, None]).max(axis=0)
    middle, above = np.quantile(u, [0.5, 0.9])
    level = middle + (above - middle) * ndtri(1 - share) / ndtri(0.9)
    return np.asarray(np.exp(np.minimum(median + scale * level, 700.0)))


def limits_of_share(
    measures: Sequence[Float64Array], largest: BoolArray | None, share: float
) -> list[float]:
    """Return the limits of measures, such that a share of the structures exceeds one of them.

    They are the kth largest of each measure, for the largest k with which it is not more.

    Parameters
    ----------
    measures, largest
        As in `fit_limits`.
    share : float
    """
    columns = np.stack(measures)
    ordered, n = np.sort(columns, axis=1), columns.shape[1]
    beyond = np.zeros(n, dtype=bool) if largest is None else largest
    low, high = 0, min(int(share * n), n - 1)  # bisection: more structures exceed lower limits
    while low < high:
        k = (low + high + 1) // 2
        exceeding = beyond | (columns > ordered[:, [n - 1 - k]]).any(axis=0)
        low, high = (k, high) if np.count_nonzero(exceeding) <= share * n else (low, k - 1)
    return [float(limit) for limit in ordered[:, n - 1 - low]]


def scattered(std: Float64Array, n_members: int, rng: np.random.Generator) -> Float64Array:
    """Return standard deviations (n,) as samples of so many members have them: (_SAMPLES, n)."""
    chi2 = rng.chisquare(n_members - 1, size=(_SAMPLES, len(std)))
    return np.asarray(std * np.sqrt(chi2 / (n_members - 1)))


def sizes_of(composition: IntArray, species: Sequence[int], periodic: BoolArray) -> IntArray:
    """Return numbers of atoms of molecules, and of those other than hydrogen: (n, 2).

    Cells of periodic structures may have any size; they count as empty.

    Parameters
    ----------
    composition : (n, S) array of int
        Counts of the species.
    species : sequence of int
    periodic : (n,) array of bool
    """
    heavy = np.array(species) > 1
    sizes = np.stack([composition.sum(axis=1), composition[:, heavy].sum(axis=1)], axis=1)
    return np.where(periodic[:, None], 0, sizes)


def is_largest(sizes: IntArray) -> BoolArray:
    """Return which structures are larger than all others, by either of two sizes (n, 2): (n,)."""
    alone = (sizes == sizes.max(axis=0)) & (np.sum(sizes == sizes.max(axis=0), axis=0) == 1)
    return np.asarray(alone.any(axis=1))
