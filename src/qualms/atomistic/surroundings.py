"""A part of a large structure, cut out with all that is around it.

Environments end at the cutoff. featomic, given some atoms of a structure, still spends time on all
the others, for each environment anew; a part without the rest makes that time independent of the
size of the structure. Images of atoms across a periodic boundary become atoms of their own, until
derivatives by their positions have been computed, which are those by the positions of the atoms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from ase import Atoms
from scipy.spatial import cKDTree

from qualms.core.typing import Float64Array, IntArray

#: Structures of fewer atoms are not worth it.
LARGE = 256
#: What distances may be wrong by after atoms have been moved by a lattice vector, in Å.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Cutting:
    """Atoms around some atoms of a structure.

    Attributes
    ----------
    atoms : Atoms
        Without a cell, if it was cut out.
    origins : (n,) array of int
        Which atom of the structure each of them is, or is an image of.
    centers : array of int
        Where the atoms in the middle are among them.
    """

    atoms: Atoms
    origins: IntArray
    centers: IntArray


@dataclass(frozen=True, eq=False)
class Surroundings:
    """A structure that can be cut to pieces.

    Attributes
    ----------
    atoms : Atoms
    """

    atoms: Atoms

    def parts(self, size: int) -> Iterator[IntArray]:
        """Yield all atoms, at most so many at a time; if they are many, near to one another."""
        if len(self.atoms) < LARGE:
            yield from np.array_split(np.arange(len(self.atoms)), -(-len(self.atoms) // size))
        else:
            yield from _compact(self._inside, np.arange(len(self.atoms)), size)

    def around(self, centers: IntArray, cutoff: float) -> Cutting:
        """Return some atoms, all that are within the cutoff (Å) of them, and perhaps others."""
        n = len(self.atoms)
        widths = self._widths[np.asarray(self.atoms.pbc)]
        # In a narrow cell an environment may have two images of an atom: they stay one atom.
        if n < LARGE or np.any(widths < 2 * (cutoff + _ROUNDING)):
            return Cutting(self.atoms, np.arange(n), centers)
        images = self._images(cutoff)
        found = images.tree.query_ball_point(images.positions[centers], cutoff + _ROUNDING)
        near = np.unique(np.concatenate([np.asarray(some, dtype=np.intp) for some in found]))
        origins = images.origins[near]
        atoms = Atoms(self.atoms.numbers[origins], images.positions[near])
        return Cutting(atoms, origins, np.searchsorted(near, centers))

    @cached_property
    def _cell(self) -> Float64Array:
        return np.asarray(self.atoms.cell.complete().array, dtype=np.float64)

    @cached_property
    def _widths(self) -> Float64Array:
        """Distances between the faces of the cell: (3,), in Å."""
        widths: Float64Array = 1 / np.linalg.norm(np.linalg.pinv(self._cell), axis=0)
        return widths

    @cached_property
    def _scaled(self) -> Float64Array:
        """Positions in units of the cell, moved into it along periodic directions."""
        scaled = np.linalg.solve(self._cell.T, self.atoms.positions.T).T
        periodic = np.asarray(self.atoms.pbc)
        scaled[:, periodic] -= np.floor(scaled[:, periodic])
        return scaled

    @property
    def _inside(self) -> Float64Array:
        positions: Float64Array = self._scaled @ self._cell
        return positions

    @cached_property
    def _known(self) -> dict[float, _Images]:
        return {}

    def _images(self, cutoff: float) -> _Images:
        """Return all atoms, and then their images that are within the cutoff of the cell."""
        if cutoff not in self._known:
            margins = (cutoff + _ROUNDING) / self._widths
            shifts = [(0, -1, 1) if periodic else (0,) for periodic in self.atoms.pbc]
            scaled, origins = [], []
            for shift in product(*shifts):
                moved = self._scaled + np.array(shift)
                inside = (moved >= -margins) & (moved <= 1 + margins)
                # Along directions that are not periodic atoms may be anywhere.
                near = np.all(inside | (np.array(shift) == 0), axis=1)
                scaled.append(moved[near])
                origins.append(np.flatnonzero(near))
            positions = np.concatenate(scaled) @ self._cell
            self._known[cutoff] = _Images(positions, np.concatenate(origins))
        return self._known[cutoff]


@dataclass(frozen=True, eq=False)
class _Images:
    positions: Float64Array
    origins: IntArray

    @cached_property
    def tree(self) -> cKDTree:
        return cKDTree(self.positions)


def _compact(positions: Float64Array, chosen: IntArray, size: int) -> Iterator[IntArray]:
    """Halve a structure along its longest side until the pieces are small enough."""
    n_parts = -(-len(chosen) // size)
    if n_parts <= 1:
        yield np.sort(chosen)
        return
    axis = int(np.argmax(np.ptp(positions[chosen], axis=0)))
    order = chosen[np.argsort(positions[chosen, axis], kind="stable")]
    middle = len(chosen) * (n_parts // 2) // n_parts
    for half in (order[:middle], order[middle:]):
        yield from _compact(positions, half, size)
