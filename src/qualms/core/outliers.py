"""Points whose errors are not of the same kind as those of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from qualms.core.checks import check_points, check_std
from qualms.core.typing import IntArray

#: So many times its error bar, and so many times the size of most errors, is far.
FAR = 10.0
#: Half of all Gaussian errors are smaller than this part of their standard deviation.
_MEDIAN = 0.6745


def far_points(residuals: ArrayLike, std: ArrayLike) -> IntArray:
    """Return the points that are far off, both for their error bars and for an error, worst first.

    A point may be many error bars off because members happened to agree about it, and its error may
    be large where all errors are; only both together are a sign of a wrong label.

    Parameters
    ----------
    residuals, std : array_like of shape (n,)
        z = y − ȳ and σ > 0, in the units of y.

    Returns
    -------
    (m,) array of int
        Those with |z| > 10 σ and |z| > 10 times the median of |z|/0.67.
    """
    z = np.abs(check_points("residuals", residuals))
    with np.errstate(over="ignore"):
        t = z / check_std(std, z.shape)
    found = np.flatnonzero((t > FAR) & (z > FAR * np.median(z) / _MEDIAN))
    return found[np.argsort(-t[found], kind="stable")]
