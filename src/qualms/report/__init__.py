"""Tables, figures and HTML reports of predictions and their uncertainties."""

from qualms.report.assessment import Assessment, assess
from qualms.report.figures import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    Display,
    ReliabilityDisplay,
    ResidualDisplay,
    ZScoreDisplay,
    line_style,
    style,
)
from qualms.report.report import Report, make_report, write_report
from qualms.report.tables import Table, interval_table, score_table

__all__ = [
    "Assessment",
    "BinnedErrorDisplay",
    "ConditionalErrorDisplay",
    "Display",
    "ReliabilityDisplay",
    "Report",
    "ResidualDisplay",
    "Table",
    "ZScoreDisplay",
    "assess",
    "interval_table",
    "line_style",
    "make_report",
    "score_table",
    "style",
    "write_report",
]
