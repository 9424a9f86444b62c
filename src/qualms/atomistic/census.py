"""The training set, and its census: the first pass over all labelled structures.

A census of a part of the structures is read by a task; those of all parts add up to one. Structures
in memory are one part, those of files are read part by part, and results do not depend on that.
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, joined_groups
from qualms.atomistic.baseline import RCOND, atom_design
from qualms.atomistic.delta import BaselinePotential, make_baseline_potential
from qualms.atomistic.labels import (
    FINDERS,
    ForceLabels,
    Labelled,
    agreeing,
    force_labels,
    is_isolated,
    labelled,
    listed,
    reject_without_energy,
)
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET, Quantity
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import (
    FrameFiles,
    Part,
    State,
    check_structures,
    data_digest,
    data_hashes,
    divided,
    fingerprints,
    numbered,
    state_of,
)
from qualms.atomistic.trajectories import N_PAIRS, find_blocks, pair_distances, series_of
from qualms.calibration.vectors import MULTIPLICITY
from qualms.errors import InputError, counted, did_you_mean, warn
from qualms.execution import Workers
from qualms.features.base import offsets_of, ranges
from qualms.gp.ensemble import group_codes
from qualms.progress import Stages

log = logging.getLogger(__name__)

#: Groups are blocks of consecutive frames of trajectories, if there are any.
AUTO = "auto"
#: Structures whose labels are read in a task.
SCANNED = 2000
#: Largest label: weights and variances are still finite.
_LARGEST = 1e40
#: Stream of random numbers that select the atoms whose forces are learned.
_FORCES_STREAM = 6


@dataclass(frozen=True)
class TrainingSet:
    """Labelled structures: all of a training set, or a part of it.

    A row of the target is a structure, or an atom if the target is atomic.
    """

    per_atom: bool  #: whether the target is atomic
    frames: Sequence[Atoms]  #: structures with labels, perhaps in files; empty if they are not read
    source: IntArray  #: (n,): their numbers among the structures given
    sizes: IntArray  #: (n,): atoms
    numbers: IntArray  #: (Σ sizes,): atomic numbers
    volumes: Float64Array  #: (n,): of cells; zero without
    periodic: BoolArray  #: (n,): whether they are periodic along a cell vector
    #: atoms of each structure whose environments are needed: those with labels, or None for all
    centers: list[IntArray] | None
    y: Float64Array  #: (N,): labels of the target
    derivatives: ForceLabels | None  #: forces and virials by structure
    #: (n,): structures that are in or out of a subsample together; duplicates always are
    groups: IntArray
    copies: IntArray  #: (n,): the same number for duplicates

    @cached_property
    def environments(self) -> IntArray:
        """Environments of each structure that are needed: (n,)."""
        if self.centers is None:
            return self.sizes
        return np.array([len(chosen) for chosen in self.centers], dtype=np.intp)

    @cached_property
    def offsets(self) -> IntArray:
        """Environments of structure s are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of(self.environments)

    @property
    def n_environments(self) -> int:
        """Number of environments whose features are needed."""
        return int(self.offsets[-1])

    @property
    def n_rows(self) -> int:
        """Number of labels of all quantities."""
        return sum(len(quantity.y) for quantity in self.quantities.values())

    @cached_property
    def rows_of_structures(self) -> IntArray:
        """Number of labels of each structure: (n,)."""
        counts = np.zeros(len(self.source), dtype=np.intp)
        for quantity in self.quantities.values():
            counts += np.bincount(quantity.structure, minlength=len(counts))
        return counts

    @cached_property
    def species(self) -> list[int]:
        """Atomic numbers of all structures."""
        return [int(z) for z in np.unique(self.numbers)]

    @property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        if self.centers is None:
            return self.numbers
        first = offsets_of(self.sizes)[:-1]
        places = [a + chosen for a, chosen in zip(first, self.centers, strict=True)]
        return np.asarray(self.numbers[np.concatenate([np.empty(0, dtype=np.intp), *places])])

    @property
    def composition(self) -> IntArray:
        """Number of atoms of each species in each structure: (n, S)."""
        counts = np.zeros((len(self.sizes), len(self.species)), dtype=np.intp)
        structure = np.repeat(np.arange(len(self.sizes)), self.sizes)
        np.add.at(counts, (structure, np.searchsorted(self.species, self.numbers)), 1)
        return counts

    def design(self, species: Sequence[int]) -> Float64Array:
        """Return the design matrix of a baseline of species that include all: (N, S)."""
        if self.per_atom:
            return atom_design(self.center_species, species)
        X = np.zeros((len(self.sizes), len(species)))
        X[:, np.searchsorted(species, self.species)] = self.composition
        return X / self.sizes[:, None]

    @cached_property
    def quantities(self) -> dict[str, Quantity]:
        """Rows of the target, and of the derivatives of it that have labels."""
        n = np.arange(len(self.source))
        structure = np.repeat(n, self.environments) if self.per_atom else n
        species = self.center_species if self.per_atom else None
        ones, rows = np.ones(len(self.y)), np.arange(len(self.y))
        target = Quantity(self.y, rows, structure, ones, species=species)
        return {TARGET: target, **self._derived()}

    def _derived(self) -> dict[str, Quantity]:
        """Return the blocks of the derivatives, whose rows come after those of the target."""
        labels, sizes, n_frames = self.derivatives, self.sizes, len(self.sizes)
        if labels is None or not n_frames:
            return {}
        # Components of a structure follow each other, and with them those of all derivatives.
        place = np.concatenate([np.flatnonzero(mask) for mask in labels.known])
        structure = np.repeat(np.arange(n_frames), np.diff(labels.offsets))
        volumes = self.volumes
        density = np.divide(sizes, volumes, out=np.zeros(n_frames), where=volumes > 0)
        quantities = {}
        for name in DERIVATIVES:
            of_atoms, n_components = KINDS[name].of_atoms, KINDS[name].n_components
            n_vectors = sizes if of_atoms else np.ones_like(sizes)
            end = n_components * n_vectors[structure]
            rows = np.flatnonzero((place >= 0) & (place < end))
            if len(rows):
                s, component = structure[rows], place[rows] % n_components
                vector = offsets_of(n_vectors)[s] + place[rows] // n_components
                quantities[name] = Quantity(
                    labels.y[rows],
                    len(self.y) + rows,
                    s,
                    np.ones(len(rows)) if of_atoms else density[s],
                    component,
                    vector,
                    MULTIPLICITY[n_components][component],
                    self.numbers[vector] if of_atoms else None,
                )
            place = place - end
        return quantities

    def derivatives_of_groups(self, groups: IntArray) -> list[BoolArray]:
        """Return whether the group of each structure (n,) has labels of each derivative."""
        codes = np.unique(groups, return_inverse=True)[1]
        has = np.zeros((len(DERIVATIVES), int(codes.max()) + 1), dtype=bool)
        for of_groups, name in zip(has, DERIVATIVES, strict=True):
            if name in self.quantities:
                of_groups[codes[self.quantities[name].structure]] = True
        return [of_groups[codes] for of_groups in has]

    def take(self, structures: IntArray) -> TrainingSet:
        """Return the training set of some structures."""
        labels = self.derivatives
        if labels is not None:
            forces = [labels.forces[i] for i in structures]
            labels = ForceLabels(forces, labels.virials[structures])
        rows = ranges(self.offsets, structures) if self.per_atom else structures
        return replace(
            self,
            frames=_take_frames(self.frames, structures) if len(self.frames) else (),
            source=self.source[structures],
            sizes=self.sizes[structures],
            numbers=self.numbers[ranges(offsets_of(self.sizes), structures)],
            volumes=self.volumes[structures],
            periodic=self.periodic[structures],
            centers=None if self.centers is None else [self.centers[i] for i in structures],
            y=self.y[rows],
            derivatives=labels,
            groups=self.groups[structures],
            copies=self.copies[structures],
        )

    @property
    def environments_of_frames(self) -> Iterator[tuple[Atoms, IntArray]]:
        """Structures, and their atoms whose environments are needed."""
        return zip(self.frames, self.all_centers, strict=True)

    @property
    def all_centers(self) -> list[IntArray]:
        """Atoms of each structure whose environments are needed."""
        return [np.arange(n) for n in self.sizes] if self.centers is None else self.centers


def _take_frames(frames: Sequence[Atoms], structures: IntArray) -> Sequence[Atoms]:
    """Return some structures; those of files are not read."""
    if isinstance(frames, FrameFiles):
        some: FrameFiles = frames[structures]
        return some
    return [frames[i] for i in structures]


def join_sets(parts: Sequence[TrainingSet]) -> TrainingSet:
    """Return the structures of several training sets, one after the other; without frames."""
    first = parts[0]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("source", "sizes", "numbers", "volumes", "periodic", "y", "groups", "copies")
    }
    centers, derivatives = None, None
    if first.centers is not None:
        centers = [chosen for part in parts for chosen in part.centers or ()]
    if first.derivatives is not None:
        labels = [part.derivatives for part in parts if part.derivatives is not None]
        forces = [values for some in labels for values in some.forces]
        derivatives = ForceLabels(forces, np.concatenate([some.virials for some in labels]))
    return replace(first, frames=(), centers=centers, derivatives=derivatives, **arrays)


# --- the census ---


@dataclass(frozen=True)
class Census:
    """Labels of structures, and facts about them; those of several parts can be joined."""

    data: TrainingSet
    before: Float64Array  #: (N,): the target before a baseline potential is subtracted
    prints: list[bytes]  #: fingerprints of structures
    hashes: list[bytes]  #: of each structure with its labels, as they were given
    group_labels: list[str]  #: of each structure, if groups have a key
    series: list[bytes]  #: of each structure, if trajectories are looked for: `series_of`
    distances: FloatArray  #: (n, N_PAIRS), if they are: `pair_distances`
    n_unlabelled: int  #: structures, or atoms of an atomic property, without a label
    n_isolated: int
    isolated: dict[int, float]  #: energies of isolated atoms found in the data
    states: dict[State, int]  #: charges and spins, and the first structure with each
    block_length: int = 1  #: frames of a group, if trajectories are recognised

    @property
    def n_duplicates(self) -> int:
        """Number of structures that are copies of others."""
        return len(self.prints) - len({*self.prints})

    @property
    def is_periodic(self) -> bool:
        """Whether at least half of the structures are."""
        return 2 * int(self.data.periodic.sum()) >= len(self.data.source)

    @property
    def digest(self) -> str:
        """Digest of structures and labels."""
        return data_digest(self.hashes)

    def n_without(self, quantity: str) -> int:
        """Return the structures, or atoms of an atomic property, without a label of a quantity."""
        if quantity == TARGET:
            return self.n_unlabelled
        return len(self.data.source) - self.data.quantities[quantity].n_structures

    @classmethod
    def join(cls, parts: Sequence[Census]) -> Census:
        """Return the census of all structures of several parts, in order."""
        states: dict[State, int] = {}
        for part in reversed(parts):
            states |= part.states
        return cls(
            data=join_sets([part.data for part in parts]),
            before=np.concatenate([part.before for part in parts]),
            prints=[digest for part in parts for digest in part.prints],
            hashes=[digest for part in parts for digest in part.hashes],
            group_labels=[label for part in parts for label in part.group_labels],
            series=[name for part in parts for name in part.series],
            distances=np.concatenate([part.distances for part in parts]),
            n_unlabelled=sum(part.n_unlabelled for part in parts),
            n_isolated=sum(part.n_isolated for part in parts),
            isolated=agreeing(item for part in parts for item in part.isolated.items()),
            states=states,
        )


def take_census(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = AUTO,
    *,
    workers: Workers | None = None,
    stages: Stages | None = None,
    potential: BaselinePotential | None = None,
    skip_failed: bool = False,
) -> Census:
    """Read the labels of all structures, check them, and find duplicates.

    Parameters
    ----------
    frames : sequence of Atoms
        Perhaps in files, `FrameFiles`, which are then read part by part.
    settings : Settings
    groups : sequence or str, optional
        Labels of structures that belong together, or their key in ``atoms.info``; or "auto": blocks
        of consecutive frames of trajectories.
    workers : Workers, optional
    stages : Stages, optional
    potential : BaselinePotential, optional
        Labels are differences from it; workers make it themselves.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    """
    workers, stages = workers or Workers(), stages or Stages()
    check_frames(frames, groups)
    in_memory = workers.executor is None and not isinstance(frames, FrameFiles)
    parts = divided(frames, len(frames) if in_memory else SCANNED)
    key = groups if isinstance(groups, str) else None
    options = settings, key, skip_failed, potential if workers.executor is None else None
    stage = "Labels" if settings.baseline_potential is None else "Baseline"
    with stages.stage(stage, len(frames)) as advance, _once():
        censuses: list[Census] = []
        done = 0
        for census in workers.map(_scan, parts, len(parts) == 1, *options):
            censuses.append(census)
            advance(done := done + len(parts[len(censuses) - 1]))
    census = Census.join(censuses)
    data = census.data
    if not len(data.source):
        labelled(list(frames[:SCANNED]), settings.target, settings.kind, settings.species)
        raise InputError(
            "No structure has a label; at least 2 are needed to train on.", parameter="frames"
        )
    if len(parts) > 1:
        for name in {*settings.keys} - {*data.quantities}:
            FINDERS[name](list(frames[:SCANNED]), settings.keys[name])  # names keys that exist
            reject_without_energy(name, settings.keys[name])
    check_states(census.states, settings)
    block_length, labels, rows = 1, groups, data.source
    if key is not None:
        labels, rows = census.group_labels or None, np.arange(len(data.source))
    if census.series:
        labels, block_length = _blocks_of_trajectories(census)
    copies, codes = join_groups(census.prints, labels, rows)
    data = replace(data, frames=_take_frames(frames, data.source), groups=codes, copies=copies)
    if settings.kind == "extensive":
        check_not_constant(settings.target, data.y * data.sizes, data.sizes)
    if settings.baseline_potential is not None:
        check_differences(settings.baseline_potential.name, settings.target, data, census.before)
    return replace(census, data=data, block_length=block_length)


def _blocks_of_trajectories(census: Census) -> tuple[Sequence[object] | None, int]:
    """Return the blocks of consecutive frames as groups, and their length; or None, and one."""
    blocks = find_blocks(census.series, census.distances)
    if blocks.length == 1:
        return None, 1
    n = len(np.unique(blocks.groups))
    log.info(
        f"Consecutive frames: {blocks.n_frames:,} of {len(census.series):,} structures are in the "
        f"order of trajectories. Blocks of up to {blocks.length} frames, {n} groups in all, are in "
        "or out of a subsample together (`groups=None`: single structures)."
    )
    return blocks.groups.tolist(), blocks.length


def _scan(
    part: Part,
    required: bool,
    settings: Settings,
    group_key: str | None,
    skip_failed: bool,
    potential: BaselinePotential | None,
) -> Census:
    """Take the census of a part, as a task; there must be labels if they are required."""
    if potential is None and settings.baseline_potential is not None:
        potential = _potential_of_worker(settings)
    with warnings.catch_warnings(record=True) as caught, numbered(part):
        census = read_labels(part, settings, group_key, potential, skip_failed, required)
    for warning in caught:
        text = part.named(str(warning.message))
        warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)
    return census


_POTENTIALS: dict[str, BaselinePotential] = {}


def _potential_of_worker(settings: Settings) -> BaselinePotential:
    """Return the baseline potential of the labels, created once in each worker."""
    key = f"{settings.baseline_potential!r} {settings.units} {settings.representation!r}"
    if key not in _POTENTIALS:
        made = make_baseline_potential(settings, confirmed=settings.baseline_potential)
        assert made is not None
        _POTENTIALS[key] = made
    return _POTENTIALS[key]


@contextmanager
def _once() -> Iterator[None]:
    """Issue warnings of several parts that differ in numbers alone only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    alike: dict[str, list[warnings.WarningMessage]] = {}
    for warning in caught:
        alike.setdefault(re.sub(r"\d+", "", str(warning.message)), []).append(warning)
    for first, *others in alike.values():
        text = f"{first.message}"
        if others:
            text += f" The same holds for {counted(len(others), 'other part')} of the structures."
        warnings.warn_explicit(text, first.category, first.filename, first.lineno)


def check_frames(frames: Sequence[Atoms], groups: Sequence[object] | str | None) -> None:
    """Reject no structures, and groups that are none; a key of groups is not checked here."""
    if not len(frames):
        raise InputError(
            "There are no structures; at least 2 with a label are needed.", parameter="frames"
        )
    if not isinstance(frames, FrameFiles):
        for i, atoms in enumerate(frames):
            if not isinstance(atoms, Atoms):
                raise InputError(
                    f"Structure {i} is an object of type {type(atoms).__name__}, not ase.Atoms. "
                    "`frames` is a list of structures, one path, or `FrameFiles.open(paths)`.",
                    parameter=f"frames[{i}]",
                )
    if groups is None or isinstance(groups, str):
        return
    if len(groups) != len(frames):
        raise InputError(
            f"`groups` has {counted(len(groups), 'label')} for {counted(len(frames), 'structure')};"
            " it has one label for each structure.",
            parameter="groups",
        )
    if len(np.unique(group_codes(groups, len(frames)))) == len(frames) > 1:
        raise InputError(
            "No two values of `groups` are the same, so that no structures belong together. "
            "`groups` has the same value for structures of one molecule, crystal or trajectory; "
            "leave it out if each structure is independent. Labels to learn belong in atoms.info "
            "or atoms.arrays.",
            parameter="groups",
        )


def group_labels(frames: Sequence[Atoms], key: str) -> list[str]:
    """Return the label of the group of each structure, under a key of ``atoms.info``."""
    for i, atoms in enumerate(frames):
        if key not in atoms.info:
            present = {str(name) for atoms in frames for name in atoms.info}
            raise InputError(
                f"Structure {i} has no {key!r} in atoms.info, the key of `groups`."
                f"{did_you_mean(key, present)} {listed(present)}",
                parameter="groups",
            )
    return [str(atoms.info[key]) for atoms in frames]


def read_labels(
    part: Part,
    settings: Settings,
    group_key: str | None,
    potential: BaselinePotential | None,
    skip_failed: bool,
    required: bool,
) -> Census:
    """Find labels, and check the structures that have some.

    Parameters
    ----------
    part : Part
    settings : Settings
    group_key : str or None
        Key of the labels of groups in ``atoms.info``; or "auto".
    potential : BaselinePotential or None
        Labels are differences from it.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    required : bool
        Whether there must be a label of each quantity; a part of the structures may have none.
    """
    frames = list(part.frames)
    finds_trajectories = group_key == AUTO and settings.resample != "atoms"
    groups = group_labels(frames, group_key) if group_key and group_key != AUTO else []
    scanned = labelled(frames, settings.target, settings.kind, settings.species, required=required)
    for i in scanned.frames.tolist():
        check_structures([frames[i]], first=i)
    sizes = [len(rows) for rows in scanned.rows] if settings.per_atom else [1] * len(scanned.frames)
    labels: list[Any] = np.split(scanned.values, np.cumsum(sizes)[:-1]) if sizes else []
    derivatives, totals = None, scanned
    if settings.per_atom:
        labels = [np.concatenate(pair) for pair in zip(scanned.rows, labels, strict=True)]
    if settings.learns_forces:
        keys = settings.forces, settings.stress
        derivatives = force_labels(frames, scanned.frames, *keys, required=required)
        parts = zip(labels, derivatives.forces, derivatives.virials, strict=True)
        labels = [np.concatenate([y, f.ravel(), v]) for y, f, v in parts]
    prints = fingerprints([frames[i] for i in scanned.frames])
    hashes = data_hashes(prints, labels)
    if potential is not None:
        scanned, derivatives = _differences(
            frames, scanned, derivatives, potential, skip_failed=skip_failed, required=required
        )
    used = [frames[i] for i in scanned.frames]
    n_atoms = np.array([len(atoms) for atoms in used], dtype=np.intp)
    has_potential = np.isin(totals.frames, scanned.frames)
    y, before = scanned.values, scanned.values
    if settings.kind == "extensive":
        y, before = scanned.values / n_atoms, totals.values[has_potential] / n_atoms
    if np.max(np.abs(y), initial=0.0) > _LARGEST:
        raise InputError(
            f"Labels {settings.target!r} are as large as {np.max(np.abs(y)):.1e}; numbers above "
            f"{_LARGEST:g} cannot be learned. Correct these labels, or use other units.",
            parameter="target",
        )
    states: dict[State, int] = {}
    for i in scanned.frames.tolist():
        states.setdefault(state_of(frames[i], settings.keys.values()), int(part.numbers[i]))
    none = np.empty(0, dtype=np.intp)
    data = TrainingSet(
        per_atom=settings.per_atom,
        frames=(),
        source=part.numbers[scanned.frames],
        sizes=n_atoms,
        numbers=np.concatenate([none, *(atoms.numbers for atoms in used)]).astype(np.intp),
        volumes=np.array([a.cell.volume if a.cell.rank == 3 else 0.0 for a in used], float),
        periodic=np.array([atoms.pbc.any() for atoms in used], bool),
        centers=scanned.rows if settings.per_atom else None,
        y=y,
        derivatives=derivatives,
        groups=np.arange(len(used)),
        copies=np.arange(len(used)),
    )
    return Census(
        data=data,
        before=before,
        prints=list(itertools.compress(prints, has_potential)),
        hashes=hashes,
        group_labels=[groups[i] for i in scanned.frames] if groups else [],
        series=[series_of(atoms) for atoms in used] if finds_trajectories else [],
        distances=np.reshape(
            [pair_distances(atoms) for atoms in used] if finds_trajectories else [],
            (-1, N_PAIRS),
        ).astype(np.float32),
        n_unlabelled=scanned.n_unlabelled,
        n_isolated=scanned.n_isolated,
        isolated=scanned.isolated,
        states=states,
    )


def check_states(states: Mapping[State, int], settings: Settings) -> None:
    """Reject structures that differ in charge or spin, unless that is allowed."""
    if len(states) > 1 and not settings.mixed_states:
        (state, i), (other, j) = sorted(states.items(), key=lambda item: item[1])[:2]
        keys = sorted({key for key, _ in {*state} ^ {*other}})
        raise InputError(
            f"Structures {i} and {j} differ in {' and '.join(map(repr, keys))}. The model knows "
            "elements and positions alone, so that it cannot tell charges or spins apart: train a "
            "model for each. Use `mixed_states=True` to learn from all of them nevertheless.",
            parameter="mixed_states",
        )


def check_not_constant(target: str, values: Float64Array, sizes: IntArray) -> None:
    """Warn if an extensive property does not depend on the numbers of atoms.

    Parameters
    ----------
    target : str
        Key of the labels.
    values : (n,) array
        Labels of structures.
    sizes : (n,) array of int
        Numbers of atoms.
    """
    if np.ptp(values) == 0 and np.ptp(sizes) > 0:
        warn(
            f"All labels {target!r} are {values[0]:g} though structures differ in size. For a "
            "property that is not a sum over atoms, use kind='intensive'."
        )


def check_differences(name: str, target: str, data: TrainingSet, before: Float64Array) -> None:
    """Warn if differences from a baseline potential vary more than the energies.

    A potential of the opposite sign doubles them, other units do more.

    Parameters
    ----------
    name : str
        Of the potential.
    target : str
        Key of the energies.
    data : TrainingSet
        Differences per atom.
    before : (N,) array
        Energies per atom.
    """
    X, y = data.design(data.species), np.stack([before, data.y], axis=1)
    rest = y - y.mean(axis=0)
    rest -= X @ np.linalg.lstsq(X, rest, rcond=RCOND)[0]
    energies, differences = np.sqrt(np.mean(rest**2, axis=0))
    if differences > 1.5 * energies + 1e-10 * np.abs(y).max():  # and not by rounding
        warn(
            f"Differences from the baseline {name} vary by {differences:.3g} per atom, "
            f"the energies {target!r} by {energies:.3g}: it does not help. Check "
            "units and signs."
        )


def _differences(
    frames: Sequence[Atoms],
    targets: Labelled,
    derivatives: ForceLabels | None,
    potential: BaselinePotential,
    *,
    skip_failed: bool,
    required: bool,
) -> tuple[Labelled, ForceLabels | None]:
    """Return energies, forces and virials less those of a baseline potential.

    Structures for which it fails are left out with `skip_failed`, isolated atoms always.
    """
    indices, n = targets.frames, len(targets.frames)
    labels = derivatives or ForceLabels([np.empty(0)] * n, np.full((n, 6), np.nan))
    forces, virials, energies = labels.forces[:], labels.virials.copy(), np.empty(n)
    pairs = zip(forces, virials, strict=True)
    has_labels = np.array([[np.isfinite(values).any() for values in pair] for pair in pairs], bool)
    has_labels = has_labels.reshape(-1, 2)
    for has_forces, has_stress in np.unique(has_labels, axis=0).tolist():
        rows = np.flatnonzero((has_labels == (has_forces, has_stress)).all(axis=1))
        values = potential.evaluate(
            [frames[i] for i in indices[rows]],
            forces=has_forces,
            stress=has_stress,
            indices=indices[rows].tolist(),
            skip_failed=skip_failed,
        )
        energies[rows] = values.energies
        for k, row in enumerate(rows):
            atoms = frames[indices[row]]
            if values.forces is not None:
                forces[row] = forces[row] - values.forces[k]
            if values.stresses is not None:
                virials[row] -= values.stresses[k] * atoms.cell.volume / len(atoms)
    kept = np.flatnonzero(np.isfinite(energies))
    if required and not len(kept):
        raise InputError(
            f"The baseline {potential.name} failed for every structure with a label. Use another "
            "baseline, or correct its arguments.",
            parameter="baseline",
        )
    alone = {int(a.numbers[0]): i for i, a in enumerate(frames) if is_isolated(a)}
    numbers = [alone[z] for z in targets.isolated]
    of_atoms = potential.evaluate([frames[i] for i in numbers], indices=numbers, skip_failed=True)
    isolated = zip(targets.isolated.items(), of_atoms.energies.tolist(), strict=True)
    left = replace(
        targets,
        frames=indices[kept],
        values=(targets.values - energies)[kept],
        n_unlabelled=targets.n_unlabelled + n - len(kept),
        isolated={z: value - energy for (z, value), energy in isolated if np.isfinite(energy)},
    )
    if derivatives is None:
        return left, None
    return left, ForceLabels([forces[i] for i in kept], virials[kept])


def join_groups(
    prints: Sequence[bytes], groups: Sequence[object] | None, source: IntArray
) -> tuple[IntArray, IntArray]:
    """Return a number for each different structure, and the groups, in which duplicates are one.

    Parameters
    ----------
    prints : sequence of bytes
        Fingerprints of the n structures with labels.
    groups : sequence, optional
        Label of each structure of the input; duplicates alone are grouped without these.
    source : (n,) array of int
        Numbers of the n structures in the input.
    """
    codes = {digest: i for i, digest in enumerate(dict.fromkeys(prints))}
    distinct = np.array([codes[digest] for digest in prints], dtype=np.intp)
    if n_duplicates := len(prints) - len(codes):
        warn(
            f"{n_duplicates} of {len(prints)} structures are duplicates; copies are in or out of a "
            "subsample together."
        )
    if groups is None:
        return distinct, distinct
    labels = group_codes([groups[i] for i in source], len(prints))
    return distinct, joined_groups(distinct, labels)[distinct]


def thinned(data: TrainingSet, n_atoms: int, seed: int) -> TrainingSet:
    """Return a training set with the forces on some atoms of each structure.

    Parameters
    ----------
    data : TrainingSet
    n_atoms : int
        Number of atoms whose forces are used, in each structure.
    seed : int
        The random choice of atoms depends on it and on the number of the structure in the input.
    """
    assert data.derivatives is not None
    forces = []
    for number, all_forces in zip(data.source.tolist(), data.derivatives.forces, strict=True):
        rng = np.random.default_rng([seed, _FORCES_STREAM, number])
        chosen = rng.permutation(len(all_forces))[:n_atoms]
        forces.append(np.full_like(all_forces, np.nan))
        forces[-1][chosen] = all_forces[chosen]
    return replace(data, derivatives=ForceLabels(forces, data.derivatives.virials))
