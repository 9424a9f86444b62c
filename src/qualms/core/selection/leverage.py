"""CUR: picking rows by their leverage scores."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from scipy.linalg import blas, eigh, lapack
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from qualms.core.selection.arguments import (
    ROWS,
    as_float,
    check_counts,
    check_finite,
    check_kernel,
)
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError

_EIGH_SIZE = 300  # matrices up to this size are diagonalised densely


@dataclass(frozen=True)
class LeverageSelection:
    """Picks of CUR.

    Attributes
    ----------
    indices : IntArray of shape (n_selected,)
        The picked rows, in order. Fewer than asked for if the picks already span all rows.
    scores : Float64Array of shape (n_selected,)
        Leverage score of each pick, among what the picks before it do not span.
    """

    indices: IntArray
    scores: Float64Array


def cur(X: FloatArray, n: int, *, n_components: int | None = None) -> LeverageSelection:
    """Pick rows one by one by their leverage in what the picks so far do not span.

    The leverage of row i is ``π_i = Σ_k (u_i^(k))²`` over the leading left singular vectors. The
    row with the largest is picked, and what is left made orthogonal to it: either in the space of
    the n leading vectors, found once (Drmač & Gugercin, SIAM J. Sci. Comput. 38, A631 (2016)), or
    in all of X, whose leading vectors are then found anew for every pick (Imbalzano et al., J.
    Chem. Phys. 148, 241730 (2018)), which was measured to take some fifty times as long.

    Parameters
    ----------
    X : FloatArray of shape (n_points, n_features)
        Features. Solved in float64.
    n : int
        How many rows to pick.
    n_components : int, optional
        How many singular vectors to find anew for every pick; by default n are found, once.

    Returns
    -------
    LeverageSelection
        `n` picks, or fewer if the picks span all rows: singular values below
        ``sqrt(ε max(X.shape))`` of the largest of `X`, with ε that of float64, count as zero.
    """
    X = as_float(X, "X")
    check_counts("X", len(X), n, 0)
    check_finite(X, "X")
    if n_components is None:
        return _pivots(_left_vectors(X, n))
    if not 1 <= n_components <= min(X.shape):
        raise InputError("n_components", n_components, f"from 1 to min(X.shape) = {min(X.shape)}")
    if X.shape[0] < X.shape[1]:
        # X = L Qᵀ: leverages depend on scalar products of rows alone, and L has the same.
        X = np.transpose(np.linalg.qr(X.T.astype(np.float64), mode="r"))
    return _leverage_selection(X, n, n_components)


def cur_from_kernel(K: FloatArray, n: int, *, n_components: int | None = None) -> LeverageSelection:
    """CUR in the feature space of a kernel: as `cur` on any Φ with ``K = Φ Φᵀ``.

    Parameters
    ----------
    K : FloatArray of shape (n_points, n_points)
        Symmetric positive semi-definite kernel matrix.
    n : int
    n_components : int, optional
        As in `cur`.

    Returns
    -------
    LeverageSelection
        `n` picks, or fewer if the picks span the feature space of the points.
    """
    K = check_kernel(K)
    check_counts("K", len(K), n, 0)
    if n_components is not None and not 1 <= n_components <= len(K):
        raise InputError("n_components", n_components, f"from 1 to {len(K)}")
    leading = None if n_components is not None else (max(len(K) - n, 0), len(K) - 1)
    values, vectors = eigh(K.astype(np.float64), subset_by_index=leading, overwrite_a=True)
    kept = values > len(K) * float(np.finfo(K.dtype).eps) * max(values[-1], 0.0)
    if n_components is None:
        return _pivots(vectors[:, kept])
    return _leverage_selection(vectors[:, kept] * np.sqrt(values[kept]), n, n_components)


def _left_vectors(X: FloatArray, n: int) -> Float64Array:
    """Return at most n leading left singular vectors of X that do not belong to zero: (·, k)."""
    wide = X.shape[0] < X.shape[1]
    C = _gram(np.asarray(X.T)) if wide else _gram(X)
    first = max(len(C) - n, 0)
    values, vectors = eigh(C, subset_by_index=(first, len(C) - 1), overwrite_a=True)
    kept = values > np.finfo(np.float64).eps * max(X.shape) * max(values[-1], 0.0)
    if wide:
        return np.asarray(vectors[:, kept])
    return _products(X, vectors[:, kept] / np.sqrt(values[kept]))


def _pivots(U: Float64Array) -> LeverageSelection:
    """Pick as many rows as the orthonormal columns U (n_points, k) span.

    UUᵀ has the leverages on its diagonal, and a step of its Cholesky factorisation leaves there
    those in what the pivots so far do not span. So the pivots are the picks.
    """
    H = blas.dsyrk(1.0, U, lower=1) if U.size else np.zeros((len(U), len(U)))
    factor, pivots, _, _ = lapack.dpstrf(H, tol=0.0, lower=1, overwrite_a=1)
    picks = pivots[: U.shape[1]].astype(np.intp) - 1
    return LeverageSelection(picks, np.diag(factor)[: len(picks)] ** 2)


def _leverage_selection(X: FloatArray, n: int, n_components: int) -> LeverageSelection:
    """CUR on the residual R = X (1 − B Bᵀ), B an orthonormal basis of the picks, without forming R.

    Right singular vectors v of R are eigenvectors of ``C = Rᵀ R``, a D × D matrix. They are
    orthogonal to B, so that ``R v = X v`` and ``u = X v / sqrt(λ)``.
    """
    C, start = _gram(X), np.ones(X.shape[1])
    basis = np.empty((min(n, X.shape[1]), X.shape[1]))
    indices: list[int] = []
    scores: list[float] = []
    null = np.finfo(np.float64).eps * max(X.shape) * np.trace(C)
    while len(indices) < len(basis):
        B = basis[: len(indices)]
        values, vectors = _leading_eigenpairs(C, n_components, start)
        vectors = vectors[:, values > null]
        if not vectors.size:
            break
        vectors = np.linalg.qr(vectors - B.T @ (B @ vectors))[0]
        leverage = _products(X, vectors) ** 2 @ (1.0 / values[values > null])
        leverage[indices] = -np.inf
        # Equal rows need not get equal rounding; the first of the equals is the pick.
        row = int(np.flatnonzero(leverage >= (1.0 - 1e-10) * leverage.max())[0])
        indices.append(row)
        scores.append(float(leverage[row]))
        residual = X[row].astype(np.float64)
        for _ in range(2):  # twice is enough (Kahan): orthogonal to rounding
            residual -= B.T @ (B @ residual)
        direction = residual / np.linalg.norm(residual)
        basis[len(indices) - 1] = direction
        # C ← (1 − b bᵀ) C (1 − b bᵀ)
        Cb = C @ direction
        mixed = np.outer(direction, Cb - 0.5 * (direction @ Cb) * direction)
        C -= mixed + mixed.T
        start = vectors.sum(axis=1) - direction * (direction @ vectors.sum(axis=1))
    return LeverageSelection(np.array(indices, dtype=np.intp), np.array(scores))


def _leading_eigenpairs(
    C: Float64Array, count: int, start: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Largest `count` eigenvalues of symmetric C, largest first, and their vectors (D, count)."""
    size = len(C)
    values = vectors = None
    if size > _EIGH_SIZE and count < size // 10:
        # Eigenvalues may be too close for Lanczos. ARPACK's own start would be random.
        with suppress(ArpackNoConvergence):
            values, vectors = eigsh(C, k=count, which="LA", v0=start)
    if values is None or vectors is None:
        values, vectors = eigh(C, subset_by_index=(size - count, size - 1))
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


def _gram(X: FloatArray) -> Float64Array:
    """``Xᵀ X`` in float64."""
    C = np.zeros((X.shape[1], X.shape[1]))
    for begin in range(0, len(X), ROWS):
        block = X[begin : begin + ROWS].astype(np.float64)
        C += block.T @ block
    return C


def _products(X: FloatArray, vectors: Float64Array) -> Float64Array:
    """``X v`` in float64 for each of the vectors (D, k): an array (n_points, k)."""
    blocks = range(0, len(X), ROWS)
    return np.concatenate(
        [X[i : i + ROWS].astype(np.float64, copy=False) @ vectors for i in blocks]
    )
