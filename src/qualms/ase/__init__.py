"""Calculators for ASE: simulations with uncertainties.

>>> from qualms.ase import Calculator
>>> atoms.calc = Calculator("model.safetensors")  # doctest: +SKIP
>>> atoms.get_potential_energy(), atoms.calc.results["energy_uncertainty"]  # doctest: +SKIP
"""

from qualms.ase.calculator import (
    Calculator,
    CommitteePotential,
    MemberCalculator,
    WeightedBaseline,
)
from qualms.ase.watch import Watch
from qualms.errors import UncertaintyError

__all__ = [
    "Calculator",
    "CommitteePotential",
    "MemberCalculator",
    "UncertaintyError",
    "Watch",
    "WeightedBaseline",
]
