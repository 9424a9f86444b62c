"""Gaussian processes, exact and projected: Eqs. (1) to (3), Musil et al. 2019.

y = f + ε with f ~ GP(0, K) and ε ~ N(0, σ²); per-sample weights w_n mean noise of variance σ²/w_n.
The algebra is that of Rasmussen & Williams (2006), chapters 2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from qualms.arrays import (
    Float64Array,
    FloatArray,
    IntArray,
    as_targets,
    check_noise_variance,
    check_sample_weight,
)
from qualms.errors import InputError
from qualms.gp.linalg import Whitening, cholesky, cholesky_solve, cholesky_whiten
from qualms.gp.sums import RowSums, sum_rows

#: Rows that are left out at once.
_BLOCK = 4096
_EPS = np.finfo(np.float64).eps
#: A difference of variances is rounding below this share of them.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process conditioned on N observations.

    `weights` (N, T) are x = (K_NN + σ²)⁻¹ y of Eq. (2), one column per output; `factor` (N, N) is
    the lower Cholesky factor of K_NN + σ².
    """

    weights: Float64Array
    factor: Float64Array
    noise_variance: float

    def mean(self, K_XN: FloatArray) -> Float64Array:
        """Return the prediction Σ_n x_n k(X_n, X), Eq. (2), for kernel rows (n, N): (n, T)."""
        return np.asarray(K_XN @ self.weights)

    def variance(self, K_XN: FloatArray, k_xx: FloatArray) -> Float64Array:
        """Return the variance (n,) of noisy observations, for prior variances k_xx (n,)."""
        V = cholesky_whiten(self.factor, K_XN.T)
        return np.asarray(np.maximum(k_xx - np.sum(V**2, axis=0), 0.0) + self.noise_variance)


def fit_gaussian_process(
    K_NN: FloatArray,
    y: FloatArray,
    noise_variance: float,
    *,
    sample_weight: FloatArray | None = None,
) -> GaussianProcess:
    """Condition a Gaussian process on observations. Eqs. (1) and (2), Musil et al. 2019.

    Parameters
    ----------
    K_NN : (N, N) array
        Prior covariance of the inputs, in the units of y².
    y : (N,) or (N, T) array
        Observations, of zero mean in the prior.
    noise_variance : float
        σ² > 0.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n.
    """
    check_noise_variance(noise_variance)
    if K_NN.ndim != 2 or K_NN.shape[0] != K_NN.shape[1] or not np.all(np.isfinite(K_NN)):
        raise InputError(
            f"`K_NN`, of shape {K_NN.shape}, must be a square matrix of finite values.",
            parameter="K_NN",
        )
    noise = noise_variance / check_sample_weight(sample_weight, len(K_NN))
    factor = cholesky(_add_diagonal(K_NN, noise), what="K_NN + σ²", overwrite=True)
    weights = cholesky_solve(factor, as_targets(y, len(K_NN)))
    return GaussianProcess(weights, factor, noise_variance)


@dataclass(frozen=True)
class ProjectedProcess:
    """A projected process conditioned on N observations, in whitened coordinates.

    `weights` (r, T) are A⁻¹Φᵀy, one column per output; `factor` (r, r) is the lower Cholesky factor
    of A = ΦᵀΦ + σ², rows weighted; σ² is in the units of y².
    """

    weights: Float64Array
    factor: Float64Array
    noise_variance: float

    def mean(self, Phi_X: FloatArray) -> Float64Array:
        """Return y_PP for features (n, r): (n, T). Eq. (3), Musil et al. 2019, corrected."""
        return np.asarray(Phi_X @ self.weights)

    def variance(self, Phi_X: FloatArray, k_xx: FloatArray) -> Float64Array:
        """Return σ²_PP (n,) for features (n, r) and prior variances k_xx (n,).

        Eq. (3), Musil et al. 2019: of a noisy observation, as printed.
        """
        p2 = posterior_variance(Phi_X, self.factor, self.noise_variance)
        return p2 + novelty_variance(Phi_X, k_xx) + self.noise_variance


def posterior_variance(
    Phi_X: FloatArray, factor: Float64Array, noise_variance: float
) -> Float64Array:
    """Return p² = σ² φA⁻¹φᵀ of Eq. (3), given the factor of A: (n,)."""
    V = cholesky_whiten(factor, Phi_X.T)
    return np.asarray(noise_variance * np.einsum("ij,ij->j", V, V))


def novelty_variance(Phi_X: FloatArray, k_xx: FloatArray) -> Float64Array:
    """Return q² = k_XX − φφᵀ of Eq. (3); zero where it is rounding alone: (n,)."""
    q2 = k_xx - np.einsum("ij,ij->i", Phi_X, Phi_X)
    return np.asarray(np.where(q2 > _ROUNDING * k_xx, q2, 0.0))


def novelty_without_own(
    Phi: FloatArray,
    k_xx: FloatArray,
    whitening: Whitening,
    groups: IntArray,
    owners: IntArray,
    m: int,
) -> Float64Array:
    """Return q² of training points without the representatives of their own group: (n,).

    Parameters
    ----------
    Phi : (n, r) array
    k_xx : (n,) array
        Prior variances.
    whitening : Whitening
    groups : (n,) array of int
        Group of each point.
    owners : (r,) array of int
        Group of each representative.
    m : int
        Number of leading representatives that novelty is measured with.
    """
    leading = Phi[:, :m]
    share = whitening.leading(m).own_share(leading, groups, owners[:m])
    return novelty_variance(leading, k_xx) + share


def fit_projected_process(
    Phi: FloatArray,
    y: FloatArray,
    noise_variance: float,
    *,
    sample_weight: FloatArray | None = None,
) -> ProjectedProcess:
    """Solve (ΦᵀΦ + σ²) w = Φᵀy: the full model.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features of the training inputs.
    y : (N,) or (N, T) array
        Observations, of zero mean in the prior.
    noise_variance : float
        σ² > 0.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n.
    """
    return solve_projected_process(sum_rows(Phi, y, sample_weight), noise_variance)


def solve_projected_process(sums: RowSums, noise_variance: float) -> ProjectedProcess:
    """Solve (ΦᵀΦ + σ²) w = Φᵀy, given sums whose columns are the outputs."""
    check_noise_variance(noise_variance)
    factor = cholesky(_add_diagonal(sums.gram, noise_variance), what="ΦᵀΦ + σ²", overwrite=True)
    return ProjectedProcess(cholesky_solve(factor, sums.moment), factor, noise_variance)


class LeftOut(NamedTuple):
    """Predictions of training points by the model that lacks them."""

    residuals: Float64Array  #: (N, T): label minus prediction
    variance: Float64Array  #: (N,): posterior variance of the prediction, σ²φA⁻¹φᵀ
    kept: Float64Array  #: (N, T): residuals of the model that keeps all representatives


def leave_out(
    model: ProjectedProcess,
    Phi: FloatArray,
    y: FloatArray,
    *,
    sample_weight: FloatArray | None = None,
    groups: IntArray | None = None,
    own: Mapping[int, Float64Array] | None = None,
) -> LeftOut:
    """Predict each row by the model that lacks it, or its group, in closed form.

    Removing rows g changes A by −Φ_gᵀΦ_g. With H = Φ_g A⁻¹ Φ_gᵀ < 1, by the Woodbury identity the
    residuals become (1 − H)⁻¹(y_g − ŷ_g), and the covariance of the predictions σ² H (1 − H)⁻¹. For
    a single row H is its leverage h, and the identity that of Sherman and Morrison.

    Representatives are kept, except those of the group itself if they are given: a new point is no
    representative. The kernel weight of a representative is uᵀw, u a column of L⁻¹, so that to
    remove it is to observe uᵀw = 0 without noise. With B = (Φ_gᵀ, U) and M = BᵀA⁻¹B,

        S = M − diag(1, 0),    ŷ′ = −[S⁻¹(Bᵀw − M_g y_g)]_g,    Cov = −σ² [S⁻¹M]_gg.

    Parameters
    ----------
    model : ProjectedProcess
        Fitted to these rows, and perhaps others.
    Phi : (N, r) array
        Whitened features of training points; groups are complete.
    y : (N,) or (N, T) array
    sample_weight : (N,) array, optional
    groups : (N,) array of int, optional
        Rows that are left out together; each alone, if not given.
    own : mapping from group to (r, k) array, optional
        Columns U of L⁻¹ of the representatives that belong to a group.
    """
    root = _root_weight(sample_weight, len(Phi))
    target = as_targets(y, len(Phi))
    residuals: Float64Array = np.asarray(target - Phi @ model.weights)
    if root is not None:  # rows times √w turn noise σ²/w_n into σ²
        target, residuals = target * root, residuals * root
    kept, variance = np.empty_like(residuals), np.empty(len(Phi))
    given = np.arange(len(Phi)) if groups is None else groups
    labels, codes = np.unique(given, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    edges = np.flatnonzero(np.diff(codes[order], prepend=-1, append=len(codes)))
    for some in _in_blocks(edges):
        rows = order[some[0] : some[-1]]
        A = Phi[rows] if root is None else Phi[rows] * root[rows]
        V = cholesky_whiten(model.factor, A.T)
        names = labels[codes[order[some[:-1]]]].tolist()
        columns = {name: own[name] for name in names if name in own} if own else {}
        if len(rows) == len(some) - 1 and not columns:
            h = np.einsum("ij,ij->j", V, V)
            slack = np.maximum(1 - h, _EPS)
            kept[rows] = residuals[rows] = residuals[rows] / slack[:, None]
            variance[rows] = h / slack
            continue
        W = (
            cholesky_whiten(model.factor, np.concatenate([*columns.values()], axis=1))
            if columns
            else V
        )
        first = 0
        for name, (begin, end) in zip(names, pairwise((some - some[0]).tolist()), strict=True):
            out, V_g = rows[begin:end], V[:, begin:end]
            values, U = np.linalg.eigh(V_g.T @ V_g)
            values = np.clip(values, 0.0, 1 - _EPS)
            kept[out] = U @ ((U.T @ residuals[out]) / (1 - values)[:, None])
            if name in columns:
                weights = columns[name].T @ model.weights
                last = first + len(weights)
                residuals[out], variance[out] = _without_own(
                    V_g, target[out], residuals[out], W[:, first:last], weights
                )
                first = last
            else:
                residuals[out], variance[out] = kept[out], U**2 @ (values / (1 - values))
    variance = np.maximum(variance, 0.0) * model.noise_variance
    if root is None:
        return LeftOut(residuals, variance, kept)
    return LeftOut(residuals / root, variance / root[:, 0] ** 2, kept / root)


def _without_own(
    V: Float64Array,
    y: Float64Array,
    residuals: Float64Array,
    W: Float64Array,
    weights: Float64Array,
) -> tuple[Float64Array, Float64Array]:
    """Return residuals (n, T) and variances (n,) of a group without its rows and representatives.

    V (r, n) and W (r, k) are its rows and the columns of its representatives, whitened; the kernel
    weights of the latter are (k, T). See `leave_out`.
    """
    n, T = y.shape
    B = np.concatenate([V, W], axis=1)
    M = B.T @ B
    S = M.copy()
    S[np.arange(n), np.arange(n)] -= 1.0
    predicted = np.concatenate([y - residuals, weights])
    solved = np.linalg.solve(S, np.concatenate([predicted - M[:, :n] @ y, M[:, :n]], axis=1))
    return y + solved[:n, :T], -np.diag(solved[:n, T:])


def posterior_deviations(
    model: ProjectedProcess, n: int, rng: np.random.Generator, pivots: IntArray
) -> Float64Array:
    """Draw deviations of the weights from their posterior N(w, σ²A⁻¹): (r, n), of zero mean.

    A = LLᵀ, so that σL⁻ᵀξ has this covariance. The n draws are centred; the expectation of their
    covariance (ddof = 1) stays the same. Random numbers belong to representatives, not to their
    places among the pivots (r,), so that an order that rounding changes matters little.
    """
    xi = rng.standard_normal((int(pivots.max()) + 1, n))[pivots]
    xi -= xi.sum(axis=1, keepdims=True) / max(n, 1)
    deviations = solve_triangular(
        model.factor, xi, lower=True, trans="T", overwrite_b=True, check_finite=False
    )
    return np.asarray(deviations * model.noise_variance**0.5)


def _in_blocks(edges: IntArray) -> Iterator[IntArray]:
    """Yield the edges of groups, whole ones, of about as many rows as are taken at once."""
    first = 0
    while first < len(edges) - 1:
        last = int(np.searchsorted(edges, edges[first] + _BLOCK, side="right")) - 1
        last = max(last, first + 1)
        yield edges[first : last + 1]
        first = last


def _root_weight(sample_weight: FloatArray | None, n: int) -> Float64Array | None:
    """Return √w (n, 1), or None where nothing is to be scaled and so nothing to be copied."""
    w = check_sample_weight(sample_weight, n)
    return None if np.all(w == 1) else np.sqrt(w)[:, None]


def _add_diagonal(A: FloatArray, value: float | Float64Array) -> Float64Array:
    """Return A + value·1, in Fortran order so that LAPACK can overwrite it."""
    shifted = np.array(A, dtype=np.float64, order="F")
    shifted[np.diag_indices_from(shifted)] += value
    return shifted
