import gzip
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.errors import InputError, QualmsWarning

ase = pytest.importorskip("ase")

from ase import Atoms  # noqa: E402
from ase.build import bulk, molecule  # noqa: E402
from ase.calculators.calculator import Calculator  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.io import write  # noqa: E402

from qualms.atomistic.labels import atomic_targets, labelled, structure_targets
from qualms.atomistic.structures import (
    MIN_DISTANCE,
    check_species,
    check_structures,
    composition,
    data_hash,
    fingerprints,
    iter_frames,
    read_frames,
    species_of,
    symbols_of,
)

WATER = "3\nenergy=-1.5 tag=a\nO 0 0 0\nH 0.96 0 0\nH 0 0.96 0\n"
HYDROGEN = "2\n\nH 0 0 0\nH 0 0 0.74\n"


def refused(call, *args, match, **kwargs):
    """The error is one line, and all of its words are there after a trip between processes."""
    with pytest.raises(InputError, match=match) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    return message


# Reading


def test_frames_are_read_one_by_one(tmp_path):
    path = tmp_path / "two.xyz"
    path.write_text(WATER + HYDROGEN)
    frames = iter_frames(path)
    assert next(frames).get_chemical_formula() == "H2O"
    assert next(frames).get_chemical_formula() == "H2"
    assert next(frames, None) is None
    assert [len(atoms) for atoms in read_frames(str(path))] == [3, 2]


def test_all_that_ase_writes_is_read_as_ase_reads_it(tmp_path):
    frames = [molecule("CH3CH2OH"), bulk("NaCl", "rocksalt", a=5.6), molecule("H2O")]
    frames[0].info.update(label=1.5, text="two words", vector=np.arange(4))
    frames[1].arrays["shift"] = np.array([1.25, -3.0])
    frames[2].calc = SinglePointCalculator(frames[2], energy=-3.0, forces=np.ones((3, 3)))
    write(tmp_path / "all.extxyz", frames)
    for ours, theirs in zip(
        read_frames(tmp_path / "all.extxyz"),
        ase.io.read(tmp_path / "all.extxyz", ":"),
        strict=True,
    ):
        assert ours == theirs
        assert str(ours.info) == str(theirs.info)
        assert ours.arrays.keys() == theirs.arrays.keys()
        if theirs.calc:
            assert ours.calc.results.keys() == theirs.calc.results.keys()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_compressed_files(tmp_path, suffix):
    path = tmp_path / f"two.xyz{suffix}"
    with ase.io.formats.open_with_compression(str(path), "wt") as stream:
        stream.write(WATER + HYDROGEN)
    assert [len(atoms) for atoms in iter_frames(path)] == [3, 2]


def test_other_formats(tmp_path):
    for name in ("a.traj", "a.cif", "a.json"):
        write(tmp_path / name, [bulk("Cu")])
        assert [len(atoms) for atoms in iter_frames(tmp_path / name)] == [1]


@pytest.mark.parametrize("name", ["structures", "structures.data1", "a@1.xyz"])
def test_xyz_by_contents_and_names_that_ase_takes_apart(tmp_path, name):
    (tmp_path / name).write_text(WATER + HYDROGEN)
    assert len(read_frames(tmp_path / name)) == 2


def test_blank_lines_end_nothing(tmp_path):
    (tmp_path / "a.xyz").write_text("\n" + WATER + "\n  \n" + HYDROGEN + "\n\n")
    assert len(read_frames(tmp_path / "a.xyz")) == 2


def test_cell_as_pseudo_atoms(tmp_path):
    vectors = "VEC1 4 0 0\nVEC2 0 5 0\nVEC3 0 0 6\n"
    (tmp_path / "a.xyz").write_text(HYDROGEN + vectors + HYDROGEN)
    first, second = read_frames(tmp_path / "a.xyz")
    assert first.pbc.all()
    assert first.cell.lengths() == pytest.approx([4, 5, 6])
    assert not second.pbc.any()


def test_missing_file_and_directory_are_refused_at_once(tmp_path):
    refused(iter_frames, tmp_path / "no.xyz", match="no.xyz.*No such file")
    refused(iter_frames, tmp_path, match="directory")


@pytest.mark.parametrize(
    ("name", "text"), [("a.xyz", ""), ("a.xyz", "\n \n"), ("a.dat1", ""), ("a.json", "")]
)
def test_no_frames(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refused(read_frames, tmp_path / name, match=r"empty.*at least one structure")


def test_no_frames_compressed(tmp_path):
    with gzip.open(tmp_path / "a.xyz.gz", "wb"):
        pass
    refused(read_frames, tmp_path / "a.xyz.gz", match=r"empty.*at least one structure")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"some words", "frame 0, line 1: 'some words'"),
        ("a.xyz", b"H 0 0 0\n", "frame 0, line 1: 'H 0 0 0'"),
        ("a.xyz", b"-1\n\n", "frame 0, line 1: '-1'"),
        ("a.xyz", b"1\n\nQq 0 0 0\n", "frame 0, line 1: KeyError: 'Qq'"),
        ("a.xyz", b"1\n\nH 0 zero 0\n", "frame 0, line 1: ValueError"),
        ("a.xyz", b"1\n\nH 0 0\n", "frame 0, line 1: "),
        ("a.xyz", b"1\n\n\n", "frame 0, line 1: "),
        ("a.xyz", b'1\nLattice="1 2 3"\nH 0 0 0\n', "frame 0, line 1: ValueError"),
        ("a.xyz", b"1\nProperties=species:S:1:pos:Q:3\nH 0 0 0\n", "frame 0, line 1: ValueError"),
        ("a.xyz", b"\xff\xfe\x00\x01", "frame 0, UnicodeDecodeError"),
        ("a.xyz.gz", b"1\n\nH 0 0 0\n", "frame 0, BadGzipFile"),
        ("a.xyz.gz", gzip.compress(WATER.encode() * 9, mtime=0)[:-20], "frame"),
        ("a.json", b"{}", "frame 0, "),
        ("a.traj", b"no trajectory", "frame 0, "),
        ("a.pdf", b"%PDF-1.4\n", "frame 0, "),
    ],
)
def test_not_a_structure_file(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    message = refused(read_frames, tmp_path / name, match="expected extended XYZ")
    assert reason in message
    assert name in message


@pytest.mark.parametrize(
    ("tail", "found"),
    [("3", 0), ("3\n", 0), ("3\nx=1\n", 0), ("3\nx=1\nO 0 0 0\n", 1), ("3\n\nO 0 0 0\nH 1 0 0", 2)],
)
def test_truncated_last_frame(tmp_path, tail, found):
    (tmp_path / "a.xyz").write_text(WATER + HYDROGEN + tail)
    frames = iter_frames(tmp_path / "a.xyz")
    assert [len(next(frames)), len(next(frames))] == [3, 2]
    refused(next, frames, match=f"frame 2, line 10: the file ends after {found} of 3 atoms")


def test_truncated_line_is_a_truncated_frame(tmp_path):
    (tmp_path / "a.xyz").write_text(WATER + HYDROGEN[:-7])
    refused(read_frames, tmp_path / "a.xyz", match="frame 1, line 6")


# Geometry


def test_sound_structures_pass():
    check_structures(
        [
            molecule("C6H6"),
            Atoms("He"),  # no neighbours at all
            Atoms("He", cell=[3, 3, 3], pbc=True),
            bulk("Si"),
            Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]], cell=[1, 0, 0], pbc=[1, 0, 0]),
            Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]], cell=[[2, 0, 0]] * 3, pbc=[0, 1, 0]),
            # Molecules may have any cell, or none, as long as they are not periodic.
            Atoms("H", cell=[[1, 2, 3], [2, 4, 6], [0, 0, 0]], pbc=False),
            Atoms("H", cell=[np.nan, 1, 1], pbc=False),
        ]
    )
    check_structures([])


@pytest.mark.parametrize(
    ("atoms", "reason"),
    [
        (Atoms(), "no atoms"),
        (Atoms("HX", positions=[[0, 0, 0], [1, 0, 0]]), "atom 1 of atomic number 0"),
        (Atoms("H2", positions=[[0, 0, 0], [0, np.nan, 0]]), "atom 1 at .*finite positions"),
        (Atoms("H", positions=[[np.inf, 0, 0]]), "finite positions"),
        (Atoms("OHH", positions=[[0, 0, 0], [1, 0, 0], [1, 0, 0]]), r"1 \(H\) and 2 \(H\), 0 Å"),
        (Atoms("OHH", positions=[[0, 0, 0], [1, 0, 0], [0, 0.05, 0]]), r"0 \(O\) and 2 \(H\)"),
        (Atoms("H", pbc=True), "cell vector a of length 0 Å"),
        (Atoms("H", cell=[3, 3, 0], pbc=[0, 1, 1]), "cell vector c"),
        (Atoms("H", cell=[[1, 2, 0], [2, 4, 0], [0, 0, 3]], pbc=True), "no volume"),
        (Atoms("H", cell=[[1, 2, 0], [2, 4, 0], [0, 0, 0]], pbc=[1, 1, 0]), "no volume"),
        (Atoms("H", cell=[[1, 0, 0], [0, 1, 0], [1, 1, 0]], pbc=True), "no volume"),
        (Atoms("H", cell=[np.inf, 1, 1], pbc=True), "finite cell"),
        (Atoms("H", cell=[[3, 0, 0], [3, 0.05, 0], [0, 0, 3]], pbc=True), "its periodic image"),
    ],
)
def test_geometry_that_cannot_be_used(atoms, reason):
    refused(check_structures, [Atoms("H"), atoms], match=rf"frames\[1\]=.*{reason}")
    refused(check_structures, [atoms], first=41, match=r"frames\[41\]=")


def test_what_is_not_a_list_of_structures():
    refused(check_structures, molecule("H2O"), match=r"list of ase\.Atoms")
    refused(check_structures, ["H2O"], match=r"frames\[0\]=a str")


def test_a_thousand_atoms_on_one_place():
    refused(check_structures, [Atoms(numbers=np.ones(1000))], match="0 Å apart")


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        (np.diag([4.0, 5.0, 6.0]), (1, 1, 1)),
        ([[4, 0, 0], [1.9, 3, 0], [-1.5, 1.2, 5]], (1, 1, 1)),
        ([[0, 2, 2], [2, 0, 2], [2, 2, 0]], (1, 1, 1)),
        ([[4, 0, 0], [100, 4, 0], [0, 50, 4]], (1, 1, 1)),  # skewed: image cells far away touch
        ([[4, 0, 0], [1.5, 3, 0], [0, 0, 0]], (1, 1, 0)),
        ([[4, 0, 0], [4, 0, 0], [0, 3, 4]], (0, 1, 1)),
        ([[0, 0, 0], [0, 0, 0], [1, 2, 4]], (0, 0, 1)),
    ],
)
def test_clashes_with_images(cell, pbc):
    cell, pbc = np.asarray(cell, dtype=float), np.array(pbc, dtype=bool)
    at_corner = np.array([0.01, -0.01, 0.02])
    for shift in itertools.product((-1, 0, 1, 7), repeat=3):
        image = np.array([-0.02, 0.02, -0.01]) + (shift * pbc) @ cell
        atoms = Atoms("CO", positions=[at_corner, image], cell=cell, pbc=pbc)
        refused(check_structures, [atoms], match=r"atoms 0 \(C\) and 1 \(O\), 0.052 Å")
    # Where there are no images, an atom beside the place of another is somewhere else.
    for normal in np.linalg.svd(cell[pbc])[2][pbc.sum() :]:
        image = at_corner + normal + 2 * cell[pbc].sum(axis=0)
        check_structures([Atoms("CO", positions=[at_corner, image], cell=cell, pbc=pbc)])


@given(st.integers(0, 10**6))
def test_clashes_are_those_of_the_minimum_image(seed):
    rng = np.random.default_rng(seed)
    pbc = rng.random(3) < 0.7
    cell = rng.normal(size=(3, 3)) + np.diag(rng.uniform(1, 3, 3))
    cell[rng.integers(3)] *= rng.choice([0.3, 1, 5])
    n = rng.integers(1, 12)
    atoms = Atoms(numbers=np.ones(n), positions=rng.uniform(-4, 4, (n, 3)), cell=cell, pbc=pbc)
    if n > 1:  # half of the time two atoms are close, perhaps across the cell
        direction = rng.normal(size=3)
        direction *= rng.uniform(0.05, 0.15) / np.linalg.norm(direction)
        atoms.positions[0] = atoms.positions[1] + direction + (rng.integers(-2, 3, 3) * pbc) @ cell
    shifts = np.array(list(itertools.product(range(-9, 10), repeat=3)))
    shifts = np.unique(shifts * pbc, axis=0) @ cell
    coordinates = np.linalg.lstsq(cell[pbc].T, atoms.positions.T, rcond=None)[0].T
    wrapped = atoms.positions - np.floor(coordinates) @ cell[pbc]
    delta = wrapped[:, None] - wrapped
    distances = np.linalg.norm(delta[..., None, :] + shifts, axis=-1)
    distances[np.arange(n), np.arange(n), ~shifts.any(axis=1)] = np.inf
    if distances.min() < MIN_DISTANCE:
        refused(check_structures, [atoms], match="Å apart|no volume|cell vector")
    else:
        check_structures([atoms])


# Telling structures apart


def test_exact_duplicates_have_the_same_fingerprint():
    atoms = molecule("CH3OH")
    twin = atoms.copy()
    twin.positions += 1e-9
    twin.info["energy"] = 1.0
    moved, other, boxed, periodic = (atoms.copy() for _ in range(4))
    moved.positions[0, 0] += 1e-4
    other.numbers[0] = 14
    boxed.cell = [20, 20, 20]
    periodic.cell, periodic.pbc = [20, 20, 20], True
    larger = periodic.copy()
    larger.cell = [21, 20, 20]
    slab = periodic.copy()
    slab.pbc = [1, 1, 0]
    prints = fingerprints([atoms, twin, boxed, moved, other, periodic, larger, slab])
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 6


def test_minus_zero_is_zero():
    one, two = Atoms("H", positions=[[0.0, 0, 0]]), Atoms("H", positions=[[-0.0, -1e-9, 0]])
    assert fingerprints([one]) == fingerprints([two])


def test_data_hash_depends_on_structures_their_order_and_values():
    frames = [molecule("H2O"), molecule("CH4")]
    reference = data_hash(frames, np.array([1.0, np.nan]))
    assert reference == data_hash([a.copy() for a in frames], [1.0, -np.nan])
    assert reference == data_hash(frames, [np.array([1.0]), np.array([np.nan])])
    others = [
        data_hash(frames, np.array([1.0, 2.0])),
        data_hash(frames[::-1], np.array([1.0, np.nan])),
        data_hash(frames[:1], np.array([1.0])),
        data_hash([], np.array([])),
    ]
    assert len({reference, *others}) == 5
    assert len(reference) == 32


def test_composition_and_species():
    frames = [molecule("H2O"), molecule("CH4"), Atoms("O")]
    assert species_of(frames) == [1, 6, 8]
    assert species_of([]) == []
    counts = composition(frames, [8, 1, 6, 7])
    assert counts.dtype == np.float64
    assert counts.tolist() == [[1, 2, 0, 0], [0, 4, 1, 0], [1, 0, 0, 0]]
    assert composition([], [1, 8]).shape == (0, 2)
    assert symbols_of([1, 8, 200]) == "H, O, 200"


def test_unseen_species():
    frames = [molecule("H2O"), molecule("CH4"), molecule("CH3Cl"), Atoms("He")]
    check_species(frames, [1, 2, 6, 8, 17])
    message = refused(
        check_species, frames, [1, 8], first=10, match=r"He, C, Cl in 3 of 4 structures"
    )
    assert "frames[11]" in message
    assert "H, O" in message
    refused(composition, frames, [1, 6, 8, 2], match=r"Cl in 1 of 4 .*frames\[2\]")


# Targets


def water(**info):
    atoms = molecule("H2O")
    atoms.info.update(info)
    return atoms


def with_results(**results):
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def test_where_labels_are_looked_for():
    assert structure_targets([water(energy=1), water(energy=2.5)], "energy").tolist() == [1, 2.5]
    assert structure_targets([water(REF_energy=1.0)], "energy").tolist() == [1]
    assert structure_targets([with_results(energy=3.0)], "energy").tolist() == [3]
    both = with_results(energy=3.0)
    both.info["REF_energy"] = 2.0
    assert structure_targets([both], "energy").tolist() == [2]
    both.info["energy"] = 1.0
    assert structure_targets([both], "energy").tolist() == [1]
    assert structure_targets([both], "REF_energy").tolist() == [2]
    refused(structure_targets, [water(energy=1.0)], "REF_energy", match="Did you mean 'energy'?")


def test_ase_round_trip(tmp_path):
    atoms = with_results(energy=-3.0, magmoms=np.array([1.0, 2.0, 3.0]))
    write(tmp_path / "a.xyz", atoms)
    frames = read_frames(tmp_path / "a.xyz")
    assert structure_targets(frames, "energy").tolist() == [-3]
    assert atomic_targets(frames, "magmoms")[0].tolist() == [1, 2, 3]


def test_nothing_is_calculated():
    class Expensive(Calculator):
        implemented_properties = ("energy",)

        def calculate(self, *args, **kwargs):
            raise AssertionError("a calculation was started")

    atoms = molecule("H2O")
    atoms.calc = Expensive()
    refused(structure_targets, [atoms], "energy", match="there is none")


@pytest.mark.parametrize("value", [None, np.nan, np.array(np.nan), np.array([np.nan])])
def test_no_label(value):
    values = structure_targets([water(u=1.0), water(u=value), water()], "u")
    assert values[0] == 1
    assert np.isnan(values[1:]).all()


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array(2), np.array([2.0])])
def test_numbers(value):
    assert structure_targets([water(u=value)], "u").tolist() == [2]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("1.5", "'1.5'"),
        (np.ones(5), r"shape \(5,\)"),
        (np.ones((1, 1)), r"shape \(1, 1\)"),
        (1j, "1j"),
        ({"a": 1}, "one number"),
        ([[1], [2, 3]], "one number"),
        (True, "a key without a value means True"),
        (np.inf, "finite"),
        (-np.inf, "finite"),
        (np.ones(3), "kind='atomic' / --per-atom-target"),
    ],
)
def test_bad_labels_of_structures(value, match):
    message = refused(structure_targets, [water(u=1.0), water(u=value)], "u", match=match)
    assert "frames[1].info['u']" in message


def test_labels_of_atoms():
    atoms = molecule("H2O")
    atoms.arrays["shift"] = np.array([1.0, 2.0, np.nan])
    other = molecule("CH4")
    values = atomic_targets([atoms, other], "shift")
    assert values[0][:2].tolist() == [1, 2]
    assert np.isnan(values[0][2])
    assert values[1].shape == (5,)
    assert np.isnan(values[1]).all()
    hydrogens = atomic_targets([atoms], "shift", species=[1])[0]
    assert np.isnan(hydrogens[[0, 2]]).all()
    assert hydrogens[1] == 2
    atoms.arrays["REF_q"] = np.array([[1], [2], [3]])
    assert atomic_targets([atoms], "q")[0].tolist() == [1, 2, 3]
    atoms.arrays["gaps"] = np.array([None, 1.0, 2], dtype=object)
    assert np.isnan(atomic_targets([atoms], "gaps")[0]).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.ones((3, 3)), r"shape \(3, 3\)"),
        (np.array(["a", "b", "c"]), "shape"),
        (np.array(["a", None, "c"], dtype=object), "shape"),
        (np.array([True, False, True]), "True"),
        (np.array([1.0, np.inf, 1.0]), r"\[1\]=inf"),
    ],
)
def test_bad_labels_of_atoms(value, match):
    atoms = molecule("H2O")
    atoms.arrays["q"] = value
    message = refused(atomic_targets, [molecule("H2O"), atoms], "q", match=match)
    assert "frames[1].arrays['q']" in message


def test_infinite_labels_of_other_species_do_not_matter():
    atoms = molecule("H2O")
    atoms.arrays["q"] = np.array([np.inf, 1.0, 2.0])
    assert atomic_targets([atoms], "q", species=[1])[0][1:].tolist() == [1, 2]


def test_missing_keys():
    atoms = with_results(free_energy=1.0, forces=np.ones((3, 3)), charges=np.ones(3))
    atoms.info.update(energy_U0=1.0, tag="a")
    atoms.arrays["CS_total"] = np.ones(3)
    message = refused(structure_targets, [water(), atoms], "Energy_u0", match="'energy_U0'?")
    assert "('energy_U0', 'free_energy', 'tag')" in message
    assert "Did you mean 'energy_U0'?" in message
    message = refused(atomic_targets, [atoms], "CS_totals", match="Did you mean 'CS_total'?")
    assert "('CS_total', 'charges', 'forces')" in message
    for key in ("CS_total", "charges"):
        refused(structure_targets, [atoms], key, match="use kind='atomic' / --per-atom-target")
    for key in ("energy_U0", "free_energy"):
        refused(atomic_targets, [atoms], key, match="use kind='extensive' or 'intensive'")
    assert "Did you" not in refused(structure_targets, [atoms], "q", match="expected a label")
    refused(structure_targets, [], "q", match="at least one")


def test_labels_in_several_places_are_told():
    frames = [water(energy=1.0), with_results(energy=2.0), with_results(energy=3.0)]
    with pytest.warns(QualmsWarning, match=r"calc.results\['energy'\] \(2 structures\), info"):
        assert structure_targets(frames, "energy").tolist() == [1, 2, 3]


def test_a_shared_calculator_is_refused():
    one, two = with_results(energy=1.0), molecule("H2O")
    two.calc = one.calc
    refused(structure_targets, [one, two], "energy", match=r"frames\[1\]\.calc")
    assert structure_targets([one, one], "energy").tolist() == [1, 1]


def test_labelled_structures():
    frames = [water(u=1.0), water(), water(u=np.nan), water(u=4.0)]
    result = labelled(frames, "u", "extensive")
    assert result.frames.tolist() == [0, 3]
    assert result.values.tolist() == [1, 4]
    assert result.rows == []
    assert (result.n_unlabelled, result.n_isolated, result.isolated) == (2, 0, {})


def test_labelled_atoms():
    one, two, three = molecule("H2O"), molecule("CH4"), molecule("H2O")
    one.arrays["q"] = np.array([1.0, 2.0, np.nan])
    three.arrays["q"] = np.array([3.0, 4.0, 5.0])
    result = labelled([one, two, three], "q", "atomic")
    assert result.frames.tolist() == [0, 2]
    assert [rows.tolist() for rows in result.rows] == [[0, 1], [0, 1, 2]]
    assert result.values.tolist() == [1, 2, 3, 4, 5]
    assert result.n_unlabelled == 6
    result = labelled([one, two, three], "q", "atomic", species=[1])
    assert [rows.tolist() for rows in result.rows] == [[1], [1, 2]]
    assert result.values.tolist() == [2, 4, 5]
    assert result.n_unlabelled == 5


def isolated(symbol, tag="isolated_atom", **info):
    return Atoms(symbol, info={"config_type": tag, **info})


def test_isolated_atoms_are_set_aside():
    frames = [
        isolated("H", u=-13.6),
        water(u=-470.0),
        isolated("O", "IsolatedAtom", u=-432.0),
        isolated("H", u=-13.6 * (1 + 1e-12)),
        isolated("N"),
        Atoms("H", info={"u": -13.5}),  # not tagged: to be learned
        water(u=-471.0, config_type="isolated_atom"),  # not an atom
    ]
    result = labelled(frames, "u", "extensive")
    assert result.frames.tolist() == [1, 5, 6]
    assert (result.n_isolated, result.n_unlabelled) == (4, 0)
    assert result.isolated == pytest.approx({1: -13.6, 8: -432.0})
    refused(labelled, [*frames, isolated("H", u=-13.7)], "u", "extensive", match=r"frames\[7\]")


def test_nothing_labelled():
    refused(labelled, [water(u=None)], "u", "intensive", match="at least one structure")
    refused(labelled, [isolated("H", u=1.0)], "u", "extensive", match="isolated atoms aside")
    atoms = molecule("H2O")
    atoms.arrays["q"] = np.ones(3)
    refused(labelled, [atoms], "q", "atomic", [6, 7], match="one atom of C, N")


def test_kinds_and_species_that_make_no_sense():
    refused(labelled, [water(u=1.0)], "u", "total", match="'extensive', 'intensive', 'atomic'")
    refused(labelled, [water(u=1.0)], "u", "extensive", [1], match="unless kind='atomic'")
