"""Names for the array types that the core speaks in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Any floating-point array: features and kernels may be float32 to save time and memory.
FloatArray = NDArray[np.floating[Any]]
#: What is solved, scored or calibrated is always float64.
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]
#: Labels.
StrArray = NDArray[np.str_]
