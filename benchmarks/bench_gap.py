"""Training against gap_fit, the program that fits Gaussian approximation potentials.

Both are commands that read the same file of molecules; wall time and peak memory are those of the
whole command, from its start to the model on disk. gap_fit trains one model without uncertainties;
qualms chooses its noise, trains 16 members, calibrates them and saves all of it. gap_fit gets what
suits it best: see `SIGMA` and `shares`.

gap_fit is part of the package quippy-ase. Version 0.9.14 is the newest whose wheels are compiled
with optimisation and for several threads; those of 0.10 are not (``-O0``, no OpenMP) and would make
a slow peer. QUALMS_GAP_FIT may name another executable, with ``quip`` beside it, which evaluates
its models. Run this file alone, with a divisor of all sizes, for a quick table.
"""

from __future__ import annotations

import csv
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import ase.io
import numpy as np
import yaml
from ase import Atoms
from ase.data import chemical_symbols

from benchmarks.memory import Measured, measure
from qualms.data import qm9

N_TRAIN, N_TEST, N_REPRESENTATIVES, N_THREADS = 1_000, 1_000, 1_000, 2
VERSION = "0.9.14"
TARGET = "atomization_energy"
FASTER = 25
SPECIES = (1, 6, 7, 8, 9)
#: Regularisation of gap_fit, for a kernel of amplitude 1 eV. Test errors, meV per atom: 16.0, 16.5
#: and 16.2 with 0.0003, 0.001 and 0.003 eV per atom (equal shares of the species), 12.0 with 0.01
#: (nearly the shares of today), 9.7 with 0.03 and 9.9 with 0.06.
SIGMA = 0.03
SOAP = (
    "soap cutoff=5 cutoff_transition_width=0.5 n_max=6 l_max=5 atom_sigma=0.3 zeta=2 delta=1 "
    "covariance_type=dot_product sparse_method=cur_points"
)
#: Settings of qualms, by the name of the row.
SETTINGS: dict[str, dict[str, Any]] = {
    "organic": {"preset": "organic", "cutoff": 5},
    "as gap_fit": {
        "preset": "organic",
        "cutoff": 5,
        "radial_scaling": None,
        "gaussian_width": 0.3,
    },
}
ENVIRONMENT = {name: str(N_THREADS) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} | {
    "OMP_STACKSIZE": "64M"
}  # without it gap_fit warns


class Case(NamedTuple):
    """What one program took, and its test error in meV per atom."""

    measured: Measured
    mae: float


def gap_fit() -> Path | None:
    """Return the executable, if there is a fast one.

    The package is found but not imported: it was made for NumPy 1, of which its executables know
    nothing.
    """
    given = os.environ.get("QUALMS_GAP_FIT")
    if given:
        return Path(given)
    try:
        installed = distribution("quippy-ase")
    except PackageNotFoundError:
        return None
    path = Path(str(installed.locate_file("quippy/gap_fit")))
    return path if installed.version == VERSION and path.exists() else None


def write_molecules(path: Path, molecules: Sequence[Atoms]) -> None:
    """Write molecules in boxes: gap_fit finds no energies in a file without a lattice."""
    boxed = []
    for atoms in molecules:
        copy = Atoms(atoms.numbers, atoms.positions, info={TARGET: atoms.info[TARGET]})
        copy.center(vacuum=10.0)
        boxed.append(copy)
    ase.io.write(path, boxed, format="extxyz")


def energies(molecules: Sequence[Atoms]) -> np.ndarray:
    """Return the labels, in eV."""
    return np.array([atoms.info[TARGET] for atoms in molecules])


def error(predicted: Sequence[float], molecules: Sequence[Atoms]) -> float:
    """Return the mean absolute error, in meV per atom."""
    sizes = [len(atoms) for atoms in molecules]
    return 1e3 * float(np.mean(np.abs(np.array(predicted) - energies(molecules)) / sizes))


# --- gap_fit ---


def composition(molecules: Sequence[Atoms]) -> np.ndarray:
    """Return how many atoms of each species the molecules have."""
    return np.array([[np.sum(atoms.numbers == z) for z in SPECIES] for atoms in molecules])


def atomic_energies(molecules: Sequence[Atoms]) -> str:
    """Return energies by element for gap_fit: least squares in the composition, as in qualms."""
    e0 = np.linalg.lstsq(composition(molecules), energies(molecules), rcond=None)[0]
    pairs = zip(SPECIES, e0, strict=True)
    return ":".join(f"{chemical_symbols[z]}:{value:.6f}" for z, value in pairs)


def shares(molecules: Sequence[Atoms], n_representatives: int) -> list[int]:
    """Return the representatives of each species, in proportion to the root of its environments.

    More accurate than equal numbers, the default of gap_fit.
    """
    roots = np.sqrt(composition(molecules).sum(axis=0))
    return np.maximum(np.rint(n_representatives * roots / roots.sum()), 1).astype(int).tolist()


def gap_command(
    executable: Path, folder: Path, molecules: Sequence[Atoms], n_representatives: int
) -> list[str]:
    """Return the command that trains a GAP on train.xyz and writes gap.xml."""
    neighbours = f"n_species={len(SPECIES)} species_Z={{{{{' '.join(map(str, SPECIES))}}}}}"
    numbers = shares(molecules, n_representatives)
    descriptors = [
        f"{SOAP} n_sparse={n} add_species=F {neighbours} Z={z}"
        for z, n in zip(SPECIES, numbers, strict=True)
    ]
    return [
        str(executable),
        f"at_file={folder / 'train.xyz'}",
        f"gap={{{' : '.join(descriptors)}}}",
        f"e0={{{atomic_energies(molecules)}}}",
        f"energy_parameter_name={TARGET}",
        f"default_sigma={{{SIGMA} 0 0 0}}",
        f"gp_file={folder / 'gap.xml'}",
        "do_copy_at_file=F",
        "rnd_seed=1",
    ]


def run_gap(
    executable: Path,
    folder: Path,
    known: Sequence[Atoms],
    new: Sequence[Atoms],
    n_representatives: int,
) -> Case:
    """Train and test a GAP."""
    command = gap_command(executable, folder, known, n_representatives)
    trained = measure(command, env=ENVIRONMENT)
    found = re.search(r"target energies .* found:\s*(\d+)", trained.output)
    if found is None or int(found.group(1)) != len(known):
        raise RuntimeError(f"gap_fit did not find the energies:\n{trained.output[-2000:]}")
    evaluate = [
        executable.with_name("quip"),
        "E=T",
        f"atoms_filename={folder / 'test.xyz'}",
        f"param_filename={folder / 'gap.xml'}",
    ]
    printed = measure(evaluate, env=ENVIRONMENT).output
    predicted = re.findall(r"^AT .*\benergy=(\S+)", printed, flags=re.MULTILINE)
    return Case(trained, error([float(value) for value in predicted], new))


def gap_version(output: str) -> str:
    """Return version and number of threads of gap_fit."""
    version = re.search(r"git version\s+\S*?,(\S+)", output)
    threads = re.search(r"OpenMP parallelisation with\s+(\d+)\s+threads", output)
    how = f"OpenMP, {threads.group(1)} threads" if threads else "not compiled for threads"
    return f"{version.group(1) if version else 'unknown version'}, {how}"


# --- qualms ---


def run_qualms(
    folder: Path, name: str, new: Sequence[Atoms], n_representatives: int, repeats: int = 3
) -> Case:
    """Train some times, of which the median counts, and test a model of qualms."""
    command = Path(sys.executable).with_name("qualms")
    config, model, output = folder / "config.yaml", folder / "model.safetensors", folder / "out.csv"
    config.write_text(yaml.safe_dump({"representation": SETTINGS[name]}))
    threads = ["--threads", str(N_THREADS), "--quiet", "--force"]
    train = [command, "train", folder / "train.xyz", "--target", TARGET, "--config", config]
    train += ["--representatives", str(n_representatives), "--output", model, *threads]
    turns = [measure(train, env=ENVIRONMENT) for _ in range(repeats)]
    measure([command, "predict", model, folder / "test.xyz", "--output", output, *threads])
    with output.open(newline="") as file:
        predicted = [float(row[TARGET]) for row in csv.DictReader(file)]
    median = sorted(turns, key=lambda turn: turn.seconds)[repeats // 2]
    return Case(median, error(predicted, new))


# --- the table ---


def row(program: str, hypers: str, case: Case, gap: Case) -> list[Any]:
    """Return the cells of one program."""
    faster = gap.measured.seconds / case.measured.seconds
    return [
        program,
        hypers,
        f"{case.measured.seconds:.1f}",
        "–" if case is gap else f"{faster:.0f} × (target ≥ {FASTER} ×)",
        f"{case.measured.peak:.0f}",
        f"{case.mae:.2f}",
        "–" if case is gap else f"{case.mae / gap.mae:.2f} × (target ≤ 1 ×)",
    ]


def run(divisor: int = 1) -> list[dict[str, Any]]:
    """Train both on the same molecules; `divisor` makes everything smaller."""
    executable = gap_fit()
    if executable is None:
        print(f"gap_fit is not installed (pip install quippy-ase=={VERSION}): skipped")
        return []
    molecules = qm9()
    known, new = molecules[: N_TRAIN // divisor], molecules[N_TRAIN:][: N_TEST // divisor]
    M = N_REPRESENTATIVES // divisor
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_molecules(folder / "train.xyz", known)
        write_molecules(folder / "test.xyz", new)
        ours = {label: run_qualms(folder, label, new, M) for label in SETTINGS}
        gap = run_gap(executable, folder, known, new, M)
    rows = [row("gap_fit", "its own", gap, gap)]
    rows += [row("qualms, 16 members, calibrated", label, ours[label], gap) for label in SETTINGS]
    return [
        {
            "title": f"gap_fit: {len(known)} molecules of QM9, M = {M}, {N_THREADS} cores, "
            f"tested on {len(new)} others",
            "columns": COLUMNS,
            "rows": rows,
            "notes": [f"gap_fit {gap_version(gap.measured.output)}.", *NOTES],
        }
    ]


COLUMNS = [
    "program",
    "hyper-parameters",
    "training, s",
    "faster by",
    "peak memory, MiB",
    "MAE, meV/atom",
    "of gap_fit's",
]
NOTES = [
    "Whole commands, from reading the file to the saved model: one run of gap_fit, the median of "
    "three of qualms. Peak memory: of all processes.",
    "All: cutoff 5 Å, 6 radial functions, l ≤ 5, Gaussians of 0.3 Å, ζ = 2, least squares in the "
    "composition subtracted. organic: qualms's preset, with radial scaling; as gap_fit: without.",
    f"gap_fit: cur_points, σ = {SIGMA} eV per atom for a kernel of amplitude 1 eV, the best of six "
    "for the test error.",
]


if __name__ == "__main__":
    for table in run(*map(int, sys.argv[1:])):
        print("\n" + table["title"], table["columns"], *table["rows"], *table["notes"], sep="\n")
