"""A prediction depends on its structure alone: not on what else is predicted, nor on the machine.

Rounding differs with the shape of a matrix product, and so with the batch, the number of threads
and the processor; weights, which are large, amplify it. It must stay below any digit that matters:
a millionth of the uncertainty.
"""

import subprocess
import sys

import numpy as np
import pytest
from ase.build import molecule
from ase.io import write
from atomistic_fixtures import SMALL, labelled_by_emt, labelled_crystals, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from qualms import AtomisticModel, ProjectedProcessRegressor
from qualms.atomistic.model import stream_chunks

SMOOTH = {"cutoff": 4.0, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}
#: Of the standard deviation.
TOLERANCE = 1e-6


def assert_same(members, expected):
    """Members (n, R) differ by less than a millionth of the standard deviation (n,)."""
    difference = np.abs(members - expected.members).max(axis=-1)
    assert np.max(difference / expected.std) < TOLERANCE


def distorted(n, seed=0):
    rng = np.random.default_rng(seed)
    frames = []
    for name in ("CH3OH", "H2O", "CH4", "C2H6") * (n // 4):
        atoms = molecule(name)
        atoms.positions += 0.05 * rng.normal(size=atoms.positions.shape)
        atoms.center(vacuum=6.0)
        frames.append(labelled_by_emt(atoms))
    return frames


@pytest.fixture(scope="module", params=["plain", "compressed", "two scales", "featomic", "atomic"])
def case(request, molecules, energy_model, shift_model):
    """A trained model, and structures that it has not seen."""
    new = molecules[120:136]
    if request.param in ("plain", "atomic"):
        return energy_model if request.param == "plain" else shift_model, new
    representation = {
        "compressed": SMALL | {"compression": {"n_features": 100}},
        "two scales": {"scales": [SMALL, SMALL | {"cutoff": 2.5}]},
        "featomic": SMALL | {"engine": "featomic"},
    }[request.param]
    return make_model(representation=representation).fit(molecules[:80]), new


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(20, 300))
def test_batches_and_the_order_of_structures_and_atoms_change_nothing(case, seed, batch):
    model, frames = case
    rng = np.random.default_rng(seed)
    expected = model.predict(frames)
    by_structure = model.predict_atoms(frames)
    order = rng.permutation(len(frames))
    # Predictions of atoms come in the order of the structure.
    centers = model.target_atoms(frames) if model.settings.per_atom else None
    moved, places = [], []
    for i in order:
        atoms = frames[i].copy()
        new_order = rng.permutation(len(atoms))
        moved.append(atoms[new_order])
        if centers is not None:
            places.append([centers[i].tolist().index(a) for a in new_order if a in centers[i]])
    chunks = stream_chunks(model.fitted, iter(moved), batch=batch)
    found = np.concatenate([chunk.predict(chunk.rows()).members for chunk in chunks])
    if centers is None:
        assert_same(found, expected[order])
    else:
        wanted = [by_structure[i][p] for i, p in zip(order, places, strict=True)]
        assert_same(found, type(expected).concatenate(wanted))
    alone = int(order[0])
    (one,) = model.predict_atoms([frames[alone]])
    assert_same(one.members, by_structure[alone])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(case, threads, monkeypatch):
    model, frames = case
    expected = model.predict(frames)
    monkeypatch.setattr(model, "threads", threads)
    with threadpool_limits(limits=threads):
        found = model.predict(frames)
    assert_same(found.members, expected)


_SCRIPT = """
import sys, numpy as np
from ase.io import read
from qualms import AtomisticModel
model = AtomisticModel.load(sys.argv[1])
np.save(sys.argv[3], model.predict(read(sys.argv[2], ":")[::-1]).members[::-1])
"""


def test_another_process_predicts_the_same(molecules, energy_model, tmp_path, monkeypatch):
    """With OpenBLAS it even uses the instructions of another processor."""
    frames = molecules[120:140]
    files = [tmp_path / name for name in ("model.qualms", "new.traj", "found.npy")]
    energy_model.save(files[0])
    write(files[1], frames)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    subprocess.run([sys.executable, "-c", _SCRIPT, *map(str, files)], check=True)
    assert_same(np.load(files[2]), AtomisticModel.load(files[0]).predict(frames))


@pytest.fixture(scope="module")
def force_model():
    return make_model(
        "energy", forces="force", representation=SMOOTH, n_representatives=60, n_members=8
    ).fit(distorted(24))


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_forces_depend_on_their_structure_alone(force_model, seed):
    frames = distorted(8, seed=1)
    rng = np.random.default_rng(seed)
    expected = force_model.predict_forces(frames)
    edges = np.cumsum([0, *map(len, frames)])
    order = rng.permutation(len(frames))
    atoms_of = [rng.permutation(len(frames[i])) for i in order]
    moved = [frames[i][new] for i, new in zip(order, atoms_of, strict=True)]
    found = force_model.predict_forces(moved)
    places = np.concatenate([edges[i] + new for i, new in zip(order, atoms_of, strict=True)])
    assert_same(found.energy.members, expected.energy[order])
    assert_same(found.forces.members, expected.forces[places])
    assert_same(force_model.predict(moved).members, force_model.predict(frames)[order])
    # Energies that come with forces are those that come without.
    assert_same(force_model.predict(frames).members, expected.energy)
    with threadpool_limits(limits=2):
        one = force_model.predict_forces(frames[:1])
    assert_same(one.energy.members, expected.energy[:1])
    assert_same(one.forces.members, expected.forces[: edges[1]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_estimators_predict_a_row_alone_as_in_a_batch(dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 10)).astype(dtype)
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
    model = ProjectedProcessRegressor(n_representatives=100, random_state=0).fit(X[:200], y[:200])
    new = X[200:]
    expected = model.predict_ensemble(new)
    alone = np.concatenate([model.predict_ensemble(row[None]).members for row in new])
    assert_same(alone, expected)
    std = np.concatenate([model.pp_std(row[None]) for row in new])
    np.testing.assert_allclose(std, model.pp_std(new), rtol=TOLERANCE)


def test_twice_the_cell_is_twice_the_energy():
    crystals = labelled_crystals(30)
    for atoms in crystals:
        atoms.info["per_atom"] = atoms.info["energy"] / len(atoms)
    new = crystals[25:]
    doubled = [atoms * (1, 2, 1) for atoms in new]
    for target, kind, factor in (("energy", "extensive", 2), ("per_atom", "intensive", 1)):
        model = make_model(target, kind).fit(crystals[:25])
        assert_same(model.predict(doubled).members, model.predict(new) * factor)
        std = model.predict_pp(doubled)[1], factor * model.predict_pp(new)[1]
        np.testing.assert_allclose(*std, rtol=TOLERANCE)
        truths = np.array([atoms.info[target] for atoms in new])
        assert np.std(model.predict(new).mean - truths) < 0.5 * np.std(truths)
