"""Evaluation of a model on labelled structures, with every calibration: the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.labels import find_forces, find_stresses, has_label, labelled
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species, check_structures
from qualms.atomistic.training import not_zero_by_symmetry
from qualms.calibration.base import Calibration, calibration_data
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.methods import whole_spread
from qualms.errors import CalibrationError
from qualms.evaluation import COMPONENT_NAMES, Evaluation
from qualms.gp.ensemble import committee, group_codes
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
    """Reference values of one quantity.

    Attributes
    ----------
    y : (n,) array
        In the units of the data.
    structure, atom, component : (n,) arrays of int
        What they belong to; atom or component are None where there is none.
    n_unlabelled : int
        Structures, atoms or components without a value.
    """

    y: Float64Array
    structure: IntArray
    atom: IntArray | None
    component: IntArray | None
    n_unlabelled: int


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
    for name, key in settings.keys.items():
        if name != "energy" and has_label(frames, name, key):
            values = finders[name](frames, key)
            if values:
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
    y = np.concatenate([table.ravel() for table in tables.values()])
    sizes = [table.size for table in tables.values()]
    structure = np.repeat(np.array(list(tables), dtype=np.intp), sizes)
    indices = [np.indices(table.shape).reshape(2, -1) for table in tables.values()]
    row, component = np.concatenate(indices, axis=1)
    known = np.isfinite(y)
    n_components = 3 * sum(map(len, frames)) if of_atoms else 6 * len(frames)
    return References(
        y[known],
        structure[known],
        row[known] if of_atoms else None,
        component[known],
        n_components - int(np.count_nonzero(known)),
    )


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
        Trained.
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
    """Reference values and their predictions.

    Components of vectors and tensors are multiplied by `ratios` (n,) to be calibrated: see
    `qualms.calibration.methods`. Mean and standard deviation `pp` are of the projected process.
    """

    references: References
    y: Float64Array
    raw: Prediction
    calibrated: Prediction
    ratios: Float64Array
    pp: tuple[Float64Array, Float64Array] | None = None

    @property
    def structure(self) -> IntArray:
        return self.references.structure

    def apply(self, calibration: Calibration, chosen: BoolArray | slice) -> Float64Array:
        """Return calibrated members of the chosen points."""
        scale = self.ratios[chosen, None]
        return np.asarray(calibration.transform(self.raw.members[chosen] * scale) / scale)

    def fit(self, method: str, chosen: BoolArray | slice) -> Calibration:
        """Return a calibration fitted to the chosen points."""
        scale = self.ratios[chosen]
        members = self.raw.members[chosen] * scale[:, None]
        return fit_calibration(calibration_data(self.y[chosen] * scale, members), method)


def _evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    name: str,
    test: _Points,
    validation: _Points | None,
) -> Evaluation:
    fitted, settings = model.fitted, model.settings
    out_of_bag = fitted.calibrations.get(name, {})
    scores = {"raw": score(test.y, test.raw)}
    for method in _VALIDATED:
        members = _validated(test, validation, method)
        if members is not None:
            scores[f"{method} (validation)"] = _score(test, members)
    for method in METHODS:
        if method != "none" and method in out_of_bag:
            members = test.apply(out_of_bag[method], slice(None))
            scores[f"{method} (out-of-bag)"] = _score(test, members)
    if not out_of_bag:
        scores["as the energy"] = score(test.y, test.calibrated)
    if test.pp is not None:
        scores["GPR PP"] = score_arrays(test.y, *test.pp)
    return Evaluation(
        target=settings.keys[name],
        quantity=name,
        y=test.y,
        prediction=test.calibrated,
        structure=test.structure,
        atom=test.references.atom,
        component=test.references.component,
        component_names=COMPONENT_NAMES.get(name, ()),
        units=settings.units_of(name),
        frames=frames,
        scores=scores,
        validation="the other half of the test set"
        if validation is None
        else f"{len(validation.y)} validation points",
        n_unlabelled=test.references.n_unlabelled,
    )


def _score(test: _Points, members: Float64Array) -> Scores:
    return score(test.y, Prediction(members, uncalibrated=test.raw))


def _validated(test: _Points, validation: _Points | None, method: str) -> Float64Array | None:
    """Return members calibrated on other points than those that are scored, if possible."""
    try:
        if validation is not None:
            return test.apply(validation.fit(method, slice(None)), slice(None))
        if len(test.y) < _MIN_CROSS_FIT or len(np.unique(test.structure)) < 2:
            return None
        even = group_codes(test.structure, len(test.y)) % 2 == 0
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
    fitted = model.fitted
    indices = np.unique(references.structure)
    used = [frames[i] for i in indices]
    members, means, stds, done = [], [], [], 0
    with stages.stage("Predictions", len(used)) as advance:
        for chunk in model.stream(used):
            K_XM, design = chunk.rows(), chunk.design
            members.append(fitted.members(K_XM, design))
            if fitted.pp_variance is not None:
                means.append(fitted.pp_mean(K_XM, design))
                stds.append(fitted.pp_variance.std(K_XM, chunk.prior_variance()))
            done += len(chunk.frames)
            advance(done)
    labelled_rows: slice | BoolArray = slice(None)
    if references.atom is not None:  # atoms of the target's species without a label are predicted
        atoms = model.target_atoms(used)
        keys = zip(indices, atoms, strict=True)
        wanted = {*zip(references.structure.tolist(), references.atom.tolist(), strict=True)}
        pairs = [(int(i), int(a)) for i, some in keys for a in some]
        labelled_rows = np.array([pair in wanted for pair in pairs], dtype=bool)
    sizes = np.ones(len(references.y))
    if model.settings.kind == "extensive":
        sizes = np.array([len(atoms) for atoms in used], dtype=np.float64)
    raw = Prediction(np.concatenate(members)[labelled_rows])
    return _Points(
        references,
        references.y / sizes,
        raw,
        raw.calibrated(fitted.calibration),
        np.ones(len(references.y)),
        (np.concatenate(means)[labelled_rows], np.concatenate(stds)[labelled_rows])
        if means
        else None,
    )


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
    parts = [(sorted(with_stress), True), (sorted(rest), False)]
    raw: dict[str, dict[int, Float64Array]] = {name: {} for name in references}
    calibrated: dict[str, dict[int, Float64Array]] = {name: {} for name in references}
    done = 0
    with stages.stage("Forces", sum(len(used) for used, _ in parts)) as advance:
        for used, stress in parts:
            for start in range(0, len(used), _CHUNK):
                some = used[start : start + _CHUNK]
                predicted = model.predict_forces([frames[i] for i in some], stress=stress)
                for i, one in zip(some, predicted, strict=True):
                    for name in (name for name in references if i in structures[name]):
                        values: Prediction = getattr(one, name)
                        k = 3 if name == "forces" else 6
                        shape = (-1, k, values.n_members)
                        raw[name][i] = values.uncalibrated.members.reshape(shape)
                        calibrated[name][i] = values.members.reshape(shape)
                done += len(some)
                advance(done)
    found = {
        name: _known_components(one, raw[name], calibrated[name])
        for name, one in references.items()
    }
    return {name: points for name, points in found.items() if points is not None}


def _known_components(
    references: References,
    raw: Mapping[int, Float64Array],
    calibrated: Mapping[int, Float64Array],
) -> _Points | None:
    """Collect components that have a reference value and are not zero by symmetry."""
    order = sorted(raw)
    members, own = (np.concatenate([found[i] for i in order]) for found in (raw, calibrated))
    assert references.component is not None
    first = dict(zip(order, np.cumsum([0, *(len(raw[i]) for i in order)]).tolist(), strict=False))
    rows = np.array([first[i] for i in references.structure.tolist()], dtype=np.intp)
    rows += 0 if references.atom is None else references.atom
    places = (rows, references.component)
    apart = not_zero_by_symmetry(references.y, members[places])
    if not apart.any():
        return None
    rows, component = rows[apart], references.component[apart]
    kept = replace(
        references,
        y=references.y[apart],
        structure=references.structure[apart],
        atom=None if references.atom is None else references.atom[apart],
        component=component,
    )
    prediction = Prediction(members[rows, component])
    ratios = whole_spread(committee(members)[1])[rows] / prediction.std
    return _Points(
        kept,
        kept.y,
        prediction,
        Prediction(own[rows, component], uncalibrated=prediction),
        ratios,
    )
