"""The data sets of the paper, their splits, and the settings of their models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase import Atoms

from qualms.arrays import IntArray
from qualms.atomistic.settings import Settings, make_settings
from qualms.atomistic.structures import species_of
from qualms.data import qm9
from qualms.data.qm9 import is_archive
from qualms.errors import InputError

AnyPath = str | os.PathLike[str]
Scale = Literal["paper", "small"]
Split = Literal["atoms", "crystals"]

#: Training, validation and test points, and subsample sizes, of both data sets in the paper.
N_POINTS = (20_000, 5_000, 5_000)
SIZES = (1_000, 5_000, 10_000, 15_000, 18_000)
#: All sizes of a scale are those of the paper divided by this number.
DIVISORS: dict[Scale, int] = {"paper": 1, "small": 10}
#: SOAP of crystals, chosen with `python -m benchmarks presets siblings`. A longer cutoff helps if
#: other atoms of the same crystal are in the training set.
REPRESENTATIONS: dict[Split, dict[str, Any]] = {
    "atoms": {
        "preset": "nmr",
        "scales": [
            {"cutoff": 4.0, "gaussian_width": 0.3, "n_radial": 8, "l_max": 7},
            {"cutoff": 7.0, "gaussian_width": 0.5, "n_radial": 8, "l_max": 7},
        ],
        "radial_scaling": {"scale": 3.0, "exponent": 4.0},
        "compression": {"method": "pca", "n_features": 2_000},
    },
    "crystals": {"preset": "nmr"},
}
#: Share of the in-distribution structures that is held out of training on a shifted problem.
_HELD_OUT = 0.1
#: Molecules of each out-of-distribution set; fewest crystals of a shifted problem.
_N_SHIFTED, _FEWEST_CRYSTALS = 5_000, 20
_FEW_CRYSTALS = "Use more and smaller crystals, or a random split over atoms."


@dataclass(frozen=True)
class Problem:
    """A data set, split into training, validation and test sets.

    Each set has the labels of its own points only. In a split over atoms the same crystal may be in
    all three.
    """

    train: list[Atoms]
    validation: list[Atoms]
    test: list[Atoms]
    settings: Settings
    sizes: tuple[int, ...]  #: subsample sizes: labels, or structures if these are subsampled
    name: str = ""  #: qm9, csd-atoms or csd-crystals
    title: str = ""
    scale: Scale = "small"
    source: str = ""  #: name of the data file


@dataclass(frozen=True)
class ShiftedProblem:
    """A training set, and test sets of which all but the first are out of distribution."""

    trained_on: str
    train: list[Atoms]
    tests: Mapping[str, list[Atoms]]
    settings: Settings
    source: str


# --- QM9 ---


def qm9_settings(scale: Scale, seed: int = 0) -> Settings:
    """Return the settings of a model of atomisation energies per atom."""
    target = {"target": "atomization_energy_per_atom", "kind": "intensive", "units": "eV/atom"}
    n = {"n_representatives": 5_000 // DIVISORS[scale]}
    return make_settings({**target, "representation": "organic", **n, "seed": seed})


def qm9_problem(
    source: AnyPath,
    scale: Scale = "paper",
    seed: int = 0,
    *,
    uncharacterized: AnyPath | None = None,
) -> Problem:
    """Return atomisation energies per atom of QM9 with a random split.

    `source` and `uncharacterized` are those of `qualms.data.qm9`; the published archive requires
    the latter. `seed` is that of the split and of the model.
    """
    check_characterized(source, uncharacterized)
    n = [n // DIVISORS[scale] for n in N_POINTS]
    molecules = qm9(source, n=sum(n), seed=seed, uncharacterized=uncharacterized)
    return Problem(
        name="qm9",
        title="Atomisation energies of QM9",
        scale=scale,
        train=molecules[: n[0]],
        validation=molecules[n[0] : n[0] + n[1]],
        test=molecules[n[0] + n[1] :],
        settings=qm9_settings(scale, seed),
        sizes=tuple(n // DIVISORS[scale] for n in SIZES),
        source=Path(source).name,
    )


def check_characterized(source: AnyPath, uncharacterized: AnyPath | None) -> None:
    """Reject the archive of QM9 without the list of molecules that failed its consistency check."""
    if uncharacterized is None and is_archive(source):
        raise InputError(
            f"The archive {str(source)!r} has the 3,054 molecules that failed QM9's consistency "
            "check, too. Give their list, uncharacterized.txt, published with QM9, as "
            "`uncharacterized`.",
            parameter="data",
        )


def qm9_shift(
    source: AnyPath, scale: Scale = "paper", *, uncharacterized: AnyPath | None = None
) -> ShiftedProblem:
    """Train on molecules of at most 7 heavy atoms (8 at the small scale), test on larger ones."""
    check_characterized(source, uncharacterized)
    settings = qm9_settings(scale)
    rng = np.random.default_rng(settings.seed)
    molecules = qm9(source, uncharacterized=uncharacterized)
    heavy = np.array([np.count_nonzero(atoms.numbers > 1) for atoms in molecules])
    largest = 7 if scale == "paper" else 8
    small = rng.permutation(np.flatnonzero(heavy <= largest))
    n_held_out = int(_HELD_OUT * len(small))
    if n_held_out < 10:
        raise InputError(
            f"The data have {len(small)} molecules of at most {largest} heavy atoms; 100 are "
            "needed.",
            parameter="data",
        )
    chosen = {f"≤ {largest} heavy atoms, held out": small[:n_held_out]}
    for n in range(largest + 1, 10):
        of_size = rng.permutation(np.flatnonzero(heavy == n))
        chosen[f"{n} heavy atoms"] = of_size[: _N_SHIFTED // DIVISORS[scale]]
    return ShiftedProblem(
        trained_on=f"molecules of QM9 of at most {largest} heavy atoms",
        train=[molecules[i] for i in small[n_held_out:]],
        tests={label: [molecules[i] for i in which] for label, which in chosen.items()},
        settings=settings,
        source=Path(source).name,
    )


# --- crystals ---


def csd_settings(split: Split, scale: Scale, seed: int = 0) -> Settings:
    """Return the settings of a model of ¹H shieldings."""
    # At the small scale, compressing the features of two cutoffs would take most of the time.
    representation = REPRESENTATIONS[split if scale == "paper" else "crystals"]
    target = {"target": "shielding", "kind": "atomic", "species": "H", "units": "ppm"}
    resample = {"resample": "atoms" if split == "atoms" else "structures", "seed": seed}
    n = {"n_representatives": 10_000 // DIVISORS[scale]}
    return make_settings({**target, "representation": representation, **n, **resample})


def csd_problem(
    crystals: Sequence[Atoms],
    split: Split = "atoms",
    scale: Scale = "paper",
    seed: int = 0,
    *,
    source: str = "",
) -> Problem:
    """Return ¹H shieldings with a random split over atoms, as in the paper, or over crystals.

    `crystals` come from `paper.csd`. In a split over atoms most test atoms have near-copies
    in the training set. `source` is the name of the data file.
    """
    n = [n // DIVISORS[scale] for n in N_POINTS]
    rng = np.random.default_rng(seed)
    parts = _split(crystals, split, n, rng)
    train, validation, test = (_with_labels_of(crystals, part) for part in parts)
    labels = np.concatenate([atoms.arrays["shielding"] for atoms in train])
    if np.nanmax(labels) == np.nanmin(labels):
        message = f"All shieldings of the data are {np.nanmax(labels):g}: nothing can be learned."
        raise InputError(message, parameter="data")
    sizes = tuple(n // DIVISORS[scale] for n in SIZES)
    return Problem(
        name=f"csd-{split}",
        title=f"¹H shieldings of CSD-1000R, split over {split}",
        scale=scale,
        train=train,
        validation=validation,
        test=test,
        settings=csd_settings(split, scale, seed),
        sizes=sizes if split == "atoms" else _in_crystals(sizes, train),
        source=source,
    )


def csd_shift(
    rattled: Sequence[Atoms], relaxed: Sequence[Atoms], scale: Scale = "paper", *, source: str = ""
) -> ShiftedProblem:
    """Train on rattled crystals, test on other crystals that are relaxed; `source` names these.

    Crystals with elements that no training crystal has are left out.
    """
    settings = csd_settings("crystals", scale)
    rng = np.random.default_rng(settings.seed)
    n_rattled = max(len(rattled) // DIVISORS[scale], _FEWEST_CRYSTALS)
    mixed = [rattled[i] for i in rng.permutation(len(rattled))[:n_rattled]]
    n_held_out = max(int(_HELD_OUT * len(mixed)), 1)
    train = mixed[n_held_out:]
    species = set(species_of(train))
    held_out, others = (
        [atoms for atoms in part if species >= set(atoms.numbers.tolist())]
        for part in (mixed[:n_held_out], relaxed)
    )
    if not held_out or not others:
        message = "No crystal in `relaxed` has the elements of the training set alone."
        raise InputError(message, parameter="relaxed")
    n_relaxed = max(len(relaxed) // DIVISORS[scale], _FEWEST_CRYSTALS)
    new = [others[i] for i in rng.permutation(len(others))[:n_relaxed]]
    tests = {"rattled crystals, held out": held_out, "relaxed crystals": new}
    return ShiftedProblem("rattled crystals", train, tests, settings, source)


def _in_crystals(sizes: Sequence[int], train: Sequence[Atoms]) -> tuple[int, ...]:
    """Return subsample sizes in crystals that are the same shares of the training set."""
    n, n_labels = len(train), len(_labelled_atoms(train))
    in_crystals = tuple(max(round(size * n / n_labels), 2) for size in sizes)
    if any(a >= b for a, b in pairwise([*in_crystals, n])):
        raise InputError(
            f"{n} training crystals are too few: subsamples would have "
            f"{', '.join(map(str, in_crystals))} of them. {_FEW_CRYSTALS}",
            parameter="data",
        )
    return in_crystals


def _split(
    crystals: Sequence[Atoms], split: Split, n: Sequence[int], rng: np.random.Generator
) -> list[IntArray]:
    """Return (structure, atom) of hydrogen atoms, n[i] of them in part i.

    They are random, or all of random crystals; then about n[i].
    """
    places = _labelled_atoms(crystals)
    if len(places) < (1.0 if split == "atoms" else 0.95) * sum(n):
        message = f"The data have {len(places)} ¹H shieldings; at least {sum(n)} are needed."
        raise InputError(message, parameter="data")
    if split == "atoms":
        return np.split(places[rng.permutation(len(places))[: sum(n)]], np.cumsum(n)[:-1])
    order = rng.permutation(len(crystals))
    total = np.cumsum(np.bincount(places[:, 0], minlength=len(order))[order])
    edges = np.searchsorted(total, np.cumsum(n)).clip(max=len(order) - 1) + 1
    chosen = np.split(order[: edges[-1]], edges[:-1])
    parts = [places[np.isin(places[:, 0], part)] for part in chosen]
    if not all(map(len, parts)):
        raise InputError(
            f"{len(crystals)} crystals are too few for separate training, validation and test "
            f"sets. {_FEW_CRYSTALS}",
            parameter="data",
        )
    return parts


def _labelled_atoms(frames: Sequence[Atoms]) -> IntArray:
    """Return (structure, atom) of all hydrogen atoms with a shielding: (n, 2)."""
    masks = [(a.numbers == 1) & np.isfinite(a.arrays["shielding"]) for a in frames]
    places = [(s, i) for s, mask in enumerate(masks) for i in np.flatnonzero(mask)]
    return np.array(places, dtype=np.intp).reshape(-1, 2)


def _with_labels_of(crystals: Sequence[Atoms], places: IntArray) -> list[Atoms]:
    """Return copies of the crystals that keep the labels of the given (structure, atom) only."""
    labelled = []
    for structure in np.unique(places[:, 0]):
        atoms = crystals[structure].copy()
        is_labelled = np.isin(np.arange(len(atoms)), places[places[:, 0] == structure, 1])
        atoms.arrays["shielding"] = np.where(is_labelled, atoms.arrays["shielding"], np.nan)
        labelled.append(atoms)
    return labelled
