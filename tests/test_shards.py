"""Training on shards: the same model as in memory, whatever the workers."""

import os
import signal
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import ase.io
import numpy as np
import pytest
from atomistic_fixtures import (
    ENERGY,
    SMOOTH,
    copies,
    labelled_dimers,
    make_force_model,
    make_model,
    reference_values,
)
from hypothesis import given
from hypothesis import strategies as st

from qualms import AtomisticModel
from qualms.atomistic import FrameFiles, shards, training
from qualms.errors import InputError, QualmsWarning
from qualms.execution import Workers
from qualms.gp.ensemble import fit_block_members, fit_full_model, fit_members
from qualms.gp.kernels import PowerKernel
from qualms.gp.noise import (
    BlockSums,
    Observations,
    left_out_error,
    n_left_out,
    select_noise,
    typical_log,
)
from qualms.gp.representatives import farthest_points
from qualms.gp.sparse_gp import fit_projected_process, sum_rows, weighted_sum
from qualms.progress import Stages

#: Parts and blocks so small that there are several of each.
FEW = {"_SCANNED": 13, "_ROWS": 40, "_CHUNK": 11, "_KEPT": 90}


@pytest.fixture
def small_parts(monkeypatch):
    for name, value in FEW.items():
        monkeypatch.setattr(shards, name, value)


def written(path, frames):
    ase.io.write(path, frames, format="extxyz")
    return path


# --- models from sums ---


def problem(kinds, seed=0):
    """Rows of one or two quantities in five blocks, with their sums."""
    rng = np.random.default_rng(seed)
    n, r, B = {"energy": 60, "forces": 90}, 12, 5
    rows, first = {}, 0
    for name in kinds:
        rows[name], first = np.arange(first, first + n[name]), first + n[name]
    Phi, design = rng.normal(size=(first, r)), rng.uniform(size=(n["energy"], 2))
    y = Phi @ rng.normal(size=r) + 0.3 * rng.normal(size=first)
    y[rows["energy"]] += 5.0
    weight = rng.uniform(0.5, 2.0, first) if len(kinds) == 1 else np.ones(first)
    block = np.concatenate([rng.permutation(len(some)) % B for some in rows.values()])
    center = float(np.average(y[: n["energy"]], weights=weight[: n["energy"]]))
    C = np.zeros((first, 4))
    C[:, 0] = y
    C[rows["energy"], 0] -= center
    C[rows["energy"], 1:3], C[rows["energy"], 3] = design, 1.0
    sums = {
        name: [
            sum_rows(Phi[some], C[some], weight[some])
            for some in (where[block[where] == b] for b in range(B))
        ]
        for name, where in rows.items()
    }
    return rows, Phi, design, y, weight, block, BlockSums(sums, block, center)


@pytest.mark.parametrize("noise", ["loo", 0.05])
@pytest.mark.parametrize("kinds", [("energy",), ("energy", "forces")])
def test_the_full_model_of_sums_is_that_of_all_rows(kinds, noise):
    rows, Phi, _, y, weight, _, blocks = problem(kinds)
    if noise == "loo" and len(kinds) > 1:
        noise = 0.05  # other rows are left out
    given = dict.fromkeys(kinds, noise)
    options = {"rows": rows, "sample_weight": weight}
    expected = fit_full_model(Phi, y, given, **options)
    found = fit_full_model(Phi, y, given, **options, blocks=blocks)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-8, atol=1e-10)
    for name in kinds:
        assert found.noise[name] == pytest.approx(expected.noise[name], rel=1e-8)
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-10)
    np.testing.assert_allclose(found.center, expected.center, rtol=1e-10)


def test_the_noise_is_selected_by_some_rows_left_out_of_all():
    _, Phi, _, y, weight, _, blocks = problem(("energy",))
    grid, kept = np.geomspace(1e-2, 1e2, 5), np.arange(3, 60, 7)
    z = y - blocks.center
    sums = blocks.total("energy").combined(np.eye(4)[:, :1])
    found = select_noise(
        Phi[kept], z[kept], grid, sample_weight=weight[kept], sums=sums, max_rows=100
    )
    for noise, score in zip(grid, found.scores, strict=True):
        errors = []
        for i in kept:
            rest = np.delete(np.arange(60), i)
            model = fit_projected_process(Phi[rest], z[rest], noise, sample_weight=weight[rest])
            errors.append(weight[i] * abs(z[i] - model.mean(Phi[[i]])[0, 0]))
        assert score == pytest.approx(sum(errors) / weight[kept].sum(), rel=1e-9)


def test_joint_noise_variances_are_selected_by_rows_of_some_blocks():
    rows, Phi, _, y, _, block, blocks = problem(("energy", "forces"))
    kinds = tuple(rows.values())
    z = y.copy()
    z[rows["energy"]] -= blocks.center
    observed = Observations(Phi, z, kinds, np.arange(len(y)), blocks)
    found = left_out_error(observed, 0.7)(0.02, 0.3)
    out = block == 0  # one of five
    w = np.where(np.arange(len(y)) < 60, 1.0, 0.02 / 0.3)[~out]
    model = fit_projected_process(Phi[~out], z[~out], 0.02 / 0.7, sample_weight=w)
    errors = np.abs(z - model.mean(Phi)[:, 0])
    expected = [typical_log(errors[some[out[some]]]) for some in kinds]
    counts = np.array([np.count_nonzero(out[some]) for some in kinds])
    np.testing.assert_allclose(found, expected * counts / counts.max(), rtol=1e-9)


@pytest.mark.parametrize("kinds", [("energy",), ("energy", "forces")])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_members_of_blocks_are_those_of_their_rows(kinds, bootstrap):
    rows, Phi, design, y, weight, block, blocks = problem(kinds)
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 3 if bootstrap else 2, size=(5, 4))
    counts[0] = 1
    full = fit_full_model(Phi, y, dict.fromkeys(kinds, 0.05), rows=rows, sample_weight=weight)
    shifts = rng.normal(size=(2, 4))
    n = len(rows["energy"])
    targets = y[:n, None] + design @ shifts
    _, expected, means = fit_members(full, Phi, targets[:, None], counts[block])
    columns = np.concatenate([np.ones((1, 4)), shifts, np.zeros((1, 4))])
    _, found, intercepts = fit_block_members(full, blocks, counts, columns)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(intercepts, means, rtol=1e-9)


def test_sums_of_parts():
    rng = np.random.default_rng(0)
    Phi, C, w = rng.normal(size=(20, 3)), rng.normal(size=(20, 2)), rng.uniform(0.5, 2, 20)
    parts = [sum_rows(Phi[some], C[some], w[some]) for some in (slice(0, 8), slice(8, 20))]
    for whole in (parts[0] + parts[1], weighted_sum(parts, [1.0, 1.0])):
        np.testing.assert_allclose(whole.gram, Phi.T @ np.diag(w) @ Phi)
        np.testing.assert_allclose(whole.moment, Phi.T @ np.diag(w) @ C)
        np.testing.assert_allclose(whole.squares, C.T @ np.diag(w) @ C)
    twice = weighted_sum(parts, [2.0, 0.5])
    factors = np.where(np.arange(20) < 8, 2.0, 0.5)
    np.testing.assert_allclose(twice.gram, Phi.T @ np.diag(factors * w) @ Phi)
    B = rng.normal(size=(2, 3))
    np.testing.assert_allclose(
        parts[0].combined(B).squares, (C[:8] @ B).T @ (w[:8, None] * (C[:8] @ B))
    )
    scaled = sum_rows(3 * Phi, C, w)
    np.testing.assert_allclose((parts[0] + parts[1]).scaled(3.0).gram, scaled.gram)
    np.testing.assert_allclose((parts[0] + parts[1]).scaled(3.0).moment, scaled.moment)


# --- representatives ---


@given(st.integers(0, 1000), st.integers(2, 12), st.integers(1, 5))
def test_representatives_of_parts_cover_all_environments(seed, M, n_parts):
    """Within four times the optimal radius, and the optimum is at least half of the plain one."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(6, 3))
    X = (centers[rng.integers(6, size=80)] + 0.2 * rng.normal(size=(80, 3))).astype(np.float32)
    settings = make_model(n_representatives=M).settings
    parts = []
    for some in np.array_split(np.arange(len(X)), n_parts):
        found = training.Candidates(np.stack([some, some], 1), some, X[some])
        picks = farthest_points(found.features, min(M, len(some))).indices
        parts.append(found.take(picks))
    joined = training.join_candidates(parts, PowerKernel(2), settings, rng, Stages())
    plain = X[farthest_points(X, M).indices]

    def radius(points):
        return np.sqrt(((X[:, None] - points) ** 2).sum(-1)).min(axis=1).max()

    picks = X[joined.origins[:, 0]]
    if len(picks) == M:  # none was dropped as a combination of others
        assert radius(picks) <= 4 * radius(plain) + 1e-5


# --- the same model as in memory ---


def exact(monkeypatch):
    """Keep all rows, and select representatives at once."""
    monkeypatch.setattr(shards, "_KEPT", 10**6)
    monkeypatch.setattr(shards, "selection_size", lambda census: census.n_environments)


def same(a, b, frames, forces=False):
    """Two models of the full data agree to rounding; posterior members are drawn alike."""
    one, other = a.predict(frames), b.predict(frames)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-4 * one.std.min())
    np.testing.assert_allclose(one.std, other.std, rtol=1e-3)
    if forces:
        one, other = (m.predict_forces(frames, stress=True) for m in (a, b))
        for name in ("forces", "stress"):
            f, g = getattr(one, name), getattr(other, name)
            np.testing.assert_allclose(f.mean, g.mean, atol=1e-4 * np.abs(f.mean).max())
            np.testing.assert_allclose(f.std, g.std, rtol=1e-3, atol=1e-9)


def both(model, frames, **given):
    """The model in memory and in shards."""
    inside = model().fit(frames, **given)
    parts = model()
    found = shards.fit(frames, parts.settings, given.get("groups"), workers=Workers())
    return inside, AtomisticModel.from_fitted(found.fitted, threads=1)


def test_energies_as_in_memory(small_parts, monkeypatch, molecules, tmp_path):
    exact(monkeypatch)
    a, b = both(lambda: make_model(uncertainty="posterior", units="eV"), molecules[:80])
    same(a, b, molecules[80:120])
    np.testing.assert_array_equal(a.fitted.origins, b.fitted.origins)
    assert a.fitted.training_novelty == pytest.approx(b.fitted.training_novelty)
    for name in ("n_structures", "n_environments", "effective_rank", "n_duplicates"):
        assert getattr(a.record, name) == getattr(b.record, name)
    assert b.record.quantities["energy"].n_rows == 80
    assert a.provenance.data_digest == b.provenance.data_digest
    b.save(tmp_path / "model.safetensors")
    again = AtomisticModel.load(tmp_path / "model.safetensors", threads=1)
    np.testing.assert_allclose(again.predict(molecules[80:90]).std, b.predict(molecules[80:90]).std)


def test_atomic_properties_as_in_memory(small_parts, monkeypatch, molecules):
    exact(monkeypatch)
    frames = copies(molecules[:40])
    for i in (3, 17):  # some without labels
        del frames[i].arrays["shift"]
    make = lambda: make_model("shift", "atomic", species="H", uncertainty="posterior")  # noqa: E731
    a, b = both(make, frames)
    same(a, b, molecules[40:60])
    assert a.record.quantities["energy"].n_without == b.record.quantities["energy"].n_without
    np.testing.assert_array_equal(a.fitted.origins, b.fitted.origins)


def test_energies_forces_and_stresses_as_in_memory(small_parts, monkeypatch, alloys):
    exact(monkeypatch)
    frames = copies(alloys[:24])
    del frames[5].arrays["force"], frames[6].info["virtual"]
    given = {"noise": 1e-4, "forces_noise": 1e-2, "stress_noise": 1e-3, "stress": "virtual"}
    a, b = both(lambda: make_force_model(uncertainty="posterior", n_members=16, **given), frames)
    same(a, b, alloys[24:30], forces=True)
    for name in ("forces", "stress"):
        one, other = (m.record.quantities[name] for m in (a, b))
        assert (one.n_rows, one.n_without) == (other.n_rows, other.n_without)


def test_duplicates_groups_and_isolated_atoms(small_parts, molecules):
    frames = [*copies(molecules[:60]), *copies(molecules[:4])]
    for i, atoms in enumerate(frames):
        atoms.info["run"] = f"run {i // 3}"
    model = make_model()
    with pytest.warns(QualmsWarning, match="duplicates"):
        census = shards.take_census(
            frames, model.settings, "run", Workers(), Stages(), skip_failed=False
        )
    assert census.n_duplicates == 4
    assert census.groups[0] == census.groups[2] == census.groups[60] != census.groups[3]
    blocks = shards.draw_blocks(census)
    for group in np.unique(census.groups):
        assert len(np.unique(blocks.block[census.groups == group])) == 1


def test_members_see_half_of_the_blocks(small_parts, molecules):
    settings = make_model().settings
    census = shards.take_census(molecules, settings, None, Workers(), Stages(), skip_failed=False)
    blocks = shards.draw_blocks(census)
    usual = blocks.counts[: shards._BLOCKS]
    np.testing.assert_array_equal(usual.sum(axis=0), 8)
    assert np.bincount(blocks.block)[: shards._BLOCKS].min() >= 10
    if len(blocks.counts) > shards._BLOCKS:  # what determines rare elements is in all members
        assert np.all(blocks.counts[-1] == 1)


@pytest.mark.parametrize("calibration", ["sources", "student"])
def test_uncertainties_of_members_of_blocks(small_parts, monkeypatch, molecules, calibration):
    monkeypatch.setattr(shards, "_KEPT", 10_000)
    model = make_model(calibration=calibration, n_representatives=150)
    found = shards.fit(molecules[:140], model.settings, workers=Workers())
    model = AtomisticModel.from_fitted(found.fitted, threads=1)
    prediction = model.predict(molecules[140:])
    z = (prediction.mean - reference_values(molecules[140:])) / prediction.std
    assert 0.45 < np.mean(np.abs(z) < 1) < 0.9
    assert model.record.solver == "sums of blocks"


def test_a_chosen_number_of_representatives(small_parts, monkeypatch, molecules):
    monkeypatch.setattr(shards, "_LEAST", 40)
    monkeypatch.setattr(training, "_SMALLEST", 10)
    model = make_model(n_representatives="auto")
    fitted = shards.fit(molecules[:60], model.settings, workers=Workers()).fitted
    assert len(fitted.record.size_curve) > 1
    assert fitted.record.effective_rank in fitted.record.size_curve
    assert fitted.settings.n_representatives == "auto"


def test_too_little_memory_for_all_rows(small_parts, monkeypatch, molecules):
    def too_large(*given):
        raise training.TooLargeError("The training needs more memory.", parameter="memory")

    monkeypatch.setattr(training, "_plan_memory", too_large)
    model = make_model().fit(molecules[:60])
    assert model.record.solver == "sums of blocks"


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
    serial = AtomisticModel.from_fitted(
        shards.fit(files, model.settings, workers=Workers()).fitted, threads=1
    )
    expected = serial.predict(test)
    for executor in (pool, client):
        found = model.fit(files, executor=executor).predict(test)
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9 * expected.std.min())
        np.testing.assert_allclose(found.std, expected.std, rtol=1e-9)


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
    with pytest.raises(InputError) as error:
        make_model("nothing").fit(files)
    assert error.value.parameter == "key"
    with pytest.raises(InputError) as error:
        make_model(forces="nothing", representation=SMOOTH).fit(files)
    assert error.value.parameter == "forces"


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
    with pytest.raises(InputError) as error:
        make_model().fit(FrameFiles.open([path]))
    assert error.value.parameter == "path"
    assert "17 of train.xyz" in str(error.value)


def test_forked_processes_are_rejected(molecules):
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    with pool, pytest.raises(InputError) as error:
        make_model().fit(molecules[:20], executor=pool)
    assert error.value.parameter == "executor"


def test_atoms_are_not_resampled_in_shards(molecules):
    model = make_model("shift", "atomic", resample="atoms")
    with pytest.raises(InputError) as error:
        shards.fit(molecules[:20], model.settings, workers=Workers())
    assert error.value.parameter == "resample"


def test_too_little_memory(molecules, tmp_path):
    files = FrameFiles.open([written(tmp_path / "train.xyz", molecules[:20])])
    with pytest.raises(InputError) as error:
        make_model(memory="100MB").fit(files)
    assert error.value.parameter == "memory"


@pytest.mark.parametrize("change", ["missing", "compressed", "empty", "text"])
def test_files_that_cannot_be_read_in_parts(molecules, tmp_path, change):
    path = tmp_path / ("train.xyz.gz" if change == "compressed" else "train.xyz")
    if change == "compressed":
        written(path, molecules[:3])
    elif change != "missing":
        path.write_text("" if change == "empty" else "some text\n")
    with pytest.raises(InputError) as error:
        FrameFiles.open([path])
    assert error.value.parameter == "path"


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
def test_reference_potentials_in_shards(small_parts, monkeypatch, tmp_path):
    exact(monkeypatch)
    frames = labelled_dimers(40)
    for atoms in frames:
        atoms.info["cheap"] = 0.9 * atoms.info["energy"]
    given = {"baseline": {"key": "cheap"}, "uncertainty": "posterior", "n_representatives": 60}
    a, b = both(lambda: make_model("energy", **given), frames[:30])
    same(a, b, frames[30:])


# --- blocks and rows that are kept ---


def census_of(frames, model):
    return shards.take_census(frames, model.settings, None, Workers(), Stages(), skip_failed=False)


def test_rows_of_rare_quantities_are_kept_and_in_several_blocks(small_parts, alloys):
    frames = copies(alloys)
    for atoms in frames[6:]:
        del atoms.arrays["force"]
    census = census_of(frames, make_force_model(n_members=16))
    blocks = shards.draw_blocks(census)
    has_forces = census.derived[:, 0] > 0
    assert len(np.unique(blocks.block[has_forces])) >= 5
    n_out = n_left_out(shards._BLOCKS)
    assert 0 < np.count_nonzero(blocks.block[has_forces] < n_out) < 6
    kept = shards.keep_rows(census, blocks)
    assert np.all(kept[has_forces & (blocks.block < shards._BLOCKS)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few structures with forces
        model = make_force_model(n_members=16, calibration="student")
        found = shards.fit(frames, model.settings, workers=Workers())
    assert found.fitted.record.quantities["forces"].n_rows == 6 * 12


def test_subsamples_are_made_of_blocks(molecules):
    census = census_of(molecules[:100], make_model(subsample=0.9))
    with pytest.warns(QualmsWarning, match="blocks"):
        blocks = shards.draw_blocks(census)
    assert blocks.counts[: shards._BLOCKS].sum(axis=0).tolist() == [14] * 16


@pytest.mark.parametrize(
    ("n", "given", "parameter"),
    [
        (3, {}, "baseline"),
        (60, {"subsample": 0.97, "n_members": 3, "baseline": "mean"}, "subsample"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_blocks_that_leave_nothing_to_calibrate_on(molecules, n, given, parameter):
    with pytest.raises(InputError) as error:
        shards.fit(molecules[:n], make_model(**given).settings, workers=Workers())
    assert error.value.parameter == parameter


def test_forces_on_some_atoms(small_parts, alloys):
    given = {"force_atoms": 2, "calibration": "student", "n_members": 16}
    whole = make_force_model(**given).fit(alloys[:30])
    found = shards.fit(alloys[:30], make_force_model(**given).settings, workers=Workers())
    for record in (whole.record, found.fitted.record):
        assert record.quantities["forces"].n_rows == 30 * 2 * 3


def test_the_number_of_representatives_does_not_depend_on_workers(molecules):
    census = census_of(molecules[:60], make_model(n_representatives="auto"))
    size, _ = training.largest_size(census, lambda n: True)
    least = training.largest_size(
        census, lambda n: shards.shard_memory(census.with_size(n), 1000).driver < 1.0
    )
    assert size > 250
    assert least == (250, "the memory")


def test_sums_that_wait_need_memory(molecules):
    census = census_of(molecules[:60], make_model(n_representatives=1000))
    few, some, many, more = (
        shards.shard_memory(census, 1000, n_workers).driver for n_workers in (1, 4, 100, 1000)
    )
    assert few < some < many == more  # there are not more sums than tasks


def test_the_number_of_representatives_fits_in_the_memory(molecules, monkeypatch, caplog):
    model = make_model(n_representatives="auto", memory="0.55GB")
    monkeypatch.setattr(training, "_PER_LABEL", 50)
    with caplog.at_level("INFO", "qualms"):
        found = shards.fit(molecules[:60], model.settings, workers=Workers()).fitted
    assert found.record.size_limit == "the memory"
    assert "limit 550.0 MB" in caplog.text


def test_no_structures():
    with pytest.raises(InputError) as error:
        shards.fit([], make_model().settings, workers=Workers())
    assert error.value.parameter == "frames"


def test_warnings_of_parts_are_issued_once(small_parts, molecules):
    frames = copies(molecules[:60])
    for atoms in frames[::2]:
        atoms.info[f"REF_{ENERGY}"] = atoms.info.pop(ENERGY)
    with pytest.warns(QualmsWarning, match="several places") as caught:
        census_of(frames, make_model())
    assert len(caught) <= 2  # which place is named first
