import copy
import pickle

import numpy as np
import pytest
from checks import rejects

from qualms import Prediction, ProjectedProcessRegressor, calibrate, score
from qualms.calibration.methods import LinearCalibration, PowerCalibration, StudentCalibration

rng = np.random.default_rng(0)
MEMBERS = rng.normal(size=(5, 8)) + 3
P = Prediction(MEMBERS)
#: The same without members.
Q = Prediction(mean=P.mean, std=P.std)


def same(prediction, members):
    np.testing.assert_allclose(prediction.members, members, rtol=1e-12)


def has(prediction, mean, std):
    assert prediction.members is None
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(prediction.std, std, rtol=1e-12)


def test_mean_and_std_are_those_of_the_members():
    np.testing.assert_allclose(P.mean, MEMBERS.mean(axis=1))
    np.testing.assert_allclose(P.std, MEMBERS.std(axis=1, ddof=1))
    np.testing.assert_allclose(P.covariance(), np.cov(MEMBERS))
    assert (P.shape, P.n_members, len(P)) == ((5,), 8, 5)
    source = MEMBERS.copy()
    prediction = Prediction(source)
    assert not prediction.members.flags.writeable
    source[:] = 0
    same(prediction, MEMBERS)


def test_masked_numbers_are_rejected():
    masked = np.ma.array(MEMBERS, mask=MEMBERS > 3)
    with rejects("members"):
        Prediction(masked)
    with rejects("mean"):
        Prediction(mean=masked[0], std=np.ones(len(masked[0])))
    with rejects("y"):
        ProjectedProcessRegressor().fit(MEMBERS, masked[:, 0])
    Prediction(np.ma.array(MEMBERS))  # a mask without a masked number


def test_indexing_keeps_the_members():
    same(P[2], MEMBERS[2])
    same(P[1:3], MEMBERS[1:3])
    same(P[[0, 4]], MEMBERS[[0, 4]])
    same(P[P.mean > 3], MEMBERS[P.mean > 3])
    two = Prediction(rng.normal(size=(4, 3, 8)))
    same(two[:, 1], two.members[:, 1])
    same(two[..., 0], two.members[:, 0])
    same(two[1, 2], two.members[1, 2])
    for i, p in enumerate(P):
        same(p, MEMBERS[i])
    with pytest.raises(IndexError):
        P[0, 0]
    with pytest.raises(TypeError):
        len(P[0])


def test_operators_and_functions_act_member_by_member():
    other = Prediction(rng.normal(size=(5, 8)))
    same(P + other, MEMBERS + other.members)
    same(P - 1, MEMBERS - 1)
    same(1 - P, 1 - MEMBERS)
    same(np.arange(5) * P, np.arange(5)[:, None] * MEMBERS)
    same(P / np.arange(1, 6), MEMBERS / np.arange(1, 6)[:, None])
    same(-(P**2), -(MEMBERS**2))
    same(np.exp(P), np.exp(MEMBERS))
    same(np.maximum(P, other), np.maximum(MEMBERS, other.members))
    same(P[0] * other, MEMBERS[0] * other.members)
    same(np.ones((2, 1)) + P, np.ones((2, 1, 1)) + MEMBERS)
    same(P.map(np.max), MEMBERS.max(axis=0))
    assert P.map(lambda x: np.outer(x, x)).shape == (5, 5)
    p = P
    p += 1  # a new prediction
    same(p, MEMBERS + 1)
    same(P, MEMBERS)


def test_sums_and_linear_combinations():
    C = rng.normal(size=(3, 5))
    same(C @ P, C @ MEMBERS)
    same(P @ C.T, C @ MEMBERS)
    same(C[0] @ P, C[0] @ MEMBERS)
    same(np.sum(P), MEMBERS.sum(axis=0))
    two = Prediction(rng.normal(size=(5, 3, 8)))
    same(two.sum(axis=0), two.members.sum(axis=0))
    same(np.sum(two, axis=-1), two.members.sum(axis=1))
    same(C @ two, np.einsum("kn,ntr->ktr", C, two.members))
    same(two @ np.ones((3, 2)), np.einsum("ntr,tk->nkr", two.members, np.ones((3, 2))))
    same(Prediction.concatenate([P[:2], P[2:]]), MEMBERS)
    same(np.concatenate([P[:2], P[2:]]), MEMBERS)
    with pytest.raises(TypeError):
        P @ P
    for axis in (1, -2, 2):
        with rejects("axis"):
            P.sum(axis=axis)


@pytest.mark.parametrize(("calibration", "tolerance"), [("student", 0.4), ("sources", 0.4)])
def test_uncertainties_of_small_differences_are_calibrated(calibration, tolerance):
    """Errors of similar points cancel in their difference, and members have the same errors.

    The constant source is scaled with the members, and cancels more than it should.
    """

    def reference(X):
        return np.sin(3 * X[:, 0]) * np.cos(2 * X[:, 1]) + X[:, 2] * X[:, 3]

    squares = []
    for seed in range(12):
        draw = np.random.default_rng(seed)
        X = draw.uniform(-1, 1, size=(160, 5))
        options = {"length_scale": 1.5, "calibration": calibration, "random_state": seed}
        model = ProjectedProcessRegressor("rbf", **options)
        model.fit(X, reference(X) + 0.02 * draw.normal(size=160))
        before = draw.uniform(-1, 1, size=(300, 5))
        after = before + 0.05 * draw.normal(size=before.shape)
        E = model.predict_ensemble(np.vstack([before, after]))
        change = E[300:] - E[:300]
        error = change.mean - (reference(after) - reference(before))
        quadrature = np.hypot(E.std[:300], E.std[300:])
        assert np.mean(change.std) < 0.3 * np.mean(quadrature)
        squares.append((np.mean(error**2), np.mean(change.std**2)))
    of_errors, of_std = np.sqrt(np.mean(squares, axis=0))
    assert of_std == pytest.approx(of_errors, rel=tolerance)


def test_a_power_calibration_is_applied_before_combining():
    calibration = PowerCalibration(alpha=0.8, gamma=0.5)
    calibrated = calibration.apply(P)
    np.testing.assert_allclose(calibrated.std, 0.8 * P.std**0.5)
    factors = calibrated.std / P.std
    DCD = np.cov(MEMBERS) * np.outer(factors, factors)
    np.testing.assert_allclose(calibrated.covariance(), DCD)
    # A combination can be calibrated itself, from its uncalibrated members.
    difference = calibrated[0] - calibrated[1]
    again = calibration.apply(difference)
    assert again.std == pytest.approx(0.8 * (P[0] - P[1]).std ** 0.5)


def test_every_operation_keeps_the_uncalibrated_prediction():
    calibrated = LinearCalibration(alpha=3.0).apply(P)
    same(calibrated.uncalibrated, MEMBERS)
    same(calibrated[1:].uncalibrated, MEMBERS[1:])
    same(np.exp(calibrated).uncalibrated, np.exp(MEMBERS))
    same(calibrated.map(np.max).uncalibrated, MEMBERS.max(axis=0))
    same(calibrated.sum().uncalibrated, MEMBERS.sum(axis=0))
    same((np.ones(5) @ calibrated).uncalibrated, MEMBERS.sum(axis=0))
    same(Prediction.concatenate([calibrated, calibrated]).uncalibrated, np.tile(MEMBERS, (2, 1)))
    assert P.uncalibrated is P
    same(LinearCalibration(alpha=3.0).apply(calibrated), calibrated.members)  # once, not twice


def test_without_members_points_are_selected_shifted_and_scaled():
    assert Q.n_members is None
    has(Q[1:3], P.mean[1:3], P.std[1:3])
    has(Q[2], P.mean[2], P.std[2])
    has(np.concatenate([Q[:2], Q[2:]]), P.mean, P.std)
    has(2 - Q, 2 - P.mean, P.std)
    has(Q + np.arange(5), P.mean + np.arange(5), P.std)
    has(-3 * Q, -3 * P.mean, 3 * P.std)
    has(Q / np.full((2, 1), -4.0), np.tile(-P.mean / 4, (2, 1)), np.tile(P.std / 4, (2, 1)))
    has(-Q, -P.mean, P.std)
    raw = Prediction(mean=P.mean, std=P.std, uncalibrated=Prediction(mean=P.mean, std=2 * P.std))
    has((2 * raw[1:] + 1).uncalibrated, 2 * P.mean[1:] + 1, 4 * P.std[1:])
    two = Prediction(mean=np.ones((4, 3)), std=np.full((4, 3), 0.1))
    has(two[:, 1], np.ones(4), np.full(4, 0.1))


@pytest.mark.parametrize(
    "combine",
    [
        lambda q: q - q,
        lambda q: q + P,
        lambda q: q.sum(),
        lambda q: np.ones(5) @ q,
        lambda q: q.map(np.max),
        lambda q: q.covariance(),
        lambda q: np.exp(q),
        lambda q: 1 / q,
        lambda q: Prediction.concatenate([q, P]),
        lambda q: StudentCalibration(alpha=2.0).apply(q),
    ],
)
def test_without_members_points_cannot_be_combined(combine):
    with rejects("prediction"):
        combine(Q)


def test_copies_and_pickles_are_complete():
    calibrated = LinearCalibration(alpha=3.0).apply(P)
    difference = calibrated[0] - calibrated[1]
    for again in (pickle.loads(pickle.dumps(difference)), copy.deepcopy(difference)):
        same(again, difference.members)
        same(again.uncalibrated, difference.uncalibrated.members)
        assert not again.members.flags.writeable
    has(pickle.loads(pickle.dumps(Q)), Q.mean, Q.std)
    assert P in [None, P]
    assert Prediction(MEMBERS) != P


@pytest.mark.parametrize("function", [np.mean, np.std, np.round, np.asarray, lambda p: p > 1])
def test_what_is_not_defined_member_by_member_is_a_type_error(function):
    with pytest.raises(TypeError):
        function(P)


def test_student_intervals_of_few_members_have_their_coverage():
    rng = np.random.default_rng(0)
    s = 0.3 * np.sqrt(4 / rng.chisquare(4, size=6000))
    members = s[:, None] * rng.normal(size=(6000, 3))
    y = 1.5 * s * rng.normal(size=6000)
    calibration = calibrate(y[:3000], members[:3000], method="student")
    prediction = calibration.apply(Prediction(members))[3000:]
    assert prediction.dof == calibration.prior_dof + 2
    for shift, moved in ((0, prediction), (1, prediction + 1), (0, copy.copy(prediction))):
        low, high = moved.interval(0.95, "student")
        reference = y[3000:] + shift
        inside = (low <= reference) & (reference <= high)
        assert np.mean(inside) == pytest.approx(0.95, abs=0.015)
    assert (prediction[0] - prediction[1]).dof is None
    with rejects("method"):
        Prediction(members).interval(0.95, "student")


@pytest.mark.filterwarnings("ignore:Only 5 independent points")
def test_score_and_calibrate_take_predictions_and_arrays():
    y = rng.normal(size=5) + 3
    scores = score(y, P)
    assert scores.n_points == 5
    assert scores.rmse == pytest.approx(np.sqrt(np.mean((y - P.mean) ** 2)))
    assert scores.crps_ensemble > 0
    assert score(y, Q) == score(y, mean=P.mean, std=P.std)
    assert score(y, Q).log_likelihood == pytest.approx(scores.log_likelihood)
    assert score(y, Q).crps_ensemble is None
    fitted = calibrate(y, LinearCalibration(alpha=3.0).apply(P), method="linear")
    assert fitted.alpha == pytest.approx(calibrate(y, MEMBERS, method="linear").alpha)


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: Prediction(np.ones((3, 1))), "members"),
        (lambda: Prediction(1.0), "members"),
        (lambda: Prediction([[1.0, np.inf]]), "members"),
        (lambda: Prediction(), "members"),
        (lambda: Prediction(mean=[1.0]), "members"),
        (lambda: Prediction([[1.0, 2.0]], mean=[1.5]), "mean"),
        (lambda: Prediction(mean=[1.0], std=[-1.0]), "std"),
        (lambda: Prediction(mean=[1.0], std=[1.0, 2.0]), "std"),
        (lambda: Prediction(mean=[np.nan], std=[1.0]), "mean"),
        (lambda: Prediction.concatenate([P, Prediction(np.ones((5, 3)))]), "predictions"),
        (lambda: P + np.ones(4), "prediction"),
        (lambda: Q + np.ones(4), "prediction"),
        (lambda: np.ones((2, 3)) @ P, "prediction"),
        (lambda: P @ np.ones(4), "prediction"),
        (lambda: P.map(lambda x: None), "f"),
        (lambda: score(P.mean, MEMBERS), "prediction"),
        (lambda: score(P.mean), "prediction"),
        (lambda: score(P.mean, P, mean=P.mean), "prediction"),
        (lambda: score(P.mean[:2], P), "mean"),
        (lambda: calibrate(["a"] * 5, MEMBERS), "y"),
        (lambda: calibrate(P.mean, MEMBERS, method="sources"), "method"),
        (lambda: calibrate(P.mean, mean=P.mean, std=P.std, method="student"), "method"),
    ],
)
def test_bad_input(call, parameter):
    with rejects(parameter):
        call()


def test_errors_of_models_with_different_numbers_of_members_add_in_quadrature():
    generator = np.random.default_rng(1)
    few, many = (Prediction(generator.normal(size=(200, n))) for n in (16, 400))
    difference = few - many
    assert difference.n_members == 400
    np.testing.assert_allclose(difference.mean, few.mean - many.mean, atol=1e-12)
    ratio = difference.std / np.hypot(few.std, many.std)
    assert np.abs(ratio - 1).max() < 0.15  # the sampling noise of 400 pairs
    alone = (few - Prediction(np.zeros((200, 400)))).covariance()
    np.testing.assert_allclose(alone, few.covariance(), atol=1e-12)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([1.329, 1.330, 1.331], "1.3300 ± 0.0010"),
        ([-120.0, 0.0, 120.0], "0 ± 120"),
        ([2.5, 2.5], "2.5 ± 0"),
        ([0.0, 0.0], "0 ± 0"),
        ([1e6, 1e6 + 1.0], "1000000.50 ± 0.71"),
    ],
)
def test_a_single_prediction_prints_with_two_digits_of_its_standard_deviation(members, text):
    assert str(Prediction(members)) == text
