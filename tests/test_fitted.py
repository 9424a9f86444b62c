"""The variance of the projected process."""

import numpy as np

from qualms.atomistic.fitted import ProjectedVariance


def test_variances_of_many_rows_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    r, n = 30, 2500  # more rows than are solved at once
    A, B = (rng.normal(size=(r, 2 * r)) for _ in range(2))
    K_MM, precision = A @ A.T / r, B @ B.T
    K_XM = rng.normal(size=(n, r))
    k_xx = np.sum(K_XM * np.linalg.solve(K_MM, K_XM.T).T, axis=1) + rng.random(n)
    L = np.linalg.cholesky(K_MM)
    variance = ProjectedVariance(L, np.linalg.cholesky(precision), 0.3, 2.0)
    Phi = np.linalg.solve(L, K_XM.T).T
    latent = (
        k_xx - np.sum(Phi**2, axis=1) + 0.3 * np.sum(Phi * np.linalg.solve(precision, Phi.T).T, 1)
    )
    np.testing.assert_allclose(variance.std(K_XM, k_xx), np.sqrt(2 * (latent + 0.3)), rtol=1e-10)
