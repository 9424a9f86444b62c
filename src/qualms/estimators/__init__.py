"""Thin scikit-learn shells around the core."""

from qualms.estimators.projected_process import ProjectedProcessRegressor
from qualms.estimators.resampling import ResamplingRegressor

__all__ = ["ProjectedProcessRegressor", "ResamplingRegressor"]
