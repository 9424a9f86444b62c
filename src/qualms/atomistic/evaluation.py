"""Evaluation of a model on labelled structures, with every calibration: the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.delta import BaselinePotential
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.labels import find_forces, find_stresses, labelled
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import Request, StructurePrediction
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import Part, check_structures, divided_among, symbols_of
from qualms.atomistic.training import not_zero_by_symmetry
from qualms.calibration.methods import MODEL_METHODS
from qualms.errors import CalibrationError, InputError, counted, unknown_choice, warn
from qualms.evaluation import Evaluation, energy_factor
from qualms.execution import Workers, as_workers
from qualms.gp.sparse_gp import whiten
from qualms.metrics import score
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Representatives of kernel principal components.
_N_LEADING = 500


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

    Forces and stresses that no structure has are left out.

    Parameters
    ----------
    frames : sequence of Atoms
    settings : Settings
    species : sequence of int
        Atomic numbers that the model is trained on.
    unknown_species : {"error", "skip"}
        Whether structures with other species are an error, or left out.
    """
    labels = labelled(frames, settings.target, settings.kind, settings.species)
    structure, atom = labels.frames, None
    if settings.per_atom:
        structure = np.repeat(structure, [len(rows) for rows in labels.rows])
        atom = np.concatenate(labels.rows)
    references = {TARGET: References(labels.values, structure, atom, None, labels.n_unlabelled)}
    finders = dict(zip(DERIVATIVES, (find_forces, find_stresses), strict=True))
    for name, find in finders.items():
        key = settings.keys.get(name)
        if key is not None and (values := find(frames, key, required=False)):
            references[name] = _components(values, frames, of_atoms=KINDS[name].of_atoms)
    used = sorted(
        {int(i) for reference in references.values() for i in np.unique(reference.structure)}
    )
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
    kept = {
        name: reference.some(~np.isin(reference.structure, unknown))
        for name, reference in references.items()
    }
    return {
        n: replace(reference, n_unknown=len(unknown))
        for n, reference in kept.items()
        if len(reference.y)
    }


def _components(
    values: Mapping[int, Float64Array], frames: Sequence[Atoms], *, of_atoms: bool
) -> References:
    """Return the known components of forces (n_atoms, 3) or stresses (6,) by structure."""
    tables = {i: np.atleast_2d(values[i]) for i in sorted(values)}
    places = {i: np.argwhere(np.isfinite(table)) for i, table in tables.items()}
    row, component = np.concatenate([*places.values()]).T
    y = np.concatenate([table[np.isfinite(table)] for table in tables.values()])
    structure = np.repeat(np.array([*places], dtype=np.intp), [len(k) for k in places.values()])
    n_components = 3 * sum(map(len, frames)) if of_atoms else 6 * len(frames)
    missing = n_components - len(y)
    return References(y, structure, row if of_atoms else None, component, missing)


def evaluate(
    model: AtomisticModel,
    frames: Sequence[Atoms],
    *,
    quantities: Sequence[str] | None = None,
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
    quantities : sequence of str, optional
        Quantities to evaluate; all that the model was trained on by default.
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
    stages, settings, fitted = stages or Stages(), model.settings, model.fitted
    if per not in (None, "atom", "structure"):
        raise unknown_choice("per", per, ("atom", "structure"))
    if per is not None and settings.kind != "extensive":
        raise InputError(
            f"`per` is for extensive properties, such as energies of structures; the target "
            f"{settings.target!r} is {settings.kind}.",
            parameter="per",
        )
    for name in settings.keys:
        energy_factor(settings.units_of(name), units)  # before any work
    species = fitted.representation.species
    references = find_references(frames, settings, species, unknown_species=unknown_species)
    if quantities is not None:
        references = {name: references[name] for name in quantities if name in references}
        if not references:
            return {}
    if model.reference is not None:
        with stages.stage("Baseline"):
            references = _computable(model.reference, frames, references, skip_failed)
    used = np.unique(np.concatenate([of.structure for of in references.values()]))
    structures = [frames[i] for i in used]
    prediction = _predict(model, structures, references, stages, as_workers(executor))
    others = {}
    for method in MODEL_METHODS:
        if method not in ("none", fitted.settings.calibration):
            with suppress(CalibrationError):
                others[method] = fitted.with_calibration(method)
    evaluations = {}
    for name, of in references.items():
        points = _select(name, of, used, prediction, fitted)
        if points is not None:
            scale = energy_factor(settings.units_of(name), units)
            if name == TARGET and per == "structure":
                scale = energy_factor(settings.units, units)
            evaluations[name] = points.evaluate(model, frames, others, *scale, per=per)
    return evaluations


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
    components, start = [], 0
    for atoms, chosen in zip(frames, centers, strict=True):
        rows = np.full((len(atoms), 2), np.nan)
        rows[chosen] = scores[start : start + len(chosen)]
        components.append(rows)
        start += len(chosen)
    return components


def _predict(
    model: AtomisticModel,
    structures: Sequence[Atoms],
    references: Mapping[str, References],
    stages: Stages,
    workers: Workers,
) -> StructurePrediction:
    """Predict all quantities that have reference values, in one pass."""
    derivatives = {name: name in references for name in DERIVATIVES}
    has_derivatives = any(derivatives.values())
    request = Request(**derivatives, process=not has_derivatives)
    batches: list[StructurePrediction] = []
    done = 0
    with stages.stage("Predictions", len(structures)) as advance:
        results: Iterable[StructurePrediction] = model.stream(structures, request)
        if workers.executor is not None:
            workers.check()
            other = copy(model)
            other.threads = workers.threads
            parts = divided_among(structures, workers.number)
            tasks = workers.map(_predict_part, parts, workers.share(other), request)
            results = (batch for part in tasks for batch in part)
        for batch in results:
            batches.append(batch)
            advance(done := done + len(batch.parts.frames))
    return StructurePrediction.join(batches)


def _predict_part(part: Part, model: AtomisticModel, request: Request) -> list[StructurePrediction]:
    """Return the predictions of a part, as a task of a worker."""
    return list(model.stream(part.frames, request))


def _computable(
    potential: BaselinePotential,
    frames: Sequence[Atoms],
    references: Mapping[str, References],
    skip_failed: bool,
) -> dict[str, References]:
    """Compute the reference potential, and leave out structures for which it fails."""
    used = np.unique(np.concatenate([of.structure for of in references.values()]))
    stressed = np.isin(used, references["stress"].structure if "stress" in references else ())
    failed = []
    for some, stress in ((used[stressed], True), (used[~stressed], False)):
        values = potential.evaluate(
            [frames[i] for i in some],
            forces="forces" in references,
            stress=stress,
            indices=some.tolist(),
            skip_failed=skip_failed,
        )
        failed += some[np.isnan(values.energies)].tolist()
    if len(failed) == len(used):
        message = f"The baseline, {potential.name}, failed for all labelled structures."
        raise InputError(message, parameter="baseline")
    return {name: of.some(~np.isin(of.structure, failed)) for name, of in references.items()}


@dataclass(frozen=True)
class _Points:
    """Reference values of a quantity, and the prediction that they are compared with."""

    quantity: str
    references: References
    y: Float64Array  #: (n,): per atom if the target is extensive
    prediction: Prediction  #: (m,) or (v, k): of all values, or of all vectors or tensors
    place: tuple[IntArray, ...]  #: where each of the n values is in it
    numbers: IntArray | None  #: (m,) or (v,): atomic numbers, if the quantity belongs to atoms
    novelty_std: Float64Array | None  #: (m,): q
    processes: Mapping[str, Float64Array]  #: (2, n): mean and σ of the projected process
    extrapolates: BoolArray  #: (n,)

    def some(self, which: BoolArray) -> _Points:
        """Return the points where a mask (n,) is true."""
        return replace(
            self,
            references=self.references.some(which),
            y=self.y[which],
            place=tuple(index[which] for index in self.place),
            processes={name: values[:, which] for name, values in self.processes.items()},
            extrapolates=self.extrapolates[which],
        )

    def raw(self, fitted: Fitted) -> Prediction:
        """Return the members that are trained on subsamples, or all, before calibration."""
        members = self.prediction.uncalibrated.members[self.place]
        return Prediction(members[:, : fitted.settings.n_subsampled or members.shape[1]])

    def calibrated(self, fitted: Fitted) -> Prediction:
        """Return the prediction by a model with another calibration."""
        prediction = fitted.calibrated(
            self.quantity,
            self.prediction.uncalibrated.members,
            numbers=self.numbers,
            novelty_std=self.novelty_std,
        )
        return prediction[self.place]

    def evaluate(
        self,
        model: AtomisticModel,
        frames: Sequence[Atoms],
        others: Mapping[str, Fitted],
        factor: float,
        units: str,
        *,
        per: str | None,
    ) -> Evaluation:
        """Score the prediction, and those of models with other calibrations.

        Parameters
        ----------
        model : AtomisticModel
        frames : sequence of Atoms
        others : mapping of str to Fitted
            The model with other methods of calibration, by method.
        factor : float
            From the units of the model to `units`.
        units : str
            Of the values in the evaluation.
        per : {"atom", "structure"}, optional
            Whether an extensive target is per atom or per structure.
        """
        fitted, name = model.fitted, self.quantity
        has_score = (self.prediction[self.place].std > 0) & (self.raw(fitted).std > 0)
        if not has_score.all():
            n_lost = int(np.count_nonzero(~has_score))
            if n_lost == len(has_score):
                message = f"The uncertainty of all {counted(n_lost, 'point')} is zero: no scores."
                raise InputError(message, parameter="frames")
            warn(f"{n_lost} of {len(has_score)} points have σ = 0; they are left out.")
            return self.some(has_score).evaluate(model, frames, others, factor, units, per=per)
        references, sizes = self.references, np.ones(len(self.y))
        if name == TARGET and model.settings.kind == "extensive":
            sizes = np.array([len(frames[i]) for i in references.structure], dtype=np.float64)
        factors = factor * sizes if per == "structure" else np.full(len(self.y), factor)
        y, raw, calibrated = (
            self.y * factors,
            self.raw(fitted) * factors,
            self.prediction[self.place],
        )
        scores = {"raw": score(y, raw)}
        for method in MODEL_METHODS:
            if method in others and name in others[method].calibrations:
                predicted = self.calibrated(others[method])
                scores[f"{method} (out-of-bag)"] = score(y, predicted * factors)
            elif method == fitted.settings.calibration != "none" and name in fitted.calibrations:
                scores[f"{method} (out-of-bag)"] = score(y, calibrated * factors)
        if name not in fitted.calibrations:
            scores["as the energy"] = score(y, calibrated * factors)
        for process, (mean, std) in self.processes.items():
            scores[process] = score(y, Prediction(mean=mean, std=std) * factors)
        return Evaluation(
            target=model.settings.keys[name],
            quantity=name,
            y=y,
            prediction=Prediction(
                calibrated.members * factors[:, None],
                uncalibrated=raw,
                conformal=calibrated.conformal,
                dof=calibrated.dof,
            ),
            structure=references.structure,
            atom=references.atom,
            component=references.component,
            component_names=KINDS[name].components,
            units=units,
            factor=factors / sizes,
            frames=frames,
            scores=scores,
            n_unlabelled=references.n_unlabelled,
            n_unknown=references.n_unknown,
            extrapolates=self.extrapolates,
        )


def _select(
    name: str,
    references: References,
    used: IntArray,
    prediction: StructurePrediction,
    fitted: Fitted,
) -> _Points | None:
    """Return the points of a quantity that have reference values, and are not zero by symmetry.

    Predictions are of the structures with the numbers `used`.
    """
    structure, parts = np.searchsorted(used, references.structure), prediction.parts
    y, numbers, processes = references.y, None, {}
    if name == TARGET:
        centers, offsets = parts.centers or [], prediction.offsets_of(TARGET)
        rows, sizes = structure, np.array([len(c) for c in centers], dtype=np.float64)
        if references.atom is not None:
            pairs = zip(structure, references.atom, strict=True)
            rows = offsets[structure] + [np.searchsorted(centers[s], a) for s, a in pairs]
            numbers = np.concatenate(
                [atoms.numbers[c] for atoms, c in zip(parts.frames, centers, strict=True)]
            )
        place: tuple[IntArray, ...] = (rows,)
        of, factors = prediction.energy, np.ones(prediction.shape)
        if fitted.settings.kind == "extensive":
            y, factors = y / sizes[structure], sizes
            of = of / sizes
        if parts.process is not None:
            mean, p, std = (parts.process / factors)[:, rows]
            processes = {"GPR PP": [mean, std], "GPR PP, posterior part": [mean, p]}
    else:
        of = getattr(prediction, name)
        assert references.component is not None
        rows = prediction.offsets_of(name)[structure]
        if references.atom is not None:
            rows = rows + references.atom
            numbers = np.concatenate([atoms.numbers for atoms in parts.frames])
        place = rows, references.component
    points = _Points(
        quantity=name,
        references=references,
        y=y,
        prediction=of,
        place=place,
        numbers=numbers,
        novelty_std=parts.novelty_std if name == TARGET else None,
        processes={process: np.stack(values) for process, values in processes.items()},
        extrapolates=prediction.extrapolates[structure],
    )
    if KINDS[name].is_derivative:
        differs = not_zero_by_symmetry(y, of.uncalibrated.members[place])
        return points.some(differs) if differs.any() else None
    return points
