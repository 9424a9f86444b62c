"""Parts of the structures: the same model, whatever the parts and the workers."""

import os
import signal
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import (
    ENERGY,
    SMOOTH,
    copies,
    labelled_dimers,
    make_force_model,
    make_model,
    problem_of,
    rows_of,
    set_constant,
)
from checks import rejects
from hypothesis import given
from hypothesis import strategies as st

from qualms.atomistic import FrameFiles, training
from qualms.atomistic.census import take_census
from qualms.errors import InputError, QualmsWarning
from qualms.execution import Workers
from qualms.gp.representatives import farthest_points

#: Parts and blocks so small that there are several of each.
FEW = {"SCANNED": 13, "ROWS": 40, "CHUNK": 11}


@pytest.fixture
def small_parts(monkeypatch):
    for name, value in FEW.items():
        set_constant(monkeypatch, name, value)


def written(path, frames):
    ase.io.write(path, frames, format="extxyz")
    return path


# --- the same model as in memory ---


def same(a, b, frames, forces=False):
    """Two models agree to rounding."""
    one, other = a.predict(frames), b.predict(frames)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-4 * one.std.min())
    np.testing.assert_allclose(one.std, other.std, rtol=1e-3)
    np.testing.assert_array_equal(a.fitted.origins, b.fitted.origins)
    if forces:
        one, other = (m.predict(frames, stress=True, forces=True) for m in (a, b))
        for name in ("forces", "stress"):
            f, g = getattr(one, name), getattr(other, name)
            np.testing.assert_allclose(f.mean, g.mean, atol=1e-4 * np.abs(f.mean).max())
            np.testing.assert_allclose(f.std, g.std, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", ["energies", "members", "atoms", "single atoms", "forces"])
def test_the_model_does_not_depend_on_the_number_of_parts(
    kind, monkeypatch, molecules, alloys, tmp_path
):
    """Structures in memory, and in files that are read in many parts."""
    frames, new = copies(molecules[:80]), molecules[80:100]
    model = lambda: make_model(uncertainty="posterior", units="eV")  # noqa: E731
    if kind == "members":
        model = lambda: make_model(noise=1e-4)  # noqa: E731
    elif "atoms" in kind:
        frames = frames[:40]
        for i in (3, 17):  # some without labels
            del frames[i].arrays["shift"]
        resample = {"resample": "atoms", "noise": 1e-3} if kind == "single atoms" else {}
        given = {"species": "H", "n_representatives": 60, **resample}
        model = lambda: make_model("shift", "atomic", **given)  # noqa: E731
    elif kind == "forces":
        frames, new = copies(alloys[:24]), alloys[24:30]
        del frames[5].arrays["force"], frames[6].info["virtual"]
        given = {"noise": 1e-4, "forces_noise": 1e-2, "stress_noise": 1e-3, "stress": "virtual"}
        model = lambda: make_force_model(n_members=16, **given)  # noqa: E731
    ase.io.write(tmp_path / "train.xyz", frames, columns=None)
    whole = model().fit(frames)
    for name, value in FEW.items():
        set_constant(monkeypatch, name, value)
    files = model().fit(FrameFiles.open([tmp_path / "train.xyz"]))
    same(whole, files, new, forces=kind == "forces")
    assert whole.fitted.training_novelty == pytest.approx(files.fitted.training_novelty, rel=1e-4)
    for name in ("n_structures", "n_environments", "effective_rank", "n_duplicates"):
        assert getattr(whole.record, name) == getattr(files.record, name)
    for name, of in whole.record.quantities.items():
        other = files.record.quantities[name]
        assert (of.n_rows, of.n_without) == (other.n_rows, other.n_without)
        np.testing.assert_array_equal(
            whole.out_of_bag[name].structure, files.out_of_bag[name].structure
        )


def test_digests_do_not_depend_on_parts(molecules, monkeypatch):
    whole = take_census(molecules[:60], make_model().settings)
    with ThreadPoolExecutor(1) as executor:
        set_constant(monkeypatch, "SCANNED", 7)
        some = take_census(molecules[:60], make_model().settings, workers=Workers(executor))
    assert whole.digest == some.digest
    np.testing.assert_array_equal(whole.data.y, some.data.y)


def test_duplicates_and_groups_of_parts(small_parts, molecules, tmp_path):
    frames = [*copies(molecules[:60]), *copies(molecules[:4])]
    for i, atoms in enumerate(frames):
        atoms.info["run"] = f"run {i // 3}"
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    with pytest.warns(QualmsWarning, match="duplicates"):
        census = take_census(files, make_model().settings, "run")
    groups = census.data.groups
    assert census.n_duplicates == 4
    assert groups[0] == groups[2] == groups[60] != groups[3]
    assert census.data.copies[0] == census.data.copies[60]


def test_isolated_atoms_of_parts_must_agree(small_parts, molecules, tmp_path):
    atoms = [Atoms("H", info={ENERGY: e, "config_type": "isolated_atom"}) for e in (-13.6, -13.5)]
    frames = [atoms[0], *copies(molecules[:30]), atoms[1]]
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    with rejects("frames"):
        take_census(files, make_model().settings)


@given(st.integers(0, 1000), st.integers(2, 12), st.integers(1, 5))
def test_representatives_of_parts_cover_all_environments(seed, M, n_parts):
    """Within four times the optimal radius, and the optimum is at least half of the plain one."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(6, 3))
    X = (centers[rng.integers(6, size=80)] + 0.2 * rng.normal(size=(80, 3))).astype(np.float32)
    picks = []
    for some in np.array_split(np.arange(len(X)), n_parts):
        picks.append(some[farthest_points(X[some], min(M, len(some))).indices])
    candidates = np.concatenate(picks)
    chosen = X[candidates[farthest_points(X[candidates], M).indices]]
    plain = X[farthest_points(X, M).indices]

    def radius(points):
        return np.sqrt(((X[:, None] - points) ** 2).sum(-1)).min(axis=1).max()

    assert radius(chosen) <= 4 * radius(plain) + 1e-5


# --- files and workers ---


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    )
    with cluster, distributed.Client(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as found:
        yield found


def cases(molecules, alloys):
    energies = make_model(n_representatives=40), molecules[:60], molecules[60:80]
    shifts = make_model("shift", "atomic", species="H", n_representatives=30)
    forces = make_force_model(n_representatives=30, stress="virtual", calibration="student")
    return {
        "energies": energies,
        "atoms": (shifts, molecules[:30], molecules[30:40]),
        "forces": (forces, alloys[:20], alloys[20:26]),
    }


@pytest.mark.parametrize("name", ["energies", "atoms", "forces"])
def test_workers_train_the_same_model(client, pool, molecules, alloys, name, tmp_path):
    model, train, test = cases(molecules, alloys)[name]
    files = FrameFiles.open([written(tmp_path / "train.xyz", train)])
    expected = model.fit(files).predict(test)
    for executor in (pool, client):
        found = model.fit(files, executor=executor).predict(test)
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9 * expected.std.min())
        # A minimum of the likelihood is known to the square root of the rounding of its value.
        np.testing.assert_allclose(found.std, expected.std, rtol=1e-6)


def test_a_worker_is_killed(client, molecules, tmp_path):
    files = FrameFiles.open([written(tmp_path / "train.xyz", molecules[:150])])
    expected = make_model().fit(files).predict(molecules[150:])
    victim = next(iter(client.run(os.getpid).values()))

    def kill():
        while not any(client.processing().values()):
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = make_model().fit(files, executor=client).predict(molecules[150:])
    thread.join()
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9 * expected.std.min())
    client.wait_for_workers(2, timeout=60)
    assert victim not in client.run(os.getpid).values()


def test_more_workers_than_structures(client, molecules, tmp_path):
    files = FrameFiles.open([written(tmp_path / "few.xyz", molecules[:12])])
    model = make_model(n_representatives=20, calibration="student").fit(files, executor=client)
    assert model.record.n_structures == 12


# --- bad input ---


def test_parts_without_labels(small_parts, molecules, tmp_path):
    frames = copies(molecules[:60])
    for atoms in frames[13:39]:  # two parts
        del atoms.info[ENERGY]
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    assert make_model(n_representatives=40).fit(files).record.n_structures == 34


def test_no_labels_at_all(molecules, tmp_path):
    files = FrameFiles.open([written(tmp_path / "train.xyz", molecules[:20])])
    with rejects("key"):
        make_model("nothing").fit(files)
    with rejects("forces"):
        make_model(forces="nothing", representation=SMOOTH).fit(files)


def test_a_structure_that_cannot_be_used(small_parts, molecules, tmp_path):
    frames = copies(molecules[:40])
    frames[31].positions[1] = frames[31].positions[0]
    first = written(tmp_path / "first.xyz", frames[:10])
    second = written(tmp_path / "second.xyz", frames[10:])
    with pytest.raises(InputError) as error:
        make_model().fit(FrameFiles.open([first, second]))
    assert error.value.parameter.startswith("frames[31]")
    assert "second.xyz" in error.value.parameter
    assert "frame 21" in error.value.parameter


@pytest.mark.parametrize("line", [b"C nothing 0 0", b"C \xff\xfe 0 0"])
def test_a_broken_frame(small_parts, molecules, tmp_path, line):
    path = written(tmp_path / "train.xyz", molecules[:20])
    lines = path.read_bytes().splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip().isdigit()]
    lines[starts[17] + 3] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with rejects("path") as error:
        make_model().fit(FrameFiles.open([path]))
    assert "17 of train.xyz" in str(error.value)


def test_forked_processes_are_rejected(molecules):
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    with pool, rejects("executor"):
        make_model().fit(molecules[:20], executor=pool)


@pytest.mark.parametrize("change", ["missing", "compressed", "empty", "text"])
def test_files_that_cannot_be_read_in_parts(molecules, tmp_path, change):
    path = tmp_path / ("train.xyz.gz" if change == "compressed" else "train.xyz")
    if change == "compressed":
        written(path, molecules[:3])
    elif change != "missing":
        path.write_text("" if change == "empty" else "some text\n")
    with rejects("path"):
        FrameFiles.open([path])


def test_structures_of_files(molecules, tmp_path):
    a = written(tmp_path / "a.xyz", molecules[:7])
    b = written(tmp_path / "b.xyz", molecules[7:12])
    b.write_text("\n" + b.read_text() + "\n\n")
    files = FrameFiles.open([a, b])
    assert len(files) == 12
    assert list(files) == list(molecules[:12])
    assert list(files[np.array([9, 2, 8])]) == [molecules[i] for i in (9, 2, 8)]
    assert files[-1] == molecules[11]
    assert list(files[5:9]) == list(molecules[5:9])


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
def test_reference_potentials_of_parts(small_parts, tmp_path):
    frames = labelled_dimers(40)
    for atoms in frames:
        atoms.info["cheap"] = 0.9 * atoms.info["energy"]
    given = {"baseline": {"key": "cheap"}, "uncertainty": "posterior", "n_representatives": 60}
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames[:30])])
    whole, some = (make_model("energy", **given).fit(x) for x in (frames[:30], files))
    one, other = (model.predict(frames[30:]) for model in (whole, some))
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-3 * one.std.min())


def test_rows_of_rare_quantities_are_kept(small_parts, monkeypatch, alloys):
    set_constant(monkeypatch, "N_KEPT", 20)
    frames = copies(alloys)
    for atoms in frames[6:]:
        del atoms.arrays["force"]
    problem = problem_of(frames, make_force_model(n_members=16).settings)
    rows = rows_of(problem)
    assert len(np.unique(rows.sample.quantities["forces"].structure)) == 6
    assert len(rows.sample.source) < 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few structures with forces
        model = make_force_model(n_members=16, calibration="student").fit(frames)
    assert model.record.quantities["forces"].n_rows == 6 * 12


def test_sums_that_wait_need_memory(molecules):
    data = take_census(molecules[:60], make_model().settings).data
    settings = make_model().settings
    few, many = (training.memory_needed(settings, data, 1000, n).driver for n in (1, 100))
    assert few <= many < 2 * few  # there are not more sums than tasks


def test_warnings_of_parts_are_issued_once(small_parts, molecules, tmp_path):
    frames = copies(molecules[:60])
    for atoms in frames[::2]:
        atoms.info[f"REF_{ENERGY}"] = atoms.info.pop(ENERGY)
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    with pytest.warns(QualmsWarning, match="several places") as caught:
        take_census(files, make_model().settings)
    assert len(caught) <= 2  # which place is named first


def test_warnings_of_parts_have_the_numbers_of_all_structures(small_parts, alloys, tmp_path):
    frames = copies(alloys[:30])
    for atoms in frames[20:22]:
        del atoms.info["energy"]
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    with pytest.warns(QualmsWarning, match=r"frames\[20\]"):
        take_census(files, make_force_model().settings)


def test_stresses_that_no_part_can_use(small_parts, alloys, tmp_path):
    frames = copies(alloys[:30])
    for atoms in frames:
        atoms.pbc, atoms.cell = False, None
    files = FrameFiles.open([written(tmp_path / "train.xyz", frames)])
    with pytest.warns(QualmsWarning), rejects("stress"):
        take_census(files, make_force_model(stress="virtual").settings)
