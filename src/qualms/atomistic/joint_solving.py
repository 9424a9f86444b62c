"""Energies and their derivatives as one least-squares problem, with a noise for each kind.

Rows of energies come first, and those of forces and virials follow. What an energy of the mean
composition is belongs to the rows of energies alone: a constant has no derivative. Members see the
energy and the forces of a structure together, or neither.

Noises that could be solved with where they were chosen, on four fifths of the structures, may be
lost in the rounding of the Gram matrix of all of them, or of those of a member. All are then raised
alike: their ratios, and with them the Gram matrix, stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from qualms.atomistic.force_labels import ForceLabels
from qualms.atomistic.settings import Settings
from qualms.core.committee import FullModel, Members
from qualms.core.joint_noise import JointNoise, select_joint_noise
from qualms.core.members import solve_members
from qualms.core.projected_process import fit_projected_process, gram_matrix
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import NumericalError, QualmsWarning

#: By how much noise variances are raised at a time, and how often at most.
_RAISE, _ATTEMPTS = 10.0, 8

T = TypeVar("T")


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
    y : (N,) array
        Labels of all rows, energies less the centre.
    """

    full: FullModel
    noise: JointNoise
    labels: ForceLabels
    energy_weight: Float64Array
    y: Float64Array

    @property
    def weight(self) -> Float64Array:
        """Weight of each row: (N,)."""
        return _row_weight(self.energy_weight, self.labels, self.noise)

    def counts(self, counts: IntArray) -> IntArray:
        """Return how often each row is in each member, given that for energies (n, N_R)."""
        return np.concatenate([counts, counts[self.labels.structure]])

    def with_noise(self, noise: JointNoise, Phi: FloatArray) -> JointModel:
        """Return the model of the same rows Phi (N, r) with other noises of the same ratios."""
        if noise == self.noise:
            return self
        scale, gram = self.full.scale, self.full.process.gram
        relative = noise.energies / float(scale[0]) ** 2
        process = fit_projected_process(
            Phi, self.y / scale, relative, sample_weight=self.weight, gram=gram
        )
        return replace(self, full=replace(self.full, process=process), noise=noise)


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
    gram = gram_matrix(Phi, _row_weight(energy_weight, labels, noise))
    scale = np.array([np.sqrt(variance)])

    def solve(noise: JointNoise) -> JointModel:
        weight = _row_weight(energy_weight, labels, noise)
        relative = noise.energies / variance
        process = fit_projected_process(Phi, y / scale, relative, sample_weight=weight, gram=gram)
        full = FullModel(process, np.array([center]), scale, centered=False)
        return JointModel(full, noise, labels, energy_weight, y)

    return _solvable(solve, noise)


def _solvable(solve: Callable[[JointNoise], T], noise: JointNoise) -> T:
    """Return what is solved with noises, or with higher ones, of which a warning tells."""
    for attempt in range(_ATTEMPTS):
        tried = noise.times(_RAISE**attempt)
        try:
            found = solve(tried)
        except NumericalError:
            continue
        if attempt:
            warnings.warn(
                f"Noise variances ({_described(noise)}) are lost in rounding; all were raised by "
                f"{_RAISE**attempt:.0e}. Labels that are much larger than all others are one "
                "reason. Noises that are given as numbers must be larger.",
                QualmsWarning,
                stacklevel=8,
            )
        return found
    raise NumericalError(
        f"Noise variances ({_described(noise)}) are lost in rounding, and so are those "
        f"{_RAISE ** (_ATTEMPTS - 1):.0e} times as large. Look for labels that are much larger "
        "than all others, or give larger ones: noise, forces_noise and stress_noise."
    )


def _described(noise: JointNoise) -> str:
    """Return the variances in words, by the parameters that give them."""
    found = [("noise", noise.energies), ("forces_noise", noise.forces)]
    found += [] if noise.virials is None else [("stress_noise", noise.virials)]
    return ", ".join(f"{name} {value:.1e}" for name, value in found)


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


def solve_joint_members(
    joint: JointModel,
    Phi: FloatArray,
    energies: Float64Array,
    counts: IntArray,
    *,
    centered: bool,
) -> tuple[JointModel, Members]:
    """Solve all members, and the full model again if they need higher noises than it has.

    Parameters are those of `fit_joint_members`.
    """

    def solve(noise: JointNoise) -> tuple[JointModel, Members]:
        model = joint.with_noise(noise, Phi)
        return model, fit_joint_members(model, Phi, energies, counts, centered=centered)

    return _solvable(solve, joint.noise)
