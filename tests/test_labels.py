"""Structures and labels: reading, checks of the geometry, where labels are, which are missing."""

import itertools
import re
import warnings
from contextlib import nullcontext

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.lj import LennardJones
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from atomistic_fixtures import (
    ENERGY,
    SMOOTH,
    copies,
    labelled_dimers,
    make_force_model,
    make_model,
    membership,
)
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.atomistic.census import take_census
from qualms.atomistic.label_checks import equalized, factor_between, find_outliers
from qualms.atomistic.labels import find_forces, find_label, find_stresses, find_targets, labelled
from qualms.atomistic.settings import make_settings
from qualms.atomistic.structures import (
    MIN_DISTANCE,
    FrameFiles,
    check_species,
    check_structures,
    composition,
    data_digest,
    data_hashes,
    fingerprints,
    iter_frames,
    read_frames,
    species_of,
    state_of,
)
from qualms.errors import QualmsWarning

WATER = "3\nenergy=-1.5 tag=a\nO 0 0 0\nH 0.96 0 0\nH 0 0.96 0\n"
HYDROGEN = "2\n\nH 0 0 0\nH 0 0 0.74\n"


def structure_targets(frames, key):
    return np.concatenate(find_targets(frames, key))


def atomic_targets(frames, key, species=None):
    return find_targets(frames, key, per_atom=True, species=species)


# --- reading ---


def test_all_that_ase_writes_is_read_as_ase_reads_it(tmp_path):
    frames = [molecule("CH3CH2OH"), bulk("NaCl", "rocksalt", a=5.6), molecule("H2O")]
    frames[0].info.update(label=1.5, text="two words", vector=np.arange(4))
    frames[1].arrays["shift"] = np.array([1.25, -3.0])
    frames[2].calc = SinglePointCalculator(frames[2], energy=-3.0, forces=np.ones((3, 3)))
    path = tmp_path / "all.extxyz"
    write(path, frames)
    for ours, theirs in zip(read_frames(path), ase.io.read(path, ":"), strict=True):
        assert ours == theirs
        assert str(ours.info) == str(theirs.info)
        assert ours.arrays.keys() == theirs.arrays.keys()


@pytest.mark.parametrize("name", ["a.xyz", "a.xyz.gz", "a.xyz.xz", "structures", "a@1.xyz"])
def test_xyz_is_read_frame_by_frame_across_blank_lines(tmp_path, name):
    path = tmp_path / name
    with ase.io.formats.open_with_compression(str(path), "wt") as stream:
        stream.write("\n" + WATER + "\n  \n" + HYDROGEN + "\n")
    frames = iter_frames(path)
    assert [len(next(frames)), len(next(frames))] == [3, 2]
    assert next(frames, None) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.xyz", b""),
        ("a.txt", b"some words"),
        ("a.xyz", b"1\n\nQq 0 0 0\n"),
        ("a.xyz", b"1\n\nH 0 0\n"),
        ("a.xyz", b'1\nLattice="1 2 3"\nH 0 0 0\n'),
        ("a.xyz", b"1\nProperties=species:S:1:pos:R:3:x:R:2147483648\nH 0 0 0 1\n"),
        ("a.xyz", b"\xff\xfe\x00\x01"),
        ("a.xyz.gz", b"1\n\nH 0 0 0\n"),
        ("a.json", b"{}"),
        ("a.xyz", (WATER + HYDROGEN[:-7]).encode()),
        ("a.xyz", (WATER + "3\nx=1\nO 0 0 0\n").encode()),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with rejects("path"):
        read_frames(tmp_path / name)


# --- geometry ---


def test_valid_structures():
    check_structures(
        [
            molecule("C6H6"),
            Atoms("He", cell=[3, 3, 3], pbc=True),
            Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.7]], cell=[1, 0, 0], pbc=[1, 0, 0]),
            # Molecules may have any cell as long as they are not periodic.
            Atoms("H", cell=[[1, 2, 3], [2, 4, 6], [0, 0, 0]], pbc=False),
            Atoms("H2", positions=[[0, 0, 0], [400, 400, 400]], cell=[1e9, 1, 1]),
            Atoms("He", cell=[5, 5, 1e4], pbc=True),
        ]
    )
    with rejects("frames"):
        check_structures(molecule("H2O"))
    with rejects("frames[0]"):
        check_structures(["H2O"])


@pytest.mark.parametrize(
    "atoms",
    [
        Atoms(),
        Atoms("HX", positions=[[0, 0, 0], [1, 0, 0]]),
        Atoms("H2", positions=[[0, 0, 0], [0, np.nan, 0]]),
        Atoms("OHH", positions=[[0, 0, 0], [1, 0, 0], [1, 0, 0.05]]),
        Atoms("H", pbc=True),
        Atoms("H", cell=[3, 3, 0], pbc=[0, 1, 1]),
        Atoms("H", cell=[[1, 2, 0], [2, 4, 0], [0, 0, 3]], pbc=True),
        Atoms("H", cell=[np.inf, 1, 1], pbc=True),
        Atoms("H", cell=[[3, 0, 0], [3, 0.05, 0], [0, 0, 3]], pbc=True),
        Atoms(numbers=np.ones(1000)),
        Atoms("H2", positions=[[0, 0, 0], [0, 1e16, 0]]),
        Atoms("H", cell=[5, 5, 3.6e6], pbc=True),
        Atoms("H", cell=[1000, 1000, 1000], pbc=True),
        Atoms("H2", positions=[[0, 0, 0], [0, 900, 900]], cell=[900, 0, 0], pbc=[1, 0, 0]),
    ],
)
def test_invalid_structures_are_named(atoms):
    with rejects("frames[1]"):
        check_structures([Atoms("H"), atoms])
    with rejects("frames[41]"):
        check_structures([atoms], first=41)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_distances_are_those_of_the_minimum_image(seed):
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
        with rejects("frames[0]"):
            check_structures([atoms])
    else:
        check_structures([atoms])


def test_fingerprints_and_digests():
    atoms = molecule("CH3OH")
    twin, moved, other, boxed, periodic, slab = (atoms.copy() for _ in range(6))
    twin.positions += 1e-9
    moved.positions[0, 0] += 1e-4
    other.numbers[0] = 14
    boxed.cell = periodic.cell = slab.cell = [20, 20, 20]
    periodic.pbc, slab.pbc = True, [1, 1, 0]
    prints = fingerprints([atoms, twin, boxed, moved, other, periodic, slab])
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 5
    frames = [atoms, other]

    def digest(frames, labels):
        return data_digest(data_hashes(fingerprints(frames), labels))

    found = digest(frames, np.array([1.0, np.nan]))
    assert found == digest(copies(frames), [1.0, -np.nan])
    changed = [(frames, [1.0, 2.0]), (frames[::-1], [1.0, np.nan]), (frames[:1], [1.0])]
    assert len({found, *(digest(*case) for case in changed)}) == 4


def test_composition_and_species():
    frames = [molecule("H2O"), molecule("CH4"), Atoms("O")]
    assert species_of(frames) == [1, 6, 8]
    assert composition(frames, [8, 1, 6, 7]).tolist() == [[1, 2, 0, 0], [0, 4, 1, 0], [1, 0, 0, 0]]
    check_species(frames, [1, 6, 8])
    for call in (check_species, composition):
        with rejects("frames"):
            call(frames, [1, 8])


# --- labels of structures and atoms ---


def water(**info):
    atoms = molecule("H2O")
    atoms.info.update(info)
    return atoms


def with_results(**results):
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def test_where_labels_are_looked_up(tmp_path):
    assert structure_targets([water(energy=1), water(energy=2.5)], "energy").tolist() == [1, 2.5]
    atoms = with_results(energy=3.0)
    for key, value in ((None, 3.0), ("REF_energy", 2.0), ("energy", 1.0)):
        if key:
            atoms.info[key] = value
        assert structure_targets([atoms], "energy").tolist() == [value]
    write(tmp_path / "a.xyz", with_results(energy=-3.0, magmoms=np.array([1.0, 2.0, 3.0])))
    frames = read_frames(tmp_path / "a.xyz")
    assert structure_targets(frames, "energy").tolist() == [-3]
    assert atomic_targets(frames, "magmoms")[0].tolist() == [1, 2, 3]
    atoms = molecule("H2O")
    atoms.calc = LennardJones()  # would calculate an energy
    with rejects("key"):
        structure_targets([atoms], "energy")
    shared = [with_results(energy=1.0), molecule("H2O")]
    shared[1].calc = shared[0].calc
    with rejects("frames[1].calc"):
        structure_targets(shared, "energy")


def test_no_label():
    missing = [water(u=None), water(u=np.nan), water(u=np.array([np.nan])), water()]
    values = structure_targets([water(u=1.0), *missing], "u")
    assert np.isnan(values).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(
    "value", ["1.5", np.ones(5), np.ones((1, 1)), 1j, [[1], [2, 3]], True, np.inf, np.ones(3)]
)
def test_invalid_labels_of_structures(value):
    with rejects("frames[1].info['u']"):
        structure_targets([water(u=1.0), water(u=value)], "u")


def test_labels_of_atoms():
    atoms, other = molecule("H2O"), molecule("CH4")
    atoms.arrays["shift"] = np.array([1.0, 2.0, np.nan])
    values = atomic_targets([atoms, other], "shift")
    assert values[0][:2].tolist() == [1, 2]
    assert np.isnan(values[0][2])
    assert np.isnan(values[1]).all()
    hydrogens = atomic_targets([atoms], "shift", species=[1])[0]
    assert np.isnan(hydrogens).tolist() == [True, False, True]
    atoms.arrays["REF_q"] = np.array([[1], [2], [3]])
    assert atomic_targets([atoms], "q")[0].tolist() == [1, 2, 3]
    atoms.arrays["gaps"] = np.array([None, 1.0, 2], dtype=object)
    assert np.isnan(atomic_targets([atoms], "gaps")[0]).tolist() == [True, False, False]
    atoms.arrays["q"] = np.array([np.inf, 1.0, 2.0])  # of another species
    assert atomic_targets([atoms], "q", species=[1])[0][1:].tolist() == [1, 2]


@pytest.mark.parametrize(
    "value",
    [np.ones((3, 3)), np.array(["a", "b", "c"]), np.array([True] * 3), np.array([1, np.inf, 1])],
)
def test_invalid_labels_of_atoms(value):
    atoms = molecule("H2O")
    atoms.arrays["q"] = value
    with rejects("frames[1].arrays['q']"):
        atomic_targets([molecule("H2O"), atoms], "q")


def test_labelled_atoms_and_structures_are_counted():
    one, two, three = molecule("H2O"), molecule("CH4"), molecule("H2O")
    one.arrays["q"] = np.array([1.0, 2.0, np.nan])
    three.arrays["q"] = np.array([3.0, 4.0, 5.0])
    for species, rows, values, n in (
        (None, [[0, 1], [0, 1, 2]], [1, 2, 3, 4, 5], 6),
        ([1], [[1], [1, 2]], [2, 4, 5], 5),
    ):
        found = labelled([one, two, three], "q", "atomic", species)
        assert found.frames.tolist() == [0, 2]
        assert [r.tolist() for r in found.rows] == rows
        assert found.values.tolist() == values
        assert found.n_unlabelled == n
    with rejects("key"):
        labelled([one], "q", "atomic", [6])


def isolated(symbol, tag="isolated_atom", **info):
    return Atoms(symbol, info={"config_type": tag, **info})


def test_isolated_atoms_are_set_aside():
    frames = [
        isolated("H", u=-13.6),
        water(u=-470.0),
        isolated("O", "IsolatedAtom", u=-432.0),
        isolated("N"),
        Atoms("H", info={"u": -13.5}),  # not tagged: to be learned
        water(config_type="isolated_atom"),  # not an atom
    ]
    found = labelled(frames, "u", "extensive")
    assert found.frames.tolist() == [1, 4]
    assert (found.n_isolated, found.n_unlabelled) == (3, 1)
    assert found.isolated == pytest.approx({1: -13.6, 8: -432.0})
    with rejects("frames"):
        labelled([*frames, isolated("H", u=-13.7)], "u", "extensive")


def test_predictions_are_not_labels_and_recomputed_values_are():
    atoms = water(energy=1.0, energy_uncertainty=0.1, energy_ensemble=np.array([0.9, 1.1]))
    assert find_label(atoms, "energy", False) is None
    with rejects("key"):
        structure_targets([atoms], "energy")
    atoms.calc = LennardJones()
    energy = atoms.get_potential_energy()
    assert find_label(atoms, "energy", False)[0] == energy
    atoms.info["REF_energy"] = 2.0
    with pytest.warns(QualmsWarning):
        assert structure_targets([atoms], "energy").tolist() == [2.0]


# --- labels of forces and stresses ---


def test_blocks_of_rows(alloys):
    frames = copies(alloys[:5])
    frames[1].arrays["force"][:] = np.nan
    frames[3].arrays["force"][2, 1] = np.nan
    for atoms in frames[2:]:
        del atoms.info["virtual"]
    settings = make_settings({"target": "energy", "forces": "force", "stress": "virtual"})
    census = take_census(frames, settings)
    data = census.data
    energy, forces, stress = (data.quantities[q] for q in ("energy", "forces", "stress"))
    assert [len(q.y) for q in (energy, forces, stress)] == [5, 4 * 12 - 1, 12]
    assert [census.n_without(name) for name in data.quantities] == [0, 1, 3]
    assert data.n_rows == 64
    rows = np.concatenate([energy.rows, forces.rows, stress.rows])
    assert sorted(rows.tolist()) == list(range(64))
    np.testing.assert_array_equal(forces.structure, np.repeat([0, 2, 3, 4], [12, 12, 11, 12]))
    np.testing.assert_array_equal(stress.component, [*range(6)] * 2)
    np.testing.assert_array_equal(stress.multiplicity, [1, 1, 1, 2, 2, 2] * 2)
    np.testing.assert_array_equal(
        np.bincount(forces.vector)[np.unique(forces.vector)][8:12], [3, 3, 2, 3]
    )
    known = np.concatenate([frames[i].arrays["force"].ravel() for i in (0, 2, 3, 4)])
    np.testing.assert_array_equal(forces.y, known[np.isfinite(known)])
    expected = np.concatenate([atoms.info["virtual"] for atoms in frames[:2]])
    np.testing.assert_allclose(stress.y * stress.factor, expected)
    np.testing.assert_array_equal(np.diff(data.derivatives.offsets), [18, 6, 12, 11, 12])


@pytest.mark.parametrize(
    "value", [np.zeros((4, 2)), np.zeros(4), np.full((4, 3), np.inf), np.full((4, 3), "x")]
)
def test_invalid_forces(alloys, value):
    frames = copies(alloys[:3])
    del frames[1].arrays["force"]
    frames[1].arrays["force"] = value
    with rejects("frames[1].arrays['force']"):
        find_forces(frames, "force")


def test_stresses_are_symmetric_and_need_a_volume(alloys):
    frames = copies(alloys[:3])
    for atoms in frames[:2]:
        xx, yy, zz, yz, xz, xy = atoms.info["virtual"]
        atoms.info["virtual"] = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    frames[1].info["virtual"] = frames[1].info["virtual"].ravel()
    frames[2].cell[2] = 0.0
    frames[2].pbc = [True, True, False]
    with pytest.warns(QualmsWarning):
        found = find_stresses(frames, "virtual")
    assert list(found) == [0, 1]
    for i in found:
        np.testing.assert_allclose(found[i], alloys[i].info["virtual"])
    for invalid in (np.arange(9.0).reshape(3, 3), np.arange(5.0)):
        frames[0].info["virtual"] = invalid
        with rejects("frames[0].info['virtual']"):
            find_stresses(frames, "virtual")


def test_missing_forces_and_stresses(alloys):
    with rejects("forces"):
        find_forces(alloys, "forced")
    for key in ("virtaul", "virial"):
        with rejects("stress"):
            find_stresses(alloys, key)
    assert find_forces(alloys, "forced", required=False) == {}
    frames = copies(alloys[:6])
    for atoms in frames:
        atoms.arrays["force"][:] = np.nan
    with rejects("forces"):
        make_force_model().fit(frames)


def test_forces_without_an_energy_and_zeros_cause_a_warning(alloys):
    settings = make_settings({"target": "energy", "forces": "force"})
    frames = copies(alloys[:6])
    del frames[2].info["energy"]
    with pytest.warns(QualmsWarning):
        data = take_census(frames, settings).data
    assert len(data.quantities["forces"].y) == 5 * 12
    for atoms in frames:
        atoms.info["energy"] = 1.0
        atoms.arrays["force"][:] = 0.0
    with pytest.warns(QualmsWarning):
        take_census(frames, settings)


# --- checks ---


@pytest.mark.parametrize("factor", [1.0, 0.02, -3.0])
def test_the_factor_is_between_the_two_regressions(factor):
    rng = np.random.default_rng(1)
    reference, noise = rng.normal(size=4000), 0.5 * rng.normal(size=4000)
    noisy = factor_between(factor * reference, reference + noise)
    shrunk = factor_between(factor * (reference + noise), reference)
    # The variance of the noise is a quarter of that of the reference values.
    for found, other in ((noisy, 0.8), (shrunk, 1.25)):
        expected = sorted((factor, other * factor))
        assert sorted((found.a, found.b)) == pytest.approx(expected, rel=0.06)
        assert found.is_one == (factor == 1.0)


def test_no_structure_dominates_the_factor():
    rng = np.random.default_rng(3)
    structure = np.repeat(np.arange(20), 12)
    labels = rng.normal(size=240)
    predicted = labels + 0.3 * rng.normal(size=240)
    labels[structure == 4] *= 100
    predicted[structure == 4] = -0.3 * labels[structure == 4]
    assert factor_between(labels, predicted).r < 0
    found = factor_between(*equalized(labels, predicted, structure))
    assert found.is_one
    other = factor_between(*equalized(23.06 * labels, predicted, structure))
    assert (other.a, other.b) == pytest.approx((23.06 * found.a, 23.06 * found.b))


def test_outliers_are_found_worst_first():
    n, per = 40, 6
    rng = np.random.default_rng(0)
    predicted, structure = rng.normal(size=n * per), np.repeat(np.arange(n), per)
    y, std = predicted + 0.1 * rng.normal(size=n * per), np.full(n * per, 0.1)
    alone = np.arange(n)  # no duplicates
    assert not len(find_outliers(y, y - predicted, std, structure, alone))
    y[structure == 7] *= 200
    y[20 * 6] += 5000.0  # a single component
    assert find_outliers(y, y - predicted, std, structure, alone).tolist() == [20, 7]
    assert find_outliers(y, y - predicted, 1e3 * std, structure, alone).tolist() == [20, 7]


def test_forces_that_are_zero_by_symmetry_make_no_others_outliers():
    n, per = 60, 6
    rng = np.random.default_rng(0)
    predicted, structure = rng.normal(size=n * per), np.repeat(np.arange(n), per)
    size = np.where(structure < 40, 1e-15, 1.0)  # rounding, in most structures
    y, std = size * (predicted + 0.1 * rng.normal(size=n * per)), 0.1 * size
    assert not len(find_outliers(y, y - size * predicted, std, structure, np.arange(n)))
    y[[7 * per, 50 * per]] = 500.0
    found = find_outliers(y, y - size * predicted, std, structure, np.arange(n))
    assert sorted(found) == [7, 50]


def test_duplicates_of_one_structure_are_no_scale_of_errors(molecules):
    frames = copies([*molecules[:30], *[molecules[0]] * 30])
    with pytest.warns(QualmsWarning, match="duplicates") as caught:
        make_model().fit(frames)
    assert not any("label errors" in str(w.message) for w in caught)


@pytest.mark.filterwarnings("ignore:.*left out of the calibration")
def test_a_wrong_energy_that_most_members_have_seen_is_named(molecules):
    settings = {"n_members": 8, "n_representatives": 20, "seed": 2}
    counts = membership(molecules[:80], make_model(**settings))
    seen = int(np.argmax(counts.sum(axis=1)))
    frames = copies(molecules[:80])
    frames[seen].info[ENERGY] = 1e6
    with pytest.warns(QualmsWarning, match=rf"label errors in 1 structure.*frames\[{seen}\]"):
        make_model(**settings).fit(frames)


@pytest.mark.parametrize("wrong", [{3: 1e6}, {3: 1e30}, dict.fromkeys(range(0, 40, 10), "meV")])
@pytest.mark.parametrize("uncertainty", ["both", "posterior"])
@pytest.mark.filterwarnings("ignore:.*left out of the calibration")
def test_wrong_energies_are_named(molecules, wrong, uncertainty):
    frames = copies(molecules[:40])
    for i, value in wrong.items():
        frames[i].info[ENERGY] = 1e3 * frames[i].info[ENERGY] if value == "meV" else value
    with pytest.warns(QualmsWarning, match="label errors") as caught:
        make_model(uncertainty=uncertainty).fit(frames)
    text = next(str(w.message) for w in caught if "label errors" in str(w.message))
    assert {int(i) for i in re.findall(r"frames\[(\d+)\]", text)} == {*wrong}


# --- charges and spins ---


def with_state(formula, *, pbc=False, **state):
    atoms = Atoms(formula, np.eye(3)[: len(Atoms(formula))], pbc=pbc, cell=[9, 9, 9])
    for key, value in state.items():
        store = atoms.arrays if np.ndim(value) else atoms.info
        store[key] = value
    return atoms


@pytest.mark.parametrize(
    "frames",
    [
        [with_state("OH2"), with_state("OH2", charge=0), with_state("OH2", charge=0.0, uhf=0)],
        [with_state("OH2", **{key: 1e-9}) for key in ("charge", "Charge", "total charge", "spin")],
        [with_state("OH2"), *(with_state("OH2", **{key: 1}) for key in ("mult", "Multiplicity"))],
        [with_state("OH2", multiplicity=1), with_state("OH", multiplicity=2)],
        [with_state("OH2", spin=0), with_state("OH", spin=1), with_state("OH", spin=0.5)],
        [with_state("OH2", spin=1, charge=1), with_state("OH2", spin=1, charge="1")],
        [with_state("OH2", initial_charges=np.array([-0.8, 0.4, 0.41])), with_state("OH2")],
        [with_state("OH2", initial_magmoms=np.array([0, 1.0, 2]), pbc=True), with_state("OH2")],
    ],
)
def test_states_that_are_the_same(frames):
    assert len({state_of(atoms) for atoms in frames}) == 1


@pytest.mark.parametrize(
    "state",
    [
        {"charge": 1},
        {"total_charge": -1.0},
        {"spin": 2},
        {"multiplicity": 3},
        {"uhf": 2},
        {"charge": "cation"},
        {"Charge": 2},
        {"total charge": 2},
        {"mult": 3},
        {"Multiplicity": 3},
        {"initial_magmoms": np.array([2.0, 0, 0])},
        {"initial_charges": np.array([1.0, 0, 0])},
    ],
)
def test_states_that_differ(state):
    assert state_of(with_state("OH2", **state)) != state_of(with_state("OH2"))
    assert state_of(with_state("OH2", **state), [*state]) == () or "initial" in next(iter(state))


@pytest.mark.parametrize("in_shards", [False, True])
def test_mixed_charges_are_rejected_unless_they_are_allowed(molecules, in_shards, tmp_path):
    frames = copies(molecules[:40])
    for atoms in frames[30:]:
        atoms.info["charge"] = 1
    write(tmp_path / "mixed.xyz", frames)
    given = FrameFiles.open([tmp_path / "mixed.xyz"]) if in_shards else frames
    with rejects("mixed_states"):
        make_model().fit(given)
    model = make_model(mixed_states=True, calibration="student").fit(given)
    assert model.record.state is None
    model.predict(frames[28:32])  # warnings are errors


@pytest.mark.parametrize("in_shards", [False, True])
def test_another_charge_than_in_training_is_an_extrapolation(molecules, in_shards, tmp_path):
    frames = copies(molecules[:50])
    for atoms in frames:
        atoms.info["charge"] = -1
    write(tmp_path / "anions.xyz", frames[:40])
    given = FrameFiles.open([tmp_path / "anions.xyz"]) if in_shards else frames[:40]
    model = make_model(calibration="student").fit(given)
    assert model.record.state == {"charge": -1.0}
    expected = model.predict(frames[:10]).extrapolates
    frames[7].info["charge"] = 0
    with pytest.warns(QualmsWarning, match="charge"):
        found = model.predict(frames[:10]).extrapolates
    assert found.tolist() == [*expected[:7], True, *expected[8:]]


def test_masked_labels_are_missing(molecules):
    frames = copies(molecules[:3])
    frames[0].info[ENERGY] = np.ma.masked
    frames[1].info[ENERGY] = np.ma.array(2, mask=False)
    values = np.concatenate(find_targets(frames, ENERGY))
    np.testing.assert_array_equal(np.isnan(values), [True, False, False])
    frames[2].arrays["shift"] = np.ma.masked_less(np.arange(len(frames[2])), 2)
    values = find_targets(frames[2:], "shift", per_atom=True)[0]
    assert np.isnan(values).tolist() == [True] * 2 + [False] * (len(frames[2]) - 2)


def test_equal_energies_of_unequal_molecules_cause_a_warning(molecules):
    frames = copies(molecules[:12])
    for atoms in frames:
        atoms.info[ENERGY] = -3.0
    with pytest.warns(QualmsWarning):
        take_census(frames, make_model().settings)


@pytest.mark.parametrize("factors", [(-1.0, 1.0), (23.06, 1.0), (1.0, -1.0), (1.0, 160.2)])
def test_wrong_signs_and_units_cause_a_warning(alloys, factors):
    frames = copies(alloys[:24])
    for atoms in frames:
        atoms.arrays["force"] *= factors[0]
        atoms.info["virtual"] = atoms.info["virtual"] * factors[1]
    with pytest.warns(QualmsWarning):
        make_force_model(stress="virtual").fit(frames)


@pytest.mark.parametrize("factor", [1.0, -1.0, 23.06, 0.0194])
def test_few_structures_tell_signs_and_units_of_forces(factor):
    frames = labelled_dimers(12)
    for atoms in frames:
        atoms.arrays["forces"] *= factor
    model = make_model("energy", forces="forces", representation=SMOOTH, calibration="student")
    caught = nullcontext()
    if factor != 1.0:
        what = "opposite sign" if factor < 0 else "times the size"
        caught = pytest.warns(QualmsWarning, match=what)
    with caught, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training set has too few compositions")
        model.fit(frames)


def test_noise_as_large_as_the_labels_causes_a_warning(alloys):
    frames = copies(alloys[:24])
    rng = np.random.default_rng(0)
    for atoms in frames:
        atoms.arrays["force"] = rng.normal(size=(len(atoms), 3))
    with pytest.warns(QualmsWarning, match="noise"):
        make_force_model().fit(frames)


def test_no_warning_where_energies_are_not_informative(alloys):
    frames = copies(alloys[:24])
    for atoms, energy in zip(frames, np.random.default_rng(0).normal(size=24), strict=True):
        atoms.info["energy"] = energy
    make_force_model().fit(frames)  # warnings are errors


def test_labels_of_copies_that_differ_are_named(molecules):
    frames = [*molecules[:30], *copies(molecules[:30])]
    frames[33].info[ENERGY] += 50.0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_model().fit(frames)
    named = [str(w.message) for w in found if "are the same" in str(w.message)]
    assert len(named) == 1
    assert named[0].startswith("Structures 3 and 33")
