"""How many cores are used: no more than the environment allows, and one for what is small.

`threadpoolctl.threadpool_limits` looks for libraries every time, which takes some milliseconds: as
long as the forces on a small molecule. Here they are looked for once.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

#: Structures of so few atoms have products so small that threads would wait for one another.
SMALL = 64
#: What users and job schedulers limit threads with.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def allowed_threads() -> int:
    """Return how many cores to use: all that this process may run on, or fewer if it is told so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # OpenMP takes a list, too: of the outer loop, and of loops inside it.
    said = [os.environ.get(name, "").split(",")[0].strip() for name in _VARIABLES]
    return min([cores or 1, *(int(text) for text in said if text.isdecimal() and int(text) > 0)])


def limit_rayon() -> None:
    """Have featomic, which reads a variable of its own when it starts, keep to the same limit."""
    if any(name in os.environ for name in _VARIABLES):
        os.environ.setdefault("RAYON_NUM_THREADS", str(allowed_threads()))


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def limited(threads: int, n_atoms: int | None = None) -> AbstractContextManager[Any]:
    """Return a context in which products use at most so many threads, and never more than before.

    Parameters
    ----------
    threads : int
    n_atoms : int, optional
        How many atoms it is about: few need one thread.
    """
    if n_atoms is not None and n_atoms <= SMALL:
        threads = 1
    libraries = _controller().lib_controllers
    limits = {lib.filepath: threads for lib in libraries if lib.num_threads > threads}
    if not limits:
        return nullcontext()
    found: AbstractContextManager[Any] = _controller().limit(limits=limits)
    return found
