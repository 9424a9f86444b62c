"""Δ-learning: models of differences from a baseline potential."""

import json

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from atomistic_fixtures import (
    ENERGY,
    SMALL,
    SMOOTH,
    copies,
    labelled_alloys,
    make_force_model,
    make_model,
)
from checks import rejects
from test_cli import qualms

from qualms import AtomisticModel
from qualms.ase import Calculator
from qualms.atomistic import delta
from qualms.atomistic.delta import NetworkPotential, make_baseline_potential
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.settings import make_settings
from qualms.data import qm9
from qualms.errors import QualmsWarning
from qualms.features.base import PotentialValues

LJ = {"sigma": 2.2, "epsilon": 0.05, "rc": 5.0, "smooth": True}
PATH = "ase.calculators.lj:LennardJones"
BASELINE = {"calculator": PATH, "arguments": LJ}
KEYS = {"key": "lj_energy", "forces": "lj_forces", "stress": "lj_stress"}
N_TRAIN = 26


class Failing(EMT):
    """EMT that fails for structures with three atoms of aluminium or more."""

    n_calls = 0

    def calculate(self, atoms=None, *args, **kwargs):
        Failing.n_calls += 1
        if np.sum(atoms.numbers == 13) > 2:
            raise RuntimeError("no convergence\nafter 100 steps")
        super().calculate(atoms, *args, **kwargs)


FAILING = f"{__name__}:Failing"


def values_of(calculator, atoms):
    """Energy, forces and stress by a calculator."""
    atoms = atoms.copy()
    atoms.calc = calculator
    return atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()


@pytest.fixture(scope="module")
def totals(alloys):
    """The alloys with labels of EMT + Lennard-Jones, and those of the latter alone."""
    frames = copies(alloys)
    for atoms in frames:
        energy, forces, stress = values_of(LennardJones(**LJ), atoms)
        atoms.info["lj_energy"], atoms.info["lj_stress"] = energy, stress
        atoms.arrays["lj_forces"] = forces
        atoms.info["energy"] += energy
        atoms.info["virtual"] = atoms.info["virtual"] + stress
        atoms.arrays["force"] = atoms.arrays["force"] + forces
    return frames


#: Given noise: rounding would change a noise that is selected by as much as its optimum is flat.
SETTINGS = {"basis": "environments", "units": "eV", "stress": "virtual", "noise": 1e-6}
SETTINGS |= {"forces_noise": 1e-4, "stress_noise": 1e-6}


@pytest.fixture(scope="module")
def model(totals):
    """A model of EMT + Lennard-Jones with the latter as its baseline."""
    return make_force_model(baseline=BASELINE, **SETTINGS).fit(totals[:N_TRAIN])


@pytest.fixture(scope="module")
def learned(alloys):
    """A model of the differences, which are the labels of EMT."""
    return make_force_model(**SETTINGS).fit(alloys[:N_TRAIN])


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("delta") / "model.safetensors"
    model.save(file)
    return file


# --- predictions ---


def test_a_model_equals_one_of_the_differences(model, learned, totals):
    new = totals[N_TRAIN:]
    energies, forces, stresses = zip(
        *(values_of(LennardJones(**LJ), atoms) for atoms in new), strict=True
    )
    shift, total, difference = np.array(energies), model.predict(new), learned.predict(new)
    atol = 1e-4 * difference.std.min()
    for a, b in (
        (total.members, difference.members + shift[:, None]),
        (total.uncalibrated.members, difference.uncalibrated.members + shift[:, None]),
        (total.interval(0.8, "conformal"), np.add(difference.interval(0.8, "conformal"), shift)),
        (model.predict_pp(new)[0], learned.predict_pp(new)[0] + shift),
        (model.predict_pp(new)[1], learned.predict_pp(new)[1]),
        ([atoms.mean.sum() for atoms in model.predict(new, atoms=True).atoms], difference.mean),
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
    np.testing.assert_array_equal(total.extrapolates, difference.extrapolates)
    shifts = {"energy": shift, "forces": np.concatenate(forces), "stress": np.array(stresses)}
    total, difference = (m.predict(new, stress=True, forces=True) for m in (model, learned))
    for name, shift in shifts.items():
        a, b = getattr(total, name), getattr(difference, name)
        atol = 1e-4 * b.std.max()
        np.testing.assert_allclose(a.members, b.members + shift[..., None], 0, atol)
        np.testing.assert_allclose(a.std, b.std, 0, atol)


def test_evaluation_is_that_of_the_differences(model, learned, totals, alloys):
    total, difference = evaluate(model, totals[N_TRAIN:]), evaluate(learned, alloys[N_TRAIN:])
    assert {*total} == {"energy", "forces", "stress"}
    for name, evaluation in total.items():
        assert [*evaluation.scores] == [*difference[name].scores]
        for method, scores in evaluation.scores.items():
            expected = difference[name].scores[method]
            assert scores.rmse == pytest.approx(expected.rmse, rel=1e-5)
            assert scores.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-5)
    y = [atoms.info["energy"] / len(atoms) for atoms in totals[N_TRAIN:]]
    np.testing.assert_allclose(total["energy"].y, y)


@pytest.mark.parametrize("member", [None, 2])
def test_calculators_have_the_derivatives_of_the_total_energy(model, totals, member):
    atoms, h = totals[30].copy(), 1e-3

    def with_calculator(atoms):
        atoms = atoms.copy()
        calculator = Calculator(model)
        atoms.calc = calculator if member is None else calculator.member(member)
        return atoms

    def slope(shift=0.0, strain=0.0):
        energies = []
        for sign in (1, -1):
            changed = with_calculator(atoms)
            changed.set_cell(atoms.cell.array * (1 + sign * strain * np.eye(3)[0]), True)
            changed.positions[1, 2] += sign * shift
            energies.append(changed.get_potential_energy())
        return (energies[0] - energies[1]) / (2 * h)

    computed = with_calculator(atoms)
    assert computed.get_forces()[1, 2] == pytest.approx(-slope(shift=h), abs=2e-5)
    assert computed.get_stress()[0] == pytest.approx(slope(strain=h) / atoms.cell.volume, abs=1e-5)
    alone = with_calculator(atoms).get_potential_energy()  # without forces
    assert computed.get_potential_energy() == pytest.approx(alone, abs=1e-8)
    atoms.pbc = False
    molecule = with_calculator(atoms).get_forces()
    atoms.cell = None
    np.testing.assert_allclose(with_calculator(atoms).get_forces(), molecule, atol=1e-10)


def test_values_of_keys_and_of_a_calculator_are_the_same(model, path, totals, alloys, tmp_path):
    by_keys = make_force_model(baseline=KEYS, **SETTINGS).fit(totals[:N_TRAIN])
    by_keys.save(tmp_path / "model")
    by_calculator = AtomisticModel.load(tmp_path / "model", baseline=BASELINE)
    replaced = AtomisticModel.load(path, baseline={"key": "lj_energy"})  # other keys are derived
    new = totals[N_TRAIN:]
    expected = model.predict(new, stress=True, forces=True)
    for other in (by_keys, by_calculator, replaced):
        prediction = other.predict(new, stress=True, forces=True)
        for name in ("energy", "forces", "stress"):
            a, b = getattr(prediction, name), getattr(expected, name)
            np.testing.assert_allclose(a.members, b.members, 0, 1e-4 * b.std.max())
    atoms = new[4].copy()
    atoms.calc = Calculator(by_calculator)
    forces = model.predict([atoms], forces=True)[0].forces.mean
    np.testing.assert_allclose(atoms.get_forces(), forces, atol=1e-6)
    with rejects("model"):  # atoms move, their keys do not change
        Calculator(by_keys)
    with rejects("frames[0]"):
        by_keys.predict(alloys[N_TRAIN:])
    lacking = copies(new)
    del lacking[2].arrays["lj_forces"]
    by_keys.predict(lacking)
    with rejects("frames[2]"):
        by_keys.predict(lacking, forces=True)
    assert by_keys.summary().splitlines()[6].endswith("key 'lj_energy', then composition")


def test_energies_are_converted_to_the_units_of_the_labels(rich):
    """Labels in eV and in meV give the same model."""
    frames = [atoms for i, atoms in enumerate(rich) if i not in (3, 11)]
    predictions = []
    for units, factor in (("eV", 1.0), ("meV", 1000.0)):
        scaled = copies(frames)
        for atoms in scaled:
            atoms.info["energy"] *= factor
        settings = {"units": units, "baseline": "ase.calculators.emt:EMT"}
        model = make_model("energy", calibration="student", **settings).fit(scaled)
        predictions.append(model.predict(frames) / factor)
    in_eV, in_meV = predictions
    np.testing.assert_allclose(in_eV.members, in_meV.members, rtol=0, atol=1e-4 * in_eV.std.min())


def test_isolated_atoms_are_differences_too():
    """Compositions of one alloy do not determine the energies of two elements."""
    frames = labelled_alloys(24)[::2]
    for symbol in ("Cu", "Al"):
        atom = Atoms(symbol, info={"config_type": "isolated_atom", "energy": 5.0, "lj_energy": 2.0})
        frames.append(atom)
    for atoms in frames[:-2]:
        atoms.info["lj_energy"] = values_of(LennardJones(**LJ), atoms)[0] + 2.0 * len(atoms)
    settings = {"calibration": "student", "baseline": {"key": "lj_energy"}}
    model = make_model("energy", **settings).fit(frames)
    assert model.fitted.baseline.name == "atoms"
    assert model.fitted.baseline.full.tolist() == [3.0, 3.0]


def test_a_baseline_that_does_not_help_is_noticed(alloys):
    frames = copies(alloys[:N_TRAIN])
    for atoms in frames:
        atoms.info["wrong_energy"] = -30 * atoms.info["energy"]
    with pytest.warns(QualmsWarning, match="does not help"):
        make_model("energy", baseline={"key": "wrong_energy"}).fit(frames)


# --- failures ---


@pytest.fixture
def rich():
    """Alloys, two of which are rich in aluminium, labelled by EMT and something smooth."""
    frames = labelled_alloys(20)
    for i in (3, 11):
        frames[i].symbols[:3] = "Al"
    for atoms in frames:
        atoms.info["energy"] += 0.01 * atoms.get_all_distances(mic=True).sum()
    return frames


def test_structures_that_fail_are_named_or_left_out(rich):
    model = make_model("energy", baseline=FAILING, calibration="student")
    with rejects("frames[3]"):
        model.fit(rich)
    with pytest.warns(QualmsWarning, match=r"structure 3 .*structure 11 "):
        model.fit(rich, groups=[i // 2 for i in range(20)], skip_failed=True)
    assert model.record.n_structures == 18
    assert model.record.quantities["energy"].n_without == 2
    assert 3 not in model.fitted.origins[:, 0]
    with rejects("frames[3]"):
        model.predict(rich)
    with pytest.warns(QualmsWarning, match="structure 3 "):
        computable = [i for i, _ in model.baseline_potential.computable(enumerate(rich))]
    assert {*computable} == {*range(20)} - {3, 11}
    with rejects("frames[3]"):
        evaluate(model, rich)
    with pytest.warns(QualmsWarning, match="left out"):
        evaluation = evaluate(model, rich, skip_failed=True)["energy"]
    assert {*evaluation.structure} == {*range(20)} - {3, 11}


def test_values_are_computed_once(rich):
    frames = [atoms for i, atoms in enumerate(rich) if i not in (3, 11)]
    Failing.n_calls = 0
    settings = {"baseline": FAILING, "calibration": "student"}
    model = make_force_model(**settings).fit(frames)
    assert Failing.n_calls == len(frames)
    evaluate(model, frames)
    model.predict(frames, stress=True, forces=True)
    assert Failing.n_calls == len(frames)


def test_no_more_is_remembered_than_is_allowed(rich, monkeypatch):
    monkeypatch.setattr(delta, "REMEMBERED", 60)
    settings = make_settings({"target": "energy", "baseline": FAILING})
    potential = make_baseline_potential(settings, confirmed=settings.baseline_potential)
    Failing.n_calls = 0
    # An energy, twelve forces and six stresses of each structure: those of four are forgotten.
    for first, last, n_calls in ((4, 7, 3), (4, 7, 3), (12, 16, 7), (12, 16, 11)):
        potential.evaluate(rich[first:last], forces=True)
        assert Failing.n_calls == n_calls


class Wrong(EMT):
    """Results that cannot be used."""

    def calculate(self, *args, **kwargs):
        super().calculate(*args, **kwargs)
        self.results["energy"] = np.nan


@pytest.mark.parametrize("name", ["Wrong", "NoSuch", "no_calculator"])
def test_calculators_that_cannot_be_used(name, rich):
    model = make_model("energy", baseline=f"{__name__}:{name}")
    with rejects("frames[0]" if name == "Wrong" else "baseline"):
        model.fit(rich)


def no_calculator():
    return 3


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"baseline": "tblite:GFN3"}, "baseline"),
        ({"baseline": "backbone:1"}, "baseline"),
        ({"baseline": "os.system:ls -l"}, "baseline"),
        ({"baseline": ":"}, "baseline"),
        ({"baseline": {"calculator": PATH, "key": "e"}}, "baseline"),
        ({"baseline": {"calculator": PATH, "forces": "e"}}, "baseline"),
        ({"baseline": {"calculator": PATH, "argument": {}}}, "baseline"),
        ({"baseline": {"calculator": "backbone", "arguments": {"a": 1}}}, "baseline"),
        ({"baseline": {"calculator": "tblite:GFN2-xTB", "arguments": {"mixer": 1}}}, "baseline"),
        ({"baseline": {"calculator": "sevennet:/tmp/model.pth"}}, "baseline"),
        ({"baseline": {"key": ""}}, "baseline"),
        ({"baseline": {"key": "energy"}}, "baseline"),
        ({"baseline": {"key": "xtb_energy"}, "kind": "intensive"}, "baseline"),
        ({"baseline": PATH, "kind": "atomic"}, "baseline"),
        ({"baseline": PATH, "units": "K"}, "units"),
        ({"baseline": {"key": "e", "then": {"H": "x"}}}, "baseline['H']"),
    ],
)
def test_invalid_baselines(settings, parameter):
    with rejects(parameter):
        AtomisticModel("energy", **settings)


# --- files ---


def test_files_name_a_calculator_but_do_not_import_it(model, path, totals, monkeypatch):
    def never(name):
        raise AssertionError(name)

    new, expected = totals[N_TRAIN:], model.predict(totals[N_TRAIN:])
    with monkeypatch.context() as patch:
        patch.setattr(delta.importlib, "import_module", never)
        delta.load_calculator.cache_clear()
        loaded = AtomisticModel.load(path)
        assert PATH in loaded.summary()
        with rejects("baseline"):
            loaded.predict(new)
        with rejects("baseline"):  # other arguments
            AtomisticModel.load(path, baseline=PATH)
    for wrong in ("ase.calculators.emt:EMT", "composition"):
        with rejects("baseline"):
            AtomisticModel.load(path, baseline=wrong)
    prediction = AtomisticModel.load(path, baseline=BASELINE).predict(new)
    np.testing.assert_allclose(prediction.members, expected.members, 0, 1e-6 * expected.std.min())
    assert "ase" in loaded.provenance.packages


def test_a_model_without_a_reference_is_given_none(force_model, tmp_path):
    force_model.save(tmp_path / "model")
    with rejects("baseline"):
        AtomisticModel.load(tmp_path / "model", baseline=BASELINE)


def test_a_missing_package_is_named(monkeypatch, rich):
    monkeypatch.setitem(delta.CALCULATORS, "tblite", ("no_such_package:TBLite", {}))
    delta.load_calculator.cache_clear()
    with rejects("baseline"):
        make_model("energy", baseline="tblite:GFN2-xTB").fit(rich)
    delta.load_calculator.cache_clear()


# --- the pretrained network of the representation ---


class Backbone:
    """Stands for a representation by a network that fails for some structures."""

    def __init__(self):
        self.sizes = []

    def potential(self, frames, *, forces, stress):
        self.sizes.append(len(frames))
        columns = zip(*(values_of(Failing(), atoms) for atoms in frames), strict=True)
        energies, of_atoms, stresses = map(list, columns)
        derivatives = of_atoms if forces else None, np.array(stresses) if stress else None
        return PotentialValues(np.array(energies), *derivatives)


def test_a_backbone_computes_batches_and_names_what_fails(rich):
    backbone = Backbone()
    potential = NetworkPotential(backbone, 1000.0)
    with pytest.warns(QualmsWarning, match="structure 3 "):
        values = potential.evaluate(rich, forces=True, stress=True, skip_failed=True)
    assert np.flatnonzero(np.isnan(values.energies)).tolist() == [3, 11]
    of_structure = values.energies[5], values.forces[5], values.stresses[5]
    for value, expected in zip(of_structure, values_of(EMT(), rich[5]), strict=True):
        np.testing.assert_allclose(value, 1000 * expected)
    n = len(backbone.sizes)
    potential.evaluate(rich[4:10])
    assert len(backbone.sizes) == n  # remembered
    potential.evaluate(labelled_alloys(6, seed=5))
    assert backbone.sizes[n:] == [6]


def test_soap_is_no_backbone(rich):
    with rejects("baseline"):
        make_model("energy", baseline="backbone").fit(rich)


# --- tblite ---


def test_tblite(monkeypatch):
    """Two processes compute what one does, without being confirmed."""
    tblite = pytest.importorskip("tblite.ase")
    monkeypatch.setattr(delta, "MANY", 16)
    frames = qm9(n=16)
    settings = make_settings({"target": ENERGY, "baseline": "tblite:GFN2-xTB", "units": "eV"})
    serial, parallel = (
        make_baseline_potential(settings, threads=threads).evaluate(frames, forces=True)
        for threads in (1, 2)
    )
    np.testing.assert_array_equal(serial.energies, parallel.energies)
    atoms = frames[7].copy()
    atoms.calc = tblite.TBLite(method="GFN2-xTB", verbosity=0)
    assert serial.energies[7] == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
    np.testing.assert_allclose(serial.forces[7], atoms.get_forces(), atol=1e-5)


# --- commands ---


def test_commands(totals, tmp_path, monkeypatch, no_figures):
    monkeypatch.chdir(tmp_path)
    ase.io.write("train.xyz", totals[:N_TRAIN])
    ase.io.write("test.xyz", totals[N_TRAIN:])
    (tmp_path / "small.yaml").write_text(
        json.dumps({"representation": SMOOTH, "n_representatives": 60, "threads": 1})
    )
    baseline = f"'{json.dumps(BASELINE)}'"
    options = "--config small.yaml --target energy --forces-key force --units eV"
    assert qualms(f"train train.xyz {options} --baseline {baseline} -o m.safetensors").code == 0
    assert PATH in qualms("info m.safetensors").out
    document = json.loads(qualms("info m.safetensors --json").out)
    assert document["settings"]["baseline"]["calculator"] == PATH
    command = "predict m.safetensors test.xyz --forces -o p.xyz --force"
    assert qualms(command).code == 2
    assert qualms(f"{command} --confirm-baseline {baseline}").code == 0
    first = ase.io.read("p.xyz", ":")
    assert qualms(f"{command} --baseline-key lj_energy").code == 0
    second = ase.io.read("p.xyz", ":")
    for a, b, atoms in zip(first, second, totals[N_TRAIN:], strict=True):
        energy = a.get_potential_energy()
        assert energy == pytest.approx(b.get_potential_energy(), abs=1e-6)
        assert energy == pytest.approx(atoms.info["energy"], abs=0.5)
    for command in (
        "evaluate m.safetensors test.xyz --json",
        "report m.safetensors test.xyz -o r.html",
    ):
        assert qualms(command).code == 2
        assert qualms(f"{command} --baseline-key lj_energy").code == 0
    assert (
        qualms(f"{command} --force --confirm-baseline {baseline} --baseline-key lj_energy").code
        == 2
    )
    assert qualms("train train.xyz --target energy --baseline {x -o n.safetensors").code == 2


def test_commands_skip_what_fails(rich, tmp_path, monkeypatch, no_figures):
    monkeypatch.chdir(tmp_path)
    ase.io.write("all.xyz", rich)
    (tmp_path / "small.yaml").write_text(
        json.dumps({"representation": SMALL, "n_representatives": 60, "threads": 1})
    )
    train = f"train all.xyz --config small.yaml --target energy --baseline {FAILING}"
    assert qualms(f"{train} -o m.safetensors").code == 2
    assert qualms(f"{train} -o m.safetensors --skip-failed").code == 0
    for verb, output in (("predict", "-o p.xyz"), ("evaluate", ""), ("report", "-o r.html")):
        command = f"{verb} m.safetensors all.xyz {output} --confirm-baseline {FAILING} --json"
        ended = qualms(command)
        assert ended.code == 2
        assert "tructure 3 " in ended.err
        document = qualms(f"{command} --skip-failed").document
        assert document["n_structures" if verb == "predict" else "n_points"] == 18
    assert len(ase.io.read("p.xyz", ":")) == 18
