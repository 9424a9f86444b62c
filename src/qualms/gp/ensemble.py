"""Ensembles of subsampled sparse models that share one basis: Eqs. (4), (10) and (11).

Three parts: drawing the training sets of members and averaging over them; solving all members for
little more than the cost of one model; the full model and its members in the units of y. Arrays of
member predictions have the members on their last axis: (n, N_R), or (n, T, N_R) for T outputs.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.linalg import blas, solve_triangular

from qualms.arrays import (
    BoolArray,
    Float64Array,
    FloatArray,
    IntArray,
    as_targets,
    check_integer,
    check_number,
    check_sample_weight,
)
from qualms.errors import InputError, NumericalError, QualmsWarning, counted, did_you_mean
from qualms.gp.linalg import cholesky, cholesky_solve, cholesky_whiten
from qualms.gp.noise import BlockSums, noise_grid, select_joint_noise, select_noise
from qualms.gp.sparse_gp import (
    ProjectedProcess,
    RowSums,
    solve_projected_process,
    sum_rows,
    weighted_sum,
)

#: With fewer members, Student's t has less than two degrees of freedom.
MIN_ABSENT = 3

Result = TypeVar("Result")


def subsample_size(subsample: float, n_train: int) -> int:
    """Return n for a subsample given as a fraction of N in (0, 1) or as a number of samples.

    A float is a fraction, rounded to at least one and at most N − 1 samples; an int is n itself.
    """
    if n_train < 2:
        raise InputError(
            f"Subsamples are drawn from at least 2 samples or groups; there is {n_train}.",
            parameter="n_train",
        )
    whole = isinstance(subsample, (int, np.integer)) and not isinstance(subsample, bool)
    fraction = isinstance(subsample, (float, np.floating))
    if not ((whole and 1 <= subsample < n_train) or (fraction and 0 < subsample < 1)):
        raise InputError(
            f"`subsample` is {subsample!r}; use a fraction between 0 and 1, or a number of samples "
            f"from 1 to {n_train - 1}. For a bootstrap, use `replace=True`.",
            parameter="subsample",
        )
    if fraction:
        return int(np.clip(round(subsample * n_train), 1, n_train - 1))
    if subsample == 1:
        message = "subsample=1 is a single sample per member, not all of them."
        warnings.warn(message, QualmsWarning, stacklevel=2)
    return int(subsample)


def draw_members(
    n_train: int,
    n_members: int,
    subsample: float,
    rng: np.random.Generator,
    *,
    replace: bool = False,
    groups: Sequence[object] | IntArray | None = None,
) -> IntArray:
    """Draw the training sets D_i of all members: how often each sample is in each, (N, N_R).

    Parameters
    ----------
    n_train, n_members : int
        N, and N_R ≥ 2.
    subsample : float or int
        n, as a fraction of the samples (or groups) or as a number of them.
    rng : numpy.random.Generator
    replace : bool
        Draw N with replacement (bootstrap) rather than n < N without (subsampling).
    groups : (N,) array, optional
        Labels. Whole groups are then in or out: samples of one crystal or of one trajectory are
        near-copies.
    """
    if n_members < 2:
        raise InputError(
            f"`n_members` is {n_members}; a standard deviation needs at least 2 members.",
            parameter="n_members",
        )
    codes = group_codes(groups, n_train)
    n_groups = int(codes.max()) + 1
    if groups is not None and n_groups < 2:
        raise InputError(
            "All samples are in one group, but subsamples are drawn from at least 2 `groups`.",
            parameter="groups",
        )
    if replace:
        draws = [rng.integers(n_groups, size=n_groups) for _ in range(n_members)]
    else:
        n = subsample_size(subsample, n_groups)
        draws = [rng.permutation(n_groups)[:n] for _ in range(n_members)]
    counts = [np.bincount(drawn, minlength=n_groups)[codes] for drawn in draws]
    return np.stack(counts, axis=1).astype(np.intp)


def group_codes(groups: Sequence[object] | IntArray | None, n_train: int) -> IntArray:
    """Return the labels (N,) as integers 0 … G−1; without labels, each sample is a group."""
    if groups is None:
        return np.arange(n_train)
    labels = np.asarray(groups)
    if labels.shape != (n_train,):
        raise InputError(
            f"`groups` has the shape {labels.shape} instead of ({n_train},), one label for each "
            "sample.",
            parameter="groups",
        )
    try:
        return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.intp)
    except TypeError as error:
        raise InputError(
            f"The labels in `groups` are of several types ({error}). Use one type of label.",
            parameter="groups",
        ) from error


def ensemble_mean_std(members: FloatArray) -> tuple[Float64Array, Float64Array]:
    """Return mean and standard deviation (ddof = 1) over the members, the last axis.

    Eq. (4), Musil et al. 2019.
    """
    if members.shape[-1] < 2:
        raise InputError(
            f"`members` has {counted(members.shape[-1], 'member')} on its last axis; a standard "
            "deviation needs at least 2.",
            parameter="members",
        )
    members = np.asarray(members, dtype=np.float64)
    mean = members.mean(axis=-1)
    # np.std would take the mean again, and for few points several times as long.
    deviations = members - mean[..., None]
    squares = np.einsum("...i,...i->...", deviations, deviations)
    return mean, np.sqrt(squares / (members.shape[-1] - 1))


def rescaled(
    members: FloatArray, factor: float | FloatArray, mean: Float64Array | None = None
) -> Float64Array:
    """Scale members (…, N_R) about their mean, or the mean given, by f (…): ȳ + f (y⁽ⁱ⁾ − ȳ)."""
    values, f = np.asarray(members, dtype=np.float64), np.asarray(factor, dtype=np.float64)
    center = ensemble_mean_std(values)[0] if mean is None else mean
    return np.asarray(center[..., None] + (values - center[..., None]) * f[..., None])


def calibration_factors(std: Float64Array, ensemble_std: Float64Array) -> Float64Array:
    """Return σ/ŝ (…); one where ŝ is zero, so that members that agree are not changed."""
    return np.divide(std, ensemble_std, out=np.ones_like(ensemble_std), where=ensemble_std > 0)


def group_scatter(terms: Float64Array, codes: IntArray) -> Float64Array:
    """Return the covariance (p, p) of the sum of all terms (n, p), correlated within groups.

    Groups are independent, so it is G/(G−1) Σ_g S_g S_gᵀ, S_g being the sum over group g of the
    terms less their mean. `codes` are 0 … G−1.
    """
    centered = terms - terms.mean(axis=0)
    n_groups = int(codes.max()) + 1
    S = np.stack([np.bincount(codes, column, minlength=n_groups) for column in centered.T], axis=1)
    return np.asarray(S.T @ S * n_groups / max(n_groups - 1, 1), dtype=np.float64)


class OutOfBagPrediction(NamedTuple):
    """Out-of-bag predictions of training points.

    `used` (N,) marks the points absent from enough members; the other arrays hold these only:
    `mean` and `std` (n_used, …), y_INT and σ_INT, and `n_absent` (n_used,), the number N_R(X) of
    members whose training sets lack the point.
    """

    used: BoolArray
    mean: Float64Array
    std: Float64Array
    n_absent: IntArray


def out_of_bag_prediction(
    members: FloatArray, absent: BoolArray, *, min_absent: int = MIN_ABSENT
) -> OutOfBagPrediction:
    """Average each point over its out-of-bag members. Eqs. (10) and (11), Musil et al. 2019.

    Parameters
    ----------
    members : (N, N_R) or (N, T, N_R) array
        Predictions of the training points by all members.
    absent : (N, N_R) array of bool
        Whether the training set of the member lacks the point.
    min_absent : int
        Points absent from fewer members are left out; at least 2.
    """
    members = np.asarray(members, dtype=np.float64)
    absent = np.asarray(absent, dtype=bool)
    if absent.shape != (len(members), members.shape[-1]):
        raise InputError(
            f"`absent` has the shape {absent.shape} instead of that of points and members, "
            f"{(len(members), members.shape[-1])}.",
            parameter="absent",
        )
    if min_absent < 2:
        raise InputError(
            f"`min_absent` is {min_absent}; a standard deviation needs at least 2 members.",
            parameter="min_absent",
        )
    n_absent = absent.sum(axis=1)
    used = n_absent >= min_absent
    values, mask, c = members[used], absent[used], n_absent[used]
    if members.ndim == 3:
        mask, c = mask[:, None], c[:, None]
    mean = np.sum(np.where(mask, values, 0.0), axis=-1) / c
    deviations = np.where(mask, values - mean[..., None], 0.0)
    std = np.sqrt(np.sum(deviations**2, axis=-1) / (c - 1))
    return OutOfBagPrediction(used, mean, std, n_absent[used])


class Residuals(NamedTuple):
    """Residuals of points (n,) by the full model without them, and by their out-of-bag members."""

    full: Float64Array
    members: Float64Array  #: by the mean over the members
    std: Float64Array  #: ŝ over the members
    n_absent: IntArray  #: their number c
    groups: IntArray  #: points of the same group have correlated errors

    def mostly(self, preferred: BoolArray) -> Residuals:
        """Return the preferred points, if these are at least half of all.

        The weight of a representative of a point that is left out is not determined by data: out of
        bag, errors are larger than those of new points, above all without an average over members.
        """
        if 2 * np.count_nonzero(preferred) < len(preferred):
            return self
        some: Any = (of_points[preferred] for of_points in self)
        return Residuals(*some)


def fit_centre(quantities: Iterable[Residuals], n_members: int) -> float:
    """Return the share λ in [0, 1] of the ensemble mean in the blend, less its standard error.

    The residual of (1 − λ)·(full model) + λ·(ensemble mean) is z = (1 − λ) z_f + λ z_m. For new
    points the mean is over N_R members rather than c, and the expectation of z_m² smaller by
    s²(1/c − 1/N_R): so Σ z² = Σ z_f² − 2λ Σ a + λ² Σ b with a = z_f(z_f − z_m) and
    b = (z_f − z_m)² − s²(1/c − 1/N_R), smallest at λ = Σa/Σb. The sums of several quantities are
    relative to Σ z_f². The standard error of this ratio is that of Σ(a − λb), of independent
    groups, over Σb. It is subtracted, since few points may suggest any share, and the full model is
    the better prediction where they do not tell; so it is where Σb ≤ 0, and λ is undetermined.
    """
    slopes, curvatures, groups = [np.empty(0)], [np.empty(0)], [np.empty(0, dtype=int)]
    for z_f, z_m, std, c, group in quantities:
        unit = float(z_f @ z_f)
        if unit > 0:
            difference = z_f - z_m
            slopes.append(z_f * difference / unit)
            curvatures.append((difference**2 - std**2 * (1 / c - 1 / n_members)) / unit)
            groups.append(group)
    a, b = np.concatenate(slopes), np.concatenate(curvatures)
    if b.sum() <= 0:
        return 0.0
    share = a.sum() / b.sum()
    codes = np.unique(np.concatenate(groups), return_inverse=True)[1]
    error = np.linalg.norm(np.bincount(codes, a - share * b)) / b.sum()
    return float(np.clip(share - error, 0.0, 1.0))


def centred(
    members: Float64Array,
    full: Float64Array,
    centre: float | Float64Array,
    drawn: Float64Array,
) -> Float64Array:
    """Shift members (…, S) to the prediction, and add deviations (…, K) from it: (…, S + K).

    The prediction is w(λ) = (1 − λ)·full + λ·(mean of the members), for `full` (…) and λ that
    broadcast.
    """
    n = members.shape[-1]
    mean = members.sum(axis=-1, keepdims=True) / max(n, 1)
    share = np.asarray(centre)[..., None]
    blend = (1 - share) * np.asarray(full)[..., None] + share * mean
    return np.concatenate([blend + (members - mean), blend + drawn], axis=-1)


# Thin products in float64, a block of rows of Φ at a time: a float32 Φ is never widened whole.
# Matrices have one row per system, q = member * n_outputs + output.
def block_size(Phi: FloatArray) -> int:
    """Return how many rows of Φ are visited at a time: 64 MiB in float64."""
    return max(1, 2**23 // int(Phi.shape[1]))


def row_blocks(Phi: FloatArray) -> Iterator[tuple[slice, Float64Array]]:
    """Yield ``(rows, Phi[rows])`` in C-contiguous float64, a block at a time."""
    size = block_size(Phi)
    for start in range(0, len(Phi), size):
        rows = slice(start, min(start + size, len(Phi)))
        yield rows, np.ascontiguousarray(Phi[rows], dtype=np.float64)


def project(Phi: FloatArray, Z: Float64Array) -> Float64Array:
    """Return ZΦ (n_systems, r) for Z (n_systems, N)."""
    out = np.zeros((len(Z), Phi.shape[1]))
    for rows, block in row_blocks(Phi):
        out += Z[:, rows] @ block
    return out


def predict(Phi: FloatArray, W: Float64Array) -> Float64Array:
    """Return WΦᵀ (n_systems, N) for W (n_systems, r)."""
    return np.concatenate([W @ block.T for _, block in row_blocks(Phi)], axis=1)


def normal_product(
    Phi: FloatArray, C: Float64Array, noise_variance: float, W: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return F = WΦᵀ (n_systems, N) and (C ∘ F)Φ + σ²W (n_systems, r), in one pass over Φ.

    C (n_systems, N) holds the weight of each row of Φ in each system.
    """
    F, product = np.empty((len(W), len(Phi))), noise_variance * W
    for rows, block in row_blocks(Phi):
        F[:, rows] = W @ block.T
        product += (C[:, rows] * F[:, rows]) @ block
    return F, product


# Solving all members.
# With fewer rows than the full model has effective parameters, there are directions that the full
# model determines well and that only σ² determines in the member. CG, with the full model as
# preconditioner, stops before it has found them, seemingly converged, and the residual of the
# complement hides them. The transition at one was sharp on all data tried.
_ROWS_PER_PARAMETER = 1.05
#: Steps after which the observed rate of convergence is reliable enough to stop because of it.
_STEPS_BEFORE_GIVING_UP = 16


class MemberSolution(NamedTuple):
    """Weights (r, T, N_R) of all members, and how they were found.

    `method` is the name of a solver, and `n_iterations` the passes over Φ of conjugate gradients.
    """

    weights: Float64Array
    method: str
    n_iterations: int = 0


@dataclass(frozen=True)
class MemberProblem:
    """The systems to solve: members on the first axis, rows of Φ (N, r) on the last.

    `Y` (N_R, T, N) are the targets of each member, possibly a broadcast view, and `C` (N_R, N) the
    multiplicity of each row times its `sample_weight` (N,). The model `full` has the same Phi and
    sample weights. In a subsample no row counts more than once.
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

    def effective_dimension(self) -> float:
        """Estimate d_eff = Tr[ΦᵀΦ (ΦᵀΦ + σ²)⁻¹] = r − σ²|L⁻¹|² of the full model.

        16 random signs s, E|L⁻¹s|² = |L⁻¹|², leave a standard error below √((r − d_eff)/8). Where
        σ² is nearly lost in rounding, so is L⁻¹: the estimate is clipped to [0, r].
        """
        rank = self.Phi.shape[1]
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(rank, 16))
        V = cholesky_whiten(self.full.factor, signs)
        return float(np.clip(rank - self.full.noise_variance * np.sum(V**2) / 16, 0.0, rank))

    def scale(self, F: Float64Array) -> Float64Array:
        """Return the RMS standard deviation between members of predictions F, per output: (T,).

        F (N_R·T, N) has one row per system. Where the members agree, a small fraction of y is
        returned instead.
        """
        by_member = F.reshape(-1, self.n_outputs, F.shape[1])
        std = np.sqrt(by_member.var(axis=0, ddof=1).mean(axis=-1))
        return np.asarray(np.maximum(std, self._smallest_scale))

    @cached_property
    def _smallest_scale(self) -> Float64Array:
        rms = np.sqrt(np.mean(self.Y**2, axis=(0, 2)))
        return np.asarray(np.maximum(1e-8 * rms, np.finfo(np.float64).tiny))


class ProblemSize(NamedTuple):
    """Numbers that determine the cost of solving the members.

    `n_present` is the number of distinct rows in a member, `effective_dimension` d_eff of the full
    model, and `effective_fraction` p = (Σc)² / (N Σc²), which is n/N for a subsample.
    """

    n_train: int
    rank: int
    n_members: int
    n_outputs: int
    n_present: float
    effective_dimension: float
    effective_fraction: float
    tolerance: float

    @property
    def per_iteration(self) -> float:
        """Two thin products, two triangular solves, and bookkeeping on (systems, N) arrays."""
        systems = self.n_members * self.n_outputs
        thin = 110 + 4.5 * systems
        return thin * self.rank * (self.n_train + self.rank) + 1000 * systems * self.n_train


class InaccurateError(NumericalError):
    """A solver cannot reach the tolerance for this problem."""


def estimated_costs(size: ProblemSize) -> dict[str, float]:
    """Estimate the cost of each solver, given the full model.

    The unit is one floating-point operation of a large matrix product. Thin products, triangular
    solves and factorisations count for more than their operations, as measured with OpenBLAS.

    If all leverages are γ = d_eff/N and a member keeps a fraction p of the rows, the eigenvalues of
    the preconditioned operator of CG fill (√(p(1−γ)) ± √(γ(1−p)))² (the edges of the Jacobi
    ensemble), and the error shrinks by √(γ(1−p)) / √(p(1−γ)) per iteration. Unequal leverages add
    to that; ``method="auto"`` abandons CG when the observed rate is too slow.
    """
    N, r, n, p = size.n_train, size.rank, size.n_present, size.effective_fraction
    lacking, factorise = N - n, r**3 / 2 + 60 * N * r
    woodbury = 1.2 * r**2 * lacking + 1.2 * lacking**2 * r + lacking**3 / 2
    downdate = 1.2 * r**2 * lacking + 10 * r**2 + factorise
    leverage = min(max(size.effective_dimension / N, 0.0), 1.0)
    seen, unseen = math.sqrt(p * (1 - leverage)), math.sqrt(leverage * (1 - min(p, 1.0)))
    rate = min(max(unseen / seen, 0.05), 0.8) if seen > 0 else 0.8
    iterations = 3 + 1.2 * math.log(2 / min(size.tolerance, 1.0)) / -math.log(rate)
    complement = size.n_members * (min(woodbury, downdate) + 300 * r * lacking)
    return {
        "dual": size.n_members * (1.2 * n**2 * r + n**3 / 2 + 900 * r * n),
        "complement": complement + 2 * size.per_iteration,
        "cg": iterations * size.per_iteration + 450 * N * r + 1.2 * r**2 * N / 10,
        "direct": size.n_members * (1.2 * r**2 * n + 300 * r * n + factorise),
    }


def solve_direct(problem: MemberProblem) -> MemberSolution:
    """Solve (Φᵀ diag(c) Φ + σ²) w = Φᵀ diag(c) y member by member."""
    members = [_direct(problem, i) for i in range(len(problem.C))]
    return MemberSolution(np.stack(members, axis=-1), "direct")


def _direct(problem: MemberProblem, i: int) -> Float64Array:
    gram = np.zeros((problem.Phi.shape[1],) * 2, order="F")
    _add_gram(gram, problem.Phi, problem.C[i])
    return _solve_gram(problem, i, gram)


def solve_dual(problem: MemberProblem) -> MemberSolution:
    """Solve w = Aᵀ(AAᵀ + σ²)⁻¹√c y, where A = diag(√c)Φ has the rows of one member only.

    A member with more rows than features is solved directly: its AAᵀ is singular and depends on σ²
    more delicately.
    """
    few = np.count_nonzero(problem.C, axis=1) <= problem.Phi.shape[1]
    members = [_dual(problem, i) if few[i] else _direct(problem, i) for i in range(len(few))]
    return MemberSolution(np.stack(members, axis=-1), "dual")


def _dual(problem: MemberProblem, i: int) -> Float64Array:
    rows = np.flatnonzero(problem.C[i])
    root = np.sqrt(problem.C[i, rows])
    A = _scaled_rows(problem.Phi, rows, root)
    kernel = blas.dsyrk(1.0, A.T, trans=1, lower=1)
    kernel[np.diag_indices_from(kernel)] += problem.full.noise_variance
    factor = cholesky(kernel, what="ΦΦᵀ + σ² of a member", overwrite=True)
    return np.asarray(A.T @ cholesky_solve(factor, (root * problem.Y[i][:, rows]).T))


def solve_complement(problem: MemberProblem, tolerance: float) -> MemberSolution:
    """Remove from the full model, for each member, the rows that it lacks.

    Raises `InaccurateError` if the subtraction loses too much to rounding.
    """
    Phi, T, factor = problem.Phi, problem.n_outputs, problem.full.factor
    # The full model of each member's own targets: the given one need not have the same.
    all_rows = project(Phi, problem.sample_weight * problem.Y.reshape(-1, len(Phi)))
    W = cholesky_solve(factor, all_rows.T).T
    few = (problem.C == 0).sum(axis=1).max() < Phi.shape[1]
    remove = _woodbury if few else _downdate
    try:
        for i in range(len(problem.C)):
            mine = slice(i * T, (i + 1) * T)
            W[mine] = remove(problem, i, W[mine].T).T
    except NumericalError as error:
        raise InaccurateError("the difference of Gram matrices is lost in rounding") from error
    # The residual ρ shows the error: ‖e‖²_A = ρ·A⁻¹ρ, and A⁻¹ is about that of the full model.
    F, C = predict(Phi, W), problem.systems()
    rho = project(Phi, C * (problem.Y.reshape(F.shape) - F)) - problem.full.noise_variance * W
    energy = np.sum(cholesky_whiten(factor, rho.T) ** 2, axis=0) / C.sum(axis=1)
    rms = np.sqrt(np.mean(energy.reshape(-1, T), axis=0))
    left = float(np.max(rms / problem.scale(F)))
    if not left <= tolerance:
        raise InaccurateError(f"rounding left a relative error of {left:.1e}")
    return MemberSolution(problem.as_weights(W), "complement")


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
    back = solve_triangular(problem.full.factor, change, lower=True, trans="T", check_finite=False)
    return np.asarray(start - back)


def _downdate(problem: MemberProblem, i: int, start: Float64Array) -> Float64Array:
    """Subtract the Gram matrix of the absent rows from that of all rows."""
    gram = np.array(problem.full.gram.T, order="F")
    absent = np.where(problem.C[i] == 0, problem.sample_weight, 0.0)
    _add_gram(gram, problem.Phi, absent, sign=-1.0)
    return _solve_gram(problem, i, gram)


def solve_by_conjugate_gradients(
    problem: MemberProblem,
    tolerance: float,
    max_iterations: int = 500,
    *,
    may_give_up: bool = False,
) -> MemberSolution:
    """Solve all members at once, until the estimated prediction error is below tolerance.

    Raises `InaccurateError` after `max_iterations`, or if it `may_give_up`, as soon as the observed
    rate predicts that these will not suffice.

    Starting from the full model's weights, not from zero, would save two or three iterations. But
    where a member lacks the only rows that determine some direction, CG does not move in that
    direction, and the start stays: labels that the member must not know. The preconditioner holds
    no labels.
    """
    C, n_outputs, noise = problem.systems(), problem.n_outputs, problem.full.noise_variance
    R = project(problem.Phi, C * problem.Y.reshape(C.shape))
    precondition = _Preconditioner(problem)
    X, F = np.zeros_like(R), np.zeros_like(C)
    steps, error = np.zeros((max_iterations, len(R))), np.zeros(len(R))
    scale, k = problem.scale(F), 0
    P = precondition(R, np.arange(len(R)))
    rz = np.einsum("qr,qr->q", R, P)
    active = np.flatnonzero(rz != 0)  # systems of zero right-hand side are solved; NaN is not
    R, P, rz = R[active], P[active], rz[active]
    while active.size and k < max_iterations:
        FP, AP = normal_product(problem.Phi, C[active], noise, P)
        length = _divide(rz, np.einsum("qr,qr->q", P, AP))
        X[active] += length[:, None] * P
        F[active] += length[:, None] * FP
        steps[k, active] = length * np.sqrt(np.einsum("qn,qn->q", FP, FP) / FP.shape[1])
        k += 1
        error[active] = _remaining_error(steps[:k, active])
        scale = problem.scale(F)
        excess = error[active] / (tolerance * scale[active % n_outputs])
        going = ~(excess <= 1)  # NaN counts as not converged
        R, P, rz, active = (R - length[:, None] * AP)[going], P[going], rz[going], active[going]
        if may_give_up and k >= _STEPS_BEFORE_GIVING_UP and going.any():
            # The mean rate since the first step, not the cautious one of `_remaining_error`:
            # steps stop shrinking for a while whenever CG finds another small eigenvalue.
            ratio = _divide(steps[k - 1, active], steps[0, active])
            rate = np.clip(ratio ** (1 / (k - 1)), 0.3, 0.98)
            if not k + np.max(np.log(excess[going]) / -np.log(rate)) <= max_iterations:
                break
        if active.size:
            Z = precondition(R, active)
            previous, rz = rz, np.einsum("qr,qr->q", R, Z)
            P = Z + _divide(rz, previous)[:, None] * P
    rms = np.sqrt(np.mean(error.reshape(-1, n_outputs) ** 2, axis=0))
    left = float(np.max(rms / scale))
    if active.size or not left <= tolerance:
        raise InaccurateError(f"{k} iterations left a relative error of {left:.1e}")
    return MemberSolution(problem.as_weights(X), "cg", k)


def _divide(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return a / b, and 0 where b vanishes: a system already solved exactly takes no step."""
    return np.divide(a, b, out=np.zeros(b.shape), where=b != 0)


def _remaining_error(steps: Float64Array) -> Float64Array:
    """Estimate the RMS error (n_systems,) from the RMS lengths of steps (n_steps, n_systems).

    The error after step k is the sum of the steps to come. Steps of preconditioned CG make acute
    angles with one another in the inner product of the preconditioner (Hestenes & Stiefel 1952),
    which here is that of the predictions on all rows, up to σ². So their lengths nearly add,
    ‖e_k‖ ≲ Σ_{j>k} s_j, and if they shrink by ρ each the sum is s_k ρ/(1−ρ). Unlike the residual
    this is sensitive to small eigenvalues, and unlike the energy norm it includes the absent rows.
    To be safe against single short steps and plateaus, ρ is the slowest mean rate between the last
    step and any but the one before it, and s_k the largest of the last three steps, shrunk by ρ to
    the present.
    """
    last = len(steps) - 1
    if last == 0:
        return np.full(steps.shape[1], np.inf)
    back = np.arange(last, min(2, last) - 1, -1)[:, None]
    before = steps[: len(back)]
    ratio = _divide(np.broadcast_to(steps[last], before.shape), before)
    rate = np.clip(np.max(ratio ** (1 / back), axis=0), 0.3, 0.98)
    recent = steps[-3:] * rate ** np.arange(min(2, last), -1, -1)[:, None]
    return np.asarray(np.max(recent, axis=0) * rate / (1 - rate))


class _Preconditioner:
    """Inverse of the full model without the rows of high leverage that a member lacks.

    Relative to the full model ΦᵀΦ + σ² = LLᵀ a subsample is 1 − VVᵀ, V = L⁻¹Aᵀ of the absent rows
    A. Its eigenvalues crowd around n/N except for those that a few rows pull towards zero: with
    |V|² = 1 in one direction only that row determines it. These make CG slow or, below the
    tolerance, make it stop too early. So the rows of highest leverage |L⁻¹φ|² are removed by the
    matrix inversion lemma, for each member those it lacks:

        (LLᵀ − AᵀA)⁻¹ = L⁻ᵀ (1 + V (1 − VᵀV)⁻¹ Vᵀ) L⁻¹.

    Using (n/N)ΦᵀΦ + σ² instead was measured to save no iterations, and costs a factorisation.
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
        overlap = self._V @ self._V.T
        for i, c in enumerate(problem.C[:, rows]):
            lacking = np.flatnonzero(c == 0)
            core = np.asfortranarray(np.eye(lacking.size) - overlap[np.ix_(lacking, lacking)])
            if lacking.size:
                # Where this is lost to rounding the member goes without it: a preconditioner need
                # only be positive definite.
                with contextlib.suppress(NumericalError):
                    self._cores[i] = (lacking, cholesky(core, what="1 − VᵀV", overwrite=True))

    def __call__(self, R: Float64Array, systems: IntArray) -> Float64Array:
        """Apply it to the residuals (·, r) of some systems."""
        U = self._solve_lower(R.copy())
        if not self._V.size:
            return self._solve_lower(U, transposed=True)
        overlaps = U @ self._V.T
        B = np.zeros_like(overlaps)
        for row, system in enumerate(systems):
            core = self._cores[system // self._n_outputs]
            if core is not None:
                lacking, factor = core
                B[row, lacking] = cholesky_solve(factor, overlaps[row, lacking])
        return self._solve_lower(U + B @ self._V, transposed=True)

    def _solve_lower(self, B: Float64Array, *, transposed: bool = False) -> Float64Array:
        """Return the rows L⁻¹b, or L⁻ᵀb, in the place of those of B; SciPy's own is slower."""
        solved: Float64Array = blas.dtrsm(
            1.0, self._factor, B.T, lower=1, trans_a=int(transposed), overwrite_b=1
        ).T
        return solved


def _high_leverage_rows(problem: MemberProblem) -> IntArray:
    """Return the rows of leverage s|L⁻¹φ|² above 0.3 or so, at most every tenth row.

    128 random signs s, E(φ·L⁻ᵀs)² = |L⁻¹φ|², estimate the leverages to an eighth of their value. On
    20,000 molecules, with 300 leverages above 0.7, 32 signs and every twentieth row took 48
    iterations, 128 and every twentieth 36, and 128 and every tenth 22.
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
        # CG might stop, seemingly converged, before it has found a direction that only absent rows
        # determine.
        raise InaccurateError(f"{n_decisive + highest.size} rows have a leverage close to one")
    return np.sort(highest[leverage[highest] > 0.3])


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


#: Ways to solve members.
METHODS = ("dual", "complement", "cg", "direct")


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
        How often each row is in each member: 0 or 1 in subsampling, integers in a bootstrap.
    full : ProjectedProcess
        The full model of the same Phi and sample weights: its factor, its Gram matrix and σ² are
        used, its weights are not.
    sample_weight : (N,) array, optional
        Positive; multiplies the counts: c_i = counts[:, i] * sample_weight.
    method : {"auto", "dual", "complement", "cg", "direct"}
        ``auto`` takes the solver of lowest estimated cost, and abandons ``cg`` for the cheaper of
        ``dual`` and ``direct`` if it converges too slowly.
    tolerance : float
        Accepted RMS prediction error of ``cg`` and ``complement`` on the training rows, relative to
        the RMS standard deviation (ddof = 1) between members. If a requested method cannot reach
        it, a warning is issued, and the cheaper of ``dual`` and ``direct`` is used.
    max_iterations : int
        Of ``cg``.

    Raises
    ------
    NumericalError
        If σ² is lost in the rounding of a member's Gram matrix.
    """
    problem = _check(Phi, Y, counts, full, sample_weight)
    if method not in ("auto", *METHODS):
        choices = ("auto", *METHODS)
        raise InputError(
            f"There is no `method` {method!r}; use one of {', '.join(choices)}."
            f"{did_you_mean(method, choices)}",
            parameter="method",
        )
    if method == "complement" and not problem.is_subsample:
        raise InputError(
            "`method='complement'` is for subsamples, whose `counts` are 0 and 1. Use "
            "`method='auto'`.",
            parameter="method",
        )
    check_number("tolerance", tolerance, 0, strict=True)
    check_integer("max_iterations", max_iterations, 1)
    C, n_present = problem.C, np.count_nonzero(problem.C, axis=1)
    size = ProblemSize(
        len(Phi),
        Phi.shape[1],
        len(C),
        problem.n_outputs,
        float(n_present.mean()),
        problem.effective_dimension(),
        float(np.mean(C.sum(axis=1) ** 2 / (C**2).sum(axis=1))) / len(Phi),
        tolerance,
    )
    costs = estimated_costs(size)
    few = n_present.min() < _ROWS_PER_PARAMETER * size.effective_dimension
    exact = min(("dual", "direct"), key=costs.__getitem__)
    if few or not problem.is_subsample:
        del costs["complement"]
    if few:
        del costs["cg"]
    chosen = min(costs, key=costs.__getitem__) if method == "auto" else method
    try:
        if chosen not in costs:
            raise InaccurateError(
                "members have fewer rows than the full model has effective parameters"
            )
        if chosen == "complement":
            return solve_complement(problem, tolerance)
        if chosen == "cg":
            may_give_up = method == "auto"
            affordable = math.ceil(costs[exact] / size.per_iteration)
            budget = min(max_iterations, affordable) if may_give_up else max_iterations
            return solve_by_conjugate_gradients(problem, tolerance, budget, may_give_up=may_give_up)
        exact = chosen
    except InaccurateError as error:
        if method != "auto":
            warnings.warn(
                f"method='{method}' cannot reach tolerance={tolerance:.1e}: {error}. The members "
                f"were solved by method='{exact}' instead.",
                QualmsWarning,
                stacklevel=2,
            )
    return solve_dual(problem) if exact == "dual" else solve_direct(problem)


def _check(
    Phi: FloatArray,
    Y: FloatArray,
    counts: FloatArray | IntArray,
    full: ProjectedProcess,
    sample_weight: FloatArray | None,
) -> MemberProblem:
    """Validate the arguments, and bring them into the order of the solvers."""
    _check_features(Phi)
    n_train, rank = Phi.shape
    weight = check_sample_weight(sample_weight, n_train)
    times = _check_counts(counts, n_train)
    n_members = times.shape[1]
    targets = _check_labels(Y, n_train, n_members)
    if full.factor.shape != (rank, rank):
        raise InputError(
            f"The factor of `full` has the shape {full.factor.shape} instead of {(rank, rank)}: "
            "it is the model of other features.",
            parameter="full",
        )
    per_member = np.broadcast_to(targets, (*targets.shape[:2], n_members)).transpose(2, 1, 0)
    is_subsample = bool(np.all((times == 0) | (times == 1)))
    C = np.ascontiguousarray((times * weight[:, None]).T)
    return MemberProblem(Phi, per_member, C, weight, full, is_subsample)


def _check_features(Phi: FloatArray) -> None:
    """Reject features (N, r) that are not finite floating-point numbers."""
    if Phi.ndim != 2 or 0 in Phi.shape or Phi.dtype not in (np.float32, np.float64):
        raise InputError(
            f"`Phi` is an array of {Phi.dtype} and of shape {Phi.shape}; use float64 or float32 of "
            "shape (N, r).",
            parameter="Phi",
        )
    # One matrix-vector product finds NaN and infinities without a temporary of the size of Phi.
    with np.errstate(invalid="ignore", over="ignore"):
        if not np.all(np.isfinite(np.ones(len(Phi), dtype=Phi.dtype) @ Phi)):
            raise InputError("`Phi` has NaN or infinite values.", parameter="Phi")


def _check_counts(counts: FloatArray | IntArray, n_train: int) -> Float64Array:
    """Return the multiplicities (N, N_R) of samples in members as float64."""
    times = np.asarray(counts, dtype=np.float64)
    if times.ndim != 2 or len(times) != n_train or times.shape[1] < 2:
        raise InputError(
            f"`counts` has the shape {times.shape} instead of ({n_train}, N_R) with N_R ≥ 2 "
            "members.",
            parameter="counts",
        )
    if not np.all(np.isfinite(times)) or np.any(times < 0) or not np.all(times.any(axis=0)):
        raise InputError(
            "`counts` must be finite multiplicities ≥ 0, with at least one row for each member.",
            parameter="counts",
        )
    return times


def _check_labels(Y: FloatArray, n_train: int, n_members: int) -> Float64Array:
    """Return the labels as finite float64, (N, T, 1) or, one set for each member, (N, T, N_R)."""
    targets = np.asarray(Y, dtype=np.float64)
    targets = targets[:, :, None] if targets.ndim == 2 else targets
    if targets.ndim != 3 or len(targets) != n_train or targets.shape[2] not in (1, n_members):
        raise InputError(
            f"`Y` has the shape {np.shape(Y)} instead of ({n_train}, T) or "
            f"({n_train}, T, {n_members}).",
            parameter="Y",
        )
    if not np.all(np.isfinite(targets)):
        raise InputError("`Y` has NaN or infinite values.", parameter="Y")
    return targets


# The full model and its members, in the units of y.
#: How often noise variances that are lost in rounding are raised, by a factor of ten.
_ATTEMPTS = 8


@dataclass(frozen=True)
class FullModel:
    """The projected process of all rows, for targets of zero mean and unit prior variance."""

    process: ProjectedProcess
    y: Float64Array  #: (N, T): targets less `center`, divided by `scale`; zero if constant
    weight: Float64Array  #: (N,): the noise variance of a row is that of the target divided by it
    center: Float64Array  #: (T,): mean of the target; zero without centring
    scale: Float64Array  #: (T,): square root of the prior variance
    noise: dict[str, float]  #: noise variance of each quantity, in its units squared
    centered: bool

    @property
    def weights(self) -> Float64Array:
        """Weights of the whitened features, in the units of y: (r, T)."""
        return self.process.weights * self.scale

    def with_raised_noise(self, factor: float) -> FullModel:
        """Return the model with all noise variances multiplied by a factor."""
        if factor == 1:
            return self
        old = self.process
        moment = old.gram @ old.weights + old.noise_variance * old.weights
        sums = RowSums(old.gram, moment, np.empty((0, 0)))
        process = solve_projected_process(sums, factor * old.noise_variance)
        raised = {name: factor * value for name, value in self.noise.items()}
        return replace(self, process=process, noise=raised)


def fit_full_model(
    Phi: FloatArray,
    y: FloatArray,
    noise: Mapping[str, str | float],
    *,
    rows: Mapping[str, IntArray] | None = None,
    center: bool = True,
    sample_weight: FloatArray | None = None,
    groups: IntArray | None = None,
    replicate_variance: Float64Array | None = None,
    blocks: BlockSums | None = None,
) -> FullModel:
    """Centre and scale the targets, select the noise variances and solve the full model.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features, for a kernel of unit mean diagonal.
    y : (N,) or (N, T) array
    noise : mapping from quantity to {"loo", "auto"} or float
        Noise variance σ² in the units of y² (with several outputs: for their mean variance), if it
        is not selected. The first quantity is the target; the others are derivatives of it.
    rows : mapping from quantity to array of int, optional
        Rows of each of several quantities; those of the target come first.
    center : bool
        Whether the mean of the target belongs to the model; without, its prior mean is zero.
    sample_weight : (N,) array, optional
        Weights of the rows of a single quantity.
    groups : (N,) array of int, optional
        Rows that are left out together when the noise is selected.
    replicate_variance : (T,) array, optional
        Variance of repeated observations whose averages are y, in the units of y². It is the noise
        variance if y is constant.
    blocks : BlockSums, optional
        Sums over all rows, if those given are a sample.
    """
    first, alone = next(iter(noise)), len(noise) == 1
    rows = rows or {first: np.arange(len(Phi))}
    groups = np.arange(len(Phi)) if groups is None else groups
    n = len(rows[first])
    Y, weight = as_targets(y, len(Phi)).copy(), check_sample_weight(sample_weight, len(Phi)).copy()
    mean = np.average(Y[:n], axis=0, weights=weight[:n]) * center
    if blocks is not None:
        mean = np.array([blocks.center])
    Y[:n] -= mean
    if not alone:
        variance = _variance_of_derivatives(Phi[n:], Y[n:], blocks)
        constant = np.zeros(len(mean), bool)
    else:
        variance = np.average(Y**2, axis=0, weights=weight)
        if blocks is not None:
            squares = np.sum([part.squares for part in blocks.sums[first]], axis=0)
            variance = squares[:1, 0] / squares[-1, -1]
        # What rounding leaves of a constant is no variance; its scale is only a scale of rounding.
        constant = variance <= (1e-14 * mean) ** 2
    scale = np.where(constant, 1e-6 * np.where(mean == 0, 1.0, np.abs(mean)), variance**0.5)
    unit = float(np.mean(scale[constant == constant.all()] ** 2))
    targets = np.where(constant, 0.0, Y / scale)
    known = {name: float(v) for name, v in noise.items() if not isinstance(v, str)}

    def sum_all(variances: Mapping[str, float]) -> RowSums:
        """Return the sums of all rows, given the noise variances of several quantities."""
        if blocks is None:
            return sum_rows(Phi, targets, weight)
        ratios = [variances[first] / variances[name] for name in rows]
        total = weighted_sum([blocks.total(name) for name in rows], ratios)
        return total.combined(np.eye(1, len(total.squares))[0] * np.where(constant, 0, 1 / scale))

    sums = sum_all({first: 1.0}) if alone else None
    if len(known) == len(noise):
        variances = known
    elif alone:
        if constant.all():
            # Only the scatter of replicates, if there is any, determines the noise.
            scatter = 0.0 if replicate_variance is None else replicate_variance / scale**2
            relative = max(float(np.mean(scatter)), 1.0)
        else:
            relative = select_noise(
                Phi,
                targets,
                noise_grid(float(weight.mean())),  # σ²/w is the noise of an observation
                sample_weight=weight,
                sums=sums,
                groups=groups,
            ).noise_variance
        variances = {first: relative * unit}
    else:
        variances = select_joint_noise(
            Phi, Y[:, 0], rows, groups, prior=unit, known=known, blocks=blocks
        )
    for name in [*noise][1:]:
        weight[rows[name]] *= variances[first] / variances[name]
    sums = sum_all(variances) if sums is None else sums

    def solve(factor: float) -> FullModel:
        raised = {name: factor * value for name, value in variances.items()}
        process = solve_projected_process(sums, raised[first] / unit)
        return FullModel(process, targets, weight, mean, scale, raised, center)

    return _with_raised_noise(solve, variances)


def _variance_of_derivatives(
    Phi: FloatArray, y: Float64Array, blocks: BlockSums | None
) -> Float64Array:
    """Return the prior variance (1,) that gives derivatives y (n, 1) theirs, as in Eq. (17).

    Musil et al. 2019. Most of the variance of the energies of one molecule is common to all. Rows
    (n, r) are those of all derivatives, or a sample; then `blocks` has the sums over all.
    """
    if blocks is None:
        parts = (Phi[start : start + 4096] for start in range(0, len(Phi), 4096))
        squares = sum(float(np.sum(np.square(part, dtype=np.float64))) for part in parts)
        labels = np.sum(y**2, axis=0)
    else:
        sums = [part for name in [*blocks.sums][1:] for part in blocks.sums[name]]
        squares = sum(float(np.trace(part.gram)) for part in sums)
        labels = np.array([sum(float(part.squares[0, 0]) for part in sums)])
    return labels / squares if squares > 0 and np.any(labels) else np.ones(1)


def fit_members(
    full: FullModel, Phi: FloatArray, y: FloatArray, counts: IntArray
) -> tuple[FullModel, MemberSolution, Float64Array]:
    """Solve all members on the basis of the full model, with its noise.

    Returns the full model, whose noise is raised if members need that; the solution, of targets
    divided by ``full.scale``; and the intercepts (T, N_R) in the units of y, the means of the
    target over the training set of each member.

    Parameters
    ----------
    full : FullModel
    Phi : (N, r) array
    y : (n, T) or (n, T, N_R) array
        The target, common to all members or each member's own; without its derivatives.
    counts : (N, N_R) array of int
        How often each row is in the training set of each member.
    """
    given = np.asarray(y, dtype=np.float64)
    given = given[:, :, None] if given.ndim == 2 else given
    n, center, scale = len(given), full.center[:, None], full.scale[:, None]
    own = (given - center) / scale
    times = full.weight[:n, None] * counts[:n]
    means = np.sum(own * (times / times.sum(axis=0))[:, None], axis=0) * full.centered
    constant = ~np.any(full.y, axis=0)[:, None]
    targets = np.repeat(full.y[:, :, None], counts.shape[1], axis=2)
    targets[:n] = np.where(constant, 0.0, own - means)

    def solve(factor: float) -> tuple[FullModel, MemberSolution]:
        model = full.with_raised_noise(factor)
        solution = solve_members(Phi, targets, counts, model.process, sample_weight=full.weight)
        return model, solution

    return *_with_raised_noise(solve, full.noise), center + scale * means


def fit_block_members(
    full: FullModel, blocks: BlockSums, counts: IntArray, columns: Float64Array
) -> tuple[FullModel, MemberSolution, Float64Array]:
    """Solve all members whose training sets are made of blocks, from the sums over these.

    Returns the same as `fit_members`.

    Parameters
    ----------
    full : FullModel
        Of one output, fitted to the same sums.
    blocks : BlockSums
    counts : (B, N_R) array of int
        How often each block is in the training set of each member.
    columns : (c, N_R) array
        The target of each member as a combination of the columns of the sums.
    """
    first, one = next(iter(blocks.sums)), np.eye(len(columns))[-1]
    ratios = {name: full.noise[first] / full.noise[name] for name in blocks.sums}
    scale, n_members = float(full.scale[0]), counts.shape[1]
    weights, means = np.empty((len(full.process.gram), 1, n_members)), np.empty((1, n_members))

    def solve(factor: float) -> tuple[FullModel, MemberSolution]:
        model = full.with_raised_noise(factor)
        for i, times in enumerate(counts.T):
            used = np.flatnonzero(times).tolist()
            products = sum(times[b] * blocks.sums[first][b].squares[-1] for b in used)
            means[0, i] = full.centered * (products @ columns[:, i]) / products[-1]
            target = (columns[:, i] - means[0, i] * one) / scale
            parts = [blocks.sums[name][b] for name in ratios for b in used]
            total = weighted_sum(parts, [r * times[b] for r in ratios.values() for b in used])
            process = solve_projected_process(total.combined(target), model.process.noise_variance)
            weights[:, 0, i] = process.weights[:, 0]
        return model, MemberSolution(weights, "sums of blocks")

    return *_with_raised_noise(solve, full.noise), full.center[:, None] + means


def _with_raised_noise(solve: Callable[[float], Result], noise: Mapping[str, float]) -> Result:
    """Solve with noise variances times one, or times more if they are lost in rounding."""
    text = ", ".join(f"{name} {value:.1e}" for name, value in noise.items())
    problem = f"The Gram matrix is numerically singular with these noise variances: {text}"
    remedy = "Check for labels much larger than all others, or set larger noise variances."
    for factor in (10.0 ** np.arange(_ATTEMPTS)).tolist():
        try:
            found = solve(factor)
        except NumericalError:
            continue
        if factor > 1:
            message = f"{problem}. All were multiplied by {factor:.0e}. {remedy}"
            warnings.warn(message, QualmsWarning, stacklevel=2)
        return found
    raise NumericalError(f"{problem}, and with variances {factor:.0e} times as large. {remedy}")
