"""Evaluation: reference values, their prediction, and the structures they belong to.

Models and other people's ensembles produce this type, and reports read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from qualms.arrays import BoolArray, Float64Array, IntArray, check_points
from qualms.errors import InputError
from qualms.metrics import Scores
from qualms.prediction import Prediction

if TYPE_CHECKING:
    from ase import Atoms

#: Names of the components of a quantity; those of stresses in ASE's Voigt order.
COMPONENT_NAMES = {"forces": ("x", "y", "z"), "stress": ("xx", "yy", "zz", "yz", "xz", "xy")}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions of one quantity with their reference values."""

    target: str  #: key of the property in the data
    y: Float64Array  #: (n,): reference values; per atom if the target is extensive
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
    frames: Sequence[Atoms] | None = None  #: None for tables
    #: scores of other estimators of the same values, by name, such as "linear (validation)"
    scores: Mapping[str, Scores] = field(default_factory=dict)
    #: description of the data that the "(validation)" calibrations were fitted to
    validation: str = ""
    n_unlabelled: int = 0  #: number of structures without reference values, which are left out

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
            scores={},
        )


def _indices(name: str, values: IntArray, n: int) -> IntArray:
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        given = f"{array.dtype.name} of shape {array.shape}"
        raise InputError(name, given, f"an integer for each of {n} points")
    return array.astype(np.intp)
