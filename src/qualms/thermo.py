"""Thermal averages, reweighted to every member of an ensemble of potentials.

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

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.constants
from numpy.typing import ArrayLike
from scipy.fft import irfft, next_fast_len, rfft

from qualms.arrays import Float64Array, IntArray, check_number, check_points
from qualms.errors import InputError, QualmsWarning, counted
from qualms.prediction import Prediction, decimals

__all__ = ["ThermalAverage", "reweight"]

#: A window of so many correlation times: Sokal's rule, a bias of e^−5 against noise.
_WINDOW = 5.0
#: Fewer blocks do not determine their variance; more add little, and take memory.
MIN_BLOCKS, MAX_BLOCKS = 8, 500


def statistical_inefficiency(series: Float64Array) -> Float64Array:
    """Return the number of frames per independent one, g = 1 + 2 Σ_t ρ(t), of each column: (k,).

    It is 1 for a constant column. The sum over the autocorrelation ρ of the series (n, k) ends at
    the first t ≥ 5 τ(t), where τ(t) = ½ + Σ_{s ≤ t} ρ(s): Sokal's automatic window.
    """
    n = len(series)
    size = next_fast_len(2 * n - 1, real=True)  # zeros at the end: nothing must wrap around
    found = np.ones(series.shape[1])
    for k, column in enumerate(series.T):
        correlation = irfft(np.abs(rfft(column - column.mean(), size)) ** 2, size)[:n]
        if correlation[0] > n * (1e-12 * np.abs(column).max()) ** 2:
            tau = np.cumsum(correlation / correlation[0]) - 0.5
            beyond = np.arange(n) >= _WINDOW * tau
            found[k] = max(1.0, 2.0 * tau[np.argmax(beyond) if beyond.any() else n - 1])
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
    """Estimates of T observables for N members: (T, N), and without each of B blocks: (B, T, N)."""

    members: Float64Array
    without: Float64Array

    def variance(self) -> Float64Array:
        """Return the sampling variance (T, N) of the estimate of each member: the jackknife."""
        return np.asarray((len(self.without) - 1) * self.without.var(axis=0))

    def variance_of_mean(self) -> Float64Array:
        """Return the sampling variance (T,) of the mean over the members."""
        return np.asarray((len(self.without) - 1) * self.without.mean(axis=2).var(axis=0))

    def variance_between(self, n_observables: int | None = None) -> Float64Array:
        """Return the variance (T,) between members, without the contribution of finite sampling.

        Members are averaged over the same frames, so most of the noise is common to them and
        cancels in their deviations from each other. The rest adds to their variance, on average by
        the variance between deviations of the replicates: `member_variance` is a quadratic form.
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
    the variance σ_r² + σ_e²/p and columns σ_c² + σ_e²/n, and the rest σ_e²: a pair has

        σ_r² + σ_c² + σ_e² = Var[rows] + Var[columns] + (1 − 1/n − 1/p) σ_e².

    `n_observables` is n, if members are such pairs, N = n p, those of one observable after another.
    """
    if n_observables is None:
        return np.asarray(members.var(axis=-1, ddof=1))
    pairs = members.reshape(*members.shape[:-1], n_observables, -1)
    n, p = pairs.shape[-2:]
    rows, columns = pairs.mean(axis=-1), pairs.mean(axis=-2)
    rest = pairs - rows[..., :, None] - columns[..., None, :]
    rest += pairs.mean(axis=(-2, -1), keepdims=True)
    of_rest = np.sum(rest**2, axis=(-2, -1)) / ((n - 1) * (p - 1))
    total = rows.var(axis=-1, ddof=1) + columns.var(axis=-1, ddof=1)
    return np.asarray(total + (1 - 1 / n - 1 / p) * of_rest)


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
    denominator = _block_sums(w[:, None, :], length)
    return Replicates(
        numerator.sum(axis=0) / denominator.sum(axis=0), _without(numerator) / _without(denominator)
    )


def reweight_cumulant(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Average by the cumulant expansion ⟨a⟩ − cov(a, h), like `reweight_direct`."""
    count = _block_sums(np.ones((len(h), 1, 1)), length)  # (B, 1, 1)
    # Shifted by a constant, products of large numbers do not cancel; the covariance is the same.
    centred, shifted = h - h.mean(axis=0), observable - observable.mean(axis=0)
    offset = _as_members(observable).mean(axis=0)
    a_sums = _block_sums(_as_members(shifted), length)  # (B, T, 1 or N)
    h_sums = _block_sums(centred[:, None, :], length)
    sums = (count, a_sums, h_sums, _block_products(shifted, centred, length))

    def estimate(
        n: Float64Array, a: Float64Array, h: Float64Array, ah: Float64Array
    ) -> Float64Array:
        return np.asarray(offset + a / n - (ah / n - (a / n) * (h / n)))

    return Replicates(estimate(*(s.sum(axis=0) for s in sums)), estimate(*map(_without, sums)))


def neglected_term(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Return the next term of the expansion, ½ ⟨δa δh²⟩, like `reweight_direct`."""
    deviations = h - h.mean(axis=0)
    a = observable - observable.mean(axis=0)
    sums = 0.5 * _block_products(a, deviations**2, length)
    count = _block_sums(np.ones((len(h), 1, 1)), length)
    return Replicates(sums.sum(axis=0) / len(h), _without(sums) / _without(count))


def effective_sample_size(h: Float64Array) -> Float64Array:
    """Return how many equally weighted frames the weights e^(−h) amount to: Kish's (Σw)²/Σw², (N,).

    It neglects correlations between frames.
    """
    w = _weights(h)
    return np.asarray(w.sum(axis=0) ** 2 / np.sum(w**2, axis=0))


def _weights(h: Float64Array) -> Float64Array:
    """Return e^(−h), 1 for the heaviest frame of a member, and for none of them zero."""
    return np.asarray(np.maximum(np.exp(h.min(axis=0) - h), 1e-300))


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
    return np.asarray(length * np.arange(max(n // length, 1)))


def _block_sums(values: Float64Array, length: int) -> Float64Array:
    return np.asarray(np.add.reduceat(values, _starts(len(values), length), axis=0))


def _block_products(observable: Float64Array, factors: Float64Array, length: int) -> Float64Array:
    """Return Σ a f over the frames of each block, for T observables and N members: (B, T, N)."""
    ends = [*_starts(len(factors), length).tolist(), len(factors)]
    script = "tki,ti->ki" if observable.ndim == 3 else "tk,ti->ki"
    return np.stack(
        [np.einsum(script, observable[a:b], factors[a:b], optimize=True) for a, b in pairwise(ends)]
    )


# Thermal averages with two uncertainties: of the model, and of finite sampling.
#: In eV/K.
BOLTZMANN = scipy.constants.physical_constants["Boltzmann constant in eV/K"][0]
_ESTIMATORS = {"cea": reweight_cumulant, "direct": reweight_direct}
#: Smallest number of independent frames, for a member or in all.
_FEW = 20.0
#: Largest ratio of the first neglected term of the expansion to the uncertainty.
_LARGE = 0.3
#: Correlation times are computed for so many observables at most.
_SOME = 32
#: Uncertainties below this fraction of the mean are rounding.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class ThermalAverage:
    """A thermal average and its uncertainties.

    Attributes
    ----------
    prediction : Prediction
        The average of every member. Its standard deviation contains sampling noise, which
        `std_model` does not.
    std_model, std_sampling : arrays
        Uncertainty due to the potential, independent of the length of the run; and due to finite
        sampling, which decreases with the square root of the length.
    sampled : array
        The plain average over the trajectory; if the observable depends on the model, of the mean
        over its members.
    estimator : str
        "cea" or "direct".
    n_effective : (N,) array
        Effective number of frames for the weights of each member.
    problems : tuple of str
        Reasons why the result is not reliable.
    """

    prediction: Prediction
    std_model: Float64Array
    std_sampling: Float64Array
    sampled: Float64Array
    estimator: str
    n_effective: Float64Array
    problems: tuple[str, ...]

    @property
    def mean(self) -> Float64Array:
        """The average: mean over the members."""
        return self.prediction.mean

    @property
    def std(self) -> Float64Array:
        """Both uncertainties in quadrature."""
        return np.hypot(self.std_model, self.std_sampling)

    def __str__(self) -> str:
        if self.mean.ndim:
            return repr(self)
        model, sampling = float(self.std_model), float(self.std_sampling)
        if max(model, sampling) <= _ROUNDING * abs(float(self.mean)):  # or all is zero
            return f"{self.mean:.6g} ± 0 (model) ± 0 (sampling)"
        digits = decimals(model, sampling)
        errors = f"{model:.{digits}f} (model) ± {sampling:.{digits}f} (sampling)"
        return f"{self.mean:.{digits}f} ± {errors}"

    @property
    def reliable(self) -> bool:
        """Whether there are no `problems`."""
        return not self.problems


def reweight(
    energies: Prediction | ArrayLike,
    observable: Prediction | ArrayLike,
    *,
    temperature: float | None = None,
    kT: float | None = None,
    sampled: ArrayLike | None = None,
    estimator: str = "cea",
    paired: bool = True,
) -> ThermalAverage:
    """Average over a trajectory, reweighted to every member of an ensemble.

    Parameters
    ----------
    energies : Prediction of shape (n,), or (n, N_R) array
        Calibrated potential energies of the n frames of the trajectory by all members.
    observable : (n,) or (n, T) array, or Prediction of that shape
        One number, or T of them, for each frame. A Prediction if it depends on a model itself.
    temperature : float, optional
        In K, if energies are in eV.
    kT : float, optional
        Instead of the temperature: k_B T in the units of the energies.
    sampled : (n,) array, optional
        Energies of the potential that drove the simulation. By default the mean over the members.
    estimator : {"cea", "direct"}
        The cumulant expansion, which is robust; or exact weights, which require that the energies
        of members differ by little more than kT (for the whole system).
    paired : bool
        Whether the members of a Prediction `observable` are those of `energies`. If not, all pairs
        are taken.

    Warns
    -----
    QualmsWarning
        If the run is too short, or reweighting is unreliable.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=4000)  # a harmonic oscillator, k = kT = 1
    >>> k = np.linspace(0.9, 1.1, 8)  # force constants of the members
    >>> average = reweight(0.5 * k * x[:, None] ** 2, x**2, kT=1.0)
    >>> print(average)
    0.997 ± 0.067 (model) ± 0.022 (sampling)
    """
    potentials = _values("energies", energies)
    if potentials.ndim != 2 or min(potentials.shape) < 2:
        raise InputError(
            f"`energies` has the shape {potentials.shape}; use (n, N_R), with at least 2 frames "
            "and 2 members.",
            parameter="energies",
        )
    n, n_members = potentials.shape
    beta = 1.0 / _thermal_energy(temperature, kT)
    drove = potentials.mean(axis=1)
    if sampled is not None:
        drove = check_points("sampled", sampled, (n,))
    h = beta * (potentials - drove[:, None])
    values, shape = _observable(observable, n)
    n_observables = None if paired or values.ndim < 3 else values.shape[2]
    if values.ndim == 3:
        values, h = _in_pairs(values, h, paired)
    if estimator not in _ESTIMATORS:
        raise InputError(
            f"There is no `estimator` {estimator!r}; use 'cea' or 'direct'.", parameter="estimator"
        )
    common = values.mean(axis=2) if values.ndim == 3 else values
    inefficiency = _inefficiency(common, h[:, :n_members])
    length = block_length(n, inefficiency)
    found = _ESTIMATORS[estimator](values, h, length)
    std_model = np.sqrt(found.variance_between(n_observables))
    std_sampling = np.sqrt(found.variance_of_mean())
    sizes = effective_sample_size(h[:, :n_members])
    n_all, n_least = n / inefficiency, float(sizes.min()) / inefficiency
    problems = tuple(_problems(estimator, found, values, h, length, n_all, n_least))
    for problem in problems:
        warnings.warn(problem, QualmsWarning, stacklevel=2)
    return ThermalAverage(
        prediction=Prediction(found.members.reshape(*shape, -1)),
        std_model=std_model.reshape(shape),
        std_sampling=std_sampling.reshape(shape),
        sampled=common.mean(axis=0).reshape(shape),
        estimator=estimator,
        n_effective=sizes,
        problems=problems,
    )


def _values(name: str, given: Prediction | ArrayLike) -> Float64Array:
    """Return the members of a prediction, or an array as it is."""
    if isinstance(given, Prediction) and given.members is None:
        raise InputError(
            f"The prediction `{name}` has no members; reweighting needs them.", parameter=name
        )
    return check_points(name, given.members if isinstance(given, Prediction) else given)


def _thermal_energy(temperature: float | None, kT: float | None) -> float:
    if (temperature is None) == (kT is None):
        raise InputError(
            "Give one of `temperature` and `kT`; there is "
            f"{'neither of them' if kT is None else 'a value for both'}.",
            parameter="temperature",
        )
    if kT is not None:
        return check_number("kT", kT, 0, strict=True)
    return BOLTZMANN * check_number("temperature", temperature, 0, strict=True)


def _observable(given: Prediction | ArrayLike, n: int) -> tuple[Float64Array, tuple[int, ...]]:
    """Return the observable as (n, T), or (n, T, N) of members, and the shape of its average."""
    array = _values("observable", given)
    shape = given.shape if isinstance(given, Prediction) else array.shape
    if not shape or shape[0] != n or len(shape) > 2:
        raise InputError(
            f"`observable` has the shape {shape}; for the energies of {n} frames it is ({n},) or "
            f"({n}, T).",
            parameter="observable",
        )
    n_observables = int(np.prod(shape[1:]))
    return array.reshape(n, n_observables, *array.shape[len(shape) :]), shape[1:]


def _in_pairs(
    values: Float64Array, h: Float64Array, paired: bool
) -> tuple[Float64Array, Float64Array]:
    """Return members of the observable (n, T, N) and of the potential (n, N) that go together."""
    n_observable, n_potential = values.shape[2], h.shape[1]
    if not paired:
        return np.repeat(values, n_potential, axis=2), np.tile(h, (1, n_observable))
    if n_observable != n_potential:
        raise InputError(
            f"`observable` has {counted(n_observable, 'member')}, the energies have {n_potential}. "
            "Use `paired=False` for an observable of another model.",
            parameter="observable",
        )
    return values, h


def _inefficiency(observables: Float64Array, h: Float64Array) -> float:
    """Return the number of frames per independent frame, for the slowest of all series."""
    # A histogram has many similar bins: some of them suffice.
    T = observables.shape[1]
    some = observables[:, np.unique(np.linspace(0, T - 1, min(T, _SOME)).round().astype(int))]
    return float(statistical_inefficiency(np.hstack([some, h])).max())


def _problems(
    estimator: str,
    found: Replicates,
    values: Float64Array,
    h: Float64Array,
    length: int,
    n: float,
    n_least: float,
) -> Iterator[str]:
    """Check for too few independent frames, n or for a member, and the accuracy of an expansion."""
    if n < _FEW:
        yield (
            f"The trajectory has about {n:.0f} independent frames, too few to estimate the "
            "sampling error. Run longer."
        )
    if estimator == "direct":
        if n_least < _FEW <= n:
            other = reweight_cumulant(values, h, length)
            works = _neglected(other, values, h, length) <= _LARGE
            works = works and not _n_outside(other.members, values)
            yield (
                f"For a member the trajectory amounts to {n_least:.1f} independent frames of "
                f"{n:.0f}: direct reweighting is unreliable. {_instead('cea', works)}"
            )
        return
    ratio = _neglected(found, values, h, length)
    if ratio > _LARGE:
        yield (
            f"The first term that the cumulant expansion neglects is {ratio:.1g} of the "
            "uncertainty: members differ too much for it. "
            f"{_instead('direct', n_least >= _FEW)}"
        )
    n_outside = _n_outside(found.members, values)
    if n_outside:
        yield (
            f"{n_outside} of {found.members.shape[1]} members have an average beyond all values of "
            "the trajectory: they differ too much from the potential that was simulated."
        )


def _instead(estimator: str, works: bool) -> str:
    """Return the remedy for an estimator that fails."""
    if works:
        return f"Use estimator={estimator!r}."
    return (
        f"estimator={estimator!r} would fail, too: train a model whose members agree better, or "
        "simulate with single members."
    )


def _neglected(found: Replicates, values: Float64Array, h: Float64Array, length: int) -> float:
    """Return the first neglected term of an expansion, in units of the uncertainty."""
    neglected = neglected_term(values, h, length)
    # The square of an estimate is biased by its variance; six times that is significant.
    squares = np.mean(neglected.members**2 - 6.0 * neglected.variance(), axis=1)
    error = np.sqrt(found.variance_between() + found.variance_of_mean())
    ratio = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(error, np.finfo(float).tiny)
    return float(ratio.max())


def _n_outside(averages: Float64Array, values: Float64Array) -> int:
    """Return how many members have averages (T, N) beyond all values of the trajectory."""
    every = values.swapaxes(0, 1).reshape(values.shape[1], -1)
    low, high = every.min(axis=1)[:, None], every.max(axis=1)[:, None]
    slack = 0.1 * (high - low) + 1e-9 * np.abs(high)
    return int(np.sum(np.any((averages < low - slack) | (averages > high + slack), axis=0)))
