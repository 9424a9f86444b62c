"""Bootstrap intervals of scores: against a slow oracle, and how often they hold the truth."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms import InputError
from qualms.metrics import (
    DISTANCES,
    EXPECTED_WITHIN,
    bootstrap_one_sigma,
    bootstrap_scores,
    ence,
    score_arrays,
)


def points(n, seed=0, *, factor=1.0, n_members=None):
    """Truth, mean and σ, with errors of `factor` σ; members if wanted."""
    rng = np.random.default_rng(seed)
    sigma = np.exp(0.6 * rng.normal(size=n))
    mean = 10 * rng.normal(size=n)
    y = mean + factor * sigma * rng.normal(size=n)
    if n_members is None:
        return y, mean, sigma
    return y, mean, sigma, mean[:, None] + sigma[:, None] * rng.normal(size=(n, n_members))


def slow_resamples(y, mean, std, members, groups, n_bootstrap, seed):
    """Draw groups, put their points side by side, and score them as any others."""
    rng = np.random.default_rng(seed)
    labels = np.unique(groups)
    n_bins = int(np.clip(len(y) // 10, 1, 10))
    resampled = []
    for _ in range(n_bootstrap):
        drawn = labels[rng.integers(len(labels), size=len(labels))]
        rows = np.concatenate([np.flatnonzero(groups == label) for label in drawn])
        scores = score_arrays(
            y[rows], mean[rows], std[rows], None if members is None else members[rows]
        ).as_dict()
        # The number of bins is that of the data.
        scores["ence"] = ence(y[rows] - mean[rows], std[rows], min(n_bins, len(rows)))
        resampled.append(scores)
    return resampled


def expected_interval(name, score, values, level):
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    if name in DISTANCES:
        low, high = max(2 * score - high, 0), max(2 * score - low, 0)
    return min(low, score), max(high, score)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("with_members", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_equal_to_scores_of_resampled_points(grouped, with_members, ties):
    y, mean, std, members = points(150, n_members=5)
    if ties:
        std, mean = np.round(std, 1) + 0.1, np.round(mean)
        y = np.round(y)
    members = members if with_members else None
    groups = np.random.default_rng(3).integers(40, size=150) if grouped else np.arange(150)
    found = bootstrap_scores(
        y,
        mean,
        std,
        members,
        groups=groups if grouped else None,
        n_bootstrap=30,
        level=0.8,
        rng=np.random.default_rng(7),
    )
    slow = slow_resamples(y, mean, std, members, groups, 30, 7)
    assert found.scores == score_arrays(y, mean, std, members)
    assert found.n_groups == len(np.unique(groups))
    wanted = {name for name, value in slow[0].items() if value is not None} - {"n_points"}
    assert set(found.intervals) == wanted
    for name, interval in found.intervals.items():
        values = [scores[name] for scores in slow]
        expected = expected_interval(name, getattr(found.scores, name), values, 0.8)
        np.testing.assert_allclose(interval, expected, rtol=1e-10, atol=1e-13, err_msg=name)


@given(st.integers(2, 60), st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_intervals_are_finite_hold_the_score_and_scale_with_the_units(n, seed, unit):
    y, mean, std = points(n, seed)
    found = bootstrap_scores(y, mean, std, n_bootstrap=20)
    scaled = bootstrap_scores(unit * y, unit * mean, unit * std, n_bootstrap=20)
    for name, (low, high) in found.intervals.items():
        assert np.isfinite([low, high]).all()
        assert low <= getattr(found.scores, name) <= high
        if name in ("rmse", "crps", "sharpness", "interval_score_95"):
            np.testing.assert_allclose(scaled.intervals[name], [unit * low, unit * high], rtol=1e-9)
        if name in ("spearman", "ence", "miscalibration_area"):
            np.testing.assert_allclose(scaled.intervals[name], [low, high], atol=1e-7)


def test_intervals_hold_the_limit_of_many_points():
    """Of 100 data sets, intervals of 95 % hold what a large one has in nearly so many."""
    limit = score_arrays(*points(200_000, 999, factor=1.4))
    names = ("rmse", "mae", "log_likelihood", "crps", "coverage_68", "sharpness", "spearman")
    held = dict.fromkeys((*names, *DISTANCES), 0)
    for seed in range(100):
        found = bootstrap_scores(*points(400, seed, factor=1.4), n_bootstrap=100)
        for name in held:
            low, high = found.intervals[name]
            held[name] += low <= getattr(limit, name) <= high
    assert min(held.values()) >= 84, held
    assert sum(held.values()) / len(held) >= 90, held


def test_intervals_of_distances_reach_to_zero_if_calibrated():
    """A calibrated prediction has no miscalibration in the limit; its noise must not hide that."""
    reached = 0
    for seed in range(40):
        low, high = bootstrap_scores(*points(300, seed), n_bootstrap=50).intervals[
            "miscalibration_area"
        ]
        reached += low < 0.005
        assert high < 0.1
    assert reached >= 34


def test_correlated_points_have_wider_intervals():
    y, mean, std = points(100)
    copies = [np.repeat(v, 20) for v in (y, mean, std)]
    groups = np.repeat(np.arange(100), 20)
    width = {}
    for name, labels in (("alone", None), ("together", groups)):
        low, high = bootstrap_scores(*copies, groups=labels).intervals["rmse"]
        width[name] = high - low
    low, high = bootstrap_scores(y, mean, std).intervals["rmse"]
    assert width["together"] == pytest.approx(high - low, rel=0.3)
    assert width["together"] > 3 * width["alone"]


def test_several_outputs_are_drawn_together():
    y, mean, std = (v.reshape(60, 2) for v in points(120))
    both = bootstrap_scores(y, mean, std)
    labels = bootstrap_scores(y, mean, std, groups=np.repeat(np.arange(60)[:, None], 2, axis=1))
    assert both.n_groups == 60
    assert both.intervals == labels.intervals


def test_one_group_has_no_intervals():
    found = bootstrap_scores(*points(50), groups=np.zeros(50, int))
    assert found.intervals == {}
    assert bootstrap_scores([1.0], [1.5], [0.3]).intervals == {}


def test_same_seed_same_intervals_and_30000_points_take_seconds():
    data = points(30_000, n_members=16)
    started = time.perf_counter()
    first = bootstrap_scores(*data)
    assert time.perf_counter() - started < 20  # a busy machine; it takes one or two
    assert bootstrap_scores(*data, rng=np.random.default_rng(0)).intervals == first.intervals


def test_absurd_errors_give_no_nan():
    y, mean, std = points(30)
    y[3] = 1e200
    found = bootstrap_scores(y, mean, std, n_bootstrap=30)
    assert not np.isnan([end for pair in found.intervals.values() for end in pair]).any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_bootstrap": 3}, "n_bootstrap"),
        ({"level": 1.0}, "level"),
        ({"groups": np.arange(7)}, "groups"),
    ],
)
def test_bad_arguments(change, named):
    with pytest.raises(InputError, match=named):
        bootstrap_scores(*points(50), **change)


def test_bad_points():
    y, mean, std = points(50)
    with pytest.raises(InputError, match="std=0 for 1 of 50"):
        bootstrap_scores(y, mean, np.where(np.arange(50) == 3, 0.0, std))
    with pytest.raises(InputError, match="NaN"):
        bootstrap_scores(np.where(np.arange(50) == 3, np.nan, y), mean, std)


# within one σ


def test_one_sigma_counts_and_finds_the_factor():
    y, mean, std = points(20_000, factor=2.0)
    one = bootstrap_one_sigma(y - mean, std)
    assert one.within == np.mean(np.abs(y - mean) <= std)
    assert one.factor == pytest.approx(2.0, rel=0.03)
    assert one.factor_interval[0] < 2.0 < one.factor_interval[1]
    assert one.within_interval[0] < 0.3829 < one.within_interval[1]
    assert np.mean(np.abs(y - mean) <= one.factor * std) == pytest.approx(EXPECTED_WITHIN, abs=1e-4)


def test_one_sigma_of_one_group():
    one = bootstrap_one_sigma([0.5, 2.0], [1.0, 1.0], groups=[4, 4])
    assert one.within == 0.5
    assert one.within_interval is None
    assert one.factor_interval is None
