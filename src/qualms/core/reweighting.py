"""Averages over a trajectory, re-weighted to every member of a committee of potentials.

A trajectory is sampled with a potential V̄. Member i would have sampled another distribution; with
h⁽ⁱ⁾ = β (V⁽ⁱ⁾ − V̄), the average of an observable a under it is (Imbalzano et al., J. Chem. Phys.
154, 074102, 2021)

    ⟨a⟩⁽ⁱ⁾ = ⟨a e^(−h⁽ⁱ⁾)⟩ / ⟨e^(−h⁽ⁱ⁾)⟩                 directly,
          ≈ ⟨a⟩ − (⟨a h⁽ⁱ⁾⟩ − ⟨a⟩ ⟨h⁽ⁱ⁾⟩)               by a cumulant expansion,

all averages on the right being over the trajectory. The second is exact if a and h are jointly
Gaussian, as sums over many atoms nearly are, and has an error that does not explode with the size
of the system, as that of the first does: the variance of e^(−h) grows like exp(Var h).

Both are functions of sums over frames. Sums over blocks of frames therefore give leave-one-block-
out replicates of both at no cost, and from these the errors of finite sampling: blocks longer than
the correlation time are independent, whatever the estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from qualms.core.typing import Float64Array, IntArray

#: A window of so many correlation times: Sokal's rule, a bias of e^−5 against noise.
_WINDOW = 5.0
#: Fewer blocks say too little about their own spread; more say hardly more, and take memory.
MIN_BLOCKS, MAX_BLOCKS = 8, 500


def statistical_inefficiency(series: Float64Array) -> Float64Array:
    """Return for each column how many frames count as one: g = 1 + 2 Σ_t ρ(t).

    Parameters
    ----------
    series : (n, k) array
        Values along a trajectory.

    Returns
    -------
    (k,) array
        At least 1, and 1 for a column that does not vary. The sum over the autocorrelation ρ ends
        at the first t ≥ 5 τ(t), where τ(t) = ½ + Σ_{s ≤ t} ρ(s): Sokal's automatic window.
    """
    n = len(series)
    size = next_fast_len(2 * n - 1, real=True)  # zeros at the end: nothing must wrap around
    found = np.ones(series.shape[1])
    for k, column in enumerate(series.T):
        deviations = column - column.mean()
        correlation = irfft(np.abs(rfft(deviations, size)) ** 2, size)[:n]
        if correlation[0] <= n * (1e-12 * np.abs(column).max()) ** 2:
            continue
        tau = np.cumsum(correlation / correlation[0]) - 0.5
        ends = np.flatnonzero(np.arange(n) >= _WINDOW * tau)
        end = int(ends[0]) if ends.size else n - 1
        found[k] = max(1.0, 2.0 * tau[end])
    return found


def block_length(n: int, inefficiency: float) -> int:
    """Return how many frames a block should have.

    The variance of blocks of length L is too small by about g/L of itself, and is known to
    √(2 L/n) of itself: their squares sum to the least at L ∝ (n g²)^(1/3).
    """
    best = round(float(np.cbrt(2.0 * n * inefficiency**2)))
    return max(1, min(max(best, n // MAX_BLOCKS), n // MIN_BLOCKS))


@dataclass(frozen=True)
class Replicates:
    """An estimate for every member, and what it would be without each of the blocks.

    Attributes
    ----------
    members : (T, N) array
        From all frames: T observables, N members.
    without : (B, T, N) array
        From all but one of B blocks.
    """

    members: Float64Array
    without: Float64Array

    def variance(self) -> Float64Array:
        """Return the variance (T, N), by finite sampling, of what each member finds."""
        return _jackknife(self.without)

    def variance_of_mean(self) -> Float64Array:
        """Return the variance (T,), by finite sampling, of the mean over the members."""
        return _jackknife(self.without.mean(axis=2))

    def variance_between(self, n_observables: int | None = None) -> Float64Array:
        """Return the variance (T,) between members, without what finite sampling adds to it.

        Members are averaged over the same frames, so most of the noise is common to them and
        cancels in their deviations from each other. The rest adds to their variance, on average by
        the variance between deviations of the replicates: `member_variance` is a quadratic form.

        Parameters
        ----------
        n_observables : int, optional
            As for `member_variance`.
        """
        B = len(self.without)
        noise = member_variance(self.without - self.without.mean(axis=0), n_observables)
        raised = (B - 1) / B * noise.sum(axis=0)
        variance: Float64Array = member_variance(self.members, n_observables) - raised
        return np.maximum(variance, 0.0)


def member_variance(members: Float64Array, n_observables: int | None = None) -> Float64Array:
    """Return the variance (…,) that one member has, given all of them: (…, N).

    If they are all pairs of one of n observables and one of p potentials, pairs share members, and
    their plain variance is too small. With a_ij = μ + r_i + c_j + e_ij, rows (means over j) have
    the variance σ_r² + σ_e²/p and columns σ_c² + σ_e²/n, and what remains has σ_e²: a pair has

        σ_r² + σ_c² + σ_e² = Var[rows] + Var[columns] + (1 − 1/n − 1/p) σ_e².

    Parameters
    ----------
    members : (…, N) array
    n_observables : int, optional
        n, if members are pairs: N = n p, those of one observable one after the other.
    """
    if n_observables is None:
        variance: Float64Array = members.var(axis=-1, ddof=1)
        return variance
    pairs = members.reshape(*members.shape[:-1], n_observables, -1)
    n, p = pairs.shape[-2:]
    rows, columns = pairs.mean(axis=-1), pairs.mean(axis=-2)
    rest = (
        pairs
        - rows[..., :, None]
        - columns[..., None, :]
        + pairs.mean(axis=(-2, -1))[..., None, None]
    )
    of_rest = np.sum(rest**2, axis=(-2, -1)) / ((n - 1) * (p - 1))
    total: Float64Array = rows.var(axis=-1, ddof=1) + columns.var(axis=-1, ddof=1)
    total += (1 - 1 / n - 1 / p) * of_rest
    return total


def _jackknife(without: Float64Array) -> Float64Array:
    """Return the variance of an estimate, given what it is without each of B blocks."""
    B = len(without)
    variance: Float64Array = (B - 1) * without.var(axis=0)
    return variance


def reweight_direct(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Average with the weights e^(−h) of each member.

    Parameters
    ----------
    observable : (n, T) array, or (n, T, N)
        Observables along the trajectory: common to all members, or of each.
    h : (n, N) array
        β (V⁽ⁱ⁾ − V̄), without units.
    length : int
        Frames in a block; those of the last, incomplete block join the one before.
    """
    w = _weights(h)
    numerator = _block_products(observable, w, length)
    denominator = _block_sums(w, length)[:, None, :]
    return Replicates(
        numerator.sum(axis=0) / denominator.sum(axis=0), _without(numerator) / _without(denominator)
    )


def reweight_cumulant(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Average by the cumulant expansion: ⟨a⟩ − cov(a, h) for each member.

    Parameters and result are those of `reweight_direct`.
    """
    count = _block_sums(np.ones((len(h), 1)), length)[:, :, None]  # (B, 1, 1)
    a = _block_sums(_as_members(observable), length)  # (B, T, 1 or N)
    # Shifted by a constant, products of large numbers do not cancel; the covariance is the same.
    centred = h - h.mean(axis=0)
    shifted = observable - observable.mean(axis=0)
    offset = _as_members(observable).mean(axis=0)
    a_shifted = a - count * offset
    ah = _block_products(shifted, centred, length)
    sums = (count, a_shifted, _block_sums(centred, length)[:, None, :], ah)

    def estimate(
        n: Float64Array, a: Float64Array, h: Float64Array, ah: Float64Array
    ) -> Float64Array:
        result: Float64Array = offset + a / n - (ah / n - (a / n) * (h / n))
        return result

    return Replicates(estimate(*(s.sum(axis=0) for s in sums)), estimate(*map(_without, sums)))


def neglected_term(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Return the next term of the expansion, ½ ⟨δa δh²⟩, for each observable and member.

    Parameters and result are those of `reweight_direct`.
    """
    deviations = h - h.mean(axis=0)
    a = observable - observable.mean(axis=0)
    sums = 0.5 * _block_products(a, deviations**2, length)
    count = _block_sums(np.ones((len(h), 1)), length)[:, :, None]
    return Replicates(sums.sum(axis=0) / len(h), _without(sums) / _without(count))


def effective_sample_size(h: Float64Array) -> Float64Array:
    """Return how many equally weighted frames the weights e^(−h) amount to: Kish's (Σw)²/Σw², (N,).

    It does not know of correlations between frames.
    """
    w = _weights(h)
    size: Float64Array = w.sum(axis=0) ** 2 / np.sum(w**2, axis=0)
    return size


def _weights(h: Float64Array) -> Float64Array:
    """Return e^(−h), 1 for the heaviest frame of a member, and for none of them zero."""
    w: Float64Array = np.maximum(np.exp(h.min(axis=0) - h), 1e-300)
    return w


def _without(sums: Float64Array) -> Float64Array:
    """Return the sum over all blocks but each one, (B, …), given their own sums.

    From those before and after it: the difference from the total would be rounding where one block
    has nearly all the weight.
    """
    before, after = np.zeros_like(sums), np.zeros_like(sums)
    np.cumsum(sums[:-1], axis=0, out=before[1:])
    np.cumsum(sums[:0:-1], axis=0, out=after[-2::-1])
    return before + after


def _as_members(observable: Float64Array) -> Float64Array:
    return observable if observable.ndim == 3 else observable[:, :, None]


def _starts(n: int, length: int) -> IntArray:
    """Return where blocks start."""
    starts: IntArray = length * np.arange(max(n // length, 1))
    return starts


def _block_sums(values: Float64Array, length: int) -> Float64Array:
    sums: Float64Array = np.add.reduceat(values, _starts(len(values), length), axis=0)
    return sums


def _block_products(observable: Float64Array, factors: Float64Array, length: int) -> Float64Array:
    """Return Σ a f over the frames of each block, for T observables and N members: (B, T, N)."""
    starts = _starts(len(factors), length).tolist()
    ends = [*starts[1:], len(factors)]
    script = "tki,ti->ki" if observable.ndim == 3 else "tk,ti->ki"
    return np.stack(
        [
            np.einsum(script, observable[a:b], factors[a:b], optimize=True)
            for a, b in zip(starts, ends, strict=True)
        ]
    )
