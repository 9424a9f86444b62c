"""A verb of the command line: its help, and errors in terms of its options."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from typer.core import TyperCommand

from qualms.errors import QualmsError

if TYPE_CHECKING:
    from collections.abc import Sequence

_HELP_ALL = "--help-all"
#: An argument between backticks, with or without a value, or anything else between backticks.
_QUOTED = re.compile(r"`(?:([A-Za-z_]\w*)(?:=([^`]*))?|[^`]*)`")
#: Structures by their numbers, unless the file is named already, and values of a structure.
_STRUCTURES = re.compile(r"\b[Ss]tructures? \d+\b(?! of )(?:(?:, | and )\d+\b)*")
_FRAME = re.compile(r"frames\[(\d+)\](?:\.[\w.]+\[('[^']*')\])?")
#: Parameters of verbs that stand for an argument of the library which has another name there; the
#: first that the verb has is the one.
_OTHER_NAMES = {
    "baseline": ("confirm_baseline",),
    "groups": ("group_key",),
    "in_units": ("units",),
    "key": ("target",),
    "level": ("interval",),
    "mean": ("mean_column",),
    "members": ("member_keys",),
    "random_state": ("seed",),
    "representation": ("weights",),
    "source": ("data",),
    "std": ("std_column",),
    "unknown_species": ("ignore_unknown", "skip_unknown_species"),
}
#: Kinds of properties that are flags.
_KINDS = {"atomic": "--per-atom-target", "intensive": "--intensive"}
_located: ContextVar[Located | None] = ContextVar("located", default=None)
_running: ContextVar[Verb | None] = ContextVar("verb", default=None)


class Verb(TyperCommand):
    """A command of ``qualms``.

    Errors and warnings name its options instead of arguments of the library. The help has a section
    for each panel of options; if some are `common`, it is limited to them, and ``--help-all`` shows
    all.
    """

    common: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        if _HELP_ALL in args:
            self.common, args = (), ["--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        token = _running.set(self)
        try:
            return super().invoke(ctx)
        except QualmsError as error:
            error.args = (in_options(str(error)),)
            raise
        finally:
            _running.reset(token)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, by panel."""
        panels: dict[str, list[Any]] = defaultdict(list)
        parameters = self.get_params(ctx)
        for parameter in parameters:
            is_argument = parameter.param_type_name == "argument"
            shown = not self.common or is_argument or parameter.name in (*self.common, "help")
            record = parameter.get_help_record(ctx) if shown else None
            if record is not None and is_argument:
                panels["Arguments"].append((parameter.metavar, record[1]))
            elif record is not None:
                panel = None if self.common else getattr(parameter, "rich_help_panel", None)
                panels[panel or "Options"].append(record)
        if self.common:
            panels["Options"].append((_HELP_ALL, f"Show all {len(parameters)} options."))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def option(self, name: str) -> Any:
        """Return the parameter of the command line for an argument of the library, or None."""
        parameters = {parameter.name: parameter for parameter in self.params}
        names = (name, *_OTHER_NAMES.get(name, ()))
        return next((parameters[each] for each in names if each in parameters), None)


def in_options(message: str) -> str:
    """Return a message of the library with options of the running verb for arguments.

    Arguments stand between backticks, which are removed. An argument without an option is a setting
    of the configuration file, if the verb has one.
    """
    verb = _running.get()

    def replacement(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name is None or verb is None:
            return match[0].strip("`")
        text = "" if value is None else value.strip("'\"")
        if name == "kind" and text in _KINDS and verb.option("per_atom_target") is not None:
            return _KINDS[text]
        option = verb.option(name)
        if option is None:
            of_file = verb.option("config") is not None and name in _settings()
            return match[0].strip("`") + (" (--config)" if of_file else "")
        if option.param_type_name == "argument":
            return str(option.metavar or option.name.upper())
        flag = max(option.opts, key=len)
        return flag if value is None or option.is_flag else f"{flag} {text}"

    return _QUOTED.sub(replacement, message)


def _settings() -> Sequence[str]:
    from qualms.atomistic.settings import Settings

    return [*Settings.model_fields]


class Located(Protocol):
    """Structures whose files are known."""

    def place(self, index: int) -> tuple[str, int]:
        """Return the name of the file of a structure, and its number there."""


@contextmanager
def naming_files(frames: Located) -> Iterator[None]:
    """Name the file of a structure in errors and warnings: "Structure 0 of new.xyz"."""
    token = _located.set(frames)
    try:
        yield
    except QualmsError as error:
        error.args = (with_files(str(error)),)
        raise
    finally:
        _located.reset(token)


def with_files(message: str) -> str:
    """Return a message with the file of each structure whose number is in it, if it is known."""
    frames = _located.get()
    if frames is None:
        return message

    def place(text: str) -> str:
        try:
            name, number = frames.place(int(text))
        except IndexError:
            return text
        return f"{number} of {name}"

    def value(match: re.Match[str]) -> str:
        return f"{match[2]} of structure {match[1]}" if match[2] else f"structure {match[1]}"

    def numbers(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda number: place(number[0]), match[0])

    return _STRUCTURES.sub(numbers, _FRAME.sub(value, message))
