"""Δ-learning: the potential that is subtracted, with its energies, forces and stresses.

A model of the difference from a baseline potential is trained on labels less the values of the
potential, which are added again to its predictions. The potential is a calculator of ASE, the
pretrained network of the representation, or a column of the data. The user names it as `baseline`.

What is computed is remembered, as long as it takes little memory: training, evaluation and
predictions need the energy of a structure and later its forces, and most calculators have both.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

from qualms.arrays import Float64Array
from qualms.atomistic.labels import find_label, voigt
from qualms.atomistic.settings import PotentialSettings, Settings
from qualms.atomistic.structures import check_structures
from qualms.errors import InputError, QualmsWarning
from qualms.evaluation import ENERGIES
from qualms.execution import in_processes
from qualms.features.base import PotentialValues
from qualms.features.learned import Backbone, installed_folder, shipped_weights
from qualms.resources import find_libraries, limited

#: Where known calculators are, and the arguments that are always given to them. tblite would start
#: from the wave function of the structure before, and its results would depend on the order.
CALCULATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "tblite": ("tblite.ase:TBLite", {"verbosity": 0, "cache_api": False}),
    "sevennet": ("sevenn.calculator:SevenNetCalculator", {}),
}
#: Structures from which on several processes are started, which takes seconds.
MANY = 64
#: Numbers that are remembered, of 8 bytes each.
REMEMBERED = 5_000_000

#: Values by name: "energy" (), "forces" (n, 3) and "stress" (6,), or the reason that there are none
Result = dict[str, Float64Array] | str


class BaselinePotential(ABC):
    """A potential; classes differ in where its values come from."""

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self.factor = name, factor  #: from its units to those of the target

    @abstractmethod
    def results(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Return the values of some names for each structure, or why there are none."""

    def evaluate(
        self,
        frames: Sequence[Atoms],
        *,
        forces: bool = False,
        stress: bool = False,
        indices: Sequence[int] | None = None,
        skip_failed: bool = False,
    ) -> PotentialValues:
        """Return energies and, perhaps, forces and stresses of structures, in units of the target.

        Parameters
        ----------
        frames : sequence of Atoms
        forces, stress : bool
            Whether they are computed. Structures without a volume have NaN for a stress.
        indices : sequence of int, optional
            Numbers of the structures in messages.
        skip_failed : bool
            Whether structures without values have NaN and are named by a warning, rather than
            being an error.
        """
        requested = {"energy", *["forces"] * forces, *["stress"] * stress}
        names = [requested if atoms.cell.rank == 3 else requested - {"stress"} for atoms in frames]
        results = [
            checked(*row) for row in zip(self.results(frames, names), frames, names, strict=True)
        ]
        numbers = range(len(frames)) if indices is None else indices
        failed = [
            (int(number), f"structure {number} ({atoms.symbols}, {result})")
            for number, atoms, result in zip(numbers, frames, results, strict=True)
            if isinstance(result, str)
        ]
        if failed and not skip_failed:
            first, text = failed[0]
            raise InputError(
                f"The baseline {self.name} has no values for {text}. Leave out such structures "
                "(training, evaluation and the command line: `skip_failed=True`).",
                parameter=f"frames[{first}]",
            )
        if failed:
            listed = "; ".join(text for _, text in failed[:5])
            more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
            warnings.warn(
                f"{len(failed)} of {len(frames)} structures are left out, for which the baseline "
                f"{self.name} has no values: {listed}{more}.",
                QualmsWarning,
                stacklevel=2,
            )

        def values(name: str) -> list[Float64Array]:
            return [
                np.full(_shapes(atoms)[name], np.nan)
                if isinstance(result, str) or name not in result
                else self.factor * result[name]
                for result, atoms in zip(results, frames, strict=True)
            ]

        return PotentialValues(
            np.array(values("energy"), dtype=np.float64),
            values("forces") if forces else None,
            np.array(values("stress")).reshape(-1, 6) if stress else None,
        )

    def computable(
        self, numbered: Iterable[tuple[int, Atoms]], *, forces: bool = False, stress: bool = False
    ) -> Iterator[tuple[int, Atoms]]:
        """Yield numbers and structures that have values; a warning names the others.

        Parameters
        ----------
        numbered : iterable of (int, Atoms)
            Numbers of structures in the input, and the structures.
        forces, stress : bool
            Whether these are computed, in addition to the energies.
        """
        remaining = iter(numbered)
        while block := list(itertools.islice(remaining, 512)):  # before any of them is used
            indices, frames = zip(*block, strict=True)
            check_structures(frames, first=indices[0])
            how = {"forces": forces, "stress": stress, "skip_failed": True}
            energies = self.evaluate(frames, indices=indices, **how).energies
            yield from itertools.compress(block, np.isfinite(energies))


def _shapes(atoms: Atoms) -> dict[str, tuple[int, ...]]:
    return {"energy": (), "forces": (len(atoms), 3), "stress": (6,)}


def checked(result: Result, atoms: Atoms, names: set[str]) -> Result:
    """Return a result whose values exist, are finite and have the right shapes, or the reason."""
    if isinstance(result, str):
        return result
    for name in sorted(names):
        if name not in result:
            return f"no {name}"
        if result[name].shape != _shapes(atoms)[name]:
            return f"{name} of shape {result[name].shape}"
        if not np.isfinite(result[name]).all():
            return f"{name} with NaN or infinite values"
    return result


def _reason(error: Exception) -> str:
    """Return an exception as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class StoredPotential(BaselinePotential):
    """Values that the structures have, in the units of the labels."""

    def __init__(self, settings: PotentialSettings) -> None:
        super().__init__(settings.name)
        self._settings = settings

    def results(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Look values up as those of labels."""
        return [self._result(atoms, of) for atoms, of in zip(frames, names, strict=True)]

    def _result(self, atoms: Atoms, names: set[str]) -> Result:
        result: dict[str, Float64Array] = {}
        for name in sorted(names):
            per_atom, key = name == "forces", self._settings.key_of(name)
            label = None if key is None else find_label(atoms, key, per_atom)
            if label is None:
                store = atoms.arrays if per_atom else atoms.info
                keys = ", ".join(map(repr, sorted(map(str, store))[:5])) or "none"
                return f"no {name} under the key {key!r} (keys that exist: {keys})"
            try:
                values = (
                    voigt(*label) if name == "stress" else np.asarray(label[0], dtype=np.float64)
                )
            except (TypeError, ValueError) as error:
                return _reason(error)
            result[name] = values.reshape(()) if values.shape == (1,) else values
        return result


class ComputedPotential(BaselinePotential):
    """Values that are computed in eV and Å, and remembered."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name, factor)
        self._remembered: dict[bytes, dict[str, Float64Array]] = {}
        self._size = 0

    @abstractmethod
    def compute(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Return the values, and others that come with them, or the reason of a failure."""

    def results(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Look values up, and compute those that are not remembered."""
        keys = [_state(atoms) for atoms in frames]
        results: list[Result] = [self._remembered.get(key, {}) for key in keys]
        missing = [i for i, result in enumerate(results) if not names[i] <= {*result}]
        computed = self.compute([frames[i] for i in missing], [names[i] for i in missing])
        for i, result in zip(missing, computed, strict=True):
            results[i] = result
            if not isinstance(result, str):
                self._remembered[keys[i]] = result
                self._size += sum(values.size for values in result.values())
        if self._size > REMEMBERED:
            self._remembered, self._size = {}, 0
        return results


def _state(atoms: Atoms) -> bytes:
    """Return a digest of all that the values of a structure depend on."""
    of_atoms = (atoms.arrays.get(f"initial_{x}") for x in ("charges", "magmoms"))
    state = repr([atoms.info.get(name) for name in ("charge", "spin", "multiplicity")]).encode()
    parts = [atoms.numbers, atoms.positions, np.asarray(atoms.cell), atoms.pbc, *of_atoms]
    parts.append(atoms.arrays.get("tags"))
    for part in parts:
        state += b"|" if part is None else np.ascontiguousarray(part).tobytes()
    return hashlib.blake2b(state, digest_size=16).digest()


class CalculatorPotential(ComputedPotential):
    """An ASE calculator, created when the first value is needed."""

    def __init__(self, settings: PotentialSettings, factor: float, threads: int = 1) -> None:
        super().__init__(settings.name, factor)
        self._text, self._threads = settings.model_dump_json(), threads
        # tblite uses one core for a small molecule, so that several processes pay.
        self._is_serial = str(settings.calculator).startswith("tblite:")

    def compute(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Compute structure by structure, in several processes if that pays."""
        load_calculator(self._text)  # a missing package is an error of this process
        if not self._is_serial or self._threads < 2 or len(frames) < MANY:
            return compute_values((frames, names), self._text, self._threads)
        copies = [atoms.copy() for atoms in frames]  # type: ignore[no-untyped-call]
        tasks = ((copies[i : i + 8], names[i : i + 8]) for i in range(0, len(frames), 8))
        done = in_processes(partial(compute_values, text=self._text), tasks, self._threads)
        return [result for results in done for result in results]


def compute_values(
    task: tuple[Sequence[Atoms], Sequence[set[str]]], text: str, threads: int = 1
) -> list[Result]:
    """Return the values of structures by the calculator of some settings, in JSON."""
    calculator, results = load_calculator(text), []
    for original, names in zip(*task, strict=True):
        atoms = original.copy()  # type: ignore[no-untyped-call]
        atoms.calc = calculator
        result: Result = {}
        try:
            with limited(threads, len(atoms)):
                # Derivatives come first: the energy comes with them.
                for name in sorted(names, reverse=True):
                    calculator.get_property(name, atoms)
            values = {name: calculator.results.get(name) for name in _shapes(atoms)}
            result = {n: np.array(v, dtype=np.float64) for n, v in values.items() if v is not None}
        except Exception as error:  # calculators raise anything
            result = _reason(error)
        results.append(result)
    return results


@cache
def load_calculator(text: str) -> Any:
    """Return the calculator of some settings, in JSON."""
    settings = PotentialSettings.model_validate_json(text)
    kind, _, method = str(settings.calculator).partition(":")
    path, arguments = CALCULATORS.get(kind, (str(settings.calculator), {}))
    if kind == "tblite":
        arguments = {**arguments, "method": method}
    elif kind == "sevennet":  # by its default, a file in the working directory would come first
        arguments = {**arguments, "model": str(shipped_weights("sevennet").path)}
    module, _, name = path.partition(":")
    try:
        # Some write to standard output when they are made, and warn about themselves.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make = getattr(importlib.import_module(module), name)
            calculator = make(**arguments, **settings.arguments)
    except ImportError as error:
        remedy = f"Run: pip install 'qualms[{kind}]'" if kind in CALCULATORS else "Install it."
        raise InputError(
            f"The package of the calculator {settings.name!r} cannot be imported "
            f"({_reason(error)}). {remedy}",
            parameter="baseline",
        ) from error
    except Exception as error:
        raise InputError(
            f"The calculator {settings.name!r} cannot be created with the arguments "
            f"{settings.arguments} ({_reason(error)}). Give a class or function that returns an "
            "ASE calculator.",
            parameter="baseline",
        ) from error
    if not hasattr(calculator, "get_property"):
        raise InputError(
            f"The calculator {settings.name!r} returns a {type(calculator).__name__}. Give a class "
            "or function that returns an ASE calculator.",
            parameter="baseline",
        )
    find_libraries()
    return calculator


def calculator_version(settings: PotentialSettings | None) -> dict[str, str]:
    """Return the version of the package of a calculator, by its name, if it is known."""
    path = "" if settings is None or settings.calculator is None else settings.calculator
    path = CALCULATORS.get(path.partition(":")[0], (path, {}))[0]
    package = re.split(r"[.:]", path)[0]
    return {name: version(name) for name in packages_distributions().get(package, [])}


class NetworkPotential(ComputedPotential):
    """The pretrained network that the features of a model come from."""

    def __init__(self, network: Any, factor: float) -> None:
        super().__init__("backbone", factor)
        self._network = network
        if not hasattr(network, "potential"):
            raise InputError(
                "The baseline 'backbone' is the energy of the pretrained network of the "
                "representation, which has none. Use a network such as "
                "`representation='sevennet'`, or another `baseline`.",
                parameter="baseline",
            )

    def compute(self, frames: Sequence[Atoms], names: Sequence[set[str]]) -> list[Result]:
        """Compute structures of the same kind together, or each alone if that fails."""
        results: dict[int, Result] = {}
        species = getattr(self._network, "species", None)
        for i, atoms in enumerate(frames):
            unknown = set() if species is None else {*atoms.numbers} - {*species}
            if unknown:
                symbols = ", ".join(chemical_symbols[z] for z in sorted(unknown))
                results[i] = f"elements that the network does not know: {symbols}"
        for some in {frozenset(of) for of in names}:
            places = [i for i, of in enumerate(names) if of == some and i not in results]
            try:
                together = self._together([frames[i] for i in places], some)
                results |= zip(places, together, strict=True)
            except Exception:  # which structure it is, is found below
                for i in places:
                    try:
                        results[i] = self._together([frames[i]], some)[0]
                    except Exception as error:
                        results[i] = _reason(error)
        return [results[i] for i in range(len(frames))]

    def _together(self, frames: Sequence[Atoms], names: frozenset[str]) -> list[Result]:
        forces, stress = "forces" in names, "stress" in names
        values = self._network.potential(frames, forces=forces, stress=stress)
        columns = zip(("energy", "forces", "stress"), values, strict=True)
        of_names = {name: column for name, column in columns if column is not None}
        return [
            {name: np.asarray(column[i], dtype=np.float64) for name, column in of_names.items()}
            for i in range(len(frames))
        ]


def make_baseline_potential(
    settings: Settings, *, confirmed: PotentialSettings | None = None, threads: int = 1
) -> BaselinePotential | None:
    """Return the potential that a model subtracts; None if there is none.

    Parameters
    ----------
    settings : Settings
        They may be those of a file, and importing a module, or giving arguments to it, executes
        code.
    confirmed : PotentialSettings, optional
        The potential that a user names. Without it, calculators are imported from installed
        packages, by known names.
    threads : int
    """
    stored = settings.baseline_potential
    if stored is None:
        return None
    if confirmed is not None:
        _check_same(stored, confirmed)
    baseline = confirmed or stored
    if baseline.key is not None:
        return StoredPotential(baseline)
    factor = ENERGIES["eV"] / ENERGIES.get(settings.units, 1.0)
    if baseline.calculator == "backbone":
        features = settings.representation
        return NetworkPotential(
            features.opened() if isinstance(features, Backbone) else None, factor
        )
    if confirmed is None and not _is_installed(baseline):
        arguments = f" with the arguments {baseline.arguments}" if baseline.arguments else ""
        raise InputError(
            f"The model was trained with the calculator {baseline.calculator!r}{arguments}, which "
            "is no known calculator of an installed package. Creating it executes code: give the "
            "same as `baseline`, if you trust it.",
            parameter="baseline",
        )
    return CalculatorPotential(baseline, factor, threads)


def _is_installed(baseline: PotentialSettings) -> bool:
    """Return whether a calculator is a known one, of a package in site-packages."""
    path, _ = CALCULATORS.get(str(baseline.calculator).partition(":")[0], ("", {}))
    package = path.partition(":")[0].partition(".")[0]
    # A package that is missing is reported when it is imported.
    return bool(package) and (find_spec(package) is None or installed_folder(package) is not None)


def _check_same(stored: PotentialSettings, confirmed: PotentialSettings) -> None:
    """Reject a calculator that is not the one of the training; values may come from a key."""
    if stored.key is not None or confirmed.key is not None:
        return
    if (stored.calculator, stored.arguments) != (confirmed.calculator, confirmed.arguments):
        raise InputError(
            f"The model was trained with the baseline {stored.name!r} and the arguments "
            f"{stored.arguments}, not with {confirmed.name!r} and {confirmed.arguments}. Give "
            "the same as `baseline`.",
            parameter="baseline",
        )
