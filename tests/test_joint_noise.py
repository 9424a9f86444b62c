"""Two noises at once: those that are given, those that are found, and what is minimised."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal

from qualms import InputError, QualmsWarning
from qualms.gp import noise as joint_scores
from qualms.gp.noise import (
    Observations,
    _folds,
    _parts,
    evidence,
    left_out_error,
    select_joint_noise,
    typical_log,
)


def problem(rng, noise_e=0.05, noise_f=0.5, n=80, r=15, per=6):
    """Energies and forces of a linear function, with noise."""
    Phi = rng.normal(size=(n * (1 + per), r))
    w = rng.normal(size=r)
    is_force = np.arange(len(Phi)) >= n
    y = Phi @ w + rng.normal(size=len(Phi)) * np.where(is_force, noise_f, noise_e)
    groups = np.concatenate([np.arange(n), np.repeat(np.arange(n), per)])
    return Phi, y, is_force, groups


def score_of_groups(z, groups):
    """Minus the log likelihood of mean errors of groups, densities s/(a + s)², at the best s."""
    a = np.array([np.abs(z[groups == g]).mean() for g in np.unique(groups)])
    best = minimize_scalar(
        lambda u: np.mean(2 * np.log(a + np.exp(u)) - u),
        bounds=(np.log(a.min()) - 1, np.log(a.max()) + 1),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return best.fun


def test_noises_that_are_given_are_kept():
    Phi, y, is_force, groups = problem(np.random.default_rng(0))
    both = select_joint_noise(Phi, y, is_force, groups, prior=1.0, energies=0.1, forces=2.0)
    assert (both.energies, both.forces, both.n_tried) == (0.1, 2.0, 0)
    assert both.ratio == pytest.approx(0.05)
    one = select_joint_noise(Phi, y, is_force, groups, prior=1.0, forces=2.0)
    assert one.forces == pytest.approx(2.0)
    other = select_joint_noise(Phi, y, is_force, groups, prior=1.0, energies=0.3)
    assert other.energies == pytest.approx(0.3)


def test_the_evidence_finds_both_noises():
    found = [
        select_joint_noise(*problem(np.random.default_rng(seed)), prior=1.0, criterion="evidence")
        for seed in range(5)
    ]
    energies, forces = (np.sqrt([getattr(f, k) for f in found]) for k in ("energies", "forces"))
    assert np.median(energies) == pytest.approx(0.05, rel=0.35)
    assert np.median(forces) == pytest.approx(0.5, rel=0.35)


def test_the_evidence_is_that_of_the_joint_gaussian():
    Phi, y, is_force, _ = problem(np.random.default_rng(1), n=12, r=4, per=3)
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    root = np.random.default_rng(2).uniform(0.5, 2.0, len(y))
    nll = evidence(Observations(Phi, y, root, kinds, np.arange(len(y))), 0.7)

    def expected(energies, forces):
        noise = np.where(is_force, forces, energies) / root**2
        covariance = 0.7 * Phi @ Phi.T + np.diag(noise)
        return -multivariate_normal(cov=covariance).logpdf(y)

    constant = nll(0.1, 0.2) - expected(0.1, 0.2)
    for pair in ((0.01, 0.2), (0.1, 3.0), (1.0, 0.01)):
        assert nll(*pair) - expected(*pair) == pytest.approx(constant, abs=1e-8)


def test_left_out_errors_are_those_of_models_without_the_structures():
    Phi, y, is_force, groups = problem(np.random.default_rng(2), n=20, r=5, per=3)
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    root = np.random.default_rng(3).uniform(0.5, 2.0, len(y))
    left_out = [
        np.concatenate(part.rows) for part in _parts(Observations(Phi, y, root, kinds, groups))
    ]
    assert sorted(np.concatenate(left_out).tolist()) == list(range(len(y)))
    z = np.empty(len(y))
    for rows in left_out:
        # Whole groups, energy and forces.
        assert set(groups[rows]).isdisjoint(groups[np.delete(np.arange(len(y)), rows)])
        rest = np.delete(np.arange(len(y)), rows)
        weight = (root**2 * np.where(is_force, 1 / 0.3, 1 / 0.02))[rest]
        A = Phi[rest].T @ (weight[:, None] * Phi[rest]) + np.eye(5) / 0.7
        z[rows] = y[rows] - Phi[rows] @ np.linalg.solve(A, Phi[rest].T @ (weight * y[rest]))
    z *= root
    expected = sum(score_of_groups(z[rows], groups[rows]) for rows in kinds)
    found = left_out_error(Observations(Phi, y, root, kinds, groups), 0.7)(0.02, 0.3)
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_kind_counts_by_the_groups_that_have_it():
    Phi, y, is_force, groups = problem(np.random.default_rng(2), n=20, r=5, per=3)
    few = ~is_force | (groups < 4)
    Phi, y, is_force, groups = Phi[few], y[few], is_force[few], groups[few]
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    root = np.ones(len(y))
    score = left_out_error(Observations(Phi, y, root, kinds, groups), 0.7)
    z = np.empty(len(y))
    for part in _parts(Observations(Phi, y, root, kinds, groups)):
        for rows in part.rows:
            z[rows] = y[rows] - Phi[rows] @ part.rest.solve((0.02, 0.3), 0.7)[0]
    logs = [score_of_groups(z[rows], groups[rows]) for rows in kinds]
    assert score(0.02, 0.3) == pytest.approx(logs[0] + 4 / 20 * logs[1])


def test_the_score_has_no_units_and_no_group_decides_alone():
    a = np.random.default_rng(0).exponential(size=40)
    for factor in (1e-8, 3.0, 1e9):
        assert typical_log(factor * a) == pytest.approx(typical_log(a) + np.log(factor))
    # One group's errors, however large, are worth 2 ln(factor)/G at most, and zeros next to none.
    wild = a.copy()
    scores = []
    for size in (1e3, 1e4, 1e5):
        wild[0] = size
        scores.append(typical_log(wild))
    steps = np.diff(scores)
    assert np.all(steps > 0)
    assert np.all(steps <= 2 * np.log(10) / 40 + 1e-12)
    exact = a.copy()
    exact[0] = 0.0
    assert typical_log(exact) == pytest.approx(typical_log(a), abs=0.1)
    assert np.isfinite(typical_log(np.zeros(3)))
    assert typical_log(np.full(3, 2.0)) == pytest.approx(2 * np.log(4.0) - np.log(2.0))
    assert typical_log(np.empty(0)) == 0.0


def test_large_models_leave_one_part_out(monkeypatch):
    Phi, y, is_force, groups = problem(np.random.default_rng(3), n=20, r=5, per=3)
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    five = _parts(Observations(Phi, y, np.ones(len(y)), kinds, groups))
    monkeypatch.setattr(joint_scores, "_SMALL", 4)
    (one,) = _parts(Observations(Phi, y, np.ones(len(y)), kinds, groups))
    for i in (0, 1):
        np.testing.assert_array_equal(one.rows[i], five[0].rows[i])
        np.testing.assert_allclose(one.rest.grams[i], five[0].rest.grams[i], atol=1e-10)
        np.testing.assert_allclose(one.rest.projections[i], five[0].rest.projections[i], atol=1e-10)


def kinds_of(n_groups, **shares):
    """Which of n groups have energies, forces and virials."""
    has = np.zeros((n_groups, 3), dtype=bool)
    has[:, 0] = True
    has[shares["forces"], 1] = True
    has[shares["virials"], 2] = True
    return has


@pytest.mark.parametrize("n_groups", [1, 4, 5, 23, 500])
def test_groups_that_have_all_kinds_are_dealt_out_in_a_mixed_order(n_groups):
    n_folds = min(5, n_groups)
    expected = np.random.default_rng(0).permutation(n_groups) % n_folds
    for n_kinds in (1, 2, 3):
        fold = _folds(np.ones((n_groups, n_kinds), dtype=bool), n_folds)
        np.testing.assert_array_equal(fold, expected)


@pytest.mark.parametrize(
    ("forces", "virials"),
    [
        (slice(None), slice(3)),
        (slice(None), slice(7)),
        (slice(60), slice(20, 62)),
        (slice(9), slice(20, 24)),  # in different groups
        (slice(2), slice(20, 22)),
        (slice(1, None), slice(3)),
        (slice(0), slice(13)),
    ],
)
def test_each_kind_is_spread_over_all_parts(forces, virials):
    mixed = np.random.default_rng(1).permutation(103)
    has = kinds_of(103, forces=forces, virials=virials)[mixed]
    fold = _folds(has, 5)
    counts = np.array([has[fold == k].sum(axis=0) for k in range(5)])
    assert np.all(np.ptp(counts, axis=0) <= 1)
    # The first part, which may be the only one that is judged, has all that there is.
    np.testing.assert_array_equal(counts[0] > 0, has.any(axis=0))


def test_a_kind_of_one_group_changes_no_part():
    has = kinds_of(40, forces=slice(None), virials=slice(7, 8))
    np.testing.assert_array_equal(_folds(has, 5), _folds(has[:, :2], 5))


def test_kinds_of_any_groups_are_spread_almost_evenly():
    rng = np.random.default_rng(5)
    for _ in range(200):
        has = rng.random((rng.integers(5, 60), 3)) < rng.random(3)
        fold = _folds(has, 5)
        assert np.ptp(np.bincount(fold, minlength=5)) <= 1
        counts = np.array([has[fold == k].sum(axis=0) for k in range(5)])
        spread = np.ptp(counts, axis=0)
        assert spread[np.argmin(has.sum(axis=0))] <= 1  # of the rarest
        assert spread.max() <= 2


def test_large_models_judge_virials_of_a_few_groups(monkeypatch):
    Phi, y, kind, groups = three_kinds(np.random.default_rng(3))
    monkeypatch.setattr(joint_scores, "_SMALL", 4)
    for first in range(0, 78, 6):
        some = (kind < 2) | ((groups >= first) & (groups < first + 2))
        kinds = tuple(np.flatnonzero(kind[some] == k) for k in range(3))
        (part,) = _parts(Observations(Phi[some], y[some], np.ones(some.sum()), kinds, groups[some]))
        assert len(part.rows[2]) == 2  # of one of the two groups


def test_neither_kind_is_sacrificed_to_the_other():
    # Energies say nothing about half of the weights, and forces nothing about the other half.
    rng = np.random.default_rng(4)
    Phi, _, is_force, groups = problem(rng, n=60, r=8, per=6)
    Phi[is_force, :4] = 0.0
    Phi[~is_force, 4:] = 0.0
    w = rng.normal(size=8)
    noise = np.where(is_force, 0.3, 0.01)
    y = Phi @ w + noise * rng.normal(size=len(Phi))
    found = select_joint_noise(Phi, y, is_force, groups, prior=1.0)
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    score = left_out_error(Observations(Phi, y, np.ones(len(y)), kinds, groups), 1.0)
    assert found.score == pytest.approx(score(found.energies, found.forces))
    # Three decades that gain less than three per cent are no reason to go there.
    for factor in (1e-3, 1e3):
        assert found.score <= score(factor * found.energies, found.forces) + 0.03
        assert found.score <= score(found.energies, factor * found.forces) + 0.03


def test_noise_that_is_lost_in_rounding_is_not_chosen():
    Phi, y, is_force, groups = problem(np.random.default_rng(5), n=10, r=6, per=2)
    Phi[:, 5] = Phi[:, 4]  # singular but for the noise
    found = select_joint_noise(1e6 * Phi, y, is_force, groups, prior=1.0)
    assert np.isfinite(found.score)
    assert found.energies > 0
    assert found.forces > 0


def test_targets_that_are_all_zero_have_a_noise_too():
    Phi, y, is_force, groups = problem(np.random.default_rng(6), n=10, r=3, per=2)
    found = select_joint_noise(Phi, 0 * y, is_force, groups, prior=1.0)
    assert found.energies > 0
    assert found.forces > 0


def test_weights_divide_the_noise():
    rng = np.random.default_rng(8)
    Phi, y, is_force, groups = problem(rng, n=30, r=4, per=3)
    weight = rng.uniform(0.3, 3.0, len(y))
    root = np.sqrt(weight)
    found = select_joint_noise(Phi, y, is_force, groups, prior=1.0, weight=weight)
    scaled = select_joint_noise(Phi * root[:, None], y * root, is_force, groups, prior=1.0)
    assert found.energies == pytest.approx(scaled.energies)
    assert found.forces == pytest.approx(scaled.forces)


def test_the_evidence_is_bounded_by_what_targets_usually_are():
    Phi, y, is_force, groups = problem(np.random.default_rng(3))
    y[0] = 1e4  # a wrong energy, which makes noise of all others by a Gaussian likelihood
    with pytest.warns(QualmsWarning, match="noise of energies and forces is larger than"):
        found = select_joint_noise(Phi, y, is_force, groups, prior=1.0, criterion="evidence")
    usual = np.median(y[~is_force] ** 2)
    assert found.energies <= 10 * usual
    # Errors of what is left out do not care for one of them.
    robust = select_joint_noise(Phi, y, is_force, groups, prior=1.0)
    assert robust.forces < usual


def test_noises_are_raised_alike():
    noise = select_joint_noise(
        *three_kinds(np.random.default_rng(0)), prior=1.0, energies=0.1, forces=2.0, virials=3.0
    )
    raised = noise.times(100.0)
    assert (raised.energies, raised.forces, raised.virials) == pytest.approx((10.0, 200.0, 300.0))
    assert raised.ratio == pytest.approx(noise.ratio)
    assert raised.virial_ratio == pytest.approx(noise.virial_ratio)


def test_an_unknown_criterion():
    with pytest.raises(InputError, match="criterion"):
        select_joint_noise(*problem(np.random.default_rng(0)), prior=1.0, criterion="magic")


def three_kinds(rng, n=80, r=15):
    """Energies, forces and virials of a linear function, with a noise for each."""
    kind = np.repeat([0, 1, 2], [n, 5 * n, 2 * n])
    Phi = rng.normal(size=(len(kind), r))
    noise = np.array([0.05, 0.5, 0.01])[kind]
    y = Phi @ rng.normal(size=r) + noise * rng.normal(size=len(kind))
    groups = np.concatenate([np.arange(n), np.repeat(np.arange(n), 5), np.repeat(np.arange(n), 2)])
    return Phi, y, kind, groups


def test_virials_have_a_noise_of_their_own():
    found = [
        select_joint_noise(
            *three_kinds(np.random.default_rng(seed)), prior=1.0, criterion="evidence"
        )
        for seed in range(5)
    ]
    for name, expected in (("energies", 0.05), ("forces", 0.5), ("virials", 0.01)):
        noises = np.sqrt([getattr(one, name) for one in found])
        assert np.median(noises) == pytest.approx(expected, rel=0.35)
    one = found[0]
    assert one.virial_ratio == pytest.approx(one.energies / one.virials)
    given = {"energies": 0.1, "forces": 2.0, "virials": 3.0}
    known = select_joint_noise(*three_kinds(np.random.default_rng(0)), prior=1.0, **given)
    assert (known.energies, known.forces, known.virials, known.n_tried) == (0.1, 2.0, 3.0, 0)


def test_the_evidence_of_three_kinds_is_that_of_the_joint_gaussian():
    Phi, y, kind, groups = three_kinds(np.random.default_rng(1), n=6, r=4)
    kinds = tuple(np.flatnonzero(kind == k) for k in range(3))
    nll = evidence(Observations(Phi, y, np.ones(len(y)), kinds, groups), 0.7)

    def expected(*variances):
        covariance = 0.7 * Phi @ Phi.T + np.diag(np.array(variances)[kind])
        return -multivariate_normal(cov=covariance).logpdf(y)

    constant = nll(0.1, 0.2, 0.3) - expected(0.1, 0.2, 0.3)
    for some in ((0.01, 0.2, 0.3), (0.1, 3.0, 0.3), (0.1, 0.2, 0.001)):
        assert nll(*some) - expected(*some) == pytest.approx(constant, abs=1e-8)


def test_a_kind_that_is_not_there_is_not_looked_for():
    Phi, y, kind, groups = three_kinds(np.random.default_rng(2))
    some = kind != 1
    given = (Phi[some], y[some], groups[some])
    found = select_joint_noise(given[0], given[1], kind[some], given[2], prior=1.0)
    as_forces = select_joint_noise(given[0], given[1], kind[some] > 0, given[2], prior=1.0)
    assert found.virials == pytest.approx(as_forces.forces)
    assert found.energies == pytest.approx(as_forces.energies)
    assert found.n_tried == as_forces.n_tried
