"""Which per-atom measure finds the atoms that make a structure uncertain.

Every bond of some molecules that is not part of a ring is stretched by itself, what hangs on either
end moving along; and in a crystal one atom after the other is moved. A measure has found the place
if it is largest at one of the two atoms of the bond, or of the bond that a moved atom makes too
short.

QUALMS_3BPA names the extended XYZ file of 3BPA, as in `benchmarks.bench_forces`; without it, there
are models of QM9 and of alloys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.data import covalent_radii

from benchmarks.bench_forces import three_bpa
from qualms import AtomisticModel
from qualms.data import qm9

#: By how much bonds are stretched, or squeezed.
FACTORS = (0.85, 1.2, 1.35)
#: How far an atom of a crystal is moved, Å.
SHIFT = 0.5
MEASURES = ("novelty", "σ of contributions", "σ of forces")

#: A structure, and the atoms that are to be found.
Case = tuple[Atoms, set[int]]


# --- what is to be found ---


def side(bonded: Any, i: int, j: int) -> list[int]:
    """Return the atoms that hang on j if its bond with i is cut."""
    left, reached, todo = bonded.copy(), {j}, [j]
    left[i, j] = left[j, i] = False
    while todo:
        new = set(np.flatnonzero(left[todo.pop()]).tolist()) - reached
        reached |= new
        todo += new
    return sorted(reached)


def stretched_bonds(atoms: Atoms, factor: float) -> Iterator[Case]:
    """Yield a molecule with one bond stretched, for each bond that is not part of a ring."""
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances()
    bonded = (distances < 1.25 * (radii[:, None] + radii)) & (distances > 0)
    for i, j in np.argwhere(np.triu(bonded)).tolist():
        moved = side(bonded, i, j)
        if i not in moved:
            new = atoms.copy()
            new.positions[moved] += (factor - 1) * (atoms.positions[j] - atoms.positions[i])
            yield new, {i, j}


def moved_atoms(atoms: Atoms, rng: np.random.Generator) -> Iterator[Case]:
    """Yield a crystal with one atom moved in a random direction, for each of its atoms."""
    for i in range(len(atoms)):
        new, direction = atoms.copy(), rng.normal(size=3)
        new.positions[i] += SHIFT * direction / np.linalg.norm(direction)
        yield new, set(np.argsort(new.get_distances(i, range(len(new)), mic=True))[:2].tolist())


def alloys(n: int) -> list[Atoms]:
    """Return small cells of Cu and Al with energies and forces by EMT."""
    rng, frames = np.random.default_rng(0), []
    for i in range(n):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[: 1 + i % 2] = "Al"
        atoms.set_cell(atoms.cell.array * rng.normal(1, 0.02), scale_atoms=True)
        atoms.rattle(0.08, seed=i)
        atoms.calc = EMT()
        atoms.info["REF_energy"] = atoms.get_potential_energy()
        atoms.arrays["REF_forces"] = atoms.get_forces()
        atoms.calc = None
        frames.append(atoms)
    return frames


# --- who finds it ---


def measures(model: AtomisticModel, frames: Sequence[Atoms]) -> dict[str, list[Any]]:
    """Return the measures of each atom."""
    has_forces = model.fitted.settings.has_forces
    predicted = model.predict(frames, atoms=True, forces=has_forces)
    of_atoms = {
        "novelty": predicted.atom_novelty,
        "σ of contributions": [contributions.std for contributions in predicted.atoms],
    }
    return of_atoms | ({"σ of forces": predicted.force_std} if has_forces else {})


def row(name: str, what: str, model: AtomisticModel, cases: Sequence[Case]) -> list[Any]:
    """Return the share of the cases that each measure finds."""
    found = measures(model, [atoms for atoms, _ in cases])
    cells = [name, what, len(cases)]
    for measure in MEASURES:
        if measure not in found:
            cells.append("–")
            continue
        hits = [int(v.argmax()) in at for v, (_, at) in zip(found[measure], cases, strict=True)]
        cells.append(f"{100 * np.mean(hits):.0f} %")
    return cells


def rows() -> Iterator[list[Any]]:
    """Train one model after the other and look for what was changed."""

    def bonds(name: str, model: AtomisticModel, frames: Sequence[Atoms]) -> Iterator[list[Any]]:
        for factor in FACTORS:
            cases = [case for atoms in frames for case in stretched_bonds(atoms, factor)]
            yield row(name, f"a bond × {factor:g}", model, cases)

    molecules = qm9(n=1320)
    smooth = {"engine": "featomic", "smoothing": 0.5}
    for n, settings in ((300, {}), (1000, {}), (300, {"representation": smooth})):
        model = AtomisticModel("atomization_energy", n_representatives=n, **settings)
        engine = "featomic" if settings else "dscribe"
        model.fit(molecules[:n])
        yield from bonds(f"energies of {n} molecules of QM9, {engine}", model, molecules[1300:])
    problem = three_bpa(1)
    if problem is not None:
        soap: dict[str, Any] = {"cutoff": 5.0, **smooth}
        for n, forces in ((200, None), (40, "forces")):
            model = AtomisticModel(
                "energy", forces=forces, representation=soap, n_representatives=300
            )
            model.fit(problem.train[:n])
            name = f"{'energies' if forces is None else 'energies and forces'} of {n} 3BPA at 300 K"
            yield from bonds(name, model, problem.tests["300 K"][:4])
    model = AtomisticModel(
        "energy", forces="forces", representation={"cutoff": 4.0}, n_representatives=100
    )
    model.fit(alloys(40))
    crystal = bulk("Cu", cubic=True) * (3, 3, 3)
    crystal.symbols[::4] = "Al"
    crystal.rattle(0.08, seed=1)
    cases = list(moved_atoms(crystal, np.random.default_rng(1)))
    yield row("energies and forces of 40 alloys", f"an atom moved by {SHIFT} Å", model, cases)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return [
        {
            "title": "Which atoms make a structure uncertain",
            "columns": ["model of", "changed", "cases", *MEASURES],
            "rows": list(rows()),
            "notes": [
                "Share of the cases in which a measure is largest at one of the two atoms of the "
                "bond, or at the atom that was moved or the one that is now next to it. All "
                "structures are new to the models."
            ],
        }
    ]


if __name__ == "__main__":
    for line in rows():
        print(*line, sep=" | ", flush=True)
