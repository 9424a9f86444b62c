"""Evaluation of a model on labelled structures, with every calibration: the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.labels import find_forces, find_stresses, labelled
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species, check_structures
from qualms.atomistic.training import not_zero_by_symmetry
from qualms.calibration.base import Calibration, calibration_data
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.methods import vector_std
from qualms.errors import CalibrationError
from qualms.evaluation import COMPONENT_NAMES, Evaluation
from qualms.gp.ensemble import ensemble_mean_std, group_codes
from qualms.metrics import Scores, score, score_arrays
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Methods that the paper also fits to a validation set: "CV" and "N-L" in its tables.
_VALIDATED = ("linear", "power")
#: Fewer points than these cannot be split for a cross-fit.
_MIN_CROSS_FIT = 8
#: Structures whose forces are predicted at once.
_CHUNK = 50


@dataclass(frozen=True)
class References:
    """Reference values of one quantity."""

    y: Float64Array  #: (n,): in the units of the data
    structure: IntArray  #: (n,): structure of each value
    atom: IntArray | None  #: (n,): atom of each value; None for properties of structures
    component: IntArray | None  #: (n,): component of each value; None for scalars
    n_unlabelled: int  #: structures, atoms or components without a value


def find_references(
    frames: Sequence[Atoms], settings: Settings, species: Sequence[int]
) -> dict[str, References]:
    """Return the reference values of each quantity, and check the structures that have some.

    Forces and stresses that no structure has are left out. The species are those that the model is
    trained on.
    """
    found = labelled(frames, settings.target, settings.kind, settings.species)
    structure, atom = found.frames, None
    if settings.per_atom:
        structure = np.repeat(structure, [len(rows) for rows in found.rows])
        atom = np.concatenate(found.rows)
    references = {"energy": References(found.values, structure, atom, None, found.n_unlabelled)}
    finders = {"forces": find_forces, "stress": find_stresses}
    for name, find in finders.items():
        key = settings.keys.get(name)
        if key is not None and (values := find(frames, key, required=False)):
            references[name] = _components(values, frames, of_atoms=name == "forces")
    for i in sorted({int(i) for one in references.values() for i in np.unique(one.structure)}):
        check_structures([frames[i]], first=i)
        check_species([frames[i]], species, first=i)
    return references


def _components(
    values: Mapping[int, Float64Array], frames: Sequence[Atoms], *, of_atoms: bool
) -> References:
    """Return the known components of forces (n_atoms, 3) or stresses (6,) by structure."""
    tables = {i: np.atleast_2d(values[i]) for i in sorted(values)}
    known = {i: np.argwhere(np.isfinite(table)) for i, table in tables.items()}
    row, component = np.concatenate([*known.values()]).T
    y = np.concatenate([table[np.isfinite(table)] for table in tables.values()])
    structure = np.repeat(np.array([*known], dtype=np.intp), [len(k) for k in known.values()])
    n_components = 3 * sum(map(len, frames)) if of_atoms else 6 * len(frames)
    missing = n_components - len(y)
    return References(y, structure, row if of_atoms else None, component, missing)


def evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    validation: Sequence[Atoms] | None = None,
    *,
    stages: Stages | None = None,
) -> dict[str, Evaluation]:
    """Score a model with every calibration, and its projected process.

    Parameters
    ----------
    model : AtomisticModel
    frames : sequence of Atoms
        New structures with labels; those without are skipped.
    validation : sequence of Atoms, optional
        Further structures, to fit the calibrations that are not out-of-bag to. Without, these are
        fitted to one half of the structures of `frames` and applied to the other.
    stages : Stages, optional
        Shows the progress.

    Returns
    -------
    dict of str to Evaluation
        "energy", which stands for any target, and "forces" and "stress" if the model was trained on
        them and structures have them. Components that are zero by symmetry are left out.
    """
    stages = stages or Stages()
    test = _predict(model, frames, stages)
    others = {} if validation is None else _predict(model, validation, stages)
    return {name: _evaluate(model, frames, name, test[name], others.get(name)) for name in test}


@dataclass(frozen=True)
class _Points:
    """Reference values y (n,) and their predictions.

    Components of vectors and tensors are multiplied by `ratios` (n,) to be calibrated: see
    `qualms.calibration.methods`. Mean and standard deviation of the projected process are `pp`.
    """

    references: References
    y: Float64Array
    prediction: Prediction
    ratios: Float64Array
    pp: Float64Array | None = None

    @property
    def raw(self) -> Prediction:
        return self.prediction.uncalibrated

    def apply(self, calibration: Calibration, chosen: BoolArray | slice) -> Float64Array:
        """Return calibrated members of the chosen points."""
        scale = self.ratios[chosen, None]
        return np.asarray(calibration.transform(self.raw.members[chosen] * scale) / scale)

    def fit(self, method: str, chosen: BoolArray | slice) -> Calibration:
        """Return a calibration fitted to the chosen points."""
        scale = self.ratios[chosen]
        members = self.raw.members[chosen] * scale[:, None]
        return fit_calibration(calibration_data(self.y[chosen] * scale, members), method)

    def score(self, members: Float64Array) -> Scores:
        """Return the scores of calibrated members."""
        return score(self.y, Prediction(members, uncalibrated=self.raw))


def _evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    name: str,
    test: _Points,
    validation: _Points | None,
) -> Evaluation:
    out_of_bag, references = model.fitted.calibrations.get(name, {}), test.references
    scores = {"raw": score(test.y, test.raw)}
    for method in _VALIDATED:
        members = _validated(test, validation, method)
        if members is not None:
            scores[f"{method} (validation)"] = test.score(members)
    for method in METHODS:
        if method != "none" and method in out_of_bag:
            members = test.apply(out_of_bag[method], slice(None))
            scores[f"{method} (out-of-bag)"] = test.score(members)
    if not out_of_bag:
        scores["as the energy"] = score(test.y, test.prediction)
    if test.pp is not None:
        scores["GPR PP"] = score_arrays(test.y, *test.pp)
    other_half = "the other half of the test set"
    return Evaluation(
        target=model.settings.keys[name],
        quantity=name,
        y=test.y,
        prediction=test.prediction,
        structure=references.structure,
        atom=references.atom,
        component=references.component,
        component_names=COMPONENT_NAMES.get(name, ()),
        units=model.settings.units_of(name),
        frames=frames,
        scores=scores,
        validation=f"{len(validation.y)} validation points" if validation else other_half,
        n_unlabelled=references.n_unlabelled,
    )


def _validated(test: _Points, validation: _Points | None, method: str) -> Float64Array | None:
    """Return members calibrated on other points than those that are scored, if possible."""
    structure = test.references.structure
    try:
        if validation is not None:
            return test.apply(validation.fit(method, slice(None)), slice(None))
        if len(test.y) < _MIN_CROSS_FIT or len(np.unique(structure)) < 2:
            return None
        even = group_codes(structure, len(test.y)) % 2 == 0
        members = np.empty(np.shape(test.raw.members))
        for half in (even, ~even):
            members[half] = test.apply(test.fit(method, ~half), half)
        return members
    except CalibrationError:
        return None


def _predict(model: AtomisticModel, frames: Sequence[Atoms], stages: Stages) -> dict[str, _Points]:
    """Predict everything that has a reference value."""
    references = find_references(frames, model.settings, model.fitted.representation.species)
    found = {"energy": _predict_target(model, frames, references.pop("energy"), stages)}
    if references:
        found |= _predict_derivatives(model, frames, references, stages)
    return found


def _predict_target(
    model: AtomisticModel, frames: Sequence[Atoms], references: References, stages: Stages
) -> _Points:
    """Predict averages over atoms, or atoms."""
    fitted, indices = model.fitted, np.unique(references.structure)
    used = [frames[i] for i in indices]
    members, pp, done = [], [], 0
    with stages.stage("Predictions", len(used)) as advance:
        for chunk in model.stream(used):
            K_XM, design = chunk.rows(), chunk.design
            members.append(fitted.members(K_XM, design))
            if fitted.pp_variance is not None:
                std = fitted.pp_variance.std(K_XM, chunk.prior_variance())
                pp.append((fitted.pp_mean(K_XM, design), std))
            done += len(chunk.frames)
            advance(done)
    y, rows = references.y, np.arange(len(references.y))
    if model.settings.kind == "extensive":
        y = y / [len(atoms) for atoms in used]
    if references.atom is not None:  # atoms of the target's species without a label are predicted
        span = max(map(len, used))
        pairs = zip(indices, model.target_atoms(used), strict=True)
        predicted = np.concatenate([i * span + atoms for i, atoms in pairs])
        rows = np.flatnonzero(np.isin(predicted, references.structure * span + references.atom))
    prediction = Prediction(np.concatenate(members)[rows]).calibrated(fitted.calibration)
    mean_and_std = np.concatenate(pp, axis=1)[:, rows] if pp else None
    return _Points(references, y, prediction, np.ones(len(y)), mean_and_std)


def _predict_derivatives(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    references: Mapping[str, References],
    stages: Stages,
) -> dict[str, _Points]:
    """Predict forces and stresses; each structure once, with its stress if that has a reference."""
    structures = {name: {*one.structure.tolist()} for name, one in references.items()}
    with_stress = structures.get("stress", set())
    rest = set().union(*structures.values()) - with_stress
    predicted: dict[str, dict[int, Prediction]] = {name: {} for name in references}
    done = 0
    with stages.stage("Forces", len(with_stress) + len(rest)) as advance:
        for used, stress in ((sorted(with_stress), True), (sorted(rest), False)):
            for start in range(0, len(used), _CHUNK):
                some = used[start : start + _CHUNK]
                found = model.predict_forces([frames[i] for i in some], stress=stress)
                for i, one in zip(some, found, strict=True):
                    for name in references:
                        if i in structures[name]:
                            predicted[name][i] = getattr(one, name)
                done += len(some)
                advance(done)
    points = {name: _known_components(one, predicted[name]) for name, one in references.items()}
    return {name: one for name, one in points.items() if one is not None}


def _known_components(
    references: References, predicted: Mapping[int, Prediction]
) -> _Points | None:
    """Collect components that have a reference value and are not zero by symmetry."""
    assert references.component is not None
    order = sorted(predicted)
    k = predicted[order[0]].shape[-1]

    def stacked(members: Iterable[Float64Array]) -> Float64Array:
        return np.concatenate([m.reshape(-1, k, m.shape[-1]) for m in members])

    raw = stacked(np.asarray(predicted[i].uncalibrated.members) for i in order)
    own = stacked(np.asarray(predicted[i].members) for i in order)
    first = np.cumsum([0, *(predicted[i].mean.size // k for i in order)])
    rows = first[np.searchsorted(order, references.structure)]
    rows = rows + (0 if references.atom is None else references.atom)
    apart = not_zero_by_symmetry(references.y, raw[rows, references.component])
    if not apart.any():
        return None
    rows, component = rows[apart], references.component[apart]
    atom = None if references.atom is None else references.atom[apart]
    y, structure = references.y[apart], references.structure[apart]
    kept = References(y, structure, atom, component, references.n_unlabelled)
    plain = Prediction(raw[rows, component])
    ratios = vector_std(ensemble_mean_std(raw)[1])[rows] / plain.std
    return _Points(kept, y, Prediction(own[rows, component], uncalibrated=plain), ratios)
