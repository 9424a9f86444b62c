"""All members of a committee on one shared basis, for little more than the price of one model.

With whitened features Φ the full model is the ridge regression w = (ΦᵀΦ + σ²)⁻¹Φᵀy (Eq. (3), Musil
et al. 2019), and member i, which sees row n with multiplicity c_ni, is the same with weights c_i:
w_i = (Φᵀ diag(c_i) Φ + σ²)⁻¹ Φᵀ diag(c_i) y_i. Four ways lead there:

- ``dual``: an n × n system instead of r × r, for members of fewer rows than features;
- ``complement``: the full model without the rows that a member lacks, for members that lack few;
- ``cg``: conjugate gradients on all members at once, preconditioned by the full model;
- ``direct``: a Gram matrix and a Cholesky factor for each; the reference.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from qualms.core._member_solvers import (
    MemberProblem,
    solve_by_cg,
    solve_complement,
    solve_direct,
    solve_dual,
)
from qualms.core.checks import check_sample_weight
from qualms.core.projected_process import ProjectedProcess
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, NumericalError, QualmsWarning

METHODS = ("auto", "dual", "complement", "cg", "direct")

# With fewer rows than the full model has effective parameters, there are directions that the full
# model determines well and that only σ² determines in the member. CG, with the full model as
# preconditioner, stops before it has noticed them, seemingly converged, and the residual of the
# complement hides them. The transition at one was sharp on all data tried.
_ROWS_PER_PARAMETER = 1.05


@dataclass(frozen=True)
class MemberSolution:
    """Weights of all members, and how they were found.

    Attributes
    ----------
    weights : (r, T, N_R) array
    method : str
        ``"dual"``, ``"complement"``, ``"cg"`` or ``"direct"``.
    n_iterations : int
        Passes over Φ that conjugate gradients took; 0 for the other methods.
    relative_error : float
        Estimated RMS prediction error on the training rows, relative to the RMS spread between the
        members' predictions; 0 for ``dual`` and ``direct``, which are exact up to rounding.
    """

    weights: Float64Array
    method: str
    n_iterations: int
    relative_error: float


def solve_members(
    Phi: FloatArray,
    Y: FloatArray,
    counts: FloatArray | IntArray,
    full: ProjectedProcess,
    *,
    sample_weight: FloatArray | None = None,
    method: str = "auto",
    tolerance: float = 1e-3,
    max_iterations: int = 500,
) -> MemberSolution:
    """Train all members: w_i = (Φᵀ diag(c_i) Φ + σ²)⁻¹ Φᵀ diag(c_i) y_i.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features, float64 or float32; solved in float64 in either case.
    Y : (N, T) or (N, T, N_R) array
        Targets, common to all members or each member's own.
    counts : (N, N_R) array
        How often each member sees each row: 0 or 1 in sub-sampling, integers in a bootstrap.
    full : ProjectedProcess
        The full model of the same Phi and sample weights: its factor, its Gram matrix and σ² are
        used, its weights are not.
    sample_weight : (N,) array, optional
        Positive; multiplies the counts: c_i = counts[:, i] * sample_weight.
    method : {"auto", "dual", "complement", "cg", "direct"}
        ``auto`` takes the cheapest by `estimated_cost`, and abandons ``cg`` for the cheapest exact
        way if it turns out to converge too slowly to be worth it.
    tolerance : float
        Accepted RMS prediction error of ``cg`` on the training rows, relative to the RMS spread
        (ddof = 1) between members.
    max_iterations : int
        Of ``cg``.

    Returns
    -------
    MemberSolution

    Warns
    -----
    QualmsWarning
        If ``cg`` or ``complement`` was asked for and cannot hold the tolerance. The members are
        then solved by the cheapest exact way.

    Raises
    ------
    NumericalError
        If σ² is lost in the rounding of a member's Gram matrix.
    """
    problem = _check(Phi, Y, counts, full, sample_weight)
    _check_options(problem, method, tolerance, max_iterations)
    costs = _costs(problem, tolerance)
    exact = min(("dual", "direct"), key=costs.__getitem__)
    chosen = min(costs, key=costs.__getitem__) if method == "auto" else method
    if chosen in ("dual", "direct"):
        return _solve_exactly(problem, chosen)
    if chosen not in costs:
        why = "a member has fewer rows than the full model has effective parameters"
    elif chosen == "complement":
        W, left = solve_complement(problem)
        if left <= tolerance:
            return MemberSolution(problem.as_weights(W), "complement", 0, left)
        why = f"rounding left a relative error of {left:.1e}"
    else:
        affordable = math.ceil(costs[exact] / _iteration_cost(problem))
        budget = min(max_iterations, affordable) if method == "auto" else max_iterations
        try:
            cg = solve_by_cg(problem, tolerance, budget, may_give_up=method == "auto")
        except NumericalError as error:
            why = str(error)
        else:
            if cg.converged and cg.relative_error <= tolerance:
                weights = problem.as_weights(cg.solutions)
                return MemberSolution(weights, "cg", cg.n_iterations, cg.relative_error)
            why = f"{cg.n_iterations} iterations left a relative error of {cg.relative_error:.1e}"
    if method != "auto":
        warnings.warn(
            f"method='{method}' cannot hold tolerance={tolerance:.1e}: {why}. The members were "
            f"solved by method='{exact}' instead.",
            QualmsWarning,
            stacklevel=2,
        )
    return _solve_exactly(problem, exact)


def estimated_cost(
    n_train: int,
    rank: int,
    n_present: float,
    n_members: int,
    *,
    n_outputs: int = 1,
    effective_dimension: float | None = None,
    effective_fraction: float | None = None,
    tolerance: float = 1e-3,
) -> dict[str, float]:
    """Cost of each way to solve the members, the full model being at hand.

    The unit is one floating-point operation of a large matrix product. Thin products, triangular
    solves and factorisations count for more than their operations, as measured with OpenBLAS.

    The number of iterations is that of CG on random rows: if all leverages are γ = d_eff/N and a
    member keeps a fraction p of the rows, the eigenvalues of the preconditioned operator fill
    (√(p(1−γ)) ± √(γ(1−p)))² (the edges of the Jacobi ensemble), and the error shrinks by
    √(γ(1−p)) / √(p(1−γ)) per iteration. Leverages that are not equal add to that. It is no more
    than a first guess: ``method="auto"`` abandons CG when the rate that it observes falls behind
    the direct solves.

    Parameters
    ----------
    n_train, rank, n_members, n_outputs : int
    n_present : float
        Distinct rows in a member.
    effective_dimension : float, optional
        d_eff of the full model; ``rank`` unless given.
    effective_fraction : float, optional
        p; ``n_present / n_train`` unless given. (Σc)² / (N Σc²) for a bootstrap.
    tolerance : float

    Returns
    -------
    dict of str to float
        For ``"dual"``, ``"complement"``, ``"cg"`` and ``"direct"``.
    """
    n, N, r, systems = float(n_present), n_train, rank, n_members * n_outputs
    lacking = N - n
    p = n / N if effective_fraction is None else effective_fraction
    # An estimate of d_eff, by which rounding may have made it less than zero or more than N.
    leverage = min(max((r if effective_dimension is None else effective_dimension) / N, 0.0), 1.0)
    seen, unseen = math.sqrt(p * (1 - leverage)), math.sqrt(leverage * (1 - min(p, 1.0)))
    rate = min(max(unseen / seen, 0.05), 0.8) if seen > 0 else 0.8
    iterations = 3 + 1.2 * math.log(2 / min(tolerance, 1.0)) / -math.log(rate)
    iteration = _cost_per_iteration(N, r, systems)
    gather, factorise = 300 * r, r**3 / 2 + 60 * N * r  # per row; with the right-hand side
    woodbury = 1.2 * r**2 * lacking + 1.2 * lacking**2 * r + lacking**3 / 2
    downdate = 1.2 * r**2 * lacking + 10 * r**2 + factorise
    return {
        "dual": n_members * (1.2 * n**2 * r + n**3 / 2 + 3 * gather * n),  # all rows at once
        "complement": n_members * (min(woodbury, downdate) + gather * lacking) + 2 * iteration,
        "cg": iterations * iteration + 450 * N * r + 1.2 * r**2 * N / 10,
        "direct": n_members * (1.2 * r**2 * n + gather * n + factorise),
    }


def _cost_per_iteration(n_train: int, rank: int, systems: int) -> float:
    """Cost of two thin products, two triangular solves, and bookkeeping on (systems, N) arrays."""
    thin = 110 + 4.5 * systems
    return thin * rank * (n_train + rank) + 1000 * systems * n_train


def _iteration_cost(problem: MemberProblem) -> float:
    n_members, n_train = problem.C.shape
    return _cost_per_iteration(n_train, problem.Phi.shape[1], n_members * problem.n_outputs)


def _costs(problem: MemberProblem, tolerance: float) -> dict[str, float]:
    """Cost of the methods that apply to this problem."""
    n_members, n_train = problem.C.shape
    present = np.count_nonzero(problem.C, axis=1)
    kish = problem.C.sum(axis=1) ** 2 / (problem.C**2).sum(axis=1)
    d_eff = problem.effective_dimension()
    costs = estimated_cost(
        n_train,
        problem.Phi.shape[1],
        float(present.mean()),
        n_members,
        n_outputs=problem.n_outputs,
        effective_dimension=d_eff,
        effective_fraction=float(kish.mean()) / n_train,
        tolerance=tolerance,
    )
    if present.min() < _ROWS_PER_PARAMETER * d_eff:
        del costs["cg"], costs["complement"]
    elif not problem.is_subsample:
        del costs["complement"]
    return costs


def _solve_exactly(problem: MemberProblem, method: str) -> MemberSolution:
    """Solve member by member, so that one at a time is in memory."""
    solve = solve_dual if method == "dual" else solve_direct
    weights = np.stack([solve(problem, i) for i in range(len(problem.C))], axis=-1)
    return MemberSolution(weights, method, 0, 0.0)


def _check(
    Phi: FloatArray,
    Y: FloatArray,
    counts: FloatArray | IntArray,
    full: ProjectedProcess,
    sample_weight: FloatArray | None,
) -> MemberProblem:
    """Refuse what cannot be solved, and bring the rest into the solvers' order."""
    if Phi.ndim != 2 or 0 in Phi.shape or Phi.dtype not in (np.float32, np.float64):
        raise InputError("Phi", f"{Phi.dtype} of shape {Phi.shape}", "float64 or float32 (N, r)")
    n_train, rank = Phi.shape
    # One matrix-vector product finds NaN and infinities without a temporary of the size of Phi.
    with np.errstate(invalid="ignore", over="ignore"):
        if not np.all(np.isfinite(np.ones(n_train, dtype=Phi.dtype) @ Phi)):
            raise InputError("Phi", "NaN or infinite values", "finite values")
    weight = check_sample_weight(sample_weight, n_train)
    times = np.asarray(counts, dtype=np.float64)
    if times.ndim != 2 or len(times) != n_train or times.shape[1] < 2:
        raise InputError("counts", f"shape {times.shape}", f"({n_train}, N_R) with N_R ≥ 2 members")
    if not np.all(np.isfinite(times)) or np.any(times < 0):
        raise InputError("counts", "negative or infinite values", "multiplicities ≥ 0")
    empty = np.flatnonzero(~times.any(axis=0))
    if empty.size:
        raise InputError("counts", f"no rows for member {empty[0]}", "at least one row for each")
    targets = np.asarray(Y, dtype=np.float64)
    shapes = f"({n_train}, T) or ({n_train}, T, {times.shape[1]})"
    if targets.ndim not in (2, 3) or len(targets) != n_train or targets.size == 0:
        raise InputError("Y", f"shape {targets.shape}", shapes)
    if targets.ndim == 3 and targets.shape[2] != times.shape[1]:
        raise InputError("Y", f"shape {targets.shape}", shapes)
    if not np.all(np.isfinite(targets)):
        raise InputError("Y", "NaN or infinite values", "finite values")
    if full.factor.shape != (rank, rank):
        raise InputError("full", f"factor of shape {full.factor.shape}", f"({rank}, {rank})")
    last = targets[:, :, None] if targets.ndim == 2 else targets
    per_member = np.broadcast_to(last, (*last.shape[:2], times.shape[1])).transpose(2, 1, 0)
    is_subsample = bool(np.all((times == 0) | (times == 1)))
    C = np.ascontiguousarray((times * weight[:, None]).T)
    return MemberProblem(Phi, per_member, C, weight, full, is_subsample)


def _check_options(
    problem: MemberProblem, method: str, tolerance: float, max_iterations: int
) -> None:
    if method not in METHODS:
        raise InputError("method", repr(method), f"one of {', '.join(METHODS)}")
    if method == "complement" and not problem.is_subsample:
        raise InputError("method", "'complement'", "counts of 0 and 1", "Use method='auto'.")
    if not (np.isfinite(tolerance) and tolerance > 0):
        raise InputError("tolerance", tolerance, "a finite number > 0")
    if max_iterations < 1:
        raise InputError("max_iterations", max_iterations, "at least 1")
