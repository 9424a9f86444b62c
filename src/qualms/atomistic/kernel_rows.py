"""Kernel rows of structures, or of atoms, in a stream.

A property of a structure is an average over its environments, and so is its kernel with a
representative environment. An extensive property is the number of atoms times an average, so that
extensive and intensive properties share one model of averages, with noise per atom. A property of
an atom has the kernel of its environment.

Kernel blocks are (environments of a batch) × (representatives) and are reduced at once: the largest
array is (labels) × (representatives), never (all environments) × (representatives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import VOIGT
from qualms.features.gradients import (
    Environments,
    GradientBlock,
    ScaleFeatures,
    batches,
    gradient_blocks,
    power_spectra,
    scale_features,
)
from qualms.features.soap import Representation, structure_blocks
from qualms.gp.kernels import Kernel, sum_over_structures
from qualms.gp.representatives import RowSource, cur_from_kernel, farthest_points

#: Elements of a kernel block: 64 MB of float64.
_ELEMENTS = 8_000_000


@dataclass(frozen=True)
class Basis:
    """Representative environments, and the kernel with them.

    Attributes
    ----------
    kernel : Kernel
        Between environments.
    representatives : (r, d) array of float32
    scale : float
        Factor of Eq. (17), Musil et al. 2019, for targets of unit variance.
    per_atom : bool
        Whether rows are environments rather than averages over structures.
    """

    kernel: Kernel
    representatives: FloatArray
    scale: float
    per_atom: bool

    def rows(
        self,
        features: FloatArray,
        offsets: IntArray,
        *,
        novelty: Float64Array | None = None,
        own: Sequence[IntArray] | None = None,
    ) -> Float64Array:
        """Return the kernel rows K_XM of a batch: (n_structures, r), or (n_environments, r).

        Parameters
        ----------
        features : (n_environments, d) array
        offsets : (n_structures + 1,) array of int
            Environments of structure s are rows ``offsets[s]:offsets[s + 1]``.
        novelty : (n_structures, 2) array, optional
            Is filled with how unlike every representative the strangest environment of each
            structure is, and its environments on average, from 0 to 1: one minus the largest
            normalised kernel with a representative.
        own : sequence of arrays of int, optional
            Representatives of each structure that its novelty does not count: those that come from
            itself.
        """
        n = len(features) if self.per_atom else len(offsets) - 1
        rows = np.empty((n, len(self.representatives)))
        for first, last in structure_blocks(offsets, _ELEMENTS // len(self.representatives)):
            begin, end = offsets[first], offsets[last]
            block = features[begin:end]
            K = self.kernel(block, self.representatives)
            if novelty is not None:
                likeness = self._likeness(K, block)
                for s in range(first, last):
                    part = likeness[offsets[s] - begin : offsets[s + 1] - begin]
                    novelty[s] = _novelty(part, None if own is None else own[s])
            if self.per_atom:
                rows[begin:end] = K
            else:
                local = offsets[first : last + 1] - begin
                rows[first:last] = sum_over_structures(K, local, average=True)
        rows *= self.scale
        return rows

    def environment_rows(self, features: FloatArray) -> Float64Array:
        """Return the kernel rows of single environments (n, d): (n, r)."""
        return (
            np.asarray(self.kernel(features, self.representatives), dtype=np.float64) * self.scale
        )

    def novelty(self, features: FloatArray) -> Float64Array:
        """Return how unlike every representative environments (n, d) are, from 0 to 1: (n,)."""
        found = np.empty(len(features))
        step = max(_ELEMENTS // len(self.representatives), 1)
        for start in range(0, len(features), step):
            block = features[start : start + step]
            K = self.kernel(block, self.representatives)
            found[start : start + step] = _novelties(self._likeness(K, block))
        return found

    def prior_variance(self, features: FloatArray, offsets: IntArray) -> Float64Array:
        """Return the diagonal of the kernel: (n_structures,), or (n_environments,)."""
        if self.per_atom:
            diagonal = np.asarray(self.kernel.diag(features), dtype=np.float64)
        else:
            diagonal = np.empty(len(offsets) - 1)
            for s, (begin, end) in enumerate(pairwise(offsets)):
                block = features[begin:end]
                diagonal[s] = np.mean(self.kernel(block, block), dtype=np.float64)
        return diagonal * self.scale

    def _likeness(self, K: FloatArray, features: FloatArray) -> FloatArray:
        """Return the normalised kernel; K itself if the kernel is normalised."""
        own = np.sqrt(self.kernel.diag(self.representatives))
        norms = np.sqrt(self.kernel.diag(features))
        if np.allclose(own, 1, atol=1e-4) and np.allclose(norms, 1, atol=1e-4):
            return K
        own, norms = np.where(own > 0, own, 1.0), np.where(norms > 0, norms, 1.0)
        return np.asarray(K / own / norms[:, None], dtype=K.dtype)


def _novelty(likeness: FloatArray, own: IntArray | None) -> tuple[float, float]:
    """Return the novelty of the strangest of some environments (n, r), and their mean novelty."""
    if not len(likeness):
        return 0.0, 0.0
    if own is not None and len(own):
        likeness = likeness.copy()
        likeness[:, own] = 0.0
    each = _novelties(likeness)
    return float(each.max()), float(each.mean(dtype=np.float64))


def _novelties(likeness: FloatArray) -> FloatArray:
    """Return one minus the largest likeness of each environment, given (n, r): (n,)."""
    novelties: FloatArray = np.clip(1.0 - likeness.max(axis=1), 0.0, 1.0)
    return novelties


# Choosing representative environments.
#: CUR chooses among this many times more farthest points than are wanted.
LANDMARKS = 2


class _Rows:
    """Some rows of features, numbered anew; a `RowSource`."""

    def __init__(self, features: RowSource, rows: IntArray) -> None:
        self._features, self._rows = features, rows
        self.shape = (len(rows), features.shape[1])
        self.dtype = features.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> FloatArray:
        return self._features[self._rows[rows]]


def select_representatives(
    features: RowSource,
    kernel: Kernel,
    center_species: IntArray,
    settings: Settings,
    rng: np.random.Generator,
    on_pick: Callable[[int], object] | None = None,
) -> IntArray:
    """Choose environments: at most ``settings.n_representatives`` indices, in order of choice.

    Parameters
    ----------
    features : RowSource
        Of all candidates, (n, d).
    kernel : Kernel
    center_species : (n,) array of int
        Atomic number at the centre of each.
    settings : Settings
        ``selection``, ``n_representatives``, and ``per_species``, whether each species gets its
        share of the representatives or all compete.
    rng : Generator
        For a random choice.
    on_pick : callable, optional
        Called with the number of picks so far.
    """
    n = min(settings.n_representatives, len(features))
    if not settings.per_species:
        return _select(features, kernel, n, settings.selection, rng, on_pick)
    picks: list[IntArray] = []
    for z, share in _shares(center_species, n).items():
        rows = np.flatnonzero(center_species == z)
        chosen = _select(_Rows(features, rows), kernel, share, settings.selection, rng, None)
        picks.append(rows[chosen])
        if on_pick is not None:
            on_pick(sum(map(len, picks)))
    return np.concatenate(picks)


def _select(
    features: RowSource,
    kernel: Kernel,
    n: int,
    selection: str,
    rng: np.random.Generator,
    on_pick: Callable[[int], object] | None,
) -> IntArray:
    if selection == "random":
        return rng.permutation(len(features))[:n]
    if selection == "fps":
        return farthest_points(features, n, on_pick=on_pick).indices
    n_landmarks = min(LANDMARKS * n, len(features))
    found = None if on_pick is None else lambda k: on_pick(k * n // n_landmarks)
    landmarks = farthest_points(features, n_landmarks, on_pick=found).indices
    X = features[landmarks].astype(np.float64)
    K = np.asarray(kernel(X, X))
    del X
    return landmarks[cur_from_kernel(K, min(n, len(landmarks))).indices]


def _shares(center_species: IntArray, n: int) -> dict[int, int]:
    """Divide n among the species in proportion to their environments, one at least for each.

    If n is less than the number of species, the most frequent get one each.
    """
    species, counts = np.unique(center_species, return_counts=True)
    exact = n * counts / counts.sum()
    shares = np.zeros(len(species), dtype=int)
    shares[np.argsort(-counts, kind="stable")[:n]] = 1
    while shares.sum() < n:
        # What is furthest below its share is below it at all, hence below its count.
        shares[np.argmax(exact - shares)] += 1
    return {int(z): int(s) for z, s in zip(species, shares, strict=True) if s}


# Kernel rows of forces and virials, in a stream.
@dataclass(frozen=True)
class Rows:
    """Kernel rows of a batch of environments: what they add to those of their structures.

    Attributes
    ----------
    energies : (n_structures, M) array
        Sums over environments.
    forces : (n_atoms, 3, M) array
    virials : (n_structures, 6, M) array, optional
        Derivatives by the strain, in the order of `qualms.atomistic.structures.VOIGT`.
    """

    energies: Float64Array
    forces: Float64Array
    virials: Float64Array | None


@dataclass(frozen=True)
class Pairs:
    """Derivatives of power spectra by the positions of atoms of one species.

    Attributes
    ----------
    owners, atoms : (p,) arrays of int
        Environment, and atom that is not its centre, counted through the batch.
    pairs : list of int
        Pairs of species that this species is in, among all of them.
    changes : (p, 3, c) array
        Of their features, one pair after the other.
    """

    owners: IntArray
    atoms: IntArray
    pairs: list[int]
    changes: Float64Array


def derivative_rows(
    scales: Sequence[ScaleRows], batch: Environments, *, strain: bool = False
) -> Rows:
    """Return the kernel rows of a batch, summed over scales."""
    M, n_structures = len(scales[0].representatives), len(batch.frames)
    rows = Rows(
        energies=np.zeros((n_structures, M)),
        forces=np.zeros((int(batch.atom_offsets[-1]), 3, M)),
        virials=np.zeros((n_structures, 6, M)) if strain else None,
    )
    for scale in scales:
        scale.add_to(rows, batch)
    return rows


def fill_rows(
    energies: Float64Array,
    others: Float64Array,
    frames: Sequence[Atoms],
    labels: ForceLabels,
    scales: Sequence[ScaleRows],
    on_environments: Callable[[int], object] = lambda done: None,
) -> None:
    """Fill in the kernel rows of a training set.

    Parameters
    ----------
    energies : (n_structures, M) array
        Is filled with averages over environments.
    others : (n_rows, M) array of zeros
        Is filled with the rows of forces, and of virials per atom, that have labels.
    frames, labels
        Of the training set.
    scales : sequence of ScaleRows
    on_environments : callable, optional
        Called with the number of environments done so far.
    """
    strain = labels.n_with_virial > 0
    energies[:] = 0.0
    done = 0
    for batch in batches(frames):
        found = derivative_rows(scales, batch, strain=strain)
        atom_offsets = batch.atom_offsets
        for k, s in enumerate(batch.structures):
            sizes = len(frames[s])
            energies[s] += found.energies[k] / sizes
            of_atoms = found.forces[atom_offsets[k] : atom_offsets[k + 1]]
            parts = [of_atoms.reshape(3 * sizes, -1)]
            if found.virials is not None:
                parts.append(found.virials[k] / sizes)
            mask = labels.known[s][: sum(map(len, parts))]
            others[labels.offsets[s] : labels.offsets[s + 1]] += np.concatenate(parts)[mask]
        done += int(batch.offsets[-1])
        on_environments(done)


def scale_rows(representation: Representation, representatives: FloatArray) -> list[ScaleRows]:
    """Return what computes the rows of each scale, for representatives (M, d)."""
    return [
        ScaleRows(scale, scale.representatives(representatives))
        for scale in scale_features(representation)
    ]


@dataclass(frozen=True)
class ScaleRows:
    """Kernel rows of one scale.

    Attributes
    ----------
    scale : ScaleFeatures
    representatives : (M, q) array
    """

    scale: ScaleFeatures
    representatives: Float64Array

    def add_to(self, rows: Rows, batch: Environments) -> None:
        """Add what this scale contributes."""
        scale, n = self.scale, int(batch.offsets[-1])
        blocks = list(gradient_blocks(scale.engine, batch, strain=rows.virials is not None))
        x, lengths = scale.features(power_spectra(blocks, n, scale.engine.n_features))
        products = x @ self.representatives.T
        powers = scale.share * scale.powers(products)
        products *= powers
        sums = csr_array((np.ones(n), (batch.owners, np.arange(n))), shape=(len(rows.energies), n))
        rows.energies[:] += np.asarray(sums @ products)
        powers *= scale.exponent / lengths
        # Of features that are not normalised there is no second term.
        products *= scale.exponent / lengths if scale.feature_scale is None else 0.0
        forces = rows.forces.reshape(-1, len(self.representatives))
        for z in scale.engine.species:
            pairs = _pairs(blocks, batch, scale, z)
            if len(pairs.atoms):
                self._add_forces(forces, pairs, batch, x, powers, products)
        if rows.virials is not None:
            self._add_virials(rows.virials, blocks, sums, x, powers, products)

    def _add_forces(
        self,
        forces: Float64Array,
        pairs: Pairs,
        batch: Environments,
        x: Float64Array,
        powers: Float64Array,
        products: Float64Array,
    ) -> None:
        """Add the rows −Σ_i a_i (∂y_i/∂r_j·X − (∂y_i/∂r_j·x_i) x_i·X) of one species, (3n, M)."""
        owners, (p, _, c) = pairs.owners, pairs.changes.shape
        changes = self.scale.projected(pairs.changes.reshape(3 * p, c), pairs.pairs)
        used = self.scale.used(pairs.pairs)
        along = np.einsum("pcf,pf->pc", changes.reshape(p, 3, -1), x[:, used][owners])
        terms = changes @ self.representatives[:, used].T
        terms.reshape(p, 3, -1)[:] *= powers[owners, None, :]
        # What pushes atom j pulls the centre.
        axes = np.arange(3)
        on_atoms = (3 * pairs.atoms[:, None] + axes).ravel()
        on_centers = (3 * batch.center_atoms[owners][:, None] + axes).ravel()
        rows, ones = np.concatenate([on_atoms, on_centers]), np.ones(3 * p)
        entries = np.tile(np.arange(3 * p), 2)
        signs = np.concatenate([-ones, ones])
        shape = (len(forces), 3 * p)
        forces += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ terms)
        second = signs * np.tile(-along.ravel(), 2)
        environments = np.tile(np.repeat(owners, 3), 2)
        shape = (len(forces), len(x))
        forces += np.asarray(csr_array((second, (rows, environments)), shape=shape) @ products)

    def _add_virials(
        self,
        virials: Float64Array,
        blocks: Sequence[GradientBlock],
        sums: csr_array,
        x: Float64Array,
        powers: Float64Array,
        products: Float64Array,
    ) -> None:
        """Add the rows Σ_i a_i (∂y_i/∂ε·X − (∂y_i/∂ε·x_i) x_i·X)."""
        n, D = len(x), self.scale.engine.n_features
        raw = np.zeros((n, 6, D))
        for block in blocks:
            if block.strain is not None:
                raw[block.rows, :, block.columns] = block.strain[:, *VOIGT]
        changes = self.scale.projected(raw.reshape(6 * n, D)).reshape(n, 6, -1)
        along = np.einsum("ivf,if->iv", changes, x)
        for v in range(6):
            terms = (changes[:, v] @ self.representatives.T) * powers
            terms -= along[:, v, None] * products
            virials[:, v] += np.asarray(sums @ terms)


def _pairs(
    blocks: Sequence[GradientBlock], batch: Environments, scale: ScaleFeatures, z: int
) -> Pairs:
    """Collect derivatives by the positions of atoms of atomic number z, centres left out."""
    pair_columns = scale.engine.pair_columns
    pairs = [k for k, pair in enumerate(pair_columns) if z in pair]
    blocks_of_pairs = [list(pair_columns.values())[k] for k in pairs]
    with_z = {columns.start: k for k, columns in enumerate(blocks_of_pairs)}
    numbers = np.concatenate([atoms.numbers for atoms in batch.frames])
    found = []
    for block in blocks:
        if block.columns.start in with_z:
            owners = np.repeat(block.rows, np.diff(block.edges))
            wanted = (numbers[block.atoms] == z) & (batch.center_atoms[owners] != block.atoms)
            found.append((block, wanted, owners[wanted] * len(numbers) + block.atoms[wanted]))
    keys, places = np.unique(
        np.concatenate([keys for *_, keys in found] or [np.empty(0, dtype=np.intp)]),
        return_inverse=True,
    )
    size = blocks_of_pairs[0].stop - blocks_of_pairs[0].start
    changes = np.zeros((len(keys), 3, size * len(pairs)))
    first = 0
    for block, wanted, own in found:
        k = with_z[block.columns.start]
        here = places[first : first + len(own)]
        changes[here, :, k * size : (k + 1) * size] = block.positions[wanted]
        first += len(own)
    return Pairs(keys // len(numbers), keys % len(numbers), pairs, changes)
