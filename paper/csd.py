"""Molecular crystals with NMR shieldings: the paper's CSD-1000R, and ShiftML's relaxed CSD-2k.

The crystals derive from the Cambridge Structural Database and are not part of qualms.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.atomistic.structures import read_frames
from qualms.errors import InputError, did_you_mean

#: Keys of the shieldings (ppm) in CSD-1000R, and in the relaxed crystals of ShiftML.
SHIELDINGS = ("CS_total", "cs_iso")
#: Errors that reading another kind of file, or a damaged one, can raise.
_MALFORMED = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error)


def csd(path: str | os.PathLike[str]) -> list[Atoms]:
    """Return molecular crystals with the shielding of each atom.

    Parameters
    ----------
    path : path
        Extended XYZ, or a chemiscope data set (``.json`` or ``.json.gz``), with shieldings under
        ``CS_total`` or ``cs_iso``.

    Returns
    -------
    list of ase.Atoms
        With the shieldings in ``arrays["shielding"]``, in ppm; NaN where there is none. Crystals
        with a ``STATUS`` other than ``PASSING`` (failed calculations) are left out.
    """
    source = Path(path)
    if not source.is_file():
        message = (
            f"There is no file {str(path)!r}. Crystals are in extended XYZ or chemiscope JSON."
        )
        raise InputError(message, parameter="data")
    is_json = source.name.endswith((".json", ".json.gz"))
    frames = _read_chemiscope(source) if is_json else read_frames(source)
    passing = [a for a in frames if str(a.info.get("STATUS", "PASSING")) == "PASSING"]
    if not passing:
        raise InputError(
            f"All {len(frames)} structures in {str(path)!r} have a STATUS other than PASSING.",
            parameter="data",
        )
    key = next((k for k in SHIELDINGS if any(k in a.arrays for a in passing)), None)
    if key is None:
        names = sorted({k for a in passing[:10] for k in a.arrays} - {"numbers", "positions"})
        raise InputError(
            f"{str(path)!r} has no values of atoms under {' or '.join(SHIELDINGS)}; it has "
            f"{', '.join(names) or 'none at all'}. Rename the shieldings to {SHIELDINGS[0]}."
            f"{did_you_mean(SHIELDINGS[0], names)}",
            parameter="data",
        )
    for i, atoms in enumerate(frames):
        # Without its neighbours an atom would have another shielding.
        if atoms.cell.rank < 3 or not np.all(atoms.pbc):
            message = f"Structure {i} of {str(path)!r} is not periodic along three cell vectors."
            raise InputError(message, parameter="data")
    for atoms in passing:
        values = atoms.arrays.get(key, np.full(len(atoms), np.nan))
        atoms.arrays["shielding"] = np.asarray(values, dtype=np.float64)
    return passing


def _read_chemiscope(path: Path) -> list[Atoms]:
    """Return the structures of a chemiscope data set with their scalar properties of atoms."""
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            document = json.loads(file.read())
        frames = [_structure(entry) for entry in document["structures"]]
        every = [{"structure": s, "center": i} for s, a in enumerate(frames) for i in range(len(a))]
        environments = document.get("environments") or every
        places = [(int(e["structure"]), int(e["center"])) for e in environments]
        if any(s < 0 or i < 0 for s, i in places):
            raise IndexError("an environment has a negative index")
        for name, entry in document["properties"].items():
            if not isinstance(entry, Mapping) or entry.get("target") != "atom":
                continue
            values = np.asarray(entry["values"])
            if values.ndim == 1 and values.dtype.kind not in "US":
                for atoms in frames:
                    atoms.arrays[name] = np.full(len(atoms), np.nan)
                for (s, i), value in zip(places, values, strict=True):
                    frames[s].arrays[name][i] = value
    except _MALFORMED as error:
        raise InputError(
            f"{str(path)!r} is not a chemiscope data set of structures, properties of atoms and "
            f"environments: {error!r}.",
            parameter="data",
        ) from error
    return frames


def _structure(entry: Mapping[str, Any]) -> Atoms:
    positions = np.stack([np.asarray(entry[axis], dtype=np.float64) for axis in "xyz"], axis=1)
    atoms = Atoms(symbols=list(entry["names"]), positions=positions)
    if entry.get("cell") is not None:
        atoms.cell = np.asarray(entry["cell"], dtype=np.float64).reshape(3, 3)
        atoms.pbc = True
    return atoms
