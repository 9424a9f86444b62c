"""Tasks on workers: this process, executors, and Dask, with and without failures."""

import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from checks import rejects

from qualms import execution
from qualms.errors import InputError, QualmsError, QualmsWarning
from qualms.execution import AHEAD, Workers, as_workers

EXECUTORS = ("none", "threads", "processes", "dask")
#: Where processes that do not inherit `sys.path` find this file.
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), *sys.path])


@dataclass(frozen=True)
class Numbers:
    """A part: some numbers, and a place where tasks of all processes leave notes."""

    first: int
    last: int
    notes: Path | None = None

    def note(self, name):
        """Whether this is the first task that leaves this note."""
        try:
            (self.notes / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def parts_of(n=40, size=5, notes=None):
    return [Numbers(i, min(i + size, n), notes) for i in range(0, n, size)]


# --- tasks ---


def values(part):
    """Numbers whose sum depends on the order of the additions."""
    return np.random.default_rng(part.first).normal(size=3) * 10.0 ** (part.first % 7)


def listed(part, shared=()):
    return [*range(part.first, part.last), *shared]


def slow_at_first(part):
    time.sleep(0.2 if part.first == 0 else 0.0)
    return listed(part)


def killed_once(part, shared=0.0):
    if part.first == 15 and part.note("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return values(part) + shared


def killed(part):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(part):
    part.note("begun")
    time.sleep(60)


def warns(part):
    for _ in range(2):
        warnings.warn("This is odd.", QualmsWarning, stacklevel=1)
    warnings.warn("This is a matter of the library.", UserWarning, stacklevel=1)
    return listed(part)


def cannot_use(part):
    raise InputError(f"Part {part.first} cannot be used.", parameter="part")


def lacks_memory(part):
    raise MemoryError


def total(workers, function, parts, *shared):
    """Sum over all parts, in order."""
    return sum(workers.map(function, parts, *shared), start=np.zeros(3))


# --- executors ---


@pytest.fixture(scope="module")
def client():
    """Two workers of Dask, in processes."""
    pytest.importorskip("distributed", reason="Dask is not installed")
    with dask_client(n_workers=2) as client:
        yield client


@contextmanager
def dask_client(**options):
    from distributed import Client, LocalCluster

    options = {"processes": True, "threads_per_worker": 1, "dashboard_address": ":0"} | options
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        yield executor


@pytest.fixture(params=EXECUTORS)
def workers(request):
    """Workers of each kind."""
    match request.param:
        case "none":
            yield as_workers(None)
        case "threads":
            with ThreadPoolExecutor(2) as executor:
                yield as_workers(executor)
        case "processes":
            yield as_workers(request.getfixturevalue("processes"))
        case "dask":
            yield as_workers(request.getfixturevalue("client"))


def in_other_processes(workers):
    return workers.executor is not None and not isinstance(workers.executor, ThreadPoolExecutor)


def test_results_come_in_order(workers):
    results = list(workers.map(slow_at_first, parts_of()))
    assert [i for result in results for i in result] == [*range(40)]
    shared = workers.share(np.array([-1, -2]))
    results = list(workers.map(listed, parts_of(4, 2), shared))
    assert results == [[0, 1, -1, -2], [2, 3, -1, -2]]
    assert workers.number == (1 if workers.executor is None else 2)


def test_sums_do_not_depend_on_the_workers(workers):
    for n in (1, 5, 35, 40):
        result = total(workers, values, parts_of(n))
        np.testing.assert_array_equal(result, total(Workers(), values, parts_of(n)))


def test_warnings_are_issued_here(workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(workers.map(warns, parts_of(4, 2)))
    assert {str(w.message) for w in caught if w.category is QualmsWarning} == {"This is odd."}
    assert in_other_processes(workers) != any("library" in str(w.message) for w in caught)


def test_errors_of_tasks_arrive_as_they_are(workers):
    with pytest.raises(InputError) as error:
        list(workers.map(cannot_use, parts_of()))
    assert (error.value.parameter, str(error.value)) == ("part", "Part 0 cannot be used.")
    with pytest.raises(MemoryError):
        list(workers.map(lacks_memory, parts_of()))
    assert list(workers.map(listed, parts_of(2))) == [[0, 1]]  # they work on


def test_few_results_are_in_memory():
    begun = []
    next(Workers().map(begun.append, parts_of()))
    assert begun == parts_of()[:1]  # in this process, nothing is computed in vain

    class Counting(ThreadPoolExecutor):
        submitted = 0

        def submit(self, *task):
            self.submitted += 1
            return super().submit(*task)

    with Counting(3) as executor:
        results = Workers(executor).map(listed, parts_of(40, 1))
        for n in range(1, 5):
            next(results)
            assert executor.submitted == 3 * AHEAD + n - 1


# --- what is rejected ---


@pytest.mark.parametrize("executor", [4, "processes", map, ThreadPoolExecutor])
def test_other_objects_are_no_executors(executor):
    with rejects("executor"):
        as_workers(executor)
    assert as_workers(None, 3) == Workers(None, 3)


def test_workers_with_other_versions_are_rejected(workers, monkeypatch):
    workers.check()
    monkeypatch.setattr(execution, "versions", lambda: {"qualms": "99.0"})
    if not in_other_processes(workers):
        workers.check()
        return
    with rejects("executor") as error:
        workers.check()
    for text in (os.uname().nodename, "99.0", execution.version("qualms")):
        assert text in str(error.value)


def test_workers_that_do_not_see_files_are_rejected(workers, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # not the directory of the workers
    file = Path("data.xyz")
    file.write_text("1\n\nH 0 0 0\n")
    workers.check([file])
    if not in_other_processes(workers):
        return
    monkeypatch.setattr(execution, "sizes_of", lambda files: [4])
    for state in ("has another size", "is missing"):
        with rejects("executor") as error:
            workers.check([file])
        assert f"data.xyz' {state}" in str(error.value)
        file.unlink(missing_ok=True)


# --- the end of workers ---


def test_a_killed_process_of_a_pool_is_an_error():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        for task in (killed, listed):
            with pytest.raises(QualmsError, match="ended"):
                list(Workers(executor).map(task, parts_of()))


def test_a_killed_worker_of_dask_changes_nothing(client, tmp_path):
    workers, parts = as_workers(client), parts_of(notes=tmp_path)
    result = total(workers, killed_once, parts, workers.share(0.0))
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(result, total(Workers(), values, parts))


def test_without_workers_there_is_an_end_if_dask_is_told_so():
    dask = pytest.importorskip("dask", reason="Dask is not installed")
    pytest.importorskip("distributed", reason="Dask is not installed")
    with (
        dask.config.set({"distributed.scheduler.no-workers-timeout": "500ms"}),
        dask_client(n_workers=0) as client,
        pytest.raises(QualmsError, match="ended"),
    ):
        list(as_workers(client).map(listed, parts_of()))


def test_the_end_of_the_scheduler_is_an_error(tmp_path):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    contact = tmp_path / "scheduler.json"
    with started("scheduler", "--port", "0", "--no-dashboard", contact=contact) as scheduler:
        while not contact.exists():
            time.sleep(0.05)
        with (
            started("worker", "--nthreads", "1", "--no-dashboard", contact=contact),
            distributed.Client(scheduler_file=str(contact)) as client,
        ):
            results = as_workers(client).map(waits, parts_of(4, 2, tmp_path))
            with ThreadPoolExecutor(1) as executor:
                finished = executor.submit(list, results)
                while not (tmp_path / "begun").exists():
                    time.sleep(0.05)
                scheduler.kill()
                with pytest.raises(QualmsError, match="ended"):
                    finished.result(timeout=50)


@contextmanager
def started(name, *options, contact):
    """A process of Dask that uses this file to find the others."""
    command = [sys.executable, "-m", f"distributed.cli.dask_{name}", *options]
    process = subprocess.Popen(
        [*command, "--scheduler-file", str(contact)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
