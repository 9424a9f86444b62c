"""Structures with wrong labels are named, and noises that are lost in rounding are raised."""

import numpy as np
import pytest

from qualms import QualmsWarning
from qualms.atomistic import training as joint_solving
from qualms.atomistic.label_checks import doubtful_structures, evened, factor_between
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.settings import make_settings
from qualms.atomistic.training import fit_joint_model, solve_joint_members
from qualms.errors import NumericalError


def committee(n=40, per=6, n_members=16):
    """Labels, what members say, who did not see what, and structures."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=n * per)
    structure = np.repeat(np.arange(n), per)
    members = truth[:, None] + 0.1 * rng.normal(size=(n * per, n_members))
    absent = (np.argsort(rng.random((n, n_members)), axis=1) < n_members // 2)[structure]
    return truth + 0.1 * rng.normal(size=n * per), members, absent, structure


def test_wrong_labels_are_found_worst_first():
    y, members, absent, structure = committee()
    assert not len(doubtful_structures(y, members, absent, structure).structures)
    y[structure == 7] *= 200
    y[20 * 6] += 5000.0  # a single component
    found = doubtful_structures(y, members, absent, structure)
    assert found.structures.tolist() == [20, 7]
    assert found.errors[0] > found.errors[1] > 30 * found.usual
    assert found.usual == pytest.approx(0.1, rel=0.3)


def test_members_that_saw_a_wrong_label_do_not_hide_it():
    y, members, absent, structure = committee()
    y[structure == 7] += 1000.0
    saw = ~absent[7 * 6]
    members[:, saw] += 5 * np.random.default_rng(1).normal(size=(len(y), saw.sum()))
    found = doubtful_structures(y, members, absent, structure)
    assert found.structures.tolist() == [7]


def test_what_members_do_not_agree_about_is_not_doubted():
    y, members, absent, structure = committee()
    strange = structure == 9
    y[strange] += 100.0
    members[strange] += 100 * np.random.default_rng(2).normal(size=(6, members.shape[1]))
    assert not len(doubtful_structures(y, members, absent, structure).structures)
    few = structure < 8
    y[:6] += 1e6
    assert not len(
        doubtful_structures(y[few], members[few], absent[few], structure[few]).structures
    )


def test_no_structure_speaks_for_all_others_about_conventions():
    rng = np.random.default_rng(3)
    structure = np.repeat(np.arange(20), 12)
    labels = rng.normal(size=240)
    predicted = labels + 0.3 * rng.normal(size=240)
    wild = structure == 4
    labels[wild] *= 100
    predicted[wild] = -0.3 * labels[wild]
    assert factor_between(labels, predicted).r < 0
    found = factor_between(*evened(labels, predicted, structure))
    assert found.is_one
    assert found.r > 0.6
    # A factor of all stays what it is.
    other = factor_between(*evened(23.06 * labels, predicted, structure))
    assert other.value == pytest.approx(23.06 * found.value)


def degenerate(noise):
    """A model of features of which most are combinations of others, to rounding."""
    rng = np.random.default_rng(0)
    n, atoms, r = 30, 4, 20
    labels = ForceLabels([rng.normal(size=(atoms, 3)) for _ in range(n)], np.full((n, 6), np.nan))
    Phi = rng.normal(size=(n * (1 + 3 * atoms), 4)) @ rng.normal(size=(4, r))
    settings = make_settings({"target": "e", "forces": "f", "noise": noise, "forces_noise": noise})
    energies = rng.normal(size=n)
    return Phi, energies, labels, np.arange(n), settings


def test_noises_that_are_lost_in_rounding_are_raised_and_that_is_said():
    given = degenerate(1e-18)
    with pytest.warns(QualmsWarning, match=r"forces_noise 1.0e-18\) are lost in rounding; all"):
        joint = fit_joint_model(*given)
    assert joint.noise.energies > 1e-18
    assert joint.noise.ratio == pytest.approx(1.0)
    with pytest.raises(NumericalError, match=r"larger ones: noise, forces_noise and stress_noise"):
        fit_joint_model(*degenerate(1e-40))


def test_members_raise_the_noise_of_the_full_model(monkeypatch):
    Phi, energies, labels, groups, settings = degenerate(1e-3)
    joint = fit_joint_model(Phi, energies, labels, groups, settings)
    counts = (np.random.default_rng(1).random((len(energies), 4)) < 0.5).astype(int)
    given = (joint, Phi, np.repeat(energies[:, None], 4, axis=1), counts)
    same, _ = solve_joint_members(*given, centered=True)
    assert same.noise == joint.noise
    solve = joint_solving.solve_members

    def fails_at_first(*args, **kwargs):
        if args[3].noise_variance < 5 * joint.full.process.noise_variance:
            raise NumericalError("lost")
        return solve(*args, **kwargs)

    monkeypatch.setattr(joint_solving, "solve_members", fails_at_first)
    with pytest.warns(QualmsWarning, match="raised by 1e"):
        raised, members = solve_joint_members(*given, centered=True)
    assert raised.noise.energies == pytest.approx(1e-2)
    expected = fit_joint_model(Phi, energies, labels, groups, degenerate(1e-2)[4])
    np.testing.assert_allclose(raised.full.weights, expected.full.weights, rtol=1e-6, atol=1e-9)
    assert np.isfinite(members.weights).all()
