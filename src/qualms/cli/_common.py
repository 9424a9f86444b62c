"""What the commands share: output and options.

Heavy packages are imported inside functions, here and in the verbs, so that help is fast.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.cli.verb import in_options, with_files
from qualms.errors import InputError, QualmsWarning

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    from qualms.atomistic.model import AtomisticModel
    from qualms.ensembles.io import Ensemble
    from qualms.evaluation import Evaluation
    from qualms.progress import Bars


#: Control characters that move the cursor, change colours, or make a terminal answer; not \t, \n.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""Return text with control characters as escape sequences, such as ``\x1b``.

    Texts of files and names of files are not trusted.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Printable:
    """Something that rich prints, with `printable` text."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        content = self._content
        if isinstance(content, str):
            content = printable(content)  # before rich removes some of the characters
        for segment in console.render(content, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class Terminal(logging.Handler):
    """Prints results to standard output; messages and the log of "qualms" to standard error.

    Parameters
    ----------
    quiet : bool
        Print results and warnings only.
    as_json : bool
        Print results as one JSON document, and warnings.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        from rich.console import Console

        super().__init__(logging.INFO)
        self.quiet, self.as_json = quiet or as_json, as_json
        # Long lines are better than truncated numbers.
        self._out = Console(highlight=False, width=1000)
        self._err = Console(stderr=True, highlight=False)
        log = logging.getLogger("qualms")
        log.setLevel(logging.INFO)
        log.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log message."""
        (self.warn if record.levelno >= logging.WARNING else self.info)(record.getMessage())

    def info(self, text: str) -> None:
        """Print a message, unless quiet."""
        if not self.quiet:
            self._err.print(printable(text), markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._err.print(f"Warning: {printable(text)}", markup=False, soft_wrap=True, style="yellow")

    def result(self, *parts: Any, document: Mapping[str, Any]) -> None:
        """Print a result: as text and tables, or as JSON."""
        if self.as_json:
            self._out.file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            return
        for part in parts:
            self._out.print(_Printable(part), markup=False, soft_wrap=isinstance(part, str))

    def progress(self) -> Bars | None:
        """Return progress bars, if standard error is a terminal."""
        if self.quiet or not sys.stderr.isatty():
            return None
        from qualms.progress import Bars

        return Bars(self._err)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show warnings of qualms as single lines, once each, and hide those of libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QualmsWarning)
        seen: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            if str(message) not in seen and issubclass(category, QualmsWarning):
                seen.add(str(message))
                sys.stderr.write(f"Warning: {printable(in_options(with_files(str(message))))}\n")

        warnings.showwarning = show
        yield


#: What files with structures may be.
FORMATS = (
    "extended XYZ, .traj, .db, .cif, POSCAR, vasprun.xml, OUTCAR, …; some of them by a range, as "
    "in data.xyz@:50"
)
Model = Annotated[Path, Argument(metavar="MODEL", help="Model file (.safetensors).")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print results and warnings only.")]
Json = Annotated[bool, Option("--json", help="Print results as one JSON document.")]
Force = Annotated[bool, Option("--force", "-f", help="Replace existing output.")]
Threads = Annotated[
    int | None,
    Option(
        "--threads",
        min=1,
        help="Number of cores; by default all that are idle and that OMP_NUM_THREADS allows.",
    ),
]
Weights = Annotated[
    Path | None,
    Option(
        "--weights",
        help="File with the weights of the network that features come from, unless they come with "
        "its package.",
    ),
]
Seed = Annotated[int | None, Option("--seed", min=0, help="Random seed. Default: 0.")]
# The reference potential of a model.
ConfirmBaseline = Annotated[
    str | None,
    Option(
        "--confirm-baseline",
        help="Confirm the reference potential that the model was trained with, if it is an import "
        "path (package.module:callable), or replace a key by a calculator.",
    ),
]
BaselineKey = Annotated[
    str | None,
    Option(
        help="Key of energies of the reference potential in the structures, such as xtb_energy; "
        "forces and stresses are under xtb_forces and xtb_stress.",
    ),
]
SkipFailed = Annotated[
    bool,
    Option(
        "--skip-failed",
        help="Leave out structures for which the reference potential of the baseline fails, with a "
        "warning.",
    ),
]
# How predictions of other programs are read, for calibrate, apply, evaluate and report.
_FILES = "Predictions"
Predictions = Annotated[
    list[Path],
    Argument(
        metavar="PREDICTIONS",
        help="Predictions and reference values: extended XYZ, .csv, .tsv, .parquet, .npz, .npy or "
        ".json. Several files have the same rows; their predictions are members.",
    ),
]
Target = Annotated[
    str | None,
    Option(
        rich_help_panel=_FILES,
        help="Property: TARGET_ensemble, TARGET_uncertainty, TARGET_0, … are read. By default the "
        "name of the mean column.",
    ),
]
Reference = Annotated[
    str | None,
    Option(rich_help_panel=_FILES, help="Key of the reference values; by default REF_TARGET."),
]
MemberKeys = Annotated[
    str | None,
    Option(
        "--member-keys",
        rich_help_panel=_FILES,
        help="Pattern of the keys or columns of members, such as 'MACE*_energy'.",
    ),
]
MeanColumn = Annotated[
    str | None,
    Option(rich_help_panel=_FILES, help="Key or column of predictions; by default TARGET."),
]
StdColumn = Annotated[
    str | None,
    Option(
        rich_help_panel=_FILES,
        help="Key or column of standard deviations; by default TARGET_uncertainty or TARGET_std.",
    ),
]
Absent = Annotated[
    str | None,
    Option(
        rich_help_panel=_FILES,
        help="Key of flags, one per member: the point was not in its training set. By default "
        "TARGET_absent, if present.",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    Option("--calibration-file", help="Also score this file of `qualms calibrate`."),
]
Order = Annotated[
    str | None,
    Option(
        rich_help_panel=_FILES,
        help="Order of the members of vectors: member (m0x m0y m0z m1x …) or component (m0x m1x … "
        "m0y …). By default it is determined from the data.",
    ),
]
#: Options that say where predictions are, by the name of the option; see `reading`.
READING = {
    "target": Target,
    "reference": Reference,
    "member_keys": MemberKeys,
    "mean_column": MeanColumn,
    "std_column": StdColumn,
    "absent": Absent,
    "order": Order,
}
Units = Annotated[
    str | None, Option(rich_help_panel=_FILES, help="Units of the target, stored and displayed.")
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


def reading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of `qualms.ensembles.io.read_ensemble` for options of `READING`."""
    mean, std = options["mean_column"], options["std_column"]
    target = options["target"] or mean
    if target is None:
        raise InputError(
            "Predictions need --target, the name of the property, or --mean-column. (If the first "
            "file is a model, its name must end in .safetensors.)",
            parameter="--target",
        )
    names = ("target", "mean_column", "std_column", "member_keys")
    others = {k: v for k, v in options.items() if k not in names}
    members = options["member_keys"]
    return {"target": target, "mean": mean, "std": std, "members": members, **others}


def description(ensemble: Ensemble) -> str:
    """Return what was read from files with predictions."""
    if not ensemble.n_members:
        return f"{ensemble.key}: {ensemble.counted()} with standard deviations."
    how = "no member is assumed to have been trained on any point"
    if ensemble.absent is not None:
        how = "each point is predicted by the members that were not trained on it"
    return f"{ensemble.key}: {ensemble.counted()}, {ensemble.n_members} members; {how}."


def remarks_about(model: AtomisticModel, found: Mapping[str, Evaluation]) -> list[str]:
    """Return remarks about the evaluation of a model: what is left out, and extrapolation."""
    missing = [
        f"No structure has {key!r} that is not zero by symmetry: {name} is not evaluated."
        for name, key in model.settings.keys.items()
        if name not in found
    ]
    return [*found["energy"].remarks(), *missing]
