"""Log likelihood against sub-sample size, all estimators side by side.

Several of them agree to a thousandth, and would hide each other. Symbols of one size stand side by
side, therefore, and those that are calibrated on a validation set are large and hollow, so that the
small filled ones of internal calibration show on top of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qualms.arrays import Float64Array
from qualms.io.files import atomic_path
from qualms.report.figures import COLUMN_WIDTH, GUIDE, line_style, set_even_ticks, style
from qualms.reproduce.over_seeds import bootstrap_of, likelihood, standard_error, sub_samples
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Results, Scheme

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DPI = 150
#: The line of the t density itself.
STUDENT_T = "Student's t"
#: Estimators in the order in which they stand side by side: those that agree are neighbours.
_ORDER = ("Raw", "Int.", "Int. N-L", "CV", "student", "N-L", "shrinkage", STUDENT_T)
#: Those that are calibrated on a validation set.
_HOLLOW = ("CV", "N-L")
#: Those that may lie far below the others: they do not decide what the axes show.
_LOW = ("Raw", "Int.")
#: Distance of neighbours, as a fraction of the range of sizes.
_STEP = 0.01
#: Height of the first value written at the bottom, and of each above it, as fractions of the axes.
_FOOT, _LINE = 0.055, 0.045
#: How near to an edge of the axes a value stands beside its triangle, as a fraction of their width.
_EDGE = 0.05
#: Dashes of the projected process, scaled linearly and by a power.
_PROCESS_LINES = {"CV": ":", "N-L": (0, (5, 3))}


def draw_sizes(path: Path, results: Results) -> None:
    """Draw log likelihoods against size: means over seeds, their standard errors, the bootstrap.

    At the left about the full model, as in the paper; at the right about the mean of the members.
    """
    from matplotlib.figure import Figure

    panels = {"about the full model": _reference, "about the mean of the members": _everything}
    process = {
        column: float(np.mean([likelihood(seed.process[column]) for seed in results.seeds]))
        for column in _PROCESS_LINES
    }
    found = [_by_size(results, values) for values in panels.values()]
    with style():
        figure = Figure(figsize=(3.2 * COLUMN_WIDTH, 1.4 * COLUMN_WIDTH), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        everything = [values for both in found for values in both]
        axes[0].set_ylim(*_limits(everything, list(process.values())))
        for ax, title, values in zip(axes, panels, found, strict=True):
            for column, dashes in _PROCESS_LINES.items():
                look: dict[str, Any] = {"linestyle": dashes, "label": f"{PROCESS}, {column}"}
                ax.axhline(process[column], color=GUIDE, linewidth=0.9, **look)
            _draw_panel(ax, results, *values)
            ax.set_title(title, fontsize="medium")
        axes[0].set_ylabel("Log likelihood per point")
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=10)
        with atomic_path(path, force=True) as temporary:
            figure.savefig(temporary, dpi=_DPI, format="png")


def _draw_panel(
    ax: Axes,
    results: Results,
    by_size: Mapping[str, Float64Array],
    of_bootstrap: Mapping[str, Float64Array],
) -> None:
    # Crystals differ in size, and so do, by a few, the sizes of sub-samples with other seeds.
    sizes = np.array(results.seeds[0].sizes, dtype=np.float64)
    drawn = np.array([np.mean([bootstrap_of(seed).n for seed in results.seeds])])
    step = _STEP * (drawn[0] - sizes[0])
    _divide(ax, sizes, float(drawn[0]), step)
    _draw(ax, sizes, by_size, step, lines=True)
    _draw(ax, drawn, of_bootstrap, step, lines=False)
    set_even_ticks(ax.xaxis)
    counted = " (crystals)" if results.name == "csd-crystals" else ""
    ax.set_xlabel(rf"Sub-sample size $n${counted}")


_Values = Callable[[Scheme], Mapping[str, float]]


def _reference(scheme: Scheme) -> dict[str, float]:
    return {name: likelihood(column) for name, column in scheme.reference.items()}


def _everything(scheme: Scheme) -> dict[str, float]:
    found = {name: likelihood(column) for name, column in scheme.columns.items()}
    return found | {STUDENT_T: scheme.student_t}


def _by_size(results: Results, values: _Values) -> list[dict[str, Float64Array]]:
    """Return the log likelihoods of each estimator, (n_seeds, n_sizes), and of the bootstrap."""
    seeds = results.seeds
    return [
        _values([sub_samples(seed) for seed in seeds], values),
        _values([[bootstrap_of(seed)] for seed in seeds], values),
    ]


def _values(schemes: list[list[Scheme]], values: _Values) -> dict[str, Float64Array]:
    found = [[values(scheme) for scheme in of_seed] for of_seed in schemes]
    return {
        name: np.array([[one[name] for one in of_seed] for of_seed in found], dtype=np.float64)
        for name in found[0][0]
    }


def _limits(found: list[dict[str, Float64Array]], process: list[float]) -> tuple[float, float]:
    """Return limits that hold all that is scaled well; twice as much room below, for triangles."""
    means = [v.mean(axis=0) for values in found for n, v in values.items() if n not in _LOW]
    everything = np.concatenate([*means, process])
    low, high = float(everything.min()), float(everything.max())
    margin = 0.1 * (high - low) if high > low else 0.1 * max(abs(low), 1.0)
    return low - 2.0 * margin, high + margin


def _look(name: str) -> dict[str, Any]:
    """Return colour, dashes and symbol of an estimator."""
    look = line_style(_ORDER.index(name)) | {"linewidth": 0.9, "label": name}
    if name in _HOLLOW:
        # Below the others, and round them.
        return look | {"fillstyle": "none", "markersize": 7.0, "linestyle": "-", "zorder": 2.0}
    return look | {"markersize": 3.0, "zorder": 2.5}


def _draw(
    ax: Axes, x: Float64Array, values: Mapping[str, Float64Array], step: float, *, lines: bool
) -> None:
    """Draw means, and standard errors over seeds; triangles, with values, where they lie below."""
    names = [n for n in _ORDER if n in values]
    n_below = np.zeros(len(x), dtype=int)
    for i, name in enumerate(names):
        place = x + (i - 0.5 * (len(names) - 1)) * step
        mean, error = values[name].mean(axis=0), standard_error(values[name])
        look = _look(name)
        if not lines:
            look |= {"linestyle": "", "label": None}
        ax.plot(place, mean, **look)
        below = mean < ax.get_ylim()[0]
        if error is not None:
            bars = {"fmt": "none", "ecolor": look["color"], "capsize": 1.5, "elinewidth": 0.8}
            ax.errorbar(place[~below], mean[~below], error[~below], **bars)
        for k in np.flatnonzero(below):
            _mark_below(ax, place[k], mean[k], look["color"], int(n_below[k]))
        n_below += below


def _mark_below(ax: Axes, place: float, value: float, color: str, n_before: int) -> None:
    """Put a triangle at the bottom, and the value above it, on white: nothing crosses it."""
    foot = ax.get_xaxis_transform()  # x in data, y as a fraction of the axes
    ax.plot([place], [0.025], color=color, marker="v", markersize=3.5, transform=foot, zorder=4.0)
    text = f"{value:#.3g}".replace("-", "\N{MINUS SIGN}")
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    height = _FOOT + _LINE * n_before
    look: dict[str, Any] = {"color": color, "bbox": white, "zorder": 3.5, "transform": foot}
    left, right = ax.get_xlim()
    # At the edges, beside the triangle: it must not lie across the frame.
    near_left = place - left < _EDGE * (right - left)
    near_right = right - place < _EDGE * (right - left)
    side = "left" if near_left else "right" if near_right else "center"
    ax.text(place, height, text, size="small", ha=side, va="bottom", **look)


def _divide(ax: Axes, sizes: Float64Array, drawn: float, step: float) -> None:
    """Set the bootstrap, which has the size of the training set, apart from the sub-samples."""
    half = 6.0 * step
    ax.set_xlim(float(sizes[0]) - half, drawn + half)
    ax.axvline(0.5 * (float(sizes[-1]) + drawn), color=GUIDE, linewidth=0.8, linestyle=(0, (1, 3)))
    look: dict[str, Any] = {"rotation": 90, "size": "small", "color": GUIDE}
    place = drawn + 0.9 * half
    ax.text(place, 0.3, "bootstrap", transform=ax.get_xaxis_transform(), ha="right", **look)
