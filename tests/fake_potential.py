"""A committee of pair potentials with exact derivatives, in the place of a trained model."""

import numpy as np
from ase.neighborlist import neighbor_list

from qualms import Prediction
from qualms.atomistic.predictions import Parts, StructurePrediction
from qualms.calibration.methods import build_calibration

CUTOFF = 3.0
#: Energies and forces are calibrated apart, and differently.
ENERGY_FACTOR, FORCES_FACTOR = 2.0, 3.0


class PairCommittee:
    """Morse potentials of several depths, widths and bond lengths, smoothly cut off."""

    def __init__(self, n_members=6, ensemble_std=0.05, seed=0):
        rng = np.random.default_rng(seed)
        self.n_members = n_members
        self.depth, self.stiffness, self.length = (
            mean * (1 + ensemble_std * rng.normal(size=n_members)) for mean in (1.0, 3.0, 1.2)
        )
        self.calls = []

    def predict(self, frames, *, forces=False, stress=False):
        self.calls.append("stress" if stress else "forces" if forces else "energy")
        energy, of_atoms, stresses = self._members(frames)
        parts = Parts(
            list(frames),
            forces=self._calibrated(of_atoms, FORCES_FACTOR) if forces else None,
            stress=self._calibrated(stresses, FORCES_FACTOR) if stress else None,
        )
        return StructurePrediction(self._calibrated(energy, ENERGY_FACTOR), parts)

    def _calibrated(self, members, factor):
        return Prediction(members).calibrated(build_calibration("linear", {"alpha": factor}))

    def _members(self, frames):
        parts = [self._of(atoms) for atoms in frames]
        energy, forces, stress = zip(*parts, strict=True)
        return np.stack(energy), np.concatenate(forces), np.stack(stress)

    def _of(self, atoms):
        i, j, D, r = neighbor_list("ijDd", atoms, CUTOFF)
        e, slope = self.pair(r[:, None])
        # Every pair is found twice; atoms of different elements bind differently.
        strength = 0.5 * (1 + 0.05 * (atoms.numbers[i] + atoms.numbers[j]))[:, None]
        pull = (strength * slope)[:, None, :] * (D / r[:, None])[:, :, None]
        forces = np.zeros((len(atoms), 3, self.n_members))
        np.add.at(forces, i, 2 * pull)
        volume = atoms.cell.volume if atoms.cell.rank == 3 else 1.0
        virial = np.einsum("pxm,py->xym", pull, D) / volume
        voigt = [virial[a, b] for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))]
        return (strength * e).sum(axis=0), forces, np.stack(voigt)

    def pair(self, r):
        """Energy and slope for each pair and member."""
        x = np.exp(-self.stiffness * (r - self.length))
        morse, morse_slope = (
            self.depth * (x**2 - 2 * x),
            2 * self.depth * self.stiffness * (x - x**2),
        )
        u = np.clip(r / CUTOFF, 0, 1)
        cut, cut_slope = (1 - u**2) ** 3, -6 * u / CUTOFF * (1 - u**2) ** 2
        return morse * cut, morse_slope * cut + morse * cut_slope
