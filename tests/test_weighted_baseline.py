"""A learned potential that falls back to a robust one: energies, and forces that belong to them."""

import copy
import pickle

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet
from fake_potential import PairCommittee
from finite_differences import numerical_forces, numerical_stress
from test_calculator import drift

from qualms import InputError
from qualms.ase import Calculator, WeightedBaseline
from qualms.atomistic.labels import find_label


class Members(AseCalculator):
    """Somebody else's committee: members, and nothing calibrated."""

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


@pytest.fixture
def atoms():
    return Atoms("OH2", [[0, 0, 0], [1.3, 0.1, 0], [-0.3, 1.1, 0.2]])


@pytest.fixture
def crystal():
    crystal = bulk("Cu", "fcc", a=1.75).repeat((2, 1, 1))
    crystal.rattle(0.04, seed=1)
    return crystal


def learned(kind="calibrated"):
    committee = PairCommittee(spread=0.1)
    return Calculator(committee) if kind == "calibrated" else Members(committee)


@pytest.mark.parametrize("kind", ["calibrated", "members"])
@pytest.mark.parametrize("learns", ["total", "difference"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_forces_include_the_derivative_of_the_weight(atoms, kind, learns, factor):
    std = np.std(learned("members").get_property("energy_ensemble", atoms), ddof=1)
    atoms.calc = WeightedBaseline(learned(kind), baseline(), factor * std, learns=learns)
    forces = atoms.get_forces()
    np.testing.assert_allclose(forces, numerical_forces(atoms, 1e-4), atol=2e-6)
    # It matters: without it forces would be others.
    calc, w = atoms.calc, atoms.calc.results["weight"]
    assert 0.01 < w < 0.99
    correction = calc.learned.get_forces(atoms)
    if learns == "total":
        correction = correction - calc.baseline.get_forces(atoms)
    without = calc.baseline.get_forces(atoms) + w * correction
    assert np.abs(forces - without).max() > 1e-3


def test_stress_includes_the_derivative_of_the_weight(crystal):
    std = learned().get_property("energy_uncertainty", crystal)
    crystal.calc = WeightedBaseline(learned(), baseline(), std)
    np.testing.assert_allclose(crystal.get_stress(), numerical_stress(crystal, 1e-5), atol=1e-6)
    assert (
        "stress" not in WeightedBaseline(learned("members"), baseline(), 1.0).implemented_properties
    )


def test_energies_are_averaged_by_inverse_variances(atoms):
    model = learned()
    std = model.get_property("energy_uncertainty", atoms)
    atoms.calc = WeightedBaseline(model, baseline(), 2 * std)
    energies = np.array([c.get_potential_energy(atoms) for c in (model, atoms.calc.baseline)])
    weights = 1 / np.array([std, 2 * std]) ** 2
    assert atoms.get_potential_energy() == pytest.approx(np.average(energies, weights=weights))
    assert atoms.calc.results["weight"] == pytest.approx(0.8)
    assert atoms.calc.get_property("energy_uncertainty", atoms) == pytest.approx(
        1 / np.sqrt(weights.sum())
    )


def test_a_sure_model_stays_and_an_unsure_one_goes(atoms):
    for uncertainty, kept in ((1e4, 1.0), (1e-4, 0.0)):
        model, base = learned(), baseline()
        atoms.calc = WeightedBaseline(model, base, uncertainty)
        alone = model if kept else base
        np.testing.assert_allclose(atoms.get_forces(), alone.get_forces(atoms), atol=1e-4)
        assert atoms.calc.results["weight"] == pytest.approx(kept, abs=1e-4)


def test_copies(atoms):
    calc = WeightedBaseline(learned(), baseline(), 0.5)
    forces = calc.get_forces(atoms)
    for again in (copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):
        moved = atoms.copy()
        moved.rattle(0.1, seed=0)
        again.get_forces(moved)
        np.testing.assert_allclose(again.get_forces(atoms), forces)
    assert copy.deepcopy(calc).learned.model is calc.learned.model


def test_members_that_agree_are_believed(atoms):
    model = Members(PairCommittee(spread=0.0))
    atoms.calc = WeightedBaseline(model, baseline(), 0.1)
    np.testing.assert_allclose(atoms.get_forces(), model.get_forces(atoms))


def test_it_conserves_energy_where_the_weight_changes(atoms):
    """What the energy fluctuates by is the error of Verlet's method, quadratic in the step."""
    fluctuations = []
    for timestep in (0.2, 0.1):
        weights, moving = [], atoms.copy()
        moving.calc = WeightedBaseline(learned(), baseline(), 0.5)
        _, fluctuation = drift(
            moving, 0.06, timestep, lambda m=moving, w=weights: w.append(m.calc.results["weight"])
        )
        assert np.ptp(weights) > 0.1
        fluctuations.append(fluctuation)
    assert fluctuations[0] / fluctuations[1] == pytest.approx(4.0, rel=0.15)


def test_it_keeps_simulations_alive():
    """Beyond the data members may say anything: these want atoms to fuse, and disagree how much."""
    committee = PairCommittee(n_members=6, spread=0.02)
    committee.depth[0] = -8.0
    model, closest = Calculator(committee), []
    for calc in (model, WeightedBaseline(model, baseline(), 0.05)):
        atoms = Atoms("N2", [[0, 0, 0], [1.0, 0, 0]], calculator=calc)
        dynamics, distances = VelocityVerlet(atoms, 0.5 * units.fs), []
        dynamics.attach(lambda atoms=atoms, d=distances: d.append(atoms.get_distance(0, 1)))
        dynamics.run(60)
        closest.append(min(distances))
    alone, robust = closest
    assert alone < 0.3
    assert robust > 0.8


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((baseline(), baseline(), 1.0), "energy_ensemble"),
        ((learned(), baseline(), 0.0), "baseline_uncertainty"),
        ((learned(), "emt", 1.0), "baseline='emt' .*an ASE calculator"),
        ((PairCommittee(), baseline(), 1.0), r"learned=.*Use qualms.ase.Calculator\(model\)"),
        ((learned(), baseline, 1.0), "baseline="),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(InputError, match=match):
        WeightedBaseline(*arguments)


def test_files_have_the_weight_and_the_error_bar(atoms, tmp_path):
    atoms.info["energy_ensemble"] = np.zeros(3)  # of some other calculator
    atoms.calc = WeightedBaseline(learned(), baseline(), 0.5)
    atoms.get_forces()
    ase.io.write(tmp_path / "out.xyz", atoms)
    again = ase.io.read(tmp_path / "out.xyz")
    for name in ("weight", "energy_uncertainty"):
        assert again.info[name] == pytest.approx(atoms.calc.results[name])
    assert "energy_ensemble" not in again.info
    assert find_label(again, "energy", False) is None
    # Computed again, it is a label, also from a file.
    copied = atoms.copy()
    copied.calc = baseline()
    energy = copied.get_potential_energy()
    assert find_label(copied, "energy", False)[0] == energy
    ase.io.write(tmp_path / "label.xyz", copied)
    assert find_label(ase.io.read(tmp_path / "label.xyz"), "energy", False)[0] == energy


def test_structures_may_be_left_alone(atoms):
    atoms.calc = WeightedBaseline(learned(), baseline(), 0.5, annotate=False)
    atoms.get_forces()
    assert not atoms.info


def test_what_is_learned_is_one_of_two_things():
    with pytest.raises(InputError, match="'total' or 'difference'"):
        WeightedBaseline(learned(), baseline(), 1.0, learns="everything")


def test_forces_of_members_must_have_the_shape_they_should(atoms):
    wrong = Members(PairCommittee(), shape=(3, -1))
    atoms.calc = WeightedBaseline(wrong, baseline(), 1.0)
    atoms.get_potential_energy()
    with pytest.raises(InputError, match="forces_ensemble of shape"):
        atoms.get_forces()
