"""Which atoms make a structure uncertain: files of predictions, and the map of a report."""

import gzip
import json
import tracemalloc
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii
from atomistic_fixtures import ENERGY, copies, make_model, qualms
from scipy.sparse.csgraph import connected_components
from test_forces_training import alloys as force_alloys
from test_forces_training import model as force_model
from test_forces_training import trained as trained_on_forces

from qualms import InputError, Prediction
from qualms.atomistic.forces import has_forces
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.novelty import atom_force_std, atom_novelty, attributions, local_contributions
from qualms.report import structure_map as maps


@pytest.fixture
def files(energy_model, molecules, tmp_path, monkeypatch):
    """A model, and structures with reference values."""
    monkeypatch.chdir(tmp_path)
    energy_model.save("model.safetensors")
    frames = copies(molecules[150:158])
    for atoms in frames:
        atoms.info = {ENERGY: atoms.info[ENERGY]}
        atoms.arrays.pop("shift")
    ase.io.write("new.xyz", frames, format="extxyz")
    return frames


def predict(name, more=""):
    ended = qualms(f"predict model.safetensors new.xyz --atoms --threads 1 -o {name} {more}")
    assert ended.code == 0, ended.err
    return name


def test_contributions_are_columns_of_the_structure(files, energy_model):
    expected = energy_model.predict_atoms(files)
    whole = energy_model.predict(files)
    for i, atoms in enumerate(ase.io.read(predict("out.xyz", "--ensemble"), ":")):
        np.testing.assert_allclose(atoms.arrays[f"{ENERGY}_atoms"], expected[i].mean, rtol=1e-6)
        np.testing.assert_allclose(
            atoms.arrays[f"{ENERGY}_atoms_uncertainty"], expected[i].std, rtol=1e-6
        )
        assert atoms.info[ENERGY] == pytest.approx(whole.mean[i])
        assert atoms.info[f"{ENERGY}_uncertainty"] == pytest.approx(whole.std[i])
        assert atoms.info[f"REF_{ENERGY}"] == pytest.approx(files[i].info[ENERGY])
        np.testing.assert_allclose(
            atoms.arrays[f"{ENERGY}_atoms_local_uncertainty"],
            local_contributions(files[i], expected[i]).std,
            rtol=1e-6,
        )
        np.testing.assert_allclose(
            atoms.arrays[f"{ENERGY}_atoms_novelty"],
            atom_novelty(energy_model, [files[i]])[0],
            atol=1e-5,
        )
        # They sum to the structure, member by member.
        members = atoms.arrays[f"{ENERGY}_atoms_ensemble"].sum(axis=0)
        np.testing.assert_allclose(members, whole.members[i], rtol=1e-6)


def test_arrays_have_a_row_for_each_atom(files, energy_model):
    expected = energy_model.predict_atoms(files)
    with np.load(predict("out.npz")) as arrays:
        np.testing.assert_allclose(
            arrays[f"{ENERGY}_atoms_uncertainty"],
            np.concatenate([p.std for p in expected]),
            rtol=1e-6,
        )
        assert arrays[ENERGY].shape == (len(files),)


def test_a_table_of_structures_has_no_place_for_atoms(files):
    ended = qualms("predict model.safetensors new.xyz --atoms -o out.csv")
    assert ended.code != 0
    assert ".xyz or .npz" in ended.err


def test_atoms_that_the_model_does_not_know_contribute_nothing(files, energy_model):
    strange = files[0].copy()
    strange.symbols[0] = "Si"
    ase.io.write("new.xyz", [strange, files[1]], format="extxyz")
    first, second = ase.io.read(predict("out.xyz", "--ignore-unknown-species"), ":")
    std = first.arrays[f"{ENERGY}_atoms_uncertainty"]
    assert np.isnan(std[0])
    assert np.all(std[1:] > 0)
    novelty = first.arrays[f"{ENERGY}_atoms_novelty"]
    assert np.isnan(novelty[0])
    np.testing.assert_allclose(
        novelty[1:],
        atom_novelty(energy_model, [strange], unknown_species="ignore")[0],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        second.arrays[f"{ENERGY}_atoms_uncertainty"],
        energy_model.predict_atoms([files[1]])[0].std,
        rtol=1e-6,
    )


def test_an_earlier_prediction_is_no_reference(molecules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames = copies(molecules[:62])
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=atoms.info.pop(ENERGY))
        atoms.info = {}
    make_model("energy").fit(frames[:60]).save("model.safetensors")
    ase.io.write("new.xyz", frames[60:], format="extxyz")
    for _ in range(2):
        first = ase.io.read(predict("new.xyz", "--force"), 0)
        assert first.get_potential_energy() == pytest.approx(first.arrays["energy_atoms"].sum())
        assert first.info["REF_energy"] == pytest.approx(frames[60].get_potential_energy())


def test_properties_of_atoms_need_no_such_option(shift_model, molecules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shift_model.save("model.safetensors")
    ase.io.write("new.xyz", molecules[:2], format="extxyz")
    ended = qualms("predict model.safetensors new.xyz --atoms -o out.xyz")
    assert ended.code != 0
    assert "--atoms" in ended.err
    assert "Traceback" not in ended.err


# --- how strange an atom is ---


def stretched(atoms, factor):
    """Molecules with one bond stretched, for each bond that is not part of a ring."""
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


#: What they are by default, but for the name of it.
MODELS = {
    "dscribe": {"representation": {}},
    "featomic": {"representation": {"engine": "featomic", "smoothing": 0.5}},
    "not normalised": {"representation": {"normalize": False}},
    "intensive": {"representation": {}, "kind": "intensive"},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_strangest_atom_is_at_the_bond_that_is_too_long(name, molecules):
    model = make_model(n_representatives=150, **MODELS[name]).fit(molecules[:120])
    # Some have a strange atom to begin with.
    plain = [a for a in molecules[150:160] if atom_novelty(model, [a])[0].max() < 0.5]
    for factor in (0.8, 1.35):
        cases = [case for atoms in plain for case in stretched(atoms, factor)]
        found = atom_novelty(model, [atoms for atoms, _ in cases])
        pairs = list(zip(found, cases, strict=True))
        assert len(pairs) > 80
        assert np.mean([novelty.argmax() in bond for novelty, (_, bond) in pairs]) > 0.9


def test_the_atom_that_was_moved_is_the_strangest_of_a_crystal():
    model = force_model().fit(force_alloys()[:26])
    crystal = bulk("Cu", cubic=True) * (2, 2, 2)
    crystal.symbols[::4] = "Al"
    crystal.rattle(0.08, seed=1)
    cases, rng = [], np.random.default_rng(0)
    for i in range(len(crystal)):
        cases.append(crystal.copy())
        direction = rng.normal(size=3)
        cases[i].positions[i] += 0.6 * direction / np.linalg.norm(direction)
    hits = []
    for i, novelty in enumerate(atom_novelty(model, cases)):
        # The bond that is now too short has two ends.
        nearest = np.argsort(cases[i].get_distances(i, range(len(crystal)), mic=True))[:2]
        hits.append(novelty.argmax() in nearest)
    assert np.mean(hits) > 0.9


# --- error bars of forces ---


def crystal_with_a_moved_atom(i):
    """A crystal, atom i of which was moved, and the ends of the bond that is now too short."""
    crystal = bulk("Cu", cubic=True) * (2, 2, 2)
    crystal.symbols[::4] = "Al"
    crystal.rattle(0.05, seed=1)
    direction = np.random.default_rng(i).normal(size=3)
    crystal.positions[i] += 0.6 * direction / np.linalg.norm(direction)
    return crystal, np.argsort(crystal.get_distances(i, range(len(crystal)), mic=True))[:2]


def test_the_force_whose_error_bar_is_largest_is_at_the_atom_that_was_moved():
    model = trained_on_forces()
    cases = [crystal_with_a_moved_atom(i) for i in range(0, 32, 4)]
    found = atom_force_std(model, [atoms for atoms, _ in cases])
    hits = [std.argmax() in bond for std, (_, bond) in zip(found, cases, strict=True)]
    assert np.mean(hits) > 0.8


def test_error_bars_of_forces_do_not_depend_on_directions():
    atoms = force_alloys()[30].copy()
    turned = atoms.copy()
    turned.rotate(77.0, (1, 2, 3), rotate_cell=True)
    model = trained_on_forces()
    forces = model.predict_forces([atoms, turned])
    first, second = atom_force_std(model, [atoms, turned])
    np.testing.assert_allclose(first, second, rtol=1e-6)
    np.testing.assert_allclose(first, np.sqrt(np.sum(forces[0].forces.std ** 2, axis=1)))
    assert not np.allclose(forces[0].forces.std, forces[1].forces.std, rtol=1e-2)


def test_attributions_have_error_bars_of_forces_if_the_model_has_forces(energy_model, molecules):
    model = trained_on_forces()
    some = force_alloys()[30:32]
    found, expected = attributions(model, some), atom_force_std(model, some)
    for one, std in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.force_std, std, rtol=1e-9)
    # dscribe has no derivatives.
    assert not has_forces(energy_model.fitted)
    assert attributions(energy_model, molecules[150:151])[0].force_std is None
    with pytest.raises(InputError, match="featomic"):
        atom_force_std(energy_model, molecules[150:151])


def test_forces_that_are_not_continuous_do_not_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rough = {"engine": "featomic", "cutoff": 3.8, "n_radial": 3, "l_max": 2}
    model = make_model("energy", representation=rough, n_representatives=20)
    model.fit(force_alloys()[:12]).save("model.safetensors")
    some = copies(force_alloys()[30:31])
    assert attributions(model, some)[0].force_std is None
    ase.io.write("new.xyz", some, format="extxyz")
    with np.load(predict("plain.npz")) as arrays:
        assert "energy_atoms_force_uncertainty" not in arrays
    with np.load(predict("forces.npz", "--forces")) as arrays:
        assert "forces_uncertainty" in arrays
        assert "energy_atoms_force_uncertainty" not in arrays


@pytest.fixture
def force_files(tmp_path, monkeypatch):
    """A model that learned from forces, and structures with reference values."""
    monkeypatch.chdir(tmp_path)
    trained_on_forces().save("model.safetensors")
    frames = copies(force_alloys()[26:30])
    for atoms in frames:
        atoms.info = {"energy": atoms.info["energy"]}
        atoms.arrays = {name: atoms.arrays[name] for name in ("numbers", "positions", "force")}
    ase.io.write("new.xyz", frames, format="extxyz")
    return frames


def test_error_bars_of_forces_are_a_column_and_forces_computed_once(force_files, monkeypatch):
    expected = np.concatenate(atom_force_std(trained_on_forces(), force_files))
    calls, real = [], AtomisticModel.predict_forces

    def counted(self, frames, **options):
        calls.append(len(frames))
        return real(self, frames, **options)

    monkeypatch.setattr(AtomisticModel, "predict_forces", counted)
    for more in ("", "--forces"):
        calls.clear()
        with np.load(predict(f"out{more}.npz", more)) as arrays:
            np.testing.assert_allclose(arrays["energy_atoms_force_uncertainty"], expected)
            assert ("forces" in arrays) == bool(more)
        assert calls == [len(force_files)]


def test_forces_on_atoms_that_the_model_does_not_know_have_no_error_bar(force_files):
    strange = force_files[0].copy()
    strange.symbols[1] = "Ni"
    ase.io.write("new.xyz", [strange], format="extxyz")
    atoms = ase.io.read(predict("out.xyz", "--ignore-unknown-species"))
    std = atoms.arrays["energy_atoms_force_uncertainty"]
    assert np.isnan(std).tolist() == [False, True, False, False]
    known = atom_force_std(trained_on_forces(), [strange[[0, 2, 3]]])[0]
    np.testing.assert_allclose(std[[0, 2, 3]], known, rtol=1e-6)


def test_models_without_forces_write_no_error_bars_of_forces(files):
    # Nor do they keep those that another model has left.
    for atoms in files:
        for name in ("novelty", "force_uncertainty"):
            atoms.arrays[f"{ENERGY}_atoms_{name}"] = np.ones(len(atoms))
    ase.io.write("new.xyz", files, format="extxyz")
    first = ase.io.read(predict("out.xyz"), 0)
    assert f"{ENERGY}_atoms_force_uncertainty" not in first.arrays
    assert not np.any(first.arrays[f"{ENERGY}_atoms_novelty"] == 1)


def test_error_bars_of_forces_are_colours_of_the_map(force_files):
    assert qualms("report model.safetensors new.xyz -o report.html --threads 1").code == 0
    with gzip.open("report.chemiscope.json.gz") as stream:
        found = json.load(stream)["properties"]["σ of the force on the atom"]
    assert (found["target"], found["units"]) == ("atom", "eV/Å")
    expected = np.concatenate(atom_force_std(trained_on_forces(), force_files))
    np.testing.assert_allclose(found["values"], expected, rtol=1e-6)
    assert "of the forces on them" in Path("report.html").read_text(encoding="utf-8")


def test_novelty_is_one_where_extrapolation_begins(energy_model, molecules):
    fitted = energy_model.fitted
    origin, atom = fitted.origins[0]
    known = atom_novelty(energy_model, [molecules[origin]])[0]
    assert known[atom] < 1e-3  # a representative itself
    new = molecules[150:190]
    largest = np.array([novelty.max() for novelty in atom_novelty(energy_model, new)])
    assert largest.min() < 1 < largest.max()
    assert np.all(energy_model.extrapolates(new)[largest > 1])
    # One minus the largest kernel with a representative, against one computed by hand.
    chunk = next(iter(energy_model.stream(new[:1])))
    x, X = (a.astype(np.float64) for a in (chunk.batch.features, fitted.representatives))
    kernel = (x @ X.T) ** fitted.representation.soap.exponent
    expected = (1 - kernel.max(axis=1)) / fitted.training_novelty[0]
    np.testing.assert_allclose(atom_novelty(energy_model, new[:1])[0], expected, atol=1e-4)


# --- what is shared with neighbours ---


def test_shared_contributions_have_the_same_sum_and_no_internal_quarrels(molecules):
    rng = np.random.default_rng(0)
    atoms = molecules[0]
    given = Prediction(rng.normal(size=(len(atoms), 6)))
    shared = local_contributions(atoms, given)
    np.testing.assert_allclose(shared.sum().members, given.sum().members)
    np.testing.assert_allclose(
        local_contributions(atoms, given, width=1e-3).members, given.members, atol=1e-12
    )
    everywhere = local_contributions(atoms, given, width=1e3).members
    np.testing.assert_allclose(
        everywhere, np.tile(given.members.mean(axis=0), (len(atoms), 1)), atol=1e-4
    )
    # Members that differ about carbon and its hydrogens, and agree about the sum.
    methane = molecule("CH4")
    quarrel = np.outer([4, -1, -1, -1, -1], rng.normal(size=6))
    before = Prediction(quarrel + 0.01 * rng.normal(size=(5, 6)))
    assert local_contributions(methane, before).std.max() < 0.1 * before.std.max()


def test_images_of_atoms_are_neighbours():
    crystal = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    shifted = crystal.copy()
    shifted.positions += [1.3, 0.2, 0.7]
    shifted.wrap()
    given = Prediction(np.random.default_rng(0).normal(size=(8, 4)))
    np.testing.assert_allclose(
        local_contributions(crystal, given).members, local_contributions(shifted, given).members
    )


def crystals():
    alloy = bulk("Cu", cubic=True)
    alloy.symbols[0] = "Al"
    alloy.rattle(0.15, seed=3)
    skewed = Atoms(
        "Cu2",
        positions=[[0, 0, 0], [1.2, 1.2, 1.2]],
        cell=[[2.55, 0, 0], [1.27, 2.2, 0], [1.27, 0.7, 2.08]],
        pbc=True,
    )
    slab = fcc111("Cu", (1, 2, 3), vacuum=5.0)
    slab.rattle(0.1, seed=1)
    slab.positions += [40.0, 0.0, 90.0]  # far outside its cell
    return [alloy, skewed, slab]


@pytest.mark.parametrize("crystal", crystals(), ids=str)
def test_a_supercell_is_the_same_crystal(crystal):
    rng = np.random.default_rng(0)
    given = Prediction(rng.normal(size=(len(crystal), 4)))
    repeats = np.where(crystal.pbc, 3, 1)
    many = Prediction(np.tile(given.members, (repeats.prod(), 1)))
    small = local_contributions(crystal, given)
    large = local_contributions(crystal.repeat(repeats), many)
    np.testing.assert_allclose(large.members[: len(crystal)], small.members, atol=1e-10)
    np.testing.assert_allclose(small.sum().members, given.sum().members)


def test_weights_sum_over_all_images():
    crystal = crystals()[1]
    given = Prediction(np.random.default_rng(0).normal(size=(2, 4)))
    K = np.zeros((2, 2))
    for shift in np.ndindex(15, 15, 15):
        images = crystal.positions + (np.array(shift) - 7) @ crystal.cell.array
        r = np.linalg.norm(crystal.positions[:, None] - images, axis=2)
        K += np.exp(-0.5 * (r / 1.5) ** 2)
    np.testing.assert_allclose(
        local_contributions(crystal, given).members, (K / K.sum(axis=0)) @ given.members, rtol=1e-3
    )


def test_large_crystals_take_little_memory():
    crystal = bulk("Cu", cubic=True) * (9, 9, 9)
    given = Prediction(np.random.default_rng(0).normal(size=(len(crystal), 4)))
    tracemalloc.start()
    local_contributions(crystal, given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # one matrix of all pairs would take 68 MB


def test_bad_contributions_and_widths(molecules):
    with pytest.raises(InputError, match="width=1000"):
        local_contributions(bulk("Cu"), Prediction(np.zeros((1, 4))), width=1000.0)
    with pytest.raises(InputError, match="one for each atom"):
        local_contributions(molecules[0], Prediction(np.zeros((3, 4))))


# --- in a report ---


def test_the_map_of_a_report_colours_atoms(files, energy_model):
    assert qualms("report model.safetensors new.xyz -o report.html --threads 1").code == 0
    with gzip.open("report.chemiscope.json.gz") as stream:
        data = json.load(stream)
    inside = data["properties"]["novelty (relative)"]
    assert inside["target"] == "atom"
    expected = np.concatenate(atom_novelty(energy_model, files))
    np.testing.assert_allclose(inside["values"], expected, rtol=1e-5, atol=1e-5)
    places = [(e["structure"], e["center"]) for e in data["environments"]]
    assert places == [(i, j) for i, atoms in enumerate(files) for j in range(len(atoms))]
    assert data["settings"]["target"] == "structure"
    color = data["settings"]["structure"][0]["color"]
    # One range for all structures, which nearly all atoms are within.
    assert (color["property"], color["min"]) == ("novelty (relative)", 0)
    assert color["max"] == pytest.approx(np.quantile(expected, 0.99), rel=0.05)
    assert "σ of the force on the atom" not in data["properties"]
    assert "coloured by novelty" in Path("report.html").read_text(encoding="utf-8")
    # The menu of the viewer has all properties of atoms.
    parts = energy_model.predict_atoms(files)
    local = [local_contributions(*pair).std for pair in zip(files, parts, strict=True)]
    expected = {
        "σ of what the atom contributes": np.concatenate([part.std for part in parts]),
        "σ shared with neighbours": np.concatenate(local),
    }
    for name, values in expected.items():
        found = data["properties"][name]
        assert (found["target"], found["units"]) == ("atom", "eV")
        np.testing.assert_allclose(found["values"], values, rtol=1e-4)


def test_attributions_are_what_each_of_them_is(energy_model, molecules):
    some = molecules[150:153]
    found = attributions(energy_model, some)
    parts = energy_model.predict_atoms(some)
    for one, atoms, part in zip(found, some, parts, strict=True):
        np.testing.assert_allclose(one.novelty, atom_novelty(energy_model, [atoms])[0], atol=1e-6)
        np.testing.assert_allclose(one.std, part.std, rtol=1e-6)
        np.testing.assert_allclose(one.local_std, local_contributions(atoms, part).std, rtol=1e-6)


def test_too_many_atoms_are_not_coloured(files, energy_model, monkeypatch):
    monkeypatch.setattr(maps, "MAX_ENVIRONMENTS", 20)
    assert qualms("report model.safetensors new.xyz -o report.html --threads 1").code == 0
    with gzip.open("report.chemiscope.json.gz") as stream:
        data = json.load(stream)
    assert "environments" not in data
    assert "novelty (relative)" not in data["properties"]
