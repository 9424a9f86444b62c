"""QM9 at the size of the paper, all of it, and more than there is; in memory and from a file.

The molecules come from the file that the environment variable QUALMS_QM9 names (an NPZ file or the
archive: see `qualms.data.qm9`), or from the package qm9pack. Training and prediction have a process
of their own each, so that peak memory is theirs. With QUALMS_UNCOMPRESSED=1 the size of the paper
is also measured without compression of the features.

Run this file alone, with ``paper``, ``qm9``, ``scale``, ``parquet``, ``copies3`` or ``copies10``
and a divisor of all sizes, for tables of a small problem on the terminal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from benchmarks.memory import measure
from qualms import AtomisticModel
from qualms.atomistic import FrameFiles
from qualms.atomistic.structures import read_frames
from qualms.data import qm9

TARGET = "atomization_energy"
N_REPRESENTATIVES, N_MEMBERS, SEED = 5_000, 16, 0
PAPER_TRAIN, PAPER_TEST = 20_000, 5_000
N_QM9 = 130_831
QM9_MEMORY = "12GB"
UNCERTAINTIES = ("Members", "Calibration")


def draw(n: int) -> list[Atoms]:
    """Return n molecules in random order; the first of many are those of few."""
    return qm9(os.environ.get("QUALMS_QM9", "qm9pack"), n=n, seed=SEED)


# --- in a process of its own ---


def train(path: str, n: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on the first n molecules and save the model: times and sizes."""
    molecules = draw(n)
    start = time.perf_counter()
    model = AtomisticModel(TARGET, n_members=N_MEMBERS, seed=SEED, **settings)
    model.fit(molecules)
    model.save(path)
    seconds = time.perf_counter() - start
    representation = model.fitted.representation
    return {
        "seconds": seconds,
        "stages": model.record.seconds,
        "environments": model.record.n_environments,
        "rank": model.record.effective_rank,
        "features": representation.n_features,
        "compressed": bool(representation.projections),
        "file": Path(path).stat().st_size / 2**20,
    }


def predict(path: str, first: int, last: int) -> dict[str, Any]:
    """Predict some of the molecules with uncertainties: time and errors, in meV per atom."""
    molecules = draw(last)[first:]
    model = AtomisticModel.load(path)
    start = time.perf_counter()
    prediction = model.predict(molecules)
    std = prediction.std
    seconds = time.perf_counter() - start
    sizes = np.array([len(atoms) for atoms in molecules])
    y = np.array([atoms.info[TARGET] for atoms in molecules])
    error = 1e3 * (prediction.mean - y) / sizes
    return {
        "seconds": seconds,
        "mae": float(np.mean(np.abs(error))),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "within": float(np.mean(np.abs(error) < 1e3 * std / sizes)),
        "environments": int(sizes.sum()),
        "molecules": len(molecules),
    }


def train_from(source: str, path: str, xyz: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on structures in memory, from the file part by part, or so by two workers of Dask.

    The source is "memory", "file" or "workers". Peak memory in MiB is that of this process and of
    the largest worker, and so is the memory that was announced.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("qualms")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    model = AtomisticModel(TARGET, n_members=N_MEMBERS, seed=SEED, **settings)
    workers: list[float] = []
    start = time.perf_counter()
    if source == "workers":
        from distributed import Client, LocalCluster

        options = {"n_workers": N_WORKERS, "threads_per_worker": 1, "dashboard_address": ":0"}
        with LocalCluster(**options, memory_limit=0) as cluster, Client(cluster) as client:
            start = time.perf_counter()  # jobs of a queue run already
            model.fit(FrameFiles.open([xyz]), executor=client)
            workers = [*client.run(_peak).values()]
    elif source == "file":
        model.fit(FrameFiles.open([xyz]))
    else:
        model.fit(read_frames(xyz))
    model.save(path, force=True)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "stages": model.record.seconds,
        "structures": model.record.n_structures,
        "environments": model.record.n_environments,
        "features": model.fitted.representation.n_features,
        "rank": model.record.effective_rank,
        "own_peak": _peak(),
        "worker_peak": max(workers, default=0.0),
        "announced": _announced(messages),
        "mae": 1e3 * (model.record.quantities["energy"].mae or 0.0),
    }


def _announced(messages: list[str]) -> list[float]:
    """Return the memory that was announced for this process, and for each worker, in MiB."""
    units = {"GB": 1e9, "MB": 1e6}
    sizes = re.findall(
        r"about (\S+ [GM]B) of memory|and (\S+ [GM]B) for each of", "\n".join(messages)
    )
    pairs = [(own or worker).split() for own, worker in sizes]
    return [float(value) * units[unit] / 2**20 for value, unit in pairs]


def _peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    match = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


def in_subprocess(function: str, *arguments: Any) -> dict[str, Any]:
    """Call one function of this file in a fresh process; adds its peak memory and CPU time."""
    command = [sys.executable, "-m", "benchmarks.bench_scale", function, json.dumps(arguments)]
    root = Path(__file__).parents[1]
    measured = measure(command, cwd=root)
    result: dict[str, Any] = json.loads(measured.output.splitlines()[-1])
    return result | {"peak": measured.peak, "cpu": measured.cpu}


# --- tables ---


def case(
    label: str, n: int, test: tuple[int, int], settings: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Train and predict one case."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        trained = in_subprocess("train", path, n, settings)
        return label, trained, in_subprocess("predict", path, *test)


def training_row(label: str, trained: dict[str, Any]) -> list[Any]:
    """Return the cells of a training run."""
    share = sum(trained["stages"].get(stage, 0.0) for stage in UNCERTAINTIES) / trained["seconds"]
    return [
        label,
        trained["environments"],
        trained["features"],
        trained["rank"],
        f"{trained['seconds']:.0f}",
        f"{share:.1%}",
        f"{trained['peak']:.0f}",
        f"{trained['file']:.0f}",
    ]


def stage_row(label: str, trained: dict[str, Any], stages: list[str]) -> list[Any]:
    """Return the seconds of each stage, and of what is in none."""
    seconds = trained["stages"]
    rest = trained["seconds"] - sum(seconds.values())
    return [label, *(f"{seconds.get(stage, 0.0):.1f}" for stage in stages), f"{rest:.1f}"]


def prediction_row(label: str, predicted: dict[str, Any]) -> list[Any]:
    """Return the cells of a prediction."""
    return [
        label,
        predicted["molecules"],
        f"{predicted['mae']:.2f}",
        f"{predicted['rmse']:.2f}",
        f"{predicted['within']:.1%}",
        f"{predicted['seconds']:.0f}",
        f"{predicted['environments'] / predicted['seconds']:.0f}",
        f"{predicted['peak']:.0f}",
    ]


def tables(
    title: str, cases: list[tuple[str, dict[str, Any], dict[str, Any]]], notes: list[str]
) -> list[dict[str, Any]]:
    """Return three tables: training, its stages, and prediction."""
    stages = list(dict.fromkeys(stage for _, trained, _ in cases for stage in trained["stages"]))
    return [
        {
            "title": f"{title}: training, from molecules in memory to the saved model",
            "columns": TRAINING_COLUMNS,
            "rows": [training_row(label, trained) for label, trained, _ in cases],
            "notes": [TRAINING_NOTE],
        },
        {
            "title": f"{title}: stages of training, seconds",
            "columns": ["features", *(stage.lower() for stage in stages), "other and saving"],
            "rows": [stage_row(label, trained, stages) for label, trained, _ in cases],
        },
        {
            "title": f"{title}: predictions with uncertainties",
            "columns": PREDICTION_COLUMNS,
            "rows": [prediction_row(label, predicted) for label, _, predicted in cases],
            "notes": notes,
        },
    ]


TRAINING_COLUMNS = [
    "features",
    "environments",
    "d",
    "rank",
    "seconds",
    "members and calibration",
    "peak memory, MiB",
    "model file, MiB",
]
TRAINING_NOTE = (
    "Members and calibration: their share of the time. Peak memory: of all processes, with the "
    "molecules."
)
PREDICTION_COLUMNS = [
    "features",
    "molecules",
    "MAE, meV/atom",
    "RMSE",
    "within σ",
    "seconds",
    "environments per second",
    "peak memory, MiB",
]


def run_paper(divisor: int = 1) -> list[dict[str, Any]]:
    """Measure the size of the paper: 20,000 molecules, and 5,000 others to test."""
    n, M = PAPER_TRAIN // divisor, N_REPRESENTATIVES // divisor
    test = (n, n + PAPER_TEST // divisor)
    settings: dict[str, Any] = {"n_representatives": M}
    cases = [case("as chosen", n, test, settings)]
    if os.environ.get("QUALMS_UNCOMPRESSED"):
        plain = settings | {"representation": {"preset": "organic", "compression": None}}
        cases.append(case("not compressed", n, test, plain))
    title = f"{n} molecules of QM9, M = {M}, {N_MEMBERS} members"
    return tables(title, cases, ["Molecules that the model has not seen."])


def run_qm9(divisor: int = 1) -> list[dict[str, Any]]:
    """Measure all of QM9, in less memory than its features would take."""
    n, M = N_QM9 // divisor, N_REPRESENTATIVES // divisor
    settings = {"n_representatives": M, "memory": QM9_MEMORY}
    cases = [case("as chosen", n, (0, PAPER_TRAIN // divisor), settings)]
    title = f"{n} molecules of QM9, M = {M}, {N_MEMBERS} members, memory = {QM9_MEMORY}"
    return tables(title, cases, ["Molecules that the model was trained on: no test of it."])


# --- sources of the structures ---

N_WORKERS = 2
SOURCES = {
    "in memory": "memory",
    "from a file": "file",
    f"from a file, {N_WORKERS} Dask workers": "workers",
}
N_PREDICTED = 100_000
#: Displacements (Å) by which copies of QM9 differ.
DISPLACEMENT = 0.01


def write_molecules(path: Path, n: int, copies: int = 1) -> None:
    """Write n molecules of QM9 to a file, several times, with atoms displaced after the first."""
    molecules, rng = draw(n), np.random.default_rng(SEED)
    with path.open("w") as file:
        for k in range(copies):
            for atoms in molecules:
                moved = rng.normal(0, DISPLACEMENT, (len(atoms), 3)) if k else 0.0
                rows = zip(atoms.symbols, (atoms.positions + moved).tolist(), strict=True)
                file.write(f"{len(atoms)}\n{TARGET}={float(atoms.info[TARGET])!r}\n")
                file.writelines(f"{s} {x:.8f} {y:.8f} {z:.8f}\n" for s, (x, y, z) in rows)


def peaks(trained: dict[str, Any]) -> str:
    """Return the peak memory of the process and of a worker, each over what was announced."""
    sizes = [peak for peak in (trained["own_peak"], trained["worker_peak"]) if peak]
    pairs = zip(sizes, trained["announced"], strict=True)
    return " + ".join(f"{peak:.0f} ({peak / told:.2f} ×)" for peak, told in pairs)


def run_scale(divisor: int = 1) -> list[dict[str, Any]]:
    """Compare training in memory and from a file, by one process and by workers of Dask."""
    M, rows, stages = N_REPRESENTATIVES // divisor, [], {}
    for n in (PAPER_TRAIN // divisor, N_QM9 // divisor):
        with tempfile.TemporaryDirectory() as folder:
            xyz, model = Path(folder) / "train.xyz", str(Path(folder) / "model.safetensors")
            write_molecules(xyz, n)
            in_memory = None
            for label, source in SOURCES.items():
                settings = {"n_representatives": M, "memory": QM9_MEMORY}
                trained = in_subprocess("train_from", source, model, str(xyz), settings)
                times = np.array([trained["seconds"], trained["cpu"]])
                in_memory = times if in_memory is None else in_memory
                stages[n, label] = trained["stages"]
                ratios = [f"{ratio:.2f} ×" for ratio in times / in_memory]
                cells = [f"{times[0]:.0f}", ratios[0], f"{times[1]:.0f}", ratios[1], peaks(trained)]
                rows.append([n, label, *cells, f"{trained['mae']:.2f}"])
                print(*rows[-1], sep=" | ", flush=True)
    names = list(dict.fromkeys(name for seconds in stages.values() for name in seconds))
    of_stages = {
        "title": "Stages, seconds",
        "columns": ["molecules", "training", *names],
        "rows": [
            [n, label, *[f"{seconds.get(name, 0.0):.1f}" for name in names]]
            for (n, label), seconds in stages.items()
        ],
    }
    columns = [
        "molecules",
        "training",
        "seconds",
        "of in memory",
        "CPU, s",
        "of in memory",
        "peak memory, MiB (of announced)",
    ]
    first = {
        "title": f"Training in memory and from a file: QM9, M = {M}, {N_MEMBERS} members, 2 cores",
        "columns": [*columns, "out-of-bag MAE, meV/atom"],
        "rows": rows,
        "notes": [
            "From a file to the saved model. One process keeps features if they fit in memory; "
            "otherwise, and by workers, they are computed twice. Peak memory: of the process that "
            f"trains, and of the larger of {N_WORKERS} workers; in brackets over what was "
            "announced. Targets: Dask at most 1.2 × the time in memory; memory within 1.3 × of "
            "what is announced.",
        ],
    }
    return [first, of_stages]


def run_parquet(divisor: int = 1) -> list[dict[str, Any]]:
    """Predict many molecules to a table, by one process and by workers of this machine."""
    n, M, rows, alone = N_PREDICTED // divisor, N_REPRESENTATIVES // divisor, [], None
    command = Path(sys.executable).with_name("qualms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_molecules(folder / "new.xyz", n)
        settings = {"n_representatives": M}
        in_subprocess("train", str(folder / "model.safetensors"), PAPER_TRAIN // divisor, settings)
        for label, options in {"one process": [], "2 workers": ["--cluster", "local:2"]}.items():
            predict = [command, "predict", "model.safetensors", "new.xyz", "--quiet", *options]
            found = measure([*predict, "-o", f"{label[0]}.parquet"], cwd=folder)
            alone = alone or found.seconds
            cells = [f"{found.seconds:.0f}", f"{found.seconds / alone:.2f} ×", f"{found.peak:.0f}"]
            rows.append([label, n, *cells])
    columns = ["predicted by", "molecules", "seconds", "of one process"]
    return [
        {
            "title": f"Predictions with uncertainties in Parquet: QM9, M = {M}, 2 cores",
            "columns": [*columns, "peak memory of all processes, MiB"],
            "rows": rows,
            "notes": ["Whole commands, with the start of the workers."],
        }
    ]


def run_copies(copies: int, divisor: int = 1) -> list[dict[str, Any]]:
    """Train on several times QM9 from a file, in one process: time and memory."""
    n, M = N_QM9 // divisor, N_REPRESENTATIVES // divisor
    with tempfile.TemporaryDirectory() as folder:
        xyz, model = Path(folder) / "train.xyz", str(Path(folder) / "model.safetensors")
        write_molecules(xyz, n, copies)
        settings = {"n_representatives": M, "memory": QM9_MEMORY}
        trained = in_subprocess("train_from", "file", model, str(xyz), settings)
    title = f"{copies} times QM9 from a file, one process: M = {M}, memory = {QM9_MEMORY}"
    stages = trained["stages"]
    row = [
        trained["structures"],
        trained["environments"],
        f"{trained['seconds']:.0f}",
        f"{1e3 * trained['seconds'] / trained['structures']:.2f}",
        peaks(trained),
    ]
    columns = ["molecules", "environments", "seconds", "ms per molecule"]
    return [
        {
            "title": title,
            "columns": [*columns, "peak memory, MiB (of announced)"],
            "rows": [row],
            "notes": [
                f"Copies have atoms displaced by {DISPLACEMENT} Å, and the energies of the first. "
                "From a file to the saved model. Once QM9: section *scale*.",
            ],
        },
        {
            "title": "Stages, seconds",
            "columns": [*stages],
            "rows": [[f"{seconds:.1f}" for seconds in stages.values()]],
        },
    ]


run_copies3, run_copies10 = partial(run_copies, 3), partial(run_copies, 10)


if __name__ == "__main__":
    name, argument = sys.argv[1], json.loads(sys.argv[2])
    if name in ("train", "predict", "train_from"):
        print(json.dumps(globals()[name](*argument)))
    else:
        for table in globals()[f"run_{name}"](argument):
            print("\n" + table["title"], table["columns"], *table["rows"], sep="\n")
