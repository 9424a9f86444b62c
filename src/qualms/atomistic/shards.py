"""Training on shards: structures that are read, and rows that are computed, part by part.

A sparse Gaussian process needs sums over the data, and little else. Three passes over structures
compute them, each a function of a part of the structures that `qualms.execution` runs here or on
workers:

1. `scan`: labels, compositions and duplicates.
2. `candidates`: features, and the farthest points within a part; representatives are selected among
   those of all parts. As in `qualms.atomistic.training`, every environment is at most twice as far
   from a representative as the guarantee of the plain algorithm states.
3. `sum_rows_of`: features, kernel rows φ and their sums ΦᵀΦ and Φᵀy.

Structures are divided at random into blocks, and members are trained on sets of blocks, so that
their sums are sums over blocks. Rows of some random structures are kept: on these noise variances
are selected, the members compared with the labels they have not seen, and uncertainties calibrated.

The largest arrays are (representatives)² for each block, (kept rows) × (representatives), and a few
numbers per structure. Parts do not depend on the number of workers, and neither does the model.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.baseline import Baseline, anchors, atom_design, fit_baseline, spans
from qualms.atomistic.fitted import Record
from qualms.atomistic.labels import (
    State,
    TrainingSet,
    check_frames,
    check_not_constant,
    check_states,
    group_labels,
    join_groups,
    join_sets,
    known_baseline,
    labelled,
    read_labels,
    reject_without_energy,
    thinned,
    with_force_atoms,
)
from qualms.atomistic.reference import ReferencePotential, make_reference
from qualms.atomistic.settings import Settings, parse_memory, with_representation
from qualms.atomistic.structures import (
    FrameFiles,
    composition,
    data_digest,
    fingerprints,
    symbols_of,
)
from qualms.atomistic.training import (
    PRODUCTS,
    SELECTION_STREAM,
    Candidates,
    Draw,
    KernelRows,
    Representatives,
    Trained,
    TrainingFeatures,
    calibrate,
    candidate_settings,
    check_out_of_bag,
    fit_ensemble,
    fit_nested,
    fit_representation,
    format_size,
    join_candidates,
    largest_size,
    n_features,
    nested_sizes,
    scaled_rows,
    select_candidates,
    whitened_rows,
)
from qualms.errors import InputError, QualmsWarning, counted
from qualms.execution import AHEAD, Workers
from qualms.features.compression import sample_size
from qualms.features.gradients import BATCH as GRADIENTS
from qualms.features.representation import (
    BATCH,
    BLOCK,
    Representation,
    stop_workers,
    structure_blocks,
)
from qualms.gp.ensemble import draw_members, subsample_size
from qualms.gp.noise import BlockSums, n_left_out
from qualms.gp.sparse_gp import RowSums, sum_rows
from qualms.progress import Stages
from qualms.resources import limited

log = logging.getLogger(__name__)

#: Structures that are scanned in a task.
_SCANNED = 2000
#: Rows whose sums are computed in a task, with this number of representatives or more, and at a
#: time in it: sending the sums takes much less time than computing them.
_ROWS, _LARGE, _CHUNK = 16_384, 5000, 4096
#: Blocks that members are made of: sixteen members of half of them differ in eight of 16 blocks. If
#: no members are trained, noise variances of several quantities still need a block to test.
_BLOCKS, _FOLDS = 16, 5
#: Difference of the share of the blocks of members to the subsample that was asked for.
_ROUNDED = 0.02
#: Rows that are kept at most, groups of each quantity among them at least, and representatives
#: that are chosen at least.
_KEPT, _OF_EACH, _LEAST = 10_000, 10, 1000
#: Streams of random numbers: blocks, and rows that are kept.
_BLOCK_STREAM, _KEPT_STREAM = 7, 8


#: Where errors name a structure by its number, unless by that in a file: "Structure 3 of new.xyz".
_NUMBER = re.compile(
    r"(?P<before>\b[Ss]tructure |\bframes\[)(?P<number>\d+)(?P<after>\]?)(?!\d| of )"
)


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)


# --- parts of the structures ---


@dataclass(frozen=True)
class Part:
    """Some structures, their numbers among all, and perhaps their groups."""

    frames: Sequence[Atoms]
    numbers: IntArray  #: (n,)
    groups: IntArray | None = None  #: (n,)
    kept: BoolArray | None = None  #: (n,): whether the rows of the structure are kept
    block: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, first: int, last: int) -> Part:
        """Return the structures of a range."""
        here = slice(first, last)
        return replace(
            self,
            frames=self.frames[here],
            numbers=self.numbers[here],
            groups=None if self.groups is None else self.groups[here],
            kept=None if self.kept is None else self.kept[here],
        )


def divided(frames: Sequence[Atoms], size: int) -> list[Part]:
    """Return parts of consecutive structures."""
    numbers = np.arange(len(frames))
    edges = range(0, len(frames), size)
    return [Part(frames[i : i + size], numbers[i : i + size]) for i in edges]


_REFERENCES: dict[str, ReferencePotential | None] = {}


def _reference(settings: Settings) -> ReferencePotential | None:
    """Return the reference potential of the labels, created once in each process."""
    if settings.reference is None:
        return None
    key = f"{settings.reference!r} {settings.units} {settings.representation!r}"
    if key not in _REFERENCES:
        _REFERENCES[key] = make_reference(settings, confirmed=settings.reference)
    return _REFERENCES[key]


# --- the first pass: labels ---


class Scanned(NamedTuple):
    """What the first pass finds in a part, for each structure with a label."""

    numbers: IntArray  #: (n,): among all structures
    sizes: IntArray  #: (n,): atoms
    environments: IntArray  #: (n,)
    derived: IntArray  #: (n, 2): labels of force components, and of virial components
    prints: list[bytes]  #: fingerprints
    groups: list[str]  #: labels of groups, if there are any
    species: list[int]
    composition: IntArray  #: (n, S): atoms of each of these species
    y: Float64Array  #: (N,): labels of the target
    row_species: IntArray  #: (N,): species of the atoms that an atomic target belongs to
    n_periodic: int
    n_without: int
    n_isolated: int
    isolated: dict[int, float]
    hashes: list[bytes]
    states: dict[State, int]  #: charges and spins, and the number of the first structure


def scan(part: Part, settings: Settings, group_key: str | None, skip_failed: bool) -> Scanned:
    """Read the labels of a part, and check its structures."""
    frames = list(part.frames)
    with numbered(part):
        groups = group_labels(frames, group_key) if group_key else []
        data = read_labels(
            frames, settings, reference=_reference(settings), skip_failed=skip_failed, part=True
        )
    n, derived = len(data.frames), np.zeros((len(data.frames), 2), dtype=np.intp)
    for k, name in enumerate(("forces", "stress")):
        if name in data.quantities:
            derived[:, k] = np.bincount(data.quantities[name].structure, minlength=n)
    counts = composition(data.frames, data.species) if n else np.empty((0, 0))
    atomic = settings.per_atom and n
    return Scanned(
        numbers=part.numbers[data.source],
        sizes=np.array([len(atoms) for atoms in data.frames], dtype=np.intp),
        environments=np.diff(data.offsets),
        derived=derived,
        prints=fingerprints(data.frames),
        groups=[groups[i] for i in data.source] if group_key else [],
        species=data.species,
        composition=counts.astype(np.intp),
        y=data.y,
        row_species=data.center_species if atomic else np.empty(0, dtype=np.intp),
        n_periodic=sum(bool(np.any(atoms.pbc)) for atoms in data.frames),
        n_without=data.quantities["energy"].n_without,
        n_isolated=data.n_isolated,
        isolated=data.isolated,
        hashes=data.hashes,
        states={state: int(part.numbers[i]) for state, i in data.states.items()},
    )


@contextmanager
def numbered(part: Part) -> Iterator[None]:
    """Name structures by their numbers among all, and by their files, in errors."""

    def name(match: re.Match[str]) -> str:
        i, frames = int(match["number"]), part.frames
        text = f"{match['before']}{part.numbers[i]}{match['after']}"
        if isinstance(frames, FrameFiles):
            text += f" ('{frames.paths[frames.file[i]]}', frame {frames.number[i]})"
        return text

    try:
        yield
    except InputError as error:
        message, parameter = (_NUMBER.sub(name, text) for text in (str(error), error.parameter))
        raise InputError(message, parameter=parameter) from error


@dataclass(frozen=True)
class Census:
    """What the first pass finds in all structures: a few numbers for each with a label."""

    settings: Settings  #: with the representation and the baseline
    species: list[int]
    numbers: IntArray  #: (n,): among all structures
    sizes: IntArray  #: (n,): atoms
    environments: IntArray  #: (n,)
    derived: IntArray  #: (n, 2)
    groups: IntArray  #: (n,)
    composition: IntArray  #: (n, S)
    y: Float64Array  #: (N,)
    row_species: IntArray  #: (N,) of an atomic target
    isolated: dict[int, float]
    n_without: int
    n_isolated: int
    n_duplicates: int
    states: dict[State, int]  #: charges and spins, and the first structure with each
    digest: str
    preset: str

    def with_size(self, n_representatives: int) -> Census:
        """Return a copy with a number of representatives."""
        update = {"n_representatives": n_representatives}
        return replace(self, settings=self.settings.model_copy(update=update))

    @property
    def n_environments(self) -> int:
        """Environments of all structures."""
        return int(self.environments.sum())

    @property
    def n_rows(self) -> int:
        """Labels of all quantities."""
        return len(self.y) + int(self.derived.sum())

    @property
    def rows(self) -> IntArray:
        """Labels of each structure: (n,)."""
        own = self.environments if self.settings.per_atom else 1
        return np.asarray(self.derived.sum(axis=1) + own)

    @property
    def n_labels(self) -> dict[str, int]:
        """Labels of each quantity that has some."""
        forces, stress = self.derived.sum(axis=0).tolist()
        found = {"energy": len(self.y), "forces": forces, "stress": stress}
        return {name: n for name, n in found.items() if n}

    @cached_property
    def design(self) -> Float64Array:
        """Design matrix of the baseline: (N, S)."""
        if self.settings.per_atom:
            return atom_design(self.row_species, self.species)
        return np.asarray(self.composition / self.sizes[:, None])

    @property
    def of_rows(self) -> IntArray:
        """Structure of each row of the target: (N,)."""
        n = np.arange(len(self.numbers))
        return np.repeat(n, self.environments) if self.settings.per_atom else n


def take_census(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None,
    workers: Workers,
    stages: Stages,
    *,
    skip_failed: bool,
) -> Census:
    """Read the labels of all structures, and choose what depends on all of them."""
    check_frames(frames, groups)
    parts = divided(frames, _SCANNED)
    key = groups if isinstance(groups, str) else None
    options = settings, key, skip_failed
    with stages.stage("Labels", len(frames)) as advance, _once():
        found = list(workers.map(scan, parts, *options, on_done=_counting(advance)))
    species = sorted({z for one in found for z in one.species})
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in found])
        for name in ("numbers", "sizes", "environments", "derived", "y", "row_species")
    }
    n = len(joined["numbers"])
    if not n:
        labelled(list(frames[:_SCANNED]), settings.target, settings.kind, settings.species)
        raise InputError(
            "No structure has a label; at least 2 are needed to train on.", parameter="frames"
        )
    counts, first = np.zeros((n, len(species)), dtype=np.intp), 0
    states: dict[State, int] = {}
    isolated: dict[int, float] = {}
    for one in found:
        states |= {state: i for state, i in one.states.items() if state not in states}
        here = slice(first, first := first + len(one.numbers))
        counts[here, np.searchsorted(species, one.species)] = one.composition
        for z, value in one.isolated.items():
            if not math.isclose(isolated.setdefault(z, value), value, rel_tol=1e-8):
                raise InputError(
                    f"There are isolated {symbols_of([z])} atoms with energies {isolated[z]:.10g} "
                    f"and {value:.10g}. Keep one for each element.",
                    parameter="frames",
                )
    check_states(states, settings)
    labels = [label for one in found for label in one.groups] if key else groups
    codes, n_duplicates = join_groups(
        [digest for one in found for digest in one.prints],
        labels,
        np.arange(n) if key else joined["numbers"],
    )
    kinds = settings.species
    if settings.per_atom and kinds is None:
        kinds = tuple(np.unique(joined["row_species"]).tolist())
    stored = {"memory": None, "threads": None, "species": kinds}
    # One structure of all elements stands for the others.
    periodic = sum(one.n_periodic for one in found) >= 0.5 * n
    alike = Atoms(species, np.zeros((len(species), 3)), pbc=periodic)
    settings, preset = with_representation(settings.model_copy(update=stored), [alike])
    settings = with_force_atoms(settings, joined["sizes"].tolist())
    if isinstance(settings.force_atoms, int):
        joined["derived"][:, 0] = np.minimum(joined["derived"][:, 0], 3 * settings.force_atoms)
    if settings.kind == "extensive":
        check_not_constant(settings.target, joined["y"] * joined["sizes"], joined["sizes"])
    census = Census(
        **joined,
        settings=settings,
        species=species,
        groups=codes,
        composition=counts,
        isolated=isolated,
        n_without=sum(one.n_without for one in found),
        n_isolated=sum(one.n_isolated for one in found),
        n_duplicates=n_duplicates,
        states=states,
        digest=data_digest(digest for one in found for digest in one.hashes),
        preset=preset,
    )
    for name, key_of in (("forces", settings.forces), ("stress", settings.stress)):
        if key_of is not None and name not in census.n_labels:
            reject_without_energy(name, key_of)
    known = known_baseline(settings, species, census.design, isolated)
    return replace(census, settings=known)


@contextmanager
def _once() -> Iterator[None]:
    """Issue warnings of several parts that differ in numbers alone only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    alike = {re.sub(r"\d+", "", str(w.message)): w for w in reversed(caught)}
    for w in reversed(alike.values()):
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def _counting(advance: Callable[[int], object]) -> Callable[[Any], None]:
    """Return a callback that advances the progress bar by the size of a finished part."""
    done = 0

    def on_done(part: Part) -> None:
        nonlocal done
        done += len(part)
        advance(done)

    return on_done


def _part(frames: Sequence[Atoms], census: Census, some: IntArray, **others: Any) -> Part:
    """Return some structures of those with labels; structures of files are read later."""
    numbers = census.numbers[some]
    chosen = frames[numbers] if isinstance(frames, FrameFiles) else [frames[i] for i in numbers]
    return Part(chosen, numbers, census.groups[some], **others)


# --- blocks and members ---


class Blocks(NamedTuple):
    """Blocks of structures, and the members that are made of them."""

    block: IntArray  #: (n,): block of each structure
    counts: IntArray  #: (B, N_R): how often each block is in each member
    baseline: Baseline


def draw_blocks(census: Census) -> Blocks:
    """Divide structures into blocks, draw the blocks of members, and fit their baselines.

    Structures of a group are in one block. If some member lacks an element, the few groups that
    determine the baselines of all are in a block of their own, which every member has.
    """
    settings, groups = census.settings, np.unique(census.groups, return_inverse=True)[1]
    n_groups = int(groups.max()) + 1
    if n_groups < 2:
        raise InputError(
            "All structures belong to one group; at least 2 groups are needed to draw subsamples "
            "from.",
            parameter="frames",
        )
    rng = np.random.default_rng([settings.seed, _BLOCK_STREAM])
    n_blocks = min(_n_blocks(settings), n_groups)
    # Groups with the same quantities are spread evenly, and those with rare ones come first.
    kinds = _kinds(census, groups) @ (1, 2)
    rarity = np.bincount(kinds)[kinds]
    order = rng.permutation(n_groups)
    order = order[np.lexsort((kinds[order], rarity[order]))]
    of_group = np.empty(n_groups, dtype=np.intp)
    of_group[order] = np.arange(n_groups) % n_blocks
    counts = np.zeros((n_blocks, 0), dtype=np.intp)
    if settings.n_subsampled:
        share = subsample_size(settings.subsample, n_groups) / n_groups
        counts = draw_members(n_blocks, settings.n_members, share, rng, replace=settings.replace)
        used = counts[:, 0].sum() / n_blocks
        if abs(used - share) > _ROUNDED and not settings.replace:
            _warn(
                f"Members are trained on {used:.3g} of the structures, not {share:.3g}: subsamples "
                f"are made of {n_blocks} blocks."
            )
    rows = census.of_rows
    lacking = ~spans(census.design, counts[of_group[groups[rows]]])
    anchored = settings.linear_baseline == "composition" and bool(lacking.any())
    if anchored:
        of_group[groups[rows[anchors(census.design)]]] = n_blocks
        counts = np.concatenate([counts, np.ones((1, counts.shape[1]), dtype=np.intp)])
    check_out_of_bag(settings, counts[of_group[groups[rows]]], anchored=anchored)
    block = of_group[groups]
    baseline = fit_baseline(
        settings.linear_baseline,
        census.design,
        census.y,
        species=census.species,
        kind=settings.kind,
        counts=counts[block[rows]],
        isolated=census.isolated,
    )
    return Blocks(block, counts, baseline)


def _n_blocks(settings: Settings) -> int:
    return _BLOCKS if settings.n_subsampled else _FOLDS if settings.learns_forces else 1


def _kinds(census: Census, groups: IntArray) -> BoolArray:
    """Return whether each group has forces, and stresses: (n_groups, 2)."""
    columns = [np.bincount(groups, weights=n) > 0 for n in census.derived.T]
    return np.stack(columns, axis=1)


def keep_rows(census: Census, blocks: Blocks) -> BoolArray:
    """Return the structures whose rows are kept: (n,), random groups that some members lack.

    With several quantities, groups of the blocks that test noise variances and of others alternate
    as long as there are both, and some groups of each quantity come first.
    """
    M = census.settings.n_selected
    rng = np.random.default_rng([census.settings.seed, _KEPT_STREAM])
    groups = np.unique(census.groups, return_inverse=True)[1]
    sizes = np.bincount(groups, weights=census.rows)
    lacked = (blocks.counts == 0).any(axis=1) | (blocks.counts.shape[1] == 0)
    order = rng.permutation(np.unique(groups[lacked[blocks.block]]))
    if census.derived.any():
        block, later = np.empty(len(sizes), dtype=np.intp), np.ones(len(order), dtype=bool)
        block[groups] = blocks.block
        tests = block[order] < n_left_out(_n_blocks(census.settings))
        rank = np.where(tests, np.cumsum(tests), np.cumsum(~tests))
        for has in _kinds(census, groups)[order].T:
            for some in (has & tests, has & ~tests):
                later[np.flatnonzero(some)[: _OF_EACH // 2]] = False
        order = order[np.lexsort((rank, later))]
    n_rows = min(census.n_rows, _KEPT, max(int(PRODUCTS / M**2), 1000))
    n_groups = int(np.searchsorted(np.cumsum(sizes[order]), n_rows)) + 1
    return np.isin(groups, order[: max(n_groups, _OF_EACH)])


# --- the second pass: representatives ---


def _read(
    part: Part, settings: Settings, species: list[int], *, reference: bool = False
) -> TrainingSet:
    """Read the labels of structures that have some; warnings have been issued before."""
    assert part.groups is not None, "known after the first pass"
    frames = list(part.frames)
    with warnings.catch_warnings(), numbered(part):
        warnings.simplefilter("ignore")
        potential = _reference(settings) if reference else None
        data = read_labels(frames, settings, reference=potential, part=True)
    labels, numbers = data.derivatives, part.numbers[data.source]
    data = replace(
        data,
        settings=settings,
        source=numbers,
        groups=part.groups[data.source],
        species=species,
        derivatives=None if labels is None else thinned(labels, settings, numbers),
    )
    return join_sets([data])


@dataclass(frozen=True)
class Plan:
    """What the tasks of the second and third pass need to know."""

    settings: Settings
    species: list[int]
    representation: Representation
    n_workers: int  #: processes that compute features within a task

    def read(self, part: Part, *, reference: bool) -> TrainingSet:
        """Read the labels of a part; less the reference potential, if there is one."""
        return _read(part, self.settings, self.species, reference=reference)

    def features(self, data: TrainingSet) -> TrainingFeatures:
        """Return the features of a part, computed as often as they are needed."""
        self.representation.prepare()  # rejects a worker with other weights of a network
        return TrainingFeatures(data, self.representation, self.n_workers, Stages(), n_block=1)


def candidates(part: Part, plan: Plan) -> Candidates:
    """Select representatives within a part."""
    data = plan.read(part, reference=False)
    seed = [plan.settings.seed, SELECTION_STREAM, int(part.numbers[0])]
    settings = candidate_settings(plan.settings)
    features = plan.features(data)
    return select_candidates(features, 0, len(data.frames), settings, np.random.default_rng(seed))


def select(
    frames: Sequence[Atoms], census: Census, plan: Plan, workers: Workers, stages: Stages
) -> Representatives:
    """Select representatives: within parts, and then among those of all parts."""
    n = selection_size(census)
    edges = np.concatenate([[0], np.cumsum(census.environments)])
    ranges = structure_blocks(edges, n)
    parts = [_part(frames, census, np.arange(first, last)) for first, last in ranges]
    settings = plan.settings
    shared = workers.share(plan)
    with stages.stage("Features", len(census.numbers)) as advance:
        found = list(workers.map(candidates, parts, shared, on_done=_counting(advance)))
    rng = np.random.default_rng([settings.seed, SELECTION_STREAM])
    return join_candidates(found, plan.representation.kernel, settings, rng, stages)


def selection_size(census: Census) -> int:
    """Return environments of a part from which representatives are selected.

    Few parts have many features in memory, many parts many candidates: √(nM) is the best for both.
    """
    n, M = census.n_environments, census.settings.n_selected
    return max(int(math.sqrt(n * M)), 2 * M)


# --- the third pass: sums over rows ---


@dataclass(frozen=True)
class RowPlan:
    """What the tasks of the third pass need to know, beside the `Plan`."""

    points: Representatives
    sizes: list[int]  #: numbers of representatives of nested models
    baseline: Float64Array  #: (S,): coefficients of the full model
    center: float  #: mean of the target less the baseline
    chunk: int  #: structures whose rows are computed at a time


class Kept(NamedTuple):
    """Structures of a block whose rows are kept, the rows, and the diagonal of the kernel."""

    data: TrainingSet
    Phi: Float64Array
    diagonal: Float64Array
    block: int


class PartSums(NamedTuple):
    """Sums over the rows of a part, and the rows that are kept, not scaled by Eq. (17)."""

    sums: dict[str, RowSums]  #: by quantity
    diagonal: float  #: sum of the diagonal of the kernel, over the rows of the target
    novelty: Float64Array  #: (n_structures, n_sizes, 2)
    kept: tuple[Kept, ...]


def sum_rows_of(part: Part, plan: Plan, rows: RowPlan) -> PartSums:
    """Compute the rows of a part, some structures at a time, and sum over them."""
    total: PartSums | None = None
    for first in range(0, len(part), rows.chunk):
        found = _sum_chunk(part.some(first, first + rows.chunk), plan, rows)
        total = found if total is None else add_sums(total, found)
    assert total is not None, "parts are not empty"
    return total


def _sum_chunk(part: Part, plan: Plan, rows: RowPlan) -> PartSums:
    data = plan.read(part, reference=True)
    Phi, diagonal, novelty = whitened_rows(plan.features(data), rows.points, rows.sizes)
    n, design = len(data.y), data.design
    C = np.zeros((data.n_rows, design.shape[1] + 2))
    for quantity in data.quantities.values():
        C[quantity.rows, 0] = quantity.y
    C[:n, 0] -= design @ rows.baseline + rows.center
    C[:n, 1:-1], C[:n, -1] = design, 1.0
    sums = {name: sum_rows(Phi[q.rows], C[q.rows]) for name, q in data.quantities.items()}
    kept: tuple[Kept, ...] = ()
    if part.kept is not None and part.kept.any():
        some = np.flatnonzero(np.isin(data.source, part.numbers[part.kept]))
        sample, chosen = data.take(some)
        kept = (Kept(sample, Phi[chosen], diagonal[chosen[chosen < n]], part.block),)
    return PartSums(sums, float(diagonal.sum()), novelty, kept)


def add_sums(a: PartSums, b: PartSums) -> PartSums:
    """Return the sums over both of two parts."""
    names = dict.fromkeys([*a.sums, *b.sums])
    sums = {
        name: a.sums[name] + b.sums[name]
        if name in a.sums and name in b.sums
        else (a.sums.get(name) or b.sums[name])
        for name in names
    }
    novelty = np.concatenate([a.novelty, b.novelty])
    return PartSums(sums, a.diagonal + b.diagonal, novelty, a.kept + b.kept)


class Summed(NamedTuple):
    """Kernel rows with the sums over all, the structures whose rows are kept, and the draw."""

    rows: KernelRows
    sample: TrainingSet
    draw: Draw


def sum_all(
    frames: Sequence[Atoms],
    census: Census,
    blocks: Blocks,
    plan: Plan,
    points: Representatives,
    workers: Workers,
    stages: Stages,
    kept: BoolArray,
    size_limit: str = "",
) -> Summed:
    """Compute the sums over all rows, block by block, and keep the rows of some structures."""
    settings, (block, counts, baseline) = plan.settings, blocks
    r = len(points.features)
    sizes = [*(nested_sizes(r) if size_limit else []), r]
    rest = census.y - baseline.predict(census.design)
    center = float(rest.mean()) if settings.linear_baseline != "none" else 0.0
    per_structure = census.n_rows / len(census.numbers)
    chunk = max(int(_CHUNK / per_structure), 1)
    rows = RowPlan(points, sizes, baseline.full, center, chunk)
    parts, of_task = [], rows_of_task(r)
    for b in range(len(counts)):
        here = np.flatnonzero(block == b)
        for some in np.array_split(here, max(math.ceil(census.rows[here].sum() / of_task), 1)):
            if len(some):
                parts.append(_part(frames, census, some, kept=kept[some], block=b))
    shared = workers.share(plan), workers.share(rows)
    found: dict[int, PartSums] = {}
    with stages.stage("Kernel rows", len(census.numbers)) as advance:
        on_done = _counting(advance)
        for b, total in workers.reduce(
            sum_rows_of, add_sums, parts, *shared, key=_block_of, on_done=on_done
        ):
            found[b] = total
    stop_workers()
    sample, Phi, diagonal, of_rows = _join_kept(
        [kept for total in found.values() for kept in total.kept], census
    )
    novelty = np.concatenate([total.novelty for total in found.values()]).swapaxes(0, 1)
    result = scaled_rows(
        plan.representation,
        points,
        Phi,
        diagonal,
        sum(total.diagonal for total in found.values()) / len(census.y),
        dict(zip(sizes, novelty, strict=True)),
        settings,
        size_limit,
    )
    factor, c = math.sqrt(result.basis.scale), census.design.shape[1] + 2
    nothing = RowSums(np.zeros((r, r)), np.zeros((r, c)), np.zeros((c, c)))
    sums: dict[str, list[RowSums]] = {name: [] for name in census.n_labels}
    for b in range(len(counts)):
        of_block = found.pop(b).sums if b in found else {}
        for name, of_blocks in sums.items():
            of_blocks.append(of_block.pop(name, nothing).scaled(factor))
    result = replace(result, blocks=BlockSums(sums, of_rows, center))
    of_sample = counts[of_rows[sample.quantities["energy"].rows]]
    return Summed(result, sample, Draw(of_sample, baseline, counts))


def rows_of_task(M: int) -> int:
    """Return the number of rows over which a task sums, for M representatives."""
    return max(int(_ROWS * min(M / _LARGE, 1.0)), _CHUNK)


def _block_of(part: Part) -> int:
    return part.block


def _join_kept(
    parts: Sequence[Kept], census: Census
) -> tuple[TrainingSet, Float64Array, Float64Array, IntArray]:
    """Return the structures whose rows are kept, these rows, their diagonal and their blocks."""
    sample = replace(
        join_sets([part.data for part in parts]),
        n_isolated=census.n_isolated,
        n_duplicates=census.n_duplicates,
        states=census.states,
        isolated=census.isolated,
        preset=census.preset,
    )
    # Rows of the target come first, and then those of its derivatives.
    Phi = np.concatenate(
        [part.Phi[: len(part.data.y)] for part in parts]
        + [part.Phi[len(part.data.y) :] for part in parts]
    )
    of_structure = np.repeat([p.block for p in parts], [len(p.data.frames) for p in parts])
    of_rows = np.empty(sample.n_rows, dtype=np.intp)
    for quantity in sample.quantities.values():
        of_rows[quantity.rows] = of_structure[quantity.structure]
    return sample, Phi, np.concatenate([part.diagonal for part in parts]), of_rows


# --- size of the problem ---


class ShardMemory(NamedTuple):
    """Bytes of the process that trains the model, of each worker, and of both in one process."""

    driver: float
    worker: float
    together: float


def shard_memory(census: Census, n_kept: int, n_workers: int = 1) -> ShardMemory:
    """Return the memory of a training on shards, by the largest arrays of its stages."""
    settings, n = census.settings, census.n_environments
    M, (d, d_raw) = min(settings.n_selected, n), n_features(census)
    size, square, kinds = settings.features.itemsize, 8.0 * M**2, len(census.n_labels)
    environments = min(selection_size(census), n)
    n_parts = -(-n // environments)
    base = 0.4e9 + settings.features.overhead
    labels = (400.0 + 16.0 * len(census.species) + 24.0 * settings.n_members) * len(census.numbers)
    joining = 2.2 * size * d * M * n_parts if n_parts > 1 else 0.0
    sampled = 12.0 * sample_size(n) * d_raw + 24.0 * d_raw**2 if d < d_raw else 0.0
    sums, kept = _n_blocks(settings) * kinds * square, 8.0 * n_kept * M
    solving = sums + 5 * square + 2 * kept
    n_tasks = census.n_rows // rows_of_task(M) + _n_blocks(settings)
    adding = sums + kept + (min(AHEAD * n_workers, n_tasks) + 1) * kinds * square
    batch = 32.0 * min(BATCH, n) * d_raw + 12.0 * BLOCK * M
    if settings.learns_forces:
        batch += 48.0 * GRADIENTS * 30 * (d_raw + M)
    selecting = 1.2 * size * environments * d
    summing = (2.0 + 3.0 * kinds) * square + 16.0 * _CHUNK * M + 12.0 * M * d
    one = max(
        joining + 3 * square, solving, sampled, selecting + batch, sums + kept + summing + batch
    )
    return ShardMemory(
        driver=base + labels + max(joining + 3 * square, solving, adding, sampled),
        worker=base + batch + max(selecting, summing),
        together=base + labels + one,
    )


def announce(census: Census, n_kept: int, workers: Workers, limit: float) -> None:
    """Log the memory that is needed; reject a training for which it does not suffice."""
    driver, worker, together = shard_memory(census, n_kept, workers.number)
    total = together if workers.executor is None else driver
    text = (
        f"{census.n_environments:,} environments, {census.n_rows:,} labels, "
        f"{census.settings.n_selected:,} representatives, in shards: about {format_size(total)} of "
        f"memory (limit {format_size(limit)})"
    )
    if workers.executor is not None:
        text += f", and {format_size(worker)} for each of {counted(workers.number, 'worker')}"
    log.info(f"{text}.")
    if total > limit:
        raise InputError(
            f"The training needs at least {format_size(1.01 * total)} of memory; the limit is "
            f"{format_size(limit)}. Raise `memory`, or use a smaller `n_representatives` or "
            "`uncertainty='posterior'`.",
            parameter="memory",
        )
    if workers.memory is not None and worker > workers.memory:
        _warn(
            f"A worker needs about {format_size(worker)}, and Dask's memory_limit of one is "
            f"{format_size(workers.memory)}. Use fewer workers with more memory each."
        )


def _record(record: Record, census: Census) -> Record:
    """Return the record of a training with the numbers of all structures, not of a sample."""
    without = {
        "energy": census.n_without,
        "forces": int(np.sum(census.derived[:, 0] == 0)),
        "stress": int(np.sum(census.derived[:, 1] == 0)),
    }
    quantities = {
        name: found.model_copy(update={"n_rows": census.n_labels[name], "n_without": without[name]})
        for name, found in record.quantities.items()
    }
    update = {
        "n_structures": len(census.numbers),
        "n_environments": census.n_environments,
        "quantities": quantities,
    }
    return record.model_copy(update=update)


# --- the whole training ---


def fit(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = None,
    *,
    workers: Workers,
    threads: int = 1,
    stages: Stages | None = None,
    skip_failed: bool = False,
) -> Trained:
    """Train a model on structures that are read part by part, and calibrate it.

    Parameters are those of `qualms.atomistic.training.fit`; groups may be a key of ``atoms.info``.
    """
    stages = stages or Stages()
    if settings.resample == "atoms":
        raise InputError(
            "`resample='atoms'` is not available for training on shards. Use "
            "`resample='structures'`, or train in one process with more `memory`.",
            parameter="resample",
        )
    workers.check(frames.paths if isinstance(frames, FrameFiles) else ())
    census = take_census(frames, settings, groups, workers, stages, skip_failed=skip_failed)
    if census.preset:
        log.info(f"Representation: {census.preset}.")
    size_limit, memory = "", parse_memory(settings.memory)
    if census.settings.n_representatives == "auto":

        def fits(n: int) -> bool:
            # That of one process, so that the number does not depend on workers.
            return shard_memory(census.with_size(n), _KEPT).together <= memory

        n, size_limit = largest_size(census, fits, _LEAST)
        census = census.with_size(n)
    blocks = draw_blocks(census)
    kept = keep_rows(census, blocks)
    announce(census, int(census.rows[kept].sum()), workers, memory)

    def read(some: IntArray) -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        data = _read(_part(frames, census, some), census.settings, census.species)
        return data.frames, data.centers

    columns = np.array(census.species)
    elements = [columns[row > 0].tolist() for row in census.composition]
    with limited(threads):
        representation = fit_representation(census, elements, census.environments, read, stages)
        n_workers = threads if workers.executor is None else 1
        plan = Plan(census.settings, census.species, representation, n_workers)
        points = select(frames, census, plan, workers, stages)
        rows, sample, draw = sum_all(
            frames, census, blocks, plan, points, workers, stages, kept, size_limit
        )
        gp = fit_nested(rows, sample, draw.baseline, stages)
        ensemble = fit_ensemble(gp, sample, draw, stages)
        found = calibrate(ensemble, sample, stages)
    fitted = found.fitted
    provenance = fitted.provenance.model_copy(update={"data_digest": census.digest})
    record = _record(fitted.record, census)
    asked = {"n_representatives": settings.n_representatives}
    settings = fitted.settings.model_copy(update=asked)
    fitted = replace(fitted, settings=settings, record=record, provenance=provenance)
    return found._replace(fitted=fitted)
