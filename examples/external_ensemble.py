"""An ensemble that another code made, calibrated from the command line.

Eight pair potentials of copper, each fitted to half of the training structures, stand for the
committee: fitted to the many-body potential EMT, they err in the same direction more than they
disagree. Their predictions are stored as a user of MACE would store them, in extended XYZ,

    energy, energy_var, REF_energy         of each structure, in eV (energy_var in eV²)
    energy_comm                            of each structure: what every member says
    forces, REF_forces                     of each atom, in eV/Å: x y z
    forces_comm                            of each atom: x y z of member 0, x y z of member 1, …

and then four commands do the rest:

    qualms calibrate known.xyz --target energy --reference REF_energy -o energy.json
    qualms calibrate known.xyz --target forces --reference REF_forces -o forces.json
    qualms apply energy.json new.xyz -o with_energies.xyz
    qualms apply forces.json with_energies.xyz -o calibrated.xyz

Run with `python examples/external_ensemble.py [FOLDER]`; files stay in the folder, if one is given.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import read, write
from ase.neighborlist import neighbor_list

N_MEMBERS = 8
CUTOFF = 5.0  # Å


def main() -> None:
    """Make the files and calibrate them, in a folder of the user's or in a temporary one."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        calibrate_there(folder)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            calibrate_there(Path(temporary))


def calibrate_there(folder: Path, n_known: int = 200, n_new: int = 200) -> None:
    """Write the predictions, run the four commands, and compare error bars with errors."""
    make_files(folder, n_known, n_new)
    qualms(folder, "calibrate known.xyz --target energy --reference REF_energy -o energy.json")
    qualms(folder, "calibrate known.xyz --target forces --reference REF_forces -o forces.json")
    qualms(folder, "apply energy.json new.xyz -o with_energies.xyz")
    qualms(folder, "apply forces.json with_energies.xyz -o calibrated.xyz")

    before, after = read(folder / "new.xyz", ":"), read(folder / "calibrated.xyz", ":")
    print("\nNew structures: truths within so many error bars of the prediction\n")
    print(f"{'':8}{'error bars':>11}{'before':>8}{'after':>8}{'ideal':>8}")
    for target in ("energy", "forces"):
        for width, ideal in ((1, 0.683), (2, 0.954)):
            shares = (covered(before, target, width), covered(after, target, width), ideal)
            print(f"{target:8}{width:11}" + "".join(f"{share:8.1%}" for share in shares))


def qualms(folder: Path, command: str) -> None:
    """Run a command of qualms in a folder, which may hold files of an earlier run."""
    words = ["qualms", *command.split(), "--force"]
    print(f"\n$ {' '.join(words)}", flush=True)
    words[0] = str(Path(sys.executable).with_name("qualms"))
    subprocess.run(words, cwd=folder, check=True)


def covered(structures: Sequence[Atoms], target: str, width: float = 1.0) -> float:
    """Return how often the truth is within so many error bars of the prediction.

    An error bar is ``{target}_uncertainty``, or, where there is none, the spread of the members.
    """
    hits = []
    for atoms in structures:
        # ASE keeps energies and forces that it reads in a calculator.
        values = {**atoms.info, **atoms.arrays, **atoms.calc.results}
        mean, members = np.asarray(values[target]), values[f"{target}_comm"]
        if target == "forces":
            members = members.reshape(len(atoms), N_MEMBERS, 3).swapaxes(0, 1)
        spread = members.std(axis=0, ddof=1)
        error_bar = values.get(f"{target}_uncertainty", spread)
        hits.append(np.ravel(np.abs(values[f"REF_{target}"] - mean) <= width * error_bar))
    return float(np.mean(np.concatenate(hits)))


# --- the ensemble, which in real life is there already ---


def make_files(folder: Path, n_known: int, n_new: int, n_train: int = 40) -> None:
    """Write ``known.xyz`` and ``new.xyz``: structures, references, and what the members predict."""
    rng = np.random.default_rng(0)
    train, known, new = ([shaken_copper(rng) for _ in range(n)] for n in (n_train, n_known, n_new))
    weights = fitted_members(train, rng)
    for name, structures in (("known.xyz", known), ("new.xyz", new)):
        for atoms in structures:
            store_predictions(atoms, weights)
        write(folder / name, structures)


def shaken_copper(rng: np.random.Generator) -> Atoms:
    """Return copper, stretched and shaken by some amount, with energy and forces of EMT."""
    atoms = bulk("Cu", a=3.6 * rng.uniform(0.98, 1.04), cubic=True).repeat((2, 2, 1))
    atoms.positions += rng.normal(scale=rng.uniform(0.02, 0.1), size=(len(atoms), 3))
    reference = atoms.copy()
    reference.calc = EMT()
    atoms.info["REF_energy"] = reference.get_potential_energy()
    atoms.arrays["REF_forces"] = reference.get_forces()
    return atoms


def pair_functions(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Return what weights are multiplied with: for the energy (k,), and for the forces (3n, k).

    A pair potential is a sum of Gaussians of the distance, and a constant for each atom.
    """
    i, d, D = neighbor_list("idD", atoms, CUTOFF)
    centers = np.linspace(2.0, CUTOFF, 8)
    values = np.exp(-((d[:, None] - centers) ** 2) / 0.3)
    slopes = -2 * (d[:, None] - centers) / 0.3 * values
    energy = np.append(values.sum(axis=0) / 2, len(atoms))  # every pair is in the list twice
    forces = np.zeros((len(atoms), 3, len(energy)))
    directions = D / d[:, None]
    np.add.at(forces[:, :, :-1], i, directions[:, :, None] * slopes[:, None, :])
    return energy, forces.reshape(3 * len(atoms), -1)


def fitted_members(structures: Sequence[Atoms], rng: np.random.Generator) -> np.ndarray:
    """Fit every member to energies and forces of half of the structures: weights (k, N_R)."""
    inputs, targets = [], []
    for atoms in structures:
        energy, forces = pair_functions(atoms)
        inputs.append(np.vstack([energy, forces]))
        targets.append(np.append(atoms.info["REF_energy"], atoms.arrays["REF_forces"]))
    members = []
    for _ in range(N_MEMBERS):
        own = rng.permutation(len(structures))[: len(structures) // 2]
        rows, y = np.vstack([inputs[s] for s in own]), np.concatenate([targets[s] for s in own])
        members.append(np.linalg.lstsq(rows, y, rcond=1e-6)[0])
    return np.stack(members, axis=1)


def store_predictions(atoms: Atoms, weights: np.ndarray) -> None:
    """Store energies and forces of all members, and their mean, as a user of MACE would."""
    energy, forces = pair_functions(atoms)
    energies = energy @ weights
    by_member = (forces @ weights).reshape(len(atoms), 3, N_MEMBERS).transpose(0, 2, 1)
    atoms.info |= {
        "energy": energies.mean(),
        "energy_var": energies.var(ddof=1),
        "energy_comm": energies,
    }
    atoms.arrays["forces"] = by_member.mean(axis=1)
    atoms.arrays["forces_comm"] = by_member.reshape(len(atoms), -1)


if __name__ == "__main__":
    main()
