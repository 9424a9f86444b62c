"""``qualms reproduce``: the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from qualms.cli._common import Force, Json, Quiet, Terminal, Threads
from qualms.cli.verb import Verb
from qualms.errors import InputError, unknown_choice
from qualms.io.files import check_output
from qualms.progress import Stages

if TYPE_CHECKING:
    from qualms.reproduce.problems import Problem, ShiftedProblem
    from qualms.reproduce.results import Results

reproduce = typer.Typer(
    name="reproduce", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

Output = Annotated[
    Path, Option("--output", "-o", help="Directory for results, tables and figures.")
]
ScaleOption = Annotated[str, Option("--scale", help="paper, or small: a tenth of it.")]
Seeds = Annotated[int, Option("--seeds", min=1, max=1000, help="Number of random splits.")]
Memory = Annotated[str, Option("--memory", help="Memory limit for training, such as 8GB.")]
_DIRECTORY = Path("qualms-reproduction")
_SCALES = {"paper": "paper", "small": "small"}
_SPLITS = {"atoms": ["atoms"], "crystals": ["crystals"], "both": ["atoms", "crystals"]}


@reproduce.command(cls=Verb)
def qm9(
    data: Annotated[
        str | None, Option(help="NPZ file or dsgdb9nsd.xyz.tar.bz2; otherwise the package qm9pack.")
    ] = None,
    uncharacterized: Annotated[
        Path | None,
        Option(help="uncharacterized.txt of QM9: molecules of the archive to leave out."),
    ] = None,
    output: Output = _DIRECTORY,
    scale: ScaleOption = "paper",
    seeds: Seeds = 1,
    shift: Annotated[
        bool, Option("--shift", help="Also train on small molecules and test on large ones.")
    ] = False,
    memory: Memory = "10GB",
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Atomisation energies of QM9: 20,000 molecules, 5,000 representatives, five sizes."""
    from qualms.reproduce.problems import check_characterized, qm9_problem, qm9_shift

    chosen = _choice("scale", scale, _SCALES)
    source = data or ("subset" if chosen == "small" else "qm9pack")
    check_characterized(source, uncharacterized)
    run = _Run(Terminal(quiet=quiet, as_json=as_json), output, memory, threads, force)
    run.check("qm9")
    make = partial(qm9_problem, source, chosen, uncharacterized=uncharacterized)
    shifted = qm9_shift(source, chosen, uncharacterized=uncharacterized) if shift else None
    run.finish([run.problem(make, seeds, shifted)])


@reproduce.command(cls=Verb)
def csd(
    data: Annotated[
        Path, Option(help="CSD-1000R: extended XYZ, or chemiscope JSON.", show_default=False)
    ],
    relaxed: Annotated[
        Path | None, Option(help="CSD-2k: also predict these relaxed crystals.")
    ] = None,
    split: Annotated[
        str, Option(help="Split over atoms, as in the paper, over crystals, or both.")
    ] = "both",
    output: Output = _DIRECTORY,
    scale: ScaleOption = "paper",
    seeds: Seeds = 1,
    memory: Memory = "10GB",
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """¹H shieldings of molecular crystals: 20,000 atoms, 10,000 representatives, five sizes."""
    from qualms.data import csd as read_csd
    from qualms.reproduce.problems import csd_problem, csd_shift

    chosen, splits = _choice("scale", scale, _SCALES), _choice("split", split, _SPLITS)
    run = _Run(Terminal(quiet=quiet, as_json=as_json), output, memory, threads, force)
    run.check(*(f"csd-{each}" for each in splits))
    crystals = read_csd(data)
    shifted = None
    if relaxed is not None:
        shifted = csd_shift(crystals, read_csd(relaxed), chosen, source=relaxed.name)
    found = []
    for each in splits:
        make = partial(csd_problem, crystals, each, chosen, source=data.name)
        found.append(run.problem(make, seeds, shifted if each == splits[-1] else None))
    run.finish(found)


@reproduce.command(cls=Verb)
def tables(
    results: Annotated[list[Path], Argument(metavar="RESULTS...", help="JSON files.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="Directory; otherwise that of each results file."),
    ] = None,
    force: Force = False,
) -> None:
    """Write the tables, and the figures that need no predictions, of existing results."""
    from qualms.reproduce.figures import draw_results
    from qualms.reproduce.results import read_results
    from qualms.reproduce.tables import write_tables

    for path, found in [(path, read_results(path)) for path in results]:
        directory = output or path.parent
        directory.mkdir(parents=True, exist_ok=True)
        write_tables(directory, found, force=force)
        draw_results(directory, found, force=force)


@dataclass
class _Run:
    """One invocation: where it writes, and the resources that it may use."""

    terminal: Terminal
    output: Path
    memory: str
    threads: int | None
    force: bool

    def check(self, *names: str) -> None:
        """Make the directory; reject existing results before the work starts."""
        from qualms.atomistic.settings import parse_memory

        parse_memory(self.memory)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"The directory {str(self.output)!r} cannot be made: {error.strerror}."
            raise InputError(message, parameter="output") from error
        for name in names:
            check_output(self.output / f"{name}.json", force=self.force)

    def problem(
        self, make: Callable[[int], Problem], seeds: int, shifted: ShiftedProblem | None
    ) -> Results:
        """Run all seeds and the shifted problem; write results after each of them."""
        from qualms.reproduce.figures import draw_panels, draw_results
        from qualms.reproduce.results import Results, machine, write_results
        from qualms.reproduce.study import run_seed, run_shift
        from qualms.reproduce.tables import write_tables
        from qualms.resources import default_threads

        options: dict[str, Any] = {
            "threads": default_threads(self.threads),
            "memory": self.memory,
            "stages": Stages(self.terminal.progress()),
        }
        found = []
        for seed in range(seeds):
            problem = make(seed)
            self.terminal.info(f"{problem.title}, seed {seed}:")
            one, panels = run_seed(problem, report=self.terminal.info, **options)
            found.append(one)
            results = Results(
                name=problem.name,
                title=problem.title,
                scale=problem.scale,
                source=problem.source,
                units=problem.settings.units,
                representation=problem.settings.features.model_dump(mode="json"),
                machine=machine(),
                seeds=found,
            )
            path = self.output / f"{problem.name}.json"
            results = write_results(path, results)
            if seed == 0:
                draw_panels(self.output, results, panels)
        if shifted is not None:
            self.terminal.info(f"Out of distribution: trained on {shifted.trained_on}")
            shift = run_shift(shifted, **options)
            results = write_results(path, results.model_copy(update={"shift": shift}))
        write_tables(self.output, results, force=True)
        draw_results(self.output, results, force=True)
        return results

    def finish(self, found: list[Results]) -> None:
        """Print the log likelihoods."""
        from qualms.reproduce.tables import ensemble_mean_table, full_model_table

        tables = [t(results) for results in found for t in (full_model_table, ensemble_mean_table)]
        self.terminal.result(
            *tables,
            f"Results, tables and figures are in {self.output}/.",
            document={results.name: results.model_dump(mode="json") for results in found},
        )


def _choice(parameter: str, given: str, choices: Mapping[str, Any]) -> Any:
    if given not in choices:
        raise unknown_choice(parameter, given, choices)
    return choices[given]
