"""Commands on workers: options, prediction by parts, and evaluation."""

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ase.io
import numpy as np
import pandas as pd
import pytest
import yaml
from atomistic_fixtures import ENERGY
from checks import rejects
from test_cli import contents, qualms
from test_execution import dask_client, started

from qualms.atomistic.evaluation import evaluate
from qualms.cli.cluster import open_workers, start_slurm
from qualms.cli.terminal import Terminal

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
distributed = pytest.importorskip("distributed", reason="Dask is not installed")
pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")

#: A queue that runs jobs at once, and how jobs are cancelled.
SBATCH = """#!/bin/sh
script=$(cat "$1")  # it is deleted afterwards
sh -c "$script" > /dev/null 2>&1 &
echo "Submitted batch job $!"
"""
SCANCEL = "#!/bin/sh\nkill $1 2> /dev/null\n"


def workers(cluster, config=None):
    return open_workers(cluster, config, Terminal())


def assert_rejected(parameter, *options):
    with rejects(parameter), workers(*options):
        pass


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


def thread_limits():
    return {os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "OPENBLAS", "MKL", "RAYON")}


def test_processes_of_this_machine(monkeypatch):
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    this = psutil.Process()
    before = {*this.children(recursive=True)}
    ports = {c.laddr for c in this.net_connections()}
    with workers("local:3") as executor:
        assert executor.submit(sum, [1, 2]).result() == 3
        assert executor.submit(thread_limits).result() == {"1"}
        assert os.environ["OMP_NUM_THREADS"] == "7"
        started = {*this.children(recursive=True)} - before
        tidying = {p for p in started if "resource_tracker" in str(p.cmdline())}  # of Python
        assert len(started - tidying) == 3
        # Nobody else can give them work: they are reached by pipes alone.
        assert {c.laddr for c in this.net_connections()} == ports
        assert [c for process in started for c in process.net_connections()] == []
        executor.submit(time.sleep, 60)
    assert psutil.wait_procs(started - tidying, timeout=5)[1] == []


#: A task that is interrupted from the keyboard.
INTERRUPTED = """
import time
from qualms.cli.terminal import Terminal
from qualms.cli.cluster import open_workers
try:
    with open_workers("local:2", None, Terminal()) as executor:
        executor.submit(time.sleep, 60).result()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_an_interrupt_ends_the_workers_without_a_word_of_theirs(delay):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as of a command in a terminal
    )
    assert process.stderr is not None
    while "worker" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")


def test_workers_end_with_a_process_that_is_killed():
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()
    deadline = time.monotonic() + 30
    while len(started := psutil.Process(process.pid).children()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    assert psutil.wait_procs(started, timeout=30)[1] == []
    process.communicate()


def test_workers_of_a_scheduler(tmp_path):
    contact = tmp_path / "scheduler.json"
    options = ("--port", "0", "--no-dashboard")
    with started("scheduler", *options, contact=contact):
        while not contact.exists():
            time.sleep(0.05)
        assert_rejected("--cluster", str(contact))  # there are no workers
        with started("worker", "--no-dashboard", contact=contact):
            with distributed.Client(scheduler_file=str(contact)) as client:
                client.wait_for_workers(1, timeout=60)
                address = client.scheduler.address
            for cluster in (address, str(contact)):
                with workers(cluster) as client:
                    assert len(client.nthreads()) == 1


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")
def test_jobs_of_a_queue(queue):
    options = {"cores": 1, "memory": "1GB", "interface": "lo", "jobs": 2}
    with workers("slurm", config(queue, **options)) as client:
        client.wait_for_workers(2, timeout=30)
        assert list(client.nthreads().values()) == [1, 1]


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")
def test_scripts_of_jobs(queue, monkeypatch):
    import dask.config

    def script(file):
        with start_slurm(file) as cluster:
            return cluster.job_script()

    monkeypatch.setattr("dask_jobqueue.SLURMCluster.scale", lambda self, jobs: None)
    options = {"cores": 8, "memory": "16GB", "queue": "long", "job-extra-directives": ["--nice=9"]}
    text = script(config(queue, **options))
    for line in ("#SBATCH -p long", "#SBATCH --cpus-per-task=8", "#SBATCH --nice=9"):
        assert line in text.splitlines()
    assert "--nthreads 1 " in text
    assert "--nworkers 8 " in text
    with dask.config.set({"jobqueue.slurm.cores": 6, "jobqueue.slurm.memory": "12GB"}):
        assert "--nworkers 6 " in script(None)
        assert "--nworkers 2 " in script(config(queue, cores=4, processes=2))


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "jobs: none",
        "jobs: 0\ncores: 1\nmemory: 1GB",
        "cores: 2",
        "memory: 1GB",
        "cores: two\nmemory: 1GB",
        "cores: 1\nmemory: much",
        "cores: 1\nmemory: 1GB\nqueu: a",
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed cluster:ResourceWarning")
def test_bad_configurations_are_rejected(queue, text):
    file = queue / "bad.yaml"
    file.write_text(text)
    assert_rejected("--cluster-config", "slurm", file)
    gc.collect()  # clusters of Dask that could not start


def test_options_that_are_rejected(queue, monkeypatch):
    import dask.config

    file = config(queue)
    for cluster in ("local:2", "tcp://localhost:1"):
        assert_rejected("--cluster-config", cluster, file)
    assert_rejected("--cluster-config", "slurm", queue / "none.yaml")
    for cluster in ("local", "local:", "local:0", "local:two", "cloud", "pbs"):
        assert_rejected("--cluster", cluster)
    # Schedulers that do not answer.
    with dask.config.set({"distributed.comm.timeouts.connect": "500ms"}):
        for address in ("tcp://127.0.0.1:1", "nothing://x"):
            assert_rejected("--cluster", address)
    contact = queue / "scheduler.json"
    assert_rejected("--cluster", str(contact))
    for text in ("{}", "no JSON"):
        contact.write_text(text)
        assert_rejected("--cluster", str(contact))
    monkeypatch.setenv("PATH", str(queue / "empty"))  # without the commands of the queue
    assert_rejected("--cluster", "slurm")


def test_without_dask(monkeypatch):
    for package in ("distributed", "dask_jobqueue"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert_rejected("--cluster", "slurm")
            with workers("local:1") as executor:
                assert executor.submit(sum, [1, 2]).result() == 3


# --- prediction ---

PREDICT = "predict model.safetensors new.xyz"


@pytest.fixture(scope="module")
def by_workers():
    """The option for two workers that have imported what they need, in another directory."""
    with dask_client(n_workers=2) as client:
        yield f"--cluster {client.scheduler.address} --quiet"


def read_csv(path):
    """Read a table; reasons of extrapolation may be empty texts."""
    return pd.read_csv(path).fillna({"qualms_extrapolation_reason": ""})


def same_tables(a, b):
    pd.testing.assert_frame_equal(a, b, check_exact=False, rtol=1e-12, check_dtype=False)


@pytest.mark.parametrize("how", ["", "--ensemble --interval 0.8 --in meV --per atom"])
def test_files_do_not_depend_on_workers(desk, by_workers, how, monkeypatch):
    monkeypatch.setattr("qualms.io.predictions.ROW_GROUP", 30)
    suffixes = ["csv", "parquet", "npz"] + ["xyz"] * ("--per" not in how)
    for suffix in suffixes:
        here = qualms(f"{PREDICT} {how} -o here.{suffix} --json").document
        assert (here["n_structures"], here["target"]) == (100, ENERGY)
        there = qualms(f"{PREDICT} {how} -o there.{suffix} --json {by_workers}").document
        assert there == here | {"output": f"there.{suffix}"}
    expected = read_csv("here.csv")
    same_tables(read_csv("there.csv"), expected)
    for name in ("here", "there"):
        same_tables(pd.read_parquet(f"{name}.parquet"), expected)
    assert parquet.ParquetFile("there.parquet").num_row_groups == 3  # parts have 20 structures
    with np.load("here.npz") as here, np.load("there.npz") as there:
        assert [*here] == [*there]
        np.testing.assert_allclose(here[ENERGY], there[ENERGY], rtol=1e-12)
    if "xyz" in suffixes:
        pairs = zip(ase.io.read("here.xyz", ":"), ase.io.read("there.xyz", ":"), strict=True)
        for here, there in pairs:
            assert here == there
            assert here.info.keys() == there.info.keys()


def test_a_table_of_atoms_has_parts_without_any(desk, molecules, by_workers, monkeypatch):
    """The first molecules, and the last, have no nitrogen."""
    monkeypatch.setattr("qualms.io.predictions.ROW_GROUP", 5)
    frames = sorted(molecules[100:], key=lambda atoms: 7 in atoms.numbers)
    n_without = sum(7 not in atoms.numbers for atoms in frames)
    ase.io.write("sorted.xyz", [*frames[5:], *frames[:5]])
    command = "predict atoms.safetensors sorted.xyz"
    assert qualms(f"{command} -o new.csv").code == 0
    assert qualms(f"{command} -o new.parquet {by_workers}").code == 0
    expected = read_csv("new.csv")
    same_tables(pd.read_parquet("new.parquet"), expected)
    assert expected["index"].min() == n_without - 5 >= 5
    assert {*expected["symbol"]} == {"N"}


@pytest.mark.parametrize("how", ["here", "by workers"])
def test_a_bad_structure_is_named_and_nothing_is_written(desk, molecules, by_workers, how):
    options = by_workers if how == "by workers" else ""
    lines = Path("new.xyz").read_text().splitlines(keepends=True)
    place = [i for i, line in enumerate(lines) if line.strip().isdecimal()][80]
    lines[place + 3] = "C 0.0 what 0.0\n"
    Path("broken.xyz").write_text("".join(lines))
    frames = [*molecules[100:130], molecules[130].copy(), *molecules[131:]]
    frames[30].symbols[0] = "Xe"
    ase.io.write("strange.xyz", frames)
    before = contents(".")
    for name, place in {"broken": "Structure 80 of", "strange": "Structure 30 of"}.items():
        ended = qualms(f"predict model.safetensors {name}.xyz -o new.parquet {options}")
        assert ended.code == 2
        assert f"{place} {name}.xyz" in ended.err
        assert name == "broken" or "Xe" in ended.err
        assert contents(".") == before


def test_more_workers_than_structures(desk):
    ase.io.write("two.xyz", ase.io.read("new.xyz", ":2"))
    assert qualms("predict model.safetensors two.xyz -o two.parquet --cluster local:3").code == 0
    assert len(pd.read_parquet("two.parquet")) == 2


def test_workers_that_do_not_see_the_files(desk, by_workers, monkeypatch):
    before = contents(".")
    monkeypatch.setattr("qualms.execution.sizes_of", lambda files: [4] * len(files))
    ended = qualms(f"{PREDICT} -o new.csv {by_workers}")
    assert (ended.code, "worker" in ended.err) == (2, True)
    assert contents(".") == before


def test_a_table_needs_pyarrow(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    before = contents(".")
    ended = qualms(f"{PREDICT} -o new.parquet")
    assert (ended.code, "pyarrow" in ended.err) == (2, True)
    assert contents(".") == before


def test_forces_and_scores_do_not_depend_on_workers(desk, by_workers, force_model, alloys):
    force_model.save("forces.safetensors")
    ase.io.write("alloys.xyz", alloys[26:])
    predict = "predict forces.safetensors alloys.xyz --forces --stress --atoms --ensemble"
    for name, how in {"here": "", "there": by_workers}.items():
        assert qualms(f"{predict} {how} -o {name}.npz").code == 0
    with np.load("here.npz") as here, np.load("there.npz") as there:
        assert {*here} == {*there} >= {"forces", "stress_ensemble", "energy_atoms_novelty"}
        for name in {*here}:
            if here[name].dtype.kind == "U":
                np.testing.assert_array_equal(here[name], there[name])
            else:
                np.testing.assert_allclose(here[name], there[name], rtol=1e-9, atol=1e-12)
    for command in (
        "evaluate model.safetensors new.xyz",
        "evaluate atoms.safetensors new.xyz",
        "evaluate forces.safetensors alloys.xyz --in meV",
    ):
        here, there = (qualms(f"{command} --json {how}").document for how in ("", by_workers))
        assert here.keys() == there.keys()
        quantities = [name for name in ("forces", "stress") if name in here]
        assert len(quantities) == (2 if "forces" in command else 0)
        for a, b in [(here, there), *((here[name], there[name]) for name in quantities)]:
            scores = [pd.DataFrame(document["scores"]) for document in (a, b)]
            pd.testing.assert_frame_equal(*scores, rtol=1e-7)
            assert a["n_extrapolating"] == b["n_extrapolating"]


@pytest.mark.parametrize("how", ["threads", "dask"])
def test_evaluation_by_an_executor(by_workers, energy_model, molecules, how):
    expected = evaluate(energy_model, molecules[120:])["energy"]
    address = by_workers.split()[1]
    with ThreadPoolExecutor(1) if how == "threads" else distributed.Client(address) as executor:
        evaluation = evaluate(energy_model, molecules[120:], executor=executor)["energy"]
    members = evaluation.prediction.members
    np.testing.assert_allclose(members, expected.prediction.members, rtol=1e-9)
    np.testing.assert_array_equal(evaluation.structure, expected.structure)
