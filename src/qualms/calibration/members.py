"""Members of calibrated predictions: scaled to σ, with the correlations of their errors.

σ is a function of the standard deviations of a point; see `Calibration.std`. Here the members of a
prediction, of which these are taken, get that standard deviation: Eq. (19), Musil et al. 2019, for
any calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np

from qualms.arrays import Float64Array, FloatArray
from qualms.calibration.methods import Calibratable, Calibration, P_co
from qualms.calibration.vectors import shrink_towards_sphere, vector_std
from qualms.errors import InputError
from qualms.gp.ensemble import calibration_factors, ensemble_mean_std, rescaled

C = TypeVar("C", bound=Calibration)


def calibrated_members(
    calibration: Calibration,
    members: FloatArray,
    *,
    novelty_std: FloatArray | None = None,
    isotropy: float | None = None,
    factors: FloatArray | None = None,
) -> Float64Array:
    """Scale members about their mean to the calibrated standard deviation.

    Parameters
    ----------
    calibration : Calibration
    members : (…, N_R) array
        Before calibration: the subsampled ones and then those of the posterior.
    novelty_std : (…) array, optional
        q of each point, for methods that need it.
    isotropy : float, optional
        u, if the points are components (…, 3, 6 or 9) of vectors or tensors. These are scaled as a
        whole: σ is that of the standard deviation of the vector, and its covariance is shrunk
        towards a sphere.
    factors : (n,) array, optional
        Factors of σ along the first axis, such as those of elements.

    Returns
    -------
    (…, N) array
        Of as many members as σ has sources: see `source_members`.
    """
    values = np.asarray(members, dtype=np.float64)
    n_subsampled = calibration.n_subsampled or values.shape[-1]
    n_posterior = values.shape[-1] - n_subsampled

    def std_over(some: Float64Array) -> Float64Array:
        std = ensemble_mean_std(some)[1]
        return std if isotropy is None else np.broadcast_to(vector_std(std)[..., None], std.shape)

    s = std_over(values[..., :n_subsampled])
    p = std_over(values[..., n_subsampled:]) if n_posterior else None
    sigma = calibration.std(s, n_subsampled, p, novelty_std, n_posterior)
    sources = source_members(calibration, values)
    scaled = rescaled(sources, calibration_factors(sigma, std_over(sources)))
    if isotropy is None and np.any(equal := np.ptp(sources, axis=-1) == 0):
        # Members that agree may be wrong. Their deviations have no direction: any will do.
        deviations = np.arange(sources.shape[-1]) - (sources.shape[-1] - 1) / 2
        scaled[equal] += sigma[equal][..., None] * (deviations / deviations.std(ddof=1))
    if isotropy:
        scaled = shrink_towards_sphere(scaled, isotropy)
    if factors is not None:
        scaled = rescaled(scaled, np.reshape(factors, (-1, *[1] * (scaled.ndim - 2))))
    return scaled


@dataclass(frozen=True)
class PerOutputCalibration:
    """One calibration for each output of a model with several: their units need not be the same."""

    outputs: tuple[Calibration, ...]

    @property
    def method(self) -> str:
        """Name of the method; an output that is constant has none."""
        return next((c.method for c in self.outputs if c.method != "none"), "none")

    @property
    def alpha(self) -> Float64Array:
        """α of each output: (T,)."""
        return np.array([c.alpha for c in self.outputs])

    @property
    def gamma(self) -> Float64Array:
        """γ of each output: (T,)."""
        return np.array([c.gamma for c in self.outputs])

    @property
    def log_likelihood(self) -> Float64Array:
        """Mean log likelihood of each output: (T,)."""
        return np.array([c.log_likelihood for c in self.outputs])

    def members(
        self, members: FloatArray, *, novelty_std: FloatArray | None = None
    ) -> Float64Array:
        """Scale the members (…, T, N_R) about their means, output by output; q is (…, T)."""
        if members.ndim < 2 or members.shape[-2] != len(self.outputs):
            raise InputError(
                f"The `prediction` has shape {members.shape[:-1]}; the calibration is for "
                f"{len(self.outputs)} outputs on the last axis. For some of these, apply their own "
                "calibrations, outputs[t].",
                parameter="prediction",
            )
        scaled = [
            calibrated_members(
                c,
                members[..., t, :],
                novelty_std=None if novelty_std is None else novelty_std[..., t],
            )
            for t, c in enumerate(with_equal_members(self.outputs, members.shape[-1]))
        ]
        return np.stack(scaled, axis=-2)

    @property
    def needs_novelty(self) -> bool:
        """Whether q is a source of an output."""
        return any(c.needs_novelty for c in self.outputs)

    def apply(self, prediction: Calibratable[P_co]) -> P_co:
        """Return the calibrated prediction."""
        return prediction.calibrated(self)


def source_members(calibration: Calibration, members: FloatArray) -> Float64Array:
    """Return the members (…, N) that are scaled, of the kinds (…, N_R) that σ depends on."""
    kinds = calibration.kinds(np.shape(members)[-1])
    return combined_members(members, kinds, calibration.n_calibrated)


def n_independent(calibration: Calibration | None, n_members: int) -> int:
    """Return how many of the members of a calibrated prediction are independent.

    The deviations of n_k members of a kind from their mean have the rank n_k − 1; the mean itself
    counts as one.
    """
    kinds = () if calibration is None else calibration.kinds(n_members)
    return 1 + sum(n - 1 for n, weight in kinds if n and weight)


def member_factors(
    calibration: Calibration, std: Float64Array, members: FloatArray
) -> Float64Array:
    """Return the factors by which a calibration scaled its `source_members` to σ.

    Parameters
    ----------
    calibration : Calibration
    std : (…) array
        σ.
    members : (…, N_R) array
        Before calibration.

    Returns
    -------
    (…) array
    """
    return calibration_factors(std, ensemble_mean_std(source_members(calibration, members))[1])


def with_equal_members(calibrations: Sequence[C], n_members: int) -> list[C]:
    """Return calibrations of the N_R members of one model that yield equally many members each.

    Those of different quantities can then be combined in pairs.
    """
    n = max(source_members(c, np.zeros(n_members)).shape[-1] for c in calibrations)
    return [replace(c, n_calibrated=n) for c in calibrations]


def combined_members(
    members: FloatArray, kinds: Sequence[tuple[int, float]], n: int = 0
) -> Float64Array:
    """Return members (…, n) whose covariance is the weighted sum of those of several kinds.

    Let D_k be the deviations of the n_k members of kind k from the prediction, the mean of each
    kind, divided by √(n_k − 1). The columns of D = [w₁D₁, w₂D₂, …] have the covariance
    D Dᵀ = Σ w_k² D_k D_kᵀ, but each is a draw of one kind alone: their votes, and what is not
    linear in them, would be wrong. With a random isometry Q that is orthogonal to (1, …, 1) on both
    sides, Q Qᵀ = I − 11ᵀ/Σn_k, the columns of √(n − 1) D Q have mean and covariance of the same
    values, and each is a draw of the whole. Members of a single kind stay as they are.

    Parameters
    ----------
    members : (…, N_R) array
        One kind after the other.
    kinds : sequence of (int, float)
        n_k and w_k. Members whose weight is zero carry nothing and are left out.
    n : int
        At least the number of members with a weight; by default that number.
    """
    counts, weights = zip(*kinds, strict=True)
    used = np.repeat(weights, counts) > 0
    values = np.asarray(members, dtype=np.float64)[..., used]
    n_used = values.shape[-1]
    n = n or n_used
    alone = n == n_used and len({*np.repeat(range(len(counts)), counts)[used]}) == 1
    if alone and max(weights) == 1.0:
        return values
    mean = values.mean(axis=-1, keepdims=True)
    scales = [w * ((n - 1) / max(k - 1, 1)) ** 0.5 for k, w in kinds]
    D = (values - mean) * np.repeat(scales, counts)[used]
    return np.asarray(mean + (D if alone else D @ _isometry(n_used, n)))


@lru_cache(maxsize=32)
def _isometry(k: int, n: int) -> Float64Array:
    """Return a random Q (k, n ≥ k) with Q Qᵀ = I − 11ᵀ/k and Q 1 = 0, the same in each process."""
    turned = np.random.default_rng(0).standard_normal((n - 1, k - 1))
    Q: Float64Array = _contrasts(k) @ np.linalg.qr(turned)[0].T @ _contrasts(n).T
    Q.flags.writeable = False
    return Q


def _contrasts(n: int) -> Float64Array:
    """Return an orthonormal basis (n, n − 1) of the vectors whose elements sum to zero."""
    Q: Float64Array = np.linalg.qr(np.column_stack([np.ones(n), np.eye(n)[:, 1:]]))[0]
    return Q[:, 1:]
