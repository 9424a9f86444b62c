"""Scores and calibrations as tables for the terminal, and as records for files.

The best of a comparison is bold and has an asterisk, so that it can be found without colours and in
a text file. Names are written as they are; square brackets in them are no markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qualms.core.calibration import Calibration, ConfidenceIntervals, PerOutputCalibration
from qualms.core.scores import Scores
from qualms.errors import InputError

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
