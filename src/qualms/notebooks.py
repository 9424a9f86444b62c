"""Tables in HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    headers: Sequence[object], rows: Iterable[Sequence[object]], *, note: str = ""
) -> str:
    """Return a table; the first cell of each row is its name.

    Parameters
    ----------
    headers : sequence
        Of the columns, or none.
    rows : iterable of sequences
    note : str
        Below the table.
    """

    def line(cells: Iterable[object], kind: str = "td") -> str:
        name, *others = (escape(str(cell)) for cell in cells)
        parts = [
            f"<th style='text-align: left'>{name}</th>",
            *(f"<{kind}>{c}</{kind}>" for c in others),
        ]
        return f"<tr>{''.join(parts)}</tr>"

    head = f"<thead>{line(headers, 'th')}</thead>" if headers else ""
    body = "".join(map(line, rows))
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<table>{head}<tbody>{body}</tbody></table>{below}"
