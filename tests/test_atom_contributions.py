"""Which atoms make a structure uncertain: files of predictions, and the map of a report."""

import gzip
import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import ENERGY, copies, make_model, qualms

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


# --- in a report ---


def test_the_map_of_a_report_colours_atoms(files, energy_model):
    assert qualms("report model.safetensors new.xyz -o report.html --threads 1").code == 0
    with gzip.open("report.chemiscope.json.gz") as stream:
        data = json.load(stream)
    inside = data["properties"]["σ of the atom"]
    assert inside["target"] == "atom"
    expected = np.concatenate([p.std for p in energy_model.predict_atoms(files)])
    np.testing.assert_allclose(inside["values"], expected, rtol=1e-5)
    places = [(e["structure"], e["center"]) for e in data["environments"]]
    assert places == [(i, j) for i, atoms in enumerate(files) for j in range(len(atoms))]
    assert data["settings"]["target"] == "structure"
    assert data["settings"]["structure"][0]["color"]["property"] == "σ of the atom"
    assert "coloured by the error bars" in Path("report.html").read_text(encoding="utf-8")


def test_too_many_atoms_are_not_coloured(files, energy_model, monkeypatch):
    monkeypatch.setattr(maps, "MAX_ENVIRONMENTS", 20)
    assert qualms("report model.safetensors new.xyz -o report.html --threads 1").code == 0
    with gzip.open("report.chemiscope.json.gz") as stream:
        data = json.load(stream)
    assert "environments" not in data
    assert "σ of the atom" not in data["properties"]
