"""Progress on a terminal."""

from __future__ import annotations

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


class Bars:
    """A progress bar for each stage; a `qualms.atomistic.progress.Display`."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int | None) -> None:
        """Show a new bar."""
        self._progress.start()
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, done: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def end(self, seconds: float) -> None:
        """Fill the bar and let it stand."""
        if self._task is not None:
            task = self._progress.tasks[self._task]
            total = task.total if task.total is not None else 1
            self._progress.update(self._task, total=total, completed=total)
            self._progress.stop_task(self._task)
        self._progress.refresh()
        self._progress.stop()
