"""Uncertainties of differences: isomers, reactions, and what correlations are worth.

A model of atomisation energies of QM9 predicts molecules that it has not seen. Energies of these
are combined: differences between isomers, and reactions A + B → C + D that conserve the elements.
Uncertainties of combinations come from the members, from independent errors, and from members that
are calibrated once more, on other combinations.
Molecules come from the file that the environment variable QUALMS_QM9 names, or from the package
qm9pack. Run this file alone, with a divisor of all sizes, for a small problem.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from qualms import AtomisticModel, Prediction, calibrate, score
from qualms.data import qm9

N_TRAIN, N_TEST, N_REPRESENTATIVES, SEED = 5_000, 5_000, 1_500, 0
TARGET = "atomization_energy"
ELEMENTS = (1, 6, 7, 8, 9)
#: How many of the pairs of isomers are those most alike.
LIKE = 0.1


def compositions(frames: Sequence[Atoms]) -> list[tuple[int, ...]]:
    """Return how many atoms of each element structures have."""
    return [tuple(int(np.sum(atoms.numbers == z)) for z in ELEMENTS) for atoms in frames]


def groups_of_isomers(frames: Sequence[Atoms]) -> list[list[int]]:
    """Return molecules that have the same composition."""
    alike = defaultdict(list)
    for i, composition in enumerate(compositions(frames)):
        alike[composition].append(i)
    return list(alike.values())


def isomer_pairs(frames: Sequence[Atoms]) -> csr_array:
    """Return differences between isomers, a row each, such that no molecule is in two of them."""
    pairs = [pair for found in groups_of_isomers(frames) for pair in batched_pairs(found)]
    return combinations(pairs, (1, -1), len(frames))


def batched_pairs(items: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and second, the third and fourth, and so on."""
    return list(zip(items[::2], items[1::2], strict=False))


def like_pairs(model: AtomisticModel, frames: Sequence[Atoms], share: float) -> csr_array:
    """Return differences between isomers that are most alike: a share of as many pairs as can be.

    Molecules are alike if the averages of the features of their environments are. The closest pair
    is taken first, then the closest of what is left, and so on.
    """
    means = mean_features(model, frames)
    candidates = []
    for found in groups_of_isomers(frames):
        distances = cdist(means[found], means[found])
        for i, j in zip(*np.triu_indices(len(found), 1), strict=True):
            candidates.append((distances[i, j], found[i], found[j]))
    n_pairs = int(share * isomer_pairs(frames).shape[0])
    used: set[int] = set()
    pairs = []
    for _, i, j in sorted(candidates):
        if len(pairs) < n_pairs and i not in used and j not in used:
            pairs.append((i, j))
            used |= {i, j}
    return combinations(pairs, (1, -1), len(frames))


def mean_features(model: AtomisticModel, frames: Sequence[Atoms]) -> np.ndarray:
    """Return the average of the features of the environments of each structure."""
    means = []
    for chunk in model.stream(frames):
        X, starts = chunk.batch.features, chunk.batch.offsets
        sums = np.add.reduceat(X, starts[:-1], axis=0, dtype=np.float64)
        means.append(sums / np.diff(starts)[:, None])
    return np.concatenate(means)


def reactions(frames: Sequence[Atoms], n_most: int, seed: int = SEED) -> csr_array:
    """Return reactions A + B → C + D of four different molecules that conserve the elements."""
    rng = np.random.default_rng(seed)
    elements = compositions(frames)
    sides: dict[tuple[int, ...], tuple[int, int]] = {}
    found = []
    used: set[int] = set()
    for a, b in rng.integers(len(frames), size=(200 * n_most, 2)).tolist():
        if len(found) == n_most:
            break
        if a == b or a in used or b in used:
            continue
        total = tuple(x + y for x, y in zip(elements[a], elements[b], strict=True))
        c, d = sides.get(total, (a, b))
        alike = sorted((elements[a], elements[b])) == sorted((elements[c], elements[d]))
        if alike or {c, d} & used:  # two pairs of isomers are no reaction
            sides[total] = (a, b)
            continue
        found.append((a, b, c, d))
        used |= {a, b, c, d}
    return combinations(found, (-1, -1, 1, 1), len(frames))


def combinations(groups: Sequence[Sequence[int]], signs: Sequence[int], n: int) -> csr_array:
    """Return a matrix with a row for each group of molecules, and their signs in it."""
    rows = np.repeat(np.arange(len(groups)), len(signs))
    values = np.tile(np.asarray(signs, dtype=float), len(groups))
    return csr_array((values, (rows, np.ravel(groups))), shape=(len(groups), n))


def combined(C: csr_array, prediction: Prediction) -> Prediction:
    """Combine predictions, member by member."""
    return Prediction(C @ prediction.members)


def independent(C: csr_array, prediction: Prediction) -> Prediction:
    """Return the values of a prediction, with uncertainties as if errors were independent."""
    quadrature = np.sqrt(abs(C) @ prediction.std**2)
    joint = combined(C, prediction)
    factors = (quadrature / joint.std)[:, None]
    return Prediction(joint.mean[:, None] + factors * (joint.members - joint.mean[:, None]))


def recalibrated(y: np.ndarray, prediction: Prediction) -> Prediction:
    """Calibrate each half of the combinations, once more, by the other half."""
    members = prediction.members.copy()
    for half in (0, 1):
        calibration = calibrate(y[1 - half :: 2], prediction.members[1 - half :: 2])
        members[half::2] = calibration.apply(prediction[half::2]).members
    return Prediction(members)


def energies(frames: Sequence[Atoms]) -> np.ndarray:
    """Return true energies in eV."""
    return np.array([atoms.info[TARGET] for atoms in frames])


def evaluate_combinations(
    model: AtomisticModel, test: Sequence[Atoms]
) -> dict[str, dict[str, Any]]:
    """Return scores of energies and of their combinations, by what is combined and how."""
    prediction, y = model.predict(test), energies(test)
    kinds = {
        "isomers": isomer_pairs(test),
        "isomers most alike": like_pairs(model, test, LIKE),
        "reactions": reactions(test, len(test) // 10),
    }
    found: dict[str, dict[str, Any]] = {"energies": {"as predicted": score(y, prediction)}}
    for name, C in kinds.items():
        reference, members = C @ y, combined(C, prediction)
        found[name] = {
            "member by member": score(reference, members),
            "as if independent": score(reference, independent(C, prediction)),
            "recalibrated": score(reference, recalibrated(reference, members)),
        }
    return found


def table(divisor: int = 1, source: str | None = None) -> dict[str, Any]:
    """Evaluate energies, differences and reactions."""
    n_train, n_test, M = (n // divisor for n in (N_TRAIN, N_TEST, N_REPRESENTATIVES))
    source = source or os.environ.get("QUALMS_QM9", "qm9pack")
    molecules = qm9(source, n=n_train + n_test, seed=SEED)
    train, test = molecules[:n_train], molecules[n_train:]
    model = AtomisticModel(TARGET, n_representatives=M, units="eV").fit(train)
    rows = [
        [
            name,
            how,
            f"{scores.n_points}",
            f"{1000 * scores.rmse:.0f}",
            f"{1000 * scores.sharpness:.0f}",
            f"{100 * scores.coverage_68:.1f}",
            f"{100 * scores.coverage_95:.1f}",
            f"{scores.log_likelihood:.3f}",
        ]
        for name, ways in evaluate_combinations(model, test).items()
        for how, scores in ways.items()
    ]
    return {
        "title": f"Uncertainties of combined energies of {n_test} molecules of QM9: "
        f"{n_train} trained on, M = {M}, 16 members",
        "columns": [
            "what", "uncertainties", "points", "RMSE, meV", "RMS σ, meV", "68 %", "95 %", "LL"
        ],
        "rows": rows,
        "notes": [
            "No molecule is in two pairs, nor in two reactions. 68 % and 95 %: reference values "
            "in these intervals. LL: mean log likelihood, energies in eV. Recalibrated: each half "
            "by the other half.",
        ],
    }  # fmt: skip


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return [table()]


if __name__ == "__main__":
    result = table(*map(int, sys.argv[1:]))
    print(result["title"], result["columns"], *result["rows"], sep="\n")
