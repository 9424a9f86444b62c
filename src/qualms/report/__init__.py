"""Tables, figures and HTML reports of predictions and their uncertainties."""

from qualms.report.assessment import Assessment, assess
from qualms.report.figures import (
    BinnedErrorDisplay,
    ConditionalErrorDisplay,
    Display,
    ParityDisplay,
    ReliabilityDisplay,
    SubsampleSizeDisplay,
    ZScoreDisplay,
    line_style,
    style,
)
from qualms.report.report import Report, check_report, write_report
from qualms.report.tables import (
    PAPER_COLUMNS,
    Table,
    interval_records,
    interval_table,
    paper_table,
    score_records,
    score_table,
)

__all__ = [
    "PAPER_COLUMNS",
    "Assessment",
    "BinnedErrorDisplay",
    "ConditionalErrorDisplay",
    "Display",
    "ParityDisplay",
    "ReliabilityDisplay",
    "Report",
    "SubsampleSizeDisplay",
    "Table",
    "ZScoreDisplay",
    "assess",
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
