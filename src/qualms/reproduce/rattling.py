"""How far atoms of rattled crystals were moved, told by the symmetry that they have lost.

The relaxed parents of the public rattled crystals are not public. But they are symmetric: a crystal
has several copies of each atom, and each copy was moved on its own. How far the copies are from
each other's places says how far they were moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, IntArray
from qualms.reproduce.results import Displacement

#: How near to its place, in Å, a copy is looked for: far beyond any rattling, below a bond.
_REACH = 0.5
#: Operations that keep the axes of a cell: translations, inversion, and, where angles are right,
#: mirrors, glides, rotations and screws by half a turn.
_SIGNS = np.array(list(product((1.0, -1.0), repeat=3)))
#: How far a cell may be from the symmetry that its operation asks for, in Å².
_METRIC = 1e-3


def displacement(crystals: Sequence[Atoms]) -> Displacement | None:
    """Measure how far atoms are from symmetric places; None if no crystal has a symmetry.

    Copies of an atom that were displaced independently, by s per Cartesian component, differ by
    √2 s from what the operation that relates them makes of each other.

    Parameters
    ----------
    crystals : sequence of Atoms
        Periodic, with several copies of each atom in the cell, in any order.
    """
    found = [s for atoms in crystals if (s := _of_crystal(atoms)) is not None]
    if not found:
        return None
    low, median, high = (float(v) for v in np.quantile(found, [0.05, 0.5, 0.95]))
    return Displacement(rms=median, low=low, high=high, n=len(found), of=len(crystals))


def _of_crystal(atoms: Atoms) -> float | None:
    """Return the root mean square of a component over all atoms and operations; None without."""
    cell = atoms.cell.array
    if not np.all(atoms.pbc) or atoms.cell.rank < 3:
        return None
    fractional, metric = np.linalg.solve(cell.T, atoms.positions.T).T, cell @ cell.T
    squares = []
    for signs in _SIGNS:
        if np.allclose(np.outer(signs, signs) * metric, metric, rtol=0.0, atol=_METRIC):
            for difference in _copies(fractional, atoms.numbers, cell, signs):
                # The translation is fitted: it takes one degree of freedom of each component.
                n = len(difference)
                squares.append(np.mean(np.var(difference, axis=0)) * n / (n - 1))
    return float(np.sqrt(np.mean(squares) / 2)) if squares else None


def _copies(
    fractional: Float64Array, numbers: IntArray, cell: Float64Array, signs: Float64Array
) -> Iterator[Float64Array]:
    """Yield how far copies are from their places, for each translation that completes an operation.

    Parameters
    ----------
    fractional : (n, 3) array
    numbers : (n,) array
    cell : (3, 3) array
    signs : (3,) array
        Diagonal of the operation in fractional coordinates.
    """
    elements, counts = np.unique(numbers, return_counts=True)
    by_element = [np.flatnonzero(numbers == e) for e in elements[np.argsort(counts)]]
    rarest = by_element[0]
    # An operation brings the first atom of the rarest element to one of the same element.
    for other in rarest:
        translation = fractional[other] - signs * fractional[rarest[0]]
        parts = []
        for which in by_element:
            part = _nearest(fractional[which], signs * fractional[which] + translation, cell)
            if part is None:
                break
            parts.append(part)
        else:
            difference = np.concatenate(parts)
            if len(difference) > 1:
                yield difference


def _nearest(points: Float64Array, places: Float64Array, cell: Float64Array) -> Float64Array | None:
    """Return the vectors (Å) from places to the points nearest to them, one to one.

    None if that cannot be done within reach. A point at its own place is left out: it does not say
    how far it was moved.
    """
    apart = points - places[:, None, :]
    vectors = (apart - np.round(apart)) @ cell
    distances = np.einsum("ijk,ijk->ij", vectors, vectors)
    nearest, rows = distances.argmin(axis=1), np.arange(len(points))
    if distances[rows, nearest].max() > _REACH**2 or len(np.unique(nearest)) < len(points):
        return None
    others = nearest != rows
    return np.asarray(vectors[rows, nearest][others])
