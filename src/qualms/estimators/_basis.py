"""Kernel and representatives: from features of inputs to whitened features."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from qualms.core.checks import check_integer
from qualms.core.kernels import (
    Kernel,
    PowerKernel,
    RBFKernel,
    median_length_scale,
    normalize_rows,
    unit_scale,
)
from qualms.core.linalg import Whitening, whiten
from qualms.core.selection import cur, farthest_points
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, QualmsWarning

#: Inputs whose kernel rows are held at once.
_BLOCK = 2048
#: Number of representatives if none is given.
_DEFAULT_REPRESENTATIVES = 1000
SELECTIONS = ("fps", "cur", "random")


@dataclass(frozen=True)
class Basis:
    """A kernel and the representatives that span the model.

    Attributes
    ----------
    kernel : Kernel
    scale : float
        Factor of Eq. (17), Musil et al. 2019, for y of unit variance: the scaled kernel has a mean
        diagonal of one over the training points.
    representatives : (r, d) array
        What the kernel acts on: for the power kernel, rows of unit length.
    indices : (r,) array of int
        Training points that are representatives.
    whitening : Whitening
    """

    kernel: Kernel
    scale: float
    representatives: FloatArray
    indices: IntArray
    whitening: Whitening

    def blocks(self, X: FloatArray) -> Iterator[FloatArray]:
        """Yield X (n, d) in blocks of rows, as the kernel wants them."""
        for start in range(0, len(X), _BLOCK):
            block = X[start : start + _BLOCK]
            yield normalize_rows(block) if isinstance(self.kernel, PowerKernel) else block

    def kernel_rows(self, block: FloatArray) -> Float64Array:
        """Return the kernel between a block (b, d) and the representatives: (b, r)."""
        rows = np.asarray(self.kernel(block, self.representatives), dtype=np.float64)
        rows *= self.scale
        return rows

    def prior_variance(self, block: FloatArray) -> Float64Array:
        """Return the diagonal of the kernel for a block (b, d): (b,)."""
        return np.asarray(self.kernel.diag(block), dtype=np.float64) * self.scale

    def features(self, X: FloatArray) -> Float64Array:
        """Return the whitened features Φ of X (n, d): (n, r)."""
        K = np.empty((len(X), len(self.representatives)))
        start = 0
        for block in self.blocks(X):
            K[start : start + len(block)] = self.kernel_rows(block)
            start += len(block)
        return np.asarray(self.whitening.features(K, overwrite=True))

    def contract(self, X: FloatArray, weights: Float64Array) -> Float64Array:
        """Return Σ_m k(x, m) w_m for X (n, d) and kernel weights (r, …): (n, …)."""
        flat = weights.reshape(len(weights), -1)
        parts = [self.kernel_rows(block) @ flat for block in self.blocks(X)]
        return np.concatenate(parts).reshape(len(X), *weights.shape[1:])


def make_kernel(
    kernel: str | Kernel,
    X: FloatArray,
    *,
    exponent: float,
    offset: float | str,
    length_scale: float | None,
) -> Kernel:
    """Return a kernel given by name or as an object, with the parameters that X (n, d) suggests."""
    if not isinstance(kernel, str):
        if not (callable(kernel) and hasattr(kernel, "diag")):
            raise InputError("kernel", kernel, "a callable kernel(X, Y) with a method diag(X)")
        return kernel
    if kernel == "power":
        return PowerKernel(exponent, _resolve_offset(offset, X))
    if kernel == "rbf":
        return RBFKernel(median_length_scale(X) if length_scale is None else length_scale)
    raise InputError("kernel", repr(kernel), '"power", "rbf" or a kernel object')


def select_representatives(
    kernel: Kernel, features: FloatArray, n: int | None, selection: str, rng: np.random.Generator
) -> IntArray:
    """Choose the indices of n representatives by name; the default is at most 1000.

    Farthest points are far in the space of the features; leverage scores are those of the kernel.
    """
    n_points = len(features)
    if n is not None and check_integer("n_representatives", n, 1) > n_points:
        raise InputError(
            "n_representatives",
            n,
            f"1 to {n_points}, the number of distinct training points",
            "Use fewer, or None for as many as are useful.",
        )
    wanted = min(n_points, _DEFAULT_REPRESENTATIVES) if n is None else n
    if selection == "random":
        return np.sort(rng.permutation(n_points)[:wanted]).astype(np.intp)
    if selection == "fps":
        chosen = farthest_points(features, wanted).indices
    elif selection == "cur":
        chosen = cur(_kernel_features(kernel, features, 2 * wanted), wanted).indices
    else:
        raise InputError("selection", repr(selection), f"one of {', '.join(SELECTIONS)}")
    if n is not None and len(chosen) < n:
        warnings.warn(
            f"Only {len(chosen)} of n_representatives={n} were found: to the kernel, all other "
            "training points are combinations of these.",
            QualmsWarning,
            stacklevel=4,
        )
    return chosen


def _kernel_features(kernel: Kernel, features: FloatArray, n_landmarks: int) -> Float64Array:
    """Return features whose products are the kernel, as far as so many landmarks can tell.

    With as many landmarks as points this is exact: leverage scores of the features are those of the
    kernel matrix, which itself need not fit into memory.
    """
    landmarks = farthest_points(features, min(n_landmarks, len(features))).indices
    exact = features[landmarks].astype(np.float64)
    whitening = whiten(kernel(exact, exact))
    K = np.asarray(kernel(features, features[landmarks[whitening.pivots]]), dtype=np.float64)
    return np.asarray(whitening.features(K, overwrite=True))


def build_basis(
    kernel: Kernel,
    X: FloatArray,
    weight: Float64Array,
    *,
    n_representatives: int | None,
    selection: str,
    rng: np.random.Generator,
) -> Basis:
    """Choose the representatives among X (n, d) and whiten their kernel.

    Parameters
    ----------
    kernel : Kernel
    X : (n, d) array
        Distinct training points.
    weight : (n,) array
        Their weights, for the mean of the diagonal.
    n_representatives, selection, rng
        See `select_representatives`.
    """
    features = normalize_rows(X) if isinstance(kernel, PowerKernel) else X
    chosen = select_representatives(kernel, features, n_representatives, selection, rng)
    exact = features[chosen].astype(np.float64)
    scale = unit_scale(1.0, kernel.diag(features), weight)
    # The rounding of kernel rows in float32 limits which representatives are still independent.
    rtol = 1e-6 if features.dtype == np.float32 else None
    whitening = whiten(kernel(exact, exact), rtol=rtol)
    whitening = replace(whitening, factor=whitening.factor * np.sqrt(scale))
    if whitening.negative > 1e-6:
        warnings.warn(
            "The kernel is not positive semi-definite; what is negative was dropped. "
            "(The power kernel is positive semi-definite for integer exponents.)",
            QualmsWarning,
            stacklevel=3,
        )
    if whitening.effective_rank == 1 and len(X) > 1 and n_representatives != 1:
        warnings.warn(
            "All training points are the same to the kernel, which cannot tell them apart. "
            "The power kernel sees only directions: use kernel='rbf' for a single feature.",
            QualmsWarning,
            stacklevel=4,
        )
    indices = chosen[whitening.pivots]
    return Basis(kernel, scale, features[indices], indices, whitening)


def _resolve_offset(offset: float | str, X: FloatArray) -> float:
    """Return c of the power kernel: by default 1 if products are negative beyond rounding."""
    if not isinstance(offset, str):
        return offset
    if offset != "auto":
        raise InputError("offset", repr(offset), '"auto" or a number ≥ 0')
    rows = normalize_rows(X[:_BLOCK])  # distinct points come in random order
    return 1.0 if np.min(rows @ rows.T) < -1e-5 else 0.0
