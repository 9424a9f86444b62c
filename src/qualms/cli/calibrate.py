"""``qualms calibrate``: error bars that hold, for an ensemble from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from ase import Atoms
from rich.table import Table

from qualms.calibration.fitting import METHODS
from qualms.cli._common import Absent, Force, Json, Order, Quiet, Seed, Terminal
from qualms.ensembles.calibrate import Calibrated, calibrate_ensemble
from qualms.ensembles.calibration_file import make_document, write_calibration
from qualms.ensembles.io import Ensemble, read_ensemble, read_source
from qualms.io.files import check_output, refuse_input
from qualms.progress import Stages
from qualms.report.tables import interval_table
from qualms.report.judged import Judged
from qualms.report.report import check_report, judge_scores, make_page, write_page
from qualms.report.tables import (
    comparison_records,
    comparison_table,
    factor_table,
    interval_records,
)


def calibrate(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS", help="Extended XYZ, .csv, .parquet or .npz, with references."
        ),
    ],
    target: Annotated[str, typer.Option(help="Property: TARGET_ensemble, TARGET_uncertainty, …")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Calibration file to write (.json).")
    ],
    reference: Annotated[
        str | None, typer.Option(help="Key of the true values; REF_TARGET by default.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="auto, none, linear, power, student or shrinkage.")
    ] = "auto",
    by: Annotated[
        str | None,
        typer.Option(help="A factor for each element, or for each value of a key (config_type)."),
    ] = None,
    absent: Absent = None,
    order: Order = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a report, one HTML file (.html).")
    ] = None,
    units: Annotated[str, typer.Option(help="Units of the property, for the tables.")] = "",
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Calibrate the error bars of an ensemble, whoever made it, and judge them."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    refuse_input(output, predictions, report)
    check_output(output, force=force)
    if report is not None:
        for path in check_report(report, force=force):
            refuse_input(path, predictions, output)
    source = read_source(predictions)
    ensemble = read_ensemble(source, target, reference, absent=absent, by=by, order=order)
    terminal.say(_what_it_is(ensemble))
    with Stages(terminal.progress()).stage("Methods", len(METHODS)) as advance:
        calibrated = calibrate_ensemble(ensemble, method, seed=seed or 0, on_method=advance)
    document = make_document(calibrated, ensemble, by, units)
    write_calibration(document, output, force=force)
    for remark in calibrated.remarks:
        terminal.warn(remark)
    title = f"{target}: {predictions.name}, {ensemble.counted(len(calibrated.std))}"
    frames = source if isinstance(source, list) else None
    judged = _judged(calibrated, frames, title, units, by)
    written = [output]
    if report is None:
        intervals, verdict = judge_scores(judged, seed=seed or 0)
    else:
        page = make_page(judged, seed=seed or 0)
        intervals, verdict = page.intervals, page.verdict
        written += write_page(page, report, force=force)
    parts: list[Any] = [
        _parameters(calibrated),
        calibrated.reason[0].upper() + calibrated.reason[1:],
        *_tables(calibrated, by, titles=True).values(),
        interval_table(intervals, units=units, title=title),
        verdict.sentence,
        f"({_how_after(calibrated)})",
    ]
    further = {
        "comparison": comparison_records(calibrated.comparison),
        "score_intervals": interval_records(intervals),
        "verdict": verdict.sentence,
    }
    terminal.result(*parts, document=document.model_dump(mode="json") | further)
    terminal.say(f"Wrote {', '.join(map(str, written))}.")


def _tables(calibrated: Calibrated, by: str | None, *, titles: bool = False) -> dict[str, Table]:
    """Return how methods compare, and the factors of groups, by heading; if wanted, with it."""
    methods, factors = "Methods on points left out", "Factors by group"
    tables = {methods: comparison_table(calibrated.comparison, title=methods if titles else "")}
    if calibrated.grouped is not None:
        title = factors if titles else ""
        tables[factors] = factor_table(calibrated.grouped, by or "", title=title)
    return tables


def _judged(
    calibrated: Calibrated,
    frames: Sequence[Atoms] | None,
    title: str,
    units: str,
    by: str | None,
) -> Judged:
    """Return what a report needs to know."""
    ensemble, after = calibrated.points.ensemble, _how_after(calibrated)
    return Judged(
        target=ensemble.target,
        units=units,
        title=title,
        y=ensemble.y,
        prediction=calibrated.prediction,
        frames=frames,
        structure=ensemble.structure,
        atom=ensemble.atom if ensemble.per_atom else None,
        component=ensemble.component,
        tables=_tables(calibrated, by),
        facts={
            "predictions": _what_it_is(ensemble),
            "calibration": _parameters(calibrated),
            "chosen": calibrated.reason,
            **({} if by is None else {"groups": f"a factor for each {by}"}),
        },
        remarks=(*calibrated.remarks, f"{after[0].upper()}{after[1:]}."),
        n_members=ensemble.n_members or 0,
    )


def _how_after(calibrated: Calibrated) -> str:
    n_folds = len(calibrated.comparison.folds)
    return f"after: each of {n_folds} parts by a calibration that was fitted to the others"


def _what_it_is(ensemble: Ensemble) -> str:
    members = "error bars" if ensemble.n_members is None else f"{ensemble.n_members} members"
    if ensemble.absent is not None:
        how = "each point is judged by the members that did not see it"
    else:
        how = "taken to be new to all members: calibrated and judged by cross-validation"
    return f"{ensemble.key}: {ensemble.counted()}, {members}; {how}."


def _parameters(calibrated: Calibrated) -> str:
    calibration, intervals = calibrated.calibration, calibrated.intervals
    if calibration.n_parameters == 0:
        scale = f" A scale: {calibrated.scale}." if calibrated.scale is not None else ""
        return f"{calibration.method}: the error bars as they are.{scale}"
    text = (
        f"{calibration.method}: α = {calibration.alpha:.4g} "
        f"({intervals.alpha[0]:.4g} to {intervals.alpha[1]:.4g})"
    )
    if calibration.n_parameters > 1 and intervals.gamma is None:
        text += f", γ = {calibration.gamma:.3f} (cannot be told: spreads are alike)"
    elif calibration.n_parameters > 1 and intervals.gamma is not None:
        text += (
            f", γ = {calibration.gamma:.3f} ({intervals.gamma[0]:.3f} to {intervals.gamma[1]:.3f})"
        )
    return f"{text}, {intervals.level:.0%} confidence."
