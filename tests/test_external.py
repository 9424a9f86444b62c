"""Ensembles that others made: reading, calibrating, doubting and applying."""

import json
import re
from dataclasses import replace
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import ENERGY, command, qualms

from qualms.atomistic.structures import read_frames
from qualms.ensembles.apply import apply_calibration
from qualms.ensembles.calibrate import ERROR_BAR_METHODS, calibrate_ensemble
from qualms.ensembles.calibration_file import read_calibration
from qualms.ensembles.io import read_columns, read_ensemble, with_members, write_columns
from qualms.errors import CalibrationError, InputError

R = 6
FACTORS = {"H": 0.7, "C": 1.4, "N": 1.0, "O": 2.0}


def structures(n, seed=0, alpha=2.0, forces=True):
    """Structures with committees of energies and forces whose true α is known."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(n):
        atoms = molecule(["H2O", "CH4", "NH3", "CH3OH"][i % 4])
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        mu, s = rng.normal(), np.exp(rng.normal(-3.5, 0.6))
        atoms.info["energy_comm"] = mu + s * rng.normal(size=R)
        atoms.info["REF_energy"] = mu + alpha * s * rng.normal()
        atoms.info["config_type"] = "calm" if i % 3 else "wild"
        if forces:
            shape = (len(atoms), 3)
            mu, s = rng.normal(size=shape), np.exp(rng.normal(-3, 0.5, size=shape))
            members = mu[:, None] + s[:, None] * rng.normal(size=(len(atoms), R, 3))
            atoms.arrays["forces_comm"] = members.reshape(len(atoms), 3 * R)
            factor = np.array([FACTORS[symbol] for symbol in atoms.symbols])[:, None]
            atoms.arrays["REF_forces"] = mu + alpha * factor * s * rng.normal(size=shape)
        frames.append(atoms)
    return frames


def members_of(frames):
    return np.array([atoms.info["energy_comm"] for atoms in frames])


def references_of(frames):
    return np.array([atoms.info["REF_energy"] for atoms in frames])


def write(path, frames):
    ase.io.write(path, frames, format="extxyz")


# --- reading ---


def test_energies_of_structures(workplace):
    frames = structures(5)
    write("p.xyz", frames)
    found = read_ensemble("p.xyz", "energy", by="config_type")
    assert (found.kind, found.n_members, found.key) == ("structure", R, "energy_comm")
    np.testing.assert_allclose(found.members, members_of(frames))
    np.testing.assert_allclose(found.y, references_of(frames))
    np.testing.assert_allclose(found.std, members_of(frames).std(axis=1, ddof=1))
    assert found.labels.tolist() == ["wild", "calm", "calm", "wild", "calm"]


def test_forces_by_component(workplace):
    frames = structures(4)
    write("p.xyz", frames)
    found = read_ensemble("p.xyz", "forces", by="element")
    assert (found.kind, found.n_members, found.n_components) == ("component", R, 3)
    n_atoms = sum(map(len, frames))
    assert len(found) == 3 * n_atoms
    first = frames[0].arrays["forces_comm"].reshape(3, R, 3)
    np.testing.assert_allclose(found.members[:9].reshape(3, 3, R), first.transpose(0, 2, 1))
    np.testing.assert_allclose(found.y[:3], frames[0].arrays["REF_forces"][0])
    assert found.labels[:9].tolist() == ["O"] * 3 + ["H"] * 6
    assert found.atom[:9].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_stored_mean_tells_the_order_of_components(workplace):
    frames = structures(3)
    expected = read_of(frames)
    for atoms in frames:
        members = atoms.arrays["forces_comm"].reshape(len(atoms), R, 3)
        atoms.arrays["forces_comm"] = members.transpose(0, 2, 1).reshape(len(atoms), -1)
        atoms.calc = SinglePointCalculator(atoms, forces=members.mean(axis=1))
    np.testing.assert_allclose(read_of(frames), expected)


def read_of(frames):
    write("order.xyz", frames)
    return read_ensemble("order.xyz", "forces").members


def test_nine_members_are_not_a_matrix(workplace):
    atoms = Atoms("H", info={"energy_ensemble": np.arange(9.0), "REF_energy": 1.0})
    write("p.xyz", [atoms, atoms])
    np.testing.assert_array_equal(read_ensemble("p.xyz", "energy").members[0], np.arange(9.0))


def test_error_bars_and_variances(workplace):
    frames = structures(4, forces=False)
    for atoms in frames:
        members = atoms.info.pop("energy_comm")
        atoms.info |= {"energy": members.mean(), "energy_var": members.var(ddof=1)}
    write("p.xyz", frames)
    found = read_ensemble("p.xyz", "energy")
    expected = members_of(structures(4, forces=False))
    assert found.members is None
    np.testing.assert_allclose(found.std, expected.std(axis=1, ddof=1))
    np.testing.assert_allclose(found.mean, expected.mean(axis=1))
    assert "variance" in found.remarks[0]


def test_tables(workplace):
    frames = structures(6)
    members, y = members_of(frames), references_of(frames)
    np.savez("p.npz", energy_ensemble=members, REF_energy=y, absent=members > 0)
    names = [f"energy_ensemble_{i}" for i in range(R)]
    lines = [",".join(["index", "kind", "REF_energy", *names])]
    for i, row in enumerate(members):
        cells = (
            ["", *map(repr, row.tolist())]
            if i == 2
            else [repr(float(y[i])), *map(repr, row.tolist())]
        )
        lines.append(",".join([str(i), "ab"[i % 2], *cells]))
    Path("p.csv").write_text("\n".join(lines) + "\n")
    from_npz = read_ensemble("p.npz", "energy", absent="absent")
    from_csv = read_ensemble("p.csv", "energy", by="kind")
    np.testing.assert_array_equal(from_npz.members, members)
    np.testing.assert_array_equal(from_csv.members, members)
    np.testing.assert_array_equal(from_npz.absent, members > 0)
    assert np.isnan(from_csv.y[2])
    assert from_csv.labels.tolist() == ["a", "b"] * 3


def test_parquet(workplace):
    pytest.importorskip("pyarrow")
    frames = structures(6)
    members, y = members_of(frames), references_of(frames)
    write_columns("p.parquet", {"energy_ensemble": members, "REF_energy": y, "name": ["x"] * 6})
    np.testing.assert_array_equal(read_ensemble("p.parquet", "energy").members, members)
    assert read_columns("p.parquet")["name"].tolist() == ["x"] * 6
    Path("bad.parquet").write_bytes(b"not a table")
    with pytest.raises(InputError, match="path="):
        read_columns("bad.parquet")


# --- calibrating ---


@pytest.mark.parametrize("method", ["linear", "power", "student", "shrinkage", "auto"])
def test_calibrated_error_bars_hold(workplace, method):
    write("p.xyz", structures(400, forces=False))
    found = calibrate_ensemble(read_ensemble("p.xyz", "energy"), method)
    assert found.before.coverage_68 < 0.45
    assert 0.62 < found.after.coverage_68 < 0.78
    assert found.after.log_likelihood > found.before.log_likelihood + 0.3
    assert found.calibration.method in found.reason
    np.testing.assert_allclose(found.prediction.std, found.std)


def test_scores_are_those_of_points_left_out():
    """With as many parameters as structures nothing would be learned of the others."""
    rng = np.random.default_rng(0)
    members = rng.normal(size=(200, R))
    ensemble = with_members(
        "e",
        "structure",
        members,
        y=members.mean(axis=1) + rng.normal(size=200),
        absent=None,
        structure=np.arange(200),
        atom=np.zeros(200, dtype=int),
        labels=np.array([f"own {i}" for i in range(200)]),
    )
    found = calibrate_ensemble(ensemble, "linear")
    overall = calibrate_ensemble(ensemble_without_labels(ensemble), "linear")
    # No label of a point left out has been seen: its factor is one.
    np.testing.assert_allclose(found.std, overall.std)


def ensemble_without_labels(ensemble):
    return replace(ensemble, labels=None)


def test_members_that_did_not_see_a_point_calibrate_internally(workplace):
    rng = np.random.default_rng(0)
    frames = structures(300, alpha=1.0, forces=False)
    for atoms in frames:
        seen = rng.random(16) < 0.5
        mu, s = rng.normal(), np.exp(rng.normal(-3, 0.5))
        y = mu + 2.0 * s * rng.normal()
        # Those that saw the point know the answer.
        atoms.info["energy_comm"] = np.where(seen, y, mu + s * rng.normal(size=16))
        atoms.info["REF_energy"] = y
        atoms.info["energy_absent"] = ~seen
    write("p.xyz", frames)
    found = calibrate_ensemble(read_ensemble("p.xyz", "energy"), "student")
    assert found.intervals.alpha[0] < 2.0 < found.intervals.alpha[1]
    for atoms in frames:
        del atoms.info["energy_absent"]
    write("p.xyz", frames)
    naive = calibrate_ensemble(read_ensemble("p.xyz", "energy"), "student")
    assert naive.calibration.alpha < 0.7 * found.calibration.alpha


def test_elements_get_factors_of_their_own(workplace):
    write("p.xyz", structures(300))
    found = calibrate_ensemble(read_ensemble("p.xyz", "forces", by="element"), "student")
    groups = found.grouped.groups
    for symbol, factor in FACTORS.items():
        assert groups[symbol].factor / groups["N"].factor == pytest.approx(factor, rel=0.1)
    alone = calibrate_ensemble(read_ensemble("p.xyz", "forces"), "student")
    assert found.after.log_likelihood > alone.after.log_likelihood + 0.02


# --- doubts ---


def doubts(y, **arrays):
    np.savez("doubt.npz", REF_e=y, **arrays)
    ensemble = read_ensemble("doubt.npz", "e")
    method = "linear" if ensemble.members is None else "student"
    return " ".join(calibrate_ensemble(ensemble, method).remarks)


def test_what_looks_wrong_is_said(workplace):
    rng = np.random.default_rng(0)
    n = 300
    s = np.exp(rng.normal(-3, 0.7, size=n))
    mu, z = rng.normal(size=n), rng.normal(size=n)
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, R))
    assert doubts(mu + s * z, e_ensemble=members) == ""
    few = doubts((mu + s * z)[:12], e_ensemble=members[:12])
    assert "Only 12 independent points" in few
    assert "α lies between" in few
    assert "nothing about the size" in doubts(mu + z, e_ensemble=members)
    assert "variances" in doubts(mu + s * z, e=mu, e_uncertainty=s**2)
    assert "variances" not in doubts(mu + s * z, e=mu, e_uncertainty=s)
    units = doubts(27.2114 * (mu + s * z) - 26.2114 * mu, e_ensemble=members)
    assert "units" not in units  # a factor of 27 alone may be overconfidence
    assert "units the same (eV and meV" in doubts(mu + 1000 * s * z, e_ensemble=members)
    assert "(eV and meV" in doubts(mu + 2000 * s * z, e_ensemble=members)
    assert "on average" in doubts(mu + s * z + 3.0, e_ensemble=members)
    assert "(eV and meV: 1000)" in doubts(mu + s * z, e_ensemble=1000 * members)


def error_bars(seed, n_members, alpha, tau, n=300):
    """Means, error bars and truths of a committee, to be doubted."""
    rng = np.random.default_rng(seed)
    s = np.exp(rng.normal(-4, tau, size=n))
    members = s[:, None] * rng.normal(size=(n, n_members))
    return members.mean(axis=1), members.std(axis=1, ddof=1), alpha * s * rng.normal(size=n)


@pytest.mark.parametrize("n_members", [4, 8, 64])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("tau", [0.3, 0.6])
def test_variances_are_told_from_standard_deviations(workplace, n_members, alpha, tau):
    """Noise in the spread of few members makes honest error bars look like roots."""
    for seed in range(3):
        mean, std, y = error_bars(seed, n_members, alpha, tau)
        assert "variances" in doubts(y, e=mean, e_uncertainty=std**2)
        assert "variances" not in doubts(y, e=mean, e_uncertainty=std)


def test_a_wrong_label_is_named(workplace):
    frames = structures(60)
    frames[17].info["REF_energy"] += 1e3
    frames[5].arrays["REF_forces"][2, 1] -= 1e4
    write("p.xyz", frames)
    said = command("calibrate p.xyz --target energy -o e.json --report e.html")
    assert "1 of 60 structures is far off" in said.err
    assert re.search(r"structure 17 \([\d.e+]+ error bars\)", said.err)
    assert "but not for 1 of 60 points" in " ".join(said.out.split())
    assert 'class="verdict doubtful"' in Path("e.html").read_text()
    said = command("calibrate p.xyz --target forces -o f.json --method student")
    assert "structure 5, atom 2, component 1 (" in said.err
    frames = structures(60)
    write("p.xyz", frames)
    assert "far off" not in command("calibrate p.xyz --target forces -o g.json").err


def test_structures_are_counted_in_a_verdict_rather_than_their_atoms(workplace):
    write("p.xyz", structures(6))
    said = command("calibrate p.xyz --target forces -o c.json --method student").out
    assert "Too few structures to judge the error bars" in said


@pytest.mark.parametrize(("n_members", "words"), [(3, "without a limit"), (5, "1.41 times too")])
def test_few_members_are_too_few_for_some_methods(workplace, n_members, words):
    rng = np.random.default_rng(0)
    members, y = rng.normal(size=(200, n_members)), rng.normal(size=200)
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    ensemble = read_ensemble("p.npz", "e")
    for method in ("linear", "power", "student"):
        said = " ".join(calibrate_ensemble(ensemble, method).remarks)
        assert (words in said) == (method == "linear")
        assert ("noise makes γ smaller" in said) == (method == "power")
    np.savez("p.npz", e_ensemble=rng.normal(size=(200, 16)), REF_e=y)
    assert "exact" not in " ".join(
        calibrate_ensemble(read_ensemble("p.npz", "e"), "linear").remarks
    )


@pytest.mark.parametrize("n", [10, 20, 100])
def test_a_good_spread_is_not_called_useless(workplace, n):
    """What few points cannot tell is said to be so."""
    untold = 0
    for seed in range(40):
        mean, std, y = error_bars(seed, 8, 2.0, 0.6, n=n)
        said = doubts(y, e=mean, e_uncertainty=std)
        assert "nothing about" not in said
        untold += "cannot be told" in said
    assert untold > 10 if n == 10 else untold < 30
    rng = np.random.default_rng(0)
    useless = doubts(rng.normal(size=1000), e=np.zeros(1000), e_uncertainty=rng.random(1000) + 0.1)
    assert "says nothing" in useless


# --- bad input ---


def saved(**arrays):
    np.savez("bad.npz", **arrays)
    return calibrate_ensemble(read_ensemble("bad.npz", "e"), "auto")


def good(n=30, seed=0):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(n, R))
    return members, members.mean(axis=1) + rng.normal(size=n)


def test_points_that_cannot_be_used_are_counted(workplace):
    members, y = good(60)
    y[:5] = np.nan
    members[5:8, 2] = np.nan
    members[8:10] = 0.5
    found = saved(e_ensemble=members, REF_e=y)
    assert found.points.dropped == {
        "without a reference value": 5,
        "with NaN or infinite predictions": 3,
        "about which all members agree": 2,
    }
    assert len(found.std) == 50
    assert np.all(np.isfinite(found.std))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda m, y: {"e_ensemble": m}, InputError, "key of the true values.*e_ensemble"),
        (
            lambda m, y: {"e_ensemble": m, "REF_e": np.full(30, np.nan)},
            CalibrationError,
            "No point",
        ),
        (lambda m, y: {"e_ensemble": m[:, :1], "REF_e": y}, InputError, "at least 2 members"),
        (
            lambda m, y: {"e_ensemble": np.repeat(m[:, :1], 4, 1), "REF_e": y},
            CalibrationError,
            "agree",
        ),
        (lambda m, y: {"e_ensemble": m[:1], "REF_e": y[:1]}, CalibrationError, "at least 2"),
        (
            lambda m, y: {"e": y, "e_uncertainty": -np.abs(y), "REF_e": y + 1},
            InputError,
            "negative",
        ),
        (lambda m, y: {"e": y, "e_var": -np.abs(y), "REF_e": y + 1}, InputError, "negative"),
        (
            lambda m, y: {"e": y, "e_uncertainty": np.zeros(30), "REF_e": y},
            CalibrationError,
            "zero",
        ),
        (lambda m, y: {"e": y, "e_uncertainty": np.ones(30), "REF_e": y}, CalibrationError, "zero"),
        (lambda m, y: {"e": y, "e_uncertainty": np.ones((30, 2)), "REF_e": y}, InputError, "shape"),
        (lambda m, y: {"e": y, "REF_e": y}, InputError, "members or error bars"),
        (lambda m, y: {"e_ensemble": m, "REF_e": y.astype(str)}, None, None),
        (lambda m, y: {"e_ensemble": m, "REF_e": np.array(["x"] * 30)}, InputError, "numbers"),
        (lambda m, y: {"e_ensemble": m, "REF_e": y, "e_absent": m}, InputError, "0 or 1"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(workplace, change, error, match):
    members, y = good()
    arrays = change(members, y)
    if error is None:
        saved(**arrays)
        return
    with pytest.raises(error, match=match):
        saved(**arrays)


def test_arrays_of_another_length_are_named(workplace):
    members, y = good()
    with pytest.raises(InputError, match=r"e_absent.*30 rows"):
        saved(e_ensemble=members, REF_e=y, e_absent=(members > 0).T)
    with pytest.raises(InputError, match=r"REF_e.*30 rows"):
        saved(e_ensemble=members, REF_e=y[:20])


def test_members_of_vectors_in_any_order(workplace):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, 3))
    members = truth[:, None] + 0.1 * rng.normal(size=(40, R, 3))
    y = truth + 0.1 * rng.normal(size=(40, 3))
    expected = members.transpose(0, 2, 1).reshape(-1, R)
    by_component = members.transpose(0, 2, 1)
    for stored in (members, by_component, members.reshape(40, -1), by_component.reshape(40, -1)):
        np.savez("v.npz", f_ensemble=stored, REF_f=y)
        np.testing.assert_array_equal(read_ensemble("v.npz", "f").members, expected)


def test_tensors_of_nine_components_come_back(workplace):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(60, 9))
    members = truth[:, None] + 0.1 * rng.normal(size=(60, R, 9))
    np.savez("v.npz", w_ensemble=members.reshape(60, -1), REF_w=truth)
    command("calibrate v.npz --target w -o c.json --method linear")
    assert read_calibration("c.json").n_components == 9
    np.savez("new.npz", w_ensemble=members.reshape(60, -1))
    command("apply c.json new.npz -o out.npz")
    assert np.load("out.npz")["w_uncertainty"].shape == (60, 9)


def test_vectors_of_structures_come_back(workplace):
    rng = np.random.default_rng(0)
    frames = structures(40, forces=False)
    for atoms in frames:
        truth = rng.normal(size=3)
        atoms.info["moment_ensemble"] = (truth + 0.1 * rng.normal(size=(R, 3))).ravel()
        atoms.info["REF_moment"] = truth
    write("p.xyz", frames)
    command("calibrate p.xyz --target moment -o c.json --method linear")
    command("apply c.json p.xyz -o out.xyz")
    atoms = read_frames("out.xyz")[0]
    assert atoms.info["moment_uncertainty"].shape == (3,)
    members = atoms.info["moment_ensemble"].reshape(R, 3)
    np.testing.assert_allclose(members.std(axis=0, ddof=1), atoms.info["moment_uncertainty"])
    assert "moment_ensemble" not in atoms.arrays


def test_results_that_have_as_many_numbers_as_there_are_atoms(workplace):
    frames = structures(24, forces=False)
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=1.0, dipole=np.arange(3.0))
    write("p.xyz", frames)
    with pytest.raises(InputError, match="dipole"):
        read_ensemble("p.xyz", "dipole")
    command("calibrate p.xyz --target energy -o c.json --method linear")
    command("apply c.json p.xyz -o out.xyz")
    np.testing.assert_array_equal(read_frames("out.xyz")[0].get_dipole_moment(), np.arange(3.0))


def test_members_that_saw_a_point_need_not_predict_it(workplace):
    rng = np.random.default_rng(0)
    members, y = good(200)
    absent = rng.random(members.shape) < 0.8
    expected = saved(e_ensemble=members, REF_e=y, e_absent=absent)
    members[~absent] = np.nan
    found = saved(e_ensemble=members, REF_e=y, e_absent=absent)
    np.testing.assert_allclose(found.std, expected.std)


def test_other_units_are_noticed_when_a_calibration_is_applied(workplace):
    members, y = good(60)
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    np.savez("milli.npz", e_ensemble=1000 * members)
    command("calibrate p.npz --target e --units eV -o c.json --method linear")
    assert "units" in command("apply c.json milli.npz -o out.npz").err
    assert "units" not in command("apply c.json p.npz -o out2.npz").err


def test_members_differ_in_number_between_structures(workplace):
    frames = structures(6, forces=False)
    frames[4].info["energy_comm"] = frames[4].info["energy_comm"][:-1]
    write("p.xyz", frames)
    with pytest.raises(InputError, match="number 4"):
        read_ensemble("p.xyz", "energy")


def test_error_bars_have_no_members_to_count(workplace):
    members, y = good(80)
    np.savez("p.npz", e=members.mean(axis=1), e_uncertainty=members.std(axis=1), REF_e=y)
    ensemble = read_ensemble("p.npz", "e")
    found = calibrate_ensemble(ensemble)
    assert {c.calibration.method for c in found.comparison.candidates} == {*ERROR_BAR_METHODS}
    with pytest.raises(InputError, match="members"):
        calibrate_ensemble(ensemble, "student")
    with pytest.raises(InputError, match="method"):
        calibrate_ensemble(ensemble, "magic")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", "", "no rows"),
        ("a.csv", "e,e\n1,2\n", "same name"),
        ("a.csv", "e,f\n1\n", "row 1 has 1 cells"),
        ("a.npz", "nothing", "npz"),
        ("a.xyz", "nothing", "extended XYZ"),
    ],
)
def test_files_that_are_none(workplace, name, content, match):
    Path(name).write_text(content)
    with pytest.raises(InputError, match=match):
        read_ensemble(name, "e")
    with pytest.raises(InputError, match=r"path=.*No such file"):
        read_ensemble(f"missing-{name}", "e")


# --- the commands ---


def test_calibrate_and_apply(workplace):
    write("old.xyz", structures(300))
    write("new.xyz", structures(200, seed=1))
    ended = command("calibrate old.xyz --target energy -o energy.json --method student")
    assert "student: α = " in ended.out
    assert "cross-validation" in ended.err
    command("apply energy.json new.xyz -o out.xyz")
    frames = read_frames("out.xyz")
    before = structures(200, seed=1)
    mean, std = members_of(before).mean(axis=1), members_of(before).std(axis=1, ddof=1)
    calibrated = members_of(frames)
    np.testing.assert_allclose(calibrated.mean(axis=1), mean, atol=1e-12)
    errors = np.array([atoms.info["energy_uncertainty"] for atoms in frames])
    np.testing.assert_allclose(calibrated.std(axis=1, ddof=1), errors)
    alpha = read_calibration("energy.json").parameters["alpha"]
    np.testing.assert_allclose(errors, std * np.sqrt((R - 1) / (R - 3) * (alpha**2 + 1 / R)))
    covered = np.abs(references_of(frames) - mean) < errors
    assert 0.6 < covered.mean() < 0.82
    for old, new in zip(before, frames, strict=True):
        np.testing.assert_allclose(new.arrays["REF_forces"], old.arrays["REF_forces"], atol=1e-7)
        assert new.info["config_type"] == old.info["config_type"]


def test_a_report_of_an_ensemble(workplace):
    write("p.xyz", structures(60))
    command(
        "calibrate p.xyz --target forces -o c.json --method student --units eV/Å --report r.html"
    )
    page = Path("r.html").read_text()
    assert f"by {R} members" in page
    assert "eV/Å" in page
    assert "left out" in page
    before = Path("r.html").read_bytes()
    assert qualms("calibrate p.xyz --target energy -o d.json --report r.html").code == 2
    assert Path("r.html").read_bytes() == before
    assert not Path("d.json").exists()


def test_the_worst_forces_are_named_by_component(workplace):
    frames = structures(30)
    frames[5].arrays["REF_forces"][2, 1] -= 100
    write("p.xyz", frames)
    command("calibrate p.xyz --target forces -o c.json --method student --report r.html")
    page = Path("r.html").read_text()
    first = re.search(r"<tbody>\n<tr>.*?</tr>", page[page.index("Largest errors for") :]).group()
    assert "<td>2 " in first
    assert "<td>y</td>" in first


def test_a_report_says_what_the_terminal_says(workplace):
    write("p.xyz", structures(60))
    options = "--target forces --by element --method student"
    command(f"calibrate p.xyz {options} -o c.json --report r.html")
    page = Path("r.html").read_text()
    for words in ("Methods on points left out", "ΔBIC", "Factors by group", "alone", "shrinkage"):
        assert words in page
    groups = read_calibration("c.json").groups
    for symbol, group in groups.items():
        assert f'<tr><th scope="row">{symbol}</th><td>{group.n_points}</td>' in page
        assert f"<td>{group.factor:.3f}</td>" in page
    assert "a factor for each element" in page
    assert 'href="#factors-by-group"' in page


def test_forces_are_applied_by_element(workplace):
    write("old.xyz", structures(200))
    ended = command("calibrate old.xyz --target forces --by element -o forces.json --json")
    document = json.loads(ended.out)
    written = json.loads(Path("forces.json").read_text())
    assert {key: document[key] for key in written} == written
    assert document["comparison"][0]["behind"] == 0
    assert {r["column"] for r in document["score_intervals"]} >= {"after calibration"}
    assert set(document["groups"]) == set(FACTORS)
    new = structures(100, seed=1)
    stranger = molecule("HF")
    stranger.arrays["forces_comm"] = np.random.default_rng(0).normal(size=(2, 3 * R))
    write("new.xyz", [*new, stranger])
    ended = command("apply forces.json new.xyz -o out.xyz --no-members")
    assert "without a factor: F" in ended.err
    frames = read_frames("out.xyz")
    assert "forces_comm" not in frames[0].arrays
    sigma = np.concatenate([atoms.arrays["forces_uncertainty"] for atoms in frames[:-1]])
    predicted = np.concatenate([atoms.get_forces() for atoms in frames[:-1]])
    truth = np.concatenate([atoms.arrays["REF_forces"] for atoms in frames[:-1]])
    assert 0.64 < np.mean(np.abs(predicted - truth) < sigma) < 0.76


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_tables_come_back_as_tables(workplace, suffix):
    members, y = good(100)
    write_columns(f"p{suffix}", {"e_ensemble": members, "REF_e": y, "name": np.array(["x"] * 100)})
    command(f"calibrate p{suffix} --target e -o c.json --method linear")
    command(f"apply c.json p{suffix} -o out{suffix}")
    found = read_columns(f"out{suffix}")
    alpha = read_calibration("c.json").parameters["alpha"]
    np.testing.assert_allclose(found["e_uncertainty"], alpha * members.std(axis=1, ddof=1))
    np.testing.assert_allclose(found["e"], members.mean(axis=1))
    assert list(found["name"]) == ["x"] * 100
    again = read_ensemble(f"out{suffix}", "e")
    np.testing.assert_allclose(again.std, found["e_uncertainty"])


def test_variances_come_back_as_variances(workplace):
    members, y = good(100)
    mean, var = members.mean(axis=1), members.var(axis=1)
    np.savez("p.npz", e=mean, e_var=var, REF_e=y)
    command("calibrate p.npz --target e -o c.json --method linear")
    command("apply c.json p.npz -o out.npz")
    found = np.load("out.npz")
    np.testing.assert_allclose(found["e_var"], found["e_uncertainty"] ** 2)


def test_no_old_error_bar_contradicts_the_new_one(workplace):
    frames = structures(60, forces=False)
    for atoms in frames:
        atoms.info["energy_var"] = atoms.info["energy_comm"].var(ddof=1)
    write("p.xyz", frames)
    command("calibrate p.xyz --target energy -o c.json --method linear")
    command("apply c.json p.xyz -o out.xyz")
    for atoms in read_frames("out.xyz"):
        info = atoms.info
        assert info["energy_var"] == pytest.approx(info["energy_uncertainty"] ** 2)
        assert info["energy_var"] == pytest.approx(info["energy_comm"].var(ddof=1))


def test_predictions_of_a_model_are_calibrated_again_and_judged(workplace, molecules, energy_model):
    energy_model.save("model.safetensors")
    for name, some in (("a.xyz", molecules[60:120]), ("b.xyz", molecules[120:])):
        write(name, some)
    command("predict model.safetensors a.xyz --ensemble -o predicted.xyz")
    command(f"calibrate predicted.xyz --target {ENERGY} -o c.json --method linear")
    document = json.loads(
        command("evaluate model.safetensors b.xyz --calibration c.json --json").out
    )
    names = {row["name"]: row for row in document["scores"]}
    own, further = names["student (internal)"], names["c.json (linear)"]
    assert further["rmse"] == pytest.approx(own["rmse"])
    alpha = read_calibration("c.json").parameters["alpha"]
    assert further["sharpness"] == pytest.approx(alpha * own["sharpness"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("calibrate p.xyz --target enrgy -o c.json", "energy_comm"),
        ("calibrate p.xyz --target energy --reference truth -o c.json", "REF_energy"),
        ("calibrate p.xyz --target energy --by element -o c.json", "needs a property of atoms"),
        ("calibrate p.xyz --target energy --method best -o c.json", "one of auto"),
        ("calibrate p.xyz --target energy -o here.json", "--force"),
        ("calibrate p.xyz --target energy -o p.xyz --force", "another file"),
        ("calibrate p.xyz --target energy -o x.html --report x.html", "another file"),
        ("apply good.json p.xyz -o good.json --force", "another file|format"),
        ("apply good.json p.xyz -o p.xyz --force", "another file"),
        ("calibrate p.xyz --target energy -o ./y.html --report y.html", "another file"),
        ("calibrate missing.xyz --target energy -o c.json", "missing.xyz"),
        ("apply here.json p.xyz -o out.xyz", "qualms calibrate"),
        ("apply broken.json p.xyz -o out.xyz", "JSON"),
        ("apply newer.json p.xyz -o out.xyz", "Update qualms"),
        ("apply hostile.json p.xyz -o out.xyz", "calibration file"),
        ("apply good.json p.xyz -o out.csv", "format"),
        ("apply good.json p.xyz --target forces -o out.xyz", "each component|each atom"),
    ],
)
def test_bad_commands_end_in_one_line_and_write_nothing(workplace, text, match):
    write("p.xyz", structures(40))
    command("calibrate p.xyz --target energy -o good.json")
    Path("here.json").write_text("{}")
    Path("broken.json").write_text("{")
    content = json.loads(Path("good.json").read_text())
    Path("newer.json").write_text(json.dumps(content | {"version": 99}))
    Path("hostile.json").write_text(json.dumps(content | {"parameters": {"alpha": "x" * 10}}))
    before = {p: p.read_bytes() for p in Path().iterdir()}
    ended = qualms(text)
    assert ended.code == 2
    assert len(ended.err.splitlines()[-1:]) == 1
    assert re.search(match, ended.err), ended.err
    assert {p: p.read_bytes() for p in Path().iterdir()} == before


def test_infinities_and_nonsense_in_a_calibration_are_refused(workplace):
    write("p.xyz", structures(40, forces=False))
    command("calibrate p.xyz --target energy -o good.json")
    content = json.loads(Path("good.json").read_text())
    for change in (
        {"parameters": content["parameters"] | {"alpha": float("inf")}},
        {"parameters": content["parameters"] | {"omega": 1.0}},
        {"method": "magic"},
        {"kind": "molecule"},
        {"extra": 1},
    ):
        Path("bad.json").write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=r"bad\.json"):
            read_calibration("bad.json")


def test_a_calibration_of_other_things_is_not_applied(workplace):
    write("p.xyz", structures(40))
    command("calibrate p.xyz --target energy -o good.json")
    with pytest.raises(InputError, match="each"):
        apply_calibration(read_calibration("good.json"), "p.xyz", "o.xyz", target="forces")
