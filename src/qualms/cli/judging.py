"""A model judged on labelled structures: what ``evaluate`` and ``report`` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ase import Atoms

from qualms.atomistic.evaluation import Evaluation, evaluate
from qualms.atomistic.force_evaluation import evaluate_derivatives
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.progress import Stages
from qualms.atomistic.structures import read_frames
from qualms.cli.console import Terminal
from qualms.external.for_models import calibration_for


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
    further = [] if calibration is None else [calibration_for(calibration, loaded, frames)]
    evaluation = evaluate(
        loaded,
        frames,
        held_out,
        calibrations={one.name: one for one in further},
        stages=Stages(terminal.progress()),
    )
    remarks = [remark for one in further for remark in one.remarks(evaluation)]
    derived = evaluate_derivatives(loaded, frames, held_out, stages=Stages(terminal.progress()))
    return ModelOnTest(loaded, frames, evaluation, derived, remarks)
