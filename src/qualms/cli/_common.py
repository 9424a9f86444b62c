"""What the commands print, and how they end."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from ase import Atoms
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from qualms.atomistic.evaluation import Evaluation, evaluate, evaluate_derivatives
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.structures import read_frames
from qualms.ensembles.apply import recalibrate
from qualms.ensembles.calibration_file import read_calibration
from qualms.errors import QualmsWarning
from qualms.evaluation import Evaluation as Recalibrated
from qualms.metrics import score_arrays
from qualms.progress import Bars, Stages


class Terminal:
    """Prints results to standard output and everything else to standard error.

    Parameters
    ----------
    quiet : bool
        Print results only.
    as_json : bool
        Print results as one JSON document.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet = quiet
        self.as_json = as_json
        self._out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Tell what is going on."""
        if not self.quiet and not self.as_json:
            self._err.print(text, markup=False, soft_wrap=True)

    def result(self, *parts: str | Table, document: Mapping[str, Any]) -> None:
        """Print a result: as text and tables, or as JSON."""
        if self.as_json:
            self._out.file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            return
        for part in parts:
            if isinstance(part, str):
                self._out.print(part, markup=False, soft_wrap=True)
            else:
                self._print_table(part)

    def _print_table(self, table: Table) -> None:
        """Print all of a table: lines longer than the terminal are better than digits cut off."""
        options = self._out.options.update(max_width=1000)
        wide = Measurement.get(self._out, options, table).maximum
        self._out.width = max(self._out.width, wide)
        self._out.print(table)

    def warn(self, text: str) -> None:
        """Print a warning, whatever the level of quietness."""
        self._err.print(f"Warning: {text}", markup=False, soft_wrap=True, style="yellow")

    @contextmanager
    def warnings_as_lines(self) -> Iterator[None]:
        """Show warnings of qualms as single lines, once each, and hide those of libraries."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", QualmsWarning)
            seen: set[str] = set()

            def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
                if str(message) not in seen and issubclass(category, QualmsWarning):
                    seen.add(str(message))
                    self.warn(str(message))

            warnings.showwarning = show
            yield

    def progress(self) -> Bars | None:
        """Return progress bars, if standard error is a terminal."""
        if self.quiet or self.as_json or not sys.stderr.isatty():
            return None
        return Bars(self._err)


# Options that several commands share.
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Model file (.safetensors).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Json = Annotated[bool, typer.Option("--json", help="Print results as one JSON document.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace existing output.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Cores to use; by default all, or OMP_NUM_THREADS."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Same seed, same result.")]
Absent = Annotated[
    str | None,
    typer.Option(
        help="Key of flags, one for each member: it did not see the point. "
        "TARGET_absent by default, if there is one."
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="Members of vectors: member (m0x m0y m0z m1x …) or component (m0x m1x … m0y …). "
        "Found out by default."
    ),
]


# A model judged on labelled structures: what ``evaluate`` and ``report`` have in common.
@dataclass(frozen=True)
class ModelOnTest:
    """A model, labelled structures, and how good it is on them.

    Attributes
    ----------
    model : AtomisticModel
    frames : list of Atoms
    evaluation : Evaluation
        Of the target.
    derived : dict of str to Evaluation
        Of forces and stresses, if model and structures have them.
    remarks : list of str
        What is to be said about a calibration of the user's.
    """

    model: AtomisticModel
    frames: list[Atoms]
    evaluation: Evaluation
    derived: dict[str, Evaluation]
    remarks: list[str]


def judge(
    model: Path,
    test: Path,
    validation: Path | None,
    calibration: Path | None,
    threads: int | None,
    terminal: Terminal,
) -> ModelOnTest:
    """Judge the model of a file on the structures of another.

    Parameters
    ----------
    model, test : Path
    validation : Path, optional
        Structures to fit the calibrations to that are not internal.
    calibration : Path, optional
        A calibration of the model's predictions.
    threads : int, optional
    terminal : Terminal
        Where progress is shown.
    """
    loaded = AtomisticModel.load(model, threads=threads)
    frames = read_frames(test)
    held_out = None if validation is None else read_frames(validation)
    evaluation = evaluate(loaded, frames, held_out, stages=Stages(terminal.progress()))
    remarks = []
    if calibration is not None:
        document = read_calibration(calibration)
        name = f"{calibration.name} ({document.method})"
        found = Recalibrated(
            target=loaded.settings.target,
            y=evaluation.y,
            prediction=evaluation.prediction,
            structure=evaluation.structure,
            atom=evaluation.atom,
            frames=frames,
        )
        better = recalibrate(found, document, extensive=loaded.settings.kind == "extensive")
        rows = {**evaluation.rows, name: score_arrays(evaluation.y, better.mean, better.std)}
        evaluation = replace(evaluation, rows=rows)
        remarks = [f"{name}: fitted to {document.parameters.get('n_points')} points."]
    derived = evaluate_derivatives(loaded, frames, held_out, stages=Stages(terminal.progress()))
    return ModelOnTest(loaded, frames, evaluation, derived, remarks)
