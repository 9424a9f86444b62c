"""Derivatives of calibrated members, and of their spread, from those of the members as they are.

A calibration scales members E_i about their mean by a factor that may depend on their spread s:

    E_i' = Ē + f(s) d_i,     d_i = E_i − Ē,     s² = Σ d_i² / (N_R − 1),     σ = f(s) s

so with g_i = ∇E_i and γ_i = g_i − ḡ

    ∇ ln s = Σ_i d_i γ_i / ((N_R − 1) s²)
    ∇E_i'  = ḡ + f γ_i + (df/d ln s) d_i ∇ ln s
    ∇σ     = (f + df/d ln s) s ∇ ln s

For a constant factor the second terms vanish. Forces and stresses are such derivatives up to a
common factor, which these formulas do not care about.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError, all_changes
from ase.outputs import Properties, all_outputs
from numpy.typing import ArrayLike

from qualms.arrays import Float64Array, check_integer, check_number
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import Mechanics, Potential, check_frames, derivatives, member_energies
from qualms.atomistic.model import AtomisticModel, exact_energies
from qualms.atomistic.novelty import force_norm
from qualms.calibration.base import Calibration
from qualms.errors import InputError, QualmsWarning, UncertaintyError, level_of_user
from qualms.gp.ensemble import committee
from qualms.prediction import Prediction, stack_members
from qualms.resources import default_threads, limited

#: Step of the central difference in ln s: its error is about the square of that.
_STEP = 1e-4


@dataclass(frozen=True)
class CalibratedPoint:
    """One prediction, and how its calibration changes with it.

    Attributes
    ----------
    members : (N_R,) array
        E_i, before calibration.
    factor : float
        f(s).
    slope : float
        df/d ln s.
    """

    members: Float64Array
    factor: float
    slope: float

    def member_gradients(self, gradients: Float64Array) -> Float64Array:
        """Return ∇E_i' (…, N_R), given ∇E_i of the same shape."""
        mean = gradients.mean(axis=-1, keepdims=True)
        deviations = self.members - self.members.mean()
        along = self._log_spread_gradient(gradients)[..., None]
        calibrated: Float64Array = (
            mean + self.factor * (gradients - mean) + self.slope * deviations * along
        )
        return calibrated

    def std_gradient(self, gradients: Float64Array) -> Float64Array:
        """Return ∇σ (…), given ∇E_i (…, N_R); zero where all members agree."""
        scale = (self.factor + self.slope) * self._spread
        gradient: Float64Array = scale * self._log_spread_gradient(gradients)
        return gradient

    @property
    def _spread(self) -> float:
        return float(committee(self.members)[1])

    def _log_spread_gradient(self, gradients: Float64Array) -> Float64Array:
        deviations = self.members - self.members.mean()
        square = float(deviations @ deviations)  # (N_R − 1) s²
        if square == 0.0:
            return np.zeros(gradients.shape[:-1])
        gradient: Float64Array = gradients @ deviations / square  # Σ d_i ḡ = 0
        return gradient


def calibrated_point(
    raw: Float64Array, calibrated: Float64Array, calibration: Calibration | None, scale: float = 1.0
) -> CalibratedPoint:
    """Describe one prediction.

    Parameters
    ----------
    raw, calibrated : (N_R,) arrays
        Members before and after calibration.
    calibration : Calibration or None
        What came between; None for a factor that does not depend on the spread.
    scale : float
        What was multiplied by after calibration: the number of atoms, for an extensive property.
    """
    before, after = (float(committee(members)[1]) for members in (raw, calibrated))
    factor, slope = (after / before if before > 0.0 else 1.0), 0.0
    if calibration is not None and before > 0.0:
        spreads = before / scale * np.exp([-_STEP, _STEP])
        low, high = (calibration.std(spreads, len(raw)) / spreads).tolist()
        slope = (high - low) / (2 * _STEP)
    return CalibratedPoint(raw, factor, slope)


# What ASE calculators of a committee share, and the potential of one member.
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
    has_own = (
        isinstance(model, AtomisticModel) and model.fitted.calibration_of("forces") is not None
    )
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
    found_for_forces = fitted.calibrations.get("forces", {})
    own = [fitted.calibration_of("forces"), *map(found_for_forces.get, _CONSTANT)]
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


# An ASE calculator: energies, forces and stresses with error bars.
#: Called with a structure that is too uncertain, and what is known about it.
OnExceed = Callable[[Atoms, Results], object]

_LIMITED = ("energy_uncertainty", "forces_uncertainty", "stress_uncertainty")


class Calculator(CommitteeCalculator):
    """Energies, forces and stresses of a committee, with their error bars, for ASE.

    Parameters
    ----------
    model : AtomisticModel or path
        Of an extensive energy in eV: one without units is taken for that, with a warning. A path is
        that of a file that `AtomisticModel.save` wrote.
    uncertainty_threshold : float or mapping, optional
        The largest ``energy_uncertainty`` of a structure, in eV, that passes without a word; or
        limits by name: ``{"energy_uncertainty": 0.1, "forces_uncertainty": 0.5}``. That of forces
        is for the atom whose error bar is largest, as a vector: √(σ_x² + σ_y² + σ_z²), which does
        not depend on how the structure is turned. That of ``stress_uncertainty`` is for the largest
        component. Limits of forces and stresses are looked at when these are computed.
    on_exceed : {"warn", "raise"} or callable
        What to do about a structure beyond them: warn, when it happens first and again whenever it
        happens after structures within them; raise `UncertaintyError`; or call
        ``on_exceed(atoms, results)``, once for each structure, and again only if another limit is
        exceeded when more is asked about it.
    annotate : bool
        Whether uncertainties and ensembles are also put into ``atoms.info`` and ``atoms.arrays``,
        from where ASE writes them to extended XYZ: it writes no results but those it knows. They
        are replaced whenever this calculator is asked about the structure, and stay if another is.
    threads : int, optional
        Cores to use; those of the model by default. Structures of up to 64 atoms take one.

    Notes
    -----
    Results are ``energy`` and ``free_energy`` (eV), ``forces`` (eV/Å) and ``stress`` (eV/Å³, six
    components in ASE's order and sign) of the mean of the committee, and

    - ``energy_uncertainty``, ``energy_ensemble`` (N_R,): calibrated, eV;
    - ``forces_uncertainty`` (n, 3), ``forces_ensemble`` (n, 3, N_R): calibrated, eV/Å. In
      ``atoms.arrays`` the latter has 3 N_R columns, member by member;
    - ``stress_uncertainty`` (6,), ``stress_ensemble`` (6, N_R): calibrated, eV/Å³, with the stress.
      In ``atoms.info`` the latter has 6 N_R numbers, member by member;
    - ``energy_uncertainty_gradient`` (n, 3) and ``energy_uncertainty_stress`` (6,): derivatives of
      ``energy_uncertainty``, eV/Å and eV/Å³.

    Forces are computed when something asks for them, and not before. Copies share the model.

    Examples
    --------
    >>> atoms.calc = Calculator("model.safetensors", uncertainty_threshold=0.1)  # doctest: +SKIP
    >>> atoms.get_forces(), atoms.calc.results["forces_uncertainty"]  # doctest: +SKIP
    """

    implemented_properties = [  # noqa: RUF012
        "energy",
        "free_energy",
        "forces",
        "stress",
        "energy_uncertainty",
        "energy_ensemble",
        "forces_uncertainty",
        "forces_ensemble",
        "stress_uncertainty",
        "stress_ensemble",
        "energy_uncertainty_gradient",
        "energy_uncertainty_stress",
    ]

    def __init__(
        self,
        model: Model | str | Path,
        uncertainty_threshold: float | Mapping[str, float] | None = None,
        on_exceed: str | OnExceed = "warn",
        *,
        annotate: bool = True,
        threads: int | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            model = AtomisticModel.load(model, threads=threads)
        elif threads is not None:
            model = _with_threads(model, threads)
        super().__init__(model)
        _warn_of_units(model)
        self.uncertainty_threshold = _limits(uncertainty_threshold)
        if on_exceed not in ("warn", "raise") and not callable(on_exceed):
            raise InputError("on_exceed", repr(on_exceed), "'warn', 'raise' or a callable")
        self.on_exceed = on_exceed
        self.annotate = annotate
        self._beyond = False
        self._told: set[str] = set()

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """Return a property, computed if it must be and may be: see ASE."""
        value = super().get_property(name, atoms, allow_calculation)
        if atoms is not None and value is not None:
            # It may have been computed before, for an equal structure.
            self._annotate(atoms)
            if self.on_exceed == "raise":
                self._judge(atoms)
        return value

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute properties and what comes with them: see ASE."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        given = self.atoms if atoms is None else atoms
        if system_changes:  # otherwise it is the same structure, of which more is asked
            self._told = set()
        self._annotate(given)
        self._judge(given)

    def member(self, i: int, *, calibrated_for: str | None = None) -> MemberCalculator:
        """Return a calculator of the potential that member i, calibrated, believes in.

        Parameters
        ----------
        i : int
            From 0.
        calibrated_for : {"forces", "energy"}, optional
            Whether its forces, or its energy, differ from the mean as the truth may: see
            `MemberCalculator`. Forces by default, if the model has a calibration of its own for
            them; else the energy.
        """
        return MemberCalculator(self.model, i, calibrated_for)

    def map(
        self, f: Callable[[MemberCalculator], ArrayLike], *, calibrated_for: str | None = None
    ) -> Prediction:
        """Call a function with a calculator of each member; return what it finds, with error bars.

        Parameters
        ----------
        f : callable
            Takes a calculator and returns a number or an array, such as a bond length after
            relaxation, or frequencies.
        calibrated_for : {"forces", "energy"}, optional
            As in `member`: forces are right for what follows from forces, such as geometries and
            frequencies, and the energy for energies, and differences of them.
        """
        members = [self.member(i, calibrated_for=calibrated_for) for i in range(self.n_members)]
        return Prediction(stack_members([f(member) for member in members]))

    def _compute(self, atoms: Atoms, *, forces: bool, stress: bool) -> Results:
        if not forces:
            return _of_energy(energy_of(self.model, atoms))
        found = self.model.predict_forces([atoms], stress=stress)
        results = _of_energy(found.energy[0])
        point = point_of(self.model, found.energy[0], len(atoms))
        results["forces"] = found.forces.mean
        results["forces_uncertainty"] = found.forces.std
        results["forces_ensemble"] = found.forces.members.copy()
        raw = found.forces.uncalibrated.members
        results["energy_uncertainty_gradient"] = -point.std_gradient(raw)
        if found.stress is not None:
            results["stress"] = found.stress.mean[0]
            results["stress_uncertainty"] = found.stress.std[0]
            results["stress_ensemble"] = found.stress.members[0].copy()
            raw = found.stress.uncalibrated.members[0]
            results["energy_uncertainty_stress"] = point.std_gradient(raw)
        return results

    def _annotate(self, atoms: Atoms) -> None:
        """Keep with a structure what ASE does not write, and nothing of other calculations."""
        if not self.annotate:
            return
        annotate(atoms, self.results)
        if "forces_ensemble" in atoms.arrays:  # XYZ has columns: of member 0, x y z, of member 1, …
            members = np.moveaxis(atoms.arrays["forces_ensemble"], -1, 1)
            atoms.arrays["forces_ensemble"] = members.reshape(len(atoms), -1)
        if "stress_ensemble" in atoms.info:
            atoms.info["stress_ensemble"] = atoms.info["stress_ensemble"].T.ravel()

    def _judge(self, atoms: Atoms) -> None:
        """Do what is to be done about a structure that is too uncertain."""
        beyond = {
            name: f"{name} = {largest:.3g} exceeds {limit:.3g}"
            for name, limit in self.uncertainty_threshold.items()
            if name in self.results and (largest := _largest(name, self.results[name])) > limit
        }
        if not beyond:
            self._beyond = False
            return
        what = ", ".join(beyond.values())
        message = f"{atoms.get_chemical_formula()}: {what} (uncertainty_threshold)."
        if self.on_exceed == "raise":
            raise UncertaintyError(message)
        if callable(self.on_exceed):
            if not self._told.issuperset(beyond):
                self._told |= set(beyond)
                self.on_exceed(atoms, self.results)
        elif not self._beyond:
            warnings.warn(message, QualmsWarning, stacklevel=level_of_user())
        self._beyond = True


def _largest(name: str, uncertainty: ArrayLike) -> float:
    """Return what a limit is for: of forces the largest error bar of a whole force."""
    of_forces = name == "forces_uncertainty"
    values = force_norm(np.asarray(uncertainty)) if of_forces else uncertainty
    return float(np.max(values))


def _of_energy(energy: Prediction) -> Results:
    return {
        "energy": float(energy.mean),
        "free_energy": float(energy.mean),
        "energy_uncertainty": float(energy.std),
        "energy_ensemble": energy.members.copy(),
    }


def _with_threads(model: Model, threads: int) -> AtomisticModel:
    """Return a model that shares everything with another but the number of cores it uses."""
    if not isinstance(model, AtomisticModel):
        raise InputError("threads", threads, "None, unless the model is an AtomisticModel")
    same = copy.copy(model)
    same.threads = default_threads(threads)
    return same


def _warn_of_units(model: Model) -> None:
    """Tell of energies in units that nobody knows."""
    if isinstance(model, AtomisticModel) and not model.fitted.settings.units:
        warnings.warn(
            "The model does not say what units its energies have: they are taken for eV, and "
            "forces for eV/Å. Train it with units='eV' if they are.",
            QualmsWarning,
            stacklevel=3,
        )


def _limits(threshold: float | Mapping[str, float] | None) -> dict[str, float]:
    """Return the largest uncertainties allowed, by name."""
    if threshold is None:
        return {}
    if not isinstance(threshold, Mapping):
        threshold = {"energy_uncertainty": threshold}
    unknown = [name for name in threshold if name not in _LIMITED]
    if unknown:
        raise InputError("uncertainty_threshold", unknown[0], f"limits of {' or '.join(_LIMITED)}")
    name = "uncertainty_threshold"
    return {key: check_number(name, limit, 0, strict=True) for key, limit in threshold.items()}
