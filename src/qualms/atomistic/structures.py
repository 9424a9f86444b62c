"""Structures: reading, checks of the geometry, fingerprints and compositions.

Frames, and atoms within a frame, are counted from 0, as in ASE. Lengths are in Å.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.io import iread
from ase.io.extxyz import read_xyz
from ase.io.formats import (
    UnknownFileTypeError,
    filetype,
    get_compression,
    ioformats,
    open_with_compression,
)
from numpy.typing import ArrayLike
from scipy.spatial import cKDTree

from qualms.arrays import Float64Array, IntArray
from qualms.errors import InputError, counted
from qualms.io.files import check_input

#: No two nuclei come this close (Å): the bond of H₂ is seven times as long.
MIN_DISTANCE = 0.1
#: Largest coordinate of an atom or periodic cell vector (Å): libraries of descriptors crash or hang
#: far beyond it.
MAX_LENGTH = 1e5
#: Largest volume of the box around a structure (Å³). Descriptors divide it into cells of the size
#: of the cutoff: 1e8 Å³ take 0.4 GB.
MAX_VOLUME = 1e8
#: Smallest singular value of the periodic cell vectors, scaled to unit length, that is taken for a
#: volume. The angle between two vectors is then about 0.1°.
MIN_INDEPENDENCE = 1e-3

#: Charge and spin of a structure: keys and values that are not the default. See `state_of`.
State = tuple[tuple[str, float | str], ...]
#: Keys of charges and spins in ``atoms.info`` (MACE, tblite, ORCA, FHI-aims, PySCF, …), in lower
#: case and without blanks, and what stands for none.
CHARGES = {"charge": 0.0, "total_charge": 0.0, "net_charge": 0.0}
SPINS = {
    "spin": 0.0,
    "total_spin": 0.0,
    "uhf": 0.0,
    "fixed_spin_moment": 0.0,
    "mult": 1.0,
    "multiplicity": 1.0,
    "spin_multiplicity": 1.0,
}
_DEFAULTS = CHARGES | SPINS | {"initial_charges": 0.0, "initial_magmoms": 0.0}
#: Where errors name a structure by its number, unless by that in a file: "Structure 3 of new.xyz";
#: or a value of it: frames[3].info['energy'].
_NUMBER = re.compile(
    r"(?P<before>\b[Ss]tructure |\bframes\[)(?P<number>\d+)"
    r"(?P<after>\]?(?:\.[\w.]+\['[^']*'\])?)(?!\d| of )"
)

#: Numbers of columns in ``Properties=species:S:1:pos:R:3``, and the largest in all.
_COLUMNS, _MOST_COLUMNS = re.compile(r":[RSIL]:(\d+)", re.IGNORECASE), 100_000

#: Formats that are read, beside (extended) XYZ, by their names in ASE: none of their readers
#: executes or unpickles anything, or connects to a server.
FORMATS = (
    *("traj", "db", "json", "cif", "vasp", "vasp-xml", "vasp-out", "vasp-xdatcar"),
    *("aims", "aims-output", "espresso-in", "espresso-out", "castep-castep", "magres"),
    *("gaussian-out", "orca-output", "nwchem-out", "turbomole", "gen", "struct_out", "xsf", "res"),
    *("lammps-data", "lammps-dump-text", "proteindatabank", "gromacs", "mol", "sdf"),
)
#: Numbers of so many digits are indices on every machine.
_RANGE = re.compile(r"-?\d{1,18}|(-?\d{1,18})?(:(-?\d{1,18})?){1,2}")


class _XyzError(ValueError):
    """A text cannot be read as extended XYZ."""


@dataclass(frozen=True)
class Places:
    """Where structures come from: the names of files, and the number of structures of each."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Places:
        """Return the places of structures that are all in one file."""
        return cls((Path(path).name,), (sys.maxsize,))

    def place(self, index: int) -> tuple[str, int]:
        """Return the name of the file of a structure, and its number there."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if index < size:
                return name, index
            index -= size
        raise IndexError(index)


def split_range(path: str | os.PathLike[str]) -> tuple[Path, slice]:
    """Return the file, and the range after ``@`` as in ASE: ``data.xyz@:50``, ``data.traj@-1``.

    A file whose name has an ``@`` and which exists is meant as a whole.
    """
    file = Path(path)
    if "@" not in file.name or file.exists():
        return file, slice(None)
    name, _, text = str(file).rpartition("@")
    bounds: list[int | None] = []
    if _RANGE.fullmatch(text):
        bounds = [int(bound) if bound else None for bound in text.split(":")]
    if not bounds or bounds[2:] == [0]:
        raise InputError(
            f"There is no file '{file}', and {text!r} is not a range of structures, such as :50, "
            "10:20, ::10 or -1.",
            parameter="path",
        )
    if len(bounds) == 1 and bounds[0] is not None:
        return Path(name), slice(bounds[0], bounds[0] + 1 or None)
    return Path(name), slice(*bounds)


def file_of(path: str | os.PathLike[str]) -> Path:
    """Return the file of a path that may have a range."""
    return split_range(path)[0]


def iter_frames(path: str | os.PathLike[str]) -> Iterator[Atoms]:
    """Read structures one by one; their geometry is not checked: see `check_structures`.

    The file is (extended) XYZ, perhaps compressed (``.gz``, ``.bz2``, ``.xz``), or of one of the
    `FORMATS`. All frames are read, or those of a range: ``data.traj@::10``. Energies and forces of
    other codes are results of the calculator of a structure; key-value pairs of a database are in
    ``atoms.info``.
    """
    file, some = split_range(path)
    check_input(file)
    frames = _frames(file)
    if min(some.start or 0, some.stop or 0, some.step or 1) < 0:  # counted from the end
        frames = iter([*_guarded(Places.of(file), frames)][some])
    elif some != slice(None):
        frames = itertools.islice(frames, some.start, some.stop, some.step)
    return _guarded(Places.of(path), frames)


def read_frames(path: str | os.PathLike[str]) -> list[Atoms]:
    """Read all structures of a file; see `iter_frames`."""
    return list(iter_frames(path))


def read_files(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Atoms], Places]:
    """Read all structures of some files, with their places."""
    lists = [read_frames(path) for path in paths]
    places = Places(tuple(Path(path).name for path in paths), tuple(map(len, lists)))
    return [*itertools.chain.from_iterable(lists)], places


def _guarded(place: Places, frames: Iterator[Atoms], first: int = 0) -> Iterator[Atoms]:
    """Pass frames on; turn any exception of a reader into an `InputError` with its place.

    The first of the frames has this number in the file.
    """
    name = place.names[0]
    for index in itertools.count(first):
        try:
            atoms = next(frames)
        except StopIteration:
            break
        except InputError:
            raise
        except Exception as error:
            # Readers raise anything from KeyError to UnicodeDecodeError, often over many lines.
            # Messages such as that of KeyError('Qq') need the name of the exception.
            reason = " ".join(str(error).split())[:200].rstrip(".")
            if type(error) not in (ValueError, _XyzError):
                reason = ": ".join(filter(None, (type(error).__name__, reason)))
            xyz = (
                " Extended XYZ has the number of atoms, a comment line and one line for each atom; "
                "other formats are recognized by the names of files."
            )
            raise InputError(
                f"Structure {index} of {name} cannot be read ({reason})."
                f"{xyz if isinstance(error, _XyzError) else ''}",
                parameter="path",
            ) from error
        yield atoms
    if index == first:
        raise InputError(f"{name} has no structures.", parameter="path")


def _frames(file: Path) -> Iterator[Atoms]:
    if _is_xyz(file):
        # With an explicit encoding a file means the same on every machine.
        with io.TextIOWrapper(open_with_compression(str(file), "rb"), "utf-8") as stream:
            yield from _xyz_frames(stream)
        return
    # An absolute name is never taken for the address of a server.
    format_ = filetype(os.path.abspath(file))
    if format_ in ("db", "json") and get_compression(str(file))[1] is not None:
        raise InputError(
            f"'{file}' is a compressed database, which is not read: decompress it first.",
            parameter="path",
        )
    if format_ not in FORMATS or (format_ == "db" and file.suffix != ".db"):
        raise InputError(
            f"'{file}' is of the format {format_!r} of ASE, which is not read. Convert it to "
            f"extended XYZ; other formats that are read: {', '.join(FORMATS)}.",
            parameter="path",
        )
    if format_ in ("db", "json"):
        from ase.db import connect

        with connect(os.path.abspath(file), format_, serial=True) as database:  # type: ignore[no-untyped-call]
            for row in database.select():
                atoms = row.toatoms()
                atoms.info.update(row.key_value_pairs)
                yield atoms
    else:
        yield from iread(os.path.abspath(file), format=format_, do_not_split_by_at_sign=True)


def _is_xyz(file: Path) -> bool:
    """Whether the suffix is that of XYZ, or name and contents are of no other format."""
    suffix = Path(get_compression(str(file))[0]).suffix.lower()
    if suffix in (".xyz", ".extxyz"):
        return True
    try:
        name = filetype(os.path.abspath(file))
    except UnknownFileTypeError:
        return True
    return name == "extxyz" or name not in ioformats


def _xyz_frames(stream: Iterator[str]) -> Iterator[Atoms]:
    """Read a stream frame by frame; a `ValueError` becomes one that knows of the format."""
    try:
        yield from _cut(stream)
    except ValueError as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise _XyzError(f"{kind}{error}") from error


def _cut(stream: Iterator[str]) -> Iterator[Atoms]:
    """Cut a stream into frames, and leave it to ASE to read each.

    Given the whole file, ASE scans it to its end before it returns the first frame, and silently
    ignores all that follows a blank line.
    """
    line, number = next(stream, ""), 1
    while line:
        if line.isspace():
            line, number = next(stream, ""), number + 1
            continue
        if not line.strip().isdecimal():
            raise ValueError(f"line {number}: {line.strip()[:40]!r} is not a number of atoms")
        size = int(line)
        lines = [line, *itertools.islice(stream, size + 1)]
        if len(lines) < size + 2:
            n_atoms = max(len(lines) - 2, 0)
            raise ValueError(f"line {number}: the file ends after {n_atoms} of {size} atoms")
        if sum(map(int, _COLUMNS.findall(lines[1]))) > _MOST_COLUMNS:  # ASE would list them all
            raise ValueError(f"line {number + 1}: more than {_MOST_COLUMNS} columns")
        line = next(stream, "")
        while line.lstrip().startswith("VEC"):  # the cell, in one of the dialects
            lines.append(line)
            line = next(stream, "")
        try:
            yield next(read_xyz(io.StringIO("".join(lines)), index=slice(None)))
        except Exception as error:
            raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error
        number += len(lines)


@dataclass(frozen=True)
class FrameFiles(Sequence[Atoms]):
    """Structures in extended XYZ files, which are read when they are needed.

    Only the place of each structure is in memory, so that files may be larger than it, and parts of
    them can be sent to workers that see the same files.
    """

    paths: tuple[Path, ...]
    file: IntArray  #: (n,): number of the file of each structure
    begin: IntArray  #: (n,): its first byte
    size: IntArray  #: (n,): its number of bytes
    number: IntArray  #: (n,): its number within its file

    @classmethod
    def open(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> FrameFiles:
        """Find the structures of some files, or of ranges of them, without reading them.

        Parameters
        ----------
        paths : iterable of paths
            Extended XYZ, with a range such as ``train.xyz@:100`` if need be. A single path, too.
        """
        paths = [paths] if isinstance(paths, (str, os.PathLike)) else [*paths]
        if not paths:
            raise InputError("There are no files; at least one is needed.", parameter="path")
        files: list[Path] = []
        parts = []
        for path in paths:
            file, some = split_range(path)
            check_input(file)
            if not readable([file]):
                raise InputError(
                    f"'{file}' is not extended XYZ without compression, which is needed to read "
                    "structures in parts: convert or decompress it first.",
                    parameter="path",
                )
            begin, size = _places(file)
            chosen = np.arange(len(begin))[some]
            if not len(chosen):
                raise InputError(f"{Path(path).name} has no structures.", parameter="path")
            parts.append((np.full(len(chosen), len(files)), begin[chosen], size[chosen], chosen))
            files.append(file.resolve())
        return cls(tuple(files), *map(np.concatenate, zip(*parts, strict=True)))

    def place(self, index: int) -> tuple[str, int]:
        """Return the name of the file of a structure, and its number there."""
        return self.paths[self.file[index]].name, int(self.number[index])

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, key: Any) -> Any:
        """Return a structure, or those of a slice or of an array of numbers, not read yet."""
        if isinstance(key, (int, np.integer)):
            return next(iter(self[np.array([range(len(self))[key]])]))
        parts = (self.file[key], self.begin[key], self.size[key], self.number[key])
        return FrameFiles(self.paths, *parts)

    def __iter__(self) -> Iterator[Atoms]:
        """Read all structures, in order."""
        edges = np.flatnonzero(np.diff(self.file, prepend=-1, append=-1))
        for first, last in itertools.pairwise(edges.tolist()):
            path = self.paths[self.file[first]]
            places = zip(self.begin[first:last].tolist(), self.size[first:last], strict=True)
            try:
                with path.open("rb") as stream:
                    for index, (begin, size) in zip(self.number[first:last], places, strict=True):
                        stream.seek(begin)
                        lines = io.TextIOWrapper(io.BytesIO(stream.read(size)), "utf-8")
                        yield from _guarded(Places.of(path), _xyz_frames(lines), int(index))
            except OSError as error:
                raise InputError(
                    f"'{path}' cannot be read: {error.strerror}.", parameter="path"
                ) from error


def readable(paths: Iterable[Path]) -> bool:
    """Return whether files are such that `FrameFiles` can read them: XYZ without compression."""
    return all(_is_xyz(f) and get_compression(str(f))[1] is None for f in map(file_of, paths))


def _places(path: Path) -> tuple[IntArray, IntArray]:
    """Return the first byte and the number of bytes of each structure of an extended XYZ file."""
    begin, end = [], []
    with path.open("rb") as stream:
        place = 0
        for line in stream:
            start, place = place, place + len(line)
            text = line.strip()
            if text.isdigit():
                place += sum(map(len, itertools.islice(stream, int(text) + 1)))
                begin.append(start)
                end.append(place)
            elif text and begin:  # VEC, or an error that is found when the structure is read
                end[-1] = place
            elif text:
                raise InputError(
                    f"'{path}' is not extended XYZ: its first line, {text[:40]!r}, is not a number "
                    "of atoms.",
                    parameter="path",
                )
    if not begin:
        raise InputError(f"'{path}' has no structures.", parameter="path")
    return np.array(begin), np.array(end) - np.array(begin)


# --- parts of the structures ---


@dataclass(frozen=True)
class Part:
    """Some structures, and their numbers among all."""

    frames: Sequence[Atoms]
    numbers: IntArray  #: (n,)

    def __len__(self) -> int:
        return len(self.numbers)

    def named(self, message: str) -> str:
        """Return a message about these structures with their numbers among all, and their files."""

        def name(match: re.Match[str]) -> str:
            i, frames = int(match["number"]), self.frames
            text = f"{match['before']}{self.numbers[i]}{match['after']}"
            if isinstance(frames, FrameFiles):
                text += f" ('{frames.paths[frames.file[i]]}', frame {frames.number[i]})"
            return text

        return _NUMBER.sub(name, message)


def divided(frames: Sequence[Atoms], size: int) -> list[Part]:
    """Return parts of consecutive structures."""
    numbers = np.arange(len(frames))
    edges = range(0, len(frames), size)
    return [Part(frames[i : i + size], numbers[i : i + size]) for i in edges]


def divided_among(frames: Sequence[Atoms], n_workers: int) -> list[Part]:
    """Return several parts for each worker, so that none waits long for the last."""
    size = -(-len(frames) // (4 * n_workers))
    return divided(frames, min(max(size, 20), 5000))


@contextmanager
def numbered(part: Part) -> Iterator[None]:
    """Name structures by their numbers among all, and by their files, in errors."""
    try:
        yield
    except InputError as error:
        message, parameter = part.named(str(error)), part.named(error.parameter)
        raise InputError(message, parameter=parameter) from error


# --- checks and facts ---


def check_not_single(frames: object, name: str = "frames") -> None:
    """Reject one structure where several are expected: it is iterable, too, over its atoms."""
    if isinstance(frames, Atoms):
        raise InputError(
            f"`{name}` is a single ase.Atoms; write [atoms], a list of one.", parameter=name
        )


def check_structures(frames: Iterable[Atoms], *, first: int = 0) -> None:
    """Reject structures whose geometry cannot be used; the first of them has the number `first`.

    These are: no atoms, atoms without an element, positions or cells that are not finite or beyond
    `MAX_LENGTH`, periodic directions without a cell vector, periodic vectors that are not
    independent, a volume above `MAX_VOLUME`, and atoms closer than `MIN_DISTANCE` to each other or
    to periodic images. Isolated atoms are valid, and so is any cell vector along which a structure
    is not periodic.
    """
    check_not_single(frames)
    for index, atoms in enumerate(frames, start=first):
        if not isinstance(atoms, Atoms):
            raise _bad(index, f"is an object of type {type(atoms).__name__}, not ase.Atoms.")
        _check_atoms(index, atoms)
        vectors = _periodic_vectors(index, atoms)
        _check_volume(index, atoms, vectors)
        _check_distances(index, atoms, vectors)


def _bad(index: int, problem: str) -> InputError:
    """Return an error about a structure."""
    return InputError(f"Structure {index} {problem}", parameter=f"frames[{index}]")


def _check_atoms(index: int, atoms: Atoms) -> None:
    """Reject structures without atoms, and atoms without an element or a finite position."""
    if len(atoms) == 0:
        raise _bad(index, "has no atoms.")
    numbers, positions, largest = atoms.numbers, atoms.positions, len(chemical_symbols) - 1
    if numbers.min() < 1 or numbers.max() > largest:
        i = np.flatnonzero((numbers < 1) | (numbers > largest))[0]
        raise _bad(
            index,
            f"has an atom, {i}, of atomic number {numbers[i]}, which is no element: they are 1 to "
            f"{largest} (ASE's symbol X is number 0).",
        )
    far = ~(np.abs(positions) <= MAX_LENGTH)  # NaN, too
    if far.any():
        i = np.flatnonzero(far.any(axis=1))[0]
        raise _bad(
            index,
            f"has an atom, {i}, at {positions[i].tolist()}: positions must be finite, and at most "
            f"{MAX_LENGTH:g} Å.",
        )


def _periodic_vectors(index: int, atoms: Atoms) -> Float64Array:
    """Return the cell vectors of the periodic directions, (0 … 3, 3), if they are independent."""
    vectors: Float64Array = np.asarray(atoms.cell, dtype=np.float64)[atoms.pbc]
    if len(vectors) == 0:
        return vectors
    if not np.all(np.abs(vectors) <= MAX_LENGTH):
        raise _bad(
            index,
            f"has the cell vectors {vectors.tolist()}: they must be finite, and at most "
            f"{MAX_LENGTH:g} Å.",
        )
    lengths = np.linalg.norm(vectors, axis=1)
    singular = np.linalg.svd(vectors / np.maximum(lengths, MIN_DISTANCE)[:, None], compute_uv=False)
    if lengths.min() < MIN_DISTANCE or singular[-1] < MIN_INDEPENDENCE:
        raise _bad(
            index,
            f"has the cell vectors {vectors.tolist()} along periodic directions: they must be "
            f"independent, and at least {MIN_DISTANCE} Å long. Set pbc to False along directions "
            "that are not periodic.",
        )
    return vectors


def _check_volume(index: int, atoms: Atoms, vectors: Float64Array) -> None:
    """Reject a box that is far too large: its cell or, where that is not periodic, its extent."""
    axes, lengths = np.eye(3), np.empty(0)
    if len(vectors):
        _, lengths, axes = np.linalg.svd(vectors)
    extents = np.ptp(atoms.positions @ axes[len(vectors) :].T, axis=0)
    volume = float(np.prod(lengths) * np.prod(np.maximum(extents, 1.0)))
    if volume > MAX_VOLUME:
        raise _bad(
            index,
            f"is in a box of {volume:.1e} Å³: at most {MAX_VOLUME:g} Å³ can be used. Use a smaller "
            "cell.",
        )


def _check_distances(index: int, atoms: Atoms, vectors: Float64Array) -> None:
    """Reject atoms at the same place, also as periodic images."""
    points, owners = _with_images(atoms.positions, vectors)
    nearest = cKDTree(points).query(points, k=2, distance_upper_bound=MIN_DISTANCE)
    distances, neighbours = np.asarray(nearest[0])[:, 1], np.asarray(nearest[1])
    i = int(distances.argmin())
    if not np.isfinite(distances[i]):
        return
    # Of two points on the very same place either may come first.
    j = int(neighbours[i, 1] if neighbours[i, 0] == i else neighbours[i, 0])
    a, b = sorted((int(owners[i]), int(owners[j])))
    other = "its periodic image" if a == b else f"atom {b} ({atoms.symbols[b]})"
    raise _bad(
        index,
        f"has atom {a} ({atoms.symbols[a]}) and {other} {distances[i]:.2g} Å apart: atoms must be "
        f"at least {MIN_DISTANCE} Å apart. Remove atoms that are there twice; positions and cells "
        "are in Å.",
    )


def _with_images(positions: Float64Array, vectors: Float64Array) -> tuple[Float64Array, IntArray]:
    """Return the atoms in the cell, with all images that another may clash with, and their owners.

    Let s be the coordinates of an atom along the p periodic vectors, wrapped to [0, 1), and g the
    dual vectors: s = r·g. If atom j, moved by t ≥ 1 cells, is closer than d to atom i, then
    s_j + t < s_i + d|g| < 1 + d|g|. So only atoms close to the lower faces are repeated at the
    upper ones, and clashes are clashes between points. Since wrapping is along the periodic vectors
    alone, the others need not even exist.
    """
    points, owners = positions, np.arange(len(positions))
    if len(vectors) == 0:
        return points, owners
    dual = np.linalg.pinv(vectors)
    s = positions @ dual
    points = positions - np.floor(s) @ vectors
    s -= np.floor(s)
    for k, vector in enumerate(vectors):
        reach = MIN_DISTANCE * float(np.linalg.norm(dual[:, k]))
        shifts = np.arange(1, math.ceil(reach) + 1)
        rows, t = np.nonzero(s[:, k, None] + shifts <= 1 + reach)
        points = np.concatenate([points, points[rows] + shifts[t, None] * vector])
        s = np.concatenate([s, s[rows]])
        owners = np.concatenate([owners, owners[rows]])
    return points, owners


def fingerprints(frames: Iterable[Atoms]) -> list[bytes]:
    """Return 16 bytes for each structure, the same for exact duplicates only.

    Duplicates have the same elements in the same order, the same positions to 10⁻⁶ Å, and the same
    periodicity. Cell vectors along which they are not periodic do not count: the box around a
    molecule is not a part of it.
    """
    digests = []
    for atoms in frames:
        pbc = np.asarray(atoms.pbc, dtype=bool)
        lengths = np.concatenate([atoms.positions, np.asarray(atoms.cell) * pbc[:, None]])
        # Fixed byte order, so that all machines agree; adding zero turns −0.0 into 0.0.
        lengths = (np.round(lengths, 6) + 0.0).astype("<f8")
        content = atoms.numbers.astype("<i8").tobytes() + lengths.tobytes() + pbc.tobytes()
        digests.append(hashlib.blake2b(content, digest_size=16).digest())
    return digests


def data_hashes(prints: Iterable[bytes], values: Iterable[ArrayLike]) -> list[bytes]:
    """Return 16 bytes for each structure, by its fingerprint, and its labels (NaN for none)."""
    digests = []
    for print_, labels in zip(prints, values, strict=True):
        flat = np.ravel(np.asarray(labels, dtype=np.float64)) + 0.0
        flat[np.isnan(flat)] = np.nan  # there are many bit patterns of NaN
        content = print_ + flat.astype("<f8").tobytes()
        digests.append(hashlib.blake2b(content, digest_size=16).digest())
    return digests


def data_digest(hashes: Iterable[bytes]) -> str:
    """Return a hexadecimal digest of the hashes of structures, in order."""
    return hashlib.blake2b(b"".join(hashes), digest_size=16).hexdigest()


def species_of(frames: Iterable[Atoms]) -> list[int]:
    """Return the atomic numbers that occur, sorted."""
    return [int(z) for z in sorted(set().union(*(np.unique(a.numbers).tolist() for a in frames)))]


def composition(frames: Sequence[Atoms], species: Sequence[int]) -> Float64Array:
    """Return the number of atoms of each species in each structure: (N, S)."""
    check_species(frames, species)
    largest = max(species)
    counts = [np.bincount(atoms.numbers, minlength=largest + 1) for atoms in frames]
    return np.stack(counts)[:, list(species)].astype(np.float64)


def check_species(frames: Sequence[Atoms], known: Sequence[int], *, first: int = 0) -> None:
    """Reject structures with unknown species.

    Parameters
    ----------
    frames : sequence of Atoms
    known : sequence of int
        Atomic numbers that the model was trained on.
    first : int
        Number of the first structure in the input.
    """
    unknown = {i: {*atoms.numbers.tolist()} - {*known} for i, atoms in enumerate(frames, first)}
    structures = [i for i, species in unknown.items() if species]
    if structures:
        others = counted(len(structures) - 1, "other structure")
        more = f" (and {others})" if len(structures) > 1 else ""
        raise InputError(
            f"Structure {structures[0]}{more} contains "
            f"{symbols_of(sorted(set().union(*unknown.values())))}; the model was trained on "
            f"{symbols_of(known)}. Leave such structures out, train with these elements, or ignore "
            "such atoms with `unknown_species='ignore'`.",
            parameter="frames",
        )


def symbols_of(species: Iterable[int]) -> str:
    """Return the symbols of atomic numbers, in one readable string."""
    names = [chemical_symbols[z] if 0 <= z < len(chemical_symbols) else str(z) for z in species]
    return ", ".join(names) or "none"


def state_of(atoms: Atoms, labels: Collection[str] = ()) -> State:
    """Return charge and spin of a structure where they are not the default; see `CHARGES`, `SPINS`.

    Spins are those above what an odd number of electrons demands, so that molecules in their lowest
    spin state are alike in any convention. Atomic charges and the moments of molecules stand for
    their sums; moments of periodic structures are where a calculation begins. Labels do not count.
    """
    keys = {str(k).lower().replace(" ", "_"): k for k in atoms.info if k not in labels}
    values = {k: _number(atoms.info[keys[k]]) for k in {*CHARGES, *SPINS} & {*keys}}
    if "initial_charges" in atoms.arrays:
        values["initial_charges"] = float(np.round(np.sum(atoms.arrays["initial_charges"])))
    if "initial_magmoms" in atoms.arrays and not atoms.pbc.any():
        values["initial_magmoms"] = float(np.sum(atoms.arrays["initial_magmoms"]))
    values = {k: v for k, v in values.items() if v not in ("", _DEFAULTS[k])}
    charges = (values.get(key) for key in (*CHARGES, "initial_charges"))
    charge = next((c for c in charges if isinstance(c, float)), 0.0)
    odd = (int(np.sum(atoms.numbers)) - round(charge)) % 2 if values else 0
    state = {}
    for key, value in values.items():
        if isinstance(value, float) and key not in (*CHARGES, "initial_charges"):
            value = (value if value.is_integer() else 2 * value) - odd
        if value != _DEFAULTS[key]:
            state[key] = value
    return tuple(sorted(state.items()))


def _number(value: object) -> float | str:
    """Return a value as a number, if it is one; nothing and NaN as an empty text."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "" if value is None else str(value)[:100]
    return round(number, 6) + 0.0 if np.isfinite(number) else ""
