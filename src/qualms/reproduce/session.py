"""One invocation of a reproduction: what is left to do, what it will take, and doing it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms

from qualms.atomistic.memory import Plan, format_bytes, format_time
from qualms.atomistic.training import Resources, Training
from qualms.atomistic.training_set import make_training_set
from qualms.progress import Stages
from qualms.reproduce.complete import complete_part
from qualms.reproduce.kernels import bytes_on_disk
from qualms.reproduce.page import write_page
from qualms.reproduce.pictures import draw_figures
from qualms.reproduce.places import Workplace, check_page, make_directory, naming, other_results
from qualms.reproduce.problems import Problem
from qualms.reproduce.published import SPLIT
from qualms.reproduce.results import Results, Shift, read_results, write_results
from qualms.reproduce.run import (
    bytes_left,
    expected_seconds,
    run_problem,
    seeds_left,
    start_results,
)
from qualms.reproduce.shift import Means, check_relaxed, digest_of, is_current

_EARLIER = "Predictions far from home are of an earlier version: they are made again."


@dataclass(frozen=True)
class Work:
    """A problem with any seed, its first division, and what is known of it."""

    problem_of: Callable[[int], Problem]
    first: Problem
    results: Results


@dataclass(frozen=True)
class Listener:
    """Whom a session tells, and what."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    stages: Callable[[], Stages]


class Session:
    """Where an invocation writes, what it may use, and whom it tells.

    Parameters
    ----------
    workplace : Workplace
        Its directory is made.
    resources : Resources
    listener : Listener
    force : bool
        Begin anew, and replace earlier results and pages.
    """

    def __init__(
        self, workplace: Workplace, resources: Resources, listener: Listener, *, force: bool
    ) -> None:
        self.workplace = workplace
        self.resources = resources
        self.listener = listener
        self.say = listener.say
        self.force = force
        make_directory(workplace.directory)
        check_page(workplace.page, force=force)

    def start(self, problem_of: Callable[[int], Problem]) -> Work:
        """Divide the data once, and find out what of the work has been done."""
        first = problem_of(0)
        return Work(problem_of, first, start_results(first, self.workplace, force=self.force))

    def needs_shift(self, results: Results) -> bool:
        """Whether predictions far from home are to be made, for the first time or again."""
        if results.shift is not None and not is_current(results.shift):
            self.say(_EARLIER)
        return not is_current(results.shift)

    def needs_relaxed(
        self, relaxed: Sequence[Atoms], rattled: Sequence[Atoms], works: Sequence[Work]
    ) -> bool:
        """Check relaxed crystals; whether they are to be predicted, for the first time or again."""
        check_relaxed(rattled, relaxed)
        before = [work.results.shift for work in works if work.results.shift is not None]
        current = [shift for shift in before if is_current(shift)]
        if any(shift.digest == digest_of(relaxed) for shift in current):
            return False
        if current:
            self.say(f"Other relaxed crystals ({current[-1].source}) were predicted before.")
        elif before:
            self.say(_EARLIER)
        return True

    def announce(self, works: Sequence[Work], seeds: int, shift: float) -> None:
        """Say what all of the work will take, before it starts.

        Parameters
        ----------
        works : sequence of Work
        seeds : int
        shift : float
            Work of the shift, in units of the last problem's preparation.
        """
        total = preparation = 0.0
        disk = []
        for work in works:
            left = seeds_left(work.results, seeds)
            if not left and not shift:
                continue
            plan = self._plan(work.first)
            seconds, preparation = expected_seconds(work.first, plan), plan.seconds
            total += left * seconds
            each = bytes_on_disk(work.first, plan)
            disk.append(bytes_left(work.results, seeds, each, self.workplace))
            if left:
                self.say(f"{work.first.title} ({work.first.scale})")
                self.say(plan.describe())
                self.say(f"All sizes: about {format_time(seconds)} a seed, {left:.3g} to go")
        if total or shift:
            total += shift * preparation
            kept = ", kernel rows kept" if self.workplace.keep_kernels else ""
            with_shift = ", predictions far from home included" if shift else ""
            self.say(f"In all about {format_time(total)}{with_shift}{kept}")
            self._announce_disk(disk)

    def _plan(self, problem: Problem) -> Plan:
        data = make_training_set(problem.train, problem.settings)
        return Training(data, problem.settings, self.resources, Stages()).plan

    def _announce_disk(self, needed: Sequence[float]) -> None:
        """Say what kernel rows will take of the disk: of each problem, in bytes."""
        keep, directory = self.workplace.keep_kernels, self.workplace.directory
        total = sum(needed) if keep else max(needed)
        free = shutil.disk_usage(directory).free
        if total:
            until = "" if keep else " while they serve"
            lacking = ": what does not fit is not kept" if total > free else ""
            self.say(
                f"Kernel rows take about {format_bytes(total)} on disk{until}; {directory} has "
                f"{format_bytes(free)} free{lacking}"
            )

    def begin(self, works: Sequence[Work]) -> None:
        """If forced, replace earlier results: without force, what was begun then goes on."""
        if self.force:
            for work in works:
                write_results(self.workplace.results(work.results.name), work.results)

    def all_seeds(self, work: Work, seeds: int) -> Results:
        """Run a problem with each seed, going on from what is there."""
        results = work.results
        self.say(f"{work.first.title}:")
        for seed in range(seeds):
            problem = work.first if seed == 0 else work.problem_of(seed)
            self.say(f"Seed {seed}:")
            with naming(self.workplace.directory):
                results = run_problem(
                    problem,
                    results,
                    self.workplace,
                    self.resources,
                    self.listener.stages(),
                    self.say,
                )
        return results

    def means(self, name: str) -> Means:
        """Return what predictions far from home are made with."""
        checkpoint = self.workplace.checkpoint(name)
        return Means(self.resources, self.listener.stages(), checkpoint, self.say)

    def add_shift(self, results: Results, shift: Shift) -> None:
        """Add what was found far from home to the results."""
        complete = results.model_copy(update={"shift": shift})
        with naming(self.workplace.directory):
            write_results(self.workplace.results(results.name), complete)

    def finish(self, names: Sequence[str]) -> Mapping[str, Results]:
        """Draw what was found, and return it; the page has all results of the directory."""
        found: dict[str, Results] = {}
        directory = self.workplace.directory
        for name in names:
            path = self.workplace.results(name)
            found[name] = complete_part(read_results(path), path, self.say)
            with naming(directory):
                draw_figures(found[name], self.workplace, self.listener.warn)
        everything = other_results(directory, found, self.say)
        with naming(directory):
            write_page(self.workplace.page, everything, force=True)
        return found


def share_of_training(rattled: Sequence[Atoms], relaxed: Sequence[Atoms]) -> float:
    """Return the hydrogen atoms of a shift over those of a training set, at any scale."""
    n = sum(int(np.count_nonzero(a.numbers == 1)) for a in (*rattled, *relaxed))
    return n / SPLIT[0]
