"""All settings of an atomistic model, validated together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from ase.data import atomic_numbers, chemical_symbols
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qualms.calibration.fitting import METHODS
from qualms.errors import InputError
from qualms.features.hypers import Soap, make_soap

#: Width in Å over which neighbours fade at the cutoff, if forces are learned and nothing is said.
SMOOTHING = 0.5

Kind = Literal["extensive", "intensive", "atomic"]


class Settings(BaseModel):
    """What defines a model, apart from its data. See `AtomisticModel` for what each means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, Field(min_length=1)]
    kind: Kind = "extensive"
    representation: Soap = Soap()
    species: tuple[int, ...] | None = None
    n_representatives: Annotated[int, Field(ge=1)] = 1000
    selection: Literal["fps", "cur", "random"] = "fps"
    per_species: bool = False
    baseline: Literal["none", "mean", "atoms", "composition"] | dict[int, float] = "composition"
    noise: Literal["loo", "evidence"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "loo"
    forces: Annotated[str, Field(min_length=1)] | None = None
    stress: Annotated[str, Field(min_length=1)] | None = None
    forces_noise: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"
    stress_noise: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"
    noise_per: Literal["atom", "structure"] = "atom"
    n_members: Annotated[int, Field(ge=2)] = 16
    subsample: (
        Annotated[int, Field(ge=2)] | Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    ) = 0.5
    resample: Literal["structures", "atoms"] = "structures"
    replace: bool = False
    calibration: str = "student"
    units: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    keep_pp: bool = True

    @property
    def per_atom(self) -> bool:
        """Whether the target belongs to atoms."""
        return self.kind == "atomic"

    @property
    def mechanical(self) -> bool:
        """Whether forces or stresses are learned, besides the energy."""
        return self.forces is not None or self.stress is not None

    @property
    def has_forces(self) -> bool:
        """Whether the model has continuous forces, learned or not."""
        smooth = all(scale.smoothing is not None for scale in self.representation.scales)
        return self.kind == "extensive" and smooth

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
        if isinstance(value, Mapping):
            return {as_number(z): energy for z, energy in value.items()}
        return value

    @field_validator("calibration", mode="before")
    @classmethod
    def _known_calibration(cls, value: Any) -> Any:
        name = "none" if value is None else value
        if not isinstance(name, str) or name not in METHODS:
            raise ValueError(f"one of {', '.join(METHODS)}")
        return name


def as_number(species: str | int) -> int:
    """Return the atomic number of a symbol or number; a ValueError names what is neither."""
    text = str(species).strip()
    if text.isdigit() and 0 < int(text) < len(chemical_symbols):
        return int(text)
    if atomic_numbers.get(text, 0) == 0:
        raise ValueError(f"{species!r} is no chemical element")
    return int(atomic_numbers[text])


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validate settings; the first that is wrong is named in an `InputError`."""
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
            raise InputError(f"{name}_noise", noise, f"'auto', without {name} to learn")
    if settings.mechanical:
        return _with_derivatives(settings)
    if settings.noise_per != "atom":
        raise InputError("noise_per", repr(settings.noise_per), "'atom', without forces to learn")
    return settings


def _with_derivatives(settings: Settings) -> Settings:
    """Return the settings with features that have derivatives, and fade at the cutoff."""
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
        return InputError(name, repr(problem["input"]), f"a setting that exists: {known}")
    # A value that may be of several kinds has a problem with each of them.
    expected = [
        other["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        for other in problems
        if other["loc"][:1] == problem["loc"][:1]
    ]
    return InputError(name, repr(problem["input"]), ", or ".join(dict.fromkeys(expected)))
