"""``qualms report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from qualms.cli.evaluate import OPTIONS, Files, evaluate_files
from qualms.cli.options import Force, Json, Quiet, with_options
from qualms.cli.terminal import Terminal


@with_options(OPTIONS)
def report(
    files: Files,
    output: Annotated[Path, Option("--output", "-o", help="File to write: .html.")],
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Run ``qualms report``."""
    from qualms.atomistic.structures import file_of
    from qualms.io.files import check_not_input
    from qualms.report.report import check_report, write_report
    from qualms.report.structure_map import views_of_model
    from qualms.report.tables import interval_records, interval_table, novelty_records

    terminal = Terminal(quiet=quiet, as_json=as_json)
    for path in check_report(output, force=force):
        check_not_input(path, *map(file_of, files), options["calibration_file"])
    evaluated = evaluate_files(files, terminal, **options)
    first, main = next(iter(evaluated.evaluations.items()))
    model = evaluated.model
    names = [path.name for path in files]
    of = ", ".join(names) if model is None else f"{names[0]} on {', '.join(names[1:])}"
    views = {}
    if model is not None and main.frames is not None:
        views = views_of_model(model, main.frames, options["in_units"])
    written = write_report(
        output,
        evaluated.evaluations,
        title=f"{main.target}: {of}",
        facts=evaluated.facts,
        remarks=evaluated.remarks,
        force=force,
        **views,
    )
    parts: list[Any] = []
    documents: dict[str, Any] = {}
    for name, section in written.sections.items():
        assessment, target = section.assessment, section.evaluation.target
        scores, units = assessment.scores, section.evaluation.units
        parts += [f"{target}: {assessment.sentence}", *assessment.details]
        parts.append(interval_table(scores, units=units, title=target))
        parts += [section.by_novelty] if section.by_novelty else []
        documents[name] = {
            "units": units,
            "n_points": len(section.evaluation),
            "assessment": assessment.document(),
            "scores": interval_records(scores),
            "by_novelty": novelty_records(section.evaluation),
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
            "n_unknown_species": main.n_unknown,
            "n_extrapolating": main.n_extrapolating,
            "remarks": list(written.remarks),
            **documents.pop(first),
            **documents,
        },
    )
