"""Small data: error and coverage of models of 50 to 400 molecules of QM9, over many seeds.

Molecules come from the file that the environment variable QUALMS_QM9 names, or from the package
qm9pack. Run this file alone, with a divisor of the number of seeds, for a quick table.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import numpy as np

from qualms import AtomisticModel, QualmsWarning
from qualms.data import qm9

TARGET = "atomization_energy"
SIZES, N_SEEDS, N_TEST = (50, 100, 200, 400), 20, 300
RMSE_TARGET, COVERAGE_TARGET = 1.02, (64, 72)


def scores(seed: int, n: int, molecules: list[Any]) -> list[float]:
    """Return RMSE in meV/atom, its ratio to the full model's, coverages in % and λ of a model."""
    mixed = [molecules[i] for i in np.random.default_rng(seed).permutation(len(molecules))]
    train, elements = mixed[:n], {z for atoms in mixed[:n] for z in atoms.numbers}
    test = [atoms for atoms in mixed[n:] if elements.issuperset(atoms.numbers)][:N_TEST]
    model = AtomisticModel(TARGET, seed=seed).fit(train)
    sizes = np.array([len(atoms) for atoms in test])
    y = np.array([atoms.info[TARGET] for atoms in test])
    predicted = model.predict(test)
    errors = y - predicted.mean
    rmse, full = (
        float(np.sqrt(np.mean((z / sizes) ** 2))) for z in (errors, y - model.predict_pp(test)[0])
    )
    covered = [100 * np.mean(np.abs(errors) < k * predicted.std) for k in (1.0, 1.96)]
    return [1e3 * rmse, rmse / full, *covered, model.record.centre]


def run(divisor: int = 1) -> list[dict[str, Any]]:
    """Train all models."""
    molecules = qm9(os.environ.get("QUALMS_QM9", "qm9pack"), n=6000, seed=0)
    rows = []
    for n in SIZES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QualmsWarning)
            found = np.array([scores(seed, n, molecules) for seed in range(N_SEEDS // divisor)])
        mean, error = found.mean(axis=0), found.std(axis=0, ddof=1) / np.sqrt(len(found))
        ratio = f"{mean[1]:.3f} ({found[:, 1].max():.3f})"
        covered = [f"{mean[i]:.1f} ± {error[i]:.1f}" for i in (2, 3)]
        rows.append([n, f"{mean[0]:.1f} ± {error[0]:.1f}", ratio, *covered, f"{mean[4]:.2f}"])
    low, high = COVERAGE_TARGET
    return [
        {
            "title": f"Small data: QM9, {N_SEEDS // divisor} seeds, {N_TEST} test molecules each",
            "columns": [
                "molecules",
                "RMSE, meV/atom",
                "of the full model's: mean (largest)",
                "within σ, %",
                "within 1.96 σ, %",
                "λ",
            ],
            "rows": rows,
            "notes": [
                f"Targets: RMSE at most {RMSE_TARGET} × the full model's; {low} to {high} % within "
                "σ in the mean. Defaults of AtomisticModel. ±: standard error. Test molecules have "
                "no elements that the training set lacks.",
            ],
        }
    ]


if __name__ == "__main__":
    for table in run(*map(int, sys.argv[1:])):
        print("\n" + table["title"], table["columns"], *table["rows"], sep="\n", flush=True)
