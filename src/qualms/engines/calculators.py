"""The calculator that engines call, for models that have all that a simulation needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers

from qualms.arrays import Float64Array
from qualms.ase import Calculator
from qualms.atomistic.forces import check_model
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.structures import symbols_of
from qualms.errors import InputError

#: Places of the components of a tensor in ASE's xx yy zz yz xz xy.
_TENSOR = np.array([[0, 5, 4], [5, 1, 3], [4, 3, 2]])


def make_calculator(model: AtomisticModel | str | Path, **options: Any) -> Calculator:
    """Return the calculator of a model; a model that cannot drive a simulation is an error.

    Parameters
    ----------
    model : AtomisticModel or path
        Of an energy in eV, with derivatives, and a baseline potential that can be computed.
    **options
        Of `qualms.ase.Calculator`.
    """
    calculator = Calculator(model, annotate=False, **options)
    if not isinstance(calculator.model, AtomisticModel):
        return calculator
    check_model(calculator.model.fitted)
    if (potential := calculator.model.baseline_potential) is not None:
        potential.evaluate([])  # a missing package is an error
    return calculator


def check_elements(elements: Sequence[str], calculator: Calculator) -> None:
    """Reject elements of types of atoms that the model was not trained on."""
    model = calculator.model
    species = [*atomic_numbers.values()]
    if isinstance(model, AtomisticModel):
        species = [*model.fitted.representation.species]
    for kind, symbol in enumerate(elements, 1):
        if atomic_numbers.get(symbol, 0) not in species:
            raise InputError(
                f"Type {kind} is {symbol!r}; the model was trained on {symbols_of(species)}.",
                parameter="elements",
            )


def virial(calculator: Calculator, atoms: Atoms, of: str = "") -> Float64Array:
    """Return −∂E/∂ε (3, 3) in eV, and compute energy and forces with it.

    Without periodic boundaries it is Σ_i r_i F_i: not all baseline potentials have a stress then.

    Parameters
    ----------
    calculator : Calculator
    atoms : Atoms
    of : {"", "_ensemble"}
        Of the mean, or of members: (3, 3, N_R).
    """
    if atoms.pbc.any():
        stress = calculator.get_property(f"stress{of}", atoms)
        return np.asarray(-atoms.cell.volume * stress[_TENSOR])
    forces = calculator.get_property(f"forces{of}", atoms)
    return np.tensordot(atoms.positions, forces, axes=(0, 0))
