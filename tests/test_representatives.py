import numpy as np
import oracle
import pytest
import scipy.linalg
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.gp import representatives as farthest
from qualms.gp.kernels import PowerKernel, normalize_rows
from qualms.gp.representatives import cur, farthest_points, select_representatives

seeds = st.integers(0, 2**32 - 1)


def soap_like(rng, n_points, n_features, n_latent=6, dtype=np.float64):
    """Non-negative normalised rows in clusters, on a manifold of few dimensions."""
    centres = rng.normal(size=(8, n_latent))
    latent = centres[rng.integers(8, size=n_points)] + 0.3 * rng.normal(size=(n_points, n_latent))
    X = (latent @ rng.normal(size=(n_latent, n_features))) ** 2
    return (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(dtype)


def assert_textbook(picks, X, n, rtol=1e-7):
    indices, distances = oracle.farthest_points(X, n)
    assert picks.indices.tolist() == indices
    np.testing.assert_allclose(picks.distances, distances, rtol=rtol)


@pytest.fixture
def tiny_pools(monkeypatch):
    """Many levels, many rounds and many partial updates, on few points."""
    monkeypatch.setattr(farthest, "_POOL_FRACTION", 4)
    monkeypatch.setattr(farthest, "_LOOP_SIZE", 8)
    monkeypatch.setattr("qualms.arrays.BLOCK", 16)
    monkeypatch.setattr(farthest, "_PICKS", 5)


@pytest.mark.parametrize(("n_points", "n_features", "n"), [(1, 3, 1), (2, 1, 2), (60, 4, 60)])
def test_small_cases_are_the_textbook_loop(n_points, n_features, n):
    X = np.random.default_rng(0).normal(size=(n_points, n_features))
    picks = farthest_points(X, n)
    assert_textbook(picks, X, n)
    assert picks.distances[0] == np.inf
    assert picks.indices.dtype == np.intp


@pytest.mark.parametrize("kind", ["gaussian", "soap"])
def test_pools_give_the_textbook_picks(kind):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(3000, 20)) if kind == "gaussian" else soap_like(rng, 3000, 20)
    assert_textbook(farthest_points(X, 300), X, 300)


@pytest.mark.usefixtures("tiny_pools")
@settings(max_examples=25)
@given(
    seed=seeds,
    n_points=st.integers(1, 300),
    n_features=st.integers(1, 5),
    fraction=st.floats(0.01, 1),
    levels=st.integers(1, 6),
)
def test_integer_grids_break_ties_and_skip_duplicates_as_the_textbook_does(
    seed, n_points, n_features, fraction, levels
):
    # Integers make the arithmetic exact: ties are ties, and most rows are repeated.
    rng = np.random.default_rng(seed)
    X = rng.integers(0, levels, size=(n_points, n_features)).astype(rng.choice(["f4", "f8"]))
    n = max(1, int(fraction * n_points))
    assert_textbook(farthest_points(X, n), X, n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stops_when_only_duplicates_remain(dtype):
    X = np.tile(soap_like(np.random.default_rng(4), 100, 50, dtype=dtype), (20, 1))
    picks = farthest_points(X, len(X))
    assert sorted(picks.indices % 100) == list(range(100))
    assert (picks.distances > 0).all()


def test_rounding_of_the_features_counts_as_a_duplicate():
    X = soap_like(np.random.default_rng(5), 50, 30, dtype=np.float32)
    picks = farthest_points(np.concatenate([X, X * np.float32(1 + 2e-7)]), 100)
    assert len(picks.indices) == 50


def test_distances_far_below_the_norm_are_resolved():
    # |x|² + |c|² − 2 x·c has no correct digit here.
    rng = np.random.default_rng(6)
    X = (1000 + 0.1 * rng.normal(size=(1500, 3))).astype(np.float32)
    assert_textbook(farthest_points(X, 60), X, 60)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_of_the_features_does_not_choose_the_picks(dtype):
    """Pairs of equivalent atoms, of two elements whose features are orthogonal."""
    rng, eps = np.random.default_rng(7), np.finfo(dtype).eps
    X = soap_like(rng, 600, 40, dtype=dtype).repeat(2, axis=0)
    X[1::2] *= 1 + 40 * eps * rng.uniform(-1, 1, (600, 40)).astype(dtype)
    X = np.kron(np.eye(2, dtype=dtype), X)
    expected = farthest_points(X, 50).indices
    assert expected[1] == len(X) // 2
    for _ in range(5):
        rounded = X * (1 + eps * rng.uniform(-1, 1, X.shape).astype(dtype))
        np.testing.assert_array_equal(farthest_points(rounded, 50).indices, expected)


def test_picks_are_the_farthest_to_four_digits():
    X = soap_like(np.random.default_rng(8), 800, 30)
    indices, distances = farthest_points(X, 80)
    nearest = np.full(len(X), np.inf)
    for i in range(80):
        assert i == 0 or nearest[indices[i]] > nearest.max() * (1 - 2.0**-13)
        assert i == 0 or distances[i] ** 2 == pytest.approx(nearest[indices[i]], rel=2.0**-13)
        nearest = np.minimum(nearest, np.sum((X - X[indices[i]]) ** 2, axis=1))


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (25, 25)])
@pytest.mark.parametrize("seed", range(3))
def test_cur_in_a_fixed_space_picks_the_pivots_of_a_qr_factorisation(seed, shape):
    X = np.random.default_rng(seed).normal(size=shape) * np.geomspace(1, 1e-3, shape[1])
    n = min(shape) // 2
    U = np.linalg.svd(X)[0][:, :n]
    pivots = scipy.linalg.qr(U.T, pivoting=True)[2]
    np.testing.assert_array_equal(cur(X @ X.T, n), pivots[:n])


def test_cur_stops_when_the_rank_is_exhausted():
    rng = np.random.default_rng(23)
    X = rng.normal(size=(60, 4)) @ rng.normal(size=(4, 20))
    picks = cur(X @ X.T, 60)
    assert len(picks) == len(set(picks)) == 4
    residual = X - X @ np.linalg.pinv(X[picks]) @ X[picks]
    assert np.abs(residual).max() < 1e-9


@pytest.mark.parametrize("selection", ["fps", "cur", "random"])
def test_representatives_are_different_points(selection):
    rng = np.random.default_rng(3)
    X = normalize_rows(rng.gamma(0.5, size=(400, 12)).astype(np.float32))
    counts = []
    picks = select_representatives(X, 40, selection, PowerKernel(2.0), rng, counts.append)
    assert len(set(picks.tolist())) == len(picks) == 40
    assert counts == sorted(counts)
    if selection == "fps":
        assert picks.tolist() == oracle.farthest_points(X, 40)[0]
    few = select_representatives(X[:30], 40, selection, PowerKernel(2.0), rng)
    assert sorted(few.tolist()) == [*range(30)]


GOOD = np.arange(12.0).reshape(4, 3)
KERNEL = GOOD @ GOOD.T


@pytest.mark.parametrize(
    "X",
    [
        np.where(GOOD == 5, np.nan, GOOD),
        np.tile(np.where(GOOD == 5, np.inf, GOOD), (100, 1)),
        np.array([[1.0], [1e30]], dtype=np.float32),
        GOOD[0],
        GOOD[:0],
        GOOD[:, :0],
        np.array([["a"]]),
    ],
)
def test_bad_features(X):
    with rejects("X"):
        farthest_points(X, 1)


@pytest.mark.parametrize("K", [GOOD, np.full((3, 3), np.nan)])
def test_bad_kernels(K):
    with rejects("K"):
        cur(K, 1)


@pytest.mark.parametrize("select", [farthest_points, cur])
@pytest.mark.parametrize("n", [0, 5])
def test_bad_counts(select, n):
    with rejects("n"):
        select(KERNEL, n)
