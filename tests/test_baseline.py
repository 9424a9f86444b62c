"""Baselines against a slow loop, and the rows that members need to determine them."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from atomistic_fixtures import make_model
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms import AtomisticModel
from qualms.atomistic.baseline import anchors, atom_design, fit_baseline, spans, structure_design
from qualms.errors import QualmsWarning
from qualms.gp.ensemble import draw_members

SPECIES = [1, 6, 7, 8]


def fractions(rng, n, n_species):
    """Rows of molecules, the last species in very few of them."""
    counts = rng.integers(0, 5, (n, n_species)).astype(float)
    counts[:, 0] += 1
    if n_species > 1:
        counts[:, -1] = np.arange(n) < max(1, n // 20)
    return counts / counts.sum(axis=1, keepdims=True)


def members_of(rng, n, n_members, *, bootstrap=False):
    return draw_members(n, n_members, 0.5, rng, replace=bootstrap)


def fit(baseline, X, y, counts, *, kind="extensive", isolated=None):
    species = [1, 6, 7, 8, 9, 14][: X.shape[1]]
    how = {"species": species, "kind": kind, "isolated": isolated or {}}
    return fit_baseline(baseline, X, y, counts=counts, **how)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(4, 60),
    n_species=st.integers(1, 6),
    bootstrap=st.booleans(),
    offset=st.sampled_from([0.0, -2000.0]),
)
def test_members_equal_a_slow_loop(seed, n, n_species, bootstrap, offset):
    rng = np.random.default_rng(seed)
    X = fractions(rng, n, n_species)
    y = offset + X @ rng.normal(size=n_species) * 10 + rng.normal(size=n)
    counts = members_of(rng, n, 5, bootstrap=bootstrap)
    baseline = fit("composition", X, y, counts)
    fitted = [baseline.full, *baseline.members.T]
    for found, weights in zip(fitted, [np.ones(n, int), *counts.T], strict=True):
        rows = np.repeat(np.arange(n), weights)  # every row as often as it counts
        mean = y[rows].mean()
        expected = mean + np.linalg.lstsq(X[rows], y[rows] - mean, rcond=1e-9)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_none_and_mean():
    rng = np.random.default_rng(2)
    X, y = fractions(rng, 30, 3), rng.normal(size=30) + 1e6
    counts = members_of(rng, 30, 4, bootstrap=True)
    nothing = fit("none", X, y, counts)
    assert nothing.members.shape == (3, 4)
    assert not nothing.predict_members(X).any()
    mean = fit("mean", X, y, counts)
    np.testing.assert_allclose(mean.predict(X), y.mean(), rtol=1e-14)
    expected = np.tile(counts.T @ y / counts.sum(axis=0), (3, 1))
    np.testing.assert_allclose(mean.members, expected, rtol=1e-14)


def test_energies_of_isolated_atoms():
    X = structure_design([molecule("NH3"), molecule("CH4")], [1, 6, 7])
    energies = {7: -432.0, 1: -13.6, 6: -1030.0, 9: 7.0}
    counts = np.ones((2, 3), dtype=int)
    for given_, isolated in ((energies, None), ("atoms", energies)):
        baseline = fit(given_, X, np.zeros(2), counts, isolated=isolated)
        assert baseline.name == "atoms"
        assert baseline.full.tolist() == [-13.6, -1030.0, -432.0]
        assert (baseline.members == baseline.full[:, None]).all()
        assert baseline.predict(X) * [4, 5] == pytest.approx([3 * -13.6 - 432, 4 * -13.6 - 1030])


@pytest.mark.parametrize(
    ("baseline", "isolated", "kind"),
    [
        ("atoms", {}, "extensive"),
        ("atoms", {1: 0.5}, "extensive"),
        ({1: 1.0}, None, "extensive"),
        ({1: 1.0, 6: 2.0}, None, "intensive"),
        ("atoms", {1: 1.0, 6: 2.0}, "atomic"),
    ],
)
def test_energies_that_are_missing_or_make_no_sense(baseline, isolated, kind):
    with rejects("baseline"):
        X, counts = np.array([[0.5, 0.5], [0.8, 0.2]]), np.ones((2, 0), int)
        fit(baseline, X, np.ones(2), counts, isolated=isolated, kind=kind)


def test_designs():
    frames = [molecule("H2O"), molecule("CH4"), Atoms("O")]
    X = structure_design(frames, SPECIES)
    np.testing.assert_allclose(X, [[2 / 3, 0, 0, 1 / 3], [0.8, 0.2, 0, 0], [0, 0, 0, 1]])
    assert atom_design(np.array([8, 1, 6]), SPECIES).argmax(axis=1).tolist() == [3, 0, 1]
    with rejects("numbers"):
        atom_design(np.array([1, 9]), SPECIES)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(3, 60), st.integers(1, 6))
def test_anchors_make_every_member_span_all_compositions(seed, n, n_species):
    rng = np.random.default_rng(seed)
    X = fractions(rng, n, n_species)
    few = anchors(X)
    assert len(few) == np.linalg.matrix_rank(X, tol=1e-7) <= n_species
    counts = members_of(rng, n, 6)
    complete = spans(X, counts)
    for i in range(6):
        rows = X[counts[:, i] > 0]
        assert complete[i] == (np.linalg.matrix_rank(rows, tol=1e-7) == len(few))
    counts[few] = 1
    assert spans(X, counts).all()
    # A linear target is then reproduced by every member.
    y = X @ rng.normal(size=n_species)
    predicted = fit("composition", X, y, counts).predict_members(X)
    np.testing.assert_allclose(predicted, np.tile(y[:, None], 6), atol=1e-9)


def rattled(name, n, rng):
    """Copies of a molecule, displaced; the energy of each atom depends on its element alone."""
    frames = [molecule(name) for _ in range(n)]
    for atoms in frames:
        atoms.rattle(0.05, rng=rng)
        atoms.info["energy"] = -100.0 * atoms.numbers.sum() + 0.1 * rng.normal()
    return frames


def test_compositions_outside_the_span_of_the_training_set_are_rejected(tmp_path):
    rng = np.random.default_rng(0)
    frames, ethanol = rattled("CH3OH", 15, rng), molecule("CH3CH2OH")
    twice = molecule("CH3OH")
    twice.extend(Atoms(twice.numbers, twice.positions + 20))
    with pytest.warns(QualmsWarning, match="compositions"):
        model = make_model("energy", n_representatives=20, calibration="student").fit(frames)
    model.save(tmp_path / "model")
    for one in (model, AtomisticModel.load(tmp_path / "model")):
        assert one.predict([twice]).mean[0] == pytest.approx(2 * -1800, abs=5)
        with rejects("frames"):
            one.predict([twice, ethanol])
        assert one.predict([ethanol, frames[0]], unknown_species="ignore").extrapolates[0]
    others = rattled("CH4", 3, rng) + rattled("H2O", 3, rng)
    model = make_model("energy", n_representatives=20, calibration="student").fit(frames + others)
    assert model.predict([ethanol]).mean[0] == pytest.approx(-2600, abs=5)  # warnings are errors


def test_isolated_atoms_are_used_if_compositions_do_not_determine_the_baseline():
    frames = rattled("CH3OH", 15, np.random.default_rng(0))
    alone = [
        Atoms([z], info={"energy": -100.0 * z, "config_type": "isolated_atom"}) for z in (1, 6, 8)
    ]
    model = make_model("energy", n_representatives=20, calibration="student").fit(frames + alone)
    assert model.fitted.baseline.name == "atoms"
    assert model.predict([molecule("CH3CH2OH")]).mean[0] == pytest.approx(-2600, abs=5)
