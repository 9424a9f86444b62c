"""QM9: molecules of up to nine C, N, O and F atoms, with B3LYP/6-31G(2df,p) energies.

Readers of its three formats (NPZ, the tables of qm9pack, the published archive) yield one `Record`
per molecule, which is parsed only if it is selected.
"""

from __future__ import annotations

import bz2
import csv
import heapq
import importlib.resources
import importlib.util
import os
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers
from numpy.typing import NDArray

from qualms.arrays import Float64Array, check_integer
from qualms.errors import InputError, QualmsWarning

#: The Hartree in eV (CODATA 1986); later values differ by 4e-7 of it.
HARTREE_TO_EV = 27.2113961
#: U0 of the isolated atoms in Hartree, from QM9's atomref.txt.
ATOMIC_U0 = {"H": -0.500273, "C": -37.846772, "N": -54.583861, "O": -75.064579, "F": -99.718730}
#: The same in eV: the reference of `atomization_energy`.
QM9_ATOMIC_ENERGIES: dict[str, float] = {s: HARTREE_TO_EV * u for s, u in ATOMIC_U0.items()}

#: The energies in the order of QM9's files, and their names in qm9pack.
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
_SUBSET = importlib.resources.files("qualms.data").joinpath("qm9_subset.npz")

Arrays: TypeAlias = dict[str, NDArray[Any]]


class Molecule(NamedTuple):
    """A molecule of N atoms, in the units of QM9: Å and Hartree."""

    gdb9_index: int
    numbers: NDArray[np.integer[Any]]  #: atomic numbers (N,)
    positions: Float64Array  #: (N, 3), Å
    energies: Mapping[str, float]  #: those that `ENERGIES` names, Hartree
    reference: float  #: sum of U0 over the isolated atoms, Hartree


class Record(NamedTuple):
    """A molecule that is not parsed yet."""

    gdb9_index: int
    parse: Callable[[], Molecule]


def _reference_table(energies: Mapping[int, float]) -> Float64Array:
    """Return U0 of the isolated atoms in Hartree by atomic number; NaN if unknown."""
    table = np.full(_LARGEST_ATOMIC_NUMBER + 1, np.nan)
    table[list(energies)] = list(energies.values())
    return table


_ATOMIC_U0_TABLE = _reference_table({atomic_numbers[s]: u for s, u in ATOMIC_U0.items()})


def _molecule(
    gdb9_index: int, symbols: Iterable[str], positions: Float64Array, energies: Mapping[str, float]
) -> Molecule:
    """Return a molecule with the published reference energies of its elements."""
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
    atoms = slice(arrays["offsets"][i], arrays["offsets"][i + 1])
    numbers = arrays["numbers"][atoms]
    positions = arrays["positions"][atoms]
    energies = {name: float(arrays[name][i]) for name in ENERGIES}
    reference = float(table[numbers].sum())
    return Molecule(int(arrays["index"][i]), numbers, positions, energies, reference)


def _as_arrays(npz: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the arrays of the NPZ format in int64 and float64; check their shapes."""
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
            raise ValueError(f"{name} has values that are not atomic numbers")
    return arrays


# --- the package qm9pack ---


def read_qm9pack() -> Generator[Record]:
    """Yield the 130,831 characterised molecules, in the order of their indices.

    The package is located but not imported: it needs ``pkg_resources``, which setuptools removed.
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
        remedy = f"Reading it failed: {error}. Install it again: pip install 'qualms[qm9]'"
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
        # tarfile takes a truncated download for the end of the archive; bz2 raises an error.
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
            raise ValueError("it has no .xyz file")
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


# --- the loader ---


def qm9(
    source: str | os.PathLike[str] = "subset",
    *,
    n: int | None = None,
    seed: int | None = None,
    uncharacterized: str | os.PathLike[str] | Iterable[int] | None = None,
) -> list[Atoms]:
    """Return molecules of QM9 with their energies.

    Parameters
    ----------
    source : str or path
        One of

        ``"subset"``
            3,000 random molecules that come with qualms, with positions rounded to 1e-5 Å.
        ``"qm9pack"``
            The 130,831 characterised molecules, from the package qm9pack
            (``pip install qualms[qm9]``).
        path of ``dsgdb9nsd.xyz.tar.bz2``
            The published archive: all 133,885 molecules.
        path of an NPZ file
            Arrays for n molecules of N atoms in all: ``index`` (n,), ``offsets`` (n + 1,),
            ``numbers`` (N,), ``positions`` (N, 3) in Å, ``U0``, ``zpve``, ``U298``, ``H298`` and
            ``G298`` (n,) in Hartree; ``atomref_numbers`` and ``atomref_U0`` in Hartree, one per
            element. If there is a number ``positions_per_angstrom``, positions are divided by it.
    n : int, optional
        Number of molecules; by default all.
    seed : int, optional
        Draw the molecules at random, without replacement. A smaller draw with the same seed is the
        beginning of a larger one. By default molecules are in the order of the source.
    uncharacterized : path or iterable of int, optional
        Molecules to leave out: QM9's file ``uncharacterized.txt``, or indices. The archive has 3054
        molecules that failed QM9's consistency check; to keep them, give ``()``.

    Returns
    -------
    list of ase.Atoms
        Without cell; positions in Å. Their ``info`` has

        - ``gdb9_index``, the number of the molecule in QM9, from 1;
        - ``U0``, ``U298``, ``H298``, ``G298``: total energies in eV (U0 includes ``zpve``);
        - ``zpve``: the zero-point energy in eV;
        - ``atomization_energy``: U0 minus that of the isolated atoms, `QM9_ATOMIC_ENERGIES`, in eV;
          negative if the molecule is bound;
        - ``atomization_energy_per_atom`` in eV/atom.

    Notes
    -----
    Please cite R. Ramakrishnan, P. O. Dral, M. Rupp and O. A. von Lilienfeld, Sci. Data 1, 140022
    (2014). The subset was taken from the package qm9pack (MIT licence).

    Examples
    --------
    >>> molecules = qm9(n=100, seed=0)
    >>> y = [atoms.info["atomization_energy_per_atom"] for atoms in molecules]
    """
    n = None if n is None else check_integer("n", n, 1)
    seed = None if seed is None else check_integer("seed", seed, 0)
    left_out = None if uncharacterized is None else _as_indices(uncharacterized)
    if left_out is None and isinstance(source, (str, os.PathLike)) and is_archive(source):
        warnings.warn(
            "3,054 molecules of QM9's archive failed its consistency check. Leave them out with "
            "uncharacterized='uncharacterized.txt', or keep them with uncharacterized=().",
            QualmsWarning,
            stacklevel=2,
        )
    with closing(_open(source)) as records:
        kept = (record for record in records if record.gdb9_index not in (left_out or ()))
        return [_as_atoms(_parse(record, source)) for record in select(kept, n, seed)]


def select(records: Iterable[Record], n: int | None, seed: int | None) -> Iterable[Record]:
    """Return n (or all) of the records: the first, or random ones if there is a seed.

    The records with the smallest random numbers are taken, so that one pass keeps only n of them.
    """
    if seed is not None:
        rng = np.random.default_rng(seed)
        if n is None:
            return sorted(records, key=lambda _: rng.random())
        chosen = heapq.nsmallest(n, records, key=lambda _: rng.random())
    elif n is None:
        return records
    else:
        chosen = list(islice(records, n))
    if len(chosen) < n:
        raise InputError("n", n, f"at most {len(chosen)}, the number of molecules of the source")
    return chosen


def _open(source: str | os.PathLike[str]) -> Generator[Record]:
    """Return the records of the source, identified by its name or by its first bytes."""
    if source == "subset":
        return read_npz(_SUBSET)
    if source == "qm9pack":
        return read_qm9pack()
    if not isinstance(source, (str, os.PathLike)) or not Path(source).is_file():
        raise InputError("source", repr(source), SOURCES)
    path = Path(source)
    if _magic(path).startswith(b"PK"):
        return read_npz(path)
    if not is_archive(path):
        raise InputError("source", f"'{source}'", SOURCES, "It is neither zipped nor bzip2.")
    return read_archive(path)


def is_archive(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is QM9's archive, which has uncharacterised molecules, too."""
    return Path(source).is_file() and _magic(Path(source)) == b"BZh"


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(3)


def _parse(record: Record, source: object) -> Molecule:
    """Return the molecule; an error names the one that cannot be parsed."""
    try:
        molecule = record.parse()
        if not np.isfinite(molecule.positions).all():
            raise ValueError("a position is not finite")
        if not np.isfinite([molecule.reference, *molecule.energies.values()]).all():
            raise ValueError("an energy is not finite, or an element has no reference energy")
    except (ValueError, KeyError, IndexError) as error:
        remedy = f"Molecule {record.gdb9_index} is damaged: {error}."
        raise InputError("source", f"'{source}'", "QM9's format", remedy) from error
    return molecule


def _as_atoms(molecule: Molecule) -> Atoms:
    """Return the molecule as `ase.Atoms`, its energies in eV."""
    atomization = HARTREE_TO_EV * (molecule.energies["U0"] - molecule.reference)
    info: dict[str, float] = {"gdb9_index": molecule.gdb9_index}
    info |= {name: HARTREE_TO_EV * molecule.energies[name] for name in ENERGIES}
    info["atomization_energy"] = atomization
    info["atomization_energy_per_atom"] = atomization / len(molecule.numbers)
    return Atoms(numbers=molecule.numbers, positions=molecule.positions, info=info)


def _as_indices(uncharacterized: str | os.PathLike[str] | Iterable[int]) -> frozenset[int]:
    """Return the indices, read from the published list if a path is given."""
    expected = "the path of QM9's uncharacterized.txt, or indices of molecules"
    try:
        if not isinstance(uncharacterized, (str, os.PathLike)):
            return frozenset(check_integer("uncharacterized", i, 1) for i in uncharacterized)
        lines = Path(uncharacterized).read_text(encoding="utf-8").splitlines()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise InputError("uncharacterized", uncharacterized, expected, f"{error}.") from error
    indices = frozenset(int(w[0]) for w in map(str.split, lines) if w and w[0].isdecimal())
    if not indices:
        raise InputError("uncharacterized", uncharacterized, expected, "It has no index.")
    return indices
