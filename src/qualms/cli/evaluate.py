"""``qualms evaluate``: a model judged on labelled structures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qualms.atomistic.evaluation import Evaluation
from qualms.atomistic.evaluation import evaluate as evaluate_model
from qualms.atomistic.force_evaluation import evaluate_forces
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
    of_forces = None
    if loaded.settings.forces is not None:
        of_forces = evaluate_forces(loaded, frames, stages=Stages(terminal.progress()))
    note = f"(validation): fitted to {evaluation.validation}; (internal): to the training set."
    parts = [] if of_forces is None else [_forces_table(loaded, of_forces)]
    terminal.result(
        table,
        *parts,
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
            **({} if of_forces is None else _forces_document(loaded, of_forces)),
        },
    )


def _forces_table(model: AtomisticModel, of_forces: Evaluation) -> Any:
    title = f"{model.settings.forces}: {len(of_forces.y)} components"
    return score_table(of_forces.rows, units=of_forces.units, title=title)


def _forces_document(model: AtomisticModel, of_forces: Evaluation) -> dict[str, Any]:
    document = {
        "key": model.settings.forces,
        "units": of_forces.units,
        "n_points": len(of_forces.y),
        "n_unlabelled": of_forces.n_unlabelled,
        "scores": score_records(of_forces.rows),
    }
    return {"forces": document}
