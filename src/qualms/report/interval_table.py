"""Scores with confidence intervals, one line each, side by side: before and after calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from qualms.core.score_intervals import ScoreIntervals
from qualms.errors import InputError

_MISSING = "–"
#: Mean miscalibration area of calibrated predictions of n points, times √n.
CALIBRATED_AREA = 0.31


@dataclass(frozen=True)
class _Score:
    """How one score is called and written: ``factor`` is 100 for a percentage."""

    label: str
    has_units: bool = False
    factor: float = 1.0
    ideal: str = ""


#: The scores that are shown, in this order, by their names in `qualms.core.scores.Scores`.
_SCORES = {
    "rmse": _Score("Root mean squared error", has_units=True, ideal="low"),
    "mae": _Score("Mean absolute error", has_units=True, ideal="low"),
    "log_likelihood": _Score("Log likelihood per point", ideal="high"),
    "crps": _Score("CRPS", has_units=True, ideal="low"),
    "miscalibration_area": _Score("Miscalibration area"),
    "ence": _Score("ENCE"),
    "coverage_68": _Score("Truths within the 68 % interval", factor=100.0, ideal="68 %"),
    "coverage_95": _Score("Truths within the 95 % interval", factor=100.0, ideal="95 %"),
    "sharpness": _Score("Sharpness (root mean variance)", has_units=True, ideal="the RMSE"),
    "spearman": _Score("Rank correlation of |error| and σ", ideal="high"),
    "interval_score_95": _Score("Interval score (95 %)", has_units=True, ideal="low"),
}


@dataclass(frozen=True)
class ScoreLine:
    """One score of several predictions of the same points, as it is to be written.

    Attributes
    ----------
    name : str
        The attribute of `Scores`.
    label : str
        Its name in words, with units.
    ideal : str
        What it should be: a number, or "low", or "high".
    cells : tuple of str
        Value and interval of each prediction.
    """

    name: str
    label: str
    ideal: str
    cells: tuple[str, ...]


def score_lines(columns: Mapping[str, ScoreIntervals], *, units: str = "") -> list[ScoreLine]:
    """Write the scores of predictions of the same points, with their intervals.

    Parameters
    ----------
    columns : mapping from str to ScoreIntervals
        For instance "before" and "after" a calibration.
    units : str
        Units of y.

    Returns
    -------
    list of ScoreLine
    """
    _check_columns(columns)
    first = next(iter(columns.values()))
    return [
        ScoreLine(
            name,
            f"{score.label}, {units}" if score.has_units and units else score.label,
            score.ideal or _of_calibrated(name, first),
            tuple(_cell(name, score, column) for column in columns.values()),
        )
        for name, score in _SCORES.items()
    ]


def interval_table(
    columns: Mapping[str, ScoreIntervals], *, units: str = "", title: str = ""
) -> Table:
    """Compare scores and their confidence intervals, one line for each score.

    Parameters
    ----------
    columns : mapping from str to ScoreIntervals
        For instance "before" and "after" a calibration, of the same points.
    units : str
        Units of y, written beside the scores that have them.
    title : str
        Heading of the table.

    Returns
    -------
    rich.table.Table
    """
    lines = score_lines(columns, units=units)
    caption = interval_note(next(iter(columns.values())))
    table = Table(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        header_style="",
    )
    table.add_column("", overflow="fold")
    for name in columns:
        table.add_column(Text(name), justify="right", no_wrap=True)
    table.add_column("ideal", justify="right")
    for line in lines:
        table.add_row(Text(line.label), *map(Text, line.cells), Text(line.ideal))
    return table


def interval_records(
    columns: Mapping[str, ScoreIntervals],
) -> list[dict[str, float | str | None]]:
    """Return scores and intervals as records that JSON can hold.

    Returns
    -------
    list of dict
        One for each column and score: ``column``, ``score``, ``value``, ``low``, ``high`` and
        ``level``. What is not finite, or has no interval, is None.
    """
    _check_columns(columns)
    records: list[dict[str, float | str | None]] = []
    for column, given in columns.items():
        for name in _SCORES:
            low, high = given.intervals.get(name, (None, None))
            value = getattr(given.scores, name)
            numbers = {"value": value, "low": low, "high": high}
            finite = {
                k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()
            }
            records.append({"column": column, "score": name, **finite, "level": given.level})
    return records


def interval_note(column: ScoreIntervals, what: str = "groups of points") -> str:
    """Say in a sentence what the intervals are, and what was drawn; nothing if there are none."""
    if not column.intervals:
        return ""
    return (
        f"[{100 * column.level:g} % intervals] from {column.n_bootstrap} resamples "
        f"of {column.n_groups} {what}."
    )


def write_number(value: float, uncertainty: float | None = None) -> str:
    """Write a number to two digits of its uncertainty, or to three significant digits.

    Parameters
    ----------
    value : float
    uncertainty : float, optional
        For instance half the width of an interval.
    """
    if not math.isfinite(value):
        return "−∞" if value < 0 else "∞" if value > 0 else _MISSING
    known = uncertainty if uncertainty and math.isfinite(uncertainty) else abs(value) / 10.0
    decimals = 1 - math.floor(math.log10(known)) if known > 0.0 else 2
    size = max(abs(value), known)
    if size >= 1e6 or (0.0 < size < 1e-4):
        digits = max(min(decimals + math.floor(math.log10(size)), 6), 1)
        return f"{value:.{digits}e}".replace("-", "−")
    return f"{value:.{min(max(decimals, 0), 8)}f}".replace("-", "−")


def _cell(name: str, score: _Score, column: ScoreIntervals) -> str:
    value = score.factor * getattr(column.scores, name)
    percent = " %" if score.factor == 100.0 else ""
    if name not in column.intervals:
        return f"{write_number(value)}{percent}"
    low, high = (score.factor * end for end in column.intervals[name])
    half = 0.5 * (high - low)
    ends = f"[{write_number(low, half)}, {write_number(high, half)}]"
    return f"{write_number(value, half)}{percent} {ends}"


def _of_calibrated(name: str, column: ScoreIntervals) -> str:
    """Return what a distance from calibration is on average for calibrated points.

    If they are independent, or, if they come in groups, from that to what it is for as many points
    as there are groups.
    """
    n_points = column.scores.n_points
    n_bins = int(np.clip(n_points // 10, 1, 10))
    expected = CALIBRATED_AREA if name == "miscalibration_area" else math.sqrt(n_bins / math.pi)
    low, high = (expected / math.sqrt(n) for n in (n_points, column.n_groups))
    return f"about {low:.2g}" if column.n_groups == n_points else f"{low:.2g} to {high:.2g}"


def _check_columns(columns: Mapping[str, ScoreIntervals]) -> None:
    if not isinstance(columns, Mapping) or not columns:
        raise InputError("columns", type(columns).__name__, "a mapping with at least one name")
    for name, value in columns.items():
        if not isinstance(value, ScoreIntervals):
            raise InputError(f"columns[{name!r}]", type(value).__name__, "ScoreIntervals")
    sizes = sorted({column.scores.n_points for column in columns.values()})
    if len(sizes) > 1:
        raise InputError("columns", f"scores of {sizes} points", "scores of the same points")
