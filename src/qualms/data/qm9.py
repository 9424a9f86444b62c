"""QM9: organic molecules of up to nine C, N, O and F atoms, with B3LYP/6-31G(2df,p) energies.

The subset that comes with qualms is made by ``scripts/make_qm9_subset.py`` from the Python package
qm9pack (MIT licence); its file holds the attribution and that licence.

The formats that it comes in are read by `qualms.data.qm9_sources`.
"""

from __future__ import annotations

import heapq
import importlib.resources
import os
import warnings
from collections.abc import Generator, Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
from ase import Atoms

from qualms.core.checks import check_integer
from qualms.data.qm9_sources import (
    ATOMIC_U0,
    ENERGIES,
    SOURCES,
    Molecule,
    Record,
    read_archive,
    read_npz,
    read_qm9pack,
)
from qualms.errors import InputError, QualmsWarning

#: The Hartree in eV, as CODATA 1986 has it. Later values differ by 4e-7 of it, which is 0.04 meV in
#: the largest atomisation energies of QM9.
HARTREE_TO_EV = 27.2113961

#: U0 of the isolated atoms in eV: what `atomization_energy` is relative to.
QM9_ATOMIC_ENERGIES: dict[str, float] = {s: HARTREE_TO_EV * u for s, u in ATOMIC_U0.items()}

_SUBSET = importlib.resources.files("qualms.data").joinpath("qm9_subset.npz")


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
            3,000 of the 130,831 characterised molecules, drawn at random. They come with qualms, in
            random order; their positions are rounded to 1e-5 Å and their energies are not rounded.
        ``"qm9pack"``
            The 130,831 characterised molecules, from the Python package qm9pack
            (``pip install qualms[qm9]``), which holds no others.
        path of ``dsgdb9nsd.xyz.tar.bz2``
            The archive that was published with the paper: all 133,885 molecules.
        path of an NPZ file
            Arrays for n molecules of N atoms in all: ``index`` (n,), ``offsets`` (n + 1,),
            ``numbers`` (N,), ``positions`` (N, 3) in Å, ``U0``, ``zpve``, ``U298``, ``H298`` and
            ``G298`` (n,) in Hartree; ``atomref_numbers`` and ``atomref_U0`` in Hartree, one per
            element. If there is a number ``positions_per_angstrom``, positions are divided by it.
    n : int, optional
        How many molecules; all if not given.
    seed : int, optional
        Draw the molecules at random, without replacement. The first of a large draw are those of a
        small draw with the same seed. If not given, the molecules come in the order of the source.
    uncharacterized : path or iterable of int, optional
        Molecules to leave out: the file ``uncharacterized.txt`` that was published with QM9, or
        indices. 3,054 molecules failed QM9's consistency check: relaxed, they are written as other
        SMILES strings than before. Only the archive holds them; to keep them, give ``()``.

    Returns
    -------
    list of ase.Atoms
        Without cell; positions in Å. Their ``info`` holds

        - ``gdb9_index``, the number of the molecule in QM9, from 1;
        - ``U0``, ``U298``, ``H298``, ``G298``: total energies in eV. U0, the internal energy at
          0 K, already contains the zero-point energy;
        - ``zpve``: the zero-point energy in eV;
        - ``atomization_energy``: U0 less that of the isolated atoms, `QM9_ATOMIC_ENERGIES`, in eV.
          It is negative if the molecule is bound;
        - ``atomization_energy_per_atom``: the same divided by the number of atoms, in eV/atom.

    Warns
    -----
    QualmsWarning
        If the archive is read without ``uncharacterized``.

    Notes
    -----
    The data are those of R. Ramakrishnan, P. O. Dral, M. Rupp and O. A. von Lilienfeld, Sci. Data
    1, 140022 (2014): please cite them. The subset was taken from the package qm9pack (MIT licence).
    1 Hartree is 27.2113961 eV throughout.

    Examples
    --------
    >>> molecules = qm9(n=100, seed=0)
    >>> y = [atoms.info["atomization_energy_per_atom"] for atoms in molecules]
    """
    n = None if n is None else check_integer("n", n, 1)
    seed = None if seed is None else check_integer("seed", seed, 0)
    left_out = None if uncharacterized is None else _as_indices(uncharacterized)
    with closing(_open(source, warn=left_out is None)) as records:
        kept = (record for record in records if record.gdb9_index not in (left_out or ()))
        return [_as_atoms(_parse(record, source)) for record in select(kept, n, seed)]


def select(records: Iterable[Record], n: int | None, seed: int | None) -> Iterable[Record]:
    """Return n (or all) of the records: the first, or random ones if there is a seed.

    Every record gets a random number and those with the smallest are taken, so that one pass is
    enough and only n records are ever kept, however many there are.
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
        raise InputError("n", n, f"at most {len(chosen)}, which is all that the source has")
    return chosen


def _open(source: str | os.PathLike[str], *, warn: bool) -> Generator[Record]:
    """Return the records of the source, found by its name or by the kind of file it is."""
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
    if warn:
        warnings.warn(
            "QM9's archive holds 3,054 molecules, of 133,885, that failed its consistency check. "
            "Leave them out with uncharacterized='uncharacterized.txt', the list published with "
            "it, or keep them with uncharacterized=().",
            QualmsWarning,
            stacklevel=3,
        )
    return read_archive(path)


def is_archive(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a file like QM9's archive, which has uncharacterised molecules, too."""
    return Path(source).is_file() and _magic(Path(source)) == b"BZh"


def _magic(path: Path) -> bytes:
    """Return what tells the kind of a file."""
    with path.open("rb") as file:
        return file.read(3)


def _parse(record: Record, source: object) -> Molecule:
    """Return the molecule; tell which one it is if it cannot be parsed."""
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
    # Headings and rules surround the rows; each row is an index, SMILES strings and a distance.
    indices = frozenset(int(w[0]) for w in map(str.split, lines) if w and w[0].isdecimal())
    if not indices:
        raise InputError("uncharacterized", uncharacterized, expected, "It holds no index.")
    return indices
