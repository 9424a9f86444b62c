"""Labels: where those of structures and atoms are, which are missing, and the rows they make.

A label ``key`` of a structure is looked up in ``atoms.info[key]``, then in
``atoms.info["REF_" + key]``, which ASE does not touch, and last among the stored results of a
calculator, where ASE moves energies, forces and so on when it reads a file. Labels of atoms are in
``atoms.arrays`` instead. Nothing is ever calculated. None and NaN mean that there is no label, and
so do values that a model predicted: see `qualms.io.xyz`.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray, joined_groups
from qualms.atomistic.baseline import RCOND, atom_design, row_space, structure_design
from qualms.atomistic.settings import Settings, with_representation
from qualms.atomistic.structures import (
    VOIGT,
    check_not_single,
    check_structures,
    data_digest,
    data_hashes,
    fingerprints,
    species_of,
    symbols_of,
)
from qualms.errors import InputError, QualmsWarning, counted, did_you_mean
from qualms.features.representation import offsets_of
from qualms.gp.ensemble import group_codes
from qualms.io.xyz import is_prediction

if TYPE_CHECKING:
    from qualms.atomistic.reference import ReferencePotential

log = logging.getLogger(__name__)

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
class Quantity:
    """Labels of one quantity, a block of rows of the linear problem."""

    y: Float64Array  #: (n,): energies per atom if extensive, forces, virials per atom Vσ/n_atoms
    rows: IntArray  #: (n,): places of these rows among all rows
    structure: IntArray  #: (n,): structure of each row
    factor: Float64Array  #: (n,): to the units of the quantity: n_atoms/V for stresses, or one
    component: IntArray | None = None  #: (n,): of a force (x, y, z) or virial (xx, yy, zz, yz, …)
    vector: IntArray | None = None  #: (n,): the force, or the virial, that it is a component of
    multiplicity: Float64Array | None = None  #: (n,): of the component in its symmetric tensor
    n_without: int = 0  #: structures, or atoms of an atomic property, without a label
    species: IntArray | None = None  #: (n,): of the atom of a force or of an atomic property


@dataclass(frozen=True)
class TrainingSet:
    """Labelled structures. A row of "energy" is a structure, or an atom if the target is atomic."""

    settings: Settings  #: with the elements of an atomic property, and the representation
    frames: list[Atoms]  #: structures with labels
    source: IntArray  #: (n_frames,): their indices among the structures given
    #: atoms of each structure whose environments are needed: all, or those with labels
    centers: list[IntArray]
    #: "energy", which stands for any target, and "forces" and "stress" if they are learned
    quantities: dict[str, Quantity]
    species: list[int]  #: atomic numbers of all structures
    #: (n_frames,): structures that are in or out of a subsample together; duplicates always are
    groups: IntArray
    n_isolated: int
    n_duplicates: int
    isolated: dict[int, float]  #: energies of isolated atoms found in the data
    hashes: list[bytes]  #: of each structure with its labels, as they were given
    states: dict[State, int]  #: charges and spins, and the first structure given with each
    derivatives: ForceLabels | None = None  #: forces and virials by structure
    preset: str = ""  #: the representation, if it was chosen, and why

    @property
    def y(self) -> Float64Array:
        """Labels of the target: (N,)."""
        return self.quantities["energy"].y

    @cached_property
    def offsets(self) -> IntArray:
        """Environments of structure s are ``offsets[s]:offsets[s + 1]``."""
        return offsets_of([len(c) for c in self.centers])

    @property
    def digest(self) -> str:
        """Digest of structures and labels."""
        return data_digest(self.hashes)

    @property
    def n_environments(self) -> int:
        """Number of environments whose features are needed."""
        return int(self.offsets[-1])

    @property
    def n_rows(self) -> int:
        """Number of labels of all quantities."""
        return sum(len(quantity.y) for quantity in self.quantities.values())

    @cached_property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    def with_size(self, n_representatives: int) -> TrainingSet:
        """Return a copy with a number of representatives."""
        update = {"n_representatives": n_representatives}
        return replace(self, settings=self.settings.model_copy(update=update))

    def take(self, structures: IntArray) -> tuple[TrainingSet, IntArray]:
        """Return the training set of some structures, and the rows that it has."""
        rows = [np.flatnonzero(np.isin(self.quantities["energy"].structure, structures))]
        derivatives = self.derivatives
        if derivatives is not None:
            owners = np.repeat(np.arange(len(self.frames)), np.diff(derivatives.offsets))
            rows.append(len(self.y) + np.flatnonzero(np.isin(owners, structures)))
            forces = [derivatives.forces[i] for i in structures]
            derivatives = ForceLabels(forces, derivatives.virials[structures])
        frames, centers = self.some(structures)
        taken = replace(
            self,
            frames=frames,
            source=self.source[structures],
            centers=centers,
            quantities=_quantities(self.y[rows[0]], frames, centers, derivatives, self.settings, 0),
            groups=self.groups[structures],
            derivatives=derivatives,
        )
        return taken, np.concatenate(rows)

    def some(self, structures: IntArray) -> tuple[list[Atoms], list[IntArray]]:
        """Return some structures, and the atoms in them whose environments are needed."""
        return [self.frames[i] for i in structures], [self.centers[i] for i in structures]

    @property
    def row_groups(self) -> IntArray:
        """What is drawn, or left out, together: a number for each row of the target."""
        if self.settings.resample == "atoms":
            return np.arange(len(self.y))
        return self.groups[self.quantities["energy"].structure]

    @cached_property
    def design(self) -> Float64Array:
        """Design matrix of the baseline: (N, S)."""
        return self.design_for(self.species)

    def design_for(self, species: Sequence[int]) -> Float64Array:
        """Return the design matrix of a baseline of other species, which include all: (N, S)."""
        if self.settings.per_atom:
            return atom_design(self.center_species, species)
        return structure_design(self.frames, species)


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


def collect_labels(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = None,
    *,
    reference: ReferencePotential | None = None,
    skip_failed: bool = False,
) -> TrainingSet:
    """Find labels and duplicates, and check that the structures can be used.

    Groups are labels of structures that belong together, such as snapshots of one trajectory, or
    the key of these labels. With a reference potential, labels are differences from it; structures
    for which it fails are an error, or left out.
    """
    check_frames(frames, groups)
    if isinstance(groups, str):
        groups = group_labels(frames, groups)
    data = read_labels(frames, settings, reference=reference, skip_failed=skip_failed)
    check_states(data.states, settings)
    codes, n_duplicates = join_groups(fingerprints(data.frames), groups, data.source)
    settings, preset = with_representation(data.settings, data.frames)
    derivatives = data.derivatives
    if derivatives is not None:
        settings = with_force_atoms(settings, [len(atoms) for atoms in data.frames])
        derivatives = thinned(derivatives, settings, data.source)
    known = known_baseline(settings, data.species, data.design, data.isolated)
    return replace(
        data,
        settings=known,
        quantities={"energy": data.quantities["energy"], **_derived(derivatives, data.frames)},
        groups=codes,
        n_duplicates=n_duplicates,
        derivatives=derivatives,
        preset=preset,
    )


def read_labels(
    frames: Sequence[Atoms],
    settings: Settings,
    *,
    reference: ReferencePotential | None = None,
    skip_failed: bool = False,
    part: bool = False,
) -> TrainingSet:
    """Find labels, and check the structures; all of a training set, or a part of it.

    Groups, the representation and the baseline depend on all structures, and are left as they are:
    each structure is a group. A part may have no labels.
    """
    target = settings.target, settings.kind, settings.species
    found = labelled(frames, *target, required=not part)
    for i in found.frames.tolist():
        check_structures([frames[i]], first=i)
    sizes = [len(rows) for rows in found.rows] if settings.per_atom else [1] * len(found.frames)
    labels: list[Any] = np.split(found.values, np.cumsum(sizes)[:-1]) if sizes else []
    derivatives, totals = None, found
    if settings.per_atom:
        labels = [np.concatenate(pair) for pair in zip(found.rows, labels, strict=True)]
    if settings.learns_forces:
        keys = settings.forces, settings.stress
        derivatives = force_labels(frames, found.frames, *keys, required=not part)
        parts = zip(labels, derivatives.forces, derivatives.virials, strict=True)
        labels = [np.concatenate([y, f.ravel(), v]) for y, f, v in parts]
    hashes = data_hashes([frames[i] for i in found.frames], labels)
    if reference is not None:
        found, derivatives = _differences(
            frames, found, derivatives, reference, skip_failed=skip_failed, required=not part
        )
    used = [frames[i] for i in found.frames]
    n_atoms = np.array([len(atoms) for atoms in used])
    centers = found.rows if settings.per_atom else [np.arange(n) for n in n_atoms]
    y = found.values / n_atoms if settings.kind == "extensive" else found.values
    if np.max(np.abs(y), initial=0.0) > _LARGEST:
        raise InputError(
            f"Labels {settings.target!r} are as large as {np.max(np.abs(y)):.1e}; numbers above "
            f"{_LARGEST:g} cannot be learned. Correct these labels, or use other units.",
            parameter="target",
        )
    if settings.kind == "extensive" and not part:
        check_not_constant(settings.target, found.values, n_atoms)
    species = settings.species
    if settings.per_atom and species is None and not part:
        pairs = zip(used, centers, strict=True)
        numbers = np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])
        species = tuple(np.unique(numbers).tolist())
    stored = {"memory": None, "threads": None, "species": species}
    data = TrainingSet(
        settings=settings.model_copy(update=stored),
        frames=used,
        source=found.frames,
        centers=centers,
        quantities=_quantities(y, used, centers, derivatives, settings, found.n_unlabelled),
        species=species_of(used),
        groups=np.arange(len(used)),
        n_isolated=found.n_isolated,
        n_duplicates=0,
        isolated=found.isolated,
        hashes=hashes,
        states=_first_of_each(frames, found.frames, settings),
        derivatives=derivatives,
    )
    if reference is not None and not part:
        before = totals.values[np.isin(totals.frames, found.frames)] / n_atoms
        _check_reference(reference, data, before)
    return data


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


def _quantities(
    y: Float64Array,
    frames: Sequence[Atoms],
    centers: Sequence[IntArray],
    derivatives: ForceLabels | None,
    settings: Settings,
    n_without: int,
) -> dict[str, Quantity]:
    """Return the blocks of rows: of the target y (N,), and of forces and virials after it."""
    sizes = [len(c) for c in centers] if settings.per_atom else np.ones(len(frames), dtype=int)
    structure = np.repeat(np.arange(len(frames)), sizes)
    energy = Quantity(y, np.arange(len(y)), structure, np.ones(len(y)), n_without=n_without)
    if settings.per_atom:
        species = np.concatenate([a.numbers[c] for a, c in zip(frames, centers, strict=True)])
        energy = replace(energy, species=species)
    return {"energy": energy, **_derived(derivatives, frames)}


def join_sets(parts: Sequence[TrainingSet]) -> TrainingSet:
    """Return the structures of several training sets of the same settings, one after the other."""
    first, settings = parts[0], parts[0].settings
    frames = [atoms for part in parts for atoms in part.frames]
    centers = [chosen for part in parts for chosen in part.centers]
    derivatives = None
    if first.derivatives is not None:
        labels = [part.derivatives for part in parts if part.derivatives is not None]
        forces = [values for some in labels for values in some.forces]
        derivatives = ForceLabels(forces, np.concatenate([some.virials for some in labels]))
    y = np.concatenate([part.y for part in parts])
    return replace(
        first,
        frames=frames,
        source=np.concatenate([part.source for part in parts]),
        centers=centers,
        quantities=_quantities(y, frames, centers, derivatives, settings, 0),
        groups=np.concatenate([part.groups for part in parts]),
        derivatives=derivatives,
    )


def _check_reference(
    reference: ReferencePotential, data: TrainingSet, before: Float64Array
) -> None:
    """Warn if differences from a reference potential vary more than the energies per atom (N,).

    A potential of the opposite sign doubles them, other units do more.
    """
    X, y = data.design, np.stack([before, data.y], axis=1)
    rest = y - y.mean(axis=0)
    rest -= X @ np.linalg.lstsq(X, rest, rcond=RCOND)[0]
    energies, differences = np.sqrt(np.mean(rest**2, axis=0))
    if differences > _WORSE * energies + _ROUNDING * np.abs(y).max():
        _warn(
            f"Differences from the baseline {reference.name} vary by {differences:.3g} per atom, "
            f"the energies {data.settings.target!r} by {energies:.3g}: it does not help. Check "
            "units and signs."
        )


def known_baseline(
    settings: Settings,
    species: Sequence[int],
    design: Float64Array,
    isolated: Mapping[int, float],
) -> Settings:
    """Use isolated atoms if the compositions do not determine the energies of all elements."""
    linear = settings.linear_baseline
    if linear != "composition" or settings.per_atom or len(row_space(design)) == len(species):
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


def _differences(
    frames: Sequence[Atoms],
    found: Labelled,
    derivatives: ForceLabels | None,
    reference: ReferencePotential,
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


def _derived(labels: ForceLabels | None, frames: Sequence[Atoms]) -> dict[str, Quantity]:
    """Return the blocks of forces and virials, whose rows come after those of the energies."""
    if labels is None:
        return {}
    first = len(frames)
    place = np.concatenate([np.flatnonzero(mask) for mask in labels.known])
    structure = np.repeat(np.arange(len(frames)), np.diff(labels.offsets))
    sizes = np.array([len(atoms) for atoms in frames])
    n = sizes[structure]
    # Each structure has n forces and a virial.
    vector = offsets_of(sizes + 1)[:-1][structure] + np.minimum(place // 3, n)
    multiplicity = np.where(place >= 3 * n + 3, 2.0, 1.0)
    density = np.array([len(a) / a.cell.volume if a.cell.rank == 3 else 0.0 for a in frames])
    is_virial = place >= 3 * n
    component = np.where(is_virial, place - 3 * n, place % 3)
    # The virial, after the forces, belongs to no atom.
    numbers = np.concatenate([[*atoms.numbers, 0] for atoms in frames])
    factor = np.where(is_virial, density[structure], 1.0)
    found = {}
    for name, chosen in (("forces", ~is_virial), ("stress", is_virial)):
        rows = np.flatnonzero(chosen)
        if len(rows):
            found[name] = Quantity(
                labels.y[rows],
                first + rows,
                structure[rows],
                factor[rows],
                component[rows],
                vector[rows],
                multiplicity[rows],
                len(frames) - len(np.unique(structure[rows])),
                numbers[vector[rows]] if name == "forces" else None,
            )
    return found


def join_groups(
    prints: Sequence[bytes], groups: Sequence[object] | None, source: IntArray
) -> tuple[IntArray, int]:
    """Return the group of each structure, by its fingerprint, and the number of duplicates.

    Structures have the numbers `source` (n,) among those that groups are labels of.
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
        return distinct, n_duplicates
    labels = group_codes([groups[i] for i in source], len(prints))
    return joined_groups(distinct, labels)[distinct], n_duplicates


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


def with_force_atoms(settings: Settings, sizes: Sequence[int]) -> Settings:
    """Return settings with the atoms of each structure, of some sizes, whose forces are learned."""
    if settings.force_atoms != "auto" or settings.forces is None:
        return settings
    wanted = settings.features.n_moving(np.array(sizes), settings.effort) or "all"
    return settings.model_copy(update={"force_atoms": wanted})


def thinned(labels: ForceLabels, settings: Settings, source: IntArray) -> ForceLabels:
    """Return the forces on some atoms of each structure, if not all are to be learned.

    Atoms depend on the number of the structure (n,) among those given.
    """
    wanted, forces = settings.force_atoms, []
    if isinstance(wanted, str):
        return labels
    for number, all_forces in zip(source.tolist(), labels.forces, strict=True):
        rng = np.random.default_rng([settings.seed, _FORCES_STREAM, number])
        kept = rng.permutation(len(all_forces))[:wanted]
        forces.append(np.full_like(all_forces, np.nan))
        forces[-1][kept] = all_forces[kept]
    return replace(labels, forces=forces)


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
