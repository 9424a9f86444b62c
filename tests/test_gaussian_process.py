"""Exact and projected Gaussian processes and the choice of noise, against explicit inverses."""

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.errors import InputError
from qualms.gp import sparse_gp as projected_process
from qualms.gp.kernels import PowerKernel, normalize_rows, unit_scale
from qualms.gp.linalg import whiten
from qualms.gp.noise import Replicates, noise_grid, select_noise, select_noise_from_kernel
from qualms.gp.sparse_gp import (
    fit_gaussian_process,
    fit_projected_process,
    gram_matrix,
    leave_one_out_residuals,
    log_marginal_likelihood,
)

N, M, N_NEW, NOISE = 30, 8, 6, 0.05
rng = np.random.default_rng(3)
X = normalize_rows(rng.random((N, 12)))
X_NEW = normalize_rows(rng.random((N_NEW, 12)))
KERNEL = PowerKernel(3)
Y = rng.normal(size=N)
WEIGHT = rng.uniform(0.5, 3, size=N)


def basis(m):
    """Whitened features of the training and of the new points, with the first m representatives."""
    whitening = whiten(KERNEL(X[:m], X[:m]))
    kept = X[:m][whitening.pivots]
    return whitening.features(KERNEL(X, kept)), whitening.features(KERNEL(X_NEW, kept))


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_exact_gp_is_the_oracle_s(weight):
    noise = NOISE / (np.ones(N) if weight is None else weight)
    mean, covariance = oracle.exact_gp(
        KERNEL(X, X), KERNEL(X_NEW, X), KERNEL(X_NEW, X_NEW), Y, noise
    )
    model = fit_gaussian_process(KERNEL(X, X), Y, NOISE, sample_weight=weight)
    K_XN = KERNEL(X_NEW, X)
    np.testing.assert_allclose(model.mean(K_XN)[:, 0], mean, rtol=1e-9)
    np.testing.assert_allclose(model.covariance(K_XN, KERNEL(X_NEW, X_NEW)), covariance, atol=1e-12)
    latent = model.variance(K_XN, KERNEL.diag(X_NEW), include_noise=False)
    np.testing.assert_allclose(latent, np.diag(covariance), rtol=1e-8)
    np.testing.assert_allclose(model.variance(K_XN, KERNEL.diag(X_NEW)), latent + NOISE)
    expected = oracle.gaussian_log_density(Y, KERNEL(X, X) + np.diag(noise))
    assert model.log_marginal_likelihood() == pytest.approx(expected)

    def left_out(kept, i):
        K = KERNEL(X[kept], X[kept])
        return Y[i] - oracle.exact_gp(K, KERNEL(X[[i]], X[kept]), 1.0, Y[kept], noise[kept])[0][0]

    np.testing.assert_allclose(
        model.leave_one_out_residuals()[:, 0], oracle.leave_one_out(left_out, N), rtol=1e-8
    )


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("block", [4, 4096])
def test_rows_can_be_left_out_in_groups(weight, block, monkeypatch):
    monkeypatch.setattr(projected_process, "_BLOCK", block)
    Phi, _ = basis(M)
    groups = np.random.default_rng(0).integers(7, size=N)
    model = fit_projected_process(Phi, Y, NOISE, sample_weight=weight)
    found = leave_one_out_residuals(model, Phi, Y, sample_weight=weight, groups=groups)[:, 0]
    for group in np.unique(groups):
        kept, out = groups != group, groups == group
        some = None if weight is None else weight[kept]
        less = fit_projected_process(Phi[kept], Y[kept], NOISE, sample_weight=some)
        np.testing.assert_allclose(found[out], Y[out] - less.mean(Phi[out])[:, 0], rtol=1e-9)
    alone = leave_one_out_residuals(model, Phi, Y, sample_weight=weight, groups=np.arange(N))
    np.testing.assert_array_equal(
        alone, leave_one_out_residuals(model, Phi, Y, sample_weight=weight)
    )


def test_the_gram_matrix_of_weighted_rows_is_summed_in_blocks(monkeypatch):
    random = np.random.default_rng(7)
    Phi, weight = random.normal(size=(50, 4)), random.random(50)
    monkeypatch.setattr(projected_process, "_BLOCK", 7)
    np.testing.assert_allclose(gram_matrix(Phi, weight), Phi.T @ np.diag(weight) @ Phi, atol=1e-12)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_projected_process_is_the_oracle_s(weight):
    Phi, Phi_new = basis(M)
    K_MM, K_NM, K_XM = KERNEL(X[:M], X[:M]), KERNEL(X, X[:M]), KERNEL(X_NEW, X[:M])
    mean, covariance = oracle.projected_process(
        K_MM, K_NM, K_XM, KERNEL(X_NEW, X_NEW), Y, NOISE, weight
    )
    model = fit_projected_process(Phi, Y, NOISE, sample_weight=weight)
    np.testing.assert_allclose(model.mean(Phi_new)[:, 0], mean, rtol=1e-7)
    np.testing.assert_allclose(
        model.covariance(Phi_new, KERNEL(X_NEW, X_NEW)), covariance, atol=1e-9
    )
    latent = model.variance(Phi_new, KERNEL.diag(X_NEW), include_noise=False)
    np.testing.assert_allclose(latent, np.diag(covariance), rtol=1e-6)
    np.testing.assert_allclose(model.variance(Phi_new, KERNEL.diag(X_NEW)), latent + NOISE)

    def left_out(kept, i):
        w = None if weight is None else weight[kept]
        args = K_MM, K_NM[kept], K_NM[[i]], np.zeros((1, 1)), Y[kept], NOISE, w
        return Y[i] - oracle.projected_process(*args)[0][0]

    np.testing.assert_allclose(
        leave_one_out_residuals(model, Phi, Y, sample_weight=weight)[:, 0],
        oracle.leave_one_out(left_out, N),
        rtol=1e-6,
    )
    noise = NOISE / (np.ones(N) if weight is None else weight)
    covariance = K_NM @ np.linalg.inv(K_MM) @ K_NM.T + np.diag(noise)
    assert log_marginal_likelihood(model, Phi, Y, sample_weight=weight) == pytest.approx(
        oracle.gaussian_log_density(Y, covariance)
    )


def test_with_all_points_as_representatives_it_is_exact():
    Phi, Phi_new = basis(N)
    assert Phi.shape[1] == N
    exact = fit_gaussian_process(KERNEL(X, X), Y, NOISE)
    projected = fit_projected_process(Phi, Y, NOISE)
    K_XN = KERNEL(X_NEW, X)
    np.testing.assert_allclose(projected.mean(Phi_new), exact.mean(K_XN), rtol=1e-7)
    np.testing.assert_allclose(
        projected.variance(Phi_new, KERNEL.diag(X_NEW)),
        exact.variance(K_XN, KERNEL.diag(X_NEW)),
        rtol=1e-7,
    )
    np.testing.assert_allclose(
        leave_one_out_residuals(projected, Phi, Y), exact.leave_one_out_residuals(), rtol=1e-7
    )
    assert log_marginal_likelihood(projected, Phi, Y) == pytest.approx(
        exact.log_marginal_likelihood()
    )


def test_more_representatives_than_features_and_duplicates_work():
    # A linear kernel of 12 features has rank 12 however many representatives there are.
    linear = PowerKernel(1)
    representatives = np.concatenate([X, X[:10]])
    whitening = whiten(linear(representatives, representatives))
    assert whitening.effective_rank == 12
    kept = representatives[whitening.pivots]
    model = fit_projected_process(whitening.features(linear(X, kept)), Y, NOISE)
    exact = fit_gaussian_process(linear(X, X), Y, NOISE)
    Phi_new = whitening.features(linear(X_NEW, kept))
    np.testing.assert_allclose(model.mean(Phi_new), exact.mean(linear(X_NEW, X)), rtol=1e-7)
    variance = model.variance(Phi_new, linear.diag(X_NEW), include_noise=False)
    assert np.all(variance >= 0)
    np.testing.assert_allclose(
        variance,
        exact.variance(linear(X_NEW, X), linear.diag(X_NEW), include_noise=False),
        rtol=1e-6,
    )


def test_unit_scale_changes_no_prediction_but_scales_the_variance():
    # Eq. (17): kernel and noise scaled alike.
    scale = unit_scale(np.var(7 * Y), KERNEL.diag(X))
    plain = fit_gaussian_process(KERNEL(X, X), Y, NOISE)
    scaled = fit_gaussian_process(scale * KERNEL(X, X), Y, scale * NOISE)
    K_XN = KERNEL(X_NEW, X)
    np.testing.assert_allclose(scaled.mean(scale * K_XN), plain.mean(K_XN), rtol=1e-9)
    np.testing.assert_allclose(
        scaled.variance(scale * K_XN, scale * KERNEL.diag(X_NEW)),
        scale * plain.variance(K_XN, KERNEL.diag(X_NEW)),
        rtol=1e-9,
    )


@given(st.integers(0, 2**31), st.integers(2, 6), st.sampled_from([1e-12, 1e-6, 1.0]))
def test_variances_are_never_negative(seed, n_distinct, noise):
    random = np.random.default_rng(seed)
    rows = normalize_rows(random.random((n_distinct, 3)))[random.integers(n_distinct, size=12)]
    K = KERNEL(rows, rows)
    whitening = whiten(K)
    Phi = whitening.features(K[:, whitening.pivots])
    model = fit_projected_process(Phi, random.normal(size=12), noise)
    assert np.all(model.variance(Phi, np.diag(K), include_noise=False) >= 0)
    assert np.all(np.diag(model.covariance(Phi, K)) >= 0)
    exact = fit_gaussian_process(K + 1e-9 * np.eye(12), random.normal(size=12), noise)
    assert np.all(exact.variance(K, np.diag(K), include_noise=False) >= 0)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_loo_curve_is_the_mean_size_of_leave_one_out_residuals(weight):
    Phi, _ = basis(M)
    Y2 = np.stack([Y, Y**2], axis=1)
    grid = np.geomspace(1e-4, 10, 7)
    selection = select_noise(Phi, Y2, grid, sample_weight=weight)
    w = np.ones(N) if weight is None else weight
    for noise, score in zip(grid, selection.scores, strict=True):
        model = fit_projected_process(Phi, Y2, noise, sample_weight=weight)
        residuals = leave_one_out_residuals(model, Phi, Y2, sample_weight=weight)
        assert score == pytest.approx(w @ np.abs(residuals).mean(axis=1) / w.sum(), rel=1e-6)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_groups_are_left_out_together(weight):
    Phi, _ = basis(M)
    groups = np.random.default_rng(1).integers(5, size=N)
    grid = np.geomspace(1e-3, 10, 5)
    selection = select_noise(Phi, Y, grid, sample_weight=weight, groups=groups)
    w = np.ones(N) if weight is None else weight
    for noise, score in zip(grid, selection.scores, strict=True):
        residuals = np.empty(N)
        for group in np.unique(groups):
            out, kept = groups == group, groups != group
            model = fit_projected_process(Phi[kept], Y[kept], noise, sample_weight=w[kept])
            residuals[out] = Y[out] - model.mean(Phi[out])[:, 0]
        assert score == pytest.approx(w @ np.abs(residuals) / w.sum(), rel=1e-6)


@pytest.mark.parametrize("criterion", ["loo", "evidence"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_search_finds_the_noise_that_the_whole_curve_has(monkeypatch, criterion, grouped):
    Phi, _ = basis(M)
    Y2 = np.stack([Y, np.sin(Y)], axis=1)
    options = {
        "criterion": criterion,
        "sample_weight": WEIGHT,
        "groups": np.arange(N) // 3 if grouped else None,
        "replicates": Replicates(5, np.array([0.3, 0.1])),
    }
    grid = noise_grid(float(np.var(Y2)))
    whole = select_noise(Phi, Y2, grid, **options)
    monkeypatch.setattr("qualms.gp.noise._MANY_COLUMNS", 0)
    searched = select_noise(Phi, Y2, grid, **options)
    assert searched.noise_variance == pytest.approx(whole.noise_variance, rel=1e-6)
    assert len(searched.grid) < 15
    places = np.searchsorted(grid, searched.grid)
    np.testing.assert_allclose(searched.scores, whole.scores[places], rtol=1e-6)


def test_one_odd_point_does_not_decide_the_noise():
    random = np.random.default_rng(0)
    Z = np.zeros((400, 11))
    Z[:, :10] = random.normal(size=(400, 10))
    Z[0] = np.eye(11)[10]  # nothing else is like it
    y = Z[:, :10] @ random.normal(size=10) + 0.01 * random.normal(size=400)
    y[0] = 1000.0
    grid = noise_grid(1.0)
    odd = select_noise(Z, y, grid).noise_variance
    assert odd == pytest.approx(select_noise(Z[1:], y[1:], grid).noise_variance, rel=1.0)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_evidence_curve_is_the_log_marginal_likelihood(weight):
    Phi, _ = basis(M)
    grid = np.geomspace(1e-4, 10, 7)
    selection = select_noise(Phi, Y, grid, criterion="evidence", sample_weight=weight)
    expected = [
        -log_marginal_likelihood(
            fit_projected_process(Phi, Y, noise, sample_weight=weight), Phi, Y, sample_weight=weight
        )
        for noise in grid
    ]
    # Equal up to a constant.
    np.testing.assert_allclose(
        selection.scores - selection.scores[0], np.array(expected) - expected[0], rtol=1e-7
    )


@pytest.mark.parametrize("criterion", ["loo", "evidence"])
def test_the_noise_of_synthetic_data_is_found(criterion):
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        Z = random.normal(size=(400, 10))
        y = Z @ random.normal(size=10) + 0.3 * random.normal(size=400)
        found.append(select_noise(Z, y, noise_grid(np.var(y)), criterion=criterion).noise_variance)
    # Leave-one-out looks at the error alone, which is flat near its minimum, so it scatters more.
    assert np.median(found) == pytest.approx(0.09, rel=0.1 if criterion == "evidence" else 1.0)


def test_noise_of_the_exact_process_is_that_of_the_projected_one():
    Phi, _ = basis(N)
    grid = noise_grid(1.0)
    exact = select_noise_from_kernel(KERNEL(X, X), Y, grid)
    assert exact.noise_variance == pytest.approx(
        select_noise(Phi, Y, grid).noise_variance, rel=1e-6
    )


def test_the_known_gram_and_fewer_rows_can_be_used():
    Phi, _ = basis(M)
    grid = noise_grid(1.0)
    full = select_noise(Phi, Y, grid)
    np.testing.assert_allclose(select_noise(Phi, Y, grid, gram=Phi.T @ Phi).scores, full.scores)
    some = select_noise(Phi, Y, grid, max_rows=10)
    assert some.scores.shape == full.scores.shape


def test_noise_at_the_end_of_the_grid_is_returned_as_it_is():
    Phi, _ = basis(M)
    selection = select_noise(Phi, Y, np.array([1e3, 1e4, 1e5]))
    assert selection.noise_variance in selection.grid


def test_flat_curves_do_not_divide_by_zero():
    selection = select_noise(np.zeros((5, 2)), np.ones(5), np.array([1.0, 2.0, 3.0]))
    assert selection.noise_variance > 0


@pytest.mark.parametrize("noise", [0.0, -1.0, np.nan, np.inf])
def test_noise_must_be_positive(noise):
    for fit in (fit_gaussian_process, fit_projected_process):
        with pytest.raises(InputError, match="noise_variance"):
            fit(np.eye(3), np.ones(3), noise)


def test_bad_input_is_named():
    with pytest.raises(InputError, match="y=shape"):
        fit_projected_process(np.eye(3), np.ones(4), 1.0)
    with pytest.raises(InputError, match="y=NaN"):
        fit_projected_process(np.eye(3), np.array([1.0, np.nan, 2.0]), 1.0)
    with pytest.raises(InputError, match="sample_weight=shape"):
        fit_projected_process(np.eye(3), np.ones(3), 1.0, sample_weight=np.ones(2))
    with pytest.raises(InputError, match="sample_weight=minimum"):
        fit_projected_process(np.eye(3), np.ones(3), 1.0, sample_weight=np.array([1.0, 0.0, 1.0]))
    with pytest.raises(InputError, match="Phi=NaN"):
        fit_projected_process(np.full((3, 3), np.nan), np.ones(3), 1.0)
    for K in (np.full((3, 3), np.nan), np.ones((3, 2))):
        with pytest.raises(InputError, match="K_NN"):
            fit_gaussian_process(K, np.ones(3), 1.0)
    with pytest.raises(InputError, match="grid"):
        select_noise(np.eye(3), np.ones(3), np.array([1.0, 0.5, 2.0]))
    with pytest.raises(InputError, match="criterion"):
        select_noise(np.eye(3), np.ones(3), noise_grid(1.0), criterion="guess")
