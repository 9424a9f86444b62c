"""Blended predictions, the three sources of variance, and conformal intervals."""

import math
from dataclasses import replace

import numpy as np
import oracle
import pytest
from atomistic_fixtures import (
    ENERGY,
    copies,
    make_force_model,
    make_model,
    problem_of,
    reference_values,
    rows_of,
    same_predictions,
)
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms import (
    AtomisticModel,
    Prediction,
    ProjectedProcessRegressor,
    QualmsWarning,
    ResamplingRegressor,
    score,
)
from qualms.atomistic import training
from qualms.calibration.conformal import fit_conformal
from qualms.calibration.members import calibrated_members, source_members
from qualms.calibration.methods import (
    MIN_POINTS,
    SourcesCalibration,
    build_calibration,
    fit_calibration,
    fit_inverse_dof,
)
from qualms.calibration.points import CalibrationData, FullModelData
from qualms.errors import CalibrationError
from qualms.gp.ensemble import Residuals, ensemble_mean_std, fit_centre
from qualms.gp.kernels import PowerKernel, normalize_rows
from qualms.gp.sparse_gp import (
    leave_out,
    posterior_deviations,
    solve_projected_process,
    whiten,
)
from qualms.gp.sums import sum_rows
from qualms.progress import Stages


def synthetic_ensemble(rng, n, c, centre, alpha):
    """Members N(μ, s²), reference N(μ, α²s²), and a blend that contains the ensemble mean."""
    s = np.exp(rng.normal(-1.0, 0.7, size=n))
    deviations = rng.normal(size=(n, c)) * s[:, None]
    z = alpha * s * rng.normal(size=n) - centre * deviations.mean(axis=1)
    std = deviations.std(axis=1, ddof=1)
    return CalibrationData(z, std, np.full(n, c), np.ones(n), centre=centre)


# --- the centre ---


@pytest.mark.parametrize("centre", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("c", [3, 4, 16, 64])
@pytest.mark.parametrize("method", ["student", "shrinkage"])
def test_alpha_is_recovered_for_any_share_of_the_ensemble_mean(centre, c, method):
    data = synthetic_ensemble(np.random.default_rng(c), 20_000, c, centre, 1.7)
    fitted = fit_calibration(data, method)
    # A standard error of about 1/√(2n), more where ŝ is of two degrees of freedom.
    assert fitted.alpha == pytest.approx(1.7, rel=0.03)
    assert fitted.centre == centre


def test_the_share_of_the_ensemble_mean_has_the_smallest_error():
    """For many points, whose standard error is small; n_absent differs from N_R."""
    rng, n, n_members = np.random.default_rng(3), 200_000, 8
    s, c = rng.uniform(0.5, 1.5, n), rng.integers(3, n_members + 1, n)
    truth = rng.normal(size=n)
    full = truth + 0.8 * rng.normal(size=n)

    def mean_of(number):
        return 0.5 * truth + s * rng.normal(size=n) / np.sqrt(number)

    std = s * np.sqrt(rng.chisquare(c - 1) / (c - 1))
    found = fit_centre([Residuals(full, mean_of(c), std, c, np.arange(n))], n_members)
    of_all, shares = mean_of(n_members), np.linspace(0, 1, 101)
    errors = [np.mean(((1 - share) * full + share * of_all) ** 2) for share in shares]
    assert found == pytest.approx(shares[np.argmin(errors)], abs=0.02)


def test_the_share_is_less_by_its_standard_error():
    """Over many draws of few points or groups: by the standard deviation of the fitted share."""
    rng, n, size = np.random.default_rng(4), 200, 5
    found: dict[str, list[float]] = {"points": [], "groups": []}
    for _ in range(300):
        common = np.repeat(rng.normal(size=(2, n)), size, axis=1)
        for name, draw in (("points", rng.normal(size=(2, n * size))), ("groups", common)):
            full, members = draw[0], 0.5 * draw[0] + draw[1]  # smallest at λ = 0.4
            groups = np.arange(n * size) // (size if name == "groups" else 1)
            zero, many = np.zeros(n * size), np.full(n * size, 8)
            found[name].append(fit_centre([Residuals(full, members, zero, many, groups)], 8))
    for shares in found.values():
        assert np.mean(shares) + np.std(shares) == pytest.approx(0.4, abs=0.01)
    assert np.std(found["groups"]) > 2 * np.std(found["points"])


@given(st.integers(0, 2**31), st.integers(2, 8))
@settings(max_examples=20)
def test_the_share_is_a_share(seed, n_members):
    rng = np.random.default_rng(seed)
    full, members = rng.normal(size=(2, 10))
    std, n_absent = rng.random(10), rng.integers(2, n_members + 1, size=10)
    found = fit_centre([Residuals(full, members, std, n_absent, np.arange(10))], n_members)
    assert 0 <= found <= 1


# --- the full model without a point ---


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [4, 4096])
def test_rows_left_out_are_predicted_as_by_a_model_without_them(weighted, block, monkeypatch):
    monkeypatch.setattr("qualms.arrays.BLOCK", block)
    rng = np.random.default_rng(1)
    Phi, y, groups = rng.normal(size=(30, 6)), rng.normal(size=30), rng.integers(8, size=30)
    weight = rng.random(30) + 0.5 if weighted else np.ones(30)
    model = solve_projected_process(sum_rows(Phi, y, weight), 0.3)
    found = leave_out(model, Phi, y, sample_weight=weight, groups=groups)
    alone = leave_out(model, Phi, y, sample_weight=weight)
    for i in range(30):
        for kept, variance, residual in (
            (groups != groups[i], found.variance[i], found.residuals[i, 0]),
            (np.arange(30) != i, alone.variance[i], alone.residuals[i, 0]),
        ):
            A = Phi[kept].T @ np.diag(weight[kept]) @ Phi[kept] + 0.3 * np.eye(6)
            w = np.linalg.inv(A) @ Phi[kept].T @ (weight[kept] * y[kept])
            assert variance == pytest.approx(0.3 * Phi[i] @ np.linalg.inv(A) @ Phi[i], rel=1e-9)
            assert residual == pytest.approx(y[i] - Phi[i] @ w, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("groups", [np.arange(24), np.arange(24) // 3])
def test_representatives_of_a_point_can_be_left_out_with_it(groups):
    rng = np.random.default_rng(11)
    X = normalize_rows(rng.random((24, 6)))
    kernel, y, noise = PowerKernel(3), rng.normal(size=24), 0.05
    representatives = rng.permutation(24)[:8]
    whitening = whiten(kernel(X[representatives], X[representatives]))
    points = representatives[whitening.pivots]
    Phi = whitening.features(kernel(X, X[points]))
    model = solve_projected_process(sum_rows(Phi, y), noise)
    U = np.linalg.inv(whitening.factor)
    own = {g: U[:, groups[points] == g] for g in np.unique(groups[points])}
    found = leave_out(model, Phi, y, groups=groups, group_columns=own)
    plain = leave_out(model, Phi, y, groups=groups)
    np.testing.assert_allclose(found.same_basis, plain.residuals, rtol=1e-9)
    for group in np.unique(groups):
        kept, out = groups != group, groups == group
        others = points[groups[points] != group]
        K_MM, K_NM, K_XM = (kernel(a, X[others]) for a in (X[others], X[kept], X[out]))
        A = K_NM.T @ K_NM + noise * K_MM
        mean = K_XM @ np.linalg.solve(A, K_NM.T @ y[kept])
        variance = noise * np.diag(K_XM @ np.linalg.solve(A, K_XM.T))
        np.testing.assert_allclose(y[out] - found.residuals[out, 0], mean, atol=1e-7)
        np.testing.assert_allclose(found.variance[out], variance, rtol=1e-6, atol=1e-10)


def test_a_kernel_of_low_rank_loses_nothing_with_a_representative():
    """Others would replace it, so that the full model has the smallest error out of bag, too."""
    shares = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(150, 4))  # the default kernel has rank 14
        y = np.sin(X[:, 0]) * X[:, 1] + 0.1 * rng.normal(size=150)
        model = ProjectedProcessRegressor(random_state=seed).fit(X, y)
        groups = np.arange(150)
        assert model.basis_.whitening.columns_of(groups, groups[model.basis_.indices]) == {}
        shares.append(model.centre_)
    assert np.mean(shares) < 0.2


def test_posterior_members_have_the_posterior_covariance():
    rng = np.random.default_rng(2)
    Phi, y = rng.normal(size=(30, 4)), rng.normal(size=30)
    model = solve_projected_process(sum_rows(Phi, y), 0.3)
    drawn = posterior_deviations(model, 20_000, rng, np.arange(4))
    np.testing.assert_allclose(drawn.mean(axis=1), 0, atol=1e-12)
    expected = 0.3 * np.linalg.inv(Phi.T @ Phi + 0.3 * np.eye(4))
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(np.cov(drawn) / scale, expected / scale, atol=0.04)
    assert posterior_deviations(model, 0, rng, np.arange(4)).shape == (4, 0)


def test_posterior_members_do_not_depend_on_the_order_of_independent_representatives():
    rng = np.random.default_rng(4)
    Phi, y = np.linalg.qr(rng.normal(size=(30, 5)))[0], rng.normal(size=30)
    pivots, swapped = np.array([6, 1, 3, 2, 0]), np.array([6, 3, 1, 2, 0])
    drawn = {}
    for name, order, columns in (("a", pivots, slice(None)), ("b", swapped, [0, 2, 1, 3, 4])):
        model = solve_projected_process(sum_rows(Phi[:, columns], y), 0.3)
        drawn[name] = posterior_deviations(model, 8, np.random.default_rng(5), order)
    np.testing.assert_allclose(drawn["b"], drawn["a"][[0, 2, 1, 3, 4]], atol=1e-12)


# --- three sources ---


def three_sources(rng, n=20_000, c=12, coefficients=(1.5, 2.0, 0.5, 0.1)):
    s, p, q = np.exp(rng.normal([-2.0, -2.5, -1.0], [0.4, 0.7, 0.5], size=(n, 3))).T
    a, b, novelty, floor = coefficients
    sigma = np.sqrt((a * s) ** 2 + (b * p) ** 2 + (novelty * q) ** 2 + floor**2)
    std = s * np.sqrt(rng.chisquare(c - 1, size=n) / (c - 1))
    z = sigma * rng.normal(size=n)
    return CalibrationData(z, std, np.full(n, c), np.ones(n), p, q, 0.0), sigma


def test_coefficients_of_all_sources_are_recovered():
    data, sigma = three_sources(np.random.default_rng(3))
    found = SourcesCalibration.fit(data)
    assert build_calibration("sources", found.parameters()) == found
    assert found.posterior == pytest.approx(2.0, rel=0.1)
    assert found.novelty == pytest.approx(0.5, rel=0.1)
    assert found.floor == pytest.approx(0.1, rel=0.1)
    assert found.alpha == pytest.approx(1.5, rel=0.1)
    ratio = found.std_of(data) / sigma
    assert np.median(ratio) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("only", [0, 1, 3])
def test_sources_that_do_not_pay_are_left_out(only):
    coefficients = np.zeros(4)
    coefficients[only] = 1.3
    data, _ = three_sources(np.random.default_rng(only), 3000, coefficients=coefficients)
    found = SourcesCalibration.fit(data)
    values = np.array([found.alpha, found.posterior, found.novelty, found.floor])
    shares = values**2 * [data.mean(data.ensemble_std**2), data.mean(data.posterior_std**2),
                          data.mean(data.novelty_std**2), 1.0]  # fmt: skip
    assert np.argmax(shares) == only
    assert shares[only] > 0.9 * shares.sum()


def test_ensembles_of_few_members_are_shrunk_towards_what_p_predicts():
    rng = np.random.default_rng(4)
    n, c = 4000, 4
    p = np.exp(rng.normal(size=n))
    s = 2 * p * np.exp(0.1 * rng.normal(size=n))
    std = s * np.sqrt(rng.chisquare(c - 1, size=n) / (c - 1))
    data = CalibrationData(s * rng.normal(size=n), std, np.full(n, c), np.ones(n), p, centre=0.0)
    found = SourcesCalibration.fit(data)
    estimate = np.sqrt(found.expected_square(std, c, p))
    assert np.std(np.log(estimate / s)) < 0.15 < 0.4 < np.std(np.log(std / s))


def test_members_have_the_calibrated_variance_and_keep_their_covariance():
    rng = np.random.default_rng(5)
    raw = 3.0 + rng.normal(size=(50, 24)) * np.exp(rng.normal(size=(50, 1)))
    raw[:, :8] += 3.0 - raw[:, :8].mean(axis=1, keepdims=True)
    raw[:, 8:] += 3.0 - raw[:, 8:].mean(axis=1, keepdims=True)
    calibration = SourcesCalibration(alpha=1.2, posterior=0.7, centre=0.0, n_subsampled=8)
    calibration = replace(calibration, excess=3.0, onset=1.0)
    found = Prediction(raw).calibrated(calibration)
    np.testing.assert_allclose(found.mean, 3.0, rtol=1e-12)
    s, p = (ensemble_mean_std(part)[1] for part in (raw[:, :8], raw[:, 8:]))
    np.testing.assert_allclose(found.std, calibration.std(s, 8, p, n_posterior=16), rtol=1e-10)
    correlations = np.corrcoef(source_members(calibration, raw))
    np.testing.assert_allclose(np.corrcoef(found.members), correlations, atol=1e-9)


def test_vectors_are_scaled_as_a_whole():
    rng = np.random.default_rng(6)
    members = rng.normal(size=(7, 3, 12))
    members -= members.mean(axis=-1, keepdims=True)
    members[..., 4:] -= members[..., 4:].mean(axis=-1, keepdims=True)
    members[..., :4] -= members[..., :4].mean(axis=-1, keepdims=True)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    calibration = SourcesCalibration(alpha=1.1, posterior=0.4, floor=0.2, n_subsampled=4)
    for isotropy, excess in ((0.0, 0.0), (0.3, 2.0), (1.0, 2.0)):
        calibration = replace(calibration, excess=excess, onset=0.5)
        found = calibrated_members(calibration, members, isotropy=isotropy)
        turned = np.einsum("ij,njk->nik", rotation, members)
        turned = calibrated_members(calibration, turned, isotropy=isotropy)
        np.testing.assert_allclose(np.einsum("ij,njk->nik", rotation, found), turned, atol=1e-12)


# --- beyond the training domain ---


def test_of_equally_good_sources_those_of_p_are_taken():
    """Where s and p say the same, s alone has the same likelihood and as few parameters."""
    for seed in range(5):
        rng, n = np.random.default_rng(seed), 400
        p = np.exp(0.3 * rng.normal(size=n))
        s = 2.0 * p * np.exp(0.02 * rng.normal(size=n))
        data = CalibrationData(s * rng.normal(size=n), s, np.full(n, 1000), np.ones(n), p, centre=0)
        found = SourcesCalibration.fit(data)
        assert found.posterior == pytest.approx(2.0, rel=0.15)
        assert found.alpha == found.floor == 0


def test_the_excess_begins_where_few_points_are():
    data, _ = three_sources(np.random.default_rng(8), 2000, c=50)
    found = SourcesCalibration.fit(data)
    p, z = data.posterior_std, data.residuals
    assert np.mean(p <= found.onset) == pytest.approx(0.95, abs=0.001)
    assert found.excess == pytest.approx(
        np.mean((z / np.maximum(p, np.quantile(p, 0.05))) ** 2) ** 0.5, rel=0.01
    )
    without = replace(found, excess=0.0)
    squares = found.std_of(data) ** 2 - without.std_of(data) ** 2
    beyond = p > found.onset
    assert not np.any(squares[~beyond])
    expected = found.excess**2 * (p[beyond] ** 2 - found.onset**2)
    np.testing.assert_allclose(squares[beyond], expected, rtol=1e-9)
    # p that is not known, or zero, has none.
    assert SourcesCalibration.fit(replace(data, posterior_std=None)).excess == 0
    assert SourcesCalibration.fit(replace(data, posterior_std=np.zeros(len(p)))).excess == 0
    # Another unit of p is the same calibration.
    other = SourcesCalibration.fit(replace(data, posterior_std=10 * p))
    np.testing.assert_allclose(other.excess * 10, found.excess, rtol=1e-9)


def test_errors_that_grow_where_no_point_was_are_covered_better():
    """The errors of points far away grow as p, but s, which described those nearby, does not."""
    inside = []
    for seed in range(10):
        rng, n = np.random.default_rng(seed), 200
        p = np.exp(0.2 * rng.normal(size=n))
        data = CalibrationData(rng.normal(size=n), np.ones(n), np.full(n, 50), np.ones(n), p)
        found = SourcesCalibration.fit(data)
        far = np.full(500, 6.0)
        std = [c.std(np.ones(500), 50, far) for c in (found, replace(found, excess=0.0))]
        z = 6.0 * rng.normal(size=500)
        inside.append([np.mean(np.abs(z) <= 1.96 * sigma) for sigma in std])
    covered, without = np.mean(inside, axis=0)
    assert covered > 0.9 > 0.5 > without


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("noise", [1.0, 3.0, 10.0])
def test_the_excess_costs_little_where_p_does_not_describe_the_errors(noise, spread):
    """Errors of noisy labels hardly depend on p, which may differ by orders of magnitude."""
    costs, ratios = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)

        def points(n, rng=rng):
            p = np.exp(spread * rng.normal(size=n))
            z = np.hypot(p, noise) * rng.normal(size=n)
            return CalibrationData(z, p, np.full(n, 1000), np.ones(n), p, centre=0.0)

        found, new = SourcesCalibration.fit(points(300)), points(3000)
        without = replace(found, excess=0.0)
        costs.append(new.mean(without.density_of(new) - found.density_of(new)))
        far = new.posterior_std > found.onset
        sigma = np.hypot(new.posterior_std[far], noise)
        ratios.append(np.median(found.std_of(new)[far] / sigma))
    assert np.mean(costs) < 0.03
    assert np.median(ratios) < 2.5


# --- heavy tails ---


def with_tails(rng, dof, n=1000):
    """Points of two sources whose errors are t, or Gaussian, with the standard deviation σ."""
    data, sigma = three_sources(rng, n, c=100, coefficients=(1.5, 0.0, 0.0, 0.1))
    z = rng.normal(size=n) if np.isinf(dof) else rng.standard_t(dof, n) * np.sqrt(1 - 2 / dof)
    # p, which the errors do not depend on, would make σ larger beyond its 95 % quantile.
    return replace(data, residuals=sigma * z, posterior_std=None), sigma


@pytest.mark.parametrize("dof", [4.0, 8.0, np.inf])
def test_sigma_is_the_standard_deviation_whatever_the_tails(dof):
    """Over many draws; and intervals with the fitted ν hold what they promise on new points."""
    rng, scales, tails, inside = np.random.default_rng(int(min(dof, 99))), [], [], []
    levels = np.array([0.5, 0.683, 0.95, 0.99])
    for _ in range(25):
        found = SourcesCalibration.fit(with_tails(rng, dof)[0])
        new, sigma = with_tails(rng, dof, 2000)
        std = found.std_of(new)
        scales.append(np.mean(std**2) / np.mean(sigma**2))
        tails.append(found.inverse_dof)
        prediction = Prediction(mean=np.zeros(2000), std=std, dof=found.predictive_dof(12))
        upper = [prediction.interval(level, "student")[1] for level in levels]
        inside.append(np.mean(np.abs(new.residuals) <= upper, axis=1))
    assert np.mean(scales) == pytest.approx(1.0, abs=0.03)
    assert np.mean(tails) == pytest.approx(1 / dof, abs=0.015)
    np.testing.assert_allclose(np.mean(inside, axis=0), levels, atol=0.008)


def test_gaussian_errors_have_no_tails():
    rng = np.random.default_rng(11)
    tails = [fit_inverse_dof(rng.normal(size=2000), np.ones(2000)) for _ in range(100)]
    assert np.mean(np.equal(tails, 0.0)) > 0.85
    assert max(tails) < 0.08
    assert SourcesCalibration().predictive_dof(8) == np.inf


@pytest.mark.parametrize("dof", [3.0, 6.0])
def test_weights_count_points_several_times(dof):
    rng = np.random.default_rng(12)
    u = rng.standard_t(dof, 400) * np.sqrt(1 - 2 / dof)
    counts = rng.integers(0, 3, 400)
    repeated = fit_inverse_dof(np.repeat(u, counts), np.ones(counts.sum()))
    assert fit_inverse_dof(u, counts.astype(float)) == pytest.approx(repeated, rel=1e-3)


def test_the_maximum_of_the_likelihood_of_unit_variance():
    """Against a search on a grid, with the density by the gamma function."""
    rng, grid = np.random.default_rng(13), np.arange(0.01, 0.49, 0.002)
    u = rng.standard_t(5, 500) * np.sqrt(3 / 5)
    likelihoods = [
        sum(math.log(oracle.student_density(x, math.sqrt(1 - 2 * t), 1 / t)) for x in u)
        for t in grid
    ]
    found = fit_inverse_dof(u, np.ones(500))
    assert found == pytest.approx(grid[np.argmax(likelihoods)], abs=0.002)


def test_a_single_wrong_label_is_an_extreme_tail():
    u = np.append(np.random.default_rng(14).normal(size=200) * 1e-4, 1e2)
    found = SourcesCalibration(inverse_dof=fit_inverse_dof(u, np.ones(201)))
    assert 2 < found.predictive_dof(8) < 2.1
    assert build_calibration("sources", found.parameters()) == found
    with rejects("inverse_dof"):
        build_calibration("sources", found.parameters() | {"inverse_dof": 0.5})


def test_predictions_have_the_tails_of_out_of_bag_errors(molecules):
    model = make_model().fit(molecules[:100])
    found = model.predict(molecules[120:125])
    assert found.dof == model.fitted.calibration.predictive_dof(found.n_members)
    heavy = replace(model.fitted.calibration, inverse_dof=0.25)
    assert found.calibrated(heavy).dof == 4.0
    assert "ν = 4" in heavy.describe()


def test_sources_with_too_little_data():
    data, _ = three_sources(np.random.default_rng(7), MIN_POINTS - 1)
    with pytest.raises(CalibrationError):
        SourcesCalibration.fit(data)
    zero = FullModelData(np.ones(30), np.zeros(30), None, np.ones(30))
    with pytest.raises(CalibrationError):
        zero.alone()


def test_sources_without_posterior_or_novelty():
    data, _ = three_sources(np.random.default_rng(8), 500)
    nothing = np.zeros(500)
    for p, q in ((None, None), (data.posterior_std, nothing), (nothing, nothing)):
        found = SourcesCalibration.fit(
            CalibrationData(
                data.residuals, data.ensemble_std, data.n_members, data.weights, p, q, 0.0
            )
        )
        assert found.novelty == 0.0
        assert np.all(np.isfinite(found.std(data.ensemble_std, 12, p, q)))


def test_posterior_deviations_that_are_nearly_equal():
    """ln s does not depend on ln p if that does not vary: the slope would be anything."""
    data, _ = three_sources(np.random.default_rng(2), 30)
    p = 1e-3 * (1 + 1e-6 * np.random.default_rng(3).normal(size=30))
    found = SourcesCalibration.fit(replace(data, posterior_std=p))
    assert found.log_std_slope == 0.0


# --- estimators ---


def noisy_function(rng, n, noise=0.2):
    X = rng.uniform(-1, 1, size=(n, 3))
    return X, np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] + noise * rng.normal(size=n)


def test_the_blend_is_not_worse_than_its_ends():
    """Mean over draws of small training sets: the share is fitted to few points."""
    errors = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        X, y = noisy_function(rng, 60)
        X_new, y_new = noisy_function(rng, 500, noise=0.0)
        row = []
        for centre in ("auto", "full", "members"):
            model = ProjectedProcessRegressor("rbf", centre=centre, random_state=seed).fit(X, y)
            row.append(np.mean((model.predict(X_new) - y_new) ** 2))
        errors.append(row)
    auto, full, members = np.sqrt(np.mean(errors, axis=0))
    assert auto <= 1.02 * min(full, members)


@pytest.mark.parametrize("n_representatives", [None, 40])
def test_coverage_without_noise_and_with_every_point_as_a_representative(n_representatives):
    """Points are left out together with their representatives: new points are none."""
    z = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        (X, y), (X_new, y_new) = (noisy_function(rng, n, noise=0.0) for n in (100, 200))
        model = ProjectedProcessRegressor(
            "rbf", n_representatives=n_representatives, random_state=seed
        ).fit(X, y)
        found = model.predict_ensemble(X_new)
        z += [*((found.mean - y_new) / found.std)]
    assert 0.55 < np.mean(np.abs(z) < 1) < 0.85


def test_members_of_an_estimator_have_the_prediction_as_their_mean():
    X, y = noisy_function(np.random.default_rng(0), 80)
    model = ProjectedProcessRegressor("rbf", random_state=0).fit(X, y)
    found = model.predict_ensemble(X)
    np.testing.assert_allclose(found.members.mean(axis=-1), model.predict(X), atol=1e-10)
    full = ProjectedProcessRegressor("rbf", centre="full", random_state=0).fit(X, y)
    np.testing.assert_allclose(full.predict(X), model.pp_mean(X), atol=1e-9)
    assert 0 <= model.centre_ <= 1


# --- intervals ---


def test_conformal_quantiles_are_those_of_the_order_statistics():
    scores = np.random.default_rng(0).exponential(size=99)
    found = fit_conformal(scores, np.arange(99))
    ranked = np.sort(scores)
    assert found.quantile(0.9) == ranked[89]  # ⌈0.9 · 100⌉ = 90 of 99
    assert found.quantile(0.5) == ranked[49]
    with rejects("level"):
        found.quantile(0.995)


def test_groups_share_their_weight():
    # One group of many small scores counts as one.
    scores = np.concatenate([np.linspace(0, 0.1, 50), np.arange(1.0, 10.0)])
    groups = np.concatenate([np.zeros(50, int), np.arange(1, 10)])
    assert fit_conformal(scores, groups).quantile(0.5) == 5.0


def test_few_of_many_scores_are_kept_and_intervals_stay_wide_enough():
    scores = np.random.default_rng(1).exponential(size=50_000)
    found = fit_conformal(scores, np.arange(50_000))
    assert len(found.scores) == 1000
    for level in (0.5, 0.683, 0.9, 0.99):
        exact = np.quantile(scores, level)
        assert exact <= found.quantile(level) <= 1.03 * exact


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_conformal_intervals_hold_whatever_the_errors(level):
    """Coverage over many draws, of errors with heavy tails that depend on X."""
    from sklearn.linear_model import Ridge

    inside = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-1, 1, size=(140, 3))
        y = X[:, 0] + 0.3 * (1 + X[:, 1]) * rng.standard_t(2, size=140)
        model = ResamplingRegressor(Ridge(), random_state=seed).fit(X[:60], y[:60])
        low, high = model.predict_ensemble(X[60:]).interval(level, "conformal")
        inside.append(np.mean((low <= y[60:]) & (y[60:] <= high)))
    error = np.std(inside, ddof=1) / np.sqrt(len(inside))
    assert np.mean(inside) >= level - 3 * error


def test_intervals_of_known_distributions():
    from scipy import stats

    prediction = Prediction(np.random.default_rng(2).normal(size=(4, 9)))
    low, high = prediction.interval(0.9)
    np.testing.assert_allclose((high - low) / 2, stats.norm.ppf(0.95) * prediction.std)
    low, high = prediction.interval(0.9, "student")
    scale = prediction.std * np.sqrt(6 / 8)
    np.testing.assert_allclose(high, prediction.mean + scale * stats.t.ppf(0.95, 8))
    for parameter, arguments in (
        ("level", (1.0,)),
        ("level", (0.0,)),
        ("method", (0.9, "exact")),
        ("method", (0.9, "conformal")),
    ):
        with rejects(parameter):
            prediction.interval(*arguments)


def test_single_points_keep_their_conformal_intervals_and_combinations_lose_them():
    conformal = fit_conformal(np.arange(1.0, 30.0), np.arange(29))
    raw = Prediction(np.random.default_rng(3).normal(size=(4, 9)))
    prediction = Prediction(raw.members, conformal=conformal)
    for kept in (prediction[1:], 3.0 * prediction + 1.0, Prediction.concatenate([prediction] * 2)):
        assert kept.conformal is conformal
    for lost in (prediction.sum(), prediction[0] - prediction[1], 1 / prediction, np.exp(raw)):
        assert lost.conformal is None
    y = prediction.mean + prediction.std * [1.0, 28.5, 29.5, 40.0]
    assert score(y, prediction).coverage_95_conformal == 0.5  # up to 29 σ, of 29 points
    assert score(y, raw).coverage_95_conformal is None


# --- models of structures ---


def test_a_structure_is_left_out_with_its_energy_forces_and_virial(alloys):
    """Against the full model that is solved without the rows of a structure, of either noise."""
    given = {"stress": "virtual", "n_representatives": 15}
    settings = make_force_model(noise=1e-4, forces_noise=1e-2, stress_noise=1e-3, **given).settings
    frames = [atoms.repeat((2, 1, 1)) if i == 1 else atoms for i, atoms in enumerate(alloys[:6])]
    frames[1].info["energy"] = 2 * alloys[1].info["energy"]
    problem = problem_of(frames, settings)
    rows = rows_of(problem)
    full, data = training.fit_sparse_model(rows, problem, Stages()), rows.sample
    scale = full.scale[0]
    structure = np.empty(data.n_rows, dtype=int)
    for quantity in data.quantities.values():
        structure[quantity.rows] = quantity.structure
    found = leave_out(
        full.process, rows.kept.Phi, full.y, sample_weight=full.weight, groups=structure
    )
    Phi, y, r = rows.kept.Phi, rows.kept.y[:, 0], len(rows.representatives)
    np.testing.assert_allclose(full.y[:, 0] * scale, y)
    variances = np.empty(data.n_rows)  # of the noise of each row
    for name, quantity in data.quantities.items():
        variances[quantity.rows] = full.noise[name]
    assert {*full.noise} == {"energy", "forces", "stress"}
    for s in range(6):
        kept, out = structure != s, structure == s
        A = (Phi[kept].T / variances[kept]) @ Phi[kept] + np.eye(r) / scale**2
        w = np.linalg.solve(A, Phi[kept].T @ (y[kept] / variances[kept]))
        p2 = np.einsum("ij,ji->i", Phi[out], np.linalg.solve(A, Phi[out].T))
        expected = y[out] - Phi[out] @ w
        z = found.residuals[out, 0] * scale
        np.testing.assert_allclose(z, expected, rtol=1e-6, atol=1e-9)
        p = np.sqrt(found.variance[out]) * scale
        np.testing.assert_allclose(p, np.sqrt(p2), rtol=1e-6)


def test_out_of_bag_residuals_are_those_of_the_blend(molecules):
    train, residuals = molecules[:60], {}
    for centre in (0.0, 1.0, 0.3, "auto"):
        model = make_model(centre=centre).fit(train)
        residuals[centre] = model.out_of_bag["energy"].residuals
        found = model.predict(molecules[120:130])
        # Members of a kind that the calibration does not use are left out.
        assert found.n_members in (16, 64, 16 + 64)
        assert np.linalg.matrix_rank(found.covariance()) == 10 - 1 + (found.n_members >= 10)
    for centre, share in ((0.3, 0.3), ("auto", model.record.centre)):
        expected = (1 - share) * residuals[0.0] + share * residuals[1.0]
        np.testing.assert_allclose(residuals[centre], expected, rtol=1e-7, atol=1e-12)
    mean, _ = model.predict_pp(molecules[120:130])
    full = make_model(centre="full").fit(train).predict(molecules[120:130])
    np.testing.assert_allclose(full.mean, mean, rtol=1e-9)


def test_posterior_members_alone(molecules, tmp_path):
    model = make_model(uncertainty="posterior").fit(molecules[:100])
    assert model.record.centre == 0.0
    new = molecules[120:]
    found = model.predict(new)
    assert found.n_members == 64
    np.testing.assert_allclose(found.mean, model.predict_pp(new)[0], rtol=1e-9)
    covered = np.abs(reference_values(new) - found.mean) < found.std
    assert 0.5 < covered.mean() < 0.85
    assert np.all(np.isfinite(found.interval(0.9, "conformal")))
    # Far away σ grows as that of models that have subsampled members, too.
    calibration = model.fitted.calibration
    assert calibration.posterior > 0 == calibration.alpha
    assert calibration.excess > 0
    far = [atoms.copy() for atoms in new]
    for atoms in far:
        atoms.positions *= 1.3
    raw = model.predict(far).uncalibrated.std / [len(atoms) for atoms in far]
    without = replace(calibration, excess=0.0)
    assert np.all(calibration.std(raw, 64) > 1.2 * without.std(raw, 64))
    for parts, whole in zip(
        model.predict(new[:3], atoms=True).atoms, found[:3].members, strict=True
    ):
        np.testing.assert_allclose(parts.members.sum(axis=0), whole, rtol=1e-8)
    model.save(tmp_path / "model.safetensors")
    loaded = AtomisticModel.load(tmp_path / "model.safetensors", threads=1)
    same_predictions(model, loaded, new)
    again = loaded.predict(new).interval(0.9, "conformal")
    np.testing.assert_allclose(found.interval(0.9, "conformal"), again, rtol=1e-9)


def test_posterior_members_of_energies_forces_and_stresses(alloys):
    settings = {"uncertainty": "posterior", "n_members": 16, "n_posterior": 16, "stress": "virtual"}
    model = make_force_model(**settings).fit(alloys[:26])
    predicted = model.predict(alloys[26:], stress=True, forces=True)
    for prediction in (predicted.energy, predicted.forces, predicted.stress):
        assert prediction.n_members == 16
        assert np.all(prediction.std > 0)
    y = np.concatenate([atoms.arrays["force"] for atoms in alloys[26:]])
    assert 0.5 < np.mean(np.abs(y - predicted.forces.mean) < predicted.forces.std) < 0.9


def test_components_that_are_zero_by_symmetry_do_not_calibrate_posterior_members(alloys):
    flat = copies(alloys[:26])
    for atoms in flat:  # mirror planes at z = 0 and z = 1/2: no force along z
        atoms.positions[:, 2] = np.round(atoms.positions[:, 2] / atoms.cell[2, 2] * 2) / 2
        atoms.positions[:, 2] *= atoms.cell[2, 2]
        atoms.arrays["force"][:, 2] = 0.0
    model = make_force_model(uncertainty="posterior", n_members=16).fit(flat)
    assert model.fitted.calibration_of("forces").n_points == 26 * 8


def test_all_quantities_have_the_same_members(alloys):
    """Few energies cannot tell sources apart; then forces and stresses are calibrated likewise."""
    with pytest.warns(QualmsWarning):
        model = make_force_model(stress="virtual").fit(alloys[:14])
    found = model.predict(alloys[30:32], stress=True, forces=True)
    methods = {model.fitted.calibration_of(name).method for name in ("energy", "forces", "stress")}
    assert methods == {"student"}
    assert {found.energy.n_members, found.forces.n_members, found.stress.n_members} == {8}


# --- data that are too few, or without errors ---


def _constant(frames):
    for atoms in frames:
        atoms.info[ENERGY] = 2.5 * len(atoms)


FALLBACKS = {
    "constant target": (40, {"baseline": "mean"}, None, _constant),
    "few points": (8, {"baseline": "mean"}, None, None),
    "a group larger than half": (40, {"baseline": "mean"}, ["a"] * 25 + [*range(15)], None),
    "all representatives": (40, {"n_representatives": 10_000}, None, None),
}


@pytest.mark.parametrize("uncertainty", ["both", "subsampling", "posterior"])
@pytest.mark.parametrize("name", FALLBACKS)
def test_uncertainties_are_finite_whatever_the_data(molecules, name, uncertainty):
    n, given, groups, change = FALLBACKS[name]
    frames, new = copies(molecules[:n]), molecules[120:130]
    if change is not None:
        change(frames)
    model = make_model(uncertainty=uncertainty, **given)
    if name in ("constant target", "few points"):
        with pytest.warns(QualmsWarning):
            model.fit(frames, groups=groups)
    else:
        model.fit(frames, groups=groups)
    found = model.predict(new)
    assert np.all(np.isfinite(found.members))
    if name == "constant target":
        assert found.std.max() < 1e-4 * np.ptp(reference_values(new))
    else:
        assert found.std.min() > 0
        assert 0.2 < np.std(reference_values(new) - found.mean) / found.std.mean() < 5


def test_two_groups(molecules):
    """All members without a group are the same model; the posterior has a variance anyway."""
    groups = ["a"] * 20 + ["b"] * 20
    with pytest.raises(CalibrationError):
        make_model(baseline="mean").fit(molecules[:40], groups=groups)
    model = make_model(baseline="mean", uncertainty="posterior").fit(molecules[:40], groups=groups)
    assert model.predict(molecules[120:130]).std.min() > 0


def test_estimators_with_few_points():
    X, y = noisy_function(np.random.default_rng(0), 40)
    with pytest.warns(QualmsWarning):
        few = ProjectedProcessRegressor("rbf", random_state=0).fit(X[:8], y[:8])
    assert few.calibration_.method == "student"
    assert few.centre_ == 0.0
    large = ProjectedProcessRegressor("rbf", random_state=0)
    large.fit(X, y, groups=np.maximum(np.arange(40) - 25, 0))
    for model in (few, large):
        found = model.predict_ensemble(X)
        assert np.all(np.isfinite(found.members))
        assert np.all(found.std > 0)


@pytest.mark.parametrize("uncertainty", ["both", "posterior"])
def test_the_method_of_highest_out_of_bag_likelihood_can_be_chosen(molecules, uncertainty):
    chosen = make_model(uncertainty=uncertainty, calibration="auto").fit(molecules[:100])
    calibration = chosen.fitted.calibration
    others = {
        method: chosen.fitted.with_calibration(method).calibration
        for method in ("sources", "shrinkage", "student")
    }
    likelihoods = {m: of.log_likelihood - of.n_parameters / 100 for m, of in others.items()}
    # Those of shrinkage and student are of their own densities, which are close to Gaussians.
    assert likelihoods[calibration.method] > max(likelihoods.values()) - 0.1
    given = make_model(uncertainty=uncertainty, calibration=calibration.method)
    same_predictions(chosen, given.fit(molecules[:100]), molecules[120:])
