"""Exact Gaussian process regression: Eqs. (1) and (2), Musil et al. 2019.

y = f + ε with f ~ GP(0, K) and ε ~ N(0, σ²); per-sample weights w_n mean noise of variance σ²/w_n.
The algebra is that of Rasmussen & Williams (2006), chapters 2 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qualms.core.checks import as_targets, check_noise_variance, check_sample_weight
from qualms.core.linalg import cholesky, cholesky_solve, cholesky_whiten, clip_diagonal
from qualms.core.typing import Float64Array, FloatArray
from qualms.errors import InputError


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process conditioned on N observations.

    Attributes
    ----------
    weights : (N, T) array
        x = (K_NN + σ²)⁻¹ y of Eq. (2), one column per output.
    factor : (N, N) array
        Lower Cholesky factor of K_NN + σ².
    targets : (N, T) array
    noise_variance : float
        σ², in the units of y².
    """

    weights: Float64Array
    factor: Float64Array
    targets: Float64Array
    noise_variance: float

    def mean(self, K_XN: FloatArray) -> Float64Array:
        """Return the prediction Σ_n x_n k(X_n, X), Eq. (2), for kernel rows (n, N): (n, T)."""
        predicted: Float64Array = K_XN @ self.weights
        return predicted

    def variance(
        self, K_XN: FloatArray, k_xx: FloatArray, *, include_noise: bool = True
    ) -> Float64Array:
        """Return the predictive variance (n,), that of a noisy observation if `include_noise`.

        Parameters
        ----------
        K_XN : (n, N) array
        k_xx : (n,) array
            Prior variance of the new inputs.
        """
        V = cholesky_whiten(self.factor, K_XN.T)
        latent: Float64Array = np.maximum(k_xx - np.einsum("ij,ij->j", V, V), 0.0)
        return latent + self.noise_variance if include_noise else latent

    def covariance(self, K_XN: FloatArray, K_XX: FloatArray) -> Float64Array:
        """Return the predictive covariance (n, n) of the latent function, without noise."""
        V = cholesky_whiten(self.factor, K_XN.T)
        return clip_diagonal(K_XX - V.T @ V)

    def log_marginal_likelihood(self) -> float:
        """Return ln p(y), R&W Eq. (5.8), summed over outputs."""
        n, n_outputs = self.targets.shape
        fit = -0.5 * float(np.sum(self.targets * self.weights))
        complexity = -float(np.sum(np.log(np.diag(self.factor))))
        return float(fit + n_outputs * (complexity - 0.5 * n * math.log(2 * math.pi)))

    def leave_one_out_residuals(self) -> Float64Array:
        """Return y_n minus its prediction by the model that lacks n, in closed form: (N, T).

        R&W Eq. (5.12): the residual is x_n / [(K_NN + σ²)⁻¹]_nn.
        """
        L_inverse = cholesky_whiten(self.factor, np.eye(len(self.factor)))
        precision = np.einsum("ij,ij->j", L_inverse, L_inverse)
        residuals: Float64Array = self.weights / precision[:, None]
        return residuals


def fit_gaussian_process(
    K_NN: FloatArray,
    y: FloatArray,
    noise_variance: float,
    *,
    sample_weight: FloatArray | None = None,
) -> GaussianProcess:
    """Condition a Gaussian process on observations.

    Parameters
    ----------
    K_NN : (N, N) array
        Prior covariance of the inputs, in the units of y².
    y : (N,) or (N, T) array
        Observations, of zero mean in the prior.
    noise_variance : float
        σ² > 0.
    sample_weight : (N,) array, optional
        Positive; observation n has noise σ²/w_n.

    Returns
    -------
    GaussianProcess
    """
    check_noise_variance(noise_variance)
    if K_NN.ndim != 2 or K_NN.shape[0] != K_NN.shape[1] or not np.all(np.isfinite(K_NN)):
        raise InputError("K_NN", f"shape {K_NN.shape}", "a square matrix of finite values")
    Y = as_targets(y, len(K_NN))
    w = check_sample_weight(sample_weight, len(K_NN))
    A = np.array(K_NN, dtype=np.float64)
    A[np.diag_indices_from(A)] += noise_variance / w
    factor = cholesky(A, what="K_NN + σ²", overwrite=True)
    return GaussianProcess(cholesky_solve(factor, Y), factor, Y, noise_variance)
