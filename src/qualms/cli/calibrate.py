"""``qualms calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.calibration.methods import METHODS
from qualms.cli.options import (
    READING,
    Force,
    InUnits,
    Json,
    Per,
    Quiet,
    Seed,
    description,
    reading,
    with_options,
)
from qualms.cli.terminal import Terminal
from qualms.errors import warn

if TYPE_CHECKING:
    from qualms.ensembles.calibrate import Calibrated


@with_options(READING)
def calibrate(
    predictions: Annotated[
        list[Path],
        Argument(
            metavar="PREDICTIONS",
            help="Predictions and reference values: extended XYZ, .csv, .tsv, .parquet, .npz, .npy "
            "or .json. Several files have the same rows; their predictions are members.",
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Calibration file to write (.json).")],
    in_units: InUnits = None,
    per: Per = None,
    method: Annotated[
        str,
        Option(
            help=f"Calibration method: {', '.join(METHODS)}; or auto, which selects one by "
            "cross-validation.",
        ),
    ] = "auto",
    by: Annotated[
        str | None,
        Option(help="One factor per element, or per value of a key such as config_type."),
    ] = None,
    report: Annotated[
        Path | None, Option(help="Also write an HTML report to this file (.html).")
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **names: Any,
) -> None:
    """Run ``qualms calibrate``."""
    from qualms.atomistic.structures import file_of
    from qualms.ensembles.calibrate import calibrate_ensemble, evaluate_ensemble
    from qualms.ensembles.calibration_file import make_document, write_calibration
    from qualms.ensembles.io import read_ensemble, read_source
    from qualms.evaluation import energy_factor
    from qualms.io.files import check_not_input, check_output, written_together
    from qualms.progress import Stages
    from qualms.report.assessment import assess
    from qualms.report.report import check_report, write_report
    from qualms.report.tables import (
        comparison_records,
        comparison_table,
        factor_table,
        interval_records,
        interval_table,
    )

    terminal = Terminal(quiet=quiet, as_json=as_json)
    inputs = [file_of(path) for path in predictions]
    check_not_input(output, *inputs, report)
    check_output(output, force=force)
    if report is not None:
        for path in check_report(report, force=force):
            check_not_input(path, *inputs, output)
    units = names.pop("units") or ""
    energy_factor(units, in_units)  # before any work
    sources = [read_source(path) for path in predictions]
    ensemble = read_ensemble(sources, **reading(**names), by=by)
    terminal.info(description(ensemble))
    frames = sources[0] if isinstance(sources[0], list) else None
    with Stages(terminal.progress()).stage("Methods", len(METHODS)) as advance:
        calibrated = calibrate_ensemble(
            ensemble, method, frames=frames, seed=seed, on_method=advance
        )
    evaluation = evaluate_ensemble(
        calibrated.ensemble,
        calibrated.prediction,
        frames=frames,
        units=units,
        in_units=in_units,
        per=per,
    )
    document = make_document(calibrated, ensemble, by, units)
    for remark in calibrated.remarks:
        warn(remark)
    files = ", ".join(path.name for path in predictions)
    title = f"{ensemble.target}: {files}, {ensemble.counted(len(calibrated.std))}"
    tables = {"Comparison of methods": comparison_table(calibrated.comparison)}
    if calibrated.grouped is not None and by is not None:
        tables["Factors by group"] = factor_table(calibrated.grouped, by)
    facts = {
        "predictions": description(ensemble),
        "calibration": _parameters(calibrated),
        "selection": calibrated.reason,
        **({} if by is None else {"groups": f"one factor per {by}"}),
    }
    after = f"After calibration: {len(calibrated.comparison.folds)}-fold cross-validation."
    written = [output]
    with written_together():
        write_calibration(document, output, force=force)
        if report is None:
            assessment = assess(evaluation, seed=seed)
        else:
            made = write_report(
                report,
                {ensemble.target: evaluation},
                title=title,
                facts=facts,
                remarks=[*calibrated.remarks, after],
                tables=tables,
                force=force,
                seed=seed,
            )
            assessment = made.sections[ensemble.target].assessment
            written += made.paths
    terminal.result(
        facts["calibration"],
        f"Selection: {calibrated.reason}",
        *(part for pair in tables.items() for part in pair),
        interval_table(assessment.scores, units=evaluation.units, title=title),
        assessment.sentence,
        after,
        document=document.model_dump(mode="json")
        | {
            "comparison": comparison_records(calibrated.comparison),
            "score_intervals": interval_records(assessment.scores),
            "assessment": assessment.document(),
        },
    )
    terminal.info(f"Wrote {', '.join(map(str, written))}.")


def _parameters(calibrated: Calibrated) -> str:
    calibration, intervals = calibrated.calibration, calibrated.intervals
    if calibration.n_parameters == 0:
        return f"{calibration.method}: the standard deviations are not changed."
    text = f"{calibration.method}: α = {calibration.alpha:.4g} {_interval(intervals.alpha, '.4g')}"
    if calibration.n_parameters > 1:
        text += f", γ = {calibration.gamma:.3f} {_interval(intervals.gamma, '.3f')}"
    return f"{text}; {intervals.level:.0%} confidence intervals."


def _interval(interval: tuple[float, float] | None, digits: str) -> str:
    if interval is None:
        return "(undetermined)"
    return f"[{interval[0]:{digits}}, {interval[1]:{digits}}]"
