"""Tables of scores and calibrations for the terminal, Markdown and HTML, and as JSON records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from qualms.calibration.choice import Comparison
from qualms.calibration.groups import GroupedCalibration
from qualms.evaluation import Evaluation
from qualms.metrics import (
    AREA_BY_CHANCE,
    BinnedErrors,
    ScoreIntervals,
    Scores,
    binned_errors,
    covering_levels,
    default_bins,
)

if TYPE_CHECKING:
    import rich.table

_MISSING = "–"
_BEST = "*"
_BEST_NOTE = f"{_BEST} highest log likelihood"

Record = dict[str, float | str | None]


@dataclass(frozen=True)
class Table:
    """A table of text: printed by rich, written as Markdown, or embedded in a report.

    Attributes
    ----------
    headers : sequence of str
        A line break in a header is not kept in Markdown.
    rows : sequence of sequences of str
        The first cell of each row is its name. Cells that end in an asterisk are bold.
    title, note : str
        Above and below the table.
    links : sequence of (structure, atom) or None, optional
        What the map of a report shows when a row is clicked; the atom may be None.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    links: Sequence[tuple[int, int | None] | None] = ()

    def __rich__(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, style="bold") if self.title else None,
            caption=Text(self.note) if self.note else None,
            title_justify="left",
            caption_justify="left",
            # rich wraps title and caption at the width of the table.
            min_width=max(map(len, [self.title, *self.note.splitlines()])),
            box=box.SIMPLE_HEAD,
            padding=0,
            show_edge=False,
            header_style="",
        )
        for i, header in enumerate(self.headers):
            table.add_column(Text(header), justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            cells = (Text(cell, style="bold" if cell.endswith(_BEST) else "") for cell in row)
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """Return the table in Markdown, without title and note."""
        rule = ["---"] + ["---:"] * (len(self.headers) - 1)
        lines = [[header.replace("\n", " ") for header in self.headers], rule, *self.rows]
        escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


@dataclass(frozen=True)
class _Score:
    """How a score is labelled and formatted: `decimals` is None for scores in the units of y.

    Scores without a short label have no column in `score_table`.
    """

    short: str
    label: str
    decimals: int | None
    ideal: str = ""
    factor: float = 1.0


_SCORES = {
    "rmse": _Score("RMSE", "Root mean squared error", None, "low"),
    "mae": _Score("MAE", "Mean absolute error", None, "low"),
    "log_likelihood": _Score("LL", "Log likelihood per point", 3, "high"),
    "crps": _Score("CRPS", "CRPS", None, "low"),
    "miscalibration_area": _Score("area", "Miscalibration area", 3),
    "rms_calibration_error": _Score("", "Root mean square calibration error", 3),
    "ence": _Score("ENCE", "ENCE", 3),
    "coverage_68": _Score("cov.\n68 %", "Coverage of the 68 % interval", 1, "68 %", 100.0),
    "coverage_95": _Score("cov.\n95 %", "Coverage of the 95 % interval", 1, "95 %", 100.0),
    "coverage_95_conformal": _Score(
        "", "Coverage of the conformal 95 % interval", 1, "95 %", 100.0
    ),
    "sharpness": _Score("", "Sharpness (root mean variance)", None, "the RMSE"),
    "spearman": _Score("rank\ncorr.", "Rank correlation of |error| and σ", 2, "high"),
    "interval_score_95": _Score("", "Interval score (95 %)", None, "low"),
}


def score_table(rows: Mapping[str, Scores], *, units: str = "", title: str = "") -> Table:
    """Compare predictions of the same points, one row each.

    Columns are RMSE, MAE, LL (log likelihood per point), CRPS, miscalibration area, ENCE, coverage
    of the 68 and 95 % intervals in per cent, and the rank correlation of |error| and σ. The highest
    log likelihood has an asterisk if all rows have the same number of points.

    Parameters
    ----------
    rows : mapping of str to Scores
        By name of the estimator or calibration.
    units : str
        Units of y.
    title : str
    """
    comparable = len({scores.n_points for scores in rows.values()}) == 1
    headers, body = [""], []
    for name, score in _SCORES.items():
        if not score.short:
            continue
        values = (score.factor * getattr(scores, name) for scores in rows.values())
        cells = [_number(value, score.decimals) for value in values]
        body.append(_mark_best(cells) if comparable and name == "log_likelihood" else cells)
        in_units = f"\n{units}" if score.decimals is None and units else ""
        headers.append(score.short + in_units)
    lines = [[name, *cells] for name, *cells in zip(rows, *body, strict=True)]
    return Table(headers, lines, title, _BEST_NOTE if comparable and len(rows) > 1 else "")


def score_records(rows: Mapping[str, Scores]) -> list[Record]:
    """Return scores as JSON records, with a ``name``; numbers that are not finite are None."""
    return [
        {"name": name, **{key: _finite(value) for key, value in scores.as_dict().items()}}
        for name, scores in rows.items()
    ]


def interval_table(
    columns: Mapping[str, ScoreIntervals],
    *,
    units: str = "",
    title: str = "",
) -> Table:
    """Compare scores and their confidence intervals, one row per score.

    Parameters
    ----------
    columns : mapping of str to ScoreIntervals
        For instance "before calibration" and "after calibration", of the same points.
    units : str
        Units of y.
    title : str
    """
    first = next(iter(columns.values()))
    rows = []
    for name, score in _SCORES.items():
        if all(getattr(column.scores, name) is None for column in columns.values()):
            continue
        label = f"{score.label}, {units}" if score.decimals is None and units else score.label
        cells = [_interval_cell(name, score, column) for column in columns.values()]
        ideal = score.ideal or _expected_if_calibrated(name, first)
        levels = {"coverage_68": 0.68, "coverage_95": 0.95}  # of Gaussian intervals
        if first.dof is not None and name in levels:
            z = float(ndtri(0.5 * (1 + levels[name])))
            ideal = f"{100 * covering_levels([z], [1.0], first.dof)[0]:.1f} %"
        rows.append([label, *cells, ideal])
    note = ""
    if first.intervals:
        note = (
            f"[{100 * first.level:g} % confidence intervals] from {first.n_bootstrap} bootstrap "
            f"samples of {first.n_groups} structures."
        )
    return Table(["Score", *columns, "ideal"], rows, title, note)


def interval_records(columns: Mapping[str, ScoreIntervals]) -> list[Record]:
    """Return scores and intervals as JSON records.

    Each has ``column``, ``score``, ``value``, ``low``, ``high`` and ``level``; numbers that are
    missing or not finite are None.
    """
    records: list[Record] = []
    for column, scores in columns.items():
        for name in _SCORES:
            low, high = scores.intervals.get(name, (None, None))
            numbers = {"value": getattr(scores.scores, name), "low": low, "high": high}
            finite = {key: _finite(value) for key, value in numbers.items()}
            records.append({"column": column, "score": name, **finite, "level": scores.level})
    return records


#: Bins of novelty, of so many structures at least.
_NOVELTY_BINS, _PER_BIN = 5, 10


def novelty_bins(evaluation: Evaluation) -> BinnedErrors | None:
    """Return errors in bins of the novelty of structures; None if it is not known."""
    if evaluation.novelty is None or not len(evaluation):
        return None
    n_bins = int(np.clip(evaluation.n_structures // _PER_BIN, 1, _NOVELTY_BINS))
    z, std = evaluation.residuals, evaluation.prediction.std
    return binned_errors(z, std, min(n_bins, len(z)), evaluation.novelty)


def novelty_table(evaluation: Evaluation, *, title: str = "") -> Table | None:
    """Show coverage and RMSE/σ in bins of the novelty of structures; None if it is not known.

    Parameters
    ----------
    evaluation : Evaluation
        Of points with σ > 0.
    title : str
    """
    bins = novelty_bins(evaluation)
    if bins is None:
        return None
    rows, columns = [], ("points", "within σ", "within 1.96 σ", "RMSE/σ")
    for k, largest in enumerate(bins.largest):
        ratio, error = (x[k] / bins.rmv[k] for x in (bins.rmse, bins.rmse_stderr))
        within = (f"{100 * share[k]:.0f} %" for share in (bins.within_68, bins.within_95))
        spread = f" ± {error:.1g}" if np.isfinite(error) else ""  # of one structure
        cells = [str(bins.counts[k]), *within, f"{ratio:.2f}{spread}"]
        rows.append([f"up to {write_number(largest)}", *cells])
    note = (
        "Novelty: the largest of the environments of a structure,\n"
        "in units of the limit beyond which it is an extrapolation.\n"
        "Calibrated: 68 %, 95 %, 1."
    )
    return Table(["novelty", *columns], rows, title, note)


def novelty_records(evaluation: Evaluation) -> list[Record]:
    """Return the numbers of `novelty_table` as JSON records; none if novelty is not known."""
    bins = novelty_bins(evaluation)
    if bins is None:
        return []
    return [
        {
            "novelty": float(bins.largest[k]),
            "n_points": int(bins.counts[k]),
            "coverage_68": float(bins.within_68[k]),
            "coverage_95": float(bins.within_95[k]),
            "rmse_over_sigma": _finite(float(bins.rmse[k] / bins.rmv[k])),
        }
        for k in range(len(bins.counts))
    ]


def comparison_table(comparison: Comparison) -> Table:
    """Show the cross-validated log likelihood of each calibration method, the best first."""
    best = comparison.candidates[0].calibration
    rows = []
    for candidate in comparison.candidates:
        fit = candidate.calibration
        delta = f"{candidate.behind:.4f} ± {candidate.standard_error:.4f}"
        row = [fit.method, f"{candidate.log_likelihood:.4f}", "" if fit is best else delta]
        row += [f"{fit.aic - best.aic:+.1f}", f"{fit.bic - best.bic:+.1f}"]
        rows.append([*row, f"{fit.alpha:.4g}", f"{fit.gamma:.3f}"])
    rows += [[method, "not fitted", *[""] * 5] for method in comparison.failures]
    note = (
        "LL: cross-validated log likelihood per point. delta: difference to the best ± standard "
        "error.\nΔAIC, ΔBIC: for independent points."
    )
    return Table(["method", "LL", "delta", "ΔAIC", "ΔBIC", "α", "γ"], rows, note=note)


def comparison_records(comparison: Comparison) -> list[Record]:
    """Return the numbers of `comparison_table` as JSON records."""
    return [
        {
            "method": candidate.calibration.method,
            "log_likelihood": candidate.log_likelihood,
            "delta": candidate.behind,
            "standard_error": candidate.standard_error,
            "aic": candidate.calibration.aic,
            "bic": candidate.calibration.bic,
        }
        for candidate in comparison.candidates
    ]


def factor_table(grouped: GroupedCalibration, by: str) -> Table:
    """Show the factor of each group, applied after the calibration of all points."""
    rows = [
        [name, str(group.n_points), f"{group.alone:.3f}", f"{group.factor:.3f}"]
        for name, group in sorted(grouped.groups.items())
    ]
    note = "factor: σ is multiplied by it. alone: the factor fitted to the group without shrinkage."
    return Table([by, "points", "alone", "factor"], rows, note=note)


def write_number(value: float, uncertainty: float | None = None) -> str:
    """Format a number to two digits of its uncertainty, or to three significant digits."""
    if not math.isfinite(value):
        return "−∞" if value < 0 else "∞" if value > 0 else _MISSING
    scale = uncertainty if uncertainty and math.isfinite(uncertainty) else abs(value) / 10.0
    decimals = 1 - math.floor(math.log10(scale)) if scale > 0.0 else 2
    size = max(abs(value), scale)
    if size >= 1e6 or (0.0 < size < 1e-4):
        digits = max(min(decimals + math.floor(math.log10(size)), 6), 1)
        return f"{value:.{digits}e}".replace("-", "−")
    return f"{value:.{min(max(decimals, 0), 8)}f}".replace("-", "−")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None, decimals: int | None) -> str:
    if value is None or math.isnan(value):
        return _MISSING
    return write_number(value) if decimals is None else f"{value:.{decimals}f}"


def _mark_best(cells: Sequence[str]) -> list[str]:
    """Append an asterisk to the highest number and to those that are equal to it as written."""
    numbers = [float(c) for c in cells if c != _MISSING]
    best = max(numbers) if len(set(numbers)) > 1 else math.nan
    return [c + (_BEST if c != _MISSING and float(c) == best else " ") for c in cells]


def _interval_cell(name: str, score: _Score, column: ScoreIntervals) -> str:
    value, percent = getattr(column.scores, name), " %" * (score.factor == 100.0)
    if value is None:
        return "-"
    value *= score.factor
    if name not in column.intervals:
        return f"{write_number(value)}{percent}"
    low, high = (score.factor * end for end in column.intervals[name])
    texts = [write_number(x, 0.5 * (high - low)) for x in (value, low, high)]
    return f"{texts[0]}{percent} [{texts[1]}, {texts[2]}]"


def _expected_if_calibrated(name: str, column: ScoreIntervals) -> str:
    """Return the mean of a miscalibration score for calibrated predictions.

    For independent points, or, for groups of points, the range up to as many points as groups.
    """
    n_points = column.scores.n_points
    expected = {
        "miscalibration_area": AREA_BY_CHANCE,
        "rms_calibration_error": 6**-0.5,
        "ence": math.sqrt(default_bins(n_points) / math.pi),
    }[name]
    low, high = (expected / math.sqrt(n) for n in (n_points, column.n_groups))
    return f"about {low:.2g}" if column.n_groups == n_points else f"{low:.2g} to {high:.2g}"
