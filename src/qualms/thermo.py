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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.constants
from numpy.typing import ArrayLike
from scipy.fft import irfft, next_fast_len, rfft

from qualms.arrays import Float64Array, check_number, check_points
from qualms.errors import InputError, counted, unknown_choice, warn
from qualms.prediction import Prediction, decimals

__all__ = ["ThermalAverage", "reweight"]


def statistical_inefficiency(series: Float64Array) -> Float64Array:
    """Return the number of frames per independent one, g = 1 + 2 Σ_t ρ(t), of each column: (k,).

    It is 1 for a constant column. The sum over the autocorrelation ρ of the series (n, k) ends at
    the first t ≥ 5 τ(t), where τ(t) = ½ + Σ_{s ≤ t} ρ(s): Sokal's automatic window.
    """
    n = len(series)
    size = next_fast_len(2 * n - 1, real=True)  # zeros at the end: nothing must wrap around
    inefficiency = np.ones(series.shape[1])
    for k, column in enumerate(series.T):
        correlation = irfft(np.abs(rfft(column - column.mean(), size)) ** 2, size)[:n]
        if correlation[0] > n * (1e-12 * np.abs(column).max()) ** 2:
            tau = np.cumsum(correlation / correlation[0]) - 0.5
            beyond = np.arange(n) >= 5.0 * tau
            inefficiency[k] = max(1.0, 2.0 * tau[np.argmax(beyond) if beyond.any() else n - 1])
    return inefficiency


def block_length(n: int, inefficiency: float) -> int:
    """Return how many frames a block should have.

    The variance of blocks of length L is too small by about g/L of itself, and is known to
    √(2 L/n) of itself: their squares sum to the least at L ∝ (n g²)^(1/3). Fewer than 8 blocks do
    not determine their variance; more than 500 add little, and take memory.
    """
    best = round(float(np.cbrt(2.0 * n * inefficiency**2)))
    return max(1, min(max(best, n // 500), n // 8))


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

    def variance_between(self) -> Float64Array:
        """Return the variance (T,) between members, without the contribution of finite sampling.

        Members are averaged over the same frames, so most of the noise is common to them and
        cancels in their deviations from each other. The rest adds to their variance, on average by
        the variance between deviations of the replicates.
        """
        B = len(self.without)
        noise = (self.without - self.without.mean(axis=0)).var(axis=2, ddof=1)
        variance = self.members.var(axis=1, ddof=1) - (B - 1) / B * noise.sum(axis=0)
        return np.asarray(np.maximum(variance, 0.0))


def _replicates(estimate: Callable[..., Float64Array], *sums: Float64Array) -> Replicates:
    """Return a function of sums over all blocks, and over all but each, of sums (B, …) of each."""
    return Replicates(estimate(*(s.sum(axis=0) for s in sums)), estimate(*map(_without, sums)))


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
    sums = _block_sums(observable, w, length), _block_sums(np.ones((len(w), 1)), w, length)
    return _replicates(np.divide, *sums)


def reweight_cumulant(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Average by the cumulant expansion ⟨a⟩ − cov(a, h).

    Parameters
    ----------
    observable, h, length
        As in `reweight_direct`.
    """
    # Shifted by a constant, products of large numbers do not cancel; the covariance is the same.
    offset = observable.mean(axis=0)
    shifted, centred, ones = observable - offset, h - h.mean(axis=0), np.ones((len(h), 1))
    pairs = (ones, ones), (shifted, ones), (ones, centred), (shifted, centred)

    def estimate(
        n: Float64Array, a: Float64Array, h: Float64Array, ah: Float64Array
    ) -> Float64Array:
        average = offset.reshape(a.shape[-2], -1) + a / n
        return np.asarray(average - (ah / n - (a / n) * (h / n)))

    return _replicates(estimate, *(_block_sums(a, f, length) for a, f in pairs))


def neglected_term(observable: Float64Array, h: Float64Array, length: int) -> Replicates:
    """Return the next term of the expansion, ½ ⟨δa δh²⟩.

    Parameters
    ----------
    observable, h, length
        As in `reweight_direct`.
    """
    deviations = h - h.mean(axis=0)
    a = observable - observable.mean(axis=0)
    ones = np.ones((len(h), 1))
    sums = 0.5 * _block_sums(a, deviations**2, length)
    return _replicates(np.divide, sums, _block_sums(ones, ones, length))


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
    """Return the sum over all blocks but each one, (B, …), given the sums of each.

    From those before and after it: the difference from the total would be rounding where one block
    has nearly all the weight.
    """
    before, after = np.zeros_like(sums), np.zeros_like(sums)
    np.cumsum(sums[:-1], axis=0, out=before[1:])
    np.cumsum(sums[:0:-1], axis=0, out=after[-2::-1])
    return before + after


def _block_sums(observable: Float64Array, factors: Float64Array, length: int) -> Float64Array:
    """Return Σ a f over the frames of each of B blocks: (B, T, N).

    Parameters
    ----------
    observable : (n, T) or (n, T, N) array
    factors : (n, N) array
        Or (n, 1).
    length : int
        Frames in a block; those of the last, incomplete block join the one before.
    """
    n = len(factors)
    ends = [*range(0, max(n // length, 1) * length, length), n]
    script = "tki,ti->ki" if observable.ndim == 3 else "tk,ti->ki"
    return np.stack(
        [np.einsum(script, observable[a:b], factors[a:b], optimize=True) for a, b in pairwise(ends)]
    )


# Thermal averages with two uncertainties: of the model, and of finite sampling.
#: In eV/K.
BOLTZMANN = scipy.constants.physical_constants["Boltzmann constant in eV/K"][0]


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
        if max(model, sampling) <= 1e-13 * abs(float(self.mean)):  # rounding, or all is zero
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
) -> ThermalAverage:
    """Average over a trajectory, reweighted to every member of an ensemble.

    Parameters
    ----------
    energies : Prediction of shape (n,), or (n, N_R) array
        Calibrated potential energies of the n frames of the trajectory by all members.
    observable : (n,) or (n, T) array, or Prediction of that shape
        One number, or T of them, for each frame. A Prediction by the same members if it depends on
        the model itself. Members of another model are T numbers.
    temperature : float, optional
        In K, if energies are in eV.
    kT : float, optional
        Instead of the temperature: k_B T in the units of the energies.
    sampled : (n,) array, optional
        Energies of the potential that drove the simulation. By default the mean over the members.
    estimator : {"cea", "direct"}
        The cumulant expansion, which is robust; or exact weights, which require that the energies
        of members differ by little more than kT (for the whole system).

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
    if values.ndim == 3 and values.shape[2] != n_members:
        raise InputError(
            f"`observable` has {counted(values.shape[2], 'member')}, the energies have {n_members}."
            " For an observable of another model, give its members as several observables.",
            parameter="observable",
        )
    estimators = {"cea": reweight_cumulant, "direct": reweight_direct}
    if estimator not in estimators:
        raise unknown_choice("estimator", estimator, estimators)
    common = values.mean(axis=2) if values.ndim == 3 else values
    # A histogram has many similar bins: 32 of them suffice.
    T = common.shape[1]
    some = common[:, np.unique(np.linspace(0, T - 1, min(T, 32)).round().astype(int))]
    inefficiency = float(statistical_inefficiency(np.hstack([some, h])).max())
    length = block_length(n, inefficiency)
    averages = estimators[estimator](values, h, length)
    std_model = np.sqrt(averages.variance_between())
    std_sampling = np.sqrt(averages.variance_of_mean())
    sizes = effective_sample_size(h)
    problems = [*_few_frames(n / inefficiency, float(sizes.min()) / inefficiency, estimator)]
    if estimator == "cea":
        problems += _inaccurate(averages, values, neglected_term(values, h, length))
    for problem in problems:
        warn(problem)
    return ThermalAverage(
        prediction=Prediction(averages.members.reshape(*shape, -1)),
        std_model=std_model.reshape(shape),
        std_sampling=std_sampling.reshape(shape),
        sampled=common.mean(axis=0).reshape(shape),
        estimator=estimator,
        n_effective=sizes,
        problems=tuple(problems),
    )


def _values(name: str, values: Prediction | ArrayLike) -> Float64Array:
    """Return the members of a prediction, or an array as it is."""
    if isinstance(values, Prediction) and values.members is None:
        raise InputError(
            f"The prediction `{name}` has no members; reweighting needs them.", parameter=name
        )
    return check_points(name, values.members if isinstance(values, Prediction) else values)


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


def _observable(observable: Prediction | ArrayLike, n: int) -> tuple[Float64Array, tuple[int, ...]]:
    """Return the observable as (n, T), or (n, T, N) of members, and the shape of its average."""
    array = _values("observable", observable)
    shape = observable.shape if isinstance(observable, Prediction) else array.shape
    if not shape or shape[0] != n or len(shape) > 2:
        raise InputError(
            f"`observable` has the shape {shape}; for the energies of {n} frames it is ({n},) or "
            f"({n}, T).",
            parameter="observable",
        )
    n_observables = int(np.prod(shape[1:]))
    return array.reshape(n, n_observables, *array.shape[len(shape) :]), shape[1:]


def _few_frames(n: float, n_least: float, estimator: str) -> Iterator[str]:
    """Check the number of independent frames, in all and for the weights of a member."""
    if n < 20:
        yield (
            f"The trajectory has about {n:.0f} independent frames, too few to estimate the "
            "sampling error. Run longer."
        )
    elif estimator == "direct" and n_least < 20:
        yield (
            f"For a member the trajectory amounts to {n_least:.1f} independent frames of {n:.0f}: "
            "direct reweighting is unreliable. Use `estimator='cea'`, or simulate with single "
            "members."
        )


def _inaccurate(averages: Replicates, values: Float64Array, neglected: Replicates) -> Iterator[str]:
    """Check a cumulant expansion of values (n, T) or (n, T, N) by its first neglected term."""
    # The square of an estimate is biased by its variance; six times that is significant.
    squares = np.mean(neglected.members**2 - 6.0 * neglected.variance(), axis=1)
    error = np.sqrt(averages.variance_between() + averages.variance_of_mean())
    ratio = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(error, np.finfo(float).tiny)
    if ratio.max() > 0.3:
        yield (
            f"The first term that the cumulant expansion neglects is {ratio.max():.1g} of the "
            "uncertainty: members differ too much for it. Use `estimator='direct'` for a small "
            "system, or simulate with single members."
        )
    every = values.swapaxes(0, 1).reshape(values.shape[1], -1)
    low, high = every.min(axis=1)[:, None], every.max(axis=1)[:, None]
    slack = 0.1 * (high - low) + 1e-9 * np.abs(high)
    members = averages.members
    n_outside = int(np.sum(np.any((members < low - slack) | (members > high + slack), axis=0)))
    if n_outside:
        yield (
            f"{n_outside} of {members.shape[1]} members have an average beyond all values of the "
            "trajectory: they differ too much from the potential that was simulated."
        )
