"""Coverage of uncertainties where structures are unlike those of the training set.

Each training set has a test of the same distribution, and others of higher temperature, larger
molecules, other chemistry, later times or larger strain. QUALMS_DATA names the folder with the
data: ``forces`` (3BPA, revised MD17), ``xtb`` (GFN2-xTB: ethanolamine, random molecules), ``qm9``
and ``csd``; sets whose files are not there are left out, and named. Energies and forces of metals
are those of EMT; those along bonds that are stretched are by GFN2-xTB, with tblite.

Run this file alone, with names of sets, for a table on the terminal.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import CalculationFailed
from ase.calculators.emt import EMT
from ase.neighborlist import natural_cutoffs, neighbor_list
from ase.units import kcal, mol
from scipy.sparse.csgraph import connected_components

from benchmarks.bench_alloys import METALS
from qualms import AtomisticModel, QualmsWarning
from qualms.atomistic.structures import read_frames
from qualms.metrics import gaussian_log_density

SEED = 0


@dataclass(frozen=True)
class Problem:
    """A training set, and tests by name: the first is of the same distribution."""

    train: Sequence[Atoms]
    tests: Mapping[str, Sequence[Atoms]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def folder() -> Path:
    """Return the folder with the data."""
    return Path(os.environ.get("QUALMS_DATA", "data"))


def labelled(frames: Sequence[Atoms]) -> list[Atoms]:
    """Return structures whose labels are not those of a calculator."""
    found = []
    for atoms in frames:
        copy = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        copy.info["energy"] = float(atoms.get_potential_energy())
        copy.arrays["forces"] = np.array(atoms.get_forces())
        found.append(copy)
    return found


def read(name: str) -> list[Atoms]:
    """Return the structures of a file of the data."""
    return labelled(read_frames(folder() / name))


def split(frames: Sequence[Atoms], *sizes: int) -> list[list[Atoms]]:
    """Return random structures, of these numbers."""
    order = np.random.default_rng(SEED).permutation(len(frames))
    parts = np.split(order, np.cumsum(sizes))
    return [[frames[i] for i in part] for part in parts[: len(sizes)]]


# --- temperature ---


def three_bpa(n: int = 100) -> Problem:
    """Return 3BPA, trained at 300 K; a mixture of 300, 600 and 1200 K, by energy."""
    cold, mixed = read("forces/3bpa_300K.xyz.gz"), read("forces/3bpa_mixedT.xyz.gz")
    train, test = split(cold, n, 150)
    order = np.argsort([atoms.info["energy"] for atoms in mixed])
    warm, hot = ([mixed[i] for i in np.sort(some)[::2]] for some in (order[167:333], order[333:]))
    return Problem(train, {"300 K": test, "600 K": warm, "1200 K": hot})


def azobenzene(n: int = 100) -> Problem:
    """Return azobenzene, trained on the lower half of the energies."""
    with np.load(folder() / "forces/rmd17_azobenzene_train_01.npz") as data:
        unit = kcal / mol
        frames = [
            Atoms(data["nuclear_charges"], x, info={"energy": float(unit * e)})
            for x, e in zip(data["coords"], data["energies"], strict=True)
        ]
        for atoms, f in zip(frames, data["forces"], strict=True):
            atoms.arrays["forces"] = unit * f
    energies = np.array([atoms.info["energy"] for atoms in frames])
    order = np.argsort(energies)
    train, test = split([frames[i] for i in order[:500]], n, 150)
    return Problem(train, {"lower half": test, "highest tenth": [frames[i] for i in order[900:]]})


# --- trajectory ---


def ethanolamine(n: int = 200) -> Problem:
    """Return ethanolamine, trained on the first frames of a trajectory at 300 K."""
    cold = read("xtb/ethanolamine_300K.xyz.gz")
    hot = read("xtb/ethanolamine_600K.xyz.gz")
    train = cold[:n]
    return Problem(
        train, {"later, gauche": cold[n:350:2], "later, anti": cold[370::2], "600 K": hot[::4]}
    )


# --- size and chemistry ---


def molecules_by_size(n: int = 300) -> Problem:
    """Return random molecules, trained on those of at most ten atoms."""
    frames = read("xtb/molecules_train.xyz.gz") + read("xtb/molecules_test.xyz.gz")
    sizes = np.array([len(atoms) for atoms in frames])
    small = [atoms for atoms, m in zip(frames, sizes, strict=True) if m <= 10]
    train, test = split(small, n, 150)
    larger = {
        f"{low} to {high} atoms": split(
            [a for a, m in zip(frames, sizes, strict=True) if low <= m <= high], 150
        )[0]
        for low, high in ((11, 12), (13, 20))
    }
    return Problem(train, {"≤ 10 atoms": test, **larger})


def qm9_molecules() -> list[Atoms]:
    """Return molecules of QM9, with energies of atomisation (eV)."""
    with np.load(folder() / "qm9/qm9_30k_seed20190214.npz") as data:
        numbers, offsets = data["numbers"], data["offsets"]
        positions, U0 = data["positions"], data["U0"]
        elements, references = data["atomref_numbers"], data["atomref_U0"]
    of_element = np.zeros(100)
    of_element[elements] = references
    frames = []
    for i in range(len(U0)):
        z = numbers[offsets[i] : offsets[i + 1]]
        atoms = Atoms(z, positions[offsets[i] : offsets[i + 1]].astype(float))
        atoms.info["energy"] = 27.2113961 * float(U0[i] - of_element[z].sum())
        frames.append(atoms)
    return frames


def qm9_by_size(n: int = 400) -> Problem:
    """Return QM9, trained on up to seven heavy atoms."""
    frames = qm9_molecules()
    heavy = np.array([int(np.sum(atoms.numbers > 1)) for atoms in frames])
    small = [atoms for atoms, m in zip(frames, heavy, strict=True) if m <= 7]
    train, test = split(small, n, 150)
    larger = {
        f"{k} heavy atoms": split([a for a, m in zip(frames, heavy, strict=True) if m == k], 200)[0]
        for k in (8, 9)
    }
    return Problem(train, {"≤ 7 heavy atoms": test, **larger})


def shortest(atoms: Atoms, first: int, second: int) -> float:
    """Return the shortest distance of two atoms of some elements."""
    a, b = atoms.positions[atoms.numbers == first], atoms.positions[atoms.numbers == second]
    return float(np.linalg.norm(a[:, None] - b, axis=2).min(initial=np.inf))


def qm9_by_group(n: int = 400) -> Problem:
    """Return QM9, trained without C=O and without C≡N."""
    frames = qm9_molecules()[:8000]
    carbonyl = np.array([shortest(atoms, 6, 8) < 1.26 for atoms in frames])
    nitrile = np.array([shortest(atoms, 6, 7) < 1.19 for atoms in frames])

    def some(chosen: Any, *sizes: int) -> list[list[Atoms]]:
        return split([frames[i] for i in np.flatnonzero(chosen)], *sizes)

    train, test = some(~carbonyl & ~nitrile, n, 200)
    with_carbonyl, with_nitrile = some(carbonyl & ~nitrile, 200)[0], some(nitrile, 200)[0]
    return Problem(train, {"without": test, "with C=O": with_carbonyl, "with C≡N": with_nitrile})


def crystals(n: int = 60) -> Problem:
    """Return ¹H shieldings of rattled crystals, trained on monoclinic ones."""
    frames = read_frames(folder() / "csd/CSD-1000R_500.extxyz.gz")
    right = np.array([np.sum(np.abs(a.cell.angles() - 90) < 1e-3) for a in frames])

    def some(k: int, *sizes: int) -> list[list[Atoms]]:
        return split([frames[i] for i in np.flatnonzero(right == k)], *sizes)

    train, test = some(2, n, 30)
    tests = {"monoclinic": test, "triclinic": some(0, 30)[0], "orthorhombic": some(3, 30)[0]}
    settings = {"target": "CS_total", "kind": "atomic", "species": ("H",), "units": "ppm"}
    return Problem(train, tests, settings)


# --- strain ---


def metal(rng: np.random.Generator, strain: float, displacement: float, lattice: str) -> Atoms:
    """Return an alloy of copper, silver and gold with energy and forces by EMT."""
    constant = {"fcc": 3.9, "bcc": 3.1, "hcp": 2.75}[lattice]
    atoms = bulk("Cu", lattice, a=constant, **({} if lattice == "hcp" else {"cubic": True}))
    atoms = atoms * {"fcc": (2, 2, 1), "bcc": (2, 2, 2), "hcp": (2, 2, 2)}[lattice]
    atoms.symbols = rng.choice(["Cu", "Ag", "Au"], len(atoms)).tolist()
    scale = np.mean([METALS[s] for s in atoms.get_chemical_symbols()]) / 3.9
    e = rng.uniform(-strain, strain, (3, 3))
    cell = scale * atoms.cell.array @ (np.eye(3) + (e + e.T) / 2)
    atoms.set_cell(cell, scale_atoms=True)
    atoms.positions += rng.normal(0, displacement, atoms.positions.shape)
    atoms.calc = EMT()
    return labelled([atoms])[0]


def alloys(n: int = 30) -> Problem:
    """Return alloys, trained on small strains and displacements."""
    rng = np.random.default_rng(SEED)

    def some(k: int, strain: float, displacement: float, lattice: str = "fcc") -> list[Atoms]:
        return [metal(rng, strain, displacement, lattice) for _ in range(k)]

    return Problem(
        some(n, 0.02, 0.08),
        {
            "strain 2 %, 0.08 Å": some(80, 0.02, 0.08),
            "strain 6 %": some(80, 0.06, 0.08),
            "displaced 0.2 Å": some(80, 0.02, 0.2),
            "bcc": some(60, 0.02, 0.08, "bcc"),
            "hcp": some(60, 0.02, 0.08, "hcp"),
        },
    )


# --- bonds ---


def fragment(atoms: Atoms, bonds: Any, i: int, j: int) -> Any:
    """Return the atoms on the side of j of a bond; none if it belongs to a ring."""
    matrix = np.zeros((len(atoms), len(atoms)))
    matrix[tuple(bonds)] = 1.0
    matrix[i, j] = matrix[j, i] = 0.0
    sides = connected_components(matrix, directed=False)[1]
    return np.flatnonzero(sides == sides[j]) if sides[i] != sides[j] else np.empty(0, dtype=int)


def bond_scans(frames: Sequence[Atoms], n: int) -> list[list[Atoms]]:
    """Return bonds that are stretched up to 1.8 times their lengths, with energies by GFN2-xTB."""
    from tblite.ase import TBLite

    rng, found = np.random.default_rng(SEED), []
    calculator = TBLite(method="GFN2-xTB", verbosity=0)
    for index in rng.permutation(len(frames)).tolist():
        atoms = frames[index]
        bonds = np.array(neighbor_list("ij", atoms, natural_cutoffs(atoms, mult=1.1)))
        i, j = bonds[:, rng.integers(bonds.shape[1])].tolist()
        moved = fragment(atoms, bonds, i, j)
        if len(moved) == 0 or len(found) == n:
            continue
        scan = []
        for stretch in np.linspace(1.0, 1.8, 9):
            image = Atoms(atoms.numbers, atoms.positions)
            image.positions[moved] += (stretch - 1) * (atoms.positions[j] - atoms.positions[i])
            image.calc = calculator
            try:
                scan += labelled([image])
            except CalculationFailed:  # the electrons do not converge
                break
        if len(scan) >= 5:
            found.append(scan)
    return found


def falls(errors: Any, stds: Any) -> bool:
    """Return whether σ falls by more than 10 % below its maximum while the error grows."""
    largest_error, largest_std = np.maximum.accumulate([np.abs(errors), stds], axis=1)
    grows = np.abs(errors[1:]) > largest_error[:-1]
    return bool(np.any(grows & (stds[1:] < 0.9 * largest_std[:-1])))


# --- results ---


@dataclass(frozen=True)
class TrainingSet:
    """How the structures are obtained, and what is learned."""

    problem: Callable[[], Problem]
    forces: bool = False


#: Training sets by name.
SETS = {
    "3BPA": TrainingSet(three_bpa),
    "3BPA, forces": TrainingSet(three_bpa, forces=True),
    "azobenzene": TrainingSet(lambda: azobenzene(200)),
    "azobenzene, forces": TrainingSet(lambda: azobenzene(30), forces=True),
    "ethanolamine": TrainingSet(ethanolamine),
    "ethanolamine, forces": TrainingSet(lambda: ethanolamine(100), forces=True),
    "molecules": TrainingSet(molecules_by_size),
    "molecules, forces": TrainingSet(lambda: molecules_by_size(60), forces=True),
    "QM9 by size": TrainingSet(qm9_by_size),
    "QM9 by group": TrainingSet(qm9_by_group),
    "crystals": TrainingSet(crystals),
    "alloys": TrainingSet(lambda: alloys(150)),
    "alloys, forces": TrainingSet(alloys, forces=True),
}
#: Sets of which bonds are stretched as well.
SCANNED = ("molecules", "molecules, forces")
N_SCANS = 200


def fit(problem: Problem, *, forces: bool) -> AtomisticModel:
    """Train a model with the settings of the set, and others by default."""
    settings = {"target": "energy", "units": "eV", **problem.settings}
    if forces:
        settings["forces"] = "forces"
    return AtomisticModel(**settings, threads=1).fit(problem.train)


def coverage(z: Any, std: Any) -> str:
    """Return the shares of errors within σ and 1.96 σ, in percent."""
    inside = (100 * np.mean(np.abs(z) <= k * std) for k in (1.0, 1.96))
    return " / ".join(f"{share:.0f}" for share in inside)


def assess(model: AtomisticModel, frames: Sequence[Atoms], *, forces: bool) -> list[Any]:
    """Return numbers of structures, errors, coverages and shares of extrapolations."""
    predicted = model.predict(frames, forces=forces)
    target, per_atom = model.settings.target, np.ones(len(predicted.energy))
    structure = np.arange(len(frames))
    if model.settings.kind == "atomic":
        places = model.target_atoms(frames)
        y = np.concatenate([a.arrays[target][i] for a, i in zip(frames, places, strict=True)])
        structure = np.repeat(structure, [len(i) for i in places])
    else:
        y = np.array([atoms.info[target] for atoms in frames])
        per_atom = np.array([len(atoms) for atoms in frames])
    z = (predicted.energy.mean - y) / per_atom
    std = predicted.energy.std / per_atom
    likelihood = np.mean(gaussian_log_density(z, std))
    rmse = np.sqrt(np.mean(z**2))
    row = [len(frames), f"{1e3 * rmse:.3g}", f"{rmse / np.sqrt(np.mean(std**2)):.2f}"]
    row += [coverage(z, std), f"{likelihood:.2f}", "–"]
    if forces:
        of_forces = predicted.forces.mean - np.concatenate([a.arrays["forces"] for a in frames])
        row[-1] = coverage(of_forces, predicted.forces.std)
    errors = np.sqrt(np.bincount(structure, z**2) / np.bincount(structure))
    large = errors > 3 * model.record.quantities["energy"].rmse
    flagged = (predicted.extrapolates[some] for some in (slice(None), large, ~large))
    shares = (f"{100 * np.mean(of):.0f}" if len(of) else "–" for of in flagged)
    return [*row, f"{100 * np.mean(large):.0f}", " / ".join(shares)]


def scan_bonds(model: AtomisticModel, bonds: Sequence[Sequence[Atoms]]) -> list[Any]:
    """Return how many scans have a σ that falls while the error grows, coverages, and flags."""
    prediction = model.predict([atoms for scan in bonds for atoms in scan])
    predicted, flags = prediction.energy, prediction.extrapolates
    y = np.array([atoms.info["energy"] for scan in bonds for atoms in scan])
    z, edges = predicted.mean - y, np.cumsum([len(scan) for scan in bonds])[:-1]
    parts = zip(np.split(z, edges), np.split(predicted.std, edges), strict=True)
    steady = 100 * np.mean([not falls(*part) for part in parts])
    last = np.append(edges, len(z)) - 1
    end = coverage(z[last], predicted.std[last])
    usual = ~flags[np.append(0, edges)]  # such as molecules that are not larger
    flagged = f"{100 * np.mean(flags[last][usual]):.0f} % of {np.count_nonzero(usual)}"
    return [len(bonds), f"{steady:.0f} %", coverage(z, predicted.std), end, flagged]


def tables(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the table of coverages, and that of bonds."""
    rows, of_bonds, missing, bonds = [], [], [], None
    for name in names:
        of = SETS[name]
        try:
            problem = of.problem()
        except FileNotFoundError as error:
            missing.append(f"{name} is left out: there is no {error.filename}.")
            continue
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QualmsWarning)
            model = fit(problem, forces=of.forces)
            for test, frames in problem.tests.items():
                rows.append([name, test, *assess(model, frames, forces=of.forces)])
                print(*rows[-1], sep=" | ", flush=True)
            if name in SCANNED:
                try:
                    bonds = bonds or bond_scans(read("xtb/molecules_test.xyz.gz"), N_SCANS)
                    of_bonds.append([name, *scan_bonds(model, bonds)])
                    print(*of_bonds[-1], sep=" | ", flush=True)
                except ImportError as error:
                    missing.append(f"Bonds are left out: {error}.")
        print(f"{name}: {time.process_time() - start:.0f} s of one core", flush=True)
    columns = ["training set", "test", "structures", "RMSE (meV/atom, 10⁻³ ppm)", "RMSE/σ"]
    columns += ["within σ / 1.96 σ (%)", "log likelihood", "forces", "large errors (%)"]
    columns += ["flagged (%): all / large errors / others"]
    notes = [
        "The first test of a training set is of the same distribution (of ethanolamine, later "
        "frames of the same conformer). Energies are per atom, and forces are components. "
        "Large errors are structures whose error (of energies per atom) exceeds three times the "
        "out-of-bag RMSE. Flagged are extrapolations."
    ]
    if rows:
        title = "Coverage where structures are unlike those of the training set"
        yield {"title": title, "columns": columns, "rows": rows, "notes": [*notes, *missing]}
    if of_bonds:
        columns = ["training set", "bonds", "σ does not fall", "within σ / 1.96 σ (%)"]
        columns += ["at 1.8 times the length", "flagged there"]
        notes = [
            "Bonds of other random molecules are stretched to 1.8 times their lengths. σ falls "
            "if it is more than 10 % below its maximum at shorter lengths where the error is "
            "larger than at all of these. Flagged: of those that are not flagged before they are "
            "stretched, since most of these molecules are larger than those of the training set."
        ]
        title = "Bonds that are stretched"
        yield {"title": title, "columns": columns, "rows": of_bonds, "notes": notes}


def run() -> list[dict[str, Any]]:
    """Measure all sets."""
    if not folder().is_dir():
        print(f"There is no {folder()}: name the folder with the data by QUALMS_DATA.")
        return []
    return [*tables([*SETS])]


if __name__ == "__main__":
    for table in tables(sys.argv[1:] or [*SETS]):
        print("\n" + table["title"], table["columns"], *table["rows"], *table["notes"], sep="\n")
