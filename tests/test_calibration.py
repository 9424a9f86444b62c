import dataclasses
import math

import numpy as np
import oracle
import pytest
import scipy.optimize
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import GradientBoostingRegressor

from qualms import Prediction, calibrate
from qualms.calibration.choice import confidence_intervals, cross_validate
from qualms.calibration.groups import fit_grouped, fit_groups
from qualms.calibration.members import (
    PerOutputCalibration,
    calibrated_members,
    source_members,
    with_equal_members,
)
from qualms.calibration.methods import (
    METHODS,
    NoCalibration,
    PowerCalibration,
    ShrinkageCalibration,
    SourcesCalibration,
    StudentCalibration,
    build_calibration,
    fit_calibration,
    variance_scale,
)
from qualms.calibration.points import CalibrationData, calibration_data, make_folds
from qualms.calibration.vectors import component_share, vector_std
from qualms.errors import CalibrationError, InputError, QualmsWarning
from qualms.gp.ensemble import ensemble_mean_std
from qualms.metrics import gaussian_log_density, log_likelihood, score


def synthetic(seed, n=1500, c=8, alpha=2.0, gamma=1.0, m=-1.0, tau=0.6):
    """A committee that obeys the assumptions, with α and γ known."""
    rng = np.random.default_rng(seed)
    s = np.exp(m + tau * rng.normal(size=n))
    mu = rng.normal(size=n)
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, c))
    return mu + alpha * s**gamma * rng.normal(size=n), members


def rng_members(n, c):
    return np.random.default_rng(0).normal(size=(n, c))


def weighted_data(seed=0, n=300, c=6):
    rng = np.random.default_rng(seed)
    ensemble_std = np.exp(rng.normal(size=n))
    return CalibrationData(
        rng.normal(size=n) * ensemble_std * 1.7,
        ensemble_std,
        np.full(n, c),
        rng.uniform(0.5, 2, size=n),
    )


def test_linear_is_the_closed_form_of_eq_9():
    y, members = synthetic(0)
    mean, std = ensemble_mean_std(members)
    fitted = calibrate(y, members, method="linear")
    assert fitted.alpha**2 == pytest.approx(variance_scale(y - mean, std))
    best = scipy.optimize.minimize_scalar(
        lambda a: -log_likelihood(y - mean, a * std), bounds=(0.1, 10), method="bounded"
    )
    assert fitted.alpha == pytest.approx(best.x, rel=1e-4)
    assert fitted.log_likelihood == pytest.approx(-best.fun)


@pytest.mark.parametrize("seed", range(3))
def test_power_maximises_the_likelihood_over_alpha_and_gamma(seed):
    data = weighted_data(seed)
    fitted = fit_calibration(data, "power")

    def negative(theta):
        std = np.exp(theta[0]) * data.ensemble_std ** theta[1]
        return -data.mean(gaussian_log_density(data.residuals, std))

    best = scipy.optimize.minimize(negative, [0.0, 1.0], method="Nelder-Mead", tol=1e-10)
    assert fitted.alpha == pytest.approx(np.exp(best.x[0]), rel=1e-3)
    assert fitted.gamma == pytest.approx(best.x[1], abs=1e-3)
    assert fitted.log_likelihood == pytest.approx(-best.fun, abs=1e-9)


def test_student_maximises_the_likelihood_of_t():
    data = weighted_data(1)
    data = dataclasses.replace(data, n_members=np.random.default_rng(1).integers(3, 12, size=300))
    fitted = fit_calibration(data, "student")
    dof, s0 = fitted.prior_dof, fitted.prior_std

    def mean_log_density(alpha):
        points = zip(data.residuals, data.ensemble_std, data.n_members, strict=True)
        densities = []
        for z, s, c in points:
            shrunk = math.sqrt((dof * s0**2 + (c - 1) * s**2) / (dof + c - 1))
            scale = shrunk * math.sqrt(alpha**2 + 1 / c)
            densities.append(math.log(oracle.student_density(z, scale, dof + c - 1)))
        return data.mean(densities)

    assert fitted.log_likelihood == pytest.approx(mean_log_density(fitted.alpha))
    for factor in (0.99, 1.01):
        assert mean_log_density(fitted.alpha) > mean_log_density(factor * fitted.alpha)


@pytest.mark.parametrize("dof", [2.5, 12.0])
def test_student_recovers_the_distribution_of_variances(dof):
    rng = np.random.default_rng(0)
    s = 0.3 * np.sqrt(dof / rng.chisquare(dof, size=20_000))
    c = rng.integers(3, 12, size=s.size)
    ensemble_std = s * np.sqrt(rng.chisquare(c - 1) / (c - 1))
    ensemble_std[:20] = 1e-9  # members that agree, such as for isolated atoms
    residuals = 2 * s * rng.normal(size=s.size)
    data = CalibrationData(residuals, ensemble_std, c, np.ones(s.size), centre=0.0)
    fitted = fit_calibration(data, "student")
    assert fitted.prior_dof == pytest.approx(dof, rel=0.12)
    assert fitted.prior_std == pytest.approx(0.3, rel=0.03)
    assert fitted.alpha == pytest.approx(2.0, rel=0.03)


def boosted(seed, c, n=600):
    """Committees of trees, on points that they were not trained on: reference values, members."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(300 + n, 4))
    y = np.sin(2 * X[:, 0]) * X[:, 1] + X[:, 2] ** 2 - X[:, 3] + 0.1 * rng.normal(size=len(X))
    members = []
    for _ in range(c):
        some = rng.integers(300, size=300)
        model = GradientBoostingRegressor(n_estimators=25, random_state=0).fit(X[some], y[some])
        members.append(model.predict(X[300:]))
    return y[300:], np.stack(members, axis=1)


@pytest.mark.parametrize("c", [3, 4, 5, 8, 16])
def test_sigma_is_right_however_few_members(c):
    """Of synthetic ensembles and of boosted trees: as wide as the errors, and the best Gaussian."""
    found = []
    for seed in range(4):
        y, members = boosted(seed, c) if seed < 1 else synthetic(seed, n=900, c=c, tau=0.4)
        mean, ensemble_std = ensemble_mean_std(members)
        new = np.arange(len(y)) % 3 == 0
        for method in ("student", "linear", "shrinkage"):
            fitted = calibrate(y[~new], members[~new], method=method)
            one = score(y[new], mean=mean[new], std=fitted.std(ensemble_std[new], c))
            found.append([one.sharpness / one.rmse, one.coverage_68, one.log_likelihood])
    student, linear, shrinkage = np.reshape(found, (4, 3, 3)).mean(axis=0)
    assert 0.9 < student[0] < 1.15
    assert 0.63 < student[1] < 0.77
    assert student[2] > max(linear[2], shrinkage[2]) - 0.03


@pytest.mark.parametrize("c", [3, 4, 16, 64])
def test_shrinkage_integrals_are_the_oracle_s(c):
    calibration = ShrinkageCalibration(alpha=1.3, gamma=0.8, log_std_mean=-1.0, log_std_std=0.7)
    # The last is an outlier of more than twenty of its standard deviations.
    z, s_hat = np.array([0.0, 0.5, -1.0, -3.0]), np.array([0.2, 0.9, 0.05, 0.05])
    density = calibration.density_of(CalibrationData(z, s_hat, np.full(4, c), np.ones(4)))
    variance = calibration.std(s_hat, c) ** 2
    for n in range(4):
        joint, marginal, expected = oracle.shrinkage_joint(z[n], s_hat[n], c, 1.3, 0.8, -1.0, 0.7)
        assert density[n] == pytest.approx(math.log(joint / marginal), abs=1e-3 if n < 3 else 0.5)
        assert variance[n] == pytest.approx(expected, rel=2e-4)


def test_shrinkage_maximises_the_likelihood_of_residuals_and_stds():
    y, members = synthetic(5, n=30, c=5, gamma=0.7)
    data = calibration_data(y, members)
    fitted = fit_calibration(data, "shrinkage")

    def total(alpha, gamma, m, tau):
        return sum(
            math.log(oracle.shrinkage_joint(z, s, c, alpha, gamma, m, tau, n_steps=301)[0])
            for z, s, c in zip(data.residuals, data.ensemble_std, data.n_members, strict=True)
        )

    theta = [fitted.alpha, fitted.gamma, fitted.log_std_mean, fitted.log_std_std]
    best = total(*theta)
    for k in range(4):
        for step in (-0.05, 0.05):
            moved = list(theta)
            moved[k] += step
            assert total(*moved) < best


def test_many_points_are_fitted_to_the_same_maximum(monkeypatch):
    """The start, by a subset or by another fit, does not matter."""
    data = calibration_data(*synthetic(0, n=4500, c=5, gamma=0.8))
    fast = fit_calibration(data, "shrinkage")
    again = fit_calibration(
        data, "shrinkage", fit_calibration(data.some(data.ensemble_std > 0.2), "shrinkage")
    )
    monkeypatch.setattr("qualms.calibration.methods.START_POINTS", 10**6)
    slow = fit_calibration(data, "shrinkage")
    assert fast.log_likelihood == pytest.approx(slow.log_likelihood, abs=1e-6)
    assert fast.parameters() == pytest.approx(slow.parameters(), rel=1e-3)
    assert fast.parameters() == pytest.approx(again.parameters(), rel=1e-3)


@pytest.mark.parametrize("method", ["linear", "power", "student", "shrinkage"])
def test_out_of_bag_fits_of_the_paper_require_five_absences(method):
    # Members saw three points of four: c is 4 on average.
    y, members = synthetic(0, n=2000, c=16)
    absent = np.random.default_rng(1).random(members.shape) < 0.25
    c = absent.sum(axis=1)
    assert np.count_nonzero(c == 3) > 100
    data = calibration_data(y, members, absent)
    used = data.n_members >= (5 if method in ("linear", "power") else 3)
    assert calibrate(y, members, absent=absent, method=method) == fit_calibration(
        data.some(used), method
    )
    few = c < 5  # and if hardly any point has five, all that there are
    found = calibrate(y[few], members[few], absent=absent[few], method=method)
    assert found == fit_calibration(data.some(data.n_members < 5), method)


@pytest.mark.parametrize(("method", "c"), [("power", 64), ("shrinkage", 6), ("shrinkage", 64)])
def test_gamma_is_recovered(method, c):
    fits = [calibrate(*synthetic(s, c=c, alpha=1.5, gamma=0.6), method=method) for s in range(8)]
    # The standard deviation of 64 members is noisy, which the power calibration takes for signal.
    assert np.mean([f.gamma for f in fits]) == pytest.approx(0.6, abs=0.03)
    assert np.mean([f.alpha for f in fits]) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_out_of_bag_equals_validation_calibration(method):
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
    mean, ensemble_std = ensemble_mean_std(fresh)
    z = (fresh_y - mean) / fitted.std(ensemble_std, n_members)
    assert np.mean(z**2) == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("method", METHODS)
def test_transformed_members_have_the_calibrated_std_and_the_same_mean(method):
    y, members = synthetic(0, n=100)
    fitted = calibrate(y, members, method=method)
    mean, ensemble_std = ensemble_mean_std(members)
    new_mean, new_std = ensemble_mean_std(calibrated_members(fitted, members))
    np.testing.assert_allclose(new_mean, mean, atol=1e-12)
    np.testing.assert_allclose(new_std, fitted.std(ensemble_std, members.shape[1]), rtol=1e-9)


def test_power_transform_is_eq_19():
    members = np.random.default_rng(0).normal(size=(4, 5))
    mean, sigma = ensemble_mean_std(members)
    expected = mean[:, None] + 1.5 * (members - mean[:, None]) * sigma[:, None] ** (0.7 - 1)
    calibration = PowerCalibration(alpha=1.5, gamma=0.7)
    np.testing.assert_allclose(calibrated_members(calibration, members), expected)


def test_student_std_is_that_of_t():
    calibration = StudentCalibration(alpha=1.2, prior_dof=3.0, prior_std=0.5)
    scale = math.sqrt(1.2**2 + 1 / 16) * math.sqrt((3 * 0.25 + 15) / 18)
    assert calibration.std(np.ones(1), 16)[0] == pytest.approx(scale * math.sqrt(18 / 16))
    # Without prior:
    calibration = StudentCalibration(alpha=1.2)
    scale = math.sqrt(1.2**2 + 1 / 16)
    assert calibration.std(np.ones(1), 16)[0] == pytest.approx(scale * math.sqrt(15 / 13))
    # t with one or two degrees of freedom has no variance: the central 68 % interval.
    assert calibration.std(np.ones(1), 3)[0] == pytest.approx(
        math.sqrt(1.2**2 + 1 / 3) * 1.3213, rel=1e-3
    )
    assert np.isfinite(calibration.std(np.ones(1), 2)[0])


def test_several_outputs_are_calibrated_each_by_itself():
    y1, m1 = synthetic(0, n=400, alpha=2.0)
    y2, m2 = synthetic(1, n=400, alpha=0.5)
    members = np.stack([m1, 100 * m2], axis=1)
    y = np.stack([y1, 100 * y2], axis=1)
    fitted = calibrate(y, members, method="student")
    assert isinstance(fitted, PerOutputCalibration)
    assert fitted.method == "student"
    alone = [calibrate(*pair, method="student").alpha for pair in ((y1, m1), (y2, m2))]
    np.testing.assert_allclose(fitted.alpha, alone, rtol=1e-6)
    np.testing.assert_array_equal(fitted.gamma, 1.0)
    together = calibrate(y, members, method="student", pool=True)
    flat = calibrate(y.ravel(), members.reshape(-1, members.shape[-1]), method="student")
    assert together == flat


def test_components_of_vectors_have_one_calibration():
    rng = np.random.default_rng(0)
    s = np.exp(0.4 * rng.normal(size=(300, 1)))
    members = s[..., None] * rng.normal(size=(300, 3, 6))
    y = 2 * s * rng.normal(size=(300, 3)) * [0.5, 1.0, 1.5]
    found = calibrate(y, members)
    assert found.method in METHODS
    std = found.apply(Prediction(members)).std
    np.testing.assert_allclose(std, found.std(members.std(axis=-1, ddof=1), 6))
    apart = calibrate(y, members, pool=False)
    assert np.ptp(apart.alpha) > 0.5
    # Standard deviations without members have the same shape.
    found = calibrate(y, mean=0 * y, std=s * np.ones(3), method="linear")
    assert found.alpha**2 == pytest.approx(variance_scale(y, s * np.ones(3)))


def test_calibration_of_a_mean_and_a_standard_deviation():
    data = committee_data(np.random.default_rng(0), "power", 400, 8)
    mean = np.linspace(0, 1, 400)
    given = {"mean": mean, "std": data.ensemble_std}
    y = mean + data.residuals
    for method in ("none", "linear", "power"):
        assert calibrate(y, **given, method=method).alpha == pytest.approx(
            fit_calibration(data, method).alpha, rel=1e-6
        )
    found = calibrate(y, **given)
    assert found.method == "power"
    assert calibrate(y, Prediction(**given)) == found
    applied = found.apply(Prediction(**given))
    np.testing.assert_allclose(applied.std, found.std(data.ensemble_std, 2))
    np.testing.assert_array_equal(applied.uncalibrated.std, data.ensemble_std)
    for parameter, options in {
        "method": {**given, "method": "student"},
        "members": {"mean": mean},
        "std": {**given, "std": 0 * mean},
    }.items():
        with rejects(parameter):
            calibrate(y, **options)
    with rejects("members"):
        calibrate(y, rng_members(400, 3), **given)


@pytest.mark.filterwarnings("ignore:Only 2 independent points")
def test_groups_are_left_out_together():
    """Of two groups with their own scale, neither is predicted by points of its own."""
    y, members = synthetic(0, n=200)
    groups = np.repeat([0, 1], 100)
    data = calibration_data(y, members, groups=groups)
    expected = cross_validate(data, ("none", "student")).chosen.calibration
    assert calibrate(y, members, groups=groups) == expected
    with rejects("groups"):
        calibrate(y, members, groups=groups[:3])


@settings(max_examples=5)
@given(st.integers(0, 100), st.sampled_from([1e-6, 1e3]))
def test_units_do_not_matter(seed, unit):
    y, members = synthetic(seed, n=80, c=6, gamma=0.8)
    ensemble_std = ensemble_mean_std(members)[1]
    for method in METHODS:
        plain = calibrate(y, members, method=method).std(ensemble_std, 6)
        scaled = calibrate(unit * y, unit * members, method=method).std(unit * ensemble_std, 6)
        np.testing.assert_allclose(scaled, unit * plain, rtol=2e-2)


def test_points_without_std_are_left_out_and_counted():
    y, members = synthetic(0, n=50)
    members[:7] = 1.0
    with pytest.warns(QualmsWarning):
        fitted = calibrate(y, members, method="student")
    assert fitted.n_points == 43


ALPHA, GAMMA = 1.7, 1.3


def committee_data(rng, method, n, n_members):
    """Points that are distributed as the method assumes.

    For linear and power their standard deviation is known, for others it is one of a sample.
    """
    s = np.exp(rng.normal(-1.0, 0.5, size=n))
    sigma = ALPHA * s ** (GAMMA if method in ("power", "shrinkage") else 1.0)
    if method in ("linear", "power"):
        return CalibrationData(sigma * rng.normal(size=n), s, np.full(n, n_members), np.ones(n))
    members = s[:, None] * rng.normal(size=(n, n_members))
    return calibration_data(sigma * rng.normal(size=n), members)


def correlated_data(rng, n_groups, per_group=5):
    """Points whose standard deviation is known, and whose errors are correlated within groups."""
    groups = np.repeat(np.arange(n_groups), per_group)
    s = np.exp(rng.normal(-1.0, 0.5, size=groups.size))
    common = rng.normal(size=n_groups)[groups]
    z = ALPHA * s * (0.8 * common + 0.6 * rng.normal(size=groups.size))
    return CalibrationData(z, s, np.full(groups.size, 8), np.ones(groups.size), groups=groups)


def test_intervals_over_groups_have_their_nominal_coverage():
    inside = []
    for seed in range(100):
        data = correlated_data(np.random.default_rng(seed), 60)
        calibration = fit_calibration(data, "linear")
        low, high = confidence_intervals(calibration, data).alpha
        inside.append(low <= ALPHA <= high)
    assert 0.88 <= np.mean(inside) < 1.0  # three standard errors about 0.95
    # Without groups the interval is too narrow.
    narrow = confidence_intervals(calibration, dataclasses.replace(data, groups=None)).alpha
    assert low < narrow[0] < narrow[1] < high


@pytest.mark.parametrize(
    ("method", "n", "n_members"),
    [("power", 300, 2), ("power", 3000, 2), ("student", 200, 6), ("shrinkage", 400, 8)],
)
def test_intervals_have_the_width_of_the_scatter_of_estimates(method, n, n_members):
    draws = [committee_data(np.random.default_rng(k), method, n, n_members) for k in range(60)]
    fitted = [fit_calibration(data, method) for data in draws]
    found = confidence_intervals(fitted[0], draws[0])
    names = ("alpha", "gamma") if method != "student" else ("alpha",)
    for name in names:
        low, high = getattr(found, name)
        assert low < getattr(fitted[0], name) < high
        scatter = np.std([getattr(one, name) for one in fitted])
        assert (high - low) / (2 * 1.96 * scatter) == pytest.approx(1.0, abs=0.35)
    if method == "student":
        assert found.gamma == (1.0, 1.0)


def test_intervals_at_the_edge():
    rng = np.random.default_rng(0)
    # The reference value is closer to the mean of the members than that is certain: α = 0.
    members = rng.normal(size=(60, 4))
    data = calibration_data(members.mean(axis=1) + 0.45 * rng.normal(size=60), members)
    calibration = fit_calibration(data, "student")
    assert calibration.alpha == 0
    lower, upper = confidence_intervals(calibration, data).alpha
    assert lower == 0 < upper < 0.5
    with rejects("level"):
        confidence_intervals(calibration, data, level=1.0)
    # Errors that do not depend on s, or less than that: γ = 0.
    s = np.exp(rng.normal(-1.0, 0.5, size=60))
    data = CalibrationData(rng.normal(size=60) * s**-0.1, s, np.full(60, 8), np.ones(60))
    calibration = fit_calibration(data, "power")
    assert calibration.gamma == 0
    lower, upper = confidence_intervals(calibration, data).gamma
    assert lower == 0 < upper < 1
    # All ensemble_stds alike: γ cannot be known.
    flat = CalibrationData(rng.normal(size=50), np.ones(50), np.full(50, 8), np.ones(50))
    for method in ("power", "linear", "none"):
        found = confidence_intervals(fit_calibration(flat, method), flat)
        assert np.all(np.isfinite(found.alpha))
        assert found.gamma == (None if method == "power" else (1.0, 1.0))
    assert found.alpha == found.gamma == (1.0, 1.0)
    alone = confidence_intervals(calibration, dataclasses.replace(data, groups=np.zeros(60)))
    assert alone.alpha is None
    assert alone.gamma is None


@pytest.mark.parametrize("method", ["linear", "power", "student", "shrinkage"])
def test_the_method_that_made_the_data_is_as_good_as_any(method):
    data = committee_data(np.random.default_rng(3), method, 1000, 4)
    # Shrinkage knows more than student: how the ensemble_stds of all points are distributed.
    methods = [m for m in METHODS if m != "shrinkage" or method == "shrinkage"]
    comparison = cross_validate(data, methods)
    found = {c.calibration.method: c for c in comparison.candidates}
    assert found[method].behind <= 2 * found[method].standard_error
    assert not found["none"].is_as_good
    chosen = comparison.chosen
    assert chosen.is_as_good
    if found[method].is_as_good:
        assert chosen.calibration.n_parameters <= found[method].calibration.n_parameters


def test_held_out_likelihoods_are_those_of_folds():
    groups = np.arange(60) // 3
    data = committee_data(np.random.default_rng(4), "student", 60, 5)
    data = dataclasses.replace(data, groups=groups)
    comparison = cross_validate(data, ["student"], n_folds=4, seed=1)
    total = 0.0
    for left_out in make_folds(groups, 4, 1):
        assert not set(groups[left_out]) & set(groups[~left_out])
        fitted, new = fit_calibration(data.some(~left_out), "student"), data.some(left_out)
        total += gaussian_log_density(new.residuals, fitted.std_of(new)).sum()
    assert comparison.candidates[0].log_likelihood == pytest.approx(total / 60)
    assert comparison.candidates[0].behind == 0


def grouped_data(rng, sizes, factors, n_members=8):
    data = committee_data(rng, "student", sum(sizes), n_members)
    labels = np.repeat([f"g{i}" for i in range(len(sizes))], sizes)
    residuals = data.residuals * np.repeat(factors, sizes)
    return dataclasses.replace(data, residuals=residuals), labels


def test_large_groups_keep_their_own_scale_and_small_ones_take_the_common_one():
    rng = np.random.default_rng(0)
    data, labels = grouped_data(rng, [3000, 3000, 6], [0.5, 1.5, 4.0])
    grouped = fit_groups(data, fit_calibration(data, "student"), labels)
    found = grouped.groups
    assert found["g1"].factor / found["g0"].factor == pytest.approx(3.0, rel=0.1)
    for name in ("g0", "g1"):
        assert found[name].factor == pytest.approx(found[name].alone, rel=0.02)
    assert 1.0 < found["g2"].factor < found["g2"].alone
    assert [g.n_points for g in found.values()] == [3000, 3000, 6]


def different_groups(seed, n=1000):
    """Points whose true γ is one, in four groups of very different errors."""
    rng = np.random.default_rng(seed)
    labels = np.array(["a", "b", "c", "d"])[np.arange(n) % 4]
    factors = np.array([1.0, 1.0, 3.0, 0.5])[np.arange(n) % 4]
    s = np.exp(rng.normal(-2, 0.5, size=n))
    members = s[:, None] * rng.normal(size=(n, 8))
    return calibration_data(2 * factors * s * rng.normal(size=n), members), labels


def test_groups_do_not_distort_what_they_have_in_common():
    (data, labels), (new, _) = different_groups(0), different_groups(10)
    found = {m: fit_grouped(data, m, labels) for m in ("student", "shrinkage")}
    shrinkage = found["shrinkage"]
    assert shrinkage.overall.gamma == pytest.approx(1.0, abs=0.15)
    # Without groups their differences look like another power of the standard deviation.
    assert fit_calibration(data, "shrinkage").gamma > 1.2
    likely = {
        method: gaussian_log_density(new.residuals, grouped.std_of(new, labels)).mean()
        for method, grouped in found.items()
    }
    assert likely["shrinkage"] > likely["student"]
    factors = shrinkage.factors(["a", "b", "c", "d"])
    np.testing.assert_allclose(factors / factors[0], [1, 1, 3, 0.5], rtol=0.15)
    assert np.mean(np.log(factors)) == pytest.approx(0, abs=0.01)


def test_the_likelihood_of_a_grouped_calibration_is_that_of_points_with_their_factors():
    data, labels = different_groups(0, n=200)
    grouped = fit_grouped(data, "linear", labels)
    density = gaussian_log_density(data.residuals, grouped.std_of(data, labels))
    assert grouped.overall.log_likelihood == pytest.approx(density.mean())


def test_grouped_members_have_the_grouped_std():
    rng = np.random.default_rng(1)
    data, labels = grouped_data(rng, [100, 100], [0.5, 2.0])
    grouped = fit_groups(data, fit_calibration(data, "student"), labels)
    members = rng.normal(size=(5, 8))
    some = ["g0", "g1", "g1", "new", "g0"]
    scaled = calibrated_members(grouped.overall, members, factors=grouped.factors(some))
    np.testing.assert_allclose(scaled.mean(axis=1), members.mean(axis=1))
    std = grouped.factors(some) * grouped.overall.std(members.std(axis=1, ddof=1), 8)
    np.testing.assert_allclose(scaled.std(axis=1, ddof=1), std)
    assert grouped.factors(["new"])[0] == 1.0
    with rejects("labels"):
        fit_groups(data, grouped.overall, ["g0"])


@pytest.mark.parametrize("n_components", [3, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_calibration_of_vectors_and_tensors(method, n_components):
    rng = np.random.default_rng(0)
    members = rng.normal(size=(40, n_components, 8)) * rng.uniform(0.1, 3, size=(40, 1, 1))
    ensemble_std = members.std(axis=-1, ddof=1)
    matrix = (
        ensemble_std[:, [[0, 5, 4], [5, 1, 3], [4, 3, 2]]] if n_components == 6 else ensemble_std
    )
    r = np.sqrt(np.mean(matrix.reshape(40, -1) ** 2, axis=1))
    np.testing.assert_allclose(vector_std(ensemble_std), r)
    data = calibration_data(2 * r * rng.normal(size=40), r[:, None] * rng.normal(size=(40, 8)))
    calibration = fit_calibration(data, method)
    found = calibrated_members(calibration, members, isotropy=0.0)
    np.testing.assert_allclose(found.mean(axis=-1), members.mean(axis=-1), atol=1e-12)
    np.testing.assert_allclose(vector_std(found.std(axis=-1, ddof=1)), calibration.std(r, 8))
    if method == "linear":
        np.testing.assert_allclose(found, calibrated_members(calibration, members))


@pytest.mark.parametrize("n_components", [3, 6])
def test_the_covariance_of_vectors_is_shrunk_towards_a_sphere(n_components):
    rng, u = np.random.default_rng(0), 0.4
    members = rng.normal(size=(5, n_components, 30)) * np.linspace(1, 2, n_components)[:, None]
    std = members.std(axis=-1, ddof=1)
    calibration = build_calibration("power", {"alpha": 2.0, "gamma": 0.5})
    found = calibrated_members(calibration, members, isotropy=u)
    np.testing.assert_allclose(found.mean(axis=-1), members.mean(axis=-1), atol=1e-12)
    m = np.array([1.0, 1, 1, 2, 2, 2][:n_components])  # the norm of a tensor counts yz and zy
    for raw, one, r, std_k in zip(members, found, vector_std(std), std, strict=True):
        C, after = (np.cov(np.sqrt(m)[:, None] * x) for x in (raw, one))
        mean = np.trace(C) / n_components
        wanted = calibration.std(r, 30) ** 2 / r**2 * ((1 - u) * C + u * mean * np.eye(len(C)))
        assert np.trace(after) == pytest.approx(np.trace(wanted))
        # Directions of small variance are a little off, because of those without any.
        np.testing.assert_allclose(after, wanted, atol=0.03 * np.trace(wanted) / n_components)
        share = component_share(std_k, np.full(n_components, r), u, m / m.mean())
        assert np.sum(m * share**2) == pytest.approx(m.sum())
        np.testing.assert_allclose(
            np.diag(after), m * (share * calibration.std(r, 30)) ** 2, rtol=0.05
        )


def test_a_direction_in_which_members_agree_has_no_uncertainty():
    members = np.random.default_rng(0).normal(size=(4, 3, 9))
    members[:, 2] = 1e-17 * members[:, 2]  # zero by symmetry
    calibration = build_calibration("linear", {"alpha": 2.0})
    std = calibrated_members(calibration, members, isotropy=1.0).std(axis=-1, ddof=1)
    assert np.all(std[:, :2] > 0.5)
    assert np.all(std[:, 2] < 1e-12)


def test_members_that_agree_stay_as_they_are():
    calibration = build_calibration("power", {"alpha": 2.0, "gamma": 0.5})
    same = np.ones((2, 3, 4))
    np.testing.assert_array_equal(calibrated_members(calibration, same, isotropy=0.0), same)
    found = calibrated_members(calibration, same)  # members that agree may be wrong
    np.testing.assert_allclose(found.mean(axis=-1), same.mean(axis=-1))
    sigma = calibration.std(np.zeros(same.shape[:-1]), same.shape[-1])
    np.testing.assert_allclose(found.std(axis=-1, ddof=1), sigma, atol=1e-12)


def test_factors_from_elsewhere_are_those_of_the_first_axis():
    members = np.random.default_rng(0).normal(size=(2, 3, 5))
    ensemble_std = members.std(axis=-1, ddof=1)
    found = Prediction(members).scaled(NoCalibration(), np.array([2.0, 0.5])).members
    np.testing.assert_allclose(found.std(axis=-1, ddof=1), ensemble_std * [[2.0], [0.5]])
    found = Prediction(members[0]).scaled(NoCalibration(), 3.0).members
    np.testing.assert_allclose(found, members[0].mean(-1, keepdims=True) * -2 + 3 * members[0])


@pytest.mark.parametrize(
    ("y", "members", "error"),
    [
        (np.zeros(4), np.ones((4, 5)), CalibrationError),  # equal members
        (np.zeros(4), 1 + 1e-16 * np.arange(20).reshape(4, 5), CalibrationError),  # rounding
        (np.arange(4.0), np.arange(4.0)[:, None] + [-1, 0, 1], CalibrationError),  # no residuals
        (np.zeros(4), rng_members(4, 2), CalibrationError),  # student needs three members
        (np.zeros(4), np.full((4, 5), np.nan), CalibrationError),
        (np.zeros(4), np.full((4, 5), np.inf), InputError),
        (np.zeros(3), np.ones((4, 5)), InputError),
        (np.zeros((4, 1)), np.ones((4, 5)), InputError),
    ],
)
@pytest.mark.filterwarnings("ignore:Only . independent points")
def test_data_that_determine_no_calibration(y, members, error):
    with pytest.raises(error):
        calibrate(y, members, method="student")


def test_members_without_a_prediction_are_left_out():
    y, members = synthetic(0, n=300)
    known = np.random.default_rng(1).random(members.shape) > 0.1
    found = calibrate(y, np.where(known, members, np.nan), method="student")
    assert found == calibrate(y, np.where(known, members, 1e3), absent=known, method="student")
    assert found.n_points > 250


def test_few_points_are_too_few():
    y, members = synthetic(0, n=8)
    with pytest.warns(QualmsWarning):
        calibrate(y, members, method="student")


@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_members_that_agree_have_an_uncertainty(method):
    """Labels are integers, so that trees agree for many points."""
    y, members = synthetic(0, n=400)
    with pytest.warns(QualmsWarning):
        found = calibrate(y.round(), members.round(), method=method)
    std = found.std(np.array([0.0, 1e-12, 1.0]), members.shape[-1])
    assert 0 < std[0] < 3 * std[2]
    assert np.all(np.isfinite(std))


def test_conformal_scores_of_few_points_are_cross_fitted():
    """σ with a parameter for each point would have scores of one: those of new points are not."""
    coverage = []
    for seed in range(200):
        y, members = synthetic(seed, n=60)
        data = calibration_data(y[:30], members[:30])
        fitted = fit_calibration(data, "shrinkage")
        quantile = fitted.conformal(data).quantile(0.9)
        z = np.abs(y[30:] - members[30:].mean(axis=1))
        std = fitted.std(members[30:].std(axis=1, ddof=1), members.shape[1])
        coverage.append(np.mean(z <= quantile * std))
    assert np.mean(coverage) > 0.9 - 2 * np.std(coverage) / np.sqrt(len(coverage))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_conformal_scores_of_very_few_points(method, n):
    y, members = synthetic(3, n=n)
    data = calibration_data(y, members, groups=np.arange(n) // 2)
    found = fit_calibration(data, method).conformal(data)
    assert np.all(np.isfinite(found.scores))


def test_points_absent_from_too_few_members():
    absent = np.zeros((20, 6), dtype=bool)
    absent[:, :2] = True
    with pytest.raises(CalibrationError):
        calibrate(np.zeros(20), rng_members(20, 6), absent=absent)
    with rejects("absent"):
        calibrate(np.zeros(20), rng_members(20, 6), absent=absent[:, :5])


def test_unknown_methods_are_rejected():
    with rejects("method"):
        fit_calibration(committee_data(np.random.default_rng(0), "linear", 10, 5), "magic")
    with rejects("method"):
        build_calibration("magic", {})


def two_kinds(rng, n_points, n_subsampled, n_posterior):
    """Members of two kinds, of correlated points, whose means are the prediction, 3."""
    raw = rng.normal(size=(n_points, 3)) @ rng.normal(size=(3, n_subsampled + n_posterior))
    for kind in (raw[:, :n_subsampled], raw[:, n_subsampled:]):
        kind += 3.0 - kind.mean(axis=1, keepdims=True)
    return raw


@pytest.mark.parametrize(
    ("alpha", "posterior", "n_members"), [(1.2, 0.0, 8), (0.0, 0.7, 16), (1.2, 0.7, 24)]
)
def test_members_that_carry_nothing_are_left_out(alpha, posterior, n_members):
    raw = two_kinds(np.random.default_rng(0), 5, 8, 16)
    expected = alpha**2 * np.cov(raw[:, :8]) + posterior**2 * np.cov(raw[:, 8:])
    calibration = SourcesCalibration(
        alpha=alpha, posterior=posterior, centre=0.0, n_subsampled=8, log_std_std=10.0
    )
    for n in (n_members, 40):
        more = dataclasses.replace(calibration, n_calibrated=0 if n == n_members else n)
        members = source_members(more, raw)
        assert members.shape == (5, n)
        np.testing.assert_allclose(members.mean(axis=1), 3.0, rtol=1e-12)
        np.testing.assert_allclose(np.cov(members), expected, rtol=1e-9, atol=1e-12)
        assert len(np.unique(members[0].round(12))) == n  # none is a copy


def test_calibrations_of_one_model_have_equally_many_members():
    calibrations = [
        SourcesCalibration(alpha=1.0, posterior=b, centre=0.0, n_subsampled=8) for b in (0.0, 0.5)
    ]
    raw = two_kinds(np.random.default_rng(1), 4, 8, 16)
    equal = with_equal_members(calibrations, 24)
    for before, after in zip(calibrations, equal, strict=True):
        assert source_members(after, raw).shape == (4, 24)
        np.testing.assert_allclose(
            np.cov(source_members(after, raw)), np.cov(source_members(before, raw)), rtol=1e-9
        )


def test_each_member_is_a_draw_of_the_whole_covariance():
    # Four of 68 members carry nearly all of the uncertainty. The probability that a difference of
    # one standard deviation has the other sign is 16 %; unmixed, at most 4 of 68 could say so.
    calibration = SourcesCalibration(alpha=1.0, posterior=1e-3, centre=0.0, n_subsampled=4)
    votes = []
    for seed in range(30):
        members = source_members(calibration, two_kinds(np.random.default_rng(seed), 2, 4, 64))
        difference = members[0] - members[1]
        votes.append(np.mean(difference < -difference.std(ddof=1)))
    assert np.mean(votes) == pytest.approx(0.159, abs=0.02)
