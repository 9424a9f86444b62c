"""Ensembles of subsampled sparse models that share one basis: Eqs. (4), (10) and (11).

Two parts: drawing the training sets of members and averaging over them; the full model and its
members, solved from sums over rows. Arrays of member predictions have the members on their last
axis: (n, N_R), or (n, T, N_R) for T outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from qualms.arrays import (
    BoolArray,
    Float64Array,
    FloatArray,
    IntArray,
)
from qualms.errors import InputError, NumericalError, counted, warn
from qualms.gp.noise import noise_grid, select_joint_noise, select_noise
from qualms.gp.sparse_gp import (
    ProjectedProcess,
    posterior_deviations,
    solve_projected_process,
)
from qualms.gp.sums import (
    FEW_ROWS,
    BlockSums,
    Draw,
    KeptRows,
    RowSums,
    sum_rows,
    weighted_sum,
)

#: With fewer members, Student's t has less than two degrees of freedom.
MIN_ABSENT = 3


def subsample_size(subsample: float, n_train: int) -> int:
    """Return n for a subsample given as a fraction of N in (0, 1) or as a number of samples.

    A float is a fraction, rounded to at least one and at most N − 1 samples; an int is n itself.
    """
    if n_train < 2:
        raise InputError(
            f"Subsamples are drawn from at least 2 samples or groups; there is {n_train}.",
            parameter="n_train",
        )
    whole = isinstance(subsample, (int, np.integer)) and not isinstance(subsample, bool)
    fraction = isinstance(subsample, (float, np.floating))
    if not ((whole and 1 <= subsample < n_train) or (fraction and 0 < subsample < 1)):
        raise InputError(
            f"`subsample` is {subsample!r}; use a fraction between 0 and 1, or a number of samples "
            f"from 1 to {n_train - 1}. For a bootstrap, use `replace=True`.",
            parameter="subsample",
        )
    if fraction:
        return int(np.clip(round(subsample * n_train), 1, n_train - 1))
    if subsample == 1:
        warn("subsample=1 is a single sample per member, not all of them.")
    return int(subsample)


def draw_members(
    n_train: int,
    n_members: int,
    subsample: float,
    rng: np.random.Generator,
    *,
    replace: bool = False,
    groups: Sequence[object] | IntArray | None = None,
) -> IntArray:
    """Draw the training sets D_i of all members: how often each sample is in each, (N, N_R).

    Parameters
    ----------
    n_train, n_members : int
        N, and N_R ≥ 2.
    subsample : float or int
        n, as a fraction of the samples (or groups) or as a number of them.
    rng : numpy.random.Generator
    replace : bool
        Draw N with replacement (bootstrap) rather than n < N without (subsampling).
    groups : (N,) array, optional
        Labels. Whole groups are then in or out: samples of one crystal or of one trajectory are
        near-copies.
    """
    codes = group_codes(groups, n_train)
    n_groups = int(codes.max()) + 1
    if replace:
        draws = [rng.integers(n_groups, size=n_groups) for _ in range(n_members)]
    else:
        n = subsample_size(subsample, n_groups)
        draws = [rng.permutation(n_groups)[:n] for _ in range(n_members)]
    counts = [np.bincount(drawn, minlength=n_groups)[codes] for drawn in draws]
    return np.stack(counts, axis=1).astype(np.intp)


def n_blocks_of(n_members: int, n_rows: int, *, free: bool) -> int:
    """Return the number of blocks, if there are enough groups.

    Sixteen members of half of 16 blocks differ in eight of them. If rows are few, 64 blocks cost
    nothing, and draws are nearly free. Without members made of them, five blocks are left: noise
    variances of several quantities are tested on one.

    Parameters
    ----------
    n_members, n_rows : int
    free : bool
        Whether members are drawn freely rather than made of blocks.
    """
    if free or not n_members:
        return 5
    return 64 if n_rows <= 64 * FEW_ROWS else 16


def draw_blocks(
    groups: IntArray,
    rng: np.random.Generator,
    *,
    n_members: int,
    subsample: float = 0.5,
    replace: bool = False,
    free: bool = False,
    n_rows: int = 0,
    kinds: IntArray | None = None,
) -> Draw:
    """Divide points into blocks, and draw the blocks that members are trained on.

    Parameters
    ----------
    groups : (n,) array of int
        Labels of points; those of one group are in one block.
    rng : numpy.random.Generator
    n_members : int
        N_R ≥ 2, or 0 for none.
    subsample : float or int
        Size of the training sets of members: a fraction of the groups, or a number of them.
    replace : bool
        Draw with replacement (bootstrap).
    free : bool
        Draw groups, as in the paper, rather than blocks.
    n_rows : int
        Number of rows, on which the number of blocks depends.
    kinds : (n,) array of int, optional
        Kinds of points, such as those with forces: each is spread evenly over the blocks.
    """
    labels, first, codes = np.unique(groups, return_index=True, return_inverse=True)
    n_groups = len(labels)
    n = subsample_size(subsample, n_groups) if n_members and not replace else n_groups
    fewest = n_blocks_of(n_members, n_rows, free=free)
    most = fewest + (0 if free or not n_members else 4)
    share = n / n_groups

    def rounding(size: int) -> tuple[float, bool]:
        used = min(max(round(size * share), 1), size - 1) / size if size > 1 else share
        return round(abs(used - share), 9), n_groups % size > 0

    # Of a few numbers of blocks, the first of which the subsamples are a whole number.
    n_blocks = min(range(min(fewest, n_groups), min(most, n_groups) + 1), key=rounding)
    order = rng.permutation(n_groups)
    if kinds is not None:  # those of a kind follow each other, rare ones first
        of_group = kinds[first]
        rarity = np.bincount(of_group)[of_group]
        order = order[np.lexsort((of_group[order], rarity[order]))]
    block = np.empty(n_groups, dtype=np.intp)
    block[order] = np.arange(n_groups) % n_blocks
    block = block[codes]
    if free or not n_members:
        counts = np.empty((len(codes), 0), dtype=np.intp)
        if n_members:
            counts = draw_members(
                len(codes), n_members, subsample, rng, replace=replace, groups=codes
            )
        return Draw(block, counts, n_blocks, None)
    of_blocks = draw_members(n_blocks, n_members, 0.5 if replace else share, rng, replace=replace)
    if not replace and rounding(n_blocks)[0] > 0.02:
        used = of_blocks[:, 0].sum() / n_blocks
        warn(
            f"Members are trained on {used:.3g} of the data, not {share:.3g}: subsamples are made "
            f"of {n_blocks} blocks."
        )
    return Draw(block, of_blocks[block], n_blocks, of_blocks)


def with_points(draw: Draw, points: BoolArray, members: BoolArray) -> Draw:
    """Return a draw with some points in the training sets of some members as well.

    Of each block, these points become a separate block, which few rows make cheap.

    Parameters
    ----------
    draw : Draw
    points : (n,) array of bool
    members : (N_R,) array of bool
    """
    if draw.of_blocks is None:
        more = points[:, None] & members
        return replace(draw, counts=np.where(more, np.maximum(draw.counts, 1), draw.counts))
    old = np.unique(draw.block[points])
    block = draw.block.copy()
    block[points] = draw.n_blocks + np.searchsorted(old, draw.block[points])
    with_them = np.where(members, np.maximum(draw.of_blocks[old], 1), draw.of_blocks[old])
    of_blocks = np.concatenate([draw.of_blocks, with_them])
    return Draw(block, of_blocks[block], len(of_blocks), of_blocks)


#: Rows that are kept at most, whole groups aside.
N_KEPT = 10_000


def keep_groups(
    groups: IntArray,
    n_rows: IntArray,
    n: int,
    rng: np.random.Generator,
    preferred: Sequence[BoolArray] = (),
) -> BoolArray:
    """Return points (N,) of random groups, whole ones, that have at least n rows together.

    There are at least ten of them.

    Parameters
    ----------
    groups, n_rows : (N,) arrays of int
        Group of each point, and its number of rows.
    n : int
    rng : numpy.random.Generator
    preferred : sequence of (N,) arrays of bool
        Of each of these kinds of points, ten groups come first.
    """
    codes = np.unique(groups, return_inverse=True)[1]
    order = rng.permutation(int(codes.max()) + 1)
    later = np.ones(len(order), dtype=bool)
    for kind in preferred:
        has = np.bincount(codes, weights=kind, minlength=len(order)) > 0
        later[np.flatnonzero(has[order])[:10]] = False
    order = order[np.argsort(later, kind="stable")]
    sizes = np.bincount(codes, weights=n_rows, minlength=len(order))[order]
    n_groups = int(np.searchsorted(np.cumsum(sizes), n)) + 1
    return np.isin(codes, order[: max(n_groups, 10)])


def group_codes(groups: Sequence[object] | IntArray | None, n_train: int) -> IntArray:
    """Return the labels (N,) as integers 0 … G−1; without labels, each sample is a group."""
    if groups is None:
        return np.arange(n_train)
    labels = np.asarray(groups)
    if labels.shape != (n_train,):
        raise InputError(
            f"`groups` has the shape {labels.shape} instead of ({n_train},), one label for each "
            "sample.",
            parameter="groups",
        )
    try:
        return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.intp)
    except TypeError as error:
        raise InputError(
            f"The labels in `groups` cannot be sorted ({error}). Use one type of label, numbers or "
            "strings, without None.",
            parameter="groups",
        ) from error


def ensemble_mean_std(members: FloatArray) -> tuple[Float64Array, Float64Array]:
    """Return mean and standard deviation (ddof = 1) over the members, the last axis.

    Eq. (4), Musil et al. 2019.
    """
    if members.shape[-1] < 2:
        raise InputError(
            f"`members` has {counted(members.shape[-1], 'member')} on its last axis; a standard "
            "deviation needs at least 2.",
            parameter="members",
        )
    members = np.asarray(members, dtype=np.float64)
    mean = members.mean(axis=-1)
    # np.std would take the mean again, and for few points several times as long.
    deviations = members - mean[..., None]
    squares = np.einsum("...i,...i->...", deviations, deviations)
    return mean, np.sqrt(squares / (members.shape[-1] - 1))


def rescaled(
    members: FloatArray, factor: float | FloatArray, mean: Float64Array | None = None
) -> Float64Array:
    """Scale the deviations of members from their mean: ȳ + f (y⁽ⁱ⁾ − ȳ).

    Parameters
    ----------
    members : (…, N_R) array
    factor : float or (…) array
        f.
    mean : (…) array, optional
        Instead of the mean of the members.
    """
    values, f = np.asarray(members, dtype=np.float64), np.asarray(factor, dtype=np.float64)
    center = ensemble_mean_std(values)[0] if mean is None else mean
    return np.asarray(center[..., None] + (values - center[..., None]) * f[..., None])


def calibration_factors(std: Float64Array, ensemble_std: Float64Array) -> Float64Array:
    """Return σ/ŝ (…); one where ŝ is zero, so that members that agree are not changed."""
    return np.divide(std, ensemble_std, out=np.ones_like(ensemble_std), where=ensemble_std > 0)


def group_scatter(terms: Float64Array, codes: IntArray) -> Float64Array:
    """Return the covariance (p, p) of the sum of all terms (n, p), correlated within groups.

    Groups are independent, so it is G/(G−1) Σ_g S_g S_gᵀ, S_g being the sum over group g of the
    terms less their mean. `codes` are 0 … G−1.
    """
    centered = terms - terms.mean(axis=0)
    n_groups = int(codes.max()) + 1
    S = np.stack([np.bincount(codes, column, minlength=n_groups) for column in centered.T], axis=1)
    return np.asarray(S.T @ S * n_groups / max(n_groups - 1, 1), dtype=np.float64)


class OutOfBagPrediction(NamedTuple):
    """Out-of-bag predictions of training points.

    `used` (N,) marks the points absent from enough members; the other arrays hold these only:
    `mean` and `std` (n_used, …), y_INT and σ_INT, and `n_absent` (n_used,), the number N_R(X) of
    members whose training sets lack the point.
    """

    used: BoolArray
    mean: Float64Array
    std: Float64Array
    n_absent: IntArray


def out_of_bag_prediction(members: FloatArray, absent: BoolArray) -> OutOfBagPrediction:
    """Average each point over its out-of-bag members. Eqs. (10) and (11), Musil et al. 2019.

    Points absent from fewer than three members are left out.

    Parameters
    ----------
    members : (N, N_R) or (N, T, N_R) array
        Predictions of the training points by all members.
    absent : (N, N_R) array of bool
        Whether the training set of the member lacks the point.
    """
    members = np.asarray(members, dtype=np.float64)
    absent = np.asarray(absent, dtype=bool)
    if absent.shape != (len(members), members.shape[-1]):
        raise InputError(
            f"`absent` has the shape {absent.shape} instead of that of points and members, "
            f"{(len(members), members.shape[-1])}.",
            parameter="absent",
        )
    n_absent = absent.sum(axis=1)
    used = n_absent >= MIN_ABSENT
    values, mask, c = members[used], absent[used], n_absent[used]
    if members.ndim == 3:
        mask, c = mask[:, None], c[:, None]
    mean = np.sum(np.where(mask, values, 0.0), axis=-1) / c
    deviations = np.where(mask, values - mean[..., None], 0.0)
    std = np.sqrt(np.sum(deviations**2, axis=-1) / (c - 1))
    return OutOfBagPrediction(used, mean, std, n_absent[used])


class Residuals(NamedTuple):
    """Residuals of points (n,) by the full model without them, and by their out-of-bag members."""

    full: Float64Array
    members: Float64Array  #: by the mean over the members
    std: Float64Array  #: ŝ over the members
    n_absent: IntArray  #: their number c
    groups: IntArray  #: points of the same group have correlated errors


def fit_centre(quantities: Iterable[Residuals], n_members: int) -> float:
    """Return the share λ in [0, 1] of the ensemble mean in the blend, less its standard error.

    The residual of (1 − λ)·(full model) + λ·(ensemble mean) is z = (1 − λ) z_f + λ z_m. For new
    points the mean is over N_R members rather than c, and the expectation of z_m² smaller by
    s²(1/c − 1/N_R): so Σ z² = Σ z_f² − 2λ Σ a + λ² Σ b with a = z_f(z_f − z_m) and
    b = (z_f − z_m)² − s²(1/c − 1/N_R), smallest at λ = Σa/Σb. The sums of several quantities are
    relative to Σ z_f². The standard error of this ratio is that of Σ(a − λb), of independent
    groups, over Σb. It is subtracted, since few points may suggest any share, and the full model is
    the better prediction where they do not tell; so it is where Σb ≤ 0, and λ is undetermined.
    """
    slopes, curvatures, groups = [np.empty(0)], [np.empty(0)], [np.empty(0, dtype=int)]
    for z_f, z_m, std, c, group in quantities:
        unit = float(z_f @ z_f)
        if unit > 0:
            difference = z_f - z_m
            slopes.append(z_f * difference / unit)
            curvatures.append((difference**2 - std**2 * (1 / c - 1 / n_members)) / unit)
            groups.append(group)
    a, b = np.concatenate(slopes), np.concatenate(curvatures)
    if b.sum() <= 0:
        return 0.0
    share = a.sum() / b.sum()
    codes = np.unique(np.concatenate(groups), return_inverse=True)[1]
    error = np.linalg.norm(np.bincount(codes, a - share * b)) / b.sum()
    return float(np.clip(share - error, 0.0, 1.0))


def resolve_centre(centre: str | float, quantities: Iterable[Residuals], n_members: int) -> float:
    """Return the share λ of the ensemble mean in the prediction: as set, or fitted if "auto".

    Parameters
    ----------
    centre : {"auto", "full", "members"} or float
        The share itself, or 0 for the full model and 1 for the ensemble mean.
    quantities, n_members
        As in `fit_centre`.
    """
    if centre == "auto":
        return fit_centre(quantities, n_members)
    return {"full": 0.0, "members": 1.0}[centre] if isinstance(centre, str) else float(centre)


def centred(
    members: Float64Array,
    full: Float64Array,
    centre: float | Float64Array,
    drawn: Float64Array,
) -> Float64Array:
    """Centre members on the prediction, and append posterior draws: (…, S + K).

    The prediction is w(λ) = (1 − λ)·full + λ·(mean of the members).

    Parameters
    ----------
    members : (…, S) array
    full : (…) array
        Of the full model.
    centre : float or array
        λ, which broadcasts with `full`.
    drawn : (…, K) array
        Deviations of posterior draws from the prediction.
    """
    n = members.shape[-1]
    mean = members.sum(axis=-1, keepdims=True) / max(n, 1)
    share = np.asarray(centre)[..., None]
    blend = (1 - share) * np.asarray(full)[..., None] + share * mean
    return np.concatenate([blend + (members - mean), blend + drawn], axis=-1)


# The full model and its members, in the units of y.


@dataclass(frozen=True)
class FullModel:
    """The projected process of all rows, for targets of zero mean and unit prior variance."""

    process: ProjectedProcess
    y: Float64Array  #: (N, T): targets of the kept rows divided by `scale`; zero if constant
    weight: Float64Array  #: (N,): the noise variance of a row is that of the target divided by it
    scale: Float64Array  #: (T,): square root of the prior variance
    noise: dict[str, float]  #: noise variance of each quantity, in its units squared

    @property
    def weights(self) -> Float64Array:
        """Weights of the whitened features, in the units of y: (r, T)."""
        return self.process.weights * self.scale

    @property
    def ratios(self) -> dict[str, float]:
        """Weights of rows of each quantity: the noise variance of the target over its own."""
        first = next(iter(self.noise.values()))
        return {name: first / variance for name, variance in self.noise.items()}


def fit_full_model(
    kept: KeptRows,
    sums: BlockSums,
    noise: Mapping[str, str | float],
    *,
    mean: Float64Array,
    replicate_variance: Float64Array | None = None,
) -> FullModel:
    """Scale the targets, select the noise variances and solve the full model.

    Parameters
    ----------
    kept : KeptRows
        Some rows, or all; for a kernel of unit mean diagonal.
    sums : BlockSums
        Over all rows.
    noise : mapping from quantity to {"loo", "auto"} or float
        Noise variance σ² in the units of y² (with several outputs: for their mean variance), if it
        is not selected. The first quantity is the target; the others are derivatives of it.
    mean : (T,) array
        Mean of the target, which was subtracted; zero if it is not a part of the model.
    replicate_variance : (T,) array, optional
        Variance of repeated observations whose averages are y, in the units of y². It is the noise
        variance if y is constant.
    """
    first, alone, T = next(iter(noise)), len(noise) == 1, len(mean)
    if alone:
        squares = np.sum([part.squares for part in sums.sums[first]], axis=0)
        variance = np.diag(squares)[:T] / squares[-1, -1]
        # What rounding leaves of a constant is no variance; its scale is only a scale of rounding.
        constant = variance <= (1e-14 * mean) ** 2
    else:
        variance, constant = _variance_of_derivatives(sums), np.zeros(T, bool)
    scale = np.where(constant, 1e-6 * np.where(mean == 0, 1.0, np.abs(mean)), variance**0.5)
    unit = float(np.mean(scale[constant == constant.all()] ** 2))
    columns = np.eye(len(sums.sums[first][0].squares), T) * np.where(constant, 0.0, 1 / scale)
    targets = np.where(constant, 0.0, kept.y / scale)
    fixed = {name: float(v) for name, v in noise.items() if not isinstance(v, str)}
    if len(fixed) == len(noise):
        variances = fixed
    elif not alone:
        variances = select_joint_noise(kept, sums, prior=unit, fixed=fixed)
    elif constant.all():
        # Only the scatter of replicates, if there is any, determines the noise.
        scatter = 0.0 if replicate_variance is None else replicate_variance / scale**2
        variances = {first: unit * max(float(np.mean(scatter)), 1.0)}
    else:
        selection = select_noise(
            kept.Phi,
            targets,
            noise_grid(float(kept.weight.mean())),  # σ²/w is the noise of an observation
            sample_weight=kept.weight,
            sums=sums.total(first).combined(columns),
            groups=kept.groups,
        )
        variances = {first: unit * selection.noise_variance}
    ratios = {name: variances[first] / variance for name, variance in variances.items()}
    weight = kept.weight.copy()
    for name, ratio in ratios.items():
        weight[kept.rows[name]] *= ratio
    parts = [sums.total(name) for name in ratios]
    total = weighted_sum(parts, [*ratios.values()]).combined(columns)

    def solve(factor: float) -> FullModel:
        raised = {name: factor * value for name, value in variances.items()}
        process = solve_projected_process(total, raised[first] / unit)
        return FullModel(process, targets, weight, scale, raised)

    return _with_raised_noise(solve, variances)


def _variance_of_derivatives(sums: BlockSums) -> Float64Array:
    """Return the prior variance (1,) that gives derivatives of the target theirs, as in Eq. (17).

    Musil et al. 2019. Most of the variance of the energies of one molecule is common to all.
    """
    parts = [part for name in [*sums.sums][1:] for part in sums.sums[name]]
    prior = sum(part.trace for part in parts)
    labels = sum(float(part.squares[0, 0]) for part in parts)
    return np.array([labels / prior if prior > 0 and labels else 1.0])


def predictive_weights(
    full: FullModel,
    members: Float64Array,
    centre: float | Float64Array,
    n_posterior: int,
    rng: np.random.Generator,
    pivots: IntArray,
) -> Float64Array:
    """Return members centred on the prediction, and posterior members, as weights: (r, T, S + K).

    Parameters
    ----------
    full : FullModel
    members : (r, T, S) array
        Weights of the subsampled members.
    centre : float or (T,) array
        λ.
    n_posterior : int
        K. The posteriors of several outputs are independent.
    rng, pivots
        As in `qualms.gp.sparse_gp.posterior_deviations`.
    """
    draws = [posterior_deviations(full.process, n_posterior, rng, pivots) for _ in full.scale]
    return centred(members, full.weights, centre, np.stack(draws, axis=1) * full.scale[:, None])


def fit_rows(
    Phi: FloatArray,
    y: Float64Array,
    noise: str | float,
    *,
    center: bool = True,
    groups: IntArray | None = None,
) -> tuple[FullModel, float]:
    """Fit the full model of rows that are all in one block; return it and the mean of the targets.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets.
    noise : "loo" or float
        Noise variance, or how it is selected.
    center : bool
        Whether the mean belongs to the model; it is zero otherwise.
    groups : (N,) array of int, optional
        Rows that are left out together.
    """
    n = len(y)
    mean = float(np.mean(y)) if center else 0.0
    draw = Draw(np.zeros(n, dtype=np.intp), np.empty((n, 0), dtype=np.intp), 1, None)
    groups = np.arange(n) if groups is None else groups
    exact = np.asarray(Phi, dtype=np.float64)
    columns = np.column_stack([y - mean, np.ones(n)])
    rows = KeptRows(exact, columns, {"y": np.arange(n)}, groups, draw, np.ones(n))
    sums = BlockSums({"y": [sum_rows(exact, columns)]})
    return fit_full_model(rows, sums, {"y": noise}, mean=np.array([mean])), mean


def fit_members(
    full: FullModel,
    sums: BlockSums,
    kept: KeptRows,
    columns: Float64Array,
    *,
    centered: bool = True,
) -> tuple[FullModel, Float64Array, Float64Array]:
    """Solve all members, from the sums over their training sets.

    Parameters
    ----------
    full : FullModel
        Fitted to the same sums.
    sums : BlockSums
    kept : KeptRows
        All rows, if members are drawn freely.
    columns : (c, T, N_R) array
        The targets of each member as combinations of the columns of the sums.
    centered : bool
        Whether the mean of the target over its training set belongs to a member.

    Returns
    -------
    FullModel
        With noise that is raised if members need that.
    weights : (r, T, N_R) array
        Of the whitened features, in the units of y.
    means : (T, N_R) array
        Of the targets over the training set of each member, less the mean over all rows.
    """
    c, T, n_members = columns.shape
    constant = ~np.any(full.y, axis=0)
    weights, means = np.empty((len(full.process.factor), T, n_members)), np.empty((T, n_members))

    def scaled(target: Float64Array) -> Float64Array:
        return np.where(constant, 0.0, target / full.scale)

    def solve(factor: float) -> FullModel:
        model = full
        if factor > 1:
            total = sums.weighted(np.ones(sums.n_blocks, dtype=np.intp), full.ratios)
            noise_variance = factor * full.process.noise_variance
            process = solve_projected_process(total.combined(scaled(np.eye(c, T))), noise_variance)
            noise = {name: factor * value for name, value in full.noise.items()}
            model = replace(full, process=process, noise=noise)
        for i in range(n_members):
            total = _member_sums(full, sums, kept, i)
            # The last column is one for rows of the target alone.
            means[:, i] = centered * (total.squares[-1] @ columns[:, :, i]) / total.squares[-1, -1]
            target = columns[:, :, i].copy()
            target[-1] -= means[:, i]
            total = total.combined(scaled(target))
            weights[:, :, i] = solve_projected_process(total, model.process.noise_variance).weights
        return model

    model = _with_raised_noise(solve, full.noise)
    return model, weights * full.scale[:, None], means


def _member_sums(full: FullModel, sums: BlockSums, kept: KeptRows, i: int) -> RowSums:
    """Return the sums over the training set of a member: of its blocks, or of its rows."""
    if kept.draw.of_blocks is not None:
        return sums.weighted(kept.draw.of_blocks[:, i], full.ratios)
    times = kept.draw.counts[:, i]
    rows = np.flatnonzero(times)
    return sum_rows(kept.Phi[rows], kept.columns[rows], full.weight[rows] * times[rows])


def _with_raised_noise(
    solve: Callable[[float], FullModel], noise: Mapping[str, float]
) -> FullModel:
    """Solve with noise variances times one, or times more if they are lost in rounding."""
    text = ", ".join(f"{name} {value:.1e}" for name, value in noise.items())
    problem = f"The Gram matrix is numerically singular with these noise variances: {text}"
    remedy = "Check for labels much larger than all others, or set larger noise variances."
    for factor in (10.0 ** np.arange(8)).tolist():
        try:
            result = solve(factor)
        except NumericalError:
            continue
        if factor > 1:
            warn(f"{problem}. All were multiplied by {factor:.0e}. {remedy}")
        return result
    raise NumericalError(f"{problem}, and with variances {factor:.0e} times as large. {remedy}")
