"""The directive ``command-reference``: all commands and options, from the command-line parser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from qualms.cli.app import app

#: Heading of the options that belong to no panel of ``--help``.
_OTHER = "Options"
_VALUES = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


class CommandReference(SphinxDirective):
    """A section for each command, in the order of ``qualms --help``."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [
            self._section(title, command) for title, command in _leaves("qualms", get_command(app))
        ]

    def _section(self, title: str, command: Any) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(title)], names=[title])
        self.state.document.note_explicit_target(section)
        section += nodes.title("", "", nodes.literal(text=title))
        for paragraph in (command.help or "").split("\n\n"):
            section += nodes.paragraph(text=" ".join(paragraph.split()))
        types = get_type_hints(command.callback)
        usage = " ".join([title, *_usage(command.params, types)])
        section += nodes.literal_block(usage, usage, language="sh")
        if command.epilog:
            example = "\n".join(command.epilog.split("\n\n")[1:])
            section += nodes.paragraph(text="Example:")
            section += nodes.literal_block(example, example, language="sh")
        for heading, parameters in _panels(command.params).items():
            section += nodes.rubric(text=heading)
            section += _table([_row(p, types.get(p.name, str)) for p in parameters])
        return section


def _leaves(title: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield commands that do something, of groups of commands their members."""
    if not hasattr(command, "list_commands"):
        yield title, command
        return
    for name in command.list_commands(None):
        yield from _leaves(f"{title} {name}", command.get_command(None, name))


def _usage(parameters: Iterable[Any], types: Mapping[str, Any]) -> list[str]:
    """Return the required arguments and options."""
    needed = [p for p in parameters if p.required]
    arguments = [_argument(p) for p in needed if _is_argument(p)]
    options = [f"{p.opts[0]} {_value(p, types[p.name])}" for p in needed if not _is_argument(p)]
    return [*arguments, *options, "[OPTIONS]"]


def _panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return parameters by heading: arguments, named panels, and what remains."""
    panels: dict[str, list[Any]] = defaultdict(list)
    others = []
    for parameter in parameters:
        if getattr(parameter, "hidden", False):
            continue
        if _is_argument(parameter):
            panels["Arguments"].append(parameter)
        elif panel := getattr(parameter, "rich_help_panel", None):
            panels[panel].append(parameter)
        else:
            others.append(parameter)
    return {**panels, **({_OTHER: others} if others else {})}


def _is_argument(parameter: Any) -> bool:
    return not any(name.startswith("-") for name in parameter.opts)


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any, annotation: Any) -> tuple[str, str]:
    """Return how a parameter is written, and what it means."""
    if _is_argument(parameter):
        return _argument(parameter), _meaning(parameter)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return names, _meaning(parameter)
    return f"{names} {_value(parameter, annotation)}", _meaning(parameter)


def _value(parameter: Any, annotation: Any) -> str:
    """Return the placeholder for the value of an option."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    return str(parameter.metavar or _VALUES.get(kinds[0], "TEXT"))


def _meaning(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    if parameter.required and not _is_argument(parameter):
        return f"{text} Required."
    default = parameter.default
    if default is None or callable(default) or isinstance(default, bool) or not str(default):
        return text
    return f"{text} Default: {default}."


def _table(rows: Sequence[tuple[str, str]]) -> nodes.table:
    """Return a table of two columns, the first of which is code."""
    body = nodes.tbody()
    for code, text in rows:
        first = nodes.entry("", nodes.paragraph("", "", nodes.literal(text=code)))
        body += nodes.row("", first, nodes.entry("", nodes.paragraph(text=text)))
    columns = [nodes.colspec(colwidth=width) for width in (40, 60)]
    group = nodes.tgroup("", *columns, body, cols=2)
    return nodes.table("", group, classes=["options"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
