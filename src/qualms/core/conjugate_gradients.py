"""Conjugate gradients for many ridge regressions that share one design matrix.

System q is (Φᵀ diag(c_q) Φ + σ²) x_q = b_q. Operators and right-hand sides differ, so these are
independent recurrences; what they share is the passes over Φ, which are all the cost. Iterates are
kept as the *rows* of (n_systems, ·) arrays, because BLAS runs the thin products WΦᵀ and ZΦ about
twice as fast as ΦWᵀ and ΦᵀZᵀ. Iterating on a float32 copy of Φ was measured to be no more than a
quarter faster, for half as much memory again, and is not done.

All products here go through SciPy's BLAS, like the triangular solves between them: the wheels of
NumPy and SciPy each bring their own pool of threads, and taking turns, each pool spins while the
other works, which was measured to cost half as much time again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import blas

from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray

# Steps after which the observed rate of convergence is trusted enough to give up because of it.
_STEPS_BEFORE_GIVING_UP = 16


#: Applies an approximate inverse to residuals (·, r) of the systems whose numbers are given.
Preconditioner = Callable[[Float64Array, IntArray], Float64Array]


@dataclass(frozen=True)
class ConjugateGradientsResult:
    """Solutions of all systems, and how well they are known.

    Attributes
    ----------
    solutions : (n_systems, r) array
    n_iterations : int
        Passes over Φ, whichever system needed the most.
    relative_error : float
        Estimated RMS prediction error over the spread between members (the worst output's).
    converged : bool
    """

    solutions: Float64Array
    n_iterations: int
    relative_error: float
    converged: bool


def block_size(Phi: FloatArray) -> int:
    """Rows of Φ to visit at a time: 64 MiB in float64; a float32 Φ is never widened whole."""
    return max(1, 2**23 // int(Phi.shape[1]))


def row_blocks(Phi: FloatArray) -> Iterator[tuple[slice, Float64Array]]:
    """Yield ``(rows, Phi[rows])`` in C-contiguous float64, a block at a time."""
    size = block_size(Phi)
    for start in range(0, len(Phi), size):
        rows = slice(start, min(start + size, len(Phi)))
        yield rows, np.ascontiguousarray(Phi[rows], dtype=np.float64)


def times(W: Float64Array, A: Float64Array, *, add_to: Float64Array | None = None) -> Float64Array:
    """Return WA for C-contiguous matrices, or add it to a third one in place."""
    # Fortran sees transposes of all of them: (WA)ᵀ = AᵀWᵀ.
    if add_to is None:
        product: Float64Array = blas.dgemm(1.0, A.T, W.T).T
    else:
        product = blas.dgemm(1.0, A.T, W.T, beta=1.0, c=add_to.T, overwrite_c=1).T
    return product


def times_transposed(W: Float64Array, A: Float64Array) -> Float64Array:
    """Return WAᵀ for C-contiguous matrices."""
    product: Float64Array = blas.dgemm(1.0, A.T, W.T, trans_a=1).T
    return product


def project(Phi: FloatArray, Z: Float64Array) -> Float64Array:
    """Return ZΦ (n_systems, r) for Z (n_systems, N)."""
    out = np.zeros((len(Z), Phi.shape[1]))
    for rows, block in row_blocks(Phi):
        out = times(np.ascontiguousarray(Z[:, rows]), block, add_to=out)
    return out


def predict(Phi: FloatArray, W: Float64Array) -> Float64Array:
    """Return WΦᵀ (n_systems, N) for W (n_systems, r)."""
    out = np.empty((len(W), len(Phi)))
    for rows, block in row_blocks(Phi):
        out[:, rows] = times_transposed(W, block)
    return out


def normal_product(
    Phi: FloatArray, C: Float64Array, noise_variance: float, W: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Apply every system's operator to its own row of W, in one pass over Φ.

    Parameters
    ----------
    Phi : (N, r) array
    C : (n_systems, N) array
        Weight of each row of Φ in each system.
    noise_variance : float
    W : (n_systems, r) array

    Returns
    -------
    predictions : (n_systems, N) array
        W Φᵀ, on all rows, whether the system sees them or not.
    product : (n_systems, r) array
        (C ∘ W Φᵀ) Φ + σ² W.
    """
    predictions = np.empty((len(W), len(Phi)))
    product = noise_variance * W
    for rows, block in row_blocks(Phi):
        F = times_transposed(W, block)
        predictions[:, rows] = F
        product = times(C[:, rows] * F, block, add_to=product)
    return predictions, product


def spread_between_members(F: Float64Array, n_outputs: int) -> Float64Array:
    """RMS over the rows of the sample standard deviation (ddof = 1) between members, per output.

    Parameters
    ----------
    F : (n_members * n_outputs, N) array
        Predictions, member by member.
    n_outputs : int

    Returns
    -------
    (n_outputs,) array
    """
    by_member = F.reshape(-1, n_outputs, F.shape[1])
    spread: Float64Array = np.sqrt(by_member.var(axis=0, ddof=1).mean(axis=-1))
    return spread


def _remaining_error(steps: Float64Array) -> Float64Array:
    """Estimate how far the iterates still have to go, from the lengths of the steps so far.

    The error after step k is the sum of the steps to come. Steps of preconditioned CG make acute
    angles with one another in the inner product of the preconditioner (Hestenes & Stiefel
    1952), which here is that of the predictions on all rows, up to σ². So their lengths
    nearly add, ‖e_k‖ ≲ Σ_{j>k} s_j, and if they shrink by ρ each the sum is s_k ρ/(1−ρ). Unlike the
    residual this does not hide what small eigenvalues hold back, and unlike the energy norm it
    includes the rows that a member does not see. Neither a lucky step nor a plateau must pass for
    convergence: ρ is the slowest mean rate between the last step and any but the one before it,
    and s_k the largest of the last three steps, shrunk by ρ to the present.

    Parameters
    ----------
    steps : (n_steps, n_systems) array
        RMS change of the predictions in each step.

    Returns
    -------
    (n_systems,) array
    """
    last = len(steps) - 1
    if last == 0:
        return np.full(steps.shape[1], np.inf)
    back = np.arange(last, min(2, last) - 1, -1)[:, None]
    before = steps[: len(back)]
    ratio = np.divide(steps[last], before, out=np.zeros_like(before), where=before > 0)
    rate = np.clip(np.max(ratio ** (1 / back), axis=0), 0.3, 0.98)
    recent = steps[-3:] * rate ** np.arange(min(2, last), -1, -1)[:, None]
    remaining: Float64Array = np.max(recent, axis=0) * rate / (1 - rate)
    return remaining


def _mean_rate(steps: Float64Array) -> Float64Array:
    """Return by how much the steps shrank on average since the first: (n_systems,).

    This, not the cautious rate of `_remaining_error`, says whether it is worth going on: steps
    stop shrinking for a while whenever CG finds another small eigenvalue, and go on thereafter.
    """
    ratio = _divide(steps[-1], steps[0])
    rate: Float64Array = np.clip(ratio ** (1 / (len(steps) - 1)), 0.3, 0.98)
    return rate


def _divide(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return a / b, and 0 where b vanishes: a system already solved exactly takes no step."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


class _Recurrence:
    """The conjugate-gradient recurrences of the systems that have not converged."""

    def __init__(
        self,
        Phi: FloatArray,
        C: Float64Array,
        noise_variance: float,
        rhs: Float64Array,
        precondition: Preconditioner,
    ) -> None:
        self._Phi, self._C, self._noise_variance = Phi, C, noise_variance
        self._precondition = precondition
        self.X, self.F = np.zeros_like(rhs), np.zeros_like(C)
        Z = precondition(rhs, np.arange(len(rhs)))
        rz = np.einsum("qr,qr->q", rhs, Z)
        # Systems of zero right-hand side are solved; what is not a number is not.
        self.active: IntArray = np.flatnonzero(rz != 0)
        self._R, self._P, self._rz = rhs[self.active], Z[self.active], rz[self.active]

    def advance(self) -> Float64Array:
        """Take one step, and return its length: the RMS change of the predictions."""
        FP, AP = normal_product(self._Phi, self._C[self.active], self._noise_variance, self._P)
        length = _divide(self._rz, np.einsum("qr,qr->q", self._P, AP))
        self.X[self.active] += length[:, None] * self._P
        self.F[self.active] += length[:, None] * FP
        self._R -= length[:, None] * AP
        moved: Float64Array = length * np.sqrt(np.einsum("qn,qn->q", FP, FP) / FP.shape[1])
        return moved

    def go_on_with(self, going: BoolArray) -> None:
        """Freeze the other systems, and find the next directions of these."""
        self.active, R, P = self.active[going], self._R[going], self._P[going]
        if self.active.size:
            Z = self._precondition(R, self.active)
            rz = np.einsum("qr,qr->q", R, Z)
            self._P = Z + _divide(rz, self._rz[going])[:, None] * P
            self._R, self._rz = R, rz


def conjugate_gradients(
    Phi: FloatArray,
    C: Float64Array,
    noise_variance: float,
    rhs: Float64Array,
    precondition: Preconditioner,
    *,
    n_outputs: int,
    smallest_scale: Float64Array,
    tolerance: float,
    max_iterations: int,
    may_give_up: bool = False,
) -> ConjugateGradientsResult:
    """Solve (Φᵀ diag(c_q) Φ + σ²) x_q = b_q for all q by preconditioned CG, starting from zero.

    The predictions of the iterates, and so the spread between members, come at no cost.

    Parameters
    ----------
    Phi : (N, r) array
    C : (n_systems, N) array
    noise_variance : float
    rhs : (n_systems, r) array
        Ordered member by member: ``q = member * n_outputs + output``.
    precondition : callable
        Called with residuals (·, r) and the numbers of their systems; applies a symmetric positive
        definite approximate inverse of each system.
    n_outputs : int
    smallest_scale : (n_outputs,) array
        Stands in for the spread between members where that vanishes.
    tolerance : float
        Accepted RMS prediction error, in units of the RMS spread between members.
    max_iterations : int
    may_give_up : bool
        Stop early if the observed rate says that ``max_iterations`` will not suffice.
    """
    recurrence = _Recurrence(Phi, C, noise_variance, rhs, precondition)
    steps, error = np.zeros((max_iterations, len(rhs))), np.zeros(len(rhs))
    scale, k = smallest_scale, 0
    while recurrence.active.size and k < max_iterations:
        active = recurrence.active
        steps[k, active] = recurrence.advance()
        k += 1
        error[active] = _remaining_error(steps[:k, active])
        scale = np.maximum(spread_between_members(recurrence.F, n_outputs), smallest_scale)
        excess = error[active] / (tolerance * scale[active % n_outputs])
        going = ~(excess <= 1)  # so that what is not a number goes on
        recurrence.go_on_with(going)
        if may_give_up and k >= _STEPS_BEFORE_GIVING_UP and going.any():
            missing = np.log(excess[going]) / -np.log(_mean_rate(steps[:k, active[going]]))
            if not k + np.max(missing) <= max_iterations:
                break
    rms = np.sqrt(np.mean(error.reshape(-1, n_outputs) ** 2, axis=0))
    return ConjugateGradientsResult(
        recurrence.X, k, float(np.max(rms / scale)), recurrence.active.size == 0
    )
