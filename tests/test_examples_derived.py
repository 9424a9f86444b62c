"""Examples of quantities derived from a potential: they run, draw, and are right."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_drawn(path):
    with Image.open(path) as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10


def test_vibrations(tmp_path):
    example = load("vibrations")
    z = []
    for seed in range(4):
        truth, found = example.run(n_members=8, seed=seed)
        z.append((truth - found.mean) / found.std)
        np.testing.assert_allclose(found.mean, truth, rtol=0.05)
        assert np.all(found.std < 0.05 * truth)
    # O–H bonds and their angle, then the three vibrations.
    assert truth[:2] == pytest.approx([0.958, 104.5], rel=1e-3)
    # Twenty errors, not independent: error bars of half, or of twice, their size would fail.
    assert 0.6 < np.sqrt(np.mean(np.square(z))) < 1.4
    assert np.mean(np.abs(z) < 1.96) >= 0.8
    example.draw(truth, found, tmp_path / "vibrations.png")
    assert_drawn(tmp_path / "vibrations.png")


def test_frequencies_of_the_reference_are_those_of_its_springs():
    """Without the angle, stretching of one bond is that of an oscillator of the reduced mass."""
    example = load("vibrations")
    atoms = example.water()
    atoms.calc = example.Reference()
    values = example.observed(atoms.calc)
    stiffness = 2 * 5.2 * 2.3**2  # eV/Å²
    lighter, heavier = 1.008, 15.999
    mass = lighter * heavier / (lighter + heavier)
    # 1 eV/Å²/u is (521.47 /cm)².
    alone = 521.47 * np.sqrt(stiffness / mass)
    assert values[3] < alone < values[4]
    assert values[3:].mean() == pytest.approx(alone, rel=0.02)


def test_equation_of_state(tmp_path):
    example = load("equation_of_state")
    energies, found, truth, true_energies = example.run()
    assert truth == pytest.approx([3.59, 133], rel=0.02)
    np.testing.assert_array_less(np.abs(found.mean - truth), 3 * found.std)
    z = (true_energies - energies.mean) / energies.std
    assert np.sqrt(np.mean(z**2)) < 2.5
    # Errors of neighbouring volumes cancel, and the members know how far.
    differences, true = energies[1:] - energies[:-1], np.diff(true_energies)
    apart = np.hypot(energies.std[1:], energies.std[:-1])
    assert np.median(differences.std / apart) < 0.75
    assert np.min(differences.std / apart) < 0.35
    z = (true - differences.mean) / differences.std
    assert np.sqrt(np.mean(z**2)) < 2.5
    example.draw(energies, found, truth, true_energies, tmp_path / "eos.png")
    assert_drawn(tmp_path / "eos.png")


def test_uncertain_atoms(tmp_path):
    example = load("uncertain_atoms")
    molecules, contributions, novelty, energies = example.run()
    for i in range(0, len(molecules), 2):
        bond = list(molecules[i + 1].info["bond"])
        # The energy of the stretched molecule is less sure, and the bond is why.
        assert energies.std[i + 1] > 1.5 * energies.std[i]
        assert int(novelty[i + 1].argmax()) in bond
        assert novelty[i + 1][bond].max() > 2 * novelty[i].max()
        # Error bars of single atoms do not tell.
        own = contributions[i + 1].std / contributions[i].std
        assert own.max() < 0.5 * novelty[i + 1].max() / novelty[i].max()
        np.testing.assert_allclose(contributions[i].sum().members, energies[i].members, rtol=1e-6)
    example.draw(molecules, contributions, novelty, tmp_path / "atoms.png")
    assert_drawn(tmp_path / "atoms.png")
