"""The figures of a report, drawn by the displays and kept as bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qualms.prediction import Prediction
from qualms.report.figures import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    Display,
    ParityDisplay,
    ReliabilityDisplay,
    ZScoreDisplay,
    line_style,
)
from qualms.report.judged import Judged

#: A drawing of more bytes is kept as pixels, which take less.
_MOST_VECTOR = 300_000
_DPI = 220


@dataclass(frozen=True)
class Picture:
    """One figure.

    Attributes
    ----------
    title : str
    caption : str
        What it shows and how to read it.
    alt : str
        What is seen, for those who do not see it.
    kind : str
        Media type: "image/svg+xml" or "image/png".
    data : bytes
        The same for the same numbers.
    """

    title: str
    caption: str
    alt: str
    kind: str
    data: bytes


def draw_pictures(judged: Judged) -> Sequence[Picture]:
    """Draw all figures of a report.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    """
    return [make(judged) for make in _PICTURES]


def _conditional(judged: Judged) -> Picture:
    display = ConditionalErrorDisplay.from_prediction(
        judged.y, judged.prediction, units=judged.units
    ).plot()
    return _picture(
        display,
        "Errors at each error bar",
        "Which errors occur (solid) and which the model expects (dashed) where it predicts a given "
        "σ; grey is how often it does. Where both sets of contours agree, error bars are right at "
        "each σ, not only on average. Eq. (18) of Musil et al. 2019.",
        f"Contours of the density of errors at given σ, {judged.y.size} points",
    )


def _reliability(judged: Judged) -> Picture:
    n_structures = int(np.unique(judged.structure).size)
    what = "points" if n_structures == judged.y.size else f"the {n_structures} structures"
    display = ReliabilityDisplay.from_prediction(
        judged.y, judged.prediction, n_independent=n_structures
    )
    display.plot(label="after" if judged.is_calibrated else "")
    if judged.is_calibrated:
        before = ReliabilityDisplay.from_prediction(judged.y, judged.prediction.uncalibrated)
        before.plot(display.ax_, label="before", reference=False, **line_style(1))
    return _picture(
        display,
        "Reliability",
        "How often intervals hold the truth, against how often they claim to. Below the diagonal "
        "error bars are too small, above it too large; the grey band is what chance allows if "
        f"{what} are independent.",
        f"Observed against nominal coverage, miscalibration area {display.area:.3f}",
    )


def _binned(judged: Judged) -> Picture:
    def bins(prediction: Prediction) -> BinnedErrorDisplay:
        return BinnedErrorDisplay.from_prediction(judged.y, prediction, units=judged.units)

    display = bins(judged.prediction).plot(label="after" if judged.is_calibrated else "")
    if judged.is_calibrated:
        open_squares = line_style(1) | {"linestyle": "none", "markerfacecolor": "white"}
        bins(judged.prediction.uncalibrated).plot(
            display.ax_, label="before", reference=False, **open_squares
        )
    return _picture(
        display,
        "Actual against predicted error",
        "Points sorted by σ into bins: the root mean squared error of each bin against the one "
        "that was predicted. On the line error bars are right; above it they are too small.",
        f"Root mean squared error against root mean variance in {display.bins.counts.size} bins",
    )


def _parity(judged: Judged) -> Picture:
    display = ParityDisplay.from_prediction(judged.y, judged.prediction, units=judged.units).plot()
    return _picture(
        display,
        "Predictions",
        "Predicted against true values, with error bars of ±σ. Many points are shown as their "
        "density, some of them with error bars.",
        f"Predicted against true values, RMSE {display.rmse:.3g} {judged.units}".rstrip(),
    )


def _z_scores(judged: Judged) -> Picture:
    # A prediction may stand for a committee of another size.
    dof = judged.n_members - 1.0 if judged.n_members is not None and judged.n_members > 3 else None
    display = ZScoreDisplay.from_prediction(judged.y, judged.prediction, dof=dof).plot()
    return _picture(
        display,
        "Errors in units of σ",
        "Histogram of z/σ against the standard normal distribution and, for a committee of this "
        "size, Student's. If error bars hold, the root mean square is one.",
        f"Histogram of errors over σ, root mean square {display.rms:.2f}",
    )


_PICTURES: tuple[Callable[[Judged], Picture], ...] = (
    _conditional,
    _reliability,
    _binned,
    _z_scores,
    _parity,
)


def _picture(display: Display, title: str, caption: str, alt: str) -> Picture:
    """Save a figure as a drawing, or as pixels if the drawing has too many parts."""
    file = io.BytesIO()
    display.save(file, format="svg")
    if file.tell() <= _MOST_VECTOR:
        return Picture(title, caption, alt, "image/svg+xml", file.getvalue())
    file = io.BytesIO()
    display.save(file, format="png", dpi=_DPI)
    return Picture(title, caption, alt, "image/png", file.getvalue())
