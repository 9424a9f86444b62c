"""What a reproduction found, as a small JSON file: numbers only, complete after every step.

The file is also how an interrupted run is resumed: what is in it is not computed again.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
from pydantic import Field, ValidationError, field_validator

import qualms
from qualms.errors import InputError
from qualms.io.container import Document
from qualms.io.files import atomic_output
from qualms.metrics import binned_errors
from qualms.reproduce.study import Estimate

_VERSION = 1
_LIBRARIES = ("numpy", "scipy", "dscribe", "ase")
#: Bins of σ in which errors are compared with it.
N_BINS = 10


class Column(Document):
    """One estimator on the test set.

    Attributes
    ----------
    scores : dict of str to float
        All of `qualms.metrics.Scores` that are defined.
    alpha, gamma : float
        Of its calibration.
    decades : float
        How many orders of magnitude σ spans, without half a per cent at each end.
    bins : list of (float, float)
        Root mean predicted variance and root mean squared error in bins of σ, of as many points.
    surprises : float
        Share of the points whose error exceeds 4σ.
    """

    scores: dict[str, float]
    alpha: float
    gamma: float
    decades: float
    bins: list[tuple[float, float]]
    surprises: float


class Scheme(Document):
    """Members of one size, judged.

    Attributes
    ----------
    n : int
        Size of the sub-samples, in points or in groups of them.
    replace : bool
        Whether they were drawn with replacement: a bootstrap.
    n_internal, n_well_judged : int
        Training points that student and shrinkage used, absent from three members or more; and
        those that Int. and Int. N-L used, as the paper's from five or more.
    seconds : float
        To draw, solve and calibrate the members.
    columns : dict of str to Column
        About the mean of the members.
    reference : dict of str to Column
        The paper's columns, about the prediction of the full model; empty in results of an earlier
        version.
    student_t : float
        Mean log likelihood under Student's t itself rather than a Gaussian of its variance.
    """

    n: int
    replace: bool
    n_internal: int
    n_well_judged: int = 0
    seconds: float
    columns: dict[str, Column]
    reference: dict[str, Column] = Field(default_factory=dict)
    student_t: float


class Seed(Document):
    """One division of the data.

    Attributes
    ----------
    seed : int
    n_train, n_validation, n_test : int
        Labels.
    n_environments, n_representatives : int
    noise : float
        Standard deviation of the noise that the full model was given, by leave-one-out errors.
    seconds : dict of str to float
        Of the stages that all sizes share.
    memory, wall : float, optional
        What it took: see `qualms.reproduce.costs.Costs`. Memory is the largest so far, in a process
        that did other seeds before.
    digest : str
        Of structures and labels; empty if it is not known.
    schemes : list of Scheme
    process : dict of str to Column
        The projected process: Raw, CV, N-L.
    """

    seed: int
    n_train: int
    n_validation: int
    n_test: int
    n_environments: int
    n_representatives: int
    noise: float
    seconds: dict[str, float]
    memory: float | None = 0.0
    wall: float | None = None
    digest: str = ""
    schemes: list[Scheme] = Field(default_factory=list)
    process: dict[str, Column] = Field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Sizes of the sub-samples that have been judged; those in crystals depend on the seed."""
        return sorted(s.n for s in self.schemes if not s.replace)


class Shifted(Document):
    """Predictions of one set of structures that may differ from what was trained on.

    Attributes
    ----------
    label : str
    n : int
        Points.
    flagged : float
        Share of the structures that the model itself calls extrapolation.
    bias : float
        Mean of prediction less truth.
    columns : dict of str to Column
        By calibration.
    """

    label: str
    n: int
    flagged: float
    bias: float
    columns: dict[str, Column]


class Displacement(Document):
    """How far atoms are from where symmetry puts them.

    Attributes
    ----------
    rms : float
        Root mean square of a Cartesian component, in Å, in the median crystal.
    low, high : float
        The same in the crystals at 5 and 95 per cent.
    n : int
        Crystals with a symmetry to measure it by.
    of : int
        Crystals.
    """

    rms: float
    low: float
    high: float
    n: int
    of: int


class Shift(Document):
    """A model far from home.

    Attributes
    ----------
    trained_on : str
    n_train : int
    sets : list of Shifted
        The first is like the training set; the others are not. Calibrations on a validation set
        are fitted to the first.
    seconds : float
    source, digest : str
        Name of the file of the others, and digest of their structures and labels; empty if they are
        not known.
    n_representatives, n_members, subsample, representation : optional
        Of the model; None in results of an earlier version.
    displacements : dict of str to Displacement
        Of atoms from symmetric places, rattled and relaxed; empty where it is not measured.
    """

    trained_on: str
    n_train: int
    sets: list[Shifted]
    seconds: float
    source: str = ""
    digest: str = ""
    n_representatives: int | None = None
    n_members: int | None = None
    subsample: float | None = None
    representation: dict[str, Any] | None = None
    displacements: dict[str, Displacement] = Field(default_factory=dict)


class Results(Document):
    """All that a command found.

    Attributes
    ----------
    version : int
        Of this format.
    name, title, scale, source, units : str
    sizes : list of int
    representation : dict
        Hyper-parameters.
    machine : dict of str to str
    seeds : list of Seed
    shift : Shift, optional
    left_out : str
        File name of the list of what was left out of the source; empty if there is none.
    """

    version: Annotated[int, Field(ge=1, le=_VERSION)] = _VERSION
    name: str
    title: str
    scale: str
    source: str
    units: str
    sizes: list[int]
    representation: dict[str, Any]
    machine: dict[str, str] = Field(default_factory=dict)
    seeds: list[Seed] = Field(default_factory=list)
    shift: Shift | None = None
    left_out: str = ""

    @field_validator("seeds")
    @classmethod
    def _once_each(cls, seeds: list[Seed]) -> list[Seed]:
        """Refuse a seed that is there twice: standard errors would be too small."""
        numbers = [seed.seed for seed in seeds]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise ValueError(f"seed {twice[0]} is there more than once")
        return seeds

    def seed(self, seed: int) -> Seed | None:
        """Return what was found with a seed, if anything."""
        return next((found for found in self.seeds if found.seed == seed), None)

    def with_seed(self, found: Seed) -> Results:
        """Return the results with those of a seed added or replaced."""
        others = [other for other in self.seeds if other.seed != found.seed]
        ordered = sorted([*others, found], key=lambda each: each.seed)
        return self.model_copy(update={"seeds": ordered})


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read results; whatever else a file holds is an error that says so."""
    try:
        return Results.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise InputError("results", f"'{path}'", "a file that can be read", str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise InputError(
            "results", f"'{path}'", "results of qualms reproduce", f"{where}: {first['msg']}."
        ) from error


def write_results(path: Path, results: Results) -> None:
    """Write results, replacing earlier ones at once or not at all."""
    document = _rounded(results.model_dump(mode="json"))
    with atomic_output(path, force=True) as file:
        file.write((json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def _rounded(value: Any) -> Any:
    """Leave out digits that mean nothing: files are smaller and comparisons easier."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def as_column(estimate: Estimate) -> Column:
    """Judge an estimate."""
    z = estimate.y - estimate.mean
    low, high = np.quantile(estimate.std, [0.005, 0.995])
    bins = binned_errors(z, estimate.std, N_BINS)
    return Column(
        scores={k: v for k, v in estimate.scores().as_dict().items() if v is not None},
        alpha=estimate.calibration.alpha,
        gamma=estimate.calibration.gamma,
        decades=float(np.log10(high / low)),
        bins=list(zip(bins.rmv.tolist(), bins.rmse.tolist(), strict=True)),
        surprises=float(np.mean(np.abs(z) > 4 * estimate.std)),
    )


def machine() -> dict[str, str]:
    """Return what the figures were measured with."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "qualms": qualms.__version__,
        **{name: version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
