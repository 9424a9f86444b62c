"""SOAP features: the kernel of the paper, invariances, compression, streams and selection."""

import itertools
import math
import sys

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from checks import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from threadpoolctl import threadpool_limits

from qualms.arrays import whole_blocks
from qualms.atomistic.kernel_rows import Basis, structure_novelty
from qualms.features.base import Problem, Representation, stream_features
from qualms.features.compression import fit_projection, mixing_weights, principal_components
from qualms.features.soap import (
    PRESETS,
    Compression,
    RadialScaling,
    Scale,
    Soap,
    SoapRepresentation,
    choose_preset,
    make_engine,
    make_soap,
)
from qualms.gp.kernels import PowerKernel, normalize_rows

SPECIES = (1, 6, 8)
NAMES = ["CH3CH2OH", "H2O", "CH4", "C2H6", "CH3OH", "C2H4", "H2CO", "CO2"]
seeds = st.integers(0, 2**32 - 1)
of_engines = pytest.mark.parametrize("engine", ["dscribe", "featomic", "pseudo-species"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices are multiplied faster by one thread."""
    with threadpool_limits(1):
        yield


def soap(engine="dscribe", **overrides):
    """Hyper-parameters that are fast; without radial scaling, far neighbours count in full."""
    small = {"cutoff": 4.0, "n_radial": 3, "l_max": 3, "radial_scaling": None}
    if "scales" in overrides:
        small = {}
    if engine == "pseudo-species":
        engine, small = "featomic", small | {"pseudo_species": 2}
    return make_soap("organic", engine=engine, **({"compression": None} | small | overrides))


def plain(engine="dscribe", **overrides):
    return SoapRepresentation(soap(engine, **overrides), SPECIES)


def all_atoms(frames):
    return [np.arange(len(atoms)) for atoms in frames]


def fitted(settings, frames):
    """A representation with what is fitted to all atoms of some structures."""
    return settings.fit(SPECIES, Problem(1, False), lambda: (frames, all_atoms(frames)))


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
    frames = [molecule(NAMES[i % len(NAMES)]) for i in range(n)]
    for i, atoms in enumerate(frames):
        atoms.rattle(0.08, seed=i)
    return frames


# --- hyper-parameters ---


def test_presets_and_overrides():
    for name, preset in PRESETS.items():
        assert make_soap(name) == Soap.model_validate_json(preset.model_dump_json()) == preset
    changed = make_soap("nmr", cutoff=4.5, exponent=3, compression=None)
    assert changed.scales[0] == PRESETS["nmr"].scales[0].model_copy(update={"cutoff": 4.5})
    assert make_soap(changed, cutoff=5.0, exponent=2, compression="auto") == PRESETS["nmr"]
    assert make_soap({"preset": "nmr", "cutoff": 4.5}, exponent=3, compression=None) == changed
    two = make_soap("general", scales=[{"cutoff": 3.0}, Scale(cutoff=6.0)], l_max=2)
    assert [(s.cutoff, s.l_max) for s in two.scales] == [(3.0, 2), (6.0, 2)]
    assert make_soap("organic", smoothing=0.5).resolved_engine == "featomic"
    assert make_soap("organic", pseudo_species=3).resolved_engine == "featomic"


METHANE, SALT = molecule("CH4"), bulk("NaCl", "rocksalt", a=5.6)
IN_BOX = Atoms("CH4", METHANE.positions, cell=[9, 9, 9], pbc=True)
MANY = Atoms(range(1, 10), 3.0 * np.arange(27).reshape(9, 3))


@pytest.mark.parametrize(
    ("frames", "kind", "preset"),
    [
        ([METHANE], "extensive", "organic"),
        ([METHANE], "atomic", "organic"),
        ([molecule("LiF"), METHANE], "intensive", "organic"),
        ([MANY], "extensive", "inorganic"),
        ([MANY[:8]], "extensive", "organic"),
        ([IN_BOX], "extensive", "organic"),
        ([IN_BOX], "atomic", "nmr"),
        ([IN_BOX, SALT], "extensive", "inorganic"),
        ([SALT], "extensive", "inorganic"),
        ([SALT], "atomic", "inorganic"),
        ([bulk("C")], "extensive", "inorganic"),
        ([SALT, METHANE], "extensive", "inorganic"),
        ([SALT, METHANE, METHANE], "extensive", "organic"),
    ],
)
def test_chosen_presets(frames, kind, preset):
    species = sorted({z for atoms in frames for z in atoms.numbers.tolist()})
    periodic = np.mean([atoms.pbc.any() for atoms in frames]) >= 0.5
    assert choose_preset(species, kind, periodic=periodic)[0] == preset


@pytest.mark.parametrize(
    ("representation", "parameter"),
    [
        ("bogus", "representation"),
        (5, "representation"),
        ({"preset": {}}, "representation"),
        ({"cutof": 3}, "representation"),
        ({5: 3}, "representation"),
        ({"smoothing": 0.5, "engine": "dscribe"}, "representation"),
        ({"engine": "featomic", "radial_basis": "polynomial"}, "representation"),
        ({"preset": "inorganic", "engine": "dscribe"}, "representation"),
        ({"pseudo_species": 0}, "pseudo_species"),
        ({"cutoff": float("nan")}, "cutoff"),
        ({"n_radial": 2.5}, "n_radial"),
        ({"radial_scaling": {"scale": -1}}, "scales.0.radial_scaling.scale"),
        ({"compression": {"method": "fps"}}, "compression.method"),
        ({"scales": [{}, {"cutof": 3}]}, "scales.1.cutof"),
        ({"scales": [5], "l_max": 3}, "scales.0"),
        ({"scales": 5, "l_max": 3}, "scales"),
        ({"exponent": 0.5}, "exponent"),
    ],
)
def test_wrong_hyper_parameters_are_named(representation, parameter):
    with rejects(parameter):
        make_soap(representation)


@of_engines
def test_too_many_radial_functions_are_rejected(engine, capfd):
    with rejects("n_radial"):
        features(plain(engine, n_radial=25), Atoms("O"))
    capfd.readouterr()  # featomic prints, too


@pytest.mark.parametrize("engine", ["dscribe", "featomic"])
def test_other_failures_of_an_engine_are_not_attributed_to_hyper_parameters(engine, monkeypatch):
    scale = Scale(cutoff=3.21, n_radial=2, l_max=1)
    with monkeypatch.context() as without_library:
        without_library.setitem(sys.modules, "dscribe.descriptors", None)
        without_library.setitem(sys.modules, "featomic", None)
        with pytest.raises(ImportError):
            make_engine(engine, scale, SPECIES)

    def fail(*args):
        raise MemoryError("radial functions")

    step = "in_cell" if engine == "dscribe" else "environments_of"
    monkeypatch.setattr(f"qualms.features.soap.{step}", fail)
    with pytest.raises(MemoryError):
        make_engine(engine, scale, SPECIES)


# --- the kernel of the paper ---
# Musil et al. 2019 expand the density around an atom, contract the coefficients to the power
# spectrum of Eq. (14), and multiply power spectra, Eq. (13). With a complete basis the product is
# an integral over all rotations of one environment (Bartók et al., Phys. Rev. B 87, 184115 (2013)):
#     k(A, B) = ∫dR [Σ_α ∫dr ρ_α^A(r) ρ_α^B(R⁻¹r)]²
# The oracle computes it on a grid of rotations from the overlaps of all Gaussians.

FOUR = Atoms("OHHC", [[0, 0, 0], [0.9, 0.2, 0], [-0.3, 0.9, 0.1], [0.4, -0.5, 1.1]])
THREE = Atoms("CHO", [[0, 0, 0], [0.2, 1.0, 0.1], [0.9, -0.6, 0.3]])
CENTERS = [np.arange(3), np.arange(2)]
SAME = np.eye(len(SPECIES))


def rotations(n):
    """A grid of rotations, uniform in α and γ and Gaussian in cos β, and its weights."""
    angles = 2 * math.pi * np.arange(n) / n
    cosines, w = np.polynomial.legendre.leggauss(n // 2 + 1)
    grid = list(itertools.product(angles, np.arccos(cosines), angles))
    weights = [weight / (2 * n**2) for _, weight, _ in itertools.product(angles, w, angles)]
    return Rotation.from_euler("ZYZ", grid).as_matrix(), np.array(weights)


def oracle_matrix(weight_of=lambda r: 1.0, center_weight=1.0, similarity=SAME):
    """All kernels between the environments of FOUR and THREE, not normalised.

    The similarity of elements is that of pseudo-species, or one for the same and zero for others.
    """
    width, cutoff, environments = 0.5, 4.0, []
    for atoms, centers in zip((FOUR, THREE), CENTERS, strict=True):
        for center in centers:
            r = atoms.positions - atoms.positions[center]
            d = np.linalg.norm(r, axis=1)
            assert d.max() < cutoff
            weights = [center_weight if i == center else weight_of(d[i]) for i in range(len(atoms))]
            environments.append([*zip(atoms.numbers, r, weights, strict=True)])
    matrices, grid_weights = rotations(24)
    K = np.empty((len(environments),) * 2)
    for (a, A), (b, B) in itertools.product(enumerate(environments), repeat=2):
        overlap = np.zeros(len(matrices))
        for (z_a, r_a, w_a), (z_b, r_b, w_b) in itertools.product(A, B):
            # Two Gaussians at distance d overlap by exp(−d²/4σ²).
            if same := similarity[SPECIES.index(z_a), SPECIES.index(z_b)]:
                d2 = np.sum((r_a - matrices @ r_b) ** 2, axis=1)
                overlap += same * w_a * w_b * np.exp(-d2 / (4 * width**2))
        K[a, b] = grid_weights @ overlap**2
    return K


def engine_matrix(engine, n_radial, l_max, **overrides):
    sizes = {"gaussian_width": 0.5, "n_radial": n_radial, "l_max": l_max, "normalize": False}
    X = plain(engine, **sizes, **overrides).features([FOUR, THREE], CENTERS).astype(np.float64)
    return X @ X.T


def cosines_of(K):
    return K / np.sqrt(np.outer(np.diag(K), np.diag(K)))


@pytest.mark.parametrize(
    ("engine", "radial_basis"), [("dscribe", "gto"), ("dscribe", "polynomial"), ("featomic", "gto")]
)
def test_power_spectra_converge_to_the_integral_over_rotations(engine, radial_basis):
    # Eqs. (13)-(16): no pair αn, α′n′ may be missing, or count more or less than another.
    K = oracle_matrix()
    errors = []
    for n_radial, l_max in ((2, 1), (4, 3), (8, 8)):
        spectra = engine_matrix(engine, n_radial, l_max, radial_basis=radial_basis)
        errors.append(np.abs(cosines_of(spectra) - cosines_of(K)).max())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 5e-4
    # Lengths too, up to a factor that all environments share.
    np.testing.assert_allclose(spectra / np.trace(spectra), K / np.trace(K), rtol=1e-3)


def scaled(r):
    return 0.7 / (0.7 + (r / 1.2) ** 3)


def half_a_cosine(r):
    return 1.0 if r < 0.8 else 0.5 * (1 + math.cos(math.pi * (r - 0.8) / 3.2))


SCALED = {"radial_scaling": RadialScaling(scale=1.2, exponent=3.0, rate=0.7), "center_weight": 1.7}


@pytest.mark.parametrize(
    ("engine", "weight_of", "overrides"),
    [
        ("dscribe", scaled, SCALED),
        ("featomic", scaled, SCALED),
        ("pseudo-species", scaled, SCALED),
        ("featomic", half_a_cosine, {"smoothing": 3.2}),
    ],
)
def test_weights_of_neighbours_and_of_the_centre(engine, weight_of, overrides):
    W = mixing_weights(SPECIES, 2) if engine == "pseudo-species" else SAME
    center_weight = overrides.get("center_weight", 1.0)
    K = oracle_matrix(weight_of=weight_of, center_weight=center_weight, similarity=W @ W.T)
    spectra = engine_matrix(engine, 8, 8, **overrides)
    np.testing.assert_allclose(spectra / np.trace(spectra), K / np.trace(K), rtol=1e-3)


# --- pseudo-species ---


def test_weights_of_pseudo_species():
    everything = range(1, 119)
    W = mixing_weights(everything, 6)
    assert W.shape == (118, 6)
    np.testing.assert_allclose(np.linalg.norm(W, axis=1), 1)
    # Similar elements are close to one another, and others are not.
    na, cl, fe, co = (W[z - 1] for z in (11, 17, 26, 27))
    assert fe @ co > 0.9
    assert abs(na @ cl) < 0.3
    # As many as there are elements: all can be told apart, if their properties are equal, too.
    some = (66, 67, 110, 111)
    similarity = mixing_weights(some, 8) @ mixing_weights(some, 8).T
    assert similarity.shape == (4, 4)
    assert np.linalg.eigvalsh(similarity)[0] > 0.05
    np.testing.assert_allclose(np.diag(similarity), 1)
    # The order of elements does not matter.
    some = np.array([13, 28, 29, 46, 47, 78, 79])
    order = np.random.default_rng(0).permutation(len(some))
    sorted_, permuted = (mixing_weights(z, 4) for z in (some, some[order]))
    np.testing.assert_allclose(permuted @ permuted.T, (sorted_ @ sorted_.T)[np.ix_(order, order)])


# --- invariances ---


@of_engines
@settings(max_examples=8)
@given(seed=seeds)
def test_features_are_invariant_to_motion_and_permutation(engine, seed):
    rng = np.random.default_rng(seed)
    representation, atoms = plain(engine), random_atoms(rng)
    expected = features(representation, atoms)
    turned = atoms.positions @ Rotation.random(rng=rng).as_matrix()
    order = rng.permutation(len(atoms))
    for positions in (atoms.positions + rng.uniform(-50, 50, 3), turned, -atoms.positions):
        close(features(representation, Atoms(atoms.numbers, positions)), expected)
    close(features(representation, atoms[order]), expected[order])
    moved = atoms.copy()
    moved.positions[0] += 0.1
    assert np.abs(features(representation, moved) - expected).max() > 1e-3


CELL = np.array([[3.4, 0.3, -0.2], [0.9, 3.7, 0.4], [-0.6, 0.5, 4.1]])


def crystal(pbc=True):
    return random_atoms(np.random.default_rng(2), n=4, side=2.6, cell=CELL, pbc=pbc)


def with_images(atoms, reach):
    """A molecule of the atoms and all periodic images within reach, the atoms first."""
    images = Atoms(atoms.numbers, atoms.positions)
    ranges = [range(-3, 4) if periodic else (0,) for periodic in atoms.pbc]
    for shift in itertools.product(*ranges):
        if any(shift):
            moved = atoms.positions + np.array(shift) @ atoms.cell.array
            near = np.linalg.norm(moved[:, None] - atoms.positions, axis=2).min(axis=1) < reach
            images += Atoms(atoms.numbers[near], moved[near])
    return images


@of_engines
@pytest.mark.parametrize("pbc", [(0, 0, 1), (1, 1, 0), (1, 0, 1), (1, 1, 1)])
def test_periodic_environments_are_those_of_a_molecule_of_all_images(engine, pbc):
    representation, atoms = plain(engine, cutoff=3.0), crystal(pbc)
    # Beyond the cutoff dscribe sees the tails of Gaussians.
    cluster = with_images(atoms, reach=5.0)
    expected = representation.features([cluster], [np.arange(len(atoms))])
    close(features(representation, atoms), expected)
    assert np.abs(features(representation, crystal(False)) - expected).max() > 1e-3


@of_engines
def test_cell_vectors_of_directions_that_are_not_periodic_are_ignored(engine):
    representation, slab = plain(engine), crystal((True, True, False))
    expected = features(representation, slab)
    for vector in ([0, 0, 0], [3, 1, -9], [3.4, 0.3, -0.2]):
        slab.set_cell([*CELL[:2], vector])
        close(features(representation, slab), expected)
    atoms = random_atoms(np.random.default_rng(1))
    for cell in ([30, 30, 30], [1, 1, 1], [[0, 0, 0], [1, 1, 0], [1, 1, 0]]):
        boxed = Atoms(atoms.numbers, atoms.positions, cell=cell)
        np.testing.assert_array_equal(
            features(representation, boxed), features(representation, atoms)
        )


@of_engines
@settings(max_examples=8)
@given(seed=seeds)
def test_features_do_not_depend_on_the_choice_of_cell_and_images(engine, seed):
    rng = np.random.default_rng(seed)
    representation, atoms = plain(engine), crystal()
    expected = features(representation, atoms)
    # Another basis of the same lattice, perhaps left-handed, and other images of the atoms.
    basis = np.tril(rng.integers(-2, 3, (3, 3)), -1) + np.diag(rng.choice([-1, 1], 3))
    positions = atoms.positions + rng.integers(-3, 4, (len(atoms), 3)) @ CELL + rng.normal(size=3)
    cell = basis[rng.permutation(3)] @ CELL
    elsewhere = Atoms(atoms.numbers, positions, cell=cell, pbc=True)
    close(features(representation, elsewhere), expected)
    repeated = features(representation, atoms.repeat((2, 1, 3)))
    close(repeated, np.tile(expected, (6, 1)))


# --- rows and columns ---


@of_engines
@pytest.mark.parametrize("size", [1, 3])
def test_molecules_with_some_of_the_species_are_described_in_all(engine, size):
    everything = (1, 6, 7, 8)
    representation = SoapRepresentation(soap(engine), everything)
    rng = np.random.default_rng(size)
    for present in itertools.combinations(everything, size):
        numbers = rng.permutation([*present, present[0]])
        atoms = Atoms(numbers, rng.uniform(-1.5, 1.5, (size + 1, 3)))
        # With all species present beyond the cutoff, no features need to be placed.
        whole = atoms + Atoms(everything, 100.0 + 50 * np.arange(12.0).reshape(4, 3))
        spectra = features(representation, atoms)
        close(spectra, features(representation, whole)[: size + 1])
        assert (spectra != 0).any()


@of_engines
def test_centers_are_rows_in_the_order_given(engine):
    representation, frames = plain(engine), some_molecules(6)
    frames.insert(2, crystal())
    rng = np.random.default_rng(3)
    centers = [rng.permutation(len(a))[: rng.integers(0, len(a))] for a in frames]
    centers[3] = centers[3][:0]
    chosen = [features(representation, a)[c] for a, c in zip(frames, centers, strict=True)]
    spectra = representation.features(frames, centers)
    assert spectra.dtype == np.float32
    close(spectra, np.concatenate(chosen))
    assert representation.features(frames, [c[:0] for c in centers]).shape == (0, spectra.shape[1])
    assert representation.features([], []).shape == (0, spectra.shape[1])
    exact = representation.exact().features(frames, centers)
    assert exact.dtype == np.float64
    close(spectra, exact)


@of_engines
def test_features_have_unit_length_at_every_scale_or_on_average(engine):
    scales = [Scale(cutoff=3.0, n_radial=3, l_max=2), Scale(cutoff=5.0, n_radial=4, l_max=3)]
    frames = some_molecules(8)
    both = plain(engine, scales=scales)
    X = features(both, *frames)
    for columns in both.columns:
        np.testing.assert_allclose(np.linalg.norm(X[:, columns], axis=1), 1, rtol=1e-6)
    Y = features(fitted(soap(engine, normalize=False), frames), *frames)
    assert np.mean(np.sum(Y**2, axis=1)) == pytest.approx(1, rel=1e-5)
    assert np.ptp(np.linalg.norm(Y, axis=1)) > 0.1
    close(normalize_rows(Y), features(plain(engine), *frames))


def test_the_kernel_of_two_scales_is_the_weighted_sum():
    scales = (
        Scale(cutoff=3.0, n_radial=3, l_max=2, weight=1.0),
        Scale(cutoff=5.0, n_radial=4, l_max=3, weight=3.0),
    )
    frames, kernels = some_molecules(8), []
    for some in (scales, scales[:1], scales[1:]):
        representation = plain(scales=some, exponent=3)
        X = features(representation, *frames)
        kernels.append(representation.kernel(X[:20], X[20:]))
        np.testing.assert_allclose(representation.kernel.diag(X), 1, rtol=1e-5)
    np.testing.assert_allclose(kernels[0], 0.25 * kernels[1] + 0.75 * kernels[2], atol=1e-6)
    assert np.abs(kernels[1] - kernels[2]).max() > 0.01


# --- compression ---

of_methods = pytest.mark.parametrize("method", ["pca", "pairs"])


def compressed(method, n_features, frames=None, **overrides):
    compression = Compression(method=method, n_features=n_features)
    return fitted(soap(compression=compression, **overrides), frames or some_molecules())


@of_methods
@pytest.mark.parametrize("normalize", [True, False])
def test_more_features_keep_the_kernel_better(method, normalize):
    representations = [compressed(method, n, normalize=normalize) for n in (3, 12, 50)]
    assert [r.n_features for r in representations] == [3, 12, 50]
    errors = [r.projections[0].kernel_error for r in representations]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]
    assert errors[2] < 0.01
    # The error on the rows set aside is the error for other structures, too.
    others = some_molecules(80)[40:]
    unit = features(plain(), *others)
    for representation, expected in zip(representations, errors, strict=True):
        Y = normalize_rows(features(representation, *others))
        error = np.sqrt(np.mean((unit @ unit.T - Y @ Y.T) ** 2))
        assert 0.25 < error / expected < 4


def test_principal_components_are_the_singular_vectors():
    rng = np.random.default_rng(5)
    X = (rng.normal(size=(80, 12)) + 2.0).astype(np.float32) * np.arange(1, 13, dtype=np.float32)
    V = principal_components(X, 4)
    expected = np.linalg.svd(X.astype(np.float64))[2][:4].T
    np.testing.assert_allclose(np.abs(np.sum(V * expected, axis=0)), 1, rtol=1e-5)
    np.testing.assert_allclose(V.T @ V, np.eye(4), atol=1e-12)
    assert fit_projection(X, "pca", 100).kernel_error < 1e-6


@of_engines
def test_components_of_pairs_belong_to_one_pair_each(engine):
    X, columns = features(plain(engine), *some_molecules()), plain(engine).engines[0].pair_columns
    blocks = list(columns.values())
    assert sorted(np.concatenate(blocks).tolist()) == [*range(X.shape[1])]
    matrix = fit_projection(X, "pairs", 60, blocks).matrix
    assert [sum(bool(np.any(c[block])) for block in blocks) for c in matrix.T] == [1] * 60
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(60), atol=1e-6)
    sizes = np.linalg.norm(X @ matrix, axis=0)
    assert np.all(np.diff(sizes) < 1e-2 * sizes[0])


@of_engines
@of_methods
def test_compressed_features_are_projected_and_normalised(engine, method):
    frames = some_molecules()
    representation = compressed(method, 20, frames, engine=engine)
    matrix = representation.projections[0].matrix
    expected = normalize_rows(features(plain(engine), *frames) @ matrix)
    np.testing.assert_allclose(features(representation, *frames), expected, atol=5e-6)


SMALL, LARGE = make_soap("organic", n_radial=2, l_max=2), make_soap("nmr")
PAIRS_OF_7 = Compression(method="pairs", n_features=7)


@pytest.mark.parametrize(
    ("settings_", "problem", "compression"),
    [
        (SMALL, Problem(5000, False), None),
        (SMALL, Problem(500, True), None),
        (LARGE, Problem(500, False), None),
        (LARGE, Problem(5000, False), Compression()),
        (LARGE, Problem(500, True), Compression(method="pairs", n_features=192)),
        (LARGE, Problem(5000, True), Compression(method="pairs", n_features=384)),
        (make_soap("nmr", compression=None), Problem(5000, False), None),
        (make_soap("nmr", compression=PAIRS_OF_7), Problem(5000, False), PAIRS_OF_7),
        (make_soap(SMALL, compression=Compression()), Problem(5000, False), None),
    ],
)
def test_choice_of_a_compression(settings_, problem, compression):
    representation = SoapRepresentation(settings_, SPECIES)
    assert representation.choose_compression(problem) == compression
    n = representation.n_features
    n_compressed = n if compression is None else compression.n_features
    assert settings_.n_features(SPECIES, problem) == (n_compressed, n)


# --- streams of batches ---


@pytest.mark.parametrize("batch", [1, 20, 10_000])
def test_batches_are_all_structures_in_order(batch):
    frames, rng = some_molecules(24), np.random.default_rng(0)
    centers = [rng.permutation(len(a))[: rng.integers(0, len(a))] for a in frames]
    centers[-1] = centers[-1][:0]
    structures = zip(frames, centers, strict=True)
    batches = list(stream_features(plain(), structures, batch=batch, n_workers=2))
    spectra = np.concatenate([b.features for b in batches])
    np.testing.assert_array_equal(spectra, plain().features(frames, centers))
    np.testing.assert_array_equal(np.concatenate([b.sizes for b in batches]), [*map(len, centers)])
    for b in batches:
        assert b.offsets[-1] == len(b.features) < batch + max(map(len, frames))
    assert list(stream_features(plain(), iter([]))) == []


@pytest.mark.parametrize("engine", ["dscribe", "featomic"])
def test_processes_compute_the_same_to_the_last_bit(engine, monkeypatch):
    frames = some_molecules(24)
    centers = all_atoms(frames)
    representation = compressed("pca", 20, frames, engine=engine)

    def stream(n_workers):
        structures = zip(frames, centers, strict=True)
        return list(stream_features(representation, structures, batch=16, n_workers=n_workers))

    serial = stream(1)
    monkeypatch.setattr(Representation, "serial", 50)
    for a, b in zip(serial, stream(2), strict=True):
        np.testing.assert_array_equal(a.features, b.features)
        np.testing.assert_array_equal(a.sizes, b.sizes)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_file_is_read_only_as_far_as_needed(n_workers, monkeypatch):
    monkeypatch.setattr(Representation, "serial", 50)
    read = 0

    def endless():
        nonlocal read
        for i in itertools.count():
            read += 1
            atoms = molecule(NAMES[i % len(NAMES)])
            yield atoms, np.arange(len(atoms))

    stream = stream_features(plain(), endless(), batch=10, n_workers=n_workers)
    ahead = [read]
    for _ in range(4):
        next(stream)
        ahead.append(read)
    stream.close()  # in the middle: processes end
    assert ahead[0] == 0
    # A batch has one to ten molecules; processes have four batches at a time.
    assert ahead[1] <= (10 if n_workers == 1 else 60)
    assert ahead[4] <= ahead[1] + 40


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 12), max_size=40), size=st.integers(1, 30))
def test_blocks_are_whole_structures(sizes, size):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
    blocks = list(whole_blocks(offsets, size))
    assert [s for first, last in blocks for s in range(first, last)] == list(range(len(sizes)))
    for first, last in blocks:
        assert sum(sizes[first:last]) <= size or last == first + 1
    for (a, _), (_, d) in itertools.pairwise(blocks):
        assert sum(sizes[a:d]) > size  # two blocks that would fit into one are one


# --- kernel rows and novelty ---


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scaling", [1.0, 0.7])
def test_kernel_rows_are_averages_and_novelty_is_the_distance_to_the_nearest(dtype, scaling):
    rng = np.random.default_rng(0)
    X = scaling * normalize_rows(rng.gamma(0.5, size=(30, 6)))
    Y, offsets = X[:9].astype(dtype), np.array([0, 7, 8, 19, 30])
    X, own = X.astype(dtype), [np.arange(7), np.arange(7, 8), np.arange(8, 9), np.arange(0)]
    kernel, novelty = PowerKernel(2.0), np.full(30, np.nan)
    rows = Basis(kernel, Y, 3.0, False).rows(X, offsets, novelty=novelty, own=own)
    of_structures = structure_novelty(novelty, offsets)
    K = (X.astype(float) @ Y.astype(float).T) ** 2
    similarity = K / scaling**4
    for s, (a, b) in enumerate(itertools.pairwise(offsets)):
        np.testing.assert_allclose(rows[s], 3.0 * K[a:b].mean(axis=0), atol=1e-5)
        part = similarity[a:b].copy()
        part[:, own[s]] = 0.0
        each = np.clip(1 - part.max(axis=1), 0, 1)
        np.testing.assert_allclose(novelty[a:b], each, atol=1e-5)
        np.testing.assert_allclose(of_structures[s], (each.max(), each.mean()), atol=1e-5)
    by_atom = Basis(kernel, Y, 3.0, True)
    np.testing.assert_allclose(by_atom.rows(X, offsets, novelty=novelty), 3.0 * K, atol=1e-5)
    np.testing.assert_allclose(novelty, np.clip(1 - similarity.max(axis=1), 0, 1), atol=1e-5)
    np.testing.assert_allclose(by_atom.environment_rows(X), 3.0 * K, atol=1e-5)
    np.testing.assert_allclose(by_atom.prior_variance(X, offsets), 3 * scaling**4, rtol=1e-5)
