"""Features of networks, and of objects that follow the same protocol."""

import contextlib
import shlex
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from atomistic_fixtures import ENERGY, labelled_dimers, problem_of, rows_of, same_predictions
from checks import rejects
from fake_network import Densities, NoDerivatives
from test_cli import qualms

from qualms import AtomisticModel
from qualms.ase import Calculator
from qualms.atomistic.settings import make_settings
from qualms.errors import QualmsWarning
from qualms.features.base import Problem
from qualms.features.learned import Backbone, LearnedRepresentation, make_backbone
from qualms.gp.kernels import ExponentialKernel, RBFKernel, normalize_rows

with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import metatomic.torch  # noqa: F401 — before torch_geometric, which breaks TorchScript

FEW = {"baseline": "mean", "n_representatives": 60, "n_members": 8, "n_posterior": 4, "threads": 1}


@pytest.fixture(scope="module")
def dimers():
    return labelled_dimers(60)


@pytest.fixture(scope="module")
def trained(dimers):
    """A model of energies and forces with features of an object."""
    noise = {"noise": 1e-4, "forces_noise": 1e-2}  # larger weights would amplify rounding
    options = {"forces": "forces", "units": "eV", "representation": Densities()}
    return AtomisticModel("energy", **options, **noise, **FEW).fit(dimers[:40])


@pytest.fixture(scope="module")
def pretrained(dimers):
    """A model of energies and forces with features of a network whose weights are in its wheel."""
    pytest.importorskip("torch")
    if find_spec("sevenn") is None:
        pytest.skip("sevenn is not installed")
    options = {"forces": "forces", "units": "eV", "calibration": "student"}
    options |= {"representation": "sevennet", "noise": 1e-4, "forces_noise": 1e-2}
    return AtomisticModel("energy", **options, **FEW).fit(dimers[:16])


def test_an_object_is_as_good_as_any_representation(trained, dimers):
    new = dimers[40:]
    predicted = trained.predict(new, forces=True)
    forces = np.concatenate([atoms.arrays["forces"] for atoms in new])
    energies = np.array([atoms.info["energy"] for atoms in new])
    np.testing.assert_allclose(predicted.energy.mean, trained.predict(new).mean, atol=1e-5)
    assert np.abs(predicted.energy.mean - energies).mean() < 0.2 * energies.std()
    assert np.abs(predicted.forces.mean - forces).mean() < 0.3 * np.abs(forces).mean()
    assert np.all(predicted.forces.std > 0)


def shifted(frames, s, i, axis, step):
    """Copies of structures, of which an atom of one is moved."""
    frames = [atoms.copy() for atoms in frames]
    frames[s].positions[i, axis] += step
    return frames


def sheared(atoms, step):
    strained, strain = atoms.copy(), np.eye(3)
    strain[0, 1] = strain[1, 0] = step / 2
    strained.set_cell(atoms.cell.array @ strain, scale_atoms=True)
    return [strained]


def slope(function, change, h=1e-4):
    """The central difference of a function of structures."""
    return (function(change(h)) - function(change(-h))) / (2 * h)


@pytest.mark.parametrize(
    ("name", "step", "tolerance"), [("trained", 1e-3, 1e-4), ("pretrained", 2e-4, 1e-3)]
)
def test_forces_are_derivatives_of_the_energies_of_all_members(
    name, step, tolerance, dimers, request
):
    model, atoms = request.getfixturevalue(name), dimers[50]
    predicted = model.predict([atoms], forces=True)
    forces = predicted.forces.uncalibrated.members
    assert forces.shape == (5, 3, 12)
    np.testing.assert_allclose(predicted.energy.mean, model.predict([atoms]).mean, atol=1e-5)
    for i, axis in ((0, 0), (3, 1)):
        change = partial(shifted, [atoms], 0, i, axis)
        energies = slope(lambda frames: model.predict(frames).uncalibrated.members[0], change, step)
        atol = tolerance * np.abs(forces).max()
        np.testing.assert_allclose(forces[i, axis], -energies, atol=atol)


@pytest.mark.parametrize(("name", "tolerance"), [("trained", 1e-7), ("pretrained", 1e-4)])
def test_training_rows_are_derivatives_of_energies(name, tolerance, dimers, request):
    """Changes of features that training uses are those of the vector-Jacobian product."""
    (features,) = request.getfixturevalue(name).fitted.representation.differentiable
    (tape,) = features.tapes(dimers[:2], ("positions", "strain"))
    slopes = np.random.default_rng(0).normal(size=tape.y.shape)
    slopes -= np.einsum("nf,nf->n", slopes, tape.x)[:, None] * tape.x
    slopes /= tape.lengths
    positions, strain = tape.pull_back(slopes[:, None], np.arange(tape.y.shape[1]))
    of_rows = np.zeros((len(tape.atoms), 3))
    for owners, atoms, columns, values, complete in tape.push_forward():
        change = np.einsum("pcf,pf->pc", values, slopes[owners][:, columns])
        np.add.at(of_rows, atoms, change)
        assert complete
    atol = tolerance * np.abs(positions).max()
    np.testing.assert_allclose(of_rows, positions[..., 0], atol=atol)
    strained = np.einsum("nvf,nf->nv", tape.push_strain(), slopes)
    of_structures = np.stack([strained[:5].sum(axis=0), strained[5:].sum(axis=0)])
    np.testing.assert_allclose(of_structures, strain[..., 0], atol=atol)


def test_the_calculator_of_ase(trained, dimers):
    atoms = dimers[55].copy()
    atoms.calc = Calculator(trained)
    predicted = trained.predict([atoms], forces=True)[0]
    assert atoms.get_potential_energy() == pytest.approx(float(predicted.energy.mean))
    np.testing.assert_allclose(atoms.get_forces(), predicted.forces.mean, atol=1e-10)


def test_saving_needs_the_object_again(trained, dimers, tmp_path):
    path = tmp_path / "model.safetensors"
    trained.save(path)
    loaded = AtomisticModel.load(path, threads=1, representation=Densities())
    same_predictions(trained, loaded, dimers[40:44])
    assert loaded.summary() == trained.summary()
    trained.fitted.representation.prepare()
    other = replace(
        trained.fitted.representation,
        settings=trained.settings.representation.model_copy(update={"version": "0.1"}),
    )
    with pytest.warns(QualmsWarning):
        other.prepare()
    for weights in (None, NoDerivatives(), "weights.pth"):
        with rejects("representation"):
            AtomisticModel.load(path, representation=weights)
    assert trained.fitted.representation.serial == np.inf  # objects may not be pickled


def test_the_kernel_is_a_gaussian_less_a_constant():
    rng = np.random.default_rng(0)
    X, Y = (normalize_rows(rng.normal(size=(n, 5))) for n in (4, 6))
    gaussian, constant = RBFKernel(0.7)(X, Y), np.exp(-(0.7**-2))
    expected = (gaussian - constant) / (1 - constant)
    kernel = ExponentialKernel(0.7)
    np.testing.assert_allclose(kernel(X, Y), expected, atol=1e-12)
    np.testing.assert_allclose(kernel.diag(X), 1.0)
    np.testing.assert_allclose(ExponentialKernel(100.0)(X, Y), X @ Y.T, atol=1e-4)
    t, h = np.linspace(-1, 1, 7), 1e-6
    value, slope = kernel.value_and_slope(t)
    plus, minus = (kernel.value_and_slope(t + s)[0] for s in (h, -h))
    np.testing.assert_allclose(slope, (plus - minus) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(value, np.expm1(t / 0.49) / np.expm1(1 / 0.49))


def test_elements_have_columns_of_their_own(dimers):
    representation = LearnedRepresentation(make_backbone(Densities()), (1, 6, 8), 17)
    atoms = dimers[0]
    X = representation.features([atoms, atoms], [np.array([1, 3]), np.arange(5)])
    np.testing.assert_allclose(np.linalg.norm(X, axis=1), 1.0)
    assert np.all(X[0, 17:] == 0)
    assert np.all(X[1, :34] == 0)
    np.testing.assert_allclose(X[[0, 1]], X[2:][[1, 3]])


def test_forces_of_some_atoms(dimers):
    """Rows of the forces on chosen atoms are those that training on all forces has."""
    forces = {"forces": "forces", "units": "eV", "representation": Densities(), **FEW}
    some, every = (
        problem_of(dimers[:20], make_settings({"target": "energy", "force_atoms": n, **forces}))
        for n in (2, "all")
    )
    assert some.data.quantities["forces"].rows.size == 20 * 2 * 3
    of_some, of_all = (rows_of(problem) for problem in (some, every))
    chosen = np.concatenate([np.isfinite(f).ravel() for f in of_some.sample.derivatives.forces])
    np.testing.assert_allclose(of_some.kept.Phi[20:], of_all.kept.Phi[20:][chosen], atol=1e-9)
    assert Backbone(backbone="sevennet").n_moving(np.full(100, 24), "default") is None
    assert Backbone(backbone="sevennet").n_moving(np.full(1000, 24), "default") == 3


# --- what cannot be used ---


def broken(**changes):
    return type("Broken", (NoDerivatives,), changes)()


def test_no_forces_without_derivatives(dimers):
    with rejects("representation"):
        AtomisticModel("energy", forces="forces", representation=NoDerivatives())
    model = AtomisticModel("energy", representation=NoDerivatives(), **FEW).fit(dimers[:30])
    assert np.all(model.predict(dimers[40:]).std > 0)
    with rejects("representation"):
        model.predict(dimers[:1], forces=True)
    options = {**FEW, "baseline": "backbone"}  # it has no energies either
    with rejects("baseline"):
        AtomisticModel("energy", representation=NoDerivatives(), **options).fit(dimers[:30])


def lengths(frames):
    return np.concatenate([1 + np.linalg.norm(atoms.positions, axis=1) for atoms in frames])


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        (
            {"features": lambda self, frames: np.full((sum(map(len, frames)), 17), np.nan)},
            "representation",
        ),
        ({"features": lambda self, frames: np.ones((sum(map(len, frames)), 17))}, "representation"),
        ({"features": lambda self, frames: np.ones((3, 17))}, "representation"),
        (
            {"features": lambda self, frames: np.outer(lengths(frames), np.ones(17))},
            "representation",
        ),
        ({"species": (1, 6)}, "frames"),
    ],
    ids=["not finite", "constant", "shape", "constant direction", "elements"],
)
def test_bad_features(dimers, changes, parameter):
    model = AtomisticModel("energy", representation=broken(**changes), **FEW)
    with rejects(parameter):
        model.fit(dimers[:30])


@pytest.mark.parametrize(
    "pulled",
    [
        lambda b: (np.full((len(b), 5, 3), np.nan), np.zeros((len(b), 1, 3, 3))),
        lambda b: (np.zeros((len(b), 3, 5)), np.zeros((len(b), 1, 3, 3))),
        lambda b: (np.zeros((len(b), 5, 3)), np.zeros((len(b), 1, 6))),
    ],
    ids=["not finite", "shape", "shape of strains"],
)
def test_bad_derivatives(dimers, pulled):
    network = broken(vjp=lambda self, frames: (Densities().features(frames), pulled))
    model = AtomisticModel("energy", representation=network, **FEW).fit(dimers[:30])
    with rejects("representation"):
        model.predict(dimers[:1], forces=True)


def test_features_of_an_object_in_shards(dimers):
    a, b = (
        AtomisticModel("energy", representation=Densities(), **FEW)
        .fit(dimers[:30], executor=executor)
        .predict(dimers[30:])
        for executor in (None, ThreadPoolExecutor(1))
    )
    z = (a.mean - b.mean) / np.hypot(a.std, b.std)
    assert np.sqrt(np.mean(z**2)) < 1.0


def test_a_network_that_is_not_deterministic(dimers):
    rng = np.random.default_rng(0)

    def features(self, frames):
        return Densities().features(frames) * (1 + 1e-4 * rng.normal(size=17))

    settings = make_backbone(broken(features=features))
    sample = dimers[:4], [np.arange(5)] * 4
    with pytest.warns(QualmsWarning):
        settings.fit((1, 8), Problem(10, False), lambda: sample)


@pytest.mark.parametrize(
    ("representation", "parameter"),
    [
        ("nothing", "representation"),
        ({"backbone": "nothing"}, "backbone"),
        ({"backbone": "sevennet", "length_scale": 0}, "length_scale"),
        ({"backbone": "sevennet", "cutoff": 5}, "cutoff"),
        # What users give themselves is in no dict, and so in no file.
        ({"backbone": "sevennet", "trusted": True}, "trusted"),
        ({"backbone": "object", "network": "os"}, "network"),
        (Densities, "representation"),
        (3.0, "representation"),
    ],
)
def test_bad_hyper_parameters(representation, parameter):
    with rejects(parameter):
        AtomisticModel(ENERGY, representation=representation)


def test_names_of_backbones():
    assert make_backbone("sevennet") == Backbone(backbone="sevennet")
    mace = Backbone(backbone="mace", model="some/where.model")
    assert make_backbone("mace:some/where.model") == mace
    assert make_backbone("organic") is None


def test_a_missing_package(monkeypatch, dimers):
    from importlib.metadata import PackageNotFoundError

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("qualms.features.learned.version", version)
    with rejects("representation"):
        AtomisticModel("energy", representation="sevennet").fit(dimers)


# --- pretrained networks, with their weights ---


def test_predictions_do_not_depend_on_the_batch(pretrained, dimers):
    together = pretrained.predict(dimers[40:44])
    alone = [pretrained.predict([atoms]).mean[0] for atoms in dimers[40:44]]
    np.testing.assert_allclose(together.mean, alone, atol=1e-4 * together.std.min())


def test_a_file_has_the_digest_of_the_weights(pretrained, dimers, tmp_path):
    path = tmp_path / "model.safetensors"
    pretrained.save(path)
    loaded = AtomisticModel.load(path, threads=1)
    same_predictions(pretrained, loaded, dimers[40:42])
    assert len(loaded.fitted.settings.representation.sha256) == 64
    other = tmp_path / "other.pth"
    other.write_bytes(b"not these")
    with rejects("model"):
        AtomisticModel.load(path, representation=other)


def test_weights_are_opened_once(pretrained):
    network = pretrained.fitted.representation.network
    assert make_backbone("sevennet").opened() is network
    assert make_backbone("sevennet:7net-0").opened() is network


def test_elements_that_a_network_does_not_know(pretrained, dimers):
    atoms = Atoms("OH2Og", dimers[0].positions[:4])
    with rejects("frames"):
        pretrained.settings.features.resolved(atoms.numbers)


def test_sevennet_is_that_of_its_own_calculator(dimers):
    pytest.importorskip("sevenn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sevenn.calculator import SevenNetCalculator

        calculator = SevenNetCalculator("7net-0", device="cpu")
    crystal = bulk("NaCl", "rocksalt", 5.6)
    crystal.rattle(0.1, seed=0)
    frames = [crystal, dimers[0].copy()]
    values = make_backbone("sevennet").opened().potential(frames, forces=True, stress=True)
    for s, atoms in enumerate(frames):
        atoms.calc = calculator  # in float32
        assert atoms.get_potential_energy() == pytest.approx(values.energies[s], abs=1e-4)
        np.testing.assert_allclose(atoms.get_forces(), values.forces[s], atol=1e-4)
    np.testing.assert_allclose(crystal.get_stress(), values.stresses[0], atol=1e-5)


def test_structures_without_neighbours(pretrained):
    apart = [Atoms("O", [[0, 0, 0]]), Atoms("OH", [[0, 0, 0], [30, 0, 0]])]
    assert pretrained.predict(apart[1:]).mean.shape == (1,)
    y, pull_back = pretrained.fitted.representation.network.vjp(apart)
    positions, strains = pull_back(np.ones((1, *y.shape)))
    assert not np.any(positions)
    assert not np.any(strains)


def test_command_line(dimers, tmp_path, monkeypatch):
    pytest.importorskip("sevenn")
    monkeypatch.chdir(tmp_path)
    ase.io.write("data.xyz", dimers[:40], format="extxyz")
    train = ["train", "data.xyz", "--target", "energy", "--units", "eV", "--baseline", "mean"]
    options = ["--representation", "sevennet", "--representatives", "60", "--threads", "1", "-q"]
    for command in (
        [*train, *options, "-o", "model.safetensors"],
        ["predict", "model.safetensors", "data.xyz", "-o", "out.xyz", "--forces", "-q"],
        ["evaluate", "model.safetensors", "data.xyz", "-q"],
        ["info", "model.safetensors"],
    ):
        ended = qualms(shlex.join(command))
        assert ended.code == 0, ended.err
    assert "sevennet 0." in ended.out
    assert "energy_uncertainty" in ase.io.read("out.xyz").info
    other = tmp_path / "other.tar"
    other.write_bytes(b"not these")
    predict = ["predict", "model.safetensors", "data.xyz", "-o", "again.xyz"]
    assert qualms(shlex.join(predict), "--weights", other).code == 2


# --- small models of MACE and metatomic, made here ---


def save_mace(path):
    """Write a small MACE model with random weights."""
    import torch
    from e3nn.o3 import Irreps
    from mace.modules import ScaleShiftMACE, gate_dict, interaction_classes

    torch.manual_seed(0)
    interaction = interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=Irreps("6x0e + 6x1o"),
        MLP_irreps=Irreps("4x0e"),
        gate=gate_dict["silu"],
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=4.0,
        atomic_numbers=[1, 8],
        correlation=2,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    torch.save(model, path)


def save_metatomic(path):
    """Write a model; in another process, since torch_geometric, if loaded, breaks TorchScript."""
    script = Path(__file__).with_name("metatomic_model.py")
    subprocess.run([sys.executable, script, path], check=True, capture_output=True)


@pytest.mark.parametrize(("backbone", "save"), [("mace", save_mace), ("metatomic", save_metatomic)])
def test_models_in_files(backbone, save, dimers, tmp_path):
    pytest.importorskip(backbone)
    path = tmp_path / "weights.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        save(path)
    network = make_backbone(backbone).with_weights(path).opened()
    crystal = Atoms("OH", [[0, 0, 0], [1.1, 0.3, 0]], cell=[3.0, 3.1, 3.2], pbc=True)
    frames = [dimers[0], crystal]
    y, pull_back = network.vjp(frames)
    np.testing.assert_allclose(network.features([crystal]), y[5:], atol=1e-12)
    b = np.random.default_rng(0).normal(size=(1, *y.shape))
    (positions,), (strains,) = pull_back(b)
    values = network.potential(frames, forces=True, stress=True)

    def energies(frames):
        return network.potential(frames).energies

    for s, i, axis in ((0, 3, 0), (1, 1, 1)):
        change = partial(shifted, frames, s, i, axis)
        expected = np.sum(b[0] * slope(network.features, change))
        assert positions[5 * s + i, axis] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert values.forces[s][i, axis] == pytest.approx(-slope(energies, change)[s], abs=1e-5)
    change = partial(sheared, crystal)
    expected = np.sum(b[0, 5:] * slope(network.features, change))
    assert strains[1, 0, 1] == pytest.approx(expected, rel=1e-4)
    stress = slope(energies, change)[0] / crystal.cell.volume
    assert values.stresses[1, 5] == pytest.approx(stress, rel=1e-4, abs=1e-7)
    model = AtomisticModel("energy", representation=f"{backbone}:{path}", **FEW).fit(dimers[:30])
    model.save(tmp_path / "model.safetensors")
    # Opening weights may run code: not because a file names them.
    with rejects("representation"):
        AtomisticModel.load(tmp_path / "model.safetensors")
    loaded = AtomisticModel.load(tmp_path / "model.safetensors", threads=1, representation=path)
    same_predictions(model, loaded, dimers[40:42])


@pytest.mark.parametrize("representation", ["mace", "mace:nowhere.model", "metatomic:nowhere.pt"])
def test_missing_weights(representation, dimers):
    pytest.importorskip(representation.partition(":")[0])
    with rejects("model"):
        AtomisticModel("energy", representation=representation, **FEW).fit(dimers[:30])
