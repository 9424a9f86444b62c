"""Predictions of many structures: batch by batch, in this process or by workers.

Workers predict parts of the structures, as tasks of `qualms.execution`: they read structures and
model from their files, and return predictions in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import Request, StructurePrediction, force_norm
from qualms.atomistic.structures import FrameFiles, Part, divided_among, numbered
from qualms.evaluation import energy_factor, per_atom_units
from qualms.execution import Workers
from qualms.io.files import digest_of
from qualms.io.predictions import EXTRAPOLATES, REASON
from qualms.io.xyz import DOF, LIMITS
from qualms.prediction import Prediction


@dataclass(frozen=True)
class ModelFile:
    """A model that each process, or thread, reads once."""

    path: Path
    threads: int | None = None
    baseline: Any = None
    weights: Path | None = None
    digest: str = ""  #: of the content

    @classmethod
    def of(cls, path: Path, *, weights: Path | None = None, **options: Any) -> ModelFile:
        """Return a file that exists, with its digest; names are those that workers know, too."""
        digest = digest_of(path)
        absolute = None if weights is None else weights.resolve()
        return cls(path.resolve(), weights=absolute, digest=digest, **options)

    def load(self) -> AtomisticModel:
        """Return the model."""
        if getattr(_LOADED, "file", None) != self:
            options = {"baseline": self.baseline, "representation": self.weights}
            _LOADED.model = AtomisticModel.load(self.path, threads=self.threads, **options)
            _LOADED.file = self
        model: AtomisticModel = _LOADED.model
        return model


#: The model of a thread; calculators of features are not shared by threads.
_LOADED = threading.local()


@dataclass(frozen=True)
class Output:
    """What is predicted, and how: see ``qualms predict --help``."""

    ensemble: bool = False
    interval: float | None = None
    forces: bool = False
    stress: bool = False
    atoms: bool = False
    in_units: str | None = None
    per: str | None = None
    ignore_unknown: bool = False
    skip_failed: bool = False

    def units(self, model: AtomisticModel) -> tuple[float, str]:
        """Return the factor to the units of the output, and these."""
        factor, units = energy_factor(model.settings.units, self.in_units)
        return factor, per_atom_units(units) if self.per == "atom" else units


class Predicted(NamedTuple):
    """Predictions of some structures: arguments of `PredictionWriter.write`, and counts."""

    arguments: dict[str, Any]
    counts: dict[str, int]


def predict_batches(
    model: AtomisticModel, numbered: Iterable[tuple[int, Atoms]], output: Output
) -> Iterator[Predicted]:
    """Predict structures, which may be more than fit into memory, in batches and in order.

    Parameters
    ----------
    model : AtomisticModel
    numbered : iterable of (int, Atoms)
        Numbers of structures in the input, and the structures.
    output : Output
    """
    target, (factor, units) = model.settings.target, output.units(model)
    of_forces = output.forces or (output.atoms and model.fitted.settings.has_forces)
    if output.skip_failed and model.baseline_potential is not None:
        numbered = model.baseline_potential.computable(
            numbered, forces=of_forces, stress=output.stress
        )
    waiting: deque[int] = deque()

    def frames() -> Iterator[Atoms]:
        for number, atoms in numbered:
            waiting.append(number)
            yield atoms

    unknown = "ignore" if output.ignore_unknown else "error"
    request = Request(of_forces, output.stress, output.atoms)
    for batch in model.stream(frames(), request, unknown_species=unknown):
        parts, centers = batch.parts, batch.parts.centers or []
        arrays: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        quantities = {target: batch.energy}
        if output.forces:
            quantities["forces"] = batch.forces
            arrays |= _components("forces", batch.forces, output)
        if parts.stress is not None:
            quantities["stress"] = parts.stress
            tensors |= _stresses(parts.stress, batch.is_solid, output)
        if output.atoms:
            arrays |= _atom_arrays(target, batch, output)
        prediction: Prediction = batch
        if output.in_units or output.per:
            sizes = np.array([len(c) for c in centers]) if output.per == "atom" else 1.0
            prediction = batch * (factor / sizes)
            arrays, tensors = (
                {k: v if k.endswith("_novelty") else v * factor for k, v in values.items()}
                for values in (arrays, tensors)
            )
        extra: dict[str, list[Any]] = {
            EXTRAPOLATES: batch.extrapolates.tolist(),
            REASON: batch.reasons,
        }
        if units:
            extra[f"{target}_units"] = [units] * len(parts.frames)
        for name, of in quantities.items():
            if of.dof is not None:
                extra[f"{name}{DOF}"] = [of.dof] * len(parts.frames)
        arguments = {
            "frames": parts.frames,
            "prediction": prediction,
            "numbers": [waiting.popleft() for _ in parts.frames],
            "rows": centers if model.fitted.per_atom else None,
            "extra": extra,
            "arrays": arrays,
            "tensors": tensors,
        }
        species = model.fitted.representation.species
        unknown_atoms = [not np.isin(atoms.numbers, species).all() for atoms in parts.frames]
        counts = {
            "structures": len(parts.frames),
            "extrapolating": int(batch.extrapolates.sum()),
            "unknown_species": sum(unknown_atoms),
            "without_volume": sum(output.stress and int(a.cell.rank) < 3 for a in parts.frames),
        }
        yield Predicted(arguments, counts)


# --- parts ---


def predict_parts(
    frames: FrameFiles, file: ModelFile, output: Output, workers: Workers
) -> Iterator[Predicted]:
    """Predict structures by workers, in order; see `predict_batches`.

    Parameters
    ----------
    frames : FrameFiles
    file : ModelFile
    output : Output
    workers : Workers
    """
    workers.check([file.path, *frames.paths])
    parts = divided_among(frames, workers.number)
    for batches in workers.map(predict_part, parts, file, output):
        yield from batches


def predict_part(part: Part, file: ModelFile, output: Output) -> list[Predicted]:
    """Predict a part of the structures.

    Parameters
    ----------
    part : Part
    file : ModelFile
    output : Output
    """
    with numbered(part):
        pairs = zip(part.numbers.tolist(), part.frames, strict=True)
        return list(predict_batches(file.load(), pairs, output))


# --- forces, stresses and atoms ---


def _stresses(stress: Prediction, is_solid: BoolArray, output: Output) -> dict[str, Any]:
    """Return stresses, NaN for structures without a volume."""
    tensors = {}
    for key, values in _components("stress", stress, output).items():
        tensors[key] = np.full((len(is_solid), values.shape[1]), np.nan)
        tensors[key][is_solid] = values
    return tensors


def _components(name: str, prediction: Prediction, output: Output) -> dict[str, Any]:
    """Return means and standard deviations (n, k), and members (n, N_R k) in member order.

    And the limits (n, k) of conformal intervals of this level, if it is given and they are known.
    """
    arrays: dict[str, Any] = {name: prediction.mean, f"{name}_uncertainty": prediction.std}
    if output.interval is not None and prediction.conformal is not None:
        limits = prediction.interval(output.interval, "conformal")
        arrays |= dict(zip([f"{name}{ending}" for ending in LIMITS], limits, strict=True))
    if output.ensemble:
        n, k, n_members = prediction.members.shape
        by_member = prediction.members.transpose(0, 2, 1)
        arrays[f"{name}_ensemble"] = by_member.reshape(n, n_members * k)
    return arrays


def _atom_arrays(target: str, batch: StructurePrediction, output: Output) -> dict[str, Any]:
    """Return contributions, novelty and uncertainties of atoms; NaN for unknown elements."""
    parts, name = batch.parts, f"{target}_atoms"
    pairs = zip(parts.frames, parts.centers or [], strict=True)
    is_center = np.concatenate([np.isin(np.arange(len(f)), c) for f, c in pairs])

    def of_all(values: Sequence[Float64Array]) -> Float64Array:
        full = np.full((len(is_center), *values[0].shape[1:]), np.nan)
        full[is_center] = np.concatenate(values)
        return full

    arrays = {
        name: of_all([part.mean for part in batch.atoms]),
        f"{name}_uncertainty": of_all([part.std for part in batch.atoms]),
        f"{name}_novelty": of_all(batch.atom_novelty),
    }
    if parts.forces is not None:
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(batch.forces.std)])
    if output.ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in batch.atoms])
    return arrays
