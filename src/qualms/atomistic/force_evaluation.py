"""Scores of the forces and stresses that a model predicts, for every calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ase import Atoms

from qualms.atomistic.evaluation import Evaluation, Points, calibrated_rows, source_of
from qualms.atomistic.force_labels import find_forces, find_stresses, has_forces, has_stresses
from qualms.atomistic.internal_calibration import telling
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.settings import Settings
from qualms.atomistic.summary import forces_units_of, stress_units_of
from qualms.core.calibration import Calibration, whole_spread
from qualms.core.resampling import committee
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError
from qualms.prediction import Prediction, score

#: Structures that are predicted at once.
_CHUNK = 50


class _Said(NamedTuple):
    """Labels (n, k) of one structure, and members (n, k, N_R) before and after calibration."""

    labels: Float64Array
    raw: Float64Array
    calibrated: Float64Array


def evaluate_derivatives(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    validation: Sequence[Atoms] | None = None,
    *,
    stages: Stages | None = None,
) -> dict[str, Evaluation]:
    """Score components of what a model was trained on besides energies.

    Parameters
    ----------
    model : AtomisticModel
        Trained.
    frames : sequence of Atoms
        New structures.
    validation : sequence of Atoms, optional
        More of them, as in `qualms.atomistic.evaluation.evaluate`; if they have no forces, or no
        stresses, every other of `frames` stands for them.
    stages : Stages, optional
        Shows the progress.

    Returns
    -------
    dict of str to Evaluation
        By "forces" and "stress", as far as structures have any: `unjudged` says what is missing.
    """
    held_out = {} if validation is None else _learned(model, validation, stages)
    return _evaluations(model, _learned(model, frames, stages), held_out)


def unjudged(model: AtomisticModel, found: Mapping[str, Evaluation]) -> list[str]:
    """Say what a model was trained on and no structure tells anything about."""
    keys = {"forces": model.settings.forces, "stress": model.settings.stress}
    return [
        f"No structure has {key!r}, or all are zero by symmetry: {name} cannot be judged."
        for name, key in keys.items()
        if key is not None and name not in found
    ]


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
    return _only("forces", _evaluations(model, _components(model, frames, found, {}, stages)))


def evaluate_stress(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    *,
    key: str | None = None,
    stages: Stages | None = None,
) -> Evaluation:
    """Score components of stresses, as `evaluate_forces` does those of forces."""
    found = find_stresses(frames, key or model.settings.stress or "stress")
    return _only("stress", _evaluations(model, _components(model, frames, {}, found, stages)))


def _only(name: str, found: Mapping[str, Evaluation]) -> Evaluation:
    if name not in found:
        raise InputError(name, "zero by symmetry, or no structures", "something to judge")
    return found[name]


def labels_to_judge(
    settings: Settings, frames: Sequence[Atoms]
) -> tuple[dict[int, Float64Array], dict[int, Float64Array]]:
    """Return the forces and stresses that structures have of what is learned, by structure.

    What is not learned, or what no structure has, is not judged; labels of a wrong form are
    refused.
    """
    forces: dict[int, Float64Array] = {}
    stresses: dict[int, Float64Array] = {}
    if settings.forces is not None and has_forces(frames, settings.forces):
        forces = find_forces(frames, settings.forces)
    if settings.stress is not None and has_stresses(frames, settings.stress):
        stresses = find_stresses(frames, settings.stress)
    return forces, stresses


def _learned(
    model: AtomisticModel, frames: Sequence[Atoms], stages: Stages | None
) -> dict[str, _Components]:
    """Predict what a model has learned besides energies, where structures have it."""
    return _components(model, frames, *labels_to_judge(model.settings, frames), stages)


@dataclass(frozen=True)
class _Components:
    """Components with a label, and what is predicted of them.

    Attributes
    ----------
    points : Points
    own : Prediction
        With the calibration of the model.
    atom, component : (n,) arrays of int
        Which they are; stresses have no atom.
    n_unlabelled : int
    """

    points: Points
    own: Prediction
    atom: IntArray | None
    component: IntArray
    n_unlabelled: int


def _components(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    forces: Mapping[int, Float64Array],
    stresses: Mapping[int, Float64Array],
    stages: Stages | None,
) -> dict[str, _Components]:
    """Predict each structure once, with its stress if that is known."""
    of_forces: dict[int, _Said] = {}
    of_stress: dict[int, _Said] = {}
    n_done, n_all = 0, len({*forces, *stresses})
    with (stages or Stages()).stage("Forces", n_all) as advance:
        for used, stress in ((sorted(stresses), True), (sorted({*forces} - {*stresses}), False)):
            for start in range(0, len(used), _CHUNK):
                some = used[start : start + _CHUNK]
                predicted = model.predict_forces([frames[i] for i in some], stress=stress)
                for i, one in zip(some, predicted, strict=True):
                    if i in forces:
                        of_forces[i] = _said(forces[i], one.forces)
                    if one.stress is not None:
                        of_stress[i] = _said(stresses[i], one.stress)
                n_done += len(some)
                advance(n_done)
    found = {
        "forces": _collected(of_forces, 3 * sum(map(len, frames)), of_atoms=True),
        "stress": _collected(of_stress, 6 * len(frames), of_atoms=False),
    }
    return {name: one for name, one in found.items() if one is not None}


def _said(labels: Float64Array, predicted: Prediction) -> _Said:
    """Return what was predicted; a stress is one row of six components."""
    k, n_members = labels.shape[-1], predicted.n_members
    members = (predicted.uncalibrated.members, predicted.members)
    raw, calibrated = (values.reshape(-1, k, n_members) for values in members)
    return _Said(labels.reshape(-1, k), raw, calibrated)


def _collected(
    said: Mapping[int, _Said], n_components: int, *, of_atoms: bool
) -> _Components | None:
    """Join components that have a label and that are not zero by symmetry, if there are any."""
    if not said:
        return None
    parts = [said[i] for i in sorted(said)]
    labels, members, calibrated = (np.concatenate(part) for part in zip(*parts, strict=True))
    structure = np.repeat(sorted(said), [len(part.labels) for part in parts])
    atom = np.concatenate([np.arange(len(part.labels)) for part in parts])
    known = np.isfinite(labels)
    apart = telling(labels[known], members[known])
    if not apart.any():
        return None
    places, component = (index[apart] for index in np.nonzero(known))
    raw = Prediction(members[known][apart])
    ratios = whole_spread(committee(members)[1])[places] / raw.std
    return _Components(
        points=Points(labels[known][apart], raw, structure[places], ratios),
        own=Prediction(calibrated[known][apart], uncalibrated=raw),
        atom=atom[places] if of_atoms else None,
        component=component,
        n_unlabelled=n_components - int(np.count_nonzero(known)),
    )


def _evaluations(
    model: AtomisticModel,
    found: Mapping[str, _Components],
    held_out: Mapping[str, _Components] | None = None,
) -> dict[str, Evaluation]:
    """Score forces and stresses, each with its own calibrations and units."""
    fitted, others = model.fitted, held_out or {}
    known = {
        "forces": (fitted.forces_calibrations, forces_units_of(fitted)),
        "stress": (fitted.stress_calibrations, stress_units_of(fitted)),
    }
    return {
        name: _evaluation(one, others[name].points if name in others else None, *known[name])
        for name, one in found.items()
    }


def _evaluation(
    found: _Components,
    held_out: Points | None,
    internal: Mapping[str, Calibration],
    units: str,
) -> Evaluation:
    y = found.points.y
    rows = {"raw": score(y, found.points.raw), **calibrated_rows(found.points, held_out, internal)}
    if not internal:
        rows["as the energy"] = score(y, found.own)
    return Evaluation(
        rows=rows,
        y=y,
        labels=y,
        structure=found.points.structure,
        atom=found.atom,
        prediction=found.own,
        units=units,
        validation=source_of(held_out),
        n_unlabelled=found.n_unlabelled,
        component=found.component,
    )
