"""Kernels between inputs: Eq. (13) raised to a power, averages over structures, and Eq. (17).

A kernel is any callable ``kernel(X, Y) -> (n, m)`` with a method ``diag(X) -> (n,)``. The ones
below follow that protocol, and so does every object of `sklearn.gaussian_process.kernels`, which
can be used wherever these can.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, cast

import numpy as np

from qualms.arrays import Float64Array, FloatArray, IntArray, check_integer, check_number
from qualms.errors import InputError, counted

#: Rows with the same zeros from which on it pays to leave these zeros out of a product.
_GROUP = 32


class Kernel(Protocol):
    """Interface of kernels, which `sklearn.gaussian_process.kernels` follow, too."""

    def __call__(self, X: FloatArray, Y: FloatArray, /) -> FloatArray:
        """Return the kernel between the rows of X (n, d) and those of Y (m, d): (n, m)."""
        ...

    def diag(self, X: FloatArray, /) -> FloatArray:
        """Return the kernel of each row of X (n, d) with itself: (n,)."""
        ...


class ProductKernel(ABC):
    """A kernel that is a function of the inner product, k(x, x′) = f(x·x′)."""

    def __call__(self, X: FloatArray, Y: FloatArray, /) -> FloatArray:
        """Return the kernel between the rows of X (n, d) and those of Y (m, d): (n, m)."""
        return self._value(_inner_products(X, Y))

    def diag(self, X: FloatArray, /) -> FloatArray:
        """Return the kernel of each row of X (n, d) with itself: (n,)."""
        return self._value(np.einsum("ij,ij->i", X, X))

    @abstractmethod
    def _value(self, products: FloatArray) -> FloatArray:
        """Return f; products may be overwritten, as they are the largest array of a stream."""

    @abstractmethod
    def value_and_slope(self, products: Float64Array, /) -> tuple[Float64Array, Float64Array]:
        """Return f and its derivative f′, for products x·x′ of any shape."""


def normalize_rows(X: FloatArray) -> FloatArray:
    """Scale each row of X (n, d) to unit length, in the precision of X; a null row stays null."""
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(X, axis=1, keepdims=True)
    if not np.all(np.isfinite(norms) & (norms > 1e-15)):
        # The squares may have left the range of numbers although the row has not.
        largest = np.abs(X).max(axis=1, keepdims=True, initial=0)
        X = X / np.where(largest > 0, largest, largest.dtype.type(1))
        norms = np.linalg.norm(X, axis=1, keepdims=True)
    normalized: FloatArray = X / np.where(norms > 0, norms, norms.dtype.type(1))
    return normalized


@dataclass(frozen=True)
class PowerKernel(ProductKernel):
    """The power kernel k(x, x′) = [(x·x′ + c) / (1 + c)]^ζ of normalised features.

    With c = 0 this is the SOAP kernel of Eq. (13), Musil et al. 2019, raised to the power ζ, as is
    customary. An even power of it does not distinguish x from −x, and a fractional one is not
    defined for x·x′ < 0; power spectra have no negative products. For general features use c = 1:
    one more, constant, feature, so that the argument lies in [0, 1] and the kernel contains all
    degrees up to ζ.

    Parameters
    ----------
    exponent : float
        ζ ≥ 1. If ζ is not an integer the kernel need not be positive semi-definite, and whitening
        drops negative directions.
    offset : float
        c ≥ 0.
    n_exact : int
        If not both X and Y are float64, how many features at the front are multiplied in float64.
        If these carry nearly all of x·x′, as leading principal components do, products are as
        accurate as float64 for little more than float32. Whitening amplifies rounding by up to 10³.
    clip : bool
        Whether a fractional power of a negative argument is zero rather than an error:
        k = max(x·x′ + c, 0)^ζ/(1 + c)^ζ, which has a continuous derivative for ζ > 1. For products
        that are negative only because features were compressed.
    """

    exponent: float = 2.0
    offset: float = 0.0
    n_exact: int = 0
    clip: bool = False

    def __post_init__(self) -> None:
        check_number("exponent", self.exponent, 1)
        check_number("offset", self.offset, 0)
        check_integer("n_exact", self.n_exact, 0)

    def __call__(self, X: FloatArray, Y: FloatArray, /) -> FloatArray:
        """Return the kernel between the rows of X (n, d) and those of Y (m, d): (n, m)."""
        if not self.n_exact or X.dtype == Y.dtype == np.float64:
            return super().__call__(X, Y)
        q = self.n_exact
        dots = X[:, :q].astype(np.float64, copy=False) @ Y[:, :q].astype(np.float64, copy=False).T
        dots += X[:, q:].astype(np.float32, copy=False) @ Y[:, q:].astype(np.float32, copy=False).T
        return self._value(dots)

    def value_and_slope(self, products: Float64Array, /) -> tuple[Float64Array, Float64Array]:
        """Return f and its derivative f′, for products x·x′ of any shape.

        Negative products are due to rounding or compression: for a fractional ζ they count as zero.
        """
        base = (products + self.offset) / (1 + self.offset) if self.offset else products
        if float(self.exponent).is_integer():
            slope = base ** (int(self.exponent) - 1)
        else:
            slope = np.maximum(base, 0.0) ** (self.exponent - 1)
        value = base * slope
        slope *= self.exponent / (1 + self.offset)
        return value, slope

    def _value(self, products: FloatArray) -> FloatArray:
        if not np.issubdtype(products.dtype, np.floating):
            products = products.astype(np.float64)
        if self.offset:
            products += products.dtype.type(self.offset)
            products /= products.dtype.type(1 + self.offset)
        if float(self.exponent).is_integer():
            return _integer_power(products, int(self.exponent))
        lowest = float(products.min(initial=0.0))
        if not self.clip and lowest < -100 * np.finfo(products.dtype).eps:  # more than rounding
            raise InputError(
                f"Some products x·x′ are negative (down to {lowest:.3g}), which cannot be raised "
                f"to the power {self.exponent:g}. Use an integer `exponent`, or `offset=1`.",
                parameter="exponent",
            )
        np.maximum(products, 0, out=products)
        return np.power(products, products.dtype.type(self.exponent), out=products)


def _inner_products(X: FloatArray, Y: FloatArray) -> FloatArray:
    """Return X Yᵀ for X (n, d) and Y (m, d): (n, m).

    Rows of X with the same zeros are multiplied together, without the columns that are zero: the
    power spectrum of a molecule has features of the pairs of its own elements only.
    """
    if len(X) < 2 * _GROUP:
        return np.asarray(X @ Y.T)
    products = np.empty((len(X), len(Y)), dtype=np.result_type(X, Y))
    same_zeros: dict[bytes, list[int]] = {}
    for i, zeros in enumerate(np.packbits(X == 0, axis=1)):
        same_zeros.setdefault(zeros.tobytes(), []).append(i)
    rest: list[int] = []
    for rows in same_zeros.values():
        columns = np.flatnonzero(X[rows[0]])
        if len(rows) < _GROUP or len(columns) > 0.8 * X.shape[1]:
            rest += rows
        else:
            products[rows] = X[np.ix_(np.array(rows), columns)] @ Y[:, columns].T
    if len(rest) == len(X):
        return np.asarray(X @ Y.T)
    products[rest] = X[rest] @ Y.T
    return products


def _integer_power(x: FloatArray, exponent: int) -> FloatArray:
    """Raise x to an integer power by squaring, which is some ten times faster than ``np.power``."""
    if exponent == 1:
        return x
    if exponent % 2 == 0:
        return _integer_power(np.square(x, out=x), exponent // 2)
    result = _integer_power(np.square(x), exponent // 2)
    result *= x
    return result


@dataclass(frozen=True)
class LinearKernel(ProductKernel):
    """The kernel k(x, x′) = x·x′ + c of features as they are; ``offset`` c is for a constant."""

    offset: float = 0.0

    def __post_init__(self) -> None:
        check_number("offset", self.offset, 0)

    def _value(self, products: FloatArray) -> FloatArray:
        return products + self.offset

    def value_and_slope(self, products: Float64Array, /) -> tuple[Float64Array, Float64Array]:
        """Return f and its derivative f′, for products x·x′ of any shape."""
        return products + self.offset, np.ones_like(products)


@dataclass(frozen=True)
class ExponentialKernel(ProductKernel):
    """The kernel k(x, x′) = (exp(x·x′/ℓ²) − 1) / (exp(1/ℓ²) − 1) of normalised features.

    It is the Gaussian kernel exp(−|x − x′|²/2ℓ²) of unit vectors less a constant, so that it is
    zero for orthogonal features, such as those of different elements. For large ℓ it is linear.
    """

    length_scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("length_scale", self.length_scale, 0.1)

    def value_and_slope(self, products: Float64Array, /) -> tuple[Float64Array, Float64Array]:
        """Return f and its derivative f′, for products x·x′ of any shape."""
        value = self._value(products.copy())
        slope = (value + 1 / np.expm1(self.length_scale**-2)) / self.length_scale**2
        return np.asarray(value), np.asarray(slope)

    def _value(self, products: FloatArray) -> FloatArray:
        products *= products.dtype.type(self.length_scale**-2)
        np.expm1(products, out=products)
        products /= products.dtype.type(np.expm1(self.length_scale**-2))
        return products


@dataclass(frozen=True)
class RBFKernel:
    """The Gaussian kernel k(x, x′) = exp(−|x − x′|² / 2ℓ²), with ``length_scale`` ℓ > 0."""

    length_scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("length_scale", self.length_scale, 0, strict=True)

    def __call__(self, X: FloatArray, Y: FloatArray, /) -> FloatArray:
        """Return the kernel between the rows of X (n, d) and those of Y (m, d): (n, m)."""
        D2 = squared_distances(X, Y)
        D2 *= D2.dtype.type(-0.5 / self.length_scale**2)
        return np.exp(D2, out=D2)

    def diag(self, X: FloatArray, /) -> FloatArray:
        """Return the kernel of each row of X (n, d) with itself: (n,), all ones."""
        return np.ones(len(X), dtype=X.dtype)


def squared_distances(X: FloatArray, Y: FloatArray) -> FloatArray:
    """Return |x − y|² for all rows of X (n, d) and Y (m, d), never negative: (n, m).

    The rows are first moved to the mean of Y: |x|² + |y|² − 2 x·y cancels badly if the data are far
    from the origin.
    """
    center = Y.mean(axis=0)
    X, Y = X - center, Y - center
    D2: FloatArray = X @ Y.T
    D2 *= -2
    D2 += np.einsum("ij,ij->i", X, X)[:, None]
    D2 += np.einsum("ij,ij->i", Y, Y)[None, :]
    return np.maximum(D2, 0, out=D2)


@dataclass(frozen=True)
class WeightedSumKernel:
    """A weighted sum of kernels, each of its own columns of the features: k = Σ_j w_j k_j.

    With one SOAP cutoff per group of columns this is the multi-scale kernel. Features are used as
    they are: normalise groups of columns before, where a term needs rows of unit length.

    Weights are not negative, and at least one is positive; all columns are used if not given.
    """

    kernels: Sequence[Kernel]
    weights: Sequence[float]
    columns: Sequence[slice] | None = None

    def __post_init__(self) -> None:
        for name, values in (("weights", self.weights), ("columns", self.columns)):
            if values is not None and len(values) != len(self.kernels):
                raise InputError(
                    f"There are {len(values)} `{name}` for {counted(len(self.kernels), 'kernel')}; "
                    "give one for each kernel.",
                    parameter=name,
                )
        w = np.asarray(self.weights, dtype=float)
        if not np.all(np.isfinite(w)) or np.any(w < 0) or not np.any(w > 0):
            raise InputError(
                f"`weights` is {list(self.weights)}; use finite values ≥ 0, and at least one > 0.",
                parameter="weights",
            )

    @property
    def terms(self) -> list[tuple[Kernel, float, slice]]:
        """Kernels, their weights and columns."""
        columns = self.columns or [slice(None)] * len(self.kernels)
        return list(zip(self.kernels, self.weights, columns, strict=True))

    def __call__(self, X: FloatArray, Y: FloatArray, /) -> FloatArray:
        """Return the kernel between the rows of X (n, d) and those of Y (m, d): (n, m)."""
        return self._sum(lambda kernel, columns: kernel(X[:, columns], Y[:, columns]))

    def diag(self, X: FloatArray, /) -> FloatArray:
        """Return the kernel of each row of X (n, d) with itself: (n,)."""
        return self._sum(lambda kernel, columns: kernel.diag(X[:, columns]))

    def _sum(self, term: Callable[[Kernel, slice], FloatArray]) -> FloatArray:
        return functools.reduce(np.add, (float(w) * term(k, some) for k, w, some in self.terms))


def product_terms(kernel: Kernel) -> list[tuple[ProductKernel, float, slice]]:
    """Return the terms of a kernel: functions of inner products, their weights and columns."""
    terms: list[tuple[Kernel, float, slice]] = [(kernel, 1.0, slice(None))]
    if isinstance(kernel, WeightedSumKernel):
        terms = kernel.terms
    return cast(list[tuple[ProductKernel, float, slice]], terms)


def pack(A: Float64Array) -> Float64Array:
    """Return the upper triangles of symmetric matrices (…, q, q) as rows: (…, q(q + 1)/2).

    Elements off the diagonal are multiplied by √2, so that inner products of rows are those of the
    matrices, tr AB. With (x·y)² = tr xxᵀyyᵀ, the power kernel of ζ = 2 is linear in packed squares.
    """
    upper, _, factors = _triangle(A.shape[-1])
    packed = A.reshape(*A.shape[:-2], A.shape[-1] ** 2).take(upper, axis=-1)
    packed *= factors
    return packed


def pack_symmetric(A: Float64Array) -> Float64Array:
    """Return the packed A + Aᵀ of any matrices (…, q, q): (…, q(q + 1)/2)."""
    upper, lower, factors = _triangle(A.shape[-1])
    flat = A.reshape(*A.shape[:-2], A.shape[-1] ** 2)
    packed = flat.take(upper, axis=-1)
    packed += flat.take(lower, axis=-1)
    packed *= factors
    return packed


def unpack(packed: Float64Array) -> Float64Array:
    """Return the symmetric matrices (…, q, q) of packed ones (…, q(q + 1)/2)."""
    q = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    upper, lower, factors = _triangle(q)
    A = np.empty((*packed.shape[:-1], q * q))
    A[..., upper] = A[..., lower] = packed / factors
    return A.reshape(*packed.shape[:-1], q, q)


@lru_cache(maxsize=16)
def _triangle(q: int) -> tuple[IntArray, IntArray, Float64Array]:
    """Return where the upper triangle is in a flat matrix and in its transpose, and factors."""
    rows, columns = np.triu_indices(q)
    factors = np.where(rows == columns, 1.0, math.sqrt(2.0))
    return rows * q + columns, columns * q + rows, factors


def average_over_structures(K: FloatArray, offsets: IntArray) -> Float64Array:
    """Average rows of environments into rows of structures.

    The kernel of a property that is an average over environments is the average of their kernels
    (De et al. 2016; for QM9 in Musil et al. 2019). Sums are in float64.

    Parameters
    ----------
    K : (n_environments, m) array
        Kernel rows, environments of one structure next to each other.
    offsets : (n_structures + 1,) array of int
        Environments of structure s are rows ``offsets[s]:offsets[s + 1]``; no structure is empty.
    """
    offsets = np.asarray(offsets, dtype=np.intp)
    sizes = np.diff(offsets)
    if not len(sizes) or offsets[0] != 0 or offsets[-1] != len(K) or np.any(sizes < 1):
        raise InputError(
            f"`offsets` is {offsets}; it must increase from 0 to the number of rows, {len(K)}.",
            parameter="offsets",
        )
    # A sum for each structure: np.add.reduceat along the first axis takes 20 times longer.
    sums = np.empty((len(sizes), K.shape[1]))
    for s, (begin, end) in enumerate(pairwise(offsets)):
        np.sum(K[begin:end], axis=0, dtype=np.float64, out=sums[s])
    sums /= sizes[:, None]
    return sums


def unit_scale(
    variance: float, k_diag: FloatArray, sample_weight: FloatArray | None = None
) -> float:
    """Return the factor that gives a kernel the units of y²: N·Var[y] / Tr[K].

    Eq. (17), Musil et al. 2019, with the missing factor N: as printed, the mean of the diagonal
    would become Var[y]/N, whereas the prior variance of a structure should be Var[y].

    Parameters
    ----------
    variance : float
        Var[y].
    k_diag, sample_weight : (N,) arrays
        The diagonal of the kernel matrix of the same N inputs, and how much each input counts.
    """
    mean_diag = float(np.average(k_diag.astype(np.float64), weights=sample_weight))
    if not (mean_diag > 0 and np.isfinite(mean_diag)):
        raise InputError(
            f"The mean of the kernel's diagonal is {mean_diag:.3g}, which is not positive and "
            "finite. Are all features zero, or far too large? Scale them.",
            parameter="k_diag",
        )
    return variance / mean_diag


def median_length_scale(X: FloatArray) -> float:
    """Return the median distance between distinct rows of X, a common default for ℓ.

    It is 1 if all rows are the same. At most 1000 rows, evenly spaced, are looked at.
    """
    rows = X[np.linspace(0, len(X) - 1, min(len(X), 1000)).astype(int)]
    D2 = squared_distances(rows, rows)[np.triu_indices(len(rows), k=1)]
    distances = np.sqrt(D2[D2 > 0], dtype=np.float64)
    return float(np.median(distances)) if distances.size else 1.0
