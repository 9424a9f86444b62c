"""Confidence intervals of α and γ, which method, and factors of groups."""

import numpy as np
import pytest

from qualms.calibration.base import CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, fit_calibration
from qualms.calibration.groups import fit_grouped, fit_groups
from qualms.calibration.selection import (
    bootstrap_intervals,
    confidence_intervals,
    cross_validate,
    make_folds,
)
from qualms.errors import CalibrationError, InputError

ALPHA, GAMMA = 1.7, 1.3


def known_spread_data(rng, method, n, n_members, alpha=ALPHA, gamma=GAMMA):
    """Points whose true spread is known, which linear and power take every spread for."""
    s = np.exp(rng.normal(-1.0, 0.5, size=n))
    z = alpha * s ** (gamma if method == "power" else 1.0) * rng.normal(size=n)
    return CalibrationData(z, s, np.full(n, n_members), np.ones(n))


def member_data(rng, method, n, n_members, alpha=ALPHA, gamma=GAMMA):
    """Points with members, whose spread is one of a sample."""
    s = np.exp(rng.normal(-1.0, 0.5, size=n))
    members = s[:, None] * rng.normal(size=(n, n_members))
    power = gamma if method == "shrinkage" else 1.0
    return calibration_data(alpha * s**power * rng.normal(size=n), members)


def committee_data(rng, method, n, n_members):
    """Points that are distributed as the method assumes."""
    made = known_spread_data if method in ("linear", "power") else member_data
    return made(rng, method, n, n_members)


def fractions_inside(method, data_of, alpha=ALPHA, gamma=GAMMA, n_repeats=200):
    """Return how often α and γ lie within their 95 % intervals."""
    inside = np.zeros((n_repeats, 2))
    for seed in range(n_repeats):
        data = data_of(np.random.default_rng([seed, len(method)]))
        intervals = confidence_intervals(fit_calibration(data, method), data)
        pairs = ((alpha, intervals.alpha), (gamma, intervals.gamma))
        inside[seed] = [lower <= truth <= upper for truth, (lower, upper) in pairs]
    return inside.mean(axis=0)


@pytest.mark.parametrize(
    ("method", "n_members"),
    [
        *(("student", c) for c in (3, 8, 64)),
        ("shrinkage", 8),
        *(pytest.param("shrinkage", c, marks=pytest.mark.slow) for c in (3, 64)),
    ],
)
def test_the_truth_lies_within_the_interval_as_often_as_it_says(method, n_members):
    """Of real committees, for the methods that know that these are finite."""
    gamma = GAMMA if method == "shrinkage" else 1.0
    found = fractions_inside(
        method, lambda rng: member_data(rng, method, 400, n_members), gamma=gamma
    )
    assert np.all(found >= 0.90)
    assert found[0] <= 0.99
    assert (found[1] < 1.0) == (method == "shrinkage")


@pytest.mark.parametrize(("method", "gamma"), [("linear", 1.0), ("power", GAMMA)])
def test_the_truth_lies_within_the_interval_if_the_spread_is_known(method, gamma):
    """As of error bars without noise, or of very many members."""
    found = fractions_inside(
        method, lambda rng: known_spread_data(rng, method, 400, 2), gamma=gamma
    )
    assert np.all(found >= 0.90)
    assert found[0] <= 0.99


@pytest.mark.parametrize("n_members", [8, 16, 64])
def test_linear_estimates_its_own_limit_rather_than_the_truth(n_members):
    """Of c members v₀ tends to the mean of z²/ŝ², a t distribution's: (α² + 1/c)(c − 1)/(c − 3)."""
    c = n_members
    limit = np.sqrt((ALPHA**2 + 1 / c) * (c - 1) / (c - 3))

    def data_of(rng):
        return member_data(rng, "linear", 400, c)

    assert fractions_inside("linear", data_of, alpha=limit, gamma=1.0)[0] >= 0.90
    truth = fractions_inside("linear", data_of, gamma=1.0)[0]
    assert truth < 0.9 if c < 64 else truth > 0.8


@pytest.mark.parametrize("method", ["linear", "power", "student"])
def test_intervals_are_those_of_the_bootstrap(method):
    data = committee_data(np.random.default_rng(1), method, 800, 8)
    intervals = confidence_intervals(fit_calibration(data, method), data)
    resampled = bootstrap_intervals(data, method, n_bootstrap=300)
    for name in ("alpha", "gamma"):
        np.testing.assert_allclose(getattr(intervals, name), getattr(resampled, name), rtol=0.05)


def test_correlated_points_make_wider_intervals():
    rng = np.random.default_rng(0)
    few = committee_data(rng, "linear", 50, 8)
    copies = [np.repeat(a, 20) for a in (few.residuals, few.spread, few.n_members, few.weights)]
    data, groups = CalibrationData(*copies), np.repeat(np.arange(50), 20)
    calibration = fit_calibration(data, "linear")
    honest = confidence_intervals(calibration, data, groups=groups).alpha
    np.testing.assert_allclose(honest, confidence_intervals(calibration, few).alpha, rtol=1e-6)
    naive = confidence_intervals(calibration, data).alpha
    assert np.diff(np.log(honest)) > 3 * np.diff(np.log(naive))


def test_intervals_at_the_edge():
    rng = np.random.default_rng(0)
    # The truth is closer to the mean of the members than that is certain: α = 0.
    members = rng.normal(size=(300, 4))
    data = calibration_data(members.mean(axis=1) + 0.01 * rng.normal(size=300), members)
    calibration = fit_calibration(data, "student")
    assert calibration.alpha == 0
    lower, upper = confidence_intervals(calibration, data).alpha
    assert lower == 0 < upper < 0.3
    # All spreads alike: γ cannot be known.
    flat = CalibrationData(rng.normal(size=50), np.ones(50), np.full(50, 8), np.ones(50))
    for method in ("power", "linear", "none"):
        found = confidence_intervals(fit_calibration(flat, method), flat)
        assert np.all(np.isfinite(found.alpha))
        assert found.gamma == (None if method == "power" else (1.0, 1.0))
    assert found.alpha == found.gamma == (1.0, 1.0)
    with pytest.raises(InputError, match="level"):
        confidence_intervals(calibration, data, level=1.0)


# --- which method ---


@pytest.mark.parametrize("method", ["linear", "power", "student", "shrinkage"])
def test_the_method_that_made_the_data_is_as_good_as_any(method):
    data = committee_data(np.random.default_rng(3), method, 1000, 4)
    # Shrinkage knows more than student: how the spreads of all points are distributed.
    methods = [m for m in METHODS if m != "shrinkage" or method == "shrinkage"]
    comparison = cross_validate(data, methods)
    found = {c.calibration.method: c for c in comparison.candidates}
    assert found[method].behind <= 2 * found[method].standard_error
    assert not found["none"].is_as_good
    chosen = comparison.chosen
    assert chosen.is_as_good
    if found[method].is_as_good:
        assert chosen.calibration.n_parameters <= found[method].calibration.n_parameters


def test_held_out_likelihoods_are_what_they_say():
    data = committee_data(np.random.default_rng(4), "student", 60, 5)
    groups = np.arange(60) // 3
    comparison = cross_validate(data, ["student"], groups=groups, n_folds=4, seed=1)
    total = 0.0
    for left_out in make_folds(groups, 4, 1):
        assert not set(groups[left_out]) & set(groups[~left_out])
        seen = CalibrationData(*(getattr(data, f)[~left_out] for f in data.__dataclass_fields__))
        total += (
            fit_calibration(seen, "student")
            .log_density(data.residuals[left_out], data.spread[left_out], data.n_members[left_out])
            .sum()
        )
    assert comparison.candidates[0].log_likelihood == pytest.approx(total / 60)
    assert comparison.candidates[0].behind == 0


def test_methods_that_cannot_be_fitted_are_named():
    data = committee_data(np.random.default_rng(5), "linear", 40, 2)
    comparison = cross_validate(data)
    assert set(comparison.failures) == {"student", "shrinkage"}
    assert "at least 3" in " ".join(comparison.failures["student"].split())
    with pytest.raises(CalibrationError):
        cross_validate(data, ["student"])
    with pytest.raises(InputError, match="groups"):
        cross_validate(data, groups=np.zeros(40))
    with pytest.raises(InputError, match="n_folds"):
        cross_validate(data, n_folds=1)


# --- factors of groups ---


def grouped_data(rng, sizes, factors, n_members=8):
    data = committee_data(rng, "student", sum(sizes), n_members)
    labels = np.repeat([f"g{i}" for i in range(len(sizes))], sizes)
    return (
        CalibrationData(
            data.residuals * np.repeat(factors, sizes), data.spread, data.n_members, data.weights
        ),
        labels,
    )


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


def test_groups_that_do_not_differ_get_factors_of_one():
    close = 0
    for seed in range(20):
        data, labels = grouped_data(np.random.default_rng(seed), [200, 200, 30], [1.0, 1.0, 1.0])
        grouped = fit_groups(data, fit_calibration(data, "linear"), labels)
        close += all(abs(np.log(g.factor)) < 0.05 for g in grouped.groups.values())
    assert close >= 16


def different_groups(seed, n=1000):
    """Points whose true γ is one, in four groups of very different errors."""
    rng = np.random.default_rng(seed)
    labels = np.array(["a", "b", "c", "d"])[np.arange(n) % 4]
    factors = np.array([1.0, 1.0, 3.0, 0.5])[np.arange(n) % 4]
    s = np.exp(rng.normal(-2, 0.5, size=n))
    members = s[:, None] * rng.normal(size=(n, 8))
    return calibration_data(2 * factors * s * rng.normal(size=n), members), labels


def test_groups_do_not_distort_what_they_have_in_common():
    for seed in range(2):
        (data, labels), (new, _) = different_groups(seed), different_groups(seed + 10)
        found = {m: fit_grouped(data, m, labels) for m in ("student", "shrinkage")}
        shrinkage = found["shrinkage"]
        low, high = confidence_intervals(shrinkage.overall, shrinkage.common(data, labels)).gamma
        assert low < 1.0 < high < low + 0.4
        # It was taken for another power of the spread before, with an interval that excludes one.
        assert fit_calibration(data, "shrinkage").gamma > 1.2
        point = (new.residuals, new.spread, new.n_members, labels)
        likely = {method: np.mean(one.log_density(*point)) for method, one in found.items()}
        assert likely["shrinkage"] > likely["student"]
        factors = shrinkage.factors(["a", "b", "c", "d"])
        np.testing.assert_allclose(factors / factors[0], [1, 1, 3, 0.5], rtol=0.15)
        assert np.mean(np.log(factors)) == pytest.approx(0, abs=0.01)


def test_a_grouped_density_is_one():
    data, labels = different_groups(0, n=200)
    grouped = fit_grouped(data, "student", labels)
    z = np.linspace(-60, 60, 200_001)
    density = grouped.log_density(z, np.full_like(z, 0.2), 8, np.full(z.shape, "c"))
    assert np.trapezoid(np.exp(density), z) == pytest.approx(1, abs=1e-4)
    densities = grouped.log_density(data.residuals, data.spread, data.n_members, labels)
    assert grouped.overall.log_likelihood == pytest.approx(densities.mean())


def test_methods_are_compared_with_their_factors():
    data, labels = different_groups(1, n=600)
    methods = ["student", "shrinkage"]
    alone = cross_validate(data, methods)
    grouped = cross_validate(data, methods, labels=labels)
    for one in grouped.candidates:
        assert set(one.grouped.groups) == {"a", "b", "c", "d"}
        assert one.log_likelihood > alone.candidates[0].log_likelihood + 0.1
    assert alone.candidates[0].grouped is None
    # Shrinkage is ahead for what it knows, not for a tail that factors explain.
    assert grouped.candidates[0].calibration.method == "shrinkage"
    assert grouped.candidates[0].calibration.gamma == pytest.approx(1.0, abs=0.2)


def test_grouped_members_have_the_grouped_spread():
    rng = np.random.default_rng(1)
    data, labels = grouped_data(rng, [100, 100], [0.5, 2.0])
    grouped = fit_groups(data, fit_calibration(data, "student"), labels)
    members = rng.normal(size=(5, 8))
    some = ["g0", "g1", "g1", "new", "g0"]
    scaled = grouped.transform(members, some)
    np.testing.assert_allclose(scaled.mean(axis=1), members.mean(axis=1))
    std = grouped.std(members.std(axis=1, ddof=1), 8, some)
    np.testing.assert_allclose(scaled.std(axis=1, ddof=1), std)
    assert grouped.factors(["new"])[0] == 1.0
    with pytest.raises(InputError, match="labels"):
        fit_groups(data, grouped.overall, ["g0"])
