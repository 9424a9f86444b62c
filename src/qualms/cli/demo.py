"""``qualms demo``: the whole way, on molecules that come with the package."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from ase import Atoms

from qualms.atomistic.evaluation import Evaluation, evaluate
from qualms.atomistic.memory import default_threads
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import make_settings
from qualms.cli._common import Force, Json, Quiet, Seed, Terminal, Threads
from qualms.cli.train import summary_document
from qualms.data import qm9
from qualms.io.files import atomic_path, check_output
from qualms.progress import Stages
from qualms.report.figures import (
    ConditionalErrorDisplay,
    Display,
    ParityDisplay,
    ReliabilityDisplay,
    SubsampleSizeDisplay,
)
from qualms.report.tables import paper_table, score_records, score_table
from qualms.reproduce.study import study_subsamples

N_TRAIN, N_VALIDATION, N_TEST = 2000, 500, 500
SIZES = (0.05, 0.25, 0.5, 0.75, 0.9)
TARGET = "atomization_energy_per_atom"
UNITS = "eV/atom"
_PP = "GPR PP"
FILES = ("model.safetensors", "errors.png", "parity.png", "reliability.png", "subsamples.png")


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for the model and the figures.")
    ] = Path("qualms-demo"),
    seed: Seed = None,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train on 2000 molecules of QM9, judge the error bars on 500 others, and draw them."""
    terminal = Terminal(quiet=quiet, as_json=as_json)
    started = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        check_output(output / name, force=force)
    molecules = qm9()
    train, rest = molecules[:N_TRAIN], molecules[N_TRAIN:]
    validation, test = rest[:N_VALIDATION], rest[N_VALIDATION : N_VALIDATION + N_TEST]
    terminal.say(
        f"Atomisation energies of QM9: {N_TRAIN} training, {N_VALIDATION} validation, "
        f"{N_TEST} test molecules."
    )
    settings = make_settings(
        {"target": TARGET, "kind": "intensive", "units": UNITS, "seed": seed or 0}
    )
    study = study_subsamples(
        train,
        validation,
        test,
        settings,
        SIZES,
        threads=default_threads(threads),
        stages=Stages(terminal.progress()),
    )
    evaluation = evaluate(study.model, test, validation, stages=Stages(terminal.progress()))
    study.model.save(output / FILES[0], force=force)
    _draw(output, evaluation, study.rows, force)
    terminal.result(
        study.model.summary(),
        paper_table(study.rows, title="Mean log likelihood of the test molecules"),
        score_table(evaluation.rows, units=UNITS, title="Sub-samples of one half"),
        _one_molecule(study.model, test[0]),
        f"Model and figures are in {output}/. Done in {time.perf_counter() - started:.0f} s.",
        document={
            **summary_document(study.model),
            "log_likelihood": {str(size): dict(row) for size, row in study.rows.items()},
            "scores": score_records(evaluation.rows),
            "seconds": time.perf_counter() - started,
        },
    )


def _one_molecule(model: AtomisticModel, molecule: Atoms) -> str:
    prediction = model.predict([molecule])
    return (
        f"One new molecule, {molecule.symbols.get_chemical_formula()}: "
        f"{prediction.mean[0]:.4f} ± {prediction.std[0]:.4f} {UNITS} "
        f"(truth {molecule.info[TARGET]:.4f})"
    )


def _draw(
    directory: Path,
    evaluation: Evaluation,
    rows: Mapping[float, Mapping[str, float]],
    force: bool,
) -> None:
    y, prediction = evaluation.y, evaluation.prediction
    displays: dict[str, Display] = {
        "errors.png": ConditionalErrorDisplay.from_prediction(y, prediction, units=UNITS),
        "parity.png": ParityDisplay.from_prediction(y, prediction, units=UNITS, target="energy"),
        "reliability.png": ReliabilityDisplay.from_prediction(y, prediction),
        "subsamples.png": _sizes(rows),
    }
    for name, display in displays.items():
        with atomic_path(directory / name, force=force) as path:
            display.plot().save(path)


def _sizes(rows: Mapping[float, Mapping[str, float]]) -> SubsampleSizeDisplay:
    """Show the projected process, which has no sub-samples, as a line."""
    members = {
        size: {name: value for name, value in row.items() if name != _PP}
        for size, row in rows.items()
    }
    return SubsampleSizeDisplay.from_table(
        members, references={_PP: next(iter(rows.values()))[_PP]}
    )
