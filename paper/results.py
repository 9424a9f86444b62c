"""Numbers of a reproduction, and their JSON file."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field, ValidationError, field_validator

import qualms
from qualms.errors import InputError
from qualms.io.files import atomic_output
from qualms.io.tensors import Document
from qualms.resources import allowed_threads


class EstimatorResult(Document):
    """One estimator of uncertainties on a test set."""

    scores: dict[str, float]  #: fields of `qualms.metrics.Scores` that are defined
    alpha: float  #: parameters of the calibration
    gamma: float
    decades: float  #: orders of magnitude between the 0.5 and 99.5 % quantiles of σ
    #: Root mean variance and RMSE in ten bins of σ with equal numbers of points.
    bins: list[tuple[float, float]] = Field(min_length=1)
    beyond_4_sigma: float  #: share of the points with an error larger than 4σ

    @property
    def log_likelihood(self) -> float:
        """Mean log likelihood of the test points."""
        return self.scores["log_likelihood"]


class EnsembleResult(Document):
    """Ensembles of one subsample size."""

    n: int  #: subsample size in points or groups
    replace: bool  #: whether it is drawn with replacement (bootstrap)
    n_out_of_bag: int  #: points for student and shrinkage: absent from at least three members
    n_out_of_bag_linear: int  #: points for linear and power: absent from at least five
    seconds: float  #: time to draw, solve and calibrate the members
    ensemble_mean: dict[str, EstimatorResult]  #: by column, centred on the ensemble mean
    full_model: dict[str, EstimatorResult]  #: by column, centred on the full model
    student_t: float  #: log likelihood under Student's t, centred on the ensemble mean
    #: The model as it is trained by default: a blend of full model and ensemble mean, with share
    #: λ of the latter, and the sources calibration.
    blend: EstimatorResult
    centre: float


class SeedResult(Document):
    """One split of the data."""

    seed: int
    n_train: int
    n_validation: int
    n_test: int
    n_environments: int
    n_representatives: int
    noise: float  #: standard deviation of the noise of the full model, in units of the target
    seconds: dict[str, float]  #: time of each stage
    wall: float  #: total time, s
    memory: float  #: peak, with the largest worker process, bytes
    ensembles: list[EnsembleResult] = Field(min_length=1)  #: by size; the bootstrap is last
    projected_process: dict[str, EstimatorResult]  #: GPR PP: Raw, CV and N-L
    posterior_part: dict[str, EstimatorResult]  #: the same of the posterior part of GPR PP


class ShiftedSet(Document):
    """Predictions of one test set by a model whose training set may be distributed differently."""

    label: str
    n: int  #: number of points
    extrapolation: float  #: share of the structures that the model flags
    bias: float  #: mean of prediction minus reference value
    estimators: dict[str, EstimatorResult]


class ShiftResult(Document):
    """Out-of-distribution predictions."""

    trained_on: str
    source: str
    n_train: int
    n_representatives: int
    n_members: int
    subsample: float
    representation: dict[str, Any]
    seconds: float
    #: The first is in distribution; validation calibrations are fitted to it.
    sets: list[ShiftedSet] = Field(min_length=1)


class Results(Document):
    """All numbers of one problem, with the version of this format."""

    version: Literal[2] = 2
    name: str
    title: str
    scale: str
    source: str
    units: str
    representation: dict[str, Any]
    machine: dict[str, str]
    seeds: list[SeedResult] = Field(min_length=1)
    shift: ShiftResult | None = None

    @field_validator("seeds")
    @classmethod
    def _are_consistent(cls, seeds: list[SeedResult]) -> list[SeedResult]:
        """Reject repeated seeds, whose standard errors would be too small, and unequal ones."""
        if len({seed.seed for seed in seeds}) < len(seeds):
            raise ValueError("a seed occurs more than once")
        if len({tuple(e.replace for e in seed.ensembles) for seed in seeds}) > 1:
            raise ValueError("seeds have different numbers of subsample sizes")
        return seeds


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read and validate a results file."""
    try:
        return Results.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        message = f"The results {str(path)!r} cannot be read: {error.strerror}."
        raise InputError(message, parameter="results") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        message = f"{str(path)!r} has no results of `python -m paper`: {place}: {first['msg']}."
        raise InputError(message, parameter="results") from error


def write_results(path: Path, results: Results) -> Results:
    """Write results, replacing an existing file; return them with the six digits of the file."""
    document = _rounded(results.model_dump(mode="json"))
    with atomic_output(path, force=True) as file:
        file.write((json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return Results.model_validate(document)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def machine() -> dict[str, str]:
    """Return the processor, the memory and the versions of the libraries."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    named = re.search(r"model name\s*:\s*(.*)", text)
    return {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": str(allowed_threads()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "qualms": qualms.__version__,
        **{name: version(name) for name in ("numpy", "scipy", "dscribe", "ase")},
    }
