"""Extended XYZ: exact numbers, reference values under ``REF_`` keys, and the origin of values."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io.extxyz import output_column_format, per_atom_properties, per_config_properties
from numpy.typing import NDArray

AnyArray = NDArray[Any]

#: Names with another meaning, in the comment line or among the columns.
IN_COMMENT = ("Lattice", "Properties", "pbc")
IN_COLUMNS = ("numbers", "positions", "symbols", "species", "pos", "Z", "move_mask")
#: Formats of columns, by kind of array. The text of a float is its shortest exact representation;
#: the eight decimals of ASE would turn a standard deviation of 1e-9 into zero.
_COLUMN_FORMATS = {"f": "%16s", "i": "%8d", "b": "%.1s", "U": "%-2s"}


def xyz_text(atoms: Atoms) -> str:
    """Return a structure in extended XYZ with exact numbers; ASE writes eight decimals."""
    fixed = [c.index for c in atoms.constraints if isinstance(c, FixAtoms)]
    arrays = {"symbols": np.array([*atoms.symbols], dtype=str), "positions": atoms.positions}
    if fixed:
        arrays["move_mask"] = ~np.isin(np.arange(len(atoms)), np.concatenate(fixed))
    for name, array in atoms.arrays.items():
        if name not in IN_COLUMNS and array.size:
            arrays[name] = _xyz_column(array)
    info = {str(key): _xyz_value(value) for key, value in atoms.info.items()}
    atoms.info = {key: value for key, value in info.items() if key not in IN_COMMENT}
    comment, *_ = output_column_format(atoms, [*arrays], arrays)  # type: ignore[no-untyped-call]
    columns = [(c, a.dtype.kind) for a in arrays.values() for c in np.atleast_2d(a.T)]
    line = " ".join(_COLUMN_FORMATS[kind] for _, kind in columns) + "\n"
    rows = zip(*(column.tolist() for column, _ in columns), strict=True)
    return "".join([f"{len(atoms)}\n{comment}\n", *(line % row for row in rows)])


def _xyz_column(array: AnyArray) -> AnyArray:
    """Return an array of atoms as booleans, integers, floats or words, with at most two axes."""
    if array.ndim > 2:
        array = array.reshape(len(array), -1)
    if array.dtype.kind == "u":
        return array.astype(np.int64)
    if array.dtype.kind in "bif":
        return array
    # A blank would start another column.
    words = [re.sub(r"\s+", "_", str(value)) or "_" for value in array.ravel()]
    return np.array(words, dtype=str).reshape(array.shape)


def _xyz_value(value: Any) -> Any:
    """Return a value that ASE reads back unchanged.

    Empty strings, line ends and backslashes would change it, or the rest of the line.
    """
    awkward = isinstance(value, str) and (not value or re.search(r"[^\S ]|\\", value))
    if awkward or isinstance(value, (list, tuple, dict)):
        with contextlib.suppress(TypeError):
            return "_JSON " + json.dumps(value).replace("\\", "\\\\")
    return value


#: Endings of the columns that describe the atoms of a predicted structure.
_OF_ATOMS = (
    "",
    "_uncertainty",
    "_local_uncertainty",
    "_force_uncertainty",
    "_novelty",
    "_ensemble",
)


def was_predicted(frame: Atoms, store: dict[str, Any], name: str) -> bool:
    """Return whether the value of a structure is an earlier prediction, not a reference value."""
    results = getattr(frame.calc, "results", None) or {}
    if results.get(name) is not None:
        return is_prediction(frame, name, results[name], frame.calc)
    return name in store and is_prediction(frame, name, store[name])


def set_aside_references(
    atoms: Atoms, frame: Atoms, predicted: dict[str, Any], target: str
) -> None:
    """Rename values to REF_… that the prediction replaces, or that would look like predictions.

    ASE reads keys that it knows, such as energy and forces, as results of one calculator: forces of
    another origin would seem to belong to a predicted energy. Earlier predictions are not reference
    values; they are removed together with their standard deviations, members and values of atoms.

    Parameters
    ----------
    atoms : Atoms
        The structure to be written, a copy of `frame`; it is changed.
    frame : Atoms
        The structure that was read.
    predicted : dict
        ``atoms.info`` or ``atoms.arrays``, where the prediction will be stored.
    target : str
    """
    before = frame.info if predicted is atoms.info else frame.arrays
    replaces_prediction = was_predicted(frame, before, target)
    if f"{target}_atoms_novelty" in atoms.arrays:
        for ending in _OF_ATOMS:
            atoms.arrays.pop(f"{target}_atoms{ending}", None)
    for ending in ("uncertainty", "ensemble"):
        predicted.pop(f"{target}_{ending}", None)
    results = getattr(frame.calc, "results", {})
    for store, before, known, found in (
        (atoms.info, frame.info, per_config_properties, per_config_properties),
        (atoms.arrays, frame.arrays, per_atom_properties, all_properties),
    ):
        references = {name: results[name] for name in known if results.get(name) is not None}
        for name in [*store]:
            if name in found or (store is predicted and name == target):
                references.setdefault(name, store.pop(name))
        if store is predicted and replaces_prediction:
            references.pop(target, None)
        for name, value in references.items():
            if name != target and was_predicted(frame, before, name):
                for ending in ("uncertainty", "ensemble"):
                    store.pop(f"{name}_{ending}", None)
            else:
                store.setdefault(f"REF_{name}", value)


def is_prediction(atoms: Atoms, key: str, value: object, calculator: Any = None) -> bool:
    """Return whether a stored value is a prediction and not a reference value.

    Parameters
    ----------
    atoms : Atoms
    key : str
        Name of the value.
    value : object
        As it is stored.
    calculator : ASE calculator, optional
        The calculator whose result the value is, if it is not in ``info`` or ``arrays``.
    """
    uncertainty = f"{key}_uncertainty"
    if uncertainty in (getattr(calculator, "results", None) or {}):
        return True
    if uncertainty not in atoms.info and uncertainty not in atoms.arrays:
        return False
    if calculator is not None and not isinstance(calculator, SinglePointCalculator):
        return False  # It computed the value but no uncertainty: the stored one is older.
    # The origin of values in a file is unknown. A value was predicted if it is the mean of the
    # members, or equal to the copy that a calculator without members has stored.
    for name in (f"{key}_ensemble", f"{key}_predicted"):
        if name in atoms.info or name in atoms.arrays:
            return _is_mean(value, atoms.info.get(name, atoms.arrays.get(name)))
    return True


def _is_mean(value: object, ensemble: object) -> bool:
    """Return whether a value is the mean over members, up to rounding; True if that is unclear."""
    try:
        values = np.asarray(value, dtype=np.float64)
        members = np.asarray(ensemble, dtype=np.float64)
    except (TypeError, ValueError):
        return True
    if not values.size or not members.size or members.size % values.size:
        return True
    for n in {len(np.atleast_1d(values)), 1}:  # rows are atoms, or the vector of a structure is one
        rows = values.reshape(n, -1)
        c = rows.shape[1]
        # Members are stored one after the other, or their components are.
        by_member, by_component = members.reshape(n, -1, c), members.reshape(n, c, -1)
        for mean in (by_member.mean(axis=1), by_component.mean(axis=2)):
            # Files with eight decimals are rounded.
            if np.allclose(rows, mean, rtol=1e-8, atol=1e-7, equal_nan=True):
                return True
    return False
