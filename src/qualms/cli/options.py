"""Options that several commands have."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Option

from qualms.errors import InputError

if TYPE_CHECKING:
    from qualms.ensembles.io import Ensemble

#: What files with structures may be.
FORMATS = (
    "extended XYZ, .traj, .db, .cif, POSCAR, vasprun.xml, OUTCAR, …; some of them by a range, as "
    "in data.xyz@:50"
)
Model = Annotated[Path, Argument(metavar="MODEL", help="Model file (.safetensors).")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print results and warnings only.")]
Json = Annotated[bool, Option("--json", help="Print results as one JSON document.")]
Force = Annotated[bool, Option("--force", "-f", help="Replace existing output.")]
Seed = Annotated[int, Option("--seed", min=0, help="Random seed. Default: 0.", show_default=False)]
Threads = Annotated[
    int | None,
    Option(
        "--threads",
        min=1,
        help="Number of cores; by default all that are idle and that OMP_NUM_THREADS allows.",
    ),
]
BaselineKey = Annotated[
    str | None,
    Option(
        help="Key of energies of the baseline potential in the structures, such as xtb_energy; "
        "forces and stresses are under xtb_forces and xtb_stress.",
    ),
]
SkipFailed = Annotated[
    bool,
    Option(
        "--skip-failed",
        help="Leave out structures for which the baseline potential fails, with a warning.",
    ),
]
InUnits = Annotated[
    str | None,
    Option(
        "--in",
        help="Units of energy of the output: eV, meV, Hartree, kcal/mol or kJ/mol; by default "
        "those of the data.",
    ),
]
Per = Annotated[
    str | None,
    Option(
        help="Energies per atom or per structure: atom or structure. By default scores of a model "
        "are per atom; predictions are as in the data.",
    ),
]
Cluster = Annotated[
    str | None,
    Option(
        rich_help_panel="Workers",
        metavar="WORKERS",
        help="Use workers: local:N, N processes of one core on this machine; slurm, jobs of Slurm; "
        "or the address of a scheduler of Dask, tcp://HOST:8786, or the file that it writes "
        "(.json).",
    ),
]
ClusterConfig = Annotated[
    Path | None,
    Option(
        rich_help_panel="Workers",
        help="YAML file for Slurm: the number of `jobs`, and options of dask-jobqueue such as "
        "queue, cores, memory and walltime.",
    ),
]
#: How a stored model is loaded and run.
RUNNING = {
    "confirm_baseline": Annotated[
        str | None,
        Option(
            help="Confirm the baseline potential that the model was trained with, if it is an "
            "import path (package.module:callable), or replace a key by a calculator.",
        ),
    ],
    "baseline_key": BaselineKey,
    "skip_failed": SkipFailed,
    "weights": Annotated[
        Path | None,
        Option(
            help="File with the weights of the network that features come from, unless they come "
            "with its package.",
        ),
    ],
    "threads": Threads,
    "cluster": Cluster,
    "cluster_config": ClusterConfig,
}
#: Where the predictions of another program are; see `reading`.
READING = {
    name: Annotated[str | None, Option(rich_help_panel="Predictions", help=text)]
    for name, text in {
        "target": "Property: TARGET_ensemble, TARGET_uncertainty, TARGET_0, … are read. By default "
        "the name of the mean column.",
        "reference": "Key of the reference values; by default REF_TARGET.",
        "member_keys": "Pattern of the keys or columns of members, such as 'MACE*_energy'.",
        "mean_column": "Key or column of predictions; by default TARGET.",
        "std_column": "Key or column of standard deviations; by default TARGET_uncertainty or "
        "TARGET_std.",
        "absent": "Key of flags, one per member: the point was not in its training set. By default "
        "TARGET_absent, if present.",
        "order": "Order of the members of vectors: member (m0x m0y m0z m1x …) or component (m0x "
        "m1x … m0y …). By default it is determined from the data.",
        "units": "Units of the target, stored and displayed.",
    }.items()
}


def with_options(options: Mapping[str, Any]) -> Callable[..., Callable[..., None]]:
    """Return a decorator that replaces ``**others`` of a command by options.

    Parameters
    ----------
    options : mapping of str to Annotated
        Types and descriptions, by parameter. Flags are False by default, others None.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        explicit = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=keyword) for p in explicit if p.kind != p.VAR_KEYWORD]
        for name, annotation in options.items():
            default = False if get_args(annotation)[0] is bool else None
            parameter = inspect.Parameter(name, keyword, default=default, annotation=annotation)
            parameters.append(parameter)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return decorate


def baseline_of(baseline: str | None, key: str | None) -> Any:
    """Return the baseline of options: a name, a mapping in JSON, or a key."""
    if key is not None:
        if baseline is not None:
            raise InputError(
                f"`baseline_key` ({key}) and `baseline` ({baseline}) exclude each other.",
                parameter="--baseline-key",
            )
        return {"key": key}
    if baseline is None or not baseline.lstrip().startswith("{"):
        return baseline
    try:
        return json.loads(baseline)
    except ValueError as error:
        raise InputError(
            f"`baseline` is neither a name nor valid JSON: {baseline!r} ({error}).",
            parameter="--baseline",
        ) from error


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Return the entries of a YAML file that an option names."""
    import yaml

    from qualms.io.files import check_input

    class Loader(yaml.SafeLoader):
        """The safe loader, which would take the last of repeated keys."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names: list[str] = [str(name.value) for name, _ in node.value]
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise yaml.YAMLError(f"{repeated!r} occurs more than once")
            return node

    try:
        text = check_input(path, option).read_text(encoding="utf-8")
        entries = yaml.load(text, Loader)
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} cannot be read as a YAML file: {reason}.", parameter=option
        ) from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise InputError(f"{path} does not have lines of the form `name: value`.", parameter=option)
    return entries


def reading(
    *,
    target: str | None,
    mean_column: str | None,
    std_column: str | None,
    member_keys: str | None,
    **others: Any,
) -> dict[str, Any]:
    """Return parameters of `qualms.ensembles.io.read_ensemble` for options of `READING`."""
    if target is None and mean_column is None:
        raise InputError(
            "Predictions need --target, the name of the property, or --mean-column. (If the first "
            "file is a model, its name must end in .safetensors.)",
            parameter="--target",
        )
    columns = {"mean": mean_column, "std": std_column, "members": member_keys}
    return {"target": target or mean_column, **columns, **others}


def description(ensemble: Ensemble) -> str:
    """Return a sentence about the predictions of an ensemble."""
    if not ensemble.n_members:
        return f"{ensemble.key}: {ensemble.counted()} with standard deviations."
    how = "no member is assumed to have been trained on any point"
    if ensemble.absent is not None:
        how = "each point is predicted by the members that were not trained on it"
    return f"{ensemble.key}: {ensemble.counted()}, {ensemble.n_members} members; {how}."
