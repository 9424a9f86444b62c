"""Limits of uncertainties along simulations."""

import copy
import errno
import os
import pickle
import warnings

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.calculators.calculator import PropertyNotImplementedError
from ase.md.langevin import Langevin
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE
from checks import rejects
from fake_potential import PairCommittee

from qualms import QualmsWarning
from qualms.ase import Calculator, UncertaintyError, Watch


@pytest.fixture
def committee():
    return PairCommittee()


@pytest.fixture
def atoms():
    """A bent molecule that is not at rest."""
    return Atoms("OH2", [[0, 0, 0], [1.3, 0.1, 0], [-0.3, 1.1, 0.2]])


@pytest.fixture
def hot(alloys):
    """A structure unlike those of the training set of `force_model`."""
    hot = alloys[0].copy()
    hot.calc = None
    hot.rattle(0.35, seed=3)
    return hot


def lengths(of_forces):
    return np.linalg.norm(of_forces, axis=-1)


# --- limits ---


def test_limits_are_multiples_of_out_of_bag_errors(force_model):
    record, points = force_model.record.quantities, force_model.out_of_bag["forces"]
    watch = Calculator(force_model, Watch(energy="2rmse", forces="1.5 × rmse", novelty=1.2)).watch
    largest = []
    for structure in np.unique(points.structure):
        some = points.structure == structure
        vectors = {}
        for z, of_vector in zip(points.residuals[some], points.ensemble_std[some], strict=True):
            vectors.setdefault(of_vector, []).append(z)
        largest.append(max(np.linalg.norm(z) for z in vectors.values()))
    rmse = np.sqrt(np.mean(np.square(largest)))
    expected = {"energy": 2 * record["energy"].rmse, "forces": 1.5 * rmse, "novelty": 1.2}
    assert watch.limits == pytest.approx(expected)
    assert f"{1.5 * rmse:.3g} eV/Å" in repr(watch)
    # Without any limit, that of the forces, if the model learned them.
    assert Calculator(force_model, Watch()).watch.limits == pytest.approx({"forces": 1.5 * rmse})


def test_ordinary_structures_are_within_the_default_limit(force_model, alloys, hot):
    limit = Calculator(force_model, Watch()).watch.limits["forces"]
    new = force_model.predict(alloys[26:], forces=True)
    assert np.mean([std.max() > limit for std in new.force_std]) <= 0.2
    assert lengths(force_model.predict(hot, forces=True).forces.std).max() > limit


def test_energy_is_the_default_of_models_of_energies(energy_model):
    # in eV for the calculator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QualmsWarning)
        watch = Calculator(energy_model, Watch()).watch
    rmse = energy_model.record.quantities["energy"].rmse
    assert watch.limits == pytest.approx({"energy": 1.5 * rmse})


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"forces": -1.0}, "forces"),
        ({"forces": 0}, "forces"),
        ({"forces": "much"}, "forces"),
        ({"energy": "0 rmse"}, "energy"),
        ({"energy": float("nan")}, "energy"),
        ({"novelty": "2 rmse"}, "novelty"),
        ({"upper": 0.5}, "upper"),
        ({"action": "shout"}, "action"),
        ({"action": None}, "action"),
        ({"min_steps": 0}, "min_steps"),
        ({"min_novelty": -1}, "min_novelty"),
    ],
)
def test_bad_limits(options, parameter):
    with rejects(parameter):
        Watch(**options)


def test_bad_models(committee, force_model, energy_model):
    for watch, parameter in (
        (Watch(), "energy"),  # no out-of-bag errors
        (Watch(forces="1 rmse"), "forces"),
        (Watch(novelty=1.0), "watch"),
        (Watch(extrapolation=True), "watch"),
        (0.3, "watch"),
    ):
        with rejects(parameter):
            Calculator(committee, watch)
    assert not energy_model.fitted.representation.has_derivatives
    with rejects("forces"):
        Calculator(energy_model, Watch(forces=0.1, energy=0.1))
    for model, other in ((committee, force_model), (force_model, committee)):
        watch = Watch(forces=1.0)
        Calculator(model, watch)
        Calculator(model, watch)
        with rejects("watch"):
            Calculator(other, watch)
    Calculator(force_model, watch := Watch(forces=1.0), threads=1)
    Calculator(force_model, watch, threads=2)


# --- actions ---


def test_a_warning_is_issued_when_the_limit_is_crossed(committee, atoms):
    std = committee.predict([atoms]).std[0] / 3
    atoms.calc = Calculator(committee, Watch(energy=0.9 * std))
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", QualmsWarning)
        atoms.positions[0] += 1e-6
        atoms.get_potential_energy()  # still beyond: no second warning
        far = atoms.copy()
        far.positions[1:] += [[10, 0, 0], [0, 20, 0]]
        far.calc = atoms.calc
        far.get_potential_energy()  # without pairs, members agree
    with pytest.warns(QualmsWarning):
        atoms.get_potential_energy()


def test_steps_without_uncertainties_of_forces_repeat_no_warning(force_model, hot):
    hot.calc = Calculator(force_model, Watch(1e-9), forces_uncertainty_every=2)
    with pytest.warns(QualmsWarning, match="beyond"):
        hot.get_forces()
    with warnings.catch_warnings():
        warnings.simplefilter("error", QualmsWarning)
        for _ in range(4):
            hot.positions[0] += 1e-6
            hot.get_potential_energy()
            hot.get_forces()
    assert hot.calc.watch.trusted is None


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_an_error_stops_a_simulation_whatever_the_orientation(committee, atoms, share):
    std = lengths(committee.predict([atoms], forces=True).forces.std)
    calc = Calculator(committee, Watch(forces=share * std.max(), action="raise"))
    for angle in (0, 25, 70):
        turned = atoms.copy()
        turned.rotate(angle, (1, 2, 3))
        turned.info["REF_energy"] = -1.0
        turned.calc = calc
        turned.get_potential_energy()
        for _ in range(2):  # nor does a second attempt pass
            if share > 1:
                turned.get_forces()
                continue
            with pytest.raises(UncertaintyError) as caught:
                turned.get_forces()
            for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
                assert (error.quantity, error.atom) == ("forces", std.argmax())
                assert error.value == pytest.approx(std.max())
                assert error.limit == pytest.approx(share * std.max())
                np.testing.assert_array_equal(error.atoms.positions, turned.positions)
                # Labels and predictions of other structures do not stay with it.
                assert not error.atoms.info
                assert {*error.atoms.arrays} == {"numbers", "positions"}


def test_a_function_is_called_once_for_a_structure_and_quantity(committee, atoms):
    seen = []
    watch = Watch(1e-9, 1e-9, action=lambda atoms, error: seen.append(error))
    atoms.calc = Calculator(committee, watch)
    atoms.get_potential_energy()
    assert len(seen) == 1
    atoms.get_forces()  # another limit
    assert len(seen) == 2
    atoms.get_potential_energy(), atoms.get_forces(), atoms.calc.get_property("forces", atoms)
    assert len(seen) == 2
    VelocityVerlet(atoms, 0.5 * units.fs).run(3)
    assert len(seen) == 5


@pytest.mark.parametrize("kind", ["function", "file"])
def test_energies_that_come_first_do_not_change_the_steps(committee, atoms, tmp_path, kind):
    """Such as in line searches: the forces of the same structure are beyond their limit, too."""
    seen, path = [], tmp_path / "uncertain.xyz"

    def collect(_, error):
        seen.append(error.quantity)

    watch = Watch(1e-9, 1e-9, min_steps=3, action=path if kind == "file" else collect)
    atoms.calc = Calculator(committee, watch)
    for _ in range(6):
        atoms.get_potential_energy()
        atoms.get_forces()
        atoms.positions[0] += 1e-3
    if kind == "file":
        assert [one.info["watch_step"] for one in ase.io.read(path, ":")] == [1, 4]
    else:
        assert seen == ["energy", "forces"] * 2


def test_an_error_belongs_to_its_structure(committee, atoms):
    """Also if the next structure has no stress."""
    std = lengths(committee.predict([atoms], forces=True).forces.std).max()
    atoms.calc = Calculator(committee, Watch(0.9 * std, action="raise"))
    with pytest.raises(UncertaintyError):
        atoms.get_forces()
    atoms.positions[1:] += [[10, 0, 0], [0, 20, 0]]  # without pairs, members agree
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    assert not atoms.get_forces().any()


def test_structures_with_errors_can_be_written(committee, atoms, tmp_path):
    atoms.calc = Calculator(committee, Watch(1e-9, action="raise"))
    with pytest.raises(UncertaintyError):
        atoms.get_forces()
    for name in ("stopped.traj", "stopped.xyz"):
        ase.io.write(tmp_path / name, atoms)
        found = ase.io.read(tmp_path / name)
        np.testing.assert_allclose(found.get_forces(), atoms.calc.results["forces"], atol=1e-7)


def test_structures_are_added_to_a_new_file(committee, atoms, tmp_path):
    path = tmp_path / "uncertain.xyz"
    atoms.info |= {"charge": -1, "energy": 5.0}
    frames = []
    atoms.calc = Calculator(committee, Watch(1e-9, action=path, min_steps=4))
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(lambda: frames.append(atoms.copy()))
    dynamics.run(9)
    found = ase.io.read(path, ":")
    assert [one.info["watch_step"] for one in found] == [1, 5, 9]
    for one, frame in zip(found, frames[::4], strict=True):
        np.testing.assert_array_equal(one.positions, frame.positions)
        assert one.info.keys() == {"charge", "watch_step", "watch_reason"}
        assert one.calc is None  # no predictions that could be taken for labels
    with rejects("action"):
        Watch(action=path)
    again = ase.io.read(path, ":")
    assert len(again) == 3


def test_a_file_that_appears_is_not_changed(committee, atoms, tmp_path):
    path = tmp_path / "uncertain.xyz"
    atoms.calc = Calculator(committee, Watch(1e-9, action=path))
    path.write_text("of somebody else")
    for _ in range(2):
        with pytest.raises(FileExistsError):
            atoms.get_forces()
        atoms.positions[0] += 1e-3
    assert path.read_text() == "of somebody else"


def test_a_file_stays_where_it_is(committee, atoms, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    atoms.calc = Calculator(committee, Watch(1e-9, action="uncertain.xyz"))
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        monkeypatch.chdir(folder)
        atoms.get_forces()
        atoms.positions[0] += 1e-3
    assert len(ase.io.read(tmp_path / "uncertain.xyz", ":")) == 2


def test_a_full_disk_leaves_no_part_of_a_structure(committee, atoms, tmp_path, monkeypatch):
    path, space, write = tmp_path / "uncertain.xyz", 500, os.write

    def write_some(file, data):
        nonlocal space
        if not space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = write(file, data[:space])
        space -= n
        return n

    atoms.calc = Calculator(committee, Watch(1e-9, action=path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        atoms.get_forces()
        for _ in range(2):
            atoms.positions[0] += 1e-3
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                atoms.get_forces()
    assert len(ase.io.read(path, ":")) == 1
    atoms.positions[0] += 1e-3
    atoms.get_forces()
    assert [one.info["watch_step"] for one in ase.io.read(path, ":")] == [1, 4]


def test_unphysical_structures_are_errors_whatever_the_action(committee, atoms):
    std = lengths(committee.predict([atoms], forces=True).forces.std).max()
    seen = []
    for upper, stops in ((2.1, False), (1.9, True)):
        watch = Watch(0.5 * std, action=lambda *given: seen.append(given), upper=upper)
        one = atoms.copy()
        one.calc = Calculator(committee, watch)
        if not stops:
            one.get_forces()
            assert len(seen) == 1
            continue
        with pytest.raises(UncertaintyError):
            one.get_forces()
    assert len(seen) == 1


def test_a_simulation_goes_back_to_the_last_trusted_structure(committee, atoms):
    frames, values = [], []

    def record():
        frames.append(atoms.positions.copy())
        values.append(lengths(atoms.calc.results["forces_uncertainty"]).max())

    def run(watch):
        frames.clear(), values.clear()
        atoms.positions, atoms.calc = start, Calculator(committee, watch)
        atoms.set_momenta(np.zeros((3, 3)))
        options = {"temperature_K": 2000, "friction": 0.01, "fixcm": False}
        rng = np.random.RandomState(0)
        dynamics = Langevin(atoms, 0.5 * units.fs, rng=rng, **options)
        dynamics.attach(record)
        dynamics.run(60)

    start = atoms.positions.copy()
    run(None)
    # The first frame beyond is in the middle.
    limit = max(values[:30]) * 1.0001
    first = int(np.argmax(np.array(values) > limit))
    assert first >= 30
    before = frames[first - 1]
    watch = Watch(limit, action="raise")
    with pytest.raises(UncertaintyError):
        run(watch)
    assert len(frames) == first
    np.testing.assert_allclose(watch.trusted.positions, before)


@pytest.mark.parametrize("is_shared", [False, True])
def test_optimisers_and_bands(committee, atoms, tmp_path, is_shared):
    atoms.calc = Calculator(committee, Watch(1e-9, action="raise"))
    with pytest.raises(UncertaintyError):
        BFGS(atoms, logfile=None).run(steps=5)
    ends = [atoms.copy(), atoms.copy()]
    ends[1].positions[1] += [0, 0.4, 0]
    images = [ends[0], *(ends[0].copy() for _ in range(3)), ends[1]]
    path = tmp_path / "band.xyz"
    first = Calculator(committee, Watch(1e-9, action=path))
    for image in images:
        image.calc = first if is_shared else copy.deepcopy(first)
    band = NEB(images, method="improvedtangent", allow_shared_calculator=is_shared)
    band.interpolate()
    FIRE(band, logfile=None).run(steps=1)
    # Those between the ends, in each of two evaluations; of the ends, energies alone are needed.
    found = ase.io.read(path, ":")
    assert len(found) == len({one.positions.tobytes() for one in found}) == 6


def test_copies_share_the_watch(force_model, hot):
    seen = []
    calc = Calculator(force_model, Watch(1e-9, action=lambda *given: seen.append(given)))
    for _ in range(3):
        hot.positions[0] += 1e-3
        one = hot.copy()
        one.calc = copy.deepcopy(calc)
        one.get_forces()
    assert len(seen) == 3
    assert one.calc.watch is calc.watch


# --- trained models ---


def test_novelty_and_extrapolation(force_model, alloys, hot):
    for watch in (Watch(novelty=1.0, action="raise"), Watch(extrapolation=True, action="raise")):
        calm = alloys[0].copy()
        calm.calc = hot.calc = Calculator(force_model, watch)
        calm.get_forces()
        with pytest.raises(UncertaintyError) as caught:
            hot.get_forces()
        error = caught.value
        predicted = force_model.predict(hot)
        if error.quantity == "novelty":
            atom_novelty = force_model.predict(hot, atoms=True).atom_novelty[0]
            assert error.atom == atom_novelty.argmax()
            assert error.value == pytest.approx(predicted.novelty[0])
        else:
            assert predicted.reasons[0] in str(error)


def test_similar_structures_are_passed_on_once(force_model, hot):
    seen = []
    watch = Watch(1e-9, min_novelty=0.1, action=lambda atoms, error: seen.append(atoms.copy()))
    calc, rng = Calculator(force_model, watch), np.random.default_rng(0)
    others = hot.copy()
    others.rattle(0.5, seed=8)
    for _ in range(4):
        for start in (hot, others):
            one = start.copy()
            # The same up to small displacements, a rotation and the order of the atoms.
            one.positions += 1e-3 * rng.normal(size=one.positions.shape)
            one = one[rng.permutation(len(one))]
            one.rotate(40, (1, 1, 0), rotate_cell=True)
            one.calc = calc
            one.get_forces()
    assert len(seen) == 2


# --- labels ---


def test_labels_show_that_the_calibration_no_longer_holds(force_model, alloys):
    new, watch = alloys[26:], Watch()
    with rejects("watch"):
        watch.check_labels(new)
    Calculator(force_model, watch)
    assert watch.calibration_test is None
    one_by_one = [watch.check_labels(atoms).e_value for atoms in new]  # a warning is an error
    test = watch.calibration_test
    assert test.n_labels == len(new)
    assert not test.alarm
    other = Watch()
    Calculator(force_model, other)
    assert other.check_labels(new).e_value == one_by_one[-1]
    assert pickle.loads(pickle.dumps(watch)).calibration_test.e_value == one_by_one[-1]

    wrong = [atoms.copy() for atoms in new]
    for atoms, of in zip(wrong, new, strict=True):
        prediction = force_model.predict(of, forces=True).forces
        atoms.arrays["force"] = prediction.mean + 3 * (of.arrays["force"] - prediction.mean)
    with pytest.warns(QualmsWarning, match="no longer holds"):
        watch.check_labels(wrong)
    assert test.alarm
    watch.check_labels(wrong)  # the warning is not repeated


def test_labels_that_cannot_be_compared(force_model, energy_model, committee, alloys):
    watch = Watch()
    Calculator(force_model, watch)
    bare = alloys[26].copy()
    del bare.arrays["force"]
    with rejects("frames") as error:
        watch.check_labels([alloys[27], bare])
    assert "Structure 1" in str(error.value)
    with rejects("frames"):
        watch.check_labels(Atoms("C", info={"energy": 1.0}))
    assert watch.calibration_test is None
    other = Watch(energy=0.1)
    Calculator(committee, other)
    with rejects("watch"):
        other.check_labels(alloys[26])
