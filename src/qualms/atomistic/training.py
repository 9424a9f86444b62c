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
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import combinations_with_replacement
from typing import Any, NamedTuple, TypeVar

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline, anchors, fit_baseline, spans
from qualms.atomistic.fitted import Fitted, ProjectedVariance, Provenance, QuantityRecord, Record
from qualms.atomistic.forces import fill_rows, scale_rows
from qualms.atomistic.kernel_rows import LANDMARKS, Basis, select_representatives
from qualms.atomistic.label_checks import check_derivatives, warn_of_outliers
from qualms.atomistic.labels import Quantity, TrainingSet, collect_labels
from qualms.atomistic.settings import Settings, parse_memory
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, fit_out_of_bag, out_of_bag_points
from qualms.calibration.methods import NoCalibration
from qualms.errors import (
    CalibrationError,
    ExactFitError,
    InputError,
    NumericalError,
    QualmsWarning,
    counted,
)
from qualms.features.compression import sample_size
from qualms.features.gradients import BATCH as GRADIENTS
from qualms.features.soap import (
    BATCH,
    BLOCK,
    SERIAL,
    Compression,
    Representation,
    fit_representation,
    resolve_compression,
    stop_workers,
    stream_features,
    structure_blocks,
)
from qualms.gp.ensemble import (
    MIN_ABSENT,
    MemberSolution,
    draw_members,
    membership_counts,
    out_of_bag_prediction,
    solve_members,
)
from qualms.gp.kernels import unit_scale
from qualms.gp.linalg import Whitening, whiten
from qualms.gp.noise import noise_grid, select_joint_noise, select_noise
from qualms.gp.sparse_gp import (
    ProjectedProcess,
    fit_projected_process,
    gram_matrix,
    leave_one_out_residuals,
)
from qualms.progress import Stages

log = logging.getLogger(__name__)

#: Share of the training structures that would not count as extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Features are float32, or with forces float64: see `qualms.gp.linalg.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: How often noise variances that are lost in rounding are raised, by a factor of ten.
_ATTEMPTS = 8
#: Representatives and rows up to which matrices are small, and one thread is the fastest.
_SMALL, _FEW = 500, 50_000
#: Components on which members agree to this share of the largest label, or to this number, are zero
#: by symmetry.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Out-of-bag structures from which components have a calibration of their own, and from which no
#: warning is needed. Errors within a structure are correlated. The factor of energies is as good
#: for forces as one from fewer than ten structures; for stresses it is often too small by half.
_ENOUGH, _WELL = {"forces": 10, "stress": 3}, 10
#: Parameter of the noise variance of each quantity.
_NOISES = {"energy": "noise", "forces": "forces_noise", "stress": "stress_noise"}
_PACKAGES = ("qualms", "numpy", "scipy", "ase", "dscribe", "featomic", "safetensors")

T = TypeVar("T")


class Trained(NamedTuple):
    """A trained model, and the out-of-bag points of each quantity, which are not stored with it."""

    fitted: Fitted
    out_of_bag: dict[str, CalibrationData]


def fit(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | None = None,
    *,
    threads: int = 1,
    stages: Stages | None = None,
) -> Trained:
    """Train a model on labelled structures and calibrate it on out-of-bag points.

    Structures of the same group are in or out of a subsample together.
    """
    stages = stages or Stages()
    with threadpool_limits(limits=threads):
        data = collect_labels(frames, settings, groups)
        draw = draw_ensemble(data)
        rows = compute_rows(data, memory=settings.memory, threads=threads, stages=stages)
        gp = fit_sparse_gp(rows, data, draw.baseline, stages)
        return fit_ensemble(gp, data, draw, stages)


# --- the draw of members --------------------------------------------------------------------------


class Draw(NamedTuple):
    """How often each row of the target is in each member, (N, N_R), and the baselines."""

    counts: IntArray
    baseline: Baseline


def draw_ensemble(data: TrainingSet) -> Draw:
    """Draw the members and fit their baselines; reject data that are too few.

    A member whose rows do not determine the baseline of the composition, because it lacks a rare
    element, gets the few rows that do.
    """
    settings, n, groups, design = data.settings, len(data.y), data.row_groups, data.design
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if settings.resample == "atoms" else "different labelled structures"
        raise InputError("frames", f"{n_groups} {what}", f"at least 2 {what} to draw from")
    rng = np.random.default_rng(settings.seed)
    size, with_replacement = settings.subsample, settings.replace
    drawn = draw_members(n, settings.n_members, size, rng, replace=with_replacement, groups=groups)
    counts = membership_counts(drawn, n)
    lacking = np.flatnonzero(~spans(design, counts))
    anchored = settings.baseline == "composition" and len(lacking) > 0
    if anchored:
        here = np.ix_(np.isin(groups, groups[anchors(design)]), lacking)
        counts[here] = np.maximum(counts[here], 1)
    if settings.calibration != "none" and not _out_of_bag(counts).any():
        if anchored:
            raise InputError(
                "baseline",
                "'composition'",
                "more different structures (or groups): members that lack an element get the "
                "structures that determine it, and none remains to calibrate on",
                "Use more structures, or baseline='mean'.",
            )
        raise InputError(
            "subsample",
            size,
            f"subsamples that leave some of the {n} rows out of at least {MIN_ABSENT} of "
            f"{settings.n_members} members, to calibrate on",
            "Use smaller subsamples, more members or more structures, or calibration='none'.",
        )
    baseline = fit_baseline(
        settings.baseline,
        design,
        data.y,
        species=data.species,
        kind=settings.kind,
        counts=counts,
        isolated=data.isolated,
    )
    return Draw(counts, baseline)


def _out_of_bag(counts: IntArray) -> BoolArray:
    """Return which rows (N,) enough members are without, given counts (N, N_R)."""
    enough: BoolArray = (counts == 0).sum(axis=1) >= MIN_ABSENT
    return enough


# --- features, representatives, kernel rows -------------------------------------------------------


@dataclass(frozen=True)
class KernelRows:
    """Whitened kernel rows of a training set."""

    representation: Representation
    basis: Basis  #: representatives and the kernel with them, scaled by Eq. (17), Musil et al. 2019
    origins: IntArray  #: (r, 2): structure, as given to `fit`, and atom of each representative
    whitening: Whitening  #: of the scaled kernel
    Phi: Float64Array  #: (N, r): rows of all quantities
    k_xx: Float64Array  #: (n,): diagonal of the scaled kernel, of the rows of the target
    #: largest and mean novelty of the environments of a structure that few structures exceed
    novelty: tuple[float, float]


def compute_rows(
    data: TrainingSet,
    *,
    memory: str | float | None = None,
    threads: int = 1,
    stages: Stages | None = None,
) -> KernelRows:
    """Compute features, select representatives, and compute the kernel rows of all labels."""
    stages = stages or Stages()
    n_block, n_workers = _plan_memory(data, parse_memory(memory), threads)
    source = _Source(data, _fit_representation(data, stages), n_workers, stages)
    X = source.array(0, len(data.frames)) if n_block is None else None
    if X is not None:
        stop_workers()  # and free their memory
    environments, representatives = _select(source, X, n_block)
    whitening = _whiten(source, representatives)
    environments = environments[whitening.pivots]
    representatives = np.ascontiguousarray(representatives[whitening.pivots])
    # The leading components of compressed features are multiplied in float64 anyway.
    kernel, compressed = source.representation.kernel, source.representation.projections
    exact = representatives if compressed else representatives.astype(np.float64)
    plain = Basis(kernel, exact, 1.0, data.settings.per_atom)
    K, k_xx, scale, novelty = _kernel_rows(source, plain, environments, X)
    del X  # before the largest matrices are made
    whitening = replace(whitening, factor=whitening.factor * np.sqrt(scale))
    with stages.stage("Whitening"), _few_threads(data, len(environments)):
        Phi = np.asarray(whitening.features(K, overwrite=True), dtype=np.float64)
    structure, place = _located(data, environments)
    atom = [data.centers[s][p] for s, p in zip(structure, place, strict=True)]
    origins = np.stack([data.source[structure], np.array(atom)], axis=1).astype(np.int64)
    basis = replace(plain, representatives=representatives, scale=scale)
    precise = replace(source.representation, precise=True)
    return KernelRows(precise, basis, origins, whitening, Phi, k_xx, novelty)


def _plan_memory(data: TrainingSet, limit: float, n_workers: int) -> tuple[int | None, int]:
    """Return environments per block if features are recomputed (None if kept), and processes.

    Sizes in bytes are those of the largest arrays of each stage; 0.5 GB is for the interpreter and
    libraries, 0.25 GB for those of each worker process.
    """
    settings, n = data.settings, data.n_environments
    M, batch = min(settings.n_representatives, n), min(BATCH, n)
    widths = Representation(settings.representation, tuple(data.species)).widths
    compression = _compression(data)
    d = d_raw = sum(widths)
    if compression is not None:
        d = sum(min(w, compression.n_features) for w in widths)
    base = 0.5e9 + 4e3 * len(data.frames) + 100.0 * n
    rows = 8.0 * data.n_rows * M
    products = 12.0 * BLOCK * M + 4.0 * BLOCK * d
    solving = rows + 48.0 * M**2 + min(0.5 * rows, 2e9) + 128.0 * settings.n_members * data.n_rows
    if settings.learns_forces:
        # Derivatives by some 30 neighbours, and Gram matrices of parts of the data.
        products += 48.0 * GRADIENTS * 30 * (d_raw + M)
        solving += (20 if M <= 800 else 6) * 8.0 * M**2
    picking = 4.0 * M * d + 100e6
    if settings.selection == "cur":
        landmarks = min(2 * M, n)
        picking += 48.0 * landmarks**2 + 12.0 * landmarks * d
    compressing = 12.0 * sample_size(n) * d_raw + 24.0 * d_raw**2 if d < d_raw else 0.0

    def size(n: float) -> str:
        return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"

    def needed(n_workers: int) -> tuple[float, float, float]:
        workers = n_workers if n >= SERIAL else 1
        batches = 20.0 * batch * d_raw + 8.0 * workers * batch * d
        batches += workers * (0.25e9 + 12.0 * batch * d_raw) if workers > 1 else 0.0
        least = max(compressing, solving, batches + rows + products)
        keep = base + max(least, 4.0 * n * d + max(batches, 1.1 * picking, rows + products))
        beside = base + batches + picking  # while representatives are selected block by block
        return keep, max(base + least, beside + 8.8 * M * d), beside

    keep, recompute, beside = needed(n_workers)
    while n_workers > 1 and min(keep, recompute) > limit:
        n_workers //= 2
        keep, recompute, beside = needed(n_workers)
    if min(keep, recompute) > limit:
        raise InputError(
            "memory",
            size(limit),
            f"at least {size(1.01 * min(keep, recompute))}",
            "Allow more memory, or use fewer representatives or training structures.",
        )
    n_block, use = None, keep
    if keep > limit:
        # Candidates of all blocks are kept, at most M of each.
        n_block = max(int((limit - beside) / (4.4 * d)) // 2, 2 * M)
        use = max(recompute, beside + 4.4 * d * n_block)
    log.info(
        f"{n:,} environments × {d:,} features ({'kept' if n_block is None else 'computed twice'}), "
        f"{data.n_rows:,} labels, {M:,} representatives: about {size(use)} of memory "
        f"(limit {size(limit)})."
    )
    return n_block, n_workers


def _compression(data: TrainingSet) -> Compression | None:
    settings, n, smooth = data.settings, data.n_environments, data.settings.has_forces
    M = min(settings.n_representatives, n)
    return resolve_compression(settings.representation, data.species, n, M, derivatives=smooth)


def _fit_representation(data: TrainingSet, stages: Stages) -> Representation:
    """Return the representation, with a compression fitted to random structures."""
    soap, species = data.settings.representation, tuple(data.species)
    compression = _compression(data)
    if compression is None and soap.normalize:
        return Representation(soap, species)
    with stages.stage("Compression"):
        picked = _sample(data, np.random.default_rng([data.settings.seed, 1]))
        frames, centers = [data.frames[i] for i in picked], [data.centers[i] for i in picked]
        return fit_representation(soap, species, frames, centers, compression)


def _sample(data: TrainingSet, rng: np.random.Generator) -> IntArray:
    """Return random structures with enough environments to fit a compression.

    The first structure with each pair of elements comes first: features of a pair that the sample
    lacks would be lost.
    """
    order = rng.permutation(len(data.frames))
    seen: set[tuple[int, int]] = set()
    first = []
    for place, i in enumerate(order):
        present = np.unique(data.frames[i].numbers).tolist()
        pairs = set(combinations_with_replacement(present, 2))
        if not pairs <= seen:
            seen |= pairs
            first.append(place)
    order = np.concatenate([order[first], np.delete(order, first)])
    sizes = np.diff(data.offsets)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), sample_size(data.n_environments))) + 1
    return order[: max(enough, len(first))]


@dataclass(frozen=True)
class _Source:
    """Computes the features of a training set, as often as they are needed."""

    data: TrainingSet
    representation: Representation
    n_workers: int
    stages: Stages

    def blocks(self, first: int, last: int) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins."""
        data = self.data
        pairs = zip(data.frames[first:last], data.centers[first:last], strict=True)
        for batch in stream_features(self.representation, pairs, n_workers=self.n_workers):
            yield batch.features, batch.offsets

    def array(self, first: int, last: int) -> FloatArray:
        """Return the features of the environments of some structures: (n, d) of float32."""
        n, done = int(self.data.offsets[last] - self.data.offsets[first]), 0
        X = np.empty((n, self.representation.n_features), dtype=np.float32)
        with self.stages.stage("Features", n) as advance:
            for features, _ in self.blocks(first, last):
                X[done : done + len(features)] = features
                done += len(features)
                advance(done)
        return X


def _select(
    source: _Source, X: FloatArray | None, n_block: int | None
) -> tuple[IntArray, FloatArray]:
    """Select representatives: environments, counted through all structures, and features.

    Without features X of all environments they are selected within blocks of about `n_block`
    environments, and then among the environments selected from all blocks.
    """
    data, kernel, offsets = source.data, source.representation.kernel, source.data.offsets
    rng, n = np.random.default_rng([data.settings.seed, 3]), data.n_environments
    blocks = [(0, len(data.frames))]
    if n_block is not None:
        size = -(-n // max(-(-n // n_block), 1))  # blocks of equal size
        blocks = list(structure_blocks(offsets, size))

    def select(features: FloatArray, environments: IntArray, settings: Settings) -> IntArray:
        total = min(settings.n_representatives, len(features))
        species = data.center_species[environments]
        with source.stages.stage("Representatives", total) as advance:
            return select_representatives(features, kernel, species, settings, rng, advance)

    settings = data.settings
    if len(blocks) > 1 and settings.selection == "cur":  # which selects among farthest points
        more = {"selection": "fps", "n_representatives": LANDMARKS * settings.n_representatives}
        settings = settings.model_copy(update=more)
    picked, candidates = [], []
    for first, last in blocks:
        environments = np.arange(offsets[first], offsets[last])
        if len(environments):
            features = source.array(first, last) if X is None else X
            chosen = select(features, environments, settings)
            picked.append(environments[chosen])
            candidates.append(features[chosen])
            del features
    if len(picked) == 1:
        return picked[0], candidates[0]
    environments, features = np.concatenate(picked), np.concatenate(candidates)
    chosen = select(features, environments, data.settings)
    return environments[chosen], features[chosen]


def _whiten(source: _Source, representatives: FloatArray) -> Whitening:
    with source.stages.stage("Whitening"):
        exact = representatives.astype(np.float64)
        rtol = _RTOL_OF_FORCES if source.data.settings.learns_forces else _RTOL
        whitening = whiten(np.asarray(source.representation.kernel(exact, exact)), rtol=rtol)
    if whitening.negative > 1e-5:
        _warn(
            "The kernel is not positive semi-definite; its negative part was dropped. Use an "
            "integer exponent."
        )
    return whitening


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)


def _kernel_rows(
    source: _Source, plain: Basis, environments: IntArray, X: FloatArray | None
) -> tuple[Float64Array, Float64Array, float, tuple[float, float]]:
    """Return scaled K_NM and k_XX, the scale by Eq. (17), and novelties few structures exceed."""
    data, n = source.data, len(source.data.y)
    own = _own_representatives(data, environments)
    K = np.zeros((data.n_rows, len(plain.representatives)))
    diagonal, novelty = np.empty(n), np.empty((len(data.frames), 2))
    structure = row = done = 0
    blocks = source.blocks(0, len(data.frames)) if X is None else _cut(X, data.offsets)
    with source.stages.stage("Kernel rows", data.n_environments) as advance:
        for block, offsets in blocks:
            here = slice(structure, structure + len(offsets) - 1)
            rows = plain.rows(block, offsets, novelty=novelty[here], own=own[here])
            K[row : row + len(rows)] = rows
            diagonal[row : row + len(rows)] = plain.prior_variance(block, offsets)
            structure, row, done = here.stop, row + len(rows), done + len(block)
            advance(done)
    stop_workers()
    if data.derivatives is not None:
        scales = scale_rows(source.representation, plain.representatives)
        with source.stages.stage("Rows of forces", data.n_environments) as advance:
            fill_rows(K[:n], K[n:], data.frames, data.derivatives, scales, advance)
    scale = unit_scale(1.0, diagonal)
    K *= scale
    largest, mean = np.quantile(novelty, _NOT_NOVEL, axis=0).tolist()
    return K, diagonal * scale, scale, (largest, mean)


def _cut(X: FloatArray, offsets: IntArray) -> Iterator[tuple[FloatArray, IntArray]]:
    """Yield blocks of features, and where each structure begins, as `_Source.blocks`."""
    for first, last in structure_blocks(offsets):
        edges = offsets[first : last + 1]
        yield X[edges[0] : edges[-1]], edges - edges[0]


def _located(data: TrainingSet, environments: IntArray) -> tuple[IntArray, IntArray]:
    """Return the structure of each of some environments, and the place among its centres."""
    structure = np.searchsorted(data.offsets, environments, side="right") - 1
    return structure, environments - data.offsets[structure]


def _own_representatives(data: TrainingSet, environments: IntArray) -> list[IntArray]:
    """Return the representatives that come from each structure, or from its group."""
    groups = data.groups[_located(data, environments)[0]]
    sizes = np.bincount(groups, minlength=int(data.groups.max()) + 1)
    by_group = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
    return [by_group[g] for g in data.groups]


def _few_threads(data: TrainingSet, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    small = rank <= _SMALL and data.n_rows <= _FEW
    return threadpool_limits(limits=1 if small else None)


# --- the sparse Gaussian process ------------------------------------------------------------------


@dataclass(frozen=True)
class SparseGP:
    """The projected process of all rows, in the basis of the whitened kernel rows."""

    rows: KernelRows
    process: ProjectedProcess  #: of labels divided by `scale`
    y: Float64Array  #: (N,): labels of all rows less the full baseline and the centre
    center: float  #: mean of the target less the baseline
    scale: float  #: square root of the prior variance
    weight: Float64Array  #: (N,): of each row: noise variances are that of the energy divided by it
    #: noise variance of each quantity, in its units squared (those of "stress": virials per atom)
    noise: dict[str, float]

    def leave_out(self, rows: IntArray, groups: IntArray) -> FullModelData:
        """Return the full model without each of some rows (n,), or without its group.

        Novelty is known for rows of the target alone.
        """
        Phi, k_xx = self.rows.Phi[rows], self.rows.k_xx
        y, weight = self.y[rows] / self.scale, self.weight[rows]
        found = leave_out(self.process, Phi, y, sample_weight=weight, groups=groups)
        p = np.sqrt(found.variance) * self.scale
        q = np.zeros(len(rows))
        target = rows < len(k_xx)
        q2 = novelty_variance(Phi[target, :N_LEADING], k_xx[rows[target]])
        q[target] = np.sqrt(q2) * self.scale
        return FullModelData(found.residuals[:, 0] * self.scale, p, q, 0.0)

    def with_noise(self, noise: dict[str, float]) -> SparseGP:
        """Return the same model with other noise variances, in the same ratio."""
        if noise == self.noise:
            return self
        process = _solve(self.rows.Phi, self.y, self.scale, noise, self.weight, self.process.gram)
        return replace(self, process=process, noise=noise)


def fit_sparse_gp(
    rows: KernelRows, data: TrainingSet, baseline: Baseline, stages: Stages | None = None
) -> SparseGP:
    """Select the noise variance of each quantity and solve the full model."""
    settings, Phi = data.settings, rows.Phi
    target = data.y - baseline.predict(data.design)
    alone = len(data.quantities) == 1
    with (stages or Stages()).stage("Full model"), _few_threads(data, Phi.shape[1]):
        if not alone:
            check_derivatives(Phi, target, data)
        weight = _energy_weight(data)
        centered = settings.baseline != "none"
        center = float(np.average(target, weights=weight)) if centered else 0.0
        y = _stack(data, {"energy": target - center})
        scale = np.sqrt(_prior_variance(Phi, y, data))
        if alone and scale <= 1e-14 * abs(center):
            # What rounding leaves of a constant target; any scale will do.
            y, scale = np.zeros_like(y), 1e-6 * (abs(center) or 1.0)
        gram = gram_matrix(Phi) if alone else None
        noise = _select_noise(Phi, y, scale, weight, data, gram)
        ratios = {
            name: np.full(len(quantity.y), noise["energy"] / noise[name])
            for name, quantity in data.quantities.items()
        }
        weight = _stack(data, ratios | {"energy": weight})
        gram = gram_matrix(Phi, weight) if gram is None else gram

        def solve(noise: dict[str, float]) -> SparseGP:
            process = _solve(Phi, y, scale, noise, weight, gram)
            return SparseGP(rows, process, y, center, scale, weight, noise)

        return _with_raised_noise(solve, noise)


def _solve(
    Phi: Float64Array,
    y: Float64Array,
    scale: float,
    noise: Mapping[str, float],
    weight: Float64Array,
    gram: Float64Array | None,
) -> ProjectedProcess:
    relative = noise["energy"] / scale**2
    return fit_projected_process(Phi, y / scale, relative, sample_weight=weight, gram=gram)


def _stack(data: TrainingSet, blocks: Mapping[str, Float64Array]) -> Float64Array:
    """Return values of all rows (N,): labels, or the values given for some quantities."""
    values = np.empty(data.n_rows)
    for name, quantity in data.quantities.items():
        values[quantity.rows] = blocks.get(name, quantity.y)
    return values


def _energy_weight(data: TrainingSet) -> Float64Array:
    """Return the weights of the target: one, or with noise per structure (n_atoms/mean)².

    A noise σ of the energy of n atoms is σ/n per atom.
    """
    if data.settings.noise_per == "atom":
        return np.ones(len(data.y))
    sizes = np.array([len(atoms) for atoms in data.frames], dtype=np.float64)
    return np.asarray((sizes / sizes.mean()) ** 2)


def _prior_variance(Phi: FloatArray, y: Float64Array, data: TrainingSet) -> float:
    """Return the prior variance of the weights, Eq. (17), Musil et al. 2019.

    It gives the target its variance; or forces and virials theirs, if they are learned, since most
    of the variance of the energies of one molecule is common to all.
    """
    n = len(data.y)
    if len(data.quantities) == 1:
        return float(np.mean(y**2))
    blocks = (Phi[start : start + 4096] for start in range(n, len(Phi), 4096))
    squares = sum(float(np.sum(np.square(block, dtype=np.float64))) for block in blocks)
    return float(np.sum(y[n:] ** 2)) / squares if squares > 0 and np.any(y[n:]) else 1.0


def _select_noise(
    Phi: FloatArray,
    y: Float64Array,
    scale: float,
    energy_weight: Float64Array,
    data: TrainingSet,
    gram: Float64Array | None,
) -> dict[str, float]:
    """Return the noise variance of each quantity, given or selected."""
    settings = data.settings
    options = (settings.noise, settings.forces_noise, settings.stress_noise)
    given = dict(zip(_NOISES, options, strict=True))
    known = {name: v for name in data.quantities if not isinstance(v := given[name], str)}
    if len(known) == len(data.quantities):
        return known
    criterion = settings.noise if isinstance(settings.noise, str) else "loo"
    if len(data.quantities) == 1:
        if not np.any(y):
            return {"energy": scale**2}
        Y, grid = (y / scale)[:, None], noise_grid(1.0)
        groups = None if settings.resample == "atoms" else data.row_groups
        found = select_noise(Phi, Y, grid, criterion=criterion, gram=gram, groups=groups)
        return {"energy": found.noise_variance * scale**2}
    kind, groups = np.zeros(data.n_rows, dtype=np.intp), np.empty(data.n_rows, dtype=np.intp)
    weight = np.ones(data.n_rows)
    weight[: len(energy_weight)] = energy_weight
    for name, quantity in data.quantities.items():
        kind[quantity.rows] = [*_NOISES].index(name)
        groups[quantity.rows] = data.groups[quantity.structure]
    joint = select_joint_noise(
        Phi,
        y,
        kind,
        groups,
        prior=scale**2,
        weight=weight,
        criterion=criterion,
        energies=known.get("energy"),
        forces=known.get("forces"),
        virials=known.get("stress"),
    )
    selected = {"energy": joint.energies, "forces": joint.forces, "stress": joint.virials}
    return {name: float(selected[name] or 0.0) for name in data.quantities}


def _with_raised_noise(solve: Callable[[dict[str, float]], T], noise: Mapping[str, float]) -> T:
    """Solve with given noise variances, or with larger ones if they are lost in rounding."""
    text = ", ".join(f"{_NOISES[name]} {value:.1e}" for name, value in noise.items())
    problem = f"The Gram matrix is numerically singular with these noise variances: {text}"
    remedy = "Check for labels much larger than all others, or set larger noise variances."
    for factor in 10.0 ** np.arange(_ATTEMPTS):
        try:
            found = solve({name: float(factor * value) for name, value in noise.items()})
        except NumericalError:
            continue
        if factor > 1:
            _warn(f"{problem}. All were multiplied by {factor:.0e}. {remedy}")
        return found
    raise NumericalError(f"{problem}, and with variances {factor:.0e} times as large. {remedy}")


# --- the ensemble and its calibration -------------------------------------------------------------


def fit_ensemble(
    gp: SparseGP, data: TrainingSet, draw: Draw, stages: Stages | None = None
) -> Trained:
    """Solve all members and calibrate each quantity on out-of-bag points.

    The settings of `data` may differ from those that `gp` was fitted with in what concerns the
    members.
    """
    stages, settings = stages or Stages(), data.settings
    counts, baseline = draw
    with stages.stage("Members"), _few_threads(data, gp.rows.Phi.shape[1]):
        gp, solution, intercepts = _solve_members(gp, data, counts, baseline)
        weights = solution.weights[:, 0] * gp.scale
        stacked = gp.rows.Phi @ weights
        members = {name: stacked[q.rows] for name, q in data.quantities.items()}
        members["energy"] += intercepts + baseline.predict_members(data.design)
    with stages.stage("Calibration"), _few_threads(data, gp.rows.Phi.shape[1]):
        left_out = _leave_out(gp, data)
        centre = _centre(data, members, counts, left_out)
        out_of_bag = {
            name: calibrate_out_of_bag(
                name, data.quantities[name], members[name], counts, settings, full
            )
            for name, full in _blended(left_out, centre).items()
        }
        if len(data.quantities) > 1 and counts.shape[1]:
            warn_of_outliers(data, members, counts)
    whitening = gp.rows.whitening
    full = gp.process.weights[:, 0] * gp.scale
    rng = np.random.default_rng([settings.seed, _POSTERIOR])
    drawn = posterior_deviations(gp.process, settings.n_drawn, rng) * gp.scale
    columns = _centred(weights, full, centre, drawn)
    none = np.zeros(settings.n_drawn)
    fitted = Fitted(
        settings=settings,
        representation=gp.rows.representation,
        representatives=gp.rows.basis.representatives,
        origins=gp.rows.origins,
        kernel_scale=gp.rows.basis.scale,
        # Row-major, as in a file: the order in memory decides how products are rounded.
        weights=np.ascontiguousarray(whitening.kernel_weights(columns)),
        intercepts=_centred(intercepts, gp.center, centre, none),
        pp_weights=np.ascontiguousarray(whitening.kernel_weights(full)),
        pp_intercept=gp.center,
        baseline=replace(
            baseline, members=_centred(baseline.members, baseline.full, centre, none[None])
        ),
        calibrations={name: o.calibrations for name, o in out_of_bag.items() if o.calibrations},
        pp_variance=_projected_variance(gp, settings) if settings.keep_pp else None,
        membership=np.minimum(counts, 255).astype(np.uint8),
        training_novelty=gp.rows.novelty,
        largest_ensemble_std=_largest_std(out_of_bag["energy"].data, settings),
        record=_record(data, gp, out_of_bag, solution, centre, stages),
        provenance=Provenance(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages={name: version(name) for name in _PACKAGES},
            data_digest=data.digest,
        ),
    )
    return Trained(fitted, {n: o.data for n, o in out_of_bag.items() if o.data is not None})


def _centred(
    members: Float64Array, full: Float64Array | float, centre: float, drawn: Float64Array
) -> Float64Array:
    """Shift members (…, S) to the prediction, and add deviations (…, K) from it: (…, S + K).

    The prediction is w(λ) = (1 − λ)·full + λ·(mean of the subsampled members).
    """
    mean = members.mean(axis=-1, keepdims=True) if members.shape[-1] else np.zeros(1)
    blend = (1 - centre) * np.asarray(full)[..., None] + centre * mean
    shape = (*np.shape(full), drawn.shape[-1])
    return np.concatenate([blend + members - mean, blend + np.broadcast_to(drawn, shape)], axis=-1)


def _leave_out(gp: SparseGP, data: TrainingSet) -> dict[str, tuple[IntArray, FullModelData]]:
    """Return the full model without rows of each quantity, or without the group of a row.

    With the indices of these rows in the quantity: all, or those of as many random groups as can be
    left out in a time that is short beside the rest of the training.
    """
    groups = data.row_groups
    if len(data.quantities) > 1:
        groups = np.empty(data.n_rows, dtype=np.intp)
        for quantity in data.quantities.values():
            groups[quantity.rows] = data.groups[quantity.structure]
    codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    order = np.random.default_rng([data.settings.seed, _LEFT_OUT]).permutation(len(sizes))
    enough = max(_PRODUCTS / gp.rows.Phi.shape[1] ** 2, 1000)
    chosen = order[: int(np.searchsorted(np.cumsum(sizes[order]), enough)) + 1]
    rows = np.flatnonzero(np.isin(codes, chosen))
    found = gp.leave_out(rows, codes[rows])
    parts = {}
    for name, quantity in data.quantities.items():
        inside = (rows >= quantity.rows.start) & (rows < quantity.rows.stop)
        q = found.novelty_std[inside] if name == "energy" and data.settings.keep_pp else None
        one = FullModelData(found.residuals[inside], found.posterior_std[inside], q, 0.0)
        parts[name] = rows[inside] - quantity.rows.start, one
    return parts


def _centre(
    data: TrainingSet,
    members: Mapping[str, Float64Array],
    counts: IntArray,
    left_out: Mapping[str, tuple[IntArray, FullModelData]],
) -> float:
    """Return the share λ of the ensemble mean in the prediction, given or of smallest error.

    Squared errors of each quantity are relative to those of the full model.
    """
    settings, n_members = data.settings, counts.shape[1]
    if not n_members or settings.centre == "full":
        return 0.0
    if settings.centre != "auto":
        return 1.0 if settings.centre == "members" else float(settings.centre)
    above = below = 0.0
    for name, (rows, full) in left_out.items():
        quantity = data.quantities[name]
        absent = _member_counts(name, quantity, counts)[rows] == 0
        found = out_of_bag_prediction(members[name][rows], absent)
        z_f = full.residuals[found.used]
        n_groups = len(np.unique(quantity.structure[rows[found.used]]))
        if n_groups < MIN_POINTS or not np.any(z_f):
            continue
        z_m = quantity.y[rows[found.used]] - found.mean
        numerator, denominator = blend_share(z_f, z_m, found.std, found.n_absent, n_members)
        above += numerator / float(z_f @ z_f)
        below += denominator / float(z_f @ z_f)
    if below <= 0:  # the error is not convex in λ: the better end
        return 1.0 if 2 * above > below else 0.0
    return float(np.clip(above / below, 0.0, 1.0))


def _blended(
    left_out: Mapping[str, tuple[IntArray, FullModelData]], centre: float
) -> dict[str, tuple[IntArray, FullModelData]]:
    return {name: (rows, replace(one, centre=centre)) for name, (rows, one) in left_out.items()}


def _largest_std(data: CalibrationData | None, settings: Settings) -> float:
    """Return the largest standard deviation of all members of an out-of-bag point."""
    if data is None:
        return 0.0
    if not settings.n_subsampled or data.posterior_std is None:
        return float(data.ensemble_std.max())
    n, k = settings.n_subsampled - 1, max(settings.n_drawn - 1, 0)
    squares = n * data.ensemble_std**2 + k * data.posterior_std**2
    return float(np.sqrt(squares.max() / (settings.n_subsampled + settings.n_drawn - 1)))


def _solve_members(
    gp: SparseGP, data: TrainingSet, counts: IntArray, baseline: Baseline
) -> tuple[SparseGP, MemberSolution, Float64Array]:
    """Return the weights of all members and their intercepts (N_R,), the means of their targets.

    If the noise must be raised for that, it is raised in the full model, too.
    """
    Phi, n = gp.rows.Phi, len(data.y)
    targets = data.y[:, None] - baseline.predict_members(data.design)
    means = np.zeros(counts.shape[1])
    if data.settings.baseline != "none":
        weighted = counts * gp.weight[:n, None]
        means = np.sum(targets * weighted, axis=0) / weighted.sum(axis=0)
    Y, times = np.empty((len(Phi), counts.shape[1])), np.empty((len(Phi), counts.shape[1]), int)
    for name, quantity in data.quantities.items():
        Y[quantity.rows] = targets - means if name == "energy" else quantity.y[:, None]
        times[quantity.rows] = _member_counts(name, quantity, counts)
    if len(data.quantities) == 1 and not np.any(gp.y):
        Y[:] = 0.0  # a constant target: what is left is rounding
    Y = Y[:, None, :] / gp.scale

    def solve(noise: dict[str, float]) -> tuple[SparseGP, MemberSolution, Float64Array]:
        model = gp.with_noise(noise)
        solution = solve_members(Phi, Y, times, model.process, sample_weight=gp.weight)
        return model, solution, means

    return _with_raised_noise(solve, gp.noise)


def _member_counts(name: str, quantity: Quantity, counts: IntArray) -> IntArray:
    """Return how often each row of a quantity is in each member: (n, N_R)."""
    return counts if name == "energy" else counts[quantity.structure]


class OutOfBag(NamedTuple):
    """Out-of-bag points of one quantity, the calibrations fitted to them, and their structures."""

    data: CalibrationData | None
    calibrations: dict[str, Calibration]
    n_structures: int


def calibrate_out_of_bag(
    name: str, quantity: Quantity, members: Float64Array, counts: IntArray, settings: Settings
) -> OutOfBag:
    """Fit every calibration of a quantity to the points that some members were trained without.

    Members (n, N_R) are predictions of all rows, counts (N, N_R) those of the rows of the target in
    each member. A target without errors is not calibrated.
    """
    if name != "energy":
        return _calibrate_components(name, quantity, members, counts, settings.calibration)
    wanted = settings.calibration
    none = OutOfBag(None, {"none": NoCalibration(), wanted: NoCalibration()}, 0)
    if np.ptp(quantity.y) == 0:
        _warn("All targets are the same: there is nothing to learn, and the uncertainty is zero.")
        return none
    try:
        data = calibration_data(quantity.y, members, counts == 0)
    except CalibrationError as error:
        if wanted != "none" and not isinstance(error, ExactFitError):
            raise
        _warn(f"{error} The ensemble standard deviation is not calibrated.")
        return none
    n_structures = len(np.unique(quantity.structure[_out_of_bag(counts)]))
    return OutOfBag(data, _fit_methods(data, wanted), n_structures)


def _calibrate_components(
    name: str, quantity: Quantity, members: Float64Array, counts: IntArray, wanted: str
) -> OutOfBag:
    """Fit every calibration of forces or stresses.

    Components are multiplied by r/ŝ, where r is the ensemble standard deviation of the whole
    vector: see `qualms.calibration.methods`. They have no calibration if they are too few; then the
    factor of the energy is used.
    """
    absent, y = _member_counts(name, quantity, counts) == 0, quantity.y
    apart = not_zero_by_symmetry(y, members)
    rows = np.flatnonzero(apart) if apart.any() else np.arange(len(y))
    n_structures = int(np.count_nonzero(_out_of_bag(counts)[np.unique(quantity.structure[rows])]))
    if _too_few(name, n_structures, counts, wanted):
        return OutOfBag(None, {}, 0)
    ratios, factor = _vector_ratios(quantity, members, absent)[rows], quantity.factor[rows]
    y, members, absent = y[rows] * factor, members[rows] * factor[:, None], absent[rows]
    try:
        data = calibration_data(y, members, absent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of points without standard deviation, as before
            scaled = calibration_data(y * ratios, members * ratios[:, None], absent)
        found = _fit_methods(scaled, wanted)
    except CalibrationError as error:
        if wanted != "none":
            _warn(f"{name}: {error} The factor that calibrates energies is used.")
        return OutOfBag(None, {}, 0)
    # The density of z is r/ŝ times that of z r/ŝ.
    for method, calibration in found.items():
        after, before = (of.some(out_of_bag_points(of, method)) for of in (scaled, data))
        shift = after.mean(np.log(after.ensemble_std)) - before.mean(np.log(before.ensemble_std))
        found[method] = replace(calibration, log_likelihood=calibration.log_likelihood + shift)
    return OutOfBag(data, found, n_structures)


def _fit_methods(data: CalibrationData, wanted: str) -> dict[str, Calibration]:
    """Fit every method, so that they can be compared; the one that is wanted must succeed."""
    found: dict[str, Calibration] = {}
    for method in METHODS:
        try:
            found[method] = fit_out_of_bag(data, method)
        except CalibrationError:
            if method == wanted:
                raise
    return found


def _vector_ratios(quantity: Quantity, members: Float64Array, absent: BoolArray) -> Float64Array:
    """Return r/ŝ of all rows (n,), r over the known components; one where members agree."""
    assert quantity.vector is not None
    assert quantity.multiplicity is not None
    found = out_of_bag_prediction(members, absent)
    ensemble_std = np.zeros(len(members))
    ensemble_std[found.used] = found.std
    w, vector = quantity.multiplicity, quantity.vector
    squares = np.bincount(vector, w * ensemble_std**2) / np.maximum(np.bincount(vector, w), 1.0)
    ratios = np.ones_like(ensemble_std)
    return np.divide(np.sqrt(squares)[vector], ensemble_std, out=ratios, where=ensemble_std > 0)


def not_zero_by_symmetry(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree on to rounding."""
    largest = float(np.abs(y).max(initial=0.0))
    return np.asarray(np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY))


def _too_few(name: str, n: int, counts: IntArray, wanted: str) -> bool:
    """Return whether n out-of-bag structures are too few for a calibration, with a warning."""
    available = int(np.count_nonzero(_out_of_bag(counts)))
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
    gp: SparseGP,
    out_of_bag: Mapping[str, OutOfBag],
    solution: MemberSolution,
    stages: Stages,
) -> Record:
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
    iterations = f", {solution.n_iterations} iterations" if solution.n_iterations else ""
    return Record(
        n_structures=len(data.frames),
        n_environments=data.n_environments,
        n_isolated=data.n_isolated,
        n_duplicates=data.n_duplicates,
        quantities=quantities,
        effective_rank=len(gp.rows.origins),
        target_std=float(np.sqrt(np.mean(gp.y[: len(data.y)] ** 2))) or gp.scale,
        solver=f"{solution.method}{iterations}",
        seconds=dict(stages.seconds),
    )
