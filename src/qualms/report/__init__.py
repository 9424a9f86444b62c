"""Pictures and tables of predictions and their error bars.

The numbers are those of `qualms.core`; here they are drawn (`qualms.report.figures`, with
matplotlib) and printed (`qualms.report.tables`, with rich).
"""

from qualms.report.figures import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    Display,
    LearningCurveDisplay,
    ParityDisplay,
    ReliabilityDisplay,
    SubsampleSizeDisplay,
    ZScoreDisplay,
    line_style,
    style,
)
from qualms.report.tables import (
    PAPER_COLUMNS,
    calibration_table,
    paper_table,
    score_records,
    score_table,
)

__all__ = [
    "PAPER_COLUMNS",
    "BinnedErrorDisplay",
    "ConditionalErrorDisplay",
    "Display",
    "LearningCurveDisplay",
    "ParityDisplay",
    "ReliabilityDisplay",
    "SubsampleSizeDisplay",
    "ZScoreDisplay",
    "calibration_table",
    "line_style",
    "paper_table",
    "score_records",
    "score_table",
    "style",
]
