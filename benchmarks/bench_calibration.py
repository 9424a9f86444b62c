"""Calibration without data set aside against calibration on a validation set, at the paper's size.

20,000 molecules of QM9 are trained on, 5,000 serve for the calibrations that need a validation set,
and 5,000 judge. The molecules come from the file that the environment variable QUALMS_QM9 names, or
from the package qm9pack. Run this file alone, with a divisor of all sizes, for a small problem.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.plan import default_threads
from qualms.atomistic.settings import make_settings
from qualms.atomistic.study import study_subsamples
from qualms.data import qm9

N_TRAIN, N_VALIDATION, N_TEST, N_REPRESENTATIVES, SEED = 20_000, 5_000, 5_000, 5_000, 0
SIZES = (1_000, 5_000, 10_000, 15_000, 18_000)
COLUMNS = ("Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage", "GPR PP")


def table(divisor: int = 1) -> dict[str, Any]:
    """Judge every calibration for five sizes of sub-samples."""
    train, validation, test, M = (
        n // divisor for n in (N_TRAIN, N_VALIDATION, N_TEST, N_REPRESENTATIVES)
    )
    n = train + validation + test
    molecules = qm9(os.environ.get("QUALMS_QM9", "qm9pack"), n=n, seed=SEED)
    settings = make_settings(
        {
            "target": "atomization_energy_per_atom",
            "kind": "intensive",
            "n_representatives": M,
            "seed": SEED,
        }
    )
    study = study_subsamples(
        molecules[:train],
        molecules[train : train + validation],
        molecules[train + validation :],
        settings,
        [size // divisor for size in SIZES],
        resources=Resources(threads=default_threads()),
    )
    rows = [
        [
            f"{size:,}",
            *(f"{row[c]:.3f}" for c in COLUMNS),
            f"{row['student'] - row['CV']:+.4f}",
            f"{row['shrinkage'] - row['N-L']:+.4f}",
        ]
        for size, row in study.rows.items()
    ]
    return {
        "title": f"Mean log likelihood of {test} test molecules of QM9, eV/atom: {train} trained "
        f"on, M = {M}, 16 members",
        "columns": ["n", *COLUMNS, "student − CV", "shrinkage − N-L"],
        "rows": rows,
        "notes": [
            f"CV and N-L: linear and power scaling fitted to {validation} validation molecules. "
            "Int., Int. N-L, student, shrinkage: fitted to the training set, each point by the "
            "members that did not see it. GPR PP: the variance of Eq. (3).",
            "Targets: student within 0.005 of CV, shrinkage at least equal to N-L.",
        ],
    }


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return [table()]


if __name__ == "__main__":
    found = table(*map(int, sys.argv[1:]))
    print(found["title"], found["columns"], *found["rows"], sep="\n")
