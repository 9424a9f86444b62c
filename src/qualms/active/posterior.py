"""The posterior of a model, and what structures are to it: rows, variances and novelty.

The rows of structures in the posterior of the weights, B, have as products BBᵀ the covariances of
what they are rows of, and as squares its variances p². Labels that are added to the training set
change them in closed form, whatever their values (`qualms.gp.sparse_gp.Observations`).

What the representatives of the model cannot describe, q² of Eq. (3), Musil et al. 2019, has its
columns, too: environments of structures that are novel to the model are further representatives.
Without labels, their posterior is the prior.

A model of energies has the energy per atom as its row; a model that learned forces the force along
a random displacement of all atoms, v·F/|v|, whose variance has that of the components of all forces
as its mean. It is the difference of the energies of two structures, so that it takes two energies,
and not the derivatives of all members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from ase import Atoms
from ase.data import chemical_symbols

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import fill_rows, kernel_terms
from qualms.atomistic.kernel_rows import Basis
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import Parts, Request
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.structures import fingerprints
from qualms.calibration.members import member_factors
from qualms.errors import InputError, counted
from qualms.features.base import Batch, offsets_of, stream_features
from qualms.gp.representatives import farthest_points
from qualms.gp.sparse_gp import cholesky, cholesky_whiten, whiten

#: Length in Å of a displacement, relative to a vector of random components of unit variance: the
#: standard deviation of a force of 3BPA is then off by 0.1 %.
_STEP = 3e-4
#: Novel environments of a pool that are further representatives, at most.
_N_NOVEL = 500
#: Environments from which these are taken, at most; structures whose kernel is computed at once.
_N_FROM, _BLOCK = 20_000, 200
#: Prior variance of representatives, relative to the largest, that is rounding.
_RTOL = 1e-10
#: The same of novel environments, given the representatives, whose factor is float32.
_RTOL_NOVEL = 1e-6


class Rows(NamedTuple):
    """What is known of N structures: kernel rows, calibrated variances, novelty and features."""

    kernel: Float64Array  #: (N, M): of the energy per atom, or of a force
    variance: Float64Array  #: (N,): σ² of the same
    novelty: Float64Array  #: (N,): largest of the environments, in units of the limit
    features: FloatArray  #: (N, d): means over environments
    #: (1 or 2, n, d): features of the environments of each, and perhaps by how much they differ for
    #: the displaced structure; n = 0 if none is novel
    novel: list[FloatArray]
    factors: Float64Array  #: (N, 2) or (N, 1): the row, as a combination of energies per atom


@dataclass(frozen=True)
class Posterior:
    """Posterior of the weights of a model, given the labels that it was trained on.

    With L Lᵀ the kernel of the M representatives, and φ the rows of K L⁻ᵀ, weights have the prior
    variance s² and the precision P Pᵀ = 1/s² + Σ φᵀφ/σ² over all labels: rows are B = φ P⁻ᵀ. The k
    novel environments, given the representatives, have the kernel L₂L₂ᵀ.
    """

    model: AtomisticModel
    representatives: Float64Array  #: (M + k, d)
    columns: IntArray  #: (M,): those of the model that are among them
    whitening: Float64Array  #: L (M, M)
    precision: Float64Array  #: P (M, M)
    variance: float  #: s²
    of_novel: Float64Array  #: (M, k): K_MM⁻¹K_Mk
    whitening_of_novel: Float64Array  #: L₂ (k, k)

    def rows(self, K: Float64Array) -> Float64Array:
        """Return rows of the posterior for kernel rows (n, M + k), those of the novel last."""
        M = len(self.whitening)
        return self._rows(K[:, :M], K[:, M:] - K[:, :M] @ self.of_novel)

    def _rows(self, K: Float64Array, beyond: Float64Array) -> Float64Array:
        """Return rows for the kernel (n, M), and that of what is beyond it (n, k)."""
        B = cholesky_whiten(self.precision, cholesky_whiten(self.whitening, K.T)).T
        if not beyond.shape[1]:
            return np.asarray(B)
        novel = np.sqrt(self.variance) * cholesky_whiten(self.whitening_of_novel, beyond.T).T
        return np.concatenate([B, novel], axis=1)

    def rows_of(self, structures: Rows) -> Float64Array:
        """Return rows of the posterior of structures: (N, M + k).

        Of structures without novel environments next to nothing is beyond the representatives.
        """
        M, k = len(self.whitening), len(self.whitening_of_novel)
        beyond = np.zeros((len(structures.kernel), k))
        some = np.array([i for i, x in enumerate(structures.novel) if k and x.shape[1]], dtype=int)
        basis = self._basis(self.representatives)
        for part in np.array_split(some, -(-len(some) // _BLOCK) or 1):  # of limited memory
            if not len(part):
                continue
            sizes = [structures.novel[i].shape[1] for i in part]
            x = np.concatenate([structures.novel[i] for i in part], axis=1).astype(np.float64)
            for side in range(len(x)):
                K = basis.rows(x[: side + 1].sum(axis=0), offsets_of(sizes))
                K *= (structures.factors[part, side] * sizes)[:, None]  # means over environments
                beyond[part] += K[:, M:] - K[:, :M] @ self.of_novel
        return self._rows(structures.kernel[:, self.columns], beyond)

    def calibrated_rows(self, structures: Rows) -> tuple[Float64Array, Float64Array]:
        """Return rows whose squares are the calibrated variances σ², and σ²/(p² + q²): (N,).

        Both parts fall in proportion to their own variance. Of structures with novel environments
        half of σ² is theirs: q² alone is far larger than errors are.
        """
        B, M = self.rows_of(structures), len(self.whitening)
        p2, q2 = (np.einsum("ij,ij->i", part, part) for part in (B[:, :M], B[:, M:]))
        shares = np.where((p2 > 0) & (q2 > 0), 0.5, 1.0)
        for part, left in ((B[:, :M], p2), (B[:, M:], q2)):
            part *= np.sqrt(_ratio(structures.variance * shares, left))[:, None]
        return B, _ratio(structures.variance, p2 + q2)

    def observed(self, atoms: Atoms) -> Float64Array:
        """Return rows of the labels that a structure will have, relative to their noise: (m, r)."""
        ((batch, _),) = read_features(self.model.fitted, [atoms])
        K = self._basis(self.representatives).rows(batch.features, batch.offsets)
        of_derivatives, noise = derivative_rows(self.model.fitted, atoms, self.representatives)
        noise = np.concatenate([[self.model.fitted.record.quantities[TARGET].noise], noise])
        return self.rows(np.concatenate([K, of_derivatives])) / noise[:, None]

    def _basis(self, X: Float64Array) -> Basis:
        fitted = self.model.fitted
        return Basis(fitted.representation.kernel, X, fitted.kernel_scale, per_atom=False)


def _ratio(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return a/b, and zero where b is."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def derivative_rows(
    fitted: Fitted, atoms: Atoms, X: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return kernel rows (m, M) of the forces, and the stress, of a structure, and their noise.

    There are none if the model does not learn them.
    """
    noise = {name: of.noise for name, of in fitted.record.quantities.items()}
    # A row for each component that is a number: here, that of its noise.
    stress = noise.get("stress", np.nan) if atoms.cell.rank == 3 else np.nan
    forces = np.full((len(atoms), 3), noise.get("forces", np.nan))
    labels = ForceLabels([forces], np.full((1, 6), stress))
    K = np.zeros((len(labels.y), len(X)))
    if len(K):
        terms = kernel_terms(fitted.representation, X)
        fill_rows(np.zeros((1, len(X))), K, [atoms], labels, terms)
    return K * fitted.kernel_scale, labels.y


def _are_novel(fitted: Fitted, parts: Parts) -> BoolArray:
    """Return which structures have environments that the representatives do not describe: (n,).

    Those beyond the largest limit of any element. Limits of elements say what is unusual; further
    representatives are for what is left of the kernel, and that of other structures is neglected.
    """
    assert parts.atom_novelty is not None
    assert parts.centers is not None
    places = zip(parts.frames, parts.centers, parts.atom_novelty, strict=True)
    largest = [
        np.max(novelty * fitted.novelty_limits(atoms.numbers[chosen]), initial=0.0)
        for atoms, chosen, novelty in places
    ]
    return np.array(largest) > fitted.training_novelty[0] + fitted.novelty_rounding


def make_posterior(model: AtomisticModel, labelled: Sequence[Atoms], structures: Rows) -> Posterior:
    """Return the posterior of a model, with the novel environments of some structures.

    A model that is spanned by environments has it. Of others it is that of the representatives that
    measure novelty, given the labelled structures.
    """
    fitted = model.fitted
    X, pp = fitted.representatives.astype(np.float64), fitted.pp_variance
    columns = np.arange(len(X))
    if pp is not None:
        s2, L = pp.variance, pp.whitening.astype(np.float64)
        P = pp.posterior.astype(np.float64) / np.sqrt(pp.variance * pp.noise_variance)
    else:
        s2 = fitted.record.target_std**2
        whitening = whiten(_kernel(fitted, X, X), rtol=_RTOL)
        columns, L = whitening.pivots, whitening.factor
        X = X[columns]
        P = _precision(model, labelled, X, L, s2)
    novel = [x[0] for x in structures.novel if x.shape[1]]
    none = np.empty((0, 0))
    without = Posterior(model, X, columns, L, P, s2, np.empty((len(X), 0)), none)
    if not novel:
        return without
    environments = np.concatenate(novel)
    if len(environments) > _N_FROM:
        some = np.random.default_rng(0).permutation(len(environments))[:_N_FROM]
        environments = environments[np.sort(some)]
    environments = np.concatenate([X, environments])
    n = min(len(environments), len(X) + _N_NOVEL)
    further = environments[farthest_points(environments, n, n_first=len(X)).indices[len(X) :]]
    K_Mk = _kernel(fitted, X, further)
    half = cholesky_whiten(L, K_Mk)
    K = _kernel(fitted, further, further)
    largest = float(np.diag(K).max())
    K -= half.T @ half
    # Some may be described by the representatives, up to rounding.
    beyond = np.flatnonzero(np.diag(K) > _RTOL_NOVEL * largest)
    if not len(beyond):
        return without
    left = whiten(K[np.ix_(beyond, beyond)], rtol=_RTOL_NOVEL, scale=largest)
    taken = beyond[left.pivots]
    of_novel = scipy.linalg.solve_triangular(L, half, lower=True, trans="T")[:, taken]
    X = np.concatenate([X, further[taken]])
    return Posterior(model, X, columns, L, P, s2, of_novel, left.factor)


def _kernel(fitted: Fitted, X: Float64Array, others: Float64Array) -> Float64Array:
    return np.asarray(fitted.representation.kernel(X, others) * fitted.kernel_scale)


def _precision(
    model: AtomisticModel, labelled: Sequence[Atoms], X: Float64Array, L: Float64Array, s2: float
) -> Float64Array:
    """Return the factor P of the precision, given labelled structures: (M, M)."""
    fitted = model.fitted
    if len(labelled) < fitted.record.n_structures:
        raise InputError(
            f"`labelled` has {counted(len(labelled), 'structure')}, and the model was trained on "
            f"{fitted.record.n_structures}. It does not store its posterior, which is computed "
            "from the structures that it was trained on: give all of them.",
            parameter="labelled",
        )
    A = np.diag(np.full(len(X), 1 / s2))
    noise = fitted.record.quantities[TARGET].noise
    basis = Basis(fitted.representation.kernel, X, fitted.kernel_scale, per_atom=False)
    for batch, frames in read_features(fitted, labelled):
        rows = [basis.rows(batch.features, batch.offsets) / noise]
        for atoms in frames:
            K, sigma = derivative_rows(fitted, atoms, X)
            rows.append(K / sigma[:, None])
        V = cholesky_whiten(L, np.concatenate(rows).T)
        A += V @ V.T
    return cholesky(np.asfortranarray(A))


# --- structures, in a stream ---


def read_features(
    fitted: Fitted, frames: Sequence[Atoms]
) -> Iterator[tuple[Batch, Sequence[Atoms]]]:
    """Yield features of structures that can be predicted, and these."""
    pairs, first = ((atoms, np.arange(len(atoms))) for atoms in frames), 0
    for batch in stream_features(fitted.representation, pairs):
        yield batch, frames[first : first + len(batch.sizes)]
        first += len(batch.sizes)


def displaced(atoms: Atoms) -> tuple[Atoms, float]:
    """Return a structure whose atoms are displaced at random, and how far, |v| in Å.

    The displacement depends on the structure alone.
    """
    rng = np.random.default_rng(list(fingerprints([atoms])[0]))
    v = _STEP * rng.standard_normal((len(atoms), 3))
    moved = Atoms(atoms.numbers, atoms.positions + v, cell=atoms.cell, pbc=atoms.pbc)
    moved.info = atoms.info  # charge and spin
    return moved, float(np.linalg.norm(v))


def read_rows(
    model: AtomisticModel, structures: Iterable[tuple[int, Atoms]], *, forces: bool
) -> Rows | None:
    """Return rows, variances and novelty of structures, read one by one; None if there are none.

    Parameters
    ----------
    model : AtomisticModel
    structures : iterable of (int, Atoms)
        With their numbers, in messages.
    forces : bool
        Whether rows are those of a force, rather than of the energy per atom.
    """
    fitted, sides = model.fitted, 1 + forces
    lengths: list[float] = []
    numbers: list[IntArray] = []

    def images() -> Iterator[tuple[int, Atoms]]:
        for i, atoms in structures:
            yield i, atoms
            if forces:
                moved, length = displaced(atoms)
                lengths.append(length)
                numbers.append(atoms.numbers)
                yield i, moved

    ids, frames = tee(images())
    request, columns = Request(rows=True, learned=True), []
    novel: list[list[FloatArray]] = []
    base: FloatArray = np.empty((0, 0))
    means, last = [], 0
    first = next(frames, None)
    if first is None:
        return None
    frames = chain([first], frames)
    for batch in model.stream((a for _, a in frames), request, numbers=(i for i, _ in ids)):
        extensive = model.settings.kind == "extensive"
        sizes = np.array([len(atoms) for atoms in batch.parts.frames], dtype=np.float64)
        per_atom = sizes if extensive else np.ones(len(sizes))
        members = batch.energy.uncalibrated.members / per_atom[:, None]
        std = batch.energy.std / per_atom
        columns.append((batch.parts.rows, members, std, batch.novelty, sizes))
        assert batch.parts.features is not None
        for x, is_novel in zip(batch.parts.features, _are_novel(fitted, batch.parts), strict=True):
            if not novel or len(novel[-1]) == sides:
                means.append(x.mean(axis=0).astype(np.float32))
                novel.append([])
                last = len(x) if is_novel else 0
            base = x[:last] - base if novel[-1] else x[:last]
            novel[-1].append(base.astype(np.float32))
    K, members, std, novelty, sizes = (np.concatenate(c) for c in zip(*columns, strict=True))
    stacked = [np.stack(each) for each in novel]
    if not forces:
        factors = 1 / sizes[:, None]
        return Rows(K, std**2, novelty, np.stack(means), stacked, factors)
    per_length = sizes[::2] / np.array(lengths)
    K, D = ((v[1::2] - v[::2]) * per_length[:, None] for v in (K, members))
    of_target: Any = None
    if fitted.calibration_of("forces") is None:
        of_target = member_factors(fitted.calibration, std[::2], members[::2])
    sigma = fitted.calibrated("forces", D, factors=of_target).std * _element_factors(
        fitted, numbers
    )
    factors = np.stack([-per_length, per_length], axis=1) / sizes[::2, None]
    return Rows(K, sigma**2, novelty[::2], np.stack(means), stacked, factors)


def _element_factors(fitted: Fitted, numbers: Sequence[IntArray]) -> Float64Array:
    """Return the root mean square over atoms of the factors of elements of forces: (N,)."""
    of, symbols = fitted.calibrations.get("forces"), np.array(chemical_symbols)
    factors = [None if of is None else of.factors(symbols[each]) for each in numbers]
    return np.array([1.0 if f is None else np.sqrt(np.mean(f**2)) for f in factors])
