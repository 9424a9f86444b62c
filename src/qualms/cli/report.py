"""``qualms report``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qualms.cli.evaluate import OPTIONS, Files, evaluate_files
from qualms.cli.options import Force, Json, Quiet, with_options
from qualms.cli.terminal import Terminal

if TYPE_CHECKING:
    from ase import Atoms

    from qualms.arrays import Float64Array
    from qualms.atomistic.model import AtomisticModel
    from qualms.report.structure_map import AtomValues, Coordinates, Properties


@with_options(OPTIONS)
def report(
    files: Files,
    output: Annotated[Path, Option("--output", "-o", help="File to write: .html.")],
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Run ``qualms report``."""
    from qualms.atomistic.structures import file_of
    from qualms.io.files import check_not_input
    from qualms.report.report import check_report, write_report
    from qualms.report.tables import interval_records, interval_table, novelty_records

    terminal = Terminal(quiet=quiet, as_json=as_json)
    for path in check_report(output, force=force):
        check_not_input(path, *map(file_of, files), options["calibration_file"])
    evaluated = evaluate_files(files, terminal, **options)
    first, main = next(iter(evaluated.evaluations.items()))
    model = evaluated.model
    names = [path.name for path in files]
    of = ", ".join(names) if model is None else f"{names[0]} on {', '.join(names[1:])}"
    values: AtomValues | None = None
    coordinates: Coordinates | None = None
    if model is not None and main.frames is not None:
        coordinates = partial(_coordinates, model, main.frames)
        if not model.fitted.per_atom:
            values = partial(_atom_values, model, main.frames, options["in_units"])
    written = write_report(
        output,
        evaluated.evaluations,
        title=f"{main.target}: {of}",
        facts=evaluated.facts,
        remarks=evaluated.remarks,
        atom_values=values,
        coordinates=coordinates,
        force=force,
    )
    parts: list[Any] = []
    documents: dict[str, Any] = {}
    for name, section in written.sections.items():
        assessment, target = section.assessment, section.evaluation.target
        scores, units = assessment.scores, section.evaluation.units
        parts += [f"{target}: {assessment.sentence}", *assessment.details]
        parts.append(interval_table(scores, units=units, title=target))
        parts += [section.by_novelty] if section.by_novelty else []
        documents[name] = {
            "units": units,
            "n_points": len(section.evaluation),
            "assessment": assessment.document(),
            "scores": interval_records(scores),
            "by_novelty": novelty_records(section.evaluation),
        }
    paths = [str(path) for path in written.paths]
    terminal.result(
        *parts,
        *written.remarks,
        f"Wrote {', '.join(paths)}.",
        document={
            "output": paths,
            "target": main.target,
            "n_unlabelled": main.n_unlabelled,
            "n_unknown_species": main.n_unknown,
            "n_extrapolating": main.n_extrapolating,
            "remarks": list(written.remarks),
            **documents.pop(first),
            **documents,
        },
    )


def _coordinates(
    model: AtomisticModel, frames: Sequence[Atoms], indices: Sequence[int]
) -> Sequence[Float64Array]:
    """Return the kernel principal components of some structures: the axes of the map."""
    from qualms.atomistic.evaluation import kernel_components

    return kernel_components(model, [frames[i] for i in indices])


def _atom_values(
    model: AtomisticModel, frames: Sequence[Atoms], in_units: str | None, indices: Sequence[int]
) -> Properties:
    """Return novelty and uncertainties of the atoms of some structures, for the map."""
    import numpy as np

    from qualms.evaluation import energy_factor
    from qualms.report.structure_map import NOVELTY

    names = (NOVELTY, "σ of the contribution", "σ of the force")
    energies = (model.settings.units, model.settings.units_of("forces"))
    units = [(1.0, ""), *(energy_factor(name, in_units) for name in energies)]
    has_forces = model.fitted.settings.has_forces
    prediction = model.predict([frames[i] for i in indices], forces=has_forces, atoms=True)
    columns = [prediction.atom_novelty, [part.std for part in prediction.atoms]]
    columns += [prediction.force_std] if has_forces else []
    return {
        name: (np.concatenate(values) * factor, unit)
        for name, (factor, unit), values in zip(names, units, columns, strict=False)
    }
