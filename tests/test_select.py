"""Choosing structures to label."""

from dataclasses import replace

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import copies, make_force_model, make_model
from checks import rejects
from test_cli import qualms

from qualms import AtomisticModel, QualmsWarning
from qualms.active import select
from qualms.active.posterior import displaced, make_posterior, read_features, read_rows
from qualms.atomistic.forces import fill_rows, kernel_terms
from qualms.atomistic.labels import ForceLabels
from qualms.data import qm9
from qualms.gp.sparse_gp import Observations

# --- the posterior after further observations ---


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e8])
def test_covariances_after_observations(m, scale):
    rng = np.random.default_rng(m)
    B, V = rng.normal(size=(20, 12)), scale * rng.normal(size=(m, 12))
    observed = Observations.of(V)
    found, products = observed.rows(B), B @ observed.along
    expected = B @ B.T - B @ V.T @ np.linalg.solve(V @ V.T + np.eye(m), V @ B.T)
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-9)
    between = B @ B[:3].T - observed.reduction(products, products[:3])
    np.testing.assert_allclose(between, expected[:, :3], atol=1e-9)
    variances = np.sum(B**2, axis=1) - observed.reduction(products)
    np.testing.assert_allclose(variances, np.diag(expected), atol=1e-9)
    # One by one, or together.
    one_by_one, history = B, np.eye(12)
    for row in V:
        each = Observations.of(row[None] @ history)
        one_by_one, history = each.rows(one_by_one), each.rows(history)
    np.testing.assert_allclose(one_by_one @ one_by_one.T, expected, atol=1e-6)


def without_novelty(model):
    """The model, to which no environment is novel."""
    fitted = replace(model.fitted, training_novelty=(1.0, 1.0), element_novelty={})
    return AtomisticModel.from_fitted(fitted, threads=1)


def brute_force(model, pool, n, labelled=None, further=None, observed=("energy", "forces")):
    """The structures of largest variance, and its root, by the whole posterior each time.

    In the space of kernel weights, whose prior precision is the kernel of the representatives. The
    posterior is that of labelled structures if the model has none; `further` representatives have
    their prior. The variance is that of v·F/|v|, of exact derivatives, if the model has forces.
    """
    fitted, noise = model.fitted, {q: of.noise for q, of in model.record.quantities.items()}
    kernel, scale = fitted.representation.kernel, fitted.kernel_scale
    by_forces, pp = "forces" in noise, fitted.pp_variance
    own = fitted.representatives.astype(float)
    X = own if further is None else np.concatenate([own, further])

    def rows(atoms, X):
        ((chunk),) = model.chunks([atoms])
        found = {"energy": scale * np.mean(kernel(chunk.batch.features, X), axis=0)[None]}
        if by_forces:
            virials = np.full((1, 6), 0.0 if "stress" in noise else np.nan)
            labels = ForceLabels([np.zeros((len(atoms), 3))], virials)
            K = np.zeros((len(labels.y), len(X)))
            terms = kernel_terms(fitted.representation, X)
            fill_rows(np.zeros((1, len(X))), K, [atoms], labels, terms)
            found["forces"], found["stress"] = np.split(scale * K, [3 * len(atoms)])
        return found

    L = np.linalg.cholesky(scale * kernel(X, X) + 1e-12 * np.eye(len(X)))
    if labelled is None:
        factor = pp.posterior.astype(float)
        s2, P = pp.variance, factor @ factor.T / (pp.noise_variance * pp.variance)
    else:
        s2, P = fitted.record.target_std**2, 0.0
        for atoms in labelled:
            for name, K in rows(atoms, own).items():
                if name in noise:
                    V = np.linalg.solve(L[: len(own), : len(own)], K.T)
                    P = P + V @ V.T / noise[name] ** 2
        P = P + np.eye(len(own)) / s2
    precision = np.eye(len(X)) / s2
    precision[: len(own), : len(own)] = P
    phi = [{q: np.linalg.solve(L, K.T).T for q, K in rows(a, X).items()} for a in pool]
    prediction = model.predict(pool, forces=by_forces)
    score_rows = [of["energy"][0] for of in phi]
    sigma2 = (prediction.std / np.array([len(atoms) for atoms in pool])) ** 2
    if by_forces:
        edges = np.cumsum([len(atoms) for atoms in pool])[:-1]
        v = [np.subtract(displaced(a)[0].positions, a.positions) for a in pool]
        v = [each / np.linalg.norm(each) for each in v]
        score_rows = [each.ravel() @ of["forces"] for each, of in zip(v, phi, strict=True)]
        members = np.split(prediction.forces.uncalibrated.members, edges)
        along = np.array([np.tensordot(a, b, 2) for a, b in zip(v, members, strict=True)])
        elements = [fitted.calibrations["forces"].factors(np.array([*a.symbols])) for a in pool]
        squares = np.array([np.mean(f**2) for f in elements])
        sigma2 = fitted.calibrated("forces", along).std ** 2 * squares
    B, M = np.array(score_rows), len(own)
    start = np.einsum("ij,ji->i", B[:, :M], np.linalg.solve(P, B[:, :M].T))
    q2 = s2 * np.sum(B[:, M:] ** 2, axis=1)
    if further is not None:  # half of σ² is that of novel environments
        half = np.where(q2 > 0, 0.5, 1.0)
        B[:, M:] *= np.sqrt(0.5 * sigma2 / np.where(q2 > 0, q2, 1.0))[:, None]
        B[:, :M] *= np.sqrt(half * sigma2 / start)[:, None]
        start = sigma2
    chosen, stds = [], []
    for _ in range(n):
        now = np.einsum("ij,ji->i", B, np.linalg.solve(precision, B.T))
        score = sigma2 * now / start
        score[chosen] = -1
        chosen.append(int(score.argmax()))
        stds.append(np.sqrt(score.max()))
        for name in {*observed, "energy"} & {*noise}:
            V = phi[chosen[-1]][name]
            precision = precision + V.T @ V / noise[name] ** 2
    return chosen, stds


def test_choices_are_those_of_brute_force(energy_model, molecules):
    model = without_novelty(energy_model)
    selection = select(model, molecules[100:], 20)
    chosen, stds = brute_force(model, molecules[100:], 20)
    assert selection.indices.tolist() == chosen
    np.testing.assert_allclose(selection.std, stds, rtol=1e-4)  # the factor is float32
    assert selection.frames == [molecules[100 + i] for i in selection.indices]
    sizes = np.array([len(atoms) for atoms in molecules[100:]])
    std = model.predict(molecules[100:]).std / sizes
    assert selection.std[0] == pytest.approx(std.max())
    assert np.all(np.diff(selection.std) <= 1e-12)
    assert np.all(selection.std <= std[selection.indices] * (1 + 1e-9))
    # The expected error of the pool, before and after.
    assert selection.curve.shape == (21, 3)
    assert selection.curve[0, 0] == pytest.approx(np.sqrt(np.mean(std**2)))
    np.testing.assert_allclose(-np.diff(selection.curve[:, 0]), selection.gain, atol=1e-15)
    assert np.all(selection.gain > 0)
    assert np.all(np.diff(selection.curve, axis=1)[:, 1] > 0)
    assert np.all(selection.curve[:, 1] < selection.curve[:, 0])


@pytest.fixture(scope="module")
def by_labels(alloys):
    """A model that does not store its posterior: its basis are labels."""
    return make_force_model(basis="labels", n_posterior=64).fit(alloys[:24])


def test_forces_of_choices_count(alloys, by_labels):
    by_environments = make_force_model(basis="environments", stress="virtual").fit(alloys[:24])
    for fitted, labelled in ((by_environments, None), (by_labels, alloys[:24])):
        model, pool = without_novelty(fitted), copies(alloys[24:])
        selection = select(model, pool, 6, labelled=labelled or ())
        observed = ("forces", "stress")
        chosen, stds = brute_force(model, pool, 6, labelled, observed=observed)
        assert selection.quantity == "forces"
        assert selection.indices.tolist() == chosen
        np.testing.assert_allclose(selection.std, stds, rtol=5e-3)  # differences of energies
        # They teach more than energies alone.
        energies = brute_force(model, pool, 6, labelled, observed=())[1]
        assert selection.std[-1] < 0.95 * energies[-1]
    model = without_novelty(by_environments)
    without_stress = brute_force(model, pool, 6, observed=("forces",))[1]
    assert not np.allclose(select(model, pool, 6).std, without_stress, rtol=1e-2)


def test_expected_errors_of_forces(by_labels, alloys):
    """That along a random displacement is close to that of all components."""
    pool = alloys[24:]
    std = by_labels.predict(pool, forces=True).forces.std.reshape(len(pool), -1)
    found = [select(by_labels, [a], 1, labelled=alloys[:24]).std[0] for a in pool]
    ratio = np.log(found / np.sqrt(np.mean(std**2, axis=1)))
    assert abs(ratio.mean()) < 0.25
    assert ratio.std() < 0.5  # twelve components
    with rejects("labelled"):
        select(by_labels, pool, 1)
    with rejects("labelled"):
        select(by_labels, pool, 1, labelled=alloys[:5])


def test_a_posterior_that_is_not_stored(molecules):
    """It is computed from the labelled structures."""
    found = [
        select(
            make_model(units="eV", n_representatives=80, keep_pp=keep).fit(molecules[:50]),
            molecules[50:90],
            8,
            labelled=molecules[:50],
        )
        for keep in (True, False)
    ]
    assert found[0].indices.tolist() == found[1].indices.tolist()
    np.testing.assert_allclose(found[0].std, found[1].std, rtol=1e-2)  # factors are float32


def test_novel_environments_count(energy_model, molecules):
    """What representatives cannot describe is learned from similar structures, too."""
    pool = [a.copy() for a in molecules[120:]]
    for i, atoms in enumerate(pool[:20]):  # stretched, in similar pairs
        atoms.positions *= 1.12
        pool[20 + i] = Atoms(atoms.numbers, 1.002 * atoms.positions)
    model = without_novelty(energy_model)
    limit = np.sort(model.predict(pool[40:]).novelty)[-5]
    fitted = replace(energy_model.fitted, training_novelty=(limit, 1.0), element_novelty={})
    model = AtomisticModel.from_fitted(fitted, threads=1)
    rows = read_rows(model, enumerate(pool), forces=False)
    assert np.mean(rows.novelty[:40] > 1) > 0.8
    posterior = make_posterior(model, [], rows)
    further = posterior.representatives[len(model.fitted.representatives) :]
    assert len(further) > 50
    pool = [a for a, n in zip(pool, rows.novelty, strict=True) if n > 1]
    selection, (chosen, stds) = (
        select(model, pool, 8),
        brute_force(model, pool, 8, further=further),
    )
    np.testing.assert_allclose(selection.std, stds, rtol=1e-3)
    assert selection.indices.tolist() == chosen


def test_environments_that_representatives_describe(alloys):
    """They are none of their own: what is left of their kernel is rounding."""
    labelled = alloys[:12]
    model = make_model("energy", units="eV", n_representatives=60, calibration="student")
    model.fit(labelled)
    pool = [atoms.copy() for atoms in labelled]
    for i, atoms in enumerate(pool):
        atoms.rattle(1e-3, seed=i)
    rows = read_rows(model, enumerate(pool), forces=False)
    features = [batch.features[None] for batch, _ in read_features(model.fitted, pool)]
    assert not make_posterior(model, [], rows._replace(novel=features)).of_novel.size


def test_of_rotated_copies_the_first_is_chosen(energy_model, molecules):
    rng, pool = np.random.default_rng(0), []
    for atoms in molecules[100:130]:
        for _ in range(4):
            image = atoms.copy()
            image.positions @= np.linalg.qr(rng.normal(size=(3, 3)))[0]
            pool.append(image)
    selection = select(energy_model, pool, 20)
    assert np.all(selection.indices % 4 == 0)
    assert {*selection.left_out} == {i for i in range(len(pool)) if i % 4}
    assert selection.left_out[6] == "is nearly the same as structure 4"


@pytest.mark.parametrize("name", ["energy_model", "by_labels"])
def test_no_copies_are_chosen(name, request, molecules, alloys):
    """Neither of labelled structures nor of each other, also if they differ a little."""
    model = request.getfixturevalue(name)
    rng, n, old, new = np.random.default_rng(0), 8, molecules[:120], molecules[160:]
    if name == "by_labels":
        n, old, new = 4, alloys[:24], alloys[24:34]

    def moved(frames, by):
        frames = copies(frames)
        for atoms in frames:
            atoms.calc = None
            atoms.positions += by * rng.normal(size=atoms.positions.shape)
        return frames

    for by in (1e-4, 5e-3)[: 1 + (name == "energy_model")]:
        pool = [*moved(old, by), *new, *moved(new, by), *moved(new, by)]
        selection = select(model, pool, n, labelled=old)
        chosen = selection.indices - len(old)
        assert np.all(chosen >= 0)
        assert len({*(chosen % len(new))}) == n
        assert len(selection.left_out) == (len(pool) - len(new) if by == 1e-4 else 0)
    sizes = np.array([len(atoms) for atoms in pool])
    std = model.predict(pool).std / sizes
    largest = np.argsort(-std)[:n] - len(old)
    assert len({*(largest % len(new))}) < n  # as those of the largest uncertainties would be


def test_variance_of_targets_is_reduced(energy_model, molecules):
    energy_model = without_novelty(energy_model)
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
        afterwards = [Observations.of(row[None] / noise).rows(T) for row in B]
        left = [np.mean(scale * np.sum(after**2, axis=1)) for after in afterwards]
        assert int(np.argmin(left)) == choice
        B, T = Observations.of(B[choice][None] / noise).rows(B), afterwards[choice]


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
    for seed in range(4):
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
    assert np.mean(ratios) < 0.97


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


def test_until(energy_model, molecules):
    pool = molecules[100:160]
    many = select(energy_model, pool, 30)
    limit = many.std[12:14].mean()
    assert many.std[12] > limit > many.std[13]
    selection = select(energy_model, pool, until=limit)
    assert selection.indices.tolist() == many.indices[:13].tolist()
    at_random = select(energy_model, pool, until=limit, strategy="random")
    assert len(at_random.indices) > 13
    with pytest.warns(QualmsWarning, match="is not reached"):
        assert len(select(energy_model, pool, 4, until=limit, strategy="random").indices) == 4
    assert len(select(energy_model, pool, 4, until=1e3).indices) == 0
    with pytest.warns(QualmsWarning, match="is not reached"):
        select(energy_model, pool, until=limit, min_gap=40)


def test_costs_floors_and_groups(energy_model, molecules, tmp_path):
    pool = copies(molecules[100:160])
    sizes = np.array([len(atoms) for atoms in pool])
    variance = (energy_model.predict(pool).std / sizes) ** 2
    by_power = select(energy_model, pool, 8, cost="atoms^3")
    assert by_power.indices[0] == np.argmax(variance / sizes**3.0)
    for atoms, size in zip(pool, sizes, strict=True):
        atoms.info |= {"hours": size**3.0, "family": f"of {size}"}
    for cost in ("hours", sizes**3.0):
        again = select(energy_model, pool, 8, cost=cost)
        assert again.indices.tolist() == by_power.indices.tolist()
    order = np.argsort(variance)
    rare = [i for i in order if 8 in pool[i].numbers][:3]
    few = [pool[i] for i in (*rare, *(j for j in order if 8 not in pool[j].numbers))]
    for k, least in ((0, 0), (2, 2), (5, 3)):
        floor = select(energy_model, few, 5, per_element=k)
        assert sum(8 in atoms.numbers for atoms in floor.frames) == least
    assert "contains O" in " ".join(floor.reasons)
    for groups in ("family", sizes.tolist()):
        of_groups = select(energy_model, pool, 5, groups=groups)
        assert len({len(atoms) for atoms in of_groups.frames}) == 5
    # Structures of a file are read when they are needed.
    ase.io.write(tmp_path / "pool.xyz", pool)
    read = select(energy_model, tmp_path / "pool.xyz", 8, cost="hours")
    assert read.indices.tolist() == by_power.indices.tolist()
    with pytest.warns(QualmsWarning, match="one of each group"):
        select(energy_model, pool, 60, groups="family")


def test_farthest(molecules, energy_model):
    """As the textbook loop chooses, with a model or without."""
    pool, old = molecules[40:120], molecules[:40]
    for model, labelled in ((None, old), (None, []), (energy_model, old)):
        selection = select(model, pool, 10, strategy="farthest", labelled=labelled)
        if model is None:
            assert selection.curve is None
            assert np.all(np.isnan(selection.std))
            assert np.all(np.diff(selection.gain[labelled == [] :]) <= 0)
            continue
        rows = read_rows(model, enumerate([*old, *pool]), forces=False)
        X = rows.features.astype(float)
        d = np.linalg.norm(X[40:, None] - X[None, :40], axis=2).min(axis=1)
        for i in selection.indices:
            assert i == np.argmax(d)
            d = np.minimum(d, np.linalg.norm(X[40:] - X[40 + i], axis=1))
        assert len(selection.curve) == 11
    # Labelled structures of other elements are far from all.
    other = [Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]])]
    assert len(select(None, pool, 3, strategy="farthest", labelled=other).indices) == 3


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
        ({"model": None}, "model"),
        ({"model": None, "strategy": "random", "until": 0.1}, "until"),
        ({"model": None, "strategy": "farthest", "max_std": 0.1}, "max_std"),
        ({"model": None, "strategy": "farthest", "representation": "x"}, "representation"),
        ({"representation": "organic"}, "representation"),
        ({"n": None}, "n"),
        ({"until": 0}, "until"),
        ({"strategy": "random", "cost": "atoms"}, "cost"),
        ({"cost": "hours"}, "cost"),
        ({"cost": [1.0] * 9 + [0.0]}, "cost"),
        ({"cost": [1.0]}, "cost"),
        ({"groups": ["a"]}, "groups"),
        ({"groups": "family"}, "groups"),
        ({"per_element": -1}, "per_element"),
        ({"max_std": 1e-9}, "max_std"),
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
    assert [pick["rank"] for pick in document["picks"]] == [1, 2, 3, 4, 5]
    assert all(
        pick["gain"] > 0 and "expected error" in pick["reason"] for pick in document["picks"]
    )
    assert found[1].info["select_reason"] == document["picks"][1]["reason"]
    np.testing.assert_allclose(document["curve"], expected.curve, rtol=1e-4)
    assert (document["quantity"], document["units"]) == ("energy", "eV/atom")
    assert len(document["left_out"]) == 10
    assert document["left_out"][3]["structure"] == 3
    model, pool = "model.safetensors", "pool0.xyz"
    assert qualms("select -n 5 -o next.xyz", model, pool).code == 2  # it exists
    assert qualms("select -n 5 -o pool0.xyz -f", model, pool).code == 2
    assert qualms("select -n 5 -o next.csv", model, pool).code == 2
    for words in (
        "-n 5 --for aims.xyz --strategy random",
        "-n 5 --strategy target",
        "-n 5 --strategy farthest --until 0.1 --representation auto",
        "-n 5 --representation auto",
        "--strategy farthest",
        "-n 5 --strategy random --cost atoms",
        "-n 5 --cost nothing",
        "-n 5 --group-key nothing",
    ):
        assert qualms(f"select -o new.xyz {words}", model, pool).code == 2
    assert qualms("select -n 5 -o new.xyz", model).code == 2  # no pool
    assert len(ase.io.read("pool0.xyz", ":")) == 40
    for words in (
        "--for aims.xyz",
        "--strategy random --seed 3",
        "--min-gap 3 --max-novelty 5 --max-std 2",
        "--cost atoms^2 --per-element 1",
    ):
        ended = qualms(f"select -n 3 -o new.xyz -f {words}", model, pool)
        assert ended.code == 0
        assert len(ase.io.read("new.xyz", ":")) == 3


def test_command_without_a_model(molecules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ase.io.write("old.xyz", molecules[:30])
    ase.io.write("pool.xyz", molecules[20:90])
    words = "select pool.xyz -n 6 -o next.xyz --strategy farthest --representation organic"
    ended = qualms(f"{words} --labelled old.xyz --json")
    document = ended.document
    assert len(document["left_out"]) == 10
    assert document["curve"] is None
    assert all(pick["std"] is None for pick in document["picks"])
    distances = [pick["gain"] for pick in document["picks"]]
    assert distances == sorted(distances, reverse=True)
    expected = select(
        None,
        molecules[20:90],
        6,
        strategy="farthest",
        labelled=molecules[:30],
        representation="organic",
    )
    assert [pick["structure"] for pick in document["picks"]] == expected.indices.tolist()
    assert len(ase.io.read("next.xyz", ":")) == 6


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
