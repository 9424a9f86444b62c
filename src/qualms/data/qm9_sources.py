"""The formats that QM9 comes in: an NPZ file, the tables of qm9pack, the published archive.

A reader yields one `Record` per molecule, which is parsed only if it is selected: a few molecules
out of 130,831 then cost little more than finding them.
"""

from __future__ import annotations

import bz2
import csv
import importlib.util
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ase.data import atomic_numbers
from numpy.typing import NDArray

from qualms.core.typing import Float64Array
from qualms.errors import InputError

#: U0 of the isolated atoms in Hartree, from the file atomref.txt that was published with QM9.
ATOMIC_U0 = {"H": -0.500273, "C": -37.846772, "N": -54.583861, "O": -75.064579, "F": -99.718730}

#: The energies in the order of QM9's files, and what qm9pack calls them (the spelling is its own).
ENERGIES = {
    "zpve": "ZPVE_au",
    "U0": "InternalEnergy_0K_au",
    "U298": "InternalEnergy_298K_au",
    "H298": "Enthalphy_298K_au",
    "G298": "GibbsFreeEnergy_298K_au",
}

SOURCES = "'subset', 'qm9pack', or the path of QM9's dsgdb9nsd.xyz.tar.bz2 or of an NPZ file"
_INTEGER_ARRAYS = ("index", "offsets", "numbers", "atomref_numbers")
_FLOAT_ARRAYS = ("positions", "atomref_U0", *ENERGIES)
_LARGEST_ATOMIC_NUMBER = max(atomic_numbers.values())

Arrays: TypeAlias = dict[str, NDArray[Any]]


class Molecule(NamedTuple):
    """A molecule of N atoms, in the units of QM9: Å and Hartree."""

    gdb9_index: int
    numbers: NDArray[np.integer[Any]]  #: atomic numbers (N,)
    positions: Float64Array  #: (N, 3), Å
    energies: Mapping[str, float]  #: those that `ENERGIES` names, Hartree
    reference: float  #: sum of U0 over the isolated atoms, Hartree


class Record(NamedTuple):
    """A molecule that has been found but not parsed."""

    gdb9_index: int
    parse: Callable[[], Molecule]


def _reference_table(energies: Mapping[int, float]) -> Float64Array:
    """Return U0 of the isolated atoms in Hartree by atomic number; NaN where it is not known."""
    table = np.full(_LARGEST_ATOMIC_NUMBER + 1, np.nan)
    table[list(energies)] = list(energies.values())
    return table


_ATOMIC_U0_TABLE = _reference_table({atomic_numbers[s]: u for s, u in ATOMIC_U0.items()})


def _molecule(
    gdb9_index: int, symbols: Iterable[str], positions: Float64Array, energies: Mapping[str, float]
) -> Molecule:
    """Return a molecule given by its chemical symbols, with the published reference energies."""
    numbers = np.array([atomic_numbers[symbol] for symbol in symbols])
    if positions.shape != (len(numbers), 3):
        raise ValueError(f"{len(numbers)} elements, but positions of shape {positions.shape}")
    reference = float(_ATOMIC_U0_TABLE[numbers].sum())
    return Molecule(gdb9_index, numbers, positions, energies, reference)


# --- the NPZ format ---


def read_npz(path: Traversable) -> Generator[Record]:
    """Yield the molecules of an NPZ file in the format that `qm9` describes."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as npz:
            arrays = _as_arrays(npz)
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        expected = "an NPZ file with the arrays " + ", ".join(_INTEGER_ARRAYS + _FLOAT_ARRAYS)
        raise InputError("source", f"'{path}'", expected, f"Reading it failed: {error}.") from error
    references = zip(arrays["atomref_numbers"].tolist(), arrays["atomref_U0"], strict=True)
    table = _reference_table(dict(references))
    for i, index in enumerate(arrays["index"].tolist()):
        yield Record(index, partial(_npz_molecule, arrays, table, i))


def _npz_molecule(arrays: Arrays, table: Float64Array, i: int) -> Molecule:
    """Return molecule i of the arrays."""
    atoms = slice(arrays["offsets"][i], arrays["offsets"][i + 1])
    numbers = arrays["numbers"][atoms]
    positions = arrays["positions"][atoms]
    energies = {name: float(arrays[name][i]) for name in ENERGIES}
    reference = float(table[numbers].sum())
    return Molecule(int(arrays["index"][i]), numbers, positions, energies, reference)


def _as_arrays(npz: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the arrays of the NPZ format in int64 and float64, if they fit together."""
    # Integers may become floats, but not the other way round.
    arrays: Arrays = {k: npz[k].astype(np.int64, casting="same_kind") for k in _INTEGER_ARRAYS}
    arrays |= {k: npz[k].astype(np.float64, casting="same_kind") for k in _FLOAT_ARRAYS}
    if "positions_per_angstrom" in npz:
        arrays["positions"] /= npz["positions_per_angstrom"]
    n, n_atoms = arrays["index"].size, arrays["numbers"].size
    n_elements = arrays["atomref_numbers"].size
    shapes = {"index": (n,), "offsets": (n + 1,), "numbers": (n_atoms,), "positions": (n_atoms, 3)}
    shapes |= dict.fromkeys(ENERGIES, (n,))
    shapes |= dict.fromkeys(("atomref_numbers", "atomref_U0"), (n_elements,))
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
    offsets = arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != n_atoms or np.any(np.diff(offsets) < 1):
        raise ValueError(f"offsets do not rise from 0 to {n_atoms}, the number of atoms")
    for name in ("numbers", "atomref_numbers"):
        if np.any((arrays[name] < 1) | (arrays[name] > _LARGEST_ATOMIC_NUMBER)):
            raise ValueError(f"{name} holds what is no atomic number")
    return arrays


# --- the package qm9pack ---


def read_qm9pack() -> Generator[Record]:
    """Yield the 130,831 characterised molecules, in the order of their indices.

    The package is found but not imported: it needs ``pkg_resources``, which is no longer part of
    setuptools, and its tables are all that is wanted.
    """
    spec = importlib.util.find_spec("qm9pack")
    if spec is None or not spec.submodule_search_locations:
        remedy = "Install it: pip install 'qualms[qm9]'"
        raise InputError("source", "'qm9pack'", "the package qm9pack to be installed", remedy)
    folder = Path(spec.submodule_search_locations[0], "data")
    for part in (1, 2, 3):
        yield from _read_csv(folder / f"qm9_part{part}.csv")


def _read_csv(path: Path) -> Generator[Record]:
    """Yield the molecules of one of the tables of qm9pack."""
    wanted = ("Index", "Elements", "XYZ_Ang", *ENERGIES.values())
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            columns = {name: header.index(name) for name in wanted}
            for row in rows:
                index = int(row[columns["Index"]])
                yield Record(index, partial(_csv_molecule, columns, row))
    except (OSError, ValueError, IndexError, csv.Error) as error:
        expected = f"its table {path.name} to have the columns {', '.join(wanted)}"
        remedy = f"Reading it failed: {error}. Install it anew: pip install 'qualms[qm9]'"
        raise InputError("source", "'qm9pack'", expected, remedy) from error


def _csv_molecule(columns: Mapping[str, int], row: list[str]) -> Molecule:
    """Return the molecule of a row: lists are written as in Python, numbers as ``0.``."""
    symbols = row[columns["Elements"]].strip("[]").replace("'", "").split(",")
    coordinates = row[columns["XYZ_Ang"]].replace("[", "").replace("]", "").split(",")
    positions = np.array(coordinates, dtype=np.float64).reshape(-1, 3)
    energies = {name: float(row[columns[column]]) for name, column in ENERGIES.items()}
    return _molecule(int(row[columns["Index"]]), symbols, positions, energies)


# --- the archive that was published with QM9 ---


def read_archive(path: Path) -> Generator[Record]:
    """Yield the molecules of ``dsgdb9nsd.xyz.tar.bz2`` while it is being decompressed."""
    n_found = 0
    try:
        # tarfile would take a download that was cut short for the end of the archive; bz2 does not.
        with bz2.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".xyz") else None
                if file is None:
                    continue
                text = file.read().decode("ascii")
                index = int(text.split("\n", 2)[1].split()[1])
                n_found += 1
                yield Record(index, partial(_xyz_molecule, text))
        if n_found == 0:
            raise ValueError("it holds no .xyz file")
    except (OSError, EOFError, ValueError, IndexError, tarfile.TarError) as error:
        remedy = f"Reading it as an archive failed after {n_found} molecules: {error}."
        raise InputError("source", f"'{path}'", SOURCES, remedy) from error


def _xyz_molecule(text: str) -> Molecule:
    """Return a molecule from QM9's dialect of the XYZ format.

    A line with the number of atoms N; one with "gdb", the index and 15 scalars; N with symbol,
    position and charge; then frequencies, SMILES and InChI. Some exponents are written ``1.2*^-6``.
    """
    lines = text.replace("*^", "e").splitlines()
    n_atoms, scalars = int(lines[0]), lines[1].split()
    # Before them are gdb, the index, A, B, C, mu, alpha, homo, lumo, gap and r2; Cv is after them.
    energies = dict(zip(ENERGIES, map(float, scalars[11:16]), strict=True))
    rows = [line.split() for line in lines[2 : 2 + n_atoms]]
    if len(rows) != n_atoms:
        raise ValueError(f"{n_atoms} atoms, but only {len(rows)} lines for them")
    positions = np.array([row[1:4] for row in rows], dtype=np.float64)
    return _molecule(int(scalars[1]), [row[0] for row in rows], positions, energies)
