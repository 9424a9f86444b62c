"""How many cores matrix products may use.

`threadpoolctl.threadpool_limits` looks for libraries every time, which takes some milliseconds: as
long as the forces on a small molecule. Here they are looked for once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def limited(threads: int) -> AbstractContextManager[Any]:
    """Return a context in which products use at most so many threads."""
    found: AbstractContextManager[Any] = _controller().limit(limits=threads)
    return found
