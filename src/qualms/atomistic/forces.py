"""Forces and stresses: derivatives of kernels, for training, and of the energies of all members.

The kernel of an environment with a representative X is a sum of terms k = c f(x·X), each with
features x of its own (see `qualms.features.base`): the scales of SOAP with f(t) = t^ζ, for
instance. A change of positions changes y, of which x is the normalised vector, and with it

    Δk = c f′(x·X) (Δy·X − (Δy·x) x·X) / |y|    for normalised features,
    Δk = c f′(x·X) Δy·X / d                     for features divided by a constant d.

**Kernel rows** of forces and virials, for training, have a column for each of M representatives: Δy
of every environment and neighbour is multiplied with all X (forward). **Predictions** have a column
for each of R members, far fewer: the slopes b = ∂e/∂x = Σ_m w_m c f′(x·X_m) X_m of e = Σ_m w_m k_m
are taken back to positions by the features (backward). If f is the square, the energy is a
quadratic form in x, which takes less time if it has fewer elements than the representatives.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.labels import ForceLabels
from qualms.errors import InputError, QualmsWarning
from qualms.features.base import (
    Changes,
    DifferentiableFeatures,
    Representation,
    Tape,
    offsets_of,
)
from qualms.features.soap import REMEDY
from qualms.gp.kernels import (
    PowerKernel,
    ProductKernel,
    pack,
    pack_symmetric,
    product_terms,
    unpack,
)
from qualms.resources import limited

#: Derivatives by the positions of atoms, and perhaps by strain.
_GRADIENTS = ("positions", "strain")


# --- the kernel with representatives, and the energy of members ---


@dataclass(frozen=True, eq=False)
class KernelTerm:
    """A term of the kernel with representatives (M, q), and the energy of R members.

    Its weight in the kernel is the `share`. The energy has weights (M, R) of the representatives;
    or, if the kernel is the square, symmetric matrices F, `forms` (R, q, q), with e = xᵀFx, which
    takes a time that does not depend on M. Kernel rows have no members.
    """

    features: DifferentiableFeatures
    function: ProductKernel
    share: float
    representatives: Float64Array
    weights: Float64Array
    forms: Float64Array | None = None

    @property
    def n_members(self) -> int:
        """R."""
        return self.weights.shape[1] if self.forms is None else len(self.forms)

    def following(self) -> KernelTerm:
        """Return the same term for structures that change little from one to the next."""
        return replace(self, features=self.features.following())

    @cached_property
    def mean(self) -> KernelTerm:
        """The mean over the members, which is the prediction."""
        return self.combined(np.full((self.n_members, 1), 1 / self.n_members))

    def combined(self, coefficients: Float64Array) -> KernelTerm:
        """Return the energies of combinations (R, S) of the members."""
        if self.forms is None:
            return replace(self, weights=self.weights @ coefficients)
        return replace(self, forms=np.tensordot(coefficients.T, self.forms, 1))

    def kernel(self, x: Float64Array, others: Float64Array) -> Float64Array:
        """Return the part of this term in the kernel, for products x·X of any shape."""
        products = np.einsum("iq,iq->i", x, x) if others is x else x @ others.T
        return self.share * self.function.value_and_slope(products)[0]

    @property
    def is_square(self) -> bool:
        """Whether the energy is a quadratic form of the features."""
        return _exponent(self.function) == 2

    @property
    def packed_size(self) -> int:
        """Number of elements of a symmetric matrix of the features: q(q + 1)/2."""
        q = int(self.representatives.shape[1])
        return q * (q + 1) // 2

    def collapsed(self) -> KernelTerm:
        """Return the term with its energy as quadratic forms, if that takes less time."""
        X, weights = self.representatives, self.share * self.weights
        (M, q), R = X.shape, self.n_members
        if not self.is_square or q > M or 8.0 * R * q**2 > 256e6:  # bytes
            return self
        return replace(self, forms=np.stack([X.T @ (w[:, None] * X) for w in weights.T]))

    def energy_slopes(self, tape: Tape) -> tuple[Float64Array, Float64Array, IntArray]:
        """Return e (n, R), ∂e/∂y (n, R, k) and the k columns of y."""
        x, columns = tape.x, tape.columns
        if self.forms is not None:
            columns, (R, q, _) = np.arange(x.shape[1]), self.forms.shape
            slopes = (x @ self.forms.reshape(R * q, q).T).reshape(len(x), R, q)
            energies = (slopes @ x[:, :, None])[:, :, 0]
            slopes *= 2
        else:
            x = x[:, columns]
            energies, slopes = self._by_representatives(x, columns)
        if tape.feature_scale is None:  # ∂e/∂y = (b − (x·b) x)/|y|
            slopes = slopes - (slopes @ x[:, :, None]) * x[:, None, :]
        slopes /= tape.lengths[:, :, None]
        return energies, slopes, columns

    def energies(self, x: Float64Array) -> Float64Array:
        """Return e (n, R)."""
        if self.forms is None:
            return self.kernel(x, self.representatives) @ self.weights
        R, q, _ = self.forms.shape
        return np.asarray(
            np.einsum("iq,irq->ir", x, (x @ self.forms.reshape(R * q, q).T).reshape(-1, R, q))
        )

    def total_energies(self, x: Float64Array, owners: IntArray) -> Float64Array:
        """Return sums of e over environments with the same owner, which are consecutive: (s, R).

        With quadratic forms they are tr F Σ xxᵀ.
        """
        if self.forms is None:
            kernel = self.kernel(x, self.representatives)
            return sums_of_runs(kernel, owners) @ self.weights
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        squares = np.stack([part.T @ part for part in np.split(x, first[1:])])
        return np.asarray(pack(squares) @ self._packed_forms.T)

    @cached_property
    def _packed_forms(self) -> Float64Array:
        """Upper triangles of F: half as much memory to read, (R, p)."""
        assert self.forms is not None
        return pack(self.forms)

    def _by_representatives(
        self, x: Float64Array, columns: IntArray
    ) -> tuple[Float64Array, Float64Array]:
        """Return e (n, R) and b (n, R, c), by their definition."""
        (n, c), R = x.shape, self.weights.shape[1]
        X, weights = self.representatives[:, columns], self.share * self.weights
        if _exponent(self.function) == 1:  # b is the same everywhere
            b = weights.T @ X
            return x @ b.T, np.repeat(b[None], n, axis=0)
        k, powers = self.function.value_and_slope(x @ X.T)
        slopes = np.empty((n, R, c))
        for start in range(0, n, 8):  # w f′(x·X) of some environments, few enough for a cache
            terms = powers[start : start + 8, None, :] * weights.T
            into = slopes[start : start + 8].reshape(len(terms) * R, c)
            np.matmul(terms.reshape(len(into), -1), X, out=into)
        return k @ weights, slopes


def sums_of_runs(values: Float64Array, owners: IntArray) -> Float64Array:
    """Return sums of values (n, k) with the same owner, which are consecutive: (s, k)."""
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    return np.asarray(np.add.reduceat(values, first, axis=0))


def _exponent(function: ProductKernel) -> float | None:
    """Return ζ of a kernel (x·X)^ζ; None of all others."""
    if isinstance(function, PowerKernel) and not function.offset:
        return function.exponent
    return None


#: The energy of environments by all members of a model, or by some combination of them.
Potential: TypeAlias = Sequence[KernelTerm]


def kernel_terms(representation: Representation, representatives: FloatArray) -> list[KernelTerm]:
    """Return the terms of the kernel with representatives (M, d)."""
    X, none = representatives.astype(np.float64), np.empty((len(representatives), 0))
    terms = zip(representation.differentiable, product_terms(representation.kernel), strict=True)
    return [
        KernelTerm(features, function, share, X[:, columns], none)
        for features, (function, share, columns) in terms
    ]


def make_potential(fitted: Fitted, weights: Float64Array) -> Potential:
    """Return the energy by R members of a trained model, or combinations of them: (M, R).

    The square of the kernel of few features is collapsed to quadratic forms.
    """
    weights = weights * fitted.kernel_scale
    terms = kernel_terms(fitted.representation, fitted.representatives)
    if fitted.has_label_basis:
        sizes = [term.packed_size for term in terms]
        parts = np.split(weights, np.cumsum(sizes)[:-1])
        return [
            replace(term, forms=unpack(math.sqrt(term.share) * part.T))
            for term, part in zip(terms, parts, strict=True)
        ]
    terms = [replace(term, weights=weights) for term in terms]
    return [term.collapsed() for term in terms]


class Derivatives(NamedTuple):
    """Energies of R members or representatives, without baseline, and their derivatives."""

    energies: Float64Array  #: (n_structures, R)
    forces: Float64Array  #: (n_atoms, 3, R), or of S combinations of members
    #: (n_structures, 6, R): ∂E/∂ε in the order of `qualms.features.base.VOIGT`
    virials: Float64Array | None
    atoms: Float64Array | None = None  #: (n_atoms, R): energy of each environment
    features: Float64Array | None = None  #: (n_atoms, d): those of all terms of the kernel


def _no_derivatives(n_structures: int, n_atoms: int, R: int, strain: bool) -> Derivatives:
    virials = np.zeros((n_structures, 6, R)) if strain else None
    return Derivatives(np.zeros((n_structures, R)), np.zeros((n_atoms, 3, R)), virials)


# --- predictions: derivatives of the energies of members, backward ---

#: The MPI communicator of processes that share batches of environments.
_PROCESSES: ContextVar[Any] = ContextVar("_PROCESSES", default=None)


@contextmanager
def shared_by(processes: Any) -> Iterator[None]:
    """Let processes, all of which predict the same structures, share the environments of these.

    Parameters
    ----------
    processes : mpi4py.MPI.Comm or None
        None if there is one process.
    """
    token = _PROCESSES.set(processes)
    try:
        yield
    finally:
        _PROCESSES.reset(token)


def derivatives(
    potential: Potential,
    frames: Sequence[Atoms],
    *,
    forces: bool = True,
    strain: bool = False,
    atoms: bool = False,
    features: bool = False,
    of: Potential | None = None,
    threads: int = 1,
) -> Derivatives:
    """Return energies and derivatives of structures, batch by batch of environments.

    Parameters
    ----------
    potential : Potential
    frames : sequence of Atoms
    forces, strain : bool
        Whether forces, and virials, are computed; forces are zero otherwise.
    atoms, features : bool
        Whether energies and features of environments are returned.
    of : Potential, optional
        The combinations of members whose derivatives are computed; those of all by default.
    threads : int
        Cores to use, for features that allow it.
    """
    R, S, n_atoms = potential[0].n_members, (of or potential)[0].n_members, sum(map(len, frames))
    total = _no_derivatives(len(frames), n_atoms, S, strain)
    total = total._replace(energies=np.zeros((len(frames), R)))
    of_atoms, x_of_terms = np.zeros((n_atoms, R)), []
    processes = _PROCESSES.get()
    for term, combined in zip(potential, of or potential, strict=True):
        x_of_terms.append(np.zeros((n_atoms * features, term.representatives.shape[1])))
        tapes = term.features.tapes(frames, _GRADIENTS[: int(forces) + int(strain)])
        if processes is not None:
            tapes = islice(tapes, processes.rank, None, processes.size)
        evaluate = partial(_evaluate, term, combined if forces else None, atoms=atoms)
        n_threads = threads if term.features.concurrent else 1
        for tape, found in _in_threads(evaluate, tapes, n_threads):
            # An atom, or structure, may come in several batches, but only once in each.
            total.energies[tape.structures] += found.energies
            if forces:
                total.forces[tape.atoms] += found.forces
            if total.virials is not None and found.virials is not None:
                total.virials[tape.structures] += found.virials
            centers = tape.atoms[tape.centers]
            if found.atoms is not None:
                of_atoms[centers] += found.atoms
            if features:
                x_of_terms[-1][centers] = tape.x
    if processes is not None:
        for sums in (total.energies, total.forces, total.virials, of_atoms, *x_of_terms):
            if sums is not None:
                processes.Allreduce(sums.copy(), sums)
    if features:
        total = total._replace(features=np.concatenate(x_of_terms, axis=1))
    return total._replace(atoms=of_atoms) if atoms else total


def _evaluate(
    term: KernelTerm, combined: KernelTerm | None, tape: Tape, *, atoms: bool
) -> Derivatives:
    """Return energies of a batch by all members, and derivatives by combinations of these."""
    forces, energies, strain = np.empty((0, 3, 0)), None, None
    if combined is not None:
        of_combined, slopes, columns = combined.energy_slopes(tape)
        by_positions, strain = tape.pull_back(slopes, columns)
        forces, energies = -by_positions, of_combined if combined is term else None
    if atoms and energies is None:
        energies = term.energies(tape.x)
    if energies is None:
        sums = term.total_energies(tape.x, tape.owners)
    else:
        sums = sums_of_runs(energies, tape.owners)
    return Derivatives(sums, forces, strain, energies if atoms else None)


def _in_threads(
    evaluate: Callable[[Tape], Derivatives], tapes: Iterable[Tape], threads: int
) -> Iterator[tuple[Tape, Derivatives]]:
    """Yield batches and what is computed for them, in order, on several cores.

    Products of matrices have one thread each, so that the number of threads does not change them.
    """
    if threads == 1:
        for tape in tapes:
            yield tape, evaluate(tape)
        return
    with limited(1), ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[Tape, Future[Derivatives]]] = deque()
        for tape in tapes:
            waiting.append((tape, pool.submit(evaluate, tape)))
            if len(waiting) > 2 * threads:
                first, found = waiting.popleft()
                yield first, found.result()
        for first, found in waiting:
            yield first, found.result()


# --- training: kernel rows of forces and virials, forward ---


def fill_rows(
    energies: Float64Array,
    others: Float64Array,
    frames: Sequence[Atoms],
    labels: ForceLabels,
    terms: Sequence[KernelTerm],
) -> None:
    """Fill in the kernel rows of a training set.

    Parameters
    ----------
    energies : (n_structures, M) array
        Is filled with averages over environments.
    others : (n_rows, M) array
        Rows of forces, and of virials per atom, that have labels are added to it.
    frames : sequence of Atoms
    labels : ForceLabels
    terms : sequence of KernelTerm
    """
    strain = labels.n_with_virial > 0
    sizes = np.array([len(atoms) for atoms in frames])
    has_label = np.concatenate(labels.known)
    # Of all components; -1 without a label.
    rows = np.where(has_label, np.cumsum(has_label) - 1, -1)
    of_virial = np.repeat(np.cumsum(3 * sizes + 6), 6).reshape(-1, 6) + np.arange(-6, 0)
    of_forces = np.delete(rows, of_virial.ravel()).reshape(-1, 3)
    of_virials, moving = rows[of_virial], np.any(of_forces >= 0, axis=1)
    energies[:] = 0.0
    for term in terms:
        for tape in term.features.tapes(frames, _GRADIENTS[: 1 + strain], moving):
            kernel = derivative_rows(term, tape, strain=strain)
            energies[tape.structures] += kernel.energies / sizes[tape.structures, None]
            _add_rows(others, of_forces[tape.atoms], kernel.forces)
            if kernel.virials is not None:
                virials = kernel.virials / sizes[tape.structures, None, None]
                _add_rows(others, of_virials[tape.structures], virials)


def _add_rows(others: Float64Array, places: IntArray, values: Float64Array) -> None:
    """Add values (n, c, M) to rows of `others` at some places (n, c), each once or -1."""
    has_row = places >= 0
    others[places[has_row]] += values[has_row]


def derivative_rows(term: KernelTerm, tape: Tape, *, strain: bool = False) -> Derivatives:
    """Return the kernel rows of a batch for one term of the kernel.

    Parameters
    ----------
    term : KernelTerm
    tape : Tape
    strain : bool
        Whether there are rows of virials.
    """
    n, M = len(tape.x), len(term.representatives)
    n_structures = len(tape.structures)
    rows = _no_derivatives(n_structures, len(tape.atoms), M, strain)
    products = tape.x @ term.representatives.T
    k, slopes = term.function.value_and_slope(products)
    sums = csr_array((np.ones(n), (tape.owners, np.arange(n))), shape=(n_structures, n))
    rows.energies[:] = np.asarray(sums @ (term.share * k))
    slopes *= term.share / tape.lengths
    # x·X times the slope; features that are not normalised have no second term.
    products *= slopes if tape.feature_scale is None else 0.0
    for changes in tape.push_forward():
        _add_forces(rows.forces, term, tape, changes, slopes, products)
    if rows.virials is not None:
        by_strain = tape.push_strain()
        along = np.einsum("ivf,if->iv", by_strain, tape.x)
        for v in range(6):
            terms = (by_strain[:, v] @ term.representatives.T) * slopes
            terms -= along[:, v, None] * products
            rows.virials[:, v] += np.asarray(sums @ terms)
    return rows


def _add_forces(
    forces: Float64Array,
    term: KernelTerm,
    tape: Tape,
    changes: Changes,
    slopes: Float64Array,
    second: Float64Array,
) -> None:
    """Add −Σ_i Δk_i of some changes to the rows of forces (n_atoms, 3, M).

    An atom that is pushed pulls the centre of the environment, unless changes are complete.
    """
    owners, atoms, columns, values, complete = changes
    p, x = len(owners), tape.x[:, columns]
    along = np.einsum("pcf,pf->pc", values, x[owners])
    terms = values.reshape(3 * p, -1) @ term.representatives[:, columns].T
    terms.reshape(p, 3, -1)[:] *= slopes[owners, None, :]
    flat, axes = forces.reshape(3 * len(forces), -1), np.arange(3)
    on_atoms = (3 * atoms[:, None] + axes).ravel()
    on_centers = (3 * tape.centers[owners][:, None] + axes).ravel()
    sides = 1 if complete else 2
    rows = np.concatenate([on_atoms, on_centers][:sides])
    signs = np.repeat([-1.0, 1.0][:sides], 3 * p)
    entries, shape = np.tile(np.arange(3 * p), sides), (len(flat), 3 * p)
    flat += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ terms)
    signs *= np.tile(-along.ravel(), sides)
    entries, shape = np.tile(np.repeat(owners, 3), sides), (len(flat), len(x))
    flat += np.asarray(csr_array((signs, (rows, entries)), shape=shape) @ second)


# --- training: labels as packed matrices, for kernels that are squares ---


def packed_labels(terms: Sequence[KernelTerm], atoms: Atoms, known: BoolArray) -> Float64Array:
    """Return the labels of a structure as linear functions of packed squares: (1 + k, p).

    With k(x, x′) = (x·x′)² the energy is linear in the matrices xxᵀ of the environments, and its
    derivatives in Δx xᵀ + x Δxᵀ, so that kernels between labels are inner products of these.

    Parameters
    ----------
    terms : sequence of KernelTerm
        Of a kernel that is a square; p is the sum of their packed sizes.
    atoms : Atoms
    known : (3n + 6,) array of bool
        Which of the forces and components of the virial have a label: k of them.

    Returns
    -------
    rows : (1 + k, p) array
        Average over environments, forces, and virials per atom.
    """
    edges = offsets_of([term.packed_size for term in terms])
    rows = np.empty((1 + int(known.sum()), edges[-1]))
    for term, a, b in zip(terms, edges[:-1], edges[1:], strict=True):
        _pack_labels(rows[:, a:b], term, atoms, known[:-6].reshape(-1, 3), known[-6:])
    return rows


def _pack_labels(
    rows: Float64Array, term: KernelTerm, atoms: Atoms, of_forces: BoolArray, of_virial: BoolArray
) -> None:
    """Fill in the packed labels of a structure, for the features of one term: (1 + k, p)."""
    n, strain, moving = len(atoms), bool(of_virial.any()), np.asarray(of_forces.any(axis=1))
    q, first = term.representatives.shape[1], 0
    environments, owners, movers = [], [], []
    changes, virials = [np.empty((0, 3, q))], np.zeros((6, q, q))
    for tape in term.features.tapes([atoms], _GRADIENTS[: 1 + strain], moving):
        m = len(tape.x)
        for change in tape.push_forward():
            p = len(change.owners)
            d = np.zeros((p, 3, q))
            d[:, :, change.columns] = change.values
            changes.append(_of_x(tape, d, change.owners))
            owners.append(first + change.owners)
            movers.append(tape.atoms[change.atoms])
            if not change.complete:  # an atom that is pushed pulls the centre of the environment
                sums = csr_array((-np.ones(p), (change.owners, np.arange(p))), shape=(m, p))
                of_centers = np.asarray(sums @ changes[-1].reshape(p, -1))
                changes.append(of_centers.reshape(m, 3, q))
                owners.append(first + np.arange(m))
                movers.append(tape.atoms[tape.centers])
        if strain:
            d = _of_x(tape, tape.push_strain(), np.arange(m))
            virials += np.tensordot(d, tape.x, axes=(0, 0))
        environments.append(tape.x)
        first += m
    x, d, none = np.concatenate(environments), np.concatenate(changes), [np.empty(0, dtype=np.intp)]
    owner, mover = np.concatenate(none + owners), np.concatenate(none + movers)
    order = np.argsort(mover, kind="stable")
    edges = np.searchsorted(mover[order], np.arange(n + 1))
    factor, first = math.sqrt(term.share), 1
    rows[0] = pack(x.T @ x) * (factor / n)
    x = -factor * x
    for j in np.flatnonzero(moving):
        some = order[edges[j] : edges[j + 1]]
        moved = d[some] if of_forces[j].all() else d[some][:, of_forces[j]]
        A = moved.reshape(len(some), -1).T @ x[owner[some]]
        k = moved.shape[1]
        rows[first : first + k] = pack_symmetric(A.reshape(k, q, q))
        first += k
    rows[first:] = pack_symmetric(virials[of_virial]) * (factor / n)


def _of_x(tape: Tape, changes: Float64Array, owners: IntArray) -> Float64Array:
    """Return changes of x, given those of y (p, c, q) of some environments (p,)."""
    d = changes / tape.lengths[owners][:, :, None]
    if tape.feature_scale is None:  # (Δy − (Δy·x) x)/|y|
        x = tape.x[owners]
        d -= np.einsum("pcq,pq->pc", d, x)[:, :, None] * x[:, None]
    return d


# --- which models and structures have forces ---


def check_model(fitted: Fitted) -> None:
    """Reject a model without forces; warn if its forces are not continuous."""
    if fitted.settings.kind != "extensive":
        raise InputError(
            f"The model predicts {fitted.settings.target}, which is {fitted.settings.kind}. Forces "
            "are derivatives of an energy, which is extensive.",
            parameter="kind",
        )
    fitted.representation.check_derivatives()
    if not fitted.settings.has_forces:
        warnings.warn(
            "The cutoff of the model is not smooth: its energy jumps when an atom crosses the "
            f"cutoff, and simulations with its forces do not conserve the energy. {REMEDY}",
            QualmsWarning,
            stacklevel=2,
        )
