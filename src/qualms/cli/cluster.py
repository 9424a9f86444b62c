"""Workers of Dask for a command: of a scheduler that runs, of this machine, or jobs of a queue."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from qualms.cli._common import Terminal

#: Seconds to wait for a scheduler, and for the first of its workers.
_CONNECT, _WORKERS = 10, 60
#: The same for the first job of a queue, unless the configuration has a `timeout`.
_QUEUE = 24 * 3600

_PANEL = "Dask"
Scheduler = Annotated[
    str | None,
    Option(rich_help_panel=_PANEL, help="Use the workers of this scheduler: tcp://HOST:8786."),
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
    """Yield a Dask client for these options, None without them; what was started ends with it."""
    given = {"--scheduler": scheduler, "--scheduler-file": scheduler_file, "--cluster": cluster}
    options = [name for name, value in given.items() if value is not None]
    if cluster_config is not None and (cluster is None or _is_local(cluster)):
        raise InputError("--cluster-config", cluster_config, "--cluster slurm, or another queue")
    if not options:
        yield None
        return
    if len(options) > 1:
        raise InputError(options[1], given[options[1]], f"only one of {' and '.join(options)}")
    option, value = options[0], str(given[options[0]])
    try:
        import distributed
    except ImportError as error:
        expected, remedy = "an installation with Dask", "pip install 'qualms[dask]'."
        raise InputError(option, value, expected, remedy) from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors arrive as exceptions
    with ExitStack() as stack:
        place, timeout = scheduler, _WORKERS
        if cluster is not None:
            started, timeout = start_cluster(cluster, cluster_config)
            place = stack.enter_context(started)
        try:
            if scheduler_file is not None:
                place = json.loads(scheduler_file.read_text("utf-8"))["address"]
            if cluster is None:
                asyncio.run(asyncio.wait_for(_shake_hands(place), _CONNECT))
            client = stack.enter_context(distributed.Client(place, timeout=_CONNECT))
        # A server of another kind answers with what is no message of Dask, or not at all.
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            expected = "the address of a running scheduler, such as tcp://host:8786"
            raise InputError(option, f"{value} ({str(error) or 'no answer'})", expected) from error
        terminal.info(f"Dask dashboard: {client.dashboard_link}")
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError as error:
            remedy = "Look into the logs of the workers, or of their jobs."
            raise InputError(option, value, f"a worker within {timeout} s", remedy) from error
        terminal.info(f"{counted(len(client.nthreads()), 'worker')} at the start.")
        yield client


async def _shake_hands(address: Any) -> None:
    """Connect to a server of Dask, whose client would wait for ever for another one."""
    from distributed import Security
    from distributed.comm import connect

    comm = await connect(address, **Security().get_connection_args("client"))
    await comm.close()


def _is_local(cluster: str) -> bool:
    return cluster.partition(":")[0] == "local"


def start_cluster(cluster: str, config: Path | None) -> tuple[Any, int]:
    """Start processes of this machine (``local:N``), or submit jobs to a queue.

    Returns
    -------
    cluster : dask.distributed.LocalCluster or dask_jobqueue.JobQueueCluster
    timeout : int
        Seconds to wait for its first worker.
    """
    if _is_local(cluster):
        from distributed import LocalCluster
        from distributed.gc import disable_gc_diagnosis

        number = cluster.partition(":")[2]
        if not number.isdecimal() or int(number) < 1:
            raise InputError("--cluster", cluster, "a number of processes, such as local:4")
        # Ctrl-C reaches all processes; this one ends the others.
        started = LocalCluster(
            n_workers=int(number),
            threads_per_worker=1,
            silence_logs=logging.CRITICAL,
            preload="import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        )
        disable_gc_diagnosis(force=True)  # Python ignores a Ctrl-C that arrives in its callback
        return started, _WORKERS
    try:
        import dask.config
        import dask_jobqueue
    except ImportError as error:
        expected, remedy = "an installation with dask-jobqueue", "pip install 'qualms[dask]'."
        raise InputError("--cluster", cluster, expected, remedy) from error
    found = [name for name in dir(dask_jobqueue) if name.endswith("Cluster")]
    queues = {name.removesuffix("Cluster").lower(): name for name in found}
    queues.pop("jobqueue")
    if cluster not in queues:
        raise InputError("--cluster", cluster, f"local:N, {', '.join(queues)}")
    kind = getattr(dask_jobqueue, queues[cluster])
    command = kind.job_cls.submit_command.split()[0]
    if shutil.which(command) is None:
        remedy = "Run this on a login or compute node of the cluster."
        raise InputError("--cluster", cluster, f"the command {command} on this machine", remedy)
    options = _read_config(config)
    jobs, timeout = options.pop("jobs", 1), options.pop("timeout", _QUEUE)
    for name, number in {"jobs": jobs, "timeout": timeout}.items():
        if not isinstance(number, int) or number < 1:
            raise InputError("--cluster-config", f"{name}: {number}", "a positive integer")
    known = {**dask.config.get(f"jobqueue.{cluster}", {}), **options}
    if lacking := [name for name in ("cores", "memory") if known.get(name) is None]:
        given = f"{config or 'no file'} without {' and '.join(lacking)}"
        expected = "cores and memory of a job, such as {cores: 16, memory: 64GB}"
        raise InputError("--cluster-config", given, expected)
    options["processes"] = known.get("processes") or known["cores"]  # of one core each
    try:
        started = kind(**options)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        given = f"{config} ({reason})"
        raise InputError("--cluster-config", given, f"options of {queues[cluster]}") from error
    started.scale(jobs=jobs)
    return started, timeout


def _read_config(path: Path | None) -> dict[str, Any]:
    """Read options of a queue."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        given = f"{path} ({' '.join(str(error).split())[:200]})"
        raise InputError("--cluster-config", given, "a YAML file") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        given = f"{path} ({type(content).__name__})"
        raise InputError("--cluster-config", given, "a mapping, such as {jobs: 4, cores: 16}")
    return {name.replace("-", "_"): value for name, value in content.items()}
