"""Interface of features that have derivatives: all that forces need to know of them.

A kernel is a sum of terms, each with features of its own: the scales of SOAP, or the output of a
network. For a batch of environments a term has raw features y, and its kernel sees x = y/|y|, or
y/c for features that are not normalised. `qualms.atomistic.forces` takes derivatives of energies by
x back to the positions of atoms, for all members at once, and the other way round takes changes of
y with every position to the kernel with all representatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray

#: Where ASE's six components of a strain or stress are in the matrix: xx, yy, zz, yz, xz, xy.
VOIGT = ([0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1])


class Pulled(NamedTuple):
    """Derivatives of R energies of a batch, each summed over its environments."""

    positions: Float64Array  #: (n_atoms, 3, R): ∂e/∂r, in the order of `Tape.atoms`
    strain: Float64Array | None  #: (n_structures, 6, R): ∂e/∂ε, in the order of `Tape.structures`


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


class Tape(Protocol):
    """Features of a batch of n environments, and how they depend on the positions of atoms."""

    @property
    def x(self) -> Float64Array:
        """Features of the kernel: (n, q)."""
        ...

    @property
    def lengths(self) -> Float64Array:
        """Divisors of y: (n, 1)."""
        ...

    @property
    def normalized(self) -> bool:
        """Whether `lengths` are |y|, and not constants."""
        ...

    @property
    def columns(self) -> IntArray:
        """Features that are not zero in all environments, in ascending order."""
        ...

    @property
    def owners(self) -> IntArray:
        """Structure of each environment, a place in `structures`: (n,)."""
        ...

    @property
    def centers(self) -> IntArray:
        """Atom at the centre of each environment, a place in `atoms`: (n,)."""
        ...

    @property
    def structures(self) -> IntArray:
        """Structures of the batch, each once, as they are counted in the call of `tapes`."""
        ...

    @property
    def atoms(self) -> IntArray:
        """Atoms of the batch and those around them, each once, counted through all structures."""
        ...

    def pull_back(self, slopes: Float64Array, columns: IntArray) -> Pulled:
        """Return derivatives by positions, and by strain if it was requested.

        Slopes ∂e/∂x (n, R, k) are those of some columns: of all, or of `columns`. They may be
        overwritten.
        """
        ...

    def push_forward(self) -> Iterator[Changes]:
        """Yield the changes of y with all positions."""
        ...

    def push_strain(self) -> Float64Array:
        """Return ∂y/∂ε (n, 6, q) in the order of `VOIGT`, for r → (1 + ε) r, the cell included."""
        ...


class DifferentiableFeatures(Protocol):
    """Features of one term of the kernel."""

    def tapes(
        self,
        frames: Sequence[Atoms],
        gradients: Sequence[str] = (),
        moving: BoolArray | None = None,
    ) -> Iterator[Tape]:
        """Yield all environments in batches; those of a structure may come in several of them.

        Gradients are those that will be needed: none, "positions", or "positions" and "strain".
        Without any, a tape has features alone. Changes with the positions of atoms that are not
        `moving` (n_atoms,), counted through all structures, may be left out.
        """
        ...

    def representatives(self, X: Float64Array) -> Float64Array:
        """Return the features x (M, q) of representatives, as stored (M, d)."""
        ...
