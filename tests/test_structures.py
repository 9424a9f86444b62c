"""Files with structures: formats and ranges of ASE."""

import gzip
import os
from pathlib import Path

import ase.io
import ase.test
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from atomistic_fixtures import SMALL, labelled_alloys
from checks import rejects
from test_cli import qualms

from qualms import AtomisticModel
from qualms.atomistic.structures import FrameFiles, read_frames

VASP = Path(ase.test.__file__).parent / "testdata" / "vasp"


@pytest.fixture(scope="module")
def alloys():
    """Crystals with energies and forces of a calculator, and a label of their own."""
    frames = labelled_alloys(24)
    for i, atoms in enumerate(frames):
        energy, forces = atoms.info.pop("energy"), atoms.arrays.pop("force")
        del atoms.info["virtual"]
        atoms.info["number"] = i
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return frames


@pytest.fixture
def files(alloys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data.xyz", "data.traj", "odd@2.xyz", "POSCAR", "data.cif"):
        ase.io.write(name, alloys[:1] if name == "POSCAR" else alloys)
    with connect("data.db") as database:
        for atoms in alloys:
            database.write(atoms, number=atoms.info["number"])
    return alloys


@pytest.mark.parametrize("name", ["data.xyz", "data.traj", "data.db", "odd@2.xyz"])
@pytest.mark.parametrize("text", ["", ":5", "::10", "3:9:2", "-4:", "-1", "7", "20::-9"])
def test_ranges(files, name, text):
    bounds = [int(bound) if bound else None for bound in text.split(":")]
    expected = range(24)[slice(*bounds)] if ":" in text or not text else [range(24)[int(text)]]
    found = read_frames(f"{name}@{text}" if text else name)
    assert [atoms.info["number"] for atoms in found] == [*expected]
    for atoms, i in zip(found, expected, strict=True):
        np.testing.assert_allclose(atoms.get_forces(), files[i].get_forces(), atol=1e-7)
    if name.endswith(".xyz"):
        parts = FrameFiles.open([f"{name}@{text}" if text else name, "data.xyz@:2"])
        assert [atoms.info["number"] for atoms in parts] == [*expected, 0, 1]
        assert parts.place(len(parts) - 1) == ("data.xyz", 1)


@pytest.mark.parametrize(
    "name",
    [
        *("data.xyz@a", "data.xyz@1:2:3:4", "data.xyz@::0", "no.xyz@:5"),
        *("data.traj@99999999999999999999", "data.traj@:-99999999999999999999"),
    ],
)
def test_bad_ranges(files, name):
    with rejects("path"):
        read_frames(name)
    with rejects("path"):
        read_frames("data.xyz@50:")


@pytest.mark.parametrize("name", ["a.traj", "a.db", "vasprun.xml", "POSCAR", "a.json", "a.xyz"])
def test_extended_xyz_is_explained_for_files_of_this_format(tmp_path, name):
    (tmp_path / name).write_bytes(b"garb\xffage\n")
    with rejects("path") as error:
        read_frames(tmp_path / name)
    assert ("Extended XYZ" in str(error.value)) == (name == "a.xyz")


def test_compressed_databases_are_not_read(files):
    for name in ("data.db.gz", "data.json.gz"):
        Path(name).write_bytes(gzip.compress(Path("data.db").read_bytes()))
        with rejects("path") as error:
            read_frames(name)
        assert "decompress" in str(error.value)


def test_structures_without_labels(files):
    for name in ("POSCAR", "data.cif@0"):
        (atoms,) = read_frames(name)
        assert sorted(atoms.numbers) == sorted(files[0].numbers)
        np.testing.assert_allclose(atoms.cell.volume, files[0].cell.volume, rtol=1e-4)


@pytest.mark.parametrize("name", ["OUTCAR_example_1", "vasprun_pstress.xml"])
def test_output_of_vasp(name, tmp_path):
    if not (VASP / name).is_file():
        pytest.skip("this version of ASE comes without the file")
    found, expected = read_frames(VASP / name), ase.io.read(VASP / name, ":")
    assert len(found) == len(expected)
    for atoms, other in zip(found, expected, strict=True):
        assert atoms.get_potential_energy() == other.get_potential_energy()
        np.testing.assert_array_equal(atoms.get_forces(), other.get_forces())


def test_formats_that_may_execute_code_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text("open('marker', 'w')")
    Path("state.gpw").write_bytes(b"- of UlmGPAW" + bytes(200))
    Path("trajectory.bundle").mkdir()
    Path("postgres.aselmdb").write_bytes(bytes(200))
    for name in ("code.py", "state.gpw", "trajectory.bundle", "postgres.aselmdb"):
        with rejects("path"):
            read_frames(name)
    assert not Path("marker").exists()


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.xyz")
    with rejects("path"):
        read_frames(tmp_path / "pipe.xyz")


def test_commands_read_all_formats(files):
    options = {"representation": SMALL, "n_representatives": 40, "n_members": 6, "threads": 1}
    Path("small.yaml").write_text(str(options))
    means = []
    for data in ("data.xyz", "data.traj", "data.db"):
        train = f"train {data}@:20 --test {data}@20: --config small.yaml --target energy --force"
        document = qualms(f"{train} --units eV -o m.safetensors --json").document
        assert document["training"]["n_structures"] == 20
        evaluated = qualms(f"evaluate m.safetensors {data}@20: --json").document
        assert evaluated["scores"] == document["test"]
        predicted = qualms(f"predict m.safetensors {data}@::6 -o out.xyz --force --json").document
        assert predicted["n_structures"] == 4
        out = ase.io.read("out.xyz", ":")
        means.append([atoms.get_potential_energy() for atoms in out])
        assert out[1].info["REF_energy"] == pytest.approx(files[6].get_potential_energy())
    np.testing.assert_allclose(means[1:], means[:1] * 2, rtol=1e-5)
    model = AtomisticModel.load("m.safetensors", threads=1)
    np.testing.assert_allclose(model.predict("data.traj@::6").mean, means[0], rtol=1e-5)
    # The input cannot be the output, with a range or without.
    assert qualms("report m.safetensors data.xyz@20: -o data.xyz --force").code == 2
    ended = qualms("train data.xyz@:20 --config small.yaml --target energy -o data.xyz --force")
    assert ended.code == 2
