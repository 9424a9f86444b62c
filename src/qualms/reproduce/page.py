"""The page of a reproduction, made of its result files and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from qualms.reproduce.claims import check_claims, sub_samples
from qualms.reproduce.pictures import PANELS
from qualms.reproduce.published import COLUMNS, CSD, PROCESS, QM9, SIZES, Table, published
from qualms.reproduce.results import Column, Results, Scheme, Seed, Shift, Shifted
from qualms.reproduce.texts import (
    CAPTIONS,
    DIFFERENCES,
    INTRODUCTION,
    MODEL_SELECTION,
    READING,
    SHIFT,
)

_PUBLISHED: dict[str, Table] = {"qm9": QM9, "csd-atoms": CSD, "csd-crystals": CSD}
_OURS = ("student", "shrinkage")
_STUDENT_T = "Student's t"
_GB = 1e9
_ONE_SIGMA = 0.68


def make_page(found: Sequence[Results], *, figures: str = "") -> str:
    """Return the page in Markdown.

    Parameters
    ----------
    found : sequence of Results
        Complete ones, in the order of the page.
    figures : str
        Where the figures are, seen from the page: "" or a directory that ends in "/".
    """
    parts = [INTRODUCTION, READING]
    for results in found:
        parts += _section(results, figures)
    parts += [MODEL_SELECTION, *_shifts(found, figures), DIFFERENCES]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def table_rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return label and cells of each row of the table: sizes, bootstrap, and GPR PP."""
    table = _PUBLISHED[results.name] if results.scale == "paper" else {}
    rows = []
    for i, n in enumerate(results.sizes):
        schemes = [sub_samples(seed)[i] for seed in results.seeds]
        # Crystals of a sub-sample stand for as many atoms as the paper's sizes.
        printed = SIZES[i] if results.name != "qm9" else n
        rows.append((f"{n:,}", _scheme_cells(schemes, table, printed)))
    boots = [[s for s in seed.schemes if s.replace] for seed in results.seeds]
    if all(boots):
        rows.append(("bootstrap", _scheme_cells([b[0] for b in boots], {}, 0)))
    for label, process in _processes(results.seeds).items():
        printed_table = table if label == PROCESS else {}
        cells = [_cell(_of(process, c), published(printed_table, PROCESS, c)) for c in COLUMNS]
        rows.append((label, [*cells, "", "", ""]))
    return rows


def _scheme_cells(schemes: Sequence[Scheme], table: Table, printed: int) -> list[str]:
    columns = [[s.columns[c] for s in schemes if c in s.columns] for c in (*COLUMNS, *_OURS)]
    values = [[c.scores["log_likelihood"] for c in found] for found in columns]
    references = [published(table, printed, c) for c in (*COLUMNS, *_OURS)]
    cells = [_cell(v, r) for v, r in zip(values, references, strict=True)]
    return [*cells, _cell([s.student_t for s in schemes], None)]


def _processes(seeds: Sequence[Seed]) -> dict[str, list[Mapping[str, Column]]]:
    return {
        PROCESS: [seed.process for seed in seeds],
        f"{PROCESS}, σ² by evidence": [seed.process_evidence for seed in seeds],
    }


def _of(process: Sequence[Mapping[str, Column]], column: str) -> list[float]:
    return [p[column].scores["log_likelihood"] for p in process if column in p]


def _cell(values: Sequence[float], printed: float | None) -> str:
    """Write mean and standard error over seeds, and what the paper prints, in brackets."""
    if not values:
        return ""
    mean = f"{np.mean(values):.3f}"
    if len(values) > 1:
        mean += f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"
    cell = mean if printed is None else f"{mean} [{printed:.{3 if abs(printed) < 10 else 2}f}]"
    return cell.replace("-", "−")


def _section(results: Results, figures: str) -> list[str]:
    seeds = results.seeds
    head = ["n", *COLUMNS, *_OURS, _STUDENT_T]
    rows = [[label, *cells] for label, cells in table_rows(results)]
    parts = [
        f"## {results.title}",
        _facts(results),
        f"Mean log likelihood of the {seeds[0].n_test:,} test points, {results.units}; "
        f"{_over_seeds(len(seeds))}, in square brackets what the paper prints:",
        _markdown_table(head, rows),
        _differences_to_validation(results),
        _error_table(results),
        "### What the paper says in words",
        _claims_table(results),
    ]
    for ending, caption in _figures(results):
        parts.append(_figure(f"{figures}{results.name}-{ending}.png", caption))
    parts.append(_costs(results))
    return parts


def _over_seeds(n: int) -> str:
    if n == 1:
        return "one seed"
    return f"mean and standard error over {n} seeds, each with a division of the data of its own"


def _facts(results: Results) -> str:
    seed = results.seeds[0]
    unit = "crystals" if results.name == "csd-crystals" else "points"
    size = f" Sizes of sub-samples count {unit}." if unit == "crystals" else ""
    return (
        f"{seed.n_train:,} training, {seed.n_validation:,} validation and {seed.n_test:,} test "
        f"points from {results.source}; {seed.n_representatives:,} representatives by farthest "
        f"point sampling out of {seed.n_environments:,} environments; 16 members.{size}"
    )


def _differences_to_validation(results: Results) -> str:
    """Say how internal calibration compares with that on a validation set."""
    rows = []
    for i, n in enumerate(results.sizes):
        schemes = [sub_samples(seed)[i] for seed in results.seeds]
        student = [_gain(s, "student", "CV") for s in schemes]
        shrinkage = [_gain(s, "shrinkage", "N-L") for s in schemes]
        internal = np.mean([s.n_internal for s in schemes])
        rows.append([f"{n:,}", f"{internal:,.0f}", _signed(student), _signed(shrinkage)])
    head = ["n", "points of the internal calibration", "student − CV", "shrinkage − N-L"]
    text = (
        "Internal calibration, which sets nothing aside, against calibration on the validation set "
        "(targets: student within 0.005 of CV, shrinkage at least equal to N-L):"
    )
    return f"{text}\n\n{_markdown_table(head, rows)}"


def _gain(scheme: Scheme, column: str, over: str) -> float:
    columns = scheme.columns
    found = columns[column].scores["log_likelihood"] - columns[over].scores["log_likelihood"]
    return float(found)


def _signed(values: Sequence[float]) -> str:
    text = f"{np.mean(values):+.4f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1) / np.sqrt(len(values)):.4f}"
    return text.replace("-", "−")


def _error_table(results: Results) -> str:
    """Say how accurate the predictions are, and how often they lie within their error bars."""
    factor, units = (1e3, "meV/atom") if results.units == "eV/atom" else (1.0, results.units)
    rows = []
    for i, n in enumerate(results.sizes):
        found = [sub_samples(seed)[i].columns["student"].scores for seed in results.seeds]
        rows.append([f"{n:,}", *_error_cells(found, factor)])
    full = [seed.process["Raw"].scores for seed in results.seeds]
    rows.append([PROCESS, *_error_cells(full, factor)[:2], "", ""])
    head = ["n", f"MAE, {units}", f"RMSE, {units}", "within σ (student)", "within 2σ (student)"]
    text = "Errors of the committee mean, and of the full model:"
    return f"{text}\n\n{_markdown_table(head, rows)}"


def _error_cells(scores: Sequence[Mapping[str, float]], factor: float) -> list[str]:
    mean = {k: float(np.mean([s[k] for s in scores])) for k in scores[0]}
    return [
        f"{factor * mean['mae']:.3g}",
        f"{factor * mean['rmse']:.3g}",
        f"{mean['coverage_68']:.1%}",
        f"{mean['coverage_95']:.1%}",
    ]


def _claims_table(results: Results) -> str:
    rows = [[c.says, c.found, "yes" if c.holds else "no"] for c in check_claims(results)]
    return _markdown_table(["the paper", "here", "holds"], rows)


def _figures(results: Results) -> Iterable[tuple[str, str]]:
    for ending in (*PANELS.values(), "sizes"):
        yield ending, CAPTIONS[ending].format(title=results.title)


def _figure(path: str, caption: str) -> str:
    return f":::{{figure}} {path}\n:alt: {caption}\n:width: 46em\n\n{caption}\n:::"


def _costs(results: Results) -> str:
    lines = []
    for seed in results.seeds:
        shared, members = sum(seed.seconds.values()), sum(s.seconds for s in seed.schemes)
        lines.append(
            f"seed {seed.seed}: {(shared + members) / 60:.1f} min ({shared / 60:.1f} for features, "
            f"representatives, kernels and the full model, {members / 60:.1f} for the members of "
            f"all sizes), peak {seed.memory / _GB:.1f} GB"
        )
    m = results.machine
    where = f"{m['processor']}, {m['cores']} cores, {m['memory']}; Python {m['python']}, "
    libraries = ", ".join(f"{k} {m[k]}" for k in ("numpy", "scipy", "dscribe") if k in m)
    return f"Time and memory ({where}{libraries}): " + "; ".join(lines) + "."


def _shifts(found: Sequence[Results], figures: str) -> list[str]:
    shifted = [results for results in found if results.shift is not None]
    if not shifted:
        return []
    parts = [SHIFT]
    for results in shifted:
        assert results.shift is not None, "filtered above"
        parts += [f"### {results.title}", _shift_text(results.shift, results.units)]
        parts.append(_shift_table(results.shift, results.units))
        caption = CAPTIONS["shift"].format(title=results.title)
        parts.append(_figure(f"{figures}{results.name}-shift.png", caption))
    return parts


def _shift_text(shift: Shift, units: str) -> str:
    """Say plainly where σ is too small, and by how much."""
    lines = [f"Trained on {shift.n_train:,} labels of {shift.trained_on}."]
    for found in shift.sets:
        scores = found.columns["student"].scores
        lines.append(
            f"**{found.label}** ({found.n:,} points): RMSE {scores['rmse']:.4g} {units} (bias "
            f"{found.bias:+.3g}), expected of student {scores['sharpness']:.4g}: in the root mean "
            f"square {_factor(scores['rmse'] / scores['sharpness'])}, and "
            f"{scores['coverage_68']:.0%} of the errors are within it. Errors grow with σ (rank "
            f"correlation {scores['spearman']:.2f}); {found.flagged:.0%} of the structures are "
            f"flagged as extrapolation. {_survivors(found)}"
        )
    return "\n\n".join(lines)


def _factor(ratio: float) -> str:
    if ratio > 1.1:
        return f"σ is too small by a factor of {ratio:.2f}"
    return f"σ is too large by a factor of {1 / ratio:.2f}" if ratio < 0.9 else "σ is right"


def _survivors(found: Shifted) -> str:
    """Say which calibrations are best here."""
    scores = {name: column.scores for name, column in found.columns.items()}
    likely = max(scores, key=lambda name: scores[name]["log_likelihood"])
    covering = min(scores, key=lambda name: abs(scores[name]["coverage_68"] - _ONE_SIGMA))
    return (
        f"Of all calibrations {likely} has the highest log likelihood, and {covering} the coverage "
        f"nearest to 68 % ({scores[covering]['coverage_68']:.0%})."
    )


def _shift_table(shift: Shift, units: str) -> str:
    head = [
        "set",
        "error bars",
        f"RMSE, {units}",
        f"expected, {units}",
        "log likelihood",
        "within σ",
        "within 2σ",
    ]
    rows = []
    for found in shift.sets:
        for name, column in found.columns.items():
            s = column.scores
            rows.append(
                [
                    found.label,
                    name,
                    f"{s['rmse']:.4g}",
                    f"{s['sharpness']:.4g}",
                    f"{s['log_likelihood']:.3f}".replace("-", "−"),
                    f"{s['coverage_68']:.1%}",
                    f"{s['coverage_95']:.1%}",
                ]
            )
    return _markdown_table(head, rows)


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
