import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.errors import InputError
from qualms.gp.ensemble import draw_members, membership_counts

pytest.importorskip("ase")

from ase import Atoms
from ase.build import molecule

from qualms.atomistic.baseline import (
    BASELINES,
    anchors,
    atom_design,
    fit_baseline,
    spans,
    structure_design,
)

SPECIES = [1, 6, 7, 8]


def fractions(rng, n, n_species, *, rare=True):
    """Rows of molecules of up to 20 atoms, the last species in very few of them."""
    counts = rng.integers(0, 5, (n, n_species)).astype(float)
    counts[:, 0] += 1
    if rare and n_species > 1:
        counts[:, -1] = 0
        counts[: max(1, n // 20), -1] = 1
    return counts / counts.sum(axis=1, keepdims=True)


def members_of(rng, n, n_members, *, bootstrap=False):
    return membership_counts(draw_members(n, n_members, 0.5, rng, replace=bootstrap), n)


def oracle(X, y, weights):
    """Least squares with every row written down as often as it counts."""
    rows = np.repeat(np.arange(len(y)), weights)
    mean = y[rows].mean()
    return mean + np.linalg.lstsq(X[rows], y[rows] - mean, rcond=1e-9)[0]


def fit(baseline, X, y, counts=None, *, kind="extensive", isolated=None, species=None):
    species = list(range(1, X.shape[1] + 1)) if species is None else species
    return fit_baseline(
        baseline, X, y, species=species, kind=kind, counts=counts, isolated=isolated
    )


@given(
    st.integers(0, 10**6),
    st.integers(4, 60),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0.0, 1.0, -2000.0]),
)
def test_members_equal_a_slow_loop(seed, n, n_species, bootstrap, offset):
    rng = np.random.default_rng(seed)
    X = fractions(rng, n, n_species)
    y = offset + X @ rng.normal(size=n_species) * 10 + rng.normal(size=n)
    counts = members_of(rng, n, 5, bootstrap=bootstrap)
    baseline = fit("composition", X, y, counts)
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(baseline.full, oracle(X, y, np.ones(n, int)), **tolerance)
    for i in range(5):
        np.testing.assert_allclose(baseline.members[:, i], oracle(X, y, counts[:, i]), **tolerance)


def test_a_member_is_what_its_rows_alone_give():
    rng = np.random.default_rng(0)
    X, y = fractions(rng, 40, 4, rare=False), rng.normal(size=40)
    counts = members_of(rng, 40, 3)
    for name in ("mean", "composition"):
        together = fit(name, X, y, counts)
        for i in range(3):
            rows = np.flatnonzero(counts[:, i])
            alone = fit(name, X[rows], y[rows])
            np.testing.assert_allclose(together.members[:, i], alone.full, rtol=1e-10, atol=1e-12)


def test_what_is_linear_is_found():
    rng = np.random.default_rng(1)
    X, energies = fractions(rng, 200, 4), np.array([-13.6, -1030.0, -1485.0, -2042.0])
    baseline = fit("composition", X, X @ energies, members_of(rng, 200, 8))
    np.testing.assert_allclose(baseline.full, energies, rtol=1e-11)
    np.testing.assert_allclose(baseline.predict(X), X @ energies, rtol=1e-12)
    assert baseline.predict_members(X).shape == (200, 8)


def test_none_and_mean():
    rng = np.random.default_rng(2)
    X, y = fractions(rng, 30, 3), rng.normal(size=30) + 1e6
    counts = members_of(rng, 30, 4, bootstrap=True)
    nothing = fit("none", X, y, counts)
    assert not nothing.full.any()
    assert nothing.members.shape == (3, 4)
    assert not nothing.predict_members(X).any()
    mean = fit("mean", X, y, counts)
    np.testing.assert_allclose(mean.full, y.mean(), rtol=1e-15)
    np.testing.assert_allclose(
        mean.members, np.tile(counts.T @ y / counts.sum(axis=0), (3, 1)), rtol=1e-14
    )
    np.testing.assert_allclose(mean.predict(X), y.mean(), rtol=1e-14)


@pytest.mark.parametrize("name", BASELINES)
def test_without_members(name):
    X = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    baseline = fit(name, X, np.array([1.0, 2.0, 4.0]), isolated={1: 0.5, 2: 0.7})
    assert baseline.name == name
    assert baseline.species == (1, 2)
    assert baseline.full.shape == (2,)
    assert baseline.members.shape == (2, 0)


def test_one_composition_for_all_gives_the_mean():
    rng = np.random.default_rng(3)
    X, y = np.tile([2 / 3, 1 / 3, 0.0], (20, 1)), rng.normal(size=20) - 500
    baseline = fit("composition", X, y, members_of(rng, 20, 3))
    np.testing.assert_allclose(baseline.full, y.mean(), rtol=1e-13)
    np.testing.assert_allclose(baseline.members, np.tile(baseline.members[:1], (3, 1)), rtol=1e-13)
    # Of what was never seen nothing is known but the mean.
    np.testing.assert_allclose(baseline.predict(np.eye(3)), y.mean(), rtol=1e-13)


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 7))
def test_species_in_a_fixed_ratio_share_their_deviation(seed, p, q):
    rng = np.random.default_rng(seed)
    formula_units = rng.integers(1, 9, 12)
    atoms = np.column_stack([p * formula_units, q * formula_units, rng.integers(0, 9, 12)])
    X = atoms / atoms.sum(axis=1, keepdims=True)
    y = X @ [1.0, -2.0, 30.0] - 1000.0
    baseline = fit("composition", X, y)
    np.testing.assert_allclose(baseline.predict(X), y, rtol=1e-9)
    if np.linalg.matrix_rank(X, tol=1e-6) == 2:
        deviations = baseline.full - y.mean()
        assert deviations[0] * q == pytest.approx(deviations[1] * p, rel=1e-6, abs=1e-6)


def test_constants_only_move_coefficients():
    rng = np.random.default_rng(4)
    X, y = fractions(rng, 50, 4), rng.normal(size=50)
    counts = members_of(rng, 50, 5)
    for name in ("mean", "composition"):
        here, there = fit(name, X, y, counts), fit(name, X, y + 1e4, counts)
        np.testing.assert_allclose(there.members, here.members + 1e4, rtol=1e-12)


def test_given_energies_of_atoms():
    X = structure_design([molecule("H2O"), molecule("CH4")], [1, 6, 8])
    counts = np.ones((2, 3), dtype=int)
    given_energies = {"O": -432.0, 1: -13.6, np.int64(6): -1030, "F": 7.0}
    baseline = fit(given_energies, X, np.zeros(2), counts, species=[1, 6, 8])
    assert baseline.name == "atoms"
    assert baseline.full.tolist() == [-13.6, -1030.0, -432.0]
    assert (baseline.members == baseline.full[:, None]).all()
    total = baseline.predict(X) * [3, 5]
    assert total == pytest.approx([2 * -13.6 - 432, 4 * -13.6 - 1030])


def test_energies_of_atoms_found_in_the_data():
    X = np.array([[0.5, 0.5], [0.2, 0.8]])
    baseline = fit("atoms", X, np.zeros(2), isolated={1: -0.5, 8: -75.0, 6: 0.0}, species=[1, 8])
    assert baseline.full.tolist() == [-0.5, -75.0]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"baseline": "linear"}, "'none', 'mean', 'atoms', 'composition'"),
        ({"baseline": None}, "or a mapping"),
        ({"baseline": "atoms"}, "none for H, C.*Give them as a mapping"),
        ({"baseline": "atoms", "isolated": {1: 0.5}}, "none for C"),
        ({"baseline": {"H": 1.0}}, "energies of H.*none for C"),
        ({"baseline": {"H": 1.0, "Cc": 1.0}}, "'Cc'.*symbols of elements"),
        ({"baseline": {"H": 1.0, 0: 1.0}}, "symbols of elements"),
        ({"baseline": {"H": 1.0, 6.5: 1.0}}, "symbols of elements"),
        ({"baseline": {"H": "1.0", "C": 2.0}}, r"baseline\['H'\]='1.0'.*finite number"),
        ({"baseline": {"H": np.nan, "C": 2.0}}, "finite number"),
        ({"baseline": {"H": 1.0, "C": 2.0}, "kind": "intensive"}, "only make sense for"),
        ({"baseline": "atoms", "kind": "atomic"}, "only make sense for kind='extensive'"),
        ({"kind": "total"}, "kind='total'"),
        ({"y": np.array([1.0, np.nan])}, "y=1 NaN"),
        ({"y": np.ones(3)}, "design"),
        ({"y": np.ones((2, 2))}, "y=shape"),
        ({"y": 1.0}, "y=shape"),
        ({"y": np.array([])}, "at least one"),
        ({"X": np.ones((2, 2))}, "sum to one"),
        ({"X": np.array([[2.0, -1.0], [0.5, 0.5]])}, "fractions"),
        ({"X": np.full((2, 2), np.nan)}, "design=4 NaN"),
        ({"counts": np.ones(2)}, r"counts=shape \(2,\)"),
        ({"counts": np.ones((3, 2))}, r"counts=shape \(3, 2\)"),
        ({"counts": -np.ones((2, 2))}, "counts=negative"),
        ({"counts": np.array([[1, 0], [1, 0]])}, "member 1 without rows"),
    ],
)
def test_bad_input(kwargs, match):
    arguments = {
        "baseline": "composition",
        "X": np.array([[0.5, 0.5], [0.8, 0.2]]),
        "y": np.array([1.0, 2.0]),
        "species": [1, 6],
        **kwargs,
    }
    with pytest.raises(InputError, match=match) as caught:
        fit(**arguments)
    assert "\n" not in str(caught.value)


def test_designs():
    frames = [molecule("H2O"), molecule("CH4"), Atoms("O")]
    X = structure_design(frames, SPECIES)
    np.testing.assert_allclose(X, [[2 / 3, 0, 0, 1 / 3], [0.8, 0.2, 0, 0], [0, 0, 0, 1]])
    assert atom_design(np.array([8, 1, 6]), SPECIES).argmax(axis=1).tolist() == [3, 0, 1]
    assert (atom_design(np.array([8, 1, 6]), SPECIES).sum(axis=1) == 1).all()
    with pytest.raises(InputError, match=r"numbers=F cannot.*only H, C, N, O"):
        atom_design(np.array([1, 9]), SPECIES)


def test_species_of_atoms_have_their_own_means():
    rng = np.random.default_rng(5)
    numbers = rng.choice([1, 6], 40)
    y = rng.normal(size=40) + 100 * numbers
    baseline = fit("composition", atom_design(numbers, [1, 6]), y, kind="atomic")
    expected = [y[numbers == 1].mean(), y[numbers == 6].mean()]
    np.testing.assert_allclose(baseline.full, expected, rtol=1e-13)


@given(st.integers(0, 10**6), st.integers(3, 60), st.integers(1, 6))
def test_anchors_make_every_member_span_all_compositions(seed, n, n_species):
    rng = np.random.default_rng(seed)
    X = fractions(rng, n, n_species)
    few = anchors(X)
    assert len(few) == np.linalg.matrix_rank(X, tol=1e-7) <= n_species
    assert len(set(few.tolist())) == len(few)
    counts = members_of(rng, n, 6)
    complete = spans(X, counts)
    for i in range(6):
        rows = X[counts[:, i] > 0]
        assert complete[i] == (np.linalg.matrix_rank(rows, tol=1e-7) == len(few))
    counts[few] = 1
    assert spans(X, counts).all()
    # A target that is linear is then reproduced by every member.
    y = X @ rng.normal(size=n_species)
    predicted = fit("composition", X, y, counts).predict_members(X)
    np.testing.assert_allclose(predicted, np.tile(y[:, None], 6), atol=1e-9)


def test_without_its_anchor_a_rare_species_is_lost():
    X = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]] * 20 + [[0.5, 0.3, 0.2], [0.5, 0.0, 0.5]])
    y = X @ [1.0, 2.0, 50.0]
    assert 41 in anchors(X)  # the row that is richest in the rare species
    counts = np.ones((42, 2), dtype=int)
    counts[40:, 0] = 0
    assert spans(X, counts).tolist() == [False, True]
    baseline = fit("composition", X, y, counts)
    assert np.isfinite(baseline.members).all()
    assert baseline.members[2] == pytest.approx([1.5, 50.0])  # the mean of what was seen; the truth


def test_anchors_and_spans_of_the_simplest_designs():
    assert anchors(np.tile([0.5, 0.5], (9, 1))).shape == (1,)
    assert anchors(np.ones((1, 1))).tolist() == [0]
    assert spans(np.ones((3, 1)), np.array([[1, 0], [0, 0], [0, 0]])).tolist() == [True, False]
