"""``qualms predict``: properties of new structures, with error bars."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predicting import Chunk, atom_contributions
from qualms.atomistic.progress import Stages
from qualms.atomistic.structures import iter_frames
from qualms.cli.console import Terminal
from qualms.cli.options import Force, Json, Model, Quiet, Threads
from qualms.core.typing import IntArray
from qualms.errors import InputError
from qualms.prediction import Prediction
from qualms.storage.files import check_output
from qualms.storage.predictions import open_writer

#: Key of the flag of structures that look like extrapolation.
FLAG = "qualms_extrapolates"
#: What the key of the target ends in where it stands for contributions of atoms.
ATOMS = "_atoms"


def predict(
    model: Model,
    structures: Annotated[
        Path, typer.Argument(metavar="STRUCTURES", help="New structures: extended XYZ.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .xyz, .csv or .npz.")
    ],
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Write what every member says, too.")
    ] = False,
    atoms: Annotated[
        bool,
        typer.Option("--atoms", help="Write what each atom contributes, with its error bar, too."),
    ] = False,
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-species",
            help="Predict as if atoms of elements the model does not know were not there.",
        ),
    ] = False,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict new structures. They are read as a stream and may be larger than memory."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    check_output(output, force=force)
    loaded = AtomisticModel.load(model, threads=threads)
    per_atom = loaded.fitted.per_atom
    if atoms and per_atom:
        raise InputError("--atoms", "a property of atoms", "one of structures", "Leave it out.")
    unknown = "ignore" if ignore_unknown else "error"
    target, units = loaded.settings.target, loaded.settings.units
    n_structures = n_flagged = n_unknown = 0
    with ExitStack() as stack:
        writer = stack.enter_context(
            open_writer(
                output,
                f"{target}{ATOMS}" if atoms else target,
                kind="atomic" if per_atom or atoms else "structure",
                ensemble=ensemble,
                force=force,
            )
        )
        advance = stack.enter_context(Stages(terminal.progress()).stage("Structures"))
        for chunk in loaded.stream(iter_frames(structures), unknown_species=unknown):
            novelty = np.empty((len(chunk.frames), 2))
            prediction = chunk.predict(chunk.rows(novelty))
            flags = chunk.extrapolates(prediction, novelty)
            extra: dict[str, list[Any]] = {FLAG: flags.tolist()}
            if units:
                extra[f"{target}_units"] = [units] * len(chunk.frames)
            written = _Written(chunk.frames, prediction, chunk.centers if per_atom else None, extra)
            if atoms:
                written = _of_atoms(chunk, prediction, target, extra)
            writer.write(written.frames, written.prediction, rows=written.rows, extra=written.extra)
            n_structures += len(chunk.frames)
            n_flagged += int(flags.sum())
            n_unknown += int(chunk.has_unknown.sum())
            advance(n_structures)
    if n_unknown:
        terminal.warn(f"{n_unknown} of {n_structures} structures have elements that are ignored.")
    if n_flagged:
        terminal.warn(
            f"{n_flagged} of {n_structures} structures look like extrapolation ({FLAG}): "
            "trust their error bars less."
        )
    terminal.result(
        f"{n_structures} structures → {output}",
        document={
            "output": str(output),
            "target": target,
            "units": units,
            "n_structures": n_structures,
            "n_extrapolating": n_flagged,
            "n_unknown_species": n_unknown,
        },
    )


class _Written(NamedTuple):
    """What goes to the file."""

    frames: list[Atoms]
    prediction: Prediction
    rows: list[IntArray] | None
    extra: dict[str, list[Any]]


def _of_atoms(
    chunk: Chunk, prediction: Prediction, target: str, extra: dict[str, list[Any]]
) -> _Written:
    """Return what atoms contribute, and beside it the prediction of their structure."""
    whole = {
        target: prediction.mean.tolist(),
        f"{target}_uncertainty": prediction.std.tolist(),
    }
    return _Written(
        frames=[_reference_aside(frame, target) for frame in chunk.frames],
        prediction=Prediction.concatenate(atom_contributions(chunk)),
        rows=chunk.centers,
        extra=whole | extra,
    )


def _reference_aside(frame: Atoms, target: str) -> Atoms:
    """Return a structure whose own value of the target is a reference, unless it was predicted."""
    atoms: Atoms = frame.copy()  # type: ignore[no-untyped-call]
    results = dict(getattr(frame.calc, "results", {}))
    value = atoms.info.pop(target, None)
    value = results.pop(target, None) if value is None else value
    was_predicted = atoms.info.pop(f"{target}_uncertainty", None) is not None
    atoms.info.pop(f"{target}_ensemble", None)
    if value is not None and not was_predicted:
        atoms.info.setdefault(f"REF_{target}", value)
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)  # type: ignore[no-untyped-call]
    return atoms
