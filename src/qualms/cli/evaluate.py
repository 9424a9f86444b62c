"""``qualms evaluate``: a model judged on labelled structures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qualms.atomistic.evaluation import Evaluation, unjudged
from qualms.cli._common import Json, Model, Quiet, Terminal, Threads, judge
from qualms.errors import counted
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
    found = judge(model, test, validation, calibration, threads, terminal)
    loaded, evaluation, derived = found.model, found.evaluation, found.derived
    if evaluation.n_unlabelled:
        terminal.say(f"{evaluation.n_unlabelled} without a label are skipped.")
    table = score_table(
        evaluation.rows,
        units=evaluation.units,
        title=f"{loaded.settings.target}: {counted(len(evaluation.y), 'point')}",
    )
    keys = {"forces": loaded.settings.forces, "stress": loaded.settings.stress}
    for text in unjudged(loaded, derived):
        terminal.say(text)
    note = f"(validation): fitted to {evaluation.validation}; (internal): to the training set."
    terminal.result(
        table,
        *(_table(keys[name], one) for name, one in derived.items()),
        note,
        *found.remarks,
        document={
            "target": loaded.settings.target,
            "units": evaluation.units,
            "n_points": len(evaluation.y),
            "n_unlabelled": evaluation.n_unlabelled,
            "validation": evaluation.validation,
            "scores": score_records(evaluation.rows),
            "remarks": found.remarks,
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
