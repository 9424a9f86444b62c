"""What ``qualms apply`` writes, and what it leaves as it was."""

import csv
import datetime
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import command

from qualms.atomistic.structures import read_frames
from qualms.ensembles.calibrate import calibrate_ensemble
from qualms.ensembles.calibration_file import read_calibration
from qualms.ensembles.io import read_columns, read_ensemble
from qualms.errors import InputError

R = 5


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


# --- as calculators return them ---


@pytest.mark.parametrize("names", [["H2O"], ["H2O", "CH4"]])
def test_members_of_forces_that_belong_to_structures(workplace, names):
    """``calc.results["forces_comm"]`` of MACE, (R, n_atoms, 3), put into ``atoms.info``."""
    rng = np.random.default_rng(0)
    frames = []
    for i in range(40):
        atoms = molecule(names[i % len(names)])
        s = np.exp(rng.normal(-2, 0.5, size=(len(atoms), 3)))
        atoms.arrays["REF_forces"] = 2 * s * rng.normal(size=s.shape)
        atoms.info["forces_comm"] = s * rng.normal(size=(R, *s.shape))
        frames.append(atoms)
    ase.io.write("p.xyz", frames, format="extxyz")
    found = read_ensemble("p.xyz", "forces", by="element")
    assert (found.kind, found.n_members, found.layout.order) == ("component", R, "member")
    n = len(frames[0])
    expected = frames[0].info["forces_comm"].transpose(1, 2, 0).reshape(3 * n, R)
    np.testing.assert_allclose(found.members[: 3 * n], expected)
    command("calibrate p.xyz --target forces -o c.json --method linear")
    command("apply c.json p.xyz -o out.xyz")
    after = read_frames("out.xyz")[0]
    assert "forces_comm" not in after.info
    members = after.arrays["forces_comm"].reshape(n, R, 3)
    np.testing.assert_allclose(members.std(axis=1, ddof=1), after.arrays["forces_uncertainty"])


def test_tensors_of_three_atoms_are_not_vectors_of_atoms(workplace):
    members, y = committee(shape=(3, 3))
    frames = [
        Atoms("H3", positions=np.eye(3), info={"w_comm": some, "REF_w": truth})
        for some, truth in zip(members, y, strict=True)
    ]
    ase.io.write("p.xyz", frames, format="extxyz")
    found = read_ensemble("p.xyz", "w")
    assert not found.per_atom
    np.testing.assert_allclose(found.y, y.ravel())


def test_a_calibration_that_is_applied_twice_is_noticed(workplace):
    members, y = committee()
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    command("calibrate p.npz --target e -o c.json --method linear")
    assert "twice" not in command("apply c.json p.npz -o once.npz").err
    assert "they are now so twice" in command("apply c.json once.npz -o twice.npz").err
    # A calibration of calibrated members is one for such.
    command("calibrate once.npz --target e -o again.json --method linear")
    assert "twice" not in command("apply again.json once.npz -o again.npz").err


# --- tables: what is not replaced stays as it was ---


def write_csv(path, columns):
    with Path(path).open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def rows_of(path):
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("form", ["e_ensemble_{}", "e_{}"])
def test_other_columns_of_csv_keep_their_text(workplace, form):
    members, y = committee()
    names = [form.format(i) for i in range(R)]
    columns = {
        "id": [9007199254740993 + i for i in range(60)],
        "code": [f"{i:06d}" for i in range(60)],
        "ok": [["True", "False", ""][i % 3] for i in range(60)],
        "n": [*range(60)],
        "price": ["1.50"] * 60,
        **{name: members[:, i].tolist() for i, name in enumerate(names)},
        "REF_e": y.tolist(),
        "note": ["a, b", 'c "d"'] * 30,
    }
    write_csv("p.csv", columns)
    command("calibrate p.csv --target e -o c.json --method linear")
    command("apply c.json p.csv -o out.csv")
    before, after = rows_of("p.csv"), rows_of("out.csv")
    assert [*after[0]] == [*columns, "e", "e_uncertainty"]
    for old, new in zip(before, after, strict=True):
        for name in {*columns} - {*names}:
            assert new[name] == old[name]
    alpha = read_calibration("c.json").parameters["alpha"]
    std = [float(row["e_uncertainty"]) for row in after]
    np.testing.assert_allclose(std, alpha * members.std(axis=1, ddof=1))
    found = np.array([[float(row[name]) for name in names] for row in after])
    np.testing.assert_allclose(found.std(axis=1, ddof=1), std)


def test_identifiers_of_structures_are_not_rounded(workplace):
    members, y = committee()
    columns = {f"e_{i}": members[:, i] for i in range(R)} | {"REF_e": y}
    write_csv("p.csv", {"structure": [9007199254740992 + i for i in range(60)]} | columns)
    assert len(set(read_ensemble("p.csv", "e").structure)) == 60


def test_arrays_of_no_rows_stay_in_npz(workplace):
    members, y = committee()
    np.savez("p.npz", e_ensemble=members, REF_e=y, cutoff=5.0, name="mace")
    command("calibrate p.npz --target e -o c.json --method linear")
    command("apply c.json p.npz -o out.npz")
    found = np.load("out.npz")
    assert found["cutoff"] == 5.0
    assert found["name"] == "mace"


def parquet_of(path, columns):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns), path)


def table_of(path):
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)


def test_other_columns_of_parquet_keep_type_and_values(workplace):
    arrow = pytest.importorskip("pyarrow")
    members, y = committee()
    others = {
        "tags": [["a", "b"]] * 60,
        "numbers": [[1] * (1 + i % 3) for i in range(60)],
        "pos": [[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]] * 60,
        "k": arrow.array([1, None] * 30),
        "name": ["x", None] * 30,
        "day": arrow.array([datetime.date(2020, 1, 1)] * 60),
        "flag": arrow.array([True, None] * 30),
        "kind": arrow.array(["a", "b"] * 30).dictionary_encode(),
    }
    parquet_of("p.parquet", {"e_ensemble": members.tolist(), "REF_e": y} | others)
    command("calibrate p.parquet --target e -o c.json --method linear --by kind")
    command("apply c.json p.parquet -o out.parquet")
    before, after = table_of("p.parquet"), table_of("out.parquet")
    for name in others:
        assert after.column(name).equals(before.column(name)), name
    assert after.schema.field("e_ensemble").type == before.schema.field("e_ensemble").type
    np.testing.assert_allclose(
        np.std(after.column("e_ensemble").to_pylist(), axis=1, ddof=1),
        after.column("e_uncertainty"),
    )


@pytest.mark.parametrize("fixed", [True, False])
def test_vectors_in_lists_come_back_in_lists(workplace, fixed):
    arrow = pytest.importorskip("pyarrow")
    members, y = committee(shape=(3,))
    inner = arrow.list_(arrow.float64(), 3) if fixed else arrow.list_(arrow.float64())
    outer = arrow.list_(inner, R) if fixed else arrow.list_(inner)
    columns = {
        "f_ensemble": arrow.array(members.tolist(), outer),
        "REF_f": arrow.array(y.tolist(), inner),
    }
    parquet_of("p.parquet", columns)
    command("calibrate p.parquet --target f -o c.json --method linear")
    command("apply c.json p.parquet -o out.parquet")
    after = table_of("out.parquet")
    assert after.schema.field("f_ensemble").type == outer
    assert after.column("REF_f").equals(table_of("p.parquet").column("REF_f"))
    sigma = np.array(after.column("f_uncertainty").to_pylist())
    found = np.array(after.column("f_ensemble").to_pylist())
    np.testing.assert_allclose(found.std(axis=1, ddof=1), sigma)


def test_lists_that_do_not_fit_are_named(workplace):
    members, y = committee()
    ragged = members.tolist()
    ragged[7] = ragged[7][:-1]
    parquet_of("p.parquet", {"e_ensemble": ragged, "REF_e": y})
    with pytest.raises(InputError, match=r"e_ensemble=5 values in one row and 4 in another"):
        read_ensemble("p.parquet", "e")
    parquet_of("p.parquet", {"e_ensemble": [["a"] * R] * 60, "REF_e": y})
    with pytest.raises(InputError, match="e_ensemble=lists of text"):
        read_ensemble("p.parquet", "e")


def test_a_list_that_is_missing_is_a_point_that_is_left_out(workplace):
    members, y = committee()
    parquet_of("p.parquet", {"e_ensemble": [None, *members[1:].tolist()], "REF_e": y})
    found = calibrate_ensemble(read_ensemble("p.parquet", "e"), "linear")
    assert found.points.dropped == {"with NaN or infinite predictions": 1}
    command("calibrate p.parquet --target e -o c.json --method linear")
    assert "1 structure with NaN" in command("apply c.json p.parquet -o out.parquet").err
    np.testing.assert_array_equal(
        np.isnan(read_columns("out.parquet")["e_uncertainty"]), np.arange(60) == 0
    )


def test_numbered_vectors_keep_their_columns(workplace):
    members, y = committee(shape=(3,))
    columns = {f"f_{i}": members.reshape(60, -1)[:, i] for i in range(3 * R)}
    write_csv("p.csv", columns | {f"REF_f_{i}": y[:, i] for i in range(3)})
    command("calibrate p.csv --target f -o c.json --method linear")
    command("apply c.json p.csv -o out.csv")
    added = ["f_x", "f_y", "f_z", *(f"f_uncertainty_{c}" for c in "xyz")]
    assert [*read_columns("out.csv")] == [*columns, "REF_f_0", "REF_f_1", "REF_f_2", *added]


def test_another_separator_is_named(workplace):
    Path("p.csv").write_text("e;e_uncertainty;REF_e\n1;2;3\n")
    with pytest.raises(InputError, match="separated by ';'"):
        read_ensemble("p.csv", "e")
