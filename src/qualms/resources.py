"""Cores that may be used, and times.

`threadpoolctl.threadpool_limits` looks for libraries every time, which takes some milliseconds: as
long as the forces on a small molecule. Here they are looked for once.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from qualms.arrays import check_integer

#: Structures of so few atoms have products so small that threads would wait for one another.
SMALL = 64
#: Variables by which users and job schedulers limit threads.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: Where Linux reports the number of running threads.
_LOAD = Path("/proc/loadavg")


def allowed_threads() -> int:
    """Return the number of cores this process may use, limited by environment variables."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # OpenMP also takes a list, for nested loops.
    limits = [os.environ.get(name, "").split(",")[0].strip() for name in _VARIABLES]
    return min([cores or 1, *(int(text) for text in limits if text.isdecimal() and int(text) > 0)])


def default_threads(threads: int | None = None) -> int:
    """Return the number of cores to use: those that are allowed and idle, unless given.

    A product waits for the slowest of its threads, and waiting threads keep their cores busy: with
    others on the same cores, two threads may take several times as long as one.
    """
    if threads is not None:
        return check_integer("threads", threads, 1)
    allowed = allowed_threads()
    idle = (os.cpu_count() or 1) - (_running_elsewhere() if allowed > 1 else 0)
    return max(1, min(allowed, idle))


def _running_elsewhere() -> int:
    """Return how many other threads of the machine run or wait for a core; 0 if not known."""
    readings = []
    for _ in range(3):
        try:
            running = _LOAD.read_text().split()[3].split("/")[0]
        except OSError:
            return 0
        readings.append(int(running) - 1)
        time.sleep(0.002)
    return sorted(readings)[len(readings) // 2]


def limit_rayon() -> None:
    """Apply the same limit to featomic, which reads a variable of its own when it starts."""
    if any(name in os.environ for name in _VARIABLES):
        os.environ.setdefault("RAYON_NUM_THREADS", str(allowed_threads()))


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def find_libraries() -> None:
    """Look for libraries again, after a package was imported that brings its own."""
    _controller.cache_clear()


def limited(threads: int, n_atoms: int | None = None) -> AbstractContextManager[Any]:
    """Return a context in which products use at most so many threads, and one for few atoms."""
    if n_atoms is not None and n_atoms <= SMALL:
        threads = 1
    libraries = _controller().lib_controllers
    limits = {lib.filepath: threads for lib in libraries if lib.num_threads > threads}
    if not limits:
        return nullcontext()
    context: AbstractContextManager[Any] = _controller().limit(limits=limits)
    return context


def format_time(seconds: float) -> str:
    """Return a duration as text, such as "3 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
