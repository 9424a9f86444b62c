"""The compiled core: densities, their derivatives and neighbours against featomic and ASE."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.neighborlist import neighbor_list
from atomistic_fixtures import SMOOTH as METAL
from atomistic_fixtures import labelled_alloys, make_force_model
from featomic import SoapPowerSpectrum
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.atomistic.forces import derivatives
from qualms.features import pair_core
from qualms.features.densities import (
    NeighbourMemory,
    Part,
    environments_of,
    expansion_options,
    find_neighbours,
)
from qualms.features.soap import RadialScaling, Scale, in_cell, make_engine
from qualms.features.soap_derivatives import ScaleFeatures

#: Scales that take different branches.
SCALES = {
    "smooth": Scale(cutoff=4.0, smoothing=0.5, n_radial=3, l_max=3),
    "sharp": Scale(cutoff=3.7, n_radial=2, l_max=2),
    "not scaled": Scale(cutoff=4.5, smoothing=1.0, n_radial=4, l_max=1, radial_scaling=None),
    "one function": Scale(cutoff=3.0, smoothing=0.3, n_radial=1, l_max=0),
    "many neighbours": Scale(
        cutoff=7.0, smoothing=0.5, n_radial=3, l_max=5, center_weight=0.3,
        radial_scaling=RadialScaling(scale=3.0, exponent=2.5, rate=0.7),
    ),
}  # fmt: skip


def rattled(atoms, seed=0):
    atoms.rattle(0.1, seed=seed)
    return atoms


def slab():
    atoms = fcc111("Al", (2, 1, 2), vacuum=None)
    atoms.symbols[0] = "Cu"
    atoms.positions += [20.0, -7.0, 3.0]  # outside the cell
    return atoms


WIRE = Atoms(
    "HOH", [[0, 0, 0], [0.9, 0.3, 0], [1.9, -0.2, 0.4]], cell=[[2.6, 0.2, 0], [0] * 3, [0] * 3]
)
WIRE.pbc = [True, False, False]
STRUCTURES = {
    "molecule": rattled(molecule("CH3CH2OH")),
    "primitive cell": rattled(bulk("NaCl", "rocksalt", a=5.6)),
    "slab": rattled(slab()),
    "wire": WIRE,
    "isolated atom": Atoms("O"),
    "two far apart": Atoms("OH", [[0, 0, 0], [12.0, 0, 0]]),
    "triclinic": rattled(bulk("Cu") * (2, 1, 1)),
}


def by_featomic(scale, atoms):
    """Power spectra of all atoms, their gradients (n, n_atoms, 3, D), and those by strain."""
    species = tuple(np.unique(atoms.numbers).tolist())
    engine, n = make_engine("featomic", scale, species), len(atoms)
    y, changes = np.zeros((n, engine.n_features)), np.zeros((n, n, 3, engine.n_features))
    strain = np.zeros((n, 3, 3, engine.n_features))
    calculator = SoapPowerSpectrum(**expansion_options(scale))
    computed = calculator.compute(
        in_cell(atoms, scale), gradients=["positions", "strain"], use_native_system=True
    )
    for key, block in computed.items():
        columns = engine.pair_columns[int(key["neighbor_1_type"]), int(key["neighbor_2_type"])]
        centers = np.asarray(block.samples.values)[:, 1]
        y[centers[:, None], columns] = block.values
        by_positions = block.gradient("positions")
        sample, _, moved = np.asarray(by_positions.samples.values).T
        for s, j, values in zip(sample, moved, by_positions.values, strict=True):
            changes[centers[s], j][:, columns] = values
        by_strain = block.gradient("strain")
        for (s,), values in zip(by_strain.samples.values, by_strain.values, strict=True):
            strain[centers[s]][:, :, columns] = values
    return y, changes, strain


def by_core(scale, atoms):
    """The same from the core, forward."""
    species = tuple(np.unique(atoms.numbers).tolist())
    features = ScaleFeatures(make_engine("featomic", scale, species), None, 1.0)
    (tape,), n = features.tapes([atoms], ["positions", "strain"]), len(atoms)
    changes = np.zeros((n, n, 3, tape.y.shape[1]))
    for owners, moved, columns, values, _ in tape.push_forward():
        for i, j, value in zip(owners, moved, values, strict=True):
            changes[i, j][:, columns] += value
            changes[i, i][:, columns] -= value
    return tape, tape.y, changes, tape.push_strain()


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("scale", SCALES)
def test_features_and_their_derivatives_are_those_of_featomic(scale, name):
    scale, atoms = SCALES[scale], STRUCTURES[name]
    y, changes, strain = by_featomic(scale, atoms)
    _, own_y, own_changes, own_strain = by_core(scale, atoms)
    np.testing.assert_allclose(own_y, y, atol=1e-10 * np.abs(y).max())
    largest = 1e-8 * max(np.abs(changes).max(), 1e-3)
    np.testing.assert_allclose(own_changes, changes, atol=largest)
    if atoms.pbc.all():
        voigt = strain[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        np.testing.assert_allclose(own_strain, voigt, atol=1e-8 * np.abs(voigt).max())


@pytest.mark.parametrize("n_energies", [1, 5])
@pytest.mark.parametrize("name", STRUCTURES)
def test_backward_is_forward_with_the_slopes(name, n_energies):
    atoms = STRUCTURES[name]
    tape, y, changes, strain = by_core(SCALES["many neighbours"], atoms)
    slopes = np.random.default_rng(0).normal(size=(len(atoms), n_energies, y.shape[1]))
    by_positions, by_strain = tape.pull_back(slopes, np.arange(y.shape[1]))
    expected = np.einsum("ijxd,ird->jxr", changes, slopes)
    np.testing.assert_allclose(by_positions, expected, atol=1e-10 * (np.abs(expected).max() + 1))
    expected = np.einsum("ivd,ird->vr", strain, slopes)
    np.testing.assert_allclose(by_strain[0], expected, atol=1e-10 * (np.abs(expected).max() + 1))


# --- neighbours ---


def pairs_of(i, j, vectors):
    return sorted(zip(i.tolist(), j.tolist(), *np.round(vectors.T, 6) + 0.0, strict=True))


def all_neighbours(atoms, cutoff, find, centers=None):
    """Pairs of centres as the core has them."""
    scale = Scale(cutoff=cutoff, smoothing=0.3, n_radial=1, l_max=0)
    engine = make_engine("featomic", scale, tuple(np.unique(atoms.numbers).tolist()))
    some = np.arange(len(atoms)) if centers is None else centers
    found = environments_of(engine.radial, [Part(atoms, find(atoms, cutoff), some)])
    sizes = np.diff(found.start).reshape(-1, len(found.elements)).sum(axis=1)
    i = np.repeat(found.atoms[found.centers], sizes)
    return pairs_of(i, found.atoms[found.neighbours], found.vectors.T)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    pbc=st.tuples(*[st.booleans()] * 3),
    oblique=st.floats(-0.3, 0.3),
)
def test_neighbours_are_those_of_ase(seed, pbc, oblique):
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(1.5, 7.0, 3))
    cell[1, 0] = oblique * cell[0, 0]
    atoms = Atoms("HOCHON", rng.uniform(-8, 8, (6, 3)), cell=cell, pbc=pbc)
    expected = pairs_of(*neighbor_list("ijD", atoms, 4.0))
    assert all_neighbours(atoms, 4.0, find_neighbours) == expected
    some = [pair for pair in expected if pair[0] in (1, 4)]
    assert all_neighbours(atoms, 4.0, find_neighbours, np.array([1, 4])) == some


def test_neighbours_are_found_again_when_atoms_have_moved(monkeypatch):
    atoms, memory, rng = bulk("Cu", cubic=True) * 2, NeighbourMemory(0.5), np.random.default_rng(0)
    searches = []

    def find(*arguments):
        searches.append(1)
        return find_neighbours(*arguments)

    monkeypatch.setattr("qualms.features.densities.find_neighbours", find)
    for step in range(30):
        atoms.positions += 0.02 * rng.normal(size=atoms.positions.shape)
        if step == 10:
            atoms.set_cell(atoms.cell.array * 1.02, scale_atoms=False)
        if step == 20:
            atoms.wrap()
        assert all_neighbours(atoms, 4.0, memory) == pairs_of(*neighbor_list("ijD", atoms, 4.0))
    assert 3 <= len(searches) < 15


# --- what results do not depend on ---

alloys = cache(labelled_alloys)


@cache
def trained():
    given = {"units": "eV", "representation": METAL, "calibration": "student"}
    return make_force_model(n_representatives=40, **given).fit(alloys()[:20])


def crystal(n=5, seed=0):
    atoms = bulk("Cu", cubic=True) * (n, 3, 3)
    atoms.symbols[::3] = "Al"
    return rattled(atoms, seed)


def test_forces_do_not_depend_on_threads():
    potential, frames = trained().potential, [*alloys()[20:24], crystal()]
    one, two, three = (derivatives(potential, frames, strain=True, threads=n) for n in (1, 2, 3))
    for other in (two, three):
        np.testing.assert_array_equal(other.energies, one.energies)
        np.testing.assert_array_equal(other.forces, one.forces)
        np.testing.assert_array_equal(other.virials, one.virials)


def test_momentum_is_conserved_and_translations_do_not_matter():
    atoms, moved = crystal(), crystal()
    moved.positions += [3.1, -40.0, 7.7]
    moved.wrap()
    found, other = (
        derivatives(trained().potential, [atoms]),
        derivatives(trained().potential, [moved]),
    )
    largest = np.abs(found.forces).max()
    np.testing.assert_allclose(found.forces.sum(axis=0), 0, atol=1e-10 * largest)
    np.testing.assert_allclose(other.forces, found.forces, atol=1e-9 * largest)


def test_derivatives_of_the_mean_are_the_means_of_derivatives():
    potential, atoms = trained().potential, crystal(3)
    every = derivatives(potential, [atoms], strain=True, atoms=True)
    means = [term.mean for term in potential]
    found = derivatives(potential, [atoms], strain=True, atoms=True, of=means)
    for name in ("forces", "virials"):
        expected = getattr(every, name).mean(axis=-1)
        np.testing.assert_allclose(getattr(found, name)[..., 0], expected, atol=1e-8)
    np.testing.assert_allclose(found.energies, every.energies, rtol=1e-9)
    np.testing.assert_allclose(found.atoms, every.atoms, atol=1e-9 * np.abs(every.atoms).max())


# --- compilation ---


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch):
    njit = pair_core.numba.njit

    def without_cache(function, **options):
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **options)

    monkeypatch.setattr(pair_core.numba, "njit", without_cache)
    assert pair_core._compiled(lambda x: x + 1)(1) == 2


def test_the_compiler_is_imported_where_it_is_needed():
    code = "import sys, qualms.ase, qualms.atomistic.training, qualms.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"numba", "vesin", "featomic"} & {*done.stdout.split()}
