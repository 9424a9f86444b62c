"""``qualms template``: configuration files, made from the fields of settings."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from qualms.atomistic.settings import Settings
from qualms.cli.train import ENTRIES
from qualms.errors import unknown_choice

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

#: Examples of entries without a default.
_EXAMPLES = {
    "data": "data.xyz",
    "output": "model.safetensors",
    "target": "energy",
    "start": "data.xyz",
    "directory": "learned",
    "target_error": 0.05,
    "budget": 300,
}


def template(
    verb: Annotated[
        str, Argument(metavar="[VERB]", help="The command that reads it: train or learn.")
    ] = "train",
) -> None:
    """Run ``qualms template``: write every setting, its default and a comment."""
    templates = {"train": _of_training, "learn": _of_learning}
    if verb not in templates:
        raise unknown_choice("verb", verb, templates)
    sys.stdout.write(templates[verb]())


def _of_training() -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    groups["files"] = [_entry(name, "", None, text) for name, text in ENTRIES.items()]
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        groups[str(extra["group"])].append(_of_field(name, field))
    head = "# Settings of `qualms train --config FILE`; null: chosen or not used.\n"
    parts = (
        f"\n# --- {name.capitalize()} ---\n\n" + "\n".join(lines) for name, lines in groups.items()
    )
    return head + "".join(parts)


def _of_learning() -> str:
    from qualms.active.settings import MODEL, SECTIONS, LearnSettings

    head = "# Settings of `qualms learn FILE`; null: chosen or not used.\n\n"
    parts = []
    for name, field in LearnSettings.model_fields.items():
        if name == "model":
            lines = [f"  {key}: {json.dumps(value)}\n" for key, value in MODEL.items()]
            parts.append(f"# {field.description}\n{name}:\n{''.join(lines)}")
        elif name in SECTIONS:
            entries = _of_section(SECTIONS[name])
            parts.append(f"# {field.description}\n{name}:\n{textwrap.indent(entries, '  ')}")
        else:
            parts.append(_of_field(name, field))
    return head + "\n".join(parts)


def _of_section(section: type[BaseModel]) -> str:
    return "\n".join(_of_field(name, field) for name, field in section.model_fields.items())


def _of_field(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = None if field.is_required() else field.default
    text = (field.description or "").replace("``", "").replace("`", "")
    return _entry(name, str(extra["type"]), default, text)


def _entry(name: str, type_: str, default: object, text: str) -> str:
    """Return a setting, below a comment."""
    # Texts of JSON are texts of YAML.
    value = json.dumps(_EXAMPLES.get(name, default), ensure_ascii=False)
    comment = f"{text} ({type_})" if type_ else text
    lines = textwrap.wrap(comment, 90, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, f"{name}: {value}\n"])
