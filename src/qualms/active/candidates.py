"""Which structures of a pool can be chosen: usable ones that are not known already.

The pool is read once, structure by structure. What remains in memory is a row of the kernel, the
mean of the features over the environments, and a few facts of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from scipy.spatial import cKDTree

from qualms.active.posterior import Rows, read_features, read_rows
from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import not_predicted
from qualms.atomistic.settings import make_settings, with_representation
from qualms.atomistic.structures import fingerprints
from qualms.errors import InputError
from qualms.features.base import Problem, stream_features
from qualms.features.densities import find_neighbours

#: Atoms closer than this share of the sum of their covalent radii clash.
MIN_DISTANCE = 0.5
#: Structures repeat each other if the means of their features differ by less, relative to these:
#: displacements of about 0.0005 Å.
SAME = 5e-4
#: Leading components of features among which near neighbours are sought.
_LEADING = 8
#: Structures that a compression of features is fitted to, if there is no model.
_SAMPLE = 1000
_POWER = re.compile(r"atoms(?:\s*(?:\^|\*\*)\s*(\d+\.?\d*))?")


class Candidates(NamedTuple):
    """What is known of the candidates."""

    numbers: IntArray  #: (N,): in the pool
    features: FloatArray  #: (N, d): means over environments
    elements: list[frozenset[int]]
    costs: Float64Array  #: (N,)
    groups: list[object]
    rows: Rows | None  #: by the model, if there is one

    def take(self, some: BoolArray) -> Candidates:
        """Return those of a mask (N,)."""
        places = np.flatnonzero(some)
        rows = self.rows
        if rows is not None:
            novel = [rows.novel[i] for i in places]
            arrays = (getattr(rows, name)[places] for name in rows._fields if name != "novel")
            kernel, variance, novelty, features, factors = arrays
            rows = Rows(kernel, variance, novelty, features, novel, factors)
        return Candidates(
            self.numbers[places],
            self.features[places],
            [self.elements[i] for i in places],
            self.costs[places],
            [self.groups[i] for i in places],
            rows,
        )


def read_candidates(
    frames: Sequence[Atoms],
    labelled: Sequence[Atoms],
    model: AtomisticModel | None,
    *,
    representation: Any = None,
    forces: bool = False,
    cost: str | Sequence[float] | None = None,
    groups: str | Sequence[object] | None = None,
) -> tuple[Candidates, dict[int, str], FloatArray]:
    """Read a pool; return its candidates, and why other structures are none.

    Returns
    -------
    candidates : Candidates
        There may be none.
    left_out : dict of int to str
    of_labelled : (n, d) array
        Features of labelled structures: means over environments.
    """
    fitted = None if model is None else model.fitted
    left_out: dict[int, str] = {}
    numbers: list[int] = []
    facts: list[tuple[frozenset[int], float, object]] = []

    def usable() -> Iterator[tuple[int, Atoms]]:
        for i, atoms, reason in _with_reasons(frames, labelled, fitted):
            if reason:
                left_out[i] = reason
                continue
            numbers.append(i)
            elements = frozenset(atoms.numbers.tolist())
            facts.append((elements, _cost(i, atoms, cost), _group(i, atoms, groups)))
            yield i, atoms

    none = np.empty((0, 1), dtype=np.float32)
    rows, of_labelled, features = None, none, none
    if model is None:
        species = {z for _, atoms in usable() for z in atoms.numbers.tolist()}
        if numbers:
            features, of_labelled = _by_representation(
                frames, numbers, sorted(species), labelled, representation
            )
    else:
        rows = read_rows(model, usable(), forces=forces)
        if rows is not None:
            features = rows.features
            known = [atoms for atoms in labelled if not not_predicted(atoms, model.fitted)]
            batches = (batch for batch, _ in read_features(model.fitted, known))
            of_labelled = _means(batches, features.shape[1])
    elements, costs, labels = zip(*facts, strict=True) if facts else ((), (), ())
    places, values = np.array(numbers, dtype=np.intp), np.array(costs)
    found = Candidates(places, features, list(elements), values, list(labels), rows)
    if len(numbers):
        same = near_duplicates(features, of_labelled)
        for i, j in same.items():
            other = f"structure {numbers[j]}" if j is not None else "a labelled structure"
            left_out[numbers[i]] = f"is nearly the same as {other}"
        found = found.take(~np.isin(np.arange(len(numbers)), [*same]))
    return found, left_out, of_labelled


def _with_reasons(
    frames: Iterable[Atoms], labelled: Sequence[Atoms], fitted: Fitted | None
) -> Iterator[tuple[int, Atoms, str]]:
    """Yield structures, their numbers, and why they are no candidates; or an empty text."""
    seen = dict.fromkeys(fingerprints(labelled), "is labelled")
    for i, atoms in enumerate(frames):
        reason = not_predicted(atoms, fitted)
        if not reason:
            (print_,) = fingerprints([atoms])
            reason = seen.get(print_) or clash(atoms)
            seen.setdefault(print_, f"is the same as structure {i}")
        yield i, atoms, reason


def clash(atoms: Atoms) -> str:
    """Return which atoms are much closer than a bond, if some are."""
    radii = covalent_radii[atoms.numbers]
    pairs = find_neighbours(atoms, 2 * MIN_DISTANCE * float(radii.max()))
    vectors = atoms.positions[pairs.j] - atoms.positions[pairs.i]
    lengths = np.linalg.norm(vectors + pairs.shifts @ np.asarray(atoms.cell), axis=1)
    shares = lengths / (radii[pairs.i] + radii[pairs.j])
    if not len(shares) or shares.min() >= MIN_DISTANCE:
        return ""
    k = int(shares.argmin())
    i, j = int(pairs.i[k]), int(pairs.j[k])
    return (
        f"has atoms {i} ({atoms.symbols[i]}) and {j} ({atoms.symbols[j]}) {lengths[k]:.2f} Å apart"
    )


def near_duplicates(features: FloatArray, of_labelled: FloatArray) -> dict[int, int | None]:
    """Return rows (N, d) that nearly repeat one before them, or a labelled one, which is None.

    Rows are sought among those that are close in the leading components: a projection makes no
    distance larger.
    """
    X = np.concatenate([of_labelled, features]).astype(np.float64)
    n, centred = len(of_labelled), X - X.mean(axis=0)
    axes = np.linalg.eigh(centred.T @ centred)[1][:, -_LEADING:]
    leading = centred @ axes
    tree, lengths = cKDTree(leading), SAME * np.linalg.norm(X, axis=1)
    same: dict[int, int | None] = {}
    for i in range(len(X)):
        if i - n in same:
            continue
        near = np.array(tree.query_ball_point(leading[i], lengths[i]))
        near = near[near > max(i, n - 1)]
        for j in near[np.linalg.norm(X[near] - X[i], axis=1) <= lengths[i]].tolist():
            same.setdefault(j - n, i - n if i >= n else None)
    return same


def _cost(i: int, atoms: Atoms, cost: str | Sequence[float] | None) -> float:
    """Return the cost of the label of a structure."""
    if cost is None:
        return 1.0
    if isinstance(cost, str):
        if match := _POWER.fullmatch(cost):
            return float(len(atoms) ** float(match[1] or 1))
        value: Any = atoms.info.get(cost)
    else:
        value = cost[i]
    if not isinstance(value, (int, float, np.number)) or not 0 < float(value) < np.inf:
        raise InputError(
            f"The `cost` of structure {i} is {value!r}; it must be a positive number. Give "
            "'atoms^3', or a key that all structures have.",
            parameter="cost",
        )
    return float(value)


def _group(i: int, atoms: Atoms, groups: str | Sequence[object] | None) -> object:
    """Return the group of a structure."""
    if not isinstance(groups, str):
        return None if groups is None else groups[i]
    if groups not in atoms.info:
        raise InputError(
            f"Structure {i} has no {groups!r}, the key of `groups`, in its info.",
            parameter="groups",
        )
    return str(atoms.info[groups])


# --- without a model ---


def _by_representation(
    frames: Sequence[Atoms],
    numbers: Sequence[int],
    species: Sequence[int],
    labelled: Sequence[Atoms],
    representation: Any,
) -> tuple[FloatArray, FloatArray]:
    """Return features (N, d) of structures with these numbers, and elements, and of labelled ones.

    Labelled structures of other elements are unlike all of them.
    """
    given = {} if representation is None else {"representation": representation}
    settings = make_settings({"target": "energy", **given})
    known = [atoms for atoms in labelled if not not_predicted(atoms, None)]
    known = [atoms for atoms in known if {*atoms.numbers.tolist()} <= {*species}]
    some = np.random.default_rng(0).permutation(len(numbers))[:_SAMPLE]
    sample = [frames[numbers[i]] for i in np.sort(some)]
    periodic = bool(np.mean([atoms.pbc.any() for atoms in sample]) > 0.5)
    features = with_representation(settings, species, periodic=periodic)[0].features
    fitted = features.fit(
        species,
        Problem(len(numbers), False),
        lambda: (sample, [np.arange(len(atoms)) for atoms in sample]),
    )
    both = chain(known, (frames[i] for i in numbers))
    pairs = ((atoms, np.arange(len(atoms))) for atoms in both)
    means = _means(stream_features(fitted, pairs), fitted.n_features)
    return means[len(known) :], means[: len(known)]


def _means(batches: Iterable[Any], d: int) -> FloatArray:
    """Return means of features over the environments of structures: (N, d)."""
    means = [
        np.stack([x.mean(axis=0) for x in np.split(batch.features, batch.offsets[1:-1])])
        for batch in batches
    ]
    return np.concatenate([np.empty((0, d)), *means]).astype(np.float32)
