"""What the commands print, and how they end."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from qualms.atomistic.progress_bars import Bars
from qualms.errors import QualmsWarning


class Terminal:
    """Prints results to standard output and everything else to standard error.

    Parameters
    ----------
    quiet : bool
        Print results only.
    as_json : bool
        Print results as one JSON document.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet = quiet
        self.as_json = as_json
        self._out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Tell what is going on."""
        if not self.quiet and not self.as_json:
            self._err.print(text, markup=False, soft_wrap=True)

    def result(self, *parts: str | Table, document: Mapping[str, Any]) -> None:
        """Print a result: as text and tables, or as JSON."""
        if self.as_json:
            self._out.file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            return
        for part in parts:
            if isinstance(part, str):
                self._out.print(part, markup=False, soft_wrap=True)
            else:
                self._print_table(part)

    def _print_table(self, table: Table) -> None:
        """Print all of a table: lines longer than the terminal are better than digits cut off."""
        options = self._out.options.update(max_width=1000)
        wide = Measurement.get(self._out, options, table).maximum
        self._out.width = max(self._out.width, wide)
        self._out.print(table)

    def warn(self, text: str) -> None:
        """Print a warning, whatever the level of quietness."""
        self._err.print(f"Warning: {text}", markup=False, soft_wrap=True, style="yellow")

    @contextmanager
    def warnings_as_lines(self) -> Iterator[None]:
        """Show warnings of qualms as single lines, once each, and hide those of libraries."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", QualmsWarning)
            seen: set[str] = set()

            def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
                if str(message) not in seen and issubclass(category, QualmsWarning):
                    seen.add(str(message))
                    self.warn(str(message))

            warnings.showwarning = show
            yield

    def progress(self) -> Bars | None:
        """Return progress bars, if standard error is a terminal."""
        if self.quiet or self.as_json or not sys.stderr.isatty():
            return None
        return Bars(self._err)
