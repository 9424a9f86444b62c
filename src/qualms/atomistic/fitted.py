"""A trained model: representatives, weights of all members, baseline and calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline
from qualms.atomistic.kernel_rows import Basis
from qualms.atomistic.settings import Settings
from qualms.calibration.base import Calibration
from qualms.features.soap import Representation
from qualms.gp.linalg import cholesky_whiten
from qualms.gp.sparse_gp import latent_variance

#: Kernel rows whose variances are found at once.
_ROWS = 1024


@dataclass(frozen=True)
class ProjectedVariance:
    """What σ_PP of Eq. (3), Musil et al. 2019, needs.

    The factors are kept in float32, if kernel rows have no more digits than that.

    Attributes
    ----------
    whitening, posterior : (r, r) arrays
        Lower Cholesky factors of K_MM and of A = ΦᵀΦ + σ².
    noise_variance : float
        σ² relative to `variance`.
    variance : float
        Var[y] of the targets, less the baseline.
    """

    whitening: FloatArray
    posterior: FloatArray
    noise_variance: float
    variance: float

    def __post_init__(self) -> None:
        _in_file_order(self, "whitening", "posterior")

    def std(self, K_XM: Float64Array, k_xx: Float64Array) -> Float64Array:
        """Return σ_PP for kernel rows (n, r) and prior variances (n,): (n,)."""
        latent = np.empty(len(K_XM))
        for start in range(0, len(K_XM), _ROWS):
            part = slice(start, start + _ROWS)
            Phi = cholesky_whiten(self._whitening, K_XM[part].T).T
            latent[part] = latent_variance(Phi, k_xx[part], self._posterior, self.noise_variance)
        std: Float64Array = np.sqrt((latent + self.noise_variance) * self.variance)
        return std

    @cached_property
    def _whitening(self) -> Float64Array:
        return self.whitening.astype(np.float64)

    @cached_property
    def _posterior(self) -> Float64Array:
        return self.posterior.astype(np.float64)


@dataclass(frozen=True)
class Fitted:
    """Everything a prediction needs.

    Attributes
    ----------
    settings : Settings
    representation : Representation
    representatives : (r, d) array of float32
    origins : (r, 2) array of int
        Structure, as given to ``fit``, and atom of each representative.
    kernel_scale : float
        Factor of Eq. (17), Musil et al. 2019.
    weights : (r, N_R) array
        Kernel weights of each member, in the units of the target (per atom if it is extensive).
    intercepts : (N_R,) array
    pp_weights : (r,) array
        Kernel weights of the full projected process.
    pp_intercept : float
    baseline : Baseline
    calibrations : mapping of str to Calibration
        Internal ones, by every method that could be fitted.
    pp_variance : ProjectedVariance, optional
    membership : (N, N_R) array of uint8
        How often each training row is in each member.
    training_novelty : (float, float)
        Novelty of the strangest environment of a structure, and mean novelty of its environments,
        that only one training structure in a hundred exceeds, representatives of its own not
        counted.
    training_spread : float
        Largest spread between members that had not seen a training row.
    forces_calibrations : mapping of str to Calibration
        The same for components of forces; empty if the model was not trained on forces.
    stress_calibrations : mapping of str to Calibration
        The same for components of stresses; empty if it was not trained on enough of them.
    """

    settings: Settings
    representation: Representation
    representatives: FloatArray
    origins: IntArray
    kernel_scale: float
    weights: Float64Array
    intercepts: Float64Array
    pp_weights: Float64Array
    pp_intercept: float
    baseline: Baseline
    calibrations: Mapping[str, Calibration]
    pp_variance: ProjectedVariance | None
    membership: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    training_novelty: tuple[float, float]
    training_spread: float
    forces_calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    stress_calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _in_file_order(self, "representatives", "weights", "intercepts", "pp_weights")
        _in_file_order(self.baseline, "full", "members")

    @property
    def per_atom(self) -> bool:
        """Whether the target belongs to atoms."""
        return self.settings.per_atom

    @property
    def calibration(self) -> Calibration:
        """The calibration that predictions use."""
        return self.calibrations[self.settings.calibration]

    @property
    def forces_calibration(self) -> Calibration | None:
        """The calibration of forces, if the model was trained on forces."""
        return self.forces_calibrations.get(self.settings.calibration)

    @property
    def stress_calibration(self) -> Calibration | None:
        """The calibration of stresses, if the model was trained on stresses."""
        return self.stress_calibrations.get(self.settings.calibration)

    @cached_property
    def basis(self) -> Basis:
        """Kernel rows with the representatives."""
        return Basis(
            self.representation.kernel, self.representatives, self.kernel_scale, self.per_atom
        )

    @cached_property
    def mean_weights(self) -> Float64Array:
        """Kernel weights of the committee mean, Eq. (4): (r,)."""
        return np.asarray(self.weights.mean(axis=1))

    def members(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return what each member says, per atom if the target is extensive: (n, N_R)."""
        members = K_XM @ self.weights
        members += self.intercepts
        members += self.baseline.predict_members(design)
        return members

    def mean(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the mean of the committee alone: (n,)."""
        baseline = design @ self.baseline.members.mean(axis=1)
        return np.asarray(K_XM @ self.mean_weights + self.intercepts.mean() + baseline)

    def pp_mean(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the mean of the full projected process: (n,)."""
        return np.asarray(
            K_XM @ self.pp_weights + self.pp_intercept + self.baseline.predict(design)
        )


def _in_file_order(owner: object, *names: str) -> None:
    """Lay arrays out as a file does: the order in memory decides how products are rounded."""
    for name in names:
        object.__setattr__(owner, name, np.ascontiguousarray(getattr(owner, name)))
