"""Workers for a command: processes of this machine, those of a scheduler, or jobs of Slurm."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from qualms.cli._common import Terminal, read_yaml
from qualms.errors import InputError, counted, did_you_mean
from qualms.io.files import check_input

#: Seconds to wait for a scheduler, and for the first of its workers.
CONNECT_TIMEOUT, WORKERS_TIMEOUT = 10, 60
#: Seconds that local workers have to end before they are terminated.
_GRACE = 0.5
#: Variables that limit the threads of libraries when they start.
_THREADS = [f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")]
_KINDS = ("local", "slurm")

_PANEL = "Workers"
Scheduler = Annotated[
    str | None,
    Option(
        rich_help_panel=_PANEL, help="Use the workers of this scheduler of Dask: tcp://HOST:8786."
    ),
]
SchedulerFile = Annotated[
    Path | None,
    Option(rich_help_panel=_PANEL, help="The same, by the file that the scheduler writes."),
]
Cluster = Annotated[
    str | None,
    Option(
        rich_help_panel=_PANEL,
        metavar="[local:N|slurm]",
        help="Start workers: N processes of one core on this machine, or jobs of Slurm.",
    ),
]
ClusterConfig = Annotated[
    Path | None,
    Option(
        rich_help_panel=_PANEL,
        help="YAML file for Slurm: the number of `jobs`, and options of dask-jobqueue such as "
        "queue, cores, memory and walltime.",
    ),
]


@contextmanager
def open_workers(
    scheduler: str | None,
    scheduler_file: Path | None,
    cluster: str | None,
    cluster_config: Path | None,
    terminal: Terminal,
) -> Iterator[Any]:
    """Yield an executor for these options, None without them; what was started ends with it."""
    values = {"--scheduler": scheduler, "--scheduler-file": scheduler_file, "--cluster": cluster}
    options = [name for name, value in values.items() if value is not None]
    if cluster_config is not None and cluster != "slurm":
        raise InputError(
            "--cluster-config is for jobs of Slurm: use it with --cluster slurm.",
            parameter="--cluster-config",
        )
    if not options:
        yield None
        return
    if len(options) > 1:
        raise InputError(
            f"{' and '.join(options)} exclude each other: use one of them.", parameter=options[1]
        )
    if cluster is not None and cluster != "slurm":
        with start_processes(cluster) as executor:
            terminal.info(f"{counted(int(cluster.partition(':')[2]), 'worker')} on this machine.")
            yield executor
        return
    option, value = options[0], str(values[options[0]])
    try:
        if cluster is not None:
            import dask_jobqueue  # noqa: F401
        import distributed
    except ImportError as error:
        raise InputError(
            f"{option} needs Dask, which is not installed: pip install 'qualms[dask]'.",
            parameter=option,
        ) from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors arrive as exceptions
    with ExitStack() as stack:
        place: Any = scheduler
        if cluster is not None:
            place = stack.enter_context(start_slurm(cluster_config))
        elif scheduler_file is not None:
            check_input(scheduler_file, option)
        try:
            if scheduler_file is not None:
                place = json.loads(scheduler_file.read_text("utf-8"))["address"]
            if cluster is None:
                asyncio.run(asyncio.wait_for(_shake_hands(place), CONNECT_TIMEOUT))
            client = stack.enter_context(distributed.Client(place, timeout=CONNECT_TIMEOUT))
        # A server of another kind answers with what is no message of Dask, or not at all.
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise InputError(
                f"No scheduler of Dask answers at {value} ({str(error) or 'no answer'}). An "
                "address is such as tcp://host:8786.",
                parameter=option,
            ) from error
        terminal.info(f"Dask dashboard: {client.dashboard_link}")
        try:
            client.wait_for_workers(1, timeout=WORKERS_TIMEOUT if cluster is None else None)
        except TimeoutError as error:
            raise InputError(
                f"No worker of {value} was there within {WORKERS_TIMEOUT} s. Look into their logs.",
                parameter=option,
            ) from error
        terminal.info(f"{counted(len(client.nthreads()), 'worker')} at the start.")
        yield client


async def _shake_hands(address: Any) -> None:
    """Connect to a server of Dask, whose client would wait for ever for a silent one."""
    from distributed import Security
    from distributed.comm import connect

    comm = await connect(address, **Security().get_connection_args("client"))
    await comm.close()


@contextmanager
def start_processes(cluster: str) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes of this machine (``local:N``); they end with the block."""
    kind, _, text = cluster.partition(":")
    if kind != "local":
        raise InputError(
            f"--cluster {cluster} is not known: use local:N or slurm.{did_you_mean(kind, _KINDS)} "
            "For another queue, start a scheduler and workers of Dask, and use --scheduler.",
            parameter="--cluster",
        )
    if not text.isdecimal() or int(text) < 1:
        raise InputError(
            f"--cluster {cluster} has no number of processes, such as local:4.",
            parameter="--cluster",
        )
    number, others = int(text), multiprocessing.active_children()
    executor = ProcessPoolExecutor(
        number, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        with _environment_of_workers():
            for _ in range(number):  # a process is started for each task that finds none idle
                executor.submit(int)
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _GRACE
        for process in multiprocessing.active_children():
            if process not in others:
                process.join(max(deadline - time.monotonic(), 0.0))
                process.terminate()  # one that is in the middle of a task


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    """Give new processes one thread; Ctrl-C, which reaches all processes, is for this one."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        signal.signal(signal.SIGINT, handler)


def _end_with_parent() -> None:
    """Let a worker end when the process that started it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_slurm(config: Path | None) -> Any:
    """Submit jobs to Slurm, and return their `dask_jobqueue.SLURMCluster`."""
    import dask.config
    from dask_jobqueue import SLURMCluster

    if shutil.which("sbatch") is None:
        raise InputError(
            "--cluster slurm needs the command sbatch, which is not on this machine. Run this on a "
            "login or compute node of the cluster.",
            parameter="--cluster",
        )
    content = {} if config is None else read_yaml(config, "--cluster-config")
    options = {name.replace("-", "_"): value for name, value in content.items()}
    jobs = options.pop("jobs", 1)
    defaults = {**dask.config.get("jobqueue.slurm", {}), **options}
    options["processes"] = defaults.get("processes") or defaults.get("cores")  # of one core each
    try:
        if not isinstance(jobs, int) or jobs < 1:
            raise ValueError(f"the number of jobs, {jobs!r}, is not a positive integer")
        cluster = SLURMCluster(**options)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"Jobs of Slurm cannot have these options: {reason}. Write those of SLURMCluster into "
            "the file of --cluster-config, such as {jobs: 4, cores: 16, memory: 64GB}.",
            parameter="--cluster-config",
        ) from error
    cluster.scale(jobs=jobs)
    return cluster
