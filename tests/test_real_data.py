"""Public data sets that are too large, or not free, to come with the package."""

import os
from pathlib import Path

import numpy as np
import pytest

from qualms import AtomisticModel
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.structures import read_frames, species_of
from qualms.features.hypers import PRESETS
from qualms.features.soap import make_engine

#: Molecular crystals, atoms displaced, with chemical shieldings of all atoms in ppm.
CRYSTALS = Path(
    os.environ.get(
        "QUALMS_CSD", Path(__file__).parents[2] / "shared/data/csd/CSD-1000R_500.extxyz.gz"
    )
)
pytestmark = pytest.mark.skipif(
    not CRYSTALS.exists(), reason="QUALMS_CSD does not name a file of crystals with shieldings"
)


@pytest.fixture(scope="module")
def crystals():
    return read_frames(CRYSTALS)


@pytest.mark.slow
def test_shieldings_of_hydrogen_in_crystals_that_were_not_seen(crystals):
    chosen = np.random.default_rng(0).permutation(len(crystals))[:150]
    train, test = ([crystals[i] for i in part] for part in (chosen[:120], chosen[120:]))
    model = AtomisticModel(
        "CS_total", "atomic", species="H", representation="nmr", n_representatives=1000, units="ppm"
    ).fit(train)
    n_hydrogens = sum(atoms.symbols.count("H") for atoms in train)
    assert model.record.n_rows == model.record.n_environments == n_hydrogens
    judged = evaluate(model, test)
    assert len(judged.y) == sum(atoms.symbols.count("H") for atoms in test)
    own, paper = judged.rows["student (internal)"], judged.rows["linear (validation)"]
    assert own.rmse < 0.3 * np.std(judged.y)
    # No crystal was set aside, and yet the error bars are as good as if some had been.
    assert own.log_likelihood > paper.log_likelihood - 0.03
    assert 0.6 < own.coverage_68 < 0.8


def test_a_few_crystals_train_a_model_of_shieldings(crystals):
    train, test = crystals[:25], crystals[25:30]
    model = AtomisticModel(
        "CS_total", "atomic", species="H", representation="nmr", n_representatives=200, units="ppm"
    ).fit(train)
    judged = evaluate(model, test)
    assert judged.units == "ppm"
    assert len(judged.y) == sum(atoms.symbols.count("H") for atoms in test)
    assert judged.rows["student (internal)"].rmse < 0.7 * np.std(judged.y)


def test_the_engines_span_the_same_space_on_crystals(crystals):
    """Radial bases differ, what they expand does not: their kernels are nearly the same."""
    frames = crystals[:3]
    scale = PRESETS["nmr"].scales[0].model_copy(update={"n_radial": 12, "l_max": 8})
    species = tuple(species_of(frames))
    centers = [np.flatnonzero(atoms.numbers == 1)[::4] for atoms in frames]
    kernels = []
    for name in ("dscribe", "featomic"):
        engine = make_engine(name, scale, species)
        X = np.zeros((sum(map(len, centers)), engine.n_features))
        for piece in engine.pieces(frames, centers):
            columns = np.r_[piece.columns]
            X[np.ix_(piece.rows, columns)] = piece.values
        X /= np.linalg.norm(X, axis=1)[:, None]
        kernels.append(X @ X.T)
    off = ~np.eye(len(kernels[0]), dtype=bool)
    correlation = np.corrcoef(kernels[0][off], kernels[1][off])[0, 1]
    assert correlation > 0.99
