"""``qualms train``: its options are the parameters of `qualms.atomistic.settings.Settings`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.atomistic.settings import Settings
from qualms.cli.cluster import open_workers
from qualms.cli.options import (
    FORMATS,
    BaselineKey,
    Cluster,
    ClusterConfig,
    Force,
    Json,
    Quiet,
    SkipFailed,
    baseline_of,
    read_yaml,
    with_options,
)
from qualms.cli.terminal import Terminal, naming_files
from qualms.errors import InputError, did_you_mean, warn
from qualms.features.learned import make_backbone

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.evaluation import Evaluation

#: Entries of the configuration file beside the fields of `Settings`: parameters of the command.
ENTRIES = {
    "data": "Labelled structures: a file, or a list of files.",
    "output": "Model file to write (.safetensors).",
    "group_key": "Key of group labels; structures of one group are never split. By default, blocks "
    "of consecutive frames of trajectories are groups, if there are any; none: no groups.",
    "test": "Labelled structures to evaluate the model on: a file, or a list of files.",
}
#: Fields of `Settings` without an option: seldom needed, or flags of the command (kind).
IN_FILE = ("kind", "force_atoms", "n_posterior", "resample", "draw", "replace", "keep_pp")


def _option(name: str) -> Any:
    """Return the option for a field: its help, panel and possible values are those of the field."""
    field = Settings.model_fields[name]
    extra: Any = field.json_schema_extra
    # The type as in the documentation, such as {"fps", "cur", "random"} or float.
    values = re.sub('[{}"]', "", extra["type"]).replace("float", "a number")
    values = values.replace("int", "a number").replace("dict", "JSON").replace("str", "a name")
    text = (field.description or "").replace("``", "")
    if "{" in extra["type"] or "auto" in extra["type"]:
        text += f" Values: {values}."
    if field.annotation is not bool and field.default not in (None, "") and not field.is_required():
        text += f" Default: {field.default}."
    names = {"forces": "forces-key", "stress": "stress-key"}
    option = Option(
        f"--{names.get(name, name.removeprefix('n_').replace('_', '-'))}",
        help=text,
        show_default=False,
        rich_help_panel=extra["group"].capitalize(),
    )
    types: dict[Any, type] = {int: int, int | None: int, bool: bool}
    type_ = types.get(field.annotation, str)
    return Annotated[type_ | None, option]


@with_options({name: _option(name) for name in Settings.model_fields if name not in IN_FILE})
def train(
    data: Annotated[
        list[Path] | None, Argument(metavar="DATA", help=f"Labelled structures: {FORMATS}.")
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help=ENTRIES["output"])] = None,
    config: Annotated[
        Path | None,
        Option(
            help="YAML file with settings, as `qualms template` prints it; options override it. It "
            "may also have entries for data, output, group_key and test.",
        ),
    ] = None,
    intensive: Annotated[
        bool, Option("--intensive", help="The target is an average.", rich_help_panel="Data")
    ] = False,
    per_atom_target: Annotated[
        bool,
        Option("--per-atom-target", help="The target is a value per atom.", rich_help_panel="Data"),
    ] = False,
    group_key: Annotated[
        str | None, Option(help=ENTRIES["group_key"], rich_help_panel="Data")
    ] = None,
    test: Annotated[
        list[Path] | None,
        Option(
            metavar="PATH",
            help="Labelled structures to evaluate the model on; for several files, once for each.",
            rich_help_panel="Data",
        ),
    ] = None,
    cutoff: Annotated[
        float | None,
        Option(
            help="Cutoff of the environments in Å; by default that of the representation.",
            rich_help_panel="Model",
        ),
    ] = None,
    baseline_key: BaselineKey = None,
    skip_failed: SkipFailed = False,
    cluster: Cluster = None,
    cluster_config: ClusterConfig = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Run ``qualms train``."""
    from qualms.atomistic.census import AUTO
    from qualms.atomistic.evaluation import evaluate, find_references, remarks_about
    from qualms.atomistic.settings import parse_memory
    from qualms.atomistic.structures import (
        FrameFiles,
        Places,
        file_of,
        read_files,
        readable,
        species_of,
    )
    from qualms.io.files import check_not_input, check_output, written_together
    from qualms.progress import Stages
    from qualms.report.assessment import assess
    from qualms.report.tables import score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    if intensive and per_atom_target:
        raise InputError(
            "--intensive and --per-atom-target exclude each other.", parameter="--intensive"
        )
    settings["kind"] = "atomic" if per_atom_target else "intensive" if intensive else None
    settings["baseline"] = baseline_of(settings["baseline"], baseline_key)
    settings |= {"data": data or None, "output": output, "group_key": group_key, "test": test}
    options = {name: value for name, value in settings.items() if value is not None}
    model, files = _model_of(config, options, cutoff)
    data, test, output = files["data"], files["test"], files["output"]
    summary = output.with_suffix(".json")
    for path in (output, summary):
        check_not_input(path, *map(file_of, (*data, *test)), config)
        check_output(path, force=force)
    # Errors in files are found before workers are started, or the training is.
    held_out, test_files = read_files(test) if test else ([], None)
    # Structures take about ten times the memory of their file; if that is more than half of the
    # limit, they are read part by part.
    size = sum(file.stat().st_size for file in map(file_of, data) if file.is_file())
    is_large = 20 * size > parse_memory(model.settings.memory)
    frames: Any
    places: FrameFiles | Places
    if cluster is not None or (is_large and readable(data)):
        frames = places = FrameFiles.open(data)
    else:
        frames, places = read_files(data)
    if test_files is not None:
        species = species_of(held_out if isinstance(frames, FrameFiles) else frames)
        with naming_files(test_files):
            find_references(held_out, model.settings, species, unknown_species=None)
    evaluations: dict[str, Evaluation] = {}
    group_key = files["group_key"] or AUTO
    with open_workers(cluster, cluster_config, terminal) as executor:
        with naming_files(places):
            model.fit(
                frames,
                groups=None if group_key.lower() == "none" else group_key,
                progress=terminal.progress() or False,
                skip_failed=skip_failed,
                executor=executor,
            )
        document = summary_document(model)
        with written_together():
            model.save(output, force=force)
            _write_summary(summary, document, force=force)
        if test_files is not None:
            stages = Stages(terminal.progress())
            with naming_files(test_files):
                evaluations = evaluate(
                    model,
                    held_out,
                    unknown_species=None,
                    skip_failed=skip_failed,
                    stages=stages,
                    executor=executor,
                )
            for remark in remarks_about(model, evaluations):
                terminal.info(remark)
    parts: list[Any] = []
    for quantity, evaluation in evaluations.items():
        assessment, target = assess(evaluation), evaluation.target
        key = "test" if quantity == "energy" else f"{quantity}_test"
        document[key] = score_records(evaluation.scores)
        document[f"{quantity}_assessment"] = assessment.document()
        parts.append(
            score_table(evaluation.scores, units=evaluation.units, title=f"Test: {target}")
        )
        parts += [f"{target}: {assessment.sentence}", *assessment.details]
    if evaluations:
        _write_summary(summary, document, force=True)
    terminal.result(model.summary(), *parts, document=document)
    terminal.info(f"Wrote {output} and {summary}.")


def _write_summary(path: Path, document: Mapping[str, Any], *, force: bool) -> None:
    from qualms.io.files import atomic_output

    with atomic_output(path, force=force, mode="w") as file:
        json.dump(document, file, indent=2)


def summary_document(model: AtomisticModel) -> dict[str, Any]:
    """Return the description of a model as a JSON document."""
    return {
        "settings": model.settings.model_dump(mode="json"),
        "training": model.record.model_dump(mode="json"),
        "calibrations": {
            quantity: {
                "method": of.calibration.method,
                **of.calibration.parameters(),
                "isotropy": of.isotropy,
                "elements": dict(of.elements),
            }
            for quantity, of in model.fitted.calibrations.items()
        },
        "provenance": model.provenance.model_dump(mode="json"),
    }


def _model_of(
    config: Path | None, options: dict[str, Any], cutoff: float | None
) -> tuple[AtomisticModel, dict[str, Any]]:
    """Return the untrained model, and its `ENTRIES`, of configuration file and options.

    Options override the file. Errors of entries of the file begin with its name.
    """
    from qualms.atomistic.model import AtomisticModel
    from qualms.io.predictions import check_name

    names = [*ENTRIES, *Settings.model_fields]
    entries = {} if config is None else read_yaml(config, "--config")
    elsewhere = {"validation": "test", "valid_file": "test", "test_file": "test"}
    for name in entries:
        if name not in names:
            similar = did_you_mean(elsewhere.get(name, name), names)
            raise InputError(
                f"{config} has an entry {name!r}, which is not a setting."
                + (similar or f" The settings are {', '.join(names)}."),
                parameter="--config",
            )
    run = entries | options
    if cutoff is not None:
        representation = run.get("representation", "auto")
        if make_backbone(representation) is not None:
            raise InputError(
                f"--cutoff {cutoff} cannot be used: the cutoff of a network cannot be changed.",
                parameter="--cutoff",
            )
        scales = representation if isinstance(representation, dict) else {"preset": representation}
        run["representation"] = options["representation"] = {**scales, "cutoff": cutoff}
    if run.get("target") is None:
        raise InputError("--target, the key of the property, is missing.", parameter="--target")
    files = {name: run.pop(name, None) for name in ENTRIES}
    try:
        for name in ("data", "test"):
            files[name] = _paths(name, files[name])
        if not isinstance(files["group_key"], (str, NoneType)):
            raise InputError(
                f"`group_key` is {files['group_key']!r}, not the name of a key.",
                parameter="group_key",
            )
        model = AtomisticModel(**run)
    except InputError as error:
        name = error.parameter.partition("[")[0]
        name = name if name in names else "representation"  # of which it is a hyper-parameter
        if name in entries and name not in options:
            error.args = (f"{config}: {error}".replace("`", ""),)
        raise
    if not files["data"]:
        raise InputError(
            "There is nothing to train on: name files with labelled structures, or write `data` in "
            "the configuration file.",
            parameter="DATA",
        )
    output = files["output"]
    if not isinstance(output, (str, Path)) or Path(output).suffix != ".safetensors":
        raise InputError(
            "--output, the model file to write, is missing."
            if output is None
            else f"--output {output} does not end in .safetensors, as model files do.",
            parameter="--output",
        )
    files["output"] = Path(output)
    check_name("target", model.settings.target)
    if 1 <= model.settings.subsample < 10:
        warn(
            f"--subsample {model.settings.subsample} is a number: members are trained on so many "
            "structures each. A fraction is less than one."
        )
    return model, files


def _paths(name: str, value: Any) -> list[Path]:
    """Return the files of an entry: one, several or none."""
    files = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(file, (str, Path)) for file in files):
        raise InputError(f"`{name}` is {value!r}, not a file or a list of files.", parameter=name)
    return [Path(file) for file in files]
