"""Choosing structures to label: errors after training with some more, chosen in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ase import Atoms

from qualms import AtomisticModel
from qualms.active import select
from qualms.arrays import Float64Array, IntArray
from qualms.data import qm9

#: Labelled molecules, pool, test set; molecules that are chosen; draws.
SIZES, N_CHOSEN, N_DRAWS = (200, 1000, 1000), 50, 4
#: Molecules of the test set that the model is for.
N_TARGETS = 300


def trained(frames: Sequence[Atoms], n_representatives: int) -> AtomisticModel:
    """Return a model of atomization energies."""
    options = {"n_representatives": n_representatives, "units": "eV"}
    return AtomisticModel("atomization_energy", **options).fit(frames)


def most_uncertain(model: AtomisticModel, pool: Sequence[Atoms]) -> IntArray:
    """Return the molecules of largest uncertainty per atom."""
    std = model.predict(pool).std / np.array([len(atoms) for atoms in pool])
    return np.argsort(-std)[:N_CHOSEN]


def choices(
    model: AtomisticModel, pool: Sequence[Atoms], test: Sequence[Atoms], seed: int
) -> dict[str, Callable[[], Sequence[int]]]:
    """Return ways to choose."""
    targets = test[:N_TARGETS]

    def chosen(**options: Any) -> Sequence[int]:
        indices: list[int] = select(model, pool, N_CHOSEN, seed=seed, **options).indices.tolist()
        return indices

    return {
        "nothing": list,
        "at random": lambda: chosen(strategy="random"),
        "the most uncertain": lambda: most_uncertain(model, pool).tolist(),
        f"`select`, for {N_TARGETS} of the test molecules": lambda: chosen(
            strategy="target", targets=targets
        ),
        "`select`": chosen,
    }


def errors(model: AtomisticModel, frames: Sequence[Atoms]) -> Float64Array:
    """Return errors of the energies per atom, in meV."""
    y = np.array([atoms.info["atomization_energy"] for atoms in frames])
    sizes = np.array([len(atoms) for atoms in frames])
    return np.asarray(1e3 * (model.predict(frames).mean - y) / sizes)


def run() -> list[dict[str, Any]]:
    """Return the table of errors."""
    molecules, rows = qm9(n=3000), {}
    for n_representatives in (100, 300):
        found: dict[str, list[float]] = {}
        for seed in range(N_DRAWS):
            order = np.random.default_rng(seed).permutation(len(molecules))
            parts = np.split(order, np.cumsum(SIZES))[:3]
            labelled, pool, test = ([molecules[i] for i in part] for part in parts)
            model = trained(labelled, n_representatives)
            for name, choose in choices(model, pool, test, seed).items():
                more = [pool[i] for i in choose()]
                z = errors(trained(labelled + more, n_representatives), test)
                found.setdefault(name, []).append(float(np.sqrt(np.mean(z**2))))
        for name, rmse in found.items():
            mean, spread = np.mean(rmse), np.std(rmse, ddof=1)
            rows.setdefault(name, [name]).append(f"{mean:.1f} ± {spread:.1f}")
    return [
        {
            "title": "Errors after labelling more molecules, meV per atom",
            "columns": [f"{N_CHOSEN} added", "RMSE, 100 representatives", "RMSE, 300"],
            "rows": list(rows.values()),
            "notes": [
                f"QM9: {SIZES[0]} labelled molecules, a pool of {SIZES[1]}, {SIZES[2]} test "
                f"molecules, all at random; means over {N_DRAWS} draws, ± their standard "
                "deviation.",
            ],
        }
    ]
