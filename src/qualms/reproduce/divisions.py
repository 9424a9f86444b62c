"""What changes when crystals, rather than their atoms, are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qualms.reproduce.claims import sub_samples
from qualms.reproduce.markdown import markdown_table, minus
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Results, Seed

_ATOMS, _CRYSTALS = "csd-atoms", "csd-crystals"
_TEXT = """
## What changes over crystals
Atoms of one crystal are near-copies. Divided over atoms, nearly every test atom has siblings in the
training set; divided over crystals, none has. Errors are those of the full model and of the
committee of the largest sub-samples; log likelihoods, in ppm, are the best of all sizes:
"""


def comparison_of_divisions(found: Sequence[Results]) -> list[str]:
    """Return the section, if there are results of both divisions."""
    by_name = {results.name: results for results in found}
    if not {_ATOMS, _CRYSTALS} <= set(by_name):
        return []
    divisions = [by_name[_ATOMS], by_name[_CRYSTALS]]
    rows = []
    for label, value in _QUANTITIES.items():
        means = [float(np.mean([value(seed) for seed in r.seeds])) for r in divisions]
        rows.append([label, *(minus(f"{mean:.3f}") for mean in means)])
    rmse = [float(np.mean([_rmse(seed) for seed in r.seeds])) for r in divisions]
    words = (
        f"On crystals that are new the error is {rmse[1] / rmse[0]:.1f} times that on new atoms of "
        f"known ones; right error bars lose ln({rmse[1] / rmse[0]:.1f}) = "
        f"{np.log(rmse[1] / rmse[0]):.2f} of their log likelihood by that alone. Members are "
        "sub-samples of what is divided, atoms or crystals: those of the wrong kind would have "
        "error bars for the wrong question."
    )
    return [_TEXT, markdown_table(["", "over atoms", "over crystals"], rows), words]


def _rmse(seed: Seed) -> float:
    return seed.process["Raw"].scores["rmse"]


def _best(seed: Seed, column: str) -> float:
    return max(s.columns[column].scores["log_likelihood"] for s in sub_samples(seed))


_QUANTITIES: dict[str, Callable[[Seed], float]] = {
    f"RMSE, {PROCESS}": _rmse,
    "RMSE, committee": lambda seed: sub_samples(seed)[-1].columns["Raw"].scores["rmse"],
    "CV": lambda seed: _best(seed, "CV"),
    "N-L": lambda seed: _best(seed, "N-L"),
    "student": lambda seed: _best(seed, "student"),
    "shrinkage": lambda seed: _best(seed, "shrinkage"),
    f"{PROCESS}, CV": lambda seed: seed.process["CV"].scores["log_likelihood"],
    "within 68 % (student)": lambda seed: (
        sub_samples(seed)[-1].columns["student"].scores["coverage_68"]
    ),
    "rank correlation of errors and σ": lambda seed: (
        sub_samples(seed)[-1].columns["student"].scores["spearman"]
    ),
}
