"""The page of a round of the active-learning loop: a report of all labels that were bought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qualms.active.exploration import BEYOND, TEMPERATURE, TIME, WALKER
from qualms.active.loop import AUDIT, ID, REASON, Round, evaluation_of
from qualms.atomistic.model import summarize
from qualms.errors import counted
from qualms.io.files import AnyPath
from qualms.report.figures import LearningCurveDisplay
from qualms.report.report import Picture, Report, write_report
from qualms.report.tables import Table, write_number

if TYPE_CHECKING:
    from ase import Atoms


def write_round(path: AnyPath, found: Round, *, force: bool = False) -> Report | None:
    """Write the page of a round: what was bought, what it has shown, and where walkers stopped.

    Errors are those of predictions before the label was known. There is no page before two labels
    were bought.

    Parameters
    ----------
    path : path
        File to write, ``.html``.
    found : Round
    force : bool
        Whether existing files may be replaced.
    """
    if len(found.bought) < 2:
        return None
    record = found.record
    at_most = "" if record["bound"] is None else f", at most {record['bound']:.3g} (95 %)"
    remarks = [
        f"Forces on {counted(record['explored'], 'structure')} that were explored: expected error "
        f"{record['estimate'] or record['expected']:.3g} eV/Å{at_most}; the target is "
        f"{found.target_error:g}.",
        "Selected structures are where the model was uncertain; audit structures were drawn at "
        "random from what was explored.",
    ]
    remarks += [found.end] if found.end else []
    tables = {"Rounds": _rounds(found)}
    if found.stops:
        tables["Where walkers stopped"] = _stops(found.stops)
    if found.failed:
        tables["Failed calculations"] = _failed(found.failed)
    return write_report(
        path,
        {"forces": evaluation_of(found.bought, str(found.model.settings.forces))},
        title=f"Round {found.number}",
        remarks=remarks,
        pictures={
            "Learning curve": Picture(
                LearningCurveDisplay.from_records(found.records, found.target_error).data_uri(),
                "Error of force components against the number of labels",
                "Expected error of forces on what was explored (σ, and corrected by the audit "
                "labels), its upper 95 % bound, and the errors of the audit labels of each round, "
                "which were predicted before they were labelled. The loop ends when the bound is "
                "below the target.",
            )
        },
        tables=tables,
        facts=summarize(found.model.fitted),
        force=force,
    )


def _rounds(found: Round) -> Table:
    headers = ["round", "labels", "expected", "bound", "audit", "σ", "in σ", "in 2σ", "ps", "stops"]
    rows = []
    for of in found.records:
        audit = of.get(AUDIT, {})
        cells = [_number(of["estimate"] or of["expected"]), _number(of["bound"])]
        cells += [_number(audit.get("rmse")), _number(audit.get("std"))]
        cells += [f"{100 * audit[k]:.0f} %" if audit else "–" for k in ("within_68", "within_95")]
        rows.append(
            [
                str(of["round"]),
                str(of["labels"]),
                *cells,
                f"{of['picoseconds']:g}",
                str(of["stops"]),
            ]
        )
    note = (
        "Errors of force components in eV/Å. Audit: labels of the round that were drawn at random, "
        "their errors and σ before they were labelled, and how many errors are within σ and 1.96 σ."
    )
    return Table(headers, rows, note=note)


def _number(value: float | None) -> str:
    return "–" if value is None else write_number(value, 0.1 * value)


def _stops(stops: list[Atoms]) -> Table:
    rows = [
        [
            str(atoms.info.get(WALKER, i)),
            f"{atoms.info.get(TEMPERATURE, float('nan')):g}",
            f"{atoms.info.get(TIME, float('nan')):g}",
            str(atoms.info.get(BEYOND, "")),
        ]
        for i, atoms in enumerate(stops)
    ]
    return Table(["walker", "T (K)", "time (ps)", "reason"], rows)


def _failed(failed: list[Atoms]) -> Table:
    rows = [[str(a.info[ID]), str(a.symbols), str(a.info[REASON])] for a in failed]
    return Table(["label", "formula", "reason"], rows)
