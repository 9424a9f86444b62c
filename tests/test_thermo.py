import warnings

import numpy as np
import pytest
from checks import rejects
from scipy.signal import lfilter

from qualms import Prediction, QualmsWarning
from qualms.thermo import (
    BOLTZMANN,
    block_length,
    effective_sample_size,
    neglected_term,
    reweight,
    reweight_cumulant,
    reweight_direct,
    statistical_inefficiency,
)

FORCE_CONSTANTS = np.linspace(0.9, 1.1, 8)
ESTIMATORS = ("direct", "cea")


def autoregressive(n, correlation, rng, n_series=1):
    """Gaussian series of unit variance with ρ(t) = correlation^t: g = (1 + ρ)/(1 − ρ)."""
    noise = rng.normal(size=(n, n_series)) * np.sqrt(1 - correlation**2)
    noise[0] /= np.sqrt(1 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], noise, axis=0)


def oscillator(n, seed=0, correlation=0.5):
    """Positions of an oscillator of unit force constant at kT = 1, and energies of all members."""
    x = autoregressive(n, correlation, np.random.default_rng(seed))[:, 0]
    return x, 0.5 * FORCE_CONSTANTS * x[:, None] ** 2


@pytest.fixture
def small():
    rng = np.random.default_rng(1)
    return rng.normal(size=(60, 3)), 0.5 * rng.normal(size=(60, 5))


def test_direct_is_the_weighted_average(small):
    a, h = small
    replicates = reweight_direct(a, h, 7)
    expected = [[np.average(a[:, k], weights=np.exp(-h[:, i])) for i in range(5)] for k in range(3)]
    np.testing.assert_allclose(replicates.members, expected)


def test_cumulants_are_the_covariance(small):
    a, h = small
    replicates = reweight_cumulant(a + 1e6, h + 1e3, 7)
    expected = [
        [a[:, k].mean() - np.cov(a[:, k], h[:, i], ddof=0)[0, 1] for i in range(5)]
        for k in range(3)
    ]
    np.testing.assert_allclose(replicates.members - 1e6, expected, atol=1e-9)


@pytest.mark.parametrize("estimator", [reweight_direct, reweight_cumulant])
@pytest.mark.parametrize("depends", [False, True])
def test_replicates_leave_out_a_block_each(small, estimator, depends):
    a, h = small
    if depends:
        a = a[:, :, None] + np.random.default_rng(2).normal(size=(60, 3, 5))
    replicates = estimator(a, h, 13)  # the last block has 21 frames
    starts = [0, 13, 26, 39]
    assert len(replicates.without) == len(starts)
    for b, (start, end) in enumerate(zip(starts, [*starts[1:], 60], strict=True)):
        rows = np.r_[0:start, end:60]
        alone = estimator(a[rows], h[rows], 5)
        np.testing.assert_allclose(replicates.without[b], alone.members, atol=1e-12)


def test_the_neglected_term_is_the_next_cumulant(small):
    a, h = small
    term = neglected_term(a, h, 10).members
    z, d = a - a.mean(axis=0), h - h.mean(axis=0)
    np.testing.assert_allclose(term, 0.5 * np.einsum("tk,ti->ki", z, d**2) / 60)


def test_effective_sample_size():
    even, single = np.zeros(50), np.r_[-1000.0, np.zeros(49)]
    np.testing.assert_allclose(effective_sample_size(np.stack([even, single], axis=1)), [50, 1])


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_statistical_inefficiency_is_that_of_an_autoregressive_process(correlation):
    series = autoregressive(20_000, correlation, np.random.default_rng(0), 8)
    g = statistical_inefficiency(series)
    assert g.mean() == pytest.approx((1 + correlation) / (1 - correlation), rel=0.1)


def test_blocks_are_longer_than_correlations_and_never_too_few():
    assert block_length(100_000, 50.0) > 4 * 50
    assert block_length(40, 50.0) == 5
    assert block_length(3, 1.0) == 1
    assert block_length(10**7, 1.0) == 20_000


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_oscillator_has_the_analytic_average_and_error(estimator):
    x, energies = oscillator(100_000)
    average = reweight(energies, x**2, kT=1.0, estimator=estimator)
    exact = 1.0 / FORCE_CONSTANTS
    if estimator == "cea":  # what the expansion makes of it
        exact = 1.0 - (FORCE_CONSTANTS - 1.0)
    np.testing.assert_allclose(average.prediction.members, exact, rtol=0.03)
    assert average.mean == pytest.approx(exact.mean(), abs=4 * average.std_sampling)
    assert average.std_model == pytest.approx(exact.std(ddof=1), rel=0.06)
    assert average.reliable
    assert average.sampled == pytest.approx((x**2).mean())
    np.testing.assert_allclose(average.std, np.hypot(average.std_model, average.std_sampling))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_errors_of_model_and_sampling_are_apart(estimator):
    """Longer runs reduce one of them, as 1/√n, and not the other; over many runs both are right."""
    means, model, sampling = {}, {}, {}
    for n in (500, 4500):
        runs = [
            reweight(energies, x**2, kT=1.0, estimator=estimator)
            for x, energies in (oscillator(n, seed, 0.4) for seed in range(40))
        ]
        means[n] = np.std([run.mean for run in runs])
        model[n] = np.sqrt(np.mean([run.std_model**2 for run in runs]))
        sampling[n] = np.sqrt(np.mean([run.std_sampling**2 for run in runs]))
    exact = np.std(1.0 / FORCE_CONSTANTS, ddof=1)
    assert model[500] == pytest.approx(exact, rel=0.12)
    assert model[4500] == pytest.approx(exact, rel=0.08)
    assert sampling[500] / sampling[4500] == pytest.approx(3.0, rel=0.1)
    for n in (500, 4500):
        assert sampling[n] == pytest.approx(means[n], rel=0.35)


def test_members_that_agree_have_no_error_of_the_model():
    """Not even in a short run, where noise makes re-weighted averages differ."""
    rng = np.random.default_rng(0)
    squares = []
    for _ in range(40):
        # What members disagree about has nothing to do with the observable.
        x, y = rng.normal(size=(2, 300))
        average = reweight(
            0.5 * x[:, None] ** 2 + 0.3 * y[:, None] * np.arange(-3, 4), x**2, kT=1.0
        )
        squares.append([average.std_model**2, average.prediction.std**2])
    corrected, as_it_is = np.sqrt(np.mean(squares, axis=0))
    assert corrected < 0.75 * as_it_is


def test_the_energy_depends_on_the_member_itself():
    """⟨V⟩ of every member is kT/2, whatever its force constant: errors cancel."""
    _, energies = oscillator(100_000)
    average = reweight(Prediction(energies), Prediction(energies), kT=1.0, estimator="direct")
    np.testing.assert_allclose(average.prediction.members, 0.5, atol=0.015)
    fixed = reweight(energies, energies.mean(axis=1), kT=1.0, estimator="direct")
    assert average.std_model < 0.3 * fixed.std_model


def test_any_potential_may_have_driven_the_run():
    x, energies = oscillator(100_000)
    shifted = energies[:, 2:] + 0.02 * x[:, None] ** 2  # their mean has not driven it
    average = reweight(shifted, x**2, kT=1.0, sampled=0.5 * x**2, estimator="direct")
    np.testing.assert_allclose(
        average.prediction.members, 1.0 / (FORCE_CONSTANTS[2:] + 0.04), rtol=0.03
    )


def test_several_observables_keep_their_shape():
    x, energies = oscillator(2000)
    counts = np.stack([x > 0, x > 1, x > 2], axis=1).astype(float)
    average = reweight(energies, counts, kT=1.0)
    assert average.mean.shape == average.std_model.shape == average.std_sampling.shape == (3,)
    assert average.prediction.n_members == len(FORCE_CONSTANTS)
    for k in range(3):
        alone = reweight(energies, counts[:, k], kT=1.0)
        np.testing.assert_allclose(alone.prediction.members, average.prediction.members[k])


def test_an_observable_of_another_model_is_several_observables():
    x, energies = oscillator(2000)
    other = Prediction(np.stack([x**2 - 0.01, x**2, x**2 + 0.01], axis=1))
    with rejects("observable"):
        reweight(energies, other, kT=1.0)
    average = reweight(energies, other.members, kT=1.0).prediction.members
    alone = reweight(energies, x**2, kT=1.0).prediction.members
    np.testing.assert_allclose(average, alone + np.array([[-0.01], [0.0], [0.01]]))


def test_a_temperature_is_one_of_energies_in_electronvolts():
    x, energies = oscillator(2000)
    scale = BOLTZMANN * 300.0
    average = reweight(scale * energies, x**2, temperature=300.0)
    np.testing.assert_allclose(
        average.prediction.members, reweight(energies, x**2, kT=1.0).prediction.members
    )


def test_a_large_system_is_too_much_for_direct_weights_but_not_for_cumulants():
    """Members that differ by several kT, as they do for many atoms, Gaussian as these are."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(4000, 9))
    a = y @ np.full(9, 1.0)
    h = 2.5 * y[:, :8]
    with pytest.warns(QualmsWarning):
        bad = reweight(h, a, kT=1.0, sampled=np.zeros(4000), estimator="direct")
    assert not bad.reliable
    assert bad.n_effective.min() < 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = reweight(h, a, kT=1.0, sampled=np.zeros(4000))
    np.testing.assert_allclose(good.prediction.members, -2.5, atol=0.35)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("n", [2, 3, 10, 100])
def test_results_are_finite_for_any_members(estimator, n):
    rng = np.random.default_rng(n)
    wild = 1e4 * rng.normal(size=(n, 5))
    a = rng.normal(size=n)
    with pytest.warns(QualmsWarning):
        average = reweight(wild, a, kT=1.0, estimator=estimator)
    for value in (average.mean, average.std_model, average.std_sampling, average.n_effective):
        assert np.all(np.isfinite(value))
    if estimator == "direct":  # averages of what there was
        assert np.all(average.prediction.members >= a.min() - 1e-9)
        assert np.all(average.prediction.members <= a.max() + 1e-9)


def test_members_too_far_apart_for_cumulants():
    x, _ = oscillator(20_000)
    far = 0.5 * np.linspace(0.4, 1.6, 6) * x[:, None] ** 2
    with pytest.warns(QualmsWarning):
        average = reweight(far, x**2, kT=1.0)
    assert not average.reliable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reweight(far, x**2, kT=1.0, estimator="direct").reliable


def test_a_short_run_issues_a_warning():
    x = autoregressive(400, 0.98, np.random.default_rng(0))[:, 0]
    with pytest.warns(QualmsWarning):
        reweight(0.5 * FORCE_CONSTANTS * x[:, None] ** 2, x**2, kT=1.0)


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("temperature", {"kT": None}),
        ("temperature", {"temperature": 300.0}),
        ("kT", {"kT": 0.0}),
        ("temperature", {"kT": None, "temperature": -1.0}),
        ("estimator", {"estimator": "magic"}),
        ("energies", {"energies": np.ones(50)}),
        ("energies", {"energies": np.ones((50, 1))}),
        ("energies", {"energies": Prediction(mean=np.ones(50), std=np.ones(50))}),
        ("observable", {"observable": np.ones(49)}),
        ("sampled", {"sampled": np.ones(49)}),
    ],
)
def test_bad_input(parameter, change):
    arguments = {"energies": np.ones((50, 3)), "observable": np.ones(50), "kT": 1.0}
    with rejects(parameter):
        reweight(**(arguments | change))
