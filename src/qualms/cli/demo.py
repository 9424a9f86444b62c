"""``qualms demo``: train, evaluate and plot, with molecules that come with the package."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from qualms.cli._common import Force, Json, Quiet, Seed, Terminal, Threads

if TYPE_CHECKING:
    from qualms.report.figures import Display

N_TRAIN, N_VALIDATION, N_TEST, M = 2000, 500, 500, 1000
SIZES = (0.05, 0.25, 0.5, 0.75, 0.9)
TARGET = "atomization_energy_per_atom"
UNITS = "eV/atom"
_PP = "GPR PP"
_TITLE = "Mean log likelihood of the test molecules (sources: centred on the blend)"
FILES = ("model.safetensors", "errors.png", "residuals.png", "reliability.png", "subsamples.png")


def demo(
    output: Annotated[
        Path, Option("--output", "-o", help="Directory for the model and the figures.")
    ] = Path("qualms-demo"),
    seed: Seed = None,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms demo``."""
    from qualms.atomistic.evaluation import evaluate
    from qualms.atomistic.settings import make_settings
    from qualms.cli.train import summary_document
    from qualms.data import qm9
    from qualms.io.files import atomic_path, check_output
    from qualms.progress import Stages
    from qualms.report.figures import (
        ConditionalErrorDisplay,
        ReliabilityDisplay,
        ResidualDisplay,
        line_style,
        style,
        subsample_figure,
    )
    from qualms.report.tables import paper_table, score_records, score_table
    from qualms.reproduce.study import study_subsamples
    from qualms.resources import default_threads

    terminal = Terminal(quiet=quiet, as_json=as_json)
    started = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        check_output(output / name, force=force)
    molecules = qm9()
    train, rest = molecules[:N_TRAIN], molecules[N_TRAIN:]
    validation, test = rest[:N_VALIDATION], rest[N_VALIDATION : N_VALIDATION + N_TEST]
    terminal.info(
        f"Atomisation energies of QM9: {N_TRAIN} training, {N_VALIDATION} validation and {N_TEST} "
        "test molecules."
    )
    given = {"target": TARGET, "kind": "intensive", "units": UNITS, "n_representatives": M}
    study = study_subsamples(
        train,
        validation,
        test,
        make_settings({**given, "seed": seed or 0}),
        SIZES,
        threads=default_threads(threads),
        stages=Stages(terminal.progress()),
    )
    model, rows = study.model, study.rows
    found = evaluate(model, test, validation, stages=Stages(terminal.progress()))["energy"]
    model.save(output / FILES[0], force=force)
    shown = {size: {c: row[c] for c in row if c != _PP} for size, row in rows.items()}
    references = {_PP: next(iter(rows.values()))[_PP]}
    y, prediction = found.y, found.prediction
    calibration = model.settings.calibration
    reliability = ReliabilityDisplay.from_prediction(y, prediction).plot(label=calibration)
    with style():
        uncalibrated = ReliabilityDisplay.from_prediction(y, prediction.uncalibrated)
        uncalibrated.plot(reliability.ax_, label="raw", reference=False, **line_style(1))
    displays: list[Display] = [
        ConditionalErrorDisplay.from_prediction(y, prediction, units=UNITS),
        ResidualDisplay.from_prediction(y, prediction, units=UNITS, target="energy"),
        reliability,
    ]
    save = [display.save for display in displays] + [subsample_figure(shown, references).savefig]
    for name, save_to in zip(FILES[1:], save, strict=True):
        with style(), atomic_path(output / name, force=force) as path:
            save_to(path)
    one = model.predict(test[:1])
    terminal.result(
        model.summary(),
        paper_table(rows, title=_TITLE),
        score_table(found.scores, units=UNITS, title="Subsamples of half the training set"),
        f"Prediction for a test molecule, {test[0].symbols.get_chemical_formula()}: "
        f"{one.mean[0]:.4f} ± {one.std[0]:.4f} {UNITS} (reference {test[0].info[TARGET]:.4f})",
        f"Model and figures are in {output}/. Time: {time.perf_counter() - started:.0f} s.",
        document={
            **summary_document(model),
            "log_likelihood": {str(size): dict(row) for size, row in rows.items()},
            "scores": score_records(found.scores),
            "seconds": time.perf_counter() - started,
        },
    )
