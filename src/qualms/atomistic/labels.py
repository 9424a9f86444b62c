"""Labels: where those of structures and atoms are, which are missing, and the rows they make.

A label ``key`` of a structure is looked up in ``atoms.info[key]``, then in
``atoms.info["REF_" + key]``, which ASE does not touch, and last among the stored results of a
calculator, where ASE moves energies, forces and so on when it reads a file. Labels of atoms are in
``atoms.arrays`` instead. Nothing is ever calculated. None and NaN mean that there is no label, and
so do values that a model predicted: see `qualms.io.xyz`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray, joined_groups
from qualms.atomistic.baseline import RCOND, atom_design
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET, Quantity
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import (
    FrameFiles,
    check_not_single,
    check_structures,
    data_hashes,
    fingerprints,
    symbols_of,
)
from qualms.errors import InputError, QualmsWarning, counted, did_you_mean
from qualms.features.base import VOIGT, offsets_of
from qualms.gp.ensemble import group_codes
from qualms.io.xyz import is_prediction

if TYPE_CHECKING:
    from qualms.atomistic.delta import BaselinePotential

#: Charge and spin of a structure: keys and values that are not the default. See `state_of`.
State = tuple[tuple[str, float | str], ...]
#: Keys of charges and spins in ``atoms.info`` (MACE, tblite, ORCA, FHI-aims, PySCF, …), in lower
#: case and without blanks, and what stands for none.
CHARGES = {"charge": 0.0, "total_charge": 0.0, "net_charge": 0.0}
SPINS = {
    "spin": 0.0,
    "total_spin": 0.0,
    "uhf": 0.0,
    "fixed_spin_moment": 0.0,
    "mult": 1.0,
    "multiplicity": 1.0,
    "spin_multiplicity": 1.0,
}
_DEFAULTS = CHARGES | SPINS | {"initial_charges": 0.0, "initial_magmoms": 0.0}

#: How data sets tag the isolated atoms that energies are counted from, in lower case.
ISOLATED = ("isolated_atom", "isolatedatom")
#: A matrix whose halves differ by more than this, relative to its largest number, is no stress.
_SYMMETRY = 1e-3
#: Differences from a reference potential vary more than energies from this factor on, unless that
#: is rounding, relative to the largest energy.
_WORSE, _ROUNDING = 1.5, 1e-10
#: Stream of random numbers that select the atoms whose forces are learned.
_FORCES_STREAM = 6
#: Largest label: weights and variances are still finite.
_LARGEST = 1e40
_RESULTS = "calc.results"
_FORCES = "three numbers for each atom"
_PER_ATOM = "It is an array of atoms: use `kind='atomic'`."
_PER_STRUCTURE = "It is a number per structure, and `kind='atomic'` is for values of atoms."


# --- the rows of the linear problem ---------------------------------------------------------------


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
        """Return the blocks of forces and virials, whose rows come after those of the target."""
        labels, sizes, n_frames = self.derivatives, self.sizes, len(self.sizes)
        if labels is None or not n_frames:
            return {}
        place = np.concatenate([np.flatnonzero(mask) for mask in labels.known])
        structure = np.repeat(np.arange(n_frames), np.diff(labels.offsets))
        n = sizes[structure]
        # Each structure has n forces and a virial.
        vector = offsets_of(sizes + 1)[:-1][structure] + np.minimum(place // 3, n)
        multiplicity = np.where(place >= 3 * n + 3, 2.0, 1.0)
        solid = self.volumes > 0
        density = np.divide(sizes, self.volumes, out=np.zeros(n_frames), where=solid)
        is_virial = place >= 3 * n
        component = np.where(is_virial, place - 3 * n, place % 3)
        # The virial, after the forces, belongs to no atom.
        numbers = np.zeros(len(self.numbers) + n_frames, dtype=self.numbers.dtype)
        numbers[np.arange(len(self.numbers)) + np.repeat(np.arange(n_frames), sizes)] = self.numbers
        factor = np.where(is_virial, density[structure], 1.0)
        quantities = {}
        for name, chosen in zip(DERIVATIVES, (~is_virial, is_virial), strict=True):
            rows = np.flatnonzero(chosen)
            if len(rows):
                quantities[name] = Quantity(
                    labels.y[rows],
                    len(self.y) + rows,
                    structure[rows],
                    factor[rows],
                    component[rows],
                    vector[rows],
                    multiplicity[rows],
                    numbers[vector[rows]] if KINDS[name].of_atoms else None,
                )
        return quantities

    def take(self, structures: IntArray) -> TrainingSet:
        """Return the training set of some structures."""
        labels, frames = self.derivatives, self.frames
        if isinstance(frames, FrameFiles):
            frames = frames[structures]
        elif len(frames):
            frames = [frames[i] for i in structures]
        if labels is not None:
            forces = [labels.forces[i] for i in structures]
            labels = ForceLabels(forces, labels.virials[structures])
        rows = _ranges(self.offsets, structures) if self.per_atom else structures
        return replace(
            self,
            frames=frames,
            source=self.source[structures],
            sizes=self.sizes[structures],
            numbers=self.numbers[_ranges(offsets_of(self.sizes), structures)],
            volumes=self.volumes[structures],
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


def _ranges(offsets: IntArray, some: IntArray) -> IntArray:
    """Return the places of all elements of some of consecutive parts."""
    sizes = np.diff(offsets)[some]
    starts = np.repeat(offsets[some] - offsets_of(sizes)[:-1], sizes)
    return np.asarray(starts + np.arange(int(sizes.sum())))


def join_sets(parts: Sequence[TrainingSet]) -> TrainingSet:
    """Return the structures of several training sets, one after the other; without frames."""
    first = parts[0]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("source", "sizes", "numbers", "volumes", "y", "groups", "copies")
    }
    centers, derivatives = None, None
    if first.centers is not None:
        centers = [chosen for part in parts for chosen in part.centers or ()]
    if first.derivatives is not None:
        labels = [part.derivatives for part in parts if part.derivatives is not None]
        forces = [values for some in labels for values in some.forces]
        derivatives = ForceLabels(forces, np.concatenate([some.virials for some in labels]))
    return replace(first, frames=(), centers=centers, derivatives=derivatives, **arrays)


def check_frames(frames: Sequence[Atoms], groups: Sequence[object] | str | None) -> None:
    """Reject no structures, and groups that are none; a key of groups is not checked here."""
    check_not_single(frames)
    if not len(frames):
        raise InputError(
            "There are no structures; at least 2 with a label are needed.", parameter="frames"
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
                f"{did_you_mean(key, present)} {_listed(present)}",
                parameter="groups",
            )
    return [str(atoms.info[key]) for atoms in frames]


@dataclass(frozen=True)
class Scan:
    """Labels of some structures, and facts about these."""

    data: TrainingSet  #: each structure is a group
    before: Float64Array  #: (N,): the target before a reference potential is subtracted
    prints: list[bytes]  #: fingerprints of structures
    hashes: list[bytes]  #: of each structure with its labels, as they were given
    n_without: int  #: structures, or atoms of an atomic property, without a label
    n_isolated: int
    isolated: dict[int, float]  #: energies of isolated atoms found in the data
    states: dict[State, int]  #: charges and spins, and the first structure given with each
    n_periodic: int


def read_labels(
    frames: Sequence[Atoms],
    settings: Settings,
    *,
    reference: BaselinePotential | None = None,
    skip_failed: bool = False,
    required: bool = True,
) -> Scan:
    """Find labels, and check the structures that have some.

    Parameters
    ----------
    frames : sequence of Atoms
    settings : Settings
    reference : BaselinePotential, optional
        Labels are differences from it.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    required : bool
        Whether there must be a label of each quantity; a part of the structures may have none.
    """
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
    hashes = data_hashes([frames[i] for i in scanned.frames], labels)
    if reference is not None:
        scanned, derivatives = _differences(
            frames, scanned, derivatives, reference, skip_failed=skip_failed, required=required
        )
    used = [frames[i] for i in scanned.frames]
    n_atoms = np.array([len(atoms) for atoms in used], dtype=np.intp)
    y, before = scanned.values, scanned.values
    if settings.kind == "extensive":
        y = scanned.values / n_atoms
        before = totals.values[np.isin(totals.frames, scanned.frames)] / n_atoms
    if np.max(np.abs(y), initial=0.0) > _LARGEST:
        raise InputError(
            f"Labels {settings.target!r} are as large as {np.max(np.abs(y)):.1e}; numbers above "
            f"{_LARGEST:g} cannot be learned. Correct these labels, or use other units.",
            parameter="target",
        )
    none = np.empty(0, dtype=np.intp)
    data = TrainingSet(
        per_atom=settings.per_atom,
        frames=used,
        source=scanned.frames,
        sizes=n_atoms,
        numbers=np.concatenate([none, *(atoms.numbers for atoms in used)]).astype(np.intp),
        volumes=np.array([a.cell.volume if a.cell.rank == 3 else 0.0 for a in used], float),
        centers=scanned.rows if settings.per_atom else None,
        y=y,
        derivatives=derivatives,
        groups=np.arange(len(used)),
        copies=np.arange(len(used)),
    )
    return Scan(
        data=data,
        before=before,
        prints=fingerprints(used),
        hashes=hashes,
        n_without=scanned.n_unlabelled,
        n_isolated=scanned.n_isolated,
        isolated=scanned.isolated,
        states=_first_of_each(frames, scanned.frames, settings),
        n_periodic=sum(bool(np.any(atoms.pbc)) for atoms in used),
    )


def state_of(atoms: Atoms, labels: Collection[str] = ()) -> State:
    """Return charge and spin of a structure where they are not the default; see `CHARGES`, `SPINS`.

    Spins are those above what an odd number of electrons demands, so that molecules in their lowest
    spin state are alike in any convention. Atomic charges and the moments of molecules stand for
    their sums; moments of periodic structures are where a calculation begins. Labels do not count.
    """
    keys = {str(k).lower().replace(" ", "_"): k for k in atoms.info if k not in labels}
    values = {k: _number(atoms.info[keys[k]]) for k in {*CHARGES, *SPINS} & {*keys}}
    if "initial_charges" in atoms.arrays:
        values["initial_charges"] = float(np.round(np.sum(atoms.arrays["initial_charges"])))
    if "initial_magmoms" in atoms.arrays and not atoms.pbc.any():
        values["initial_magmoms"] = float(np.sum(atoms.arrays["initial_magmoms"]))
    values = {k: v for k, v in values.items() if v not in ("", _DEFAULTS[k])}
    charges = (values.get(key) for key in (*CHARGES, "initial_charges"))
    charge = next((c for c in charges if isinstance(c, float)), 0.0)
    odd = (int(np.sum(atoms.numbers)) - round(charge)) % 2 if values else 0
    state = {}
    for key, value in values.items():
        if isinstance(value, float) and key not in (*CHARGES, "initial_charges"):
            value = (value if value.is_integer() else 2 * value) - odd
        if value != _DEFAULTS[key]:
            state[key] = value
    return tuple(sorted(state.items()))


def _number(value: object) -> float | str:
    """Return a value as a number, if it is one; nothing and NaN as an empty text."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "" if value is None else str(value)[:100]
    return round(number, 6) + 0.0 if np.isfinite(number) else ""


def _first_of_each(frames: Sequence[Atoms], used: IntArray, settings: Settings) -> dict[State, int]:
    """Return the states of the structures with labels (n,), and the first with each."""
    states: dict[State, int] = {}
    for i in used.tolist():
        states.setdefault(state_of(frames[i], settings.keys.values()), i)
    return states


def check_states(states: Mapping[State, int], settings: Settings) -> None:
    """Reject structures that differ in charge or spin, unless that is allowed."""
    if len(states) > 1 and not settings.mixed_states:
        (one, i), (other, j) = sorted(states.items(), key=lambda item: item[1])[:2]
        keys = sorted({key for key, _ in {*one} ^ {*other}})
        raise InputError(
            f"Structures {i} and {j} differ in {' and '.join(map(repr, keys))}. The model knows "
            "elements and positions alone, so that it cannot tell charges or spins apart: train a "
            "model for each. Use `mixed_states=True` to learn from all of them nevertheless.",
            parameter="mixed_states",
        )


def check_not_constant(target: str, values: Float64Array, sizes: IntArray) -> None:
    """Warn if an extensive property (n,) does not depend on the numbers of atoms (n,)."""
    if np.ptp(values) == 0 and np.ptp(sizes) > 0:
        _warn(
            f"All labels {target!r} are {values[0]:g} though structures differ in size. For a "
            "property that is not a sum over atoms, use kind='intensive'."
        )


def check_differences(name: str, target: str, data: TrainingSet, before: Float64Array) -> None:
    """Warn if differences from a reference potential vary more than the energies per atom (N,).

    A potential of the opposite sign doubles them, other units do more.
    """
    X, y = data.design(data.species), np.stack([before, data.y], axis=1)
    rest = y - y.mean(axis=0)
    rest -= X @ np.linalg.lstsq(X, rest, rcond=RCOND)[0]
    energies, differences = np.sqrt(np.mean(rest**2, axis=0))
    if differences > _WORSE * energies + _ROUNDING * np.abs(y).max():
        _warn(
            f"Differences from the baseline {name} vary by {differences:.3g} per atom, "
            f"the energies {target!r} by {energies:.3g}: it does not help. Check "
            "units and signs."
        )


def _differences(
    frames: Sequence[Atoms],
    found: Labelled,
    derivatives: ForceLabels | None,
    reference: BaselinePotential,
    *,
    skip_failed: bool,
    required: bool,
) -> tuple[Labelled, ForceLabels | None]:
    """Return energies, forces and virials less those of a reference potential.

    Structures for which it fails are left out with `skip_failed`, isolated atoms always.
    """
    indices, n = found.frames, len(found.frames)
    labels = derivatives or ForceLabels([np.empty(0)] * n, np.full((n, 6), np.nan))
    forces, virials, energies = labels.forces[:], labels.virials.copy(), np.empty(n)
    pairs = zip(forces, virials, strict=True)
    wanted = np.array([[np.isfinite(values).any() for values in pair] for pair in pairs], bool)
    wanted = wanted.reshape(-1, 2)
    for has_forces, has_stress in np.unique(wanted, axis=0).tolist():
        rows = np.flatnonzero((wanted == (has_forces, has_stress)).all(axis=1))
        values = reference.evaluate(
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
            f"The baseline {reference.name} failed for every structure with a label. Use another "
            "baseline, or correct its arguments.",
            parameter="baseline",
        )
    alone = {int(a.numbers[0]): i for i, a in enumerate(frames) if is_isolated(a)}
    numbers = [alone[z] for z in found.isolated]
    of_atoms = reference.evaluate([frames[i] for i in numbers], indices=numbers, skip_failed=True)
    isolated = zip(found.isolated.items(), of_atoms.energies.tolist(), strict=True)
    left = replace(
        found,
        frames=indices[kept],
        values=(found.values - energies)[kept],
        n_unlabelled=found.n_unlabelled + n - len(kept),
        isolated={z: value - energy for (z, value), energy in isolated if np.isfinite(energy)},
    )
    if derivatives is None:
        return left, None
    return left, ForceLabels([forces[i] for i in kept], virials[kept])


def join_groups(
    prints: Sequence[bytes], groups: Sequence[object] | None, source: IntArray
) -> tuple[IntArray, IntArray, int]:
    """Return a number for each different structure, the groups, and the number of duplicates.

    Structures have fingerprints, and the numbers `source` (n,) among those that groups are labels
    of. Duplicates are in one group.
    """
    codes = {digest: i for i, digest in enumerate(dict.fromkeys(prints))}
    distinct = np.array([codes[digest] for digest in prints], dtype=np.intp)
    n_duplicates = len(prints) - len(codes)
    if n_duplicates:
        _warn(
            f"{n_duplicates} of {len(prints)} structures are duplicates; copies are in or out of a "
            "subsample together."
        )
    if groups is None:
        return distinct, distinct, n_duplicates
    labels = group_codes([groups[i] for i in source], len(prints))
    return distinct, joined_groups(distinct, labels)[distinct], n_duplicates


# --- labels of structures and atoms ---------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """Labels of one key."""

    frames: IntArray  #: (n_frames,): structures with at least one label, isolated atoms left out
    #: (n,): their labels, finite, in the units of the data: one for each structure, or those of all
    #: labelled atoms, structure after structure
    values: Float64Array
    #: the labelled atoms of each structure; empty unless the labels are of atoms
    rows: list[IntArray]
    n_unlabelled: int  #: structures, or atoms of the wanted species, without a label
    n_isolated: int  #: structures tagged as isolated atoms
    isolated: dict[int, float]  #: the label of the isolated atom of each atomic number that has one


def labelled(
    frames: Sequence[Atoms],
    key: str,
    kind: str,
    species: Sequence[int] | None = None,
    *,
    required: bool = True,
) -> Labelled:
    """Return which structures, or atoms of some species, have a label, and the labels.

    Structures of one atom whose ``info["config_type"]`` is "isolated_atom" or "IsolatedAtom" are
    not learned from; their labels are returned apart. There must be a label, if it is required.
    """
    per_atom = kind == "atomic"
    values = find_targets(frames, key, per_atom=per_atom, species=species, required=required)
    isolated = [is_isolated(atoms) for atoms in frames]
    rows = [np.flatnonzero(np.isfinite(v)) for v in values]
    used = [i for i in range(len(frames)) if len(rows[i]) and not isolated[i]]
    if not used and required:
        of = "" if species is None else f" of {symbols_of(species)}"
        what = f"atom{of}" if per_atom else "structure"
        raise InputError(
            f"No {what} has a label {key!r}, other than isolated atoms; at least one is needed.",
            parameter="key",
        )
    rest = [atoms for atoms, alone in zip(frames, isolated, strict=True) if not alone]
    n_wanted = len(rest)
    if per_atom:
        n_wanted = sum(int(np.count_nonzero(_is_wanted(atoms, species))) for atoms in rest)
    return Labelled(
        frames=np.array(used, dtype=np.intp),
        values=np.concatenate([np.empty(0), *(values[i][rows[i]] for i in used)]),
        rows=[rows[i] for i in used] if per_atom else [],
        n_unlabelled=n_wanted - sum(len(rows[i]) for i in used),
        n_isolated=sum(isolated),
        isolated=_isolated_values(frames, values, isolated, key),
    )


def find_targets(
    frames: Sequence[Atoms],
    key: str,
    *,
    per_atom: bool = False,
    species: Sequence[int] | None = None,
    required: bool = True,
) -> list[Float64Array]:
    """Return the label of each structure (1,), or those of its atoms (n_atoms,), NaN for none.

    Labels of atoms of other species than those wanted are left out.
    """
    values = [np.full(len(atoms) if per_atom else 1, np.nan) for atoms in frames]
    for i, (value, place) in _find_all(frames, key, per_atom, required=required).items():
        n, wanted = len(values[i]), _is_wanted(frames[i], species) if per_atom else slice(None)
        expected = f"one number for each of {n} atoms" if per_atom else "one number"
        shapes: list[tuple[int, ...]] = [(n,), (n, 1)] if per_atom else [(), (1,)]
        shape, hint = _as_array(value).shape, ""
        if shape[:1] == (() if per_atom else (len(frames[i]),)):
            hint = _PER_STRUCTURE if per_atom else _PER_ATOM
        found = _numbers(value, f"frames[{i}].{place}", shapes, expected, hint).reshape(n)
        values[i][wanted] = _finite(found[wanted], f"frames[{i}].{place}")
    return values


def _find_all(
    frames: Sequence[Atoms], key: str, per_atom: bool, *, required: bool
) -> dict[int, tuple[object, str]]:
    """Return the label, as it is stored, and its place, for each structure that has one."""
    if len(frames) == 0:
        raise InputError("There are no structures; at least one is needed.", parameter="frames")
    found = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, per_atom))}
    predicted = sum(any(p for *_, p in _stored(atoms, key, per_atom)) for atoms in frames)
    if not found and required:
        _reject_key(frames, key, per_atom, predicted=predicted > 0)
    _check_shared_calculators(frames, found)
    if predicted:
        _warn(
            f"{key!r} has {key}_uncertainty beside it in {predicted} structures: these values are "
            f"predictions, not labels; REF_{key} is used where it exists."
        )
    places = Counter(place for _, place in found.values())
    if len(places) > 1:
        several = ", ".join(f"{place} ({n} structures)" for place, n in places.most_common())
        _warn(f"{key!r} is in several places: {several}. Check that the origin is the same.")
    return found


def find_label(atoms: Atoms, key: str, per_atom: bool) -> tuple[object, str] | None:
    """Return the label of one structure and its place; see the top of this module."""
    stored = _stored(atoms, key, per_atom)
    return next(((value, place) for value, place, predicted in stored if not predicted), None)


def _stored(atoms: Atoms, key: str, per_atom: bool) -> Iterator[tuple[object, str, bool]]:
    """Yield the values under a key, their places, and whether they are predictions."""
    store, name = (atoms.arrays, "arrays") if per_atom else (atoms.info, "info")
    results = _stored_results(atoms)
    found = [(k, store[k], f"{name}[{k!r}]", None) for k in (key, f"REF_{key}") if k in store]
    if key in results:
        found.append((key, results[key], f"{_RESULTS}[{key!r}]", atoms.calc))
    for k, value, place, calculator in found:
        stores = (atoms.info, atoms.arrays, results)
        uncertain = any(f"{k}_uncertainty" in one for one in stores)
        yield value, place, uncertain and is_prediction(atoms, k, value, calculator)


def _stored_results(atoms: Atoms) -> dict[str, Any]:
    """Return stored results; asking a calculator for a property might start a calculation."""
    return dict(getattr(atoms.calc, "results", None) or {})


def _check_shared_calculators(
    frames: Sequence[Atoms], found: dict[int, tuple[object, str]]
) -> None:
    """Reject one calculator of several structures: it stores the results of the last one only."""
    owners: dict[int, int] = {}
    for i in (i for i, (_, place) in found.items() if place.startswith(_RESULTS)):
        j = owners.setdefault(id(frames[i].calc), i)
        if frames[i] is not frames[j]:
            raise InputError(
                f"Structure {i} and structure {j} share a calculator, which stores the results of "
                "one structure only. Copy each result to atoms.info or atoms.arrays when it is "
                "computed.",
                parameter=f"frames[{i}].calc",
            )


def _numbers(
    value: object, name: str, shapes: Sequence[tuple[int, ...]], expected: str, hint: str = ""
) -> Float64Array:
    """Return a label as float64, NaN for None."""
    array = _as_array(np.nan if value is None else value)
    if array.dtype == object:
        # Mixed with numbers None gives NaN; with strings it gives strings, which are rejected.
        array = np.array([np.nan if v is None else v for v in array.ravel()]).reshape(array.shape)
    if array.dtype.kind not in "iuf" or array.shape not in shapes:
        if array.dtype == bool:
            hint = "In extended XYZ a key without a value means True: omit keys of missing labels."
        value = f"an array of {array.dtype.name} of shape {array.shape}"
        value = value if array.ndim else repr(array.item())[:40]
        raise InputError(
            f"The label {name} is {value}; it must be {expected}. {hint}", parameter=name
        )
    return array.astype(np.float64)


def _finite(values: Float64Array, name: str) -> Float64Array:
    """Return values that are finite or NaN."""
    if np.isinf(values).any():
        raise InputError(
            f"The label {name} has infinite values. Write finite numbers, or NaN where there is no "
            "label.",
            parameter=name,
        )
    return values


def _as_array(value: object) -> np.ndarray[Any, Any]:
    """Return any value as an array, masked numbers as NaN.

    What cannot be an array becomes a string, which is no number.
    """
    if np.ma.is_masked(value):
        return np.ma.filled(np.ma.asarray(value).astype(np.float64), np.nan)
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.asarray(str(value))


def _reject_key(frames: Sequence[Atoms], key: str, per_atom: bool, *, predicted: bool) -> NoReturn:
    """Raise an error that lists the keys that exist."""
    if predicted:
        raise InputError(
            f"All values of {key!r} have {key}_uncertainty beside them: they are predictions, not "
            f"labels. Store labels as REF_{key}, or remove an outdated {key}_uncertainty.",
            parameter="key",
        )
    if {key, f"REF_{key}"} & _present(frames, not per_atom):
        hint = _PER_STRUCTURE if per_atom else _PER_ATOM
        what = "atoms" if per_atom else "structures"
        raise InputError(f"{key!r} is not a label of {what}. {hint}", parameter="key")
    _reject("key", key, "label of atoms" if per_atom else "label", _present(frames, per_atom))


def _reject(name: str, key: str, what: str, present: set[str]) -> NoReturn:
    """Raise an error that lists the keys that exist, and suggests a similar one."""
    raise InputError(
        f"No structure has a {what} {key!r}.{did_you_mean(key, present)} {_listed(present)}",
        parameter=name,
    )


def _listed(keys: set[str]) -> str:
    """Return a sentence with keys that exist."""
    return (
        f"Keys present: {', '.join(map(repr, sorted(keys)))}."
        if keys
        else "There are no such keys."
    )


def _present(frames: Sequence[Atoms], per_atom: bool, *shapes: tuple[int, ...]) -> set[str]:
    """Return the keys that any structure has a value for, of some shapes after the atoms."""
    keys: set[str] = set()
    for atoms in frames:
        store, results = atoms.arrays if per_atom else atoms.info, _stored_results(atoms)
        for k, value in {**results, **store}.items():
            shape = _as_array(value).shape
            fits = k in store or (shape[:1] == (len(atoms),)) == per_atom
            if fits and (not shapes or shape[per_atom:] in shapes):
                keys.add(str(k))
    return keys - {"numbers", "positions"} if per_atom else keys


def _is_wanted(atoms: Atoms, species: Sequence[int] | None) -> BoolArray:
    numbers = np.asarray(atoms.numbers)
    return np.ones(len(numbers), dtype=bool) if species is None else np.isin(numbers, species)


def is_isolated(atoms: Atoms) -> bool:
    """Whether a structure is tagged as an isolated atom."""
    return len(atoms) == 1 and str(atoms.info.get("config_type")).lower() in ISOLATED


def _isolated_values(
    frames: Sequence[Atoms], values: Sequence[Float64Array], isolated: Sequence[bool], key: str
) -> dict[int, float]:
    """Return the label of each isolated atom, if all labels of its species agree."""
    found: dict[int, float] = {}
    for i in np.flatnonzero(isolated).tolist():
        z, value = int(frames[i].numbers[0]), float(values[i][0])
        if not np.isnan(value) and not np.isclose(found.setdefault(z, value), value, 1e-8, 0.0):
            raise InputError(
                f"Structure {i} is an isolated {symbols_of([z])} atom with {key}={value:.10g}, and "
                f"one before it has {found[z]:.10g}. Keep one of the two.",
                parameter=f"frames[{i}]",
            )
    return found


# --- labels of forces and stresses ----------------------------------------------------------------


@dataclass(frozen=True)
class ForceLabels:
    """Forces and virials of the structures of a training set; a row for each known component.

    Rows of a structure are those of its forces, atom after atom, and then those of its virial.
    """

    forces: list[Float64Array]  #: NaN where there is none
    #: (n_structures, 6): Vσ per atom, in the units of the energy; NaN where there is none
    virials: Float64Array

    @cached_property
    def known(self) -> list[BoolArray]:
        """Which of the 3n + 6 components of each structure have a row."""
        return [np.isfinite(values) for values in self._components]

    @cached_property
    def offsets(self) -> IntArray:
        """Rows of structure s are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of([int(np.count_nonzero(mask)) for mask in self.known])

    @cached_property
    def y(self) -> Float64Array:
        """Labels of all rows."""
        pairs = zip(self._components, self.known, strict=True)
        return np.concatenate([values[mask] for values, mask in pairs])

    @property
    def n_with_virial(self) -> int:
        """Structures with a stress."""
        return int(np.count_nonzero(np.isfinite(self.virials).any(axis=1)))

    @property
    def _components(self) -> list[Float64Array]:
        pairs = zip(self.forces, self.virials, strict=True)
        return [np.concatenate([forces.ravel(), virial]) for forces, virial in pairs]


def force_labels(
    frames: Sequence[Atoms],
    used: IntArray,
    forces: str | None,
    stress: str | None,
    *,
    required: bool = True,
) -> ForceLabels:
    """Return the forces and virials, by their keys, of the structures with an energy (`used`)."""
    found = [np.full((len(frames[i]), 3), np.nan) for i in used]
    virials = np.full((len(used), 6), np.nan)
    if forces is not None:
        known = find_forces(frames, forces, required=required)
        unused = [i for i in known if i not in set(used.tolist()) and not is_isolated(frames[i])]
        if unused:
            _warn(
                f"{len(unused)} structures (first frames[{unused[0]}]) have {forces!r} but no "
                "energy; their forces are not used."
            )
        found = [known.get(i, empty) for i, empty in zip(used.tolist(), found, strict=True)]
        if required:
            _warn_if_zero([f for f in found if len(f) > 1], forces)
    if stress is not None:
        known = find_stresses(frames, stress, required=required)
        for row, i in enumerate(used.tolist()):
            if i in known:
                virials[row] = known[i] * frames[i].cell.volume / len(frames[i])
        if required:
            _warn_if_zero([*virials], stress)
    labels = ForceLabels(found, virials)
    if required and not len(labels.y):
        name, key = ("forces", forces) if forces is not None else ("stress", stress)
        reject_without_energy(name, str(key))
    return labels


def reject_without_energy(name: str, key: str) -> NoReturn:
    """Raise an error about forces, or stresses, of structures without an energy."""
    raise InputError(
        f"No structure with an energy has {name} under {key!r}; at least one is needed.",
        parameter=name,
    )


def thinned(data: TrainingSet, n_atoms: int, seed: int) -> TrainingSet:
    """Return a training set with the forces on some atoms of each structure.

    Atoms depend on the number of the structure among those given.
    """
    assert data.derivatives is not None
    forces = []
    for number, all_forces in zip(data.source.tolist(), data.derivatives.forces, strict=True):
        rng = np.random.default_rng([seed, _FORCES_STREAM, number])
        chosen = rng.permutation(len(all_forces))[:n_atoms]
        forces.append(np.full_like(all_forces, np.nan))
        forces[-1][chosen] = all_forces[chosen]
    return replace(data, derivatives=ForceLabels(forces, data.derivatives.virials))


def _warn(text: str) -> None:
    warnings.warn(text, QualmsWarning, stacklevel=2)


def _warn_if_zero(labels: Sequence[Float64Array], key: str) -> None:
    """Warn if all forces, or stresses, are zero, which stands for unknown in some data sets."""
    known = [values for values in labels if np.isfinite(values).any()]
    if len(known) > 1 and not any(np.any(np.nan_to_num(values)) for values in known):
        _warn(f"All values of {key!r} are zero. If they are unknown, omit them or write NaN.")


def find_forces(
    frames: Sequence[Atoms], key: str, *, required: bool = True
) -> dict[int, Float64Array]:
    """Return the forces (n_atoms, 3) of each structure that has some."""
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, True))}
    if not places and required:
        _reject("forces", key, "label of three numbers for each atom", _present(frames, True, (3,)))
    _check_shared_calculators(frames, places)
    found = {}
    for i, (value, place) in places.items():
        name = f"frames[{i}].{place}"
        found[i] = _finite(_numbers(value, name, [(len(frames[i]), 3)], _FORCES), name)
    return {i: values for i, values in found.items() if np.isfinite(values).any()}


def find_stresses(
    frames: Sequence[Atoms], key: str, *, required: bool = True
) -> dict[int, Float64Array]:
    """Return the stress (6,) of each structure that has one and a cell with a volume.

    Zeros beside a structure that is not periodic are taken as unknown.
    """
    if "virial" in key.casefold() and "stress" not in key.casefold():
        raise InputError(
            f"{key!r} seems to be a virial, which is −V times the stress (1/V) ∂E/∂ε that is "
            f"learned. Convert it: atoms.info['stress'] = -atoms.info[{key!r}] / "
            "atoms.get_volume().",
            parameter="stress",
        )
    places = {i: hit for i, atoms in enumerate(frames) if (hit := find_label(atoms, key, False))}
    if not places and required:
        tensors = _present(frames, False, (6,), (9,), (3, 3))
        _reject("stress", key, "label of six numbers, or a symmetric matrix,", tensors)
    _check_shared_calculators(frames, places)
    values = {i: voigt(value, f"frames[{i}].{place}") for i, (value, place) in places.items()}
    known = {i: v for i, v in values.items() if frames[i].pbc.any() or np.nan_to_num(v).any()}
    known = {i: value for i, value in known.items() if np.isfinite(value).any()}
    found = {i: value for i, value in known.items() if frames[i].cell.rank == 3}
    unused = sorted({*known} - {*found})
    if unused and required:
        _warn(
            f"{len(unused)} structures (first frames[{unused[0]}]) have {key!r} but no cell with a "
            "volume; their stress is not used."
        )
    return found


def voigt(value: object, name: str) -> Float64Array:
    """Return a stress as six numbers, from six or nine."""
    array = _as_array(value)
    if array.size != 9:
        six = _numbers(
            value, name, [(6,)], "six numbers (xx, yy, zz, yz, xz, xy) or a 3 × 3 matrix"
        )
        return _finite(six, name)
    matrix = _finite(_numbers(array.reshape(3, 3), name, [(3, 3)], "a 3 × 3 matrix"), name)
    if np.abs(matrix - matrix.T).max() > _SYMMETRY * np.abs(matrix).max():
        raise InputError(
            f"The stress {name} is a matrix that is not symmetric; stresses are.", parameter=name
        )
    return np.asarray((matrix + matrix.T)[VOIGT] / 2)
