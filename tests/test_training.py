"""Training against slow solutions of the same problem, what it depends on, and its limits."""

import logging
import os
from dataclasses import replace
from itertools import pairwise
from unittest.mock import MagicMock

import numpy as np
import oracle_forces
import pytest
from ase import Atoms
from ase.calculators.morse import MorsePotential
from atomistic_fixtures import (
    ENERGY,
    SMOOTH,
    copies,
    labelled_alloys,
    make_force_model,
    make_model,
    membership,
    problem_of,
    reference_values,
    rows_of,
    same_predictions,
    set_constant,
)
from checks import rejects
from threadpoolctl import threadpool_info, threadpool_limits

from qualms import AtomisticModel, InputError, QualmsWarning, resources
from qualms.atomistic import passes, training
from qualms.atomistic.census import take_census
from qualms.atomistic.delta import StoredPotential
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.forces import kernel_terms
from qualms.atomistic.settings import make_settings, parse_memory
from qualms.execution import Workers
from qualms.gp.representatives import farthest_points
from qualms.gp.sparse_gp import Whitening
from qualms.progress import Stages
from qualms.resources import SMALL as FEW_ATOMS
from qualms.resources import default_threads, limit_rayon, limited

PER_ATOM = "atomization_energy_per_atom"


# --- the sparse Gaussian process ---


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_with_all_environments_it_is_exact_gaussian_process_regression(molecules, baseline):
    train, new = molecules[:25], molecules[120:130]
    y = reference_values(train, PER_ATOM)
    noise = 0.02 * np.var(y)
    model = make_model(
        PER_ATOM, "intensive", n_representatives=10_000, noise=noise, baseline=baseline
    ).fit(train)

    def features(frames):
        centers = [np.arange(len(atoms)) for atoms in frames]
        X = model.fitted.representation.features(frames, centers).astype(np.float64)
        return np.split(X, np.cumsum([len(atoms) for atoms in frames])[:-1])

    def kernel(A, B):
        return np.array([[np.mean((a @ b.T) ** 2) for b in B] for a in A])

    X, X_new = features(train), features(new)
    K, K_new = kernel(X, X), kernel(X_new, X)
    center = 0.0 if baseline == "none" else y.mean()
    scale = np.mean((y - center) ** 2) / np.mean(np.diag(K))  # Eq. (17)
    solved = np.linalg.solve(scale * K + noise * np.eye(len(y)), scale * K_new.T)
    mean = center + solved.T @ (y - center)
    k_new = np.diag(kernel(X_new, X_new))
    variance = noise + scale * k_new - np.einsum("ij,ji->i", scale * K_new, solved)
    predicted, std = model.predict_pp(new)
    np.testing.assert_allclose(predicted, mean, rtol=1e-4, atol=1e-4 * np.std(y))
    # Features, and the factors of the variance, are float32: small differences of large numbers.
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=3e-3)


def twice(atoms):
    """Two cells of a crystal, as one structure."""
    double = atoms.repeat((2, 1, 1))
    double.info["energy"] = 2 * atoms.info["energy"]
    return double


def test_every_member_is_the_weighted_least_squares_solution_of_its_structures(alloys):
    noise, forces_noise = 1e-3, 3e-2
    frames = [twice(atoms) if i % 3 == 0 else atoms for i, atoms in enumerate(alloys[:14])]
    found = make_force_model(
        noise=noise**2,
        forces_noise=forces_noise**2,
        baseline="none",
        basis="environments",
        n_representatives=25,
        uncertainty="subsampling",
        centre="members",
        calibration="student",
    ).fit(frames)
    fitted = found.fitted
    terms = kernel_terms(fitted.representation, fitted.representatives)
    rows = oracle_forces.kernel_rows(terms, frames)
    M, sizes = len(fitted.representatives), np.array([len(atoms) for atoms in frames])
    K_E, K_F = rows.energies / sizes[:, None], rows.forces.reshape(-1, M)
    X = fitted.representatives.astype(float)
    K_MM = np.asarray(fitted.representation.kernel(X, X))
    y_E = reference_values(frames, "energy") / sizes
    y_F = np.concatenate([atoms.arrays["force"].ravel() for atoms in frames])
    L = np.linalg.cholesky(K_MM)
    prior = np.sum(y_F**2) / np.sum(np.linalg.solve(L, K_F.T) ** 2)
    new = oracle_forces.kernel_rows(terms, alloys[30:33])
    predicted = found.predict(alloys[30:33], forces=True)
    inside = membership(frames, found)
    for i in range(8):
        seen = inside[:, i].astype(bool)
        mine = np.repeat(seen, 3 * sizes)
        A = np.concatenate([K_E[seen] / noise, K_F[mine] / forces_noise, L.T / np.sqrt(prior)])
        b = np.concatenate([y_E[seen] / noise, y_F[mine] / forces_noise, np.zeros(M)])
        w = np.linalg.lstsq(A, b, rcond=None)[0]
        np.testing.assert_allclose(
            predicted.energy.uncalibrated.members[:, i], new.energies @ w, rtol=1e-6
        )
        np.testing.assert_allclose(
            predicted.forces.uncalibrated.members[..., i], new.forces @ w, atol=1e-6
        )


def test_out_of_bag_points_are_predicted_by_the_other_members(molecules):
    train = molecules[:120]
    model = make_model(n_representatives=150, uncertainty="subsampling", centre="members")
    model.fit(train)
    n_atoms = np.array([len(atoms) for atoms in train])
    members = model.predict(train).uncalibrated.members / n_atoms[:, None]
    y, absent = reference_values(train) / n_atoms, membership(train, model) == 0
    found, record = model.out_of_bag["energy"], model.record.quantities["energy"]
    assert record.n_out_of_bag == len(found.residuals) == len(np.unique(found.structure)) > 100
    expected = [(y[i] - members[i, absent[i]].mean()) for i in found.structure]
    stds = [members[i, absent[i]].std(ddof=1) for i in found.structure]
    # Features are float32 in training.
    np.testing.assert_allclose(found.residuals, expected, rtol=1e-5, atol=1e-4 * max(stds))
    np.testing.assert_allclose(found.ensemble_std, stds, rtol=1e-5)
    np.testing.assert_array_equal(found.n_members, absent[found.structure].sum(axis=1))
    assert record.rmse == pytest.approx(np.sqrt(np.mean(np.square(expected))))
    assert record.mae == pytest.approx(np.mean(np.abs(expected)))
    assert model.fitted.largest_ensemble_std == pytest.approx(max(stds))


def test_points_do_not_depend_on_the_number_of_representatives(molecules, monkeypatch):
    set_constant(monkeypatch, "N_KEPT", 50)
    few, many = (
        make_model(n_representatives=n).fit(molecules[:120]).out_of_bag["energy"] for n in (20, 200)
    )
    np.testing.assert_array_equal(few.structure, many.structure)
    assert 50 <= len(few.structure) < 60


# --- forces and stresses ---


def errors(model, frames):
    """Root mean squared errors of energies per atom, forces and stresses."""
    found = model.predict(frames, stress=True, forces=True)
    energy = (found.energy.mean - reference_values(frames, "energy")) / 4
    forces = found.forces.mean - np.concatenate([atoms.arrays["force"] for atoms in frames])
    stress = found.stress.mean - reference_values(frames, "virtual")
    return [float(np.sqrt(np.mean(z**2))) for z in (energy, forces, stress)]


def test_forces_and_stresses_are_learned(alloys, force_model):
    known, new = alloys[:26], alloys[26:]
    alone = make_force_model(forces=None, representation={"engine": "featomic", "smoothing": 0.5})
    without = errors(alone.fit(known), new)
    both = errors(force_model, new)
    assert both[0] < 0.5 * without[0]
    assert both[1] < 0.5 * without[1]
    assert both[2] < 0.05 * np.std(reference_values(new, "virtual"))
    only = make_force_model(forces=None, stress="virtual").fit(known)
    assert errors(only, new)[2] < 0.2 * np.std(reference_values(new, "virtual"))
    assert set(only.fitted.calibrations) == {"energy", "stress"}
    assert only.fitted.calibration_of("forces") is None


@pytest.mark.parametrize("basis", ["environments", "labels"])
def test_uncertainties_of_forces_are_calibrated(basis):
    new, covered = labelled_alloys(40, seed=5), []
    y = np.concatenate([atoms.arrays["force"] for atoms in new])
    for seed in range(4):
        model = make_force_model(n_members=16, basis=basis).fit(labelled_alloys(26, seed=10 + seed))
        predicted = model.predict(new, forces=True).forces
        covered.append(np.mean(np.abs(y - predicted.mean) < predicted.std))
    assert 0.6 < np.mean(covered) < 0.8
    own = model.fitted.calibration_of("forces")
    assert own != model.fitted.calibration
    assert own.n_points == 26 * 12


def test_few_forces_are_calibrated_as_the_energy(alloys):
    frames = copies(alloys[:20])
    for atoms in frames[5:]:
        del atoms.arrays["force"]
    with pytest.warns(QualmsWarning):
        model = make_force_model(uncertainty="subsampling").fit(frames)
    assert set(model.fitted.calibrations) == {"energy"}
    found = model.predict(alloys[30:32], forces=True)
    factors = found.energy.std / found.energy.uncalibrated.std
    ratio = found.forces.std / found.forces.uncalibrated.std
    np.testing.assert_allclose(ratio[:4], factors[0], rtol=1e-6)
    record = model.record.quantities["forces"]
    assert (record.n_rows, record.n_without, record.rmse) == (60, 15, None)


# --- what the result depends on ---


@pytest.mark.parametrize("selection", ["fps", "cur", "random"])
def test_same_seed_same_bytes(molecules, selection):
    first, again, other = (
        make_model(selection=selection, seed=seed, n_representatives=50).fit(molecules[:30])
        for seed in (3, 3, 4)
    )
    assert first.fitted.weights.tobytes() == again.fitted.weights.tobytes()
    same_predictions(first, again, molecules[120:125])
    drawn = [membership(molecules[:30], model) for model in (first, other)]
    assert not np.array_equal(*drawn)
    # The number of representatives is not changed.
    assert first.record.effective_rank == len(first.fitted.representatives) == 50
    assert not first.record.size_curve
    assert not first.record.size_limit


def test_duplicates_and_groups_are_in_or_out_together(molecules):
    frames = [*molecules[:40], molecules[0].copy()]
    frames[40].translate([1e-9, 0, 0])
    groups = [f"run {i // 4}" for i in range(40)] + ["run 9"]
    with pytest.warns(QualmsWarning):
        model = make_model(baseline="mean").fit(frames, groups=groups)
    assert model.record.n_duplicates == 1
    # The duplicate joins the first run and the last one.
    codes = np.array([*np.repeat(np.arange(10), 4) % 9, 0])
    with pytest.warns(QualmsWarning):
        counts = membership(frames, model, groups)
    assert len(np.unique(counts, axis=0)) == 9
    for code in range(9):
        assert len(np.unique(counts[codes == code], axis=0)) == 1


@pytest.mark.parametrize("resample", ["structures", "atoms"])
def test_atoms_of_a_structure_stay_together_unless_told(molecules, resample):
    model = make_model("shift", "atomic", resample=resample, replace=True).fit(molecules[:30])
    edges = np.cumsum([0, *(len(atoms) for atoms in molecules[:30])])
    counts = membership(molecules[:30], model)
    parts = [counts[a:b] for a, b in pairwise(edges)]
    assert counts.max() > 1
    split = sum(bool((part != part[0]).any()) for part in parts)
    assert split == (0 if resample == "structures" else 30)


def test_atoms_of_each_species_have_their_own_uncertainty(molecules):
    """Labels of hydrogen are exact, those of the others have noise."""
    ratios = []
    for seed in range(3):
        frames, rng = copies(molecules), np.random.default_rng(seed)
        for atoms in frames:
            near = np.exp(-(atoms.get_all_distances() ** 2)).sum(axis=1)
            atoms.arrays["charge"] = near + 0.1 * (atoms.numbers > 1) * rng.normal(size=len(atoms))
        model = make_model("charge", "atomic", n_members=16, seed=seed).fit(frames[:40])
        factors, new = model.fitted.calibrations["energy"].elements, frames[40:]
        ratios.append(factors["C"] / factors["H"])
        predicted, numbers = model.predict(new), np.concatenate([atoms.numbers for atoms in new])
        z = np.abs(predicted.mean - np.concatenate([atoms.arrays["charge"] for atoms in new]))
        for some in (numbers == 1, numbers > 1):
            assert 0.5 < np.mean(z[some] < predicted.std[some]) < 0.85
    assert np.median(ratios) > 1.2
    same = evaluate(model, new)["energy"].prediction
    np.testing.assert_allclose(same.std, predicted.std, rtol=1e-6)


def test_the_uncertainty_of_the_baseline_is_in_the_members(molecules):
    frames, rng = copies(molecules[:60]), np.random.default_rng(0)
    for atoms in frames:
        atoms.info["noise"] = float(len(atoms) * rng.normal())
    given = {"uncertainty": "subsampling", "centre": "members"}
    fitted = make_model("noise", **given).fit(frames).fitted
    X = np.array([[np.mean(a.numbers == z) for z in fitted.baseline.species] for a in frames])
    y = reference_values(frames, "noise") / [len(atoms) for atoms in frames]
    counts = membership(frames, make_model("noise", **given))
    for i in range(16):
        rows = np.repeat(np.arange(60), counts[:, i])
        expected = np.linalg.lstsq(X[rows], y[rows], rcond=None)[0]
        np.testing.assert_allclose(fitted.baseline.members[:, i], expected, rtol=1e-6, atol=1e-9)


def test_the_compression_sees_every_pair_of_elements(molecules):
    plain = [a for a in molecules if 9 not in a.numbers][:100]
    rare = next(a for a in molecules if 9 in a.numbers)
    data = take_census([*plain, rare], make_settings({"target": ENERGY})).data
    for seed in range(5):
        sample = passes.random_sample(data, np.random.default_rng(seed))
        assert len(plain) in sample  # the last one
        assert len(np.unique(sample)) == len(sample)


# --- targets without errors, and data that are too few ---


def test_a_constant_target_has_no_uncertainty(molecules):
    frames = copies(molecules[:30])
    for atoms in frames:
        atoms.info["constant"] = 2.5
    with pytest.warns(QualmsWarning):
        model = make_model("constant", "intensive").fit(frames)
    prediction = model.predict(molecules[120:130])
    np.testing.assert_allclose(prediction.mean, 2.5, rtol=1e-12)
    assert prediction.std.max() < 1e-12
    assert not any("uncertainty" in text for text in model.predict(molecules[120:130]).reasons)


def test_a_target_that_is_linear_in_the_composition_is_exact(molecules):
    frames = copies(molecules[:60])
    for atoms in frames:
        atoms.info["linear"] = 1.7 * float(np.sum(atoms.numbers)) + len(atoms)
    with pytest.warns(QualmsWarning):
        model = make_model("linear").fit(frames[:40])
    members = model.predict(frames[40:]).members
    expected = np.tile(reference_values(frames[40:], "linear")[:, None], members.shape[1])
    np.testing.assert_allclose(members, expected, rtol=1e-12)
    assert model.record.quantities["energy"].rmse is None


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
@pytest.mark.parametrize(
    ("n", "settings", "parameter"),
    [
        (0, {}, "frames"),
        (1, {}, "frames"),
        (4, {}, "baseline"),
        (20, {"subsample": 20}, "subsample"),
        (20, {"n_members": 2, "baseline": "mean"}, "n_members"),
        (20, {"baseline": "atoms"}, "baseline"),
        (20, {"memory": 1e6}, "memory"),
        (20, {"groups": [1] * 19}, "groups"),
        (20, {"groups": ["a"] * 20}, "groups"),
        (20, {"groups": list(range(20))}, "groups"),
        (20, {"groups": "no_such_key"}, "groups"),
    ],
)
def test_insufficient_data_are_rejected_before_the_work(
    molecules, monkeypatch, n, settings, parameter
):
    monkeypatch.setattr(passes, "stream_features", None)
    monkeypatch.setattr(training, "fit_features", None)
    groups = settings.pop("groups", None)
    with rejects(parameter):
        make_model(**settings).fit(molecules[:n], groups=groups)


# --- the number of representatives ---


def chains(n, wave, seed=0):
    """Chains of three atoms, whose target oscillates with the distances, with noise."""
    rng = np.random.default_rng(seed)
    frames = []
    for a, b in rng.uniform(1.0, 2.2, (n, 2)):
        energy = np.sin(wave * a) + np.sin(wave * b) + 0.05 * rng.normal()
        positions = [[0, 0, 0], [a, 0, 0], [a + b, 0, 0]]
        frames.append(Atoms("OHO", positions, info={"energy": energy}))
    return frames


def test_models_with_the_first_representatives_are_nested(monkeypatch):
    set_constant(monkeypatch, "SMALLEST", 10)
    given = {"target": "energy", "forces": "force", "stress": "virtual", "representation": SMOOTH}
    settings = make_settings(given | {"basis": "environments", "n_representatives": "auto"})
    problem = problem_of(labelled_alloys(12), settings)
    rows = rows_of(problem)
    sizes = [r for r in rows.novelty if r < len(rows.representatives)]
    assert len(sizes) == 2
    workers, stages = Workers(), Stages()
    for r in sizes:
        # The same representatives, whitened anew.
        features = passes.fit_features(problem, stages)
        some = rows.representatives.take(np.arange(r))
        X = some.features.astype(np.float64)
        factor = np.linalg.cholesky(features.kernel(X, X))
        whitening = Whitening(np.arange(r), factor)
        alone = replace(problem, size_limit="")
        explicit = passes.sum_rows(alone, features, some, some, whitening, [], workers, stages)
        nested = rows.leading(r)
        size = np.abs(explicit.kept.Phi).max()
        np.testing.assert_allclose(nested.kept.Phi, explicit.kept.Phi, atol=1e-5 * size)
        np.testing.assert_allclose(nested.whitening.factor, explicit.whitening.factor, atol=1e-7)
        np.testing.assert_allclose(nested.novelty[r], explicit.novelty[r], atol=1e-6)
        for name in given.keys() & {"energy", "forces", "stress"}:
            one, two = (rows_.sums.total(name).gram for rows_ in (nested, explicit))
            np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(two).max())


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
def test_more_representatives_are_chosen_where_the_target_varies_fast(monkeypatch, tmp_path):
    set_constant(monkeypatch, "SMALLEST", 8)
    soap, chosen = {"cutoff": 5.0, "n_radial": 6, "l_max": 2}, []
    for wave in (0.5, 8.0):
        model = make_model("energy", n_representatives="auto", representation=soap)
        record = model.fit(chains(100, wave)).record
        *_, largest = sizes = [*record.size_curve]
        assert sizes == sorted({largest // k for k in (8, 4, 2, 1) if largest // k >= 8})
        assert record.effective_rank == len(model.fitted.representatives) in sizes
        chosen.append(record.effective_rank)
    assert chosen == [sizes[0], sizes[-1]]
    model.save(tmp_path / "model")
    assert AtomisticModel.load(tmp_path / "model").record == model.record


def test_effort_memory_and_data_limit_the_number_of_representatives(molecules, monkeypatch):
    def chosen(n=None, **given):
        settings = make_settings({"target": ENERGY, **given})
        problem = problem_of(molecules[:n], settings)
        return problem.n_representatives, problem.size_limit

    assert chosen() == (5 * len(molecules), "the number of labels")
    set_constant(monkeypatch, "PER_LABEL", 1000)
    assert chosen(20)[1] == "the number of environments"
    limits = [chosen(effort=effort) for effort in ("fast", "default")]
    assert [size for size, _ in limits] == sorted({size for size, _ in limits})
    assert limits[0][1] == "effort"
    data = take_census(molecules, make_settings({"target": ENERGY})).data
    settings = make_settings({"target": ENERGY, "representation": "organic"})
    memory = training.memory_needed(settings, data, 500).together
    size, limit = chosen(effort="default", memory=memory)
    assert 250 <= size < limits[1][0]
    assert limit == "the memory"
    with rejects("memory"):
        chosen(n_representatives=3000, memory=0.9 * memory)


def test_models_whose_predictions_do_not_depend_on_their_number_have_more(alloys, monkeypatch):
    set_constant(monkeypatch, "_MOST", {"default": 20})
    numbers = {}
    for exponent in (2, 3):
        for forces in (None, "force"):
            given = {"target": "energy", "forces": forces, "basis": "environments"}
            given["representation"] = {"preset": "inorganic", "exponent": exponent}
            problem = problem_of(alloys, make_settings(given))
            assert problem.size_limit == "effort"
            numbers[exponent, forces] = problem.n_representatives
    assert numbers == {(2, None): 20, (2, "force"): 40, (3, None): 20, (3, "force"): 20}


# --- memory, progress, threads ---


def test_a_memory_limit_makes_it_recompute(molecules, caplog):
    caplog.set_level(logging.INFO)
    data = take_census(molecules, make_settings({"target": ENERGY})).data
    many = data.take(np.tile(np.arange(len(molecules)), 200))
    settings = make_settings(
        {"target": ENERGY, "representation": "organic", "n_representatives": 20}
    )
    cached, again = (
        training.memory_needed(settings, many, 20, cached=c).together for c in (True, False)
    )
    assert again < 0.5 * cached
    census = replace(take_census(molecules, settings), data=many)
    found = []
    for limit in (0.9 * again, 1.1 * again, 1.1 * cached):
        given = settings.model_copy(update={"memory": limit})
        try:
            found.append(training.resolve(given, census, Workers(), 1).cached)
        except InputError:
            found.append(None)
    assert found == [None, False, True]
    assert "computed twice" in caplog.text
    assert "kept" in caplog.text


@pytest.mark.parametrize("selection", ["fps", "cur", "random"])
def test_recomputed_features_give_the_same_model(molecules, monkeypatch, selection):
    train, new = molecules[:60], molecules[160:]
    resolve, models = training.resolve, []
    for cached, size in ((True, 10**6), (False, 10**6), (True, 300), (False, 300)):
        set_constant(monkeypatch, "part_size", lambda *_, size=size: size)
        monkeypatch.setattr(
            training, "resolve", lambda *a, c=cached: replace(resolve(*a), cached=c)
        )
        models.append(make_model(selection=selection, noise=1e-3).fit(train))
    kept, again, parts, parts_again = models
    for one, other in ((kept, again), (parts, parts_again)):
        np.testing.assert_array_equal(one.fitted.origins, other.fitted.origins)
        np.testing.assert_allclose(one.predict(new).mean, other.predict(new).mean, rtol=1e-5)
    assert len(np.unique(parts.fitted.origins, axis=0)) == parts.record.effective_rank
    rmse = [
        np.sqrt(np.mean((m.predict(new).mean - reference_values(new)) ** 2)) for m in (kept, parts)
    ]
    assert rmse[1] < 1.15 * rmse[0]
    if selection == "fps":  # representatives of parts cover all environments
        centers = [np.arange(len(atoms)) for atoms in train]
        X = kept.fitted.representation.features(train, centers)
        picks = parts.fitted.representatives
        radius = np.sqrt(max(np.min(np.sum((x - picks) ** 2, axis=1)) for x in X))
        assert radius <= 2 * farthest_points(X, 100).distances[-1]


def test_the_baseline_potential_is_computed_once(molecules, monkeypatch):
    """Also if features do not fit in the memory: the plan is made before."""
    calls = []

    class Counting(StoredPotential):
        def results(self, frames, wanted):
            calls.extend(frames)
            return super().results(frames, wanted)

    frames = copies(molecules[:40])
    for atoms in frames:
        atoms.info["cheap"] = 0.9 * atoms.info[ENERGY]
    model = make_model(baseline={"key": "cheap"})
    monkeypatch.setattr(training, "memory_needed", lambda *_, **options: needs(options))
    monkeypatch.setattr(
        AtomisticModel, "baseline_potential", Counting(model.settings.baseline_potential)
    )

    def needs(options):
        size = 1e15 if options.get("cached") else 1e8
        return training.MemoryNeeded(size, size, size)

    model.fit(frames)
    assert len(calls) == 40


def test_progress_is_shown_stage_by_stage(molecules):
    display = MagicMock()
    record = make_model(calibration="student").fit(molecules[:20], progress=display).record
    stages = [call.args[0] for call in display.begin.call_args_list]
    assert list(dict.fromkeys(stages)) == list(record.seconds)
    display.begin.assert_any_call("Features", record.n_environments)
    display.advance.assert_any_call(record.n_environments)
    assert display.end.call_count == len(stages)


def test_sizes_of_memory():
    sizes = {"8GB": 8e9, "500 mb": 5e8, "16GiB": 16 * 2**30, "1.5k": 1500, 3e6: 3e6, 7: 7}
    assert {text: parse_memory(text) for text in sizes} == sizes
    assert parse_memory(None) > 1e6
    for size in ("lots", "", "-1GB", "1.2.3GB", 0, -5, float("nan"), [1], True):
        with rejects("memory"):
            parse_memory(size)


def test_environment_variables_limit_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(resources, "_LOAD", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for text, expected in ((None, 8), ("3,2", 3), ("64", 8), ("many", 8), ("2", 2)):
        for name in ("OMP", "OPENBLAS", "MKL", "RAYON"):
            monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
        if text:
            monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert default_threads() == expected
        assert default_threads(5) == 5
        limit_rayon()
        assert os.environ.get("RAYON_NUM_THREADS") == (str(expected) if text else None)


def test_threads_leave_the_cores_of_others_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "allowed_threads", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(resources, "_LOAD", tmp_path / "loadavg")
    for running, expected in ((1, 4), (5, 4), (6, 3), (20, 1)):  # this process included
        (tmp_path / "loadavg").write_text(f"0.1 0.2 0.3 {running}/100 4711\n")
        assert default_threads() == expected
        assert default_threads(4) == 4


def test_limits_are_lowered_and_never_raised():
    def in_use():
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    with threadpool_limits(limits=1), limited(2):
        assert in_use() == {1}
    cases = {(4, None): 2, (1, None): 1, (2, FEW_ATOMS): 1, (2, FEW_ATOMS + 1): 2}
    with threadpool_limits(limits=2):
        for given, expected in cases.items():
            with limited(*given):
                assert in_use() == {expected}
        assert in_use() == {2}


@pytest.mark.filterwarnings("ignore:forces=")  # one dimension, and no noise
def test_elements_that_are_never_together_have_no_features():
    rng, frames = np.random.default_rng(0), []
    for i in range(40):
        atoms = Atoms(("OH", "CF")[i % 2], [[0, 0, 0], [1.1 + 0.3 * rng.random(), 0, 0]])
        atoms.calc = MorsePotential(r0=1.2, epsilon=0.5, rho0=3.0)
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        atoms.calc = None
        atoms.info["energy"], atoms.arrays["forces"] = energy, forces
        frames.append(atoms)
    representation = SMOOTH | {"compression": {"n_features": 12}}
    given = {"forces": "forces", "representation": representation, "baseline": "mean"}
    model = make_model("energy", **given).fit(frames[:30])
    errors = model.predict(frames[30:]).mean - [a.info["energy"] for a in frames[30:]]
    assert np.sqrt(np.mean(errors**2)) < 0.01
