"""QM9 at the size of the paper, and all of it.

The molecules come from the file that the environment variable QUALMS_QM9 names (an NPZ file or the
archive: see `qualms.data.qm9`), or from the package qm9pack. Training and prediction have a process
of their own each, so that peak memory is theirs. With QUALMS_UNCOMPRESSED=1 the size of the paper
is also measured without compression of the features.

Run this file alone, with ``paper`` or ``qm9`` and a divisor of all sizes, for tables of a small
problem on the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from benchmarks.memory import measure
from qualms import AtomisticModel
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
        "solver": model.record.solver,
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


def in_subprocess(function: str, *arguments: Any) -> dict[str, Any]:
    """Call one function of this file in a fresh process; its peak memory is added."""
    command = [sys.executable, "-m", "benchmarks.bench_scale", function, json.dumps(arguments)]
    root = Path(__file__).parents[1]
    measured = measure(command, cwd=root)
    result: dict[str, Any] = json.loads(measured.output.splitlines()[-1])
    return result | {"peak": measured.peak}


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
            "notes": [TRAINING_NOTE, f"Members solved by: {cases[0][1]['solver']}."],
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


if __name__ == "__main__":
    name, argument = sys.argv[1], json.loads(sys.argv[2])
    if name in ("train", "predict"):
        print(json.dumps(globals()[name](*argument)))
    else:
        for table in {"paper": run_paper, "qm9": run_qm9}[name](argument):
            print("\n" + table["title"], table["columns"], *table["rows"], sep="\n")
