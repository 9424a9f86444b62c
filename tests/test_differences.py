"""Error bars of differences and of reactions, against true errors on QM9."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_differences as differences
from qualms import AtomisticModel, Prediction
from qualms.data import qm9


@pytest.fixture(scope="module")
def judged():
    molecules = qm9()
    train, test = molecules[:600], molecules[600:2000]
    model = AtomisticModel(differences.TARGET, n_representatives=300, units="eV", threads=1)
    return differences.judge(model.fit(train), train, test)


def test_error_bars_of_differences_hold(judged):
    for name in ("isomers", "isomers most alike", "reactions"):
        found = judged[name]["member by member"]
        assert found.n_points > 50
        # Three standard errors of a share.
        allowed = 3 * np.sqrt(0.68 * 0.32 / found.n_points)
        assert found.coverage_68 == pytest.approx(0.68, abs=allowed + 0.03)
        assert found.sharpness == pytest.approx(found.rmse, rel=0.35)


def test_errors_of_like_structures_cancel_and_the_members_know(judged):
    like, any_two = judged["isomers most alike"], judged["isomers"]
    together, apart = like["member by member"], like["as if independent"]
    assert together.sharpness < 0.9 * apart.sharpness
    assert apart.sharpness > 1.1 * like["member by member"].rmse
    # Isomers in general have little in common, and their errors do not either.
    assert any_two["member by member"].sharpness > 0.9 * any_two["as if independent"].sharpness
    assert any_two["member by member"].rmse > 1.2 * judged["energies"]["as predicted"].rmse


def first_example(seed):
    """Run the example of the documentation with other random numbers."""
    page = (Path(__file__).parents[1] / "docs/energies.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")]
    code = next(block for block in blocks if "def alloy" in block)
    names = {"AtomisticModel": AtomisticModel}
    with redirect_stdout(io.StringIO()):
        exec(code.replace("default_rng(0)", f"default_rng({seed})"), names)
    return names


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_error_bar_of_a_small_change_is_much_smaller_than_two_and_holds(seed):
    names = first_example(seed)
    rms = names["rms"]
    energies, change, true_change = names["energies"], names["change"], names["reference"]
    apart = np.hypot(energies.std[:80], energies.std[80:])
    assert rms(change.std) < 0.2 * rms(apart)
    # Not only smaller, but right: quadrature would be too large by as much.
    assert rms(change.std) == pytest.approx(rms(change.mean - true_change), rel=0.5)
    assert np.mean(np.abs(change.mean - true_change) < change.std) == pytest.approx(0.68, abs=0.18)


def test_combinations_conserve_the_elements():
    frames = qm9(n=600)
    elements = np.array(differences.compositions(frames))
    for C in (differences.isomer_pairs(frames), differences.reactions(frames, 30)):
        assert C.shape[0] >= 20
        np.testing.assert_array_equal(C @ elements, 0)
        # No molecule is used twice.
        assert np.max(abs(C).sum(axis=0)) == 1


def test_independent_errors_add_in_quadrature():
    rng = np.random.default_rng(0)
    prediction = Prediction(rng.normal(size=(4, 8)))
    C = differences.combinations([(0, 1), (2, 3)], (1, -1), 4)
    found = differences.independent(C, prediction)
    expected = np.hypot(prediction.std[[0, 2]], prediction.std[[1, 3]])
    np.testing.assert_allclose(found.std, expected)
    np.testing.assert_allclose(found.mean, prediction.mean[[0, 2]] - prediction.mean[[1, 3]])
