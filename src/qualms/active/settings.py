"""All parameters of the active-learning loop, and only here: `qualms learn` reads them from YAML.

`qualms template learn` and the documentation are made from this list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from qualms.active.select import STRATEGIES
from qualms.ase import Watch
from qualms.atomistic.settings import (
    PotentialSettings,
    Settings,
    as_potential,
    first_problem,
    make_settings,
)
from qualms.errors import InputError

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
#: Parameters of the model that have other defaults here.
MODEL = {"target": "energy", "forces": "forces", "units": "eV"}


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) or value is None else [value]


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Paths = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]
_Temperatures = Annotated[tuple[_Positive, ...], BeforeValidator(_listed), Field(min_length=1)]


def _entry(default: Any, type_: str, description: str, **options: Any) -> Any:
    """Return a field; `type_` is its type as the documentation has it."""
    return Field(default, description=description, json_schema_extra={"type": type_}, **options)


class _Entries(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Explore(_Entries):
    """Where new structures come from."""

    structures: _Paths | None = _entry(
        None,
        "file or list of files",
        "Structures where walkers start; by default random ones of the start.",
    )
    walkers: int = _entry(4, "int", "Simulations of each round.", ge=1, le=10_000)
    temperatures: _Temperatures = _entry(
        (300.0,), "float or list of floats", "Temperatures in K, of one walker after the other."
    )
    time: _Positive = _entry(2.0, "float", "Time of each walker and round in ps.")
    timestep: _Positive = _entry(0.5, "float", "Time step in fs.")
    friction: _Positive = _entry(0.01, "float", "Friction of the Langevin dynamics in 1/fs.")
    pressure: Annotated[float, Field(allow_inf_nan=False)] | None = _entry(
        None,
        "float, optional",
        "Pressure in GPa: the cell varies, by Berendsen's method.",
    )
    interval: int = _entry(
        10,
        "int",
        "Steps from one structure with uncertainties to the next: these are explored, and compared "
        "with the limits.",
        ge=1,
    )
    pool: _Paths | None = _entry(
        None, "file or list of files", "Structures to choose from, instead of simulations."
    )
    callable: str | None = _entry(
        None,
        "str, optional",
        "package.module:callable, instead of simulations: it is called with a calculator, a seed "
        "and the arguments, and yields structures.",
    )
    arguments: dict[str, Any] = _entry({}, "dict", "Arguments of the callable.")

    @model_validator(mode="after")
    def _one_source(self) -> Explore:
        if self.pool is not None and self.callable is not None:
            raise InputError(
                "`pool` and `callable` of `explore` exclude each other.", parameter="explore"
            )
        if self.callable is not None and not _IMPORT_PATH.fullmatch(self.callable):
            raise InputError(
                f"`callable` of `explore` is {self.callable!r}; it must be an import path, "
                "'package.module:callable'.",
                parameter="explore",
            )
        return self

    @property
    def n_steps(self) -> int:
        """Steps of each walker and round: a multiple of the interval."""
        return max(round(1e3 * self.time / self.timestep / self.interval), 1) * self.interval


class Limits(_Entries):
    """Limits of uncertainties: see `qualms.ase.Watch`."""

    forces: float | str | None = _entry(
        None,
        "float or str, optional",
        "Limit of the largest σ of a force in eV/Å, or in out-of-bag errors, as in 2 rmse.",
    )
    energy: float | str | None = _entry(
        None, "float or str, optional", "Limit of σ of the energy per atom in eV, or in errors."
    )
    novelty: float | None = _entry(None, "float, optional", "Limit of the novelty of an atom.")
    extrapolation: bool = _entry(False, "bool", "Extrapolations are beyond the limits.")
    upper: float = _entry(
        5.0,
        "float",
        "A structure beyond so many times a limit is unphysical: it is not labelled, and the "
        "walker goes back to its last trusted structure.",
    )

    def watch(self, action: Any) -> Watch:
        """Return a watch with these limits."""
        return Watch(
            self.forces,
            self.energy,
            self.novelty,
            extrapolation=self.extrapolation,
            upper=self.upper,
            action=action,
        )

    @model_validator(mode="after")
    def _valid(self) -> Limits:
        self.watch("raise")
        return self


class Choose(_Entries):
    """How labels are chosen: see `qualms.active.select`."""

    strategy: Literal["variance", "target", "farthest", "random"] = _entry(
        "variance",
        f"{{{', '.join(STRATEGIES)}}}",
        "Largest variance; largest reduction of the variance of what was explored; largest "
        "distance in the space of features; at random.",
    )
    max_novelty: _Positive | None = _entry(
        None, "float, optional", "Structures of a larger novelty are unphysical, and left out."
    )


class Label(_Entries):
    """Where labels come from."""

    calculator: str | None = _entry(
        None,
        "str, optional",
        "tblite:GFN2-xTB, or the package.module:callable of a calculator of ASE, in eV and Å; "
        "without, to_label.xyz is written, and labelled.xyz awaited.",
    )
    arguments: dict[str, bool | int | float | str] = _entry(
        {}, "dict", "Arguments of the calculator."
    )
    workers: int = _entry(
        1, "int", "Processes of this machine that compute labels; one: this process.", ge=1, le=1024
    )
    max_force: _Positive = _entry(
        50.0,
        "float",
        "A calculation with a larger force on an atom, in eV/Å, is taken to be wrong.",
    )
    max_energy: _Positive = _entry(
        1.0,
        "float",
        "A calculation whose energy differs from the prediction by more, in eV per atom, and by "
        "more than ten standard deviations, is taken to be wrong.",
    )
    compare: int = _entry(
        3,
        "int",
        "Labelled structures of the start that are computed first: labels must agree.",
        ge=0,
    )

    @model_validator(mode="after")
    def _a_calculator(self) -> Label:
        if self.calculator is None:
            if self.arguments:
                raise InputError("`arguments` of `label` need a `calculator`.", parameter="label")
            return self
        if self.potential is None or self.calculator == "backbone":
            raise InputError(
                f"`calculator` of `label` is {self.calculator!r}; it must be a name such as "
                "'tblite:GFN2-xTB', or the import path of a calculator of ASE, "
                "'package.module:callable'.",
                parameter="label",
            )
        return self

    @property
    def potential(self) -> PotentialSettings | None:
        """The calculator; None if labels are computed by hand."""
        if self.calculator is None:
            return None
        return as_potential({"calculator": self.calculator, "arguments": self.arguments})


class LearnSettings(_Entries):
    """Parameters of the loop."""

    start: _Paths = _entry(..., "file or list of files", "Structures with labels.")
    directory: Annotated[str, Field(min_length=1)] = _entry(
        ..., "str", "Directory of the loop; the same file continues there."
    )
    target_error: _Positive = _entry(
        ...,
        "float",
        "RMSE of force components in eV/Å: the loop ends when the upper 95 % confidence bound for "
        "what was explored is below it.",
    )
    budget: int = _entry(..., "int", "Labels to buy at most.", ge=1)
    batch: int = _entry(20, "int", "Labels of a round.", ge=1, le=100_000)
    audit: Annotated[float, Field(ge=0.1, le=1)] = _entry(
        0.2,
        "float",
        "Share of each batch that is drawn at random from what was explored, and measures the "
        "error; at least a tenth.",
    )
    seed: int = _entry(0, "int", "Random seed.", ge=0, le=2**63)
    model: Settings = _entry(None, "dict", "Settings of `qualms train`.", validate_default=True)
    explore: Explore = _entry(Explore(), "dict", "Where new structures come from.")
    watch: Limits = _entry(Limits(), "dict", "Limits of uncertainties.")
    choose: Choose = _entry(Choose(), "dict", "How labels are chosen.")
    label: Label = _entry(Label(), "dict", "Where labels come from.")

    @model_validator(mode="before")
    @classmethod
    def _model_with_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        model = values.get("model")
        if isinstance(model, Settings):
            return values
        if not isinstance(model, (Mapping, type(None))):
            raise InputError(
                f"`model` is {model!r}; it must have settings, such as target: energy.",
                parameter="model",
            )
        return {**values, "model": make_settings({**MODEL, **(model or {})})}

    @model_validator(mode="after")
    def _consistent(self) -> LearnSettings:
        if self.model.forces is None:
            raise InputError(
                "`forces` of `model` are missing: the loop measures errors of forces, and walkers "
                "need them. Name their key; without forces, use `qualms select`.",
                parameter="model",
            )
        if self.model.units != "eV":
            raise InputError(
                f"`units` of `model` are {self.model.units!r}; calculators of ASE, which explore "
                "and label, are in eV.",
                parameter="model",
            )
        return self

    @property
    def folder(self) -> Path:
        """The directory."""
        return Path(self.directory)


SECTIONS: dict[str, type[BaseModel]] = {
    "explore": Explore,
    "watch": Limits,
    "choose": Choose,
    "label": Label,
}


def make_learn_settings(values: Mapping[str, Any]) -> LearnSettings:
    """Validate parameters; an `InputError` names the first that is wrong."""
    try:
        return LearnSettings.model_validate(dict(values))
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        if len(place) > 1 and (section := SECTIONS.get(str(place[0]))) is not None:
            given = values[str(place[0])]
            try:
                section.model_validate(given)
            except ValidationError as inner:
                raise first_problem(inner, section, str(place[0])) from None
        raise first_problem(error, LearnSettings) from None
