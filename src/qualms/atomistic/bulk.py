"""Predictions of many structures: batch by batch, in this process or by workers.

Workers predict parts of the structures, as tasks of `qualms.execution`: they read structures and
model from their files, and return predictions in order.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.forces import ForcePrediction, has_forces
from qualms.atomistic.model import AtomisticModel, Chunk, atom_contributions
from qualms.atomistic.novelty import force_norm
from qualms.atomistic.parts import Part, numbered
from qualms.atomistic.structures import FrameFiles
from qualms.evaluation import energy_factor, per_atom_units
from qualms.execution import Workers
from qualms.io.files import check_input
from qualms.io.predictions import EXTRAPOLATES
from qualms.prediction import Prediction

#: Structures of a part, and the fewest that are worth a task.
_PART, _FEWEST = 5000, 20
#: Parts for each worker, so that none waits long for the last.
_ROUNDS = 4


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
        with check_input(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        absolute = None if weights is None else weights.resolve()
        return cls(path.resolve(), weights=absolute, digest=digest, **options)

    def load(self) -> AtomisticModel:
        """Return the model."""
        if getattr(_LOADED, "file", None) != self:
            options = {"baseline": self.baseline, "representation": self.weights}
            _LOADED.model = AtomisticModel.load(self.path, threads=self.threads, **options)
            _LOADED.file = self
        found: AtomisticModel = _LOADED.model
        return found


#: The model of a thread; calculators of features are not shared by threads.
_LOADED = threading.local()


@dataclass(frozen=True)
class Wanted:
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
    model: AtomisticModel, numbered: Iterable[tuple[int, Atoms]], wanted: Wanted
) -> Iterator[Predicted]:
    """Predict structures, which may be more than fit into memory, in batches and in order."""
    target, (factor, units) = model.settings.target, wanted.units(model)
    derivatives = wanted.forces or wanted.stress
    if wanted.skip_failed and model.reference is not None:
        how = {"forces": derivatives, "stress": wanted.stress}
        numbered = model.reference.computable(numbered, **how)
    waiting: deque[int] = deque()

    def frames() -> Iterator[Atoms]:
        for number, atoms in numbered:
            waiting.append(number)
            yield atoms

    unknown = "ignore" if wanted.ignore_unknown else "error"
    by_atom = wanted.atoms and has_forces(model.fitted)
    features = wanted.atoms or not derivatives
    for chunk in model.stream(frames(), unknown_species=unknown, features=features):
        novelty = np.empty((len(chunk.frames), 2))
        arrays: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        forces = None
        if derivatives or by_atom:
            solid = np.array([wanted.stress and one.cell.rank == 3 for one in chunk.known])
            forces = model.predict_forces(chunk.known, stress=bool(solid.all()), novelty=novelty)
            if wanted.forces:
                arrays |= _components("forces", forces.forces, wanted)
            if wanted.stress:
                tensors = _stresses(model, chunk.frames, solid, forces.stress, wanted)
        if forces is not None and derivatives:
            prediction = forces.energy
        else:
            prediction = chunk.predict(chunk.rows(novelty))
        if wanted.atoms:
            arrays |= _atom_arrays(chunk, forces, wanted)
        extrapolates = chunk.extrapolates(prediction, novelty)
        extra: dict[str, list[Any]] = {EXTRAPOLATES: extrapolates.tolist()}
        if wanted.in_units or wanted.per:
            sizes = [len(known) for known in chunk.known] if wanted.per == "atom" else 1.0
            prediction = prediction * (factor / np.asarray(sizes))
            arrays, tensors = (
                {k: v if k.endswith("_novelty") else v * factor for k, v in part.items()}
                for part in (arrays, tensors)
            )
        if units:
            extra[f"{target}_units"] = [units] * len(chunk.frames)
        arguments = {
            "frames": chunk.frames,
            "prediction": prediction,
            "numbers": [waiting.popleft() for _ in chunk.frames],
            "rows": chunk.centers if model.fitted.per_atom else None,
            "extra": extra,
            "arrays": arrays,
            "tensors": tensors,
        }
        flat = sum(wanted.stress and int(one.cell.rank) < 3 for one in chunk.frames)
        counts = {
            "structures": len(chunk.frames),
            "extrapolating": int(extrapolates.sum()),
            "unknown_species": int(chunk.has_unknown.sum()),
            "without_volume": flat,
        }
        yield Predicted(arguments, counts)


# --- parts ---


def predict_parts(
    frames: FrameFiles, file: ModelFile, wanted: Wanted, workers: Workers
) -> Iterator[Predicted]:
    """Predict structures by workers, in order; see `predict_batches`."""
    workers.check([file.path, *frames.paths])
    size = _part_size(len(frames), workers.number)
    parts = [_part(frames, *edge) for edge in _divided(0, len(frames), size)]
    for batches in workers.map(predict_part, parts, file, wanted):
        yield from batches


def _part_size(n_structures: int, n_workers: int) -> int:
    """Return the number of structures of a part."""
    return min(max(-(-n_structures // (_ROUNDS * n_workers)), _FEWEST), _PART)


def _divided(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Return ranges between multiples of the size."""
    return list(pairwise([first, *range(size * (first // size + 1), last, size), last]))


def _part(frames: FrameFiles, first: int, last: int) -> Part:
    return Part(frames[first:last], np.arange(first, last))


def predict_part(part: Part, file: ModelFile, wanted: Wanted) -> list[Predicted]:
    """Predict a part of the structures."""
    with numbered(part):
        pairs = zip(part.numbers.tolist(), part.frames, strict=True)
        return list(predict_batches(file.load(), pairs, wanted))


# --- forces, stresses and atoms ---


def _stresses(
    model: AtomisticModel,
    frames: Sequence[Any],
    solid: BoolArray,
    stress: Prediction | None,
    wanted: Wanted,
) -> dict[str, Any]:
    """Return stresses of solids, NaN elsewhere; `stress` is known if all structures are solids."""
    n_members = model.fitted.n_members if wanted.ensemble else 0
    widths = {"stress": 6, "stress_uncertainty": 6, "stress_ensemble": 6 * n_members}
    if wanted.interval is not None and "stress" in model.fitted.calibrations:
        widths |= {"stress_lower": 6, "stress_upper": 6}
    tensors = {key: np.full((len(frames), n), np.nan) for key, n in widths.items() if n}
    if stress is None and solid.any():
        some = [atoms for atoms, is_solid in zip(frames, solid, strict=True) if is_solid]
        stress = model.predict_forces(some, stress=True).stress
    if stress is not None:
        for key, values in _components("stress", stress, wanted).items():
            tensors[key][solid] = values
    return tensors


def _components(name: str, prediction: Prediction, wanted: Wanted) -> dict[str, Any]:
    """Return means and standard deviations (n, k), and members (n, N_R k) in member order.

    And the limits (n, k) of conformal intervals of this level, if it is given and they are known.
    """
    arrays: dict[str, Any] = {name: prediction.mean, f"{name}_uncertainty": prediction.std}
    if wanted.interval is not None and prediction.conformal is not None:
        limits = prediction.interval(wanted.interval, "conformal")
        arrays |= dict(zip((f"{name}_lower", f"{name}_upper"), limits, strict=True))
    if wanted.ensemble:
        by_member = prediction.members.transpose(0, 2, 1)
        arrays[f"{name}_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays


def _atom_arrays(chunk: Chunk, forces: ForcePrediction | None, wanted: Wanted) -> dict[str, Any]:
    """Return contributions, novelty and uncertainties of atoms; NaN for unknown elements."""
    parts = atom_contributions(chunk)
    name = f"{chunk.fitted.settings.target}_atoms"
    known = np.concatenate(
        [np.isin(np.arange(len(f)), c) for f, c in zip(chunk.frames, chunk.centers, strict=True)]
    )

    def of_all(values: Sequence[Float64Array]) -> Float64Array:
        full = np.full((len(known), *values[0].shape[1:]), np.nan)
        full[known] = np.concatenate(values)
        return full

    arrays = {
        name: of_all([part.mean for part in parts]),
        f"{name}_uncertainty": of_all([part.std for part in parts]),
        f"{name}_novelty": of_all(chunk.atom_novelty()),
    }
    if forces is not None:
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(forces.forces.std)])
    if wanted.ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in parts])
    return arrays
