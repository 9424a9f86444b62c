"""Limits of uncertainties along a simulation, and what happens beyond them."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, FloatArray, check_integer, check_number
from qualms.atomistic.evaluation import label_scores, out_of_bag_scores
from qualms.atomistic.kernel_rows import normalized, novelty_of
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import force_norm
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.structures import CHARGES, SPINS
from qualms.calibration.points import CalibrationData
from qualms.calibration.sequential import CalibrationTest
from qualms.errors import InputError, QualmsWarning, UncertaintyError, unknown_choice
from qualms.io.files import append, check_output
from qualms.io.xyz import xyz_text

#: Called with a structure beyond a limit, and the error that says which one.
Action = Callable[[Atoms, UncertaintyError], object]

#: Limit of each quantity if none is given, in out-of-bag RMSE.
_DEFAULT = "1.5 rmse"
_MULTIPLE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:[x×*]\s*)?rmse\s*", re.IGNORECASE)
#: Structures that are recognised if they come again: more than bands have images.
_REMEMBERED = 1000
_UNITS = {"energy": "eV per atom", "forces": "eV/Å", "novelty": ""}
#: Results that have the quantities.
_RESULTS = {
    "energy": "energy_uncertainty",
    "forces": "forces_uncertainty",
    "novelty": "atom_novelty",
}
_NAMES = _RESULTS | {"energy": "energy_uncertainty per atom", "novelty": "novelty"}
#: What a structure keeps beside species, positions and cell.
_STATES = CHARGES.keys() | SPINS.keys()
_ARRAYS = {"numbers", "positions", "tags", "initial_charges", "initial_magmoms"}


class _Limit(NamedTuple):
    value: float
    remark: str  #: where it comes from; or an empty text


class Watch:
    """Limits of a `Calculator`, and what happens to structures beyond them.

    Parameters
    ----------
    forces : float or str, optional
        Limit of the largest √(σ_x² + σ_y² + σ_z²) of an atom, which does not depend on the
        orientation: in eV/Å, or as a multiple of the root mean square, over out-of-bag structures,
        of the largest force error, such as ``"2 rmse"``. It is checked when forces, and their
        uncertainties, are computed.
    energy : float or str, optional
        Limit of the uncertainty of the energy per atom: in eV, or a multiple of the out-of-bag
        root mean square error.
    novelty : float, optional
        Limit of the novelty of an atom; beyond one, structures are extrapolations.
    extrapolation : bool
        Whether extrapolations are beyond the limits.
    upper : float
        Structures beyond so many times a limit are unphysical, and always an `UncertaintyError`,
        whatever the action. `trusted` is where to go back to.
    action : {"warn", "raise"}, path or callable
        What happens beyond a limit: a warning, at the first structure and at the first after
        structures within the limits; an `UncertaintyError`; the structure is added once to an
        extended XYZ file, a new one for each process; or ``action(atoms, error)`` is called, for
        the quantity that is the furthest beyond its limit, and again if others of the same
        structure are computed later.
    min_steps : int
        Least number of structures from one that is added or passed on to the next.
    min_novelty : float
        Structures are added or passed on only if the novelty of an atom exceeds this, relative to
        the structures before them: one minus the largest normalised kernel with their environments,
        in units of the limit of the model.

    Notes
    -----
    Without any limit, that of the forces is ``"1.5 rmse"``; or that of the energy, if the model did
    not learn forces. ``print(calculator.watch)`` shows the limits. Copies of a calculator share its
    watch, and so may calculators of one model, such as those of the images of a band.

    Examples
    --------
    >>> watch = Watch(forces=0.3, action="uncertain.xyz", min_steps=100)
    >>> atoms.calc = Calculator("model.safetensors", watch)  # doctest: +SKIP
    """

    def __init__(
        self,
        forces: float | str | None = None,
        energy: float | str | None = None,
        novelty: float | None = None,
        *,
        extrapolation: bool = False,
        upper: float = inf,
        action: str | Path | Action = "warn",
        min_steps: int = 1,
        min_novelty: float = 0.0,
    ) -> None:
        """Set up the limits; the class describes the parameters."""
        if isinstance(novelty, str):
            raise InputError(
                f"`novelty` is {novelty!r}; it must be a number: beyond one, structures are "
                "extrapolations.",
                parameter="novelty",
            )
        given = {"energy": energy, "forces": forces, "novelty": novelty}
        self._given = {name: _checked(name, v) for name, v in given.items() if v is not None}
        self.extrapolation = bool(extrapolation)
        self.upper = upper if upper == inf else check_number("upper", upper, 1)
        self.action = _checked_action(action)
        self.min_steps = check_integer("min_steps", min_steps, 1)
        self.min_novelty = check_number("min_novelty", min_novelty, 0)
        #: the last structure before the present one that was within the limits
        self.trusted: Atoms | None = None
        #: of the labels that `check_labels` got; None before the first
        self.calibration_test: CalibrationTest | None = None
        self._limits: dict[str, _Limit] = {}
        self._model: object = None
        self._lock = RLock()
        self._present: Atoms | None = None  # the structure before the next, if it is trusted
        self._is_beyond = False
        self._n_steps, self._last = 0, -inf
        self._acted_on: dict[bytes, set[str]] = {}  # quantities of structures, by their digests
        self._has_file = False
        self._environments: FloatArray | None = None  # of structures that were added or passed on

    @property
    def limits(self) -> dict[str, float]:
        """Limits of the quantities of the calculator's model: eV per atom, eV/Å, and a number."""
        return {name: limit.value for name, limit in self._limits.items()}

    @property
    def last_trusted(self) -> Atoms | None:
        """The last structure within the limits, which may be the present one."""
        return self._present or self.trusted

    @property
    def needs_novelty(self) -> bool:
        """Whether the novelty of each structure is needed."""
        return self.extrapolation or "novelty" in self._given

    def bind(self, model: object) -> None:
        """Set the limits by the errors of a model; a watch belongs to one model.

        Parameters
        ----------
        model : AtomisticModel or CommitteePotential
        """
        if self._model is not None and _fitted(self._model) is not _fitted(model):
            raise InputError(
                "The `watch` belongs to another model, or to the same that was loaded again; make "
                "one for each.",
                parameter="watch",
            )
        given = dict(self._given)
        if not given and not self.extrapolation:
            learns_forces = (
                isinstance(model, AtomisticModel) and "forces" in model.record.quantities
            )
            given = {"forces" if learns_forces else "energy": _DEFAULT}
        if not isinstance(model, AtomisticModel) and (self.needs_novelty or self.min_novelty):
            raise InputError(
                "Novelty and extrapolation are those of an AtomisticModel.", parameter="watch"
            )
        has_forces = not isinstance(model, AtomisticModel) or (
            model.fitted.representation.has_derivatives
        )
        if "forces" in given and not has_forces:
            raise InputError(
                "The features of the model have no derivatives: there are no forces that could be "
                "beyond a limit. Give `energy`, or train the model with forces.",
                parameter="forces",
            )
        self._limits = {name: _limit(name, value, model) for name, value in given.items()}
        self._model = model

    def check(
        self, atoms: Atoms, results: Mapping[str, Any], *, is_new: bool
    ) -> UncertaintyError | None:
        """Return the error to raise if a structure is beyond a limit; or act on it.

        Parameters
        ----------
        atoms : Atoms
        results : mapping
            Results of the calculator.
        is_new : bool
            Whether it is another structure than that of the calculator before.
        """
        with self._lock:
            if is_new:
                self._n_steps += 1
                self.trusted = self._present or self.trusted
                self._present = None
            errors = self._errors(atoms, results)
            if not errors:
                # Structures without these results, such as forces, are not within the limits.
                if all(_RESULTS[name] in results for name in self._limits):
                    self._present, self._is_beyond = atoms.copy(), False
                return None
            self._present = None
            errors.sort(key=lambda error: error.value / error.limit, reverse=True)
            if self.action == "raise" or errors[0].value > self.upper * errors[0].limit:
                return errors[0]
            if self.action == "warn":
                if not self._is_beyond:
                    warnings.warn(str(errors[0]), QualmsWarning, stacklevel=2)
            else:
                self._act(atoms, errors)
            self._is_beyond = True
            return None

    def check_labels(self, frames: Atoms | Sequence[Atoms]) -> CalibrationTest:
        """Compare new labels with the predictions of the model; warn if errors are too large.

        The warning is issued once, when the errors of all labels so far are larger than their
        uncertainties: see `qualms.active.CalibrationTest`.

        Parameters
        ----------
        frames : Atoms or sequence of Atoms
            Structures with reference values, in the order in which they were labelled, that the
            model was not trained on: with forces, if it learned forces, else with the target.
        """
        model = self._model
        if not isinstance(model, AtomisticModel):
            problem = "belongs to no calculator yet" if model is None else "has no AtomisticModel"
            raise InputError(
                f"The watch {problem}, so that labels cannot be compared: use "
                "Calculator(model, watch) with a model that qualms has trained.",
                parameter="watch",
            )
        scores = label_scores(model, [frames] if isinstance(frames, Atoms) else frames)
        with self._lock:
            test = self.calibration_test or CalibrationTest(out_of_bag_scores(model))
            self.calibration_test, had_alarm = test, test.alarm
            if test.update(scores) and not had_alarm:
                warnings.warn(
                    f"The calibration no longer holds: errors of {test.n_labels} new labels are "
                    f"larger than their uncertainties. (Without a reason, this warning has a "
                    f"probability of {test.level:.0%}.) Train the model again, with these labels.",
                    QualmsWarning,
                    stacklevel=2,
                )
        return test

    def _errors(self, atoms: Atoms, results: Mapping[str, Any]) -> list[UncertaintyError]:
        """Return an error for each limit that a structure exceeds."""
        errors = []
        for name, limit in self._limits.items():
            value, atom = _value(name, results, len(atoms))
            if value <= limit.value:
                continue
            where = "" if atom is None else f" of atom {atom} ({atoms.symbols[atom]})"
            text = (
                f"{atoms.get_chemical_formula()}: {_NAMES[name]}{where} is "
                f"{value:.3g} {_UNITS[name]}".rstrip()
                + f", beyond the limit of {limit.value:.3g}{limit.remark}."
            )
            errors.append(UncertaintyError(text, name, value, limit.value, atom, _bare(atoms)))
        if self.extrapolation and results.get("extrapolates"):
            reason = results["extrapolation_reason"]
            text = f"{atoms.get_chemical_formula()} is an extrapolation: {reason}."
            errors.append(UncertaintyError(text, "extrapolation", 1.0, 1.0, None, _bare(atoms)))
        return errors

    def _is_apart(self, atoms: Atoms) -> bool:
        """Return whether a structure is far enough from those before, in steps and in novelty."""
        if self._n_steps - self._last < self.min_steps:
            return False
        if not self.min_novelty:
            return True
        assert isinstance(self._model, AtomisticModel)
        fitted, kernel = self._model.fitted, self._model.fitted.representation.kernel
        (chunk,) = self._model.chunks([atoms])
        x = chunk.batch.features
        others = self._environments
        if others is not None:
            similarity = normalized(kernel(x, others), kernel.diag(x), kernel.diag(others))
            novelty = novelty_of(similarity) / fitted.novelty_limits(chunk.center_species)
            if novelty.max() <= self.min_novelty:
                return False
        self._environments = x if others is None else np.concatenate([others, x])
        return True

    def _act(self, atoms: Atoms, errors: list[UncertaintyError]) -> None:
        """Add a structure to the file, or pass it on, if it was not before."""
        # Images of a band that share a calculator are computed several times.
        state = atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc
        key = hashlib.sha256(b"".join(array.tobytes() for array in state)).digest()
        acted_on = self._acted_on.get(key, set())
        errors = [error for error in errors if error.quantity not in acted_on]
        if not errors or not (callable(self.action) if acted_on else self._is_apart(atoms)):
            return
        self._acted_on[key] = acted_on | {error.quantity for error in errors}
        if len(self._acted_on) > _REMEMBERED:
            del self._acted_on[next(iter(self._acted_on))]
        self._last = self._n_steps
        if callable(self.action):
            self.action(atoms, errors[0])
            return
        structure = _bare(atoms)
        structure.info |= {"watch_step": self._n_steps, "watch_reason": str(errors[0])}
        append(self.action, xyz_text(structure).encode(), new=not self._has_file)
        self._has_file = True

    def __deepcopy__(self, memo: dict[int, object]) -> Watch:
        return self  # copies of a calculator share it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    def __repr__(self) -> str:
        limits = [
            f"{_NAMES[name]} > {limit.value:.3g} {_UNITS[name]}".rstrip() + limit.remark
            for name, limit in self._limits.items()
        ]
        if not limits:
            limits = [f"{_NAMES[name]} > {value}" for name, value in self._given.items()]
        limits += ["extrapolation"] * self.extrapolation
        return f"<Watch: {'; '.join(limits) or _DEFAULT}>"


def _checked(name: str, value: float | str) -> float | str:
    """Return a limit: a number, or the text of a multiple."""
    if not isinstance(value, str):
        return check_number(name, value, 0, strict=True)
    if not (match := _MULTIPLE.fullmatch(value)) or float(match[1]) == 0:
        raise InputError(
            f"`{name}` is {value!r}; it must be a number or a multiple of the out-of-bag error, "
            f"such as {_DEFAULT!r}.",
            parameter=name,
        )
    return value


def _checked_action(action: str | Path | Action) -> str | Path | Action:
    if callable(action) or action in ("warn", "raise"):
        return action
    if not isinstance(action, (str, Path)) or Path(action).suffix not in (".xyz", ".extxyz"):
        choices = ("warn", "raise", "the name of a file (.xyz)", "a callable")
        raise unknown_choice("action", action, choices)
    if Path(action).exists():
        raise InputError(
            f"{str(action)!r} exists; structures would be added to others. Choose another name.",
            parameter="action",
        )
    return check_output(action, force=False).absolute()  # wherever the simulation goes


def _fitted(model: object) -> object:
    """Return what models that differ in the number of threads have in common."""
    return model.fitted if isinstance(model, AtomisticModel) else model


def _limit(name: str, value: float | str, model: object) -> _Limit:
    """Return the limit of a quantity by its number, or by the errors of a model."""
    if not isinstance(value, str):
        return _Limit(value, "")
    match = _MULTIPLE.fullmatch(value)
    assert match is not None, "checked before"
    quantity, points = {"energy": TARGET}.get(name, name), None
    if isinstance(model, AtomisticModel):
        points = model.out_of_bag.get(quantity)
    errors = np.zeros(1) if points is None else points.residuals
    if points is not None and name == "forces":
        errors = _largest_errors(points)
    if not (rmse := float(np.sqrt(np.mean(errors**2)))):
        raise InputError(
            f"The model has no out-of-bag errors of {name}, of which the limit could be a "
            f"multiple: give it in {_UNITS[name]}, such as Watch({name}=0.1).",
            parameter=name,
        )
    of = "of the largest force error, " if name == "forces" else ""
    remark = f" ({match[1]} × the out-of-bag RMSE {of}{rmse:.3g} {_UNITS[name]})"
    return _Limit(float(match[1]) * rmse, remark)


def _largest_errors(points: CalibrationData) -> Float64Array:
    """Return the largest error |ΔF| of an atom of each structure, from points of components."""
    assert points.structure is not None
    # Components of a force follow one another, and share the standard deviation of the vector.
    columns = np.stack([points.structure, points.ensemble_std])
    vectors = np.flatnonzero(np.any(np.diff(columns, prepend=-1.0), axis=0))
    lengths = np.sqrt(np.add.reduceat(points.residuals**2, vectors))
    structures = np.flatnonzero(np.diff(points.structure[vectors], prepend=-1))
    return np.asarray(np.maximum.reduceat(lengths, structures))


def _value(name: str, results: Mapping[str, Any], n_atoms: int) -> tuple[float, int | None]:
    """Return the quantity that a limit is for, and the atom that it belongs to."""
    if name == "energy":
        return float(results.get("energy_uncertainty", 0.0)) / n_atoms, None
    values = results.get(_RESULTS[name])
    if values is None or not len(values):
        return 0.0, None
    of_atoms = force_norm(values) if name == "forces" else values
    atom = int(np.argmax(of_atoms))
    return float(of_atoms[atom]), atom


def _bare(atoms: Atoms) -> Atoms:
    """Return a copy of a structure without labels and predictions, which may be of another one."""
    bare: Atoms = atoms.copy()
    bare.info = {key: v for key, v in atoms.info.items() if str(key).lower() in _STATES}
    for name in {*bare.arrays} - _ARRAYS:
        del bare.arrays[name]
    return bare
