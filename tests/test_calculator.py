"""The ASE calculator, with a committee of pair potentials whose derivatives are exact."""

import copy
import pickle
import warnings

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.filters import FrechetCellFilter
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from atomistic_fixtures import qualms
from fake_potential import ENERGY_FACTOR, FORCES_FACTOR, PairCommittee
from finite_differences import (
    gradient,
    numerical_forces,
    numerical_stress,
    strain_derivative,
)

from qualms import InputError, QualmsError, QualmsWarning
from qualms.ase import Calculator, MemberCalculator, UncertaintyError

EXTRA = ("energy_uncertainty", "energy_ensemble", "forces_uncertainty", "forces_ensemble")


@pytest.fixture
def committee():
    return PairCommittee()


@pytest.fixture
def atoms():
    """A bent molecule that is not at rest."""
    return Atoms("OH2", [[0, 0, 0], [1.3, 0.1, 0], [-0.3, 1.1, 0.2]])


@pytest.fixture
def crystal():
    crystal = bulk("Cu", "fcc", a=1.75).repeat((2, 1, 1))
    crystal.rattle(0.04, seed=1)
    crystal.set_cell(crystal.cell.array @ (np.eye(3) + 0.02), scale_atoms=True)
    return crystal


# --- what it says ---


def test_results_are_those_of_the_model(committee, atoms):
    atoms.calc = Calculator(committee)
    found = committee.predict_forces([atoms])
    assert atoms.get_potential_energy() == pytest.approx(found.energy.mean[0])
    np.testing.assert_allclose(atoms.get_forces(), found.forces.mean)
    results = atoms.calc.results
    assert results["free_energy"] == results["energy"]
    assert results["energy_uncertainty"] == pytest.approx(found.energy.std[0])
    np.testing.assert_allclose(results["energy_ensemble"], found.energy.members[0])
    np.testing.assert_allclose(results["forces_uncertainty"], found.forces.std)
    np.testing.assert_allclose(results["forces_ensemble"], found.forces.members)
    assert results["forces_ensemble"].shape == (3, 3, committee.n_members)


def test_every_property_is_declared_and_reachable(committee, crystal):
    calc = Calculator(committee)
    for name in calc.implemented_properties:
        fresh = Calculator(committee)
        value = fresh.get_property(name, crystal)
        assert np.all(np.isfinite(value)), name
        np.testing.assert_allclose(value, calc.get_property(name, crystal))
    with pytest.raises(PropertyNotImplementedError):
        calc.get_property("dipole", crystal)
    crystal.calc = calc
    assert crystal.get_properties(["energy"])["energy"] == pytest.approx(calc.results["energy"])


def test_forces_and_stress_are_computed_only_when_asked_for(committee, crystal):
    crystal.calc = Calculator(committee)
    crystal.get_potential_energy()
    crystal.calc.get_property("energy_uncertainty", crystal)
    assert committee.calls == ["energy"]
    crystal.get_forces()
    crystal.get_potential_energy()
    assert committee.calls == ["energy", "forces"]
    crystal.get_stress()
    assert committee.calls == ["energy", "forces", "stress"]
    # Who asked once will ask again: one evaluation then does for both.
    crystal.rattle(0.01, seed=2)
    crystal.get_forces()
    crystal.get_stress()
    assert committee.calls == ["energy", "forces", "stress", "stress"]
    crystal.rattle(0.01, seed=3)
    crystal.get_potential_energy()
    assert committee.calls[4:] == ["energy"]


def test_forces_and_stress_are_derivatives(committee, crystal):
    crystal.calc = Calculator(committee)
    np.testing.assert_allclose(crystal.get_forces(), numerical_forces(crystal, 1e-4), atol=1e-6)
    np.testing.assert_allclose(crystal.get_stress(), numerical_stress(crystal, 1e-5), atol=1e-7)


def test_the_gradient_of_the_uncertainty_is_its_derivative(committee, crystal):
    calc = Calculator(committee)

    def std(atoms):
        return calc.get_property("energy_uncertainty", atoms)

    np.testing.assert_allclose(
        calc.get_property("energy_uncertainty_gradient", crystal),
        gradient(std, crystal),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        calc.get_property("energy_uncertainty_stress", crystal),
        strain_derivative(std, crystal),
        atol=1e-7,
    )


def test_a_member_is_a_potential_of_its_own(committee, crystal):
    calc = Calculator(committee)
    ensemble = calc.get_property("energy_ensemble", crystal)
    for i in range(committee.n_members):
        crystal.calc = calc.member(i)
        assert crystal.get_potential_energy() == pytest.approx(ensemble[i])
        np.testing.assert_allclose(crystal.get_forces(), numerical_forces(crystal, 1e-4), atol=1e-6)
        np.testing.assert_allclose(crystal.get_stress(), numerical_stress(crystal, 1e-5), atol=1e-7)
    # Forces are calibrated apart from energies: those of a member belong to its energy.
    forces = calc.get_property("forces_ensemble", crystal)
    mean = forces.mean(axis=-1)
    np.testing.assert_allclose(
        crystal.get_forces() - mean,
        (forces[..., i] - mean) * ENERGY_FACTOR / FORCES_FACTOR,
        atol=1e-9,
    )


def test_map_asks_every_member(committee, atoms):
    found = Calculator(committee).map(lambda member: member.get_potential_energy(atoms))
    np.testing.assert_allclose(found.members, committee.predict([atoms]).members[0])
    sizes = iter(range(10))
    with pytest.raises(InputError, match=r"shape \(1,\) for member 1, \(0,\) for member 0"):
        Calculator(committee).map(lambda _: np.zeros(next(sizes)))
    with pytest.raises(InputError, match="None"):
        Calculator(committee).map(lambda _: None)
    with pytest.raises(InputError, match="one of 6 members"):
        MemberCalculator(committee, 6)


# --- in the hands of ASE ---


@pytest.mark.parametrize("optimizer", [BFGS, FIRE])
def test_optimisers(committee, atoms, optimizer):
    atoms.calc = Calculator(committee)
    assert optimizer(atoms, logfile=None).run(fmax=1e-3, steps=300)
    assert np.abs(atoms.get_forces()).max() < 1e-3


def test_a_cell_relaxes(committee, crystal):
    crystal.calc = Calculator(committee)
    assert BFGS(FrechetCellFilter(crystal), logfile=None).run(fmax=1e-3, steps=300)
    assert np.abs(crystal.get_stress()).max() < 1e-3


@pytest.mark.parametrize("shared", [False, True])
def test_nudged_elastic_band(committee, shared):
    """An atom passes between two others, which hold it on either side."""
    first = Atoms("C2H", [[0, 1.4, 0], [0, -1.4, 0], [0.8, 0, 0]])
    last = first.copy()
    last.positions[2, 0] = -0.8
    images = [first, *(first.copy() for _ in range(3)), last]
    calc = Calculator(committee)
    for image in images:
        image.calc = calc if shared else copy.deepcopy(calc)
    band = NEB(images, method="improvedtangent", allow_shared_calculator=shared)
    band.interpolate()
    BFGS(band, logfile=None).run(fmax=0.05, steps=40)
    energies = np.array([image.get_potential_energy() for image in images])
    np.testing.assert_allclose(energies, energies[::-1], atol=1e-3)


def drift(atoms, picoseconds, timestep, *observers):
    """Slope of the total energy in eV per atom and ps, and its fluctuation in eV per atom."""
    widths = np.sqrt(300 * units.kB * atoms.get_masses())
    atoms.set_momenta(widths[:, None] * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    Stationary(atoms)
    dynamics, energies = VelocityVerlet(atoms, timestep * units.fs), []
    for observer in (lambda: energies.append(atoms.get_total_energy()), *observers):
        dynamics.attach(observer, interval=10)
    dynamics.run(int(picoseconds * 1000 / timestep))
    times = np.linspace(0, picoseconds, len(energies))
    return np.polyfit(times, energies, 1)[0] / len(atoms), np.std(energies) / len(atoms)


def test_velocity_verlet_conserves_the_energy(committee, atoms):
    atoms.calc = Calculator(committee)
    BFGS(atoms, logfile=None).run(fmax=0.01)
    slope, fluctuation = drift(atoms, 1.0, 0.4)
    assert abs(slope) < 1e-5
    assert fluctuation < 1e-3


def test_langevin_reaches_its_temperature(committee, atoms):
    atoms.calc = Calculator(committee)
    dynamics = Langevin(
        atoms, 0.5 * units.fs, temperature_K=300, friction=0.05 / units.fs,
        rng=np.random.default_rng(0), fixcm=False,
    )  # fmt: skip
    dynamics.run(100)
    temperatures = []
    dynamics.attach(lambda: temperatures.append(atoms.get_temperature()), interval=5)
    dynamics.run(1200)
    assert np.mean(temperatures) == pytest.approx(300, rel=0.2)


def test_atoms_may_change_between_calls(committee, atoms):
    calc = Calculator(committee)
    atoms.calc = calc

    def agrees():
        found = committee.predict_forces([atoms])
        assert atoms.get_potential_energy() == pytest.approx(found.energy.mean[0])
        np.testing.assert_allclose(atoms.get_forces(), found.forces.mean)
        assert atoms.arrays["forces_ensemble"].shape == (len(atoms), 3 * committee.n_members)

    agrees()
    atoms.symbols[0] = "N"
    agrees()
    atoms.append("H")
    atoms.positions[-1] = [0.5, -1.2, 0.3]
    agrees()
    del atoms[1]
    agrees()
    atoms.set_cell(5 * np.eye(3))
    atoms.pbc = True
    agrees()
    other = molecule("CH4")
    other.calc = calc
    other.get_forces()
    agrees()


def test_a_molecule_has_no_stress(committee, atoms):
    atoms.calc = Calculator(committee)
    with pytest.raises(PropertyNotImplementedError, match="volume"):
        atoms.get_stress()


def test_a_molecule_has_no_stress_after_a_crystal_that_has(committee, crystal, atoms):
    calc = Calculator(committee)
    calc.get_stress(crystal)
    assert np.all(np.isfinite(calc.get_forces(atoms)))
    with pytest.raises(PropertyNotImplementedError, match="volume"):
        calc.get_stress(atoms)


def test_a_slab_has_a_stress_as_other_calculators_of_ase_have_it(committee, crystal):
    crystal.center(vacuum=3.0, axis=2)
    crystal.pbc = (True, True, False)
    crystal.calc = Calculator(committee)
    np.testing.assert_allclose(crystal.get_stress(), numerical_stress(crystal, 1e-5), atol=1e-7)


def test_copies_share_the_model_and_nothing_else(committee, atoms):
    calc = Calculator(committee, 0.5, "raise")
    calc.get_potential_energy(atoms)
    for same in (copy.deepcopy(calc), copy.copy(calc), copy.deepcopy(calc.member(1))):
        assert same.model is committee
    twin = copy.deepcopy(calc)
    assert twin.results["energy"] == calc.results["energy"]
    moved = atoms.copy()
    moved.rattle(0.1, seed=0)
    twin.get_forces(moved)
    assert "forces" not in calc.results
    assert twin.results["energy"] != calc.results["energy"]


def test_pickling(committee, atoms):
    atoms.calc = Calculator(committee, 0.5)
    atoms.get_forces()
    again = pickle.loads(pickle.dumps(atoms))
    assert again.calc.uncertainty_threshold == {"energy_uncertainty": 0.5}
    assert again.get_potential_energy() == atoms.get_potential_energy()
    again.rattle(0.1, seed=0)
    atoms.rattle(0.1, seed=0)
    np.testing.assert_array_equal(again.get_forces(), atoms.get_forces())


# --- to files and back ---


def test_the_writer_of_ase_writes_everything(committee, crystal, tmp_path):
    crystal.calc = Calculator(committee)
    crystal.get_forces()
    crystal.get_stress()
    results = crystal.calc.results
    ase.io.write(tmp_path / "out.xyz", crystal)
    again = ase.io.read(tmp_path / "out.xyz")
    assert again.get_potential_energy() == pytest.approx(results["energy"])
    np.testing.assert_allclose(again.get_forces(), results["forces"], atol=1e-8)
    np.testing.assert_allclose(again.get_stress(), results["stress"], atol=1e-8)
    assert again.info["energy_uncertainty"] == pytest.approx(results["energy_uncertainty"])
    np.testing.assert_allclose(again.info["energy_ensemble"], results["energy_ensemble"])
    np.testing.assert_allclose(
        again.arrays["forces_uncertainty"], results["forces_uncertainty"], atol=1e-8
    )
    # Member by member, as qualms reads and writes the forces of others.
    by_member = again.arrays["forces_ensemble"].reshape(len(again), committee.n_members, 3)
    np.testing.assert_allclose(np.moveaxis(by_member, 1, -1), results["forces_ensemble"], atol=1e-8)
    np.testing.assert_allclose(
        again.info["stress_uncertainty"], results["stress_uncertainty"], atol=1e-8
    )
    by_member = again.info["stress_ensemble"].reshape(committee.n_members, 6)
    np.testing.assert_allclose(by_member.T, results["stress_ensemble"], atol=1e-8)


def test_other_files_of_ase(committee, atoms, tmp_path):
    atoms.calc = Calculator(committee)
    atoms.get_forces()
    for name in ("out.traj", "out.json"):
        ase.io.write(tmp_path / name, atoms)
        again = ase.io.read(tmp_path / name)
        assert again.get_potential_energy() == pytest.approx(atoms.get_potential_energy())
        np.testing.assert_allclose(again.get_forces(), atoms.get_forces())


def test_what_is_written_can_be_calibrated(committee, tmp_path, monkeypatch):
    """The commands for ensembles of others take the files that ASE writes."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    truth, frames = PairCommittee(seed=5), []
    for _ in range(40):
        atoms = Atoms(
            "OH2", [[0, 0, 0], [1.2, 0, 0], [0, 1.2, 0]], calculator=Calculator(committee)
        )
        atoms.positions += 0.1 * rng.normal(size=(3, 3))
        atoms.get_forces()
        found = truth.predict_forces([atoms])
        atoms.info["REF_energy"] = found.energy.mean[0]
        atoms.arrays["REF_forces"] = found.forces.mean
        frames.append(atoms)
    ase.io.write("known.xyz", frames)
    for target in ("energy", "forces"):
        command = f"calibrate known.xyz --target {target} --reference REF_{target}"
        ended = qualms(f"{command} -o {target}.json")
        assert ended.code == 0, ended.err
        ended = qualms(f"apply {target}.json known.xyz -o {target}.xyz")
        assert ended.code == 0, ended.err
    again = ase.io.read("forces.xyz", 0)
    assert again.arrays["forces_uncertainty"].shape == (3, 3)


def test_a_trajectory_of_md_is_written(committee, atoms, tmp_path):
    atoms.calc = Calculator(committee)
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(lambda: ase.io.write(tmp_path / "md.xyz", atoms, append=True), interval=2)
    dynamics.run(6)
    frames = ase.io.read(tmp_path / "md.xyz", ":")
    expected = committee.predict_forces(frames)
    np.testing.assert_allclose(
        [frame.info["energy_uncertainty"] for frame in frames], expected.energy.std, rtol=1e-5
    )
    np.testing.assert_allclose(
        np.concatenate([frame.arrays["forces_uncertainty"] for frame in frames]),
        expected.forces.std,
        atol=1e-6,
    )


def test_what_is_no_longer_true_is_not_kept(committee, atoms):
    atoms.calc = Calculator(committee)
    atoms.get_forces()
    assert {*EXTRA} <= {*atoms.info, *atoms.arrays}
    atoms.rattle(0.1, seed=0)
    atoms.get_potential_energy()
    assert not {"forces_uncertainty", "forces_ensemble"} & {*atoms.arrays}
    assert atoms.info["energy_uncertainty"] == atoms.calc.results["energy_uncertainty"]


def test_an_equal_structure_gets_what_was_computed_before(committee, atoms):
    calc = Calculator(committee)
    calc.get_forces(atoms)
    twin = atoms.copy()
    twin.info, calls = {}, len(committee.calls)
    calc.get_potential_energy(twin)
    assert len(committee.calls) == calls
    assert twin.info["energy_uncertainty"] == calc.results["energy_uncertainty"]


def test_structures_may_be_left_alone(committee, atoms):
    atoms.calc = Calculator(committee, annotate=False)
    atoms.get_forces()
    assert not {*EXTRA} & {*atoms.info, *atoms.arrays}
    assert {*EXTRA} <= {*atoms.calc.results}


# --- when it is not sure ---


def test_a_warning_comes_when_the_threshold_is_crossed(committee, atoms):
    std = committee.predict([atoms]).std[0]
    atoms.calc = Calculator(committee, 0.9 * std)
    with pytest.warns(QualmsWarning, match="H2O: energy_uncertainty = .* exceeds") as caught:
        atoms.get_potential_energy()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        atoms.positions[0] += 1e-6
        atoms.get_potential_energy()  # still beyond: it has been said
        far = atoms.copy()
        far.positions[1:] += [[10, 0, 0], [0, 20, 0]]
        far.calc = atoms.calc
        far.get_potential_energy()  # without pairs, members agree
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()


def test_an_error_stops_a_simulation_and_says_where(committee, atoms):
    std = committee.predict_forces([atoms]).forces.std.max()
    atoms.calc = Calculator(committee, {"forces_uncertainty": 0.9 * std}, "raise")
    atoms.get_potential_energy()
    for _ in range(2):  # and does not pass at the second attempt
        with pytest.raises(UncertaintyError, match="forces_uncertainty"):
            atoms.get_forces()
    assert atoms.calc.results["forces_uncertainty"].max() == pytest.approx(std)


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_how_a_structure_is_turned_does_not_matter_to_a_limit_of_forces(committee, atoms, share):
    lengths = np.linalg.norm(committee.predict_forces([atoms]).forces.std, axis=1)
    calc = Calculator(committee, {"forces_uncertainty": share * lengths.max()}, "raise")
    for angle in (0, 25, 45, 70):
        turned = atoms.copy()
        turned.rotate(angle, (1, 2, 3))
        turned.calc = calc
        if share < 1:
            with pytest.raises(UncertaintyError, match=f"= {lengths.max():.3g} exceeds"):
                turned.get_forces()
        else:
            turned.get_forces()


def test_a_function_sees_structures_beyond_the_threshold(committee, atoms):
    seen = []
    std = committee.predict([atoms]).std[0]
    calc = Calculator(
        committee,
        {"energy_uncertainty": 0.5 * std, "forces_uncertainty": 100.0},
        lambda atoms, results: seen.append((atoms.copy(), results["energy_uncertainty"])),
    )
    atoms.calc = calc
    VelocityVerlet(atoms, 0.5 * units.fs).run(3)
    assert len(seen) == 4
    assert all(value > 0.5 * std for _, value in seen)


def test_a_function_is_called_once_for_a_structure_and_limit(committee, atoms):
    seen = []
    limits = {"energy_uncertainty": 1e-9, "forces_uncertainty": 1e-9}
    atoms.calc = Calculator(committee, limits, lambda atoms, results: seen.append(results))
    atoms.get_potential_energy()
    assert len(seen) == 1
    atoms.get_forces()  # another limit
    assert len(seen) == 2
    atoms.get_potential_energy(), atoms.get_forces(), atoms.calc.get_property("forces", atoms)
    assert len(seen) == 2
    atoms.positions[0] += 0.01
    atoms.get_forces()
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((object(),), "model=object"),
        ((PairCommittee(), -1.0), "uncertainty_threshold"),
        ((PairCommittee(), {"stress": 1.0}), "limits of energy_uncertainty"),
        ((PairCommittee(), 1.0, "shout"), "on_exceed='shout'"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(InputError, match=match):
        Calculator(*arguments)


def test_a_file_that_is_not_there():
    with pytest.raises(QualmsError, match="no file of this name"):
        Calculator("no-such-file.safetensors")
