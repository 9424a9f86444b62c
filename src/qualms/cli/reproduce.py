"""``qualms reproduce``: the paper's tables and figures again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.plan import default_threads
from qualms.atomistic.progress import Stages
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import make_training_set
from qualms.cli.console import Terminal
from qualms.cli.options import Force, Json, Quiet, Threads
from qualms.data import csd as read_csd
from qualms.errors import InputError
from qualms.report.tables import new_table
from qualms.reproduce.page import make_page, table_rows
from qualms.reproduce.pictures import draw_figures
from qualms.reproduce.problems import Problem, Scale, Split, csd_problem, qm9_problem
from qualms.reproduce.published import COLUMNS
from qualms.reproduce.results import Results, read_results, write_results
from qualms.reproduce.run import Workplace, expected_seconds, run_problem, start_results
from qualms.reproduce.shift import csd_shift, qm9_shift
from qualms.storage.files import atomic_output, check_output, refuse_input

reproduce = typer.Typer(
    name="reproduce", help="The paper's tables and figures again.", no_args_is_help=True
)

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Directory for results, figures and kernels.")
]
ScaleOption = Annotated[str, typer.Option("--scale", help="paper, or small: a tenth of it.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Divisions of the data.")]
Memory = Annotated[str, typer.Option("--memory", help="Memory limit, such as 8GB.")]
Discard = Annotated[
    bool, typer.Option("--discard-kernels", help="Delete kernel rows (GB) when they have served.")
]
_DIRECTORY = Path("qualms-reproduction")


@reproduce.command()
def qm9(
    data: Annotated[
        str | None,
        typer.Option(help="NPZ file or dsgdb9nsd.xyz.tar.bz2; otherwise the package qm9pack."),
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
    run = _Run(output, memory, discard_kernels, threads, force, quiet, as_json)
    results = run.all_seeds(lambda seed: qm9_problem(source, checked, seed), seeds)
    if shift and results.shift is None:
        settings = qm9_problem("subset", "small").settings.model_dump()
        settings |= {"n_representatives": 5_000 if checked == "paper" else 500}
        stages = run.stages()
        run.add_shift(results, qm9_shift(source, checked, settings, stages, run.say))
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
    others = None if relaxed is None else read_csd(relaxed)
    run = _Run(output, memory, discard_kernels, threads, force, quiet, as_json)
    for each in splits:

        def problem(seed: int, each: Split = each) -> Problem:
            return csd_problem(crystals, each, checked, seed, source=data.name)

        results = run.all_seeds(problem, seeds)
        if others is not None and each == splits[-1] and results.shift is None:
            settings = problem(0).settings.model_dump() | {"resample": "structures"}
            stages = run.stages()
            run.add_shift(results, csd_shift(crystals, others, checked, settings, stages, run.say))
    run.finish([f"csd-{each}" for each in splits])


@reproduce.command()
def page(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="JSON files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Markdown file to write.")],
    force: Force = False,
) -> None:
    """Make the page of all results. Figures are taken to lie beside the result files."""
    check_output(output, force=force)
    refuse_input(output, *results)
    found = [read_results(path) for path in results]
    folders = {path.resolve().parent for path in results}
    if len(folders) > 1:
        raise InputError("results", f"files in {len(folders)} directories", "files in one of them")
    figures = os.path.relpath(folders.pop(), output.resolve().parent)
    text = make_page(found, figures="" if figures == "." else f"{figures}/")
    with atomic_output(output, force=force) as file:
        file.write(text.encode())


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
        self.force = force
        output.mkdir(parents=True, exist_ok=True)

    def stages(self) -> Stages:
        return Stages(self.terminal.progress())

    def all_seeds(self, problem_of: Callable[[int], Problem], seeds: int) -> Results:
        """Run a problem with each seed, going on from what is there."""
        results = None
        for seed in range(seeds):
            problem = problem_of(seed)
            if results is None:
                results = start_results(problem, self.workplace, force=self.force)
                self.say(f"{problem.title} ({problem.scale})")
                self._announce(problem, seeds - len(results.seeds))
            self.say(f"Seed {seed}:")
            results = run_problem(
                problem, results, self.workplace, self.resources, self.stages(), self.say
            )
        assert results is not None, "there is at least one seed"
        return results

    def _announce(self, problem: Problem, n_left: int) -> None:
        """Say what the work will take, before it starts."""
        if n_left <= 0:
            return
        data = make_training_set(problem.train, problem.settings)
        plan = Training(data, problem.settings, self.resources, Stages()).plan
        minutes = expected_seconds(problem, plan) / 60
        kept = "" if not self.workplace.keep_kernels else ", kernel rows kept"
        self.say(plan.describe())
        self.say(f"All sizes: about {minutes:.0f} min a seed, {n_left} to go{kept}")

    def add_shift(self, results: Results, shift: object) -> None:
        """Add what was found far from home to the results."""
        complete = results.model_copy(update={"shift": shift})
        write_results(self.workplace.results(results.name), complete)

    def finish(self, names: list[str]) -> None:
        """Draw, and print, what was found."""
        tables = []
        found = [read_results(self.workplace.results(name)) for name in names]
        for results in found:
            draw_figures(results, self.workplace)
            table = new_table(results.title, "mean log likelihood ± standard error [the paper's]")
            for heading in ("n", *COLUMNS, "student", "shrinkage", "Student's t"):
                table.add_column(heading, justify="right")
            for label, cells in table_rows(results):
                table.add_row(label, *cells)
            tables.append(table)
        with atomic_output(self.workplace.directory / "reproduction.md", force=True) as file:
            file.write(make_page(found).encode())
        self.terminal.result(
            *tables,
            f"Results, figures and reproduction.md are in {self.workplace.directory}/.",
            document={results.name: results.model_dump(mode="json") for results in found},
        )


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
