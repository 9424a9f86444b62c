"""The command line: exit codes, JSON documents and files."""

import io
import json
import os
import resource
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import ase.io
import numpy as np
import pandas as pd
import pytest
import yaml
from ase.build import molecule
from atomistic_fixtures import ENERGY, SMALL, SMOOTH, labelled_alloys, labelled_molecules

import qualms as package
from qualms import AtomisticModel, Prediction
from qualms.cli.app import VERBS, main
from qualms.cli.terminal import Terminal
from qualms.data import qm9
from qualms.report import Table

SMALL_RUN = {"target": ENERGY, "representation": SMALL, "n_representatives": 60, "threads": 1}


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


def qualms(command, *more):
    """Run a command in this process, which saves the time of the imports."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["qualms", *shlex.split(command), *map(str, more)]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Ended(code, out.getvalue(), err.getvalue())


def contents(directory):
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def info(frames, key):
    return np.array([atoms.info[key] for atoms in frames])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A directory with structures, a configuration and models, which no test may change."""
    folder = tmp_path_factory.mktemp("source")
    frames = labelled_molecules(110)
    for i, atoms in enumerate(frames):
        atoms.info = {ENERGY: atoms.info[ENERGY], "run": f"run {i // 4}"}
    ase.io.write(folder / "train.xyz", frames[:80])
    ase.io.write(folder / "test.xyz", frames[80:])
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL_RUN))
    train = f"train {folder}/train.xyz --config {folder}/small.yaml --units eV"
    assert qualms(f"{train} -o {folder}/model.safetensors").code == 0
    atoms = "--target shift --per-atom-target --species H --baseline mean --units ppm"
    assert qualms(f"{train} {atoms} -o {folder}/atoms.safetensors").code == 0
    return folder


# --- help and start ---


def test_help_is_fast_and_lists_all_verbs():
    """It imports neither NumPy nor pydantic, and takes less than 0.5 s of CPU time."""

    def run(*options):
        command = [sys.executable, *options, "-m", "qualms", "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    def cpu_time():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    done = run("-X", "importtime")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"numpy", "scipy", "ase", "pydantic", "matplotlib"}
    assert all(verb in done.stdout for verb in VERBS)
    # CPU time grows when other processes share caches and hyper-threads: hence the best of three,
    # and half as much again.
    assert min(cpu_time() for _ in range(3)) < 0.75


def test_version():
    assert qualms("--version").out.strip() == f"qualms {package.__version__}"


@pytest.mark.parametrize(
    "command", ["", "nothing", "train", "train a.xyz", "train a.xyz -o", "train --no-such"]
)
def test_wrong_usage(command):
    ended = qualms(command)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_wide_tables_are_not_truncated():
    out = io.StringIO()
    with redirect_stdout(out):
        Terminal().result("b" * 300, Table(["name"], [["a" * 300]]), document={})
    assert [line.rstrip() for line in out.getvalue().splitlines()][::3] == ["b" * 300, "a" * 300]


# --- train ---


def test_training_writes_a_model_and_a_summary(desk):
    ended = qualms("train train.xyz --config small.yaml -o new.safetensors --json --members 8")
    document = ended.document
    assert document == json.loads(Path("new.json").read_text())
    assert {"settings", "training", "calibrations", "provenance"} <= set(document)
    assert document["settings"]["n_members"] == 8
    assert document["training"]["n_structures"] == 80
    assert document["calibrations"]["energy"]["method"] == "sources"
    assert qualms("info new.safetensors --json").document == document
    quiet = qualms("train train.xyz --config small.yaml -o new.safetensors --quiet --force")
    assert (quiet.code, quiet.err) == (0, "")


def test_several_files_are_one_training_set(desk):
    frames = ase.io.read("train.xyz", ":")
    ase.io.write("a.xyz", frames[:30])
    ase.io.write("b.xyz", frames[30:])
    parts = qualms("train a.xyz b.xyz --config small.yaml -o two.safetensors --json").document
    whole = qualms("info model.safetensors --json").document
    assert parts["provenance"]["data_digest"] == whole["provenance"]["data_digest"]


def test_a_subsample_of_few_structures_is_reported(desk):
    command = "train train.xyz --config small.yaml --quiet"
    for size, warned in {"9": True, "0.5": False}.items():
        ended = qualms(f"{command} --subsample {size} -o few.safetensors --force")
        assert (ended.code, "--subsample" in ended.err) == (0, warned)


def test_options_override_the_configuration(desk):
    representation = {"preset": "nmr", "n_radial": 3, "l_max": 2, "exponent": 3}
    config = {"target": "nothing", "kind": "intensive", "n_members": 4, "threads": 1}
    Path("own.yaml").write_text(yaml.safe_dump(config | {"representation": representation}))
    chosen = {"target": ENERGY, "subsample": 40, "baseline": "mean", "calibration": "linear"}
    chosen |= {"selection": "random", "effort": "fast", "noise": 0.01, "units": "eV", "seed": 3}
    options = " ".join(f"--{name} {value}" for name, value in chosen.items())
    options += " --members 6 --representatives 50 --cutoff 4.25 --memory 2GB"
    command = f"train train.xyz --config own.yaml {options} -o new.safetensors --json"
    settings = qualms(command).document["settings"]
    chosen |= {"kind": "intensive", "n_members": 6, "n_representatives": 50}
    assert {name: settings[name] for name in chosen} == chosen
    (scale,) = settings["representation"]["scales"]
    assert (scale["cutoff"], scale["n_radial"], scale["l_max"]) == (4.25, 3, 2)


def test_groups_and_scores_of_a_test_set(desk):
    train = "train train.xyz --config small.yaml --group-key run --baseline mean"
    document = qualms(f"{train} --test test.xyz -o new.safetensors --json").document
    evaluated = qualms("evaluate new.safetensors test.xyz --json").document
    validated, scored = (pd.DataFrame(x) for x in (document["test"], evaluated["scores"]))
    assert document["energy_assessment"] == evaluated["assessment"]
    pd.testing.assert_frame_equal(validated, scored, rtol=1e-6)
    points = AtomisticModel.load("new.safetensors").out_of_bag["energy"]
    runs, counts = np.unique(points.structure // 4, return_counts=True)
    assert counts.tolist() == [4] * len(runs)  # groups are not split
    assert len(np.unique(points.groups)) == len(runs)


def test_an_interrupt_leaves_no_files(desk):
    before = contents(desk)
    for name in ("fit", "save"):
        with patch(f"qualms.atomistic.model.AtomisticModel.{name}", side_effect=KeyboardInterrupt):
            ended = qualms("train train.xyz --config small.yaml -o new.safetensors --quiet")
        assert (ended.code, ended.out) == (130, "")
        assert len(ended.err.splitlines()) == 1
        assert contents(desk) == before


def test_calibrations_are_compared_on_the_stored_points(desk):
    document = qualms("info model.safetensors --calibrations --json").document
    records = {record["method"]: record for record in document["out_of_bag"]}
    assert {"none", "student", "sources"} <= set(records)
    assert records["student"]["log_likelihood"] > records["none"]["log_likelihood"]
    assert 0.5 < records["sources"]["coverage_68"] < 0.85
    assert "within 1.96" in qualms("info model.safetensors --calibrations").out
    assert "out_of_bag" not in qualms("info model.safetensors --json").document


# --- predict ---


def test_predictions_are_those_of_the_model(desk):
    test = ase.io.read("test.xyz", ":")
    model = AtomisticModel.load("model.safetensors", threads=1)
    expected = model.predict(test)
    for name in ("out.csv", "out.npz", "out.xyz.gz"):
        ended = qualms(
            f"predict model.safetensors test.xyz --ensemble --threads 1 --json -o {name}"
        )
        document = ended.document
        assert (document["target"], document["units"]) == (ENERGY, "eV")
        assert document["n_structures"] == len(test)
        assert document["n_extrapolating"] == model.predict(test).extrapolates.sum()
    arrays = np.load("out.npz")
    np.testing.assert_allclose(arrays[ENERGY], expected.mean, rtol=1e-12)
    np.testing.assert_allclose(arrays[f"{ENERGY}_uncertainty"], expected.std, rtol=1e-9)
    np.testing.assert_allclose(arrays[f"{ENERGY}_ensemble"], expected.members, rtol=1e-12)
    np.testing.assert_array_equal(arrays["qualms_extrapolates"], model.predict(test).extrapolates)
    out = ase.io.read("out.xyz.gz", ":")
    np.testing.assert_allclose(info(out, f"{ENERGY}_uncertainty"), expected.std, rtol=1e-6)
    np.testing.assert_allclose(info(out, f"REF_{ENERGY}"), info(test, ENERGY))
    assert len(Path("out.csv").read_text().splitlines()) == len(test) + 1


def test_predictions_in_other_units(desk):
    frames = ase.io.read("test.xyz", ":")
    expected = AtomisticModel.load("model.safetensors").predict(frames)
    command = "predict model.safetensors test.xyz -o out.csv --in meV --per atom --interval 0.5"
    assert qualms(command).code == 0
    table, sizes = pd.read_csv("out.csv"), np.array([len(atoms) for atoms in frames])
    for key, values in {
        ENERGY: expected.mean,
        f"{ENERGY}_uncertainty": expected.std,
        f"{ENERGY}_lower": expected.interval(0.5, "conformal")[0],
        f"{ENERGY}_upper": expected.interval(0.5, "conformal")[1],
    }.items():
        np.testing.assert_allclose(table[key], 1000 * values / sizes, rtol=1e-6)
    assert set(table[f"{ENERGY}_units"]) == {"meV/atom"}


def test_intervals(desk):
    frames = ase.io.read("test.xyz", ":")
    prediction = AtomisticModel.load("model.safetensors", threads=1).predict(frames)
    assert qualms("predict model.safetensors test.xyz --interval 0.9 -o out.xyz").code == 0
    written = ase.io.read("out.xyz", ":")
    for key, limits in zip(("lower", "upper"), prediction.interval(0.9, "conformal"), strict=True):
        np.testing.assert_allclose(info(written, f"{ENERGY}_{key}"), limits, rtol=1e-6)
    assert qualms("predict atoms.safetensors test.xyz --interval 0.5 -o atoms.xyz").code == 0
    assert "shift_upper" in ase.io.read("atoms.xyz").arrays


def test_contributions_of_atoms(desk):
    assert qualms("predict model.safetensors test.xyz --atoms --ensemble -o out.npz").code == 0
    arrays = np.load("out.npz")
    sizes = [len(atoms) for atoms in ase.io.read("test.xyz", ":")]
    total = np.add.reduceat(arrays[f"{ENERGY}_atoms"], np.cumsum([0, *sizes[:-1]]))
    np.testing.assert_allclose(total, arrays[ENERGY], rtol=1e-6)
    members = arrays[f"{ENERGY}_atoms_ensemble"]
    std = Prediction(members).std
    np.testing.assert_allclose(arrays[f"{ENERGY}_atoms_uncertainty"], std, rtol=1e-9)
    assert (arrays[f"{ENERGY}_atoms_novelty"] >= 0).all()


def test_structures_out_of_distribution_are_counted(desk):
    frames = ase.io.read("test.xyz", ":")
    for atoms in frames[:5]:
        atoms.positions *= 0.6
    ase.io.write("strange.xyz", [*frames, molecule("CH3Cl")])
    options = "-o out.xyz --ignore-unknown-species --json"
    document = qualms(f"predict model.safetensors strange.xyz {options}").document
    flags = info(ase.io.read("out.xyz", ":"), "qualms_extrapolates")
    assert flags[:5].all()
    assert flags[-1]
    assert document["n_extrapolating"] == flags.sum()
    assert document["n_unknown_species"] == 1


def test_the_input_can_be_replaced(desk):
    ase.io.write("own.xyz", ase.io.read("test.xyz", ":"))
    for _ in range(2):
        assert qualms("predict model.safetensors own.xyz -o own.xyz --force").code == 0
    assert len(info(ase.io.read("own.xyz", ":"), f"REF_{ENERGY}")) == 30


# --- evaluate and report ---


def test_evaluation(desk):
    document = qualms("evaluate model.safetensors test.xyz --json").document
    keys = {"target", "units", "n_points", "n_unlabelled", "scores", "remarks"}
    assert keys <= set(document)
    assert (document["units"], document["n_points"]) == ("eV/atom", 30)
    frames = ase.io.read("test.xyz", ":")
    mean = AtomisticModel.load("model.safetensors").predict(frames).mean
    z = (mean - info(frames, ENERGY)) / [len(atoms) for atoms in frames]
    raw = next(row for row in document["scores"] if row["name"] == "raw")
    assert raw["rmse"] == pytest.approx(np.sqrt(np.mean(z**2)))


def test_predictions_are_evaluated_as_the_model_is(desk):
    assert qualms("predict model.safetensors test.xyz -o out.xyz --ensemble").code == 0
    assert qualms("predict model.safetensors test.xyz -o out.npz").code == 0
    frames = ase.io.read("out.xyz", ":")
    references = {f"REF_{ENERGY}": info(frames, f"REF_{ENERGY}")}
    np.savez("table.npz", **np.load("out.npz"), **references)
    options = f"--target {ENERGY} --units eV --in meV --per atom --json"
    of_model = qualms("evaluate model.safetensors test.xyz --in meV --json").document
    expected = next(row for row in of_model["scores"] if row["name"] == "sources (out-of-bag)")
    for path in ("out.xyz", "table.npz"):
        document = qualms(f"evaluate {path} {options}").document
        (scores,) = document["scores"]
        assert document["units"] == of_model["units"] == "meV/atom"
        assert document["n_extrapolating"] == of_model["n_extrapolating"]
        for name in ("rmse", "log_likelihood", "coverage_68"):
            assert scores[name] == pytest.approx(expected[name], rel=1e-6)
    assert qualms(f"calibrate out.xyz --target {ENERGY} --method linear -o c.json").code == 0
    document = qualms(f"evaluate out.xyz --calibration-file c.json {options}").document
    assert len(document["scores"]) == 2
    document = qualms(f"report out.xyz {options} -o report.html").document
    assert (document["n_points"], document["units"]) == (30, "meV/atom")


def test_unknown_elements_are_left_out_of_evaluations(desk):
    frames = ase.io.read("test.xyz", ":")
    frames[3].numbers[0] = 17
    ase.io.write("strange.xyz", frames)
    assert qualms("evaluate model.safetensors strange.xyz").code == 2
    for verb in ("evaluate", "report -o new.html"):
        command = f"{verb} model.safetensors strange.xyz --skip-unknown-species --json"
        document = qualms(command).document
        assert (document["n_points"], document["n_unknown_species"]) == (29, 1)


def test_only_forces_can_be_evaluated(desk, monkeypatch):
    model = Path(__file__).parent / "stored" / "forces-10.safetensors"
    frames = labelled_alloys(6)
    for atoms in frames[1:]:
        del atoms.info["energy"]
    frames[0].numbers[0] = 17
    del frames[0].arrays["force"]
    ase.io.write("f.xyz", frames)
    for verb in ("evaluate", "report -o new.html"):
        document = qualms(f"{verb} {model} f.xyz --skip-unknown-species --json").document
        assert document["n_unknown_species"] == 1
        assert document["n_points"] == 5 * 4 * 3
    everything = "qualms.atomistic.evaluation.not_zero_by_symmetry"
    monkeypatch.setattr(everything, lambda y, members: np.zeros(len(y), dtype=bool))
    assert qualms(f"evaluate {model} f.xyz --skip-unknown-species").code == 2


def test_report_of_energies(desk):
    ended = qualms("report model.safetensors test.xyz -o report.html --json --threads 1")
    document = ended.document
    assert document["output"] == ["report.html", "report.chemiscope.json.gz"]
    assert set(document["assessment"]) == {"grade", "sentence", "details"}
    assert (document["target"], document["n_points"]) == (ENERGY, 30)
    evaluated = qualms("evaluate model.safetensors test.xyz --json").document
    after = {r["score"]: r["value"] for r in document["scores"] if r["column"].startswith("after")}
    assert after["crps"] in [pytest.approx(row["crps"]) for row in evaluated["scores"]]
    assert qualms("report model.safetensors test.xyz -o report.html").code == 2


# --- calibrate and apply ---


def write_ensemble(path, n=120, seed=0):
    rng = np.random.default_rng(seed)
    frames = [molecule("H2O") for _ in range(n)]
    for atoms in frames:
        sigma = np.exp(0.5 * rng.normal())
        atoms.info["REF_gap"] = rng.normal()
        noise = 2 * sigma * rng.normal() + sigma * rng.normal(size=8)
        atoms.info["gap_ensemble"] = atoms.info["REF_gap"] + noise
    ase.io.write(path, frames)


def test_calibrate_and_apply(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ensemble("old.xyz")
    write_ensemble("new.xyz", seed=1)
    options = "--target gap --units eV -o gap.json --report gap.html --json"
    document = qualms(f"calibrate old.xyz {options}").document
    assert {"comparison", "score_intervals", "assessment", "parameters"} <= set(document)
    written = json.loads(Path("gap.json").read_text())
    assert written["parameters"] == document["parameters"]
    assert Path("gap.html").stat().st_size > 100_000
    same = qualms("calibrate old.xyz --target gap -o gap.json --method student --force --json")
    assert same.document["method"] == "student"
    applied = qualms("apply gap.json new.xyz -o out.xyz --json").document
    assert (applied["target"], applied["n_points"]) == ("gap", 120)
    frames = ase.io.read("out.xyz", ":")
    members, std = info(frames, "gap_ensemble"), info(frames, "gap_uncertainty")
    np.testing.assert_allclose(members.std(axis=1, ddof=1), std, rtol=1e-6)
    z = members.mean(axis=1) - info(frames, "REF_gap")
    assert 0.55 < np.mean(np.abs(z) < std) < 0.8


# --- forces and stress ---


@pytest.fixture(scope="module")
def alloys(tmp_path_factory):
    """Crystals with energies, forces and stresses by EMT, and a model of all three."""
    folder = tmp_path_factory.mktemp("alloys")
    frames = labelled_alloys(32)
    ase.io.write(folder / "train.xyz", frames[:24])
    ase.io.write(folder / "test.xyz", frames[24:])
    (folder / "config.yaml").write_text(yaml.safe_dump({"representation": SMOOTH}))
    ended = qualms(
        f"train {folder}/train.xyz --config {folder}/config.yaml --target energy --forces-key force"
        f" --stress-key virtual --units eV --representatives 40 --members 6 --threads 1 --json"
        f" --test {folder}/test.xyz -o {folder}/model.safetensors"
    )
    return folder, ended.document


def test_predicted_forces_and_stresses(alloys, tmp_path):
    folder, _ = alloys
    frames = ase.io.read(folder / "test.xyz", ":")
    frames[3].calc, frames[3].pbc, frames[3].cell = None, False, None
    ase.io.write(tmp_path / "mixed.xyz", frames)
    options = "--forces --stress --ensemble --threads 1 --json"
    model = AtomisticModel.load(folder / "model.safetensors", threads=1)
    expected = model.predict(frames, forces=True)
    for name in ("out.npz", "out.xyz"):
        command = f"predict {folder}/model.safetensors {tmp_path}/mixed.xyz {options}"
        assert qualms(f"{command} -o {tmp_path}/{name}").document["n_without_volume"] == 1
    arrays = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(arrays["energy"], expected.energy.mean, atol=1e-9)
    np.testing.assert_allclose(arrays["forces"], expected.forces.mean, atol=1e-9)
    np.testing.assert_allclose(arrays["forces_uncertainty"], expected.forces.std, atol=1e-9)
    assert np.isnan(arrays["stress"][3]).all()
    solid = np.arange(8) != 3
    stress = model.predict(
        [f for f, has in zip(frames, solid, strict=True) if has], stress=True, forces=True
    )
    np.testing.assert_allclose(arrays["stress"][solid], stress.stress.mean, atol=1e-9)
    np.testing.assert_allclose(arrays["stress_uncertainty"][solid], stress.stress.std, atol=1e-9)
    written = ase.io.read(tmp_path / "out.xyz", ":")
    members = written[0].info["stress_ensemble"].reshape(-1, 6)
    np.testing.assert_allclose(members, stress.stress.members[0].T, atol=1e-6)
    np.testing.assert_allclose(written[0].get_forces(), expected[0].forces.mean, atol=1e-6)
    assert "stress_uncertainty" not in written[3].info


def test_evaluation_and_report_of_forces(alloys, tmp_path, no_figures):
    folder, trained = alloys
    for name in ("energy", "forces", "stress"):
        assert trained["test" if name == "energy" else f"{name}_test"][0]["rmse"] > 0
        assert trained["calibrations"][name]["alpha"] > 0
    model, test = folder / "model.safetensors", folder / "test.xyz"
    document = qualms(f"evaluate {model} {test} --json").document
    assert document["forces"]["key"] == "force"
    assert document["forces"]["units"] == "eV/Å"
    assert document["forces"]["n_points"] == 8 * 4 * 3
    assert document["stress"]["n_structures"] == 8
    assert min(row["rmse"] for row in document["forces"]["scores"]) < 0.1
    report = qualms(f"report {model} {test} -o {tmp_path}/report.html --json").document
    assert report["forces"]["assessment"]["grade"] == "approximate"  # of eight structures
    rmse = [row for row in report["stress"]["scores"] if row["score"] == "rmse"]
    assert len(rmse) == 2
    assert rmse[0]["low"] < rmse[0]["value"] < rmse[0]["high"]


def test_missing_forces_are_not_evaluated(alloys, tmp_path):
    folder, _ = alloys
    frames = ase.io.read(folder / "test.xyz", ":")
    for atoms in frames:
        del atoms.info["virtual"]
    ase.io.write(tmp_path / "test.xyz", frames)
    document = qualms(f"evaluate {folder}/model.safetensors {tmp_path}/test.xyz --json").document
    assert ("forces" in document, "stress" in document) == (True, False)
    assert sum("is not evaluated" in remark for remark in document["remarks"]) == 1


# --- bad input: one line, exit code 2, no file changed ---


@pytest.fixture(scope="module")
def bad(source, tmp_path_factory):
    """Good and bad files."""
    folder = tmp_path_factory.mktemp("bad")
    good = ase.io.read(source / "train.xyz", ":30")
    for atoms in good:
        del atoms.arrays["shift"]
    ase.io.write(folder / "good.xyz", good)
    chlorine = molecule("CH3Cl")
    chlorine.info[ENERGY] = -16.0
    ase.io.write(folder / "chlorine.xyz", [good[0], chlorine])
    write_ensemble(folder / "gap.xyz", n=30)
    texts = dict.fromkeys(("old.safetensors", "old.json"), "old") | {
        "small.yaml": yaml.safe_dump(SMALL_RUN),
        "broken.yaml": "a: [1\nb: {\n- c",
        "unknown.yaml": yaml.safe_dump(SMALL_RUN | {"n_representative": 5}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    data = (source / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data)
    (folder / "cut.safetensors").write_bytes(data[:-5])
    (folder / "atoms.safetensors").write_bytes((source / "atoms.safetensors").read_bytes())
    return folder


TRAIN = "train good.xyz --config small.yaml -o new.safetensors"
#: Commands, and what the error names.
BAD = {
    "train none.xyz --config small.yaml -o new.safetensors": "",
    "train good.xyz -o new.safetensors": "--target",
    f"{TRAIN} --intensive --per-atom-target": "--intensive",
    f"{TRAIN} --group-key config": "config",
    f"{TRAIN} --config broken.yaml": "broken.yaml",
    f"{TRAIN} --config unknown.yaml": "Did you mean 'n_representatives'",
    f"{TRAIN} --test chlorine.xyz": "Structure 1 of chlorine.xyz",
    f"{TRAIN} -o old.safetensors": "",
    f"{TRAIN} -o good.xyz --force": "",
    f"{TRAIN} -o model.json --force": "--output",
    f"{TRAIN} -o model.pt": "--output",
    "predict model.safetensors good.xyz --in meV -o new.xyz": "--output",
    "predict model.safetensors good.xyz --in furlong -o new.csv": "--in",
    "predict atoms.safetensors good.xyz --per atom -o new.csv": "--per",
    "predict model.safetensors good.xyz --interval 1.5 -o new.csv": "--interval",
    "predict model.safetensors good.xyz --interval 0 -o new.csv": "--interval",
    # So few points have no such quantile.
    "predict model.safetensors good.xyz --interval 0.999 -o new.csv": "--interval",
    "evaluate good.xyz": "--target",
    "evaluate good.xyz --target e --skip-failed": "--skip-failed",
    "evaluate model.safetensors good.xyz --target e": "--target",
    "evaluate model.safetensors": "model.safetensors",
    "predict cut.safetensors good.xyz -o new.csv": "",
    "predict model.safetensors good.xyz --atoms -o new.csv": "--output",
    "predict model.safetensors good.xyz --atoms -o new.parquet": "--output",
    "predict model.safetensors good.xyz -o none/new.parquet": "none",
    "predict atoms.safetensors good.xyz --atoms -o new.xyz": "--atoms",
    "evaluate model.safetensors good.xyz --calibration-file old.json": "",
    "report model.safetensors good.xyz -o new.pdf": ".html",
    "demo -o old.json": "",
    "calibrate gap.xyz --target energy -o a.json": "energy",
    "calibrate gap.xyz --target gap -o gap.xyz --force": "gap.xyz",
    "calibrate gap.xyz --target gap --method magic -o a.json": "--method",
    "calibrate gap.xyz --target gap -o a.json --report a.pdf": ".html",
    "calibrate none.csv --target gap -o a.json": "none.csv",
    "apply gap.xyz gap.xyz -o a.xyz": "gap.xyz",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input(command, bad, monkeypatch):
    monkeypatch.chdir(bad)
    before = contents(bad)
    ended = qualms(command, "--quiet")
    assert (ended.code, ended.out) == (2, ""), ended.err
    lines = [line for line in ended.err.splitlines() if not line.startswith("Warning: ")]
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert BAD[command] in lines[0]
    assert contents(bad) == before


def test_stress_needs_a_volume(alloys, tmp_path):
    folder, _ = alloys
    atoms = ase.io.read(folder / "test.xyz")
    atoms.calc, atoms.pbc, atoms.cell = None, False, None
    ase.io.write(tmp_path / "one.xyz", atoms)
    for options, parameter in {
        "--stress -o {}/a.npz": "--stress",
        "--forces -o {}/a.csv": "--output",
        "--forces --ignore-unknown-species -o {}/a.npz": "--forces",
    }.items():
        command = f"predict {folder}/model.safetensors {tmp_path}/one.xyz {options}"
        ended = qualms(command.format(tmp_path))
        assert ended.code == 2
        assert parameter in ended.err
        assert os.listdir(tmp_path) == ["one.xyz"]


def test_errors_of_the_machine_are_one_line(desk):
    before = contents(desk)
    with patch("qualms.io.predictions.open_writer", side_effect=OSError(28, "No space left")):
        ended = qualms("predict model.safetensors test.xyz -o out.xyz")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert contents(desk) == before


# --- demo ---


def test_the_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with patch("qualms.data.qm9", return_value=qm9(n=150)):
        document = qualms("demo --threads 1 --json").document
    assert document["training"]["n_structures"] == 100
    assert {"raw", "sources (out-of-bag)"} < {row["name"] for row in document["scores"]}
    figures = {"errors.png", "residuals.png", "reliability.png"}
    assert set(os.listdir("qualms-demo")) == figures | {"model.safetensors"}
    before = contents(tmp_path)
    assert qualms("demo").code == 2
    assert contents(tmp_path) == before
