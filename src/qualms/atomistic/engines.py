"""Power spectra of atomic environments, computed by dscribe or by featomic.

Both expand the density of each species around an atom (Eqs. (15) and (16), Musil et al. 2019) and
contract it to the power spectrum ⟨αnα′n′l|X⟩ of Eq. (14). Their radial functions differ, so that a
model belongs to the engine it was trained with. dscribe is the faster one for values, featomic has
a smooth cutoff.

An engine stores every pair (αn, α′n′) once and weights it by the square root of how often it occurs
in the sum of Eq. (13), so that the inner product of two vectors is that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement
from typing import Any, Protocol, TypeAlias

import numpy as np
import scipy.linalg
from ase import Atoms

from qualms.atomistic.environments import offsets_of
from qualms.atomistic.hypers import Scale
from qualms.atomistic.threads import limit_rayon
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError

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
