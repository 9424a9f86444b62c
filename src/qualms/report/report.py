"""The predictions that were furthest off."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from qualms.arrays import check_integer
from qualms.errors import InputError, counted
from qualms.io.files import AnyPath, atomic_output, check_output
from qualms.metrics import ScoreIntervals, bootstrap_scores
from qualms.prediction import Prediction
from qualms.report.assessment import Verdict, judge
from qualms.report.figures import Picture, draw_pictures
from qualms.report.judged import Judged
from qualms.report.structure_map import HOW_TO_INSTALL, StructureMap, Viewer, load_viewer, make_map
from qualms.report.tables import interval_note, score_lines, score_table, write_number


@dataclass(frozen=True)
class WorstPoint:
    """One prediction that was far off.

    Attributes
    ----------
    point, structure : int
        Its number among the points, and that of its structure.
    formula : str
        Of its structure; empty if there is none.
    atom : int or None
        Its atom.
    element : str
        That of its atom; empty if there is none.
    component : int or None
        Which of the values of its structure or atom it is, if they are several.
    truth, mean, std, error : float
        In the units of the target; the error is truth minus prediction.
    ratio : float
        |error|/σ.
    """

    point: int
    structure: int
    formula: str
    atom: int | None
    element: str
    component: int | None
    truth: float
    mean: float
    std: float
    error: float
    ratio: float


def worst_points(judged: Judged, n: int, by: Literal["ratio", "error"]) -> Sequence[WorstPoint]:
    """Return the points with the largest |z|/σ, or |z|, the worst first.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    n : int
        How many, at most.
    by : {"ratio", "error"}
    """
    check_integer("n_worst", n, 1)
    size = np.abs(judged.residuals)
    if by == "ratio":
        with np.errstate(over="ignore"):
            size = size / judged.prediction.std
    order = np.argsort(-size, kind="stable")[:n]
    return [_point(judged, i) for i in order.tolist()]


def _point(judged: Judged, i: int) -> WorstPoint:
    structure = int(judged.structure[i])
    atom = None if judged.atom is None else int(judged.atom[i])
    atoms = None if judged.frames is None else judged.frames[structure]
    prediction = judged.prediction[i]
    error, std = float(judged.residuals[i]), float(prediction.std)
    return WorstPoint(
        point=i,
        structure=structure,
        formula="" if atoms is None else atoms.symbols.get_chemical_formula(),
        atom=atom,
        element="" if atoms is None or atom is None else str(atoms.symbols[atom]),
        component=None if judged.component is None else int(judged.component[i]),
        truth=float(judged.y[i]),
        mean=float(prediction.mean),
        std=std,
        error=error,
        ratio=abs(error) / std,
    )


# The content of a report: numbers, tables and pictures, before they become HTML.
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


# A report as one HTML file that needs nothing else: no network, no other file.
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


# Reports as files.
#: What the data of the map are called, after the name of the page.
MAP_SUFFIX = ".chemiscope.json.gz"


def check_report(path: AnyPath, *, force: bool = False) -> tuple[Path, Path]:
    """Refuse a report that could not be written, before the work starts.

    Returns
    -------
    tuple of two Paths
        The page, and the data of its map, which is written if there is a map.
    """
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise InputError("path", path, "a name that ends in .html")
    data = page.with_name(page.stem + MAP_SUFFIX)
    return check_output(page, force=force), check_output(data, force=force)


def write_report(
    judged: Judged,
    path: AnyPath,
    *,
    force: bool = False,
    n_worst: int = 20,
    max_structures: int = 1000,
    seed: int = 0,
) -> tuple[Path, ...]:
    """Judge predictions in one HTML file that opens anywhere, without a network.

    It holds a verdict, scores with confidence intervals before and after calibration, figures, the
    worst predictions and, with the extra ``qualms[report]``, an interactive map of the structures.

    Parameters
    ----------
    judged : Judged
        Predictions, truth and structures.
    path : path
        The file to write, ``.html``. The data of the map are written beside it, as
        ``NAME.chemiscope.json.gz``, for the chemiscope of notebooks and of the web.
    force : bool
        Whether existing files may be replaced.
    n_worst : int
        How many of the worst predictions are listed.
    max_structures : int
        How many structures the map may hold; of more, it shows the worst and a random sample.
    seed : int
        Of that sample, and of the resamples for confidence intervals.

    Returns
    -------
    tuple of Paths
        The files written. The same input gives the same bytes.
    """
    check_report(path, force=force)
    page = make_page(judged, n_worst=n_worst, max_structures=max_structures, seed=seed)
    return write_page(page, path, force=force)


def write_page(page: Page, path: AnyPath, *, force: bool = False) -> tuple[Path, ...]:
    """Write a page, and the data of its map if it has one: see `write_report`."""
    html_path, data_path = check_report(path, force=force)
    text = render(page).encode("utf-8")
    with ExitStack() as stack:
        stack.enter_context(atomic_output(html_path, force=force)).write(text)
        if page.map is None:
            return (html_path,)
        stack.enter_context(atomic_output(data_path, force=force)).write(page.map.compressed())
    return html_path, data_path
