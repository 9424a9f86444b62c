"""Reference potentials of Δ-learning: what they are, and their energies, forces and stresses.

A model of the difference from a reference potential is trained on labels less the values of the
potential, which are added again to its predictions. The potential is a calculator of ASE, the
pretrained network of the representation, or a column of the data.

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
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from joblib import Parallel, delayed

from qualms.arrays import Float64Array
from qualms.atomistic.labels import find_label, voigt
from qualms.atomistic.settings import Reference, Settings
from qualms.atomistic.structures import check_structures
from qualms.errors import InputError, QualmsWarning
from qualms.evaluation import ENERGIES
from qualms.features.learned import installed_folder, shipped_weights
from qualms.resources import find_libraries, limited

#: Where known calculators are, and the arguments that are always given to them. tblite would start
#: from the wave function of the structure before, and its results would depend on the order.
_IMPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tblite": ("tblite.ase:TBLite", {"verbosity": 0, "cache_api": False}),
    "sevennet": ("sevenn.calculator:SevenNetCalculator", {}),
}
#: Calculators that use one core for a small molecule, so that several processes pay.
_SERIAL = ("tblite",)
#: Structures from which on several processes are started, which takes seconds; structures of a
#: task; and structures that are computed before any of them is used.
_MANY, _PER_TASK, _BLOCK = 64, 8, 512
#: Numbers that are remembered, of 8 bytes each.
_REMEMBERED = 5_000_000
#: What in ``atoms.info`` some calculators use.
_STATES = ("charge", "spin", "multiplicity")
#: Structures that a warning lists.
_LISTED = 5

#: Values by name: "energy" (), "forces" (n, 3) and "stress" (6,), or the reason that there are none
Result = dict[str, Float64Array] | str


class ReferenceValues(NamedTuple):
    """Values of a potential for n structures, in the units of the target."""

    energies: Float64Array  #: (n,); NaN for structures that failed and are left out
    forces: list[Float64Array] | None = None  #: (n_atoms, 3) each
    #: (n, 6): in ASE's order and sign; NaN for structures without a volume
    stresses: Float64Array | None = None


class ReferencePotential(ABC):
    """A potential; classes differ in where its values come from."""

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self.factor = name, factor  #: from its units to those of the target

    @abstractmethod
    def results(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Return the wanted values of each structure, or why there are none."""

    def evaluate(
        self,
        frames: Sequence[Atoms],
        *,
        forces: bool = False,
        stress: bool = False,
        indices: Sequence[int] | None = None,
        skip_failed: bool = False,
    ) -> ReferenceValues:
        """Return energies and, perhaps, forces and stresses of structures.

        A structure that has none is an error or, with `skip_failed`, has NaN, and a warning is
        issued. Both name it by its number among `indices`.
        """
        asked = {"energy"} | ({"forces"} if forces else set()) | ({"stress"} if stress else set())
        wanted = [asked if atoms.cell.rank == 3 else asked - {"stress"} for atoms in frames]
        found = [
            _checked(result, atoms, names)
            for result, atoms, names in zip(
                self.results(frames, wanted), frames, wanted, strict=True
            )
        ]
        failed = {i: result for i, result in enumerate(found) if isinstance(result, str)}
        if failed:
            numbers = range(len(frames)) if indices is None else indices
            self._report(
                {int(numbers[i]): f"{frames[i].symbols}, {failed[i]}" for i in failed},
                len(frames),
                skip_failed=skip_failed,
            )
        shapes = [{"energy": (), "forces": (len(atoms), 3), "stress": (6,)} for atoms in frames]

        def values(name: str) -> list[Float64Array]:
            some = ({} if isinstance(result, str) else result for result in found)
            pairs = zip(some, shapes, strict=True)
            return [
                self.factor * one[name] if name in one else np.full(shape[name], np.nan)
                for one, shape in pairs
            ]

        return ReferenceValues(
            np.array(values("energy"), dtype=np.float64),
            values("forces") if forces else None,
            np.array(values("stress")).reshape(-1, 6) if stress else None,
        )

    def computable(
        self, numbered: Iterable[tuple[int, Atoms]], *, forces: bool = False, stress: bool = False
    ) -> Iterator[tuple[int, Atoms]]:
        """Yield numbers and structures that have values; a warning names the others."""
        remaining = iter(numbered)
        while block := list(itertools.islice(remaining, _BLOCK)):
            indices, some = [i for i, _ in block], [atoms for _, atoms in block]
            check_structures(some, first=indices[0])
            how = {"forces": forces, "stress": stress, "skip_failed": True}
            energies = self.evaluate(some, indices=indices, **how).energies
            yield from (one for one, e in zip(block, energies, strict=True) if np.isfinite(e))

    def _report(self, failed: dict[int, str], n: int, *, skip_failed: bool) -> None:
        """Raise an error about the first structure that failed, or warn about all."""
        if not skip_failed:
            first = next(iter(failed))
            raise InputError(
                f"The baseline {self.name} has no values for structure {first} ({failed[first]}). "
                "Use `skip_failed=True` to leave out such structures.",
                parameter=f"frames[{first}]",
            )
        listed = "; ".join(f"structure {i} ({failed[i]})" for i in list(failed)[:_LISTED])
        more = f" and {len(failed) - _LISTED} more" if len(failed) > _LISTED else ""
        warnings.warn(
            f"{len(failed)} of {n} structures are left out, for which the baseline {self.name} "
            f"has no values: {listed}{more}.",
            QualmsWarning,
            stacklevel=2,
        )


def _checked(result: Result, atoms: Atoms, wanted: set[str]) -> Result:
    """Return a result whose values exist, are finite and have the right shapes, or the reason."""
    if isinstance(result, str):
        return result
    shapes = {"energy": (), "forces": (len(atoms), 3), "stress": (6,)}
    for name in sorted(wanted):
        if name not in result:
            return f"no {name}"
        if result[name].shape != shapes[name]:
            return f"{name} of shape {result[name].shape}"
        if not np.isfinite(result[name]).all():
            return f"{name} that is not finite"
    return result


def _reason(error: Exception) -> str:
    """Return an exception as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class KeyReference(ReferencePotential):
    """Values that the structures have, in the units of the labels."""

    def __init__(self, settings: Reference) -> None:
        super().__init__(settings.name)
        self._settings = settings

    def results(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Look values up as those of labels."""
        return [self._result(atoms, names) for atoms, names in zip(frames, wanted, strict=True)]

    def _result(self, atoms: Atoms, wanted: set[str]) -> Result:
        found: dict[str, Float64Array] = {}
        for name in sorted(wanted):
            per_atom, key = name == "forces", self._settings.key_of(name)
            hit = None if key is None else find_label(atoms, key, per_atom)
            if hit is None:
                store = atoms.arrays if per_atom else atoms.info
                keys = ", ".join(map(repr, sorted(map(str, store))[:_LISTED])) or "none"
                return f"no {name} under the key {key!r} (keys that exist: {keys})"
            try:
                values = voigt(*hit) if name == "stress" else np.asarray(hit[0], dtype=np.float64)
            except (TypeError, ValueError) as error:
                return _reason(error)
            found[name] = values.reshape(()) if values.shape == (1,) else values
        return found


class ComputedReference(ReferencePotential):
    """Values that are computed in eV and Å, and remembered."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name, factor)
        self._known: dict[bytes, dict[str, Float64Array]] = {}
        self._size = 0

    @abstractmethod
    def compute(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Return the wanted values, and others that come with them, or the reason of a failure."""

    def results(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Look known values up, and compute the others."""
        keys = [_state(atoms) for atoms in frames]
        rest = [i for i, k in enumerate(keys) if not wanted[i] <= self._known.get(k, {}).keys()]
        known: dict[int, Result] = {i: self._known[keys[i]] for i in {*range(len(keys))} - {*rest}}
        computed = self.compute([frames[i] for i in rest], [wanted[i] for i in rest])
        for i, result in zip(rest, computed, strict=True):
            known[i] = result
            if not isinstance(result, str):
                self._size += _size(result) - _size(self._known.pop(keys[i], {}))
                self._known[keys[i]] = result
        while self._size > _REMEMBERED:
            self._size -= _size(self._known.pop(next(iter(self._known))))
        return [known[i] for i in range(len(keys))]


def _size(result: dict[str, Float64Array]) -> int:
    return sum(values.size for values in result.values())


def _state(atoms: Atoms) -> bytes:
    """Return a digest of all that the values of a structure depend on."""
    of_atoms = (atoms.arrays.get(f"initial_{x}") for x in ("charges", "magmoms"))
    state = repr([atoms.info.get(name) for name in _STATES]).encode()
    parts = [atoms.numbers, atoms.positions, np.asarray(atoms.cell), atoms.pbc, *of_atoms]
    parts.append(atoms.arrays.get("tags"))
    for part in parts:
        state += b"|" if part is None else np.ascontiguousarray(part).tobytes()
    return hashlib.blake2b(state, digest_size=16).digest()


class CalculatorReference(ComputedReference):
    """An ASE calculator, created when the first value is needed."""

    def __init__(self, settings: Reference, factor: float, threads: int = 1) -> None:
        super().__init__(settings.name, factor)
        self._text, self._threads = settings.model_dump_json(), threads
        serial = str(settings.calculator).partition(":")[0] in _SERIAL
        self._n_processes = threads if serial else 1

    def compute(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Compute structure by structure, in several processes if that pays."""
        _calculator(self._text)  # a missing package is an error of this process
        if self._n_processes < 2 or len(frames) < _MANY:
            return _compute(self._text, frames, wanted, self._threads)
        starts = range(0, len(frames), _PER_TASK)
        tasks = [(frames[i : i + _PER_TASK], wanted[i : i + _PER_TASK]) for i in starts]
        tasks = [([atoms.copy() for atoms in some], names) for some, names in tasks]  # type: ignore[no-untyped-call]
        done = Parallel(n_jobs=self._n_processes)(delayed(_compute)(self._text, *t) for t in tasks)
        return [result for some in done for result in some]


def _compute(
    text: str, frames: Sequence[Atoms], wanted: Sequence[set[str]], threads: int = 1
) -> list[Result]:
    """Return the values of structures by the calculator of some settings, in JSON."""
    calculator, found = _calculator(text), []
    for atoms, names in zip(frames, wanted, strict=True):
        own = atoms.copy()  # type: ignore[no-untyped-call]
        own.calc = calculator
        result: Result = {}
        try:
            with limited(threads, len(atoms)):
                # Derivatives come first: the energy comes with them.
                for name in sorted(names, reverse=True):
                    calculator.get_property(name, own)
            results = calculator.results
            known = [n for n in ("energy", "forces", "stress") if results.get(n) is not None]
            result = {n: np.array(results[n], dtype=np.float64) for n in known}
        except Exception as error:  # calculators raise anything
            result = _reason(error)
        found.append(result)
    return found


@cache
def _calculator(text: str) -> Any:
    """Return the calculator of some settings, in JSON."""
    settings = Reference.model_validate_json(text)
    given, _, method = str(settings.calculator).partition(":")
    path, arguments = _IMPORTS.get(given, (str(settings.calculator), {}))
    if given == "tblite":
        arguments = {**arguments, "method": method}
    elif given == "sevennet":  # by its default, a file in the working directory would come first
        arguments = {**arguments, "model": str(shipped_weights("sevennet").path)}
    module, _, name = path.partition(":")
    try:
        # Some write to standard output when they are made, and warn about themselves.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(importlib.import_module(module), name)(**arguments, **settings.arguments)
    except ImportError as error:
        remedy = f"Run: pip install 'qualms[{given}]'" if given in _IMPORTS else "Install it."
        raise InputError(
            f"The package of the baseline {settings.name!r} cannot be imported ({_reason(error)}). "
            f"{remedy}",
            parameter="baseline",
        ) from error
    except Exception as error:
        raise InputError(
            f"The baseline {settings.name!r} cannot be created with the arguments "
            f"{settings.arguments} ({_reason(error)}). Give a class or function that returns an "
            "ASE calculator.",
            parameter="baseline",
        ) from error
    if not hasattr(made, "get_property"):
        raise InputError(
            f"The baseline {settings.name!r} returns a {type(made).__name__}. Give a class or "
            "function that returns an ASE calculator.",
            parameter="baseline",
        )
    find_libraries()
    return made


def calculator_version(settings: Reference | None) -> dict[str, str]:
    """Return the version of the package of a calculator, by its name, if it is known."""
    path = "" if settings is None or settings.calculator is None else settings.calculator
    path = _IMPORTS.get(path.partition(":")[0], (path, {}))[0]
    package = re.split(r"[.:]", path)[0]
    found = packages_distributions().get(package, [])
    return {name: version(name) for name in found}


class BackboneReference(ComputedReference):
    """The pretrained network that the features of a model come from."""

    def __init__(self, representation: Any, factor: float) -> None:
        super().__init__("backbone", factor)
        # Hyper-parameters of a network load it.
        network = representation.opened() if hasattr(representation, "opened") else representation
        if not hasattr(network, "reference"):
            raise InputError(
                "The baseline 'backbone' is the energy of the pretrained network of the "
                "representation, which has none. Use a network such as "
                "`representation='sevennet'`, or another `baseline`.",
                parameter="baseline",
            )
        self._values, self._species = network.reference, getattr(network, "species", None)

    def compute(self, frames: Sequence[Atoms], wanted: Sequence[set[str]]) -> list[Result]:
        """Compute structures of the same kind together, or each alone if that fails."""
        found: dict[int, Result] = {}
        for i, atoms in enumerate(frames):
            unknown = set() if self._species is None else {*atoms.numbers} - {*self._species}
            if unknown:
                listed = ", ".join(chemical_symbols[z] for z in sorted(unknown))
                found[i] = f"elements that the network does not know: {listed}"
        for names in {frozenset(one) for one in wanted}:
            here = [i for i, one in enumerate(wanted) if one == names and i not in found]
            try:
                found |= zip(here, self._together([frames[i] for i in here], names), strict=True)
            except Exception:  # which structure it is, is found below
                for i in here:
                    try:
                        found[i] = self._together([frames[i]], names)[0]
                    except Exception as error:
                        found[i] = _reason(error)
        return [found[i] for i in range(len(frames))]

    def _together(self, frames: Sequence[Atoms], names: frozenset[str]) -> list[Result]:
        forces, stress = "forces" in names, "stress" in names
        values = self._values(frames, forces=forces, stress=stress)
        columns = {"energy": values.energies}
        columns |= {"forces": values.forces} if forces else {}
        columns |= {"stress": values.stresses} if stress else {}
        rows = zip(*columns.values(), strict=True)
        return [
            {name: np.asarray(value, dtype=np.float64) for name, value in zip(columns, row)}  # noqa: B905
            for row in rows
        ]


def make_reference(
    settings: Settings, *, confirmed: Reference | None = None, threads: int = 1
) -> ReferencePotential | None:
    """Return the reference potential of a model; None if it has none.

    The settings may be those of a file, and importing a module, or giving arguments to it, executes
    code. What the caller has not `confirmed` is imported from installed packages, by known names.
    """
    reference = settings.reference
    if reference is None:
        return None
    if confirmed is not None:
        _check_same(reference, confirmed)
        reference = confirmed
    if reference.key is not None:
        return KeyReference(reference)
    factor = ENERGIES["eV"] / ENERGIES.get(settings.units, 1.0)
    if reference.calculator == "backbone":
        return BackboneReference(settings.representation, factor)
    if confirmed is None and not _is_installed(reference):
        arguments = f" with the arguments {reference.arguments}" if reference.arguments else ""
        raise InputError(
            f"The model was trained with the calculator {reference.calculator!r}{arguments}, which "
            "is no known calculator of an installed package. Creating it executes code: give the "
            "same as `baseline`, if you trust it.",
            parameter="baseline",
        )
    return CalculatorReference(reference, factor, threads)


def _is_installed(reference: Reference) -> bool:
    """Return whether a calculator is a known one, of a package in site-packages."""
    path, _ = _IMPORTS.get(str(reference.calculator).partition(":")[0], ("", {}))
    package = path.partition(":")[0].partition(".")[0]
    # A package that is missing is reported when it is imported.
    return bool(package) and (find_spec(package) is None or installed_folder(package) is not None)


def _check_same(stored: Reference, given: Reference) -> None:
    """Reject a calculator that is not the one of the training; values may come from a key."""
    if stored.key is not None or given.key is not None:
        return
    if (stored.calculator, stored.arguments) != (given.calculator, given.arguments):
        raise InputError(
            f"The model was trained with the baseline {stored.name!r} and the arguments "
            f"{stored.arguments}, not with {given.name!r} and {given.arguments}. Give the same as "
            "`baseline`.",
            parameter="baseline",
        )
