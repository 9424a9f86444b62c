"""Reports: the evaluation of a model, or of an ensemble, as one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qualms.arrays import Float64Array, IntArray
from qualms.errors import InputError, counted
from qualms.evaluation import Evaluation
from qualms.io.files import AnyPath, atomic_output, check_output, written_together
from qualms.report.assessment import Assessment, assess, with_uncertainty
from qualms.report.figures import report_figures
from qualms.report.structure_map import (
    NOT_INSTALLED,
    AtomValues,
    Coordinates,
    StructureMap,
    load_viewer,
    make_map,
)
from qualms.report.tables import Table, interval_table, novelty_table, score_table, write_number

#: Scripts, styles and images of the page itself, and nothing from elsewhere. The viewer compiles
#: some of its drawing functions at run time, which needs eval.
POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; font-src data:; "
    "script-src 'unsafe-inline' 'unsafe-eval'; worker-src blob:; connect-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Section:
    """The part of a report about one quantity.

    Attributes
    ----------
    name : str
        Key of the evaluation, such as "forces".
    evaluation : Evaluation
        Of the points with σ > 0.
    assessment : Assessment
    figures : mapping of str to str
        Images as data URIs.
    map : StructureMap or None
        Where the rows of the tables of the worst predictions link to.
    """

    name: str
    evaluation: Evaluation
    assessment: Assessment
    figures: Mapping[str, str]
    map: StructureMap | None = None

    @property
    def heading(self) -> str:
        """The name as a heading."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def anchor(self) -> str:
        """The identifier of the section in the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "quantity"

    @property
    def subtitle(self) -> str:
        """Target, units and number of predictions."""
        e = self.evaluation
        text = f"{e.target}{f' in {e.units}' if e.units else ''}: {counted(len(e), 'prediction')}"
        if len(e) != e.n_structures:
            text += f" for {counted(e.n_structures, 'structure')}"
        return text + (f" by {e.prediction.n_members} members" if e.prediction.n_members else "")

    @cached_property
    def scores(self) -> Table:
        """Scores with confidence intervals."""
        return interval_table(self.assessment.scores, units=self.evaluation.units)

    @cached_property
    def others(self) -> Table | None:
        """Scores of other estimators of the same values."""
        e = self.evaluation
        return score_table(e.scores, units=e.units) if len(e.scores) > 1 else None

    @cached_property
    def by_novelty(self) -> Table | None:
        """Coverage and errors in bins of the novelty of structures, if it is known."""
        return novelty_table(self.evaluation)

    @cached_property
    def worst(self) -> dict[str, Table]:
        """Tables of the worst predictions."""
        by_ratio, by_error = worst_points(self.evaluation)
        return {
            "Largest errors relative to σ": self._worst(by_ratio),
            "Largest errors": self._worst(by_error),
        }

    def _worst(self, points: IntArray) -> Table:
        e, rows = self.evaluation, points.tolist()
        columns = {"structure": [str(e.structure[i]) for i in rows]}
        atoms = None if e.frames is None else [e.frames[e.structure[i]] for i in rows]
        if atoms is not None:
            columns["formula"] = [a.symbols.get_chemical_formula() for a in atoms]
        if e.atom is not None:
            numbers = e.atom[points].tolist()
            columns["atom"] = [str(j) for j in numbers]
            if atoms is not None:
                pairs = zip(atoms, numbers, strict=True)
                columns["atom"] = [f"{j} {a.symbols[j]}" for a, j in pairs]
        if e.component is not None:
            names = e.component_names or range(int(e.component.max()) + 1)
            columns["component"] = [str(names[e.component[i]]) for i in rows]
        std, error = e.prediction.std[points], e.residuals[points]
        # Values have as many digits as σ resolves.
        for name, values in (("reference", e.y[points]), ("predicted", e.prediction.mean[points])):
            columns[name] = [*map(write_number, values, std)]
        columns["σ"] = [*map(write_number, std)]
        columns["error"] = [*map(write_number, error, std)]
        ratios = np.abs(error) / std
        columns["|error|/σ"] = [f"{r:.2f}" if r < 1e5 else f"{r:.2e}" for r in ratios]
        if any(reasons := [e.reasons.get(int(e.structure[i]), "") for i in rows]):
            columns["out of distribution"] = reasons
        note = f"In {e.units}. " if e.units else ""
        note += "Error: reference minus prediction. Structures and atoms are numbered from 0."
        links = [] if self.map is None else [self.map.link(e, i) for i in rows]
        return Table([*columns], [*zip(*columns.values(), strict=True)], note=note, links=links)


@dataclass(frozen=True)
class Picture:
    """A figure beside those of the evaluation."""

    uri: str  #: image as a data URI
    alt: str  #: what it shows
    caption: str


@dataclass(frozen=True)
class Report:
    """What a report contains.

    Attributes
    ----------
    sections : mapping of str to Section
        By quantity; the first is the main one.
    remarks : sequence of str
        About points and structures that are left out, after those given.
    map : StructureMap or None
    page : str
        The HTML.
    paths : tuple of Path
        Files written.
    """

    sections: Mapping[str, Section]
    remarks: Sequence[str]
    map: StructureMap | None
    page: str
    paths: tuple[Path, ...] = ()


def check_report(path: AnyPath, *, force: bool = False) -> tuple[Path, Path]:
    """Check that a report can be written, and return the paths of the page and of its map."""
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"A report is an .html file; {str(path)!r} is not.", parameter="path")
    data = page.with_name(f"{page.stem}.chemiscope.json.gz")
    return check_output(page, force=force), check_output(data, force=force)


def write_report(
    path: AnyPath,
    evaluations: Mapping[str, Evaluation],
    *,
    force: bool = False,
    **content: Any,
) -> Report:
    """Write the evaluation of a model or of an ensemble to one HTML file.

    It contains an assessment, scores with confidence intervals before and after calibration,
    figures, the worst predictions and, with the extra ``qualms[report]``, an interactive map of the
    structures. It opens without a network. The same input gives the same bytes.

    Parameters
    ----------
    path : path
        File to write, ``.html``. The data of the map are written beside it, to
        ``NAME.chemiscope.json.gz``.
    evaluations : mapping of str to Evaluation
        By quantity, the main one first, as from `qualms.atomistic.evaluation.evaluate`. Points with
        σ = 0 are left out, with a remark.
    force : bool
        Whether existing files may be replaced.
    **content
        Other parameters of `make_report`: title, facts, remarks, tables, …
    """
    page, map_path = check_report(path, force=force)
    report = make_report(evaluations, **content)
    with written_together():
        with atomic_output(page, force=force) as file:
            file.write(report.page.encode("utf-8", "backslashreplace"))  # names may not be text
        if report.map is not None:
            with atomic_output(map_path, force=force) as file:
                file.write(report.map.compressed())
    return replace(report, paths=(page,) if report.map is None else (page, map_path))


def make_report(
    evaluations: Mapping[str, Evaluation],
    *,
    title: str = "",
    facts: Mapping[str, str] | None = None,
    remarks: Sequence[str] = (),
    tables: Mapping[str, Table] | None = None,
    pictures: Mapping[str, Picture] | None = None,
    atom_values: AtomValues | None = None,
    coordinates: Coordinates | None = None,
    max_structures: int = 1000,
    seed: int = 0,
) -> Report:
    """Return the report that `write_report` writes.

    Parameters
    ----------
    evaluations : mapping of str to Evaluation
    title : str
        By default the target.
    facts : mapping of str to str
        Description of the model or of the calibration.
    remarks : sequence of str
        Shown below the assessment.
    tables : mapping of str to Table
        Further tables, by heading.
    pictures : mapping of str to Picture
        Further figures, by heading; they come first.
    atom_values : callable, optional
        Takes indices of frames and returns properties of all their atoms, by name: values and
        units. The map colours atoms by the first.
    coordinates : callable, optional
        Takes indices of frames and returns two coordinates of each, (1, 2), or of all their atoms,
        (n_atoms, 2): the axes of the map.
    max_structures : int
        Most structures on the map; of more, it shows the worst and a random sample.
    seed : int
        Random seed for that sample and for the bootstrap.
    """
    if not evaluations:
        message = "There is nothing to report: `evaluations` is empty."
        raise InputError(message, parameter="evaluations")
    usable, notes = {}, [*remarks]
    for name, evaluation in evaluations.items():
        if not np.any(evaluation.residuals):
            raise InputError(
                f"All reference values of {name} equal the predictions. Use values that are not "
                "predictions.",
                parameter="reference",
            )
        usable[name], remark = with_uncertainty(evaluation)
        notes += remark
    main = next(iter(usable.values()))
    viewer, shown = None if main.frames is None else load_viewer(), None
    if main.frames is not None and viewer is None:
        notes.append(NOT_INSTALLED)
    if viewer is not None:
        # The worst by either measure, in turn.
        first = np.stack(worst_points(main), axis=1).ravel().tolist()
        shown = make_map(
            main,
            first,
            title=title,
            atom_values=atom_values,
            coordinates=coordinates,
            max_structures=max_structures,
            seed=seed,
        )
    sections = {
        name: Section(name, e, assess(e, seed=seed), report_figures(e), shown)
        for name, e in usable.items()
    }
    details = {text for section in sections.values() for text in section.assessment.details}
    text = _render(
        title=title or main.target,
        sections=list(sections.values()),
        facts=facts or {},
        remarks=[note for note in notes if note not in details],
        tables=tables or {},
        pictures=pictures or {},
        map=shown,
        viewer=viewer,
    )
    return Report(sections, notes, shown, text)


def _render(**content: Any) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from qualms import __version__

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    style, script = ((here / f"report.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    return environment.get_template("template.html.j2").render(
        **content, version=__version__, policy=POLICY, css=style, js=script
    )


def worst_points(evaluation: Evaluation) -> tuple[IntArray, IntArray]:
    """Return the 20 points with the largest |z|/σ, and those with the largest |z|; all σ > 0."""
    size: Float64Array = np.abs(evaluation.residuals)
    with np.errstate(over="ignore"):
        ratio = size / evaluation.prediction.std
    by_ratio, by_error = (np.argsort(-x, kind="stable")[:20] for x in (ratio, size))
    return by_ratio, by_error
