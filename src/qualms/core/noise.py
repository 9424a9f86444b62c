"""Choosing the noise variance σ² by leave-one-out errors or by the marginal likelihood.

One eigen-decomposition gives the whole curve. With ΦᵀΦ = V S Vᵀ and Z = ΦV, for every σ² at once,

    ŷ = Z (S + σ²)⁻¹ Zᵀy,
    leverage h_n = Σ_k Z²_nk / (S_k + σ²),
    ln|ΦΦᵀ + σ²| = (N−r) ln σ² + Σ_k ln(S_k + σ²).

With thousands of columns that decomposition takes longer than all the rest. The best σ² is then
found by a golden-section search, with one Cholesky factorisation for each value that is tried:
leverages are h_n = |L⁻¹φ_n|², with L Lᵀ = ΦᵀΦ + σ².
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from qualms.core.checks import as_targets, check_sample_weight
from qualms.core.linalg import whiten
from qualms.core.projected_process import gram_matrix
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError

#: Rows of Φ that are rotated at once.
_BLOCK = 1024
#: Columns of Φ from which on noise variances are searched rather than all compared.
_MANY_COLUMNS = 6_000


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


@dataclass(frozen=True)
class _Rotated:
    """Rows in the eigenbasis: Z = √w Φ V (b, r), √w y (b, T), and √w (b, 1)."""

    Z: Float64Array
    Y: Float64Array
    root: Float64Array


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
        among thousands of molecules a single odd one, whose environments nothing else resembles,
        would else outweigh all others and make the noise many times too large.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n, and its residual counts w_n times.
    gram : (r, r) array, optional
        ΦᵀΦ with weighted rows, if it is known already.
    replicates : Replicates, optional
        What observations of the same input say about the noise, if y is their average; part of the
        marginal likelihood. Leave-one-out errors differ by a constant, whatever σ² is.
    groups : (N,) array of int, optional
        Rows that are left out together, such as atoms of one crystal: with a near-copy left
        behind, a noise that is too small would look best.
    max_rows : int
        Leave-one-out residuals are averaged over at most so many rows, evenly spaced. Each residual
        is exact whatever their number: it is only the average that is over fewer.

    Returns
    -------
    NoiseSelection
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
    whole = groups is not None and len(np.unique(groups)) < len(Y)
    problem = _Problem(Phi, Y, root, gram, parts, whole, replicates)
    curves = _searched if len(gram) > _MANY_COLUMNS else _decomposed
    chosen, scores = curves(problem, tried, criterion)
    return NoiseSelection(_refined_minimum(chosen, scores), chosen, scores)


@dataclass(frozen=True)
class _Problem:
    """What σ² is chosen for: see `select_noise`. `whole` says whether parts are left out whole."""

    Phi: FloatArray
    Y: Float64Array
    root: Float64Array
    gram: Float64Array
    parts: list[IntArray]
    whole: bool
    replicates: Replicates | None

    def scatter(self, grid: Float64Array) -> Float64Array | float:
        """Return what replicates add to the marginal likelihood."""
        return 0.0 if self.replicates is None else self.replicates.negative_log_likelihood(grid)


def _decomposed(
    problem: _Problem, grid: Float64Array, criterion: str
) -> tuple[Float64Array, Float64Array]:
    """Return grid and whole curve from one eigen-decomposition."""
    Phi, Y, root = problem.Phi, problem.Y, problem.root
    S, V = scipy.linalg.eigh(problem.gram, check_finite=False)
    S = np.maximum(S, 0.0)
    projected = V.T @ (Phi.T @ (root**2 * Y))
    if criterion == "evidence":
        return grid, _evidence_curve(S, projected, root * Y, grid) + problem.scatter(grid)
    rotated = _rotated_rows(Phi, Y, root, V, problem.parts)
    return grid, _loo_curve(rotated, S, projected, grid, whole=problem.whole)


def _searched(
    problem: _Problem, grid: Float64Array, criterion: str
) -> tuple[Float64Array, Float64Array]:
    """Return the values tried and their scores, by factorisations."""
    moment = problem.Phi.T @ (problem.root**2 * problem.Y)
    found: dict[int, float] = {}

    def score(i: int) -> float:
        if i not in found:
            L = _factor_at(problem, grid[i])
            if criterion == "loo":
                found[i] = _loo_at(problem, moment, L)
            else:
                found[i] = _evidence_at(problem, moment, L, grid[i])
        return found[i]

    _golden_section(score, len(grid))
    tried = sorted(found)
    return grid[tried], np.array([found[i] for i in tried])


def select_noise_from_kernel(
    K_NN: FloatArray,
    y: FloatArray,
    grid: FloatArray,
    *,
    criterion: str = "loo",
    sample_weight: FloatArray | None = None,
) -> NoiseSelection:
    """Choose σ² for exact Gaussian process regression: the projected process with M = N.

    Parameters are those of `select_noise`, with K_NN (N, N) in the place of Φ.
    """
    whitening = whiten(K_NN)
    Phi = whitening.features(K_NN[:, whitening.pivots])
    return select_noise(
        Phi, y, grid, criterion=criterion, sample_weight=sample_weight, max_rows=len(K_NN)
    )


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


def _rotated_rows(
    Phi: FloatArray,
    Y: Float64Array,
    root: Float64Array,
    V: Float64Array,
    parts: list[IntArray],
) -> Iterator[_Rotated]:
    """Yield blocks of Z = √w Φ V and of √w y, for parts that are left out row by row or whole."""
    for part in parts:
        yield _Rotated((Phi[part] * root[part]) @ V, Y[part] * root[part], root[part])


def _loo_curve(
    blocks: Iterator[_Rotated],
    S: Float64Array,
    projected: Float64Array,
    grid: Float64Array,
    *,
    whole: bool = False,
) -> Float64Array:
    """Return the mean absolute leave-one-out residual for each σ²: (G,)."""
    shrink = 1 / (S[:, None] + grid)  # (r, G)
    total, count = np.zeros(len(grid)), 0.0
    residuals_of = _group_residuals if whole else _row_residuals
    for block in blocks:
        residuals = residuals_of(block, shrink, projected)  # √w times the residual: (b, T, G)
        total += np.sum(block.root[:, :, None] * np.abs(residuals), axis=(0, 1))
        count += float(np.sum(block.root**2)) * block.Y.shape[1]
    return total / count


def _row_residuals(block: _Rotated, shrink: Float64Array, projected: Float64Array) -> Float64Array:
    """Return (y − ŷ) / (1 − h) for rows that are left out one by one: (b, T, G)."""
    slack = np.maximum(1 - (block.Z**2) @ shrink, np.finfo(np.float64).eps)
    fitted = np.stack(
        [block.Z @ (projected[:, t, None] * shrink) for t in range(block.Y.shape[1])], axis=1
    )
    residuals: Float64Array = (block.Y[:, :, None] - fitted) / slack[:, None, :]
    return residuals


def _group_residuals(
    block: _Rotated, shrink: Float64Array, projected: Float64Array
) -> Float64Array:
    """Return (1 − H)⁻¹ (y − ŷ) for rows that are left out together: (b, T, G)."""
    Z, Y = block.Z, block.Y
    b, G = len(Z), shrink.shape[1]
    # One product for all σ²: many small ones spend their time in waking threads.
    scaled = (shrink.T[:, None, :] * Z).reshape(G * b, -1)
    slack = np.eye(b) * (1 + np.finfo(np.float64).eps) - (scaled @ Z.T).reshape(G, b, b)
    missed = Y - (scaled @ projected).reshape(G, b, -1)
    return np.asarray(np.linalg.solve(slack, missed).transpose(1, 2, 0), dtype=np.float64)


def _golden_section(score: Callable[[int], float], n: int) -> int:
    """Return where a unimodal function of 0 … n−1 is smallest, and evaluate its neighbours, too."""
    low, high = 0, n - 1
    while high - low > 2:
        step = max(round(0.382 * (high - low)), 1)
        left, right = low + step, high - step
        if left >= right:
            left, right = low + 1, low + 2
        if score(left) <= score(right):
            high = right
        else:
            low = left
    best = min(range(low, high + 1), key=score)
    for neighbour in (best - 1, best + 1):
        if 0 <= neighbour < n:
            score(neighbour)
    return best


def _factor_at(problem: _Problem, noise: float) -> Float64Array:
    """Return the lower factor of ΦᵀΦ + σ²."""
    shifted = problem.gram.copy(order="F")
    shifted.flat[:: len(shifted) + 1] += noise
    L: Float64Array = scipy.linalg.cholesky(
        shifted, lower=True, overwrite_a=True, check_finite=False
    )
    return L


def _evidence_at(problem: _Problem, moment: Float64Array, L: Float64Array, noise: float) -> float:
    """Return minus the log marginal likelihood for a σ² and its factor, up to a constant."""
    n, n_outputs = problem.Y.shape
    half = scipy.linalg.solve_triangular(L, moment, lower=True, check_finite=False)
    total = float(np.sum((problem.root * problem.Y) ** 2))
    quadratic = max((total - float(np.sum(half**2))) / noise, 0.0)
    log_det = (n - len(L)) * np.log(noise) + 2 * float(np.sum(np.log(np.diag(L))))
    scatter = float(np.sum(problem.scatter(np.array([noise]))))
    return float(0.5 * (quadratic + n_outputs * log_det) + scatter)


def _loo_at(problem: _Problem, moment: Float64Array, L: Float64Array) -> float:
    """Return the mean absolute leave-one-out residual for the σ² of a factor."""
    weights = scipy.linalg.cho_solve((L, True), moment, check_finite=False)
    eps = np.finfo(np.float64).eps
    total, count = 0.0, 0.0
    for part in problem.parts:
        root = problem.root[part]
        rows, Y = problem.Phi[part] * root, problem.Y[part] * root
        half = scipy.linalg.solve_triangular(L, rows.T, lower=True, check_finite=False)
        missed = Y - rows @ weights
        if problem.whole:
            residuals = np.linalg.solve(np.eye(len(part)) * (1 + eps) - half.T @ half, missed)
        else:
            residuals = missed / np.maximum(1 - np.sum(half**2, axis=0), eps)[:, None]
        total += float(np.sum(root * np.abs(residuals)))
        count += float(np.sum(root**2)) * Y.shape[1]
    return total / count


def _evidence_curve(
    S: Float64Array, projected: Float64Array, Y: Float64Array, grid: Float64Array
) -> Float64Array:
    """Return minus the log marginal likelihood for each σ², up to a constant: (G,)."""
    n, n_outputs = Y.shape
    shifted = S[:, None] + grid
    explained = np.sum(projected**2, axis=1) @ (1 / shifted)
    quadratic = (float(np.sum(Y**2)) - explained) / grid
    log_det = (n - len(S)) * np.log(grid) + np.sum(np.log(shifted), axis=0)
    curve: Float64Array = 0.5 * (np.maximum(quadratic, 0.0) + n_outputs * log_det)
    return curve


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
