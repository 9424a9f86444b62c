"""``qualms template``: a configuration file, made from the fields of `Settings`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import defaultdict

from qualms.atomistic.settings import Settings
from qualms.cli.train import ENTRIES

#: Examples of entries without a default.
_EXAMPLES = {"data": "data.xyz", "output": "model.safetensors", "target": "energy"}


def template() -> None:
    """Run ``qualms template``: write every setting, its default and a comment."""
    groups: dict[str, list[str]] = defaultdict(list)
    groups["files"] = [_entry(name, "", None, text) for name, text in ENTRIES.items()]
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = None if field.is_required() else field.default
        text = (field.description or "").replace("``", "").replace("`", "")
        groups[str(extra["group"])].append(_entry(name, str(extra["type"]), default, text))
    head = "# Settings of `qualms train --config FILE`; null: chosen or not used.\n"
    parts = (
        f"\n# --- {name.capitalize()} ---\n\n" + "\n".join(lines) for name, lines in groups.items()
    )
    sys.stdout.write(head + "".join(parts))


def _entry(name: str, type_: str, default: object, text: str) -> str:
    """Return a setting, below a comment."""
    # Texts of JSON are texts of YAML.
    value = json.dumps(_EXAMPLES.get(name, default), ensure_ascii=False)
    comment = f"{text} ({type_})" if type_ else text
    lines = textwrap.wrap(comment, 90, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, f"{name}: {value}\n"])
