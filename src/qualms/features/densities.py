"""Densities of atomic environments: neighbours, and the radial functions that they are expanded in.

featomic's radial functions are cubic splines between knots whose number it doubles until they are
accurate. Their values and slopes at these knots, and thus the splines, are taken from featomic once
for each scale; everything else is done by `qualms.features.pair_core`. Expansions equal featomic's
to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import factorial, pi, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.features.base import offsets_of
from qualms.resources import limit_rayon

if TYPE_CHECKING:
    from qualms.features.soap import Scale

#: Atoms come no closer (Å); featomic warns.
_CLOSEST = 0.1
#: Knots of a spline: the number doubles, from the first to at most the last.
_KNOTS = 40, 40_960
#: Largest difference between a spline and featomic's, relative to the largest value.
_ACCURACY = 1e-11


# --- radial functions ---


class RadialFunctions(NamedTuple):
    """What the core needs of a scale; see `pair_core` for the first of them."""

    l_max: int
    n_radial: int
    table: Float64Array  #: (n_knots, 2, (l_max + 1)·n_radial)
    lowest: int
    step: float
    shape: Float64Array  #: (5,)
    norms: Float64Array  #: (l_max + 1, l_max + 1)
    own: Float64Array  #: (n_radial,): density of the atom at the centre, which has l = 0 alone


@lru_cache(maxsize=16)
def radial_functions(scale: Scale) -> RadialFunctions:
    """Return the radial functions of a scale, from featomic."""
    limit_rayon()
    from featomic import SphericalExpansion, SphericalExpansionByPair

    L, N, cutoff = scale.l_max, scale.n_radial, scale.cutoff
    options = expansion_options(scale)
    bare = options | {"cutoff": {"radius": cutoff, "smoothing": {"type": "Step"}}}
    bare["density"] = {k: v for k, v in options["density"].items() if k != "scaling"}
    by_pair, n_knots = SphericalExpansionByPair(**bare), _KNOTS[0]
    knots, table = _tabulate(by_pair, scale, n_knots)
    while n_knots < _KNOTS[1]:
        coarse, first, n_knots = table, 2 * knots[0] + 1, 2 * n_knots
        knots, table = _tabulate(by_pair, scale, n_knots)
        error = np.abs(_between(coarse) - table[first - knots[0] :: 2, 0])
        if error.max() <= _ACCURACY * np.abs(table[:, 0]).max():
            break
    scaling = scale.radial_scaling
    of_scaling = (0.0, 0.0, 0.0)
    if scaling is not None:
        of_scaling = (scaling.scale, scaling.exponent, scaling.rate)
    norms = np.zeros((L + 1, L + 1))
    for order in range(L + 1):
        for m in range(order + 1):
            square = (2 * order + 1) / (4 * pi) * factorial(order - m) / factorial(order + m)
            norms[order, m] = (-1) ** m * sqrt(square * (2 if m else 1))
    alone = SphericalExpansion(**options).compute(Atoms("H"), use_native_system=True)
    own = np.array(alone.block({"o3_lambda": 0}).values)[0, 0]
    shape = np.array([cutoff, scale.smoothing or 0.0, *of_scaling])
    return RadialFunctions(L, N, table, int(knots[0]), cutoff / n_knots, shape, norms, own)


def expansion_options(scale: Scale) -> dict[str, Any]:
    """Return the arguments of featomic's expansions."""
    density: dict[str, Any] = {"type": "Gaussian", "width": scale.gaussian_width}
    density["center_atom_weight"] = scale.center_weight
    if scale.radial_scaling is not None:
        density["scaling"] = {"type": "Willatt2018", **scale.radial_scaling.model_dump()}
    smoothing: dict[str, Any] = {"type": "Step"}
    if scale.smoothing is not None:
        smoothing = {"type": "ShiftedCosine", "width": scale.smoothing}
    radial = {"type": "Gto", "max_radial": scale.n_radial - 1}
    return {
        "cutoff": {"radius": scale.cutoff, "smoothing": smoothing},
        "density": density,
        "basis": {"type": "TensorProduct", "max_angular": scale.l_max, "radial": radial},
    }


def _between(table: Float64Array) -> Float64Array:
    """Return a spline half way between its knots."""
    a, b, s, e = table[:-1, 0], table[1:, 0], table[:-1, 1], table[1:, 1]
    return np.asarray((a + b) / 2 + (s - e) / 8)


def _tabulate(calculator: Any, scale: Scale, n: int) -> tuple[IntArray, Float64Array]:
    """Return the knots, of n in the cutoff, and values and slopes of featomic's splines there.

    Neighbours are put on the z axis, some at a time with distances between them. Knots closer than
    atoms come are left out.
    """
    from featomic.systems import SystemBase
    from metatensor import Labels

    class Line(SystemBase):  # type: ignore[misc]
        def __init__(self, heights: FloatArray) -> None:
            super().__init__()
            self.heights = heights

        def size(self) -> int:
            return len(self.heights) + 1

        def types(self) -> IntArray:
            return np.array([1] + [2] * len(self.heights), dtype=np.int32)

        def positions(self) -> Float64Array:
            return np.pad(self.heights[:, None], ((1, 0), (2, 0)))

        def cell(self) -> Float64Array:
            return np.zeros((3, 3))

    L, N, step = scale.l_max, scale.n_radial, scale.cutoff / n
    knots = np.arange(int(np.ceil(_CLOSEST / step)), n + 1)
    r = step * knots
    r[-1] *= 1 - 1e-12  # there are no neighbours at the cutoff
    n_lines = -(-len(r) // 6)
    first = np.stack([np.arange(n_lines), np.zeros(n_lines)], axis=1).astype(np.int32)
    keys = np.array([[order, 1, 1, 2] for order in range(L + 1)], dtype=np.int32)
    computed = calculator.compute(
        [Line(r[line::n_lines]) for line in range(n_lines)],
        gradients=["positions"],
        selected_samples=Labels(["system", "first_atom"], first),
        selected_keys=Labels(
            ["o3_lambda", "o3_sigma", "first_atom_type", "second_atom_type"], keys
        ),
        use_native_system=True,
    )
    table = np.empty((len(r), 2, L + 1, N))
    for order in range(L + 1):
        block = computed.block({"o3_lambda": order})
        line, _, second = np.asarray(block.samples.values)[:, :3].T
        place, along_z = line + (second - 1) * n_lines, sqrt((2 * order + 1) / (4 * pi))
        table[place, 0, order] = np.asarray(block.values)[:, order] / along_z
        gradient = block.gradient("positions")
        sample, _, atom = np.asarray(gradient.samples.values).T
        moved = atom > 0
        slopes = np.asarray(gradient.values)[moved, 2, order] / along_z
        table[place[sample[moved]], 1, order] = slopes * step
    return knots, table.reshape(len(r), 2, -1)


# --- neighbours ---


class Neighbours(NamedTuple):
    """Pairs of atoms: centre, neighbour, and the lattice vectors between their cells."""

    i: IntArray  #: (p,), in ascending order
    j: IntArray  #: (p,)
    shifts: IntArray  #: (p, 3)


def find_neighbours(atoms: Atoms, cutoff: float) -> Neighbours:
    """Return the pairs within a cutoff (Å), along all periodic directions."""
    from vesin import NeighborList

    finder = NeighborList(cutoff=cutoff, full_list=True, sorted=True)
    found = finder.compute(
        points=atoms.positions,
        box=atoms.cell.array,
        periodic=[bool(along) for along in atoms.pbc],
        quantities="ijS",
    )
    i, j, shifts = (np.asarray(array).astype(np.int64) for array in found)
    return Neighbours(i, j, shifts)


class NeighbourMemory:
    """Finds pairs, and keeps those of the last structure while its atoms move little.

    They are within the cutoff and a skin (Å), and are found again when an atom has moved by half of
    the skin, or if anything else changes.
    """

    def __init__(self, skin: float) -> None:
        self.skin = skin
        self._last: tuple[float, Atoms, Neighbours] | None = None

    def __call__(self, atoms: Atoms, cutoff: float) -> Neighbours:
        """Return the pairs within a cutoff (Å), and others that are a little further."""
        last = self._last  # once: another thread may replace it
        if last is None or last[0] != cutoff or not self._is_near(atoms, last[1]):
            plain = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
            last = cutoff, plain, find_neighbours(plain, cutoff + self.skin)
            self._last = last
        return last[2]

    def _is_near(self, atoms: Atoms, before: Atoms) -> bool:
        """Return whether a structure is the one before, with no atom moved by half of the skin."""
        if len(atoms) != len(before) or not np.array_equal(atoms.pbc, before.pbc):
            return False
        if not np.array_equal(atoms.cell.array, before.cell.array):
            return False
        moved = atoms.positions - before.positions
        return float(np.einsum("ij,ij->i", moved, moved).max()) < (self.skin / 2) ** 2


# --- batches of environments ---


@dataclass(frozen=True, eq=False)
class Part:
    """Some atoms of a structure whose environments are used, in ascending order.

    The structure has a number among all structures, and a `first` atom among those of all.
    """

    atoms: Atoms
    neighbours: Neighbours
    centers: IntArray
    number: int = 0
    first: int = 0


@dataclass(frozen=True, eq=False)
class Environments:
    """A batch of n environments: P pairs of centres and neighbours, and densities.

    Pairs are in runs, by environment and by element of the neighbour.
    """

    radial: RadialFunctions
    elements: IntArray  #: (E,): atomic numbers in the batch, increasing
    structures: IntArray  #: (n_structures,): see `qualms.features.base.Tape`
    atoms: IntArray  #: (n_atoms,)
    owners: IntArray  #: (n,)
    centers: IntArray  #: (n,)
    kinds: IntArray  #: (n,): place of the element of each centre
    start: IntArray  #: (n·E + 1,): where runs begin
    neighbours: IntArray  #: (P,): places in `atoms`
    vectors: Float64Array  #: (3, P)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the core on radial functions."""
        return self.radial[:-1]

    @cached_property
    def densities(self) -> Float64Array:
        """c_anlm of Eq. (15): (n, (l_max + 1)², E, n_radial)."""
        from qualms.features import pair_core

        n, E, radial = len(self.owners), len(self.elements), self.radial
        c = np.zeros((n, (radial.l_max + 1) ** 2, E, radial.n_radial))
        c[np.arange(n), 0, self.kinds] = radial.own
        pair_core.expand(self.start, self.vectors, E, *self.arguments, c)
        return c


def environments_of(radial: RadialFunctions, batch: Sequence[Part]) -> Environments:
    """Return a batch of environments."""
    from qualms.features import pair_core

    elements = np.unique(np.concatenate([part.atoms.numbers for part in batch]))
    E, starts, neighbours, vectors = len(elements), [np.zeros(1, np.int64)], [], []
    for part in batch:
        whole, some, (i, j, shifts) = part.atoms, part.centers, part.neighbours
        places = np.full(len(whole), -1)
        places[some] = np.arange(len(some))
        a, b = np.searchsorted(i, [some[0], some[-1] + 1]) if len(some) else (0, 0)
        start, others, vector = pair_core.sort_pairs(
            whole.positions, whole.cell.array, i[a:b], j[a:b], shifts[a:b], places, len(some),
            np.searchsorted(elements, whole.numbers), E, radial.shape[0],
        )  # fmt: skip
        starts.append(starts[-1][-1] + start[1:])
        neighbours.append(part.first + others)
        vectors.append(vector)
    sizes = [len(part.centers) for part in batch]
    centers = np.concatenate([part.first + part.centers for part in batch])
    numbers = np.concatenate([part.atoms.numbers[part.centers] for part in batch])
    every = np.concatenate([centers, *neighbours])
    if all(len(part.centers) == len(part.atoms) for part in batch):
        atoms, first = centers, offsets_of(sizes)[:-1]
        moved = np.concatenate([
            others - part.first + begin
            for part, others, begin in zip(batch, neighbours, first, strict=True)
        ])  # fmt: skip
        place = np.concatenate([np.arange(len(centers)), moved])
    else:
        atoms, place = np.unique(every, return_inverse=True)
    return Environments(
        radial,
        elements,
        structures=np.array([part.number for part in batch]),
        atoms=atoms,
        owners=np.repeat(np.arange(len(batch)), sizes),
        centers=place[: len(centers)],
        kinds=np.searchsorted(elements, numbers),
        start=np.concatenate(starts),
        neighbours=place[len(centers) :],
        vectors=np.concatenate(vectors, axis=1),
    )


def batches(
    frames: Sequence[Atoms], cutoff: float, size: int, find: Any = find_neighbours
) -> Iterator[list[Part]]:
    """Yield about `size` environments at a time: whole structures, or parts of one.

    `find` returns the neighbours of a structure within a cutoff.
    """
    batch: list[Part] = []
    first = 0
    for number, atoms in enumerate(frames):
        neighbours = find(atoms, cutoff)
        everything = np.arange(len(atoms))
        for centers in np.array_split(everything, max(-(-len(everything) // size), 1)):
            if batch and sum(len(part.centers) for part in batch) + len(centers) > size:
                yield batch
                batch = []
            batch.append(Part(atoms, neighbours, centers, number, first))
        first += len(atoms)
    if batch:
        yield batch
