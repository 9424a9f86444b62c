"""``qualms evaluate``, and the evaluation of a model or of predictions for `qualms report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from qualms.cli.cluster import open_workers
from qualms.cli.options import (
    READING,
    RUNNING,
    InUnits,
    Json,
    Per,
    Quiet,
    baseline_of,
    description,
    reading,
    with_options,
)
from qualms.cli.terminal import Terminal, naming_files
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
_OF_MODELS = {
    "skip_unknown_species": Annotated[
        bool,
        Option(
            "--skip-unknown-species",
            rich_help_panel="Models",
            help="Leave out structures with elements that are not in the training set.",
        ),
    ],
    **RUNNING,
}
_OF_PREDICTIONS = {
    "calibration_file": Annotated[
        Path | None,
        Option(rich_help_panel="Predictions", help="Also score this file of `qualms calibrate`."),
    ],
    **READING,
}
#: Options of `evaluate_files`.
OPTIONS = {"in_units": InUnits, "per": Per, **_OF_MODELS, **_OF_PREDICTIONS}


@with_options(OPTIONS)
def evaluate(files: Files, quiet: Quiet = False, as_json: Json = False, **options: Any) -> None:
    """Run ``qualms evaluate``."""
    from qualms.report.assessment import assess, with_uncertainty
    from qualms.report.tables import novelty_records, novelty_table, score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    evaluated = evaluate_files(files, terminal, **options)
    documents, remarks = {}, [*evaluated.remarks]
    parts: list[Any] = []
    for name, evaluation in evaluated.evaluations.items():
        target, n = evaluation.target, len(evaluation)
        remarks += [f"{target}: {warning}" for warning in evaluation.checked()]
        points = "points" if evaluation.component is None else "components"
        structures = counted(evaluation.n_structures, "structure")
        title = f"{target}: {n} {points} of {structures}"
        assessment = assess(evaluation)
        parts.append(score_table(evaluation.scores, units=evaluation.units, title=title))
        parts.append(f"{target}: {assessment.sentence}")
        usable, _ = with_uncertainty(evaluation)
        by_novelty = novelty_table(usable, title=f"{target} by novelty")
        parts += [by_novelty] if by_novelty else []
        documents[name] = {
            "key": target,
            "units": evaluation.units,
            "n_points": n,
            "n_structures": evaluation.n_structures,
            "n_unlabelled": evaluation.n_unlabelled,
            "n_unknown_species": evaluation.n_unknown,
            "n_extrapolating": evaluation.n_extrapolating,
            "assessment": assessment.document(),
            "scores": score_records(evaluation.scores),
            "by_novelty": novelty_records(usable),
        }
    main: dict[str, Any] = documents.pop(next(iter(documents)))
    main["target"] = main.pop("key")
    document = {**main, "remarks": remarks, **documents}
    if evaluated.model is not None:
        document["centre"] = evaluated.model.record.centre
    terminal.result(*parts, *remarks, document=document)


class Evaluated(NamedTuple):
    """Evaluations by quantity, the main one first, with remarks about them.

    There is no model if predictions are evaluated; `facts` describe either.
    """

    model: AtomisticModel | None
    evaluations: dict[str, Evaluation]
    remarks: list[str]
    facts: dict[str, str]


def evaluate_files(files: Sequence[Path], terminal: Terminal, **options: Any) -> Evaluated:
    """Evaluate a model on labelled structures, or predictions.

    Parameters
    ----------
    files : sequence of paths
        A model, whose name ends in .safetensors, and structures; or predictions.
    terminal : Terminal
    **options
        Those of `OPTIONS`.
    """
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
        return _evaluate_model(files, terminal, **options)
    return _evaluate_predictions(files, **options)


def _evaluate_model(
    paths: Sequence[Path],
    terminal: Terminal,
    *,
    in_units: str | None,
    per: str | None,
    skip_unknown_species: bool,
    confirm_baseline: str | None,
    baseline_key: str | None,
    skip_failed: bool,
    weights: Path | None,
    threads: int | None,
    cluster: str | None,
    cluster_config: Path | None,
) -> Evaluated:
    from qualms.atomistic import evaluation
    from qualms.atomistic.model import AtomisticModel, summarize
    from qualms.atomistic.structures import read_files
    from qualms.progress import Stages

    model, *test = paths
    if not test:
        raise InputError(
            f"There is no file to evaluate {model} on: name one with labelled structures after it.",
            parameter="TEST",
        )
    baseline = baseline_of(confirm_baseline, baseline_key)
    loaded = AtomisticModel.load(model, threads=threads, baseline=baseline, representation=weights)
    frames, test_files = read_files(test)
    unknown = "skip" if skip_unknown_species else "error"
    with (
        open_workers(cluster, cluster_config, terminal) as executor,
        naming_files(test_files),
    ):
        evaluations = evaluation.evaluate(
            loaded,
            frames,
            units=in_units,
            per=per,
            unknown_species=unknown,
            skip_failed=skip_failed,
            stages=Stages(terminal.progress()),
            executor=executor,
        )
    if not evaluations:
        raise InputError(
            "No structure has a reference value that can be evaluated: all are of structures with "
            "elements that are not in the training set, or are zero by symmetry.",
            parameter="TEST",
        )
    remarks = [*evaluation.notes_on(loaded), *evaluation.remarks_about(loaded, evaluations)]
    return Evaluated(loaded, evaluations, remarks, summarize(loaded.fitted))


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
        **reading(**names),
        order=order or (document.order if document else None),
        by=document.by if document else None,
    )
    points, left_out = usable_points(ensemble)
    options: dict[str, Any] = {
        "frames": sources[0] if isinstance(sources[0], list) else None,
        "units": units or "",
        "in_units": in_units,
        "per": per,
    }
    evaluation = evaluate_ensemble(points, **options)
    scores = {"as predicted": score(evaluation.y, evaluation.prediction)}
    about = description(ensemble)
    remarks = [about, *ensemble.remarks, *left_out, *evaluation.remarks()]
    if document is not None and calibration_file is not None:
        name = f"{calibration_file.name} ({document.method})"
        remarks.append(f"{name}: fitted to {document.parameters.get('n_points')} points.")
        document.check_kind(points)
        prediction = Prediction(mean=points.mean, std=document.std_of(points))
        calibrated = evaluate_ensemble(points, prediction, **options)
        scores[name] = score(calibrated.y, calibrated.prediction)
    evaluations = {points.target: replace(evaluation, scores=scores)}
    return Evaluated(None, evaluations, remarks, {"predictions": about})
