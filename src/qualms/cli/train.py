"""``qualms train``: from labelled structures to a calibrated model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from qualms.atomistic.evaluation import (
    Evaluation,
    evaluate,
    evaluate_derivatives,
    labels_to_judge,
    unjudged,
)
from qualms.atomistic.labels import labelled
from qualms.atomistic.memory import Plan
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species, check_structures, read_frames, species_of
from qualms.atomistic.training_set import TrainingSet
from qualms.cli._common import Force, Json, Quiet, Seed, Terminal, Threads
from qualms.errors import InputError
from qualms.io.files import atomic_output, check_output, refuse_input
from qualms.io.predictions import check_name
from qualms.progress import Stages
from qualms.report.tables import score_records, score_table

_DATA = "Data"
_MODEL = "Model"
_RUN = "Run"
#: Atoms times representatives: about half a minute on two cores.
_LONG = 2e8
_NOTHING_TO_RESUME = "No run was interrupted here; this one starts from the beginning."
_STARTED_ANEW = "What an interrupted run has kept here is not used: --resume would go on with it."


def train(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Structures: extended XYZ.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Model file to write (.safetensors).")
    ],
    target: Annotated[
        str | None, typer.Option(help="Key of the target in the file.", rich_help_panel=_DATA)
    ] = None,
    intensive: Annotated[
        bool, typer.Option("--intensive", help="An average over atoms.", rich_help_panel=_DATA)
    ] = False,
    per_atom_target: Annotated[
        bool,
        typer.Option("--per-atom-target", help="A value for each atom.", rich_help_panel=_DATA),
    ] = False,
    species: Annotated[
        str | None,
        typer.Option(help="Elements of a per-atom target: H or H,C.", rich_help_panel=_DATA),
    ] = None,
    forces: Annotated[
        str | None,
        typer.Option(help="Key of forces to learn together with an energy.", rich_help_panel=_DATA),
    ] = None,
    stress: Annotated[
        str | None, typer.Option(help="Key of stresses, in ASE's sign.", rich_help_panel=_DATA)
    ] = None,
    units: Annotated[
        str | None, typer.Option(help="Units of the target.", rich_help_panel=_DATA)
    ] = None,
    group_key: Annotated[
        str | None,
        typer.Option(help="Key of labels: alike, in or out together.", rich_help_panel=_DATA),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Structures to score.", rich_help_panel=_DATA)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with settings of AtomisticModel.", rich_help_panel=_MODEL),
    ] = None,
    representation: Annotated[
        str | None, typer.Option(help="organic, nmr or general.", rich_help_panel=_MODEL)
    ] = None,
    cutoff: Annotated[
        float | None, typer.Option(help="Cutoff in Å.", rich_help_panel=_MODEL)
    ] = None,
    representatives: Annotated[
        int | None, typer.Option(help="M, 1000 by default.", rich_help_panel=_MODEL)
    ] = None,
    selection: Annotated[
        str | None, typer.Option(help="fps, cur or random.", rich_help_panel=_MODEL)
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="composition, mean, atoms or none.", rich_help_panel=_MODEL),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(help="loo, evidence, or the variance of the target.", rich_help_panel=_MODEL),
    ] = None,
    forces_noise: Annotated[
        float | None,
        typer.Option(help="Variance of forces; found by default.", rich_help_panel=_MODEL),
    ] = None,
    stress_noise: Annotated[
        float | None,
        typer.Option(
            help="Variance of virials per atom; found by default.", rich_help_panel=_MODEL
        ),
    ] = None,
    members: Annotated[
        int | None, typer.Option(help="N_R, 16 by default.", rich_help_panel=_MODEL)
    ] = None,
    subsample: Annotated[
        float | None,
        typer.Option(help="Fraction of structures in a member.", rich_help_panel=_MODEL),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="student, shrinkage, linear, power or none.", rich_help_panel=_MODEL),
    ] = None,
    seed: Seed = None,
    memory: Annotated[
        str | None, typer.Option(help="Limit, such as 8GB.", rich_help_panel=_RUN)
    ] = None,
    threads: Threads = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.", rich_help_panel=_RUN)
    ] = False,
    checkpoint: Annotated[
        bool | None,
        typer.Option(
            help="Keep finished stages on disk until the end; by default, if they took long.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model on labelled structures, calibrate it internally, and write it."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    given = {
        "target": target,
        "kind": _kind(intensive, per_atom_target),
        "species": species,
        "forces": forces,
        "stress": stress,
        "units": units,
        "representation": representation,
        "n_representatives": representatives,
        "selection": selection,
        "baseline": baseline,
        "noise": noise,
        "forces_noise": forces_noise,
        "stress_noise": stress_noise,
        "n_members": members,
        "subsample": subsample,
        "calibration": calibration,
        "seed": seed,
        "memory": memory,
        "threads": threads,
    }
    model = AtomisticModel(**_settings(config, given, cutoff))
    check_name("target", model.settings.target)
    places = _Places(output)
    places.check(data, validation, config, force=force)
    frames = read_frames(data)
    to_validate = None if validation is None else _validation(validation, model, species_of(frames))
    groups = None if group_key is None else _groups(frames, group_key)
    if places.checkpoint.exists() != resume:
        terminal.say(_NOTHING_TO_RESUME if resume else _STARTED_ANEW)
    keep = resume or (_is_long(frames, model) if checkpoint is None else checkpoint)
    model.fit(
        frames,
        groups,
        checkpoint=places.checkpoint if keep else None,
        resume=resume,
        keep_checkpoint=True,
        progress=terminal.progress() or False,
        on_plan=lambda plan, found: terminal.say(_announce(plan, found, model.settings)),
    )
    model.save(output, force=force)
    if keep:
        shutil.rmtree(places.checkpoint, ignore_errors=True)
    parts, document = _results(model, to_validate, terminal)
    with atomic_output(places.summary, force=force, mode="w") as file:
        json.dump(document, file, indent=2)
    terminal.result(*parts, document=document)
    terminal.say(f"Wrote {output} and {places.summary}.")


def _results(
    model: AtomisticModel, to_validate: list[Any] | None, terminal: Terminal
) -> tuple[list[Any], dict[str, Any]]:
    """Return what is printed of a trained model, and what is written of it."""
    parts: list[Any] = [model.summary()]
    if to_validate is None:
        return parts, summary_document(model, None, {})
    evaluation = evaluate(model, to_validate, stages=Stages(terminal.progress()))
    parts.append(score_table(evaluation.rows, units=evaluation.units, title="Validation"))
    derived = evaluate_derivatives(model, to_validate, stages=Stages(terminal.progress()))
    for name, found in derived.items():
        parts.append(score_table(found.rows, units=found.units, title=name.capitalize()))
    for text in unjudged(model, derived):
        terminal.say(text)
    return parts, summary_document(model, evaluation, derived)


@dataclass(frozen=True)
class _Places:
    """Where a run writes, by the name of the model file."""

    model: Path

    @property
    def summary(self) -> Path:
        """What is known of the model, as JSON."""
        return self.model.with_suffix(".json")

    @property
    def checkpoint(self) -> Path:
        """Finished stages, until the run has ended."""
        return self.model.with_name(self.model.name + ".checkpoint")

    def check(self, *inputs: Path | None, force: bool) -> None:
        """Refuse to replace what is read, or, unless forced, anything."""
        if self.summary == self.model:
            raise InputError(
                "--output", str(self.model), "another suffix", "The summary is a .json file."
            )
        for path in (self.model, self.summary):
            refuse_input(path, *inputs)
            check_output(path, force=force)


def _is_long(frames: list[Any], model: AtomisticModel) -> bool:
    """Whether a run may take so long that one would rather resume than repeat it."""
    return sum(map(len, frames)) * model.settings.n_representatives > _LONG


def summary_document(
    model: AtomisticModel,
    evaluation: Evaluation | None = None,
    derived: Mapping[str, Evaluation] | None = None,
) -> dict[str, Any]:
    """Return what is known of a model as a JSON document."""
    fitted = model.fitted
    calibrations, for_forces, for_stress = (
        {name: {"method": c.method, **c.parameters()} for name, c in found.items()}
        for found in (fitted.calibrations, fitted.forces_calibrations, fitted.stress_calibrations)
    )
    document: dict[str, Any] = {
        "settings": model.settings.model_dump(mode="json"),
        "training": model.record.model_dump(mode="json"),
        "calibrations": calibrations,
        "provenance": model.provenance.model_dump(mode="json"),
    }
    if for_forces:
        document["forces_calibrations"] = for_forces
    if for_stress:
        document["stress_calibrations"] = for_stress
    if evaluation is not None:
        document["validation"] = score_records(evaluation.rows)
    for name, found in (derived or {}).items():
        document[f"{name}_validation"] = score_records(found.rows)
    return document


def _kind(intensive: bool, per_atom: bool) -> str | None:
    if intensive and per_atom:
        raise InputError("--intensive", "with --per-atom-target", "one of the two")
    return "atomic" if per_atom else "intensive" if intensive else None


def _validation(path: Path, model: AtomisticModel, known: list[int]) -> list[Any]:
    """Read structures with labels; whatever is wrong with them is said before the training."""
    frames, settings = read_frames(path), model.settings
    found = labelled(frames, settings.target, settings.kind, settings.species)
    judged = {*found.frames.tolist()}.union(*labels_to_judge(settings, frames))
    for i in sorted(judged):
        check_structures([frames[i]], first=i)
        check_species([frames[i]], known, first=i)
    return frames


def _settings(config: Path | None, given: dict[str, Any], cutoff: float | None) -> dict[str, Any]:
    """Return the settings of a file, with those of the command line in their place."""
    settings = {} if config is None else _read_config(config)
    settings |= {name: value for name, value in given.items() if value is not None}
    if cutoff is not None:
        chosen = settings.get("representation", "organic")
        known = chosen if isinstance(chosen, dict) else {"preset": chosen}
        settings["representation"] = {**known, "cutoff": cutoff}
    if "target" not in settings:
        raise InputError("--target", None, "the key of the property to learn")
    unknown = sorted(set(settings) - _KNOWN)
    if unknown:
        raise InputError(str(config), unknown[0], f"one of {', '.join(sorted(_KNOWN))}")
    return settings


_KNOWN = frozenset(
    name for name in AtomisticModel.__init__.__annotations__ if name not in ("return", "self")
)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("--config", str(path), f"a readable YAML file ({error})") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise InputError("--config", str(path), "a mapping of settings to values")
    return settings


def _groups(frames: list[Any], key: str) -> list[str]:
    missing = [i for i, atoms in enumerate(frames) if key not in atoms.info]
    if missing:
        present = sorted({name for atoms in frames for name in atoms.info})
        raise InputError(
            "--group-key",
            repr(key),
            f"a key of every structure (missing in frames[{missing[0]}])",
            f"Keys present: {', '.join(map(str, present)) or 'none'}.",
        )
    return [str(atoms.info[key]) for atoms in frames]


def _announce(plan: Plan, data: TrainingSet, settings: Settings) -> str:
    """Say what is missing, of what was asked for, and what the run will take."""
    lines = [f"{data.n_unlabelled} without a label are skipped."] if data.n_unlabelled else []
    if data.mechanics is not None:
        without = {
            "forces": data.mechanics.n_without if settings.forces is not None else 0,
            "stress": data.mechanics.n_without_virial if settings.stress is not None else 0,
        }
        n = len(data.frames)
        lines += [
            f"{lacking} of {n} have no {name}." for name, lacking in without.items() if lacking
        ]
    return "\n".join([*lines, plan.describe()])
