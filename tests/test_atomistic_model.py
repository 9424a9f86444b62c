"""AtomisticModel: what predictions are, what they do not depend on, and runs that are cut short."""

import json
import shutil
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from atomistic_fixtures import (
    ENERGY,
    SMALL,
    Interrupt,
    copies,
    labelled_crystals,
    make_model,
    same_predictions,
    truth,
)

from qualms import AtomisticModel, InputError, Prediction, QualmsError, QualmsWarning, calibrate
from qualms.atomistic import memory as plan
from qualms.atomistic import memory as requirements
from qualms.atomistic import training
from qualms.atomistic import training as feature_stage
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.model import stream_chunks
from qualms.atomistic.settings import make_settings
from qualms.calibration.fitting import METHODS
from qualms.data import qm9
from qualms.progress import Stages
from qualms.regressors import training_set
from qualms.reproduce.study import study_subsamples

PER_ATOM = "atomization_energy_per_atom"


# --- kinds of targets ---


def test_an_extensive_property_is_the_number_of_atoms_times_an_average(molecules):
    total = make_model().fit(molecules[:60])
    average = make_model(PER_ATOM, "intensive").fit(molecules[:60])
    new = molecules[120:140]
    n_atoms = np.array([len(atoms) for atoms in new])
    one, other = total.predict(new), average.predict(new)
    np.testing.assert_allclose(one.members, other.members * n_atoms[:, None], rtol=1e-8)
    np.testing.assert_allclose(one.std, other.std * n_atoms, rtol=1e-6)
    for a, b in zip(total.predict_pp(new), average.predict_pp(new), strict=True):
        np.testing.assert_allclose(a, b * n_atoms, rtol=1e-6)
    errors = one.mean - truth(new)
    assert np.sqrt(np.mean(errors**2)) < 0.1 * np.std(truth(new))
    assert 0.4 < np.mean(np.abs(errors) < one.std) < 0.9


def test_twice_the_cell_is_twice_the_energy():
    crystals = labelled_crystals(30)
    for atoms in crystals:
        atoms.info["per_atom"] = atoms.info["energy"] / len(atoms)
    new = crystals[25:]
    doubled = [atoms * (1, 2, 1) for atoms in new]
    for target, kind, factor in (("energy", "extensive", 2), ("per_atom", "intensive", 1)):
        model = make_model(target, kind).fit(crystals[:25])
        one, two = model.predict(new), model.predict(doubled)
        np.testing.assert_allclose(two.members, factor * one.members, rtol=1e-5)
        np.testing.assert_allclose(two.std, factor * one.std, rtol=1e-3)
        np.testing.assert_allclose(model.predict_pp(doubled)[1], factor * model.predict_pp(new)[1])
        assert np.std(one.mean - truth(new, target)) < 0.5 * np.std(truth(new, target))


def test_atoms_of_chosen_species(molecules, shift_model):
    new = molecules[120:150]
    wanted = [np.flatnonzero(atoms.numbers == 1) for atoms in new]
    y = np.concatenate([a.arrays["shift"][w] for a, w in zip(new, wanted, strict=True)])
    prediction = shift_model.predict(new)
    assert prediction.shape == y.shape
    assert np.std(prediction.mean - y) < 0.5 * np.std(y)
    for predicted, expected in zip(shift_model.target_atoms(new), wanted, strict=True):
        np.testing.assert_array_equal(predicted, expected)
    edges = pairwise(np.cumsum([0, *map(len, wanted)]))
    by_structure = shift_model.predict_atoms(new)
    for contribution, (begin, end) in zip(by_structure, edges, strict=True):
        np.testing.assert_array_equal(contribution.members, prediction.members[begin:end])
    n_hydrogen = sum(np.count_nonzero(a.numbers == 1) for a in molecules[:60])
    assert shift_model.record.n_rows == shift_model.record.n_environments == n_hydrogen


def test_structures_without_the_wanted_atoms_are_predicted_as_nothing(shift_model):
    oxide = molecule("CO2")
    assert shift_model.predict([oxide]).shape == (0,)
    assert shift_model.predict([oxide, molecule("H2O")]).shape == (2,)
    assert [p.shape for p in shift_model.predict_atoms([oxide, molecule("H2O")])] == [(0,), (2,)]
    assert not shift_model.extrapolates([oxide])[0]


def test_what_has_no_label_is_skipped_and_counted(molecules):
    frames = copies(molecules[:70])
    kept = [i for i in range(70) if i % 10]
    for i in range(0, 70, 10):
        frames[i].info[ENERGY] = [None, np.nan][i % 20 == 0]
    del frames[0].info[ENERGY]
    model = make_model().fit(frames)
    assert (model.record.n_structures, model.record.n_unlabelled) == (63, 7)
    assert "7 unlabelled skipped" in model.summary()
    same_predictions(model, make_model().fit([frames[i] for i in kept]), molecules[120:130])
    # Representatives are named as in what was given.
    assert set(model.fitted.origins[:, 0]) <= set(kept)


def test_atoms_without_a_label_are_skipped_and_counted(molecules):
    frames = copies(molecules[:30])
    for atoms in frames:
        atoms.arrays["shift"][atoms.numbers > 1] = np.nan
    frames[3].arrays["shift"][:] = np.nan
    del frames[4].arrays["shift"]
    model = make_model("shift", "atomic").fit(frames)
    rest = [a for i, a in enumerate(frames) if i not in (3, 4)]
    n = sum(np.count_nonzero(a.numbers == 1) for a in rest)
    assert (model.record.n_structures, model.record.n_rows) == (28, n)
    assert model.record.n_unlabelled == sum(map(len, frames)) - n
    # Without species, atoms of the elements that have labels are predicted.
    new = molecules[120:122]
    assert model.predict(new).shape == (sum(np.count_nonzero(a.numbers == 1) for a in new),)


def test_energies_of_isolated_atoms_given_or_found(molecules):
    energies = {"H": -13.6, "C": -1029.9, "N": -1485.3, "O": -2042.6, "F": -2713.5}
    frames = copies(molecules[:60])
    for atoms in frames:
        atoms.info["total"] = atoms.info[ENERGY] + sum(energies[s] for s in atoms.symbols)
    single = [Atoms(s, info={"config_type": "isolated_atom", "total": energies[s]}) for s in "HCNO"]
    single += [Atoms("F", info={"config_type": "IsolatedAtom", "total": energies["F"]})]
    found = make_model("total", baseline="atoms").fit(frames + single)
    given = make_model("total", baseline=energies).fit(frames)
    assert (found.record.n_isolated, found.record.n_structures) == (5, 60)
    same_predictions(found, given, molecules[120:130])
    # The same as to learn what is left, but for the rounding of large numbers.
    plain = make_model(baseline=dict.fromkeys(energies, 0.0)).fit(frames)
    offset = [sum(energies[s] for s in atoms.symbols) for atoms in molecules[120:130]]
    np.testing.assert_allclose(
        found.predict(molecules[120:130]).members,
        plain.predict(molecules[120:130]).members + np.array(offset)[:, None],
        rtol=1e-7,
    )


def test_what_is_linear_in_the_composition_is_exact(molecules):
    frames = copies(molecules[:60])
    for atoms in frames:
        atoms.info["linear"] = 1.7 * float(np.sum(atoms.numbers)) + len(atoms)
    with pytest.warns(QualmsWarning, match="right to rounding"):
        model = make_model("linear").fit(frames[:40])
    prediction = model.predict(frames[40:])
    expected = np.tile(truth(frames[40:], "linear")[:, None], 16)
    np.testing.assert_allclose(prediction.members, expected, rtol=1e-12)
    assert not model.extrapolates(frames[40:]).any()
    assert "not known" in model.summary()


def test_the_uncertainty_of_the_baseline_is_in_the_members(molecules):
    frames = copies(molecules[:60])
    rng = np.random.default_rng(0)
    for atoms in frames:
        atoms.info["noise"] = float(len(atoms) * rng.normal())
    model = make_model("noise").fit(frames)
    baseline, species = model.fitted.baseline, model.fitted.representation.species
    X = np.array([[np.mean(atoms.numbers == z) for z in species] for atoms in frames])
    y = truth(frames, "noise") / [len(atoms) for atoms in frames]
    for i in range(16):
        rows = np.repeat(np.arange(60), model.fitted.membership[:, i])
        fitted = np.linalg.lstsq(X[rows], y[rows], rcond=None)[0]
        np.testing.assert_allclose(baseline.members[:, i], fitted, rtol=1e-6, atol=1e-9)
    assert baseline.members.std(axis=1).min() > 0.01


def test_a_constant_has_no_error(molecules):
    frames = copies(molecules[:30])
    for atoms in frames:
        atoms.info["constant"] = 2.5
    with pytest.warns(QualmsWarning, match="All targets are the same"):
        model = make_model("constant", "intensive").fit(frames)
    prediction = model.predict(molecules[120:140])
    np.testing.assert_allclose(prediction.mean, 2.5, rtol=1e-12)
    assert prediction.std.max() < 1e-12
    assert not model.extrapolates(molecules[120:140]).any()


# --- the projected process ---


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_with_all_environments_it_is_exact_gaussian_process_regression(molecules, baseline):
    train, new = molecules[:30], molecules[120:140]
    y = truth(train, PER_ATOM)
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
    k_new = np.array([np.mean((x @ x.T) ** 2) for x in X_new])
    center = 0.0 if baseline == "none" else y.mean()
    scale = np.mean((y - center) ** 2) / np.mean(np.diag(K))  # Eq. (17)
    solved = np.linalg.solve(scale * K + noise * np.eye(len(y)), scale * K_new.T)
    mean = center + solved.T @ (y - center)
    variance = noise + scale * k_new - np.einsum("ij,ji->i", scale * K_new, solved)
    predicted, std = model.predict_pp(new)
    np.testing.assert_allclose(predicted, mean, rtol=1e-4, atol=1e-4 * np.std(y))
    # Features, and the factors of the variance, are float32: small differences of large numbers.
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=3e-3)


def test_without_its_factors_there_is_no_variance(molecules):
    model = make_model(keep_pp=False).fit(molecules[:20])
    with pytest.raises(InputError, match="keep_pp"):
        model.predict_pp(molecules[:2])


# --- predictions ---


@pytest.mark.parametrize("calibration", METHODS)
@pytest.mark.parametrize(("target", "kind"), [(ENERGY, "extensive"), (PER_ATOM, "intensive")])
def test_atoms_add_up_member_by_member(molecules, target, kind, calibration):
    model = make_model(target, kind, calibration=calibration).fit(molecules[:40])
    new = molecules[120:125]
    whole, atoms = model.predict(new), model.predict_atoms(new)
    combine = np.sum if kind == "extensive" else np.mean
    for i, parts in enumerate(atoms):
        assert parts.shape == (len(new[i]),)
        added = combine(parts.members, axis=0)
        np.testing.assert_allclose(added, whole.members[i], rtol=1e-5)
        np.testing.assert_allclose(np.std(added, ddof=1), whole.std[i], rtol=1e-3)
    np.testing.assert_allclose(model.predict_mean(new), whole.mean, rtol=1e-12)
    assert (whole.std == whole.uncalibrated.std).all() == (calibration == "none")


def test_a_prediction_depends_on_its_structure_alone(molecules, energy_model):
    new = molecules[120:140]
    together = energy_model.predict(new)
    for i in (0, 7, 19):
        alone = energy_model.predict([new[i]])
        np.testing.assert_allclose(alone.members[0], together.members[i], rtol=1e-6)
    shuffled = [atoms[np.random.default_rng(0).permutation(len(atoms))] for atoms in new]
    for atoms in shuffled:
        atoms.rotate(40, "x")
        atoms.translate([3, 4, 5])
    moved = energy_model.predict(shuffled)
    np.testing.assert_allclose(moved.members, together.members, rtol=1e-5)


def test_batches_make_no_difference(molecules, energy_model):
    new = molecules[120:150]
    chunks = list(stream_chunks(energy_model.fitted, iter(new), batch=40))
    assert len(chunks) > 5
    pieces = Prediction.concatenate([chunk.predict(chunk.rows()) for chunk in chunks])
    whole = energy_model.predict(new)
    np.testing.assert_allclose(pieces.members, whole.members, rtol=1e-6)
    np.testing.assert_allclose(pieces.uncalibrated.std, whole.uncalibrated.std, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m, f: m.predict([]), "no structures"),
        (lambda m, f: m.predict(f[0]), r"\[atoms\]"),
        (lambda m, f: m.predict(f[:1], unknown_species="skip"), "unknown_species"),
        (lambda m, f: m.predict([Atoms()]), r"frames\[0\]=no atoms"),
        (lambda m, f: m.target_atoms(f[:1]), "'atomic'"),
        (lambda m, f: make_model().fit(f[0]), r"\[atoms\]"),
        (lambda m, f: make_model().fit([]), "at least 2"),
        (lambda m, f: make_model().fit(f[:1]), "at least 2 different"),
        (lambda m, f: make_model().fit(f[:20], groups=[1] * 19), "one for each of 20"),
        (lambda m, f: make_model().fit(f[:20], groups=["a"] * 20), "at least 2 different"),
        (lambda m, f: make_model().fit(f[:4]), "'composition'.*none is left to calibrate"),
        (lambda m, f: make_model(subsample=20).fit(f[:20]), "subsample=20"),
        (lambda m, f: make_model(memory="1MB").fit(f[:20]), "memory=1.0 MB"),
        (lambda m, f: make_model(memory="lots"), "memory='lots'"),
        (lambda m, f: make_model(memory=[1]), r"memory=\[1\]"),
        (lambda m, f: make_model(representation={"scale": 3}), "unknown scale"),
        (lambda m, f: make_model(representation={5: 3}), "unknown 5"),
        (lambda m, f: make_model(representation={"representation": 1}), "unknown repr"),
        (lambda m, f: make_model(baseline="atoms").fit(f[:20]), "isolated atoms in the data: none"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(molecules, energy_model, call, match):
    with pytest.raises(InputError, match=match) as caught:
        call(energy_model, molecules)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("n", "settings"),
    [(1, {}), (4, {}), (20, {"subsample": 20}), (20, {"baseline": "atoms"}), (20, {"memory": 1e6})],
)
def test_what_cannot_be_trained_is_refused_before_the_work(molecules, monkeypatch, n, settings):
    monkeypatch.setattr(feature_stage, "stream_features", None)
    with pytest.raises(InputError):
        make_model(**settings).fit(molecules[:n])


def test_without_a_calibration_the_fewest_structures_will_do(molecules):
    model = make_model(calibration="none", baseline="mean")
    with pytest.warns(QualmsWarning, match="The spread is used as it is"):
        model.fit(molecules[:2])
    assert (model.predict(molecules[:2]).std > 0).all()
    assert model.record.rmse is None


def test_bad_structures_are_named_as_they_were_given(molecules):
    frames = copies(molecules[:20])
    del frames[2].info[ENERGY]
    frames[7].positions[1] = frames[7].positions[0]
    with pytest.raises(InputError, match=r"frames\[7\]=atoms 0"):
        make_model().fit(frames)
    frames[2].positions[:] = 0.0  # is not used, hence does no harm
    frames[7].positions[1] += 0.8
    make_model().fit(frames)


def test_what_is_not_trained_says_so(molecules):
    with pytest.raises(QualmsError, match="call fit first"):
        make_model().predict(molecules[:1])
    assert "not trained" in repr(make_model())


def test_the_summary_tells_what_was_learned(energy_model):
    text = energy_model.summary()
    for fact in (
        f"{ENERGY} in eV (extensive)",
        "120 structures",
        "H, C, N, O, F",
        "cutoff 4 Å",
        "150 of 150",
        "16, sub-samples of 0.5",
        f"eV/atom ({energy_model.record.n_internal} rows",
        f"α = {energy_model.fitted.calibration.alpha:.3f}",
        energy_model.provenance.data_digest[:12],
    ):
        assert fact in text


def test_training_structures_are_judged_by_members_that_had_not_seen_them(molecules, energy_model):
    train = molecules[:120]
    n_atoms = np.array([len(atoms) for atoms in train])
    members = energy_model.predict(train).uncalibrated.members / n_atoms[:, None]
    residuals, spreads = [], []
    for y, row, seen in zip(
        truth(train) / n_atoms, members, energy_model.fitted.membership, strict=True
    ):
        if np.count_nonzero(seen == 0) >= 3:
            residuals.append(y - row[seen == 0].mean())
            spreads.append(row[seen == 0].std(ddof=1))
    np.testing.assert_allclose(energy_model.internal.residuals, residuals, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(energy_model.internal.spread, spreads, rtol=1e-5)
    assert energy_model.record.rmse == pytest.approx(np.sqrt(np.mean(np.square(residuals))))
    assert energy_model.record.mae == pytest.approx(np.mean(np.abs(residuals)))
    assert energy_model.record.n_internal == len(residuals) > 100
    assert energy_model.fitted.training_spread == pytest.approx(max(spreads))


# --- what the result depends on ---


@pytest.mark.parametrize("selection", ["fps", "cur", "random"])
def test_same_seed_same_bytes(molecules, selection):
    first, again, other = (
        make_model(selection=selection, seed=seed, n_representatives=50).fit(molecules[:30])
        for seed in (3, 3, 4)
    )
    assert first.fitted.weights.tobytes() == again.fitted.weights.tobytes()
    same_predictions(first, again, molecules[120:130])
    assert not np.array_equal(first.fitted.membership, other.fitted.membership)
    same = np.array_equal(first.fitted.origins, other.fitted.origins)
    assert same == (selection != "random")


def test_the_full_model_does_not_depend_on_the_order(molecules):
    # Sub-samples are drawn by position, so the members do.
    train = molecules[:30]
    order = np.random.default_rng(1).permutation(30)
    models = [
        make_model(n_representatives=10_000, noise=1e-4).fit(frames)
        for frames in (train, [train[i] for i in order])
    ]
    for a, b in zip(*(m.predict_pp(molecules[120:140]) for m in models), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_cores_change_rounding_only(molecules):
    one, two = (make_model(threads=n).fit(molecules[:40]) for n in (1, 2))
    np.testing.assert_array_equal(one.fitted.membership, two.fitted.membership)
    new = molecules[120:130]
    np.testing.assert_allclose(one.predict(new).mean, two.predict(new).mean, rtol=1e-5)


def test_copies_are_in_or_out_together(molecules):
    frames = [*molecules[:40], *copies(molecules[10:13])]
    frames[41].translate([1e-9, 0, 0])
    with pytest.warns(QualmsWarning, match="3 of 43 structures repeat"):
        model = make_model().fit(frames)
    assert model.record.n_duplicates == 3
    membership = model.fitted.membership
    np.testing.assert_array_equal(membership[10:13], membership[40:43])
    assert 0 < membership[10:13].mean() < 1


def test_groups_are_in_or_out_together_and_copies_join_them(molecules):
    frames = [*molecules[:40], molecules[0].copy()]
    groups = [f"run {i // 4}" for i in range(40)] + ["run 9"]
    with pytest.warns(QualmsWarning, match="1 of 41"):
        model = make_model(baseline="mean").fit(frames, groups)
    membership = model.fitted.membership
    for i in range(10):
        assert (membership[4 * i : 4 * i + 4] == membership[4 * i]).all()
    np.testing.assert_array_equal(membership[0], membership[39])
    assert len(np.unique(membership, axis=0)) == 9
    plain = make_model(baseline="mean").fit(molecules[:40]).fitted.membership
    assert len(np.unique(plain, axis=0)) > 30


@pytest.mark.parametrize("resample", ["structures", "atoms"])
def test_atoms_of_a_structure_stay_together_unless_told(molecules, resample):
    model = make_model("shift", "atomic", resample=resample).fit(molecules[:30])
    edges = np.cumsum([0, *(len(atoms) for atoms in molecules[:30])])
    parts = [model.fitted.membership[a:b] for a, b in pairwise(edges)]
    divided = sum(bool((part != part[0]).any()) for part in parts)
    assert divided == (0 if resample == "structures" else 30)


def test_a_bootstrap_draws_with_repetitions(molecules):
    model = make_model(replace=True).fit(molecules[:40])
    assert model.fitted.membership.max() > 1
    assert "bootstrap" in model.summary()


def test_every_species_gets_its_share(molecules):
    shared, own = (make_model(per_species=p).fit(molecules[:40]) for p in (False, True))
    numbers = [molecules[s].numbers[a] for s, a in own.fitted.origins]
    everything = np.concatenate([atoms.numbers for atoms in molecules[:40]])
    for z in (1, 6, 7, 8):
        share = np.mean(everything == z)
        assert np.mean(np.array(numbers) == z) == pytest.approx(share, abs=0.05)
    assert not np.array_equal(shared.fitted.origins, own.fitted.origins)


# --- memory ---


@pytest.fixture
def modes(monkeypatch, tmp_path):
    """Where features live, whatever the memory: set `.mode`, and perhaps `.n_candidates`."""
    forced = SimpleNamespace(mode="keep", n_candidates=None)
    real = training.make_plan

    def make_plan(**arguments):
        made = replace(real(**arguments), mode=forced.mode)
        return replace(made, n_candidates=forced.n_candidates or made.n_candidates)

    monkeypatch.setattr(training, "make_plan", make_plan)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return forced


def test_less_memory_makes_it_spill_and_then_recompute(molecules, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(requirements, "BLOCK", 64)  # as if 40 molecules were many
    seen = []

    def fit(memory):
        model = make_model(memory=memory)
        return model.fit(molecules[:40], on_plan=lambda made, data: seen.append(made))

    kept = fit("8GB")
    limit = seen[0].memory - 1
    spilled = fit(limit)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda where: SimpleNamespace(free=0))
    twice = fit(limit)
    assert [made.mode for made in seen] == ["keep", "spill", "recompute"]
    new = molecules[120:130]
    same_predictions(kept, spilled, new)
    np.testing.assert_allclose(twice.predict(new).mean, kept.predict(new).mean, rtol=0.01)
    assert not list(tmp_path.iterdir())


def test_a_smaller_pool_changes_the_choice_only(molecules, modes):
    kept = make_model().fit(molecules[:60])
    modes.mode = "recompute"
    same_predictions(kept, make_model().fit(molecules[:60]), molecules[120:130])
    modes.n_candidates = 400
    pooled = make_model().fit(molecules[:60])
    structures = set(pooled.fitted.origins[:, 0])
    assert sum(len(molecules[s]) for s in structures) <= 400
    np.testing.assert_array_equal(kept.fitted.membership, pooled.fitted.membership)
    new = molecules[120:150]
    difference = kept.predict(new).mean - pooled.predict(new).mean
    assert 0 < np.sqrt(np.mean(difference**2)) < 0.1 * np.std(truth(new))


@pytest.mark.parametrize("stage", ["Power spectra", "Representatives", "Kernel rows", "Members"])
def test_nothing_is_left_behind_after_an_interruption(molecules, modes, tmp_path, stage):
    modes.mode = "spill"
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(molecules[:20], progress=Interrupt(stage))
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_behind_after_an_error(molecules, modes, tmp_path, monkeypatch):
    modes.mode = "spill"
    monkeypatch.setattr(training, "select_representatives", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_model().fit(molecules[:20])
    assert not list(tmp_path.iterdir())


# --- interruptions ---

VARIANTS = {
    "plain": {},
    "random": {
        "selection": "random",
        "representation": SMALL | {"compression": {"n_features": 60}, "normalize": False},
    },
}


@pytest.mark.parametrize("stage", ["Representatives", "Kernel rows"])
@pytest.mark.parametrize("mode", ["keep", "spill", "recompute"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(
    molecules, modes, tmp_path, monkeypatch, variant, mode, stage
):
    modes.mode, modes.n_candidates = mode, 400 if mode == "recompute" else None
    settings, frames, directory = VARIANTS[variant], molecules[:30], tmp_path / "checkpoint"
    whole = make_model(**settings).fit(frames)
    with pytest.raises(KeyboardInterrupt):
        make_model(**settings).fit(frames, checkpoint=directory, progress=Interrupt(stage))
    calls = []
    real = feature_stage.stream_features
    monkeypatch.setattr(
        feature_stage, "stream_features", lambda *a, **k: calls.append(a) or real(*a, **k)
    )
    monkeypatch.setattr(feature_stage, "fit_representation", None)
    if stage == "Kernel rows":
        monkeypatch.setattr(training, "select_representatives", None)
    resumed = make_model(**settings).fit(frames, checkpoint=directory, resume=True)
    assert len(calls) == (2 if mode == "recompute" else 0)
    same_predictions(resumed, whole, molecules[120:130])
    np.testing.assert_array_equal(resumed.fitted.origins, whole.fitted.origins)
    assert not directory.exists()


def test_a_run_may_be_resumed_with_another_memory_limit(molecules, modes, tmp_path):
    modes.mode, modes.n_candidates = "recompute", 400
    whole = make_model().fit(molecules[:40])
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(molecules[:40], checkpoint=tmp_path / "c", progress=Interrupt("Whitening"))
    for modes.mode, modes.n_candidates in (("recompute", 300), ("keep", None)):
        saved = tmp_path / modes.mode
        shutil.copytree(tmp_path / "c", saved)
        resumed = make_model().fit(molecules[:40], checkpoint=saved, resume=True)
        np.testing.assert_array_equal(resumed.fitted.origins, whole.fitted.origins)
        new = molecules[120:130]
        np.testing.assert_allclose(resumed.predict(new).mean, whole.predict(new).mean, rtol=1e-6)


def interrupted(molecules, directory, **settings):
    with pytest.raises(KeyboardInterrupt):
        make_model(**settings).fit(
            molecules[:20], checkpoint=directory, progress=Interrupt("Representatives")
        )


def test_half_of_the_features_are_computed_again(molecules, tmp_path):
    directory = tmp_path / "checkpoint"
    display = Interrupt("Power spectra", done=1)
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(molecules[:20], checkpoint=directory, progress=display)
    resumed = make_model().fit(molecules[:20], checkpoint=directory, resume=True)
    same_predictions(resumed, make_model().fit(molecules[:20]), molecules[120:125])


def test_other_data_or_settings_are_not_resumed(molecules, tmp_path):
    directory = tmp_path / "checkpoint"
    interrupted(molecules, directory)
    before = (directory / "features").read_bytes()
    moved = copies(molecules[:20])
    moved[3].positions[0, 0] += 1e-3
    relabelled = copies(molecules[:20])
    relabelled[3].info[ENERGY] += 1e-3
    for frames, settings in (
        (moved, {}),
        (relabelled, {}),
        (molecules[:19], {}),
        (molecules[:20], {"seed": 1}),
        (molecules[:20], {"representation": SMALL | {"cutoff": 4.1}}),
    ):
        with pytest.raises(InputError, match=r"of the same data and settings.*Run without"):
            make_model(**settings).fit(frames, checkpoint=directory, resume=True)
        assert (directory / "features").read_bytes() == before
    # Not even to move a label from an atom to its neighbour.
    frames = copies(molecules[:20])
    for atoms in frames:
        atoms.arrays["shift"][0] = np.nan
    shifts = {"target": "shift", "kind": "atomic"}
    interrupted(frames, tmp_path / "atoms", **shifts)
    labels = frames[0].arrays["shift"]
    labels[0], labels[1] = labels[1], np.nan
    with pytest.raises(InputError, match="same data"):
        make_model(**shifts).fit(frames, checkpoint=tmp_path / "atoms", resume=True)


@pytest.mark.parametrize("file", ["manifest.json", "features", "selection"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", None])
def test_damaged_checkpoints(molecules, tmp_path, file, content):
    directory = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(molecules[:20], checkpoint=directory, progress=Interrupt("Kernel rows"))
    path = directory / file
    path.write_bytes(content) if content is not None else path.unlink()
    if file == "manifest.json" and content is None:
        match = "a new directory, or one of an earlier run"
    else:
        match = "resume=|checkpoint="
    with pytest.raises(InputError, match=match):
        make_model().fit(molecules[:20], checkpoint=directory, resume=True)
    assert directory.exists()


def test_a_new_run_replaces_what_an_older_one_left(molecules, tmp_path):
    directory = tmp_path / "checkpoint"
    interrupted(molecules, directory, representation=SMALL | {"n_radial": 4})
    interrupted(molecules, directory)
    resumed = make_model().fit(molecules[:20], checkpoint=directory, resume=True)
    same_predictions(resumed, make_model().fit(molecules[:20]), molecules[120:125])
    assert not directory.exists()


def test_directories_of_others_are_left_alone(molecules, tmp_path):
    (tmp_path / "thesis.tex").write_text("all I have")
    for manifest in (None, "{}", "[]"):
        if manifest is not None:
            (tmp_path / "manifest.json").write_text(manifest)
        with pytest.raises(InputError, match="a new directory"):
            make_model().fit(molecules[:20], checkpoint=tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "all I have"


def test_a_run_that_fails_leaves_no_checkpoint_unless_there_is_one_to_resume(molecules, tmp_path):
    directory = tmp_path / "checkpoint"
    with pytest.raises(InputError, match="composition"):
        make_model().fit(molecules[:4], checkpoint=directory)
    assert not directory.exists()
    interrupted(molecules, directory)
    with pytest.raises(InputError, match="memory"):
        make_model(memory="1MB").fit(molecules[:20], checkpoint=directory, resume=True)
    assert json.loads((directory / "manifest.json").read_text())["stages"] == {"features": {}}


# --- extrapolation ---


def test_what_is_known_is_not_extrapolation(molecules, energy_model, shift_model):
    assert energy_model.extrapolates(molecules[:120]).mean() <= 0.02
    assert energy_model.extrapolates(molecules[120:]).mean() <= 0.08
    assert shift_model.extrapolates(molecules[:60]).mean() <= 0.02


@pytest.mark.parametrize("factor", [0.6, 0.85, 1.4, 5.0])
def test_strange_structures_are_flagged(molecules, energy_model, shift_model, factor):
    strange = copies(molecules[120:130])
    for atoms in strange:
        atoms.positions *= factor
    assert energy_model.extrapolates(strange).mean() > 0.9
    assert shift_model.extrapolates(strange).mean() > 0.7


def test_molecules_too_large_or_too_small_by_a_tenth_are_flagged():
    """No single environment is very strange, but all are a little."""
    molecules = qm9(n=350)
    model = AtomisticModel(ENERGY, n_representatives=300, threads=1).fit(molecules[:300])
    assert model.extrapolates(molecules[300:]).mean() <= 0.06
    for factor in (0.9, 1.1):
        strange = copies(molecules[300:])
        for atoms in strange:
            atoms.positions *= factor
        assert model.extrapolates(strange).mean() > 0.9


def test_unknown_species_are_refused_or_left_out(molecules, energy_model, shift_model):
    known, chloride = molecule("CH4"), molecule("CH3Cl")
    frames = [known, chloride]
    for call in (energy_model.predict, energy_model.predict_pp, shift_model.extrapolates):
        with pytest.raises(InputError, match=r"frames=Cl in .*frames\[1\].*H, C, N, O, F"):
            call(frames)
    without = chloride[[i for i, s in enumerate(chloride.symbols) if s != "Cl"]]
    ignored = energy_model.predict(frames, unknown_species="ignore")
    expected = energy_model.predict([known, without])
    np.testing.assert_allclose(ignored.members, expected.members, rtol=1e-6)
    assert energy_model.extrapolates(frames, unknown_species="ignore")[1]
    assert shift_model.extrapolates(frames, unknown_species="ignore").tolist()[1]
    contributions = energy_model.predict_atoms(frames, unknown_species="ignore")
    assert [len(p) for p in contributions] == [5, 4]
    with pytest.raises(InputError, match="Cl"):
        energy_model.predict([Atoms("Cl")], unknown_species="ignore")


def test_an_atom_without_neighbours_is_no_problem(molecules):
    frames = copies(molecules[:30]) + [Atoms(s, info={ENERGY: 0.0}) for s in "HCNOF"]
    model = make_model().fit(frames)
    prediction = model.predict([Atoms("H"), Atoms("H2", [[0, 0, 0], [0, 0, 30.0]])])
    np.testing.assert_allclose(prediction.members[1], 2 * prediction.members[0], rtol=1e-6)


# --- judging ---

ROWS = {
    "raw",
    "linear (validation)",
    "power (validation)",
    "linear (internal)",
    "power (internal)",
    "student (internal)",
    "shrinkage (internal)",
    "GPR PP",
}


def test_every_calibration_is_judged(molecules, energy_model):
    test, validation = copies(molecules[120:160]), molecules[160:]
    del test[5].info[ENERGY]
    result = evaluate(energy_model, test, validation)
    assert set(result.rows) == ROWS
    assert (len(result.y), result.n_unlabelled) == (39, 1)
    assert result.units == "eV/atom"
    assert result.validation == "40 validation points"
    del test[5]
    n_atoms = [len(atoms) for atoms in test]
    np.testing.assert_allclose(result.y * n_atoms, truth(test))
    expected = energy_model.predict(test)
    np.testing.assert_allclose(result.prediction.mean * n_atoms, expected.mean)
    np.testing.assert_allclose(result.prediction.std * n_atoms, expected.std)
    rows = result.rows
    assert rows["student (internal)"].log_likelihood == pytest.approx(
        rows["linear (validation)"].log_likelihood, abs=0.3
    )
    rmse = np.sqrt(np.mean((result.prediction.mean - result.y) ** 2))
    for name in ROWS - {"GPR PP"}:
        assert rows[name].rmse == pytest.approx(rmse)


def test_without_a_validation_set_halves_judge_each_other(molecules, energy_model):
    result = evaluate(energy_model, molecules[120:160])
    assert set(result.rows) == ROWS
    assert "half" in result.validation
    raw = result.prediction.uncalibrated
    variance = np.empty(40)
    for half, other in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        alpha = calibrate(result.y[other], raw[other], method="linear").alpha
        variance[half] = (alpha * raw.std[half]) ** 2
    assert result.rows["linear (validation)"].sharpness == pytest.approx(np.sqrt(variance.mean()))
    few = evaluate(energy_model, molecules[120:125])
    assert set(few.rows) == {name for name in ROWS if "validation" not in name}


def test_halves_do_not_share_a_structure(molecules, shift_model):
    test = molecules[120:140]
    result = evaluate(shift_model, test)
    raw = result.prediction.uncalibrated
    even = np.repeat(np.arange(20) % 2 == 0, [np.sum(atoms.numbers == 1) for atoms in test])
    variance = np.empty(len(even))
    for half in (even, ~even):
        alpha = calibrate(result.y[~half], raw[~half], method="linear").alpha
        variance[half] = (alpha * raw.std[half]) ** 2
    assert result.rows["linear (validation)"].sharpness == pytest.approx(np.sqrt(variance.mean()))
    alone = evaluate(shift_model, [max(test, key=lambda atoms: np.sum(atoms.numbers == 1))])
    assert not [name for name in alone.rows if "validation" in name]


def test_structures_may_come_from_a_generator(molecules):
    expected = make_model().fit(molecules[:40])
    given = make_model().fit(atoms for atoms in molecules[:40])
    same_predictions(given, expected, molecules[120:125])


def test_only_labelled_atoms_are_judged(molecules, shift_model):
    test = copies(molecules[120:140])
    test[0].arrays["shift"][:] = np.nan
    for atoms in test[1:]:
        hydrogen = np.flatnonzero(atoms.numbers == 1)
        atoms.arrays["shift"][hydrogen[1::2]] = np.nan
    labels = [a.arrays["shift"][a.numbers == 1] for a in test]
    result = evaluate(shift_model, test)
    y = np.concatenate(labels)
    np.testing.assert_array_equal(result.y, y[np.isfinite(y)])
    np.testing.assert_allclose(
        result.prediction.mean, shift_model.predict(test).mean[np.isfinite(y)], rtol=1e-6
    )
    assert result.n_unlabelled == np.count_nonzero(np.isnan(y))


def test_bad_test_structures_are_named_as_they_were_given(molecules, energy_model):
    test = copies(molecules[120:130])
    del test[0].info[ENERGY]
    test[4].numbers[0] = 17
    with pytest.raises(InputError, match=r"frames=Cl in .*frames\[4\]"):
        evaluate(energy_model, test)


def test_a_study_of_sub_sample_sizes(molecules):
    settings = make_settings(
        {"target": ENERGY, "representation": SMALL, "n_representatives": 100, "seed": 2}
    )
    study = study_subsamples(
        molecules[:80], molecules[80:120], molecules[120:], settings, (0.25, 0.5, 60)
    )
    assert list(study.rows) == [0.25, 0.5, 60]
    columns = ["Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage", "GPR PP"]
    for row in study.rows.values():
        assert list(row) == columns
        assert np.isfinite(list(row.values())).all()
        assert row["student"] == pytest.approx(row["CV"], abs=0.3)
    assert len({row["Raw"] for row in study.rows.values()}) == 3
    assert study.rows[0.25]["GPR PP"] == study.rows[60]["GPR PP"]  # knows nothing of members
    # The model is the one that training by itself gives, and its row is what `evaluate` says.
    alone = AtomisticModel(**settings.model_dump(), threads=1).fit(molecules[:80])
    np.testing.assert_array_equal(alone.fitted.membership, study.model.fitted.membership)
    new = molecules[120:130]
    np.testing.assert_allclose(
        alone.predict(new).members, study.model.predict(new).members, rtol=1e-6
    )
    scores = evaluate(study.model, molecules[120:], molecules[80:120]).rows
    for column, name in (("student", "student (internal)"), ("CV", "linear (validation)")):
        assert study.rows[0.5][column] == pytest.approx(scores[name].log_likelihood, rel=1e-6)


def test_progress_is_shown_stage_by_stage(molecules):
    seen = []
    display = SimpleNamespace(
        begin=lambda stage, total: seen.append((stage, total)),
        advance=lambda done: seen.append(done),
        end=lambda seconds: None,
    )
    model = make_model().fit(molecules[:20], progress=display)
    stages = [item[0] for item in seen if isinstance(item, tuple)]
    assert stages == list(model.record.seconds)
    assert stages[0] == "Power spectra"
    assert stages[-2:] == ["Members", "Calibration"]
    n = model.record.n_environments
    assert seen[:2] == [("Power spectra", n), n]


def test_the_plan_comes_before_the_work(molecules, tmp_path):
    def refuse(made, data):
        assert (made.n_rows, made.n_members) == (20, 16)
        assert made.n_representatives == 100
        assert data.n_environments == made.n_environments
        assert Path(tmp_path / "checkpoint").exists()
        raise RuntimeError("too large")

    model = make_model()
    with pytest.raises(RuntimeError, match="too large"):
        model.fit(molecules[:20], checkpoint=tmp_path / "checkpoint", on_plan=refuse)


def test_compression_sees_every_pair_of_elements(molecules):
    def elements(atoms):
        return set(atoms.get_chemical_symbols())

    plain = [a for a in molecules if "F" not in elements(a)][:100]
    rare = next(a for a in molecules if "F" in elements(a))
    data = training_set.make_training_set(
        [*plain, rare], make_settings({"target": ENERGY, "n_representatives": 50})
    )
    stage = feature_stage.FeatureStage(data, feature_stage.Resources(), Stages())
    for seed in range(5):
        sample = stage._sample(np.random.default_rng(seed))
        assert len(plain) in sample  # the last one
        assert len(np.unique(sample)) == len(sample)


def test_predictions_are_not_taken_for_labels(molecules, energy_model, tmp_path):
    frames = [a.copy() for a in molecules[120:130]]
    for atoms, mean in zip(frames, energy_model.predict(frames).mean, strict=True):
        atoms.info[f"REF_{ENERGY}"] = atoms.info[ENERGY]
        atoms.info[ENERGY], atoms.info[f"{ENERGY}_uncertainty"] = mean, 0.1
    with pytest.warns(QualmsWarning, match="10 structures: these are predictions"):
        judged = evaluate(energy_model, frames).rows["raw"]
    assert judged.rmse == pytest.approx(evaluate(energy_model, molecules[120:130]).rows["raw"].rmse)
    for atoms in frames:
        del atoms.info[f"REF_{ENERGY}"]
    with pytest.raises(InputError, match=ENERGY):
        evaluate(energy_model, frames)
