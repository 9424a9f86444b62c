"""Scores and calibrations as tables for the terminal, and as records for files.

The best of a comparison is bold and has an asterisk, so that it can be found without colours and in
a text file. Names are written as they are; square brackets in them are no markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from qualms.calibration.base import Calibration
from qualms.calibration.fitting import PerOutputCalibration
from qualms.calibration.groups import GroupedCalibration
from qualms.calibration.selection import Comparison, ConfidenceIntervals
from qualms.errors import InputError
from qualms.metrics import ScoreIntervals, Scores

#: Columns of `paper_table` in the order of the paper, and then ours.
PAPER_COLUMNS = ("Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage", "GPR PP")

_MISSING = "–"
_BEST = "*"


@dataclass(frozen=True)
class _Column:
    """How one score is written.

    ``decimals`` is None for a score in the units of y, which gets three significant digits;
    ``factor`` is 100 for a percentage.
    """

    header: str
    decimals: int | None
    factor: float = 1.0

    def heading(self, units: str) -> str:
        return f"{self.header}\n{units}" if self.decimals is None and units else self.header

    def cells(self, values: Sequence[float | None]) -> list[str]:
        """Write all values of the column with the same number of decimals."""
        scaled = [None if v is None else self.factor * v for v in values]
        decimals = _significant(scaled) if self.decimals is None else self.decimals
        return [_number(v, decimals) for v in scaled]


_COLUMNS = {
    "n_points": _Column("points", 0),
    "rmse": _Column("RMSE", None),
    "mae": _Column("MAE", None),
    "log_likelihood": _Column("LL", 3),
    "crps": _Column("CRPS", None),
    "crps_ensemble": _Column("CRPS\nens.", None),
    "miscalibration_area": _Column("area", 3),
    "ence": _Column("ENCE", 3),
    "sharpness": _Column("RMV", None),
    "coverage_68": _Column("cov.\n68 %", 1, 100.0),
    "coverage_95": _Column("cov.\n95 %", 1, 100.0),
    "spearman": _Column("rank\ncorr.", 2),
    "interval_score_95": _Column("IS 95", None),
}
#: What `score_table` shows unless told otherwise.
_DEFAULT_COLUMNS = (
    "rmse",
    "mae",
    "log_likelihood",
    "crps",
    "miscalibration_area",
    "ence",
    "coverage_68",
    "coverage_95",
    "spearman",
)


def score_table(
    rows: Mapping[str, Scores],
    *,
    units: str = "",
    title: str = "",
    columns: Sequence[str] | None = None,
) -> Table:
    """Compare predictions of the same points, one line each.

    Parameters
    ----------
    rows : mapping from str to Scores
        Scores of each estimator or calibration, by name.
    units : str
        Units of y, written under the scores that have them.
    title : str
        Heading of the table.
    columns : sequence of str, optional
        Names of attributes of `Scores`; by default RMSE, MAE, LL (log likelihood per point), CRPS,
        miscalibration area, ENCE, coverage of the 68 and 95 % intervals in per cent, and the rank
        correlation of errors and error bars.

    Returns
    -------
    rich.table.Table
        The highest log likelihood is bold and has an asterisk, if all have the same number of
        points.
    """
    _check_rows(rows, Scores)
    names = _DEFAULT_COLUMNS if columns is None else tuple(columns)
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or not names:
        raise InputError("columns", unknown or "nothing", f"some of {', '.join(_COLUMNS)}")
    # Likelihoods of different points cannot be compared.
    comparable = len({scores.n_points for scores in rows.values()}) == 1
    body = []
    for name in names:
        cells = _COLUMNS[name].cells([getattr(scores, name) for scores in rows.values()])
        marked = comparable and name == "log_likelihood"
        body.append(_mark_best(cells) if marked else [Text(c) for c in cells])
    table = new_table(title, _caption(body))
    table.add_column("", no_wrap=True, min_width=max(map(len, rows)))
    for name in names:
        table.add_column(Text(_COLUMNS[name].heading(units)), justify="right", no_wrap=True)
    for name, *cells_of_row in zip(rows, *body, strict=True):
        table.add_row(Text(name), *cells_of_row)
    return table


def score_records(rows: Mapping[str, Scores]) -> list[dict[str, float | str | None]]:
    """Return the scores as records that the standard JSON, and any data frame, can hold.

    Parameters
    ----------
    rows : mapping from str to Scores

    Returns
    -------
    list of dict
        One for each row: its ``name``, and every attribute of `Scores`. What is missing or not
        finite, for which JSON has no number, is None.
    """
    _check_rows(rows, Scores)
    records: list[dict[str, float | str | None]] = []
    for name, scores in rows.items():
        record: dict[str, float | str | None] = {"name": name}
        for key, value in scores.as_dict().items():
            record[key] = value if value is not None and math.isfinite(value) else None
        records.append(record)
    return records


def calibration_table(
    rows: Mapping[str, Calibration | PerOutputCalibration],
    *,
    title: str = "",
    intervals: Mapping[str, ConfidenceIntervals] | None = None,
) -> Table:
    """List the method and the parameters of calibrations, one line each, or one for each output.

    Parameters
    ----------
    rows : mapping from str to Calibration or PerOutputCalibration
        Calibrations by name.
    title : str
        Heading of the table.
    intervals : mapping from str to ConfidenceIntervals, optional
        Of α and γ, for some of the names; those of output t of several are ``name[t]``.

    Returns
    -------
    rich.table.Table
        A parameter that the method does not fit is a bare 1. LL is the log likelihood per point of
        the points that the calibration was fitted to, under its own predictive density.
    """
    _check_rows(rows, (Calibration, PerOutputCalibration))
    known = intervals or {}
    lines = {k: c for name, value in rows.items() for k, c in _by_output(name, value).items()}
    strangers = [name for name in known if name not in lines]
    if strangers:
        raise InputError("intervals", strangers, f"names among {', '.join(lines)}")
    table = new_table(title, "A bare 1 is not fitted.")
    for header in ("", "method"):
        table.add_column(header, overflow="fold")
    for header in ("α", "γ", "points", "LL (fit)"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, one in lines.items():
        within = known.get(name)
        alpha = _parameter(one.alpha, one.n_parameters >= 1, within.alpha if within else None)
        gamma = _parameter(one.gamma, one.n_parameters >= 2, within.gamma if within else None)
        n, fit = str(one.n_points), _number(one.log_likelihood if one.n_points else None, 3)
        table.add_row(Text(name), one.method, Text(alpha), Text(gamma), n, fit)
    return table


def paper_table(
    rows: Mapping[Any, Mapping[str, float | None]],
    *,
    title: str = "",
    columns: Sequence[str] | None = None,
    digits: int = 3,
) -> Table:
    """Compare log likelihoods over sub-sample sizes, as Musil et al. 2019 do in their tables.

    Parameters
    ----------
    rows : mapping from sub-sample size to mapping from column to log likelihood
        Sizes are numbers of points, fractions of the training set, or names. A log likelihood may
        be missing or None.
    title : str
        Heading of the table.
    columns : sequence of str, optional
        By default those of `PAPER_COLUMNS` that occur in any row, and then all others.
    digits : int
        Decimals of the log likelihoods.

    Returns
    -------
    rich.table.Table
        The highest log likelihood of each row is bold and has an asterisk.
    """
    if not rows:
        raise InputError("rows", "nothing", "at least one sub-sample size")
    given = dict.fromkeys(name for row in rows.values() for name in row)
    ordered = [
        *(c for c in PAPER_COLUMNS if c in given),
        *(c for c in given if c not in PAPER_COLUMNS),
    ]
    shown = ordered if columns is None else list(columns)
    absent = [name for name in shown if name not in given]
    if absent or not shown:
        raise InputError("columns", absent or "nothing", f"some of {', '.join(ordered) or 'none'}")
    body = [_mark_best([_number(row.get(name), digits) for name in shown]) for row in rows.values()]
    table = new_table(title, _caption(body, " of its row"))
    table.add_column("size", justify="right", no_wrap=True)
    for name in shown:
        table.add_column(Text(name), justify="right")
    for size, cells in zip(rows, body, strict=True):
        table.add_row(Text(_size(size)), *cells)
    return table


def new_table(title: str, caption: str = "") -> Table:
    """Make a table that nine narrow columns fit into on eighty characters."""
    return Table(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption) if caption else None,
        caption_justify="left",
        title_justify="left",
        # Title and caption are wrapped at the width of the table.
        min_width=max(map(len, [title, *caption.splitlines()])),
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        header_style="",
    )


def _check_rows(rows: Mapping[str, object], kind: type | tuple[type, ...]) -> None:
    if not isinstance(rows, Mapping) or not rows:
        raise InputError("rows", type(rows).__name__, "a mapping with at least one name")
    for name, value in rows.items():
        if not isinstance(value, kind):
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise InputError(f"rows[{name!r}]", type(value).__name__, kinds)


def _significant(values: Sequence[float | None]) -> int | None:
    """Return the decimals that give the smallest value of a column three significant digits.

    None stands for exponents: for numbers that would need more than six decimals, or that are so
    large or so different that plain numbers would be too wide.
    """
    sizes = [abs(v) for v in values if v and math.isfinite(v)]
    if not sizes:
        return 3
    decimals = max(2 - math.floor(math.log10(min(sizes))), 0)
    width = decimals + max(math.floor(math.log10(max(sizes))), 0)
    return decimals if decimals <= 6 and width <= 6 else None


def _number(value: float | None, decimals: int | None) -> str:
    """Write one number; None for the decimals stands for exponents."""
    if value is None or math.isnan(value):
        return _MISSING
    return f"{value:.2e}" if decimals is None else f"{value:.{decimals}f}"


def _mark_best(cells: Sequence[str]) -> list[Text]:
    """Mark the highest of numbers, and what cannot be told from it as written."""
    numbers = [float(c) for c in cells if c != _MISSING]
    # One number alone, or all the same, is no comparison.
    best = max(numbers) if len(set(numbers)) > 1 else math.nan
    marked = []
    for cell in cells:
        wins = cell != _MISSING and float(cell) == best
        marked.append(Text(cell + (_BEST if wins else " "), style="bold" if wins else ""))
    return marked


def _caption(body: Sequence[Sequence[Text]], of_what: str = "") -> str:
    """Explain the asterisk, if there is one."""
    marked = any(cell.plain.endswith(_BEST) for cells in body for cell in cells)
    return f"{_BEST} highest log likelihood{of_what}" if marked else ""


def _parameter(value: float, fitted: bool, interval: tuple[float, float] | None) -> str:
    """Write α or γ, with its interval if there is one."""
    if not fitted:
        return "1"
    text = f"{value:.3f}" if 0.01 <= abs(value) < 1000 or value == 0.0 else f"{value:.2e}"
    return text if interval is None else f"{text} [{interval[0]:.3g}, {interval[1]:.3g}]"


def _by_output(
    name: str, calibration: Calibration | PerOutputCalibration
) -> dict[str, Calibration]:
    """Return the calibrations of each output, by name and index."""
    if isinstance(calibration, Calibration):
        return {name: calibration}
    return {f"{name}[{t}]": one for t, one in enumerate(calibration.outputs)}


def _size(size: float | str) -> str:
    """Write a sub-sample size as the paper does: 5000 is 5k."""
    if isinstance(size, str):
        return size
    return f"{size / 1000:g}k" if size >= 1000 and size % 100 == 0 else f"{size:g}"


# Scores with confidence intervals, one line each, side by side: before and after calibration.
#: Mean miscalibration area of calibrated predictions of n points, times √n.
CALIBRATED_AREA = 0.31


@dataclass(frozen=True)
class _Score:
    """How one score is called and written: ``factor`` is 100 for a percentage."""

    label: str
    has_units: bool = False
    factor: float = 1.0
    ideal: str = ""


#: The scores that are shown, in this order, by their names in `qualms.metrics.Scores`.
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


# Tables of calibrations: which method, and which factor for which group.
def comparison_table(comparison: Comparison, *, title: str = "") -> Table:
    """Show how likely points left out are under each method, the best first.

    Parameters
    ----------
    comparison : Comparison
        From `qualms.calibration.cross_validate`.
    title : str
        Heading of the table.
    """
    note = "LL: log likelihood per point left out. behind: ± standard error."
    table = new_table(title, f"{note}\nΔAIC, ΔBIC: if points were independent.")
    table.add_column("method", no_wrap=True)
    for header in ("LL", "behind", "ΔAIC", "ΔBIC", "α", "γ"):
        table.add_column(header, justify="right", no_wrap=True)
    best = comparison.candidates[0].calibration
    for candidate in comparison.candidates:
        one = candidate.calibration
        behind = f"{candidate.behind:.4f} ± {candidate.standard_error:.4f}"
        table.add_row(
            one.method,
            f"{candidate.log_likelihood:.4f}",
            "" if one is best else behind,
            f"{one.aic - best.aic:+.1f}",
            f"{one.bic - best.bic:+.1f}",
            f"{one.alpha:.4g}",
            f"{one.gamma:.3f}",
        )
    for method, why in comparison.failures.items():
        table.add_row(method, Text(why.split(";")[0].split(". ")[0]))
    return table


def comparison_records(comparison: Comparison) -> list[dict[str, float | str]]:
    """Return the numbers of `comparison_table` as records that JSON can hold."""
    return [
        {
            "method": candidate.calibration.method,
            "log_likelihood": candidate.log_likelihood,
            "behind": candidate.behind,
            "standard_error": candidate.standard_error,
            "aic": candidate.calibration.aic,
            "bic": candidate.calibration.bic,
        }
        for candidate in comparison.candidates
    ]


def factor_table(grouped: GroupedCalibration, by: str, *, title: str = "") -> Table:
    """Show the factor of each group on top of the calibration of all points.

    Parameters
    ----------
    grouped : GroupedCalibration
    by : str
        What the groups are values of.
    title : str
        Heading of the table.
    """
    table = new_table(title, "factor: σ → factor · σ; alone: what its own points would say.")
    table.add_column(Text(by), no_wrap=True)
    for header in ("points", "alone", "factor"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, group in sorted(grouped.groups.items()):
        table.add_row(Text(name), str(group.n_points), f"{group.alone:.3f}", f"{group.factor:.3f}")
    return table
