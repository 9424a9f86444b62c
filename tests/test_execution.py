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

from qualms import execution
from qualms.errors import InputError, QualmsError, QualmsWarning
from qualms.execution import Workers, as_workers

EXECUTORS = ("none", "threads", "processes", "dask")
#: Where processes that do not inherit `sys.path` find this file.
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), *sys.path])


@dataclass(frozen=True)
class Numbers:
    """A shard: some numbers, and a place where tasks of all processes leave notes."""

    first: int
    last: int
    notes: Path | None = None

    def __len__(self):
        return self.last - self.first

    def halves(self):
        middle = (self.first + self.last) // 2
        return Numbers(self.first, middle, self.notes), Numbers(middle, self.last, self.notes)

    def note(self, name):
        """Whether this is the first task that leaves this note."""
        try:
            (self.notes / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def shards(n=40, size=5, notes=None):
    return [Numbers(i, min(i + size, n), notes) for i in range(0, n, size)]


# --- tasks ---


def values(shard):
    """Numbers whose sum depends on the order of the additions."""
    return np.random.default_rng(shard.first).normal(size=3) * 10.0 ** (shard.first % 7)


def listed(shard, shared=()):
    return [*range(shard.first, shard.last), *shared]


def slow_at_first(shard):
    time.sleep(0.2 if shard.first == 0 else 0.0)
    return listed(shard)


def too_large(shard):
    if len(shard) > 2:
        raise MemoryError
    return listed(shard)


def always_too_large(shard):
    raise MemoryError


def fills_memory(shard, shared=()):
    content = np.ones((len(shard), 15_000_000))  # 120 MB each
    if len(shard) > 2:
        time.sleep(60)  # until it is killed
    return [round(x) for x in content[:, 0] * np.arange(shard.first, shard.last)]


def killed_once(shard, shared=0.0):
    if shard.first == 15 and shard.note("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return values(shard) + shared


def killed(shard):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(shard):
    shard.note("begun")
    time.sleep(60)


def warns(shard):
    for _ in range(2):
        warnings.warn("This is odd.", QualmsWarning, stacklevel=1)
    warnings.warn("This is a matter of the library.", UserWarning, stacklevel=1)
    return listed(shard)


def rejects(shard):
    raise InputError(f"Shard {shard.first} cannot be used.", parameter="shard")


def fails(shard):
    raise ZeroDivisionError


def add(a, b):
    return a + b


def total(workers, function, shards, *shared, on_done=None, add=add):
    """Sum over all shards."""
    options = {"key": lambda shard: 0, "on_done": on_done}
    [(_, found)] = workers.reduce(function, add, shards, *shared, **options)
    return found


# --- executors ---


@pytest.fixture(scope="module")
def client():
    """Two workers of Dask, in processes."""
    pytest.importorskip("distributed", reason="Dask is not installed")
    with dask_client(n_workers=2) as found:
        yield found


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
            yield Workers()
        case "threads":
            with ThreadPoolExecutor(2) as executor:
                yield Workers(executor)
        case "processes":
            yield Workers(request.getfixturevalue("processes"))
        case "dask":
            yield Workers(request.getfixturevalue("client"))


def test_results_come_in_order(workers):
    done = []
    found = list(workers.map(slow_at_first, shards(), on_done=done.append))
    assert [i for part in found for i in part] == [*range(40)]
    assert done == shards()
    assert workers.number == (1 if workers.executor is None else 2)


def test_shared_values_are_given_to_all_tasks(workers):
    shared = workers.share(np.array([-1, -2]))
    found = list(workers.map(listed, shards(4, 2), shared))
    assert found == [[0, 1, -1, -2], [2, 3, -1, -2]]


def test_sums_do_not_depend_on_the_workers(workers):
    for n in (1, 5, 35, 40):
        done = []
        found = total(workers, values, shards(n), on_done=done.append)
        np.testing.assert_array_equal(found, total(Workers(), values, shards(n)))
        assert done == shards(n)


def test_sums_are_added_up_in_a_tree():
    text = total(Workers(), lambda s: str(s.first), shards(7, 1), add=lambda a, b: f"({a}{b})")
    assert text == "(((01)(23))((45)6))"


def test_a_shard_that_is_too_large_is_halved(workers):
    with pytest.warns(QualmsWarning, match="halved"):
        found = list(workers.map(too_large, shards(11, 6)))
    assert [i for part in found for i in part] == [*range(11)]
    assert max(map(len, found)) == 2
    with pytest.warns(QualmsWarning, match="halved"):
        assert total(workers, too_large, shards(11, 6)) == [*range(11)]


def test_a_single_structure_that_is_too_large_is_an_error(workers):
    with pytest.raises(MemoryError):
        list(workers.map(always_too_large, shards(2, 1)))


def test_warnings_are_issued_here(workers):
    for run in (
        lambda: list(workers.map(warns, shards(4, 2))),
        lambda: total(workers, warns, shards(4, 2)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        assert {str(w.message) for w in caught if w.category is QualmsWarning} == {"This is odd."}
        elsewhere = workers.executor is not None and not isinstance(
            workers.executor, ThreadPoolExecutor
        )
        assert elsewhere != any("library" in str(w.message) for w in caught)


def test_errors_of_tasks_arrive_as_they_are(workers):
    with pytest.raises(InputError) as error:
        list(workers.map(rejects, shards()))
    assert (error.value.parameter, str(error.value)) == ("shard", "Shard 0 cannot be used.")
    with pytest.raises(InputError):
        total(workers, rejects, shards())
    with pytest.raises(ZeroDivisionError):
        list(workers.map(fails, shards()))
    assert list(workers.map(listed, shards(2))) == [[0, 1]]  # they work on


def test_nothing_is_computed_in_vain():
    begun = []
    results = Workers().map(begun.append, shards())
    next(results)
    assert begun == shards()[:1]


def test_workers_that_join_get_tasks():
    class Counting(ThreadPoolExecutor):
        submitted = 0

        def submit(self, *task):
            self.submitted += 1
            return super().submit(*task)

    with Counting(1) as executor:
        results = Workers(executor).map(listed, shards(40, 1))
        next(results)
        assert executor.submitted == 2
        executor._max_workers = 4
        next(results)
        assert executor.submitted == 1 + 8


def test_an_executor_of_another_library(monkeypatch):
    """executorlib starts processes on the nodes of a cluster; here, on this machine."""
    executorlib = pytest.importorskip("executorlib", reason="executorlib is not installed")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    options = {"max_workers": 2, "block_allocation": True}
    with executorlib.SingleNodeExecutor(**options) as executor:
        workers = Workers(executor)
        workers.check([Path(__file__)])
        expected = total(Workers(), values, shards())
        np.testing.assert_array_equal(total(workers, values, shards()), expected)
        with pytest.warns(QualmsWarning, match="halved"):
            assert total(workers, too_large, shards(11, 6)) == [*range(11)]
        with pytest.raises(InputError):  # one task: executorlib waits for ever for cancelled ones
            list(workers.map(rejects, shards(5)))


# --- what is rejected ---


@pytest.mark.parametrize("executor", [4, "processes", map])
def test_anything_without_submit_is_no_executor(executor):
    with pytest.raises(InputError) as error:
        as_workers(executor)
    assert error.value.parameter == "executor"
    assert as_workers(None, 3) == Workers(None, 3)


def test_workers_with_other_versions_are_rejected(workers, monkeypatch):
    workers.check()
    monkeypatch.setattr(execution, "versions", lambda: {"qualms": "99.0"})
    if workers.executor is None or isinstance(workers.executor, ThreadPoolExecutor):
        workers.check()
        return
    for run in (workers.check, lambda: list(workers.map(listed, shards()))):
        with pytest.raises(InputError) as error:
            run()
        assert error.value.parameter == "executor"
        assert os.uname().nodename in str(error.value)
        assert "99.0" in str(error.value)
        assert execution.version("qualms") in str(error.value)


def test_workers_that_do_not_see_files_are_rejected(workers, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # not the directory of the workers
    file = Path("data.xyz")
    file.write_text("1\n\nH 0 0 0\n")
    workers.check([file])
    if workers.executor is None or isinstance(workers.executor, ThreadPoolExecutor):
        return
    for size in (4, None):  # as if the file here were another, or only there
        monkeypatch.setattr(execution, "sizes_of", lambda files, size=size: dict.fromkeys(files, 4))
        if size is None:
            file.unlink()
        with pytest.raises(InputError) as error:
            workers.check([file])
        assert error.value.parameter == "executor"
        assert "data.xyz" in str(error.value)


# --- the end of workers ---


def test_a_killed_process_of_a_pool_is_an_error():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with pytest.raises(QualmsError, match="ended"):
            list(Workers(executor).map(killed, shards()))
        with pytest.raises(QualmsError, match="ended"):
            list(Workers(executor).map(listed, shards()))


@pytest.mark.parametrize("how", ["map", "reduce"])
def test_a_killed_worker_of_dask_changes_nothing(client, tmp_path, how):
    workers, parts = Workers(client), shards(notes=tmp_path)
    expected = total(Workers(), values, parts)
    shared = workers.share(0.0)
    if how == "reduce":
        found = total(workers, killed_once, parts, shared)
    else:
        found = execution._tree(workers.map(killed_once, parts, shared), add)
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(found, expected)


def test_a_shard_whose_workers_are_killed_for_lack_of_memory_is_halved():
    dask = pytest.importorskip("dask", reason="Dask is not installed")
    pytest.importorskip("distributed", reason="Dask is not installed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        dask_client(n_workers=1, memory_limit="500MB") as client,
    ):
        workers = Workers(client)
        shared = workers.share([1])  # on the worker that is killed
        with pytest.warns(QualmsWarning, match="halved"):
            found = list(workers.map(fills_memory, [Numbers(0, 4)], shared))
    assert found == [[0, 1], [2, 3]]


@pytest.mark.parametrize("how", ["map", "reduce"])
def test_without_workers_there_is_a_warning_and_an_end(monkeypatch, how):
    pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr(execution, "_POLL", 0.2)
    with dask_client(n_workers=1) as client:
        workers = Workers(client)
        assert list(workers.map(listed, shards(4, 2))) == [[0, 1], [2, 3]]
        client.cluster.scale(0)
        while client.nthreads():
            time.sleep(0.05)
        with ThreadPoolExecutor(1) as executor:
            later = executor.submit(lambda: time.sleep(1) or client.cluster.scale(1))
            with pytest.warns(QualmsWarning, match="no worker"):
                found = total(workers, listed, shards(4, 2))
            later.result()
        assert found == [0, 1, 2, 3]
        client.cluster.scale(0)
        monkeypatch.setattr(execution, "_PATIENCE", 1.0)
        run = total if how == "reduce" else lambda w, f, s: list(w.map(f, s))
        with pytest.warns(QualmsWarning), pytest.raises(QualmsError, match="no worker"):
            run(workers, listed, shards(4, 2))


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
            results = Workers(client).map(waits, shards(4, 2, tmp_path))
            with ThreadPoolExecutor(1) as executor:
                found = executor.submit(list, results)
                while not (tmp_path / "begun").exists():
                    time.sleep(0.05)
                scheduler.kill()
                with pytest.raises(QualmsError, match="ended"):
                    found.result(timeout=50)


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
