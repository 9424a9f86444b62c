"""``qualms calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from qualms.cli._common import Absent, Force, Json, Order, Quiet, Seed, Terminal

if TYPE_CHECKING:
    from qualms.ensembles.calibrate import Calibrated
    from qualms.ensembles.io import Ensemble


def calibrate(
    predictions: Annotated[
        Path,
        Argument(
            metavar="PREDICTIONS",
            help="Predictions and reference values: extended XYZ, .csv, .parquet or .npz.",
        ),
    ],
    target: Annotated[
        str, Option(help="Property: TARGET_ensemble, TARGET_uncertainty, … are read.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Calibration file to write (.json).")],
    reference: Annotated[
        str | None, Option(help="Key of the reference values; by default REF_TARGET.")
    ] = None,
    method: Annotated[
        str,
        Option(
            metavar="[auto|none|linear|power|student|shrinkage]",
            help="Calibration method; auto selects by cross-validation.",
        ),
    ] = "auto",
    by: Annotated[
        str | None,
        Option(help="One factor per element, or per value of a key such as config_type."),
    ] = None,
    absent: Absent = None,
    order: Order = None,
    report: Annotated[
        Path | None, Option(help="Also write an HTML report to this file (.html).")
    ] = None,
    units: Annotated[str, Option(help="Units of the property, for the output.")] = "",
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms calibrate``."""
    from qualms.calibration.fitting import METHODS
    from qualms.ensembles.calibrate import calibrate_ensemble
    from qualms.ensembles.calibration_file import make_document, write_calibration
    from qualms.ensembles.io import read_ensemble, read_source
    from qualms.evaluation import Evaluation
    from qualms.io.files import check_not_input, check_output
    from qualms.progress import Stages
    from qualms.report.assessment import assess, with_uncertainty
    from qualms.report.report import check_report, write_report
    from qualms.report.tables import (
        comparison_records,
        comparison_table,
        factor_table,
        interval_records,
        interval_table,
    )

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_not_input(output, predictions, report)
    check_output(output, force=force)
    if report is not None:
        for path in check_report(report, force=force):
            check_not_input(path, predictions, output)
    source = read_source(predictions)
    frames = source if isinstance(source, list) else None
    ensemble = read_ensemble(source, target, reference, absent=absent, by=by, order=order)
    terminal.info(_description(ensemble))
    with Stages(terminal.progress()).stage("Methods", len(METHODS)) as advance:
        calibrated = calibrate_ensemble(
            ensemble, method, frames=frames, seed=seed or 0, on_method=advance
        )
    document = make_document(calibrated, ensemble, by, units)
    write_calibration(document, output, force=force)
    for remark in calibrated.remarks:
        terminal.warn(remark)

    evaluation = Evaluation(
        target=ensemble.target,
        units=units,
        y=calibrated.ensemble.y,
        prediction=calibrated.prediction,
        frames=frames,
        warnings=calibrated.data_warnings,
        structure=calibrated.ensemble.structure,
        atom=calibrated.ensemble.atom if ensemble.per_atom else None,
        component=calibrated.ensemble.component,
    )
    title = f"{target}: {predictions.name}, {ensemble.counted(len(calibrated.std))}"
    tables = {"Comparison of methods": comparison_table(calibrated.comparison)}
    if calibrated.grouped is not None and by is not None:
        tables["Factors by group"] = factor_table(calibrated.grouped, by)
    facts = {
        "predictions": _description(ensemble),
        "calibration": _parameters(calibrated),
        "selection": calibrated.reason,
        **({} if by is None else {"groups": f"one factor per {by}"}),
    }
    after = f"After calibration: {len(calibrated.comparison.folds)}-fold cross-validation."
    written = [output]
    if report is None:
        assessment = assess(with_uncertainty(evaluation)[0], seed=seed or 0)
    else:
        made = write_report(
            report,
            {target: evaluation},
            title=title,
            facts=facts,
            remarks=[*calibrated.remarks, after],
            tables=tables,
            force=force,
            seed=seed or 0,
        )
        assessment = made.sections[target].assessment
        written += made.paths
    terminal.result(
        facts["calibration"],
        f"Selection: {calibrated.reason}",
        *(part for pair in tables.items() for part in pair),
        interval_table(assessment.scores, units=units, title=title),
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


def _description(ensemble: Ensemble) -> str:
    members = f"{ensemble.n_members} members" if ensemble.n_members else "standard deviations"
    if ensemble.absent is not None:
        how = "each point is predicted by the members that were not trained on it"
    else:
        how = "no member is assumed to have been trained on any point"
    return f"{ensemble.key}: {ensemble.counted()}, {members}; {how}."


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
