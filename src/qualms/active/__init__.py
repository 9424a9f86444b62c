"""Active learning: which structures to label next, and what the labels say about the model."""

from qualms.active.audit import Coverage, coverage, upper_bound
from qualms.active.select import Selection, select
from qualms.atomistic.evaluation import label_scores, out_of_bag_scores
from qualms.calibration.sequential import CalibrationTest

__all__ = [
    "CalibrationTest",
    "Coverage",
    "Selection",
    "coverage",
    "label_scores",
    "out_of_bag_scores",
    "select",
    "upper_bound",
]
