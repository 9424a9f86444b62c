"""A scikit-learn regressor: sparse Gaussian processes with calibrated error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from qualms.core.checks import check_integer, check_number
from qualms.core.committee import FullModel, fit_full_model, fit_members
from qualms.core.kernels import Kernel
from qualms.core.typing import Float64Array, FloatArray
from qualms.errors import InputError
from qualms.estimators._basis import SELECTIONS, build_basis, make_kernel
from qualms.estimators._committee import (
    TrainingSet,
    check_calibration_name,
    draw_counts,
    internal_calibration,
    new_generator,
    training_set,
)
from qualms.prediction import Prediction


class ProjectedProcessRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Sparse Gaussian process regression whose error bars come from sub-sampled members.

    All members share one set of representatives, so that mean, error bar and members of a
    prediction cost one row of the kernel. The error bars are calibrated internally, on training
    points that members did not see; no data need be set aside. Musil et al., J. Chem. Theory
    Comput. 15, 906 (2019).

    Parameters
    ----------
    kernel : {"power", "rbf"} or kernel object
        "power" is ``(x·x′)^exponent`` of rows scaled to unit length; "rbf" is a Gaussian of the
        distance. Any callable ``kernel(X, Y)`` with a method ``diag(X)`` will do, such as those of
        `sklearn.gaussian_process.kernels`; their hyper-parameters are used as they are.
    exponent : float
        ζ ≥ 1 of the power kernel.
    offset : float or "auto"
        c of the power kernel ``((x·x′ + c)/(1 + c))^exponent``. "auto" is 0 where no product of
        training points (the first 2048) is negative, as for SOAP vectors, else 1, because an even
        power of negative products could not tell x from −x.
    length_scale : float, optional
        ℓ of the "rbf" kernel; the median distance between training points by default.
    n_representatives : int, optional
        M; at most 1000 by default.
    selection : {"fps", "cur", "random"}
        How representatives are chosen: farthest points, leverage scores, or at random.
    noise : {"loo", "evidence"} or float
        Noise variance σ² in the units of y² (with several outputs: for their mean variance), or how
        to choose it: by the smallest leave-one-out error or by the largest marginal likelihood.
    n_members : int
        N_R ≥ 2, or 0 for the plain projected process, whose error bar is that of Eq. (3), not
        calibrated.
    subsample : float or int
        Size n of the sub-samples: a fraction of the distinct training points (or groups), or a
        number of them.
    replace : bool
        Bootstrap (n = N with replacement; `subsample` is not used) instead of sub-sampling.
    calibration : {"student", "shrinkage", "linear", "power", "none"} or None
        How the spread between members is turned into an error bar.
    random_state : int, RandomState instance or None
        Seed of the sub-samples (and of a random selection).

    Attributes
    ----------
    representative_indices_ : (r,) array of int
        Training rows that are representatives; those that are numerically null are left out.
    effective_rank_ : int
        r, the rank of the kernel of the representatives.
    noise_variance_ : float or (T,) array
        σ², in the units of y².
    weights_ : (r, N_R) or (r, T, N_R) array
        Kernel weights of each member.
    intercept_ : (N_R,) or (T, N_R) array
        Mean of y over the training set of each member.
    member_indices_ : list of N_R arrays of int
        Training rows of each member.
    calibration_ : Calibration
        With ``alpha`` and ``gamma``.
    pp_weights_, pp_intercept_ : arrays
        The same for the full projected process: (r,) or (r, T), and a float or (T,).
    basis_ : Basis
        Kernel, representatives and whitening.
    n_features_in_ : int

    Notes
    -----
    Rows with the same features count as one point, in or out of a sub-sample together, and the
    result does not depend on the order of the rows.
    """

    def __init__(
        self,
        kernel: str | Kernel = "power",
        exponent: float = 2,
        *,
        offset: float | str = "auto",
        length_scale: float | None = None,
        n_representatives: int | None = None,
        selection: str = "fps",
        noise: str | float = "loo",
        n_members: int = 16,
        subsample: float = 0.5,
        replace: bool = False,
        calibration: str | None = "student",
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.exponent = exponent
        self.offset = offset
        self.length_scale = length_scale
        self.n_representatives = n_representatives
        self.selection = selection
        self.noise = noise
        self.n_members = n_members
        self.subsample = subsample
        self.replace = replace
        self.calibration = calibration
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: Sequence[object] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> ProjectedProcessRegressor:
        """Choose representatives and noise, solve all members, and calibrate.

        Parameters
        ----------
        X : (N, d) array
        y : (N,) or (N, T) array
        groups : (N,) array, optional
            Labels of samples that belong together, such as atoms of one crystal: in or out of a
            sub-sample together.
        sample_weight : (N,) array, optional
            Not negative; sample n has noise σ²/w_n. A weight of k is the same as k copies of the
            sample.

        Returns
        -------
        self
        """
        method = self._check_parameters()
        data = training_set(self, X, y, groups, sample_weight, dtype=[np.float64, np.float32])
        self._single_output = data.single_output
        rng = new_generator(self.random_state)
        self._fit_basis(data, rng)
        Phi = self.basis_.features(data.points)
        full = self._fit_full_model(data, Phi)
        for fitted in ("weights_", "intercept_", "member_indices_", "calibration_"):
            if hasattr(self, fitted):
                delattr(self, fitted)  # of an earlier fit with members
        if self.n_members:
            self._fit_members(data, Phi, full, method, rng)
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> Float64Array | tuple[Float64Array, Float64Array]:
        """Predict the mean of the committee, Eq. (4), and, if asked for, its calibrated error bar.

        Without members, these are mean and error bar of the full projected process.

        Parameters
        ----------
        X : (n, d) array
        return_std : bool

        Returns
        -------
        mean : (n,) or (n, T) array
        std : array of the same shape
            Only if `return_std`.
        """
        if not self._has_members():
            return (self.pp_mean(X), self.pp_std(X)) if return_std else self.pp_mean(X)
        if return_std:
            prediction = self.predict_ensemble(X)
            return prediction.mean, prediction.std
        mean = self.basis_.contract(self._validated(X), self.weights_.mean(axis=-1))
        return np.asarray(mean + self.intercept_.mean(axis=-1))

    def predict_ensemble(self, X: ArrayLike) -> Prediction:
        """Predict with every member, calibrated.

        Parameters
        ----------
        X : (n, d) array

        Returns
        -------
        Prediction
        """
        if not self._has_members():
            raise InputError("n_members", 0, "at least 2 members for an ensemble")
        members = self.basis_.contract(self._validated(X), self.weights_) + self.intercept_
        return Prediction(members).calibrated(self.calibration_)

    def pp_mean(self, X: ArrayLike) -> Float64Array:
        """Predict with the full projected process, Eq. (3): (n,) or (n, T)."""
        mean = self.basis_.contract(self._validated(X), self.pp_weights_)
        return np.asarray(mean + self.pp_intercept_)

    def pp_std(self, X: ArrayLike) -> Float64Array:
        """Return σ_PP of Eq. (3) for a noisy observation, not calibrated: (n,) or (n, T)."""
        basis, inputs = self.basis_, self._validated(X)
        std = [
            self._full.std(
                basis.whitening.features(basis.kernel_rows(block), overwrite=True),
                basis.prior_variance(block),
            )
            for block in basis.blocks(inputs)
        ]
        return np.asarray(self._outputs(np.concatenate(std)))

    def _check_parameters(self) -> str:
        """Refuse parameters that no data could make right; return the name of the calibration."""
        if self.selection not in SELECTIONS:
            raise InputError("selection", repr(self.selection), f"one of {', '.join(SELECTIONS)}")
        if isinstance(self.noise, (int, float, np.number)):
            check_number("noise", self.noise, 0, strict=True)
        elif self.noise not in ("loo", "evidence"):
            raise InputError("noise", repr(self.noise), '"loo", "evidence" or a number > 0')
        if check_integer("n_members", self.n_members, 0) == 1:
            raise InputError("n_members", self.n_members, "at least 2 members, or 0 for none")
        return check_calibration_name(self.calibration)

    def _fit_basis(self, data: TrainingSet, rng: np.random.Generator) -> None:
        kernel = make_kernel(
            self.kernel,
            data.points,
            exponent=self.exponent,
            offset=self.offset,
            length_scale=self.length_scale,
        )
        self.basis_ = build_basis(
            kernel,
            data.points,
            data.point_weight,
            n_representatives=self.n_representatives,
            selection=self.selection,
            rng=rng,
        )
        self.representative_indices_ = data.rows[data.first[self.basis_.indices]]
        self.effective_rank_ = self.basis_.whitening.effective_rank

    def _fit_full_model(self, data: TrainingSet, Phi: Float64Array) -> FullModel:
        full = fit_full_model(
            Phi,
            data.point_y,
            self.noise,
            sample_weight=data.point_weight,
            replicates=data.replicates(),
        )
        self._full = full
        self.pp_weights_ = self._outputs(self.basis_.whitening.kernel_weights(full.weights))
        self.pp_intercept_ = self._outputs(full.center)
        self.noise_variance_ = self._outputs(full.noise_variance)
        return full

    def _fit_members(
        self,
        data: TrainingSet,
        Phi: Float64Array,
        full: FullModel,
        method: str,
        rng: np.random.Generator,
    ) -> None:
        counts = draw_counts(data, self.n_members, self.subsample, self.replace, rng)
        members = fit_members(full, Phi, data.point_y, counts, sample_weight=data.point_weight)
        weights = self.basis_.whitening.kernel_weights(members.weights)
        self.weights_ = self._outputs(weights, axis=1)
        self.intercept_ = self._outputs(members.intercepts, axis=0)
        self.member_indices_ = data.member_rows(counts)
        self.calibration_ = internal_calibration(
            data, members.predict(Phi)[data.inverse], counts, method
        )

    def _has_members(self) -> bool:
        check_is_fitted(self)
        return hasattr(self, "weights_")

    def _validated(self, X: ArrayLike) -> FloatArray:
        check_is_fitted(self)
        validated: FloatArray = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return validated

    def _outputs(self, values: Float64Array, axis: int = -1) -> Any:
        """Drop the axis of outputs if y was one-dimensional."""
        return np.take(values, 0, axis=axis) if self._single_output else values
