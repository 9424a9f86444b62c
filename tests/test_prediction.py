import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qualms.calibration.fitting import calibrate
from qualms.calibration.methods import LinearCalibration, PowerCalibration
from qualms.errors import InputError
from qualms.prediction import Prediction, score
from qualms.prediction import calibrate as calibrate_any

rng = np.random.default_rng(0)
MEMBERS = rng.normal(size=(5, 8)) + 3
P = Prediction(MEMBERS)


def same(prediction, members):
    np.testing.assert_allclose(prediction.members, members, rtol=1e-12)


def test_mean_and_std_are_those_of_the_members():
    np.testing.assert_allclose(P.mean, MEMBERS.mean(axis=1))
    np.testing.assert_allclose(P.std, MEMBERS.std(axis=1, ddof=1))
    np.testing.assert_allclose(P.covariance(), np.cov(MEMBERS))
    assert (P.shape, P.n_members, len(P)) == ((5,), 8, 5)
    assert repr(P) == "<Prediction of shape (5,) by 8 members>"


def test_members_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        P.members[0, 0] = 1.0
    source = MEMBERS.copy()
    prediction = Prediction(source)
    source[:] = 0
    same(prediction, MEMBERS)


def test_indexing_keeps_the_members():
    same(P[2], MEMBERS[2])
    same(P[1:3], MEMBERS[1:3])
    same(P[[0, 4]], MEMBERS[[0, 4]])
    same(P[P.mean > 3], MEMBERS[P.mean > 3])
    two = Prediction(rng.normal(size=(4, 3, 8)))
    same(two[:, 1], two.members[:, 1])
    same(two[..., 0], two.members[:, 0])
    same(two[1, 2], two.members[1, 2])
    with pytest.raises(IndexError):
        P[0, 0]
    with pytest.raises(TypeError, match="no length"):
        len(P[0])


def test_operators_and_functions_act_member_by_member():
    Q = Prediction(rng.normal(size=(5, 8)))
    same(P + Q, MEMBERS + Q.members)
    same(P - 1, MEMBERS - 1)
    same(1 - P, 1 - MEMBERS)
    same(np.arange(5) * P, np.arange(5)[:, None] * MEMBERS)
    same(P / np.arange(1, 6), MEMBERS / np.arange(1, 6)[:, None])
    same(-(P**2), -(MEMBERS**2))
    same(abs(Q), abs(Q.members))
    same(np.exp(P), np.exp(MEMBERS))
    same(np.maximum(P, Q), np.maximum(MEMBERS, Q.members))
    same(P[0] * Q, MEMBERS[0] * Q.members)
    same(np.ones((2, 1)) + P, np.ones((2, 1, 1)) + MEMBERS)


def test_sums_and_linear_combinations():
    C = rng.normal(size=(3, 5))
    same(C @ P, C @ MEMBERS)
    same(P @ C.T, C @ MEMBERS)
    same(C[0] @ P, C[0] @ MEMBERS)
    same(P.sum(), MEMBERS.sum(axis=0))
    same(np.sum(P), MEMBERS.sum(axis=0))
    two = Prediction(rng.normal(size=(5, 3, 8)))
    same(two.sum(axis=0), two.members.sum(axis=0))
    same(np.sum(two, axis=-1), two.members.sum(axis=1))
    same(C @ two, np.einsum("kn,ntr->ktr", C, two.members))
    same(two @ np.ones((3, 2)), np.einsum("ntr,tk->nkr", two.members, np.ones((3, 2))))
    same(Prediction.concatenate([P[:2], P[2:]]), MEMBERS)
    with pytest.raises(TypeError, match="use map"):
        P @ P
    same(np.concatenate([P[:2], P[2:]]), MEMBERS)
    for axis in (1, -2, 2):
        with pytest.raises(InputError, match="axis"):
            P.sum(axis=axis)


def test_correlated_errors_cancel_in_differences():
    shared = rng.normal(size=8)
    pair = Prediction(np.stack([shared, shared + 1.0]))
    difference = pair[1] - pair[0]
    assert difference.mean == pytest.approx(1.0)
    assert difference.std == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "combine",
    [
        lambda forces, energies: forces - energies,
        lambda forces, energies: np.ones(4) * energies,
        lambda forces, energies: np.ones((2, 3)) @ energies,
        lambda forces, energies: energies @ np.ones(4),
        lambda forces, energies: np.float64(3) @ energies,
    ],
)
def test_shapes_that_do_not_go_together_are_named(combine):
    forces = Prediction(np.random.default_rng(0).normal(size=(5, 3, 8)))
    with pytest.raises(InputError, match=r"shapes .*\(5,\).* for (subtract|multiply|matmul)"):
        combine(forces, P)


@given(
    arrays(np.float64, (3, 6), elements=st.floats(-10, 10)),
    arrays(np.float64, 3, elements=st.floats(-10, 10)),
)
def test_the_error_of_a_combination_is_that_of_the_covariance(members, c):
    prediction = Prediction(members)
    variance = c @ prediction.covariance() @ c
    assert (c @ prediction).std ** 2 == pytest.approx(variance, abs=1e-8)


def test_map_calls_the_function_once_per_member():
    largest = P.map(np.max)
    same(largest, MEMBERS.max(axis=0))
    assert P.map(lambda x: np.outer(x, x)).shape == (5, 5)


def test_linear_calibration_commutes_with_sums():
    calibration = LinearCalibration(alpha=2.5)
    first = calibration.apply(P)
    combined, other = first[0] - first[1], calibration.apply(P[0] - P[1])
    same(combined, other.members)


def test_non_linear_calibration_is_applied_before_combining():
    calibration = PowerCalibration(alpha=0.8, gamma=0.5)
    calibrated = calibration.apply(P)
    np.testing.assert_allclose(calibrated.std, 0.8 * P.std**0.5)
    # D C D, with the factors on the diagonal.
    factors = calibrated.std / P.std
    np.testing.assert_allclose(
        calibrated.covariance(), np.cov(MEMBERS) * np.outer(factors, factors)
    )
    # A combination can be calibrated itself, from what the members said before.
    difference = calibrated[0] - calibrated[1]
    same(difference.uncalibrated, MEMBERS[0] - MEMBERS[1])
    again = calibration.apply(difference)
    assert again.std == pytest.approx(0.8 * (P[0] - P[1]).std ** 0.5)


def test_the_uncalibrated_prediction_is_kept_through_everything():
    calibrated = LinearCalibration(alpha=3.0).apply(P)
    assert repr(calibrated).endswith("calibrated>")
    same(calibrated.uncalibrated, MEMBERS)
    same(calibrated[1:].uncalibrated, MEMBERS[1:])
    same(np.exp(calibrated).uncalibrated, np.exp(MEMBERS))
    same(calibrated.map(np.max).uncalibrated, MEMBERS.max(axis=0))
    same(calibrated.sum().uncalibrated, MEMBERS.sum(axis=0))
    same((np.ones(5) @ calibrated).uncalibrated, MEMBERS.sum(axis=0))
    same(Prediction.concatenate([calibrated, calibrated]).uncalibrated, np.tile(MEMBERS, (2, 1)))
    assert P.uncalibrated is P
    # Calibrating twice is calibrating once.
    same(LinearCalibration(alpha=3.0).apply(calibrated), calibrated.members)


def test_operators_in_place_make_a_new_prediction():
    p = P
    p += 1
    p *= 2
    same(p, 2 * (MEMBERS + 1))
    same(P, MEMBERS)


def test_copies_and_pickles_are_whole():
    calibrated = LinearCalibration(alpha=3.0).apply(P)
    difference = calibrated[0] - calibrated[1]
    for again in (pickle.loads(pickle.dumps(difference)), copy.deepcopy(difference)):
        same(again, difference.members)
        same(again.uncalibrated, difference.uncalibrated.members)
        assert not again.members.flags.writeable


def test_iteration_and_identity():
    for i, p in enumerate(P):
        same(p, MEMBERS[i])
    with pytest.raises(TypeError, match="no length"):
        list(P[0])
    assert P in [None, P]
    assert Prediction(MEMBERS) != P


@pytest.mark.parametrize("function", [np.mean, np.std, np.max, np.round, np.diff, np.asarray])
def test_what_numpy_cannot_do_member_by_member_says_what_to_do(function):
    with pytest.raises(TypeError, match=r"\.mean"):
        function(P)


def test_calibrating_takes_a_prediction_as_well_as_an_array():
    y = rng.normal(size=5) + 3
    fitted = calibrate_any(y, LinearCalibration(alpha=3.0).apply(P), method="linear")
    assert fitted.alpha == pytest.approx(calibrate(y, MEMBERS, method="linear").alpha)
    with pytest.raises(InputError, match="prediction=ndarray"):
        score(y, MEMBERS)
    with pytest.raises(InputError, match="y="):
        calibrate_any(["a"] * 5, MEMBERS)


def test_a_calibration_of_several_outputs_refuses_a_prediction_of_one():
    members = rng.normal(size=(40, 2, 8))
    y = rng.normal(size=(40, 2))
    fitted = calibrate_any(y, members)
    assert fitted.log_likelihood.shape == (2,)
    p = Prediction(members)
    with pytest.raises(InputError, match=r"2 outputs.*outputs\[t\]"):
        fitted.apply(p[:, 0])
    same(fitted.outputs[0].apply(p[:, 0]), fitted.apply(p).members[:, 0])


def test_score_judges_a_prediction():
    y = rng.normal(size=5) + 3
    scores = score(y, P)
    assert scores.n_points == 5
    assert scores.rmse == pytest.approx(np.sqrt(np.mean((y - P.mean) ** 2)))
    assert scores.crps_ensemble > 0
    assert calibrate(y, MEMBERS, method="linear").apply(P).n_members == 8


def test_bad_input():
    with pytest.raises(InputError, match="at least 2 members"):
        Prediction(np.ones((3, 1)))
    with pytest.raises(InputError, match="at least 2 members"):
        Prediction(1.0)
    with pytest.raises(InputError, match="1 NaN or infinite"):
        Prediction([[1.0, np.inf]])
    with pytest.raises(InputError, match="one and the same model"):
        P + Prediction(np.ones((5, 3)))
    with pytest.raises(TypeError, match="not a number"):
        _ = P > 1
    with pytest.raises(TypeError):
        np.add.reduce(P)


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
def test_a_single_prediction_prints_as_a_number_with_an_error_bar(members, text):
    assert str(Prediction(members)) == text
    assert str(Prediction([members, members])).startswith("<Prediction of shape (2,)")
