"""Commands on Dask: options, prediction by parts, and evaluation."""

import gc
import sys
import time

import pytest
import yaml
from test_execution import started

from qualms.cli import cluster
from qualms.cli._common import Terminal
from qualms.cli.cluster import open_workers
from qualms.errors import InputError

pytest.importorskip("distributed", reason="Dask is not installed")
pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")

#: A queue that runs jobs at once, and how jobs are cancelled.
SBATCH = """#!/bin/sh
script=$(cat "$1")  # it is deleted afterwards
sh -c "$script" > /dev/null 2>&1 &
echo "Submitted batch job $!"
"""
SCANCEL = "#!/bin/sh\nkill $1 2> /dev/null\n"


def workers(**options):
    given = dict.fromkeys(("scheduler", "scheduler_file", "cluster", "cluster_config"))
    return open_workers(**(given | options), terminal=Terminal())


def rejected(**options):
    """The parameter of the error for these options."""
    with pytest.raises(InputError) as error, workers(**options):
        pass
    return error.value.parameter


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A directory with the commands of SLURM."""
    for name, text in {"sbatch": SBATCH, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def config(folder, **options):
    file = folder / "queue.yaml"
    file.write_text(yaml.safe_dump(options))
    return file


# --- options ---


def test_without_options_there_are_no_workers():
    with workers() as client:
        assert client is None


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")
def test_processes_of_this_machine(capsys):
    with workers(cluster="local:2") as client:
        assert list(client.nthreads().values()) == [1, 1]
        assert client.submit(sum, [1, 2]).result() == 3
    assert "http://" in capsys.readouterr().err


def test_workers_of_a_scheduler(tmp_path, monkeypatch):
    contact = tmp_path / "scheduler.json"
    options = ("--port", "0", "--no-dashboard")
    with started("scheduler", *options, contact=contact):
        while not contact.exists():
            time.sleep(0.05)
        monkeypatch.setattr(cluster, "_WORKERS", 1)
        assert rejected(scheduler_file=contact) == "--scheduler-file"  # there are no workers
        monkeypatch.undo()
        with started("worker", "--no-dashboard", contact=contact):
            with workers(scheduler_file=contact) as client:
                address = client.scheduler.address
            with workers(scheduler=address) as client:
                assert len(client.nthreads()) == 1


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")
def test_jobs_of_a_queue(queue):
    options = {"cores": 1, "memory": "1GB", "interface": "lo", "jobs": 2}
    with workers(cluster="slurm", cluster_config=config(queue, **options)) as client:
        client.wait_for_workers(2, timeout=30)
        assert list(client.nthreads().values()) == [1, 1]


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")
def test_the_script_of_a_job(queue, monkeypatch):
    monkeypatch.setattr("dask_jobqueue.SLURMCluster.scale", lambda self, jobs: None)
    options = {"cores": 8, "memory": "16GB", "queue": "long", "job-extra-directives": ["--nice=9"]}
    started, timeout = cluster.start_cluster("slurm", config(queue, timeout=5, **options))
    with started:
        script = started.job_script()
    assert timeout == 5
    for line in ("#SBATCH -p long", "#SBATCH --cpus-per-task=8", "#SBATCH --nice=9"):
        assert line in script.splitlines()
    assert "--nthreads 1 " in script
    assert "--nworkers 8 " in script


@pytest.mark.parametrize("spec", ["local", "local:", "local:0", "local:two", "cloud", "jobqueue"])
def test_other_clusters_are_rejected(spec):
    assert rejected(cluster=spec) == "--cluster"


def test_a_queue_needs_its_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rejected(cluster="slurm") == "--cluster"


@pytest.mark.parametrize(
    "text",
    ["[1]", "{", "jobs: none", "jobs: 0\ncores: 1", "cores: 2", "cores: 1\nmemory: 1GB\nqueu: a"],
)
@pytest.mark.filterwarnings("ignore:unclosed cluster:ResourceWarning")
def test_bad_configurations_are_rejected(queue, text):
    file = queue / "bad.yaml"
    file.write_text(text)
    assert rejected(cluster="slurm", cluster_config=file) == "--cluster-config"
    gc.collect()  # clusters of Dask that could not start


def test_options_that_contradict_each_other(queue):
    file = config(queue)
    assert rejected(cluster="local:2", scheduler="tcp://localhost:1") == "--cluster"
    assert rejected(cluster="local:2", cluster_config=file) == "--cluster-config"
    assert rejected(scheduler="tcp://localhost:1", cluster_config=file) == "--cluster-config"
    assert rejected(cluster="slurm", cluster_config=queue / "none.yaml") == "--cluster-config"


def test_schedulers_that_do_not_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "_CONNECT", 0.5)
    for address in ("tcp://127.0.0.1:1", "127.0.0.1:1", "nothing://x"):
        assert rejected(scheduler=address) == "--scheduler"
    file = tmp_path / "scheduler.json"
    for text in (None, "{}", "no JSON"):
        if text is not None:
            file.write_text(text)
        assert rejected(scheduler_file=file) == "--scheduler-file"


def test_without_dask(monkeypatch):
    for package, spec in {"distributed": "local:2", "dask_jobqueue": "slurm"}.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert rejected(cluster=spec) == "--cluster"
