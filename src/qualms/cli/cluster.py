"""Workers for a command: processes of this machine, those of a scheduler, or jobs of a queue."""

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
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qualms.errors import InputError, counted, did_you_mean

if TYPE_CHECKING:
    from qualms.cli._common import Terminal

#: Seconds to wait for a scheduler, and for the first of its workers.
_CONNECT, _WORKERS = 10, 60
#: The same for the first job of a queue, unless the configuration has a `timeout`.
_QUEUE = 24 * 3600
#: Seconds that local workers have to end before they are terminated.
_GRACE = 0.5
#: Variables that limit the threads of libraries when they start.
_THREADS = [f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")]

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
        metavar="[local:N|slurm|pbs|…]",
        help="Start workers: N processes of one core on this machine, or jobs of a queue (slurm, "
        "pbs, sge, lsf, htcondor, moab, oar) by dask-jobqueue.",
    ),
]
ClusterConfig = Annotated[
    Path | None,
    Option(
        rich_help_panel=_PANEL,
        help="YAML file for a queue: the number of `jobs`, the seconds to wait for the first "
        "(`timeout`), and options of dask-jobqueue such as queue, cores, memory and walltime.",
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
    local = cluster is not None and cluster.partition(":")[0] == "local"
    if cluster_config is not None and (cluster is None or local):
        raise InputError(
            "--cluster-config is for jobs of a queue: use it with --cluster slurm, or another one.",
            parameter="--cluster-config",
        )
    if not options:
        yield None
        return
    if len(options) > 1:
        raise InputError(
            f"{' and '.join(options)} exclude each other: use one of them.", parameter=options[1]
        )
    if local:
        from qualms.execution import as_workers

        with start_processes(str(cluster)) as executor:
            terminal.info(f"{counted(as_workers(executor).number, 'worker')} on this machine.")
            yield executor
        return
    option, value = options[0], str(values[options[0]])
    try:
        import distributed
    except ImportError as error:
        raise InputError(
            f"{option} needs Dask, which is not installed: pip install 'qualms[dask]'.",
            parameter=option,
        ) from error
    from qualms.io.files import check_input

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors arrive as exceptions
    with ExitStack() as stack:
        place, timeout = scheduler, _WORKERS
        if cluster is not None:
            started, timeout = start_cluster(cluster, cluster_config)
            place = stack.enter_context(started)
        try:
            if scheduler_file is not None:
                check_input(scheduler_file, "--scheduler-file")
                place = json.loads(scheduler_file.read_text("utf-8"))["address"]
            if cluster is None:
                asyncio.run(asyncio.wait_for(_shake_hands(place), _CONNECT))
            client = stack.enter_context(distributed.Client(place, timeout=_CONNECT))
        # A server of another kind answers with what is no message of Dask, or not at all.
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise InputError(
                f"No scheduler of Dask answers at {value} ({str(error) or 'no answer'}). An "
                "address is such as tcp://host:8786.",
                parameter=option,
            ) from error
        terminal.info(f"Dask dashboard: {client.dashboard_link}")
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError as error:
            raise InputError(
                f"No worker of {value} was there within {timeout} s. Look into the logs of the "
                "workers, or of their jobs.",
                parameter=option,
            ) from error
        terminal.info(f"{counted(len(client.nthreads()), 'worker')} at the start.")
        yield client


async def _shake_hands(address: Any) -> None:
    """Connect to a server of Dask, whose client would wait for ever for another one."""
    from distributed import Security
    from distributed.comm import connect

    comm = await connect(address, **Security().get_connection_args("client"))
    await comm.close()


@contextmanager
def start_processes(cluster: str) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes of this machine (``local:N``); they end with the block."""
    text = cluster.partition(":")[2]
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


def start_cluster(cluster: str, config: Path | None) -> tuple[Any, int]:
    """Submit jobs to a queue.

    Returns
    -------
    cluster : dask_jobqueue.JobQueueCluster
    timeout : int
        Seconds to wait for its first worker.
    """
    try:
        import dask.config
        import dask_jobqueue
    except ImportError as error:
        raise InputError(
            "Jobs of a queue need dask-jobqueue, which is not installed: pip install "
            "'qualms[dask]'.",
            parameter="--cluster",
        ) from error
    classes = [name for name in dir(dask_jobqueue) if name.endswith("Cluster")]
    queues = {name.removesuffix("Cluster").lower(): name for name in classes}
    queues.pop("jobqueue")
    if cluster not in queues:
        raise InputError(
            f"--cluster {cluster} is not known: use local:N or one of {', '.join(queues)}."
            f"{did_you_mean(cluster, queues)}",
            parameter="--cluster",
        )
    kind = getattr(dask_jobqueue, queues[cluster])
    command = kind.job_cls.submit_command.split()[0]
    if shutil.which(command) is None:
        raise InputError(
            f"--cluster {cluster} needs the command {command}, which is not on this machine. Run "
            "this on a login or compute node of the cluster.",
            parameter="--cluster",
        )
    options = _read_config(config)
    jobs, timeout = options.pop("jobs", 1), options.pop("timeout", _QUEUE)
    for name, number in {"jobs": jobs, "timeout": timeout}.items():
        if not isinstance(number, int) or number < 1:
            raise InputError(
                f"{name}: {number!r} in {config} is not a positive integer.",
                parameter="--cluster-config",
            )
    known = {**dask.config.get(f"jobqueue.{cluster}", {}), **options}
    if lacking := [name for name in ("cores", "memory") if known.get(name) is None]:
        raise InputError(
            f"The {' and '.join(lacking)} of a job must stand in the file of --cluster-config, "
            "such as {cores: 16, memory: 64GB}.",
            parameter="--cluster-config",
        )
    options["processes"] = known.get("processes") or known["cores"]  # of one core each
    try:
        started = kind(**options)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{config} has no valid options of {queues[cluster]}: {reason}.",
            parameter="--cluster-config",
        ) from error
    started.scale(jobs=jobs)
    return started, timeout


def _read_config(path: Path | None) -> dict[str, Any]:
    """Read options of a queue."""
    if path is None:
        return {}
    import yaml

    from qualms.io.files import check_input

    try:
        content = yaml.safe_load(check_input(path, "--cluster-config").read_text("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path} is not a readable YAML file: {reason}.", parameter="--cluster-config"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(
            f"{path} has no mapping of options, such as {{jobs: 4, cores: 16}}.",
            parameter="--cluster-config",
        )
    return {name.replace("-", "_"): value for name, value in content.items()}
