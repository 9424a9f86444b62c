"""Calibration curve, binned errors, and Eq. (18)."""

import dataclasses
import math

import numpy as np
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.integrate import trapezoid

from qualms.errors import InputError
from qualms.metrics import (
    binned_errors,
    calibration_curve,
    conditional_error_density,
    coverage,
    gaussian_log_error_density,
)

quick = settings(deadline=None, max_examples=50)

N = 30
residual_arrays = arrays(np.float64, N, elements=st.floats(-10, 10))
std_arrays = arrays(np.float64, N, elements=st.floats(0.1, 10))


def calibrated(seed, n=N):
    rng = np.random.default_rng(seed)
    std = rng.lognormal(size=n)
    return std * rng.normal(size=n), std


def committee(seed, n, n_members=16, spread=0.7):
    """Truth and members from one distribution at each point, of known σ."""
    rng = np.random.default_rng(seed)
    std = np.exp(spread * rng.normal(size=n))
    members = std[:, None] * rng.normal(size=(n, n_members))
    return std * rng.normal(size=n), np.zeros(n), std, members


# calibration curve


def test_calibration_curve_counts():
    z, std = calibrated(0)
    curve = calibration_curve(z, std)
    assert curve.n_points == N
    np.testing.assert_allclose(curve.expected, np.linspace(0.01, 0.99, 99))
    counted = [oracle.central_coverage(z, std, p) for p in curve.expected]
    np.testing.assert_array_equal(curve.observed, counted)
    np.testing.assert_array_equal(curve.observed, [coverage(z, std, p) for p in curve.expected])


def test_calibration_curve_of_student_intervals():
    z, std = calibrated(1)
    levels = [0.3, 0.6, 0.9]
    curve = calibration_curve(z, std, levels, dof=4.0)
    np.testing.assert_array_equal(curve.observed, [coverage(z, std, p, dof=4.0) for p in levels])


@quick
@given(residual_arrays, std_arrays, st.permutations(range(N)))
def test_calibration_curve_rises_and_ignores_order(z, std, order):
    curve = calibration_curve(z, std)
    assert np.all(np.diff(curve.observed) >= 0)
    assert np.all((curve.observed >= 0) & (curve.observed <= 1))
    np.testing.assert_array_equal(curve.observed, calibration_curve(z[order], std[order]).observed)


def test_calibrated_curve_is_the_diagonal_over_many_seeds():
    n, n_seeds = 1000, 50
    levels = np.array([0.1, 0.5, 0.68, 0.95])
    observed = [calibration_curve(*calibrated(s, n), levels).observed for s in range(n_seeds)]
    error = np.sqrt(levels * (1 - levels) / (n * n_seeds))
    assert np.all(np.abs(np.mean(observed, axis=0) - levels) < 4 * error)


# binned errors


@pytest.mark.parametrize("n_bins", [1, 3, 7])
def test_binned_errors_against_oracle(n_bins):
    z, std = calibrated(2)
    bins = binned_errors(z, std, n_bins)
    rows = np.column_stack([bins.rmv, bins.rmse, bins.counts, bins.rmv_stderr, bins.rmse_stderr])
    np.testing.assert_allclose(rows, oracle.binned_errors(z, std, n_bins), rtol=1e-12)


@quick
@given(residual_arrays, std_arrays, st.integers(1, N))
def test_bins_hold_every_point_once_and_rise(z, std, n_bins):
    bins = binned_errors(z, std, n_bins)
    assert bins.counts.sum() == N
    assert np.all(bins.counts > 0)
    assert len(bins.counts) <= n_bins
    assert np.all(np.diff(bins.rmv) > 0)
    assert np.sum(bins.counts * bins.rmse**2) == pytest.approx(np.sum(z**2), rel=1e-9)


def test_equal_std_is_never_separated():
    std = np.array([1.0] * 5 + [2.0] * 3)
    bins = binned_errors(np.arange(8.0), std, 4)
    np.testing.assert_array_equal(bins.counts, [5, 3])
    np.testing.assert_allclose(bins.rmv, [1.0, 2.0])
    np.testing.assert_array_equal(bins.rmv_stderr, 0.0)
    assert len(binned_errors(np.arange(8.0), np.ones(8), 4).counts) == 1


def test_default_number_of_bins_and_bins_of_one_point():
    assert len(binned_errors(*calibrated(3, 5)).counts) == 1
    assert len(binned_errors(*calibrated(3, 45)).counts) == 4
    assert len(binned_errors(*calibrated(3, 1000)).counts) == 10
    single = binned_errors([1.0, 0.0], [1.0, 2.0], 2)
    assert np.all(np.isinf(single.rmse_stderr))
    exact = binned_errors([0.0, 0.0], [0.0, 0.0], 1)
    assert (exact.rmv[0], exact.rmse[0], exact.rmse_stderr[0]) == (0.0, 0.0, 0.0)


def test_standard_errors_are_the_spread_over_many_seeds():
    std = np.linspace(1.0, 1.2, 2000)  # the same bins in every run
    draws = [std * np.random.default_rng(seed).normal(size=2000) for seed in range(400)]
    runs = [binned_errors(z, std, 4) for z in draws]
    spread = np.std([r.rmse for r in runs], axis=0, ddof=1)
    claimed = np.mean([r.rmse_stderr for r in runs], axis=0)
    # A spread from 400 runs is known to 1/sqrt(800) = 3.5 %: four times that.
    np.testing.assert_allclose(claimed, spread, rtol=0.14)


# Eq. (18)


def test_gaussian_reference_is_a_density_with_its_mode_at_sigma():
    ln_error = np.linspace(-25, 6, 4001)
    density = gaussian_log_error_density(ln_error[None, :], np.array([[-1.0], [0.5]]))
    np.testing.assert_allclose(trapezoid(density, ln_error, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(ln_error[np.argmax(density, axis=1)], [-1.0, 0.5], atol=0.01)
    error = 0.8  # P(ln ε) = ε P(ε), and P(ε) is twice the normal density
    expected = error * 2 * scipy.stats.norm.pdf(error, scale=1.7)
    assert gaussian_log_error_density(math.log(error), math.log(1.7)) == pytest.approx(expected)
    assert gaussian_log_error_density(1e4, 0.0) == 0.0


def test_eq_18_against_kernel_sums():
    y, mean, std, members = committee(0, 40, n_members=3)
    h = (0.3, 0.4)
    grids = {"ln_sigma": np.linspace(-1, 1, 5), "ln_error": np.linspace(-4, 2, 9)}
    both = conditional_error_density(y, mean, std, members, bandwidth=h, min_points=1e-3, **grids)
    assert both.bandwidth == h
    true = oracle.conditional_density(np.log(std), np.log(np.abs(y - mean)), h, *grids.values())
    model_errors = np.log(np.abs(members - mean[:, None])).ravel()
    model = oracle.conditional_density(np.log(np.repeat(std, 3)), model_errors, h, *grids.values())
    for result, (density, marginal) in ((both.true, true), (both.model, model)):
        assert result.supported.all()
        # Ten bins per bandwidth h change h² by at most 1/400, and a peak by about half of that.
        np.testing.assert_allclose(result.density, density, atol=2e-3 * density.max())
        np.testing.assert_allclose(result.marginal, marginal, atol=2e-3 * marginal.max())


def test_eq_18_agrees_with_scipy_where_its_kernel_is_ours():
    # scipy's kernel has the covariance of the data. Make it diagonal: then it is a product too.
    rng = np.random.default_rng(1)
    x, e = rng.normal(size=(2, 300))
    x -= x.mean()
    e -= np.dot(x, e) / np.dot(x, x) * x
    result = conditional_error_density(np.exp(e), np.zeros(300), np.exp(x)).true
    kde = scipy.stats.gaussian_kde(np.array([x, e]))  # Scott's rule by default
    points = np.array(np.meshgrid(result.ln_sigma, result.ln_error, indexing="ij"))
    joint = kde(points.reshape(2, -1)).reshape(points.shape[1:])
    ours = result.density * result.marginal[:, None]
    rows = result.supported
    assert rows.sum() > 10
    np.testing.assert_allclose(ours[rows], joint[rows], atol=2e-3 * joint.max())


@pytest.mark.parametrize("with_members", [True, False])
def test_densities_are_normalised_and_not_negative(with_members):
    y, mean, std, members = committee(2, 3000)
    both = conditional_error_density(y, mean, std, members if with_members else None)
    for result in (both.true, both.model):
        assert np.all(result.density >= 0)
        integral = trapezoid(result.density, result.ln_error, axis=1)
        np.testing.assert_allclose(integral[result.supported], 1.0, atol=1e-3)
        assert np.all(integral[~result.supported] == 0)
        assert trapezoid(result.marginal, result.ln_sigma) == pytest.approx(1.0, abs=1e-3)
        assert 0 < result.supported.sum() < len(result.supported)
        assert result.density.shape == (len(result.ln_sigma), len(result.ln_error))
        assert result.n_dropped == 0
    np.testing.assert_array_equal(both.true.ln_error, both.model.ln_error)
    np.testing.assert_allclose(both.true.marginal, both.model.marginal, rtol=1e-10)


def total_variation(a, b):
    """Mean over well-populated σ of half the integrated distance of two conditionals."""
    rows = a.marginal > 0.3 * a.marginal.max()
    distance = trapezoid(np.abs(a.density - b.density), a.ln_error, axis=1)
    return 0.5 * float(np.mean(distance[rows]))


@pytest.mark.parametrize("with_members", [True, False])
def test_true_and_model_agree_if_truth_is_drawn_like_a_member(with_members):
    right, wrong = [], []
    for seed in range(5):
        y, mean, std, members = committee(seed, 4000)
        members = members if with_members else None
        both = conditional_error_density(y, mean, std, members)
        right.append(total_variation(both.true, both.model))
        both = conditional_error_density(2 * y, mean, std, members)
        wrong.append(total_variation(both.true, both.model))
    # About 300 points act on each row through a kernel of a quarter of its width.
    assert np.mean(right) < 0.06
    # The total variation between |N(0,1)| and |N(0,4)| is 0.32.
    assert np.mean(wrong) == pytest.approx(0.32, abs=0.05)


def test_model_density_is_the_gaussian_reference_for_narrow_kernels():
    y, mean, std, members = committee(4, 100_000)
    for given_members in (members, None):
        model = conditional_error_density(y, mean, std, given_members, bandwidth=(0.05, 0.1)).model
        reference = gaussian_log_error_density(model.ln_error[None], model.ln_sigma[:, None])
        rows = model.marginal > 0.5 * model.marginal.max()
        distance = trapezoid(np.abs(model.density - reference), model.ln_error, axis=1)
        assert np.mean(distance[rows]) < 0.06


@quick
@given(st.integers(0, 10), st.integers(-5, 5))
def test_change_of_units_moves_the_grid_only(seed, k):
    y, mean, std, members = committee(seed, 60, n_members=3)
    c = 2.0**k
    a = conditional_error_density(y, mean, std, members, min_points=2.0)
    b = conditional_error_density(c * y, c * mean, c * std, c * members, min_points=2.0)
    np.testing.assert_allclose(b.true.ln_sigma, a.true.ln_sigma + math.log(c), atol=1e-9)
    np.testing.assert_allclose(b.true.ln_error, a.true.ln_error + math.log(c), atol=1e-9)
    np.testing.assert_allclose(b.model.density, a.model.density, atol=1e-9)


def test_order_and_shape_of_points_do_not_matter():
    y, mean, std, members = committee(5, 60, n_members=3)
    order = np.random.default_rng(0).permutation(60)
    a = conditional_error_density(y, mean, std, members)
    for b in (
        conditional_error_density(y[order], mean[order], std[order], members[order]),
        conditional_error_density(
            *(v.reshape(20, 3) for v in (y, mean, std)), members.reshape(20, 3, 3)
        ),
    ):
        for field in dataclasses.fields(a.true):
            np.testing.assert_allclose(getattr(b.true, field.name), getattr(a.true, field.name))
            np.testing.assert_allclose(getattr(b.model, field.name), getattr(a.model, field.name))


def test_zero_errors_are_dropped_and_counted():
    y, mean, std, members = committee(6, 200, n_members=4)
    y[:3] = mean[:3]
    std[10:12] = 0.0
    members[20, 1] = mean[20]
    both = conditional_error_density(y, mean, std, members)
    assert both.true.n_dropped == 3 + 2
    assert both.model.n_dropped == 1 + 2 * 4
    for result in (both.true, both.model):
        assert all(np.all(np.isfinite(v)) for v in (result.density, result.marginal))


def test_constant_std_still_has_a_conditional():
    y, mean, _, members = committee(7, 300, spread=0.0)
    both = conditional_error_density(y, mean, np.ones(300), members)
    assert both.bandwidth[0] == 0.01
    assert trapezoid(both.true.marginal, both.true.ln_sigma) == pytest.approx(1.0, abs=1e-3)
    assert both.true.supported[np.argmin(np.abs(both.true.ln_sigma))]


def test_one_point_and_an_unsupported_grid():
    both = conditional_error_density([1.0], [0.0], [2.0], [[1.0, -1.0]])
    assert not both.true.supported.any()
    assert np.all(both.true.density == 0)
    both = conditional_error_density([1.0], [0.0], [2.0], [[1.0, -1.0]], min_points=0.9)
    assert both.true.supported.sum() == 1


def test_outliers_do_not_exhaust_memory():
    y, mean, std, members = committee(8, 500)
    y[0], std[1] = 1e-300, 1e-250
    both = conditional_error_density(y, mean, std, members)
    assert both.true.density.size < 2_000_000
    assert np.all(np.isfinite(both.true.density))


# bad input


@pytest.mark.parametrize("levels", [[0.0, 0.5], [0.5, 1.0], [-0.1], [np.nan], [], [[0.5]]])
def test_bad_levels(levels):
    with pytest.raises(InputError) as caught:
        calibration_curve([1.0], [1.0], levels)
    assert caught.value.parameter == "levels"


@pytest.mark.parametrize(
    ("z", "std", "parameter"),
    [
        ([], [], "residuals"),
        ([np.nan, 0.0], [1.0, 1.0], "residuals"),
        ([1.0, 2.0], [1.0], "std"),
        ([1.0, 2.0], [1.0, np.nan], "std"),
        ([1.0, 2.0], [1.0, -1.0], "std"),
    ],
)
@pytest.mark.parametrize("function", [calibration_curve, binned_errors])
def test_bad_arrays_name_the_parameter(function, z, std, parameter):
    with pytest.raises(InputError) as caught:
        function(z, std)
    assert caught.value.parameter == parameter


GOOD = {"y": [1.0, 2.0], "mean": [0.0, 0.0], "std": [1.0, 2.0], "members": [[1.0, 2.0], [3.0, 4.0]]}


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"y": []}, "y"),
        ({"y": [np.nan, 1.0]}, "y"),
        ({"y": [0.0, 0.0]}, "y"),
        ({"mean": [0.0]}, "mean"),
        ({"std": [1.0]}, "std"),
        ({"std": [-1.0, 1.0]}, "std"),
        ({"std": [0.0, 0.0]}, "std"),
        ({"members": [[1.0, 2.0]]}, "members"),
        ({"members": [[0.0, 0.0], [0.0, 0.0]]}, "members"),
        ({"bandwidth": (0.0, 0.1)}, "bandwidth"),
        ({"bandwidth": (0.1, np.nan)}, "bandwidth"),
        ({"bandwidth": (1e-9, 0.1)}, "bandwidth"),
        ({"bandwidth": 0.1}, "bandwidth"),
        ({"ln_sigma": [1.0, 0.0]}, "ln_sigma"),
        ({"ln_error": [[1.0]]}, "ln_error"),
        ({"min_points": 0.0}, "min_points"),
        ({"min_points": np.nan}, "min_points"),
    ],
)
def test_bad_density_input(changed, parameter):
    with pytest.raises(InputError) as caught:
        conditional_error_density(**(GOOD | changed))
    assert caught.value.parameter == parameter
