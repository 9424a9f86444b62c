"""Evaluation: reference values, their prediction, and the structures they belong to.

Models and other people's ensembles produce this type, and reports read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ase.units import Hartree, kcal, kJ, mol
from scipy.special import stdtrit

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray, check_points
from qualms.errors import InputError, counted, unknown_choice
from qualms.metrics import Scores, outlying_points, root_mean_square
from qualms.prediction import Prediction

if TYPE_CHECKING:
    from ase import Atoms

#: Units of energy in eV.
ENERGIES = {"eV": 1.0, "meV": 1e-3, "Hartree": Hartree, "kcal/mol": kcal / mol, "kJ/mol": kJ / mol}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions of one quantity with their reference values."""

    target: str  #: key of the property in the data
    y: Float64Array  #: (n,): reference values; by default per atom if the target is extensive
    prediction: Prediction  #: calibrated, in the units of `y`; it may have no members
    #: (n,): the structure of each value, as an index of `frames` or any other number. Errors within
    #: a structure are taken to be correlated
    structure: IntArray
    #: "forces", "stress", or "energy" for any other property of structures or atoms
    quantity: str = "energy"
    atom: IntArray | None = None  #: (n,): the atom of each value
    component: IntArray | None = None  #: (n,): the component of a vector or tensor
    component_names: Sequence[str] = ()
    units: str = ""
    factor: float | Float64Array = 1.0  #: or (n,): y is this times the value in the data
    frames: Sequence[Atoms] | None = None  #: None for tables
    #: scores of other estimators of the same values, by name, such as "linear (out-of-bag)"
    scores: Mapping[str, Scores] = field(default_factory=dict)
    #: about units, bias and the like, with which no assessment is favourable; None: not checked yet
    warnings: Sequence[str] | None = None
    n_unlabelled: int = 0  #: number of structures without reference values, which are left out
    n_unknown: int = 0  #: number of structures with unknown elements, which are left out
    #: (n,): whether the structure of each value is out of distribution, if that is known
    extrapolates: BoolArray | None = None
    #: why structures are out of distribution, by their number in `structure`
    reasons: Mapping[int, str] = field(default_factory=dict)
    #: (n,): novelty of the structure of each value, in units of the limit, if it is known
    novelty: Float64Array | None = None
    doubt: str = ""  #: why uncertainties outside the training set mean nothing, if they do not

    def __post_init__(self) -> None:
        y = check_points("y", self.y)
        if y.ndim != 1:
            message = f"`y` has the shape {y.shape}, not (n,). Flatten several outputs."
            raise InputError(message, parameter="y")
        if self.prediction.shape != y.shape:
            message = f"`prediction` has the shape {self.prediction.shape}, and `y` {y.shape}."
            raise InputError(message, parameter="prediction")
        object.__setattr__(self, "y", y)
        for name in ("structure", "atom", "component"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _indices(name, values, y.size))
        if self.frames is not None:
            self._check_frames(self.frames)

    def _check_frames(self, frames: Sequence[Atoms]) -> None:
        if np.any((self.structure < 0) | (self.structure >= len(frames))):
            raise InputError(
                f"`structure` has indices from {self.structure.min()} to {self.structure.max()}, "
                f"but there are {counted(len(frames), 'frame')}, from 0.",
                parameter="structure",
            )
        if self.atom is not None:
            sizes = np.array([len(atoms) for atoms in frames])[self.structure]
            if np.any((self.atom < 0) | (self.atom >= sizes)):
                message = "Some indices in `atom` exceed the number of atoms of their structure."
                raise InputError(message, parameter="atom")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def residuals(self) -> Float64Array:
        """Reference values minus predictions: (n,)."""
        return np.asarray(self.y - self.prediction.mean)

    @property
    def n_structures(self) -> int:
        """Number of structures; values of one structure are not independent."""
        return int(np.unique(self.structure).size)

    def checked(self) -> Sequence[str]:
        """Return the warnings, those of `check_errors` if they are not known."""
        if self.warnings is not None:
            return self.warnings
        kinds = {}
        if self.frames is not None:
            kinds = kinds_of(self.frames, self.structure, self.atom)
        std = self.prediction.uncalibrated.std
        return check_errors(self.residuals, std, self.structure, kinds)

    def some(self, chosen: BoolArray | IntArray) -> Evaluation:
        """Return the chosen points; `scores`, which belong to all points, are dropped."""
        arrays: dict[str, Any] = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return replace(self, **arrays, prediction=self.prediction[chosen], scores={})

    @property
    def n_extrapolating(self) -> int:
        """Number of structures that are out of distribution."""
        if self.extrapolates is None:
            return 0
        return int(np.unique(self.structure[self.extrapolates]).size)

    def remarks(self) -> list[str]:
        """Return sentences about points that are left out, and about extrapolation."""
        remarks = []
        if self.n_unlabelled:
            what = "structure" if self.atom is None else "atom"
            what = what if self.component is None else "component"
            points = counted(self.n_unlabelled, what)
            remarks.append(f"{points} without a reference value: skipped.")
        if self.n_unknown:
            skipped = counted(self.n_unknown, "structure")
            remarks.append(f"{skipped} with elements that are not in the training set: skipped.")
        if self.extrapolates is not None and self.extrapolates.any():
            within = 100.0 * (np.abs(self.residuals) <= self.prediction.std)
            text = (
                f"{self.n_extrapolating} of {counted(self.n_structures, 'structure')} are out of "
                f"distribution: {within[self.extrapolates].mean():.0f} % of their reference values "
                "lie within one σ"
            )
            if not self.extrapolates.all():
                text += f", and {within[~self.extrapolates].mean():.0f} % of the others"
            remarks.append(f"{text}.")
        return remarks


def energy_factor(units: str, in_units: str | None) -> tuple[float, str]:
    """Return the factor from units such as eV or eV/Å to those with another energy, and these.

    >>> energy_factor("eV/atom", "meV")
    (1000.0, 'meV/atom')
    """
    if not in_units:
        return 1.0, units
    if in_units not in ENERGIES:
        raise unknown_choice("in_units", in_units, ENERGIES)
    for name, energy in ENERGIES.items():
        if units == name or units.startswith(f"{name}/"):
            return energy / ENERGIES[in_units], in_units + units.removeprefix(name)
    data = f"in {units!r}, which is no unit of energy" if units else "without known units"
    raise InputError(
        f"Values {data} cannot be converted to {in_units!r}. State the units of the data: those of "
        "a model when it is trained, those of predictions with `units`.",
        parameter="in_units",
    )


def per_atom_units(units: str) -> str:
    """Return the units of a value per atom."""
    return f"{units}/atom" if units else "per atom"


def _indices(name: str, values: IntArray, n: int) -> IntArray:
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise InputError(
            f"`{name}` is an array of {array.dtype.name} with the shape {array.shape}; it must "
            f"have an integer for each of {counted(n, 'point')}.",
            parameter=name,
        )
    return array.astype(np.intp)


# Errors that no uncertainty accounts for.
def check_errors(
    residuals: Float64Array,
    std: Float64Array,
    structure: IntArray,
    kinds: Mapping[str, StrArray] | None = None,
) -> list[str]:
    """Return warnings about reference values that are predictions, about units, and about bias.

    A bias is a mean error above half of the root mean square, of all points or else of groups of
    them, that is significant at a level of 1 % divided by the number of groups.

    Parameters
    ----------
    residuals, std : (n,) arrays
        z = y − ȳ, and standard deviations before calibration.
    structure : (n,) array of int
        Points of one structure are not independent.
    kinds : mapping of str to (n,) arrays of str
        Groups of points by what they are groups of, such as the composition.
    """
    # Half of the |z| of a Gaussian are below 0.67 σ.
    typical = float(np.median(np.abs(residuals))) / 0.6745
    ratio = typical / float(np.median(std))
    if ratio < 0.01:
        return [
            f"The reference values equal the predictions: half of the errors are below "
            f"{0.6745 * typical:.3g}. Use reference values that are not predictions."
        ]
    warnings = []
    if not 1 / 30 < ratio < 30:
        size = "larger" if ratio > 1 else "smaller"
        factor = f"{max(ratio, 1 / ratio):.3g} times {size} than the standard deviations"
        warnings.append(f"Errors are {factor}: are the units of both the same?")
    if bias := _bias(residuals, structure, 1):
        share = abs(bias) / root_mean_square(residuals)
        return [
            *warnings,
            f"Errors are biased: their mean is {bias:+.3g}, {share:.0%} of their root mean square. "
            "No uncertainty accounts for a bias. If reference values and predictions do not have "
            "the same zero, subtract it first.",
        ]
    for kind, labels in (kinds or {}).items():
        names = np.unique(labels).tolist()
        biases = {
            name: _bias(residuals[labels == name], structure[labels == name], len(names))
            for name in names
        }
        worst = sorted((n for n in names if biases[n]), key=lambda n: -abs(biases[n]))
        if worst:
            listed = ", ".join(f"{name} (mean error {biases[name]:+.3g})" for name in worst[:5])
            more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
            text = f"Errors are biased by {kind}: {listed}{more}. No uncertainty accounts for that."
            return [*warnings, text]
    return warnings


def _bias(z: Float64Array, structure: IntArray, n_tests: int) -> float:
    """Return the mean error if it is a bias by a two-sided t test, 0 otherwise: `check_errors`."""
    codes = np.unique(structure, return_inverse=True)[1].reshape(-1)
    mean, n = float(np.mean(z)), int(codes.max()) + 1
    if n < 5:
        return 0.0
    sums = np.bincount(codes, z - mean)
    error = float(np.sqrt(np.sum(sums**2) * n / (n - 1))) / len(z)
    by_chance = error * float(stdtrit(n - 1, 1 - 0.005 / n_tests))
    return mean if abs(mean) > max(0.5 * root_mean_square(z), by_chance) else 0.0


def describe_outliers(
    residuals: Float64Array,
    std: Float64Array,
    structure: IntArray,
    atom: IntArray | None = None,
    component: IntArray | None = None,
) -> list[str]:
    """Return a warning that names the outliers, such as wrong labels; none if there are none.

    Parameters
    ----------
    residuals, std : (n,) arrays
        z = y − ȳ, and calibrated standard deviations > 0.
    structure, atom, component : (n,) arrays of int
        Origin of each point.
    """
    outliers = outlying_points(residuals, std)
    if not outliers.size:
        return []
    places = []
    for i in outliers[:5]:
        place = f"structure {structure[i]}"
        place += "" if atom is None else f", atom {atom[i]}"
        place += "" if component is None else f", component {component[i]}"
        places.append(f"{place} ({abs(residuals[i]) / std[i]:.3g} σ)")
    more = ", …" if len(outliers) > 5 else ""
    return [
        f"{counted(outliers.size, 'outlier')} of {len(residuals)} points, perhaps wrong reference "
        f"values: {'; '.join(places)}{more} (counted from 0). A single wrong value dominates the "
        "root mean squared error and the log likelihood."
    ]


def kinds_of(
    frames: Sequence[Atoms], structure: IntArray, atom: IntArray | None = None
) -> dict[str, StrArray]:
    """Return composition, config_type and element (of atoms) of points: arrays (n,) by name.

    Parameters
    ----------
    frames : sequence of Atoms
    structure, atom : (n,) arrays of int
        The structure, and if points belong to atoms, the atom of each point.
    """
    formulas = [atoms.get_chemical_formula() for atoms in frames]  # type: ignore[no-untyped-call]
    kinds = {"composition": np.array(formulas)[structure]}
    if any("config_type" in atoms.info for atoms in frames):
        types = [str(atoms.info.get("config_type", "")) for atoms in frames]
        kinds["config_type"] = np.array(types)[structure]
    if atom is not None:
        pairs = zip(structure.tolist(), atom.tolist(), strict=True)
        kinds["element"] = np.array([frames[i].symbols[j] for i, j in pairs])
    return kinds
