"""Scores of predictions and of their error bars."""

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
    Scores,
    calibration_curve,
    coverage,
    crps_ensemble,
    crps_gaussian,
    ence,
    interval_score,
    log_likelihood,
    mae,
    miscalibration_area,
    rmse,
    score_arrays,
    sharpness,
    spearman,
)

quick = settings(deadline=None, max_examples=50)

N = 24
# Away from subnormal numbers, which lose digits when scaled.
residual_arrays = arrays(
    np.float64, N, elements=st.integers(-(10**6), 10**6).map(lambda k: k * 1e-5)
)
std_arrays = arrays(np.float64, N, elements=st.floats(0.1, 10))
member_arrays = arrays(np.float64, (N, 5), elements=st.floats(-10, 10))
# Powers of two scale without rounding, so no comparison of ranks or levels can tip over.
scales = st.integers(-20, 20).map(lambda k: 2.0**k)

#: Scores of (residuals, std), those in the units of y and those without units.
WITH_UNITS = {
    "crps": crps_gaussian,
    "interval_score": lambda z, s: interval_score(z, s, 0.9),
    "rmse": lambda z, s: rmse(z),
    "mae": lambda z, s: mae(z),
    "sharpness": lambda z, s: sharpness(s),
}
WITHOUT_UNITS = {
    "miscalibration_area": miscalibration_area,
    "ence": ence,
    "spearman": spearman,
    "coverage": lambda z, s: coverage(z, s, 0.7),
}
ALL = WITH_UNITS | WITHOUT_UNITS
WITH_STD = {k: f for k, f in ALL.items() if k not in ("rmse", "mae", "sharpness")}


def calibrated(seed, n=N):
    rng = np.random.default_rng(seed)
    std = rng.lognormal(size=n)
    return std * rng.normal(size=n), std


# known values


def test_errors_and_sharpness_by_hand():
    assert rmse([3.0, -4.0]) == pytest.approx(math.sqrt(12.5), rel=1e-15)
    assert mae([3.0, -4.0]) == 3.5
    assert sharpness([3.0, 4.0]) == pytest.approx(math.sqrt(12.5), rel=1e-15)


def test_crps_of_the_standard_normal_at_its_mean():
    assert crps_gaussian([0.0], [1.0]) == pytest.approx((math.sqrt(2) - 1) / math.sqrt(math.pi))


def test_crps_of_a_certain_prediction_is_the_absolute_error():
    z = [0.0, -2.0, 5.0]
    assert crps_gaussian(z, [0.0] * 3) == pytest.approx(7 / 3, rel=1e-15)
    assert crps_gaussian(z, [1e-310] * 3) == pytest.approx(7 / 3, rel=1e-15)


@pytest.mark.parametrize("z", [-3.0, -0.4, 0.0, 0.7, 2.5])
@pytest.mark.parametrize("std", [0.5, 2.0])
def test_crps_gaussian_is_its_defining_integral(z, std):
    assert crps_gaussian([z], [std]) == pytest.approx(oracle.crps_gaussian(z, std), rel=1e-6)


def test_fair_crps_of_two_members_by_hand():
    # |0 − 1|/2 + |4 − 1|/2 − |4 − 0|/2 = 0; as spikes 2 − 4/4 = 1.
    assert crps_ensemble([1.0], [[0.0, 4.0]]) == 0.0
    assert crps_ensemble([1.0], [[0.0, 4.0]], fair=False) == 1.0
    # (5 + 3)/2 − 2/2, with the truth outside.
    assert crps_ensemble([5.0], [[0.0, 2.0]]) == 3.0
    # At most one member strictly on either side of the truth: no pair betrays an error.
    assert crps_ensemble([2.0, 0.0], [[0.0, 2.0, 4.0], [0.0, 0.0, 2.0]]) == pytest.approx(0.0)


def test_ensemble_of_one_member_is_its_absolute_error():
    assert crps_ensemble([1.0, 2.0], [[4.0], [2.0]], fair=False) == 1.5


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("n_members", [2, 3, 7, 16])
def test_crps_ensemble_against_pairs(fair, n_members):
    rng = np.random.default_rng(n_members)
    y, members = rng.normal(size=N), rng.normal(size=(N, n_members))
    members[0] = members[0, 0]
    assert crps_ensemble(y, members, fair=fair) == pytest.approx(
        oracle.crps_ensemble(y, members, fair), rel=1e-13
    )
    assert crps_ensemble(
        y.reshape(4, 6), members.reshape(4, 6, n_members), fair=fair
    ) == pytest.approx(crps_ensemble(y, members, fair=fair), rel=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_miscalibration_area_against_midpoint_rule(seed):
    z, std = calibrated(seed)
    for factor in (0.3, 1.0, 2.0):
        expected = oracle.miscalibration_area(z, factor * std, n_levels=2000)
        assert miscalibration_area(z, factor * std) == pytest.approx(expected, abs=1e-3)


def test_miscalibration_area_by_hand():
    # Never inside: C = 0. Always inside: C = 1. One point that enters at level 1/2: two triangles.
    assert miscalibration_area([1.0, -1.0], [0.0, 0.0]) == pytest.approx(0.5)
    assert miscalibration_area([0.0, 0.0], [1.0, 1.0]) == pytest.approx(0.5)
    median = scipy.stats.norm.ppf(0.75)
    assert miscalibration_area([median], [1.0]) == pytest.approx(0.25)


def test_miscalibration_area_is_that_of_the_calibration_curve():
    z, std = calibrated(11, 400)
    curve = calibration_curve(z, 0.6 * std, levels=(np.arange(20_000) + 0.5) / 20_000)
    area = float(np.mean(np.abs(curve.observed - curve.expected)))
    assert miscalibration_area(z, 0.6 * std) == pytest.approx(area, abs=1e-4)


@pytest.mark.parametrize("n_bins", [1, 4, 5, 7])
def test_ence_against_oracle(n_bins):
    z, std = calibrated(5)
    assert ence(z, std, n_bins) == pytest.approx(oracle.ence(z, std, n_bins), rel=1e-13)


def test_ence_of_exact_bins():
    assert ence([2.0, -2.0], [2.0, 2.0]) == 0.0
    assert ence([1.0, -1.0], [2.0, 2.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("level", [0.01, 0.5, 0.68, 0.95, 0.9999])
def test_coverage_and_interval_score_against_oracle(level):
    z, std = calibrated(6)
    assert coverage(z, std, level) == oracle.central_coverage(z, std, level)
    assert interval_score(z, std, level) == pytest.approx(
        oracle.interval_score(z, std, level), rel=1e-12
    )


def test_interval_of_a_certain_prediction():
    assert coverage([0.0, 1.0], [0.0, 0.0], 0.9) == 0.5
    assert interval_score([0.0, 1.0], [0.0, 0.0], 0.9) == pytest.approx(10.0)


def test_student_intervals_are_wider_far_out_and_become_gaussian():
    z, std = calibrated(7)
    q = scipy.stats.t.ppf(0.975, 5) * math.sqrt(3 / 5)
    assert coverage(z, std, 0.95, dof=5) == np.mean(np.abs(z) <= q * std)
    missed = np.maximum(np.abs(z) - q * std, 0.0)
    expected = np.mean(2 * q * std + 40 * missed)
    assert interval_score(z, std, 0.95, dof=5) == pytest.approx(expected, rel=1e-12)
    assert interval_score(z, std, 0.95, dof=np.full(N, 1e9)) == pytest.approx(
        interval_score(z, std, 0.95), rel=1e-6
    )
    assert miscalibration_area(z, std, dof=1e9) == pytest.approx(
        miscalibration_area(z, std), abs=1e-6
    )


def test_spearman_against_counted_ranks_and_scipy():
    z, std = calibrated(8)
    z, std = np.round(z, 1), np.round(std, 1)  # with ties
    assert spearman(z, std) == pytest.approx(oracle.spearman(z, std), rel=1e-13)
    assert spearman(z, std) == pytest.approx(scipy.stats.spearmanr(np.abs(z), std)[0], rel=1e-12)
    assert spearman([1.0, -2.0, 3.0], [0.1, 0.2, 0.3]) == pytest.approx(1.0, abs=1e-15)
    assert spearman([1.0, -2.0, 3.0], [0.3, 0.2, 0.1]) == pytest.approx(-1.0, abs=1e-15)


def test_spearman_without_order_is_zero():
    assert spearman([1.0, 2.0, 3.0], [0.3] * 3) == 0.0
    assert spearman([1.0, -1.0, 1.0], [0.1, 0.2, 0.3]) == 0.0
    assert spearman([1.0], [1.0]) == 0.0


# properties


@quick
@given(residual_arrays, std_arrays, scales)
def test_change_of_units(z, std, c):
    for name, score in ALL.items():
        expected = score(z, std) * (c if name in WITH_UNITS else 1.0)
        assert score(c * z, c * std) == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@quick
@given(residual_arrays, std_arrays, st.permutations(range(N)))
def test_neither_order_nor_shape_nor_sign_matters(z, std, order):
    for name, score in ALL.items():
        expected = pytest.approx(score(z, std), rel=1e-9, abs=1e-12)
        assert score(z[order], std[order]) == expected, name
        assert score(z.reshape(-1, 3), std.reshape(-1, 3)) == expected, name
        assert score(-z, std) == expected, name


@quick
@given(residual_arrays, std_arrays)
def test_bounds(z, std):
    assert 0.0 <= crps_gaussian(z, std) <= mae(z) + sharpness(std)
    assert 0.0 <= miscalibration_area(z, std) <= 0.5 + 1e-12
    assert ence(z, std) >= 0.0
    assert 0.0 <= coverage(z, std, 0.5) <= coverage(z, std, 0.9) <= 1.0
    assert -1.0 <= spearman(z, std) <= 1.0
    assert interval_score(z, std, 0.9) > 0.0


@quick
@given(residual_arrays, member_arrays, scales, st.permutations(range(5)))
def test_crps_ensemble_properties(y, members, c, order):
    for fair in (True, False):
        score = crps_ensemble(y, members, fair=fair)
        close = pytest.approx(score, rel=1e-9, abs=1e-9)
        assert crps_ensemble(y, members[:, order], fair=fair) == close
        assert crps_ensemble(y + 3.0, members + 3.0, fair=fair) == close
        assert crps_ensemble(c * y, c * members, fair=fair) == pytest.approx(
            c * score, rel=1e-9, abs=1e-9 * c
        )
    assert 0.0 <= crps_ensemble(y, members) <= crps_ensemble(y, members, fair=False) + 1e-12


# statistics over many seeds


def test_calibrated_predictions_score_as_they_should():
    n, n_seeds = 2000, 60
    values = {name: [] for name in ("area", "ence", "c68", "c95", "crps")}
    for seed in range(n_seeds):
        rng = np.random.default_rng(seed)
        std = np.exp(0.1 * rng.normal(size=n))  # narrow: σ varies little inside a bin
        z = std * rng.normal(size=n)
        values["area"].append(miscalibration_area(z, std))
        values["ence"].append(ence(z, std, 10))
        values["c68"].append(coverage(z, std, 0.68))
        values["c95"].append(coverage(z, std, 0.95))
        values["crps"].append(crps_gaussian(z, std) / np.mean(std))
    expected = {
        # E ∫|B(p)| dp / √n of a Brownian bridge: √(2/π) ∫√(p(1−p)) dp = √(2/π) π/8.
        "area": math.sqrt(2 / math.pi) * math.pi / 8 / math.sqrt(n),
        "ence": math.sqrt(10 / (math.pi * n)),
        "c68": 0.68,
        "c95": 0.95,
        "crps": 1 / math.sqrt(math.pi),  # E CRPS of a calibrated Gaussian is σ/√π
    }
    for name, sample in values.items():
        # Four standard errors of the mean over seeds; the two asymptotic laws get 2 % besides.
        tolerance = 4 * np.std(sample) / math.sqrt(n_seeds)
        tolerance += 0.02 * expected[name] if name in ("area", "ence") else 0.0
        assert abs(np.mean(sample) - expected[name]) < tolerance, name


def test_student_intervals_cover_student_residuals():
    rng = np.random.default_rng(3)
    n, dof = 100_000, 4
    z = rng.standard_t(dof, n)
    std = np.full(n, math.sqrt(2.0))  # ν/(ν−2)
    assert abs(coverage(z, std, 0.95, dof=dof) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / n)
    assert miscalibration_area(z, std, dof=dof) < 4 * 0.31 / math.sqrt(n)
    assert miscalibration_area(z, std) > 0.02


def test_fair_crps_of_a_small_ensemble_is_unbiased():
    # Truth and members from one normal distribution: E CRPS of the distribution is 1/√π whatever R.
    rng = np.random.default_rng(5)
    n = 40_000
    y = rng.normal(size=n)
    for n_members in (2, 5):
        members = rng.normal(size=(n, n_members))
        assert abs(crps_ensemble(y, members) - 1 / math.sqrt(math.pi)) < 4 * 0.75 / math.sqrt(n)
        biased = (1 + 1 / n_members) / math.sqrt(math.pi)
        assert abs(crps_ensemble(y, members, fair=False) - biased) < 4 * 0.75 / math.sqrt(n)


def test_crps_is_best_at_the_true_scale():
    z, std = calibrated(9, 20_000)
    right = crps_gaussian(z, std)
    assert right < crps_gaussian(z, 0.8 * std)
    assert right < crps_gaussian(z, 1.25 * std)
    score = interval_score(z, std, 0.95)
    assert score < interval_score(z, 0.8 * std, 0.95)
    assert score < interval_score(z, 1.25 * std, 0.95)


# all together


@pytest.mark.parametrize("shape", [(N,), (8, 3)])
def test_score_arrays_collects_the_functions(shape):
    rng = np.random.default_rng(1)
    members = rng.normal(size=(*shape, 16))
    y, mean, std = rng.normal(size=shape), members.mean(axis=-1), members.std(axis=-1, ddof=1)
    scores = score_arrays(y, mean, std, members)
    z = y - mean
    assert scores == Scores(
        n_points=N,
        rmse=rmse(z),
        mae=mae(z),
        log_likelihood=log_likelihood(z, std),
        crps=crps_gaussian(z, std),
        crps_ensemble=crps_ensemble(y, members),
        miscalibration_area=miscalibration_area(z, std),
        ence=ence(z, std),
        sharpness=sharpness(std),
        coverage_68=coverage(z, std, 0.68),
        coverage_95=coverage(z, std, 0.95),
        spearman=spearman(z, std),
        interval_score_95=interval_score(z, std, 0.95),
    )
    assert list(scores.as_dict()) == list(Scores.__dataclass_fields__)
    assert scores.as_dict()["rmse"] == scores.rmse


def test_scores_print_as_a_table():
    lines = str(score_arrays([1.0, 2.0], [1.5, 2.0], [0.5, 0.5])).splitlines()
    assert len(lines) == len(Scores.__dataclass_fields__)
    assert len({len(line) for line in lines}) == 1
    table = dict(line.split() for line in lines)
    assert table["n_points"] == "2"
    assert table["crps_ensemble"] == "-"
    assert float(table["mae"]) == 0.25


def test_one_point_has_scores():
    values = score_arrays([1.0], [0.5], [1.0]).as_dict()
    assert all(np.isfinite(v) for v in values.values() if v is not None)


# bad input


@pytest.mark.parametrize(
    ("z", "std", "parameter"),
    [
        ([], [], "residuals"),
        ([np.nan, 0.0], [1.0, 1.0], "residuals"),
        ([1.0, 2.0], [1.0], "std"),
        ([1.0, 2.0], [1.0, np.inf], "std"),
        ([1.0, 2.0], [1.0, -1.0], "std"),
    ],
)
@pytest.mark.parametrize("name", WITH_STD)
def test_bad_arrays_name_the_parameter(name, z, std, parameter):
    with pytest.raises(InputError) as caught:
        WITH_STD[name](z, std)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("function", [rmse, mae])
@pytest.mark.parametrize("z", [[], [np.nan]])
def test_bad_residuals(function, z):
    with pytest.raises(InputError, match="residuals"):
        function(z)


@pytest.mark.parametrize("std", [[], [np.nan], [-1.0]])
def test_bad_sharpness(std):
    with pytest.raises(InputError, match="std"):
        sharpness(std)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 1.5, np.nan])
def test_bad_level(level):
    for function in (coverage, interval_score):
        with pytest.raises(InputError) as caught:
            function([1.0], [1.0], level)
        assert caught.value.parameter == "level"


def test_bad_dof():
    with pytest.raises(InputError) as caught:
        coverage([1.0], [1.0], 0.9, dof=2.0)
    assert caught.value.parameter == "dof"


@pytest.mark.parametrize("n_bins", [0, -1, 3])
def test_bad_bins(n_bins):
    with pytest.raises(InputError) as caught:
        ence([1.0, 2.0], [1.0, 2.0], n_bins)
    assert caught.value.parameter == "n_bins"


def test_a_bin_of_certain_predictions_has_no_ence():
    with pytest.raises(InputError, match="std=0 for 2 points"):
        ence([1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], 2)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([[1.0]] * 2, "1 member "),
        ([1.0, 2.0], "shape"),
        ([[1.0, 2.0]], "shape"),
        (1.0, "shape"),
        ([[1.0, np.nan]] * 2, "NaN"),
        (np.empty((2, 0)), "shape"),
    ],
)
def test_bad_members(members, match):
    with pytest.raises(InputError, match=match) as caught:
        crps_ensemble([1.0, 2.0], members)
    assert caught.value.parameter == "members"


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (([np.nan], [1.0], [1.0]), "y"),
        (([], [], []), "y"),
        (([1.0], [np.nan], [1.0]), "mean"),
        (([1.0, 2.0], [1.0], [1.0, 1.0]), "mean"),
        (([1.0], [1.0], [0.0]), "std"),
        (([1.0], [1.0], [1.0, 2.0]), "std"),
        (([1.0], [1.0], [1.0], [[1.0, 2.0], [1.0, 2.0]]), "members"),
    ],
)
def test_bad_score_arrays(arguments, parameter):
    with pytest.raises(InputError) as caught:
        score_arrays(*arguments)
    assert caught.value.parameter == parameter
