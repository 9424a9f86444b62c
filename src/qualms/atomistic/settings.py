"""All parameters of an atomistic model: listed, described and validated here, and only here.

The constructor of `AtomisticModel`, its documentation and the options of the command line are made
from this list.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from ase.data import atomic_numbers, chemical_symbols
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qualms.arrays import check_number
from qualms.calibration.fitting import METHODS
from qualms.errors import InputError
from qualms.features.soap import Soap, make_soap
from qualms.resources import default_threads, parse_memory

#: Width in Å over which neighbours fade at the cutoff, if forces are learned and none is given.
SMOOTHING = 0.5

Kind = Literal["extensive", "intensive", "atomic"]
_Key = Annotated[str, Field(min_length=1)]
_Variance = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


def _parameter(group: str, default: Any, description: str, type_: str = "", **options: Any) -> Any:
    """Return a field; `type_` is its type as the documentation has it."""
    extra: dict[str, Any] = {"group": group, "type": type_}
    return Field(default, description=description, json_schema_extra=extra, **options)


class Settings(BaseModel):
    """Parameters of a model; their descriptions are those of `AtomisticModel`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: _Key = _parameter(
        "data",
        ...,
        "Key of the property, in ``atoms.info`` or, for atomic properties, ``atoms.arrays``. "
        "``REF_`` keys and results of calculators are found, too.",
        "str",
    )
    kind: Kind = _parameter(
        "data",
        "extensive",
        "Sum over atoms, such as an energy; average over atoms; or a value for each atom.",
        '{"extensive", "intensive", "atomic"}',
    )
    representation: Soap = _parameter(
        "model",
        "organic",
        'Preset ("organic", "nmr", "general") or SOAP hyper-parameters: see '
        "`qualms.features.soap`.",
        "str, dict or Soap",
        validate_default=True,
    )
    species: tuple[int, ...] | None = _parameter(
        "data",
        None,
        "Elements of an atomic property, such as H or H,C; those with labels by default.",
        "list of str, optional",
    )
    n_representatives: int = _parameter(
        "model", 1000, "Number M of representative environments.", "int", ge=1
    )
    selection: Literal["fps", "cur", "random"] = _parameter(
        "model",
        "fps",
        "Method that selects representative environments.",
        '{"fps", "cur", "random"}',
    )
    per_species: bool = _parameter(
        "model",
        False,
        "Select representatives for each element, in proportion to its environments.",
        "bool",
    )
    baseline: Literal["none", "mean", "atoms", "composition"] | dict[int, float] = _parameter(
        "model",
        "composition",
        "Subtracted before learning: least squares in the composition; a constant; energies of "
        "isolated atoms, given here by element or found in the data "
        "(``config_type=isolated_atom``); nothing.",
        '{"composition", "mean", "atoms", "none"} or dict',
    )
    noise: Literal["loo", "evidence"] | _Variance = _parameter(
        "model",
        "loo",
        "Criterion that selects the noise variance σ², or σ² itself in the units of the target "
        "squared (per atom if the target is extensive).",
        '{"loo", "evidence"} or float',
    )
    forces: _Key | None = _parameter(
        "data", None, "Key of forces to learn together with the energy.", "str, optional"
    )
    stress: _Key | None = _parameter(
        "data",
        None,
        "Key of stresses to learn together with the energy, with ASE's sign.",
        "str, optional",
    )
    forces_noise: Literal["auto"] | _Variance = _parameter(
        "model",
        "auto",
        "Noise variance of forces; selected together with that of the energy by default.",
        '"auto" or float',
    )
    stress_noise: Literal["auto"] | _Variance = _parameter(
        "model",
        "auto",
        "Noise variance of virials per atom (Vσ/n, an energy); selected by default.",
        '"auto" or float',
    )
    noise_per: Literal["atom", "structure"] = _parameter(
        "model",
        "atom",
        "With forces: whether energies have the same noise per atom or per structure.",
        '{"atom", "structure"}',
    )
    n_members: int = _parameter("uncertainty", 16, "Number N_R of ensemble members.", "int", ge=2)
    subsample: Annotated[int, Field(ge=2)] | _Fraction = _parameter(
        "uncertainty", 0.5, "Size of the subsamples, as a fraction or a number.", "float or int"
    )
    resample: Literal["structures", "atoms"] = _parameter(
        "uncertainty",
        "structures",
        "Unit of subsampling for atomic properties: structures, since atoms of one structure are "
        "similar, or single atoms.",
        '{"structures", "atoms"}',
    )
    replace: bool = _parameter("uncertainty", False, "Bootstrap instead of subsampling.", "bool")
    calibration: str = _parameter(
        "uncertainty",
        "student",
        "Method that calibrates the ensemble standard deviation on out-of-bag points.",
        '{"student", "shrinkage", "linear", "power", "none"}',
    )
    units: str = _parameter("data", "", "Units of the target, stored and displayed.", "str")
    seed: int = _parameter("uncertainty", 0, "Random seed.", "int", ge=0)
    keep_pp: bool = _parameter(
        "uncertainty",
        True,
        "Store what the variance of the projected process, Eq. (3), needs: two triangular matrices "
        "of M rows.",
        "bool",
    )
    memory: str | float | None = _parameter(
        "resources",
        None,
        'Memory limit for training, such as ``"8GB"``; three quarters of the memory by default.',
        "str or float, optional",
        exclude=True,
    )
    threads: int | None = _parameter(
        "resources",
        None,
        "Number of cores; all by default, or as many as ``OMP_NUM_THREADS`` allows.",
        "int, optional",
        exclude=True,
    )

    @property
    def per_atom(self) -> bool:
        """Whether the target is a property of atoms."""
        return self.kind == "atomic"

    @property
    def mechanical(self) -> bool:
        """Whether forces or stresses are learned together with the energy."""
        return self.forces is not None or self.stress is not None

    @property
    def keys(self) -> dict[str, str]:
        """Key of each quantity that is learned."""
        found = {"energy": self.target, "forces": self.forces, "stress": self.stress}
        return {quantity: key for quantity, key in found.items() if key is not None}

    @property
    def has_forces(self) -> bool:
        """Whether the model has continuous forces, learned or not."""
        smooth = all(scale.smoothing is not None for scale in self.representation.scales)
        return self.kind == "extensive" and smooth

    def units_of(self, quantity: str) -> str:
        """Return the units of a quantity; energies are per atom if the target is extensive."""
        if quantity == "energy" and self.kind != "extensive":
            return self.units
        per = {"energy": "atom", "forces": "Å", "stress": "Å³"}[quantity]
        return f"{self.units}/{per}" if self.units else f"per {per}"

    @field_validator("representation", mode="before")
    @classmethod
    def _named_representation(cls, value: Any) -> Any:
        return make_soap(value) if isinstance(value, (str, dict)) else value

    @field_validator("species", mode="before")
    @classmethod
    def _numbers_of_symbols(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.replace(",", " ").split()
        if value is None:
            return None
        if not isinstance(value, Iterable) or not (listed := list(value)):
            raise ValueError("one chemical element or more")
        return tuple(sorted({as_number(z) for z in listed}))

    @field_validator("baseline", mode="before")
    @classmethod
    def _energies_by_number(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for element, energy in value.items():
            check_number(f"baseline[{element!r}]", energy, -np.inf)
        return {as_number(z): float(energy) for z, energy in value.items()}

    @field_validator("calibration", mode="before")
    @classmethod
    def _known_calibration(cls, value: Any) -> Any:
        name = "none" if value is None else value
        if not isinstance(name, str) or name not in METHODS:
            raise ValueError(f"one of {', '.join(METHODS)}")
        return name

    @field_validator("memory", mode="before")
    @classmethod
    def _readable_memory(cls, value: Any) -> Any:
        parse_memory(value)
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _positive_threads(cls, value: Any) -> Any:
        return None if value is None else default_threads(value)


def as_number(species: str | int) -> int:
    """Return the atomic number of a symbol or number."""
    text = str(species).strip()
    if text.isdigit() and 0 < int(text) < len(chemical_symbols):
        return int(text)
    if atomic_numbers.get(text, 0) == 0:
        raise ValueError(f"{species!r} is not a chemical element")
    return int(atomic_numbers[text])


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validate parameters; an `InputError` names the first that is wrong."""
    try:
        settings = Settings.model_validate(dict(values))
    except ValidationError as error:
        raise _first_problem(error) from None
    if settings.species is not None and settings.kind != "atomic":
        raise InputError("species", values["species"], "none, unless kind='atomic'")
    if settings.resample == "atoms" and settings.kind != "atomic":
        raise InputError("resample", "'atoms'", "'structures', unless kind='atomic'")
    for name in ("forces", "stress"):
        noise = getattr(settings, f"{name}_noise")
        if noise != "auto" and getattr(settings, name) is None:
            raise InputError(f"{name}_noise", noise, f"'auto' if no {name} are learned")
    if settings.mechanical:
        return _with_derivatives(settings)
    if settings.noise_per != "atom":
        raise InputError("noise_per", repr(settings.noise_per), "'atom' if no forces are learned")
    return settings


def _with_derivatives(settings: Settings) -> Settings:
    """Return settings whose features are differentiable and fade at the cutoff."""
    soap = settings.representation
    if settings.kind != "extensive":
        name = "forces" if settings.forces is not None else "stress"
        raise InputError(name, f"with kind={settings.kind!r}", "kind='extensive', an energy")
    if soap.engine == "dscribe" or any(s.radial_basis != "gto" for s in soap.scales):
        raise InputError(
            "engine",
            f"{soap.engine!r}, radial_basis={soap.scales[0].radial_basis!r}",
            "engine 'featomic' and radial_basis 'gto', whose features have derivatives",
        )
    scales = tuple(
        scale if scale.smoothing is not None else scale.model_copy(update={"smoothing": SMOOTHING})
        for scale in soap.scales
    )
    smooth = soap.model_copy(update={"engine": "featomic", "scales": scales})
    return settings.model_copy(update={"representation": smooth})


def _first_problem(error: ValidationError) -> InputError:
    problems = error.errors()
    problem = problems[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return InputError(name, repr(problem["input"]), f"a known parameter: {known}")
    # A value that may be of several types has a problem with each of them.
    expected = [
        other["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        for other in problems
        if other["loc"][:1] == problem["loc"][:1]
    ]
    return InputError(name, repr(problem["input"]), ", or ".join(dict.fromkeys(expected)))


def signature() -> inspect.Signature:
    """Return the signature of a constructor that takes these parameters."""
    parameters = []
    for name, field in Settings.model_fields.items():
        positional = name in ("target", "kind")
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD
                if positional
                else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.is_required() else field.default,
            )
        )
    return inspect.Signature(parameters)


def parameter_list() -> str:
    """Return the parameters as a section of a numpydoc docstring, indented by four spaces."""
    lines = []
    for name, field in Settings.model_fields.items():
        extra: Any = field.json_schema_extra
        text = textwrap.wrap(field.description or "", 88)
        lines += [f"    {name} : {extra['type']}", *(f"        {line}" for line in text)]
    return "\n".join(lines)
