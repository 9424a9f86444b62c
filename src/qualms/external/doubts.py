"""Reasons to distrust a calibration, in words. Nothing is ever changed because of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qualms.core.calibration import Calibration, CalibrationData
from qualms.core.calibration.scaling import fit_power
from qualms.core.outliers import far_points
from qualms.core.scores import spearman
from qualms.core.typing import Float64Array
from qualms.external.ensemble import Points

#: Fewer independent points than these are few.
FEW = 20
#: The spread of fewer members is too noisy to be taken for exact.
_FEW_MEMBERS = 10
#: Fewer have no interval of a rank correlation.
_RANKED = 5
#: A rank correlation below this orders next to nothing.
_NO_ORDER = 0.2
#: So many of the points that are far off are named.
_NAMED = 5
#: Residuals and spreads that differ by more than this factor are hardly in the same units.
_SUSPICIOUS = 30.0
#: Variances explain errors to within this factor, where standard deviations do not; by more than
#: this power of e better than these; and with an exponent below this.
_PLAUSIBLE, _CLEARLY, _ROOT = 8.0, 0.5, 0.65
#: Predictions that are correlated with the truth like this follow it.
_FOLLOWS = 0.9
#: What units are confused with what.
_CONVERSIONS = {
    27.2114: "Hartree and eV",
    23.0605: "kcal/mol and eV",
    627.509: "Hartree and kcal/mol",
    96.4853: "kJ/mol and eV",
    51.4221: "Hartree/Bohr and eV/Å",
    1000.0: "eV and meV",
}


def doubts_about(
    points: Points,
    calibration: Calibration,
    known: str,
    std: Float64Array,
    *,
    n_independent: int,
) -> Iterator[str]:
    """Yield what the user must know.

    Parameters
    ----------
    points : Points
        What the calibration was fitted to.
    calibration : Calibration
    known : str
        What is known of its parameters, in words.
    std : (n,) array
        Error bars of the points, by calibrations that did not see them.
    n_independent : int
        Structures, or what else is independent.
    """
    data = points.data
    yield from _few(known, n_independent)
    yield from _few_members(calibration, data, points.ensemble.members is not None)
    yield from _far(points, std)
    yield from _uninformative(data, n_independent)
    if points.ensemble.members is None:
        yield from _variance(data, points.ensemble.target)
    yield from _units(data)
    yield from _other_units(points)
    yield from _biased(data)


def _few(known: str, n_independent: int) -> Iterator[str]:
    if n_independent < FEW:
        within = f": {known}" if known else ""
        yield f"Only {n_independent} independent points{within}. Calibrate on more."


def _few_members(
    calibration: Calibration, data: CalibrationData, has_members: bool
) -> Iterator[str]:
    """Methods that take the spread for exact turn its noise into error: see `core.calibration`."""
    c = int(np.median(data.n_members))
    if not has_members or calibration.method not in ("linear", "power") or c >= _FEW_MEMBERS:
        return
    better = "student" if calibration.method == "linear" else "shrinkage"
    if calibration.method == "power":
        how = "noise makes γ smaller than it is, and α is not that of the truth"
    elif c > 3:
        excess = np.sqrt((c - 1) / (c - 3))
        how = f"even of perfect data α comes out {excess:.3g} times too large or more"
    else:
        how = "α grows with the number of points, without a limit"
    yield (
        f"{calibration.method} takes the spread of {c} members for exact, and it is not: {how}. "
        f"{better} knows how noisy it is."
    )


def _far(points: Points, std: Float64Array) -> Iterator[str]:
    """One wrong label is the commonest mistake, and spoils every mean square."""
    far = far_points(points.data.residuals, std).tolist()
    if not far:
        return
    ensemble, places = points.ensemble, []
    for i in far[:_NAMED]:
        atom = f", atom {ensemble.atom[i]}" if ensemble.per_atom else ""
        if ensemble.component is not None:
            atom += f", component {ensemble.component[i]}"
        off = abs(points.data.residuals[i]) / std[i]
        places.append(f"structure {ensemble.structure[i]}{atom} ({off:.3g} error bars)")
    more = ", …" if len(far) > _NAMED else ""
    yield (
        f"{len(far)} of {ensemble.counted()} {'is' if len(far) == 1 else 'are'} far off, as if the "
        f"reference were wrong: {', '.join(places)}{more}. (Counted from 0.)"
    )


def _uninformative(data: CalibrationData, n_independent: int) -> Iterator[str]:
    """Say that the spread orders nothing if that is known, and that it may not if that is not.

    The inverse hyperbolic tangent of a rank correlation scatters by about 1.03/√(n − 3) (Fieller,
    Hartley and Pearson, Biometrika 44, 470 (1957)).
    """
    if n_independent < _RANKED:
        return
    rank = spearman(data.residuals, data.spread)
    half = 1.96 * 1.03 / np.sqrt(n_independent - 3)
    low, high = np.tanh(np.arctanh(np.clip(rank, -0.999, 0.999)) + np.array([-half, half]))
    found = f"rank correlation {rank:.2f}, between {low:.2f} and {high:.2f}".replace("-", "−")
    if high < _NO_ORDER:
        yield (
            f"The spread says {'little' if low > 0 else 'nothing'} about the size of the error "
            f"({found}): error bars are right on average only."
        )
    elif low <= 0:
        yield (
            "Whether the spread says anything about the size of the error cannot be told from so "
            f"few points ({found})."
        )


def _variance(data: CalibrationData, target: str) -> Iterator[str]:
    """If the roots of σ have the size of the errors, and σ does not, σ is a variance.

    Errors then grow as the root of σ, or more slowly: noise in σ makes any exponent smaller, also
    that of an honest σ, which is why an exponent of about one half proves nothing.
    """
    if np.ptp(np.log(data.spread)) < 0.1:
        return
    gamma = fit_power(data).gamma
    as_std, as_variance = _log_ratio(data, data.spread), _log_ratio(data, np.sqrt(data.spread))
    plausible = abs(as_variance) < np.log(_PLAUSIBLE) < abs(as_std)
    if gamma < _ROOT and plausible and abs(as_variance) + _CLEARLY < abs(as_std):
        yield (
            "The error bars look like variances: their roots have the size of the errors, which "
            f"are {_times(as_std)} they are, and grow as a power of {gamma:.2f} of them. "
            f"They are used as they are; store the roots, or name the key {target}_var."
        )


def _log_ratio(data: CalibrationData, spread: Float64Array) -> float:
    """Return how many times larger than a spread errors are, ln; half of |z| is below 0.67 σ."""
    typical = max(float(np.median(np.abs(data.residuals))), np.finfo(float).tiny) / 0.6745
    return float(np.log(typical / np.median(spread)))


def _times(log_ratio: float) -> str:
    return f"{np.exp(abs(log_ratio)):.3g} times {'larger' if log_ratio > 0 else 'smaller'} than"


def _units(data: CalibrationData) -> Iterator[str]:
    log_ratio = _log_ratio(data, data.spread)
    if not np.any(data.residuals) or abs(log_ratio) < np.log(_SUSPICIOUS):
        return
    factor = float(np.exp(abs(log_ratio)))
    closest = min(_CONVERSIONS, key=lambda c: abs(np.log(factor / c)))
    hint = f" ({_CONVERSIONS[closest]}: {closest:g})" if 0.25 < factor / closest < 4 else ""
    yield f"Errors are {_times(log_ratio)} the spread: are the units the same{hint}?"


def _other_units(points: Points) -> Iterator[str]:
    """If all members are in other units than the truth, errors and spread may still agree."""
    y, mean = points.ensemble.y, points.mean
    if len(y) < FEW or not np.ptp(y) or not np.ptp(mean):
        return
    slope = float(np.cov(y, mean)[0, 1] / np.var(mean, ddof=1))
    if np.corrcoef(y, mean)[0, 1] < _FOLLOWS or not slope > 0:
        return
    factor = max(slope, 1 / slope)
    closest = min(_CONVERSIONS, key=lambda c: abs(np.log(factor / c)))
    if 0.8 < factor / closest < 1.25:
        yield (
            f"True values grow {slope:.3g} times as fast as predictions: are the units the same "
            f"({_CONVERSIONS[closest]}: {closest:g})?"
        )


def _biased(data: CalibrationData) -> Iterator[str]:
    bias = data.mean(data.residuals)
    rms = float(np.sqrt(data.mean(data.residuals**2)))
    if abs(bias) > 0.5 * rms and len(data.residuals) >= FEW:
        yield (
            f"Errors are {bias:+.3g} on average, {abs(bias) / rms:.0%} of their root mean square: "
            "no error bar can make up for that. (Another zero of energy?)"
        )
