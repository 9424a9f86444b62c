"""Whether forces and stresses to learn from have the sign and the units of the energies.

A model of the energies alone has forces and virials. Labels that are these but for noise have, on
average, the same sign and size; labels in other units are larger or smaller throughout. With labels
l and predictions p, regression of l on p and of p on l gives the factor between them as

    ⟨lp⟩/⟨p²⟩ = a   and   ⟨l²⟩/⟨lp⟩ = b = a/r²,        r: correlation.

Errors of p make a too small and shrinkage of p makes b too large, so that the factor is between the
two. If one is not, something is wrong with the labels. Where energies do not tell (r is small, or
the model hardly explains the energies themselves, and shrinks everything) nothing is said.

No structure may speak for all others, as one would whose forces are a hundred times theirs. So what
is larger than in the median structure, labels or predictions, is scaled down to that, labels and
predictions alike: their factor stays. And whether energies are explained is told by medians.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import ase.units
import numpy as np

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.settings import Settings
from qualms.atomistic.training_set import TrainingSet
from qualms.errors import QualmsWarning, counted
from qualms.gp.ensemble import MIN_ABSENT, fit_full_model

#: Structures from which on energies are asked.
_ENOUGH = 10
#: Share of the variance of energies that their model must explain.
_EXPLAINED = 0.7
#: Correlation from which on, in size, they are believed, and believed to be accurate.
_TELLING, _ACCURATE = 0.6, 0.9
#: Factors beyond which the units are doubted, if energies tell, or tell accurately.
_DOUBTFUL, _DOUBTFUL_IF_ACCURATE = 3.0, 1.6
#: How much larger than with eV and Å the numbers are in other units.
_UNITS_OF_FORCES = {
    "kcal/mol/Å": ase.units.mol / ase.units.kcal,
    "kJ/mol/Å": ase.units.mol / ase.units.kJ,
    "meV/Å": 1e3,
    "Hartree/Bohr": ase.units.Bohr / ase.units.Hartree,
    "eV/Bohr": ase.units.Bohr,
    "Hartree/Å": 1 / ase.units.Hartree,
    "Ry/Bohr": ase.units.Bohr / ase.units.Rydberg,
}
_UNITS_OF_STRESSES = {
    "GPa": 1 / ase.units.GPa,
    "kbar": 10 / ase.units.GPa,
    "bar": 1e4 / ase.units.GPa,
}
#: Components of a stress beside its diagonal, and by how much more another order of them must
#: correlate with predictions than ASE's before that is doubted.
_SHEAR, _CLEARLY = ("yz", "xz", "xy"), 0.3
#: How far from such a factor another one may be and still be taken for it.
_NEAR = 1.35


class Factor(NamedTuple):
    """How much larger labels are than predictions: from a to b, with the correlation r."""

    a: float
    b: float
    r: float

    @property
    def value(self) -> float:
        """The factor itself, between the two."""
        return float(np.sign(self.r) * np.sqrt(self.a * self.b))

    @property
    def is_one(self) -> bool:
        """Whether it may be one."""
        if abs(self.r) < _TELLING:
            return True
        limit = _DOUBTFUL_IF_ACCURATE if abs(self.r) > _ACCURATE else _DOUBTFUL
        return self.r > 0 and self.a < limit and self.b > 1 / limit


def factor_between(labels: Float64Array, predicted: Float64Array) -> Factor:
    """Return how much larger labels are than what is predicted, both (n,)."""
    ll, lp, pp = labels @ labels, labels @ predicted, predicted @ predicted
    if ll == 0 or pp == 0 or lp == 0:
        return Factor(1.0, 1.0, 0.0)
    return Factor(float(lp / pp), float(ll / lp), float(lp / np.sqrt(ll * pp)))


def check_conventions(
    Phi: FloatArray,
    energies: Float64Array,
    labels: ForceLabels,
    groups: IntArray,
    settings: Settings,
) -> None:
    """Warn if forces or stresses are not derivatives of the energies by sign or size.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features, those of the energies first.
    energies : (n,) array
        Per atom, without baseline.
    labels : ForceLabels
    groups : (n,) array of int
    settings : Settings
    """
    n = len(energies)
    if len(np.unique(groups)) < _ENOUGH or np.ptp(energies) == 0:
        return
    center = settings.baseline != "none"
    full = fit_full_model(Phi[:n], energies, "loo", center=center, groups=groups)
    weights = full.weights[:, 0]
    errors = energies - full.center[0] - Phi[:n] @ weights
    if _usual_square(errors) > (1 - _EXPLAINED) * _usual_square(energies):
        return
    predicted = np.asarray(Phi[n:] @ weights, dtype=np.float64)
    of_forces = ~labels.is_virial
    if settings.forces is not None and of_forces.any():
        rows = (labels.y[of_forces], predicted[of_forces], labels.structure[of_forces])
        found = factor_between(*evened(*rows))
        if not found.is_one:
            _warn("forces", settings.forces, found, _UNITS_OF_FORCES)
    if settings.stress is not None and labels.n_with_virial >= _ENOUGH:
        given, said = _fluctuations(labels, predicted)
        known = np.isfinite(given)
        found = factor_between(given[known], said[known])
        if not found.is_one:
            _warn("stress", settings.stress, found, _UNITS_OF_STRESSES)
        order = order_of_shear(given, said)
        if order != _SHEAR:
            _warn_of_order(settings.stress, order)


def _usual_square(values: Float64Array) -> float:
    """Return the median of squares about the median."""
    return float(np.median((values - np.median(values)) ** 2))


def evened(
    labels: Float64Array, predicted: Float64Array, structure: IntArray
) -> tuple[Float64Array, Float64Array]:
    """Return labels and predictions (n,), those of no structure larger than of the median one.

    Structures whose labels are all zero have no part in the median.
    """
    largest = np.ones(int(structure.max()) + 1)
    for values in (labels, predicted):
        norms = np.sqrt(np.bincount(structure, weights=values**2))
        if norms.any():
            largest = np.maximum(largest, norms / np.median(norms[norms > 0]))
    return labels / largest[structure], predicted / largest[structure]


def order_of_shear(labels: Float64Array, predicted: Float64Array) -> tuple[str, ...]:
    """Return which components the last three of stresses (n, 6) seem to be, by what is predicted.

    Programs that write xx, yy, zz, xy, yz, zx have the same sizes and signs as ASE.
    """
    known = np.isfinite(labels[:, 3:]).all(axis=1)
    given, said = labels[known, 3:].ravel(), predicted[known, 3:]

    def correlation(order: tuple[int, ...]) -> float:
        return factor_between(given, said[:, order].ravel()).r

    usual = (0, 1, 2)
    best = max(permutations(usual), key=correlation)
    clear = correlation(best) > max(_TELLING, correlation(usual) + _CLEARLY)
    return tuple(_SHEAR[i] for i in (best if clear else usual))


def _fluctuations(
    labels: ForceLabels, predicted: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return virials (n, 6), and predictions of them, less the median of each component.

    Energies at one volume say nothing about the pressure there.
    """
    known = np.isfinite(labels.virials)
    virials, found = labels.virials.copy(), np.full(labels.virials.shape, np.nan)
    found[known] = predicted[labels.is_virial]
    for values in (virials, found):
        for i in np.flatnonzero(known.any(axis=0)):
            values[:, i] -= np.nanmedian(values[:, i])
    virials[known], found[known] = evened(virials[known], found[known], np.nonzero(known)[0])
    return virials, found


def _warn_of_order(key: str, order: tuple[str, ...]) -> None:
    warnings.warn(
        f"stress={key!r}: by what the energies say, the components are in the order xx, yy, zz, "
        f"{', '.join(order)}. ASE's, which is expected, is xx, yy, zz, yz, xz, xy.",
        QualmsWarning,
        stacklevel=7,
    )


def _warn(name: str, key: str, found: Factor, units: dict[str, float]) -> None:
    size = abs(found.value)
    sign = "the opposite sign of what the energies say" if found.r < 0 else ""
    limit = _DOUBTFUL_IF_ACCURATE
    ratio = "" if 1 / limit < size < limit else f"{size:.3g} times the size that the energies say"
    near = [u for u, f in units.items() if 1 / _NEAR < size / f < _NEAR] if ratio else []
    guess = f", as those in {' or '.join(near)} would beside energies in eV" if near else ""
    convention = {
        "forces": "Forces are −∂E/∂r in the units of the energy per Å.",
        "stress": "A stress is (1/V) ∂E/∂ε, positive under tension, in the units of the energy per "
        "Å³; a virial is −V times that.",
    }[name]
    warnings.warn(
        f"{name}={key!r}: labels have {' and '.join(filter(None, [sign, ratio]))} (correlation "
        f"{found.r:.2f}){guess}. {convention}",
        QualmsWarning,
        stacklevel=7,
    )


# Structures whose labels are far from what all others say about them.
#: So many times the usual error is far, and so many times what is usual in units of the spread.
#: Forces of the wrong sign are a hundred times the usual error off, and more. Three members that
#: differ by a tenth of what they should, by chance, are no reason to name a structure.
_FAR, _FAR_IN_SPREADS = 30.0, 10.0
#: Structures that a warning names.
_NAMED = 5


@dataclass(frozen=True)
class Doubtful:
    """Structures whose labels are far off, worst first.

    Attributes
    ----------
    structures : (m,) array of int
    errors : (m,) array
        Of members that did not see them: root mean square over the rows of a structure.
    usual : float
        The median of that over all structures.
    """

    structures: IntArray
    errors: Float64Array
    usual: float


def doubtful_structures(
    y: Float64Array, members: Float64Array, absent: BoolArray, structure: IntArray
) -> Doubtful:
    """Return the structures whose labels members that did not see them find far off.

    Parameters
    ----------
    y : (n,) array
        Labels of one kind.
    members : (n, N_R) array
        What members say about them.
    absent : (n, N_R) array of bool
        Which members did not see a row.
    structure : (n,) array of int
        Structure of each row.

    Returns
    -------
    Doubtful
    """
    codes, z, s = _errors_and_spreads(y, members, absent, structure)
    if len(codes) < _ENOUGH:
        return Doubtful(np.empty(0, dtype=np.intp), np.empty(0), 0.0)
    usual, t = float(np.median(z)), z / np.maximum(s, np.finfo(np.float64).tiny)
    # Rounding has no usual error.
    least = 1e-9 * float(np.median(np.abs(y)))
    far = z > _FAR * max(usual, least)
    far &= t > _FAR_IN_SPREADS * max(float(np.median(t)), 1.0)
    found = np.flatnonzero(far)
    found = found[np.argsort(-z[found], kind="stable")]
    return Doubtful(codes[found], z[found], usual)


def _errors_and_spreads(
    y: Float64Array, members: Float64Array, absent: BoolArray, structure: IntArray
) -> tuple[IntArray, Float64Array, Float64Array]:
    """Return the structures that enough members did not see, RMS errors and RMS spreads."""
    judged = absent.sum(axis=1) >= MIN_ABSENT
    y, members, absent, structure = y[judged], members[judged], absent[judged], structure[judged]
    c = absent.sum(axis=1)
    mean = np.sum(members * absent, axis=1) / np.maximum(c, 1)
    squares = np.sum((members - mean[:, None]) ** 2 * absent, axis=1) / np.maximum(c - 1, 1)
    codes, where, rows = np.unique(structure, return_inverse=True, return_counts=True)
    z = np.sqrt(np.bincount(where, weights=(y - mean) ** 2, minlength=len(codes)) / rows)
    s = np.sqrt(np.bincount(where, weights=squares, minlength=len(codes)) / rows)
    return codes, z, s


def warn_of_doubtful(
    data: TrainingSet,
    settings: Settings,
    energies: Float64Array,
    derived: Float64Array,
    counts: IntArray,
) -> None:
    """Name structures whose energy, forces or stress are far from what the others say.

    Parameters
    ----------
    data : TrainingSet
        With forces or virials.
    settings : Settings
    energies : (n, N_R) array
        What members say about energies per atom.
    derived : (n_rows, N_R) array
        And about forces and virials.
    counts : (n, N_R) array of int
        How often each structure is in each member.
    """
    for name, key, y, members, structure in _kinds(data, settings, energies, derived):
        absent = counts[structure] == 0
        found = doubtful_structures(y, members, absent, structure)
        if len(found.structures):
            _warn_doubtful_structures(name, key, found, data.source)


def _kinds(
    data: TrainingSet, settings: Settings, energies: Float64Array, derived: Float64Array
) -> Iterator[tuple[str, str, Float64Array, Float64Array, IntArray]]:
    """Yield name, key, labels, predictions and structures of each kind of rows."""
    yield "target", settings.target, data.y, energies, np.arange(len(data.y))
    labels = data.mechanics
    assert labels is not None
    for name, key, rows in (
        ("forces", settings.forces, np.flatnonzero(~labels.is_virial)),
        ("stress", settings.stress, np.flatnonzero(labels.is_virial)),
    ):
        if key is not None and len(rows):
            yield name, key, labels.y[rows], derived[rows], labels.structure[rows]


def _warn_doubtful_structures(name: str, key: str, found: Doubtful, source: IntArray) -> None:
    named = [f"frames[{source[s]}]" for s in found.structures[:_NAMED]]
    more = len(found.structures) - len(named)
    several = ", ".join(named) + (f" and {more} more" if more else "")
    times = found.errors[0] / found.usual if found.usual > 0 else np.inf
    warnings.warn(
        f"{name}={key!r}: labels of {counted(len(found.structures), 'structure')} ({several}) are "
        f"far from what members say that did not see them, up to {times:.2g} times as far as is "
        "usual. Are they right? Models believe them, and one wrong label spoils what is near to "
        "it. If they are, no other structure resembles these.",
        QualmsWarning,
        stacklevel=6,
    )
