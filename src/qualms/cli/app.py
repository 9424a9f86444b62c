"""The command ``qualms``: its verbs, errors and exit codes.

Verbs are imported when they are used: ``qualms --help`` imports nothing but typer.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

import qualms
from qualms.cli.terminal import in_options, printable, running_verb, warnings_as_lines
from qualms.errors import QualmsError, did_you_mean

#: Exit codes, as shells have them, and messages of an interrupt from the keyboard and of signals by
#: which queue systems and terminals end a command.
_ENDED = {
    128 + number: f"{how}; no incomplete file was written."
    for number, how in {
        signal.SIGINT: "Interrupted",
        signal.SIGTERM: "Terminated",
        signal.SIGHUP: "Terminal closed",
    }.items()
}

#: Verbs, each the function of the same name in its module, with their help and an example.
VERBS = {
    "train": (
        "Train a model on labelled structures, and calibrate it on out-of-bag predictions.",
        "qualms train data.xyz --target energy --units eV -o model.safetensors",
    ),
    "template": (
        "Print a configuration file for `qualms train` or `qualms learn`: every setting with its "
        "default.",
        "qualms template > run.yaml\n\nqualms train --config run.yaml",
    ),
    "predict": (
        "Predict properties of new structures, with uncertainties. Structures are read as a "
        "stream; the file may be larger than memory.",
        "qualms predict model.safetensors new.xyz -o predicted.xyz",
    ),
    "evaluate": (
        "Score a model on labelled structures with all calibration methods, or predictions of "
        "another program.",
        "qualms evaluate model.safetensors test.xyz --in meV\n\n"
        "qualms evaluate predictions.csv --target energy --reference dft_energy",
    ),
    "report": (
        "Evaluate a model or predictions as `qualms evaluate` does, and write an HTML report.",
        "qualms report model.safetensors test.xyz -o report.html\n\n"
        "qualms report mace0.xyz mace1.xyz mace2.xyz --target MACE_energy --reference REF_energy "
        "-o report.html",
    ),
    "calibrate": (
        "Calibrate the uncertainties of an ensemble from any code, and score them.",
        "qualms calibrate committee.xyz --member-keys 'MACE*_energy' --target energy "
        "-o energy.json",
    ),
    "apply": (
        "Apply a calibration to ensemble predictions.",
        "qualms apply energy.json new.xyz --member-keys 'MACE*_energy' -o calibrated.xyz",
    ),
    "select": (
        "Choose the structures of a pool whose labels improve a model most.",
        "qualms select model.safetensors pool.xyz -n 20 --labelled data.xyz -o next.xyz",
    ),
    "learn": (
        "Explore by simulations, choose structures, label them, train again, and stop when the "
        "error is small enough: the loop of a YAML file.",
        "qualms template learn > run.yaml\n\nqualms learn run.yaml",
    ),
    "export": (
        "Write the file by which LAMMPS, i-PI or metatomic uses a model, with its uncertainties.",
        "qualms export model.safetensors --to lammps -o qualms.lmp\n\n"
        "qualms export model.safetensors --to ipi -o qualms_pes.py\n\n"
        "qualms export model.safetensors --to metatomic -o qualms.pt",
    ),
    "serve": (
        "Open a local page in the browser that predicts properties of structures, shows their "
        "uncertainties, and explains them. Of predictions, or of a folder of reports, it shows what"
        " `qualms report` writes.",
        "qualms serve model.safetensors\n\n"
        "qualms serve mace0.xyz mace1.xyz --target MACE_energy --reference REF_energy",
    ),
    "info": ("Describe a model file.", "qualms info model.safetensors"),
    "demo": (
        "Train and evaluate a model on 3000 molecules of QM9, with figures.",
        "qualms demo -o qualms-demo",
    ),
}
#: Options that the help shows unless all are asked for.
COMMON = {
    "train": (
        *("output", "target", "units", "forces", "stress", "group_key", "test"),
        *("baseline", "effort", "config"),
    )
}
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class Verb(TyperCommand):
    """A command of ``qualms``.

    Errors name its options instead of arguments of the library. The help has a section for each
    panel of options; if some are `common`, it is limited to them, and ``--help-all`` shows all.
    """

    common: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        if "--help-all" in args:
            self.common, args = (), ["--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        token = running_verb.set(self)
        try:
            return super().invoke(ctx)
        except QualmsError as error:
            error.args = (in_options(str(error)),)
            raise
        finally:
            running_verb.reset(token)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, by panel."""
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        parameters = {parameter.name: parameter for parameter in self.get_params(ctx)}
        arguments = [n for n, p in parameters.items() if p.param_type_name == "argument"]
        helping = [n for n, p in parameters.items() if "--help" in p.opts]
        for name in (*arguments, *self.common, *helping) if self.common else parameters:
            parameter: Any = parameters[name]
            record = parameter.get_help_record(ctx)
            if name in arguments:
                panels["Arguments"].append((parameter.metavar, record[1]))
            elif record is not None:
                panel = None if self.common else getattr(parameter, "rich_help_panel", None)
                panels.setdefault(panel or "Options", []).append(record)
        if self.common:
            panels["Options"].append(("--help-all", f"Show all {len(parameters)} options."))
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Verbs(TyperGroup):
    """Commands that are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return [*VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb."""
        if cmd_name not in VERBS:
            return None
        verb = getattr(import_module(f"qualms.cli.{cmd_name}"), cmd_name)
        single = typer.Typer(add_completion=False, context_settings=_CONTEXT, rich_markup_mode=None)
        single.command(cmd_name, cls=Verb)(verb)
        command: Any = typer.main.get_command(single)
        command.name = cmd_name
        command.help, example = VERBS[cmd_name]
        command.epilog = f"Example:\n\n{example}"
        command.common = COMMON.get(cmd_name, ())
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb of a command line; of an unknown one, say which was meant."""
        if args and args[0] not in VERBS:
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in VERBS.items()])


app = typer.Typer(
    name="qualms",
    cls=Verbs,
    help="Chemical machine learning with calibrated uncertainties.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_CONTEXT,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"qualms {qualms.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Chemical machine learning with calibrated uncertainties."""


def main(command: Callable[[], object] = app) -> None:
    """Run a command. Bad input ends in one line and exit code 2, never in a traceback."""
    _prepare_streams()
    try:
        with _signals_as_exits(), warnings_as_lines():
            command()
    except QualmsError as error:
        _fail(2, str(error))
    except KeyboardInterrupt:
        _fail(130, _ENDED[130])
    except SystemExit as end:
        if end.code in _ENDED:  # typer converts the interrupt
            _fail(end.code, _ENDED[end.code])
        raise
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError) as error:
        _fail(2, f"{type(error).__name__}: {error}")


def _prepare_streams() -> None:
    """Let any text be printed, to any terminal, or to none."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: no other file may get its number, to which libraries write
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let signals end the command as errors do, so that temporary files are removed."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # another one would interrupt the cleaning up
        sys.exit(128 + number)

    # A signal that the shell ignores (nohup) stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _fail(code: int, message: str) -> None:
    sys.stderr.write(f"Error: {printable(' '.join(message.split()))}\n")
    sys.exit(code)
