"""Where the hyper-parameters of the presets come from: one changed at a time, and all presets.

Molecules come from the file that the environment variable QUALMS_QM9 names, or from the package
qm9pack; crystals with shieldings of hydrogen (``CS_total`` in ppm) from the extended XYZ file that
QUALMS_CSD names, and without it there is no table of them. Errors are those of structures that the
model has not seen: training and test structures are the same for all rows.

Run this file alone, with a divisor of all sizes, for tables of a small problem on the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms

from benchmarks.bench_atomistic import timed
from paper.csd import csd
from qualms import AtomisticModel
from qualms.atomistic.evaluation import evaluate
from qualms.atomistic.structures import read_frames
from qualms.data import qm9
from qualms.features.soap import PRESETS, make_soap

SEED = 0
#: One change at a time; what a preset has already is left out.
CHANGES: dict[str, dict[str, Any]] = {
    "cutoff 4 Å": {"cutoff": 4.0},
    "cutoff 6 Å": {"cutoff": 6.0},
    "Gaussians of 0.2 Å": {"gaussian_width": 0.2},
    "Gaussians of 0.4 Å": {"gaussian_width": 0.4},
    "6 radial functions, l ≤ 5": {"n_radial": 6, "l_max": 5},
    "8 radial functions, l ≤ 7": {"n_radial": 8, "l_max": 7},
    "no radial scaling": {"radial_scaling": None},
    "radial scaling of 2 Å, m = 4": {"radial_scaling": {"scale": 2.0, "exponent": 4.0}},
    "radial scaling of 2 Å, m = 6": {"radial_scaling": {"scale": 2.0, "exponent": 6.0}},
    "radial scaling of 3 Å, m = 4": {"radial_scaling": {"scale": 3.0, "exponent": 4.0}},
    "radial scaling of 3 Å, m = 6": {"radial_scaling": {"scale": 3.0, "exponent": 6.0}},
    "ζ = 1": {"exponent": 1.0},
    "ζ = 3": {"exponent": 3.0},
    "ζ = 4": {"exponent": 4.0},
    "3 Å and 5 Å": {"scales": [{"cutoff": 3.0}, {"cutoff": 5.0}]},
    "2000 principal components": {"compression": {"method": "pca", "n_features": 2000}},
}


_TOGETHER: dict[str, Any] = {
    "radial_scaling": {"scale": 3.0, "exponent": 4.0},
    "compression": {"method": "pca", "n_features": 2000},
}
#: Changes of several hyper-parameters at a time: cutoffs, each with the width of its Gaussians.
TOGETHER: dict[str, dict[str, Any]] = {
    " and ".join(f"{cutoff:g} Å, Gaussians of {width} Å" for cutoff, width in scales)
    + ", scaling of 3 Å, m = 4, 2000 components": {
        "scales": [
            {"cutoff": cutoff, "gaussian_width": width, "n_radial": 8, "l_max": 7}
            for cutoff, width in scales
        ],
        **_TOGETHER,
    }
    for scales in (
        [(5.0, 0.3)],
        [(6.0, 0.3)],
        [(6.0, 0.4)],
        [(7.0, 0.4)],
        [(3.5, 0.3), (6.0, 0.4)],
        [(4.0, 0.3), (7.0, 0.5)],
    )
}
#: What is used where siblings in the same crystal are known.
OWN = next(label for label in TOGETHER if label.startswith("4 Å"))
#: What is compared there: fewer, and some together.
WITH_SIBLINGS: dict[str, dict[str, Any]] = {
    **{
        label: CHANGES[label]
        for label in (
            "cutoff 6 Å",
            "Gaussians of 0.4 Å",
            "radial scaling of 3 Å, m = 4",
            "ζ = 3",
            "2000 principal components",
        )
    },
    **TOGETHER,
}


@dataclass(frozen=True)
class Problem:
    """Data and what is asked of them."""

    name: str
    train: Sequence[Atoms]
    test: Sequence[Atoms]
    settings: dict[str, Any]
    factor: float  # from the units of the target to those shown
    units: str


def molecules(divisor: int) -> Problem:
    """Atomisation energies of QM9."""
    n_train, n_test = 4_000 // divisor, 1_000 // divisor
    found = qm9(os.environ.get("QUALMS_QM9", "qm9pack"), n=n_train + n_test, seed=SEED)
    settings = {"target": "atomization_energy", "n_representatives": 1_500 // divisor}
    return Problem("QM9", found[:n_train], found[n_train:], settings, 1e3, "meV/atom")


def crystals(divisor: int) -> Problem | None:
    """Shieldings of hydrogen in crystals, if there are any; no crystal is on both sides."""
    path = os.environ.get("QUALMS_CSD")
    if not path:
        return None
    found = read_frames(path)
    order = np.random.default_rng(SEED).permutation(len(found))[: 250 // divisor]
    n_train = 4 * len(order) // 5
    chosen = [found[i] for i in order]
    settings = {
        "target": "CS_total",
        "kind": "atomic",
        "species": "H",
        "n_representatives": 1_500 // divisor,
    }
    return Problem(
        "¹H shieldings of crystals", chosen[:n_train], chosen[n_train:], settings, 1.0, "ppm"
    )


def atoms_of_crystals(divisor: int) -> Problem | None:
    """Shieldings of hydrogen, split over atoms as the paper does: siblings are on both sides.

    There are fewer crystals than in the paper, but as many labelled siblings in each of them: this
    is what decides on hyper-parameters.
    """
    path = os.environ.get("QUALMS_CSD")
    if not path:
        return None
    found = csd(path)
    rng = np.random.default_rng(SEED)
    train = [found[i].copy() for i in rng.permutation(len(found))[: 130 // divisor]]
    test = [atoms.copy() for atoms in train]
    for known, new in zip(train, test, strict=True):
        is_new = rng.random(len(known)) > 0.7
        known.arrays["shielding"][is_new] = np.nan
        new.arrays["shielding"][~is_new] = np.nan
    settings = {
        "target": "shielding",
        "kind": "atomic",
        "species": "H",
        "n_representatives": 2_700 // divisor,
        "resample": "atoms",
        "subsample": 0.75,
    }
    return Problem("¹H shieldings, split over atoms", train, test, settings, 1.0, "ppm")


def row(problem: Problem, label: str, representation: Any) -> list[Any]:
    """Train and evaluate one representation."""
    model = AtomisticModel(**problem.settings, representation=representation, seed=SEED)
    seconds, _ = timed(lambda: model.fit(problem.train))
    own = evaluate(model, problem.test)["energy"].scores["student (out-of-bag)"]
    return [
        label,
        f"{problem.factor * own.rmse:.4g}",
        f"{problem.factor * own.mae:.4g}",
        f"{own.log_likelihood:.3f}",
        f"{own.coverage_68:.1%}",
        f"{seconds:.0f}",
    ]


def table(
    problem: Problem,
    preset: str,
    changes: Mapping[str, Mapping[str, Any]],
    presets: Iterable[str] = PRESETS,
) -> dict[str, Any]:
    """Compare presets, by default all, and changes of one of them, on one problem."""
    soap = make_soap(preset)
    rows = [row(problem, name, name) for name in presets]
    for label, change in changes.items():
        changed = make_soap(preset, **change)
        if changed != soap:
            rows.append(row(problem, f"{preset}, {label}", changed))
    n_rows = f"{len(problem.train)} structures, M = {problem.settings['n_representatives']}"
    return {
        "title": f"Presets: {problem.name}, {n_rows}, tested on {len(problem.test)} others",
        "columns": [
            "representation",
            f"RMSE, {problem.units}",
            f"MAE, {problem.units}",
            "log likelihood",
            "within σ",
            "training, s",
        ],
        "rows": rows,
        "notes": [
            "One split of the data and one seed: differences of a few per cent mean nothing. "
            "Log likelihood, per point and in the units of the target, and σ: student "
            "calibration, out-of-bag."
        ],
    }


def tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Measure one thing after the other; `divisor` makes them small."""
    yield table(molecules(divisor), "organic", CHANGES)
    shieldings = crystals(divisor)
    if shieldings is not None:
        yield table(shieldings, "nmr", CHANGES)


def sibling_tables(divisor: int = 1) -> Iterator[dict[str, Any]]:
    """Compare representations of atoms whose siblings are known, and the one used without them."""
    by_atoms, new = atoms_of_crystals(divisor), crystals(divisor)
    if by_atoms is not None and new is not None:
        yield table(by_atoms, "nmr", WITH_SIBLINGS)
        yield table(new, "nmr", {OWN: TOGETHER[OWN]}, presets=["nmr"])


def run() -> list[dict[str, Any]]:
    """Measure everything but what follows."""
    return list(tables())


def run_siblings() -> list[dict[str, Any]]:
    """Measure representations in a split over atoms."""
    return list(sibling_tables())


if __name__ == "__main__":
    divisor = [int(argument) for argument in sys.argv[1:]]
    for found in (*tables(*divisor), *sibling_tables(*divisor)):
        print("\n" + found["title"], found["columns"], *found["rows"], sep="\n", flush=True)
