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
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations_with_replacement
from typing import NamedTuple, TypeVar

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
from qualms.atomistic.settings import Settings
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, fit_internally, internal_points
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
    internal_prediction,
    membership_counts,
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
from qualms.resources import format_bytes, parse_memory

log = logging.getLogger(__name__)

#: Share of the training structures that would not count as extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Features are float32, or with forces float64: see `qualms.gp.linalg.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: Factor by which noise variances are raised if they are lost in rounding, and how often at most.
_RAISE, _ATTEMPTS = 10.0, 8
#: Representatives and rows up to which matrices are small, and one thread is the fastest.
_SMALL, _FEW = 500, 50_000
#: Components on which members agree to this share of the largest label, or to this number, are zero
#: by symmetry.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Out-of-bag structures from which components have a calibration of their own, and from which no
#: warning is needed. Errors within a structure are correlated. The factor of energies is as good
#: for forces as one from fewer than ten structures; for stresses it is often too small by half.
_ENOUGH, _WELL = {"forces": 10, "stress": 3}, 10
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

    Parameters
    ----------
    frames : sequence of Atoms
    settings : Settings
    groups : sequence, optional
        Labels of structures that are in or out of a subsample together.
    threads : int
    stages : Stages, optional
        Shows the progress.
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
    """Rows of each member, and the baselines fitted to them.

    Attributes
    ----------
    counts : (N, N_R) array of int
        How often each row of the target is in each member.
    baseline : Baseline
    """

    counts: IntArray
    baseline: Baseline


def draw_ensemble(data: TrainingSet) -> Draw:
    """Draw the members and fit their baselines; reject data that are too few.

    A member whose rows do not determine the baseline of the composition, because it lacks a rare
    element, gets the few rows that do.
    """
    settings, n, groups = data.settings, len(data.y), data.row_groups
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if settings.resample == "atoms" else "different labelled structures"
        raise InputError("frames", f"{n_groups} {what}", f"at least 2 {what} to draw from")
    drawn = draw_members(
        n,
        settings.n_members,
        settings.subsample,
        np.random.default_rng(settings.seed),
        replace=settings.replace,
        groups=groups,
    )
    counts, design = membership_counts(drawn, n), data.design
    lacking = np.flatnonzero(~spans(design, counts))
    if settings.baseline == "composition" and len(lacking):
        here = np.ix_(np.isin(groups, groups[anchors(design)]), lacking)
        counts[here] = np.maximum(counts[here], 1)
    if settings.calibration != "none" and not _out_of_bag(counts).any():
        if settings.baseline == "composition" and len(lacking):
            raise InputError(
                "baseline",
                "'composition'",
                "more different structures (or groups): members that lack an element get the "
                "structures that determine it, and none remains to calibrate on",
                "Use more structures, or baseline='mean'.",
            )
        raise InputError(
            "subsample",
            settings.subsample,
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
    """Kernel rows of a training set, whitened.

    Attributes
    ----------
    representation : Representation
    basis : Basis
        Representatives and the kernel with them, scaled by Eq. (17), Musil et al. 2019.
    origins : (r, 2) array of int
        Structure, as given to `fit`, and atom of each representative.
    whitening : Whitening
        Of the scaled kernel.
    Phi : (N, r) array
        Whitened kernel rows of all quantities.
    novelty : (float, float)
        Largest and mean novelty of the environments of a structure that few structures exceed.
    """

    representation: Representation
    basis: Basis
    origins: IntArray
    whitening: Whitening
    Phi: Float64Array
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
    plan = _plan_memory(data, parse_memory(memory), threads)
    source = _Source(data, plan.n_workers, stages)
    representation = _fit_representation(data, stages)
    X = source.array(representation, 0, len(data.frames)) if plan.n_block is None else None
    if X is not None:
        stop_workers()  # and free their memory
    environments, representatives = _select(source, representation, X, plan.n_block)
    whitening = _whiten(representation, representatives, data.settings, stages)
    environments = environments[whitening.pivots]
    representatives = np.ascontiguousarray(representatives[whitening.pivots])
    # The leading components of compressed features are multiplied in float64 anyway.
    exact = representatives if representation.projections else representatives.astype(np.float64)
    plain = Basis(representation.kernel, exact, 1.0, data.settings.per_atom)
    K, scale, novelty = _kernel_rows(source, representation, plain, environments, X)
    del X  # before the largest matrices are made
    whitening = replace(whitening, factor=whitening.factor * np.sqrt(scale))
    with stages.stage("Whitening"), _few_threads(data, len(environments)):
        Phi = np.asarray(whitening.features(K, overwrite=True), dtype=np.float64)
    return KernelRows(
        replace(representation, precise=True),
        replace(plain, representatives=representatives, scale=scale),
        _origins(data, environments),
        whitening,
        Phi,
        novelty,
    )


class _Plan(NamedTuple):
    """Environments per block if features are recomputed (None if kept), and worker processes."""

    n_block: int | None
    n_workers: int


def _plan_memory(data: TrainingSet, limit: float, n_workers: int) -> _Plan:
    """Return whether features are kept, and log the memory needed.

    Sizes in bytes are those of the largest arrays of each stage; 0.5 GB is for the interpreter and
    libraries, 0.25 GB for those of each worker process.
    """
    settings, n = data.settings, data.n_environments
    M = min(settings.n_representatives, n)
    widths = Representation(settings.representation, tuple(data.species)).widths
    compression = _compression(data)
    d_raw = sum(widths)
    d = d_raw if compression is None else sum(min(w, compression.n_features) for w in widths)
    base = 0.5e9 + 4e3 * len(data.frames) + 100.0 * n
    batch = min(BATCH, n)
    rows = 8.0 * data.n_rows * M
    products = 12.0 * BLOCK * M + 4.0 * BLOCK * d
    if settings.mechanical:
        # Derivatives by some 30 neighbours, and Gram matrices of parts of the data.
        products += 48.0 * GRADIENTS * 30 * (d_raw + M)
    grams = ((20 if M <= 800 else 6) if settings.mechanical else 0) * 8.0 * M**2
    solving = rows + 48.0 * M**2 + grams + min(0.5 * rows, 2e9)
    solving += 128.0 * settings.n_members * data.n_rows
    picking = 4.0 * M * d + 100e6
    if settings.selection == "cur":
        landmarks = min(2 * M, n)
        picking += 48.0 * landmarks**2 + 12.0 * landmarks * d
    compressing = 12.0 * sample_size(n) * d_raw + 24.0 * d_raw**2 if d < d_raw else 0.0
    features = 4.0 * n * d

    def needed(n_workers: int) -> tuple[float, float, float]:
        workers = n_workers if n >= SERIAL else 1
        batches = 20.0 * batch * d_raw + 8.0 * workers * batch * d
        batches += workers * (0.25e9 + 12.0 * batch * d_raw) if workers > 1 else 0.0
        least = max(compressing, solving, batches + rows + products)
        keep = base + max(least, features + max(batches, 1.1 * picking, rows + products))
        beside = base + batches + picking  # while representatives are selected block by block
        return keep, max(base + least, beside + 8.8 * M * d), beside

    keep, recompute, beside = needed(n_workers)
    while n_workers > 1 and min(keep, recompute) > limit:
        n_workers //= 2
        keep, recompute, beside = needed(n_workers)
    if min(keep, recompute) > limit:
        raise InputError(
            "memory",
            format_bytes(limit),
            f"at least {format_bytes(1.01 * min(keep, recompute))}",
            "Allow more memory, or use fewer representatives or training structures.",
        )
    n_block, use = None, keep
    if keep > limit:
        # Candidates of all blocks are kept, at most M of each.
        n_block = max(int((limit - beside) / (4.4 * d)) // 2, 2 * M)
        use = max(recompute, beside + 4.4 * d * n_block)
    log.info(
        f"{n:,} environments × {d:,} features ({'kept' if n_block is None else 'computed twice'}), "
        f"{data.n_rows:,} labels, {M:,} representatives: about {format_bytes(use)} of memory "
        f"(limit {format_bytes(limit)})."
    )
    return _Plan(n_block, n_workers)


def _compression(data: TrainingSet) -> Compression | None:
    settings = data.settings
    return resolve_compression(
        settings.representation,
        data.species,
        data.n_environments,
        min(settings.n_representatives, data.n_environments),
        derivatives=settings.has_forces,
    )


def _fit_representation(data: TrainingSet, stages: Stages) -> Representation:
    """Return the representation, with a compression fitted to random structures."""
    soap, compression = data.settings.representation, _compression(data)
    if compression is None and soap.normalize:
        return Representation(soap, tuple(data.species))
    with stages.stage("Compression"):
        picked = _sample(data, _rng(data, 1))
        frames, centers = [data.frames[i] for i in picked], [data.centers[i] for i in picked]
        return fit_representation(soap, tuple(data.species), frames, centers, compression)


def _rng(data: TrainingSet, purpose: int) -> np.random.Generator:
    """Return an independent generator for each purpose."""
    return np.random.default_rng([data.settings.seed, purpose])


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
    n_workers: int
    stages: Stages

    def blocks(
        self, representation: Representation, X: FloatArray | None, *some: int
    ) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, all or some, and where each structure begins.

        They are computed unless the features X of all environments are given.
        """
        data, chosen = self.data, slice(*some) if some else slice(None)
        if X is not None:
            for first, last in structure_blocks(data.offsets):
                edges = data.offsets[first : last + 1]
                yield X[edges[0] : edges[-1]], edges - edges[0]
            return
        pairs = zip(data.frames[chosen], data.centers[chosen], strict=True)
        for batch in stream_features(representation, pairs, n_workers=self.n_workers):
            yield batch.features, batch.offsets

    def array(self, representation: Representation, first: int, last: int) -> FloatArray:
        """Return the features of the environments of some structures: (n, d) of float32."""
        n = int(self.data.offsets[last] - self.data.offsets[first])
        X = np.empty((n, representation.n_features), dtype=np.float32)
        with self.stages.stage("Features", n) as advance:
            done = 0
            for features, _ in self.blocks(representation, None, first, last):
                X[done : done + len(features)] = features
                done += len(features)
                advance(done)
        return X


def _select(
    source: _Source, representation: Representation, X: FloatArray | None, n_block: int | None
) -> tuple[IntArray, FloatArray]:
    """Select representatives: environments, counted through all structures, and features.

    Without features X of all environments they are selected within blocks of about `n_block`
    environments, and then among the environments selected from all blocks.
    """
    data = source.data
    offsets, rng = data.offsets, _rng(data, 3)
    n = data.n_environments
    blocks = [(0, len(data.frames))]
    if n_block is not None:
        # Blocks of equal size.
        size = -(-n // max(-(-n // n_block), 1))
        blocks = list(structure_blocks(offsets, size))

    def select(features: FloatArray, environments: IntArray, settings: Settings) -> IntArray:
        total = min(settings.n_representatives, len(features))
        with source.stages.stage("Representatives", total) as advance:
            species = data.center_species[environments]
            kernel = representation.kernel
            return select_representatives(features, kernel, species, settings, rng, advance)

    settings = data.settings
    if len(blocks) > 1 and settings.selection == "cur":  # which selects among farthest points
        more = {"selection": "fps", "n_representatives": LANDMARKS * settings.n_representatives}
        settings = settings.model_copy(update=more)
    picked, candidates = [], []
    for first, last in blocks:
        features = source.array(representation, first, last) if X is None else X
        environments = np.arange(offsets[first], offsets[last])
        if len(environments):
            chosen = select(features, environments, settings)
            picked.append(environments[chosen])
            candidates.append(features[chosen])
        del features
    if len(picked) == 1:
        return picked[0], candidates[0]
    environments, features = np.concatenate(picked), np.concatenate(candidates)
    chosen = select(features, environments, data.settings)
    return environments[chosen], features[chosen]


def _whiten(
    representation: Representation, representatives: FloatArray, settings: Settings, stages: Stages
) -> Whitening:
    with stages.stage("Whitening"):
        exact = representatives.astype(np.float64)
        rtol = _RTOL_OF_FORCES if settings.mechanical else _RTOL
        whitening = whiten(np.asarray(representation.kernel(exact, exact)), rtol=rtol)
    if whitening.negative > 1e-5:
        warnings.warn(
            "The kernel is not positive semi-definite; its negative part was dropped. Use an "
            "integer exponent.",
            QualmsWarning,
            stacklevel=2,
        )
    return whitening


def _kernel_rows(
    source: _Source,
    representation: Representation,
    plain: Basis,
    environments: IntArray,
    X: FloatArray | None,
) -> tuple[Float64Array, float, tuple[float, float]]:
    """Return scaled K_NM, its scale by Eq. (17), and novelties that few structures exceed."""
    data, n = source.data, len(source.data.y)
    own = _own_representatives(data, environments)
    K = np.zeros((data.n_rows, len(plain.representatives)))
    diagonal, novelty = np.empty(n), np.empty((len(data.frames), 2))
    structure = row = done = 0
    with source.stages.stage("Kernel rows", data.n_environments) as advance:
        for block, offsets in source.blocks(representation, X):
            here = slice(structure, structure + len(offsets) - 1)
            rows = plain.rows(block, offsets, novelty=novelty[here], own=own[here])
            K[row : row + len(rows)] = rows
            diagonal[row : row + len(rows)] = plain.prior_variance(block, offsets)
            structure, row, done = here.stop, row + len(rows), done + len(block)
            advance(done)
    stop_workers()
    if data.derivatives is not None:
        scales = scale_rows(representation, plain.representatives)
        with source.stages.stage("Rows of forces", data.n_environments) as advance:
            fill_rows(K[:n], K[n:], data.frames, data.derivatives, scales, advance)
    scale = unit_scale(1.0, diagonal)
    K *= scale
    largest, mean = np.quantile(novelty, _NOT_NOVEL, axis=0).tolist()
    return K, scale, (largest, mean)


def _structures(data: TrainingSet, environments: IntArray) -> IntArray:
    """Return the structure of each of some environments."""
    return np.searchsorted(data.offsets, environments, side="right") - 1


def _origins(data: TrainingSet, environments: IntArray) -> IntArray:
    """Return structure, as given to `fit`, and atom of some environments: (r, 2)."""
    structure = _structures(data, environments)
    place = environments - data.offsets[structure]
    atom = [data.centers[s][p] for s, p in zip(structure, place, strict=True)]
    return np.stack([data.source[structure], np.array(atom)], axis=1).astype(np.int64)


def _own_representatives(data: TrainingSet, environments: IntArray) -> list[IntArray]:
    """Return the representatives that come from each structure, or from its group."""
    groups = data.groups[_structures(data, environments)]
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=int(data.groups.max()) + 1)
    by_group = np.split(order, np.cumsum(sizes)[:-1])
    return [by_group[g] for g in data.groups]


def _few_threads(data: TrainingSet, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    small = rank <= _SMALL and data.n_rows <= _FEW
    return threadpool_limits(limits=1 if small else None)


# --- the sparse Gaussian process ------------------------------------------------------------------


@dataclass(frozen=True)
class SparseGP:
    """The projected process of all rows, in the basis of the whitened kernel rows.

    Attributes
    ----------
    rows : KernelRows
    process : ProjectedProcess
        Of labels divided by `scale`.
    y : (N,) array
        Labels of all rows less the full baseline and the centre.
    center : float
        Mean of the target less the baseline.
    scale : float
        Square root of the prior variance.
    weight : (N,) array
        Of each row: noise variances are that of the energy divided by it.
    noise : dict of str to float
        Noise variance of each quantity, in its units squared (those of "stress": virials per atom).
    """

    rows: KernelRows
    process: ProjectedProcess
    y: Float64Array
    center: float
    scale: float
    weight: Float64Array
    noise: dict[str, float]

    @property
    def weights(self) -> Float64Array:
        """Weights of the whitened kernel rows, in the units of the target: (r,)."""
        return np.asarray(self.process.weights[:, 0] * self.scale)

    def left_out_residuals(self, groups: IntArray | None = None) -> Float64Array:
        """Return labels minus predictions by the model without them, or their groups: (N,)."""
        residuals = leave_one_out_residuals(
            self.process, self.rows.Phi, self.y / self.scale, groups=groups
        )
        return np.asarray(residuals[:, 0] * self.scale)


def fit_sparse_gp(
    rows: KernelRows, data: TrainingSet, baseline: Baseline, stages: Stages | None = None
) -> SparseGP:
    """Select the noise variance of each quantity and solve the full model."""
    settings, Phi = data.settings, rows.Phi
    target = data.y - baseline.predict(data.design)
    centered = settings.baseline != "none"
    with (stages or Stages()).stage("Full model"), _few_threads(data, Phi.shape[1]):
        if len(data.quantities) > 1:
            check_derivatives(Phi, target, data)
        energy_weight = _energy_weight(data)
        center = float(np.average(target, weights=energy_weight)) if centered else 0.0
        y = _stack(data, {"energy": target - center})
        scale = np.sqrt(_prior_variance(Phi, y, data))
        if len(data.quantities) == 1 and scale <= 1e-14 * abs(center):
            # What rounding leaves of a constant target; any scale will do.
            y, scale = np.zeros_like(y), 1e-6 * (abs(center) or 1.0)
        gram = gram_matrix(Phi) if len(data.quantities) == 1 else None
        noise = _select_noise(Phi, y, scale, energy_weight, data, gram)
        weight = _row_weight(energy_weight, noise, data)
        gram = gram_matrix(Phi, weight) if gram is None else gram

        def solve(noise: dict[str, float]) -> SparseGP:
            process = fit_projected_process(
                Phi, y / scale, noise["energy"] / scale**2, sample_weight=weight, gram=gram
            )
            return SparseGP(rows, process, y, center, scale, weight, noise)

        return _with_raised_noise(solve, noise)


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
    weight: Float64Array = (sizes / sizes.mean()) ** 2
    return weight


def _prior_variance(Phi: FloatArray, y: Float64Array, data: TrainingSet) -> float:
    """Return the prior variance of the weights, Eq. (17), Musil et al. 2019.

    It gives the target its variance; or forces and virials theirs, if they are learned, since most
    of the variance of the energies of one molecule is common to all.
    """
    n = len(data.y)
    if len(data.quantities) == 1:
        return float(np.mean(y**2))
    squares = sum(
        float(np.sum(np.square(Phi[start : start + 4096], dtype=np.float64)))
        for start in range(n, len(Phi), 4096)
    )
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
    given = {
        "energy": settings.noise,
        "forces": settings.forces_noise,
        "stress": settings.stress_noise,
    }
    known = {
        name: None if isinstance(value, str) else float(value)
        for name, value in given.items()
        if name in data.quantities
    }
    if all(value is not None for value in known.values()):
        return {name: value for name, value in known.items() if value is not None}
    criterion = settings.noise if isinstance(settings.noise, str) else "loo"
    if len(data.quantities) == 1:
        if not np.any(y):
            return {"energy": scale**2}
        found = select_noise(
            Phi,
            (y / scale)[:, None],
            noise_grid(1.0),
            criterion=criterion,
            gram=gram,
            groups=None if settings.resample == "atoms" else data.row_groups,
        )
        return {"energy": found.noise_variance * scale**2}
    kind, groups = np.zeros(data.n_rows, dtype=np.intp), np.empty(data.n_rows, dtype=np.intp)
    weight = np.ones(data.n_rows)
    weight[: len(energy_weight)] = energy_weight
    for k, name in enumerate(given):
        if name in data.quantities:
            quantity = data.quantities[name]
            kind[quantity.rows], groups[quantity.rows] = k, data.groups[quantity.structure]
    joint = select_joint_noise(
        Phi,
        y,
        kind,
        groups,
        prior=scale**2,
        weight=weight,
        criterion=criterion,
        energies=known["energy"],
        forces=known.get("forces"),
        virials=known.get("stress"),
    )
    selected = {"energy": joint.energies, "forces": joint.forces, "stress": joint.virials}
    return {name: float(selected[name] or 0.0) for name in data.quantities}


def _row_weight(
    energy_weight: Float64Array, noise: Mapping[str, float], data: TrainingSet
) -> Float64Array:
    """Return the weight of each row, the ratio of the noise variances: (N,)."""
    ratios = {
        name: np.full(len(quantity.y), noise["energy"] / noise[name])
        for name, quantity in data.quantities.items()
    }
    return _stack(data, ratios | {"energy": energy_weight})


def _with_raised_noise(solve: Callable[[dict[str, float]], T], noise: Mapping[str, float]) -> T:
    """Solve with given noise variances, or with larger ones if they are lost in rounding."""
    names = {"energy": "noise", "forces": "forces_noise", "stress": "stress_noise"}
    text = ", ".join(f"{names[name]} {value:.1e}" for name, value in noise.items())
    for attempt in range(_ATTEMPTS):
        factor = _RAISE**attempt
        try:
            found = solve({name: factor * value for name, value in noise.items()})
        except NumericalError:
            continue
        if attempt:
            warnings.warn(
                f"The Gram matrix is numerically singular with these noise variances: {text}. All "
                f"were multiplied by {factor:.0e}. Check for labels that are much larger than all "
                "others, or set larger noise variances.",
                QualmsWarning,
                stacklevel=2,
            )
        return found
    raise NumericalError(
        f"The Gram matrix is numerically singular with these noise variances: {text}, and with "
        f"variances {factor:.0e} times as large. Check for labels that are much larger than all "
        "others, or set larger noise variances."
    )


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
    design = data.design
    with stages.stage("Members"), _few_threads(data, gp.rows.Phi.shape[1]):
        gp, solution, intercepts = _solve_members(gp, data, counts, baseline, design)
        weights = solution.weights[:, 0] * gp.scale
        offsets = intercepts + baseline.predict_members(design)
        stacked = gp.rows.Phi @ weights
        members = {name: stacked[q.rows] for name, q in data.quantities.items()}
        members["energy"] += offsets
    with stages.stage("Calibration"):
        out_of_bag = {
            name: calibrate_out_of_bag(name, quantity, members[name], counts, settings)
            for name, quantity in data.quantities.items()
        }
        if len(data.quantities) > 1:
            warn_of_outliers(data, members, counts)
    whitening, target = gp.rows.whitening, out_of_bag["energy"].data
    fitted = Fitted(
        settings=settings,
        representation=gp.rows.representation,
        representatives=gp.rows.basis.representatives,
        origins=gp.rows.origins,
        kernel_scale=gp.rows.basis.scale,
        weights=whitening.kernel_weights(weights),
        intercepts=intercepts,
        pp_weights=whitening.kernel_weights(gp.weights),
        pp_intercept=gp.center,
        baseline=baseline,
        calibrations={name: o.calibrations for name, o in out_of_bag.items() if o.calibrations},
        pp_variance=_projected_variance(gp, settings) if settings.keep_pp else None,
        membership=np.minimum(counts, 255).astype(np.uint8),
        training_novelty=gp.rows.novelty,
        training_spread=0.0 if target is None else float(target.spread.max()),
        record=_record(data, gp, out_of_bag, solution, stages),
        provenance=_provenance(data.digest),
    )
    return Trained(fitted, {n: o.data for n, o in out_of_bag.items() if o.data is not None})


def _solve_members(
    gp: SparseGP, data: TrainingSet, counts: IntArray, baseline: Baseline, design: Float64Array
) -> tuple[SparseGP, MemberSolution, Float64Array]:
    """Return the weights of all members and their intercepts (N_R,), the means of their targets.

    If the noise must be raised for that, it is raised in the full model, too.
    """
    Phi, n = gp.rows.Phi, len(data.y)
    targets = data.y[:, None] - baseline.predict_members(design)
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

    def solve(noise: dict[str, float]) -> tuple[SparseGP, MemberSolution, Float64Array]:
        model = gp
        if noise != gp.noise:
            relative = noise["energy"] / gp.scale**2
            process = fit_projected_process(
                Phi, gp.y / gp.scale, relative, sample_weight=gp.weight, gram=gp.process.gram
            )
            model = replace(gp, process=process, noise=noise)
        solution = solve_members(
            Phi, Y[:, None, :] / gp.scale, times, model.process, sample_weight=gp.weight
        )
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

    Components of forces and stresses are multiplied by r/ŝ, where r is the ensemble standard
    deviation of the whole vector: see `qualms.calibration.methods`. They have no calibration if
    they are too few; then the factor of the energy is used. Members (n, N_R) are predictions of all
    rows, counts (N, N_R) those of the rows of the target in each member.
    """
    absent, wanted = _member_counts(name, quantity, counts) == 0, settings.calibration
    y = quantity.y
    if name == "energy":
        data = _target_data(y, members, absent, wanted)
        if data is None:
            return OutOfBag(None, {"none": NoCalibration(), wanted: NoCalibration()}, 0)
        n_structures = len(np.unique(quantity.structure[_out_of_bag(counts)]))
        return OutOfBag(data, _fit_methods(data, wanted), n_structures)
    ratios = _vector_ratios(quantity, members, absent)
    apart = not_zero_by_symmetry(y, members)
    rows = np.flatnonzero(apart) if apart.any() else np.arange(len(y))
    n_structures = int(np.count_nonzero(_out_of_bag(counts)[np.unique(quantity.structure[rows])]))
    if _too_few(name, n_structures, counts, wanted):
        return OutOfBag(None, {}, 0)
    factor = quantity.factor[rows]
    y, members, absent = y[rows] * factor, members[rows] * factor[:, None], absent[rows]
    ratios = ratios[rows]
    try:
        data = calibration_data(y, members, absent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of points without spread, as of those before
            scaled = calibration_data(y * ratios, members * ratios[:, None], absent)
        found = _fit_methods(scaled, wanted)
    except CalibrationError as error:
        if wanted != "none":
            warnings.warn(
                f"{name}: {error} The factor that calibrates energies is used.",
                QualmsWarning,
                stacklevel=2,
            )
        return OutOfBag(None, {}, 0)
    # The density of z is r/ŝ times that of z r/ŝ.
    for method, calibration in found.items():
        after, before = (of.some(internal_points(of, method)) for of in (scaled, data))
        shift = after.mean(np.log(after.spread)) - before.mean(np.log(before.spread))
        found[method] = replace(calibration, log_likelihood=calibration.log_likelihood + shift)
    return OutOfBag(data, found, n_structures)


def _target_data(
    y: Float64Array, members: Float64Array, absent: BoolArray, wanted: str
) -> CalibrationData | None:
    """Return the out-of-bag points of the target; None if it has no error."""
    if np.ptp(y) == 0:
        warnings.warn(
            "All targets are the same: there is nothing to learn, and the uncertainty is zero.",
            QualmsWarning,
            stacklevel=2,
        )
        return None
    try:
        return calibration_data(y, members, absent)
    except CalibrationError as error:
        if wanted != "none" and not isinstance(error, ExactFitError):
            raise
        warnings.warn(
            f"{error} The ensemble standard deviation is not calibrated.",
            QualmsWarning,
            stacklevel=2,
        )
        return None


def _fit_methods(data: CalibrationData, wanted: str) -> dict[str, Calibration]:
    """Fit every method, so that they can be compared; the one that is wanted must succeed."""
    found: dict[str, Calibration] = {}
    for method in METHODS:
        try:
            found[method] = fit_internally(data, method)
        except CalibrationError:
            if method == wanted:
                raise
    return found


def _vector_ratios(quantity: Quantity, members: Float64Array, absent: BoolArray) -> Float64Array:
    """Return r/ŝ of all rows (n,), r over the known components; one without spread."""
    assert quantity.vector is not None
    assert quantity.multiplicity is not None
    found = internal_prediction(members, absent)
    spread = np.zeros(len(members))
    spread[found.used] = found.std
    w, vector = quantity.multiplicity, quantity.vector
    squares = np.bincount(vector, w * spread**2) / np.maximum(np.bincount(vector, w), 1.0)
    ratios = np.ones_like(spread)
    return np.divide(np.sqrt(squares)[vector], spread, out=ratios, where=spread > 0)


def not_zero_by_symmetry(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree on to rounding."""
    largest = float(np.abs(y).max(initial=0.0))
    apart: BoolArray = np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY)
    return apart


def _too_few(name: str, n: int, counts: IntArray, wanted: str) -> bool:
    """Return whether n out-of-bag structures are too few for a calibration, with a warning."""
    available = int(np.count_nonzero(_out_of_bag(counts)))
    too_few = n < min(_ENOUGH[name], available)
    if wanted != "none" and n < min(_WELL, available):
        effect = (
            f"at least {_ENOUGH[name]} are needed to calibrate; the factor of energies is used."
            if too_few
            else "the calibration is poorly determined."
        )
        structures = counted(n, "out-of-bag structure")
        warnings.warn(f"{name}: {structures}; {effect}", QualmsWarning, stacklevel=2)
    return too_few


def _projected_variance(gp: SparseGP, settings: Settings) -> ProjectedVariance:
    precision = np.float64 if settings.mechanical else np.float32
    return ProjectedVariance(
        whitening=gp.rows.whitening.factor.astype(precision),
        posterior=gp.process.factor.astype(precision),
        noise_variance=gp.process.noise_variance,
        variance=gp.scale**2,
    )


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


def _provenance(digest: str) -> Provenance:
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        data_digest=digest,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
