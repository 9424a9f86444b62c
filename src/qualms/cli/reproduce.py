"""``qualms reproduce``: the paper's tables and figures again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from ase import Atoms
from rich.table import Table

from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.plan import default_threads, format_bytes, format_time, parse_memory
from qualms.atomistic.progress import Stages
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import make_training_set
from qualms.cli.console import Terminal
from qualms.cli.options import Force, Json, Quiet, Threads
from qualms.data import csd as read_csd
from qualms.errors import InputError
from qualms.reproduce.complete import check_together, complete_part, size_note
from qualms.reproduce.kernels import bytes_on_disk
from qualms.reproduce.page import make_page
from qualms.reproduce.pictures import draw_figures
from qualms.reproduce.places import Workplace, check_page, make_directory, naming, other_results
from qualms.reproduce.problems import (
    Problem,
    Scale,
    Split,
    check_characterized,
    csd_problem,
    csd_settings,
    qm9_problem,
    qm9_settings,
)
from qualms.reproduce.published import SPLIT
from qualms.reproduce.results import Results, Shift, read_results, write_results
from qualms.reproduce.run import (
    bytes_left,
    expected_seconds,
    run_problem,
    seeds_left,
    start_results,
)
from qualms.reproduce.shift import (
    Means,
    check_relaxed,
    csd_shift,
    digest_of,
    is_current,
    qm9_shift,
)
from qualms.reproduce.tables import terminal_tables
from qualms.storage.files import atomic_output, check_output, refuse_input

reproduce = typer.Typer(
    name="reproduce", help="The paper's tables and figures again.", no_args_is_help=True
)

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Directory for results, figures and kernels.")
]
ScaleOption = Annotated[str, typer.Option("--scale", help="paper, or small: a tenth of it.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Divisions of the data.")]
Memory = Annotated[str, typer.Option("--memory", help="Memory limit, such as 8GB.")]
Discard = Annotated[
    bool, typer.Option("--discard-kernels", help="Delete kernel rows (GB) when they have served.")
]
_DIRECTORY = Path("qualms-reproduction")
_EARLIER = "Predictions far from home are of an earlier version: they are made again."


@reproduce.command()
def qm9(
    data: Annotated[
        str | None,
        typer.Option(help="NPZ file or dsgdb9nsd.xyz.tar.bz2; otherwise the package qm9pack."),
    ] = None,
    uncharacterized: Annotated[
        Path | None,
        typer.Option(
            help="uncharacterized.txt, published with QM9: molecules of its archive to leave out."
        ),
    ] = None,
    output: Output = _DIRECTORY,
    scale: ScaleOption = "paper",
    seeds: Seeds = 1,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also train on small molecules, predict large ones.")
    ] = False,
    memory: Memory = "10GB",
    discard_kernels: Discard = False,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Atomisation energies of QM9: 20,000 molecules, 5,000 representatives, five sizes."""
    checked = _scale(scale)
    source = data or ("subset" if checked == "small" else "qm9pack")
    check_characterized(source, uncharacterized)
    run = _Run(output, memory, discard_kernels, threads, force, quiet, as_json)
    work = run.start(partial(qm9_problem, source, checked, uncharacterized=uncharacterized))
    with_shift = shift and run.needs_shift(work.results)
    run.announce([work], seeds, 1.0 if with_shift else 0.0)
    run.begin([work])
    results = run.all_seeds(work, seeds)
    if with_shift:
        means = run.means("qm9")
        found = qm9_shift(
            source, checked, qm9_settings(checked), means, uncharacterized=uncharacterized
        )
        run.add_shift(results, found)
    run.finish(["qm9"])


@reproduce.command()
def csd(
    data: Annotated[
        Path, typer.Option(help="CSD-1000R: extended XYZ, or chemiscope JSON.", show_default=False)
    ],
    relaxed: Annotated[
        Path | None, typer.Option(help="CSD-2k: also predict these relaxed crystals.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Divide over atoms, as the paper does, over crystals, or both.")
    ] = "both",
    output: Output = _DIRECTORY,
    scale: ScaleOption = "paper",
    seeds: Seeds = 1,
    memory: Memory = "10GB",
    discard_kernels: Discard = False,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """¹H shieldings of molecular crystals: 20,000 atoms, 10,000 representatives, five sizes."""
    checked = _scale(scale)
    splits = _splits(split)
    crystals = read_csd(data)
    run = _Run(output, memory, discard_kernels, threads, force, quiet, as_json)
    works = [
        run.start(partial(csd_problem, crystals, each, checked, source=data.name))
        for each in splits
    ]
    known = [work.results for work in works]
    others = None if relaxed is None else run.relaxed(relaxed, crystals, known)
    run.announce(works, seeds, 0.0 if others is None else _share(crystals, others))
    run.begin(works)
    for each, work in zip(splits, works, strict=True):
        results = run.all_seeds(work, seeds)
        if others is not None and relaxed is not None and each == splits[-1]:
            # The model is that for new crystals, whatever the split: these are new.
            settings, means = csd_settings("crystals", checked), run.means(results.name)
            found = csd_shift(crystals, others, checked, settings, means)
            run.add_shift(results, found.model_copy(update={"source": relaxed.name}))
    run.finish([f"csd-{each}" for each in splits])


@reproduce.command()
def page(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="JSON files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Markdown file to write.")],
    force: Force = False,
) -> None:
    """Make the page of all results; figures that are not beside them are drawn if they can be."""
    check_output(output, force=force)
    refuse_input(output, *results)
    terminal = Terminal()
    found = [read_results(path) for path in results]
    check_together(found)
    pairs = zip(found, results, strict=True)
    found = [complete_part(each, path, terminal.say) for each, path in pairs]
    folders = {path.resolve().parent for path in results}
    if len(folders) > 1:
        raise InputError("results", f"files in {len(folders)} directories", "files in one of them")
    folder = folders.pop()
    for each in found:
        draw_figures(each, Workplace(folder), terminal.warn, only_missing=True)
    figures = os.path.relpath(folder, output.resolve().parent)
    text = make_page(found, figures="" if figures == "." else f"{figures}/")
    with atomic_output(output, force=force) as file:
        file.write(text.encode())


@dataclass(frozen=True)
class _Work:
    """A problem with any seed, its first division, and what is known of it."""

    problem_of: Callable[[int], Problem]
    first: Problem
    results: Results


class _Run:
    """One invocation: where it writes, what it may use, and whom it tells."""

    def __init__(
        self,
        output: Path,
        memory: str,
        discard_kernels: bool,
        threads: int | None,
        force: bool,
        quiet: bool,
        as_json: bool,
    ) -> None:
        self.terminal = Terminal(quiet=quiet, as_json=as_json)
        self.say: Callable[[str], None] = self.terminal.say
        self.workplace = Workplace(output, keep_kernels=not discard_kernels)
        self.resources = Resources(threads=default_threads(threads), memory=memory)
        parse_memory(memory)
        self.force = force
        make_directory(output)
        check_page(self.workplace.page, force=force)

    def start(self, problem_of: Callable[[int], Problem]) -> _Work:
        """Divide the data once, and find out what of the work has been done."""
        first = problem_of(0)
        return _Work(problem_of, first, start_results(first, self.workplace, force=self.force))

    def needs_shift(self, results: Results) -> bool:
        """Whether predictions far from home are to be made, for the first time or again."""
        if results.shift is not None and not is_current(results.shift):
            self.say(_EARLIER)
        return not is_current(results.shift)

    def relaxed(
        self, path: Path, rattled: Sequence[Atoms], known: Sequence[Results]
    ) -> Sequence[Atoms] | None:
        """Return relaxed crystals, checked, or None if they have been predicted."""
        crystals = read_csd(path)
        check_relaxed(rattled, crystals)
        before = [results.shift for results in known if results.shift is not None]
        current = [shift for shift in before if is_current(shift)]
        if any(shift.digest == digest_of(crystals) for shift in current):
            return None
        if current:
            self.say(f"Other relaxed crystals ({current[-1].source}) were predicted before.")
        elif before:
            self.say(_EARLIER)
        return crystals

    def announce(self, works: Sequence[_Work], seeds: int, shift: float) -> None:
        """Say what all of the work will take, before it starts.

        Parameters
        ----------
        works : sequence of _Work
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
            problem = work.first
            data = make_training_set(problem.train, problem.settings)
            plan = Training(data, problem.settings, self.resources, Stages()).plan
            seconds, preparation = expected_seconds(problem, plan), plan.seconds
            total += left * seconds
            each = bytes_on_disk(problem, plan)
            disk.append(bytes_left(work.results, seeds, each, self.workplace))
            if left:
                self.say(f"{problem.title} ({problem.scale})")
                self.say(plan.describe())
                self.say(f"All sizes: about {format_time(seconds)} a seed, {left:.3g} to go")
        if total or shift:
            total += shift * preparation
            kept = ", kernel rows kept" if self.workplace.keep_kernels else ""
            with_shift = ", predictions far from home included" if shift else ""
            self.say(f"In all about {format_time(total)}{with_shift}{kept}")
            self._announce_disk(disk)

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

    def begin(self, works: Sequence[_Work]) -> None:
        """With --force, replace earlier results: without it, what was begun then goes on."""
        if self.force:
            for work in works:
                write_results(self.workplace.results(work.results.name), work.results)

    def all_seeds(self, work: _Work, seeds: int) -> Results:
        """Run a problem with each seed, going on from what is there."""
        results = work.results
        self.say(f"{work.first.title}:")
        for seed in range(seeds):
            problem = work.first if seed == 0 else work.problem_of(seed)
            self.say(f"Seed {seed}:")
            stages = Stages(self.terminal.progress())
            with naming(self.workplace.directory):
                results = run_problem(
                    problem, results, self.workplace, self.resources, stages, self.say
                )
        return results

    def means(self, name: str) -> Means:
        """Return what predictions far from home are made with."""
        stages = Stages(self.terminal.progress())
        return Means(self.resources, stages, self.workplace.checkpoint(name), self.say)

    def add_shift(self, results: Results, shift: Shift) -> None:
        """Add what was found far from home to the results."""
        complete = results.model_copy(update={"shift": shift})
        with naming(self.workplace.directory):
            write_results(self.workplace.results(results.name), complete)

    def finish(self, names: Sequence[str]) -> None:
        """Draw, and print, what was found; the page has all results of the directory."""
        tables: list[str | Table] = []
        found: dict[str, Results] = {}
        for name in names:
            path = self.workplace.results(name)
            results = found[name] = complete_part(read_results(path), path, self.say)
            with naming(self.workplace.directory):
                draw_figures(results, self.workplace, self.terminal.warn)
            tables += terminal_tables(results)
            tables += filter(None, [size_note(results)])
        directory = self.workplace.directory
        everything = other_results(directory, found, self.say)
        with naming(directory), atomic_output(self.workplace.page, force=True) as file:
            file.write(make_page(everything).encode())
        self.terminal.result(
            *tables,
            f"Results, figures and reproduction.md are in {directory}/.",
            document={name: results.model_dump(mode="json") for name, results in found.items()},
        )


def _share(rattled: Sequence[Atoms], relaxed: Sequence[Atoms]) -> float:
    """Return the hydrogen atoms of a shift over those of a training set, at any scale."""
    n = sum(int(np.count_nonzero(a.numbers == 1)) for a in (*rattled, *relaxed))
    return n / SPLIT[0]


def _scale(scale: str) -> Scale:
    if scale == "paper" or scale == "small":
        return scale  # type: ignore[return-value]
    raise InputError("scale", repr(scale), "paper or small")


def _splits(split: str) -> list[Split]:
    if split == "both":
        return ["atoms", "crystals"]
    if split == "atoms" or split == "crystals":
        return [split]  # type: ignore[list-item]
    raise InputError("split", repr(split), "atoms, crystals or both")
