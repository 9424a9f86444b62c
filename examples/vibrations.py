"""Bond length, angle and vibrational frequencies of a molecule, with uncertainties.

Geometries and frequencies follow from a potential by a calculation: a relaxation and a Hessian.
`Calculator.map` repeats the calculation with each ensemble member. Their standard deviation is the
uncertainty of the result. Geometries and frequencies depend on forces, so the members are
calibrated for forces, the default for models that were trained on forces.

The reference is an analytical force field of water. The model is trained on energies and forces of
a few distorted molecules.

Run with `python examples/vibrations.py [FIGURE]`.
"""

from __future__ import annotations

import sys

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import all_changes
from ase.optimize import BFGS

from qualms import AtomisticModel, Prediction
from qualms.ase import Calculator

REPRESENTATION = {"engine": "featomic", "cutoff": 3.0, "smoothing": 0.5, "n_radial": 4, "l_max": 3}
#: Step of finite differences, Å.
STEP = 0.01
#: Computed quantities, and the number of digits to print.
NAMES = ("bond length, Å", "angle, °", "bending, 1/cm", "stretching, 1/cm", "stretching, 1/cm ")
DIGITS = (4, 2, 1, 1, 1)


def main() -> None:
    """Train, compute the quantities with all members, and compare with the reference."""
    reference, found = run()
    print(f"{'':20}{'predicted':>18}{'reference':>10}{'error/σ':>9}")
    for i, name in enumerate(NAMES):
        mean, std = found.mean[i], found.std[i]
        digits = DIGITS[i]
        print(
            f"{name:20}{mean:10.{digits}f} ± {std:.{digits}f}{reference[i]:10.{digits}f}"
            f"{(mean - reference[i]) / std:9.1f}"
        )
    if len(sys.argv) > 1:
        draw(reference, found, sys.argv[1])


def run(n_train: int = 16, n_members: int = 16, seed: int = 0) -> tuple[np.ndarray, Prediction]:
    """Return the reference values of `NAMES`, and their prediction."""
    model = AtomisticModel(
        "energy",
        forces="forces",
        representation=REPRESENTATION,
        baseline="mean",  # all structures have one composition
        n_representatives=3 * n_train,  # all environments
        n_members=n_members,
        calibration="student",  # 16 energies are too few for several sources of variance
        units="eV",
        seed=seed,
        threads=1,
    )
    found = Calculator(model.fit(distorted(n_train, seed))).map(observables)
    return observables(Reference()), found


def observables(calc: AseCalculator) -> np.ndarray:
    """Relax water, and return its bond length, angle and three frequencies."""
    atoms = water()
    atoms.calc = calc
    BFGS(atoms, logfile=None).run(fmax=1e-3, steps=100)
    lengths = (atoms.get_distance(0, 1) + atoms.get_distance(0, 2)) / 2
    return np.array([lengths, atoms.get_angle(1, 0, 2), *frequencies(atoms)])


def frequencies(atoms: Atoms) -> np.ndarray:
    """Return the frequencies of the three vibrations in 1/cm, from forces of displaced atoms."""
    hessian = np.empty((9, 9))
    for k in range(9):
        forces = []
        for step in (STEP, -STEP):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions.ravel()[k] += step
            forces.append(moved.get_forces().ravel())
        hessian[k] = -(forces[0] - forces[1]) / (2 * STEP)
    weights = np.repeat(atoms.get_masses() ** -0.5, 3)
    squares = np.linalg.eigvalsh(weights[:, None] * (hessian + hessian.T) / 2 * weights)
    # Six of the nine are translations and rotations; a member may have no minimum.
    omega = np.sign(squares[-3:]) * np.sqrt(np.abs(squares[-3:]))
    return omega * units._hbar * np.sqrt(units._e / units._amu) * 1e10 / units._e / units.invcm


def water() -> Atoms:
    """Return a molecule near its minimum."""
    return Atoms("OH2", [[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])


def distorted(n: int, seed: int) -> list[Atoms]:
    """Return distorted molecules with energies and forces."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = water()
        atoms.positions += 0.06 * rng.normal(size=(3, 3))
        atoms.calc = Reference()
        atoms.get_forces()  # energy and forces are now results of the calculator
        frames.append(atoms)
    return frames


def energy(positions: np.ndarray) -> float:
    """Return the energy of water in eV: two Morse potentials and a spring for the angle."""
    first, second = positions[1] - positions[0], positions[2] - positions[0]
    lengths = np.array([np.linalg.norm(first), np.linalg.norm(second)])
    angle = np.arccos(first @ second / lengths.prod())
    stretch = 5.2 * (1 - np.exp(-2.3 * (lengths - 0.958))) ** 2
    return float(stretch.sum() + 0.5 * 4.5 * (angle - np.radians(104.5)) ** 2 - 10.0)


class Reference(AseCalculator):
    """The force field as a calculator."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: object = ("energy",),
        system_changes: object = all_changes,
    ) -> None:
        """Compute the energy, and forces by finite differences."""
        super().calculate(atoms, properties, system_changes)
        x, forces = self.atoms.positions, np.empty((3, 3))
        for index in np.ndindex(3, 3):
            step = np.zeros((3, 3))
            step[index] = 1e-4
            forces[index] = -(energy(x + step) - energy(x - step)) / 2e-4
        self.results = {"energy": energy(x), "forces": forces}


def draw(reference: np.ndarray, found: Prediction, path: str) -> None:
    """Draw the members, the prediction with its standard deviation, and the reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, len(NAMES))):
        members = found.members[i]
        axes.plot(np.zeros(len(members)), members, "o", ms=3, color="0.7", label="members")
        axes.errorbar(0.3, found.mean[i], found.std[i], fmt="o", capsize=4, label="predicted")
        axes.axhline(reference[i], color="k", lw=1, label="reference")
        axes.set_title(NAMES[i].strip(), fontsize=9)
        axes.set(xticks=[], xlim=(-0.4, 0.7))
        axes.tick_params(labelsize=8)
        axes.ticklabel_format(axis="y", useOffset=False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
