"""The command ``qualms``: its verbs, its errors and its exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import qualms
from qualms.cli._common import Terminal
from qualms.cli.apply import apply
from qualms.cli.calibrate import calibrate
from qualms.cli.demo import demo
from qualms.cli.evaluate import evaluate
from qualms.cli.info import info
from qualms.cli.predict import predict
from qualms.cli.report import report
from qualms.cli.reproduce import reproduce
from qualms.cli.train import train
from qualms.errors import QualmsError

#: Exit codes: bad input; interrupted from the keyboard, as shells have it.
BAD_INPUT, INTERRUPTED = 2, 130
_INTERRUPTED = "Interrupted; no file is half-written."
_RESUME = {
    "train": " What has been kept, --resume goes on with.",
    "reproduce": " The same command goes on where it was.",
}
#: With --force it would start anew.
_WITHOUT_FORCE = " The same command without --force goes on where it was."

app = typer.Typer(
    name="qualms",
    help="Chemical machine learning with honest error bars.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, predict, evaluate, report, calibrate, apply, info, demo):
    app.command()(command)
app.add_typer(reproduce)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qualms {qualms.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Chemical machine learning with honest error bars."""


def main() -> None:
    """Run a command. Bad input ends in one line and exit code 2, never in a traceback."""
    terminal = Terminal()
    try:
        with terminal.warnings_as_lines():
            app()
    except QualmsError as error:
        _fail(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        _fail(_interrupted(), INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer's way to say so
            _fail(_interrupted(), INTERRUPTED)
        raise
    except BrokenPipeError:
        # The reader of the output, such as `head`, has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError) as error:
        _fail(f"{type(error).__name__}: {error}", BAD_INPUT)


def _interrupted() -> str:
    verb, given = "".join(sys.argv[1:2]), sys.argv[2:]
    if verb == "reproduce" and any(map(_is_force, given)):
        return _INTERRUPTED + _WITHOUT_FORCE
    return _INTERRUPTED + _RESUME.get(verb, "")


def _is_force(argument: str) -> bool:
    """Whether an argument is --force or -f, alone or among others as in -qf; -of is no such."""
    flags = argument[1:].split("o")[0] if argument.startswith("-") else ""
    return argument == "--force" or (not argument.startswith("--") and "f" in flags)


def _fail(message: str, code: int) -> None:
    one_line = " ".join(message.split())
    sys.stderr.write(f"Error: {one_line}\n")
    sys.exit(code)
