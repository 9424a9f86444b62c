"""Where σ is too small for test points that are like the training points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qualms.reproduce.bins import Adequacy, Stretch, adequacy, mean_bins
from qualms.reproduce.markdown import markdown_table
from qualms.reproduce.over_seeds import sub_samples
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Column, Results
from qualms.reproduce.texts import TOO_SMALL

_SHOWN = "student"
#: Columns that a sentence compares, of members and of the projected process.
_COMPARED = ("student", "shrinkage")


def too_small_parts(found: Sequence[Results]) -> list[str]:
    """Return the section: a table of all sizes, and the worst of each problem in words."""
    head = ["data", "n", "within 68 %", "within 95 %", "σ too small by", "σ too large by"]
    rows = [row for results in found for row in _rows(results)]
    words = [_in_words(results) for results in found]
    return [TOO_SMALL, *words, markdown_table(head, rows)] if found else []


def _rows(results: Results) -> list[list[str]]:
    rows = []
    for label, columns in _columns(results, _SHOWN).items():
        judged = _adequacy(results, columns)
        coverage = [_mean(columns, "coverage_68"), _mean(columns, "coverage_95")]
        cells = ["; ".join(s.short() for s in _of(judged, kind)) for kind in (True, False)]
        rows.append([results.title, label, *(f"{c:.1%}" for c in coverage), *cells])
    return rows


def _in_words(results: Results) -> str:
    """Say how wrong σ is at worst, over all sizes."""
    by_column = {column: _columns(results, column) for column in _COMPARED}
    by_column[f"{PROCESS}, CV"] = {PROCESS: [seed.process["CV"] for seed in results.seeds]}
    texts = []
    for column, by_size in by_column.items():
        judged = {label: _adequacy(results, columns) for label, columns in by_size.items()}
        texts.append(f"{column}: {_worst(judged, results.units)}")
    return f"**{results.title}.** At worst, over all sizes: {'. '.join(texts)}."


def _worst(judged: dict[str, Adequacy], units: str) -> str:
    parts = []
    for small, kind in ((True, "too small"), (False, "too large")):
        found = {label: _of(a, small)[0].worst for label, a in judged.items() if _of(a, small)}
        if not found:
            parts.append(f"nowhere {kind}")
            continue
        label = max(found, key=lambda size: found[size].factor)
        size = "" if label == PROCESS else f", n = {label}"
        parts.append(f"{kind} by a factor of {found[label].describe(units)}{size}")
    return "; ".join(parts)


def _of(judged: Adequacy, small: bool) -> Sequence[Stretch]:
    return judged.too_small if small else judged.too_large


def _columns(results: Results, column: str) -> dict[str, list[Column]]:
    """Return a column with each seed, by size."""
    return {
        f"{n:,}": [sub_samples(seed)[i].columns[column] for seed in results.seeds]
        for i, n in enumerate(results.sizes)
    }


def _adequacy(results: Results, columns: Sequence[Column]) -> Adequacy:
    """Judge the bins of all seeds together."""
    n = sum(seed.n_test for seed in results.seeds)
    return adequacy(mean_bins([column.bins for column in columns]), n)


def _mean(columns: Sequence[Column], score: str) -> float:
    return float(np.mean([column.scores[score] for column in columns]))
