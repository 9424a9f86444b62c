"""Structures whose labels are far from what all others say about them.

Least squares believes every label, and a single wrong one spoils what is near to it. But members
that did not see it are not spoilt: they agree with one another, and err by as much as the label is
wrong. A structure is named if their error about it is far beyond the usual error, that is, that of
the median structure, and far beyond it in units of the spread between them, too. Large errors alone
are no reason: of a structure that no other resembles members know little, and differ.

A median does not care for how wrong the labels of a few structures are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qualms.atomistic.settings import Settings
from qualms.atomistic.training_set import TrainingSet
from qualms.core.resampling import MIN_ABSENT
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.errors import QualmsWarning, counted

#: Structures from which on there is a usual error.
_ENOUGH = 10
#: So many times the usual error is far, and so many times what is usual in units of the spread.
#: Forces of the wrong sign are a hundred times the usual error off, and more. Three members that
#: differ by a tenth of what they should, by chance, are no reason to name a structure.
_FAR, _FAR_IN_SPREADS = 30.0, 10.0
#: Structures that a warning names.
_NAMED = 5


@dataclass(frozen=True)
class Doubtful:
    """Structures whose labels are far off, worst first.

    Attributes
    ----------
    structures : (m,) array of int
    errors : (m,) array
        Of members that did not see them: root mean square over the rows of a structure.
    usual : float
        The median of that over all structures.
    """

    structures: IntArray
    errors: Float64Array
    usual: float


def doubtful_structures(
    y: Float64Array, members: Float64Array, absent: BoolArray, structure: IntArray
) -> Doubtful:
    """Return the structures whose labels members that did not see them find far off.

    Parameters
    ----------
    y : (n,) array
        Labels of one kind.
    members : (n, N_R) array
        What members say about them.
    absent : (n, N_R) array of bool
        Which members did not see a row.
    structure : (n,) array of int
        Structure of each row.

    Returns
    -------
    Doubtful
    """
    codes, z, s = _errors_and_spreads(y, members, absent, structure)
    if len(codes) < _ENOUGH:
        return Doubtful(np.empty(0, dtype=np.intp), np.empty(0), 0.0)
    usual, t = float(np.median(z)), z / np.maximum(s, np.finfo(np.float64).tiny)
    # Rounding has no usual error.
    least = 1e-9 * float(np.median(np.abs(y)))
    far = z > _FAR * max(usual, least)
    far &= t > _FAR_IN_SPREADS * max(float(np.median(t)), 1.0)
    found = np.flatnonzero(far)
    found = found[np.argsort(-z[found], kind="stable")]
    return Doubtful(codes[found], z[found], usual)


def _errors_and_spreads(
    y: Float64Array, members: Float64Array, absent: BoolArray, structure: IntArray
) -> tuple[IntArray, Float64Array, Float64Array]:
    """Return the structures that enough members did not see, RMS errors and RMS spreads."""
    judged = absent.sum(axis=1) >= MIN_ABSENT
    y, members, absent, structure = y[judged], members[judged], absent[judged], structure[judged]
    c = absent.sum(axis=1)
    mean = np.sum(members * absent, axis=1) / np.maximum(c, 1)
    squares = np.sum((members - mean[:, None]) ** 2 * absent, axis=1) / np.maximum(c - 1, 1)
    codes, where, rows = np.unique(structure, return_inverse=True, return_counts=True)
    z = np.sqrt(np.bincount(where, weights=(y - mean) ** 2, minlength=len(codes)) / rows)
    s = np.sqrt(np.bincount(where, weights=squares, minlength=len(codes)) / rows)
    return codes, z, s


def warn_of_doubtful(
    data: TrainingSet,
    settings: Settings,
    energies: Float64Array,
    derived: Float64Array,
    counts: IntArray,
) -> None:
    """Name structures whose energy, forces or stress are far from what the others say.

    Parameters
    ----------
    data : TrainingSet
        With forces or virials.
    settings : Settings
    energies : (n, N_R) array
        What members say about energies per atom.
    derived : (n_rows, N_R) array
        And about forces and virials.
    counts : (n, N_R) array of int
        How often each structure is in each member.
    """
    for name, key, y, members, structure in _kinds(data, settings, energies, derived):
        absent = counts[structure] == 0
        found = doubtful_structures(y, members, absent, structure)
        if len(found.structures):
            _warn(name, key, found, data.source)


def _kinds(
    data: TrainingSet, settings: Settings, energies: Float64Array, derived: Float64Array
) -> Iterator[tuple[str, str, Float64Array, Float64Array, IntArray]]:
    """Yield name, key, labels, predictions and structures of each kind of rows."""
    yield "target", settings.target, data.y, energies, np.arange(len(data.y))
    labels = data.mechanics
    assert labels is not None
    for name, key, rows in (
        ("forces", settings.forces, np.flatnonzero(~labels.is_virial)),
        ("stress", settings.stress, np.flatnonzero(labels.is_virial)),
    ):
        if key is not None and len(rows):
            yield name, key, labels.y[rows], derived[rows], labels.structure[rows]


def _warn(name: str, key: str, found: Doubtful, source: IntArray) -> None:
    named = [f"frames[{source[s]}]" for s in found.structures[:_NAMED]]
    more = len(found.structures) - len(named)
    several = ", ".join(named) + (f" and {more} more" if more else "")
    times = found.errors[0] / found.usual if found.usual > 0 else np.inf
    warnings.warn(
        f"{name}={key!r}: labels of {counted(len(found.structures), 'structure')} ({several}) are "
        f"far from what members say that did not see them, up to {times:.2g} times as far as is "
        "usual. Are they right? Models believe them, and one wrong label spoils what is near to "
        "it. If they are, no other structure resembles these.",
        QualmsWarning,
        stacklevel=6,
    )
