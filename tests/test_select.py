"""Choosing structures to label."""

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import copies, make_force_model, make_model
from checks import rejects
from test_cli import qualms

from qualms import QualmsWarning
from qualms.active import select
from qualms.data import qm9
from qualms.gp.sparse_gp import observed_covariances, observed_rows

# --- the posterior after further observations ---


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e8])
def test_covariances_after_observations(m, scale):
    rng = np.random.default_rng(m)
    B, V = rng.normal(size=(20, 12)), scale * rng.normal(size=(m, 12))
    found = observed_rows(B, V)
    expected = B @ B.T - B @ V.T @ np.linalg.solve(V @ V.T + np.eye(m), V @ B.T)
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-9)
    between = observed_covariances(B @ B[:3].T, B, B[:3], V)
    np.testing.assert_allclose(between, expected[:, :3], atol=1e-9)
    # One by one, or together.
    one_by_one, history = B, np.eye(12)
    for row in V:
        here = row[None] @ history
        one_by_one, history = observed_rows(one_by_one, here), observed_rows(history, here)
    np.testing.assert_allclose(one_by_one @ one_by_one.T, expected, atol=1e-6)


def brute_force(model, pool, n, forces=False, stress=False):
    """The structures of largest variance, and its root, by the whole posterior each time."""
    from qualms.atomistic.forces import fill_rows, kernel_terms
    from qualms.atomistic.labels import ForceLabels

    fitted = model.fitted
    pp, terms = fitted.pp_variance, kernel_terms(fitted.representation, fitted.representatives)
    factor = pp.posterior.astype(float)
    precision = factor @ factor.T / (pp.noise_variance * pp.variance)
    whitening = pp.whitening.astype(float)
    noise = {name: of.noise for name, of in fitted.record.quantities.items()}
    prediction = model.predict(pool)
    sigma2 = (prediction.std / np.array([len(atoms) for atoms in pool])) ** 2
    rows = []
    for atoms in pool:
        ((chunk),) = model.chunks([atoms])
        K = [chunk.rows()]
        if forces:
            virials = np.full((1, 6), 0.0 if stress else np.nan)
            labels = ForceLabels([np.zeros((len(atoms), 3))], virials)
            both = np.zeros((len(labels.y), K[0].shape[1]))
            fill_rows(np.zeros_like(K[0]), both, [atoms], labels, terms)
            K += np.split(both * fitted.kernel_scale, [3 * len(atoms)])
        rows.append([np.linalg.solve(whitening, k.T).T for k in K])
    start = np.array([r[0][0] @ np.linalg.solve(precision, r[0][0]) for r in rows])
    chosen, stds = [], []
    for _ in range(n):
        now = np.array([r[0][0] @ np.linalg.solve(precision, r[0][0]) for r in rows])
        score = sigma2 * now / start
        score[chosen] = -1
        chosen.append(int(score.argmax()))
        stds.append(np.sqrt(score.max()))
        for row, name in zip(rows[chosen[-1]], ("energy", "forces", "stress"), strict=False):
            if len(row):
                precision = precision + row.T @ row / noise[name] ** 2
    return chosen, stds


def test_choices_are_those_of_brute_force(energy_model, molecules):
    selection = select(energy_model, molecules[100:], 20)
    chosen, stds = brute_force(energy_model, molecules[100:], 20)
    assert selection.indices.tolist() == chosen
    np.testing.assert_allclose(selection.std, stds, rtol=1e-6)
    assert selection.frames == [molecules[100 + i] for i in selection.indices]
    sizes = np.array([len(atoms) for atoms in molecules[100:]])
    std = energy_model.predict(molecules[100:]).std / sizes
    assert selection.std[0] == pytest.approx(std.max())
    assert np.all(np.diff(selection.std) <= 1e-12)
    assert np.all(selection.std <= std[selection.indices] * (1 + 1e-9))


def test_forces_of_choices_count(alloys):
    model = make_force_model(basis="environments", n_representatives=60).fit(alloys[:24])
    pool = copies(alloys[24:])
    selection = select(model, pool, 6)
    chosen, stds = brute_force(model, pool, 6, forces=True)
    assert selection.indices.tolist() == chosen
    np.testing.assert_allclose(selection.std, stds, rtol=1e-6)
    # They teach more than energies alone.
    assert selection.std[-1] < 0.9 * brute_force(model, pool, 6)[1][-1]


def test_stresses_of_choices_count(alloys):
    model = make_force_model(basis="environments", stress="virtual").fit(alloys[:24])
    pool = copies(alloys[24:])
    selection = select(model, pool, 4)
    chosen, stds = brute_force(model, pool, 4, forces=True, stress=True)
    assert selection.indices.tolist() == chosen
    np.testing.assert_allclose(selection.std, stds, rtol=1e-6)
    assert not np.allclose(stds, brute_force(model, pool, 4, forces=True)[1], rtol=1e-4)


def test_of_rotated_copies_the_first_is_chosen(energy_model, molecules):
    """Their variances are equal up to rounding."""
    rng, pool = np.random.default_rng(0), []
    for atoms in molecules[100:130]:
        for _ in range(4):
            image = atoms.copy()
            image.positions @= np.linalg.qr(rng.normal(size=(3, 3)))[0]
            pool.append(image)
    indices = select(energy_model, pool, 20).indices
    for i in np.unique(indices // 4):
        copies_of = indices[indices // 4 == i] % 4
        assert copies_of.tolist() == [*range(len(copies_of))]


@pytest.fixture(scope="module")
def drawn(alloys):
    """A model without exact rows of the posterior: its basis are labels."""
    return make_force_model(basis="labels", n_posterior=64).fit(alloys[:24])


@pytest.mark.parametrize("name", ["energy_model", "drawn"])
def test_no_copies_are_chosen(name, request, molecules, alloys):
    """Neither of labelled structures nor of each other, also if they differ a little.

    Members that are drawn from the posterior are few: only copies of each other.
    """
    model = request.getfixturevalue(name)
    rng, n, old, new = np.random.default_rng(0), 8, molecules[:40], molecules[160:]
    if name == "drawn":
        n, old, new = 4, [], alloys[24:34]

    def moved(frames):
        frames = copies(frames)
        for atoms in frames:
            atoms.calc = None
            atoms.positions += 1e-4 * rng.normal(size=atoms.positions.shape)
        return frames

    pool = [*moved(old), *new, *moved(new), *moved(new)]
    chosen = select(model, pool, n).indices - len(old)
    assert np.all(chosen >= 0)
    assert len({*(chosen % len(new))}) == n
    std = model.predict(pool).std / np.array([len(atoms) for atoms in pool])
    largest = np.argsort(-std)[:n] - len(old)
    assert len({*(largest % len(new))}) < n  # as those of the largest uncertainties would be


def test_variance_of_targets_is_reduced(energy_model, molecules):
    pool, targets = molecules[100:160], [a for a in molecules[160:] if 7 in a.numbers]
    by = {
        "target": select(energy_model, pool, 5, strategy="target", targets=targets),
        "random": select(energy_model, pool, 5, strategy="random"),
    }
    assert {*by["target"].indices} != {*by["random"].indices}
    # Each choice is the best of all, by the exact posterior of the targets.
    rows = lambda frames: np.concatenate(  # noqa: E731
        [energy_model.fitted.pp_variance.rows(c.rows()) for c in energy_model.chunks(frames)]
    )
    B, T = rows(pool), rows(targets)
    sigma2 = (energy_model.predict(targets).std / [len(a) for a in targets]) ** 2
    noise = energy_model.record.quantities["energy"].noise
    scale = sigma2 / np.sum(T**2, axis=1)
    for choice in by["target"].indices:
        afterwards = [observed_rows(T, row[None] / noise) for row in B]
        left = [np.mean(scale * np.sum(after**2, axis=1)) for after in afterwards]
        assert int(np.argmin(left)) == choice
        B, T = observed_rows(B, B[choice][None] / noise), afterwards[choice]


@pytest.mark.parametrize("n_targets", [20, 200])  # fewer than representatives, and more
def test_number_of_targets(energy_model, molecules, n_targets):
    """Several copies of the targets are the same as one."""
    options = {"strategy": "target", "targets": molecules[180:200]}
    expected = select(energy_model, molecules[100:180], 8, **options).indices.tolist()
    options["targets"] = (molecules[180:200] * 10)[:n_targets]
    assert select(energy_model, molecules[100:180], 8, **options).indices.tolist() == expected


def test_selected_structures_teach_more_than_random_ones():
    """Errors of other molecules after training with 50 more."""
    frames, ratios = qm9(n=3000), []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(frames))
        parts = np.split(order, [200, 1200, 2200])
        train, pool, test = ([frames[i] for i in part] for part in parts[:3])
        model = make_model(n_representatives=300).fit(train)
        errors = []
        for strategy in ("variance", "random"):
            chosen = select(model, pool, 50, strategy=strategy, seed=seed).frames
            again = make_model(n_representatives=300).fit(train + chosen)
            y = np.array([atoms.info["atomization_energy"] for atoms in test])
            z = (again.predict(test).mean - y) / [len(atoms) for atoms in test]
            errors.append(np.sqrt(np.mean(z**2)))
        ratios.append(errors[0] / errors[1])
    assert np.mean(ratios) < 0.95


# --- which structures are candidates ---


def test_structures_that_cannot_be_chosen(energy_model, molecules):
    copper, broken = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), molecules[150].copy()
    broken.positions[0, 0] = np.nan
    clash = molecules[151].copy()
    clash.positions[1] = clash.positions[0] + [0.3, 0, 0]
    nothing = Atoms()
    pool = [molecules[0], copper, broken, clash, nothing, molecules[152], molecules[152].copy()]
    selection = select(energy_model, pool, 1, labelled=molecules[:100])
    assert selection.indices.tolist() == [5]
    assert {*selection.left_out} == {0, 1, 2, 3, 4, 6}
    for i, word in enumerate(("labelled", "Cu", "finite", "apart", "no atoms")):
        assert word in selection.left_out[i]
    assert "structure 5" in selection.left_out[6]
    with pytest.warns(QualmsWarning, match="Only 1 structure of 4"):
        assert len(select(energy_model, pool, 4, labelled=molecules[:100]).frames) == 1


def test_compositions_without_a_baseline():
    """Energies of elements that always come together are not known."""
    train = [Atoms("CO", [[0, 0, 0], [0, 0, 1.1 + 0.01 * i]]) for i in range(30)]
    for i, atoms in enumerate(train):
        atoms.info["e"] = 0.01 * (i - 10) ** 2
    with pytest.warns(QualmsWarning, match="too few compositions"):
        model = make_model("e", n_representatives=20).fit(train)
    carbon = Atoms("C2", [[0, 0, 0], [0, 0, 1.25]])
    stretched = Atoms("CO", [[0, 0, 0], [0, 0, 1.5]])
    selection = select(model, [carbon, stretched], 1)
    assert selection.indices.tolist() == [1]
    assert "C2" in selection.left_out[0]
    with rejects("targets"):
        select(model, [stretched], 1, strategy="target", targets=[stretched, carbon])


def test_structures_in_messages_have_their_numbers_in_the_pool(energy_model, molecules):
    ion = molecules[111].copy()
    ion.info["charge"] = 1
    with pytest.warns(QualmsWarning, match="Structure 2, .* 'charge'"):
        select(energy_model, [molecules[0], Atoms("Cu"), ion], 1, labelled=molecules[:1])


def test_unphysical_structures(energy_model, molecules):
    pool = molecules[100:140]
    novelty = energy_model.predict(pool).novelty
    limit = np.sort(novelty)[-4:-2].mean()
    selection = select(energy_model, pool, 30, max_novelty=limit)
    assert {*selection.left_out} == {*np.flatnonzero(novelty > limit)}
    assert len(selection.left_out) == 3
    with rejects("max_novelty"):
        select(energy_model, pool, 3, max_novelty=1e-12)


def test_frames_apart(energy_model, molecules):
    chosen = np.sort(select(energy_model, molecules[100:160], 7, min_gap=5).indices)
    assert np.all(np.diff(chosen) > 5)
    with pytest.warns(QualmsWarning, match="5 frames apart"):
        select(energy_model, molecules[100:120], 7, min_gap=5)


def test_bad_input(energy_model, shift_model, molecules):
    for options, parameter in (
        ({"n": 0}, "n"),
        ({"n": 2.5}, "n"),
        ({"strategy": "best"}, "strategy"),
        ({"strategy": "target"}, "targets"),
        ({"targets": molecules[:3]}, "targets"),
        ({"strategy": "target", "targets": []}, "targets"),
        ({"strategy": "target", "targets": [molecules[0], Atoms("Cu")]}, "targets"),
        ({"strategy": "random", "seed": -1}, "seed"),
        ({"min_gap": -1}, "min_gap"),
        ({"max_novelty": 0}, "max_novelty"),
        ({"pool": []}, "pool"),
        ({"pool": [Atoms("Cu")]}, "pool"),
        ({"pool": molecules[0]}, "pool"),
        ({"labelled": molecules[0]}, "labelled"),
        ({"labelled": None}, "labelled"),
        ({"labelled": [1]}, "labelled"),
        ({"strategy": "target", "targets": 3}, "targets"),
        ({"model": shift_model}, "model"),
    ):
        given = {"model": energy_model, "pool": molecules[100:110], "n": 2} | options
        with rejects(parameter):
            select(given.pop("model"), given.pop("pool"), given.pop("n"), **given)


def test_a_baseline_potential_is_not_computed(molecules):
    frames = copies(molecules[:80])
    for atoms in frames:
        atoms.info["cheap"] = 0.9 * atoms.info["atomization_energy"]
    model = make_model(baseline={"key": "cheap"}).fit(frames[:60])
    bare = copies(frames[60:])
    for atoms in bare:
        del atoms.info["cheap"]
    assert len(select(model, bare, 5).frames) == 5


# --- the command ---


def test_command(energy_model, molecules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    energy_model.save("model.safetensors")
    for name, frames in {
        "labelled": molecules[:100],
        "pool0": molecules[90:130],
        "pool1": molecules[130:150],
        "aims": molecules[150:160],
    }.items():
        ase.io.write(f"{name}.xyz", frames)
    words = "select -n 5 -o next.xyz --labelled labelled.xyz --json"
    ended = qualms(words, "model.safetensors", "pool0.xyz", "pool1.xyz")
    expected = select(energy_model, molecules[90:150], 5, labelled=molecules[:100])
    found = ase.io.read("next.xyz", ":")
    for rank, (atoms, other) in enumerate(zip(found, expected.frames, strict=True), 1):
        np.testing.assert_allclose(atoms.positions, other.positions, atol=1e-7)
        assert atoms.info["select_rank"] == rank
    document = ended.document
    np.testing.assert_allclose([pick["std"] for pick in document["picks"]], expected.std, rtol=1e-4)
    for pick, index in zip(document["picks"], expected.indices, strict=True):
        place = ("pool0.xyz", index) if index < 40 else ("pool1.xyz", index - 40)
        assert (pick["file"], pick["structure"]) == place
    assert len(document["left_out"]) == 10
    assert document["left_out"][3]["structure"] == 3
    model, pool = "model.safetensors", "pool0.xyz"
    assert qualms("select -n 5 -o next.xyz", model, pool).code == 2  # it exists
    assert qualms("select -n 5 -o pool0.xyz -f", model, pool).code == 2
    assert qualms("select -n 5 -o next.csv", model, pool).code == 2
    assert qualms("select -n 5 -o new.xyz --for aims.xyz --random", model, pool).code == 2
    assert len(ase.io.read("pool0.xyz", ":")) == 40
    for words in ("--for aims.xyz", "--random --seed 3", "--min-gap 3 --max-novelty 5"):
        ended = qualms(f"select -n 3 -o new.xyz -f {words}", model, pool)
        assert ended.code == 0
        assert len(ase.io.read("new.xyz", ":")) == 3


def test_files_of_the_command(energy_model, molecules, tmp_path, monkeypatch):
    """Structures are named by their files, and no file is overwritten."""
    monkeypatch.chdir(tmp_path)
    energy_model.save("model.safetensors")
    (tmp_path / "other").mkdir()
    ase.io.write("a b.xyz", molecules[100:110])
    ase.io.write("other/a b.xyz", [molecules[110], molecules[103], *molecules[111:115]])
    ase.io.write("aims.xyz", [molecules[0], Atoms("Cu")])
    pool = ("model.safetensors", "a b.xyz@2:8", "other/a b.xyz")
    ended = qualms("select -n 9 -o next.xyz --json", *pool)
    (left_out,) = ended.document["left_out"]
    assert (left_out["file"], left_out["structure"]) == ("other/a b.xyz", 1)
    assert left_out["reason"] == "is the same as structure 1 of a b.xyz@2:8"
    assert {pick["file"] for pick in ended.document["picks"]} == {*pool[1:]}
    ended = qualms("select -n 3 -f -o next.xyz --for aims.xyz", *pool)
    assert ended.code == 2
    assert "Structure 1 of --for contains Cu" in ended.err
    before = (tmp_path / "a b.xyz").read_bytes()
    assert qualms("select -n 3 -f -o", "a b.xyz", *pool).code == 2
    assert (tmp_path / "a b.xyz").read_bytes() == before
