"""One look for all figures: for one column of a journal, legible in black and white.

A figure that a display makes for itself gets this look entirely; axes that the caller gives keep
their letters. The settings hold inside a ``with`` block and are gone after it; nothing here touches
pyplot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Width of one column, in inches.
COLUMN_WIDTH: Final = 3.3

INK: Final = "black"
ACCENT: Final = "#D55E00"
GREY: Final = "0.82"
GUIDE: Final = "0.45"

#: Fonts that come with matplotlib, so that a figure looks the same everywhere.
_FONT: Final = ("STIXGeneral", "DejaVu Sans")
_FONT_SIZE: Final = 9.0

#: TrueType in PDF, because journals refuse Type 3; a fixed salt, because the same figure must give
#: the same file.
_LOOK: Final[dict[str, Any]] = {
    "figure.dpi": 200.0,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "patch.linewidth": 0.6,
    "xtick.direction": "in",
    "ytick.direction": "in",
    "xtick.top": True,
    "ytick.right": True,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "legend.borderaxespad": 0.6,
    "pdf.fonttype": 42,
    "svg.hashsalt": "qualms",
}

# Colours of Okabe and Ito, which the colour-blind can tell apart; without any colour the dashes and
# the markers still differ.
_LINES: Final[tuple[tuple[str, Any, str], ...]] = (
    (INK, "-", "o"),
    ("#0072B2", "--", "s"),
    (ACCENT, "-.", "^"),
    ("#009E73", (0, (1, 1)), "D"),
    ("#AA4499", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("0.5", "-", "X"),
    ("#E69F00", (0, (3, 1)), "P"),
    ("#56B4E9", (0, (8, 2)), "<"),
)


@contextmanager
def style() -> Iterator[None]:
    """Make figures in the look of this package inside a ``with`` block.

    It starts from matplotlib's defaults, whatever the user's own settings are, which come back
    afterwards.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> with style():
    ...     left, right = Figure(figsize=(6.6, 2.8), layout="constrained").subplots(1, 2)
    """
    from matplotlib.style import context

    with context(["default", _LOOK | _text(_FONT, _FONT_SIZE, "stix")]):
        yield


@contextmanager
def style_of(ax: Axes) -> Iterator[None]:
    """Make artists in the look of this package, but in the letters that the axes already have."""
    from matplotlib.style import context

    label = ax.xaxis.label
    size = float(label.get_fontsize())
    with context(_LOOK | _text(label.get_fontfamily(), size, label.get_math_fontfamily())):
        yield


def _text(family: Sequence[str], size: float, mathtext: str) -> dict[str, Any]:
    """Return the settings of text whose axis labels have the given size, in points."""
    small = size * 8.0 / 9.0
    return {
        "font.family": list(family),
        "mathtext.fontset": mathtext,
        "font.size": size,
        "axes.labelsize": size,
        "axes.titlesize": size,
        "xtick.labelsize": small,
        "ytick.labelsize": small,
        "legend.fontsize": small,
    }


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the line number ``index``, for matplotlib's ``plot``.

    Eight lines differ; then the styles repeat.
    """
    color, dashes, marker = _LINES[index % len(_LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker}


def axis_label(quantity: str, *, target: str = "", units: str = "") -> str:
    """Return an axis label such as "Error ε of the shielding (ppm)"."""
    of_target = f" of {target}" if target else ""
    in_units = f" ({units})" if units else ""
    return f"{quantity}{of_target}{in_units}"
