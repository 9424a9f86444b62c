"""What is kept of a training run besides the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from qualms.atomistic.model_file import Record
from qualms.atomistic.progress import Stages
from qualms.atomistic.solving import Outcome
from qualms.atomistic.training_set import TrainingSet


def make_record(data: TrainingSet, outcome: Outcome, stages: Stages) -> Record:
    """Return sizes, errors and times of a training run."""
    internal = outcome.internal
    z = None if internal is None else internal.residuals
    return Record(
        n_structures=len(data.frames),
        n_rows=len(data.y),
        n_environments=data.n_environments,
        n_unlabelled=data.n_unlabelled,
        n_isolated=data.n_isolated,
        n_duplicates=data.n_duplicates,
        n_internal=0 if z is None else len(z),
        rmse=None if z is None else float(np.sqrt(np.mean(z**2))),
        mae=None if z is None else float(np.mean(np.abs(z))),
        effective_rank=len(outcome.fitted.representatives),
        noise=float(np.sqrt(outcome.full.noise_variance[0])),
        target_std=outcome.target_std,
        solver=outcome.solution,
        seconds=dict(stages.seconds),
        **_of_forces(data, outcome),
    )


def _of_forces(data: TrainingSet, outcome: Outcome) -> dict[str, Any]:
    labels, noise, internal = data.mechanics, outcome.joint_noise, outcome.forces_internal
    if labels is None or noise is None:
        return {}
    z = None if internal is None else internal.residuals
    n_virial_rows = int(np.count_nonzero(labels.is_virial))
    return {
        "n_force_rows": len(labels.y) - n_virial_rows,
        "n_virial_rows": n_virial_rows,
        "n_without_forces": labels.n_without,
        "forces_rmse": None if z is None else float(np.sqrt(np.mean(z**2))),
        "forces_mae": None if z is None else float(np.mean(np.abs(z))),
        "forces_noise": float(np.sqrt(noise.forces)),
    }
