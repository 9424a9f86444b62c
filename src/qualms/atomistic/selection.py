"""Choosing representative environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qualms.atomistic.settings import Settings
from qualms.core.kernels import Kernel
from qualms.core.selection import RowSource, cur_from_kernel, farthest_points
from qualms.core.typing import FloatArray, IntArray

#: CUR chooses among this many times more farthest points than are wanted.
LANDMARKS = 2


class _Rows:
    """Some rows of features, numbered anew; a `RowSource`."""

    def __init__(self, features: RowSource, rows: IntArray) -> None:
        self._features, self._rows = features, rows
        self.shape = (len(rows), features.shape[1])
        self.dtype = features.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> FloatArray:
        return self._features[self._rows[rows]]


def select_representatives(
    features: RowSource,
    kernel: Kernel,
    center_species: IntArray,
    settings: Settings,
    rng: np.random.Generator,
    on_pick: Callable[[int], object] | None = None,
) -> IntArray:
    """Choose environments: at most ``settings.n_representatives`` indices, in order of choice.

    Parameters
    ----------
    features : RowSource
        Of all candidates, (n, d).
    kernel : Kernel
    center_species : (n,) array of int
        Atomic number at the centre of each.
    settings : Settings
        ``selection``, ``n_representatives``, and ``per_species``, whether each species gets its
        share of the representatives or all compete.
    rng : Generator
        For a random choice.
    on_pick : callable, optional
        Called with the number of picks so far.
    """
    n = min(settings.n_representatives, len(features))
    if not settings.per_species:
        return _select(features, kernel, n, settings.selection, rng, on_pick)
    picks: list[IntArray] = []
    for z, share in _shares(center_species, n).items():
        rows = np.flatnonzero(center_species == z)
        chosen = _select(_Rows(features, rows), kernel, share, settings.selection, rng, None)
        picks.append(rows[chosen])
        if on_pick is not None:
            on_pick(sum(map(len, picks)))
    return np.concatenate(picks)


def _select(
    features: RowSource,
    kernel: Kernel,
    n: int,
    selection: str,
    rng: np.random.Generator,
    on_pick: Callable[[int], object] | None,
) -> IntArray:
    if selection == "random":
        return rng.permutation(len(features))[:n]
    if selection == "fps":
        return farthest_points(features, n, on_pick=on_pick).indices
    n_landmarks = min(LANDMARKS * n, len(features))
    found = None if on_pick is None else lambda k: on_pick(k * n // n_landmarks)
    landmarks = farthest_points(features, n_landmarks, on_pick=found).indices
    X = features[landmarks].astype(np.float64)
    K = np.asarray(kernel(X, X))
    del X
    return landmarks[cur_from_kernel(K, min(n, len(landmarks))).indices]


def _shares(center_species: IntArray, n: int) -> dict[int, int]:
    """Divide n among the species in proportion to their environments, one at least for each.

    If n is less than the number of species, the most frequent get one each.
    """
    species, counts = np.unique(center_species, return_counts=True)
    exact = n * counts / counts.sum()
    shares = np.zeros(len(species), dtype=int)
    shares[np.argsort(-counts, kind="stable")[:n]] = 1
    while shares.sum() < n:
        # What is furthest below its share is below it at all, hence below its count.
        shares[np.argmax(exact - shares)] += 1
    return {int(z): int(s) for z, s in zip(species, shares, strict=True) if s}
