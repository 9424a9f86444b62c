"""Blended predictions, the three sources of variance, and conformal intervals."""

import numpy as np
import pytest
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms import Prediction, ProjectedProcessRegressor, ResamplingRegressor
from qualms.calibration.base import CalibrationData, FullModelData
from qualms.calibration.conformal import fit_conformal
from qualms.calibration.fitting import build_calibration, fit_calibration
from qualms.calibration.methods import VectorCalibration
from qualms.calibration.sources import MIN_POINTS, SourcesCalibration
from qualms.errors import CalibrationError
from qualms.gp.ensemble import Residuals, centred, ensemble_mean_std, fit_centre
from qualms.gp.kernels import PowerKernel, normalize_rows
from qualms.gp.linalg import whiten
from qualms.gp.sparse_gp import fit_projected_process, leave_out, posterior_deviations


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
    assert fitted.alpha == pytest.approx(1.7, rel=0.05)
    assert fitted.centre == centre


@given(st.integers(0, 2**31), st.integers(2, 8))
@settings(max_examples=20)
def test_the_share_of_the_ensemble_mean_has_the_smallest_error(seed, n_members):
    rng = np.random.default_rng(seed)
    full, members = rng.normal(size=(2, 40))
    std, n_absent = rng.random(40), rng.integers(2, n_members + 1, size=40)
    found = fit_centre([Residuals(full, members, std, n_absent)], n_members)

    def error(share):
        blend = (1 - share) * full + share * members
        excess = std**2 * (1 / n_absent - 1 / n_members)
        return np.sum(blend**2) - share**2 * np.sum(excess)

    shares = np.linspace(0, 1, 1001)
    assert error(found) <= min(error(s) for s in shares) + 1e-9


def test_members_are_centred_on_the_blend():
    rng = np.random.default_rng(0)
    members, full, drawn = rng.normal(size=(5, 4)), rng.normal(size=5), rng.normal(size=(5, 3))
    drawn -= drawn.mean(axis=1, keepdims=True)
    columns = centred(members, full, 0.25, drawn)
    expected = 0.75 * full + 0.25 * members.mean(axis=1)
    for part in (columns, columns[:, :4], columns[:, 4:]):
        np.testing.assert_allclose(part.mean(axis=1), expected, atol=1e-14)
    np.testing.assert_allclose(columns[:, :4].std(axis=1), members.std(axis=1))


# --- the full model without a point ---


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_left_out_have_the_variance_of_a_model_without_them(weighted):
    rng = np.random.default_rng(1)
    Phi, y, groups = rng.normal(size=(30, 6)), rng.normal(size=30), rng.integers(8, size=30)
    weight = rng.random(30) + 0.5 if weighted else np.ones(30)
    model = fit_projected_process(Phi, y, 0.3, sample_weight=weight)
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
    model = fit_projected_process(Phi, y, noise)
    U = np.linalg.inv(whitening.factor)
    own = {g: U[:, groups[points] == g] for g in np.unique(groups[points])}
    found = leave_out(model, Phi, y, groups=groups, own=own)
    for group in np.unique(groups):
        kept, out = groups != group, groups == group
        others = points[groups[points] != group]
        K_MM, K_NM, K_XM = (kernel(a, X[others]) for a in (X[others], X[kept], X[out]))
        A = K_NM.T @ K_NM + noise * K_MM
        mean = K_XM @ np.linalg.solve(A, K_NM.T @ y[kept])
        variance = noise * np.diag(K_XM @ np.linalg.solve(A, K_XM.T))
        np.testing.assert_allclose(y[out] - found.residuals[out, 0], mean, atol=1e-7)
        np.testing.assert_allclose(found.variance[out], variance, rtol=1e-6, atol=1e-10)


def test_posterior_members_have_the_posterior_covariance():
    rng = np.random.default_rng(2)
    Phi, y = rng.normal(size=(30, 4)), rng.normal(size=30)
    model = fit_projected_process(Phi, y, 0.3)
    drawn = posterior_deviations(model, 20_000, rng)
    np.testing.assert_allclose(drawn.mean(axis=1), 0, atol=1e-12)
    expected = 0.3 * np.linalg.inv(Phi.T @ Phi + 0.3 * np.eye(4))
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(np.cov(drawn) / scale, expected / scale, atol=0.04)
    assert posterior_deviations(model, 0, rng).shape == (4, 0)


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
    found = Prediction(raw).calibrated(calibration)
    np.testing.assert_allclose(found.mean, 3.0, rtol=1e-12)
    s, p = (ensemble_mean_std(part)[1] for part in (raw[:, :8], raw[:, 8:]))
    np.testing.assert_allclose(found.std, calibration.std(s, 8, p, n_posterior=16), rtol=1e-10)
    own = calibration.own(raw)
    covariance = 1.2**2 * np.cov(raw[:, :8]) + 0.7**2 * np.cov(raw[:, 8:])
    np.testing.assert_allclose(np.cov(own), covariance, rtol=1e-9, atol=1e-12)
    correlations = np.corrcoef(found.members)
    np.testing.assert_allclose(correlations, np.corrcoef(own), atol=1e-9)


def test_vectors_are_scaled_as_a_whole():
    rng = np.random.default_rng(6)
    members = rng.normal(size=(7, 3, 12))
    members -= members.mean(axis=-1, keepdims=True)
    members[..., 4:] -= members[..., 4:].mean(axis=-1, keepdims=True)
    members[..., :4] -= members[..., :4].mean(axis=-1, keepdims=True)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    calibration = SourcesCalibration(alpha=1.1, posterior=0.4, floor=0.2, n_subsampled=4)
    found = VectorCalibration(calibration).transform(members)
    turned = VectorCalibration(calibration).transform(np.einsum("ij,njk->nik", rotation, members))
    np.testing.assert_allclose(np.einsum("ij,njk->nik", rotation, found), turned, atol=1e-12)


def test_sources_with_too_little_data():
    data, _ = three_sources(np.random.default_rng(7), MIN_POINTS - 1)
    with pytest.raises(CalibrationError):
        SourcesCalibration.fit(data)
    zero = FullModelData(np.ones(30), np.zeros(30), None, 0.0)
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


def test_the_calibration_is_built_again_from_its_parameters():
    data, _ = three_sources(np.random.default_rng(9), 500)
    found = SourcesCalibration.fit(data)
    assert build_calibration("sources", found.parameters()) == found


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


def test_members_of_an_estimator_have_the_prediction_as_their_mean():
    X, y = noisy_function(np.random.default_rng(0), 80)
    model = ProjectedProcessRegressor("rbf", random_state=0).fit(X, y)
    found = model.predict_ensemble(X)
    np.testing.assert_allclose(found.members.mean(axis=-1), model.predict(X), atol=1e-10)
    blend = (1 - model.centre_) * model.pp_mean(X)
    full = ProjectedProcessRegressor("rbf", centre="full", random_state=0).fit(X, y)
    np.testing.assert_allclose(full.predict(X), model.pp_mean(X), atol=1e-9)
    assert 0 <= model.centre_ <= 1
    assert np.all(np.isfinite(blend))


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("centre", "best"),
        ("centre", 1.5),
        ("centre", -0.1),
        ("n_posterior", 1),
        ("n_posterior", -2),
    ],
)
def test_bad_parameters_of_an_estimator(parameter, value):
    X, y = noisy_function(np.random.default_rng(0), 20)
    with rejects(parameter):
        ProjectedProcessRegressor("rbf", **{parameter: value}).fit(X, y)


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
