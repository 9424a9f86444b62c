import numpy as np
import oracle
import pytest
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.arrays import distinct_rows, joined_groups
from qualms.errors import NumericalError, QualmsWarning
from qualms.gp.ensemble import (
    METHODS,
    InaccurateError,
    MemberProblem,
    ProblemSize,
    draw_members,
    ensemble_mean_std,
    estimated_costs,
    normal_product,
    out_of_bag_prediction,
    predict,
    project,
    solve_by_conjugate_gradients,
    solve_members,
    subsample_size,
)
from qualms.gp.sparse_gp import ProjectedProcess, fit_projected_process

EXACT = ("dual", "direct", "complement")
TOLERANCE = 1e-3


def whitened_features(rng, n_train, rank):
    """Clustered rows whose columns decay like the spectrum of a smooth kernel; mean k_nn = 1."""
    centres = rng.standard_normal((5, rank))
    rows = centres[rng.integers(5, size=n_train)] + rng.standard_normal((n_train, rank))
    Phi = rows * (1.0 + np.arange(rank)) ** -1.0
    return Phi / np.sqrt(np.mean(np.sum(Phi**2, axis=1)))


def targets(rng, Phi, n_outputs=1):
    smooth = np.sin(3 * Phi @ rng.standard_normal((Phi.shape[1], n_outputs)))
    return smooth + 0.05 * rng.standard_normal(smooth.shape)


def subsamples(rng, n_train, n_members, n):
    counts = np.zeros((n_train, n_members), dtype=np.intp)
    for i in range(n_members):
        counts[rng.permutation(n_train)[:n], i] = 1
    return counts


def bootstraps(rng, n_train, n_members):
    draws = rng.integers(n_train, size=(n_members, n_train))
    return np.stack([np.bincount(d, minlength=n_train) for d in draws], axis=1)


def full_model(Phi, Y, noise_variance, sample_weight=None):
    shared = Y.mean(axis=2) if Y.ndim == 3 else Y
    return fit_projected_process(
        np.asarray(Phi, dtype=np.float64), shared, noise_variance, sample_weight=sample_weight
    )


def case(name):
    """Return Phi, Y, counts, noise_variance, sample_weight."""
    rng = np.random.default_rng(7)
    N, r, n_members, noise = 120, 25, 6, 1e-3
    sizes = {"n < r": 12, "n close to N": 115, "one row absent": 119, "n just above r": 30}
    n = sizes.get(name.split(":")[0], 60)
    n_members = 2 if name == "two members" else n_members
    Phi = whitened_features(rng, N, 1 if name == "one representative" else r)
    if name == "float32":
        Phi = Phi.astype(np.float32)
    elif name == "rank-deficient":
        Phi[:, 15:] = Phi[:, :10] @ rng.standard_normal((10, 10))
    elif name == "zero rows":
        Phi[::3] = 0
    elif "tiny noise" in name:
        noise = 1e-10
    elif name == "strong noise":
        noise = 10.0
    elif name == "fortran order":
        Phi = np.asfortranarray(Phi)
    n_outputs = 3 if "outputs" in name else 1
    Y = targets(rng, Phi, n_outputs) * 10.0 ** np.arange(n_outputs)
    counts = subsamples(rng, N, n_members, n)
    if "bootstrap" in name:
        counts = bootstraps(rng, N, n_members)
    weight = rng.uniform(0.2, 3.0, N) if "weights" in name else None
    if "own targets" in name:
        Y = Y[:, :, None] - (Y.T @ counts / counts.sum(axis=0))
    return Phi, Y, counts, noise, weight


CASES = [
    "subsampling",
    "bootstrap with weights",
    "outputs with own targets and weights",
    "n < r: tiny noise",
    "n < r: outputs with own targets and weights",
    "n just above r",
    "n close to N",
    "one row absent",
    "rank-deficient",
    "tiny noise",
    "strong noise",
    "zero rows",
    "two members",
    "one representative",
    "float32",
    "fortran order",
]


def prediction_error(Phi, weights, expected):
    """RMS error of each member's predictions over the RMS ensemble std, per output."""
    F = np.einsum("nr,rti->nti", np.asarray(Phi, dtype=np.float64), expected)
    error = np.einsum("nr,rti->nti", np.asarray(Phi, dtype=np.float64), weights - expected)
    ensemble_std = np.sqrt(F.var(axis=2, ddof=1).mean(axis=0))
    return np.sqrt((error**2).mean(axis=0)) / ensemble_std[:, None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", [*EXACT, "cg", "auto"])
def test_members_equal_explicit_inverses(name, method):
    Phi, Y, counts, noise, weight = case(name)
    if method == "complement" and counts.max() > 1:
        pytest.skip("the complement of a bootstrap is not defined")
    if method in ("complement", "cg") and name.startswith("n < r"):
        pytest.skip("too few rows; see the tests of falling back")
    expected = oracle.member_weights(Phi, Y, counts, noise, weight)
    full = full_model(Phi, Y, noise, weight)
    solved = solve_members(Phi, Y, counts, full, sample_weight=weight, method=method)
    assert solved.weights.shape == expected.shape
    assert solved.weights.dtype == np.float64
    assert solved.method == method or method == "auto"
    if solved.method == "cg":
        assert solved.n_iterations > 0
        error = prediction_error(Phi, solved.weights, expected)
        assert np.sqrt(np.mean(error**2, axis=1)).max() < TOLERANCE
        assert error.max() < 2 * TOLERANCE
    else:
        assert solved.n_iterations == 0
        assert prediction_error(Phi, solved.weights, expected).max() < 1e-6
        size = np.abs(expected).max()
        np.testing.assert_allclose(solved.weights, expected, rtol=1e-6, atol=1e-6 * size)


def test_cg_holds_its_tolerance_over_many_problems():
    for seed in range(15):
        rng = np.random.default_rng(seed)
        N, r = 400, int(rng.integers(20, 100))
        n, noise = int(rng.integers(110, 390)), 10 ** rng.uniform(-7, -1)
        Phi = whitened_features(rng, N, r)
        Y, counts = targets(rng, Phi), subsamples(rng, N, 8, n)
        full = full_model(Phi, Y, noise)
        tolerance = 10 ** rng.uniform(-5, -2)
        expected = solve_members(Phi, Y, counts, full, method="direct").weights
        solved = solve_members(Phi, Y, counts, full, method="cg", tolerance=tolerance)
        per_member = prediction_error(Phi, solved.weights, expected)
        assert np.sqrt(np.mean(per_member**2)) < tolerance
        assert per_member.max() < 2 * tolerance


@pytest.mark.parametrize("method", [*EXACT, "cg", "auto"])
def test_labels_of_absent_rows_never_enter(method):
    Phi, Y, counts, _, _ = case("subsampling")
    # One direction that only the first row determines, hardly any noise, and a wild label.
    Phi = np.hstack([Phi, np.eye(len(Phi), 1)])
    absent = np.flatnonzero(counts[0] == 0)
    first, second = (
        solve_members(
            Phi, y, counts, full_model(Phi, y, 1e-6), method=method, tolerance=1e-6
        ).weights[:, :, absent]
        for y in (Y, Y + 100.0 * np.eye(len(Y), 1))
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-3)
    assert np.all(np.abs(first[-1]) < 1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("n < r")])
@pytest.mark.parametrize("method", ["cg", "complement"])
def test_too_few_rows_for_the_full_model_to_help(name, method):
    Phi, Y, counts, noise, weight = case(name)
    expected = oracle.member_weights(Phi, Y, counts, noise, weight)
    full = full_model(Phi, Y, noise, weight)
    with pytest.warns(QualmsWarning):
        solved = solve_members(Phi, Y, counts, full, sample_weight=weight, method=method)
    assert solved.method == "dual"
    assert prediction_error(Phi, solved.weights, expected).max() < 1e-6
    auto = solve_members(Phi, Y, counts, full, sample_weight=weight)
    np.testing.assert_array_equal(auto.weights, solved.weights)


def test_cg_that_does_not_converge_warns_and_solves_exactly():
    Phi, Y, counts, noise, _ = case("tiny noise")
    full = full_model(Phi, Y, noise)
    expected = oracle.member_weights(Phi, Y, counts, noise)
    with pytest.warns(QualmsWarning):
        solved = solve_members(Phi, Y, counts, full, method="cg", max_iterations=2)
    assert solved.method in ("dual", "direct")
    assert solved.n_iterations == 0
    assert prediction_error(Phi, solved.weights, expected).max() < 1e-6


def slow_problem():
    """About as many rows as features and hardly any noise: CG converges, but slowly."""
    rng = np.random.default_rng(0)
    Phi = whitened_features(rng, 400, 80)
    Y, counts = targets(rng, Phi), subsamples(rng, 400, 4, 90)
    return Phi, Y, counts, full_model(Phi, Y, 1e-7)


def test_cg_gives_up_when_its_rate_is_too_low():
    Phi, Y, counts, full = slow_problem()
    weight = np.ones(len(Phi))
    per_member = np.repeat(Y.T[None], counts.shape[1], axis=0)
    problem = MemberProblem(Phi, per_member, counts.T * weight, weight, full, True)
    patient = solve_by_conjugate_gradients(problem, 1e-3, may_give_up=True)
    assert patient.n_iterations > 40
    for may_give_up, steps in ((True, "1[0-9]|2[0-3]"), (False, "24")):
        with pytest.raises(InaccurateError, match=f"({steps}) iterations"):
            solve_by_conjugate_gradients(problem, 1e-3, 24, may_give_up=may_give_up)


def test_auto_abandons_cg_without_a_warning_where_it_is_slow(monkeypatch):
    Phi, Y, counts, full = slow_problem()
    costs = {"dual": 1e9, "complement": 1e9, "cg": 0.0, "direct": 1e9}
    monkeypatch.setattr("qualms.gp.ensemble.estimated_costs", lambda size: dict(costs))
    solved = solve_members(Phi, Y, counts, full)  # warnings are errors
    assert solved.method in ("dual", "direct")
    expected = oracle.member_weights(Phi, Y, counts, full.noise_variance)
    assert prediction_error(Phi, solved.weights, expected).max() < 1e-4


def test_complement_that_cancels_falls_back():
    # A full model whose Gram matrix is not that of Phi stands for one lost to rounding.
    Phi, Y, counts, noise, _ = case("n close to N")
    full = full_model(Phi, Y, noise)
    expected = oracle.member_weights(Phi, Y, counts, noise)
    for factor in (0.1, 1 + 1e-3):
        wrong = full_model(factor * Phi, Y, noise)
        with pytest.warns(QualmsWarning):
            solved = solve_members(Phi, Y, counts, wrong, method="complement")
        assert solved.method in ("dual", "direct")
        assert prediction_error(Phi, solved.weights, expected).max() < 1e-6
    assert solve_members(Phi, Y, counts, full, method="complement").method == "complement"


def test_noise_lost_in_rounding_is_an_error():
    rng = np.random.default_rng(0)
    Phi = 1e6 * np.repeat(rng.standard_normal((50, 1)), 4, axis=1)
    Y, counts = rng.standard_normal((50, 1)), subsamples(rng, 50, 3, 30)
    unit = ProjectedProcess(np.zeros((4, 1)), np.eye(4), np.eye(4), 1e-12)
    with pytest.raises(NumericalError):
        solve_members(Phi, Y, counts, unit, method="direct")


def test_thin_products_over_several_blocks(monkeypatch):
    monkeypatch.setattr("qualms.gp.ensemble.block_size", lambda Phi: 7)
    rng = np.random.default_rng(0)
    Phi, W, Z = (rng.standard_normal(shape) for shape in ((30, 4), (3, 4), (3, 30)))
    C = rng.uniform(size=(3, 30))
    np.testing.assert_allclose(project(Phi, Z), Z @ Phi)
    np.testing.assert_allclose(predict(Phi, W), W @ Phi.T)
    F, product = normal_product(Phi, C, 0.5, W)
    np.testing.assert_allclose(F, W @ Phi.T)
    for q in range(3):
        np.testing.assert_allclose(product[q], (Phi.T * C[q]) @ Phi @ W[q] + 0.5 * W[q])


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("Phi", {"Phi": np.ones((20, 3), dtype=int)}),
        ("Phi", {"Phi": np.full((20, 3), np.nan)}),
        ("Y", {"Y": np.ones(20)}),
        ("Y", {"Y": np.ones((19, 1))}),
        ("Y", {"Y": np.ones((20, 1, 3))}),
        ("Y", {"Y": np.full((20, 1), np.inf)}),
        ("counts", {"counts": np.ones((20, 1))}),
        ("counts", {"counts": -np.ones((20, 4))}),
        ("counts", {"counts": np.zeros((20, 4))}),
        ("counts", {"counts": np.full((20, 4), np.nan)}),
        ("full", {"Phi": np.ones((20, 2))}),
        ("sample_weight", {"sample_weight": np.zeros(20)}),
        ("method", {"method": "magic"}),
        ("method", {"method": "complement", "counts": 2 * np.ones((20, 4))}),
        ("tolerance", {"tolerance": 0.0}),
        ("max_iterations", {"max_iterations": 0}),
    ],
)
def test_bad_input_names_the_parameter(parameter, change):
    rng = np.random.default_rng(0)
    Phi = whitened_features(rng, 20, 3)
    Y, counts = targets(rng, Phi), subsamples(rng, 20, 4, 10)
    arguments = {"Phi": Phi, "Y": Y, "counts": counts, "full": full_model(Phi, Y, 0.1)}
    with rejects(parameter):
        solve_members(**(arguments | change))


@pytest.mark.parametrize("seed", [4, 36, 7])
@pytest.mark.parametrize("method", ["cg", "auto"])
@pytest.mark.filterwarnings("ignore::qualms.QualmsWarning")
def test_cg_with_many_rows_of_high_leverage(method, seed):
    """Rows of very different size, of which many alone determine a direction."""
    rng = np.random.default_rng(seed)
    Phi = rng.normal(size=(600, 150)) * np.exp(2 * rng.normal(size=(600, 1)))
    Y = Phi @ rng.normal(size=(150, 1)) + rng.normal(size=(600, 1))
    full = full_model(Phi, Y, 1e-4 * np.mean(Phi**2))
    counts = np.stack([rng.permutation(600) < 540 for _ in range(6)], axis=1)
    exact, solved = (
        Phi @ solve_members(Phi, Y, counts, full, method=m).weights[:, 0]
        for m in ("direct", method)
    )
    ensemble_std = np.sqrt(np.mean(exact.var(axis=1, ddof=1)))
    assert np.sqrt(np.mean((solved - exact) ** 2)) < 1e-3 * ensemble_std


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
@given(st.integers(0, 2**31), st.integers(2, 5))
def test_out_of_bag_prediction_is_the_oracle_s(seed, min_absent):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(12, 2, 6))
    absent = rng.random((12, 6)) < 0.5
    result = out_of_bag_prediction(members, absent, min_absent=min_absent)
    for t in range(2):
        expected = oracle.out_of_bag_prediction(members[:, t], absent, min_absent)
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
    ("n_train", "rank", "n_present", "n_members", "cheapest"),
    [
        (20_000, 5000, 1000, 16, "dual"),
        (20_000, 5000, 10_000, 16, "cg"),
        (20_000, 5000, 19_998, 2, "complement"),
        (200_000, 50, 100_000, 4, "direct"),
    ],
)
def test_estimated_costs(n_train, rank, n_present, n_members, cheapest):
    size = ProblemSize(
        n_train, rank, n_members, 1, n_present, float(rank), n_present / n_train, TOLERANCE
    )
    assert min(METHODS, key=estimated_costs(size).__getitem__) == cheapest
    for d_eff in (-3.0, 1e6):  # an estimate may leave its range
        costs = estimated_costs(size._replace(effective_dimension=d_eff))
        assert all(0 < cost < np.inf for cost in costs.values())


@pytest.mark.parametrize(
    ("parameter", "call"),
    [
        *[
            ("subsample", lambda n=n: subsample_size(n, 10))
            for n in (0.0, 1.0, -0.5, 10, 0, np.nan, "half", True)
        ],
        ("n_train", lambda: subsample_size(0.5, 1)),
        ("n_members", lambda: draw_members(10, 1, 0.5, np.random.default_rng(0))),
        ("groups", lambda: draw_members(3, 4, 0.5, np.random.default_rng(0), groups=[1, 1, 1])),
        ("groups", lambda: draw_members(3, 4, 0.5, np.random.default_rng(0), groups=[1, 2])),
        ("members", lambda: ensemble_mean_std(np.ones((3, 1)))),
        ("absent", lambda: out_of_bag_prediction(np.ones((3, 4)), np.ones((3, 3), dtype=bool))),
        (
            "min_absent",
            lambda: out_of_bag_prediction(
                np.ones((3, 4)), np.ones((3, 4), dtype=bool), min_absent=1
            ),
        ),
    ],
)
def test_bad_input_of_resampling(parameter, call):
    with rejects(parameter):
        call()
