"""All settings of an atomistic model, validated together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from ase.data import atomic_numbers, chemical_symbols
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qualms.atomistic.hypers import Soap, make_soap
from qualms.core.calibration import METHODS
from qualms.errors import InputError

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
    return settings


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
