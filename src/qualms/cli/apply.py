"""``qualms apply``: a calibration on new predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qualms.cli._common import Absent, Force, Json, Order, Quiet, Terminal
from qualms.ensembles.apply import apply_calibration
from qualms.ensembles.calibration_file import read_calibration
from qualms.errors import counted
from qualms.io.files import check_output, refuse_input


def apply(
    calibration: Annotated[
        Path, typer.Argument(metavar="CALIBRATION", help="File that `qualms calibrate` wrote.")
    ],
    predictions: Annotated[
        Path, typer.Argument(metavar="PREDICTIONS", help="New predictions of the same ensemble.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, of the same format.")
    ],
    target: Annotated[
        str | None, typer.Option(help="Property, if it has another name here.")
    ] = None,
    absent: Absent = None,
    order: Order = None,
    members: Annotated[bool, typer.Option(help="Write calibrated members, too.")] = True,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give predictions calibrated error bars, and members that have them."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    refuse_input(output, calibration, predictions)
    check_output(output, force=force)
    document = read_calibration(calibration)
    applied = apply_calibration(
        document,
        predictions,
        output,
        target=target,
        absent=absent,
        order=order,
        members=members,
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
