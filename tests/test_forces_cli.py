"""Forces on the command line, as a user has them: from files, to files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import contents, qualms
from test_forces_training import alloys

from qualms import AtomisticModel
from qualms.atomistic.model_file import FORMAT, PROTOCOL
from qualms.external.reading import read_ensemble
from qualms.storage.container import Document, read_container, write_container


class Anything(Document, extra="allow"):
    """A document whose fields nobody looks at."""


OPTIONS = "--target energy --forces forces --units eV --representatives 40 --members 6 --threads 1"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training and test structures in files as ASE writes them, and a model."""
    folder = tmp_path_factory.mktemp("forces")
    frames = []
    for atoms in alloys():
        copy = atoms.copy()
        results = {"energy": copy.info.pop("energy"), "forces": copy.arrays.pop("force")}
        copy.calc = SinglePointCalculator(copy, stress=copy.info.pop("virtual"), **results)
        frames.append(copy)
    ase.io.write(folder / "train.xyz", frames[:26])
    ase.io.write(folder / "test.xyz", frames[26:])
    (folder / "config.yaml").write_text(
        "representation: {cutoff: 3.8, n_radial: 3, l_max: 2, smoothing: 0.8}\n"
    )
    command = [Path(sys.executable).with_name("qualms"), "train", "train.xyz", *OPTIONS.split()]
    command += ["--stress", "stress", "--config", "config.yaml", "--validation", "test.xyz"]
    # As a user runs it: the installed command, in a process of its own.
    done = subprocess.run(
        [*map(str, command), "-o", "model.safetensors"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def test_training_says_what_became_of_the_forces(files):
    printed = (files / "printed.txt").read_text()
    assert "312 components, 156 of stresses; σ = " in printed
    assert "eV/Å" in printed
    assert "Forces" in printed.split("Validation")[1]
    document = json.loads((files / "model.json").read_text())
    assert document["training"]["n_force_rows"] == 312
    assert 0 < document["forces_calibrations"]["student"]["n_points"] <= 312
    assert document["forces_validation"]


def test_predicted_forces_are_those_of_the_model(files):
    done = qualms(
        "predict", files / "model.safetensors", files / "test.xyz", "-o", files / "out.xyz",
        "--forces", "--ensemble", "--threads", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    found, given = ase.io.read(files / "out.xyz", ":"), ase.io.read(files / "test.xyz", ":")
    model = AtomisticModel.load(files / "model.safetensors", threads=1)
    expected = model.predict_forces(given)
    for atoms, before, (energy, forces, _) in zip(found, given, expected, strict=True):
        # ASE reads them as results of a calculator, as it does with references.
        np.testing.assert_array_equal(atoms.get_forces(), forces.mean)
        assert atoms.get_potential_energy() == energy.mean
        np.testing.assert_array_equal(atoms.arrays["forces_uncertainty"], forces.std)
        members = atoms.arrays["forces_ensemble"].reshape(len(atoms), 6, 3)
        np.testing.assert_array_equal(members, forces.members.transpose(0, 2, 1))
        np.testing.assert_array_equal(atoms.arrays["REF_forces"], before.get_forces())
    # What is written is what `qualms calibrate` reads.
    ensemble = read_ensemble(files / "out.xyz", "forces")
    assert len(ensemble) == 3 * sum(map(len, given))
    np.testing.assert_allclose(
        np.sort(ensemble.members.mean(axis=1)), np.sort(expected.forces.mean.ravel()), atol=1e-12
    )


def test_predictions_of_predictions_do_not_become_references(files):
    for source, target in (("test.xyz", "once.xyz"), ("once.xyz", "twice.xyz")):
        done = qualms(
            "predict", files / "model.safetensors", files / source, "-o", files / target, "--forces"
        )
        assert done.code == 0, done.err
    once, twice = ase.io.read(files / "once.xyz", ":"), ase.io.read(files / "twice.xyz", ":")
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_array_equal(a.arrays["REF_forces"], b.arrays["REF_forces"])
        np.testing.assert_array_equal(a.get_forces(), b.get_forces())


def test_forces_in_arrays_of_numpy(files):
    done = qualms(
        "predict", files / "model.safetensors", files / "test.xyz", "-o", files / "out.npz",
        "--forces",
    )  # fmt: skip
    assert done.code == 0, done.err
    with np.load(files / "out.npz") as arrays:
        assert arrays["forces"].shape == arrays["forces_uncertainty"].shape == (40, 3)
        assert arrays["n_atoms"].sum() == 40
        assert "forces_ensemble" not in arrays


def test_evaluate_has_a_table_of_forces(files):
    done = qualms("evaluate", files / "model.safetensors", files / "test.xyz")
    assert done.code == 0, done.err
    assert "forces: 120 components" in done.out
    document = json.loads(
        qualms("evaluate", files / "model.safetensors", files / "test.xyz", "--json").out
    )
    scores = {row["name"]: row for row in document["forces"]["scores"]}
    assert scores["student (internal)"]["rmse"] < 0.05
    assert document["forces"]["units"] == "eV/Å"


BAD = {
    "a misspelt key": (
        "train {train} --target energy --forces force -o {new}",
        "Did you mean 'forces'",
    ),
    "a property of atoms": (
        "train {train} --target forces --per-atom-target --forces forces -o {new}",
        "kind='extensive'",
    ),
    "no derivatives": ("predict {plain} {test} --forces -o {new}.xyz", "featomic"),
    "a table": ("predict {model} {test} --forces -o {new}.csv", ".xyz or .npz"),
    "unknown species": (
        "predict {model} {test} --forces --ignore-unknown-species -o {new}.xyz",
        "one of the two",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(name, files, energy_model, tmp_path):
    plain = tmp_path / "plain.safetensors"
    energy_model.save(plain)
    before = contents(tmp_path)
    command, message = BAD[name]
    done = qualms(
        command.format(
            train=files / "train.xyz",
            test=files / "test.xyz",
            model=files / "model.safetensors",
            plain=plain,
            new=tmp_path / "new",
        )
    )
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert contents(tmp_path) == before


def test_files_of_the_protocol_before_forces_are_read(energy_model, molecules, tmp_path):
    energy_model.save(tmp_path / "new.safetensors")
    stored = read_container(tmp_path / "new.safetensors", Anything, format=FORMAT, version=PROTOCOL)
    document = stored.document.model_dump()
    del document["forces_calibrations"]
    for name in ("forces", "stress", "forces_noise"):
        del document["settings"][name]
    for name in [key for key in document["record"] if "force" in key or "virial" in key]:
        del document["record"][name]
    write_container(
        tmp_path / "old.safetensors", stored.tensors, Anything(**document), format=FORMAT, version=1
    )
    old = AtomisticModel.load(tmp_path / "old.safetensors", threads=1)
    np.testing.assert_array_equal(
        old.predict(molecules[:3]).members, energy_model.predict(molecules[:3]).members
    )
