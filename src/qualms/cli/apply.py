"""``qualms apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from qualms.cli.options import READING, Force, Json, Quiet, reading, with_options
from qualms.cli.terminal import Terminal
from qualms.errors import counted, warn

_TARGET = Annotated[str | None, Option(help="Name of the property, if it is different here.")]
_COLUMNS = ("member_keys", "mean_column", "std_column", "absent", "order")


@with_options({"target": _TARGET} | {name: READING[name] for name in _COLUMNS})
def apply(
    calibration: Annotated[
        Path, Argument(metavar="CALIBRATION", help="File written by `qualms calibrate`.")
    ],
    predictions: Annotated[
        list[Path],
        Argument(metavar="PREDICTIONS", help="New predictions of the same ensemble."),
    ],
    output: Annotated[Path, Option("--output", "-o", help="File to write, in the same format.")],
    write_members: Annotated[
        bool,
        Option("--with-members/--no-members", help="Whether to write calibrated members."),
    ] = True,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **names: Any,
) -> None:
    """Run ``qualms apply``."""
    from qualms.atomistic.structures import file_of
    from qualms.ensembles.apply import apply_calibration
    from qualms.ensembles.calibration_file import read_calibration
    from qualms.io.files import check_not_input, check_output

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_not_input(output, calibration, *map(file_of, predictions))
    check_output(output, force=force)
    document = read_calibration(calibration)
    target = names["target"] or names["mean_column"] or document.target
    applied = apply_calibration(
        document,
        predictions,
        output,
        **reading(**names | {"target": target}),
        write_members=write_members,
        force=force,
    )
    for remark in applied.remarks:
        warn(remark)
    terminal.result(
        f"{counted(applied.n_points, 'prediction')} → {output}",
        document={
            "output": str(output),
            "target": target,
            "n_points": applied.n_points,
            "n_members": applied.n_members,
            "remarks": list(applied.remarks),
        },
    )
