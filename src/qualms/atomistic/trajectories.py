"""Trajectories: consecutive frames, which are nearly copies, recognised in the order of the data.

A frame of a trajectory resembles those before and after it more than others. Structures with the
same atoms and ``config_type`` are a series, in the order of the data. Each has a few interatomic
distances, between fixed random pairs of atoms. Within a window of w structures of a series, let a
be the mean squared difference of the distances of neighbours, and b that of all pairs. If the order
has no meaning, all orders within the window are equally probable, and r = 1 − a/b is zero on
average, whatever the structures are; also if a file is put together of several sets. For a random
walk r is 0.57 in the mean, with w = 8. A series is a trajectory if the mean of r over windows is
significant by Student's t, and large: neighbours in the order of QM9, in which similar molecules
follow each other, have 0.15 at most. If it is not, because other frames of the same molecule come
before or after a trajectory, parts of the series are.

Frames of a trajectory are left out in blocks of the correlation length: the lag at which the mean
squared difference comes close to that of all frames of the series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from ase import Atoms
from scipy.special import stdtr

from qualms.arrays import Float64Array, FloatArray, IntArray

#: Pairs of atoms whose distances are compared.
N_PAIRS = 64
#: Structures of a window, and the fewest.
_WINDOW, _SHORTEST = 8, 3
#: Mean of r, and its significance, from which the order has a meaning.
_LARGE, _SIGNIFICANT = 0.2, 1e-3
#: Correlation at which frames count as independent; the fewest groups that blocks may leave.
_CORRELATED, _FEWEST = 0.1, 10


class Blocks(NamedTuple):
    """Groups of structures: blocks of trajectories, and all others alone."""

    groups: IntArray  #: (n,)
    n_frames: int  #: structures that belong to trajectories
    length: int  #: frames of the longest block; 1 if there is no trajectory


def pair_distances(atoms: Atoms) -> FloatArray:
    """Return the distances of random pairs of atoms, the same for all structures of this size.

    Of periodic images, those that are nearest along each cell vector.
    """
    i, j = _pairs(len(atoms))
    vectors = atoms.positions[j] - atoms.positions[i]
    if atoms.pbc.any():
        cell = np.asarray(atoms.cell.complete())
        vectors = vectors - np.round(np.linalg.solve(cell.T, vectors.T).T) * atoms.pbc @ cell
    return np.asarray(np.linalg.norm(vectors, axis=1), dtype=np.float32)


@lru_cache(maxsize=1000)
def _pairs(n: int) -> tuple[IntArray, IntArray]:
    """Return random pairs of n atoms: (N_PAIRS,) each."""
    rng = np.random.default_rng(n)
    i, step = rng.integers(n, size=N_PAIRS), rng.integers(1, max(n, 2), size=N_PAIRS)
    return i, (i + step) % n


def series_of(atoms: Atoms) -> bytes:
    """Return what structures of one series have in common: config_type and elements, in order."""
    numbers: bytes = atoms.numbers.tobytes()
    return f"{atoms.info.get('config_type', '')}\n".encode() + numbers


def find_blocks(series: Sequence[bytes], distances: FloatArray) -> Blocks:
    """Return the blocks of consecutive frames of trajectories.

    Parameters
    ----------
    series : sequence of bytes
        The series of each structure: `series_of`.
    distances : (n, N_PAIRS) array
        Of each structure: `pair_distances`.
    """
    members: dict[bytes, list[int]] = {}
    for i, name in enumerate(series):
        members.setdefault(name, []).append(i)
    kinds: dict[bytes, list[IntArray]] = {}
    for name, places in members.items():
        if len(places) >= _SHORTEST:
            kinds.setdefault(name.partition(b"\n")[0], []).append(np.array(places))
    blocks, trajectories = [], []
    for of_kind in kinds.values():
        r = [neighbour_correlations(distances[rows]) for rows in of_kind]
        # Series may be short, such as relaxations of many structures: those of a config_type are
        # tested together as well.
        together = _is_correlated(np.concatenate(r))
        some = of_kind
        if not together:
            some = [
                rows[part]
                for rows, of in zip(of_kind, r, strict=True)
                for part in _correlated_parts(len(rows), of, len(r))
            ]
        if some:
            trajectories += some
            blocks += [correlation_length([distances[rows] for rows in some])] * len(some)
    n = len(series)
    sizes = np.array([len(rows) for rows in trajectories], dtype=np.intp)
    lengths = np.minimum(np.array(blocks, dtype=np.intp), sizes)
    # So many groups must remain that some can be left out of most members.
    while n - sizes.sum() + np.sum(-(-sizes // lengths)) < min(_FEWEST, n):
        lengths[lengths == lengths.max()] -= 1
    groups = np.arange(n)
    for rows, length in zip(trajectories, lengths.tolist(), strict=True):
        for block in np.array_split(rows, -(-len(rows) // length)):
            groups[block] = block[0]
    return Blocks(groups, int(sizes.sum()), int(lengths.max(initial=1)))


def neighbour_correlations(X: FloatArray) -> Float64Array:
    """Return r = 1 − a/b of each window of a series (n, d); NaN of windows of equal structures."""
    edges = _edges(len(X))
    r = np.full(len(edges) - 1, np.nan)
    for k, window in enumerate(np.split(np.asarray(X, dtype=np.float64), edges[1:-1])):
        m = len(window)
        everywhere = 2 * m / (m - 1) * window.var(axis=0).sum()
        if everywhere > 0:
            r[k] = 1 - np.sum(np.diff(window, axis=0) ** 2) / (m - 1) / everywhere
    return r


def _edges(n: int) -> IntArray:
    """Return the first structure of each window of n, and n."""
    return np.linspace(0, n, max(round(n / _WINDOW), 1) + 1).astype(np.intp)


def _correlated_parts(n: int, r: Float64Array, n_series: int) -> Iterator[slice]:
    """Yield the series of n structures if its order has a meaning, or parts of it whose order has.

    The part in which the sum of r − 0.2 is largest is tested as one of all parts that there are;
    what is before and after it in the same way.

    Parameters
    ----------
    n : int
    r : (n_windows,) array
    n_series : int
        Series that are tested.
    """
    if _is_correlated(r, n_series):
        yield slice(0, n)
        return
    edges, n_tests, ranges = _edges(n), n_series * len(r) ** 2, [(0, len(r))]
    while ranges:
        first, end = ranges.pop()
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(r[first:end] - _LARGE))])
        b = int(np.argmax(total - np.minimum.accumulate(total)))
        a = int(np.argmin(total[: b + 1]))
        if _is_correlated(r[first + a : first + b], n_tests):
            yield slice(int(edges[first + a]), int(edges[first + b]))
            ranges += [(first, first + a), (first + b, end)]


def _is_correlated(r: Float64Array, n_tests: int = 1) -> bool:
    """Whether the mean of r (n,) of windows is large, and significant by Student's t."""
    r = r[np.isfinite(r)]
    if len(r) < 2 or r.mean() < _LARGE:
        return False
    error = max(float(r.std(ddof=1)) / len(r) ** 0.5, 1e-3)
    return bool(stdtr(len(r) - 1, -r.mean() / error) < _SIGNIFICANT / n_tests)


def correlation_length(series: Sequence[FloatArray]) -> int:
    """Return the lag at which frames of series (n, d) of one kind are independent.

    The first at which 1 − D(lag)/D is below a tenth, D being the mean squared difference of all
    pairs of frames of a series; half of the longest series, if none is.
    """
    exact = [np.asarray(X, dtype=np.float64) for X in series]
    longest = max(map(len, exact))
    lag = 1
    while 2 * lag < longest:
        long = [X for X in exact if len(X) > 2 * lag]
        pairs = sum(len(X) - lag for X in long)
        differences = sum(float(np.sum((X[lag:] - X[:-lag]) ** 2)) for X in long)
        independent = sum((len(X) - lag) * 2 * float(X.var(axis=0, ddof=1).sum()) for X in long)
        if not pairs or differences > (1 - _CORRELATED) * independent:
            break
        lag += max(lag // 8, 1)
    return lag
