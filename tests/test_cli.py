"""The command line as a user meets it; what it refuses is in test_cli_bad_input.py."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import ENERGY, SMALL, contents, copies, qualms, same_predictions, truth

import qualms as package
from qualms import AtomisticModel
from qualms.atomistic.structures import read_frames
from qualms.data import qm9

COMMAND = Path(sys.executable).with_name("qualms")


def installed(directory, command, *more):
    """Run the installed command in a directory."""
    return subprocess.run(
        [COMMAND, *command.split(), *map(str, more)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def workshop(molecules, tmp_path, monkeypatch):
    """A directory with structures, and settings that make training fast."""
    frames = copies(molecules)
    for i, atoms in enumerate(frames):
        atoms.info = {ENERGY: atoms.info[ENERGY], "run": f"run {i // 4}"}
    ase.io.write(tmp_path / "train.xyz", frames[:60], format="extxyz")
    ase.io.write(tmp_path / "test.xyz", frames[120:150], format="extxyz")
    small = {"target": ENERGY, "representation": SMALL, "n_representatives": 60, "threads": 1}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def trained(workshop, energy_model):
    energy_model.save("model.safetensors")
    return workshop


def train(command=""):
    """Train in this process and return the summary."""
    ended = qualms(f"train train.xyz --config small.yaml -o model.safetensors --json {command}")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


# --- from structures to error bars with the installed command ---


def test_from_a_file_to_error_bars(tmp_path):
    molecules = qm9(n=140)
    for atoms in molecules:
        atoms.calc = SinglePointCalculator(atoms, energy=atoms.info[ENERGY])
        atoms.info = {"name": "x"}
    ase.io.write(tmp_path / "data.xyz", molecules[:100], format="extxyz")
    ase.io.write(tmp_path / "new.xyz", molecules[100:], format="extxyz")
    y = np.array([atoms.get_potential_energy() for atoms in molecules[100:]])

    learned = installed(
        tmp_path,
        "train data.xyz --target energy --units eV --representatives 150 --threads 1"
        " -o model.safetensors",
    )
    assert learned.returncode == 0, learned.stderr
    assert "energy in eV (extensive)" in learned.stdout
    assert "α = " in learned.stdout
    for said in ("environments", "memory", "time about", "Wrote model.safetensors and model.json"):
        assert said in learned.stderr
    assert sorted(os.listdir(tmp_path)) == [
        "data.xyz",
        "model.json",
        "model.safetensors",
        "new.xyz",
    ]
    summary = json.loads((tmp_path / "model.json").read_text())
    assert summary["settings"]["target"] == "energy"
    assert summary["training"]["n_structures"] == 100
    assert summary["calibrations"]["student"]["alpha"] > 0

    predicted = installed(tmp_path, "predict model.safetensors new.xyz -o out.xyz --ensemble")
    assert predicted.returncode == 0, predicted.stderr
    assert "40 structures → out.xyz" in predicted.stdout
    out = ase.io.read(tmp_path / "out.xyz", ":")
    means = np.array([atoms.get_potential_energy() for atoms in out])
    stds = truth(out, "energy_uncertainty")
    ensemble = np.array([atoms.info["energy_ensemble"] for atoms in out])
    np.testing.assert_allclose(ensemble.mean(axis=1), means)
    np.testing.assert_allclose(ensemble.std(axis=1, ddof=1), stds)
    np.testing.assert_allclose(truth(out, "REF_energy"), y)
    assert {atoms.info["name"] for atoms in out} == {"x"}
    assert np.sqrt(np.mean((means - y) ** 2)) < 0.1 * np.std(y)
    assert 0.45 < np.mean(np.abs(means - y) < stds) < 0.95
    flagged = sum(atoms.info["qualms_extrapolates"] for atoms in out)
    assert (f"{flagged} of 40 structures look like" in predicted.stderr) == bool(flagged)

    judged = installed(tmp_path, "evaluate model.safetensors new.xyz --json")
    assert judged.returncode == 0, judged.stderr
    scores = {row["name"]: row for row in json.loads(judged.stdout)["scores"]}
    assert len(scores) == 8
    n_atoms = np.array([len(atoms) for atoms in out])
    rmse = np.sqrt(np.mean(((means - y) / n_atoms) ** 2))
    assert scores["student (internal)"]["rmse"] == pytest.approx(rmse)

    about = installed(tmp_path, "info model.safetensors")
    assert about.returncode == 0
    assert about.stdout == learned.stdout


def test_ctrl_c_leaves_nothing_half_written_and_a_run_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ase.io.write("data.xyz", molecules := qm9(n=150), format="extxyz")
    command = f"train data.xyz --target {ENERGY} --representatives 2000 --threads 1"
    process = subprocess.Popen(
        [COMMAND, *command.split(), "--checkpoint", "-o", "model.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Jobs in the background of a shell ignore the signal, and so would theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    manifest = Path("model.safetensors.checkpoint", "manifest.json")
    while process.poll() is None:
        if manifest.exists() and "features" in manifest.read_text():
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1].startswith("Error: Interrupted")
    assert "Traceback" not in err
    assert sorted(os.listdir()) == ["data.xyz", "model.safetensors.checkpoint"]
    resumed = qualms(f"{command} --resume -o model.safetensors")
    assert resumed.code == 0, resumed.err
    whole = qualms(f"{command} -o whole.safetensors")
    assert whole.code == 0, whole.err
    models = [AtomisticModel.load(f"{name}.safetensors") for name in ("model", "whole")]
    same_predictions(*models, molecules[:10])
    assert "Power spectra" not in models[0].record.seconds
    assert not manifest.parent.exists()


# --- train ---


def test_quiet_prints_results_only_and_json_is_json(workshop):
    quiet = qualms("train train.xyz --config small.yaml -o model.safetensors --quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out.startswith("target ")
    document = train("--force")
    assert document == json.loads(Path("model.json").read_text())
    assert document["settings"]["n_representatives"] == 60
    assert document["training"]["n_rows"] == 60


def test_same_seed_same_result(workshop):
    models = []
    for seed in (5, 5, 6):
        train(f"--seed {seed} --force")
        models.append(AtomisticModel.load("model.safetensors", threads=1))
    frames = read_frames("test.xyz")
    same_predictions(models[0], models[1], frames)
    assert not np.array_equal(models[0].predict(frames).mean, models[2].predict(frames).mean)


def test_flags_win_over_the_config(workshop):
    config = {
        "target": "nothing",
        "kind": "intensive",
        "n_members": 4,
        "n_representatives": 50,
        "representation": {"preset": "nmr", "n_radial": 3, "l_max": 2, "exponent": 3},
        "baseline": {"H": 0.0, "C": 0.0, "N": 0.0, "O": 0.0, "F": 0.0},
        "threads": 1,
    }
    Path("small.yaml").write_text(yaml.safe_dump(config))
    flags = f"--target {ENERGY} --members 6 --subsample 40 --baseline mean --calibration linear"
    settings = train(f"{flags} --cutoff 4.25 --units eV --selection random")["settings"]
    assert settings["target"] == ENERGY
    assert settings["kind"] == "intensive"
    assert (settings["n_members"], settings["subsample"]) == (6, 40)
    assert (settings["baseline"], settings["calibration"]) == ("mean", "linear")
    assert (settings["units"], settings["selection"]) == ("eV", "random")
    (scale,) = settings["representation"]["scales"]
    assert (scale["cutoff"], scale["n_radial"], scale["l_max"]) == (4.25, 3, 2)
    assert settings["representation"]["exponent"] == 3
    named = train(f"--target {ENERGY} --representation general --force --baseline none")
    assert named["settings"]["representation"]["scales"][0]["cutoff"] == 5.5


def test_the_validation_set_is_scored(workshop):
    document = train("--validation test.xyz")
    names = [row["name"] for row in document["validation"]]
    assert "student (internal)" in names
    assert document["validation"][0]["n_points"] == 30
    table = qualms(
        "train train.xyz --config small.yaml -o model.safetensors --validation test.xyz -fq"
    )
    assert "Validation" in table.out
    assert "student (internal)" in table.out


def test_groups_by_key(workshop):
    train("--group-key run --baseline mean")
    membership = AtomisticModel.load("model.safetensors").fitted.membership
    for i in range(15):
        assert (membership[4 * i : 4 * i + 4] == membership[4 * i]).all()


def test_unlabelled_structures_and_duplicates_are_counted(workshop):
    frames = ase.io.read("train.xyz", ":")
    del frames[3].info[ENERGY]
    frames[4].info[ENERGY] = np.nan
    ase.io.write("train.xyz", [*frames, frames[0]], format="extxyz")
    ended = qualms("train train.xyz --config small.yaml -o model.safetensors")
    assert ended.code == 0
    assert "2 without a label are skipped" in ended.err
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("Warning")]
    assert "1 of 59 structures repeat" in warning
    assert "2 unlabelled skipped" in ended.out
    assert "1 duplicates" in ended.out


def test_fewer_environments_than_representatives(workshop):
    ase.io.write("few.xyz", ase.io.read("train.xyz", ":12"), format="extxyz")
    command = f"train few.xyz --target {ENERGY} --cutoff 4 --threads 1 -o model.safetensors"
    ended = qualms(command)
    assert ended.code == 0
    n = sum(len(atoms) for atoms in ase.io.read("few.xyz", ":"))
    assert f"12 labels, {n} representatives" in ended.err
    assert "of 1000 asked for" in ended.out


def test_an_interrupted_run_is_resumed_without_its_checkpoint_option_too(workshop, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    command = "train train.xyz --config small.yaml -o model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("qualms.atomistic.training.select_representatives", interrupt)
        ended = qualms(f"{command} --checkpoint")
        assert ended.code == 130
        assert "--resume" in ended.err.splitlines()[-1]
        # Short runs keep nothing unless they are asked to.
        assert qualms(f"{command} -o other.safetensors").code == 130
        assert not Path("other.safetensors.checkpoint").exists()
    assert Path("model.safetensors.checkpoint/features").stat().st_size > 0
    assert not Path("model.safetensors").exists()
    ended = qualms(f"{command} --resume")
    assert ended.code == 0
    assert "starts from the beginning" not in ended.err
    assert not Path("model.safetensors.checkpoint").exists()


def test_what_is_not_resumed_is_said(workshop):
    command = "train train.xyz --config small.yaml -o model.safetensors"
    ended = qualms(f"{command} --resume")
    assert ended.code == 0
    assert "starts from the beginning" in ended.err
    Path("model.safetensors.checkpoint").mkdir()
    ended = qualms(f"{command} --checkpoint --force")
    assert ended.code == 0
    assert "--resume would go on with it" in ended.err


# --- predict ---


def test_tables_and_arrays(trained, energy_model):
    frames = read_frames("test.xyz")
    expected = energy_model.predict(frames)
    for name in ("out.csv", "out.npz", "out.xyz.gz"):
        ended = qualms(f"predict model.safetensors test.xyz --ensemble --threads 1 -o {name}")
        assert ended.code == 0, ended.err
    arrays = np.load("out.npz")
    np.testing.assert_array_equal(arrays[ENERGY], expected.mean)
    np.testing.assert_array_equal(arrays[f"{ENERGY}_uncertainty"], expected.std)
    np.testing.assert_array_equal(arrays[f"{ENERGY}_ensemble"], expected.members)
    np.testing.assert_array_equal(arrays["qualms_extrapolates"], energy_model.extrapolates(frames))
    with open("out.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_array_equal([float(row[ENERGY]) for row in rows], expected.mean)
    np.testing.assert_array_equal(
        [float(row[f"{ENERGY}_ensemble_15"]) for row in rows], expected.members[:, 15]
    )
    np.testing.assert_array_equal(truth(read_frames("out.xyz.gz")), expected.mean)
    units = f"{ENERGY}_units"
    assert {row[units] for row in rows} == {*arrays[units]} == {energy_model.settings.units}
    assert read_frames("out.xyz.gz")[0].info[units] == energy_model.settings.units


def test_without_being_asked_members_are_not_written(trained):
    assert qualms("predict model.safetensors test.xyz -o out.csv").code == 0
    header = Path("out.csv").read_text().splitlines()[0]
    assert header == (
        f"index,formula,n_atoms,{ENERGY},{ENERGY}_uncertainty,qualms_extrapolates,{ENERGY}_units"
    )


def test_predictions_of_atoms(workshop, molecules):
    frames = copies(molecules[:60])
    for atoms in frames:
        atoms.info = {}
    ase.io.write("atoms.xyz", frames, format="extxyz")
    ended = qualms(
        "train atoms.xyz --config small.yaml --target shift --per-atom-target --species H"
        " -o model.safetensors"
    )
    assert ended.code == 0, ended.err
    assert "shift (atomic of H)" in ended.out
    ase.io.write("new.xyz", [*molecules[120:123], molecule("CO2")], format="extxyz")
    for name in ("out.xyz", "out.csv"):
        assert qualms(f"predict model.safetensors new.xyz -o {name} --ensemble").code == 0
    out = read_frames("out.xyz")
    for atoms in out:
        hydrogen = atoms.numbers == 1
        assert (np.isfinite(atoms.arrays["shift"]) == hydrogen).all()
        assert (atoms.arrays["shift_uncertainty"][hydrogen] > 0).all()
        assert atoms.arrays["shift_ensemble"].shape == (len(atoms), 16)
    rows = Path("out.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(np.count_nonzero(atoms.numbers == 1) for atoms in out)
    judged = qualms("evaluate model.safetensors new.xyz --json")
    # The molecule without labels has no hydrogen, either.
    assert (json.loads(judged.out)["n_points"], json.loads(judged.out)["n_unlabelled"]) == (
        len(rows) - 1,
        0,
    )


def test_extrapolation_is_counted(trained):
    frames = read_frames("test.xyz")
    for atoms in frames[:5]:
        atoms.positions *= 0.6
    ase.io.write("strange.xyz", frames, format="extxyz")
    ended = qualms("predict model.safetensors strange.xyz -o out.xyz --json -q")
    document = json.loads(ended.out)
    flags = truth(read_frames("out.xyz"), "qualms_extrapolates")
    assert flags[:5].all()
    assert document["n_extrapolating"] == flags.sum() >= 5
    assert f"Warning: {flags.sum()} of 30 structures look like extrapolation" in ended.err


def test_elements_can_be_ignored(trained):
    ase.io.write("new.xyz", [molecule("CH3Cl"), molecule("CH4")], format="extxyz")
    ended = qualms("predict model.safetensors new.xyz -o out.xyz --ignore-unknown-species")
    assert ended.code == 0
    assert "1 of 2 structures have elements that are ignored" in ended.err
    first, second = read_frames("out.xyz")
    assert len(first) == 5
    assert first.info["qualms_extrapolates"]
    assert second.info[f"{ENERGY}_uncertainty"] > 0


def test_an_input_can_be_replaced_by_its_predictions(trained):
    assert qualms("predict model.safetensors test.xyz -o test.xyz --force").code == 0
    again = read_frames("test.xyz")
    assert len(again) == 30
    assert all(f"REF_{ENERGY}" in atoms.info for atoms in again)
    assert qualms("predict model.safetensors test.xyz -o test.xyz --force").code == 0
    assert len(read_frames("test.xyz")) == 30


def test_an_interrupted_prediction_leaves_nothing(trained, monkeypatch):
    def frames(path):
        yield from read_frames(path)[:2]
        raise KeyboardInterrupt

    before = contents(trained)
    monkeypatch.setattr("qualms.cli.predict.iter_frames", frames)
    ended = qualms("predict model.safetensors test.xyz -o out.xyz")
    assert ended.code == 130
    assert len(ended.err.splitlines()) == 1
    assert contents(trained) == before


# --- evaluate, info, demo ---


def test_evaluate_prints_the_table(trained):
    ended = qualms("evaluate model.safetensors test.xyz --validation train.xyz")
    assert ended.code == 0
    for row in ("raw", "linear (validation)", "student (internal)", "GPR PP"):
        assert row in ended.out
    assert "30 points" in ended.out
    assert "eV/atom" in ended.out
    assert "fitted to 60 validation points" in ended.out


def test_info_is_the_summary(trained, energy_model):
    for quiet in ("", "--quiet"):
        assert qualms(f"info model.safetensors {quiet}").out.strip() == energy_model.summary()
    document = json.loads(qualms("info model.safetensors --json").out)
    assert document["provenance"]["data_digest"] == energy_model.provenance.data_digest


def test_the_demo_goes_the_whole_way(tmp_path, monkeypatch):
    for name, n in (("N_TRAIN", 120), ("N_VALIDATION", 40), ("N_TEST", 40)):
        monkeypatch.setattr(f"qualms.cli.demo.{name}", n)
    monkeypatch.setattr("qualms.cli.demo.SIZES", (0.25, 0.5))
    monkeypatch.chdir(tmp_path)
    ended = qualms("demo --threads 1")
    assert ended.code == 0, ended.err
    assert "Mean log likelihood" in ended.out
    assert " ± " in ended.out
    files = {"model.safetensors", "errors.png", "parity.png", "reliability.png", "subsamples.png"}
    assert set(os.listdir("qualms-demo")) == files
    assert all(Path("qualms-demo", name).stat().st_size > 1000 for name in files)
    assert AtomisticModel.load("qualms-demo/model.safetensors").record.n_structures == 120
    before = contents(tmp_path)
    again = qualms("demo")
    assert again.code == 2
    assert "--force" in again.err
    assert contents(tmp_path) == before


def test_help_and_version():
    assert qualms("--version").out.strip() == f"qualms {package.__version__}"
    ended = qualms("--help")
    assert ended.code == 0
    for command in ("train", "predict", "evaluate", "info", "demo"):
        assert command in ended.out
    assert shutil.which(COMMAND)
