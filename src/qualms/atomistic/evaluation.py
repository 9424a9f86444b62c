"""Evaluation of a model on labelled structures, with every calibration: the paper's tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.atomistic.delta import BaselinePotential
from qualms.atomistic.labels import find_forces, find_stresses, labelled
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.out_of_bag import not_zero_by_symmetry
from qualms.atomistic.parts import Part, divided
from qualms.atomistic.predictions import Request, StructurePrediction
from qualms.atomistic.quantities import KINDS, TARGET
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_structures, symbols_of
from qualms.calibration.members import calibrated_members
from qualms.calibration.methods import MODEL_METHODS, STD_METHODS, fit_calibration
from qualms.calibration.points import calibration_data
from qualms.calibration.vectors import (
    MULTIPLICITY,
    QuantityCalibration,
    component_share,
    vector_std,
)
from qualms.errors import CalibrationError, InputError, QualmsWarning, counted, unknown_choice
from qualms.evaluation import COMPONENT_NAMES, Evaluation, energy_factor
from qualms.execution import Workers, as_workers
from qualms.gp.ensemble import ensemble_mean_std, group_codes
from qualms.gp.sparse_gp import whiten
from qualms.metrics import Scores, score
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Methods that the paper also fits to a validation set: "CV" and "N-L" in its tables.
_VALIDATED = tuple(method for method in STD_METHODS if method != "none")
#: Fewer points than these cannot be split for a cross-fit.
_MIN_CROSS_FIT = 8
#: Representatives of kernel principal components.
_N_LEADING = 500
#: Structures whose forces are predicted at once, and averages in a task.
_CHUNK, _PART = 50, 500


@dataclass(frozen=True)
class References:
    """Reference values of one quantity."""

    y: Float64Array  #: (n,): in the units of the data
    structure: IntArray  #: (n,): structure of each value
    atom: IntArray | None  #: (n,): atom of each value; None for properties of structures
    component: IntArray | None  #: (n,): component of each value; None for scalars
    n_unlabelled: int  #: structures, atoms or components without a value
    n_unknown: int = 0  #: structures with unknown species, which are left out

    def some(self, chosen: BoolArray) -> References:
        """Return the chosen values."""
        atom, component = (None if x is None else x[chosen] for x in (self.atom, self.component))
        y, structure = self.y[chosen], self.structure[chosen]
        return replace(self, y=y, structure=structure, atom=atom, component=component)


def find_references(
    frames: Sequence[Atoms],
    settings: Settings,
    species: Sequence[int],
    *,
    unknown_species: str = "error",
) -> dict[str, References]:
    """Return the reference values of each quantity, and check the structures that have some.

    Forces and stresses that no structure has are left out. The species are those that the model is
    trained on; structures with others are an error, or left out (``unknown_species="skip"``).
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
    used = sorted({int(i) for one in references.values() for i in np.unique(one.structure)})
    for i in used:
        check_structures([frames[i]], first=i)
    others = {i: {*frames[i].numbers.tolist()} - {*species} for i in used}
    unknown = [i for i in used if others[i]]
    if unknown and (unknown_species == "error" or len(unknown) == len(used)):
        elements = symbols_of(sorted(set().union(*others.values())))
        raise InputError(
            f"Structure {unknown[0]} is one of {len(unknown)} (of {len(used)}) that contain "
            f"{elements}; the model was trained on {symbols_of(species)}. Leave such structures "
            "out with `unknown_species='skip'`, or train with these elements.",
            parameter="frames",
        )
    kept = {name: one.some(~np.isin(one.structure, unknown)) for name, one in references.items()}
    return {n: replace(one, n_unknown=len(unknown)) for n, one in kept.items() if len(one.y)}


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
    units: str | None = None,
    per: str | None = None,
    unknown_species: str = "error",
    skip_failed: bool = False,
    stages: Stages | None = None,
    executor: Executor | Any | None = None,
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
    units : str, optional
        Units of energy to evaluate in, such as meV; those of the model by default.
    per : {"atom", "structure"}, optional
        Whether to evaluate extensive properties per atom, the default, or per structure.
    unknown_species : {"error", "skip"}
        Structures with elements that are not in the training set are rejected or left out.
    skip_failed : bool
        Whether structures for which the reference potential of the baseline fails are left out with
        a warning, rather than an error.
    stages : Stages, optional
        Shows the progress.
    executor : concurrent.futures.Executor or dask.distributed.Client, optional
        Workers that predict, each task on one core.

    Returns
    -------
    dict of str to Evaluation
        "energy", which stands for any target, and "forces" and "stress" if the model was trained on
        them and structures have them. Components that are zero by symmetry are left out.
    """
    stages = stages or Stages()
    if per not in (None, "atom", "structure"):
        raise unknown_choice("per", per, ("atom", "structure"))
    if per is not None and model.settings.kind != "extensive":
        raise InputError(
            f"`per` is for extensive properties, such as energies of structures; the target "
            f"{model.settings.target!r} is {model.settings.kind}.",
            parameter="per",
        )
    for name in model.settings.keys:
        energy_factor(model.settings.units_of(name), units)  # before any work
    predictor = _Predictor.of(model, executor, stages)
    test = _predict(predictor, frames, unknown_species, skip_failed)
    others = {}
    if validation is not None:
        others = _predict(predictor, validation, unknown_species, skip_failed)
    calibrations = {}
    for method in MODEL_METHODS:
        with suppress(CalibrationError):
            calibrations[method] = model.fitted.with_calibration(method).calibrations
    return {
        name: _evaluate(model, frames, name, test[name], others.get(name), calibrations, units, per)
        for name in test
    }


def kernel_components(model: AtomisticModel, frames: Sequence[Atoms]) -> list[Float64Array]:
    """Return the first two kernel principal components of structures, or of atoms.

    They are those of the kernel that the first representatives, which are the most different ones,
    span. Their signs are such that the largest component is positive.

    Returns
    -------
    list of (1, 2) or (n_atoms, 2) arrays
        For a property of structures, or of atoms; NaN for atoms that are not predicted.
    """
    basis = model.fitted.basis
    first = model.fitted.representatives[:_N_LEADING]
    # Rows of features in single precision are rounded.
    whitening = whiten(basis.environment_rows(first)[:, :_N_LEADING], rtol=1e-6)
    K_XM, centers = [], []
    for chunk in model.chunks(frames):
        K_XM.append(chunk.rows()[:, whitening.pivots])
        centers += chunk.centers
    Phi = np.asarray(whitening.features(np.concatenate(K_XM)), dtype=np.float64)
    U, s, _ = np.linalg.svd(Phi - Phi.mean(axis=0), full_matrices=False)
    scores = np.zeros((len(Phi), 2))
    scores[:, : U.shape[1]] = (U * s)[:, :2]
    scores *= np.where(scores.max(axis=0) < -scores.min(axis=0), -1.0, 1.0)
    if not model.fitted.per_atom:
        return list(scores[:, None])
    found, start = [], 0
    for atoms, chosen in zip(frames, centers, strict=True):
        rows = np.full((len(atoms), 2), np.nan)
        rows[chosen] = scores[start : start + len(chosen)]
        found.append(rows)
        start += len(chosen)
    return found


@dataclass(frozen=True)
class _Points:
    """Reference values y (n,) and their predictions.

    `members` are those of all points before calibration: (n, N_R), or (v, k, N_R) of v vectors or
    tensors, whose vector and component the points are in `place`. The first `n_subsampled` are
    trained on subsamples; σ of vectors has an `isotropy`. Points, or vectors, that belong to atoms
    have the `symbols` of these. Estimates by the projected process, mean
    and standard deviation (2, n), are in `processes`; `extrapolating` are structures that are out
    of distribution.
    """

    references: References
    y: Float64Array
    prediction: Prediction
    members: Float64Array
    n_subsampled: int
    place: tuple[IntArray, IntArray] | None = None
    isotropy: float = 0.0
    symbols: StrArray | None = None
    novelty_std: Float64Array | None = None
    processes: Mapping[str, Float64Array] = field(default_factory=dict)
    extrapolating: Sequence[int] | None = None

    @property
    def raw(self) -> Float64Array:
        """Subsampled members, not calibrated: (n, N_R)."""
        members = self.members if self.place is None else self.members[self.place]
        return members[:, : self.n_subsampled]

    def apply(self, of: QuantityCalibration) -> Float64Array:
        """Return calibrated members: (n, N_R)."""
        factors = None if self.symbols is None else of.factors(self.symbols)
        members = calibrated_members(
            of.calibration,
            self.members,
            novelty_std=self.novelty_std,
            isotropy=None if self.place is None else of.isotropy,
            factors=factors,
        )
        return members if self.place is None else members[self.place]

    def fit(self, method: str, chosen: BoolArray | slice) -> QuantityCalibration:
        """Return a calibration of the subsampled members, fitted to the chosen points."""
        data = calibration_data(self.y[chosen], self.raw[chosen])
        if self.place is not None:
            vector, component = (index[chosen][data.rows] for index in self.place)
            r = vector_std(ensemble_mean_std(self.members[..., : self.n_subsampled])[1])[vector]
            m = MULTIPLICITY[self.members.shape[1]]
            share = component_share(data.ensemble_std, r, self.isotropy, m[component] / m.mean())
            data = replace(data, residuals=data.residuals / share, ensemble_std=r)
        calibration = replace(fit_calibration(data, method), n_subsampled=self.n_subsampled)
        return QuantityCalibration(calibration, self.isotropy)

    def some(self, chosen: BoolArray) -> _Points:
        """Return the chosen points."""
        place = self.place
        return replace(
            self,
            references=self.references.some(chosen),
            y=self.y[chosen],
            prediction=self.prediction[chosen],
            members=self.members[chosen] if place is None else self.members,
            place=None if place is None else (place[0][chosen], place[1][chosen]),
            symbols=self.symbols if place or self.symbols is None else self.symbols[chosen],
            novelty_std=None if self.novelty_std is None else self.novelty_std[chosen],
            processes={name: values[:, chosen] for name, values in self.processes.items()},
        )


def _evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    name: str,
    test: _Points,
    validation: _Points | None,
    calibrations: Mapping[str, Mapping[str, QuantityCalibration]],
    units: str | None,
    per: str | None,
) -> Evaluation:
    raw = Prediction(test.raw)
    known = (test.prediction.std > 0) & (raw.std > 0)  # others have no score
    if not known.all():
        n_lost = int(np.count_nonzero(~known))
        text = f"{n_lost} of {len(known)} points have σ = 0; they are left out."
        if not known.any():
            message = f"The uncertainty of all {counted(n_lost, 'point')} is zero: no scores."
            raise InputError(message, parameter="frames")
        warnings.warn(text, QualmsWarning, stacklevel=2)
        test, raw = test.some(known), raw[known]
    references = test.references
    settings, sizes = model.settings, np.ones(len(test.y))
    factor, of_units = energy_factor(settings.units_of(name), units)
    factors = np.full(len(test.y), factor)
    if name == "energy" and settings.kind == "extensive":
        sizes = np.array([len(frames[i]) for i in references.structure], dtype=np.float64)
        if per == "structure":
            factors, of_units = factor * sizes, energy_factor(settings.units, units)[1]
    y, raw = test.y * factors, raw * factors

    def scored(prediction: Prediction) -> Scores:
        return score(y, prediction * factors)

    scores = {"raw": score(y, raw)}
    for method in _VALIDATED:
        members = _validated(test, validation, method)
        if members is not None:
            scores[f"{method} (validation)"] = scored(Prediction(members))
    for method in MODEL_METHODS:
        if method == model.fitted.settings.calibration and name in model.fitted.calibrations:
            if method != "none":
                scores[f"{method} (out-of-bag)"] = scored(test.prediction)
        elif method != "none" and name in model.fitted.points:
            of = calibrations.get(method, {}).get(name)
            if of is not None:
                scores[f"{method} (out-of-bag)"] = scored(Prediction(test.apply(of)))
    if name not in model.fitted.calibrations:
        scores["as the energy"] = scored(test.prediction)
    for name_of_process, (mean, std) in test.processes.items():
        scores[name_of_process] = scored(Prediction(mean=mean, std=std))
    flags = test.extrapolating
    other_half = "the other half of the test set"
    return Evaluation(
        target=settings.keys[name],
        quantity=name,
        y=y,
        prediction=Prediction(
            test.prediction.members * factors[:, None],
            uncalibrated=raw,
            conformal=test.prediction.conformal,
            dof=test.prediction.dof,
        ),
        structure=references.structure,
        atom=references.atom,
        component=references.component,
        component_names=COMPONENT_NAMES.get(name, ()),
        units=of_units,
        factor=factors / sizes,
        frames=frames,
        scores=scores,
        validation=f"{len(validation.y)} validation points" if validation else other_half,
        n_unlabelled=references.n_unlabelled,
        n_unknown=references.n_unknown,
        extrapolates=None if flags is None else np.isin(references.structure, flags),
    )


def _validated(test: _Points, validation: _Points | None, method: str) -> Float64Array | None:
    """Return members calibrated on other points than those that are scored, if possible."""
    structure = test.references.structure
    try:
        if validation is not None:
            return test.apply(validation.fit(method, slice(None)))
        if len(test.y) < _MIN_CROSS_FIT or len(np.unique(structure)) < 2:
            return None
        even = group_codes(structure, len(test.y)) % 2 == 0
        of_even, of_odd = (test.apply(test.fit(method, half)) for half in (even, ~even))
        return np.where(even[:, None], of_odd, of_even)
    except CalibrationError:
        return None


class _Predictor(NamedTuple):
    """A model, and workers that share a copy of it."""

    model: AtomisticModel
    shared: Any
    workers: Workers
    stages: Stages

    @classmethod
    def of(cls, model: AtomisticModel, executor: Any, stages: Stages) -> _Predictor:
        if executor is None:
            return cls(model, model, Workers(None, model.threads), stages)
        workers = as_workers(executor)
        workers.check()
        other = copy(model)
        other.threads = workers.threads
        return cls(model, workers.share(other), workers, stages)

    def map(
        self, task: Callable[..., Any], frames: Sequence[Atoms], size: int, *options: Any
    ) -> Iterator[Any]:
        """Yield what tasks return for parts of the structures, in order."""
        for found in self.workers.map(task, divided(frames, size), self.shared, *options):
            yield from found


def _predict(
    predictor: _Predictor, frames: Sequence[Atoms], unknown_species: str, skip_failed: bool
) -> dict[str, _Points]:
    """Predict everything that has a reference value."""
    model, stages = predictor.model, predictor.stages
    species = model.fitted.representation.species
    options = {"unknown_species": unknown_species}
    references = find_references(frames, model.settings, species, **options)
    if model.reference is not None:
        with stages.stage("Baseline"):
            references = _computable(model.reference, frames, references, skip_failed)
    found = {"energy": _predict_target(predictor, frames, references.pop("energy"))}
    if references:
        found |= _predict_derivatives(predictor, frames, references)
    return found


def _computable(
    potential: BaselinePotential,
    frames: Sequence[Atoms],
    references: Mapping[str, References],
    skip_failed: bool,
) -> dict[str, References]:
    """Compute the reference potential, and leave out structures for which it fails."""
    used = np.unique(np.concatenate([one.structure for one in references.values()]))
    stressed = np.isin(used, references["stress"].structure if "stress" in references else ())
    failed = []
    for chosen, stress in ((used[stressed], True), (used[~stressed], False)):
        values = potential.evaluate(
            [frames[i] for i in chosen],
            forces="forces" in references,
            stress=stress,
            indices=chosen.tolist(),
            skip_failed=skip_failed,
        )
        failed += chosen[np.isnan(values.energies)].tolist()
    if len(failed) == len(used):
        message = f"The baseline, {potential.name}, failed for all labelled structures."
        raise InputError(message, parameter="baseline")
    return {name: one.some(~np.isin(one.structure, failed)) for name, one in references.items()}


def _predict_part(part: Part, model: AtomisticModel, request: Request) -> list[StructurePrediction]:
    """Return the predictions of a part, as a task of a worker."""
    return list(model.stream(part.frames, request))


def _predict_target(
    predictor: _Predictor, frames: Sequence[Atoms], references: References
) -> _Points:
    """Predict averages over atoms, or atoms."""
    model, fitted = predictor.model, predictor.model.fitted
    indices = np.unique(references.structure)
    used = [frames[i] for i in indices]
    found: list[StructurePrediction] = []
    done, request = 0, Request(process=True)
    with predictor.stages.stage("Predictions", len(used)) as advance:
        results = model.stream(used, request)
        if predictor.workers.executor is not None:
            results = predictor.map(_predict_part, used, _PART, request)
        for batch in results:
            found.append(batch)
            advance(done := done + len(batch.parts.frames))
    y, rows = references.y, np.arange(len(references.y))
    if model.settings.kind == "extensive":
        y = y / [len(atoms) for atoms in used]
    if references.atom is not None:  # atoms of the target's species without a label are predicted
        span = max(map(len, used))
        pairs = zip(indices, model.target_atoms(used), strict=True)
        predicted = np.concatenate([i * span + atoms for i, atoms in pairs])
        rows = np.flatnonzero(np.isin(predicted, references.structure * span + references.atom))
    raw, q = np.concatenate([batch.uncalibrated.members for batch in found]), None
    if model.settings.kind == "extensive":
        raw = raw / np.array([len(atoms) for atoms in used])[:, None]
    raw = raw[rows]
    processes = {}
    if fitted.pp_variance is not None:
        of_batches = [batch.parts.process for batch in found if batch.parts.process is not None]
        mean, p2, q2 = np.concatenate(of_batches, axis=1)[:, rows]
        noise = fitted.pp_variance.noise_variance * fitted.pp_variance.variance
        processes["GPR PP"] = np.stack([mean, np.sqrt(p2 + q2 + noise)])
        processes["GPR PP, posterior part"] = np.stack([mean, np.sqrt(p2)])
        novelty = [b.parts.novelty_std for b in found if b.parts.novelty_std is not None]
        q = np.concatenate(novelty)[rows] if novelty else None
    numbers = None
    if references.atom is not None:
        pairs = zip(references.structure, references.atom, strict=True)
        numbers = np.array([frames[i].numbers[j] for i, j in pairs])
    return _Points(
        references=references,
        y=y,
        prediction=fitted.calibrated(TARGET, raw, numbers=numbers, novelty_std=q),
        symbols=None if numbers is None else np.array(chemical_symbols)[numbers],
        members=raw,
        n_subsampled=fitted.settings.n_subsampled or raw.shape[1],
        novelty_std=q,
        processes=processes,
        extrapolating=indices[np.concatenate([b.extrapolates for b in found])].tolist(),
    )


def _predict_derivatives(
    predictor: _Predictor, frames: Sequence[Atoms], references: Mapping[str, References]
) -> dict[str, _Points]:
    """Predict forces and stresses; each structure once, with its stress if that has a reference."""
    structures = {name: {*one.structure.tolist()} for name, one in references.items()}
    with_stress = structures.get("stress", set())
    rest = set().union(*structures.values()) - with_stress
    predicted: dict[str, dict[int, Prediction]] = {name: {} for name in references}
    done = 0
    with predictor.stages.stage("Forces", len(with_stress) + len(rest)) as advance:
        for used, stress in ((sorted(with_stress), True), (sorted(rest), False)):
            request = Request(forces=True, stress=stress, novelty=False)
            batches = predictor.map(_predict_part, [frames[i] for i in used], _CHUNK, request)
            remaining = iter(used)
            for batch in batches:
                for s in range(len(batch.parts.frames)):
                    i, of_structure = next(remaining), batch.structure(s)
                    for name in references:
                        if i in structures[name]:
                            predicted[name][i] = getattr(of_structure, name)
                advance(done := done + len(batch.parts.frames))
    fitted = predictor.model.fitted
    points: dict[str, _Points] = {}
    for name, one in references.items():
        known = _known_components(one, predicted[name], fitted.settings.n_subsampled)
        if known is not None:
            of = fitted.calibrations.get(name)
            symbols = None
            if KINDS[name].of_atoms:
                numbers = np.concatenate([frames[i].numbers for i in sorted(predicted[name])])
                symbols = np.array(chemical_symbols)[numbers]
            isotropy = 0.0 if of is None else of.isotropy
            points[name] = replace(known, isotropy=isotropy, symbols=symbols)
    return points


def _known_components(
    references: References, predicted: Mapping[int, Prediction], n_subsampled: int
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
    kept = references.some(apart)
    return _Points(
        references=kept,
        y=kept.y,
        prediction=Prediction(
            own[rows, component],
            uncalibrated=Prediction(raw[rows, component]),
            conformal=predicted[order[0]].conformal,
            dof=predicted[order[0]].dof,
        ),
        members=raw,
        n_subsampled=n_subsampled or raw.shape[-1],
        place=(np.asarray(rows, dtype=np.intp), component),
    )
