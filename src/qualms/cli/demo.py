"""``qualms demo``: train, evaluate and plot, with molecules that come with the package."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from qualms.cli.options import Force, Json, Quiet, Seed, Threads
from qualms.cli.terminal import Terminal

if TYPE_CHECKING:
    from qualms.report.figures import Display


def demo(
    output: Annotated[
        Path, Option("--output", "-o", help="Directory for the model and the figures.")
    ] = Path("qualms-demo"),
    seed: Seed = 0,
    threads: Threads = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run ``qualms demo``."""
    from qualms.atomistic.evaluation import evaluate
    from qualms.atomistic.model import AtomisticModel
    from qualms.cli.train import summary_document
    from qualms.data import qm9
    from qualms.io.files import atomic_path, check_output
    from qualms.progress import Stages
    from qualms.report import figures
    from qualms.report.tables import score_records, score_table

    terminal = Terminal(quiet=quiet, as_json=as_json)
    started = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    names = ("model.safetensors", "errors.png", "residuals.png", "reliability.png")
    model_file, *figure_files = (output / name for name in names)
    for path in (model_file, *figure_files):
        check_output(path, force=force)
    molecules = qm9()
    n_train = 2 * len(molecules) // 3
    train, test = molecules[:n_train], molecules[n_train:]
    terminal.info(
        f"Atomisation energies of QM9: {len(train)} training and {len(test)} test molecules."
    )
    model = AtomisticModel(
        "atomization_energy_per_atom",
        kind="intensive",
        units="eV/atom",
        n_representatives=1000,
        seed=seed,
        threads=threads,
    )
    model.fit(train, progress=terminal.progress() or False)
    model.save(model_file, force=force)
    evaluation = evaluate(model, test, stages=Stages(terminal.progress()))["energy"]
    y, prediction, units = evaluation.y, evaluation.prediction, evaluation.units
    reliability = figures.ReliabilityDisplay.from_prediction(y, prediction)
    reliability.plot(label=model.settings.calibration)
    with figures.style():
        raw = figures.ReliabilityDisplay.from_prediction(y, prediction.uncalibrated)
        raw.plot(reliability.ax_, label="raw", reference=False, **figures.line_style(1))
    displays: list[Display] = [
        figures.ConditionalErrorDisplay.from_prediction(y, prediction, units=units),
        figures.ResidualDisplay.from_prediction(y, prediction, units=units, target="energy"),
        reliability,
    ]
    for display, path in zip(displays, figure_files, strict=True):
        with atomic_path(path, force=force) as temporary:
            display.save(temporary)
    terminal.result(
        model.summary(),
        score_table(evaluation.scores, units=units, title=f"{len(test)} test molecules"),
        f"Prediction for a test molecule, {test[0].symbols.get_chemical_formula()}: "
        f"{prediction.mean[0]:.4f} ± {prediction.std[0]:.4f} {units} (reference {y[0]:.4f})",
        f"Model and figures are in {output}/. Time: {time.perf_counter() - started:.0f} s.",
        f"To open the model in a page of the browser: qualms serve {model_file}",
        document={
            **summary_document(model),
            "scores": score_records(evaluation.scores),
            "seconds": time.perf_counter() - started,
        },
    )
