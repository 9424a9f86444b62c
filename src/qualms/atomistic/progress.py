"""Progress of long work, and how long each stage took.

Numbers are told apart from how they are shown: a `Stages` times stages and passes counts on to a
display, which may be a terminal, a test, or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Display(Protocol):
    """What shows progress."""

    def begin(self, stage: str, total: int | None) -> None:
        """Start to show a stage of `total` units of work, or of unknown length."""
        ...

    def advance(self, done: int) -> None:
        """Show that so many units are done."""
        ...

    def end(self, seconds: float) -> None:
        """Finish the stage."""
        ...


class Stages:
    """Times the stages of a piece of work.

    Attributes
    ----------
    seconds : dict of str to float
        How long each stage took so far.
    after : callable, optional
        Called after each stage, to note what is to be known if the next one is interrupted.
    """

    def __init__(self, display: Display | None = None) -> None:
        self.display = display
        self.seconds: dict[str, float] = {}
        self.after: Callable[[], object] | None = None

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Time a stage; the value of the context is called with the number of units done."""
        started = time.perf_counter()
        if self.display is not None:
            self.display.begin(name, total)
        try:
            yield self._advance
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            if self.display is not None:
                self.display.end(elapsed)
            if self.after is not None:
                self.after()

    def _advance(self, done: int) -> None:
        if self.display is not None:
            self.display.advance(done)
