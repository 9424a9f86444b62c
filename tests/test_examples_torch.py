"""Committees of neural networks, as `examples/neural_network.py` shows them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qualms import score
from qualms.data import qm9

EXAMPLE = Path(__file__).parents[1] / "examples" / "neural_network.py"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: pip install 'qualms[torch]'",
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("neural_network", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(example):
    """Truths and predictions with few molecules, epochs and representatives."""
    return example.run(qm9(n=900), 500, epochs=80, n_representatives=100)


@needs_torch
def test_internal_calibration_is_right_for_separate_networks(small):
    y, predictions = small
    before, after = (score(y, predictions[f"sub-sampled, {c}"]) for c in ("none", "internal"))
    assert before.coverage_68 < 0.6
    assert 0.6 <= after.coverage_68 <= 0.76
    assert 0.9 <= after.coverage_95 <= 0.99
    assert after.log_likelihood > before.log_likelihood
    assert after.miscalibration_area < before.miscalibration_area / 2


@needs_torch
def test_internal_calibration_is_too_small_for_shared_layers(example, small):
    y, predictions = small
    internal = predictions["shallow, internal"]
    assert example.too_small(y, internal) > 1.2
    assert score(y, internal).coverage_68 < 0.6
    for remedy in ("held out", "cross-fitted"):
        found = score(y, predictions[f"shallow, {remedy}"])
        assert 0.6 <= found.coverage_68 <= 0.8
        assert found.log_likelihood > score(y, internal).log_likelihood
    # Cross-fitting changes the error bars of the same network, which has seen all molecules.
    np.testing.assert_allclose(predictions["shallow, cross-fitted"].mean, internal.mean)


@needs_torch
def test_what_a_member_did_not_see_reaches_it_through_shared_layers_only(example):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 3)), rng.normal(size=80)
    present = example.draw_present(80)
    # Other energies for the molecules that member 0 does not see, with the same mean and variance.
    changed = y.copy()
    changed[~present[:, 0]] = y[~present[:, 0]][::-1]
    separate, shared = (
        [train(X, targets, present, epochs=20)(X)[:, 0] for targets in (y, changed)]
        for train in (example.train_subsampled, example.train_shallow)
    )
    np.testing.assert_allclose(*separate, rtol=1e-4, atol=1e-4)
    assert np.abs(shared[0] - shared[1]).max() > 0.01


@needs_torch
def test_training_is_deterministic(example):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4)), rng.normal(size=60)
    present = example.draw_present(60)
    for train in (example.train_subsampled, example.train_shallow):
        first, second = (train(X, y, present, epochs=3)(X) for _ in range(2))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@needs_torch
def test_the_example_prints_the_table():
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"^(.+?, [a-z -]+?)" + 5 * r" +(-?\d[\d.]*)\*?" + "$", done.stdout, re.M)
    table = {name: [float(v) for v in values] for name, *values in rows}
    assert len(table) == 10
    coverage = {name: values[3] for name, values in table.items()}
    for name in ("sub-sampled, internal", "shallow, held out", "shallow, cross-fitted"):
        assert 62 <= coverage[name] <= 78
    assert coverage["shallow, internal"] < 60
    assert float(re.findall(r"([\d.]+) times too small", done.stdout)[0]) > 1.2


def test_the_package_does_not_import_torch():
    code = (
        "import pkgutil, importlib, sys, qualms\n"
        "for module in pkgutil.walk_packages(qualms.__path__, 'qualms.'):\n"
        "    importlib.import_module(module.name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_example_says_how_to_install_it():
    code = f"""
import runpy, sys
class Missing:
    @staticmethod
    def find_spec(name, *_):
        if name.split(".")[0] == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, Missing)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "This example needs PyTorch: pip install 'qualms[torch]'"
