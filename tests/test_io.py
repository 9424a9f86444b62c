"""Files: written completely or not at all; tensors, predictions, extended XYZ."""

import contextlib
import csv
import gzip
import os
import pickle
import struct
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from checks import metadata_of, rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from qualms import Prediction
from qualms.errors import InputError
from qualms.io.files import (
    atomic_output,
    atomic_path,
    check_input,
    check_not_input,
    check_output,
    written_together,
)
from qualms.io.predictions import open_writer
from qualms.io.tensors import (
    Document,
    StorageError,
    read_tensors,
    write_tensors,
)
from qualms.io.xyz import is_prediction

rng = np.random.default_rng(0)
TINY = 1e-9  # ASE's eight decimals would lose it


# Files


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_output(path, mode="w") as file:
        file.write("one")
        file.flush()
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(InputError) as error, atomic_output(path):
        pass
    assert error.value.parameter == "path"
    with contextlib.suppress(KeyboardInterrupt), atomic_output(path, force=True) as file:
        file.write(b"two")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    with atomic_path(path, force=True) as temporary:
        assert temporary.suffix == ".txt"
        temporary.unlink()  # as libraries do that write their own temporary files
        temporary.write_text("three")
    assert path.read_text() == "three"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_file_that_appears_in_the_meantime_is_kept(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(InputError) as error, atomic_output(path) as file:  # noqa: PT012
        file.write(b"mine")
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    (other,) = (p for p in tmp_path.iterdir() if p != path)
    assert other.read_bytes() == b"mine"
    assert other.name in str(error.value)
    other.unlink()
    with pytest.raises(IsADirectoryError), atomic_output(tmp_path / "b", force=True):
        (tmp_path / "b").mkdir()
    assert {*os.listdir(tmp_path)} == {"a", "b"}


def write_pair(folder, force=False):
    with written_together():
        for name in ("model", "summary"):
            with atomic_output(folder / name, force=force, mode="w") as file:
                file.write(name)


def test_files_that_belong_together(tmp_path, monkeypatch):
    with written_together():
        write_pair(tmp_path)  # it is part of the larger block
        assert not {"model", "summary"} & {*os.listdir(tmp_path)}
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "model": "model",
        "summary": "summary",
    }
    (tmp_path / "model").write_text("old")
    (tmp_path / "summary").write_text("old")
    renamed, replace = [], Path.replace

    def replace_all_but_the_model(temporary, target):
        renamed.append(target.name)
        if target.name == "model":
            raise OSError("The file system is read-only now.")
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", replace_all_but_the_model)
    with pytest.raises(OSError, match="read-only"):
        write_pair(tmp_path, force=True)
    assert renamed == ["summary", "model"]  # the model, to which the summary belongs, comes last
    assert {*os.listdir(tmp_path)} == {"model", "summary"}
    assert (tmp_path / "model").read_text() == "old"


def test_files_that_belong_together_appear_together_or_not_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt), written_together():  # noqa: PT012
        write_pair(tmp_path)
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    (tmp_path / "summary").touch()
    with rejects("path"):
        write_pair(tmp_path)
    assert os.listdir(tmp_path) == ["summary"]
    with written_together():  # a failure that is caught removes its own file alone
        with contextlib.suppress(ZeroDivisionError), atomic_output(tmp_path / "a") as file:
            file.write(str(1 // 0).encode())
        with atomic_output(tmp_path / "b") as file:
            file.write(b"2")
    assert {*os.listdir(tmp_path)} == {"summary", "b"}


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "/dev/zero", "a\0b"])
def test_input_must_be_a_regular_file(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with rejects("--config"):
        check_input(tmp_path / kind, "--config")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert check_input(tmp_path / "link") == tmp_path / "link"


@pytest.mark.parametrize("name", [".", "no/such/file", "/dev/null", "loop"])
def test_files_that_cannot_be_written(tmp_path, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with rejects("path"):
        check_output(tmp_path / name, force=True)
    assert check_output(tmp_path / "new") == tmp_path / "new"
    assert os.listdir(tmp_path) == ["loop"]


def test_links_and_permissions(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "target.txt")
    mask = os.umask(0o027)
    try:
        for text in ("new", "newer"):
            with atomic_output(link, mode="w", force=True) as file:
                file.write(text)
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert (tmp_path / "target.txt").read_text() == "newer"
    assert (tmp_path / "target.txt").stat().st_mode & 0o777 == 0o640
    check_not_input(tmp_path / "other", link, None)
    with rejects("output"):
        check_not_input(tmp_path / "target.txt", link)


# Tensors


class Settings(Document):
    alpha: float
    names: tuple[str, ...] = ()


KIND = {"format": "test", "version": 2}
TENSORS = {
    "a": np.arange(6.0).reshape(2, 3),
    "b": np.arange(4, dtype=np.float32)[::-1],
    "c": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    "e": np.empty((0, 3)),
    "f": np.array(7, dtype=np.uint8),
}


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, Settings(alpha=0.1, names=("é",)), **KIND)
    return path


def assert_rejected(path):
    with pytest.raises(StorageError) as error:
        read_tensors(path, Settings, **KIND)
    assert str(error.value).count("\n") == 0
    assert pickle.loads(pickle.dumps(error.value)).problem == error.value.problem


def test_tensors_come_back(stored):
    tensors, document = read_tensors(stored, Settings, **KIND)
    assert document == Settings(alpha=0.1, names=("é",))
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype.newbyteorder("<")
    assert load_file(stored).keys() == TENSORS.keys()  # other programs can read it
    with pytest.raises(InputError):
        write_tensors(stored, TENSORS, Settings(alpha=0.1), **KIND)


@pytest.mark.parametrize("bad", [[1.0, np.nan], np.array([np.inf], np.float32), [1j], ["text"]])
def test_tensors_that_cannot_be_stored(tmp_path, bad):
    with rejects("arrays['a']"):
        write_tensors(tmp_path / "a", {"a": np.array(bad)}, Settings(alpha=1), **KIND)
    assert not os.listdir(tmp_path)


def test_damaged_and_foreign_files_are_rejected(stored, tmp_path):
    good, path = stored.read_bytes(), tmp_path / "b"
    assert_rejected(path)
    assert_rejected(tmp_path)
    changed = [good[:n] for n in (0, 5, 8, 100, len(good) - 1)] + [good + b"x"]
    changed.append(struct.pack("<Q", 2**40) + good[8:])
    for i in rng.integers(len(good), size=60).tolist():
        changed.append(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
    for content in changed:
        path.write_bytes(content)
        assert_rejected(path)
    save_file({"a": np.zeros(3)}, path)
    assert_rejected(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": "1"},
        {"version": "3"},
        {"version": "x"},
        {"checksum": "0" * 64},
        {"document": '{"alpha": "x"}'},
        {"more": "x"},
    ],
)
def test_forged_metadata_are_rejected(stored, tmp_path, change):
    path = tmp_path / "b"
    save_file(load_file(stored), path, metadata=metadata_of(stored) | change)
    assert_rejected(path)


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    resource = pytest.importorskip("resource")  # Windows has none
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    arguments = tmp_path / "a", {"a": np.zeros(100_000)}, Settings(alpha=0.1, names=())
    try:
        with pytest.raises(StorageError, match="written"):
            write_tensors(*arguments, **KIND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


def test_values_of_forged_files_are_checked(stored, tmp_path):
    for values in (np.array([np.nan]), np.zeros(3, dtype=np.float16), np.array([True])):
        save_file({"a": values}, tmp_path / "a", metadata_of(stored))
        assert_rejected(tmp_path / "a")

    class Other(Document):
        beta: float

    with pytest.raises(StorageError):
        read_tensors(stored, Other, **KIND)


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_are_rejected(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("t") / "a"
    for prefix in (b"", struct.pack("<Q", len(content))):
        path.write_bytes(prefix + content)
        assert_rejected(path)


# Predictions


def frames_with_references():
    """Water with results of a calculator and all kinds of properties, and a crystal without."""
    water = molecule("H2O")
    water.info = {
        "name": "a b",
        "empty": "",
        "note": 'two\nlines \\ "q"',
        "T": 300,
        "v": np.eye(2),
        "d": {"a": 'q"\\', "b": [1]},
    }
    water.arrays["tiny"] = rng.normal(size=(3, 3)) * TINY
    water.arrays["tensor"] = rng.normal(size=(3, 2, 2))
    water.arrays["label"] = np.array(["a b", "", "c"])
    water.arrays["flag"] = np.array([True, False, True])
    water.arrays["count"] = np.array([1, 2, 3], dtype=np.uint8)
    water.set_constraint(FixAtoms([1]))
    water.calc = SinglePointCalculator(
        water, energy=-1.5, forces=np.ones((3, 3)), stress=np.arange(6.0)
    )
    return [water, bulk("Si", cubic=True)]


def write(path, frames, prediction, target="energy", kind="structure", ensemble=True, **arguments):
    with open_writer(path, target, kind=kind, ensemble=ensemble, force=True) as writer:
        writer.write(frames, prediction, **arguments)
        assert writer.n_structures == len(frames)


def read(path):
    return ase.io.read(path, ":")


@pytest.mark.parametrize("name", ["a.xyz", "c.XYZ.gz"])
def test_xyz_keeps_structures_and_their_properties_exactly(tmp_path, name):
    frames, path = frames_with_references(), tmp_path / name
    p = Prediction(rng.normal(size=(2, 4)) * TINY)
    extra = {"far": [True, False], "why": ["", "a b"], "x": [1, TINY]}
    write(path, frames, p, extra=extra)
    assert frames[0].calc.results["energy"] == -1.5  # the input is not changed
    with (gzip.open if name.endswith("gz") else open)(path, "rt") as file:
        assert f" energy={float(p.mean[0])!r} " in file.read()
    for i, (old, new) in enumerate(zip(frames, read(path), strict=True)):
        assert new.calc.results == {"energy": p.mean[i]}
        assert new.info["energy_uncertainty"] == p.std[i]
        np.testing.assert_array_equal(new.info["energy_ensemble"], p.members[i])
        assert (new.info["far"], new.info.get("why", "")) == ((True, ""), (False, "a b"))[i]
        assert str(new.symbols) == str(old.symbols)
        np.testing.assert_array_equal(new.positions, old.positions)
        np.testing.assert_array_equal(new.cell, old.cell)
    water, old = read(path)[0], frames[0]
    for key in ("name", "empty", "note", "T", "d"):
        assert water.info[key] == old.info[key]
    np.testing.assert_array_equal(water.info["v"], np.eye(2))
    assert water.info["REF_energy"] == -1.5
    np.testing.assert_array_equal(water.info["REF_stress"], np.arange(6))
    np.testing.assert_array_equal(water.arrays["REF_forces"], np.ones((3, 3)))
    np.testing.assert_array_equal(water.arrays["tiny"], old.arrays["tiny"])
    np.testing.assert_array_equal(water.arrays["tensor"], old.arrays["tensor"].reshape(3, 4))
    np.testing.assert_array_equal(water.arrays["count"], [1, 2, 3])
    np.testing.assert_array_equal(water.arrays["flag"], [True, False, True])
    assert water.arrays["label"].tolist() == ["a_b", "_", "c"]
    assert water.constraints[0].index.tolist() == [1]


def test_references_survive_two_predictions(tmp_path):
    frames = frames_with_references()
    frames[1].info["gap"] = 1.1
    first, second = (Prediction(rng.normal(size=(2, 4))) for _ in range(2))
    for target in ("energy", "gap"):
        extra = {f"{target}_{ending}": [5.0, 5.0] for ending in ("dof", "lower", "upper")}
        write(tmp_path / "a.xyz", frames, first, target=target, extra=extra)
        write(tmp_path / "b.xyz", read(tmp_path / "a.xyz"), second, target=target, ensemble=False)
        water, silicon = read(tmp_path / "b.xyz")
        assert water.info["REF_energy"] == -1.5
        predicted = water.calc.results if target == "energy" else water.info
        assert predicted[target] == second.mean[0]
        for ending in (
            "ensemble",
            "dof",
            "lower",
            "upper",
        ):  # they were those of the first prediction
            assert f"{target}_{ending}" not in water.info
        assert silicon.info["REF_gap" if target == "gap" else "gap"] == 1.1
        # The first prediction does not become a reference value.
        assert f"REF_{target}" not in (silicon if target == "energy" else water).info


def test_the_origin_of_values():
    atoms = Atoms("H2", info={"e": 1.5, "f": 1.0})
    assert not is_prediction(atoms, "e", 1.5)
    atoms.info["e_uncertainty"] = 0.1
    assert is_prediction(atoms, "e", 1.5)
    atoms.info["e_ensemble"] = [1.0, 2.0]
    assert is_prediction(atoms, "e", 1.5 + 1e-8)
    assert not is_prediction(atoms, "e", 1.6)  # a label that was put beside a prediction
    atoms.arrays["v_uncertainty"] = np.ones((2, 3))
    members = rng.normal(size=(2, 4, 3))
    for stored in (members, members.transpose(0, 2, 1)):
        atoms.arrays["v_ensemble"] = stored.reshape(2, -1)
        assert is_prediction(atoms, "v", members.mean(axis=1))
        assert not is_prediction(atoms, "v", members[:, 0])


def test_forces_and_stresses_beside_energies(tmp_path):
    frames = [bulk("Si", cubic=True), molecule("H2O")]
    frames[0].info["REF_stress"] = np.arange(6.0)
    n, path = 11, tmp_path / "a.xyz"
    forces, stress = rng.normal(size=(n, 3)), rng.normal(size=(2, 6))
    stress[1] = np.nan
    arrays = {"forces": forces, "forces_uncertainty": np.abs(forces)}
    tensors = {"stress": stress, "stress_uncertainty": np.abs(stress)}
    energies = Prediction(rng.normal(size=(2, 3)))
    for first in (frames, None):
        write(path, first or read(path), energies, arrays=arrays, tensors=tensors)
    silicon, water = read(path)
    np.testing.assert_array_equal(silicon.get_forces(), forces[:8])
    np.testing.assert_allclose(silicon.get_stress(), stress[0])
    np.testing.assert_array_equal(silicon.info["REF_stress"], np.arange(6))
    assert "REF_forces" not in silicon.arrays  # the first prediction is no reference value
    assert "stress" not in water.calc.results
    write(tmp_path / "a.npz", frames, energies, arrays=arrays, tensors=tensors)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npz")["stress"], stress)
    with rejects("path"):
        write(tmp_path / "a.csv", frames, energies, arrays=arrays)


@pytest.mark.parametrize("target", ["shift", "charges"])
def test_xyz_of_atoms(tmp_path, target):
    frames, path = [molecule("CH4"), molecule("H2O"), Atoms("He")], tmp_path / "a.xyz"
    reference = rng.normal(size=5)
    frames[0].arrays[target] = reference
    rows = [np.array([4, 1]), np.array([], dtype=int), np.array([0])]
    p = Prediction(rng.normal(size=(3, 6)) * TINY)
    write(path, frames, p, target=target, kind="atomic", rows=rows)
    start = 0
    for frame, indices in zip(read(path), rows, strict=True):
        values = frame.calc.results[target] if target == "charges" else frame.arrays[target]
        part = slice(start, start := start + len(indices))
        np.testing.assert_array_equal(values[indices], p.mean[part])
        np.testing.assert_array_equal(frame.arrays[f"{target}_uncertainty"][indices], p.std[part])
        np.testing.assert_array_equal(frame.arrays[f"{target}_ensemble"][indices], p.members[part])
        assert np.isnan(np.delete(values, indices)).all()
    np.testing.assert_array_equal(read(path)[0].arrays[f"REF_{target}"], reference)


def columns_of(path):
    with path.open(newline="") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def test_csv_of_structures_and_atoms(tmp_path):
    path = tmp_path / "a.csv"
    frames = [molecule("CH4"), molecule("H2O")]
    p = Prediction(rng.normal(size=(4, 3)) * TINY)
    with open_writer(path, "energy", kind="structure", ensemble=True) as writer:
        writer.write(frames, p[:2], extra={"why": ["a,b", 'c"']})
        writer.write(frames, p[2:], extra={"why": ["", "d"]})
    table = columns_of(path)
    members = [f"energy_ensemble_{i}" for i in range(3)]
    about = ["index", "formula", "n_atoms"]
    assert [*table] == [*about, "energy", "energy_uncertainty", *members, "why"]
    assert table["index"] == ("0", "1", "2", "3")
    assert table["formula"] == ("CH4", "H2O") * 2
    assert table["why"] == ("a,b", 'c"', "", "d")
    np.testing.assert_array_equal([float(v) for v in table["energy"]], p.mean)
    np.testing.assert_array_equal([[float(v) for v in table[m]] for m in members], p.members.T)

    rows = [[0, 4], [1, 0]]
    write(path, frames, p, kind="atomic", ensemble=False, rows=rows, extra={"far": [1, 2]})
    table = columns_of(path)
    assert [*table] == ["index", "atom", "symbol", "energy", "energy_uncertainty", "far"]
    about = [table[name] for name in ("index", "atom", "symbol", "far")]
    assert ["".join(row) for row in zip(*about, strict=True)] == ["00C1", "04H1", "11H2", "10O2"]
    np.testing.assert_array_equal([float(v) for v in table["energy_uncertainty"]], p.std)


def test_npz_of_structures_and_atoms(tmp_path):
    path = tmp_path / "a.npz"
    frames = [molecule("CH4"), molecule("H2O")]
    p = Prediction(rng.normal(size=(16, 3)))
    write(path, frames, p[:2], target="file", extra={"why": ["a", "bc"]})
    with np.load(path) as arrays:
        assert {*arrays} == {"file", "file_uncertainty", "file_ensemble", "n_atoms", "why"}
        assert arrays["n_atoms"].tolist() == [5, 3]
        np.testing.assert_array_equal(arrays["file_ensemble"], p.members[:2])
    with open_writer(path, "energy", kind="atomic", ensemble=False, force=True) as writer:
        for batch in (p[:8], p[8:]):
            writer.write(frames, batch)
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays["energy"], p.mean)
        assert arrays["structure"].tolist() == np.repeat([0, 1, 2, 3], [5, 3, 5, 3]).tolist()
        assert arrays["atom"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] * 2


@pytest.mark.parametrize("suffix", ["xyz", "xyz.gz", "csv", "npz", "parquet"])
def test_no_predictions_are_a_file_too(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    with open_writer(path, "energy", kind="structure", ensemble=True):
        pass
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"path": "a.json"}, "path"),
        ({"path": "a.csv.gz"}, "path"),
        ({"target": "stress"}, "target"),
        ({"target": "a b"}, "target"),
        ({"target": "Lattice"}, "target"),
        ({"prediction": Prediction([[1.0, 2.0]])}, "prediction"),
        ({"kind": "atomic"}, "prediction"),
        ({"kind": "atomic", "rows": [[0]]}, "prediction"),
        ({"extra": {"far": [1]}}, "extra"),
        ({"arrays": {"forces": np.ones((2, 3))}}, "arrays"),
        ({"tensors": {"stress": np.ones((3, 6))}}, "tensors"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, arguments, parameter):
    options = {"path": "a.xyz", "prediction": Prediction(np.ones((2, 3)))} | arguments
    path = tmp_path / options.pop("path")
    with rejects(parameter):
        write(path, [molecule("CH4"), molecule("H2O")], **options)
    assert not os.listdir(tmp_path)
