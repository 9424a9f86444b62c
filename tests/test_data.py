"""Data sets: every source of QM9 gives the same molecules; damaged files are reported."""

from __future__ import annotations

import csv
import importlib.util
import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checks import rejects

from qualms.data import HARTREE_TO_EV, qm9
from qualms.data.qm9 import ATOMIC_U0, ENERGIES
from qualms.errors import QualmsWarning

ROOT = Path(__file__).parents[1]
SUBSET = ROOT / "src/qualms/data/qm9_subset.npz"

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


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.positions, b.positions)
        assert a.info == b.info


# --- the subset ---


def test_subset_is_small_and_names_its_origin(subset):
    assert len(set(indices(subset))) == len(subset) == 3000
    assert SUBSET.stat().st_size < 1.5e6
    with np.load(SUBSET, allow_pickle=False) as npz:
        assert {"attribution", "license"} <= {*npz}
    first, second = np.split(np.array(indices(subset)), 2)  # the file is not sorted
    assert abs(first.mean() - second.mean()) < 5 * 133885 / np.sqrt(12) * np.sqrt(2 / 1500)


def test_energies_are_in_electronvolt_and_consistent(subset):
    for atoms in subset:
        info = atoms.info
        assert info["G298"] < info["U0"] < info["U298"] < info["H298"]
        # H − U = kT, with k = 8.617e-5 eV/K.
        assert info["H298"] - info["U298"] == pytest.approx(8.617e-5 * 298.15, abs=1e-4)
        expected = info["U0"] - 27.2113961 * sum(ATOMIC_U0[symbol] for symbol in atoms.symbols)
        assert info["atomization_energy"] == pytest.approx(expected, abs=1e-9)
        assert info["atomization_energy_per_atom"] == info["atomization_energy"] / len(atoms)
        assert -7 < info["atomization_energy_per_atom"] < -3


def test_random_draws_are_nested(subset):
    assert indices(qm9(n=7)) == indices(subset)[:7]
    drawn = indices(qm9(n=50, seed=3))
    assert len(set(drawn)) == 50
    assert drawn != indices(qm9(n=50, seed=4))
    shuffled = indices(qm9(seed=3))
    assert shuffled[:50] == drawn
    assert sorted(shuffled) == sorted(indices(subset))
    first = indices(subset)[:6]
    assert indices(qm9(n=4, uncharacterized=first[1:3])) == [first[0], *first[3:]]


# --- other sources ---


def test_tables_of_qm9pack(tmp_path, monkeypatch, subset):
    fake_qm9pack(monkeypatch, tmp_path)
    for part in (1, 2, 3):
        write_csv(tmp_path, part, subset[2 * part - 2 : 2 * part])
    assert_same(qm9("qm9pack"), subset[:6])
    write_csv(tmp_path, 1, subset[:2], drop="XYZ_Ang")
    with rejects("source"):
        qm9("qm9pack")
    fake_qm9pack(monkeypatch, None)
    with rejects("source"):
        qm9("qm9pack")


def test_archive_in_the_original_dialect(tmp_path):
    archive = write_archive(tmp_path / "two.tar.bz2", [METHANE, WITH_EXPONENTS])
    methane, cyanide = qm9(archive, uncharacterized=())
    assert methane.get_chemical_formula() == "CH4"
    assert methane.positions[0].tolist() == [-0.0126981359, 1.0858041578, 0.0080009958]
    in_hartree = [methane.info[name] / 27.2113961 for name in ENERGIES]
    expected = [0.044749, -40.47893, -40.476062, -40.475117, -40.498597]
    assert in_hartree == pytest.approx(expected, rel=1e-14)
    expected = 27.2113961 * (-40.47893 - (-37.846772 - 4 * 0.500273))
    assert methane.info["atomization_energy"] == pytest.approx(expected, rel=1e-12)
    assert cyanide.positions[0, 0] == -1.2e-6
    assert cyanide.info["zpve"] == HARTREE_TO_EV * 1.6601e-2


def test_uncharacterized_molecules_are_left_out_or_warned_about(tmp_path):
    archive = write_archive(tmp_path / "two.tar.bz2", [METHANE, WITH_EXPONENTS])
    listed = tmp_path / "uncharacterized.txt"
    listed.write_text(UNCHARACTERIZED)
    assert indices(qm9(archive, uncharacterized=listed)) == [1]
    assert indices(qm9(archive, uncharacterized=iter([np.int64(1)]))) == [7]
    with pytest.warns(QualmsWarning) as caught:
        assert indices(qm9(str(archive))) == [1, 7]
    assert caught[0].filename == __file__


def test_npz_file(tmp_path):
    integers = np.arange(15).reshape(5, 3)
    path = write_npz(tmp_path / "two.npz", positions=integers, positions_per_angstrom=10)
    hydrogen_fluoride, water = qm9(path)
    assert indices([hydrogen_fluoride, water]) == [5, 3]
    assert water.get_chemical_formula() == "H2O"
    assert hydrogen_fluoride.positions.tolist() == [[0, 0.1, 0.2], [0.3, 0.4, 0.5]]
    # The reference energies are those of the file.
    assert water.info["atomization_energy"] == HARTREE_TO_EV * (-77 + 76)


DAMAGED = {
    "nan": METHANE.replace("-0.0126981359", "nan"),
    "a wrong number of atoms": METHANE.replace("5\ngdb", "50\ngdb"),
    "no element": METHANE.replace("C\t-0.0", "Zz\t-0.0"),
    "an element without a reference energy": METHANE.replace("C\t-0.0", "Au\t-0.0"),
    "too few energies": METHANE.replace("-40.47893\t-40.476062\t", ""),
    "a coordinate missing": METHANE.replace("\t 0.0080009958\t-0.535689", ""),
    "no array": {"G298": None},
    "a wrong shape": {"G298": np.zeros(3)},
    "infinity": {"positions": np.full((5, 3), np.inf)},
    "no atoms": {"offsets": np.array([0, 0, 5])},
    "fractional offsets": {"offsets": np.array([0.0, 2.5, 5.0])},
    "unknown elements": {"numbers": np.array([1, 9, 8, 1, 200])},
    "no reference energy": {"numbers": np.array([1, 9, 6, 1, 1])},
    "objects": {"U0": np.array([-100.0, None])},
    "no data": b"",
    "a truncated header": b"BZh9 nonsense",
    "no archive": b"PK nonsense",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=[*DAMAGED])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "damaged"
    if isinstance(content, dict):
        path = write_npz(tmp_path / "damaged.npz", **content)
    elif isinstance(content, str):
        write_archive(path, [content])
    else:
        path.write_bytes(content)
    with rejects("source"):
        qm9(path, uncharacterized=())


def test_archives_are_read_no_further_than_needed(tmp_path):
    path = write_archive(tmp_path / "many.tar.bz2", [METHANE] * 400, level=1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert len(qm9(path, n=5, uncharacterized=())) == 5
    with rejects("source"):
        qm9(path, uncharacterized=())


@pytest.mark.parametrize(
    ("name", "value"),
    [("source", v) for v in ("qm7", Path("missing.tar.bz2"), 3)]
    + [("n", v) for v in (0, 2.0, True, "10", 3001)]
    + [("seed", v) for v in (-1, 0.5)]
    + [("uncharacterized", v) for v in ("missing.txt", [1, "a"], [0], 7)],
)
def test_bad_argument_is_named(name, value):
    with rejects(name):
        qm9(**{name: value})
