"""Choosing noise variances by leave-one-out errors.

One quantity: one eigen-decomposition gives the whole curve. With ΦᵀΦ = V S Vᵀ and Z = ΦV, for every
σ² at once,

    ŷ = Z (S + σ²)⁻¹ Zᵀy,
    leverage h_n = Σ_k Z²_nk / (S_k + σ²).

With thousands of columns that decomposition takes longer than all the rest. The best σ² is then
searched for, with one Cholesky factorisation for each value tried: leverages are h_n = |L⁻¹φ_n|²,
with L Lᵀ = ΦᵀΦ + σ².

Several quantities (energies, forces and virials) have a noise variance each. Their errors have
different units and sizes, so the criterion is the sum of the logarithms of typical errors of groups
that are left out, see `left_out_errors`, which is minimised by a pattern search. Two sets of
variances are compared group by group, and differences count as far as they exceed their standard
error: the errors of tens of energies are known to 20 or 30 per cent, those of their forces to a
few. Errors of the first quantity must not become larger than without the others: if they do, the
excess counts several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.optimize import brentq

from qualms.arrays import (
    BoolArray,
    Float64Array,
    FloatArray,
    IntArray,
    as_targets,
    check_sample_weight,
    row_blocks,
)
from qualms.errors import NumericalError
from qualms.gp.sparse_gp import cholesky, cholesky_whiten, solve_projected_process
from qualms.gp.sums import BlockSums, KeptRows, RowSums, sum_rows, weighted_sum

#: Smaller labels are rounding. Not relative to others: a few may be wrong by any factor.
SMALLEST_LABEL = 1e-12
#: Columns of Φ from which on noise variances are searched rather than all compared.
_MANY_COLUMNS = 6_000
#: Rows of several quantities that are left out, group by group.
_LEFT_OUT = 1500
_EPS = float(np.finfo(np.float64).eps)


class NoiseSelection(NamedTuple):
    """The best σ², refined between grid points, and the curve it was chosen from.

    `scores` (G,): the mean absolute leave-one-out residual of the noise variances that were tried.
    """

    noise_variance: float
    scores: Float64Array


def noise_grid(variance: float) -> Float64Array:
    """Return noise variances from 1e-10 to 10 times Var[y], evenly in ln σ²."""
    return variance * np.geomspace(1e-10, 10.0, 45)


def select_noise(
    Phi: FloatArray,
    y: FloatArray,
    grid: Float64Array,
    *,
    sample_weight: FloatArray | None = None,
    sums: RowSums | None = None,
    groups: IntArray | None = None,
) -> NoiseSelection:
    """Choose the σ² of a projected process that has the smallest mean absolute error.

    The errors are leave-one-out residuals, of some 4000 rows, evenly spaced. Absolute, not squared:
    a single molecule that nothing resembles would otherwise outweigh thousands of others.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features of the training inputs.
    y : (N,) or (N, T) array
        Observations. Outputs are pooled, so they should be on one scale.
    grid : (G,) array
        Noise variances to try, increasing, G ≥ 3.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n, and its residual counts w_n times.
    sums : RowSums, optional
        Sums over all rows and outputs, if Φ is a sample of them, or if they are known already.
    groups : (N,) array of int, optional
        Rows that are left out together, such as atoms of one crystal.
    """
    Y = as_targets(y, len(Phi))
    root = np.sqrt(check_sample_weight(sample_weight, len(Phi)))[:, None]
    sums = sum_rows(Phi, Y, sample_weight) if sums is None else sums
    gram, moment = sums.gram, sums.moment
    together = groups is not None and len(np.unique(groups)) < len(Y)
    parts = _left_out(len(Y), groups if together else None)
    residuals_of = _group_residuals if together else _row_residuals

    def loo(basis: _Basis) -> Float64Array:
        """Return the mean absolute leave-one-out residual for each σ²: (G,)."""
        projected, shrink = basis.transform(moment.T).T, 1 / basis.diagonal
        total, count = np.zeros(shrink.shape[1]), 0.0
        for part in parts:
            Z, targets = basis.transform(Phi[part] * root[part]), Y[part] * root[part]
            residuals = residuals_of(Z, targets, shrink, projected)  # √w times them: (b, T, G)
            total += np.sum(root[part][:, :, None] * np.abs(residuals), axis=(0, 1))
            count += float(np.sum(root[part] ** 2)) * Y.shape[1]
        return total / count

    if len(gram) > _MANY_COLUMNS:
        grid, scores = _search(gram, grid, loo)
    else:
        S, V = scipy.linalg.eigh(gram, check_finite=False)
        scores = loo(_Basis(lambda rows: rows @ V, np.maximum(S, 0.0)[:, None] + grid))
    return NoiseSelection(_refined_minimum(grid, scores), scores)


class _Basis(NamedTuple):
    """A basis in which A = ΦᵀΦ + σ² is diagonal for each of some σ² (G,).

    Its vectors are the eigenvectors of ΦᵀΦ, for all σ² at once, or the columns of L⁻ᵀ, in which
    A = L Lᵀ is one. `transform` maps rows (·, r), and `diagonal` is (r, G).
    """

    transform: Callable[[FloatArray], Float64Array]
    diagonal: Float64Array


def _search(
    gram: Float64Array, grid: Float64Array, score: Callable[[_Basis], Float64Array]
) -> tuple[Float64Array, Float64Array]:
    """Minimise the score by a golden-section search; return the values tried, and scores.

    There is one factorisation per value. `scipy.optimize.minimize_scalar` takes half as many again.
    """
    scores: dict[int, float] = {}

    def score_at(i: int) -> float:
        if i not in scores:
            shifted = gram.copy(order="F")
            shifted.flat[:: len(shifted) + 1] += grid[i]
            L = cholesky(shifted)
            basis = _Basis(lambda rows: cholesky_whiten(L, rows.T).T, np.ones((len(L), 1)))
            scores[i] = float(score(basis)[0])
        return scores[i]

    low, high = 0, len(grid) - 1
    while high - low > 2:
        step = max(round(0.382 * (high - low)), 1)
        left, right = low + step, high - step
        if left >= right:
            left, right = low + 1, low + 2
        low, high = (low, right) if score_at(left) <= score_at(right) else (left, high)
    best = min(range(low, high + 1), key=score_at)
    for neighbour in (best - 1, best + 1):
        if 0 <= neighbour < len(grid):
            score_at(neighbour)
    tried = sorted(scores)
    return grid[tried], np.array([scores[i] for i in tried])


def _left_out(n: int, groups: IntArray | None) -> list[IntArray]:
    """Return sets of rows to leave out, evenly spaced: blocks of single rows, or whole groups."""
    max_rows = 4096
    if groups is None:
        rows = np.linspace(0, n - 1, min(n, max_rows)).astype(np.intp)
        return [rows[block] for block in row_blocks(len(rows))]
    codes = np.unique(groups, return_inverse=True)[1]
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    n_sets = max(round(len(members) * min(max_rows / n, 1.0)), 2)
    return [members[i] for i in np.linspace(0, len(members) - 1, n_sets).astype(np.intp)]


def _row_residuals(
    Z: Float64Array, Y: Float64Array, shrink: Float64Array, projected: Float64Array
) -> Float64Array:
    """Return (y − ŷ) / (1 − h) for rows that are left out one by one: (b, T, G)."""
    slack = np.maximum(1 - (Z**2) @ shrink, _EPS)
    fitted = np.stack([Z @ (column[:, None] * shrink) for column in projected.T], axis=1)
    return np.asarray((Y[:, :, None] - fitted) / slack[:, None, :])


def _group_residuals(
    Z: Float64Array, Y: Float64Array, shrink: Float64Array, projected: Float64Array
) -> Float64Array:
    """Return (1 − H)⁻¹ (y − ŷ) for rows that are left out together: (b, T, G)."""
    b, G = len(Z), shrink.shape[1]
    # One product for all σ²: many small ones spend their time in starting threads.
    scaled = (shrink.T[:, None, :] * Z).reshape(G * b, -1)
    slack = np.eye(b) * (1 + _EPS) - (scaled @ Z.T).reshape(G, b, b)
    missed = Y - (scaled @ projected).reshape(G, b, -1)
    return np.asarray(np.linalg.solve(slack, missed).transpose(1, 2, 0), dtype=np.float64)


def _refined_minimum(grid: Float64Array, scores: Float64Array) -> float:
    """Return the minimum of the parabola, in ln σ², through the best point and its neighbours."""
    best = int(np.argmin(scores))
    if best in (0, len(grid) - 1):
        return float(grid[best])
    x = np.log(grid[best - 1 : best + 2])
    curvature, slope, _ = np.polyfit(x - x[1], scores[best - 1 : best + 2], 2)
    if not curvature > 0:
        return float(grid[best])
    step = np.clip(-slope / (2 * curvature), x[0] - x[1], x[2] - x[1])
    return float(np.exp(x[1] + step))


# Noise variances of several kinds of observations: energies, forces and virials.


def group_means(values: Float64Array, groups: IntArray) -> Float64Array:
    """Return the mean of some values (n,) in each group that has any."""
    codes = np.unique(groups, return_inverse=True)[1]
    means: Float64Array = np.bincount(codes, weights=values) / np.maximum(np.bincount(codes), 1)
    return means


#: Logarithms of the errors of groups (G,), of each quantity: see `log_errors`.
_Errors = list[Float64Array]


def left_out_errors(kept: KeptRows, sums: BlockSums, prior: float) -> Callable[..., _Errors]:
    """Return the function of the variances of all quantities whose values are to be small.

    They are `log_errors` of the mean absolute errors of groups left out, quantity by quantity; of
    one that fewer groups have, they are smaller in proportion. Quantities of infinite variance are
    not learned from.

    Without the rows g of a group, of weights W = σ²/σ_k², A = ΦᵀWΦ + σ² is smaller by Φ_gᵀWΦ_g, and
    by the Woodbury identity the residuals are (1 − GW)⁻¹(y_g − ŷ_g), with G = Φ_g A⁻¹ Φ_gᵀ. Random
    groups are left out: ten of each quantity, or more that have `_LEFT_OUT` rows together.

    Parameters
    ----------
    kept : KeptRows
        Rows that errors are computed of.
    sums : BlockSums
        Over all rows.
    prior : float
        s², in the units of the first quantity squared.
    """
    totals = [sums.total(name) for name in kept.rows]
    kinds = np.empty(len(kept.Phi), dtype=np.intp)
    codes = np.unique(kept.groups, return_inverse=True)[1]
    sizes, chosen = np.bincount(codes), np.zeros(int(codes.max()) + 1, dtype=bool)
    for k, rows in enumerate(kept.rows.values()):
        kinds[rows] = k
        of_rows = codes[rows]
        order = of_rows[np.sort(np.unique(of_rows, return_index=True)[1])]  # random, as blocks are
        enough = int(np.searchsorted(np.cumsum(sizes[order]), _LEFT_OUT)) + 1
        chosen[order[: max(enough, 10)]] = True
    some = np.flatnonzero(chosen[codes])
    some = some[np.argsort(codes[some], kind="stable")]
    edges = np.flatnonzero(np.diff(codes[some], prepend=-1, append=-1))
    Phi, y, kinds, codes = kept.Phi[some], kept.y[some, 0], kinds[some], codes[some]
    of_kinds = [np.flatnonzero(kinds == k) for k in range(len(totals))]
    counts = np.array([len(np.unique(codes[rows])) for rows in of_kinds])
    of_kinds = [rows[_above_rounding(y[rows], codes[rows])] for rows in of_kinds]

    def errors(*variances: float) -> _Errors:
        ratios = [variances[0] / variance for variance in variances]
        model = solve_projected_process(weighted_sum(totals, ratios), variances[0] / prior)
        V, root = cholesky_whiten(model.factor, Phi.T), np.sqrt(np.array(ratios)[kinds])
        z = y - Phi @ model.weights[:, 0]  # the first column is the target
        for a, b in pairwise(edges.tolist()):
            # (1 − GW) z′ = z by the symmetric matrix √W G √W, whose eigenvalues are below one.
            G, d = V[:, a:b].T @ V[:, a:b], root[a:b]
            values, U = np.linalg.eigh(d[:, None] * G * d)
            solved = U @ ((U.T @ (d * z[a:b])) / np.maximum(1 - values, _EPS))
            z[a:b] += G @ (d * solved)
        return [
            share * log_errors(group_means(np.abs(z[rows]), codes[rows]))
            for share, rows in zip(counts / counts.max(), of_kinds, strict=True)
        ]

    return errors


def excess_of(errors: Float64Array, others: Float64Array) -> float:
    """Return the mean difference of errors (G,) from others, less its standard error if larger."""
    if len(errors) < 2:
        return 0.0
    difference = errors - others
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(np.sign(mean) * max(abs(mean) - error, 0.0))


def _above_rounding(y: Float64Array, groups: IntArray) -> BoolArray:
    """Return which rows (n,) are of groups whose labels are not rounding; all, if all seem to be.

    Forces on crystals that are zero by symmetry say nothing of any noise.
    """
    codes = np.unique(groups, return_inverse=True)[1]
    above = group_means(np.abs(y), codes) > SMALLEST_LABEL
    return np.asarray(above[codes]) if above.any() else np.ones(len(y), dtype=bool)


def typical_log(errors: Float64Array) -> float:
    """Return min_s mean [2 ln(a + s) − ln s], for the errors a ≥ 0 of groups (G,); 0 of none."""
    return float(log_errors(errors).mean()) if len(errors) else 0.0


def log_errors(errors: Float64Array) -> Float64Array:
    """Return 2 ln(a + s) − ln s for the errors a ≥ 0 of groups, with s of the least mean: (G,).

    There the mean of a/(a + s) is one half. It falls with s, from one half or more at the smallest
    error to one half or less at the largest.
    """
    if not len(errors):
        return np.zeros(0)
    a = np.maximum(errors, np.finfo(np.float64).tiny)

    def excess(log_scale: float) -> float:
        return float(np.mean(1 / (1 + math.exp(log_scale) / a))) - 0.5

    low, high, same = math.log(a.min()), math.log(a.max()), 1e-9
    with np.errstate(over="ignore"):
        scale = low if high - low < same else brentq(excess, low - same, high + same)
    return np.asarray(2 * np.log(a + math.exp(scale)) - scale)


def select_joint_noise(
    kept: KeptRows,
    sums: BlockSums,
    *,
    prior: float,
    fixed: Mapping[str, float],
) -> dict[str, float]:
    """Select the noise variance of each quantity, in the units of its targets squared.

    The search is over decades relative to the usual square of the targets, from 10⁻⁴ of it for the
    first quantity and 10⁻³ for the others, up to ten times their mean square. If the others raise
    the error of the first by more than two per cent, the excess counts twenty times.

    Parameters
    ----------
    kept : KeptRows
        Of several quantities; the first is the one that others are derivatives of.
    sums : BlockSums
        Over all rows.
    prior : float
        s², in the units of the first quantity squared.
    fixed : mapping from quantity to float
        Variances that are not selected.
    """
    rows, y, groups = kept.rows, kept.y[:, 0], kept.groups
    kinds = tuple(rows.values())
    units = tuple(_usual_square(y[some], groups[some]) for some in kinds)
    errors_of = left_out_errors(kept, sums, prior)
    fixed_decades = [
        math.log10(fixed[name] / unit) if name in fixed else None
        for name, unit in zip(rows, units, strict=True)
    ]

    def errors_at(decades: Sequence[float]) -> _Errors | None:
        try:
            return errors_of(*(unit * 10**d for unit, d in zip(units, decades, strict=True)))
        except NumericalError:  # so little noise that it is lost in rounding
            return None

    def search(
        starts: Sequence[Float64Array], alone: Float64Array | None = None
    ) -> tuple[float, ...]:
        def excess(errors: _Errors | None, others: _Errors | None) -> float:
            if errors is None or others is None:
                return 0.0 if others is errors else np.inf if errors is None else -np.inf
            total = sum(map(excess_of, errors, others))
            if alone is not None:
                beyond = [max(excess_of(of[0], alone), 0.0) for of in (errors, others)]
                total += 20 * (beyond[0] - beyond[1])
            return total

        return _pattern_search(errors_at, excess, starts, fixed_decades, highest)

    # Decades by which the mean square is larger than the usual one, if it is.
    squares = [np.mean(y[some] ** 2) for some in kinds]
    beyond = np.log10(np.maximum(np.array(squares) / units, 1.0))
    highest = 1 + beyond
    # Where the usual square and the mean square differ much, either may be the better guess.
    guess = np.array([-4.0] + [-3.0] * (len(rows) - 1))
    starts = [np.minimum(guess + shift, highest) for shift in (0.0, beyond)]
    decades = search(starts)
    found = errors_at(decades)
    if fixed_decades[0] is None and found is not None:
        others = [np.inf] * (len(rows) - 1)
        energy, alone = decades[0], None
        for d in (0, -1, 1, -2, 2):  # far ones only if they are better
            errors = errors_at((decades[0] + d, *others))
            if errors and (alone is None or excess_of(errors[0], alone) < -0.01):
                energy, alone = decades[0] + d, errors[0]
        if alone is not None and excess_of(found[0], alone) > 0.02:
            # What is close to no forces at all is flat: from there only if nothing else is better.
            starts = [np.array(search([np.array(decades)], alone))]
            decades = search([*starts, np.array([energy, *highest[1:]])], alone)
    selected = {q: u * 10**d for q, u, d in zip(rows, units, decades, strict=True)}
    return {**selected, **fixed}


def _usual_square(y: Float64Array, groups: IntArray) -> float:
    """Return the median over groups of the mean square about the median of all.

    Robust against a few large values, also in the mean. Groups without any deviation but rounding
    do not count.
    """
    squares = group_means((y - np.median(y)) ** 2, groups)
    for least in (SMALLEST_LABEL**2, 0.0):
        if np.any(squares > least):
            return float(np.median(squares[squares > least]))
    return 1.0


def _pattern_search(
    errors_at: Callable[[Sequence[float]], _Errors | None],
    excess: Callable[[_Errors | None, _Errors | None], float],
    starts: Sequence[Float64Array],
    fixed: Sequence[float | None],
    highest: Float64Array,
) -> tuple[float, ...]:
    """Minimise on a grid of decades that becomes finer, from the best start; fixed ones stay.

    Not `scipy.optimize`: the errors are flat over decades, and steps that gain less than one per
    cent of the errors of one quantity for each decade must not be taken. With three variances the
    valley is long where all change alike, which changes the prior only: so that is a step, too.
    """
    first = [
        tuple(float(d) if f is None else f for d, f in zip(start, fixed, strict=True))
        for start in starts
    ]
    errors = {where: errors_at(where) for where in dict.fromkeys(first)}
    best, *others = errors
    for where in others:
        best = where if excess(errors[where], errors[best]) < 0 else best
    left = set()  # excesses do not add up, so that the way could lead back
    free = [i for i, value in enumerate(fixed) if value is None]
    moves = [np.eye(len(best))[i] for i in free]
    if len(free) > 2:
        moves.append(np.sum(moves, axis=0))
    for step in (1.0, 0.5, 0.25):
        moved = True
        while moved:
            moved = False
            for move, sign in product(moves, (-1, 1)):
                trial = np.where(move, np.clip(best + sign * step * move, -12.0, highest), best)
                where = tuple(trial.tolist())
                if where not in errors:
                    errors[where] = errors_at(where)
                if where not in left and excess(errors[where], errors[best]) < -0.01 * step:
                    left.add(best)
                    best, moved = where, True
    return best
