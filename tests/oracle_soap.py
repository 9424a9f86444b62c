"""The SOAP kernel without a basis: the oracle for the power spectra of both engines.

Musil et al. 2019 expand the density around an atom, contract the coefficients to the power spectrum
of Eq. (14), and multiply power spectra, Eq. (13). If the basis were complete the product would be
an integral over all rotations of one environment (Bartók, Kondor and Csányi, Phys. Rev. B 87,
184115 (2013), with two overlaps):

    k(A, B) = ∫dR [Σ_α ∫dr ρ_α^A(r) ρ_α^B(R⁻¹r)]²

Here the integral is done as it stands: a grid of rotations, and the overlap of every Gaussian with
every other. Nothing is expanded, so nothing is shared with the engines.
"""

import math
from itertools import product

import numpy as np
from ase import Atoms


def environment(atoms, center, cutoff, weight_of=lambda r: 1.0, center_weight=1.0):
    """List (species, position relative to the centre, weight) of all atoms within the cutoff."""
    listed = []
    for z, position in zip(atoms.numbers, atoms.positions, strict=True):
        relative = position - atoms.positions[center]
        r = math.sqrt(relative @ relative)
        if r < cutoff:
            listed.append((int(z), relative, center_weight if r == 0 else weight_of(r)))
    return listed


def radial_scaling(r, scale, exponent, rate):
    """The weight u(r) of Willatt et al. (2018)."""
    return rate / (rate + (r / scale) ** exponent)


def shifted_cosine(r, cutoff, width):
    """f_cut of Eq. (16): 1, then half a cosine down to 0 at the cutoff."""
    if r < cutoff - width:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (r - cutoff + width) / width))


def rotations(n):
    """All rotations (N, 3, 3) about z by α, y by β and z by γ, on a grid, and their weights (N,).

    Uniform in α and γ and Gaussian in cos β: exact for products of spherical harmonics of degree
    below n.
    """
    angles = 2 * math.pi * np.arange(n) / n
    cosines, weights = np.polynomial.legendre.leggauss(n // 2 + 1)
    matrices, w = [], []
    for alpha, (cosine, weight), gamma in product(
        angles, zip(cosines, weights, strict=True), angles
    ):
        matrices.append(about_z(alpha) @ about_y(math.acos(cosine)) @ about_z(gamma))
        w.append(weight / (2 * n**2))
    return np.array(matrices), np.array(w)


def about_z(angle):
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def about_y(angle):
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def soap_kernel(A, B, width, grid):
    """k(A, B), up to a factor that all environments share; the grid is that of `rotations`."""
    matrices, weights = grid
    overlap = np.zeros(len(matrices))
    for (z_a, r_a, w_a), (z_b, r_b, w_b) in product(A, B):
        if z_a == z_b:
            # Two Gaussians of width σ at distance d overlap by exp(−d²/4σ²).
            d2 = np.sum((r_a - matrices @ r_b) ** 2, axis=1)
            overlap += w_a * w_b * np.exp(-d2 / (4 * width**2))
    return float(weights @ overlap**2)


def soap_kernel_matrix(environments, width, n_angles=24):
    """All kernels between some environments, not normalised."""
    grid = rotations(n_angles)
    return np.array([[soap_kernel(A, B, width, grid) for B in environments] for A in environments])


def with_images(atoms, reach):
    """A molecule of the atoms and all periodic images that may be within reach, the atoms first."""
    periodic = [k for k in range(3) if atoms.pbc[k]]
    # Enough for the cells of the tests, whose layers are not closer than 2 Å.
    n = math.ceil(reach / 2.0)
    molecule = Atoms(atoms.numbers, atoms.positions)
    for shifts in product(range(-n, n + 1), repeat=len(periodic)):
        if any(shifts):
            moved = atoms.positions + sum(
                s * atoms.cell.array[k] for s, k in zip(shifts, periodic, strict=True)
            )
            near = np.linalg.norm(moved[:, None] - atoms.positions, axis=2).min(axis=1) < reach
            molecule += Atoms(atoms.numbers[near], moved[near])
    return molecule
