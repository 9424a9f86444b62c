"""Forces and their uncertainties, with gap_fit beside them, at equal numbers of sparse points.

Azobenzene comes from the NPZ file of revised MD17 that QUALMS_AZOBENZENE names
(``rmd17_azobenzene_train_01.npz``, with the test file beside it); 3BPA from the extended XYZ file
that QUALMS_3BPA names (``3bpa_300K.xyz.gz``, with ``3bpa_mixedT.xyz.gz`` and
``3bpa_isolated_atoms.xyz`` beside it). Without them there is nothing to measure. QUALMS_GAP_FIT may
name an executable: see `benchmarks.bench_gap`.

Training and prediction are commands, so that time and peak memory are those of a process of their
own. Run this file alone, with a divisor of all sizes, for small tables on the terminal.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import yaml
from ase import Atoms
from ase.data import chemical_symbols
from ase.units import kcal, mol

from benchmarks.bench_gap import ENVIRONMENT, N_THREADS, gap_fit
from benchmarks.memory import Measured, measure
from qualms.atomistic.structures import read_frames

#: What gap_fit can do in the memory of a small machine: geometries, and numbers of representatives
#: by problem.
N_GAP = 200
SIZES = {"azobenzene": (250, 500, 1000), "3BPA": (500,)}
MEMORY = "8GB"
#: The features of gap_fit.
AS_GAP = {"preset": "organic", "smoothing": 0.5, "radial_scaling": None, "compression": None}


@dataclass(frozen=True)
class Problem:
    """A training set, and test sets by name; energies in eV, forces in eV/Å."""

    name: str
    train: list[Atoms]
    tests: dict[str, list[Atoms]]
    atoms: dict[str, float]  # energies of isolated atoms


# --- data ---


def with_labels(numbers: Any, positions: Any, energy: float, forces: Any) -> Atoms:
    """Return a structure whose labels ASE leaves where they are, in a box as gap_fit wants it."""
    atoms = Atoms(numbers, positions, info={"REF_energy": float(energy)})
    atoms.arrays["REF_forces"] = np.array(forces)
    atoms.center(vacuum=10.0)
    return atoms


def azobenzene(divisor: int) -> Problem | None:
    """Return the first split of revised MD17."""
    if "QUALMS_AZOBENZENE" not in os.environ:
        return None
    path = Path(os.environ["QUALMS_AZOBENZENE"])
    sets = []
    for kind in ("train", "test"):
        with np.load(path.with_name(path.name.replace("train", kind))) as data:
            unit = kcal / mol
            rows = zip(data["coords"], unit * data["energies"], unit * data["forces"], strict=True)
            sets.append([with_labels(data["nuclear_charges"], *row) for row in rows])
    train, test = (frames[: len(frames) // divisor] for frames in sets)
    return Problem("azobenzene", train, {"test": test}, {})


def three_bpa(divisor: int) -> Problem | None:
    """Return 3BPA: trained at 300 K, tested at 300 K and at a mixture of temperatures."""
    if "QUALMS_3BPA" not in os.environ:
        return None
    path = Path(os.environ["QUALMS_3BPA"])

    def read(name: str) -> list[Atoms]:
        frames = read_frames(path.with_name(name))
        return [
            with_labels(a.numbers, a.positions, a.get_potential_energy(), a.get_forces())
            for a in frames
        ]

    cold, mixed = read(path.name), read(path.name.replace("300K", "mixedT"))
    alone = read_frames(path.with_name("3bpa_isolated_atoms.xyz"))
    energies = {str(a.symbols): float(a.get_potential_energy()) for a in alone}
    train, rest = cold[: 400 // divisor], cold[400:]
    tests = {"300 K": rest[: 100 // divisor], "mixed T": mixed[: 500 // divisor]}
    return Problem("3BPA", train, tests, energies)


# --- training ---


@dataclass(frozen=True)
class Predicted:
    """Energies (n,), forces (n_atoms, 3), and perhaps their uncertainties."""

    energies: Any
    forces: Any
    energies_std: Any = None
    forces_std: Any = None


def on_cores(n: int) -> dict[str, str]:
    """Return the environment of a command on so many cores."""
    return ENVIRONMENT | {name: str(n) for name in ENVIRONMENT if name.endswith("NUM_THREADS")}


def write(path: Path, frames: Sequence[Atoms]) -> None:
    """Write structures with their labels."""
    ase.io.write(path, list(frames), format="extxyz")


def run_qualms(
    folder: Path,
    problem: Problem,
    n_train: int,
    *,
    forces: bool = True,
    threads: int = N_THREADS,
    **settings: Any,
) -> tuple[Measured, dict[str, Predicted]]:
    """Train on the first structures, with or without forces, and predict all test sets."""
    command = Path(sys.executable).with_name("qualms")
    config, model = folder / "config.yaml", folder / "model.safetensors"
    settings = {"target": "energy", **settings}
    if forces:
        settings["forces"] = "forces"
    if problem.atoms:
        settings.setdefault("baseline", problem.atoms)
    config.write_text(yaml.safe_dump(settings))
    write(folder / "train.xyz", problem.train[:n_train])
    common, environment = ["--threads", str(threads), "--quiet", "--force"], on_cores(threads)
    train = [command, "train", folder / "train.xyz", "--config", config]
    trained = measure([*train, "--memory", MEMORY, "-o", model, *common], env=environment)
    found = {}
    for name, frames in problem.tests.items():
        write(folder / "test.xyz", frames)
        output = folder / "out.npz"
        predict = [command, "predict", model, folder / "test.xyz", "-o", output]
        measure([*predict, *(["--forces"] if forces else []), *common], env=environment)
        target = settings["target"]
        with np.load(output) as arrays:
            keys = (target, "forces", f"{target}_uncertainty", "forces_uncertainty")
            found[name] = Predicted(*(arrays.get(key) for key in keys))
    return trained, found


def errors(frames: Sequence[Atoms], predicted: Predicted) -> list[str]:
    """Return MAE and RMSE of energies (meV) and forces (meV/Å), and coverages if there are any."""
    reference = np.array([atoms.info["REF_energy"] for atoms in frames])
    forces = np.concatenate([atoms.arrays["REF_forces"] for atoms in frames])
    cells = []
    for z in (predicted.energies - reference, predicted.forces - forces):
        cells += [f"{1e3 * np.mean(np.abs(z)):.1f}", f"{1e3 * np.sqrt(np.mean(z**2)):.1f}"]
    if predicted.forces_std is None:
        return [*cells, "–", "–"]
    for z, std in (
        (predicted.energies - reference, predicted.energies_std),
        (predicted.forces - forces, predicted.forces_std),
    ):
        inside = [100 * np.mean(np.abs(z) < k * std) for k in (1.0, 1.96)]
        cells.append(f"{inside[0]:.0f} / {inside[1]:.0f}")
    return cells


ERRORS = [
    "energy MAE, meV",
    "RMSE",
    "force MAE, meV/Å",
    "RMSE",
    "coverage of energies, %",
    "of forces, %",
]


# --- gap_fit ---

#: Regularisation of gap_fit: eV per atom, eV/Å. Force errors with 50 geometries of azobenzene and
#: M = 200, meV/Å: 247 so; 252 with 0.001, 0.1; 257 with 0.0005, 0.05 and with 0.0001, 0.01.
SIGMAS = "{0.0005 0.02 0 0}"


def gap_command(executable: Path, folder: Path, problem: Problem, n: int, M: int) -> list[str]:
    """Return the command that trains a GAP on energies and forces."""
    numbers = np.concatenate([atoms.numbers for atoms in problem.train[:n]])
    species, counts = np.unique(numbers, return_counts=True)
    shares = np.maximum(np.rint(M * counts / counts.sum()), 1).astype(int)
    neighbours = f"n_species={len(species)} species_Z={{{{{' '.join(map(str, species))}}}}}"
    soap = (
        "soap cutoff=5 cutoff_transition_width=0.5 n_max=6 l_max=5 atom_sigma=0.3 zeta=2 delta=0.5 "
        "covariance_type=dot_product sparse_method=cur_points"
    )
    parts = [
        f"{soap} n_sparse={m} add_species=F {neighbours} Z={z}"
        for z, m in zip(species, shares, strict=True)
    ]
    energies = problem.atoms or dict.fromkeys((chemical_symbols[z] for z in species), None)
    mean = np.mean([atoms.info["REF_energy"] / len(atoms) for atoms in problem.train[:n]])
    e0 = ":".join(f"{s}:{mean if e is None else e:.6f}" for s, e in energies.items())
    return [
        str(executable),
        f"at_file={folder / 'train.xyz'}",
        f"gap={{{' : '.join(parts)}}}",
        f"e0={{{e0}}}",
        "energy_parameter_name=REF_energy",
        "force_parameter_name=REF_forces",
        f"default_sigma={SIGMAS}",
        f"gp_file={folder / 'gap.xml'}",
        "do_copy_at_file=F",
        "rnd_seed=1",
    ]


def run_gap(
    executable: Path, folder: Path, problem: Problem, n: int, M: int, *, threads: int = N_THREADS
) -> tuple[Measured, dict[str, Predicted]]:
    """Train a GAP and predict all test sets."""
    write(folder / "train.xyz", problem.train[:n])
    environment = on_cores(threads)
    trained = measure(gap_command(executable, folder, problem, n, M), env=environment)
    found = {}
    for name, frames in problem.tests.items():
        write(folder / "test.xyz", frames)
        evaluate = [executable.with_name("quip"), "E=T", "F=T"]
        evaluate += [f"atoms_filename={folder / 'test.xyz'}"]
        evaluate += [f"param_filename={folder / 'gap.xml'}"]
        printed = measure(evaluate, env=environment).output
        found[name] = read_quip(printed)
    return trained, found


def read_quip(printed: str) -> Predicted:
    """Return what quip predicts: structures in extended XYZ, each line after ``AT``."""
    lines = [line.removeprefix("AT ") for line in printed.splitlines() if line.startswith("AT ")]
    text = "\n".join(re.sub(r":force:R:3", ":quip_force:R:3", line) for line in lines)
    text = re.sub(r"(?<=\s)energy=", "quip_energy=", text)
    frames = ase.io.read(StringIO(text), ":", format="extxyz")
    return Predicted(
        np.array([atoms.info["quip_energy"] for atoms in frames]),
        np.concatenate([atoms.arrays["quip_force"] for atoms in frames]),
    )


def gap_table(problem: Problem, executable: Path, divisor: int) -> dict[str, Any]:
    """Train both on the same structures with the same numbers of representatives."""
    n = min(N_GAP // divisor, len(problem.train))
    rows = []
    for M in (size // divisor for size in SIZES[problem.name]):

        def with_features(folder: Path, M: int = M, **given: Any) -> Any:
            return run_qualms(folder, problem, n, n_representatives=M, **given)

        programs: dict[str, Callable[[Path], tuple[Measured, dict[str, Predicted]]]] = {
            "gap_fit": lambda folder, M=M: run_gap(executable, folder, problem, n, M),
            "qualms, as gap_fit": lambda folder: with_features(folder, representation=AS_GAP),
            "qualms": with_features,
        }
        slowest = None
        for program, run_program in programs.items():
            with tempfile.TemporaryDirectory() as name:
                trained, found = run_program(Path(name))
            slowest = slowest or trained.seconds
            for test, predicted in found.items():
                cost = [f"{trained.seconds:.1f}", f"{slowest / trained.seconds:.1f} ×"]
                cells = errors(problem.tests[test], predicted)
                rows.append([M, program, test, *cost, f"{trained.peak:.0f}", *cells])
    return {
        "title": f"gap_fit: {n} geometries of {problem.name}, {N_THREADS} cores",
        "columns": [
            "M",
            "program",
            "test set",
            "training, s",
            "faster by",
            "peak memory, MiB",
            *ERRORS,
        ],
        "rows": rows,
        "notes": [
            "Whole commands. gap_fit trains one model without uncertainties; qualms chooses its "
            "noises, trains 16 members, draws 16 of the posterior and calibrates energies and "
            "forces.",
            "All: cutoff 5 Å with a transition of 0.5 Å, 6 radial functions, l ≤ 5, Gaussians of "
            f"0.3 Å, ζ = 2. gap_fit: cur_points, δ = 0.5 eV, σ = {SIGMAS} (eV per atom, eV/Å). "
            "qualms: preset organic, compressed; as gap_fit: all features, no radial scaling.",
        ],
    }


def tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Measure one thing after the other; `divisor` makes them small."""
    found = (azobenzene(divisor), three_bpa(divisor))
    executable = gap_fit()
    for problem in found if executable is not None else ():
        if problem is not None:
            yield gap_table(problem, executable, divisor)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return list(tables())


if __name__ == "__main__":
    for table in tables(*map(int, sys.argv[1:])):
        print("\n" + table["title"], table["columns"], *table["rows"], *table["notes"], sep="\n")
