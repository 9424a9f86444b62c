"""What all displays share: where they draw, how they are saved, and how they read predictions."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_points
from qualms.core.typing import Float64Array
from qualms.errors import InputError
from qualms.prediction import Prediction
from qualms.report.figures._style import COLUMN_WIDTH, style, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

#: Dates would make every file of the same figure a different one.
_UNDATED: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


class Display(ABC):
    """Numbers for one picture, and the picture.

    As in scikit-learn, a display is made by a class method that computes its numbers, or of numbers
    directly; `plot` draws them, as often as one likes, and importing it does not import matplotlib.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Where `plot` last drew.
    figure_ : matplotlib Figure
        The figure of these axes.
    """

    ax_: Axes
    figure_: Figure | SubFigure
    _owns_figure: bool = False

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Self:
        """Draw on the axes given, or on a new figure of one column's width."""

    def save(self, file: str | PathLike[str] | IO[bytes], **kwargs: Any) -> None:
        """Save the figure, drawing it first if need be; the same figure gives the same bytes.

        Parameters
        ----------
        file : path or binary file
            Its extension, or ``format=``, says what is written: pdf, svg, png, …
        **kwargs
            Passed to ``Figure.savefig``.
        """
        if not hasattr(self, "figure_"):
            self.plot()
        suffix = Path(file).suffix[1:] if isinstance(file, str | PathLike) else ""
        undated = _UNDATED.get(str(kwargs.get("format") or suffix).lower(), {})
        kwargs["metadata"] = undated | (kwargs.get("metadata") or {})
        with style():
            self.ax_.figure.figure.savefig(file, **kwargs)

    def _repr_png_(self) -> bytes | None:
        # Notebooks show the figures of pyplot by themselves; this one is unknown to pyplot.
        if hasattr(self, "figure_") and not self._owns_figure:
            return None
        picture = io.BytesIO()
        self.save(picture, format="png")
        return picture.getvalue()

    @contextmanager
    def _drawing(self, ax: Axes | None, aspect: float) -> Iterator[Axes]:
        """Give the axes to draw on, new ones in our look if there are none, and remember them.

        ``aspect`` is the height of a new figure over its width.
        """
        self._owns_figure = ax is None
        if ax is not None:
            self.ax_, self.figure_ = ax, ax.figure
            with style_of(ax):
                yield ax
            return
        from matplotlib.figure import Figure

        with style():
            figure = Figure(figsize=(COLUMN_WIDTH, aspect * COLUMN_WIDTH), layout="constrained")
            self.ax_, self.figure_ = figure.add_subplot(), figure
            yield self.ax_


def truth_and_residuals(y: ArrayLike, prediction: Prediction) -> tuple[Float64Array, Float64Array]:
    """Return the true values and z = y − ȳ, both of the shape of the prediction."""
    if not isinstance(prediction, Prediction):
        raise InputError(
            "prediction",
            type(prediction).__name__,
            "a Prediction",
            "Make one of members; of mean and standard deviation alone, give the numbers that "
            "qualms.core computes of them to the display itself.",
        )
    if np.shape(y) != prediction.shape:
        raise InputError("y", f"shape {np.shape(y)}", f"that of the prediction, {prediction.shape}")
    truth = check_points("y", y)
    return truth, truth - prediction.mean
