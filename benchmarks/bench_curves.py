"""Forces from few labels: errors, coverage and cost against the number of labels, beside others.

Data, gap_fit and commands are those of `benchmarks.bench_forces`. Each run trains on some random
structures of the training set and predicts the same test structures; it is a process of its own on
one core, and a line of ``learning_curves.csv``, which is written when it ends. Runs that the file
has are not repeated (remove their lines to measure again), so that

    python -m benchmarks forces --labels 20 50 --draws 2
    python -m benchmarks forces --programs gap_fit FCHL19

measure it in pieces. Tables and the figure of the documentation are made of all lines. FCHL19 (by
qmllib), Δ-learning (by tblite) and gap_fit are left out where their packages are not installed.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms

from benchmarks.bench_forces import (
    MEMORY,
    Predicted,
    Problem,
    azobenzene,
    on_cores,
    run_gap,
    run_qualms,
    three_bpa,
)
from benchmarks.bench_gap import gap_fit
from benchmarks.memory import Measured, measure

RUNS = Path(__file__).with_name("learning_curves.csv")
FIGURE = Path(__file__).parent.parent / "docs" / "_static" / "learning-curves.png"
#: Draws of training structures; test structures.
N_DRAWS, N_TEST = 5, 200
#: Labelled structures, by problem and program.
LABELS: dict[str, dict[str, Sequence[int]]] = {
    "azobenzene": {
        "qualms": (20, 50, 100, 200, 1000),
        "qualms, best": (1000,),
        "qualms, Δ": (20, 50, 100),
        "FCHL19": (20, 50),
        "gap_fit": (20, 50, 100, 200),
    },
    "3BPA": {"qualms": (50, 200, 400), "gap_fit": (50, 200)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qualms": {},
    "qualms, best": {"effort": "best"},
    "qualms, Δ": {"baseline": "tblite:GFN2-xTB"},
}
N_SPARSE = 1000
#: Force MAE, meV/Å, that is aimed at.
TARGETS = {
    ("azobenzene", "qualms"): {20: 53.0, 50: 37.0, 200: 24.0, 1000: 14.0},
    ("azobenzene", "qualms, best"): {1000: 11.0},
    ("azobenzene", "qualms, Δ"): {20: 25.5, 50: 17.5, 100: 14.0},
    ("3BPA", "qualms"): {50: 47.0, 200: 30.0, 400: 19.0},
}
#: Force MAE of others for azobenzene (revised MD17), as published: labels and meV/Å. Batatia et
#: al., NeurIPS 35, 11423 (2022): MACE; Kovács et al., JCTC 17, 7696 (2021): linear ACE, FCHL19.
PUBLISHED = {
    "MACE, published": {50: 17.7, 1000: 3.0},
    "ACE, published": {1000: 10.9},
    "FCHL19, published": {1000: 10.8},
}
#: Width of the Gaussian kernel of FCHL19, and its regularisation in kcal/mol and kcal/mol/Å.
WIDTH, RIDGE = 2.0, 1e-6


class Run(NamedTuple):
    """One training and its test; errors in meV and meV/Å, coverage in per cent, time in seconds."""

    problem: str
    program: str
    labels: int
    draw: int
    energy_mae: float
    force_mae: float
    energy_1: float
    energy_2: float
    force_1: float
    force_2: float
    cpu: float
    peak: float

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What was measured."""
        return self.problem, self.program, self.labels, self.draw


def recorded() -> list[Run]:
    """Return the runs of the file."""
    if not RUNS.exists():
        return []
    with RUNS.open(newline="") as file:
        return [
            Run(
                row["problem"],
                row["program"],
                int(row["labels"]),
                int(row["draw"]),
                *(float(row[name] or "nan") for name in Run._fields[4:]),
            )
            for row in csv.DictReader(file)
        ]


def record(run: Run) -> None:
    """Append a run to the file."""
    is_new = not RUNS.exists()
    with RUNS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(Run._fields)
        cells = [value if isinstance(value, (str, int)) else f"{value:.2f}" for value in run]
        writer.writerow(["" if cell == "nan" else cell for cell in cells])


# --- one run ---


def drawn(problem: Problem, n: int, draw: int) -> Problem:
    """Return a problem with n random training structures and the first test set."""
    order = np.random.default_rng([draw, 1]).permutation(len(problem.train))[:n]
    name, frames = next(iter(problem.tests.items()))
    some = np.random.default_rng(0).permutation(len(frames))[:N_TEST]
    tests = {name: [frames[i] for i in some]}
    return Problem(problem.name, [problem.train[i] for i in order], tests, problem.atoms)


def run_fchl19(folder: Path, problem: Problem) -> tuple[Measured, dict[str, Predicted]]:
    """Train and test FCHL19 in a process of its own."""
    (test, frames), arrays = next(iter(problem.tests.items())), {}
    for name, some in (("train", problem.train), ("test", frames)):
        arrays[f"{name}_positions"] = np.array([atoms.positions for atoms in some])
        arrays[f"{name}_energies"] = np.array([atoms.info["REF_energy"] for atoms in some])
        arrays[f"{name}_forces"] = np.array([atoms.arrays["REF_forces"] for atoms in some])
    np.savez(folder / "data.npz", numbers=problem.train[0].numbers, **arrays)
    measured = measure(
        [sys.executable, "-m", "benchmarks.bench_curves", "--fchl19", folder], env=on_cores(1)
    )
    with np.load(folder / "out.npz") as out:
        predicted = Predicted(out["energies"], out["forces"].reshape(-1, 3))
        cost = Measured(measured.seconds, float(out["cpu"]), measured.peak, "")
    return cost, {test: predicted}


def fchl19(folder: Path) -> None:
    """Kernel of energies and forces of FCHL19 (Christensen et al. 2020): train, predict, and save.

    The time is that of the training alone.
    """
    import scipy.linalg
    from ase.units import kcal, mol
    from qmllib.kernels import get_gp_kernel, get_symmetric_gp_kernel
    from qmllib.representations import generate_fchl19

    data, unit, start = np.load(folder / "data.npz"), kcal / mol, time.process_time()
    numbers = data["numbers"].astype(np.int32)
    elements = np.unique(numbers).tolist()

    def represent(positions: Any) -> tuple[Any, Any, list[Any]]:
        pairs = [generate_fchl19(numbers, x, elements=elements, gradients=True) for x in positions]
        return *(np.array(values) for values in zip(*pairs, strict=True)), [numbers] * len(pairs)

    known = represent(data["train_positions"])
    y, mean = data["train_energies"] / unit, np.mean(data["train_energies"]) / unit
    K = get_symmetric_gp_kernel(*known, WIDTH)
    K[np.diag_indices_from(K)] += RIDGE
    labels = np.concatenate([y - mean, data["train_forces"].ravel() / unit])
    weights = scipy.linalg.cho_solve(scipy.linalg.cho_factor(K), labels)
    cpu, n = time.process_time() - start, len(data["test_positions"])
    of_known, of_new = known, represent(data["test_positions"])
    pairs = [part for both in zip(of_known, of_new, strict=True) for part in both]
    cross = get_gp_kernel(*pairs, WIDTH)
    predicted = (cross if cross.shape[1] == len(weights) else cross.T) @ weights * unit
    energies = predicted[:n] + mean * unit
    np.savez(folder / "out.npz", energies=energies, forces=predicted[n:], cpu=cpu)


def programs() -> dict[str, Callable[[Path, Problem], tuple[Measured, dict[str, Predicted]]]]:
    """Return what is installed."""

    def qualms(name: str) -> Callable[[Path, Problem], tuple[Measured, dict[str, Predicted]]]:
        return lambda folder, problem: run_qualms(
            folder, problem, len(problem.train), threads=1, **SETTINGS[name]
        )

    found = {name: qualms(name) for name in ("qualms", "qualms, best")}
    if find_spec("tblite"):
        found["qualms, Δ"] = qualms("qualms, Δ")
    if find_spec("qmllib"):
        found["FCHL19"] = run_fchl19
    if executable := gap_fit():
        found["gap_fit"] = lambda folder, problem: run_gap(
            executable, folder, problem, len(problem.train), N_SPARSE, threads=1
        )
    return found


def one_run(problem: Problem, program: str, n: int, draw: int) -> Run:
    """Train and test."""
    some = drawn(problem, n, draw)
    with tempfile.TemporaryDirectory() as name:
        trained, predictions = programs()[program](Path(name), some)
    (predicted,), (frames,) = predictions.values(), some.tests.values()
    return Run(
        problem.name, program, n, draw, *scores(frames, predicted), trained.cpu, trained.peak
    )


def scores(frames: Sequence[Atoms], predicted: Predicted) -> tuple[float, ...]:
    """Return MAE of energies and forces, and their coverage within σ and 1.96 σ."""
    energies = np.array([atoms.info["REF_energy"] for atoms in frames])
    forces = np.concatenate([atoms.arrays["REF_forces"] for atoms in frames])
    errors = (predicted.energies - energies, predicted.forces - forces)
    coverage = []
    for z, std in zip(errors, (predicted.energies_std, predicted.forces_std), strict=True):
        for k in (1.0, 1.96):
            inside = np.nan if std is None else 100 * np.mean(np.abs(z) < k * std)
            coverage.append(float(inside))
    return (*(1e3 * float(np.mean(np.abs(z))) for z in errors), *coverage)


# --- tables and the figure ---


def table(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return means over the draws."""
    rows = []
    for program, labels in LABELS[name].items():
        for n in labels:
            some = [r for r in runs if r.key[:3] == (name, program, n)]
            if not some:
                continue
            mean = [float(np.mean(values)) for values in zip(*(r[4:] for r in some), strict=True)]
            spread = np.std([r.force_mae for r in some], ddof=1) if len(some) > 1 else np.nan
            target = TARGETS.get((name, program), {}).get(n)
            coverage = ["–", "–"]
            if np.isfinite(mean[2]):
                coverage = [f"{a:.0f} / {b:.0f}" for a, b in (mean[2:4], mean[4:6])]
            rows.append(
                [
                    n,
                    program,
                    len(some),
                    f"{mean[0]:.1f}",
                    f"{mean[1]:.1f}" + (f" ± {spread:.1f}" if np.isfinite(spread) else ""),
                    "–" if target is None else f"≤ {target:g}",
                    *coverage,
                    f"{mean[6]:.0f}",
                    f"{mean[7]:.0f}",
                ]
            )
    rows.sort(key=lambda row: row[0])
    published = "; ".join(
        f"{who} {', '.join(f'{mae:g} ({n})' for n, mae in of.items())}"
        for who, of in PUBLISHED.items()
    )
    notes = [
        f"Means over draws of training structures, ± their standard deviation; {N_TEST} test "
        "structures at most. Coverage: reference values within σ and within 1.96 σ; nominal "
        "68 / 95 %. CPU time and peak memory of the training, on one core; of FCHL19, CPU time of "
        "the training and memory of training and test.",
        f"qualms: defaults of `qualms train`, memory limit {MEMORY}; Δ: differences from GFN2-xTB. "
        f"FCHL19: qmllib, kernel width {WIDTH:g}, regularisation {RIDGE:g}. gap_fit: {N_SPARSE} "
        "sparse points, settings as in the section *force_models*.",
    ]
    if name == "azobenzene":
        notes.append(f"Published force MAE in meV/Å (labels): {published}.")
    return {
        "title": f"Forces from few labels: {name}",
        "columns": [
            "labels",
            "program",
            "draws",
            "energy MAE, meV",
            "force MAE, meV/Å",
            "target",
            "coverage of energies, %",
            "of forces, %",
            "training, CPU s",
            "peak memory, MiB",
        ],
        "rows": rows,
        "notes": notes,
    }


def draw_figure(runs: Sequence[Run]) -> None:
    """Draw force errors of azobenzene against the number of labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = {
        "qualms": ("C0", "o-"),
        "qualms, best": ("C0", "d"),
        "qualms, Δ": ("C1", "o-"),
        "FCHL19": ("C2", "s--"),
        "gap_fit": ("C3", "^--"),
    }
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for program, (color, style) in styles.items():
        points = {}
        for n in LABELS["azobenzene"][program]:
            errors = [r.force_mae for r in runs if r.key[:3] == ("azobenzene", program, n)]
            if errors:
                points[n] = np.mean(errors)
        if points:
            names = {"qualms, Δ": "qualms, Δ to GFN2-xTB", "qualms, best": "qualms, effort best"}
            label = names.get(program, program)
            axes.plot([*points], [*points.values()], style, color=color, label=label)
    for (who, of), marker in zip(PUBLISHED.items(), "*DX", strict=True):
        style: dict[str, Any] = {"linestyle": "none", "color": "C2" if "FCHL" in who else "black"}
        if marker == "D":  # ACE and FCHL19 coincide
            style |= {"markersize": 11, "markerfacecolor": "none"}
        axes.plot([*of], [*of.values()], marker=marker, label=who, **style)
    axes.set(xscale="log", yscale="log", xlabel="labelled structures of azobenzene")
    axes.set_ylabel("mean absolute error of forces, meV/Å")
    axes.set_xticks(ticks := [20, 50, 100, 200, 500, 1000], [str(n) for n in ticks])
    axes.set_yticks(ticks := [3, 5, 10, 20, 50, 100, 200], [str(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(FIGURE, dpi=110, metadata={"Software": None})


def run(*given: str) -> list[dict[str, Any]]:
    """Measure what is missing, draw by draw, and return the tables of all runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks forces")
    parser.add_argument("--problems", nargs="+", choices=LABELS, default=[*LABELS])
    parser.add_argument("--labels", nargs="+", type=int)
    parser.add_argument("--draws", type=int, default=N_DRAWS)
    parser.add_argument("--programs", nargs="+", default=[*programs()])
    chosen = parser.parse_args(given)
    loaders = {"azobenzene": azobenzene, "3BPA": three_bpa}
    problems = {name: loaders[name](1) for name in chosen.problems}
    done = {r.key for r in recorded()}
    wanted = sorted(
        (draw, n, program, name)
        for name in chosen.problems
        for program, labels in LABELS[name].items()
        for n in labels
        for draw in range(chosen.draws)
        if program in chosen.programs and program in programs()
    )
    for draw, n, program, name in wanted:
        problem = problems[name]
        if problem is None or (name, program, n, draw) in done or n not in (chosen.labels or [n]):
            continue
        result = one_run(problem, program, n, draw)
        record(result)
        print(*result, sep=" | ", flush=True)
    runs = recorded()
    if runs and find_spec("matplotlib"):
        draw_figure(runs)
    return [table(name, runs) for name in LABELS if any(r.problem == name for r in runs)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fchl19"]:
        fchl19(Path(sys.argv[2]))
    else:
        run(*sys.argv[1:])
