"""Whether a value that is stored with a structure is a label, or what a model said.

Predictions have an error bar beside them, ``energy_uncertainty`` of ``energy``. But structures are
copied and computed again: the error bar of an earlier prediction then is beside a new value, and
says nothing about it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from qualms.core.typing import Float64Array

#: A value is the mean of an ensemble if they differ by rounding in a file, with eight decimals.
_ROUNDING = 1e-7
_RELATIVE = 1e-8


def is_prediction(atoms: Atoms, key: str, value: object, calculator: Any = None) -> bool:
    """Return whether a value is what a model said, rather than what is true.

    Parameters
    ----------
    atoms : Atoms
    key : str
        Name of the value.
    value : object
        As it is stored.
    calculator : ASE calculator, optional
        The one among whose results the value is, if it is not in ``info`` or ``arrays``.
    """
    error_bar = f"{key}_uncertainty"
    if error_bar in (getattr(calculator, "results", None) or {}):
        return True
    if error_bar not in atoms.info and error_bar not in atoms.arrays:
        return False
    if calculator is not None and not isinstance(calculator, SinglePointCalculator):
        return False  # It computed the value, and no error bar: that beside it is older.
    # A file does not tell what computed the value. It was predicted if it is what members say, or
    # what a calculator that has no members left there to compare with.
    for name in (f"{key}_ensemble", f"{key}_predicted"):
        if name in atoms.info or name in atoms.arrays:
            return _is_mean(value, atoms.info.get(name, atoms.arrays.get(name)))
    return True


def _is_mean(value: object, ensemble: object) -> bool:
    """Return whether a value is the mean over members, or might be."""
    try:
        values = np.asarray(value, dtype=np.float64)
        members = np.asarray(ensemble, dtype=np.float64)
    except (TypeError, ValueError):
        return True
    if not values.size or not members.size or members.size % values.size:
        return True
    # Rows are atoms; or there is one, of a structure that has a vector.
    return any(_is_mean_of_rows(values, members, n) for n in {len(np.atleast_1d(values)), 1})


def _is_mean_of_rows(values: Float64Array, members: Float64Array, n: int) -> bool:
    values = values.reshape(n, -1)
    c = values.shape[1]
    # Columns are the components of one member after those of another, or the other way round.
    means = (members.reshape(n, -1, c).mean(axis=1), members.reshape(n, c, -1).mean(axis=2))
    return any(
        np.allclose(values, mean, rtol=_RELATIVE, atol=_ROUNDING, equal_nan=True) for mean in means
    )
