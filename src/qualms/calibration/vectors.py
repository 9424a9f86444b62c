"""Vectors, tensors, factors of elements, and the calibration of a quantity that may have them.

Standard deviations of vectors and tensors do not depend on how these are turned.

The covariance Ĉ of few members of a vector is more anisotropic than that of many, so that it is
shrunk towards a sphere:

    Σ = σ²(r)/r² [(1 − u) Ĉ + u s̄ I],

r² being the mean square of ŝ over components, s̄ the mean eigenvalue of Ĉ, and u the isotropy.
Tensors are vectors of six components, those off the diagonal multiplied by √2. In directions in
which the members agree, because of symmetry, there is no uncertainty: I is ∝ Ĉ/(Ĉ + κ s̄) with
κ = 0.01, such that Σ has the trace of Ĉ σ²/r². The calibration σ(r) is fitted to components divided
by `component_share`.

Everything about a quantity is computed from out-of-bag points, which a model keeps: another method,
or another set of factors, needs no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from qualms.arrays import Float64Array, FloatArray, StrArray
from qualms.calibration.choice import fit_out_of_bag, out_of_bag_points
from qualms.calibration.conformal import Conformal
from qualms.calibration.groups import fit_grouped
from qualms.calibration.methods import Calibration
from qualms.calibration.points import CalibrationData
from qualms.gp.ensemble import calibration_factors

#: How often components are in a vector (x, y, z), and in a symmetric tensor (xx, yy, zz, yz, xz,
#: xy) or any other (xx, xy, xz, …), by how many there are.
MULTIPLICITY = {3: np.ones(3), 6: np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), 9: np.ones(9)}
#: Independent components of a vector or tensor: fewer than there are, since they are correlated.
INDEPENDENT_COMPONENTS = 2
#: Shares of a sphere that are tried in the covariance of the members of a vector.
ISOTROPIES = (0.0, 0.25, 0.5, 0.75, 1.0)


def vector_std(ensemble_std: FloatArray) -> Float64Array:
    """Return the standard deviation r (…) of vectors or tensors, of components (…, 3, 6 or 9)."""
    w = MULTIPLICITY[ensemble_std.shape[-1]]
    return np.asarray(np.sqrt(np.asarray(ensemble_std, dtype=np.float64) ** 2 @ (w / w.sum())))


def component_share(
    ensemble_std: Float64Array, pooled: Float64Array, isotropy: float, multiplicity: Float64Array
) -> Float64Array:
    """Return σ_k/σ of components (n,) of vectors, or tensors: √((1 − u) ŝ_k²/r² + u/m_k).

    Parameters
    ----------
    ensemble_std, pooled : (n,) arrays
        ŝ_k, the standard deviations of the components, and r, those of their vectors.
    isotropy : float
        u.
    multiplicity : (n,) array
        m_k, how often a component is in its tensor, relative to the mean.
    """
    squares = calibration_factors(ensemble_std, pooled) ** 2
    return np.asarray(np.sqrt((1 - isotropy) * squares + isotropy / multiplicity))


def shrink_towards_sphere(members: Float64Array, isotropy: float) -> Float64Array:
    """Return members (…, 3, 6 or 9, N) of vectors of which the covariance is that of the sphere.

    To the share u, `isotropy`; the rest is the covariance of the members.
    """
    root = MULTIPLICITY[members.shape[-2]][:, None] ** 0.5
    mean = members.mean(axis=-1, keepdims=True)
    X = (members - mean) * root
    variances, axes = np.linalg.eigh(X @ np.swapaxes(X, -1, -2))
    variances = np.maximum(variances, 0.0)
    mean_variance = variances.mean(axis=-1, keepdims=True) + np.finfo(np.float64).tiny
    sphere = variances / (variances + 0.01 * mean_variance)
    sphere /= sphere.mean(axis=-1, keepdims=True) + np.finfo(np.float64).tiny
    target = (1 - isotropy) * variances + isotropy * mean_variance * sphere
    factors = np.sqrt(calibration_factors(target, variances))
    L = axes * factors[..., None, :] @ np.swapaxes(axes, -1, -2)  # Σ^½ Ĉ^−½ r/σ
    return np.asarray(mean + L @ X / root)


@dataclass(frozen=True)
class QuantityCalibration:
    """How the standard deviation of a quantity is calibrated."""

    calibration: Calibration
    isotropy: float = 0.0  #: share of the isotropic part of σ of vectors: see above
    elements: Mapping[str, float] = field(default_factory=dict)  #: factors of σ by chemical symbol
    #: distribution of out-of-bag errors, relative to the calibrated standard deviation
    conformal: Conformal | None = None

    def factors(self, symbols: StrArray) -> Float64Array | None:
        """Return the factors (n,) of atoms of these elements; None if there are none."""
        if not self.elements:
            return None
        return np.array([self.elements.get(str(symbol), 1.0) for symbol in symbols])

    def std_of(self, points: CalibrationData) -> Float64Array:
        """Return the calibrated standard deviations of points (n,)."""
        sigma = self.calibration.std_of(points)
        if points.component_std is not None and points.multiplicity is not None:
            sigma = sigma * component_share(
                points.component_std, points.ensemble_std, self.isotropy, points.multiplicity
            )
        factors = None if points.element is None else self.factors(points.element)
        return sigma if factors is None else sigma * factors


def calibrate_points(
    points: CalibrationData, method: str, *, n_subsampled: int, n_posterior: int
) -> QuantityCalibration:
    """Fit a calibration to out-of-bag points, with the isotropy of vectors and factors of elements.

    Parameters
    ----------
    points : CalibrationData
    method : str
        Name of a method.
    n_subsampled, n_posterior : int
        Members of both kinds that predictions have.
    """
    n = n_subsampled if n_posterior else 0
    scaled, isotropy = points, 0.0
    if points.component_std is not None:
        shares = ISOTROPIES if method != "none" else (0.0,)
        fits = [(fit_out_of_bag(s := _over_share(points, u), method), u, s) for u in shares]
        _, isotropy, scaled = max(fits, key=lambda fit: fit[0].log_likelihood)
        if n_subsampled:
            # Anisotropy by chance is ∝ 1/(c − 1) of c members, and less of all than out of bag.
            odds = (float(np.mean(points.n_members)) - 1) / (n_subsampled - 1)
            isotropy = min(isotropy * odds / (isotropy * odds + 1 - isotropy), 1.0)
    calibration, scaled, elements = _by_element(fit_out_of_bag(scaled, method), scaled)
    calibration = replace(calibration, n_subsampled=n)
    return QuantityCalibration(calibration, isotropy, elements, calibration.conformal(scaled))


def _over_share(points: CalibrationData, isotropy: float) -> CalibrationData:
    """Return components divided by their share of σ, which is that of their vectors."""
    assert points.component_std is not None
    assert points.multiplicity is not None
    share = component_share(
        points.component_std, points.ensemble_std, isotropy, points.multiplicity
    )
    return replace(points.divided(share), n_components=INDEPENDENT_COMPONENTS)


def _by_element(
    calibration: Calibration, points: CalibrationData
) -> tuple[Calibration, CalibrationData, dict[str, float]]:
    """Fit a calibration again with a factor of σ for each element; return its points as well.

    They are divided by these factors, whose mean square is one. The factors are fitted to some
    10,000 points.
    """
    nothing: tuple[Calibration, CalibrationData, dict[str, float]] = calibration, points, {}
    if points.element is None or calibration.method == "none":
        return nothing
    symbols = points.element
    some = out_of_bag_points(points, calibration.method)
    some &= np.arange(len(some)) % (-(-len(some) // 10_000)) == 0
    if len(np.unique(symbols[some])) < 2:
        return nothing
    sample = points.some(some)
    grouped = fit_grouped(sample, calibration.method, symbols[some])
    factors = grouped.factors(symbols)
    factors /= np.sqrt(points.mean(factors**2))
    if np.ptp(factors) < 1e-3:
        return nothing
    elements = {str(s): float(factors[symbols == s][0]) for s in np.unique(symbols)}
    scaled = points.divided(factors)
    return fit_out_of_bag(scaled, calibration.method), scaled, elements
