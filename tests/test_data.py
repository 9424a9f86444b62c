"""QM9: the subset is what qm9pack has, every source gives the same, and damage is reported."""

from __future__ import annotations

import bz2
import csv
import importlib.util
import io
import os
import runpy
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ase.geometry import get_distances

from qualms.data import HARTREE_TO_EV, QM9_ATOMIC_ENERGIES, qm9
from qualms.data.qm9 import ENERGIES, read_qm9pack
from qualms.errors import InputError, QualmsWarning

ROOT = Path(__file__).parents[1]
SUBSET = ROOT / "src/qualms/data/qm9_subset.npz"
SCRIPT = ROOT / "scripts/make_qm9_subset.py"
SEED = 20140805  # the default of the script
needs_qm9pack = pytest.mark.skipif(
    importlib.util.find_spec("qm9pack") is None, reason="qm9pack is not installed"
)

# The first molecule of QM9, letter by letter, and one with the exponents that Mathematica writes.
METHANE = """5
gdb 1\t157.7118\t157.70997\t157.70699\t0.\t13.21\t-0.3877\t0.1171\t0.5048\t35.3641\t0.044749\t\
-40.47893\t-40.476062\t-40.475117\t-40.498597\t6.469\t
C\t-0.0126981359\t 1.0858041578\t 0.0080009958\t-0.535689
H\t 0.002150416\t-0.0060313176\t 0.0019761204\t 0.133921
H\t 1.0117308433\t 1.4637511618\t 0.0002765748\t 0.133922
H\t-0.540815069\t 1.4475266138\t-0.8766437152\t 0.133923
H\t-0.5238136345\t 1.4379326443\t 0.9063972942\t 0.133923
1341.307\t1341.3284\t1341.365\t1562.6731\t1562.7453\t3038.3205\t3151.6034\t3151.6788\t3151.7078
C\tC\t
InChI=1S/CH4/h1H4\tInChI=1S/CH4/h1H4
"""
WITH_EXPONENTS = """3
gdb 7\t0.\t44.\t44.\t2.8937\t12.99\t-0.3604\t0.0191\t0.3796\t48.7476\t1.6601*^-2\t\
-93.411888\t-93.40937\t-93.408425\t-93.431246\t6.278\t
C\t-1.2*^-6\t 1.1324657151\t 0.0082758861\t-6.*^-6
N\t 0.0023107217\t-0.0191585871\t 5.*^-7\t-0.190702
H\t-0.0278026991\t 2.1989496606\t 0.0141538089\t 0.205917
799.0101\t799.0101\t2198.4393\t3490.3686
C#N\tC#N\t
InChI=1S/CHN/c1-2/h1H\tInChI=1S/CHN/c1-2/h1H
"""
UNCHARACTERIZED = """
List of molecules among the 133885 GDB9 molecules that are not what they were
======================================================
#   Index     GDB17 SMILES    SMILES for B3LYP XYZ    D_IJ
======================================================
       7               C#N                    C#N   6.036217
      80  [NH3+]CC([O-])=O               NCC(=O)O   10.09360
======================================================
"""


@pytest.fixture(scope="module")
def subset():
    return qm9()


def write_archive(path, texts, level=9):
    """Pack the texts as the published archive is packed."""
    with tarfile.open(path, "w:bz2", compresslevel=level) as archive:
        archive.addfile(tarfile.TarInfo("not a molecule"))
        for i, text in enumerate(texts):
            member = tarfile.TarInfo(f"dsgdb9nsd_{i + 1:06d}.xyz")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode("ascii")))
    return path


def write_npz(path, **changes):
    """Write two molecules in the NPZ format; a change to None leaves an array out."""
    arrays = {
        "index": np.array([5, 3], dtype=np.int32),
        "offsets": np.array([0, 2, 5], dtype=np.uint16),
        "numbers": np.array([1, 9, 8, 1, 1], dtype=np.uint8),
        "positions": np.arange(15, dtype=np.float32).reshape(5, 3),
        "atomref_numbers": np.array([1, 8, 9]),
        "atomref_U0": np.array([-0.5, -75.0, -99.0]),
    }
    arrays |= {name: np.array([-100.0, -77.0]) for name in ENERGIES}
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def fake_qm9pack(monkeypatch, folder):
    """Let qm9pack be found in the folder, or not at all."""
    find_spec = importlib.util.find_spec
    spec = folder and SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "qm9pack" else find_spec(name)
    )


def write_csv(folder, part, molecules, drop=None):
    """Write molecules as qm9pack does."""
    (folder / "data").mkdir(exist_ok=True)
    names = {"gdb9_index": "Index", "elements": "Elements", "xyz": "XYZ_Ang"} | ENERGIES
    with (folder / f"data/qm9_part{part}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(column for column in names.values() if column != drop)
        for atoms in molecules:
            row = {name: round(atoms.info[name] / HARTREE_TO_EV, 6) for name in ENERGIES}
            row["gdb9_index"] = atoms.info["gdb9_index"]
            row["elements"] = str(list(atoms.symbols)).replace(" ", "")
            row["xyz"] = str(atoms.positions.tolist()).replace(" ", "")
            writer.writerow(row[name] for name, column in names.items() if column != drop)


def indices(molecules):
    return [atoms.info["gdb9_index"] for atoms in molecules]


# --- the subset ---


def test_subset_is_small_and_names_its_origin(subset):
    assert len(subset) == 3000
    assert len(set(indices(subset))) == 3000
    assert SUBSET.stat().st_size < 1.5e6
    with np.load(SUBSET, allow_pickle=False) as npz:
        for name in ("Ramakrishnan", "Sci. Data 1, 140022 (2014)", "qm9pack"):
            assert name in str(npz["attribution"])
        assert "Permission is hereby granted" in str(npz["license"])


def test_subset_is_a_fair_sample_of_sane_molecules(subset):
    assert {symbol for atoms in subset for symbol in atoms.symbols} == set("HCNOF")
    assert not any(atoms.pbc.any() or atoms.cell.any() for atoms in subset)
    assert max(np.count_nonzero(atoms.numbers > 1) for atoms in subset) == 9
    for atoms in subset:
        distances = get_distances(atoms.positions)[1]
        assert distances[np.triu_indices(len(atoms), 1)].min() > 0.5
    first, second = np.split(np.array(indices(subset)), 2)  # the file is not sorted
    assert abs(first.mean() - second.mean()) < 5 * 133885 / np.sqrt(12) * np.sqrt(2 / 1500)


def test_energies_are_in_electronvolt_and_consistent(subset):
    assert QM9_ATOMIC_ENERGIES["H"] == -0.500273 * 27.2113961
    for atoms in subset:
        info = atoms.info
        assert type(info["gdb9_index"]) is int
        assert all(type(info[name]) is float for name in ENERGIES)
        assert info["G298"] < info["U0"] < info["U298"] < info["H298"]
        # H − U = kT, with k = 8.617e-5 eV/K.
        assert info["H298"] - info["U298"] == pytest.approx(8.617e-5 * 298.15, abs=1e-4)
        assert 0.4 < info["zpve"] < 8
        expected = info["U0"] - sum(QM9_ATOMIC_ENERGIES[symbol] for symbol in atoms.symbols)
        assert info["atomization_energy"] == pytest.approx(expected, abs=1e-9)
        per_atom = info["atomization_energy_per_atom"]
        assert per_atom == info["atomization_energy"] / len(atoms)
        assert -7 < per_atom < -3


def test_the_first_or_random_ones(subset):
    assert indices(qm9(n=7)) == indices(subset)[:7]
    drawn = indices(qm9(n=50, seed=3))
    assert drawn == indices(qm9("subset", n=50, seed=3))
    assert drawn != indices(qm9(n=50, seed=4))
    assert len(set(drawn)) == 50
    # A small draw begins a large one, and a draw of all is a shuffle.
    assert indices(qm9(n=1, seed=3)) == drawn[:1]
    shuffled = indices(qm9(seed=3))
    assert shuffled[:50] == drawn
    assert sorted(shuffled) == sorted(indices(subset))


def test_molecules_can_be_left_out_of_any_source(subset):
    first = indices(subset)[:6]
    assert indices(qm9(n=4, uncharacterized=first[1:3])) == [first[0], *first[3:]]


# --- qm9pack ---


@needs_qm9pack
def test_subset_is_what_qm9pack_has(subset):
    original = qm9("qm9pack", n=len(subset), seed=SEED)
    for ours, theirs in zip(subset, original, strict=True):
        assert ours.info == theirs.info
        assert ours.numbers.tolist() == theirs.numbers.tolist()
        np.testing.assert_allclose(ours.positions, theirs.positions, rtol=0, atol=0.5001e-5)


@needs_qm9pack
def test_qm9pack_has_the_characterised_molecules_only():
    found = [record.gdb9_index for record in read_qm9pack()]
    assert len(found) == 130_831 == 133_885 - 3_054
    assert found == sorted(set(found))
    assert not {58, 61, 80, 133_866} & set(found)  # the first and the last of uncharacterized.txt
    assert "qm9pack" not in sys.modules


@needs_qm9pack
def test_script_makes_the_subset(tmp_path, monkeypatch, capsys, subset):
    output = tmp_path / "few.npz"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "-o", str(output), "--size", "20"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "MB" in capsys.readouterr().out
    for ours, theirs in zip(qm9(output), subset[:20], strict=True):
        assert ours.info == theirs.info
        assert np.array_equal(ours.positions, theirs.positions)


def test_tables_of_qm9pack(tmp_path, monkeypatch, subset):
    fake_qm9pack(monkeypatch, tmp_path)
    for part in (1, 2, 3):
        write_csv(tmp_path, part, subset[2 * part - 2 : 2 * part])
    for ours, theirs in zip(qm9("qm9pack"), subset[:6], strict=True):
        assert np.array_equal(ours.positions, theirs.positions)
        assert ours.info == theirs.info


def test_missing_or_broken_qm9pack(tmp_path, monkeypatch, subset):
    fake_qm9pack(monkeypatch, None)
    with pytest.raises(InputError, match=r"pip install 'qualms\[qm9\]'"):
        qm9("qm9pack")
    fake_qm9pack(monkeypatch, tmp_path)
    with pytest.raises(InputError, match=r"qm9_part1\.csv"):
        qm9("qm9pack")
    write_csv(tmp_path, 1, subset[:2], drop="XYZ_Ang")
    with pytest.raises(InputError, match="XYZ_Ang"):
        qm9("qm9pack")


# --- the archive ---


def test_archive_in_the_original_dialect(tmp_path):
    archive = write_archive(tmp_path / "two.tar.bz2", [METHANE, WITH_EXPONENTS])
    methane, cyanide = qm9(archive, uncharacterized=())
    assert methane.get_chemical_formula() == "CH4"
    assert methane.info["gdb9_index"] == 1
    assert methane.positions[0].tolist() == [-0.0126981359, 1.0858041578, 0.0080009958]
    in_hartree = [
        methane.info[name] / 27.2113961 for name in ("zpve", "U0", "U298", "H298", "G298")
    ]
    expected = [0.044749, -40.47893, -40.476062, -40.475117, -40.498597]
    assert in_hartree == pytest.approx(expected, rel=1e-14)
    expected = 27.2113961 * (-40.47893 - (-37.846772 - 4 * 0.500273))
    assert methane.info["atomization_energy"] == pytest.approx(expected, rel=1e-12)
    assert cyanide.positions[0, 0] == -1.2e-6
    assert cyanide.positions[1, 2] == 5e-7
    assert cyanide.info["zpve"] == HARTREE_TO_EV * 1.6601e-2


def test_archive_without_the_uncharacterized(tmp_path):
    archive = write_archive(tmp_path / "two.tar.bz2", [METHANE, WITH_EXPONENTS])
    listed = tmp_path / "uncharacterized.txt"
    listed.write_text(UNCHARACTERIZED)
    assert indices(qm9(archive, uncharacterized=listed)) == [1]
    assert indices(qm9(archive, uncharacterized=str(listed))) == [1]
    assert indices(qm9(archive, uncharacterized=iter([np.int64(1)]))) == [7]
    with pytest.raises(InputError, match="at most 1"):
        qm9(archive, n=2, uncharacterized=listed)
    with pytest.warns(QualmsWarning, match="3,054") as caught:
        assert indices(qm9(str(archive))) == [1, 7]
    assert caught[0].filename == __file__


def test_archive_of_something_else(tmp_path):
    for texts, what in (([], r"no \.xyz file"), (["one line"], "failed after 0 molecules")):
        with pytest.raises(InputError, match=what):
            qm9(write_archive(tmp_path / "other.tar.bz2", texts), uncharacterized=())


def test_archive_that_was_cut_short(tmp_path):
    path = write_archive(tmp_path / "many.tar.bz2", [METHANE] * 400, level=1)
    assert len(qm9(path, uncharacterized=())) == 400
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert len(qm9(path, n=5, uncharacterized=())) == 5  # it is read no further than needed
    with pytest.raises(InputError, match=r"failed after \d+ molecules.*end-of-stream"):
        qm9(path, uncharacterized=())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (METHANE.replace("-0.0126981359", "nonsense"), "could not convert"),
        (METHANE.replace("-0.0126981359", "nan"), "position is not finite"),
        (METHANE.replace("5\ngdb", "50\ngdb"), "50 atoms, but only"),
        (METHANE.replace("C\t-0.0", "Zz\t-0.0"), "Zz"),
        (METHANE.replace("C\t-0.0", "Au\t-0.0"), "no reference energy"),
        (METHANE.replace("-40.47893\t-40.476062\t", ""), "shorter"),
        (METHANE.replace("\t 0.0080009958\t-0.535689", ""), "inhomogeneous"),
        ("1\ngdb 1" + 14 * "\t-1." + "\nH\t0.\t0.\n", "positions of shape"),
    ],
)
def test_damaged_molecule_is_named(tmp_path, text, what):
    path = write_archive(tmp_path / "damaged.tar.bz2", [text])
    with pytest.raises(InputError, match=f"Molecule 1 is damaged: .*{what}"):
        qm9(path, uncharacterized=())


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "neither"),
        (b"5\ngdb 1\n", "neither"),
        (b"BZh9 nonsense", "Invalid data"),
        (bz2.compress(b"not a tar file" * 100), "failed after 0 molecules"),
        (b"PK nonsense", "NPZ file with the arrays"),
    ],
)
def test_damaged_file(tmp_path, content, what):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(InputError, match=what):
        qm9(path, uncharacterized=())


# --- NPZ files ---


def test_npz_file(tmp_path):
    hydrogen_fluoride, water = qm9(write_npz(tmp_path / "two.npz"))
    assert indices([hydrogen_fluoride, water]) == [5, 3]
    assert water.get_chemical_formula() == "H2O"
    assert hydrogen_fluoride.positions.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert water.info["U0"] == -77 * HARTREE_TO_EV
    # The reference energies are those of the file.
    assert water.info["atomization_energy"] == HARTREE_TO_EV * (-77 + 76)


def test_npz_with_positions_as_integers(tmp_path):
    integers = np.arange(15).reshape(5, 3)
    path = write_npz(tmp_path / "two.npz", positions=integers, positions_per_angstrom=10)
    assert qm9(path)[0].positions.tolist() == [[0, 0.1, 0.2], [0.3, 0.4, 0.5]]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"offsets": None}, "offsets"),
        ({"G298": None}, "G298"),
        ({"G298": np.zeros(3)}, "G298 has shape"),
        ({"positions": np.zeros((4, 3))}, "positions has shape"),
        ({"positions": np.full((5, 3), np.inf)}, "Molecule 5 is damaged: a position"),
        ({"offsets": np.array([0, 0, 5])}, "offsets do not rise"),
        ({"offsets": np.array([0, 2, 4])}, "offsets do not rise"),
        ({"offsets": np.array([0.0, 2.5, 5.0])}, "Cannot cast"),
        ({"numbers": np.array([1, 9, 8, 1, 0])}, "no atomic number"),
        ({"numbers": np.array([1, 9, 8, 1, 200])}, "no atomic number"),
        ({"numbers": np.array([1, 9, 6, 1, 1])}, "Molecule 3 is damaged.*no reference"),
        ({"U0": np.array([-100.0, np.nan])}, "Molecule 3 is damaged: an energy"),
        ({"U0": np.array([-100.0, None])}, "allow_pickle=False"),
        ({"index": np.array(["a", "b"])}, "Cannot cast"),
    ],
)
def test_wrong_npz_file(tmp_path, changes, what):
    path = write_npz(tmp_path / "wrong.npz", **changes)
    with pytest.raises(InputError, match=what):
        qm9(path)


# --- other bad input ---


@pytest.mark.parametrize("source", ["qm7", "missing.npz", Path("missing.tar.bz2"), os.sep, 3, None])
def test_unknown_source(source):
    with pytest.raises(InputError, match=r"source=.*'subset', 'qm9pack', or the path"):
        qm9(source)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", v) for v in (0, -1, 2.0, True, "10")]
    + [("seed", v) for v in (-1, 0.5, "a")]
    + [("uncharacterized", v) for v in ("missing.txt", [1, "a"], [0], 7)],
)
def test_bad_argument_is_named(name, value):
    with pytest.raises(InputError) as caught:
        qm9(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize("seed", [None, 0])
def test_n_must_not_exceed_the_source(seed):
    with pytest.raises(InputError, match=r"n=3001 .* at most 3000"):
        qm9(n=3001, seed=seed)


def test_uncharacterized_without_indices(tmp_path):
    path = tmp_path / "uncharacterized.txt"
    path.write_text("a list of\nnothing 5\n")
    with pytest.raises(InputError, match="holds no index"):
        qm9(uncharacterized=path)
