"""Derivatives by finite differences, to compare with."""

import numpy as np

#: ASE's six components of a stress.
VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))


def gradient(f, atoms, h=1e-4):
    """Gradient of a number by positions, (n, 3)."""
    found = np.empty((len(atoms), 3))
    for index in np.ndindex(found.shape):
        values = []
        for step in (h, -h):
            moved = atoms.copy()
            moved.positions[index] += step
            values.append(f(moved))
        found[index] = (values[0] - values[1]) / (2 * h)
    return found


def strain_derivative(f, atoms, h=1e-5):
    """Derivative of a number by strain, per volume, in ASE's six components."""
    found = []
    for a, b in VOIGT:
        values = []
        for step in (h, -h):
            strain = np.eye(3)
            strain[a, b] += step / 2
            strain[b, a] += step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            values.append(f(moved))
        found.append((values[0] - values[1]) / (2 * h) / atoms.cell.volume)
    return np.array(found)


def numerical_forces(atoms, h=1e-4):
    """Forces of the calculator of a structure."""
    return -gradient(atoms.calc.get_potential_energy, atoms, h)


def numerical_stress(atoms, h=1e-5):
    """Stress of the calculator of a structure."""
    return strain_derivative(atoms.calc.get_potential_energy, atoms, h)
