"""Molecular crystals with NMR shieldings: the paper's CSD-1000R, and ShiftML's relaxed CSD-2k.

The crystals derive from the Cambridge Structural Database and do not come with qualms. The rattled
ones were published as extended XYZ and as a data set of chemiscope (JSON); both are read.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.atomistic.structures import read_frames
from qualms.errors import InputError

#: Where shieldings in ppm are found: in CSD-1000R, and in the relaxed crystals of ShiftML.
SHIELDINGS = ("CS_total", "cs_iso")
#: What reading a file that is something else, or damaged, can end in.
_MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    zlib.error,
)


def csd(path: str | os.PathLike[str], *, target: str | None = None) -> list[Atoms]:
    """Return molecular crystals with a shielding of each atom.

    Parameters
    ----------
    path : path
        Extended XYZ, or a data set of chemiscope (``.json`` or ``.json.gz``).
    target : str, optional
        Name of the shieldings; ``CS_total`` or ``cs_iso``, whichever there is, if not given.

    Returns
    -------
    list of ase.Atoms
        Their ``arrays`` hold the shieldings as ``shielding``, in ppm; NaN where there is none.
        Crystals whose ``STATUS`` is anything but ``PASSING``, failed calculations, are left out.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError("data", f"'{path}'", "a file of crystals, extended XYZ or chemiscope JSON")
    is_json = source.name.endswith((".json", ".json.gz"))
    frames = _read_chemiscope(source) if is_json else read_frames(source)
    passing = [a for a in frames if str(a.info.get("STATUS", "PASSING")) == "PASSING"]
    names = SHIELDINGS if target is None else (target,)
    found = [name for name in names if any(name in a.arrays for a in passing)]
    if not passing:
        given = f"{len(frames)} structures in '{path}'"
        raise InputError("data", given, "crystals, some of them without a STATUS or PASSING")
    if not found:
        raise _no_shieldings(path, names, passing)
    _check_periodic(path, frames)
    for atoms in passing:
        values = atoms.arrays.get(found[0], np.full(len(atoms), np.nan))
        atoms.arrays["shielding"] = np.asarray(values, dtype=np.float64)
    return passing


def _check_periodic(path: str | os.PathLike[str], frames: Sequence[Atoms]) -> None:
    """Refuse what has no cell: without its neighbours an atom would have another shielding."""
    bare = [i for i, a in enumerate(frames) if a.cell.rank < 3 or not np.all(a.pbc)]
    if bare:
        raise InputError(
            "data",
            f"structure {bare[0]} of '{path}' without a cell, or not periodic",
            "crystals: three cell vectors each, and periodic along all of them",
        )


def _no_shieldings(
    path: str | os.PathLike[str], names: Sequence[str], frames: Sequence[Atoms]
) -> InputError:
    known = sorted({name for a in frames[:10] for name in a.arrays} - {"numbers", "positions"})
    expected = f"one of {', '.join(known)}" if known else "a file with numbers for each atom"
    hint = f"Rename the shieldings to {SHIELDINGS[0]}; in Python, target= takes any name."
    return InputError("target", f"none of {', '.join(names)} in '{path}'", expected, hint)


def _read_chemiscope(path: Path) -> list[Atoms]:
    """Return the structures of a data set of chemiscope, with its properties of atoms."""
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            document = json.loads(file.read())
        frames = [_structure(given) for given in document["structures"]]
        places = _places(frames, document.get("environments"))
        for name, given in document["properties"].items():
            if isinstance(given, Mapping) and given.get("target") == "atom":
                _add_values(frames, name, given["values"], places)
    except _MALFORMED as error:
        expected = "a data set of chemiscope: structures, properties of atoms, environments"
        raise InputError("data", f"'{path}'", expected, f"Reading it failed: {error!r}.") from error
    return frames


def _structure(given: Mapping[str, Any]) -> Atoms:
    positions = np.stack([np.asarray(given[axis], dtype=np.float64) for axis in "xyz"], axis=1)
    names = list(given["names"])
    if given.get("cell") is None:
        return Atoms(symbols=names, positions=positions)
    cell = np.asarray(given["cell"], dtype=np.float64).reshape(3, 3)
    return Atoms(symbols=names, positions=positions, cell=cell, pbc=True)


def _places(
    frames: Sequence[Atoms], environments: Sequence[Mapping[str, int]] | None
) -> list[tuple[int, int]]:
    """Return structure and atom of all environments in turn, or of all atoms."""
    if environments is None:
        return [(s, i) for s, atoms in enumerate(frames) for i in range(len(atoms))]
    places = [(int(e["structure"]), int(e["center"])) for e in environments]
    for structure, atom in places:
        # Python would count negative numbers from the end.
        if not (0 <= structure < len(frames) and 0 <= atom < len(frames[structure])):
            raise IndexError(f"there is no atom {atom} of structure {structure}")
    return places


def _add_values(
    frames: Sequence[Atoms], name: str, values: Sequence[float], places: Sequence[tuple[int, int]]
) -> None:
    """Give atoms their values."""
    if len(values) != len(places):
        raise ValueError(f"{name} has {len(values)} values for {len(places)} environments")
    if np.ndim(values) != 1 or np.asarray(values).dtype.kind in "US":
        return  # vectors, or words
    arrays = [np.full(len(atoms), np.nan) for atoms in frames]
    for (structure, atom), value in zip(places, values, strict=True):
        arrays[structure][atom] = value
    for atoms, array in zip(frames, arrays, strict=True):
        atoms.arrays[name] = array
