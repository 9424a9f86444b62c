import numpy as np
import oracle
import pytest
from checks import rejects
from hypothesis import given
from hypothesis import strategies as st

from qualms.errors import NumericalError, QualmsWarning
from qualms.gp.kernels import PowerKernel, normalize_rows
from qualms.gp.sparse_gp import (
    cholesky,
    leave_out,
    novelty_variance,
    posterior_variance,
    solve_projected_process,
    whiten,
)
from qualms.gp.sums import sum_rows

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
def test_projected_process_is_the_oracle_s(weight):
    Phi, Phi_new = basis(M)
    K_MM, K_NM, K_XM = KERNEL(X[:M], X[:M]), KERNEL(X, X[:M]), KERNEL(X_NEW, X[:M])
    mean, covariance = oracle.projected_process(
        K_MM, K_NM, K_XM, KERNEL(X_NEW, X_NEW), Y, NOISE, weight
    )
    model = solve_projected_process(sum_rows(Phi, Y, weight), NOISE)
    np.testing.assert_allclose(model.mean(Phi_new)[:, 0], mean, rtol=1e-7)
    variance = model.variance(Phi_new, KERNEL.diag(X_NEW))
    np.testing.assert_allclose(variance, np.diag(covariance) + NOISE, rtol=1e-7)

    def left_out(kept, i):
        w = None if weight is None else weight[kept]
        args = K_MM, K_NM[kept], K_NM[[i]], np.zeros((1, 1)), Y[kept], NOISE, w
        return Y[i] - oracle.projected_process(*args)[0][0]

    np.testing.assert_allclose(
        leave_out(model, Phi, Y, sample_weight=weight).residuals[:, 0],
        oracle.leave_one_out(left_out, N),
        rtol=1e-6,
    )


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_with_all_points_as_representatives_it_is_exact(weight):
    """Eqs. (1) and (2)."""
    Phi, Phi_new = basis(N)
    assert Phi.shape[1] == N
    noise = NOISE / (np.ones(N) if weight is None else weight)
    K_XN, K_XX = KERNEL(X_NEW, X), KERNEL(X_NEW, X_NEW)
    mean, covariance = oracle.exact_gp(KERNEL(X, X), K_XN, K_XX, Y, noise)
    projected = solve_projected_process(sum_rows(Phi, Y, weight), NOISE)
    np.testing.assert_allclose(projected.mean(Phi_new)[:, 0], mean, rtol=1e-7)
    variance = projected.variance(Phi_new, KERNEL.diag(X_NEW))
    np.testing.assert_allclose(variance, np.diag(covariance) + NOISE, rtol=1e-7)


@given(st.integers(0, 2**31), st.integers(2, 6), st.sampled_from([1e-12, 1e-6, 1.0]))
def test_variances_are_never_negative(seed, n_distinct, noise):
    random = np.random.default_rng(seed)
    rows = normalize_rows(random.random((n_distinct, 3)))[random.integers(n_distinct, size=12)]
    K = KERNEL(rows, rows)
    whitening = whiten(K)
    Phi = whitening.features(K[:, whitening.pivots])
    model = solve_projected_process(sum_rows(Phi, random.normal(size=12)), noise)
    assert np.all(posterior_variance(Phi, model.factor, noise) >= 0)
    assert np.all(novelty_variance(Phi, np.diag(K)) >= 0)


rng = np.random.default_rng(0)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**31))
def test_whitening_finds_the_rank_of_a_deficient_kernel(n_distinct, n_features, seed):
    random = np.random.default_rng(seed)
    distinct = random.normal(size=(n_distinct, n_features))
    rows = distinct[random.integers(n_distinct, size=20)]
    rank = np.linalg.matrix_rank(rows)
    whitening = whiten(rows @ rows.T)
    assert whitening.effective_rank == rank
    # Nothing is lost: the kernel of all is reproduced by those that are kept.
    Phi = whitening.features((rows @ rows.T)[:, whitening.pivots])
    np.testing.assert_allclose(Phi @ Phi.T, rows @ rows.T, atol=1e-7)


@pytest.mark.parametrize("rounding", [1e-15, 1e-7])
def test_rounding_of_the_kernel_does_not_change_the_order(rounding):
    """Of three elements: kernels between these vanish, and most variances are equal at first."""
    rows = normalize_rows(rng.random((30, 8)))
    K = KERNEL(rows, rows) * np.kron(np.eye(3), np.ones((10, 10)))
    expected = whiten(K)
    assert expected.pivots[:3].tolist() == [0, 10, 20]
    for _ in range(10):
        scale = 1.0 + rounding * rng.normal(size=30)
        found = whiten(scale[:, None] * K * scale)
        np.testing.assert_array_equal(found.pivots, expected.pivots)
    L = expected.factor
    np.testing.assert_allclose(L @ L.T, K[np.ix_(expected.pivots, expected.pivots)], atol=1e-14)


def test_the_first_representative_is_that_of_the_largest_variance():
    assert whiten(np.diag([1.0, 3.0, 2.0])).pivots.tolist() == [1, 2, 0]


def test_an_indefinite_kernel_is_reported():
    K = np.array([[1.0, 2.0], [2.0, 1.0]])
    with pytest.warns(QualmsWarning):
        whitening = whiten(K)
    assert whitening.effective_rank == 1


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        ("noise_variance", lambda: solve_projected_process(sum_rows(np.eye(3), np.ones(3)), -1.0)),
        ("y", lambda: solve_projected_process(sum_rows(np.eye(3), np.ones(4)), 1.0)),
        ("y", lambda: solve_projected_process(sum_rows(np.eye(3), np.full(3, np.nan)), 1.0)),
        (
            "sample_weight",
            lambda: solve_projected_process(sum_rows(np.eye(3), np.ones(3), np.zeros(3)), 1.0),
        ),
        ("K_MM", lambda: whiten(np.ones((2, 3)))),
        ("K_MM", lambda: whiten(np.full((2, 2), np.nan))),
        ("K_XM", lambda: whiten(np.eye(2)).features(np.ones((4, 3)))),
    ],
)
def test_bad_input(parameter, call):
    with rejects(parameter):
        call()


def test_matrices_that_are_not_positive_definite():
    with pytest.raises(NumericalError):
        whiten(np.zeros((2, 2)))
    with pytest.raises(NumericalError):
        cholesky(-np.eye(2))
