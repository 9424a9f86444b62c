"""Parts of large structures: cut out, they have the same environments and derivatives."""

import numpy as np
import pytest
from ase.build import bulk
from ase.neighborlist import neighbor_list
from atomistic_fixtures import make_model
from hypothesis import given
from hypothesis import strategies as st
from test_forces_training import SMOOTH, alloys
from threadpoolctl import threadpool_limits

from qualms.atomistic.forces import derivatives
from qualms.atomistic.kernel_rows import derivative_rows, scale_rows
from qualms.atomistic.model import exact_energies
from qualms.features import gradients as surroundings
from qualms.features.gradients import Surroundings, batches

CUTOFF = SMOOTH["cutoff"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with threadpool_limits(1):
        yield


def crystal(pbc=True, *, repeat=(3, 3, 3), oblique=0.0, seed=0):
    """Copper with some aluminium: atoms in no order, some of them outside the cell."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True).repeat(repeat)
    cell = atoms.cell.array.copy()
    cell[1] += oblique * cell[0]
    cell[2] -= oblique * cell[1]
    atoms.set_cell(cell, scale_atoms=True)
    atoms.symbols[::3] = "Al"
    atoms.positions += 0.1 * rng.normal(size=(len(atoms), 3))
    for axis in np.flatnonzero(atoms.pbc & np.broadcast_to(pbc, 3)):
        atoms.positions += rng.integers(-1, 2, size=(len(atoms), 1)) * cell[axis]
    atoms.pbc = pbc
    return atoms[rng.permutation(len(atoms))]


STRUCTURES = {
    "a crystal": crystal(),
    "an oblique crystal": crystal(oblique=0.3),
    "a slab": crystal((True, True, False)),
    "an oblique slab": crystal((True, False, True), oblique=0.2),
    "a wire": crystal((False, True, False)),
    "a cluster": crystal(pbc=False),
    "a narrow crystal": crystal(repeat=(1, 5, 3)),
}


@pytest.fixture(scope="module")
def trained():
    return make_model(
        "energy", representation=SMOOTH, n_representatives=20, n_members=4, forces="force"
    ).fit(alloys()[:12])


@pytest.mark.parametrize("name", STRUCTURES)
def test_parts_have_the_derivatives_of_the_whole(name, trained, monkeypatch):
    frames = [alloys()[0], STRUCTURES[name]]
    monkeypatch.setattr(surroundings, "LARGE", 50)
    found = derivatives(trained.potential, frames, strain=True)
    energies = exact_energies(trained, frames).members
    monkeypatch.setattr(surroundings, "LARGE", 10**9)
    expected = derivatives(trained.potential, frames, strain=True)
    for a, b in (
        (found.energies, expected.energies),
        (found.forces, expected.forces),
        (found.virials, expected.virials),
        (energies, exact_energies(trained, frames).members),
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


def test_rows_of_forces_are_those_of_the_whole(trained, monkeypatch):
    atoms, fitted = STRUCTURES["an oblique crystal"], trained.fitted
    scales = scale_rows(fitted.representation, fitted.representatives)

    def rows():
        found = [derivative_rows(scales, batch, strain=True) for batch in batches([atoms])]
        return [sum(getattr(r, name) for r in found) for name in ("energies", "forces", "virials")]

    monkeypatch.setattr(surroundings, "LARGE", 50)
    found = rows()
    monkeypatch.setattr(surroundings, "LARGE", 10**9)
    for a, b in zip(found, rows(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9 * np.abs(b).max())


@given(
    seed=st.integers(0, 1000),
    pbc=st.tuples(*[st.booleans()] * 3),
    oblique=st.floats(-0.3, 0.3),
    cutoff=st.floats(1.0, 5.0),
)
def test_nothing_within_the_cutoff_is_left_out(seed, pbc, oblique, cutoff):
    atoms = crystal(pbc, repeat=(3, 4, 3), oblique=oblique, seed=seed)
    centers = np.sort(np.random.default_rng(seed).choice(len(atoms), 9, replace=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surroundings, "LARGE", 50)
        cut = Surroundings(atoms).around(centers, cutoff)
    np.testing.assert_array_equal(cut.origins[cut.centers], centers)
    np.testing.assert_array_equal(cut.atoms.numbers, atoms.numbers[cut.origins])
    i, j, d = neighbor_list("ijd", atoms, cutoff)
    k, m, e = neighbor_list("ijd", cut.atoms, cutoff)
    for own, here in zip(centers, cut.centers, strict=True):
        expected = sorted(zip(j[i == own], np.round(d[i == own], 6), strict=True))
        found = sorted(zip(cut.origins[m[k == here]], np.round(e[k == here], 6), strict=True))
        assert [pair[0] for pair in found] == [pair[0] for pair in expected]
        np.testing.assert_allclose(
            [pair[1] for pair in found], [pair[1] for pair in expected], atol=2e-6
        )


@pytest.mark.parametrize("repeat", [(2, 2, 2), (6, 6, 6), (3, 3, 20)])
def test_parts_are_all_atoms_once_and_few_at_a_time(repeat):
    atoms = crystal(repeat=repeat)
    parts = list(Surroundings(atoms).parts(64))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(atoms)))
    assert max(map(len, parts)) <= 64
    assert len(parts) <= 1.2 * len(atoms) / 64 + 1


def test_what_is_cut_out_does_not_grow_with_the_structure():
    sizes = []
    for n in (6, 10):
        around = Surroundings(crystal(repeat=(n, n, n)))
        part = next(around.parts(64))
        sizes.append(len(around.around(part, CUTOFF).atoms))
    assert sizes[1] < 500
    assert sizes[1] < 1.2 * sizes[0]


def test_a_narrow_cell_stays_whole():
    atoms = STRUCTURES["a narrow crystal"].repeat((1, 2, 3))
    assert len(atoms) >= surroundings.LARGE
    cut = Surroundings(atoms).around(np.arange(5), CUTOFF)
    assert cut.atoms is atoms
