"""Evaluation: reference values, their prediction, and the structures they belong to.

Models and other people's ensembles produce this type, and reports read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from ase.units import Hartree, kcal, kJ, mol

from qualms.arrays import BoolArray, Float64Array, IntArray, check_points
from qualms.errors import InputError, counted
from qualms.metrics import Scores
from qualms.prediction import Prediction

if TYPE_CHECKING:
    from ase import Atoms

#: Names of the components of a quantity; those of stresses in ASE's Voigt order.
COMPONENT_NAMES = {"forces": ("x", "y", "z"), "stress": ("xx", "yy", "zz", "yz", "xz", "xy")}

#: Units of energy in eV.
ENERGIES = {"eV": 1.0, "meV": 1e-3, "Hartree": Hartree, "kcal/mol": kcal / mol, "kJ/mol": kJ / mol}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions of one quantity with their reference values."""

    target: str  #: key of the property in the data
    y: Float64Array  #: (n,): reference values; by default per atom if the target is extensive
    prediction: Prediction  #: calibrated, in the units of `y`; it may have no members
    #: (n,): the structure of each value, as an index of `frames` or any other number. Errors within
    #: a structure are taken to be correlated
    structure: IntArray
    #: "forces", "stress", or "energy" for any other property of structures or atoms
    quantity: str = "energy"
    atom: IntArray | None = None  #: (n,): the atom of each value
    component: IntArray | None = None  #: (n,): the component of a vector or tensor
    component_names: Sequence[str] = ()
    units: str = ""
    factor: float | Float64Array = 1.0  #: or (n,): y is this times the value in the data
    frames: Sequence[Atoms] | None = None  #: None for tables
    #: scores of other estimators of the same values, by name, such as "linear (validation)"
    scores: Mapping[str, Scores] = field(default_factory=dict)
    #: description of the data that the "(validation)" calibrations were fitted to
    validation: str = ""
    n_unlabelled: int = 0  #: number of structures without reference values, which are left out
    n_unknown: int = 0  #: number of structures with unknown elements, which are left out
    #: (n,): whether the structure of each value is out of distribution, if that is known
    extrapolates: BoolArray | None = None

    def __post_init__(self) -> None:
        y = check_points("y", self.y)
        if y.ndim != 1:
            raise InputError("y", f"shape {y.shape}", "(n,)", "Flatten several outputs.")
        if self.prediction.shape != y.shape:
            raise InputError("prediction", f"shape {self.prediction.shape}", f"{y.shape}, as of y")
        object.__setattr__(self, "y", y)
        for name in ("structure", "atom", "component"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _indices(name, values, y.size))
        if self.frames is not None:
            self._check_frames(self.frames)

    def _check_frames(self, frames: Sequence[Atoms]) -> None:
        if np.any((self.structure < 0) | (self.structure >= len(frames))):
            given = f"{self.structure.min()} to {self.structure.max()}"
            raise InputError("structure", given, f"indices of {len(frames)} frames")
        if self.atom is not None:
            sizes = np.array([len(atoms) for atoms in frames])[self.structure]
            if np.any((self.atom < 0) | (self.atom >= sizes)):
                raise InputError("atom", "an index out of range", "atoms of their structures")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def residuals(self) -> Float64Array:
        """Reference values minus predictions: (n,)."""
        return np.asarray(self.y - self.prediction.mean)

    @property
    def n_structures(self) -> int:
        """Number of structures; values of one structure are not independent."""
        return int(np.unique(self.structure).size)

    def some(self, chosen: BoolArray | IntArray) -> Evaluation:
        """Return the chosen points; `scores`, which belong to all points, are dropped."""
        return replace(
            self,
            y=self.y[chosen],
            prediction=self.prediction[chosen],
            structure=self.structure[chosen],
            atom=None if self.atom is None else self.atom[chosen],
            component=None if self.component is None else self.component[chosen],
            factor=self.factor if np.ndim(self.factor) == 0 else np.asarray(self.factor)[chosen],
            extrapolates=None if self.extrapolates is None else self.extrapolates[chosen],
            scores={},
        )

    @property
    def n_extrapolating(self) -> int:
        """Number of structures that are out of distribution."""
        if self.extrapolates is None:
            return 0
        return int(np.unique(self.structure[self.extrapolates]).size)

    def remarks(self) -> list[str]:
        """Return sentences about points that are left out, and about extrapolation."""
        found = []
        if self.n_unlabelled:
            what = "structure" if self.atom is None else "atom"
            what = what if self.component is None else "component"
            found.append(f"{counted(self.n_unlabelled, what)} without a reference value: skipped.")
        if self.n_unknown:
            skipped = counted(self.n_unknown, "structure")
            found.append(f"{skipped} with elements that are not in the training set: skipped.")
        if self.extrapolates is not None and self.extrapolates.any():
            within = 100.0 * (np.abs(self.residuals) <= self.prediction.std)
            text = (
                f"{self.n_extrapolating} of {counted(self.n_structures, 'structure')} are out of "
                f"distribution: {within[self.extrapolates].mean():.0f} % of their reference values "
                "lie within one σ"
            )
            if not self.extrapolates.all():
                text += f", and {within[~self.extrapolates].mean():.0f} % of the others"
            found.append(f"{text}.")
        return found


def energy_factor(units: str, wanted: str | None) -> tuple[float, str]:
    """Return the factor from units such as eV or eV/Å to those with another energy, and these.

    >>> energy_factor("eV/atom", "meV")
    (1000.0, 'meV/atom')
    """
    if not wanted:
        return 1.0, units
    if wanted not in ENERGIES:
        raise InputError("--in", repr(wanted), f"one of {', '.join(ENERGIES)}")
    found = [name for name in ENERGIES if units == name or units.startswith(f"{name}/")]
    if not found:
        remedy = "Units of a model are given to `qualms train`, those of predictions by --units."
        raise InputError("--in", f"{wanted!r} for data in {units!r}", "units of energy", remedy)
    return ENERGIES[found[0]] / ENERGIES[wanted], wanted + units.removeprefix(found[0])


def per_atom_units(units: str) -> str:
    """Return the units of a value per atom."""
    return f"{units}/atom" if units else "per atom"


def _indices(name: str, values: IntArray, n: int) -> IntArray:
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        given = f"{array.dtype.name} of shape {array.shape}"
        raise InputError(name, given, f"an integer for each of {n} points")
    return array.astype(np.intp)
