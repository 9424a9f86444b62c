"""Make the subset of QM9 that comes with qualms, from the Python package qm9pack.

python scripts/make_qm9_subset.py [-o FILE] [--size 3000] [--seed 20140805]

The same size and seed give the same arrays, and the same bytes with the same zlib.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ase.data import atomic_numbers

from qualms.data.qm9 import ATOMIC_U0, ENERGIES, Molecule, read_qm9pack, select

Arrays: TypeAlias = dict[str, Any]

SUBSET = Path(__file__).parents[1] / "src/qualms/data/qm9_subset.npz"

#: Integers compress better than floats, and what 1e-5 Å leaves out is worth less than 1e-7 eV in a
#: relaxed molecule.
POSITIONS_PER_ANGSTROM = 100_000

ATTRIBUTION = """\
{size} of the 130,831 characterised molecules of QM9, drawn at random with seed {seed}.
R. Ramakrishnan, P. O. Dral, M. Rupp, O. A. von Lilienfeld, Quantum chemistry structures and
properties of 134 kilo molecules, Sci. Data 1, 140022 (2014), doi:10.1038/sdata.2014.22.
Taken from the Python package qm9pack {version}, which is under the MIT licence (array license).
Positions: integers of 1e-5 angstrom. Energies: Hartree."""


def as_arrays(molecules: list[Molecule]) -> Arrays:
    """Return the arrays of the NPZ format that `qualms.data.qm9` reads."""
    natoms = np.array([len(molecule.numbers) for molecule in molecules])
    positions = np.concatenate([molecule.positions for molecule in molecules])
    arrays: Arrays = {
        "index": np.array([molecule.gdb9_index for molecule in molecules], dtype=np.int32),
        "natoms": natoms.astype(np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(natoms)]).astype(np.int32),
        "numbers": np.concatenate([molecule.numbers for molecule in molecules]).astype(np.uint8),
        "positions": np.rint(positions * POSITIONS_PER_ANGSTROM).astype(np.int32),
        "positions_per_angstrom": np.array(POSITIONS_PER_ANGSTROM),
        "atomref_numbers": np.array([atomic_numbers[s] for s in ATOMIC_U0], dtype=np.uint8),
        "atomref_U0": np.array(list(ATOMIC_U0.values())),
    }
    arrays |= {name: np.array([m.energies[name] for m in molecules]) for name in ENERGIES}
    return arrays


def origin(size: int, seed: int) -> Arrays:
    """Return where the molecules come from, and the licence that must go with them."""
    qm9pack = importlib.metadata.distribution("qm9pack")
    text = ATTRIBUTION.format(size=size, seed=seed, version=qm9pack.version)
    return {"attribution": np.array(text), "license": np.array(qm9pack.read_text("LICENSE"))}


def main() -> None:
    """Draw the molecules and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=SUBSET, help="the NPZ file to write")
    parser.add_argument("--size", type=int, default=3000, help="how many molecules")
    parser.add_argument("--seed", type=int, default=20140805, help="which molecules")
    arguments = parser.parse_args()
    # They stay in the order in which they were drawn, so that the first n are a fair sample too.
    chosen = select(read_qm9pack(), arguments.size, arguments.seed)
    arrays = as_arrays([parse() for _, parse in chosen])
    np.savez_compressed(arguments.output, **arrays, **origin(arguments.size, arguments.seed))
    sys.stdout.write(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.2f} MB\n")


if __name__ == "__main__":
    main()
