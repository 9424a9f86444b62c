"""AtomisticModel: parameters, predictions, extrapolation, and which atoms are uncertain.

Rounding differs with the shape of a matrix product, and so with the batch, the number of threads
and the processor; weights, which are large, amplify it. It must stay below any digit that matters:
a millionth of the uncertainty.
"""

import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.data import covalent_radii
from ase.io import write
from atomistic_fixtures import (
    ENERGY,
    SMALL,
    SMOOTH,
    copies,
    labelled_by_emt,
    labelled_crystals,
    make_force_model,
    make_model,
    reference_values,
    same_predictions,
)
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components
from threadpoolctl import threadpool_limits

from qualms import AtomisticModel, Prediction, ProjectedProcessRegressor, QualmsError
from qualms.atomistic.settings import Settings, make_settings, with_representation
from qualms.calibration.methods import MODEL_METHODS
from qualms.features.soap import PRESETS, SMOOTHING, make_soap

PER_ATOM = "atomization_energy_per_atom"
#: Of the standard deviation.
TOLERANCE = 1e-6


def assert_same(members, expected):
    """Members (n, R) differ by less than a millionth of the standard deviation (n,)."""
    difference = np.abs(members - expected.members).max(axis=-1)
    assert np.max(difference / expected.std) < TOLERANCE


# --- parameters ---


def test_every_parameter_is_in_the_signature_and_in_the_documentation():
    parameters = inspect.signature(AtomisticModel).parameters
    assert list(parameters) == list(Settings.model_fields)
    assert parameters["n_members"].default == 16
    assert parameters["target"].default is inspect.Parameter.empty
    for name, field in Settings.model_fields.items():
        assert f"\n{name} : " in inspect.getdoc(AtomisticModel)
        assert field.description
        assert field.json_schema_extra["group"] in ("data", "model", "uncertainty", "resources")


INVALID = {
    "mixed_states": ["perhaps", 7],
    "target": [None, "", 3],
    "kind": ["total"],
    "representation": [
        *("magic", 3, {"cutof": 3}, {"representation": 1}, {5: 3}),
        {"preset": "auto", "cutof": 3},
    ],
    "species": ["Q", [], 3, [0], "H"],
    "n_representatives": [0, 2.5, "lots"],
    "effort": ["max", 60],
    "basis": ["atoms", 1],
    "selection": ["best"],
    "baseline": ["linear", {"Q": 1.0}, {"H": "large"}],
    "noise": [0, -1.0, float("nan"), "aic"],
    "forces": [""],
    "stress": [3],
    "force_atoms": [0, "some", 2],
    "forces_noise": [0.0, 1.0],
    "stress_noise": ["loo", 1.0],
    "uncertainty": ["all", None],
    "n_members": [1, 2],
    "n_posterior": [1, 2.5],
    "centre": ["mean", -0.1, 1.5, float("nan")],
    "subsample": [0.0, 1.0, 1, 1.5],
    "resample": ["molecules", "atoms"],
    "draw": ["rows"],
    "replace": [3],
    "calibration": ["best", 3],
    "units": [3],
    "seed": [-1],
    "keep_pp": ["perhaps"],
    "memory": ["lots", [1]],
    "threads": [0, 1.5],
    "hook": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values]
)
def test_invalid_parameters_are_named(name, value):
    expected = "baseline['H']" if value == {"H": "large"} else name
    with rejects(expected):
        AtomisticModel(**({"target": "u"} | {name: value}))
    assert {*INVALID} - {"hook"} == {*Settings.model_fields}


@pytest.mark.parametrize(
    ("uncertainty", "name", "value"),
    [
        ("posterior", "n_members", 20),
        ("posterior", "subsample", 0.8),
        ("posterior", "centre", "members"),
        ("posterior", "centre", 0.3),
        ("subsampling", "n_posterior", 32),
    ],
)
def test_parameters_of_members_that_a_model_does_not_have(uncertainty, name, value):
    with rejects(name):
        AtomisticModel("energy", uncertainty=uncertainty, **{name: value})
    AtomisticModel("energy", uncertainty=uncertainty, centre="full")


def test_forces_need_smooth_features():
    found = make_settings({"target": "e", "forces": "f", "representation": "organic"})
    assert found.representation.resolved_engine == "featomic"
    assert [scale.smoothing for scale in found.representation.scales] == [SMOOTHING]
    given_ = make_settings({"target": "e", "stress": "s", "representation": SMOOTH})
    assert [scale.smoothing for scale in given_.representation.scales] == [0.8]
    assert found.keys == {"energy": "e", "forces": "f"}
    with rejects("engine"):
        make_settings({"target": "e", "forces": "f", "representation": {"engine": "dscribe"}})
    with rejects("forces"):
        make_settings({"target": "e", "kind": "intensive", "forces": "f"})


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
def test_the_representation_is_chosen_by_the_structures(molecules, caplog):
    given_ = {"n_representatives": 30, "calibration": "student"}
    model = make_model(representation="auto", **given_)
    with pytest.raises(QualmsError):
        _ = model.settings.has_forces
    with caplog.at_level("INFO"):
        model.fit(molecules[:30])
    assert model.settings.representation == PRESETS["organic"]
    assert model.record.preset.startswith("organic")
    assert model.record.preset in caplog.text
    assert model.record.preset in model.summary()
    expected = make_model(representation="organic", **given_).fit(molecules[:30])
    same_predictions(model, expected, molecules[120:125])
    assert expected.record.preset == ""
    # It is chosen again for other structures.
    some = {"preset": "auto", "l_max": 2, "cutoff": 4.0}
    model = make_model("energy", representation=some, **given_)
    others = copies(molecules[:20])
    for frames, preset in ((others, "organic"), (labelled_crystals(20), "inorganic")):
        for atoms in frames:
            atoms.info["energy"] = float(len(atoms) + atoms.positions[0, 0])
        expected = make_soap(preset, l_max=2, cutoff=4.0)
        assert model.fit(frames).fitted.settings.representation == expected


def test_chosen_representations_are_smooth_if_forces_are_learned(alloys):
    some = {"preset": "auto", "n_radial": 3, "l_max": 2}
    model = make_force_model(representation=some, calibration="student")
    expected = make_soap("inorganic", n_radial=3, l_max=2, engine="featomic")
    assert model.fit(alloys[:20]).fitted.settings.representation == expected
    settings_ = make_settings({"target": "e", "stress": "s"})
    found, preset = with_representation(settings_, [1, 6, 8], periodic=False)
    assert preset.startswith("organic")
    assert [scale.smoothing for scale in found.representation.scales] == [SMOOTHING]


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
    errors = one.mean - reference_values(new)
    assert np.sqrt(np.mean(errors**2)) < 0.1 * np.std(reference_values(new))
    assert 0.4 < np.mean(np.abs(errors) < one.std) < 0.9


def test_atoms_of_chosen_species(molecules, shift_model):
    new = molecules[120:150]
    wanted = [np.flatnonzero(atoms.numbers == 1) for atoms in new]
    y = np.concatenate([a.arrays["shift"][w] for a, w in zip(new, wanted, strict=True)])
    prediction = shift_model.predict(new)
    mask = np.arange(len(new)) % 2 == 0
    with rejects("index"):
        prediction[mask]  # of structures
    chosen = prediction.take(np.flatnonzero(mask))
    np.testing.assert_allclose(chosen.mean, shift_model.predict(new[::2]).mean, rtol=1e-9)
    every = prediction[np.ones(prediction.shape, dtype=bool)]
    np.testing.assert_allclose(every.mean, prediction.mean, rtol=1e-12)
    assert np.std(prediction.mean - y) < 0.5 * np.std(y)
    for predicted, expected in zip(shift_model.target_atoms(new), wanted, strict=True):
        np.testing.assert_array_equal(predicted, expected)
    edges = pairwise(np.cumsum([0, *map(len, wanted)]))
    for part, (begin, end) in zip(shift_model.predict(new, atoms=True).atoms, edges, strict=True):
        np.testing.assert_allclose(part.members, prediction.members[begin:end], rtol=1e-9)
    n_hydrogen = sum(np.count_nonzero(a.numbers == 1) for a in molecules[:60])
    assert shift_model.record.n_environments == n_hydrogen
    oxide = molecule("CO2")  # without the wanted atoms
    assert shift_model.predict([oxide]).shape == (0,)
    assert [p.shape for p in shift_model.predict([oxide, molecule("H2O")], atoms=True).atoms] == [
        (0,),
        (2,),
    ]
    assert not shift_model.predict([oxide]).extrapolates[0]


def test_unlabelled_structures_are_skipped_and_counted(molecules):
    frames = copies(molecules[:70])
    kept = [i for i in range(70) if i % 10]
    for i in range(0, 70, 10):
        frames[i].info[ENERGY] = [None, np.nan][i % 20 == 0]
    frames[20].positions[:] = 0.0  # is not used, hence does no harm
    model = make_model().fit(atoms for atoms in frames)
    assert model.record.n_structures == 63
    assert model.record.quantities["energy"].n_without == 7
    same_predictions(model, make_model().fit([frames[i] for i in kept]), molecules[120:125])
    assert set(model.fitted.origins[:, 0]) <= set(kept)  # as they were given
    frames[7].positions[1] = frames[7].positions[0]
    with rejects("frames[7]"):
        make_model().fit(frames)


def test_energies_of_isolated_atoms_given_or_found(molecules):
    energies = {"H": -13.6, "C": -1029.9, "N": -1485.3, "O": -2042.6, "F": -2713.5}
    frames = copies(molecules[:60])
    for atoms in frames:
        atoms.info["total"] = atoms.info[ENERGY] + sum(energies[s] for s in atoms.symbols)
    single = [
        Atoms(s, info={"config_type": "isolated_atom", "total": e}) for s, e in energies.items()
    ]
    found = make_model("total", baseline="atoms").fit(frames + single)
    given_ = make_model("total", baseline=energies).fit(frames)
    assert found.record.n_isolated == 5
    same_predictions(found, given_, molecules[120:125])


# --- predictions ---


@pytest.mark.parametrize("calibration", MODEL_METHODS)
@pytest.mark.parametrize(("target", "kind"), [(ENERGY, "extensive"), (PER_ATOM, "intensive")])
def test_contributions_of_atoms_add_up_member_by_member(molecules, target, kind, calibration):
    model = make_model(target, kind, calibration=calibration).fit(molecules[:40])
    new = molecules[120:125]
    whole, atoms = model.predict(new), model.predict(new, atoms=True).atoms
    combine = np.sum if kind == "extensive" else np.mean
    for i, parts in enumerate(atoms):
        assert_same(combine(parts.members, axis=0)[None], whole[i : i + 1])
    ensemble_std = whole.uncalibrated.members[:, :16].std(axis=1, ddof=1)
    assert np.allclose(whole.std, ensemble_std, rtol=1e-10) == (calibration == "none")
    assert whole.n_members in ((16, 64, 80) if calibration == "sources" else (16,))


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


def shuffled(frames, seed):
    """The order of structures, and that of atoms in each, by chance; structures in this order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(frames))
    shuffles = [rng.permutation(len(frames[i])) for i in order]
    return order, shuffles, [frames[i][s] for i, s in zip(order, shuffles, strict=True)]


@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(20, 300))
def test_batches_threads_and_the_order_of_structures_and_atoms_change_nothing(case, seed, batch):
    model, frames = case
    expected = model.predict(frames)
    order, shuffles, moved = shuffled(frames, seed)
    wanted = expected[order]
    if model.settings.per_atom:  # predictions of atoms come in the order of the structure
        atoms, parts = model.target_atoms(frames), model.predict(frames, atoms=True).atoms
        places = [
            np.argsort(atoms[i])[np.searchsorted(atoms[i], shuffle[np.isin(shuffle, atoms[i])])]
            for i, shuffle in zip(order, shuffles, strict=True)
        ]
        chosen = zip(order, places, strict=True)
        wanted = Prediction.concatenate([parts[i][place] for i, place in chosen])
    with patch("qualms.atomistic.predictions.BATCH", batch):
        chunks = [*model.stream(iter(moved))]
    assert_same(np.concatenate([chunk.members for chunk in chunks]), wanted)
    with threadpool_limits(limits=2):
        (one,) = model.predict(frames[:1], atoms=True).atoms
        assert_same(model.predict(frames).members, expected)
    assert_same(one.members, model.predict(frames, atoms=True).atoms[0])


_SCRIPT = """
import sys, numpy as np
from ase.io import read
from qualms import AtomisticModel
model = AtomisticModel.load(sys.argv[1])
np.save(sys.argv[3], model.predict(read(sys.argv[2], ":")[::-1]).members[::-1])
"""


def test_another_process_predicts_the_same(molecules, energy_model, tmp_path, monkeypatch):
    """With OpenBLAS it even uses the instructions of another processor."""
    files = [tmp_path / name for name in ("model.qualms", "new.traj", "found.npy")]
    energy_model.save(files[0])
    write(files[1], molecules[120:140])
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    subprocess.run([sys.executable, "-c", _SCRIPT, *map(str, files)], check=True)
    assert_same(np.load(files[2]), energy_model.predict(molecules[120:140]))


@pytest.fixture(scope="module")
def molecular_forces():
    """A model of forces on molecules, and molecules that it has not seen."""
    rng, frames = np.random.default_rng(0), []
    for name in ("CH3OH", "H2O", "CH4", "C2H6") * 8:
        frames.append(molecule(name, vacuum=6.0))
        frames[-1].positions += 0.05 * rng.normal(size=frames[-1].positions.shape)
        labelled_by_emt(frames[-1])
    smooth = {"cutoff": 4.0, "n_radial": 3, "l_max": 2, "smoothing": 0.5}
    return make_force_model(representation=smooth).fit(frames[:24]), frames[24:]


@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_forces_depend_on_their_structure_alone(molecular_forces, seed):
    model, frames = molecular_forces
    expected = model.predict(frames, forces=True)
    edges = np.cumsum([0, *map(len, frames)])
    order, shuffles, moved = shuffled(frames, seed)
    found = model.predict(moved, forces=True)
    places = np.concatenate([edges[i] + s for i, s in zip(order, shuffles, strict=True)])
    assert_same(found.energy.members, expected.energy[order])
    assert_same(found.forces.members, expected.forces[places])
    # Energies that come with forces are those that come without.
    assert_same(model.predict(moved).members, expected.energy[order])
    with threadpool_limits(limits=2):
        one = model.predict(frames[:1], forces=True)
    assert_same(one.energy.members, expected.energy[:1])
    assert_same(one.forces.members, expected.forces[: edges[1]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_estimators_predict_a_row_alone_as_in_a_batch(dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 10)).astype(dtype)
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
    model = ProjectedProcessRegressor(n_representatives=100, random_state=0).fit(X[:200], y[:200])
    new = X[200:]
    alone = np.concatenate([model.predict_ensemble(row[None]).members for row in new])
    assert_same(alone, model.predict_ensemble(new))
    std = np.concatenate([model.pp_std(row[None]) for row in new])
    np.testing.assert_allclose(std, model.pp_std(new), rtol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
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
        errors = model.predict(new).mean - reference_values(new, target)
        assert np.std(errors) < 0.5 * np.std(reference_values(new, target))


def test_invalid_structures_and_options(molecules, energy_model):
    for call, parameter in (
        (lambda: energy_model.predict([]), "frames"),
        (lambda: energy_model.predict_pp(molecules[0]), "frames"),
        (lambda: energy_model.predict(molecules[:1], unknown_species="skip"), "unknown_species"),
        (lambda: energy_model.predict([Atoms()]), "frames[0]"),
        (lambda: make_model().fit(["a.xyz", "b.xyz"]), "frames[0]"),
        (lambda: energy_model.target_atoms(molecules[:1]), "kind"),
        (lambda: make_model().fit(molecules[0]), "frames"),
        (lambda: make_model().fit(molecules, [a.info[ENERGY] for a in molecules]), "y"),
        (lambda: make_model().fit("no.xyz"), "path"),
        (lambda: energy_model.predict("no.xyz"), "path"),
        (lambda: make_model(keep_pp=False).fit(molecules[:40]).predict_pp(molecules), "keep_pp"),
    ):
        with rejects(parameter):
            call()
    with pytest.raises(QualmsError):
        make_model().predict(molecules[:1])


def test_structures_of_a_file_are_those_of_a_list(molecules, tmp_path):
    path = tmp_path / "molecules.xyz"
    write(path, molecules[:40])
    expected = make_model().fit(molecules[:40]).predict(molecules[:5])
    for name in (path, str(path)):
        prediction = make_model().fit(name).predict(name)
        np.testing.assert_allclose(prediction.mean[:5], expected.mean, rtol=1e-5)
    assert np.shape(make_model().fit(path).predict(path).extrapolates) == (40,)


# --- extrapolation ---


def test_known_structures_are_no_extrapolation(molecules, energy_model, shift_model):
    assert energy_model.predict(molecules[:120]).extrapolates.mean() <= 0.02
    assert energy_model.predict(molecules[120:]).extrapolates.mean() <= 0.08
    assert shift_model.predict(molecules[:60]).extrapolates.mean() <= 0.02


@pytest.mark.parametrize("factor", [0.6, 0.9, 1.15, 5.0])
def test_distorted_structures_are_flagged(molecules, energy_model, shift_model, factor):
    distorted = scaled(molecules[120:130], factor)
    assert energy_model.predict(distorted).extrapolates.mean() > 0.9
    assert shift_model.predict(distorted).extrapolates.mean() > 0.7


def scaled(frames, factor):
    frames = copies(frames)
    for atoms in frames:
        atoms.positions *= factor
    return frames


def test_unknown_species_are_rejected_or_ignored(energy_model, shift_model):
    known, chloride = molecule("CH4"), molecule("CH3Cl")
    frames = [known, chloride]
    for call in (
        energy_model.predict,
        energy_model.predict_pp,
        lambda x: shift_model.predict(x).extrapolates,
    ):
        with rejects("frames"):
            call(frames)
    without = chloride[[i for i, s in enumerate(chloride.symbols) if s != "Cl"]]
    ignored = energy_model.predict(frames, unknown_species="ignore")
    assert_same(energy_model.predict([known, without]).members, ignored)
    assert energy_model.predict(frames, unknown_species="ignore").extrapolates[1]
    parts = energy_model.predict(frames, unknown_species="ignore", atoms=True).atoms
    assert [len(p) for p in parts] == [5, 4]
    with rejects("frames"):
        energy_model.predict([Atoms("Cl")], unknown_species="ignore")


@pytest.mark.filterwarnings("ignore:The training set has too few compositions")
def test_unknown_species_are_not_mixed_from_others():
    small = {"preset": "inorganic", "n_radial": 3, "l_max": 2, "cutoff": 4.0}
    model = make_model("energy", representation=small, calibration="student")
    crystals = labelled_crystals(20)
    model.fit(crystals)
    other = crystals[0].copy()
    other.symbols[other.symbols == "Na"] = "K"
    for call in (model.predict, lambda x: model.predict(x, forces=True)):
        with rejects("frames"):
            call([other])
    assert model.predict([other], unknown_species="ignore").mean.shape == (1,)


# --- which atoms are uncertain ---


def rescaled(atoms, factor):
    """Yield molecules with one bond stretched, for each bond that is not part of a ring."""
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances()
    bonded = (distances < 1.25 * (radii[:, None] + radii)) & (distances > 0)
    for i, j in np.argwhere(np.triu(bonded)):
        left = bonded.copy()
        left[i, j] = left[j, i] = False
        parts = connected_components(left)[1]
        if parts[i] != parts[j]:
            new = atoms.copy()
            bond = atoms.positions[j] - atoms.positions[i]
            new.positions[parts == parts[j]] += (factor - 1) * bond
            yield new, (i, j)


def atom_novelty(model, frames):
    return model.predict(frames, atoms=True).atom_novelty


@pytest.mark.parametrize("representation", [{}, {"normalize": False}])
def test_the_most_novel_atom_is_at_the_bond_that_is_too_long(representation, molecules):
    model = make_model(n_representatives=150, representation=representation).fit(molecules[:120])
    limits = model.fitted.novelty_limits
    plain = [
        atoms
        for atoms in molecules[150:160]
        if (atom_novelty(model, [atoms])[0] * limits(atoms.numbers)).max() < 0.1
    ]
    cases = [case for atoms in plain for case in rescaled(atoms, 1.35)]
    found = atom_novelty(model, [atoms for atoms, _ in cases])
    assert len(cases) > 80
    # Relative to the limits of the elements, a hydrogen atom beside the bond may be more novel.
    for scale, least in ((lambda z: 1.0, 0.85), (limits, 0.95)):
        hits = [
            (novelty * scale(atoms.numbers)).argmax() in bond
            for novelty, (atoms, bond) in zip(found, cases, strict=True)
        ]
        assert np.mean(hits) > least


def test_the_most_uncertain_force_is_at_the_atom_that_was_moved(force_model):
    cases, bonds = [], []
    for i in range(0, 32, 4):
        crystal = bulk("Cu", cubic=True) * (2, 2, 2)
        crystal.symbols[::4] = "Al"
        crystal.rattle(0.05, seed=1)
        direction = np.random.default_rng(i).normal(size=3)
        crystal.positions[i] += 0.6 * direction / np.linalg.norm(direction)
        cases.append(crystal)
        bonds.append(np.argsort(crystal.get_distances(i, range(32), mic=True))[:2])
    predicted = force_model.predict(cases, forces=True, atoms=True)
    for found in (predicted.force_std, predicted.atom_novelty):
        hits = [values.argmax() in bond for values, bond in zip(found, bonds, strict=True)]
        assert np.mean(hits) >= 0.7


def test_one_prediction_has_everything(alloys, molecules, force_model, energy_model):
    some = alloys[30:33]
    every = force_model.predict(some, forces=True, stress=True, atoms=True)
    alone, by_features = force_model.predict(some), force_model.predict(some, atoms=True)
    np.testing.assert_allclose(every.mean, alone.mean, rtol=1e-8)
    np.testing.assert_allclose(every.std, alone.std, rtol=1e-4)
    np.testing.assert_allclose(every.novelty, alone.novelty, atol=1e-4)
    assert every.reasons == alone.reasons
    for one, other in zip(every.atoms, by_features.atoms, strict=True):
        np.testing.assert_allclose(one.members, other.members, rtol=1e-5, atol=1e-6)
    for one, other in zip(every.atom_novelty, by_features.atom_novelty, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    np.testing.assert_allclose(every.force_std[1], np.linalg.norm(every.forces.std[4:8], axis=1))
    second = every.structure(1)
    assert second.shape == ()
    np.testing.assert_array_equal(second.members, every.members[1])
    np.testing.assert_array_equal(second.forces.members, every.forces.members[4:8])
    np.testing.assert_array_equal(second.stress.members, every.stress.members[1])
    again = pickle.loads(pickle.dumps(every))
    np.testing.assert_array_equal(again.forces.members, every.forces.members)
    np.testing.assert_array_equal(again.uncalibrated.members, every.uncalibrated.members)
    for name in ("forces", "stress", "atoms", "atom_novelty"):
        with pytest.raises(AttributeError, match="use predict"):
            getattr(alone, name)
    # dscribe has no derivatives.
    with rejects("engine"):
        energy_model.predict(molecules[150:151], forces=True)


def test_stresses_of_structures_without_a_volume_are_not_known(alloys, force_model):
    mixed = copies(alloys[30:33])
    mixed[1].cell, mixed[1].pbc = None, False
    found = force_model.predict(mixed, forces=True, stress=True)
    assert found.is_solid.tolist() == [True, False, True]
    alone = force_model.predict([mixed[0], mixed[2]], stress=True).stress
    np.testing.assert_allclose(found.stress.std, alone.std, rtol=1e-9)
    np.testing.assert_allclose(found[2].stress.std, alone.std[1], rtol=1e-9)
    assert len(found.forces) == 12
    assert found[1].forces.shape == (4, 3)
    some = found[1:]
    np.testing.assert_allclose(some.stress.std, alone.std[1:], rtol=1e-9)
    np.testing.assert_allclose(some.forces.std, found.forces.std[4:], rtol=1e-9)
    np.testing.assert_array_equal(some.novelty, found.novelty[1:])
    np.testing.assert_allclose(found[found.is_solid].mean, found.mean[[0, 2]], rtol=1e-12)
    with pytest.raises(AttributeError, match="no volume"):
        _ = found[1].stress
    with rejects("stress"):
        force_model.predict(mixed[1:2], stress=True)


def test_novelty_is_one_where_extrapolation_begins(energy_model, molecules):
    fitted = energy_model.fitted
    origin, atom = fitted.origins[0]
    assert atom_novelty(energy_model, [molecules[origin]])[0][atom] < 1e-3  # a representative
    new = copies(molecules[150:190])
    new[0].positions[0] += 0.6
    predicted = energy_model.predict(new, atoms=True)
    largest = np.array([novelty.max() for novelty in predicted.atom_novelty])
    np.testing.assert_allclose(largest, predicted.novelty)
    assert largest.min() < 1 < largest.max()
    assert np.all(predicted.extrapolates[largest > 1])
    for s in np.flatnonzero(largest > 1):
        assert f"atom {predicted.atom_novelty[s].argmax()} (" in predicted.reasons[s]
    (chunk,) = energy_model.chunks(new[1:2])
    x, X = (a.astype(np.float64) for a in (chunk.batch.features, fitted.representatives))
    kernel = (x @ X.T) ** fitted.representation.settings.exponent
    limits = [fitted.element_novelty[z] for z in new[1].numbers]  # of each element
    expected = (1 - kernel.max(axis=1)) / limits
    np.testing.assert_allclose(predicted.atom_novelty[1], expected, atol=1e-4)


def test_threads_may_share_a_model(force_model, alloys):
    """Also a copy, as for other processes; predictions are those of one thread."""
    model = pickle.loads(pickle.dumps(force_model))
    expected = force_model.predict(alloys[26:30], forces=True)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(model.predict, alloys[26:30], forces=True) for _ in range(8)]
        for job in jobs:
            np.testing.assert_allclose(job.result().members, expected.members, rtol=1e-9)
            np.testing.assert_allclose(job.result().forces.std, expected.forces.std, rtol=1e-9)
