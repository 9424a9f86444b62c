"""A calibration on disk: a small JSON file that other programs can read, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import qualms
from qualms.arrays import Float64Array, FloatArray, IntArray
from qualms.calibration.base import Calibration
from qualms.calibration.fitting import build_calibration
from qualms.calibration.groups import GroupedCalibration, GroupFactor
from qualms.ensembles.calibrate import ERROR_BAR_METHODS, Calibrated
from qualms.ensembles.io import Ensemble
from qualms.errors import InputError, QualmsError
from qualms.io.files import atomic_output

FORMAT: Literal["qualms-calibration"] = "qualms-calibration"
VERSION = 1
#: References of this many points are remembered.
_REMEMBERED = 64
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class GroupDocument(_Model):
    """Factor of one group: on top of the calibration of all points, σ → factor · σ."""

    factor: _Positive
    alone: _Positive
    n_points: Annotated[int, Field(ge=0)]


class CalibrationDocument(_Model):
    """What the file holds.

    Attributes
    ----------
    format, version
        ``"qualms-calibration"`` and 1.
    target : str
    kind : {"structure", "atom", "component"}
    n_components : int
        Points of one structure or atom: 3 for forces.
    order : {"member", "component"}, optional
        Which comes first in members of vectors; None if there are none.
    n_members : int, optional
        Of the ensemble; None if it came as error bars alone.
    units : str
    spread : (float, float)
        Range of most spreads, in the units of the target: others are perhaps in other units.
    method : str
    parameters : dict
        α, γ and the others, of `qualms.calibration`.
    by : str, optional
        Key that the groups are labels of.
    groups : dict of str to GroupDocument
    stated : bool
        Whether members had the spread that was stated with them, as after another calibration.
    internal : bool
        Whether points were predicted by members that had not seen them, rather than all being new.
    intervals : dict of str to (lower, upper)
    level : float
        Of the intervals.
    scores : dict of str to dict
        "before" and "after", on points left out.
    points : list of str
        Digests of some of the references, to notice if the same points are to judge it.
    remarks : list of str
    created, qualms : str
        When, and by which version.
    """

    format: Literal["qualms-calibration"] = FORMAT
    version: Annotated[int, Field(ge=1)] = VERSION
    target: Annotated[str, Field(min_length=1)]
    kind: Literal["structure", "atom", "component"]
    n_components: Annotated[int, Field(ge=1)] = 1
    order: Literal["member", "component"] | None = None
    n_members: Annotated[int, Field(ge=2)] | None
    units: str = ""
    spread: tuple[_Positive, _Positive]
    method: str
    parameters: dict[str, _Finite | int]
    by: str | None = None
    groups: dict[str, GroupDocument] = {}
    stated: bool = False
    internal: bool
    intervals: dict[str, tuple[_Finite, _Finite]]
    level: Annotated[float, Field(gt=0, lt=1)]
    scores: dict[str, dict[str, _Finite | int | None]]
    points: list[str] = []
    remarks: list[str] = []
    created: str
    qualms: str

    @model_validator(mode="after")
    def _counts_members(self) -> CalibrationDocument:
        if self.n_members is None and self.method not in ERROR_BAR_METHODS:
            raise ValueError(f"method {self.method} needs n_members")
        return self

    def calibration(self) -> Calibration:
        """Return the calibration of all points."""
        return build_calibration(self.method, self.parameters)

    def std(
        self, spread: Float64Array, n_members: int | IntArray | None, labels: Any | None = None
    ) -> Float64Array:
        """Return calibrated standard deviations (n,); zero where the spread is."""
        count = n_members if n_members is not None else self.n_members
        std = np.zeros(len(spread))
        positive = spread > 0
        # Without members (and with methods that do not count them) any number will do.
        counts = np.broadcast_to(2 if count is None else count, spread.shape)
        std[positive] = self.calibration().std(spread[positive], counts[positive])
        return std if labels is None else std * self.factors(labels)

    def transform(self, members: FloatArray) -> Float64Array:
        """Scale members (n, N_R) about their means so that they have the calibrated spread."""
        return self.calibration().transform(members)

    def seen(self, y: Float64Array) -> float:
        """Return about which part of its points have one of these true values; 0 if unknown."""
        known = set(_digests(y)).intersection(self.points)
        return len(known) / len(self.points) if self.points else 0.0

    def factors(self, labels: Any) -> Float64Array:
        """Return the factor of each of some labels; one for those that are not known."""
        groups = {
            name: GroupFactor(g.factor, g.alone, g.n_points) for name, g in self.groups.items()
        }
        return GroupedCalibration(self.calibration(), groups).factors(labels)


def _digests(y: Float64Array) -> list[str]:
    """Return a short digest of each number, to eight digits, which files may round to."""
    return [hashlib.sha256(f"{value:.8g}".encode()).hexdigest()[:12] for value in y.tolist()]


def make_document(
    calibrated: Calibrated, ensemble: Ensemble, by: str | None, units: str = ""
) -> CalibrationDocument:
    """Return what is to be written about a calibration."""
    calibration, groups = calibrated.calibration, {}
    if calibrated.grouped is not None:
        groups = {
            name: GroupDocument(factor=g.factor, alone=g.alone, n_points=g.n_points)
            for name, g in calibrated.grouped.groups.items()
        }
    return CalibrationDocument(
        target=ensemble.target,
        kind=ensemble.kind,  # type: ignore[arg-type]
        n_components=ensemble.n_components,
        order=None if ensemble.layout is None else ensemble.layout.order,
        n_members=ensemble.n_members,
        units=units,
        spread=tuple(np.quantile(calibrated.points.data.spread, [0.01, 0.99]).tolist()),
        method=calibration.method,
        parameters=calibration.parameters(),
        by=by,
        groups=groups,
        stated=ensemble.has_stated_spread,
        internal=ensemble.absent is not None,
        intervals=_estimated(calibrated),
        level=calibrated.intervals.level,
        scores={
            "before": calibrated.before.as_dict(),
            "after": calibrated.after.as_dict(),
        },
        # Those with the smallest digests are a random choice, but the same for the same points.
        points=sorted(set(_digests(calibrated.points.ensemble.y)))[:_REMEMBERED],
        remarks=[calibrated.reason, *calibrated.remarks],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        qualms=qualms.__version__,
    )


def _estimated(calibrated: Calibrated) -> dict[str, tuple[float, float]]:
    """Return the intervals of the parameters that were fitted, and could be."""
    names = ("alpha", "gamma")[: calibrated.calibration.n_parameters]
    found = {name: getattr(calibrated.intervals, name) for name in names}
    return {name: interval for name, interval in found.items() if interval is not None}


def write_calibration(
    document: CalibrationDocument, path: str | Path, *, force: bool = False
) -> None:
    """Write a calibration, completely or not at all."""
    with atomic_output(path, force=force, mode="w") as file:
        json.dump(document.model_dump(mode="json"), file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_calibration(path: str | Path) -> CalibrationDocument:
    """Read a calibration; everything is checked before anything is built."""
    file = Path(path)
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("path", f"'{file}' ({error.strerror})", "a calibration file") from None
    except ValueError as error:
        raise InputError("path", f"'{file}' ({error})", "a calibration file (JSON)") from None
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise InputError("path", f"'{file}'", "a file that `qualms calibrate` wrote")
    if isinstance(content.get("version"), int) and content["version"] > VERSION:
        raise InputError(
            "path",
            f"'{file}' of version {content['version']}",
            f"version {VERSION}",
            "Update qualms.",
        )
    try:
        document = CalibrationDocument.model_validate(content)
        document.std(np.ones(1), 5)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            "path", f"'{file}' ({where}: {first['msg']})", "a calibration file"
        ) from None
    except (QualmsError, TypeError, ValueError, ArithmeticError) as error:
        raise InputError("path", f"'{file}' ({error})", "a calibration file") from None
    return document
