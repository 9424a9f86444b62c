"""Log likelihoods by size, as rows of tables: the paper's columns, then all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from qualms.report.tables import Table as TerminalTable
from qualms.reproduce.markdown import minus
from qualms.reproduce.over_seeds import (
    bootstrap_of,
    full_model,
    likelihood,
    likelihoods,
    sub_samples,
    written,
)
from qualms.reproduce.published import COLUMNS, CSD, OF_PROCESS, PROCESS, QM9, Table, published
from qualms.reproduce.results import Column, Results, Scheme
from qualms.reproduce.study import VALIDATED

#: The paper divides over atoms: it has no numbers of crystals that are new.
_PUBLISHED: dict[str, Table] = {"qm9": QM9, "csd-atoms": CSD}
#: Differences that vary by less than this are nearly constant.
_CONSTANT = 0.05
#: Columns of the table about the mean of the members.
OF_MEMBERS = (*COLUMNS, "student", "shrinkage", "Student's t")


def reference_rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return label and cells of each row of the paper's table: sizes, bootstrap, and GPR PP."""
    table = _published(results)
    rows = []
    for label, printed, schemes in _by_row(results):
        values = {c: [likelihood(s.reference[c]) for s in schemes] for c in COLUMNS}
        cells = [_cell(v, published(table, printed, c)) for c, v in values.items()]
        rows.append((label, cells))
    process = [seed.process for seed in results.seeds]
    cells = [_cell(_of(process, c), published(table, PROCESS, c)) for c in COLUMNS]
    return [*rows, (PROCESS, cells)]


def member_rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return label and cells of each row of the table of error bars about the members' mean."""
    rows = []
    for label, _, schemes in _by_row(results):
        values = [[likelihood(s.columns[c]) for s in schemes] for c in OF_MEMBERS[:-1]]
        values.append([s.student_t for s in schemes])
        rows.append((label, [_cell(v, None) for v in values]))
    return rows


def _by_row(results: Results) -> Iterable[tuple[str, int, list[Scheme]]]:
    """Yield label, size in the paper and schemes of all seeds; 0 for the bootstrap."""
    for i, n in enumerate(results.sizes):
        yield f"{n:,}", n, [sub_samples(seed)[i] for seed in results.seeds]
    yield "bootstrap", 0, [bootstrap_of(seed) for seed in results.seeds]


def _published(results: Results) -> Table:
    return _PUBLISHED.get(results.name, {}) if results.scale == "paper" else {}


def _of(process: Sequence[Mapping[str, Column]], column: str) -> list[float]:
    return [p[column].scores["log_likelihood"] for p in process if column in p]


def _cell(values: Sequence[float], printed: float | None) -> str:
    """Write mean and standard error over seeds, and what the paper prints, in brackets."""
    if not values:
        return ""
    cell = written(values, ".3f")
    if printed is None:
        return cell
    return f"{cell} [{minus(f'{printed:.{3 if abs(printed) < 10 else 2}f}')}]"


def beside_the_paper(results: Results) -> str:
    """Say by how much log likelihoods differ from what the paper prints; nothing, if not."""
    table = _published(results)
    if not table:
        return ""
    ranges, widest = [], 0.0
    for column in COLUMNS:
        printed = [published(table, n, column) for n in results.sizes]
        found = likelihoods(results, column, full_model).mean(axis=0)
        if None in printed:
            return ""
        less = found - np.array(printed, dtype=np.float64)
        ranges.append(f"{column} {less.min():+.3f} to {less.max():+.3f}")
        widest = max(widest, float(np.ptp(less))) if column in VALIDATED else widest
    same = ". CV and N-L differ by nearly the same at every size" if widest <= _CONSTANT else ""
    process = {c: _of([seed.process for seed in results.seeds], c) for c in OF_PROCESS}
    differences = ", ".join(
        f"{column} {np.mean(found) - printed:+.3f}"
        for (column, found), printed in zip(process.items(), table[PROCESS], strict=True)
    )
    return minus(
        f"Ours less the paper's, over all sizes: {', '.join(ranges)}; {PROCESS}: {differences}"
        f"{same}."
    )


def is_published(results: Results) -> bool:
    """Whether the paper has numbers to compare with."""
    return bool(_published(results))


def terminal_tables(results: Results) -> list[TerminalTable]:
    """Return both tables for a terminal."""
    what = "mean log likelihood" + (" ± standard error" if len(results.seeds) > 1 else "")
    printed = " [the paper's]" if is_published(results) else ""
    title = results.title
    return [
        _filled(title, f"{what}{printed}, about the full model", COLUMNS, reference_rows(results)),
        _filled(title, f"{what}, about the members' mean", OF_MEMBERS, member_rows(results)),
    ]


def _filled(
    title: str, caption: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]
) -> TerminalTable:
    return TerminalTable(
        ["n", *columns], [[label, *cells] for label, cells in rows], title, caption
    )
