"""QM9: molecules of up to nine C, N, O and F atoms, with B3LYP/6-31G(2df,p) energies.

Readers of its three formats (NPZ, the tables of qm9pack, the published archive) yield the index of
each molecule with a function that parses it, which is called only if the molecule is selected.
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
#: U0 of the isolated atoms in Hartree, from QM9's atomref.txt: references of atomization energies.
ATOMIC_U0 = {"H": -0.500273, "C": -37.846772, "N": -54.583861, "O": -75.064579, "F": -99.718730}

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
_SUBSET = importlib.resources.files("qualms.data").joinpath("qm9_subset.npz")
_REFERENCES = {atomic_numbers[symbol]: u for symbol, u in ATOMIC_U0.items()}

Arrays: TypeAlias = dict[str, NDArray[Any]]


class Molecule(NamedTuple):
    """A molecule of N atoms, in the units of QM9: Å and Hartree."""

    gdb9_index: int
    numbers: NDArray[np.integer[Any]]  #: atomic numbers (N,)
    positions: Float64Array  #: (N, 3), Å
    energies: Mapping[str, float]  #: those that `ENERGIES` names, Hartree
    references: Mapping[int, float] = _REFERENCES  #: U0 of isolated atoms, Hartree


#: Index of a molecule, and the function that parses it.
Record: TypeAlias = tuple[int, Callable[[], Molecule]]


# --- the NPZ format ---


def read_npz(path: Traversable) -> Generator[Record]:
    """Yield the molecules of an NPZ file in the format that `qm9` describes."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as npz:
            arrays = _as_arrays(npz)
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{str(path)!r} is not an NPZ file with the arrays "
            f"{', '.join(_INTEGER_ARRAYS + _FLOAT_ARRAYS)}: {error}.",
            parameter="source",
        ) from error
    elements = arrays["atomref_numbers"].tolist()
    references = dict(zip(elements, arrays["atomref_U0"].tolist(), strict=True))
    for i, index in enumerate(arrays["index"].tolist()):
        yield index, partial(_npz_molecule, arrays, references, i)


def _npz_molecule(arrays: Arrays, references: Mapping[int, float], i: int) -> Molecule:
    atoms = slice(arrays["offsets"][i], arrays["offsets"][i + 1])
    numbers, positions = arrays["numbers"][atoms], arrays["positions"][atoms]
    energies = {name: float(arrays[name][i]) for name in ENERGIES}
    return Molecule(int(arrays["index"][i]), numbers, positions, energies, references)


def _as_arrays(npz: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the arrays of the NPZ format in int64 and float64; check their shapes."""
    # Integers may become floats, but not the other way round.
    arrays: Arrays = {k: npz[k].astype(np.int64, casting="same_kind") for k in _INTEGER_ARRAYS}
    arrays |= {k: npz[k].astype(np.float64, casting="same_kind") for k in _FLOAT_ARRAYS}
    if "positions_per_angstrom" in npz:
        arrays["positions"] /= npz["positions_per_angstrom"]
    n, n_atoms = arrays["index"].size, arrays["numbers"].size
    shapes = {"index": (n,), "offsets": (n + 1,), "numbers": (n_atoms,), "positions": (n_atoms, 3)}
    shapes |= dict.fromkeys(ENERGIES, (n,)) | {"atomref_U0": arrays["atomref_numbers"].shape}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
    offsets = arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != n_atoms or np.any(np.diff(offsets) < 1):
        raise ValueError(f"offsets do not rise from 0 to {n_atoms}, the number of atoms")
    return arrays


# --- the package qm9pack ---


def read_qm9pack() -> Generator[Record]:
    """Yield the 130,831 characterised molecules, in the order of their indices.

    The package is located but not imported: it needs ``pkg_resources``, which setuptools removed.
    """
    spec = importlib.util.find_spec("qm9pack")
    if spec is None or not spec.submodule_search_locations:
        message = "The package qm9pack is not installed: pip install 'qualms[qm9]'."
        raise InputError(message, parameter="source")
    folder = Path(spec.submodule_search_locations[0], "data")
    for part in (1, 2, 3):
        yield from _read_csv(folder / f"qm9_part{part}.csv")


def _read_csv(path: Path) -> Generator[Record]:
    """Yield the molecules of one of the tables of qm9pack."""
    names = ("Index", "Elements", "XYZ_Ang", *ENERGIES.values())
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            columns = {name: header.index(name) for name in names}
            for row in rows:
                yield int(row[columns["Index"]]), partial(_csv_molecule, columns, row)
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise InputError(
            f"The table {path.name} of qm9pack does not have the columns {', '.join(names)}: "
            f"{error}. Install it again: pip install 'qualms[qm9]'.",
            parameter="source",
        ) from error


def _csv_molecule(columns: Mapping[str, int], row: list[str]) -> Molecule:
    """Return the molecule of a row: lists are written as in Python, numbers as ``0.``."""
    symbols = row[columns["Elements"]].strip("[]").replace("'", "").split(",")
    numbers = np.array([atomic_numbers[symbol] for symbol in symbols])
    coordinates = row[columns["XYZ_Ang"]].replace("[", "").replace("]", "").split(",")
    positions = np.array(coordinates, dtype=np.float64).reshape(len(numbers), 3)
    energies = {name: float(row[columns[column]]) for name, column in ENERGIES.items()}
    return Molecule(int(row[columns["Index"]]), numbers, positions, energies)


# --- the archive that was published with QM9 ---


def read_archive(path: Path) -> Generator[Record]:
    """Yield the molecules of ``dsgdb9nsd.xyz.tar.bz2`` while it is being decompressed."""
    n_molecules = 0
    try:
        # tarfile takes a truncated download for the end of the archive; bz2 raises an error.
        with bz2.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".xyz") else None
                if file is None:
                    continue
                text = file.read().decode("ascii")
                index = int(text.split("\n", 2)[1].split()[1])
                n_molecules += 1
                yield index, partial(_xyz_molecule, text)
        if n_molecules == 0:
            raise ValueError("it has no .xyz file")
    except (OSError, EOFError, ValueError, IndexError, tarfile.TarError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as an archive of QM9; that failed after {n_molecules} "
            f"molecules: {error}. `source` is {SOURCES}.",
            parameter="source",
        ) from error


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
    numbers = np.array([atomic_numbers[row[0]] for row in rows])
    positions = np.array([row[1:4] for row in rows], dtype=np.float64).reshape(n_atoms, 3)
    return Molecule(int(scalars[1]), numbers, positions, energies)


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
        - ``"subset"``: 3,000 random molecules that come with qualms, rounded to 1e-5 Å;
        - ``"qm9pack"``: the 130,831 characterised molecules of that package
          (``pip install qualms[qm9]``);
        - path of ``dsgdb9nsd.xyz.tar.bz2``: the published archive of 133,885 molecules;
        - path of an NPZ file with arrays for n molecules of N atoms in all: ``index`` (n,),
          ``offsets`` (n + 1,), ``numbers`` (N,), ``positions`` (N, 3) in Å, ``U0``, ``zpve``,
          ``U298``, ``H298`` and ``G298`` (n,) in Hartree; ``atomref_numbers`` and ``atomref_U0`` in
          Hartree, one per element. Positions are divided by ``positions_per_angstrom``, if any.
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
        - ``atomization_energy``: U0 minus that of the isolated atoms, `ATOMIC_U0`, in eV;
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
        usable = (record for record in records if record[0] not in (left_out or ()))
        remedy = "All of QM9 is source='qm9pack'." if source == "subset" else ""
        return [_as_atoms(record, source) for record in select(usable, n, seed, remedy)]


def select(
    records: Iterable[Record], n: int | None, seed: int | None, remedy: str = ""
) -> list[Record]:
    """Return n (or all) of the records: the first, or random ones if there is a seed.

    The records with the smallest random numbers are taken, so that one pass keeps only n of them.
    """
    if seed is None:
        chosen = list(islice(records, n))
    else:
        rng = np.random.default_rng(seed)
        draw: Any = sorted if n is None else partial(heapq.nsmallest, n)
        chosen = draw(records, key=lambda _: rng.random())
    if n is not None and len(chosen) < n:
        message = f"The source has {len(chosen)} molecules, fewer than n = {n}. {remedy}"
        raise InputError(message.rstrip(), parameter="n")
    return chosen


def _open(source: str | os.PathLike[str]) -> Generator[Record]:
    """Return the records of the source, identified by its name or by its first bytes."""
    if source == "subset":
        return read_npz(_SUBSET)
    if source == "qm9pack":
        return read_qm9pack()
    if isinstance(source, (str, os.PathLike)):
        if is_archive(source):
            return read_archive(Path(source))
        if _magic(source).startswith(b"PK"):
            return read_npz(Path(source))
    raise InputError(f"`source` is {source!r}; it must be {SOURCES}.", parameter="source")


def is_archive(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is QM9's archive, which has uncharacterised molecules, too."""
    return _magic(source) == b"BZh"


def _magic(source: str | os.PathLike[str]) -> bytes:
    """Return the first bytes of a file, or none if there is no such file."""
    if not Path(source).is_file():
        return b""
    with Path(source).open("rb") as file:
        return file.read(3)


def _as_atoms(record: Record, source: object) -> Atoms:
    """Return the molecule as `ase.Atoms`, its energies in eV; an error names a damaged one."""
    index, parse = record
    try:
        _, numbers, positions, energies, references = parse()
        reference = np.sum([references[z] for z in numbers.tolist()])
        if not all(np.isfinite(x).all() for x in (positions, reference, *energies.values())):
            raise ValueError("a position or an energy is not finite")
    except (ValueError, LookupError) as error:
        message = f"Molecule {index} of {str(source)!r} is damaged: {error!r}."
        raise InputError(message, parameter="source") from error
    info: dict[str, float] = {"gdb9_index": index}
    info |= {name: HARTREE_TO_EV * energies[name] for name in ENERGIES}
    info["atomization_energy"] = HARTREE_TO_EV * (energies["U0"] - float(reference))
    info["atomization_energy_per_atom"] = info["atomization_energy"] / len(numbers)
    return Atoms(numbers=numbers, positions=positions, info=info)


def _as_indices(uncharacterized: str | os.PathLike[str] | Iterable[int]) -> frozenset[int]:
    """Return the indices, read from the published list if a path is given."""
    expected = "the path of QM9's uncharacterized.txt, or indices of molecules"
    try:
        if not isinstance(uncharacterized, (str, os.PathLike)):
            return frozenset(check_integer("uncharacterized", i, 1) for i in uncharacterized)
        lines = Path(uncharacterized).read_text(encoding="utf-8").splitlines()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        message = f"`uncharacterized` is {expected}; {uncharacterized!r} is not: {error}."
        raise InputError(message, parameter="uncharacterized") from error
    indices = frozenset(int(w[0]) for w in map(str.split, lines) if w and w[0].isdecimal())
    if not indices:
        message = f"`uncharacterized` is {expected}; {str(uncharacterized)!r} has no index."
        raise InputError(message, parameter="uncharacterized")
    return indices
