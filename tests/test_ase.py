"""ASE calculators: an ensemble of pair potentials with exact derivatives, and trained models."""

import copy
import pickle
import warnings

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.lj import LennardJones
from ase.filters import FrechetCellFilter
from ase.md.velocitydistribution import Stationary
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from atomistic_fixtures import labelled_crystals, make_model
from fake_potential import ENERGY_FACTOR, FORCES_FACTOR, PairCommittee

from qualms import InputError, QualmsError, QualmsWarning
from qualms.ase import Calculator, MemberCalculator, UncertaintyError, WeightedBaseline
from qualms.ase.calculator import CalibratedPoint, calibrated_point
from qualms.atomistic.labels import find_label
from qualms.calibration.base import calibration_data
from qualms.calibration.fitting import build_calibration, fit_calibration

EXTRA = {"energy_uncertainty", "energy_ensemble", "forces_uncertainty", "forces_ensemble"}
SMOOTH = {"cutoff": 3.0, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}


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


def gradient(f, atoms, h=1e-4):
    """Gradient of a number by positions, (n, 3), by finite differences."""
    found = np.empty((len(atoms), 3))
    for index in np.ndindex(found.shape):
        values = []
        for step in (h, -h):
            moved = atoms.copy()
            moved.positions[index] += step
            values.append(f(moved))
        found[index] = (values[0] - values[1]) / (2 * h)
    return found


def strain_derivative(f, atoms, h=1e-5):
    """Derivative of a number by strain, per volume, in ASE's six components."""
    found = []
    for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        values = []
        for step in (h, -h):
            strain = np.eye(3)
            strain[a, b] += step / 2
            strain[b, a] += step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            values.append(f(moved))
        found.append((values[0] - values[1]) / (2 * h) / atoms.cell.volume)
    return np.array(found)


def assert_derivatives(atoms, h=(1e-4, 1e-5), atol=(1e-6, 1e-7), stress=True):
    """Forces and stress of the calculator of a structure are derivatives of its energy."""
    energy = atoms.calc.get_potential_energy
    np.testing.assert_allclose(atoms.get_forces(), -gradient(energy, atoms, h[0]), atol=atol[0])
    if stress:
        expected = strain_derivative(energy, atoms, h[1])
        np.testing.assert_allclose(atoms.get_stress(), expected, atol=atol[1])


# --- derivatives of calibrated members ---


def calibrations():
    rng = np.random.default_rng(1)
    widths = rng.uniform(0.5, 3, size=(200, 1))
    data = calibration_data(
        1.5 * (widths**0.8)[:, 0] * rng.normal(size=200), widths * rng.normal(size=(200, 7))
    )
    found = {method: fit_calibration(data, method) for method in ("student", "linear", "shrinkage")}
    return found | {"power": build_calibration("power", {"alpha": 1.3, "gamma": 0.6})}


@pytest.mark.parametrize("n_atoms", [1, 9])
def test_gradients_are_those_of_calibrated_members(n_atoms):
    """Energies of n atoms are calibrated as averages, and multiplied afterwards."""
    rng = np.random.default_rng(0)
    slopes, curvatures = rng.normal(size=(5, 7)), rng.normal(size=(5, 5, 7))
    curvatures = curvatures + curvatures.transpose(1, 0, 2)

    def members(x):
        return x @ slopes + 0.5 * np.einsum("a,abm,b->m", x, curvatures, x)

    def differences(f, x, h=1e-4):
        return np.stack([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(len(x))])

    x = rng.normal(size=5)
    gradients = slopes + np.einsum("abm,b->am", curvatures, x)
    for method, calibration in calibrations().items():

        def calibrated(x, calibration=calibration):
            return n_atoms * calibration.transform(members(x) / n_atoms)

        point = calibrated_point(members(x), calibrated(x), calibration, scale=n_atoms)
        expected = differences(calibrated, x)
        np.testing.assert_allclose(point.member_gradients(gradients), expected, atol=1e-6)
        expected = differences(lambda x: calibrated(x).std(ddof=1), x)
        np.testing.assert_allclose(point.std_gradient(gradients), expected, atol=1e-6)
        folded = np.broadcast_to(gradients, (4, 2, *gradients.shape))
        np.testing.assert_allclose(point.std_gradient(folded)[3, 1], expected, atol=1e-6)
        if method in ("student", "linear"):
            assert point.slope == pytest.approx(0.0, abs=1e-9)


def test_a_factor_without_a_calibration_is_constant_and_equal_members_have_no_gradient():
    raw = np.random.default_rng(0).normal(size=7)
    point = calibrated_point(raw, raw.mean() + 2.5 * (raw - raw.mean()), None)
    assert point == CalibratedPoint(raw, pytest.approx(2.5), 0.0)
    gradients, same = np.random.default_rng(1).normal(size=(5, 7)), np.full(7, 3.0)
    point = calibrated_point(same, same, calibrations()["power"])
    np.testing.assert_array_equal(point.std_gradient(gradients), 0.0)
    np.testing.assert_allclose(point.member_gradients(gradients), gradients)


# --- results ---


def test_results_are_those_of_the_model(committee, crystal):
    calc = Calculator(committee)
    found = committee.predict_forces([crystal], stress=True)
    expected = {
        "energy": found.energy.mean[0],
        "free_energy": found.energy.mean[0],
        "energy_uncertainty": found.energy.std[0],
        "energy_ensemble": found.energy.members[0],
        "forces": found.forces.mean,
        "forces_uncertainty": found.forces.std,
        "forces_ensemble": found.forces.members,
        "stress": found.stress.mean[0],
        "stress_uncertainty": found.stress.std[0],
        "stress_ensemble": found.stress.members[0],
    }
    for name in calc.implemented_properties:
        value = Calculator(committee).get_property(name, crystal)
        np.testing.assert_allclose(value, calc.get_property(name, crystal))
        np.testing.assert_allclose(value, expected.get(name, value))
        assert np.all(np.isfinite(value)), name
    with pytest.raises(PropertyNotImplementedError):
        calc.get_property("dipole", crystal)


def test_forces_and_stress_are_computed_only_if_requested(committee, crystal):
    crystal.calc = Calculator(committee)
    crystal.get_potential_energy()
    crystal.calc.get_property("energy_uncertainty", crystal)
    assert committee.calls == ["energy"]
    crystal.get_forces()
    crystal.get_potential_energy()
    assert committee.calls == ["energy", "forces"]
    crystal.get_stress()
    assert committee.calls == ["energy", "forces", "stress"]
    # After the first stress one evaluation gives both.
    crystal.rattle(0.01, seed=2)
    crystal.get_forces()
    crystal.get_stress()
    assert committee.calls == ["energy", "forces", "stress", "stress"]
    crystal.rattle(0.01, seed=3)
    crystal.get_potential_energy()
    assert committee.calls[4:] == ["energy"]


def test_forces_stress_and_gradients_of_uncertainties_are_derivatives(committee, crystal):
    calc = crystal.calc = Calculator(committee)
    assert_derivatives(crystal)

    def std(atoms):
        return calc.get_property("energy_uncertainty", atoms)

    found = calc.get_property("energy_uncertainty_gradient", crystal)
    np.testing.assert_allclose(found, gradient(std, crystal), atol=1e-6)
    found = calc.get_property("energy_uncertainty_stress", crystal)
    np.testing.assert_allclose(found, strain_derivative(std, crystal), atol=1e-7)
    crystal.center(vacuum=3.0, axis=2)
    crystal.pbc = (True, True, False)
    assert_derivatives(crystal)


def test_a_member_is_a_potential_of_its_own(committee, crystal):
    calc = Calculator(committee)
    ensemble = calc.get_property("energy_ensemble", crystal)
    for i in range(0, committee.n_members, 2):
        crystal.calc = calc.member(i)
        assert crystal.get_potential_energy() == pytest.approx(ensemble[i])
        assert_derivatives(crystal)
    # Forces are calibrated apart from energies: those of a member belong to its energy.
    forces = calc.get_property("forces_ensemble", crystal)
    mean = forces.mean(axis=-1)
    expected = (forces[..., i] - mean) * ENERGY_FACTOR / FORCES_FACTOR
    np.testing.assert_allclose(crystal.get_forces() - mean, expected, atol=1e-9)


def test_map_calls_a_function_with_every_member(committee, atoms):
    calc = Calculator(committee)
    found = calc.map(lambda member: member.get_potential_energy(atoms))
    np.testing.assert_allclose(found.members, committee.predict([atoms]).members[0])
    sizes = iter(range(10))
    for f in (lambda _: np.zeros(next(sizes)), lambda _: None):
        with pytest.raises(InputError):
            calc.map(f)
    with pytest.raises(InputError) as error:
        MemberCalculator(committee, 6)
    assert error.value.parameter == "index"


# --- in ASE ---


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


def test_relaxation_and_dynamics(committee, atoms, crystal):
    crystal.calc = atoms.calc = Calculator(committee)
    assert BFGS(FrechetCellFilter(crystal), logfile=None).run(fmax=1e-3, steps=300)
    assert np.abs(crystal.get_stress()).max() < 1e-3
    assert BFGS(atoms, logfile=None).run(fmax=1e-3, steps=300)
    slope, fluctuation = drift(atoms, 0.2, 0.4)
    assert abs(slope) < 1e-3
    assert fluctuation < 1e-3


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
    calc.get_forces(molecule("CH4"))
    agrees()


def test_a_molecule_has_no_stress(committee, crystal, atoms):
    calc = Calculator(committee)
    calc.get_stress(crystal)
    assert np.all(np.isfinite(calc.get_forces(atoms)))
    with pytest.raises(PropertyNotImplementedError):
        calc.get_stress(atoms)


def test_copies_share_the_model_and_nothing_else(committee, atoms):
    calc = Calculator(committee, 0.5, "raise")
    calc.get_potential_energy(atoms)
    for same in (copy.deepcopy(calc), copy.copy(calc), copy.deepcopy(calc.member(1))):
        assert same.model is committee
    twin = copy.deepcopy(calc)
    moved = atoms.copy()
    moved.rattle(0.1, seed=0)
    energy = calc.results["energy"]
    assert twin.results["energy"] == energy
    twin.get_forces(moved)
    assert "forces" not in calc.results
    assert calc.results["energy"] == energy != twin.results["energy"]
    again = pickle.loads(pickle.dumps(calc))
    assert again.uncertainty_threshold == {"energy_uncertainty": 0.5}
    np.testing.assert_array_equal(again.get_forces(moved), twin.get_forces(moved))


# --- files ---


def test_ase_writes_all_results(committee, crystal, tmp_path):
    crystal.calc = Calculator(committee)
    crystal.get_stress()
    results, n = crystal.calc.results, committee.n_members
    for name in ("out.xyz", "out.traj", "out.json"):
        ase.io.write(tmp_path / name, crystal)
        again = ase.io.read(tmp_path / name)
        assert again.get_potential_energy() == pytest.approx(results["energy"])
        np.testing.assert_allclose(again.get_forces(), results["forces"], atol=1e-8)
        np.testing.assert_allclose(again.get_stress(), results["stress"], atol=1e-8)
    again = ase.io.read(tmp_path / "out.xyz")
    # Ensembles are stored member by member.
    members = again.arrays["forces_ensemble"].reshape(len(again), n, 3).swapaxes(1, 2)
    np.testing.assert_allclose(members, results["forces_ensemble"], atol=1e-8)
    members = again.info["stress_ensemble"].reshape(n, 6).T
    np.testing.assert_allclose(members, results["stress_ensemble"], atol=1e-8)
    found = {**again.info, **again.arrays}
    for name in ("energy_uncertainty", "energy_ensemble", "forces_uncertainty"):
        np.testing.assert_allclose(found[name], results[name], atol=1e-8)
    np.testing.assert_allclose(found["stress_uncertainty"], results["stress_uncertainty"])


def test_annotations_follow_the_structure(committee, atoms):
    calc = atoms.calc = Calculator(committee)
    atoms.get_forces()
    assert {*atoms.info, *atoms.arrays} >= EXTRA
    twin, calls = atoms.copy(), len(committee.calls)
    twin.info = {}
    calc.get_potential_energy(twin)  # not computed again
    assert len(committee.calls) == calls
    assert twin.info["energy_uncertainty"] == calc.results["energy_uncertainty"]
    atoms.rattle(0.1, seed=0)
    atoms.get_potential_energy()
    assert not {"forces_uncertainty", "forces_ensemble"} & {*atoms.arrays}
    assert atoms.info["energy_uncertainty"] == calc.results["energy_uncertainty"]
    bare = Atoms(atoms.numbers, atoms.positions, calculator=Calculator(committee, annotate=False))
    bare.get_forces()
    assert not EXTRA & {*bare.info, *bare.arrays}


# --- thresholds ---


def test_a_warning_is_issued_when_the_threshold_is_crossed(committee, atoms):
    std = committee.predict([atoms]).std[0]
    atoms.calc = Calculator(committee, 0.9 * std)
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        atoms.positions[0] += 1e-6
        atoms.get_potential_energy()  # still beyond: no second warning
        far = atoms.copy()
        far.positions[1:] += [[10, 0, 0], [0, 20, 0]]
        far.calc = atoms.calc
        far.get_potential_energy()  # without pairs, members agree
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_an_error_stops_a_simulation_whatever_the_orientation(committee, atoms, share):
    lengths = np.linalg.norm(committee.predict_forces([atoms]).forces.std, axis=1)
    calc = Calculator(committee, {"forces_uncertainty": share * lengths.max()}, "raise")
    for angle in (0, 25, 70):
        turned = atoms.copy()
        turned.rotate(angle, (1, 2, 3))
        turned.calc = calc
        turned.get_potential_energy()
        for _ in range(2):  # nor does a second attempt pass
            if share > 1:
                turned.get_forces()
                continue
            with pytest.raises(UncertaintyError):
                turned.get_forces()


def test_a_function_is_called_once_for_a_structure_and_limit(committee, atoms):
    seen = []
    limits = {"energy_uncertainty": 1e-9, "forces_uncertainty": 1e-9, "stress_uncertainty": 1e3}
    atoms.calc = Calculator(committee, limits, lambda atoms, results: seen.append(results))
    atoms.get_potential_energy()
    assert len(seen) == 1
    atoms.get_forces()  # another limit
    assert len(seen) == 2
    atoms.get_potential_energy(), atoms.get_forces(), atoms.calc.get_property("forces", atoms)
    assert len(seen) == 2
    VelocityVerlet(atoms, 0.5 * units.fs).run(3)
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ((object(),), "model"),
        ((PairCommittee(), -1.0), "uncertainty_threshold"),
        ((PairCommittee(), {"stress": 1.0}), "uncertainty_threshold"),
        ((PairCommittee(), 1.0, "shout"), "on_exceed"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, parameter):
    with pytest.raises(InputError) as error:
        Calculator(*arguments)
    assert error.value.parameter == parameter


# --- trained models ---


def waters(n, scale=0.08, seed=0, last=(0, 1.2, 0)):
    """Distorted molecules with energies and forces of a pair potential."""
    rng, reference = np.random.default_rng(seed), PairCommittee(n_members=2, ensemble_std=0.0)
    frames = []
    for _ in range(n):
        atoms = Atoms("OH2", [[0, 0, 0], [1.2, 0, 0], last])
        atoms.positions += scale * rng.normal(size=(3, 3))
        found = reference.predict_forces([atoms])
        atoms.info["energy"] = float(found.energy.mean[0])
        atoms.arrays["true_forces"] = found.forces.mean
        frames.append(atoms)
    return frames


def water_model_of(n=30, **given):
    standard = {"representation": SMOOTH, "n_representatives": 20, "n_members": 4, "units": "eV"}
    return make_model("energy", **(standard | given)).fit(waters(n))


@pytest.fixture(scope="module")
def water_model():
    return water_model_of(80, n_representatives=60, n_members=16)


@pytest.fixture
def water():
    return waters(1, seed=7)[0]


@pytest.fixture(scope="module", params=["student", "power", "shrinkage"])
def crystal_model(request):
    return make_model(
        "energy",
        representation=SMOOTH | {"cutoff": 5.0},
        n_representatives=30,
        n_members=8,
        units="eV",
        calibration=request.param,
    ).fit(labelled_crystals(30))


@pytest.fixture(scope="module", params=["student", "power", "shrinkage"])
def force_model(request):
    """A model that was trained on energies and forces, and calibrated for both."""
    return water_model_of(
        20,
        forces="true_forces",
        n_representatives=60,
        n_members=8,
        calibration=request.param,
    )


def test_energies_alone_are_those_that_come_with_forces(water_model, crystal_model):
    for model, frames in ((water_model, waters(3)), (crystal_model, labelled_crystals(2, seed=5))):
        expected = model.predict_forces(frames).energy
        for atoms, energy in zip(frames, expected.members, strict=True):
            found = Calculator(model).get_property("energy_ensemble", atoms)
            np.testing.assert_allclose(found, energy, rtol=1e-9)


def test_dynamics_of_a_trained_molecule_conserve_the_energy():
    # A triangle of equal sides, about the minimum of the pair potential.
    frames = waters(60, last=(0.6, 1.04, 0))
    given = {"representation": SMOOTH, "n_representatives": 60, "n_members": 4, "units": "eV"}
    atoms = waters(1, scale=0.0, last=(0.6, 1.04, 0))[0]
    atoms.calc = Calculator(make_model("energy", **given).fit(frames))
    slope, fluctuation = drift(atoms, 0.05, 0.25)
    assert abs(slope) < 2e-3
    assert fluctuation < 1e-3
    assert atoms.calc.results["energy_uncertainty"] < 0.5  # it stays near the training set


@pytest.mark.parametrize("calibrated_for", ["forces", "energy"])
def test_forces_of_a_calibrated_member_are_derivatives(force_model, water, calibrated_for):
    calc = Calculator(force_model)
    found = force_model.predict_forces([water])
    np.testing.assert_allclose(calc.get_property("forces_uncertainty", water), found.forces.std)
    water.calc = calc.member(3, calibrated_for=calibrated_for)
    assert_derivatives(water, (1e-3, 0), (1e-4, 0), stress=False)


def test_members_are_calibrated_for_forces_or_for_the_energy(force_model, water):
    calc, found = Calculator(force_model), force_model.predict_forces([water])
    factor = float(force_model.fitted.calibrations["forces"]["student"].std(np.ones(1), 8)[0])
    raw = found.forces.uncalibrated
    forces = calc.map(lambda member: member.get_forces(water))
    np.testing.assert_allclose(forces.mean, raw.mean, atol=1e-7)
    np.testing.assert_allclose(forces.std, factor * raw.std, rtol=1e-5)
    if force_model.settings.calibration == "student":
        np.testing.assert_allclose(forces.members, found.forces.members, atol=1e-6)
    # Energies alone, and those that come with forces, are of the same potential.
    energies = calc.map(lambda member: member.get_potential_energy(water))
    expected = factor * found.energy.uncalibrated.std[0]
    assert float(energies.std) == pytest.approx(expected, rel=1e-5)

    def energy_after_forces(member):
        member.get_forces(water)
        return member.results["energy"]

    np.testing.assert_allclose(calc.map(energy_after_forces).members, energies.members, rtol=1e-7)
    energies = calc.map(lambda member: member.get_potential_energy(water), calibrated_for="energy")
    np.testing.assert_allclose(energies.members, found.energy.members[0], rtol=1e-8)
    assert calc.member(0).calibrated_for == "forces"


def test_models_without_a_calibration_of_forces(water_model):
    for model in (water_model, PairCommittee()):
        calc = Calculator(model)
        assert calc.member(0).calibrated_for == "energy"
        for wrong in ("forces", "stress"):
            with pytest.raises(InputError) as error:
                calc.member(0, calibrated_for=wrong)
            assert error.value.parameter == "calibrated_for"


def test_members_are_potentials_whatever_the_calibration(crystal_model):
    crystal = labelled_crystals(1, seed=3)[0]
    calc = Calculator(crystal_model)
    ensemble = calc.get_property("energy_ensemble", crystal)
    crystal.calc = calc.member(5)
    assert crystal.get_potential_energy() == pytest.approx(ensemble[5])
    assert_derivatives(crystal, (1e-3, 1e-4), (1e-5, 1e-6))

    def std(atoms):
        return calc.get_property("energy_uncertainty", atoms)

    found = calc.get_property("energy_uncertainty_gradient", crystal)
    np.testing.assert_allclose(found, gradient(std, crystal, 1e-3), atol=1e-5)


def test_models_from_files_copies_and_pickles(water_model, water, tmp_path):
    path = tmp_path / "model.safetensors"
    water_model.save(path)
    calc = Calculator(water_model)
    forces, member = calc.get_forces(water), calc.member(1)
    np.testing.assert_array_equal(Calculator(str(path)).get_forces(water), forces)
    expected = member.get_forces(water)
    for again in (copy.deepcopy(member), copy.copy(member), pickle.loads(pickle.dumps(member))):
        again.reset()
        np.testing.assert_allclose(again.get_forces(water), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(calc)).get_forces(water), forces)
    with pytest.raises(QualmsError):
        Calculator(tmp_path / "missing.safetensors")


def test_a_calculator_may_use_its_own_number_of_threads(water_model):
    calc = Calculator(water_model, threads=1)
    assert calc.model.fitted is water_model.fitted
    assert calc.model.threads == 1
    for model, threads in ((water_model, 0), (PairCommittee(), 2)):
        with pytest.raises(InputError) as error:
            Calculator(model, threads=threads)
        assert error.value.parameter == "threads"


def test_a_cell_smaller_than_the_cutoff_and_a_slab():
    """Atoms see their own images, and a larger cell of the same crystal is the same."""
    frames = labelled_crystals(20)
    given = {"n_representatives": 20, "n_members": 4, "units": "eV"}
    model = make_model("energy", representation=SMOOTH | {"cutoff": 6.5}, **given).fit(frames)
    small = frames[0].copy()
    large = small.repeat((2, 1, 1))
    for atoms in (small, large):
        atoms.calc = Calculator(model)
    assert large.get_potential_energy() == pytest.approx(2 * small.get_potential_energy())
    np.testing.assert_allclose(large.get_forces()[:2], small.get_forces(), atol=1e-8)
    np.testing.assert_allclose(large.get_stress(), small.get_stress(), atol=1e-9)
    small.center(vacuum=2.0, axis=2)
    small.pbc = (True, True, False)
    assert_derivatives(small, (1e-3, 1e-4), (1e-5, 1e-6))


def test_models_without_smooth_forces(energy_model, molecules, water):
    atoms = molecules[130].copy()
    atoms.calc = Calculator(energy_model)
    assert atoms.get_potential_energy() == pytest.approx(energy_model.predict([atoms]).mean[0])
    for calc in (atoms.calc, atoms.calc.member(0)):
        with pytest.raises(InputError) as error:
            calc.get_forces(atoms)
        assert error.value.parameter == "engine"
    rough = {name: value for name, value in SMOOTH.items() if name != "smoothing"}
    model = water_model_of(representation=rough)
    with pytest.warns(QualmsWarning):
        Calculator(model).get_forces(water)


def test_models_that_are_not_potentials_in_ev(shift_model, molecules, water_model):
    for wrong in (shift_model, make_model(units="kcal/mol").fit(molecules[:40])):
        with pytest.raises(InputError) as error:
            Calculator(wrong)
        assert error.value.parameter == "model"
    with pytest.warns(QualmsWarning) as caught:
        calc = Calculator(water_model_of(units=""))
    assert caught[0].filename == __file__
    calc.map(lambda member: member.get_potential_energy(waters(1)[0]))  # no further warning
    with pytest.raises(InputError):
        Calculator(water_model).get_forces(molecule("SH2"))


# --- a baseline weighted by uncertainties ---


class Members(AseCalculator):
    """An ensemble of another code: members, and nothing calibrated."""

    implemented_properties = ["energy", "forces", "energy_ensemble", "forces_ensemble"]  # noqa: RUF012

    def __init__(self, committee, shape=None):
        super().__init__()
        self.committee, self.shape = committee, shape

    def calculate(self, atoms=None, properties=None, system_changes=None):
        super().calculate(atoms, properties, system_changes)
        found = self.committee.predict_forces([self.atoms])
        energies = found.energy.uncalibrated.members[0]
        forces = found.forces.uncalibrated.members
        self.results = {
            "energy": energies.mean(),
            "forces": forces.mean(axis=-1),
            "energy_ensemble": energies,
            "forces_ensemble": forces if self.shape is None else forces.reshape(self.shape),
        }


def baseline():
    return LennardJones(sigma=1.1, epsilon=0.6, rc=3.0, ro=2.5, smooth=True)


def learned(kind="calibrated"):
    committee = PairCommittee(ensemble_std=0.1)
    return Calculator(committee) if kind == "calibrated" else Members(committee)


@pytest.mark.parametrize("kind", ["calibrated", "members"])
@pytest.mark.parametrize("learns", ["total", "difference"])
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_forces_include_the_derivative_of_the_weight(atoms, kind, learns, factor):
    std = np.std(learned("members").get_property("energy_ensemble", atoms), ddof=1)
    atoms.calc = WeightedBaseline(learned(kind), baseline(), factor * std, learns=learns)
    assert_derivatives(atoms, (1e-4, 0), (2e-6, 0), stress=False)
    # Without that derivative forces would differ.
    calc, w = atoms.calc, atoms.calc.results["weight"]
    assert 0.01 < w < 0.99
    correction = calc.learned.get_forces(atoms)
    if learns == "total":
        correction = correction - calc.baseline.get_forces(atoms)
    without = calc.baseline.get_forces(atoms) + w * correction
    assert np.abs(atoms.get_forces() - without).max() > 1e-3


def test_stress_includes_the_derivative_of_the_weight(crystal):
    std = learned().get_property("energy_uncertainty", crystal)
    crystal.calc = WeightedBaseline(learned(), baseline(), std)
    assert_derivatives(crystal, atol=(2e-6, 1e-6))
    without = WeightedBaseline(learned("members"), baseline(), 1.0)
    assert "stress" not in without.implemented_properties


def test_energies_are_averaged_by_inverse_variances(atoms):
    model = learned()
    std = model.get_property("energy_uncertainty", atoms)
    calc = atoms.calc = WeightedBaseline(model, baseline(), 2 * std)
    energies = np.array([c.get_potential_energy(atoms) for c in (model, calc.baseline)])
    weights = 1 / np.array([std, 2 * std]) ** 2
    assert atoms.get_potential_energy() == pytest.approx(np.average(energies, weights=weights))
    assert calc.results["weight"] == pytest.approx(0.8)
    expected = 1 / np.sqrt(weights.sum())
    assert calc.get_property("energy_uncertainty", atoms) == pytest.approx(expected)
    for uncertainty, alone in ((1e4, model), (1e-4, calc.baseline)):
        atoms.calc = WeightedBaseline(model, baseline(), uncertainty)
        np.testing.assert_allclose(atoms.get_forces(), alone.get_forces(atoms), atol=1e-4)
    certain = Members(PairCommittee(ensemble_std=0.0))
    atoms.calc = WeightedBaseline(certain, baseline(), 0.1)
    np.testing.assert_allclose(atoms.get_forces(), certain.get_forces(atoms))


def test_the_energy_is_conserved_where_the_weight_changes(atoms):
    """The energy fluctuates by the error of Verlet's method, quadratic in the step."""
    fluctuations = []
    for timestep in (0.4, 0.2):
        weights, moving = [], atoms.copy()
        moving.calc = WeightedBaseline(learned(), baseline(), 0.5)
        _, fluctuation = drift(
            moving, 0.06, timestep, lambda m=moving, w=weights: w.append(m.calc.results["weight"])
        )
        assert np.ptp(weights) > 0.1
        fluctuations.append(fluctuation)
    assert fluctuations[0] / fluctuations[1] == pytest.approx(4.0, rel=0.15)


def test_the_baseline_keeps_atoms_apart():
    """Beyond the data this ensemble makes atoms fuse, and its members disagree."""
    committee = PairCommittee(n_members=6, ensemble_std=0.02)
    committee.depth[0] = -8.0
    model, closest = Calculator(committee), []
    for calc in (model, WeightedBaseline(model, baseline(), 0.05)):
        atoms = Atoms("N2", [[0, 0, 0], [1.0, 0, 0]], calculator=calc)
        dynamics, distances = VelocityVerlet(atoms, 0.5 * units.fs), []
        dynamics.attach(lambda atoms=atoms, d=distances: d.append(atoms.get_distance(0, 1)))
        dynamics.run(60)
        closest.append(min(distances))
    assert closest[0] < 0.3
    assert closest[1] > 0.8


def test_copies_of_a_weighted_baseline(atoms):
    calc = WeightedBaseline(learned(), baseline(), 0.5)
    forces = calc.get_forces(atoms)
    for again in (copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):
        moved = atoms.copy()
        moved.rattle(0.1, seed=0)
        again.get_forces(moved)
        np.testing.assert_allclose(again.get_forces(atoms), forces)
    assert copy.deepcopy(calc).learned.model is calc.learned.model


def test_files_have_the_weight_and_the_uncertainty(atoms, tmp_path):
    atoms.info["energy_ensemble"] = np.zeros(3)  # of some other calculator
    atoms.calc = WeightedBaseline(learned(), baseline(), 0.5)
    atoms.get_forces()
    ase.io.write(tmp_path / "out.xyz", atoms)
    again = ase.io.read(tmp_path / "out.xyz")
    for name in ("weight", "energy_uncertainty"):
        assert again.info[name] == pytest.approx(atoms.calc.results[name])
    assert "energy_ensemble" not in again.info
    assert find_label(again, "energy", False) is None  # a prediction is not a reference value
    bare = atoms.copy()
    bare.info = {}
    bare.calc = WeightedBaseline(learned(), baseline(), 0.5, annotate=False)
    bare.get_forces()
    assert not bare.info


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ((baseline(), baseline(), 1.0), "learned"),
        ((PairCommittee(), baseline(), 1.0), "learned"),
        ((learned(), "emt", 1.0), "baseline"),
        ((learned(), baseline, 1.0), "baseline"),
        ((learned(), baseline(), 0.0), "baseline_uncertainty"),
    ],
)
def test_wrong_arguments_of_a_weighted_baseline(arguments, parameter, atoms):
    with pytest.raises(InputError) as error:
        WeightedBaseline(*arguments)
    assert error.value.parameter == parameter
    with pytest.raises(InputError) as error:
        WeightedBaseline(learned(), baseline(), 1.0, learns="everything")
    assert error.value.parameter == "learns"
    wrong = Members(PairCommittee(), shape=(3, -1))
    with pytest.raises(InputError) as error:
        WeightedBaseline(wrong, baseline(), 1.0).get_forces(atoms)
    assert error.value.parameter == "learned"
