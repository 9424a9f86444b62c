"""Checks of arguments that several modules of the core share."""

from __future__ import annotations

import numpy as np

from qualms.core.typing import Float64Array, FloatArray
from qualms.errors import InputError


def check_noise_variance(noise_variance: float) -> None:
    """Refuse a regulariser that is not a positive finite number."""
    if not (np.isfinite(noise_variance) and noise_variance > 0):
        raise InputError("noise_variance", noise_variance, "a finite number > 0")


def as_targets(y: FloatArray, n: int) -> Float64Array:
    """Return y (n,) or (n, T) as finite float64 of shape (n, T)."""
    Y = np.asarray(y, dtype=np.float64)
    if Y.ndim not in (1, 2) or len(Y) != n:
        raise InputError("y", f"shape {Y.shape}", f"({n},) or ({n}, n_outputs)")
    if not np.all(np.isfinite(Y)):
        raise InputError("y", "NaN or infinite values", "finite values")
    return Y[:, None] if Y.ndim == 1 else Y


def check_sample_weight(sample_weight: FloatArray | None, n: int) -> Float64Array:
    """Return the weights (n,) as float64, ones if not given; none may be zero or negative."""
    if sample_weight is None:
        return np.ones(n)
    w = np.asarray(sample_weight, dtype=np.float64)
    if w.shape != (n,):
        raise InputError("sample_weight", f"shape {w.shape}", f"({n},)")
    if not np.all(np.isfinite(w)) or np.any(w <= 0):
        raise InputError(
            "sample_weight", f"minimum {w.min():.3g}", "finite weights > 0", "Leave samples out."
        )
    return w
