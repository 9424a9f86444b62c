"""Forces and stresses: derivatives of kernels, for training, and of the energies of all members.

An environment with features x (see `qualms.features.gradients`) has, with a representative X, the
kernel k(x) = Σ_s c_s (x_s·X_s)^ζ, summed over scales s. A change of its positions changes y, of
which x is the normalised vector, and with it

    Δk = Σ_s c_s ζ (x·X)^(ζ−1) (Δy·X − (Δy·x) x·X) / |y|    for normalised features,
    Δk = Σ_s c_s ζ (x·X)^(ζ−1) Δy·X / c                     for features divided by a constant c.

**Kernel rows** of forces and virials, for training, have a column for each of M representatives: Δy
of every environment and neighbour is multiplied with all X (forward). **Predictions** have a column
for each of R members, far fewer: with b = ∂e/∂x = Σ_m w_m ζ (x·X_m)^(ζ−1) X_m and e = Σ_m w_m k_m,

    ∂e/∂y = (b − (x·b) x) / |y|,        x·b = ζe,

is taken back to the power spectrum and multiplied with its derivatives (backward). If ζ = 2 the
energy is a quadratic form in x, which takes less time if there are fewer features than
representatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import structure_design
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.structures import VOIGT, check_species, check_structures
from qualms.calibration.base import MemberTransform
from qualms.calibration.methods import Scaled, VectorCalibration
from qualms.errors import InputError, QualmsWarning, counted
from qualms.features.gradients import (
    Environments,
    GradientBlock,
    ScaleFeatures,
    batches,
    scale_features,
    spectra,
    spectra_and_gradients,
)
from qualms.features.representation import Representation, offsets_of
from qualms.features.soap import REMEDY
from qualms.prediction import Prediction

#: Bytes that the quadratic forms of all members may take.
_ROOM = 256e6
#: Multiplications that take as long as reading a number from memory, and as making one w (x·X)^ζ.
_READING, _MAKING = 36, 80
#: How much longer a multiplication takes without quadratic forms: the products are smaller.
_SLOWER = 1.7
#: Environments whose w (x·X)^ζ are made at a time, few enough for a cache.
_CHUNK = 8
#: Environments whose energies are computed at once.
_ENERGIES = 1024


# --- the kernel with representatives, and the energy of members ---


@dataclass(frozen=True)
class ScaleKernel:
    """The kernel of one scale with representatives (M, q), and their weights (M, R) in R members.

    Kernel rows have no members.
    """

    features: ScaleFeatures
    representatives: Float64Array
    weights: Float64Array

    def kernel(
        self, x: Float64Array, X: Float64Array | None = None
    ) -> tuple[Float64Array, Float64Array]:
        """Return k and its derivative by x·X, both (n, M), for features x (n, c).

        Products x·X may be negative by rounding or compression. For a fractional ζ they count as
        zero. Some columns of the representatives suffice if x is zero in all others.
        """
        k = x @ (self.representatives if X is None else X).T
        exponent, share = self.features.exponent, self.features.share
        slopes = k if float(exponent).is_integer() else np.maximum(k, 0.0)
        slopes = share * slopes ** (exponent - 1)
        k *= slopes
        slopes *= exponent
        return k, slopes

    def energies(self, P: Float64Array) -> Float64Array:
        """Return e (n, R) for power spectra (n, D)."""
        x, _ = self.features.features(P)
        energies: Float64Array = self.kernel(x)[0] @ self.weights
        return energies

    def energy_slopes(self, P: Float64Array) -> tuple[Float64Array, dict[int, Float64Array]]:
        """Return e (n, R) and ∂e/∂p, as `ScaleFeatures.lifted`, for power spectra (n, D)."""
        x, lengths = self.features.features(P)
        # Features of pairs of species that no environment has do not change.
        pairs = self.features.present(P)
        used = self.features.used(pairs)
        if self._prefers_form(len(x), len(used)):
            used = np.arange(x.shape[1])
            slopes = (x @ self._forms).reshape(len(x), -1, x.shape[1])
            energies = (slopes @ x[:, :, None])[:, :, 0] / 2
        else:
            x = x[:, used]
            energies, slopes = self._by_representatives(x, used)
        if self.features.feature_scale is None:
            slopes -= (self.features.exponent * energies)[:, :, None] * x[:, None, :]
        slopes *= (1 / lengths)[:, :, None]
        return energies, self.features.lifted(slopes, used, pairs)

    def _prefers_form(self, n: int, c: int) -> bool:
        """Whether a quadratic form takes less time for n environments with c features.

        Counted in multiplications, as measured with 16 members. Reading a number from memory takes
        as long as many of them, and no cache holds the forms of all members.
        """
        (M, q), R = self.representatives.shape, self.weights.shape[1]
        if self.features.exponent != 2 or 8.0 * R * q**2 > _ROOM:
            return False
        return bool(q**2 * (n + _READING) < n * M * (_SLOWER * c + _MAKING))

    @cached_property
    def _forms(self) -> Float64Array:
        """The matrices 2 Xᵀ diag(w) X of all members, side by side: (q, R·q)."""
        X, share = self.representatives, self.features.share
        return np.concatenate([2 * share * X.T @ (w[:, None] * X) for w in self.weights.T], axis=1)

    def _by_representatives(
        self, x: Float64Array, used: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and b (n, R, c), by their definition."""
        (n, c), R = x.shape, self.weights.shape[1]
        X = self.representatives[:, used]
        if self.features.exponent == 1:  # b is the same everywhere
            b = self.features.share * self.weights.T @ X
            return x @ b.T, np.repeat(b[None], n, axis=0)
        k, powers = self.kernel(x, X)
        slopes = np.empty((n, R, c))
        for start in range(0, n, _CHUNK):
            terms = powers[start : start + _CHUNK, None, :] * self.weights.T
            into = slopes[start : start + _CHUNK].reshape(len(terms) * R, c)
            np.matmul(terms.reshape(len(into), -1), X, out=into)
        return k @ self.weights, slopes


#: The energy of environments by all members of a model, or by some combination of them.
Potential: TypeAlias = Sequence[ScaleKernel]


def scale_rows(representation: Representation, representatives: FloatArray) -> list[ScaleKernel]:
    """Return the kernel of each scale with representatives (M, d)."""
    X, none = representatives.astype(np.float64), np.empty((len(representatives), 0))
    kernels = []
    for scale in scale_features(representation):
        own = X[:, scale.columns]
        kernels.append(ScaleKernel(scale, own if scale.compressed else scale.projected(own), none))
    return kernels


def make_potential(fitted: Fitted, weights: Float64Array) -> Potential:
    """Return the energy by R members of a trained model, or combinations of them: (M, R)."""
    weights = weights * fitted.kernel_scale
    scales = scale_rows(fitted.representation, fitted.representatives)
    return [replace(scale, weights=weights) for scale in scales]


class Derivatives(NamedTuple):
    """Energies (n_structures, R) without baseline, forces (n_atoms, 3, R) and perhaps virials.

    Of R members or representatives. Virials ∂E/∂ε (n_structures, 6, R) are in the order of
    `qualms.atomistic.structures.VOIGT`.
    """

    energies: Float64Array
    forces: Float64Array
    virials: Float64Array | None


def _no_derivatives(n_structures: int, n_atoms: int, R: int, strain: bool) -> Derivatives:
    virials = np.zeros((n_structures, 6, R)) if strain else None
    return Derivatives(np.zeros((n_structures, R)), np.zeros((n_atoms, 3, R)), virials)


def _sums(rows: IntArray, values: Float64Array, n: int) -> csr_array:
    """Return a matrix (n, len(rows)) that adds entry i, times a value, to a row."""
    return csr_array((values, (rows, np.arange(len(rows)))), shape=(n, len(rows)))


# --- predictions: derivatives of the energies of members, backward ---


def potential_energies(potential: Potential, frames: Sequence[Atoms]) -> Float64Array:
    """Return the energies of `derivatives` alone: (n_structures, R)."""
    energies = np.zeros((len(frames), potential[0].weights.shape[1]))
    for batch in batches(frames, _ENERGIES):
        for scale in potential:
            P = spectra(scale.features.engine, batch)
            np.add.at(energies, batch.structures[batch.owners], scale.energies(P))
    return energies


def derivatives(
    potential: Potential, frames: Sequence[Atoms], *, strain: bool = False
) -> Derivatives:
    """Return energies and derivatives of structures, batch by batch of environments."""
    R = potential[0].weights.shape[1]
    offsets = offsets_of([len(atoms) for atoms in frames])
    total = _no_derivatives(len(frames), int(offsets[-1]), R, strain)
    for batch in batches(frames):
        # A structure may come in several parts, but only once in each batch.
        here = np.concatenate([np.arange(*offsets[s : s + 2]) for s in batch.structures])
        owners = batch.structures[batch.owners]
        for scale in potential:
            P, blocks = spectra_and_gradients(scale.features.engine, batch, strain=strain)
            energies, slopes = scale.energy_slopes(P)
            np.add.at(total.energies, owners, energies)
            blocks = [block for block in blocks if block.columns.start in slopes]
            total.forces[here] -= _by_position(blocks, slopes, R, int(batch.atom_offsets[-1]))
            for block in blocks:
                if total.virials is not None and block.strain is not None:
                    of_block = slopes[block.columns.start][block.rows].transpose(0, 2, 1)
                    changes = block.strain[:, *VOIGT] @ of_block
                    np.add.at(total.virials, owners[block.rows], changes)
    return total


def _by_position(
    blocks: Sequence[GradientBlock], slopes: dict[int, Float64Array], R: int, n_atoms: int
) -> Float64Array:
    """Return Σ_i (∂e_i/∂p_i)·(∂p_i/∂r_j) (n_atoms, 3, R), for slopes ∂e_i/∂p_i (n, R, c)."""
    atoms = np.concatenate([np.empty(0, dtype=np.intp), *(block.atoms for block in blocks)])
    change = np.empty((len(atoms), 3, R))
    first = 0
    for block in blocks:
        of_pair = slopes[block.columns.start]
        for row, (begin, end) in zip(block.rows, pairwise(block.edges.tolist()), strict=True):
            np.matmul(
                block.positions[begin:end].reshape(3 * (end - begin), -1),
                of_pair[row].T,
                out=change[first + begin : first + end].reshape(-1, R),
            )
        first += len(block.atoms)
    summed = _sums(atoms, np.ones(len(atoms)), n_atoms) @ change.reshape(-1, 3 * R)
    return np.asarray(summed).reshape(n_atoms, 3, R)


# --- training: kernel rows of forces and virials, forward ---


def fill_rows(
    energies: Float64Array,
    others: Float64Array,
    frames: Sequence[Atoms],
    labels: ForceLabels,
    scales: Sequence[ScaleKernel],
    on_environments: Callable[[int], object] = lambda done: None,
) -> None:
    """Fill in the kernel rows of a training set.

    Averages over environments go to `energies` (n_structures, M); rows of forces, and of virials
    per atom, that have labels are added to `others` (n_rows, M). `on_environments` is called with
    the number of environments done so far.
    """
    strain = labels.n_with_virial > 0
    energies[:] = 0.0
    done = 0
    for batch in batches(frames):
        found = derivative_rows(scales, batch, strain=strain)
        edges = pairwise(batch.atom_offsets)
        for k, (s, (begin, end)) in enumerate(zip(batch.structures, edges, strict=True)):
            n = len(frames[s])
            energies[s] += found.energies[k] / n
            rows = found.forces[begin:end].reshape(3 * n, -1)
            if found.virials is not None:
                rows = np.concatenate([rows, found.virials[k] / n])
            mask = labels.known[s][: len(rows)]
            others[labels.offsets[s] : labels.offsets[s + 1]] += rows[mask]
        done += len(batch)
        on_environments(done)


def derivative_rows(
    scales: Sequence[ScaleKernel], batch: Environments, *, strain: bool = False
) -> Derivatives:
    """Return the kernel rows of a batch, summed over scales."""
    n, M = len(batch), len(scales[0].representatives)
    rows = _no_derivatives(len(batch.frames), int(batch.atom_offsets[-1]), M, strain)
    sums = _sums(batch.owners, np.ones(n), len(batch.frames))
    for scale in scales:
        features = scale.features
        P, blocks = spectra_and_gradients(features.engine, batch, strain=strain)
        x, lengths = features.features(P)
        k, slopes = scale.kernel(x)
        rows.energies[:] += np.asarray(sums @ k)
        slopes /= lengths
        # x·X times the slope; features that are not normalised have no second term.
        second = k * (features.exponent / lengths if features.feature_scale is None else 0.0)
        for z in features.engine.species:
            moving = _moving(blocks, batch, features, z)
            _add_forces(rows.forces, scale, moving, batch, x, slopes, second)
        if rows.virials is None:
            continue
        raw = np.zeros((n, 6, P.shape[1]))
        for block in blocks:
            if block.strain is not None:
                raw[block.rows, :, block.columns] = block.strain[:, *VOIGT]
        changes = features.projected(raw.reshape(6 * n, -1)).reshape(n, 6, -1)
        along = np.einsum("ivf,if->iv", changes, x)
        for v in range(6):
            terms = (changes[:, v] @ scale.representatives.T) * slopes
            terms -= along[:, v, None] * second
            rows.virials[:, v] += np.asarray(sums @ terms)
    return rows


class _Moving(NamedTuple):
    """Derivatives of power spectra by the positions of atoms of one species.

    Of p combinations of an environment and an atom that is not its centre, and of the features of
    all pairs of species that this species is in: `changes` (p, 3, c).
    """

    owners: IntArray
    atoms: IntArray
    pairs: list[int]
    changes: Float64Array


def _moving(
    blocks: Sequence[GradientBlock], batch: Environments, features: ScaleFeatures, z: int
) -> _Moving:
    """Collect derivatives by the positions of atoms of atomic number z, centres left out."""
    present = {block.columns.start for block in blocks}
    of_pairs = enumerate(features.engine.pair_columns.items())
    pairs = [k for k, (pair, own) in of_pairs if z in pair and own.start in present]
    columns = [features.maps[k].rows for k in pairs]
    place = {of_pair.start: k for k, of_pair in enumerate(columns)}
    numbers = np.concatenate([atoms.numbers for atoms in batch.frames])
    found = []
    for block in blocks:
        if block.columns.start in place:
            owners = np.repeat(block.rows, np.diff(block.edges))
            wanted = (numbers[block.atoms] == z) & (batch.center_atoms[owners] != block.atoms)
            found.append((block, wanted, owners[wanted] * len(numbers) + block.atoms[wanted]))
    every = np.concatenate([np.empty(0, dtype=np.intp), *(keys for *_, keys in found)])
    keys, entries = np.unique(every, return_inverse=True)
    size = columns[0].stop - columns[0].start if columns else 0
    changes = np.zeros((len(keys), 3, size * len(pairs)))
    first = 0
    for block, wanted, own in found:
        k = place[block.columns.start]
        here = entries[first : first + len(own)]
        changes[here, :, k * size : (k + 1) * size] = block.positions[wanted]
        first += len(own)
    return _Moving(keys // len(numbers), keys % len(numbers), pairs, changes)


def _add_forces(
    forces: Float64Array,
    scale: ScaleKernel,
    moving: _Moving,
    batch: Environments,
    x: Float64Array,
    slopes: Float64Array,
    second: Float64Array,
) -> None:
    """Add −Σ_i Δk_i of the atoms of one species to the rows of forces (n_atoms, 3, M).

    An atom that is pushed pulls the centre of the environment.
    """
    owners, (p, _, c) = moving.owners, moving.changes.shape
    if not p:
        return
    used = scale.features.used(moving.pairs)
    changes = scale.features.projected(moving.changes.reshape(3 * p, c), moving.pairs)
    along = np.einsum("pcf,pf->pc", changes.reshape(p, 3, -1), x[:, used][owners])
    terms = changes @ scale.representatives[:, used].T
    terms.reshape(p, 3, -1)[:] *= slopes[owners, None, :]
    flat, axes = forces.reshape(3 * len(forces), -1), np.arange(3)
    on_atoms = (3 * moving.atoms[:, None] + axes).ravel()
    on_centers = (3 * batch.center_atoms[owners][:, None] + axes).ravel()
    rows, signs = np.concatenate([on_atoms, on_centers]), np.repeat([-1.0, 1.0], 3 * p)
    entries, shape = np.tile(np.arange(3 * p), 2), (len(flat), 3 * p)
    flat += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ terms)
    signs *= np.tile(-along.ravel(), 2)
    entries, shape = np.tile(np.repeat(owners, 3), 2), (len(flat), len(x))
    flat += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ second)


# --- calibrated energies, forces and stresses ---


class StructureForces(NamedTuple):
    """Energy, forces (n_atoms, 3) and, if it was predicted, stress (6,) of one structure."""

    energy: Prediction
    forces: Prediction
    stress: Prediction | None


@dataclass(frozen=True)
class ForcePrediction:
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

    def __getitem__(self, index: int) -> StructureForces:
        """Return the predictions of one structure."""
        s = range(len(self))[index]
        rows = slice(int(self.offsets[s]), int(self.offsets[s + 1]))
        stress = None if self.stress is None else self.stress[s]
        return StructureForces(self.energy[s], self.forces[rows], stress)

    def __iter__(self) -> Iterator[StructureForces]:
        return (self[s] for s in range(len(self)))


def predict_with_forces(
    fitted: Fitted, potential: Potential, frames: Sequence[Atoms], *, stress: bool
) -> ForcePrediction:
    """Return calibrated energies, forces and stresses by all members.

    A model that was trained on forces has a calibration of its own for them, and one that was
    trained on stresses for those. Each force, and each stress, is rescaled as a whole, so that
    directions do not matter. Otherwise the members of the forces on all atoms of a structure, and
    those of its stress, are scaled about their means by the factor that calibrates its energy.
    """
    found = derivatives(potential, frames, strain=stress)
    sizes = np.array([len(atoms) for atoms in frames])
    per_atom = Prediction(member_energies(fitted, frames, found.energies))
    conformal = fitted.conformal
    energy = per_atom.calibrated(fitted.calibration, conformal.get("energy"))
    factors = fitted.calibration.factors_of(energy.std, per_atom.members)
    stresses = None
    if found.virials is not None:
        volumes = np.array([atoms.cell.volume for atoms in frames])
        raw = Prediction(found.virials / volumes[:, None, None])
        stresses = raw.calibrated(_own(fitted, "stress", factors), conformal.get("stress"))
    _warn_about_lone_atoms(fitted, frames, found.forces)
    own = _own(fitted, "forces", np.repeat(factors, sizes))
    forces = Prediction(found.forces).calibrated(own, conformal.get("forces"))
    return ForcePrediction(energy * sizes, forces, stresses, offsets_of(sizes))


def _warn_about_lone_atoms(fitted: Fitted, frames: Sequence[Atoms], forces: Float64Array) -> None:
    """Warn if a force is zero because the atom has no neighbours: its uncertainty is zero, too."""
    cutoff = fitted.representation.cutoff
    lone, start = 0, 0
    for atoms in frames:
        own = forces[start : start + len(atoms)]
        start += len(atoms)
        if len(atoms) == 1:  # zero by symmetry
            continue
        for i in np.flatnonzero(~np.any(own, axis=(1, 2))).tolist():
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


def predict_energies(fitted: Fitted, potential: Potential, frames: Sequence[Atoms]) -> Prediction:
    """Return the energies of `predict_with_forces` alone, in less time."""
    per_atom = Prediction(member_energies(fitted, frames, potential_energies(potential, frames)))
    calibrated = per_atom.calibrated(fitted.calibration, fitted.conformal.get("energy"))
    energies: Prediction = calibrated * np.array([*map(len, frames)])
    return energies


def member_energies(
    fitted: Fitted, frames: Sequence[Atoms], energies: Float64Array
) -> Float64Array:
    """Return the energy per atom by each member, baseline included: (n_structures, N_R)."""
    sizes = np.array([len(atoms) for atoms in frames], dtype=np.float64)[:, None]
    design = structure_design(frames, fitted.baseline.species)
    return energies / sizes + fitted.intercepts + fitted.baseline.predict_members(design)


def _own(fitted: Fitted, quantity: str, factors: Float64Array) -> MemberTransform:
    """Return the calibration of forces, or of stresses: their own, or given factors."""
    own = fitted.calibration_of(quantity)
    return Scaled(factors, fitted.calibration) if own is None else VectorCalibration(own)


# --- which models and structures have forces ---


def has_forces(fitted: Fitted) -> bool:
    """Whether a model has continuous forces, learned or not."""
    return fitted.settings.has_forces


def check_model(fitted: Fitted) -> None:
    """Reject a model without forces; warn if its forces are not continuous."""
    if fitted.settings.kind != "extensive":
        raise InputError(
            "kind", repr(fitted.settings.kind), "'extensive': forces are derivatives of an energy"
        )
    fitted.representation.check_derivatives()
    if not fitted.settings.has_forces:
        warnings.warn(
            "The cutoff of the model is not smooth: its energy jumps when an atom crosses the "
            f"cutoff, and simulations with its forces do not conserve the energy. {REMEDY}",
            QualmsWarning,
            stacklevel=2,
        )


def check_frames(fitted: Fitted, frames: Sequence[Atoms], *, stress: bool) -> None:
    """Reject a model without forces, and structures that it cannot predict, or without a stress."""
    check_model(fitted)
    if not len(frames):
        raise InputError("frames", "no structures", "at least one")
    for i, atoms in enumerate(frames):
        check_structures([atoms], first=i)
        check_species([atoms], fitted.representation.species, first=i)
        fitted.baseline.check_compositions([atoms], first=i)
        if stress and (rank := atoms.cell.rank) < 3:
            expected = "three: without a volume there is no stress"
            raise InputError(f"frames[{i}].cell", f"{rank} vectors", expected)
