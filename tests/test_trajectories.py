"""Trajectories: recognised in order, and not among shuffled or independent structures."""

import logging

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.morse import MorsePotential
from ase.cluster import Octahedron
from ase.md.verlet import VelocityVerlet
from atomistic_fixtures import SMALL, labelled_molecules, make_model

from qualms.atomistic import FrameFiles, census
from qualms.atomistic.census import take_census
from qualms.atomistic.settings import make_settings
from qualms.atomistic.trajectories import find_blocks, pair_distances, series_of

CLUSTER = Octahedron("Cu", 3, 1)


def trajectory(atoms, n, seed=0, temperature=600, stride=4):
    """Frames of molecular dynamics with EMT, in the order of time, with energies and forces."""
    atoms = atoms.copy()
    scale = np.sqrt(atoms.get_masses() * units.kB * temperature)
    atoms.set_momenta(scale[:, None] * np.random.default_rng(seed).normal(size=(len(atoms), 3)))
    atoms.calc = EMT()
    md = VelocityVerlet(atoms, 2 * units.fs)
    md.run(50)
    frames = []
    for _ in range(n):
        md.run(stride)
        frames.append(atoms.copy())
        frames[-1].info["energy"] = atoms.get_potential_energy()
        frames[-1].arrays["forces"] = atoms.get_forces()
    return frames


@pytest.fixture(scope="module")
def cluster():
    """100 frames of a cluster."""
    return trajectory(CLUSTER, 100)


@pytest.fixture(scope="module")
def copper():
    """100 frames of a crystal."""
    return trajectory(bulk("Cu", cubic=True), 100)


def blocks_of(frames):
    """The blocks of frames."""
    return find_blocks([*map(series_of, frames)], np.array([*map(pair_distances, frames)]))


def shuffled(frames, seed):
    """The same frames in another order."""
    return [frames[i] for i in np.random.default_rng(seed).permutation(len(frames))]


@pytest.mark.parametrize("name", ["cluster", "copper"])
def test_trajectories_are_recognised_in_the_order_of_time_alone(request, name):
    """Of 50 orders of the frames, only that of time has a meaning."""
    frames = request.getfixturevalue(name)
    for some in (frames, frames[:40]):
        blocks = blocks_of(some)
        assert blocks.n_frames == len(some)
        assert 2 <= blocks.length <= len(some) / 9
        assert len(np.unique(blocks.groups)) >= 10
        # Blocks are consecutive.
        assert np.all(np.diff(blocks.groups) >= 0)
    assert sum(blocks_of(shuffled(frames, seed)).length > 1 for seed in range(50)) == 0


def test_independent_structures_are_no_trajectory():
    """Random structures, of one composition, of several sets and of all sizes, are independent."""
    rng, n_wrong = np.random.default_rng(0), 0
    for seed in range(100):
        n = int(rng.integers(2, 200))
        frames = [Atoms("OHHOH", rng.normal(size=(5, 3))) for _ in range(n)]
        for atoms in frames[n // 2 :]:  # another set follows
            atoms.positions *= 2.0 + seed % 3
        n_wrong += blocks_of(frames).length > 1
    assert n_wrong <= 1
    assert blocks_of(labelled_molecules(300)).length == 1
    assert blocks_of([Atoms("Cu", cell=[3] * 3, pbc=True)] * 100).length == 1


def test_short_series_are_tested_together():
    """Relaxations of many structures, each with too few frames to tell."""
    rng, frames = np.random.default_rng(0), []
    for size in range(3, 15):
        start, end = rng.normal(size=(2, size, 3))
        frames += [Atoms(f"H{size}", start + t * end) for t in np.linspace(0, 1, 6)]
    blocks = blocks_of(frames)
    assert blocks.n_frames == len(frames)
    series = np.repeat(np.arange(12), 6)
    for group in np.unique(blocks.groups):
        assert len(np.unique(series[blocks.groups == group])) == 1
    assert blocks_of(shuffled(frames, 0)).length == 1


def test_sets_of_other_config_types_are_left_alone(cluster):
    """A trajectory among independent frames of the same molecule."""
    others = shuffled(trajectory(CLUSTER, 60, seed=1), 0)
    frames = [atoms.copy() for atoms in [*others, *cluster]]
    for i, atoms in enumerate(frames):
        atoms.info["config_type"] = "md" if i >= 60 else "random"
    blocks = blocks_of(frames)
    assert blocks.n_frames == 100
    assert np.array_equal(blocks.groups[:60], np.arange(60))


@pytest.mark.parametrize("n_before", [0, 200, 400])
def test_trajectories_are_found_beside_shuffled_frames_of_the_same_molecule(cluster, n_before):
    """Files that nothing tells apart: four times as many frames without an order."""
    others = shuffled(trajectory(CLUSTER, 400, seed=1), 0)
    frames = [*others[:n_before], *cluster, *others[n_before:]]
    blocks = blocks_of(frames)
    size = np.bincount(blocks.groups)[blocks.groups]
    ordered = np.zeros(len(frames), dtype=bool)
    ordered[n_before : n_before + len(cluster)] = True
    assert np.mean(size[ordered] > 1) > 0.9
    assert np.mean(size[~ordered] > 1) < 0.1
    assert blocks_of(shuffled(frames, 1)).length == 1


def test_crossing_a_boundary_of_the_cell_is_no_jump(copper):
    """Distances are those of the nearest images: wrapped atoms are where they were."""
    wrapped = [atoms.copy() for atoms in copper]
    for atoms in wrapped:
        atoms.wrap()
    expected, found = ([pair_distances(atoms) for atoms in some] for some in (copper, wrapped))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_memory_files_and_workers_find_the_same_blocks(cluster, tmp_path, monkeypatch, caplog):
    """The census of parts is that of all structures, and a line names the blocks."""
    monkeypatch.setattr(census, "SCANNED", 17)
    ase.io.write(tmp_path / "a.xyz", cluster[:55])
    ase.io.write(tmp_path / "b.xyz", cluster[55:])
    files = FrameFiles.open([tmp_path / "a.xyz", tmp_path / "b.xyz"])
    settings = make_settings({"target": "energy", "forces": "forces"})
    frames = [*files]
    with caplog.at_level(logging.INFO, "qualms"):
        whole = take_census(frames, settings)
    assert "onsecutive frames" in caplog.text
    assert whole.block_length > 1
    parts = take_census(files, settings)
    assert np.array_equal(parts.data.groups, whole.data.groups)
    assert len(np.unique(take_census(frames, settings, None).data.groups)) == len(frames)
    for frame in frames:
        frame.info["run"] = "same"
    frames[0].info["run"] = "other"
    assert len(np.unique(take_census(frames, settings, "run").data.groups)) == 2


def diffusing_dimers(n, seed, tau=20):
    """A dimer whose atoms fluctuate with a correlation time of tau frames, and its energies."""
    rng, decay = np.random.default_rng(seed), np.exp(-1 / tau)
    r = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0], [2.8, 0, 0], [3.2, 0.8, 0]])
    x, frames = rng.normal(size=r.shape), []
    for _ in range(n):
        x = decay * x + np.sqrt(1 - decay**2) * rng.normal(size=r.shape)
        atoms = Atoms("OHHOH", r + 0.08 * x)
        atoms.calc = MorsePotential(r0=1.4, epsilon=0.5, rho0=3.0)
        energy, atoms.calc = atoms.get_potential_energy(), None
        atoms.info["energy"] = energy
        frames.append(atoms)
    return frames


def test_blocks_bring_out_of_bag_errors_closer_to_those_of_later_frames():
    """Without them, frames beside those that are left out make their errors small."""
    ratios = {None: [], "auto": []}
    for seed in range(3):
        frames = diffusing_dimers(200, seed)
        later = frames[110:]
        y = np.array([atoms.info["energy"] for atoms in later])
        for groups, of_groups in ratios.items():
            model = make_model(
                "energy", baseline="mean", representation=SMALL, n_representatives=100
            ).fit(frames[:100], groups=groups)
            error = np.sqrt(np.mean((y - model.predict(later).mean) ** 2)) / 5
            of_groups.append(error / model.record.quantities["energy"].rmse)
            assert (model.record.block_length > 1) == (groups == "auto")
    assert np.median(ratios["auto"]) < 0.6 * np.median(ratios[None])


def test_the_command_line_finds_trajectories_unless_it_is_told_not_to(tmp_path, monkeypatch):
    from test_cli import qualms

    monkeypatch.chdir(tmp_path)
    ase.io.write("data.xyz", diffusing_dimers(80, 0))
    lengths = []
    for options in ("", "--group-key none"):
        ended = qualms(
            "train data.xyz --target energy --baseline mean --cutoff 3 --representatives 30 "
            f"--threads 1 --json --force -o model.safetensors {options}"
        )
        lengths.append(ended.document["training"]["block_length"])
    assert lengths[0] > 1 == lengths[1]
    train = "train data.xyz --target energy --baseline mean --cutoff 3 --representatives 30"
    ended = qualms(f"{train} --threads 1 --force -o model.safetensors")
    assert "--group-key none" in ended.err
    ended = qualms(f"{train} --threads 1 --force -o model.safetensors --group-key None")
    assert "onsecutive frames" not in ended.err
