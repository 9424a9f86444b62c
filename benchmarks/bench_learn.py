"""The active-learning loop on ethanolamine with GFN2-xTB: its end, and its bound.

QUALMS_SEEDS: number of seeds, ten by default. QUALMS_LOOPS: directory of the loops, which a run
that was interrupted continues; a temporary one by default.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.optimize import BFGS

from qualms import AtomisticModel
from qualms.active import learn, make_learn_settings
from qualms.active.exploration import bare
from qualms.arrays import Float64Array
from qualms.ase import Calculator
from qualms.atomistic.structures import read_frames
from qualms.io.xyz import xyz_text

#: K, fs, eV/Å; labels of the start, of a batch, and at most.
TEMPERATURE, STEP, TARGET = 500.0, 1.0, 0.1
N_START, BATCH, BUDGET = 20, 40, 280
#: Frames of the independent trajectory, and the steps between them.
N_TEST, EVERY = 500, 20
#: Time of the simulation by the final model in ps, and how much bonds may stretch.
SIMULATION, STRETCH = 20.0, 1.5


def ethanolamine() -> Atoms:
    """Return the molecule, relaxed with GFN2-xTB."""
    positions = [
        *([1.95, 0.25, 0.1], [0.65, -0.45, 0.0], [-0.55, 0.5, 0.0], [-1.75, -0.25, -0.1]),
        *([0.6, -1.1, 0.88], [0.6, -1.1, -0.88], [-0.5, 1.15, 0.88], [-0.5, 1.15, -0.88]),
        *([2.0, 0.85, 0.92], [2.7, -0.4, 0.2], [-2.5, 0.35, -0.1]),
    ]
    atoms = Atoms("NCCOHHHHHHH", positions)
    atoms.calc = reference()
    BFGS(atoms, logfile=None).run(fmax=0.02, steps=300)
    return atoms


def reference() -> Any:
    """Return GFN2-xTB, whose results do not depend on the structures before."""
    from tblite.ase import TBLite

    return TBLite(method="GFN2-xTB", verbosity=0, cache_api=False)


def dynamics(atoms: Atoms, seed: int) -> Langevin:
    """Return Langevin dynamics with velocities of the temperature."""
    rng = np.random.default_rng(seed)
    width = np.sqrt(units.kB * TEMPERATURE * atoms.get_masses())[:, None]
    atoms.set_momenta(width * rng.standard_normal((len(atoms), 3)))
    how = {"temperature_K": TEMPERATURE, "friction": 0.02 / units.fs, "fixcm": False, "rng": rng}
    return Langevin(atoms, STEP * units.fs, **how)


def trajectory(path: Path, n: int, every: int, seed: int) -> list[Atoms]:
    """Return labelled frames of a trajectory by GFN2-xTB, from a file if there is one."""
    if not path.exists():
        atoms, texts = ethanolamine(), []
        run = dynamics(atoms, seed)
        run.run(500)
        for _ in range(n):
            run.run(every)
            frame = bare(atoms, energy=float(atoms.get_potential_energy()))
            frame.arrays["forces"] = atoms.get_forces()
            texts.append(xyz_text(frame))
        path.write_text("".join(texts))
    return read_frames(path)


def forces_of(frames: Sequence[Atoms]) -> Float64Array:
    """Return the forces of all atoms."""
    return np.concatenate([atoms.get_forces() for atoms in frames])


def rmse(model: AtomisticModel, frames: Sequence[Atoms]) -> float:
    """Return the error of the components of the forces."""
    z = model.predict(frames, forces=True).forces.mean - forces_of(frames)
    return float(np.sqrt(np.mean(z**2)))


def stays_bound(model: AtomisticModel) -> bool:
    """Return whether a simulation by the model keeps all bonds, and its atoms together."""
    atoms = ethanolamine()
    before = atoms.get_all_distances()
    bonded = (before > 0) & (before < 1.6)
    atoms.calc = Calculator(model, annotate=False, forces_uncertainty_every=10**6)
    run = dynamics(atoms, seed=10)
    for _ in range(int(1e3 * SIMULATION / STEP / 100)):
        run.run(100)
        if not np.all(atoms.get_all_distances()[bonded] < STRETCH * before[bonded]):
            return False
    return True


def loop(folder: Path, seed: int, strategy: str) -> dict[str, Any]:
    """Run the loop of a seed; return its bound and the error on the xTB trajectory."""
    found = folder / f"{strategy}-{seed}.json"
    if found.exists():
        result: dict[str, Any] = json.loads(found.read_text())
        return result
    start = folder / f"start-{seed}.xyz"
    trajectory(start, N_START, 50, seed)
    test = trajectory(folder / f"test-{seed}.xyz", N_TEST, EVERY, 1000 + seed)
    settings = make_learn_settings(
        {
            "start": str(start),
            "directory": str(folder / f"{strategy}-{seed}"),
            "target_error": TARGET,
            "budget": BUDGET,
            "batch": BATCH,
            "seed": seed,
            "model": {"threads": 1},
            "explore": {"temperatures": TEMPERATURE, "time": 1.0, "timestep": STEP},
            "choose": {"strategy": strategy},
            "label": {"calculator": "tblite:GFN2-xTB"},
        }
    )
    partial = folder / f"{strategy}-{seed}-rounds.json"  # of a run that was interrupted
    rounds = json.loads(partial.read_text()) if partial.exists() else []
    before = time.process_time()
    for round_ in learn(settings):
        seconds, n = time.process_time() - before, round_.number
        of = {"labels": round_.record["labels"], "rmse": rmse(round_.model, test)}
        rounds[n:] = [of | {"seconds": seconds, "record": round_.record}]
        partial.write_text(json.dumps(rounds))
        print(strategy, seed, of, round_.record, flush=True)
        before = time.process_time()
    result = {
        "curve": [[of["labels"], of["rmse"]] for of in rounds],
        "records": [of["record"] for of in rounds],
        "seconds": sum(of["seconds"] for of in rounds),
        "end": round_.end,
    }
    if strategy == "variance":
        result["bound"] = stays_bound(round_.model)
    found.write_text(json.dumps(result))
    return result


def labels_for(curve: Sequence[Sequence[float]], error: float) -> float:
    """Return the number of labels at which an error is reached; NaN if it is not."""
    n, e = np.log(np.array(curve).T)
    if np.exp(e.min()) > error:
        return float("nan")
    i = int(np.argmax(np.exp(e) <= error))
    if not i:
        return float(np.exp(n[0]))
    return float(np.exp(np.interp(-np.log(error), -e[i - 1 : i + 1], n[i - 1 : i + 1])))


def run() -> list[dict[str, Any]]:
    """Return the tables; none without tblite."""
    try:
        import tblite  # noqa: F401
    except ImportError:
        return []
    n_seeds = int(os.environ.get("QUALMS_SEEDS", "10"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("QUALMS_LOOPS", temporary))
        folder.mkdir(exist_ok=True)
        chosen = [loop(folder, seed, "variance") for seed in range(n_seeds)]
        n_random = int(os.environ.get("QUALMS_RANDOM_SEEDS", str(n_seeds)))
        random = [loop(folder, seed, "random") for seed in range(n_random)]
    rows, held, ratios = [], 0, []
    for seed, of in enumerate(chosen):
        n, error = of["curve"][-1]
        last, bound = of["records"][-1], of["records"][-1]["bound"]
        audits = [r["audit"] for r in of["records"] if "audit" in r]
        within = [
            np.average([a[k] for a in audits], weights=[a["n"] for a in audits])
            for k in ("within_68", "within_95")
        ]
        held += bound is not None and error <= bound
        needed = labels_for(random[seed]["curve"], error) if seed < len(random) else np.nan
        ratios.append(needed / n)
        rows.append(
            [
                seed,
                last["bought"],
                f"{1e3 * last['estimate']:.0f}",
                f"{1e3 * bound:.0f}",
                f"{1e3 * error:.0f}",
                " / ".join(f"{100 * share:.0f}" for share in within),
                "–"
                if seed >= len(random)
                else f"> {random[seed]['curve'][-1][0]}"
                if np.isnan(needed)
                else f"{needed:.0f}",
                {True: "yes", False: "no", None: "–"}[of["bound"]],
                f"{of['seconds'] / 60:.1f}",
            ]
        )
    return [
        {
            "title": "The loop on ethanolamine, GFN2-xTB, 500 K; forces in meV/Å",
            "columns": [
                "seed",
                "labels bought",
                "expected error",
                "bound (95 %)",
                "error, xTB trajectory",
                "coverage of audit labels, %",
                "labels at random for the same error",
                "20 ps stay bound",
                "minutes of CPU",
            ],
            "rows": rows,
            "notes": [
                f"From {N_START} labels, batches of {BATCH}, a fifth of them audits; four walkers "
                f"of 1 ps in each round; target {1e3 * TARGET:.0f} meV/Å, budget {BUDGET}. The "
                f"error is that of {N_TEST} frames of an independent trajectory of "
                f"{N_TEST * EVERY * STEP * 1e-3:.0f} ps by GFN2-xTB, another for each seed. The "
                f"bound holds for {held} of {len(rows)} seeds. Labels at random include the "
                f"{N_START} of the start. –: not run.",
            ],
        },
        {
            "title": "Errors of forces in each round of the loop, meV/Å",
            "columns": ["labels chosen by", "seed", "labels: error on the xTB trajectory"],
            "rows": [
                [how, seed, ", ".join(f"{n}: {1e3 * e:.0f}" for n, e in of["curve"])]
                for how, runs in (("`select`, and audits", chosen), ("chance", random))
                for seed, of in enumerate(runs)
            ],
        },
    ]
