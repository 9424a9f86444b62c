"""The page of a reproduction, made of its result files and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from qualms.io.files import atomic_output
from qualms.reproduce.claims import check_claims, how_claims_are_judged
from qualms.reproduce.complete import NAMES, size_note
from qualms.reproduce.divisions import comparison_of_divisions
from qualms.reproduce.facts import facts
from qualms.reproduce.introduction import differences, introduction
from qualms.reproduce.markdown import figure, keep_links, markdown_table
from qualms.reproduce.over_seeds import sub_samples
from qualms.reproduce.pictures import LEVELS, PANELS
from qualms.reproduce.published import COLUMNS, PROCESS
from qualms.reproduce.results import Results, Seed
from qualms.reproduce.shift_page import shift_parts
from qualms.reproduce.tables import (
    OF_MEMBERS,
    beside_the_paper,
    is_published,
    member_rows,
    reference_rows,
)
from qualms.reproduce.targets import internal_against_validation
from qualms.reproduce.texts import CAPTIONS, FIGURES, MODEL_SELECTION, READING
from qualms.reproduce.too_small import too_small_parts

_GB = 1e9


def make_page(found: Sequence[Results], *, figures: str = "") -> str:
    """Return the page in Markdown.

    Parameters
    ----------
    found : sequence of Results
        Complete ones of one scale, in any order.
    figures : str
        Where the figures are, seen from the page: "" or a directory that ends in "/".
    """
    found = sorted(found, key=lambda results: NAMES.index(results.name))
    levels = ", ".join(f"{level:g}" for level in LEVELS)
    parts = [introduction(found), READING, FIGURES.format(levels=levels)]
    for results in found:
        parts += _section(results, figures)
    parts += comparison_of_divisions(found)
    parts += [MODEL_SELECTION, *too_small_parts(found)]
    parts += [*shift_parts(found, figures), differences(found)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def write_page(
    path: Path, found: Sequence[Results], *, figures: str = "", force: bool = False
) -> None:
    """Write the page: see `make_page`. Pages of the documentation are linked if they are there."""
    text = keep_links(make_page(found, figures=figures), path.resolve().parent)
    with atomic_output(path, force=force) as file:
        file.write(text.encode())


def _section(results: Results, figures: str) -> list[str]:
    seeds = results.seeds
    parts = [
        f"## {results.title}",
        facts(results),
        f"Mean log likelihood of the {seeds[0].n_test:,} test points, {results.units}; "
        f"{_over_seeds(len(seeds))}. The paper's columns, about the prediction of the full "
        f"model{_brackets(results)}:",
        _table(["n", *COLUMNS], reference_rows(results)),
        beside_the_paper(results),
        "The same, and ours, about the mean of the members, which is what qualms predicts:",
        _table(["n", *OF_MEMBERS], member_rows(results)),
        size_note(results),
        internal_against_validation(results),
        _error_table(results),
        "### What the paper says in words",
        _claims_table(results),
    ]
    for ending, caption in _figures(results):
        parts.append(figure(f"{figures}{results.name}-{ending}.png", caption))
    parts.append(_costs(results))
    return parts


def _table(head: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    return markdown_table(head, [[label, *cells] for label, cells in rows])


def _over_seeds(n: int) -> str:
    if n == 1:
        return "one seed"
    return f"mean and standard error over {n} seeds, each with a division of the data of its own"


def _brackets(results: Results) -> str:
    return ", in square brackets what the paper prints" if is_published(results) else ""


def _error_table(results: Results) -> str:
    """Say how accurate the predictions are, and how often they lie within their error bars."""
    factor, units = (1e3, "meV/atom") if results.units == "eV/atom" else (1.0, results.units)
    rows = []
    for i, n in enumerate(results.sizes):
        found = [sub_samples(seed)[i].columns["student"].scores for seed in results.seeds]
        rows.append([f"{n:,}", *_error_cells(found, factor)])
    full = [seed.process["Raw"].scores for seed in results.seeds]
    rows.append([PROCESS, *_error_cells(full, factor)[:2], "", ""])
    head = ["n", f"MAE, {units}", f"RMSE, {units}", "within 68 % (student)", "within 95 %"]
    text = "Errors of the committee mean, and of the full model:"
    return f"{text}\n\n{markdown_table(head, rows)}"


def _error_cells(scores: Sequence[Mapping[str, float]], factor: float) -> list[str]:
    mean = {k: float(np.mean([s[k] for s in scores])) for k in scores[0]}
    return [
        f"{factor * mean['mae']:.3g}",
        f"{factor * mean['rmse']:.3g}",
        f"{mean['coverage_68']:.1%}",
        f"{mean['coverage_95']:.1%}",
    ]


def _claims_table(results: Results) -> str:
    rows = [[c.says, c.criterion, c.found, c.holds] for c in check_claims(results)]
    table = markdown_table(["the paper", "taken to hold if", "here", "holds"], rows)
    return f"{how_claims_are_judged(len(results.seeds))}\n\n{table}"


def _figures(results: Results) -> Iterable[tuple[str, str]]:
    for ending in (*PANELS.values(), "sizes"):
        yield ending, CAPTIONS[ending].format(title=results.title)


def _costs(results: Results) -> str:
    lines = []
    for seed in results.seeds:
        shared, members = sum(seed.seconds.values()), sum(s.seconds for s in seed.schemes)
        total = shared + members if seed.wall is None else seed.wall
        lines.append(
            f"seed {seed.seed}: {total / 60:.1f} min ({shared / 60:.1f} for features, "
            f"representatives, kernels and the full model, {members / 60:.1f} for the members of "
            f"all sizes){_peak(seed)}"
        )
    m = results.machine
    where = f"{m['processor']}, {m['cores']} cores, {m['memory']}; Python {m['python']}, "
    libraries = ", ".join(f"{k} {m[k]}" for k in ("numpy", "scipy", "dscribe") if k in m)
    return (
        f"Time and memory ({where}{libraries}): {'; '.join(lines)}. Other work on the machine is "
        "in these times. Memory is the largest since the command was started, of the process "
        "and its largest worker."
    )


def _peak(seed: Seed) -> str:
    return f", peak {seed.memory / _GB:.1f} GB" if seed.memory else ""
