"""The energy of environments as a function of their power spectra, and its derivative.

An environment with power spectrum p, in raw features, has y = pP, x = y/|y| (see
`qualms.features.gradients`), and for each member the energy

    e(p) = Σ_s Σ_m w_sm (x_s·X_sm)^ζ        s: scales, m: representatives.

With b = ∂e/∂x = Σ_m ζ w_m (x·X_m)^(ζ−1) X_m, the chain back to the raw features is

    ∂e/∂p = P (b − (x·b) x) / |y|           for normalised features,
    ∂e/∂p = P b / c                         for features divided by a constant c.

The kernel is homogeneous in x, so that x·b = ζe: energies come with their derivatives. All members
share representatives, so that b of all members is one matrix product, of w (x·X)^(ζ−1) for all
members and X. Features suffice of those pairs of species that some environment at hand has: others
do not change. Or else w X of all members is made once, side by side, and (x·X)^(ζ−1) multiplied
with it. If ζ = 1, b is the same for all environments. If ζ = 2 the energy is a quadratic form in x,
with a matrix for each member; with fewer features than representatives, that is less work. Matrices
made once need memory, and time to be read from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array

from qualms.arrays import Float64Array, IntArray
from qualms.atomistic.baseline import structure_design
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.structures import VOIGT, check_species, check_structures
from qualms.calibration.base import Calibration, MemberTransform
from qualms.calibration.methods import Scaled, WholeCalibration
from qualms.errors import InputError, QualmsWarning, level_of_user
from qualms.features.gradients import (
    Environments,
    GradientBlock,
    ScaleFeatures,
    batches,
    gradient_blocks,
    power_spectra,
    scale_features,
)
from qualms.features.soap import offsets_of
from qualms.prediction import Prediction

#: Bytes that matrices of all members, made once, may take.
_ROOM = 256e6
#: Multiplications that take as long as reading a number from memory, and as making one w (x·X)^ζ.
_READING, _MAKING = 36, 80
#: How much longer a multiplication takes without matrices made once: the products are smaller.
_SLOWER = 1.7
#: Environments whose w (x·X)^ζ are made at a time, few enough for a cache.
_CHUNK = 8


#: From x (n, c), and the features that these c are, to e (n, R) and b (n, R, c).
_Way = Callable[[Float64Array, IntArray], tuple[Float64Array, Float64Array]]


@dataclass(frozen=True)
class ScalePotential:
    """What one scale adds to the energy of an environment, for R weight columns.

    Attributes
    ----------
    scale : ScaleFeatures
    representatives : (M, q) array
    weights : (M, R) array
    """

    scale: ScaleFeatures
    representatives: Float64Array
    weights: Float64Array

    def energies(self, P: Float64Array) -> Float64Array:
        """Return e (n, R) for power spectra (n, D)."""
        x, _ = self.scale.features(P)
        products = x @ self.representatives.T
        energies: Float64Array = (products * self.scale.powers(products)) @ self.weights
        return energies

    def slopes(self, P: Float64Array) -> tuple[Float64Array, dict[int, Float64Array]]:
        """Return e (n, R) and ∂e/∂p, as `ScaleFeatures.lifted`, for power spectra (n, D)."""
        x, lengths = self.scale.features(P)
        pairs = self.scale.present(P)
        used = self.scale.used(pairs)
        by = self._quickest(len(x), len(used))
        if by in (self._by_forms, self._by_products):
            used = np.arange(x.shape[1])
        x = x if len(used) == x.shape[1] else x[:, used]
        energies, slopes = by(x, used)
        if self.scale.feature_scale is None:
            slopes -= (self.scale.exponent * energies)[:, :, None] * x[:, None, :]
        slopes *= (1 / lengths)[:, :, None]
        return energies, self.scale.lifted(slopes, used, pairs)

    def _quickest(self, n: int, c: int) -> _Way:
        """Return how to find e and b of n environments soonest, c features being there.

        Time is counted in multiplications, as measured with 16 members. Reading a number from
        memory takes as long as many of them, so that matrices of all members, which no cache holds,
        pay off for many environments at a time only.
        """
        (M, q), R = self.representatives.shape, self.weights.shape[1]
        if self.scale.exponent == 1:
            return self._by_sums
        work = {self._by_representatives: n * M * (_SLOWER * c + _MAKING)}
        if 8.0 * R * M * q <= _ROOM:
            work[self._by_products] = M * q * (n + _READING)
        if self.scale.exponent == 2 and 8.0 * R * q**2 <= _ROOM:
            work[self._by_forms] = q**2 * (n + _READING)
        return min(work, key=work.__getitem__)

    def _by_representatives(
        self, x: Float64Array, used: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and b (n, R, c), by their definition."""
        (n, c), R = x.shape, self.weights.shape[1]
        X = self._columns(used)
        products = x @ X.T
        powers = self.scale.powers(products)
        energies = (products * powers) @ self.weights
        powers *= self.scale.exponent
        slopes, terms = np.empty((n, R, c)), np.empty((min(_CHUNK, n), R, len(X)))
        for start in range(0, n, _CHUNK):
            some = powers[start : start + _CHUNK, None, :]
            made = np.multiply(some, self.weights.T, out=terms[: len(some)])
            into = slopes[start : start + _CHUNK].reshape(len(some) * R, c)
            np.matmul(made.reshape(len(some) * R, -1), X, out=into)
        return energies, slopes

    def _by_products(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same with all features: what is multiplied with powers is made once."""
        products = x @ self.representatives.T
        powers = self.scale.powers(products)
        energies = (products * powers) @ self.weights
        powers *= self.scale.exponent
        return energies, (powers @ self._weighted).reshape(len(x), -1, x.shape[1])

    def _by_sums(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same for ζ = 1: b is Xᵀw."""
        b = self._sums[:, used]
        return x @ b.T, np.repeat(b[None], len(x), axis=0)

    def _by_forms(self, x: Float64Array, used: IntArray) -> tuple[Float64Array, Float64Array]:
        """Return the same for ζ = 2, with all features: b is 2 Xᵀ diag(w) X x."""
        slopes = (x @ self._forms).reshape(len(x), -1, x.shape[1])
        return (slopes @ x[:, :, None])[:, :, 0] / 2, slopes

    def _columns(self, used: IntArray) -> Float64Array:
        """Return some columns of the representatives."""
        X = self.representatives
        return X if len(used) == X.shape[1] else X[:, used]

    @cached_property
    def _sums(self) -> Float64Array:
        """The vectors Xᵀw of all columns: (R, q)."""
        return np.ascontiguousarray(self.weights.T @ self.representatives)

    @cached_property
    def _weighted(self) -> Float64Array:
        """The matrices diag(w) X of all columns, side by side: (M, R·q)."""
        weighted = self.weights[:, :, None] * self.representatives[:, None, :]
        return weighted.reshape(len(weighted), -1)

    @cached_property
    def _forms(self) -> Float64Array:
        """The matrices 2 Xᵀ diag(w) X of all columns, side by side: (q, R·q)."""
        X = self.representatives
        return np.concatenate([2 * X.T @ (w[:, None] * X) for w in self.weights.T], axis=1)


@dataclass(frozen=True)
class Potential:
    """The energy of environments by all members of a model, or by some combination of them.

    Attributes
    ----------
    scales : sequence of ScalePotential
    """

    scales: Sequence[ScalePotential]

    @property
    def n_columns(self) -> int:
        """R."""
        return int(self.scales[0].weights.shape[1])


def make_potential(fitted: Fitted, weights: Float64Array) -> Potential:
    """Return the potential of a trained model.

    Parameters
    ----------
    fitted : Fitted
        With features by featomic.
    weights : (M, R) array
        Of its representatives; those of its members, or a mean of them.
    """
    scales = [
        ScalePotential(
            scale=scale,
            representatives=scale.representatives(fitted.representatives),
            weights=weights * (fitted.kernel_scale * scale.share),
        )
        for scale in scale_features(fitted.representation)
    ]
    return Potential(tuple(scales))


# Forces and stress of every member, as derivatives of its energy.
class StructureMechanics(NamedTuple):
    """Energy, forces (n_atoms, 3) and, if asked for, stress (6,) of one structure."""

    energy: Prediction
    forces: Prediction
    stress: Prediction | None


@dataclass(frozen=True)
class Mechanics:
    """Energies, forces and stresses of structures, by all members, calibrated.

    Before calibration (``forces.uncalibrated``) the forces of each member are the derivative of its
    energy (``energy.uncalibrated``).

    Attributes
    ----------
    energy : Prediction of shape (n_structures,)
    forces : Prediction of shape (n_atoms, 3)
        Of the atoms of all structures, in order; units of the energy per Å.
    stress : Prediction of shape (n_structures, 6), optional
        σ = (1/V) ∂E/∂ε in ASE's order (xx, yy, zz, yz, xz, xy) and sign: positive under tension.
        Units of the energy per Å³.
    offsets : (n_structures + 1,) array of int
        Atoms of structure s are ``offsets[s]:offsets[s + 1]``.
    """

    energy: Prediction
    forces: Prediction
    stress: Prediction | None
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> StructureMechanics: ...

    @overload
    def __getitem__(self, index: slice) -> Mechanics: ...

    def __getitem__(self, index: int | slice) -> StructureMechanics | Mechanics:
        """Return what is predicted for one structure, or for several."""
        if isinstance(index, slice):
            return self._of(range(len(self))[index])
        s = range(len(self))[index]
        atoms = slice(int(self.offsets[s]), int(self.offsets[s + 1]))
        stress = None if self.stress is None else self.stress[s]
        return StructureMechanics(self.energy[s], self.forces[atoms], stress)

    def _of(self, chosen: range) -> Mechanics:
        """Return what is predicted for some structures."""
        some: IntArray = np.arange(chosen.start, chosen.stop, chosen.step)
        atoms = [np.arange(*self.offsets[s : s + 2]) for s in chosen]
        return Mechanics(
            energy=self.energy[some],
            forces=self.forces[np.concatenate([np.empty(0, dtype=np.intp), *atoms])],
            stress=None if self.stress is None else self.stress[some],
            offsets=offsets_of([len(rows) for rows in atoms]),
        )

    def __iter__(self) -> Iterator[StructureMechanics]:
        return (self[s] for s in range(len(self)))


@dataclass(frozen=True)
class Derivatives:
    """Energies without baseline, and their derivatives, for R weight columns.

    Attributes
    ----------
    energies : (n_structures, R) array
    forces : (n_atoms, 3, R) array
    virials : (n_structures, 6, R) array, optional
        ∂E/∂ε.
    """

    energies: Float64Array
    forces: Float64Array
    virials: Float64Array | None


def check_model(fitted: Fitted) -> None:
    """Refuse a model that has no forces, and warn of one whose forces are not continuous."""
    if fitted.settings.kind != "extensive":
        raise InputError(
            "kind", repr(fitted.settings.kind), "'extensive': forces are derivatives of an energy"
        )
    engine = fitted.representation.soap.resolved_engine
    if engine != "featomic":
        raise InputError(
            "engine",
            repr(engine),
            "'featomic', whose features have derivatives",
            "Train with forces, or with representation={'engine': 'featomic', 'smoothing': 0.5}.",
        )
    if not fitted.settings.has_forces:
        warnings.warn(
            "The cutoff of the model is not smooth: its energy jumps when an atom crosses it, of "
            "which forces know nothing, and simulations do not conserve it. Train with forces, or "
            "with representation={'engine': 'featomic', 'smoothing': 0.5}.",
            QualmsWarning,
            stacklevel=level_of_user(),
        )


def has_forces(fitted: Fitted) -> bool:
    """Whether a model has continuous forces, learned or not: `check_model` finds no fault."""
    engine = fitted.representation.soap.resolved_engine
    return engine == "featomic" and fitted.settings.has_forces


def check_frames(fitted: Fitted, frames: Sequence[Atoms], *, stress: bool) -> None:
    """Refuse a model without forces, and structures that it cannot predict, or without a stress."""
    check_model(fitted)
    if not len(frames):
        raise InputError("frames", "no structures", "at least one")
    for i, atoms in enumerate(frames):
        check_structures([atoms], first=i)
        check_species([atoms], fitted.representation.species, first=i)
    if stress:
        check_volumes(frames)


def check_volumes(frames: Sequence[Atoms]) -> None:
    """Refuse structures that have no stress."""
    for i, atoms in enumerate(frames):
        if atoms.cell.rank < 3:
            given = f"{atoms.cell.rank} vectors"
            expected = "three: without a volume there is no stress"
            raise InputError(f"frames[{i}].cell", given, expected)


def derivatives(
    potential: Potential, frames: Sequence[Atoms], *, strain: bool = False
) -> Derivatives:
    """Return energies and derivatives of structures, streamed environment by environment."""
    R = potential.n_columns
    offsets = offsets_of([len(atoms) for atoms in frames])
    energies = np.zeros((len(frames), R))
    slopes = np.zeros((offsets[-1], 3 * R))
    virials = np.zeros((len(frames), 9 * R)) if strain else None
    for batch in batches(frames):
        # A structure may come in several parts, but only once in each batch.
        here = np.concatenate([np.arange(*offsets[s : s + 2]) for s in batch.structures])
        owners = batch.structures[batch.owners]
        for scale in potential.scales:
            of_environments, by_position, by_strain = _batch_derivatives(scale, batch, strain)
            np.add.at(energies, owners, of_environments)
            slopes[here] += by_position
            if virials is not None and by_strain is not None:
                np.add.at(virials, owners, by_strain)
    forces = -slopes.reshape(-1, 3, R)
    if virials is None:
        return Derivatives(energies, forces, None)
    return Derivatives(energies, forces, virials.reshape(-1, 3, 3, R)[:, *VOIGT])


def _batch_derivatives(
    scale: ScalePotential, batch: Environments, strain: bool
) -> tuple[Float64Array, Float64Array, Float64Array | None]:
    """Return e_i (n, R), Σ_i ∂e_i/∂r (n_atoms, 3R), and ∂e_i/∂ε (n, 9R)."""
    engine, n = scale.scale.engine, int(batch.offsets[-1])
    blocks = list(gradient_blocks(engine, batch, strain=strain))
    P = power_spectra(blocks, n, engine.n_features)
    energies, slopes = scale.slopes(P)
    # What is zero for all environments does not change, either.
    blocks = [block for block in blocks if block.columns.start in slopes]
    R = energies.shape[1]
    by_strain = np.zeros((n, 9, R)) if strain else None
    for block in blocks:
        if by_strain is not None and block.strain is not None:
            of_block = slopes[block.columns.start][block.rows]
            change = block.strain.reshape(len(of_block), 9, -1) @ of_block.transpose(0, 2, 1)
            by_strain[block.rows] += change
    by_position = _by_position(blocks, slopes, R, int(batch.atom_offsets[-1]))
    return energies, by_position, None if by_strain is None else by_strain.reshape(n, -1)


def _by_position(
    blocks: Sequence[GradientBlock], slopes: dict[int, Float64Array], R: int, n_atoms: int
) -> Float64Array:
    """Return Σ_i (∂e_i/∂p_i)·(∂p_i/∂r_j): (n_atoms, 3R).

    The slopes ∂e_i/∂p_i (n, R, c) are those of `ScalePotential.slopes`.
    """
    atoms = np.concatenate([np.empty(0, dtype=np.intp), *(block.atoms for block in blocks)])
    change = np.empty((len(atoms), 3, R))
    first = 0
    for block in blocks:
        c, of_pair = block.values.shape[1], slopes[block.columns.start]
        for row, (begin, end) in zip(block.rows, pairwise(block.edges.tolist()), strict=True):
            np.matmul(
                block.positions[begin:end].reshape(-1, c),
                of_pair[row].T,
                out=change[first + begin : first + end].reshape(-1, R),
            )
        first += len(block.atoms)
    shape = (n_atoms, len(atoms))
    sums = csr_array((np.ones(len(atoms)), (atoms, np.arange(len(atoms)))), shape=shape)
    return np.asarray(sums @ change.reshape(-1, 3 * R))


def member_energies(
    fitted: Fitted, frames: Sequence[Atoms], energies: Float64Array
) -> Float64Array:
    """Return what each member says per atom, baseline included: (n_structures, N_R)."""
    sizes = np.array([len(atoms) for atoms in frames], dtype=np.float64)[:, None]
    design = structure_design(frames, fitted.baseline.species)
    return energies / sizes + fitted.intercepts + fitted.baseline.predict_members(design)


def predict_mechanics(
    fitted: Fitted, potential: Potential, frames: Sequence[Atoms], *, stress: bool
) -> Mechanics:
    """Return calibrated energies, forces and stresses by all members.

    A model that was trained on forces has a calibration of its own for them, and one that was
    trained on stresses for those; each force, and each stress, is stretched as a whole, so that
    directions do not matter. Otherwise the members of the forces on all atoms of a structure, and
    those of its stress, are scaled about their means by the factor that calibrates its energy.
    """
    found = derivatives(potential, frames, strain=stress)
    sizes = np.array([len(atoms) for atoms in frames])
    per_atom = Prediction(member_energies(fitted, frames, found.energies))
    energy = per_atom.calibrated(fitted.calibration)
    spread = energy.uncalibrated.std
    factors = np.divide(energy.std, spread, out=np.ones_like(spread), where=spread > 0)
    stresses = None
    if found.virials is not None:
        volumes = np.array([atoms.get_volume() for atoms in frames])  # type: ignore[no-untyped-call]
        raw = Prediction(found.virials / volumes[:, None, None])
        stresses = raw.calibrated(_own(fitted.calibration_of("stress"), factors))
    forces_own = _own(fitted.calibration_of("forces"), np.repeat(factors, sizes))
    return Mechanics(
        energy=energy * sizes,
        forces=Prediction(found.forces).calibrated(forces_own),
        stress=stresses,
        offsets=offsets_of(sizes),
    )


def _own(calibration: Calibration | None, factors: Float64Array) -> MemberTransform:
    """Return what calibrates forces, or stresses: their own calibration, or given factors."""
    return Scaled(factors) if calibration is None else WholeCalibration(calibration)
