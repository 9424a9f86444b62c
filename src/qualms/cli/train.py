"""``qualms train``: its options are the parameters of `qualms.atomistic.settings.Settings`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.atomistic.settings import Settings
from qualms.cli._common import (
    FORMATS,
    BaselineKey,
    Force,
    Json,
    Quiet,
    SkipFailed,
    Terminal,
    baseline_of,
    read_yaml,
    remarks_about,
)
from qualms.cli.cluster import Cluster, ClusterConfig, Scheduler, SchedulerFile, open_workers
from qualms.cli.verb import Located, naming_files
from qualms.errors import InputError, did_you_mean
from qualms.features.learned import make_backbone

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.evaluation import Evaluation

_DATA, _MODEL = "Data", "Model"
#: Subsamples of fewer structures were probably meant to be a fraction.
_SMALL = 10
#: Memory of structures, relative to the size of their file; those that would take more than half of
#: the limit are read part by part.
_EXPANSION, _SHARE = 10, 0.5
#: Entries of the configuration file beside the fields of `Settings`: parameters of the command.
ENTRIES = {
    "data": "Labelled structures: a file, or a list of files.",
    "output": "Model file to write (.safetensors).",
    "group_key": "Key of group labels; structures of one group are never split.",
    "test": "Labelled structures to evaluate the model on: a file, or a list of files.",
}
#: Names of entries in other programs.
_SYNONYMS = {"validation": "test", "valid_file": "test", "test_file": "test", "train_file": "data"}
#: Options whose names are not those of their fields.
_NAMES = {"forces": "forces-key", "stress": "stress-key"}
#: Parameters of the command in the order of the help. Those that `train` does not have itself are
#: made from the fields of `Settings`; its other fields can be set in the configuration file.
_ORDER = (
    *("data", "output", "config"),
    *("target", "forces", "stress", "units", "intensive", "per_atom_target", "species"),
    *("mixed_states",),
    *("group_key", "test"),
    *("representation", "cutoff", "n_representatives", "effort", "selection"),
    *("baseline", "baseline_key", "skip_failed"),
    *("noise", "forces_noise", "stress_noise"),
    *("uncertainty", "n_members", "subsample", "centre", "calibration", "seed"),
    *("memory", "threads", "scheduler", "scheduler_file", "cluster", "cluster_config"),
    *("force", "quiet", "as_json"),
)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace ``**settings`` of a command by one option per parameter of `Settings`."""
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [own.get(name) or _option(name) for name in _ORDER]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return command


def _option(name: str) -> inspect.Parameter:
    """Return the option for a field: its help, panel and possible values are those of the field."""
    field = Settings.model_fields[name]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    # The type as in the documentation, such as {"fps", "cur", "random"} or float.
    type_name = str(extra.get("type", "")).replace('"', "")
    values = re.sub("[{}]", "", type_name).replace("float", "a number").replace("int", "a number")
    text = (field.description or "").replace("``", "")
    if "{" in type_name or "auto" in type_name:
        text += f" Values: {values.replace('dict', 'JSON').replace('str', 'a name')}."
    if field.annotation is not bool and field.default not in (None, "") and not field.is_required():
        text += f" Default: {field.default}."
    option = Option(
        f"--{_NAMES.get(name, name.removeprefix('n_').replace('_', '-'))}",
        help=text,
        show_default=False,
        rich_help_panel=str(extra.get("group", _MODEL)).capitalize(),
    )
    types: dict[Any, type] = {int: int, int | None: int, bool: bool}
    type_ = types.get(field.annotation, str)
    annotation = Annotated[type_ | None, option]  # type: ignore[valid-type]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


@_with_settings
def train(
    data: Annotated[
        list[Path] | None,
        Argument(metavar="DATA", help=f"Labelled structures: {FORMATS}."),
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
        bool, Option("--intensive", help="The target is an average.", rich_help_panel=_DATA)
    ] = False,
    per_atom_target: Annotated[
        bool,
        Option("--per-atom-target", help="The target is a value per atom.", rich_help_panel=_DATA),
    ] = False,
    group_key: Annotated[
        str | None,
        Option(help=ENTRIES["group_key"], rich_help_panel=_DATA),
    ] = None,
    test: Annotated[
        list[Path] | None,
        Option(
            metavar="PATH",
            help="Labelled structures to evaluate the model on; for several files, once for each.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    cutoff: Annotated[
        float | None,
        Option(
            help="Cutoff of the environments in Å; by default that of the representation.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    baseline_key: BaselineKey = None,
    skip_failed: SkipFailed = False,
    scheduler: Scheduler = None,
    scheduler_file: SchedulerFile = None,
    cluster: Cluster = None,
    cluster_config: ClusterConfig = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Run ``qualms train``."""
    from qualms.atomistic.evaluation import evaluate, find_references
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.settings import parse_memory
    from qualms.atomistic.structures import (
        FrameFiles,
        file_of,
        read_files,
        readable,
        species_of,
    )
    from qualms.io.files import check_not_input, check_output, written_together
    from qualms.io.predictions import check_name
    from qualms.progress import Stages
    from qualms.report.assessment import assess
    from qualms.report.tables import score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    if intensive and per_atom_target:
        raise InputError(
            "--intensive and --per-atom-target exclude each other.", parameter="--intensive"
        )
    settings["kind"] = "atomic" if per_atom_target else "intensive" if intensive else None
    settings["baseline"] = baseline_of(settings["baseline"], baseline_key)
    settings |= {"data": data or None, "output": output, "group_key": group_key, "test": test}
    entries = {} if config is None else _entries(config)
    run = _settings(entries, settings, cutoff)
    with _naming_file(config, [name for name in run if run[name] is entries.get(name)]):
        data, test = (_paths(name, run.pop(name, None)) for name in ("data", "test"))
        output, group_key = run.pop("output", None), run.pop("group_key", None)
        if not isinstance(group_key, (str, NoneType)):
            raise InputError(
                f"`group_key` is {group_key!r}, not the name of a key.", parameter="group_key"
            )
        model = AtomisticModel(**run)
    if not data:
        raise InputError(
            "There is nothing to train on: name files with labelled structures, or write `data` in "
            "the configuration file.",
            parameter="DATA",
        )
    if not isinstance(output, (str, Path)):
        raise InputError("--output, the model file to write, is missing.", parameter="--output")
    output = Path(output)
    check_name("target", model.settings.target)
    size = model.settings.subsample
    if size >= 1 and size < _SMALL:
        terminal.warn(
            f"--subsample {size} is a number: members are trained on {size} structures each. A "
            "fraction is less than one."
        )
    if output.suffix != ".safetensors":
        raise InputError(
            f"--output {output} does not end in .safetensors, as model files do.",
            parameter="--output",
        )
    summary = output.with_suffix(".json")
    for path in (output, summary):
        check_not_input(path, *map(file_of, (*data, *test)), config)
        check_output(path, force=force)
    # Errors in files are found before workers are started, or the training is.
    held_out, test_files = read_files(test) if test else ([], None)
    large = sum(file.stat().st_size for file in map(file_of, data) if file.is_file()) * _EXPANSION
    on_workers = any(option is not None for option in (scheduler, scheduler_file, cluster))
    frames: Any
    files: Located
    if on_workers or (large > _SHARE * parse_memory(model.settings.memory) and readable(data)):
        frames = files = FrameFiles.open(data)
    else:
        frames, files = read_files(data)
    if test_files is not None:
        known = species_of(held_out if isinstance(frames, FrameFiles) else frames)
        with naming_files(test_files):
            find_references(held_out, model.settings, known)
    found: dict[str, Evaluation] = {}
    with open_workers(scheduler, scheduler_file, cluster, cluster_config, terminal) as executor:
        with naming_files(files):
            model.fit(
                frames,
                groups=group_key,
                progress=terminal.progress() or False,
                skip_failed=skip_failed,
                executor=executor,
            )
        with written_together():
            model.save(output, force=force)
            _write_summary(summary, summary_document(model), force=force)
        if test_files is not None:
            stages = Stages(terminal.progress())
            with naming_files(test_files):
                found = evaluate(
                    model, held_out, skip_failed=skip_failed, stages=stages, executor=executor
                )
            for remark in remarks_about(model, found):
                terminal.info(remark)
    document = summary_document(model, found)
    parts: list[Any] = []
    for quantity, one in found.items():
        assessment = assess(one)
        document[f"{quantity}_assessment"] = assessment.document()
        parts += [score_table(one.scores, units=one.units, title=f"Test: {one.target}")]
        parts += [f"{one.target}: {assessment.sentence}", *assessment.details]
    if found:
        _write_summary(summary, document, force=True)
    terminal.result(model.summary(), *parts, document=document)
    terminal.info(f"Wrote {output} and {summary}.")


def _write_summary(path: Path, document: Mapping[str, Any], *, force: bool) -> None:
    from qualms.io.files import atomic_output

    with atomic_output(path, force=force, mode="w") as file:
        json.dump(document, file, indent=2)


def summary_document(
    model: AtomisticModel, evaluations: Mapping[str, Evaluation] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the description of a model as a JSON document."""
    from qualms.report.tables import score_records

    document: dict[str, Any] = {
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
    for quantity, found in evaluations.items():
        key = "test" if quantity == "energy" else f"{quantity}_test"
        document[key] = score_records(found.scores)
    return document


def _entries(config: Path) -> dict[str, Any]:
    """Return the entries of the configuration file."""
    entries = read_yaml(config, "--config")
    known = [*ENTRIES, *Settings.model_fields]
    for name in entries:
        if name not in known:
            similar = did_you_mean(_SYNONYMS.get(name, name), known)
            raise InputError(
                f"{config} has an entry {name!r}, which is not a setting."
                + (similar or f" The settings are {', '.join(known)}."),
                parameter="--config",
            )
    return entries


@contextmanager
def _naming_file(config: Path | None, names: Sequence[str]) -> Iterator[None]:
    """Let errors of entries with these names begin with the file, and name no options."""
    try:
        yield
    except InputError as error:
        name = error.parameter.partition("[")[0]
        if name not in [*ENTRIES, *Settings.model_fields]:  # a hyper-parameter
            name = "representation"
        if name in names:
            error.args = (f"{config}: {error}".replace("`", ""),)
        raise


def _settings(
    entries: dict[str, Any], given: dict[str, Any], cutoff: float | None
) -> dict[str, Any]:
    """Return the entries of the configuration file, overridden by those of the command line."""
    settings = entries | {name: value for name, value in given.items() if value is not None}
    if cutoff is not None:
        chosen = settings.get("representation", "auto")
        if make_backbone(chosen) is not None:
            raise InputError(
                f"--cutoff {cutoff} cannot be used: the cutoff of a network cannot be changed.",
                parameter="--cutoff",
            )
        scales = chosen if isinstance(chosen, dict) else {"preset": chosen}
        settings["representation"] = {**scales, "cutoff": cutoff}
    if settings.get("target") is None:
        raise InputError("--target, the key of the property, is missing.", parameter="--target")
    return settings


def _paths(name: str, value: Any) -> list[Path]:
    """Return the files of an entry: one, several or none."""
    files = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(file, (str, Path)) for file in files):
        raise InputError(f"`{name}` is {value!r}, not a file or a list of files.", parameter=name)
    return [Path(file) for file in files]
