"""What ASE calculators of a committee share, and the potential of one member."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError, all_changes
from ase.outputs import Properties, all_outputs

from qualms.atomistic.exact_energies import exact_energies
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.mechanics import Mechanics, check_frames, derivatives, member_energies
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.potential import Potential
from qualms.atomistic.threads import limited
from qualms.core.calibrated_gradients import CalibratedPoint, calibrated_point
from qualms.core.calibration import Calibration
from qualms.core.checks import check_integer
from qualms.core.typing import Float64Array
from qualms.errors import InputError
from qualms.prediction import Prediction

Results = dict[str, Any]

#: Results that ASE does not know, and would not write: kept with the structure, and where.
_OF_STRUCTURES = (
    "energy_uncertainty",
    "energy_ensemble",
    "energy_predicted",
    "stress_uncertainty",
    "stress_ensemble",
    "weight",
)
_OF_ATOMS = ("forces_uncertainty", "forces_ensemble")
#: What needs derivatives, and what needs them with respect to the cell.
_WITH_FORCES = (
    "forces",
    "forces_uncertainty",
    "forces_ensemble",
    "energy_uncertainty_gradient",
)
_WITH_STRESS = ("stress", "stress_uncertainty", "stress_ensemble", "energy_uncertainty_stress")
#: What members can be calibrated for, and methods whose factor is the same everywhere.
_CALIBRATED_FOR = ("forces", "energy")
_CONSTANT = ("student", "linear")


class CommitteePotential(Protocol):
    """What a calculator needs of a model that is not an `AtomisticModel`."""

    @property
    def n_members(self) -> int:
        """N_R."""
        ...

    def predict(self, frames: Sequence[Atoms]) -> Prediction:
        """Predict energies in eV."""
        ...

    def predict_forces(self, frames: Sequence[Atoms], *, stress: bool = False) -> Mechanics:
        """Predict energies, forces and, perhaps, stresses."""
        ...


Model = AtomisticModel | CommitteePotential


class CommitteeCalculator(AseCalculator):
    """What the calculators below share: a model that copies have in common, and the cell."""

    name = "qualms"
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    def __init__(self, model: Model) -> None:
        _check_model(model)
        super().__init__()
        self.model = model
        self._with_stress = False

    @property
    def n_members(self) -> int:
        """N_R."""
        if isinstance(self.model, AtomisticModel):
            return int(self.model.fitted.weights.shape[1])
        return self.model.n_members

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute properties and what comes with them: see ASE."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        has_volume = self.atoms.cell.rank == 3
        if any(name in _WITH_STRESS for name in properties):
            if not has_volume:
                raise PropertyNotImplementedError("stress needs a cell that has a volume")
            self._with_stress = True
        forces = any(name in (*_WITH_FORCES, *_WITH_STRESS) for name in properties)
        # Who asks for a stress once will ask again: it then comes with the forces.
        stress = forces and has_volume and self._with_stress
        self.results = self._compute(self.atoms, forces=forces, stress=stress)

    def _compute(self, atoms: Atoms, *, forces: bool, stress: bool) -> Results:
        raise NotImplementedError

    def export_properties(self) -> Properties:
        """Return the results that ASE knows."""
        return Properties({k: v for k, v in self.results.items() if k in all_outputs})

    def __deepcopy__(self, memo: dict[int, object]) -> CommitteeCalculator:
        # A trained model does not change, and may be large: copies share it.
        new = copy.copy(self)
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name not in ("model", "_potential"):
                setattr(new, name, copy.deepcopy(value, memo))
        return new


class MemberCalculator(CommitteeCalculator):
    """The potential of one member of a committee, calibrated, for ASE.

    Calibrated members differ from their mean as the truth may: what they make of a bond length, a
    frequency or a barrier differs as its true value may. Forces are exact derivatives of the
    energy, whatever the calibration.

    Parameters
    ----------
    model : AtomisticModel
    index : int
        Which member, from 0.
    calibrated_for : {"forces", "energy"}, optional
        What the member is stretched for. One potential cannot have both the spread of energies and
        that of forces, whose calibrations differ. By default that of forces if the model has one of
        its own, else that of the energy.

    Notes
    -----
    A calibration of forces whose factor depends on the spread (power, shrinkage) has another factor
    for each atom, and no energy has forces that are stretched like that. Members are then stretched
    by the one factor that fits all forces best: that of the student calibration of the same forces,
    or of the linear one.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012

    def __init__(self, model: Model, index: int, calibrated_for: str | None = None) -> None:
        super().__init__(model)
        self.index = check_integer("index", index, 0)
        if self.index >= self.n_members:
            raise InputError("index", index, f"one of {self.n_members} members, from 0")
        self.calibrated_for = _calibrated_for(self.model, calibrated_for)
        self._mixture = _mixture(self.model, self.index, self.calibrated_for)
        self._potential: Potential | None = None

    def __getstate__(self) -> dict[str, Any]:
        # featomic's calculators cannot be pickled, and are made again when they are needed.
        return self.__dict__ | {"_potential": None}

    def _compute(self, atoms: Atoms, *, forces: bool, stress: bool) -> Results:
        if not forces:
            return self._of_energy(energy_of(self.model, atoms))
        if self._mixture is not None and isinstance(self.model, AtomisticModel):
            check_frames(self.model.fitted, [atoms], stress=stress)
            if self._potential is None:
                self._potential = _mixed(self.model.potential, self._mixture)
            return _of_mixture(self.model, self._potential, self._mixture, atoms, stress=stress)
        found = self.model.predict_forces([atoms], stress=stress)
        results = self._of_energy(found.energy[0])
        point = point_of(self.model, found.energy[0], len(atoms))
        raw = found.forces.uncalibrated.members
        results["forces"] = point.member_gradients(raw)[..., self.index]
        if found.stress is not None:
            raw = found.stress.uncalibrated.members[0]
            results["stress"] = point.member_gradients(raw)[..., self.index]
        return results

    def _of_energy(self, energy: Prediction) -> Results:
        value = float(energy.members[self.index])
        if self._mixture is not None:
            value = float(energy.uncalibrated.members @ self._mixture)
        return {"energy": value, "free_energy": value}


def _calibrated_for(model: Model, given: str | None) -> str:
    """Return what members are calibrated for: what is asked for, or what the model was."""
    if given not in (None, *_CALIBRATED_FOR):
        raise InputError("calibrated_for", repr(given), " or ".join(map(repr, _CALIBRATED_FOR)))
    has_own = isinstance(model, AtomisticModel) and model.fitted.forces_calibration is not None
    if given == "forces" and not has_own:
        expected = "'energy': the model has no calibration of forces"
        raise InputError("calibrated_for", "'forces'", expected, "Train it on forces.")
    return given or ("forces" if has_own else "energy")


def _mixture(model: Model, i: int, calibrated_for: str) -> Float64Array | None:
    """Return the weights c of members whose sum Σ_j c_j E_j is the calibrated energy of member i.

    There are such weights if members are scaled about their mean by a factor f that is the same for
    all spreads: c_j = f δ_ij + (1 − f) / N_R.
    """
    if not isinstance(model, AtomisticModel):
        return None
    n = model.fitted.weights.shape[1]
    if calibrated_for == "forces":
        f: float | None = _forces_factor(model.fitted, n)
    else:
        f = _constant_factor(model.fitted.calibration, n)
    if f is None:
        return None
    c: Float64Array = f * np.eye(n)[i] + (1.0 - f) / n
    return c


def _forces_factor(fitted: Fitted, n_members: int) -> float:
    """Return the one factor that members are stretched by if forces are to be calibrated."""
    own = [fitted.forces_calibration, *map(fitted.forces_calibrations.get, _CONSTANT)]
    factors = (_constant_factor(found, n_members) for found in own if found is not None)
    return next((f for f in factors if f is not None), 1.0)


def _constant_factor(calibration: Calibration, n_members: int) -> float | None:
    """Return the factor of a calibration, if it is the same for all spreads."""
    spreads = np.array([1e-3, 1.0])
    low, high = (calibration.std(spreads, n_members) / spreads).tolist()
    return float(high) if np.isclose(low, high, rtol=1e-12, atol=0.0) else None


def _mixed(potential: Potential, c: Float64Array) -> Potential:
    """Return the potential Σ_j c_j E_j, one column."""
    return Potential([replace(s, weights=s.weights @ c[:, None]) for s in potential.scales])


def _of_mixture(
    model: AtomisticModel, potential: Potential, c: Float64Array, atoms: Atoms, *, stress: bool
) -> Results:
    """Return energy, forces and, perhaps, the stress of Σ_j c_j E_j, at the price of one member."""
    with limited(model.threads, len(atoms)):
        found = derivatives(potential, [atoms], strain=stress)
    others = member_energies(model.fitted, [atoms], np.zeros((1, len(c))))[0] @ c * len(atoms)
    energy = float(found.energies[0, 0] + others)
    results: Results = {"energy": energy, "free_energy": energy, "forces": found.forces[..., 0]}
    if found.virials is not None:
        results["stress"] = found.virials[0, :, 0] / atoms.cell.volume
    return results


def annotate(atoms: Atoms, results: Results) -> None:
    """Keep with a structure what ASE does not write, and nothing of other calculations."""
    for names, store in ((_OF_STRUCTURES, atoms.info), (_OF_ATOMS, atoms.arrays)):
        for name in names:
            store.pop(name, None)
            if name in results:
                store[name] = copy.copy(results[name])


def energy_of(model: Model, atoms: Atoms) -> Prediction:
    """Return the energy of a structure, the same as would come with its forces."""
    if not isinstance(model, AtomisticModel):
        return model.predict([atoms])[0]
    if model.fitted.representation.soap.resolved_engine == "featomic":
        return exact_energies(model, [atoms])[0]
    return model.predict([atoms])[0]  # there are no forces


def point_of(model: Model, energy: Prediction, n_atoms: int) -> CalibratedPoint:
    """Return the energy of one structure and how its calibration depends on it."""
    calibration = model.fitted.calibration if isinstance(model, AtomisticModel) else None
    return calibrated_point(
        energy.uncalibrated.members, energy.members, calibration, scale=float(n_atoms)
    )


def _check_model(model: Model) -> None:
    """Refuse a model that has no forces, or whose units ASE would not understand."""
    if not isinstance(model, AtomisticModel):
        if not (hasattr(model, "predict") and hasattr(model, "predict_forces")):
            raise InputError("model", type(model).__name__, "an AtomisticModel, or its file")
        return
    settings = model.fitted.settings
    if settings.kind != "extensive":
        raise InputError("model", f"kind {settings.kind!r}", "an energy, of kind 'extensive'")
    if settings.units and settings.units.casefold() != "ev":
        raise InputError(
            "model", f"energies in {settings.units}", "energies in eV", "Train it on those."
        )
