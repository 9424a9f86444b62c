"""``qualms evaluate``: a model judged on labelled structures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qualms.atomistic.evaluation import Evaluation
from qualms.atomistic.evaluation import evaluate as evaluate_model
from qualms.atomistic.force_evaluation import evaluate_derivatives, unjudged
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.structures import read_frames
from qualms.cli.console import Terminal
from qualms.cli.options import Json, Model, Quiet, Threads
from qualms.errors import counted
from qualms.external.for_models import calibration_for
from qualms.report.tables import score_records, score_table


def evaluate(
    model: Model,
    test: Annotated[Path, typer.Argument(metavar="TEST", help="Labelled structures.")],
    validation: Annotated[
        Path | None,
        typer.Option(help="Labelled structures to fit the calibrations that are not internal to."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibration of the model's predictions, by `qualms calibrate`."),
    ] = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score a model with every calibration, and its projected process, as in the paper's tables."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    loaded = AtomisticModel.load(model, threads=threads)
    frames = read_frames(test)
    held_out = None if validation is None else read_frames(validation)
    further = [] if calibration is None else [calibration_for(calibration, loaded, frames)]
    evaluation = evaluate_model(
        loaded,
        frames,
        held_out,
        calibrations={one.name: one for one in further},
        stages=Stages(terminal.progress()),
    )
    remarks = [remark for one in further for remark in one.remarks(evaluation)]
    if evaluation.n_unlabelled:
        terminal.say(f"{evaluation.n_unlabelled} without a label are skipped.")
    table = score_table(
        evaluation.rows,
        units=evaluation.units,
        title=f"{loaded.settings.target}: {counted(len(evaluation.y), 'point')}",
    )
    derived = evaluate_derivatives(loaded, frames, held_out, stages=Stages(terminal.progress()))
    keys = {"forces": loaded.settings.forces, "stress": loaded.settings.stress}
    for text in unjudged(loaded, derived):
        terminal.say(text)
    note = f"(validation): fitted to {evaluation.validation}; (internal): to the training set."
    terminal.result(
        table,
        *(_table(keys[name], one) for name, one in derived.items()),
        note,
        *remarks,
        document={
            "target": loaded.settings.target,
            "units": evaluation.units,
            "n_points": len(evaluation.y),
            "n_unlabelled": evaluation.n_unlabelled,
            "validation": evaluation.validation,
            "scores": score_records(evaluation.rows),
            "remarks": remarks,
            **{name: _document(keys[name], one) for name, one in derived.items()},
        },
    )


def _table(key: str | None, found: Evaluation) -> Any:
    title = f"{key}: {len(found.y)} components of {counted(found.n_structures, 'structure')}"
    return score_table(found.rows, units=found.units, title=title)


def _document(key: str | None, found: Evaluation) -> dict[str, Any]:
    return {
        "key": key,
        "units": found.units,
        "n_points": len(found.y),
        "n_structures": found.n_structures,
        "n_unlabelled": found.n_unlabelled,
        "validation": found.validation,
        "scores": score_records(found.rows),
    }
