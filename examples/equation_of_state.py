"""Lattice constant and bulk modulus of a crystal, with uncertainties.

A model of energies predicts the crystal at several volumes. Errors at neighbouring volumes are
strongly correlated, so each ensemble member has a smooth curve; `Prediction.map` fits the
Birch-Murnaghan equation of state to each of them. A common shift of the curves cancels.

The reference is the EMT potential of copper, which comes with ASE. The model is trained on energies
of distorted cells; the perfect crystal is not in the training set.

Run with `python examples/equation_of_state.py [FIGURE]`.
"""

from __future__ import annotations

import sys

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.eos import EquationOfState

from qualms import AtomisticModel, Prediction

REPRESENTATION = {"engine": "featomic", "cutoff": 4.5, "smoothing": 0.5, "n_radial": 5, "l_max": 2}
#: Lattice constants of the predicted crystals, Å.
LATTICE = np.linspace(3.4, 3.9, 9)
GPA = units.GPa


def main() -> None:
    """Train, fit the equation of state to each member, and compare with the reference."""
    energies, found, reference, reference_energies = run()
    for name, i, unit in (("lattice constant", 0, "Å"), ("bulk modulus", 1, "GPa")):
        digits = 3 if i == 0 else 1
        print(
            f"{name:18}{found.mean[i]:8.{digits}f} ± {found.std[i]:.{digits}f} {unit}"
            f"   (reference: {reference[i]:.{digits}f})"
        )
    difference = energies[4] - energies[3]
    apart = np.hypot(energies.std[3], energies.std[4])
    print(
        f"two neighbouring volumes: ± {1000 * difference.std:.1f} meV, not ± {1000 * apart:.1f} meV"
    )
    if len(sys.argv) > 1:
        draw(energies, found, reference, reference_energies, sys.argv[1])


def run(n_train: int = 30, seed: int = 1) -> tuple[Prediction, Prediction, np.ndarray, np.ndarray]:
    """Return energies per atom at `LATTICE`, (a₀, B), and reference values, in eV, Å and GPa."""
    model = AtomisticModel(
        "energy",
        representation=REPRESENTATION,
        n_representatives=100,
        units="eV",
        seed=seed,
        threads=1,
    )
    model.fit(distorted(n_train, seed))
    crystals = [bulk("Cu", a=a) for a in LATTICE]
    energies = model.predict(crystals)
    references = np.array([emt_energy(atoms) for atoms in crystals])
    return energies, energies.map(equilibrium), equilibrium(references), references


def equilibrium(energies: np.ndarray) -> np.ndarray:
    """Return the lattice constant in Å and the bulk modulus in GPa of a curve of energies."""
    v0, _, modulus = EquationOfState(LATTICE**3 / 4, energies, eos="birchmurnaghan").fit()
    return np.array([(4 * v0) ** (1 / 3), modulus / GPA])


def distorted(n: int, seed: int) -> list[Atoms]:
    """Return cubic cells of random size and shape with displaced atoms, and their energies."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = bulk("Cu", a=rng.uniform(3.35, 3.95), cubic=True)
        strain = np.eye(3) + 0.03 * rng.normal(size=(3, 3))
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        atoms.positions += 0.05 * rng.normal(size=(4, 3))
        atoms.info["energy"] = emt_energy(atoms)
        frames.append(atoms)
    return frames


def emt_energy(atoms: Atoms) -> float:
    """Return the reference energy in eV."""
    copy = atoms.copy()
    copy.calc = EMT()
    return float(copy.get_potential_energy())


def draw(
    energies: Prediction,
    found: Prediction,
    reference: np.ndarray,
    reference_energies: np.ndarray,
    path: str,
) -> None:
    """Draw the curves of all members, and their lattice constants and bulk moduli."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(LATTICE, energies.members, color="0.75", lw=0.7)
    left.errorbar(LATTICE, energies.mean, energies.std, fmt="o", ms=3, capsize=3, label="predicted")
    left.plot(LATTICE, reference_energies, "k.", label="reference")
    left.set(xlabel="lattice constant, Å", ylabel="energy per atom, eV")
    left.legend(frameon=False)
    right.plot(*found.members, "o", color="0.7", ms=4, label="members")
    right.errorbar(
        *found.mean, xerr=found.std[0], yerr=found.std[1], fmt="o", capsize=3, label="predicted"
    )
    right.plot(*reference, "kx", label="reference")
    right.set(xlabel="lattice constant, Å", ylabel="bulk modulus, GPa")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
