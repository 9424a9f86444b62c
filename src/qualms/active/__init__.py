"""Active learning: which structures to label next, what labels say, and the loop."""

from qualms.active.audit import Coverage, coverage, upper_bound
from qualms.active.loop import MissingLabelsError, Round, learn
from qualms.active.select import Selection, select
from qualms.active.settings import LearnSettings, make_learn_settings
from qualms.atomistic.evaluation import label_scores, out_of_bag_scores
from qualms.calibration.sequential import CalibrationTest

__all__ = [
    "CalibrationTest",
    "Coverage",
    "LearnSettings",
    "MissingLabelsError",
    "Round",
    "Selection",
    "coverage",
    "label_scores",
    "learn",
    "make_learn_settings",
    "out_of_bag_scores",
    "select",
    "upper_bound",
]
