"""How scores change with the size of the sub-samples and of the training set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_points, check_std
from qualms.core.scores import Scores
from qualms.core.typing import Float64Array
from qualms.errors import InputError
from qualms.report.figures._axes import log_limits, set_even_ticks, set_log_scale
from qualms.report.figures._base import Display
from qualms.report.figures._style import GUIDE, INK, axis_label, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REFERENCE_DASHES = ((0, (1, 2)), (0, (6, 2, 1, 2)), (0, (10, 3)))


@dataclass(eq=False)
class SubsampleSizeDisplay(Display):
    """Log likelihood against sub-sample size, a line for each estimator: the paper's tables.

    Parameters
    ----------
    sizes : array of shape (n_sizes,)
        Sizes of the sub-samples, as numbers or as fractions of the training set.
    log_likelihoods : mapping from str to array of shape (n_sizes,)
        Mean log likelihood per point of each estimator at each size; NaN where there is none.
    references : mapping from str to float, optional
        Log likelihoods that do not depend on the size, such as that of the projected process.
    """

    sizes: Float64Array
    log_likelihoods: Mapping[str, Float64Array]
    references: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = _check_sizes("sizes", self.sizes)
        self.log_likelihoods = {
            name: _check_likelihoods(f"log_likelihoods[{name!r}]", values, self.sizes.size)
            for name, values in self.log_likelihoods.items()
        }
        if not self.log_likelihoods:
            raise InputError("log_likelihoods", "nothing", "at least one estimator")
        self.references = {
            name: float(_check_likelihoods(f"references[{name!r}]", [value], 1)[0])
            for name, value in self.references.items()
        }

    @classmethod
    def from_table(
        cls,
        rows: Mapping[Any, Mapping[str, float | None]],
        *,
        references: Mapping[str, float] | None = None,
    ) -> Self:
        """Take the numbers that `qualms.report.paper_table` takes.

        Parameters
        ----------
        rows : mapping from size to mapping from estimator to log likelihood
            Sizes must be numbers; an estimator may be missing or None at some of them.
        references : mapping from str to float, optional
        """
        for size in rows:
            if isinstance(size, str):
                raise InputError(
                    "rows", repr(size), "sizes that are numbers", "Give this row as references."
                )
        names = dict.fromkeys(name for row in rows.values() for name in row)
        columns = {
            name: [np.nan if row.get(name) is None else row[name] for row in rows.values()]
            for name in names
        }
        lines = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
        return cls(np.array(list(rows)), lines, references or {})

    def plot(self, ax: Axes | None = None, *, legend: bool = True, **kwargs: Any) -> Self:
        """Draw one line per estimator.

        Values far below the others would hide how these differ. They lie outside of the axes, and
        triangles at the bottom show where; a reference there has its value in the legend.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.
        legend : bool
            Whether to name the lines, above the axes.
        **kwargs
            Passed to ``Axes.plot``, for all lines.
        """
        low, high = self._limits()
        order = np.argsort(self.sizes)
        with self._drawing(ax, aspect=0.9) as axes:
            for i, (name, values) in enumerate(self.log_likelihoods.items()):
                line = line_style(i) | {"label": name, "linewidth": 1.0} | kwargs
                axes.plot(self.sizes[order], values[order], **line)
                self._mark_below(axes, values, low, line["color"])
            for i, (name, value) in enumerate(self.references.items()):
                label = name if value >= low else f"{name}: {_written(value)}"
                dashes = _REFERENCE_DASHES[i % len(_REFERENCE_DASHES)]
                axes.axhline(value, color=GUIDE, linewidth=1.0, linestyle=dashes, label=label)
            axes.set_ylim(low, high)
            axes.margins(x=0.08)
            set_even_ticks(axes.xaxis)
            axes.set(xlabel=r"Sub-sample size $n$", ylabel="Log likelihood per point")
            if legend:
                axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return self

    def _mark_below(self, ax: Axes, values: Float64Array, low: float, color: str) -> None:
        """Put triangles where values lie below the axes, and write the values above them."""
        foot = ax.get_xaxis_transform()  # x in data, y as a fraction of the axes
        n_below = np.sum([line < low for line in self.log_likelihoods.values()], axis=0)
        for size, value, n in zip(self.sizes, values, n_below, strict=True):
            if value < low:
                ax.plot([size], [0.03], color=color, marker="v", transform=foot)
            if value < low and n == 1:  # the values of several would cover each other
                place: dict[str, Any] = {"transform": foot, "ha": "center"}
                ax.text(size, 0.055, _written(value), size="small", color=color, **place)

    def _limits(self) -> tuple[float, float]:
        """Return limits that hold all values but those far below, by Tukey's rule."""
        values = np.concatenate([*self.log_likelihoods.values(), list(self.references.values())])
        values = values[np.isfinite(values)]
        if values.size == 0:
            return 0.0, 1.0
        first, third = np.quantile(values, [0.25, 0.75])
        kept = values[values >= first - 3.0 * (third - first)]
        low, high = float(kept.min()), float(kept.max())
        margin = 0.1 * (high - low) if high > low else 0.1 * max(abs(low), 1.0)
        # Twice as much below, for the triangles.
        return low - 2.0 * margin, high + margin


@dataclass(eq=False)
class LearningCurveDisplay(Display):
    """Actual and predicted error against the number of training points, both logarithmic.

    Parameters
    ----------
    n_train : array of shape (n_sizes,)
        Numbers of training points.
    rmse : array of shape (n_sizes,)
        Root mean squared errors > 0.
    predicted : array of shape (n_sizes,), optional
        Root mean predicted variances > 0, in the same units: what the model takes its error for.
    rmse_stderr : array of shape (n_sizes,), optional
        Standard errors of ``rmse``.
    units, target : str
        For the labels.
    """

    n_train: Float64Array
    rmse: Float64Array
    predicted: Float64Array | None = None
    rmse_stderr: Float64Array | None = None
    units: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        self.n_train = _check_sizes("n_train", self.n_train)
        shape = self.n_train.shape
        self.rmse = check_std(self.rmse, shape, parameter="rmse")
        if self.predicted is not None:
            self.predicted = check_std(self.predicted, shape, parameter="predicted")
        if self.rmse_stderr is not None:
            self.rmse_stderr = check_std(
                self.rmse_stderr, shape, allow_zero=True, parameter="rmse_stderr"
            )

    @classmethod
    def from_scores(
        cls,
        rows: Mapping[int, Scores | Sequence[Scores]],
        *,
        units: str = "",
        target: str = "",
    ) -> Self:
        """Take errors and sharpness of models of several sizes.

        Parameters
        ----------
        rows : mapping from the number of training points to Scores, or to several of them
            Several are repetitions with other training points: their means are drawn, with the
            standard error of the mean.
        units, target : str
            For the labels.
        """
        repeats = [[s] if isinstance(s, Scores) else list(s) for s in rows.values()]
        if not all(repeats):
            raise InputError("rows", "a size without scores", "at least one Scores for each size")
        errors = [np.array([s.rmse for s in scores]) for scores in repeats]
        stderr = [e.std(ddof=1) / np.sqrt(e.size) if e.size > 1 else 0.0 for e in errors]
        return cls(
            np.array(list(rows), dtype=np.float64),
            np.array([e.mean() for e in errors]),
            predicted=np.array([np.mean([s.sharpness for s in scores]) for scores in repeats]),
            rmse_stderr=np.array(stderr),
            units=units,
            target=target,
        )

    def plot(self, ax: Axes | None = None, *, label: str = "", **kwargs: Any) -> Self:
        """Draw the actual errors (solid, filled) and the predicted ones (dashed, open).

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default. Both axes become logarithmic.
        label : str
            Name of the model in the legend.
        **kwargs
            Passed to ``Axes.plot``, for both lines.
        """
        prefix = f"{label}, " if label else ""
        line: dict[str, Any] = {"color": INK, "marker": "o", "linewidth": 1.0} | kwargs
        order = np.argsort(self.n_train)
        x = self.n_train[order]
        with self._drawing(ax, aspect=0.78) as axes:
            shared = axes.has_data()
            axes.plot(x, self.rmse[order], label=f"{prefix}actual (RMSE)", **line)
            if self.rmse_stderr is not None:
                bars: dict[str, Any] = {"color": line["color"], "elinewidth": 0.8, "fmt": "none"}
                axes.errorbar(x, self.rmse[order], self.rmse_stderr[order], **bars)
            if self.predicted is not None:
                dashed = line | {"linestyle": "--", "markerfacecolor": "white"}
                axes.plot(x, self.predicted[order], label=f"{prefix}predicted (RMV)", **dashed)
            self._set_axes(axes, shared=shared)
            axes.legend(loc="best")
        return self

    def _set_axes(self, ax: Axes, *, shared: bool) -> None:
        bars = 0.0 if self.rmse_stderr is None else self.rmse_stderr
        # A bar that reaches below zero has no lower end here; the upper one always fits.
        drawn = [self.rmse, self.rmse + bars, np.maximum(self.rmse - bars, 0.5 * self.rmse)]
        if self.predicted is not None:
            drawn.append(self.predicted)
        set_log_scale(ax, "x", log_limits(self.n_train), shared=shared)
        set_log_scale(ax, "y", log_limits(np.concatenate(drawn)), shared=shared)
        ax.set_xlabel(r"Number of training points $N$")
        ax.set_ylabel(axis_label("Error", target=self.target, units=self.units))


def _check_sizes(parameter: str, values: ArrayLike) -> Float64Array:
    """Return sizes (n,) in float64, if they are positive and no two of them equal."""
    sizes = check_points(parameter, values)
    if sizes.ndim != 1 or np.any(sizes <= 0.0) or np.unique(sizes).size < sizes.size:
        raise InputError(parameter, sizes.tolist(), "a list of different numbers > 0")
    return sizes


def _check_likelihoods(parameter: str, values: ArrayLike, n_sizes: int) -> Float64Array:
    """Return log likelihoods (n_sizes,) in float64; unlike other numbers, NaN and −∞ may pass."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (n_sizes,):
        raise InputError(parameter, f"shape {array.shape}", f"one number per size, {n_sizes}")
    return array


def _written(value: float) -> str:
    """Write a number as the ticks do, with a minus sign in place of the hyphen."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
