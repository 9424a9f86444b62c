"""The calculator that engines call, for models that have all that a simulation needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase.data import atomic_numbers

from qualms.ase import Calculator
from qualms.atomistic.forces import check_model
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.structures import symbols_of
from qualms.errors import InputError


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
