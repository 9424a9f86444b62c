"""``qualms select``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from qualms.cli.options import FORMATS, RUNNING, Force, Json, Model, Quiet, Seed, with_options
from qualms.cli.terminal import Terminal, naming_files, with_files
from qualms.errors import InputError, counted


@with_options({name: RUNNING[name] for name in ("weights", "threads")})
def select(
    model: Model,
    pool: Annotated[
        list[Path], Argument(metavar="POOL...", help=f"Structures without labels: {FORMATS}.")
    ],
    number: Annotated[int, Option("--number", "-n", min=1, help="Structures to choose.")],
    output: Annotated[
        Path,
        Option("--output", "-o", help="Extended XYZ file to write, in the order of choice (.xyz)."),
    ],
    labelled: Annotated[
        list[Path] | None,
        Option(
            help="Structures that have labels; those of the pool that repeat them are left out."
        ),
    ] = None,
    for_: Annotated[
        list[Path] | None,
        Option(
            "--for",
            help="Structures that the model will be used for, whose variance the choice reduces.",
        ),
    ] = None,
    at_random: Annotated[
        bool, Option("--random", help="Choose at random, for comparison or a test set.")
    ] = False,
    min_gap: Annotated[
        int, Option(min=0, help="Least number of frames from one choice to another.")
    ] = 0,
    max_novelty: Annotated[
        float | None,
        Option(help="Leave out structures of a larger novelty, which are unphysical."),
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **running: Any,
) -> None:
    """Run ``qualms select``."""
    from ase import Atoms

    from qualms.active import select as choose
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.structures import Places, file_of, read_files
    from qualms.io.files import atomic_output, check_not_input, check_output
    from qualms.io.xyz import xyz_text

    terminal = Terminal(quiet=quiet, as_json=as_json)
    if output.suffix not in (".xyz", ".extxyz"):
        raise InputError(f"{output} must end in .xyz.", parameter="--output")
    if for_ and at_random:
        raise InputError("--for and --random exclude each other.", parameter="--random")
    check_not_input(output, model, *map(file_of, (*pool, *(labelled or ()), *(for_ or ()))))
    check_output(output, force=force)
    loaded = AtomisticModel.load(
        model, threads=running["threads"], representation=running["weights"]
    )
    frames, places = read_files(pool)
    paths = Places(tuple(map(str, pool)), places.sizes)  # names alone may be the same
    with naming_files(places):
        selection = choose(
            loaded,
            frames,
            number,
            strategy="random" if at_random else "target" if for_ else "variance",
            targets=read_files(for_)[0] if for_ else None,
            labelled=read_files(labelled)[0] if labelled else (),
            min_gap=min_gap,
            max_novelty=max_novelty,
            seed=seed,
        )
        left_out = [(paths.place(i), with_files(why)) for i, why in selection.left_out.items()]
    units = loaded.settings.units_of("energy") or ""
    found, picks = [], []
    for rank, (atoms, index, std) in enumerate(
        zip(selection.frames, selection.indices.tolist(), selection.std.tolist(), strict=True), 1
    ):
        path, number_in_file = paths.place(index)
        marked: Atoms = atoms.copy()  # type: ignore[no-untyped-call]
        marked.info |= {"select_rank": rank, "select_std": std}
        found.append(xyz_text(marked))
        picks.append({"file": path, "structure": number_in_file, "std": std})
    with atomic_output(output, force=force, mode="w") as file:
        file.write("".join(found))
    for (path, number_in_file), reason in left_out[:10]:
        terminal.info(f"Left out: structure {number_in_file} of {path} {reason}.")
    if len(left_out) > 10:
        terminal.info(f"Left out: {len(left_out)} structures in all.")
    terminal.result(
        f"{counted(len(found), 'structure')} of {len(frames)} → {output}; σ from "
        f"{selection.std[0]:.3g} to {selection.std[-1]:.3g} {units}".rstrip(),
        document={
            "output": str(output),
            "units": units,
            "picks": picks,
            "left_out": [
                {"file": path, "structure": number_in_file, "reason": reason}
                for (path, number_in_file), reason in left_out
            ],
        },
    )
