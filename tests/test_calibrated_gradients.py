"""Derivatives of calibrated members and of their spread, against finite differences."""

import numpy as np
import pytest

from qualms.ase.calculator import CalibratedPoint, calibrated_point
from qualms.calibration.base import calibration_data
from qualms.calibration.fitting import build_calibration, fit_calibration

N_MEMBERS, N_VARIABLES = 7, 5


class Members:
    """Functions of some variables, one for each member."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.slopes = rng.normal(size=(N_VARIABLES, N_MEMBERS))
        self.curvatures = rng.normal(size=(N_VARIABLES, N_VARIABLES, N_MEMBERS))
        self.curvatures = self.curvatures + self.curvatures.transpose(1, 0, 2)

    def __call__(self, x):
        return x @ self.slopes + 0.5 * np.einsum("a,abm,b->m", x, self.curvatures, x)

    def gradients(self, x):
        return self.slopes + np.einsum("abm,b->am", self.curvatures, x)


def calibrations():
    rng = np.random.default_rng(1)
    widths = rng.uniform(0.5, 3, size=(200, 1))
    members = widths * rng.normal(size=(200, N_MEMBERS))
    data = calibration_data(1.5 * (widths**0.8)[:, 0] * rng.normal(size=200), members)
    found = {method: fit_calibration(data, method) for method in ("student", "linear", "shrinkage")}
    return found | {"power": build_calibration("power", {"alpha": 1.3, "gamma": 0.6})}


CALIBRATIONS = calibrations()


def differences(f, x, h=1e-4):
    """Derivatives of f, on the first axis by each variable."""
    return np.stack([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(len(x))])


@pytest.mark.parametrize("method", CALIBRATIONS)
@pytest.mark.parametrize("n_atoms", [1, 9])
def test_gradients_are_those_of_what_is_predicted(method, n_atoms):
    """Energies of n atoms are calibrated as averages, and multiplied afterwards."""
    calibration, members = CALIBRATIONS[method], Members()

    def calibrated(x):
        return n_atoms * calibration.transform(members(x) / n_atoms)

    x = np.random.default_rng(3).normal(size=N_VARIABLES)
    point = calibrated_point(members(x), calibrated(x), calibration, scale=n_atoms)
    np.testing.assert_allclose(
        point.member_gradients(members.gradients(x)), differences(calibrated, x), atol=1e-6
    )
    np.testing.assert_allclose(
        point.std_gradient(members.gradients(x)),
        differences(lambda x: calibrated(x).std(ddof=1), x),
        atol=1e-6,
    )
    if method in ("student", "linear"):
        assert point.slope == pytest.approx(0.0, abs=1e-9)


def test_a_factor_that_is_not_explained_is_constant():
    raw = np.random.default_rng(0).normal(size=N_MEMBERS)
    scaled = raw.mean() + 2.5 * (raw - raw.mean())
    point = calibrated_point(raw, scaled, None)
    assert point.factor == pytest.approx(2.5)
    assert point.slope == 0.0


def test_shapes_go_through():
    members, x = Members(), np.ones(N_VARIABLES)
    point = CalibratedPoint(members(x), factor=2.0, slope=0.3)
    flat = members.gradients(x)
    folded = np.broadcast_to(flat, (4, 2, *flat.shape))
    assert point.member_gradients(folded).shape == folded.shape
    np.testing.assert_allclose(point.std_gradient(folded)[3, 1], point.std_gradient(flat))


def test_members_that_agree_have_no_direction():
    gradients = Members().gradients(np.ones(N_VARIABLES))
    same = np.full(N_MEMBERS, 3.0)
    point = calibrated_point(same, same, CALIBRATIONS["power"])
    np.testing.assert_array_equal(point.std_gradient(gradients), 0.0)
    np.testing.assert_allclose(point.member_gradients(gradients), gradients)
