"""Gaussian processes: Eqs. (1) to (3), Musil et al. 2019.

y = f + ε with f ~ GP(0, K) and ε ~ N(0, σ²); per-sample weights w_n mean noise of variance σ²/w_n.
The algebra is that of Rasmussen & Williams (2006), chapters 2 and 5.

In the order of the module: whitening, which turns kernel rows into features Φ of a unit prior; the
projected process, solved from sums over rows; the parts of its variance; its
predictions of rows that are left out; draws from its posterior; factorisations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.linalg import lapack

from qualms.arrays import (
    Float64Array,
    FloatArray,
    IntArray,
    as_targets,
    check_number,
    check_sample_weight,
    whole_blocks,
)
from qualms.errors import InputError, NumericalError, counted, warn
from qualms.gp.sums import RowSums

_EPS = np.finfo(np.float64).eps


@dataclass(frozen=True)
class Whitening:
    """A basis in which the prior of the representatives is the unit matrix.

    Attributes
    ----------
    pivots : (r,) array of int
        The representatives that are kept, in order of novelty, to one percent. The others are, to
        rounding, combinations of these, so that nothing is lost with them.
    factor : (r, r) array
        Lower triangular L with K_MM[pivots, pivots] = L Lᵀ.
    n_dropped : int
        Number of the others.
    """

    pivots: IntArray
    factor: Float64Array
    n_dropped: int = 0

    @property
    def effective_rank(self) -> int:
        """Number r of representatives that are kept."""
        return len(self.pivots)

    def leading(self, n: int) -> Whitening:
        """Return the whitening by the first n pivots: its features are the first n of these."""
        return Whitening(self.pivots[:n], self.factor[:n, :n].copy(), self.n_dropped)

    def columns_of(self, groups: IntArray, owners: IntArray) -> dict[int, Float64Array]:
        """Return the columns of L⁻¹ (r, k) of the representatives of each group that has some.

        Representative m belongs to group owners[m]. If fewer than half of the representatives are
        independent, the rank of the kernel is that of its features, and others would take their
        places: then there are none.
        """
        if self.n_dropped > len(self.pivots):
            return {}
        chosen = np.flatnonzero(np.isin(owners, groups))
        unit = np.zeros((len(owners), len(chosen)))
        unit[chosen, np.arange(len(chosen))] = 1.0
        inverse = cholesky_whiten(self.factor, unit)
        return {int(g): inverse[:, owners[chosen] == g] for g in np.unique(owners[chosen])}

    def features(self, K_XM: FloatArray, *, overwrite: bool = False) -> FloatArray:
        """Return the whitened features Φ = K_XM L⁻ᵀ, so that Φ Φᵀ = K_XM K_MM⁻¹ K_MX.

        K_XM (n, r) is the kernel between the inputs and the kept representatives, in the order of
        `pivots`. Overwriting it, if it is C-contiguous float64, saves an array of its size.
        """
        if K_XM.shape[1] != self.effective_rank:
            raise InputError(
                f"`K_XM` has {counted(K_XM.shape[1], 'column')}; it needs one for each of "
                f"{counted(self.effective_rank, 'pivot')}.",
                parameter="K_XM",
            )
        solved: FloatArray = scipy.linalg.solve_triangular(
            self.factor, K_XM.T, lower=True, overwrite_b=overwrite, check_finite=False
        ).T
        return solved

    def kernel_weights(self, w: Float64Array) -> Float64Array:
        """Return the weights L⁻ᵀ w of the kept representatives, for w (r, …) of the features."""
        flat = w.reshape(len(w), -1)
        solved: Float64Array = scipy.linalg.solve_triangular(
            self.factor, flat, lower=True, trans="T", check_finite=False
        )
        return solved.reshape(w.shape)


def whiten(K_MM: FloatArray, *, rtol: float | None = None, scale: float | None = None) -> Whitening:
    """Factorise the kernel of the representatives, dropping those that are numerically null.

    Cholesky with complete pivoting: at each step the representative of largest prior variance,
    given those taken before, is next, until that variance falls below ``rtol`` times the largest
    diagonal. Of nearly equal ones, the first is taken: normalised kernels of environments of
    several elements are full of variances that are equal up to rounding, which would choose the
    order, and so the members that are drawn.

    Unlike jitter, pivoting does not change the representatives that are kept, and unlike an
    eigen-decomposition it identifies those that need not be stored, in a seventh of the time. A
    warning is issued if K_MM is not positive semi-definite beyond rounding.

    Parameters
    ----------
    K_MM : (M, M) array
        Symmetric; duplicate or null rows are allowed.
    rtol : float, optional
        M times the rounding unit of float64 by default. If the kernel rows that will be whitened
        are float32, take about 1e-6: rounding of these rows is amplified by ``rtol ** -0.5``.
    scale : float, optional
        Variance that rounding is relative to, instead of the largest diagonal: that before others
        were projected out.
    """
    K_MM = np.array(K_MM, dtype=np.float64, order="F")
    if K_MM.ndim != 2 or K_MM.shape[0] != K_MM.shape[1] or K_MM.size == 0:
        raise InputError(
            f"`K_MM` has the shape {K_MM.shape}; it must be a square matrix.", parameter="K_MM"
        )
    if not np.all(np.isfinite(K_MM)):
        raise InputError("`K_MM` has NaN or infinite values.", parameter="K_MM")
    diagonal = np.diag(K_MM).copy()
    largest = float(diagonal.max())
    if not largest > 0:
        raise NumericalError(
            "The kernel of the representatives vanishes: its largest diagonal element is "
            f"{largest:.3g}. Are all features zero?"
        )
    rtol = len(K_MM) * np.finfo(np.float64).eps if rtol is None else rtol
    largest = largest if scale is None else scale
    # The factor of D K D is D L: a decreasing D changes the order of the pivots, and the threshold
    # of those that are dropped by one percent, but not the kernel that L stands for.
    priority = np.sqrt(np.linspace(1.0, 0.99, len(K_MM)))
    K_MM *= priority[:, None]
    K_MM *= priority
    factor, pivots, rank, _ = lapack.dpstrf(K_MM, tol=rtol * largest, lower=1, overwrite_a=1)
    order = pivots.astype(np.intp) - 1
    factor /= priority[order, None]
    # Prior variance left in each dropped representative: the diagonal after the last step.
    left = diagonal[order[rank:]] - np.sum(factor[rank:, :rank] ** 2, axis=1)
    if left.min(initial=0.0) < -1e-5 * largest:  # beyond rounding
        warn(
            "The kernel is not positive semi-definite; negative directions were dropped. "
            "(The power kernel is positive semi-definite for integer exponents.)"
        )
    return Whitening(order[:rank], np.tril(factor[:rank, :rank]), len(order) - rank)


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


def solve_projected_process(sums: RowSums, noise_variance: float) -> ProjectedProcess:
    """Solve (ΦᵀΦ + σ²) w = Φᵀy, given sums whose columns are the outputs; σ² > 0.

    Eq. (3), Musil et al. 2019: with all points as representatives, Eqs. (1) and (2).
    """
    check_number("noise_variance", noise_variance, 0, strict=True)
    A = sums.gram.T  # a new symmetric array; in Fortran order LAPACK can overwrite it
    A[np.diag_indices_from(A)] += noise_variance
    factor = cholesky(A)
    weights = scipy.linalg.cho_solve((factor, True), sums.moment, check_finite=False)
    return ProjectedProcess(weights, factor, noise_variance)


def posterior_variance(
    Phi_X: FloatArray, factor: Float64Array, noise_variance: float
) -> Float64Array:
    """Return p² = σ² φA⁻¹φᵀ of Eq. (3), Musil et al. 2019: (n,).

    Parameters
    ----------
    Phi_X : (n, r) array
        Whitened features.
    factor : (r, r) array
        Lower Cholesky factor of A = ΦᵀΦ + σ².
    noise_variance : float
        σ².
    """
    V = cholesky_whiten(factor, Phi_X.T)
    return np.asarray(noise_variance * np.einsum("ij,ij->j", V, V))


def posterior_rows(Phi_X: FloatArray, factor: Float64Array, noise_variance: float) -> Float64Array:
    """Return rows B = σ Φ_X L_A⁻ᵀ (n, r), whose products BBᵀ are covariances of the posterior.

    Their squares are the p² of `posterior_variance`, which describes the parameters.
    """
    V = cholesky_whiten(factor, Phi_X.T)
    return np.asarray(np.sqrt(noise_variance) * V.T)


class Observations(NamedTuple):
    """Further observations of a posterior with rows B, whatever their values.

    Observations V (m, r) are rows of the posterior divided by the standard deviation of their
    noise. They change the covariances to

        B′B′ᵀ = BBᵀ − BVᵀ(VVᵀ + 1)⁻¹VBᵀ = B (1 + VᵀV)⁻¹ Bᵀ.
    """

    values: Float64Array  #: (m,): eigenvalues λ of VVᵀ
    along: Float64Array  #: (r, m): VᵀU, U the eigenvectors

    @classmethod
    def of(cls, V: FloatArray) -> Observations:
        """Return observations V (m, r)."""
        values, U = np.linalg.eigh(V @ V.T)
        return cls(np.maximum(values, 0.0), V.T @ U)

    def rows(self, B: FloatArray) -> Float64Array:
        """Return rows B′ (n, r) of the posterior afterwards.

        With VVᵀ = U diag(λ) Uᵀ the square root is (1 + VᵀV)^(−½) = 1 − VᵀU diag(g) UᵀV, where
        g = (1 − (1 + λ)^(−½))/λ.
        """
        root = np.sqrt(1 + self.values)
        g = 1 / (root * (1 + root))  # (1 − 1/√(1 + λ))/λ, without cancellation
        return np.asarray(B - ((B @ self.along) * g) @ self.along.T)

    def reduction(self, BVU: FloatArray, other: FloatArray | None = None) -> Float64Array:
        """Return by how much variances (n,), or covariances with others (n, k), become smaller.

        Given the products BVᵀU (n, m) of `along` with rows, and with those of the others (k, m).
        """
        if other is None:
            return np.asarray(BVU**2 @ (1 / (1 + self.values)))
        return np.asarray((BVU / (1 + self.values)) @ other.T)


def novelty_variance(Phi_X: FloatArray, k_xx: FloatArray) -> Float64Array:
    """Return q² = k_XX − φφᵀ of Eq. (3); zero where it is rounding alone: (n,)."""
    q2 = k_xx - np.einsum("ij,ij->i", Phi_X, Phi_X)
    return np.asarray(np.where(q2 > 1e-10 * k_xx, q2, 0.0))


def novelty_without_own(
    Phi: FloatArray,
    k_xx: FloatArray,
    whitening: Whitening,
    groups: IntArray,
    owners: IntArray,
    m: int,
) -> Float64Array:
    """Return q² of training points without the representatives of their own group: (n,).

    Without these φ is projected on what is orthogonal to the columns U of L⁻¹ that belong to them,
    and φφᵀ smaller by φU(UᵀU)⁻¹Uᵀφᵀ.

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
    leading, order = Phi[:, :m], np.argsort(groups, kind="stable")
    q2 = novelty_variance(leading, k_xx)
    for group, U in whitening.leading(m).columns_of(groups, owners[:m]).items():
        rows = order[slice(*np.searchsorted(groups[order], [group, group + 1]))]
        q2[rows] += np.sum((leading[rows] @ np.linalg.qr(U)[0]) ** 2, axis=1)
    return q2


class LeftOut(NamedTuple):
    """Predictions of training points by the model that lacks them."""

    residuals: Float64Array  #: (N, T): label minus prediction
    variance: Float64Array  #: (N,): posterior variance of the prediction, σ²φA⁻¹φᵀ
    same_basis: Float64Array  #: (N, T): residuals of the model that keeps all representatives


def leave_out(
    model: ProjectedProcess,
    Phi: FloatArray,
    y: FloatArray,
    *,
    sample_weight: FloatArray | None = None,
    groups: IntArray | None = None,
    group_columns: Mapping[int, Float64Array] = MappingProxyType({}),
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
    group_columns : mapping from group to (r, k) array, optional
        Columns U of L⁻¹ of the representatives that belong to a group: `Whitening.columns_of`.
    """
    # Rows times √w turn noise σ²/w_n into σ².
    root = np.sqrt(check_sample_weight(sample_weight, len(Phi)))[:, None]
    target = as_targets(y, len(Phi))
    residuals: Float64Array = (target - Phi @ model.weights) * root
    target = target * root
    same_basis, variance = np.empty_like(residuals), np.empty(len(Phi))
    groups = np.arange(len(Phi)) if groups is None else groups
    labels, codes = np.unique(groups, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    edges = np.flatnonzero(np.diff(codes[order], prepend=-1, append=len(codes)))
    for i, j in whole_blocks(edges):
        rows = order[edges[i] : edges[j]]
        V = cholesky_whiten(model.factor, (Phi[rows] * root[rows]).T)
        names = labels[i:j].tolist()
        columns = {name: group_columns[name] for name in names if name in group_columns}
        if len(rows) == len(names) and not columns:
            h = np.einsum("ij,ij->j", V, V)
            slack = np.maximum(1 - h, _EPS)
            same_basis[rows] = residuals[rows] = residuals[rows] / slack[:, None]
            variance[rows] = h / slack
            continue
        W = cholesky_whiten(model.factor, np.hstack([*columns.values()])) if columns else V
        first = 0
        for name, (begin, end) in zip(names, pairwise(edges[i : j + 1] - edges[i]), strict=True):
            out, V_g = rows[begin:end], V[:, begin:end]
            values, U = np.linalg.eigh(V_g.T @ V_g)
            values = np.clip(values, 0.0, 1 - _EPS)
            same_basis[out] = U @ ((U.T @ residuals[out]) / (1 - values)[:, None])
            if name in columns:
                weights = columns[name].T @ model.weights
                last = first + len(weights)
                residuals[out], variance[out] = _without_representatives(
                    V_g, target[out], residuals[out], W[:, first:last], weights
                )
                first = last
            else:
                residuals[out], variance[out] = same_basis[out], U**2 @ (values / (1 - values))
    variance = np.maximum(variance, 0.0) * model.noise_variance
    return LeftOut(residuals / root, variance / root[:, 0] ** 2, same_basis / root)


def _without_representatives(
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
    covariance (ddof = 1) stays the same.

    Parameters
    ----------
    model : ProjectedProcess
    n : int
    rng : numpy.random.Generator
    pivots : (r,) array of int
        Of the whitening. Random numbers belong to representatives, not to their places among the
        pivots, so that an order that rounding changes matters little.
    """
    xi = rng.standard_normal((int(pivots.max()) + 1, n))[pivots]
    xi -= xi.sum(axis=1, keepdims=True) / max(n, 1)
    deviations = scipy.linalg.solve_triangular(
        model.factor, xi, lower=True, trans="T", overwrite_b=True, check_finite=False
    )
    return np.asarray(deviations * model.noise_variance**0.5)


def cholesky(A: Float64Array) -> Float64Array:
    """Return the lower Cholesky factor of A = ΦᵀΦ + σ², or raise a `NumericalError`.

    A is overwritten if it is in Fortran order.
    """
    try:
        factor: Float64Array = scipy.linalg.cholesky(
            A, lower=True, overwrite_a=True, check_finite=False
        )
    except scipy.linalg.LinAlgError as error:
        raise NumericalError(
            f"ΦᵀΦ + σ² is not positive definite to rounding ({error}). "
            "Increase noise_variance, or scale the features."
        ) from error
    return factor


def cholesky_whiten(factor: Float64Array, B: FloatArray) -> Float64Array:
    """Solve L X = B for B (n, m), given the lower factor L of A: XᵀX = BᵀA⁻¹B, never negative."""
    solved: Float64Array = scipy.linalg.solve_triangular(factor, B, lower=True, check_finite=False)
    return solved
