"""What a run takes: time by the clock and memory, over all processes that worked on it."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Time and memory.

    Attributes
    ----------
    wall : float, optional
        Seconds by the clock, those between an interruption and the next start left out; None if
        they are not known.
    memory : float, optional
        Largest resident memory of a process and of its largest worker, in bytes; None if it is not
        known.
    """

    wall: float | None = 0.0
    memory: float | None = 0.0

    def plus(self, wall: float, memory: float) -> Costs:
        """Return what it took with one more process; what is not known stays so."""
        return Costs(
            None if self.wall is None else self.wall + wall,
            None if self.memory is None else max(self.memory, memory),
        )


def peak_memory() -> float:
    """Return the largest resident memory of this process and of its largest worker, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    used = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return float(unit * sum(resource.getrusage(who).ru_maxrss for who in used))
