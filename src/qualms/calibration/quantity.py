"""The calibration of a quantity: σ as a function of the sources, and factors beside it.

Everything here is computed from out-of-bag points, which a model keeps: another method, or another
set of factors, needs no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from qualms.arrays import Float64Array
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.conformal import Conformal
from qualms.calibration.fitting import (
    MODEL_METHODS,
    best_method,
    fit_out_of_bag,
    out_of_bag_points,
)
from qualms.calibration.groups import fit_grouped
from qualms.calibration.vectors import INDEPENDENT_COMPONENTS, ISOTROPIES, component_share
from qualms.errors import CalibrationError

#: Points that are enough for factors of elements, and a difference of these that is none.
_ENOUGH_POINTS, _EQUAL = 10_000, 1e-3


@dataclass(frozen=True)
class QuantityCalibration:
    """How the standard deviation of a quantity is calibrated."""

    calibration: Calibration
    isotropy: float = 0.0  #: share of the isotropic part of σ of vectors: see `vectors`
    elements: Mapping[str, float] = field(default_factory=dict)  #: factors of σ by chemical symbol
    #: distribution of out-of-bag errors, relative to the calibrated standard deviation
    conformal: Conformal | None = None

    def factors(self, symbols: np.ndarray[tuple[int], np.dtype[np.str_]]) -> Float64Array | None:
        """Return the factors (n,) of atoms of these elements; None if there are none."""
        if not self.elements:
            return None
        return np.array([self.elements.get(str(symbol), 1.0) for symbol in symbols])


def calibrate_points(
    points: CalibrationData, method: str, *, n_subsampled: int, n_posterior: int
) -> QuantityCalibration:
    """Fit a calibration to out-of-bag points, with the isotropy of vectors and factors of elements.

    Parameters
    ----------
    points : CalibrationData
    method : str
        Name of a method; "auto": the one of highest likelihood.
    n_subsampled, n_posterior : int
        Members of both kinds that predictions have.
    """
    if method == "auto":
        method = choose_method(points)
    n = n_subsampled if n_posterior else 0
    scaled, isotropy = points, 0.0
    if points.component_std is not None:
        shares = ISOTROPIES if method != "none" else (0.0,)
        fits = [(fit_out_of_bag(s := of_vectors(points, u), method), u, s) for u in shares]
        _, isotropy, scaled = max(fits, key=lambda fit: fit[0].log_likelihood)
        if n_subsampled:
            # Anisotropy by chance is ∝ 1/(c − 1) of c members, and less of all than out of bag.
            odds = (float(np.mean(points.n_members)) - 1) / (n_subsampled - 1)
            isotropy = min(isotropy * odds / (isotropy * odds + 1 - isotropy), 1.0)
    calibration, scaled, elements = _by_element(fit_out_of_bag(scaled, method), scaled)
    calibration = replace(calibration, n_subsampled=n)
    return QuantityCalibration(calibration, isotropy, elements, calibration.conformal(scaled))


def choose_method(points: CalibrationData) -> str:
    """Return the method of highest likelihood, by Akaike's criterion."""
    fitted = {}
    for method in MODEL_METHODS:
        with suppress(CalibrationError):
            fitted[method] = fit_out_of_bag(points, method)
    return best_method(points, fitted)


def of_vectors(points: CalibrationData, isotropy: float) -> CalibrationData:
    """Return components divided by their share of σ, which is that of their vectors."""
    assert points.component_std is not None
    assert points.multiplicity is not None
    share = component_share(
        points.component_std, points.ensemble_std, isotropy, points.multiplicity
    )
    return replace(
        points,
        residuals=points.residuals / share,
        n_components=INDEPENDENT_COMPONENTS,
        divided_by=share,
    )


def _by_element(
    calibration: Calibration, points: CalibrationData
) -> tuple[Calibration, CalibrationData, dict[str, float]]:
    """Fit a calibration again with a factor of σ for each element; return its points as well.

    They are divided by these factors, whose mean square is one.
    """
    nothing: tuple[Calibration, CalibrationData, dict[str, float]] = calibration, points, {}
    if points.element is None or calibration.method == "none":
        return nothing
    symbols = points.element
    some = out_of_bag_points(points, calibration.method)
    some &= np.arange(len(some)) % (-(-len(some) // _ENOUGH_POINTS)) == 0
    if len(np.unique(symbols[some])) < 2:
        return nothing
    sample = points.some(some)
    grouped = fit_grouped(sample, calibration.method, symbols[some], clusters=sample.groups)
    factors = grouped.factors(symbols)
    factors /= np.sqrt(points.mean(factors**2))
    if np.ptp(factors) < _EQUAL:
        return nothing
    scaled = replace(
        points, residuals=points.residuals / factors, divided_by=points.scale * factors
    )
    elements = {str(s): float(factors[symbols == s][0]) for s in np.unique(symbols)}
    return fit_out_of_bag(scaled, calibration.method), scaled, elements
