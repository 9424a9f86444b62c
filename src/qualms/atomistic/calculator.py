"""An ASE calculator: energies, forces and stresses with error bars."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_changes
from numpy.typing import ArrayLike

from qualms.atomistic.attribution import force_norm
from qualms.atomistic.member_calculator import (
    CommitteeCalculator,
    MemberCalculator,
    Model,
    Results,
    annotate,
    energy_of,
    point_of,
)
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.plan import default_threads
from qualms.core.checks import check_number
from qualms.errors import InputError, QualmsWarning, UncertaintyError, level_of_user
from qualms.prediction import Prediction, stack_members

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
