"""Molecular crystals with NMR shieldings: the paper's CSD-1000R, and ShiftML's relaxed CSD-2k.

The crystals derive from the Cambridge Structural Database and do not come with qualms. The rattled
ones were published as extended XYZ and as a data set of chemiscope (JSON); both are read.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.atomistic.structures import read_frames
from qualms.errors import InputError

#: Where shieldings in ppm are found: in CSD-1000R, and in the relaxed crystals of ShiftML.
SHIELDINGS = ("CS_total", "cs_iso")


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
    if not found:
        known = sorted({name for a in passing[:10] for name in a.arrays} - {"numbers", "positions"})
        raise InputError(
            "target", f"none of {', '.join(names)} in '{path}'", f"one of {', '.join(known)}"
        )
    for atoms in passing:
        values = atoms.arrays.get(found[0], np.full(len(atoms), np.nan))
        atoms.arrays["shielding"] = np.asarray(values, dtype=np.float64)
    return passing


def _read_chemiscope(path: Path) -> list[Atoms]:
    """Return the structures of a data set of chemiscope, with its properties of atoms."""
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            document = json.loads(file.read())
        frames = [_structure(given) for given in document["structures"]]
        environments = document.get("environments")
        for name, given in document["properties"].items():
            if isinstance(given, Mapping) and given.get("target") == "atom":
                _add_values(frames, name, given["values"], environments)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
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


def _add_values(
    frames: Sequence[Atoms],
    name: str,
    values: Sequence[float],
    environments: Sequence[Mapping[str, int]] | None,
) -> None:
    """Give atoms their values: those of all environments in turn, or of all atoms."""
    if environments is None:
        places = [(s, i) for s, atoms in enumerate(frames) for i in range(len(atoms))]
    else:
        places = [(int(e["structure"]), int(e["center"])) for e in environments]
    if len(values) != len(places) or np.ndim(values) != 1:
        return  # vectors, or properties of something else
    arrays = [np.full(len(atoms), np.nan) for atoms in frames]
    for (structure, atom), value in zip(places, values, strict=True):
        arrays[structure][atom] = value
    for atoms, array in zip(frames, arrays, strict=True):
        atoms.arrays[name] = array
