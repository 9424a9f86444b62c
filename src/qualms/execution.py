"""Tasks on workers: in this process, by any executor of `concurrent.futures`, or by Dask.

Structures are divided into shards, and a task is a function of one shard. Results come in the order
of the shards, and sums are added up in a tree whose shape depends on the number of shards alone, so
that they do not depend on the number of workers.

A shard that is too large for the memory of its worker is halved. So results must be such that those
of two halves, one after the other, can stand for that of the whole.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

from threadpoolctl import threadpool_limits

from qualms.errors import InputError, QualmsError, QualmsWarning

#: Packages whose versions must be the same everywhere: they determine features and results.
PACKAGES = ("qualms", "dscribe", "featomic", "sevenn", "mace-torch", "metatomic-torch")
#: Parameters of `mallopt` in the C library of Linux.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Tasks for each worker that run or wait: more results than these are never in memory.
_AHEAD = 2
#: Seconds after which it is checked whether workers of Dask run, and to wait if none does.
_POLL, _PATIENCE = 10.0, 1800.0
_TURN = threading.Lock()

Result = TypeVar("Result")


class Shard(Protocol):
    """A part of the work of a task that can be halved."""

    def __len__(self) -> int:
        """Return its size; a shard of one structure is not halved."""

    def halves(self) -> tuple[Self, Self]:
        """Return two shards that are this one, one after the other."""


class _Done(NamedTuple):
    """The result of a task and the warnings that it issued."""

    result: Any
    messages: tuple[str, ...]


@dataclass(frozen=True)
class Workers:
    """Runs tasks.

    Parameters
    ----------
    executor : Executor or dask.distributed.Client, optional
        Without, tasks run in this process, one after the other.
    threads : int
        Cores of a task.
    """

    executor: Any = None
    threads: int = 1

    @property
    def is_dask(self) -> bool:
        """Whether the executor is a Dask client: sums are then added up by its workers."""
        return hasattr(self.executor, "scatter") and hasattr(self.executor, "gather")

    @property
    def number(self) -> int:
        """Number of tasks that run at the same time, as far as that is known."""
        if self.executor is None:
            return 1
        if self.is_dask:
            return max(int(sum(self.executor.nthreads().values())), 1)
        return int(getattr(self.executor, "_max_workers", None) or 4)

    def check(self, files: Sequence[Path] = ()) -> None:
        """Reject workers with other versions of packages, or that do not see the files."""
        paths = tuple(Path(path).resolve() for path in files)
        found: Iterable[Any] = ()
        if self.is_dask:
            try:
                with _end_of_workers():
                    found = self.executor.run(_inspect, paths).values()
            except Exception as error:
                # Dask passes on the text of an error of a worker that cannot read its task.
                if "ModuleNotFoundError" not in repr(error):
                    raise
                raise InputError(
                    f"A worker cannot import qualms ({error}). Install the same versions on all "
                    "workers.",
                    parameter="executor",
                ) from error
        elif self.executor is not None:
            found = self.map(_inspect_for, [_Files(paths)])
        for one in found:
            _compare(versions(), sizes_of(paths), *one)

    @property
    def memory(self) -> float | None:
        """Memory limit of the smallest worker in bytes; None if it is not known."""
        limits = [one["memory_limit"] for one in self._dask_workers()]
        return min((float(limit) for limit in limits if limit), default=None)

    def _dask_workers(self) -> list[dict[str, Any]]:
        """Return what the scheduler of Dask knows of each worker."""
        if not self.is_dask:
            return []
        return [*self.executor.scheduler_info(n_workers=-1)["workers"].values()]

    def share(self, value: Any) -> Any:
        """Return what tasks are given for a large value that many of them need.

        With Dask, it is the result of a task: one that is lost with its worker is computed again.
        """
        if not self.is_dask:
            return value
        with _end_of_workers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is large
            return self.executor.submit(_same, value, pure=False)

    def map(
        self,
        function: Callable[..., Result],
        shards: Iterable[Shard],
        *shared: Any,
        on_done: Callable[[Shard], object] | None = None,
    ) -> Iterator[Result]:
        """Yield ``function(shard, *shared)`` for each shard, in order.

        A shard that was halved yields two results. `on_done` is called with each shard.
        """
        for shard, future in self._finished(function, shards, shared):
            with _end_of_workers():
                done = future.result()
            result: Result = _unwrap(done)
            if on_done is not None:
                on_done(shard)
            yield result

    def reduce(
        self,
        function: Callable[..., Result],
        add: Callable[[Result, Result], Result],
        shards: Iterable[Shard],
        *shared: Any,
        key: Callable[[Any], int],
        on_done: Callable[[Shard], object] | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """Yield each key, and the sum of ``function(shard, *shared)`` over its shards.

        Shards of a key follow each other. They are added up in order, in a binary tree. `add` must
        not change its arguments.
        """

        def leaves() -> Iterator[tuple[int, Any]]:
            for shard, future in self._finished(function, shards, shared):
                if on_done is not None:
                    on_done(shard)
                yield key(shard), future if self.is_dask else future.result()

        def pair(a: Any, b: Any) -> Any:
            return self.executor.submit(_add, add, a, b, pure=False)

        for name, group in groupby(leaves(), key=itemgetter(0)):
            with _end_of_workers():
                parts = (part for _, part in group)
                done = _tree(parts, pair if self.is_dask else partial(_add, add))
                if self.is_dask:
                    self._wait(done)
                    done = done.result()
            yield name, _unwrap(done)

    def _finished(
        self, function: Callable[..., Any], shards: Iterable[Shard], shared: tuple[Any, ...]
    ) -> Iterator[tuple[Shard, Any]]:
        """Yield shards, in order, and their futures when these are done; halve if need be."""
        todo, pending = deque(shards), deque[tuple[Shard, Any]]()
        try:
            while todo or pending:
                # Workers may join at any time.
                limit = 1 if self.executor is None else _AHEAD * self.number
                while todo and len(pending) < limit:
                    shard = todo.popleft()
                    pending.append((shard, self._submit(function, shard, shared)))
                shard, future = pending.popleft()
                with _end_of_workers():
                    error = self._wait(future)
                    if error is None and future.cancelled():
                        raise CancelledError
                if error is None:
                    yield shard, future
                elif _lacks_memory(error) and len(shard) > 1:
                    message = f"A shard of {len(shard)} is too large for its worker: it is halved."
                    warnings.warn(message, QualmsWarning, stacklevel=2)
                    halves = [
                        (half, self._submit(function, half, shared)) for half in shard.halves()
                    ]
                    pending.extendleft(reversed(halves))
                else:
                    with _end_of_workers():
                        raise error
        finally:
            for _, future in pending:
                future.cancel()

    def _wait(self, future: Any) -> BaseException | None:
        """Wait for a task, and return its error; with Dask, not for ever if no worker runs."""
        if not self.is_dask:
            return cast("BaseException | None", future.exception())
        waited = 0.0
        while waited < _PATIENCE:
            try:
                return cast("BaseException | None", future.exception(timeout=_POLL))
            except TimeoutError:
                states = [one["status"] for one in self._dask_workers()]
            if "running" in states:
                waited = 0.0
                continue
            state = "All workers are paused, for lack of memory" if states else "There is no worker"
            if not waited:
                message = f"{state}: waiting for {_PATIENCE / 60:.0f} min at most."
                warnings.warn(message, QualmsWarning, stacklevel=2)
            waited += _POLL
        raise QualmsError(f"{state}. Start workers with more memory or time, and start again.")

    def _submit(self, function: Callable[..., Any], shard: Shard, shared: tuple[Any, ...]) -> Any:
        task = function, _Driver(_process(), versions()), self.threads, shard, *shared
        if self.executor is None:
            return _Here(task)
        with _end_of_workers():
            if self.is_dask:
                return self.executor.submit(_run, *task, pure=False)
            return self.executor.submit(_run, *task)


def _unwrap(done: _Done) -> Any:
    """Return the result of a task, and issue its warnings here, once each."""
    for message in done.messages:
        warnings.warn(message, QualmsWarning, stacklevel=3)
    return done.result


class _Here:
    """A task of this process, run when it is asked for: a future of one thread."""

    def __init__(self, task: tuple[Any, ...]) -> None:
        self._task = task

    def exception(self) -> BaseException | None:
        try:
            self._done = _run(*self._task)
        except MemoryError as error:
            return error
        return None

    def result(self) -> _Done:
        return self._done

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> None:
        """Do nothing: it has not begun."""


class _Driver(NamedTuple):
    """The process that submits tasks, and its packages."""

    process: tuple[str, int]
    packages: dict[str, str]


def _process() -> tuple[str, int]:
    """Return host and number of this process."""
    return socket.gethostname(), os.getpid()


def _run(
    function: Callable[..., Any], driver: _Driver, threads: int, shard: Shard, *shared: Any
) -> _Done:
    """Run a task on a worker, and record warnings, unless they are issued in the same process.

    Tasks of a worker with several threads take turns, with all threads for products: libraries of
    features, warnings and calculators are not made for threads.
    """
    with _TURN, threadpool_limits(limits=max(threads, _threads_of_worker())):
        if driver.process == _process():
            return _Done(function(shard, *shared), ())
        _reuse_memory()
        _compare(driver.packages, {}, socket.gethostname(), versions(), {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", QualmsWarning)
            result = function(shard, *shared)
    return _Done(result, tuple(dict.fromkeys(str(w.message) for w in caught)))


def _threads_of_worker() -> int:
    """Return the threads of the worker of Dask that runs this; 1 of all others."""
    distributed = sys.modules.get("distributed")
    with suppress(ValueError, AttributeError):
        return int(distributed.get_worker().state.nthreads)  # type: ignore[union-attr]
    return 1


def _same(value: Any) -> Any:
    return value


@cache
def _reuse_memory() -> None:
    """Undo a default of Dask, with which every large array is new memory: that costs time.

    Its workers return what is freed to the system. Here up to 128 MB are kept, as is usual.
    """
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == "65536":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_TRIM_THRESHOLD, 128 * 1024**2)
            libc.mallopt(_MMAP_THRESHOLD, 32 * 1024**2)


def _add(add: Callable[[Any, Any], Any], a: _Done, b: _Done) -> _Done:
    """Add two results on a worker."""
    messages = tuple(dict.fromkeys(a.messages + b.messages))
    return _Done(add(a.result, b.result), messages)


def _tree(parts: Iterable[Any], add: Callable[[Any, Any], Any]) -> Any:
    """Add parts up in order, as the leaves of a binary tree: at most log₂ n sums wait."""
    waiting: list[tuple[int, Any]] = []
    for part in parts:
        level = 0
        while waiting and waiting[-1][0] == level:
            part, level = add(waiting.pop()[1], part), level + 1
        waiting.append((level, part))
    _, total = waiting.pop()
    while waiting:
        total = add(waiting.pop()[1], total)
    return total


def _lacks_memory(error: BaseException) -> bool:
    """Whether a task ended because its worker lacked memory; Dask kills such workers."""
    return isinstance(error, MemoryError) or type(error).__name__ == "KilledWorker"


@contextmanager
def _end_of_workers() -> Iterator[None]:
    """Turn the end of workers, or of their scheduler, into an error that says what to do."""
    try:
        yield
    except QualmsError:
        raise
    except Exception as error:
        lost = {"KilledWorker", "CommClosedError", "FutureCancelledError", "TerminatedWorkerError"}
        kinds = {kind.__name__ for kind in type(error).__mro__}
        ended = (BrokenProcessPool, CancelledError, ConnectionError, TimeoutError)
        if not (kinds & lost or isinstance(error, ended)):
            raise
        reason = ": ".join(filter(None, [type(error).__name__, str(error)]))
        raise QualmsError(
            f"The workers, or their scheduler, ended ({reason}). Check their logs and memory, and "
            "start again."
        ) from error


# --- what workers must have in common ---


@dataclass(frozen=True)
class _Files:
    """Files that a worker must see."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return 1

    def halves(self) -> tuple[_Files, _Files]:
        raise AssertionError


@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that determine results, if they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sizes_of(files: Sequence[Path]) -> dict[Path, int | None]:
    """Return the size of each file in bytes, None if it cannot be seen."""
    return {path: _size_of(path) for path in files}


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _inspect(files: tuple[Path, ...]) -> tuple[str, dict[str, str], dict[Path, int | None]]:
    return socket.gethostname(), versions(), sizes_of(files)


def _inspect_for(files: _Files) -> tuple[str, dict[str, str], dict[Path, int | None]]:
    return _inspect(files.paths)


def _compare(
    expected: dict[str, str],
    sizes: dict[Path, int | None],
    host: str,
    found: dict[str, str],
    seen: dict[Path, int | None],
) -> None:
    """Reject a worker whose packages or files differ from those here."""
    for name, wanted in expected.items():
        if found.get(name) != wanted:
            there = f"has {name} {found[name]}" if name in found else f"does not have {name}"
            raise InputError(
                f"The worker on {host} {there}; here it is {wanted}. Install the same versions on "
                "all workers.",
                parameter="executor",
            )
    for path, size in sizes.items():
        if seen[path] != size:
            state = "is missing" if seen[path] is None else "has another size"
            raise InputError(
                f"{str(path)!r} {state} on {host}, where a worker runs. Put the files on a file "
                "system that all workers share.",
                parameter="executor",
            )


def as_workers(executor: Executor | Any | None, threads: int = 1) -> Workers:
    """Return workers for an executor, a Dask client, or None; reject anything else."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise InputError(
            f"`executor` is {repr(executor)[:60]}, not a concurrent.futures.Executor or a "
            "dask.distributed.Client.",
            parameter="executor",
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        # A copy of a process in which featomic has started threads waits for these for ever.
        raise InputError(
            "`executor` is a pool of forked processes, which may wait for ever. Use "
            "ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn')).",
            parameter="executor",
        )
    return Workers(executor, threads)
