import dataclasses
import math
import tracemalloc

import numpy as np
import oracle
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from qualms.calibration import shrinkage
from qualms.calibration.base import CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, PerOutputCalibration, calibrate, fit_calibration
from qualms.calibration.methods import (
    LinearCalibration,
    PowerCalibration,
    StudentCalibration,
    extrapolate_spread,
    variance_scale,
)
from qualms.calibration.selection import bootstrap_intervals, compare_calibrations
from qualms.calibration.shrinkage import ShrinkageCalibration
from qualms.errors import CalibrationError, InputError, QualmsWarning
from qualms.gp.ensemble import committee
from qualms.metrics import log_likelihood


def synthetic(seed, n=1500, c=8, alpha=2.0, gamma=1.0, m=-1.0, tau=0.6):
    """A committee that obeys the assumptions, with α and γ known."""
    rng = np.random.default_rng(seed)
    s = np.exp(m + tau * rng.normal(size=n))
    mu = rng.normal(size=n)
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, c))
    return mu + alpha * s**gamma * rng.normal(size=n), members


def spread_data(seed=0, n=300, c=6):
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=n))
    return CalibrationData(
        rng.normal(size=n) * spread * 1.7, spread, np.full(n, c), rng.uniform(0.5, 2, size=n)
    )


# --- the fits maximise what they say ---


def test_linear_is_the_closed_form_of_eq_9():
    y, members = synthetic(0)
    mean, std = committee(members)
    fitted = calibrate(y, members, method="linear")
    assert fitted.alpha**2 == pytest.approx(variance_scale(y - mean, std))
    best = scipy.optimize.minimize_scalar(
        lambda a: -log_likelihood(y - mean, a * std), bounds=(0.1, 10), method="bounded"
    )
    assert fitted.alpha == pytest.approx(best.x, rel=1e-4)
    assert fitted.log_likelihood == pytest.approx(-best.fun)


@pytest.mark.parametrize("seed", range(3))
def test_power_maximises_the_likelihood_over_alpha_and_gamma(seed):
    data = spread_data(seed)
    fitted = fit_calibration(data, "power")

    def negative(theta):
        std = np.exp(theta[0]) * data.spread ** theta[1]
        return -log_likelihood(data.residuals, std, data.weights)

    best = scipy.optimize.minimize(negative, [0.0, 1.0], method="Nelder-Mead", tol=1e-10)
    assert fitted.alpha == pytest.approx(np.exp(best.x[0]), rel=1e-3)
    assert fitted.gamma == pytest.approx(best.x[1], abs=1e-3)
    assert fitted.log_likelihood == pytest.approx(-best.fun, abs=1e-9)


def test_student_maximises_the_likelihood_of_t():
    data = spread_data(1)
    data = dataclasses.replace(data, n_members=np.random.default_rng(1).integers(3, 12, size=300))
    fitted = fit_calibration(data, "student")

    def mean_log_density(alpha):
        total = 0.0
        for z, s, c, w in zip(
            data.residuals, data.spread, data.n_members, data.weights, strict=True
        ):
            scale = s * math.sqrt(alpha**2 + 1 / c)
            total += w * math.log(oracle.student_density(z, scale, c - 1))
        return total / data.weights.sum()

    assert fitted.log_likelihood == pytest.approx(mean_log_density(fitted.alpha))
    for factor in (0.99, 1.01):
        assert mean_log_density(fitted.alpha) > mean_log_density(factor * fitted.alpha)


@pytest.mark.parametrize("c", [3, 4, 16, 64])
def test_shrinkage_integrals_are_the_oracle_s(c):
    calibration = ShrinkageCalibration(
        alpha=1.3, gamma=0.8, log_spread_mean=-1.0, log_spread_std=0.7
    )
    # The last is an outlier of more than twenty of its standard deviations.
    z, s_hat = np.array([0.0, 0.5, -1.0, -3.0]), np.array([0.2, 0.9, 0.05, 0.05])
    density = calibration.log_density(z, s_hat, c)
    variance = calibration.std(s_hat, c) ** 2
    for n in range(4):
        joint, marginal, expected = oracle.shrinkage_joint(z[n], s_hat[n], c, 1.3, 0.8, -1.0, 0.7)
        assert density[n] == pytest.approx(math.log(joint / marginal), abs=1e-3 if n < 3 else 0.5)
        assert variance[n] == pytest.approx(expected, rel=2e-4)


def test_shrinkage_maximises_the_likelihood_of_residuals_and_spreads():
    y, members = synthetic(5, n=60, c=5, gamma=0.7)
    data = calibration_data(y, members)
    fitted = fit_calibration(data, "shrinkage")

    def total(alpha, gamma, m, tau):
        return sum(
            math.log(oracle.shrinkage_joint(z, s, c, alpha, gamma, m, tau, n_steps=301)[0])
            for z, s, c in zip(data.residuals, data.spread, data.n_members, strict=True)
        )

    theta = [fitted.alpha, fitted.gamma, fitted.log_spread_mean, fitted.log_spread_std]
    best = total(*theta)
    for k in range(4):
        for step in (-0.03, 0.03):
            moved = list(theta)
            moved[k] += step
            assert total(*moved) < best


# --- known parameters are found again ---


def test_many_points_are_fitted_in_a_few_steps_to_the_same_maximum(monkeypatch):
    """The search in round coordinates, begun near, is that of all points from the beginning."""
    y, members = synthetic(0, n=5000, c=5, gamma=0.8)
    data = calibration_data(y, members)
    evaluations = []
    objective = shrinkage._objective

    def counted(theta, some, nodes):
        evaluations.append(len(some.residuals))
        return objective(theta, some, nodes)

    monkeypatch.setattr(shrinkage, "_objective", counted)
    fast = fit_calibration(data, "shrinkage")
    n_fast = evaluations.count(5000)
    again = fit_calibration(data.some(np.arange(5000) > 500), "shrinkage", fast)
    evaluations.clear()
    monkeypatch.setattr(shrinkage, "_ENOUGH", 10**6)
    slow = fit_calibration(data, "shrinkage")
    assert n_fast < 0.7 * len(evaluations)
    assert fast.log_likelihood == pytest.approx(slow.log_likelihood, abs=1e-6)
    assert fast.parameters() == pytest.approx(slow.parameters(), rel=1e-3)
    cold = fit_calibration(data.some(np.arange(5000) > 500), "shrinkage")
    assert again.parameters() == pytest.approx(cold.parameters(), rel=1e-3)


def test_shrinkage_keeps_no_more_than_its_nodes(monkeypatch):
    y, members = synthetic(0, n=6000)
    data = calibration_data(y, members)
    one_array = 8 * 6000 * len(shrinkage._NODES)

    def peak(work):
        tracemalloc.start()
        work()
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest / one_array

    expected = []
    assert peak(lambda: expected.append(fit_calibration(data, "shrinkage"))) < 6
    fitted = expected[0]
    assert peak(lambda: fitted.log_density(data.residuals, data.spread, data.n_members)) < 2
    # More points than it would keep the nodes of: these are found anew each time.
    monkeypatch.setattr(shrinkage, "_KEPT", 0)
    found = []
    assert peak(lambda: found.append(fit_calibration(data, "shrinkage"))) < 2
    assert found[0].parameters() == pytest.approx(fitted.parameters(), rel=1e-12)


@pytest.mark.parametrize("c", [3, 5, 16, 64])
@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_alpha_is_recovered_without_bias_however_few_members(method, c):
    found = [calibrate(*synthetic(seed, c=c), method=method).alpha for seed in range(8)]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - 2.0) < max(4 * error, 0.02)


@pytest.mark.parametrize("method", ["linear", "power", "student", "shrinkage"])
def test_internal_fits_of_the_paper_ask_for_five_absences(method):
    # Members saw three points of four: c is 4 on average.
    y, members = synthetic(0, n=2000, c=16)
    absent = np.random.default_rng(1).random(members.shape) < 0.25
    c = absent.sum(axis=1)
    assert np.count_nonzero(c == 3) > 100
    least = 5 if method in ("linear", "power") else 3
    expected = calibrate(y, members, absent=absent, method=method, min_absent=least)
    assert calibrate(y, members, absent=absent, method=method) == expected
    few = c < 5  # and if hardly any point has five, all that there are
    found = calibrate(y[few], members[few], absent=absent[few], method=method)
    by_three = calibrate(y[few], members[few], absent=absent[few], method=method, min_absent=3)
    assert found == by_three


def test_linear_overestimates_alpha_of_small_committees():
    # Why student exists: E[z²/ŝ²] = (α² + 1/c)(c − 1)/(c − 3).
    found = [calibrate(*synthetic(seed, c=8), method="linear").alpha for seed in range(8)]
    assert np.mean(found) == pytest.approx(math.sqrt((4 + 1 / 8) * 7 / 5), rel=0.03)


@pytest.mark.parametrize(("method", "c"), [("power", 64), ("shrinkage", 6), ("shrinkage", 64)])
def test_gamma_is_recovered(method, c):
    fits = [calibrate(*synthetic(s, c=c, alpha=1.5, gamma=0.6), method=method) for s in range(8)]
    # The spread of 64 members still carries noise, which the power calibration takes for signal.
    assert np.mean([f.gamma for f in fits]) == pytest.approx(0.6, abs=0.03)
    assert np.mean([f.alpha for f in fits]) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_internal_equals_external_calibration(method):
    """Few members are absent from each point; the calibration must hold for the whole committee."""
    rng = np.random.default_rng(0)
    n, n_members = 4000, 16
    s = np.exp(0.5 * rng.normal(size=n))
    mu = rng.normal(size=n)
    y = mu + 1.5 * s * rng.normal(size=n)
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, n_members))
    absent = rng.random((n, n_members)) < 0.25
    # Members that saw a point reproduce it: if they were counted the result would be wrong.
    seen = np.where(absent, members, y[:, None])
    fitted = calibrate(y, seen, absent=absent, method=method)
    assert fitted.alpha == pytest.approx(1.5, rel=0.06)
    fresh_y, fresh = synthetic(9, n=4000, c=n_members, alpha=1.5, m=0.0, tau=0.5)
    mean, spread = committee(fresh)
    z = (fresh_y - mean) / fitted.std(spread, n_members)
    assert np.mean(z**2) == pytest.approx(1.0, abs=0.08)


def test_alpha_is_zero_if_the_members_scatter_about_the_truth():
    rng = np.random.default_rng(0)
    members = rng.normal(size=(500, 6))
    fitted = calibrate(np.zeros(500) + 1e-3 * rng.normal(size=500), members)
    # z is then the error of the mean of six members.
    assert fitted.alpha < 0.15
    assert fitted.std(np.ones(1), 6)[0] > 0.4


# --- applying ---


@pytest.mark.parametrize("method", METHODS)
def test_transformed_members_have_the_calibrated_spread_and_the_same_mean(method):
    y, members = synthetic(0, n=100)
    fitted = calibrate(y, members, method=method)
    mean, spread = committee(members)
    new_mean, new_spread = committee(fitted.transform(members))
    np.testing.assert_allclose(new_mean, mean, atol=1e-12)
    np.testing.assert_allclose(new_spread, fitted.std(spread, members.shape[1]), rtol=1e-9)


def test_power_transform_is_eq_19():
    members = np.random.default_rng(0).normal(size=(4, 5))
    mean, sigma = committee(members)
    expected = mean[:, None] + 1.5 * (members - mean[:, None]) * sigma[:, None] ** (0.7 - 1)
    np.testing.assert_allclose(PowerCalibration(alpha=1.5, gamma=0.7).transform(members), expected)


def test_student_error_bar_is_the_standard_deviation_of_t():
    calibration = StudentCalibration(alpha=1.2)
    scale = math.sqrt(1.2**2 + 1 / 16)
    assert calibration.std(np.ones(1), 16)[0] == pytest.approx(scale * math.sqrt(15 / 13))
    # t with one or two degrees of freedom has no variance: the central 68 % interval.
    assert calibration.std(np.ones(1), 3)[0] == pytest.approx(
        math.sqrt(1.2**2 + 1 / 3) * 1.3213, rel=1e-3
    )
    assert np.isfinite(calibration.std(np.ones(1), 2)[0])


def test_shrinkage_pulls_spreads_towards_each_other():
    y, members = synthetic(0, c=4)
    fitted = calibrate(y, members, method="shrinkage")
    low, high = fitted.std(np.array([1e-4, 10.0]), 4) / np.array([1e-4, 10.0])
    assert low > fitted.alpha > high
    assert np.isfinite(fitted.std(np.zeros(2), 4)).all()
    assert fitted.std(np.ones((2, 3)), 4).shape == (2, 3)


def test_members_that_agree_stay_as_they_are():
    members = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    transformed = LinearCalibration(alpha=2.0).transform(members)
    np.testing.assert_array_equal(transformed[0], 1.0)


def test_several_outputs_are_calibrated_each_by_itself():
    y1, m1 = synthetic(0, n=400, alpha=2.0)
    y2, m2 = synthetic(1, n=400, alpha=0.5)
    members = np.stack([m1, 100 * m2], axis=1)
    fitted = calibrate(np.stack([y1, 100 * y2], axis=1), members)
    assert isinstance(fitted, PerOutputCalibration)
    assert fitted.method == "student"
    np.testing.assert_allclose(
        fitted.alpha, [calibrate(y1, m1).alpha, calibrate(y2, m2).alpha], rtol=1e-6
    )
    np.testing.assert_array_equal(fitted.gamma, 1.0)
    spread = committee(members)[1]
    np.testing.assert_allclose(
        committee(fitted.transform(members))[1], fitted.std(spread, 8), rtol=1e-9
    )


@given(st.integers(0, 100), st.sampled_from([1e-6, 1e3]))
def test_units_do_not_matter(seed, unit):
    y, members = synthetic(seed, n=80, c=6, gamma=0.8)
    spread = committee(members)[1]
    for method in METHODS:
        if method == "none":
            continue
        plain = calibrate(y, members, method=method)
        scaled = calibrate(unit * y, unit * members, method=method)
        np.testing.assert_allclose(
            scaled.std(unit * spread, 6), unit * plain.std(spread, 6), rtol=2e-2
        )


# --- comparing, intervals, extrapolating ---


def test_information_criteria_are_what_they_are_called():
    data = spread_data()
    for method in METHODS:
        fitted = fit_calibration(data, method)
        log_l = fitted.n_points * fitted.log_likelihood
        assert fitted.aic == pytest.approx(2 * fitted.n_parameters - 2 * log_l)
        assert fitted.bic == pytest.approx(fitted.n_parameters * math.log(300) - 2 * log_l)


def test_the_right_calibration_is_chosen():
    truth = {
        "student": {"c": 8, "gamma": 1.0, "tau": 1.5},
        "shrinkage": {"c": 4, "gamma": 0.5, "tau": 0.5},
    }
    for expected, settings in truth.items():
        data = calibration_data(*synthetic(1, n=3000, **settings))
        ranked = compare_calibrations(data)
        assert ranked[0].method == expected
        assert len(ranked) == len(METHODS)
        assert compare_calibrations(data, criterion="aic")[-1].method == "none"
    with pytest.raises(InputError, match="criterion"):
        compare_calibrations(data, criterion="dic")


@pytest.mark.parametrize("method", ["linear", "power", "student"])
def test_bootstrap_intervals_cover_what_they_should(method):
    # For linear and power the truth is what the fit to very many points finds.
    truth = calibrate(*synthetic(999, n=200_000, c=16), method=method)
    n_repeats, hits = 60, 0
    for seed in range(n_repeats):
        data = calibration_data(*synthetic(seed, n=300, c=16))
        interval = bootstrap_intervals(data, method, n_bootstrap=100, level=0.9)
        hits += interval.alpha[0] <= truth.alpha <= interval.alpha[1]
    # Binomial: 0.9 ± 0.04.
    assert hits / n_repeats >= 0.76


def test_bootstrap_of_shrinkage_and_of_groups():
    data = calibration_data(*synthetic(0, n=150, c=6))
    interval = bootstrap_intervals(data, "shrinkage", n_bootstrap=20)
    fitted = fit_calibration(data, "shrinkage")
    assert interval.alpha[0] < fitted.alpha < interval.alpha[1]
    assert interval.gamma[0] < fitted.gamma < interval.gamma[1]
    by_point = bootstrap_intervals(data, "linear", n_bootstrap=400)
    groups = np.arange(150) // 30
    by_group = bootstrap_intervals(data, "linear", n_bootstrap=400, groups=groups)
    assert by_group != by_point
    again = bootstrap_intervals(data, "linear", n_bootstrap=400, groups=groups)
    assert again == by_group


def test_bootstrap_refuses_bad_parameters():
    data = spread_data()
    with pytest.raises(InputError, match="n_bootstrap"):
        bootstrap_intervals(data, n_bootstrap=3)
    with pytest.raises(InputError, match="level"):
        bootstrap_intervals(data, level=1.0)


@pytest.mark.parametrize("finite_population", [True, False])
def test_extrapolation_finds_the_power_law(finite_population):
    n_train, sizes = 1000, [50, 100, 200, 400, 800]
    rng = np.random.default_rng(0)
    local = np.exp(rng.normal(size=300))
    factor = [n**-0.4 * (math.sqrt(1 - n / n_train) if finite_population else 1.0) for n in sizes]
    law = extrapolate_spread(
        sizes, [f * local for f in factor], n_train, finite_population=finite_population
    )
    assert law.exponent == pytest.approx(0.4)
    assert law.exponent_error == pytest.approx(0.0, abs=1e-9)
    # The calibrated spread of any size is that of a model of size N.
    for n, f in zip(sizes, factor, strict=True):
        assert law.alpha(n) * f == pytest.approx(n_train**-0.4)
        assert law.calibration(n).alpha == law.alpha(n)


def test_extrapolation_of_sub_sampled_means_is_the_standard_error():
    """The mean of n of N numbers: theory says σ/√N, and no target is needed."""
    rng = np.random.default_rng(0)
    n_train, sizes = 400, [40, 80, 160, 320]
    values = rng.normal(size=(60, n_train))
    spreads = []
    for n in sizes:
        draws = [rng.permutation(n_train)[:n] for _ in range(64)]
        means = np.stack([values[:, d].mean(axis=1) for d in draws], axis=1)
        spreads.append(means.std(axis=1, ddof=1))
    law = extrapolate_spread(sizes, spreads, n_train)
    assert law.exponent == pytest.approx(0.5, abs=0.05)
    assert np.mean(law.alpha(80) * spreads[1]) == pytest.approx(1 / math.sqrt(n_train), rel=0.1)


def test_extrapolation_refuses_bad_input():
    ones = np.ones(5)
    for sizes, spreads in [
        ([10], [ones]),
        ([10, 10], [ones, ones]),
        ([10, 200], [ones, ones]),
        ([10, 20], [ones]),
    ]:
        with pytest.raises(InputError, match="subsamples"):
            extrapolate_spread(sizes, spreads, 100)
    with pytest.raises(InputError, match="spreads"):
        extrapolate_spread([10, 20], [ones, 0 * ones], 100)
    law = extrapolate_spread([10, 20], [ones, ones], 100)
    with pytest.raises(InputError, match="subsample"):
        law.alpha(100)


# --- bad input ---


def test_points_without_spread_are_left_out_and_counted():
    y, members = synthetic(0, n=50)
    members[:7] = 1.0
    with pytest.warns(QualmsWarning, match="7 of 50 points"):
        fitted = calibrate(y, members)
    assert fitted.n_points == 43


def test_calibration_on_zero_spread_is_refused():
    with pytest.raises(CalibrationError, match="0 of 5 points can be used, 5 because"):
        calibrate(np.arange(5.0), np.ones((5, 4)))


def test_rounding_is_no_spread():
    members = np.full((6, 3), 0.1) + np.array([0, 1.4e-17, 2.8e-17])
    with pytest.raises(CalibrationError, match="all predict the same"):
        calibrate(np.arange(6.0), members)


def test_targets_that_are_the_predictions_are_refused():
    members = np.random.default_rng(0).normal(size=(5, 4))
    with pytest.raises(CalibrationError, match="exactly zero"):
        calibrate(members.mean(axis=1), members)


def test_too_few_absent_members_are_refused_with_a_remedy():
    y, members = synthetic(0, n=20)
    absent = np.zeros(members.shape, dtype=bool)
    absent[:, :2] = True
    with pytest.raises(CalibrationError, match=r"at least 3 members.*n_members.*subsample"):
        calibrate(y, members, absent=absent)


@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_two_members_are_too_few(method):
    y, members = synthetic(0, n=20, c=2)
    with pytest.raises(CalibrationError, match="at least 3"):
        calibrate(y, members, method=method)
    assert calibrate(y, members, method="linear").alpha > 0


def test_bad_arrays_are_named():
    y, members = synthetic(0, n=20)
    with pytest.raises(InputError, match="method='magic'"):
        calibrate(y, members, method="magic")
    with pytest.raises(InputError, match="members=shape"):
        calibrate(y[:-1], members)
    with pytest.raises(InputError, match=r"y=.*NaN"):
        calibrate(np.where(y > 0, np.nan, y), members)
    with pytest.raises(InputError, match="y=shape"):
        calibrate(y[:, None], members)
    with pytest.raises(InputError, match="sample_weight"):
        calibrate(y, members, sample_weight=-np.ones(20))
    with pytest.raises(InputError, match="sample_weight"):
        calibrate(y, members, sample_weight=np.zeros(20))


def test_a_constant_spread_leaves_gamma_at_one():
    rng = np.random.default_rng(0)
    pattern = np.array([-1.0, 0.0, 1.0])
    members = rng.normal(size=(50, 1)) + pattern
    fitted = calibrate(members.mean(axis=1) + rng.normal(size=50), members, method="power")
    assert fitted.gamma == 1.0


def test_parameters_build_the_calibration_again():
    fitted = calibrate(*synthetic(0, n=100), method="shrinkage")
    assert ShrinkageCalibration(**fitted.parameters()) == fitted
