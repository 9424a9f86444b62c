"""A noise variance for each of several kinds of observations: energies, forces and virials.

With whitened features Φ_k and targets y_k of kinds k = E, F, V the model of all is

    A w = Σ_k ρ_k Φ_kᵀy_k,      A = Σ_k ρ_k Φ_kᵀΦ_k + σ_E²/s²,      ρ_k = σ_E²/σ_k²,

where s² is the prior variance of the weights. The Gram matrices of the kinds are kept apart, so
that variances cost one Cholesky factor. Rows belong to groups, such as structures, whose energy,
forces and virial are left out together: for each part that is left out in turn, A without it is
the sum less what the part contributes.

The score of variances is Σ_k g_k s_k, with z the errors of what is left out and, over the groups
that have kind k,

    s_k = min_s mean_g [2 ln(a_g + s) − ln s],      a_g = mean of |z_k| in group g,

minus the log likelihood of errors a with the density s/(a + s)², which falls off as slowly as a⁻².
If all errors grow by a factor, s_k grows by its logarithm. So the score has no units, and no kind
can buy a small gain with a large loss of another, however many more forces there are than energies.
Nor can a few groups: errors of one group in G that become ten times smaller are worth 2 ln(10)/G at
most, be they the largest of all. The logarithm of the mean of |z|, which is the same for a density
exp(−a/s)/s, would be decided by five compressed crystals among forty whose errors are a thousand
times those of the others. The mean of ln a would be decided by chance: one energy in a hundred is
right to a hundredth of the usual error.

Rows of one group err together, so that s_k is known as well as the number of groups that have the
kind allows: g_k is that number, relative to the largest. A kind that all groups have counts fully,
and the stress of one structure in forty next to nothing.

Variances are looked for in units of the usual square of a target, that is, of the median over
groups: a mean would be that of the few largest. They may be up to ten times the mean square, at
which a kind counts for nothing, as it should where one wrong label has made the others useless. The
marginal likelihood is one of Gaussians, for which a single group far from all others is reason
enough to call everything noise. It may do so up to three times the usual square, which is more than
labels have that are nothing but noise; where it wants more, a warning says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

import numpy as np
from scipy.optimize import brentq

from qualms.core.linalg import cholesky, cholesky_solve
from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray
from qualms.errors import InputError, NumericalError, QualmsWarning

#: Share of the groups in a part that is left out, and features up to which all parts are.
_FOLDS, _SMALL = 5, 800
#: Decades that are tried, relative to the usual square of the targets: first guess and lower limit.
_START, _LOWEST = (-4.0, -3.0, -3.0), -12.0
#: Upper limits: relative to the mean square, and to the usual one for the marginal likelihood.
_HIGHEST, _HIGHEST_OF_EVIDENCE = 1.0, 0.5
#: Steps in decades of the search.
_STEPS = (1.0, 0.5, 0.25)
#: What a step must gain for each decade: one per cent of the errors of one kind. Where the score is
#: flat, it would otherwise walk far for nothing.
_GAIN = 0.01
#: Logarithms of errors that differ by less are those of the same error.
_SAME = 1e-9
#: Rows that are summed over at once.
_BLOCK = 4096


@dataclass(frozen=True)
class JointNoise:
    """Noise variances of all kinds, and how good they are.

    Attributes
    ----------
    energies, forces : float
        σ_E² and σ_F², in the units of the targets squared.
    score : float
        What was minimised; 0 if there was nothing to choose.
    n_tried : int
        Sets of variances that were tried.
    virials : float, optional
        σ_V², likewise; None if there are no virials.
    """

    energies: float
    forces: float
    score: float
    n_tried: int
    virials: float | None = None

    @property
    def ratio(self) -> float:
        """ρ_F = σ_E²/σ_F²: the weight of a force, if that of an energy is one."""
        return self.energies / self.forces

    @property
    def virial_ratio(self) -> float:
        """ρ_V = σ_E²/σ_V²: that of a virial."""
        return self.ratio if self.virials is None else self.energies / self.virials

    def times(self, factor: float) -> JointNoise:
        """Return all variances times a factor, which leaves the ratios as they are."""
        virials = None if self.virials is None else factor * self.virials
        return replace(
            self, energies=factor * self.energies, forces=factor * self.forces, virials=virials
        )


@dataclass(frozen=True)
class _Sums:
    """What least squares needs of some rows, kind by kind: ΦᵀΦ (r, r) and Φᵀy (r,)."""

    grams: tuple[Float64Array, ...]
    projections: tuple[Float64Array, ...]

    def plus(self, other: _Sums, sign: float = 1.0) -> _Sums:
        """Return the sums over more rows, or over fewer."""
        grams = zip(self.grams, other.grams, strict=True)
        projections = zip(self.projections, other.projections, strict=True)
        return _Sums(
            tuple(a + sign * b for a, b in grams), tuple(a + sign * b for a, b in projections)
        )

    def solve(self, variances: Sequence[float], prior: float) -> tuple[Float64Array, float]:
        """Return the weights (r,) and ln|A|, for noise variances of all kinds."""
        A = np.asfortranarray(self.weighted(self.grams, variances))
        A[np.diag_indices_from(A)] += variances[0] / prior
        factor = cholesky(A, what="ΦᵀΦ + σ²", overwrite=True)
        w = cholesky_solve(factor, self.weighted(self.projections, variances))
        return w, 2 * float(np.sum(np.log(np.diag(factor))))

    @staticmethod
    def weighted(parts: Sequence[Float64Array], variances: Sequence[float]) -> Float64Array:
        """Return Σ_k ρ_k times what is given of each kind."""
        total = parts[0].copy()
        for part, variance in zip(parts[1:], variances[1:], strict=True):
            total += variances[0] / variance * part
        return total


@dataclass(frozen=True)
class _Part:
    """Rows that are left out together, and the sums of all others."""

    rows: tuple[IntArray, ...]
    rest: _Sums


def select_joint_noise(
    Phi: FloatArray,
    y: Float64Array,
    kind: IntArray | BoolArray,
    groups: IntArray,
    *,
    prior: float,
    weight: Float64Array | None = None,
    criterion: str = "loo",
    energies: float | None = None,
    forces: float | None = None,
    virials: float | None = None,
) -> JointNoise:
    """Choose σ_E², σ_F² and, if there are virials, σ_V².

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets, of zero mean in the prior.
    kind : (N,) array of int or bool
        Kind of each row: 0 for energies, 1 for forces, 2 for virials.
    groups : (N,) array of int
        Rows that are left out together.
    prior : float
        s², in the units of the energies squared.
    weight : (N,) array, optional
        Positive; the noise of a row is that of its kind divided by its weight.
    criterion : {"loo", "evidence"}
        Errors of groups left out, or the log marginal likelihood.
    energies, forces, virials : float, optional
        A variance that is known.

    Returns
    -------
    JointNoise
    """
    if criterion not in ("loo", "evidence"):
        raise InputError("criterion", repr(criterion), '"loo" or "evidence"')
    n_kinds = 3 if np.any(kind == 2) else 2
    given = (energies, forces, virials)[:n_kinds]
    kinds = tuple(np.flatnonzero(kind == k) for k in range(n_kinds))
    if all(value is not None for value in given):
        return _joint_noise([value or 0.0 for value in given], 0.0, 0)
    root = np.ones(len(y)) if weight is None else np.sqrt(weight)
    units = tuple(_usual_square(root[rows] * y[rows], groups[rows]) for rows in kinds)
    make_score = _evidence if criterion == "evidence" else _left_out_error
    score = make_score(Phi, y, root, kinds, groups, prior)
    fixed = [
        None if value is None else float(np.log10(value / unit))
        for value, unit in zip(given, units, strict=True)
    ]
    # Of what there is nothing, nothing can be found out.
    fixed = [_START[k] if not len(rows) else fixed[k] for k, rows in enumerate(kinds)]

    def of_decades(decades: Sequence[float]) -> float:
        try:
            return score(*(unit * 10**d for unit, d in zip(units, decades, strict=True)))
        except NumericalError:  # so little noise that it is lost in rounding
            return np.inf

    pairs = zip(kinds, units, strict=True)
    beyond = np.array([_decades_beyond(root[rows] * y[rows], unit) for rows, unit in pairs])
    by_evidence = criterion == "evidence"
    highest = np.full(n_kinds, _HIGHEST_OF_EVIDENCE) if by_evidence else _HIGHEST + beyond
    # Where the usual square and the mean square differ much, either may be the better guess.
    guess = np.array(_START[:n_kinds])
    starts = [np.minimum(guess + shift, highest) for shift in (0.0, beyond)]
    best, least, n_tried = _pattern_search(of_decades, starts, fixed, highest)
    found = [unit * 10**d for unit, d in zip(units, best, strict=True)]
    if by_evidence:
        _warn_of_edge(best, fixed)
    return _joint_noise(found, least, n_tried)


def _joint_noise(variances: Sequence[float], score: float, n_tried: int) -> JointNoise:
    energies, forces, *virials = variances
    return JointNoise(energies, forces, score, n_tried, virials[0] if virials else None)


def weighted_gram(Phi: FloatArray, weight: Float64Array) -> Float64Array:
    """Return Φᵀ diag(w) Φ, (r, r), for Phi (N, r) that a copy of might not fit beside."""
    gram = np.zeros((Phi.shape[1], Phi.shape[1]))
    for start in range(0, len(Phi), _BLOCK):
        block = Phi[start : start + _BLOCK] * np.sqrt(weight[start : start + _BLOCK, None])
        gram += block.T @ block
    return gram


def _decades_beyond(y: Float64Array, unit: float) -> float:
    """Return by how many decades the mean square is larger than the usual one, if it is."""
    return max(float(np.log10(np.mean(y**2) / unit)), 0.0) if np.any(y) else 0.0


def _warn_of_edge(decades: Sequence[float], fixed: Sequence[float | None]) -> None:
    """Tell of noises that the marginal likelihood would have liked to be even larger."""
    names = ("energies", "forces", "virials")
    pairs = zip(names, decades, fixed, strict=False)
    largest = [name for name, d, f in pairs if f is None and d >= _HIGHEST_OF_EVIDENCE]
    if largest:
        warnings.warn(
            f"By the marginal likelihood the noise of {' and '.join(largest)} is larger than they "
            "usually are themselves, so that little is learned from them. A few structures far "
            "from all others make it so: look at their labels, or choose noises by the errors of "
            "what is left out ('loo').",
            QualmsWarning,
            stacklevel=7,
        )


def _group_means(values: Float64Array, groups: IntArray) -> Float64Array:
    """Return the mean of some values (n,) in each group that has any."""
    codes = np.unique(groups, return_inverse=True)[1]
    means: Float64Array = np.bincount(codes, weights=values) / np.maximum(np.bincount(codes), 1)
    return means


def _usual_square(y: Float64Array, groups: IntArray) -> float:
    """Return the median over groups of the mean square about the median of all.

    Energies less their mean are all as large as what a few of them made of the mean. Groups without
    any deviation, such as crystals whose forces are zero by symmetry, do not count.
    """
    squares = _group_means((y - np.median(y)) ** 2, groups) if len(y) else y
    squares = squares[squares > 0]
    return float(np.median(squares)) if len(squares) else 1.0


def _sums(
    Phi: FloatArray, y: Float64Array, root: Float64Array, kinds: tuple[IntArray, ...]
) -> _Sums:
    """Sum over rows, times √w, in blocks: a copy of all of them might not fit beside Phi."""
    r = Phi.shape[1]
    grams = tuple(np.zeros((r, r)) for _ in kinds)
    projections = tuple(np.zeros(r) for _ in kinds)
    for gram, projection, rows in zip(grams, projections, kinds, strict=True):
        for start in range(0, len(rows), _BLOCK):
            some = rows[start : start + _BLOCK]
            block = Phi[some] * root[some, None]
            gram += block.T @ block
            projection += block.T @ (root[some] * y[some])
    return _Sums(grams, projections)


def _parts(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, ...],
    groups: IntArray,
) -> list[_Part]:
    """Divide the groups into five parts, of which large models take one only."""
    codes = np.unique(groups, return_inverse=True)[1]
    n_groups = int(codes.max()) + 1
    n_folds = min(_FOLDS, n_groups)
    # Groups in a mixed order: neighbours in a file are often alike.
    fold = (np.random.default_rng(0).permutation(n_groups) % n_folds)[codes]
    chosen = range(n_folds if Phi.shape[1] <= _SMALL else 1)
    left_out = [tuple(rows[fold[rows] == k] for rows in kinds) for k in chosen]
    if len(left_out) == n_folds:
        of_parts = [_sums(Phi, y, root, rows) for rows in left_out]
        whole = reduce(_Sums.plus, of_parts)
        return [_Part(r, whole.plus(s, -1.0)) for r, s in zip(left_out, of_parts, strict=True)]
    rest = tuple(rows[fold[rows] != 0] for rows in kinds)
    return [_Part(left_out[0], _sums(Phi, y, root, rest))]


def _left_out_error(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, ...],
    groups: IntArray,
    prior: float,
) -> Callable[..., float]:
    """Return the function of the variances of all kinds that is to be minimised."""
    parts = _parts(Phi, y, root, kinds, groups)
    judged = [np.concatenate([part.rows[k] for part in parts]) for k in range(len(kinds))]
    counts = np.array([len(np.unique(groups[rows])) for rows in judged])
    shares = counts / counts.max()

    def score(*variances: float) -> float:
        weights = [part.rest.solve(variances, prior)[0] for part in parts]
        total = 0.0
        for k, rows in enumerate(judged):
            pairs = zip(parts, weights, strict=True)
            missed = [_missed(Phi, y, root, part.rows[k], w) for part, w in pairs]
            errors = _group_means(np.concatenate(missed), groups[rows])
            total += float(shares[k]) * typical_log(errors)
        return total

    return score


def typical_log(errors: Float64Array) -> float:
    """Return min_s mean [2 ln(a + s) − ln s], for the errors a ≥ 0 of groups (G,); 0 of none.

    There the mean of a/(a + s) is one half. It falls with s, from one half or more at the smallest
    error to one half or less at the largest.
    """
    if not len(errors):
        return 0.0
    a = np.maximum(errors, np.finfo(np.float64).tiny)

    def excess(log_scale: float) -> float:
        return float(np.mean(1 / (1 + math.exp(log_scale) / a))) - 0.5

    low, high = math.log(a.min()), math.log(a.max())
    with np.errstate(over="ignore"):
        scale = low if high - low < _SAME else brentq(excess, low - _SAME, high + _SAME)
    return float(2 * np.mean(np.log(a + math.exp(scale))) - scale)


def _missed(
    Phi: FloatArray, y: Float64Array, root: Float64Array, rows: IntArray, w: Float64Array
) -> Float64Array:
    """Return √weight |z| of some rows, by the weights w (r,) of a model without them."""
    starts = range(0, len(rows), _BLOCK)
    blocks = (rows[start : start + _BLOCK] for start in starts)
    found = [root[some] * np.abs(y[some] - Phi[some] @ w) for some in blocks]
    return np.concatenate([np.empty(0), *found])


def _evidence(
    Phi: FloatArray,
    y: Float64Array,
    root: Float64Array,
    kinds: tuple[IntArray, ...],
    groups: IntArray,
    prior: float,
) -> Callable[..., float]:
    """Return minus the log marginal likelihood, up to a constant; groups do not matter to it.

    With W the weights ρ_k of the rows, |s²ΦΦᵀ + σ_E²W⁻¹| = σ_E^2N |W|⁻¹ |A| (s²/σ_E²)^r, and
    yᵀ(s²ΦΦᵀ + σ_E²W⁻¹)⁻¹y = (yᵀWy − bᵀA⁻¹b)/σ_E², b = ΦᵀWy.
    """
    sums = _sums(Phi, y, root, kinds)
    squares = [np.array(np.sum((root * y)[rows] ** 2)) for rows in kinds]
    n, r = len(y), Phi.shape[1]

    def score(*variances: float) -> float:
        energies = variances[0]
        w, log_det = sums.solve(variances, prior)
        b = sums.weighted(sums.projections, variances)
        quadratic = (float(sums.weighted(squares, variances)) - float(b @ w)) / energies
        log_det += (n - r) * math.log(energies) + r * math.log(prior)
        for rows, variance in zip(kinds[1:], variances[1:], strict=True):
            log_det -= len(rows) * math.log(energies / variance)
        return 0.5 * float(max(quadratic, 0.0) + log_det)

    return score


def _pattern_search(
    score: Callable[[Sequence[float]], float],
    starts: Sequence[Float64Array],
    fixed: Sequence[float | None],
    highest: Float64Array,
) -> tuple[tuple[float, ...], float, int]:
    """Walk downhill from the best start on a grid that becomes finer; what is fixed stays.

    With three of them the valley is long where all change alike, which leaves the weights of the
    kinds as they are and changes the prior alone: so that is a step, too.
    """
    first = [
        tuple(float(d) if f is None else f for d, f in zip(start, fixed, strict=True))
        for start in starts
    ]
    known = {where: score(where) for where in dict.fromkeys(first)}
    best = min(known, key=known.__getitem__)
    free = [i for i, value in enumerate(fixed) if value is None]
    moves = [np.eye(len(best))[i] for i in free]
    if len(free) > 2:
        moves.append(np.sum(moves, axis=0))
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for move, sign in product(moves, (-1, 1)):
                trial = np.where(move, np.clip(best + sign * step * move, _LOWEST, highest), best)
                where = tuple(trial.tolist())
                if where not in known:
                    known[where] = score(where)
                if known[where] < known[best] - _GAIN * step:
                    best, moved = where, True
    return best, known[best], len(known)
