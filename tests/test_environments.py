"""Features of many structures: streamed, kept or written to disk, and chosen from."""

import itertools

import numpy as np
import oracle
import pytest
from ase.build import molecule
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from threadpoolctl import threadpool_limits

from qualms.atomistic.kernel_rows import select_representatives
from qualms.atomistic.settings import make_settings
from qualms.features import soap as featurize
from qualms.features.hypers import Compression, make_soap
from qualms.features.soap import (
    KeptFeatures,
    Representation,
    SpilledFeatures,
    all_atoms,
    fit_representation,
    stop_workers,
    stream_features,
    structure_blocks,
)
from qualms.gp.kernels import PowerKernel, normalize_rows

SPECIES = (1, 6, 8)
NAMES = ["CH3CH2OH", "H2O", "CH4", "C2H6", "CH3OH", "C2H4", "H2CO", "CO2"]
seeds = st.integers(0, 2**32 - 1)


def some_molecules(n=24):
    frames = [molecule(NAMES[i % len(NAMES)]) for i in range(n)]
    for i, atoms in enumerate(frames):
        atoms.rattle(0.08, seed=i)
    return frames


def plain():
    return Representation(make_soap("organic", n_radial=3, l_max=2, compression=None), SPECIES)


# --- the stream ---


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("batch", [1, 20, 10_000])
def test_batches_are_all_structures_in_order(batch, n_workers):
    # Few environments: two workers make no processes here, but read ahead.
    frames = some_molecules()
    rng = np.random.default_rng(0)
    centers = [rng.permutation(len(a))[: rng.integers(0, len(a))] for a in frames]
    centers[-1] = centers[-1][:0]
    structures = zip(frames, centers, strict=True)
    batches = list(stream_features(plain(), structures, batch=batch, n_workers=n_workers))
    found = np.concatenate([b.features for b in batches])
    np.testing.assert_array_equal(found, plain().features(frames, centers))
    assert [b.first for b in batches] == np.cumsum([0, *(len(b.sizes) for b in batches)])[
        :-1
    ].tolist()
    np.testing.assert_array_equal(np.concatenate([b.sizes for b in batches]), [*map(len, centers)])
    for b in batches:
        assert b.offsets[-1] == len(b.features) < batch + max(map(len, frames))
        np.testing.assert_array_equal(np.diff(b.offsets), b.sizes)


def test_no_structures_and_no_centers():
    assert list(stream_features(plain(), iter([]))) == []
    nothing = np.arange(0)
    (only,) = stream_features(plain(), [(molecule("H2O"), nothing), (molecule("CH4"), nothing)])
    assert only.features.shape == (0, plain().n_features)
    assert only.sizes.tolist() == [0, 0]


@pytest.mark.parametrize("engine", ["dscribe", "featomic"])
@pytest.mark.parametrize("compressed", [False, True])
def test_processes_compute_the_same_to_the_last_bit(engine, compressed, monkeypatch):
    frames = some_molecules()
    centers = all_atoms(frames)
    soap = make_soap("organic", n_radial=3, l_max=2, engine=engine)
    compression = Compression(n_features=20) if compressed else None
    representation = fit_representation(soap, SPECIES, frames, centers, compression)

    def stream(n_workers):
        structures = zip(frames, centers, strict=True)
        return list(stream_features(representation, structures, batch=16, n_workers=n_workers))

    with threadpool_limits(1):  # as in the processes: products are rounded by thread
        serial = stream(1)
    monkeypatch.setattr(featurize, "SERIAL", 50)
    parallel = stream(2)
    assert [b.first for b in parallel] == [b.first for b in serial]
    for a, b in zip(serial, parallel, strict=True):
        np.testing.assert_array_equal(a.features, b.features)
        np.testing.assert_array_equal(a.sizes, b.sizes)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_file_is_read_no_further_than_needed(n_workers, monkeypatch):
    monkeypatch.setattr(featurize, "SERIAL", 50)
    read = 0

    def endless():
        nonlocal read
        for i in itertools.count():
            read += 1
            atoms = molecule(NAMES[i % len(NAMES)])
            yield atoms, np.arange(len(atoms))

    stream = stream_features(plain(), endless(), batch=10, n_workers=n_workers)
    ahead = [read]
    for _ in range(4):
        next(stream)
        ahead.append(read)
    stream.close()
    assert ahead[0] == 0
    # Batches have one to ten molecules; with processes five of them are in flight.
    assert ahead[1] <= (10 if n_workers == 1 else 60)
    assert ahead[4] <= ahead[1] + 30


@pytest.mark.slow
def test_a_consumer_that_stops_leaves_the_next_one_unharmed(monkeypatch):
    monkeypatch.setattr(featurize, "SERIAL", 50)
    frames = some_molecules()
    for stop in (lambda s: s.close(), lambda s: (list(s), stop_workers()), list):
        structures = zip(frames, all_atoms(frames), strict=True)
        stream = stream_features(plain(), structures, batch=16, n_workers=2)
        first = next(stream)
        stop(stream)
        n = len(first.sizes)
        expected = plain().features(frames[:n], all_atoms(frames[:n]))
        np.testing.assert_array_equal(first.features, expected)


# --- kept and spilled ---


def stored(table, directory):
    """The same rows in memory and on disk, appended in blocks of all sizes."""
    n, d = table.shape
    kept, spilled = KeptFeatures(n, d), SpilledFeatures(directory / "features", n, d)
    for begin, end in itertools.pairwise([0, 0, n // 3, n // 2, n // 2, n]):
        kept.append(table[begin:end])
        spilled.append(table[begin:end])
    return kept, spilled


@given(data=st.data())
def test_rows_from_disk_are_those_in_memory(data, tmp_path_factory):
    n, d = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    table = np.random.default_rng(n).normal(size=(n, d)).astype(np.float32)
    kept, spilled = stored(table, tmp_path_factory.mktemp("spill"))
    rows = data.draw(
        st.integers(0, n - 1)
        | st.slices(n)
        | hnp.arrays(np.intp, st.integers(0, 30), elements=st.integers(0, n - 1))
        | st.lists(st.integers(0, n - 1))
    )
    if isinstance(rows, list):
        rows = np.array(rows, dtype=np.int32)
    for features in (kept, spilled):
        found = features[rows]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, table[rows])
    assert spilled.shape == kept.shape == table.shape
    assert len(spilled) == len(kept) == n
    assert spilled.dtype == kept.dtype == table.dtype
    spilled.close()


def test_a_file_of_features_outlives_what_wrote_it(tmp_path):
    table = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    spilled = stored(table[:, ::-1], tmp_path)[1]  # not contiguous
    spilled.flush()
    spilled.close()
    spilled.close()
    np.testing.assert_array_equal(SpilledFeatures(tmp_path / "features", 30, 4)[:], table[:, ::-1])
    assert (tmp_path / "features").stat().st_size == 4 * table.size


def test_a_file_that_is_too_short_is_no_source_of_rows(tmp_path):
    spilled = stored(np.ones((30, 4), dtype=np.float32), tmp_path)[1]
    with (tmp_path / "features").open("rb+") as file:
        file.truncate(400)
    np.testing.assert_array_equal(spilled[:25], 1)
    for rows in (slice(None), 29, np.array([3, 26])):
        with pytest.raises(OSError, match="shorter"):
            spilled[rows]


# --- blocks of structures ---


@given(sizes=st.lists(st.integers(0, 12), max_size=40), size=st.integers(1, 30))
def test_blocks_are_whole_structures_all_of_them_and_no_larger_than_asked(sizes, size):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
    blocks = list(structure_blocks(offsets, size))
    covered = [s for first, last in blocks for s in range(first, last)]
    assert covered == list(range(len(sizes)))
    for first, last in blocks:
        assert last > first
        assert sum(sizes[first:last]) <= size or last == first + 1
    for (a, _), (_, d) in itertools.pairwise(blocks):
        assert sum(sizes[a:d]) > size  # two blocks that would fit into one are one


# --- representatives ---


def candidates(rng, n=400, d=12):
    """Non-negative features of unit length, and species of their centres, of which one is rare."""
    X = normalize_rows(rng.gamma(0.5, size=(n, d)).astype(np.float32))
    center_species = rng.choice(SPECIES, n, p=[0.7, 0.28, 0.02])
    center_species[:3] = SPECIES
    return X, center_species


def select(features, center_species, *, seed=0, **settings):
    chosen = make_settings({"target": "e", "n_representatives": 40, **settings})
    rng = np.random.default_rng(seed)
    return select_representatives(features, PowerKernel(2.0), center_species, chosen, rng)


@pytest.mark.parametrize("selection", ["fps", "cur", "random"])
@pytest.mark.parametrize("per_species", [False, True])
def test_choices_are_the_same_in_memory_and_on_disk(selection, per_species, tmp_path):
    X, center_species = candidates(np.random.default_rng(2))
    kept, spilled = stored(X, tmp_path)
    settings = {"selection": selection, "per_species": per_species}
    chosen = select(kept, center_species, **settings)
    assert len(set(chosen.tolist())) == len(chosen) == 40
    np.testing.assert_array_equal(select(spilled, center_species, **settings), chosen)


def test_farthest_points_of_all_and_of_each_species():
    X, center_species = candidates(np.random.default_rng(3))
    assert select(X, center_species).tolist() == oracle.farthest_points(X, 40)[0]
    chosen = select(X, center_species, per_species=True)
    for z in SPECIES:
        rows = np.flatnonzero(center_species == z)
        own = chosen[center_species[chosen] == z]
        expected = oracle.farthest_points(X[rows], len(own))[0]
        assert own.tolist() == rows[expected].tolist()


def test_cur_spans_more_than_chance_does():
    rng = np.random.default_rng(4)
    X, center_species = candidates(rng)
    K = PowerKernel(2.0)(X.astype(np.float64), X.astype(np.float64))

    def missed(chosen):
        K_M = K[np.ix_(chosen, chosen)]
        return np.trace(K - K[:, chosen] @ np.linalg.solve(K_M, K[chosen]))

    by_chance = [missed(select(X, center_species, selection="random", seed=s)) for s in range(10)]
    assert missed(select(X, center_species, selection="cur")) < min(by_chance)


def test_random_choices_follow_the_seed():
    X, center_species = candidates(np.random.default_rng(5))
    first, again, other = (
        select(X, center_species, selection="random", seed=s).tolist() for s in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 40


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    n=st.integers(1, 80),
    data=st.data(),
)
def test_species_share_all_representatives_and_each_has_one(counts, n, data):
    center_species = np.repeat(np.arange(1, len(counts) + 1), counts)
    center_species = center_species[data.draw(st.permutations(range(len(center_species))))]
    X = np.random.default_rng(6).normal(size=(len(center_species), 3)).astype(np.float32)
    settings = {"selection": "random", "per_species": True, "n_representatives": n}
    chosen = select(X, center_species, **settings)
    n = min(n, len(X))
    assert len(set(chosen.tolist())) == len(chosen) == n
    shares = np.bincount(center_species[chosen], minlength=len(counts) + 1)[1:]
    if n >= len(counts):
        assert shares.min() >= 1
        # In proportion, but for rounding and for what the rare ones got.
        exact = n * np.array(counts) / sum(counts)
        assert (shares - exact < 1).all()
        assert (exact - shares < 1 + np.maximum(1 - exact, 0).sum()).all()
    else:
        assert shares.max() == 1


@pytest.mark.parametrize("per_species", [False, True])
def test_more_representatives_than_environments_are_all_of_them(per_species):
    X, center_species = candidates(np.random.default_rng(7), n=30)
    chosen = select(X, center_species, n_representatives=1000, per_species=per_species)
    assert sorted(chosen.tolist()) == list(range(30))


@pytest.mark.parametrize("per_species", [False, True])
def test_progress_of_a_choice_ends_with_all(per_species):
    X, center_species = candidates(np.random.default_rng(8))
    settings = make_settings({"target": "e", "n_representatives": 40, "per_species": per_species})
    told = []
    rng = np.random.default_rng(0)
    select_representatives(X, PowerKernel(2.0), center_species, settings, rng, told.append)
    assert told == sorted(told)
    assert told[-1] == 40
