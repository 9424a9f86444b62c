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

#: Endings of the keys of the limits of conformal intervals, and of the degrees of freedom of the
#: errors of a quantity.
LIMITS = ("_lower", "_upper")
DOF = "_dof"

#: Names with another meaning, in the comment line or among the columns.
IN_COMMENT = ("Lattice", "Properties", "pbc")
IN_COLUMNS = ("numbers", "positions", "symbols", "species", "pos", "Z", "move_mask")


def xyz_text(atoms: Atoms) -> str:
    """Return a structure in extended XYZ with exact numbers; ASE writes eight decimals.

    The values in ``atoms.info`` may be replaced by others of the same meaning.
    """
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
    # By kind of array. The text of a float is its shortest exact representation.
    formats = {"f": "%16s", "i": "%8d", "b": "%.1s", "U": "%-2s"}
    line = " ".join(formats[kind] for _, kind in columns) + "\n"
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
    """Return a value that ASE reads back: empty strings, line ends and backslashes need JSON."""
    awkward = isinstance(value, str) and (not value or re.search(r"[^\S ]|\\", value))
    if awkward or isinstance(value, (list, tuple, dict)):
        with contextlib.suppress(TypeError):
            return "_JSON " + json.dumps(value).replace("\\", "\\\\")
    return value


def was_predicted(frame: Atoms, store: dict[str, Any], name: str) -> bool:
    """Return whether the value of a structure is an earlier prediction, not a reference value.

    Parameters
    ----------
    frame : Atoms
    store : dict
        ``info`` or ``arrays`` of the structure.
    name : str
        Key of the value, in the results of its calculator or in the store.
    """
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
    values; they are removed together with their standard deviations, members, intervals and values
    of atoms.

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
    if f"{target}_atoms_novelty" in atoms.arrays:
        for name in [name for name in atoms.arrays if name.startswith(f"{target}_atoms")]:
            del atoms.arrays[name]
    results = getattr(frame.calc, "results", {})
    for store, before, of_results, of_store in (
        (atoms.info, frame.info, per_config_properties, per_config_properties),
        (atoms.arrays, frame.arrays, per_atom_properties, all_properties),
    ):
        references = {name: results[name] for name in of_results if results.get(name) is not None}
        for name in [*store]:
            if name in of_store or (store is predicted and name == target):
                references.setdefault(name, store.pop(name))
        is_old = {name for name in references if was_predicted(frame, before, name)}
        replaced = {target} if store is predicted else set()
        for name in is_old | replaced:
            for ending in ("_uncertainty", "_ensemble", *LIMITS):
                store.pop(f"{name}{ending}", None)
            atoms.info.pop(f"{name}{DOF}", None)
        for name in references.keys() - is_old:
            store.setdefault(f"REF_{name}", references[name])


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
    uncertainty, stored = f"{key}_uncertainty", {**atoms.arrays, **atoms.info}
    if uncertainty in (getattr(calculator, "results", None) or {}):
        return True
    if uncertainty not in stored:
        return False
    if calculator is not None and not isinstance(calculator, SinglePointCalculator):
        return False  # It computed the value but no uncertainty: the stored one is older.
    # The origin of values in a file is unknown. A value was predicted if it is the mean of the
    # members, or equal to the copy that a calculator without members has stored.
    names = (f"{key}_ensemble", f"{key}_predicted")
    members = next((stored[name] for name in names if name in stored), None)
    return members is None or _is_mean_of(members, value)


def _is_mean_of(ensemble: object, value: object) -> bool:
    """Return whether a value is the mean over members, up to rounding; True if that is unclear."""
    try:
        values = np.atleast_1d(np.asarray(value, dtype=np.float64))
        members = np.asarray(ensemble, dtype=np.float64)
    except (TypeError, ValueError):
        return True
    if not values.size or not members.size or members.size % values.size:
        return True
    means = []
    for n in (len(values), 1):  # rows are atoms, or the vector of a structure is one
        # Members are stored one after the other, or their components are.
        c = values.size // n
        means += [members.reshape(n, -1, c).mean(axis=1), members.reshape(n, c, -1).mean(axis=2)]
    # Files with eight decimals are rounded.
    close = {"rtol": 1e-8, "atol": 1e-7, "equal_nan": True}
    return any(np.allclose(values.reshape(mean.shape), mean, **close) for mean in means)  # type: ignore[arg-type]
