"""``python -m paper``: the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from paper.csd import csd as read_csd
from paper.figures import draw_panels, draw_results
from paper.problems import (
    Problem,
    ShiftedProblem,
    csd_problem,
    csd_shift,
    qm9_problem,
    qm9_shift,
)
from paper.results import Results, machine, read_results, write_results
from paper.study import run_seed, run_shift
from paper.tables import ensemble_mean_table, full_model_table, write_tables
from qualms.atomistic.settings import parse_memory
from qualms.cli.app import Verb, main
from qualms.cli.options import Force, Json, Quiet, Threads
from qualms.cli.terminal import Terminal
from qualms.errors import InputError, unknown_choice
from qualms.io.files import check_output
from qualms.progress import Stages
from qualms.resources import default_threads

app = typer.Typer(
    name="python -m paper",
    help="Reproduce the tables and figures of Musil et al. 2019.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Output = Annotated[
    Path, Option("--output", "-o", help="Directory for results, tables and figures.")
]
Scale = Annotated[str, Option("--scale", help="paper, or small: a tenth of it.")]
Seeds = Annotated[int, Option("--seeds", min=1, max=1000, help="Number of random splits.")]
Memory = Annotated[str, Option("--memory", help="Memory limit for training, such as 8GB.")]
_DIRECTORY = Path("qualms-reproduction")
_SCALES = {"paper": "paper", "small": "small"}
_SPLITS = {"atoms": ["atoms"], "crystals": ["crystals"], "both": ["atoms", "crystals"]}


@app.command(cls=Verb)
def qm9(
    data: Annotated[
        str | None, Option(help="NPZ file or dsgdb9nsd.xyz.tar.bz2; otherwise the package qm9pack.")
    ] = None,
    uncharacterized: Annotated[
        Path | None,
        Option(help="uncharacterized.txt of QM9: molecules of the archive to leave out."),
    ] = None,
    output: Output = _DIRECTORY,
    scale: Scale = "paper",
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
    chosen = _choice("scale", scale, _SCALES)
    source = data or ("subset" if chosen == "small" else "qm9pack")
    run = _Run(Terminal(quiet=quiet, as_json=as_json), output, memory, threads, force)
    run.check("qm9")
    make = partial(qm9_problem, source, chosen, uncharacterized=uncharacterized)
    shifted = qm9_shift(source, chosen, uncharacterized=uncharacterized) if shift else None
    run.finish([run.problem(make, seeds, shifted)])


@app.command(cls=Verb)
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
    scale: Scale = "paper",
    seeds: Seeds = 1,
    memory: Memory = "10GB",
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """¹H shieldings of molecular crystals: 20,000 atoms, 10,000 representatives, five sizes."""
    chosen, splits = _choice("scale", scale, _SCALES), _choice("split", split, _SPLITS)
    run = _Run(Terminal(quiet=quiet, as_json=as_json), output, memory, threads, force)
    run.check(*(f"csd-{each}" for each in splits))
    crystals = read_csd(data)
    shifted = None
    if relaxed is not None:
        shifted = csd_shift(crystals, read_csd(relaxed), chosen, source=relaxed.name)
    results = []
    for each in splits:
        make = partial(csd_problem, crystals, each, chosen, source=data.name)
        results.append(run.problem(make, seeds, shifted if each == splits[-1] else None))
    run.finish(results)


@app.command(cls=Verb)
def tables(
    results: Annotated[list[Path], Argument(metavar="RESULTS...", help="JSON files.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="Directory; otherwise that of each results file."),
    ] = None,
    force: Force = False,
) -> None:
    """Write the tables, and the figures that need no predictions, of existing results."""
    for path, content in [(path, read_results(path)) for path in results]:
        directory = output or path.parent
        directory.mkdir(parents=True, exist_ok=True)
        write_tables(directory, content, force=force)
        draw_results(directory, content, force=force)


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
        options: dict[str, Any] = {
            "threads": default_threads(self.threads),
            "memory": self.memory,
            "stages": Stages(self.terminal.progress()),
        }
        seed_results = []
        for seed in range(seeds):
            problem = make(seed)
            self.terminal.info(f"{problem.title}, seed {seed}:")
            seed_result, panels = run_seed(problem, report=self.terminal.info, **options)
            seed_results.append(seed_result)
            results = Results(
                name=problem.name,
                title=problem.title,
                scale=problem.scale,
                source=problem.source,
                units=problem.settings.units,
                representation=problem.settings.features.model_dump(mode="json"),
                machine=machine(),
                seeds=seed_results,
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

    def finish(self, results: list[Results]) -> None:
        """Print the log likelihoods."""
        makers = (full_model_table, ensemble_mean_table)
        self.terminal.result(
            *(make(each) for each in results for make in makers),
            f"Results, tables and figures are in {self.output}/.",
            document={each.name: each.model_dump(mode="json") for each in results},
        )


def _choice(parameter: str, value: str, choices: Mapping[str, Any]) -> Any:
    if value not in choices:
        raise unknown_choice(parameter, value, choices)
    return choices[value]


if __name__ == "__main__":
    main(app)
