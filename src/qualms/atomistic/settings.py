"""All parameters of an atomistic model: listed, described and validated here, and only here.

The constructor of `AtomisticModel`, its documentation and the options of the command line are made
from this list.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import psutil
from ase.data import atomic_numbers, chemical_symbols
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qualms.arrays import check_number
from qualms.atomistic.quantities import DERIVATIVES, KINDS, TARGET
from qualms.calibration.methods import MEMBER_METHODS, MODEL_METHODS
from qualms.errors import InputError, QualmsError, did_you_mean
from qualms.evaluation import ENERGIES
from qualms.features import AnyRepresentation
from qualms.features.base import RepresentationSettings
from qualms.features.learned import Backbone, make_backbone
from qualms.features.soap import choose_preset, make_soap
from qualms.gp.ensemble import MIN_ABSENT
from qualms.resources import default_threads

#: Methods of calibration, the default first.
_CALIBRATIONS = (*reversed(MODEL_METHODS), "auto")

Kind = Literal["extensive", "intensive", "atomic"]
#: Bounds of numbers hold for model files as well.
_Key = Annotated[str, Field(min_length=1, max_length=1000)]
_Variance = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Fraction = Annotated[float, Field(gt=0, lt=1)]
_Linear = Literal["none", "mean", "atoms", "composition"] | dict[int, float]
#: Calculators that a model file may name without being confirmed, and their methods.
CALCULATORS: dict[str, tuple[str, ...]] = {
    "tblite": ("GFN2-xTB", "GFN1-xTB", "IPEA1-xTB"),
    "sevennet": (),
}
#: Arguments of tblite: numbers only, so that a file cannot name others.
_TBLITE = ("charge", "multiplicity", "accuracy", "electronic_temperature", "max_iterations")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class PotentialSettings(BaseModel):
    """A baseline potential, whose energies, forces and stresses are subtracted (Δ-learning).

    It has names only: nothing is imported before a value of the potential is needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: "backbone", one of `CALCULATORS` (with ":" and a method), or "package.module:callable"
    calculator: _Key | None = None
    arguments: dict[_Key, bool | int | float | _Key] = Field(default_factory=dict)
    #: instead of a calculator: keys of energies, forces and stresses in the structures
    key: _Key | None = None
    forces: _Key | None = None
    stress: _Key | None = None
    then: _Linear = "composition"  #: what is fitted to the differences and subtracted, too

    @property
    def name(self) -> str:
        """The calculator, or the key."""
        return self.calculator or f"key {self.key!r}"

    def key_of(self, quantity: str) -> str | None:
        """Return the key of a quantity: given, or that of the energy with the other word."""
        if self.key is None or quantity == "energy":
            return self.key
        key: str | None = getattr(self, quantity)
        derived = self.key.replace("energy", quantity) if "energy" in self.key else None
        return key or derived

    @field_validator("then", mode="before")
    @classmethod
    def _energies_by_number(cls, value: Any) -> Any:
        return _by_number(value)

    @model_validator(mode="after")
    def _known_names(self) -> PotentialSettings:
        name = (self.calculator or "").partition(":")[0]
        problem = ""
        if (self.calculator is None) == (self.key is None):
            problem = "A baseline potential has a calculator or a key, and not both."
        elif self.calculator is not None and (self.forces or self.stress):
            problem = "Keys of forces and stress belong to the key of an energy, not to a "
            problem += f"calculator such as {self.calculator!r}."
        elif self.arguments and (self.key or name in ("backbone", "sevennet")):
            problem = f"The baseline potential {self.name} takes no arguments."
        elif name in CALCULATORS:
            problem = self._problem_of_known(name)
        elif self.calculator not in (None, "backbone") and not _IMPORT_PATH.fullmatch(
            str(self.calculator)
        ):
            problem = (
                f"{self.calculator!r} is no calculator. Give 'backbone', a name such as "
                "'tblite:GFN2-xTB', or the import path of a calculator of ASE, "
                "'package.module:callable'."
            )
        if problem:
            raise InputError(problem, parameter="baseline")
        return self

    def _problem_of_known(self, name: str) -> str:
        """Return an error in the method or the arguments of one of `CALCULATORS`; "" if correct."""
        names = [f"{name}:{method}" for method in CALCULATORS[name]] or [name]
        if self.calculator not in names:
            problem = f"There is no calculator {self.calculator!r}, only {', '.join(names)}."
            return problem + did_you_mean(self.calculator, names)
        for key, value in self.arguments.items():
            if key not in _TBLITE or not isinstance(value, (int, float)):
                return (
                    f"The argument {key}={value!r} of {self.calculator} is none of the numbers "
                    f"that it takes: {', '.join(_TBLITE)}.{did_you_mean(key, _TBLITE)}"
                )
        return ""


def as_potential(value: Any) -> PotentialSettings | None:
    """Return the baseline potential that a baseline is or names, or None if it is another one."""
    if isinstance(value, str) and (value == "backbone" or value in CALCULATORS or ":" in value):
        value = {"calculator": value}
    if not isinstance(value, Mapping) or not {"calculator", "key"} & {*value}:
        return value if isinstance(value, PotentialSettings) else None
    try:
        return PotentialSettings.model_validate(dict(value))
    except ValidationError as error:
        raise first_problem(error, PotentialSettings, "baseline") from None


def _by_number(value: Any) -> Any:
    """Return energies of isolated atoms by atomic number; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    others = PotentialSettings.model_fields
    energies = {as_number(z, "baseline", others): energy for z, energy in value.items()}
    for element, energy in energies.items():
        check_number(f"baseline[{chemical_symbols[element]!r}]", energy, -np.inf)
    return {element: float(energy) for element, energy in energies.items()}


def _parameter(group: str, default: Any, type_: str, description: str, **options: Any) -> Any:
    """Return a field; `type_` is its type as the documentation has it."""
    extra: dict[str, Any] = {"group": group, "type": type_}
    return Field(default, description=description, json_schema_extra=extra, **options)


_data, _model, _uncertainty, _resources = (
    partial(_parameter, group) for group in ("data", "model", "uncertainty", "resources")
)


class Settings(BaseModel):
    """Parameters of a model; their descriptions are those of `AtomisticModel`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: _Key = _data(
        ...,
        "str",
        "Key of the property, in ``atoms.info`` or, for atomic properties, ``atoms.arrays``. "
        "``REF_`` keys and results of calculators are found, too.",
    )
    kind: Kind = _data(
        "extensive",
        '{"extensive", "intensive", "atomic"}',
        "Sum over atoms, such as an energy; average over atoms; or a value for each atom.",
    )
    representation: AnyRepresentation | dict[str, Any] = _model(
        "auto",
        "str, dict, Soap, Backbone or Network",
        'Preset ("organic", "nmr", "inorganic", "general"), chosen by elements, periodicity and '
        'kind of property by default ("auto"), or SOAP hyper-parameters: see '
        "`qualms.features.soap`. Or a pretrained network (``sevennet``, ``mace:PATH``, "
        "``metatomic:PATH``), or an object: see `qualms.features.learned`.",
        validate_default=True,
    )
    species: tuple[int, ...] | None = _data(
        None,
        "list of str, optional",
        "Elements of an atomic property, such as H or H,C; those with labels by default.",
    )
    mixed_states: bool = _data(
        False,
        "bool",
        "Learn from structures that differ in charge or spin, which the model cannot tell apart.",
    )
    n_representatives: Literal["auto"] | Annotated[int, Field(ge=1, le=1_000_000)] = _model(
        "auto",
        'int or "auto"',
        'Number M of representative environments; ``"auto"``: chosen by out-of-bag errors, '
        "within ``effort`` and ``memory``.",
    )
    effort: Literal["fast", "default", "best"] = _model(
        "default",
        '{"fast", "default", "best"}',
        "Limits a number of representatives that is chosen: at most 1000, 3000 or 10,000 (twice as "
        "many for forces with kernels of ζ = 2, whose predictions take the same time), and five "
        "per label, within ``memory``. The number is halved while that raises the out-of-bag error "
        "by less than 5 %, or not at all if the effort is ``best``.",
    )
    basis: Literal["auto", "environments", "labels"] = _model(
        "auto",
        '{"auto", "environments", "labels"}',
        "Functions that span a model with forces: kernels with environments, or with labels "
        "(energies, and random combinations of the forces and virials of a structure), which need "
        "kernels of ζ = 2 and are more accurate, if labels are few: up to 100 structures or so.",
    )
    selection: Literal["fps", "cur", "random"] = _model(
        "fps", '{"fps", "cur", "random"}', "Method that selects representative environments."
    )
    baseline: PotentialSettings | _Linear = _model(
        "composition",
        '{"composition", "mean", "atoms", "none"}, str or dict',
        "Subtracted before learning: least squares in the composition; a constant; energies of "
        "isolated atoms, given here by element or found in the data "
        "(``config_type=isolated_atom``); nothing. Or a baseline potential, for Δ-learning: "
        "``tblite:GFN2-xTB``, ``backbone`` (the pretrained network of the representation), "
        "``package.module:callable`` (an ASE calculator), or a dict with ``calculator`` and "
        "``arguments``, or with the ``key`` of its energies in the structures.",
    )
    noise: Literal["loo"] | _Variance = _model(
        "loo",
        '"loo" or float',
        "Noise variance σ², selected by leave-one-out errors or given in the units of the target "
        "squared (per atom if the target is extensive).",
    )
    forces: _Key | None = _data(
        None, "str, optional", "Key of forces to learn together with the energy."
    )
    force_atoms: Literal["auto", "all"] | Annotated[int, Field(ge=1, le=2**53)] = _data(
        "auto",
        '"auto", "all" or int',
        "Atoms of each structure, at random, whose forces are learned; by default all, or for a "
        "network, whose derivatives take long, as many as ``effort`` allows.",
    )
    stress: _Key | None = _data(
        None,
        "str, optional",
        "Key of stresses to learn together with the energy, with ASE's sign.",
    )
    forces_noise: Literal["auto"] | _Variance = _model(
        "auto",
        '"auto" or float',
        "Noise variance of forces; selected together with that of the energy by default.",
    )
    stress_noise: Literal["auto"] | _Variance = _model(
        "auto",
        '"auto" or float',
        "Noise variance of virials per atom (Vσ/n, an energy); selected by default.",
    )
    uncertainty: Literal["both", "subsampling", "posterior"] = _uncertainty(
        "both",
        '{"both", "subsampling", "posterior"}',
        "Members of the ensemble: trained on subsamples, drawn from the posterior of the full "
        "model, or both.",
    )
    n_members: int = _uncertainty(16, "int", "Number N_R of subsampled members.", ge=2, le=10_000)
    n_posterior: Annotated[int, Field(ge=2, le=10_000)] | None = _uncertainty(
        None,
        "int, optional",
        "Number of posterior members; 64 by default. The time of forces grows with it.",
    )
    centre: Literal["auto", "full", "members"] | _Share = _uncertainty(
        "auto",
        '{"auto", "full", "members"} or float',
        "Prediction: the full model, the mean of the subsampled members, or a blend with this "
        "share of the latter; the share of smallest out-of-bag error by default.",
    )
    subsample: Annotated[int, Field(ge=2, le=2**53)] | _Fraction = _uncertainty(
        0.5, "float or int", "Size of the subsamples: below one a fraction, otherwise a number."
    )
    resample: Literal["structures", "atoms"] = _uncertainty(
        "structures",
        '{"structures", "atoms"}',
        "Unit of subsampling for atomic properties: structures, since atoms of one structure are "
        "similar, or single atoms.",
    )
    draw: Literal["blocks", "free"] = _uncertainty(
        "blocks",
        '{"blocks", "free"}',
        "Subsamples are sets of random blocks of structures, whose sums are formed once; or drawn "
        "structure by structure, as in the paper, which takes longer.",
    )
    replace: bool = _uncertainty(False, "bool", "Bootstrap instead of subsampling.")
    calibration: str = _uncertainty(
        "sources",
        f"{{{', '.join(map(json.dumps, _CALIBRATIONS))}}}",
        "Method that calibrates the standard deviation on out-of-bag points. ``auto``: the one of "
        f"{', '.join(reversed(MEMBER_METHODS))} that has the highest likelihood there.",
    )
    units: str = _data("", "str", "Units of the target, stored and displayed.", max_length=100)
    seed: int = _uncertainty(0, "int", "Random seed.", ge=0, le=2**64)
    keep_pp: bool = _uncertainty(
        True,
        "bool",
        "Store what the variance of the projected process, Eq. (3), needs: two triangular matrices "
        "of M rows.",
    )
    memory: str | float | None = _resources(
        None,
        "str or float, optional",
        'Memory limit for training, such as ``"8GB"``; three quarters of the memory by default.',
        exclude=True,
    )
    threads: int | None = _resources(
        None,
        "int, optional",
        "Number of cores; by default all that are idle and that ``OMP_NUM_THREADS`` allows.",
        exclude=True,
    )

    @property
    def per_atom(self) -> bool:
        """Whether the target is a property of atoms."""
        return self.kind == "atomic"

    @property
    def features(self) -> RepresentationSettings:
        """The representation, when it is known."""
        if isinstance(self.representation, dict):
            raise QualmsError("The representation is chosen in training: call fit first.")
        return self.representation

    @property
    def baseline_potential(self) -> PotentialSettings | None:
        """The baseline potential, if there is one."""
        return self.baseline if isinstance(self.baseline, PotentialSettings) else None

    @property
    def linear_baseline(self) -> _Linear:
        """The baseline that is linear in the composition; that of differences from a potential."""
        return self.baseline.then if isinstance(self.baseline, PotentialSettings) else self.baseline

    @property
    def n_subsampled(self) -> int:
        """Number of members that are trained on subsamples."""
        return 0 if self.uncertainty == "posterior" else self.n_members

    @property
    def n_drawn(self) -> int:
        """Number of members that are drawn from the posterior of the full model."""
        if self.uncertainty == "subsampling":
            return 0
        return self.n_posterior or 64  # p has a sampling error of 9 %

    @property
    def learns_forces(self) -> bool:
        """Whether forces or stresses are learned together with the energy."""
        return len(self.keys) > 1

    @property
    def keys(self) -> dict[str, str]:
        """Key of each quantity that is learned."""
        keys = {TARGET: self.target} | {name: getattr(self, name) for name in DERIVATIVES}
        return {quantity: key for quantity, key in keys.items() if key is not None}

    @property
    def has_forces(self) -> bool:
        """Whether the model has continuous forces, learned or not."""
        return self.kind == "extensive" and self.features.has_forces

    def units_of(self, quantity: str) -> str:
        """Return the units of a quantity; energies are per atom if the target is extensive."""
        if quantity == TARGET and self.kind != "extensive":
            return self.units
        return self._per(KINDS[quantity].per)

    def noise_units_of(self, quantity: str) -> str:
        """Return the units of the rows of a quantity, and of its noise."""
        noise_per = KINDS[quantity].noise_per
        return self._per(noise_per) if noise_per else self.units_of(quantity)

    def _per(self, what: str) -> str:
        return f"{self.units}/{what}" if self.units else f"per {what}"

    @field_validator("representation", mode="before")
    @classmethod
    def _named_representation(cls, value: Any) -> Any:
        if value == "auto":
            return {"preset": "auto"}
        if isinstance(value, dict) and value.get("preset") == "auto":
            make_soap({**value, "preset": "organic"})  # rejects what is wrong in any preset
            return value
        if (backbone := make_backbone(value)) is not None:
            return backbone
        return make_soap(value) if isinstance(value, (str, dict)) else value

    @field_validator("target", "forces", "stress", "units")
    @classmethod
    def _one_line(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and re.search(r"[\x00-\x1f\x7f-\x9f]", value):
            name = str(info.field_name)
            message = f"`{name}` is {value!r}, which has control characters."
            raise InputError(message, parameter=name)
        return value

    @field_validator("species", mode="before")
    @classmethod
    def _numbers_of_symbols(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.replace(",", " ").split()
        if value is None:
            return None
        if not isinstance(value, Iterable) or not (listed := list(value)):
            raise ValueError("one chemical element or more")
        return tuple(sorted({as_number(z, "species") for z in listed}))

    @field_validator("baseline", mode="before")
    @classmethod
    def _potential_or_energies(cls, value: Any) -> Any:
        potential = as_potential(value)
        names = ("composition", "mean", "atoms", "none")
        if isinstance(value, str) and potential is None and value not in names:
            calculators = [f"{n}:{m}" for n, ms in CALCULATORS.items() for m in ms or ("",)]
            baselines = (
                *names,
                "backbone",
                *(calculator.rstrip(":") for calculator in calculators),
            )
            raise InputError(
                f"There is no baseline {value!r}. Use one of {', '.join(baselines)}, or the import "
                f"path of a calculator, package.module:callable.{did_you_mean(value, baselines)}",
                parameter="baseline",
            )
        return _by_number(value) if potential is None else potential

    @field_validator("calibration", mode="before")
    @classmethod
    def _known_calibration(cls, value: Any) -> Any:
        name = "none" if value is None else value
        if not isinstance(name, str) or name not in _CALIBRATIONS:
            raise ValueError(f"one of {', '.join(map(repr, _CALIBRATIONS))}")
        return name

    @field_validator("memory", "threads", mode="before")
    @classmethod
    def _valid_resources(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:  # cores are counted when a model is made
            (parse_memory if info.field_name == "memory" else default_threads)(value)
        return value


def as_number(species: str | int, parameter: str, others: Iterable[str] = ()) -> int:
    """Return the atomic number of a chemical symbol or number.

    Parameters
    ----------
    species : str or int
    parameter : str
        Name of the parameter that has the symbol, for the error.
    others : iterable of str
        Words that the parameter may have as well.
    """
    text = str(species).strip()
    if text.isdigit() and 0 < int(text) < len(chemical_symbols):
        return int(text)
    if atomic_numbers.get(text, 0) == 0:
        message = f"{species!r} in `{parameter}` is not a chemical element."
        raise InputError(message + did_you_mean(species, others), parameter=parameter)
    return int(atomic_numbers[text])


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Validate parameters; an `InputError` names the first that is wrong."""
    try:
        settings = Settings.model_validate(dict(values))
    except ValidationError as error:
        raise first_problem(error, Settings) from None
    if isinstance(settings.representation, Backbone):  # given by a user, and not by a file
        trusted = settings.representation.trusting()
        settings = settings.model_copy(update={"representation": trusted})
    if settings.species is not None and settings.kind != "atomic":
        raise InputError(
            f"`species` are the elements of a property of atoms; this one is {settings.kind}. Use "
            "`kind='atomic'`, or leave out `species`.",
            parameter="species",
        )
    if settings.resample == "atoms" and settings.kind != "atomic":
        raise InputError(
            f"`resample='atoms'` needs labels of atoms; this property is {settings.kind}. Use "
            "`kind='atomic'` or `resample='structures'`.",
            parameter="resample",
        )
    _check_members(settings)
    if settings.baseline_potential is not None:
        _check_potential(settings, settings.baseline_potential)
    if settings.force_atoms != "auto" and settings.forces is None:
        raise InputError(
            f"`force_atoms={settings.force_atoms!r}` has no meaning, since no `forces` are "
            "learned. Leave it out, or name their key.",
            parameter="force_atoms",
        )
    for name in DERIVATIVES:
        noise = getattr(settings, KINDS[name].noise)
        if noise != "auto" and getattr(settings, name) is None:
            raise InputError(
                f"`{name}_noise={noise!r}` has no meaning, since no `{name}` is learned. Leave it "
                "out, or name the key.",
                parameter=f"{name}_noise",
            )
    if settings.learns_forces and settings.kind != "extensive":
        name = [*settings.keys][1]
        raise InputError(
            f"`{name}` is a derivative of an energy, which is extensive. Leave out `{name}`, or "
            f"`kind={settings.kind!r}`.",
            parameter=name,
        )
    return _with_forces(settings)


def _check_members(settings: Settings) -> None:
    """Reject parameters of members that the model does not have, and too few members."""
    unused = {
        "posterior": ("n_members", "subsample", "draw", "replace", "centre"),
        "subsampling": ("n_posterior",),
        "both": (),
    }
    for name in unused[settings.uncertainty]:
        value, default = getattr(settings, name), Settings.model_fields[name].default
        if value not in (default, "full"):
            raise InputError(
                f"`{name}={value!r}` has no meaning with `uncertainty={settings.uncertainty!r}`, "
                "which has no such members. Leave it out.",
                parameter=name,
            )
    few = settings.n_subsampled and settings.n_members < MIN_ABSENT
    if few and settings.calibration != "none":
        raise InputError(
            f"`n_members={settings.n_members}` is too few to calibrate on: {MIN_ABSENT} are needed "
            "at least, unless `calibration='none'`.",
            parameter="n_members",
        )


def _check_potential(settings: Settings, potential: PotentialSettings) -> None:
    """Reject a baseline potential of a property that is no energy, or in unknown units."""
    if settings.kind != "extensive":
        raise InputError(
            f"The baseline {potential.name} is a potential of energies; the target is "
            f"{settings.kind}. Use 'none', 'mean' or 'composition' as `baseline`.",
            parameter="baseline",
        )
    keys = {settings.keys[name]: potential.key_of(name) for name in settings.keys}
    if any(target == key for target, key in keys.items()):
        raise InputError(
            f"The baseline has the {potential.name}, which is that of the labels. Name the key of "
            "other energies.",
            parameter="baseline",
        )
    if potential.key is None and settings.units not in ("", *ENERGIES):
        raise InputError(
            f"Energies of the baseline {potential.name} cannot be converted to "
            f"`units={settings.units!r}`. Use {', '.join(ENERGIES)}."
            f"{did_you_mean(settings.units, ENERGIES)}",
            parameter="units",
        )


def with_representation(
    settings: Settings, species: Sequence[int], *, periodic: bool
) -> tuple[Settings, str]:
    """Return settings with the representation for some species, and what was chosen and why.

    The text is empty if there was nothing to choose.

    Parameters
    ----------
    settings : Settings
    species : sequence of int
        Atomic numbers in the training set.
    periodic : bool
        Whether most structures are periodic.
    """
    features, chosen = settings.representation, ""
    if isinstance(features, dict):
        name, reason = choose_preset(species, settings.kind, periodic=periodic)
        features = make_soap({**features, "preset": name})
        chosen = f"{name} (chosen for {reason})"
    update = {"representation": features.resolved(species)}
    return _with_forces(settings.model_copy(update=update)), chosen


def _with_forces(settings: Settings) -> Settings:
    """Return settings whose features have continuous derivatives, if these are needed."""
    if isinstance(settings.representation, dict) or not settings.learns_forces:
        return settings
    smooth = settings.representation.with_forces()
    return settings.model_copy(update={"representation": smooth})


#: What messages of pydantic have around the value that is expected.
_PYDANTIC = re.compile(r"^Value error, |^Input should be |\bvalid |, unable to .*")


def first_problem(error: ValidationError, kind: type[BaseModel], parameter: str = "") -> InputError:
    """Return an error about the first field that is wrong, of a class, and its parameter."""
    problems = error.errors()
    problem = problems[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return cause
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    what = f"entry of `{parameter}`" if parameter else "parameter"
    parameter = parameter or name
    if problem["type"] == "extra_forbidden":
        parameters = [*kind.model_fields]
        similar = did_you_mean(name, parameters) or f" There are {', '.join(parameters)}."
        return InputError(f"There is no {what} {name!r}.{similar}", parameter=parameter)
    # A value that may be of several types has a problem with each of them.
    expected = [
        _PYDANTIC.sub("", other["msg"])
        for other in problems
        if other["loc"][:1] == problem["loc"][:1]
    ]
    if problem["type"] == "missing":
        return InputError(f"`{name}` is missing; it is required.", parameter=parameter)
    for words, better in (
        ("String should have", "a string of"),
        ("Value should have", "a list of"),
        ("Tuple should have", "a list of"),
        ("a integer", "an integer"),
    ):
        expected = [text.replace(words, better) for text in expected]
    choices = re.findall(r"'([^']*)'", " ".join(expected))
    value = problem["input"]
    return InputError(
        f"`{name}` cannot be {value!r}; it must be {', or '.join(dict.fromkeys(expected))}."
        f"{did_you_mean(value, choices) if isinstance(value, str) else ''}",
        parameter=parameter,
    )


def signature() -> inspect.Signature:
    """Return the signature of a constructor that takes these parameters."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                kinds[name not in ("target", "kind")],
                default=inspect.Parameter.empty if field.is_required() else field.default,
            )
            for name, field in Settings.model_fields.items()
        ]
    )


def parameter_list() -> str:
    """Return the parameters as a section of a numpydoc docstring, indented by four spaces."""
    lines = []
    for name, field in Settings.model_fields.items():
        extra: Any = field.json_schema_extra
        text = textwrap.wrap(field.description or "", 88)
        lines += [f"    {name} : {extra['type']}", *(f"        {line}" for line in text)]
    return "\n".join(lines)


def parse_memory(memory: str | float | None) -> float:
    """Return a limit in bytes, given as ``"8GB"``, ``"500 MB"``, ``"16GiB"``, bytes or None."""
    if memory is None:
        return 0.75 * float(psutil.virtual_memory().total)
    size: object = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        if match is not None:
            power = " kmgt".index(match[2] or " ")
            size = float(match[1]) * (1024.0 if match[3] else 1000.0) ** power
    if not isinstance(size, (int, float)) or isinstance(size, bool) or not 0 < size < float("inf"):
        raise InputError(
            f"`memory` cannot be {memory!r}: it is a positive number of bytes, or a size such as "
            "'8GB'.",
            parameter="memory",
        )
    return float(size)
