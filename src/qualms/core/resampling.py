"""Resampled training sets and what their models say together: Eqs. (4), (10) and (11).

Arrays of member predictions have the members on their last axis: (n, N_R), or (n, T, N_R) for T
outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray
from qualms.errors import InputError, QualmsWarning

#: A spread of fewer members says too little: Student's t then has less than two degrees of freedom.
MIN_ABSENT = 3


def subsample_size(subsample: float, n_train: int) -> int:
    """Return n for a sub-sample given as a fraction of N in (0, 1) or as a number of samples.

    Parameters
    ----------
    subsample : float or int
        A float is a fraction, rounded to at least one and at most N − 1 samples; an int is n
        itself.
    n_train : int
        N ≥ 2.
    """
    remedy = "Use a fraction between 0 and 1, fewer samples, or replace=True for a bootstrap."
    if n_train < 2:
        raise InputError("n_train", n_train, "at least 2 samples to draw sub-samples from")
    is_number = isinstance(subsample, (int, float, np.number)) and not isinstance(subsample, bool)
    if not is_number or not np.isfinite(subsample):
        raise InputError("subsample", subsample, "a fraction or a number of samples", remedy)
    if isinstance(subsample, (int, np.integer)):
        if not 1 <= subsample < n_train:
            raise InputError("subsample", subsample, f"1 ≤ n < N = {n_train}", remedy)
        if subsample == 1:
            warnings.warn(
                "subsample=1 is a single sample per member, not all of them.",
                QualmsWarning,
                stacklevel=3,
            )
        return int(subsample)
    if not 0 < subsample < 1:
        raise InputError("subsample", subsample, "a fraction strictly between 0 and 1", remedy)
    return int(np.clip(round(subsample * n_train), 1, n_train - 1))


def draw_members(
    n_train: int,
    n_members: int,
    subsample: float,
    rng: np.random.Generator,
    *,
    replace: bool = False,
    groups: Sequence[object] | IntArray | None = None,
) -> list[IntArray]:
    """Draw the training sets D_i of all members.

    Parameters
    ----------
    n_train : int
        N.
    n_members : int
        N_R ≥ 2.
    subsample : float or int
        n, as a fraction of the samples (or groups) or as a number of them; not used for a
        bootstrap, where n = N.
    rng : numpy.random.Generator
    replace : bool
        Draw N with replacement (bootstrap) rather than n < N without (sub-sampling).
    groups : (N,) array, optional
        Label of each sample. Whole groups are then in or out, and `subsample` is a fraction of the
        groups: samples of one crystal or of one trajectory are near-copies, and a model that saw
        one has seen all.

    Returns
    -------
    list of N_R arrays of int
        Sorted indices; with repetitions for a bootstrap.
    """
    if n_members < 2:
        raise InputError("n_members", n_members, "at least 2 members, so that there is a spread")
    codes = group_codes(groups, n_train)
    n_groups = int(codes.max()) + 1
    if groups is not None and n_groups < 2:
        raise InputError("groups", f"{n_groups} distinct label", "at least 2 groups")
    if replace:
        draws = [rng.integers(n_groups, size=n_groups) for _ in range(n_members)]
    else:
        n = subsample_size(subsample, n_groups)
        draws = [rng.permutation(n_groups)[:n] for _ in range(n_members)]
    times = [np.bincount(drawn, minlength=n_groups)[codes] for drawn in draws]
    return [np.repeat(np.arange(n_train), t) for t in times]


def group_codes(groups: Sequence[object] | IntArray | None, n_train: int) -> IntArray:
    """Return the labels (N,) as integers 0 … G−1; without labels, each sample is a group."""
    if groups is None:
        return np.arange(n_train)
    labels = np.asarray(groups)
    if labels.shape != (n_train,):
        raise InputError(
            "groups", f"shape {labels.shape}", f"one label for each of {n_train} samples"
        )
    try:
        codes: IntArray = np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.intp)
    except TypeError as error:
        raise InputError(
            "groups", f"labels of mixed types ({error})", "one type of label"
        ) from error
    return codes


def membership_counts(member_indices: Sequence[IntArray], n_train: int) -> IntArray:
    """Return how often each sample is in each D_i: (N, N_R); zero where it is absent."""
    columns = [np.bincount(indices, minlength=n_train) for indices in member_indices]
    return np.stack(columns, axis=1).astype(np.intp)


def committee(members: FloatArray) -> tuple[Float64Array, Float64Array]:
    """Return mean and standard deviation (ddof = 1) over the members, the last axis.

    Eq. (4), Musil et al. 2019.
    """
    if members.shape[-1] < 2:
        raise InputError("members", f"{members.shape[-1]} member", "at least 2 on the last axis")
    members = np.asarray(members, dtype=np.float64)
    return np.mean(members, axis=-1), np.std(members, axis=-1, ddof=1)


def stretched(
    members: FloatArray, factor: float | FloatArray, mean: Float64Array | None = None
) -> Float64Array:
    """Scale members (…, N_R) about their mean: ȳ + f (y⁽ⁱ⁾ − ȳ).

    Parameters
    ----------
    members : (…, N_R) array
    factor : float or (…) array
        f; one leaves the members as they are, zero makes all of them their mean.
    mean : (…) array, optional
        What to scale about, if not the mean of all of them.
    """
    values, f = np.asarray(members, dtype=np.float64), np.asarray(factor, dtype=np.float64)
    center = committee(values)[0] if mean is None else mean
    scaled: Float64Array = center[..., None] + (values - center[..., None]) * f[..., None]
    return scaled


def group_scatter(terms: Float64Array, codes: IntArray) -> Float64Array:
    """Return the covariance (p, p) of the sum of all terms (n, p), those of a group correlated.

    Groups are independent, so it is G/(G−1) Σ_g S_g S_gᵀ, S_g being the sum over group g of the
    terms less their mean.

    Parameters
    ----------
    terms : (n, p) array
    codes : (n,) array of int
        Groups 0 … G−1.
    """
    centered = terms - terms.mean(axis=0)
    n_groups = int(codes.max()) + 1
    sums = [np.bincount(codes, column, minlength=n_groups) for column in centered.T]
    S = np.stack(sums, axis=1)
    return np.asarray(S.T @ S * n_groups / max(n_groups - 1, 1), dtype=np.float64)


@dataclass(frozen=True)
class InternalPrediction:
    """Predictions of training points by the members that did not see them.

    Attributes
    ----------
    used : (N,) array of bool
        Points that enough members are absent from; the other arrays hold these points only.
    mean, std : (n_used, …) arrays
        y_INT and σ_INT.
    n_absent : (n_used,) array of int
        N_R(X): number of members that did not see the point.
    """

    used: BoolArray
    mean: Float64Array
    std: Float64Array
    n_absent: IntArray


def internal_prediction(
    members: FloatArray, absent: BoolArray, *, min_absent: int = MIN_ABSENT
) -> InternalPrediction:
    """Average over the members that did not see a point. Eqs. (10) and (11), Musil et al. 2019.

    Parameters
    ----------
    members : (N, N_R) or (N, T, N_R) array
        Predictions of the training points by all members.
    absent : (N, N_R) array of bool
        Whether the member did not see the point.
    min_absent : int
        Points that fewer members are absent from are left out; at least 2.

    Returns
    -------
    InternalPrediction
    """
    members = np.asarray(members, dtype=np.float64)
    absent = np.asarray(absent, dtype=bool)
    if absent.shape != (len(members), members.shape[-1]):
        raise InputError(
            "absent",
            f"shape {absent.shape}",
            f"({len(members)}, {members.shape[-1]}), like members",
        )
    if min_absent < 2:
        raise InputError("min_absent", min_absent, "at least 2, so that there is a spread")
    n_absent = absent.sum(axis=1)
    used = n_absent >= min_absent
    shape = (-1,) + (1,) * (members.ndim - 2)
    c = n_absent[used].reshape(shape)
    mask = absent[used].reshape((*shape, absent.shape[1]))
    values = members[used]
    mean = np.sum(np.where(mask, values, 0.0), axis=-1) / c
    deviations = np.where(mask, values - mean[..., None], 0.0)
    std = np.sqrt(np.sum(deviations**2, axis=-1) / (c - 1))
    return InternalPrediction(used, mean, std, n_absent[used])
