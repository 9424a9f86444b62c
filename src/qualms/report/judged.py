"""What a report is about: predictions, the truth, and the structures they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from qualms.arrays import BoolArray, Float64Array, IntArray, check_points
from qualms.errors import InputError
from qualms.metrics import Scores
from qualms.prediction import Prediction

if TYPE_CHECKING:
    from ase import Atoms
    from rich.table import Table


class AtomValues(NamedTuple):
    """What is known of the atoms of one structure, (n_atoms,) each.

    Attributes
    ----------
    novelty : array
        How strange they are to the model, relative to a limit beyond which they are an
        extrapolation.
    std : array, optional
        Error bars of what they contribute.
    local_std : array, optional
        The same after each has shared its contribution with the atoms around it.
    force_std : array, optional
        Norms of the error bars of the forces on them.
    """

    novelty: Float64Array
    std: Float64Array | None = None
    local_std: Float64Array | None = None
    force_std: Float64Array | None = None


@dataclass(frozen=True)
class Judged:
    """Predictions to be judged, and all that a report says about them.

    Attributes
    ----------
    target : str
        What was predicted.
    units : str
        Its units.
    title : str
        Heading of the report.
    y : (n,) array
        True values.
    prediction : Prediction of shape (n,)
        Calibrated; its `uncalibrated` is what it was before.
    frames : sequence of Atoms, or None
        The structures; None for tables that have none.
    structure : (n,) array of int
        The structure of each point: its index in `frames`, or any number. Points of one structure
        are taken to have correlated errors.
    atom : (n,) array of int, or None
        The atom of each point, for properties of atoms.
    component : (n,) array of int, or None
        Which of the values of its structure or atom each point is, if they are several.
    component_names : sequence of str
        What these values are called; may be empty.
    rows : mapping of str to Scores
        Other estimators of the same points, to compare with; may be empty.
    tables : mapping of str to rich.table.Table
        Further tables by their headings, such as that of the methods of calibration.
    facts : mapping of str to str
        What is known about the model or the calibration.
    remarks : sequence of str
        Warnings and notes.
    n_members : int, optional
        Of the committee, if it is not that of `prediction`; zero if nobody knows.
    atom_values : callable, optional
        Takes indices of `frames` and returns `AtomValues` for each of them. The map colours atoms
        by their novelty, and by the others if asked to.
    atom_units : str
        Units of contributions of atoms.
    force_units : str
        Units of forces on atoms.
    """

    target: str
    units: str
    title: str
    y: Float64Array
    prediction: Prediction
    frames: Sequence[Atoms] | None
    structure: IntArray
    atom: IntArray | None = None
    component: IntArray | None = None
    component_names: Sequence[str] = ()
    rows: Mapping[str, Scores] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    n_members: int | None = None
    atom_values: Callable[[Sequence[int]], Sequence[AtomValues]] | None = None
    atom_units: str = ""
    force_units: str = ""

    def __post_init__(self) -> None:
        y = check_points("y", self.y)
        if y.ndim != 1:
            raise InputError("y", f"shape {y.shape}", "(n,)", "Flatten several outputs.")
        if not isinstance(self.prediction, Prediction):
            raise InputError("prediction", type(self.prediction).__name__, "a Prediction")
        if self.prediction.shape != y.shape:
            raise InputError("prediction", f"shape {self.prediction.shape}", f"{y.shape}, as of y")
        structure = _indices("structure", self.structure, y.size)
        object.__setattr__(self, "y", y)
        object.__setattr__(self, "structure", structure)
        if self.atom is not None:
            object.__setattr__(self, "atom", _indices("atom", self.atom, y.size))
        if self.component is not None:
            object.__setattr__(self, "component", _indices("component", self.component, y.size))
        if self.frames is not None:
            _check_places(self.frames, structure, self.atom)

    @property
    def residuals(self) -> Float64Array:
        """Z = y − ȳ, (n,)."""
        z: Float64Array = self.y - self.prediction.mean
        return z

    @property
    def is_calibrated(self) -> bool:
        """Whether there is another prediction from before a calibration."""
        return self.prediction.uncalibrated is not self.prediction

    def with_error_bars(self) -> Judged:
        """Leave out points with σ = 0, which no score can be computed of, and remark how many."""
        raw = self.prediction.uncalibrated
        kept: BoolArray = (self.prediction.std > 0.0) & (raw.std > 0.0)
        n_lost = int(np.count_nonzero(~kept))
        if not n_lost:
            return self
        if n_lost == self.y.size:
            raise InputError("prediction", "σ = 0 for all points", "members that disagree")
        remark = f"{n_lost} of {self.y.size} points have σ = 0 and are left out of this report."
        return replace(
            self,
            y=self.y[kept],
            prediction=self.prediction[kept],
            structure=self.structure[kept],
            atom=None if self.atom is None else self.atom[kept],
            component=None if self.component is None else self.component[kept],
            remarks=(*self.remarks, remark),
        )


def _indices(name: str, values: IntArray, n: int) -> IntArray:
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        given = f"{array.dtype.name} of shape {array.shape}"
        raise InputError(name, given, f"an integer for each of {n} points")
    return array.astype(np.intp)


def _check_places(frames: Sequence[Atoms], structure: IntArray, atom: IntArray | None) -> None:
    """Refuse points of structures, or of atoms, that there are not."""
    if structure.min() < 0 or structure.max() >= len(frames):
        given = f"{structure.min()} to {structure.max()}"
        raise InputError("structure", given, f"indices of {len(frames)} frames")
    if atom is None:
        return
    sizes = np.array([len(atoms) for atoms in frames])[structure]
    wrong = np.flatnonzero((atom < 0) | (atom >= sizes))
    if wrong.size:
        i = int(wrong[0])
        expected = f"one of the {sizes[i]} atoms of structure {structure[i]}"
        raise InputError(f"atom[{i}]", int(atom[i]), expected)
