"""Power spectra are those of the paper, whatever computes them and however a structure is given."""

import itertools

import numpy as np
import oracle_soap
import pytest
from ase import Atoms
from ase.build import molecule
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from threadpoolctl import threadpool_limits

from qualms.errors import InputError
from qualms.features.compression import chosen_columns, fit_projection, principal_components
from qualms.features.hypers import Compression, RadialScaling, Scale, make_soap
from qualms.features.soap import (
    Representation,
    all_atoms,
    fit_representation,
    make_engine,
    resolve_compression,
)
from qualms.gp.kernels import normalize_rows

SPECIES = (1, 6, 8)
ENGINES = ("dscribe", "featomic")
seeds = st.integers(0, 2**32 - 1)
of_engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices are small here, and threads that wait for each other slow."""
    with threadpool_limits(1):
        yield


def soap(engine="dscribe", **overrides):
    """Hyper-parameters that are quick; without radial scaling, far neighbours count in full."""
    small = {"cutoff": 4.0, "n_radial": 3, "l_max": 3, "radial_scaling": None}
    if "scales" in overrides:
        small = {}
    return make_soap("organic", engine=engine, **({"compression": None} | small | overrides))


def features(representation, *frames):
    """Features of all atoms."""
    return representation.features(frames, all_atoms(frames))


def close(X, Y):
    np.testing.assert_allclose(X, Y, rtol=0, atol=2e-6)


def random_atoms(rng, n=6, side=3.5, **kwargs):
    """Atoms of all species in a box, at least 0.8 Å apart."""
    positions = rng.uniform(0, side, (1, 3))
    while len(positions) < n:
        trial = rng.uniform(0, side, 3)
        if np.linalg.norm(positions - trial, axis=1).min() > 0.8:
            positions = np.concatenate([positions, [trial]])
    numbers = np.concatenate([SPECIES, rng.choice(SPECIES, n - len(SPECIES))])
    return Atoms(numbers, positions, **kwargs)


def some_molecules(n=40):
    names = ["CH3CH2OH", "H2O", "CH4", "C2H6", "CH3OH", "C2H4", "H2CO", "CO2"]
    frames = [molecule(names[i % len(names)]) for i in range(n)]
    for i, atoms in enumerate(frames):
        atoms.rattle(0.08, seed=i)
    return frames


# --- the kernel of the paper ---

FOUR = Atoms("OHHC", [[0, 0, 0], [0.9, 0.2, 0], [-0.3, 0.9, 0.1], [0.4, -0.5, 1.1]])
THREE = Atoms("CHO", [[0, 0, 0], [0.2, 1.0, 0.1], [0.9, -0.6, 0.3]])


def oracle_matrix(width, **weights):
    environments = [
        oracle_soap.environment(atoms, i, 4.0, **weights)
        for atoms in (FOUR, THREE)
        for i in range(len(atoms) - 1)
    ]
    return oracle_soap.soap_kernel_matrix(environments, width)


def engine_matrix(engine, n_radial, l_max, **overrides):
    exact = soap(
        engine,
        gaussian_width=0.5,
        n_radial=n_radial,
        l_max=l_max,
        normalize=False,
        **overrides,
    )
    centers = [np.arange(len(atoms) - 1) for atoms in (FOUR, THREE)]
    X = Representation(exact, SPECIES).features([FOUR, THREE], centers).astype(np.float64)
    return X @ X.T


def cosines(K):
    return K / np.sqrt(np.outer(np.diag(K), np.diag(K)))


@pytest.mark.parametrize(
    ("engine", "radial_basis"), [("dscribe", "gto"), ("dscribe", "polynomial"), ("featomic", "gto")]
)
def test_power_spectra_converge_to_the_integral_over_rotations(engine, radial_basis):
    # Eqs. (13)-(16): no pair αn, α′n′ may be missing, or count more or less than another.
    K = oracle_matrix(width=0.5)
    errors = []
    for n_radial, l_max in ((2, 1), (4, 3), (8, 8)):
        found = engine_matrix(engine, n_radial, l_max, radial_basis=radial_basis)
        errors.append(np.abs(cosines(found) - cosines(K)).max())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 5e-4
    # Lengths too, up to a factor that all environments share.
    np.testing.assert_allclose(found / np.trace(found), K / np.trace(K), rtol=1e-3)


@of_engines
def test_weights_of_neighbours_and_of_the_centre(engine):
    scaling = RadialScaling(scale=1.2, exponent=3.0, rate=0.7)
    K = oracle_matrix(
        width=0.5,
        weight_of=lambda r: oracle_soap.radial_scaling(r, 1.2, 3.0, 0.7),
        center_weight=1.7,
    )
    found = engine_matrix(engine, 8, 8, radial_scaling=scaling, center_weight=1.7)
    np.testing.assert_allclose(found / np.trace(found), K / np.trace(K), rtol=1e-3)
    unscaled = engine_matrix(engine, 8, 8)
    assert np.abs(unscaled / np.trace(unscaled) / (K / np.trace(K)) - 1).max() > 0.1


def test_smoothing_weights_neighbours_by_half_a_cosine():
    K = oracle_matrix(width=0.5, weight_of=lambda r: oracle_soap.shifted_cosine(r, 4.0, 3.2))
    found = engine_matrix("featomic", 8, 8, smoothing=3.2)
    np.testing.assert_allclose(found / np.trace(found), K / np.trace(K), rtol=1e-3)


def test_with_smoothing_a_neighbour_appears_gently():
    alone, inside = Atoms("O"), Atoms("OH", [[0, 0, 0], [0, 0, 3.99]])
    change = {}
    for smoothing in (None, 0.5):
        representation = Representation(soap("featomic", smoothing=smoothing), SPECIES)
        x, y = features(representation, alone)[0], features(representation, inside)[0]
        change[smoothing] = np.linalg.norm(x - y)
    assert change[0.5] < 0.01 < 0.1 < change[None]


# --- invariance ---


@of_engines
@settings(max_examples=20)
@given(seed=seeds)
def test_moving_rotating_reflecting_and_reordering_change_nothing(engine, seed):
    rng = np.random.default_rng(seed)
    representation = Representation(soap(engine), SPECIES)
    atoms = random_atoms(rng)
    expected = features(representation, atoms)
    turned = atoms.positions @ Rotation.random(rng=rng).as_matrix()
    order = rng.permutation(len(atoms))
    for positions in (atoms.positions + rng.uniform(-50, 50, 3), turned, -atoms.positions):
        close(features(representation, Atoms(atoms.numbers, positions)), expected)
    close(features(representation, atoms[order]), expected[order])
    moved = atoms.copy()
    moved.positions[0] += 0.1
    assert np.abs(features(representation, moved) - expected).max() > 1e-3


@of_engines
def test_an_atom_without_neighbours(engine):
    representation = Representation(soap(engine), SPECIES)
    pair = features(representation, Atoms("OH", [[0, 0, 0], [0, 0, 20]]))
    alone = features(representation, Atoms("O"), Atoms("H"))
    np.testing.assert_array_equal(pair, alone)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, rtol=1e-6)
    assert alone[0] @ alone[1] == 0
    nothing = Representation(soap(engine, center_weight=0.0), SPECIES)
    np.testing.assert_array_equal(features(nothing, Atoms("O")), 0)


@of_engines
@pytest.mark.parametrize("cell", [[30, 30, 30], [1, 1, 1], [[0, 0, 0], [1, 1, 0], [1, 1, 0]]])
def test_a_cell_that_is_not_periodic_is_ignored(engine, cell):
    representation = Representation(soap(engine), SPECIES)
    atoms = random_atoms(np.random.default_rng(1))
    boxed = Atoms(atoms.numbers, atoms.positions, cell=cell)
    np.testing.assert_array_equal(features(representation, boxed), features(representation, atoms))


CELL = np.array([[3.4, 0.3, -0.2], [0.9, 3.7, 0.4], [-0.6, 0.5, 4.1]])


def crystal(pbc=True):
    return random_atoms(np.random.default_rng(2), n=4, side=2.6, cell=CELL, pbc=pbc)


@of_engines
@pytest.mark.parametrize("pbc", [p for p in itertools.product([0, 1], repeat=3) if any(p)])
def test_periodic_environments_are_those_of_a_molecule_of_all_images(engine, pbc):
    representation = Representation(soap(engine, cutoff=3.0), SPECIES)
    atoms = crystal(pbc)
    # Beyond the cutoff dscribe sees the tails of Gaussians.
    cluster = oracle_soap.with_images(atoms, reach=5.0)
    expected = representation.features([cluster], [np.arange(len(atoms))])
    close(features(representation, atoms), expected)
    assert np.abs(features(representation, crystal(False)) - expected).max() > 1e-3


@of_engines
@pytest.mark.parametrize(
    "vector", [[0, 0, 0], [0, 0, 1], [3, 1, -9], [3.4, 0.3, -0.2], [0, 0, -40]]
)
def test_the_cell_vector_of_a_direction_that_is_not_periodic_is_ignored(engine, vector):
    representation = Representation(soap(engine), SPECIES)
    slab = crystal((True, True, False))
    expected = features(representation, slab)
    slab.set_cell([*CELL[:2], vector])
    close(features(representation, slab), expected)


@of_engines
@settings(max_examples=20)
@given(seed=seeds)
def test_the_choice_of_cell_and_images_changes_nothing(engine, seed):
    rng = np.random.default_rng(seed)
    representation = Representation(soap(engine), SPECIES)
    atoms = crystal()
    expected = features(representation, atoms)
    # Another basis of the same lattice, perhaps left-handed, and other images of the atoms.
    basis = np.tril(rng.integers(-2, 3, (3, 3)), -1) + np.diag(rng.choice([-1, 1], 3))
    elsewhere = Atoms(
        atoms.numbers,
        atoms.positions + rng.integers(-3, 4, (len(atoms), 3)) @ CELL + rng.normal(size=3),
        cell=basis[rng.permutation(3)] @ CELL,
        pbc=True,
    )
    close(features(representation, elsewhere), expected)
    elsewhere.wrap()
    close(features(representation, elsewhere), expected)


@of_engines
def test_supercells_have_the_same_environments(engine):
    representation = Representation(soap(engine), SPECIES)
    atoms = crystal()
    repeated = features(representation, atoms.repeat((2, 1, 3)))
    close(repeated, np.tile(features(representation, atoms), (6, 1)))


# --- which rows, which columns ---


@of_engines
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_molecules_with_some_of_the_species_are_described_in_all(engine, size):
    everything = (1, 6, 7, 8)
    representation = Representation(soap(engine), everything)
    rng = np.random.default_rng(size)
    for present in itertools.combinations(everything, size):
        atoms = Atoms(
            rng.permutation([*present, present[0]]), rng.uniform(-1.5, 1.5, (size + 1, 3))
        )
        # With all species there, but out of sight, nothing needs to be put into place.
        whole = atoms + Atoms(everything, 100.0 + 50 * np.arange(12.0).reshape(4, 3))
        found = features(representation, atoms)
        close(found, features(representation, whole)[: size + 1])
        assert (found != 0).any()


@of_engines
def test_centers_are_rows_of_all_in_the_order_given(engine):
    representation = Representation(soap(engine), SPECIES)
    frames = some_molecules(6)
    frames.insert(2, crystal())
    rng = np.random.default_rng(3)
    centers = [rng.permutation(len(a))[: rng.integers(0, len(a))] for a in frames]
    centers[3] = centers[3][:0]
    chosen = [features(representation, a)[c] for a, c in zip(frames, centers, strict=True)]
    found = representation.features(frames, centers)
    assert found.dtype == np.float32
    close(found, np.concatenate(chosen))
    assert representation.features(frames, [c[:0] for c in centers]).shape == (0, found.shape[1])
    assert representation.features([], []).shape == (0, found.shape[1])


@of_engines
def test_features_have_unit_length_at_every_scale_unless_asked_otherwise(engine):
    scales = [Scale(cutoff=3.0, n_radial=3, l_max=2), Scale(cutoff=5.0, n_radial=4, l_max=3)]
    frames = some_molecules(8)
    both = Representation(soap(engine, scales=scales), SPECIES)
    X = features(both, *frames)
    blocks = np.split(X, [both.widths[0]], axis=1)
    for block in blocks:
        np.testing.assert_allclose(np.linalg.norm(block, axis=1), 1, rtol=1e-6)
    wanted = soap(engine, normalize=False)
    free = fit_representation(wanted, SPECIES, frames, all_atoms(frames), None)
    Y = features(free, *frames)
    assert np.mean(np.sum(Y**2, axis=1)) == pytest.approx(1, rel=1e-5)
    assert np.ptp(np.linalg.norm(Y, axis=1)) > 0.1
    unit = features(Representation(soap(engine), SPECIES), *frames)
    close(Y / np.linalg.norm(Y, axis=1, keepdims=True), unit)


def test_the_kernel_of_two_scales_is_the_weighted_sum():
    scales = (
        Scale(cutoff=3.0, n_radial=3, l_max=2, weight=1.0),
        Scale(cutoff=5.0, n_radial=4, l_max=3, weight=3.0),
    )
    frames = some_molecules(8)
    kernels = []
    for chosen in (scales, scales[:1], scales[1:]):
        one = Representation(soap(scales=chosen, exponent=3), SPECIES)
        X = features(one, *frames)
        kernels.append(one.kernel(X[:20], X[20:]))
        np.testing.assert_allclose(one.kernel.diag(X), 1, rtol=1e-5)
    np.testing.assert_allclose(kernels[0], 0.25 * kernels[1] + 0.75 * kernels[2], atol=1e-6)
    assert np.abs(kernels[1] - kernels[2]).max() > 0.01


@of_engines
def test_too_many_radial_functions_are_refused(engine, capfd):
    with pytest.raises(InputError) as caught:
        features(Representation(soap(engine, n_radial=40), SPECIES), Atoms("O"))
    assert caught.value.parameter == "n_radial"
    capfd.readouterr()  # featomic tells the terminal, too


def test_engines_that_do_not_exist_are_refused():
    with pytest.raises(InputError) as caught:
        make_engine("quip", Scale(), SPECIES)
    assert caught.value.parameter == "engine"


# --- compression ---

METHODS = ("pca", "fps", "cur")
of_methods = pytest.mark.parametrize("method", METHODS)


def compressed(method, n_features, frames=None, **overrides):
    frames = some_molecules() if frames is None else frames
    wanted = soap(compression=Compression(method=method, n_features=n_features), **overrides)
    return fit_representation(wanted, SPECIES, frames, all_atoms(frames), wanted.compression)


@of_methods
@pytest.mark.parametrize("normalize", [True, False])
def test_more_features_keep_the_kernel_better(method, normalize):
    fitted = [compressed(method, n, normalize=normalize) for n in (3, 12, 50)]
    assert [r.n_features for r in fitted] == [3, 12, 50]
    errors = [r.projections[0].kernel_error for r in fitted]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 5e-3
    # The error that was foretold is the error for other structures, too.
    others = some_molecules(80)[40:]
    unit = features(Representation(soap(), SPECIES), *others)
    for r, foretold in zip(fitted, errors, strict=True):
        Y = normalize_rows(features(r, *others))
        error = np.sqrt(np.mean((unit @ unit.T - Y @ Y.T) ** 2))
        assert 0.25 < error / foretold < 4


def test_as_many_principal_components_as_features_keep_everything():
    X = features(Representation(soap(n_radial=2, l_max=2), SPECIES), *some_molecules())
    projection = fit_projection(X, Compression(method="pca", n_features=10_000))
    assert projection.kernel_error < 1e-6
    new = features(Representation(soap(n_radial=2, l_max=2), SPECIES), *some_molecules(60)[40:])
    close((new @ projection.matrix) @ (new @ projection.matrix).T, new @ new.T)


def test_principal_components_are_the_singular_vectors():
    rng = np.random.default_rng(5)
    X = (rng.normal(size=(80, 12)) + 2.0).astype(np.float32) * np.arange(1, 13, dtype=np.float32)
    V = principal_components(X, 4)
    expected = np.linalg.svd(X.astype(np.float64))[2][:4].T
    np.testing.assert_allclose(np.abs(np.sum(V * expected, axis=0)), 1, rtol=1e-5)
    np.testing.assert_allclose(V.T @ V, np.eye(4), atol=1e-12)


@of_engines
def test_components_of_pairs_keep_to_their_pair(engine):
    frames = some_molecules()
    plain = Representation(soap(engine), SPECIES)
    X, blocks = features(plain, *frames), plain.engines[0].pair_blocks
    assert sorted(i for b in blocks for i in range(b.start, b.stop)) == [*range(X.shape[1])]
    matrix = fit_projection(X, Compression(method="pairs", n_features=60), blocks).matrix
    assert matrix.shape[1] == 60
    for column in matrix.T:
        assert sum(bool(np.any(column[block])) for block in blocks) == 1
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(60), atol=1e-6)
    sizes = np.linalg.norm(X @ matrix, axis=0)
    assert np.all(np.diff(sizes) < 1e-2 * sizes[0])
    errors = [compressed(m, 60, frames, engine=engine).projections[0].kernel_error for m in PAIRS]
    assert errors[0] < 10 * errors[1] + 1e-6


PAIRS = ("pairs", "pca")


@of_methods
def test_columns_that_are_zero_throughout_are_not_used(method):
    rng = np.random.default_rng(6)
    X = rng.normal(size=(60, 8)).astype(np.float32)
    wide = np.zeros((60, 20), dtype=np.float32)
    wide[:, 3:19:2] = X
    for n_features in (5, 12):
        compression = Compression(method=method, n_features=n_features)
        padded, plain = fit_projection(wide, compression), fit_projection(X, compression)
        np.testing.assert_array_equal(np.delete(padded.matrix, np.s_[3:19:2], axis=0), 0)
        assert padded.kernel_error == pytest.approx(plain.kernel_error, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", ["fps", "cur"])
def test_chosen_columns_stand_for_those_left_out(method):
    rng = np.random.default_rng(7)
    # Twenty columns that are combinations of five.
    X = (rng.normal(size=(100, 5)) @ rng.normal(size=(5, 20))).astype(np.float32)
    matrix = chosen_columns(X, 5, method)
    assert np.count_nonzero(np.any(matrix != 0, axis=1)) == 5
    reduced = X @ matrix
    np.testing.assert_allclose(reduced @ reduced.T, X @ X.T, atol=2e-3 * np.abs(X @ X.T).max())


@of_methods
def test_the_kernel_error_is_that_of_rows_not_learned_from(method):
    X = features(Representation(soap(), SPECIES), *some_molecules())
    compression = Compression(method=method, n_features=10)
    projection = fit_projection(X, compression)
    first = X[::10]
    reduced = first @ projection.matrix
    reduced /= np.linalg.norm(reduced, axis=1, keepdims=True)
    error = np.sqrt(np.mean((first @ first.T - reduced @ reduced.T) ** 2))
    assert projection.kernel_error == pytest.approx(error, rel=1e-3)
    # Rows unlike all others would have changed the map had it seen them.
    other = X.copy()
    other[::10] = np.roll(first, 17, axis=1)
    changed = fit_projection(other, compression)
    np.testing.assert_array_equal(changed.matrix, projection.matrix)
    assert changed.kernel_error > 2 * projection.kernel_error


@of_engines
@of_methods
def test_compressed_features_are_the_map_of_all_features(engine, method):
    frames = some_molecules()
    fitted = compressed(method, 20, frames, engine=engine)
    plain = Representation(soap(engine), SPECIES)
    expected = features(plain, *frames) @ fitted.projections[0].matrix
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(features(fitted, *frames), expected, atol=5e-6)


def test_what_is_small_already_is_left_as_it_is():
    fitted = compressed("pca", 10_000)
    assert fitted == Representation(fitted.soap, SPECIES)
    scales = (Scale(cutoff=3.0, n_radial=1, l_max=1), Scale(cutoff=4.0, n_radial=4, l_max=3))
    assert compressed("pca", 50, scales=scales).widths == (12, 50)


def test_automatic_compression_is_for_many_environments_with_many_features():
    small, large = make_soap("organic", n_radial=2, l_max=2), make_soap("nmr")
    assert resolve_compression(small, SPECIES, 10**7, 5000) is None
    assert resolve_compression(large, SPECIES, 1000, 500) is None
    assert resolve_compression(large, SPECIES, 10**7, 5000) == Compression()
    by_pairs = Compression(method="pairs", n_features=192)
    assert resolve_compression(large, SPECIES, 1000, 500, derivatives=True) == by_pairs
    assert resolve_compression(small, SPECIES, 1000, 500, derivatives=True) is None
    five = resolve_compression(large, (1, 6, 7, 8, 9), 1000, 500, derivatives=True)
    assert five == Compression(method="pairs", n_features=480)
    for wanted in (None, Compression(method="cur", n_features=7)):
        asked = make_soap("nmr", compression=wanted)
        assert resolve_compression(asked, SPECIES, 10**7, 5000) == wanted
