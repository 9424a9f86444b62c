"""``qualms evaluate``, and the evaluation of a model or of predictions for `qualms report`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from qualms.cli._common import (
    READING,
    BaselineKey,
    CalibrationFile,
    ConfirmBaseline,
    InUnits,
    Json,
    Per,
    Quiet,
    SkipFailed,
    Terminal,
    Threads,
    Units,
    Weights,
    baseline_of,
    description,
    reading,
    remarks_about,
)
from qualms.cli.cluster import Cluster, ClusterConfig, Scheduler, SchedulerFile, open_workers
from qualms.cli.verb import naming_files
from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.evaluation import Evaluation

Files = Annotated[
    list[Path],
    Argument(
        metavar="MODEL TEST… | PREDICTIONS",
        help="A model file (.safetensors) and labelled structures; or predictions of any program "
        "with reference values: extended XYZ, .csv, .tsv, .parquet, .npz, .npy or .json.",
    ),
]
_MODELS = "Models"
#: Options of models, of predictions, and of both, with their defaults.
_OF_MODELS = {
    "validation": Annotated[
        Path | None,
        Option(
            rich_help_panel=_MODELS,
            help="Labelled structures for the calibrations that are fitted to a validation set; by "
            "default, two halves of TEST calibrate each other.",
        ),
    ],
    "skip_unknown_species": Annotated[
        bool,
        Option(
            "--skip-unknown-species",
            rich_help_panel=_MODELS,
            help="Leave out structures with elements that are not in the training set.",
        ),
    ],
    "confirm_baseline": ConfirmBaseline,
    "baseline_key": BaselineKey,
    "skip_failed": SkipFailed,
    "weights": Weights,
    "threads": Threads,
    "scheduler": Scheduler,
    "scheduler_file": SchedulerFile,
    "cluster": Cluster,
    "cluster_config": ClusterConfig,
}
_OF_PREDICTIONS = {**READING, "units": Units}
_OF_BOTH = {
    "calibration_file": CalibrationFile,
    "in_units": InUnits,
    "per": Per,
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace ``**options`` of a command by those of `evaluate_files`."""
    own = {**inspect.signature(command, eval_str=True).parameters}
    own.pop("options")
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in (_OF_BOTH | _OF_MODELS | _OF_PREDICTIONS).items()
    ]
    for i, parameter in enumerate(shared):
        if parameter.name in ("skip_unknown_species", "skip_failed"):
            shared[i] = parameter.replace(default=False)
    parameters = [*(p.replace(kind=kind) for p in own.values()), *shared]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return command


@with_options
def evaluate(files: Files, quiet: Quiet = False, as_json: Json = False, **options: Any) -> None:
    """Run ``qualms evaluate``."""
    from qualms.report.assessment import assess
    from qualms.report.tables import score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    found = evaluate_files(files, terminal, **options)
    documents, remarks = {}, [*found.remarks]
    parts: list[Any] = []
    for name, one in found.evaluations.items():
        remarks += [f"{one.target}: {warning}" for warning in one.checked()]
        points = "points" if one.component is None else "components"
        title = f"{one.target}: {len(one)} {points} of {counted(one.n_structures, 'structure')}"
        assessment = assess(one)
        parts.append(score_table(one.scores, units=one.units, title=title))
        parts.append(f"{one.target}: {assessment.sentence}")
        documents[name] = {
            "key": one.target,
            "units": one.units,
            "n_points": len(one),
            "n_structures": one.n_structures,
            "n_unlabelled": one.n_unlabelled,
            "n_unknown_species": one.n_unknown,
            "n_extrapolating": one.n_extrapolating,
            "validation": one.validation,
            "assessment": assessment.document(),
            "scores": score_records(one.scores),
        }
    main: dict[str, Any] = documents.pop(next(iter(documents)))
    main["target"] = main.pop("key")
    notes, document = [*found.notes], {**main, "remarks": remarks, **documents}
    if found.model is not None:
        document["centre"] = found.model.record.centre
        notes.insert(
            0,
            f"Predictions have the share λ = {document['centre']:.2f} of the ensemble mean; the "
            "rest is the full model.",
        )
    terminal.result(*parts, *notes, *remarks, document=document)


class Evaluated(NamedTuple):
    """Evaluations by quantity, the main one first, with remarks, and notes about the scores.

    There is no model if predictions are evaluated; `facts` describe either.
    """

    model: AtomisticModel | None
    evaluations: dict[str, Evaluation]
    remarks: list[str]
    notes: list[str]
    facts: dict[str, str]


def evaluate_files(files: Sequence[Path], terminal: Terminal, **options: Any) -> Evaluated:
    """Evaluate a model on labelled structures, or predictions; a model ends in .safetensors."""
    is_model = files[0].suffix == ".safetensors"
    for name in _OF_PREDICTIONS if is_model else _OF_MODELS:
        if options.pop(name) and name != "threads":
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} is for predictions, and {files[0]} is a model."
                if is_model
                else f"{option} is for models, and {files[0]} has predictions: the name of a model "
                "ends in .safetensors.",
                parameter=option,
            )
    if is_model:
        return _evaluate_model(files[0], files[1:], terminal, **options)
    return _evaluate_predictions(files, **options)


def _evaluate_model(
    model: Path,
    test: Sequence[Path],
    terminal: Terminal,
    *,
    calibration_file: Path | None,
    in_units: str | None,
    per: str | None,
    validation: Path | None,
    skip_unknown_species: bool,
    confirm_baseline: str | None,
    baseline_key: str | None,
    skip_failed: bool,
    weights: Path | None,
    threads: int | None,
    **where: Any,
) -> Evaluated:
    from qualms.atomistic import evaluation
    from qualms.atomistic.model import AtomisticModel, summarize
    from qualms.atomistic.structures import read_files
    from qualms.ensembles.apply import recalibrate
    from qualms.ensembles.calibration_file import read_calibration
    from qualms.metrics import score
    from qualms.progress import Stages

    if not test:
        raise InputError(
            f"There is no file to evaluate {model} on: name one with labelled structures after it.",
            parameter="TEST",
        )
    chosen = baseline_of(confirm_baseline, baseline_key)
    loaded = AtomisticModel.load(model, threads=threads, baseline=chosen, representation=weights)
    frames, test_files = read_files(test)
    unknown = "skip" if skip_unknown_species else "error"
    others = None
    if validation is not None:
        others, files = read_files([validation])
        with naming_files(files):
            evaluation.find_references(
                others,
                loaded.settings,
                loaded.fitted.representation.species,
                unknown_species=unknown,
            )
    document = None if calibration_file is None else read_calibration(calibration_file)
    with open_workers(**where, terminal=terminal) as client, naming_files(test_files):
        found = evaluation.evaluate(
            loaded,
            frames,
            others,
            units=in_units,
            per=per,
            unknown_species=unknown,
            skip_failed=skip_failed,
            stages=Stages(terminal.progress()),
            executor=client,
        )
    main, remarks = found["energy"], remarks_about(loaded, found)
    if calibration_file is not None and document is not None:
        name = f"{calibration_file.name} ({document.method})"
        scores = {**main.scores, name: score(main.y, recalibrate(main, document))}
        found["energy"] = replace(main, scores=scores)
        remarks.append(f"{name}: fitted to {document.parameters.get('n_points')} points.")
    fitted_to = "out-of-bag predictions of the training set."
    note = f"Calibrations were fitted to {fitted_to}"
    if any("(validation)" in name for name in main.scores):
        note = f"(validation): fitted to {main.validation}. All other calibrations were fitted to "
        note += fitted_to
    return Evaluated(loaded, found, remarks, [note], summarize(loaded.fitted))


def _evaluate_predictions(
    files: Sequence[Path],
    *,
    calibration_file: Path | None,
    in_units: str | None,
    per: str | None,
    units: str | None,
    order: str | None,
    **names: Any,
) -> Evaluated:
    from qualms.ensembles.calibrate import evaluate_ensemble, usable_points
    from qualms.ensembles.calibration_file import read_calibration
    from qualms.ensembles.io import read_ensemble, read_source
    from qualms.metrics import score
    from qualms.prediction import Prediction

    document = None if calibration_file is None else read_calibration(calibration_file)
    sources = [read_source(path) for path in files]
    ensemble = read_ensemble(
        sources,
        **reading(names),
        order=order or (document.order if document else None),
        by=document.by if document else None,
    )
    points, left_out = usable_points(ensemble)
    source = sources[0]
    options: dict[str, Any] = {
        "frames": source if isinstance(source, list) else None,
        "units": units or "",
        "in_units": in_units,
        "per": per,
    }
    found = evaluate_ensemble(points, **options)
    scores = {"as predicted": score(found.y, found.prediction)}
    remarks = [*ensemble.remarks, *left_out, *found.remarks()]
    if calibration_file is not None and document is not None:
        document.check_kind(points)
        other = Prediction(mean=points.mean, std=document.std_of(points))
        calibrated = evaluate_ensemble(points, other, **options)
        name = f"{calibration_file.name} ({document.method})"
        scores[name] = score(calibrated.y, calibrated.prediction)
        remarks.append(f"{name}: fitted to {document.parameters.get('n_points')} points.")
    found = replace(found, scores=scores)
    facts = {"predictions": description(ensemble)}
    return Evaluated(None, {points.target: found}, remarks, [facts["predictions"]], facts)
