"""One training set, judged in several ways: the projected process with noises of its own."""

import numpy as np
import pytest
from atomistic_fixtures import labelled_molecules, make_model

from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.fitted import ProjectedVariance
from qualms.atomistic.progress import Stages
from qualms.atomistic.study import held_out_rows, process_estimate
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import make_training_set, resolved_species


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


@pytest.mark.parametrize("noise", [1e-4, 1.0])
def test_a_process_with_another_noise_is_a_model_trained_with_it(noise):
    molecules = labelled_molecules(120)
    known, new = molecules[:100], molecules[100:]
    settings = make_model(seed=1).settings
    data = make_training_set(known, settings)
    settings = resolved_species(settings, data)
    solver = Training(data, settings, Resources(threads=1), Stages()).prepare()
    fitted = solver.solve(settings, np.random.default_rng(1)).fitted
    found = process_estimate(
        solver.with_process(fitted, noise), held_out_rows(fitted, new, threads=1)
    )
    mean, std = make_model(seed=1, noise=noise).fit(known).predict_pp(new)
    sizes = np.array([len(atoms) for atoms in new])  # rows are per atom
    np.testing.assert_allclose(found.mean * sizes, mean, rtol=1e-6)
    np.testing.assert_allclose(found.std * sizes, std, rtol=1e-4)
