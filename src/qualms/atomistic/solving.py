"""From kernel rows to the weights of all members, and their calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from threadpoolctl import threadpool_limits

from qualms.atomistic.baselines import Baseline, fit_baseline
from qualms.atomistic.basis import Basis
from qualms.atomistic.conventions import check_conventions
from qualms.atomistic.doubtful_structures import warn_of_doubtful
from qualms.atomistic.fitted import Fitted, ProjectedVariance
from qualms.atomistic.internal_calibration import (
    Derived,
    calibrate_forces,
    calibrate_stresses,
    doubt_labels,
    fit_calibrations,
    internal_data,
)
from qualms.atomistic.joint_solving import JointModel, fit_joint_model, solve_joint_members
from qualms.atomistic.plan import Plan
from qualms.atomistic.progress import Stages
from qualms.atomistic.representation import Representation
from qualms.atomistic.settings import Settings
from qualms.atomistic.training_set import TrainingSet, can_calibrate, draw_counts
from qualms.core.calibration import Calibration, CalibrationData
from qualms.core.committee import FullModel, Members, fit_full_model, fit_members
from qualms.core.joint_noise import JointNoise
from qualms.core.linalg import Whitening
from qualms.core.projected_process import leave_one_out_residuals
from qualms.core.resampling import MIN_ABSENT
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError

#: Representatives, and rows, up to which the matrices are small.
_SMALL, _FEW = 500, 50_000


@dataclass
class KernelRows:
    """Kernel rows of a training set.

    Attributes
    ----------
    representation : Representation
    basis : Basis
        Scaled by Eq. (17), Musil et al. 2019.
    origins : (r, 2) array of int
        Structure and atom of each representative.
    whitening : Whitening
        Of the kernel before it was scaled.
    K_NM : (N, r) array
        Scaled. It and the whitening are used up by what solves with them: they are the largest
        arrays of all.
    novelty : (float, float)
        What the strangest environment of a new structure, or all of them on average, must exceed to
        look like extrapolation.
    """

    representation: Representation
    basis: Basis
    origins: IntArray
    whitening: Whitening
    K_NM: Float64Array
    novelty: tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """A trained model and what is known about its training set.

    Attributes
    ----------
    fitted : Fitted
    plan : Plan
    internal : CalibrationData, optional
        Residuals and spreads of training rows by the members that did not see them.
    full : FullModel
    solution : str
        How the members were solved.
    target_std : float
        Standard deviation of the targets less the baseline, per atom if they are extensive.
    predicted : (n, N_R) array
        What members, uncalibrated, say about each training row; `Fitted.membership` has which of
        them saw it.
    of_forces, of_stress : Derived
        Internal errors and calibrations of components of forces, and of stresses.
    joint_noise : JointNoise, optional
        Noise of energies and of forces, if both were learned.
    """

    fitted: Fitted
    plan: Plan
    internal: CalibrationData | None
    full: FullModel
    solution: str
    target_std: float
    predicted: Float64Array
    of_forces: Derived = field(default_factory=Derived)
    of_stress: Derived = field(default_factory=Derived)
    joint_noise: JointNoise | None = None


class Solver:
    """The full model of a training set, ready for members of any size.

    Parameters
    ----------
    data : TrainingSet
    settings : Settings
    rows : KernelRows
        Its whitening and K_NM are used up.
    plan : Plan
    stages : Stages
    """

    def __init__(
        self, data: TrainingSet, settings: Settings, rows: KernelRows, plan: Plan, stages: Stages
    ) -> None:
        self.data = data
        self.rows = rows
        self.plan = plan
        self.stages = stages
        self.design = data.design(per_atom=rows.basis.per_atom)
        root = np.sqrt(rows.basis.scale)
        self.whitening = replace(rows.whitening, factor=rows.whitening.factor * root)
        del rows.whitening
        with stages.stage("Full model"), _few_threads(data, len(rows.origins)):
            self.Phi = np.asarray(self.whitening.features(rows.K_NM, overwrite=True))
            del rows.K_NM
            self.joint: JointModel | None = None
            if data.mechanics is None:
                self.full = self._full_model(settings)
            else:
                given = (self.Phi, self._target(settings), data.mechanics, data.groups, settings)
                check_conventions(*given)
                self.joint = fit_joint_model(*given)
                self.full = self.joint.full
        # With forces, the scale of the full model is that of its prior.
        rms = float(np.sqrt(np.mean((self._target(settings) - self.full.center[0]) ** 2)))
        self.target_std = float(self.full.scale[0]) if self.joint is None else rms or 1.0

    def _target(self, settings: Settings) -> Float64Array:
        """Return the targets less the baseline."""
        return self.data.y - _baseline(self.data, settings, self.design).predict(self.design)

    def _full_model(self, settings: Settings) -> FullModel:
        return fit_full_model(
            self.Phi,
            self._target(settings),
            settings.noise,
            center=settings.baseline != "none",
            groups=self._groups(settings),
        )

    def _groups(self, settings: Settings) -> IntArray | None:
        """Return what is left out together, a number for each row; None for single rows."""
        data = self.data
        return None if settings.resample == "atoms" else data.groups[data.row_structure]

    def left_out_residuals(self, settings: Settings) -> Float64Array:
        """Return labels less what the full model without them says, (n,); groups are left out."""
        full = self.full
        relative = (self._target(settings) - full.center[0]) / full.scale[0]
        groups = self._groups(settings)
        residuals = leave_one_out_residuals(full.process, self.Phi, relative, groups=groups)
        return np.asarray(residuals[:, 0] * full.scale[0])

    def solve(self, settings: Settings, rng: np.random.Generator) -> Outcome:
        """Draw and solve the members, and calibrate them internally.

        Parameters
        ----------
        settings : Settings
            May differ from those of the full model in what concerns the members.
        rng : Generator
        """
        data, Phi, stages = self.data, self.Phi, self.stages
        counts = draw_counts(data, settings, rng)
        baseline = _baseline(data, settings, self.design, counts)
        with stages.stage("Members"), _few_threads(data, Phi.shape[1]):
            offsets = baseline.predict_members(self.design)
            targets = data.y[:, None] - offsets
            if self.joint is None:
                members = fit_members(self.full, Phi, targets[:, None, :], counts)
            else:
                centered = settings.baseline != "none"
                self.joint, members = solve_joint_members(
                    self.joint, Phi, targets, counts, centered=centered
                )
                self.full = self.joint.full
            n = len(data.y)
            predicted = members.predict(Phi[:n])[:, 0] + offsets
        with stages.stage("Calibration"):
            internal = internal_data(data.y, predicted, counts, settings.calibration)
            calibrations = fit_calibrations(internal, settings.calibration)
            derived = Phi[n:] @ members.weights[:, 0]
            of_forces, of_stress = self._derived(derived, counts, settings)
            if self.joint is not None:
                warn_of_doubtful(data, settings, predicted, derived, counts)
            for name, of in (("forces", of_forces), ("stress", of_stress)):
                doubt_labels(name, getattr(settings, name), of, calibrations, counts.shape[1])
        fitted = replace(
            self._assemble(settings, members, baseline, calibrations, counts, internal),
            forces_calibrations=of_forces.calibrations,
            stress_calibrations=of_stress.calibrations,
        )
        return Outcome(
            fitted,
            self.plan,
            internal,
            self.full,
            _how(members),
            self.target_std,
            predicted,
            of_forces,
            of_stress,
            None if self.joint is None else self.joint.noise,
        )

    def _derived(
        self, predicted: Float64Array, counts: IntArray, settings: Settings
    ) -> tuple[Derived, Derived]:
        """Calibrate forces and stresses by members that did not see a structure.

        What members say about each row is `predicted`.
        """
        labels = self.data.mechanics
        if labels is None:
            return Derived(), Derived()
        frames, wanted = self.data.frames, settings.calibration
        forces = calibrate_forces(labels, predicted, counts, wanted)
        if not labels.n_with_virial:
            return forces, Derived()
        densities = np.array([len(a) / a.cell.volume if a.cell.rank == 3 else 0.0 for a in frames])
        return forces, calibrate_stresses(labels, predicted, counts, densities, wanted)

    def _assemble(
        self,
        settings: Settings,
        members: Members,
        baseline: Baseline,
        calibrations: dict[str, Calibration],
        counts: IntArray,
        internal: CalibrationData | None,
    ) -> Fitted:
        rows, whitening = self.rows, self.whitening
        return Fitted(
            settings=settings,
            representation=replace(rows.representation, precise=settings.mechanical),
            representatives=rows.basis.representatives,
            origins=rows.origins,
            kernel_scale=rows.basis.scale,
            weights=whitening.kernel_weights(members.weights)[:, 0],
            intercepts=members.intercepts[0],
            pp_weights=whitening.kernel_weights(self.full.weights)[:, 0],
            pp_intercept=float(self.full.center[0]),
            baseline=baseline,
            calibrations=calibrations,
            pp_variance=_variance(self.full, whitening, settings) if settings.keep_pp else None,
            membership=np.minimum(counts, 255).astype(np.uint8),
            training_novelty=rows.novelty,
            training_spread=0.0 if internal is None else float(internal.spread.max()),
        )


def _few_threads(data: TrainingSet, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    small = rank <= _SMALL and data.n_rows <= _FEW
    return threadpool_limits(limits=1 if small else None)


def check_members(data: TrainingSet, settings: Settings) -> None:
    """Refuse data that members and their baselines cannot be had from, before the work."""
    counts = draw_counts(data, settings, np.random.default_rng(settings.seed))
    if not can_calibrate(counts, settings):
        raise InputError(
            "subsample",
            settings.subsample,
            f"sub-samples that leave some of the {len(data.y)} rows out of at least {MIN_ABSENT} "
            f"of {settings.n_members} members, to calibrate on",
            "Use smaller sub-samples, more members or more structures, or calibration='none'.",
        )
    _baseline(data, settings, data.design(per_atom=settings.per_atom), counts)


def _baseline(
    data: TrainingSet, settings: Settings, design: Float64Array, counts: IntArray | None = None
) -> Baseline:
    return fit_baseline(
        cast("str | Mapping[str | int, float]", settings.baseline),
        design,
        data.y,
        species=data.species,
        kind=settings.kind,
        counts=counts,
        isolated=data.isolated,
    )


def _variance(full: FullModel, whitening: Whitening, settings: Settings) -> ProjectedVariance:
    precision = np.float64 if settings.mechanical else np.float32
    return ProjectedVariance(
        whitening=whitening.factor.astype(precision),
        posterior=full.process.factor.astype(precision),
        noise_variance=full.process.noise_variance,
        variance=float(full.scale[0] ** 2),
    )


def _how(members: Members) -> str:
    solution = members.solution
    iterations = f", {solution.n_iterations} iterations" if solution.n_iterations else ""
    return f"{solution.method}{iterations}"
