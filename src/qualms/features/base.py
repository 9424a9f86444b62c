"""Interfaces of representations: features of atoms, their derivatives, and the kernel between them.

A model sees structures through a `Representation` alone: SOAP (`qualms.features.soap`), or the
output of a pretrained network or of any object of yours (`qualms.features.learned`). It is made
from its hyper-parameters, `RepresentationSettings`, and from structures in training, or from a
model file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from ase import Atoms
from pydantic import BaseModel, ConfigDict, ValidationError

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.errors import InputError, did_you_mean
from qualms.execution import in_processes
from qualms.gp.kernels import Kernel
from qualms.io.tensors import Document, TensorSpec

Dtype: TypeAlias = np.dtype[np.floating[Any]]

#: Package of each pretrained network, as it is installed.
PACKAGES = {"sevennet": "sevenn", "mace": "mace-torch", "metatomic": "metatomic-torch"}


def offsets_of(sizes: Sequence[int] | IntArray) -> IntArray:
    """Return where each of consecutive parts begins, and the last one ends: (n + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


def ranges(offsets: IntArray, some: IntArray) -> IntArray:
    """Return the places of all elements of some of consecutive parts."""
    sizes = np.diff(offsets)[some]
    starts = np.repeat(offsets[some] - offsets_of(sizes)[:-1], sizes)
    return np.asarray(starts + np.arange(int(sizes.sum())))


# --- hyper-parameters ---


class Problem(NamedTuple):
    """Size of a training, on which the number of features may depend."""

    n_representatives: int
    derivatives: bool  #: whether the model has forces
    products: bool = False  #: whether all products of two features are computed


#: Returns some structures of a training set, and the atoms in them whose environments are used.
Sample: TypeAlias = Callable[[], tuple[Sequence[Atoms], Sequence[IntArray]]]


class RepresentationDocument(Document):
    """What a model file has of a representation, beside its hyper-parameters and tensors."""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the tensors that belong to it; "species" is the number of elements."""
        return {}


class RepresentationSettings(BaseModel, ABC):
    """Hyper-parameters of a representation and its kernel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: ClassVar[Dtype] = np.dtype(np.float32)  #: of features in training

    @property
    def overhead(self) -> float:
        """Bytes of libraries beside those that all models need."""
        return 0.0

    @property
    def is_square(self) -> bool:
        """Whether the kernel is the square of inner products, so that labels can span a model."""
        return False

    @property
    @abstractmethod
    def has_forces(self) -> bool:
        """Whether features have derivatives, and these are continuous."""

    @abstractmethod
    def with_forces(self) -> Self:
        """Return hyper-parameters whose features have continuous derivatives, or reject them."""

    def resolved(self, species: Sequence[int]) -> Self:
        """Return hyper-parameters for structures of these elements, or reject the elements."""
        return self

    def n_moving(self, sizes: IntArray, effort: str) -> int | None:
        """Return the atoms of structures, of some sizes, whose forces an effort allows to learn."""
        return None

    @abstractmethod
    def n_features(self, species: Sequence[int], problem: Problem) -> tuple[int, int]:
        """Return the numbers of features after and before compression."""

    @abstractmethod
    def fit(self, species: Sequence[int], problem: Problem, sample: Sample) -> Representation:
        """Return a representation, fitted to a sample of structures if it has anything to fit.

        Parameters
        ----------
        species : sequence of int
            Atomic numbers.
        problem : Problem
        sample : callable
            Returns the sample; is called only if something is fitted to it.
        """

    @abstractmethod
    def build(
        self,
        species: tuple[int, ...],
        document: RepresentationDocument,
        tensors: Mapping[str, FloatArray],
    ) -> Representation:
        """Return a representation from a file; a `ValueError` if its parts do not fit together.

        Parameters
        ----------
        species : tuple of int
            Atomic numbers.
        document : RepresentationDocument
        tensors : mapping of str to array
        """


Settings = TypeVar("Settings", bound=RepresentationSettings)


def validated(
    kind: type[Settings], document: Mapping[str, Any], names: Collection[str] = ()
) -> Settings:
    """Return the hyper-parameters of a dict; an `InputError` names the first that is wrong.

    Parameters
    ----------
    kind : type
        Class of the hyper-parameters.
    document : mapping of str to object
    names : collection of str
        Parameters that the error names without their place in the document.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        # Fields that may be of several kinds are followed by the name of a class.
        parts = [str(part) for part in first["loc"] if not str(part)[:1].isupper()]
        name = parts[-1] if parts and parts[-1] in names else ".".join(parts)
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        if first["type"] == "extra_forbidden":
            fields = [*kind.model_fields]
            reason = f"there is no such hyper-parameter{did_you_mean(name, fields)}"
        message = f"The representation has `{name}={first['input']!r}`; {reason}."
        if not name:
            message = f"The hyper-parameters of the representation do not fit together: {reason}."
        raise InputError(message, parameter=name or "representation") from None


# --- derivatives of features: all that forces need to know of them ---

# A kernel is a sum of terms, each with features of its own: the scales of SOAP, or the output of a
# network. For a batch of environments a term has raw features y, and its kernel sees x = y/|y|, or
# y/c for features that are not normalised. `qualms.atomistic.forces` takes derivatives of energies
# by x back to the positions of atoms, for all members at once, and the other way round takes
# changes of y with every position to the kernel with all representatives.

#: Where ASE's six components of a strain or stress are in the matrix: xx, yy, zz, yz, xz, xy.
VOIGT = ([0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1])


class Changes(NamedTuple):
    """Changes of y, p of them, each with the position of an atom that is not the centre.

    Features do not change if all atoms move, so that the centre has minus the sum of these changes;
    unless they are `complete` and changes with the position of the centre are among them.
    """

    owners: IntArray  #: (p,): the environment, counted through the batch
    atoms: IntArray  #: (p,): the atom that moves, a place in `Tape.atoms`
    columns: IntArray  #: (k,): features that may change, in ascending order
    values: Float64Array  #: (p, 3, k): ∂y/∂r in 1/Å
    complete: bool = False


@dataclass(frozen=True, eq=False)
class Tape(ABC):
    """Features of a batch of n environments, and how they depend on the positions of atoms.

    Attributes
    ----------
    structures : (n_structures,) array of int
        Structures of the batch, each once, as they are counted in the call of `tapes`.
    atoms : (n_atoms,) array of int
        Atoms of the batch and those around them, each once, counted through all structures.
    owners : (n,) array of int
        Structure of each environment, a place in `structures`.
    centers : (n,) array of int
        Atom at the centre of each environment, a place in `atoms`.
    feature_scale : float, optional
        y is divided by this; None if features are normalised.
    """

    structures: IntArray
    atoms: IntArray
    owners: IntArray
    centers: IntArray
    feature_scale: float | None

    @property
    @abstractmethod
    def y(self) -> Float64Array:
        """Raw features: (n, q)."""

    @property
    @abstractmethod
    def columns(self) -> IntArray:
        """Features that are not zero in all environments, in ascending order."""

    @cached_property
    def lengths(self) -> Float64Array:
        """Divisors of y: (n, 1)."""
        if self.feature_scale is not None:
            return np.full((len(self.y), 1), self.feature_scale)
        lengths: Float64Array = np.sqrt(np.einsum("ij,ij->i", self.y, self.y))[:, None]
        lengths[lengths == 0] = 1.0
        return lengths

    @cached_property
    def x(self) -> Float64Array:
        """Features of the kernel: (n, q)."""
        x: Float64Array = self.y / self.lengths
        return x

    @abstractmethod
    def pull_back(
        self, slopes: Float64Array, columns: IntArray
    ) -> tuple[Float64Array, Float64Array | None]:
        """Return derivatives of R energies, each summed over its environments.

        Parameters
        ----------
        slopes : (n, R, k) array
            ∂e/∂y.
        columns : (k,) array of int
            Features that these are of: all, or `columns`.

        Returns
        -------
        positions : (n_atoms, 3, R) array
            ∂e/∂r, in the order of `atoms`.
        strain : (n_structures, 6, R) array, optional
            ∂e/∂ε, in the order of `structures` and `VOIGT`, if it was requested.
        """

    @abstractmethod
    def push_forward(self) -> Iterator[Changes]:
        """Yield the changes of y with all positions."""

    @abstractmethod
    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, q) in the order of `VOIGT`, for r → (1 + ε) r, the cell included."""


class DifferentiableFeatures(Protocol):
    """Features of one term of the kernel."""

    #: whether batches can be computed by several threads
    concurrent: ClassVar[bool]

    def following(self) -> Self:
        """Return the same features for structures that change little from one to the next."""
        ...

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[Tape]:
        """Yield all environments in batches; those of a structure may come in several of them.

        Parameters
        ----------
        frames : sequence of Atoms
        gradients : sequence of str
            Those that will be needed: none, "positions", or "positions" and "strain". Without any,
            a tape has features alone.
        moving : (n_atoms,) array of bool, optional
            Atoms, counted through all structures, that move; changes with the positions of others
            may be left out.
        """
        ...


# --- representations ---

#: Environments of SOAP below which starting processes takes longer than computing their features.
SERIAL = 30_000


class PotentialValues(NamedTuple):
    """Energies and perhaps forces and stresses of n structures by a potential.

    Networks have them in eV, eV/Å and eV/Å³. Missing values are NaN.
    """

    energies: Float64Array  #: (n,)
    forces: list[Float64Array] | None = None  #: (n_atoms, 3) each
    stresses: Float64Array | None = None  #: (n, 6), in ASE's order and sign


@dataclass(frozen=True)
class Representation(ABC):
    """Features of atoms of some species (atomic numbers, increasing), and the kernel between them.

    `settings` are its hyper-parameters.
    """

    settings: RepresentationSettings
    species: tuple[int, ...]

    @property
    def serial(self) -> float:
        """Environments below which starting processes takes longer than computing features."""
        return SERIAL

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Number d of features of an environment."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The kernel between environments."""

    @abstractmethod
    def features(self, frames: Sequence[Atoms], centers: Sequence[IntArray]) -> FloatArray:
        """Return the features of the chosen atoms of each structure, in order: (n, d)."""

    @property
    def dtype(self) -> Dtype:
        """Type of features."""
        return self.settings.dtype

    @property
    def basis_dtype(self) -> Dtype:
        """Type of representatives in products with features."""
        return np.dtype(np.float64)

    def prepare(self) -> None:  # noqa: B027 — most have nothing to do
        """Raise an `InputError` if what features need is missing, or not that of the training."""

    def exact(self) -> Representation:
        """Return a copy with features in float64, for predictions."""
        return self

    @abstractmethod
    def describe(self) -> str:
        """Return hyper-parameters and sizes in a few words."""

    @property
    @abstractmethod
    def cutoff(self) -> float:
        """Distance in Å beyond which two atoms alone do not interact."""

    @property
    @abstractmethod
    def has_derivatives(self) -> bool:
        """Whether features have derivatives, continuous or not."""

    @abstractmethod
    def check_derivatives(self) -> None:
        """Raise an `InputError` if features have no derivatives."""

    @property
    @abstractmethod
    def differentiable(self) -> Sequence[DifferentiableFeatures]:
        """Features with derivatives, one for each term of the kernel."""

    @property
    @abstractmethod
    def stored(self) -> tuple[Any, dict[str, FloatArray]]:
        """What a model file has of it beside hyper-parameters: a document, and tensors."""


# --- features of many structures, in batches, on several cores ---

#: Environments in a batch: enough for matrix products, few enough to limit the memory.
BATCH = 4096


class Batch(NamedTuple):
    """Features (n_environments, d) of consecutive structures.

    `sizes` (n_structures,) are the environments of each; some may have none.
    """

    features: FloatArray
    sizes: IntArray

    @property
    def offsets(self) -> IntArray:
        """Environments of structure s are rows ``offsets[s]:offsets[s + 1]``."""
        return offsets_of(self.sizes)


#: Structures and their centres.
_Task = tuple[list[Atoms], list[IntArray]]


def stream_features(
    representation: Representation,
    structures: Iterable[tuple[Atoms, IntArray]],
    *,
    n_workers: int = 1,
    batch: int = BATCH,
) -> Iterator[Batch]:
    """Yield the features of structures, in order, in batches.

    Parameters
    ----------
    representation : Representation
    structures : iterable of (Atoms, (n,) array of int)
        Structures and the centers in them, perhaps from a generator that reads a file.
    n_workers : int
        Processes, which are used if there are at least `Representation.serial` environments.
    batch : int
        Environments in a batch, about.
    """
    tasks, compute = _tasks(structures, batch), partial(_compute, representation=representation)
    head: list[_Task] = []
    count = 0
    while n_workers > 1 and count < representation.serial and (task := next(tasks, None)):
        head.append(task)
        count += sum(map(len, task[1]))
    tasks = chain(head, tasks)
    if n_workers > 1 and count >= representation.serial:
        yield from in_processes(compute, tasks, n_workers)
    else:
        yield from map(compute, tasks)


def _tasks(structures: Iterable[tuple[Atoms, IntArray]], size: int) -> Iterator[_Task]:
    """Group structures to batches of about `size` environments."""
    frames: list[Atoms] = []
    centers: list[IntArray] = []
    count = 0
    for atoms, chosen in structures:
        # Without the arrays and calculators that processes do not need.
        frames.append(Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc))
        centers.append(chosen)
        count += len(chosen)
        if count >= size or len(frames) >= size:
            yield frames, centers
            frames, centers, count = [], [], 0
    if frames:
        yield frames, centers


def _compute(task: _Task, representation: Representation) -> Batch:
    frames, centers = task
    sizes = np.array([len(chosen) for chosen in centers], dtype=np.intp)
    return Batch(representation.features(frames, centers), sizes)
