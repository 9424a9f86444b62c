"""Applying a calibration: predictions are written again with calibrated uncertainties."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.arrays import Float64Array
from qualms.ensembles.calibration_file import CalibrationDocument
from qualms.ensembles.io import (
    COMPONENTS,
    TABLES,
    DataTable,
    Ensemble,
    Source,
    predicted_keys,
    read_ensemble,
    read_source,
    with_results,
)
from qualms.errors import InputError
from qualms.gp.ensemble import calibration_factors, rescaled
from qualms.io.files import atomic_output
from qualms.io.xyz import DOF, LIMITS, xyz_text


class Applied(NamedTuple):
    """Summary of an output file; the remarks are warnings for the user."""

    n_points: int
    n_members: int | None
    remarks: tuple[str, ...]


def apply_calibration(
    document: CalibrationDocument,
    predictions: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    target: str | None = None,
    order: str | None = None,
    write_members: bool = True,
    force: bool = False,
    **names: str | None,
) -> Applied:
    """Write predictions again, with calibrated uncertainties and, if there are any, members.

    ``{target}_uncertainty`` becomes the calibrated standard deviation, ``{target}_ensemble`` (or
    the key that the file has) the members, rescaled about their mean, and ``{target}`` that mean.
    All other values are copied; reference values under the name of the prediction are kept as
    ``REF_{target}``. With out-of-bag flags, mean and standard deviation are out-of-bag.

    Parameters
    ----------
    document : CalibrationDocument
    predictions : path or sequence of paths
        The first, with its other values, is written again.
    output : path
        Of the format of the first file; ``.npz`` for ``.npy`` and ``.json``.
    target : str, optional
        Name of the property, if it is not that of the calibration.
    order : str, optional
        As in `read_ensemble`; that of the calibration by default.
    write_members : bool
        Whether to write members.
    force : bool
        Whether an existing file may be replaced.
    **names : str, optional
        Keys `members`, `mean`, `std` and `absent` of `read_ensemble`.
    """
    paths = [predictions] if isinstance(predictions, (str, Path)) else predictions
    sources = [read_source(path) for path in paths]
    source = sources[0]
    suffix = Path(output).suffix.lower()
    expected_suffix = source.suffix if isinstance(source, DataTable) else ""
    if (suffix if suffix in TABLES else "") != expected_suffix:
        raise InputError(
            f"The output has the format of the predictions, {expected_suffix or '.xyz'}; the name "
            f"{str(output)!r} is that of another.",
            parameter="output",
        )
    ensemble = read_ensemble(
        sources,
        target or document.target,
        by=document.by,
        order=order or document.order,
        n_components=document.n_components,
        **names,
    )
    document.check_kind(ensemble)
    remarks = [*ensemble.remarks, *_checks(document, ensemble)]
    std = document.std_of(ensemble)
    aside = _references(source, ensemble)
    if aside:
        renamed = ", ".join(f"{key} as REF_{key}" for key in sorted(aside))
        remarks.insert(0, f"Not predictions of these members, kept under another name: {renamed}.")
    entries = _entries(ensemble, std, write_members)
    # Of another calibration.
    without = tuple(f"{ensemble.target}{ending}" for ending in (DOF, *LIMITS))
    if ensemble.members is not None and not write_members:
        without += ensemble.columns.get(ensemble.key, ())
    if isinstance(source, DataTable):
        changes = _columns(source, ensemble, entries, aside)
        source.write(output, changes, without=without, force=force)
    else:
        rows = ensemble.structure[:: ensemble.n_components]
        ends = np.searchsorted(rows, np.arange(len(source) + 1)).tolist()
        with atomic_output(output, force=force) as stream:
            for atoms, begin, end in zip(source, ends[:-1], ends[1:], strict=True):
                values = {key: array[begin:end] for key, array in entries.items()}
                _store(atoms, ensemble, values, aside, without)
                stream.write(xyz_text(atoms).encode())
    return Applied(len(ensemble), ensemble.n_members, tuple(remarks))


def _checks(document: CalibrationDocument, ensemble: Ensemble) -> Iterator[str]:
    """Yield warnings about points without a result, and about differences to the calibration."""
    reasons = ensemble.unusable()
    bad = np.any([*reasons.values()], axis=0)
    texts = [f"{ensemble.counted(int(w.sum()))} {why}" for why, w in reasons.items() if w.any()]
    if bad.all():
        raise InputError(
            f"No point can be calibrated: {', '.join(texts)}. (Flags of out-of-bag members are "
            f"read from {ensemble.target}_absent.)",
            parameter=ensemble.key,
        )
    yield from (f"{text}: NaN is written for them." for text in texts)
    if ensemble.n_members != document.n_members:
        yield (
            f"The calibration was fitted to {document.n_members or 'an unknown number of'} members;"
            f" the file has {ensemble.n_members or 'only uncertainties'}."
        )
    if ensemble.labels is not None:
        new = sorted(set(ensemble.labels.tolist()) - set(document.groups))
        if new:
            yield f"Groups without a factor in the calibration: {', '.join(new)}."
    low, high = document.std_range
    typical = float(np.median(ensemble.std[~bad]))
    if typical > 0 and not low / 10 < typical < 10 * high:
        yield (
            f"The median standard deviation, {typical:.3g}, is far from the range of the "
            f"calibration, {low:.3g} to {high:.3g} {document.units}: are the units the same?"
        )
    zero = int(np.count_nonzero(ensemble.std == 0))
    if zero:
        yield f"{ensemble.counted(zero)} with identical members: their uncertainty is zero."


def _references(source: Source, ensemble: Ensemble) -> set[str]:
    """Return keys of reference values that would be overwritten, or look like predictions.

    That is the target itself, if the value under its name is not the mean of the members. ASE reads
    keys that it knows, such as energy and forces, as results of one calculation: values beside such
    a reference value, or beside no prediction at all, were not predicted by these members either.
    """
    name, members = ensemble.target, ensemble.members
    if members is None:
        return set()  # the value under that name is the prediction
    if isinstance(source, DataTable):
        keys = {*source.columns}
    else:
        keys = {key for atoms in source for part in with_results(atoms) for key in part}
    is_reference = False
    if ensemble.stored_mean is not None and not ensemble.uncertainties:
        means = (ensemble.mean, members.mean(axis=1))
        is_reference = not any(_is_mean(ensemble.stored_mean, m, ensemble.std) for m in means)
    aside = {name} if is_reference else set()
    is_result = name in all_properties and not isinstance(source, DataTable)
    if is_result and (is_reference or name not in keys):
        others = keys.intersection(all_properties) - {name}
        aside |= {key for key in others if is_reference or keys.isdisjoint(predicted_keys(key))}
    present = (key for key in aside if keys.issuperset(ensemble.columns.get(key, (key,))))
    return {key for key in present if f"REF_{key}" not in keys}


def _is_mean(stored: Float64Array, mean: Float64Array, std: Float64Array) -> bool:
    """Return whether most stored values are the mean, rounded to a small fraction of std."""
    finite = np.isfinite(stored) & np.isfinite(mean) & np.isfinite(std)
    if not finite.any():
        return False
    distance, size, width = np.median(np.abs([stored - mean, mean, std])[:, finite], axis=1)
    return bool(distance <= 0.05 * width + 1e-9 * size)


def _entries(ensemble: Ensemble, std: Float64Array, members: bool) -> dict[str, Float64Array]:
    """Return calibrated values by key, a row for each structure or atom, in their stored shape."""
    shape, k = (-1, *ensemble.shape), ensemble.n_components
    entries = {ensemble.target: ensemble.mean.reshape(shape)}
    for key in (f"{ensemble.target}_uncertainty", *ensemble.uncertainties):
        entries[key] = (std**2 if key.endswith("_var") else std).reshape(shape)
    if ensemble.members is not None and members:
        factor = calibration_factors(std, ensemble.std)
        stored = rescaled(ensemble.members, factor, ensemble.mean).reshape(len(std) // k, k, -1)
        if ensemble.order == "member":
            stored = stored.transpose(0, 2, 1)
        entries[ensemble.key] = stored.reshape(-1, *ensemble.member_shape)
    return entries


def _columns(
    table: DataTable,
    ensemble: Ensemble,
    entries: Mapping[str, Float64Array],
    aside: Collection[str],
) -> dict[str, Any]:
    """Return calibrated values by the columns that held the old ones, or by new columns.

    Parameters
    ----------
    table : DataTable
    ensemble : Ensemble
        Read from the table.
    entries : mapping of str to (n, …) arrays
        Calibrated values by key.
    aside : collection of str
        Keys of reference values, which get other names.
    """
    columns, k = ensemble.columns, ensemble.n_components
    changes = {f"REF_{n}": table.content[n] for key in aside for n in columns.get(key, (key,))}
    for key, values in entries.items():
        flat = values.reshape(len(values), -1)
        names = columns.get(key, (key,))
        if key not in columns and values.ndim > 1 and table.suffix != ".npz":
            width = flat.shape[1]
            ends = COMPONENTS.get(k, range(k)) if width == k else range(width)
            names = tuple(f"{key}_{end}" for end in ends)
        changes |= {names[0]: values} if len(names) == 1 else dict(zip(names, flat.T, strict=True))
    return changes


def _store(
    atoms: Atoms,
    ensemble: Ensemble,
    values: Mapping[str, Any],
    aside: Collection[str],
    without: Collection[str],
) -> None:
    """Put the calibrated values of a structure in the place of those that it has.

    Parameters
    ----------
    atoms : Atoms
        It is changed.
    ensemble : Ensemble
        Read from all structures.
    values : mapping of str to arrays
        Calibrated values of the structure, or of its atoms, by key.
    aside, without : collections of str
        Keys of reference values, which get other names, and keys to leave out.
    """
    # ASE has read the keys that it knows into a calculator; they belong into the file.
    atoms.info, arrays = with_results(atoms)
    atoms.arrays.update(arrays)
    atoms.calc = None
    for place in (atoms.info, atoms.arrays):
        for key in aside:
            if key in place:
                place[f"REF_{key}"] = place.pop(key)
        for key in without:
            place.pop(key, None)
    place = atoms.arrays if ensemble.per_atom else atoms.info
    for key, rows in values.items():
        names = ensemble.columns.get(key, (key,))
        parts = [rows] if len(names) == 1 else np.moveaxis(rows, 1, 0)
        place |= {n: r if ensemble.per_atom else r[0] for n, r in zip(names, parts, strict=True)}
    for key in ("stress", "virial"):
        # ASE reads nine numbers as a matrix, and no other number of them.
        value = np.asarray(atoms.info.get(key, ()))
        if value.shape == (6,):
            atoms.info[key] = voigt_6_to_full_3x3_stress(value)  # type: ignore[no-untyped-call]
        elif value.shape == (9,):
            atoms.info[key] = value.reshape(3, 3)
