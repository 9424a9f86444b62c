"""``qualms report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qualms.cli.evaluate import OPTIONS, Files, evaluate_files
from qualms.cli.options import Force, Json, Quiet, with_options
from qualms.cli.terminal import Terminal

if TYPE_CHECKING:
    from qualms.atomistic.model import AtomisticModel
    from qualms.report.structure_map import AtomValues, Coordinates


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
    from qualms.report.tables import interval_records, interval_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    for path in check_report(output, force=force):
        check_not_input(path, *map(file_of, files), options["calibration_file"])
    evaluated = evaluate_files(files, terminal, **options)
    first, main = next(iter(evaluated.evaluations.items()))
    model = evaluated.model
    names = [path.name for path in files]
    of = ", ".join(names) if model is None else f"{names[0]} on {', '.join(names[1:])}"
    values, coordinates = None, None
    if model is not None:
        values = _atom_values(model, main.frames or (), options["in_units"])
        coordinates = _coordinates(model, main.frames or ())
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
        documents[name] = {
            "units": units,
            "n_points": len(section.evaluation),
            "assessment": assessment.document(),
            "scores": interval_records(scores),
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


def _coordinates(model: AtomisticModel, frames: Sequence[Any]) -> Coordinates:
    """Return a function that computes the axes of the map: kernel principal components."""
    from qualms.atomistic.evaluation import kernel_components

    return lambda some: kernel_components(model, [frames[i] for i in some])


def _atom_values(
    model: AtomisticModel, frames: Sequence[Any], in_units: str | None
) -> AtomValues | None:
    """Return a function that computes novelty and uncertainties of atoms for the map."""
    import numpy as np

    from qualms.evaluation import energy_factor
    from qualms.report.structure_map import NOVELTY, Properties

    if model.fitted.per_atom:
        return None
    names = (NOVELTY, "σ of the contribution", "σ of the force")
    energies = (model.settings.units, model.settings.units_of("forces"))
    units = [(1.0, ""), *(energy_factor(name, in_units) for name in energies)]

    def atom_values(some: Sequence[int]) -> Properties:
        has_forces = model.fitted.settings.has_forces
        prediction = model.predict([frames[i] for i in some], forces=has_forces, atoms=True)
        columns = [prediction.atom_novelty, [part.std for part in prediction.atoms]]
        columns += [prediction.force_std] if has_forces else []
        return {
            name: (np.concatenate(values) * factor, unit)
            for name, (factor, unit), values in zip(names, units, columns, strict=False)
        }

    return atom_values
