"""The two data sets of the paper, divided as it divides them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from ase import Atoms

from qualms.arrays import IntArray
from qualms.atomistic.settings import Settings, make_settings
from qualms.atomistic.structures import data_hash
from qualms.atomistic.training import run_key
from qualms.data import qm9
from qualms.data.qm9 import is_archive
from qualms.errors import InputError
from qualms.reproduce.published import SIZES, SPLIT

Scale = Literal["paper", "small"]
Split = Literal["atoms", "crystals"]
#: What all sizes are divided by.
DIVISORS: dict[Scale, int] = {"paper": 1, "small": 10}
#: How crystals are represented: see `python -m benchmarks presets siblings`. Where siblings of an
#: atom in its own crystal are known, it pays to see farther, and the more smoothly the farther.
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
_HYDROGEN = 1


@dataclass(frozen=True)
class Problem:
    """Data, divided, and what is to be done with them.

    Attributes
    ----------
    name : {"qm9", "csd-atoms", "csd-crystals"}
    title : str
    scale : {"paper", "small"}
    train, validation, test : list of Atoms
        With labels of their own points alone: the same crystal may be in all three, with different
        atoms.
    settings : Settings
    sizes : tuple of int
        Of sub-samples.
    source : str
        Where the data come from.
    left_out : str
        List of what was left out of them, by its file name; empty if there is none.
    """

    name: str
    title: str
    scale: Scale
    train: list[Atoms]
    validation: list[Atoms]
    test: list[Atoms]
    settings: Settings
    sizes: tuple[int, ...]
    source: str
    left_out: str = ""

    @cached_property
    def digest(self) -> str:
        """Of all structures and labels, as they are divided."""
        target, per_atom = self.settings.target, self.settings.per_atom
        return run_key(
            *(
                data_hash(part, [a.arrays[target] if per_atom else a.info[target] for a in part])
                for part in (self.train, self.validation, self.test)
            )
        )


def qm9_settings(scale: Scale, seed: int = 0) -> Settings:
    """Return how atomisation energies per atom are learned."""
    return make_settings(
        {
            "target": "atomization_energy_per_atom",
            "kind": "intensive",
            "n_representatives": 5_000 // DIVISORS[scale],
            "units": "eV/atom",
            "seed": seed,
        }
    )


def check_characterized(
    source: str | os.PathLike[str], uncharacterized: str | os.PathLike[str] | None
) -> None:
    """Refuse QM9's archive without the list of what failed its consistency check."""
    if uncharacterized is None and is_archive(source):
        raise InputError(
            "data",
            f"'{source}'",
            "the list of the 3,054 molecules of the archive that failed its consistency check, too",
            "Leave them out with --uncharacterized FILE: uncharacterized.txt, published with it.",
        )


def qm9_problem(
    source: str | os.PathLike[str],
    scale: Scale = "paper",
    seed: int = 0,
    *,
    uncharacterized: str | os.PathLike[str] | None = None,
) -> Problem:
    """Return atomisation energies per atom of QM9, drawn and divided at random.

    Parameters
    ----------
    source : str or path
        As `qualms.data.qm9` takes it.
    scale : {"paper", "small"}
    seed : int
        Of everything that is random.
    uncharacterized : str or path, optional
        List of molecules to leave out; the archive must have one.
    """
    check_characterized(source, uncharacterized)
    train, validation, test = (n // DIVISORS[scale] for n in SPLIT)
    n = train + validation + test
    molecules = qm9(source, n=n, seed=seed, uncharacterized=uncharacterized)
    return Problem(
        name="qm9",
        title="Atomisation energies of QM9",
        scale=scale,
        train=molecules[:train],
        validation=molecules[train : train + validation],
        test=molecules[train + validation :],
        settings=qm9_settings(scale, seed),
        sizes=tuple(n // DIVISORS[scale] for n in SIZES),
        source=os.path.basename(os.fspath(source)),
        left_out="" if uncharacterized is None else os.path.basename(os.fspath(uncharacterized)),
    )


def csd_settings(split: Split, scale: Scale, seed: int = 0) -> Settings:
    """Return how shieldings are learned."""
    return make_settings(
        {
            "target": "shielding",
            "kind": "atomic",
            "species": "H",
            "representation": _representation(split, scale),
            "n_representatives": 10_000 // DIVISORS[scale],
            "resample": "atoms" if split == "atoms" else "structures",
            "units": "ppm",
            "seed": seed,
        }
    )


def csd_problem(
    crystals: Sequence[Atoms],
    split: Split = "atoms",
    scale: Scale = "paper",
    seed: int = 0,
    *,
    source: str = "",
) -> Problem:
    """Return ¹H shieldings of crystals, divided over atoms as in the paper, or over crystals.

    Parameters
    ----------
    crystals : sequence of Atoms
        From `qualms.data.csd`.
    split : {"atoms", "crystals"}
        Atoms of one crystal are near-copies of each other: divided over atoms, most test atoms have
        a sibling in the training set.
    scale : {"paper", "small"}
    seed : int
        Of everything that is random.
    source : str
        Where the crystals come from.
    """
    numbers = [n // DIVISORS[scale] for n in SPLIT]
    rng = np.random.default_rng(seed)
    divide = _divided_atoms if split == "atoms" else _divided_crystals
    train, validation, test = divide(crystals, numbers, rng)
    _check_labels(train)
    problem = Problem(
        name=f"csd-{split}",
        title=f"¹H shieldings of CSD-1000R, divided over {split}",
        scale=scale,
        train=train,
        validation=validation,
        test=test,
        settings=csd_settings(split, scale, seed),
        sizes=tuple(n // DIVISORS[scale] for n in SIZES),
        source=source,
    )
    return problem if split == "atoms" else _in_crystals(problem)


def _representation(split: Split, scale: Scale) -> dict[str, Any]:
    # At the small scale, compressing features would take longer than all the rest.
    return REPRESENTATIONS[split if scale == "paper" else "crystals"]


def _in_crystals(problem: Problem) -> Problem:
    """Say how many crystals a sub-sample has, rather than how many atoms.

    It is the same share of the training set with every seed. How many crystals make up a training
    set differs a little, for some have more atoms than others, and so do the sizes.
    """
    total = sum(int(_labelled(atoms).sum()) for atoms in problem.train)
    n = len(problem.train)
    sizes = tuple(max(round(size * n / total), 2) for size in problem.sizes)
    if any(a >= b for a, b in pairwise([*sizes, n])):
        raise InputError(
            "data",
            f"{n} crystals to train on",
            f"more of them: sub-samples would have {', '.join(map(str, sizes))} crystals",
            "Use more and smaller crystals, or divide over atoms (--split atoms).",
        )
    return replace(problem, sizes=sizes)


def _check_labels(train: Sequence[Atoms]) -> None:
    """Refuse shieldings that there is nothing to learn from."""
    labels = np.concatenate([atoms.arrays["shielding"] for atoms in train])
    labels = labels[np.isfinite(labels)]
    if np.ptp(labels) == 0:
        raise InputError("data", f"shieldings that all are {labels[0]:g}", "shieldings that differ")


def _divided_atoms(
    crystals: Sequence[Atoms], numbers: Sequence[int], rng: np.random.Generator
) -> list[list[Atoms]]:
    """Divide labelled hydrogen atoms at random, whatever crystal they are in."""
    places = np.array(
        [(s, i) for s, atoms in enumerate(crystals) for i in np.flatnonzero(_labelled(atoms))]
    ).reshape(-1, 2)
    if len(places) < sum(numbers):
        raise InputError(
            "data", f"{len(places)} shieldings of hydrogen", f"at least {sum(numbers)} of them"
        )
    drawn = places[rng.permutation(len(places))[: sum(numbers)]]
    parts = np.split(drawn, np.cumsum(numbers)[:-1])
    return [_only(crystals, part) for part in parts]


def _divided_crystals(
    crystals: Sequence[Atoms], numbers: Sequence[int], rng: np.random.Generator
) -> list[list[Atoms]]:
    """Divide crystals at random so that their hydrogen atoms come to the numbers wanted."""
    order = rng.permutation(len(crystals))
    total = np.cumsum([0, *(int(_labelled(crystals[i]).sum()) for i in order)])[1:]
    n_found = int(total[-1]) if len(total) else 0
    if n_found < 0.95 * sum(numbers):
        raise InputError("data", f"{n_found} shieldings of hydrogen", f"{sum(numbers)} of them")
    edges = np.searchsorted(total, np.cumsum(numbers)).clip(max=len(order) - 1) + 1
    parts = np.split(order[: edges[-1]], edges[:-1])
    places = [
        [(s, i) for s in part for i in np.flatnonzero(_labelled(crystals[s]))] for part in parts
    ]
    if not all(places):
        raise InputError(
            "data",
            f"{len(crystals)} crystals with up to {np.diff(total, prepend=0).max()} shieldings of "
            "hydrogen",
            "enough crystals for training, validation and test sets of their own",
            "Use more and smaller crystals, or divide over atoms (--split atoms).",
        )
    return [_only(crystals, np.array(part)) for part in places]


def _labelled(atoms: Atoms) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether an atom is a hydrogen with a shielding."""
    labelled = (atoms.numbers == _HYDROGEN) & np.isfinite(atoms.arrays["shielding"])
    return np.asarray(labelled)


def _only(crystals: Sequence[Atoms], places: IntArray) -> list[Atoms]:
    """Return copies of crystals with the labels of the atoms (structure, atom) alone."""
    found = []
    for structure in np.unique(places[:, 0]):
        atoms = crystals[structure].copy()
        labels = np.full(len(atoms), np.nan)
        chosen = places[places[:, 0] == structure, 1]
        labels[chosen] = atoms.arrays["shielding"][chosen]
        atoms.arrays["shielding"] = labels
        found.append(atoms)
    return found
