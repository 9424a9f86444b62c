import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.errors import InputError, NumericalError
from qualms.gp.linalg import cholesky, cholesky_solve, cholesky_whiten, whiten

rng = np.random.default_rng(0)


def test_whitened_features_reproduce_the_nystrom_kernel():
    A = rng.normal(size=(6, 9))
    K_MM, K_XM = A @ A.T, rng.normal(size=(4, 9)) @ A.T
    whitening = whiten(K_MM)
    Phi = whitening.features(K_XM[:, whitening.pivots])
    np.testing.assert_allclose(Phi @ Phi.T, K_XM @ np.linalg.inv(K_MM) @ K_XM.T, rtol=1e-9)
    assert whitening.effective_rank == 6
    assert whitening.residual == 0.0


def test_kernel_weights_predict_as_whitened_weights_do():
    A = rng.normal(size=(6, 9))
    whitening = whiten(A @ A.T)
    K_XM = (rng.normal(size=(4, 9)) @ A.T)[:, whitening.pivots]
    w = rng.normal(size=(6, 2, 3))
    expected = np.einsum("ij,jkl->ikl", whitening.features(K_XM), w)
    result = np.einsum("ij,jkl->ikl", K_XM, whitening.kernel_weights(w))
    np.testing.assert_allclose(result, expected, rtol=1e-9)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**31))
def test_whitening_finds_the_rank_of_a_deficient_kernel(n_distinct, n_features, seed):
    random = np.random.default_rng(seed)
    distinct = random.normal(size=(n_distinct, n_features))
    rows = distinct[random.integers(n_distinct, size=20)]
    rank = np.linalg.matrix_rank(rows)
    whitening = whiten(rows @ rows.T)
    assert whitening.effective_rank == rank
    assert whitening.negative < 1e-12
    # Nothing is lost: the kernel of all is reproduced by those that are kept.
    Phi = whitening.features((rows @ rows.T)[:, whitening.pivots])
    np.testing.assert_allclose(Phi @ Phi.T, rows @ rows.T, atol=1e-7)


def test_constant_features_leave_one_representative():
    assert whiten(np.ones((5, 5))).effective_rank == 1


def test_an_indefinite_kernel_is_reported():
    K = np.array([[1.0, 2.0], [2.0, 1.0]])
    whitening = whiten(K)
    assert whitening.effective_rank == 1
    assert whitening.negative == pytest.approx(3.0)


def test_overwriting_saves_the_copy_and_changes_nothing():
    A = rng.normal(size=(6, 6))
    whitening = whiten(A @ A.T)
    K_XM = rng.normal(size=(4, 6))
    expected = whitening.features(K_XM.copy())
    in_place = whitening.features(K_XM, overwrite=True)
    np.testing.assert_array_equal(in_place, expected)
    assert np.shares_memory(in_place, K_XM)


def test_bad_matrices_are_refused():
    with pytest.raises(InputError, match="K_MM=shape"):
        whiten(np.ones((2, 3)))
    with pytest.raises(InputError, match="K_MM=NaN"):
        whiten(np.full((2, 2), np.nan))
    with pytest.raises(NumericalError, match="vanishes"):
        whiten(np.zeros((2, 2)))
    with pytest.raises(InputError, match="K_XM=3 columns"):
        whiten(np.eye(2)).features(np.ones((4, 3)))
    with pytest.raises(NumericalError, match="my matrix is not positive definite"):
        cholesky(-np.eye(2), what="my matrix")


def test_triangular_solves():
    A = rng.normal(size=(5, 5))
    A = A @ A.T + np.eye(5)
    B = rng.normal(size=(5, 2, 3))
    factor = cholesky(A, what="A")
    np.testing.assert_allclose(
        np.einsum("ij,jkl->ikl", A, cholesky_solve(factor, B)), B, atol=1e-12
    )
    V = cholesky_whiten(factor, B[:, 0])
    np.testing.assert_allclose(V.T @ V, B[:, 0].T @ np.linalg.inv(A) @ B[:, 0])
