"""Progress of long work, and the time that each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display(Protocol):
    """Shows the progress of one stage after the other."""

    def begin(self, stage: str, total: int | None) -> None:
        """Start a stage of `total` units of work, or of unknown length."""

    def advance(self, done: int) -> None:
        """Show the number of units that are done."""

    def end(self, seconds: float) -> None:
        """Finish the stage."""


class Stages:
    """Times the stages of a piece of work, in `seconds`, and passes counts on to a display."""

    def __init__(self, display: Display | None = None) -> None:
        self.display = display
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Time a stage; the value of the context is called with the number of units done."""
        started = time.perf_counter()
        if self.display is not None:
            self.display.begin(name, total)
        try:
            yield self.display.advance if self.display is not None else lambda done: None
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            if self.display is not None:
                self.display.end(elapsed)


class Bars:
    """A progress bar for the stage that runs, below those that it is a part of; a `Display`.

    Bars disappear with the end of their stages.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._tasks: list[TaskID] = []

    def begin(self, stage: str, total: int | None) -> None:
        """Show a new bar."""
        self._tasks.append(self._progress.add_task(stage, total=total))
        self._progress.start()

    def advance(self, done: int) -> None:
        """Move the bar."""
        self._progress.update(self._tasks[-1], completed=done)

    def end(self, seconds: float) -> None:
        """Remove the bar."""
        self._progress.remove_task(self._tasks.pop())
        if not self._tasks:
            self._progress.stop()
