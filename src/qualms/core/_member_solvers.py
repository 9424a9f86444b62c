"""The four ways to solve the members of a committee; `qualms.core.members` chooses among them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import blas, solve_triangular

from qualms.core.conjugate_gradients import (
    ConjugateGradientsResult,
    block_size,
    conjugate_gradients,
    predict,
    project,
    spread_between_members,
    times,
    times_transposed,
)
from qualms.core.linalg import cholesky, cholesky_solve, cholesky_whiten
from qualms.core.projected_process import ProjectedProcess
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import NumericalError


@dataclass(frozen=True)
class MemberProblem:
    """What is given: members on the first axis, rows of Φ on the last.

    Attributes
    ----------
    Phi : (N, r) array
    Y : (N_R, T, N) array
        Targets of each member; may be a broadcast view.
    C : (N_R, N) array
        Multiplicity times sample weight.
    sample_weight : (N,) array
    full : ProjectedProcess
        Of the same Phi and sample weights.
    is_subsample : bool
        Whether no row counts more than once.
    """

    Phi: FloatArray
    Y: Float64Array
    C: Float64Array
    sample_weight: Float64Array
    full: ProjectedProcess
    is_subsample: bool

    @property
    def n_outputs(self) -> int:
        """T."""
        return int(self.Y.shape[1])

    def systems(self) -> Float64Array:
        """Return C with one row per system: member by member, outputs within."""
        return np.repeat(self.C, self.n_outputs, axis=0)

    def as_weights(self, W: Float64Array) -> Float64Array:
        """Bring solutions of all systems (N_R·T, r) into the order (r, T, N_R)."""
        by_member = W.reshape(len(self.C), self.n_outputs, -1)
        return np.ascontiguousarray(by_member.transpose(2, 1, 0))

    def residuals(self, W: Float64Array, F: Float64Array) -> Float64Array:
        """Return Φᵀ diag(c)(y − Φw) − σ²w of all systems, given their predictions F = WΦᵀ."""
        missed = self.systems() * (self.Y.reshape(F.shape) - F)
        return project(self.Phi, missed) - self.full.noise_variance * W

    def effective_dimension(self) -> float:
        """Estimate d_eff = Tr[ΦᵀΦ (ΦᵀΦ + σ²)⁻¹] = r − σ²|L⁻¹|² of the full model.

        16 random signs s, E|L⁻¹s|² = |L⁻¹|², leave a standard error below √((r − d_eff)/8). Where
        σ² is nearly lost in rounding, so is L⁻¹: the estimate stays between 0 and r all the same.
        """
        rank = self.Phi.shape[1]
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(rank, 16))
        V = cholesky_whiten(self.full.factor, signs)
        return float(np.clip(rank - self.full.noise_variance * np.sum(V**2) / 16, 0.0, rank))

    def smallest_scale(self) -> Float64Array:
        """Return, per output, a spread between members too small to matter."""
        rms = np.sqrt(np.mean(self.Y**2, axis=(0, 2)))
        smallest: Float64Array = np.maximum(1e-8 * rms, np.finfo(np.float64).tiny)
        return smallest


def solve_direct(problem: MemberProblem, i: int) -> Float64Array:
    """Solve member i with its own Gram matrix: (r, T)."""
    rank = problem.Phi.shape[1]
    gram = np.zeros((rank, rank), order="F")
    _add_gram(gram, problem.Phi, problem.C[i])
    return _solve_gram(problem, i, gram)


def solve_dual(problem: MemberProblem, i: int) -> Float64Array:
    """Solve member i as w = Aᵀ(AAᵀ + σ²)⁻¹√c y, where A = diag(√c)Φ has its rows only: (r, T).

    If there are more of these than features, AAᵀ is singular, and all that would be gained is a
    larger system that depends on σ² more delicately: such a member is solved directly.
    """
    rows = np.flatnonzero(problem.C[i])
    if len(rows) > problem.Phi.shape[1]:
        return solve_direct(problem, i)
    root = np.sqrt(problem.C[i, rows])
    A = _scaled_rows(problem.Phi, rows, root)
    kernel = blas.dsyrk(1.0, A.T, trans=1, lower=1)
    kernel[np.diag_indices_from(kernel)] += problem.full.noise_variance
    factor = cholesky(kernel, what="ΦΦᵀ + σ² of a member", overwrite=True)
    dual = cholesky_solve(factor, (root * problem.Y[i][:, rows]).T)
    return times(np.ascontiguousarray(dual.T), A).T


def solve_complement(problem: MemberProblem) -> tuple[Float64Array, float]:
    """Remove from the full model, for each member, the rows that it lacks.

    Returns
    -------
    W : (N_R·T, r) array
    relative_error : float
        Estimated RMS prediction error over the spread between members; infinite if subtraction
        left nothing positive definite.
    """
    Phi, T, factor = problem.Phi, problem.n_outputs, problem.full.factor
    # The full model of each member's own targets: the one at hand need not have the same.
    all_rows = project(Phi, problem.sample_weight * problem.Y.reshape(-1, len(Phi)))
    W = cholesky_solve(factor, all_rows.T).T
    remove = _woodbury if (problem.C == 0).sum(axis=1).max() < Phi.shape[1] else _downdate
    try:
        for i in range(len(problem.C)):
            mine = slice(i * T, (i + 1) * T)
            W[mine] = remove(problem, i, W[mine].T).T
    except NumericalError:
        return W, math.inf
    # What subtraction lost to rounding shows in the residual ρ: ‖e‖²_A = ρ·A⁻¹ρ, and A⁻¹ is the
    # inverse of the full model but for the rows that are absent.
    F = predict(Phi, W)
    rho = problem.residuals(W, F)
    V = cholesky_whiten(factor, rho.T)
    energy = np.einsum("rq,rq->q", V, V) / problem.systems().sum(axis=1)
    error = np.sqrt(np.mean(energy.reshape(-1, T), axis=0))
    scale = np.maximum(spread_between_members(F, T), problem.smallest_scale())
    return W, float(np.max(error / scale))


def solve_by_cg(
    problem: MemberProblem, tolerance: float, max_iterations: int, *, may_give_up: bool
) -> ConjugateGradientsResult:
    """Solve all members at once by conjugate gradients, preconditioned by the full model.

    Starting from the full model's weights would save two or three iterations. But where a member
    lacks the only rows that determine some direction, CG does not move in that direction, and what
    it started from stays: labels that the member must not know. From zero, the preconditioner is
    all that it learns of the rows it lacks, and that holds no labels.

    Raises
    ------
    NumericalError
        If more rows have a leverage close to one than can be taken out of the preconditioner: CG
        might then stop, seemingly converged, before it has noticed a direction that only absent
        rows determine.
    """
    C = problem.systems()
    precondition = _Preconditioner(problem)
    return conjugate_gradients(
        problem.Phi,
        C,
        problem.full.noise_variance,
        project(problem.Phi, C * problem.Y.reshape(C.shape)),
        precondition,
        n_outputs=problem.n_outputs,
        smallest_scale=problem.smallest_scale(),
        tolerance=tolerance,
        max_iterations=max_iterations,
        may_give_up=may_give_up,
    )


class _Preconditioner:
    """Inverse of the full model without the rows of high leverage that a member lacks.

    Relative to the full model ΦᵀΦ + σ² = LLᵀ a sub-sample is 1 − VVᵀ, V = L⁻¹Aᵀ of the absent rows
    A. Its eigenvalues crowd around n/N but for those that a few rows pull towards zero: with all
    of |V|² = 1 in one direction nobody but that row knows of it. These are what makes CG slow, and
    below the tolerance what makes it stop too early. So the rows of highest leverage |L⁻¹φ|² are
    removed by the matrix inversion lemma, for each member those it lacks:

        (LLᵀ − AᵀA)⁻¹ = L⁻ᵀ (1 + V (1 − VᵀV)⁻¹ Vᵀ) L⁻¹.

    The rest of the full model stays as it is. (n/N)ΦᵀΦ + σ² in its place, which counts the noise
    once rather than N/n times, was measured to save no iterations where there are many, and would
    cost another factorisation.
    """

    def __init__(self, problem: MemberProblem) -> None:
        self._factor, self._n_outputs = problem.full.factor, problem.n_outputs
        self._cores: list[tuple[IntArray, Float64Array] | None] = [None] * len(problem.C)
        rows = _high_leverage_rows(problem)
        # V is kept transposed, like everything that thin products are taken with.
        self._V = _scaled_rows(problem.Phi, rows, np.sqrt(problem.sample_weight[rows]))
        if not rows.size:
            return
        self._V = self._solve_lower(self._V)
        overlap = times_transposed(self._V, self._V)
        for i, c in enumerate(problem.C[:, rows]):
            lacking = np.flatnonzero(c == 0)
            core = np.asfortranarray(np.eye(lacking.size) - overlap[np.ix_(lacking, lacking)])
            if lacking.size:
                # Where this is lost to rounding the member goes without: a preconditioner may be
                # worse, if only it is positive definite.
                with contextlib.suppress(NumericalError):
                    self._cores[i] = (lacking, cholesky(core, what="1 − VᵀV", overwrite=True))

    def __call__(self, R: Float64Array, systems: IntArray) -> Float64Array:
        """Apply it to the residuals (·, r) of some systems."""
        U = self._solve_lower(R.copy())
        if not self._V.size:
            return self._solve_lower(U, transposed=True)
        overlaps = times_transposed(U, self._V)
        B = np.zeros_like(overlaps)
        for row, system in enumerate(systems):
            core = self._cores[system // self._n_outputs]
            if core is not None:
                lacking, factor = core
                B[row, lacking] = cholesky_solve(factor, overlaps[row, lacking])
        return self._solve_lower(times(B, self._V, add_to=U), transposed=True)

    def _solve_lower(self, B: Float64Array, *, transposed: bool = False) -> Float64Array:
        """Return the rows L⁻¹b, or L⁻ᵀb, in the place of those of B; SciPy's own is slower."""
        solved: Float64Array = blas.dtrsm(
            1.0, self._factor, B.T, lower=1, trans_a=int(transposed), overwrite_b=1
        ).T
        return solved


def _high_leverage_rows(problem: MemberProblem) -> IntArray:
    """Return the rows of leverage s|L⁻¹φ|² above 0.3 or so, at most every tenth row.

    128 random signs s, E(φ·L⁻ᵀs)² = |L⁻¹φ|², tell the leverages to an eighth of their value. It is
    the few rows missed among the highest that hold CG up: on 20,000 molecules, with a noise at
    which 300 leverages are above 0.7, 32 signs and every twentieth row took 48 iterations, 128 and
    every twentieth 36, and 128 and every tenth 22.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(problem.Phi.shape[1], 128))
    probes: Float64Array = solve_triangular(
        problem.full.factor, signs, lower=True, trans="T", check_finite=False
    )
    F = predict(problem.Phi, np.ascontiguousarray(probes.T))
    leverage = problem.sample_weight * np.mean(F**2, axis=0)
    order = np.argsort(-leverage, kind="stable")
    highest, others = np.split(order, [max(1, len(leverage) // 10)])
    n_decisive = int(np.sum(leverage[others] > 0.7))
    if n_decisive:
        raise NumericalError(f"{n_decisive + highest.size} rows have a leverage close to one")
    return np.sort(highest[leverage[highest] > 0.3])


def _woodbury(problem: MemberProblem, i: int, start: Float64Array) -> Float64Array:
    """Leave rows out of the full model w by the matrix inversion lemma.

    With A = diag(√s)Φ of the absent rows, (ΦᵀΦ + σ²) = LLᵀ and V = L⁻¹Aᵀ,

        w_i = w − (LLᵀ)⁻¹Aᵀ (1 − A(LLᵀ)⁻¹Aᵀ)⁻¹ (√s y − A w) = w − L⁻ᵀV (1 − VᵀV)⁻¹ √s (y − Φw).
    """
    rows = np.flatnonzero(problem.C[i] == 0)
    if not rows.size:
        return start
    root = np.sqrt(problem.sample_weight[rows])
    A = _scaled_rows(problem.Phi, rows, root)
    missed = (root * problem.Y[i][:, rows]).T - A @ start
    V = solve_triangular(problem.full.factor, A.T, lower=True, overwrite_b=True, check_finite=False)
    core = blas.dsyrk(-1.0, V, trans=1, lower=1)
    core[np.diag_indices_from(core)] += 1.0
    change = V @ cholesky_solve(cholesky(core, what="1 − VᵀV", overwrite=True), missed)
    removed: Float64Array = solve_triangular(
        problem.full.factor, change, lower=True, trans="T", check_finite=False
    )
    return start - removed


def _downdate(problem: MemberProblem, i: int, start: Float64Array) -> Float64Array:
    """Subtract the Gram matrix of the absent rows from that of all rows."""
    gram = np.array(problem.full.gram.T, order="F")
    _add_gram(gram, problem.Phi, np.where(problem.C[i] == 0, problem.sample_weight, 0.0), sign=-1.0)
    return _solve_gram(problem, i, gram)


def _solve_gram(problem: MemberProblem, i: int, gram: Float64Array) -> Float64Array:
    """Solve member i given the lower triangle of its Gram matrix, which is overwritten."""
    gram[np.diag_indices_from(gram)] += problem.full.noise_variance
    factor = cholesky(gram, what="ΦᵀΦ + σ² of a member", overwrite=True)
    return cholesky_solve(factor, project(problem.Phi, problem.C[i] * problem.Y[i]).T)


def _add_gram(
    gram: Float64Array, Phi: FloatArray, weight: Float64Array, *, sign: float = 1.0
) -> None:
    """Add ±Φᵀ diag(weight) Φ to the lower triangle of a Fortran-ordered ``gram``, in place."""
    rows = np.flatnonzero(weight)
    size = block_size(Phi)
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        A = _scaled_rows(Phi, some, np.sqrt(weight[some]))
        blas.dsyrk(sign, A.T, beta=1.0, c=gram, lower=1, overwrite_c=1)


def _scaled_rows(Phi: FloatArray, rows: IntArray, factors: Float64Array) -> Float64Array:
    """Return diag(factors) Phi[rows], a new C-contiguous float64 array."""
    A: Float64Array = Phi[rows].astype(np.float64, order="C", copy=False)
    A *= factors[:, None]
    return A
