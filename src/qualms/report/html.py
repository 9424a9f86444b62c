"""A report as one HTML file that needs nothing else: no network, no other file.

Every text is escaped. A content security policy forbids the page to load anything, whatever it
holds.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from qualms.report.page import Assessment, Page, TableText
from qualms.report.pictures import Picture
from qualms.report.structure_map import StructureMap, Viewer
from qualms.report.verdict import Verdict

#: Scripts and styles of the page itself, pictures within it, and nothing from elsewhere. The viewer
#: compiles some of its drawing functions when it runs, which needs eval.
_POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; font-src data:; "
    "script-src 'unsafe-inline' 'unsafe-eval'; worker-src blob:; connect-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_SURPRISES, _ERRORS = "Largest errors for their error bars", "Largest errors"
_OTHERS = "Other estimators"
#: Columns of a table that leaves room for another beside it.
_NARROW = 7
_PAPER = (
    "Musil, Willatt, Langovoy and Ceriotti, Fast and Accurate Uncertainty Estimation in Chemical "
    "Machine Learning, J. Chem. Theory Comput. 15, 906 (2019)"
)


def render(page: Page) -> str:
    """Write a report as HTML.

    Parameters
    ----------
    page : Page

    Returns
    -------
    str
        The same for the same page.
    """
    from qualms import __version__

    title = escape(page.title)
    sections = _sections(page)
    body = "\n".join(sections.values())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"{_header(page, tuple(sections))}\n<main>\n{body}\n</main>\n"
        f"{_footer(page.viewer, __version__)}\n{_scripts(page)}</body>\n</html>\n"
    )


def _sections(page: Page) -> dict[str, str]:
    """Return the parts of the page by their names, in their order."""
    parts = {
        "Scores": _table(page.scores, "Scores", labels=True),
        "Figures": _figures(page.pictures),
        "Map of structures": _map(page.map) if page.map is not None else "",
        "Worst predictions": _worst(page),
        **{name: _table(table, name, labels=True) for name, table in page.tables.items()},
        _OTHERS: _table(page.comparison, _OTHERS, labels=True) if page.comparison else "",
        **{_heading(name): _other(name, other) for name, other in page.others.items()},
        "Details": _facts(page.facts),
    }
    return {name: _section(name, part) for name, part in parts.items() if part}


def _heading(name: str) -> str:
    return name[:1].upper() + name[1:]


def _other(name: str, found: Assessment) -> str:
    """Write all about another quantity of the same structures."""
    head = _heading(name)
    parts = [
        f'<p class="subtitle">{escape(found.subtitle)}</p>',
        _verdict(found.verdict, f"Verdict on {name}"),
        f"<h3>Scores</h3>\n{_table(found.scores, f'{head}: scores', labels=True)}",
        _figures(found.pictures),
        _worst(found, f"{head}: "),
    ]
    if found.comparison is not None:
        table = _table(found.comparison, f"{head}: {_OTHERS.lower()}", labels=True)
        parts.append(f"<h3>{_OTHERS}</h3>\n{table}")
    return "\n".join(parts)


def _worst(found: Assessment, of: str = "") -> str:
    """Write the worst predictions, in two tables side by side unless they are too wide for that."""
    kind = "worst" if len(found.errors.headers) <= _NARROW else "worst wide"
    tables = "\n".join(
        f"<div>\n<h3>{name}</h3>\n{_table(table, of + name)}\n</div>"
        for name, table in ((_SURPRISES, found.surprises), (_ERRORS, found.errors))
    )
    return f'<div class="{kind}">\n{tables}\n</div>'


def _section(name: str, content: str) -> str:
    anchor = _anchor(name)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n'
        f'<h2 id="{anchor}-title">{escape(name)}</h2>\n{content}\n</section>'
    )


def _anchor(name: str) -> str:
    return "map" if name.startswith("Map") else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _header(page: Page, names: Sequence[str]) -> str:
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in page.remarks)
    links = "".join(f'<li><a href="#{_anchor(n)}">{escape(n)}</a></li>' for n in names)
    return (
        f'<header>\n<h1>{escape(page.title)}</h1>\n<p class="subtitle">{escape(page.subtitle)}</p>'
        f"\n{_verdict(page.verdict, 'Verdict')}\n"
        + "".join(map(_further, page.others, page.others.values()))
        + (f'<ul class="remarks">{remarks}</ul>\n' if remarks else "")
        + f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n</header>'
    )


def _further(name: str, found: Assessment) -> str:
    """Write the verdict on another quantity as one sentence, with a link to the rest."""
    link = f'<a href="#{_anchor(name)}">{escape(_heading(name))}</a>'
    return f'<p class="further">{link}: {escape(found.verdict.sentence)}</p>\n'


def _verdict(verdict: Verdict, name: str) -> str:
    details = " ".join(verdict.details)
    return (
        f'<div class="verdict {verdict.grade}" role="note" aria-label="{escape(name)}">\n'
        f"<p>{escape(verdict.sentence)}</p>\n<p>{escape(details)}</p>\n</div>"
    )


def _table(table: TableText, name: str, *, labels: bool = False) -> str:
    """Write a table; ``labels`` if the first column is words rather than numbers."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in table.headers)
    links = table.links or [None] * len(table.rows)
    rows = [_row(row, link) for row, link in zip(table.rows, links, strict=True)]
    note = f'\n<p class="note">{escape(table.note)}</p>' if table.note else ""
    kind = ' class="labels"' if labels else ""
    # A table that scrolls sideways on a narrow screen must be reachable by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">\n'
        f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>\n</div>{note}"
    )


def _row(row: tuple[str, ...], link: tuple[int, int | None] | None) -> str:
    first = escape(row[0])
    if link is not None:
        structure, atom = link
        of_atom = "" if atom is None else f' data-atom="{atom}"'
        first = f'<button type="button" data-structure="{structure}"{of_atom}>{first}</button>'
    cells = "".join(_cell(cell) for cell in row[1:])
    return f'<tr><th scope="row">{first}</th>{cells}</tr>'


def _cell(text: str) -> str:
    """Write a cell, an interval in it in a softer colour."""
    value, bracket, interval = text.partition(" [")
    if bracket and interval.endswith("]"):
        return f'<td>{escape(value)} <span class="interval">[{escape(interval)}</span></td>'
    return f"<td>{escape(text)}</td>"


def _figures(pictures: Sequence[Picture]) -> str:
    return '<div class="figures">\n' + "\n".join(map(_figure, pictures)) + "\n</div>"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.data).decode("ascii")
    return (
        f"<figure>\n<h3>{escape(picture.title)}</h3>\n"
        f'<img src="data:{picture.kind};base64,{data}" alt="{escape(picture.alt)}">\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
    )


def _map(shown: StructureMap) -> str:
    return (
        f"<p>{escape(shown.note)} The menus in its corner choose axes and colours.</p>\n"
        '<p id="map-message" role="status"></p>\n'
        '<div class="map">\n<div>\n<div id="map-meta" hidden></div>\n<div id="map-plane"></div>\n'
        '</div>\n<div>\n<div id="map-structure"></div>\n<div id="map-info"></div>\n</div>\n</div>\n'
        "<noscript><p>The map needs JavaScript.</p></noscript>"
    )


def _facts(facts: Mapping[str, str]) -> str:
    lines = "\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>\n{lines}\n</dl>" if facts else ""


def _footer(viewer: Viewer | None, version: str) -> str:
    text = f"<p>Written by qualms {escape(version)}. The method: {escape(_PAPER)}.</p>"
    if viewer is not None:
        text += (
            f"\n<p>The map is shown by chemiscope {escape(viewer.version)} (BSD 3-clause licence), "
            "which is part of this file.</p>\n<details><summary>Licences of chemiscope and of the "
            f"libraries in it</summary>\n<pre>{escape(viewer.licence)}</pre>\n</details>"
        )
    return f"<footer>\n{text}\n</footer>"


def _scripts(page: Page) -> str:
    if page.map is None or page.viewer is None:
        return ""
    viewer = page.viewer.script
    # A script ends at the first closing tag, even one within a string of it.
    viewer = viewer.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")
    return (
        f'<script type="application/json" id="map-data">{_json(page.map.data)}</script>\n'
        f"<script>\n{viewer}\n</script>\n<script>\n{_asset('page.js')}</script>\n"
    )


def _json(data: Mapping[str, Any]) -> str:
    """Write JSON that can stand in a script element, whatever it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    """Read a file that comes with this package."""
    return files("qualms.report").joinpath(name).read_text(encoding="utf-8")
