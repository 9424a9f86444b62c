"""One sparse model and the members that share its basis, in the units of y.

Targets are centred and scaled to unit variance before anything is solved, and the kernel has a mean
diagonal of one: together that is Eq. (17), Musil et al. 2019, and the noise variance is found
relative to Var[y]. The mean of y belongs to the model: each member subtracts that of its own
training set, so that nothing of a point it did not see leaks into its prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qualms.core.checks import as_targets, check_sample_weight
from qualms.core.members import MemberSolution, solve_members
from qualms.core.noise import Replicates, noise_grid, select_noise
from qualms.core.projected_process import (
    ProjectedProcess,
    fit_projected_process,
    gram_matrix,
)
from qualms.core.typing import Float64Array, FloatArray, IntArray


@dataclass(frozen=True)
class FullModel:
    """The projected process of all training points.

    Attributes
    ----------
    process : ProjectedProcess
        For y of zero mean and unit variance.
    center, scale : (T,) arrays
        Mean and standard deviation of y; the scale of a constant y is one. Without centring, zero
        and the root of the mean square.
    centered : bool
        Whether each member subtracts a mean of its own.
    """

    process: ProjectedProcess
    center: Float64Array
    scale: Float64Array
    centered: bool = True

    @property
    def weights(self) -> Float64Array:
        """Weights of the whitened features, in the units of y: (r, T)."""
        return self.process.weights * self.scale

    @property
    def noise_variance(self) -> Float64Array:
        """σ² in the units of y²: (T,)."""
        return self.process.noise_variance * self.scale**2

    def std(self, Phi_X: FloatArray, k_xx: FloatArray) -> Float64Array:
        """Return σ_PP of Eq. (3), Musil et al. 2019, in the units of y: (n, T).

        Parameters
        ----------
        Phi_X : (n, r) array
            Whitened features.
        k_xx : (n,) array
            Prior variance relative to Var[y]: the diagonal of the kernel of unit mean diagonal.
        """
        relative = np.sqrt(self.process.variance(Phi_X, k_xx))
        return relative[:, None] * self.scale


@dataclass(frozen=True)
class Members:
    """The members of a committee, in the units of y.

    Attributes
    ----------
    weights : (r, T, N_R) array
        Weights of the whitened features.
    intercepts : (T, N_R) array
        Mean of y over the training set of each member.
    solution : MemberSolution
        How they were solved.
    """

    weights: Float64Array
    intercepts: Float64Array
    solution: MemberSolution

    def predict(self, Phi_X: FloatArray) -> Float64Array:
        """Return what each member predicts for whitened features (n, r): (n, T, N_R)."""
        r, n_outputs, n_members = self.weights.shape
        flat = Phi_X @ self.weights.reshape(r, n_outputs * n_members)
        predicted: Float64Array = flat.reshape(-1, n_outputs, n_members) + self.intercepts
        return predicted


def fit_full_model(
    Phi: FloatArray,
    y: FloatArray,
    noise: str | float = "loo",
    *,
    center: bool = True,
    sample_weight: FloatArray | None = None,
    replicates: Replicates | None = None,
    groups: IntArray | None = None,
) -> FullModel:
    """Choose the noise variance and solve the full model.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features, for a kernel of unit mean diagonal.
    y : (N,) or (N, T) array
    noise : {"loo", "evidence"} or float
        How to choose σ², or σ² itself in the units of y² (with several outputs: for their mean
        variance).
    center : bool
        Whether the mean of y belongs to the model; without, its prior mean is zero.
    sample_weight : (N,) array, optional
    replicates : Replicates, optional
        Scatter of repeated observations whose averages are y, in the units of y².
    groups : (N,) array of int, optional
        Rows that are left out together when the noise is chosen.
    """
    Y = as_targets(y, len(Phi))
    weight = check_sample_weight(sample_weight, len(Phi))
    mean = np.average(Y, axis=0, weights=weight)
    offset = mean if center else np.zeros_like(mean)
    variance = np.average((Y - offset) ** 2, axis=0, weights=weight)
    # What rounding leaves of a constant is no variance; its scale is only a scale of rounding.
    constant = variance <= (1e-14 * offset) ** 2
    scale = np.where(constant, 1e-6 * np.where(offset == 0, 1.0, np.abs(offset)), variance**0.5)
    targets = np.where(constant, 0.0, (Y - offset) / scale)
    if replicates is not None:
        replicates = Replicates(replicates.dof, replicates.sum_of_squares / scale**2)
    gram = gram_matrix(Phi, sample_weight)
    unit = float(np.mean(scale[constant == constant.all()] ** 2))
    if not isinstance(noise, str):
        relative = float(noise) / unit
    elif constant.all():
        # Nothing but the scatter of replicates, if there is any, tells the noise.
        relative = 1.0 if replicates is None else max(replicates.variance, 1.0)
    else:
        # σ²/w is the noise of an observation: the grid must reach where w puts it.
        grid = noise_grid(float(weight.mean()))
        selection = select_noise(
            Phi,
            targets,
            grid,
            criterion=noise,
            sample_weight=sample_weight,
            gram=gram,
            replicates=replicates,
            groups=groups,
        )
        relative = selection.noise_variance
    process = fit_projected_process(Phi, targets, relative, sample_weight=sample_weight, gram=gram)
    return FullModel(process, offset, scale, center)


def fit_members(
    full: FullModel,
    Phi: FloatArray,
    y: FloatArray,
    counts: IntArray,
    *,
    sample_weight: FloatArray | None = None,
) -> Members:
    """Solve all members on the basis of the full model, with its noise.

    Parameters
    ----------
    full : FullModel
    Phi : (N, r) array
    y : (N,), (N, T) or (N, T, N_R) array
        Targets, common to all members or, if each has subtracted a baseline of its own, each
        member's own.
    counts : (N, N_R) array of int
        How often each point is in the training set of each member.
    sample_weight : (N,) array, optional
    """
    Y = y if y.ndim == 3 else as_targets(y, len(Phi))[:, :, None]
    weight = check_sample_weight(sample_weight, len(Phi))[:, None] * counts
    targets = (Y - full.center[:, None]) / full.scale[:, None]
    means = np.sum(targets * (weight / weight.sum(axis=0))[:, None], axis=0)  # (T, N_R)
    if not full.centered:
        means = np.zeros_like(means)
    solution = solve_members(
        Phi,
        targets - means,
        counts,
        full.process,
        sample_weight=sample_weight,
    )
    return Members(
        weights=solution.weights * full.scale[:, None],
        intercepts=full.center[:, None] + full.scale[:, None] * means,
        solution=solution,
    )
