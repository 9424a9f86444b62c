"""Power spectra of atomic environments, computed by dscribe or by featomic.

Both expand the density of each species around an atom (Eqs. (15) and (16), Musil et al. 2019) and
contract it to the power spectrum ⟨αnα′n′l|X⟩ of Eq. (14). Their radial functions differ, so that a
model belongs to the engine it was trained with. dscribe is the faster one for values, featomic has
a smooth cutoff.

An engine stores every pair (αn, α′n′) once and weights it by the square root of how often it occurs
in the sum of Eq. (13), so that the inner product of two vectors is that sum.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import scipy.linalg
from ase import Atoms

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, QualmsError
from qualms.features.compression import Projection, fit_projection, is_worthwhile
from qualms.features.hypers import Compression, Scale, Soap
from qualms.gp.kernels import Kernel, PowerKernel, WeightedSumKernel, normalize_rows
from qualms.resources import limit_rayon

#: Of power spectra.
Precision = type[np.float32] | type[np.float64]


@dataclass(frozen=True)
class Piece:
    """Power spectra of some environments of a batch; features that are not listed are zero.

    Attributes
    ----------
    rows : (n,) array of int
        Environments, counted through the batch.
    columns : tuple of slices
        Features, c in all.
    values : (n, c) array
    """

    rows: IntArray
    columns: tuple[slice, ...]
    values: FloatArray


#: What becomes of power spectra (n, c) while they are at hand, such as normalisation.
Finish: TypeAlias = Callable[[FloatArray], FloatArray]


def as_they_are(spectra: FloatArray) -> FloatArray:
    """Change nothing."""
    return spectra


class Engine(Protocol):
    """What computes power spectra for one scale."""

    @property
    def n_features(self) -> int:
        """Length of a power spectrum."""
        ...

    @property
    def pair_blocks(self) -> list[slice]:
        """Features of each pair of species."""
        ...

    def pieces(
        self,
        frames: Sequence[Atoms],
        centers: Sequence[IntArray],
        finish: Finish = as_they_are,
        dtype: Precision = np.float32,
    ) -> Iterator[Piece]:
        """Yield the power spectra of the chosen atoms of each structure."""
        ...


@lru_cache(maxsize=16)
def make_engine(name: str, scale: Scale, species: tuple[int, ...]) -> Engine:
    """Return the engine for one scale and the species (atomic numbers, increasing) of a model.

    Engines are kept: setting one up takes longer than a small molecule.
    """
    if name not in ("dscribe", "featomic"):
        raise InputError("engine", repr(name), '"dscribe" or "featomic"')
    engine = (DscribeEngine if name == "dscribe" else FeatomicEngine)(scale, species)
    try:
        next(engine.pieces([Atoms([species[0]])], [np.arange(1)]))
    except Exception as error:
        # Radial functions that can hardly be told apart; each library has its own exception.
        raise InputError(
            "n_radial", scale.n_radial, "fewer radial functions, or a wider cutoff", f"({error})"
        ) from error
    return engine


def in_cell(atoms: Atoms, scale: Scale) -> Atoms:
    """Return a structure without a cell, or periodic in all directions with atoms in the cell.

    dscribe loses neighbours of atoms outside the cell and wants one of finite volume; featomic does
    not know slabs. Along directions that are not periodic the cell is made so wide that no image
    comes near: dscribe counts atoms up to 3.7 widths of their Gaussians beyond the cutoff.
    """
    if not np.any(atoms.pbc):
        return Atoms(atoms.numbers, atoms.positions) if np.any(atoms.cell.array) else atoms
    vectors = atoms.cell.array[np.asarray(atoms.pbc)]
    positions = atoms.positions - np.floor(atoms.positions @ np.linalg.pinv(vectors)) @ vectors
    normals = scipy.linalg.null_space(vectors).T
    widths = np.ptp(positions @ normals.T, axis=0) + scale.cutoff + 4 * scale.gaussian_width
    cell = np.concatenate([vectors, widths[:, None] * normals])
    return Atoms(atoms.numbers, positions, cell=cell, pbc=True)


@dataclass(frozen=True)
class DscribeEngine:
    """dscribe's SOAP.

    A molecule is described in the species that it has, which is faster and gives shorter vectors
    to normalise and compress; `Piece.columns` says where they belong.
    """

    scale: Scale
    species: tuple[int, ...]

    @property
    def n_features(self) -> int:
        """Length of a power spectrum."""
        return int(self._soap(self.species, False).get_number_of_features())

    @property
    def pair_blocks(self) -> list[slice]:
        """Features of each pair of species."""
        everything = self._soap(self.species, False)
        pairs = combinations_with_replacement(self.species, 2)
        return [everything.get_location(pair) for pair in pairs]

    def pieces(
        self,
        frames: Sequence[Atoms],
        centers: Sequence[IntArray],
        finish: Finish = as_they_are,
        dtype: Precision = np.float32,
    ) -> Iterator[Piece]:
        """Yield power spectra, a piece for each set of species and kind of periodicity."""
        starts = offsets_of([len(c) for c in centers])
        alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for i, atoms in enumerate(frames):
            if len(centers[i]):
                present = tuple(np.unique(atoms.numbers).tolist())
                alike.setdefault((present, bool(np.any(atoms.pbc))), []).append(i)
        for (present, periodic), members in alike.items():
            soap = self._soap(present, periodic)
            root = self._root_multiplicity(len(present))
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
            values = np.empty((len(rows), len(root)), dtype=dtype)
            first = 0
            for i in members:
                # All that is done to the spectra of a structure, while they are in the cache.
                spectra = soap.create(in_cell(frames[i], self.scale), centers=centers[i].tolist())
                spectra *= root
                values[first : first + len(spectra)] = finish(spectra)
                first += len(spectra)
            yield Piece(rows, self._columns(present), values)

    @cached_property
    def _soaps(self) -> dict[tuple[tuple[int, ...], bool], Any]:
        return {}

    def _soap(self, species: tuple[int, ...], periodic: bool) -> Any:
        if (species, periodic) not in self._soaps:
            from dscribe.descriptors import SOAP

            scale = self.scale
            weighting: dict[str, Any] = {"w0": scale.center_weight}
            if scale.radial_scaling is not None:
                rate = scale.radial_scaling.rate
                weighting |= {"function": "pow", "c": rate, "d": rate}
                weighting |= {
                    "r0": scale.radial_scaling.scale,
                    "m": scale.radial_scaling.exponent,
                }
            self._soaps[species, periodic] = SOAP(
                species=list(species),
                r_cut=scale.cutoff,
                n_max=scale.n_radial,
                l_max=scale.l_max,
                sigma=scale.gaussian_width,
                rbf=scale.radial_basis,
                weighting=weighting,
                periodic=periodic,
            )
        return self._soaps[species, periodic]

    def _columns(self, present: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the features of a molecule, which may have fewer species, belong."""
        if present == self.species:
            return (slice(0, self.n_features),)
        everything = self._soap(self.species, False)
        pairs = combinations_with_replacement(present, 2)
        return tuple(everything.get_location(pair) for pair in pairs)

    def _root_multiplicity(self, n_species: int) -> Float64Array:
        """Return √2 for each pair αn ≠ α′n′, and 1 for αn = α′n′, in dscribe's order."""
        n = self.scale.n_radial
        same = np.where(np.eye(n, dtype=bool), 1.0, np.sqrt(2.0))[np.triu_indices(n)]
        other = np.full(n * n, np.sqrt(2.0))
        pairs = combinations_with_replacement(range(n_species), 2)
        blocks = [np.tile(same if a == b else other, self.scale.l_max + 1) for a, b in pairs]
        return np.concatenate(blocks)


@dataclass(frozen=True)
class FeatomicEngine:
    """featomic's power spectrum, with a smooth cutoff."""

    scale: Scale
    species: tuple[int, ...]

    @property
    def n_features(self) -> int:
        """Length of a power spectrum."""
        n_species = len(self.species)
        return n_species * (n_species + 1) // 2 * self._block_size

    @property
    def pair_blocks(self) -> list[slice]:
        """Features of each pair of species."""
        return list(self.pair_columns.values())

    @property
    def _block_size(self) -> int:
        # featomic stores n, n′ and n′, n of a pair of species.
        return (self.scale.l_max + 1) * self.scale.n_radial**2

    def pieces(
        self,
        frames: Sequence[Atoms],
        centers: Sequence[IntArray],
        finish: Finish = as_they_are,
        dtype: Precision = np.float32,
    ) -> Iterator[Piece]:
        """Yield the power spectra of the whole batch as one piece."""
        n = sum(len(chosen) for chosen in centers)
        values = np.zeros((n, self.n_features), dtype=dtype)
        for columns, rows, block in self.blocks(frames, centers):
            values[rows, columns] = block.values
        yield Piece(np.arange(n), (slice(0, self.n_features),), finish(values))

    def blocks(
        self,
        frames: Sequence[Atoms],
        centers: Sequence[IntArray],
        gradients: Sequence[str] = (),
    ) -> Iterator[tuple[slice, IntArray, Any]]:
        """Yield featomic's blocks of a batch, with the features and the environments they are of.

        Parameters
        ----------
        frames, centers
            As in `pieces`.
        gradients : sequence of str
            What else to compute: "positions", "strain".

        Yields
        ------
        columns : slice
        rows : (n,) array of int
            Environments, counted through the batch.
        block : metatensor.TensorBlock
            For one species at the centre and one pair of species around it.
        """
        from metatensor import Labels

        owners = np.repeat(np.arange(len(frames)), [len(chosen) for chosen in centers])
        if not len(owners):
            return
        samples = np.stack([owners, np.concatenate(centers)], axis=1).astype(np.int32)
        computed = self.calculator.compute(
            [in_cell(atoms, self.scale) for atoms in frames],
            gradients=list(gradients),
            selected_samples=Labels(["system", "atom"], samples),
            use_native_system=True,
        )
        first_atom = offsets_of([len(atoms) for atoms in frames])
        # Place of an environment in the batch, by its atom counted through the batch.
        place = np.full(first_atom[-1], -1)
        place[first_atom[owners] + samples[:, 1]] = np.arange(len(samples))
        for key, block in computed.items():
            system, atom = np.asarray(block.samples.values).T
            pair = self.pair_columns[int(key["neighbor_1_type"]), int(key["neighbor_2_type"])]
            yield pair, place[first_atom[system] + atom], block

    @cached_property
    def pair_columns(self) -> dict[tuple[int, int], slice]:
        """Features of each pair of species."""
        size = self._block_size
        pairs = combinations_with_replacement(self.species, 2)
        return {pair: slice(i * size, (i + 1) * size) for i, pair in enumerate(pairs)}

    @cached_property
    def calculator(self) -> Any:
        """Featomic's own."""
        limit_rayon()
        from featomic import SoapPowerSpectrum

        scale = self.scale
        density: dict[str, Any] = {
            "type": "Gaussian",
            "width": scale.gaussian_width,
            "center_atom_weight": scale.center_weight,
        }
        if scale.radial_scaling is not None:
            density["scaling"] = {"type": "Willatt2018", **scale.radial_scaling.model_dump()}
        smoothing: dict[str, Any] = {"type": "Step"}
        if scale.smoothing is not None:
            smoothing = {"type": "ShiftedCosine", "width": scale.smoothing}
        return SoapPowerSpectrum(
            cutoff={"radius": scale.cutoff, "smoothing": smoothing},
            density=density,
            basis={
                "type": "TensorProduct",
                "max_angular": scale.l_max,
                "radial": {"type": "Gto", "max_radial": scale.n_radial - 1},
            },
        )


# Features of all environments of a training set: kept in memory, or on disk.
#: Environments whose features are read, and multiplied, at once.
BLOCK = 4096


def offsets_of(sizes: Sequence[int] | IntArray) -> IntArray:
    """Return where each of consecutive parts begins, and the last one ends: (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


class KeptFeatures:
    """Features (n, d) in memory, filled in order; a `RowSource`."""

    def __init__(self, n: int, d: int) -> None:
        self._rows = np.empty((n, d), dtype=np.float32)
        self._filled = 0
        self.shape = (n, d)
        self.dtype = self._rows.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> FloatArray:
        taken: FloatArray = self._rows[rows]
        return taken

    def append(self, block: FloatArray) -> None:
        """Add rows after those there are."""
        self._rows[self._filled : self._filled + len(block)] = block
        self._filled += len(block)


class SpilledFeatures:
    """Features in a file: rows of float32, one after the other, and nothing else; a `RowSource`."""

    def __init__(self, path: Path, n: int, d: int) -> None:
        self.path = path
        self.shape = (n, d)
        self.dtype = np.dtype(np.float32)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._end = 0

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def _row_bytes(self) -> int:
        return 4 * self.shape[1]

    def append(self, block: FloatArray) -> None:
        """Add rows after those there are."""
        if len(block) == 0:
            return  # nothing cannot be viewed as bytes
        view = np.ascontiguousarray(block, dtype=np.float32).data.cast("B")
        while view:
            written = os.pwrite(self._descriptor, view, self._end)
            view, self._end = view[written:], self._end + written

    def flush(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._descriptor)

    def __getitem__(self, rows: Any) -> FloatArray:
        if isinstance(rows, (int, np.integer)):
            row: FloatArray = self._read(int(rows), 1)[0]
            return row
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._read(start, max(stop - start, 0))
            rows = np.arange(start, stop, step)
        return self._gather(np.asarray(rows, dtype=np.intp))

    def _read(self, start: int, n: int) -> FloatArray:
        block = np.empty((n, self.shape[1]), dtype=np.float32)
        if n:
            self._fill(block.data.cast("B"), start)
        return block

    def _fill(self, view: memoryview, row: int) -> None:
        position = row * self._row_bytes
        while view:
            read = os.preadv(self._descriptor, [view], position)
            if read == 0:
                raise OSError(f"{self.path} is shorter than it should be")
            view, position = view[read:], position + read

    def _gather(self, rows: IntArray) -> FloatArray:
        """Read scattered rows in the order of the file, runs of neighbours at once."""
        order = np.argsort(rows, kind="stable")
        inorder = rows[order]
        sorted_block = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        breaks = np.flatnonzero(np.diff(inorder) != 1) + 1
        edges = np.concatenate([[0], breaks, [len(rows)]]).tolist()
        for begin, end in pairwise(edges):
            if end > begin:
                self._fill(sorted_block[begin:end].data.cast("B"), int(inorder[begin]))
        block = np.empty_like(sorted_block)
        block[order] = sorted_block
        return block

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def structure_blocks(offsets: IntArray, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive structures with about `size` environments each.

    Parameters
    ----------
    offsets : (N + 1,) array of int
        Environments of structure s are rows ``offsets[s]:offsets[s + 1]``.
    """
    first, n = 0, len(offsets) - 1
    while first < n:
        last = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        last = min(max(last, first + 1), n)
        yield first, last
        first = last


# From structures to the features of their environments. Eqs. (13)–(16), Musil et al. 2019.
#: Leading principal components that are multiplied in float64: they carry nearly all of x·x′.
_N_EXACT = 64
#: Representatives from which on features are compressed for accuracy, even if that takes longer.
_MANY = 2_500
#: Components per pair of species that are kept if derivatives are needed, and the least in all.
_PER_PAIR, _AT_LEAST = 32, 192


@dataclass(frozen=True)
class Representation:
    """SOAP hyper-parameters, the species they are for, and how features are compressed.

    Attributes
    ----------
    soap : Soap
    species : tuple of int
        Atomic numbers, increasing.
    projections : tuple of Projection
        One for each scale, or none at all.
    feature_scale : float
        What features are divided by if they are not normalised: keeps powers of them in range.
    precise : bool
        Whether features are float64, as those of models that were trained on forces.
    """

    soap: Soap
    species: tuple[int, ...]
    projections: tuple[Projection, ...] = ()
    feature_scale: float = 1.0
    precise: bool = False

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each scale."""
        if self.projections:
            return tuple(projection.matrix.shape[1] for projection in self.projections)
        return tuple(engine.n_features for engine in self.engines)

    @property
    def n_features(self) -> int:
        """Number d of features of an environment."""
        return sum(self.widths)

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel between environments: Eq. (13) to the power ζ, summed over the scales."""
        # Compressed features are principal components, the largest first. Products of power spectra
        # are not negative, but those of what is kept of them can be, a little.
        n_exact = _N_EXACT if self.projections else 0
        single = PowerKernel(self.soap.exponent, n_exact=n_exact, clip=bool(self.projections))
        if len(self.widths) == 1:
            return single
        ends = np.cumsum(self.widths)
        columns = [slice(int(e - w), int(e)) for e, w in zip(ends, self.widths, strict=True)]
        weights = np.array([scale.weight for scale in self.soap.scales])
        return WeightedSumKernel(
            (single,) * len(columns), tuple(weights / weights.sum()), tuple(columns)
        )

    def features(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> FloatArray:
        """Return the features of the chosen atoms of each structure, in order.

        Parameters
        ----------
        frames : sequence of Atoms
            With no species but those of the representation.
        centers : sequence of arrays of int
            The chosen atoms of each.

        Returns
        -------
        (n_environments, d) array of float32, or float64 if `precise`
            For each scale of unit length, unless the hyper-parameters say otherwise.
        """
        n = sum(len(chosen) for chosen in centers)
        dtype = np.float64 if self.precise else np.float32
        features: FloatArray = np.zeros((n, self.n_features), dtype=dtype)
        first = 0
        for s, engine in enumerate(self.engines):
            block = features[:, first : first + self.widths[s]]
            first += self.widths[s]
            for piece in engine.pieces(frames, centers, self._scaled, dtype):
                self._place(block, piece, s)
            if self.soap.normalize and self.projections:
                block[:] = normalize_rows(block)
        return features

    @property
    def engines(self) -> list[Engine]:
        """What computes the power spectra of each scale."""
        name = self.soap.resolved_engine
        return [make_engine(name, scale, self.species) for scale in self.soap.scales]

    def _scaled(self, spectra: FloatArray) -> FloatArray:
        if self.soap.normalize:
            return normalize_rows(spectra)
        return spectra / spectra.dtype.type(self.feature_scale)

    def _place(self, block: FloatArray, piece: Piece, s: int) -> None:
        """Write a piece, compressed if so wanted, where it belongs in the features of a scale."""
        if self.projections:
            # Only the rows of the map whose features are not zero: for most molecules, a third.
            matrix = self.projections[s].matrix
            block[piece.rows] = piece.values @ np.concatenate([matrix[c] for c in piece.columns])
            return
        first = 0
        for columns in piece.columns:
            width = columns.stop - columns.start
            block[piece.rows, columns] = piece.values[:, first : first + width]
            first += width


def fit_representation(
    soap: Soap,
    species: Sequence[int],
    frames: Sequence[Atoms],
    centers: Sequence[IntArray],
    compression: Compression | None,
) -> Representation:
    """Find the compression, and the scale of features that are not normalised.

    Parameters
    ----------
    soap : Soap
    species : sequence of int
        Atomic numbers of all structures to come.
    frames, centers
        A sample of environments; a few thousand will do.
    compression : Compression, optional
        What ``soap.compression`` stands for.
    """
    plain = Representation(soap, tuple(sorted(species)))
    if compression is None and soap.normalize:
        return plain
    X = plain.features(frames, centers)
    feature_scale = 1.0
    if not soap.normalize:
        feature_scale = float(np.sqrt(np.mean(np.einsum("ij,ij->i", X, X)))) or 1.0
        X /= np.float32(feature_scale)
    projections: tuple[Projection, ...] = ()
    if compression is not None and any(w > compression.n_features for w in plain.widths):
        ends = np.cumsum(plain.widths)
        projections = tuple(
            fit_projection(X[:, end - width : end], compression, engine.pair_blocks)
            for end, width, engine in zip(ends, plain.widths, plain.engines, strict=True)
        )
    return Representation(soap, plain.species, projections, feature_scale)


def resolve_compression(
    soap: Soap,
    species: Sequence[int],
    n_environments: int,
    n_representatives: int,
    *,
    derivatives: bool = False,
) -> Compression | None:
    """Return the compression that ``soap.compression`` stands for, for a training set.

    Parameters
    ----------
    soap : Soap
    species : sequence of int
    n_environments, n_representatives : int
    derivatives : bool
        Whether forces are learned, or will be wanted.
    """
    if soap.compression != "auto":
        return soap.compression
    standard = Compression()
    n_raw = max(Representation(soap, tuple(species)).widths)
    if derivatives:
        # They are multiplied with all representatives, for every neighbour: fewer features pay.
        kept = max(_PER_PAIR * len(species) * (len(species) + 1) // 2, _AT_LEAST)
        return Compression(method="pairs", n_features=kept) if n_raw > kept else None
    q = standard.n_features
    # With so many representatives rounding of the kernel rows matters: see `_N_EXACT`.
    faster = is_worthwhile(n_environments, n_representatives, n_raw, q)
    return standard if n_raw > q and (faster or n_representatives >= _MANY) else None


# Features of many structures as a stream of batches, on several cores.
#: Environments in a batch: enough for matrix products, few enough to bound what is in flight.
BATCH = 4096
#: Below this number of environments starting processes takes longer than the work.
SERIAL = 30_000
#: Batches in flight for each process.
_AHEAD = 2

_executor: Any = None

#: What a process needs of a structure: numbers, positions, cell, pbc, centers. Pickles of Atoms
#: carry everything that hangs on them.
_Lean = tuple[IntArray, FloatArray, FloatArray, Any, IntArray]


@dataclass(frozen=True)
class Batch:
    """Features of consecutive structures.

    Attributes
    ----------
    first : int
        Index of the first structure.
    features : (n_environments, d) array of float32
    sizes : (n_structures,) array of int
        Environments of each structure; may be zero.
    """

    first: int
    features: FloatArray
    sizes: IntArray

    @property
    def offsets(self) -> IntArray:
        """Environments of structure s are rows ``offsets[s]:offsets[s + 1]``."""
        return offsets_of(self.sizes)


def all_atoms(frames: Sequence[Atoms]) -> list[IntArray]:
    """Return every atom of each structure as a centre."""
    return [np.arange(len(atoms)) for atoms in frames]


def stream_features(
    representation: Representation,
    structures: Iterable[tuple[Atoms, IntArray]],
    *,
    n_workers: int = 1,
    batch: int = BATCH,
) -> Iterator[Batch]:
    """Yield the features of structures, in order, batch by batch.

    Parameters
    ----------
    representation : Representation
    structures : iterable of (Atoms, centers)
        May be a generator that reads a file.
    n_workers : int
        Processes; 1 computes in this one, and so does whatever is small.
    batch : int
        Environments in a batch, about.
    """
    batches = _batches(structures, batch)
    if n_workers > 1:
        head: list[tuple[int, list[_Lean]]] = []
        count = 0
        for item in batches:
            head.append(item)
            count += sum(len(lean[-1]) for lean in item[1])
            if count >= SERIAL:
                yield from _parallel(representation, _chain(head, batches), n_workers)
                return
        batches = iter(head)
    for first, lean in batches:
        yield _compute(representation, first, lean)


def _chain(
    head: list[tuple[int, list[_Lean]]], tail: Iterator[tuple[int, list[_Lean]]]
) -> Iterator[tuple[int, list[_Lean]]]:
    while head:
        yield head.pop(0)
    yield from tail


def _batches(
    structures: Iterable[tuple[Atoms, IntArray]], size: int
) -> Iterator[tuple[int, list[_Lean]]]:
    """Group structures to batches of about `size` environments: index of the first, and they."""
    group: list[_Lean] = []
    first = count = 0
    for i, (atoms, centers) in enumerate(structures):
        group.append((atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, centers))
        count += len(centers)
        if count >= size or len(group) >= size:
            yield first, group
            group, count, first = [], 0, i + 1
    if group:
        yield first, group


def _compute(representation: Representation, first: int, lean: list[_Lean]) -> Batch:
    frames = [Atoms(numbers, positions, cell=c, pbc=p) for numbers, positions, c, p, _ in lean]
    centers = [chosen for *_, chosen in lean]
    sizes = np.array([len(chosen) for chosen in centers], dtype=np.intp)
    return Batch(first, representation.features(frames, centers), sizes)


def stop_workers() -> None:
    """End the processes that computed features, and give back their memory."""
    global _executor
    if _executor is not None:
        _executor.shutdown(wait=True)
        _executor = None


def _parallel(
    representation: Representation,
    batches: Iterator[tuple[int, list[_Lean]]],
    n_workers: int,
) -> Iterator[Batch]:
    from loky import get_reusable_executor
    from loky.process_executor import TerminatedWorkerError

    # One thread each: the processes are the parallelism.
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "RAYON")}
    global _executor
    executor = _executor = get_reusable_executor(max_workers=n_workers, env=single, timeout=60)
    pending: deque[Any] = deque()
    try:
        for first, lean in batches:
            pending.append(executor.submit(_compute, representation, first, lean))
            if len(pending) > _AHEAD * n_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except TerminatedWorkerError as error:
        _executor = None
        raise QualmsError(
            "A process that computed features was ended from outside, perhaps for lack of memory. "
            "Use fewer threads, or a lower memory limit."
        ) from error
    except BaseException:
        # Ctrl-C, or a consumer that stops: nobody waits for what is still in flight.
        executor.shutdown(wait=False, kill_workers=True)
        _executor = None
        raise
