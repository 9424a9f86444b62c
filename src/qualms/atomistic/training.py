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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

import qualms
from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.baseline import Baseline, anchors, fit_baseline, row_space, spans
from qualms.atomistic.census import Census, TrainingSet, take_census, thinned
from qualms.atomistic.delta import BaselinePotential, calculator_version
from qualms.atomistic.extrapolation import (
    ROUNDING,
    element_scales,
    fit_limits,
    is_largest,
    scattered,
    sizes_of,
)
from qualms.atomistic.fitted import (
    Fitted,
    ProjectedVariance,
    Provenance,
    QuantityRecord,
    Record,
    describe_size,
    n_leading,
)
from qualms.atomistic.label_checks import (
    check_copies,
    check_derivatives,
    check_noise,
    find_outliers,
    warn_of_outliers,
)
from qualms.atomistic.passes import (
    CHUNK,
    SMALLEST,
    Environments,
    LabelFunctions,
    Rows,
    TrainingProblem,
    combine_labels,
    few_threads,
    fit_features,
    n_features,
    part_size,
    pick_representatives,
    rows_of_task,
    sum_rows,
)
from qualms.atomistic.quantities import KINDS, TARGET, Quantity
from qualms.atomistic.settings import Settings, parse_memory, with_representation
from qualms.atomistic.structures import FrameFiles, symbols_of
from qualms.calibration.choice import fit_best
from qualms.calibration.methods import MIN_POINTS, MODEL_METHODS, NoCalibration, with_enough_points
from qualms.calibration.points import (
    CalibrationData,
    FullModelData,
    calibration_data,
    leave_groups_out,
    out_of_bag_residuals,
)
from qualms.calibration.vectors import MULTIPLICITY, QuantityCalibration, calibrate_points
from qualms.errors import CalibrationError, ExactFitError, InputError, counted, warn
from qualms.execution import AHEAD, Workers
from qualms.features.base import (
    BATCH,
    SERIAL,
    Representation,
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
    n_blocks_of,
    out_of_bag_prediction,
    predictive_weights,
    resolve_centre,
    with_points,
)
from qualms.gp.noise import SMALLEST_LABEL, group_means, typical_log
from qualms.gp.representatives import LANDMARKS
from qualms.gp.sparse_gp import leave_out, novelty_without_own
from qualms.gp.sums import Draw, sums_size
from qualms.progress import Stages
from qualms.resources import limited

log = logging.getLogger(__name__)

#: Streams of random numbers: posterior members, blocks, and limits of extrapolation.
_POSTERIOR_STREAM, _BLOCK_STREAM, _LIMIT_STREAM = 4, 7, 10
#: Most representatives that are chosen, by effort, and for each label: on 300 molecules of QM9 1500
#: and 3000 differ by 0.5 %.
_MOST, PER_LABEL = {"fast": 1000, "default": 3000, "best": 10_000}, 5
#: Factor of the most representatives of models whose predictions take a time independent of them.
_MORE_OF_SQUARES = 2
#: Labels all of which are the basis, if labels are; products of two features, two scales of 192,
#: with which labels are it by default: more take much memory and time, and hardly lower errors.
_FEW_LABELS, _MOST_PRODUCTS = 1000, 75_000
#: Twice the representatives must lower errors by this share at least, for each effort: predictions
#: take twice the time, and the ratio of two errors of some thousand rows is uncertain by a few per
#: cent.
_GAIN = {"fast": 0.05, "default": 0.05, "best": 0.0}
#: Components on which members agree to this share of the largest label, or to `SMALLEST_LABEL`, are
#: zero by symmetry.
_ROUNDING = 1e-10


def fit(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None,
    *,
    workers: Workers,
    threads: int,
    stages: Stages,
    potential: BaselinePotential | None,
    skip_failed: bool,
) -> Fitted:
    """Train a model on labelled structures and calibrate it on out-of-bag points.

    Parameters
    ----------
    frames : sequence of Atoms
        In memory, or in files that are read part by part.
    settings : Settings
    groups : sequence or str or None
        Labels of structures that are in or out of a subsample together, or their key in
        ``atoms.info``; or "auto".
    workers : Workers
        Compute parts.
    threads : int
        Cores of this process.
    stages : Stages
        Shows the progress.
    potential : BaselinePotential or None
        The model learns the differences of the labels from it.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    """
    workers.check(frames.paths if isinstance(frames, FrameFiles) else ())
    with limited(threads):
        census = take_census(
            frames,
            settings,
            groups,
            workers=workers,
            stages=stages,
            potential=potential,
            skip_failed=skip_failed,
        )
        problem = resolve(settings, census, workers, threads)
        features = fit_features(problem, stages)
        points, whitening, cache = pick_representatives(problem, features, workers, stages)
        functions: Environments | LabelFunctions = points
        if problem.settings.basis == "labels":
            functions, whitening = combine_labels(problem, features, workers, stages)
        rows = sum_rows(problem, features, points, functions, whitening, cache, workers, stages)
        rows, full, size_curve = fit_best_size(rows, problem, stages)
        ensemble = fit_ensemble(rows, full, problem, stages)
        return calibrate(ensemble, problem, features, size_curve, stages)


# --- what is open before the census, and the draw of members --------------------------------------


def resolve(settings: Settings, census: Census, workers: Workers, threads: int) -> TrainingProblem:
    """Choose everything that is open, within the memory, and draw the members.

    Open are the representation, the forces, the baseline, and the number of representatives.

    Parameters
    ----------
    settings : Settings
    census : Census
    workers : Workers
    threads : int
        Of this process.
    """
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
    settings = _with_basis(settings, data)
    n_functions = data.n_rows if settings.basis == "labels" else data.n_environments
    if isinstance(settings.n_representatives, int):
        M, size_limit = min(settings.n_representatives, n_functions), ""
    else:
        M, size_limit = _largest_size(settings, data, limit)
    may_cache, n_processes = workers.executor is None, threads if workers.executor is None else 1
    while n_processes > 1 and memory_needed(settings, data, M, n_processes).together > limit:
        n_processes //= 2
    with_cache = memory_needed(settings, data, M, n_processes, cached=True).together
    data, draw, baseline = draw_members(settings, data, census.isolated)
    problem = TrainingProblem(
        settings=settings,
        data=data,
        census=census,
        draw=draw,
        baseline=baseline,
        n_representatives=M,
        size_limit=size_limit,
        preset=preset,
        cached=may_cache and with_cache <= limit,
        n_processes=n_processes,
    )
    _announce(problem, workers, limit)
    return problem


def _with_basis(settings: Settings, data: TrainingSet) -> Settings:
    """Use few labels as the basis of a model with forces, if the kernel is a square.

    Few: not more than products of two features, which would limit the errors; and not more than
    twice the representatives that the effort allows, of which the basis needs one for two labels.
    Of more labels, environments, with more features, have errors as small: with 200 structures of
    azobenzene 24.5 meV/Å and 10 meV, beside 24.4 and 11; of 3BPA 29.8 and 11, beside 33.3 and 15.
    """
    possible = _is_square(settings)
    if settings.basis == "labels" and not possible:
        raise InputError(
            "`basis='labels'` is for models of forces or stresses with a kernel of ζ = 2, "
            "`exponent=2` of SOAP. Use `basis='environments'`.",
            parameter="basis",
        )
    if settings.basis != "auto":
        return settings
    by_labels = settings.model_copy(update={"basis": "labels"})
    if possible:
        d = n_features(by_labels, data, 1)[0]
        n_products = d * (d + 1) // 2
        most = min(2 * _most_representatives(settings), n_products)
        if data.n_rows <= most and n_products <= _MOST_PRODUCTS:
            log.info("Basis: combinations of labels.")
            return by_labels
    return settings.model_copy(update={"basis": "environments"})


def _is_square(settings: Settings) -> bool:
    """Return whether the time of predictions is that of a quadratic form for any basis."""
    return settings.learns_forces and settings.features.is_square


def _most_representatives(settings: Settings) -> int:
    """Return the most representatives that the effort allows."""
    return _MOST[settings.effort] * (_MORE_OF_SQUARES if _is_square(settings) else 1)


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
        potential = settings.baseline_potential
        atoms = "atoms" if potential is None else potential.model_copy(update={"then": "atoms"})
        return settings.model_copy(update={"baseline": atoms})
    warn(
        f"The training set has too few compositions to determine {settings.target!r} of each of "
        f"{symbols_of(species)}. Other compositions are rejected in predictions; add them, or "
        "isolated atoms (config_type=isolated_atom)."
    )
    return settings


def _largest_size(settings: Settings, data: TrainingSet, memory: float) -> tuple[int, str]:
    """Return the number of representatives that effort, labels and memory allow, and the limit."""
    limits = {"effort": _most_representatives(settings)}
    if settings.basis == "labels":
        # With half of the labels of azobenzene errors are 3 % larger than with all.
        limits["the number of labels"] = max(data.n_rows // 2, min(data.n_rows, _FEW_LABELS))
    else:
        limits["the number of environments"] = data.n_environments
        limits["the number of labels"] = max(PER_LABEL * data.n_rows, SMALLEST)
    limit = min(limits, key=limits.__getitem__)
    n = limits[limit]
    while n > SMALLEST:
        # That of one process, so that the number does not depend on workers.
        if memory_needed(settings, data, n).together <= memory:
            break
        n, limit = max(9 * n // 10, SMALLEST), "the memory"
    return n, limit


def draw_members(
    settings: Settings, data: TrainingSet, isolated: Mapping[int, float]
) -> tuple[TrainingSet, Draw, Baseline]:
    """Draw the members, and fit their baselines; reject data that are too few.

    Structures are returned in the order of their blocks, so that a part of them has few blocks,
    unless atoms are drawn. Structures of a group are drawn together. A member that lacks an
    element, and so does not determine its baseline, gets the few groups that do.

    Parameters
    ----------
    settings : Settings
    data : TrainingSet
    isolated : mapping of int to float
        Energies of isolated atoms by atomic number.
    """
    draws_atoms = settings.resample == "atoms"
    rows = data.quantities[TARGET].structure
    groups = data.groups
    if draws_atoms:
        rows = groups = np.arange(len(data.y))
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if draws_atoms else "different labelled structures"
        name, hint = "frames", ""
        if len(np.unique(data.copies)) > 1 and not draws_atoms:
            name, what = "groups", "groups of structures"
        elif len(data.source) > 1:
            hint = " All structures are copies of one."
        raise InputError(
            f"There are fewer than 2 {what}, from which subsamples are drawn.{hint}",
            parameter=name,
        )
    kinds = None
    if settings.learns_forces:
        kinds = sum(2**k * has for k, has in enumerate(data.derivatives_of_groups(groups)))
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
        isolated=isolated,
    )
    if not draws_atoms:
        order = np.argsort(draw.block, kind="stable")
        data, draw = data.take(order), draw.take(order)
    return data, draw, baseline


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


# --- memory ---------------------------------------------------------------------------------------


class MemoryNeeded(NamedTuple):
    """Bytes of the process that trains the model, of each worker, and of both in one process."""

    driver: float
    worker: float
    together: float


def memory_needed(
    settings: Settings, data: TrainingSet, M: int, n_workers: int = 1, *, cached: bool = False
) -> MemoryNeeded:
    """Return the memory of a training, by the largest arrays of its stages.

    0.5 GB is for the interpreter and libraries, 0.25 GB for those of each process that computes
    features.

    Parameters
    ----------
    settings : Settings
    data : TrainingSet
    M : int
        Number of representatives, at most that of environments.
    n_workers : int
        Workers, or processes that compute features.
    cached : bool
        Whether features of all environments are kept in memory.
    """
    n, (d, d_raw) = data.n_environments, n_features(settings, data, M)
    size, square = settings.features.dtype.itemsize, 8.0 * M**2
    free = settings.draw == "free"
    n_blocks = n_blocks_of(settings.n_subsampled, data.n_rows, free=free)
    sums = sum(n_blocks * sums_size(len(q.y) / n_blocks, M) for q in data.quantities.values())
    n_rows = min(data.n_rows, N_KEPT + int(data.rows_of_structures.max()))
    n_rows = data.n_rows if free else n_rows
    kept = 8.0 * n_rows * M
    environments = min(part_size(settings, data, M, d), n)
    n_parts = -(-n // environments)
    base = 0.5e9 + settings.features.overhead
    base += (400.0 + 16.0 * len(data.species) + 24.0 * settings.n_members) * len(data.source)
    base += 4e3 * len(data.source) if isinstance(data.frames, list) else 0.0
    if settings.basis == "labels":
        # Functions, once more while they are joined, all labels of the largest structure, and those
        # that are kept.
        largest, kept = float(data.rows_of_structures.max()), data.n_rows if cached else 0
        base += 4.0 * d * (d + 1) * (2.2 * M + 3.0 * largest + kept)
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
    chunk = min(CHUNK, data.n_rows)
    products = 12.0 * BATCH * M + 16.0 * chunk * M + 12.0 * M * d
    if settings.learns_forces:
        products += 48.0 * GRADIENTS * 30 * (d_raw + M)  # derivatives by some 30 neighbours
    summing = products + 3.0 * square * len(data.quantities)
    selecting = 1.2 * size * environments * d + picking
    solving = sums + 5 * square + 2 * kept
    n_tasks = data.n_rows // rows_of_task(M) + 1
    # Sums of the blocks that a task has rows of; a worker holds them once more while it sends them.
    of_task = sums * min(1 / n_tasks + 1 / n_blocks, 1.0)
    waiting = (min(AHEAD * n_workers, n_tasks) + 1) * of_task
    features = size * n * d if cached else 0.0
    peak = max(
        compressing,
        batch + (features + picking if cached and n_parts == 1 else features + selecting),
        features + joining + picking + 3 * square,
        max(features, sums) + kept + summing + (0.0 if cached else batch),
        solving,
    )
    return MemoryNeeded(
        driver=base + max(joining + picking + 3 * square, solving, sums + kept + waiting),
        worker=base + batch + max(selecting, summing + 2 * of_task),
        together=base + peak,
    )


def _announce(problem: TrainingProblem, workers: Workers, limit: float) -> None:
    """Log the memory that is needed; reject a training for which it does not suffice."""
    settings, data, M = problem.settings, problem.data, problem.n_representatives
    needed = memory_needed(settings, data, M, problem.n_processes, cached=problem.cached)
    total, workers_text = needed.together, ""
    if workers.executor is not None:
        total = memory_needed(settings, data, M, workers.number).driver
        each = counted(workers.number, "worker")
        workers_text = f", and {format_size(needed.worker)} for each of {each}"
    how = "kept" if problem.cached else "computed twice"
    log.info(
        f"{data.n_environments:,} environments × {n_features(settings, data, M)[0]:,} features "
        f"({how}), {data.n_rows:,} labels, {M:,} representatives: about "
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
        warn(
            f"A worker needs about {format_size(needed.worker)}, and Dask's memory_limit of one is "
            f"{format_size(workers.memory)}. Use fewer workers with more memory each."
        )


def format_size(n: float) -> str:
    """Return a number of bytes as text."""
    if n < 1e6:
        return f"{n:.0f} bytes"
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


# --- the sparse Gaussian process ------------------------------------------------------------------


def fit_sparse_model(rows: Rows, problem: TrainingProblem, stages: Stages) -> FullModel:
    """Select the noise variance of each quantity and solve the full model.

    The prior variance of the weights gives the target its variance, Eq. (17), Musil et al. 2019; or
    forces and virials theirs, if they are learned.

    Parameters
    ----------
    rows : Rows
    problem : TrainingProblem
    stages : Stages
    """
    settings, quantities, kept = problem.settings, rows.sample.quantities, rows.kept
    with stages.stage("Full model"), few_threads(problem.data.n_rows, len(rows.functions)):
        wrong = set(quantities)
        if len(quantities) > 1:
            energies = kept.y[kept.rows[TARGET], 0]
            wrong = check_derivatives(kept.Phi[:, :1000], energies, rows.sample, settings)
        noise = {name: getattr(settings, KINDS[name].noise) for name in rows.sums.sums}
        full = fit_full_model(kept, rows.sums, noise, mean=np.array([rows.center]))
    if not wrong:  # or there are no derivatives
        free = [n for n in noise if KINDS[n].is_derivative and isinstance(noise[n], str)]
        check_noise({name: full.noise[name] for name in free}, rows.sample, settings)
    return full


def left_out_errors(
    rows: Rows, full: FullModel, name: str, n_rows: float
) -> tuple[Float64Array, IntArray]:
    """Return errors of the full model without the group of a row, and the groups.

    They are the errors of some groups, with all representatives.

    Parameters
    ----------
    rows : Rows
    full : FullModel
    name : str
        Quantity that the groups have labels of.
    n_rows : float
        Number of rows that the groups have together, about.
    """
    kept = rows.kept
    codes = np.unique(kept.groups, return_inverse=True)[1]
    of_rows = codes[kept.rows[name]]
    groups = of_rows[np.sort(np.unique(of_rows, return_index=True)[1])]  # random: block by block
    n = int(np.searchsorted(np.cumsum(np.bincount(codes)[groups]), n_rows)) + 1
    some = np.flatnonzero(np.isin(codes, groups[:n]))
    left_out = leave_out(
        full.process,
        kept.Phi[some],
        full.y[some],
        sample_weight=full.weight[some],
        groups=codes[some],
    )
    of_quantity = np.isin(some, kept.rows[name])
    return left_out.residuals[of_quantity, 0] * full.scale[0], codes[some[of_quantity]]


def fit_best_size(
    rows: Rows, problem: TrainingProblem, stages: Stages
) -> tuple[Rows, FullModel, dict[int, float]]:
    """Fit the full model; choose the number of representatives, if it is to be chosen.

    The models of the leading half, quarter and eighth of the representatives are fitted as well.
    From the largest on, the number is halved as long as that raises the typical error of groups
    that are left out by less than `_GAIN` of the effort; the error is that of the quantity with
    most labels.

    Parameters
    ----------
    rows : Rows
    problem : TrainingProblem
    stages : Stages

    Returns
    -------
    rows : Rows
        Of the representatives that are chosen.
    full : FullModel
    size_curve : dict of int to float
        Errors of the numbers of representatives that were compared; empty if one was given.
    """
    settings, quantities = problem.settings, problem.data.quantities
    full, r = fit_sparse_model(rows, problem, stages), len(rows.functions)
    if len(rows.novelty) == 1:
        return rows, full, {}
    name = max(quantities, key=lambda name: len(quantities[name].y))
    n_left_out = max(1e11 / r**2, 1000)  # a minute of multiplications at most

    def error(rows: Rows, full: FullModel) -> float:
        z, groups = left_out_errors(rows, full, name, n_left_out)
        means = group_means(np.abs(z), groups)
        return math.exp(typical_log(means)) / 4  # of equal errors: these

    chosen, curve, enough = (rows, full), {r: error(rows, full)}, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what concerns the data was said before
        for size in sorted(rows.novelty, reverse=True)[1:]:
            nested = rows.leading(size)
            full = fit_sparse_model(nested, problem, stages)
            of_double, curve[size] = curve[min(curve)], error(nested, full)
            enough = enough and of_double > (1 - _GAIN[settings.effort]) * curve[size]
            chosen = (nested, full) if enough else chosen
    curve = dict(sorted(curve.items()))
    limit = _size_limit(problem, r)
    text = describe_size(len(chosen[0].functions), curve, limit, settings, name)
    log.info(f"Representatives: {text}.")
    return *chosen, curve


def _size_limit(problem: TrainingProblem, r: int) -> str:
    """Return the limit of the number of representatives that is chosen."""
    if problem.size_limit and r < 0.9 * problem.n_representatives:  # many were dropped
        return "their linear dependence"
    return problem.size_limit


# --- the ensemble and its calibration -------------------------------------------------------------


@dataclass(frozen=True)
class TrainedEnsemble:
    """The full model, and the members that are trained on subsamples."""

    rows: Rows
    full: FullModel
    weights: Float64Array  #: (r, S): of the whitened kernel rows
    intercepts: Float64Array  #: (S,)
    members: dict[str, Float64Array]  #: (n, S): predictions of the kept rows of each quantity

    @property
    def scale(self) -> float:
        """Square root of the prior variance."""
        return float(self.full.scale[0])


def fit_ensemble(
    rows: Rows, full: FullModel, problem: TrainingProblem, stages: Stages
) -> TrainedEnsemble:
    """Solve all members, and predict the rows that are kept by each.

    Parameters
    ----------
    rows : Rows
    full : FullModel
    problem : TrainingProblem
    stages : Stages
    """
    baseline, sample = problem.baseline, rows.sample
    S, r = problem.settings.n_subsampled, len(rows.functions)
    columns = np.zeros((len(baseline.full) + 2, 1, S))
    columns[0], columns[1:-1, 0] = 1.0, baseline.full[:, None] - baseline.members
    with stages.stage("Members"), few_threads(problem.data.n_rows, r):
        centered = baseline.name != "none"
        full, solved, means = fit_members(full, rows.sums, rows.kept, columns, centered=centered)
        weights, intercepts = solved[:, 0], rows.center + means[0]
        predicted = rows.kept.Phi @ weights
        of_target = baseline.predict_members(sample.design(problem.data.species))
        predicted[: len(sample.y)] += intercepts + of_target
    members = {name: predicted[q.rows] for name, q in sample.quantities.items()}
    return TrainedEnsemble(rows, full, weights, intercepts, members)


# --- out-of-bag points and calibrations ---


@dataclass(frozen=True)
class OutOfBagRows:
    """Predictions of the rows of a quantity that are kept, by members and the full model."""

    quantity: Quantity
    members: Float64Array  #: (n, S): of all members
    absent: BoolArray  #: (n, S): whether the training set of the member lacks the row
    groups: IntArray  #: (n,): rows that are left out together
    full: FullModelData | None  #: without each group; None if it is not needed

    @property
    def used(self) -> BoolArray:
        """Which rows (n,) enough members are without; all if there are no members."""
        n_members = self.absent.shape[1]
        enough: BoolArray = self.absent.sum(axis=1) >= (MIN_ABSENT if n_members else 0)
        return enough


def predict_out_of_bag(ensemble: TrainedEnsemble, settings: Settings) -> dict[str, OutOfBagRows]:
    """Return predictions of kept rows by members and the full model, for each quantity."""
    rows, out_of_bag = ensemble.rows, {}
    full = None
    if settings.centre != "members" or settings.n_drawn:
        full = _leave_all_out(ensemble, settings)
    for name, quantity in rows.sample.quantities.items():
        of_quantity = None if full is None else full.some(quantity.rows)
        if of_quantity is not None and (
            name != TARGET or settings.has_forces or not settings.keep_pp
        ):
            of_quantity = replace(of_quantity, novelty_std=None)  # not known, or not of predictions
        absent = rows.kept.draw.counts[quantity.rows] == 0
        groups = rows.kept.groups[quantity.rows]
        out_of_bag[name] = OutOfBagRows(
            quantity, ensemble.members[name], absent, groups, of_quantity
        )
    return out_of_bag


def _leave_all_out(ensemble: TrainedEnsemble, settings: Settings) -> FullModelData:
    """Return the full model without each group of rows that are kept, and its representatives."""
    rows, kept, whitening = ensemble.rows, ensemble.rows.kept, ensemble.rows.whitening
    owners = _owners(rows)
    # Novelty is known for rows of the target alone; it is zero elsewhere.
    q2, n, m = np.zeros(len(kept.Phi)), len(rows.k_xx), n_leading(kept.Phi.shape[1])
    q2[:n] = novelty_without_own(kept.Phi[:n], rows.k_xx, whitening, kept.groups[:n], owners, m)
    drawn = settings.n_drawn > 0
    return leave_groups_out(ensemble.full, kept, whitening, owners, np.sqrt(q2), drawn)[0]


def _owners(rows: Rows) -> IntArray:
    """Return the group, among those of kept rows, of each representative; −1 for none."""
    sample, n = rows.sample, len(rows.sample.y)
    structures = sample.groups[sample.quantities[TARGET].structure]
    if np.array_equal(structures, rows.kept.groups[:n]):
        return rows.functions.groups
    # Single atoms are left out.
    centers, source = sample.centers or [], np.repeat(sample.source, sample.environments)
    row_of = dict(
        zip(
            zip(source.tolist(), np.concatenate(centers).tolist(), strict=True),
            range(n),
            strict=True,
        )
    )
    return np.array(
        [row_of.get((int(s), int(a)), -1) for s, a in rows.representatives.origins], dtype=np.intp
    )


def choose_centre(out_of_bag: Mapping[str, OutOfBagRows], settings: Settings) -> float:
    """Return the share λ of the ensemble mean in the prediction, given or of smallest error."""
    if not settings.n_subsampled:
        return 0.0
    residuals = (
        out_of_bag_residuals(of.quantity.y, of.members, of.absent, of.full, of.groups)
        for of in out_of_bag.values()
        if of.full is not None and len(np.unique(of.quantity.structure[of.used])) >= MIN_POINTS
    )
    return resolve_centre(settings.centre, residuals, settings.n_subsampled)


def collect_points(name: str, of: OutOfBagRows, centre: float, source: IntArray) -> CalibrationData:
    """Return the out-of-bag points of a quantity.

    Components of vectors that are zero by symmetry are left out.

    Parameters
    ----------
    name : str
        Of the quantity.
    of : OutOfBagRows
    centre : float
        λ, from 0 for the full model to 1 for the ensemble mean.
    source : (n_structures,) array of int
        Numbers of structures in the input.
    """
    quantity = of.quantity
    if of.full is not None:
        of = replace(of, full=replace(of.full, centre=centre))
    n_components = KINDS[name].n_components
    points = _components(of, n_components) if n_components > 1 else _points(of)
    assert points.rows is not None
    element = None
    if quantity.species is not None:
        element = np.array(chemical_symbols)[quantity.species[points.rows]]
    structure = source[quantity.structure[points.rows]]
    return replace(points, structure=structure, element=element, rows=None)


def _points(of: OutOfBagRows, y: Float64Array | None = None) -> CalibrationData:
    """Return points: of the members and the full model, or of one of the two."""
    if of.full is not None and not of.absent.shape[1]:
        return of.full.alone(of.groups)
    y = of.quantity.y if y is None else y
    return calibration_data(y, of.members, of.absent, full=of.full, groups=of.groups)


def _components(of: OutOfBagRows, n_components: int) -> CalibrationData:
    """Return points of components of forces or stresses, with the uncertainties of the vectors."""
    quantity, full = of.quantity, of.full
    some, factor = np.flatnonzero(asymmetric(of)), quantity.factor
    chosen = OutOfBagRows(
        quantity,
        (of.members * factor[:, None])[some],
        of.absent[some],
        of.groups[some],
        None if full is None else full.some(some).scaled(factor[some]),
    )
    points = _points(chosen, (quantity.y * factor)[some])
    used = some[points.rows]
    ensemble_std = np.zeros(len(quantity.y))
    if of.absent.shape[1]:
        ensemble = out_of_bag_prediction(of.members, of.absent)
        ensemble_std[ensemble.used] = ensemble.std
    elif full is not None:
        ensemble_std = full.posterior_std
    p = None
    if full is not None and points.posterior_std is not None:
        p = (_pooled(quantity, full.posterior_std) * factor)[used]
    assert quantity.multiplicity is not None
    return replace(
        points,
        rows=used,
        ensemble_std=(_pooled(quantity, ensemble_std) * factor)[used],
        posterior_std=p,
        component_std=points.ensemble_std,
        multiplicity=quantity.multiplicity[used] / MULTIPLICITY[n_components].mean(),
    )


def _spread(of: OutOfBagRows, y: Float64Array) -> float:
    """Return the standard deviation of the labels of out-of-bag points, less the baseline.

    Components have a mean each.

    Parameters
    ----------
    of : OutOfBagRows
    y : (N,) array
        Labels of all kept rows, less the baseline.
    """
    quantity, used = of.quantity, of.used
    values, kinds = y[quantity.rows] * quantity.factor, np.zeros(len(used), dtype=np.intp)
    if quantity.component is not None:
        used, kinds = used & asymmetric(of), quantity.component
    if not used.any():
        return 0.0
    values, kinds = values[used], np.unique(kinds[used], return_inverse=True)[1]
    means = np.bincount(kinds, values) / np.bincount(kinds)
    return float(np.sqrt(np.mean((values - means[kinds]) ** 2)))


def asymmetric(of: OutOfBagRows) -> BoolArray:
    """Return which components (n,) are not zero by symmetry."""
    if of.members.shape[1] or of.full is None:
        return not_zero_by_symmetry(of.quantity.y, of.members)
    p = of.full.posterior_std
    # A variance of zero, to rounding, has this standard deviation.
    return np.asarray(p > max(_ROUNDING**0.5 * p.max(initial=0.0), SMALLEST_LABEL))


def not_zero_by_symmetry(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree on to rounding."""
    largest = float(np.abs(y).max(initial=0.0))
    return np.asarray(np.ptp(members, axis=1) > max(_ROUNDING * largest, SMALLEST_LABEL))


def _pooled(quantity: Quantity, std: Float64Array) -> Float64Array:
    """Return the standard deviation of whole vectors, over known components, for their rows."""
    assert quantity.vector is not None
    assert quantity.multiplicity is not None
    w, vector = quantity.multiplicity, quantity.vector
    squares = np.bincount(vector, w * std**2) / np.maximum(np.bincount(vector, w), 1.0)
    return np.asarray(np.sqrt(squares)[vector])


def calibrate_quantities(
    out_of_bag: Mapping[str, OutOfBagRows],
    settings: Settings,
    centre: float,
    source: IntArray,
    *,
    is_constant: bool,
) -> tuple[dict[str, CalibrationData], dict[str, QuantityCalibration], str]:
    """Return out-of-bag points and calibration of each quantity, and the method.

    A target without errors is not calibrated; nor are forces, or stresses, of too few structures,
    for which the factor of the energy is used.

    Parameters
    ----------
    out_of_bag : mapping of str to OutOfBagRows
    settings : Settings
    centre : float
        λ, from 0 for the full model to 1 for the ensemble mean.
    source : (n_structures,) array of int
        Numbers of structures in the input.
    is_constant : bool
        Whether all targets are the same.
    """
    n = {"n_subsampled": settings.n_subsampled, "n_posterior": settings.n_drawn}
    target = out_of_bag[TARGET]
    n_available = len(np.unique(target.quantity.structure[target.used]))
    method = with_enough_points(settings.calibration, int(np.count_nonzero(target.used)))
    points: dict[str, CalibrationData] = {}
    calibrations: dict[str, QuantityCalibration] = {}
    for name, of in out_of_bag.items():
        if name != TARGET and _too_few(name, of, n_available, method):
            continue
        try:
            if name == TARGET and is_constant:
                raise CalibrationError("All targets are the same.")
            points[name] = collect_points(name, of, centre, source)
            if method == "auto":
                method = fit_best(points[name], MODEL_METHODS).method
            calibrations[name] = calibrate_points(points[name], method, **n)
        except CalibrationError as error:
            points.pop(name, None)
            if name != TARGET:
                if method != "none":
                    warn(f"{name}: {error} The factor that calibrates energies is used.")
                continue
            if is_constant:
                warn(f"{error} There is nothing to learn, and the uncertainty is 0.")
            elif method != "none" and not isinstance(error, ExactFitError):
                remedy = "A model with `uncertainty='posterior'` needs no subsamples."
                raise CalibrationError(f"{error} {remedy}") from None
            else:
                warn(f"{error} The ensemble standard deviation is not calibrated.")
            of_kinds = n["n_subsampled"] if n["n_posterior"] else 0
            calibrations[name] = QuantityCalibration(NoCalibration(n_subsampled=of_kinds))
            method = "none" if method == "auto" else method
    return points, calibrations, method


def _too_few(name: str, of: OutOfBagRows, n_available: int, method: str) -> bool:
    """Return whether a derivative has too few structures for a calibration, with a warning."""
    n = len(np.unique(of.quantity.structure[asymmetric(of) & of.used]))
    least = KINDS[name].least
    too_few = n < min(least, n_available)
    if method != "none" and n < min(10, n_available):
        effect = "the calibration is poorly determined."
        if too_few:
            effect = f"{least} are needed to calibrate; the factor of energies is used."
        warn(f"{name}: {counted(n, 'out-of-bag structure')}; {effect}")
    return too_few


def largest_std(points: CalibrationData | None, settings: Settings) -> float:
    """Return the largest standard deviation of all members of an out-of-bag point."""
    if points is None:
        return 0.0
    if not settings.n_subsampled or points.posterior_std is None:
        return float(points.ensemble_std.max())
    n, k = settings.n_subsampled - 1, max(settings.n_drawn - 1, 0)
    squares = n * points.ensemble_std**2 + k * points.posterior_std**2
    return float(np.sqrt(squares.max() / (settings.n_subsampled + settings.n_drawn - 1)))


def find_limits(
    points: CalibrationData | None, rows: Rows, settings: Settings
) -> tuple[Float64Array, float, float | None]:
    """Return the limits that few of the out-of-bag structures exceed.

    They are those of the largest novelty of each element, of the mean, and of p or ŝ: None without
    points.

    Parameters
    ----------
    points : CalibrationData or None
        Of the target.
    rows : Rows
    settings : Settings
    """
    sample, novelty = rows.sample, rows.novelty[len(rows.functions)]
    novelty = np.where(novelty > 0, np.minimum(novelty + ROUNDING, 1.0), 0.0)
    scales = element_scales(novelty[:, 1:])
    novelty = np.stack([(novelty[:, 1:] / scales).max(axis=1), novelty[:, 0]], axis=1)
    largest = None
    if not sample.per_atom:
        largest = is_largest(sizes_of(sample.composition, sample.species, sample.periodic))
    if points is None:
        limit, of_mean = fit_limits([*novelty.T], largest)
        return np.minimum(limit * scales, 1.0), of_mean, None
    std, n_drawn = points.ensemble_std, settings.n_drawn
    if settings.n_subsampled and points.posterior_std is not None:
        std = points.posterior_std
    assert points.structure is not None
    order = np.argsort(sample.source)
    structure = order[np.searchsorted(sample.source, points.structure, sorter=order)]
    rng = np.random.default_rng([settings.seed, _LIMIT_STREAM])
    samples = scattered(std, n_drawn, rng) if n_drawn > 1 else std[None]
    stds = []
    for values in samples:
        of_structures = np.zeros(len(sample.source))
        np.maximum.at(of_structures, structure, values)
        stds.append(of_structures)
    used, n = np.unique(structure), len(samples)
    measures = [np.tile(column, n) for column in novelty[used].T]
    measures.append(np.concatenate([of[used] for of in stds]))
    all_largest = None if largest is None else np.tile(largest[used], n)
    limit, of_mean, of_std = fit_limits(measures, all_largest, n)
    return np.minimum(limit * scales, 1.0), of_mean, of_std


def check_labels(
    out_of_bag: Mapping[str, OutOfBagRows], copies: IntArray, source: IntArray, *, per_atom: bool
) -> None:
    """List structures whose labels are far from their out-of-bag predictions.

    Where too few members are without a row, the full model without it is used.

    Parameters
    ----------
    out_of_bag : mapping of str to OutOfBagRows
    copies : (n_structures,) array of int
        Structures of the same number are duplicates.
    source : (n_structures,) array of int
        Numbers of structures in the input.
    per_atom : bool
        Whether the target belongs to atoms.
    """
    for name, of in out_of_bag.items():
        quantity = of.quantity
        residuals, std = np.full((2, len(quantity.y)), np.nan)
        if of.full is not None:
            residuals, std = of.full.residuals.copy(), of.full.posterior_std.copy()
        if of.absent.shape[1]:
            used, mean, ensemble_std, _ = out_of_bag_prediction(of.members, of.absent)
            residuals[used], std[used] = quantity.y[used] - mean, ensemble_std
        rows = np.flatnonzero(np.isfinite(residuals))
        points = quantity.y[rows], residuals[rows], std[rows], quantity.structure[rows]
        warn_of_outliers(name, find_outliers(*points, copies), source)
        if name == TARGET and not per_atom:
            check_copies(*points[:2], copies[points[3]], source[points[3]])


# --- the trained model ---


def calibrate(
    ensemble: TrainedEnsemble,
    problem: TrainingProblem,
    representation: Representation,
    size_curve: Mapping[int, float],
    stages: Stages,
) -> Fitted:
    """Choose what is predicted, add posterior members, and calibrate each quantity out of bag.

    Parameters
    ----------
    ensemble : TrainedEnsemble
    problem : TrainingProblem
    representation : Representation
    size_curve : mapping of int to float
        Out-of-bag errors of the numbers of representatives that were compared.
    stages : Stages
    """
    settings, baseline = problem.settings, problem.baseline
    rows, sample, whitening = ensemble.rows, ensemble.rows.sample, ensemble.rows.whitening
    r, functions = len(rows.functions), rows.functions
    with stages.stage("Calibration"), few_threads(problem.data.n_rows, r):
        out_of_bag = predict_out_of_bag(ensemble, settings)
        centre = choose_centre(out_of_bag, settings)
        points, calibrations, method = calibrate_quantities(
            out_of_bag, settings, centre, sample.source, is_constant=np.ptp(problem.data.y) == 0
        )
        check_labels(out_of_bag, sample.copies, sample.source, per_atom=sample.per_atom)
        spreads = {name: _spread(of, rows.kept.y[:, 0]) for name, of in out_of_bag.items()}
        element_limits, mean_limit, std_limit = find_limits(points.get(TARGET), rows, settings)
    settings = settings.model_copy(update={"calibration": method})
    rng = np.random.default_rng([settings.seed, _POSTERIOR_STREAM])
    members = ensemble.weights[:, None]
    columns = predictive_weights(
        ensemble.full, members, centre, settings.n_drawn, rng, whitening.pivots
    )[:, 0]
    weights = whitening.kernel_weights(np.column_stack([columns, ensemble.full.weights[:, 0]]))
    if isinstance(functions, LabelFunctions):
        weights = functions.packed.T @ weights
    packages = ("numpy", "scipy", "ase", "dscribe", "featomic", "safetensors")
    none = np.zeros(settings.n_drawn)  # intercepts and baselines have no posterior
    return Fitted(
        settings=settings,
        representation=representation.exact(),  # predictions are float64
        representatives=rows.representatives.features,
        origins=rows.representatives.origins,
        kernel_scale=rows.scale,
        # Row-major, as in a file: the order in memory decides how products are rounded.
        weights=np.ascontiguousarray(weights[:, :-1]),
        intercepts=centred(ensemble.intercepts, np.asarray(rows.center), centre, none),
        pp_weights=np.ascontiguousarray(weights[:, -1]),
        pp_intercept=rows.center,
        baseline=replace(baseline, members=centred(baseline.members, baseline.full, centre, none)),
        calibrations=calibrations,
        points=points,
        pp_variance=_projected_variance(ensemble, settings),
        training_novelty=(float(element_limits.max()), mean_limit),
        element_novelty=dict(zip(representation.species, element_limits.tolist(), strict=True)),
        largest_ensemble_std=largest_std(points.get(TARGET), settings),
        record=_record(problem, ensemble, points, spreads, centre, size_curve, stages),
        provenance=Provenance(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            packages={
                "qualms": qualms.__version__,
                **{name: version(name) for name in packages},
                **calculator_version(settings.baseline_potential),
            },
            data_digest=problem.census.digest,
        ),
        std_limit=std_limit,
        largest_size=_largest_sizes(problem.data),
    )


def _largest_sizes(data: TrainingSet) -> tuple[int, int] | None:
    """Return the most atoms, and the most other than hydrogen, of a molecule, if size matters."""
    if data.per_atom or data.periodic.all():
        return None
    sizes = sizes_of(data.composition, data.species, data.periodic)
    n_atoms, n_heavy = sizes.max(axis=0).tolist()
    return n_atoms, n_heavy


def _projected_variance(ensemble: TrainedEnsemble, settings: Settings) -> ProjectedVariance | None:
    if not settings.keep_pp or settings.basis == "labels":
        return None
    precision: Any = np.float64 if settings.learns_forces else np.float32
    process = ensemble.full.process
    factors = (ensemble.rows.whitening.factor, process.factor)
    whitening, posterior = (np.ascontiguousarray(f, dtype=precision) for f in factors)
    return ProjectedVariance(whitening, posterior, process.noise_variance, ensemble.scale**2)


def _record(
    problem: TrainingProblem,
    ensemble: TrainedEnsemble,
    points: Mapping[str, CalibrationData],
    spreads: Mapping[str, float],
    centre: float,
    size_curve: Mapping[int, float],
    stages: Stages,
) -> Record:
    census, quantities, rows, kept = problem.census, {}, ensemble.rows, ensemble.rows.kept
    for name, quantity in problem.data.quantities.items():
        of = points.get(name)
        z = None if of is None else of.residuals
        n_structures = 0 if of is None or of.structure is None else len(np.unique(of.structure))
        quantities[name] = QuantityRecord(
            n_rows=len(quantity.y),
            n_without=census.n_without(name),
            n_out_of_bag=0 if z is None else len(z),
            n_out_of_bag_structures=n_structures,
            rmse=None if z is None else float(np.sqrt(np.mean(z**2))),
            mae=None if z is None else float(np.mean(np.abs(z))),
            noise=float(np.sqrt(ensemble.full.noise[name])),
            spread=None if z is None else spreads[name],
        )
        if doubt := quantities[name].doubt(problem.settings.keys[name]):
            warn(doubt)
    states = census.states
    return Record(
        n_structures=len(problem.data.source),
        n_environments=problem.data.n_environments,
        n_isolated=census.n_isolated,
        n_duplicates=census.n_duplicates,
        block_length=census.block_length,
        state=dict(*states) if len(states) == 1 else None,
        quantities=quantities,
        centre=centre,
        effective_rank=len(rows.functions),
        preset=problem.preset,
        size_curve=dict(size_curve),
        size_limit=_size_limit(problem, max(rows.novelty)),
        target_std=float(np.sqrt(np.mean(kept.y[kept.rows[TARGET]] ** 2))) or ensemble.scale,
        seconds=dict(stages.seconds),
    )
