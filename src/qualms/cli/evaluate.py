"""``qualms evaluate``, and the evaluation of a model for `qualms report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.cli._common import Json, Model, Quiet, Terminal, Threads, missing_quantities

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.evaluation import Evaluation

Test = Annotated[Path, Argument(metavar="TEST", help="Labelled structures: extended XYZ.")]
Validation = Annotated[
    Path | None,
    Option(
        help="Labelled structures for the calibrations that are fitted to a validation set; by "
        "default, two halves of TEST calibrate each other."
    ),
]
CalibrationFile = Annotated[
    Path | None, Option("--calibration", help="Also score this file of `qualms calibrate`.")
]


def evaluate(
    model: Model,
    test: Test,
    validation: Validation = None,
    calibration: CalibrationFile = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms evaluate``."""
    from qualms.errors import counted
    from qualms.report.tables import score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    loaded, found, remarks = evaluate_model(model, test, validation, calibration, threads, terminal)
    centre = loaded.record.centre
    tables, documents = [], {}
    for name, one in found.items():
        points = "points" if one.component is None else "components"
        title = f"{one.target}: {len(one)} {points} of {counted(one.n_structures, 'structure')}"
        tables.append(score_table(one.scores, units=one.units, title=title))
        documents[name] = {
            "key": one.target,
            "units": one.units,
            "n_points": len(one),
            "n_structures": one.n_structures,
            "n_unlabelled": one.n_unlabelled,
            "validation": one.validation,
            "scores": score_records(one.scores),
        }
    main: dict[str, Any] = documents.pop("energy")
    main["target"] = main.pop("key")
    terminal.result(
        *tables,
        f"Predictions have the share λ = {centre:.2f} of the ensemble mean; the rest is the full "
        "model.",
        about_calibrations(found["energy"]),
        *remarks,
        document={**main, "centre": centre, "remarks": remarks, **documents},
    )


def evaluate_model(
    model: Path,
    test: Path,
    validation: Path | None,
    calibration: Path | None,
    threads: int | None,
    terminal: Terminal,
) -> tuple[AtomisticModel, dict[str, Evaluation], list[str]]:
    """Return a model, its evaluations by quantity, and remarks about them."""
    from qualms.atomistic import evaluation
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.structures import read_frames
    from qualms.ensembles.apply import recalibrate
    from qualms.ensembles.calibration_file import read_calibration
    from qualms.errors import counted
    from qualms.metrics import score_arrays
    from qualms.progress import Stages

    loaded = AtomisticModel.load(model, threads=threads)
    frames = read_frames(test)
    held_out = None if validation is None else read_frames(validation)
    document = None if calibration is None else read_calibration(calibration)
    found = evaluation.evaluate(loaded, frames, held_out, stages=Stages(terminal.progress()))
    main, remarks = found["energy"], missing_quantities(loaded, found)
    if main.n_unlabelled:
        what = "atom" if loaded.settings.per_atom else "structure"
        skipped = counted(main.n_unlabelled, what)
        remarks.insert(0, f"{skipped} without a reference value: skipped.")
    if calibration is not None and document is not None:
        name = f"{calibration.name} ({document.method})"
        other = recalibrate(main, document, extensive=loaded.settings.kind == "extensive")
        scores = {**main.scores, name: score_arrays(main.y, other.mean, other.std)}
        found["energy"] = replace(main, scores=scores)
        remarks.append(f"{name}: fitted to {document.parameters.get('n_points')} points.")
    return loaded, found, remarks


def about_calibrations(evaluation: Evaluation) -> str:
    """Return what the calibrations in the table of scores were fitted to."""
    if not any("(validation)" in name for name in evaluation.scores):
        return "Calibrations were fitted to out-of-bag predictions of the training set."
    return (
        f"(validation): fitted to {evaluation.validation}. All other calibrations were fitted to "
        "out-of-bag predictions of the training set."
    )
