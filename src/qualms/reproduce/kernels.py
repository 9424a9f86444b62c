"""Kernel rows of a problem, computed once and kept on disk for a run that is resumed.

A directory holds one problem with one seed: arrays in NumPy's own format, the model that shares
their representatives, and a manifest that is written last and says what they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qualms.atomistic.checkpoint import run_key
from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.settings import Settings
from qualms.atomistic.solving import KernelRows, Solver
from qualms.atomistic.structures import data_hash
from qualms.atomistic.study import HeldOut, held_out_rows
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import TrainingSet, make_training_set, resolved_species
from qualms.core.linalg import Whitening
from qualms.core.typing import Float64Array
from qualms.reproduce.problems import Problem
from qualms.storage.files import atomic_output, atomic_path

_MODEL, _MANIFEST = "model.safetensors", "manifest.json"
_PARTS = ("validation", "test")
_ARRAYS = ("K_XM", "design", "k_xx", "y")


@dataclass(frozen=True)
class Prepared:
    """Everything that members of all sizes share.

    Attributes
    ----------
    data : TrainingSet
    settings : Settings
    solver : Solver
    fitted : Fitted
        With members of the size that the settings ask for.
    validation, test : HeldOut
    seconds : dict of str to float
        Of each stage; of those that were read from disk, when they were computed.
    """

    data: TrainingSet
    settings: Settings
    solver: Solver
    fitted: Fitted
    validation: HeldOut
    test: HeldOut
    seconds: dict[str, float]


def prepare(problem: Problem, directory: Path, resources: Resources, stages: Stages) -> Prepared:
    """Return the kernel rows of a problem: those in the directory if they are the same.

    Parameters
    ----------
    problem : Problem
    directory : Path
        Made if it does not exist.
    resources : Resources
    stages : Stages
    """
    data = make_training_set(problem.train, problem.settings)
    settings = resolved_species(problem.settings, data)
    training = Training(data, settings, resources, stages)
    key = _key(problem, data)
    seconds = _seconds_before(directory, key)
    if seconds is not None:
        with stages.stage("Reading kernel rows"):
            fitted = AtomisticModel.load(directory / _MODEL).fitted
            rows = _load_rows(directory, fitted)
            held_out = {part: _load_held_out(directory, part) for part in _PARTS}
        solver = Solver(data, settings, rows, training.plan, stages)
        return Prepared(data, settings, solver, fitted, **held_out, seconds=seconds)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MANIFEST).unlink(missing_ok=True)
    rows = training.kernel_rows()
    with stages.stage("Keeping kernel rows"):
        _save(directory, "K_NM", rows.K_NM)
        _save(directory, "whitening", rows.whitening.factor)
    solver = Solver(data, settings, rows, training.plan, stages)
    outcome = solver.solve(settings, np.random.default_rng(settings.seed))
    found = {}
    for part, frames in (("validation", problem.validation), ("test", problem.test)):
        with stages.stage(f"Kernel rows of the {part} set"):
            found[part] = held_out_rows(outcome.fitted, frames, resources.threads)
        with stages.stage("Keeping kernel rows"):
            for name in _ARRAYS:
                _save(directory, f"{part}_{name}", getattr(found[part], name))
    AtomisticModel.from_outcome(data, outcome, stages).save(directory / _MODEL, force=True)
    seconds = dict(stages.seconds)
    with atomic_output(directory / _MANIFEST, force=True) as file:
        file.write(json.dumps({"key": key, "seconds": seconds}).encode())
    return Prepared(data, settings, solver, outcome.fitted, **found, seconds=seconds)


def discard(directory: Path) -> None:
    """Delete kernel rows; a directory with anything else in it stays."""
    for path in _files(directory):
        path.unlink(missing_ok=True)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _files(directory: Path) -> Iterable[Path]:
    arrays = ["K_NM", "whitening", *(f"{p}_{a}" for p in _PARTS for a in _ARRAYS)]
    names = [_MANIFEST, _MODEL, *(f"{name}.npy" for name in arrays)]
    return (directory / name for name in names)


def _key(problem: Problem, data: TrainingSet) -> str:
    """Return a digest of data and settings."""
    target = problem.settings.target
    parts = [data.digest, problem.settings.model_dump_json()]
    for frames in (problem.validation, problem.test):
        per_atom = problem.settings.per_atom
        labels = [a.arrays[target] if per_atom else a.info[target] for a in frames]
        parts.append(data_hash(frames, labels))
    return run_key(*parts)


def _seconds_before(directory: Path, key: str) -> dict[str, float] | None:
    """Return how long the stages took, if all that is needed is there."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        complete = manifest["key"] == key and all(path.exists() for path in _files(directory))
        return dict(manifest["seconds"]) if complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(directory: Path, name: str, array: Float64Array) -> None:
    with atomic_path(directory / f"{name}.npy", force=True) as path, path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def _load(directory: Path, name: str) -> Float64Array:
    array: Float64Array = np.load(directory / f"{name}.npy", allow_pickle=False)
    return array


def _load_rows(directory: Path, fitted: Fitted) -> KernelRows:
    factor = _load(directory, "whitening")
    # The representatives that were kept, in the order in which they were kept.
    whitening = Whitening(np.arange(len(factor)), factor, residual=0.0, negative=0.0)
    return KernelRows(
        representation=fitted.representation,
        basis=fitted.basis,
        origins=fitted.origins,
        whitening=whitening,
        K_NM=_load(directory, "K_NM"),
        novelty=fitted.training_novelty,
    )


def _load_held_out(directory: Path, part: str) -> HeldOut:
    return HeldOut(**{name: _load(directory, f"{part}_{name}") for name in _ARRAYS})
