"""Options of the command line: their meaning, their help, and errors in terms of them."""

import re
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import ase.io
import pytest
import yaml
from ase.build import molecule
from atomistic_fixtures import ENERGY, labelled_molecules
from test_cli import SMALL_RUN, qualms
from typer.main import get_command

from qualms import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.cli.app import VERBS, app
from qualms.errors import InputError, warn

#: Their words depend on the kind of file that the verb reads or writes.
OF_FILES = {"--output", "-o", "--data", "--target"}


def verbs():
    """Yield all verbs with their parsers."""
    root = get_command(app)
    for verb in VERBS:
        yield verb, root.get_command(None, verb)


def options(command):
    return [p for p in command.params if p.param_type_name == "option"]


def test_an_option_means_the_same_in_all_verbs():
    meanings = defaultdict(lambda: defaultdict(list))
    for verb, command in verbs():
        for option in options(command):
            for name in {*option.opts} - OF_FILES:
                text = option.help.partition(",")[0].partition(";")[0]
                meanings[name][text, option.is_flag, option.nargs].append(verb)
    assert len(meanings) > 50
    several = {name: dict(uses) for name, uses in meanings.items() if len(uses) > 1}
    assert several == {}


def test_help_is_readable():
    """It has 80 columns, and all names are complete."""
    for verb, command in verbs():
        ended = qualms(f"{verb} --help-all")
        assert ended.code == 0
        assert max(map(len, ended.out.splitlines())) <= 80
        for option in options(command):
            assert re.search(rf"^  .*{option.opts[0]}\b", ended.out, re.MULTILINE), option.opts
    short, long = (qualms(f"train {option}").out for option in ("--help", "--help-all"))
    names = {*re.findall(r"^  (?:-\w, )?(--[\w-]+)", short, re.MULTILINE)}
    assert len(names - {"--help", "--help-all"}) == 10
    assert len(short.splitlines()) < 60 < len(long.splitlines())


@pytest.mark.parametrize(
    ("command", "meant"),
    {
        "trian": "'train'",
        "train --memebrs 3": "--members",
        "predict --ensmble": "--ensemble",
    }.items(),
)
def test_names_that_were_meant(command, meant):
    ended = qualms(command)
    assert ended.code == 2
    assert meant in ended.err


# --- configuration files ---


def test_the_template_has_every_setting_with_its_default():
    text = qualms("template").out
    entries = yaml.safe_load(text)
    files = {name: entries.pop(name) for name in ("data", "output", "group_key", "test")}
    assert files["group_key"] is files["test"] is None
    assert set(entries) == set(Settings.model_fields)
    made = AtomisticModel(**entries).settings
    assert made == AtomisticModel(entries["target"]).settings
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(comments) > len(entries)


def test_a_configuration_file_can_name_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames = labelled_molecules(60)
    for i, atoms in enumerate(frames):
        atoms.info["run"] = f"run {i // 3}"
    ase.io.write("a.xyz", frames[:30])
    ase.io.write("b.xyz", frames[30:])
    files = {"data": ["a.xyz", "b.xyz@:20"], "test": "b.xyz@20:", "group_key": "run"}
    files["output"] = "model.safetensors"
    Path("run.yaml").write_text(yaml.safe_dump(SMALL_RUN | files))
    document = qualms("train --config run.yaml --json").document
    assert document["training"]["n_structures"] == 50
    assert document["test"][0]["n_points"] == 10
    assert Path("model.safetensors").exists()
    # Options override the file.
    document = qualms("train a.xyz --config run.yaml --json -o two.safetensors").document
    assert document["training"]["n_structures"] == 30
    Path("run.yaml").write_text(yaml.safe_dump(SMALL_RUN | files | {"data": [{"a": 1}]}))
    assert qualms("train --config run.yaml -o new.safetensors").code == 2


# --- errors ---


TRAIN = "train a.xyz --target e -o m.safetensors"
PREDICT = "predict m.safetensors a.xyz -o b.xyz"
EVALUATE = "evaluate m.safetensors a.xyz"


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        (TRAIN, "`n_members` is 1.", "--members is 1."),
        (TRAIN, "Use `n_members=16`.", "Use --members 16."),
        (TRAIN, "Use `force=True`.", "Use --force."),
        (TRAIN, "Use `kind='atomic'`.", "Use --per-atom-target."),
        (TRAIN, "`kind` is 1.", "kind is 1."),
        (TRAIN, "`groups` and `forces`.", "--group-key and --forces-key."),
        (TRAIN, "`n_posterior` is 1.", "n_posterior is 1."),
        (TRAIN, "Lines such as `a: 1`.", "Lines such as a: 1."),
        (PREDICT, "`unknown_species='ignore'`.", "--ignore-unknown-species."),
        (EVALUATE, "`unknown_species='skip'`.", "--skip-unknown-species."),
        (PREDICT, "`baseline='a.b:c'`.", "--confirm-baseline a.b:c."),
        ("apply c.json a.xyz -o b.xyz", "`members='m*'`.", "--member-keys m*."),
        (PREDICT, "Another `name`.", "Another name."),
    ],
)
def test_errors_and_warnings_name_options(command, text, shown):
    def fail(*_, **__):
        warn(text)
        raise InputError(text, parameter="x")

    with patch("qualms.cli.terminal.Terminal.__init__", side_effect=fail):
        ended = qualms(command)
    assert (ended.code, ended.err) == (2, f"Warning: {shown}\nError: {shown}\n")


def test_errors_name_the_file_of_a_structure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames = labelled_molecules(40)
    strange = molecule("CH3Cl")
    strange.info[ENERGY] = -16.0
    clash = frames[3].copy()
    clash.positions[1] = clash.positions[0]
    Path("small.yaml").write_text(yaml.safe_dump(SMALL_RUN))
    for name, content in {
        "a.xyz": frames[:20],
        "b.xyz": [*frames[20:], clash],
        "c.xyz": [frames[0], strange],
        "good.xyz": frames,
    }.items():
        ase.io.write(name, content)
    train = "train --config small.yaml --quiet -o m.safetensors"
    assert "Structure 20 of b.xyz has" in qualms(f"{train} a.xyz b.xyz").err
    assert "Structure 20 of b.xyz has" in qualms(f"{train} a.xyz --test b.xyz").err
    ended = qualms(f"{train} a.xyz --test c.xyz")
    assert "Structure 1 of c.xyz" in ended.err
    assert "skip" not in ended.err  # there is no such option
    for text, shown in {
        "Structures 3 and 25 differ": "Structures 3 of a.xyz and 5 of b.xyz differ",
        "frames[25].info['x'] is": "'x' of structure 5 of b.xyz is",
        "frames[0] is": "structure 0 of a.xyz is",
        "structure 3 of z.xyz and structure 99": "structure 3 of z.xyz and structure 99",
    }.items():
        error = InputError(text, parameter="frames")
        with patch("qualms.atomistic.model.AtomisticModel.fit", side_effect=error):
            assert shown in qualms(f"{train} a.xyz b.xyz").err
    assert qualms(f"{train} good.xyz").code == 0
    ended = qualms("predict m.safetensors c.xyz -o new.xyz")
    assert "Structure 1 of c.xyz contains Cl" in ended.err
    assert "--ignore-unknown-species" in ended.err
    ended = qualms("evaluate m.safetensors a.xyz c.xyz")
    assert "Structure 1 of c.xyz" in ended.err
    assert "--skip-unknown-species" in ended.err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("group_key: 5", "run.yaml: group_key is 5"),
        ("group_key: [a]", "run.yaml: group_key"),
        ("seed: 1\nseed: 2", "'seed' occurs more than once"),
        ("baseline: {H: 1, H: 2}", "'H' occurs more than once"),
        ("kind: [1, 2]", "run.yaml: kind cannot be [1, 2]; it must be"),
        ("species: Xx", "run.yaml: 'Xx' in species is not a chemical element.\n"),
        ("n_members: 1", "run.yaml: n_members"),
        ("representation: {cutoff: -3}", "run.yaml: The representation has cutoff=-3;"),
        ("representation: sevenet", "Did you mean 'sevennet'?"),
        ("validation: a.xyz", "Did you mean 'test'?"),
        ('units: "eV\\nmade  today"', "run.yaml: units"),
    ],
)
def test_errors_in_the_configuration_file(tmp_path, monkeypatch, text, shown):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f"target: e\n{text}\n")
    ended = qualms("train a.xyz --config run.yaml -o m.safetensors")
    assert ended.code == 2
    assert shown in ended.err


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--per-atom-target", "--per-atom-target is for values of atoms.\n"),
        ("--per-atom-target --species H", "--per-atom-target is for values of atoms.\n"),
        ("--species H", "Use --per-atom-target, or leave out --species.\n"),
        ("--intensive --forces-key f", "Leave out --forces-key, or --intensive.\n"),
        ('--baseline \'{"calculatr": "x:y"}\'', "Did you mean 'calculator'?"),
        ('--baseline \'{"H": "x"}\'', "use a finite number.\n"),
        ("--cutoff -3", "The representation has --cutoff -3.0;"),
    ],
)
def test_errors_of_options(tmp_path, monkeypatch, options, shown):
    monkeypatch.chdir(tmp_path)
    ase.io.write("a.xyz", labelled_molecules(12))
    Path("run.yaml").write_text("n_members: 8\n")  # options are not in the file
    train = f"train a.xyz --config run.yaml --target {ENERGY} -o m.safetensors"
    ended = qualms(f"{train} {options}")
    assert ended.code == 2
    assert shown in ended.err
    assert "run.yaml" not in ended.err
