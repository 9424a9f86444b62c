"""The figures of the paper, a panel for each sub-sample size and one for GPR PP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qualms.core.diagnostics import conditional_error_density
from qualms.report.figures import ConditionalErrorDisplay, SubsampleSizeDisplay, line_style
from qualms.report.figures._style import COLUMN_WIDTH, axis_label, style
from qualms.reproduce.claims import likelihoods
from qualms.reproduce.predictions import Drawn, load_estimates
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Results
from qualms.reproduce.run import Workplace
from qualms.storage.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 150
#: Figures of panels: the column they show, and what their names end in.
PANELS = {"CV": "linear", "N-L": "power", "student": "student"}


def draw_figures(results: Results, workplace: Workplace) -> list[Path]:
    """Draw all figures of complete results; return their files."""
    files = []
    labels = [str(n) for n in results.sizes]
    drawn = {f"n = {int(n):,}": _load(workplace, results.name, n) for n in labels}
    drawn[PROCESS] = _load(workplace, results.name, "process")
    for column, ending in PANELS.items():
        panels = {label: found[column] for label, found in drawn.items() if column in found}
        path = workplace.directory / f"{results.name}-{ending}.png"
        _draw_panels(path, panels, results.units)
        files.append(path)
    path = workplace.directory / f"{results.name}-sizes.png"
    with atomic_path(path, force=True) as temporary:
        _sizes(results).plot().save(temporary, dpi=_DPI, format="png")
    files.append(path)
    if results.shift is not None:
        files.append(workplace.directory / f"{results.name}-shift.png")
        _draw_shift(files[-1], results)
    return files


def _load(workplace: Workplace, name: str, label: str) -> dict[str, Drawn]:
    return load_estimates(workplace.predictions(name, label))


def _draw_panels(path: Path, panels: Mapping[str, Drawn], units: str) -> None:
    """Draw P(ln ε | ln σ) of several estimators on the same axes, two rows of them."""
    from matplotlib.figure import Figure

    n_columns = (len(panels) + 1) // 2
    with style():
        size = (0.8 * COLUMN_WIDTH * n_columns, 1.6 * COLUMN_WIDTH)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, n_columns, squeeze=False).ravel()
        for ax, (label, found) in zip(axes, panels.items(), strict=False):
            densities = conditional_error_density(
                found.y, found.mean, found.std, found.members, min_points=20.0
            )
            ConditionalErrorDisplay(densities, units=units).plot(ax, legend=False)
            ax.set_title(label, fontsize="medium")
        used = list(axes[: len(panels)])
        for ax in axes[len(panels) :]:
            ax.remove()
        _share_limits(used)
        with atomic_path(path, force=True) as temporary:
            figure.savefig(temporary, dpi=_DPI, format="png")


def _share_limits(axes: list[Axes]) -> None:
    x = np.array([ax.get_xlim() for ax in axes])
    y = np.array([ax.get_ylim() for ax in axes])
    for ax in axes:
        ax.set(xlim=(x[:, 0].min(), x[:, 1].max()), ylim=(y[:, 0].min(), y[:, 1].max()))


def _sizes(results: Results) -> SubsampleSizeDisplay:
    """Log likelihood against size, the mean over seeds, with GPR PP as a line."""
    columns = list(results.seeds[0].schemes[0].columns)
    lines = {
        column: np.mean([likelihoods(seed, column) for seed in results.seeds], axis=0)
        for column in columns
    }
    process = np.mean([seed.process["CV"].scores["log_likelihood"] for seed in results.seeds])
    sizes = np.array(sorted(results.sizes), dtype=np.float64)
    return SubsampleSizeDisplay(sizes, lines, {f"{PROCESS}, CV": float(process)})


def _draw_shift(path: Path, results: Results) -> None:
    """Draw the error in bins of σ against σ: at home on the diagonal, elsewhere above it."""
    from matplotlib.figure import Figure

    assert results.shift is not None, "drawn if there is one"
    with style():
        figure = Figure(figsize=(COLUMN_WIDTH, COLUMN_WIDTH), layout="constrained")
        ax = figure.add_subplot()
        values = []
        for i, found in enumerate(results.shift.sets):
            rmv, rmse = np.array(found.columns["student"].bins).T
            ax.plot(rmv, rmse, label=found.label, **line_style(i))
            values += [rmv, rmse]
        limits = 0.8 * np.min(values), 1.25 * np.max(values)
        ax.plot(limits, limits, color="0.45", linestyle=":", linewidth=1.0)
        ax.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
        ax.set_xlabel(axis_label(r"Predicted error $\sigma$", units=results.units))
        ax.set_ylabel(axis_label("RMSE", units=results.units))
        ax.legend(loc="upper left")
        with atomic_path(path, force=True) as temporary:
            figure.savefig(temporary, dpi=_DPI, format="png")
