"""Labelled structures as rows to learn from: averages over structures, or atoms."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, IntArray, joined_groups
from qualms.atomistic.baseline import anchors, atom_design, spans, structure_design
from qualms.atomistic.labels import ForceLabels, Labelled, force_labels, labelled
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import (
    check_structures,
    data_hash,
    fingerprints,
    refuse_single,
    species_of,
)
from qualms.errors import InputError, QualmsWarning
from qualms.features.soap import offsets_of
from qualms.gp.ensemble import MIN_ABSENT, draw_members, group_codes, membership_counts


@dataclass(frozen=True)
class TrainingSet:
    """What a model learns from. A row is a structure, or an atom if the target is atomic.

    Attributes
    ----------
    frames : list of Atoms
        Structures with labels.
    source : (n_frames,) array of int
        Their indices in what was given.
    centers : list of arrays of int
        Atoms of each structure whose environments are needed: all, or those with labels.
    y : (N,) array
        Target of each row: per atom, if it is extensive.
    row_structure : (N,) array of int
        Structure of each row.
    species : list of int
        Atomic numbers of all structures.
    groups : (n_frames,) array of int
        What is in or out of a sub-sample together; duplicates always are.
    n_unlabelled, n_isolated, n_duplicates : int
    isolated : dict of int to float
        Energies of isolated atoms found in the data.
    digest : str
        Of structures and labels.
    mechanics : ForceLabels, optional
        Forces and virials, if they are learned.
    """

    frames: list[Atoms]
    source: IntArray
    centers: list[IntArray]
    y: Float64Array
    row_structure: IntArray
    species: list[int]
    groups: IntArray
    n_unlabelled: int
    n_isolated: int
    n_duplicates: int
    isolated: dict[int, float]
    digest: str
    mechanics: ForceLabels | None = None

    @cached_property
    def offsets(self) -> IntArray:
        """Environments of structure s are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of([len(c) for c in self.centers])

    @property
    def n_environments(self) -> int:
        """Number of environments whose features are needed."""
        return int(self.offsets[-1])

    @cached_property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    @property
    def n_rows(self) -> int:
        """Number of labels, those of forces and virials included."""
        return len(self.y) + (0 if self.mechanics is None else len(self.mechanics.y))

    def design(self, *, per_atom: bool, species: Sequence[int] | None = None) -> Float64Array:
        """Return the design matrix of the baseline: (N, S).

        Its columns are the species of these structures, or those given, of another training set.
        """
        columns = self.species if species is None else species
        if per_atom:
            return atom_design(self.center_species, columns)
        return structure_design(self.frames, columns)


def make_training_set(
    frames: Sequence[Atoms], settings: Settings, groups: Sequence[object] | None = None
) -> TrainingSet:
    """Find labels and duplicates, and check that the structures can be used.

    Parameters
    ----------
    frames : sequence of Atoms
    settings : Settings
    groups : sequence of length len(frames), optional
        Labels of structures that belong together, such as snapshots of one trajectory.
    """
    refuse_single(frames)
    if not len(frames):
        raise InputError("frames", "no structures", "at least 2 labelled structures")
    if groups is not None and len(groups) != len(frames):
        raise InputError("groups", f"{len(groups)} labels", f"one for each of {len(frames)} frames")
    found = labelled(frames, settings.target, settings.kind, settings.species)
    used = [frames[i] for i in found.frames]
    for i in found.frames.tolist():
        check_structures([frames[i]], first=i)
    per_atom = settings.per_atom
    n_atoms = np.array([len(atoms) for atoms in used])
    centers = found.rows if per_atom else [np.arange(n) for n in n_atoms]
    y = found.values / n_atoms if settings.kind == "extensive" else found.values
    points, n_duplicates = _joined(used, groups, found.frames)
    if n_duplicates:
        warnings.warn(
            f"{n_duplicates} of {len(used)} structures repeat another one; copies are in or out of "
            "a sub-sample together.",
            QualmsWarning,
            stacklevel=4,
        )
    mechanics = None
    if settings.mechanical:
        mechanics = force_labels(frames, found.frames, settings.forces, settings.stress)
    if np.max(np.abs(y)) > 1e140:
        raise InputError("target", f"values of {np.max(np.abs(y)):.1e}", "numbers below 1e140")
    return TrainingSet(
        frames=used,
        source=found.frames,
        centers=centers,
        y=y,
        row_structure=np.repeat(np.arange(len(used)), [len(c) for c in centers])
        if per_atom
        else np.arange(len(used)),
        species=species_of(used),
        groups=points,
        n_unlabelled=found.n_unlabelled,
        n_isolated=found.n_isolated,
        n_duplicates=n_duplicates,
        isolated=found.isolated,
        digest=data_hash(used, _by_structure(found, n_atoms, mechanics, per_atom)),
        mechanics=mechanics,
    )


def _by_structure(
    found: Labelled, n_atoms: IntArray, mechanics: ForceLabels | None, per_atom: bool
) -> Float64Array | list[Float64Array]:
    """Return all labels of each structure, those of atoms with NaN where there is none."""
    if mechanics is not None:
        parts = zip(found.values, mechanics.forces, mechanics.virials, strict=True)
        return [np.concatenate([[value], f.ravel(), virial]) for value, f, virial in parts]
    if not per_atom:
        return found.values
    ends = np.cumsum([len(rows) for rows in found.rows])
    labels = [np.full(n, np.nan) for n in n_atoms.tolist()]
    for of_atoms, rows, end in zip(labels, found.rows, ends, strict=True):
        of_atoms[rows] = found.values[end - len(rows) : end]
    return labels


def resolved_species(settings: Settings, data: TrainingSet) -> Settings:
    """Return the settings with the elements that an atomic property is of: those with labels."""
    if settings.kind != "atomic" or settings.species is not None:
        return settings
    labelled_species = tuple(np.unique(data.center_species).tolist())
    return settings.model_copy(update={"species": labelled_species})


def _joined(
    frames: Sequence[Atoms], groups: Sequence[object] | None, source: IntArray
) -> tuple[IntArray, int]:
    """Return the group of each structure, and how many structures are copies of others."""
    prints = fingerprints(frames)
    codes = {digest: i for i, digest in enumerate(dict.fromkeys(prints))}
    distinct = np.array([codes[digest] for digest in prints], dtype=np.intp)
    if groups is None:
        return distinct, len(frames) - len(codes)
    labels = group_codes([groups[i] for i in source], len(frames))
    return joined_groups(distinct, labels)[distinct], len(frames) - len(codes)


def can_calibrate(counts: IntArray, settings: Settings) -> bool:
    """Whether enough members lack some row, or nothing is to be calibrated."""
    return settings.calibration == "none" or bool(np.any((counts == 0).sum(axis=1) >= MIN_ABSENT))


def draw_counts(data: TrainingSet, settings: Settings, rng: np.random.Generator) -> IntArray:
    """Draw the members: how often each row is in the training set of each, (N, N_R).

    A member whose rows do not determine the baseline of the composition, because it lacks a rare
    element, gets the few rows that do.
    """
    n = len(data.y)
    over_atoms = settings.resample == "atoms"
    groups = np.arange(n) if over_atoms else data.groups[data.row_structure]
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        what = "labelled atoms" if over_atoms else "different labelled structures"
        raise InputError("frames", f"{n_groups} {what}", f"at least 2 {what} to draw from")
    drawn = draw_members(
        n, settings.n_members, settings.subsample, rng, replace=settings.replace, groups=groups
    )
    counts = membership_counts(drawn, n)
    if settings.baseline == "composition":
        design = data.design(per_atom=settings.per_atom)
        lacking = np.flatnonzero(~spans(design, counts))
        if len(lacking):
            fixed = np.isin(groups, groups[anchors(design)])
            here = np.ix_(fixed, lacking)
            counts[here] = np.maximum(counts[here], 1)
            if not can_calibrate(counts, settings):
                raise InputError(
                    "baseline",
                    "'composition'",
                    "more different structures (or groups of them): members that lack an element "
                    "get the structures that determine it, and none is left to calibrate on",
                    "Use more structures, or baseline='mean'.",
                )
    return counts
