"""Checks of labels: sign and units of forces and stresses, and outliers.

A model of the energies alone predicts forces and virials. Labels that agree with these but for
noise have, on average, the same sign and size. With labels l and predictions p, regression of l on
p and of p on l gives the factor between them as

    ⟨lp⟩/⟨p²⟩ = a   and   ⟨l²⟩/⟨lp⟩ = b = a/r²,        r: correlation.

Errors of p make a too small and shrinkage of p makes b too large, so that the factor is between the
two. No warning is issued where energies are not informative: r is small, or the model explains
little of the energies.

Single structures must not dominate. So labels and predictions that are larger than in the median
structure are scaled down to it, both by the same factor, and medians measure how much of the
energies is explained.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import ase.units
import numpy as np

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.labels import TrainingSet
from qualms.errors import QualmsWarning, counted
from qualms.gp.ensemble import fit_full_model

#: Structures from which energies are informative.
_ENOUGH = 10
#: Share of the variance of energies that their model must explain.
_EXPLAINED = 0.7
#: Correlations from which predictions are informative, and accurate.
_INFORMATIVE, _ACCURATE = 0.6, 0.9
#: Factors beyond which a warning is issued, if predictions are informative, or accurate.
_LIMIT, _LIMIT_IF_ACCURATE = 3.0, 1.6
#: How much larger than with eV and Å the numbers are in other units, and the tolerance.
_UNITS = {
    "forces": {
        "kcal/mol/Å": ase.units.mol / ase.units.kcal,
        "kJ/mol/Å": ase.units.mol / ase.units.kJ,
        "meV/Å": 1e3,
        "Hartree/Bohr": ase.units.Bohr / ase.units.Hartree,
        "eV/Bohr": ase.units.Bohr,
    },
    "stress": {"GPa": 1 / ase.units.GPa, "kbar": 10 / ase.units.GPa},
}
_NEAR = 1.35
_CONVENTIONS = {
    "forces": "Forces are −∂E/∂r in the units of the energy per Å.",
    "stress": "A stress is (1/V) ∂E/∂ε, positive under tension, in the units of the energy per Å³.",
}
#: Outliers have so many times the median error (or spread of labels), and so many times the median
#: error in units of the standard deviation.
_FAR, _FAR_IN_STD = 30.0, 10.0
#: Structures that a warning lists.
_LISTED = 5
_TINY = float(np.finfo(np.float64).tiny)


class Factor(NamedTuple):
    """How much larger labels are than predictions: between a and b, with correlation r."""

    a: float
    b: float
    r: float

    @property
    def is_one(self) -> bool:
        """Whether the factor may be one."""
        if abs(self.r) < _INFORMATIVE:
            return True
        limit = _LIMIT_IF_ACCURATE if abs(self.r) > _ACCURATE else _LIMIT
        return self.r > 0 and self.a < limit and self.b > 1 / limit


def factor_between(labels: Float64Array, predicted: Float64Array) -> Factor:
    """Return how much larger labels are than predictions, both (n,)."""
    ll, lp, pp = labels @ labels, labels @ predicted, predicted @ predicted
    if ll == 0 or pp == 0 or lp == 0:
        return Factor(1.0, 1.0, 0.0)
    return Factor(float(lp / pp), float(ll / lp), float(lp / np.sqrt(ll * pp)))


def check_derivatives(Phi: FloatArray, energies: Float64Array, data: TrainingSet) -> None:
    """Warn if forces or stresses are not derivatives of the energies by sign or size.

    Phi (N, r) are the whitened kernel rows of all quantities; energies (n,) are per atom and
    without baseline.
    """
    n = len(energies)
    if len(np.unique(data.groups)) < _ENOUGH or np.ptp(energies) == 0:
        return
    center = data.settings.linear_baseline != "none"
    loo = {"energy": "loo"}
    full = fit_full_model(Phi[:n], energies, loo, center=center, groups=data.groups)
    weights = full.weights[:, 0]
    errors = energies - full.center[0] - Phi[:n] @ weights
    if _median_square(errors) > (1 - _EXPLAINED) * _median_square(energies):
        return
    for name, quantity in data.quantities.items():
        if name == "energy":
            continue
        labels, predicted = quantity.y, np.asarray(Phi[quantity.rows] @ weights, dtype=np.float64)
        if name == "stress":
            if len(np.unique(quantity.structure)) < _ENOUGH:
                continue
            # Energies at one volume do not determine the pressure there.
            component = np.asarray(quantity.component)
            labels, predicted = _centered(labels, component), _centered(predicted, component)
        found = factor_between(*equalized(labels, predicted, quantity.structure))
        if not found.is_one:
            _warn_of_factor(name, data.settings.keys[name], found)


def _centered(values: Float64Array, component: IntArray) -> Float64Array:
    """Return values less the median of each component."""
    centered = values.copy()
    for c in np.unique(component):
        centered[component == c] -= np.median(values[component == c])
    return centered


def _median_square(values: Float64Array) -> float:
    """Return the median of squared deviations from the median."""
    return float(np.median((values - np.median(values)) ** 2))


def equalized(
    labels: Float64Array, predicted: Float64Array, structure: IntArray
) -> tuple[Float64Array, Float64Array]:
    """Scale labels and predictions (n,) so that no structure has larger ones than the median."""
    largest = np.ones(int(structure.max()) + 1)
    for values in (labels, predicted):
        norms = np.sqrt(np.bincount(structure, weights=values**2))
        if norms.any():
            largest = np.maximum(largest, norms / np.median(norms[norms > 0]))
    return labels / largest[structure], predicted / largest[structure]


def _warn_of_factor(name: str, key: str, found: Factor) -> None:
    size = float(np.sqrt(found.a * found.b))
    differences = ["the opposite sign"] if found.r < 0 else []
    guess = ""
    if not 1 / _LIMIT_IF_ACCURATE < size < _LIMIT_IF_ACCURATE:
        differences.append(f"{size:.3g} times the size")
        units = [u for u, f in _UNITS[name].items() if 1 / _NEAR < size / f < _NEAR]
        guess = f" (units of {' or '.join(units)}?)" if units else ""
    warnings.warn(
        f"{name}={key!r}: labels have {' and '.join(differences)} that a model of the energies "
        f"predicts{guess}, correlation {found.r:.2f}. {_CONVENTIONS[name]}",
        QualmsWarning,
        stacklevel=2,
    )


def find_outliers(
    y: Float64Array, residuals: Float64Array, std: Float64Array, structure: IntArray
) -> IntArray:
    """Return structures whose labels are far from their out-of-bag predictions, the worst first.

    Labels y (n,) are of one quantity, residuals and standard deviations (n,) out-of-bag. Scales are
    medians over structures, which a few wrong labels do not change: an error is far larger than
    those of others or, if wrong labels have spoilt the whole model, the label itself and its error
    are far outside the range of labels.
    """
    codes, where, rows = np.unique(structure, return_inverse=True, return_counts=True)
    if len(codes) < _ENOUGH:
        return codes[:0]
    z, s, deviation = (
        np.sqrt(np.bincount(where, weights=v**2) / rows) for v in (residuals, std, y - np.median(y))
    )
    least = max(1e-9 * float(np.median(np.abs(y))), _TINY)  # rounding
    usual, spread = (max(float(np.median(v)), least) for v in (z, deviation))
    t = z / np.maximum(s, _TINY)
    wrong = (z > _FAR * usual) & (t > _FAR_IN_STD * max(np.median(t), 1.0))
    wrong |= (z > _FAR * spread) & (deviation > _FAR * spread)
    worst = np.flatnonzero(wrong)
    return codes[worst[np.argsort(-z[worst], kind="stable")]]


def warn_of_outliers(name: str, found: IntArray, source: IntArray) -> None:
    """List structures (n,) with possible label errors by their numbers among those given."""
    if not len(found):
        return
    listed = ", ".join(f"frames[{source[s]}]" for s in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    warnings.warn(
        f"{name}: possible label errors in {counted(len(found), 'structure')} ({listed}{more}): "
        "labels are far from out-of-bag predictions. Check values and units.",
        QualmsWarning,
        stacklevel=2,
    )
