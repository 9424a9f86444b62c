"""Drawing members, sums over blocks, the full model and its members."""

import warnings

import numpy as np
import oracle
import pytest
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.arrays import distinct_rows, joined_groups
from qualms.errors import NumericalError, QualmsWarning
from qualms.gp import ensemble
from qualms.gp.ensemble import (
    draw_blocks,
    draw_members,
    ensemble_mean_std,
    fit_full_model,
    fit_members,
    fit_rows,
    keep_groups,
    out_of_bag_prediction,
    subsample_size,
    with_points,
)
from qualms.gp.sparse_gp import solve_projected_process
from qualms.gp.sums import BlockSums, KeptRows, sum_rows, weighted_sum

# --- sums ---


@pytest.mark.parametrize("panel", [2, 3, 512])
@pytest.mark.parametrize("n", [6, 20, 700])  # few rows, which are kept, and many
def test_sums_of_parts(n, panel, monkeypatch):
    monkeypatch.setattr("qualms.gp.sums._PANEL", panel)
    monkeypatch.setattr("qualms.arrays.BLOCK", 90)
    rng = np.random.default_rng(0)
    Phi, C, w = rng.normal(size=(n, 7)), rng.normal(size=(n, 2)), rng.uniform(0.5, 2, n)
    half = slice(0, n // 2), slice(n // 2, n)
    parts = [sum_rows(Phi[some], C[some], w[some]) for some in half]
    for whole in (parts[0] + parts[1], weighted_sum(parts, [1.0, 1.0]), sum_rows(Phi, C, w)):
        np.testing.assert_allclose(whole.gram, Phi.T @ np.diag(w) @ Phi)
        np.testing.assert_allclose(whole.moment, Phi.T @ np.diag(w) @ C)
        np.testing.assert_allclose(whole.squares, C.T @ np.diag(w) @ C)
        assert whole.trace == pytest.approx(np.trace(whole.gram))
        for r in (2, 5, 7):
            np.testing.assert_allclose(whole.leading(r).gram, whole.gram[:r, :r])
            np.testing.assert_allclose(whole.leading(r).moment, whole.moment[:r])
    twice = weighted_sum(parts, [2.0, 0.5])
    factors = np.where(np.arange(n) < n // 2, 2.0, 0.5)
    np.testing.assert_allclose(twice.gram, Phi.T @ np.diag(factors * w) @ Phi)
    B, (some, _) = rng.normal(size=(2, 3)), half
    CB = C[some] @ B
    np.testing.assert_allclose(parts[0].combined(B).squares, CB.T @ (w[some, None] * CB))


def test_features_are_scaled_in_place():
    rng = np.random.default_rng(0)
    Phi, C = rng.normal(size=(40, 3)), rng.normal(size=(40, 2))
    sums = BlockSums({"y": [sum_rows(Phi[:2], C[:2]), sum_rows(Phi[2:], C[2:])]})
    sums.scale(3.0)
    np.testing.assert_allclose(sums.total("y").gram, 9 * Phi.T @ Phi)
    np.testing.assert_allclose(sums.total("y").moment, 3 * Phi.T @ C)
    np.testing.assert_allclose(sums.total("y").squares, C.T @ C)


def test_features_that_are_not_finite_are_rejected():
    for n in (5, 500):
        Phi = np.ones((n, 3))
        Phi[2, 1] = np.nan
        with rejects("Phi"):
            sum_rows(Phi, np.ones(n))


# --- blocks ---


@settings(max_examples=30)
@given(st.integers(2, 90), st.integers(0, 99), st.sampled_from([0.25, 0.5, 0.75, 0.9]))
def test_blocks_divide_groups_evenly(n_groups, seed, subsample):
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(n_groups), 3)) * 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few groups
        draw = draw_blocks(groups, rng, n_members=6, subsample=subsample, n_rows=10**6)
    for group in np.unique(groups):
        assert len(np.unique(draw.block[groups == group])) == 1
    sizes = np.bincount(draw.block)
    assert len(sizes) == draw.n_blocks <= min(n_groups, 20)
    assert np.ptp(sizes) <= 3
    np.testing.assert_array_equal(draw.counts, draw.of_blocks[draw.block])


def test_members_of_blocks_have_the_size_of_the_subsample():
    groups, given = np.arange(3600), {"n_members": 4, "n_rows": 10**5}
    for subsample in (0.5, 0.75, 0.9, 1 / 3, 0.95):
        draw = draw_blocks(groups, np.random.default_rng(0), subsample=subsample, **given)
        np.testing.assert_allclose(draw.counts.mean(axis=0), subsample, rtol=1e-9)
        assert 16 <= draw.n_blocks <= 20
    with pytest.warns(QualmsWarning, match="blocks"):
        draw_blocks(groups, np.random.default_rng(0), subsample=0.985, **given)
    few = draw_blocks(groups, np.random.default_rng(0), n_members=4, n_rows=3600)
    assert few.n_blocks == 64


def test_rare_kinds_are_in_several_blocks():
    kinds = (np.arange(200) < 6).astype(int)
    draw = draw_blocks(np.arange(200), np.random.default_rng(0), n_members=4, kinds=kinds)
    assert len(np.unique(draw.block[kinds == 1])) == 6


@pytest.mark.parametrize("free", [False, True])
def test_points_are_added_to_members_that_lack_them(free):
    draw = draw_blocks(np.arange(60), np.random.default_rng(1), n_members=5, free=free)
    points, members = np.arange(60) % 20 == 3, np.array([True, False, False, True, False])
    more = with_points(draw, points, members)
    expected = np.where(points[:, None] & members, 1, draw.counts)
    np.testing.assert_array_equal(more.counts, expected)
    if not free:
        np.testing.assert_array_equal(more.counts, more.of_blocks[more.block])
        assert not set(more.block[points]) & set(more.block[~points])


def test_rows_of_whole_groups_are_kept():
    rng = np.random.default_rng(0)
    groups, n_rows = rng.integers(0, 300, size=1000), rng.integers(1, 5, size=1000)
    rare = groups == groups[0]
    kept = keep_groups(groups, n_rows, 400, np.random.default_rng(1), [rare])
    assert kept[rare].all()
    assert not set(groups[kept]) & set(groups[~kept])
    assert 400 <= n_rows[kept].sum() < 450
    assert keep_groups(groups, n_rows, 10**6, np.random.default_rng(1)).all()


# --- the full model and its members ---


def problem(kinds=("energy",), n_outputs=1, free=False, seed=0, keep=None):
    """Rows of one or two quantities in blocks, with their sums; some are kept."""
    rng = np.random.default_rng(seed)
    n, r = {"energy": 60, "forces": 90}, 12
    rows, first = {}, 0
    for name in kinds:
        rows[name], first = np.arange(first, first + n[name]), first + n[name]
    Phi = rng.normal(size=(first, r))
    y = Phi @ rng.normal(size=(r, n_outputs)) + 0.3 * rng.normal(size=(first, n_outputs))
    y[rows["energy"]] += 5.0
    weight = rng.uniform(0.5, 2.0, first) if len(kinds) == 1 else np.ones(first)
    energy = rows["energy"]
    mean = np.average(y[energy], axis=0, weights=weight[energy])
    columns = np.zeros((first, n_outputs + 3))
    columns[:, :n_outputs] = y
    columns[energy, :n_outputs] -= mean
    columns[energy, n_outputs:-1] = rng.uniform(size=(60, 2))
    columns[energy, -1] = 1.0
    groups = np.concatenate([np.arange(60), np.arange(90) % 60])[:first]
    draw = draw_blocks(np.arange(60), rng, n_members=5, free=free).take(groups)
    sums = {
        name: draw.take(some).sum_blocks(Phi[some], columns[some], weight[some])
        for name, some in rows.items()
    }
    every = KeptRows(Phi, columns, rows, groups, draw, weight, n_outputs)
    return BlockSums.of(sums, draw.n_blocks), every, mean


def some_of(kept, chosen):
    """The rows of some groups."""
    places = np.flatnonzero(np.isin(kept.groups, chosen))
    rows = {name: np.flatnonzero(np.isin(places, some)) for name, some in kept.rows.items()}
    return KeptRows(
        kept.Phi[places],
        kept.columns[places],
        rows,
        kept.groups[places],
        kept.draw.take(places),
        kept.weight[places],
        kept.n_outputs,
    )


def solve_rows(Phi, y, weight, noise):
    """Weights by explicit inverses."""
    A = Phi.T @ (weight[:, None] * Phi) + noise * np.eye(Phi.shape[1])
    return np.linalg.inv(A) @ Phi.T @ (weight[:, None] * y)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_the_full_model_of_sums_is_that_of_all_rows(n_outputs):
    sums, kept, mean = problem(n_outputs=n_outputs)
    full = fit_full_model(some_of(kept, np.arange(20)), sums, {"energy": 0.05}, mean=mean)
    scale = np.sqrt(np.average(kept.y**2, axis=0, weights=kept.weight))
    np.testing.assert_allclose(full.scale, scale)
    noise = 0.05 / np.mean(scale**2)
    expected = solve_rows(kept.Phi, kept.y / scale, kept.weight, noise) * scale
    np.testing.assert_allclose(full.weights, expected, rtol=1e-8)


def test_quantities_are_weighted_by_their_noise():
    sums, kept, mean = problem(("energy", "forces"))
    full = fit_full_model(kept, sums, {"energy": 0.05, "forces": 0.4}, mean=mean)
    forces = kept.rows["forces"]
    prior = np.sum(kept.y[forces] ** 2) / np.sum(kept.Phi[forces] ** 2)  # Eq. (17), of forces
    weight = np.where(np.isin(np.arange(150), forces), 0.05 / 0.4, 1.0)
    expected = solve_rows(kept.Phi, kept.y, weight, 0.05 / prior)
    np.testing.assert_allclose(full.weights, expected, rtol=1e-8)
    np.testing.assert_allclose(full.weight, weight)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(
    ("kinds", "n_outputs"), [(("energy",), 1), (("energy",), 2), (("energy", "forces"), 1)]
)
def test_members_equal_explicit_inverses(kinds, n_outputs, free):
    sums, kept, mean = problem(kinds, n_outputs, free)
    noise = dict(zip(kinds, (0.05, 0.4), strict=False))
    full = fit_full_model(kept, sums, noise, mean=mean)
    rng = np.random.default_rng(3)
    columns = np.zeros((n_outputs + 3, n_outputs, 5))
    columns[:n_outputs] = np.eye(n_outputs)[:, :, None]
    columns[n_outputs:-1] = rng.normal(size=(2, n_outputs, 5))  # own baselines
    again, weights, means = fit_members(full, sums, kept, columns)
    assert again.noise == full.noise
    energy, counts = kept.rows["energy"], kept.draw.counts
    for i in range(5):
        targets = kept.columns @ columns[:, :, i]
        w = full.weight * counts[:, i]
        mean = np.average(targets[energy], axis=0, weights=w[energy])
        np.testing.assert_allclose(means[:, i], mean, rtol=1e-9)
        targets[energy] -= mean
        expected = solve_rows(kept.Phi, targets / full.scale, w, full.process.noise_variance)
        np.testing.assert_allclose(weights[:, :, i], expected * full.scale, rtol=1e-7, atol=1e-9)
    _, _, none = fit_members(full, sums, kept, columns, centered=False)
    assert not none.any()


def test_labels_of_absent_rows_never_enter():
    sums, kept, mean = problem()
    columns = np.zeros((4, 1, 5))
    columns[0] = 1.0
    full = fit_full_model(kept, sums, {"energy": 1e-4}, mean=mean)
    b = int(np.flatnonzero(kept.draw.of_blocks[:, 0] == 0)[0])
    wild = kept.columns.copy()
    wild[kept.draw.block == b, 0] += 100.0
    other = BlockSums.of(
        {"energy": kept.draw.sum_blocks(kept.Phi, wild, kept.weight)}, sums.n_blocks
    )
    first, second = (fit_members(full, s, kept, columns)[1][:, 0, 0] for s in (sums, other))
    np.testing.assert_array_equal(first, second)


def test_noise_that_is_lost_in_rounding_is_raised(monkeypatch):
    sums, kept, mean = problem(("energy", "forces"))
    full = fit_full_model(kept, sums, {"energy": 1e-3, "forces": 1e-2}, mean=mean)
    solve, least = ensemble.solve_projected_process, 5 * full.process.noise_variance

    def fails_at_first(total, noise_variance):
        if noise_variance < least:
            raise NumericalError("lost")
        return solve(total, noise_variance)

    monkeypatch.setattr(ensemble, "solve_projected_process", fails_at_first)
    columns = np.zeros((4, 1, 5))
    columns[0] = 1.0
    with pytest.warns(QualmsWarning):
        raised, _, _ = fit_members(full, sums, kept, columns)
    assert raised.noise == pytest.approx({"energy": 1e-2, "forces": 1e-1})
    monkeypatch.undo()
    expected = fit_full_model(kept, sums, raised.noise, mean=mean)
    np.testing.assert_allclose(raised.weights, expected.weights, rtol=1e-9)
    least = np.inf
    monkeypatch.setattr(ensemble, "solve_projected_process", fails_at_first)
    with pytest.raises(NumericalError):
        fit_members(full, sums, kept, columns)


def test_rows_of_one_block():
    rng = np.random.default_rng(0)
    Phi, y = rng.normal(size=(40, 5)), 3 + rng.normal(size=40)
    full, mean = fit_rows(Phi, y, 0.1)
    assert mean == pytest.approx(y.mean())
    noise = 0.1 / np.var(y)
    expected = solve_projected_process(
        sum_rows(Phi, (y - mean) / np.std(y)), noise
    ).weights * np.std(y)
    np.testing.assert_allclose(full.weights, expected, rtol=1e-9)
    assert fit_rows(Phi, y, 0.1, center=False)[1] == 0.0


# --- drawing ---


@settings(max_examples=20)
@given(st.integers(2, 40), st.integers(2, 9), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_subsamples_have_their_size_and_no_repetitions(n_train, n_members, fraction, seed):
    counts = draw_members(n_train, n_members, fraction, np.random.default_rng(seed))
    assert counts.shape == (n_train, n_members)
    assert set(np.unique(counts)) == {0, 1}
    np.testing.assert_array_equal(counts.sum(axis=0), subsample_size(fraction, n_train))


def test_subsamples_are_uniform_and_reproducible():
    counts = draw_members(10, 2000, 3, np.random.default_rng(0))
    # Each point is in 30 % of the members: a binomial with a standard error of 1 %.
    np.testing.assert_allclose(counts.mean(axis=1), 0.3, atol=0.04)
    np.testing.assert_array_equal(counts, draw_members(10, 2000, 3, np.random.default_rng(0)))


def test_bootstrap_draws_as_many_as_there_are_with_repetitions():
    counts = draw_members(50, 400, 0.5, np.random.default_rng(0), replace=True)
    np.testing.assert_array_equal(counts.sum(axis=0), 50)
    assert counts.max() > 1
    # A point is absent with probability (1 − 1/N)^N, close to 1/e.
    assert np.mean(counts == 0) == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)


@pytest.mark.parametrize("replace", [False, True])
def test_groups_are_in_or_out_as_a_whole(replace):
    labels = np.array(["b", "a", "b", "c", "a", "d"] * 5)
    counts = draw_members(30, 20, 0.5, np.random.default_rng(0), replace=replace, groups=labels)
    for label in "abcd":
        assert np.all(counts[labels == label] == counts[labels == label][0])
    drawn = counts[[1, 0, 3, 5]].sum(axis=0)  # one row of each group
    np.testing.assert_array_equal(drawn, 4 if replace else 2)


def test_a_single_sample_per_member_is_reported():
    with pytest.warns(QualmsWarning):
        assert subsample_size(1, 10) == 1


def test_committee_is_the_oracle_s():
    members = np.random.default_rng(0).normal(size=(5, 7))
    for n, found in enumerate(zip(*ensemble_mean_std(members), strict=True)):
        assert found == pytest.approx(oracle.committee(members[n]))


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_out_of_bag_prediction_is_the_oracle_s(seed):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(12, 2, 6))
    absent = rng.random((12, 6)) < 0.5
    result = out_of_bag_prediction(members, absent)
    for t in range(2):
        expected = oracle.out_of_bag_prediction(members[:, t], absent, 3)
        assert [row[0] for row in expected] == list(np.flatnonzero(result.used))
        for k, (_, mean, std, n_absent) in enumerate(expected):
            assert result.mean[k, t] == pytest.approx(mean)
            assert result.std[k, t] == pytest.approx(std)
            assert result.n_absent[k] == n_absent


def test_distinct_rows_are_found_in_an_order_of_their_own():
    rng = np.random.default_rng(0)
    X = rng.integers(0, 3, size=(200, 3)).astype(float)
    X[X == 0] *= np.where(rng.random(np.sum(X == 0)) < 0.5, -1, 1)  # −0.0 is 0.0
    points = distinct_rows(X)
    np.testing.assert_array_equal(X[points.first][points.inverse], X)
    assert len(points.first) == len(np.unique(X + 0.0, axis=0)) == 27
    shuffle = rng.permutation(200)
    shuffled = distinct_rows(X[shuffle])
    np.testing.assert_array_equal(X[shuffle][shuffled.first], X[points.first])


def test_groups_that_share_a_point_are_joined():
    # Rows 0 and 3 are the same point, so groups 0 and 2 are one; group 1 stays by itself.
    inverse, codes = np.array([0, 1, 2, 0, 3]), np.array([0, 0, 1, 2, 2])
    groups = joined_groups(inverse, codes)
    assert groups[0] == groups[1] == groups[3]
    assert groups[2] != groups[0]


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        *[
            ("subsample", lambda n=n: subsample_size(n, 10))
            for n in (0.0, 1.0, -0.5, 10, 0, np.nan, "half", True)
        ],
        ("n_train", lambda: subsample_size(0.5, 1)),
        ("groups", lambda: draw_members(3, 4, 0.5, np.random.default_rng(0), groups=[1, 2])),
        ("members", lambda: ensemble_mean_std(np.ones((3, 1)))),
        ("absent", lambda: out_of_bag_prediction(np.ones((3, 4)), np.ones((3, 3), dtype=bool))),
    ],
)
def test_bad_input_of_resampling(parameter, call):
    with rejects(parameter):
        call()
