"""Files: nothing is lost on writing, nothing wrong is read, and every file says what it holds."""

import csv
import gzip
import json
import os
import pickle
import stat
import struct
from contextlib import suppress

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.numpy import save_file

from qualms import InputError, Prediction, QualmsError
from qualms.io.container import (
    MAX_HEADER,
    Document,
    StorageError,
    TensorSpec,
    check_tensors,
    read_container,
    read_document,
    write_container,
)
from qualms.io.files import atomic_output, atomic_path, check_output
from qualms.io.predictions import open_writer

rng = np.random.default_rng(0)


# Writing files


@pytest.mark.parametrize(("mode", "text"), [("wb", b"new\r\n"), ("w", "new\r\n")])
def test_a_file_appears_complete_with_ordinary_permissions(tmp_path, mode, text):
    path = tmp_path / "a.txt"
    umask = os.umask(0o027)
    try:
        with atomic_output(path, mode=mode) as file:
            file.write(text)
            assert not path.exists()
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"new\r\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
@pytest.mark.parametrize("force", [True, False])
def test_an_interrupted_write_leaves_everything_as_it_was(tmp_path, error, force):
    path = tmp_path / "a.txt"
    if force:
        path.write_text("old")
    with suppress(error), atomic_output(path, force=force) as file:
        file.write(b"half")
        raise error
    assert os.listdir(tmp_path) == (["a.txt"] if force else [])
    assert not force or path.read_text() == "old"


def test_existing_files_are_replaced_only_by_force(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    for refused in (check_output, lambda p: atomic_output(p).__enter__()):
        with pytest.raises(InputError, match=r"a\.txt.*--force \(force=True"):
            refused(path)
    assert check_output(path, force=True) == path
    with atomic_output(path, force=True, mode="w") as file:
        file.write("new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def write_while_another_does(path):
    with atomic_output(path) as file:
        file.write(b"mine")
        path.write_text("theirs")


def test_two_writers_of_one_file_lose_nothing(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(InputError, match="which is now") as caught:
        write_while_another_does(path)
    assert path.read_text() == "theirs"
    (kept,) = {*tmp_path.iterdir()} - {path}
    assert kept.read_text() == "mine"
    assert str(kept) in str(caught.value)


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def no_link(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", no_link)
    with atomic_path(tmp_path / "a.xyz.gz") as temporary:
        assert temporary.name.endswith(".xyz.gz")
        temporary.write_text("new")
    assert os.listdir(tmp_path) == ["a.xyz.gz"]


def test_links_are_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    link, loop = tmp_path / "link.txt", tmp_path / "loop"
    link.symlink_to(tmp_path / "real" / "target.txt")
    loop.symlink_to(loop)
    for text in ("new", "newer"):
        with atomic_output(link, mode="w", force=True) as file:
            file.write(text)
        assert link.is_symlink()
        assert (tmp_path / "real" / "target.txt").read_text() == text
    with pytest.raises(InputError, match="regular file"):
        check_output(loop, force=True)


@pytest.mark.parametrize("path", [".", "none/a.txt", "file/a.txt", os.devnull, "/proc/a.txt"])
def test_impossible_outputs_are_refused_before_the_work(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="path="):
        check_output(path, force=True)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_directories_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="where you may write"):
        check_output(tmp_path / "a.txt")
    tmp_path.chmod(0o000)
    with pytest.raises(InputError, match="where you may write"):
        check_output(tmp_path / "a.txt")


# Containers


class Part(Document):
    name: str = "α"


class Settings(Document):
    alpha: float
    parts: tuple[Part, ...] = (Part(),)


TENSORS = {
    "weights": rng.normal(size=(5, 4)),
    "single": rng.normal(size=3).astype(np.float32),
    "seen": rng.random((3, 2)) < 0.5,
    "index": np.arange(6, dtype=np.int64),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 4), dtype=np.uint8),
}
KIND = {"format": "qualms model", "version": 2}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.qualms"
    write_container(path, TENSORS, Settings(alpha=0.1), **KIND)
    return path


def load(path):
    return read_container(path, Settings, **KIND)


def refuses(path, match=None):
    with pytest.raises(StorageError, match=match) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


def rewrite(path, *, drop=(), pad=b"", **changes):
    """Change the header of a file as an attacker could; values of `changes` are metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= changes
    for key in drop:
        del header["__metadata__"][key]
    raw = json.dumps(header).encode() + pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def test_containers_come_back_as_they_were(path):
    container = load(path)
    assert (container.document, container.version) == (Settings(alpha=0.1), 2)
    assert container.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(container.tensors[name], tensor)
        assert container.tensors[name].dtype == tensor.dtype
    assert read_document(path, Settings, **KIND) == Settings(alpha=0.1)
    (path.parent / "ordinary").touch()
    assert path.stat().st_mode == (path.parent / "ordinary").stat().st_mode
    with safe_open(path, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("weights"), TENSORS["weights"])


@given(
    hnp.arrays(
        st.sampled_from(["?", "i1", "u8", "<f4", "f8", ">f8", ">i2"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
        elements={"allow_nan": False, "allow_infinity": False},
    )
)
def test_memory_and_byte_order_do_not_matter(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("t") / "a"
    tensors = (
        {"T": array.T, "F": np.asfortranarray(array), "r": array[..., ::-1][..., ::2]}
        if array.ndim
        else {"a": array}
    )
    write_container(path, tensors, Settings(alpha=1), **KIND)
    for name, found in load(path).tensors.items():
        np.testing.assert_array_equal(found, tensors[name])


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, np.nan]),
        np.ones(2, complex),
        np.array(["a"]),
        np.ones(2, np.float16),
        np.array([{}]),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, array):
    with pytest.raises(InputError, match="tensors"):
        write_container(tmp_path / "a", {"a": array}, Settings(alpha=1), **KIND)
    assert not os.listdir(tmp_path)


def test_documents_that_json_changes_are_not_written(tmp_path):
    class Number(BaseModel):
        x: float

    class NumberOrNone(BaseModel):
        x: float | None

    for document in (Number(x=np.nan), NumberOrNone(x=np.nan)):
        with pytest.raises(InputError, match="without loss"):
            write_container(tmp_path / "a", {}, document, **KIND)
    with pytest.raises(StorageError, match="header"):
        write_container(tmp_path / "a", {}, Part(name="x" * MAX_HEADER), **KIND)
    assert not os.listdir(tmp_path)


def test_files_of_other_kinds_are_named_as_such(path, tmp_path):
    refuses(tmp_path / "none", "no file of this name")
    refuses(tmp_path, "no file of this name")
    other = tmp_path / "other"
    for content, match in [
        (b"", "empty"),
        (b"abc", "not a safetensors file"),
        (pickle.dumps(print), "not a safetensors file"),
        (b"PK\3\4" + bytes(4) + b"x" * 100, "not a safetensors file"),
        (struct.pack("<Q", MAX_HEADER + 1) + b" " * (MAX_HEADER + 1), "header of"),
        (struct.pack("<Q", 100_000) + b'{"a":' * 20_000, "not a safetensors file"),
        (struct.pack("<Q", 100_000) + b'{"a":' * 16_666 + b"1" * 4 + b"}" * 16_666, "JSON"),
        (path.read_bytes()[:-3], "truncated"),
        (path.read_bytes() + b"x", "instead of"),
    ]:
        other.write_bytes(content)
        refuses(other, match)
    save_file({"x": np.ones(3, np.float16)}, other, metadata={"format": "pt"})
    refuses(other, "this is a safetensors file but not a qualms model")


def test_versions(path):
    rewrite(path, version="3")
    refuses(path, r"written by a newer qualms \(protocol 3; this one reads up to 2\): upgrade")
    with pytest.raises(StorageError, match="newer"):
        read_document(path, Settings, **KIND)
    for version in ("0", "-1", "1.0", "", "x" * 999):
        rewrite(path, version=version)
        refuses(path, "is not the version")


def test_older_versions_are_read_and_said_so(tmp_path):
    write_container(tmp_path / "a", {}, Settings(alpha=1), format="qualms model", version=1)
    assert load(tmp_path / "a").version == 1


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ('{"alpha": 1, "beta": 2}', "'beta': Extra inputs"),
        ('{"alpha": 1, "parts": [{"nom": ""}]}', "'parts.0.nom'"),
        ('{"alpha": 1, "alpha": 2}', "a key occurs twice"),
        ('{"alpha": NaN}', "NaN is not a number"),
        ('{"alpha": "x"}', "'alpha'"),
        ("[" * 100_000, "JSON"),
        ("{", "JSON"),
    ],
)
def test_documents_must_follow_their_schema(path, document, match):
    rewrite(path, document=document)
    with pytest.raises(StorageError, match=match) as caught:
        read_document(path, Settings, **KIND)
    assert "\n" not in str(caught.value)
    refuses(path, "checksum")


@pytest.mark.parametrize(
    "changes", [{"drop": ["checksum"]}, {"drop": ["document"]}, {"note": "x"}, {"document": 1}]
)
def test_metadata_are_complete_and_nothing_else(path, changes):
    rewrite(path, **changes)
    refuses(path, "metadata")


def test_numbers_that_are_none_are_found_even_if_the_checksum_is_right(path, monkeypatch, tmp_path):
    monkeypatch.setattr("qualms.io.container._is_sound", lambda _: True)
    write_container(tmp_path / "nan", {"a": np.array([1, np.inf])}, Settings(alpha=1), **KIND)
    write_container(
        tmp_path / "b", {"b": np.array([2, 0], "u1").view(bool)}, Settings(alpha=1), **KIND
    )
    monkeypatch.undo()
    refuses(tmp_path / "nan", "tensor 'a' holds NaN")
    refuses(tmp_path / "b", "tensor 'b'")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"dtype": "F64"}, "not described by"),
        ([], "not described by"),
        ({"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}, "'BF16', which is not supported"),
        ({"dtype": "U8", "shape": [-1], "data_offsets": [0, 2]}, "impossible shape"),
        ({"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}, "impossible shape"),
        ({"dtype": "U8", "shape": [0, *[2**30] * 9], "data_offsets": [0, 0]}, "a"),
        ({"dtype": "U8", "shape": [2**30] * 9, "data_offsets": [0, 2**270]}, "bytes instead of"),
        ({"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}, "gaps"),
        ({"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}, "contradict"),
    ],
)
def test_descriptions_of_tensors_that_make_no_sense(tmp_path, entry, match):
    metadata = {"format": "qualms model", "version": "2", "document": "{}", "checksum": ""}
    raw = json.dumps({"__metadata__": metadata, "evil\x1b[2J\n": entry}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(raw)) + raw)
    refuses(tmp_path / "a", match)


def test_damage_anywhere_is_found(path):
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        refuses(path)
        path.write_bytes(data[:position])
        refuses(path)
    for new in b"\t\n\r 0aA":
        for position in range(8, data.index(b"}}") + 9):
            if data[position] != new:
                path.write_bytes(data[:position] + bytes([new]) + data[position + 1 :])
                refuses(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("t") / "a"
    for prefix in (
        b"",
        struct.pack("<Q", len(content)),
        struct.pack("<Q", len(content) + 2) + b"{}",
    ):
        path.write_bytes(prefix + content)
        refuses(path)


def test_tensors_of_a_model_fit_together():
    tensors = {"U": np.ones((3, 4)), "w": np.ones((4, 2)), "i": np.arange(3)}
    specs = {
        "U": TensorSpec("f", ("r", "d")),
        "w": TensorSpec("f", ("d", 2)),
        "i": TensorSpec("iu", ("r",)),
    }
    assert check_tensors(tensors, specs, path="m", sizes={"r": 3}) == {"r": 3, "d": 4}
    for change, match in [
        ({"U": np.ones((3, 5))}, r"m: tensor 'w' has shape \(4, 2\), expected \(d = 5, 2\)\."),
        ({"w": np.ones((4, 3))}, "'w' has shape"),
        ({"w": np.ones(4)}, "'w' has shape"),
        ({"i": np.ones(3)}, "'i' is float64, expected kind 'iu'"),
        ({"x": np.ones(3)}, "'x' is unknown"),
    ]:
        with pytest.raises(StorageError, match=match):
            check_tensors({**tensors, **change}, specs, path="m")
    with pytest.raises(StorageError, match=r"expected \(r = 9, d\)"):
        check_tensors(tensors, specs, path="m", sizes={"r": 9})
    with pytest.raises(StorageError, match="'U' is missing") as caught:
        check_tensors({}, specs, path="m")
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert isinstance(error, QualmsError)


# Predictions

TINY = 1e-9  # ASE's eight decimals would lose it


def frames_with_references():
    """Water with results of a calculator and with all kinds of company, and a crystal without."""
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


def write(
    path, frames, prediction, *, target="energy", kind="structure", ensemble=True, **arguments
):
    with open_writer(path, target, kind=kind, ensemble=ensemble, force=True) as writer:
        writer.write(frames, prediction, **arguments)
        assert writer.n_structures == len(frames)


def read(path):
    return ase.io.read(path, ":")


@pytest.mark.parametrize("name", ["a.xyz", "b.extxyz", "c.XYZ.gz"])
def test_xyz_keeps_the_structures_and_adds_predictions(tmp_path, name):
    frames = frames_with_references()
    p = Prediction(rng.normal(size=(2, 4)) * TINY)
    write(
        tmp_path / name, frames, p, extra={"far": [True, False], "why": ["", "a b"], "x": [1, TINY]}
    )
    assert frames[0].calc.results["energy"] == -1.5
    assert "energy" not in frames[0].info
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "rt") as file:
        assert f" energy={float(p.mean[0])!r} " in file.read()
    for i, (old, new) in enumerate(zip(frames, read(tmp_path / name), strict=True)):
        assert new.calc.results == {"energy": p.mean[i]}
        assert new.info["energy_uncertainty"] == p.std[i]
        np.testing.assert_array_equal(new.info["energy_ensemble"], p.members[i])
        assert (new.info["far"], new.info["why"]) == ((True, ""), (False, "a b"))[i]
        assert str(new.symbols) == str(old.symbols)
        np.testing.assert_array_equal(new.positions, old.positions)
        np.testing.assert_array_equal(new.cell, old.cell)
        np.testing.assert_array_equal(new.pbc, old.pbc)


def test_xyz_keeps_all_that_comes_with_a_structure(tmp_path):
    frames = frames_with_references()
    write(tmp_path / "a.xyz", frames, Prediction(rng.normal(size=(2, 4))))
    water, old = read(tmp_path / "a.xyz")[0], frames[0]
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


def test_references_survive_being_predicted_twice(tmp_path):
    frames = frames_with_references()
    frames[1].info["gap"] = 1.1
    first, second = (Prediction(rng.normal(size=(2, 4))) for _ in range(2))
    for target in ("energy", "gap"):
        write(tmp_path / "a.xyz", frames, first, target=target)
        write(tmp_path / "b.xyz", read(tmp_path / "a.xyz"), second, target=target, ensemble=False)
        water, silicon = read(tmp_path / "b.xyz")
        assert water.info["REF_energy"] == -1.5
        predicted = water.calc.results if target == "energy" else water.info
        assert predicted[target] == second.mean[0]
        assert f"{target}_ensemble" not in water.info  # it was that of the first prediction
        assert silicon.info["REF_gap" if target == "gap" else "gap"] == 1.1
        # What had no reference does not get the first prediction for one.
        assert f"REF_{target}" not in (silicon if target == "energy" else water).info


def test_what_ase_would_take_for_results_is_set_aside_wherever_it_is(tmp_path):
    frame = Atoms("H2", [[0, 0, 0], [0, 0, 1]], info={"energy": 2.0})
    frame.arrays["forces"] = np.ones((2, 3))
    write(tmp_path / "a.xyz", [frame], Prediction([[1.0, 2.0]]), target="gap")
    (found,) = read(tmp_path / "a.xyz")
    assert found.calc is None
    assert found.info["REF_energy"] == 2
    np.testing.assert_array_equal(found.arrays["REF_forces"], np.ones((2, 3)))


def test_batches_of_twice_as_many_structures_take_twice_the_work(tmp_path):
    class Counted(Atoms):
        n_asked = 0

        def __len__(self):
            Counted.n_asked += 1
            return super().__len__()

    def asked(n):
        frames = [Counted("H2", [[0, 0, 0], [0, 0, 0.7 + i]]) for i in range(n)]
        prediction = Prediction(rng.normal(size=(n, 3)))
        forces = np.arange(6.0 * n).reshape(-1, 3)
        Counted.n_asked = 0
        write(tmp_path / "out.xyz", frames, prediction, arrays={"forces": forces})
        written = [atoms.get_forces() for atoms in read(tmp_path / "out.xyz")]
        np.testing.assert_array_equal(np.concatenate(written), forces)
        return Counted.n_asked

    assert asked(40) <= 2.1 * asked(20)


@pytest.mark.parametrize("target", ["shift", "charges"])
def test_xyz_of_atoms(tmp_path, target):
    frames = [molecule("CH4"), molecule("H2O"), Atoms("He")]
    reference = rng.normal(size=5)
    frames[0].arrays[target] = reference
    rows = [np.array([4, 1]), np.array([], dtype=int), np.array([0])]
    p = Prediction(rng.normal(size=(3, 6)) * TINY)
    write(
        tmp_path / "a.xyz",
        frames,
        p,
        target=target,
        kind="atomic",
        rows=rows,
        extra={"far": [1, 2, 3]},
    )
    start = 0
    for frame, indices, far in zip(read(tmp_path / "a.xyz"), rows, (1, 2, 3), strict=True):
        found = frame.calc.results[target] if target == "charges" else frame.arrays[target]
        part = slice(start, start := start + len(indices))
        np.testing.assert_array_equal(found[indices], p.mean[part])
        np.testing.assert_array_equal(frame.arrays[f"{target}_uncertainty"][indices], p.std[part])
        np.testing.assert_array_equal(frame.arrays[f"{target}_ensemble"][indices], p.members[part])
        assert np.isnan(np.delete(found, indices)).all()
        assert frame.info["far"] == far
    np.testing.assert_array_equal(read(tmp_path / "a.xyz")[0].arrays[f"REF_{target}"], reference)


def test_xyz_frames_may_be_empty(tmp_path):
    write(tmp_path / "a.xyz", [Atoms()], Prediction([[1.0, 2.0]]))
    assert (
        (tmp_path / "a.xyz").read_text().startswith("0\nProperties=species:S:1:pos:R:3 energy=1.5")
    )


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
        writer.write([], p[:0], extra={"why": np.array([], dtype=str)})
        writer.write(frames, p[2:], extra={"why": ["", "d"]})
    table = columns_of(path)
    names = ["index", "formula", "n_atoms", "energy", "energy_uncertainty"]
    members = [f"energy_ensemble_{i}" for i in range(3)]
    assert [*table] == [*names, *members, "why"]
    assert table["index"] == ("0", "1", "2", "3")
    assert table["formula"] == ("CH4", "H2O") * 2
    assert table["why"] == ("a,b", 'c"', "", "d")
    np.testing.assert_array_equal([float(v) for v in table["energy"]], p.mean)
    np.testing.assert_array_equal([[float(v) for v in table[m]] for m in members], p.members.T)

    rows, extra = [[0, 4], [1, 0]], {"far": [1, 2]}
    write(path, frames, p, kind="atomic", ensemble=False, rows=rows, extra=extra)
    table = columns_of(path)
    assert [*table] == ["index", "atom", "symbol", "energy", "energy_uncertainty", "far"]
    about = [table[name] for name in ("index", "atom", "symbol", "far")]
    assert ["".join(row) for row in zip(*about, strict=True)] == ["00C1", "04H1", "11H2", "10O2"]
    np.testing.assert_array_equal([float(v) for v in table["energy_uncertainty"]], p.std)


@pytest.mark.parametrize("target", ["energy", "file"])
def test_npz_of_structures_and_atoms(tmp_path, target):
    path = tmp_path / "a.npz"
    frames = [molecule("CH4"), molecule("H2O")]
    p = Prediction(rng.normal(size=(16, 3)))
    write(path, frames, p[:2], target=target, extra={"why": ["a", "bc"]})
    with np.load(path) as arrays:
        assert {*arrays} == {
            target,
            f"{target}_uncertainty",
            f"{target}_ensemble",
            "n_atoms",
            "why",
        }
        assert arrays["n_atoms"].tolist() == [5, 3]
        np.testing.assert_array_equal(arrays[f"{target}_ensemble"], p.members[:2])
    with open_writer(path, target, kind="atomic", ensemble=False, force=True) as writer:
        for batch in (p[:8], p[8:]):
            writer.write(frames, batch, extra={"why": ["a", "bc"]})
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays[target], p.mean)
        assert arrays["structure"].tolist() == np.repeat([0, 1, 2, 3], [5, 3, 5, 3]).tolist()
        assert arrays["atom"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] * 2
        assert arrays["why"].tolist() == ["a", "bc"] * 2


@pytest.mark.parametrize("suffix", ["xyz", "xyz.gz", "csv", "npz"])
def test_nothing_predicted_and_interruptions(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    with open_writer(path, "energy", kind="structure", ensemble=True):
        pass
    assert os.listdir(tmp_path) == [path.name]
    if suffix == "csv":
        assert path.read_text() == "index,formula,n_atoms,energy,energy_uncertainty\n"
    before = path.read_bytes()
    with (
        pytest.raises(InputError, match="--force"),
        open_writer(path, "energy", kind="structure", ensemble=True),
    ):
        pass
    with (
        suppress(KeyboardInterrupt),
        open_writer(path, "energy", kind="structure", ensemble=True, force=True) as writer,
    ):
        writer.write([molecule("H2O")], Prediction([[1.0, 2.0]]))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_the_same_predictions_give_the_same_file(tmp_path):
    for name in ("a.xyz.gz", "b.xyz.gz"):
        write(tmp_path / name, [molecule("H2O")], Prediction([[1.0, 2.0]]))
    assert (tmp_path / "a.xyz.gz").read_bytes() == (tmp_path / "b.xyz.gz").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"path": "a.json"}, r"\.xyz, \.extxyz, \.csv, \.npz, \.xyz\.gz"),
        ({"path": "a.csv.gz"}, r"\.xyz"),
        ({"path": "xyz"}, r"\.xyz"),
        ({"kind": "atom"}, "kind"),
        ({"target": "stress"}, "target"),
        ({"target": "a b"}, "target"),
        ({"target": "a=b"}, "target"),
        ({"target": "Lattice"}, "target"),
        ({"prediction": Prediction([[1.0, 2.0]])}, r"shape \(1,\).*\(2,\), one prediction per str"),
        ({"kind": "atomic"}, r"\(8,\), one prediction per atom"),
        ({"kind": "atomic", "rows": [[0]]}, "one for each of 2 frames"),
        ({"kind": "atomic", "rows": [[0], [3]]}, "different indices of 3 atoms"),
        ({"kind": "atomic", "rows": [[0, 0], []]}, "different indices"),
        ({"kind": "atomic", "rows": [[0], [0.5]]}, "indices of atoms"),
        ({"rows": [[0], [0]]}, "rows"),
        ({"extra": {"far": [1]}}, "2 numbers, booleans or strings"),
        ({"extra": {"far": [{}, {}]}}, "2 numbers, booleans or strings"),
        ({"extra": {"energy": [1, 2]}}, "another name"),
        ({"extra": {"pbc": [1, 2]}}, "extra"),
    ],
)
def test_bad_input_is_refused(tmp_path, arguments, match):
    given = {"path": "a.xyz", "prediction": Prediction(np.ones((2, 3)))} | arguments
    path = tmp_path / given.pop("path")
    with pytest.raises(InputError, match=match):
        write(path, [molecule("CH4"), molecule("H2O")], **given)
    assert not os.listdir(tmp_path)


def test_batches_must_belong_together(tmp_path):
    frames = [molecule("H2O")]
    with open_writer(tmp_path / "a.csv", "energy", kind="structure", ensemble=True) as writer:
        writer.write(frames, Prediction([[1.0, 2.0]]))
        with pytest.raises(InputError, match="first batch"):
            writer.write(frames, Prediction([[1.0, 2.0, 3.0]]))
        with pytest.raises(InputError, match="first batch"):
            writer.write(frames, Prediction([[1.0, 2.0]]), extra={"far": [1]})
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 2
