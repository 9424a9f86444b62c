"""What ``qualms apply`` writes, and what it leaves as it was."""

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import qualms

from qualms.atomistic.structures import read_frames
from qualms.external import read_ensemble

R = 5


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def command(text):
    ended = qualms(text)
    assert ended.code == 0, ended.err
    return ended


def committee(n=60, seed=0, shape=()):
    """Members (n, R, …) and the truth (n, …)."""
    rng = np.random.default_rng(seed)
    mu, s = rng.normal(size=(n, *shape)), np.exp(rng.normal(-2, 0.5, size=(n, *shape)))
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, R, *shape))
    return members, mu + 2 * s * rng.normal(size=(n, *shape))


def frames_with(**results):
    """Hydrogen molecules with committees of energies and these results of a calculator."""
    members, y = committee()
    frames = []
    for i, some in enumerate(members):
        atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7 + i / 100]])
        atoms.info["energy_comm"] = some
        atoms.calc = SinglePointCalculator(atoms, **{k: v[i] for k, v in results.items()})
        frames.append(atoms)
    return frames, members, y


def written(frames, options=""):
    ase.io.write("p.xyz", frames, format="extxyz")
    command(f"calibrate p.xyz --target energy {options} -o c.json --method linear")
    ended = command("apply c.json p.xyz -o out.xyz")
    return read_frames("out.xyz"), ended.err


# --- references that have the name of the prediction ---


def test_labels_in_the_place_of_the_prediction_are_kept(workplace):
    """As ASE writes a file of reference calculations, with a committee added to it."""
    _, y = committee()
    forces = np.random.default_rng(1).normal(size=(60, 2, 3))
    frames, members, _ = frames_with(energy=y, forces=forces)
    after, said = written(frames, "--reference energy")
    np.testing.assert_allclose([a.info["REF_energy"] for a in after], y, atol=1e-7)
    np.testing.assert_allclose([a.get_potential_energy() for a in after], members.mean(axis=1))
    np.testing.assert_allclose([a.arrays["REF_forces"] for a in after], forces, atol=1e-7)
    assert "forces" not in after[0].calc.results
    assert "energy as REF_energy, forces as REF_forces" in said
    # What was written can be calibrated again, without saying where the truth is.
    np.testing.assert_allclose(read_ensemble("out.xyz", "energy").y, y, atol=1e-7)


def test_the_mean_of_the_members_is_no_reference(workplace):
    members, y = committee()
    forces = np.ones((60, 2, 3))
    frames, _, _ = frames_with(energy=members.mean(axis=1), forces=forces)
    for atoms, truth in zip(frames, y, strict=True):
        atoms.info["energy_true"] = truth
    after, said = written(frames)
    assert "REF_energy" not in after[0].info
    np.testing.assert_array_equal([a.get_forces() for a in after], forces)
    assert "REF_" not in said


def test_an_earlier_prediction_is_replaced(workplace):
    members, y = committee()
    frames, _, _ = frames_with(energy=members.mean(axis=1) + 1.0)
    for atoms, truth in zip(frames, y, strict=True):
        atoms.info |= {"energy_true": truth, "energy_uncertainty": 0.1}
    after, _ = written(frames)
    assert "REF_energy" not in after[0].info
    np.testing.assert_allclose([a.get_potential_energy() for a in after], members.mean(axis=1))


def test_results_beside_a_prediction_that_was_not_there(workplace):
    """Forces of unknown origin must not pass for the derivative of the new energy."""
    _, y = committee()
    frames, _, _ = frames_with(forces=np.ones((60, 2, 3)))
    for atoms, truth in zip(frames, y, strict=True):
        atoms.info["energy_true"] = truth
    after, _ = written(frames)
    assert "forces" not in after[0].calc.results
    np.testing.assert_array_equal(after[0].arrays["REF_forces"], np.ones((2, 3)))


@pytest.mark.parametrize("components", ["", "xyz"])
def test_labels_in_tables_are_kept(workplace, components):
    members, y = committee(shape=(3,) if components else ())
    columns = {"e_ensemble": members}
    if components:
        columns |= {f"e_{c}": y[:, i] for i, c in enumerate(components)}
        columns |= {f"e_true_{c}": y[:, i] for i, c in enumerate(components)}
    else:
        columns |= {"e": y}
    np.savez("p.npz", **columns)
    reference = "e_true" if components else "e"
    command(f"calibrate p.npz --target e --reference {reference} -o c.json --method linear")
    assert "REF_e" in command("apply c.json p.npz -o out.npz").err
    np.testing.assert_array_equal(read_ensemble("out.npz", "e").y, y.ravel())


# --- points that no error bar can be given to ---


def test_atoms_and_structures_without_predictions_get_none(workplace):
    """As qualms itself writes shifts of one element, and a file of which some is predicted."""
    members, y = committee(n=120)
    frames = []
    for i in range(30):
        atoms = Atoms("OH4", positions=np.arange(15.0).reshape(5, 3))
        if i > 1:
            some = np.full((5, R), np.nan)
            some[1:] = members[4 * i : 4 * i + 4]
            atoms.arrays["shift_ensemble"] = some
            atoms.arrays["REF_shift"] = np.append(np.nan, y[4 * i : 4 * i + 4])
        frames.append(atoms)
    ase.io.write("p.xyz", frames, format="extxyz")
    command("calibrate p.xyz --target shift -o c.json --method linear --by element")
    said = command("apply c.json p.xyz -o out.xyz").err
    assert "38 atoms with NaN or infinite predictions: NaN is written for them." in said
    assert "Traceback" not in said
    for i, atoms in enumerate(read_frames("out.xyz")):
        for key in ("shift", "shift_uncertainty", "shift_ensemble"):
            assert np.isfinite(atoms.arrays[key][1:]).all() == (i > 1)
            assert np.isnan(atoms.arrays[key][0]).all()


def test_the_file_that_was_calibrated_internally_can_be_applied_to(workplace):
    members, y = committee(n=200)
    absent = np.random.default_rng(0).random(members.shape) < 0.6
    np.savez("p.npz", e_ensemble=members, REF_e=y, e_absent=absent)
    command("calibrate p.npz --target e -o c.json --method linear")
    n_few = np.count_nonzero(absent.sum(axis=1) < 3)
    assert n_few > 10
    assert f"{n_few} structures that fewer than 3" in command("apply c.json p.npz -o o.npz").err
    assert np.isnan(np.load("o.npz")["e_uncertainty"]).sum() == n_few
