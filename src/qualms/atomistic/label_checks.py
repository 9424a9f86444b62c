"""Checks of labels: sign and units of forces and stresses, and outliers.

A model of the forces alone predicts differences of energies between structures of one composition
and cell, and a model of the energies alone predicts forces and virials. Labels that agree with
these but for noise have, on average, the same sign and size. With labels l and predictions p,
regression of l on p and of p on l gives the factor between them as

    ⟨lp⟩/⟨p²⟩ = a   and   ⟨l²⟩/⟨lp⟩ = b = a/r²,        r: correlation.

Errors of p make a too small and shrinkage of p makes b too large, so that the factor is between the
two. No warning is issued where predictions are not informative: r is small, or the model explains
little of what it was fitted to. Forces are far more numerous than energies, so that ten structures
suffice; energies tell more if all structures have different compositions or cells.

Whatever the reason, a model has learned nothing if the noise that it was fitted with is larger than
the labels.

Single structures must not dominate. So labels and predictions that are larger than in the median
structure are scaled down to it, both by the same factor, and medians measure how much is explained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.census import TrainingSet
from qualms.atomistic.quantities import KINDS, TARGET
from qualms.atomistic.settings import Settings
from qualms.errors import counted, warn
from qualms.gp.ensemble import fit_rows
from qualms.gp.noise import SMALLEST_LABEL, group_means

#: Structures from which energies are informative.
_ENOUGH = 10
#: Share of the variance of energies, or forces, that their model must explain.
_EXPLAINED = 0.7
#: Forces that are enough for a model of them alone, and its noise variance relative to theirs. With
#: less noise, rounding of the kernel rows of energies may count.
_N_FORCES, _SMOOTH = 5000, 1e-3
#: Correlations from which predictions are informative, and accurate. Those of n random numbers are
#: 1/√n.
_INFORMATIVE, _IN_SIGMA, _ACCURATE = 0.4, 2.0, 0.9
#: Energies that may be so many times the median.
_OUTSIDE = 4.0
#: Factors beyond which a warning is issued, if predictions are informative, or accurate.
_LIMIT, _LIMIT_IF_ACCURATE = 3.0, 1.6
#: Tolerance of the ratio of labels in other units.
_NEAR = 1.35
#: Noise, relative to the labels, that leaves nothing to learn: 0.03 to 0.4 for correct labels of
#: ten structures or more, and 1.3 to 3.2 for forces of the wrong sign or in other units.
_NOISE = 1.2
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
    n: int  #: independent values

    @property
    def is_informative(self) -> bool:
        """Whether predictions tell anything about labels."""
        return bool(abs(self.r) > max(_INFORMATIVE, _IN_SIGMA / np.sqrt(max(self.n, 1))))

    @property
    def is_one(self) -> bool:
        """Whether the factor may be one."""
        if not self.is_informative:
            return True
        limit = _LIMIT_IF_ACCURATE if abs(self.r) > _ACCURATE else _LIMIT
        return self.r > 0 and self.a < limit and self.b > 1 / limit


def factor_between(labels: Float64Array, predicted: Float64Array, n: int | None = None) -> Factor:
    """Return how much larger labels are than predictions.

    Parameters
    ----------
    labels, predicted : (m,) arrays
    n : int, optional
        Number of independent values among them; all, unless given.
    """
    n = len(labels) if n is None else n
    ll, lp, pp = labels @ labels, labels @ predicted, predicted @ predicted
    if ll == 0 or pp == 0 or lp == 0:
        return Factor(1.0, 1.0, 0.0, n)
    return Factor(float(lp / pp), float(ll / lp), float(lp / np.sqrt(ll * pp)), n)


def check_derivatives(
    Phi: FloatArray, energies: Float64Array, data: TrainingSet, settings: Settings
) -> set[str]:
    """Warn if forces or stresses are not derivatives of the energies by sign or size.

    Returns the quantities of which a warning was issued.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened kernel rows of all quantities.
    energies : (n,) array
        Per atom and without baseline.
    data : TrainingSet
    settings : Settings
    """
    if len(np.unique(data.groups)) < _ENOUGH or np.ptp(energies) == 0:
        return set()
    factors = _factors_by_forces(Phi, energies, data)
    if {*data.quantities} > {TARGET, *factors}:
        center = settings.linear_baseline != "none"
        factors = _factors_by_energies(Phi, energies, data, center=center) | factors
    wrong = {name for name, factor in factors.items() if not factor.is_one}
    for name in wrong:
        _warn_of_factor(name, settings.keys[name], factors[name])
    return wrong


def _factors_by_forces(
    Phi: FloatArray, energies: Float64Array, data: TrainingSet
) -> dict[str, Factor]:
    """Return how much larger forces are than those of the energies, if that is clear.

    A model of forces alone predicts energies. These are compared between structures of the same
    composition and cell, since forces tell nothing about other changes.
    """
    if "forces" not in data.quantities:
        return {}
    forces = data.quantities["forces"]
    step = -(-len(forces.y) // _N_FORCES)
    some = np.flatnonzero(forces.structure % step == 0)
    rows, groups = forces.rows[some], data.groups[forces.structure[some]]
    if len(np.unique(groups)) < 2 or not forces.y[some].any():
        return {}
    noise = _SMOOTH * float(np.mean(forces.y[some] ** 2))
    full, _ = fit_rows(Phi[rows], forces.y[some], noise, center=False, groups=groups)
    weights = full.weights[:, 0]
    errors = forces.y[some] - Phi[rows] @ weights
    unexplained, squares = (
        np.median(group_means(v**2, forces.structure[some])) for v in (errors, forces.y[some])
    )
    if unexplained > (1 - _EXPLAINED) * squares:
        return {}
    kinds = _same_atoms(data.frames)
    n = len(energies) - int(kinds.max()) - 1
    predicted = _centered(np.asarray(Phi[: len(energies)] @ weights, dtype=np.float64), kinds)
    structure = np.arange(len(energies))
    pair = equalized(predicted, _centered(energies, kinds), structure, _OUTSIDE)
    factor = factor_between(*pair, n)
    return {"forces": factor} if n >= _ENOUGH - 1 and factor.is_informative else {}


def _factors_by_energies(
    Phi: FloatArray, energies: Float64Array, data: TrainingSet, *, center: bool
) -> dict[str, Factor]:
    """Return how much larger forces and stresses are than a model of energies alone predicts."""
    n = len(energies)
    full, mean = fit_rows(Phi[:n], energies, "loo", center=center, groups=data.groups)
    weights = full.weights[:, 0]
    errors = energies - mean - Phi[:n] @ weights
    if _median_square(errors) > (1 - _EXPLAINED) * _median_square(energies):
        return {}
    factors = {}
    for name, quantity in data.quantities.items():
        if name == TARGET:
            continue
        labels, predicted = quantity.y, np.asarray(Phi[quantity.rows] @ weights, dtype=np.float64)
        if not KINDS[name].of_atoms:
            if len(np.unique(quantity.structure)) < _ENOUGH:
                continue
            # Energies of one volume, say, do not determine the pressure there.
            component = np.asarray(quantity.component)
            labels, predicted = _centered(labels, component), _centered(predicted, component)
        factors[name] = factor_between(*equalized(labels, predicted, quantity.structure))
    return factors


def check_noise(noise: Mapping[str, float], data: TrainingSet, settings: Settings) -> None:
    """Warn if fitted noise variances of forces, or stresses, are larger than the labels.

    That of energies may be, if forces tell all that there is to learn.

    Parameters
    ----------
    noise : mapping of str to float
        Noise variance of each quantity to check.
    data : TrainingSet
    settings : Settings
    """
    for name, variance in noise.items():
        square = float(np.mean(data.quantities[name].y ** 2))
        if 0 < _NOISE**2 * square < variance:
            units = settings.noise_units_of(name)
            warn(
                f"{name}={settings.keys[name]!r}: the fitted noise, {np.sqrt(variance):.3g} "
                f"{units}, is larger than the labels, {np.sqrt(square):.3g}: the model describes "
                "none of them. Check signs and units of all labels, or use more representatives or "
                f"structures. {KINDS[name].convention}"
            )


def _same_atoms(frames: Sequence[Atoms]) -> IntArray:
    """Return a number for each structure, the same for those with the same atoms and cell."""
    codes: dict[bytes, int] = {}
    kinds = []
    for atoms in frames:
        cell = np.round(np.asarray(atoms.cell) * np.asarray(atoms.pbc)[:, None], 3) + 0.0
        content = np.sort(atoms.numbers).tobytes() + b"|" + cell.tobytes()
        kinds.append(codes.setdefault(content, len(codes)))
    return np.array(kinds, dtype=np.intp)


def _centered(values: Float64Array, kinds: IntArray) -> Float64Array:
    """Return values less the median of each kind."""
    centered = values.copy()
    for kind in np.unique(kinds):
        centered[kinds == kind] -= np.median(values[kinds == kind])
    return centered


def _median_square(values: Float64Array) -> float:
    """Return the median of squared deviations from the median."""
    return float(np.median((values - np.median(values)) ** 2))


def equalized(
    labels: Float64Array, predicted: Float64Array, structure: IntArray, limit: float = 1.0
) -> tuple[Float64Array, Float64Array]:
    """Scale labels and predictions so that no structure has larger ones than the median.

    Parameters
    ----------
    labels, predicted : (n,) arrays
    structure : (n,) array of int
    limit : float
        The largest norm of a structure, in units of the median.
    """
    largest = np.ones(int(structure.max()) + 1)
    for values in (labels, predicted):
        norms = np.sqrt(np.bincount(structure, weights=values**2))
        if norms.any():
            largest = np.maximum(largest, norms / (limit * np.median(norms[norms > 0])))
    return labels / largest[structure], predicted / largest[structure]


def _warn_of_factor(name: str, key: str, factor: Factor) -> None:
    size = float(np.sqrt(factor.a * factor.b))
    differences = ["the opposite sign"] if factor.r < 0 else []
    guess = ""
    if not 1 / _LIMIT_IF_ACCURATE < size < _LIMIT_IF_ACCURATE:
        differences.append(f"{size:.3g} times the size")
        units = [u for u, f in KINDS[name].other_units.items() if 1 / _NEAR < size / f < _NEAR]
        guess = f" (units of {' or '.join(units)}?)" if units else ""
    warn(
        f"{name}={key!r}: labels have {' and '.join(differences)} of the derivatives of the "
        f"energies{guess}, correlation {factor.r:.2f}. {KINDS[name].convention}"
    )


def find_outliers(
    y: Float64Array,
    residuals: Float64Array,
    std: Float64Array,
    structure: IntArray,
    copies: IntArray,
) -> IntArray:
    """Return structures whose labels are far from their out-of-bag predictions, the worst first.

    Scales are medians over different structures, which a few wrong labels do not change: an error
    is far larger than those of others or, if wrong labels have spoilt the whole model, the label
    itself and its error are far outside the range of labels. Structures whose labels are rounding,
    such as forces on a perfect crystal, are no scale of others.

    Parameters
    ----------
    y : (n,) array
        Labels of one quantity.
    residuals, std : (n,) arrays
        Out-of-bag residuals and standard deviations.
    structure : (n,) array of int
    copies : array of int
        A number for each structure, the same for duplicates.
    """
    codes, where, rows = np.unique(structure, return_inverse=True, return_counts=True)
    kinds = np.unique(copies[codes], return_inverse=True)[1]
    deviation = np.abs(y - np.median(group_means(y, kinds[where])))
    z, s, deviation = (
        np.sqrt(np.bincount(where, weights=v**2) / rows) for v in (residuals, std, deviation)
    )
    has_label = deviation > (SMALLEST_LABEL if np.any(deviation > SMALLEST_LABEL) else 0.0)
    if len(np.unique(kinds[has_label])) < _ENOUGH:
        return codes[:0]

    def typical(values: Float64Array) -> float:
        return float(np.median(group_means(values[has_label], kinds[has_label])))

    least = max(1e-9 * float(np.median(np.abs(y))), _TINY)  # rounding
    usual, spread = (max(typical(v), least) for v in (z, deviation))
    t = z / np.maximum(s, _TINY)
    wrong = (z > _FAR * usual) & (t > _FAR_IN_STD * max(typical(t), 1.0))
    wrong |= (z > _FAR * spread) & (deviation > _FAR * spread)
    worst = np.flatnonzero(wrong)
    return codes[worst[np.argsort(-z[worst], kind="stable")]]


def check_copies(
    y: Float64Array, residuals: Float64Array, copies: IntArray, source: IntArray
) -> None:
    """Warn if labels of the same structure differ by more than the model errs.

    Parameters
    ----------
    y : (n,) array
        Labels.
    residuals : (n,) array
        Out of bag.
    copies : (n,) array of int
        Structures of the same number are copies.
    source : (n,) array of int
        Numbers of structures in the input.
    """
    typical = float(np.median(np.abs(residuals)))
    for kind in np.flatnonzero(np.bincount(copies) > 1):
        rows = np.flatnonzero(copies == kind)
        low, high = rows[np.argmin(y[rows])], rows[np.argmax(y[rows])]
        if y[high] - y[low] > max(typical, _TINY):
            i, j = sorted(int(source[k]) for k in (low, high))
            warn(
                f"Structures {i} and {j} are the same, but their labels are not: {y[low]:.6g} and "
                f"{y[high]:.6g} (per atom, without baseline potential). Check both."
            )
            return


def warn_of_outliers(name: str, outliers: IntArray, source: IntArray) -> None:
    """List structures with possible label errors by their numbers in the input.

    Parameters
    ----------
    name : str
        Of the quantity.
    outliers : (k,) array of int
    source : (n,) array of int
        Numbers of all structures in the input.
    """
    if not len(outliers):
        return
    listed = ", ".join(f"frames[{source[s]}]" for s in outliers[:_LISTED])
    more = f" and {len(outliers) - _LISTED} more" if len(outliers) > _LISTED else ""
    warn(
        f"{name}: possible label errors in {counted(len(outliers), 'structure')} ({listed}{more}): "
        "labels are far from out-of-bag predictions. Check values and units."
    )
