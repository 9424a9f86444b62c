"""Passes over the parts of a training set: features, representatives, and sums of kernel rows.

After the census, a second pass computes features and selects representatives among those of all
parts; a third one computes kernel rows, whitens them, φ, and sums them over blocks of structures,
ΦᵀΦ and Φᵀy. Rows of some random structures are kept. Features are kept between the passes if they
fit in the memory, and computed twice otherwise; no array of (all labels) × (representatives)
exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, whole_blocks
from qualms.atomistic.baseline import Baseline
from qualms.atomistic.census import Census, TrainingSet
from qualms.atomistic.extrapolation import ROUNDING
from qualms.atomistic.forces import (
    KernelTerm,
    fill_rows,
    kernel_terms,
    packed_labels,
)
from qualms.atomistic.kernel_rows import Basis, structure_novelty
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.settings import Settings
from qualms.execution import Workers, stop_workers
from qualms.features.base import (
    BATCH,
    Problem,
    Representation,
    ranges,
    stream_features,
)
from qualms.features.compression import sample_size
from qualms.gp.ensemble import N_KEPT, keep_groups
from qualms.gp.kernels import Kernel, unit_scale
from qualms.gp.representatives import LANDMARKS, select_representatives
from qualms.gp.sparse_gp import Whitening, whiten
from qualms.gp.sums import BlockSums, Draw, KeptRows, RowSums
from qualms.progress import Stages

#: Streams of random numbers: the sample that a compression is fitted to, the selection of
#: representatives, the rows that are kept, and combinations of labels.
_SAMPLE_STREAM, _SELECTION_STREAM, _KEPT_STREAM, _LABEL_STREAM = 1, 3, 8, 9
#: Bytes of the features of a part from which representatives are selected, at least.
PART = 4e8
#: Rows whose sums are computed in a task, with so many representatives or more, and at a time in
#: it: sending the sums takes much less time than computing them.
ROWS, _LARGE, CHUNK = 16_384, 5000, 4096
#: The smallest number of representatives that is chosen, and of a nested model: with fewer, hardly
#: any time is saved.
SMALLEST = 250
#: Environments that novelty is measured with, if labels span the model; functions of labels that a
#: task combines; share of the prior variance at which a function is a combination of others.
_N_NOVELTY, _COMBINED, _RTOL = 1000, 500, 1e-12


@dataclass(frozen=True)
class TrainingProblem:
    """A training set, and settings in which nothing is open."""

    settings: Settings
    data: TrainingSet
    census: Census
    draw: Draw  #: members, as sets of blocks of structures or atoms
    baseline: Baseline
    n_representatives: int  #: M, to select
    size_limit: str  #: what limits the number of representatives, if it is chosen
    preset: str  #: the representation, if it was chosen, and why
    cached: bool  #: whether features are kept between the passes
    n_processes: int  #: processes that compute features

    @property
    def draws_atoms(self) -> bool:
        """Whether members are made of atoms rather than of structures."""
        return self.settings.resample == "atoms"

    def drawn(self, structures: IntArray) -> IntArray:
        """Return the drawn units of some structures: themselves, or their atoms."""
        return ranges(self.data.offsets, structures) if self.draws_atoms else structures


def n_features(settings: Settings, data: TrainingSet, M: int) -> tuple[int, int]:
    """Return the numbers of features, for M representatives, after and before compression."""
    return settings.features.n_features(data.species, feature_problem(settings, M))


def feature_problem(settings: Settings, M: int) -> Problem:
    """Return the size of a training with M representatives, for the representation."""
    return Problem(M, settings.has_forces, settings.basis == "labels")


# --- features -------------------------------------------------------------------------------------


def fit_features(problem: TrainingProblem, stages: Stages) -> Representation:
    """Return the representation, with what is fitted to random structures."""
    settings, data = problem.settings, problem.data

    def sample() -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        rng = np.random.default_rng([settings.seed, _SAMPLE_STREAM])
        pairs = data.take(random_sample(data, rng)).environments_of_frames
        frames, centers = zip(*pairs, strict=True)
        return frames, centers

    with stages.stage("Compression"):
        size = feature_problem(settings, problem.n_representatives)
        return settings.features.fit(data.species, size, sample)


def random_sample(data: TrainingSet, rng: np.random.Generator) -> IntArray:
    """Return random structures with enough environments to fit a compression.

    The first structure with each pair of elements comes first: features of a pair that the sample
    lacks would be lost.
    """
    columns = np.array(data.species)
    elements = [columns[row > 0].tolist() for row in data.composition]
    order = rng.permutation(len(elements))
    seen: set[tuple[int, int]] = set()
    first = []
    for place, i in enumerate(order):
        pairs = set(combinations_with_replacement(elements[i], 2))
        if not pairs <= seen:
            seen |= pairs
            first.append(place)
    order = np.concatenate([order[first], np.delete(order, first)])
    sizes = np.cumsum(data.environments[order])
    enough = int(np.searchsorted(sizes, sample_size(data.n_environments))) + 1
    return order[: max(enough, len(first))]


def feature_blocks(
    representation: Representation,
    part: TrainingSet,
    *,
    n_processes: int = 1,
    count: Callable[[int], object] | None = None,
    cached: FloatArray | None = None,
) -> Iterator[tuple[FloatArray, IntArray]]:
    """Yield features of consecutive structures, and where each structure begins.

    Parameters
    ----------
    representation : Representation
    part : TrainingSet
    n_processes : int
        Processes that compute features.
    count : callable, optional
        Is called with numbers of environments that are done.
    cached : (n, d) array, optional
        Features of all environments of the part, if they are known.
    """
    if cached is None:
        representation.prepare()  # rejects a worker with other weights of a network
        pairs = part.environments_of_frames
        batches = stream_features(representation, pairs, n_workers=n_processes)
        blocks = ((batch.features, batch.offsets) for batch in batches)
    else:
        edges = (part.offsets[i : j + 1] for i, j in whole_blocks(part.offsets, BATCH))
        blocks = ((cached[e[0] : e[-1]], e - e[0]) for e in edges)
    for features, offsets in blocks:
        yield features, offsets
        if count is not None:
            count(len(features))


def _counter(advance: Callable[[int], object]) -> Callable[[int], None]:
    """Return a function that adds up what it is called with, and shows the sum."""
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        advance(done)

    return count


# --- representatives ---


@dataclass(frozen=True)
class Environments:
    """Environments to select representatives from, or those selected."""

    origins: IntArray  #: (n, 2): structure, as given to `fit`, and atom
    groups: IntArray  #: (n,): group of the structure
    features: FloatArray  #: (n, d)

    def __len__(self) -> int:
        return len(self.origins)

    def take(self, some: IntArray) -> Environments:
        """Return the environments with these indices."""
        return Environments(self.origins[some], self.groups[some], self.features[some])

    @classmethod
    def join(cls, parts: Sequence[Environments]) -> Environments:
        """Return the environments of several parts."""
        if len(parts) == 1:
            return parts[0]
        names = ("origins", "groups", "features")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def part_size(settings: Settings, data: TrainingSet, M: int, n_features: int) -> int:
    """Return environments of a part from which representatives are selected.

    Few parts have many features in memory, many parts many candidates: √(nM) is the best for both.
    """
    width = settings.features.dtype.itemsize * n_features
    return max(int(math.sqrt(data.n_environments * M)), 2 * M, int(PART / width))


def pick_representatives(
    problem: TrainingProblem, representation: Representation, workers: Workers, stages: Stages
) -> tuple[Environments, Whitening, list[FloatArray]]:
    """Select representatives: within parts, and then among those of all parts; and whiten them.

    For farthest points, both steps leave every environment within twice the optimal covering radius
    of a pick, as the plain algorithm does; together, at most twice as far. Features (n, d) of the
    parts, which are consecutive, are returned as well if they are kept.

    Parameters
    ----------
    problem : TrainingProblem
    representation : Representation
    workers : Workers
    stages : Stages
    """
    settings, data = problem.settings, problem.data
    M = problem.n_representatives
    if problem.settings.basis == "labels":  # novelty alone is measured with environments
        M = min(M, data.n_environments, _N_NOVELTY)
    edges = whole_blocks(data.offsets, part_size(settings, data, M, representation.n_features))
    parts = [data.take(np.arange(first, last)) for first, last in edges]
    selected, cache = [], []
    with stages.stage("Features", data.n_environments) as advance:
        count = _counter(advance)
        results = workers.map(
            candidates,
            parts,
            settings,
            M,
            workers.share(representation),
            problem.n_processes,
            len(parts) == 1,
            problem.cached,
            None if workers.executor else count,
        )
        for part, (environments, features) in zip(parts, results, strict=True):
            selected.append(environments)
            if features is not None:
                cache.append(features)
            if workers.executor is not None:
                count(part.n_environments)
    if not problem.cached:
        stop_workers()  # and free their memory
    environments, kernel = Environments.join(selected), representation.kernel
    return *whitened_points(environments, M, kernel, settings, stages), cache


def candidates(
    part: TrainingSet,
    settings: Settings,
    M: int,
    representation: Representation,
    n_processes: int,
    alone: bool,
    cached: bool,
    count: Callable[[int], object] | None,
) -> tuple[Environments, FloatArray | None]:
    """Return candidates of a part: representatives selected in it, or all if it is alone.

    Features of all environments are returned as well, if they are to be cached.

    Parameters
    ----------
    part : TrainingSet
    settings : Settings
    M : int
        Number of representatives that are selected among the candidates of all parts.
    representation : Representation
    n_processes : int
        Processes that compute features.
    alone : bool
        Whether there is no other part.
    cached : bool
        Whether features are to be cached.
    count : callable or None
        Is called with numbers of environments that are done.
    """
    shape, done = (part.n_environments, representation.n_features), 0
    X = np.empty(shape, dtype=representation.dtype)
    for block, _ in feature_blocks(representation, part, n_processes=n_processes, count=count):
        X[done : done + len(block)] = block
        done += len(block)
    atoms = np.concatenate(part.all_centers)
    origins = np.stack([np.repeat(part.source, part.environments), atoms], 1)
    groups = np.repeat(part.groups, part.environments)
    environments = Environments(origins.astype(np.int64), groups, X)
    if not alone:
        n, selection = M, settings.selection
        if selection == "cur":  # selects among farthest points
            n, selection = LANDMARKS * n, "fps"
        rng = np.random.default_rng([settings.seed, _SELECTION_STREAM, int(part.source[0])])
        selected = select_representatives(X, n, selection, representation.kernel, rng)
        environments = environments.take(selected)
    return environments, X if cached else None


def whitened_points(
    environments: Environments, M: int, kernel: Kernel, settings: Settings, stages: Stages
) -> tuple[Environments, Whitening]:
    """Select representatives among candidates, and drop those that others describe to rounding.

    They are returned in the order of the pivots, with their whitening.

    Parameters
    ----------
    environments : Environments
        Candidates.
    M : int
        Number of representatives to select.
    kernel : Kernel
    settings : Settings
    stages : Stages
    """
    rng = np.random.default_rng([settings.seed, _SELECTION_STREAM])
    X, n = environments.features, min(M, len(environments))
    with stages.stage("Representatives", n) as advance:
        selected = select_representatives(X, n, settings.selection, kernel, rng, advance)
        environments = environments.take(selected)
    # Among environments that are equally far apart, rounding may choose the order of selection.
    environments = environments.take(np.lexsort(environments.origins.T[::-1]))
    with stages.stage("Whitening"):
        exact = environments.features.astype(np.float64)
        rtol = 1e-10 if settings.learns_forces else 1e-6  # features are float32 without forces
        whitening = whiten(np.asarray(kernel(exact, exact)), rtol=rtol)
    return environments.take(whitening.pivots), whitening


# --- labels as representatives ---


@dataclass(frozen=True)
class LabelFunctions:
    """Combinations of the labels of structures that span a model, as packed matrices.

    See `packed_labels`: with ζ = 2 the kernel of two labels is the inner product of these.
    """

    groups: IntArray  #: (M,): group of the structure
    packed: Float64Array  #: (M, p)
    #: packed labels of structures by their number in the input, if they are kept
    labels: dict[int, Float64Array]

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, some: IntArray) -> LabelFunctions:
        """Return the functions with these indices."""
        return replace(self, groups=self.groups[some], packed=self.packed[some])

    def kernel(self, rows: Float64Array) -> Float64Array:
        """Return the kernel of labels (n, p) with the functions: (n, M)."""
        return np.asarray(rows @ self.packed.T)


def combine_labels(
    problem: TrainingProblem, representation: Representation, workers: Workers, stages: Stages
) -> tuple[LabelFunctions, Whitening]:
    """Return the functions of labels, in the order of the pivots, and their whitening.

    Each structure has its energy, and random orthonormal combinations of its other labels, as many
    of which as there is room for: at the same M the force errors are 2 to 3 % lower than those of
    single labels.

    Parameters
    ----------
    problem : TrainingProblem
    representation : Representation
    workers : Workers
    stages : Stages
    """
    data = problem.data
    counts = shares(problem.n_representatives, data.rows_of_structures)
    chosen = np.flatnonzero(counts)
    pieces = np.array_split(chosen, -(-int(counts.sum()) // _COMBINED))
    parts = [(data.take(some), counts[some]) for some in pieces if len(some)]
    packed: list[Float64Array] = []
    labels: dict[int, Float64Array] = {}
    with stages.stage("Labels as basis", len(chosen)) as advance:
        results = workers.map(
            _combine_part,
            parts,
            workers.share(representation),
            problem.settings.seed,
            problem.cached,
        )
        done = 0
        for (part, _), (of_part, labels_of_part) in zip(parts, results, strict=True):
            packed.append(of_part)
            labels |= zip(part.source.tolist(), labels_of_part, strict=False)
            advance(done := done + len(part.source))
    functions = LabelFunctions(
        np.repeat(data.groups[chosen], counts[chosen]), np.concatenate(packed), labels
    )
    with stages.stage("Whitening"):
        whitening = whiten(functions.kernel(functions.packed), rtol=_RTOL)
    return functions.take(whitening.pivots), whitening


def _label_terms(representation: Representation) -> list[KernelTerm]:
    """Return the terms of a kernel without representatives."""
    return kernel_terms(representation, np.empty((0, representation.n_features)))


def shares(n: int, most: IntArray) -> IntArray:
    """Return numbers with the sum n, as equal as they can be without exceeding `most` (k,)."""
    counts, n = np.zeros_like(most), min(n, int(most.sum()))
    while left := n - int(counts.sum()):
        (room,) = np.nonzero(counts < most)
        edges = np.linspace(0, left, len(room) + 1).round().astype(np.intp)
        counts[room] = np.minimum(counts[room] + np.diff(edges), most[room])
    return counts


def _combine_part(
    part: tuple[TrainingSet, IntArray],
    representation: Representation,
    seed: int,
    cached: bool,
) -> tuple[Float64Array, list[Float64Array]]:
    """Return so many functions (n,) of the labels of each structure of a part, and the labels.

    The latter if they are to be cached.
    """
    data, counts = part
    assert data.derivatives is not None
    terms, functions, labels = _label_terms(representation), [], []
    for s, (atoms, n) in enumerate(zip(data.frames, counts.tolist(), strict=True)):
        rows = packed_labels(terms, atoms, data.derivatives.known[s])
        if cached:
            labels.append(rows)
        if n < len(rows):
            rng = np.random.default_rng([seed, _LABEL_STREAM, int(data.source[s])])
            Q = np.linalg.qr(rng.standard_normal((len(rows) - 1, n - 1)))[0]
            rows = np.concatenate([rows[:1], Q.T @ rows[1:]])
        functions.append(rows)
    return np.concatenate(functions), labels


# --- sums over kernel rows, and rows that are kept ------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Sums over the rows of all quantities, and the rows that are kept."""

    representatives: Environments  #: that novelty is measured with
    functions: Environments | LabelFunctions  #: that span the model, in the order of the pivots
    whitening: Whitening  #: of the kernel scaled by Eq. (17), Musil et al. 2019
    scale: float  #: the factor of the kernel
    sums: BlockSums
    kept: KeptRows
    sample: TrainingSet  #: structures whose rows are kept
    center: float  #: mean of the target less the baseline
    k_xx: Float64Array  #: (n,): diagonal of the scaled kernel, of kept rows of the target
    #: mean novelty of the environments of each structure of the sample, and the largest of each
    #: element, (n, 1 + S), for numbers of representatives
    novelty: dict[int, Float64Array]

    def leading(self, r: int) -> Rows:
        """Return the rows of the model that has the first r representatives alone."""
        if r == len(self.functions):
            return self
        representatives, functions = self.representatives, self.functions.take(np.arange(r))
        if isinstance(functions, Environments):
            representatives = functions
        return replace(
            self,
            representatives=representatives,
            functions=functions,
            whitening=self.whitening.leading(r),  # its factor is triangular
            sums=self.sums.leading(r),
            kept=self.kept.leading(r),
        )


@dataclass(frozen=True)
class RowTask:
    """Arguments that the tasks of the last pass have in common."""

    representation: Representation
    n_processes: int
    representatives: Environments
    functions: Environments | LabelFunctions
    whitening: Whitening
    sizes: list[int]  #: numbers of representatives that novelty is computed for
    baseline: Baseline
    center: float
    draws_atoms: bool
    chunk: int  #: structures whose rows are computed at a time
    count: Callable[[int], object] | None = None  #: see `feature_blocks`


@dataclass(frozen=True)
class RowPart:
    """Structures whose rows are computed, with their draw and, perhaps, their features."""

    data: TrainingSet
    draw: Draw  #: of structures, or of atoms
    kept: BoolArray  #: (n,): whether the rows of a structure are kept
    features: list[FloatArray]  #: of consecutive environments; empty if they are not kept


@dataclass(frozen=True)
class PartSums:
    """Sums over the rows of a part, not scaled by Eq. (17), and the rows that are kept."""

    sums: dict[str, dict[int, RowSums]]  #: by quantity and block
    diagonal: float  #: sum of the diagonal of the kernel, over the rows of the target
    novelty: list[Float64Array]  #: (n_structures, n_sizes, 1 + S): of several chunks
    #: rows of the target, of its derivatives, and diagonal, of structures that are kept
    kept: list[tuple[Float64Array, Float64Array, Float64Array]]

    def add(self, other: PartSums) -> PartSums:
        """Return the sums over both of two parts."""
        sums = {name: dict(of_blocks) for name, of_blocks in self.sums.items()}
        for name, of_blocks in other.sums.items():
            mine = sums.setdefault(name, {})
            for b, some in of_blocks.items():
                mine[b] = mine[b] + some if b in mine else some
        diagonal, novelty = self.diagonal + other.diagonal, self.novelty + other.novelty
        return PartSums(sums, diagonal, novelty, self.kept + other.kept)


def sum_part(part: RowPart, task: RowTask) -> PartSums:
    """Compute the rows of a part, some structures at a time, and sum over them."""
    total: PartSums | None = None
    for first in range(0, len(part.data.source), task.chunk):
        structures = np.arange(first, min(first + task.chunk, len(part.data.source)))
        environments = ranges(part.data.offsets, structures)
        data = part.data.take(structures)
        draw = part.draw.take(environments if task.draws_atoms else structures)
        # Of a chunk alone: there may be no memory for a copy of the features of a part.
        pieces = _cached(part.features, int(environments[0]), int(environments[-1]) + 1)
        features = np.concatenate(pieces) if len(pieces) > 1 else next(iter(pieces), None)
        Phi, diagonal, novelty = whitened_rows(data, features, task)
        n, sums = len(data.y), {}
        C = _columns(data, task.baseline, task.center)
        is_kept = np.zeros(data.n_rows, dtype=bool)
        for name, quantity in data.quantities.items():
            points = quantity.rows if task.draws_atoms else quantity.structure
            sums[name] = draw.take(points).sum_blocks(Phi[quantity.rows], C[quantity.rows])
            is_kept[quantity.rows] = part.kept[structures[quantity.structure]]
        kept = []
        if is_kept.any():
            of_target = is_kept[:n]
            kept.append((Phi[:n][of_target], Phi[n:][is_kept[n:]], diagonal[of_target]))
        del Phi  # before the next rows are computed
        of_chunk = PartSums(sums, float(diagonal.sum()), [novelty], kept)
        total = of_chunk if total is None else total.add(of_chunk)
    assert total is not None, "parts are not empty"
    return total


def _columns(data: TrainingSet, baseline: Baseline, center: float) -> Float64Array:
    """Return the columns of sums: labels less baseline and mean, design matrix, and one.

    Derivatives of the target have neither baseline nor mean.
    """
    n, design = len(data.y), data.design(baseline.species)
    columns = np.zeros((data.n_rows, design.shape[1] + 2))
    for quantity in data.quantities.values():
        columns[quantity.rows, 0] = quantity.y
    columns[:n, 0] -= baseline.predict(design) + center
    columns[:n, 1:-1], columns[:n, -1] = design, 1.0
    return columns


def whitened_rows(
    data: TrainingSet, features: FloatArray | None, task: RowTask
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Compute the kernel rows of all quantities, not scaled by Eq. (17), and whiten them.

    Parameters
    ----------
    data : TrainingSet
    features : (n_environments, d) array or None
        Of all environments, if they were kept.
    task : RowTask

    Returns
    -------
    Phi : (N, r) array
    diagonal : (n,) array
        Of the kernel, for the rows of the target.
    novelty : (n_structures, n_sizes, 1 + S) array
        Mean novelty of the environments of each structure, and the largest of each element (zero
        without), for numbers of representatives, those of the group of the structure left out.
    """
    representation = task.representation
    X_M = task.representatives.features.astype(representation.basis_dtype, copy=False)
    basis = Basis(representation.kernel, X_M, 1.0, data.per_atom)
    same_group = _places_of_groups(task.representatives.groups, data.groups)
    n, is_label = len(data.y), isinstance(task.functions, LabelFunctions)
    # All environments that novelty is measured with, or those of nested models.
    sizes = [len(X_M)] if is_label else task.sizes
    K = np.zeros((data.n_rows, len(task.functions)))
    diagonal, species = np.empty(n), np.array(representation.species)
    novelty = np.empty((len(data.source), len(task.sizes), 1 + len(species)))
    structure = row = environment = 0
    blocks = feature_blocks(
        representation,
        data,
        n_processes=task.n_processes,
        count=task.count,
        cached=features,
    )
    for block, offsets in blocks:
        here = slice(structure, structure + len(offsets) - 1)
        each = np.empty((len(block), len(sizes)))
        rows = basis.rows(block, offsets, sizes=sizes, novelty=each, own=same_group[here])
        centers = data.center_species[environment : environment + len(block)]
        each = np.maximum(each, ROUNDING)
        novelty[here, :, 0] = structure_novelty(each, offsets)[..., 1]
        of_elements = np.where((centers[:, None] == species)[:, None], each[:, :, None], 0.0)
        novelty[here, :, 1:] = structure_novelty(of_elements, offsets)[..., 0]
        if not is_label:
            K[row : row + len(rows)] = rows
        diagonal[row : row + len(rows)] = basis.prior_variance(block, offsets)
        structure, row = here.stop, row + len(rows)
        environment += len(block)
    if isinstance(task.functions, LabelFunctions):
        _fill_label_rows(K, data, representation, task.functions)
    elif data.derivatives is not None:
        terms = kernel_terms(representation, X_M)
        fill_rows(K[:n], K[n:], list(data.frames), data.derivatives, terms)
    with few_threads(len(K), K.shape[1]):
        Phi = task.whitening.features(K, overwrite=True)
    return np.asarray(Phi, dtype=np.float64), diagonal, novelty


def _fill_label_rows(
    K: Float64Array, data: TrainingSet, representation: Representation, functions: LabelFunctions
) -> None:
    """Fill in the kernel (N, M) of all labels with functions of labels."""
    assert data.derivatives is not None
    terms, n, labels = _label_terms(representation), len(data.y), data.derivatives
    for s, (atoms, number) in enumerate(zip(data.frames, data.source.tolist(), strict=True)):
        packed = functions.labels.pop(number, None)  # and their memory is free
        if packed is None:
            packed = packed_labels(terms, atoms, labels.known[s])
        rows = functions.kernel(packed)
        K[s], K[n + labels.offsets[s] : n + labels.offsets[s + 1]] = rows[0], rows[1:]


def _places_of_groups(groups: IntArray, numbers: IntArray) -> list[IntArray]:
    """Return the places of each of some numbers (k,) among groups (n,): k arrays of int."""
    order = np.argsort(groups, kind="stable")
    first, last = (np.searchsorted(groups[order], numbers, side=s) for s in ("left", "right"))
    return [order[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


def few_threads(n_rows: int, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    return threadpool_limits(limits=1 if rank <= 500 and n_rows <= 50_000 else None)


def rows_of_task(M: int) -> int:
    """Return the number of rows over which a task sums, for M representatives."""
    return max(int(ROWS * min(M / _LARGE, 1.0)), CHUNK)


def sum_rows(
    problem: TrainingProblem,
    representation: Representation,
    representatives: Environments,
    functions: Environments | LabelFunctions,
    whitening: Whitening,
    cache: list[FloatArray],
    workers: Workers,
    stages: Stages,
) -> Rows:
    """Compute the sums over all rows, by quantity and block, and keep the rows of some structures.

    The kernel is scaled by Eq. (17), Musil et al. 2019, when its diagonal is known.

    Parameters
    ----------
    problem : TrainingProblem
    representation : Representation
    representatives : Environments
        That novelty is measured with.
    functions : Environments or LabelFunctions
        That span the model.
    whitening : Whitening
        Of their kernel.
    cache : list of arrays
        Features of consecutive parts, if they were kept; the list is emptied.
    workers : Workers
    stages : Stages
    """
    data, baseline, r = problem.data, problem.baseline, len(functions)
    # Predictions by labels take a time that does not depend on their number.
    nested = problem.size_limit and not isinstance(functions, LabelFunctions)
    sizes = [*(nested_sizes(r) if nested else []), r]
    rest = data.y - baseline.predict(data.design(data.species))
    center = float(rest.mean()) if baseline.name != "none" else 0.0
    kept = _keep_structures(problem)
    edges = np.cumsum(data.rows_of_structures)
    n_parts = math.ceil(edges[-1] / rows_of_task(r))
    starts = np.searchsorted(edges, edges[-1] * np.arange(1, n_parts) / n_parts)
    parts = [
        RowPart(
            data.take(structures),
            problem.draw.take(problem.drawn(structures)),
            kept[structures],
            _cached(cache, *data.offsets[[structures[0], structures[-1] + 1]]),
        )
        for structures in np.split(np.arange(len(data.source)), starts)
        if len(structures)
    ]
    cache.clear()  # features of a part are freed when its rows are summed
    total: PartSums | None = None
    with stages.stage("Kernel rows", data.n_environments) as advance:
        count = _counter(advance)
        task = RowTask(
            representation=representation,
            n_processes=problem.n_processes,
            representatives=representatives,
            functions=functions,
            whitening=whitening,
            sizes=sizes,
            baseline=baseline,
            center=center,
            draws_atoms=problem.draws_atoms,
            chunk=max(int(CHUNK * len(data.source) / data.n_rows), 1),
            count=None if workers.executor else count,
        )
        n_environments = [part.data.n_environments for part in parts]
        waiting = (parts.pop(0) for _ in n_environments)  # each is freed when it is done
        results = workers.map(sum_part, waiting, workers.share(task))
        for n, of_part in zip(n_environments, results, strict=True):
            total = of_part if total is None else total.add(of_part)
            if workers.executor is not None:
                count(n)
    assert total is not None, "there are structures"
    stop_workers()
    is_kept = np.flatnonzero(kept)
    return _scaled(problem, task, total, is_kept)


def _cached(features: Sequence[FloatArray], begin: int, end: int) -> list[FloatArray]:
    """Return views of the features of environments ``begin:end``; none if these are not kept."""
    first = np.cumsum([0, *map(len, features)])
    pieces = (x[max(begin - a, 0) : max(end - a, 0)] for a, x in zip(first, features, strict=False))
    return [piece for piece in pieces if len(piece)]


def nested_sizes(r: int) -> list[int]:
    """Return the numbers of representatives of the models that a model of r is compared with."""
    return [m for m in (r // 8, r // 4, r // 2) if SMALLEST <= m < r]


def _keep_structures(problem: TrainingProblem) -> BoolArray:
    """Return the structures whose rows are kept: (n,), random groups that some members lack.

    All, if members are drawn freely.
    """
    data, settings, draw = problem.data, problem.settings, problem.draw
    if settings.draw == "free":
        return np.ones(len(data.source), dtype=bool)
    lacked = (draw.counts == 0).any(axis=1) | (draw.counts.shape[1] == 0)
    if problem.draws_atoms:
        lacked = np.bincount(data.quantities[TARGET].structure, lacked) > 0
    some, kept = np.flatnonzero(lacked), np.zeros(len(data.source), dtype=bool)
    kept[some] = keep_groups(
        data.groups[some],
        data.rows_of_structures[some],
        N_KEPT,
        np.random.default_rng([settings.seed, _KEPT_STREAM]),
        [has[some] for has in data.derivatives_of_groups(data.groups)],
    )
    return kept


def _scaled(problem: TrainingProblem, task: RowTask, total: PartSums, kept: IntArray) -> Rows:
    """Return sums and kept rows for the kernel scaled by Eq. (17), Musil et al. 2019."""
    data, draw, whitening = problem.data, problem.draw, task.whitening
    scale = unit_scale(1.0, np.array([total.diagonal / len(data.y)]))
    sample = data.take(kept)
    of_target, of_others, diagonals = zip(*total.kept, strict=True)
    Phi = np.concatenate([*of_target, *of_others])
    total.kept.clear()  # there may be no memory for both
    del of_target, of_others
    Phi *= math.sqrt(scale)
    columns, groups = _columns(sample, problem.baseline, task.center), np.arange(len(Phi))
    of_points = np.empty(len(Phi), dtype=np.intp)
    for quantity in sample.quantities.values():
        of_points[quantity.rows] = kept[quantity.structure]
        if not problem.draws_atoms:
            groups[quantity.rows] = sample.groups[quantity.structure]
    if problem.draws_atoms:
        of_points = problem.drawn(kept)
    rows = {name: quantity.rows for name, quantity in sample.quantities.items()}
    sums = BlockSums.of(total.sums, draw.n_blocks)
    sums.scale(math.sqrt(scale))
    novelty = np.concatenate(total.novelty)[kept]
    return Rows(
        representatives=task.representatives,
        functions=task.functions,
        whitening=replace(whitening, factor=whitening.factor * math.sqrt(scale)),
        scale=scale,
        sums=sums,
        kept=KeptRows(Phi, columns, rows, groups, draw.take(of_points), np.ones(len(Phi))),
        sample=sample,
        center=task.center,
        k_xx=np.concatenate(diagonals) * scale,
        novelty={m: novelty[:, i] for i, m in enumerate(task.sizes)},
    )
