"""Convert docstrings that Sphinx would misread.

``|z|`` is an absolute value, not a substitution; tables are written in Markdown; and "Eq." does not
end a sentence.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext import autosummary

_CODE = re.compile(r"(``.*?``)")
_ROW = re.compile(r"^\s*\|.*\|\s*$")


def escape_bars(line: str) -> str:
    """Escape the vertical bars of a line that are not within code."""
    parts = _CODE.split(line)
    return "".join(p if p.startswith("``") else p.replace("|", r"\|") for p in parts)


def list_table(rows: list[str]) -> list[str]:
    """Turn a Markdown table, its second line being dashes, into one of reStructuredText."""
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [cells[0], *cells[2:]]:
        padded = row + [""] * (len(cells[0]) - len(row))
        lines += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(padded)]
    return ["", *lines, ""]


def mend(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place."""
    mended: list[str] = []
    for is_row, group in groupby(lines, key=lambda line: bool(_ROW.match(line))):
        part = list(group)
        is_table = is_row and len(part) > 1 and set(part[1].strip()) <= set("|-: ")
        mended += list_table(part) if is_table else map(escape_bars, part)
    lines[:] = mended


def setup(app: Sphinx) -> dict[str, bool]:
    """Process docstrings of autodoc, and register abbreviations for autosummary."""
    known = getattr(autosummary, "WELL_KNOWN_ABBREVIATIONS", ())
    autosummary.WELL_KNOWN_ABBREVIATIONS = (*known, "Eq.", "Eqs.", "cf.")
    app.connect("autodoc-process-docstring", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
