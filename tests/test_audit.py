"""What audit labels say, and the test of calibration label by label: synthetic errors, a model."""

import numpy as np
import pytest
from scipy.special import stdtrit

from qualms import InputError
from qualms.active import CalibrationTest, Coverage, coverage, upper_bound
from qualms.calibration.sequential import calibration_scores, structure_means
from qualms.evaluation import Evaluation
from qualms.prediction import Prediction


def squares(n, rng, dof=10):
    """Return mean squared errors relative to σ²: those of n structures of `dof` components."""
    return rng.chisquare(dof, n) / dof


def slow_bound(errors, std, explored, t):
    """Return the bound by explicit sums; t is the quantile of Student's t."""
    y, x = [e**2 for e in errors], [s**2 for s in std]
    R = sum(y) / sum(x)
    d = [(b - R * a) / (1 - a / sum(x)) for a, b in zip(x, y, strict=True)]
    square = sum(v**2 for v in d)
    s, g = square**0.5 / sum(y), max(sum(v**3 for v in d) / square**1.5, 0)
    mean = sum(v**2 for v in explored) / len(explored)
    return (R * mean * np.exp(s * (t + g * (2 * t**2 + 1) / 6))) ** 0.5


def test_bound_is_its_formula():
    rng = np.random.default_rng(0)
    std, explored = rng.uniform(0.5, 2, 7), rng.uniform(0.5, 2, 50)
    errors = std * np.sqrt(squares(7, rng))
    y = errors**2
    quantile = stdtrit(y.sum() ** 2 / (y @ y) - 1, 0.9)
    expected = slow_bound(errors, std, explored, quantile)
    assert upper_bound(errors, std, explored, 0.9) == pytest.approx(expected, rel=1e-12)


def test_limits_of_the_bound():
    rng = np.random.default_rng(1)
    std, explored = rng.uniform(0.5, 2, 8), rng.uniform(0.5, 2, 100)
    rms = np.sqrt(np.mean(explored**2))
    # Errors in proportion to σ leave nothing uncertain.
    assert upper_bound(1.3 * std, std, explored) == pytest.approx(1.3 * rms, rel=1e-12)
    assert upper_bound(-1.3 * std, std, explored) == pytest.approx(1.3 * rms, rel=1e-12)
    errors = std * np.sqrt(squares(8, rng))
    bound = upper_bound(errors, std, explored)
    for scale in (1e-150, 1e150):  # units do not matter
        assert upper_bound(scale * errors, std, explored) == pytest.approx(scale * bound, rel=1e-9)
    assert upper_bound(errors, 7 * std, 7 * explored) == pytest.approx(bound, rel=1e-9)
    assert (
        upper_bound(errors, std, explored, 0.5) < bound < upper_bound(errors, std, explored, 0.99)
    )
    assert upper_bound([0.3], [0.2], explored) == np.inf
    assert upper_bound([0.0, 0.0], [0.2, 0.1], explored) == 0.0
    many = rng.uniform(0.5, 2, 200_000)
    wide = upper_bound(1.5 * many * np.sqrt(squares(200_000, rng)), many, many)
    assert wide == pytest.approx(1.5 * np.sqrt(np.mean(many**2)), rel=0.01)


@pytest.mark.parametrize("n", [5, 10, 40])
def test_coverage_and_width_of_the_bound(n):
    """σ varies as in a real loop (0.8 in ln σ²), errors as those of about ten components."""
    rng = np.random.default_rng(n)
    below, widths, alone = [], [], []
    for _ in range(1500):
        explored = np.exp(rng.normal(0, 0.4, 1000))
        errors = explored * np.sqrt(squares(1000, rng)) * 1.2  # σ is too small by 1.2
        audits = rng.choice(1000, n, replace=False)
        rmse = np.sqrt(np.mean(errors**2))
        bound = upper_bound(errors[audits], explored[audits], explored)
        below.append(rmse <= bound)
        widths.append(bound / rmse)
        alone.append(upper_bound(errors[audits], np.ones(n), [1.0]) / rmse)
    assert np.mean(below) >= 0.93
    # Audits alone have a wider bound that holds less often.
    assert np.median(widths) < np.median(alone)
    assert np.mean(below) > np.mean(np.array(alone) >= 1)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (([0.1, np.nan], [0.1, 0.1], [0.1]), "errors"),
        (([0.1, 0.2], [0.1], [0.1]), "std"),
        (([0.1, 0.2], [0.1, 0.0], [0.1]), "std"),
        (([0.1, 0.2], [0.1, 0.1], []), "explored_std"),
        (([0.1, 0.2], [0.1, 0.1], [-0.1]), "explored_std"),
        (([[0.1, 0.2]], [[0.1, 0.1]], [0.1]), "errors"),
        (([], [], [0.1]), "errors"),
        (([0.1, 0.2], [0.1, 0.1], [0.1], 95), "level"),
    ],
)
def test_bad_input_of_the_bound(arguments, parameter):
    with pytest.raises(InputError) as error:
        upper_bound(*arguments)
    assert error.value.parameter == parameter


def test_scores_of_structures():
    z, std = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, 1.0, 2.0])
    scores = calibration_scores(z, std, [7, 7, 2, 2])
    np.testing.assert_allclose(scores, [(9 + 4) / 2, (1 + 1) / 2])
    with pytest.raises(InputError) as error:
        structure_means(z, [1, 2])
    assert error.value.parameter == "structure"


def slow_e_value(reference, scores, exponents=(0.2, 0.4, 0.6, 0.8)):
    """Return the mixture over all starting points, each product computed by itself."""
    known, bets = list(reference), []
    for score in scores:
        k, m = sum(s >= score for s in known) + 1, len(known)
        bets.append([(m + 1) * ((k / (m + 1)) ** a - ((k - 1) / (m + 1)) ** a) for a in exponents])
        known.append(score)
    n = len(scores)
    e = 1 / np.log2(n + 2)
    for s in range(1, n + 1):
        weight = 1 / np.log2(s + 1) - 1 / np.log2(s + 2)
        e += weight * np.mean(np.prod(bets[s - 1 :], axis=0))
    return e


def test_e_value_is_the_mixture_over_starts():
    rng = np.random.default_rng(2)
    reference, scores = squares(15, rng), np.round(2 * squares(25, rng), 1)  # some are equal
    test = CalibrationTest(reference, tolerance=1)
    assert test.e_value == 1
    for n in range(1, len(scores) + 1):
        test.update(scores[n - 1])
        assert test.e_value == pytest.approx(slow_e_value(reference, scores[:n]), rel=1e-9)
    at_once = CalibrationTest(reference, tolerance=1)
    assert at_once.update(scores) == test.alarm
    assert (at_once.e_value, at_once.n_labels) == (test.e_value, 25)


def test_e_values_have_the_expectation_one():
    """Exactly: the rank of the first score is uniform, whatever its distribution."""
    reference = np.arange(1.0, 10.0)
    values = []
    for score in np.arange(10) + 0.5:
        test = CalibrationTest(reference, tolerance=1)
        test.update(score)
        values.append(test.e_value)
    assert np.mean(values) == pytest.approx(1)


@pytest.mark.parametrize("m", [20, 100])
def test_false_alarms_and_detection(m):
    false, late = 0, 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        test = CalibrationTest(squares(m, rng), tolerance=1)
        false += test.update(squares(400, rng, 10))
        if not test.alarm:
            late += not test.update(1.5**2 * squares(60, rng, 10))
    assert false <= 4  # of 30; the level is 0.05, and a run has 400 labels
    assert late <= 1


def test_errors_that_are_too_small_are_no_alarm():
    rng = np.random.default_rng(3)
    test = CalibrationTest(squares(50, rng))
    assert not test.update(0.5 * squares(400, rng))
    assert test.e_value < 1


def test_alarms_stay_and_models_are_renewed():
    rng = np.random.default_rng(4)
    test = CalibrationTest(squares(50, rng))
    assert test.update(9 * squares(30, rng))
    e = test.e_value
    test.renew(squares(80, rng))
    assert test.e_value == e
    assert test.update(0.01 * squares(500, rng))  # evidence fades, the alarm does not
    assert test.e_value < e
    assert "no longer holds" in repr(test)
    extreme = CalibrationTest(squares(2000, rng))
    assert extreme.update(1e6 + np.arange(2000))
    assert extreme.e_value > 1e300


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"reference": []}, "reference"),
        ({"reference": [1.0, -1.0]}, "reference"),
        ({"reference": [[1.0, 1.0]]}, "reference"),
        ({"level": 0}, "level"),
        ({"level": 5}, "level"),
        ({"tolerance": 0.5}, "tolerance"),
    ],
)
def test_bad_input_of_the_test(options, parameter):
    with pytest.raises(InputError) as error:
        CalibrationTest(**{"reference": [1.0, 2.0]} | options)
    assert error.value.parameter == parameter
    with pytest.raises(InputError):
        CalibrationTest([1.0]).update(np.nan)


def test_coverage_of_audits():
    rng = np.random.default_rng(5)
    std = rng.uniform(0.5, 2, 20_000)

    def of(z, dof):
        prediction = Prediction(mean=np.zeros(len(z)), std=std, dof=dof)
        structure = np.arange(len(z)) // 10
        return coverage(
            Evaluation(target="energy", y=z, prediction=prediction, structure=structure)
        )

    z = std * rng.normal(size=20_000)
    assert of(z, None) == of(z, np.inf)
    assert np.allclose(of(z, None)[:2], (0.683, 0.95), atol=0.01)
    assert isinstance(of(z, None), Coverage)
    heavy = std * rng.standard_t(4, 20_000) / np.sqrt(2)
    assert np.allclose(of(heavy, 4.0)[:2], (0.683, 0.95), atol=0.01)
