"""A trained model: representatives, weights of all members, baseline, calibrations, record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from qualms.io.tensors import Document

#: Kernel rows whose variances are computed at once.
_ROWS = 1024


@dataclass(frozen=True)
class ProjectedVariance:
    """What σ_PP of Eq. (3), Musil et al. 2019, needs.

    The factors are float32 if the kernel rows have no more digits than that.

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


class QuantityRecord(Document):
    """Training of one quantity: numbers of labels, and errors of out-of-bag points.

    Attributes
    ----------
    n_rows : int
        Labels: structures, atoms, or components.
    n_without : int
        Structures, or atoms of an atomic property, without a label.
    n_out_of_bag, n_out_of_bag_structures : int
        Rows that enough members were trained without, and the structures they belong to.
    rmse, mae : float, optional
        Out-of-bag errors, in the units of the quantity; per atom if the target is extensive.
    noise : float
        Standard deviation σ of the noise; that of stresses for virials per atom.
    """

    n_rows: int
    n_without: int
    n_out_of_bag: int
    n_out_of_bag_structures: int
    rmse: float | None
    mae: float | None
    noise: float


class Record(Document):
    """Data and stages of a training run.

    Attributes
    ----------
    n_structures, n_environments : int
        Labelled structures, and environments.
    n_isolated, n_duplicates : int
    quantities : dict of str to QuantityRecord
    effective_rank : int
        Representatives that are linearly independent.
    target_std : float
        Standard deviation of the targets less the baseline.
    solver : str
        Method that solved the members.
    seconds : dict
        Time of each stage.
    """

    n_structures: int
    n_environments: int
    n_isolated: int
    n_duplicates: int
    quantities: dict[str, QuantityRecord]
    effective_rank: int
    target_std: float
    solver: str
    seconds: dict[str, float]


class Provenance(Document):
    """Date (UTC), versions of Python and packages, and a digest of structures and labels."""

    created: str
    python: str
    packages: dict[str, str]
    data_digest: str


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
    calibrations : mapping of str to mapping of str to Calibration
        For each quantity, "energy" and perhaps "forces" and "stress", the out-of-bag calibrations
        by every method that could be fitted.
    pp_variance : ProjectedVariance, optional
    membership : (N, N_R) array of uint8
        How often each training row is in each member.
    training_novelty : (float, float)
        Largest and mean novelty of the environments of a structure that only one training structure
        in a hundred exceeds, its own representatives not counted.
    training_spread : float
        Largest ensemble standard deviation of an out-of-bag point.
    record : Record
    provenance : Provenance
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
    calibrations: Mapping[str, Mapping[str, Calibration]]
    pp_variance: ProjectedVariance | None
    membership: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    training_novelty: tuple[float, float]
    training_spread: float
    record: Record
    provenance: Provenance

    def __post_init__(self) -> None:
        _in_file_order(self, "representatives", "weights", "intercepts", "pp_weights")
        _in_file_order(self.baseline, "full", "members")

    @property
    def per_atom(self) -> bool:
        """Whether the target belongs to atoms."""
        return self.settings.per_atom

    @property
    def calibration(self) -> Calibration:
        """The calibration of the target."""
        return self.calibrations["energy"][self.settings.calibration]

    def calibration_of(self, quantity: str) -> Calibration | None:
        """Return the calibration of a quantity, if it has one of its own."""
        return self.calibrations.get(quantity, {}).get(self.settings.calibration)

    @cached_property
    def basis(self) -> Basis:
        """Kernel rows with the representatives; of compressed features, in float32."""
        X = self.representatives
        if not self.representation.projections:
            # Column-major: the kernel takes columns of it again and again.
            X = X.astype(np.float64, order="F")
        return Basis(self.representation.kernel, X, self.kernel_scale, self.per_atom)

    @cached_property
    def mean_weights(self) -> Float64Array:
        """Kernel weights of the ensemble mean, Eq. (4): (r,)."""
        return np.asarray(self.weights.mean(axis=1))

    def members(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the prediction of each member, per atom if extensive: (n, N_R)."""
        members = K_XM @ self.weights
        members += self.intercepts
        members += self.baseline.predict_members(design)
        return members

    def mean(self, K_XM: Float64Array, design: Float64Array) -> Float64Array:
        """Return the ensemble mean alone: (n,)."""
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
