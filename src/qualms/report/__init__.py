"""Pictures and tables of predictions and their error bars.

The numbers are those of `qualms.core`; here they are drawn (`qualms.report.figures`, with
matplotlib), printed (`qualms.report.tables`, with rich), and written into one HTML file with a
verdict and a map of the structures (`write_report`).
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
from qualms.report.judged import AtomValues, Judged
from qualms.report.report import check_report, write_report
from qualms.report.tables import (
    PAPER_COLUMNS,
    calibration_table,
    interval_records,
    interval_table,
    paper_table,
    score_records,
    score_table,
)

__all__ = [
    "PAPER_COLUMNS",
    "AtomValues",
    "BinnedErrorDisplay",
    "ConditionalErrorDisplay",
    "Display",
    "Judged",
    "LearningCurveDisplay",
    "ParityDisplay",
    "ReliabilityDisplay",
    "SubsampleSizeDisplay",
    "ZScoreDisplay",
    "calibration_table",
    "check_report",
    "interval_records",
    "interval_table",
    "line_style",
    "paper_table",
    "score_records",
    "score_table",
    "style",
    "write_report",
]
