"""Reading ensembles: extended XYZ as ASE, MACE and qualms write it, CSV, Parquet and NPZ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.core.typing import BoolArray, Float64Array, StrArray
from qualms.errors import InputError
from qualms.external.columns import order_of
from qualms.external.components import Order, find_layout
from qualms.external.ensemble import Ensemble, with_members
from qualms.external.sources import (
    ERROR_BARS,
    MEMBERS,
    REFERENCES,
    VARIANCES,
    Source,
    Values,
    of_frames,
    of_table,
    read_source,
)
from qualms.external.tables import Table


@dataclass(frozen=True)
class Wanted:
    """What is to be read.

    Attributes
    ----------
    target : str
        Name of the property: members under ``{target}_ensemble`` or ``{target}_comm``, or a value
        under ``{target}`` and an error bar under ``{target}_uncertainty``, ``_std`` or ``_var``.
    reference : str, optional
        Key of the true values; ``REF_{target}`` and the like if not given.
    absent : str, optional
        Key of flags, one for each member: whether it did *not* see the point in its training;
        ``{target}_absent`` if there is one.
    by : str, optional
        What to group points by: ``element``, or a key such as ``config_type``.
    order : {"member", "component"}, optional
        Which comes first in members of vectors; found out if not given.
    n_components : int, optional
        If given, true values are not needed, and there are so many for each row.
    likely_order : {"member", "component"}, optional
        What `order` was in another file of this ensemble.
    """

    target: str
    reference: str | None = None
    absent: str | None = None
    by: str | None = None
    order: str | None = None
    n_components: int | None = None
    likely_order: Order | None = None

    @property
    def truths(self) -> list[str]:
        """Keys that true values may have."""
        if self.reference is not None:
            return [self.reference]
        return [name.format(self.target) for name in REFERENCES]


def read_ensemble(
    source: str | Path | Source,
    target: str,
    reference: str | None = None,
    *,
    absent: str | None = None,
    by: str | None = None,
    order: str | None = None,
    n_components: int | None = None,
    likely_order: Order | None = None,
) -> Ensemble:
    """Read the predictions of an ensemble, and the truth.

    Parameters
    ----------
    source : path, or what `read_source` returned
        Extended XYZ (or whatever else ASE reads), ``.csv``, ``.parquet`` or ``.npz``. In tables,
        columns ``{key}_0``, ``{key}_1``, … or ``{key}_x``, ``{key}_y``, ``{key}_z`` belong
        together; columns ``{target}_0`` … without any others are members.
    target, reference, absent, by, order, n_components, likely_order
        See `Wanted`.
    """
    wanted = Wanted(target, reference, absent, by, order, n_components, likely_order)
    found = read_source(source) if isinstance(source, (str, Path)) else source
    asked = [key for key in (absent, by) if key is not None and key != "element"]
    if isinstance(found, Table):
        return _ensemble(of_table(found, target, asked, wanted.truths), wanted)
    return _ensemble(of_frames(found, target, [*asked, *wanted.truths]), wanted)


def _ensemble(values: Values, wanted: Wanted) -> Ensemble:
    found = _predictions(values, wanted.target)
    y, shape = _reference(values, wanted, found)
    k = int(np.prod(shape))
    mean = None if found.mean is None else _like(wanted.target, found.mean, (len(values), *shape))
    kind = "component" if k > 1 else "structure" if values.symbols is None else "atom"
    fields: dict[str, Any] = {
        "y": y.reshape(-1),
        "structure": np.repeat(values.structure, k),
        "atom": np.repeat(values.atom, k),
        "component": np.tile(np.arange(k), len(values)) if k > 1 else None,
        "key": found.key,
        "shape": shape,
        "per_atom": values.symbols is not None,
        "labels": _labels(values, wanted.by, k),
        "columns": values.columns,
    }
    for key, bars in found.error_bars.items():
        _like(key, bars, (len(values), *shape))
    if found.members is None:
        assert mean is not None
        std, remarks = _error_bars(found)
        fields |= {"members": None, "absent": None, "remarks": remarks}
        return Ensemble(wanted.target, kind, mean.reshape(-1), std.reshape(-1), **fields)
    known = {} if mean is None else {wanted.target: mean}
    known |= {"the reference": y}
    order = wanted.order or order_of(values.columns.get(found.key, ("",)))
    layout, remarks = find_layout(
        found.key, found.members, k, known, order=order, likely=wanted.likely_order
    )
    members = layout.points(found.members)
    flags = _absent(values, wanted.target, wanted.absent, members.shape[1])
    fields |= {
        "absent": None if flags is None else np.repeat(flags, k, axis=0),
        "layout": layout,
        "remarks": remarks,
        "beside": None if mean is None else mean.reshape(-1),
        "has_bars": bool(found.error_bars),
        "has_stated_spread": _is_stated(
            members, found.error_bars.get(f"{wanted.target}_uncertainty")
        ),
    }
    return with_members(wanted.target, kind, members, **fields)


@dataclass(frozen=True)
class _Found:
    """What is predicted, a row for each structure or atom.

    Attributes
    ----------
    key : str
        Of the members, or else of the error bars.
    members, mean : arrays, optional
    error_bars : dict of str to arrays
        By key.
    """

    key: str
    members: Float64Array | None
    mean: Float64Array | None
    error_bars: dict[str, Float64Array]


def _predictions(values: Values, target: str) -> _Found:
    mean = _numbers(values, target) if target in values.arrays else None
    bars = [f"{target}{suffix}" for suffix in ERROR_BARS if f"{target}{suffix}" in values.arrays]
    error_bars = {key: _numbers(values, key) for key in bars}
    for suffix in MEMBERS:
        key = f"{target}{suffix}"
        if key in values.arrays:
            return _Found(key, _numbers(values, key), mean, error_bars)
    if bars and mean is not None:
        return _Found(bars[0], None, mean, error_bars)
    tried = ", ".join(f"{target}{suffix}" for suffix in (*MEMBERS, *ERROR_BARS))
    raise InputError(
        "target",
        repr(target),
        f"members or error bars under one of {tried} (the error bars with a value under {target})",
        f"There are: {_known(values)}.",
    )


def _is_stated(members: Float64Array, bars: Float64Array | None) -> bool:
    """Whether the members (n, R) have these standard deviations, as far as they are known."""
    if bars is None or members.shape[1] < 2:
        return False
    flat = bars.reshape(-1)
    known = np.isfinite(flat) & np.isfinite(members).all(axis=1)
    if flat.shape != (len(members),) or not known.any():
        return False
    return np.allclose(members[known].std(axis=1, ddof=1), flat[known], rtol=1e-6, atol=1e-8)


def _error_bars(found: _Found) -> tuple[Float64Array, tuple[str, ...]]:
    """Return standard deviations, and what is to be said of them."""
    std = found.error_bars[found.key]
    if not found.key.endswith(VARIANCES):
        return std, ()
    negative = int(np.count_nonzero(std < 0))
    if negative:
        raise InputError(found.key, f"{negative} negative", "variances")
    return np.sqrt(std), (f"{found.key} is taken to be a variance: its root is the error bar.",)


def _reference(
    values: Values, wanted: Wanted, found: _Found
) -> tuple[Float64Array, tuple[int, ...]]:
    """Return the true values (rows, k), NaN where there are none, and the shape of one of them."""
    for name in wanted.truths:
        if name in values.arrays:
            y = _numbers(values, name)
            shape = y.shape[1:] if found.mean is None else _shape(found.mean, y.shape[1:])
            return y.reshape(len(values), -1), shape
    if wanted.n_components is None:
        raise InputError(
            "reference",
            repr(wanted.reference) if wanted.reference is not None else "none",
            f"the key of the true values of {wanted.target}",
            f"There are: {_known(values)}.",
        )
    k = wanted.n_components
    shape = () if k == 1 else (k,)
    if found.mean is not None:
        shape = _shape(found.mean, shape)
    elif found.members is not None and found.members.ndim == 4:  # matrices
        shape = next(
            (s for s in (found.members.shape[2:], found.members.shape[1:-1]) if np.prod(s) == k),
            shape,
        )
    return np.full((len(values), k), np.nan), shape


def _shape(mean: Float64Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that values are stored in, if it has as many numbers as is expected."""
    return mean.shape[1:] if np.prod(mean.shape[1:]) == np.prod(shape) else shape


def _like(key: str, values: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """Return values (rows, k), if they have as many numbers in each row as they must."""
    if key.startswith("stress") and values.shape[1:] == (6,) and np.prod(shape[1:]) == 9:
        # ASE turns the nine numbers of a stress into six.
        values = voigt_6_to_full_3x3_stress(values)  # type: ignore[no-untyped-call]
    if np.prod(values.shape[1:]) != np.prod(shape[1:]):
        raise InputError(key, f"shape {values.shape}", f"that of the other values, {shape}")
    return values.reshape(len(values), -1)


def _absent(values: Values, target: str, key: str | None, n_members: int) -> BoolArray | None:
    name = key if key is not None else f"{target}_absent"
    if name not in values.arrays:
        if key is None:
            return None
        raise InputError("absent", repr(key), f"one of {_known(values)}")
    flags = _numbers(values, name).reshape(len(values), -1)
    if flags.shape[1] != n_members or not np.all((flags == 0) | (flags == 1)):
        raise InputError(
            "absent",
            f"{name} of shape {flags.shape}",
            f"a 0 or 1 (false or true) for each of {n_members} members",
        )
    return flags.astype(bool)


def _labels(values: Values, by: str | None, k: int) -> StrArray | None:
    if by is None:
        return None
    if by == "element" and values.symbols is not None:
        labels = values.symbols
    elif by in values.arrays:
        labels = np.asarray(values.arrays[by]).astype(str)
        if labels.ndim != 1:
            raise InputError("by", repr(by), "a key of one label for each structure or atom")
    elif by == "element":
        expected = "a key of structures: element needs a property of atoms"
        raise InputError("by", repr(by), expected)
    else:
        extra = "element, " if values.symbols is not None else ""
        raise InputError("by", repr(by), f"one of {extra}{_known(values)}")
    return np.repeat(labels, k)


def _numbers(values: Values, key: str) -> Float64Array:
    if np.iscomplexobj(values.arrays[key]):
        raise InputError(key, "complex numbers", "real ones")
    try:
        numbers = np.asarray(values.arrays[key], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(key, "text", "numbers") from None
    if len(numbers) != len(values):
        raise InputError(key, f"shape {numbers.shape}", f"{len(values)} rows, as the predictions")
    return numbers


def _known(values: Values) -> str:
    return ", ".join(sorted({*values.arrays, *values.others})) or "no keys at all"
