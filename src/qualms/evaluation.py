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
from qualms.metrics import Scores, root_mean_square
from qualms.prediction import Prediction

if TYPE_CHECKING:
    from ase import Atoms

#: Names of the components of a quantity; those of stresses in ASE's Voigt order.
COMPONENT_NAMES = {"forces": ("x", "y", "z"), "stress": ("xx", "yy", "zz", "yz", "xz", "xy")}

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
    #: scores of other estimators of the same values, by name, such as "linear (validation)"
    scores: Mapping[str, Scores] = field(default_factory=dict)
    #: description of the data that the "(validation)" calibrations were fitted to
    validation: str = ""
    #: about units, bias and the like, with which no assessment is favourable; None: not checked yet
    warnings: Sequence[str] | None = None
    n_unlabelled: int = 0  #: number of structures without reference values, which are left out
    n_unknown: int = 0  #: number of structures with unknown elements, which are left out
    #: (n,): whether the structure of each value is out of distribution, if that is known
    extrapolates: BoolArray | None = None

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
        return replace(
            self,
            y=self.y[chosen],
            prediction=self.prediction[chosen],
            structure=self.structure[chosen],
            atom=None if self.atom is None else self.atom[chosen],
            component=None if self.component is None else self.component[chosen],
            factor=self.factor if np.ndim(self.factor) == 0 else np.asarray(self.factor)[chosen],
            extrapolates=None if self.extrapolates is None else self.extrapolates[chosen],
            scores={},
        )

    @property
    def n_extrapolating(self) -> int:
        """Number of structures that are out of distribution."""
        if self.extrapolates is None:
            return 0
        return int(np.unique(self.structure[self.extrapolates]).size)

    def remarks(self) -> list[str]:
        """Return sentences about points that are left out, and about extrapolation."""
        found = []
        if self.n_unlabelled:
            what = "structure" if self.atom is None else "atom"
            what = what if self.component is None else "component"
            found.append(f"{counted(self.n_unlabelled, what)} without a reference value: skipped.")
        if self.n_unknown:
            skipped = counted(self.n_unknown, "structure")
            found.append(f"{skipped} with elements that are not in the training set: skipped.")
        if self.extrapolates is not None and self.extrapolates.any():
            within = 100.0 * (np.abs(self.residuals) <= self.prediction.std)
            text = (
                f"{self.n_extrapolating} of {counted(self.n_structures, 'structure')} are out of "
                f"distribution: {within[self.extrapolates].mean():.0f} % of their reference values "
                "lie within one σ"
            )
            if not self.extrapolates.all():
                text += f", and {within[~self.extrapolates].mean():.0f} % of the others"
            found.append(f"{text}.")
        return found


def energy_factor(units: str, wanted: str | None) -> tuple[float, str]:
    """Return the factor from units such as eV or eV/Å to those with another energy, and these.

    >>> energy_factor("eV/atom", "meV")
    (1000.0, 'meV/atom')
    """
    if not wanted:
        return 1.0, units
    if wanted not in ENERGIES:
        raise unknown_choice("--in", wanted, ENERGIES)
    found = [name for name in ENERGIES if units == name or units.startswith(f"{name}/")]
    if not found:
        data = f"in {units!r}, which is no unit of energy" if units else "without known units"
        raise InputError(
            f"Values {data} cannot be converted to {wanted!r}. State the units of the data: those "
            "of a model when it is trained, those of predictions with `units`.",
            parameter="--in",
        )
    return ENERGIES[found[0]] / ENERGIES[wanted], wanted + units.removeprefix(found[0])


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


# Checks of errors that no uncertainty accounts for.
#: Errors below this fraction of the standard deviation are none, and beyond this multiple of it
#: (or below the inverse) units are suspected to differ.
_EQUAL, _SUSPICIOUS = 0.01, 30.0
#: A bias above this fraction of the root mean square is one if the probability of any such bias by
#: chance is small; from this number of structures on.
_BIASED, _BY_CHANCE, _FEW = 0.5, 0.01, 5
#: A bias is the same everywhere if that of no part of the points differs by this fraction of it.
_CONSTANT, _PARTS = 0.25, 4
#: Number of groups that are named.
_NAMED = 5


def check_errors(
    residuals: Float64Array,
    std: Float64Array,
    structure: IntArray,
    kinds: Mapping[str, StrArray] | None = None,
) -> list[str]:
    """Return warnings about reference values that are predictions, about units, and about bias.

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
    if ratio < _EQUAL:
        return [
            f"The reference values equal the predictions: half of the errors are below "
            f"{0.6745 * typical:.3g}. Use reference values that are not predictions."
        ]
    found = []
    if not 1 / _SUSPICIOUS < ratio < _SUSPICIOUS:
        size = "larger" if ratio > 1 else "smaller"
        factor = f"{max(ratio, 1 / ratio):.3g} times {size} than the standard deviations"
        found.append(f"Errors are {factor}: are the units of both the same?")
    codes = np.unique(structure, return_inverse=True)[1].reshape(-1)
    bias = _bias(residuals, codes)
    if bias:
        text = f"their mean is {bias[0]:+.3g}, {bias[1]:.0%} of their root mean square"
        quarter = np.argsort(np.argsort(std, kind="stable")) * _PARTS // len(std)
        partitions = [quarter, *((kinds or {}).values())]
        if all(_is_constant(bias[0], residuals, codes, labels) for labels in partitions):
            return [
                *found,
                f"Errors are biased: {text}, and they have the same mean everywhere. Subtract it "
                "first. (Do reference values and predictions have the same zero?)",
            ]
        found.append(
            f"Errors are biased: {text}, but the bias is not the same everywhere. No uncertainty "
            "accounts for a bias."
        )
    seen: list[Any] = []
    for kind, labels in (kinds or {}).items():
        names, which = np.unique(labels, return_inverse=True)
        which = which.reshape(-1)
        if len(names) < 2 or any(np.array_equal(which, other) for other in seen):
            continue
        seen.append(which)
        biased = {}
        for i, name in enumerate(names):
            if of_part := _bias(residuals[which == i], codes[which == i], n_tests=len(names)):
                biased[str(name)] = of_part
        worst = sorted(biased, key=lambda name: -abs(biased[name][0]))
        if worst:
            shown = ", ".join(f"{n} (mean error {biased[n][0]:+.3g})" for n in worst[:_NAMED])
            more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
            text = f"Errors are biased by {kind}: {shown}{more}."
            found.append(text if bias else f"{text} No uncertainty accounts for a bias.")
    return found


def _is_constant(bias: float, z: Float64Array, codes: IntArray, labels: Any) -> bool:
    """Return whether the mean error of each part of the points is the bias, up to chance."""
    names, which = np.unique(labels, return_inverse=True)
    for i in range(len(names)):
        part = which.reshape(-1) == i
        mean, by_chance = _mean_error(z[part], codes[part], len(names))
        if abs(mean - bias) > max(_CONSTANT * abs(bias), by_chance):
            return False
    return True


def _bias(z: Float64Array, codes: IntArray, n_tests: int = 1) -> tuple[float, float] | tuple[()]:
    """Return mean, and mean over root mean square, of errors that are biased; else nothing.

    A two-sided t test of the mean.
    """
    mean, by_chance = _mean_error(z, codes, n_tests)
    rms = root_mean_square(z)
    if abs(mean) <= max(_BIASED * rms, by_chance):
        return ()
    return mean, abs(mean) / rms


def _mean_error(z: Float64Array, codes: IntArray, n_tests: int) -> tuple[float, float]:
    """Return the mean of errors, and how far it may be off by chance; ∞ for few structures.

    With a probability that is divided by the number of tests.
    """
    mean, n_groups = float(np.mean(z)), len(np.unique(codes))
    if n_groups < _FEW:
        return mean, np.inf
    sums = np.bincount(codes, z - mean)
    error = float(np.sqrt(np.sum(sums**2) * n_groups / (n_groups - 1))) / len(z)
    return mean, error * float(stdtrit(n_groups - 1, 1 - 0.5 * _BY_CHANCE / n_tests))


def kinds_of(
    frames: Sequence[Atoms], structure: IntArray, atom: IntArray | None = None
) -> dict[str, StrArray]:
    """Return composition, config_type and element (of atoms) of points: arrays (n,) by name."""
    formulas = [atoms.get_chemical_formula() for atoms in frames]  # type: ignore[no-untyped-call]
    kinds = {"composition": np.array(formulas)[structure]}
    if any("config_type" in atoms.info for atoms in frames):
        types = [str(atoms.info.get("config_type", "")) for atoms in frames]
        kinds["config_type"] = np.array(types)[structure]
    if atom is not None:
        pairs = zip(structure.tolist(), atom.tolist(), strict=True)
        kinds["element"] = np.array([frames[i].symbols[j] for i, j in pairs])
    return kinds
