"""The content of a report: numbers, tables and pictures, before they become HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from qualms.core.score_intervals import ScoreIntervals, bootstrap_scores
from qualms.errors import counted
from qualms.prediction import Prediction
from qualms.report.interval_table import interval_note, score_lines, write_number
from qualms.report.judged import Judged
from qualms.report.pictures import Picture, draw_pictures
from qualms.report.structure_map import (
    HOW_TO_INSTALL,
    StructureMap,
    Viewer,
    load_viewer,
    make_map,
)
from qualms.report.tables import score_table
from qualms.report.verdict import Verdict, judge
from qualms.report.worst import WorstPoint, worst_points

#: Resamples for confidence intervals.
_N_BOOTSTRAP = 200


@dataclass(frozen=True)
class TableText:
    """A table as it is written; the first cell of each row names it.

    Attributes
    ----------
    headers : tuple of str
    rows : sequence of tuples of str
    note : str
        Below the table.
    links : sequence of (int, int or None), or None
        For each row the structure, by its index in the map, and the atom that it is about, if
        the map can show them.
    """

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    links: Sequence[tuple[int, int | None] | None] | None = None


@dataclass(frozen=True)
class Assessment:
    """What a report says about predictions of one quantity.

    Attributes
    ----------
    subtitle : str
        What was predicted, and how often.
    verdict : Verdict
    scores : TableText
        Before and after calibration, with intervals.
    intervals : mapping of str to ScoreIntervals
        The numbers of that table.
    pictures : sequence of Picture
    surprises, errors : TableText
        The worst predictions, in units of σ and in those of the target.
    comparison : TableText or None
        Other estimators.
    """

    subtitle: str
    verdict: Verdict
    scores: TableText
    intervals: Mapping[str, ScoreIntervals]
    pictures: Sequence[Picture]
    surprises: TableText
    errors: TableText
    comparison: TableText | None


@dataclass(frozen=True)
class Page(Assessment):
    """All that a report says: about one quantity, and perhaps about others of the same structures.

    Attributes
    ----------
    title : str
    tables : mapping of str to TableText
        Further ones by their headings.
    facts : mapping of str to str
    remarks : sequence of str
    map : StructureMap or None
    viewer : Viewer or None
        What shows the map.
    others : mapping of str to Assessment
        Of forces and stresses, for instance, by name.
    """

    title: str
    tables: Mapping[str, TableText]
    facts: Mapping[str, str]
    remarks: Sequence[str]
    map: StructureMap | None
    viewer: Viewer | None
    others: Mapping[str, Assessment]


def make_page(
    judged: Judged,
    *,
    others: Mapping[str, Judged] | None = None,
    n_worst: int = 20,
    max_structures: int = 1000,
    seed: int = 0,
) -> Page:
    """Compute everything that a report says.

    Parameters
    ----------
    judged : Judged
        Points with σ = 0 are left out, with a remark.
    others : mapping of str to Judged, optional
        What else was predicted of the same structures, such as forces, by name.
    n_worst : int
        How many of the worst predictions are listed.
    max_structures : int
        How many structures the map may hold.
    seed : int
        Of the resamples, and of the sample of structures on the map.
    """
    judged = judged.with_error_bars()
    further = {name: other.with_error_bars() for name, other in (others or {}).items()}
    viewer = load_viewer()
    shown = None
    if viewer is not None:
        worst = (worst_points(judged, n_worst, by) for by in ("ratio", "error"))
        listed = [point.point for pair in zip(*worst, strict=True) for point in pair]
        shown = make_map(judged, listed, max_structures=max_structures, seed=seed)
    remarks = [*judged.remarks, *(text for other in further.values() for text in other.remarks)]
    if judged.frames is not None and viewer is None:
        remarks.append(HOW_TO_INSTALL)
    own = assess(judged, shown, n_worst=n_worst, seed=seed)
    return Page(
        **vars(own),
        title=judged.title or judged.target,
        tables={name: _text_of(table) for name, table in judged.tables.items()},
        facts=dict(judged.facts),
        remarks=remarks,
        map=shown,
        viewer=None if shown is None else viewer,
        others={
            name: assess(other, shown, n_worst=n_worst, seed=seed)
            for name, other in further.items()
        },
    )


def assess(
    judged: Judged, shown: StructureMap | None = None, *, n_worst: int = 20, seed: int = 0
) -> Assessment:
    """Compute what a report says about one quantity.

    Parameters
    ----------
    judged : Judged
        All points with σ > 0.
    shown : StructureMap, optional
        Where the structures of the worst predictions can be seen.
    n_worst, seed
        As in `make_page`.
    """
    intervals, verdict = judge_scores(judged, seed=seed)
    return Assessment(
        subtitle=_subtitle(judged),
        verdict=verdict,
        scores=_score_text(intervals, judged.units),
        intervals=intervals,
        pictures=draw_pictures(judged),
        surprises=_worst_text(judged, worst_points(judged, n_worst, "ratio"), shown),
        errors=_worst_text(judged, worst_points(judged, n_worst, "error"), shown),
        comparison=_comparison(judged),
    )


def judge_scores(judged: Judged, *, seed: int = 0) -> tuple[Mapping[str, ScoreIntervals], Verdict]:
    """Return the scores, before and after calibration, and what they come to.

    Parameters
    ----------
    judged : Judged
        All points with σ > 0.
    seed : int
        Of the resamples.
    """
    intervals = _intervals(judged, seed)
    return intervals, judge(judged, next(reversed(intervals.values())), n_bootstrap=_N_BOOTSTRAP)


def _intervals(judged: Judged, seed: int) -> dict[str, ScoreIntervals]:
    """Score the prediction, and what it was before calibration, on the same resamples."""

    def scored(prediction: Prediction) -> ScoreIntervals:
        return bootstrap_scores(
            judged.y,
            prediction.mean,
            prediction.std,
            prediction.members,
            groups=judged.structure,
            n_bootstrap=_N_BOOTSTRAP,
            rng=np.random.default_rng(seed),
        )

    if not judged.is_calibrated:
        return {"as predicted": scored(judged.prediction)}
    return {
        "before calibration": scored(judged.prediction.uncalibrated),
        "after calibration": scored(judged.prediction),
    }


def _subtitle(judged: Judged) -> str:
    units = f" in {judged.units}" if judged.units else ""
    n_structures = np.unique(judged.structure).size
    points = counted(judged.y.size, "prediction")
    if judged.y.size != n_structures:
        points += f" for {counted(n_structures, 'structure')}"
    n = judged.prediction.n_members if judged.n_members is None else judged.n_members
    return f"{judged.target}{units}: {points}" + (f" by {n} members" if n else "")


def _score_text(intervals: Mapping[str, ScoreIntervals], units: str) -> TableText:
    lines = score_lines(intervals, units=units)
    return TableText(
        headers=("Score", *intervals, "ideal"),
        rows=[(line.label, *line.cells, line.ideal) for line in lines],
        note=interval_note(next(iter(intervals.values())), "structures"),
    )


def _worst_text(
    judged: Judged, points: Sequence[WorstPoint], shown: StructureMap | None
) -> TableText:
    headers = ["structure"]
    headers += ["formula"] if judged.frames is not None else []
    headers += ["atom"] if judged.atom is not None else []
    headers += ["component"] if judged.component is not None else []
    headers += ["truth", "predicted", "σ", "error", "|error|/σ"]
    links = None
    if shown is not None:
        links = [
            (shown.places[p.structure], p.atom if shown.of_atoms else None)
            if p.structure in shown.places
            else None
            for p in points
        ]
    note = f"In {judged.units}. " if judged.units else ""
    note += "The error is truth minus prediction. Structures and atoms are counted from 0."
    return TableText(tuple(headers), [_worst_row(judged, p) for p in points], note, links)


def _worst_row(judged: Judged, p: WorstPoint) -> tuple[str, ...]:
    cells = [str(p.structure)]
    cells += [p.formula] if judged.frames is not None else []
    cells += [f"{p.atom} {p.element}".rstrip()] if p.atom is not None else []
    cells += [_component(judged, p.component)] if p.component is not None else []
    # Values are written as finely as the error bar can tell.
    cells += [write_number(v, p.std) for v in (p.truth, p.mean)]
    cells += [write_number(p.std), write_number(p.error, p.std)]
    return (*cells, f"{p.ratio:.2f}" if p.ratio < 1e5 else f"{p.ratio:.2e}")


def _component(judged: Judged, i: int) -> str:
    """Return its name, or a letter, if all components are those of vectors, or else a number."""
    assert judged.component is not None
    if judged.component_names:
        return judged.component_names[i]
    return "xyz"[i] if judged.component.max() == 2 else str(i)


def _comparison(judged: Judged) -> TableText | None:
    if not judged.rows:
        return None
    table = score_table(judged.rows, units=judged.units)
    return _text_of(table)


def _text_of(table: Table) -> TableText:
    """Take the cells of a table for the terminal."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    headers = tuple(" ".join(str(column.header).split()) for column in table.columns)
    note = str(table.caption) if table.caption else ""
    return TableText(headers, list(zip(*columns, strict=True)), note=note)
