import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.arrays import distinct_rows, hash_rows, joined_groups
from qualms.errors import InputError, QualmsWarning
from qualms.gp.ensemble import (
    committee,
    draw_members,
    group_codes,
    internal_prediction,
    membership_counts,
    subsample_size,
)


@given(st.integers(2, 40), st.integers(2, 9), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_sub_samples_have_their_size_and_no_repetitions(n_train, n_members, fraction, seed):
    members = draw_members(n_train, n_members, fraction, np.random.default_rng(seed))
    assert len(members) == n_members
    for indices in members:
        assert len(indices) == subsample_size(fraction, n_train)
        assert np.all(np.diff(indices) > 0)
        assert indices[0] >= 0
        assert indices[-1] < n_train


def test_sub_samples_are_uniform_and_reproducible():
    members = draw_members(10, 4000, 3, np.random.default_rng(0))
    counts = membership_counts(members, 10)
    assert counts.shape == (10, 4000)
    # Each point is in 30 % of the members: a binomial with a standard error of 0.7 %.
    np.testing.assert_allclose(counts.mean(axis=1), 0.3, atol=0.03)
    again = draw_members(10, 4000, 3, np.random.default_rng(0))
    assert all(np.array_equal(a, b) for a, b in zip(members, again, strict=True))


def test_bootstrap_draws_as_many_as_there_are_with_repetitions():
    members = draw_members(50, 400, 0.5, np.random.default_rng(0), replace=True)
    counts = membership_counts(members, 50)
    np.testing.assert_array_equal(counts.sum(axis=0), 50)
    assert counts.max() > 1
    # A point is absent with probability (1 − 1/N)^N, close to 1/e.
    assert np.mean(counts == 0) == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)


@pytest.mark.parametrize("replace", [False, True])
def test_groups_are_in_or_out_as_a_whole(replace):
    labels = np.array(["b", "a", "b", "c", "a", "d"] * 5)
    members = draw_members(30, 20, 0.5, np.random.default_rng(0), replace=replace, groups=labels)
    counts = membership_counts(members, 30)
    for label in "abcd":
        assert np.all(counts[labels == label] == counts[labels == label][0])
    drawn = counts[[1, 0, 3, 5]].sum(axis=0)  # one row of each group
    np.testing.assert_array_equal(drawn, 4 if replace else 2)


def test_a_number_of_groups_is_that_number():
    members = draw_members(60, 5, 4, np.random.default_rng(0), groups=np.arange(60) // 6)
    assert {len(indices) for indices in members} == {24}


def test_a_single_sample_per_member_is_surely_a_mistake():
    with pytest.warns(QualmsWarning, match="single sample"):
        assert subsample_size(1, 10) == 1


@pytest.mark.parametrize(
    ("subsample", "n_train"),
    [(1.0, 10), (0.0, 10), (-0.5, 10), (10, 10), (0, 10), (1.5, 10), (np.nan, 10), (True, 10)],
)
def test_sub_sample_sizes_that_make_no_sense_are_refused(subsample, n_train):
    with pytest.raises(InputError, match=r"subsample=.*replace=True"):
        subsample_size(subsample, n_train)


def test_other_bad_input():
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="n_train"):
        subsample_size(0.5, 1)
    with pytest.raises(InputError, match="n_members"):
        draw_members(10, 1, 0.5, rng)
    with pytest.raises(InputError, match="groups"):
        draw_members(10, 2, 0.5, rng, groups=["a"] * 10)
    with pytest.raises(InputError, match="groups"):
        group_codes([1, 2], 3)
    with pytest.raises(InputError, match="members"):
        committee(np.ones((3, 1)))
    with pytest.raises(InputError, match="absent"):
        internal_prediction(np.ones((3, 4)), np.ones((3, 3), dtype=bool))
    with pytest.raises(InputError, match="min_absent"):
        internal_prediction(np.ones((3, 4)), np.ones((3, 4), dtype=bool), min_absent=1)


def test_committee_is_the_oracle_s():
    members = np.random.default_rng(0).normal(size=(5, 7))
    mean, std = committee(members)
    for n in range(5):
        assert (mean[n], std[n]) == pytest.approx(oracle.committee(members[n]))


@given(st.integers(0, 2**31), st.integers(2, 5))
def test_internal_prediction_is_the_oracle_s(seed, min_absent):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(12, 2, 6))
    absent = rng.random((12, 6)) < 0.5
    result = internal_prediction(members, absent, min_absent=min_absent)
    for t in range(2):
        expected = oracle.internal_prediction(members[:, t], absent, min_absent)
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


def test_long_integers_are_told_apart():
    ids = (2**60 + np.arange(100))[:, None]
    assert len(distinct_rows(ids).first) == 100
    np.testing.assert_array_equal(
        hash_rows(np.arange(9)[:, None]), hash_rows(np.arange(9.0)[:, None])
    )


def test_hashes_do_not_collide_on_regular_grids():
    grid = np.stack(np.meshgrid(np.arange(256.0), np.arange(256.0)), axis=-1).reshape(-1, 2)
    for rows in (grid, grid / 8, grid * 2**20, -grid - 1, grid.astype(np.float32)):
        assert len(np.unique(hash_rows(rows))) == len(rows)
