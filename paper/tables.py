"""Tables of a reproduction, with the values that the paper prints beside ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paper.results import EnsembleResult, EstimatorResult, Results, ShiftResult
from paper.study import OUR_METHODS, POSTERIOR, PROCESS, VALIDATED
from qualms.io.files import atomic_output
from qualms.report.tables import Table

#: Columns of the paper's tables, and of ours.
PAPER_COLUMNS = ("Raw", "CV", "N-L", "Int.", "Int. N-L")
OUR_COLUMNS = (*PAPER_COLUMNS, *OUR_METHODS)
STUDENT_T = "Student's t"

#: Mean log likelihoods that Musil et al. 2019 print, by subsample size: QM9 (eV/atom), and ¹H
#: shieldings (ppm) with a split over atoms.
PUBLISHED: Mapping[str, Mapping[int | str, tuple[float, ...]]] = {
    "qm9": {
        1_000: (4.310, 4.651, 4.647, 4.654, 4.652),
        5_000: (4.655, 4.661, 4.673, 4.658, 4.673),
        10_000: (4.319, 4.670, 4.680, 4.634, 4.665),
        15_000: (2.928, 4.684, 4.690, 4.553, 4.631),
        18_000: (-0.807, 4.681, 4.686, 4.462, 4.568),
        PROCESS: (4.349, 4.374, 4.421),
    },
    "csd-atoms": {
        1_000: (-0.554, -0.398, -0.356, -0.398, -0.356),
        5_000: (-0.389, -0.381, -0.338, -0.382, -0.337),
        10_000: (-0.952, -0.392, -0.324, -0.407, -0.324),
        15_000: (-4.102, -0.394, -0.312, -0.470, -0.320),
        18_000: (-18.75, -0.412, -0.308, -0.517, -0.351),
        PROCESS: (-8.771, -0.255, -0.251),
    },
}


def write_tables(directory: Path, results: Results, *, force: bool) -> list[Path]:
    """Write all tables of a problem as Markdown; return the files."""
    makers = (
        full_model_table,
        ensemble_mean_table,
        blend_table,
        out_of_bag_table,
        error_table,
        cost_table,
    )
    pages = {f"{results.name}.md": [make(results) for make in makers]}
    if results.shift is not None:
        pages[f"{results.name}-shift.md"] = [shift_table(results.shift, results.units)]
    for name, tables in pages.items():
        text = "\n".join(f"{table.title}:\n\n{table.markdown()}" for table in tables)
        with atomic_output(directory / name, force=force, mode="w") as file:
            file.write(text)
    return [directory / name for name in pages]


def full_model_table(results: Results) -> Table:
    """Return the paper's table: log likelihoods centred on the full model."""
    printed = PUBLISHED.get(results.name, {}) if results.scale == "paper" else {}
    rows = []
    for label, ensembles in _by_size(results):
        key = 0 if ensembles[0].replace else ensembles[0].n
        values = [[e.full_model[c].log_likelihood for e in ensembles] for c in PAPER_COLUMNS]
        rows.append([label, *_cells(values, printed.get(key, ()))])
    for label, process in {
        PROCESS: [seed.projected_process for seed in results.seeds],
        POSTERIOR: [seed.posterior_part for seed in results.seeds],
    }.items():
        values = [[p[c].log_likelihood for p in process] for c in ("Raw", *VALIDATED)]
        rows.append([label, *_cells(values, printed.get(label, ())), "", ""])
    beside = " [value in the paper]" if printed else ""
    title = _title(results, f"centred on the full model{beside}")
    return Table(["n", *PAPER_COLUMNS], rows, title)


def ensemble_mean_table(results: Results) -> Table:
    """Return log likelihoods centred on the ensemble mean."""
    rows = []
    for label, ensembles in _by_size(results):
        values = [[e.ensemble_mean[c].log_likelihood for e in ensembles] for c in OUR_COLUMNS]
        rows.append([label, *_cells([*values, [e.student_t for e in ensembles]])])
    head = ["n", *OUR_COLUMNS, STUDENT_T]
    return Table(head, rows, _title(results, "centred on the ensemble mean"))


def out_of_bag_table(results: Results) -> Table:
    """Return differences between out-of-bag and validation calibration, paired by seed."""
    rows = []
    for label, ensembles in _by_size(results):
        columns = [e.ensemble_mean for e in ensembles]
        gains = [
            [m[ours].log_likelihood - m[theirs].log_likelihood for m in columns]
            for ours, theirs in (("student", "CV"), ("shrinkage", "N-L"))
        ]
        points = [(e.n_out_of_bag, e.n_out_of_bag_linear) for e in ensembles]
        cells = [f"{n:,.0f}" for n in np.mean(points, axis=0)]
        rows.append([label, *cells, *(mean_and_error(gain, "+.4f") for gain in gains)])
    head = ["n", "out-of-bag points", "of them for Int. and Int. N-L", "student − CV"]
    title = "Log likelihood of out-of-bag calibration minus that of validation calibration"
    return Table([*head, "shrinkage − N-L"], rows, title)


def blend_table(results: Results) -> Table:
    """Return the model as it is trained by default: a blend, calibrated by sources of variance."""
    factor, units = _error_units(results)
    rows = []
    for label, ensembles in _by_size(results):
        blends = [e.blend for e in ensembles]
        cells = [mean_and_error([e.centre for e in ensembles], ".2f")]
        cells += [f"{factor * _mean(blends, name):.3g}" for name in ("mae", "rmse")]
        cells += [mean_and_error([e.log_likelihood for e in blends])]
        cells += [f"{_mean(blends, name):.1%}" for name in ("coverage_68", "coverage_95")]
        rows.append([label, *cells, f"{_mean(blends, 'spearman'):.2f}", _bin_ratios(blends)])
    head = ["n", "λ", f"MAE ({units})", f"RMSE ({units})", "log likelihood", "within 68 %"]
    title = "Blend of full model and ensemble mean (share λ), sources calibration, out of bag"
    return Table([*head, "within 95 %", "rank correlation", f"RMSE/σ: {_BINS}"], rows, title)


def _error_units(results: Results) -> tuple[float, str]:
    return (1e3, "meV/atom") if results.units == "eV/atom" else (1.0, results.units)


def error_table(results: Results) -> Table:
    """Return errors of ensemble mean and full model, and coverage of the student calibration."""
    factor, units = _error_units(results)
    rows = []
    for label, ensembles in _by_size(results):
        estimators = [e.ensemble_mean["student"] for e in ensembles]
        cells = [f"{factor * _mean(estimators, name):.3g}" for name in ("mae", "rmse")]
        cells += [f"{_mean(estimators, name):.1%}" for name in ("coverage_68", "coverage_95")]
        rows.append(
            [label, *cells, f"{_mean(estimators, 'spearman'):.2f}", _bin_ratios(estimators)]
        )
    full = [seed.projected_process["Raw"] for seed in results.seeds]
    cells = [f"{factor * _mean(full, name):.3g}" for name in ("mae", "rmse")]
    rows.append(["full model", *cells, "", "", "", ""])
    head = ["n", f"MAE ({units})", f"RMSE ({units})", "within 68 %", "within 95 %"]
    title = "Errors of the ensemble mean, and uncertainties by student calibration"
    return Table([*head, "rank correlation", f"RMSE/σ: {_BINS}"], rows, title)


def cost_table(results: Results) -> Table:
    """Return time and memory."""
    rows = []
    for seed in results.seeds:
        members = sum(e.seconds for e in seed.ensembles)
        sizes = ", ".join(f"{e.n:,}" for e in seed.ensembles if not e.replace)
        cells = [f"{seed.n_train:,}", f"{seed.n_representatives:,}", sizes]
        cells += [f"{seed.wall / 60:.1f}", f"{members / 60:.1f}", f"{seed.memory / 1e9:.1f}"]
        rows.append([str(seed.seed), *cells])
    head = ["seed", "labels", "representatives", "subsample sizes"]
    head += ["total (min)", "members of all sizes (min)", "peak memory (GB)"]
    machine = "{cores} cores, {processor}".format_map(results.machine)
    return Table(head, rows, f"Size and cost ({machine})")


def shift_table(shift: ShiftResult, units: str) -> Table:
    """Return the scores of all estimators on test sets out of distribution."""
    head = ["test set", "estimator", f"RMSE ({units})", f"RMS σ ({units})", "log likelihood"]
    rows = []
    for test_set in shift.sets:
        for name, estimator in test_set.estimators.items():
            s = estimator.scores
            cells = [f"{s['rmse']:.4g}", f"{s['sharpness']:.4g}"]
            cells += [minus(f"{s['log_likelihood']:.3f}")]
            cells += [f"{s['coverage_68']:.1%}", f"{s['coverage_95']:.1%}"]
            cells += [_bin_ratios([estimator])]
            rows.append([test_set.label, name, *cells])
    title = f"Trained on {shift.n_train:,} labels of {shift.trained_on}"
    flagged = ", ".join(f"{s.label} {s.extrapolation:.0%}" for s in shift.sets)
    title += f"; structures flagged as extrapolation: {flagged}"
    return Table([*head, "within 68 %", "within 95 %", f"RMSE/σ: {_BINS}"], rows, title)


# --- cells ---

_BINS = "lowest, median, highest bin of σ"


def mean_and_error(values: Sequence[float], form: str = ".3f") -> str:
    """Return mean ± standard error over seeds as text."""
    text = format(float(np.mean(values)), form)
    if len(values) > 1:
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        text += f" ± {format(float(error), form.replace('+', ''))}"
    return minus(text)


def minus(text: str) -> str:
    """Return a text with minus signs in place of hyphens before its numbers."""
    return re.sub(r"(^|[\s\[])-(?=\d)", r"\1−", text)


def _cells(values: Sequence[Sequence[float]], printed: Sequence[float] = ()) -> list[str]:
    cells = [mean_and_error(v) for v in values]
    for i, value in enumerate(printed):
        cells[i] += f" [{minus(f'{value:.3f}')}]"
    return cells


def _by_size(results: Results) -> list[tuple[str, list[EnsembleResult]]]:
    """Return label and ensembles of each size; sizes in crystals are those of the first seed."""
    columns = zip(*(seed.ensembles for seed in results.seeds), strict=True)
    return [("bootstrap" if c[0].replace else f"{c[0].n:,}", list(c)) for c in columns]


def _title(results: Results, what: str) -> str:
    over = f", mean ± standard error over {n} splits" if (n := len(results.seeds)) > 1 else ""
    return f"Mean log likelihood ({results.units}){over}, {what}"


def _mean(estimators: Sequence[EstimatorResult], score: str) -> float:
    return float(np.mean([estimator.scores[score] for estimator in estimators]))


def _bin_ratios(estimators: Sequence[EstimatorResult]) -> str:
    """Return RMSE/σ in bins of σ: above 1, σ is too small."""
    bins = np.sqrt(np.mean(np.square([e.bins for e in estimators]), axis=0))
    ratios = bins[:, 1] / np.maximum(bins[:, 0], np.finfo(np.float64).tiny)
    return f"{ratios[0]:.2f}, {np.median(ratios):.2f}, {ratios[-1]:.2f}"
