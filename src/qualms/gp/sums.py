"""Sums over rows: all that a sparse model needs to know of the data.

The weights of a model, (ΦᵀWΦ + σ²) w = ΦᵀWy, depend on sums over rows alone, and sums are additive:
those of a training set are those of its parts. Structures are divided into blocks, and the training
set of a member is a set of blocks, so that the sums of all members follow from those of the blocks,
each of which is formed once. Members of free draws, as in the paper, have sums of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qualms.arrays import (
    Float64Array,
    FloatArray,
    IntArray,
    as_targets,
    check_sample_weight,
    row_blocks,
)
from qualms.errors import InputError

#: Rows up to which they are kept instead of their Gram matrix: their product then takes no longer
#: than reading a matrix from memory.
FEW_ROWS = 128
#: Columns of a Gram matrix in a panel.
_PANEL = 512


@dataclass(frozen=True)
class RowSums:
    """Sums over rows Φ (N, r), weighted by W, with columns C (N, c) that targets are made of.

    Attributes
    ----------
    panels : tuple of (r − a, w) arrays
        ΦᵀWΦ of all rows but the `few`: its columns a … a + w from the diagonal down, w = 512 at a
        time, since it is symmetric; none if all rows are few.
    few : (n, r) array
        √W Φ of some rows, which take less memory than their Gram matrix.
    moment : (r, c) array
        ΦᵀWC.
    squares : (c, c) array
        CᵀWC.
    """

    panels: tuple[Float64Array, ...]
    few: Float64Array
    moment: Float64Array
    squares: Float64Array

    @property
    def gram(self) -> Float64Array:
        """ΦᵀWΦ: (r, r), a new array."""
        r = self.few.shape[1]
        gram = np.empty((r, r)) if self.panels else np.zeros((r, r))
        for k, panel in enumerate(self.panels):
            a = k * _PANEL
            b = a + panel.shape[1]
            gram[a:, a:b] = panel
            gram[a:b, b:] = panel[b - a :].T
        if len(self.few):
            gram += self.few.T @ self.few
        return gram

    @property
    def trace(self) -> float:
        """Σ w |φ|², the trace of the Gram matrix."""
        return float(np.sum(self.few**2) + sum(np.trace(panel) for panel in self.panels))

    def __add__(self, other: RowSums) -> RowSums:
        return weighted_sum([self, other], [1.0, 1.0])

    def combined(self, coefficients: Float64Array) -> RowSums:
        """Return the sums for targets C B, given B (c, T) as columns."""
        B = coefficients
        return RowSums(self.panels, self.few, self.moment @ B, B.T @ self.squares @ B)

    def leading(self, r: int) -> RowSums:
        """Return the sums of the first r features."""
        panels = tuple(
            panel[: r - k * _PANEL, : r - k * _PANEL]
            for k, panel in enumerate(self.panels)
            if k * _PANEL < r
        )
        return RowSums(panels, self.few[:, :r], self.moment[:r], self.squares)


def _compact(
    panels: tuple[Float64Array, ...], few: Float64Array
) -> tuple[tuple[Float64Array, ...], Float64Array]:
    """Return panels of a Gram matrix with the product of rows (n, r) added, unless few."""
    if len(few) <= min(FEW_ROWS, few.shape[1]):
        return panels, few
    return _added(panels, _panels(few)), few[:0]


def _added(
    some: tuple[Float64Array, ...], others: tuple[Float64Array, ...]
) -> tuple[Float64Array, ...]:
    """Return the sum of two Gram matrices, of which one may have no rows."""
    if not (some and others):
        return some or others
    return tuple(a + b for a, b in zip(some, others, strict=True))


def _panels(Phi: FloatArray) -> tuple[Float64Array, ...]:
    """Return the panels of ΦᵀΦ for rows (n, r)."""
    starts = range(0, Phi.shape[1], _PANEL)
    return tuple(np.asarray(Phi[:, a:].T @ Phi[:, a : a + _PANEL], np.float64) for a in starts)


def sums_size(n_rows: float, r: int) -> float:
    """Return the bytes of the sums over so many rows with r features."""
    return 8.0 * r * (n_rows if n_rows <= min(FEW_ROWS, r) else min((r + _PANEL) / 2, r))


def sum_rows(Phi: FloatArray, C: FloatArray, sample_weight: FloatArray | None = None) -> RowSums:
    """Return the sums over rows.

    Parameters
    ----------
    Phi : (N, r) array
    C : (N, c) array
        Columns that targets are made of.
    sample_weight : (N,) array, optional
        Positive; one by default.
    """
    C = as_targets(C, len(Phi))
    weight = check_sample_weight(sample_weight, len(Phi))[:, None]
    moment = np.asarray(Phi.T @ (weight * C), dtype=np.float64)
    squares = C.T @ (weight * C)
    panels: tuple[Float64Array, ...] = ()
    few = np.empty((0, Phi.shape[1]))
    if len(Phi) <= min(FEW_ROWS, Phi.shape[1]):
        few = np.asarray(Phi * np.sqrt(weight), dtype=np.float64)
    elif np.all(weight == 1):
        panels = _panels(Phi)
    else:  # a copy of all rows might not fit beside them
        for rows in row_blocks(len(Phi)):
            panels = _added(panels, _panels(Phi[rows] * np.sqrt(weight[rows])))
    if not all(np.all(np.isfinite(values)) for values in (few, *panels)):
        raise InputError("`Phi` has NaN or infinite values.", parameter="Phi")
    return RowSums(panels, few, moment, squares)


def weighted_sum(parts: Sequence[RowSums], weights: Sequence[float]) -> RowSums:
    """Return the sums over all parts, the rows of each with their weights times a factor."""

    def total(terms: Sequence[tuple[float, Float64Array]]) -> Float64Array:
        (w, first), *others = terms
        result = w * first
        for w, array in others:
            result += array if w == 1 else w * array  # in place: they may be large
        return result

    pairs = list(zip(weights, parts, strict=True))
    dense = [(w, part.panels) for w, part in pairs if part.panels]
    n_panels = len(dense[0][1]) if dense else 0
    panels = tuple(total([(w, some[k]) for w, some in dense]) for k in range(n_panels))
    few = np.concatenate([w**0.5 * part.few for w, part in pairs])
    moment = total([(w, part.moment) for w, part in pairs])
    squares = total([(w, part.squares) for w, part in pairs])
    return RowSums(*_compact(panels, few), moment, squares)


@dataclass(frozen=True)
class Draw:
    """Blocks that points are divided into, and the members that are made of them.

    Attributes
    ----------
    block : (n,) array of int
        Block of each point.
    counts : (n, N_R) array of int
        How often each point is in the training set of each member.
    n_blocks : int
        B.
    of_blocks : (B, N_R) array of int or None
        How often each block is; None if points are drawn freely.
    """

    block: IntArray
    counts: IntArray
    n_blocks: int
    of_blocks: IntArray | None

    def take(self, points: IntArray) -> Draw:
        """Return the draw of some points, or of rows that belong to these points."""
        return replace(self, block=self.block[points], counts=self.counts[points])

    def sum_blocks(
        self, Phi: FloatArray, C: FloatArray, sample_weight: FloatArray | None = None
    ) -> dict[int, RowSums]:
        """Return the sums over the rows of each block that has some.

        Parameters
        ----------
        Phi : (n, r) array
        C : (n, c) array
            Columns that targets are made of.
        sample_weight : (n,) array, optional
            Positive; one by default.
        """
        sums = {}
        for b in np.unique(self.block).tolist():
            rows = np.flatnonzero(self.block == b)
            weight = None if sample_weight is None else sample_weight[rows]
            sums[b] = sum_rows(Phi[rows], C[rows], weight)
        return sums


@dataclass(frozen=True)
class BlockSums:
    """Sums over all rows of each quantity, block by block.

    The first T columns are the targets of the full model, less their mean. The last is one; for
    derivatives of the target, which have no mean, it is zero.
    """

    sums: dict[str, list[RowSums]]  #: by quantity; the target is the first

    @classmethod
    def of(cls, sums: Mapping[str, Mapping[int, RowSums]], n_blocks: int) -> BlockSums:
        """Return the sums of so many blocks; those that are not given have no rows."""
        some = next(iter(next(iter(sums.values())).values()))
        r, c = some.moment.shape
        nothing = RowSums((), np.empty((0, r)), np.zeros((r, c)), np.zeros((c, c)))
        return cls({k: [v.get(b, nothing) for b in range(n_blocks)] for k, v in sums.items()})

    @property
    def n_blocks(self) -> int:
        """B."""
        return len(next(iter(self.sums.values())))

    def total(self, name: str, blocks: Iterable[int] | None = None) -> RowSums:
        """Return the sums of a quantity over all blocks, or some of them."""
        some = range(self.n_blocks) if blocks is None else blocks
        parts = [self.sums[name][b] for b in some]
        return weighted_sum(parts, [1.0] * len(parts))

    def weighted(self, times: IntArray, ratios: Mapping[str, float]) -> RowSums:
        """Return the sums over blocks, each so many times (B,), weighted by quantity."""
        pairs = [(name, b) for name in self.sums for b in np.flatnonzero(times).tolist()]
        parts = [self.sums[name][b] for name, b in pairs]
        return weighted_sum(parts, [ratios[name] * times[b] for name, b in pairs])

    def scale(self, factor: float) -> None:
        """Multiply all features by a factor, in place: there may be no memory for a copy."""
        for of_blocks in self.sums.values():
            for sums in of_blocks:
                for array in (sums.few, sums.moment):
                    array *= factor
                for panel in sums.panels:
                    panel *= factor**2

    def leading(self, r: int) -> BlockSums:
        """Return the sums of the first r features."""
        return BlockSums({k: [s.leading(r) for s in v] for k, v in self.sums.items()})


@dataclass(frozen=True)
class KeptRows:
    """Rows that are kept: noise is selected, and uncertainties are calibrated, on these.

    They are those of whole groups: of some, or of all if members are drawn freely.
    """

    Phi: Float64Array  #: (N, r): whitened features
    columns: Float64Array  #: (N, c): as in `BlockSums`
    rows: Mapping[str, IntArray]  #: places of the rows of each quantity
    groups: IntArray  #: (N,): rows that are left out together
    draw: Draw  #: block of each row, and how often it is in each member
    weight: Float64Array  #: (N,): rows of a quantity have its noise variance divided by this
    n_outputs: int = 1  #: T

    @property
    def y(self) -> Float64Array:
        """Targets, less their mean over all rows: (N, T)."""
        return self.columns[:, : self.n_outputs]

    def leading(self, r: int) -> KeptRows:
        """Return the rows with the first r features; a view: there may be no memory for a copy."""
        return replace(self, Phi=self.Phi[:, :r])
