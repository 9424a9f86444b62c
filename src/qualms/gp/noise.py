"""Choosing noise variances by leave-one-out errors or by the marginal likelihood.

One quantity: one eigen-decomposition gives the whole curve. With ΦᵀΦ = V S Vᵀ and Z = ΦV, for every
σ² at once,

    ŷ = Z (S + σ²)⁻¹ Zᵀy,
    leverage h_n = Σ_k Z²_nk / (S_k + σ²),
    ln|ΦΦᵀ + σ²| = (N−r) ln σ² + Σ_k ln(S_k + σ²).

With thousands of columns that decomposition takes longer than all the rest. The best σ² is then
searched for, with one Cholesky factorisation for each value tried: leverages are h_n = |L⁻¹φ_n|²,
with L Lᵀ = ΦᵀΦ + σ².

Several quantities (energies, forces and virials) have a noise variance each. Their errors have
different units and sizes, so the criterion is the sum of the logarithms of typical errors of groups
that are left out, see `left_out_error`, which is minimised by a pattern search.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

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
from qualms.errors import InputError, NumericalError, QualmsWarning
from qualms.gp.linalg import cholesky, cholesky_solve, cholesky_whiten
from qualms.gp.sparse_gp import gram_matrix

#: Rows that are left out one by one, in one product.
_BLOCK = 1024
#: Columns of Φ from which on noise variances are searched rather than all compared.
_MANY_COLUMNS = 6_000
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class NoiseSelection:
    """A noise variance and the curve it was chosen from.

    Attributes
    ----------
    noise_variance : float
        The best σ², refined between grid points.
    grid : (G,) array
        Noise variances that were tried.
    scores : (G,) array
        What was minimised: mean absolute leave-one-out residual, or minus the log marginal
        likelihood.
    """

    noise_variance: float
    grid: Float64Array
    scores: Float64Array


@dataclass(frozen=True)
class Replicates:
    """Scatter of several observations of one input about their mean, over all inputs.

    Attributes
    ----------
    dof : int
        Number of different observations less that of inputs.
    sum_of_squares : (T,) array
        Weighted sum of squared deviations of each output, in the units of y².
    """

    dof: int
    sum_of_squares: Float64Array

    @property
    def variance(self) -> float:
        """Noise variance that the scatter alone suggests, averaged over outputs."""
        return float(np.mean(self.sum_of_squares)) / max(self.dof, 1)

    def negative_log_likelihood(self, noise_variance: Float64Array) -> Float64Array:
        """Return minus the log likelihood of the scatter, up to a constant, for each σ²: (G,)."""
        dof = self.dof * self.sum_of_squares.size
        total = float(np.sum(self.sum_of_squares))
        curve: Float64Array = 0.5 * (dof * np.log(noise_variance) + total / noise_variance)
        return curve


def noise_grid(variance: float, *, lowest: float = 1e-10, highest: float = 10.0) -> Float64Array:
    """Return noise variances from `lowest` to `highest` times Var[y], evenly in ln σ²."""
    return variance * np.geomspace(lowest, highest, 45)


def select_noise(
    Phi: FloatArray,
    y: FloatArray,
    grid: FloatArray,
    *,
    criterion: str = "loo",
    sample_weight: FloatArray | None = None,
    gram: Float64Array | None = None,
    replicates: Replicates | None = None,
    groups: IntArray | None = None,
    max_rows: int = 4096,
) -> NoiseSelection:
    """Choose σ² for a projected process.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features of the training inputs.
    y : (N,) or (N, T) array
        Observations. Outputs are pooled, so they should be on one scale.
    grid : (G,) array
        Noise variances to try, increasing, G ≥ 3.
    criterion : {"loo", "evidence"}
        Mean absolute leave-one-out residual, or log marginal likelihood. Absolute, not squared:
        a single molecule that nothing resembles would otherwise outweigh thousands of others.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n, and its residual counts w_n times.
    gram : (r, r) array, optional
        ΦᵀΦ with weighted rows, if it is known already.
    replicates : Replicates, optional
        Scatter of observations of the same input whose averages are y; part of the marginal
        likelihood. To leave-one-out errors it only adds a constant.
    groups : (N,) array of int, optional
        Rows that are left out together, such as atoms of one crystal.
    max_rows : int
        Leave-one-out residuals are averaged over at most so many rows, evenly spaced.
    """
    tried = np.asarray(grid, dtype=np.float64)
    if len(tried) < 3 or not np.all(np.isfinite(tried)) or np.any(np.diff(tried, prepend=0) <= 0):
        raise InputError("grid", tried, "at least 3 increasing noise variances > 0")
    if criterion not in ("loo", "evidence"):
        raise InputError("criterion", repr(criterion), '"loo" or "evidence"')
    Y = as_targets(y, len(Phi))
    root = np.sqrt(check_sample_weight(sample_weight, len(Phi)))[:, None]
    if gram is None:
        gram = gram_matrix(Phi, sample_weight)
    parts = _left_out(len(Y), groups, max_rows)
    together = groups is not None and len(np.unique(groups)) < len(Y)
    problem = _Problem(Phi, Y, root, gram, parts, together, replicates)
    if len(gram) > _MANY_COLUMNS:
        return _searched(problem, tried, criterion)
    S, V = scipy.linalg.eigh(gram, check_finite=False)
    curve = problem.loo_curve if criterion == "loo" else problem.evidence_curve
    scores = curve(np.maximum(S, 0.0), V, tried)
    return NoiseSelection(_refined_minimum(tried, scores), tried, scores)


@dataclass(frozen=True)
class _Problem:
    """Arguments of `select_noise`: √w (N, 1), and parts that are left out row by row or together.

    A score is computed for a grid of σ², from an eigen-decomposition, or for one σ², from the
    Cholesky factor of ΦᵀΦ + σ².
    """

    Phi: FloatArray
    Y: Float64Array
    root: Float64Array
    gram: Float64Array
    parts: list[IntArray]
    together: bool
    replicates: Replicates | None

    @property
    def moment(self) -> Float64Array:
        """Φᵀ diag(w) y: (r, T)."""
        return np.asarray(self.Phi.T @ (self.root**2 * self.Y))

    def loo_curve(self, S: Float64Array, V: Float64Array, grid: Float64Array) -> Float64Array:
        """Return the mean absolute leave-one-out residual for each σ²: (G,)."""
        shrink = 1 / (S[:, None] + grid)  # (r, G)
        projected = V.T @ self.moment
        residuals_of = _group_residuals if self.together else _row_residuals
        total, count = np.zeros(len(grid)), 0.0
        for part in self.parts:
            root = self.root[part]
            Z, Y = (self.Phi[part] * root) @ V, self.Y[part] * root
            residuals = residuals_of(Z, Y, shrink, projected)  # √w times the residual: (b, T, G)
            total += np.sum(root[:, :, None] * np.abs(residuals), axis=(0, 1))
            count += float(np.sum(root**2)) * Y.shape[1]
        return total / count

    def loo_at(self, L: Float64Array, noise: float) -> float:
        """Return the mean absolute leave-one-out residual for the σ² of a factor."""
        weights = cholesky_solve(L, self.moment)
        total, count = 0.0, 0.0
        for part in self.parts:
            root = self.root[part]
            rows, Y = self.Phi[part] * root, self.Y[part] * root
            half = cholesky_whiten(L, rows.T)
            missed = Y - rows @ weights
            if self.together:
                residuals = np.linalg.solve(np.eye(len(part)) * (1 + _EPS) - half.T @ half, missed)
            else:
                residuals = missed / np.maximum(1 - np.sum(half**2, axis=0), _EPS)[:, None]
            total += float(np.sum(root * np.abs(residuals)))
            count += float(np.sum(root**2)) * Y.shape[1]
        return total / count

    def evidence_curve(self, S: Float64Array, V: Float64Array, grid: Float64Array) -> Float64Array:
        """Return minus the log marginal likelihood for each σ², up to a constant: (G,)."""
        shifted = S[:, None] + grid
        explained = np.sum((V.T @ self.moment) ** 2, axis=1) @ (1 / shifted)
        return self._evidence(explained, np.sum(np.log(shifted), axis=0), grid)

    def evidence_at(self, L: Float64Array, noise: float) -> float:
        """Return minus the log marginal likelihood for a σ² and its factor, up to a constant."""
        explained = float(np.sum(cholesky_whiten(L, self.moment) ** 2))
        log_det = 2 * float(np.sum(np.log(np.diag(L))))
        return float(self._evidence(explained, log_det, np.array([noise]))[0])

    def _evidence(
        self, explained: Float64Array | float, log_det: Float64Array | float, grid: Float64Array
    ) -> Float64Array:
        """Combine bᵀA⁻¹b and ln|A|, with A = ΦᵀΦ + σ² and b = Φᵀy."""
        n, n_outputs = self.Y.shape
        quadratic = (float(np.sum((self.root * self.Y) ** 2)) - explained) / grid
        log_det = (n - len(self.gram)) * np.log(grid) + log_det
        curve: Float64Array = 0.5 * (np.maximum(quadratic, 0.0) + n_outputs * log_det)
        if self.replicates is not None:
            curve += self.replicates.negative_log_likelihood(grid)
        return curve


def _searched(problem: _Problem, grid: Float64Array, criterion: str) -> NoiseSelection:
    """Minimise the score by a golden-section search on the grid, one factorisation per value.

    `scipy.optimize.minimize_scalar` takes half as many factorisations again.
    """
    at = problem.loo_at if criterion == "loo" else problem.evidence_at
    found: dict[int, float] = {}

    def score(i: int) -> float:
        if i not in found:
            shifted = problem.gram.copy(order="F")
            shifted.flat[:: len(shifted) + 1] += grid[i]
            found[i] = at(cholesky(shifted, what="ΦᵀΦ + σ²", overwrite=True), grid[i])
        return found[i]

    low, high = 0, len(grid) - 1
    while high - low > 2:
        step = max(round(0.382 * (high - low)), 1)
        left, right = low + step, high - step
        if left >= right:
            left, right = low + 1, low + 2
        low, high = (low, right) if score(left) <= score(right) else (left, high)
    best = min(range(low, high + 1), key=score)
    for neighbour in (best - 1, best + 1):
        if 0 <= neighbour < len(grid):
            score(neighbour)
    tried = sorted(found)
    scores = np.array([found[i] for i in tried])
    return NoiseSelection(_refined_minimum(grid[tried], scores), grid[tried], scores)


def _left_out(n: int, groups: IntArray | None, max_rows: int) -> list[IntArray]:
    """Return sets of rows to leave out, evenly spaced: blocks of single rows, or whole groups."""
    if groups is None or len(np.unique(groups)) == n:
        rows = np.linspace(0, n - 1, min(n, max_rows)).astype(np.intp)
        return [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
    members = np.split(order, starts[1:])
    wanted = max(round(len(members) * min(max_rows / n, 1.0)), 2)
    return [members[i] for i in np.linspace(0, len(members) - 1, wanted).astype(np.intp)]


def _row_residuals(
    Z: Float64Array, Y: Float64Array, shrink: Float64Array, projected: Float64Array
) -> Float64Array:
    """Return (y − ŷ) / (1 − h) for rows that are left out one by one: (b, T, G)."""
    slack = np.maximum(1 - (Z**2) @ shrink, _EPS)
    fitted = np.stack([Z @ (column[:, None] * shrink) for column in projected.T], axis=1)
    residuals: Float64Array = (Y[:, :, None] - fitted) / slack[:, None, :]
    return residuals


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
class Observations:
    """Rows of all kinds.

    Attributes
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets.
    root : (N,) array
        √w: the noise of a row is that of its kind divided by its weight w.
    kinds : tuple of arrays of int
        Rows of each kind.
    groups : (N,) array of int
        Rows that are left out together.
    """

    Phi: FloatArray
    y: Float64Array
    root: Float64Array
    kinds: tuple[IntArray, ...]
    groups: IntArray

    def sums(self, kinds: tuple[IntArray, ...]) -> _Sums:
        """Sum over rows, times √w, in blocks: a copy of all of them might not fit beside Phi."""
        r = self.Phi.shape[1]
        grams = tuple(np.zeros((r, r)) for _ in kinds)
        projections = tuple(np.zeros(r) for _ in kinds)
        for gram, projection, rows in zip(grams, projections, kinds, strict=True):
            for some in _in_blocks(rows):
                block = self.Phi[some] * self.root[some, None]
                gram += block.T @ block
                projection += block.T @ (self.root[some] * self.y[some])
        return _Sums(grams, projections)

    def missed(self, rows: IntArray, w: Float64Array) -> Float64Array:
        """Return √weight |z| of some rows, by the weights w (r,) of a model without them."""
        found = [
            self.root[some] * np.abs(self.y[some] - self.Phi[some] @ w) for some in _in_blocks(rows)
        ]
        return np.concatenate([np.empty(0), *found])


def _in_blocks(rows: IntArray) -> list[IntArray]:
    """Divide rows into blocks."""
    return [rows[start : start + _SUM_BLOCK] for start in range(0, len(rows), _SUM_BLOCK)]


@dataclass(frozen=True)
class _Sums:
    """Sums over some rows for least squares, kind by kind: ΦᵀΦ (r, r) and Φᵀy (r,)."""

    grams: tuple[Float64Array, ...]
    projections: tuple[Float64Array, ...]

    def plus(self, other: _Sums, sign: float = 1.0) -> _Sums:
        """Return the sums over more rows, or over fewer."""
        grams = zip(self.grams, other.grams, strict=True)
        projections = zip(self.projections, other.projections, strict=True)
        return _Sums(
            tuple(a + sign * b for a, b in grams), tuple(a + sign * b for a, b in projections)
        )

    def solve(self, variances: Sequence[float], prior: float) -> tuple[Float64Array, float]:
        """Return the weights (r,) and ln|A|, for noise variances of all kinds."""
        A = np.asfortranarray(self.weighted(self.grams, variances))
        A[np.diag_indices_from(A)] += variances[0] / prior
        factor = cholesky(A, what="ΦᵀΦ + σ²", overwrite=True)
        w = cholesky_solve(factor, self.weighted(self.projections, variances))
        return w, 2 * float(np.sum(np.log(np.diag(factor))))

    @staticmethod
    def weighted(parts: Sequence[Float64Array], variances: Sequence[float]) -> Float64Array:
        """Return Σ_k ρ_k times the part of each kind."""
        total = parts[0].copy()
        for part, variance in zip(parts[1:], variances[1:], strict=True):
            total += variances[0] / variance * part
        return total


@dataclass(frozen=True)
class _Part:
    """Rows that are left out together, and the sums of all others."""

    rows: tuple[IntArray, ...]
    rest: _Sums


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
        _spread(fold, mixed[:, kind], settled, n_folds)
        settled = 2 * settled + mixed[:, kind]
    return fold[place]


def _spread(fold: IntArray, has: BoolArray, settled: IntArray, n_folds: int) -> None:
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


def _parts(observed: Observations) -> list[_Part]:
    """Divide the groups into five parts, of which large models take one only."""
    kinds = observed.kinds
    codes = np.unique(observed.groups, return_inverse=True)[1]
    n_groups = int(codes.max()) + 1
    n_folds = min(_FOLDS, n_groups)
    has = np.zeros((n_groups, len(kinds)), dtype=bool)
    for k, rows in enumerate(kinds):
        has[codes[rows], k] = True
    fold = _folds(has, n_folds)[codes]
    chosen = range(n_folds if observed.Phi.shape[1] <= _SMALL else 1)
    left_out = [tuple(rows[fold[rows] == k] for rows in kinds) for k in chosen]
    if len(left_out) == n_folds:
        of_parts = [observed.sums(rows) for rows in left_out]
        whole = reduce(_Sums.plus, of_parts)
        return [_Part(r, whole.plus(s, -1.0)) for r, s in zip(left_out, of_parts, strict=True)]
    rest = tuple(rows[fold[rows] != 0] for rows in kinds)
    return [_Part(left_out[0], observed.sums(rest))]


def left_out_error(observed: Observations, prior: float) -> Callable[..., float]:
    """Return the function of the variances of all kinds that is minimised.

    It is the sum over kinds of `typical_log` of the mean absolute errors of groups left out; a kind
    that fewer groups have counts less.
    """
    parts, groups = _parts(observed), observed.groups
    n_kinds = len(observed.kinds)
    left_out = [np.concatenate([part.rows[k] for part in parts]) for k in range(n_kinds)]
    counts = np.array([len(np.unique(groups[rows])) for rows in left_out])
    shares = counts / counts.max()

    def score(*variances: float) -> float:
        weights = [part.rest.solve(variances, prior)[0] for part in parts]
        total = 0.0
        for k, rows in enumerate(left_out):
            pairs = zip(parts, weights, strict=True)
            missed = [observed.missed(part.rows[k], w) for part, w in pairs]
            errors = group_means(np.concatenate(missed), groups[rows])
            total += float(shares[k]) * typical_log(errors)
        return total

    return score


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


def evidence(observed: Observations, prior: float) -> Callable[..., float]:
    """Return minus the log marginal likelihood, up to a constant; groups do not matter to it.

    With W the weights ρ_k of the rows, |s²ΦΦᵀ + σ_E²W⁻¹| = σ_E^2N |W|⁻¹ |A| (s²/σ_E²)^r, and
    yᵀ(s²ΦΦᵀ + σ_E²W⁻¹)⁻¹y = (yᵀWy − bᵀA⁻¹b)/σ_E², b = ΦᵀWy.
    """
    kinds, scaled = observed.kinds, observed.root * observed.y
    sums = observed.sums(kinds)
    squares = [np.array(np.sum(scaled[rows] ** 2)) for rows in kinds]
    n, r = observed.Phi.shape

    def score(*variances: float) -> float:
        energies = variances[0]
        w, log_det = sums.solve(variances, prior)
        b = sums.weighted(sums.projections, variances)
        quadratic = (float(sums.weighted(squares, variances)) - float(b @ w)) / energies
        log_det += (n - r) * math.log(energies) + r * math.log(prior)
        for rows, variance in zip(kinds[1:], variances[1:], strict=True):
            log_det -= len(rows) * math.log(energies / variance)
        return 0.5 * float(max(quadratic, 0.0) + log_det)

    return score


#: Decades that are tried, relative to the usual square of the targets: first guess and lower limit.
_START, _LOWEST = (-4.0, -3.0, -3.0), -12.0
#: Upper limits: relative to the mean square, and to the usual one for the marginal likelihood.
_HIGHEST, _HIGHEST_OF_EVIDENCE = 1.0, 0.5
#: Steps in decades of the search.
_STEPS = (1.0, 0.5, 0.25)
#: Least gain of a step for each decade: one per cent of the errors of one kind.
_GAIN = 0.01


@dataclass(frozen=True)
class JointNoise:
    """Noise variances of all kinds, and their score.

    Attributes
    ----------
    energies, forces : float
        σ_E² and σ_F², in the units of the targets squared.
    score : float
        What was minimised; 0 if there was nothing to choose.
    n_tried : int
        Sets of variances that were tried.
    virials : float, optional
        σ_V², likewise; None if there are no virials.
    """

    energies: float
    forces: float
    score: float
    n_tried: int
    virials: float | None = None

    @property
    def ratio(self) -> float:
        """ρ_F = σ_E²/σ_F²: the weight of a force, if that of an energy is one."""
        return self.energies / self.forces

    @property
    def virial_ratio(self) -> float:
        """ρ_V = σ_E²/σ_V²: that of a virial."""
        return self.ratio if self.virials is None else self.energies / self.virials

    def times(self, factor: float) -> JointNoise:
        """Return all variances times a factor, which leaves the ratios as they are."""
        virials = None if self.virials is None else factor * self.virials
        return replace(
            self, energies=factor * self.energies, forces=factor * self.forces, virials=virials
        )


def select_joint_noise(
    Phi: FloatArray,
    y: Float64Array,
    kind: IntArray | BoolArray,
    groups: IntArray,
    *,
    prior: float,
    weight: Float64Array | None = None,
    criterion: str = "loo",
    energies: float | None = None,
    forces: float | None = None,
    virials: float | None = None,
) -> JointNoise:
    """Choose σ_E², σ_F² and, if there are virials, σ_V².

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets, of zero mean in the prior.
    kind : (N,) array of int or bool
        Kind of each row: 0 for energies, 1 for forces, 2 for virials.
    groups : (N,) array of int
        Rows that are left out together.
    prior : float
        s², in the units of the energies squared.
    weight : (N,) array, optional
        Positive; the noise of a row is that of its kind divided by its weight.
    criterion : {"loo", "evidence"}
        Errors of groups left out, or the log marginal likelihood.
    energies, forces, virials : float, optional
        A variance that is known.
    """
    if criterion not in ("loo", "evidence"):
        raise InputError("criterion", repr(criterion), '"loo" or "evidence"')
    n_kinds = 3 if np.any(kind == 2) else 2
    given = (energies, forces, virials)[:n_kinds]
    kinds = tuple(np.flatnonzero(kind == k) for k in range(n_kinds))
    if all(value is not None for value in given):
        return _joint_noise([value or 0.0 for value in given], 0.0, 0)
    root = np.ones(len(y)) if weight is None else np.sqrt(weight)
    units = tuple(_usual_square(root[rows] * y[rows], groups[rows]) for rows in kinds)
    make_score = evidence if criterion == "evidence" else left_out_error
    score = make_score(Observations(Phi, y, root, kinds, groups), prior)
    fixed = [
        None if value is None else float(np.log10(value / unit))
        for value, unit in zip(given, units, strict=True)
    ]
    # No observations of this kind: keep the initial value.
    fixed = [_START[k] if not len(rows) else fixed[k] for k, rows in enumerate(kinds)]

    def of_decades(decades: Sequence[float]) -> float:
        try:
            return score(*(unit * 10**d for unit, d in zip(units, decades, strict=True)))
        except NumericalError:  # so little noise that it is lost in rounding
            return np.inf

    pairs = zip(kinds, units, strict=True)
    beyond = np.array([_decades_beyond(root[rows] * y[rows], unit) for rows, unit in pairs])
    by_evidence = criterion == "evidence"
    highest = np.full(n_kinds, _HIGHEST_OF_EVIDENCE) if by_evidence else _HIGHEST + beyond
    # Where the usual square and the mean square differ much, either may be the better guess.
    guess = np.array(_START[:n_kinds])
    starts = [np.minimum(guess + shift, highest) for shift in (0.0, beyond)]
    best, least, n_tried = _pattern_search(of_decades, starts, fixed, highest)
    found = [unit * 10**d for unit, d in zip(units, best, strict=True)]
    if by_evidence:
        _warn_of_edge(best, fixed)
    return _joint_noise(found, least, n_tried)


def _joint_noise(variances: Sequence[float], score: float, n_tried: int) -> JointNoise:
    energies, forces, *virials = variances
    return JointNoise(energies, forces, score, n_tried, virials[0] if virials else None)


def _decades_beyond(y: Float64Array, unit: float) -> float:
    """Return by how many decades the mean square is larger than the usual one, if it is."""
    return max(float(np.log10(np.mean(y**2) / unit)), 0.0) if np.any(y) else 0.0


def _warn_of_edge(decades: Sequence[float], fixed: Sequence[float | None]) -> None:
    """Warn about noise variances at the upper limit."""
    names = ("energies", "forces", "virials")
    pairs = zip(names, decades, fixed, strict=False)
    largest = [name for name, d, f in pairs if f is None and d >= _HIGHEST_OF_EVIDENCE]
    if largest:
        warnings.warn(
            f"The marginal likelihood is highest for a noise of {' and '.join(largest)} above "
            "their usual size, so that little is learned from them. Structures far from all "
            "others can cause this: check their labels, or choose the noise by 'loo'.",
            QualmsWarning,
            stacklevel=2,
        )


def _usual_square(y: Float64Array, groups: IntArray) -> float:
    """Return the median over groups of the mean square about the median of all.

    Robust against a few large values, also in the mean. Groups without any deviation, such as
    crystals whose forces are zero by symmetry, do not count.
    """
    squares = group_means((y - np.median(y)) ** 2, groups) if len(y) else y
    squares = squares[squares > 0]
    return float(np.median(squares)) if len(squares) else 1.0


def _pattern_search(
    score: Callable[[Sequence[float]], float],
    starts: Sequence[Float64Array],
    fixed: Sequence[float | None],
    highest: Float64Array,
) -> tuple[tuple[float, ...], float, int]:
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
    return best, known[best], len(known)
