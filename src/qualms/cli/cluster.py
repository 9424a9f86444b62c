"""Workers for a command: processes of this machine, jobs of Slurm, or those of a scheduler."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qualms.cli.options import read_yaml
from qualms.cli.terminal import Terminal
from qualms.errors import InputError, counted, did_you_mean
from qualms.io.files import check_input


@contextmanager
def open_workers(
    cluster: str | None, cluster_config: Path | None, terminal: Terminal
) -> Iterator[Any]:
    """Yield an executor or a client of Dask for these options, and end what was started.

    Parameters
    ----------
    cluster : str, optional
        ``local:N``, ``slurm``, the address of a scheduler, or the file that it writes. Without,
        None is yielded.
    cluster_config : path, optional
        Options of the jobs of Slurm.
    terminal : Terminal
        Shows the number of workers.
    """
    if cluster_config is not None and cluster != "slurm":
        raise InputError(
            "--cluster-config is for jobs of Slurm: use it with --cluster slurm.",
            parameter="--cluster-config",
        )
    if cluster is None:
        yield None
    elif cluster.startswith("local"):
        with start_processes(cluster) as executor:
            terminal.info(f"{counted(int(cluster.partition(':')[2]), 'worker')} on this machine.")
            yield executor
    else:
        with connect(cluster, cluster_config) as client:
            terminal.info(f"Dask dashboard: {client.dashboard_link}")
            if cluster == "slurm":
                client.wait_for_workers(1)
            elif not client.nthreads():
                raise InputError(
                    f"The scheduler at {cluster} has no workers. Start them first.",
                    parameter="--cluster",
                )
            terminal.info(f"{counted(len(client.nthreads()), 'worker')} at the start.")
            yield client


@contextmanager
def connect(cluster: str, config: Path | None) -> Iterator[Any]:
    """Yield a client of Dask for jobs of Slurm, or for the scheduler of an address or a file."""
    if cluster != "slurm" and "://" not in cluster and not cluster.endswith(".json"):
        raise InputError(
            f"--cluster {cluster} is none of local:N, slurm, the address of a scheduler of Dask "
            "such as tcp://host:8786, and a file that it wrote (.json)."
            f"{did_you_mean(cluster, ('local', 'slurm'))} For another queue, start a scheduler and "
            "workers of Dask.",
            parameter="--cluster",
        )
    try:
        import distributed

        if cluster == "slurm":
            import dask_jobqueue  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--cluster {cluster} needs Dask, which is not installed: pip install 'qualms[dask]'.",
            parameter="--cluster",
        ) from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors arrive as exceptions
    with ExitStack() as stack:
        place = stack.enter_context(start_slurm(config)) if cluster == "slurm" else cluster
        try:
            if cluster.endswith(".json"):
                file = check_input(Path(cluster), "--cluster")
                place = json.loads(file.read_text("utf-8"))["address"]
            client = stack.enter_context(distributed.Client(place))
        except Exception as error:  # a server of another kind may answer anything
            raise InputError(
                f"No scheduler of Dask answers at {cluster} ({str(error) or 'no answer'}). An "
                "address is such as tcp://host:8786.",
                parameter="--cluster",
            ) from error
        yield client


@contextmanager
def start_processes(cluster: str) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes of this machine (``local:N``); they end with the block."""
    text = cluster.removeprefix("local:")
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
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()  # it may be in the middle of a task


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    """Give new processes one thread; Ctrl-C, which reaches all processes, is for this one."""
    handler, before = signal.signal(signal.SIGINT, signal.SIG_IGN), dict(os.environ)
    libraries = ("OMP", "OPENBLAS", "MKL", "RAYON")
    os.environ.update({f"{library}_NUM_THREADS": "1" for library in libraries})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
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
