"""Features of networks, and of objects that follow the same protocol."""

import contextlib
import shlex
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from atomistic_fixtures import ENERGY, labelled_dimers, problem_of, rows_of, same_predictions
from fake_network import Densities, NoDerivatives
from test_cli import qualms

from qualms import AtomisticModel
from qualms.ase import Calculator
from qualms.atomistic.settings import make_settings
from qualms.errors import InputError, QualmsWarning
from qualms.features.base import Problem
from qualms.features.learned import Backbone, LearnedRepresentation, make_backbone
from qualms.gp.kernels import ExponentialKernel, RBFKernel, normalize_rows

with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import metatomic.torch  # noqa: F401 — before torch_geometric, which breaks TorchScript

FEW = {"baseline": "mean", "n_representatives": 60, "n_members": 8, "n_posterior": 4, "threads": 1}
STEP = 1e-3


@pytest.fixture(scope="module")
def dimers():
    return labelled_dimers(60)


@pytest.fixture(scope="module")
def trained(dimers):
    """A model of energies and forces with features of an object."""
    noise = {"noise": 1e-4, "forces_noise": 1e-2}  # larger weights would amplify rounding
    given = {"forces": "forces", "units": "eV", "representation": Densities()}
    return AtomisticModel("energy", **given, **noise, **FEW).fit(dimers[:40])


def test_an_object_is_as_good_as_any_representation(trained, dimers):
    new = dimers[40:]
    found = trained.predict(new, forces=True)
    forces = np.concatenate([atoms.arrays["forces"] for atoms in new])
    energies = np.array([atoms.info["energy"] for atoms in new])
    np.testing.assert_allclose(found.energy.mean, trained.predict(new).mean, atol=1e-5)
    assert np.abs(found.energy.mean - energies).mean() < 0.2 * energies.std()
    assert np.abs(found.forces.mean - forces).mean() < 0.3 * np.abs(forces).mean()
    assert np.all(found.forces.std > 0)


def test_forces_are_derivatives_of_the_energies_of_all_members(trained, dimers):
    atoms = dimers[50]
    forces = trained.predict([atoms], forces=True).forces.uncalibrated.members
    for i, axis in ((0, 0), (3, 1)):
        moved = [atoms.copy(), atoms.copy()]
        for one, sign in zip(moved, (1, -1), strict=True):
            one.positions[i, axis] += sign * STEP
        plus, minus = trained.predict(moved).uncalibrated.members
        expected = -(plus - minus) / (2 * STEP)
        np.testing.assert_allclose(forces[i, axis], expected, atol=1e-4 * np.abs(forces).max())


def test_training_rows_are_derivatives_of_energies(dimers):
    """Changes of features that training uses are those of the vector-Jacobian product."""
    representation = LearnedRepresentation(make_backbone(Densities()), (1, 8), 17)
    (features,) = representation.differentiable
    (tape,) = features.tapes(dimers[:2], ("positions", "strain"))
    rng = np.random.default_rng(0)
    slopes = rng.normal(size=tape.y.shape)
    positions, strain = tape.pull_back(slopes[:, None], np.arange(tape.y.shape[1]))
    found = np.zeros((len(tape.atoms), 3))
    for owners, atoms, columns, values, complete in tape.push_forward():
        change = np.einsum("pcf,pf->pc", values, slopes[owners][:, columns])
        np.add.at(found, atoms, change)
        assert complete
    np.testing.assert_allclose(found, positions[..., 0], atol=1e-5)
    strained = np.einsum("nvf,nf->nv", tape.push_strain(), slopes)
    expected = np.stack([strained[:5].sum(axis=0), strained[5:].sum(axis=0)])
    np.testing.assert_allclose(expected, strain[..., 0], atol=1e-5)


def test_the_calculator_of_ase(trained, dimers):
    atoms = dimers[55].copy()
    atoms.calc = Calculator(trained)
    found = trained.predict([atoms], forces=True)[0]
    assert atoms.get_potential_energy() == pytest.approx(float(found.energy.mean))
    np.testing.assert_allclose(atoms.get_forces(), found.forces.mean, atol=1e-10)


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
    for given in (None, NoDerivatives(), "weights.pth"):
        with pytest.raises(InputError) as error:
            AtomisticModel.load(path, representation=given)
        assert error.value.parameter == "representation"
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
    one, two = (kernel.value_and_slope(t + s)[0] for s in (h, -h))
    np.testing.assert_allclose(slope, (one - two) / (2 * h), rtol=1e-6)
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
    given = {"forces": "forces", "units": "eV", "representation": Densities(), **FEW}
    some, every = (
        problem_of(dimers[:20], make_settings({"target": "energy", "force_atoms": n, **given}))
        for n in (2, "all")
    )
    assert some.data.quantities["forces"].rows.size == 20 * 2 * 3
    one, two = (rows_of(problem) for problem in (some, every))
    known = np.concatenate([np.isfinite(f).ravel() for f in one.sample.derivatives.forces])
    np.testing.assert_allclose(one.kept.Phi[20:], two.kept.Phi[20:][known], atol=1e-9)
    assert Backbone(backbone="sevennet").n_moving(np.full(100, 24), "default") is None
    assert Backbone(backbone="sevennet").n_moving(np.full(1000, 24), "default") == 3


# --- what cannot be used ---


def broken(**changes):
    return type("Broken", (NoDerivatives,), changes)()


def test_no_forces_without_derivatives(dimers):
    with pytest.raises(InputError) as error:
        AtomisticModel("energy", forces="forces", representation=NoDerivatives())
    assert error.value.parameter == "representation"
    model = AtomisticModel("energy", representation=NoDerivatives(), **FEW).fit(dimers[:30])
    assert np.all(model.predict(dimers[40:]).std > 0)
    with pytest.raises(InputError) as error:
        model.predict(dimers[:1], forces=True)
    assert error.value.parameter == "representation"
    given = {**FEW, "baseline": "backbone"}  # it has no energies either
    with pytest.raises(InputError) as error:
        AtomisticModel("energy", representation=NoDerivatives(), **given).fit(dimers[:30])
    assert error.value.parameter == "baseline"


def lengths(frames):
    return np.concatenate([1 + np.linalg.norm(atoms.positions, axis=1) for atoms in frames])


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"features": lambda self, frames: np.full((sum(map(len, frames)), 17), np.nan)}, None),
        ({"features": lambda self, frames: np.ones((sum(map(len, frames)), 17))}, None),
        ({"features": lambda self, frames: np.ones((3, 17))}, None),
        ({"features": lambda self, frames: lengths(frames)[:, None] * np.ones(17)}, None),
        ({"species": (1, 6)}, "frames"),
    ],
    ids=["not finite", "constant", "shape", "constant direction", "elements"],
)
def test_bad_features(dimers, changes, parameter):
    model = AtomisticModel("energy", representation=broken(**changes), **FEW)
    with pytest.raises(InputError) as error:
        model.fit(dimers[:30])
    assert error.value.parameter == (parameter or "representation")


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
    with pytest.raises(InputError) as error:
        model.predict(dimers[:1], forces=True)
    assert error.value.parameter == "representation"


def test_features_of_an_object_in_shards(dimers):
    model = AtomisticModel("energy", representation=Densities(), **FEW)
    whole, parts = (
        model.fit(dimers[:30]),
        AtomisticModel("energy", representation=Densities(), **FEW),
    )
    found = parts.fit(dimers[:30], executor=ThreadPoolExecutor(1)).predict(dimers[30:])
    expected = whole.predict(dimers[30:])
    z = (found.mean - expected.mean) / np.hypot(found.std, expected.std)
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
    with pytest.raises(InputError) as error:
        AtomisticModel(ENERGY, representation=representation)
    assert error.value.parameter == parameter


def test_names_of_backbones():
    found = [make_backbone(name) for name in ("sevennet", "mace:some/where.model")]
    assert found == [
        Backbone(backbone="sevennet"),
        Backbone(backbone="mace", model="some/where.model"),
    ]
    assert make_backbone("organic") is None


def test_a_missing_package(monkeypatch, dimers):
    from importlib.metadata import PackageNotFoundError

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("qualms.features.learned.version", version)
    with pytest.raises(InputError) as error:
        AtomisticModel("energy", representation="sevennet").fit(dimers)
    assert error.value.parameter == "representation"
    assert "pip install 'qualms[sevennet]'" in str(error.value)


# --- pretrained networks, with their weights ---


@pytest.fixture(scope="module")
def pretrained(dimers):
    """A model of energies and forces with features of a network whose weights are in its wheel."""
    pytest.importorskip("torch")
    if find_spec("sevenn") is None:
        pytest.skip("sevenn is not installed")
    given = {"forces": "forces", "units": "eV", "calibration": "student"}
    given |= {"representation": "sevennet", "noise": 1e-4, "forces_noise": 1e-2}
    return AtomisticModel("energy", **given, **FEW).fit(dimers[:16])


def test_forces_of_networks_are_derivatives(pretrained, dimers):
    atoms = dimers[50]
    found = pretrained.predict([atoms], forces=True)
    forces = found.forces.uncalibrated.members
    np.testing.assert_allclose(found.energy.mean, pretrained.predict([atoms]).mean, atol=1e-5)
    for i, axis in ((0, 0), (3, 1)):
        moved = [atoms.copy(), atoms.copy()]
        for one, sign in zip(moved, (1, -1), strict=True):
            one.positions[i, axis] += sign * 2e-4
        plus, minus = pretrained.predict(moved).uncalibrated.members
        expected = -(plus - minus) / 4e-4
        np.testing.assert_allclose(forces[i, axis], expected, atol=1e-3 * np.abs(forces).max())
    assert forces.shape[-1] == 12


def test_predictions_do_not_depend_on_the_batch(pretrained, dimers):
    together = pretrained.predict(dimers[40:44])
    alone = [pretrained.predict([atoms]).mean[0] for atoms in dimers[40:44]]
    np.testing.assert_allclose(together.mean, alone, atol=1e-4 * together.std.min())


def test_training_rows_of_networks(pretrained, dimers):
    """Central differences agree with automatic differentiation."""
    (features,) = pretrained.fitted.representation.differentiable
    (tape,) = features.tapes(dimers[:1], ("positions", "strain"))
    slopes = np.random.default_rng(0).normal(size=tape.y.shape)
    slopes -= np.einsum("nf,nf->n", slopes, tape.x)[:, None] * tape.x
    slopes /= tape.lengths
    positions, strain = tape.pull_back(slopes[:, None], np.arange(tape.y.shape[1]))
    found = np.zeros((5, 3))
    for owners, atoms, columns, values, _ in tape.push_forward():
        change = np.einsum("pcf,pf->pc", values, slopes[owners][:, columns])
        np.add.at(found, atoms, change)
    scale = np.abs(positions).max()
    np.testing.assert_allclose(found, positions[..., 0], atol=1e-4 * scale)
    strained = np.einsum("nvf,nf->v", tape.push_strain(), slopes)
    np.testing.assert_allclose(strained, strain[0, :, 0], atol=1e-4 * scale)


def test_a_file_has_the_digest_of_the_weights(pretrained, dimers, tmp_path):
    path = tmp_path / "model.safetensors"
    pretrained.save(path)
    loaded = AtomisticModel.load(path, threads=1)
    same_predictions(pretrained, loaded, dimers[40:42])
    settings = loaded.fitted.settings.representation
    assert len(settings.sha256) == 64
    other = tmp_path / "other.pth"
    other.write_bytes(b"not these")
    with pytest.raises(InputError) as error:
        AtomisticModel.load(path, representation=other)
    assert error.value.parameter == "model"
    assert settings.sha256[:16] in str(error.value)


def test_weights_are_opened_once(pretrained):
    network = pretrained.fitted.representation.network
    assert make_backbone("sevennet").opened() is network
    assert make_backbone("sevennet:7net-0").opened() is network


def test_elements_that_a_network_does_not_know(pretrained, dimers):
    atoms = Atoms("OH2Og", dimers[0].positions[:4])
    with pytest.raises(InputError) as error:
        pretrained.settings.features.resolved(atoms.numbers)
    assert error.value.parameter == "frames"


def test_energies_of_the_network_itself(pretrained, dimers):
    network = pretrained.fitted.representation.network
    found = network.potential(dimers[:2], forces=True)
    one, two = dimers[0].copy(), dimers[0].copy()
    one.positions[1, 0] += 1e-3
    two.positions[1, 0] -= 1e-3
    plus, minus = network.potential([one, two]).energies
    assert found.forces[0][1, 0] == pytest.approx(-(plus - minus) / 2e-3, abs=1e-3)
    assert found.stresses is None


def test_sevennet_is_that_of_its_own_calculator(dimers):
    pytest.importorskip("sevenn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sevenn.calculator import SevenNetCalculator

        calculator = SevenNetCalculator("7net-0", device="cpu")
    crystal = bulk("NaCl", "rocksalt", 5.6)
    crystal.rattle(0.1, seed=0)
    frames = [crystal, dimers[0].copy()]
    found = make_backbone("sevennet").opened().potential(frames, forces=True, stress=True)
    for s, atoms in enumerate(frames):
        atoms.calc = calculator  # in float32
        assert atoms.get_potential_energy() == pytest.approx(found.energies[s], abs=1e-4)
        np.testing.assert_allclose(atoms.get_forces(), found.forces[s], atol=1e-4)
    np.testing.assert_allclose(crystal.get_stress(), found.stresses[0], atol=1e-5)


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
    positions, strains = (found[0] for found in pull_back(b))
    found = network.potential(frames, forces=True, stress=True)
    h = 1e-4
    for s, i, axis in ((0, 3, 0), (1, 1, 1)):
        pairs = [[atoms.copy() for atoms in frames] for _ in range(2)]
        for sign, pair in zip((1, -1), pairs, strict=True):
            pair[s].positions[i, axis] += sign * h
        plus, minus = (network.features(pair) for pair in pairs)
        expected = np.sum(b[0] * (plus - minus)) / (2 * h)
        assert positions[5 * s + i, axis] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        plus, minus = (network.potential(pair).energies[s] for pair in pairs)
        assert found.forces[s][i, axis] == pytest.approx(-(plus - minus) / (2 * h), abs=1e-5)
    pair = [crystal.copy(), crystal.copy()]
    for sign, atoms in zip((1, -1), pair, strict=True):
        strain = np.eye(3)
        strain[0, 1] = strain[1, 0] = sign * h / 2
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
    plus, minus = network.features(pair).reshape(2, 2, -1)
    assert strains[1, 0, 1] == pytest.approx(np.sum(b[0, 5:] * (plus - minus)) / (2 * h), rel=1e-4)
    plus, minus = network.potential(pair).energies
    stress = (plus - minus) / (2 * h) / crystal.cell.volume
    assert found.stresses[1, 5] == pytest.approx(stress, rel=1e-4, abs=1e-7)
    model = AtomisticModel("energy", representation=f"{backbone}:{path}", **FEW).fit(dimers[:30])
    model.save(tmp_path / "model.safetensors")
    # Opening weights may run code: not because a file names them.
    with pytest.raises(InputError) as error:
        AtomisticModel.load(tmp_path / "model.safetensors")
    assert error.value.parameter == "representation"
    loaded = AtomisticModel.load(tmp_path / "model.safetensors", threads=1, representation=path)
    same_predictions(model, loaded, dimers[40:42])


@pytest.mark.parametrize("representation", ["mace", "mace:nowhere.model", "metatomic:nowhere.pt"])
def test_missing_weights(representation, dimers):
    pytest.importorskip(representation.partition(":")[0])
    with pytest.raises(InputError) as error:
        AtomisticModel("energy", representation=representation, **FEW).fit(dimers[:30])
    assert error.value.parameter == "model"
