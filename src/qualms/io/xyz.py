"""Structures as extended XYZ, all numbers exact."""

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

from qualms.arrays import Float64Array

AnyArray = NDArray[Any]

#: Names that mean something else, in the comment line or among the columns.
IN_COMMENT = ("Lattice", "Properties", "pbc")
IN_COLUMNS = ("numbers", "positions", "symbols", "species", "pos", "Z", "move_mask")
#: How columns of an XYZ file are written, by kind of array. Text of a float is its shortest exact
#: representation, where the eight decimals of ASE would turn an error bar of 1e-9 into zero.
_COLUMN_FORMATS = {"f": "%16s", "i": "%8d", "b": "%.1s", "U": "%-2s"}


def xyz_text(atoms: Atoms) -> str:
    """Return a structure in extended XYZ, all numbers exact: ASE writes eight decimals."""
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
    """Return a value such that ASE reads it, and the rest of the line, as it was.

    It would not after empty strings, nor after line ends and backslashes in strings or in JSON.
    """
    awkward = isinstance(value, str) and (not value or re.search(r"[^\S ]|\\", value))
    if awkward or isinstance(value, (list, tuple, dict)):
        with contextlib.suppress(TypeError):
            return "_JSON " + json.dumps(value).replace("\\", "\\\\")
    return value


# Labels that a structure came with, kept beside what is predicted in their place.
#: How columns end that say which atoms made a structure uncertain.
_OF_ATOMS = (
    "",
    "_uncertainty",
    "_local_uncertainty",
    "_force_uncertainty",
    "_novelty",
    "_ensemble",
)


def was_predicted(frame: Atoms, store: dict[str, Any], name: str) -> bool:
    """Return whether what a structure came with is an earlier prediction, not a reference."""
    results = getattr(frame.calc, "results", None) or {}
    if results.get(name) is not None:
        return is_prediction(frame, name, results[name], frame.calc)
    return name in store and is_prediction(frame, name, store[name])


def set_aside_references(
    atoms: Atoms, frame: Atoms, predicted: dict[str, Any], target: str
) -> None:
    """Rename to REF_… what the prediction replaces, and what would pass for a prediction.

    ASE reads keys that it knows, such as energy and forces, as results of one calculator. Next to a
    predicted energy, forces of another origin would seem to be predicted as well. What was itself
    predicted, earlier, is no reference: it is left out, with its error bars. So is what was said of
    atoms then: the same columns may not all be written again.
    """
    replaces_prediction = was_predicted(
        frame, frame.info if predicted is atoms.info else frame.arrays, target
    )
    if f"{target}_atoms_novelty" in atoms.arrays:
        for ending in _OF_ATOMS:
            atoms.arrays.pop(f"{target}_atoms{ending}", None)
    # Members of an earlier prediction must not pass for those of this one.
    predicted.pop(f"{target}_uncertainty", None)
    predicted.pop(f"{target}_ensemble", None)
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


# Whether a value that is stored with a structure is a label, or what a model said.
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
