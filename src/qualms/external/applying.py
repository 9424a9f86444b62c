"""Giving the predictions in a file calibrated error bars."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.core.calibration.base import rounding_of
from qualms.core.typing import Float64Array
from qualms.errors import InputError
from qualms.external.calibration_file import CalibrationDocument
from qualms.external.columns import is_table, write_columns
from qualms.external.ensemble import Ensemble
from qualms.external.reading import (
    ERROR_BARS,
    VARIANCES,
    read_ensemble,
    read_source,
    with_results,
)
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
    members: bool = True,
    force: bool = False,
) -> Applied:
    """Write predictions again, with error bars, and members if there are any, that are calibrated.

    ``{target}_uncertainty`` becomes the calibrated standard deviation, ``{target}_ensemble`` (or
    whatever the key is) the members scaled about their mean to have it. All else is copied.

    Parameters
    ----------
    document : CalibrationDocument
    predictions, output : path
        Of one format.
    target : str, optional
        If it has another name here than when the calibration was made.
    members : bool
        Whether to write members, too.
    force : bool
        Whether an existing file may be replaced.
    """
    name = target or document.target
    _check_formats(Path(predictions), Path(output))
    source = read_source(predictions)
    ensemble = read_ensemble(source, name, by=document.by, n_components=document.n_components)
    std, scaled = _calibrated(document, ensemble, members)
    if isinstance(source, dict):
        columns = _without_members(source, ensemble, name)
        columns |= _entries(ensemble, name, columns, ensemble.mean, std, scaled)
        write_columns(output, columns, force=force)
    else:
        ends = np.searchsorted(ensemble.structure, np.arange(len(source) + 1))
        with atomic_output(output, force=force) as stream:
            for atoms, begin, end in zip(source, ends[:-1], ends[1:], strict=True):
                mine = slice(int(begin), int(end))
                some = None if scaled is None else scaled[mine]
                _store(atoms, ensemble, name, ensemble.mean[mine], std[mine], some)
                stream.write(xyz_text(atoms).encode())
    return Applied(len(ensemble), ensemble.n_members, _remarks(document, ensemble))


def _check_formats(predictions: Path, output: Path) -> None:
    given, wanted = (is_table(path) and path.suffix.lower() for path in (predictions, output))
    if given != wanted:
        raise InputError(
            "output", f"'{output}'", f"the format of the predictions ({predictions.suffix})"
        )


def _calibrated(
    document: CalibrationDocument, ensemble: Ensemble, members: bool
) -> tuple[Float64Array, Float64Array | None]:
    """Return calibrated standard deviations (n,), and members (n, R) if there are any."""
    if document.kind != ensemble.kind:
        raise InputError(
            "calibration",
            f"made for a property of each {document.kind}",
            f"one for each {ensemble.kind}, as {ensemble.target} is here",
        )
    bad = ~np.isfinite(ensemble.mean) | ~np.isfinite(ensemble.std) | (ensemble.std < 0)
    if bad.any():
        raise InputError(
            ensemble.key,
            f"{np.count_nonzero(bad)} values that are NaN, infinite, or negative spreads",
            "finite predictions",
        )
    spread = ensemble.std
    if ensemble.members is not None:
        # What differs by rounding agrees.
        spread = np.where(spread > rounding_of(ensemble.members), spread, 0.0)
    std = document.std(spread, ensemble.n_members, ensemble.labels)
    if ensemble.members is None or not members:
        return std, None
    factor = np.divide(std, spread, out=np.zeros_like(std), where=spread > 0)
    mean = ensemble.mean[:, None]
    return std, mean + factor[:, None] * (ensemble.members - mean)


def _remarks(document: CalibrationDocument, ensemble: Ensemble) -> tuple[str, ...]:
    remarks = list(ensemble.remarks)
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
    typical = float(np.median(ensemble.std))
    if typical > 0 and not low / 10 < typical < 10 * high:
        remarks.append(
            f"The spread, {typical:.3g} on average, is far from that of the calibration, "
            f"{low:.3g} to {high:.3g} {document.units}".rstrip()
            + ": are the units the same?"
        )
    zero = int(np.count_nonzero(ensemble.std == 0))
    if zero:
        remarks.append(f"{zero} {ensemble.what} have a spread of zero, and keep it.")
    return tuple(remarks)


def _entries(
    ensemble: Ensemble,
    name: str,
    stored: Container[str],
    mean: Float64Array,
    std: Float64Array,
    members: Float64Array | None,
) -> dict[str, Float64Array]:
    """Return what is to be stored, by key, a row for each structure or atom.

    Error bars that are `stored` under another key would contradict the new ones: they become new.
    """
    k = ensemble.n_components
    entries = {name: _by_row(mean, k), f"{name}_uncertainty": _by_row(std, k)}
    for suffix in ERROR_BARS:
        if f"{name}{suffix}" in stored:
            entries[f"{name}{suffix}"] = _by_row(std**2 if suffix in VARIANCES else std, k)
    if members is not None:
        entries[ensemble.key] = _by_row(members, k)
    return entries


def _by_row(values: Float64Array, k: int) -> Float64Array:
    """Return (rows,) or (rows, k) of points; (rows, R) or (rows, R·k) of members, one by one."""
    if values.ndim == 1:
        return values if k == 1 else values.reshape(-1, k)
    return values.reshape(-1, k, values.shape[1]).transpose(0, 2, 1).reshape(len(values) // k, -1)


def _without_members(columns: dict[str, Any], ensemble: Ensemble, name: str) -> dict[str, Any]:
    """Leave out the members as they were, whatever their columns are called."""
    if ensemble.members is None:
        return columns
    stems = "|".join(re.escape(stem) for stem in (ensemble.key, name))
    numbered = re.compile(rf"({stems})(_?\d+)?")
    return {key: c for key, c in columns.items() if key == name or not numbered.fullmatch(key)}


def _store(
    atoms: Atoms,
    ensemble: Ensemble,
    name: str,
    mean: Float64Array,
    std: Float64Array,
    members: Float64Array | None,
) -> None:
    """Put calibrated values into a structure, in the place of those that it came with."""
    # Keys that ASE knows were read into a calculator; they belong back into the file.
    atoms.info, arrays = with_results(atoms)
    atoms.arrays.update(arrays)
    atoms.calc = None
    per_atom = ensemble.per_atom
    place = atoms.arrays if per_atom else atoms.info
    if members is None and ensemble.members is not None:
        place.pop(ensemble.key, None)
    for key, rows in _entries(ensemble, name, place, mean, std, members).items():
        place[key] = rows if per_atom else rows[0]
