"""Ensembles of other programs: reading, calibrating, sanity checks, applying."""

import csv
import json
import re
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from checks import rejects

from qualms.calibration.methods import METHODS, STD_METHODS
from qualms.ensembles import (
    apply_calibration,
    calibrate_ensemble,
    read_calibration,
    read_ensemble,
    write_calibration,
)
from qualms.ensembles.calibrate import evaluate_ensemble
from qualms.ensembles.calibration_file import make_document
from qualms.ensembles.io import read_source
from qualms.errors import CalibrationError, InputError
from qualms.io.predictions import open_writer
from qualms.prediction import Prediction

R = 6
FACTORS = {"H": 0.7, "C": 1.4, "N": 1.0, "O": 2.0}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # All methods are compared; the slow one is left out where it does not matter.
    monkeypatch.setattr(
        "qualms.ensembles.calibrate.METHODS", ("none", "linear", "power", "student")
    )


@pytest.fixture
def all_methods(monkeypatch):
    monkeypatch.setattr("qualms.ensembles.calibrate.METHODS", METHODS)


def committee(n=60, shape=(), alpha=2.0, n_members=R, seed=0):
    """Members (n, N_R, *shape) and reference values (n, *shape) with a known α."""
    rng = np.random.default_rng(seed)
    mu, s = rng.normal(size=(n, *shape)), np.exp(rng.normal(-2, 0.5, size=(n, *shape)))
    members = mu[:, None] + s[:, None] * rng.normal(size=(n, n_members, *shape))
    return members, mu + alpha * s * rng.normal(size=(n, *shape))


def load(path):
    with np.load(path) as arrays:
        return dict(arrays)


def vector_stds(document, members):
    """Standard deviations (n, 3) of vectors by a linear calibration of members (n, N_R, 3)."""
    std, u = members.std(axis=1, ddof=1), document.isotropy
    if u is not None:
        r2 = np.mean(std**2, axis=1, keepdims=True)
        std = np.sqrt((1 - u) * std**2 + u * r2)
    return document.parameters["alpha"] * std


def points_of(members):
    """Members (n, N_R, k) of vectors as members (n·k, N_R) of points."""
    return members.transpose(0, 2, 1).reshape(-1, members.shape[1])


def structures(n, seed=0, alpha=2.0):
    """Structures with energies and forces of committees, as MACE users store them."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(n):
        atoms = molecule(["H2O", "CH4", "NH3", "CH3OH"][i % 4])
        members, y = committee(1, (), alpha, seed=rng.integers(2**32))
        atoms.info |= {"energy_comm": members[0], "REF_energy": y[0]}
        atoms.info["config_type"] = "calm" if i % 3 else "wild"
        members, y = committee(len(atoms), (3,), 1.0, seed=rng.integers(2**32))
        factor = alpha * np.array([FACTORS[symbol] for symbol in atoms.symbols])[:, None]
        atoms.arrays["forces_comm"] = members.reshape(len(atoms), -1)
        atoms.arrays["REF_forces"] = members.mean(axis=1) + factor * (y - members.mean(axis=1))
        frames.append(atoms)
    return frames


def fit(path, target, method="linear", **options):
    """Calibrate the predictions of a file."""
    ensemble = read_ensemble(path, target, **options)
    return make_document(calibrate_ensemble(ensemble, method), ensemble, options.get("by"))


def fit_and_apply(path, target="e", output=None, method="linear", write_members=True, **options):
    document = fit(path, target, method, **options)
    output = output or f"out{Path(path).suffix}"
    return document, apply_calibration(
        document, path, output, write_members=write_members, force=True
    )


# --- reading structures ---


def test_energies_and_forces_of_structures():
    frames = structures(5)
    ase.io.write("p.xyz", frames)
    ensemble = read_ensemble("p.xyz", "energy", by="config_type")
    assert (ensemble.kind, ensemble.n_members, ensemble.key) == ("structure", R, "energy_comm")
    members = np.array([atoms.info["energy_comm"] for atoms in frames])
    np.testing.assert_allclose(ensemble.members, members)
    np.testing.assert_allclose(ensemble.std, members.std(axis=1, ddof=1))
    np.testing.assert_allclose(ensemble.y, [atoms.info["REF_energy"] for atoms in frames])
    assert ensemble.labels.tolist() == ["wild", "calm", "calm", "wild", "calm"]

    ensemble = read_ensemble("p.xyz", "forces", by="element")
    assert (ensemble.kind, ensemble.n_members, ensemble.n_components) == ("component", R, 3)
    assert len(ensemble) == 3 * sum(map(len, frames))
    first = frames[0].arrays["forces_comm"].reshape(3, R, 3)
    np.testing.assert_allclose(ensemble.members[:9], points_of(first), atol=1e-7)
    np.testing.assert_allclose(ensemble.y[:3], frames[0].arrays["REF_forces"][0], atol=1e-7)
    assert ensemble.labels[:9].tolist() == ["O"] * 3 + ["H"] * 6
    assert ensemble.atom[:9].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for atoms in frames:  # as the calculator of MACE returns them
        members = atoms.arrays.pop("forces_comm").reshape(len(atoms), R, 3)
        atoms.info["forces_comm"] = np.moveaxis(members, 1, 0)
    ase.io.write("info.xyz", frames)
    again = read_ensemble("info.xyz", "forces")
    np.testing.assert_allclose(again.members, ensemble.members, atol=1e-7)


def test_uncertainties_and_variances_alone():
    members, y = committee(40)
    mean, std = members.mean(axis=1), members.std(axis=1, ddof=1)
    for key, values in {"uncertainty": std, "std": std, "var": std**2}.items():
        np.savez("p.npz", e=mean, REF_e=y, **{f"e_{key}": values})
        ensemble = read_ensemble("p.npz", "e")
        assert ensemble.members is None
        np.testing.assert_allclose(ensemble.std, std)
        np.testing.assert_array_equal(ensemble.mean, mean)
        calibrated = calibrate_ensemble(ensemble)
        methods = {c.calibration.method for c in calibrated.comparison.candidates}
        assert methods == {*STD_METHODS}
        with rejects("method"):
            calibrate_ensemble(ensemble, "student")
        document, _ = fit_and_apply("p.npz")
        new = load("out.npz")
        expected = document.parameters["alpha"] * std
        np.testing.assert_allclose(new["e_uncertainty"], expected)
        np.testing.assert_allclose(new[f"e_{key}"], expected ** (1 + (key == "var")))


# --- order of members of vectors ---


def test_shapes_determine_the_order():
    members, y = committee(30, (3,))
    for stored, order in ((members, "member"), (members.transpose(0, 2, 1), "component")):
        np.savez("v.npz", f_ensemble=stored, REF_f=y)
        ensemble = read_ensemble("v.npz", "f")
        assert (ensemble.order, ensemble.remarks) == (order, ())
        np.testing.assert_array_equal(ensemble.members, points_of(members))
        fit_and_apply("v.npz", "f")
        new = load("out.npz")
        assert new["f_ensemble"].shape == stored.shape
        axis = 1 if order == "member" else 2
        np.testing.assert_allclose(new["f_ensemble"].std(axis=axis, ddof=1), new["f_uncertainty"])


@pytest.mark.parametrize("order", ["member", "component"])
@pytest.mark.parametrize("flat", [True, False])
def test_the_order_is_stated_where_the_shape_leaves_it_open(order, flat):
    members, y = committee(60, (3,), n_members=3)
    stored = members if order == "member" else members.transpose(0, 2, 1)
    stored = stored.reshape(60, 9) if flat else stored
    np.savez("v.npz", f_ensemble=stored, REF_f=y)
    ensemble = read_ensemble("v.npz", "f", order=order)
    assert not ensemble.remarks
    np.testing.assert_array_equal(ensemble.members, points_of(members))
    default = read_ensemble("v.npz", "f")
    assert (default.order, len(default.remarks)) == ("member", 1)
    np.savez("w.npz", f_ensemble=stored, REF_f=y, f=members.mean(axis=1))
    assert len(read_ensemble("w.npz", "f").remarks) == (order == "component")
    # The order of the calibration is that of new predictions.
    document = fit("v.npz", "f", order=order)
    assert document.order == order
    np.savez("new.npz", f_ensemble=stored)
    assert not apply_calibration(document, "new.npz", "out.npz").remarks
    new = load("out.npz")
    np.testing.assert_allclose(new["f"], members.mean(axis=1))
    np.testing.assert_allclose(new["f_uncertainty"], vector_stds(document, members))


@pytest.mark.parametrize("n_members", [4, 5])
def test_vectors_have_the_standard_deviation_of_all_components(n_members):
    rng = np.random.default_rng(0)
    s = np.exp(rng.normal(-2, 0.5, (400, 1)))
    members = s[:, None] * rng.normal(size=(400, n_members, 3))
    np.savez("v.npz", f_ensemble=members, REF_f=1.6 * s * rng.normal(size=(400, 3)))
    whole = calibrate_ensemble(read_ensemble("v.npz", "f"), "student")
    assert whole.isotropy == 1.0
    np.testing.assert_allclose(whole.std[::3], whole.std[1::3])
    np.savez("c.npz", f_ensemble=points_of(members), REF_f=whole.ensemble.y)
    alone = calibrate_ensemble(read_ensemble("c.npz", "f"), "student")
    assert alone.isotropy is None
    assert whole.after.log_likelihood > alone.after.log_likelihood + 0.02
    assert abs(whole.after.coverage_68 - 0.683) < abs(alone.after.coverage_68 - 0.683)
    # Whoever applies the file gets the same uncertainties as the points that it was fitted to.
    document = make_document(whole, whole.ensemble, None)
    apply_calibration(document, "v.npz", "out.npz")
    again = load("out.npz")["f_uncertainty"].reshape(-1)
    np.testing.assert_allclose(again, whole.std, rtol=0.1)


# --- tensors ---


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", ["w", "virial"])
def test_matrices_in_xyz(name, flat):
    members, y = committee(40, (9,))
    frames = []
    for some, reference in zip(members, y, strict=True):
        info = {
            name: some.mean(axis=0).reshape(3, 3),
            f"{name}_ensemble": some.ravel() if flat else some.reshape(R, 3, 3),
            f"REF_{name}": reference.reshape(3, 3),
        }
        frames.append(Atoms("H", info=info))
    ase.io.write("p.xyz", frames)
    ensemble = read_ensemble("p.xyz", name)
    np.testing.assert_allclose(ensemble.y, y.ravel())
    np.testing.assert_allclose(ensemble.members, points_of(members))
    fit_and_apply("p.xyz", name)
    for old, new in zip(frames, ase.io.read("out.xyz", ":"), strict=True):
        np.testing.assert_allclose(new.info[name], old.info[name])
        assert new.info[f"{name}_ensemble"].shape == old.info[f"{name}_ensemble"].shape
        std = new.info[f"{name}_ensemble"].reshape(R, 3, 3).std(axis=0, ddof=1)
        np.testing.assert_allclose(new.info[f"{name}_uncertainty"], std)


def test_stresses_that_ase_has_read():
    members, y = committee(40, (6,))
    full = [0, 5, 4, 5, 1, 3, 4, 3, 2]  # of six to nine
    frames = []
    for some, reference in zip(members[..., full], y[:, full], strict=True):
        atoms = Atoms("H", cell=[3, 3, 3], pbc=True)
        atoms.info |= {"stress_ensemble": some.ravel(), "REF_stress": reference}
        atoms.calc = SinglePointCalculator(atoms, stress=some.mean(axis=0)[[0, 4, 8, 5, 2, 1]])
        frames.append(atoms)
    ase.io.write("p.xyz", frames)
    fit_and_apply("p.xyz", "stress", order="member")
    for old, new in zip(frames, ase.io.read("out.xyz", ":"), strict=True):
        np.testing.assert_allclose(new.get_stress(), old.get_stress())


@pytest.mark.parametrize("with_members", [True, False])
@pytest.mark.parametrize("suffix", ["xyz", "npz"])
def test_predicted_stresses_and_reference_values_of_nine_numbers(suffix, with_members):
    members, y = committee(40, (6,), n_members=18)  # the numbers of twelve members of nine
    frames = [Atoms("H", cell=[3, 3, 3], pbc=True) for _ in y]
    tensors = {"stress": members.mean(axis=1), "stress_uncertainty": members.std(axis=1, ddof=1)}
    tensors |= {"stress_ensemble": members.reshape(40, -1)} if with_members else {}
    for atoms, reference in zip(frames, y, strict=True):
        atoms.info["s"] = reference[[0, 5, 4, 5, 1, 3, 4, 3, 2]].reshape(3, 3)
    with open_writer(f"p.{suffix}", "e", kind="structure", ensemble=False) as writer:
        writer.write(frames, Prediction(mean=y[:, 0], std=np.ones(40)), tensors=tensors)
    if suffix == "npz":
        np.savez("p.npz", **load("p.npz"), s=[atoms.info["s"] for atoms in frames])
    ensemble = read_ensemble(f"p.{suffix}", "stress", "s")
    assert (ensemble.n_components, ensemble.n_members) == (6, 18 if with_members else None)
    np.testing.assert_allclose(ensemble.y, y.ravel())
    np.testing.assert_allclose(ensemble.mean, tensors["stress"].ravel())
    np.testing.assert_allclose(ensemble.std, tensors["stress_uncertainty"].ravel())
    fit_and_apply(f"p.{suffix}", "stress", reference="s")
    again = read_ensemble(f"out.{suffix}", "stress", "s")
    np.testing.assert_allclose(again.mean, ensemble.mean)


# --- tables ---


def write_csv(path, columns):
    with Path(path).open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


@pytest.mark.parametrize("form", ["e_ensemble_{}", "e_{}"])
def test_other_columns_of_csv_keep_their_text(form):
    members, y = committee()
    names = [form.format(i) for i in range(R)]
    others = {
        "structure": [9007199254740993 + i for i in range(60)],
        "code": [f"{i:06d}" for i in range(60)],
        "ok": [["True", "False", "", "NA"][i % 4] for i in range(60)],
        "price": ["1.50"] * 60,
        "note": ["a, b", 'c "d"; '] * 30,
    }
    columns = {name: members[:, i].tolist() for i, name in enumerate(names)}
    write_csv("p.csv", others | columns | {"REF_e": ["", *y[1:].tolist()]})
    ensemble = read_ensemble("p.csv", "e", by="note")
    assert len(set(ensemble.structure)) == 60
    assert np.isnan(ensemble.y[0])
    assert ensemble.labels[0] == "a, b"
    np.testing.assert_array_equal(ensemble.members, members)
    document, _ = fit_and_apply("p.csv")
    with Path("out.csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == [*others, *columns, "REF_e", "e", "e_uncertainty"]
    after = dict(zip(header, zip(*rows, strict=True), strict=True))
    for name, cells in others.items():
        assert [*after[name]] == [*map(str, cells)]
    std = document.parameters["alpha"] * members.std(axis=1, ddof=1)
    np.testing.assert_allclose([float(cell) for cell in after["e_uncertainty"]], std)
    np.testing.assert_allclose(read_ensemble("out.csv", "e").std, std)


@pytest.mark.parametrize("components", [list("xyz"), ["0", "1", "2"]])
def test_vectors_in_columns(components):
    members, y = committee(60, (3,))
    columns = {f"f_ensemble_{i}": members.reshape(60, -1)[:, i] for i in range(3 * R)}
    columns |= {f"REF_f_{c}": y[:, i] for i, c in enumerate(components)}
    columns |= {f"f_{c}": members.mean(axis=1)[:, i] for i, c in enumerate(components)}
    write_csv("p.csv", columns)
    ensemble = read_ensemble("p.csv", "f", order="member")
    assert (ensemble.n_components, ensemble.n_members) == (3, R)
    np.testing.assert_array_equal(ensemble.members, points_of(members))
    document, _ = fit_and_apply("p.csv", "f", order="member")
    assert [*read_source("out.csv").columns][: len(columns)] == [*columns]
    again = read_ensemble("out.csv", "f", order="member")
    expected = vector_stds(document, members).reshape(-1)
    np.testing.assert_allclose(again.std, expected)
    np.testing.assert_allclose(again.mean, points_of(members).mean(axis=1), atol=1e-12)
    fit_and_apply("p.csv", "f", order="member", output="no.csv", write_members=False)
    assert not any(name.startswith("f_ensemble") for name in read_source("no.csv").columns)
    np.testing.assert_allclose(read_ensemble("no.csv", "f").std, expected)
    numbered = {f"f_{i}": columns[f"f_ensemble_{i}"] for i in range(3 * R)}
    write_csv("p.csv", numbered | {f"REF_f_{c}": y[:, i] for i, c in enumerate("xyz")})
    with rejects("f"):
        read_ensemble("p.csv", "f")


def test_parquet_keeps_the_types_of_other_columns():
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    members, y = committee()
    columns = {f"e_ensemble_{i}": [None, *members[1:, i]] for i in range(R)} | {
        "REF_e": y,
        "tags": [["a", "b"]] * 60,
        "k": arrow.array([1, None] * 30),
        "name": ["x", None] * 30,
        "flag": arrow.array([True, None] * 30),
        "kind": arrow.array(["a", "b"] * 30).dictionary_encode(),
    }
    parquet.write_table(arrow.table(columns), "p.parquet")
    document, applied = fit_and_apply("p.parquet", by="kind")
    assert {*document.groups} == {"a", "b"}
    assert len(applied.remarks) == 1  # the members that are missing
    before, after = parquet.read_table("p.parquet"), parquet.read_table("out.parquet")
    for name in ("REF_e", "tags", "k", "name", "flag", "kind"):
        assert after.column(name).equals(before.column(name)), name
    stored = np.column_stack([after.column(f"e_ensemble_{i}").to_numpy() for i in range(R)])
    std = after.column("e_uncertainty").to_numpy()
    assert np.isnan(std[0])
    np.testing.assert_allclose(stored[1:].std(axis=1, ddof=1), std[1:])


def test_tables_of_atoms_and_arrays_without_rows():
    members, y = committee()
    symbol = np.array(["H", "C"] * 30)
    structure, atom = np.divmod(np.arange(60), 2)
    arrays = {"structure": structure, "atom": atom, "symbol": symbol, "cutoff": 5.0}
    np.savez("p.npz", e_ensemble=members, REF_e=y, **arrays)
    ensemble = read_ensemble("p.npz", "e", by="element")
    assert (ensemble.kind, ensemble.labels.tolist()) == ("atom", symbol.tolist())
    fit_and_apply("p.npz", by="element")
    assert load("out.npz")["cutoff"] == 5.0


@pytest.mark.parametrize("kind", ["atomic", "structure"])
def test_arrays_of_structures_beside_values_of_atoms(kind):
    """NPZ files of predictions of atoms, or of forces, are read as other formats are."""
    rng = np.random.default_rng(0)
    frames = [molecule(name) for name in ["H2O", "CH4", "NH3"] * 4]
    owner = np.repeat(np.arange(12), [len(atoms) for atoms in frames])
    rows = [np.arange(1, len(atoms)) for atoms in frames]  # not all atoms are predicted
    f, size = rng.normal(size=(len(owner), 3)), 12 if kind == "structure" else len(owner) - 12
    prediction = Prediction(rng.normal(size=(size, R)))
    extra = {"qualms_extrapolates": [i % 2 == 0 for i in range(12)]}
    extra |= {"e_dof": [7.5] * 12, "f_dof": [6.5] * 12, "config_type": [*"abcd"] * 3}
    for path in ("p.npz", "p.xyz"):
        with open_writer(path, "e", kind=kind, ensemble=True) as writer:
            arrays = {"f": f, "f_uncertainty": np.abs(f)}
            options = {"rows": rows} if kind == "atomic" else {}
            writer.write(frames, prediction, extra=extra, arrays=arrays, **options)
    target, n = ("e", size) if kind == "atomic" else ("f", len(owner))
    reference = prediction.mean if kind == "atomic" else f
    tables = load("p.npz") | {f"REF_{target}": reference + rng.normal(size=reference.shape)}
    np.savez("p.npz", **tables)
    ensemble = read_ensemble("p.npz", target, by="config_type")
    other = read_ensemble("p.xyz", target, by="config_type", n_components=3 ** (target == "f"))
    other = other.some(np.isfinite(other.mean))  # XYZ has NaN for atoms without a prediction
    assert len(ensemble) == n * other.n_components
    assert (ensemble.kind, ensemble.dof) == (other.kind, other.dof)
    for name in ("mean", "structure", "atom", "sizes", "extrapolates"):
        np.testing.assert_allclose(getattr(ensemble, name), getattr(other, name), atol=1e-7)
    assert ensemble.labels.tolist() == other.labels.tolist()
    assert evaluate_ensemble(ensemble).n_structures == 12


# --- other names, formats and several files ---


def write_members(form, members, y):
    """Write members (n, N_R) and reference values; return the files and how they are read."""
    n_members = members.shape[1]
    names, rows = [f"e_{i}" for i in range(n_members)], np.column_stack([members, y])
    if form in ("pattern", "numbered", "xyz files"):
        frames = [molecule("H2O") for _ in y]
        keys = {"pattern": "net{}_e", "numbered": "e_{}"}.get(form)
        for atoms, values, reference in zip(frames, members, y, strict=True):
            atoms.info["REF_e"] = reference
            if keys is not None:
                atoms.info |= {keys.format(i): value for i, value in enumerate(values)}
        if keys is not None:
            ase.io.write("p.xyz", frames)
            return ["p.xyz"], {"members": "net*_e"} if form == "pattern" else {}
        for i in range(n_members):
            for atoms, value in zip(frames, members[:, i], strict=True):
                atoms.info["e"] = value
            ase.io.write(f"{i}.xyz", frames)
        return [f"{i}.xyz" for i in range(n_members)], {}
    if form == "csv files":
        for i in range(n_members):
            np.savetxt(f"{i}.csv", rows[:, [i, -1]], delimiter=",", header="e,REF_e", comments="")
        return [f"{i}.csv" for i in range(n_members)], {}
    if form in ("spreadsheet", "tabs"):
        path, separator = ("p.csv", ";") if form == "spreadsheet" else ("p.tsv", "\t")
        lines = [[*names, "REF_e"], *([repr(float(x)).replace(".", ",") for x in r] for r in rows)]
        if form == "spreadsheet":
            lines = [[*line, '"a; b"'] for line in lines]
        text = "\r\n".join([*(separator.join(line) for line in lines), "", ""])
        Path(path).write_bytes(b"\xef\xbb\xbf" + text.encode())
        return [path], {}
    if form == "npy":
        np.save("nets.npy", members)
        np.save("dft.npy", y)
        return ["nets.npy", "dft.npy"], {"members": "nets", "reference": "dft"}
    content = {"e_ensemble": members.tolist(), "REF_e": y.tolist()}
    if form == "records":
        content = [dict(zip([*names, "REF_e"], row, strict=True)) for row in rows.tolist()]
    Path("p.json").write_text(json.dumps(content))
    return ["p.json"], {}


FORMS = ("pattern", "numbered", "xyz files", "csv files", "spreadsheet", "tabs", "npy", "object")


@pytest.mark.parametrize("form", [*FORMS, "records"])
def test_members_are_found_in_every_format(form):
    members, y = committee()
    files, names = write_members(form, members, y)
    sources = [read_source(path) for path in files]
    ensemble = read_ensemble(sources, "e", **names)
    np.testing.assert_allclose(ensemble.members, members, rtol=1e-7)
    np.testing.assert_allclose(ensemble.y, y, rtol=1e-7)
    document = make_document(calibrate_ensemble(ensemble, "student"), ensemble, None)
    output = {"xyz": "out.xyz", "csv": "out.csv", "tsv": "out.tsv"}.get(files[0][-3:], "out.npz")
    names.pop("reference", None)
    new = files[:1] if form == "npy" else files
    apply_calibration(document, new, output, **names)
    applied = [read_source(output)]
    members_of = {"members": names["members"]} if "members" in names else {}
    again = read_ensemble(applied, "e", n_components=1, **members_of)
    np.testing.assert_allclose(again.std, document.std(ensemble.std, R), rtol=1e-6)
    np.testing.assert_allclose(again.mean, ensemble.mean, rtol=1e-6)


@pytest.mark.parametrize("in_files", [True, False])
def test_forces_in_several_keys_or_files(in_files):
    frames = [molecule("CH3OH") for _ in range(8)]
    members, y = committee(8 * 6, (3,), n_members=3)  # as many members as components
    for i, atoms in enumerate(frames):
        rows = slice(6 * i, 6 * i + 6)
        atoms.arrays["REF_f"] = y[rows]
        atoms.arrays |= {f"f{j}": members[rows, j] for j in range(3)}
    if in_files:
        for j in range(3):
            for atoms in frames:
                atoms.arrays["f"] = atoms.arrays[f"f{j}"]
            ase.io.write(f"{j}.xyz", frames)
        ensemble = read_ensemble([read_source(f"{j}.xyz") for j in range(3)], "f")
    else:
        ase.io.write("p.xyz", frames)
        ensemble = read_ensemble("p.xyz", "f", members="f?")
    np.testing.assert_allclose(ensemble.members, points_of(members), atol=1e-7)
    assert (ensemble.kind, ensemble.remarks) == ("component", ())


def test_missing_members_are_left_out_of_their_points_only():
    members, y = committee(200)
    gaps = np.random.default_rng(1).random(members.shape) < 0.1
    gaps[:, :3] = False  # at least three remain
    predicted = np.where(gaps, np.nan, members)
    np.savez("gaps.npz", e_ensemble=predicted, REF_e=y)
    np.savez("flags.npz", e_ensemble=members, REF_e=y, e_absent=~gaps)
    read = read_ensemble("gaps.npz", "e")
    np.testing.assert_allclose(read.mean, np.nanmean(predicted, axis=1))
    np.testing.assert_allclose(read.std, np.nanstd(predicted, axis=1, ddof=1))
    np.testing.assert_array_equal(read.count, R - gaps.sum(axis=1))
    assert read.remarks
    # The law of a finite ensemble holds for as many members as there are.
    by_gaps, by_flags = (fit(f"{name}.npz", "e", "student") for name in ("gaps", "flags"))
    assert by_gaps.parameters == pytest.approx(by_flags.parameters, rel=1e-6)


def test_names_of_mean_and_standard_deviation():
    members, y = committee()
    np.savez("p.npz", pred=members.mean(axis=1), sigma=members.std(axis=1, ddof=1), dft=y)
    names = {"mean": "pred", "std": "sigma"}
    ensemble = read_ensemble("p.npz", "e", "dft", **names)
    np.testing.assert_allclose(ensemble.std, members.std(axis=1, ddof=1))
    document = make_document(calibrate_ensemble(ensemble, "linear"), ensemble, None)
    apply_calibration(document, "p.npz", "out.npz", **names)
    out = load("out.npz")
    np.testing.assert_allclose(out["sigma"], document.std(ensemble.std, None))
    np.testing.assert_allclose(out["pred"], ensemble.mean)


def test_files_that_do_not_belong_together():
    members, y = committee()
    write_members("xyz files", members, y)
    first, second, other = (read_source(f"{i}.xyz") for i in range(3))
    other[3].rattle(0.1)
    bare = [Atoms(atoms.numbers, atoms.positions) for atoms in first]
    for parameter, sources, names in (
        ("predictions", [first, other], {}),
        ("predictions", [first, second[:-1]], {}),
        ("predictions", [first, second, bare], {}),
        ("members", [first], {"members": "net*"}),
        ("mean", [first], {"mean": "net", "std": "e"}),
        ("std", [first], {"std": "net"}),
        ("members", [first], {"members": "e", "std": "e"}),
    ):
        with rejects(parameter):
            read_ensemble(sources, "e", **names)


def test_parquet_needs_pyarrow(monkeypatch):
    Path("p.parquet").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with rejects("path"):
        read_source("p.parquet")


# --- calibrating ---


@pytest.mark.usefixtures("all_methods")
def test_calibrated_uncertainties_have_the_right_coverage():
    members, y = committee(400)
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    calibrated = calibrate_ensemble(read_ensemble("p.npz", "e"))
    assert calibrated.before.coverage_68 < 0.45
    assert 0.62 < calibrated.after.coverage_68 < 0.78
    assert calibrated.after.log_likelihood > calibrated.before.log_likelihood + 0.3
    np.testing.assert_array_equal(calibrated.prediction.std, calibrated.std)
    std = members.std(axis=1, ddof=1)
    np.testing.assert_allclose(calibrated.prediction.uncalibrated.std, std, rtol=1e-13)  # rounding
    assert calibrated.prediction.members is None


def test_scores_are_cross_validated():
    members, y = committee(100)
    np.savez("p.npz", e_ensemble=members, REF_e=y, own=[f"own {i}" for i in range(100)])
    # No label of a point that is left out is known: its factor is one.
    grouped = calibrate_ensemble(read_ensemble("p.npz", "e", by="own"), "linear")
    overall = calibrate_ensemble(read_ensemble("p.npz", "e"), "linear")
    np.testing.assert_allclose(grouped.std, overall.std)


def student_std(parameters, std, c):
    """σ of the student calibration, as docs/file-formats.md has it."""
    dof = parameters["prior_dof"] + c - 1
    s2 = (parameters["prior_dof"] * parameters["prior_std"] ** 2 + (c - 1) * std**2) / (dof - 2)
    return np.sqrt((parameters["alpha"] ** 2 + 1 / c) * s2)


def test_out_of_bag_members_calibrate_without_a_validation_set():
    rng = np.random.default_rng(0)
    members, y = committee(300, n_members=16)
    absent = rng.random(members.shape) < 0.5
    seen = np.where(absent, members, y[:, None])  # members know the points of their training set
    np.savez("p.npz", e_ensemble=seen, REF_e=y, e_absent=absent)
    calibrated = calibrate_ensemble(read_ensemble("p.npz", "e"), "student")
    assert calibrated.intervals.alpha[0] < 2.0 < calibrated.intervals.alpha[1]
    np.savez("n.npz", e_ensemble=seen, REF_e=y)
    naive = calibrate_ensemble(read_ensemble("n.npz", "e"), "student")
    assert naive.calibration.alpha < 0.7 * calibrated.calibration.alpha
    # Members need not predict the points of their training set.
    missing = np.where(absent, members, np.nan)
    np.savez("m.npz", e_ensemble=missing, REF_e=y, unseen=absent)
    ensemble = read_ensemble("m.npz", "e", absent="unseen")
    again = calibrate_ensemble(ensemble, "student")
    np.testing.assert_allclose(again.std, calibrated.std)
    document = make_document(again, ensemble, None)
    applied = apply_calibration(document, "m.npz", "out.npz", absent="unseen")
    new, few = load("out.npz"), absent.sum(axis=1) < 3
    assert few.any() == bool(applied.remarks)
    std = np.nanstd(missing[~few], axis=1, ddof=1)
    expected = student_std(document.parameters, std, absent.sum(axis=1)[~few])
    np.testing.assert_allclose(new["e_uncertainty"][~few], expected)
    np.testing.assert_allclose(new["e"][~few], np.nanmean(missing[~few], axis=1))
    assert np.isnan(new["e_uncertainty"][few]).all()
    np.testing.assert_array_equal(np.isnan(new["e_ensemble"][~few]), ~absent[~few])


def test_elements_and_config_types_get_factors(monkeypatch):
    monkeypatch.setattr("qualms.ensembles.calibrate.METHODS", ("student",))
    ase.io.write("p.xyz", structures(200))
    calibrated = calibrate_ensemble(read_ensemble("p.xyz", "forces", by="element"), "student")
    groups = calibrated.grouped.groups
    for symbol, factor in FACTORS.items():
        assert groups[symbol].factor / groups["N"].factor == pytest.approx(factor, rel=0.12)
    alone = calibrate_ensemble(read_ensemble("p.xyz", "forces"), "student")
    assert calibrated.after.log_likelihood > alone.after.log_likelihood + 0.02
    document, _ = fit_and_apply("p.xyz", "forces", "q.xyz", "student", by="element")
    atoms = ase.io.read("q.xyz", 0)
    members = structures(1)[0].arrays["forces_comm"].reshape(3, R, 3)
    factors = np.array([document.groups[symbol].factor for symbol in atoms.symbols])[:, None]
    expected = factors * student_std(document.parameters, members.std(axis=1, ddof=1), R)
    np.testing.assert_allclose(atoms.arrays["forces_uncertainty"], expected, rtol=1e-6)
    assert {*fit("p.xyz", "energy", "student", by="config_type").groups} == {"calm", "wild"}


@pytest.mark.usefixtures("all_methods")
def test_a_calibration_file_is_validated():
    np.savez("p.npz", **dict(zip(("e_ensemble", "REF_e"), committee(), strict=True)))
    document = fit("p.npz", "e", "shrinkage")
    write_calibration(document, "c.json")
    assert read_calibration("c.json") == document
    good = json.loads(Path("c.json").read_text())
    for change in (
        {"format": "x"},
        {"version": 99},
        {"hook": "x"},
        {"method": "x"},
        {"n_members": None},
        {"parameters": good["parameters"] | {"alpha": -1.0}},
        {"method": "linear", "parameters": {"alpha": 0.0}},
        {"parameters": good["parameters"] | {"beta": 1.0}},
        {"parameters": good["parameters"] | {"alpha": 1e300}},
        {"parameters": good["parameters"] | {"log_std_std": 0.0}},
        {"parameters": good["parameters"] | {"alpha": "1.0"}},
        {"std_range": [0.0, 1.0]},
        {"std_range": [1.0, 0.1]},
        {"remarks": ["x" * 10**7]},
    ):
        Path("bad.json").write_text(json.dumps(good | change))
        with rejects("path"):
            read_calibration("bad.json")
    twice = json.dumps(good).replace('"version"', '"version": 1, "version"')
    for text in ("", "[1, 2]", "{", "\xff", "[" * 10**5, '{"a":' * 10**5, twice):
        Path("bad.json").write_text(text)
        with pytest.raises(InputError):
            read_calibration("bad.json")
    with pytest.raises(InputError):
        read_calibration("none.json")


# --- sanity checks ---


def remarks(y, **arrays):
    np.savez("p.npz", REF_e=y, **arrays)
    ensemble = read_ensemble("p.npz", "e")
    method = "linear" if ensemble.members is None else "student"
    return calibrate_ensemble(ensemble, method).remarks


def test_sanity_checks():
    members, y = committee(300, alpha=1.0)
    rng = np.random.default_rng(1)
    assert remarks(y, e_ensemble=members) == ()
    assert calibrate_ensemble(read_ensemble("p.npz", "e"), "power").remarks  # few members
    mean, wrong = members.mean(axis=1), y.copy()
    wrong[17] += 1e3
    for reference in (
        y[:19],  # few points
        mean + rng.normal(size=300),  # the standard deviation is uninformative
        mean + 1000 * (y - mean),  # other units
        y + 3.0,  # biased
        wrong,  # an outlier
    ):
        assert remarks(reference, e_ensemble=members[: len(reference)])


def test_members_are_compared_with_each_other_and_with_the_reference():
    members, y = committee(300, n_members=10, alpha=1.0)
    members, y = members - 40.0, y - 40.0
    hartree, milli, shifted = members.copy(), members.copy(), members.copy()
    hartree[:, 5:] /= 27.2114
    milli[:, 3] *= 1000
    shifted[:, ::2] += 1000
    for wrong, reference, expected in (
        (hartree, y, "Are the units the same?"),
        (milli, y, "member 3 vary 1.1e+03"),
        (shifted, y, "+500"),
        (members, members.mean(axis=1).astype(np.float32), "equal the predictions"),
        (members, members[:, 4], "member 4"),
    ):
        np.savez("p.npz", REF_e=reference, e_ensemble=wrong)
        ensemble = read_ensemble("p.npz", "e")
        (warning,) = evaluate_ensemble(ensemble).warnings
        assert expected in warning


def test_a_bias_of_config_types_is_found():
    frames = structures(120)
    for i, atoms in enumerate(frames):
        atoms.info["config_type"] = ("hot", "cold")[i // 4 % 2]
        atoms.info["REF_energy"] += (1.5, -1.5)[i // 4 % 2]
    ase.io.write("p.xyz", frames)
    ensemble = read_ensemble("p.xyz", "energy")
    (warning,) = evaluate_ensemble(ensemble, frames=frames).warnings
    assert "hot" in warning
    assert not evaluate_ensemble(ensemble).warnings


@pytest.mark.usefixtures("all_methods")
def test_auto_accounts_for_the_number_of_members():
    members, y = committee(400, n_members=4)
    np.savez("p.npz", REF_e=y, e_ensemble=members)
    calibrated = calibrate_ensemble(read_ensemble("p.npz", "e"))
    assert calibrated.calibration.method in ("student", "shrinkage")
    assert not calibrated.remarks
    np.savez("s.npz", REF_e=y, e=members.mean(axis=1), e_std=members.std(axis=1, ddof=1))
    assert calibrate_ensemble(read_ensemble("s.npz", "e")).calibration.method in STD_METHODS


def test_points_that_cannot_be_used_are_counted():
    members, y = committee()
    y[:5] = np.nan
    members[5:8, 2:] = np.nan
    members[8:10] = 0.5
    np.savez("p.npz", e_ensemble=members, REF_e=y)
    calibrated = calibrate_ensemble(read_ensemble("p.npz", "e"), "auto")
    assert len(calibrated.std) == 50
    document, applied = fit_and_apply("p.npz")
    new = load("out.npz")["e_uncertainty"]
    assert np.flatnonzero(np.isnan(new)).tolist() == [5, 6, 7]
    assert np.flatnonzero(new == 0).tolist() == [8, 9]
    assert len(applied.remarks) == 2
    np.savez("milli.npz", e_ensemble=1000 * members[10:, :4])
    assert len(apply_calibration(document, "milli.npz", "m.npz").remarks) == 2  # units, members


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        (lambda m, y: {"e_ensemble": m}, "reference"),
        (lambda m, y: {"e_ensemble": m[:, :1], "REF_e": y}, "e_ensemble"),
        (lambda m, y: {"e_ensemble": m.T, "REF_e": y}, "e_ensemble"),
        (lambda m, y: {"e_ensemble": m, "REF_e": y[:20]}, "e_ensemble"),
        (lambda m, y: {"e_ensemble": m[:, :, None] * np.ones(3), "REF_e": y}, "e_ensemble"),
        (lambda m, y: {"e_ensemble": m * 1j, "REF_e": y}, "e_ensemble"),
        (lambda m, y: {"e_ensemble": m, "REF_e": np.array(["x"] * 60)}, "REF_e"),
        (lambda m, y: {"e_ensemble": m, "REF_e": y, "e_absent": m}, "absent"),
        (lambda m, y: {"e_ensemble": m, "REF_e": y, "e_absent": m.T > 0}, "e_absent"),
        (lambda m, y: {"e": y, "REF_e": y}, "target"),
        (lambda m, y: {"e": y, "e_uncertainty": -np.abs(y), "REF_e": y}, "e_uncertainty"),
        (lambda m, y: {"e": y, "e_var": -np.abs(y), "REF_e": y}, "e_var"),
        (lambda m, y: {"e": y, "e_std": np.ones((60, 2)), "REF_e": y}, "e_std"),
    ],
)
def test_values_that_cannot_be_read(change, parameter):
    np.savez("bad.npz", **change(*committee()))
    with rejects(parameter):
        read_ensemble("bad.npz", "e")


def test_errors_name_the_ends_of_many_keys():
    members, y = committee(n_members=30)
    np.savez("p.npz", REF_e=y, x2=y, **{f"e_{i}": column for i, column in enumerate(members.T)})
    with pytest.raises(InputError) as error:
        read_ensemble("p.npz", "nothing")
    named = [name for name in load("p.npz") if re.search(rf"\b{name}\b", str(error.value))]
    assert {*named} == {"REF_e", "x2", "e_0", "e_29"}


@pytest.mark.usefixtures("all_methods")
def test_values_that_cannot_be_calibrated():
    members, y = committee()
    cases = (
        {"e_ensemble": members, "REF_e": np.full(60, np.nan)},
        {"e_ensemble": np.repeat(members[:, :1], 4, 1), "REF_e": y},
        {"e_ensemble": members[:1], "REF_e": y[:1]},
        {"e": y, "e_uncertainty": np.zeros(60), "REF_e": y + 1},
        {"e": y, "e_uncertainty": np.ones(60), "REF_e": y},
    )
    for arrays in cases:
        np.savez("bad.npz", **arrays)
        with pytest.raises(CalibrationError):
            calibrate_ensemble(read_ensemble("bad.npz", "e"))
    np.savez("p.npz", e_ensemble=members[:4], REF_e=y[:4])
    with pytest.raises(CalibrationError):
        calibrate_ensemble(read_ensemble("p.npz", "e"), "shrinkage")
    for options in ({"order": "x"}, {"by": "no"}, {"by": "element"}, {"absent": "no"}):
        with pytest.raises(InputError) as error:
            read_ensemble("p.npz", "e", **options)
        assert error.value.parameter in options
    for method in ("best", "sources"):
        with rejects("method"):
            calibrate_ensemble(read_ensemble("p.npz", "e"), method)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"e,f\n1,2,3\n"),
        ("a.csv", b"\xff\xfe\x00"),
        ("a.csv", b"e\n"),
        ("a.csv", b"e,e\n1,2\n"),
        ("a.csv", b'e,f\n1,"2\n'),
        ("a.json", b'{"e": 1}'),
        ("a.npz", b"x"),
        ("a.parquet", b"x"),
        ("none.npz", None),
    ],
)
def test_files_that_are_no_tables(name, content):
    if content is not None:
        Path(name).write_bytes(content)
    with rejects("path"):
        read_ensemble(name, "e")


# --- applying ---


def with_results(**results):
    """Structures with committees of energies, and with these results of a calculator."""
    members, y = committee()
    frames = []
    for i, some in enumerate(members):
        atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7 + i / 100]])
        atoms.info |= {"energy_comm": some, "dft": y[i]}
        atoms.calc = SinglePointCalculator(atoms, **{k: v[i] for k, v in results.items()})
        frames.append(atoms)
    ase.io.write("p.xyz", frames)
    _, applied = fit_and_apply("p.xyz", "energy", reference="dft")
    return ase.io.read("out.xyz", ":"), applied.remarks


def test_reference_values_under_the_name_of_the_prediction_are_kept():
    members, y = committee()
    mean, forces = members.mean(axis=1), np.random.default_rng(1).normal(size=(60, 2, 3))
    after, remarks = with_results(energy=y, forces=forces)
    np.testing.assert_allclose([a.info["REF_energy"] for a in after], y, atol=1e-7)
    np.testing.assert_allclose([a.get_potential_energy() for a in after], mean)
    np.testing.assert_allclose([a.arrays["REF_forces"] for a in after], forces, atol=1e-7)
    assert "forces" not in after[0].calc.results
    assert len(remarks) == 1
    after, remarks = with_results(energy=mean, forces=forces)  # the mean of these members
    assert "REF_energy" not in after[0].info
    np.testing.assert_allclose([a.get_forces() for a in after], forces, atol=1e-7)
    assert not remarks
    after, remarks = with_results(forces=forces)  # forces of unknown origin
    assert "forces" not in after[0].calc.results
    np.testing.assert_allclose(after[0].arrays["REF_forces"], forces[0], atol=1e-7)
    np.savez("p.npz", e_ensemble=members, e=y, dft=y)
    fit_and_apply("p.npz", reference="dft")
    np.testing.assert_array_equal(load("out.npz")["REF_e"], y)


def test_atoms_and_structures_without_predictions_get_nan():
    members, y = committee(120)
    frames = []
    for i in range(30):
        atoms = Atoms("OH4", positions=np.arange(15.0).reshape(5, 3))
        if i > 1:
            some = np.full((5, R), np.nan)
            some[1:] = members[4 * i : 4 * i + 4]
            atoms.arrays["shift_ensemble"] = some
            atoms.arrays["REF_shift"] = np.append(np.nan, y[4 * i : 4 * i + 4])
        frames.append(atoms)
    ase.io.write("p.xyz", frames)
    fit_and_apply("p.xyz", "shift", by="element")
    for i, atoms in enumerate(ase.io.read("out.xyz", ":")):
        for key in ("shift", "shift_uncertainty", "shift_ensemble"):
            assert np.isfinite(atoms.arrays[key][1:]).all() == (i > 1)
            assert np.isnan(atoms.arrays[key][0]).all()


@pytest.mark.parametrize("suffix", ["npz", "csv", "xyz"])
def test_intervals_of_another_calibration_are_left_out(suffix):
    members, y = committee()
    columns = {f"e_ensemble_{i}": column for i, column in enumerate(members.T)} | {"REF_e": y}
    old = {"e_lower": y - 1, "e_upper": y + 1, "e_dof": np.full(60, 5.0)}
    if suffix == "npz":
        np.savez("p.npz", **columns, **old)
    elif suffix == "csv":
        write_csv("p.csv", columns | old)
    else:
        rows = zip(*(columns | old).values(), strict=True)
        frames = [Atoms("H", info=dict(zip(columns | old, row, strict=True))) for row in rows]
        ase.io.write("p.xyz", frames)
    fit_and_apply(f"p.{suffix}")
    new = read_source(f"out.{suffix}")
    names = new[0].info.keys() if suffix == "xyz" else new.columns.keys()
    assert names == columns.keys() | {"e", "e_uncertainty"}


def test_calibrations_that_do_not_fit():
    members, y = committee(60, (3,))
    np.savez("p.npz", f_ensemble=members, REF_f=y, e_ensemble=members[..., 0], REF_e=y[:, 0])
    document = fit("p.npz", "e")
    for options, parameter in (
        ({"target": "nothing"}, "target"),
        ({"output": "out.csv"}, "output"),
        ({"target": "f"}, "calibration"),
    ):
        arguments = {"output": "out.npz"} | options
        with rejects(parameter):
            apply_calibration(document, "p.npz", **arguments)
    ase.io.write("p.xyz", structures(20))
    with rejects("calibration"):
        apply_calibration(document, "p.xyz", "out.xyz", target="forces")
    assert not Path("out.npz").exists()
