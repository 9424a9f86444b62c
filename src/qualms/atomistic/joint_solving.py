"""Energies and their derivatives as one least-squares problem, with a noise for each kind.

Rows of energies come first, and those of forces and virials follow. What an energy of the mean
composition is belongs to the rows of energies alone: a constant has no derivative. Members see the
energy and the forces of a structure together, or neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qualms.atomistic.force_labels import ForceLabels
from qualms.atomistic.settings import Settings
from qualms.core.committee import FullModel, Members
from qualms.core.joint_noise import JointNoise, select_joint_noise, weighted_gram
from qualms.core.members import solve_members
from qualms.core.projected_process import fit_projected_process
from qualms.core.typing import Float64Array, FloatArray, IntArray


@dataclass(frozen=True)
class JointModel:
    """The full model of energies and forces.

    Attributes
    ----------
    full : FullModel
        Centre and noise are those of the energies, per atom.
    noise : JointNoise
    labels : ForceLabels
    energy_weight : (n,) array
        Of the rows of energies: noise variances are divided by it.
    """

    full: FullModel
    noise: JointNoise
    labels: ForceLabels
    energy_weight: Float64Array

    @property
    def weight(self) -> Float64Array:
        """Weight of each row: (N,)."""
        return _row_weight(self.energy_weight, self.labels, self.noise)

    def counts(self, counts: IntArray) -> IntArray:
        """Return how often each row is in each member, given that for energies (n, N_R)."""
        return np.concatenate([counts, counts[self.labels.structure]])


def fit_joint_model(
    Phi: FloatArray,
    energies: Float64Array,
    labels: ForceLabels,
    groups: IntArray,
    settings: Settings,
) -> JointModel:
    """Choose the noise of each kind and solve the full model.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features of all rows.
    energies : (n,) array
        Per atom, without baseline.
    labels : ForceLabels
    groups : (n,) array of int
        Structures that are left out together when the noise is chosen.
    settings : Settings
    """
    n, energy_weight = len(energies), _energy_weight(labels, settings)
    center = 0.0
    if settings.baseline != "none":
        center = float(np.average(energies, weights=energy_weight))
    y = np.concatenate([energies - center, labels.y])
    variance = _prior_variance(Phi[n:], labels.y)
    noise = select_joint_noise(
        Phi,
        y,
        np.concatenate([np.zeros(n, dtype=np.intp), 1 + labels.is_virial]),
        np.concatenate([groups, groups[labels.structure]]),
        prior=variance,
        weight=np.concatenate([energy_weight, np.ones(len(labels.y))]),
        criterion=settings.noise if isinstance(settings.noise, str) else "loo",
        energies=_known(settings.noise),
        forces=_known(settings.forces_noise),
        virials=_known(settings.stress_noise),
    )
    scale = np.sqrt(variance)
    weight = _row_weight(energy_weight, labels, noise)
    gram = weighted_gram(Phi, weight)
    process = fit_projected_process(
        Phi, y / scale, noise.energies / variance, sample_weight=weight, gram=gram
    )
    full = FullModel(process, np.array([center]), np.array([scale]), centered=False)
    return JointModel(full, noise, labels, energy_weight)


def _known(noise: str | float) -> float | None:
    """Return a variance that is given, None for the name of a way to find one."""
    return None if isinstance(noise, str) else noise


def _row_weight(
    energy_weight: Float64Array, labels: ForceLabels, noise: JointNoise
) -> Float64Array:
    """Return the weight of each row: (N,)."""
    others = np.where(labels.is_virial, noise.virial_ratio, noise.ratio)
    return np.concatenate([energy_weight, others])


def _energy_weight(labels: ForceLabels, settings: Settings) -> Float64Array:
    """Return the weights of energies per atom: one, or what noise per structure comes to.

    A noise σ of the energy of n atoms is σ/n per atom; so it has the weight n², in units of that of
    a structure of mean size.
    """
    sizes = np.array([len(forces) for forces in labels.forces], dtype=np.float64)
    if settings.noise_per == "atom":
        return np.ones_like(sizes)
    weight: Float64Array = (sizes / sizes.mean()) ** 2
    return weight


def _prior_variance(Phi: FloatArray, y: Float64Array) -> float:
    """Return the prior variance of the weights that gives forces the variance that they have.

    Eq. (17), Musil et al. 2019, for forces: what energies have in common does not count, and of the
    energies of one molecule that is nearly all.
    """
    squares = sum(
        float(np.sum(np.square(Phi[start : start + 4096], dtype=np.float64)))
        for start in range(0, len(Phi), 4096)
    )
    return float(np.sum(y**2)) / squares if squares > 0 and np.any(y) else 1.0


def fit_joint_members(
    joint: JointModel,
    Phi: FloatArray,
    energies: Float64Array,
    counts: IntArray,
    *,
    centered: bool,
) -> Members:
    """Solve all members, with the noises of the full model.

    Parameters
    ----------
    joint : JointModel
    Phi : (N, r) array
    energies : (n, N_R) array
        Per atom, without the baseline of each member.
    counts : (n, N_R) array of int
        How often each structure is in each member.
    centered : bool
        Whether the mean of its energies belongs to a member.
    """
    means = np.zeros(counts.shape[1])
    if centered:
        mine = counts * joint.energy_weight[:, None]
        means = np.sum(energies * mine, axis=0) / mine.sum(axis=0)
    others = np.repeat(joint.labels.y[:, None], len(means), axis=1)
    scale = joint.full.scale[0]
    solution = solve_members(
        Phi,
        np.concatenate([energies - means, others])[:, None, :] / scale,
        joint.counts(counts),
        joint.full.process,
        sample_weight=joint.weight,
    )
    return Members(solution.weights * scale, means[None, :], solution)
