"""Choosing structures to label: errors after training with some more, chosen in several ways."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from benchmarks.bench_shift import read
from qualms import AtomisticModel
from qualms.active import select
from qualms.active.posterior import make_posterior, read_rows
from qualms.arrays import Float64Array, IntArray
from qualms.atomistic.predictions import Request
from qualms.data import qm9
from qualms.io.xyz import xyz_text

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


# --- copies, and brute force ---


def run_pool() -> list[dict[str, Any]]:
    """Return tables of copies that are chosen, of choices by brute force, and of costs."""
    return [copies(), agreement(), costs()]


def copies() -> dict[str, Any]:
    """Return how many of 20 choices are copies of labelled molecules."""
    molecules = qm9(n=3000)
    labelled, new = molecules[:500], molecules[500:1000]
    model, rows = trained(labelled, 300), []
    for displacement in (0.0, 1e-4, 1e-2):
        rng = np.random.default_rng(1)
        moved = [atoms.copy() for atoms in labelled]
        for atoms in moved:
            atoms.positions += displacement * rng.normal(size=atoms.positions.shape)
        pool = [*moved, *new]
        std = model.predict(pool).std / np.array([len(atoms) for atoms in pool])
        largest = int(np.sum(np.argsort(-std)[:20] < 500))
        for given in (False, True):
            selection = select(model, pool, 20, labelled=labelled if given else ())
            chosen = int(np.sum(selection.indices < 500))
            left_out = len(selection.left_out)
            rows.append([displacement, "yes" if given else "no", left_out, chosen, largest])
    return {
        "title": "Copies of labelled molecules among 20 choices",
        "columns": [
            "displacement of atoms, Å",
            "labelled structures given",
            "left out",
            "copies chosen",
            "of the largest σ",
        ],
        "rows": rows,
        "notes": ["QM9: a pool of 500 copies of the labelled molecules and 500 new ones."],
    }


def brute_force(model: AtomisticModel, pool: Sequence[Atoms], n: int, *, forces: bool) -> list[int]:
    """Return choices by solving the posterior again, with all rows, after each."""
    rows = read_rows(model, enumerate(pool), forces=forces)
    assert rows is not None
    posterior = make_posterior(model, [], rows)
    B, _ = posterior.calibrated_rows(rows)
    A, chosen = np.eye(B.shape[1]), []
    for _ in range(n):
        variance = np.einsum("ij,ji->i", B, np.linalg.solve(A, B.T))
        variance[chosen] = -1
        chosen.append(int(variance.argmax()))
        V = posterior.observed(pool[chosen[-1]])
        A += V.T @ V
    return chosen


def agreement() -> dict[str, Any]:
    """Return how many choices are those of brute force."""
    molecules, rows = qm9(n=3000), []
    cold, mixed = read("forces/3bpa_300K.xyz.gz"), read("forces/3bpa_mixedT.xyz.gz")
    by_energy = trained(molecules[:500], 300)
    by_forces = force_model(cold[:30], basis="environments", n_representatives=400)
    for name, model, pool, n in (
        ("QM9, energies", by_energy, molecules[500:700], 40),
        ("3BPA, energies and forces", by_forces, [*cold[100:280], *mixed[-20:]], 40),
    ):
        found = select(model, pool, n).indices.tolist()
        expected = brute_force(model, pool, n, forces=model is by_forces)
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        rows.append([name, len(pool), n, f"{100 * same / n:.0f} %"])
    return {
        "title": "Choices that are those of brute force",
        "columns": ["data", "candidates", "choices", "the same, in the same order"],
        "rows": rows,
        "notes": [
            "Brute force: the posterior is solved again with all rows of the choices after each, "
            "at fixed representatives and noise.",
        ],
    }


def costs() -> dict[str, Any]:
    """Return CPU time and memory of the command on a pool of 10,000 structures of 27 atoms."""
    cold, mixed = read("forces/3bpa_300K.xyz.gz"), read("forces/3bpa_mixedT.xyz.gz")
    rng, rows = np.random.default_rng(0), []
    models = {
        "energies": AtomisticModel("energy", units="eV", n_representatives=1000, threads=1),
        "energies and forces": force_model(None, n_representatives=1000),
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        with (work / "pool.xyz").open("w") as file:
            for i in range(10_000):
                atoms = [*cold[50:], *mixed][i % 950].copy()
                atoms.positions += 0.02 * rng.normal(size=atoms.positions.shape)
                file.write(xyz_text(Atoms(atoms.numbers, atoms.positions)))
        (work / "labelled.xyz").write_text("".join(map(xyz_text, cold[:50])))
        for name, model in models.items():
            model.fit(cold[:50]).save(work / "model.safetensors", force=True)
            command = "model.safetensors pool.xyz -n 100 -o next.xyz -f --threads 1"
            command += " --labelled labelled.xyz --json"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-m", "qualms", "select", *command.split()],
                check=True,
                cwd=work,
                stdout=subprocess.DEVNULL,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows.append([name, f"{seconds:.0f}", f"{after.ru_maxrss / 1024:.0f}"])
    return {
        "title": "100 of 10,000 structures of 27 atoms",
        "columns": ["model of", "CPU, s", "peak memory, MiB"],
        "rows": rows,
        "notes": [
            "3BPA at 300 to 1200 K, displaced by 0.02 Å; 50 labels, 1000 representatives; the "
            "whole command `qualms select`, one core.",
        ],
    }


# --- forces: 3BPA ---

#: Labelled geometries at 300 K, hot ones in the pool, choices, draws, draws of `run_until`.
N_COLD, N_HOT, N_BATCH, N_SEEDS, N_UNTIL = 50, 24, 40, 4, 2


def force_model(frames: Sequence[Atoms] | None, **options: Any) -> AtomisticModel:
    """Return a model of energies and forces."""
    given = {"forces": "forces", "units": "eV", "n_representatives": 1000, "threads": 1} | options
    model = AtomisticModel("energy", **given)
    return model if frames is None else model.fit(frames)


def force_errors(model: AtomisticModel, frames: Sequence[Atoms]) -> Float64Array:
    """Return the root mean square error of the forces on each structure, in meV/Å."""
    request, found = Request(forces=True, novelty=False, means=True), []
    for batch in model.stream(frames, request):
        assert batch.parts.means is not None
        for (forces, _), atoms in zip(batch.parts.means, batch.parts.frames, strict=True):
            found.append(np.sqrt(np.mean((forces - atoms.arrays["forces"]) ** 2)))
    return 1e3 * np.array(found)


def total(errors: Float64Array) -> float:
    """Return the root mean square error of all structures."""
    return float(np.sqrt(np.mean(errors**2)))


def run_forces() -> list[dict[str, Any]]:
    """Return errors of forces on hot geometries, and what is left after `until`."""
    hot, cold = hot_and_cold()
    results: dict[str, list[list[float]]] = {}
    for seed in range(N_SEEDS):
        rng = np.random.default_rng(seed)
        order, of_hot = rng.permutation(len(cold)), rng.permutation(len(hot))
        labelled = [cold[i] for i in order[:N_COLD]]
        pool = [*(cold[i] for i in order[N_COLD:400]), *(hot[i] for i in of_hot[:N_HOT])]
        pool = [pool[i] for i in rng.permutation(len(pool))]
        tests = [hot[i] for i in of_hot[N_HOT:]], [cold[i] for i in order[400:]]
        is_hot = {id(hot[i]) for i in of_hot[:N_HOT]}
        model = force_model(labelled, uncertainty="posterior", n_posterior=32)
        std = [
            np.sqrt(np.mean(batch.forces.std**2))
            for atoms in pool
            for batch in model.stream([atoms], Request(forces=True, novelty=False))
        ]
        chosen = select(model, pool, N_BATCH, labelled=labelled)
        ways: dict[str, Sequence[int]] = {
            "at random": rng.permutation(len(pool))[:N_BATCH].tolist(),
            "the largest σ of forces": np.argsort(std)[::-1][:N_BATCH].tolist(),
            "`select`": chosen.indices.tolist(),
        }
        for name, indices in ways.items():
            more = [pool[i] for i in indices]
            again = force_model([*labelled, *more], uncertainty="posterior", n_posterior=8)
            n_hot = sum(id(atoms) in is_hot for atoms in more)
            errors = [total(force_errors(again, frames)) for frames in tests]
            results.setdefault(name, []).append([n_hot, *errors])
            print(seed, name, n_hot, errors, chosen.curve[[0, -1]].tolist(), flush=True)
    return [force_table(results)]


def force_table(results: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return the table of errors, of hot ones among the choices and both errors of each draw."""
    rows, n = [], len(results["at random"])
    for name, each in results.items():
        values = np.array(each)
        ratio = values[:, 1] / np.array(results["at random"])[:, 1]
        spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        texts = [f"{m:.0f} ± {s:.0f}" for m, s in zip(*spread, strict=True)]
        rows.append([name, *texts[:2], f"{ratio.mean():.2f}", texts[2]])
    return {
        "title": "Errors of forces after labelling 40 more, 3BPA",
        "columns": [
            "40 added",
            "hot ones among them",
            "RMSE of hot geometries, meV/Å",
            "relative to random",
            "RMSE at 300 K",
        ],
        "rows": rows,
        "notes": [
            f"{N_COLD} labelled geometries at 300 K; a pool of {400 - N_COLD} at 300 K and "
            f"{N_HOT} hot ones (of the third of highest energy of the mixture of 300, 600 and "
            "1200 K); test sets: the other hot ones, and 100 at 300 K. Means over "
            f"{n} draws, ± their standard deviation. 1000 representatives.",
        ],
    }


def hot_and_cold() -> tuple[list[Atoms], list[Atoms]]:
    """Return geometries of 3BPA: the third of highest energy of the mixture, and 300 K."""
    cold, mixed = read("forces/3bpa_300K.xyz.gz"), read("forces/3bpa_mixedT.xyz.gz")
    energies = np.argsort([atoms.info["energy"] for atoms in mixed])
    return [mixed[i] for i in energies[333:]], cold


def run_until() -> list[dict[str, Any]]:
    """Return how many of a pool exceed a limit of the error after labelling the choices."""
    (hot, cold), rows = hot_and_cold(), []
    for seed in range(N_UNTIL):
        rng = np.random.default_rng(seed)
        order, of_hot = rng.permutation(len(cold)), rng.permutation(len(hot))
        labelled = [cold[i] for i in order[:N_COLD]]
        pool = [*(cold[i] for i in order[N_COLD:]), *(hot[i] for i in of_hot[:N_HOT])]
        model = force_model(labelled, uncertainty="posterior")
        rmse = model.record.quantities["forces"].rmse or 0.0
        for multiple in (1.5,):
            limit = multiple * rmse
            before = force_errors(model, pool)
            selection = select(model, pool, until=limit, labelled=labelled)
            again = force_model(
                [*labelled, *selection.frames], uncertainty="posterior", n_posterior=8
            )
            rest = np.setdiff1d(np.arange(len(pool)), selection.indices)
            after = force_errors(again, pool)
            shares = [100 * np.mean(e > 1e3 * limit) for e in (before, after, after[rest])]
            rows.append(
                [
                    f"{1e3 * limit:.0f} ({multiple:g} × out of bag)",
                    len(selection.frames),
                    *(f"{share:.1f} %" for share in shares),
                    f"{1e3 * selection.curve[-1][0]:.0f}",
                    f"{total(after):.0f}",
                ]
            )
            print(rows[-1], flush=True)
    return [
        {
            "title": "As many labels as it takes: `--until`, 3BPA",
            "columns": [
                "limit, meV/Å",
                "labels bought",
                "of the pool beyond it before",
                "after",
                "after, of those not bought",
                "expected RMSE of the pool, meV/Å",
                "observed",
            ],
            "rows": rows,
            "notes": [
                "Root mean square errors of the forces on each structure. The pool has "
                f"{500 - N_COLD} geometries at 300 K and {N_HOT} hot ones; one row for each "
                "draw and limit.",
            ],
        }
    ]
