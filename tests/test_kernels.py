import numpy as np
import oracle
import pytest
from checks import rejects
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from qualms.gp.kernels import (
    PowerKernel,
    RBFKernel,
    WeightedSumKernel,
    average_over_structures,
    median_length_scale,
    normalize_rows,
    pack,
    pack_symmetric,
    squared_distances,
    unit_scale,
    unpack,
)

rng = np.random.default_rng(0)
X = normalize_rows(rng.random((7, 4)))
Y = normalize_rows(rng.random((5, 4)))


@pytest.mark.parametrize("exponent", [1, 2, 3, 6, 7, 3.5])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_power_kernel_is_the_oracle_s(exponent, offset):
    kernel = PowerKernel(exponent, offset)
    np.testing.assert_allclose(
        kernel(X, Y), oracle.power_kernel(X, Y, exponent, offset), rtol=1e-12
    )
    np.testing.assert_allclose(kernel.diag(X), np.diag(kernel(X, X)), rtol=1e-12)


@pytest.mark.parametrize("kernel", [PowerKernel(z, c) for z in (1, 2, 3.5) for c in (0.0, 1.0)])
def test_slopes_are_derivatives_of_the_kernel_by_the_product(kernel):
    products, step = X @ Y.T, 1e-6
    value, slope = kernel.value_and_slope(products)
    np.testing.assert_allclose(value, kernel(X, Y), rtol=1e-12)
    (high, _), (low, _) = (kernel.value_and_slope(products + h) for h in (step, -step))
    np.testing.assert_allclose(slope, (high - low) / (2 * step), rtol=1e-8)


def test_fractional_powers_of_negative_products_are_rejected_or_clipped():
    with rejects("exponent"):
        PowerKernel(1.5)(X, -Y)
    assert np.all(PowerKernel(1.5, 1.0)(X, -Y) >= 0)
    tiny = np.array([[1e-17, 1.0]])
    assert PowerKernel(1.5)(tiny, np.array([[-1.0, 0.0]]))[0, 0] == 0.0
    clipped, products = PowerKernel(1.5, clip=True)(X, Y - 0.5), X @ (Y - 0.5).T
    assert np.any(products < -0.1)
    np.testing.assert_allclose(clipped, np.maximum(products, 0) ** 1.5)
    np.testing.assert_allclose(PowerKernel(3, clip=True)(X, Y - 0.5), products**3)


def test_rbf_kernel_is_the_oracle_s_and_scikit_learn_s():
    kernel = RBFKernel(0.7)
    np.testing.assert_allclose(kernel(X, Y), oracle.rbf_kernel(X, Y, 0.7), rtol=1e-10)
    np.testing.assert_allclose(kernel(X, Y), RBF(0.7)(X, Y), rtol=1e-10)
    np.testing.assert_array_equal(kernel.diag(X), np.ones(7))
    with rejects("length_scale"):
        RBFKernel(0.0)


def test_distances_far_from_the_origin_keep_their_digits():
    far = X + 1e6
    np.testing.assert_allclose(squared_distances(far, far), squared_distances(X, X), atol=1e-8)


def test_weighted_sum_of_kernels_on_their_own_columns():
    kernels, columns = [PowerKernel(2), ConstantKernel(2.0) * RBF(0.5)], [slice(0, 2), slice(2, 4)]
    kernel = WeightedSumKernel(kernels, [0.3, 0.7], columns)
    expected = 0.3 * PowerKernel(2)(X[:, :2], Y[:, :2]) + 1.4 * RBF(0.5)(X[:, 2:], Y[:, 2:])
    np.testing.assert_allclose(kernel(X, Y), expected)
    np.testing.assert_allclose(kernel.diag(X), np.diag(kernel(X, X)))


def test_float32_stays_and_integers_become_numbers():
    kernel = WeightedSumKernel([PowerKernel(2.5), PowerKernel(1)], [0.5, 0.5])
    assert kernel(X.astype("f4"), Y.astype("f4")).dtype == np.float32
    counts = np.arange(6).reshape(3, 2)
    np.testing.assert_allclose(PowerKernel(2.5)(counts, counts), (counts @ counts.T) ** 2.5)


def test_averages_over_structures():
    K = PowerKernel(2)(X, Y)
    expected = np.stack([K[:2].mean(axis=0), K[2], K[3:].mean(axis=0)])
    np.testing.assert_allclose(average_over_structures(K, np.array([0, 2, 3, 7])), expected)


def test_unit_scale_makes_the_prior_variance_that_of_y():
    y = rng.normal(size=7) * 3
    diagonal = PowerKernel(2, 0.5).diag(X) * 5
    assert np.mean(unit_scale(np.var(y), diagonal) * diagonal) == pytest.approx(np.var(y))
    with rejects("k_diag"):
        unit_scale(1.0, np.zeros(7))


@given(arrays(np.float64, (4, 3), elements=st.floats(-1e3, 1e3)))
def test_normalised_rows_have_unit_length_or_are_null(A):
    norms = np.linalg.norm(normalize_rows(A), axis=1)
    null = ~A.any(axis=1)
    np.testing.assert_allclose(norms[~null], 1, rtol=1e-6)
    np.testing.assert_array_equal(norms[null], 0)


def test_median_length_scale():
    points = np.array([[0.0], [3.0], [3.0], [7.0]])
    assert median_length_scale(points) == pytest.approx(4.0)
    assert median_length_scale(np.ones((5, 2))) == 1.0


def test_leading_features_in_float64_make_float32_as_good():
    random = np.random.default_rng(0)
    falling = np.geomspace(1, 1e-6, 500)
    X = normalize_rows(random.normal(size=(200, 500)) * falling).astype(np.float32)
    exact = PowerKernel(2)(X.astype(np.float64), X.astype(np.float64))

    def error(n_exact):
        return np.sqrt(np.mean((PowerKernel(2, n_exact=n_exact)(X, X) - exact) ** 2))

    assert error(50) < 0.1 * error(0)
    assert error(500) < 1e-14
    assert PowerKernel(2, n_exact=50)(X, X).dtype == np.float64
    with rejects("n_exact"):
        PowerKernel(2, n_exact=-1)


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        ("exponent", lambda: PowerKernel(0.5)),
        ("exponent", lambda: PowerKernel(np.nan)),
        ("offset", lambda: PowerKernel(2, -1.0)),
        ("weights", lambda: WeightedSumKernel([PowerKernel()], [1.0, 2.0])),
        ("weights", lambda: WeightedSumKernel([PowerKernel()], [0.0])),
        ("columns", lambda: WeightedSumKernel([PowerKernel()], [1.0], [slice(1), slice(2)])),
        ("offsets", lambda: average_over_structures(np.ones((4, 2)), np.array([0, 3]))),
        ("offsets", lambda: average_over_structures(np.ones((4, 2)), np.array([0, 2, 2, 4]))),
    ],
)
def test_bad_input(parameter, call):
    with rejects(parameter):
        call()


def test_packed_matrices_have_the_inner_products_of_the_matrices():
    A, B = np.random.default_rng(0).normal(size=(2, 5, 4, 4))
    A, B = A + A.swapaxes(1, 2), B + B.swapaxes(1, 2)
    np.testing.assert_allclose(pack(A) @ pack(B).T, np.einsum("aij,bji->ab", A, B), atol=1e-12)
    np.testing.assert_allclose(unpack(pack(A)), A, atol=1e-14)
    upper = np.triu(A)
    np.testing.assert_allclose(pack_symmetric(upper), pack(upper + upper.swapaxes(1, 2)))
    assert pack(A[:0]).shape == pack_symmetric(A[:0]).shape == (0, 10)
