"""What a command prints: results, messages, and errors in terms of its options and files."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from qualms.errors import QualmsError, QualmsWarning

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    from qualms.atomistic.structures import FrameFiles, Places
    from qualms.cli.app import Verb
    from qualms.progress import Bars

#: The verb that runs, and the structures that it reads.
running_verb: ContextVar[Verb | None] = ContextVar("running_verb", default=None)
_located: ContextVar[FrameFiles | Places | None] = ContextVar("located", default=None)


def printable(text: str) -> str:
    r"""Return text with control characters as escape sequences, such as ``\x1b``.

    They could move the cursor, change colours, or make a terminal answer, and texts of files and
    names of files are not trusted. Tabs and line breaks stay.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


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
    """Prints results to standard output, and messages and the log of "qualms" to standard error.

    Warnings are those of Python: see `warnings_as_lines`.

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
        self.info(in_options(record.getMessage()))

    def info(self, text: str) -> None:
        """Print a message, unless quiet."""
        if not self.quiet:
            self._err.print(printable(text), markup=False, soft_wrap=True)

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

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            if str(message) not in seen:
                seen.add(str(message))
                sys.stderr.write(f"Warning: {printable(in_options(with_files(str(message))))}\n")

        warnings.showwarning = show
        yield


# --- options for arguments ---

#: Arguments of the library, and parameters of verbs that stand for them under another name; the
#: first that the verb has is the one.
_OTHER_NAMES = {
    "baseline": ("confirm_baseline",),
    "groups": ("group_key",),
    "level": ("interval",),
    "mean": ("mean_column",),
    "members": ("member_keys",),
    "representation": ("weights",),
    "source": ("data",),
    "std": ("std_column",),
    "targets": ("for_",),
    "unknown_species": ("ignore_unknown", "skip_unknown_species"),
}
#: Kinds of properties that are flags of `train`.
_KINDS = {"atomic": "--per-atom-target", "intensive": "--intensive"}


def in_options(message: str) -> str:
    """Return a message of the library with options of the running verb for arguments.

    Arguments stand between backticks, which are removed.
    """
    verb = running_verb.get()
    parameters: dict[Any, Any] = {} if verb is None else {p.name: p for p in verb.params}

    def replacement(match: re.Match[str]) -> str:
        name, value = match[1], (match[2] or "").strip("'\"")
        if name == "kind" and value in _KINDS and "per_atom_target" in parameters:
            return _KINDS[value]
        names = (name, *_OTHER_NAMES.get(name, ()))
        option = next((parameters[each] for each in names if each in parameters), None)
        if option is None:
            return match[0].strip("`")
        if option.param_type_name == "argument":
            return str(option.metavar or option.name.upper())
        flag = max(option.opts, key=len)
        value = "none" if value == "None" else value
        return flag if match[2] is None or option.is_flag else f"{flag} {value}"

    # An argument with or without a value, or anything else between backticks.
    return re.sub(r"`(?:([A-Za-z_]\w*)(?:=([^`]*))?|[^`]*)`", replacement, message)


# --- files of structures ---


@contextmanager
def naming_files(frames: FrameFiles | Places) -> Iterator[None]:
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

    def place(match: re.Match[str]) -> str:
        try:
            name, number = frames.place(int(match[0]))
        except IndexError:
            return match[0]
        return f"{number} of {name}"

    # Values of a structure, such as frames[3].info['energy'], and frames[3] itself.
    message = re.sub(r"frames\[(\d+)\](?:\.[\w.]+\[('[^']*')\])", r"\2 of structure \1", message)
    message = re.sub(r"frames\[(\d+)\]", r"structure \1", message)
    # Workers name the path and the number in the file.
    message = re.sub(r"\b([Ss]tructure \d+) \('[^']*', frame \d+\)", r"\1", message)
    # Structures by their numbers, unless the file is named already.
    numbers = r"\b[Ss]tructures? \d+\b(?! of )(?:(?:, | and )\d+\b)*"
    return re.sub(numbers, lambda match: re.sub(r"\d+", place, match[0]), message)
