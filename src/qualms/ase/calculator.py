"""ASE calculators: energies, forces and stresses with uncertainties, and single members.

A calibration scales members E_i about their mean by a factor that may depend on their standard
deviation s:

    E_i' = Ē + f(s) d_i,     d_i = E_i − Ē,     s² = Σ d_i² / (N_R − 1),     σ = f(s) s

so with g_i = ∇E_i and γ_i = g_i − ḡ

    ∇ ln s = Σ_i d_i γ_i / ((N_R − 1) s²)
    ∇E_i'  = ḡ + f γ_i + (df/d ln s) d_i ∇ ln s
    ∇σ     = (f + df/d ln s) s ∇ ln s

For a constant factor the second terms vanish. Forces and stresses are such derivatives up to a
common factor.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError, all_changes
from ase.outputs import Properties, all_outputs
from numpy.typing import ArrayLike

from qualms.arrays import Float64Array, check_integer, check_number
from qualms.ase.watch import Watch
from qualms.atomistic.delta import StoredPotential
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import Potential, check_model, derivatives
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import Request, StructurePrediction
from qualms.calibration.members import calibrated_members, source_members
from qualms.errors import (
    CalibrationError,
    InputError,
    QualmsWarning,
    UncertaintyError,
    unknown_choice,
)
from qualms.gp.ensemble import ensemble_mean_std, rescaled
from qualms.prediction import Prediction, stack_members
from qualms.resources import default_threads, limited

Results = dict[str, Any]
#: Takes members (…, N_R) to calibrated ones.
Calibrate = Callable[[Float64Array], Float64Array]

#: Results beside energies, and what is computed for them: novelty, forces, the stress, and
#: derivatives of the uncertainty of the energy.
_NEEDS: dict[str, frozenset[str]] = {
    name: frozenset(needs.split())
    for needs, names in {
        "novelty": ("novelty", "atom_novelty", "extrapolates", "extrapolation_reason"),
        "forces": ("forces", "forces_uncertainty", "forces_ensemble"),
        "forces stress": ("stress", "stress_uncertainty", "stress_ensemble"),
        "forces gradient": ("energy_uncertainty_gradient",),
        "forces gradient stress": ("energy_uncertainty_stress",),
    }.items()
    for name in names
}
#: Results that ASE does not write: copied to ``atoms.info`` and to ``atoms.arrays``.
_OF_STRUCTURES = (
    "energy_uncertainty", "energy_ensemble", "energy_predicted", "stress_uncertainty",
    "stress_ensemble", "weight", "novelty", "extrapolates", "extrapolation_reason",
)  # fmt: skip
_OF_ATOMS = ("forces_uncertainty", "forces_ensemble", "atom_novelty")


# --- derivatives of calibrated members ---


def member_gradients(
    calibrate: Calibrate, members: Float64Array, gradients: Float64Array
) -> Float64Array:
    """Return the gradients ∇E_i' of calibrated members.

    A central difference along each gradient: the factors of a calibration depend on the members.
    Energies are relative to their mean, so that no digits are lost. The step is small relative to
    the standard deviation: the error is about the square of that.

    Parameters
    ----------
    calibrate : callable
        Returns calibrated members (…, N_R) for those before calibration.
    members : (N_R,) array
        E_i before calibration.
    gradients : (…, N_R) array
        ∇E_i.
    """
    deviations, std = members - members.mean(), float(ensemble_mean_std(members)[1])
    slopes = ensemble_mean_std(gradients)[1]
    step = np.divide(1e-4 * std, slopes, out=np.ones_like(slopes), where=slopes > 0)[..., None]
    step = np.where(step > 0, step, 1.0)
    low, high = (calibrate(deviations + h * gradients) for h in (-step, step))
    return np.asarray((high - low) / (2 * step))


def std_gradient(members: Float64Array, gradients: Float64Array) -> Float64Array:
    """Return ∇σ (…), for E_i (N_R,) and ∇E_i (…, N_R); zero where all members agree."""
    deviations = members - members.mean()
    square = float(deviations @ deviations)  # (N_R − 1) σ²
    if square == 0.0:
        return np.zeros(gradients.shape[:-1])
    # Σ d_i ḡ = 0
    return np.asarray(gradients @ deviations * ((len(members) - 1) * square) ** -0.5)


# --- calculators ---


class CommitteePotential(Protocol):
    """Interface of a model for `Calculator` that is not an `AtomisticModel`."""

    @property
    def n_members(self) -> int:
        """N_R."""
        ...

    def predict(
        self, frames: Sequence[Atoms], *, forces: bool = False, stress: bool = False
    ) -> StructurePrediction:
        """Predict energies in eV and, perhaps, forces and stresses."""
        ...


Model = AtomisticModel | CommitteePotential


class UncertaintyCalculator(AseCalculator):
    """Base of all calculators: ASE's interface around one function that computes results."""

    name = "qualms"
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        # Structure and results belong together, whichever thread asks for them.
        self._lock = RLock()

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute properties and all that comes with them: see ASE."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        if system_changes:
            self._started()
        self.results = self._compute(self.atoms, properties)
        self._computed(atoms or self.atoms)

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """Return a property, computed if necessary: see ASE."""
        if name not in self.implemented_properties:
            raise PropertyNotImplementedError(self._reason(name))
        with self._lock:
            value = super().get_property(name, atoms, allow_calculation)
            if atoms is not None and value is not None and allow_calculation:
                # It may have been computed before, for an equal structure. Files of structures
                # that have an error can be written, without calculation.
                self._returned(atoms)
            return value

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    def _compute(self, atoms: Atoms, properties: Sequence[str]) -> Results:
        raise NotImplementedError

    def _reason(self, name: str) -> str:
        """Return why there is no such property."""
        return f"{name} is none of {', '.join(self.implemented_properties)}"

    def _started(self) -> None:
        """Forget the structure before, whether or not results of the new one can be computed."""

    def _computed(self, atoms: Atoms) -> None:
        """Handle a structure with new results."""

    def _returned(self, atoms: Atoms) -> None:
        """Handle a structure whose results are returned."""

    def export_properties(self) -> Properties:
        """Return the results that ASE knows."""
        return Properties({k: v for k, v in self.results.items() if k in all_outputs})


class ModelCalculator(UncertaintyCalculator):
    """Base of the calculators of a model, which copies share."""

    def __init__(self, model: Model) -> None:
        _check_model(model)
        super().__init__()
        self.model = model
        self._needs: set[str] = set()  # what was requested once is computed with every structure
        self._potential: Potential | None = None  # that of the model, and that of `_of_mixture`
        self._combined: Potential | None = None
        lacks = {"novelty"} if self._fitted is None else set()
        if self._fitted is not None and not self._fitted.representation.has_derivatives:
            lacks.add("forces")
        # Of this object, rather than of the class: not all models have forces.
        self.implemented_properties = [
            name for name in self.implemented_properties if not lacks & _NEEDS.get(name, set())
        ]

    @property
    def _fitted(self) -> Fitted | None:
        return self.model.fitted if isinstance(self.model, AtomisticModel) else None

    @property
    def n_members(self) -> int:
        """N_R."""
        if isinstance(self.model, AtomisticModel):
            return self.model.fitted.n_members
        return self.model.n_members

    def _compute(self, atoms: Atoms, properties: Sequence[str]) -> Results:
        has_volume = bool(atoms.cell.rank == 3)
        needs = set[str]().union(*(_NEEDS.get(name, ()) for name in properties))
        if "stress" in needs and not has_volume:
            raise PropertyNotImplementedError("stress needs a cell that has a volume")
        self._needs |= needs
        if "forces" not in needs:
            return self._of_energy(self._predict(atoms))
        return self._of_forces(atoms, properties, stress=has_volume and "stress" in self._needs)

    def _reason(self, name: str) -> str:
        if self._fitted is not None and "forces" in _NEEDS.get(name, ()):
            try:
                self._fitted.representation.check_derivatives()
            except InputError as error:
                return str(error)
        return super()._reason(name)

    def _of_energy(self, energy: StructurePrediction) -> Results:
        raise NotImplementedError

    def _of_forces(self, atoms: Atoms, properties: Sequence[str], *, stress: bool) -> Results:
        raise NotImplementedError

    def _predict(
        self, atoms: Atoms, *, forces: bool = False, stress: bool = False, means: bool = False
    ) -> StructurePrediction:
        """Return the prediction of a structure, perhaps with derivatives of its mean alone."""
        if not isinstance(self.model, AtomisticModel):
            return self.model.predict([atoms], forces=forces, stress=stress).structure(0)
        novelty = "novelty" in self._needs
        request = Request(forces=forces, stress=stress, atoms=novelty, novelty=novelty, means=means)
        potential = self._terms(self.model) if "forces" in self.implemented_properties else None
        (prediction,) = self.model.stream([atoms], request, potential=potential)
        return prediction.structure(0)

    def _terms(self, model: AtomisticModel) -> Potential:
        """Return the potential of the model, which finds neighbours again when atoms have moved."""
        if self._potential is None:
            self._potential = [term.following() for term in model.potential]
        return self._potential

    def _of_mixture(
        self, model: AtomisticModel, c: Float64Array, atoms: Atoms, *, stress: bool
    ) -> Results:
        """Return the results of the one potential Σ_j c_j E_j, in the time of one member."""
        check_model(model.fitted)
        (chunk,) = model.chunks([atoms], features=False)
        if self._combined is None:
            self._combined = [term.combined(c[:, None]) for term in self._terms(model)]
        with limited(model.threads, len(atoms)):
            learned = derivatives(self._combined, [atoms], strain=stress, threads=model.threads)
        baselines = model.fitted.with_baseline(np.zeros((1, len(c))), chunk.design)[0]
        others = baselines @ c * len(atoms)
        results: Results = {"energy": float(learned.energies[0, 0] + others)}
        results["forces"] = learned.forces[..., 0]
        if learned.virials is not None:
            results["stress"] = learned.virials[0, :, 0] / atoms.cell.volume
        if model.baseline_potential is not None:
            values = model.baseline_potential.evaluate([atoms], forces=True, stress=stress)
            for name, of_baseline in zip(("energy", "forces", "stress"), values, strict=True):
                if of_baseline is not None:
                    results[name] = results[name] + of_baseline[0]
        return results | {"free_energy": results["energy"]}

    def __getstate__(self) -> dict[str, Any]:
        # They are as large as the model, and are made again when they are needed.
        return super().__getstate__() | {"_potential": None, "_combined": None}

    def _calibrate(self, energy: Prediction, n_atoms: int) -> Calibrate:
        """Return the function that calibrates the members of the energy of a structure.

        Members of a model that is not ours are scaled by a constant factor.
        """
        if self._fitted is not None:
            calibration = self._fitted.calibration
            return lambda members: n_atoms * calibrated_members(calibration, members / n_atoms)
        before, after = (
            ensemble_mean_std(members)[1]
            for members in (energy.uncalibrated.members, energy.members)
        )
        factor = float(after / before) if before > 0.0 else 1.0
        return lambda members: rescaled(members, np.full(members.shape[:-1], factor))

    def __deepcopy__(self, memo: dict[int, object]) -> ModelCalculator:
        # A trained model does not change, and may be large: copies share it.
        new = copy.copy(self)
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name not in ("model", "_potential", "_combined", "_lock"):
                setattr(new, name, copy.deepcopy(value, memo))
        new._potential = new._combined = None
        return new


class MemberCalculator(ModelCalculator):
    """The potential of one ensemble member, calibrated, for ASE.

    Calibrated members differ from their mean as the reference may: so do the bond lengths,
    frequencies or barriers that follow from them. Forces are exact derivatives of the energy,
    whatever the calibration.

    Parameters
    ----------
    model : AtomisticModel
    index : int
        Which member, from 0.
    calibrated_for : {"forces", "energy"}, optional
        One potential cannot have both the standard deviation of energies and that of forces, whose
        calibrations differ. By default the member is rescaled for forces if the model has a
        calibration of forces, else for the energy.

    Notes
    -----
    Calibrated forces have another factor for each atom, because of its standard deviation or its
    element, and no energy has such forces. Members are rescaled by one factor for all forces: the
    typical one of the calibration, or of the student calibration.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012

    def __init__(self, model: Model, index: int, calibrated_for: str | None = None) -> None:
        """Set up the calculator; the class describes the parameters."""
        super().__init__(model)
        self.index = check_integer("index", index, 0)
        if self.index >= self.n_members:
            raise InputError(
                f"`index` is {index}; predictions have {self.n_members} members, counted from 0.",
                parameter="index",
            )
        if calibrated_for not in (None, "forces", "energy"):
            raise unknown_choice("calibrated_for", calibrated_for, ("forces", "energy"))
        of_forces = self._fitted and self._fitted.calibration_of("forces")
        if calibrated_for == "forces" and of_forces is None:
            raise InputError(
                "The model has no calibration of forces. Use `calibrated_for='energy'`, or train "
                "it on forces.",
                parameter="calibrated_for",
            )
        self.calibrated_for = calibrated_for or ("energy" if of_forces is None else "forces")
        self._mixture = self._weights_of_members()

    def _of_energy(self, energy: StructurePrediction) -> Results:
        value = float(energy.members[self.index])
        if self._mixture is not None:
            value = float(energy.uncalibrated.members @ self._mixture)
        return {"energy": value, "free_energy": value}

    def _of_forces(self, atoms: Atoms, properties: Sequence[str], *, stress: bool) -> Results:
        if self._mixture is not None and isinstance(self.model, AtomisticModel):
            return self._of_mixture(self.model, self._mixture, atoms, stress=stress)
        predicted = self._predict(atoms, forces=True, stress=stress)
        results, calibrate = self._of_energy(predicted), self._calibrate(predicted, len(atoms))
        members = predicted.uncalibrated.members
        for name in ("forces", "stress")[: 1 + stress]:
            raw = getattr(predicted, name).uncalibrated.members
            results[name] = member_gradients(calibrate, members, raw)[..., self.index]
        return results

    def _weights_of_members(self) -> Float64Array | None:
        """Return weights c such that Σ_j c_j E_j is the calibrated energy of the member.

        They exist if members are scaled about their mean by a constant factor f:
        c_j = f δ_ij + (1 − f) / N_R.
        """
        fitted = self._fitted
        if fitted is None:
            return None
        n, calibration = self.n_members, fitted.calibration
        f = calibration.constant_factor(n)
        if self.calibrated_for == "forces":
            calibration = fitted.calibration_of("forces") or calibration
            f = calibration.typical_factor(n)
            if f is None:
                student = None
                with suppress(CalibrationError):
                    student = fitted.with_calibration("student").calibration_of("forces")
                f = 1.0 if student is None else student.typical_factor(n)
        if f is None:
            return None
        n = fitted.weights.shape[1]
        # The member before it is scaled, in terms of all E_j.
        weights = source_members(calibration, np.eye(n))[:, self.index]
        return np.asarray(f * weights + (1.0 - f) / n)


def annotate(atoms: Atoms, results: Results) -> None:
    """Copy results that ASE does not write to a structure; remove those of other calculators.

    Ensembles have the layout that ASE can write: of member 0, x y z; of member 1, …
    """
    for names, store in ((_OF_STRUCTURES, atoms.info), (_OF_ATOMS, atoms.arrays)):
        for name in names:
            store.pop(name, None)
            if name in results:
                store[name] = copy.copy(results[name])
    if "forces_ensemble" in results:
        members = np.moveaxis(results["forces_ensemble"], -1, 1)
        atoms.arrays["forces_ensemble"] = members.reshape(len(atoms), -1)
    if "stress_ensemble" in results:
        atoms.info["stress_ensemble"] = results["stress_ensemble"].T.ravel()


def _check_model(model: Model) -> None:
    """Reject a model that is not a potential in eV."""
    if not isinstance(model, AtomisticModel):
        if not hasattr(model, "predict"):
            raise InputError(
                f"`model` is a {type(model).__name__}; it must be an AtomisticModel, or its file.",
                parameter="model",
            )
        return
    kind, unit = model.fitted.settings.kind, model.fitted.settings.units
    if kind != "extensive":
        raise InputError(
            f"The `model` predicts a property of kind {kind!r}; a calculator needs an energy, "
            "which is 'extensive'.",
            parameter="model",
        )
    if unit and unit.casefold() != "ev":
        raise InputError(
            f"The `model` predicts energies in {unit}; a calculator needs eV. Train it on energies "
            "in eV.",
            parameter="model",
        )
    # Values of other positions would be used.
    if isinstance(model.baseline_potential, StoredPotential):
        raise InputError(
            "The baseline of the `model` is read from structures "
            f"({model.baseline_potential.name}) and is not known when atoms move. Load the model "
            "with the calculator that computes it: AtomisticModel.load(path, baseline=…).",
            parameter="model",
        )


class Calculator(ModelCalculator):
    """Energies, forces and stresses of an ensemble, with their uncertainties, for ASE.

    Parameters
    ----------
    model : AtomisticModel or path
        Of an extensive energy in eV: one without units is taken for that, with a warning. A path is
        that of a file that `AtomisticModel.save` wrote.
    watch : Watch, optional
        Limits of the uncertainties, and what happens to structures beyond them.
    annotate : bool
        Whether uncertainties and ensembles are also put into ``atoms.info`` and ``atoms.arrays``,
        from where ASE writes them to extended XYZ. They are replaced with every calculation by
        this calculator, and stay if another calculator is used.
    threads : int, optional
        Cores to use; those of the model by default. Structures of up to 64 atoms take one.
    forces_uncertainty_every : int
        Compute uncertainties and ensembles of forces and stresses with every k-th structure whose
        forces are requested, the first included, and with those for which they are requested.
        Otherwise the results are energies with uncertainties, and forces. This saves time if
        members take much longer than their mean, as those of networks do.

    Notes
    -----
    Results are ``energy`` and ``free_energy`` (eV), ``forces`` (eV/Å) and ``stress`` (eV/Å³, six
    components in ASE's order and sign) of the ensemble mean, and

    - ``energy_uncertainty``, ``energy_ensemble`` (N_R,): calibrated, eV;
    - ``forces_uncertainty`` (n, 3), ``forces_ensemble`` (n, 3, N_R): calibrated, eV/Å. In
      ``atoms.arrays`` the latter has 3 N_R columns, member by member;
    - ``stress_uncertainty`` (6,), ``stress_ensemble`` (6, N_R): calibrated, eV/Å³, with the stress.
      In ``atoms.info`` the latter has 6 N_R numbers, member by member;
    - ``energy_uncertainty_gradient`` (n, 3) and ``energy_uncertainty_stress`` (6,): derivatives of
      ``energy_uncertainty``, eV/Å and eV/Å³;
    - ``atom_novelty`` (n,), ``novelty``, the largest of these, ``extrapolates`` and
      ``extrapolation_reason``, of an `AtomisticModel`: see `qualms.atomistic.predictions`. They are
      computed once one of them was requested.

    Forces are computed only if they are requested. Models whose features have no derivatives have
    energies alone. Copies share the model.

    Examples
    --------
    >>> atoms.calc = Calculator("model.safetensors", Watch(forces=0.3))  # doctest: +SKIP
    >>> atoms.get_forces(), atoms.calc.results["forces_uncertainty"]  # doctest: +SKIP
    """

    implemented_properties = [  # noqa: RUF012
        "energy", "free_energy", "energy_uncertainty", "energy_ensemble", *_NEEDS
    ]  # fmt: skip

    def __init__(
        self,
        model: Model | str | Path,
        watch: Watch | None = None,
        *,
        annotate: bool = True,
        threads: int | None = None,
        forces_uncertainty_every: int = 1,
    ) -> None:
        """Set up the calculator; the class describes the parameters."""
        if isinstance(model, (str, Path)):
            model = AtomisticModel.load(model, threads=threads)
        elif threads is not None:
            if not isinstance(model, AtomisticModel):
                raise InputError(
                    "`threads` can be set for an AtomisticModel only.", parameter="threads"
                )
            model = copy.copy(model)
            model.threads = default_threads(threads)
        super().__init__(model)
        settings = None if self._fitted is None else self._fitted.settings
        if settings is not None and not settings.units:
            warnings.warn(
                "The model has no units of energy: energies are assumed to be in eV, and forces in "
                "eV/Å. Train it with units='eV'.",
                QualmsWarning,
                stacklevel=2,
            )
        if settings is not None and self._fitted is not None:
            for name, record in self._fitted.record.quantities.items():
                if doubt := record.doubt(settings.keys[name]):
                    warnings.warn(doubt, QualmsWarning, stacklevel=2)
        target = "" if settings is None else settings.target
        if any(word in target.lower() for word in ("delta", "diff", "δ")):
            warnings.warn(
                f"The model predicts {target!r}, by its name a difference of energies, and so are "
                "the results. WeightedBaseline with learns='difference' adds a baseline.",
                QualmsWarning,
                stacklevel=2,
            )
        if watch is not None:
            if not isinstance(watch, Watch):
                raise InputError(
                    f"`watch` is {watch!r}; it must be a Watch, such as Watch(energy=0.001).",
                    parameter="watch",
                )
            watch.bind(self.model)
            self._needs |= {"novelty"} if watch.needs_novelty else set()
        self.watch = watch
        self.annotate = annotate
        self.forces_uncertainty_every = check_integer(
            "forces_uncertainty_every", forces_uncertainty_every, 1
        )
        self._n_forces = 0
        self._is_new = True  # whether the watch has seen nothing of the structure
        self._error: UncertaintyError | None = None

    def _returned(self, atoms: Atoms) -> None:
        if self.annotate:
            annotate(atoms, self.results)
        if self._error is not None:
            raise self._error

    def _started(self) -> None:
        self._is_new, self._error = True, None

    def _computed(self, atoms: Atoms) -> None:
        if self.annotate:
            annotate(atoms, self.results)
        if self.watch is not None:
            is_new, self._is_new = self._is_new, False
            self._error = self.watch.check(atoms, self.results, is_new=is_new) or self._error
        if self._error is not None:
            raise self._error

    def member(self, i: int, *, calibrated_for: str | None = None) -> MemberCalculator:
        """Return a calculator of the calibrated potential of member i, from 0.

        See `MemberCalculator` for `calibrated_for`.
        """
        return MemberCalculator(self.model, i, calibrated_for)

    def map(
        self, f: Callable[[MemberCalculator], ArrayLike], *, calibrated_for: str | None = None
    ) -> Prediction:
        """Call a function with a calculator of each member; return the results as a prediction.

        The function returns a number or an array, such as a bond length after relaxation. As in
        `member`, ``calibrated_for="forces"`` is right for geometries and frequencies, and
        ``"energy"`` for energies and differences of them.
        """
        members = [self.member(i, calibrated_for=calibrated_for) for i in range(self.n_members)]
        return Prediction(stack_members([f(member) for member in members]))

    def _of_energy(self, energy: StructurePrediction) -> Results:
        results: Results = {
            "energy": float(energy.mean),
            "free_energy": float(energy.mean),
            "energy_uncertainty": float(energy.std),
            "energy_ensemble": energy.members.copy(),
        }
        if energy.parts.atom_novelty is not None:
            results["novelty"] = float(energy.novelty[0])
            results["atom_novelty"] = energy.atom_novelty[0]
            results["extrapolates"] = bool(energy.extrapolates[0])
            results["extrapolation_reason"] = energy.reasons[0]
        return results

    def _of_forces(self, atoms: Atoms, properties: Sequence[str], *, stress: bool) -> Results:
        is_turn = self._n_forces % self.forces_uncertainty_every == 0
        self._n_forces += 1
        names = {name for name in properties if "forces" in _NEEDS.get(name, ())}
        only_means = not is_turn and names <= {"forces", "stress"} and "gradient" not in self._needs
        if only_means and isinstance(self.model, AtomisticModel):
            predicted = self._predict(atoms, forces=True, stress=stress, means=True)
            assert predicted.parts.means is not None
            ((forces, of_cell),) = predicted.parts.means
            results = self._of_energy(predicted) | {"forces": forces}
            return results if of_cell is None else results | {"stress": of_cell}
        predicted = self._predict(atoms, forces=True, stress=stress)
        results = self._of_energy(predicted)
        for name in ("forces", "stress")[: 1 + stress]:
            of: Prediction = getattr(predicted, name)
            results[name], results[f"{name}_uncertainty"] = of.mean, of.std
            results[f"{name}_ensemble"] = of.members.copy()
        if "gradient" not in self._needs:
            return results
        members, calibrate = predicted.uncalibrated.members, self._calibrate(predicted, len(atoms))

        # The novelty q, if σ depends on it, is taken as constant: σ dσ is that of all else.
        calibrated = calibrate(members)
        std = float(predicted.std)
        share = float(ensemble_mean_std(calibrated)[1]) / std if std > 0 else 1.0

        def derivative(of: Prediction) -> Float64Array:
            gradients = member_gradients(calibrate, members, of.uncalibrated.members)
            return share * std_gradient(calibrated, gradients)

        results["energy_uncertainty_gradient"] = -derivative(predicted.forces)
        if stress:
            results["energy_uncertainty_stress"] = derivative(predicted.stress)
        return results


# --- a robust baseline where a learned potential is uncertain ---


class WeightedBaseline(UncertaintyCalculator):
    """A learned potential where its uncertainty is small, and a robust baseline elsewhere.

    With σ the uncertainty of the learned energy, σ_b that of the baseline and ΔE the learned
    difference from the baseline (Imbalzano et al., J. Chem. Phys. 154, 074102, 2021),

        E = E_base + w ΔE,     w = σ_b² / (σ_b² + σ²)

    which is the average of both energies with inverse variances for weights. Energies are as smooth
    as those of both potentials and of σ, and forces are their derivatives, that of the weight
    included: with F_Δ = −∇ΔE,

        F = F_base + w F_Δ + (2 w² σ / σ_b²) ΔE ∇σ

    Parameters
    ----------
    learned : ASE calculator
        With ``energy_uncertainty`` and ``energy_uncertainty_gradient`` among its properties, as
        `Calculator` has them; or with ``energy_ensemble`` (N_R,) and ``forces_ensemble`` (n, 3,
        N_R), of members whose forces are derivatives of their energies.
    baseline : ASE calculator
        Robust, if less accurate.
    baseline_uncertainty : float
        σ_b in eV: how wrong the baseline is for a whole structure.
    learns : {"total", "difference"}
        What the learned energy is: that of the structure, with the zero of energy of the baseline,
        or its difference from the baseline.
    annotate : bool
        Whether ``energy_uncertainty`` and ``weight`` are also put into ``atoms.info``, from where
        ASE writes them to extended XYZ, and with them the energy they belong to,
        ``energy_predicted``.

    Notes
    -----
    Results are energy, free_energy, forces and, if both calculators have it, stress; ``weight``, w;
    and ``energy_uncertainty``, (1/σ² + 1/σ_b²)^(−1/2) in eV.
    """

    name = "qualms-weighted-baseline"

    def __init__(
        self,
        learned: AseCalculator,
        baseline: AseCalculator,
        baseline_uncertainty: float,
        *,
        learns: str = "total",
        annotate: bool = True,
    ) -> None:
        super().__init__()
        for name, potential in (("learned", learned), ("baseline", baseline)):
            if not {"get_property", "implemented_properties"} <= {*dir(potential)}:
                is_model = hasattr(potential, "predict")
                advice = " Use qualms.ase.Calculator(model)." if is_model else ""
                raise InputError(
                    f"`{name}` is {potential!r}; it must be an ASE calculator.{advice}",
                    parameter=name,
                )
        properties = {*learned.implemented_properties}
        self._has_gradient = {"energy_uncertainty", "energy_uncertainty_gradient"} <= properties
        if not self._has_gradient and not {"energy_ensemble", "forces_ensemble"} <= properties:
            raise InputError(
                f"`learned` is a calculator of {', '.join(sorted(properties))}; it must have "
                "energy_ensemble and forces_ensemble, as qualms.ase.Calculator has.",
                parameter="learned",
            )
        self.learned, self.baseline = learned, baseline
        self.baseline_uncertainty = check_number(
            "baseline_uncertainty", baseline_uncertainty, 0, strict=True
        )
        if learns not in ("total", "difference"):
            raise unknown_choice("learns", learns, ("total", "difference"))
        self.learns = learns
        self.annotate = annotate
        # Of this object, rather than of the class: not all calculators have a stress.
        names = ["energy", "free_energy", "forces", "energy_uncertainty", "weight"]
        has_stress = {"stress", "energy_uncertainty_stress"} <= properties
        has_stress = has_stress and "stress" in baseline.implemented_properties
        self.implemented_properties = names + ["stress"] * has_stress

    def _returned(self, atoms: Atoms) -> None:
        if self.annotate:
            annotate(atoms, {**self.results, "energy_predicted": self.results["energy"]})

    def _compute(self, atoms: Atoms, properties: Sequence[str]) -> Results:
        atoms = atoms.copy()
        slopes = {}  # derivatives first, so that energies come with them where they do
        if "stress" in properties:
            slopes["stress"] = -self.learned.get_property("energy_uncertainty_stress", atoms)
        if {"forces", "stress"} & {*properties}:
            slopes["forces"] = self._gradient(atoms)
        std = self._std(atoms)
        w = 1.0 / (1.0 + (std / self.baseline_uncertainty) ** 2)
        difference = self._difference("energy", atoms)
        wide = float(np.hypot(std, self.baseline_uncertainty))
        if self.learns == "total" and abs(difference) > 30 * wide:
            warnings.warn(
                f"The learned energy is {difference:+.3g} eV from the baseline, {wide:.2g} eV are "
                "expected: is it a difference (learns='difference'), or is its zero another one?",
                QualmsWarning,
                stacklevel=2,
            )
        energy = float(self.baseline.get_property("energy", atoms) + w * difference)
        results: Results = {"energy": energy, "free_energy": energy, "weight": w}
        results["energy_uncertainty"] = float(np.sqrt(w)) * std
        # −dw/dσ times the difference that the weight multiplies.
        pull = 2.0 * w**2 * std / self.baseline_uncertainty**2 * difference
        for name, slope in slopes.items():
            correction = w * self._difference(name, atoms) + pull * slope
            results[name] = self.baseline.get_property(name, atoms) + correction
        return results

    def _difference(self, name: str, atoms: Atoms) -> Any:
        """Return the learned difference from the baseline."""
        learned = self.learned.get_property(name, atoms)
        if self.learns == "difference":
            return learned
        return learned - self.baseline.get_property(name, atoms)

    def _std(self, atoms: Atoms) -> float:
        if self._has_gradient:
            return float(self.learned.get_property("energy_uncertainty", atoms))
        return float(np.std(self.learned.get_property("energy_ensemble", atoms), ddof=1))

    def _gradient(self, atoms: Atoms) -> Float64Array:
        """Return ∇σ, (n, 3) in eV/Å."""
        if self._has_gradient:
            return np.asarray(self.learned.get_property("energy_uncertainty_gradient", atoms))
        forces = np.asarray(self.learned.get_property("forces_ensemble", atoms), dtype=np.float64)
        members = np.asarray(self.learned.get_property("energy_ensemble", atoms), dtype=np.float64)
        if forces.shape != (len(atoms), 3, len(members)):
            raise InputError(
                f"forces_ensemble of `learned` has shape {forces.shape}; for these atoms and "
                f"members it must be {(len(atoms), 3, len(members))}.",
                parameter="learned",
            )
        return -std_gradient(members, forces)
