"""``qualms evaluate``."""

from __future__ import annotations

from typing import Any

from qualms.cli._common import (
    CalibrationFile,
    Json,
    Model,
    Quiet,
    Terminal,
    Test,
    Threads,
    Validation,
    about_calibrations,
    evaluate_model,
)


def evaluate(
    model: Model,
    test: Test,
    validation: Validation = None,
    calibration: CalibrationFile = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score a model on labelled structures."""
    from qualms.errors import counted
    from qualms.report.tables import score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    _, found, remarks = evaluate_model(model, test, validation, calibration, threads, terminal)
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
        about_calibrations(found["energy"]),
        *remarks,
        document={**main, "remarks": remarks, **documents},
    )
