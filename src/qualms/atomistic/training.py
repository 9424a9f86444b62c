"""Training: from labelled structures to a calibrated model.

`fit` reads from top to bottom: labels, features, representatives, kernel rows, sparse Gaussian
process, ensemble, calibrations. All quantities (energies or another target, forces, stresses) are
blocks of rows of one linear problem, with a noise variance and a calibration each.

The features of all environments are needed twice, to select representatives and to compute kernel
rows. If they fit in the memory limit they are kept. Otherwise they are computed twice, block by
block, and representatives are selected in one pass: first within each block, then among those of
all blocks. For farthest points, both steps leave every environment within twice the optimal
covering radius of a pick, as the plain algorithm does; together, at most twice as far.
"""

from __future__ import annotations

import datetime
import logging
import math
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import combinations_with_replacement
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from threadpoolctl import threadpool_limits

import qualms
from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline, anchors, fit_baseline, spans
from qualms.atomistic.fitted import (
    Fitted,
    ProjectedVariance,
    Provenance,
    QuantityRecord,
    Record,
    describe_size,
    n_leading,
)
from qualms.atomistic.forces import fill_rows, kernel_terms
from qualms.atomistic.kernel_rows import LANDMARKS, Basis, select_representatives
from qualms.atomistic.label_checks import (
    check_copies,
    check_derivatives,
    check_noise,
    find_outliers,
    warn_of_outliers,
)
from qualms.atomistic.labels import Quantity, TrainingSet, collect_labels
from qualms.atomistic.reference import ReferencePotential, calculator_version
from qualms.atomistic.settings import Settings, parse_memory
from qualms.atomistic.structures import fingerprints
from qualms.calibration.base import (
    Calibration,
    CalibrationData,
    FullModelData,
    calibration_data,
)
from qualms.calibration.conformal import Conformal
from qualms.calibration.fitting import (
    MODEL_METHODS,
    best_method,
    fit_out_of_bag,
    out_of_bag_points,
)
from qualms.calibration.groups import fit_grouped
from qualms.calibration.methods import NoCalibration
from qualms.calibration.sources import MIN_POINTS, with_enough_points
from qualms.calibration.vectors import (
    INDEPENDENT_COMPONENTS,
    ISOTROPIES,
    MULTIPLICITY,
    component_share,
)
from qualms.errors import (
    CalibrationError,
    ExactFitError,
    InputError,
    QualmsWarning,
    counted,
)
from qualms.features.compression import sample_size
from qualms.features.gradients import BATCH as GRADIENTS
from qualms.features.representation import (
    BATCH,
    BLOCK,
    SERIAL,
    Batch,
    Problem,
    Representation,
    stop_workers,
    stream_features,
    structure_blocks,
)
from qualms.gp.ensemble import (
    MIN_ABSENT,
    FullModel,
    Residuals,
    centred,
    draw_members,
    fit_block_members,
    fit_centre,
    fit_full_model,
    fit_members,
    out_of_bag_prediction,
)
from qualms.gp.kernels import Kernel, unit_scale
from qualms.gp.linalg import Whitening, whiten
from qualms.gp.noise import BlockSums, group_means, typical_log
from qualms.gp.sparse_gp import (
    ProjectedProcess,
    leave_out,
    novelty_variance,
    posterior_deviations,
)
from qualms.progress import Stages

log = logging.getLogger(__name__)

#: Share of the training structures that would not count as extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Streams of random numbers, beside that of the draw of members: the sample that a compression is
#: fitted to, the selection of representatives, posterior members, and the groups left out.
_SAMPLE_STREAM, SELECTION_STREAM, _POSTERIOR_STREAM, _LEAVE_OUT_STREAM = 1, 3, 4, 5
#: Multiplications that leaving rows out of the full model may take, some seconds.
PRODUCTS = 5e11
#: The same for the errors of models of several sizes. Twice the representatives must lower them by
#: this share at least, for each effort: predictions take twice the time, and the ratio of two
#: errors of some thousand rows is uncertain by a few per cent.
_PRODUCTS_OF_SIZES = 1e11
_GAIN = {"fast": 0.05, "default": 0.05, "best": 0.0}
#: Features are float32, or with forces float64: see `qualms.gp.linalg.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: Representatives and rows up to which matrices are small, and one thread is the fastest.
_SMALL, _FEW = 500, 50_000
#: Representatives of the model that tells whether forces are derivatives of the energies.
_CHECKED = 1000
#: Components on which members agree to this share of the largest label, or to this number, are zero
#: by symmetry.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Out-of-bag structures from which components have a calibration of their own, and from which no
#: warning is needed. Errors within a structure are correlated. The factor of energies is as good
#: for forces as one from fewer than ten structures; for stresses it is often too small by half.
_ENOUGH, _WELL = {"forces": 10, "stress": 3}, 10
#: Points that are enough for factors of species, and a difference of these that is none.
_ENOUGH_POINTS, _EQUAL = 10_000, 1e-3
#: Parameter of the noise variance of each quantity.
_NOISES = {"energy": "noise", "forces": "forces_noise", "stress": "stress_noise"}
_PACKAGES = ("numpy", "scipy", "ase", "dscribe", "featomic", "safetensors")


class TooLargeError(InputError):
    """The kernel rows of all labels do not fit in the memory limit."""


class Trained(NamedTuple):
    """A trained model, and the out-of-bag points of each quantity, which are not stored with it."""

    fitted: Fitted
    out_of_bag: dict[str, CalibrationData]


def fit(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = None,
    *,
    threads: int = 1,
    stages: Stages | None = None,
    reference: ReferencePotential | None = None,
    skip_failed: bool = False,
) -> Trained:
    """Train a model on labelled structures and calibrate it on out-of-bag points.

    Structures of the same group are in or out of a subsample together; groups may be a key of
    ``atoms.info``. With a reference potential, the model learns the differences of the labels from
    it.
    """
    stages = stages or Stages()
    with threadpool_limits(limits=threads):
        with nullcontext() if reference is None else stages.stage("Baseline"):
            data = collect_labels(
                frames, settings, groups, reference=reference, skip_failed=skip_failed
            )
        if reference is not None:
            stop_workers()  # and free their memory
        if data.preset:
            log.info(f"Representation: {data.preset}.")
        draw = draw_ensemble(data)
        rows = compute_rows(data, memory=settings.memory, threads=threads, stages=stages)
        gp = fit_nested(rows, data, draw.baseline, stages)
        ensemble = fit_ensemble(gp, data, draw, stages)
        return calibrate(ensemble, data, stages)


# --- the draw of members --------------------------------------------------------------------------


class Draw(NamedTuple):
    """How often each row of the target is in each member, (N, N_R), and the baselines.

    If members are made of blocks, `blocks` (B, N_R) is how often each block is in each member.
    """

    counts: IntArray
    baseline: Baseline
    blocks: IntArray | None = None


def draw_ensemble(data: TrainingSet) -> Draw:
    """Draw the members and fit their baselines; reject data that are too few.

    A member whose rows do not determine the baseline of the composition, because it lacks a rare
    element, gets the few rows that do.
    """
    settings, n, groups, design = data.settings, len(data.y), data.row_groups, data.design
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if settings.resample == "atoms" else "different labelled structures"
        grouped = len(np.unique(data.source)) > 1 and settings.resample != "atoms"
        name, what = ("groups", "groups of structures") if grouped else ("frames", what)
        raise InputError(
            f"There are fewer than 2 {what}, from which subsamples are drawn.",
            parameter=name,
        )
    rng = np.random.default_rng(settings.seed)
    counts = np.zeros((n, 0), dtype=np.intp)
    if settings.n_subsampled:
        counts = draw_members(
            n, settings.n_members, settings.subsample, rng, replace=settings.replace, groups=groups
        )
    lacking = np.flatnonzero(~spans(design, counts))
    anchored = settings.linear_baseline == "composition" and len(lacking) > 0
    if anchored:
        here = np.ix_(np.isin(groups, groups[anchors(design)]), lacking)
        counts[here] = np.maximum(counts[here], 1)
    check_out_of_bag(settings, counts, anchored=anchored)
    baseline = fit_baseline(
        settings.linear_baseline,
        design,
        data.y,
        species=data.species,
        kind=settings.kind,
        counts=counts,
        isolated=data.isolated,
    )
    return Draw(counts, baseline)


def check_out_of_bag(settings: Settings, counts: IntArray, *, anchored: bool) -> None:
    """Reject members, with counts (n, N_R) of each row, that leave nothing to calibrate on.

    Members are anchored if those that lack an element got the rows that determine it.
    """
    if not settings.n_subsampled or settings.calibration == "none" or _out_of_bag(counts).any():
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


def _out_of_bag(counts: IntArray) -> BoolArray:
    """Return which rows (N,) enough members are without, given counts (N, S); all if S = 0."""
    enough: BoolArray = (counts == 0).sum(axis=1) >= (MIN_ABSENT if counts.shape[1] else 0)
    return enough


# --- features, representatives, kernel rows -------------------------------------------------------


@dataclass(frozen=True)
class KernelRows:
    """Whitened kernel rows of a training set."""

    representation: Representation
    basis: Basis  #: representatives and the kernel with them, scaled by Eq. (17), Musil et al. 2019
    origins: IntArray  #: (r, 2): structure, as given to `fit`, and atom of each representative
    whitening: Whitening  #: of the scaled kernel
    Phi: Float64Array  #: (N, r): rows of all quantities, or a sample of them
    k_xx: Float64Array  #: (n,): diagonal of the scaled kernel, of the rows of the target
    #: largest and mean novelty of the environments of a structure that few structures exceed
    novelty: tuple[float, float]
    #: the same of models with fewer representatives, if their number is to be chosen
    nested: dict[int, tuple[float, float]] = field(default_factory=dict)
    size_limit: str = ""  #: what limited the number of representatives that was chosen, if any
    size_curve: dict[int, float] = field(default_factory=dict)  #: out-of-bag error for numbers
    blocks: BlockSums | None = None  #: sums over all rows, if Phi is a sample of them

    def leading(self, r: int) -> KernelRows:
        """Return the rows of the model that has the first r representatives alone.

        The factor L of the whitening is triangular, so these are the first r columns.
        """
        if r == self.Phi.shape[1]:
            return self
        X = self.basis.representatives[:r].copy()
        return replace(
            self,
            basis=replace(self.basis, representatives=X),
            origins=self.origins[:r],
            whitening=self.whitening.leading(r),
            Phi=self.Phi[:, :r],  # a view: there may be no memory for a copy
            novelty=self.nested[r],
            blocks=None if self.blocks is None else self.blocks.leading(r),
        )


def compute_rows(
    data: TrainingSet,
    *,
    memory: str | float | None = None,
    threads: int = 1,
    stages: Stages | None = None,
) -> KernelRows:
    """Compute features, select representatives, and compute the kernel rows of all labels.

    If the number of representatives is to be chosen, they are as many as time and memory allow.
    """
    size_limit, bytes_ = "", parse_memory(memory)
    if data.settings.n_representatives == "auto":

        def fits(n: int) -> bool:
            return min(_memory_needed(data.with_size(n), 1)[:2]) <= bytes_

        n, size_limit = largest_size(data, fits)
        data = data.with_size(n)
    features = fit_features(data, bytes_, threads, stages or Stages())
    points = select_points(features)
    return kernel_rows(features, points, size_limit)


#: Numbers of representatives to choose from, and the smallest of a nested model: with fewer, hardly
#: any time is saved.
_SIZES = (250, 500, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 10_000, 12_000, 16_000)
_SMALLEST = 250
#: Representatives per label from which on errors hardly change: on 300 molecules of QM9 1500 and
#: 3000 differ by 0.5 %.
_PER_LABEL = 5
#: Seconds of an operation on two cores of a server: of n M d for the selection and the kernel rows,
#: of n M d for each derivative, of N M² for Gram matrices, noise and members, and of M³ for
#: factorisations. Each is uncertain by a factor of two.
_SECONDS_OF = {"kernel": 1e-10, "forces": 2.4e-11, "rows": 7e-11, "solution": 1.5e-10}
#: Derivatives of the features of an environment: by three coordinates of some neighbours.
_N_DERIVATIVES = 3 * 20
#: Seconds of training, beside the features, for each effort.
_SECONDS = {"fast": 30.0, "default": 120.0, "best": 900.0}


class TrainingSize(Protocol):
    """What time and memory of a training depend on."""

    @property
    def settings(self) -> Settings:
        """Settings."""

    @property
    def species(self) -> list[int]:
        """Atomic numbers."""

    @property
    def n_environments(self) -> int:
        """Environments whose features are needed."""

    @property
    def n_rows(self) -> int:
        """Labels of all quantities."""

    def with_size(self, n_representatives: int) -> Self:
        """Return a copy with a number of representatives."""


def largest_size(
    data: TrainingSize, fits: Callable[[int], bool], least: int = 0
) -> tuple[int, str]:
    """Return the number of representatives that time and memory allow, and what limits it.

    `fits` returns whether the memory suffices for a number. Numbers up to `least` may take any
    time, and the smallest number is returned in any case.
    """
    limits = {
        "the number of environments": data.n_environments,
        "the number of labels": max(_PER_LABEL * data.n_rows, _SIZES[0]),
        "the largest number": _SIZES[-1],
    }
    limit = min(limits, key=limits.__getitem__)
    sizes = sorted({min(size, limits[limit]) for size in _SIZES}, reverse=True)
    for size in sizes:
        if size > least and _training_time(data.with_size(size)) > _SECONDS[data.settings.effort]:
            limit = "effort"
        elif not fits(size):
            limit = "the memory"
        else:
            return size, limit
    return sizes[-1], limit


def _training_time(data: TrainingSize) -> float:
    """Return a rough number of seconds, beside the features, from counts of operations."""
    n, n_rows, M = data.n_environments, data.n_rows, data.settings.n_selected
    products = n * M * n_features(data)[0]
    parts = {"kernel": products, "forces": 0.0, "rows": n_rows * M**2, "solution": M**3}
    if data.settings.learns_forces:
        parts["forces"] = products * _N_DERIVATIVES
    return sum(_SECONDS_OF[part] * count for part, count in parts.items())


@dataclass(frozen=True)
class TrainingFeatures:
    """Features of a training set: kept in memory, or computed as often as they are needed."""

    data: TrainingSet
    representation: Representation
    n_workers: int
    stages: Stages
    n_block: int | None  #: environments whose features are in memory at once; None: all are kept
    kept: FloatArray | None = None  #: (n_environments, d)

    def blocks(self) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins."""
        if self.kept is None:
            for batch in self._batches(0, len(self.data.frames)):
                yield batch.features, batch.offsets
            return
        for first, last in structure_blocks(self.data.offsets):
            edges = self.data.offsets[first : last + 1]
            yield self.kept[edges[0] : edges[-1]], edges - edges[0]

    def array(self, first: int, last: int) -> FloatArray:
        """Return the features of the environments of some structures: (n, d)."""
        begin, end = self.data.offsets[first], self.data.offsets[last]
        if self.kept is not None:
            return self.kept[begin:end]
        shape = end - begin, self.representation.n_features
        X, done = np.empty(shape, dtype=self.representation.dtype), 0
        with self.stages.stage("Features", len(X)) as advance:
            for batch in self._batches(first, last):
                X[done : done + len(batch.features)] = batch.features
                done += len(batch.features)
                advance(done)
        return X

    def _batches(self, first: int, last: int) -> Iterator[Batch]:
        pairs = zip(self.data.frames[first:last], self.data.centers[first:last], strict=True)
        return stream_features(self.representation, pairs, n_workers=self.n_workers)


def fit_features(
    data: TrainingSet, memory: float, threads: int, stages: Stages
) -> TrainingFeatures:
    """Fit the representation, and compute all features if they fit in the memory limit (bytes)."""
    n_block, n_workers = _plan_memory(data, memory, threads)
    representation = _fit_representation(data, stages)
    features = TrainingFeatures(data, representation, n_workers, stages, n_block)
    if n_block is not None:
        return features
    kept = features.array(0, len(data.frames))
    stop_workers()  # and free their memory
    return replace(features, kept=kept)


class MemoryNeeded(NamedTuple):
    """Bytes of a training: with features kept, recomputed, and beside features of a block."""

    keep: float
    recompute: float
    beside: float


def _memory_needed(data: TrainingSet, n_workers: int) -> MemoryNeeded:
    """Return the memory that a training needs.

    Sizes in bytes are those of the largest arrays of each stage; 0.5 GB is for the interpreter and
    libraries, 0.25 GB for those of each worker process.
    """
    settings, n, size = data.settings, data.n_environments, data.settings.features.itemsize
    M, batch = min(settings.n_selected, n), min(BATCH, n)
    d, d_raw = n_features(data)
    base = 0.5e9 + settings.features.overhead + 4e3 * len(data.frames) + 100.0 * n
    rows = 8.0 * data.n_rows * M
    products = 12.0 * BLOCK * M + 4.0 * BLOCK * d
    solving = rows + 48.0 * M**2 + 128.0 * settings.n_members * data.n_rows
    solving += 9.0 * M * min(data.n_rows, max(PRODUCTS / M**2, 1000))  # rows that are left out
    if settings.learns_forces:
        # Derivatives by some 30 neighbours, and Gram matrices of parts of the data.
        products += 48.0 * GRADIENTS * 30 * (d_raw + M)
        solving += (20 if M <= 800 else 2) * 8.0 * M**2
    picking = size * M * d + 100e6
    if settings.selection == "cur":
        landmarks = min(2 * M, n)
        picking += 48.0 * landmarks**2 + 12.0 * landmarks * d
    compressing = 12.0 * sample_size(n) * d_raw + 24.0 * d_raw**2 if d < d_raw else 0.0

    workers = n_workers if n >= SERIAL else 1
    batches = 20.0 * batch * d_raw + 8.0 * workers * batch * d
    batches += workers * (0.25e9 + 12.0 * batch * d_raw) if workers > 1 else 0.0
    least = max(compressing, solving, batches + rows + products)
    keep = base + max(least, size * n * d + max(batches, 1.1 * picking, rows + products))
    beside = base + batches + picking  # while representatives are selected block by block
    recompute = max(base + least, beside + 2.2 * size * M * d)
    return MemoryNeeded(keep, recompute, beside)


def format_size(n: float) -> str:
    """Return a number of bytes as text."""
    if n < 1e6:
        return f"{n:.0f} bytes"
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _plan_memory(data: TrainingSet, limit: float, n_workers: int) -> tuple[int | None, int]:
    """Return environments per block if features are recomputed (None if kept), and processes."""
    n, d = data.n_environments, n_features(data)[0]
    width = 1.1 * data.settings.features.itemsize * d  # bytes of an environment, and some more
    M = min(data.settings.n_selected, n)

    keep, recompute, beside = _memory_needed(data, n_workers)
    while n_workers > 1 and min(keep, recompute) > limit:
        n_workers //= 2
        keep, recompute, beside = _memory_needed(data, n_workers)
    if min(keep, recompute) > limit:
        raise TooLargeError(
            f"The training needs at least {format_size(1.01 * min(keep, recompute))} of memory; "
            f"the limit is {format_size(limit)}. Raise `memory`, or use a smaller "
            "`n_representatives` or fewer structures.",
            parameter="memory",
        )
    n_block, use = None, keep
    if keep > limit:
        # Candidates of all blocks are kept, at most M of each.
        n_block = max(int((limit - beside) / width) // 2, 2 * M)
        use = max(recompute, beside + width * n_block)
    log.info(
        f"{n:,} environments × {d:,} features ({'kept' if n_block is None else 'computed twice'}), "
        f"{data.n_rows:,} labels, {M:,} representatives: about {format_size(use)} of memory "
        f"(limit {format_size(limit)})."
    )
    return n_block, n_workers


def n_features(data: TrainingSize) -> tuple[int, int]:
    """Return the numbers of features after and before compression."""
    return data.settings.features.n_features(data.species, _problem(data))


def _problem(data: TrainingSize) -> Problem:
    settings, n = data.settings, data.n_environments
    return Problem(n, min(settings.n_selected, n), settings.has_forces)


def _fit_representation(data: TrainingSet, stages: Stages) -> Representation:
    """Return the representation, with what is fitted to random structures."""
    numbers = [np.unique(atoms.numbers).tolist() for atoms in data.frames]
    return fit_representation(data, numbers, np.diff(data.offsets), data.some, stages)


def fit_representation(
    data: TrainingSize,
    elements: Sequence[Sequence[int]],
    sizes: IntArray,
    read: Callable[[IntArray], tuple[Sequence[Atoms], Sequence[IntArray]]],
    stages: Stages,
) -> Representation:
    """Return the representation, with what is fitted to random structures.

    Structures have these elements and numbers of environments; `read` returns some of them, and the
    atoms in them whose environments are used.
    """

    def sample() -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        rng = np.random.default_rng([data.settings.seed, _SAMPLE_STREAM])
        return read(_sample(elements, sizes, rng))

    with stages.stage("Compression"):
        return data.settings.features.fit(data.species, _problem(data), sample)


def _sample(
    elements: Sequence[Sequence[int]], sizes: IntArray, rng: np.random.Generator
) -> IntArray:
    """Return random structures with enough environments to fit a compression.

    The first structure with each pair of elements comes first: features of a pair that the sample
    lacks would be lost.
    """
    order = rng.permutation(len(elements))
    seen: set[tuple[int, int]] = set()
    first = []
    for place, i in enumerate(order):
        pairs = set(combinations_with_replacement(elements[i], 2))
        if not pairs <= seen:
            seen |= pairs
            first.append(place)
    order = np.concatenate([order[first], np.delete(order, first)])
    enough = int(np.searchsorted(np.cumsum(sizes[order]), sample_size(int(sizes.sum())))) + 1
    return order[: max(enough, len(first))]


class Representatives(NamedTuple):
    """Representative environments, their features (r, d), and their whitening."""

    origins: IntArray  #: (r, 2): structure, as given to `fit`, and atom
    groups: IntArray  #: (r,): group of the structure
    features: FloatArray
    whitening: Whitening


class Candidates(NamedTuple):
    """Environments to select representatives from, or those selected."""

    origins: IntArray  #: (n, 2)
    groups: IntArray  #: (n,)
    features: FloatArray  #: (n, d)

    def take(self, some: IntArray) -> Candidates:
        """Return some of them."""
        found: Any = (array[some] for array in self)
        return Candidates(*found)

    @classmethod
    def join(cls, parts: Sequence[Candidates]) -> Candidates:
        """Return the candidates of several parts."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def select_points(features: TrainingFeatures) -> Representatives:
    """Select representatives, and drop those that are, to rounding, combinations of others.

    Features that are not kept are computed in blocks: representatives are selected within each
    block, and then among those of all blocks.
    """
    data, kernel, offsets = features.data, features.representation.kernel, features.data.offsets
    rng = np.random.default_rng([data.settings.seed, SELECTION_STREAM])
    blocks = [(0, len(data.frames))]
    if features.n_block is not None:
        n_blocks = max(-(-data.n_environments // features.n_block), 1)
        blocks = list(structure_blocks(offsets, -(-data.n_environments // n_blocks)))
    settings = data.settings if len(blocks) == 1 else candidate_settings(data.settings)
    parts = [
        select_candidates(features, first, last, settings, rng)
        for first, last in blocks
        if offsets[first] < offsets[last]
    ]
    return join_candidates(parts, kernel, data.settings, rng, features.stages)


def candidate_settings(settings: Settings) -> Settings:
    """Return settings for the selection within a block: CUR selects among farthest points."""
    if settings.selection != "cur":
        return settings
    more = {"selection": "fps", "n_representatives": LANDMARKS * settings.n_selected}
    return settings.model_copy(update=more)


def select_candidates(
    features: TrainingFeatures, first: int, last: int, settings: Settings, rng: np.random.Generator
) -> Candidates:
    """Select representatives among the environments of some structures."""
    data, kernel = features.data, features.representation.kernel
    some = slice(first, last)
    sizes = np.diff(data.offsets[first : last + 1])
    atoms = np.concatenate(data.centers[some])
    origins = np.stack([np.repeat(data.source[some], sizes), atoms], axis=1).astype(np.int64)
    found = Candidates(origins, np.repeat(data.groups[some], sizes), features.array(first, last))
    return found.take(_selected(found, kernel, settings, rng, features.stages))


def _selected(
    found: Candidates, kernel: Kernel, settings: Settings, rng: np.random.Generator, stages: Stages
) -> IntArray:
    with stages.stage("Representatives", min(settings.n_selected, len(found.features))) as advance:
        return select_representatives(found.features, kernel, settings, rng, advance)


def join_candidates(
    parts: Sequence[Candidates],
    kernel: Kernel,
    settings: Settings,
    rng: np.random.Generator,
    stages: Stages,
) -> Representatives:
    """Select representatives among those of all blocks, and whiten the kernel between them."""
    found = parts[0]
    if len(parts) > 1:
        found = Candidates.join(parts)
        found = found.take(_selected(found, kernel, settings, rng, stages))
    # Among environments that are equally far apart, rounding may choose the order of selection.
    found = found.take(np.lexsort(found.origins.T[::-1]))
    with stages.stage("Whitening"):
        exact = found.features.astype(np.float64)
        rtol = _RTOL_OF_FORCES if settings.learns_forces else _RTOL
        whitening = whiten(np.asarray(kernel(exact, exact)), rtol=rtol)
    found = found.take(whitening.pivots)
    X = np.ascontiguousarray(found.features)
    return Representatives(found.origins, found.groups, X, whitening)


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)


class WhitenedRows(NamedTuple):
    """Rows of all quantities (N, r) for the kernel as it is, not scaled by Eq. (17)."""

    Phi: Float64Array
    diagonal: Float64Array  #: (n,): of the kernel, for the rows of the target
    #: (n_structures, n_sizes, 2): largest and mean novelty of the environments of each structure
    novelty: Float64Array


def nested_sizes(r: int) -> list[int]:
    """Return the numbers of representatives of the models that a model of r is compared with."""
    return [m for m in (r // 8, r // 4, r // 2) if _SMALLEST <= m < r]


def whitened_rows(
    features: TrainingFeatures, points: Representatives, sizes: Sequence[int]
) -> WhitenedRows:
    """Compute the kernel rows of all quantities, and whiten them.

    The novelty is that of models with these numbers of representatives.
    """
    data, representation, stages = features.data, features.representation, features.stages
    n, own = len(data.y), _own_representatives(data.groups, points.groups)
    X_M = points.features.astype(representation.basis_dtype, copy=False)
    basis = Basis(representation.kernel, X_M, 1.0, data.settings.per_atom)
    K = np.zeros((data.n_rows, len(X_M)))
    diagonal, novelty = np.empty(n), np.empty((len(data.frames), len(sizes), 2))
    structure = row = done = 0
    with stages.stage("Kernel rows", data.n_environments) as advance:
        for block, offsets in features.blocks():
            here = slice(structure, structure + len(offsets) - 1)
            rows = basis.rows(block, offsets, sizes=sizes, novelty=novelty[here], own=own[here])
            K[row : row + len(rows)] = rows
            diagonal[row : row + len(rows)] = basis.prior_variance(block, offsets)
            structure, row, done = here.stop, row + len(rows), done + len(block)
            advance(done)
    if data.derivatives is not None:
        stop_workers()
        terms = kernel_terms(representation, X_M)
        with stages.stage("Rows of forces", data.n_environments) as advance:
            fill_rows(K[:n], K[n:], data.frames, data.derivatives, terms, advance)
    with stages.stage("Whitening"), _few_threads(data, len(X_M)):
        Phi = np.asarray(points.whitening.features(K, overwrite=True), dtype=np.float64)
    return WhitenedRows(Phi, diagonal, novelty)


def kernel_rows(
    features: TrainingFeatures, points: Representatives, size_limit: str = ""
) -> KernelRows:
    """Compute the kernel rows of all quantities.

    The kernel is scaled by Eq. (17), Musil et al. 2019, when its diagonal is known. A limit means
    that fewer representatives may be chosen: the novelty is computed for each number.
    """
    r = len(points.features)
    smaller = nested_sizes(r) if size_limit else []
    rows = whitened_rows(features, points, [*smaller, r])
    stop_workers()
    return scaled_rows(
        features.representation,
        points,
        rows.Phi,
        rows.diagonal,
        float(np.mean(rows.diagonal)),
        dict(zip([*smaller, r], rows.novelty.swapaxes(0, 1), strict=True)),
        features.data.settings,
        size_limit,
    )


def scaled_rows(
    representation: Representation,
    points: Representatives,
    Phi: Float64Array,
    diagonal: Float64Array,
    mean_diagonal: float,
    novelty: Mapping[int, Float64Array],
    settings: Settings,
    size_limit: str = "",
) -> KernelRows:
    """Return kernel rows for the kernel scaled by Eq. (17), Musil et al. 2019; Φ is overwritten.

    The mean is that of all structures, and novelty (n_structures, 2) for each number of
    representatives.
    """
    scale, r = unit_scale(1.0, np.array([mean_diagonal])), len(points.features)
    Phi *= np.sqrt(scale)
    if size_limit and r < 0.9 * settings.n_selected:  # many were dropped
        size_limit = "their linear dependence"
    whitening = points.whitening
    limits = {m: tuple(np.quantile(v, _NOT_NOVEL, axis=0).tolist()) for m, v in novelty.items()}
    return KernelRows(
        representation=representation.exact(),  # predictions are float64
        basis=Basis(representation.kernel, points.features, scale, settings.per_atom),
        origins=points.origins,
        whitening=replace(whitening, factor=whitening.factor * np.sqrt(scale)),
        Phi=Phi,
        k_xx=diagonal * scale,
        novelty=limits.pop(r),
        nested=limits,
        size_limit=size_limit,
    )


def _own_representatives(groups: IntArray, of_points: IntArray) -> list[IntArray]:
    """Return the representatives that come from the group of each structure."""
    order = np.argsort(of_points, kind="stable")
    first, last = (np.searchsorted(of_points[order], groups, side=s) for s in ("left", "right"))
    return [order[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


def _few_threads(data: TrainingSet, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    small = rank <= _SMALL and data.n_rows <= _FEW
    return threadpool_limits(limits=1 if small else None)


# --- the sparse Gaussian process ------------------------------------------------------------------


@dataclass(frozen=True)
class SparseGP:
    """The full model of all rows, in the basis of the whitened kernel rows."""

    rows: KernelRows
    full: FullModel

    @property
    def process(self) -> ProjectedProcess:
        """Projected process of labels divided by `scale`."""
        return self.full.process

    @property
    def y(self) -> Float64Array:
        """Labels of all rows less the full baseline and the centre: (N,)."""
        return np.asarray(self.full.y[:, 0] * self.scale)

    @property
    def center(self) -> float:
        """Mean of the target less the baseline."""
        return float(self.full.center[0])

    @property
    def scale(self) -> float:
        """Square root of the prior variance."""
        return float(self.full.scale[0])

    @property
    def noise(self) -> dict[str, float]:
        """Noise variance of each quantity, in its units squared ("stress": virials per atom)."""
        return self.full.noise

    def leave_out(
        self, rows: IntArray, groups: IntArray, owners: IntArray | None = None
    ) -> FullModelData:
        """Return the full model without each of some rows (n,), or without its group.

        Without the representatives of the group as well, if their `owners` (r,) are given. Novelty
        is known for rows of the target alone; it is zero elsewhere.
        """
        full, Phi, k_xx = self.full, self.rows.Phi[rows], self.rows.k_xx
        own = {} if owners is None else self.rows.whitening.columns_of(groups, owners)
        found = leave_out(
            full.process, Phi, full.y[rows], sample_weight=full.weight[rows], groups=groups, own=own
        )
        q2, target = np.zeros(len(rows)), np.flatnonzero(rows < len(k_xx))
        leading = Phi[target, : n_leading(Phi.shape[1])]
        q2[target] = novelty_variance(leading, k_xx[rows[target]])
        if own and owners is not None:
            m = leading.shape[1]
            first = self.rows.whitening.leading(m)
            q2[target] += first.own_share(leading, groups[target], owners[:m])
        p, q = np.sqrt(found.variance), np.sqrt(q2)
        z, kept = found.residuals[:, 0], found.kept[:, 0]
        return FullModelData(z, p, q, kept).scaled(self.scale)


def fit_sparse_gp(
    rows: KernelRows, data: TrainingSet, baseline: Baseline, stages: Stages | None = None
) -> SparseGP:
    """Select the noise variance of each quantity and solve the full model.

    The prior variance of the weights gives the target its variance, Eq. (17), Musil et al. 2019; or
    forces and virials theirs, if they are learned.
    """
    settings, quantities = data.settings, data.quantities
    y, groups = np.empty(data.n_rows), _groups_of_rows(data)
    for quantity in quantities.values():
        y[quantity.rows] = quantity.y
    n = len(data.y)
    y[:n] -= baseline.predict(data.design)
    with (stages or Stages()).stage("Full model"), _few_threads(data, rows.Phi.shape[1]):
        wrong = set(quantities)
        if len(quantities) > 1:
            wrong = check_derivatives(rows.Phi[:, :_CHECKED], y[:n], data)
        full = fit_full_model(
            rows.Phi,
            y,
            {name: getattr(settings, _NOISES[name]) for name in quantities},
            rows={name: quantity.rows for name, quantity in quantities.items()},
            center=settings.linear_baseline != "none",
            groups=groups,
            blocks=rows.blocks,
        )
    if not wrong:  # or there are no derivatives
        others = {name: _NOISES[name] for name in quantities if name != "energy"}
        fitted = [name for name, key in others.items() if getattr(settings, key) == "auto"]
        check_noise({name: full.noise[name] for name in fitted}, data)
    return SparseGP(rows, full)


def _groups_of_rows(data: TrainingSet) -> IntArray:
    """Return what is left out together: a number for each row of all quantities."""
    groups = np.arange(data.n_rows)
    if data.settings.resample != "atoms":
        for quantity in data.quantities.values():
            groups[quantity.rows] = data.groups[quantity.structure]
    return groups


def _random_groups(codes: IntArray, candidates: IntArray, n: float, seed: int) -> IntArray:
    """Return all rows of random groups among the candidates: at least n of them, and 1000.

    `codes` (N,) are the groups of all rows, counted from 0.
    """
    order = np.random.default_rng([seed, _LEAVE_OUT_STREAM]).permutation(candidates)
    n_groups = int(np.searchsorted(np.cumsum(np.bincount(codes)[order]), max(n, 1000))) + 1
    return np.flatnonzero(np.isin(codes, order[:n_groups]))


def fit_nested(
    rows: KernelRows, data: TrainingSet, baseline: Baseline, stages: Stages | None = None
) -> SparseGP:
    """Fit the full model; choose the number of representatives, if it is to be chosen.

    The models of the leading half, quarter and eighth of the representatives are fitted as well.
    From the largest on, the number is halved as long as that raises the typical error of groups
    that are left out by less than `_GAIN` of the effort; the error is that of the quantity with
    most labels.
    """
    gp = fit_sparse_gp(rows, data, baseline, stages)
    if not rows.nested:
        return gp
    name, quantity = max(data.quantities.items(), key=lambda item: len(item[1].y))
    r, codes = rows.Phi.shape[1], np.unique(_groups_of_rows(data), return_inverse=True)[1]
    with_labels = np.unique(codes[quantity.rows])
    left_out = _random_groups(codes, with_labels, _PRODUCTS_OF_SIZES / r**2, data.settings.seed)
    of_quantity = np.isin(left_out, quantity.rows)

    def error(gp: SparseGP) -> float:
        z = gp.leave_out(left_out, codes[left_out]).residuals[of_quantity]
        means = group_means(np.abs(z), codes[left_out[of_quantity]])
        return math.exp(typical_log(means)) / 4  # of equal errors: these

    chosen, curve, enough = gp, {r: error(gp)}, True
    gain = _GAIN[data.settings.effort]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what concerns the data was said before
        for size in sorted(rows.nested, reverse=True):
            gp = fit_sparse_gp(rows.leading(size), data, baseline, stages)
            of_double, curve[size] = curve[min(curve)], error(gp)
            enough = enough and of_double > (1 - gain) * curve[size]
            chosen = gp if enough else chosen
    curve = dict(sorted(curve.items()))
    chosen = SparseGP(replace(chosen.rows, size_curve=curve), chosen.full)
    number = len(chosen.rows.origins)
    log.info(
        f"Representatives: {describe_size(number, curve, rows.size_limit, data.settings, name)}."
    )
    return chosen


# --- the ensemble and its calibration -------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble:
    """The full model and the members that are trained on subsamples."""

    gp: SparseGP
    draw: Draw
    weights: Float64Array  #: (r, S): of the whitened kernel rows
    intercepts: Float64Array  #: (S,)
    members: dict[str, Float64Array]  #: (n, S): predictions of the rows of each quantity
    solver: str  #: method that solved the members


def fit_ensemble(
    gp: SparseGP, data: TrainingSet, draw: Draw, stages: Stages | None = None
) -> Ensemble:
    """Solve all members, and predict the training set by each.

    The settings of `data` may differ from those that `gp` was fitted with in what concerns the
    members.
    """
    counts, baseline, of_blocks = draw
    if not counts.shape[1]:
        nothing = {name: np.empty((len(q.y), 0)) for name, q in data.quantities.items()}
        weights = np.empty((gp.rows.Phi.shape[1], 0))
        return Ensemble(gp, draw, weights, np.empty(0), nothing, "posterior")
    with (stages or Stages()).stage("Members"), _few_threads(data, gp.rows.Phi.shape[1]):
        if gp.rows.blocks is not None and of_blocks is not None:
            columns = np.zeros((len(baseline.full) + 2, counts.shape[1]))
            columns[0], columns[1:-1] = 1.0, baseline.full[:, None] - baseline.members
            full, solution, means = fit_block_members(gp.full, gp.rows.blocks, of_blocks, columns)
        else:
            times = np.empty((data.n_rows, counts.shape[1]), dtype=int)
            for name, quantity in data.quantities.items():
                times[quantity.rows] = _member_counts(name, quantity, counts)
            targets = data.y[:, None] - baseline.predict_members(data.design)
            full, solution, means = fit_members(gp.full, gp.rows.Phi, targets[:, None], times)
        weights, intercepts = solution.weights[:, 0] * gp.scale, means[0]
        stacked = gp.rows.Phi @ weights
    members = {name: stacked[q.rows] for name, q in data.quantities.items()}
    members["energy"] += intercepts + baseline.predict_members(data.design)
    iterations = f", {solution.n_iterations} iterations" if solution.n_iterations else ""
    solver = f"{solution.method}{iterations}"
    return Ensemble(SparseGP(gp.rows, full), draw, weights, intercepts, members, solver)


def _member_counts(name: str, quantity: Quantity, counts: IntArray) -> IntArray:
    """Return how often each row of a quantity is in each member: (n, S)."""
    return counts if name == "energy" else counts[quantity.structure]


# --- prediction and calibration -------------------------------------------------------------------


def calibrate(ensemble: Ensemble, data: TrainingSet, stages: Stages | None = None) -> Trained:
    """Choose what is predicted, add posterior members, and calibrate each quantity out of bag."""
    stages, gp = stages or Stages(), ensemble.gp
    (counts, baseline, _), members = ensemble.draw, ensemble.members
    n = int(np.count_nonzero(_out_of_bag(counts)))
    method = with_enough_points(data.settings.calibration, n)
    settings = data.settings.model_copy(update={"calibration": method})
    with stages.stage("Calibration"), _few_threads(data, gp.rows.Phi.shape[1]):
        left_out = _leave_out(gp, data)
        centre = _centre(data, members, counts, left_out)
        available = np.isin(np.arange(len(data.y)), left_out["energy"].rows) & _out_of_bag(counts)
        out_of_bag: dict[str, OutOfBag] = {}
        for name, quantity in data.quantities.items():  # the target is the first
            out_of_bag[name] = calibrate_out_of_bag(
                name,
                quantity,
                members[name],
                counts,
                settings,
                left_out[name].centred(centre),
                n_available=int(np.count_nonzero(available)),
            )
            if settings.calibration == "auto":
                update = {"calibration": out_of_bag[name].method}
                settings = settings.model_copy(update=update)
        _check_labels(data, members, counts, left_out)
    whitening = gp.rows.whitening
    full = gp.process.weights[:, 0] * gp.scale
    rng = np.random.default_rng([settings.seed, _POSTERIOR_STREAM])
    drawn = posterior_deviations(gp.process, settings.n_drawn, rng, whitening.pivots) * gp.scale
    columns = centred(ensemble.weights, full, centre, drawn)
    none = np.zeros(settings.n_drawn)  # intercepts and baselines have no posterior
    fitted = Fitted(
        settings=settings,
        representation=gp.rows.representation,
        representatives=gp.rows.basis.representatives,
        origins=gp.rows.origins,
        kernel_scale=gp.rows.basis.scale,
        # Row-major, as in a file: the order in memory decides how products are rounded.
        weights=np.ascontiguousarray(whitening.kernel_weights(columns)),
        intercepts=centred(ensemble.intercepts, np.asarray(gp.center), centre, none),
        pp_weights=np.ascontiguousarray(whitening.kernel_weights(full)),
        pp_intercept=gp.center,
        baseline=replace(baseline, members=centred(baseline.members, baseline.full, centre, none)),
        calibrations={name: o.calibrations for name, o in out_of_bag.items() if o.calibrations},
        isotropy={name: o.isotropy for name, o in out_of_bag.items() if o.isotropy},
        species_factors={n: o.species_factors for n, o in out_of_bag.items() if o.species_factors},
        conformal={n: o.conformal for n, o in out_of_bag.items() if o.conformal is not None},
        pp_variance=_projected_variance(gp, settings) if settings.keep_pp else None,
        membership=np.minimum(counts, 255).astype(np.uint8),
        training_novelty=gp.rows.novelty,
        largest_ensemble_std=_largest_std(out_of_bag["energy"].data, settings),
        record=_record(data, ensemble, out_of_bag, centre, stages),
        provenance=Provenance(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages={
                "qualms": qualms.__version__,
                **{n: version(n) for n in _PACKAGES},
                **calculator_version(settings.reference),
            },
            data_digest=data.digest,
        ),
    )
    return Trained(fitted, {n: o.data for n, o in out_of_bag.items() if o.data is not None})


class LeftOut(NamedTuple):
    """Rows of a quantity (n,), the groups they belong to, and the full model without each.

    The latter is None where it is not needed.
    """

    rows: IntArray
    groups: IntArray
    full: FullModelData | None

    def centred(self, centre: float) -> LeftOut:
        """Return the same for a prediction with this share of the ensemble mean."""
        return self if self.full is None else self._replace(full=replace(self.full, centre=centre))


def _leave_out(gp: SparseGP, data: TrainingSet) -> dict[str, LeftOut]:
    """Return the full model without rows of each quantity, or without the group of a row.

    All rows, or those of as many random groups as can be left out in a time that is short beside
    the rest of the training.
    """
    settings, groups = data.settings, _groups_of_rows(data)
    if settings.centre == "members" and not settings.n_drawn:
        return {
            name: LeftOut(np.arange(len(quantity.y)), groups[quantity.rows], None)
            for name, quantity in data.quantities.items()
        }
    labels, codes = np.unique(groups, return_inverse=True)
    n = PRODUCTS / gp.rows.Phi.shape[1] ** 2
    rows = _random_groups(codes, np.arange(len(labels)), n, settings.seed)
    owners = np.append(codes, -1)[_owner_rows(data, gp.rows.origins)]
    left_out = gp.leave_out(rows, codes[rows], owners)
    left_out = replace(left_out, has_posterior=settings.n_drawn > 0)
    parts = {}
    for name, quantity in data.quantities.items():
        inside = np.flatnonzero(np.isin(quantity.rows, rows))
        full = left_out.some(np.searchsorted(rows, quantity.rows[inside]))
        if name != "energy" or settings.has_forces or not settings.keep_pp:
            full = replace(full, novelty_std=None)  # not known, or not of predictions
        parts[name] = LeftOut(inside, groups[quantity.rows[inside]], full)
    return parts


def _owner_rows(data: TrainingSet, origins: IntArray) -> IntArray:
    """Return a row of the target, of the structure or atom that each representative (r, 2) is.

    It is −1 for those of other structures, if the data are a sample.
    """
    order = np.argsort(data.source)
    place = np.searchsorted(data.source, origins[:, 0], sorter=order)
    structure = order[np.minimum(place, len(order) - 1)]
    here = data.source[structure] == origins[:, 0]
    rows = np.where(here, structure, -1)
    if data.settings.per_atom:
        for m in np.flatnonzero(here):
            atom = np.searchsorted(data.centers[structure[m]], origins[m, 1])
            rows[m] = data.offsets[structure[m]] + atom
    return rows


def _centre(
    data: TrainingSet,
    members: Mapping[str, Float64Array],
    counts: IntArray,
    left_out: Mapping[str, LeftOut],
) -> float:
    """Return the share λ of the ensemble mean in the prediction, given or of smallest error."""
    settings, n_members = data.settings, counts.shape[1]
    if not n_members or settings.centre == "full":
        return 0.0
    if settings.centre != "auto":
        return 1.0 if settings.centre == "members" else float(settings.centre)
    residuals = []
    for name, (rows, groups, full) in left_out.items():
        assert full is not None, "needed for a blend"
        quantity = data.quantities[name]
        absent = _member_counts(name, quantity, counts)[rows] == 0
        used, mean, std, n_absent = out_of_bag_prediction(members[name][rows], absent)
        if len(np.unique(quantity.structure[rows[used]])) >= MIN_POINTS:
            z = full.kept[used], quantity.y[rows[used]] - mean
            found = Residuals(*z, std, n_absent, groups[used])
            residuals.append(found.mostly(full.without_representatives[used]))
    return fit_centre(residuals, n_members)


def _check_labels(
    data: TrainingSet,
    members: Mapping[str, Float64Array],
    counts: IntArray,
    left_out: Mapping[str, LeftOut],
) -> None:
    """List structures whose labels are far from their out-of-bag predictions.

    Where too few members are without a row, the full model without it is used.
    """
    copies = None
    if data.n_duplicates:
        copies = np.unique(fingerprints(data.frames), return_inverse=True)[1]
    for name, quantity in data.quantities.items():
        residuals, std = np.full((2, len(quantity.y)), np.nan)
        rows, _, full = left_out[name]
        if full is not None:
            residuals[rows], std[rows] = full.residuals, full.posterior_std
        if counts.shape[1]:
            absent = _member_counts(name, quantity, counts) == 0
            used, mean, spread, _ = out_of_bag_prediction(members[name], absent)
            residuals[used], std[used] = quantity.y[used] - mean, spread
        rows = np.flatnonzero(np.isfinite(residuals))
        points = quantity.y[rows], residuals[rows], std[rows], quantity.structure[rows]
        warn_of_outliers(name, find_outliers(*points, copies), data.source)
        if copies is not None and not data.settings.per_atom and name == "energy":
            check_copies(*points[:2], copies[points[3]], data.source[points[3]])


def _largest_std(data: CalibrationData | None, settings: Settings) -> float:
    """Return the largest standard deviation of all members of an out-of-bag point."""
    if data is None:
        return 0.0
    if not settings.n_subsampled or data.posterior_std is None:
        return float(data.ensemble_std.max())
    n, k = settings.n_subsampled - 1, max(settings.n_drawn - 1, 0)
    squares = n * data.ensemble_std**2 + k * data.posterior_std**2
    return float(np.sqrt(squares.max() / (settings.n_subsampled + settings.n_drawn - 1)))


class OutOfBag(NamedTuple):
    """Out-of-bag points of one quantity, the calibrations fitted to them, and their structures."""

    data: CalibrationData | None
    calibrations: dict[str, Calibration]
    n_structures: int
    conformal: Conformal | None = None  #: of the calibration that is wanted
    method: str = "none"  #: that calibration
    species_factors: Mapping[str, float] = {}  #: by which it is multiplied
    isotropy: float = 0.0  #: of vectors


def calibrate_out_of_bag(
    name: str,
    quantity: Quantity,
    members: Float64Array,
    counts: IntArray,
    settings: Settings,
    left_out: LeftOut,
    *,
    n_available: int,
) -> OutOfBag:
    """Fit every calibration of a quantity to points that the model was trained without.

    Members (n, S) are predictions of all rows, and counts (N, S) those of the rows of the target in
    each member. A target without errors is not calibrated; nor are forces, or stresses, of too few
    of the available structures, for which the factor of the energy is used.
    """
    rows, wanted = left_out.rows, settings.calibration
    y, members, structure = quantity.y[rows], members[rows], quantity.structure[rows]
    absent = (_member_counts(name, quantity, counts) == 0)[rows]
    used = _out_of_bag(~absent)
    species = None if quantity.species is None else quantity.species[rows]
    if name == "energy":
        n_structures = len(np.unique(structure[used]))
        unscaled = NoCalibration(n_subsampled=settings.n_subsampled if settings.n_drawn else 0)
        names = {"none", wanted} - {"auto"}
        none = OutOfBag(None, dict.fromkeys(names, unscaled), 0)
        if np.ptp(quantity.y) == 0:
            _warn("All targets are the same: there is nothing to learn, and the uncertainty is 0.")
            return none
        try:
            data = _points(y, members, absent, left_out)
        except CalibrationError as error:
            if wanted != "none" and not isinstance(error, ExactFitError):
                remedy = "A model with `uncertainty='posterior'` needs no subsamples."
                raise CalibrationError(f"{error} {remedy}") from None
            _warn(f"{error} The ensemble standard deviation is not calibrated.")
            return none
        found = _fit_methods(data, settings)
        method = best_method(data, found) if wanted == "auto" else wanted
        found[method], scaled, factors = _by_species(found[method], data, species)
        conformal = found[method].conformal(scaled)
        return OutOfBag(data, found, n_structures, conformal, method, factors)
    if members.shape[1] or left_out.full is None:
        apart = not_zero_by_symmetry(y, members)
    else:
        p = left_out.full.posterior_std
        # A variance of zero, to rounding, has this standard deviation.
        apart = p > _ROUNDING**0.5 * p.max(initial=0.0)
    apart = apart if apart.any() else np.ones(len(rows), dtype=bool)
    n_structures = len(np.unique(structure[apart & used]))
    if _too_few(name, n_structures, n_available, wanted):
        return OutOfBag(None, {}, 0)
    try:
        data, scaled, isotropy = _components(quantity, members, absent, left_out, apart, settings)
        found = _fit_methods(scaled, settings)
        of_points = None if species is None else species[apart]
        found[wanted], scaled, factors = _by_species(found[wanted], scaled, of_points)
    except CalibrationError as error:
        if wanted != "none":
            _warn(f"{name}: {error} The factor that calibrates energies is used.")
        return OutOfBag(None, {}, 0)
    conformal = found[wanted].conformal(scaled)
    return OutOfBag(data, found, n_structures, conformal, wanted, factors, isotropy)


def _points(
    y: Float64Array, members: Float64Array, absent: BoolArray, left_out: LeftOut
) -> CalibrationData:
    """Return out-of-bag points: of the members and the full model, or of one of the two."""
    _, groups, full = left_out
    if full is not None and not absent.shape[1]:
        return full.alone(groups)
    return calibration_data(y, members, absent, full=full, groups=groups)


def _components(
    quantity: Quantity,
    members: Float64Array,
    absent: BoolArray,
    left_out: LeftOut,
    apart: BoolArray,
    settings: Settings,
) -> tuple[CalibrationData, CalibrationData, float]:
    """Return points of forces or stresses, as they are and scaled, and their isotropy.

    Components that are zero by symmetry are left out. Scaled ones are divided by `component_share`,
    and have the standard deviations of their vectors. The isotropy has the highest likelihood.
    """
    rows, groups, full = left_out
    factor = quantity.factor[rows]
    of_components = None if full is None else full.some(apart).scaled(factor[apart])
    data = _points(
        (quantity.y[rows] * factor)[apart],
        (members * factor[:, None])[apart],
        absent[apart],
        LeftOut(rows[apart], groups[apart], of_components),
    )
    used = np.flatnonzero(apart)[data.rows]
    ensemble_std = np.zeros(len(rows))
    if absent.shape[1]:
        found = out_of_bag_prediction(members, absent)
        ensemble_std[found.used] = found.std
    elif full is not None:
        ensemble_std = full.posterior_std
    r, p = (_pooled(quantity, rows, ensemble_std) * factor)[used], None
    if full is not None and data.posterior_std is not None:
        p = (_pooled(quantity, rows, full.posterior_std) * factor)[used]
    assert quantity.multiplicity is not None
    n_components = 6 if np.any(quantity.multiplicity > 1) else 3
    m = quantity.multiplicity[rows][used] / MULTIPLICITY[n_components].mean()
    fits = []
    for isotropy in ISOTROPIES if settings.calibration != "none" else (0.0,):
        share = component_share(data.ensemble_std, r, isotropy, m)
        scaled = replace(
            data,
            residuals=data.residuals / share,
            ensemble_std=r,
            posterior_std=p,
            n_components=INDEPENDENT_COMPONENTS,
            divided_by=share,
        )
        likelihood = fit_out_of_bag(scaled, settings.calibration).log_likelihood
        fits.append((likelihood, isotropy, scaled))
    _, isotropy, scaled = max(fits, key=lambda fit: fit[0])
    if settings.n_subsampled:
        # Anisotropy by chance is ∝ 1/(c − 1) of c members, and less of all than out of bag.
        odds = (float(np.mean(data.n_members)) - 1) / (settings.n_subsampled - 1)
        isotropy = isotropy * odds / (isotropy * odds + 1 - isotropy)
    return data, scaled, isotropy


def _by_species(
    calibration: Calibration, data: CalibrationData, species: IntArray | None
) -> tuple[Calibration, CalibrationData, Mapping[str, float]]:
    """Fit a calibration again with a factor of σ for each species; return its points as well.

    `data.rows` are their places among the species given, and they are divided by these factors,
    whose mean square is one.
    """
    nothing: tuple[Calibration, CalibrationData, dict[str, float]] = calibration, data, {}
    if species is None or calibration.method == "none":
        return nothing
    symbols = np.array(chemical_symbols)[species[data.rows]]
    some = out_of_bag_points(data, calibration.method)
    some &= np.arange(len(some)) % (-(-len(some) // _ENOUGH_POINTS)) == 0
    if len(np.unique(symbols[some])) < 2:
        return nothing
    points = data.some(some)
    grouped = fit_grouped(points, calibration.method, symbols[some], clusters=points.groups)
    factors = grouped.factors(symbols)
    factors /= np.sqrt(data.mean(factors**2))
    if np.ptp(factors) < _EQUAL:
        return nothing
    scaled = replace(data, residuals=data.residuals / factors, divided_by=data.scale * factors)
    found = fit_out_of_bag(scaled, calibration.method)
    of_species = {str(s): float(factors[symbols == s][0]) for s in np.unique(symbols)}
    return replace(found, n_subsampled=calibration.n_subsampled), scaled, of_species


def _fit_methods(data: CalibrationData, settings: Settings) -> dict[str, Calibration]:
    """Fit every method, so that they can be compared; the one that is wanted must succeed."""
    n = settings.n_subsampled if settings.n_drawn else 0
    found: dict[str, Calibration] = {}
    for method in MODEL_METHODS:
        try:
            found[method] = replace(fit_out_of_bag(data, method), n_subsampled=n)
        except CalibrationError:
            if method == settings.calibration:
                raise
    return found


def _pooled(quantity: Quantity, rows: IntArray, std: Float64Array) -> Float64Array:
    """Return the standard deviation of whole vectors, over known components, for their rows."""
    assert quantity.vector is not None
    assert quantity.multiplicity is not None
    w, vector = quantity.multiplicity[rows], quantity.vector[rows]
    squares = np.bincount(vector, w * std**2) / np.maximum(np.bincount(vector, w), 1.0)
    return np.asarray(np.sqrt(squares)[vector])


def not_zero_by_symmetry(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree on to rounding."""
    largest = float(np.abs(y).max(initial=0.0))
    return np.asarray(np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY))


def _too_few(name: str, n: int, available: int, wanted: str) -> bool:
    """Return whether n out-of-bag structures are too few for a calibration, with a warning."""
    too_few = n < min(_ENOUGH[name], available)
    if wanted != "none" and n < min(_WELL, available):
        effect = "the calibration is poorly determined."
        if too_few:
            effect = f"{_ENOUGH[name]} are needed to calibrate; the factor of energies is used."
        _warn(f"{name}: {counted(n, 'out-of-bag structure')}; {effect}")
    return too_few


def _projected_variance(gp: SparseGP, settings: Settings) -> ProjectedVariance:
    precision: Any = np.float64 if settings.learns_forces else np.float32
    factors = (gp.rows.whitening.factor, gp.process.factor)
    whitening, posterior = (np.ascontiguousarray(f, dtype=precision) for f in factors)
    return ProjectedVariance(whitening, posterior, gp.process.noise_variance, gp.scale**2)


def _record(
    data: TrainingSet,
    ensemble: Ensemble,
    out_of_bag: Mapping[str, OutOfBag],
    centre: float,
    stages: Stages,
) -> Record:
    gp = ensemble.gp
    quantities = {}
    for name, quantity in data.quantities.items():
        z = None if (found := out_of_bag[name].data) is None else found.residuals
        quantities[name] = QuantityRecord(
            n_rows=len(quantity.y),
            n_without=quantity.n_without,
            n_out_of_bag=0 if z is None else len(z),
            n_out_of_bag_structures=out_of_bag[name].n_structures,
            rmse=None if z is None else float(np.sqrt(np.mean(z**2))),
            mae=None if z is None else float(np.mean(np.abs(z))),
            noise=float(np.sqrt(gp.noise[name])),
        )
    return Record(
        n_structures=len(data.frames),
        n_environments=data.n_environments,
        n_isolated=data.n_isolated,
        n_duplicates=data.n_duplicates,
        state=dict(*data.states) if len(data.states) == 1 else None,
        quantities=quantities,
        centre=centre,
        effective_rank=len(gp.rows.origins),
        preset=data.preset,
        size_curve=gp.rows.size_curve,
        size_limit=gp.rows.size_limit,
        target_std=float(np.sqrt(np.mean(gp.y[: len(data.y)] ** 2))) or gp.scale,
        solver=ensemble.solver,
        seconds=dict(stages.seconds),
    )
