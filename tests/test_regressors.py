import numpy as np
import oracle
import pandas as pd
import pytest
from checks import rejects
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils.estimator_checks import check_estimator

from qualms import ProjectedProcessRegressor, ResamplingRegressor, calibrate, score
from qualms.calibration.members import PerOutputCalibration
from qualms.errors import CalibrationError, QualmsWarning
from qualms.gp.sparse_gp import novelty_without_own

X, Y = make_friedman1(360, n_features=6, noise=0.1, random_state=0)
X_TEST, Y_TEST = X[240:], Y[240:]
X, Y = X[:240], Y[:240]


def small(**parameters):
    settings = {"kernel": "rbf", "n_representatives": 60, "random_state": 0}
    return ProjectedProcessRegressor(**(settings | parameters))


@pytest.mark.parametrize(
    "estimator",
    [
        ProjectedProcessRegressor(),
        ProjectedProcessRegressor("rbf", n_members=0, selection="cur"),
        ResamplingRegressor(Ridge()),
        ResamplingRegressor(Ridge(), n_members=8, replace=True, calibration="linear"),
    ],
    ids=lambda e: f"{type(e).__name__}-{e.n_members}",
)
@pytest.mark.filterwarnings("ignore::qualms.QualmsWarning", "ignore::FutureWarning")
def test_scikit_learn_s_checks_pass(estimator):
    results = check_estimator(estimator, on_fail="raise")
    # scikit-learn 1.9 tries arrays of other libraries only if SCIPY_ARRAY_API is set.
    others = {r["check_name"] for r in results if r["status"] != "passed"}
    assert others <= {"check_array_api_input"}
    assert len(results) > 50


def rebuild(model, rows, center):
    """Mean and covariance by brute force: Eq. (3) with explicit inverses, kernel of Eq. (17)."""
    representatives, scale = X[model.representative_indices_], np.var(Y)

    def kernel(A, B):
        return scale * model.basis_.kernel(A, B)

    mean, covariance = oracle.projected_process(
        kernel(representatives, representatives),
        kernel(X[rows], representatives),
        kernel(X_TEST, representatives),
        kernel(X_TEST, X_TEST),
        Y[rows] - center,
        model.noise_variance_,
    )
    return mean + center, covariance


@pytest.mark.parametrize("parameters", [{"replace": True}, {"subsample": 0.1}, {"subsample": 200}])
def test_every_member_is_the_oracle_s(parameters):
    given = {"n_members": 4, "n_posterior": 0, "centre": "members", "calibration": None}
    model = small(n_representatives=25, noise=0.5, **given, **parameters)
    prediction = model.fit(X, Y).predict_ensemble(X_TEST)
    ensemble_std = prediction.std.mean()
    for i, rows in enumerate(model.member_indices_):
        expected, _ = rebuild(model, rows, Y[rows].mean())
        np.testing.assert_allclose(prediction.members[:, i], expected, atol=1e-2 * ensemble_std)
    np.testing.assert_allclose(model.predict(X_TEST), prediction.mean, rtol=1e-10)


def test_the_full_model_is_the_oracle_s():
    model = small(n_representatives=25, noise=0.5, n_members=0).fit(X, Y)
    mean, covariance = rebuild(model, slice(None), Y.mean())
    predicted, std = model.predict(X_TEST, return_std=True)
    np.testing.assert_allclose(predicted, mean, rtol=1e-8)
    np.testing.assert_allclose(std, np.sqrt(np.diag(covariance) + 0.5), rtol=1e-8)
    assert model.noise_variance_ == pytest.approx(0.5)
    assert model.effective_rank_ == 25


def test_calibration_is_out_of_bag():
    model = small(n_posterior=0, centre="members", calibration="student").fit(X, Y)
    absent = np.stack([~np.isin(np.arange(len(X)), rows) for rows in model.member_indices_], axis=1)
    members = model.predict_ensemble(X).uncalibrated.members
    expected = calibrate(Y, members, absent=absent)
    assert model.calibration_.alpha == pytest.approx(expected.alpha, rel=1e-6)
    assert model.calibration_.n_points == expected.n_points


@pytest.mark.parametrize(
    ("calibration", "slack"),
    # Linear takes the noise of a small ensemble for error: 79 to 82 % are within its σ here.
    [("sources", 0.05), ("student", 0.05), ("shrinkage", 0.05), ("power", 0.05), ("linear", 0.15)],
)
def test_uncertainties_are_calibrated_on_new_points(calibration, slack):
    X, y = make_friedman1(2400, n_features=5, noise=0.05, random_state=1)
    model = small(n_representatives=150, calibration=calibration).fit(X[:1200], y[:1200])
    scores = score(y[1200:], model.predict_ensemble(X[1200:]))
    assert scores.coverage_68 == pytest.approx(0.68, abs=slack)
    assert scores.coverage_95 == pytest.approx(0.95, abs=slack)
    raw = score(y[1200:], model.predict_ensemble(X[1200:]).uncalibrated)
    assert scores.log_likelihood > raw.log_likelihood


def test_features_of_both_signs_get_an_offset_because_an_even_power_is_blind_to_the_sign():
    Z = StandardScaler().fit_transform(X)
    y = Z @ np.arange(6.0)
    model = ProjectedProcessRegressor(random_state=0).fit(Z, y)
    assert model.basis_.kernel.offset == 1.0
    assert model.score(Z, y) > 0.9
    blind = ProjectedProcessRegressor(offset=0.0, random_state=0).fit(Z, y)
    assert blind.score(Z, y) < 0.8


def test_a_linear_kernel_is_ridge_regression():
    """Rows keep their length: features that are sums over atoms keep the number of atoms."""
    rng = np.random.default_rng(0)
    n_atoms = rng.integers(1, 20, 60)
    rows = n_atoms[:, None] * np.array([1.0, 0.1]) + 0.01 * rng.normal(size=(60, 2))
    y = 3.0 * n_atoms
    errors = {}
    for kernel in ("linear", "power"):
        model = ProjectedProcessRegressor(kernel, n_members=0, noise=1e-3).fit(rows[:40], y[:40])
        errors[kernel] = np.abs(model.predict(rows[40:]) - y[40:]).mean()
    assert errors["linear"] < 0.1
    assert errors["power"] > 1.0


def test_kernels_of_scikit_learn_can_be_used_and_searched():
    kernel = ConstantKernel(2.0) * RBF(2.0)
    model = small(kernel=kernel, noise=0.1).fit(X, Y)
    same = small(length_scale=2.0, noise=0.1).fit(X, Y)
    # Eq. (17) undoes the constant.
    np.testing.assert_allclose(model.predict(X_TEST), same.predict(X_TEST), rtol=1e-6)
    np.testing.assert_allclose(model.pp_std(X_TEST), same.pp_std(X_TEST), rtol=1e-6)
    search = GridSearchCV(
        small(kernel=RBF(1.0), n_members=0), {"kernel__length_scale": [0.01, 2.0]}, cv=3
    )
    assert search.fit(X, Y).best_params_ == {"kernel__length_scale": 2.0}


def test_float32_features_are_used_as_they_are():
    X32, new = X.astype(np.float32), X_TEST.astype(np.float32)
    model = small().fit(X32, Y)
    assert model.basis_.representatives.dtype == np.float32
    predicted = model.predict_ensemble(new)
    expected = small().fit(X32.astype(np.float64), Y).predict_ensemble(new)
    assert np.sqrt(np.mean((predicted.mean - expected.mean) ** 2)) < 0.01 * expected.std.mean()
    np.testing.assert_allclose(predicted.std, expected.std, rtol=0.05)


def test_the_same_seed_gives_the_same_result_in_any_order_of_the_rows():
    first = small().fit(X, Y)
    np.testing.assert_allclose(first.predict(X_TEST), small().fit(X, Y).predict(X_TEST), rtol=1e-9)
    order = np.random.default_rng(0).permutation(len(X))
    shuffled = small().fit(X[order], Y[order])
    for a, b in zip(*(m.predict(X_TEST, True) for m in (first, shuffled)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(first.predict(X_TEST), shuffled.predict(X_TEST), rtol=1e-9)
    assert set(order[shuffled.member_indices_[0]]) == set(first.member_indices_[0])
    other = small(random_state=1).fit(X, Y)
    # The full model alone, if it is predicted, does not depend on the seed.
    members = [m.predict_ensemble(X_TEST).members for m in (first, other)]
    assert not np.allclose(*members, rtol=1e-9)


def test_copies_of_a_row_and_groups_are_in_or_out_together():
    doubled, y = np.concatenate([X, X]), np.concatenate([Y, Y + 0.01])
    groups = np.arange(len(X)) // 6
    for model, size in ((small(), 120), (ResamplingRegressor(Ridge(), random_state=0), 180)):
        model.fit(doubled, y)
        for rows in model.member_indices_:
            inside = np.isin(np.arange(480), rows)
            np.testing.assert_array_equal(inside[:240], inside[240:])
        for rows in model.fit(X, Y, groups=groups).member_indices_:
            assert len(rows) == size
            assert set(np.unique(groups[rows], return_counts=True)[1]) == {6}


def test_weights_are_copies():
    weight = np.random.default_rng(0).integers(0, 3, size=len(X))
    repeated = small().fit(np.repeat(X, weight, axis=0), np.repeat(Y, weight))
    weighted = small().fit(X, Y, sample_weight=weight)
    a, b = repeated.predict_ensemble(X_TEST), weighted.predict_ensemble(X_TEST)
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-6)
    np.testing.assert_allclose(a.std, b.std, rtol=1e-5)


@pytest.mark.parametrize("make", [small, lambda: ResamplingRegressor(Ridge(), random_state=0)])
def test_several_outputs(make):
    Y2 = np.stack([Y, 100 * X[:, 0] ** 2], axis=1)
    model = make().fit(X, Y2)
    mean, std = model.predict(X_TEST, return_std=True)
    assert mean.shape == std.shape == (120, 2)
    members = model.predict_ensemble(X_TEST).members
    assert members.shape in ((120, 2, 16), (120, 2, 64), (120, 2, 80))
    assert np.all(np.ptp(members, axis=-1) > 0)
    assert isinstance(model.calibration_, PerOutputCalibration)
    one = make().fit(X, Y2[:, :1])
    assert one.predict(X_TEST).shape == (120, 1)
    if isinstance(model, ProjectedProcessRegressor):
        assert model.weights_.shape == (60, 2, 80)
        assert model.centre_.shape == (2,)
        posterior = model.predict_ensemble(X_TEST).uncalibrated.members[..., 16:]
        correlations = [np.corrcoef(*members)[0, 1] for members in posterior]
        assert np.abs(correlations).mean() < 0.4  # of 64 independent draws
        assert model.pp_std(X_TEST).shape == (120, 2)
        single = make().fit(X, Y)
        np.testing.assert_allclose(one.predict(X_TEST)[:, 0], single.predict(X_TEST), rtol=1e-9)


@pytest.mark.parametrize(
    "estimator",
    [
        HistGradientBoostingRegressor(max_iter=30),
        RandomForestRegressor(10),
        KNeighborsRegressor(8),
        make_pipeline(
            StandardScaler(),
            MLPRegressor(hidden_layer_sizes=(8,), activation="tanh", solver="lbfgs", tol=0.1),
        ),
    ],
    ids=["boosting", "forest", "neighbours", "network"],
)
def test_any_regressor_gets_uncertainties(estimator):
    model = ResamplingRegressor(estimator, n_members=8, random_state=0).fit(X, Y)
    mean, std = model.predict(X_TEST, return_std=True)
    assert np.all(std > 0)
    assert np.corrcoef(mean, Y_TEST)[0, 1] > 0.7
    z = (Y_TEST - mean) / std
    assert 0.5 < np.mean(np.abs(z) < 1) < 0.9
    again = ResamplingRegressor(estimator, n_members=8, random_state=0).fit(X, Y)
    np.testing.assert_allclose(mean, again.predict(X_TEST), rtol=1e-9)


@pytest.mark.parametrize("estimator", [Ridge(), KNeighborsRegressor(8)])
def test_defaults_are_as_accurate_as_the_estimator_and_calibrated_in_spite_of_noise(estimator):
    X, y = make_friedman1(2400, n_features=5, noise=2.0, random_state=2)
    model = ResamplingRegressor(estimator, random_state=0).fit(X[:400], y[:400])
    scores = score(y[400:], model.predict_ensemble(X[400:]))
    assert scores.coverage_68 == pytest.approx(0.68, abs=0.05)
    assert scores.coverage_95 == pytest.approx(0.95, abs=0.03)
    single = estimator.fit(X[:400], y[:400]).predict(X[400:])
    assert scores.rmse < 1.01 * np.sqrt(np.mean((y[400:] - single) ** 2))


def test_members_are_trained_on_their_rows_with_seeds_of_their_own():
    tree = DecisionTreeRegressor()
    with pytest.warns(QualmsWarning):  # few points are out of bag of three members
        model = ResamplingRegressor(tree, n_members=3, random_state=0).fit(X, Y)
    seeds = {e.random_state for e in model.estimators_}
    assert len(seeds) == 3
    for tree, rows in zip(model.estimators_, model.member_indices_, strict=True):
        # A full tree knows its training rows by heart, and no others.
        np.testing.assert_allclose(tree.predict(X[rows]), Y[rows])
        others = np.setdiff1d(np.arange(len(X)), rows)
        assert np.mean(tree.predict(X[others]) == Y[others]) < 0.1


@pytest.mark.parametrize("make", [small, lambda: ResamplingRegressor(Ridge(), random_state=0)])
def test_constant_y_gives_no_std_and_a_warning(make):
    with pytest.warns(QualmsWarning):
        model = make().fit(X, np.full(len(X), 3.7))
    mean, std = model.predict(X_TEST, return_std=True)
    np.testing.assert_allclose(mean, 3.7)
    np.testing.assert_allclose(std, 0, atol=1e-12)


def test_identical_rows_are_rejected_with_members():
    same = np.ones((10, 3))
    with rejects("X"):
        ProjectedProcessRegressor(random_state=0).fit(same, Y[:10])
    model = ProjectedProcessRegressor(n_members=0).fit(same, Y[:10])
    assert model.effective_rank_ == 1
    mean, std = model.predict(same, return_std=True)
    np.testing.assert_allclose(mean, Y[:10].mean())
    np.testing.assert_allclose(std, np.std(Y[:10], ddof=1), rtol=1e-3)


def test_too_few_groups_are_rejected():
    # With two groups all out-of-bag members of a point are the same.
    with pytest.raises(CalibrationError):
        small().fit(X, Y, groups=np.arange(len(X)) // 120)


def test_fewer_points_than_calibration_needs_are_not_calibrated_with_a_warning():
    with pytest.warns(QualmsWarning):
        model = ResamplingRegressor(Ridge(), random_state=0).fit(X[:2], Y[:2])
    prediction = model.predict_ensemble(X_TEST)
    np.testing.assert_allclose(prediction.std, prediction.members.std(axis=-1, ddof=1))


def test_an_exact_fit_has_no_uncertainty_and_a_warning():
    model = ResamplingRegressor(LinearRegression(), random_state=0)
    with pytest.warns(QualmsWarning):
        model.fit(X, 1 + X @ np.arange(6.0))
    mean, std = model.predict(X_TEST, return_std=True)
    np.testing.assert_allclose(mean, 1 + X_TEST @ np.arange(6.0))
    assert np.all(std < 1e-12)


@pytest.mark.parametrize("outputs", [1, 2])
def test_extrapolation_is_flagged_and_uncertain(outputs):
    rng = np.random.default_rng(0)
    train, near = rng.uniform(0, 1, (300, 2)), rng.uniform(0, 1, (200, 2))
    y = np.stack([np.sin(9 * train.sum(axis=1)), np.cos(7 * train[:, 0])], axis=1)[:, :outputs]
    given = {"length_scale": 0.25, "n_representatives": 60, "noise": 1e-4, "random_state": 0}
    model = ProjectedProcessRegressor("rbf", **given).fit(train, y.squeeze())
    assert model.extrapolates(near).mean() < 0.05
    assert model.extrapolates(near + 2).all()
    # Far from all data the kernel vanishes: novelty is what is left of the prior.
    inside, outside = (model.predict(x, return_std=True)[1] for x in (near, near + 2))
    assert np.median(outside) > 5 * np.median(inside)


def test_novelty_is_that_of_a_model_without_the_group_s_representatives():
    model = small(n_representatives=30, kernel="rbf", length_scale=0.7, n_members=0).fit(X, Y)
    basis, groups = model.basis_, np.arange(len(X)) // 40
    owners = groups[model.representative_indices_]
    Phi, k_xx = basis.features(X)
    q2 = novelty_without_own(Phi, k_xx, basis.whitening, groups, owners, len(owners))
    for group in np.unique(groups):
        others = basis.representatives[owners != group]
        rows = X[groups == group]
        K, K_MM = (basis.scale * basis.kernel(x, others) for x in (rows, others))
        expected = k_xx[groups == group] - np.sum(K * np.linalg.solve(K_MM, K.T).T, axis=1)
        np.testing.assert_allclose(q2[groups == group], expected, atol=1e-6)


def test_data_frames_reach_the_members_with_their_columns():
    frame = pd.DataFrame(X, columns=list("abcdef"))
    frame["kind"] = np.where(X[:, 0] > 0.5, "high", "low")
    columns = make_column_transformer(
        (OneHotEncoder(), ["kind"]), (StandardScaler(), list("abcdef"))
    )
    model = ResamplingRegressor(make_pipeline(columns, Ridge()), random_state=0).fit(frame, Y)
    mean, std = model.predict(frame, return_std=True)
    assert np.corrcoef(mean, Y)[0, 1] > 0.8
    assert np.all(std > 0)
    # Numbers give the same result in a frame as in an array.
    numbers = frame.drop(columns="kind")
    in_frame = ResamplingRegressor(Ridge(), random_state=0).fit(numbers, Y).predict(numbers)
    in_array = ResamplingRegressor(Ridge(), random_state=0).fit(X, Y).predict(X)
    np.testing.assert_allclose(in_frame, in_array)


def test_rows_of_a_frame_that_only_look_alike_are_different():
    class Structure:
        def __init__(self, features):
            self.features = features

        def __repr__(self):
            return "Structure(H2O)"

    frame = pd.DataFrame({"structure": [Structure(x) for x in X], "vector": list(X)})
    features = FunctionTransformer(lambda f: np.stack([s.features for s in f["structure"]]))
    ridge = make_pipeline(features, Ridge())
    model = ResamplingRegressor(ridge, random_state=0).fit(frame, Y)
    plain = ResamplingRegressor(Ridge(), random_state=0).fit(X, Y)
    # The same model but for other subsamples.
    assert np.std(model.predict(frame) - plain.predict(X)) < 0.1 * np.std(Y)


def test_missing_values_are_for_the_estimator_to_accept():
    holes = np.where(np.random.default_rng(0).random(X.shape) < 0.05, np.nan, X)
    boosting = HistGradientBoostingRegressor(max_iter=20)
    model = ResamplingRegressor(boosting, n_members=8, random_state=0).fit(holes, Y)
    assert np.all(np.isfinite(model.predict(holes)))


@pytest.mark.parametrize(
    ("model", "X"),
    [
        # The rank of six features is too small for so many representatives.
        (ProjectedProcessRegressor("power", 1, n_representatives=20, selection="cur"), X),
        # The power kernel does not distinguish points on a line.
        (ProjectedProcessRegressor(calibration=None), X[:, :1]),
        # Fractional powers of products are not positive semi-definite.
        (ProjectedProcessRegressor(exponent=1.1, offset=1.0, n_members=0), X[:60, :3] - 0.5),
    ],
)
def test_unsuitable_kernels_are_reported(model, X):
    with pytest.warns(QualmsWarning):
        model.set_params(random_state=0).fit(X, Y[: len(X)])


@pytest.mark.parametrize(
    ("parameter", "settings"),
    [
        ("kernel", {"kernel": "magic"}),
        ("exponent", {"exponent": 0.5}),
        ("offset", {"offset": "magic"}),
        ("length_scale", {"kernel": "rbf", "length_scale": 0.0}),
        ("n_representatives", {"n_representatives": 10_000}),
        ("selection", {"selection": "magic"}),
        ("noise", {"noise": "magic"}),
        ("noise", {"noise": -1.0}),
        ("n_members", {"n_members": 1}),
        ("subsample", {"subsample": 1.5}),
        ("replace", {"replace": "yes"}),
        ("calibration", {"calibration": "magic"}),
        ("centre", {"centre": "best"}),
        ("centre", {"centre": 1.5}),
        ("centre", {"centre": -0.1}),
        ("n_posterior", {"n_posterior": 1}),
        ("n_posterior", {"n_posterior": -2}),
    ],
)
def test_bad_parameters(parameter, settings):
    with rejects(parameter):
        ProjectedProcessRegressor(**settings).fit(X[:60], Y[:60])


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("y", {"y": 1e200 * Y[:60]}),
        ("groups", {"groups": np.zeros(60)}),
        ("groups", {"groups": np.arange(59)}),
        ("sample_weight", {"sample_weight": np.eye(60)[0]}),
    ],
)
def test_bad_data(parameter, change):
    with rejects(parameter):
        ProjectedProcessRegressor().fit(**({"X": X[:60], "y": Y[:60]} | change))


def test_requests_that_cannot_be_met():
    with rejects("sample_weight"):
        ResamplingRegressor(KNeighborsRegressor()).fit(X[:60], Y[:60], sample_weight=np.ones(60))
    with rejects("n_members"):
        ProjectedProcessRegressor(n_members=0).fit(X[:60], Y[:60]).predict_ensemble(X[:3])
    with pytest.raises(CalibrationError):  # no point is absent from three members
        ProjectedProcessRegressor(n_members=4, subsample=59).fit(X[:60], Y[:60])


def test_novelty_of_rounding_is_none():
    """A kernel of low rank: σ must not depend on the rounding of k − φφᵀ."""
    for seed in (7, 9):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(200, 4))
        model = ProjectedProcessRegressor(random_state=seed).fit(X, X[:, 0] + rng.normal(size=200))
        assert model.calibration_.novelty == 0.0
        alone = np.concatenate([model.predict(x[None], return_std=True)[1] for x in X[:20]])
        np.testing.assert_allclose(model.predict(X[:20], return_std=True)[1], alone, rtol=1e-6)


@pytest.mark.parametrize("base", [None, Ridge()])
def test_the_calibration_can_be_chosen(base):
    given = {"calibration": "auto", "random_state": 0}
    model = ProjectedProcessRegressor("rbf", **given)
    if base is not None:
        model = ResamplingRegressor(base, **given)
    model.fit(X, Y)
    assert model.calibration_.method in ("sources", "shrinkage", "student")


def test_the_noise_is_that_of_new_groups():
    """Groups with an offset of their own: leaving single rows out finds too little noise."""
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(30), 6)
    Z = rng.uniform(-1, 1, size=(30, 3))[codes] + 0.05 * rng.normal(size=(180, 3))
    y = Z[:, 0] + rng.normal(size=30)[codes] + 0.05 * rng.normal(size=180)
    apart = ProjectedProcessRegressor("rbf", random_state=0).fit(Z, y)
    together = ProjectedProcessRegressor("rbf", random_state=0).fit(Z, y, groups=codes)
    assert together.noise_variance_ > 3 * apart.noise_variance_


class Returns(RegressorMixin, BaseEstimator):
    """A regressor that returns some array."""

    def __init__(self, shape=(), value=0.0):
        self.shape, self.value = shape, value

    def fit(self, X, y):
        return self

    def predict(self, X):
        return np.full((len(X), *self.shape), self.value)


@pytest.mark.parametrize("estimator", [None, Ridge, "ridge", Returns((2,)), Returns(value=np.nan)])
def test_estimators_that_cannot_be_used(estimator):
    with rejects("estimator"):
        ResamplingRegressor(estimator).fit(X, Y)


@pytest.mark.parametrize("regressor", [small(), ResamplingRegressor(Ridge())])
@pytest.mark.parametrize("y", [Y.astype(str), np.array([dict] * len(Y)), Y * 1e-200, Y * 1e200])
def test_targets_that_are_not_numbers_or_too_small_or_large(regressor, y):
    with rejects("y"):
        clone(regressor).fit(X, y)
