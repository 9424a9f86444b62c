"""Figures of predictions and their error bars, after scikit-learn's displays.

Each class computes its numbers with `qualms.core`, keeps them as attributes, and draws them with
`plot`, on a new figure of one column's width or on axes given:

- `ConditionalErrorDisplay`: the paper's figure, Eq. (18): which errors occur at each error bar;
- `ReliabilityDisplay`: how often intervals hold the truth, and how often they claim to;
- `BinnedErrorDisplay`: actual against predicted errors, in bins;
- `ZScoreDisplay`: residuals in units of their error bars;
- `ParityDisplay`: predictions against the truth;
- `SubsampleSizeDisplay`, `LearningCurveDisplay`: scores against sizes.

`style` is the common look, for figures of several panels, and `line_style` that of several lines.
"""

from qualms.report.figures._base import Display
from qualms.report.figures._style import line_style, style
from qualms.report.figures.binned import BinnedErrorDisplay
from qualms.report.figures.conditional import ConditionalErrorDisplay
from qualms.report.figures.curves import LearningCurveDisplay, SubsampleSizeDisplay
from qualms.report.figures.parity import ParityDisplay
from qualms.report.figures.reliability import ReliabilityDisplay
from qualms.report.figures.residuals import ZScoreDisplay

__all__ = [
    "BinnedErrorDisplay",
    "ConditionalErrorDisplay",
    "Display",
    "LearningCurveDisplay",
    "ParityDisplay",
    "ReliabilityDisplay",
    "SubsampleSizeDisplay",
    "ZScoreDisplay",
    "line_style",
    "style",
]
