import numpy as np
import pytest
from checks import rejects
from scipy.optimize import minimize_scalar

from qualms.gp.ensemble import draw_blocks
from qualms.gp.noise import (
    excess_of,
    left_out_errors,
    noise_grid,
    select_joint_noise,
    select_noise,
    typical_log,
)
from qualms.gp.sparse_gp import solve_projected_process
from qualms.gp.sums import BlockSums, KeptRows, sum_rows

N = 30
rng = np.random.default_rng(3)
PHI = rng.normal(size=(N, 8)) * np.geomspace(1, 0.1, 8)
Y = rng.normal(size=N)
WEIGHT = rng.uniform(0.5, 3, size=N)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("step", [1, 3])
def test_scores_are_mean_absolute_errors_of_rows_or_groups_left_out(weight, size, step):
    """Of all rows, or of those of every third group, with the sums over all."""
    Y2, grid = np.stack([Y, Y**2], axis=1), np.geomspace(1e-4, 10, 7)
    groups, w = np.arange(N) // size, np.ones(N) if weight is None else weight
    some = groups % step == 0
    selection = select_noise(
        PHI[some],
        Y2[some],
        grid,
        sample_weight=None if weight is None else weight[some],
        sums=None if step == 1 else sum_rows(PHI, Y2, weight),
        groups=None if size == 1 else groups[some],
    )
    for noise, score in zip(grid, selection.scores, strict=True):
        residuals = np.empty((N, 2))
        for group in np.unique(groups):
            out = groups == group
            model = solve_projected_process(sum_rows(PHI[~out], Y2[~out], w[~out]), noise)
            residuals[out] = Y2[out] - model.mean(PHI[out])
        expected = w[some] @ np.abs(residuals[some]).mean(axis=1) / w[some].sum()
        assert score == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_search_finds_the_noise_that_the_whole_curve_has(monkeypatch, grouped):
    Y2 = np.stack([Y, np.sin(Y)], axis=1)
    options = {"sample_weight": WEIGHT, "groups": np.arange(N) // 3 if grouped else None}
    grid = noise_grid(float(np.var(Y2)))
    whole = select_noise(PHI, Y2, grid, **options)
    monkeypatch.setattr("qualms.gp.noise._MANY_COLUMNS", 0)
    searched = select_noise(PHI, Y2, grid, **options)
    assert searched.noise_variance == pytest.approx(whole.noise_variance, rel=1e-6)
    assert len(searched.scores) < 15
    assert searched.scores.min() == pytest.approx(whole.scores.min(), rel=1e-6)


def test_noise_is_robust_against_one_outlier():
    random = np.random.default_rng(0)
    Z = np.zeros((400, 11))
    Z[:, :10] = random.normal(size=(400, 10))
    Z[0] = np.eye(11)[10]  # nothing else is like it
    y = Z[:, :10] @ random.normal(size=10) + 0.01 * random.normal(size=400)
    y[0] = 1000.0
    grid = noise_grid(1.0)
    odd = select_noise(Z, y, grid).noise_variance
    assert odd == pytest.approx(select_noise(Z[1:], y[1:], grid).noise_variance, rel=1.0)


def test_the_noise_of_synthetic_data_is_found():
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        Z = random.normal(size=(400, 10))
        y = Z @ random.normal(size=10) + 0.3 * random.normal(size=400)
        found.append(select_noise(Z, y, noise_grid(np.var(y))).noise_variance)
    # Leave-one-out looks at the error alone, which is flat near its minimum, so it scatters.
    assert np.median(found) == pytest.approx(0.09, rel=1.0)


def problem(rng, n=80, r=15, rows=(1, 6), noise=(0.05, 0.5)):
    """Energies, forces and perhaps virials of a linear function: rows for each, with noise."""
    kind = np.repeat(np.arange(len(rows)), np.multiply(n, rows))
    Phi = rng.normal(size=(len(kind), r))
    y = Phi @ rng.normal(size=r) + np.array(noise)[kind] * rng.normal(size=len(kind))
    return Phi, y, kind, np.concatenate([np.repeat(np.arange(n), k) for k in rows])


def joint_noise(Phi, y, kind, groups, fixed=None):
    """Select the noise of quantities that have a number for each row."""
    names = enumerate(("energy", "forces", "stress"))
    rows = {name: np.flatnonzero(kind == k) for k, name in names if np.any(kind == k)}
    return select_joint_noise(*observed(Phi, y, rows, groups), prior=1.0, fixed=fixed or {})


def observed(Phi, y, rows, groups):
    """Rows in five blocks of groups, all of them kept, and their sums."""
    columns, every = y[:, None], np.arange(len(y))
    kinds = np.zeros(int(groups.max()) + 1, dtype=int)
    for k, some in enumerate(rows.values()):
        kinds[groups[some]] += 2**k
    rng = np.random.default_rng(0)
    draw = draw_blocks(np.arange(len(kinds)), rng, n_members=0, kinds=kinds).take(groups)
    kept = KeptRows(Phi, columns, rows, groups, draw, np.ones(len(every)))
    sums = {k: draw.take(some).sum_blocks(Phi[some], columns[some]) for k, some in rows.items()}
    return kept, BlockSums.of(sums, draw.n_blocks)


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


def test_left_out_errors_are_those_of_models_without_the_structures():
    Phi, y, kind, groups = problem(np.random.default_rng(2), n=20, r=5, rows=(1, 3))
    few = (kind == 0) | (groups < 8)
    Phi, y, is_force, groups = Phi[few], y[few], kind[few] == 1, groups[few]
    kinds = (np.flatnonzero(~is_force), np.flatnonzero(is_force))
    kept, sums = observed(Phi, y, dict(zip(("energy", "forces"), kinds, strict=True)), groups)
    errors = left_out_errors(kept, sums, 0.7)
    for of_forces in (1 / 0.3, 0.0):
        z = np.empty(len(y))
        for group in range(20):  # energy and forces
            rows, rest = np.flatnonzero(groups == group), np.flatnonzero(groups != group)
            weight = np.where(is_force, of_forces, 1 / 0.02)[rest]
            A = Phi[rest].T @ (weight[:, None] * Phi[rest]) + np.eye(5) / 0.7
            z[rows] = y[rows] - Phi[rows] @ np.linalg.inv(A) @ Phi[rest].T @ (weight * y[rest])
        # A kind counts by the groups that have it.
        energies, forces = (score_of_groups(z[rows], groups[rows]) for rows in kinds)
        found = errors(0.02, 1 / of_forces if of_forces else np.inf)
        assert [len(of_groups) for of_groups in found] == [20, 8]
        means = [of_groups.mean() for of_groups in found]
        np.testing.assert_allclose(means, [energies, 8 / 20 * forces], atol=1e-9)


def test_the_score_has_no_units_and_no_group_decides_alone():
    a = np.random.default_rng(0).exponential(size=40)
    for factor in (1e-8, 3.0, 1e9):
        assert typical_log(factor * a) == pytest.approx(typical_log(a) + np.log(factor))
    # One group's errors, however large, are worth 2 ln(factor)/G at most, and zeros next to none.
    steps = np.diff([typical_log(np.append(a[1:], size)) for size in (1e3, 1e4, 1e5)])
    assert np.all(steps > 0)
    assert np.all(steps <= 2 * np.log(10) / 40 + 1e-12)
    assert typical_log(np.append(a[1:], 0.0)) == pytest.approx(typical_log(a), abs=0.1)
    assert np.isfinite(typical_log(np.zeros(3)))
    assert typical_log(np.full(3, 2.0)) == pytest.approx(2 * np.log(4.0) - np.log(2.0))
    assert typical_log(np.empty(0)) == 0.0


def test_both_kinds_keep_small_errors():
    # Energies do not depend on half of the weights, and forces not on the other half.
    rng = np.random.default_rng(4)
    Phi, _, kind, groups = problem(rng, n=60, r=8)
    is_force = kind == 1
    Phi[is_force, :4] = 0.0
    Phi[~is_force, 4:] = 0.0
    w = rng.normal(size=8)
    noise = np.where(is_force, 0.3, 0.01)
    y = Phi @ w + noise * rng.normal(size=len(Phi))
    found = joint_noise(Phi, y, is_force, groups)
    rows = {"energy": np.flatnonzero(~is_force), "forces": np.flatnonzero(is_force)}
    errors = left_out_errors(*observed(Phi, y, rows, groups), 1.0)

    def score(*variances):
        return sum(of_groups.mean() for of_groups in errors(*variances))

    least = score(found["energy"], found["forces"])
    # Three decades that gain less than three per cent are no reason to go there.
    for factor in (1e-3, 1e3):
        assert least <= score(factor * found["energy"], found["forces"]) + 0.03
        assert least <= score(found["energy"], factor * found["forces"]) + 0.03


def test_differences_within_their_standard_error_do_not_count():
    a = np.random.default_rng(0).normal(size=50)
    d = np.tile([0.1, 0.5], 25)
    error = d.std(ddof=1) / np.sqrt(50)
    for sign in (-1, 1):
        assert excess_of(a + sign * d, a) == pytest.approx(sign * (0.3 - error))
    assert excess_of(a + d - 0.3 + 0.9 * error, a) == 0
    assert excess_of(a[:1] + 9, a[:1]) == excess_of(a[:0], a[:0]) == 0


def test_chance_in_few_energies_does_not_decide_on_forces():
    """The noise of 600 force rows scatters little, although that of 20 energies does."""
    found = []
    for seed in range(12):
        Phi, y, kind, groups = problem(
            np.random.default_rng(seed), n=20, r=200, rows=(1, 30), noise=(0.05, 0.1)
        )
        found.append(joint_noise(Phi, y, kind, groups)["forces"] ** 0.5)
    low, high = np.quantile(found, [0.1, 0.9])
    assert high < 2 * low


def test_forces_do_not_make_energies_worse():
    # Forces follow other weights than energies: what is learned from one is wrong for the other.
    rng = np.random.default_rng(0)
    Phi, _, kind, groups = problem(rng, n=80, r=8, rows=(1, 9))
    is_force = kind == 1
    w = rng.normal(size=(8, 2)) @ [[1.0, 1.0], [0.0, 0.1]]
    noise = np.where(is_force, 0.02, 0.1)
    y = np.where(is_force, Phi @ w[:, 1], Phi @ w[:, 0]) + noise * rng.normal(size=len(Phi))
    found = joint_noise(Phi, y, is_force, groups)
    rows = {"energy": np.flatnonzero(~is_force), "forces": np.flatnonzero(is_force)}
    errors = left_out_errors(*observed(Phi, y, rows, groups), 1.0)
    alone = min((errors(v, np.inf)[0] for v in np.geomspace(1e-6, 1.0, 13)), key=np.mean)
    # Beyond the standard error of the difference.
    assert excess_of(errors(found["energy"], found["forces"])[0], alone) < 0.03


@pytest.mark.parametrize("least", [0.0, 1e-15])
def test_forces_that_are_zero_by_symmetry_do_not_count(least):
    """Not even if rounding has left something of them, in most of the structures."""
    rng = np.random.default_rng(6)
    Phi, y, kind, groups = problem(rng, n=40)
    Phi[:, 10:] = Phi[:, :5]  # no solution with very little noise
    some = (kind == 0) | (groups < 10)
    expected = joint_noise(Phi[some], y[some], kind[some] == 1, groups[some])
    Phi[~some] *= least
    y[~some] = least * rng.normal(size=np.count_nonzero(~some))
    found = joint_noise(Phi, y, kind == 1, groups)
    for name, variance in expected.items():
        assert found[name] == pytest.approx(variance, rel=3.0)


def test_virials_have_a_noise_of_their_own():
    kinds = {"rows": (1, 5, 2), "noise": (0.05, 0.5, 0.01)}
    variances = [joint_noise(*problem(np.random.default_rng(seed), **kinds)) for seed in range(10)]
    for name, expected in (("energy", 0.05), ("forces", 0.5), ("stress", 0.01)):
        noise = np.median([np.sqrt(selected[name]) for selected in variances])
        assert 0.5 < noise / expected < 2


def test_targets_of_another_length_are_rejected():
    with rejects("y"):
        select_noise(np.eye(5), np.ones(4), np.geomspace(0.1, 10, 5))


def test_joint_noise_keeps_given_variances():
    arguments = problem(np.random.default_rng(6), n=10, r=4, rows=(1, 2))
    found = joint_noise(*arguments, fixed={"forces": 0.2})
    assert found["forces"] == 0.2
    assert found["energy"] > 0
