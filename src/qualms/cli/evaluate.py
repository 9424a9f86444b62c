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
from qualms.errors import InputError, counted
from qualms.external.calibration_file import CalibrationDocument, read_calibration
from qualms.report.tables import score_records, score_table

#: Labels may be alike by chance.
_BY_CHANCE = 0.1


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
    further = {} if calibration is None else _further(calibration, loaded)
    evaluation = evaluate_model(
        loaded, frames, held_out, calibrations=further, stages=Stages(terminal.progress())
    )
    remarks = [r for pair in further.items() for r in _remarks(*pair, loaded, evaluation)]
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


def _further(path: Path, model: AtomisticModel) -> dict[str, CalibrationDocument]:
    """Read a calibration and see that it is one of what the model predicts."""
    document = read_calibration(path)
    kind = "atom" if model.fitted.per_atom else "structure"
    if document.kind != kind or document.by is not None:
        given = f"one of {document.kind}s" + (f", by {document.by}" if document.by else "")
        raise InputError("--calibration", given, f"one of all {kind}s, not by groups")
    if document.target != model.settings.target:
        raise InputError("--calibration", f"one of {document.target}", model.settings.target)
    return {f"{path.name} ({document.method})": document}


def _remarks(
    name: str, document: CalibrationDocument, model: AtomisticModel, evaluation: Evaluation
) -> list[str]:
    """Say what a calibration was fitted to, and if it may have been these very points."""
    n_points = document.parameters.get("n_points", "an unknown number of")
    remarks = [f"{name}: fitted to {n_points} points."]
    seen = document.seen(evaluation.labels)
    if seen > _BY_CHANCE:
        remarks = [
            f"{name}: fitted to {n_points} points, of which about {seen:.0%} have the label of a "
            "point here. If they are the same points, its scores are too good."
        ]
    n_members = model.settings.n_members
    if document.n_members != n_members:
        given = f"{document.n_members} members" if document.n_members else "error bars alone"
        remarks.append(f"{name}: made of {given}, and the model has {n_members} members.")
    return remarks
