"""Parts of the structures, and the census: the first pass over all of them.

A task is a function of a part of the structures. `qualms.execution` runs it here or on workers.
Structures in memory are one part; those of files are read part by part. Results do not depend on
the number of parts or workers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms

from qualms.arrays import IntArray
from qualms.atomistic.delta import BaselinePotential, make_baseline_potential
from qualms.atomistic.labels import (
    Scan,
    State,
    TrainingSet,
    check_differences,
    check_frames,
    check_not_constant,
    check_states,
    force_labels,
    group_labels,
    join_groups,
    join_sets,
    labelled,
    read_labels,
    reject_without_energy,
)
from qualms.atomistic.quantities import DERIVATIVES, TARGET
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import FrameFiles, data_digest, symbols_of
from qualms.errors import InputError
from qualms.execution import Workers
from qualms.progress import Stages

#: Structures whose labels are read in a task.
_SCANNED = 2000
#: Where errors name a structure by its number, unless by that in a file: "Structure 3 of new.xyz".
_NUMBER = re.compile(
    r"(?P<before>\b[Ss]tructure |\bframes\[)(?P<number>\d+)(?P<after>\]?)(?!\d| of )"
)


@dataclass(frozen=True)
class Part:
    """Some structures, and their numbers among all."""

    frames: Sequence[Atoms]
    numbers: IntArray  #: (n,)

    def __len__(self) -> int:
        return len(self.numbers)


def divided(frames: Sequence[Atoms], size: int) -> list[Part]:
    """Return parts of consecutive structures."""
    numbers = np.arange(len(frames))
    edges = range(0, len(frames), size)
    return [Part(frames[i : i + size], numbers[i : i + size]) for i in edges]


@contextmanager
def numbered(part: Part) -> Iterator[None]:
    """Name structures by their numbers among all, and by their files, in errors."""

    def name(match: re.Match[str]) -> str:
        i, frames = int(match["number"]), part.frames
        text = f"{match['before']}{part.numbers[i]}{match['after']}"
        if isinstance(frames, FrameFiles):
            text += f" ('{frames.paths[frames.file[i]]}', frame {frames.number[i]})"
        return text

    try:
        yield
    except InputError as error:
        message, parameter = (_NUMBER.sub(name, text) for text in (str(error), error.parameter))
        raise InputError(message, parameter=parameter) from error


# --- the census ---


@dataclass(frozen=True)
class Census:
    """Labels of all structures, and facts about them."""

    data: TrainingSet
    n_without: dict[str, int]  #: structures, or atoms of an atomic property, without a label
    n_isolated: int
    n_duplicates: int
    isolated: dict[int, float]  #: energies of isolated atoms found in the data
    states: dict[State, int]  #: charges and spins, and the first structure with each
    is_periodic: bool  #: whether at least half of the structures are
    digest: str  #: of structures and labels


def take_census(
    frames: Sequence[Atoms],
    settings: Settings,
    groups: Sequence[object] | str | None = None,
    *,
    workers: Workers | None = None,
    stages: Stages | None = None,
    reference: BaselinePotential | None = None,
    skip_failed: bool = False,
) -> Census:
    """Read the labels of all structures, check them, and find duplicates.

    Parameters
    ----------
    frames : sequence of Atoms
        Perhaps in files, `FrameFiles`, which are then read part by part.
    settings : Settings
    groups : sequence or str, optional
        Labels of structures that belong together, or their key in ``atoms.info``.
    workers : Workers, optional
    stages : Stages, optional
    reference : BaselinePotential, optional
        Labels are differences from it; workers make it themselves.
    skip_failed : bool
        Whether structures for which the potential fails are left out, rather than an error.
    """
    workers, stages = workers or Workers(), stages or Stages()
    check_frames(frames, groups)
    in_memory = workers.executor is None and not isinstance(frames, FrameFiles)
    parts = divided(frames, len(frames) if in_memory else _SCANNED)
    key = groups if isinstance(groups, str) else None
    done = 0
    options = settings, key, skip_failed, reference if workers.executor is None else None
    stage = "Labels" if settings.reference is None else "Baseline"
    with stages.stage(stage, len(frames)) as advance, _once():
        scans, of_groups = [], []
        for scan, labels in workers.map(_scan, parts, len(parts) == 1, *options):
            scans.append(scan)
            of_groups += labels
            advance(done := done + len(parts[len(scans) - 1]))
    data = join_sets([scan.data for scan in scans])
    if not len(data.source):
        labelled(list(frames[:_SCANNED]), settings.target, settings.kind, settings.species)
        raise InputError(
            "No structure has a label; at least 2 are needed to train on.", parameter="frames"
        )
    if isinstance(frames, FrameFiles):
        data = replace(data, frames=frames[data.source])
    else:
        data = replace(data, frames=[frames[i] for i in data.source])
    for name in DERIVATIVES:
        label_key = settings.keys.get(name)
        if label_key is not None and name not in data.quantities and len(parts) > 1:
            force_labels(list(frames[:_SCANNED]), np.arange(0), settings.forces, settings.stress)
            reject_without_energy(name, label_key)
    states: dict[State, int] = {}
    for scan in scans:
        states |= {state: i for state, i in scan.states.items() if state not in states}
    check_states(states, settings)
    copies, codes, n_duplicates = join_groups(
        [digest for scan in scans for digest in scan.prints],
        of_groups if key else groups,
        np.arange(len(data.source)) if key else data.source,
    )
    data = replace(data, groups=codes, copies=copies)
    if settings.kind == "extensive":
        check_not_constant(settings.target, data.y * data.sizes, data.sizes)
    if settings.reference is not None:
        before = np.concatenate([scan.before for scan in scans])
        check_differences(settings.reference.name, settings.target, data, before)
    without = {TARGET: sum(scan.n_without for scan in scans)}
    for name, quantity in data.quantities.items():
        without.setdefault(name, len(data.source) - quantity.n_structures)
    return Census(
        data=data,
        n_without=without,
        n_isolated=sum(scan.n_isolated for scan in scans),
        n_duplicates=n_duplicates,
        isolated=_join_isolated(scans),
        states=states,
        is_periodic=sum(scan.n_periodic for scan in scans) >= 0.5 * len(data.source),
        digest=data_digest(digest for scan in scans for digest in scan.hashes),
    )


def _scan(
    part: Part,
    required: bool,
    settings: Settings,
    group_key: str | None,
    skip_failed: bool,
    reference: BaselinePotential | None,
) -> tuple[Scan, list[str]]:
    """Read the labels of a part, and those of groups if they have a key."""
    frames = list(part.frames)
    if reference is None and settings.reference is not None:
        reference = _own_reference(settings)
    with numbered(part):
        labels = group_labels(frames, group_key) if group_key else []
        scan = read_labels(
            frames, settings, reference=reference, skip_failed=skip_failed, required=required
        )
    labels = [labels[i] for i in scan.data.source] if group_key else []
    states = {state: int(part.numbers[i]) for state, i in scan.states.items()}
    data = replace(scan.data, source=part.numbers[scan.data.source], frames=())
    return replace(scan, data=data, states=states), labels


_REFERENCES: dict[str, BaselinePotential] = {}


def _own_reference(settings: Settings) -> BaselinePotential:
    """Return the reference potential of the labels, created once in each worker."""
    key = f"{settings.reference!r} {settings.units} {settings.representation!r}"
    if key not in _REFERENCES:
        made = make_baseline_potential(settings, confirmed=settings.reference)
        assert made is not None
        _REFERENCES[key] = made
    return _REFERENCES[key]


@contextmanager
def _once() -> Iterator[None]:
    """Issue warnings of several parts that differ in numbers alone only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    alike = {re.sub(r"\d+", "", str(w.message)): w for w in reversed(caught)}
    for w in reversed(alike.values()):
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def _join_isolated(scans: Sequence[Scan]) -> dict[int, float]:
    """Return the energies of isolated atoms of all parts, which must agree."""
    isolated: dict[int, float] = {}
    for scan in scans:
        for z, value in scan.isolated.items():
            if not math.isclose(isolated.setdefault(z, value), value, rel_tol=1e-8):
                raise InputError(
                    f"There are isolated {symbols_of([z])} atoms with energies {isolated[z]:.10g} "
                    f"and {value:.10g}. Keep one for each element.",
                    parameter="frames",
                )
    return isolated
