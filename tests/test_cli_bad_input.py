"""Whatever is wrong with the input: one line, exit code 2, and every file as it was."""

import os
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase.build import molecule
from atomistic_fixtures import ENERGY, SMALL, contents, copies, qualms

SMALL_RUN = {"target": ENERGY, "representation": SMALL, "n_representatives": 60, "threads": 1}


@pytest.fixture(scope="module")
def desk(molecules, energy_model, tmp_path_factory):
    """A directory with good and bad files, which no test may change."""
    directory = tmp_path_factory.mktemp("desk")

    def write(name, frames):
        ase.io.write(directory / name, frames, format="extxyz")

    def text(name, content):
        (directory / name).write_text(content)

    good = copies(molecules[:40])
    for atoms in good:
        atoms.info = {ENERGY: atoms.info[ENERGY]}
        del atoms.arrays["shift"]
    write("good.xyz", good)
    for n in (1, 4):
        write(f"{n}.xyz", good[:n])
    write("same.xyz", [good[0]] * 20)
    bare = copies(good)
    for atoms in bare:
        atoms.info = {}
    write("unlabelled.xyz", bare)
    for name, value in (("nan.xyz", np.nan), ("infinite.xyz", np.inf), ("words.xyz", "high")):
        for atoms in bare:
            atoms.info = {ENERGY: value}
        write(name, bare)
    clash = copies(good)
    clash[7].positions[1] = clash[7].positions[0]
    write("clash.xyz", clash)
    flat = copies(good)
    flat[5].cell, flat[5].pbc = [[3, 0, 0], [6, 0, 0], [0, 0, 3]], True
    write("flat.xyz", flat)
    write("chlorine.xyz", [molecule("CH4"), molecule("CH3Cl")])
    labelled_chlorine = molecule("CH3Cl")
    labelled_chlorine.info[ENERGY] = -16.0
    write("labelled_chlorine.xyz", [good[0], labelled_chlorine])
    text("empty.xyz", "")
    text("prose.xyz", "Dear editor,\nplease find attached\n")
    text("truncated.xyz", (directory / "good.xyz").read_text()[:3000])
    text("binary.xyz", "".join(map(chr, range(256))) * 10)
    text("small.yaml", yaml.safe_dump(SMALL_RUN))
    text("broken.yaml", "a: [1\nb: {\n- c")
    text("list.yaml", "- target\n- energy\n")
    text("numbers.yaml", "1: 2\n")
    text("unknown.yaml", yaml.safe_dump(SMALL_RUN | {"n_representative": 5}))
    text("kernel.yaml", yaml.safe_dump(SMALL_RUN | {"representation": {"cutof": 3}}))
    text("key.yaml", yaml.safe_dump(SMALL_RUN | {"representation": {5: 3}}))
    text("memory.yaml", yaml.safe_dump(SMALL_RUN | {"memory": [8]}))
    text("threads.yaml", yaml.safe_dump(SMALL_RUN | {"threads": "two"}))
    text("precious.safetensors", "precious")
    text("precious.csv", "precious")
    text("summary.json", "precious")
    (directory / "folder").mkdir()
    energy_model.save(directory / "model.safetensors")
    data = (directory / "model.safetensors").read_bytes()
    (directory / "cut.safetensors").write_bytes(data[:-5])
    (directory / "flipped.safetensors").write_bytes(data[:-5] + b"\x07" + data[-4:])
    return directory


TRAIN = {
    "no file": ("none.xyz", "'none.xyz' (No such file"),
    "an empty file": ("empty.xyz", "'empty.xyz' (empty)"),
    "a directory": ("folder", "Is a directory"),
    "prose": ("prose.xyz", "extended XYZ"),
    "a truncated file": ("truncated.xyz", "the file ends after"),
    "a binary file": ("binary.xyz", "extended XYZ"),
    "a model": ("model.safetensors", "extended XYZ"),
    "no labels": ("unlabelled.xyz", "structures have (there is none)"),
    "NaN": ("nan.xyz", "a label of at least one structure"),
    "infinite labels": ("infinite.xyz", "a finite number"),
    "words for labels": ("words.xyz", "'high' cannot be used: expected one number"),
    "a misspelt key": ("good.xyz --target atomisation_energy", f"Did you mean '{ENERGY}'?"),
    "a label with a meaning of its own": (
        "good.xyz --target positions --per-atom-target",
        "no name with a meaning of its own",
    ),
    "a target that predictions could not have": ("good.xyz --target 'my key'", "letters, digits"),
    "sub-samples that leave nothing to calibrate on": ("good.xyz --subsample 0.99", "to calibrate"),
    "its own output": ("good.xyz -o good.xyz --force", "another file than those that are read"),
    "labels of structures for atoms": (
        "good.xyz --per-atom-target",
        "use kind='extensive' or 'intensive'",
    ),
    "two atoms on one place": ("clash.xyz", "frames[7]=atoms 0 "),
    "a flat cell": ("flat.xyz", "frames[5]=cell"),
    "one structure": ("1.xyz", "at least 2 different labelled structures"),
    "copies of one structure": ("same.xyz", "at least 2 different labelled structures"),
    "too few to calibrate": ("4.xyz", "none is left to calibrate on"),
    "too few to calibrate, without their composition": (
        "4.xyz --baseline mean --members 2",
        "at least 3 of 2 members",
    ),
    "two kinds": ("good.xyz --intensive --per-atom-target", "one of the two"),
    "species of structures": ("good.xyz --species H", "unless kind='atomic'"),
    "no element": ("good.xyz --per-atom-target --species Hh", "'Hh' is no chemical element"),
    "too little memory": ("good.xyz --memory 10MB", "memory=10.0 MB cannot be used: expected at"),
    "no memory": ("good.xyz --memory lots", "memory='lots'"),
    "a strange sub-sample": ("good.xyz --subsample 2.5", "subsample=2.5"),
    "too large a sub-sample": ("good.xyz --subsample 40", "subsample=40"),
    "one member": ("good.xyz --members 1", "n_members=1"),
    "no representatives": ("good.xyz --representatives 0", "n_representatives=0"),
    "a calibration that is none": ("good.xyz --calibration magic", "'magic'"),
    "a baseline that is none": ("good.xyz --baseline magic", "'magic'"),
    "a baseline that is not there": ("good.xyz --baseline atoms", "none for H, C, N, O"),
    "a representation that is none": ("good.xyz --representation magic", "'magic'"),
    "a cutoff of nothing": ("good.xyz --cutoff 0", "cutoff=0.0"),
    "a group that is not there": ("good.xyz --group-key run", f"Keys present: {ENERGY}"),
    "broken YAML": ("good.xyz --config broken.yaml", "a readable YAML file"),
    "no YAML": ("good.xyz --config none.yaml", "No such file"),
    "a list": ("good.xyz --config list.yaml", "a mapping of settings"),
    "numbers for names": ("good.xyz --config numbers.yaml", "a mapping of settings"),
    "an unknown setting": ("good.xyz --config unknown.yaml", "unknown.yaml=n_representative "),
    "an unknown parameter": ("good.xyz --config kernel.yaml", "unknown cutof "),
    "a number for a parameter": ("good.xyz --config key.yaml", "unknown 5 "),
    "a list of memory": ("good.xyz --config memory.yaml", "memory=[8]"),
    "words for threads": ("good.xyz --config threads.yaml", "threads='two'"),
    "no validation": ("good.xyz --validation none.xyz", "'none.xyz'"),
    "validation without labels": ("good.xyz --validation unlabelled.xyz", "there is none"),
    "validation that cannot be used": ("good.xyz --validation clash.xyz", "frames[7]"),
    "validation of other elements": (
        "good.xyz --validation labelled_chlorine.xyz",
        "in frames[1]",
    ),
    "nothing to resume": ("good.xyz --resume -o folder", "It is a directory"),
    "an existing model": ("good.xyz -o precious.safetensors", "--force"),
    "an existing summary": ("good.xyz -o summary.safetensors", "summary.json"),
    "the name of the summary": ("good.xyz -o model.json --force", "another suffix"),
    "an output nowhere": ("good.xyz -o none/model.safetensors", "in an existing directory"),
    "an output for no one": ("good.xyz -o /proc/model.safetensors", "where you may write"),
}


def refused(desk, monkeypatch, command, said):
    monkeypatch.chdir(desk)
    before = contents(desk)
    ended = qualms(command)
    assert ended.code == 2, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert [line for line in lines if not line.startswith("Warning: ")] == lines[-1:]
    assert lines[-1].startswith("Error: ")
    assert said in lines[-1]
    assert contents(desk) == before
    assert not [name for name in os.listdir(desk) if "checkpoint" in name]


@pytest.mark.parametrize("case", TRAIN)
def test_training(desk, monkeypatch, case):
    arguments, said = TRAIN[case]
    command = f"train {arguments} --quiet"
    for option, default in (("--config", "small.yaml"), ("-o", "new.safetensors")):
        if f"{option} " not in command:
            command += f" {option} {default}"
    refused(desk, monkeypatch, command, said)


PREDICT = {
    "no model": ("none.safetensors good.xyz", "none.safetensors: there is no file"),
    "a truncated model": ("cut.safetensors good.xyz", "cut.safetensors: "),
    "a damaged model": ("flipped.safetensors good.xyz", "checksum"),
    "structures for a model": ("good.xyz good.xyz", "good.xyz: "),
    "no structures": ("model.safetensors none.xyz", "No such file"),
    "an empty file": ("model.safetensors empty.xyz", "(empty)"),
    "unknown elements": ("model.safetensors chlorine.xyz", "frames=Cl in "),
    "an end in the middle": ("model.safetensors truncated.xyz", "the file ends after"),
    "two atoms on one place": ("model.safetensors clash.xyz", "frames[7]"),
    "an existing output": ("model.safetensors good.xyz -o precious.csv", "--force"),
    "an unknown format": ("model.safetensors good.xyz -o new.doc", "ends in one of"),
    "an output nowhere": ("model.safetensors good.xyz -o none/new.csv", "existing directory"),
}


@pytest.mark.parametrize("case", PREDICT)
def test_predicting(desk, monkeypatch, case):
    arguments, said = PREDICT[case]
    output = "" if "-o " in arguments else "-o new.csv"
    refused(desk, monkeypatch, f"predict {arguments} {output}", said)


EVALUATE = {
    "no labels": ("model.safetensors unlabelled.xyz", "there is none"),
    "no model": ("none.safetensors good.xyz", "there is no file"),
    "unknown elements": ("model.safetensors labelled_chlorine.xyz", "in frames[1]"),
    "no validation": ("model.safetensors good.xyz --validation empty.xyz", "(empty)"),
}


@pytest.mark.parametrize("case", EVALUATE)
def test_evaluating(desk, monkeypatch, case):
    arguments, said = EVALUATE[case]
    refused(desk, monkeypatch, f"evaluate {arguments}", said)


def test_info(desk, monkeypatch):
    for file in ("none.safetensors", "cut.safetensors", "good.xyz", "folder"):
        refused(desk, monkeypatch, f"info {file}", f"{file}: ")


def test_the_demo_needs_a_directory(desk, monkeypatch):
    refused(desk, monkeypatch, "demo -o precious.csv", "precious.csv")


def test_a_checkpoint_of_another_run(desk, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("new.safetensors.checkpoint")
    checkpoint.mkdir()
    command = f"train {desk / 'good.xyz'} --config {desk / 'small.yaml'} -o new.safetensors -q"
    (checkpoint / "notes.txt").write_text("mine")
    ended = qualms(f"{command} --checkpoint")
    assert (ended.code, "a new directory" in ended.err) == (2, True)
    assert contents(tmp_path) == {"new.safetensors.checkpoint/notes.txt": b"mine"}
    assert qualms(command).code == 0
    assert (checkpoint / "notes.txt").read_text() == "mine"
    Path("new.safetensors").unlink()
    Path("new.json").unlink()
    (checkpoint / "notes.txt").unlink()
    (checkpoint / "manifest.json").write_text('{"version": 1, "key": "other", "stages": {}}')
    ended = qualms(f"{command} --resume")
    assert (ended.code, "of the same data and settings" in ended.err) == (2, True)
    assert os.listdir() == ["new.safetensors.checkpoint"]


@pytest.mark.parametrize("arguments", ["", "good.xyz", "--no-such-option", "good.xyz -o"])
def test_wrong_usage_is_explained(desk, monkeypatch, arguments):
    monkeypatch.chdir(desk)
    before = contents(desk)
    ended = qualms(f"train {arguments}")
    assert ended.code == 2
    assert "Error" in ended.err
    assert contents(desk) == before


def test_the_installed_command_shows_no_traceback(desk):
    ended = subprocess.run(
        [Path(sys.executable).with_name("qualms"), "info", "cut.safetensors"],
        cwd=desk,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: cut.safetensors: ")
    assert ended.stderr.count("\n") == 1


def test_what_nobody_foresaw_is_one_line_if_it_comes_from_the_machine(desk, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qualms.cli.predict.open_writer", full)
    refused(
        desk,
        monkeypatch,
        "predict model.safetensors good.xyz -o new.csv",
        "No space left on device",
    )
