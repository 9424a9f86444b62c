"""Forces: what uncertainties cost beside the mean forces alone, and a step of a simulation.

On azobenzene, if QUALMS_AZOBENZENE names the file (see `benchmarks.bench_forces`), and on molecules
that come with qualms. Run this file alone, with a divisor of all sizes, for quick tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.emt import EMT
from featomic import SphericalExpansion
from metatensor import Labels

from benchmarks.bench_atomistic import priced
from benchmarks.bench_forces import azobenzene
from qualms import AtomisticModel
from qualms.ase import Calculator
from qualms.atomistic.forces import derivatives, make_potential
from qualms.data import qm9
from qualms.features.densities import expansion_options
from qualms.resources import limited

TARGET = 1.4
#: Milliseconds of a step of nine atoms.
STEP_TARGET = 8
SOAP = {"preset": "organic", "cutoff": 5.0, "smoothing": 0.5, "engine": "featomic"}
#: Models whose uncertainties are priced.
COSTS: dict[str, dict[str, Any]] = {
    "ζ = 2, 192 features": {"compression": {"method": "pairs", "n_features": 192}},
    "ζ = 2, 384 features": {"compression": {"method": "pairs", "n_features": 384}},
    "ζ = 3, 192 features": {"compression": {"method": "pairs", "n_features": 192}, "exponent": 3},
    "ζ = 3.5, 192 features": {
        "compression": {"method": "pairs", "n_features": 192},
        "exponent": 3.5,
    },
    "two scales, ζ = 2": {"scales": [{"cutoff": 3.0}, {"cutoff": 5.0}]},
    "ζ = 2, all features": {"compression": None},
}
#: Molecules of five elements, that is fifteen pairs of them, and few neighbours.
ALONE = "one at a time"
FIVE_ELEMENTS: dict[str, dict[str, Any]] = {
    "ζ = 2": {},
    f"ζ = 2, {ALONE}": {},
    "ζ = 3.5": {"exponent": 3.5},
    f"ζ = 3.5, {ALONE}": {"exponent": 3.5},
    "ζ = 2, all features": {"compression": None},
}


def cost_row(
    name: str, soap: dict[str, Any], frames: Sequence[Atoms], settings: dict[str, Any]
) -> list[Any]:
    """Time forces with and without uncertainties, of all structures at once or one at a time."""
    n_train = len(frames) * 9 // 10
    if "scales" in soap:
        del soap["cutoff"]  # it would be that of all scales
    model = AtomisticModel("energy", representation=soap, **settings)
    fitted, new = model.fit(frames[:n_train]).fitted, list(frames[n_train:])
    mean = make_potential(fitted, fitted.weights.mean(axis=1)[:, None])
    calls = [[atoms] for atoms in new] if ALONE in name else [new]

    def mean_alone() -> object:
        for some in calls:
            list(model.chunks(some, features=False))  # checks structures
            with limited(model.threads):
                derivatives(mean, some)

    def everything() -> object:
        return [model.predict(some, forces=True).forces.std for some in calls]

    seconds, seconds_all, ratio = priced(mean_alone, everything, 21)
    n_atoms = sum(map(len, new))
    return [
        name,
        fitted.representation.n_features,
        len(fitted.representatives),
        f"{1e3 * seconds / n_atoms:.2f}",
        f"{1e3 * seconds_all / n_atoms:.2f}",
        f"{ratio:.2f} ×",
        f"≤ {TARGET} ×",
    ]


def cost_table(what: str, rows: list[list[Any]]) -> dict[str, Any]:
    """Compare forces with and without uncertainties."""
    times = ["mean alone, ms/atom", "mean, σ and members"]
    return {
        "title": f"Forces on {what}, 16 subsampled and 16 posterior members",
        "columns": ["model", "features", "M", *times, "ratio", "target"],
        "rows": rows,
        "notes": ["Medians of 21 calls of each, in turns, from structures to arrays of forces."],
    }


def displaced(n: int) -> list[Atoms]:
    """Return geometries of ethanol with energies and forces of EMT."""
    rng, frames = np.random.default_rng(0), []
    for _ in range(n):
        atoms = molecule("CH3CH2OH")
        atoms.positions += rng.normal(0, 0.06, atoms.positions.shape)
        calculated = atoms.copy()
        calculated.calc = EMT()
        atoms.info["REF_energy"] = calculated.get_potential_energy()
        atoms.arrays["REF_forces"] = calculated.get_forces()
        frames.append(atoms)
    return frames


def step_table(divisor: int) -> dict[str, Any]:
    """Time a step of a simulation of ethanol beside featomic's expansion with derivatives."""
    frames = displaced(120 // divisor)
    model = AtomisticModel("energy", forces="forces", n_representatives=500 // divisor).fit(frames)
    atoms, rng = frames[0].copy(), np.random.default_rng(1)
    atoms.calc = Calculator(model)
    (engine,) = model.fitted.representation.engines
    expansion = SphericalExpansion(**expansion_options(engine.scale))
    samples = Labels(["system", "atom"], np.array([[0, i] for i in range(len(atoms))], np.int32))

    def featomic() -> object:
        given = {"gradients": ["positions"], "selected_samples": samples}
        return expansion.compute([atoms], **given, use_native_system=True)

    def step() -> object:
        atoms.positions += rng.normal(0, 1e-3, atoms.positions.shape)
        return atoms.get_forces()

    alone, seconds, ratio = priced(featomic, step, 101)
    row = [f"{1e3 * seconds:.1f}", f"{1e3 * alone:.1f}", f"{ratio:.2f} ×", f"≤ {STEP_TARGET} ms"]
    step_note = "Energy, forces, their uncertainties and members. Medians of 101 calls of each."
    alone_note = "featomic alone: SoapPowerSpectrum with gradients, the features and nothing else."
    return {
        "title": "A step of a simulation: ethanol, 9 atoms, 16 + 16 members",
        "columns": ["ms per step", "featomic alone, ms", "ratio", "target"],
        "rows": [row],
        "notes": [step_note, alone_note],
    }


def tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Compare forces on molecules of three elements, and of five."""
    yield step_table(divisor)
    settings: dict[str, Any] = {"n_representatives": 1_000 // divisor}
    problem = azobenzene(divisor)
    if problem is not None:
        frames = problem.train[: 120 // divisor + 10]
        trained = settings | {"forces": "forces", "noise": 1e-8, "forces_noise": 1e-4}
        costs = COSTS.items()
        rows = [cost_row(name, SOAP | soap, frames, trained) for name, soap in costs]
        yield cost_table(problem.name, rows)
    molecules = qm9(n=400 // divisor)
    for atoms in molecules:
        atoms.info["REF_energy"] = atoms.info["atomization_energy"]
    costs = FIVE_ELEMENTS.items()
    rows = [cost_row(name, SOAP | soap, molecules, settings) for name, soap in costs]
    yield cost_table("molecules of QM9", rows)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return list(tables())


if __name__ == "__main__":
    for found in tables(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        print("\n" + found["title"], found["columns"], *found["rows"], *found["notes"], sep="\n")
