"""An ensemble of another code, calibrated by commands: `examples/external_ensemble.py`."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.io import read

EXAMPLE = Path(__file__).parents[1] / "examples" / "external_ensemble.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("external_ensemble", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_forces_of_a_pair_potential_are_the_gradient_of_its_energy(example):
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.rattle(0.1, seed=0)
    _, forces = example.pair_functions(atoms)
    h = 1e-5
    for atom, axis in ((0, 0), (3, 1), (5, 2)):
        shifted = [atoms.copy(), atoms.copy()]
        for copy, step in zip(shifted, (h, -h), strict=True):
            copy.positions[atom, axis] += step
        plus, minus = (example.pair_functions(copy)[0] for copy in shifted)
        # The Gaussians are not quite zero at the cutoff, but no pair crosses it here.
        np.testing.assert_allclose(forces[3 * atom + axis], -(plus - minus) / (2 * h), atol=1e-6)


def test_the_files_are_those_of_a_user_of_mace(example, tmp_path):
    example.make_files(tmp_path, n_known=3, n_new=2, n_train=6)
    known, new = (read(tmp_path / name, ":") for name in ("known.xyz", "new.xyz"))
    assert (len(known), len(new)) == (3, 2)
    for atoms in known + new:
        members = atoms.info["energy_comm"]
        assert members.shape == (example.N_MEMBERS,)
        assert atoms.get_potential_energy() == pytest.approx(members.mean())
        assert atoms.info["energy_var"] == pytest.approx(members.var(ddof=1))
        by_member = atoms.arrays["forces_comm"].reshape(len(atoms), example.N_MEMBERS, 3)
        np.testing.assert_allclose(by_member.mean(axis=1), atoms.get_forces(), atol=1e-7)
        assert {"REF_energy"} <= set(atoms.info)
        assert {"REF_forces"} <= set(atoms.arrays)


def test_four_commands_calibrate_energies_and_forces(example, tmp_path, capfd):
    example.calibrate_there(tmp_path, n_known=80, n_new=80)
    lines = re.findall(
        r"^(energy|forces) +(\d) +([\d.]+)% +([\d.]+)%", capfd.readouterr().out, re.M
    )
    shares = {(t, int(w)): (float(before), float(after)) for t, w, before, after in lines}
    assert len(shares) == 4
    for target in ("energy", "forces"):
        before, after = shares[target, 1]
        assert before < 50
        assert 55 <= after <= 85
        assert shares[target, 2][1] >= 90
    for target in ("energy", "forces"):
        document = json.loads((tmp_path / f"{target}.json").read_text())
        assert document["target"] == target
        assert document["n_members"] == example.N_MEMBERS
    # Predictions stay what they were; only their error bars change.
    for before, after in zip(
        read(tmp_path / "new.xyz", ":"), read(tmp_path / "calibrated.xyz", ":"), strict=True
    ):
        assert after.get_potential_energy() == pytest.approx(before.get_potential_energy())
        np.testing.assert_allclose(after.get_forces(), before.get_forces(), atol=1e-7)
        assert after.info["energy_uncertainty"] > 0
        assert after.arrays["forces_uncertainty"].shape == (len(after), 3)
