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
from test_html_report import Parsed

from qualms import AtomisticModel
from qualms.atomistic.model_file import FORMAT, PROTOCOL
from qualms.ensembles.io import read_ensemble
from qualms.io.container import Document, read_container, write_container


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
    assert "Stress" in printed.split("Validation")[1]
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
    assert "forces: 120 components of 10 structures" in done.out
    assert "stress: 60 components of 10 structures" in done.out
    document = json.loads(
        qualms("evaluate", files / "model.safetensors", files / "test.xyz", "--json").out
    )
    scores = {row["name"]: row for row in document["forces"]["scores"]}
    assert scores["student (internal)"]["rmse"] < 0.05
    assert document["forces"]["units"] == "eV/Å"
    assert document["forces"]["n_structures"] == 10
    scores = {row["name"]: row for row in document["stress"]["scores"]}
    assert scores["student (internal)"]["rmse"] < 0.01
    assert document["stress"]["units"] == "eV/Å³"


def test_evaluate_says_that_there_are_no_stresses(files, tmp_path):
    frames = ase.io.read(files / "test.xyz", ":")
    for atoms in frames:
        del atoms.calc.results["stress"]
    ase.io.write(tmp_path / "test.xyz", frames)
    done = qualms("evaluate", files / "model.safetensors", tmp_path / "test.xyz")
    assert done.code == 0, done.err
    assert "No structure has 'stress'" in done.err
    assert "forces: 120 components" in done.out
    assert "stress: " not in done.out


def test_predicted_stresses_are_those_of_the_model(files):
    done = qualms(
        "predict", files / "model.safetensors", files / "test.xyz", "-o", files / "stress.xyz",
        "--stress", "--ensemble", "--threads", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    found, given = ase.io.read(files / "stress.xyz", ":"), ase.io.read(files / "test.xyz", ":")
    model = AtomisticModel.load(files / "model.safetensors", threads=1)
    expected = model.predict_forces(given, stress=True)
    for atoms, before, (energy, _, stress) in zip(found, given, expected, strict=True):
        np.testing.assert_array_equal(atoms.get_stress(), stress.mean)
        assert atoms.get_potential_energy() == energy.mean
        assert "forces" not in atoms.calc.results
        np.testing.assert_array_equal(atoms.info["stress_uncertainty"], stress.std)
        members = atoms.info["stress_ensemble"].reshape(6, 6)  # members, components
        np.testing.assert_array_equal(members, stress.members.T)
        np.testing.assert_array_equal(atoms.info["REF_stress"], before.get_stress())
    # What is written is what `qualms calibrate` reads, of six components.
    ensemble = read_ensemble(files / "stress.xyz", "stress", order="member")
    assert ensemble.n_components == 6
    np.testing.assert_allclose(
        ensemble.members.mean(axis=1), expected.stress.mean.ravel(), atol=1e-12
    )


def test_stresses_in_arrays_of_numpy_beside_forces(files):
    done = qualms(
        "predict", files / "model.safetensors", files / "test.xyz", "-o", files / "both.npz",
        "--forces", "--stress", "--ensemble",
    )  # fmt: skip
    assert done.code == 0, done.err
    with np.load(files / "both.npz") as arrays:
        assert arrays["forces"].shape == (40, 3)
        assert arrays["stress"].shape == arrays["stress_uncertainty"].shape == (10, 6)
        assert arrays["stress_ensemble"].shape == (10, 36)


def test_a_predicted_stress_is_no_reference_for_later(files, tmp_path):
    frames = ase.io.read(files / "test.xyz", ":")
    for atoms in frames:
        atoms.calc = None
    ase.io.write(tmp_path / "new.xyz", frames)
    model = files / "model.safetensors"
    for source, target, options in (
        ("new.xyz", "once.xyz", ("--stress", "--forces", "--ensemble")),
        ("once.xyz", "twice.xyz", ("--stress",)),
        ("once.xyz", "plain.xyz", ()),
    ):
        done = qualms("predict", model, tmp_path / source, "-o", tmp_path / target, *options)
        assert done.code == 0, done.err
    once, twice, plain = (
        ase.io.read(tmp_path / name, 0) for name in ("once.xyz", "twice.xyz", "plain.xyz")
    )
    np.testing.assert_array_equal(twice.get_stress(), once.get_stress())
    for atoms in (twice, plain):
        names = {*atoms.info, *atoms.arrays}
        assert not {"REF_stress", "REF_forces", "REF_energy"} & names
        assert not {"forces_uncertainty", "forces_ensemble", "stress_ensemble"} & names
    assert "stress_uncertainty" not in plain.info


@pytest.fixture
def mixed(files, tmp_path):
    """One molecule among crystals."""
    frames = ase.io.read(files / "test.xyz", ":")
    frames[7].calc = None
    frames[7].pbc, frames[7].cell = False, None
    ase.io.write(tmp_path / "mixed.xyz", frames)
    ase.io.write(tmp_path / "molecule.xyz", frames[7])
    return frames


def test_structures_without_a_volume_have_no_stress_and_are_counted(files, mixed, tmp_path):
    model = files / "model.safetensors"
    for name in ("out.npz", "out.xyz"):
        done = qualms(
            "predict", model, tmp_path / "mixed.xyz", "--stress", "--forces", "--ensemble",
            "-o", tmp_path / name,
        )  # fmt: skip
        assert done.code == 0, done.err
        assert "1 of 10 structures have no cell with a volume" in done.err
    solid = np.arange(10) != 7
    some = [atoms for atoms, has in zip(mixed, solid, strict=True) if has]
    loaded = AtomisticModel.load(model, threads=1)
    expected = loaded.predict_forces(some, stress=True).stress
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.isnan(arrays["stress"][7]).all()
        assert np.isnan(arrays["stress_ensemble"][7]).all()
        assert np.isfinite(arrays["forces"]).all()
        np.testing.assert_allclose(arrays["stress"][solid], expected.mean, atol=1e-9)
        np.testing.assert_allclose(arrays["stress_uncertainty"][solid], expected.std, atol=1e-9)
    written = ase.io.read(tmp_path / "out.xyz", ":")
    assert "stress_uncertainty" not in written[7].info
    assert "stress" not in written[7].calc.results
    np.testing.assert_allclose(written[8].get_stress(), expected.mean[7], atol=1e-9)


@pytest.mark.parametrize("options", [("--stress",), ("--stress", "--forces", "--ensemble")])
def test_each_structure_is_computed_once_whether_it_has_a_volume_or_not(
    options, files, mixed, tmp_path, monkeypatch
):
    compute, asked = AtomisticModel.predict_forces, []

    def counting(self, frames, **given):
        asked.extend(frames)
        return compute(self, frames, **given)

    loaded = AtomisticModel.load(files / "model.safetensors", threads=1)
    expected = loaded.predict_forces(mixed)
    monkeypatch.setattr(AtomisticModel, "predict_forces", counting)
    done = qualms(
        "predict", files / "model.safetensors", tmp_path / "mixed.xyz", *options,
        "-o", tmp_path / "out.npz",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len(asked) == len(mixed)
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_allclose(arrays["energy"], expected.energy.mean, atol=1e-9)
        if "--forces" in options:
            np.testing.assert_allclose(arrays["forces"], expected.forces.mean, atol=1e-9)


def test_stress_of_molecules_alone_is_refused(files, mixed, tmp_path):
    done = qualms(
        "predict", files / "model.safetensors", tmp_path / "molecule.xyz", "--stress",
        "-o", tmp_path / "out.npz",
    )  # fmt: skip
    assert done.code == 2
    assert "no structure whose cell has a volume" in done.err
    assert not (tmp_path / "out.npz").exists()


def test_the_report_has_sections_of_forces_and_stresses(files, tmp_path):
    done = qualms(
        "report", files / "model.safetensors", files / "test.xyz", "-o", tmp_path / "report.html"
    )
    assert done.code == 0, done.err
    page = Parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    sections = [section["id"] for section in page.all("section")]
    assert sections.index("forces") < sections.index("stress") < sections.index("details")
    assert "forces in eV/Å: 120 predictions for 10 structures by 6 members" in page.text
    assert "stress in eV/Å³: 60 predictions for 10 structures" in page.text
    assert len(page.all("figure")) == 15
    labels = [tag["aria-label"] for tag in page.all("div") if "aria-label" in tag]
    assert len(labels) == len(set(labels))
    assert {"Verdict", "Verdict on forces", "Forces: scores", "Stress: Largest errors"} <= {*labels}
    assert "the 10 structures are independent" in page.text
    done = qualms(
        "report", files / "model.safetensors", files / "test.xyz", "-o", tmp_path / "report.html",
        "--json", "--force",
    )  # fmt: skip
    document = json.loads(done.out)
    assert document["forces"]["verdict"]["grade"] == "unknown"  # ten structures tell too little
    rmse = [row for row in document["stress"]["scores"] if row["score"] == "rmse"]
    assert [row["column"] for row in rmse] == ["before calibration", "after calibration"]
    assert rmse[0]["low"] < rmse[0]["value"] < rmse[0]["high"]


BAD = {
    "a misspelt key": (
        "train {train} --target energy --forces force -o {new}",
        "Did you mean 'forces'",
    ),
    "a property of atoms": (
        "train {train} --target forces --per-atom-target --forces forces -o {new}",
        "kind='extensive'",
    ),
    "a noise that is none": ("train {train} --target energy --noise much -o {new}", "'loo'"),
    "a noise of nothing": (
        "train {train} --target energy --forces-noise 0.1 -o {new}",
        "without forces to learn",
    ),
    "no derivatives": ("predict {plain} {test} --forces -o {new}.xyz", "featomic"),
    "a table": ("predict {model} {test} --forces -o {new}.csv", ".xyz or .npz"),
    "a table of stresses": ("predict {model} {test} --stress -o {new}.csv", "for stress"),
    "stress without derivatives": ("predict {plain} {test} --stress -o {new}.xyz", "featomic"),
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


# --- what is said before and after training ---


def train_on(frames, folder, *options, validation=()):
    """Train a small model on structures of `alloys`, as the command does, and return the latter."""
    ase.io.write(folder / "train.xyz", frames)
    if validation:
        ase.io.write(folder / "validation.xyz", validation)
        options = (*options, "--validation", folder / "validation.xyz")
    (folder / "config.yaml").write_text(
        "representation: {cutoff: 3.8, n_radial: 2, l_max: 1, smoothing: 0.8, compression: null}\n"
    )
    return qualms(
        "train", folder / "train.xyz", "--target", "energy", "--units", "eV", "--threads", 1,
        "--representatives", 20, "--members", 4, "--config", folder / "config.yaml",
        "-o", folder / "model.safetensors", *options,
    )  # fmt: skip


def alloys_without(*keys, some=slice(None)):
    """Structures, some of them without some labels."""
    frames = [atoms.copy() for atoms in alloys()]
    for atoms in frames[some]:
        for key in keys:
            del (atoms.arrays if key == "force" else atoms.info)[key]
    return frames


@pytest.mark.parametrize("energy", [True, False])
def test_stresses_to_validate_are_checked_before_training(energy, tmp_path):
    frames = alloys_without()
    frames[30].info["virtual"] = np.ones(5)
    if not energy:  # it is judged by its stress all the same
        del frames[30].info["energy"]
    options = ("--forces", "force", "--stress", "virtual")
    done = train_on(frames[:20], tmp_path, *options, validation=frames[20:])
    assert done.code == 2
    assert "frames[10].info['virtual']" in done.err
    assert not (tmp_path / "model.safetensors").exists()


def test_whatever_is_judged_has_elements_that_the_model_will_know(tmp_path):
    frames = alloys_without()
    del frames[30].info["energy"]
    frames[30].symbols[0] = "Ag"
    done = train_on(frames[:20], tmp_path, "--forces", "force", validation=frames[20:])
    assert done.code == 2
    assert "frames[10]" in done.err
    assert not (tmp_path / "model.safetensors").exists()


def test_a_validation_set_may_have_energies_alone(tmp_path):
    frames, validation = alloys_without()[:20], alloys_without("force", "virtual")[20:]
    options = ("--forces", "force", "--stress", "virtual")
    done = train_on(frames, tmp_path, *options, validation=validation)
    assert done.code == 0, done.err
    assert "No structure has 'force'" in done.err
    assert "No structure has 'virtual'" in done.err
    document = json.loads((tmp_path / "model.json").read_text())
    assert document["validation"]
    assert not {"forces_validation", "stress_validation"} & {*document}


def test_structures_without_what_was_asked_for_are_counted_before_training(tmp_path):
    frames = alloys_without("virtual", some=slice(17, 20))[:20]
    done = train_on(frames, tmp_path, "--stress", "virtual")
    assert done.code == 0, done.err
    assert "3 of 20 have no stress.\n" in done.err.split("environments ×")[0]
    assert "no forces" not in done.err
    frames = alloys_without("force", some=slice(18, 20))[:20]
    done = train_on(frames, tmp_path, "--forces", "force", "--force")
    assert done.code == 0, done.err
    assert "2 of 20 have no forces.\n" in done.err.split("environments ×")[0]
    assert "no stress" not in done.err


def test_noises_are_given_as_options(tmp_path):
    noises = ("--noise", "1e-4", "--forces-noise", "0.01", "--stress-noise", "4e-4")
    options = ("--forces", "force", "--stress", "virtual", *noises)
    done = train_on(alloys_without()[:20], tmp_path, *options)
    assert done.code == 0, done.err
    document = json.loads((tmp_path / "model.json").read_text())
    given = [document["settings"][name] for name in ("noise", "forces_noise", "stress_noise")]
    assert given == [1e-4, 0.01, 4e-4]
    assert document["training"]["forces_noise"] == pytest.approx(0.1)


def test_files_of_the_protocol_before_forces_are_read(energy_model, molecules, tmp_path):
    energy_model.save(tmp_path / "new.safetensors")
    stored = read_container(tmp_path / "new.safetensors", Anything, format=FORMAT, version=PROTOCOL)
    document = stored.document.model_dump()
    del document["forces_calibrations"], document["stress_calibrations"]
    for name in ("forces", "stress", "forces_noise", "stress_noise"):
        del document["settings"][name]
    mechanical = ("force", "virial", "stress")
    for name in [key for key in document["record"] if any(word in key for word in mechanical)]:
        del document["record"][name]
    write_container(
        tmp_path / "old.safetensors", stored.tensors, Anything(**document), format=FORMAT, version=1
    )
    old = AtomisticModel.load(tmp_path / "old.safetensors", threads=1)
    np.testing.assert_array_equal(
        old.predict(molecules[:3]).members, energy_model.predict(molecules[:3]).members
    )
