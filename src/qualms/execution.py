"""Tasks on workers: this process, others of this machine, or an executor of `concurrent.futures`.

Structures are divided into parts, and a task is a function of one part. Results come in the order
of the parts, so that sums of them do not depend on the number of workers. Dask is used by the
executor of its client.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from joblib.externals.loky import get_reusable_executor
from threadpoolctl import threadpool_limits

from qualms.errors import InputError, QualmsWarning, WorkersError

#: Packages whose versions must be the same everywhere: they determine features and results.
PACKAGES = ("qualms", "dscribe", "featomic", "sevenn", "mace-torch", "metatomic-torch")
#: Tasks for each worker that run or wait: more results than these are never in memory.
AHEAD = 2
_TURN = threading.Lock()

Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """Runs tasks; see `as_workers`.

    Parameters
    ----------
    executor : Executor, optional
        Without, tasks run in this process, one after the other.
    threads : int
        Cores of a task.
    client : dask.distributed.Client, optional
        The client of an executor of Dask. It shares large values, and inspects all workers.
    """

    executor: Executor | None = None
    threads: int = 1
    client: Any = None

    @property
    def number(self) -> int:
        """Number of workers, as far as it is known."""
        if self.executor is None:
            return 1
        if self.client is not None:
            return max(len(self.client.nthreads()), 1)
        return int(getattr(self.executor, "_max_workers", None) or 4)

    @property
    def memory(self) -> float | None:
        """Memory limit of the smallest worker in bytes; None if it is not known."""
        if self.client is None:
            return None
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        limits = [worker["memory_limit"] for worker in workers]
        return min((float(limit) for limit in limits if limit), default=None)

    def check(self, files: Sequence[Path] = ()) -> None:
        """Reject workers with other versions of packages, or that do not see the files.

        All workers of Dask are inspected, and one of another executor.
        """
        if self.executor is None:
            return
        paths = [Path(path).resolve() for path in files]
        try:
            with _end_of_workers():
                if self.client is not None:
                    reports = [*self.client.run(_inspect, paths).values()]
                else:
                    reports = [self.executor.submit(_inspect, paths).result()]
        except Exception as error:
            # Dask passes on the text of an error of a worker that cannot read its task.
            if "ModuleNotFoundError" not in repr(error):
                raise
            raise InputError(
                f"A worker cannot import qualms ({error}). Install the same versions on all "
                "workers.",
                parameter="executor",
            ) from error
        for report in reports:
            _compare(paths, *report)

    def share(self, value: Any) -> Any:
        """Send a large value to the workers once, and return a handle to pass to tasks.

        With Dask, it is the result of a task: one that is lost with its worker is computed again.
        """
        if self.client is None:
            return value
        with _end_of_workers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is large
            return self.client.submit(_same, value, pure=False)

    def map(
        self,
        function: Callable[..., Result],
        parts: Iterable[Part],
        *shared: Any,
    ) -> Iterator[Result]:
        """Yield ``function(part, *shared)`` for each part, in order.

        Parameters
        ----------
        function : callable
        parts : iterable
        *shared
            Further arguments of the function, the same for all parts.
        """
        ahead = 1 if self.executor is None else AHEAD
        for _, result in self._run_each(function, parts, shared, ahead, lambda first, *_: first):
            yield result

    def unordered(
        self, function: Callable[..., Result], parts: Iterable[Part], *shared: Any
    ) -> Iterator[tuple[Part, Result]]:
        """Yield each part with its result, as they are done.

        A part is taken when a worker is free: what has been taken is being computed.
        """
        yield from self._run_each(
            function, parts, shared, 1, lambda *running: next(as_completed(running))
        )

    def _run_each(
        self,
        function: Callable[..., Result],
        parts: Iterable[Part],
        shared: Sequence[Any],
        ahead: int,
        choose: Callable[..., Future[Any]],
    ) -> Iterator[tuple[Part, Result]]:
        """Yield parts and results; each worker has at most `ahead`, and `choose` takes the next."""
        executor = self.executor or _ThisProcess()
        waiting, running = iter(parts), dict[Future[Any], Part]()
        try:
            with _end_of_workers():
                while True:
                    # Workers may join at any time, or leave.
                    for part in islice(waiting, max(ahead * self.number - len(running), 0)):
                        task = function, _process(), self.threads, part, *shared
                        running[executor.submit(_run, *task)] = part
                    if not running:
                        break
                    future = choose(*running)
                    result, messages = future.result()
                    for message in messages:
                        warnings.warn(message, QualmsWarning, stacklevel=3)
                    yield running.pop(future), result
        finally:
            for future in running:
                future.cancel()


def as_workers(executor: Executor | Any | None, threads: int = 1) -> Workers:
    """Return workers for an executor, a Dask client, or None; reject anything else."""
    if executor is not None and hasattr(executor, "get_executor"):
        return Workers(executor.get_executor(pure=False), threads, executor)
    if executor is not None and not isinstance(executor, Executor):
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


_processes: Any = None


def processes(n_workers: int) -> Executor:
    """Return processes of this machine of one thread each, which end after a minute of rest."""
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "RAYON")}
    global _processes
    _processes = get_reusable_executor(max_workers=n_workers, env=single, timeout=60)
    return _processes  # type: ignore[no-any-return]


def in_processes(
    function: Callable[[Part], Result], parts: Iterable[Part], n_workers: int
) -> Iterator[Result]:
    """Yield the result for each part in order, by processes of this machine of one thread each.

    Parameters
    ----------
    function : callable
    parts : iterable
    n_workers : int
        Number of processes. They end when they have had nothing to do for a minute.
    """
    try:
        yield from Workers(processes(n_workers)).map(function, parts)
    except BaseException:  # an interrupt, too; to kill the processes at once is not safe in loky
        stop_workers()
        raise


def stop_workers() -> None:
    """End the processes of this machine, and free their memory."""
    global _processes
    if _processes is not None:
        _processes.shutdown(wait=True)
        _processes = None


class _ThisProcess(Executor):
    """Runs a task when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def _process() -> tuple[str, int]:
    """Return host and number of this process."""
    return socket.gethostname(), os.getpid()


def _run(
    function: Callable[..., Any], driver: tuple[str, int], threads: int, part: Any, *shared: Any
) -> tuple[Any, list[str]]:
    """Run a task on a worker; return its result and its warnings, which are issued by the driver.

    Tasks of a worker with several threads take turns: libraries of features, warnings and
    calculators are not made for threads.
    """
    with _TURN, threadpool_limits(limits=threads):
        if driver == _process():
            return function(part, *shared), []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", QualmsWarning)
            result = function(part, *shared)
    return result, list(dict.fromkeys(str(w.message) for w in caught))


def _same(value: Any) -> Any:
    return value


@contextmanager
def _end_of_workers() -> Iterator[None]:
    """Turn the end of workers, or of their scheduler, into a `WorkersError`."""
    try:
        yield
    except Exception as error:
        ended = (BrokenExecutor, CancelledError, ConnectionError, TimeoutError)
        of_dask = type(error).__module__.partition(".")[0] == "distributed"
        if not (of_dask or isinstance(error, ended)):
            raise
        first_line = str(error).partition("\n")[0]
        reason = ": ".join(filter(None, [type(error).__name__, first_line]))
        raise WorkersError(
            f"A worker, or the scheduler, ended ({reason}). It may have run out of memory: use "
            "fewer workers or threads, and check their logs."
        ) from error


# --- what workers must have in common ---


@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that determine results, if they are installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def sizes_of(files: Sequence[Path]) -> list[int | None]:
    """Return the size of each file in bytes, None if it cannot be seen."""
    sizes: list[int | None] = []
    for path in files:
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            sizes.append(None)
    return sizes


def _inspect(files: Sequence[Path]) -> tuple[str, dict[str, str], list[int | None]]:
    """Return host, versions of packages and sizes of files of a worker."""
    return socket.gethostname(), versions(), sizes_of(files)


def _compare(
    paths: Sequence[Path], host: str, installed: dict[str, str], sizes: Sequence[int | None]
) -> None:
    """Reject a worker whose packages or files differ from those here."""
    for name, here in versions().items():
        if installed.get(name) != here:
            raise InputError(
                f"The worker on {host} has {name} {installed.get(name, 'not at all')}; here it is "
                f"{here}. Install the same versions on all workers.",
                parameter="executor",
            )
    for path, expected, size in zip(paths, sizes_of(paths), sizes, strict=True):
        if size != expected:
            state = "is missing" if size is None else "has another size"
            raise InputError(
                f"{str(path)!r} {state} on {host}, where a worker runs. Put the files on a file "
                "system that all workers share.",
                parameter="executor",
            )
