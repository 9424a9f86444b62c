"""``qualms reproduce``: the paper's tables and figures again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from qualms.atomistic.memory import default_threads, parse_memory
from qualms.atomistic.training import Resources
from qualms.cli._common import Force, Json, Quiet, Terminal, Threads
from qualms.data import csd as read_csd
from qualms.errors import InputError
from qualms.io.files import check_output, refuse_input
from qualms.progress import Stages
from qualms.report.tables import Table
from qualms.reproduce.complete import check_together, complete_part, size_note
from qualms.reproduce.page import write_page
from qualms.reproduce.pictures import draw_figures
from qualms.reproduce.places import Workplace
from qualms.reproduce.problems import (
    Scale,
    Split,
    check_characterized,
    csd_problem,
    csd_settings,
    qm9_problem,
    qm9_settings,
)
from qualms.reproduce.results import Results, read_results
from qualms.reproduce.session import Listener, Session, share_of_training
from qualms.reproduce.shift import csd_shift, qm9_shift
from qualms.reproduce.tables import terminal_tables

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
    terminal = Terminal(quiet=quiet, as_json=as_json)
    run = _session(terminal, output, memory, discard_kernels, threads, force)
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
    _print(terminal, output, run.finish(["qm9"]))


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
    terminal = Terminal(quiet=quiet, as_json=as_json)
    run = _session(terminal, output, memory, discard_kernels, threads, force)
    works = [
        run.start(partial(csd_problem, crystals, each, checked, source=data.name))
        for each in splits
    ]
    others = None if relaxed is None else read_csd(relaxed)
    if others is not None and not run.needs_relaxed(others, crystals, works):
        others = None
    run.announce(works, seeds, 0.0 if others is None else share_of_training(crystals, others))
    run.begin(works)
    for each, work in zip(splits, works, strict=True):
        results = run.all_seeds(work, seeds)
        if others is not None and relaxed is not None and each == splits[-1]:
            # The model is that for new crystals, whatever the split: these are new.
            settings, means = csd_settings("crystals", checked), run.means(results.name)
            found = csd_shift(crystals, others, checked, settings, means)
            run.add_shift(results, found.model_copy(update={"source": relaxed.name}))
    _print(terminal, output, run.finish([f"csd-{each}" for each in splits]))


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
    write_page(output, found, figures="" if figures == "." else f"{figures}/", force=force)


def _session(
    terminal: Terminal,
    output: Path,
    memory: str,
    discard_kernels: bool,
    threads: int | None,
    force: bool,
) -> Session:
    parse_memory(memory)
    return Session(
        Workplace(output, keep_kernels=not discard_kernels),
        Resources(threads=default_threads(threads), memory=memory),
        Listener(terminal.say, terminal.warn, lambda: Stages(terminal.progress())),
        force=force,
    )


def _print(terminal: Terminal, directory: Path, found: Mapping[str, Results]) -> None:
    """Print what a run found."""
    tables: list[str | Table] = []
    for results in found.values():
        tables += [*terminal_tables(results), *filter(None, [size_note(results)])]
    terminal.result(
        *tables,
        f"Results, figures and reproduction.md are in {directory}/.",
        document={name: results.model_dump(mode="json") for name, results in found.items()},
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
