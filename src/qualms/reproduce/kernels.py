"""Kernel rows of a problem, computed once and kept on disk for a run that is resumed.

A directory holds one problem with one seed: arrays in NumPy's own format, the model that shares
their representatives, and a manifest that says what they belong to and which of them are complete.
What a training run itself keeps is in a checkpoint below it until the kernel rows are there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError

from qualms.arrays import IntArray
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.kernel_rows import Basis
from qualms.atomistic.memory import Plan, format_bytes
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import data_hash
from qualms.atomistic.training import (
    Checkpoint,
    KernelRows,
    Resources,
    Solver,
    Training,
    check_members,
    run_key,
)
from qualms.atomistic.training_set import TrainingSet, make_training_set, resolved_species
from qualms.errors import InputError, QualmsError
from qualms.features.compression import Projection
from qualms.features.soap import Representation
from qualms.gp.linalg import Whitening
from qualms.progress import Stages
from qualms.reproduce.costs import Costs
from qualms.reproduce.kept import Kept
from qualms.reproduce.places import is_out_of_room
from qualms.reproduce.problems import Problem
from qualms.reproduce.study import HeldOut, held_out_rows

_Part = TypeVar("_Part")
_MODEL = "model.safetensors"
_STAGES = "stages"
_PARTS = ("validation", "test")
_ARRAYS = ("K_XM", "design", "k_xx", "y")
#: What reading a damaged file, or one that does not fit, can end in.
_UNREADABLE = (OSError, EOFError, ValueError, TypeError, KeyError, QualmsError)
_NO_FEATURES = "The disk has no room for features: an interrupted run computes them again."
#: Bytes that are left to results, predictions and figures.
_RESERVE = 50e6
#: What writing to a disk without room can end in.
_UNWRITABLE = (OSError, SafetensorError, InputError)


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
    earlier : Costs
        Of processes before this one that computed some of it.
    """

    data: TrainingSet
    settings: Settings
    solver: Solver
    fitted: Fitted
    validation: HeldOut
    test: HeldOut
    seconds: dict[str, float]
    earlier: Costs


def prepare(
    problem: Problem,
    directory: Path,
    resources: Resources,
    stages: Stages,
    say: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Return the kernel rows of a problem: what of them is in the directory is not computed again.

    Parameters
    ----------
    problem : Problem
    directory : Path
        Made if it does not exist.
    resources : Resources
    stages : Stages
    say : callable
        Told what cannot be read.
    """
    data = make_training_set(problem.train, problem.settings)
    settings = resolved_species(problem.settings, data)
    _check_sizes(problem, data, settings)
    kept = Kept(directory, _key(problem, data))
    work = _Work(problem, data, settings, resources, stages, kept, say)
    stages.after = lambda: kept.note_seconds(stages.seconds)
    try:
        return work.all()
    finally:
        stages.after = None


def discard(directory: Path) -> None:
    """Delete kernel rows; a directory with anything else in it stays."""
    for stage in ("rows", "model", *_PARTS):
        for name in _files(stage):
            (directory / name).unlink(missing_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    if (directory / _STAGES / "manifest.json").exists():
        shutil.rmtree(directory / _STAGES)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def bytes_on_disk(problem: Problem, plan: Plan) -> float:
    """Return about how many bytes the kernel rows of a problem take, with all that they share.

    The representatives are there twice: with the rows, and in the model.
    """
    target, M = problem.settings.target, plan.n_representatives
    held_out = [*problem.validation, *problem.test]
    per_atom = problem.settings.per_atom
    labels = [np.isfinite(a.arrays[target]) if per_atom else True for a in held_out]
    n = plan.n_rows + sum(int(np.sum(labelled)) for labelled in labels)
    return 8.0 * M * (n + M) + 4.0 * M * plan.n_features + plan.model_size


def _files(stage: str) -> list[str]:
    """Return the names of what is kept of a stage."""
    if stage == "rows":
        return ["K_NM.npy", "whitening.npy", "basis"]
    return [_MODEL] if stage == "model" else [f"{stage}_{array}.npy" for array in _ARRAYS]


@dataclass(frozen=True)
class _Environments:
    """All of `KernelRows` but the large arrays."""

    representation: Representation
    basis: Basis
    origins: IntArray
    novelty: tuple[float, float]


@dataclass
class _Work:
    """The stages of a preparation: each read if it is there, otherwise computed and kept."""

    problem: Problem
    data: TrainingSet
    settings: Settings
    resources: Resources
    stages: Stages
    kept: Kept
    say: Callable[[str], None]
    needed: float = 0.0
    no_room: bool = False

    def all(self) -> Prepared:
        """Go through all stages."""
        training = Training(self.data, self.settings, self.resources, self.stages)
        self.needed = bytes_on_disk(self.problem, training.plan)
        fitted = self._read("model", self._load_model)
        rows = self._read("rows", lambda: self._load_rows(fitted))
        if rows is None:
            fitted = None
            self.kept.forget()
            rows = self._compute_rows()
        # Gigabytes that have served; also those of a run that was killed before it came to this.
        shutil.rmtree(self.kept.directory / _STAGES, ignore_errors=True)
        solver = Solver(self.data, self.settings, rows, training.plan, self.stages)
        if fitted is None:
            fitted = self._solve(solver)
        validation, test = (self._held_out(part, fitted) for part in _PARTS)
        return Prepared(
            data=self.data,
            settings=self.settings,
            solver=solver,
            fitted=fitted,
            validation=validation,
            test=test,
            seconds=self.kept.seconds,
            earlier=self.kept.earlier,
        )

    def _read(self, stage: str, load: Callable[[], _Part]) -> _Part | None:
        """Return a stage that was kept; if it cannot be used, say so and return None."""
        if not self.kept.has(stage):
            return None
        try:
            with self.stages.stage("Reading kernel rows"):
                return load()
        except _UNREADABLE as error:
            why = " ".join(str(error).split())
            self.say(
                f"What was kept in {self.kept.directory} ({stage}) cannot be used and is computed "
                f"again: {why}"
            )
            self.kept.forget(stage)
            return None

    def _keep(self, stage: str, save: Callable[[], Mapping[str, Any] | None]) -> None:
        """Keep a stage: that is of use to a later run only, and this one goes on without it."""
        directory, why = self.kept.directory, ""
        for _ in range(0 if self.no_room else 2):
            try:
                self.kept.complete(stage, save())
                if shutil.disk_usage(directory).free >= _RESERVE:
                    return
                why = "results would have no room"
            except _UNWRITABLE as error:
                why = str(error)
            self.kept.drop(stage, *_files(stage))
            # Features have served; what they take may be room enough.
            shutil.rmtree(directory / _STAGES, ignore_errors=True)
        if why:
            self.no_room = True
            free = format_bytes(shutil.disk_usage(directory).free)
            self.say(
                f"Kernel rows are not kept: they take {format_bytes(self.needed)}, and {directory} "
                f"has {free} free ({why}). A run that is interrupted computes them again."
            )

    # -- kernel rows ------------------------------------------------------------------------------

    def _compute_rows(self) -> KernelRows:
        try:
            rows = self._rows_by_stages()
        except OSError as error:
            if not is_out_of_room(error):
                raise
            self.say(_NO_FEATURES)
            shutil.rmtree(self.kept.directory / _STAGES, ignore_errors=True)
            rows = Training(self.data, self.settings, self.resources, self.stages).kernel_rows()
        with self.stages.stage("Keeping kernel rows"):
            self._keep("rows", lambda: self._save_rows(rows))
        return rows

    def _rows_by_stages(self) -> KernelRows:
        """Compute the rows, going on from stages that an interrupted run has kept."""
        checkpoint = self._checkpoint(resume=True)
        try:
            return self._training(checkpoint).kernel_rows()
        except InputError as error:
            if error.parameter != "resume":
                raise
            self.say(f"What an interrupted run has kept is not used: {error}")
            return self._training(self._checkpoint(resume=False)).kernel_rows()

    def _save_rows(self, rows: KernelRows) -> dict[str, Any]:
        """Save all arrays of the rows; return their numbers."""
        self.kept.save_array("K_NM", rows.K_NM)
        self.kept.save_array("whitening", rows.whitening.factor)
        projections = rows.representation.projections
        tensors: dict[str, Any] = {f"projection_{i}": p.matrix for i, p in enumerate(projections)}
        tensors |= {"representatives": rows.basis.representatives, "origins": rows.origins}
        self.kept.save_tensors("basis", tensors)
        return {
            "kernel_errors": [p.kernel_error for p in projections],
            "feature_scale": rows.representation.feature_scale,
            "kernel_scale": rows.basis.scale,
            "novelty": list(rows.novelty),
        }

    def _checkpoint(self, *, resume: bool) -> Checkpoint:
        key = run_key(self.data.digest, self.settings.model_dump_json())
        try:
            return Checkpoint(self.kept.directory / _STAGES, key, resume=resume)
        except InputError as error:
            if error.parameter != "resume":
                raise
            return Checkpoint(self.kept.directory / _STAGES, key, resume=False)

    def _training(self, checkpoint: Checkpoint) -> Training:
        try:
            resources = replace(self.resources, checkpoint=checkpoint)
            return Training(self.data, self.settings, resources, self.stages)
        except InputError as error:
            if error.parameter != "checkpoint":
                raise
            self.say(_NO_FEATURES)
            return Training(self.data, self.settings, self.resources, self.stages)

    def _load_rows(self, fitted: Fitted | None) -> KernelRows:
        if fitted is not None:
            found = _Environments(
                fitted.representation, fitted.basis, fitted.origins, fitted.training_novelty
            )
        else:
            found = self._load_basis(self.kept.values("rows"))
        r = len(found.origins)
        factor = self.kept.load_array("whitening", (r, None))
        return KernelRows(
            representation=found.representation,
            basis=found.basis,
            origins=found.origins,
            # The representatives that were kept, in the order in which they were kept.
            whitening=Whitening(np.arange(r), factor, residual=0.0, negative=0.0),
            K_NM=self.kept.load_array("K_NM", (self.data.n_rows, r)),
            novelty=found.novelty,
        )

    def _load_basis(self, values: Mapping[str, Any]) -> _Environments:
        """Return what was kept before there was a model."""
        tensors = self.kept.load_tensors("basis")
        projections = tuple(
            Projection(tensors[f"projection_{i}"], float(error))
            for i, error in enumerate(values["kernel_errors"])
        )
        soap, species = self.settings.representation, tuple(self.data.species)
        scale = float(values["feature_scale"])
        representation = Representation(soap, species, projections, scale)
        representatives = tensors["representatives"]
        if representatives.shape[1:] != (representation.n_features,):
            raise ValueError(f"basis has features {representatives.shape}")
        if tensors["origins"].shape != (len(representatives), 2):
            raise ValueError(f"basis has origins {tensors['origins'].shape}")
        per_atom, kernel_scale = self.settings.per_atom, float(values["kernel_scale"])
        basis = Basis(representation.kernel, representatives, kernel_scale, per_atom)
        strangest, mean = map(float, values["novelty"])
        return _Environments(representation, basis, tensors["origins"], (strangest, mean))

    # -- the model, and what is predicted ---------------------------------------------------------

    def _load_model(self) -> Fitted:
        fitted = AtomisticModel.load(self.kept.directory / _MODEL).fitted
        if len(fitted.membership) != len(self.data.y):
            raise ValueError(f"a model of {len(fitted.membership)} labels")
        return fitted

    def _solve(self, solver: Solver) -> Fitted:
        outcome = solver.solve(self.settings, np.random.default_rng(self.settings.seed))
        model = AtomisticModel.from_outcome(self.data, outcome, self.stages)
        self._keep("model", lambda: model.save(self.kept.directory / _MODEL, force=True))
        return outcome.fitted

    def _held_out(self, part: str, fitted: Fitted) -> HeldOut:
        found = self._read(part, lambda: self._load_held_out(part, len(fitted.representatives)))
        if found is not None:
            return found
        frames = self.problem.validation if part == "validation" else self.problem.test
        with self.stages.stage(f"Kernel rows of the {part} set"):
            found = held_out_rows(fitted, frames, self.resources.threads)
        with self.stages.stage("Keeping kernel rows"):
            self._keep(part, lambda: self._save_held_out(part, found))
        return found

    def _save_held_out(self, part: str, found: HeldOut) -> None:
        for name in _ARRAYS:
            self.kept.save_array(f"{part}_{name}", getattr(found, name))

    def _load_held_out(self, part: str, r: int) -> HeldOut:
        y = self.kept.load_array(f"{part}_y", (None,))
        n = len(y)
        return HeldOut(
            K_XM=self.kept.load_array(f"{part}_K_XM", (n, r)),
            design=self.kept.load_array(f"{part}_design", (n, len(self.data.species))),
            k_xx=self.kept.load_array(f"{part}_k_xx", (n,)),
            y=y,
        )


def _check_sizes(problem: Problem, data: TrainingSet, settings: Settings) -> None:
    """Refuse, before the work, sizes that leave nothing for internal calibration."""
    for n in problem.sizes:
        try:
            check_members(data, settings.model_copy(update={"subsample": n}))
        except InputError as error:
            raise InputError(
                "data",
                f"{len(problem.train)} structures to train on",
                f"enough of them for sub-samples of {n} and for internal calibration",
                str(error),
            ) from error


def _key(problem: Problem, data: TrainingSet) -> str:
    """Return a digest of data and settings."""
    target = problem.settings.target
    parts = [data.digest, problem.settings.model_dump_json()]
    for frames in (problem.validation, problem.test):
        per_atom = problem.settings.per_atom
        labels = [a.arrays[target] if per_atom else a.info[target] for a in frames]
        parts.append(data_hash(frames, labels))
    return run_key(*parts)
