"""Audit labels: coverage of the bound of the error, and alarms when the calibration changes.

GFN2-xTB by tblite, without which only synthetic errors are used. The environment variable
QUALMS_DRIFT names a folder where trajectories are kept, which take most of the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from scipy.stats import t as student

from qualms import AtomisticModel
from qualms.active import CalibrationTest, coverage, upper_bound
from qualms.arrays import Float64Array
from qualms.atomistic.evaluation import evaluate, out_of_bag_scores
from qualms.calibration.sequential import calibration_scores, structure_means
from qualms.evaluation import Evaluation

#: Audits; draws of synthetic errors, and of each real set.
SIZES, N_DRAWS, N_REAL_DRAWS = (5, 10, 40), 2000, 500
#: Runs; frames at 300 K to train on and of all, of which so many are labelled before the change.
N_RUNS, N_TRAIN, N_COLD, N_HOT, CHANGE, LATEST = 10, 50, 700, 100, 400, 60
#: Ethanolamine, in Å.
SYMBOLS = "NC2OH7"
POSITIONS = [
    [1.29824909, 0.22583198, 0.2729434],
    [0.26230212, -0.63735825, -0.21389164],
    [-1.05584959, 0.11474904, -0.34709841],
    [-1.04818076, 1.16058969, -1.24871185],
    [2.25864206, 0.0121874, -0.10788201],
    [1.40839881, 0.37191509, 1.23178535],
    [0.53108046, -0.90641408, -1.22053884],
    [0.07408988, -1.49700375, 0.42513322],
    [-1.78931303, -0.4935428, -0.74773315],
    [-1.48146144, 0.37600549, 0.63924711],
    [-0.16066737, 1.49570015, -1.07994374],
]


class Population(NamedTuple):
    """Root mean squares over the components of structures: errors, and σ."""

    errors: Float64Array
    std: Float64Array


def synthetic(rng: np.random.Generator, n: int) -> Iterator[tuple[str, Population]]:
    """Yield kinds of errors of n structures, by what they are."""
    x = np.exp(rng.normal(0, 0.8, n))
    squares = rng.chisquare(10, n) / 10
    rare = rng.choice([1, 20], n, p=[0.95, 0.05])
    kinds = {
        "ten independent components": x * squares,
        "the same, σ too small by a factor of 1.5": 1.5**2 * x * squares,
        "the same, σ without information": squares,
        "three independent components": x * rng.chisquare(3, n) / 3,
        "heavy tails (log-normal e², s = 1)": x * np.exp(rng.normal(0, 1, n)),
        "5 % of structures have 20 times e² of σ²": x * squares * rare,
    }
    for name, y in kinds.items():
        yield f"synthetic: {name}", Population(np.sqrt(y), np.sqrt(x))


def student_bound(errors: Float64Array) -> float:
    """Return the bound of audits alone by Student's t."""
    y = errors**2
    t = student.ppf(0.95, len(y) - 1)
    return float(np.sqrt(y.mean() + t * y.std(ddof=1) / np.sqrt(len(y))))


#: Bounds, by errors and σ of audits and σ of all.
BOUNDS: dict[str, Callable[[Float64Array, Float64Array, Float64Array], float]] = {
    "`upper_bound`": upper_bound,
    "the same, audits alone": lambda e, s, all_s: upper_bound(e, np.ones_like(e), [1.0]),
    "Student's t, audits alone": lambda e, s, all_s: student_bound(e),
}


def bound_cells(populations: Sequence[Population], n: int, draws: int, seed: int) -> list[str]:
    """Return coverage and median width of each bound, over draws of n audits."""
    rng = np.random.default_rng(seed)
    ratios: dict[str, list[float]] = {name: [] for name in BOUNDS}
    for population in populations:
        rmse = np.sqrt(np.mean(population.errors**2))
        for _ in range(draws):
            audits = rng.choice(len(population.errors), n, replace=False)
            drawn = population.errors[audits], population.std[audits]
            for name, bound in BOUNDS.items():
                ratios[name].append(bound(*drawn, population.std) / rmse)
    return [f"{np.mean(np.array(r) >= 1):.1%}, {np.median(r):.2f}" for r in ratios.values()]


def trajectory(seed: int, folder: Path) -> list[Atoms]:
    """Return frames at 300 K, every 50 fs, and then at 900 K, with energies and forces."""
    file = folder / f"traj_{seed}.npz"
    if not file.exists():
        from tblite.ase import TBLite

        atoms, rng = Atoms(SYMBOLS, POSITIONS), np.random.default_rng(seed)
        atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)

        def run(kelvin: float, n: int, equilibration: int) -> list[Any]:
            scale = np.sqrt(atoms.get_masses() * units.kB * kelvin)
            atoms.set_momenta(rng.standard_normal((len(atoms), 3)) * scale[:, None])
            options = {"temperature_K": kelvin, "friction": 0.01 / units.fs}
            dynamics = Langevin(atoms, units.fs, **options, rng=rng, fixcm=False)
            dynamics.run(equilibration)
            found = []
            for _ in range(n):
                dynamics.run(50)
                energy = atoms.get_potential_energy()
                found.append((atoms.get_positions(), energy, atoms.get_forces()))
            return found

        frames = run(300, N_COLD, 2000)
        atoms.set_positions(frames[599][0])
        frames += run(900, N_HOT, 500)
        arrays = [np.array(values) for values in zip(*frames, strict=True)]
        names = ("positions", "energy", "forces")
        np.savez(file, numbers=atoms.numbers, **dict(zip(names, arrays, strict=True)))
    stored = np.load(file)
    frames = []
    arrays = [stored[name] for name in ("positions", "energy", "forces")]
    for positions, energy, forces in zip(*arrays, strict=True):
        atoms = Atoms(stored["numbers"], positions, info={"energy": energy})
        atoms.arrays["forces"] = forces
        frames.append(atoms)
    return frames


class Run(NamedTuple):
    """A model of frames at 300 K, and its errors at 300 and 900 K."""

    cold: Evaluation
    hot: Evaluation
    reference: Float64Array  #: scores of out-of-bag structures
    out_of_bag: Float64Array  #: (m,): mean squared errors of out-of-bag structures

    def first_alarm(self, *, changes: bool, calibrated: bool) -> int | None:
        """Return the number of labels at the alarm, if there is one."""
        evaluations, reference = (self.cold, self.hot), self.reference
        if calibrated:
            cold, hot = (
                calibration_scores(e.residuals, e.prediction.std, e.structure) for e in evaluations
            )
        else:  # σ is the out-of-bag error, the same for all structures
            reference = self.out_of_bag
            cold, hot = (structure_means(e.residuals**2, e.structure) for e in evaluations)
        labels = [*cold[:CHANGE], *hot[:LATEST]] if changes else cold[: CHANGE + 100]
        test = CalibrationTest(reference)
        return next((i for i, score in enumerate(labels, 1) if test.update(score)), None)


def make_run(seed: int, folder: Path) -> Run:
    """Return a model of random frames at 300 K, and its errors of the others in their order."""
    frames = trajectory(seed, folder)
    order = np.random.default_rng(seed).permutation(N_COLD)
    train, others = ([frames[i] for i in np.sort(part)] for part in np.split(order, [N_TRAIN]))
    model = AtomisticModel("energy", forces="forces", units="eV").fit(train)
    points = model.out_of_bag["forces"]
    assert points.structure is not None
    evaluations = (
        evaluate(model, some, quantities=["forces"], compare=False)["forces"]
        for some in (others, frames[N_COLD:])
    )
    out_of_bag = structure_means(points.residuals**2, points.structure)
    return Run(*evaluations, out_of_bag_scores(model, "forces"), out_of_bag)


def drift_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return how often, and when, there are alarms."""
    rows = []
    for name, calibrated in (("of the model", True), ("out-of-bag RMSE of all structures", False)):
        change, none = (
            [run.first_alarm(changes=changes, calibrated=calibrated) for run in runs]
            for changes in (True, False)
        )
        after = [i - CHANGE for i in change if i is not None and i > CHANGE]
        rows.append(
            [
                name,
                f"{len(after)} of {len(runs)}",
                ", ".join(map(str, sorted(after))) or "–",
                f"{sum(i is not None and i <= CHANGE for i in change)} of {len(runs)}",
                f"{sum(i is not None for i in none)} of {len(runs)}",
            ]
        )
    notes = [
        f"Ethanolamine, GFN2-xTB. {N_TRAIN} random frames of a trajectory at 300 K, one every 50 "
        f"fs, are trained on; the others are labelled in their order, {CHANGE} at 300 K and then "
        f"{LATEST} at 900 K. {len(runs)} trajectories.",
        f"Errors by the model: {described([run.cold for run in runs])} at 300 K, "
        f"{described([run.hot for run in runs])} at 900 K. σ grows with the errors, so that the "
        "calibration changes by little; a σ that is the same for all structures does not.",
    ]
    return {
        "title": "Alarms when the temperature changes from 300 to 900 K",
        "columns": [
            "σ",
            f"alarm within {LATEST} labels after the change",
            "labels until then",
            f"false alarm in the {CHANGE} labels before",
            f"alarm in {CHANGE + 100} labels without change",
        ],
        "rows": rows,
        "notes": notes,
    }


def described(evaluations: Sequence[Evaluation]) -> str:
    """Return a text on errors and coverage of all evaluations together."""
    rmse, rms = (
        float(np.sqrt(np.mean(np.concatenate([np.square(values(e)) for e in evaluations]))))
        for values in (lambda e: e.residuals, lambda e: e.prediction.std)
    )
    covers = [coverage(e) for e in evaluations]
    within = [np.mean([cover[i] for cover in covers]) for i in (0, 1)]
    return (
        f"RMSE {1e3 * rmse:.0f} meV/Å, root mean square of σ {1e3 * rms:.0f}, {within[0]:.0%} and "
        f"{within[1]:.0%} within the intervals of 68 and 95 % (from "
        f"{min(c.within_68 for c in covers):.0%} and {min(c.within_95 for c in covers):.0%} to "
        f"{max(c.within_68 for c in covers):.0%} and {max(c.within_95 for c in covers):.0%})"
    )


def population(e: Evaluation) -> Population:
    """Return root mean squares over the components of each structure."""
    values = (structure_means(v**2, e.structure) for v in (e.residuals, e.prediction.std))
    return Population(*map(np.sqrt, values))


def run() -> list[dict[str, Any]]:
    """Return tables of the bound and of alarms."""
    sets = {name: [p] for name, p in synthetic(np.random.default_rng(0), 20_000)}
    tables = []
    if find_spec("tblite") or "QUALMS_DRIFT" in os.environ:
        with TemporaryDirectory() as temporary:
            folder = Path(os.environ.get("QUALMS_DRIFT", temporary))
            runs = [make_run(seed, folder) for seed in range(N_RUNS)]
        tables.append(drift_table(runs))
        sets["ethanolamine at 300 K, ten models of 300 K"] = [population(r.cold) for r in runs]
        sets["ethanolamine at 900 K, ten models of 300 K"] = [population(r.hot) for r in runs]
    rows = []
    for name, populations in sets.items():
        draws = N_DRAWS if len(populations) == 1 else N_REAL_DRAWS
        rows += [[name, n, *bound_cells(populations, n, draws, n)] for n in SIZES]
    bounds = {
        "title": "Upper 95 % bound of the root mean square error",
        "columns": ["errors", "audits", *BOUNDS],
        "rows": rows,
        "notes": [
            "Share of draws in which the bound holds, and the median of bound / RMSE. The standard "
            "deviation of ln σ of synthetic structures is 0.4.",
        ],
    }
    return [bounds, *tables]
