"""Predictions of structures: one pass over their features, and everything that was asked for.

The novelty of an atom measures how different its environment is from the representatives: one minus
the largest normalised kernel, in units of the limit that one training structure in a hundred
exceeds. It needs no energies, so that it does not depend on how an energy is divided between atoms,
and it finds a bond that is too long. It is relative, and no uncertainty.

The force on an atom, unlike a part of an energy, can be measured, and has an uncertainty.
Contributions of atoms to an energy have an ensemble standard deviation as well. But a model that
has seen energies of structures alone determines sums over atoms, not their parts: members that
agree on a methyl group differ by tenths of an eV on the share of its carbon.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import atom_design, structure_design
from qualms.atomistic.delta import BaselinePotential
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import Potential, derivatives
from qualms.atomistic.kernel_rows import structure_novelty
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.atomistic.structures import check_species, check_structures, state_of, symbols_of
from qualms.calibration.members import member_factors
from qualms.errors import InputError, QualmsWarning, counted
from qualms.features.base import BATCH, Batch, offsets_of, ranges, stream_features
from qualms.prediction import Prediction

#: Bytes of the features of a chunk: larger arrays are allocated again each time, which takes as
#: long as computing the features.
_BYTES = 30_000_000


class Request(NamedTuple):
    """What is predicted, beside the target."""

    forces: bool = False
    stress: bool = False
    atoms: bool = False  #: contributions and novelty of atoms
    novelty: bool = True  #: novelty, and whether structures are extrapolations
    process: bool = False  #: the projected process, Eq. (3), Musil et al. 2019
    means: bool = False  #: derivatives of the prediction alone, without uncertainties
    rows: bool = False  #: kernel rows with the representatives, features and novelty of atoms
    learned: bool = False  #: without the values of a baseline potential


class Parts(NamedTuple):
    """What a prediction has beside the target."""

    frames: list[Atoms]
    forces: Prediction | None = None  #: (n_atoms, 3): of all structures, in order
    #: (n_solid, 6): of structures with a volume, in order; there may be none
    stress: Prediction | None = None
    #: atoms of each structure whose environments are used: of known elements, and of the species of
    #: an atomic property
    centers: list[IntArray] | None = None
    novelty: Float64Array | None = None  #: (n,): largest of the environments, in units of the limit
    reasons: list[str] | None = None  #: why each structure is an extrapolation; or an empty text
    atoms: list[Prediction] | None = None  #: contribution of each of the `centers`, by structure
    atom_novelty: list[Float64Array] | None = None  #: novelty of each of the `centers`
    process: Float64Array | None = None  #: (3, N): mean, p and σ_PP of the projected process
    rows: Float64Array | None = None  #: (N, r): kernel rows with the representatives
    features: list[FloatArray] | None = None  #: of each of the `centers`, by structure
    novelty_std: Float64Array | None = None  #: (N,): q, if σ depends on it
    #: forces (n, 3) on the atoms of each structure and its stress (6,), without uncertainties
    means: list[tuple[Float64Array, Float64Array | None]] | None = None


class StructurePrediction(Prediction):
    """The target of structures with calibrated uncertainties, and what else was asked for.

    It is a `Prediction` of one value for each structure (for atomic properties, for each of the
    `centers`). Before calibration (``forces.uncalibrated``) the forces of each member are the
    derivative of its energy.

    Attributes
    ----------
    forces : Prediction of shape (n_atoms, 3), optional
        Of the atoms of all structures, in order; units of the target per Å.
    stress : Prediction of shape (n_solid, 6), optional
        σ = (1/V) ∂E/∂ε in ASE's order (xx, yy, zz, yz, xz, xy) and sign: positive under tension.
        Of the structures whose cells have a volume, `is_solid` (n_structures,).
    atoms : list of Prediction, optional
        Contributions of atoms to each structure, which sum (extensive) or average (intensive) to
        the target member by member; a baseline potential has none.
    novelty : (n_structures,) array
        Largest novelty of an environment: beyond one, the structure is an extrapolation.
    atom_novelty : list of arrays, optional
        The same of each environment.
    extrapolates : (n_structures,) array of bool
    reasons : list of str
        Why a structure is an extrapolation.
    """

    def __init__(self, target: Prediction, parts: Parts, *, is_atomic: bool = False) -> None:
        super().__init__(
            target.members,
            uncalibrated=lambda: target.uncalibrated,
            conformal=target.conformal,
            dof=target.dof,
        )
        #: the target alone, which has this name among the quantities
        self.energy = target
        self.parts, self.is_atomic = parts, is_atomic

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        made = partial(StructurePrediction, is_atomic=self.is_atomic)
        return made, (self.energy, self.parts)

    @property
    def forces(self) -> Prediction:
        """Forces on all atoms."""
        forces: Prediction = _asked("forces", self.parts.forces)
        return forces

    @property
    def stress(self) -> Prediction:
        """Stresses of all structures that have a volume."""
        stress: Prediction = _asked("stress", self.parts.stress)
        if not self.is_solid.any():
            raise AttributeError("The cell has no volume, so that there is no stress.")
        return stress

    @property
    def atoms(self) -> list[Prediction]:
        """Contributions of atoms."""
        contributions: list[Prediction] = _asked("atoms", self.parts.atoms)
        return contributions

    @property
    def atom_novelty(self) -> list[Float64Array]:
        """Novelty of each environment."""
        novelty: list[Float64Array] = _asked("atoms", self.parts.atom_novelty)
        return novelty

    @property
    def force_std(self) -> list[Float64Array]:
        """Uncertainty √(σ_x² + σ_y² + σ_z²) of the force on each atom, by structure."""
        norms, edges = force_norm(self.forces.std), np.cumsum([len(a) for a in self.parts.frames])
        return np.split(norms, edges[:-1])

    @property
    def novelty(self) -> Float64Array:
        """Largest novelty of the environments of each structure."""
        novelty: Float64Array = _asked("novelty", self.parts.novelty)
        return novelty

    @property
    def reasons(self) -> list[str]:
        """Why each structure is an extrapolation; empty if it is none."""
        reasons: list[str] = _asked("novelty", self.parts.reasons)
        return reasons

    @property
    def extrapolates(self) -> BoolArray:
        """Whether each structure is an extrapolation."""
        return np.array([bool(reason) for reason in self.reasons])

    @cached_property
    def is_solid(self) -> BoolArray:
        """Whether the cell of each structure has a volume."""
        return np.array([atoms.cell.rank == 3 for atoms in self.parts.frames])

    def offsets_of(self, quantity: str) -> IntArray:
        """Return where values of a quantity begin for each structure: (n + 1,)."""
        if KINDS[quantity].of_atoms:
            return offsets_of([len(atoms) for atoms in self.parts.frames])
        if quantity != TARGET:
            return offsets_of(self.is_solid.astype(int))
        if self.is_atomic:
            return offsets_of([len(centers) for centers in self.parts.centers or []])
        return np.arange(len(self.parts.frames) + 1)

    def __getitem__(self, index: Any) -> Prediction:
        """Return one structure, or several, with all that was predicted.

        Of an atomic property, return the values of atoms.
        """
        is_mask = isinstance(index, np.ndarray) and index.dtype == bool
        n = len(self.parts.frames)
        if self.is_atomic and is_mask and index.shape == (n,) != self.shape:
            raise InputError(
                f"The mask is of {counted(n, 'structure')}, and the prediction of "
                f"{counted(len(self), 'atom')}. Use `take(np.flatnonzero(mask))`.",
                parameter="index",
            )
        if self.is_atomic or not self.shape or isinstance(index, tuple) or index is Ellipsis:
            return self.energy[index]
        if isinstance(index, (int, np.integer)):
            return self.structure(int(index))
        return self.take(np.arange(len(self))[index])

    def take(self, structures: IntArray) -> StructurePrediction:
        """Return the predictions of some structures (k,), by their numbers."""

        def rows(quantity: str) -> IntArray:
            return ranges(self.offsets_of(quantity), structures)

        parts: dict[str, Any] = {}
        for name, value in self.parts._asdict().items():
            if value is None:
                parts[name] = None
            elif name in DERIVATIVES:
                parts[name] = value[rows(name)]
            elif name in ("process", "novelty_std"):
                parts[name] = value[..., rows(TARGET)]
            elif name == "rows":
                parts[name] = value[rows(TARGET)]
            elif isinstance(value, list):
                parts[name] = [value[s] for s in structures]
            else:
                parts[name] = value[structures]
        target = self.energy[rows(TARGET)]
        return StructurePrediction(target, Parts(**parts), is_atomic=self.is_atomic)

    def structure(self, index: int) -> StructurePrediction:
        """Return the prediction of one structure: its target and stress have no axis for it."""
        alone = self.take(np.array([range(len(self.parts.frames))[index]]))
        target, parts = alone.energy, alone.parts
        if not self.is_atomic:
            target = target[0]
        if parts.stress is not None and alone.is_solid[0]:
            parts = parts._replace(stress=parts.stress[0])
        return StructurePrediction(target, parts, is_atomic=self.is_atomic)

    @staticmethod
    def join(predictions: Sequence[StructurePrediction]) -> StructurePrediction:
        """Return the predictions of several lists of structures, one after the other."""
        if len(predictions) == 1:
            return predictions[0]
        columns: list[Any] = list(zip(*(p.parts for p in predictions), strict=True))
        joined = dict(zip(Parts._fields, columns, strict=True))
        for name, values in joined.items():
            values = [value for value in values if value is not None]
            if not values:
                joined[name] = None
            elif isinstance(values[0], list):
                joined[name] = [item for part in values for item in part]
            elif isinstance(values[0], Prediction):
                joined[name] = Prediction.concatenate(values)
            else:
                joined[name] = np.concatenate(values, axis=0 if name == "rows" else -1)
        target = Prediction.concatenate([p.energy for p in predictions])
        atomic = predictions[0].is_atomic
        return StructurePrediction(target, Parts(**joined), is_atomic=atomic)


def _asked(name: str, value: Any) -> Any:
    if value is None:
        remedy = "" if name == "novelty" else f": use predict(..., {name}=True)"
        raise AttributeError(f"The prediction has no {name}{remedy}.")
    return value


def force_norm(std: Float64Array) -> Float64Array:
    """Return √(σ_x² + σ_y² + σ_z²), (n_atoms,), for uncertainties of forces (n_atoms, 3).

    It does not depend on the orientation of the structure.
    """
    return np.asarray(np.linalg.norm(std, axis=1))


# --- chunks of structures -------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Some structures to predict, and their features."""

    frames: list[Atoms]  #: as they were given
    reduced: list[Atoms]  #: without atoms of unknown species
    centers: list[IntArray]  #: the atoms of `frames` whose environments are used
    batch: Batch  #: features of these environments; none if derivatives are predicted
    fitted: Fitted
    first: int  #: number of the first structure
    #: charge and spin of each structure that differ from those of the training
    other_states: list[list[str]]

    @cached_property
    def factors(self) -> Float64Array:
        """Factor of each prediction: the number of atoms if the target is extensive, or one."""
        if self.fitted.settings.kind == "extensive":
            return np.array([len(atoms) for atoms in self.reduced], dtype=np.float64)
        return np.ones(len(self.design))

    @cached_property
    def design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each prediction."""
        if self.fitted.per_atom:
            return self.atom_design
        return structure_design(self.reduced, self.fitted.baseline.species)

    @property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    @property
    def atom_design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each environment."""
        return atom_design(self.center_species, self.fitted.baseline.species)

    def rows(self, novelty: Float64Array | None = None) -> Float64Array:
        """Return the kernel rows K_XM, and fill `novelty` (n_environments,) if it is given."""
        return self.fitted.basis.rows(self.batch.features, self.batch.offsets, novelty=novelty)

    def prior_variance(self) -> Float64Array:
        """Return the diagonal of K_XX, a number for each prediction."""
        return self.fitted.basis.prior_variance(self.batch.features, self.batch.offsets)


def stream_chunks(
    fitted: Fitted,
    frames: Iterable[Atoms],
    *,
    threads: int = 1,
    allow_unknown: bool = False,
    features: bool = True,
    numbers: Iterable[int] | None = None,
) -> Iterator[Chunk]:
    """Yield structures, which may come from a generator, with their features, in order.

    Parameters
    ----------
    fitted : Fitted
    frames : iterable of Atoms
    threads : int
    allow_unknown : bool
        Whether atoms of unknown species are left out, rather than an error.
    features : bool
        Whether features are computed.
    numbers : iterable of int, optional
        Of the structures, in messages; 0, 1, … by default.
    """
    batch = min(max(_BYTES // (8 * fitted.representation.n_features), 256), BATCH)
    waiting: deque[tuple[Atoms, Atoms, IntArray, list[str]]] = deque()
    species, training_state = fitted.representation.species, fitted.record.state
    per_atom, keys = fitted.per_atom, [*fitted.settings.keys.values()]

    def structures() -> Iterator[tuple[Atoms, IntArray]]:
        is_alike = True
        for index, atoms in zip(count() if numbers is None else numbers, frames, strict=False):
            check_structures([atoms], first=index)
            differing = []
            if training_state is not None:
                state = dict(state_of(atoms, keys))
                names = sorted({*training_state, *state})
                differing = [k for k in names if training_state.get(k) != state.get(k)]
            if differing and is_alike:
                is_alike = False
                warnings.warn(
                    f"Structure {index}, and perhaps others, differs in "
                    f"{' and '.join(map(repr, differing))} from the structures that the model was "
                    "trained on. Predictions do not depend on charge and spin.",
                    QualmsWarning,
                    stacklevel=2,
                )
            is_known = np.isin(atoms.numbers, species)
            if not allow_unknown:
                check_species([atoms], species, first=index)
                if not per_atom:
                    fitted.baseline.check_compositions([atoms], first=index)
            elif not is_known.any():
                raise InputError(
                    f"Structure {index} contains {symbols_of(sorted({*atoms.numbers.tolist()}))} "
                    f"alone; the model was trained on {symbols_of(species)}. Leave it out.",
                    parameter="frames",
                )
            used = np.flatnonzero(is_known)
            reduced = atoms if len(used) == len(atoms) else atoms[used]
            inside = centers_of(reduced.numbers, fitted)
            waiting.append((atoms, reduced, used[inside], differing))
            yield reduced, inside

    representation, some, first = fitted.representation, structures(), 0
    if features:
        batches = stream_features(representation, some, n_workers=threads, batch=batch)
    else:
        batches = _without_features(some, batch)
    for part in batches:
        taken = [waiting.popleft() for _ in part.sizes]
        originals, reduced, centers, states = (list(column) for column in zip(*taken, strict=True))
        yield Chunk(originals, reduced, centers, part, fitted, first, states)
        first += len(originals)


def _without_features(structures: Iterable[tuple[Atoms, IntArray]], batch: int) -> Iterator[Batch]:
    """Yield batches of about `batch` environments, whose features are not computed."""
    sizes: list[int] = []
    for _, centers in structures:
        sizes.append(len(centers))
        if sum(sizes) >= batch:
            yield Batch(np.empty((0, 0)), np.array(sizes))
            sizes = []
    if sizes:
        yield Batch(np.empty((0, 0)), np.array(sizes))


def centers_of(numbers: IntArray, fitted: Fitted) -> IntArray:
    """Return the atoms whose environments are used: all, or those of the species of the target."""
    species = fitted.settings.species
    return np.arange(len(numbers)) if species is None else np.flatnonzero(np.isin(numbers, species))


# --- one prediction -------------------------------------------------------------------------------


def not_predicted(atoms: Atoms, fitted: Fitted | None) -> str:
    """Return why a structure cannot be predicted, if it cannot; without a model, by anyone."""
    try:
        check_structures([atoms])
    except InputError as error:
        return str(error).removeprefix("Structure 0 ").rstrip(".")
    if fitted is None:
        return ""
    if others := {*atoms.numbers.tolist()} - {*fitted.representation.species}:
        return f"contains {symbols_of(sorted(others))}, which the model does not know"
    if fitted.per_atom:
        has_centers = len(centers_of(atoms.numbers, fitted))
        return "" if has_centers else "has no atom whose property is predicted"
    try:
        fitted.baseline.check_compositions([atoms])
    except InputError:
        return f"is {atoms.symbols}, a composition without a baseline"
    return ""


class _Raw(NamedTuple):
    """Members before calibration, and novelty."""

    members: Float64Array  #: (N, N_R): of averages over atoms, or of atoms
    novelty: Float64Array | None  #: (n_environments,)
    novelty_std: Float64Array | None = None  #: (N,): q, if σ depends on it
    atoms: Float64Array | None = None  #: (n_environments, N_R): contributions
    forces: Float64Array | None = None  #: (n_atoms, 3, N_R), or of the mean alone
    #: (n_structures, 6, N_R), or of the mean alone; NaN without a volume
    virials: Float64Array | None = None
    process: Float64Array | None = None  #: (3, N): mean, p and σ_PP of the projected process
    rows: Float64Array | None = None  #: (N, r): kernel rows with the representatives
    features: FloatArray | None = None  #: (n_environments, d)


def predict_chunk(
    chunk: Chunk,
    request: Request,
    potential: Potential | None,
    baseline: BaselinePotential | None,
    threads: int = 1,
) -> StructurePrediction:
    """Return the calibrated prediction of some structures.

    A quantity that the model was trained on has a calibration of its own. Otherwise the members of
    the forces on all atoms of a structure, those of its stress, and the contributions of its atoms
    are scaled about their means by the factor that calibrates the target.

    Parameters
    ----------
    chunk : Chunk
    request : Request
    potential : Potential, optional
        Predicts derivatives; not needed if there are features.
    baseline : BaselinePotential, optional
        Its values are added.
    threads : int
        Cores to use for derivatives.
    """
    fitted = chunk.fitted
    raw = (
        _by_features(chunk, request)
        if potential is None
        else _by_tapes(chunk, request, potential, threads)
    )
    per_atom = fitted.calibrated(
        TARGET,
        raw.members,
        numbers=chunk.center_species if fitted.per_atom else None,
        novelty_std=raw.novelty_std,
    )
    learned: Prediction = per_atom * chunk.factors
    factors = member_factors(fitted.calibration, per_atom.std, raw.members)
    forces = stress = contributions = None
    offsets = chunk.batch.offsets
    edges = list(pairwise(offsets))
    means = _means(chunk, raw) if request.means else None
    if raw.forces is not None and request.forces and not request.means:
        _warn_about_lone_atoms(fitted, chunk.reduced, raw.forces)
        n = [len(atoms) for atoms in chunk.reduced]
        numbers = np.concatenate([atoms.numbers for atoms in chunk.reduced])
        forces = fitted.calibrated(
            "forces", raw.forces, numbers=numbers, factors=np.repeat(factors, n)
        )
    solid = np.array([atoms.cell.rank == 3 for atoms in chunk.reduced])
    if raw.virials is not None and not request.means:
        volumes = np.array([atoms.cell.volume for atoms in chunk.reduced])[solid, None, None]
        stress = fitted.calibrated("stress", raw.virials[solid] / volumes, factors=factors[solid])
    if raw.atoms is not None:
        contributions = [
            Prediction(raw.atoms[a:b]).scaled(fitted.calibration, float(factor))
            for (a, b), factor in zip(edges, factors, strict=True)
        ]
    elif request.atoms:  # of an atomic property, they are the predictions
        contributions = [learned[a:b] for a, b in edges]
    novelty = reasons = atom_novelty = None
    if raw.novelty is not None:
        relative = raw.novelty / fitted.novelty_limits(chunk.center_species)
        novelty = structure_novelty(relative, offsets)[:, 0]
        mean = structure_novelty(raw.novelty, offsets)[:, 1]
        mean /= fitted.training_novelty[1] + fitted.novelty_rounding
        of_structures = np.stack([novelty, mean], axis=1)
        atom_novelty = [relative[a:b] for a, b in edges]
        reasons = _reasons(chunk, raw.members, of_structures, atom_novelty)
    target, process = learned, raw.process
    if process is not None:
        process *= chunk.factors
    if baseline is not None:
        values = baseline.evaluate(
            chunk.reduced,
            forces=request.forces,
            stress=request.stress,
            indices=range(chunk.first, chunk.first + len(chunk.frames)),
        )
        target = learned + values.energies
        if process is not None:
            process[0] += values.energies
        if forces is not None and values.forces is not None:
            forces = forces + np.concatenate(values.forces)
        if stress is not None and values.stresses is not None:
            stress = stress + values.stresses[solid]
        if means is not None:
            means = [
                (
                    of_atoms + (0.0 if values.forces is None else values.forces[s]),
                    None if cell is None or values.stresses is None else cell + values.stresses[s],
                )
                for s, (of_atoms, cell) in enumerate(means)
            ]
    parts = Parts(
        frames=chunk.frames,
        centers=chunk.centers,
        novelty=novelty,
        reasons=reasons,
        forces=forces,
        stress=stress,
        atoms=contributions,
        atom_novelty=atom_novelty if request.atoms or request.rows else None,
        process=process,
        rows=raw.rows,
        features=None if raw.features is None else np.split(raw.features, offsets[1:-1]),
        novelty_std=raw.novelty_std if request.process else None,
        means=means,
    )
    return StructurePrediction(target, parts, is_atomic=fitted.per_atom)


def _means(chunk: Chunk, raw: _Raw) -> list[tuple[Float64Array, Float64Array | None]]:
    """Return forces and stresses of single structures, without uncertainties."""
    assert raw.forces is not None
    _warn_about_lone_atoms(chunk.fitted, chunk.reduced, raw.forces)
    edges = np.cumsum([len(atoms) for atoms in chunk.reduced])[:-1]
    found: list[tuple[Float64Array, Float64Array | None]] = []
    for s, of_atoms in enumerate(np.split(raw.forces[..., 0], edges)):
        stress, atoms = None, chunk.reduced[s]
        if raw.virials is not None and atoms.cell.rank == 3:
            stress = raw.virials[s, :, 0] / atoms.cell.volume
        found.append((of_atoms, stress))
    return found


def _by_features(chunk: Chunk, request: Request) -> _Raw:
    """Return members of averages, or of atoms, from the features of the environments."""
    fitted = chunk.fitted
    novelty = np.empty(int(chunk.batch.sizes.sum())) if request.novelty else None
    K_XM = chunk.rows(novelty)
    contributions = process = None
    if request.atoms and not fitted.per_atom:
        by_kernel = fitted.basis.environment_rows(chunk.batch.features) @ fitted.weights
        contributions = fitted.with_baseline(by_kernel, chunk.atom_design)
    if request.process and fitted.pp_variance is not None:
        p2, q2 = fitted.pp_variance.parts(K_XM, chunk.prior_variance())
        stds = np.sqrt([p2, p2 + q2 + fitted.pp_variance.noise_variance_of_target])
        process = np.stack([fitted.pp_mean(K_XM, chunk.design), *stds])
    return _Raw(
        members=fitted.members(K_XM, chunk.design),
        novelty=novelty,
        novelty_std=fitted.novelty_std(K_XM, chunk.prior_variance),
        atoms=contributions,
        process=process,
        rows=K_XM if request.rows else None,
        features=chunk.batch.features if request.rows else None,
    )


def _by_tapes(chunk: Chunk, request: Request, potential: Potential, threads: int) -> _Raw:
    """Return members of energies and of their derivatives, from one pass over the features."""
    fitted, frames = chunk.fitted, chunk.reduced
    n_atoms, R = sum(map(len, frames)), fitted.weights.shape[1]
    uses_q = fitted.calibration.needs_novelty and fitted.pp_variance is not None
    of = [term.mean for term in potential] if request.means else None
    features = np.empty((n_atoms, fitted.representation.n_features))
    atoms, S = np.zeros((n_atoms, R)), 1 if request.means else R
    forces, virials = np.empty((n_atoms, 3, S)), np.full((len(frames), 6, S), np.nan)
    energies, solid = np.empty((len(frames), R)), np.array([a.cell.rank == 3 for a in frames])
    owner = np.repeat(np.arange(len(frames)), [len(a) for a in frames])
    strained = solid & request.stress
    for strain in np.unique(strained).tolist():
        some = np.flatnonzero(strained == strain)
        places = np.flatnonzero(strained[owner] == strain)
        part = derivatives(
            potential,
            [frames[i] for i in some],
            forces=request.forces or request.stress,
            strain=strain,
            atoms=request.atoms,
            features=request.novelty or uses_q,
            of=of,
            threads=threads,
        )
        energies[some], forces[places] = part.energies, part.forces
        if part.atoms is not None:
            atoms[places] = part.atoms
        if part.features is not None:
            features[places] = part.features
        if part.virials is not None:
            virials[some] = part.virials
    novelty = novelty_std = K_XM = None
    if request.novelty or uses_q:
        novelty = np.empty(n_atoms) if request.novelty else None
        offsets = offsets_of([len(a) for a in frames])
        K_XM = fitted.basis.rows(features, offsets, novelty=novelty)
        novelty_std = fitted.novelty_std(
            K_XM, lambda: fitted.basis.prior_variance(features, offsets)
        )
    return _Raw(
        members=fitted.with_baseline(energies / chunk.factors[:, None], chunk.design),
        novelty=novelty,
        novelty_std=novelty_std,
        atoms=fitted.with_baseline(atoms, chunk.atom_design) if request.atoms else None,
        forces=forces,
        virials=virials if request.stress else None,
        rows=K_XM if request.rows else None,
        features=features if request.rows else None,
    )


def _reasons(
    chunk: Chunk,
    members: Float64Array,
    of_structures: Float64Array,
    atom_novelty: Sequence[Float64Array],
) -> list[str]:
    """Return why each structure is an extrapolation; an empty text if it is none.

    It is if the largest or the mean novelty of its environments, or the standard deviation of
    members, exceeds a limit (together for 1 % of out-of-bag structures), if it is a molecule larger
    than those of the training set, if it has atoms of unknown species or another charge or spin
    than the training structures, or if its composition has no baseline.

    Parameters
    ----------
    chunk : Chunk
    members : (N, N_R) array
        Of the target, before calibration: of averages over atoms, or of atoms.
    of_structures : (n_structures, 2) array
        Largest and mean novelty of the environments of each structure, in units of the limits.
    atom_novelty : sequence of arrays
        Novelty of the environments of each structure.
    """
    fitted, offsets = chunk.fitted, chunk.batch.offsets
    # Members that agree to rounding on all training rows differ by rounding everywhere.
    limit = fitted.std_limit or fitted.largest_ensemble_std or np.inf
    std = fitted.std_of_members(members) / limit
    symbol = "p" if fitted.settings.n_drawn > 1 else "ŝ"
    determined = np.ones(len(chunk.frames), dtype=bool)
    if not fitted.per_atom:
        determined = fitted.baseline.is_determined(chunk.design)
    reasons = []
    for s, (atoms, reduced) in enumerate(zip(chunk.frames, chunk.reduced, strict=True)):
        texts = []
        if len(atoms) > len(reduced):
            others = {*atoms.numbers.tolist()} - {*fitted.representation.species}
            texts.append(f"elements {symbols_of(sorted(others))} are unknown")
        if chunk.other_states[s]:
            texts.append(f"{' and '.join(chunk.other_states[s])} differ from the training set")
        if not determined[s]:
            texts.append("the composition is not determined by the training set")
        if size := _larger(reduced, fitted.largest_size):
            texts.append(size)
        largest_novelty, mean_novelty = of_structures[s]
        if largest_novelty > 1:
            i = int(chunk.centers[s][np.argmax(atom_novelty[s])])
            text = f"the environment of atom {i} ({chemical_symbols[atoms.numbers[i]]}) is novel"
            texts.append(f"{text}, {largest_novelty:.3g} × the limit")
        elif mean_novelty > 1:
            texts.append(f"its environments are novel on average, {mean_novelty:.3g} × the limit")
        largest_std = (
            std[offsets[s] : offsets[s + 1]].max(initial=0.0) if fitted.per_atom else std[s]
        )
        if largest_std > 1:
            text = f"its uncertainty before calibration ({symbol}) exceeds that of out-of-bag"
            texts.append(f"{text} structures, {largest_std:.3g} × the limit")
        reasons.append("; ".join(texts))
    return reasons


def _larger(atoms: Atoms, largest: tuple[int, int] | None) -> str:
    """Return by what a molecule is larger than those trained on; an empty text if it is not.

    Cells of periodic structures may have any size.
    """
    if largest is None or atoms.pbc.any():
        return ""
    sizes = len(atoms), int(np.count_nonzero(atoms.numbers > 1))
    for size, most, of in zip(sizes, largest, ("", " other than hydrogen"), strict=True):
        if size > most:
            return f"it has {size} atoms{of}, molecules of the training set have {most} at most"
    return ""


def _warn_about_lone_atoms(fitted: Fitted, frames: Sequence[Atoms], forces: Float64Array) -> None:
    """Warn if a force is zero because the atom has no neighbours: its uncertainty is zero, too."""
    cutoff = fitted.representation.cutoff
    lone, start = 0, 0
    for atoms in frames:
        of_atoms = forces[start : start + len(atoms)]
        start += len(atoms)
        if len(atoms) == 1:  # zero by symmetry
            continue
        for i in np.flatnonzero(~np.any(of_atoms, axis=(1, 2))).tolist():
            others = [j for j in range(len(atoms)) if j != i]
            distances = atoms.get_distances(i, others, mic=True)  # type: ignore[no-untyped-call]
            lone += bool(np.all(distances > cutoff))
    if lone:
        warnings.warn(
            f"{counted(lone, 'atom')} without neighbours within the cutoff: the forces on them and "
            "their uncertainties are zero, which is no estimate.",
            QualmsWarning,
            stacklevel=2,
        )
