"""Evaluation of a model on labelled structures, with every calibration: the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.delta import BaselinePotential
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.kernel_rows import normalized
from qualms.atomistic.labels import find_forces, find_stresses, labelled
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predictions import Request, StructurePrediction
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import Part, check_structures, divided_among, symbols_of
from qualms.atomistic.training import not_zero_by_symmetry
from qualms.calibration.methods import MODEL_METHODS
from qualms.calibration.sequential import calibration_scores
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
    unknown_species: str | None = "error",
) -> dict[str, References]:
    """Return the reference values of each quantity, and check the structures that have some.

    Forces and stresses that no structure has are left out.

    Parameters
    ----------
    frames : sequence of Atoms
    settings : Settings
    species : sequence of int
        Atomic numbers that the model is trained on.
    unknown_species : {"error", "skip"}, optional
        Whether structures with other species are an error, or left out. None is an error as well,
        for callers that cannot leave them out.
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
    if unknown and (unknown_species != "skip" or len(unknown) == len(used)):
        how = " with `unknown_species='skip'`" if unknown_species == "error" else ""
        elements = symbols_of(sorted(set().union(*others.values())))
        raise InputError(
            f"Structure {unknown[0]} is one of {len(unknown)} (of {len(used)}) that contain "
            f"{elements}; the model was trained on {symbols_of(species)}. Leave such structures "
            f"out{how}, or train with these elements.",
            parameter="frames",
        )
    usable = {}
    for name, reference in references.items():
        has_known_species = ~np.isin(reference.structure, unknown)
        if has_known_species.any():
            usable[name] = replace(reference.some(has_known_species), n_unknown=len(unknown))
    return usable


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
    unknown_species: str | None = "error",
    skip_failed: bool = False,
    compare: bool = True,
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
    unknown_species : {"error", "skip"}, optional
        Structures with elements that are not in the training set are rejected or left out; see
        `find_references`.
    skip_failed : bool
        Whether structures for which the baseline potential fails are left out with
        a warning, rather than an error.
    compare : bool
        Whether other calibrations, and the projected process, have scores as well.
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
    if model.baseline_potential is not None:
        with stages.stage("Baseline"):
            references = _computable(model.baseline_potential, frames, references, skip_failed)
    used = np.unique(np.concatenate([of.structure for of in references.values()]))
    structures = [frames[i] for i in used]
    prediction = _predict(
        model, structures, references, stages, as_workers(executor), process=compare
    )
    others = {}
    for method in MODEL_METHODS if compare else ():
        if method not in ("none", fitted.settings.calibration):
            with suppress(CalibrationError):
                others[method] = fitted.with_calibration(method)
    evaluations = {}
    for name, of in references.items():
        evaluation = _evaluate_quantity(
            name, of, used, prediction, model, others, frames, units=units, per=per
        )
        if evaluation is not None:
            evaluations[name] = evaluation
    return evaluations


def out_of_bag_scores(model: AtomisticModel, quantity: str | None = None) -> Float64Array:
    """Return ⟨z²/σ²⟩ of each out-of-bag structure: the reference of a `CalibrationTest`.

    Parameters
    ----------
    model : AtomisticModel
    quantity : str, optional
        "forces" by default, if the model has calibrated them, or else "energy", which stands for
        any target.
    """
    name = _calibrated_quantity(model, quantity)
    points = model.out_of_bag[name]
    assert points.structure is not None
    std = model.fitted.calibrations[name].std_of(points)
    return calibration_scores(points.residuals, std, points.structure)


def label_scores(
    model: AtomisticModel, frames: Sequence[Atoms], quantity: str | None = None
) -> Float64Array:
    """Return ⟨z²/σ²⟩ of each new structure, for `CalibrationTest.update`.

    Parameters
    ----------
    model : AtomisticModel
    frames : sequence of Atoms
        Structures with labels, all of which the quantity must have.
    quantity : str, optional
        See `out_of_bag_scores`.
    """
    name = _calibrated_quantity(model, quantity)
    of = evaluate(model, frames, quantities=[name], unknown_species=None, compare=False).get(name)
    labelled = () if of is None else np.unique(of.structure)
    if of is None or len(labelled) < len(frames):
        first = next(i for i in range(len(frames)) if i not in labelled)
        key = model.settings.keys[name]
        raise InputError(
            f"Structure {first} has no {name} under the key {key!r} that could be compared with "
            "the prediction.",
            parameter="frames",
        )
    return calibration_scores(of.residuals, of.prediction.std, of.structure)


def _calibrated_quantity(model: AtomisticModel, quantity: str | None) -> str:
    """Return the quantity whose calibration is tested."""
    names = [name for name in ("forces", TARGET) if name in model.fitted.calibrations]
    names = [name for name in names if name in model.out_of_bag]
    if quantity is None and names:
        return names[0]
    if quantity is None:
        raise InputError("The model has no calibration that could be tested.", parameter="model")
    if quantity not in names:
        raise unknown_choice("quantity", quantity, names)
    return quantity


def remarks_about(model: AtomisticModel, evaluations: Mapping[str, Evaluation]) -> list[str]:
    """Return remarks about the evaluation of a model: what is left out, and extrapolation."""
    missing = [
        f"No structure has {key!r} that is not zero by symmetry: {name} is not evaluated."
        for name, key in model.settings.keys.items()
        if name not in evaluations
    ]
    doubts = [evaluation.doubt for evaluation in evaluations.values() if evaluation.doubt]
    return [*next(iter(evaluations.values())).remarks(), *doubts, *missing]


def notes_on(model: AtomisticModel) -> list[str]:
    """Return sentences about predictions and calibrations of a model, for reports."""
    share = f"Predictions have the share λ = {model.record.centre:.2f} of the ensemble mean; the "
    note = "Calibrations were fitted to out-of-bag predictions of the training set."
    return [f"{share}rest is the full model.", note]


class Nearest(NamedTuple):
    """The representatives that are most similar to each environment of a structure."""

    centers: IntArray  #: (c,): atoms whose environments are used
    structure: IntArray  #: (c, n): number of the training structure, as given to `fit`
    atom: IntArray  #: (c, n): its atom
    similarity: Float64Array  #: (c, n): normalised kernel, from 0 to 1, decreasing


def nearest_environments(
    model: AtomisticModel, frames: Iterable[Atoms], n: int = 3
) -> list[Nearest]:
    """Return the training environments that are most similar to those of each structure.

    They are representatives: a model has no other environments of its training set.
    """
    basis, origins = model.fitted.basis, model.fitted.origins
    of_representatives = basis.kernel.diag(basis.representatives)
    nearest = []
    for chunk in model.chunks(frames):
        starts = chunk.batch.offsets
        for centers, first, last in zip(chunk.centers, starts[:-1], starts[1:], strict=True):
            X = chunk.batch.features[first:last]
            K = basis.kernel(X, basis.representatives)
            K = normalized(K, basis.kernel.diag(X), of_representatives)
            best = np.argsort(-K, axis=1, kind="stable")[:, :n]
            similarity = np.clip(np.take_along_axis(K, best, axis=1), 0, 1).astype(np.float64)
            nearest.append(Nearest(centers, origins[best, 0], origins[best, 1], similarity))
    return nearest


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
    *,
    process: bool,
) -> StructurePrediction:
    """Predict all quantities that have reference values, in one pass."""
    derivatives = {name: name in references for name in DERIVATIVES}
    has_derivatives = any(derivatives.values())
    request = Request(**derivatives, process=process and not has_derivatives)
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
    """Compute the baseline potential, and leave out structures for which it fails."""
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


def _evaluate_quantity(
    name: str,
    references: References,
    used: IntArray,
    prediction: StructurePrediction,
    model: AtomisticModel,
    others: Mapping[str, Fitted],
    frames: Sequence[Atoms],
    *,
    units: str | None,
    per: str | None,
) -> Evaluation | None:
    """Score the prediction of a quantity, and those of models with other calibrations.

    Values that are zero by symmetry are left out; None if all are.

    Parameters
    ----------
    name : str
    references : References
    used : array of int
        Numbers of the structures that are predicted.
    prediction : StructurePrediction
    model : AtomisticModel
    others : mapping of str to Fitted
        The model with other methods of calibration, by method.
    frames : sequence of Atoms
        All structures.
    units : str, optional
        Units of energy to evaluate in.
    per : {"atom", "structure"}, optional
        Whether an extensive target is per atom or per structure.
    """
    fitted, settings, parts = model.fitted, model.settings, prediction.parts
    structure = np.searchsorted(used, references.structure)
    rows, numbers = prediction.offsets_of(name)[structure], None
    if references.atom is not None:
        centers = parts.centers or []
        numbers = np.concatenate(
            [atoms.numbers[c] for atoms, c in zip(parts.frames, centers, strict=True)]
        )
        places = references.atom
        if name == TARGET:
            pairs = zip(structure, references.atom, strict=True)
            places = np.array([np.searchsorted(centers[s], a) for s, a in pairs], dtype=np.intp)
        rows = rows + places
    predicted: Prediction = getattr(prediction, name)
    sizes = np.ones(predicted.shape[0])
    if name == TARGET and settings.kind == "extensive":  # calibrated per atom
        sizes = np.array([len(atoms) for atoms in parts.frames], dtype=np.float64)
        predicted = predicted / sizes
    place = (rows,) if references.component is None else (rows, references.component)
    members, calibrated = predicted.uncalibrated.members[place], predicted[place]
    raw = Prediction(members[:, : fitted.settings.n_subsampled or members.shape[1]])
    chosen = np.ones(len(rows), dtype=bool)
    if KINDS[name].is_derivative:
        chosen = not_zero_by_symmetry(references.y, members)
        if not chosen.any():
            return None
    has_score, n_points = (calibrated.std > 0) & (raw.std > 0), int(np.count_nonzero(chosen))
    n_lost = int(np.count_nonzero(chosen & ~has_score))
    if n_lost == n_points:
        message = f"The uncertainty of all {counted(n_lost, 'point')} is zero: no scores."
        raise InputError(message, parameter="frames")
    if n_lost:
        warn(f"{n_lost} of {n_points} points have σ = 0; they are left out.")
    chosen &= has_score
    references, rows = references.some(chosen), rows[chosen]
    calibrated, raw = calibrated[chosen], raw[chosen]
    sizes = sizes[rows]
    per_structure = name == TARGET and per == "structure"
    factor, units = energy_factor(
        settings.units if per_structure else settings.units_of(name), units
    )
    factors = factor * sizes if per_structure else np.full(len(rows), factor)
    y = references.y / sizes * factors
    scores = {"raw": score(y, raw * factors)}
    for method in MODEL_METHODS:
        if method in others and name in others[method].calibrations:
            by_method = others[method].calibrated(
                name,
                predicted.uncalibrated.members,
                numbers=numbers,
                novelty_std=parts.novelty_std if name == TARGET else None,
            )
            scores[f"{method} (out-of-bag)"] = score(y, by_method[place][chosen] * factors)
        elif method == fitted.settings.calibration != "none" and name in fitted.calibrations:
            scores[f"{method} (out-of-bag)"] = score(y, calibrated * factors)
    if name not in fitted.calibrations:
        scores["as the energy"] = score(y, calibrated * factors)
    if name == TARGET and parts.process is not None:
        mean, p, std = parts.process[:, rows] / sizes * factors
        scores["GPR PP"] = score(y, Prediction(mean=mean, std=std))
        scores["GPR PP, posterior part"] = score(y, Prediction(mean=mean, std=p))
    return Evaluation(
        target=settings.keys[name],
        quantity=name,
        y=y,
        prediction=Prediction(
            calibrated.members * factors[:, None],
            uncalibrated=raw * factors,
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
        extrapolates=prediction.extrapolates[structure[chosen]],
        reasons={
            i: reason for i, reason in zip(used.tolist(), prediction.reasons, strict=True) if reason
        },
        novelty=prediction.novelty[structure[chosen]],
        doubt=model.record.quantities[name].doubt(settings.keys[name]),
    )
