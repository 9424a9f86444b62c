import math
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import scipy.stats
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.integrate import trapezoid

from qualms.metrics import (
    binned_errors,
    bootstrap_scores,
    calibration_curve,
    conditional_area,
    conditional_error_density,
    covering_levels,
    ence,
    gaussian_log_density,
    log_likelihood,
    miscalibration_area,
    outlying_points,
    score,
    spearman,
    student_log_density,
)

quick = settings(max_examples=15)
N = 30
residual_arrays = arrays(np.float64, N, elements=st.floats(-10, 10))
std_arrays = arrays(np.float64, N, elements=st.floats(0.1, 10))


def calibrated(seed, n=N):
    rng = np.random.default_rng(seed)
    std = rng.lognormal(size=n)
    return std * rng.normal(size=n), std


def predicted(mean, std, members=None, factor_95=None):
    """A prediction whose mean need not be that of its members."""
    return SimpleNamespace(mean=mean, std=std, members=members, factor_95=factor_95)


def scored(z, std, *others):
    """Scores of residuals."""
    return score(z, predicted(np.zeros_like(z), std, *others))


def ensemble(seed, n, n_members=16, factor=1.0):
    """Reference values, mean, σ and members; errors are `factor` times those of members."""
    rng = np.random.default_rng(seed)
    std = np.exp(0.6 * rng.normal(size=n))
    mean = 10 * rng.normal(size=n)
    members = mean[:, None] + std[:, None] * rng.normal(size=(n, n_members))
    return mean + factor * std * rng.normal(size=n), mean, std, members


# --- densities ---


@pytest.mark.parametrize("seed", range(3))
def test_log_likelihood_is_the_oracle_s(seed):
    z, std = calibrated(seed)
    expected = oracle.gaussian_log_likelihood(z, std)
    assert log_likelihood(z, std) == pytest.approx(expected, rel=1e-12)
    assert np.mean(gaussian_log_density(z, std)) == pytest.approx(expected, rel=1e-12)
    for v in (0.3, 4.0):
        expected = oracle.gaussian_log_likelihood(z, std, v)
        assert log_likelihood(z, np.sqrt(v) * std) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dof", [1.0, 3.0, 15.0, 120.0])
def test_student_density_is_the_oracle_s(dof):
    z, scale = calibrated(1)
    expected = [math.log(oracle.student_density(*pair, dof)) for pair in zip(z, scale, strict=True)]
    np.testing.assert_allclose(student_log_density(z, scale, dof), expected, rtol=1e-10)
    np.testing.assert_allclose(student_log_density(z, scale, np.full(N, dof)), expected, rtol=1e-10)


# --- scores ---


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_the_oracle_s(seed):
    z, std = calibrated(seed)
    members = z[:, None] + std[:, None] * np.random.default_rng(seed).normal(size=(N, 5))
    crps = np.mean([oracle.crps_gaussian(*pair) for pair in zip(z[:3], std[:3], strict=True)])
    assert scored(z[:3], std[:3]).crps == pytest.approx(crps, rel=1e-5)
    scores = scored(z, std, members, 1.5).as_dict()
    expected = {
        "n_points": N,
        "rmse": np.sqrt(np.mean(z**2)),
        "mae": np.mean(np.abs(z)),
        "log_likelihood": log_likelihood(z, std),
        "crps": scores["crps"],
        "crps_ensemble": oracle.crps_ensemble(z, members, True),
        "miscalibration_area": miscalibration_area(z, std),
        "ence": ence(z, std),
        "sharpness": np.sqrt(np.mean(std**2)),
        "coverage_68": oracle.central_coverage(z, std, 0.68),
        "coverage_95": oracle.central_coverage(z, std, 0.95),
        "coverage_95_conformal": np.mean(np.abs(z) <= 1.5 * std),
        "spearman": oracle.spearman(z, std),
        "interval_score_95": oracle.interval_score(z, std, 0.95),
        "rms_calibration_error": oracle.rms_calibration_error(z, std),
    }
    assert scores == pytest.approx(expected, rel=1e-10)
    area = oracle.miscalibration_area(z, std)
    assert expected["miscalibration_area"] == pytest.approx(area, abs=1e-4)
    assert ence(z, std, 5) == pytest.approx(oracle.ence(z, std, 5), rel=1e-10)
    assert scored(z, std).crps_ensemble is scored(z, std).coverage_95_conformal is None
    assert score([1.0], mean=[1.5], std=[0.5]).rmse == 0.5
    assert all(name in str(scored(z, std)) for name in expected)


def test_the_conditional_area_of_calibrated_points_is_that_of_chance():
    rng = np.random.default_rng(0)
    results = []
    for _ in range(200):
        std = np.exp(rng.normal(size=600))
        results.append(conditional_area(std * rng.normal(size=600), std))
    areas = np.array([area.area for area in results])
    area = results[0]
    assert area.n_bins == 5
    assert np.mean(areas) == pytest.approx(area.by_chance, rel=0.05)
    assert np.mean(areas > area.limit) < 0.04
    assert areas.max() > 0.9 * area.limit
    # Copies are no further points.
    z, std, groups = np.repeat(rng.normal(size=150), 9), np.ones(1350), np.arange(1350) // 9
    copied = conditional_area(z, std, groups)
    assert (copied.n_bins, copied.limit) == (1, conditional_area(z[::9], std[::9]).limit)
    # Errors that cancel over all points.
    mixed = np.where(np.arange(1350) % 2, 0.4, 1.8)
    assert conditional_area(rng.normal(size=1350), mixed).area > 0.2
    assert conditional_area(np.ones(1), np.ones(1)).n_bins == 1


def test_spearman_with_ties_is_scipy_s():
    z, std = np.round(calibrated(2)[0]), np.round(calibrated(2)[1])
    std += 1
    assert spearman(z, std) == pytest.approx(scipy.stats.spearmanr(np.abs(z), std).statistic)
    assert spearman(z, np.ones(N)) == 0.0


def test_limits():
    z = np.array([0.0, 0.5, -2.0])
    np.testing.assert_array_equal(covering_levels(z, np.zeros(3)), [0.0, 1.0, 1.0])
    assert scored(z, np.full(3, 1e-300)).crps == pytest.approx(np.mean(np.abs(z)))
    assert log_likelihood([0.0, 1.0], [1.0, 1e-200]) == -np.inf


def test_student_intervals():
    rng = np.random.default_rng(0)
    std, nu = np.ones(100_000), 5.0
    z = rng.standard_t(nu, size=std.size) * np.sqrt((nu - 2) / nu)
    curve = calibration_curve(z, std, nu)
    np.testing.assert_allclose(curve.observed, curve.expected, atol=0.005)
    assert miscalibration_area(z, std, nu) < 0.004 < miscalibration_area(z, std)
    np.testing.assert_allclose(covering_levels(z, std, 1e9), covering_levels(z, std), atol=1e-6)


@quick
@given(residual_arrays, std_arrays, st.sampled_from([2.0**-9, 2.0**7]))  # exact in rounding
def test_units_order_and_shape_do_not_matter(z, std, scale):
    order = np.random.default_rng(0).permutation(N)
    first = score(z, mean=np.zeros(N), std=std).as_dict()
    again = score(
        -scale * z[order].reshape(5, 6), mean=np.zeros((5, 6)), std=scale * std[order].reshape(5, 6)
    )
    for name, value in again.as_dict().items():
        if value is None:
            continue
        if name in ("rmse", "mae", "crps", "sharpness", "interval_score_95"):
            value /= scale
        elif name == "log_likelihood":
            value += np.log(scale)
        assert value == pytest.approx(first[name], rel=1e-9, abs=1e-9), name


def test_outliers_are_large_for_their_std_and_among_all_errors():
    z, std = calibrated(0, 1000)
    z[3], z[5], std[7], z[7] = 500.0, 800.0, 1e-6, 1e-3
    assert outlying_points(z, std).tolist() in ([3, 5], [5, 3])


# --- diagnostics ---


def test_binned_errors_are_the_oracle_s():
    z, std = calibrated(0)
    bins = binned_errors(z, std, 5)
    columns = (bins.rmv, bins.rmse, bins.counts, bins.rmv_stderr, bins.rmse_stderr)
    np.testing.assert_allclose(np.transpose(columns), oracle.binned_errors(z, std, 5), rtol=1e-10)


def test_equal_std_is_never_separated():
    std = np.repeat([1.0, 2.0, 3.0], [3, 20, 7])
    bins = binned_errors(np.arange(30.0), std, 6)
    np.testing.assert_array_equal(bins.counts, [3, 20, 7])
    np.testing.assert_allclose(bins.rmv, [1.0, 2.0, 3.0])
    assert binned_errors(np.ones(30), np.ones(30)).counts.tolist() == [30]
    assert np.isinf(binned_errors([1.0, 2.0], [1.0, 2.0], 2).rmse_stderr).all()


def test_eq_18_is_the_ratio_of_kernel_sums():
    y, mean, std, members = ensemble(0, 40, n_members=3)
    both = conditional_error_density(y, mean, std, members, min_points=1e-3)
    errors = np.log(np.abs(y - mean)), np.log(np.abs(members - mean[:, None])).ravel()
    for conditional, ln_error, ln_sigma in zip(
        (both.true, both.model), errors, (np.log(std), np.log(np.repeat(std, 3))), strict=True
    ):
        rows, columns = np.flatnonzero(conditional.supported)[::4], slice(None, None, 5)
        density, marginal = oracle.conditional_density(
            ln_sigma,
            ln_error,
            both.bandwidth,
            conditional.ln_sigma[rows],
            conditional.ln_error[columns],
        )
        # Points move by up to a sixteenth of a bandwidth, to the centres of bins.
        np.testing.assert_allclose(
            conditional.density[rows, columns], density, atol=0.05 * density.max()
        )
        np.testing.assert_allclose(conditional.marginal[rows], marginal, atol=0.02 * marginal.max())
        integral = trapezoid(conditional.density[rows], conditional.ln_error, axis=1)
        np.testing.assert_allclose(integral, 1.0, rtol=1e-3)
        assert trapezoid(conditional.marginal, conditional.ln_sigma) == pytest.approx(1.0, rel=1e-3)


def total_variation(a, b):
    """Mean over well-populated σ of half the integrated distance of two conditionals."""
    rows = a.marginal > 0.3 * a.marginal.max()
    distance = trapezoid(np.abs(a.density - b.density), a.ln_error, axis=1)
    return 0.5 * float(np.mean(distance[rows]))


@pytest.mark.parametrize("with_members", [True, False])
def test_actual_and_predicted_densities_agree_if_calibrated(with_members):
    right, wrong = [], []
    for seed in range(3):
        y, mean, std, members = ensemble(seed, 4000)
        members = members if with_members else None
        both = conditional_error_density(y, mean, std, members)
        right.append(total_variation(both.true, both.model))
        both = conditional_error_density(2 * y - mean, mean, std, members)
        wrong.append(total_variation(both.true, both.model))
    assert np.mean(right) < 0.06
    # The total variation between |N(0,1)| and |N(0,4)| is 0.32.
    assert np.mean(wrong) == pytest.approx(0.32, abs=0.05)


def test_densities_of_special_points():
    y, mean, std, members = ensemble(0, 50)
    y[:3], std[3] = mean[:3], 0.0
    both = conditional_error_density(y, mean, std, members)
    assert np.isfinite(both.true.density).all()
    constant = conditional_error_density(y, mean, np.ones(50))
    assert constant.true.supported.any()
    assert not conditional_error_density([1.0], [0.0], [1.0]).true.supported.any()
    far = conditional_error_density(np.append(y, 1e300), np.append(mean, 0), np.append(std, 1e-300))
    assert far.true.density.size < 2e6


# --- bootstrap intervals ---


def slow_resamples(y, mean, std, members, groups, n_bootstrap, seed):
    """Draw groups, put their points side by side, and score them."""
    rng = np.random.default_rng(seed)
    labels = np.unique(groups)
    n_bins = int(np.clip(len(y) // 10, 1, 10))
    for _ in range(n_bootstrap):
        drawn = labels[rng.integers(len(labels), size=len(labels))]
        rows = np.concatenate([np.flatnonzero(groups == label) for label in drawn])
        drawn = predicted(mean[rows], std[rows], members[rows], 2.0)
        scores = score(y[rows], drawn).as_dict()
        # The number of bins is that of the data.
        yield scores | {"ence": ence(y[rows] - mean[rows], std[rows], min(n_bins, len(rows)))}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_quantiles_of_scores_of_resampled_points(grouped, ties):
    y, mean, std, members = ensemble(0, 150, n_members=5)
    if ties:
        std, mean, y = np.round(std, 1) + 0.1, np.round(mean), np.round(y)
    groups = np.random.default_rng(3).integers(40, size=150) if grouped else np.arange(150)
    options = {"n_bootstrap": 30, "level": 0.8, "rng": np.random.default_rng(7)}
    prediction = predicted(mean, std, members, 2.0)
    labels = groups if grouped else None
    bootstrap = bootstrap_scores(y, prediction, groups=labels, **options)
    slow = list(slow_resamples(y, mean, std, members, groups, 30, 7))
    assert bootstrap.scores == score(y, prediction)
    assert bootstrap.n_groups == len(np.unique(groups))
    assert bootstrap.intervals.keys() == slow[0].keys() - {"n_points"}
    for name, interval in bootstrap.intervals.items():
        value = getattr(bootstrap.scores, name)
        low, high = np.quantile([s[name] for s in slow], [0.1, 0.9])
        if name in ("miscalibration_area", "rms_calibration_error", "ence"):
            low, high = max(2 * value - high, 0), max(2 * value - low, 0)
        assert interval == pytest.approx((min(low, value), max(high, value)), rel=1e-9)


def test_intervals_contain_the_limit_of_many_points():
    y, mean, std, _ = ensemble(0, 100_000, factor=1.3)
    limits = score(y, mean=mean, std=std).as_dict()
    names = ("rmse", "log_likelihood", "miscalibration_area", "coverage_68", "spearman")
    inside = dict.fromkeys(names, 0)
    for seed in range(20):
        y, mean, std, _ = ensemble(seed + 1, 300, factor=1.3)
        ends = bootstrap_scores(y, predicted(mean, std), n_bootstrap=30, level=0.9).intervals
        for name in names:
            inside[name] += ends[name][0] <= limits[name] <= ends[name][1]
    for name, count in inside.items():
        assert count >= 14, name  # 18 expected; three standard deviations below


def test_impossible_errors_give_no_nan():
    y, mean, std, _ = ensemble(0, 40)
    std[0] = 1e-200
    bootstrap = bootstrap_scores(y, predicted(mean, std), n_bootstrap=30)
    assert not np.isnan(list(bootstrap.intervals.values())).any()


def test_one_sigma():
    z, std = calibrated(0, 4000)
    prediction = predicted(np.zeros(4000), std)
    wide = bootstrap_scores(2 * z, prediction).one_sigma
    assert wide.factor == pytest.approx(2.0, rel=0.05)
    assert wide.factor_interval[0] < 2.0 < wide.factor_interval[1]
    assert wide.within == np.mean(np.abs(2 * z) <= std)
    right = bootstrap_scores(z, prediction).one_sigma
    assert right.within_interval[0] < right.expected < right.within_interval[1]
    single = bootstrap_scores(z, prediction, groups=np.zeros(4000))
    assert single.one_sigma.within_interval is None
    assert not single.intervals


# --- bad input ---

Z, S = calibrated(0)


@pytest.mark.parametrize("function", [log_likelihood, ence, spearman, calibration_curve])
@pytest.mark.parametrize(
    ("parameter", "z", "std"),
    [
        ("residuals", [], []),
        ("residuals", [np.nan, 1.0], [1.0, 1.0]),
        ("residuals", ["a"], [1.0]),
        ("residuals", [1j], [1.0]),
        ("std", [1.0, 2.0], [1.0]),
        ("std", [1.0, 2.0], [1.0, -1.0]),
        ("std", [1.0, 2.0], [1.0, np.inf]),
    ],
)
def test_bad_arrays(function, parameter, z, std):
    with rejects(parameter):
        function(z, std)


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        ("std", lambda: log_likelihood([1.0], [0.0])),
        ("std", lambda: score(Z, mean=Z, std=0 * S)),
        ("scale", lambda: student_log_density(Z, -S, 3.0)),
        ("dof", lambda: student_log_density(Z, S, 0.0)),
        ("dof", lambda: covering_levels(Z, S, 2.0)),
        ("n_bins", lambda: binned_errors(Z, S, 31)),
        ("members", lambda: score(Z, predicted(Z, S, np.ones((29, 4))))),
        ("mean", lambda: score(Z, predicted(Z[:3], S))),
        ("groups", lambda: bootstrap_scores(Z, predicted(Z, S), groups=np.arange(3))),
        ("n_bootstrap", lambda: bootstrap_scores(Z, predicted(Z, S), n_bootstrap=2)),
        ("level", lambda: bootstrap_scores(Z, predicted(Z, S), level=1.0)),
        ("min_points", lambda: conditional_error_density(Z, 0 * Z, S, min_points=0.0)),
        ("y", lambda: conditional_error_density(Z, Z, S)),
    ],
)
def test_bad_arguments(parameter, call):
    with rejects(parameter):
        call()
