"""Scores of a model on new structures, for every calibration: the rows of the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.labels import find_forces, find_stresses, has_forces, has_stresses, labelled
from qualms.atomistic.model import AtomisticModel, forces_units_of, stress_units_of, units_of
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species, check_structures
from qualms.atomistic.training import telling
from qualms.calibration.base import Calibration, MemberTransform, calibration_data
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.methods import whole_spread
from qualms.errors import CalibrationError, InputError
from qualms.evaluation import COMPONENT_NAMES, Evaluation
from qualms.gp.ensemble import committee, group_codes
from qualms.metrics import Scores, score_arrays
from qualms.prediction import Prediction, score
from qualms.progress import Stages

#: Methods that the paper also fits to a validation set: "CV" and "N-L" in its tables.
_VALIDATED = ("linear", "power")
#: Fewer points than these cannot be divided for a cross-fit.
_MIN_CROSS_FIT = 8


@dataclass(frozen=True)
class TargetEvaluation:
    """A model on labelled structures.

    Attributes
    ----------
    rows : mapping of str to Scores
        By estimator: "raw", "linear (validation)", …, "student (internal)", …, "GPR PP".
    y : (n,) array
        Labels; per atom if the target is extensive.
    labels : (n,) array
        As they are in the data.
    structure : (n,) array of int
        The structure of each label: its index among those that were given.
    atom : (n,) array of int, optional
        Its atom, if labels are those of atoms.
    prediction : Prediction
        With the model's own calibration, same units.
    units : str
    validation : str
        What calibrations that are not internal were fitted to.
    n_unlabelled : int
    component : (n,) array of int, optional
        Which component of a force (x, y, z) or of a stress (xx, yy, zz, yz, xz, xy) each label is.
    """

    rows: Mapping[str, Scores]
    y: Float64Array
    labels: Float64Array
    structure: IntArray
    atom: IntArray | None
    prediction: Prediction
    units: str
    validation: str
    n_unlabelled: int
    component: IntArray | None = None

    @property
    def n_structures(self) -> int:
        """Structures that the labels are of; labels of one structure are not independent."""
        return int(np.unique(self.structure).size)


def evaluate_target(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    validation: Sequence[Atoms] | None = None,
    *,
    calibrations: Mapping[str, MemberTransform] | None = None,
    stages: Stages | None = None,
) -> TargetEvaluation:
    """Score a model with every calibration, and its projected process.

    Parameters
    ----------
    model : AtomisticModel
        Trained.
    frames : sequence of Atoms
        New structures with labels; those without are skipped.
    validation : sequence of Atoms, optional
        More of them, to fit the calibrations that are not internal to. Without, these are fitted to
        every other of `frames` and judged on those between.
    calibrations : mapping of str to MemberTransform, optional
        Further calibrations by name, made elsewhere, of what `AtomisticModel.predict` says.
    stages : Stages, optional
        Shows the progress.
    """
    stages = stages or Stages()
    test = _predicted(model, frames, stages)
    held_out = None if validation is None else _predicted(model, validation, stages)
    internal = model.fitted.calibrations
    rows = {"raw": score(test.y, test.raw)}
    rows |= calibrated_rows(test.points, None if held_out is None else held_out.points, internal)
    own = model.fitted.calibration.apply(test.raw)
    for name, calibration in (calibrations or {}).items():
        # Made of what is predicted, which is a sum if the target is extensive.
        members = calibration.transform(own.members * test.sizes[:, None]) / test.sizes[:, None]
        rows[name] = score(test.y, Prediction(members))
    if test.pp is not None:
        rows["GPR PP"] = score_arrays(test.y, *test.pp)
    return TargetEvaluation(
        rows=rows,
        y=test.y,
        labels=test.y * test.sizes,
        structure=test.structure,
        atom=test.atom,
        prediction=own,
        units=units_of(model.fitted),
        validation=source_of(None if held_out is None else held_out.points),
        n_unlabelled=test.n_unlabelled,
    )


class Points(NamedTuple):
    """Labels (n,), what members say about them, and the structure of each.

    Components of vectors and tensors are multiplied by `ratios` (n,) where they are calibrated (see
    `qualms.calibration.methods`).
    """

    y: Float64Array
    raw: Prediction
    structure: IntArray
    ratios: Float64Array | None = None

    def some(self, chosen: BoolArray) -> Points:
        """Return some of them."""
        ratios = None if self.ratios is None else self.ratios[chosen]
        return Points(self.y[chosen], self.raw[chosen], self.structure[chosen], ratios)

    def calibrated(self, calibration: Calibration) -> Prediction:
        """Return what is predicted, calibrated."""
        if self.ratios is None:
            return calibration.apply(self.raw)
        scale = self.ratios[:, None]
        members = calibration.transform(self.raw.members * scale) / scale
        return Prediction(members, uncalibrated=self.raw)

    def fit(self, method: str) -> Calibration:
        """Return the calibration that they would have."""
        y, members = self.y, self.raw.members
        if self.ratios is not None:
            y, members = y * self.ratios, members * self.ratios[:, None]
        return fit_calibration(calibration_data(y, members), method)


def calibrated_rows(
    test: Points, held_out: Points | None, internal: Mapping[str, Calibration]
) -> dict[str, Scores]:
    """Score points by every calibration: those of other points, and those of the training.

    Parameters
    ----------
    test : Points
    held_out : Points, optional
        What calibrations that are not internal are fitted to; otherwise to one half of the
        structures of `test`, for the other.
    internal : mapping of str to Calibration
    """
    rows = {}
    for method in _VALIDATED:
        validated = _validated(test, held_out, method)
        if validated is not None:
            rows[f"{method} (validation)"] = score(test.y, validated)
    for method in METHODS:
        if method != "none" and method in internal:
            rows[f"{method} (internal)"] = score(test.y, test.calibrated(internal[method]))
    return rows


def source_of(held_out: Points | None) -> str:
    """Say what calibrations that are not internal were fitted to."""
    if held_out is None:
        return "the other half of the test set"
    return f"{len(held_out.y)} validation points"


@dataclass(frozen=True)
class _Predicted:
    """Labels and what members, uncalibrated, and the projected process say about them."""

    y: Float64Array
    raw: Prediction
    pp: tuple[Float64Array, Float64Array] | None
    structure: IntArray  # of each label, among those that were given
    atom: IntArray | None  # of each label, if it is one of an atom
    sizes: Float64Array  # what an average is multiplied by
    n_unlabelled: int

    @property
    def points(self) -> Points:
        return Points(self.y, self.raw, self.structure)


def _predicted(model: AtomisticModel, frames: Sequence[Atoms], stages: Stages) -> _Predicted:
    settings, fitted = model.fitted.settings, model.fitted
    found = labelled(frames, settings.target, settings.kind, settings.species)
    used = [frames[i] for i in found.frames]
    for i in found.frames.tolist():
        check_structures([frames[i]], first=i)
        check_species([frames[i]], fitted.representation.species, first=i)
    members, pp = _streamed(model, used, stages)
    # Atoms of the wanted species without a label are predicted, but cannot be judged.
    judged: slice | BoolArray = slice(None)
    structure, atom = found.frames, None
    if settings.per_atom:
        structure = np.repeat(structure, [len(rows) for rows in found.rows])
        atom = np.concatenate(found.rows)
        pairs = zip(model.target_atoms(used), found.rows, strict=True)
        judged = np.concatenate([np.isin(predicted, rows) for predicted, rows in pairs])
    sizes = np.ones(len(structure))
    if settings.kind == "extensive":
        sizes = np.array([len(atoms) for atoms in used], dtype=np.float64)
    return _Predicted(
        y=found.values / sizes,
        raw=Prediction(members[judged]),
        pp=None if pp is None else (pp[0][judged], pp[1][judged]),
        structure=structure,
        atom=atom,
        sizes=sizes,
        n_unlabelled=found.n_unlabelled,
    )


def _streamed(
    model: AtomisticModel, frames: Sequence[Atoms], stages: Stages
) -> tuple[Float64Array, tuple[Float64Array, Float64Array] | None]:
    """Return what members, and the projected process, say: averages over atoms, or of atoms."""
    fitted = model.fitted
    members, means, stds = [], [], []
    done = 0
    with stages.stage("Predictions", len(frames)) as advance:
        for chunk in model.stream(frames):
            K_XM, design = chunk.rows(), chunk.design
            members.append(fitted.members(K_XM, design))
            if fitted.pp_variance is not None:
                means.append(fitted.pp_mean(K_XM, design))
                stds.append(fitted.pp_variance.std(K_XM, chunk.prior_variance()))
            done += len(chunk.frames)
            advance(done)
    pp = (np.concatenate(means), np.concatenate(stds)) if means else None
    return np.concatenate(members), pp


def _validated(test: Points, held_out: Points | None, method: str) -> Prediction | None:
    """Calibrate by other points than those that are judged, if that can be done."""
    try:
        if held_out is not None:
            return test.calibrated(held_out.fit(method))
        if len(test.y) >= _MIN_CROSS_FIT and test.structure[-1] > test.structure[0]:
            return _cross_fitted(test, method)
    except CalibrationError:
        pass
    return None


def _cross_fitted(test: Points, method: str) -> Prediction:
    """Calibrate each half of the structures by the other one."""
    even = group_codes(test.structure, len(test.y)) % 2 == 0
    members = np.empty_like(test.raw.members)
    for half in (even, ~even):
        calibration = test.some(~half).fit(method)
        members[half] = test.some(half).calibrated(calibration).members
    return Prediction(members, uncalibrated=test.raw)


# Scores of the forces and stresses that a model predicts, for every calibration.
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
) -> dict[str, TargetEvaluation]:
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
    dict of str to TargetEvaluation
        By "forces" and "stress", as far as structures have any: `unjudged` says what is missing.
    """
    held_out = {} if validation is None else _learned(model, validation, stages)
    return _evaluations(model, _learned(model, frames, stages), held_out)


def unjudged(model: AtomisticModel, found: Mapping[str, TargetEvaluation]) -> list[str]:
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
) -> TargetEvaluation:
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
    TargetEvaluation
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
) -> TargetEvaluation:
    """Score components of stresses, as `evaluate_forces` does those of forces."""
    found = find_stresses(frames, key or model.settings.stress or "stress")
    return _only("stress", _evaluations(model, _components(model, frames, {}, found, stages)))


def _only(name: str, found: Mapping[str, TargetEvaluation]) -> TargetEvaluation:
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
) -> dict[str, TargetEvaluation]:
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
) -> TargetEvaluation:
    y = found.points.y
    rows = {"raw": score(y, found.points.raw), **calibrated_rows(found.points, held_out, internal)}
    if not internal:
        rows["as the energy"] = score(y, found.own)
    return TargetEvaluation(
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


def evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    validation: Sequence[Atoms] | None = None,
    *,
    stages: Stages | None = None,
) -> dict[str, Evaluation]:
    """Evaluate a model on labelled structures: "energy", and "forces" and "stress" if present."""
    found = {"energy": evaluate_target(model, frames, validation, stages=stages)}
    found |= evaluate_derivatives(model, frames, validation, stages=stages)
    settings = model.settings
    keys = {"energy": settings.target, "forces": settings.forces, "stress": settings.stress}
    return {
        quantity: Evaluation(
            target=keys[quantity] or quantity,
            quantity=quantity,
            y=one.y,
            prediction=one.prediction,
            structure=one.structure,
            atom=one.atom,
            component=one.component,
            component_names=COMPONENT_NAMES.get(quantity, ()),
            units=one.units,
            frames=frames,
            scores=one.rows,
            validation=one.validation,
            n_unlabelled=one.n_unlabelled,
        )
        for quantity, one in found.items()
    }
