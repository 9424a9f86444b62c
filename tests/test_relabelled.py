"""Structures that a model predicted and a reference method computed again: labels to learn from."""

import warnings

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.calculators.lj import LennardJones
from ase.md.langevin import Langevin
from atomistic_fixtures import make_model, qualms
from fake_potential import PairCommittee

from qualms import InputError, QualmsWarning
from qualms.ase import Calculator
from qualms.atomistic.labels import find_label

SMOOTH = {"cutoff": 3.0, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}


def reference():
    return LennardJones(sigma=1.1, epsilon=0.6, rc=3.0, ro=2.5, smooth=True)


def distorted(n, seed=0):
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = Atoms("OH2", [[0, 0, 0], [1.2, 0, 0], [0, 1.2, 0]])
        atoms.positions += 0.08 * rng.normal(size=(3, 3))
        frames.append(atoms)
    return frames


def computed(frames):
    for atoms in frames:
        atoms.calc = reference()
        atoms.get_forces()
    return frames


@pytest.fixture
def unsure():
    """Copies of structures that a simulation found too uncertain, as the documentation has it."""
    found = []
    atoms = distorted(1, seed=1)[0]
    atoms.calc = Calculator(
        PairCommittee(), uncertainty_threshold=1e-9, on_exceed=lambda s, _: found.append(s.copy())
    )
    Langevin(
        atoms, 0.5 * units.fs, temperature_K=300, friction=0.02 / units.fs, fixcm=False,
        rng=np.random.default_rng(0),
    ).run(12)  # fmt: skip
    assert all("energy_uncertainty" in atoms.info for atoms in found)
    assert any("forces_uncertainty" in atoms.arrays for atoms in found)
    return found


def test_what_a_reference_method_computes_is_a_label(unsure):
    for atoms in computed(unsure):
        assert find_label(atoms, "energy", False) == (
            atoms.get_potential_energy(),
            "calc.results['energy']",
        )
        np.testing.assert_array_equal(find_label(atoms, "forces", True)[0], atoms.get_forces())


def test_files_keep_labels_and_predictions_apart(unsure, tmp_path):
    predicted = distorted(6, seed=3)
    for atoms in predicted:
        atoms.calc = Calculator(PairCommittee())
        atoms.get_forces()
    ase.io.write(tmp_path / "both.xyz", [*computed(unsure), *predicted])
    again = ase.io.read(tmp_path / "both.xyz", ":")
    for atoms, original in zip(again, unsure, strict=False):
        assert find_label(atoms, "energy", False)[0] == original.get_potential_energy()
        assert find_label(atoms, "forces", True) is not None
    for atoms in again[len(unsure) :]:
        assert find_label(atoms, "energy", False) is None
        assert find_label(atoms, "forces", True) is None


def test_a_label_beside_an_old_prediction_may_be_in_info(unsure):
    unsure[0].info["energy"] = -3.0
    assert find_label(unsure[0], "energy", False)[0] == -3.0
    unsure[0].info["energy"] = float(np.mean(unsure[0].info["energy_ensemble"]))
    assert find_label(unsure[0], "energy", False) is None
    # Without members nothing tells a label from a prediction.
    del unsure[0].info["energy_ensemble"]
    unsure[0].info["energy"] = -3.0
    assert find_label(unsure[0], "energy", False) is None


def test_a_model_learns_from_structures_that_were_unsure(unsure):
    old = computed(distorted(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error", QualmsWarning)
        model = make_model(
            "energy", forces="forces", representation=SMOOTH, n_representatives=20, n_members=4
        ).fit(old + computed(unsure))
    assert f"{len(old) + len(unsure)} structures" in model.summary()


def test_predictions_are_refused_with_a_way_out(unsure):
    for atoms in unsure:
        atoms.calc = Calculator(PairCommittee())
        atoms.get_forces()
    with pytest.raises(InputError) as caught:
        make_model("energy", representation=SMOOTH).fit(unsure)
    message = str(caught.value)
    assert "predictions" in message
    assert "REF_energy" in message
    assert "Did you mean" not in message


def test_commands_set_new_labels_aside(unsure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model(
        "energy", forces="forces", representation=SMOOTH, n_representatives=20, n_members=4
    ).fit(computed(distorted(20)))
    model.save("model.safetensors")
    ase.io.write("unsure.xyz", computed(unsure))
    ended = qualms("predict model.safetensors unsure.xyz --forces --threads 1 -o out.xyz")
    assert ended.code == 0, ended.err
    for atoms, original in zip(ase.io.read("out.xyz", ":"), unsure, strict=True):
        assert atoms.info["REF_energy"] == pytest.approx(original.get_potential_energy())
        np.testing.assert_allclose(atoms.arrays["REF_forces"], original.get_forces(), atol=1e-7)
        assert "forces_ensemble" not in atoms.arrays
    ended = qualms("evaluate model.safetensors unsure.xyz --threads 1")
    assert ended.code == 0, ended.err
