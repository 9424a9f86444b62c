"""Wall time, CPU time and peak memory of a command, whatever processes it starts."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

#: Seconds between two looks at the memory; a look takes a few milliseconds. (The kernel's ru_maxrss
#: would miss nothing, but a process inherits it from the one that started it.)
INTERVAL = 0.1


@dataclass(frozen=True)
class Measured:
    """What a command took.

    Attributes
    ----------
    seconds : float
        Wall time from start to end.
    cpu : float
        CPU time of the process and of those that it started and waited for, in seconds.
    peak : float
        Largest resident memory of all its processes together, in MiB. Pages that they share, such
        as those of libraries, count for each.
    output : str
        What it wrote to its standard output.
    """

    seconds: float
    cpu: float
    peak: float
    output: str


def measure(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Measured:
    """Run a command; variables of `env` are added to the environment.

    Raises
    ------
    RuntimeError
        With the end of what it wrote, if the command fails.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        sampler = _Sampler(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        peak = sampler.stop()
        written, complaints = _text(output), _text(errors)
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{written[-2000:]}\n{complaints[-2000:]}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, peak, written)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class _Sampler:
    """Looks at the memory of a process and its descendants until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Return the largest sum that was seen, in MiB."""
        self._ended.set()
        self._thread.join()
        return self._peak / 2**20

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._peak = max(self._peak, self._resident())

    def _resident(self) -> int:
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return sum(map(_resident_of, family))


def _resident_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0
