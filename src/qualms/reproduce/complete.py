"""Whether results are complete: tables, figures and pages are made of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from qualms.errors import InputError
from qualms.features.hypers import Soap
from qualms.reproduce.published import COLUMNS, OF_PROCESS, PROCESS
from qualms.reproduce.results import Column, Results, Scheme, Seed, Shift

#: Problems and scales that there are.
NAMES, SCALES = ("qm9", "csd-atoms", "csd-crystals"), ("paper", "small")
#: What tables and figures show of members, of the projected process, and of each of their columns.
_OF_MEMBERS = (*COLUMNS, "student", "shrinkage")
_SCORES = ("log_likelihood", "mae", "rmse", "sharpness", "coverage_68", "coverage_95")
_OF_MACHINE = ("processor", "cores", "memory", "python")


def missing(results: Results, seed: Seed) -> str:
    """Say what a seed lacks of what tables and figures are made of; nothing, if it is complete."""
    sizes, wanted = seed.sizes, len(results.sizes)
    if not wanted or len(sizes) < wanted:
        return f"{len(sizes)} of {wanted} sizes are there"
    if len(sizes) > wanted:
        return f"there are {len(sizes)} sizes rather than {wanted}"
    if not any(s.replace for s in seed.schemes):
        return "there is no bootstrap"
    lacks = [*map(scheme_lacks, seed.schemes), process_lacks(seed)]
    return next(filter(None, lacks), "")


def scheme_lacks(scheme: Scheme) -> str:
    """Say which column members of one size lack; nothing, if they are complete."""
    where = f"n = {scheme.n:,}"
    about = f"{where} about the full model"
    return _lacking(scheme.columns, _OF_MEMBERS, where) or _lacking(
        scheme.reference, COLUMNS, about
    )


def process_lacks(seed: Seed) -> str:
    """Say which column the projected process lacks."""
    return _lacking(seed.process, OF_PROCESS, PROCESS)


def _lacking(columns: Mapping[str, Column], wanted: Iterable[str], where: str) -> str:
    """Say which column, or which score of it, is not there."""
    for name in wanted:
        if name not in columns:
            return f"{where} lacks {name}"
        scores = (*_SCORES, "spearman") if name == "student" else _SCORES
        lacking = [score for score in scores if score not in columns[name].scores]
        if lacking or not columns[name].bins:
            return f"{where} lacks {lacking[0] if lacking else 'bins'} of {name}"
    return ""


def _shift_lacks(shift: Shift) -> str:
    """Say what predictions far from home lack of what is shown of them."""
    lacks = (_lacking(s.columns, {"student", *s.columns}, s.label) for s in shift.sets)
    return next(filter(None, lacks), "") if shift.sets else "there are none"


def complete_part(
    results: Results, path: str | os.PathLike[str], say: Callable[[str], None]
) -> Results:
    """Return what tables and figures can be made of: the complete seeds.

    Parameters
    ----------
    results : Results
    path : path
        Their file, for messages.
    say : callable
        Told what is left out.
    """
    lacks = {seed.seed: missing(results, seed) for seed in results.seeds}
    complete = [seed for seed in results.seeds if not lacks[seed.seed]]
    words = "; ".join(f"seed {seed}: {why}" for seed, why in lacks.items() if why)
    if not complete:
        raise InputError(
            "results",
            f"'{path}'",
            f"results with a complete seed ({words or 'there is none'})",
            "Run the command that wrote them again, without --force: it goes on where it was.",
        )
    if words:
        say(f"Left out of {path}: {words}.")
    # Sizes in crystals depend on the seed: those of tables and figures are of the first.
    update: dict[str, Any] = {"seeds": complete, "sizes": complete[0].sizes}
    if results.shift is not None and (lacking := _shift_lacks(results.shift)):
        say(f"Left out of {path}: predictions far from home ({lacking}).")
        update["shift"] = None
    update["machine"] = dict.fromkeys(_OF_MACHINE, "unknown") | results.machine
    return results.model_copy(update=update)


def size_note(results: Results) -> str:
    """Say how the sizes of other seeds differ from those shown, in crystals; nothing, if not."""
    others = [seed for seed in results.seeds if seed.sizes != results.sizes]
    if not others:
        return ""
    listed = "; ".join(f"{', '.join(f'{n:,}' for n in s.sizes)} (seed {s.seed})" for s in others)
    return (
        f"Sizes are those of seed {results.seeds[0].seed}. The same shares of the training sets of "
        f"other seeds, which have other numbers of crystals: {listed}."
    )


def check_together(found: Sequence[Results]) -> None:
    """Refuse what does not make one page: unknown problems, one twice, several scales."""
    for results in found:
        if results.name not in NAMES:
            raise InputError("results", f"those of '{results.name}'", f"one of {', '.join(NAMES)}")
        if results.scale not in SCALES:
            raise InputError("results", f"scale '{results.scale}'", f"one of {', '.join(SCALES)}")
        _check_representation(results.name, results.representation)
        if results.shift is not None and results.shift.representation is not None:
            _check_representation(f"{results.name}, far from home", results.shift.representation)
    names = [results.name for results in found]
    twice = [name for name in NAMES if names.count(name) > 1]
    if twice:
        raise InputError("results", f"{twice[0]} more than once", "each problem once")
    if len({results.scale for results in found}) > 1:
        given = ", ".join(f"{results.name} of scale {results.scale}" for results in found)
        raise InputError("results", given, "results of one scale", "Make a page of each scale.")


def _check_representation(of: str, stored: Mapping[str, Any]) -> None:
    try:
        Soap.model_validate(stored)
    except ValidationError as error:
        given, why = f"the representation of {of}", error.errors()[0]["msg"]
        raise InputError("results", given, f"hyper-parameters of SOAP ({why})") from error
