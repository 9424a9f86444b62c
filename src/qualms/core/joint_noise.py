"""Two noise variances for observations of two kinds: energies and forces.

With whitened features Φ_E, Φ_F and targets y_E, y_F the model of both is

    A w = Φ_Eᵀy_E + ρ Φ_Fᵀy_F,      A = Φ_EᵀΦ_E + ρ Φ_FᵀΦ_F + σ_E²/s²,      ρ = σ_E²/σ_F²,

where s² is the prior variance of the weights. The Gram matrices of both kinds are kept apart, so
that a pair of variances costs one Cholesky factor. Rows belong to groups, such as structures, whose
energy and forces are left out together: for each part that is left out in turn, A without it is the
sum less what the part contributes.

The score of a pair of variances is ln(mean |z_E|) + ln(mean |z_F|), z being errors of what is left
out. It has no units, and neither kind can buy a small gain with a large loss of the other, however
many more forces there are than energies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from qualms.core.linalg import cholesky, cholesky_solve
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, NumericalError

#: Share of the groups in a part that is left out, and features up to which all parts are.
_FOLDS, _SMALL = 5, 800
#: Decades, relative to the mean square of the targets, that are tried: first guess and limits.
_START, _LOWEST, _HIGHEST = (-4.0, -3.0), -12.0, 1.0
#: Steps in decades of the search.
_STEPS = (1.0, 0.5, 0.25)
#: Rows that are summed over at once.
_BLOCK = 4096


@dataclass(frozen=True)
class JointNoise:
    """Noise variances of both kinds, and how good they are.

    Attributes
    ----------
    energies, forces : float
        σ_E² and σ_F², in the units of the targets squared.
    score : float
        What was minimised; 0 if there was nothing to choose.
    n_tried : int
        Pairs of variances that were tried.
    """

    energies: float
    forces: float
    score: float
    n_tried: int

    @property
    def ratio(self) -> float:
        """ρ = σ_E²/σ_F²: the weight of a force, if that of an energy is one."""
        return self.energies / self.forces


@dataclass(frozen=True)
class _Sums:
    """What least squares needs of some rows, kind by kind: ΦᵀΦ (r, r) and Φᵀy (r,)."""

    grams: tuple[Float64Array, Float64Array]
    projections: tuple[Float64Array, Float64Array]

    def plus(self, other: _Sums, sign: float = 1.0) -> _Sums:
        """Return the sums over more rows, or over fewer."""
        (a, b), (c, d) = self.grams, other.grams
        (e, f), (g, h) = self.projections, other.projections
        return _Sums((a + sign * c, b + sign * d), (e + sign * g, f + sign * h))

    def solve(self, energies: float, forces: float, prior: float) -> tuple[Float64Array, float]:
        """Return the weights (r,) and ln|A|."""
        ratio = energies / forces
        A = np.asfortranarray(self.grams[0] + ratio * self.grams[1])
        A[np.diag_indices_from(A)] += energies / prior
        factor = cholesky(A, what="ΦᵀΦ + σ²", overwrite=True)
        b = self.projections[0] + ratio * self.projections[1]
        return cholesky_solve(factor, b), 2 * float(np.sum(np.log(np.diag(factor))))


@dataclass(frozen=True)
class _Part:
    """Rows that are left out together, and the sums of all others."""

    rows: tuple[IntArray, IntArray]
    rest: _Sums


def select_joint_noise(
    Phi: FloatArray,
    y: Float64Array,
    is_force: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    groups: IntArray,
    *,
    prior: float,
    weight: Float64Array | None = None,
    criterion: str = "loo",
    energies: float | None = None,
    forces: float | None = None,
) -> JointNoise:
    """Choose σ_E² and σ_F².

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets, of zero mean in the prior.
    is_force : (N,) array of bool
        Kind of each row.
    groups : (N,) array of int
        Rows that are left out together.
    prior : float
        s², in the units of the energies squared.
    weight : (N,) array, optional
        Positive; the noise of a row is that of its kind divided by its weight.
    criterion : {"loo", "evidence"}
        Errors of groups left out, or the log marginal likelihood.
    energies, forces : float, optional
        A variance that is known.

    Returns
    -------
    JointNoise
    """
    if criterion not in ("loo", "evidence"):
        raise InputError("criterion", repr(criterion), '"loo" or "evidence"')
    if energies is not None and forces is not None:
        return JointNoise(energies, forces, 0.0, 0)
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    root = np.ones(len(y)) if weight is None else np.sqrt(weight)
    units = tuple(_mean_square((root * y)[rows]) for rows in kinds)
    if criterion == "evidence":
        score = _evidence(Phi, y, root, kinds, prior)
    else:
        score = _left_out_error(Phi, y, root, kinds, groups, prior)
    fixed = tuple(
        None if value is None else float(np.log10(value / unit))
        for value, unit in zip((energies, forces), units, strict=True)
    )

    def of_decades(decades: tuple[float, float]) -> float:
        try:
            return score(units[0] * 10 ** decades[0], units[1] * 10 ** decades[1])
        except NumericalError:  # so little noise that it is lost in rounding
            return np.inf

    best, least, n_tried = _pattern_search(of_decades, fixed)
    return JointNoise(units[0] * 10 ** best[0], units[1] * 10 ** best[1], least, n_tried)


def weighted_gram(Phi: FloatArray, weight: Float64Array) -> Float64Array:
    """Return Φᵀ diag(w) Φ, (r, r), for Phi (N, r) that a copy of might not fit beside."""
    gram = np.zeros((Phi.shape[1], Phi.shape[1]))
    for start in range(0, len(Phi), _BLOCK):
        block = Phi[start : start + _BLOCK] * np.sqrt(weight[start : start + _BLOCK, None])
        gram += block.T @ block
    return gram


def _mean_square(y: Float64Array) -> float:
    square = float(np.mean(y**2)) if len(y) else 0.0
    return square if square > 0 else 1.0


def _sums(
    Phi: FloatArray, y: Float64Array, root: Float64Array, kinds: tuple[IntArray, IntArray]
) -> _Sums:
    """Sum over rows, times √w, in blocks: a copy of all of them might not fit beside Phi."""
    r = Phi.shape[1]
    grams, projections = (np.zeros((r, r)), np.zeros((r, r))), (np.zeros(r), np.zeros(r))
    for i, rows in enumerate(kinds):
        for start in range(0, len(rows), _BLOCK):
            some = rows[start : start + _BLOCK]
            block = Phi[some] * root[some, None]
            grams[i][:] += block.T @ block
            projections[i][:] += block.T @ (root[some] * y[some])
    return _Sums(grams, projections)


def _parts(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, IntArray],
    groups: IntArray,
) -> list[_Part]:
    """Divide the groups into five parts, of which large models take one only."""
    codes = np.unique(groups, return_inverse=True)[1]
    n_groups = int(codes.max()) + 1
    n_folds = min(_FOLDS, n_groups)
    # Groups in a mixed order: neighbours in a file are often alike.
    fold = (np.random.default_rng(0).permutation(n_groups) % n_folds)[codes]
    chosen = range(n_folds if Phi.shape[1] <= _SMALL else 1)
    left_out = [(kinds[0][fold[kinds[0]] == k], kinds[1][fold[kinds[1]] == k]) for k in chosen]
    if len(left_out) == n_folds:
        of_parts = [_sums(Phi, y, root, rows) for rows in left_out]
        whole = reduce(_Sums.plus, of_parts)
        return [_Part(r, whole.plus(s, -1.0)) for r, s in zip(left_out, of_parts, strict=True)]
    rest = tuple(rows[fold[rows] != 0] for rows in kinds)
    return [_Part(left_out[0], _sums(Phi, y, root, (rest[0], rest[1])))]


def _left_out_error(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, IntArray],
    groups: IntArray,
    prior: float,
) -> Callable[[float, float], float]:
    """Return the function of (σ_E², σ_F²) that is to be minimised."""
    parts = _parts(Phi, y, root, kinds, groups)
    has = [any(len(part.rows[i]) for part in parts) for i in (0, 1)]

    def score(energies: float, forces: float) -> float:
        errors: tuple[list[Float64Array], list[Float64Array]] = ([], [])
        for part in parts:
            w, _ = part.rest.solve(energies, forces, prior)
            missed = root * np.abs(y - Phi @ w)
            for i in (0, 1):
                errors[i].append(missed[part.rows[i]])
        means = [np.mean(np.concatenate(errors[i])) for i in (0, 1) if has[i]]
        return float(np.sum(np.log(np.maximum(means, np.finfo(np.float64).tiny))))

    return score


def _evidence(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, IntArray],
    prior: float,
) -> Callable[[float, float], float]:
    """Return minus the log marginal likelihood, up to a constant.

    With W the weights 1 and ρ of the rows, |s²ΦΦᵀ + σ_E²W⁻¹| = σ_E^2N |W|⁻¹ |A| (s²/σ_E²)^r, and
    yᵀ(s²ΦΦᵀ + σ_E²W⁻¹)⁻¹y = (yᵀWy − bᵀA⁻¹b)/σ_E², b = ΦᵀWy.
    """
    sums = _sums(Phi, y, root, kinds)
    squares = [float(np.sum((root * y)[rows] ** 2)) for rows in kinds]
    n, r = len(y), Phi.shape[1]

    def score(energies: float, forces: float) -> float:
        ratio = energies / forces
        w, log_det = sums.solve(energies, forces, prior)
        b = sums.projections[0] + ratio * sums.projections[1]
        quadratic = (squares[0] + ratio * squares[1] - float(b @ w)) / energies
        log_det += (n - r) * math.log(energies) + r * math.log(prior)
        log_det -= len(kinds[1]) * math.log(ratio)
        return 0.5 * float(max(quadratic, 0.0) + log_det)

    return score


def _pattern_search(
    score: Callable[[tuple[float, float]], float], fixed: tuple[float | None, ...]
) -> tuple[tuple[float, float], float, int]:
    """Walk downhill on a grid of decades that becomes finer; numbers that are fixed stay."""
    start = [_START[i] if fixed[i] is None else float(fixed[i] or 0.0) for i in (0, 1)]
    best = (start[0], start[1])
    known = {best: score(best)}
    free = [i for i in (0, 1) if fixed[i] is None]
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for i in free:
                for sign in (-1, 1):
                    trial = list(best)
                    trial[i] = float(np.clip(best[i] + sign * step, _LOWEST, _HIGHEST))
                    where = (trial[0], trial[1])
                    if where not in known:
                        known[where] = score(where)
                    if known[where] < known[best]:
                        best, moved = where, True
    return best, known[best], len(known)
