"""How good noise variances of several kinds of observations are: energies, forces and virials.

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

The other score is minus the log marginal likelihood, to which groups do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy.optimize import brentq

from qualms.core.linalg import cholesky, cholesky_solve
from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray

#: Share of the groups in a part that is left out, and features up to which all parts are.
_FOLDS, _SMALL = 5, 800
#: Logarithms of errors that differ by less are those of the same error.
_SAME = 1e-9
#: Rows that are summed over at once.
_BLOCK = 4096


@dataclass(frozen=True)
class Observations:
    """Rows of all kinds.

    Attributes
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets.
    root : (N,) array
        √w: the noise of a row is that of its kind divided by its weight w.
    kinds : tuple of arrays of int
        Rows of each kind.
    groups : (N,) array of int
        Rows that are left out together.
    """

    Phi: FloatArray
    y: Float64Array
    root: Float64Array
    kinds: tuple[IntArray, ...]
    groups: IntArray

    def sums(self, kinds: tuple[IntArray, ...]) -> _Sums:
        """Sum over rows, times √w, in blocks: a copy of all of them might not fit beside Phi."""
        r = self.Phi.shape[1]
        grams = tuple(np.zeros((r, r)) for _ in kinds)
        projections = tuple(np.zeros(r) for _ in kinds)
        for gram, projection, rows in zip(grams, projections, kinds, strict=True):
            for some in _in_blocks(rows):
                block = self.Phi[some] * self.root[some, None]
                gram += block.T @ block
                projection += block.T @ (self.root[some] * self.y[some])
        return _Sums(grams, projections)

    def missed(self, rows: IntArray, w: Float64Array) -> Float64Array:
        """Return √weight |z| of some rows, by the weights w (r,) of a model without them."""
        found = [
            self.root[some] * np.abs(self.y[some] - self.Phi[some] @ w) for some in _in_blocks(rows)
        ]
        return np.concatenate([np.empty(0), *found])


def _in_blocks(rows: IntArray) -> list[IntArray]:
    """Return rows, some at a time."""
    return [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]


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


def group_means(values: Float64Array, groups: IntArray) -> Float64Array:
    """Return the mean of some values (n,) in each group that has any."""
    codes = np.unique(groups, return_inverse=True)[1]
    means: Float64Array = np.bincount(codes, weights=values) / np.maximum(np.bincount(codes), 1)
    return means


def _folds(has: BoolArray, n_folds: int) -> IntArray:
    """Divide groups into folds of one size, with each kind in all of them as evenly as possible.

    Folds are drawn first. Then groups with and without the rarest kind are exchanged until that is
    spread evenly, then those with and without the next, alike in the kinds before, and so on.

    Parameters
    ----------
    has : (n_groups, n_kinds) array of bool
        Which kinds are in which groups.
    n_folds : int
    """
    # Groups in a mixed order: neighbours in a file are often alike.
    place = np.random.default_rng(0).permutation(len(has))
    mixed = has[np.argsort(place)]
    fold = np.arange(len(has)) % n_folds
    settled = np.zeros(len(has), dtype=np.intp)  # a number for each set of kinds
    for kind in np.argsort(has.sum(axis=0), kind="stable"):
        _spread(fold, mixed[:, kind], settled, n_folds)
        settled = 2 * settled + mixed[:, kind]
    return fold[place]


def _spread(fold: IntArray, has: BoolArray, settled: IntArray, n_folds: int) -> None:
    """Exchange groups that are alike in what is settled, until each fold has as many of a kind.

    Large models leave out the first fold alone: there must be some in it, and in the rest.
    """
    while True:
        counts = np.bincount(fold[has], minlength=n_folds)
        most, least = int(np.argmax(counts)), int(np.argmin(counts))
        if counts[most] - counts[least] <= 1 and (counts[0] or counts.sum() < 2):
            return
        given = np.flatnonzero(has & (fold == most))
        taken = np.flatnonzero(~has & (fold == least))
        _, i, j = np.intersect1d(settled[given], settled[taken], return_indices=True)
        if not len(i):
            return
        fold[given[i[0]]], fold[taken[j[0]]] = least, most


def _parts(observed: Observations) -> list[_Part]:
    """Divide the groups into five parts, of which large models take one only."""
    kinds = observed.kinds
    codes = np.unique(observed.groups, return_inverse=True)[1]
    n_groups = int(codes.max()) + 1
    n_folds = min(_FOLDS, n_groups)
    has = np.zeros((n_groups, len(kinds)), dtype=bool)
    for k, rows in enumerate(kinds):
        has[codes[rows], k] = True
    fold = _folds(has, n_folds)[codes]
    chosen = range(n_folds if observed.Phi.shape[1] <= _SMALL else 1)
    left_out = [tuple(rows[fold[rows] == k] for rows in kinds) for k in chosen]
    if len(left_out) == n_folds:
        of_parts = [observed.sums(rows) for rows in left_out]
        whole = reduce(_Sums.plus, of_parts)
        return [_Part(r, whole.plus(s, -1.0)) for r, s in zip(left_out, of_parts, strict=True)]
    rest = tuple(rows[fold[rows] != 0] for rows in kinds)
    return [_Part(left_out[0], observed.sums(rest))]


def left_out_error(observed: Observations, prior: float) -> Callable[..., float]:
    """Return the function of the variances of all kinds that is to be minimised."""
    parts, groups = _parts(observed), observed.groups
    n_kinds = len(observed.kinds)
    judged = [np.concatenate([part.rows[k] for part in parts]) for k in range(n_kinds)]
    counts = np.array([len(np.unique(groups[rows])) for rows in judged])
    shares = counts / counts.max()

    def score(*variances: float) -> float:
        weights = [part.rest.solve(variances, prior)[0] for part in parts]
        total = 0.0
        for k, rows in enumerate(judged):
            pairs = zip(parts, weights, strict=True)
            missed = [observed.missed(part.rows[k], w) for part, w in pairs]
            errors = group_means(np.concatenate(missed), groups[rows])
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


def evidence(observed: Observations, prior: float) -> Callable[..., float]:
    """Return minus the log marginal likelihood, up to a constant; groups do not matter to it.

    With W the weights ρ_k of the rows, |s²ΦΦᵀ + σ_E²W⁻¹| = σ_E^2N |W|⁻¹ |A| (s²/σ_E²)^r, and
    yᵀ(s²ΦΦᵀ + σ_E²W⁻¹)⁻¹y = (yᵀWy − bᵀA⁻¹b)/σ_E², b = ΦᵀWy.
    """
    kinds, scaled = observed.kinds, observed.root * observed.y
    sums = observed.sums(kinds)
    squares = [np.array(np.sum(scaled[rows] ** 2)) for rows in kinds]
    n, r = observed.Phi.shape

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
