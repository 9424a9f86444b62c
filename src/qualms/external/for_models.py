"""A calibration file on what a model of qualms predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.atomistic.evaluation import Evaluation
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.targets import labelled
from qualms.core.resampling import stretched
from qualms.core.typing import Float64Array, FloatArray, StrArray
from qualms.errors import InputError
from qualms.external.calibration_file import CalibrationDocument, read_calibration

#: Labels may be alike by chance.
_BY_CHANCE = 0.1


@dataclass(frozen=True)
class ModelCalibration:
    """A calibration of certain points: the labelled ones of some structures.

    Attributes
    ----------
    name : str
        Of the file, and the method.
    document : CalibrationDocument
    labels : (n,) array of str, optional
        The group of each point, if the calibration has groups.
    n_members : int
        Of the model.
    """

    name: str
    document: CalibrationDocument
    labels: StrArray | None
    n_members: int

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (n, N_R) about their means so that they have the calibrated spread."""
        scaled = self.document.transform(members)
        return (
            scaled if self.labels is None else stretched(scaled, self.document.factors(self.labels))
        )

    def remarks(self, evaluation: Evaluation) -> list[str]:
        """Say what the calibration was fitted to, and if it may have been these very points."""
        n_points = self.document.parameters.get("n_points", "an unknown number of")
        remarks = [f"{self.name}: fitted to {n_points} points."]
        seen = self.document.seen(evaluation.labels)
        if seen > _BY_CHANCE:
            remarks = [
                f"{self.name}: fitted to {n_points} points, of which about {seen:.0%} have the "
                "label of a point here. If they are the same points, its scores are too good."
            ]
        if self.document.n_members != self.n_members:
            n_members = self.document.n_members
            given = f"{n_members} members" if n_members else "error bars alone"
            remarks.append(
                f"{self.name}: made of {given}, and the model has {self.n_members} members."
            )
        if self.labels is not None:
            new = sorted(set(self.labels.tolist()) - set(self.document.groups))
            if new:
                names = ", ".join(name or "(none)" for name in new)
                remarks.append(f"{self.name}: not seen there, so without a factor: {names}.")
        return remarks


def calibration_for(path: Path, model: AtomisticModel, frames: Sequence[Atoms]) -> ModelCalibration:
    """Read a calibration, see that it is one of what the model predicts, and find the groups.

    Parameters
    ----------
    path : path
        Of the calibration.
    model : AtomisticModel
    frames : sequence of Atoms
        Structures that the model is to be judged on.
    """
    document, settings = read_calibration(path), model.settings
    if document.target != settings.target:
        raise InputError("--calibration", f"one of {document.target}", settings.target)
    kind = "atom" if model.fitted.per_atom else "structure"
    if document.kind != kind:
        raise InputError("--calibration", f"one of {document.kind}s", f"one of {kind}s")
    labels = None
    if document.by is not None:
        found = labelled(frames, settings.target, settings.kind, settings.species)
        rows: list[Any] = [*found.rows] or [None] * len(found.frames)
        pairs = zip(found.frames.tolist(), rows, strict=True)
        labels = np.concatenate([_labels(frames[i], document.by, some) for i, some in pairs])
        if not labels.astype(bool).any():
            expected = f"structures with a {document.by}"
            raise InputError("--calibration", f"one by {document.by}", expected)
    name = f"{path.name} ({document.method})"
    return ModelCalibration(name, document, labels, settings.n_members)


def _labels(atoms: Atoms, by: str, rows: Any | None) -> StrArray:
    """Return the group of a structure, or of some of its atoms; empty where it has none."""
    if rows is None or by not in ("element", *atoms.arrays):
        return np.full(1 if rows is None else len(rows), str(atoms.info.get(by, "")))
    values = np.array([*atoms.symbols]) if by == "element" else atoms.arrays[by]
    labels: StrArray = values.astype(str)[rows]
    return labels
