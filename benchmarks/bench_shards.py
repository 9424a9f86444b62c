"""Training in shards beside training in memory: accuracy, calibration, and representatives.

Molecules are those of QM9 that come with the package. The rows that are kept are a part of all, as
with much more data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qualms import AtomisticModel, score
from qualms.atomistic import shards
from qualms.data import qm9
from qualms.execution import Workers

TARGET, N_TRAIN, N_REPRESENTATIVES = "atomization_energy", 2000, (100, 300, 1000)
SEEDS, N_KEPT = 3, 1000


def run() -> list[dict[str, Any]]:
    """Train both ways, and compare."""
    molecules = qm9(n=3000)
    train, test = molecules[:N_TRAIN], molecules[N_TRAIN:]
    sizes = np.array([len(atoms) for atoms in test])
    y = np.array([atoms.info[TARGET] for atoms in test]) / sizes
    shards._KEPT = N_KEPT  # a sample, as with much more data
    rows, radii = [], []
    for M in N_REPRESENTATIVES:
        found: dict[str, list[Any]] = {"in memory": [], "shards": []}
        ratios = []
        for seed in range(SEEDS):
            given = {"n_representatives": M, "seed": seed, "threads": 1}
            whole = AtomisticModel(TARGET, **given).fit(train)
            parts = AtomisticModel(TARGET, **given)
            fitted = shards.fit(train, parts.settings, workers=Workers()).fitted
            parts = AtomisticModel.from_fitted(fitted, threads=1)
            distances = []
            for name, model in (("in memory", whole), ("shards", parts)):
                found[name].append(score(y, model.predict(test) * (1 / sizes)))
                distances.append(np.sqrt(np.concatenate(radius(model, train)).max()))
            ratios.append(distances[1] / distances[0])
        for name, scores in found.items():
            rmse, ll, inside = (
                [getattr(one, key) for one in scores]
                for key in ("rmse", "log_likelihood", "coverage_68")
            )
            cells = [f"{1e3 * np.mean(rmse):.2f} ± {1e3 * np.std(rmse, ddof=1):.2f}"]
            cells += [
                f"{np.mean(ll):.3f} ± {np.std(ll, ddof=1):.3f}",
                f"{100 * np.mean(inside):.1f}",
            ]
            rows.append([M, name, *cells])
        radii.append([M, ", ".join(f"{ratio:.2f}" for ratio in ratios)])
    first = {
        "title": f"Shards: {N_TRAIN} molecules of QM9, tested on {len(test)} others, {SEEDS} seeds",
        "columns": ["M", "training", "RMSE, meV/atom", "log likelihood", "within σ, %"],
        "rows": rows,
        "notes": [
            f"Defaults. In shards, members are made of blocks, and {N_KEPT} rows are kept for "
            "noise and calibration. ±: standard deviation over seeds of the members (and blocks).",
        ],
    }
    second = {
        "title": "Shards: largest distance of an environment to a representative",
        "columns": ["M", "selected within parts, over selected from all"],
        "rows": radii,
        "notes": ["A number for each seed. The guarantee is twice that of the plain algorithm."],
    }
    return [first, second]


def radius(model: AtomisticModel, frames: list[Any]) -> list[Any]:
    """Return the smallest squared distances of environments to representatives."""
    X = model.fitted.representatives.astype(np.float64)
    norms, found = np.sum(X**2, axis=1), []
    for chunk in model.stream(frames):
        Z = chunk.batch.features
        squares = np.sum(Z**2, axis=1)[:, None] + norms - 2 * Z @ X.T
        found.append(np.maximum(squares.min(axis=1), 0.0))
    return found
