"""``qualms report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qualms.cli._common import Force, Json, Model, Quiet, Terminal, Threads
from qualms.cli.evaluate import (
    CalibrationFile,
    Test,
    Validation,
    about_calibrations,
    evaluate_model,
)

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.report.structure_map import AtomValues


def report(
    model: Model,
    test: Test,
    output: Annotated[Path, Option("--output", "-o", help="File to write: .html.")],
    validation: Validation = None,
    calibration: CalibrationFile = None,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms report``."""
    from qualms.atomistic.model import summarize
    from qualms.io.files import check_not_input
    from qualms.report.report import check_report, write_report
    from qualms.report.tables import interval_records, interval_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    for path in check_report(output, force=force):
        check_not_input(path, model, test, validation, calibration)
    loaded, found, remarks = evaluate_model(model, test, validation, calibration, threads, terminal)
    main = found["energy"]
    written = write_report(
        output,
        found,
        title=f"{main.target}: {model.name} on {test.name}",
        facts=summarize(loaded.fitted),
        remarks=[*remarks, about_calibrations(main)],
        atom_values=_atom_values(loaded, main.frames or ()),
        force=force,
    )
    parts: list[Any] = []
    documents: dict[str, Any] = {}
    for name, section in written.sections.items():
        one, assessment = section.evaluation, section.assessment
        parts += [f"{one.target}: {assessment.sentence}", *assessment.details]
        parts.append(interval_table(assessment.scores, units=one.units, title=one.target))
        documents[name] = {
            "units": one.units,
            "n_points": len(one),
            "assessment": assessment.document(),
            "scores": interval_records(assessment.scores),
        }
    paths = [str(path) for path in written.paths]
    terminal.result(
        *parts,
        *written.remarks,
        f"Wrote {', '.join(paths)}.",
        document={
            "output": paths,
            "target": main.target,
            "n_unlabelled": main.n_unlabelled,
            "remarks": list(written.remarks),
            **documents.pop("energy"),
            **documents,
        },
    )


def _atom_values(model: AtomisticModel, frames: Sequence[Any]) -> AtomValues | None:
    """Return what computes novelty and uncertainties of atoms for the map of structures."""
    import numpy as np

    from qualms.atomistic.novelty import attributions
    from qualms.report.structure_map import NOVELTY, Properties

    if model.fitted.per_atom:
        return None
    names = (NOVELTY, "σ of the contribution", "σ of the force")
    units = ("", model.settings.units, model.settings.units_of("forces"))

    def atom_values(some: Sequence[int]) -> Properties:
        columns = zip(*attributions(model, [frames[i] for i in some]), strict=True)
        return {
            name: (np.concatenate(values), unit)
            for name, unit, values in zip(names, units, columns, strict=True)
            if values[0] is not None
        }

    return atom_values
