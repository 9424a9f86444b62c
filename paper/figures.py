"""Figures of a reproduction: those of the paper, log likelihoods by size, and shifted sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paper.results import Results, ShiftResult
from paper.study import POSTERIOR, PROCESS, SOURCES, VALIDATED, Estimate
from paper.tables import STUDENT_T
from qualms.arrays import Float64Array
from qualms.io.files import atomic_path
from qualms.metrics import conditional_error_density
from qualms.report.figures import (
    ACCENT,
    COLUMN_WIDTH,
    GREY,
    GUIDE,
    INK,
    ConditionalErrorDisplay,
    axis_label,
    line_style,
    set_even_ticks,
    set_log_scale,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Columns that have a figure of P(ln ε | ln σ), and the ends of the file names.
PANELS = {"CV": "linear", "N-L": "power"}
#: Densities per unit of ln ε at which contours are drawn.
LEVELS = (0.05, 0.15, 0.25, 0.35)
#: Estimators in the order of their markers. Those that agree are neighbours; those fitted to a
#: validation set are hollow. Raw and Int. may lie far below the others and do not set the limits.
_ORDER = ("Raw", "Int.", "Int. N-L", "CV", "student", "N-L", "shrinkage", STUDENT_T, SOURCES)
_LOW = ("Raw", "Int.")
_DPI = 150


def draw_results(directory: Path, results: Results, *, force: bool) -> None:
    """Draw the figures that need the results file only."""
    _save(_sizes(results), directory / f"{results.name}-sizes.png", force=force)
    if results.shift is not None:
        figure = _shift(results.shift, results.units)
        _save(figure, directory / f"{results.name}-shift.png", force=force)


def draw_panels(
    directory: Path, results: Results, panels: Mapping[str, Mapping[str, Estimate]]
) -> None:
    """Draw the paper's figures, P(ln ε | ln σ) of test points by subsample size and column."""
    for column, ending in PANELS.items():
        estimates = {label: by_column[column] for label, by_column in panels.items()}
        path = directory / f"{results.name}-{ending}.png"
        _save(_conditional(estimates, results.units), path, force=True)


def _save(figure: Figure, path: Path, *, force: bool) -> None:
    with style(), atomic_path(path, force=force) as temporary:
        figure.savefig(temporary, dpi=_DPI, format="png")


def _conditional(panels: Mapping[str, Estimate], units: str) -> Figure:
    """Draw P(ln ε | ln σ), Eq. (18), of several estimators on equal axes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    n_columns = (len(panels) + 1) // 2
    with style():
        size = (0.8 * COLUMN_WIDTH * n_columns, 1.7 * COLUMN_WIDTH)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
        limits = []
        for ax, (label, e) in zip(axes, panels.items(), strict=False):
            densities = conditional_error_density(e.y, e.mean, e.std, e.members, min_points=20.0)
            ConditionalErrorDisplay(densities, units=units).plot(ax, levels=LEVELS, legend=False)
            ax.set_title(label, fontsize="medium")
            limits.append([*ax.get_xlim(), *ax.get_ylim()])
        for ax in axes[len(panels) :]:
            ax.remove()
        low, high = np.min(limits, axis=0) / 1.06, np.max(limits, axis=0) * 1.06
        for ax in axes[: len(panels)]:
            set_log_scale(ax, "x", (low[0], high[1]))
            set_log_scale(ax, "y", (low[2], high[3]))
            ax.label_outer()
        handles = [
            Line2D([], [], color=INK, linewidth=0.9, label="errors"),
            Line2D([], [], color=ACCENT, linestyle="--", linewidth=0.9, label="predicted errors"),
            Patch(facecolor=GREY, label=r"$P(\ln\sigma)$"),
            Line2D([], [], color=GUIDE, linestyle=":", linewidth=0.9, label=r"$\epsilon=\sigma$"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def _sizes(results: Results) -> Figure:
    """Draw log likelihoods against subsample size: means over seeds and their standard errors."""
    from matplotlib.figure import Figure

    seeds = results.seeds
    levels = {f"{PROCESS}, {c}": [s.projected_process[c] for s in seeds] for c in VALIDATED}
    levels[f"{POSTERIOR}, N-L"] = [s.posterior_part["N-L"] for s in seeds]
    process = {
        label: float(np.mean([result.log_likelihood for result in values]))
        for label, values in levels.items()
    }
    # By panel and estimator: (n_seeds, n_sizes + 1), the bootstrap last.
    full, mean = (
        {
            c: np.array([[getattr(e, which)[c].log_likelihood for e in s.ensembles] for s in seeds])
            for c in _ORDER
            if c in getattr(seeds[0].ensembles[0], which)
        }
        for which in ("full_model", "ensemble_mean")
    )
    mean[STUDENT_T] = np.array([[e.student_t for e in s.ensembles] for s in seeds])
    mean[SOURCES] = np.array([[e.blend.log_likelihood for e in s.ensembles] for s in seeds])
    panels = {
        "centred on the full model": full,
        "centred on the ensemble mean (sources: blend)": mean,
    }
    means = [
        v.mean(axis=0) for values in panels.values() for c, v in values.items() if c not in _LOW
    ]
    shown = np.concatenate([*means, list(process.values())])
    low, high = float(shown.min()), float(shown.max())
    margin = 0.1 * (high - low) or 0.1 * max(abs(low), 1.0)
    with style():
        figure = Figure(figsize=(3.2 * COLUMN_WIDTH, 1.4 * COLUMN_WIDTH), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        axes[0].set_ylim(low - margin, high + margin)
        axes[0].set_ylabel("Log likelihood per point")
        for ax, (title, values) in zip(axes, panels.items(), strict=True):
            dashes: tuple[Any, ...] = (":", (0, (5, 3)), (0, (5, 2, 1, 2)))
            for (label, value), line in zip(process.items(), dashes, strict=False):
                ax.axhline(value, color=GUIDE, linewidth=0.9, linestyle=line, label=label)
            _draw_sizes(ax, np.array([e.n for e in seeds[0].ensembles], dtype=float), values)
            counted = " (crystals)" if results.name == "csd-crystals" else ""
            ax.set_xlabel(rf"Subsample size $n${counted}; bootstrap at the right")
            ax.set_title(title, fontsize="medium")
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6)
    return figure


def _draw_sizes(ax: Axes, sizes: Float64Array, columns: Mapping[str, Float64Array]) -> None:
    """Draw all estimators side by side; the last size is the bootstrap, which no line connects."""
    step = 0.01 * float(np.ptp(sizes))
    for i, (name, values) in enumerate(columns.items()):
        x = sizes + (i - 0.5 * (len(columns) - 1)) * step
        mean = values.mean(axis=0)
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        look: dict[str, Any] = line_style(_ORDER.index(name)) | {"linewidth": 0.9}
        if name in VALIDATED:
            look |= {"markersize": 7.0, "fillstyle": "none", "zorder": 2.0}
        else:
            look |= {"markersize": 3.0, "zorder": 2.5}
        for part, more in ((slice(-1), {"label": name}), (slice(-1, None), {"linestyle": ""})):
            yerr = None if error is None else error[part]
            ax.errorbar(x[part], mean[part], yerr, capsize=1.5, elinewidth=0.8, **look | more)
    ax.axvline(0.5 * (sizes[-2] + sizes[-1]), color=GUIDE, linewidth=0.8, linestyle=(0, (1, 3)))
    set_even_ticks(ax.xaxis)


def _shift(shift: ShiftResult, units: str) -> Figure:
    """Draw the RMSE in bins of σ (student) against σ; on the diagonal σ is right."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(COLUMN_WIDTH, COLUMN_WIDTH), layout="constrained")
        ax = figure.add_subplot()
        bins = [np.array(test_set.estimators["student"].bins) for test_set in shift.sets]
        limits = 0.8 * float(min(b.min() for b in bins)), 1.25 * float(max(b.max() for b in bins))
        for i, (test_set, values) in enumerate(zip(shift.sets, bins, strict=True)):
            ax.plot(values[:, 0], values[:, 1], label=test_set.label, **line_style(i))
        ax.plot(limits, limits, color=GUIDE, linestyle=":", linewidth=1.0)
        for which in ("x", "y"):
            set_log_scale(ax, which, limits)
        ax.set_xlabel(axis_label(r"Predicted uncertainty $\sigma$", units=units))
        ax.set_ylabel(axis_label("RMSE", units=units))
        ax.legend(loc="upper left")
    return figure
