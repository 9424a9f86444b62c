"""Which points to keep: farthest point sampling and CUR (leverage scores).

Both are greedy and deterministic. Among rows that are equally far, or of equal leverage, the lowest
index is taken, as far as rounding lets a tie be seen. Both stop early when nothing
new is left: farthest points when all other rows repeat a pick, CUR when the picks span all rows.
"""

from qualms.core.selection.arguments import RowSource
from qualms.core.selection.farthest import (
    FarthestPoints,
    Points,
    farthest_points,
    farthest_points_from_kernel,
    pick_farthest,
)
from qualms.core.selection.leverage import LeverageSelection, cur, cur_from_kernel

__all__ = [
    "FarthestPoints",
    "LeverageSelection",
    "Points",
    "RowSource",
    "cur",
    "cur_from_kernel",
    "farthest_points",
    "farthest_points_from_kernel",
    "pick_farthest",
]
