"""Scores of the forces that a model predicts, for every calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms

from qualms.atomistic.evaluation import Evaluation
from qualms.atomistic.force_labels import find_forces
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.summary import forces_units_of
from qualms.core.calibration import METHODS
from qualms.prediction import Prediction, score

#: Structures that are predicted at once.
_CHUNK = 50


def evaluate_forces(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    *,
    key: str | None = None,
    stages: Stages | None = None,
) -> Evaluation:
    """Score components of forces, with every calibration.

    Parameters
    ----------
    model : AtomisticModel
        Trained; on forces, unless a key is given.
    frames : sequence of Atoms
        New structures; components without a label are skipped.
    key : str, optional
        Of the forces; that of the training by default.
    stages : Stages, optional
        Shows the progress.

    Returns
    -------
    Evaluation
        Its points are components of forces.
    """
    found = find_forces(frames, key or model.settings.forces or "forces")
    used = sorted(found)
    members, calibrated = [], []
    with (stages or Stages()).stage("Forces", len(used)) as advance:
        for start in range(0, len(used), _CHUNK):
            some = used[start : start + _CHUNK]
            forces = model.predict_forces([frames[i] for i in some]).forces
            labelled = np.isfinite(np.concatenate([found[i] for i in some]))
            members.append(forces.uncalibrated.members[labelled])
            calibrated.append(forces.members[labelled])
            advance(start + len(some))
    y = np.concatenate([found[i][np.isfinite(found[i])] for i in used])
    places = [np.nonzero(np.isfinite(found[i]))[0] for i in used]
    raw = Prediction(np.concatenate(members))
    own = Prediction(np.concatenate(calibrated), uncalibrated=raw)
    internal = model.fitted.forces_calibrations
    rows = {"raw": score(y, raw)}
    for method in METHODS:
        if method != "none" and method in internal:
            rows[f"{method} (internal)"] = score(y, internal[method].apply(raw))
    if not internal:
        rows["as the energy"] = score(y, own)
    n_components = 3 * sum(map(len, frames))
    return Evaluation(
        rows=rows,
        y=y,
        labels=y,
        structure=np.repeat(np.array(used, dtype=np.intp), [len(p) for p in places]),
        atom=np.concatenate(places),
        prediction=own,
        units=forces_units_of(model.fitted),
        validation="nothing",
        n_unlabelled=n_components - len(y),
    )
