"""What changes when crystals, rather than their atoms, are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qualms.reproduce.facts import differing
from qualms.reproduce.markdown import markdown_table
from qualms.reproduce.over_seeds import likelihood, sub_samples, written
from qualms.reproduce.problems import Split, csd_settings
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Results, Seed

_ATOMS, _CRYSTALS = "csd-atoms", "csd-crystals"
_TEXT = """
## What changes over crystals
Atoms of one crystal are near-copies. Divided over atoms, nearly every test atom has siblings in the
training set; divided over crystals, none has. Errors are those of the full model and of the
committee of the largest sub-samples; log likelihoods, in ppm, are the best of all sizes:
"""
_MODELS = """
The division is not all that differs. Each has the hyper-parameters that suit it, and so these are
two models:
"""
#: From the benchmark siblings (recorded in benchmarks/RESULTS.md): RMSE in ppm of the preset nmr,
#: and of what is used over atoms, divided over atoms, and over crystals.
PRESET_RMSE, OWN_RMSE = 0.3742, 0.3123
NEW_PRESET_RMSE, NEW_OWN_RMSE = 0.631, 0.6805


def comparison_of_divisions(found: Sequence[Results]) -> list[str]:
    """Return the section, if there are results of both divisions."""
    by_name = {results.name: results for results in found}
    if not {_ATOMS, _CRYSTALS} <= set(by_name):
        return []
    divisions = by_name[_ATOMS], by_name[_CRYSTALS]
    rows = []
    for label, value in _QUANTITIES.items():
        cells = [written([value(seed) for seed in r.seeds], ".3f") for r in divisions]
        rows.append([label, *cells])
    rmse = [float(np.mean([_rmse(seed) for seed in r.seeds])) for r in divisions]
    ratio = rmse[1] / rmse[0]
    words = (
        f"On crystals that are new the error is {ratio:.1f} times that on new atoms of known ones; "
        f"right error bars lose ln({ratio:.1f}) = {np.log(ratio):.2f} of their log likelihood by "
        "that alone. Members are sub-samples of what is divided, atoms or crystals: those of the "
        "wrong kind would have error bars for the wrong question."
    )
    table = markdown_table(["", "over atoms", "over crystals"], rows)
    return [_TEXT, table, words, *_two_models(*divisions, ratio)]


def _two_models(atoms: Results, crystals: Results, ratio: float) -> list[str]:
    """Say what differs between the two besides the division, and what that may be worth."""
    rows = differing(atoms, crystals)
    if not rows:
        return []
    table = markdown_table(["", "over atoms", "over crystals"], rows)
    worth = _worth(ratio) if _are_those_compared(atoms, crystals) else ""
    return [_MODELS, table, worth, _fewer(atoms, crystals)]


def _are_those_compared(atoms: Results, crystals: Results) -> bool:
    """Whether the benchmarks compared these representations; smaller runs have others."""
    splits: dict[Split, Results] = {"atoms": atoms, "crystals": crystals}
    compared = {s: csd_settings(s, "paper").representation.model_dump(mode="json") for s in splits}
    return all(results.representation == compared[s] for s, results in splits.items())


def _fewer(atoms: Results, crystals: Results) -> str:
    """Say why fewer representatives are left over crystals, if so."""
    if crystals.seeds[0].n_representatives >= atoms.seeds[0].n_representatives:
        return ""
    return (
        "Farthest point sampling chose as many representatives over crystals. Fewer of them are "
        "left because whole crystals, fewer of them, hold more near-copies than atoms drawn from "
        "all, and because what sees less far tells fewer environments apart."
    )


def _worth(ratio: float) -> str:
    """Say what the benchmarks know of the two representations."""
    gain, change = PRESET_RMSE / OWN_RMSE, NEW_OWN_RMSE / NEW_PRESET_RMSE - 1
    return (
        f"What of the factor of {ratio:.1f} is due to this was measured on fewer crystals (the "
        "[benchmark](benchmarks.md) siblings). Over atoms of 130 crystals the representation used "
        f"here has an RMSE of {OWN_RMSE:.3f} ppm, and the preset nmr one of {PRESET_RMSE:.3f}: "
        f"{gain - 1:.0%} more. If it is as much with all crystals, the factor would be about "
        f"{ratio / gain:.1f} with the preset on both sides. On 50 new crystals, trained on 200, it "
        f"has an RMSE of {NEW_OWN_RMSE:.3f} ppm, {abs(change):.0%} "
        f"{'more' if change > 0 else 'less'} than nmr with {NEW_PRESET_RMSE:.3f}. What sees "
        "farther recognises siblings, of which a new crystal has none."
    )


def _rmse(seed: Seed) -> float:
    return seed.process["Raw"].scores["rmse"]


def _best(seed: Seed, column: str) -> float:
    return max(likelihood(s.columns[column]) for s in sub_samples(seed))


_QUANTITIES: dict[str, Callable[[Seed], float]] = {
    f"RMSE, {PROCESS}": _rmse,
    "RMSE, committee": lambda seed: sub_samples(seed)[-1].columns["Raw"].scores["rmse"],
    "CV": lambda seed: _best(seed, "CV"),
    "N-L": lambda seed: _best(seed, "N-L"),
    "student": lambda seed: _best(seed, "student"),
    "shrinkage": lambda seed: _best(seed, "shrinkage"),
    f"{PROCESS}, CV": lambda seed: likelihood(seed.process["CV"]),
    "within 68 % (student)": lambda seed: (
        sub_samples(seed)[-1].columns["student"].scores["coverage_68"]
    ),
    "rank correlation of errors and σ": lambda seed: (
        sub_samples(seed)[-1].columns["student"].scores["spearman"]
    ),
}
