"""Forces and stresses are stretched as a whole: directions do not matter, whatever the method."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from test_forces_training import alloys, model
from threadpoolctl import threadpool_limits

from qualms import Prediction, score
from qualms.atomistic.evaluation import evaluate_derivatives
from qualms.atomistic.forces import predict_mechanics
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.structures import VOIGT
from qualms.calibration.base import calibration_data
from qualms.calibration.fitting import (
    build_calibration,
    fit_calibration,
    fit_internally,
    internal_points,
)
from qualms.calibration.methods import Scaled, WholeCalibration, whole_spread

METHODS = ("student", "linear", "power", "shrinkage")
R = Rotation.from_euler("xyz", [0.7, 0.5, 1.1]).as_matrix()
PARTS = (("forces", 12), ("stress", 6))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def fitted():
    trained = model(stress="virtual", n_members=16, units="eV").fit(alloys()[:26])
    return trained.fitted, trained.potential


def predicted(fitted, method, frames):
    """What a model with another method of calibration says."""
    settings = fitted[0].settings.model_copy(update={"calibration": method})
    other = replace(fitted[0], settings=settings)
    return predict_mechanics(other, fitted[1], frames, stress=True)


def turned(atoms):
    other = atoms.copy()
    other.set_cell(atoms.cell.array @ R.T)
    other.positions = atoms.positions @ R.T
    return other


def as_matrix(stress):
    """Components (…, 6, N_R) as matrices (…, 3, 3, N_R)."""
    matrix = np.empty((*stress.shape[:-2], 3, 3, stress.shape[-1]))
    for k, (a, b) in enumerate(zip(*VOIGT, strict=True)):
        matrix[..., a, b, :] = matrix[..., b, a, :] = stress[..., k, :]
    return matrix


@pytest.mark.parametrize("method", METHODS)
def test_members_and_error_bars_turn_with_the_structure(fitted, method):
    frames = alloys()[30:33]
    before = predicted(fitted, method, frames)
    after = predicted(fitted, method, [turned(atoms) for atoms in frames])
    forces = np.einsum("ab,nbr->nar", R, before.forces.members)
    tolerance = 1e-6 * before.forces.std.mean()
    np.testing.assert_allclose(after.forces.members, forces, atol=tolerance)
    norms = [p.forces.map(lambda f: np.linalg.norm(f, axis=1)).std for p in (before, after)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    stress = np.einsum("ab,nbcr,dc->nadr", R, as_matrix(before.stress.members), R)
    tolerance = 1e-6 * before.stress.std.mean()
    np.testing.assert_allclose(as_matrix(after.stress.members), stress, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_all_components_have_one_factor_that_depends_on_the_spread_of_the_whole(fitted, method):
    found = predicted(fitted, method, alloys()[30:36])
    for prediction in (found.forces, found.stress):
        factors = prediction.std / prediction.uncalibrated.std
        np.testing.assert_allclose(factors, factors[:, :1].repeat(factors.shape[1], 1), rtol=1e-9)
        if method in ("power", "shrinkage"):
            assert np.ptp(factors[:, 0]) > 1e-3 * factors.mean()
        else:
            assert np.ptp(factors) < 1e-9 * factors.mean()


def components(fitted, part):
    """Labels, and members that did not see them: by structures, forces or stress, components."""
    known = alloys()[:26]
    said = getattr(predicted(fitted, "none", known), part).members
    y = [a.arrays["force"] if part == "forces" else a.info["virtual"][None] for a in known]
    return np.concatenate(y), said, np.repeat(fitted[0].membership == 0, len(said) // 26, axis=0)


@pytest.mark.parametrize(("part", "per_structure"), PARTS)
def test_calibrations_are_fitted_to_what_is_applied(fitted, part, per_structure):
    y, said, absent = components(fitted, part)
    own = getattr(fitted[0], f"{part}_calibrations")
    ratios = np.empty_like(y)
    for i, members in enumerate(said):
        of_axes = members[:, absent[i]].std(axis=1, ddof=1)
        matrix = as_matrix(of_axes[:, None])[..., 0] if y.shape[1] == 6 else of_axes
        ratios[i] = np.sqrt(np.mean(matrix**2)) / of_axes
    flat, seen = said.reshape(-1, 16), np.repeat(absent, y.shape[1], axis=0)
    plain = calibration_data(y.ravel(), flat, seen)
    whole = calibration_data((y * ratios).ravel(), flat * ratios.reshape(-1, 1), seen)
    for method in METHODS:
        expected = fit_internally(whole, method)
        assert own[method].alpha == pytest.approx(expected.alpha, rel=1e-3)
        assert own[method].gamma == pytest.approx(expected.gamma, rel=1e-3)
        # Densities are those of components, not of what they were multiplied by.
        jacobian = np.log(whole.spread / plain.spread)
        density = expected.log_density(whole.residuals, whole.spread, whole.n_members) + jacobian
        density = density[internal_points(whole, method)]
        assert own[method].log_likelihood == pytest.approx(np.mean(density), abs=1e-3)
    for method in ("student", "linear"):
        expected = fit_internally(plain, method)
        assert own[method].alpha == pytest.approx(expected.alpha, rel=1e-6)
        assert own[method].log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-6)
    assert own["power"].gamma != pytest.approx(fit_internally(plain, "power").gamma, rel=1e-3)
    assert own["student"].n_points == 26 * per_structure


@pytest.mark.parametrize("method", METHODS)
def test_what_is_judged_is_what_is_predicted(method):
    trained = model(stress="virtual", n_members=16, units="eV", calibration=method)
    trained.fit(alloys()[:26])
    new = alloys()[26:]
    found = trained.predict_forces(new, stress=True)
    rows = {name: one.rows for name, one in evaluate_derivatives(trained, new).items()}
    truths = {
        "forces": np.concatenate([atoms.arrays["force"] for atoms in new]),
        "stress": np.array([atoms.info["virtual"] for atoms in new]),
    }
    for part, truth in truths.items():
        flat = Prediction(getattr(found, part).members.reshape(-1, 16))
        expected = score(truth.ravel(), flat).log_likelihood
        assert rows[part][f"{method} (internal)"].log_likelihood == pytest.approx(expected)


@pytest.mark.parametrize("n_components", [3, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_calibration_of_vectors_and_tensors(method, n_components):
    rng = np.random.default_rng(0)
    members = rng.normal(size=(40, n_components, 8)) * rng.uniform(0.1, 3, size=(40, 1, 1))
    spread = members.std(axis=-1, ddof=1)
    matrix = as_matrix(spread[..., None])[..., 0] if n_components == 6 else spread
    r = np.sqrt(np.mean(matrix.reshape(40, -1) ** 2, axis=1))
    np.testing.assert_allclose(whole_spread(spread), r)
    data = calibration_data(2 * r * rng.normal(size=40), r[:, None] * rng.normal(size=(40, 8)))
    calibration = fit_calibration(data, method)
    found = WholeCalibration(calibration).transform(members)
    np.testing.assert_allclose(found.mean(axis=-1), members.mean(axis=-1), atol=1e-12)
    np.testing.assert_allclose(whole_spread(found.std(axis=-1, ddof=1)), calibration.std(r, 8))
    if method in ("student", "linear"):
        np.testing.assert_allclose(found, calibration.transform(members))


def test_a_force_that_members_agree_about_stays_as_it_is():
    calibration = build_calibration("power", {"alpha": 2.0, "gamma": 0.5})
    same = np.ones((2, 3, 4))
    np.testing.assert_array_equal(WholeCalibration(calibration).transform(same), same)


def test_factors_from_elsewhere_are_those_of_the_first_axis():
    members = np.random.default_rng(0).normal(size=(2, 3, 5))
    spread = members.std(axis=-1, ddof=1)
    found = Scaled(np.array([2.0, 0.5])).transform(members)
    np.testing.assert_allclose(found.std(axis=-1, ddof=1), spread * [[2.0], [0.5]])
    found = Scaled(3.0).transform(members[0])
    np.testing.assert_allclose(found, members[0].mean(-1, keepdims=True) * -2 + 3 * members[0])


def test_rows_of_labels_know_their_forces_and_how_often_they_are_in_a_tensor():
    forces = [np.zeros((2, 3)), np.zeros((1, 3))]
    forces[0][0, 1] = np.nan
    virials = np.array([[0.0] * 6, [np.nan, 0, 0, 0, np.nan, 0]])
    labels = ForceLabels(forces, virials)
    assert labels.whole.tolist() == [0, 0, 1, 1, 1, *[2] * 6, 3, 3, 3, *[4] * 4]
    expected = [1] * 5 + [1, 1, 1, 2, 2, 2] + [1] * 3 + [1, 1, 2, 2]
    assert labels.multiplicity.tolist() == expected
