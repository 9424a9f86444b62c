"""The ASE calculator with trained models."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.optimize import BFGS
from atomistic_fixtures import labelled_crystals, make_model
from fake_potential import PairCommittee
from finite_differences import gradient, numerical_forces, numerical_stress
from test_calculator import drift

from qualms import InputError, QualmsWarning
from qualms.ase import Calculator
from qualms.ase import calculator as member_calculator
from qualms.atomistic import forces as mechanics
from qualms.atomistic.forces import derivatives
from qualms.atomistic.model import exact_energies

SMOOTH = {"cutoff": 3.0, "n_radial": 3, "l_max": 2, "engine": "featomic", "smoothing": 0.5}
TRUTH = PairCommittee(n_members=2, spread=0.0)


def waters(n, scale=0.08, seed=0):
    """Distorted molecules with energies of a pair potential."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = Atoms("OH2", [[0, 0, 0], [1.2, 0, 0], [0, 1.2, 0]])
        atoms.positions += scale * rng.normal(size=(3, 3))
        found = TRUTH.predict_forces([atoms])
        atoms.info["energy"] = float(found.energy.mean[0])
        atoms.arrays["true_forces"] = found.forces.mean
        frames.append(atoms)
    return frames


@pytest.fixture(scope="module")
def water_model():
    settings = {"representation": SMOOTH, "n_representatives": 60, "units": "eV"}
    return make_model("energy", **settings).fit(waters(80))


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


def test_energies_alone_are_those_that_come_with_forces(water_model, crystal_model, water):
    for model, frames in ((water_model, waters(5)), (crystal_model, labelled_crystals(3, seed=5))):
        found = exact_energies(model, frames)
        expected = model.predict_forces(frames).energy
        np.testing.assert_allclose(found.members, expected.members, rtol=1e-10)
        np.testing.assert_allclose(
            found.uncalibrated.members, expected.uncalibrated.members, rtol=1e-10
        )
        np.testing.assert_allclose(found.mean, model.predict(frames).mean, atol=0.01)


def test_velocity_verlet_conserves_the_energy_of_a_trained_molecule(water_model, water):
    water.calc = Calculator(water_model)
    BFGS(water, logfile=None).run(fmax=0.01, steps=100)
    slope, fluctuation = drift(water, 0.25, 0.25)
    assert abs(slope) < 1e-5
    assert fluctuation < 1e-3
    assert water.calc.results["energy_uncertainty"] < 0.5  # it has stayed where it was trained


@pytest.fixture(scope="module", params=["student", "power", "shrinkage"])
def force_model(request):
    """A model that was trained on energies and forces, and calibrated for both."""
    return make_model(
        "energy",
        forces="true_forces",
        representation=SMOOTH,
        n_representatives=60,
        n_members=8,
        units="eV",
        calibration=request.param,
    ).fit(waters(20))


@pytest.mark.parametrize("calibrated_for", ["forces", "energy"])
def test_forces_that_were_learned_have_a_calibration_of_their_own(
    force_model, water, calibrated_for
):
    """Forces of a member are derivatives of its energy all the same."""
    calc = Calculator(force_model)
    forces, std = calc.get_forces(water), calc.results["forces_uncertainty"]
    np.testing.assert_allclose(std, force_model.predict_forces([water]).forces.std)
    water.calc = calc
    np.testing.assert_allclose(forces, numerical_forces(water, 1e-3), atol=1e-4)
    water.calc = calc.member(3, calibrated_for=calibrated_for)
    assert water.calc.get_potential_energy(water) == pytest.approx(
        float(force_model.predict_forces([water]).energy.members[0, 3]), abs=0.5
    )
    np.testing.assert_allclose(water.get_forces(), numerical_forces(water, 1e-3), atol=1e-4)


def test_members_are_calibrated_for_forces_if_these_have_a_calibration(force_model, water):
    calc, found = Calculator(force_model), force_model.predict_forces([water])
    ours = force_model.fitted.forces_calibrations
    factor = float(ours["student"].std(np.ones(1), 8)[0])
    raw = found.forces.uncalibrated
    forces = calc.map(lambda member: member.get_forces(water))
    np.testing.assert_allclose(forces.mean, raw.mean, atol=1e-9)
    np.testing.assert_allclose(forces.std, factor * raw.std, rtol=1e-6)
    if force_model.settings.calibration == "student":
        np.testing.assert_allclose(forces.members, found.forces.members, atol=1e-8)
    same = calc.map(lambda member: member.get_forces(water), calibrated_for="forces")
    np.testing.assert_array_equal(same.members, forces.members)
    # Energies alone, and those that come with forces, are of the same potential.
    energies = calc.map(lambda member: member.get_potential_energy(water))
    expected = factor * found.energy.uncalibrated.std[0]
    assert float(energies.std) == pytest.approx(expected, rel=1e-6)
    with_forces = calc.map(lambda member: _energy_after_forces(member, water))
    np.testing.assert_allclose(with_forces.members, energies.members, rtol=1e-8)


def _energy_after_forces(member, atoms):
    member.get_forces(atoms)
    return member.results["energy"]


def test_members_are_calibrated_for_the_energy_if_that_is_wanted(force_model, water):
    calc, found = Calculator(force_model), force_model.predict_forces([water])
    energies = calc.map(lambda member: member.get_potential_energy(water), calibrated_for="energy")
    np.testing.assert_allclose(energies.members, found.energy.members[0], rtol=1e-9)
    assert float(energies.std) == pytest.approx(float(found.energy.std[0]), rel=1e-6)
    assert calc.member(0).calibrated_for == "forces"
    assert calc.member(0, calibrated_for="energy").calibrated_for == "energy"


def test_models_that_have_no_calibration_of_forces(water_model):
    calc = Calculator(water_model)
    assert calc.member(0).calibrated_for == "energy"
    assert Calculator(PairCommittee()).member(0).calibrated_for == "energy"
    for one in (calc, Calculator(PairCommittee())):
        with pytest.raises(InputError, match="Train it on forces"):
            one.member(0, calibrated_for="forces")
        with pytest.raises(InputError, match="'forces' or 'energy'"):
            one.map(lambda member: 0.0, calibrated_for="stress")


def test_whatever_the_calibration_members_are_potentials(crystal_model):
    """Factors that depend on the spread have derivatives, too."""
    crystal = labelled_crystals(1, seed=3)[0]
    calc = Calculator(crystal_model)
    ensemble = calc.get_property("energy_ensemble", crystal)
    for i in (0, 5):
        crystal.calc = calc.member(i)
        assert crystal.get_potential_energy() == pytest.approx(ensemble[i])
        np.testing.assert_allclose(crystal.get_forces(), numerical_forces(crystal, 1e-3), atol=1e-5)
        np.testing.assert_allclose(crystal.get_stress(), numerical_stress(crystal, 1e-4), atol=1e-6)

    def std(atoms):
        return calc.get_property("energy_uncertainty", atoms)

    np.testing.assert_allclose(
        calc.get_property("energy_uncertainty_gradient", crystal),
        gradient(std, crystal, 1e-3),
        atol=1e-5,
    )


def test_a_file_is_as_good_as_a_model(water_model, water, tmp_path):
    water_model.save(tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        found = Calculator(path).get_forces(water)
        np.testing.assert_array_equal(found, Calculator(water_model).get_forces(water))


def test_copies_and_pickles(water_model, water):
    calc = Calculator(water_model)
    forces = calc.get_forces(water)
    assert calc.n_members == water_model.settings.n_members
    assert copy.deepcopy(calc).model is water_model
    member = calc.member(1)
    expected = member.get_forces(water)
    for again in (copy.deepcopy(member), copy.copy(member), pickle.loads(pickle.dumps(member))):
        again.reset()
        np.testing.assert_allclose(again.get_forces(water), expected)
    other = pickle.loads(pickle.dumps(calc))
    moved = water.copy()
    moved.rattle(0.01, seed=0)
    other.get_forces(moved)
    np.testing.assert_array_equal(other.get_forces(water), forces)


def test_far_from_the_data_energies_are_finite_and_error_bars_large(water_model, water):
    calc = Calculator(water_model)
    near = calc.get_property("energy_uncertainty", water)
    for positions in (
        [[0, 0, 0], [0.4, 0, 0], [0, 0.4, 0]],
        [[0, 0, 0], [2.2, 0, 0], [0, 2.2, 0]],
        [[0, 0, 0], [20, 0, 0], [0, 40, 0]],
    ):
        far = Atoms("OH2", positions, calculator=calc)
        assert np.isfinite(far.get_potential_energy())
        assert np.all(np.isfinite(far.get_forces()))
        assert calc.results["energy_uncertainty"] > 5 * near


def test_a_cell_smaller_than_the_cutoff():
    """Its atoms see their own images, and a larger cell of the same crystal is the same."""
    frames = labelled_crystals(20)
    model = make_model(
        "energy",
        representation=SMOOTH | {"cutoff": 6.5},
        n_representatives=20,
        n_members=4,
        units="eV",
    ).fit(frames)
    small = frames[0].copy()
    large = small.repeat((2, 1, 1))
    for atoms in (small, large):
        atoms.calc = Calculator(model)
    assert large.get_potential_energy() == pytest.approx(2 * small.get_potential_energy())
    np.testing.assert_allclose(large.get_forces()[:2], small.get_forces(), atol=1e-8)
    np.testing.assert_allclose(large.get_stress(), small.get_stress(), atol=1e-9)


@pytest.mark.parametrize("pbc", [(True, True, False), (False, False, False)])
def test_the_stress_of_a_slab(pbc):
    model = make_model(
        "energy", representation=SMOOTH, n_representatives=20, n_members=4, units="eV"
    ).fit(labelled_crystals(20))
    slab = labelled_crystals(1, seed=3)[0]
    slab.center(vacuum=2.0, axis=2)
    slab.pbc = pbc
    for calc in (Calculator(model), Calculator(model).member(2)):
        slab.calc = calc
        stress = slab.get_stress()
        assert np.abs(stress).max() > 1e-3
        np.testing.assert_allclose(stress, numerical_stress(slab, 1e-4), atol=1e-6)


def test_a_member_computes_forces_of_one_member(water_model, water, monkeypatch):
    columns = []

    def spy(potential, *arguments, **options):
        columns.append(potential.n_columns)
        return derivatives(potential, *arguments, **options)

    for module in (mechanics, member_calculator):
        monkeypatch.setattr(module, "derivatives", spy)
    calc, n = Calculator(water_model), water_model.settings.n_members
    forces = calc.map(lambda member: member.get_forces(water))
    energies = calc.map(lambda member: member.get_property("free_energy", water))
    assert columns == [1] * n
    found = water_model.predict_forces([water])
    assert columns[n:] == [n]
    np.testing.assert_allclose(forces.members, found.forces.members, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(energies.members, found.energy.members[0], rtol=1e-10)


def test_a_model_without_forces_still_has_energies(energy_model, molecules):
    atoms = molecules[130].copy()
    atoms.calc = Calculator(energy_model)
    assert atoms.get_potential_energy() == pytest.approx(energy_model.predict([atoms]).mean[0])
    for calc in (atoms.calc, atoms.calc.member(0)):
        with pytest.raises(InputError, match="featomic"):
            calc.get_forces(atoms)


def test_a_cutoff_that_is_not_smooth_is_warned_of(water):
    rough = {name: value for name, value in SMOOTH.items() if name != "smoothing"}
    given = {"representation": rough, "n_representatives": 20, "n_members": 4, "units": "eV"}
    model = make_model("energy", **given).fit(waters(30))
    calc = Calculator(model)
    for ask in (lambda: model.predict_forces([water]), lambda: calc.get_forces(water)):
        with pytest.warns(QualmsWarning, match="cutoff of the model is not smooth") as caught:
            ask()
        assert {one.filename for one in caught} == {__file__}
    # It is true.
    energies = [
        model.predict([Atoms("OH2", [[0, 0, 0], [1.2, 0, 0], [0, r, 0]])]).mean[0]
        for r in (2.9999, 3.0001)
    ]
    assert abs(energies[1] - energies[0]) > 1e-3


def test_models_that_are_no_potentials(shift_model, molecules):
    with pytest.raises(InputError, match="kind 'atomic'"):
        Calculator(shift_model)
    in_kcal = make_model(units="kcal/mol").fit(molecules[:40])
    with pytest.raises(InputError, match="energies in eV"):
        Calculator(in_kcal)


def test_a_model_without_units_is_taken_for_ev_with_a_warning():
    small = {"representation": SMOOTH, "n_representatives": 20, "n_members": 4}
    model = make_model("energy", **small).fit(waters(30))
    with pytest.warns(QualmsWarning, match="taken for eV") as caught:
        calc = Calculator(model)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calc.map(lambda member: member.get_potential_energy(waters(1)[0]))
        for name in ("eV", "ev"):
            Calculator(make_model("energy", units=name, **small).fit(waters(30)))


def test_an_element_that_the_model_does_not_know(water_model):
    atoms = molecule("SH2")
    atoms.calc = Calculator(water_model)
    with pytest.raises(InputError, match="S"):
        atoms.get_forces()
