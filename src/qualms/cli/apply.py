"""``qualms apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from qualms.cli._common import (
    Absent,
    Force,
    Json,
    MeanColumn,
    MemberKeys,
    Order,
    Quiet,
    StdColumn,
    Terminal,
)


def apply(
    calibration: Annotated[
        Path, Argument(metavar="CALIBRATION", help="File written by `qualms calibrate`.")
    ],
    predictions: Annotated[
        list[Path],
        Argument(metavar="PREDICTIONS", help="New predictions of the same ensemble."),
    ],
    output: Annotated[Path, Option("--output", "-o", help="File to write, in the same format.")],
    target: Annotated[
        str | None, Option(help="Name of the property, if it is different here.")
    ] = None,
    member_keys: MemberKeys = None,
    mean_column: MeanColumn = None,
    std_column: StdColumn = None,
    absent: Absent = None,
    order: Order = None,
    write_members: Annotated[
        bool,
        Option("--with-members/--no-members", help="Whether to write calibrated members."),
    ] = True,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms apply``."""
    from qualms.atomistic.structures import file_of
    from qualms.ensembles.apply import apply_calibration
    from qualms.ensembles.calibration_file import read_calibration
    from qualms.errors import counted
    from qualms.io.files import check_not_input, check_output

    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_not_input(output, calibration, *map(file_of, predictions))
    check_output(output, force=force)
    document = read_calibration(calibration)
    applied = apply_calibration(
        document,
        predictions,
        output,
        target=target or mean_column,
        members=member_keys,
        mean=mean_column,
        std=std_column,
        absent=absent,
        order=order,
        write_members=write_members,
        force=force,
    )
    for remark in applied.remarks:
        terminal.warn(remark)
    terminal.result(
        f"{counted(applied.n_points, 'prediction')} → {output}",
        document={
            "output": str(output),
            "target": target or document.target,
            "n_points": applied.n_points,
            "n_members": applied.n_members,
            "remarks": list(applied.remarks),
        },
    )
