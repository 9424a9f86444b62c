"""Exploration: structures that simulations by the model, or others, come to.

Every `interval` steps of a walker, the forces have uncertainties. These structures are what was
explored, unless they are unphysical: so uncertain that they are beyond the upper limit, or not
structures at all. There a walker stops, and goes back to the last structure that was within all
limits, with new velocities.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.nptberendsen import NPTBerendsen

from qualms.active.candidates import clash
from qualms.active.settings import Explore, LearnSettings
from qualms.ase import Calculator, UncertaintyError
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import not_predicted
from qualms.atomistic.structures import symbols_of
from qualms.errors import InputError, QualmsError
from qualms.metrics import root_mean_square

#: Keys of what is known about an explored structure. The standard deviation is the root mean
#: square over the components of the forces, in eV/Å.
STD, WALKER, TIME, TEMPERATURE, BEYOND = (
    f"learn_{name}" for name in ("std", "walker", "time", "temperature", "beyond")
)
#: Times that a walker goes back in a round.
_MOST_STOPS = 3
#: Coupling time of Berendsen's barostat in fs, and the compressibility of water in 1/bar: the
#: product of both matters, and only for how fast the cell changes.
_BAROSTAT, _COMPRESSIBILITY = 1000.0, 4.57e-5


@dataclass
class Explored:
    """What a walker, or another source, came to.

    Attributes
    ----------
    frames : list of Atoms
        Within the upper limits, with `STD` and the like in ``atoms.info``.
    stops : list of Atoms
        Beyond the upper limits, with the reason under `BEYOND`.
    trusted : Atoms or None
        Where a walker goes on in the next round.
    picoseconds : float
        Time that was simulated.
    """

    frames: list[Atoms] = field(default_factory=list)
    stops: list[Atoms] = field(default_factory=list)
    trusted: Atoms | None = None
    picoseconds: float = 0.0


def bare(atoms: Atoms, **info: Any) -> Atoms:
    """Return the structure alone: species, positions, cell, charge and spin; and this about it."""
    kept = {k: v for k, v in atoms.info.items() if str(k).lower() in ("charge", "spin", "uhf")}
    new = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc, info=kept | info)
    for name in ("initial_charges", "initial_magmoms"):
        if name in atoms.arrays:
            new.arrays[name] = np.array(atoms.arrays[name])
    new.set_constraint(atoms.constraints)  # type: ignore[no-untyped-call]
    return new


def check_start(atoms: Atoms, number: int, species: set[int]) -> None:
    """Reject a structure where no walker can start, with elements of the labels or without."""
    if others := {*atoms.numbers.tolist()} - species:
        reason = f"contains {symbols_of(sorted(others))}, of which the start has no labels"
    else:
        reason = not_predicted(atoms, None) or clash(atoms)
    if reason:
        raise InputError(
            f"Structure {number} of those where walkers start {reason}: none can start there.",
            parameter="explore",
        )


def walk(
    model: AtomisticModel, start: Atoms, settings: LearnSettings, number: int, seed: Sequence[int]
) -> Explored:
    """Simulate one walker for a round.

    Parameters
    ----------
    model : AtomisticModel
    start : Atoms
    settings : LearnSettings
    number : int
        Of the walker, which has the temperature of this number.
    seed : sequence of int
    """
    explore, rng = settings.explore, np.random.default_rng(seed)
    temperature = explore.temperatures[number % len(explore.temperatures)]
    explored, n_steps = Explored(trusted=start), 0
    while n_steps < explore.n_steps and len(explored.stops) < _MOST_STOPS:
        reasons: list[str] = []
        # A watch remembers what was trusted: one for each simulation.
        watch = settings.watch.watch(_noting(reasons))
        atoms = bare(explored.trusted or start)
        options: dict[str, Any] = {"forces_uncertainty_every": explore.interval, "annotate": False}
        atoms.calc = Calculator(model, watch, **options)
        width = np.sqrt(units.kB * temperature * atoms.get_masses())[:, None]
        atoms.arrays["momenta"] = width * rng.standard_normal((len(atoms), 3))
        dynamics = _dynamics(atoms, explore, temperature, rng)

        def about(dynamics: Any = dynamics, before: int = n_steps) -> dict[str, Any]:
            time = round((before + dynamics.nsteps) * explore.timestep * 1e-3, 6)
            return {WALKER: number, TEMPERATURE: temperature, TIME: time}

        def record(
            atoms: Atoms = atoms,
            dynamics: Any = dynamics,
            reasons: list[str] = reasons,
            about: Callable[[], dict[str, Any]] = about,
        ) -> None:
            beyond = {BEYOND: reasons[-1]} if reasons else {}
            reasons.clear()
            if dynamics.nsteps:  # where it starts, it has been
                # They are there already, unless stresses have changed the count of forces.
                std = {STD: root_mean_square(atoms.calc.get_property("forces_uncertainty", atoms))}
                explored.frames.append(bare(atoms, **about(), **std, **beyond))

        dynamics.attach(record, interval=explore.interval)
        try:
            with np.errstate(all="ignore"):  # numbers of a simulation that explodes
                dynamics.run(explore.n_steps - n_steps)
        except (QualmsError, ArithmeticError, ValueError) as error:
            explored.stops.append(_stopped(atoms, error, **about()))
        explored.trusted = watch.last_trusted or explored.trusted
        n_steps += max(dynamics.nsteps, 1)  # a walker that cannot move ends, too
    explored.picoseconds = n_steps * explore.timestep * 1e-3
    return explored


def _noting(reasons: list[str]) -> Callable[[Atoms, UncertaintyError], None]:
    """Return an action of a watch that notes why a structure is beyond a limit."""
    return lambda _, error: reasons.append(str(error))


def _stopped(atoms: Atoms, error: Exception, **info: Any) -> Atoms:
    """Return the structure where a walker stopped, with finite positions."""
    copy = error.atoms if isinstance(error, UncertaintyError) else atoms
    copy = bare(copy, **info, **{BEYOND: " ".join(str(error).split())})
    copy.positions = np.nan_to_num(copy.positions, posinf=0.0, neginf=0.0)
    return copy


def _dynamics(atoms: Atoms, explore: Explore, temperature: float, rng: np.random.Generator) -> Any:
    step = explore.timestep * units.fs
    if explore.pressure is None:
        options: dict[str, Any] = {
            "friction": explore.friction / units.fs,
            "rng": rng,
            "fixcm": False,
        }
        return Langevin(atoms, step, temperature_K=temperature, **options)
    if atoms.cell.rank < 3:
        raise InputError(
            f"`pressure` of `explore` needs a cell with a volume; {atoms.symbols} has none.",
            parameter="explore",
        )
    return NPTBerendsen(
        atoms,
        step,
        temperature_K=temperature,
        taut=1.0 / explore.friction * units.fs,
        pressure_au=explore.pressure * units.GPa,
        taup=_BAROSTAT * units.fs,
        compressibility_au=_COMPRESSIBILITY / units.bar,
    )


def look_at(
    model: AtomisticModel, frames: Iterable[tuple[int, Atoms]], settings: LearnSettings
) -> Explored:
    """Return structures of a pool, or of a user, with their uncertainties.

    Parameters
    ----------
    model : AtomisticModel
    frames : iterable of (int, Atoms)
        With their numbers, in reasons.
    settings : LearnSettings
    """
    explored, reasons = Explored(), list[str]()
    watch = settings.watch.watch(_noting(reasons))
    calculator = Calculator(model, watch, annotate=False)
    for number, original in frames:
        reasons.clear()
        if reason := not_predicted(original, model.fitted):
            explored.stops.append(bare(original, **{BEYOND: f"Structure {number} {reason}."}))
            continue
        atoms = bare(original)
        atoms.calc = calculator
        try:
            atoms.get_forces()  # type: ignore[no-untyped-call]
        except UncertaintyError as error:
            explored.stops.append(_stopped(atoms, error))
            continue
        std = root_mean_square(calculator.results["forces_uncertainty"])
        beyond = {BEYOND: reasons[-1]} if reasons else {}
        explored.frames.append(bare(atoms, **{STD: std}, **beyond))
    return explored


def yielded(model: AtomisticModel, settings: LearnSettings, seed: int) -> Iterator[Atoms]:
    """Yield the structures of a user's own callable."""
    explore = settings.explore
    make = load_callable(str(explore.callable))
    calculator = Calculator(model, annotate=False)
    try:
        for atoms in make(calculator, seed, **explore.arguments):
            if not isinstance(atoms, Atoms):
                raise TypeError(f"it yields a {type(atoms).__name__}, not ase.Atoms")
            yield atoms
    except QualmsError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if last.filename == __file__ else f", {last.filename}, line {last.lineno}"
        raise InputError(
            f"`callable` of `explore`, {explore.callable}, fails ({type(error).__name__}: "
            f"{error}{where}).",
            parameter="explore",
        ) from error


def load_callable(path: str) -> Callable[..., Iterable[Atoms]]:
    """Import a user's callable."""
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
        inspect.signature(found)
    except Exception as error:
        raise InputError(
            f"`callable` of `explore`, {path!r}, cannot be imported ({type(error).__name__}: "
            f"{error}). It is called with a calculator, a seed and its arguments.",
            parameter="explore",
        ) from error
    result: Callable[..., Iterable[Atoms]] = found
    return result
