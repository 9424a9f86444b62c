"""Files as others store them: orders of components, tensors, masks, and what does not fit."""

import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from atomistic_fixtures import ENERGY, command, qualms

from qualms.atomistic.structures import read_frames
from qualms.ensembles.calibrate import calibrate_ensemble
from qualms.ensembles.calibration_file import read_calibration
from qualms.ensembles.io import find_layout, read_columns, read_ensemble, write_columns
from qualms.errors import CalibrationError, InputError

AXES = "xyz"


def refused(text):
    ended = qualms(text)
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.err
    return ended.err


def vectors(n=200, n_members=6, k=3, signal=1.0, seed=0):
    """Members (n, R, k) of vectors, and their truth (n, k)."""
    rng = np.random.default_rng(seed)
    mu, s = signal * rng.normal(size=(n, k)), np.exp(rng.normal(-1, 0.4, size=(n, k)))
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, n_members, k))
    return members, mu + 2 * s * rng.normal(size=(n, k))


def flat(members, order):
    ordered = members if order == "member" else members.transpose(0, 2, 1)
    return ordered.reshape(len(members), -1)


def points_of(members):
    return members.transpose(0, 2, 1).reshape(-1, members.shape[1])


# --- orders of components ---


@pytest.mark.parametrize("order", ["member", "component"])
@pytest.mark.parametrize("signal", [1.0, 0.25])
def test_weak_signals_tell_the_order(workplace, order, signal):
    """The distance from the truth is dominated by noise; the difference of both orders is not."""
    members, y = vectors(n=1000, n_members=3, signal=signal)
    np.savez("v.npz", f_ensemble=flat(members, order), REF_f=y)
    found = read_ensemble("v.npz", "f")
    assert found.layout.order == order
    assert not found.remarks
    np.testing.assert_array_equal(found.members, points_of(members))


@pytest.mark.parametrize("order", ["member", "component"])
def test_as_many_members_as_components(workplace, order):
    members, y = vectors(n_members=3)
    stored = members if order == "member" else members.transpose(0, 2, 1)
    assert stored.shape == (200, 3, 3)
    np.savez("v.npz", f_ensemble=stored, REF_f=y)
    found = read_ensemble("v.npz", "f")
    assert found.layout.order == order
    np.testing.assert_array_equal(found.members, points_of(members))


def test_an_order_that_is_not_certain_is_said_and_can_be_given(workplace):
    members, y = vectors(n=30, signal=0.0)
    np.savez("v.npz", f_ensemble=flat(members, "component"), REF_f=y)
    ended = command("calibrate v.npz --target f -o c.json --method linear")
    assert "not certain" in ended.err
    assert "--order" in ended.err
    ended = command("calibrate v.npz --target f -o d.json --method linear --order component")
    assert "not certain" not in ended.err
    assert json.loads(Path("d.json").read_text())["order"] == "component"
    assert "one of member, component" in refused("calibrate v.npz --target f -o e.json --order x")
    np.savez("w.npz", f_ensemble=members, REF_f=y)
    assert "shape" in refused("calibrate w.npz --target f -o e.json --order component")


def test_an_order_against_all_evidence_is_doubted(workplace):
    members, y = vectors()
    np.savez("v.npz", f_ensemble=flat(members, "member"), REF_f=y)
    found = read_ensemble("v.npz", "f", order="component")
    assert "closer to the reference" in found.remarks[0]


def test_the_calibration_tells_the_order_of_new_predictions(workplace):
    members, y = vectors()
    np.savez("old.npz", f_ensemble=flat(members, "component"), REF_f=y)
    command("calibrate old.npz --target f -o c.json --method linear")
    assert read_calibration("c.json").order == "component"
    new, _ = vectors(n=20, seed=1, signal=0.0)
    np.savez("new.npz", f_ensemble=flat(new, "component"))
    command("apply c.json new.npz -o out.npz")
    found = np.load("out.npz")
    alpha = read_calibration("c.json").parameters["alpha"]
    np.testing.assert_allclose(found["f_uncertainty"], alpha * new.std(axis=1, ddof=1))
    np.testing.assert_allclose(found["f"], new.mean(axis=1))
    # Members come back in the order in which they came.
    back = found["f_ensemble"].reshape(20, 3, 6)
    np.testing.assert_allclose(back.std(axis=2, ddof=1), found["f_uncertainty"])


def test_a_stored_mean_overrules_the_calibration_and_that_is_said(workplace):
    members, y = vectors()
    np.savez("old.npz", f_ensemble=flat(members, "component"), REF_f=y)
    command("calibrate old.npz --target f -o c.json --method linear")
    np.savez("new.npz", f_ensemble=flat(members[:1], "member"), f=members[:1].mean(axis=1))
    ended = command("apply c.json new.npz -o out.npz")
    assert "member by member here" in ended.err
    np.testing.assert_allclose(np.load("out.npz")["f"], members[:1].mean(axis=1))


@pytest.mark.parametrize("signal", [0.0, 0.3, 1.0])
def test_no_order_is_read_wrongly_in_silence(signal):
    """Whatever the sizes, the offsets of components and the biases of members are."""
    silent = 0
    for seed in range(200):
        rng = np.random.default_rng([seed, int(10 * signal)])
        n, n_members, k = rng.integers(2, 300), rng.integers(2, 9), rng.choice([3, 6, 9])
        members, y = vectors(n, n_members, k, signal, seed)
        if seed % 3 == 0:
            offset = rng.normal(size=k)
            members, y = members + offset, y + offset
        if seed % 2 == 0:
            members = members + rng.normal(size=(1, n_members, 1))
        order = ["member", "component"][seed // 2 % 2]
        layout, remarks = find_layout("f", flat(members, order), k, {"the reference": y})
        silent += not remarks
        assert remarks or layout.order == order
    assert signal < 1 or silent > 120


@pytest.mark.parametrize("form", ["(n,R,3)", "(n,3,R)"])
def test_members_come_back_in_their_shape(workplace, form):
    members, y = vectors(n=60)
    stored = members if form == "(n,R,3)" else members.transpose(0, 2, 1)
    np.savez("v.npz", f_ensemble=stored, REF_f=y)
    command("calibrate v.npz --target f -o c.json --method linear")
    command("apply c.json v.npz -o out.npz")
    found = np.load("out.npz")
    assert found["f_ensemble"].shape == stored.shape
    axis = 1 if form == "(n,R,3)" else 2
    np.testing.assert_allclose(found["f_ensemble"].std(axis=axis, ddof=1), found["f_uncertainty"])


def test_members_of_a_scalar_are_no_matrix(workplace):
    members, y = vectors(n=30)
    np.savez("v.npz", f_ensemble=members, REF_f=y[:, 0])
    with pytest.raises(InputError, match=r"f_ensemble.*\(30, 6, 3\).*\(30, N_R\)"):
        read_ensemble("v.npz", "f")


# --- tensors ---


def test_matrices_in_npz(workplace):
    members, y = vectors(n=60, k=9)
    np.savez(
        "v.npz",
        w_ensemble=members.reshape(60, 6, 3, 3),
        w=members.mean(axis=1).reshape(60, 3, 3),
        REF_w=y.reshape(60, 3, 3),
    )
    command("calibrate v.npz --target w -o c.json --method linear")
    command("apply c.json v.npz -o out.npz")
    found = np.load("out.npz")
    assert found["w_uncertainty"].shape == found["w"].shape == (60, 3, 3)
    np.testing.assert_allclose(found["w_ensemble"].std(axis=1, ddof=1), found["w_uncertainty"])
    np.savez("new.npz", w_ensemble=members.reshape(60, 6, 3, 3))
    command("apply c.json new.npz -o out2.npz")
    np.testing.assert_array_equal(np.load("out2.npz")["w_uncertainty"], found["w_uncertainty"])


@pytest.mark.parametrize("flat_members", [True, False])
@pytest.mark.parametrize("name", ["w", "virial"])
def test_matrices_that_are_not_symmetric_in_xyz(workplace, name, flat_members):
    members, y = vectors(n=40, k=9)
    frames = []
    for some, truth in zip(members, y, strict=True):
        info = {
            name: some.mean(axis=0).reshape(3, 3),
            f"{name}_ensemble": some.ravel() if flat_members else some.reshape(6, 3, 3),
            f"REF_{name}": truth.reshape(3, 3),
        }
        frames.append(Atoms("H", info=info))
    ase.io.write("p.xyz", frames, format="extxyz")
    found = read_ensemble("p.xyz", name)
    np.testing.assert_allclose(found.y, y.ravel())
    np.testing.assert_allclose(found.members, points_of(members))
    command(f"calibrate p.xyz --target {name} -o c.json --method linear")
    command("apply c.json p.xyz -o out.xyz")
    for old, new in zip(frames, read_frames("out.xyz"), strict=True):
        np.testing.assert_allclose(new.info[name], old.info[name])
        np.testing.assert_allclose(new.info[f"REF_{name}"], old.info[f"REF_{name}"])
        assert new.info[f"{name}_ensemble"].shape == old.info[f"{name}_ensemble"].shape
        spread = new.info[f"{name}_ensemble"].reshape(6, 3, 3).std(axis=0, ddof=1)
        np.testing.assert_allclose(new.info[f"{name}_uncertainty"], spread)


def test_stresses_that_ase_has_read_are_written_such_that_it_reads_them_again(workplace):
    members, y = vectors(n=40, n_members=5, k=6)
    full = [0, 5, 4, 5, 1, 3, 4, 3, 2]  # of six to nine
    frames = []
    for some, truth in zip(members[..., full], y[:, full], strict=True):
        atoms = Atoms("H", cell=[3, 3, 3], pbc=True)
        atoms.info |= {
            "energy_ensemble": some[:, 0],
            "REF_energy": truth[0],
            "stress_ensemble": some.ravel(),
            "REF_stress": truth,
        }
        atoms.calc = SinglePointCalculator(atoms, stress=some.mean(axis=0)[[0, 4, 8, 5, 2, 1]])
        frames.append(atoms)
    ase.io.write("p.xyz", frames, format="extxyz")
    for target in ("energy", "stress"):
        command(f"calibrate p.xyz --target {target} -o {target}.json --method linear")
        command(f"apply {target}.json p.xyz -o {target}.xyz")
        for old, new in zip(frames, read_frames(f"{target}.xyz"), strict=True):
            np.testing.assert_allclose(new.get_stress(), old.get_stress())
    uncertainty = read_frames("stress.xyz")[0].info["stress_uncertainty"]
    np.testing.assert_allclose(uncertainty.reshape(3, 3), uncertainty.reshape(3, 3).T)


# --- vectors in tables ---


@pytest.mark.parametrize("components", [list(AXES), ["0", "1", "2"]])
def test_vectors_in_columns(workplace, components):
    members, y = vectors(n=80)
    columns = {f"f_ensemble_{i}": flat(members, "member")[:, i] for i in range(18)}
    columns |= {f"REF_f_{c}": y[:, i] for i, c in enumerate(components)}
    columns |= {f"f_{c}": members.mean(axis=1)[:, i] for i, c in enumerate(components)}
    write_columns("p.csv", columns)
    found = read_ensemble("p.csv", "f")
    assert (found.n_components, found.n_members) == (3, 6)
    np.testing.assert_array_equal(found.members, points_of(members))
    np.testing.assert_array_equal(found.y, y.ravel())
    command("calibrate p.csv --target f -o c.json --method linear")
    command("apply c.json p.csv -o out.csv")
    after = read_columns("out.csv")
    assert list(after)[: len(columns)] == list(columns)
    alpha = read_calibration("c.json").parameters["alpha"]
    for i, c in enumerate(components):
        expected = alpha * members[..., i].std(axis=1, ddof=1)
        np.testing.assert_allclose(after[f"f_uncertainty_{c}"], expected)
    np.testing.assert_allclose(
        read_ensemble("out.csv", "f").std, alpha * points_of(members).std(axis=1, ddof=1)
    )


@pytest.mark.parametrize("form", ["f_{i}_{c}", "f_{c}_{i}", "f_ensemble_{c}_{i}"])
def test_columns_that_name_member_and_component(workplace, form):
    members, y = vectors(n=30, n_members=3, signal=0.0)
    columns = {
        form.format(i=i, c=c): members[:, i, j] for i in range(3) for j, c in enumerate(AXES)
    }
    write_columns("p.csv", columns | {f"REF_f_{c}": y[:, i] for i, c in enumerate(AXES)})
    found = read_ensemble("p.csv", "f")
    np.testing.assert_array_equal(found.members, points_of(members))
    assert not found.remarks
    command("calibrate p.csv --target f -o c.json --method linear")
    command("apply c.json p.csv -o out.csv")
    again = read_ensemble("out.csv", "f")
    np.testing.assert_allclose(again.mean, found.mean)
    command("apply c.json p.csv -o bars.csv --no-members")
    assert not {*columns} & {*read_columns("bars.csv")}
    np.testing.assert_allclose(read_ensemble("bars.csv", "f").std, again.std)


def test_numbered_members_of_vectors_do_not_mix_with_their_mean(workplace):
    members, y = vectors(n=60)
    columns = {f"f_{i}": flat(members, "member")[:, i] for i in range(18)}
    write_columns("p.csv", columns | {f"REF_f_{i}": y[:, i] for i in range(3)})
    command("calibrate p.csv --target f -o c.json --method linear")
    command("apply c.json p.csv -o out.csv")
    again = read_ensemble("out.csv", "f")
    np.testing.assert_allclose(again.mean, points_of(members).mean(axis=1), atol=1e-12)
    alpha = read_calibration("c.json").parameters["alpha"]
    np.testing.assert_allclose(again.std, alpha * points_of(members).std(axis=1, ddof=1))


# --- masks ---


def masked(n=200, n_members=10, seed=0):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(n, n_members))
    y = members.mean(axis=1) + rng.normal(size=n)
    absent = np.argsort(rng.random(members.shape), axis=1) < 5
    return np.where(absent, members, np.nan), y, absent


def test_members_that_saw_a_point_may_be_missing_when_a_calibration_is_applied(workplace):
    members, y, absent = masked()
    np.savez("p.npz", e_ensemble=members, REF_e=y, e_absent=absent)
    command("calibrate p.npz --target e -o c.json --method student")
    command("apply c.json p.npz -o out.npz")
    found = np.load("out.npz")
    alpha = read_calibration("c.json").parameters["alpha"]
    spread = np.nanstd(members, axis=1, ddof=1)
    np.testing.assert_allclose(found["e"], np.nanmean(members, axis=1))
    np.testing.assert_allclose(found["e_uncertainty"], spread * np.sqrt(4 / 2 * (alpha**2 + 1 / 5)))
    np.testing.assert_array_equal(np.isnan(found["e_ensemble"]), ~absent)
    np.testing.assert_allclose(
        np.nanstd(found["e_ensemble"], axis=1, ddof=1), found["e_uncertainty"]
    )


def test_a_mask_of_another_name_and_one_that_leaves_too_few(workplace):
    members, y, absent = masked()
    np.savez("p.npz", e_ensemble=members, REF_e=y, unseen=absent)
    command("calibrate p.npz --target e -o c.json --absent unseen")
    assert "e_absent" in refused("apply c.json p.npz -o out.npz")
    command("apply c.json p.npz -o out.npz --absent unseen")
    absent[:7] = np.arange(10) < 2
    np.savez("few.npz", e_ensemble=np.nan_to_num(members), e_absent=absent)
    said = command("apply c.json few.npz -o o.npz").err
    assert "7 structures that fewer than 3 members had not seen: NaN is written" in said
    found = np.load("o.npz")
    for key in ("e", "e_uncertainty", "e_ensemble"):
        assert np.isnan(found[key][:7]).all()
        assert np.isfinite(found[key][7:]).all()


def test_negative_error_bars_have_a_message_of_their_own(workplace):
    members, y, _ = masked()
    mean, std = np.nanmean(members, axis=1), np.nanstd(members, axis=1)
    np.savez("p.npz", e=mean, e_uncertainty=std, REF_e=y)
    command("calibrate p.npz --target e -o c.json --method linear")
    np.savez("n.npz", e=mean, e_uncertainty=np.where(np.arange(200) < 1, -std, std))
    assert "1 negative value cannot" in refused("apply c.json n.npz -o out.npz")
    np.savez("n.npz", e=np.where(np.arange(200) < 2, np.nan, mean), e_uncertainty=std)
    message = command("apply c.json n.npz -o out.npz").err
    assert "2 structures with NaN" in message
    assert "negative" not in message
    np.savez("n.npz", e=np.full(200, np.nan), e_uncertainty=std)
    assert "200 structures with NaN" in refused("apply c.json n.npz -o out2.npz")


# --- calibrations in evaluations ---


def test_a_calibration_that_was_fitted_to_the_test_set_is_noticed(
    workplace, molecules, energy_model
):
    energy_model.save("model.safetensors")
    for name, some in (("a.xyz", molecules[60:120]), ("b.xyz", molecules[120:])):
        ase.io.write(name, some, format="extxyz")
    command("predict model.safetensors a.xyz --ensemble -o p.xyz")
    command(f"calibrate p.xyz --target {ENERGY} -o c.json --method linear")
    same = command("evaluate model.safetensors a.xyz --calibration c.json").out
    assert "about 100% have the label of a point here" in same
    other = json.loads(command("evaluate model.safetensors b.xyz --calibration c.json --json").out)
    assert other["remarks"] == ["c.json (linear): fitted to 60 points."]


def test_a_calibration_by_groups_judges_a_model(workplace, molecules, energy_model):
    """Factors of one change nothing, factors of two double the error bars."""
    energy_model.save("model.safetensors")
    frames = [atoms.copy() for atoms in molecules[60:]]
    for i, atoms in enumerate(frames):
        atoms.info["config_type"] = ["calm", "wild"][i % 2]
    ase.io.write("a.xyz", frames[:60], format="extxyz")
    ase.io.write("b.xyz", frames[60:], format="extxyz")
    command("predict model.safetensors a.xyz --ensemble -o p.xyz")
    options = f"--target {ENERGY} --method linear"
    command(f"calibrate p.xyz {options} -o all.json")
    command(f"calibrate p.xyz {options} --by config_type -o groups.json")
    content = json.loads(Path("groups.json").read_text())
    assert {*content["groups"]} == {"calm", "wild"}
    for factor in (1.0, 2.0):
        content |= {"parameters": json.loads(Path("all.json").read_text())["parameters"]}
        for group in content["groups"].values():
            group["factor"] = factor
        Path("twice.json").write_text(json.dumps(content))
        scores = {}
        for name in ("all", "twice"):
            ended = command(f"evaluate model.safetensors b.xyz --calibration {name}.json --json")
            rows = {row["name"]: row for row in json.loads(ended.out)["scores"]}
            scores[name] = rows[f"{name}.json (linear)"]["sharpness"]
        assert scores["twice"] == pytest.approx(factor * scores["all"])
    command("report model.safetensors b.xyz --calibration twice.json -o r.html")
    page = Path("r.html").read_text()
    assert "twice.json (linear)</th>" in page
    assert "twice.json (linear): fitted to 60 points." in page
    del content["groups"]["wild"]
    Path("twice.json").write_text(json.dumps(content))
    said = command("evaluate model.safetensors b.xyz --calibration twice.json").out
    assert "without a factor: wild" in said
    for atoms in frames:
        del atoms.info["config_type"]
    ase.io.write("c.xyz", frames[60:], format="extxyz")
    assert "structures with a config_type" in refused(
        "evaluate model.safetensors c.xyz --calibration groups.json"
    )


def test_a_calibration_of_error_bars_counts_no_members(workplace, molecules, energy_model):
    energy_model.save("model.safetensors")
    ase.io.write("a.xyz", molecules[60:120], format="extxyz")
    command("predict model.safetensors a.xyz -o p.xyz")
    command(f"calibrate p.xyz --target {ENERGY} -o c.json --method linear")
    said = command("evaluate model.safetensors a.xyz --calibration c.json").out
    assert "made of error bars alone" in said
    content = json.loads(Path("c.json").read_text())
    content |= {"method": "student"}
    Path("bad.json").write_text(json.dumps(content))
    assert "needs n_members" in refused("evaluate model.safetensors a.xyz --calibration bad.json")


# --- what does not fit ---


def saved(**arrays):
    np.savez("bad.npz", **arrays)
    return read_ensemble("bad.npz", "e")


def test_error_bars_beside_members_must_fit(workplace):
    members, y, _ = masked()
    members = np.nan_to_num(members)
    with pytest.raises(InputError, match=r"e_uncertainty.*200 rows"):
        saved(e_ensemble=members, REF_e=y, e_uncertainty=np.ones(199))
    with pytest.raises(InputError, match=r"e_var.*\(200, 2\)"):
        saved(e_ensemble=members, REF_e=y, e_var=np.ones((200, 2)))


def test_the_array_that_differs_from_the_others_is_to_blame(workplace):
    y = np.arange(60.0)
    with pytest.raises(InputError, match=r"e_uncertainty=shape \(50,\).*60 rows"):
        saved(e=y, e_uncertainty=np.ones(50), REF_e=y)
    with pytest.raises(InputError, match=r"e=shape \(50,\).*60 rows"):
        saved(e=y[:50], e_uncertainty=np.ones(60), REF_e=y)
    with pytest.raises(InputError, match="complex"):
        saved(e=y, e_uncertainty=np.ones(60) + 1j, REF_e=y)


def test_one_point_that_is_left_is_not_enough(workplace):
    members, y, _ = masked()
    y[1:] = np.nan
    ensemble = saved(e_ensemble=np.nan_to_num(members), REF_e=y)
    with pytest.raises(CalibrationError, match=r"Only one point.*199 structures without a ref"):
        calibrate_ensemble(ensemble)


def test_a_part_without_any_error_is_named(workplace):
    members, _, _ = masked()
    members = np.nan_to_num(members)[:2]
    ensemble = saved(e_ensemble=members, REF_e=members.mean(axis=1) + np.arange(2.0))
    with pytest.raises(CalibrationError, match=r"residuals of 1 point .* zero"):
        calibrate_ensemble(ensemble, "linear")


def test_spreads_that_differ_by_noise_alone_tell_no_exponent(workplace):
    rng = np.random.default_rng(0)
    members = rng.normal(size=(60, 6))
    ensemble = saved(e_ensemble=members, REF_e=members.mean(axis=1) + rng.normal(size=60))
    found = calibrate_ensemble(ensemble, "shrinkage")
    assert found.calibration.log_spread_std < 0.01
    assert found.intervals.gamma is None
    low, high = found.intervals.alpha
    assert low < found.calibration.alpha < high < 2 * low


def test_transposed_members_are_to_blame(workplace):
    members, y, _ = masked()
    with pytest.raises(InputError, match=r"e_ensemble.*\(10, 200\).*200 rows.*transposed"):
        saved(e_ensemble=members.T, REF_e=y)


@pytest.mark.parametrize(("n", "method"), [(2, "power"), (4, "shrinkage")])
def test_as_many_parameters_as_points_are_refused(workplace, n, method):
    members, y, _ = masked()
    ensemble = saved(e_ensemble=np.nan_to_num(members)[:n], REF_e=y[:n])
    with pytest.raises(CalibrationError, match=rf"{n} points are too few.*at least {n + 1} are"):
        calibrate_ensemble(ensemble, method)


def test_a_constant_error_bar_tells_no_exponent(workplace):
    _, y, _ = masked()
    np.savez("p.npz", e=np.zeros(200), e_uncertainty=np.ones(200), REF_e=y)
    ended = command("calibrate p.npz --target e -o c.json --method power")
    assert "γ = 1.000 (cannot be told" in ended.out
    assert set(json.loads(Path("c.json").read_text())["intervals"]) == {"alpha"}


@pytest.mark.parametrize("n", [3, 5, 10])
def test_few_points_have_an_interval_whatever_the_method(workplace, n):
    rng = np.random.default_rng(n)
    members = rng.normal(size=(n, 8))
    np.savez("p.npz", e_ensemble=members, REF_e=members.mean(axis=1) + rng.normal(size=n))
    for method, names in (("none", []), ("linear", ["alpha"]), ("student", ["alpha"])):
        ended = command(f"calibrate p.npz --target e -o c.json --method {method} --force")
        assert f"Only {n} independent points: " in ended.err
        assert "between" in ended.err
        content = json.loads(Path("c.json").read_text())
        assert [*content["intervals"]] == names
        assert ("by student, α = " in ended.out or "by linear, α = " in ended.out) == (not names)


def test_numbers_and_words_agree(workplace):
    rng = np.random.default_rng(0)
    members = rng.normal(size=(4, 6))
    y = members.mean(axis=1) + rng.normal(size=4)
    y[0] = np.nan
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    ended = command("calibrate p.npz --target e -o c.json --method linear")
    assert "1 structure without a reference value: left out." in ended.err
    assert "each of 3 parts" in ended.out
