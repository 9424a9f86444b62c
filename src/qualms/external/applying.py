"""Giving the predictions in a file calibrated error bars."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qualms.core.calibration.base import rounding_of
from qualms.core.resampling import MIN_ABSENT, internal_prediction, stretched
from qualms.core.typing import Float64Array, IntArray
from qualms.errors import InputError
from qualms.external.calibration_file import CalibrationDocument
from qualms.external.columns import is_table, write_columns
from qualms.external.ensemble import Ensemble, finite, refuse_negative
from qualms.external.reading import read_ensemble
from qualms.external.sources import read_source
from qualms.external.storing import CalibratedValues, columns_with, references_beside, store
from qualms.storage.files import atomic_output
from qualms.storage.xyz import xyz_text


@dataclass(frozen=True)
class Applied:
    """What was written.

    Attributes
    ----------
    n_points, n_members : int
    remarks : tuple of str
    """

    n_points: int
    n_members: int | None
    remarks: tuple[str, ...]


def apply_calibration(
    document: CalibrationDocument,
    predictions: str | Path,
    output: str | Path,
    *,
    target: str | None = None,
    absent: str | None = None,
    order: str | None = None,
    members: bool = True,
    force: bool = False,
) -> Applied:
    """Write predictions again, with error bars, and members if there are any, that are calibrated.

    ``{target}_uncertainty`` becomes the calibrated standard deviation, ``{target}_ensemble`` (or
    whatever the key is) the members scaled about their mean to have it, ``{target}`` that mean. All
    else is copied; references that have the name of the prediction are kept as ``REF_{target}``.
    Where members are marked that did not see a point, mean and spread are theirs.

    Parameters
    ----------
    document : CalibrationDocument
    predictions, output : path
        Of one format.
    target : str, optional
        If it has another name here than when the calibration was made.
    absent : str, optional
        Key of flags, one for each member: whether it did *not* see the point in its training;
        ``{target}_absent`` if there is one.
    order : {"member", "component"}, optional
        Which comes first in members of vectors; that of the calibration if the file does not tell.
    members : bool
        Whether to write members, too.
    force : bool
        Whether an existing file may be replaced.
    """
    name = target or document.target
    _check_formats(Path(predictions), Path(output))
    source = read_source(predictions)
    ensemble = read_ensemble(
        source,
        name,
        absent=absent,
        by=document.by,
        order=order,
        n_components=document.n_components,
        likely_order=document.order,
    )
    found = _calibrated(document, ensemble, members)
    aside = references_beside(source, ensemble, found.mean)
    if isinstance(source, dict):
        write_columns(output, columns_with(source, ensemble, found, aside), force=force)
    else:
        ends = np.searchsorted(ensemble.structure, np.arange(len(source) + 1))
        with atomic_output(output, force=force) as stream:
            for atoms, begin, end in zip(source, ends[:-1], ends[1:], strict=True):
                store(atoms, ensemble, found.some(slice(int(begin), int(end))), aside)
                stream.write(xyz_text(atoms).encode())
    return Applied(len(ensemble), ensemble.n_members, _remarks(document, ensemble, aside))


def _check_formats(predictions: Path, output: Path) -> None:
    given, wanted = (is_table(path) and path.suffix.lower() for path in (predictions, output))
    if given != wanted:
        raise InputError(
            "output", f"'{output}'", f"the format of the predictions ({predictions.suffix})"
        )


def _calibrated(
    document: CalibrationDocument, ensemble: Ensemble, members: bool
) -> CalibratedValues:
    if document.kind != ensemble.kind:
        raise InputError(
            "calibration",
            f"made for a property of each {document.kind}",
            f"one for each {ensemble.kind}, as {ensemble.target} is here",
        )
    if document.n_components != ensemble.n_components:
        raise InputError(
            "calibration",
            f"made for {document.n_components} components",
            f"one for {ensemble.n_components}, as {ensemble.target} has here",
        )
    _refuse_unusable(ensemble)
    mean, spread, count = _committee(ensemble)
    std = document.std(spread, count, ensemble.labels)
    if ensemble.members is None or not members:
        return CalibratedValues(mean, std, None)
    factor = np.divide(std, spread, out=np.zeros_like(std), where=spread > 0)
    return CalibratedValues(mean, std, stretched(ensemble.members, factor, mean))


def _refuse_unusable(ensemble: Ensemble) -> None:
    """Refuse predictions that no error bar can be given to, and say why."""
    bad = int(np.count_nonzero(~finite(ensemble)))
    if bad:
        seen = ensemble.absent is None and ensemble.members is not None
        raise InputError(
            ensemble.key,
            f"{ensemble.counted(bad)} with NaN or infinite predictions",
            "finite ones",
            f"If members are missing that saw a point, say so under {ensemble.target}_absent."
            if seen
            else "",
        )
    if ensemble.members is None:
        refuse_negative(ensemble)
    if ensemble.absent is not None:
        few = int(np.count_nonzero(ensemble.absent.sum(axis=1) < MIN_ABSENT))
        if few:
            raise InputError(
                f"{ensemble.target}_absent",
                f"{ensemble.counted(few)} that fewer than {MIN_ABSENT} members had not seen",
                f"at least {MIN_ABSENT} such members for each",
                "Leave those points out; or leave out the flags, if the points are new after all.",
            )


def _committee(
    ensemble: Ensemble,
) -> tuple[Float64Array, Float64Array, int | IntArray | None]:
    """Return mean and spread of the members that did not see a point, and how many they are."""
    if ensemble.members is None:
        return ensemble.mean, ensemble.std, None
    if ensemble.absent is None:
        rounding = rounding_of(ensemble.members)
        # What differs by rounding agrees.
        spread = np.where(ensemble.std > rounding, ensemble.std, 0.0)
        return ensemble.mean, spread, ensemble.n_members
    known = np.where(ensemble.absent, ensemble.members, 0.0)
    internal = internal_prediction(known, ensemble.absent)
    spread = np.where(internal.std > rounding_of(known), internal.std, 0.0)
    return internal.mean, spread, internal.n_absent


def _remarks(
    document: CalibrationDocument, ensemble: Ensemble, aside: Collection[str]
) -> tuple[str, ...]:
    remarks = list(ensemble.remarks)
    if aside:
        kept = ", ".join(f"{key} as REF_{key}" for key in sorted(aside))
        remarks.append(f"Not predicted by these members, so kept under another name: {kept}.")
    if ensemble.n_members != document.n_members:
        remarks.append(
            f"The calibration was made for {document.n_members or 'an unknown number of'} members, "
            f"and there are {ensemble.n_members or 'only error bars'} here."
        )
    if ensemble.labels is not None:
        new = sorted(set(ensemble.labels.tolist()) - set(document.groups))
        if new:
            remarks.append(f"Not seen in the calibration, so without a factor: {', '.join(new)}.")
    low, high = document.spread
    _, spread, _ = _committee(ensemble)
    typical = float(np.median(spread))
    if typical > 0 and not low / 10 < typical < 10 * high:
        remarks.append(
            f"The spread, {typical:.3g} on average, is far from that of the calibration, "
            f"{low:.3g} to {high:.3g} {document.units}".rstrip()
            + ": are the units the same?"
        )
    zero = int(np.count_nonzero(spread == 0))
    if zero:
        remarks.append(f"{ensemble.counted(zero)} without any spread: no error bar but zero.")
    return tuple(remarks)
