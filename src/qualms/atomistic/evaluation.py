"""Scores of a model on new structures, for every calibration: the rows of the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ase import Atoms

from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.structures import check_species, check_structures
from qualms.atomistic.summary import units_of
from qualms.atomistic.targets import labelled
from qualms.core.calibration import METHODS, Calibration, calibration_data, fit_calibration
from qualms.core.calibration.base import MemberTransform
from qualms.core.resampling import group_codes
from qualms.core.scores import Scores, score_arrays
from qualms.core.typing import BoolArray, Float64Array, IntArray
from qualms.errors import CalibrationError
from qualms.prediction import Prediction, score

#: Methods that the paper also fits to a validation set: "CV" and "N-L" in its tables.
_VALIDATED = ("linear", "power")
#: Fewer points than these cannot be divided for a cross-fit.
_MIN_CROSS_FIT = 8


@dataclass(frozen=True)
class Evaluation:
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


def evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    validation: Sequence[Atoms] | None = None,
    *,
    calibrations: Mapping[str, MemberTransform] | None = None,
    stages: Stages | None = None,
) -> Evaluation:
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
    return Evaluation(
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
    `qualms.core.calibration.whole`).
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
