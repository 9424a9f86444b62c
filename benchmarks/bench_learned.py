"""Features of pretrained networks and Δ-learning beside SOAP: error, coverage, time and memory.

Azobenzene and 3BPA come from the files that `benchmarks.bench_forces` describes, molecules of QM9
from the file that QUALMS_QM9 names or from the package qm9pack. Rows of networks and baselines
whose packages (``sevenn``, ``tblite``) are not installed are left out.

Training and prediction are commands, so that time and peak memory are those of a process of their
own. Run this file alone, with a divisor of all sizes and names of problems such as QM9, azobenzene
or "azobenzene forces", for small tables on the terminal.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from benchmarks.bench_forces import Predicted, Problem, azobenzene, run_qualms, three_bpa
from benchmarks.bench_gap import N_THREADS
from qualms.data import qm9
from qualms.metrics import gaussian_log_density

#: Labelled structures; with forces, and those of networks, whose Jacobians take minutes.
LABELS, LABELS_OF_QM9 = (50, 100, 400, 1000), (100, 400, 2000)
LABELS_OF_FORCES, LABELS_OF_JACOBIANS = (50, 100, 400, 1000), {"SevenNet-0": 100}
#: Test structures of each set.
N_TEST = 200
TARGET = "atomization_energy"
#: Settings by the name of the row, and the packages that they need.
SOAP: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "SOAP": ({}, ()),
    "SOAP + Δ (GFN2-xTB)": ({"baseline": "tblite:GFN2-xTB"}, ("tblite",)),
}
NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "SevenNet-0": ({"representation": "sevennet"}, ("sevenn",)),
    "SevenNet-0 + Δ": ({"representation": "sevennet", "baseline": "backbone"}, ("sevenn",)),
}


def scores(frames: Sequence[Atoms], predicted: Predicted, key: str) -> list[str]:
    """Return MAE, coverage and log likelihood of energies, and of forces if there are any."""
    energies = np.array([atoms.info[key] for atoms in frames])
    # Energies of molecules of different size are compared per atom, as everywhere.
    sizes = np.array([len(atoms) if key == TARGET else 1 for atoms in frames])
    found = [((predicted.energies - energies) / sizes, predicted.energies_std / sizes)]
    if predicted.forces is not None:
        forces = np.concatenate([atoms.arrays["REF_forces"] for atoms in frames])
        found.append((predicted.forces - forces, predicted.forces_std))
    cells = []
    for z, std in found:
        inside = [100 * np.mean(np.abs(z) < k * std) for k in (1.0, 1.96)]
        density = np.mean(gaussian_log_density(z.ravel(), std.ravel()))
        cells += [f"{1e3 * np.mean(np.abs(z)):.2f}", f"{inside[0]:.0f} / {inside[1]:.0f}"]
        cells.append(f"{density:.2f}")
    return cells


def comparison(
    problem: Problem,
    labels: Sequence[int],
    variants: dict[str, tuple[dict[str, Any], tuple[str, ...]]],
    *,
    forces: bool = False,
    key: str = "REF_energy",
) -> dict[str, Any]:
    """Train with all numbers of labels, and predict the test sets."""
    rows: list[list[Any]] = []
    for n in labels:
        for name, (settings, packages) in variants.items():
            if n > len(problem.train) or not all(map(find_spec, packages)):
                continue
            if forces and n != LABELS_OF_JACOBIANS.get(name.removesuffix(" + Δ"), n):
                continue
            given = settings if key == "REF_energy" else settings | {"target": key}
            with tempfile.TemporaryDirectory() as folder:
                trained, found = run_qualms(Path(folder), problem, n, forces=forces, **given)
            cost = [f"{trained.seconds:.0f}", f"{trained.peak:.0f}"]
            for test, predicted in found.items():
                row = [n, name, test, *scores(problem.tests[test], predicted, key), *cost]
                print(*row, sep=" | ", flush=True)
                rows.append(row)
    unit, n_test = "meV/atom" if key == TARGET else "meV", len(next(iter(problem.tests.values())))
    columns = ["labels", "features", "test set", f"energy MAE, {unit}", "coverage, %"]
    columns.append("log likelihood")
    if forces:
        columns += ["force MAE, meV/Å", "coverage of forces, %", "log likelihood of forces"]
    return {
        "title": f"{problem.name}: {'energies and forces' if forces else 'energies'}",
        "columns": [*columns, "training, s", "peak memory, MiB"],
        "rows": rows,
        "notes": [
            f"Defaults of `qualms train`, {N_THREADS} cores, whole commands; {n_test} test "
            "structures. Coverage: reference values within σ and within 1.96 σ; nominal 68 / 95 %. "
            "Δ: differences from the energies (and forces) of the network, or of GFN2-xTB.",
        ],
    }


def _smaller(problem: Problem, divisor: int) -> Problem:
    n = max(N_TEST // divisor, 10)
    tests = {name: frames[:n] for name, frames in problem.tests.items()}
    if "mixed T" in tests:  # in the order of temperatures
        frames = problem.tests["mixed T"]
        tests["mixed T"] = frames[:: len(frames) // n]
    return Problem(problem.name, problem.train, tests, {})


def molecules(divisor: int) -> Problem:
    """Return atomisation energies of QM9, in eV; fluorine is too rare for few labels."""
    n, n_test = LABELS_OF_QM9[-1], max(1000 // divisor, 10)
    found = qm9(os.environ.get("QUALMS_QM9", "qm9pack"), n=n + 1200, seed=0)
    found = [atoms for atoms in found if 9 not in atoms.numbers]
    return Problem("QM9", found[:n], {"test": found[n : n + n_test]}, {})


def tables(names: Sequence[str], divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Measure some problems; `divisor` makes them small."""

    def divided(labels: Sequence[int]) -> list[int]:
        return sorted({max(n // divisor, 20) for n in labels})

    both = SOAP | NETWORKS
    if "QM9" in names:
        yield comparison(molecules(divisor), divided(LABELS_OF_QM9), SOAP, key=TARGET)
    for name, load in (("azobenzene", azobenzene), ("3BPA", three_bpa)):
        for forces, labels in ((False, LABELS), (True, LABELS_OF_FORCES)):
            wanted = f"{name} forces" if forces else name
            # Jacobians of networks take minutes: azobenzene shows what they bring.
            variants = SOAP if wanted == "3BPA forces" else both
            if wanted in names and (found := load(1)) is not None:
                yield comparison(_smaller(found, divisor), divided(labels), variants, forces=forces)


def run() -> list[dict[str, Any]]:
    """Measure energies of azobenzene."""
    return list(tables(("azobenzene",)))


def run_delta() -> list[dict[str, Any]]:
    """Measure energies of QM9, and their differences from GFN2-xTB."""
    return list(tables(("QM9",)))


def run_forces() -> list[dict[str, Any]]:
    """Measure energies and forces of azobenzene."""
    return list(tables(("azobenzene forces",)))


def run_shift() -> list[dict[str, Any]]:
    """Measure 3BPA, trained at 300 K and tested at a mixture of temperatures."""
    return list(tables(("3BPA", "3BPA forces")))


if __name__ == "__main__":
    for table in tables(sys.argv[2:], int(sys.argv[1])):
        print("\n" + table["title"], table["columns"], *table["rows"], *table["notes"], sep="\n")
