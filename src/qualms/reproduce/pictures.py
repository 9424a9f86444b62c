"""The figures of the paper, a panel for each sub-sample size and one for GPR PP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qualms.errors import InputError
from qualms.io.files import atomic_path
from qualms.metrics import conditional_error_density, log_likelihood
from qualms.report.figures import (
    ACCENT,
    COLUMN_WIDTH,
    GREY,
    GUIDE,
    INK,
    ConditionalErrorDisplay,
    axis_label,
    line_style,
    set_log_scale,
    style,
)
from qualms.reproduce.over_seeds import sub_samples
from qualms.reproduce.places import Workplace
from qualms.reproduce.predictions import Drawn, load_estimates
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Column, Results, Seed
from qualms.reproduce.size_picture import draw_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DPI = 150
#: Figures of panels: the column they show, and what their names end in.
PANELS = {"CV": "linear", "N-L": "power", "student": "student"}
#: Densities per unit of ln ε at which contours are drawn; captions state them.
LEVELS = (0.05, 0.15, 0.25, 0.35)
#: How far a log likelihood may change by rounding predictions to single precision.
_ROUNDING = 2e-3
#: Empty margin at either side of panels, as a factor: contours are not cut at the frame.
_MARGIN = 1.06


def draw_figures(
    results: Results,
    workplace: Workplace,
    warn: Callable[[str], None],
    *,
    only_missing: bool = False,
) -> list[Path]:
    """Draw the figures that the page of complete results links to; return the files drawn.

    Parameters
    ----------
    results : Results
    workplace : Workplace
        Figures go beside the results; panels are made of the predictions that were kept there.
    warn : callable
        Told which figures cannot be drawn, and why.
    only_missing : bool
        Whether panels that are there stay as they are. Others, of the results alone, do not.
    """
    files = {e: workplace.figure(results.name, e) for e in (*PANELS.values(), "sizes")}
    if results.shift is not None:
        files["shift"] = workplace.figure(results.name, "shift")
    kept = [e for e in PANELS.values() if only_missing and files[e].exists()]
    wanted = {e: path for e, path in files.items() if e not in kept}
    drawn: list[Path] = []
    # What needs nothing but the results comes first.
    for endings, draw in ((_OF_RESULTS, _draw_of_results), (PANELS.values(), _draw_all_panels)):
        paths = {e: wanted[e] for e in endings if e in wanted}
        try:
            if paths:
                draw(paths, results, workplace)
                drawn += paths.values()
        except InputError as error:
            warn(_not_drawn(list(paths.values()), error))
    return drawn


def _not_drawn(paths: Sequence[Path], error: InputError) -> str:
    """Say which figures the page links to in vain, or has as an earlier run drew them."""
    text = f"Not drawn: {', '.join(path.name for path in paths)}. {error}"
    absent = [path.name for path in paths if not path.exists()]
    kept = [path.name for path in paths if path.exists()]
    if absent:
        text += f" Links of the page to {', '.join(absent)} lead nowhere."
    return text + (f" {', '.join(kept)} may be of an earlier run." if kept else "")


def _draw_of_results(paths: Mapping[str, Path], results: Results, workplace: Workplace) -> None:
    for ending, path in paths.items():
        _OF_RESULTS[ending](path, results)


# --- panels ---


def _draw_all_panels(paths: Mapping[str, Path], results: Results, workplace: Workplace) -> None:
    drawn = _of_one_seed(results, workplace)
    for column, ending in PANELS.items():
        if ending in paths:
            panels = {label: found[column] for label, found in drawn.items() if column in found}
            _draw_panels(paths[ending], panels, results.units)


def _of_one_seed(results: Results, workplace: Workplace) -> dict[str, dict[str, Drawn]]:
    """Return the predictions of the first seed that has them all: panels must not mix seeds."""
    errors = []
    for seed in results.seeds:
        try:
            return _of_seed(results.name, seed, workplace)
        except InputError as error:
            errors.append(error)
    raise errors[0]


def _of_seed(name: str, seed: Seed, workplace: Workplace) -> dict[str, dict[str, Drawn]]:
    wanted: dict[str, tuple[str, Mapping[str, Column]]] = {
        f"n = {s.n:,}": (str(s.n), s.columns | s.reference) for s in sub_samples(seed)
    }
    wanted[PROCESS] = ("process", seed.process)
    found = {}
    for label, (ending, columns) in wanted.items():
        path = workplace.predictions(name, seed.seed, ending)
        unnamed = path.with_name(f"{name}-{ending}.npz")  # of an earlier version
        path = path if path.exists() or not unnamed.exists() else unnamed
        found[label] = load_estimates(path)
        _check_belongs(path, found[label], columns)
    return found


def _check_belongs(path: Path, drawn: Mapping[str, Drawn], columns: Mapping[str, Column]) -> None:
    """Refuse predictions that are not those that the results were found with."""
    for column, found in drawn.items():
        if column not in columns:
            continue
        expected = columns[column].scores["log_likelihood"]
        here = log_likelihood(found.y - found.mean, found.std)
        if abs(here - expected) > _ROUNDING * max(abs(expected), 1.0):
            raise InputError(
                "output",
                f"'{path}'",
                f"predictions of log likelihood {expected:.4g} ({column}), not {here:.4g}",
                "They belong to another run: run the command that made the results with --force to "
                "compute them again.",
            )


def _draw_panels(path: Path, panels: Mapping[str, Drawn], units: str) -> None:
    """Draw P(ln ε | ln σ) of several estimators on the same axes, two rows of them."""
    from matplotlib.figure import Figure

    n_columns = (len(panels) + 1) // 2
    with style():
        size = (0.8 * COLUMN_WIDTH * n_columns, 1.7 * COLUMN_WIDTH)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, n_columns, squeeze=False).ravel()
        for ax, (label, found) in zip(axes, panels.items(), strict=False):
            densities = conditional_error_density(
                found.y, found.mean, found.std, found.members, min_points=20.0
            )
            ConditionalErrorDisplay(densities, units=units).plot(ax, levels=LEVELS, legend=False)
            ax.set_title(label, fontsize="medium")
        for ax in axes[len(panels) :]:
            ax.remove()
        _share_axes(list(axes[: len(panels)]))
        figure.legend(handles=_handles(), loc="outside upper center", ncols=4)
        with atomic_path(path, force=True) as temporary:
            figure.savefig(temporary, dpi=_DPI, format="png")


def _handles() -> list[object]:
    """Return what the legend of panels names."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=INK, linestyle="-", linewidth=0.9, label="true errors"),
        Line2D([], [], color=ACCENT, linestyle="--", linewidth=0.9, label="errors of the model"),
        Patch(facecolor=GREY, label=r"$P(\ln\sigma)$"),
        Line2D([], [], color=GUIDE, linestyle=":", linewidth=0.9, label=r"$\epsilon=\sigma$"),
    ]


def _share_axes(axes: Sequence[Axes]) -> None:
    """Give all panels the same limits, and hence the same ticks, with some room around them."""
    x = np.array([ax.get_xlim() for ax in axes])
    y = np.array([ax.get_ylim() for ax in axes])
    for ax in axes:
        set_log_scale(ax, "x", (x[:, 0].min() / _MARGIN, x[:, 1].max() * _MARGIN))
        set_log_scale(ax, "y", (y[:, 0].min() / _MARGIN, y[:, 1].max() * _MARGIN))


# --- shift ---


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
        limits = 0.8 * float(np.min(values)), 1.25 * float(np.max(values))
        ax.plot(limits, limits, color=GUIDE, linestyle=":", linewidth=1.0)
        for which in ("x", "y"):
            set_log_scale(ax, which, limits)
        ax.set_xlabel(axis_label(r"Predicted error $\sigma$", units=results.units))
        ax.set_ylabel(axis_label("RMSE", units=results.units))
        ax.legend(loc="upper left")
        with atomic_path(path, force=True) as temporary:
            figure.savefig(temporary, dpi=_DPI, format="png")


#: Figures that are made of results alone, by what their names end in.
_OF_RESULTS: dict[str, Callable[[Path, Results], None]] = {
    "sizes": draw_sizes,
    "shift": _draw_shift,
}
