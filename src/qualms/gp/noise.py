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
that are left out, see `left_out_error`, which is minimised by a pattern search. Errors of the first
quantity must not become larger than without the others: if they do, the excess counts several
times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
)
from qualms.errors import InputError, NumericalError
from qualms.gp.linalg import cholesky, cholesky_solve, cholesky_whiten
from qualms.gp.sparse_gp import RowSums, sum_rows, weighted_sum

#: Rows that are left out one by one, in one product.
_BLOCK = 1024
#: Columns of Φ from which on noise variances are searched rather than all compared.
_MANY_COLUMNS = 6_000
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
    grid: FloatArray,
    *,
    sample_weight: FloatArray | None = None,
    sums: RowSums | None = None,
    groups: IntArray | None = None,
    max_rows: int = 4096,
) -> NoiseSelection:
    """Choose the σ² of a projected process that has the smallest mean absolute error.

    The errors are leave-one-out residuals. Absolute, not squared: a single molecule that nothing
    resembles would otherwise outweigh thousands of others.

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
    max_rows : int
        Leave-one-out residuals are averaged over at most so many rows, evenly spaced.
    """
    tried = np.asarray(grid, dtype=np.float64)
    if len(tried) < 3 or not np.all(np.isfinite(tried)) or np.any(np.diff(tried, prepend=0) <= 0):
        raise InputError(
            f"`grid` is {tried}; use at least 3 increasing noise variances > 0.", parameter="grid"
        )
    Y = as_targets(y, len(Phi))
    root = np.sqrt(check_sample_weight(sample_weight, len(Phi)))[:, None]
    sums = sum_rows(Phi, Y, sample_weight) if sums is None else sums
    gram, moment = sums.gram, sums.moment
    together = groups is not None and len(np.unique(groups)) < len(Y)
    parts = _left_out(len(Y), groups if together else None, max_rows)
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
        tried, scores = _search(gram, tried, loo)
    else:
        S, V = scipy.linalg.eigh(gram, check_finite=False)
        scores = loo(_Basis(lambda rows: rows @ V, np.maximum(S, 0.0)[:, None] + tried))
    return NoiseSelection(_refined_minimum(tried, scores), scores)


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
    """Minimise the score by a golden-section search on the grid; return what was tried.

    There is one factorisation per value. `scipy.optimize.minimize_scalar` takes half as many again.
    """
    found: dict[int, float] = {}

    def score_at(i: int) -> float:
        if i not in found:
            shifted = gram.copy(order="F")
            shifted.flat[:: len(shifted) + 1] += grid[i]
            L = cholesky(shifted, what="ΦᵀΦ + σ²", overwrite=True)
            basis = _Basis(lambda rows: cholesky_whiten(L, rows.T).T, np.ones((len(L), 1)))
            found[i] = float(score(basis)[0])
        return found[i]

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
    tried = sorted(found)
    return grid[tried], np.array([found[i] for i in tried])


def _left_out(n: int, groups: IntArray | None, max_rows: int) -> list[IntArray]:
    """Return sets of rows to leave out, evenly spaced: blocks of single rows, or whole groups."""
    if groups is None:
        rows = np.linspace(0, n - 1, min(n, max_rows)).astype(np.intp)
        return [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    codes = np.unique(groups, return_inverse=True)[1]
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    wanted = max(round(len(members) * min(max_rows / n, 1.0)), 2)
    return [members[i] for i in np.linspace(0, len(members) - 1, wanted).astype(np.intp)]


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
#: Share of the groups in a part that is left out, and features up to which all parts are.
_FOLDS, _SMALL = 5, 800
#: Logarithms of errors that differ by less are equal.
_SAME = 1e-9
#: Rows that are summed over at once.
_SUM_BLOCK = 4096


@dataclass(frozen=True)
class BlockSums:
    """Sums over the rows of blocks of the data, where only a sample of the rows is at hand.

    The first column of the sums is the target of the full model less its mean, `center`. The last
    is one; for derivatives of the target, which have no mean, it is zero.
    """

    sums: dict[str, list[RowSums]]  #: of each quantity, block by block
    block: IntArray  #: (N,): block of each row of the sample
    center: float  #: mean of the target over all rows; zero without centring

    def total(self, name: str, blocks: Sequence[int] | None = None) -> RowSums:
        """Return the sum over all blocks, or some of them, of a quantity."""
        found = self.sums[name]
        some = found if blocks is None else [found[b] for b in blocks]
        return weighted_sum(some, [1.0] * len(some))

    def leading(self, r: int) -> BlockSums:
        """Return the sums of the first r features."""
        return replace(self, sums={k: [s.leading(r) for s in v] for k, v in self.sums.items()})


@dataclass(frozen=True)
class Observations:
    """Rows of all kinds: whitened features (N, r) and targets (N,).

    `kinds` holds the rows of each kind; rows of one of the `groups` (N,) are left out together. If
    the rows are a sample, `blocks` has the sums over all.
    """

    Phi: FloatArray
    y: Float64Array
    kinds: tuple[IntArray, ...]
    groups: IntArray
    blocks: BlockSums | None = None

    def sums(self, kinds: Sequence[IntArray]) -> _Sums:
        """Sum over rows, in blocks: a copy of all of them might not fit beside Phi."""
        n_kinds, r = len(kinds), self.Phi.shape[1]
        sums = _Sums(np.zeros((n_kinds, r, r)), np.zeros((n_kinds, r)))
        for k, rows in enumerate(kinds):
            for some in _in_blocks(rows):
                block = self.Phi[some].astype(np.float64, copy=False)
                sums.grams[k] += block.T @ block
                sums.projections[k] += block.T @ self.y[some]
        return sums

    def missed(self, rows: IntArray, w: Float64Array) -> Float64Array:
        """Return |z| of some rows, by the weights w (r,) of a model without them."""
        errors = [np.abs(self.y[some] - self.Phi[some] @ w) for some in _in_blocks(rows)]
        return np.concatenate([np.empty(0), *errors])


def _in_blocks(rows: IntArray) -> list[IntArray]:
    """Divide rows into blocks."""
    return [rows[start : start + _SUM_BLOCK] for start in range(0, len(rows), _SUM_BLOCK)]


class _Sums(NamedTuple):
    """Sums over some rows for least squares, kind by kind: ΦᵀΦ (k, r, r) and Φᵀy (k, r)."""

    grams: Float64Array
    projections: Float64Array

    @classmethod
    def of(cls, sums: Sequence[RowSums]) -> _Sums:
        """Return the sums of each kind, whose first column is the target."""
        return cls(np.stack([s.gram for s in sums]), np.stack([s.moment[:, 0] for s in sums]))

    def solve(self, variances: Sequence[float], prior: float) -> Float64Array:
        """Return the weights (r,), with rows weighted by ρ_k = σ_E²/σ_k²."""
        ratios = variances[0] / np.array(variances)
        A = np.tensordot(ratios, self.grams, 1).T  # symmetric; LAPACK overwrites Fortran order
        A[np.diag_indices_from(A)] += variances[0] / prior
        factor = cholesky(A, what="ΦᵀΦ + σ²", overwrite=True)
        return cholesky_solve(factor, ratios @ self.projections)


def group_means(values: Float64Array, groups: IntArray) -> Float64Array:
    """Return the mean of some values (n,) in each group that has any."""
    codes = np.unique(groups, return_inverse=True)[1]
    means: Float64Array = np.bincount(codes, weights=values) / np.maximum(np.bincount(codes), 1)
    return means


def _folds(has: BoolArray, n_folds: int) -> IntArray:
    """Divide groups into folds of one size, with each kind in all of them as evenly as possible.

    Folds are drawn first. Then groups with and without the rarest kind are exchanged until that is
    spread evenly, then those with and without the next, alike in the kinds before, and so on.
    """
    # Groups in a mixed order: neighbours in a file are often alike.
    place = np.random.default_rng(0).permutation(len(has))
    mixed = has[np.argsort(place)]
    fold = np.arange(len(has)) % n_folds
    settled = np.zeros(len(has), dtype=np.intp)  # a number for each set of kinds
    for kind in np.argsort(has.sum(axis=0), kind="stable"):
        _distribute(fold, mixed[:, kind], settled, n_folds)
        settled = 2 * settled + mixed[:, kind]
    return fold[place]


def _distribute(fold: IntArray, has: BoolArray, settled: IntArray, n_folds: int) -> None:
    """Exchange groups that are alike in what is settled, until each fold has as many of a kind.

    Large models leave out the first fold alone: there must be some in it, and in the rest.
    """
    while True:
        counts = np.bincount(fold[has], minlength=n_folds)
        most, least = int(np.argmax(counts)), int(np.argmin(counts))
        if counts[most] - counts[least] <= 1 and (counts[0] or counts.sum() < 2):
            return
        given = np.flatnonzero(has & (fold == most))
        taken = np.flatnonzero(~has & (fold == least))
        _, i, j = np.intersect1d(settled[given], settled[taken], return_indices=True)
        if not len(i):
            return
        fold[given[i[0]]], fold[taken[j[0]]] = least, most


def n_left_out(n_blocks: int) -> int:
    """Return how many of the first blocks noise variances are tested on."""
    return max(round(n_blocks / _FOLDS), 1)


def _parts(observed: Observations) -> list[tuple[list[IntArray], _Sums]]:
    """Return the rows of each kind in each of five parts, and the sums over all other rows.

    Large models take one part only, and so do samples: the rows of some of the blocks.
    """
    kinds, blocks = observed.kinds, observed.blocks
    if blocks is not None:
        n_blocks = len(next(iter(blocks.sums.values())))
        n_out = n_left_out(n_blocks)
        others = [blocks.total(name, range(n_out, n_blocks)) for name in blocks.sums]
        return [([rows[blocks.block[rows] < n_out] for rows in kinds], _Sums.of(others))]
    codes = np.unique(observed.groups, return_inverse=True)[1]
    n_groups = int(codes.max()) + 1
    n_folds = min(_FOLDS, n_groups)
    has = np.zeros((n_groups, len(kinds)), dtype=bool)
    for k, rows in enumerate(kinds):
        has[codes[rows], k] = True
    fold = _folds(has, n_folds)[codes]
    if observed.Phi.shape[1] > _SMALL:
        rest = observed.sums([rows[fold[rows] != 0] for rows in kinds])
        return [([rows[fold[rows] == 0] for rows in kinds], rest)]
    left_out = [[rows[fold[rows] == k] for rows in kinds] for k in range(n_folds)]
    sums = [observed.sums(rows) for rows in left_out]
    grams, projections = (sum(some) for some in zip(*sums, strict=True))
    rests = [_Sums(grams - part.grams, projections - part.projections) for part in sums]
    return list(zip(left_out, rests, strict=True))


def left_out_error(observed: Observations, prior: float) -> Callable[..., Float64Array]:
    """Return the function of the variances of all kinds whose sum (k,) is minimised.

    It is `typical_log` of the mean absolute errors of groups left out, kind by kind; a kind that
    fewer groups have counts less. Kinds of infinite variance are not learned from.
    """
    parts, groups = _parts(observed), observed.groups
    left_out = [np.concatenate(rows) for rows in zip(*(rows for rows, _ in parts), strict=True)]
    counts = np.array([len(np.unique(groups[rows])) for rows in left_out])

    def errors(*variances: float) -> Float64Array:
        models = [(rows, rest.solve(variances, prior)) for rows, rest in parts]
        logs = np.empty(len(left_out))
        for k, rows in enumerate(left_out):
            missed = np.concatenate([observed.missed(some[k], w) for some, w in models])
            logs[k] = typical_log(group_means(missed, groups[rows]))
        return np.asarray(logs * (counts / counts.max()))

    return errors


def typical_log(errors: Float64Array) -> float:
    """Return min_s mean [2 ln(a + s) − ln s], for the errors a ≥ 0 of groups (G,); 0 of none.

    There the mean of a/(a + s) is one half. It falls with s, from one half or more at the smallest
    error to one half or less at the largest.
    """
    if not len(errors):
        return 0.0
    a = np.maximum(errors, np.finfo(np.float64).tiny)

    def excess(log_scale: float) -> float:
        return float(np.mean(1 / (1 + math.exp(log_scale) / a))) - 0.5

    low, high = math.log(a.min()), math.log(a.max())
    with np.errstate(over="ignore"):
        scale = low if high - low < _SAME else brentq(excess, low - _SAME, high + _SAME)
    return float(2 * np.mean(np.log(a + math.exp(scale))) - scale)


#: Decades relative to the usual square of the targets: first guess for the first quantity and for
#: the others, and lower limit.
_START, _START_OF_OTHERS, _LOWEST = -4.0, -3.0, -12.0
#: Upper limit, in decades relative to the mean square.
_HIGHEST = 1.0
#: Steps in decades of the search.
_STEPS = (1.0, 0.5, 0.25)
#: Decades about the noise of the first quantity at which it is learned alone, the loss of accuracy
#: (a logarithm) that the others may cause, and how often an excess counts.
_NEAR, _WORSE, _EXCESS = (-2.0, -1.0, 0.0, 1.0, 2.0), 0.02, 20.0
#: Least gain of a step for each decade: one per cent of the errors of one kind.
_GAIN = 0.01


def select_joint_noise(
    Phi: FloatArray,
    y: Float64Array,
    rows: Mapping[str, IntArray],
    groups: IntArray,
    *,
    prior: float,
    known: Mapping[str, float] | None = None,
    blocks: BlockSums | None = None,
) -> dict[str, float]:
    """Select the noise variance of each quantity, in the units of its targets squared.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets, of zero mean in the prior.
    rows : mapping from quantity to array of int
        Rows of each quantity; the first is the one that others are derivatives of.
    groups : (N,) array of int
        Rows that are left out together.
    prior : float
        s², in the units of the first quantity squared.
    known : mapping from quantity to float, optional
        Variances that are not selected.
    blocks : BlockSums, optional
        Sums over all rows, if those given are a sample.
    """
    known, kinds = known or {}, tuple(rows.values())
    units = tuple(_usual_square(y[some], groups[some]) for some in kinds)
    score = left_out_error(Observations(Phi, y, kinds, groups, blocks), prior)
    fixed = [
        math.log10(known[name] / unit) if name in known else None
        for name, unit in zip(rows, units, strict=True)
    ]

    def terms(decades: Sequence[float]) -> Float64Array:
        try:
            return score(*(unit * 10**d for unit, d in zip(units, decades, strict=True)))
        except NumericalError:  # so little noise that it is lost in rounding
            return np.full(len(units), np.inf)

    def search(limit: float = np.inf) -> tuple[float, ...]:
        def total(decades: Sequence[float]) -> float:
            found = terms(decades)
            return float(found.sum() + _EXCESS * max(found[0] - limit, 0.0))

        return _pattern_search(total, starts, fixed, highest)

    # Decades by which the mean square is larger than the usual one, if it is.
    squares = [np.mean(y[some] ** 2) for some in kinds]
    beyond = np.log10(np.maximum(np.array(squares) / units, 1.0))
    highest = _HIGHEST + beyond
    # Where the usual square and the mean square differ much, either may be the better guess.
    guess = np.array([_START] + [_START_OF_OTHERS] * (len(rows) - 1))
    starts = [np.minimum(guess + shift, highest) for shift in (0.0, beyond)]
    decades = search()
    if fixed[0] is None:
        others = [np.inf] * (len(rows) - 1)
        alone = {decades[0] + d: terms((decades[0] + d, *others))[0] for d in _NEAR}
        energy = min(alone, key=alone.__getitem__)
        if terms(decades)[0] > alone[energy] + _WORSE:
            starts = [np.array(decades), np.array([energy, *highest[1:]])]
            decades = search(alone[energy])
    selected = {q: u * 10**d for q, u, d in zip(rows, units, decades, strict=True)}
    return {**selected, **known}


def _usual_square(y: Float64Array, groups: IntArray) -> float:
    """Return the median over groups of the mean square about the median of all.

    Robust against a few large values, also in the mean. Groups without any deviation, such as
    crystals whose forces are zero by symmetry, do not count.
    """
    squares = group_means((y - np.median(y)) ** 2, groups)
    squares = squares[squares > 0]
    return float(np.median(squares)) if len(squares) else 1.0


def _pattern_search(
    score: Callable[[Sequence[float]], float],
    starts: Sequence[Float64Array],
    fixed: Sequence[float | None],
    highest: Float64Array,
) -> tuple[float, ...]:
    """Minimise on a grid of decades that becomes finer, from the best start; fixed ones stay.

    Not `scipy.optimize`: the score is flat over decades, and steps that gain too little (`_GAIN`)
    must not be taken. With three variances the valley is long where all change alike, which changes
    the prior only: so that is a step, too.
    """
    first = [
        tuple(float(d) if f is None else f for d, f in zip(start, fixed, strict=True))
        for start in starts
    ]
    known = {where: score(where) for where in dict.fromkeys(first)}
    best = min(known, key=known.__getitem__)
    free = [i for i, value in enumerate(fixed) if value is None]
    moves = [np.eye(len(best))[i] for i in free]
    if len(free) > 2:
        moves.append(np.sum(moves, axis=0))
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for move, sign in product(moves, (-1, 1)):
                trial = np.where(move, np.clip(best + sign * step * move, _LOWEST, highest), best)
                where = tuple(trial.tolist())
                if where not in known:
                    known[where] = score(where)
                if known[where] < known[best] - _GAIN * step:
                    best, moved = where, True
    return best
