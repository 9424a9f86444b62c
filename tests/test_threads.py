"""Threads: no more than the environment allows, and one for small structures."""

import os

import pytest
from ase import Atoms
from atomistic_fixtures import make_model
from fake_potential import PairCommittee
from test_ase import SMOOTH, waters
from threadpoolctl import threadpool_info, threadpool_limits

from qualms import AtomisticModel, InputError
from qualms.ase import Calculator
from qualms.atomistic import model as models
from qualms.atomistic.memory import default_threads
from qualms.resources import SMALL, limit_rayon, limited

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


@pytest.fixture
def environment(monkeypatch):
    """A machine with eight cores, and nothing said about threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def model():
    return make_model(
        "energy", representation=SMOOTH, n_representatives=20, n_members=4, units="eV", threads=4
    ).fit(waters(30))


def in_use():
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "64"}, 8),
        ({"OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": ""}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
    ],
)
def test_the_environment_is_heeded(environment, said, expected):
    for name, value in said.items():
        environment.setenv(name, value)
    assert default_threads() == expected
    assert default_threads(5) == 5
    assert AtomisticModel("energy").threads == expected


def test_featomic_heeds_it_too(environment):
    limit_rayon()
    assert "RAYON_NUM_THREADS" not in os.environ
    environment.setenv("OMP_NUM_THREADS", "2")
    limit_rayon()
    assert os.environ["RAYON_NUM_THREADS"] == "2"
    environment.setenv("OMP_NUM_THREADS", "1")
    limit_rayon()
    assert os.environ["RAYON_NUM_THREADS"] == "2"  # somebody said so


def test_limits_are_lowered_and_never_raised():
    with threadpool_limits(limits=1):
        with limited(2):
            assert in_use() == {1}
        assert in_use() == {1}
    with threadpool_limits(limits=2):
        with limited(4):
            assert in_use() == {2}
        with limited(1):
            assert in_use() == {1}
        with limited(2, n_atoms=SMALL):
            assert in_use() == {1}
        with limited(2, n_atoms=SMALL + 1):
            assert in_use() == {2}
        assert in_use() == {2}


@pytest.mark.parametrize(("allowed", "n_copies", "expected"), [(1, 40, 1), (2, 1, 1), (2, 40, 2)])
def test_a_calculator_keeps_to_the_limits(model, monkeypatch, allowed, n_copies, expected):
    seen = []
    compute = models.predict_mechanics

    def spy(*arguments, **options):
        seen.append(in_use())
        return compute(*arguments, **options)

    monkeypatch.setattr(models, "predict_mechanics", spy)
    atoms = Atoms()
    for i in range(n_copies):
        water = waters(1, seed=i)[0]
        water.positions[:, 2] += 9.0 * i
        atoms += water
    with threadpool_limits(limits=allowed):
        Calculator(model).get_forces(atoms)
    assert seen == [{expected}]


def test_a_calculator_may_have_threads_of_its_own(model, tmp_path):
    model.save(tmp_path / "model.safetensors")
    assert Calculator(tmp_path / "model.safetensors", threads=1).model.threads == 1
    calc = Calculator(model, threads=1)
    assert (calc.model.threads, model.threads) == (1, 4)
    assert calc.model.fitted is model.fitted
    assert Calculator(model).model is model
    with pytest.raises(InputError, match="threads=0"):
        Calculator(model, threads=0)
    with pytest.raises(InputError, match="threads=2"):
        Calculator(PairCommittee(), threads=2)
