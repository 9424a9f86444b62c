"""Limits of extrapolation: 1 % of out-of-bag structures exceed one of them, with reasons."""

import dataclasses

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import (
    ENERGY,
    labelled_molecules,
    make_force_model,
    make_model,
)

from qualms import AtomisticModel, Prediction
from qualms.ase import Calculator
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.extrapolation import (
    element_scales,
    fit_limits,
    is_largest,
    scattered,
    sizes_of,
)
from qualms.errors import QualmsWarning
from qualms.evaluation import Evaluation
from qualms.io.predictions import REASON
from qualms.report.assessment import assess
from qualms.report.report import write_report
from qualms.report.tables import novelty_records, novelty_table


@pytest.mark.parametrize("n", [40, 100, 1000, 20_000])
@pytest.mark.parametrize("tail", [0.2, 2.0])
def test_one_per_cent_of_all_exceed_one_limit_or_another(n, tail):
    """Whatever the distributions are, of all measures together; new ones about as many."""
    shares, rng = [], np.random.default_rng(n)
    for _ in range(20 if n < 10_000 else 2):
        measures, new = np.exp(rng.normal(size=(2, 3, n)) * np.array([tail, 0.1, 1.0])[:, None])
        measures[2] = 0.5 * (measures[1] + measures[2])  # correlated
        limits = np.array(fit_limits(list(measures)))
        exceeding = (measures > limits[:, None]).any(axis=0).mean()
        assert 0.01 - 4 / n < exceeding <= (0.01 if n < 100 else 0.03)
        new[2] = 0.5 * (new[1] + new[2])
        shares.append((new > limits[:, None]).any(axis=0).mean())
    assert np.mean(shares) < 0.017 + 3.5 / n


def test_a_few_structures_unlike_all_others_do_not_raise_the_limits():
    """Such as one molecule in eighty with a group that the others lack."""
    rng = np.random.default_rng(0)
    measures, new = np.exp(rng.normal(size=(2, 3, 400)) * 0.4)
    usual = fit_limits(list(measures))
    measures[0, :5] = rng.uniform(20.0, 50.0, 5)
    limits = fit_limits(list(measures))
    assert limits == pytest.approx(usual, rel=0.1)
    assert (new > np.array(limits)[:, None]).any(axis=0).mean() < 0.03
    # Not so if there are many, which are usual themselves; nor of fewer than 100 structures.
    measures[0, :40] = rng.uniform(20.0, 50.0, 40)
    limits = np.array(fit_limits(list(measures)))
    assert limits[0] > 20.0
    assert (measures > limits[:, None]).any(axis=0).mean() <= 0.05
    assert fit_limits(list(measures[:, :90]))[0] == measures[0, :90].max()
    # Samples of 50 structures are no more than these.
    repeated = np.tile(measures[:, :50], 16)
    assert fit_limits(list(repeated), n_samples=16)[0] == measures[0, :50].max()


@pytest.mark.parametrize("n_equal", [200, 188, 0])
def test_limits_of_measures_that_are_nearly_all_equal(n_equal):
    """As those of perfect crystals."""
    measures = np.exp(np.random.default_rng(0).normal(size=(2, 200)))
    measures[0, :n_equal] = 1e-6
    measures[1, : n_equal // 2] = 0.0
    limits = np.array(fit_limits(list(measures)))
    assert np.all(np.isfinite(limits))
    assert (measures > limits[:, None]).any(axis=0).mean() <= 0.05


@pytest.mark.parametrize("n_elements", [1, 4, 12])
def test_more_elements_do_not_raise_the_share_of_flags(n_elements):
    """Of few structures, with elements whose novelties differ in size and in spread."""
    shares, rng = [], np.random.default_rng(n_elements)
    size, spread = 10.0 ** rng.uniform(-4, -1, n_elements), rng.uniform(0.3, 0.8, n_elements)
    for _ in range(100):
        novelty = size * np.exp(spread * rng.normal(size=(440, n_elements)))
        novelty[rng.random(novelty.shape) < 0.3] = 0.0  # atoms of an element are not in all
        scales = element_scales(novelty[:40])
        assert scales.max() <= novelty[:40].max()
        relative = (novelty / scales).max(axis=1)
        (limit,) = fit_limits([relative[:40]])
        shares.append(np.mean(relative[40:] > limit))
    assert np.mean(shares) < 0.045  # 1/41 = 0.024; relative to the maxima of twelve elements: 0.2


def test_scales_of_elements_without_atoms_are_those_of_others():
    novelty = np.exp(np.random.default_rng(0).normal(size=(50, 3)))
    novelty[:, 1] = 0.0
    novelty[1:, 2] = 0.0
    scales = element_scales(novelty)
    assert scales[1] == max(scales[0], scales[2])
    assert scales[2] == pytest.approx(novelty[0, 2], rel=1e-4)


def test_the_largest_structure_is_one_of_the_one_per_cent():
    rng = np.random.default_rng(0)
    measures, largest = list(rng.random((2, 300))), np.arange(300) < 2
    limits = np.array(fit_limits(measures, largest))
    exceeding = largest | (np.array(measures) > limits[:, None]).any(axis=0)
    assert exceeding.sum() <= 3
    sizes = np.array([[5, 2], [7, 3], [7, 4], [6, 4]])
    assert is_largest(sizes).tolist() == [False] * 4
    assert is_largest(sizes[:2]).tolist() == [False, True]
    # Everything is an extrapolation: limits are still numbers.
    assert np.all(np.isfinite(fit_limits(measures, np.ones(300, bool))))


def test_standard_deviations_of_few_members_scatter():
    values = scattered(np.full(5000, 2.0), 16, np.random.default_rng(0))
    assert np.mean(values**2) == pytest.approx(4.0, rel=0.02)
    assert values.std() == pytest.approx(2.0 / np.sqrt(30), rel=0.1)


@pytest.fixture(scope="module")
def by_size():
    """A model of molecules with at most eight atoms other than hydrogen, and larger ones."""
    molecules = labelled_molecules(300)
    n_heavy = np.array([np.count_nonzero(atoms.numbers > 1) for atoms in molecules])
    small = [atoms for atoms, n in zip(molecules, n_heavy, strict=True) if n <= 8]
    large = [atoms for atoms, n in zip(molecules, n_heavy, strict=True) if n > 8]
    return make_model(n_representatives=150, units="eV").fit(small), small, large


def test_larger_molecules_are_flagged_and_cells_are_not(by_size):
    model, small, large = by_size
    prediction = model.predict(large)
    assert prediction.extrapolates.all()
    assert all("at most" in reason for reason in prediction.reasons)
    assert model.predict(small).extrapolates.mean() <= 0.03
    assert not any("at most" in reason for reason in model.predict(in_cells(large[:5])).reasons)


def in_cells(molecules):
    """The same molecules in periodic cells."""
    cells = [Atoms(a.numbers, a.positions, cell=[30] * 3, pbc=True) for a in molecules]
    for atoms, molecule in zip(cells, molecules, strict=True):
        atoms.info.update(molecule.info)
    return cells


def test_sizes_of_cells_are_no_sizes_of_molecules(by_size):
    """Large cells among the training structures do not make large molecules usual."""
    _, small, large = by_size
    model = make_model(n_representatives=100).fit([*small[:80], *in_cells(large[:20])])
    assert all("at most" in reason for reason in model.predict(large[20:30]).reasons)
    crystals = make_model(n_representatives=100).fit(in_cells(small[:80]))
    assert not any("at most" in reason for reason in crystals.predict(large[:10]).reasons)


def test_the_largest_cell_does_not_count_as_an_extrapolation():
    """One of 150 cells that is larger than the others leaves the limits as they are."""
    sizes = sizes_of(np.array([[2, 1], [4, 2], [8, 4]]), [1, 8], np.array([False, False, True]))
    assert sizes.tolist() == [[3, 1], [6, 2], [0, 0]]
    assert is_largest(sizes).tolist() == [False, True, False]
    assert not is_largest(np.zeros((3, 2), dtype=int)).any()


def test_elements_of_little_novelty_have_a_limit_of_their_own(by_size):
    """An O–H or C–H bond that is too long is flagged; carbon would hide it by its limit."""
    model, small, _ = by_size
    fitted = model.fitted
    assert 2 * fitted.element_novelty[1] < fitted.element_novelty[6]
    assert max(fitted.element_novelty.values()) == fitted.training_novelty[0]
    assert model.predict(small).extrapolates.mean() <= 0.03
    common = AtomisticModel.from_fitted(dataclasses.replace(fitted, element_novelty={}))
    stretched, atom = [], []
    for atoms in small[::2]:
        distances = atoms.get_all_distances()
        np.fill_diagonal(distances, np.inf)
        hydrogens = np.flatnonzero(atoms.numbers == 1)
        if len(hydrogens) and not model.predict(atoms).extrapolates[0]:
            i = hydrogens[0]
            new, j = atoms.copy(), distances[i].argmin()
            new.positions[i] += 0.35 * (atoms.positions[i] - atoms.positions[j])
            stretched.append(new)
            atom.append(i)
    prediction, of_common = (of.predict(stretched, atoms=True) for of in (model, common))
    assert len(stretched) > 10
    named = [f"atom {i} (H)" in text for i, text in zip(atom, prediction.reasons, strict=True)]
    assert np.mean(named) > 0.5
    assert np.mean(["is novel" in reason for reason in of_common.reasons]) < np.mean(named) / 2
    for s, new in enumerate(stretched):  # the same limits in all places
        new.calc = Calculator(model)
        relative = prediction.atom_novelty[s]
        np.testing.assert_allclose(new.calc.get_property("atom_novelty", new), relative, rtol=1e-6)
        ratio = fitted.training_novelty[0] / fitted.novelty_limits(new.numbers)
        np.testing.assert_allclose(relative, ratio * of_common.atom_novelty[s], rtol=1e-9)
        assert prediction.novelty[s] == relative.max()


def test_limits_are_those_of_the_file(by_size, tmp_path):
    model, _, large = by_size
    model.save(tmp_path / "model.safetensors")
    loaded = AtomisticModel.load(tmp_path / "model.safetensors")
    assert loaded.fitted.std_limit == model.fitted.std_limit
    assert loaded.fitted.largest_size == model.fitted.largest_size
    assert loaded.fitted.element_novelty == model.fitted.element_novelty
    assert loaded.predict(large[:5]).reasons == model.predict(large[:5]).reasons


def test_models_of_earlier_versions_have_the_largest_ensemble_standard_deviation(by_size):
    """They know neither the largest size nor a limit of p."""
    model, small, large = by_size
    old = dataclasses.replace(model.fitted, std_limit=None, largest_size=None)
    prediction = AtomisticModel.from_fitted(old).predict(large)
    assert not any("atoms" in reason for reason in prediction.reasons)
    stretched = [atoms.copy() for atoms in small[:5]]
    for atoms in stretched:
        atoms.positions *= 1.3
    assert AtomisticModel.from_fitted(old).predict(stretched).extrapolates.all()


@pytest.mark.parametrize("uncertainty", ["subsampling", "posterior"])
def test_unlike_structures_have_a_large_uncertainty_and_a_reason(uncertainty):
    molecules = labelled_molecules(120)
    model = make_model(n_representatives=100, uncertainty=uncertainty).fit(molecules[:100])
    assert model.predict(molecules[100:]).extrapolates.mean() <= 0.25
    stretched = [atoms.copy() for atoms in molecules[:10]]
    for atoms in stretched:
        atoms.positions *= 1.2
    symbol = "(p)" if uncertainty == "posterior" else "(ŝ)"
    assert np.mean([symbol in reason for reason in model.predict(stretched).reasons]) > 0.5


def test_reports_have_the_reasons_of_the_worst_predictions(by_size, tmp_path):
    model, small, large = by_size
    evaluations = evaluate(model, [*small[:15], *large[:3]])
    written = write_report(tmp_path / "report.html", evaluations)
    (section,) = written.sections.values()
    expected = model.predict([*small[:15], *large[:3]]).reasons
    assert not any(expected[:15])
    for table in section.worst.values():
        place, number = table.headers.index("out of distribution"), table.headers.index("structure")
        assert {int(row[number]) for row in table.rows} >= {15, 16, 17}
        assert all(row[place] == expected[int(row[number])] for row in table.rows)
    assert "atoms" in (tmp_path / "report.html").read_text()
    usual = write_report(tmp_path / "usual.html", evaluate(model, small[:15]))
    (section,) = usual.sections.values()
    assert not any("out of distribution" in table.headers for table in section.worst.values())


# --- no basis, and bins of novelty ---


def test_labels_that_cannot_be_learned_are_named_with_their_quantity(tmp_path):
    """Random numbers are not explained; the warning is repeated wherever the model is used."""
    from test_cli import qualms

    molecules, rng = labelled_molecules(140), np.random.default_rng(0)
    for atoms in molecules:
        atoms.info[ENERGY] = rng.normal() + len(atoms)  # which a baseline explains
    with pytest.warns(QualmsWarning, match=f"{ENERGY}: .*explained"):
        model = make_model(n_representatives=100, units="eV").fit(molecules[:100])
    assert model.record.quantities["energy"].explained < 0.2
    model.save(tmp_path / "model.safetensors")
    loaded = AtomisticModel.load(tmp_path / "model.safetensors")
    evaluation = evaluate(loaded, molecules[100:])["energy"]
    assert evaluation.doubt
    assert evaluation.doubt in assess(evaluation).details
    new = [atoms.copy() for atoms in molecules[100:104]]
    new[0].positions *= 1.5
    for atoms in new:
        atoms.info[REASON] = "of an earlier prediction"
    ase.io.write(tmp_path / "new.xyz", new)
    predicted = tmp_path / "predicted.xyz"
    ended = qualms(f"predict {tmp_path}/model.safetensors {tmp_path}/new.xyz -o {predicted}")
    assert evaluation.doubt in ended.err
    assert "_JSON" not in predicted.read_text()  # of reasons that are empty
    reasons = [atoms.info.get(REASON, "") for atoms in ase.io.read(predicted, ":")]
    assert reasons == loaded.predict(new).reasons
    assert [bool(reason) for reason in reasons] == [True, False, False, False]
    with pytest.warns(QualmsWarning, match="mean nothing"):
        Calculator(loaded)


def test_each_quantity_has_a_basis_of_its_own(alloys):
    """Forces that are random, beside energies that are not."""
    frames, rng = [atoms.copy() for atoms in alloys[:26]], np.random.default_rng(0)
    good = make_force_model(units="eV").fit(frames)
    assert all(of.explained > 0.5 for of in good.record.quantities.values())
    assert not any(of.doubt(name) for name, of in good.record.quantities.items())
    for atoms in frames:
        atoms.arrays["force"] = rng.normal(size=(len(atoms), 3)) * 0.1
    with pytest.warns(QualmsWarning) as caught:
        model = make_force_model(units="eV").fit(frames)
    assert any("force: out-of-bag" in str(warning.message) for warning in caught)
    assert model.record.quantities["forces"].explained < 0.5


def test_bins_of_novelty_are_those_of_an_oracle():
    rng = np.random.default_rng(0)
    novelty, std = rng.random(200), 0.5 + rng.random(200)
    z = std * rng.normal(size=200) * (1 + 2 * (novelty > 0.8))
    prediction = Prediction(mean=np.zeros(200), std=std)
    given = {"target": "e", "y": z, "prediction": prediction, "structure": np.arange(200)}
    evaluation = Evaluation(**given, novelty=novelty)
    records = novelty_records(evaluation)
    order = np.argsort(novelty)
    for record, some in zip(records, np.split(order, 5), strict=True):
        assert record["n_points"] == 40
        assert record["novelty"] == novelty[some].max()
        ratio = np.abs(z[some]) / std[some]
        assert record["coverage_68"] == pytest.approx(np.mean(ratio <= 1))
        assert record["coverage_95"] == pytest.approx(np.mean(ratio <= 1.96))
        expected = np.sqrt(np.mean(z[some] ** 2) / np.mean(std[some] ** 2))
        assert record["rmse_over_sigma"] == pytest.approx(expected)
    assert records[-1]["rmse_over_sigma"] > 2 > 1.5 > records[0]["rmse_over_sigma"]
    assert len(novelty_table(evaluation).rows) == 5
    some = evaluation.some(novelty > 0.5)
    assert novelty_records(some)[0]["novelty"] > 0.5
    assert novelty_table(Evaluation(**given)) is None


def test_evaluations_have_the_novelty_of_predictions(by_size):
    model, small, large = by_size
    evaluation = evaluate(model, [*small[:20], *large[:20]])["energy"]
    expected = model.predict([*small[:20], *large[:20]]).novelty
    np.testing.assert_allclose(evaluation.novelty, expected)
