"""Thermal averages with two error bars: of the model, and of finite sampling.

A simulation with a machine-learned potential has two errors. It is finite, and longer runs help.
Its potential is wrong, and they do not. Members of a committee are potentials that could as well be
right, so the second is the spread of the averages that simulations with each of them would give.
Those need not be run: the one trajectory there is can be re-weighted. Imbalzano et al., J. Chem.
Phys. 154, 074102 (2021).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import scipy.constants
from numpy.typing import ArrayLike

from qualms.core.checks import check_number, check_points
from qualms.core.reweighting import (
    Replicates,
    block_length,
    effective_sample_size,
    neglected_term,
    reweight_cumulant,
    reweight_direct,
    statistical_inefficiency,
)
from qualms.core.typing import Float64Array
from qualms.errors import InputError, QualmsWarning
from qualms.prediction import Prediction, decimals

__all__ = ["ThermalAverage", "reweight"]

#: In eV/K.
BOLTZMANN = scipy.constants.physical_constants["Boltzmann constant in eV/K"][0]
_ESTIMATORS = {"cea": reweight_cumulant, "direct": reweight_direct}
#: Fewer independent frames than these, for a member or in all, and averages are guesses.
_FEW = 20.0
#: If the first neglected term is a larger part of the error bar than this, the expansion fails.
_LARGE = 0.3
#: Correlation times are found for so many observables at most.
_SOME = 32
#: Errors that are a smaller part of a mean are those of arithmetic.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class ThermalAverage:
    """A thermal average, and how wrong it may be.

    Attributes
    ----------
    prediction : Prediction
        What every member would find, from this trajectory. Its spread holds some noise of sampling,
        which `std_model` does not.
    std_model : array
        Error because the potential is not the right one: does not shrink in longer runs.
    std_sampling : array
        Error because the run is finite: shrinks with the square root of its length.
    sampled : array
        The plain average over the trajectory; if the observable depends on the model, of the mean
        over its members.
    estimator : str
        How it was re-weighted.
    n_frames : int
    inefficiency : float
        How many frames count as one independent one.
    n_effective : (N,) array
        How many frames the weights of each member amount to, of `n_frames`.
    problems : tuple of str
        Why the result is not to be trusted; empty if it is.
    """

    prediction: Prediction
    std_model: Float64Array
    std_sampling: Float64Array
    sampled: Float64Array
    estimator: str
    n_frames: int
    inefficiency: float
    n_effective: Float64Array
    problems: tuple[str, ...]

    @property
    def mean(self) -> Float64Array:
        """The average: mean over the members."""
        return self.prediction.mean

    @property
    def std(self) -> Float64Array:
        """Both errors together."""
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
        """Whether nothing speaks against the result."""
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
    """Average over a trajectory as every member of a committee would see it.

    Parameters
    ----------
    energies : Prediction of shape (n,), or (n, N_R) array
        Potential energies of the n frames of the trajectory: what every member says, calibrated.
    observable : (n,) or (n, T) array, or Prediction of that shape
        What is to be averaged: one number, or T of them, for each frame. A Prediction if it depends
        on a model itself, as the energy does.
    temperature : float, optional
        In K, if energies are in eV.
    kT : float, optional
        Instead of the temperature: k_B T in the units of the energies.
    sampled : (n,) array, optional
        Energies of the potential that drove the simulation. By default the mean over the members.
    estimator : {"cea", "direct"}
        The cumulant expansion, robust; or exact weights, for which the members must be so close to
        each other (in units of kT, for the whole system) that the frames still are typical for all.
    paired : bool
        Whether members of a Prediction `observable` are those of `energies`, in this order, as
        predictions of one model are. If not, all pairs are taken.

    Returns
    -------
    ThermalAverage

    Warns
    -----
    QualmsWarning
        If the run is too short, or re-weighting is unreliable.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=4000)  # a harmonic oscillator, k = kT = 1
    >>> k = np.linspace(0.9, 1.1, 8)  # what members think of its force constant
    >>> average = reweight(0.5 * k * x[:, None] ** 2, x**2, kT=1.0)
    >>> print(average)
    0.997 ± 0.067 (model) ± 0.022 (sampling)
    """
    potentials = _members("energies", energies, 1)
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
        raise InputError("estimator", repr(estimator), "'cea' or 'direct'")
    common = values.mean(axis=2) if values.ndim == 3 else values
    inefficiency = _inefficiency(common, h[:, :n_members])
    length = block_length(n, inefficiency)
    found = _ESTIMATORS[estimator](values, h, length)
    std_model = np.sqrt(found.variance_between(n_observables))
    std_sampling = np.sqrt(found.variance_of_mean())
    sizes = effective_sample_size(h[:, :n_members])
    n_all, n_least = n / inefficiency, float(sizes.min()) / inefficiency
    check = _problems_of_direct if estimator == "direct" else _problems_of_cumulants
    problems = check(found, values, h, length, n_all, n_least)
    for problem in problems:
        warnings.warn(problem, QualmsWarning, stacklevel=2)
    return ThermalAverage(
        prediction=Prediction(found.members.reshape(*shape, -1)),
        std_model=std_model.reshape(shape),
        std_sampling=std_sampling.reshape(shape),
        sampled=common.mean(axis=0).reshape(shape),
        estimator=estimator,
        n_frames=n,
        inefficiency=inefficiency,
        n_effective=sizes,
        problems=problems,
    )


def _members(name: str, given: Prediction | ArrayLike, n_axes: int) -> Float64Array:
    """Return members as an array with so many axes before the last, with at least 2 frames."""
    array = given.members if isinstance(given, Prediction) else check_points(name, given)
    if array.ndim != n_axes + 1 or len(array) < 2 or array.shape[-1] < 2:
        expected = "(n, N_R): at least 2 frames and 2 members"
        raise InputError(name, f"shape {array.shape}", expected)
    return array


def _thermal_energy(temperature: float | None, kT: float | None) -> float:
    if (temperature is None) == (kT is None):
        given = "neither" if kT is None else "both"
        raise InputError("temperature", f"{given} of temperature and kT", "one of them")
    if kT is not None:
        return check_number("kT", kT, 0, strict=True)
    return BOLTZMANN * check_number("temperature", temperature, 0, strict=True)


def _observable(given: Prediction | ArrayLike, n: int) -> tuple[Float64Array, tuple[int, ...]]:
    """Return the observable as (n, T), or (n, T, N) of members, and the shape of its average."""
    if isinstance(given, Prediction):
        array, shape = given.members, given.shape
    else:
        array = check_points("observable", given)
        shape = array.shape
    if not shape or shape[0] != n or len(shape) > 2:
        expected = f"({n},) or ({n}, T), as many as energies"
        raise InputError("observable", f"shape {shape}", expected)
    if isinstance(given, Prediction):
        return array.reshape(n, -1, given.n_members), shape[1:]
    return array.reshape(n, -1), shape[1:]


def _in_pairs(
    values: Float64Array, h: Float64Array, paired: bool
) -> tuple[Float64Array, Float64Array]:
    """Return members of the observable (n, T, N) and of the potential (n, N) that go together."""
    n_observable, n_potential = values.shape[2], h.shape[1]
    if paired and n_observable != n_potential:
        raise InputError(
            "observable",
            f"{n_observable} members",
            f"{n_potential}, those of the energies",
            "If it is of another model, say paired=False.",
        )
    if paired:
        return values, h
    return np.repeat(values, n_potential, axis=2), np.tile(h, (1, n_observable))


def _inefficiency(observables: Float64Array, h: Float64Array) -> float:
    """Return how many frames count as one, for what varies most slowly."""
    # Bins of a histogram are many and alike: some of them will do.
    T = observables.shape[1]
    some = observables[:, np.unique(np.linspace(0, T - 1, min(T, _SOME)).round().astype(int))]
    return float(statistical_inefficiency(np.hstack([some, h])).max())


def _problems_of_direct(
    found: Replicates, values: Float64Array, h: Float64Array, length: int, n: float, n_least: float
) -> tuple[str, ...]:
    """Say whether independent frames, n or for a member, are too few."""
    short = _too_short(n)
    if short or n_least >= _FEW:
        return short
    other = reweight_cumulant(values, h, length)
    works = _neglected(other, values, h, length) <= _LARGE and not _outside(other.members, values)
    return (
        f"For a member the trajectory amounts to {n_least:.1f} independent frames of {n:.0f}: "
        f"direct re-weighting is unreliable. {_instead('cea', works)}",
    )


def _problems_of_cumulants(
    found: Replicates, values: Float64Array, h: Float64Array, length: int, n: float, n_least: float
) -> tuple[str, ...]:
    """Say whether independent frames are too few, or members differ too much for the expansion."""
    outside = _outside(found.members, values)
    ratio = _neglected(found, values, h, length)
    if ratio <= _LARGE:
        return _too_short(n) + outside
    far = (
        f"The first term that the cumulant expansion neglects is {ratio:.1g} of the error bar: "
        f"members differ too much for it. {_instead('direct', n_least >= _FEW)}"
    )
    return (*_too_short(n), far, *outside)


def _too_short(n: float) -> tuple[str, ...]:
    if n >= _FEW:
        return ()
    return (
        f"The trajectory has about {n:.0f} independent frames: too few to know how wrong its "
        "averages are. Run longer.",
    )


def _instead(estimator: str, works: bool) -> str:
    """Return what to do about an estimator that fails."""
    if works:
        return f"Use estimator={estimator!r}."
    return (
        f"Nor would estimator={estimator!r} do: train a model whose members agree better, or "
        "simulate with single members."
    )


def _neglected(found: Replicates, values: Float64Array, h: Float64Array, length: int) -> float:
    """Return how large the first term is that an expansion neglects, in units of its error bar."""
    neglected = neglected_term(values, h, length)
    # The square of an estimate is too large by its variance, and six times that is beyond chance.
    squares = np.mean(neglected.members**2 - 6.0 * neglected.variance(), axis=1)
    error = np.sqrt(found.variance_between() + found.variance_of_mean())
    ratio = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(error, np.finfo(float).tiny)
    return float(ratio.max())


def _outside(averages: Float64Array, values: Float64Array) -> tuple[str, ...]:
    """Say whether averages of members are beyond all values that the trajectory has seen."""
    every = values.swapaxes(0, 1).reshape(values.shape[1], -1)
    low, high = every.min(axis=1)[:, None], every.max(axis=1)[:, None]
    slack = 0.1 * (high - low) + 1e-9 * np.abs(high)
    n = int(np.sum(np.any((averages < low - slack) | (averages > high + slack), axis=0)))
    if not n:
        return ()
    return (
        f"{n} of {averages.shape[1]} members would have an average beyond all values that the "
        "trajectory has seen: they differ too much from what was simulated.",
    )
