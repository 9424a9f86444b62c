"""Calibration files: small JSON documents that other programs can read, too."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import qualms
from qualms.arrays import Float64Array, IntArray
from qualms.calibration.groups import GroupedCalibration, GroupFactor
from qualms.calibration.methods import STD_METHODS, build_calibration
from qualms.ensembles.calibrate import Calibrated
from qualms.ensembles.io import Ensemble
from qualms.errors import InputError, QualmsError
from qualms.io.files import atomic_output, check_input

VERSION = 2
#: JSON has no NaN or infinity; bounds reject numbers whose squares would overflow.
_Finite = Annotated[float, Field(ge=-1e100, le=1e100)]
_Positive = Annotated[float, Field(ge=1e-100, le=1e100)]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Text = Annotated[str, Field(max_length=10_000)]


class CalibrationDocument(BaseModel):
    """Content of a calibration file.

    ``docs/file-formats.md`` describes the fields. `std_range` is the range of most ensemble
    standard deviations. `isotropy` is that of vectors, if σ is a function of the standard deviation
    of whole vectors. `order` is None for scalars, and `n_members` if there are no members.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["qualms-calibration"] = "qualms-calibration"
    version: Annotated[int, Field(ge=1, le=VERSION)] = VERSION
    target: Annotated[_Text, Field(min_length=1)]
    kind: Literal["structure", "atom", "component"]
    n_components: Annotated[int, Field(ge=1, le=1000)] = 1
    order: Literal["member", "component"] | None = None
    n_members: Annotated[int, Field(ge=2, le=1_000_000)] | None
    units: _Text = ""
    std_range: tuple[_Positive, _Positive]
    method: _Text
    parameters: dict[str, _Count | _Finite]
    isotropy: Annotated[float, Field(ge=0, le=1)] | None = None
    by: _Text | None = None
    groups: dict[str, GroupFactor] = {}
    out_of_bag: bool
    intervals: dict[str, tuple[_Finite, _Finite]]
    level: Annotated[float, Field(gt=0, lt=1)]
    scores: dict[str, dict[str, _Count | _Finite | None]]
    remarks: list[_Text] = []
    created: _Text
    qualms: _Text

    @model_validator(mode="after")
    def _check_calibration(self) -> CalibrationDocument:
        if self.n_members is None and self.method not in STD_METHODS:
            raise ValueError(f"method {self.method} needs n_members")
        if not all(1e-6 <= group.factor <= 1e6 for group in self.groups.values()):
            raise ValueError("factors must be between 1e-6 and 1e6")
        if self.std_range[0] > self.std_range[1]:
            raise ValueError("std_range must be increasing")
        try:
            with np.errstate(invalid="raise"):
                std = float(self.std(np.ones(1), 5)[0])
            if not 0 < std < np.inf:
                raise ValueError(f"a standard deviation of 1 becomes {std:g}")
        except (QualmsError, TypeError, ArithmeticError) as error:
            raise ValueError(str(error)) from None
        return self

    def check_kind(self, ensemble: Ensemble) -> None:
        """Reject a calibration that was fitted to points of another kind."""
        if (self.kind, self.n_components) != (ensemble.kind, ensemble.n_components):
            raise InputError(
                f"The calibration was fitted to {self.kind}s, {self.n_components} per row; these "
                f"predictions are of {ensemble.kind}s, {ensemble.n_components} per row.",
                parameter="calibration",
            )

    def std_of(self, ensemble: Ensemble) -> Float64Array:
        """Return calibrated standard deviations of all points of an ensemble (n,)."""
        std, count, share = ensemble.pooled(self.isotropy)
        n_members = None if ensemble.members is None else count
        return share * self.std(std, n_members, ensemble.labels)

    def std(
        self,
        ensemble_std: Float64Array,
        n_members: int | IntArray | None,
        labels: Any | None = None,
    ) -> Float64Array:
        """Return calibrated standard deviations (n,); zero or NaN where the ensemble's is.

        Parameters
        ----------
        ensemble_std : (n,) array
            Ensemble standard deviations.
        n_members : int or (n,) array of int, optional
            Number of members; that of the calibration by default.
        labels : (n,) array of str, optional
            Groups of the points; those that the calibration does not know have a factor of one.
        """
        # Methods for standard deviations without members do not use their number.
        count = (self.n_members or 2) if n_members is None else n_members
        calibration = build_calibration(self.method, self.parameters)
        std, positive = 0.0 * ensemble_std, ensemble_std > 0
        counts = np.broadcast_to(count, ensemble_std.shape)[positive]
        std[positive] = calibration.std(ensemble_std[positive], counts)
        if labels is None:
            return std
        return std * GroupedCalibration(calibration, self.groups).factors(labels)


def make_document(
    calibrated: Calibrated, ensemble: Ensemble, by: str | None, units: str = ""
) -> CalibrationDocument:
    """Return the document of a calibration.

    Parameters
    ----------
    calibrated : Calibrated
    ensemble : Ensemble
        The predictions that were calibrated, as they were read.
    by : str, optional
        Key of the groups.
    units : str
        Units of the predictions.
    """
    calibration, grouped = calibrated.calibration, calibrated.grouped
    names = ("alpha", "gamma")[: calibration.n_parameters]
    intervals = {name: getattr(calibrated.intervals, name) for name in names}
    return CalibrationDocument(
        target=ensemble.target,
        kind=ensemble.kind,
        n_components=ensemble.n_components,
        order=ensemble.order,
        n_members=ensemble.n_members,
        units=units,
        std_range=tuple(np.quantile(calibrated.ensemble.std, [0.01, 0.99]).tolist()),
        method=calibration.method,
        parameters=calibration.parameters(),
        isotropy=calibrated.isotropy,
        by=by,
        groups={} if grouped is None else dict(grouped.groups),
        out_of_bag=ensemble.absent is not None,
        intervals={name: interval for name, interval in intervals.items() if interval is not None},
        level=calibrated.intervals.level,
        scores={"before": calibrated.before.as_dict(), "after": calibrated.after.as_dict()},
        remarks=[calibrated.reason, *calibrated.remarks],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        qualms=qualms.__version__,
    )


def write_calibration(
    document: CalibrationDocument, path: str | Path, *, force: bool = False
) -> None:
    """Write a calibration, completely or not at all.

    Parameters
    ----------
    document : CalibrationDocument
    path : path
    force : bool
        Whether an existing file may be replaced.
    """
    with atomic_output(path, force=force, mode="w") as file:
        file.write(document.model_dump_json(indent=2) + "\n")


def read_calibration(path: str | Path) -> CalibrationDocument:
    """Read a calibration; everything is validated before anything is built."""
    remedy = ""
    try:
        with check_input(path).open("rb") as file:
            content = file.read(10_000_001)
        if len(content) > 10_000_000:
            raise ValueError("more than 10 MB")
        json.loads(content, object_pairs_hook=_unique)
        return CalibrationDocument.model_validate_json(content)
    except InputError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{ascii('.'.join(map(str, first['loc'])))[:60]}: {first['msg']}"
        remedy = "Update qualms." if first["loc"] == ("version",) else ""
    except (ValueError, RecursionError) as error:
        problem = str(error)
    problem = " ".join(problem.split()).rstrip(".")
    message = f"{str(path)!r} is not a calibration file of qualms: {problem}."
    raise InputError(f"{message} {remedy}".rstrip(), parameter="path")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, if no key is there twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)
