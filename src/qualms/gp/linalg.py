"""Whitening, and Cholesky factorisations with informative errors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from scipy.linalg import lapack

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, NumericalError, QualmsWarning, counted

#: Prior variance that is negative beyond rounding, relative to the largest.
_NEGATIVE = 1e-5
#: Priority of the first of M representatives over the last, as a fraction of their variance.
_PRIORITY = 0.01


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

    def own_share(self, Phi: FloatArray, groups: IntArray, owners: IntArray) -> Float64Array:
        """Return what only the representatives of its group describe of each row (n, r): (n,).

        Without them φ is projected on what is orthogonal to the columns U of L⁻¹ that belong to
        them, and φφᵀ smaller by φU(UᵀU)⁻¹Uᵀφᵀ.
        """
        share, order = np.zeros(len(Phi)), np.argsort(groups, kind="stable")
        for group, U in self.columns_of(groups, owners).items():
            rows = order[slice(*np.searchsorted(groups[order], [group, group + 1]))]
            Q = np.linalg.qr(U)[0]
            share[rows] = np.sum((Phi[rows] @ Q) ** 2, axis=1)
        return share

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


def whiten(K_MM: FloatArray, *, rtol: float | None = None) -> Whitening:
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
    # The factor of D K D is D L: a decreasing D changes the order of the pivots, and the threshold
    # of those that are dropped by one percent, but not the kernel that L stands for.
    priority = np.sqrt(np.linspace(1.0, 1.0 - _PRIORITY, len(K_MM)))
    K_MM *= priority[:, None]
    K_MM *= priority
    factor, pivots, rank, _ = lapack.dpstrf(K_MM, tol=rtol * largest, lower=1, overwrite_a=1)
    order = pivots.astype(np.intp) - 1
    factor /= priority[order, None]
    # Prior variance left in each dropped representative: the diagonal after the last step.
    left = diagonal[order[rank:]] - np.sum(factor[rank:, :rank] ** 2, axis=1)
    if left.min(initial=0.0) < -_NEGATIVE * largest:
        warnings.warn(
            "The kernel is not positive semi-definite; negative directions were dropped. "
            "(The power kernel is positive semi-definite for integer exponents.)",
            QualmsWarning,
            stacklevel=2,
        )
    return Whitening(order[:rank], np.tril(factor[:rank, :rank]), len(order) - rank)


def cholesky(A: Float64Array, *, what: str, overwrite: bool = False) -> Float64Array:
    """Return the lower Cholesky factor of a symmetric A (n, n); `what` names it in the error."""
    try:
        factor: Float64Array = scipy.linalg.cholesky(
            A, lower=True, overwrite_a=overwrite, check_finite=False
        )
    except scipy.linalg.LinAlgError as error:
        raise NumericalError(
            f"{what} is not positive definite to rounding ({error}). "
            "Increase noise_variance, or scale the features."
        ) from error
    return factor


def cholesky_solve(factor: Float64Array, B: Float64Array) -> Float64Array:
    """Solve A X = B for B (n, …), given the lower Cholesky factor of A."""
    flat = B.reshape(len(B), -1)
    solved: Float64Array = scipy.linalg.cho_solve((factor, True), flat, check_finite=False)
    return solved.reshape(B.shape)


def cholesky_whiten(factor: Float64Array, B: FloatArray) -> Float64Array:
    """Solve L X = B for B (n, m), given the lower factor L of A: XᵀX = BᵀA⁻¹B, never negative."""
    solved: Float64Array = scipy.linalg.solve_triangular(factor, B, lower=True, check_finite=False)
    return solved
