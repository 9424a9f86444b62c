"""Columns of a table that belong together, by their names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qualms.errors import InputError

#: How components may be called: of vectors, of symmetric tensors (as ASE has them), and of tensors.
_COMPONENTS = (
    ("x", "y", "z"),
    ("xx", "yy", "zz", "yz", "xz", "xy"),
    ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz"),
)


#: What may follow the stem of a name: a number, a component, or both in either order.
FORMS = ("i", "c", "ic", "ci")


def component_endings(k: int) -> tuple[str, ...]:
    """Return how k components are called, after an underscore; nothing if they have no names."""
    return next((tuple(f"_{c}" for c in names) for names in _COMPONENTS if len(names) == k), ())


def join_columns(
    columns: Mapping[str, Any], stem: str, forms: Sequence[str] = FORMS
) -> tuple[tuple[str, ...], Any] | None:
    """Join columns that are called after one stem into one array with a row for each of theirs.

    These are numbered ones, ``e_0`` (or ``e0``), ``e_1``, …; components, ``f_x``, ``f_y``, ``f_z``;
    and components of members, ``f_0_x``, … or ``f_x_0``, …, which become arrays (n, R, k) or
    (n, k, R).

    Parameters
    ----------
    columns : mapping of str to arrays
        Only those that are called so are looked at.
    stem : str
    forms : sequence of {"i", "c", "ic", "ci"}
        Numbered, components, both: the first that there is.

    Returns
    -------
    names : tuple of str
        The columns, in the order of the flattened array.
    values : (n, …) array
    """
    pattern = (
        rf"{re.escape(stem)}(?:_?(\d+)|_([xyz]{{1,2}})|_(\d+)_([xyz]{{1,2}})|_([xyz]{{1,2}})_(\d+))"
    )
    found: dict[tuple[str, ...], str] = {}
    for name in columns:
        match = re.fullmatch(pattern, name)
        if match and np.ndim(columns[name]) == 1:
            found[tuple(part for part in match.groups() if part)] = name
    for form in forms:
        axes = _axes([key for key in found if _form(key) == form], form)
        if axes:
            keys = list(itertools.product(*axes))
            names = tuple(found[key] for key in keys)
            if len({len(columns[name]) for name in names}) > 1:
                raise InputError(stem, f"{names[0]}, … of different lengths", "one length")
            values = np.column_stack([columns[name] for name in names])
            return names, values.reshape(-1, *map(len, axes))
    return None


def order_of(names: Sequence[str]) -> str | None:
    """Return which comes first in columns of members, if their names tell: member or component."""
    if all(re.search(r"\d_[xyz]{1,2}$", name) for name in names):
        return "member"
    return "component" if all(re.search(r"_[xyz]{1,2}_\d+$", name) for name in names) else None


def _form(key: tuple[str, ...]) -> str:
    return "".join("i" if part.isdigit() else "c" for part in key)


def _axes(keys: list[tuple[str, ...]], form: str) -> list[list[str]]:
    """Return the labels of each axis, in order; none if they are not all of a known set."""
    axes = []
    for kind, labels in zip(form, zip(*keys, strict=True), strict=False):
        present = set(labels)
        if kind == "i":
            axes.append(sorted(present, key=int))
        else:
            axes += [list(known) for known in _COMPONENTS if present == set(known)]
    complete = len(axes) == len(form) and len(keys) == np.prod([len(axis) for axis in axes])
    return axes if complete else []
