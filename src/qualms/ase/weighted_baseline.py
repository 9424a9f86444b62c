"""A potential that falls back to a robust baseline where a learned one is uncertain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator

from qualms.arrays import Float64Array, check_number
from qualms.ase.calculator import CalibratedPoint, Results, UncertaintyCalculator, annotate
from qualms.errors import InputError

_LEARNED = ("total", "difference")


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
        _check_calculator("learned", learned)
        _check_calculator("baseline", baseline)
        self._has_gradient = _has_gradient(learned)
        self.learned = learned
        self.baseline = baseline
        self.baseline_uncertainty = check_number(
            "baseline_uncertainty", baseline_uncertainty, 0, strict=True
        )
        if learns not in _LEARNED:
            raise InputError("learns", repr(learns), " or ".join(map(repr, _LEARNED)))
        self.learns = learns
        self.annotate = annotate
        # Of this object, rather than of the class: not all calculators have a stress.
        self.implemented_properties = [
            "energy", "free_energy", "forces", "energy_uncertainty", "weight"
        ]  # fmt: skip
        wanted = ("stress", "energy_uncertainty_stress")
        if "stress" in baseline.implemented_properties and all(
            name in learned.implemented_properties for name in wanted
        ):
            self.implemented_properties.append("stress")

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """Return a property, computed if necessary: see ASE."""
        value = super().get_property(name, atoms, allow_calculation)
        if self.annotate and atoms is not None and value is not None:
            annotate(atoms, {**self.results, "energy_predicted": self.results["energy"]})
        return value

    def _compute(self, atoms: Atoms, properties: Sequence[str]) -> Results:
        atoms = atoms.copy()
        wants_stress = "stress" in properties
        wants_forces = wants_stress or "forces" in properties
        if wants_stress:  # first, so that energies and forces come with it where they do
            slope = self.learned.get_property("energy_uncertainty_stress", atoms)
        if wants_forces:
            gradient = self._gradient(atoms)
        std = self._std(atoms)
        w = 1.0 / (1.0 + (std / self.baseline_uncertainty) ** 2)
        difference = self._difference("energy", atoms)
        energy = float(self.baseline.get_property("energy", atoms) + w * difference)
        results: Results = {"energy": energy, "free_energy": energy, "weight": w}
        results["energy_uncertainty"] = float(np.sqrt(w)) * std
        # −dw/dσ times the difference that the weight multiplies.
        pull = 2.0 * w**2 * std / self.baseline_uncertainty**2 * difference
        if wants_forces:
            own = self.baseline.get_property("forces", atoms)
            results["forces"] = own + w * self._difference("forces", atoms) + pull * gradient
        if wants_stress:
            own = self.baseline.get_property("stress", atoms)
            results["stress"] = own + w * self._difference("stress", atoms) - pull * slope
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
            own: Float64Array = self.learned.get_property("energy_uncertainty_gradient", atoms)
            return own
        forces = np.asarray(self.learned.get_property("forces_ensemble", atoms), dtype=np.float64)
        members = np.asarray(self.learned.get_property("energy_ensemble", atoms), dtype=np.float64)
        if forces.shape != (len(atoms), 3, len(members)):
            given = f"forces_ensemble of shape {forces.shape}"
            raise InputError("learned", given, f"{(len(atoms), 3, len(members))}")
        return -CalibratedPoint(members, factor=1.0, slope=0.0).std_gradient(forces)


def _check_calculator(name: str, given: object) -> None:
    """Reject anything but a calculator."""
    if not (hasattr(given, "get_property") and hasattr(given, "implemented_properties")):
        is_model = hasattr(given, "predict")
        advice = "Use qualms.ase.Calculator(model)." if is_model else ""
        raise InputError(name, repr(given), "an ASE calculator", advice)


def _has_gradient(learned: AseCalculator) -> bool:
    """Whether a calculator has the gradient of its uncertainty; otherwise it needs members."""
    has = set(learned.implemented_properties)
    if {"energy_uncertainty", "energy_uncertainty_gradient"} <= has:
        return True
    if {"energy_ensemble", "forces_ensemble"} <= has:
        return False
    raise InputError(
        "learned",
        f"a calculator of {', '.join(sorted(has))}",
        "one with energy_ensemble and forces_ensemble, as qualms.ase.Calculator has",
    )
