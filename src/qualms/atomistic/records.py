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
    labels, noise = data.mechanics, outcome.joint_noise
    if labels is None or noise is None:
        return {}
    n_virial_rows = int(np.count_nonzero(labels.is_virial))
    n_force_rows = len(labels.y) - n_virial_rows
    found: dict[str, Any] = {
        "n_force_rows": n_force_rows,
        "n_virial_rows": n_virial_rows,
        "n_without_forces": labels.n_without,
        "n_without_stress": labels.n_without_virial,
        "forces_noise": float(np.sqrt(noise.forces)) if n_force_rows else None,
        "virial_noise": None if noise.virials is None else float(np.sqrt(noise.virials)),
    }
    for name, of in (("forces", outcome.of_forces), ("stress", outcome.of_stress)):
        if of.internal is not None:
            z = of.internal.residuals
            found[f"{name}_rmse"] = float(np.sqrt(np.mean(z**2)))
            found[f"{name}_mae"] = float(np.mean(np.abs(z)))
            found[f"{name}_internal"] = of.n_structures
    return found
