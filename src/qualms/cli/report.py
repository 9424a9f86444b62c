"""``qualms report``: a model judged on labelled structures, in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from ase import Atoms

from qualms.atomistic.evaluation import Evaluation, unjudged
from qualms.atomistic.model import AtomisticModel, forces_units_of
from qualms.atomistic.novelty import attributions
from qualms.cli._common import Force, Json, Model, Quiet, Terminal, Threads, judge
from qualms.io.files import refuse_input
from qualms.report.tables import interval_table
from qualms.report.judged import AtomValues, Judged
from qualms.report.report import Assessment, Page, check_report, make_page, write_page
from qualms.report.tables import interval_records

#: What components of forces and of stresses are called; the latter in ASE's order.
_COMPONENTS = {"forces": ("x", "y", "z"), "stress": ("xx", "yy", "zz", "yz", "xz", "xy")}


def report(
    model: Model,
    test: Annotated[Path, typer.Argument(metavar="TEST", help="Labelled structures.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .html.")],
    validation: Annotated[
        Path | None,
        typer.Option(help="Labelled structures to fit the calibrations that are not internal to."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibration of the model's predictions, by `qualms calibrate`."),
    ] = None,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Judge a model in one HTML file: verdict, scores, figures, and a map of the structures."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    for path in check_report(output, force=force):
        refuse_input(path, model, test, validation, calibration)
    found = judge(model, test, validation, calibration, threads, terminal)
    loaded, frames, evaluation, derived = found.model, found.frames, found.evaluation, found.derived
    title = f"{loaded.settings.target}: {model.name} on {test.name}"
    judged = judged_by(loaded, frames, evaluation, title=title)
    remarks = [*found.remarks, *unjudged(loaded, derived)]
    page = make_page(
        replace(judged, remarks=(*judged.remarks, *remarks)),
        others={name: judged_derivative(name, frames, one) for name, one in derived.items()},
    )
    written = write_page(page, output, force=force)
    for remark in page.remarks:
        terminal.say(remark)
    terminal.result(
        page.verdict.sentence,
        *page.verdict.details,
        interval_table(page.intervals, units=evaluation.units, title=title),
        *_parts_of_others(page, derived),
        f"Written: {', '.join(map(str, written))}",
        document={
            "output": [str(path) for path in written],
            "target": loaded.settings.target,
            "units": evaluation.units,
            "n_points": len(evaluation.y),
            "n_unlabelled": evaluation.n_unlabelled,
            **_document(page),
            "remarks": list(page.remarks),
            **_documents_of_others(page, derived),
        },
    )


def _document(found: Assessment) -> dict[str, Any]:
    """Return the verdict and the scores for other programs."""
    return {
        "verdict": {
            "grade": found.verdict.grade,
            "sentence": found.verdict.sentence,
            "details": list(found.verdict.details),
        },
        "scores": interval_records(found.intervals),
    }


def _parts_of_others(page: Page, derived: Mapping[str, Evaluation]) -> list[Any]:
    """Return what is printed about forces and stresses: a sentence and a table each."""
    parts: list[Any] = []
    for name, found in page.others.items():
        parts.append(f"{name}: {found.verdict.sentence}")
        parts.append(interval_table(found.intervals, units=derived[name].units, title=name))
    return parts


def _documents_of_others(page: Page, derived: Mapping[str, Evaluation]) -> dict[str, Any]:
    return {
        name: {"units": derived[name].units, "n_points": len(derived[name].y), **_document(found)}
        for name, found in page.others.items()
    }


def judged_by(
    model: AtomisticModel, frames: Sequence[Atoms], evaluation: Evaluation, *, title: str
) -> Judged:
    """Return what a report needs to know about a model and the structures it was judged on."""
    internal = "(internal): to the training set"
    remarks = [f"(validation): fitted to {evaluation.validation}; {internal}."]
    if evaluation.n_unlabelled:
        remarks.insert(0, f"{evaluation.n_unlabelled} without a label are skipped.")
    lines = (line.partition("  ") for line in model.summary().splitlines())
    return replace(
        _judged(model.settings.target, title, frames, evaluation),
        facts={name.strip(): text.strip() for name, _, text in lines},
        remarks=remarks,
        atom_values=None
        if model.fitted.per_atom
        else lambda some: [AtomValues(*v) for v in attributions(model, [frames[i] for i in some])],
        atom_units=model.settings.units,
        force_units=forces_units_of(model.fitted),
    )


def judged_derivative(name: str, frames: Sequence[Atoms], found: Evaluation) -> Judged:
    """Return what a report needs to know about forces, or stresses, of the same structures."""
    return replace(
        _judged(name, name, frames, found),
        component=found.component,
        component_names=_COMPONENTS[name],
    )


def _judged(target: str, title: str, frames: Sequence[Atoms], found: Evaluation) -> Judged:
    return Judged(
        target=target,
        units=found.units,
        title=title,
        y=found.y,
        prediction=found.prediction,
        frames=frames,
        structure=found.structure,
        atom=found.atom,
        rows=found.rows,
    )
