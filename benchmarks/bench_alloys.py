"""Many elements: presets on alloys and salts, and the time of training against the elements.

Alloys are fcc cells of 4 to 32 atoms and one to three of seven metals, strained and with displaced
atoms, with energies by EMT. Salts are cells of rock salt with one or two of eight cations and of
four anions, with the energies of a screened Coulomb potential and an exponential repulsion. Errors
are those of structures that the model has not seen.

Run this file alone, with a divisor of all sizes, for tables of a small problem on the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from benchmarks.bench_presets import Problem, table
from qualms import AtomisticModel

SEED = 0
METALS = {"Al": 4.05, "Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92}
#: Charge in e and radius in Å.
CATIONS = {
    "Li": (1, 0.76), "Na": (1, 1.02), "K": (1, 1.38), "Mg": (2, 0.72),
    "Ca": (2, 1.00), "Ba": (2, 1.35), "Fe": (2, 0.78), "Zn": (2, 0.74),
}  # fmt: skip
ANIONS = {"F": (-1, 1.33), "Cl": (-1, 1.81), "O": (-2, 1.40), "S": (-2, 1.84)}
IONS = CATIONS | ANIONS
#: Twelve metals, for timings: the first three, or all.
TWELVE = ("Al", "Cu", "Pd", "Ni", "Ag", "Au", "Pt", "Ti", "Fe", "Co", "Mo", "Zr")
REPEATS = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2))
#: Changes of the preset.
CHANGES: dict[str, dict[str, Any]] = {
    "3 pseudo-species": {"pseudo_species": 3},
    "4 pseudo-species": {"pseudo_species": 4},
    "8 pseudo-species": {"pseudo_species": 8},
    "all elements": {"pseudo_species": None},
    "cutoff 6 Å": {"cutoff": 6.0},
    "Gaussians of 0.5 Å": {"gaussian_width": 0.5},
    "radial scaling of 3 Å, m = 4": {"radial_scaling": {"scale": 3.0, "exponent": 4.0}},
    "8 radial functions": {"n_radial": 8},
    "ζ = 3": {"exponent": 3.0},
}


def disordered(atoms: Atoms, constant: float, rng: np.random.Generator) -> Atoms:
    """Return a crystal of a lattice constant of 1 Å with another, strained, and atoms displaced."""
    strain = rng.normal(0, 0.03, (3, 3))
    strain = (strain + strain.T) / 2 + rng.uniform(-0.04, 0.06) * np.eye(3)
    atoms.set_cell(constant * atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    atoms.positions += rng.normal(0, rng.uniform(0.03, 0.2), atoms.positions.shape)
    return atoms


def fcc(
    elements: Sequence[str], rng: np.random.Generator, constant_of: Callable[[str], float]
) -> Atoms:
    """Return a cell with one to three elements at random."""
    atoms = bulk("Cu", "fcc", a=1.0, cubic=True) * REPEATS[rng.integers(len(REPEATS))]
    chosen = rng.choice(elements, rng.integers(1, 4), replace=False)
    atoms.symbols = rng.choice(chosen, len(atoms)).tolist()
    return disordered(atoms, float(np.mean([constant_of(s) for s in atoms.symbols])), rng)


def alloys(n: int, seed: int = SEED) -> list[Atoms]:
    """Return alloys with energies (eV) by EMT."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        atoms = fcc(list(METALS), rng, METALS.__getitem__)
        calculated = atoms.copy()
        calculated.calc = EMT()
        atoms.info["energy"] = calculated.get_potential_energy()
        found.append(atoms)
    return found


def salts(n: int, seed: int = SEED) -> list[Atoms]:
    """Return salts with energies of a model potential."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        charge = rng.integers(1, 3)
        atoms = bulk("NaCl", "rocksalt", a=1.0, cubic=True) * REPEATS[rng.integers(3)]
        symbols = np.array(atoms.get_chemical_symbols(), dtype=object)
        for ions, site in ((CATIONS, "Na"), (ANIONS, "Cl")):
            alike = [s for s, (q, _) in ions.items() if abs(q) == charge]
            chosen = rng.choice(alike, rng.integers(1, 3), replace=False)
            here = np.flatnonzero(np.array(atoms.symbols) == site)
            symbols[here] = rng.choice(chosen, len(here))
        atoms.symbols = symbols.tolist()
        q, r = np.array([IONS[s] for s in symbols]).T
        atoms = disordered(atoms, 2 * float(r[q > 0].mean() + r[q < 0].mean()), rng)
        i, j, d = neighbor_list("ijd", atoms, 9.0)
        pairs = 14.4 * q[i] * q[j] / d * np.exp(-d / 3) + 0.3 * np.exp((r[i] + r[j] - d) / 0.3)
        atoms.info["energy"] = float(np.sum(pairs * np.cos(np.pi * d / 18) ** 2) / 2)
        found.append(atoms)
    return found


def mixtures(n: int, elements: Sequence[str], seed: int = SEED) -> list[Atoms]:
    """Return alloys of any elements, with the energies of a Morse potential.

    Cells and displacements are the same for all elements, and neighbours as far apart: they take as
    long but for the number of elements.
    """
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        atoms = fcc(elements, rng, lambda symbol: 4.0)
        i, j, d = neighbor_list("ijd", atoms, 6.0)
        radii = covalent_radii[atoms.numbers]
        decay = np.exp(-(d - radii[i] - radii[j]))
        energies = (decay**2 - 2 * decay) * np.cos(np.pi * d / 12) ** 2
        atoms.info["energy"] = float(np.sum(energies) / 2)
        found.append(atoms)
    return found


def problem(name: str, make: Callable[[int], list[Atoms]], divisor: int) -> Problem:
    """Return structures to learn and to test."""
    n_train, n_test = 500 // divisor, 200 // divisor
    found = make(n_train + n_test)
    settings = {"target": "energy", "n_representatives": 1000 // divisor}
    return Problem(name, found[:n_train], found[n_train:], settings, 1e3, "meV/atom")


def times(divisor: int) -> dict[str, Any]:
    """Measure the processor time of training with three and with twelve elements."""
    rows = []
    for preset in ("inorganic", "organic"):
        seconds = []
        for elements in (TWELVE[:3], TWELVE):
            frames = mixtures(500 // divisor, elements)
            given = {"representation": preset, "n_representatives": 1000 // divisor}
            model = AtomisticModel("energy", **given, seed=SEED)
            start = time.process_time()
            model.fit(frames)
            seconds.append(time.process_time() - start)
            features = model.fitted.representation.n_features
            rows.append([preset, len(elements), features, *[f"{s:.1f}" for s in seconds[-1:]]])
        rows[-1].append(f"{seconds[1] / seconds[0]:.1f}")
        rows[-2].append("1")
    return {
        "title": f"Elements: time of training, {500 // divisor} cells, M = {1000 // divisor}",
        "columns": ["representation", "elements", "features", "processor time, s", "ratio"],
        "rows": rows,
        "notes": ["Cells of one to three elements, of three or of twelve; energies alone."],
    }


def tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Measure one thing after the other; `divisor` makes them small."""
    yield table(problem("alloys of seven metals", alloys, divisor), "inorganic", CHANGES)
    yield table(problem("salts of twelve elements", salts, divisor), "inorganic", CHANGES)
    yield times(divisor)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return list(tables())


if __name__ == "__main__":
    for found in tables(*[int(argument) for argument in sys.argv[1:]]):
        print("\n" + found["title"], found["columns"], *found["rows"], sep="\n", flush=True)
