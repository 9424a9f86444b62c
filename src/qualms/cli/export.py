"""``qualms export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from qualms.cli.options import Force, Json, Model, Quiet
from qualms.cli.terminal import Terminal


def export(
    model: Model,
    to: Annotated[str, Option("--to", help="What runs the simulation: lammps, ipi or metatomic.")],
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            help="File to write, which the input of the program names; or a model for metatomic.",
        ),
    ],
    types: Annotated[
        str | None,
        Option(
            help="LAMMPS: elements of the types of atoms, such as 'H O'; by default those of their "
            "masses."
        ),
    ] = None,
    forces_uncertainty_every: Annotated[
        int,
        Option(help="LAMMPS: steps from one with uncertainties of forces to the next."),
    ] = 1,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms export``."""
    from qualms.engines.export import export as write

    elements = None if types is None else types.replace(",", " ").split()
    every = forces_uncertainty_every
    usage = write(model, to, output, types=elements, forces_uncertainty_every=every, force=force)
    Terminal(quiet=quiet, as_json=as_json).result(
        f"Wrote {output}. Use: {usage}",
        document={"output": str(output), "engine": to, "usage": usage},
    )
