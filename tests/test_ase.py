"""ASE calculators: an ensemble of pair potentials with exact derivatives, and trained models."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.lj import LennardJones
from ase.md.velocitydistribution import Stationary
from ase.md.verlet import VelocityVerlet
from atomistic_fixtures import labelled_crystals, make_model
from checks import rejects
from fake_potential import PairCommittee

from qualms import AtomisticModel, InputError, Prediction, QualmsError, QualmsWarning
from qualms.ase import Calculator, MemberCalculator, WeightedBaseline
from qualms.ase.calculator import member_gradients, std_gradient
from qualms.atomistic.labels import find_label
from qualms.calibration.members import calibrated_members, source_members
from qualms.calibration.methods import build_calibration

pytestmark = pytest.mark.filterwarnings("ignore:The training set has too few compositions")

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


def test_equal_members_have_no_gradient_of_their_uncertainty():
    gradients, same = np.random.default_rng(1).normal(size=(5, 7)), np.full(7, 3.0)
    np.testing.assert_array_equal(std_gradient(same, gradients), 0.0)
    calibration = build_calibration("power", {"alpha": 1.3, "gamma": 0.6})
    found = member_gradients(lambda m: calibrated_members(calibration, m), same, gradients)
    np.testing.assert_allclose(found.mean(axis=1), gradients.mean(axis=1), atol=1e-12)


# --- results ---


def test_results_are_those_of_the_model(committee, crystal):
    calc = Calculator(committee)
    found = committee.predict([crystal], stress=True, forces=True)
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


def test_map_calls_a_function_with_every_member(committee, atoms):
    calc = Calculator(committee)
    found = calc.map(lambda member: member.get_potential_energy(atoms))
    np.testing.assert_allclose(found.members, committee.predict([atoms]).members[0])
    sizes = iter(range(10))
    for f in (lambda _: np.zeros(next(sizes)), lambda _: None):
        with pytest.raises(InputError):
            calc.map(f)


@pytest.mark.parametrize("source", ["novelty", "posterior"])
def test_uncertainties_are_those_of_predictions(water_model, water, source):
    """Whatever σ depends on: the novelty q is not a property of members."""
    weights = {"alpha": 0.7, "posterior": 0.5, "novelty": 0.0, source: 2.0}
    calibrations = dict(water_model.fitted.calibrations)
    of_energy = calibrations["energy"]
    changed = replace(of_energy.calibration, **weights)
    calibrations["energy"] = replace(of_energy, calibration=changed)
    fitted = replace(water_model.fitted, calibrations=calibrations)
    assert fitted.pp_variance is not None
    model = AtomisticModel.from_fitted(fitted)
    expected = model.predict([water])
    with_forces = model.predict([water], forces=True)
    for every in (1, 10**9):
        calc = Calculator(model, forces_uncertainty_every=every)
        for _ in range(2):
            calc.calculate(water, ["energy", "forces"])
            std = calc.results["energy_uncertainty"]
            assert std == pytest.approx(expected.std[0], rel=1e-6)
            np.testing.assert_allclose(calc.results["forces"], with_forces.forces.mean, atol=1e-9)
    np.testing.assert_allclose(with_forces.std, expected.std, rtol=1e-6)


def test_novelty_of_a_structure_and_of_its_atoms(water_model, water):
    calc = Calculator(water_model)
    calc.get_potential_energy(water)
    assert "novelty" not in calc.results
    found = water_model.predict([water], atoms=True)
    assert calc.get_property("novelty", water) == pytest.approx(found.novelty[0], rel=1e-4)
    np.testing.assert_allclose(calc.results["atom_novelty"], found.atom_novelty[0], rtol=1e-4)
    assert calc.results["novelty"] == pytest.approx(calc.results["atom_novelty"].max())
    assert water.info["extrapolates"] == calc.results["extrapolates"] == found.extrapolates[0]
    assert "atom_novelty" in water.arrays
    with pytest.raises(PropertyNotImplementedError):
        Calculator(PairCommittee()).get_property("novelty", water)


# --- in ASE ---


def drift(atoms, picoseconds, timestep):
    """Slope of the total energy in eV per atom and ps, and its fluctuation in eV per atom."""
    widths = np.sqrt(300 * units.kB * atoms.get_masses())
    atoms.set_momenta(widths[:, None] * np.random.default_rng(0).normal(size=(len(atoms), 3)))
    Stationary(atoms)
    dynamics, energies = VelocityVerlet(atoms, timestep * units.fs), []
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()), interval=10)
    dynamics.run(int(picoseconds * 1000 / timestep))
    times = np.linspace(0, picoseconds, len(energies))
    return np.polyfit(times, energies, 1)[0] / len(atoms), np.std(energies) / len(atoms)


def test_atoms_may_change_between_calls(committee, atoms):
    calc = Calculator(committee)
    atoms.calc = calc

    def agrees():
        found = committee.predict([atoms], forces=True)
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


def test_copies_pickles_and_files(committee, atoms, water_model, water, tmp_path):
    """They compute the same, and share the model but no results."""
    calc, weighted = Calculator(committee), WeightedBaseline(learned(), baseline(), 0.5)
    moved = atoms.copy()
    moved.rattle(0.1, seed=0)
    for one in (calc, calc.member(1), weighted, Calculator(water_model)):
        forces = one.get_forces(atoms)
        for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            again.get_forces(moved)
            np.testing.assert_array_equal(one.results["forces"], forces)
            np.testing.assert_allclose(again.get_forces(atoms), forces)
    assert copy.deepcopy(calc).model is copy.copy(calc).model is committee
    assert copy.deepcopy(weighted).learned.model is weighted.learned.model
    path = tmp_path / "model.safetensors"
    water_model.save(path)
    forces = Calculator(water_model).get_forces(water)
    np.testing.assert_array_equal(Calculator(str(path)).get_forces(water), forces)
    with pytest.raises(QualmsError):
        Calculator(tmp_path / "missing.safetensors")


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


# --- trained models ---


def waters(n, scale=0.08, seed=0, last=(0, 1.2, 0)):
    """Distorted molecules with energies and forces of a pair potential."""
    rng, reference = np.random.default_rng(seed), PairCommittee(n_members=2, ensemble_std=0.0)
    frames = []
    for _ in range(n):
        atoms = Atoms("OH2", [[0, 0, 0], [1.2, 0, 0], last])
        atoms.positions += scale * rng.normal(size=(3, 3))
        found = reference.predict([atoms], forces=True)
        atoms.info["energy"] = float(found.energy.mean[0])
        atoms.arrays["true_forces"] = found.forces.mean
        frames.append(atoms)
    return frames


def water_model_of(n=30, **given):
    standard = {"representation": SMOOTH, "n_representatives": 20, "n_members": 4, "units": "eV"}
    standard["calibration"] = "student"
    return make_model("energy", **(standard | given)).fit(waters(n))


@pytest.fixture(scope="module")
def water_model():
    return water_model_of(80, n_representatives=60, n_members=16, calibration="sources")


@pytest.fixture
def water():
    return waters(1, seed=7)[0]


@pytest.fixture(scope="module", params=["sources", "student", "power", "shrinkage"])
def crystal_model(request):
    return make_model(
        "energy",
        representation=SMOOTH | {"cutoff": 5.0},
        n_representatives=30,
        n_members=8,
        units="eV",
        calibration=request.param,
    ).fit(labelled_crystals(30))


@pytest.fixture(scope="module", params=["sources", "student", "power", "shrinkage"])
def force_model(request):
    """A model that was trained on energies and forces, and calibrated for both."""
    # Labels are exact. A noise that is not lost in rounding, so that posterior members differ.
    return water_model_of(
        30,
        forces="true_forces",
        noise=1e-6,
        forces_noise=1e-4,
        n_representatives=60,
        n_members=8,
        calibration=request.param,
    )


@pytest.mark.filterwarnings("ignore:energy. possible label errors")
def test_dynamics_of_a_trained_molecule_conserve_the_energy():
    # A triangle of equal sides, about the minimum of the pair potential.
    frames = waters(60, last=(0.6, 1.04, 0))
    given = {"representation": SMOOTH, "n_representatives": 60, "n_members": 8, "units": "eV"}
    atoms = waters(1, scale=0.0, last=(0.6, 1.04, 0))[0]
    atoms.calc = Calculator(make_model("energy", **given).fit(frames))
    slope, fluctuation = drift(atoms, 0.05, 0.25)
    assert abs(slope) < 2e-3
    assert fluctuation < 1e-3
    assert atoms.calc.results["energy_uncertainty"] < 0.5  # it stays near the training set


@pytest.mark.parametrize("calibrated_for", ["forces", "energy"])
def test_forces_of_a_calibrated_member_are_derivatives(force_model, water, calibrated_for):
    calc = Calculator(force_model)
    found = force_model.predict([water], forces=True)
    np.testing.assert_allclose(calc.get_property("forces_uncertainty", water), found.forces.std)
    water.calc = calc.member(3, calibrated_for=calibrated_for)
    assert_derivatives(water, (1e-3, 0), (1e-4, 0), stress=False)


def test_members_are_calibrated_for_forces_or_for_the_energy(force_model, water):
    calc, found = Calculator(force_model), force_model.predict([water], forces=True)
    fitted = force_model.fitted
    calibration = fitted.calibration_of("forces")
    student = fitted.with_calibration("student").calibration_of("forces")
    factor = calibration.typical_factor(8) or student.typical_factor(8)
    raw, raw_energy = (
        Prediction(source_members(calibration, p.uncalibrated.members))
        for p in (found.forces, found.energy)
    )
    forces = calc.map(lambda member: member.get_forces(water))
    np.testing.assert_allclose(forces.mean, raw.mean, atol=1e-7)
    np.testing.assert_allclose(forces.std, factor * raw.std, rtol=1e-5)
    # Energies alone, and those that come with forces, are of the same potential.
    energies = calc.map(lambda member: member.get_potential_energy(water))
    expected = factor * raw_energy.std[0]
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
            with rejects("calibrated_for"):
                calc.member(0, calibrated_for=wrong)


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
    found = calc.get_property("energy_uncertainty_stress", crystal)
    np.testing.assert_allclose(found, strain_derivative(std, crystal, 1e-4), atol=1e-6)


def test_one_calculator_may_be_used_by_several_threads(water_model):
    frames = waters(40, seed=3)
    calc = Calculator(water_model)
    expected = [(calc.get_property("energy", a), calc.get_property("forces", a)) for a in frames]

    def results(atoms):
        atoms = atoms.copy()
        atoms.calc = calc
        return atoms.get_potential_energy(), atoms.get_forces()

    with ThreadPoolExecutor(6) as pool:
        for found, (energy, forces) in zip(pool.map(results, frames), expected, strict=True):
            assert found[0] == pytest.approx(energy, abs=1e-9)
            np.testing.assert_allclose(found[1], forces, atol=1e-8)


def test_a_calculator_may_use_its_own_number_of_threads(water_model):
    calc = Calculator(water_model, threads=1)
    assert calc.model.fitted is water_model.fitted
    assert calc.model.threads == 1
    for model, threads in ((water_model, 0), (PairCommittee(), 2)):
        with rejects("threads"):
            Calculator(model, threads=threads)


def test_models_without_smooth_forces(energy_model, molecules, water):
    atoms = molecules[130].copy()
    atoms.calc = Calculator(energy_model)
    assert atoms.get_potential_energy() == pytest.approx(energy_model.predict([atoms]).mean[0])
    for calc in (atoms.calc, atoms.calc.member(0)):
        assert "forces" not in calc.implemented_properties
        with pytest.raises(PropertyNotImplementedError, match="featomic"):
            calc.get_forces(atoms)
    rough = {name: value for name, value in SMOOTH.items() if name != "smoothing"}
    model = water_model_of(representation=rough)
    with pytest.warns(QualmsWarning):
        Calculator(model).get_forces(water)


def test_models_that_are_not_potentials_in_ev(shift_model, molecules, water_model):
    for wrong in (shift_model, make_model(units="kcal/mol").fit(molecules[:50])):
        with rejects("model"):
            Calculator(wrong)
    without_units = water_model_of(units="")
    with pytest.warns(QualmsWarning) as caught:
        calc = Calculator(without_units)
    assert caught[0].filename == __file__
    calc.map(lambda member: member.get_potential_energy(waters(1)[0]))  # no further warning
    of_differences = copy.copy(water_model)
    named = of_differences.settings.model_copy(update={"target": "delta_energy"})
    of_differences._fitted = replace(of_differences.fitted, settings=named)
    with pytest.warns(QualmsWarning):
        Calculator(of_differences)
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
        found = self.committee.predict([self.atoms], forces=True)
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


def test_another_zero_of_energy_is_reported(atoms):
    deep = LennardJones(sigma=1.1, epsilon=600.0, rc=3.0, ro=2.5, smooth=True)
    atoms.calc = WeightedBaseline(learned(), deep, 0.1)
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()


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
    ("kind", "arguments", "parameter"),
    [
        (Calculator, (object(),), "model"),
        (Calculator, (PairCommittee(), 1.0), "watch"),
        (MemberCalculator, (PairCommittee(), 6), "index"),
        (WeightedBaseline, (baseline(), baseline(), 1.0), "learned"),
        (WeightedBaseline, (PairCommittee(), baseline(), 1.0), "learned"),
        (WeightedBaseline, (learned(), "emt", 1.0), "baseline"),
        (WeightedBaseline, (learned(), baseline, 1.0), "baseline"),
        (WeightedBaseline, (learned(), baseline(), 0.0), "baseline_uncertainty"),
    ],
)
def test_wrong_arguments_are_rejected(kind, arguments, parameter):
    with rejects(parameter):
        kind(*arguments)


def test_wrong_options_of_a_weighted_baseline(atoms):
    with rejects("learns"):
        WeightedBaseline(learned(), baseline(), 1.0, learns="everything")
    wrong = Members(PairCommittee(), shape=(3, -1))
    with rejects("learned"):
        WeightedBaseline(wrong, baseline(), 1.0).get_forces(atoms)


def test_uncertainties_of_forces_with_some_steps_only(water_model):
    """Means are the same; uncertainties come with every third structure, or on request."""
    sparse, full = Calculator(water_model, forces_uncertainty_every=3), Calculator(water_model)
    for i in range(5):
        results = []
        for calculator in (sparse, full):
            atoms = waters(1, seed=20 + i)[0]
            atoms.calc = calculator
            atoms.get_forces()
            results.append(dict(calculator.results))
        for name in ("energy", "energy_uncertainty", "forces"):
            np.testing.assert_allclose(results[0][name], results[1][name], atol=1e-8)
        assert ("forces_uncertainty" in results[0]) == (i % 3 == 0)
    found = sparse.get_property("forces_uncertainty", atoms)
    np.testing.assert_allclose(found, full.results["forces_uncertainty"], atol=1e-8)
    with rejects("forces_uncertainty_every"):
        Calculator(water_model, forces_uncertainty_every=0)
