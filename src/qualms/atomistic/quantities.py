"""The quantities that a model learns: a target, and derivatives of it.

A row of the linear problem is a label of the target, or a component of a derivative. Numbers
and words that differ between quantities are in this table; how labels are read and how kernel rows
are computed is in `labels`, `census` and `forces`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ase.units
import numpy as np

from qualms.arrays import Float64Array, IntArray


@dataclass(frozen=True)
class QuantityKind:
    """What a quantity is."""

    name: str
    per: str  #: its units are those of the target per this
    noise: str  #: parameter of its noise variance
    n_components: int = 1
    of_atoms: bool = False  #: whether it belongs to atoms, if the target belongs to structures
    noise_per: str = ""  #: the units of its noise are per this, if per something else
    #: out-of-bag structures from which it has a calibration of its own: errors within a structure
    #: are correlated. The factor of energies is as good for forces as one from fewer than ten
    #: structures; for stresses it is often too small by half.
    least: int = 2
    components: tuple[str, ...] = ()
    convention: str = ""  #: its definition, for messages
    #: how much larger than with eV and Å the numbers are in units that labels may be in by mistake
    other_units: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_derivative(self) -> bool:
        """Whether it is a derivative of the target."""
        return self.n_components > 1


#: The target, whatever it is, has the name "energy": forces and stresses are derivatives of one.
TARGET = "energy"
KINDS = {
    kind.name: kind
    for kind in (
        QuantityKind(TARGET, "atom", "noise"),
        QuantityKind(
            "forces",
            "Å",
            "forces_noise",
            n_components=3,
            of_atoms=True,
            least=10,
            components=("x", "y", "z"),
            convention="Forces are −∂E/∂r in the units of the energy per Å.",
            other_units={
                "kcal/mol/Å": ase.units.mol / ase.units.kcal,
                "kJ/mol/Å": ase.units.mol / ase.units.kJ,
                "meV/Å": 1e3,
                "Hartree/Bohr": ase.units.Bohr / ase.units.Hartree,
                "eV/Bohr": ase.units.Bohr,
            },
        ),
        # Rows are virials per atom, Vσ/n, in the units of the energy.
        QuantityKind(
            "stress",
            "Å³",
            "stress_noise",
            n_components=6,
            noise_per="atom",
            least=3,
            components=("xx", "yy", "zz", "yz", "xz", "xy"),
            convention="A stress is (1/V) ∂E/∂ε, positive under tension, in the units of the "
            "energy per Å³.",
            other_units={"GPa": 1 / ase.units.GPa, "kbar": 10 / ase.units.GPa},
        ),
    )
}
#: Derivatives of the target, in the order of their rows.
DERIVATIVES = tuple(name for name, kind in KINDS.items() if kind.is_derivative)


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
    species: IntArray | None = None  #: (n,): of the atom of a force or of an atomic property

    @property
    def n_structures(self) -> int:
        """Structures with a label."""
        return len(np.unique(self.structure))
