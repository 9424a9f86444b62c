"""Measured memory stays within the limit that was given."""

import sys
from pathlib import Path

import ase.io
import pytest

from qualms.data import qm9

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "mode"), [("1GB", "on disk"), ("2GB", "kept in memory")], ids=["spilled", "kept"]
)
def test_training_stays_within_its_limit(tmp_path, monkeypatch, memory, mode):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.memory import measure

    ase.io.write(tmp_path / "data.xyz", qm9(n=2000), format="extxyz")
    script = (
        "import sys; from qualms.cli import main; "
        "sys.argv = ['qualms', *sys.argv[1:]]; sys.stderr = sys.stdout; main()"
    )
    options = f"--target atomization_energy --representatives 300 --threads 1 --memory {memory}"
    command = [sys.executable, "-c", script, "train", "data.xyz", "-o", "m.safetensors"]
    measured = measure([*command, *options.split()], cwd=tmp_path)
    assert mode in measured.output
    assert 2**20 * measured.peak < float(memory.removesuffix("GB")) * 1e9
