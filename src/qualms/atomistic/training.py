"""Training: from labelled structures to a calibrated model.

`fit` reads from top to bottom. A sparse Gaussian process needs sums over the data, and little else.
Three passes over parts of the structures compute them: the census of the labels; features, and the
farthest points within a part, among which representatives are selected; kernel rows φ and their
sums ΦᵀΦ and Φᵀy. Structures in memory are one part of the census, and their features are kept
between the passes if they fit in the memory limit; structures of files, and parts that workers
compute, are read, and their features computed, twice. That is the only difference: parts depend on
the data alone, and neither they nor the model depend on memory or workers.

Structures are divided at random into blocks, and members are trained on sets of blocks, so that
their sums are sums over blocks. Rows of some random structures are kept: on these noise variances
are selected, members are compared with the labels they have not seen, and uncertainties are
calibrated.

All quantities (energies or another target, forces, stresses) are blocks of rows of one linear
problem, with a noise variance and a calibration each.
"""

from __future__ import annotations

import datetime
import logging
import math
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

import qualms
from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline, anchors, fit_baseline, row_space, spans
from qualms.atomistic.delta import BaselinePotential, calculator_version
from qualms.atomistic.fitted import (
    Fitted,
    ProjectedVariance,
    Provenance,
    QuantityRecord,
    Record,
    describe_size,
)
from qualms.atomistic.forces import fill_rows, kernel_terms
from qualms.atomistic.kernel_rows import (
    LANDMARKS,
    Basis,
    select_representatives,
    structure_novelty,
)
from qualms.atomistic.label_checks import check_derivatives, check_noise
from qualms.atomistic.labels import TrainingSet, thinned
from qualms.atomistic.out_of_bag import (
    calibrate_quantities,
    check_labels,
    choose_centre,
    largest_std,
    left_out_errors,
    predict_out_of_bag,
)
from qualms.atomistic.parts import Census, take_census
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.atomistic.settings import Settings, parse_memory, with_representation
from qualms.atomistic.structures import FrameFiles, symbols_of
from qualms.calibration.points import CalibrationData
from qualms.errors import InputError, QualmsWarning, counted
from qualms.execution import AHEAD, Workers
from qualms.features.base import (
    BATCH,
    SERIAL,
    Problem,
    Representation,
    stop_workers,
    stream_features,
    structure_blocks,
)
from qualms.features.compression import sample_size
from qualms.features.soap_derivatives import BATCH as GRADIENTS
from qualms.gp.ensemble import (
    MIN_ABSENT,
    N_KEPT,
    FullModel,
    centred,
    draw_blocks,
    fit_full_model,
    fit_members,
    keep_groups,
    n_blocks_of,
    with_points,
)
from qualms.gp.kernels import Kernel, unit_scale
from qualms.gp.noise import group_means, typical_log
from qualms.gp.sparse_gp import Whitening, posterior_deviations, whiten
from qualms.gp.sums import BlockSums, Draw, KeptRows, RowSums, sums_size
from qualms.progress import Stages
from qualms.resources import limited

log = logging.getLogger(__name__)

#: Share of the training structures that would not count as extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Streams of random numbers: the sample that a compression is fitted to, the selection of
#: representatives, posterior members, blocks, and rows that are kept.
_SAMPLE_STREAM, _SELECTION_STREAM, _POSTERIOR_STREAM, _BLOCK_STREAM, _KEPT_STREAM = 1, 3, 4, 7, 8
#: Bytes of the features of a part from which representatives are selected, at least.
_PART = 4e8
#: Rows whose sums are computed in a task, with so many representatives or more, and at a time in
#: it: sending the sums takes much less time than computing them.
_ROWS, _LARGE, _CHUNK = 16_384, 5000, 4096
#: Most representatives that are chosen, by effort, and how many for each label: on 300 molecules of
#: QM9 1500 and 3000 differ by 0.5 %.
_MOST, _PER_LABEL = {"fast": 1000, "default": 3000, "best": 10_000}, 5
#: The smallest number that is chosen, and of a nested model: with fewer, hardly any time is saved.
_SMALLEST = 250
#: Multiplications that leaving rows out of models of several sizes may take. Twice the
#: representatives must lower errors by this share at least, for each effort: predictions take twice
#: the time, and the ratio of two errors of some thousand rows is uncertain by a few per cent.
_PRODUCTS_OF_SIZES, _GAIN = 1e11, {"fast": 0.05, "default": 0.05, "best": 0.0}
#: Features are float32, or with forces float64: see `qualms.gp.sparse_gp.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: Representatives and rows up to which matrices are small, and one thread is the fastest.
_SMALL, _FEW = 500, 50_000
#: Representatives of the model that tells whether forces are derivatives of the energies.
_CHECKED = 1000
_PACKAGES = ("numpy", "scipy", "ase", "dscribe", "featomic", "safetensors")


def fit(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = None,
    *,
    workers: Workers | None = None,
    threads: int = 1,
    stages: Stages | None = None,
    reference: BaselinePotential | None = None,
    skip_failed: bool = False,
) -> Fitted:
    """Train a model on labelled structures and calibrate it on out-of-bag points.

    Parameters
    ----------
    frames : sequence of Atoms
        In memory, or in files that are read part by part.
    settings : Settings
    groups : sequence or str, optional
        Labels of structures that are in or out of a subsample together, or their key in
        ``atoms.info``.
    workers : Workers, optional
        Compute parts; by default this process.
    threads : int
        Cores of this process.
    stages : Stages, optional
        Shows the progress.
    reference : BaselinePotential, optional
        The model learns the differences of the labels from it.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    """
    stages, workers = stages or Stages(), workers or Workers(threads=threads)
    workers.check(frames.paths if isinstance(frames, FrameFiles) else ())
    with limited(threads):
        census = take_census(
            frames,
            settings,
            groups,
            workers=workers,
            stages=stages,
            reference=reference,
            skip_failed=skip_failed,
        )
        problem = resolve(settings, census, workers, threads)
        draw, baseline = draw_members(problem)
        features = fit_features(problem, workers, stages)
        points = select_points(problem, features, workers, stages)
        rows = sum_rows(problem, features, points, draw, baseline, workers, stages)
        model = fit_nested(rows, problem, stages)
        ensemble = fit_ensemble(model, problem, baseline, stages)
        return calibrate(ensemble, problem, features.representation, stages)


# --- what is open before the census, and the draw of members --------------------------------------


@dataclass(frozen=True)
class TrainingProblem:
    """A training set, and settings in which nothing is open."""

    settings: Settings
    data: TrainingSet
    census: Census
    n_given: int | str  #: number of representatives in the settings that were given
    preset: str  #: the representation, if it was chosen, and why
    size_limit: str  #: what limits the number of representatives, if it is chosen
    cached: bool  #: whether features are kept between the passes
    n_processes: int  #: processes that compute features

    @property
    def rows(self) -> IntArray:
        """Structure of each row of the target, or its place, if atoms are drawn: (N,)."""
        structure = self.data.quantities[TARGET].structure
        return np.arange(len(structure)) if self.draws_atoms else structure

    @property
    def draws_atoms(self) -> bool:
        """Whether members are made of atoms rather than of structures."""
        return self.settings.resample == "atoms"


def resolve(settings: Settings, census: Census, workers: Workers, threads: int) -> TrainingProblem:
    """Choose everything that is open: representation, forces, baseline, size, and memory."""
    data, limit = census.data, parse_memory(settings.memory)
    update: dict[str, Any] = {"memory": None, "threads": None}
    if settings.per_atom and settings.species is None:
        update["species"] = tuple(np.unique(data.center_species).tolist())
    settings, preset = with_representation(
        settings.model_copy(update=update), data.species, periodic=census.is_periodic
    )
    if preset:
        log.info(f"Representation: {preset}.")
    if settings.force_atoms == "auto" and settings.forces is not None:
        n = settings.features.n_moving(data.sizes, settings.effort)
        settings = settings.model_copy(update={"force_atoms": n or "all"})
    if isinstance(settings.force_atoms, int):
        data = thinned(data, settings.force_atoms, settings.seed)
    settings = _with_baseline(settings, data, census.isolated)
    given, size_limit = settings.n_representatives, ""
    if settings.n_representatives == "auto":
        n, size_limit = _largest_size(settings, data, limit)
        settings = settings.model_copy(update={"n_representatives": n})
    may_cache, n_processes = workers.executor is None, threads if workers.executor is None else 1
    while n_processes > 1 and memory_needed(settings, data, n_processes).together > limit:
        n_processes //= 2
    kept = memory_needed(settings, data, n_processes, cached=True).together
    problem = TrainingProblem(
        settings=settings,
        data=data,
        census=census,
        n_given=given,
        preset=preset,
        size_limit=size_limit,
        cached=may_cache and kept <= limit,
        n_processes=n_processes,
    )
    _announce(problem, workers, limit)
    return problem


def _with_baseline(
    settings: Settings, data: TrainingSet, isolated: Mapping[int, float]
) -> Settings:
    """Use isolated atoms if the compositions do not determine the energies of all elements."""
    species = data.species
    if settings.linear_baseline != "composition" or settings.per_atom:
        return settings
    if len(row_space(data.design(species))) == len(species):
        return settings
    if settings.kind == "extensive" and {*species} <= {*isolated}:
        log.info("Baseline: energies of isolated atoms, since compositions do not determine them.")
        reference = settings.reference
        atoms = "atoms" if reference is None else reference.model_copy(update={"then": "atoms"})
        return settings.model_copy(update={"baseline": atoms})
    _warn(
        f"The training set has too few compositions to determine {settings.target!r} of each of "
        f"{symbols_of(species)}. Other compositions are rejected in predictions; add them, or "
        "isolated atoms (config_type=isolated_atom)."
    )
    return settings


def _largest_size(settings: Settings, data: TrainingSet, memory: float) -> tuple[int, str]:
    """Return the number of representatives that effort, labels and memory allow, and the limit."""
    limits = {
        "the number of environments": data.n_environments,
        "the number of labels": max(_PER_LABEL * data.n_rows, _SMALLEST),
        "effort": _MOST[settings.effort],
    }
    limit = min(limits, key=limits.__getitem__)
    n = limits[limit]
    while n > _SMALLEST:
        tried = settings.model_copy(update={"n_representatives": n})
        # That of one process, so that the number does not depend on workers.
        if memory_needed(tried, data).together <= memory:
            break
        n, limit = max(n // 2, _SMALLEST), "the memory"
    return n, limit


def draw_members(problem: TrainingProblem) -> tuple[Draw, Baseline]:
    """Draw the members, and fit their baselines; reject data that are too few.

    Structures of a group are drawn together. A member that lacks an element, and so does not
    determine its baseline, gets the few groups that do.
    """
    settings, data, rows = problem.settings, problem.data, problem.rows
    groups = np.arange(len(rows)) if problem.draws_atoms else data.groups
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if problem.draws_atoms else "different labelled structures"
        grouped = len(data.source) > 1 and not problem.draws_atoms
        name, what = ("groups", "groups of structures") if grouped else ("frames", what)
        raise InputError(
            f"There are fewer than 2 {what}, from which subsamples are drawn.", parameter=name
        )
    kinds = None
    if settings.learns_forces:
        kinds = sum(2**k * has for k, has in enumerate(_has_derivatives(data, groups)))
    draw = draw_blocks(
        groups,
        np.random.default_rng([settings.seed, _BLOCK_STREAM]),
        n_members=settings.n_subsampled,
        subsample=settings.subsample,
        replace=settings.replace,
        free=settings.draw == "free",
        n_rows=data.n_rows,
        kinds=kinds,
    )
    design = data.design(data.species)
    lacking = ~spans(design, draw.counts[rows])
    anchored = settings.linear_baseline == "composition" and bool(lacking.any())
    if anchored:
        draw = with_points(draw, np.isin(groups, groups[rows[anchors(design)]]), lacking)
    _check_out_of_bag(settings, draw.counts, anchored=anchored)
    baseline = fit_baseline(
        settings.linear_baseline,
        design,
        data.y,
        species=data.species,
        kind=settings.kind,
        counts=draw.counts[rows],
        isolated=problem.census.isolated,
    )
    return draw, baseline


def _has_derivatives(data: TrainingSet, groups: IntArray) -> list[IntArray]:
    """Return whether the group of each structure has labels of each derivative: (n,) arrays."""
    found = []
    codes = np.unique(groups, return_inverse=True)[1]
    for name in DERIVATIVES:
        has = np.zeros(int(codes.max()) + 1, dtype=np.intp)
        if name in data.quantities:
            has[codes[data.quantities[name].structure]] = 1
        found.append(has[codes])
    return found


def _check_out_of_bag(settings: Settings, counts: IntArray, *, anchored: bool) -> None:
    """Reject members, with counts (n, N_R) of each point, that leave nothing to calibrate on.

    Members are anchored if those that lack an element have the points that determine it.
    """
    enough = (counts == 0).sum(axis=1) >= MIN_ABSENT
    if not settings.n_subsampled or settings.calibration == "none" or enough.any():
        return
    if anchored:
        raise InputError(
            "`baseline='composition'` needs more different structures (or groups): members that "
            "lack an element get the structures that determine it, and none remains to calibrate "
            "on. Use more structures, or `baseline='mean'`.",
            parameter="baseline",
        )
    raise InputError(
        f"Subsamples of {settings.subsample} leave none of the {len(counts)} rows out of at least "
        f"{MIN_ABSENT} of {settings.n_members} members, so that there is nothing to calibrate on. "
        "Use a smaller `subsample`, a larger `n_members`, more structures, or "
        "`calibration='none'`.",
        parameter="subsample",
    )


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)


# --- memory ---------------------------------------------------------------------------------------


class MemoryNeeded(NamedTuple):
    """Bytes of the process that trains the model, of each worker, and of both in one process."""

    driver: float
    worker: float
    together: float


def memory_needed(
    settings: Settings, data: TrainingSet, n_workers: int = 1, *, cached: bool = False
) -> MemoryNeeded:
    """Return the memory of a training, by the largest arrays of its stages.

    0.5 GB is for the interpreter and libraries, 0.25 GB for those of each process that computes
    features.
    """
    n, M = data.n_environments, min(settings.n_selected, data.n_environments)
    d, d_raw = n_features(settings, data)
    size, square = settings.features.itemsize, 8.0 * M**2
    free = settings.draw == "free"
    n_blocks = n_blocks_of(settings.n_subsampled, data.n_rows, free=free)
    sums = sum(n_blocks * sums_size(len(q.y) / n_blocks, M) for q in data.quantities.values())
    n_rows = min(data.n_rows, N_KEPT + int(data.rows_of_structures.max()))
    n_rows = data.n_rows if free else n_rows
    kept = 8.0 * n_rows * M
    environments = min(part_size(settings, data), n)
    n_parts = -(-n // environments)
    base = 0.5e9 + settings.features.overhead
    base += (400.0 + 16.0 * len(data.species) + 24.0 * settings.n_members) * len(data.source)
    base += 4e3 * len(data.source) if isinstance(data.frames, list) else 0.0
    picking = size * M * d + 100e6
    if settings.selection == "cur":
        landmarks = min(LANDMARKS * M, n)
        picking += 48.0 * landmarks**2 + 12.0 * landmarks * d
    joining = 2.2 * size * d * M * n_parts if n_parts > 1 else 0.0
    compressing = 12.0 * sample_size(n) * d_raw + 24.0 * d_raw**2 if d < d_raw else 0.0
    processes = n_workers if n >= SERIAL else 1
    batch = 20.0 * min(BATCH, n) * d_raw + 8.0 * processes * min(BATCH, n) * d
    if processes > 1:
        batch += processes * (0.25e9 + 12.0 * min(BATCH, n) * d_raw)
    chunk = min(_CHUNK, data.n_rows)
    products = 12.0 * BATCH * M + 16.0 * chunk * M + 12.0 * M * d
    if settings.learns_forces:
        products += 48.0 * GRADIENTS * 30 * (d_raw + M)  # derivatives by some 30 neighbours
    summing = products + 3.0 * square * len(data.quantities)
    selecting = 1.2 * size * environments * d + picking
    solving = sums + 5 * square + 2 * kept
    n_tasks = data.n_rows // rows_of_task(M) + 1
    waiting = (min(AHEAD * n_workers, n_tasks) + 1) * len(data.quantities) * square
    features = size * n * d if cached else 0.0
    one = max(
        compressing,
        batch + (features + picking if cached and n_parts == 1 else features + selecting),
        features + joining + picking + 3 * square,
        2 * features + square,  # sorted by block, and freed block by block as sums grow
        max(features, sums) + kept + summing + (0.0 if cached else batch),
        solving,
    )
    return MemoryNeeded(
        driver=base + max(joining + picking + 3 * square, solving, sums + kept + waiting),
        worker=base + batch + max(selecting, summing),
        together=base + one,
    )


def _announce(problem: TrainingProblem, workers: Workers, limit: float) -> None:
    """Log the memory that is needed; reject a training for which it does not suffice."""
    settings, data, n = problem.settings, problem.data, problem.n_processes
    needed = memory_needed(settings, data, n, cached=problem.cached)
    total, workers_text = needed.together, ""
    if workers.executor is not None:
        total = memory_needed(settings, data, workers.number).driver
        each = counted(workers.number, "worker")
        workers_text = f", and {format_size(needed.worker)} for each of {each}"
    how = "kept" if problem.cached else "computed twice"
    log.info(
        f"{data.n_environments:,} environments × {n_features(settings, data)[0]:,} features "
        f"({how}), {data.n_rows:,} labels, {settings.n_selected:,} representatives: about "
        f"{format_size(total)} of memory (limit {format_size(limit)}){workers_text}."
    )
    if total > limit:
        raise InputError(
            f"The training needs at least {format_size(1.01 * total)} of memory; the limit is "
            f"{format_size(limit)}. Raise `memory`, or use a smaller `n_representatives` or "
            "`uncertainty='posterior'`.",
            parameter="memory",
        )
    if workers.memory is not None and needed.worker > workers.memory:
        _warn(
            f"A worker needs about {format_size(needed.worker)}, and Dask's memory_limit of one is "
            f"{format_size(workers.memory)}. Use fewer workers with more memory each."
        )


def format_size(n: float) -> str:
    """Return a number of bytes as text."""
    if n < 1e6:
        return f"{n:.0f} bytes"
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def n_features(settings: Settings, data: TrainingSet) -> tuple[int, int]:
    """Return the numbers of features after and before compression."""
    return settings.features.n_features(data.species, _problem(settings, data))


def _problem(settings: Settings, data: TrainingSet) -> Problem:
    return Problem(min(settings.n_selected, data.n_environments), settings.has_forces)


# --- features and representatives -----------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """The representation, and the features of a training set if they are kept."""

    representation: Representation
    n_processes: int
    count: Callable[[int], object]  #: is called with numbers of environments that are done
    cache: list[FloatArray] = field(default_factory=list)  #: of consecutive parts: (n, d) each

    def blocks(
        self, part: TrainingSet, cached: FloatArray | None = None
    ) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins."""
        if cached is None:
            self.representation.prepare()  # rejects a worker with other weights of a network
            pairs, n = part.environments_of_frames, self.n_processes
            for batch in stream_features(self.representation, pairs, n_workers=n):
                yield batch.features, batch.offsets
                self.count(len(batch.features))
            return
        for first, last in structure_blocks(part.offsets):
            edges = part.offsets[first : last + 1]
            yield cached[edges[0] : edges[-1]], edges - edges[0]
            self.count(int(edges[-1] - edges[0]))

    def array(self, part: TrainingSet) -> FloatArray:
        """Return the features of all environments of a part: (n, d)."""
        shape = part.n_environments, self.representation.n_features
        X, done = np.empty(shape, dtype=self.representation.dtype), 0
        for block, _ in self.blocks(part):
            X[done : done + len(block)] = block
            done += len(block)
        return X

    def shared(self, workers: Workers) -> Any:
        """Share the features with workers, without the cache and the progress of this process."""
        if workers.executor is None:
            return self
        return workers.share(replace(self, cache=[], count=_count_nothing))


def _count_nothing(n: int) -> None:
    """Ignore a number of environments: this process shows no progress."""


def _counter(advance: Callable[[int], object]) -> Callable[[int], None]:
    """Return a function that adds up what it is called with, and shows the sum."""
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        advance(done)

    return count


def fit_features(problem: TrainingProblem, workers: Workers, stages: Stages) -> Features:
    """Return the representation, with what is fitted to random structures."""
    settings, data = problem.settings, problem.data

    def sample() -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        rng = np.random.default_rng([settings.seed, _SAMPLE_STREAM])
        pairs = data.take(random_sample(data, rng)).environments_of_frames
        frames, centers = zip(*pairs, strict=True)
        return frames, centers

    with stages.stage("Compression"):
        representation = settings.features.fit(data.species, _problem(settings, data), sample)
    return Features(representation, problem.n_processes, _count_nothing)


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


@dataclass(frozen=True)
class Environments:
    """Environments to select representatives from, or those selected."""

    origins: IntArray  #: (n, 2): structure, as given to `fit`, and atom
    groups: IntArray  #: (n,): group of the structure
    features: FloatArray  #: (n, d)

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


@dataclass(frozen=True)
class Representatives:
    """Representative environments, in the order of the pivots, and their whitening."""

    environments: Environments
    whitening: Whitening

    def __len__(self) -> int:
        return len(self.environments.origins)

    def leading(self, r: int) -> Representatives:
        """Return the first r representatives: the factor of the whitening is triangular."""
        return Representatives(self.environments.take(np.arange(r)), self.whitening.leading(r))


def part_size(settings: Settings, data: TrainingSet) -> int:
    """Return environments of a part from which representatives are selected.

    Few parts have many features in memory, many parts many candidates: √(nM) is the best for both.
    """
    M, width = settings.n_selected, settings.features.itemsize * n_features(settings, data)[0]
    return max(int(math.sqrt(data.n_environments * M)), 2 * M, int(_PART / width))


def select_points(
    problem: TrainingProblem, features: Features, workers: Workers, stages: Stages
) -> Representatives:
    """Select representatives: within parts, and then among those of all parts.

    For farthest points, both steps leave every environment within twice the optimal covering radius
    of a pick, as the plain algorithm does; together, at most twice as far. Features are kept, if
    they fit in the memory.
    """
    settings, data = problem.settings, problem.data
    ranges = list(structure_blocks(data.offsets, part_size(settings, data)))
    parts = [data.take(np.arange(first, last)) for first, last in ranges]
    alone = len(parts) == 1
    found = []
    with stages.stage("Features", data.n_environments) as advance:
        count = _counter(advance)
        task = replace(features, count=count).shared(workers)
        for part, (some, X) in zip(
            parts,
            workers.map(candidates, parts, settings, task, alone, problem.cached),
            strict=True,
        ):
            found.append(some)
            if problem.cached and X is not None:
                features.cache.append(X)
            if workers.executor is not None:
                count(part.n_environments)
    if not problem.cached:
        stop_workers()  # and free their memory
    rng = np.random.default_rng([settings.seed, _SELECTION_STREAM])
    return whitened_points(Environments.join(found), features, settings, rng, stages)


def candidates(
    part: TrainingSet, settings: Settings, features: Features, alone: bool, keep: bool
) -> tuple[Environments, FloatArray | None]:
    """Return candidates of a part: representatives selected in it, or all if there are no others.

    Features of all environments are returned as well, if they are to be kept.
    """
    X = features.array(part)
    atoms = np.concatenate(part.all_centers)
    origins = np.stack([np.repeat(part.source, part.environments), atoms], 1)
    groups = np.repeat(part.groups, part.environments)
    found = Environments(origins.astype(np.int64), groups, X)
    if not alone:
        if settings.selection == "cur":  # selects among farthest points
            more = {"selection": "fps", "n_representatives": LANDMARKS * settings.n_selected}
            settings = settings.model_copy(update=more)
        rng = np.random.default_rng([settings.seed, _SELECTION_STREAM, int(part.source[0])])
        kernel = features.representation.kernel
        found = found.take(select_representatives(X, kernel, settings, rng))
    return found, X if keep else None


def whitened_points(
    found: Environments,
    features: Features,
    settings: Settings,
    rng: np.random.Generator,
    stages: Stages,
) -> Representatives:
    """Select representatives among candidates, and drop those that others describe to rounding."""
    kernel: Kernel = features.representation.kernel
    n = min(settings.n_selected, len(found.features))
    with stages.stage("Representatives", n) as advance:
        found = found.take(select_representatives(found.features, kernel, settings, rng, advance))
    # Among environments that are equally far apart, rounding may choose the order of selection.
    found = found.take(np.lexsort(found.origins.T[::-1]))
    with stages.stage("Whitening"):
        exact = found.features.astype(np.float64)
        rtol = _RTOL_OF_FORCES if settings.learns_forces else _RTOL
        whitening = whiten(np.asarray(kernel(exact, exact)), rtol=rtol)
    return Representatives(found.take(whitening.pivots), whitening)


# --- sums over kernel rows, and rows that are kept ------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Sums over the rows of all quantities, and the rows that are kept."""

    points: Representatives  #: for the kernel scaled by Eq. (17), Musil et al. 2019
    scale: float  #: the factor of the kernel
    sums: BlockSums
    kept: KeptRows
    sample: TrainingSet  #: structures whose rows are kept
    of_points: IntArray  #: (N,): structure, or atom, among all that are drawn, of each kept row
    center: float  #: mean of the target less the baseline
    k_xx: Float64Array  #: (n,): diagonal of the scaled kernel, of kept rows of the target
    #: largest and mean novelty of the environments of a structure that few structures exceed, for
    #: numbers of representatives
    novelty: dict[int, tuple[float, float]]

    def leading(self, r: int) -> Rows:
        """Return the rows of the model that has the first r representatives alone."""
        if r == len(self.points):
            return self
        parts = {name: getattr(self, name).leading(r) for name in ("points", "sums", "kept")}
        return replace(self, **parts)

    def with_draw(self, draw: Draw) -> Rows:
        """Return a copy with other members."""
        return replace(self, kept=replace(self.kept, draw=draw.take(self.of_points)))


@dataclass(frozen=True)
class RowTask:
    """What the tasks of the last pass need to know."""

    features: Features
    points: Representatives
    sizes: list[int]  #: numbers of representatives that novelty is computed for
    species: list[int]
    baseline: Float64Array  #: (S,): coefficients of the full model
    center: float
    draws_atoms: bool
    chunk: int  #: structures whose rows are computed at a time


@dataclass(frozen=True)
class RowPart:
    """Structures whose rows are computed, with their draw and, perhaps, their features."""

    data: TrainingSet
    draw: Draw  #: of structures, or of atoms
    kept: BoolArray  #: (n,): whether the rows of a structure are kept
    features: FloatArray | None


@dataclass(frozen=True)
class PartSums:
    """Sums over the rows of a part, not scaled by Eq. (17), and the rows that are kept."""

    sums: dict[str, dict[int, RowSums]]  #: by quantity and block
    diagonal: float  #: sum of the diagonal of the kernel, over the rows of the target
    novelty: list[Float64Array]  #: (n_structures, n_sizes, 2): of several chunks
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
    data, n = part.data, len(part.data.source)
    for first in range(0, n, task.chunk):
        some = np.arange(first, min(first + task.chunk, n))
        features = part.features
        if features is not None:
            features = features[data.offsets[some[0]] : data.offsets[some[-1] + 1]]
        points = some
        if task.draws_atoms:
            points = np.arange(data.offsets[some[0]], data.offsets[some[-1] + 1])
        chunk = RowPart(data.take(some), part.draw.take(points), part.kept[some], features)
        found = _sum_chunk(chunk, task)
        total = found if total is None else total.add(found)
    assert total is not None, "parts are not empty"
    return total


def _sum_chunk(part: RowPart, task: RowTask) -> PartSums:
    data = part.data
    Phi, diagonal, novelty = whitened_rows(part, task)
    n, sums = len(data.y), {}
    C = _columns(data, task.species, task.baseline, task.center)
    for name, quantity in data.quantities.items():
        points = quantity.rows if task.draws_atoms else quantity.structure
        sums[name] = part.draw.take(points).sum_blocks(Phi[quantity.rows], C[quantity.rows])
    kept = []
    if part.kept.any():
        chosen = np.zeros(data.n_rows, dtype=bool)
        for quantity in data.quantities.values():
            chosen[quantity.rows] = part.kept[quantity.structure]
        of_target = chosen[:n]
        kept.append((Phi[:n][of_target], Phi[n:][chosen[n:]], diagonal[of_target]))
    return PartSums(sums, float(diagonal.sum()), [novelty], kept)


def _columns(
    data: TrainingSet, species: Sequence[int], baseline: Float64Array, center: float
) -> Float64Array:
    """Return the columns of sums: labels less baseline and mean, design matrix, and one.

    Derivatives of the target have neither baseline nor mean.
    """
    n, design = len(data.y), data.design(species)
    columns = np.zeros((data.n_rows, design.shape[1] + 2))
    for quantity in data.quantities.values():
        columns[quantity.rows, 0] = quantity.y
    columns[:n, 0] -= design @ baseline + center
    columns[:n, 1:-1], columns[:n, -1] = design, 1.0
    return columns


class WhitenedRows(NamedTuple):
    """Rows of all quantities (N, r) for the kernel as it is, not scaled by Eq. (17)."""

    Phi: Float64Array
    diagonal: Float64Array  #: (n,): of the kernel, for the rows of the target
    #: (n_structures, n_sizes, 2): largest and mean novelty of the environments of each structure
    novelty: Float64Array


def whitened_rows(part: RowPart, task: RowTask) -> WhitenedRows:
    """Compute the kernel rows of all quantities, and whiten them."""
    data, representation, found = part.data, task.features.representation, task.points.environments
    X_M = found.features.astype(representation.basis_dtype, copy=False)
    basis = Basis(representation.kernel, X_M, 1.0, data.per_atom)
    own = _own_representatives(data.groups, found.groups)
    n, sizes = len(data.y), task.sizes
    K = np.zeros((data.n_rows, len(X_M)))
    diagonal, novelty = np.empty(n), np.empty((len(data.source), len(sizes), 2))
    structure = row = 0
    for block, offsets in task.features.blocks(data, part.features):
        here = slice(structure, structure + len(offsets) - 1)
        each = np.empty((len(block), len(sizes)))
        rows = basis.rows(block, offsets, sizes=sizes, novelty=each, own=own[here])
        novelty[here] = structure_novelty(each, offsets)
        K[row : row + len(rows)] = rows
        diagonal[row : row + len(rows)] = basis.prior_variance(block, offsets)
        structure, row = here.stop, row + len(rows)
    if data.derivatives is not None:
        terms = kernel_terms(representation, X_M)
        fill_rows(K[:n], K[n:], list(data.frames), data.derivatives, terms)
    with _few_threads(len(K), len(X_M)):
        whitening = task.points.whitening
        Phi = np.asarray(whitening.features(K, overwrite=True), dtype=np.float64)
    return WhitenedRows(Phi, diagonal, novelty)


def _own_representatives(groups: IntArray, of_points: IntArray) -> list[IntArray]:
    """Return the representatives that come from the group of each structure."""
    order = np.argsort(of_points, kind="stable")
    first, last = (np.searchsorted(of_points[order], groups, side=s) for s in ("left", "right"))
    return [order[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


def _few_threads(n_rows: int, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    return threadpool_limits(limits=1 if rank <= _SMALL and n_rows <= _FEW else None)


def rows_of_task(M: int) -> int:
    """Return the number of rows over which a task sums, for M representatives."""
    return max(int(_ROWS * min(M / _LARGE, 1.0)), _CHUNK)


def sum_rows(
    problem: TrainingProblem,
    features: Features,
    points: Representatives,
    draw: Draw,
    baseline: Baseline,
    workers: Workers,
    stages: Stages,
) -> Rows:
    """Compute the sums over all rows, by quantity and block, and keep the rows of some structures.

    The kernel is scaled by Eq. (17), Musil et al. 2019, when its diagonal is known.
    """
    settings, data, r = problem.settings, problem.data, len(points)
    sizes = [*(nested_sizes(r) if problem.size_limit else []), r]
    rest = data.y - baseline.predict(data.design(data.species))
    center = float(rest.mean()) if settings.linear_baseline != "none" else 0.0
    per_structure = data.n_rows / len(data.source)
    kept = _keep_structures(problem, draw)
    order = np.arange(len(data.source))
    if not problem.draws_atoms:  # blocks follow each other, so that a part has few of them
        order = np.argsort(draw.block, kind="stable")
    edges = np.cumsum(data.rows_of_structures[order])
    n_parts = math.ceil(edges[-1] / rows_of_task(r))
    pieces = np.split(order, np.searchsorted(edges, edges[-1] * np.arange(1, n_parts) / n_parts))
    cache = _Cache(data, features.cache)
    parts = [
        RowPart(data.take(some), draw.take(_points_of(problem, some)), kept[some], cache.take(some))
        for some in pieces
        if len(some)
    ]
    features.cache.clear()  # those of a part are freed when its rows are summed
    del cache
    total: PartSums | None = None
    with stages.stage("Kernel rows", data.n_environments) as advance:
        count = _counter(advance)
        task = RowTask(
            features=replace(features, cache=[], count=count),
            points=points,
            sizes=sizes,
            species=data.species,
            baseline=baseline.full,
            center=center,
            draws_atoms=problem.draws_atoms,
            chunk=max(int(_CHUNK / per_structure), 1),
        )
        shared: Any = task
        if workers.executor is not None:
            remote = replace(task.features, count=_count_nothing)
            shared = workers.share(replace(task, features=remote))
        waiting, n_environments = iter(parts), iter([p.data.n_environments for p in parts])
        del parts
        for found in workers.map(sum_part, waiting, shared):
            total = found if total is None else total.add(found)
            if workers.executor is not None:
                count(next(n_environments))
    assert total is not None, "there are structures"
    stop_workers()
    return _scaled(problem, points, draw, baseline, total, order[kept[order]], center, sizes)


class _Cache:
    """Features of structures, in one array for each of several consecutive parts."""

    def __init__(self, data: TrainingSet, parts: Sequence[FloatArray]) -> None:
        self._data, self._parts = data, parts
        self._first = np.cumsum([0, *map(len, parts)])

    def take(self, structures: IntArray) -> FloatArray | None:
        """Return the features of some structures (n, d), if they are kept."""
        if not self._parts:
            return None
        offsets = self._data.offsets
        part = np.searchsorted(self._first, offsets[structures], side="right") - 1
        part = np.minimum(part, len(self._parts) - 1)
        pieces = [
            self._parts[p][offsets[s] - self._first[p] : offsets[s + 1] - self._first[p]]
            for s, p in zip(structures, part, strict=True)
        ]
        return np.concatenate(pieces)


def _points_of(problem: TrainingProblem, structures: IntArray) -> IntArray:
    """Return the points of the draw, structures or atoms, of some structures."""
    if not problem.draws_atoms:
        return structures
    offsets = problem.data.offsets
    return np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in structures])


def nested_sizes(r: int) -> list[int]:
    """Return the numbers of representatives of the models that a model of r is compared with."""
    return [m for m in (r // 8, r // 4, r // 2) if _SMALLEST <= m < r]


def _keep_structures(problem: TrainingProblem, draw: Draw) -> BoolArray:
    """Return the structures whose rows are kept: (n,), random groups that some members lack.

    All, if members are drawn freely.
    """
    data, settings = problem.data, problem.settings
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
        [has[some] > 0 for has in _has_derivatives(data, data.groups)],
    )
    return kept


def _scaled(
    problem: TrainingProblem,
    points: Representatives,
    draw: Draw,
    baseline: Baseline,
    total: PartSums,
    kept: IntArray,
    center: float,
    sizes: Sequence[int],
) -> Rows:
    """Return sums and kept rows for the kernel scaled by Eq. (17), Musil et al. 2019."""
    data = problem.data
    scale = unit_scale(1.0, np.array([total.diagonal / len(data.y)]))
    sample = data.take(kept)
    of_target, of_others, diagonals = zip(*total.kept, strict=True)
    Phi = np.concatenate([*of_target, *of_others])
    total.kept.clear()  # there may be no memory for both
    del of_target, of_others
    Phi *= math.sqrt(scale)
    columns, groups = _columns(sample, data.species, baseline.full, center), np.arange(len(Phi))
    of_points = np.empty(len(Phi), dtype=np.intp)
    for quantity in sample.quantities.values():
        of_points[quantity.rows] = kept[quantity.structure]
        if not problem.draws_atoms:
            groups[quantity.rows] = sample.groups[quantity.structure]
    if problem.draws_atoms:
        of_points = _points_of(problem, kept)
    rows = {name: quantity.rows for name, quantity in sample.quantities.items()}
    sums = BlockSums.of(total.sums, draw.n_blocks)
    sums.scale(math.sqrt(scale))
    whitening = points.whitening
    factor = whitening.factor * math.sqrt(scale)
    novelty = np.quantile(np.concatenate(total.novelty), _NOT_NOVEL, axis=0)
    return Rows(
        points=replace(points, whitening=replace(whitening, factor=factor)),
        scale=scale,
        sums=sums,
        kept=KeptRows(Phi, columns, rows, groups, draw.take(of_points), np.ones(len(Phi))),
        sample=sample,
        of_points=of_points,
        center=center,
        k_xx=np.concatenate(diagonals) * scale,
        novelty={m: (float(a), float(b)) for m, (a, b) in zip(sizes, novelty, strict=True)},
    )


# --- the sparse Gaussian process ------------------------------------------------------------------


@dataclass(frozen=True)
class SparseModel:
    """The full model of all rows."""

    rows: Rows
    full: FullModel
    size_curve: dict[int, float] = field(default_factory=dict)  #: out-of-bag error for numbers

    @property
    def scale(self) -> float:
        """Square root of the prior variance."""
        return float(self.full.scale[0])


def fit_sparse_model(rows: Rows, problem: TrainingProblem, stages: Stages) -> SparseModel:
    """Select the noise variance of each quantity and solve the full model.

    The prior variance of the weights gives the target its variance, Eq. (17), Musil et al. 2019; or
    forces and virials theirs, if they are learned.
    """
    settings, quantities, kept = problem.settings, rows.sample.quantities, rows.kept
    with stages.stage("Full model"), _few_threads(problem.data.n_rows, len(rows.points)):
        wrong = set(quantities)
        if len(quantities) > 1:
            energies = kept.y[kept.rows[TARGET], 0]
            wrong = check_derivatives(kept.Phi[:, :_CHECKED], energies, rows.sample, settings)
        noise = {name: getattr(settings, KINDS[name].noise) for name in rows.sums.sums}
        full = fit_full_model(kept, rows.sums, noise, mean=np.array([rows.center]))
    if not wrong:  # or there are no derivatives
        free = [n for n in noise if KINDS[n].is_derivative and isinstance(noise[n], str)]
        check_noise({name: full.noise[name] for name in free}, rows.sample, settings)
    return SparseModel(rows, full)


def fit_nested(rows: Rows, problem: TrainingProblem, stages: Stages) -> SparseModel:
    """Fit the full model; choose the number of representatives, if it is to be chosen.

    The models of the leading half, quarter and eighth of the representatives are fitted as well.
    From the largest on, the number is halved as long as that raises the typical error of groups
    that are left out by less than `_GAIN` of the effort; the error is that of the quantity with
    most labels.
    """
    settings, quantities = problem.settings, problem.data.quantities
    model = chosen = fit_sparse_model(rows, problem, stages)
    r = len(rows.points)
    if len(rows.novelty) == 1:
        return model
    name = max(quantities, key=lambda name: len(quantities[name].y))
    n_left_out = max(_PRODUCTS_OF_SIZES / r**2, 1000)

    def error(model: SparseModel) -> float:
        z, groups = left_out_errors(model, name, n_left_out)
        means = group_means(np.abs(z), groups)
        return math.exp(typical_log(means)) / 4  # of equal errors: these

    curve, enough = {r: error(model)}, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what concerns the data was said before
        for size in sorted(rows.novelty, reverse=True)[1:]:
            model = fit_sparse_model(rows.leading(size), problem, stages)
            of_double, curve[size] = curve[min(curve)], error(model)
            enough = enough and of_double > (1 - _GAIN[settings.effort]) * curve[size]
            chosen = model if enough else chosen
    curve = dict(sorted(curve.items()))
    limit = _size_limit(problem, r)
    text = describe_size(len(chosen.rows.points), curve, limit, settings, name)
    log.info(f"Representatives: {text}.")
    return replace(chosen, size_curve=curve)


def _size_limit(problem: TrainingProblem, r: int) -> str:
    """Return the limit of the number of representatives that is chosen."""
    if problem.size_limit and r < 0.9 * problem.settings.n_selected:  # many were dropped
        return "their linear dependence"
    return problem.size_limit


# --- the ensemble and its calibration -------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble:
    """The full model, and the members that are trained on subsamples."""

    model: SparseModel
    baseline: Baseline
    weights: Float64Array  #: (r, S): of the whitened kernel rows
    intercepts: Float64Array  #: (S,)
    members: dict[str, Float64Array]  #: (n, S): predictions of the kept rows of each quantity


def fit_ensemble(
    model: SparseModel, problem: TrainingProblem, baseline: Baseline, stages: Stages
) -> Ensemble:
    """Solve all members, and predict the rows that are kept by each."""
    settings, rows, sample = problem.settings, model.rows, model.rows.sample
    S, r = settings.n_subsampled, len(rows.points)
    columns = np.zeros((len(baseline.full) + 2, 1, S))
    columns[0], columns[1:-1, 0] = 1.0, baseline.full[:, None] - baseline.members
    with stages.stage("Members"), _few_threads(problem.data.n_rows, r):
        centered = settings.linear_baseline != "none"
        full, solved, means = fit_members(
            model.full, rows.sums, rows.kept, columns, centered=centered
        )
        weights, intercepts = solved[:, 0], rows.center + means[0]
        predicted = rows.kept.Phi @ weights
        of_target = baseline.predict_members(sample.design(problem.data.species))
        predicted[: len(sample.y)] += intercepts + of_target
    members = {name: predicted[q.rows] for name, q in sample.quantities.items()}
    return Ensemble(replace(model, full=full), baseline, weights, intercepts, members)


def calibrate(
    ensemble: Ensemble, problem: TrainingProblem, representation: Representation, stages: Stages
) -> Fitted:
    """Choose what is predicted, add posterior members, and calibrate each quantity out of bag."""
    settings, model, baseline = problem.settings, ensemble.model, ensemble.baseline
    rows, sample, r = model.rows, model.rows.sample, len(model.rows.points)
    with stages.stage("Calibration"), _few_threads(problem.data.n_rows, r):
        found = predict_out_of_bag(model, settings, ensemble.members)
        centre = choose_centre(found, settings)
        points, calibrations, method = calibrate_quantities(
            found, settings, centre, sample.source, is_constant=np.ptp(problem.data.y) == 0
        )
        check_labels(found, sample.copies, sample.source, per_atom=sample.per_atom)
    settings = settings.model_copy(update={"calibration": method})
    whitening, environments = rows.points.whitening, rows.points.environments
    full_weights = model.full.weights[:, 0]
    rng = np.random.default_rng([settings.seed, _POSTERIOR_STREAM])
    process = model.full.process
    drawn = posterior_deviations(process, settings.n_drawn, rng, whitening.pivots) * model.scale
    columns = centred(ensemble.weights, full_weights, centre, drawn)
    none = np.zeros(settings.n_drawn)  # intercepts and baselines have no posterior
    return Fitted(
        settings=settings.model_copy(update={"n_representatives": problem.n_given}),
        representation=representation.exact(),  # predictions are float64
        representatives=environments.features,
        origins=environments.origins,
        kernel_scale=rows.scale,
        # Row-major, as in a file: the order in memory decides how products are rounded.
        weights=np.ascontiguousarray(whitening.kernel_weights(columns)),
        intercepts=centred(ensemble.intercepts, np.asarray(rows.center), centre, none),
        pp_weights=np.ascontiguousarray(whitening.kernel_weights(full_weights)),
        pp_intercept=rows.center,
        baseline=replace(baseline, members=centred(baseline.members, baseline.full, centre, none)),
        calibrations=calibrations,
        points=points,
        pp_variance=_projected_variance(model, settings) if settings.keep_pp else None,
        training_novelty=rows.novelty[r],
        largest_ensemble_std=largest_std(points.get(TARGET), settings),
        record=_record(problem, model, points, centre, stages),
        provenance=Provenance(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages={
                "qualms": qualms.__version__,
                **{n: version(n) for n in _PACKAGES},
                **calculator_version(settings.reference),
            },
            data_digest=problem.census.digest,
        ),
    )


def _projected_variance(model: SparseModel, settings: Settings) -> ProjectedVariance:
    precision: Any = np.float64 if settings.learns_forces else np.float32
    process = model.full.process
    factors = (model.rows.points.whitening.factor, process.factor)
    whitening, posterior = (np.ascontiguousarray(f, dtype=precision) for f in factors)
    return ProjectedVariance(whitening, posterior, process.noise_variance, model.scale**2)


def _record(
    problem: TrainingProblem,
    model: SparseModel,
    points: Mapping[str, CalibrationData],
    centre: float,
    stages: Stages,
) -> Record:
    census, quantities, kept = problem.census, {}, model.rows.kept
    for name, quantity in problem.data.quantities.items():
        of = points.get(name)
        z = None if of is None else of.residuals
        n_structures = 0 if of is None or of.structure is None else len(np.unique(of.structure))
        quantities[name] = QuantityRecord(
            n_rows=len(quantity.y),
            n_without=census.n_without[name],
            n_out_of_bag=0 if z is None else len(z),
            n_out_of_bag_structures=n_structures,
            rmse=None if z is None else float(np.sqrt(np.mean(z**2))),
            mae=None if z is None else float(np.mean(np.abs(z))),
            noise=float(np.sqrt(model.full.noise[name])),
        )
    states = census.states
    return Record(
        n_structures=len(problem.data.source),
        n_environments=problem.data.n_environments,
        n_isolated=census.n_isolated,
        n_duplicates=census.n_duplicates,
        state=dict(*states) if len(states) == 1 else None,
        quantities=quantities,
        centre=centre,
        effective_rank=len(model.rows.points),
        preset=problem.preset,
        size_curve=model.size_curve,
        size_limit=_size_limit(problem, max(model.rows.novelty)),
        target_std=float(np.sqrt(np.mean(kept.y[kept.rows[TARGET]] ** 2))) or model.scale,
        seconds=dict(stages.seconds),
    )
