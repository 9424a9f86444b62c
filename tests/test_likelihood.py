"""Eqs. (5)-(8): the probability of the truth under a prediction and its error bar."""

import math

import numpy as np
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qualms.errors import InputError
from qualms.metrics import (
    covering_levels,
    gaussian_log_density,
    log_likelihood,
    root_mean_square,
    student_log_density,
)

quick = settings(deadline=None, max_examples=50)

N = 12
residual_arrays = arrays(np.float64, N, elements=st.floats(-10, 10))
std_arrays = arrays(np.float64, N, elements=st.floats(0.1, 10))
scales = st.floats(1e-3, 1e3)


@pytest.fixture
def scaled_log_likelihood(z, std, v, w=None):
    return log_likelihood(z, np.sqrt(v) * np.asarray(std), w)


def data(rng):
    std = rng.lognormal(size=N)
    return std * rng.normal(size=N), std


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# values


def test_standard_normal_at_zero():
    assert gaussian_log_density([0.0], [1.0]) == pytest.approx(-0.5 * math.log(2 * math.pi))


def test_eq_6_and_7_against_oracle(data):
    assert log_likelihood(*data) == pytest.approx(oracle.gaussian_log_likelihood(*data), rel=1e-13)


@pytest.mark.parametrize("v", [0.3, 1.0, 7.5])
def test_eq_8_against_oracle(data, v):
    expected = oracle.gaussian_log_likelihood(*data, variance_scale=v)
    assert scaled_log_likelihood(*data, v) == pytest.approx(expected, rel=1e-13)


def test_density_keeps_the_shape_and_mean_flattens_it(data):
    z, std = data
    table = gaussian_log_density(z.reshape(3, 4), std.reshape(3, 4))
    assert table.shape == (3, 4)
    np.testing.assert_array_equal(table.ravel(), gaussian_log_density(z, std))
    assert log_likelihood(z.reshape(3, 4), std.reshape(3, 4)) == pytest.approx(
        log_likelihood(z, std), rel=1e-14
    )


def test_float32_is_computed_in_float64(data):
    z, std = (a.astype(np.float32) for a in data)
    density = gaussian_log_density(z, std)
    assert density.dtype == np.float64
    np.testing.assert_array_equal(
        density, gaussian_log_density(z.astype(np.float64), std.astype(np.float64))
    )


def test_integer_weights_repeat_points(data, rng):
    z, std = data
    counts = rng.integers(0, 4, N)
    assert log_likelihood(z, std, counts) == pytest.approx(
        log_likelihood(np.repeat(z, counts), np.repeat(std, counts))
    )


def test_points_without_weight_do_not_matter_even_if_impossible():
    assert gaussian_log_density([1.0], [1e-200]) == -np.inf
    assert log_likelihood([0.0, 1.0], [1.0, 1e-200], [2.0, 0.0]) == log_likelihood([0.0], [1.0])
    assert scaled_log_likelihood([0.0, 1.0], [1.0, 1e-200], 2.0) == -np.inf


@pytest.mark.parametrize("dof", [0.7, 1.0, 4.0, 15.0, 120.0])
def test_student_against_oracle(data, dof):
    expected = [math.log(oracle.student_density(z, s, dof)) for z, s in zip(*data, strict=True)]
    np.testing.assert_allclose(student_log_density(*data, dof), expected, rtol=1e-11)


def test_student_takes_dof_per_point(data):
    dof = np.arange(1.0, N + 1)
    expected = scipy.stats.t.logpdf(data[0], dof, scale=data[1])
    np.testing.assert_allclose(student_log_density(*data, dof), expected, rtol=1e-11)


@pytest.mark.parametrize("dof", [1e8, 1e12, 1e15])
def test_student_becomes_gaussian(data, dof):
    np.testing.assert_allclose(
        student_log_density(*data, dof), gaussian_log_density(*data), rtol=1e-7, atol=1e-7
    )


def test_student_at_the_centre_and_far_out():
    # Cauchy: 1/(π s (1 + z²/s²)); far out 1/(π z²/s), although z² overflows.
    density = student_log_density([0.0, 1e300], [2.0, 1e-10], 1.0)
    far = -math.log(math.pi) - 2 * math.log(1e300) + math.log(1e-10)
    np.testing.assert_allclose(density, [-math.log(2 * math.pi), far], rtol=1e-14)


def test_covering_levels_are_the_central_levels(data):
    z, std = data
    expected = [abs(2 * scipy.stats.norm.cdf(v / s) - 1) for v, s in zip(z, std, strict=True)]
    np.testing.assert_allclose(covering_levels(z, std), expected, rtol=1e-12)
    expected_t = np.abs(2 * scipy.stats.t.cdf(z / (std * np.sqrt(3 / 5)), 5) - 1)
    np.testing.assert_allclose(covering_levels(z, std, dof=5.0), expected_t, rtol=1e-12)


@pytest.mark.parametrize("dof", [None, 5.0])
def test_covering_levels_of_exact_predictions(dof):
    np.testing.assert_array_equal(
        covering_levels([0.0, 1e-9, 0.0], [0.0, 0.0, 1.0], dof), [0, 1, 0]
    )


def test_root_mean_square_neither_overflows_nor_underflows():
    for size in (1e-300, 1.0, 1e300):
        values = size * np.array([3.0, -4.0])
        assert root_mean_square(values) == pytest.approx(size * math.sqrt(12.5), rel=1e-14)
    assert root_mean_square(np.zeros(3)) == 0.0


# properties


@quick
@given(residual_arrays, std_arrays, scales)
def test_change_of_units_shifts_by_its_logarithm(z, std, c):
    shifted = log_likelihood(z, std) - math.log(c)
    assert log_likelihood(c * z, c * std) == pytest.approx(shifted, abs=1e-9)
    np.testing.assert_allclose(
        student_log_density(c * z, c * std, 4.0),
        student_log_density(z, std, 4.0) - math.log(c),
        atol=1e-9,
    )


@quick
@given(residual_arrays, std_arrays, st.permutations(range(N)))
def test_order_of_points_does_not_matter(z, std, order):
    assert log_likelihood(z[order], std[order]) == pytest.approx(log_likelihood(z, std), abs=1e-9)


@quick
@given(residual_arrays, std_arrays, scales)
def test_eq_8_is_eq_7_with_scaled_std(z, std, v):
    assert scaled_log_likelihood(z, std, v) == pytest.approx(
        log_likelihood(z, math.sqrt(v) * std), rel=1e-9, abs=1e-9
    )


@quick
@given(residual_arrays, std_arrays, st.floats(0.01, 100).filter(lambda f: abs(f - 1) > 1e-3))
def test_eq_8_is_highest_at_the_mean_squared_z_score(z, std, factor):
    z = np.where(np.abs(z) < 1e-3, 1.0, z)
    best = float(np.mean((z / std) ** 2))
    assert scaled_log_likelihood(z, std, best) > scaled_log_likelihood(z, std, best * factor)


@quick
@given(residual_arrays, std_arrays, st.integers(1, 5))
def test_weights_need_not_be_normalised(z, std, factor):
    w = np.arange(N, dtype=float)
    assert log_likelihood(z, std, factor * w) == pytest.approx(
        log_likelihood(z, std, w), rel=1e-9, abs=1e-9
    )


def test_true_scale_is_most_likely_over_many_seeds():
    # ln L(c) − ln L(1) per point has mean −ln c − (1/c² − 1)/2 < 0 and variance (1/c² − 1)²/2.
    n = 2000
    for seed in range(30):
        rng = np.random.default_rng(seed)
        std = rng.lognormal(size=n)
        z = std * rng.normal(size=n)
        for c in (0.8, 1.25):
            excess = 0.5 * (1 / c**2 - 1)
            gain = log_likelihood(z, c * std) - log_likelihood(z, std)
            error = abs(excess) * math.sqrt(2 / n)
            assert gain < 0
            assert abs(gain - (-math.log(c) - excess)) < 5 * error


# bad input


def test_zero_std_is_counted():
    for function in (gaussian_log_density, log_likelihood):
        with pytest.raises(InputError, match="std=0 for 2 of 3 points") as caught:
            function([1.0, 2.0, 0.0], [0.0, 1.0, 0.0])
        assert caught.value.parameter == "std"


@pytest.mark.parametrize(
    ("z", "std", "parameter"),
    [
        ([], [], "residuals"),
        ([np.nan, 0.0], [1.0, 1.0], "residuals"),
        ([np.inf, 0.0], [1.0, 1.0], "residuals"),
        (["a", "b"], [1.0, 1.0], "residuals"),
        ([1j, 0.0], [1.0, 1.0], "residuals"),
        ([[1.0], [1.0, 2.0]], [1.0, 1.0], "residuals"),
        ([1.0, 2.0], [1.0], "std"),
        ([1.0, 2.0], [[1.0, 1.0]], "std"),
        ([1.0, 2.0], [1.0, np.nan], "std"),
        ([1.0, 2.0], [1.0, -1.0], "std"),
    ],
)
def test_bad_arrays_name_the_parameter(z, std, parameter):
    calls = (
        lambda: log_likelihood(z, std),
        lambda: scaled_log_likelihood(z, std, 1.0),
        lambda: covering_levels(z, std),
    )
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.parameter == parameter


@pytest.mark.parametrize("v", [0.0, -1.0, np.nan, np.inf])
def test_bad_variance_scale(v):
    with pytest.raises(InputError) as caught:
        scaled_log_likelihood([1.0], [1.0], v)
    assert caught.value.parameter == "variance_scale"


@pytest.mark.parametrize("w", [[1.0], [-1.0, 2.0], [0.0, 0.0], [np.nan, 1.0]])
def test_bad_weights(w):
    with pytest.raises(InputError) as caught:
        log_likelihood([1.0, 2.0], [1.0, 1.0], w)
    assert caught.value.parameter == "weights"


@pytest.mark.parametrize("dof", [0.0, -1.0, np.nan, [1.0], [3.0, 0.0]])
def test_bad_dof(dof):
    with pytest.raises(InputError) as caught:
        student_log_density([1.0, 2.0], [1.0, 1.0], dof)
    assert caught.value.parameter == "dof"


def test_bad_scale_is_called_scale():
    with pytest.raises(InputError) as caught:
        student_log_density([1.0, 2.0], [1.0, 0.0], 3.0)
    assert caught.value.parameter == "scale"


def test_dof_must_allow_a_variance_where_std_is_given():
    with pytest.raises(InputError) as caught:
        covering_levels([1.0], [1.0], dof=2.0)
    assert caught.value.parameter == "dof"
