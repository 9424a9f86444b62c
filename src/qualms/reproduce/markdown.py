"""Tables, figures and numbers of a page in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figure(path: str, caption: str) -> str:
    """Return a figure with its caption."""
    return f":::{{figure}} {path}\n:alt: {caption}\n:width: 46em\n\n{caption}\n:::"


def keep_links(text: str, folder: Path) -> str:
    """Return a text without its links to other pages, as far as these are not in the folder."""

    def kept(link: re.Match[str]) -> str:
        return link[0] if (folder / link[2]).exists() else link[1]

    return re.sub(r"\[([^\]]+)\]\(([\w-]+\.md)(?:#[\w-]+)?\)", kept, text)


def minus(text: str) -> str:
    """Return a text with minus signs, rather than hyphens, before its numbers."""
    return re.sub(r"(^|[\s(\[])-(?=\d)", r"\1−", text)
