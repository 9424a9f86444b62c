"""What the page says beside its tables that depends on which results are on it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import numpy as np

from qualms.reproduce.facts import compressed
from qualms.reproduce.markdown import minus
from qualms.reproduce.over_seeds import sub_samples
from qualms.reproduce.results import Results
from qualms.reproduce.shift_page import rattling
from qualms.reproduce.texts import DATA, DIFFERENCES, DIVISIONS, INTRODUCTION, SCALES, TITLES

#: Where molecules come from if nothing is said, by scale.
_DEFAULT = {"paper": "qm9pack", "small": "subset"}
#: What relaxed crystals are called if results do not say.
_RELAXED = "CSD-2k.extxyz"
#: Longest line of a command, without the backslash that may end it.
_WIDTH = 90
_SHORT = {
    "qm9": "QM9",
    "csd-atoms": "shieldings divided over atoms",
    "csd-crystals": "shieldings divided over crystals",
}


def introduction(found: Sequence[Results]) -> str:
    """Return title and first section of the page of results, which are of one scale."""
    scale = found[0].scale
    return INTRODUCTION.format(
        title=TITLES[scale],
        data=DATA[scale],
        commands="\n".join(commands(found)),
        scale=SCALES[scale],
    )


def differences(found: Sequence[Results]) -> str:
    """Return the section about what differs from the paper."""
    drawn = {r.name: sum((s.n_train, s.n_validation, s.n_test)) for r in found for s in r.seeds[:1]}
    of_atoms = found[0].scale == "paper" and "csd-atoms" in drawn
    return DIFFERENCES.format(
        divisions=DIVISIONS.format(n=drawn["csd-atoms"]) if of_atoms else "",
        rattling=rattling(found),
        compression=_compressions(found),
        accuracy="; ".join(map(_accuracy, found)),
    )


def _accuracy(results: Results) -> str:
    """Say by how much the committee's RMSE differs from that of the full model, by size."""
    full = np.array([seed.process["Raw"].scores["rmse"] for seed in results.seeds])
    members = [
        [scheme.columns["Raw"].scores["rmse"] for scheme in sub_samples(seed)]
        for seed in results.seeds
    ]
    more = (np.array(members) / full[:, None]).mean(axis=0) - 1
    listed = ", ".join(f"{share + 0.0:+.0%}" for share in np.round(more, 2))  # no −0 %
    return minus(f"{_SHORT[results.name]} {listed}")


def _compressions(found: Sequence[Results]) -> str:
    """Say to how many components features of which problems are compressed."""
    names: dict[str, list[str]] = {}
    for results in found:
        names.setdefault(compressed(results.representation), []).append(_SHORT[results.name])
    return "; ".join(f"{' and '.join(of)}: {text}" for text, of in names.items())


def commands(found: Sequence[Results]) -> list[str]:
    """Return what was run to find the results, and to make the page of them."""
    by_name = {results.name: results for results in found}
    extra = "'qualms[qm9]'" if any(r.source == "qm9pack" for r in found) else "qualms"
    lines = [f"pip install {extra}"]
    if "qm9" in by_name:
        lines.append(_qm9(by_name["qm9"]))
    atoms, crystals = (by_name.get(f"csd-{split}") for split in ("atoms", "crystals"))
    if atoms and crystals and _of_one_command(atoms, crystals):
        lines.append(_csd(crystals, ""))
    else:
        pairs = [(atoms, "--split atoms"), (crystals, "--split crystals")]
        lines += [_csd(results, split) for results, split in pairs if results]
    files = [f"{results.name}.json" for results in found]
    return [*lines, _wrapped("qualms reproduce page", [*files, "-o reproduction.md"])]


def _of_one_command(atoms: Results, crystals: Results) -> bool:
    """Whether a command without --split makes both of them."""
    return (
        atoms.source == crystals.source
        and atoms.shift is None
        and _n_seeds(atoms) == _n_seeds(crystals)
    )


def _qm9(results: Results) -> str:
    options = []
    if results.source != _DEFAULT[results.scale]:
        options.append(f"--data {shlex.quote(results.source)}")
    if results.left_out:
        options.append(f"--uncharacterized {shlex.quote(results.left_out)}")
    options += [*_common(results), *(["--shift"] if results.shift else [])]
    return _wrapped("qualms reproduce qm9", options)


def _csd(results: Results, split: str) -> str:
    options = [f"--data {shlex.quote(results.source)}"]
    if results.shift:
        options.append(f"--relaxed {shlex.quote(results.shift.source or _RELAXED)}")
    return _wrapped("qualms reproduce csd", [*options, *filter(None, [split]), *_common(results)])


def _common(results: Results) -> list[str]:
    scale = [f"--scale {results.scale}"] if results.scale != "paper" else []
    n = _n_seeds(results)
    return [*scale, *([f"--seeds {n}"] if n > 1 else [])]


def _n_seeds(results: Results) -> int:
    """Return how many seeds were asked for: they count from 0."""
    return max(seed.seed for seed in results.seeds) + 1


def _wrapped(command: str, options: Sequence[str]) -> str:
    """Write a command, on several lines if one would be too long."""
    lines = [command]
    for option in options:
        if len(f"{lines[-1]} {option}") > _WIDTH:
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return " \\\n".join(lines)
