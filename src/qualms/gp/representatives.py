"""Representatives: farthest point sampling at the speed of matrix products, and CUR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import blas, eigh, lapack

from qualms.arrays import Float64Array, FloatArray, IntArray, check_integer, row_blocks
from qualms.errors import InputError, counted
from qualms.gp.kernels import Kernel


def _as_float(X: FloatArray, name: str) -> FloatArray:
    """`X` as it is if float32 or float64, otherwise as float64."""
    array = np.asarray(X)
    if array.dtype not in (np.float32, np.float64):
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"`{name}` is an array of {array.dtype}, not of real numbers.", parameter=name
            ) from error
    if array.ndim != 2 or 0 in array.shape:
        raise InputError(
            f"`{name}` has the shape {array.shape}; it must be a table with rows and columns.",
            parameter=name,
        )
    return array


def _check_count(name: str, size: int, n: int) -> None:
    """Reject more picks than rows."""
    if check_integer("n", n, 1) > size:
        raise InputError(
            f"`n` is {n}, but `{name}` has only {counted(size, 'row')}.", parameter="n"
        )


# Farthest point sampling at the speed of matrix products.
# Tuned on 20 000 to 100 000 points with 3 000 features; only speed depends on these. Few large
# products also suffer least when other processes compete for the cores.
_POOL_FRACTION = 16  # a pool holds this fraction (1/16) of the points of its level
_LOOP_SIZE = 128  # levels up to this size run the textbook loop: their rows stay in cache
_PICKS = 384  # picks in one matrix product
_GEMV_ROWS = 64  # few enough that BLAS does not wake its threads for 0.02 ms of work

#: Columns whose products are float64. Compressed features are principal components, the largest
#: first, so that the rounding of all others is small beside the distances.
_EXACT = 100
#: Leading bits of squared distances that are compared. Fewer bits make more rows equal, of which a
#: change of one changes the pick; more bits depend on rounding.
_BITS = 14
#: (d², −index): of two points, the greater key is picked first.
_Key = tuple[float, int]


def _rounded(d2: Float64Array) -> Float64Array:
    """Return squared distances to their leading bits; 0 and ±∞ as they are."""
    mantissa, exponent = np.frexp(d2)
    rounded: Float64Array = np.ldexp(np.rint(mantissa * 2.0**_BITS), exponent - _BITS)
    return rounded


def _products(X: FloatArray, C: FloatArray) -> Float64Array:
    """Return X Cᵀ for C (m, d), or X c for c (d,)."""
    leading = X[:, :_EXACT].astype(np.float64) @ C[..., :_EXACT].astype(np.float64).T
    leading += X[:, _EXACT:] @ C[..., _EXACT:].T
    return leading


class FarthestPoints(NamedTuple):
    """Picks of farthest point sampling.

    `indices` (n_selected,) are the picked rows, in order, and `distances` (n_selected,) that of
    each pick to the nearest pick before it, to four digits; the first is infinite. Every point lies
    within ``distances[-1]`` of a pick, to four digits.
    """

    indices: IntArray
    distances: Float64Array


def farthest_points(
    X: FloatArray,
    n: int,
    *,
    n_first: int = 1,
    on_pick: Callable[[int], object] | None = None,
) -> FarthestPoints:
    """Pick rows one by one from the first on, each the farthest from those already picked.

    The picks are those of the textbook loop on squared distances that are rounded to 14 bits, four
    digits; of equal ones the first row is picked. So rounding of the features, which depends on the
    processor, hardly ever chooses among points that are equally far, such as equivalent atoms of a
    molecule. Distances come from ``|x|² + |c|² − 2 x·c``, mostly in the precision of `X`, or from
    ``x − c`` where that would cancel.

    A distance to the picks only shrinks as picks are added, so an old value is an upper bound. The
    next picks are among the points with the largest bounds, the pool, as long as the best of the
    pool beats the largest bound outside it. Finding them is the same problem on fewer points, down
    to a textbook loop on rows that fit in the cache. Bounds are brought up to date only for points
    that enter a pool, by matrix products with the picks they have missed. Most points never meet
    most picks, and the whole costs less than the product of all points with all picks.

    Parameters
    ----------
    X : FloatArray of shape (n_points, n_features)
        Features, float32 or float64. Read in blocks and never copied as a whole.
    n : int
        How many rows to pick.
    n_first : int
        The first rows, so many of them, are the first picks, whatever their distances.
    on_pick : callable, optional
        Called with the number of picks after each one, to show progress.

    Returns
    -------
    FarthestPoints
        `n` picks, or fewer if every other row repeats a pick: a row within ``16 ε |x|`` of a pick,
        with ε the machine precision of `X`, counts as a repetition.
    """
    X = _as_float(X, "X")
    _check_count("X", len(X), n)
    norms = np.empty(len(X))
    for rows in row_blocks(len(X)):
        block = X[rows].astype(np.float64)
        norms[rows] = np.einsum("ij,ij->i", block, block)
    if not (norms < np.finfo(X.dtype).max).all():
        row = int((norms < np.finfo(X.dtype).max).argmin())
        raise InputError(
            f"Row {row} of `X` has a feature that is NaN, infinite or too large to be squared.",
            parameter="X",
        )
    search = _Search(X, n, on_pick)
    ids = np.arange(len(X))
    level = _Level(X, norms, ids, np.full(len(X), np.inf), np.zeros_like(ids))
    for row in range(n_first):
        search.record(level, row)
    search.refresh(level, -np.inf)
    level.d2[:n_first] = -np.inf
    search.advance(level, (0.0, 1))  # beaten by every positive distance, whatever its index
    return FarthestPoints(np.array(search.indices, dtype=np.intp), np.sqrt(search.d2))


@dataclass
class _Level:
    """Points with upper bounds `d2` of their squared distance to the picks.

    The bound of point i takes the first ``seen[i]`` picks into account. `ids` are indices into the
    whole. A pick has d² = −∞, a repetition of a pick 0.
    """

    X: FloatArray
    norms: Float64Array
    ids: IntArray
    d2: Float64Array
    seen: IntArray

    def __post_init__(self) -> None:
        eps = float(np.finfo(self.X.dtype).eps)
        #: Squared distance at or below which a point counts as repeating a pick.
        self.resolution = (16.0 * eps) ** 2 * self.norms

    def take(self, rows: IntArray) -> _Level:
        return _Level(
            self.X[rows], self.norms[rows], self.ids[rows], self.d2[rows], self.seen[rows]
        )

    def best(self, d2: Float64Array | None = None) -> tuple[int, _Key]:
        """Row of the largest bound (lowest index in ties) and its key."""
        d2 = self.d2 if d2 is None else d2
        row = int(d2.argmax())
        ties = np.flatnonzero(d2 == d2[row])
        if len(ties) > 1:
            row = int(ties[self.ids[ties].argmin()])
        return row, (float(d2[row]), -int(self.ids[row]))

    def split(self, size: int) -> tuple[IntArray, _Key]:
        """Rows of the `size` largest keys, in order of `seen`, and the best key of the rest.

        The key, not the bound alone: among equal bounds the lowest indices must enter the pool, or
        a tie across its edge could not be decided inside it.
        """
        cut = np.partition(self.d2, len(self.d2) - size)[len(self.d2) - size]
        above = np.flatnonzero(self.d2 > max(cut, 0.0))
        ties = np.flatnonzero(self.d2 == cut) if cut > 0 else above[:0]
        ties = ties[np.argsort(self.ids[ties], kind="stable")][: size - len(above)]
        pool = np.concatenate([above, ties])
        rest = self.d2.copy()
        rest[pool] = -np.inf
        return pool[np.argsort(self.seen[pool], kind="stable")], self.best(rest)[1]

    def lower(self, rows: IntArray | slice, d2: Float64Array) -> Float64Array:
        """Lower the bounds of `rows` to `d2`, and to zero where that is below the resolution."""
        lowered = np.minimum(self.d2[rows], d2)
        lowered[(lowered <= self.resolution[rows]) & (lowered > 0)] = 0.0
        lowered = _rounded(lowered)  # monotone, so that bounds stay bounds
        self.d2[rows] = lowered
        return lowered


class _Search:
    """The picks so far, with a contiguous copy of their rows, and the search for the next ones."""

    def __init__(self, X: FloatArray, n: int, on_pick: Callable[[int], object] | None) -> None:
        self.n, self.on_pick = n, on_pick
        self.indices: list[int] = []
        self.d2: list[float] = []
        self.rows = np.empty((n, X.shape[1]), dtype=X.dtype)
        self.half_norms = np.empty(n)

    def record(self, level: _Level, row: int) -> None:
        count = len(self.indices)
        self.rows[count], self.half_norms[count] = level.X[row], level.norms[row] / 2
        self.indices.append(int(level.ids[row]))
        self.d2.append(float(level.d2[row]))
        if self.on_pick is not None:
            self.on_pick(len(self.indices))

    def advance(self, level: _Level, bound: _Key) -> None:
        """Pick from `level` for as long as its best beats `bound`, the best key outside it."""
        if len(level.ids) <= _LOOP_SIZE:
            self.loop(level, bound)
            return
        size = max(len(level.ids) // _POOL_FRACTION, _LOOP_SIZE)
        # Every round makes progress: if the best bound of the level is up to date, it is picked;
        # if not, it is brought up to date.
        while len(self.indices) < self.n and level.best()[1] > bound:
            rows, outside = level.split(size)
            floor = max(outside, bound)
            pool = level.take(rows)
            self.refresh(pool, floor[0])
            if pool.best()[1] > floor:
                self.advance(pool, floor)
            level.d2[rows] = pool.d2
            level.seen[rows] = pool.seen

    def refresh(self, level: _Level, floor: float) -> None:
        """Bring up to date every bound of `level` that stays at or above `floor`.

        A bound below `floor` cannot be picked in this round, so the rest of the picks it has missed
        can wait. Rows come sorted by `seen`; comparing a row with a pick twice does no harm.
        """
        last = len(self.indices)
        for block in row_blocks(len(level.ids)):
            X, norms = level.X[block], level.norms[block]
            rows, first = block.start + np.arange(len(X)), int(level.seen[block.start])
            while first < last and len(rows):
                # Two near-equal halves rather than a full product and a sliver.
                until = last if last - first < 1.5 * _PICKS else first + _PICKS
                d2 = level.lower(rows, self.nearest(X, norms, first, until))
                level.seen[rows] = np.maximum(level.seen[rows], until)
                first = until
                stays = np.flatnonzero(d2 >= floor)
                if first < last and len(stays) < 0.75 * len(rows):
                    rows, X, norms = rows[stays], X[stays], norms[stays]

    def loop(self, level: _Level, bound: _Key) -> None:
        """Pick from `level` by the textbook loop.

        Bounds that are not up to date are below `bound` (see `refresh`), so none of them is picked.
        """
        current, X = level.seen == len(self.indices), level.X[:]
        while len(self.indices) < self.n:
            row, key = level.best()
            if key <= bound:
                break
            self.record(level, row)
            last = len(self.indices)
            level.lower(slice(None), self.nearest(X, level.norms, last - 1, last))
            level.d2[row] = -np.inf
        level.seen[current] = len(self.indices)

    def nearest(self, X: FloatArray, norms: Float64Array, first: int, last: int) -> Float64Array:
        """Return the squared distance of every row to the nearest of some picks.

        Parameters
        ----------
        X : (n, D) array
        norms : (n,) array
            Squared norms of the rows.
        first, last : int
            The picks are ``first`` to ``last − 1``.
        """
        # d² = |x|² + 2 (|c|²/2 − x·c): the minimum over picks needs only the parenthesis.
        if last - first > 1:
            halves = _products(X, self.rows[first:last])
        else:
            parts = range(0, len(X), _GEMV_ROWS)
            products = [_products(X[i : i + _GEMV_ROWS], self.rows[first]) for i in parts]
            halves = np.concatenate(products)[:, None]
        np.subtract(self.half_norms[first:last], halves, out=halves)
        d2: Float64Array = norms + 2.0 * halves.min(axis=1)
        # The expansion is off by 0.3 ε √D |x|² for most data, by ten times that for constant rows
        # (measured): where little more than that is left, it has cancelled.
        inaccurate = 16.0 * float(np.finfo(X.dtype).eps) * np.sqrt(X.shape[1]) * norms
        rows = np.flatnonzero(d2 <= inaccurate)
        if not len(rows):
            return d2
        expanded = norms[rows, None] + 2.0 * halves[rows]
        row, pick = np.nonzero(expanded <= inaccurate[rows, None])
        step = max(1, 800_000 // X.shape[1])  # pairs whose differences are taken at once
        for begin in range(0, len(row), step):
            i, j = row[begin : begin + step], pick[begin : begin + step]
            difference = np.subtract(X[rows[i]], self.rows[first + j], dtype=np.float64)
            expanded[i, j] = np.einsum("ij,ij->i", difference, difference)
        d2[rows] = expanded.min(axis=1)
        return d2


# CUR: picking rows by their leverage scores.
def cur(K: FloatArray, n: int) -> IntArray:
    """Pick rows one by one by their leverage among directions that the picks so far do not span.

    With a kernel K = Φ Φᵀ and the n leading eigenvectors u of it, the leverage of row i is
    ``π_i = Σ_k (u_i^(k))²``. The row with the largest is picked, and the vectors made orthogonal to
    it (Drmač & Gugercin, SIAM J. Sci. Comput. 38, A631 (2016)). Returns the indices of the picks,
    in order.

    Parameters
    ----------
    K : FloatArray of shape (n_points, n_points)
        Kernel of the points. Solved in float64.
    n : int
        How many rows to pick. Fewer are picked if these span all rows: eigenvalues below
        ``ε n_points`` of the largest, with ε that of `K`, count as zero.
    """
    K = _as_float(K, "K")
    if K.shape[0] != K.shape[1]:
        raise InputError(f"`K` has the shape {K.shape}; it must be a square matrix.", parameter="K")
    _check_count("K", len(K), n)
    if not np.isfinite(K).all():
        raise InputError("`K` has NaN, infinite or overflowing values.", parameter="K")
    bounds = max(len(K) - n, 0), len(K) - 1
    values, vectors = eigh(K.astype(np.float64), subset_by_index=bounds, overwrite_a=True)
    U = vectors[:, values > np.finfo(K.dtype).eps * len(K) * max(values[-1], 0.0)]
    # UUᵀ has the leverages on its diagonal, and a step of its Cholesky factorisation leaves there
    # those among directions that the pivots so far do not span. So the pivots are the picks.
    H = blas.dsyrk(1.0, U, lower=1) if U.size else np.zeros((len(U), len(U)))
    pivots = lapack.dpstrf(H, tol=0.0, lower=1, overwrite_a=1)[1]
    return np.asarray(pivots[: U.shape[1]].astype(np.intp) - 1)


#: CUR selects from this many times more farthest points: the kernel of all need not fit in memory.
LANDMARKS = 2


def select_representatives(
    X: FloatArray,
    n: int,
    selection: str,
    kernel: Kernel,
    rng: np.random.Generator,
    on_pick: Callable[[int], object] | None = None,
) -> IntArray:
    """Select at most n rows; return their indices, in order of selection.

    Parameters
    ----------
    X : (n_points, d) array
        Features.
    n : int
    selection : {"fps", "cur", "random"}
        Farthest points in the space of the features; points of large leverage in that of the
        kernel, among farthest points; or any points.
    kernel : Kernel
    rng : numpy.random.Generator
    on_pick : callable, optional
        Called with the number of picks so far.
    """
    n = min(n, len(X))
    if selection == "random":
        return rng.permutation(len(X))[:n].astype(np.intp)
    if selection == "fps":
        return farthest_points(X, n, on_pick=on_pick).indices
    n_landmarks = min(LANDMARKS * n, len(X))
    count = None if on_pick is None else lambda k: on_pick(k * n // n_landmarks)
    landmarks = farthest_points(X, n_landmarks, on_pick=count).indices
    exact = X[landmarks].astype(np.float64)
    return landmarks[cur(np.asarray(kernel(exact, exact)), min(n, len(landmarks)))]
