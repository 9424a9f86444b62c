"""``qualms select``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qualms.cli.options import FORMATS, RUNNING, Force, Json, Quiet, Seed, with_options
from qualms.cli.terminal import Terminal, naming_files, with_files
from qualms.errors import InputError, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ase import Atoms

    from qualms.active import Selection
    from qualms.atomistic.structures import Places

#: Numbers of structures for which the expected error is displayed.
_COUNTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@with_options({name: RUNNING[name] for name in ("weights", "threads")})
def select(
    files: Annotated[
        list[Path],
        Argument(
            metavar="[MODEL] POOL...",
            help="Model file (.safetensors), unless there is --representation; and structures "
            f"without labels: {FORMATS}.",
        ),
    ],
    output: Annotated[
        Path,
        Option("--output", "-o", help="Extended XYZ file to write, in the order of choice (.xyz)."),
    ],
    n: Annotated[
        int | None,
        Option("--number", "-n", min=1, help="Structures to choose; at most, if there is --until."),
    ] = None,
    until: Annotated[
        float | None,
        Option(
            help="Choose as many as it takes until no expected error of a candidate exceeds this: "
            "eV/Å if the model learned forces, otherwise eV/atom, in the units of the model.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        Option(
            help="variance: the largest calibrated variance that is left; target: the largest "
            "reduction of it for the structures of --for; farthest: by features alone; random. By "
            "default target if there is --for, and variance otherwise.",
        ),
    ] = None,
    labelled: Annotated[
        list[Path] | None,
        Option(
            help="Structures that have labels. Those of the pool that repeat them are left out; "
            "models of forces from few labels need them.",
        ),
    ] = None,
    for_: Annotated[
        list[Path] | None,
        Option("--for", help="Structures that the model will be used for."),
    ] = None,
    representation: Annotated[
        str | None,
        Option(
            help='Preset ("organic", "auto", …) of features, without a model: for --strategy '
            "farthest or random.",
        ),
    ] = None,
    cost: Annotated[
        str | None,
        Option(
            metavar="COST",
            help="What a label costs: atoms^3, or a key of the structures. The choice is that of "
            "the largest gain per cost.",
        ),
    ] = None,
    per_element: Annotated[
        int, Option(min=0, help="Least number of choices with each element of the pool.")
    ] = 0,
    group_key: Annotated[
        str | None,
        Option(
            help="Key of group labels; of one group, such as conformers of a molecule, one "
            "structure is chosen at most."
        ),
    ] = None,
    min_gap: Annotated[
        int, Option(min=0, help="Least number of frames from one choice to another.")
    ] = 0,
    max_std: Annotated[
        float | None,
        Option(
            help="Leave out structures of a larger expected error, in the units of --until, which "
            "are unphysical.",
        ),
    ] = None,
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
    from qualms.active import select as choose
    from qualms.atomistic.model import AtomisticModel
    from qualms.atomistic.structures import file_of, read_files
    from qualms.io.files import atomic_output, check_not_input, check_output
    from qualms.io.xyz import xyz_text

    terminal = Terminal(quiet=quiet, as_json=as_json)
    pool = files[representation is None :]
    if not pool:
        raise InputError(
            "There is no pool: name the model, and then files of structures.", parameter="pool"
        )
    if output.suffix not in (".xyz", ".extxyz"):
        raise InputError(f"{output} must end in .xyz.", parameter="--output")
    check_not_input(output, *map(file_of, (*files, *(labelled or ()), *(for_ or ()))))
    check_output(output, force=force)
    loaded = None
    if representation is None:
        loaded = AtomisticModel.load(
            files[0], threads=running["threads"], representation=running["weights"]
        )
    frames, places = _open(pool)
    with naming_files(places):
        selection = choose(
            loaded,
            frames,
            n,
            strategy=strategy or ("target" if for_ else "variance"),
            targets=read_files(for_)[0] if for_ else None,
            labelled=read_files(labelled)[0] if labelled else (),
            until=until,
            cost=cost,
            per_element=per_element,
            groups=group_key,
            min_gap=min_gap,
            max_std=max_std,
            max_novelty=max_novelty,
            representation=None if representation == "auto" else representation,
            seed=seed,
        )
        left_out = [(places.place(i), with_files(why)) for i, why in selection.left_out.items()]
    units = ""
    if loaded is not None:
        units = loaded.settings.units_of(selection.quantity) or ""
    picks = []
    with atomic_output(output, force=force, mode="w") as file:
        for rank, atoms in enumerate(selection.frames, 1):
            path, number = places.place(int(selection.indices[rank - 1]))
            pick = {"rank": rank, "file": path, "structure": number}
            pick |= {
                "std": _number(selection.std[rank - 1]),
                "gain": _number(selection.gain[rank - 1]),
                "reason": selection.reasons[rank - 1],
            }
            picks.append(pick)
            marked: Atoms = atoms.copy()  # type: ignore[no-untyped-call]
            names = ("rank", "std", "gain", "reason")
            marked.info |= {f"select_{k}": pick[k] for k in names if pick[k] is not None}
            file.write(xyz_text(marked))
    for (path, number), reason in left_out[:10]:
        terminal.info(f"Left out: structure {number} of {path} {reason}.")
    if len(left_out) > 10:
        terminal.info(f"Left out: {len(left_out)} structures in all.")
    terminal.result(
        f"{counted(len(picks), 'structure')} of {len(frames)} → {output}",
        *_curve_text(selection, units, "targets" if for_ else "pool"),
        document={
            "output": str(output),
            "quantity": selection.quantity,
            "units": units,
            "picks": picks,
            "curve": None if selection.curve is None else selection.curve.tolist(),
            "left_out": [
                {"file": path, "structure": number, "reason": reason}
                for (path, number), reason in left_out
            ],
        },
    )


def _open(paths: list[Path]) -> tuple[Sequence[Atoms], Places]:
    """Return the structures of files, which are read when they are needed, and their places."""
    from qualms.atomistic.structures import FrameFiles, Places, read_files, readable

    names = tuple(map(str, paths))  # names of files alone may be the same
    if readable(paths):
        sizes = tuple(len(FrameFiles.open(path)) for path in paths)
        return FrameFiles.open(paths), Places(names, sizes)
    frames, places = read_files(paths)
    return frames, Places(names, places.sizes)


def _number(value: float) -> float | None:
    """Return a number that JSON has."""
    return None if value != value else float(value)


def _curve_text(selection: Selection, units: str, of: str) -> list[str]:
    """Return the errors before and after the choices, as text."""
    if selection.curve is None or not len(selection.frames):
        return []
    n, name = len(selection.frames), {"forces": "force components"}.get(selection.quantity)
    lines = [
        f"σ of the choices: {selection.std[0]:.3g} to {selection.std[-1]:.3g} {units}".rstrip(),
        f"Expected RMSE of the {of}{f', {name}' if name else ''}, if the first k are labelled "
        "(band of 68 %):",
    ]
    for k in sorted({*(k for k in _COUNTS if k < n), n}):
        rmse, low, high = selection.curve[k]
        lines.append(f"{k:6d}  {rmse:.3g}  ({low:.3g} – {high:.3g}) {units}".rstrip())
    return lines
