"""Files from others: nothing that they name, or that lies beside them, is executed."""

import hashlib
import os
import pickle
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import ase.io
import pytest
from ase import Atoms
from atomistic_fixtures import SMALL, labelled_dimers
from checks import rejects
from fake_network import Densities
from test_cli import qualms
from test_model_file import forge, put

from qualms import AtomisticModel, InputError
from qualms.ase import Calculator
from qualms.features.learned import SHIPPED, find_weights, installed_folder, shipped_weights

HAS_SEVENNET = find_spec("sevenn") is not None and find_spec("torch") is not None
FEW = {"baseline": "mean", "n_representatives": 30, "n_members": 8, "n_posterior": 4, "threads": 1}
#: Names under which an attacker may leave weights.
NAMES = ("7net-0", "7net-0_22may2024", "7net-l3i5", "sevennet", "0.3.0", "weights.pth")
#: Code of a module that leaves a trace when it is imported.
CODE = "from pathlib import Path\nPath({!r}).touch()\nraise SystemError('this is hostile')\n"
COMMANDS = (
    "info model.safetensors",
    "predict model.safetensors new.xyz -o out.xyz --force -q",
    "evaluate model.safetensors new.xyz -q",
    "report model.safetensors new.xyz -o report.html --force -q",
)


class Bomb:
    """Pickles to something that leaves a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    """The file that exists if code was executed."""
    return tmp_path / "executed"


@pytest.fixture
def bomb(marker):
    """A pickle that is proved to execute code."""
    content = pickle.dumps(Bomb(marker))
    pickle.loads(content)
    marker.unlink()
    return content


@pytest.fixture(scope="module")
def frames():
    return labelled_dimers(30)


@pytest.fixture(scope="module")
def learned(frames, tmp_path_factory):
    """A model with features of an object, and its file."""
    path = tmp_path_factory.mktemp("learned") / "model.safetensors"
    model = AtomisticModel("energy", units="eV", representation=Densities(), **FEW).fit(frames)
    model.save(path)
    return model, path


@pytest.fixture(scope="module")
def soap(frames, tmp_path_factory):
    """A model with features of SOAP, and its file."""
    path = tmp_path_factory.mktemp("soap") / "model.safetensors"
    model = AtomisticModel("energy", units="eV", representation=SMALL, **FEW).fit(frames)
    model.save(path)
    return model, path


@pytest.fixture(params=["working directory", "folder of the model", "sys.path"])
def folder(request, tmp_path, monkeypatch, bomb, frames):
    """The folder of a model, with pickles in this place under all names of weights."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    planted = Path.cwd()
    if request.param == "folder of the model":
        monkeypatch.chdir(tmp_path / "elsewhere")
    elif request.param == "sys.path":
        planted = tmp_path / "elsewhere"
        monkeypatch.syspath_prepend(planted)
    else:
        monkeypatch.syspath_prepend(planted)  # as ``python -m`` and notebooks do
    for name in NAMES:
        (planted / name).write_bytes(bomb)
    for name, _ in SHIPPED["sevennet"].values():  # not a package, only its files
        (planted / name).parent.mkdir(parents=True)
        (planted / name).write_bytes(bomb)
    ase.io.write(tmp_path / "here" / "new.xyz", frames[:3], format="extxyz")
    return tmp_path / "here"


def representation(backbone, model, bomb):
    """Return a change of a model file: features of these weights, with the digest of the bomb."""
    digest = hashlib.sha256(bomb).hexdigest()
    value = {"backbone": backbone, "model": model, "version": "0.13.0", "sha256": digest}
    return put("settings", "representation", value=value)


def run_all(folder):
    """Run each command on a model, and make a calculator of it."""
    ended = []
    for command in COMMANDS:
        texts = [str(folder / t) if t.split(".")[0] in ("model", "new") else t for t in
                 shlex.split(command)]  # fmt: skip
        ended.append(qualms(shlex.join(texts)))
        assert ended[-1].code in (0, 2), ended[-1].err
        assert "Traceback" not in ended[-1].err
    assert ended[0].code == 0, ended[0].err
    atoms = ase.io.read(folder / "new.xyz")
    try:
        atoms.calc = Calculator(str(folder / "model.safetensors"))
        atoms.get_potential_energy()
    except InputError:
        pass
    return ended


@pytest.mark.parametrize(
    ("backbone", "model"),
    [
        ("sevennet", None),
        ("sevennet", "7net-0"),
        ("sevennet", "weights.pth"),
        ("sevennet", "{folder}/7net-0"),
        ("mace", "weights.pth"),
        ("metatomic", "{folder}/weights.pth"),
    ],
)
def test_weights_that_a_file_names(learned, folder, bomb, marker, no_figures, backbone, model):
    if backbone == "sevennet" and not HAS_SEVENNET:
        pytest.skip("sevenn is not installed; the resolver is tested below")
    name = model and model.format(folder=folder)
    forge(learned, folder / "model.safetensors", representation(backbone, name, bomb))
    ended = run_all(folder)
    assert [command.code for command in ended[1:]] == [2, 2, 2]
    assert not marker.exists()


@pytest.mark.parametrize("calculator", ["sevennet", "hostile:make", "backbone", "tblite:GFN2-xTB"])
def test_calculators_that_a_file_names(soap, folder, marker, monkeypatch, no_figures, calculator):
    if calculator == "sevennet" and not HAS_SEVENNET:
        pytest.skip("sevenn is not installed; the resolver is tested below")
    for place in (folder, Path.cwd()):
        (place / "hostile.py").write_text(CODE.format(str(marker)))
        (place / "tblite").mkdir(exist_ok=True)
        (place / "tblite" / "__init__.py").write_text(CODE.format(str(marker)))
    monkeypatch.syspath_prepend(Path.cwd())
    forge(
        soap,
        folder / "model.safetensors",
        put("settings", "baseline", value={"calculator": calculator}),
    )
    ended = run_all(folder)
    codes = [command.code for command in ended[1:]]
    assert codes == ([0, 0, 0] if calculator == "sevennet" else [2, 2, 2]), ended[1].err
    if calculator != "sevennet":  # nor is it imported to train the model again, in whatever way
        model = AtomisticModel.load(folder / "model.safetensors")
        for executor in (None, ThreadPoolExecutor(1)):
            with rejects("baseline"):
                model.fit(ase.io.read(folder / "new.xyz", ":"), executor=executor)
    assert not marker.exists()


def test_weights_of_the_working_directory_with_the_word_of_a_user(learned, folder, bomb, marker):
    """A path that a user gives is opened, and so is shown that the tests above can fail."""
    pytest.importorskip("torch")
    if not HAS_SEVENNET:
        pytest.skip("sevenn is not installed")
    path = folder / "model.safetensors"
    forge(learned, path, representation("sevennet", "7net-0", bomb))
    (folder / "mine.pth").write_bytes(bomb)
    with rejects("model"):  # a name is that of installed weights, whoever gives it
        AtomisticModel.load(path, representation="7net-0")
    assert not marker.exists()
    with rejects("model"):
        AtomisticModel.load(path, representation=folder / "mine.pth")
    assert marker.exists()


# --- the resolver, with a package that is made here ---


@pytest.fixture
def installed(tmp_path, monkeypatch, marker):
    """A package called sevenn in site-packages, with weights whose digest is known."""
    site = tmp_path / "lib" / "site-packages"
    listed = {}
    for name, (file, _) in SHIPPED["sevennet"].items():
        (site / file).parent.mkdir(parents=True)
        (site / file).write_text(name)
        listed[name] = (file, hashlib.sha256(name.encode()).hexdigest())
    (site / "sevenn" / "__init__.py").write_text(CODE.format(str(marker)))
    monkeypatch.setitem(SHIPPED, "sevennet", listed)
    monkeypatch.syspath_prepend(site)
    return site


def test_names_are_resolved_in_the_installed_package(installed, folder, marker, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    for model in (None, *SHIPPED["sevennet"]):
        for trusted in (True, False):
            path, digest = find_weights("sevennet", model, trusted=trusted)
            assert path.is_absolute()
            assert path.is_relative_to(installed)
            assert path.read_text() == (model or "7net-0")
            assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    for model in ("weights.pth", str(folder / "7net-0"), "./7net-0", "7NET-0", "sevennet"):
        for backbone in ("sevennet", "mace", "metatomic"):
            with rejects("representation"):
                find_weights(backbone, model, trusted=False)
    with rejects("representation"):
        find_weights("mace", None, trusted=False)
    assert not marker.exists()


def test_weights_with_another_digest_are_not_opened(installed, bomb, marker):
    path, digest = shipped_weights("sevennet")
    with rejects("model"):  # of the training
        find_weights("sevennet", None, sha256="0" * 64, trusted=True)
    assert find_weights("sevennet", None, sha256=digest, trusted=False) == (path, digest)
    path.write_bytes(bomb)
    with rejects("model"):
        shipped_weights("sevennet")
    path.unlink()
    with rejects("model"):
        shipped_weights("sevennet")
    assert not marker.exists()


@pytest.mark.parametrize("what", ["sevenn/__init__.py", "sevenn.py"])
def test_a_package_of_the_working_directory_is_not_installed(
    installed, tmp_path, monkeypatch, what, marker
):
    assert installed_folder("sevenn") == installed
    assert installed_folder("no_such_package") is None
    for place in (tmp_path / "work", tmp_path / "site-packages"):
        (place / what).parent.mkdir(parents=True)
        (place / what).write_text(CODE.format(str(marker)))
        for entry in (str(place), ""):
            with monkeypatch.context() as patch:
                patch.chdir(place)
                patch.syspath_prepend(entry)
                assert installed_folder("sevenn") is None
                with rejects("model"):
                    shipped_weights("sevennet")
    assert not marker.exists()


# --- code beside a model ---


@pytest.mark.parametrize(
    "command",
    ["-m qualms info {}", "../bin/command.py predict {} new.xyz -o out.parquet --cluster local:1"],
)
def test_nothing_is_imported_from_the_working_directory(soap, frames, tmp_path, marker, command):
    """Neither by ``python -m``, nor by the processes that are started."""
    work = tmp_path / "work"
    for name in ("ase", "joblib", "multiprocessing", "numpy", "sevenn", "torch"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text(CODE.format(str(marker)))
    ase.io.write(work / "new.xyz", frames, format="extxyz")
    script = "from qualms.__main__ import run\nif __name__ == '__main__':\n    run()\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "command.py").write_text(script)  # as pip writes it
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    ended = subprocess.run(
        [sys.executable, *shlex.split(command.format(soap[1]))],
        cwd=work,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert not marker.exists()
    assert ended.returncode == 0, ended.stderr.decode()


def test_structures_are_data(soap, tmp_path, monkeypatch, marker, bomb):
    """ASE guesses formats by names and content; none of those that are read is a pickle."""
    monkeypatch.chdir(tmp_path)
    for name in ("new.xyz", "new.traj", "new.db", "new.json", "new.pkl", "new.py", "new"):
        Path(name).write_bytes(bomb)
        ended = qualms(f"predict {soap[1]} {name} -o out.xyz")
        assert ended.code == 2, ended.err
    Path("new.py").write_text(CODE.format(str(marker)))
    assert qualms(f"predict {soap[1]} new.py -o out.xyz").code == 2
    assert not marker.exists()
    ase.io.write("fine.xyz", Atoms("OH", [[0, 0, 0], [1, 0, 0]]))
    assert qualms(f"predict {soap[1]} fine.xyz -o out.xyz").code == 0
