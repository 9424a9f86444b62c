"""What an ensemble says about each point, wherever it came from."""

from __future__ import annotations

import csv
import io
import itertools
import re
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.io.extxyz import per_atom_properties
from ase.stress import voigt_6_to_full_3x3_stress
from scipy.special import stdtr

from qualms.arrays import BoolArray, Float64Array, IntArray, StrArray
from qualms.atomistic.structures import read_frames
from qualms.calibration.base import CalibrationData, calibration_data, rounding_of
from qualms.errors import CalibrationError, InputError, counted
from qualms.gp.ensemble import MIN_ABSENT, committee, internal_prediction
from qualms.io.files import atomic_output
from qualms.prediction import Prediction


@dataclass(frozen=True)
class Ensemble:
    """Predictions of n points: structures, atoms, or components of vectors of atoms.

    Attributes
    ----------
    target : str
    kind : {"structure", "atom", "component"}
    mean, std : (n,) arrays
        Of the members; or as they were given, if there are no members.
    members : (n, R) array, optional
    y : (n,) array
        Reference values; NaN where there is none.
    absent : (n, R) array of bool, optional
        Whether the member did not see the point in its training.
    structure, atom : (n,) arrays of int
        Where each point belongs; `atom` is zero where that has no meaning.
    component : (n,) array of int, optional
        Which of the values of its structure or atom a point is, if they are several.
    key : str
        Where members, or error bars, were found.
    shape : tuple of int
        Of the values of one structure or atom, as they are stored: each of them is a point.
    layout : Layout, optional
        How members are stored.
    columns : mapping of str to tuple of str
        The columns of a table that values of a key were found in, if they are several.
    per_atom : bool
        Whether they are those of atoms.
    labels : (n,) array of str, optional
        What points are grouped by.
    remarks : tuple of str
        What was noticed while reading.
    beside : (n,) array, optional
        What was found under the name of the target itself, beside members; NaN where there is none.
    has_bars : bool
        Whether there are error bars beside the members.
    has_stated_spread : bool
        Whether the members have the spread that ``{target}_uncertainty`` states, as after a
        calibration was applied to them.
    """

    target: str
    kind: str
    mean: Float64Array
    std: Float64Array
    members: Float64Array | None
    y: Float64Array
    absent: BoolArray | None
    structure: IntArray
    atom: IntArray
    component: IntArray | None = None
    key: str = ""
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_atom: bool = False
    labels: StrArray | None = None
    remarks: tuple[str, ...] = ()
    beside: Float64Array | None = None
    has_bars: bool = False
    has_stated_spread: bool = False

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def n_members(self) -> int | None:
        """R, or None if there are only error bars."""
        return None if self.members is None else int(self.members.shape[1])

    @property
    def n_components(self) -> int:
        """Points of one structure or atom."""
        return int(np.prod(self.shape))

    def counted(self, n: int | None = None) -> str:
        """Return a number of points, all of them by default, in words."""
        return counted(len(self) if n is None else n, self.kind)

    def some(self, chosen: BoolArray) -> Ensemble:
        """Return some of the points."""
        arrays = (
            "mean",
            "std",
            "members",
            "y",
            "absent",
            "structure",
            "atom",
            "labels",
            "beside",
            "component",
        )
        taken: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[chosen]
            for name in arrays
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class Points:
    """The points of an ensemble that a calibration can be fitted to and judged on.

    Attributes
    ----------
    ensemble : Ensemble
        These points alone; all have a reference.
    data : CalibrationData
        Their residuals and spreads, by the members that did not see them.
    dropped : dict of str to int
        How many points were left out, and why.
    """

    ensemble: Ensemble
    data: CalibrationData
    dropped: dict[str, int]

    @property
    def mean(self) -> Float64Array:
        """What the members that did not see a point say: (n,)."""
        return self.ensemble.y - self.data.residuals

    def prediction(self, std: Float64Array) -> Prediction:
        """Return the predictions with these standard deviations, and before with the spreads."""
        return as_prediction(self.mean, std, as_prediction(self.mean, self.data.spread))


def usable_points(ensemble: Ensemble) -> Points:
    """Leave out, and count, points that say nothing about errors.

    These are points without a reference, with a prediction that is not finite, that too many
    members have seen, and without any spread.
    """
    dropped: dict[str, int] = {}

    def keep(found: Ensemble, chosen: BoolArray, why: str) -> Ensemble:
        if not chosen.all():
            dropped[why] = int(np.count_nonzero(~chosen))
        if np.count_nonzero(chosen) < 2:
            reasons = "; ".join(f"{ensemble.counted(n)} {reason}" for reason, n in dropped.items())
            number = "Only one point" if chosen.any() else "No point"
            needed = "at least 2 are needed"
            raise CalibrationError(f"{number} can be used to calibrate ({reasons or needed}).")
        return found if chosen.all() else found.some(chosen)

    found = keep(ensemble, np.isfinite(ensemble.y), "without a reference value")
    found = keep(found, finite(found), "with NaN or infinite predictions")
    if found.members is None:
        refuse_negative(found)
        found = keep(found, found.std > 0, "with an error bar of zero")
        return Points(found, _from_error_bars(found), dropped)
    if found.absent is not None:
        enough = found.absent.sum(axis=1) >= MIN_ABSENT
        # What the others say does not matter; it may as well be missing.
        known = np.where(found.absent, found.members, 0.0)
        found = replace(found, members=known)
        found = keep(found, enough, f"that fewer than {MIN_ABSENT} members had not seen")
    assert found.members is not None
    spread = found.std
    if found.absent is not None:
        spread = internal_prediction(found.members, found.absent).std
    found = keep(found, spread > rounding_of(found.members), "about which all members agree")
    assert found.members is not None
    return Points(found, calibration_data(found.y, found.members, found.absent), dropped)


def as_prediction(
    mean: Float64Array, std: Float64Array, uncalibrated: Prediction | None = None
) -> Prediction:
    """Return a prediction with this mean and standard deviation, of two members ȳ ± σ/√2."""
    offset = std / np.sqrt(2.0)
    return Prediction(np.stack([mean - offset, mean + offset], axis=-1), uncalibrated=uncalibrated)


def with_members(target: str, kind: str, members: Float64Array, **fields: Any) -> Ensemble:
    """Return the ensemble of members (n, R); mean and spread follow from them, Eq. (4)."""
    if members.shape[1] < 2:
        raise InputError(
            target,
            "an ensemble of one member",
            "at least 2 members",
            f"Or store the error bar as {target}_uncertainty.",
        )
    with np.errstate(invalid="ignore"):
        mean, std = committee(members)
    return Ensemble(target, kind, mean, std, members, **fields)


def finite(ensemble: Ensemble) -> BoolArray:
    """Whether there is a prediction by all members that count: those that did not see the point."""
    if ensemble.members is None:
        return np.isfinite(ensemble.mean) & np.isfinite(ensemble.std)
    counts = True if ensemble.absent is None else ensemble.absent
    return np.asarray(np.all(np.isfinite(ensemble.members) | ~np.asarray(counts), axis=1))


def refuse_negative(ensemble: Ensemble) -> None:
    """Refuse standard deviations below zero."""
    negative = int(np.count_nonzero(ensemble.std < 0))
    if negative:
        raise InputError(
            ensemble.key,
            counted(negative, "negative value"),
            "standard deviations",
        )


def _from_error_bars(ensemble: Ensemble) -> CalibrationData:
    residuals = ensemble.y - ensemble.mean
    if not np.any(residuals):
        raise CalibrationError(
            "All residuals are exactly zero, so no scale of the errors can be found."
        )
    # Of error bars alone nobody knows how many members made them: see `ERROR_BAR_METHODS`.
    n_members = np.full(len(residuals), 2)
    return CalibrationData(residuals, ensemble.std, n_members, np.ones(len(residuals)))


# Columns of a table that belong together, by their names.
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


# In which order the members of vectors and tensors are stored.
Order = Literal["member", "component"]
ORDERS: tuple[Order, ...] = ("member", "component")
#: In words.
_WORDS = {"member": "member by member", "component": "component by component"}
#: An order that chance would prefer no more often, as by five standard errors, is certain.
_CHANCE = 3e-7
#: And one in which the error is so many times smaller, as from the mean of these very members.
_CLOSER = 0.1
#: Fewer rows have no standard error.
_FEW = 5


@dataclass(frozen=True)
class Layout:
    """How the members of a row are stored.

    Attributes
    ----------
    shape : tuple of int
        Of the numbers of one row.
    n_components : int
        k.
    order : {"member", "component"}, optional
        None if there is one component.
    """

    shape: tuple[int, ...]
    n_components: int
    order: Order | None

    def points(self, stored: Float64Array) -> Float64Array:
        """Return members (n·k, R) of members as they are stored, (n, *shape)."""
        n_members = int(np.prod(self.shape)) // self.n_components
        by_component = _by_component(stored.reshape(len(stored), -1), self.n_components, self.order)
        return by_component.reshape(-1, n_members)

    def stored(self, points: Float64Array) -> Float64Array:
        """Return members (n, *shape) of members (n·k, R)."""
        by_component = points.reshape(-1, self.n_components, points.shape[1])
        if self.order == "member":
            by_component = by_component.transpose(0, 2, 1)
        return by_component.reshape(-1, *self.shape)


def find_layout(
    key: str,
    members: Float64Array,
    n_components: int,
    known: Mapping[str, Float64Array],
    *,
    order: str | None = None,
    likely: Order | None = None,
) -> tuple[Layout, tuple[str, ...]]:
    """Find out how members are stored, and what the user must know about it.

    Parameters
    ----------
    key : str
        Where they were found.
    members : (n, …) array
        R·k numbers in each row.
    n_components : int
        k.
    known : mapping of str to (n, k) arrays
        What is known of the same rows, by key; NaN where it is not.
    order : {"member", "component"}, optional
        What the user says.
    likely : {"member", "component"}, optional
        What it was in another file of the same ensemble.
    """
    if order is not None and order not in ORDERS:
        raise InputError("order", repr(order), f"one of {', '.join(ORDERS)}")
    shape = members.shape[1:]
    possible = _possible(key, members.shape, n_components)
    if n_components == 1 or np.prod(shape) == n_components:
        return Layout(shape, n_components, "member" if n_components > 1 else None), ()
    if order is not None and order not in possible:
        raise InputError("order", repr(order), f"'{possible[0]}': {key} has shape {members.shape}")
    if len(possible) == 1:
        return Layout(shape, n_components, possible[0]), ()
    rows = members.reshape(len(members), -1)
    judged = _judged(rows, n_components, known)
    found, remarks = _decide(key, judged, order, likely, len(shape) > 1)
    return Layout(shape, n_components, found), remarks


def _possible(key: str, shape: tuple[int, ...], k: int) -> list[Order]:
    """Return the orders that the shape of all members allows."""
    n, *inner = shape
    width = int(np.prod(inner))
    if width % k or not width:
        raise InputError(key, f"{width} numbers per row", f"a multiple of the {k} components")
    n_members = width // k
    fits: list[Order] = list(ORDERS)
    if k == 1 and sum(size > 1 for size in inner) > 1:
        fits = []
    elif k > 1 and len(inner) > 1:
        axes: dict[Order, int] = {"member": inner[0], "component": inner[-1]}
        fits = [order for order in ORDERS if axes[order] == n_members]
    if not fits:
        expected = (
            f"({n}, N_R)" if k == 1 else f"({n}, {n_members}, {k}) or ({n}, {k}, {n_members})"
        )
        raise InputError(key, f"shape {shape}", expected)
    return fits


@dataclass(frozen=True)
class _Judged:
    """Which order is better, against what, by how many standard errors."""

    order: Order
    against: str
    certain: bool


def _decide(
    key: str, judged: _Judged, order: Order | None, likely: Order | None, square: bool
) -> tuple[Order, tuple[str, ...]]:
    """Return the order to take, and what to say about it."""
    taken = order or (judged.order if judged.certain or likely is None else likely)
    words = _WORDS[taken]
    doubted = judged.order != taken
    if judged.certain and doubted:
        return taken, (
            f"{key} is read {words}, as asked; but {_WORDS[judged.order]} "
            f"it would be closer to {judged.against}.",
        )
    if judged.certain:
        if likely is None or likely == taken:
            return taken, ()
        return taken, (
            f"{key} is stored {words} here, as {judged.against} tells, and was "
            f"{_WORDS[likely]} in the calibration.",
        )
    if order is not None or (likely is not None and not doubted):
        return taken, ()
    origin = "as in the calibration" if likely is not None else f"judged by {judged.against}"
    how = "R = k" if square else "flat columns"
    return taken, (
        f"{key} is read {words} ({origin}), but that is not certain: {how} can be read both ways. "
        "--order member or --order component says which it is.",
    )


def _judged(rows: Float64Array, k: int, known: Mapping[str, Float64Array]) -> _Judged:
    """Compare both orders with all that is known, until one is certain; or else by the spread."""
    means = {order: _mean(_by_component(rows, k, order)) for order in ORDERS}
    best, furthest = None, -1.0
    for name, values in known.items():
        found = _against(name, values.reshape(len(rows), k), means)
        if found is not None and (found[0].certain or found[1] > furthest):
            best, furthest = found
            if best.certain:
                return best
    if best is not None:
        return best
    # The total scatter of a row is the same; what means explain of it, members do not disagree on.
    explained = {order: float(np.nansum(mean**2)) for order, mean in means.items()}
    order: Order = "component" if explained["component"] > explained["member"] else "member"
    return _Judged(order, "the spread between members", certain=False)


def _against(
    name: str, values: Float64Array, means: dict[Order, Float64Array]
) -> tuple[_Judged, float] | None:
    """Return the order in which members are closer to some values, and by how many σ; or None."""
    usable = np.isfinite(values) & np.isfinite(means["member"]) & np.isfinite(means["component"])
    some = usable.all(axis=1)
    if not some.any():
        return None
    y = values[some]
    errors = {order: float(np.sum((mean[some] - y) ** 2)) for order, mean in means.items()}
    closer, other = sorted(ORDERS, key=lambda order: errors[order])
    if errors[closer] < _CLOSER**2 * errors[other]:
        return _Judged(closer, name, certain=True), np.inf
    if len(y) < _FEW:
        return _Judged(closer, name, certain=False), 0.0
    # What is the same in all rows, such as the bias of a member, says the same in all of them, be
    # it right or wrong: only what varies is evidence.
    varies = y - y.mean(axis=0)
    difference = np.sum(varies * (means["member"][some] - means["component"][some]), axis=1)
    error = float(np.std(difference, ddof=1)) / np.sqrt(len(y))
    sigmas = float(np.mean(difference)) / error if error > 0 else 0.0
    if float(stdtr(len(y) - 1, -abs(sigmas))) < _CHANCE:
        return _Judged("member" if sigmas > 0 else "component", name, certain=True), abs(sigmas)
    return _Judged(closer, name, certain=False), abs(sigmas)


def _by_component(rows: Float64Array, k: int, order: Order | None) -> Float64Array:
    """Return rows (n, R·k) as (n, k, R)."""
    if order == "member":
        return rows.reshape(len(rows), -1, k).transpose(0, 2, 1)
    return rows.reshape(len(rows), k, -1)


def _mean(members: Float64Array) -> Float64Array:
    """Return the mean (n, k) of the members that are finite; NaN if none is."""
    finite = np.isfinite(members)
    count = finite.sum(axis=2)
    total = np.where(finite, members, 0.0).sum(axis=2)
    mean: Float64Array = np.full(total.shape, np.nan)
    np.divide(total, count, out=mean, where=count > 0)
    return mean


# Columns of Parquet files as arrays, and back. pyarrow is imported only where it is needed.
def read_parquet(file: Path | None) -> Any:
    """Return a table of pyarrow; one without columns if there is no file."""
    arrow, parquet = _pyarrow()
    if file is None:
        return arrow.table({})
    try:
        return parquet.read_table(file)
    except arrow.lib.ArrowException as error:
        raise ValueError(str(error)) from None


def write_parquet(table: Any, stream: BinaryIO) -> None:
    """Write a table of pyarrow."""
    _pyarrow()[1].write_table(table, stream)


def arrow_array(name: str, column: Any) -> Any:
    """Return a column as an array: lists of numbers on further axes, NaN where there is no list.

    Parameters
    ----------
    name : str
        Of the column, for messages.
    column : pyarrow.ChunkedArray
    """
    arrow, _ = _pyarrow()
    array = column.combine_chunks()
    if isinstance(array, arrow.ChunkedArray):  # of no chunks
        return np.empty(0)
    if arrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not _is_list(array.type):
        return array.to_numpy(zero_copy_only=False)
    known = array.is_valid().to_numpy(zero_copy_only=False)
    lists = _lists(name, array.drop_null())
    filled = np.full((len(array), *lists.shape[1:]), np.nan)
    filled[known] = lists
    return filled


def _lists(name: str, array: Any) -> Any:
    """Return lists of lists of … numbers, none of them missing, as one array."""
    import pyarrow.compute

    shape = [len(array)]
    while _is_list(array.type):
        sizes = pyarrow.compute.list_value_length(array).to_numpy(zero_copy_only=False)
        other = np.flatnonzero(sizes != sizes[:1])
        if len(other) or not np.all(np.isfinite(sizes)):
            given = f"{sizes[0]:g} values in one row and {sizes[other[0]]:g} in another"
            raise InputError(name, given, "the same number in all rows")
        shape.append(int(sizes[0]) if len(sizes) else 0)
        array = array.flatten()
    numbers = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "biuf":
        raise InputError(name, "lists of text", "lists of numbers")
    return numbers.astype(np.float64).reshape(shape)


def append_array(table: Any, name: str, array: Any) -> Any:
    """Return the table with a column in the place of that of its name, or as its last.

    Further axes become lists, of the kind that the column had before.
    """
    arrow, _ = _pyarrow()
    old = table.schema.field(name).type if name in table.column_names else None
    values = arrow.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        n, size = int(np.prod(array.shape[:axis])), array.shape[axis]
        if old is not None and arrow.types.is_fixed_size_list(old):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        else:
            offsets = np.arange(0, (n + 1) * size, size, dtype=np.int32)[: n + 1]
            values = arrow.ListArray.from_arrays(arrow.array(offsets), values)
    if not table.num_columns:
        return arrow.table({name: values})
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _is_list(kind: Any) -> bool:
    types = _pyarrow()[0].types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "path",
            "a .parquet file",
            ".csv or .npz",
            "Or install pyarrow: pip install qualms[parquet]",
        ) from None
    return pyarrow, pyarrow.parquet


# Tables in files: CSV, Parquet and NPZ. What is not replaced is written again as it was.
#: Cells of CSV that are no numbers, and yet are.
_WORDS_TABLES = {"true": 1.0, "false": 0.0} | dict.fromkeys(
    ("", "na", "n/a", "none", "null"), np.nan
)
#: What other programs put between cells.
_SEPARATORS = (";", "\t", "|")


class Table(Mapping[str, Any], ABC):
    """The columns of a file by name. Only those that somebody asks for become arrays."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)
        self._arrays: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        """Return a column as an array, its rows on the first axis."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._arrays:
            self._arrays[name] = self._array(name)
        return self._arrays[name]

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of rows, of the longest column if they differ."""

    @abstractmethod
    def _array(self, name: str) -> Any:
        """Read a column."""

    @abstractmethod
    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        """Write the table with these columns replaced or added, and without those."""

    def write(
        self,
        path: str | Path,
        changes: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        force: bool = False,
    ) -> None:
        """Write the table, completely or not at all, with some columns changed.

        Parameters
        ----------
        path : path
            Of the same format.
        changes : mapping of str to arrays
            Columns that replace those of their names, in their places, or that come last.
        without : collection of str
            Columns that are left out.
        force : bool
            Whether an existing file may be replaced.
        """
        with atomic_output(path, force=force) as stream:
            self._write(stream, changes, without)


class _CSVTable(Table):
    def __init__(self, rows: list[list[str]]) -> None:
        header, *body = rows or [[]]
        super().__init__(header)
        self._body = [row for row in body if row]

    @property
    def n_rows(self) -> int:
        return len(self._body)

    def _cells(self, name: str) -> list[str]:
        i = self._names.index(name)
        return [row[i] for row in self._body]

    def _array(self, name: str) -> Any:
        return _parsed(self._cells(name))

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        new = _flat(changes)
        kept = {name: self._cells(name) for name in self if name not in {*without, *new}}
        places = [name for name in self if name in kept or name in new]
        columns = {name: kept.get(name, new.get(name)) for name in [*places, *new]}
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        stream.write(text.getvalue().encode())


class _NPZTable(Table):
    def __init__(self, stored: Mapping[str, Any]) -> None:
        super().__init__([name for name, array in stored.items() if np.ndim(array)])
        self._stored = dict(stored)

    @property
    def n_rows(self) -> int:
        return max((len(self._stored[name]) for name in self), default=0)

    def _array(self, name: str) -> Any:
        return self._stored[name]

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        arrays = {n: a for n, a in self._stored.items() if n not in without} | dict(changes)
        # As `numpy.savez`, which has parameters of its own that a column may share its name with.
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


class _ParquetTable(Table):
    def __init__(self, table: Any) -> None:
        super().__init__(table.column_names)
        self._table = table

    @property
    def n_rows(self) -> int:
        return int(self._table.num_rows)

    def _array(self, name: str) -> Any:
        return arrow_array(name, self._table.column(name))

    def _write(
        self, stream: BinaryIO, changes: Mapping[str, Any], without: Collection[str]
    ) -> None:
        table = self._table.drop_columns([n for n in self if n in without and n not in changes])
        for name, array in changes.items():
            table = append_array(table, name, np.asarray(array))
        write_parquet(table, stream)


def is_table(path: str | Path) -> bool:
    """Whether a file is a table by its name."""
    return Path(path).suffix.lower() in _READERS


def read_columns(path: str | Path) -> Table:
    """Return the columns of a table by name; those of an NPZ file may differ in length.

    Columns of a CSV file are numbers if all of their cells are (an empty one is NaN), else text.
    Nothing is ever unpickled.
    """
    file = Path(path)
    try:
        table = _READERS[file.suffix.lower()](file)
    except OSError as error:
        raise InputError(
            "path", f"'{file}' ({error.strerror or error})", "a file to read"
        ) from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError("path", f"'{file}' ({reason})", f"a {file.suffix} file") from None
    if not table.n_rows:
        raise InputError("path", f"'{file}' (no rows)", "a table with at least one row")
    return table


def write_columns(path: str | Path, columns: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a new table, completely or not at all; the suffix says how."""
    suffix = Path(path).suffix.lower()
    table: Table = _CSVTable([])
    if suffix != ".csv":
        table = _NPZTable({}) if suffix == ".npz" else _ParquetTable(read_parquet(None))
    table.write(path, columns, force=force)


def _flat(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Give every column of a matrix a name of its own, with a number at the end."""
    flat: dict[str, list[Any]] = {}
    for name, array in columns.items():
        values = np.asarray(array)
        if values.ndim == 1:
            flat[name] = values.tolist()
        else:
            parts = values.reshape(len(values), -1)
            flat |= {f"{name}_{i}": parts[:, i].tolist() for i in range(parts.shape[1])}
    return flat


def _parsed(cells: list[str]) -> Any:
    """Return cells as whole numbers, as numbers, or as the text that they are."""
    if all(re.fullmatch(r"\s*[+-]?\d{1,18}\s*", cell) for cell in cells):
        return np.array([int(cell) for cell in cells])
    try:
        numbers = [
            _WORDS_TABLES[c] if (c := cell.strip().lower()) in _WORDS_TABLES else float(c)
            for cell in cells
        ]
    except ValueError:
        return np.array(cells, dtype=str)
    return np.array(numbers)


def _read_csv(file: Path) -> Table:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.reader(stream))
    header, *body = rows or [[]]
    ragged = next((i for i, row in enumerate(body) if row and len(row) != len(header)), None)
    if ragged is not None:
        raise ValueError(f"row {ragged + 1} has {len(body[ragged])} cells, not {len(header)}")
    if len(set(header)) < len(header):
        raise ValueError("two columns have the same name")
    other = next((sign for sign in _SEPARATORS if len(header) == 1 and sign in header[0]), None)
    if other is not None:
        raise ValueError(f"cells seem to be separated by {other!r} rather than by commas")
    return _CSVTable(rows)


def _read_npz(file: Path) -> Table:
    with np.load(file, allow_pickle=False) as archive:
        return _NPZTable({name: archive[name] for name in archive.files})


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".parquet": lambda file: _ParquetTable(read_parquet(file)),
    ".npz": _read_npz,
}


# What is in a file: structures with values, or the columns of a table, as arrays by key.
#: Keys of members, of standard deviations and of variances, after the name of the target.
MEMBERS = ("_ensemble", "_comm")
ERROR_BARS = ("_uncertainty", "_std", "_var", "_variance")
VARIANCES = ("_var", "_variance")
#: Keys of reference values that are tried if none is given.
REFERENCES = ("REF_{}", "{}_ref", "{}_reference", "{}_true")


@dataclass(frozen=True)
class Values:
    """Arrays by key, a row for each structure or atom, and what is known about the rows.

    Attributes
    ----------
    arrays : mapping of str to arrays
        First axis: rows.
    structure, atom : (n_rows,) arrays of int
    symbols : (n_rows,) array of str, optional
        Elements, if rows are atoms.
    others : set of str
        Further keys, to be named if something is missing.
    columns : mapping of str to tuple of str
        The columns of a table that some of the arrays were joined from.
    """

    arrays: Mapping[str, Any]
    structure: Any
    atom: Any
    symbols: StrArray | None
    others: frozenset[str] = frozenset()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.structure)


#: What a file holds: structures, or the columns of a table by name.
Source = list[Atoms] | Table


def read_source(path: str | Path) -> Source:
    """Read all of a file: extended XYZ or whatever else ASE reads, CSV, Parquet or NPZ."""
    return read_columns(path) if is_table(path) else read_frames(path)


# --- from structures ---


def of_frames(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> Values:
    """Collect the values of all structures under the keys that may matter."""
    _move_members(frames, target, asked)
    found = [_values(atoms) for atoms in frames]
    keys = {key for info, arrays in found for key in (*info, *arrays)}
    wanted = [target, *(f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS, "_absent")), *asked]
    predicted = [f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS)]
    per_atom = any(key in arrays for _, arrays in found for key in predicted)
    n_atoms = np.array([len(atoms) for atoms in frames])
    structure = np.repeat(np.arange(len(frames)), n_atoms) if per_atom else np.arange(len(frames))
    collected: dict[str, Any] = {}
    for key in wanted:
        if key in keys:
            rows = [_rows(key, *pair, n, per_atom) for pair, n in zip(found, n_atoms, strict=True)]
            if any(row is not None for row in rows):
                counts = n_atoms if per_atom else np.ones_like(n_atoms)
                collected[key] = _joined(key, rows, counts)
    symbols = np.concatenate([[*atoms.symbols] for atoms in frames]) if per_atom else None
    atom = np.concatenate([np.arange(n) for n in n_atoms]) if per_atom else np.zeros_like(structure)
    return Values(collected, structure, atom, symbols, frozenset(keys))


def _move_members(frames: Sequence[Atoms], target: str, asked: Sequence[str]) -> None:
    """Move members (R, n_atoms, 3) of structures, as calculators return them, to the atoms.

    They become (n_atoms, R, 3), the columns that an extended XYZ file has for them. (R, 3, 3) may
    as well be tensors of structures of three atoms, unless the target is known to be one of atoms.
    """
    of_atoms = target in per_atom_properties or any(k in a.arrays for a in frames for k in asked)
    if not of_atoms and all(len(atoms) == 3 for atoms in frames):
        return
    for key in (f"{target}{suffix}" for suffix in MEMBERS):
        stored = [np.asarray(atoms.info.get(key, ())) for atoms in frames]
        fit = [
            value.ndim == 3 and value.shape[1:] == (len(atoms), 3)
            for atoms, value in zip(frames, stored, strict=True)
            if value.size
        ]
        if fit and all(fit):
            for atoms, value in zip(frames, stored, strict=True):
                if value.size:
                    del atoms.info[key]
                    atoms.arrays[key] = value.transpose(1, 0, 2)


def with_results(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``info`` and ``arrays``, with the keys that ASE has read into a calculator."""
    info, arrays = dict(atoms.info), dict(atoms.arrays)
    for key, value in getattr(atoms.calc, "results", {}).items():
        (arrays if key in per_atom_properties else info).setdefault(key, value)
    return info, arrays


def _values(atoms: Atoms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is known of a structure and of its atoms, but for the geometry."""
    info, arrays = with_results(atoms)
    for key in ("numbers", "positions"):
        arrays.pop(key, None)
    return info, arrays


def _rows(
    key: str, info: dict[str, Any], arrays: dict[str, Any], n_atoms: int, per_atom: bool
) -> Any | None:
    """Return the value of a key as rows of one structure: one row, or one for each atom."""
    if per_atom and key in arrays:
        return np.asarray(arrays[key])
    if key not in info:
        return None
    value = np.asarray(info[key])
    return np.repeat(value[None], n_atoms, axis=0) if per_atom else value[None]


def _joined(key: str, rows: Sequence[Any | None], counts: Any) -> Any:
    """Join the rows of all structures; NaN, or no label, where a structure has none."""
    shapes = {row.shape[1:] for row in rows if row is not None}
    if len(shapes) > 1:
        first = next(r.shape[1:] for r in rows if r is not None)
        other = next(i for i, r in enumerate(rows) if r is not None and r.shape[1:] != first)
        raise InputError(
            key,
            f"{first} values in the first structure and {rows[other].shape[1:]} in number {other}",  # type: ignore[union-attr]
            "the same number in all structures",
        )
    shape = shapes.pop()
    text = any(row is not None and row.dtype.kind in "US" for row in rows)
    missing: Any = "" if text else np.nan
    filled = [
        np.full((n, *shape), missing) if row is None else row
        for row, n in zip(rows, counts, strict=True)
    ]
    return np.concatenate([np.asarray(row, dtype=str) if text else row for row in filled])


# --- from tables ---


def of_table(columns: Table, target: str, asked: Sequence[str], truths: Sequence[str]) -> Values:
    """Join columns that belong together, and find out what the rows are."""
    arrays, joined = _joined_columns(columns, target, [*asked, *truths])
    about = [*(f"{target}{suffix}" for suffix in (*MEMBERS, *ERROR_BARS, "")), *truths]
    lengths = Counter(len(arrays[key]) for key in about if key in arrays)
    # Most of what belongs together has as many rows as it should: the rest is to blame.
    n = lengths.most_common(1)[0][0] if lengths else columns.n_rows
    _refuse_transposed(arrays, [f"{target}{s}" for s in MEMBERS], [*truths, target])

    def column(name: str) -> Any:
        found = np.asarray(columns.get(name, ()))
        return found if found.shape == (n,) else None

    structure = next((c for c in map(column, ("structure", "index")) if c is not None), None)
    structure = np.arange(n) if structure is None else structure
    if structure.dtype.kind not in "iuf":
        structure = np.unique(structure.astype(str), return_inverse=True)[1].reshape(-1)
    atom, symbols = column("atom"), column("symbol")
    if atom is None or atom.dtype.kind not in "iuf":
        atom = np.zeros(n)
    return Values(
        arrays,
        structure.astype(np.intp),
        atom.astype(np.intp),
        None if symbols is None else np.asarray(symbols).astype(str),
        others=frozenset(columns),
        columns=joined,
    )


def _joined_columns(
    columns: Mapping[str, Any], target: str, asked: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return arrays by key, and the columns that they were joined from."""
    stems = [*(f"{target}{s}" for s in (*MEMBERS, *ERROR_BARS, "_absent")), *asked]
    arrays = {key: columns[key] for key in (target, *stems) if key in columns}
    joined = {}
    for stem in stems:
        found = join_columns(columns, stem)
        if found is not None and stem not in arrays:
            joined[stem], arrays[stem] = found
    found = join_columns(columns, target, ("c",))
    if found is not None and target not in arrays:
        joined[target], arrays[target] = found
    found = join_columns(columns, target, ("i", "ic", "ci"))
    if found is not None:
        names, values = found
        alike = [key for key in joined if np.shape(arrays[key]) == values.shape]
        key = _meaning(target, values.ndim == 3, arrays, alike)
        if key is not None and key not in arrays:
            joined[key], arrays[key] = names, values
    return arrays, joined


def _meaning(
    target: str, of_members: bool, arrays: Mapping[str, Any], alike: Sequence[str]
) -> str | None:
    """Return the key that numbered columns called after the target itself belong to, if any.

    They are members, unless there are other members, or error bars of as many components: then they
    are components of the prediction, if that is how many there are of the truth or of error bars.
    """
    members = [f"{target}{suffix}" for suffix in MEMBERS]
    bars = [f"{target}{suffix}" for suffix in ERROR_BARS]
    if any(key in arrays for key in members):
        has_as_many = any(key not in (*members, f"{target}_absent") for key in alike)
        return target if has_as_many and not of_members else None
    return target if any(key in bars for key in alike) and not of_members else members[0]


def _refuse_transposed(
    arrays: Mapping[str, Any], members: Sequence[str], others: Sequence[str]
) -> None:
    """If all else has as many rows as the members have columns, it is they that are wrong."""
    lengths = {len(arrays[key]) for key in others if key in arrays}
    for key in members:
        shape = np.shape(arrays.get(key, ()))
        if len(shape) > 1 and len(lengths) == 1 and shape[0] not in lengths:
            (n,) = lengths
            if n in shape[1:]:
                which = next(name for name in others if name in arrays)
                raise InputError(
                    key, f"shape {shape}", f"{n} rows, as {which}", "Is it transposed?"
                )


# Reading ensembles: extended XYZ as ASE, MACE and qualms write it, CSV, Parquet and NPZ.
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


# Where calibrated values go: into the keys and columns that they came from, beside all else.
#: What ASE reads and writes as matrices, and as nothing else.
_MATRICES = ("stress", "virial")
#: Values that are closer to the mean than this part of the spread are that mean, written rounded.
_THE_SAME = 0.05


@dataclass(frozen=True)
class CalibratedValues:
    """Mean and calibrated standard deviation (n,) of points, and members (n, R) if wanted."""

    mean: Float64Array
    std: Float64Array
    members: Float64Array | None

    def some(self, chosen: slice) -> CalibratedValues:
        """Return those of some of the points."""
        members = None if self.members is None else self.members[chosen]
        return CalibratedValues(self.mean[chosen], self.std[chosen], members)

    def among(self, chosen: BoolArray) -> CalibratedValues:
        """Return values of all points, of which these are some: NaN for the others."""

        def filled(values: Float64Array) -> Float64Array:
            rows: Float64Array = np.full((len(chosen), *values.shape[1:]), np.nan)
            rows[chosen] = values
            return rows

        members = None if self.members is None else filled(self.members)
        return CalibratedValues(filled(self.mean), filled(self.std), members)


# --- what must not be overwritten ---


def references_beside(source: Source, ensemble: Ensemble, mean: Float64Array) -> set[str]:
    """Return the keys that hold references, and would be taken for predictions of the members.

    That is the target itself, if what is stored under its name is not what the members say. ASE
    reads keys that it knows, such as energy and forces, as results of one calculation: whatever
    stands beside such a reference, or beside no prediction at all, is not of these members either.
    """
    name = ensemble.target
    if ensemble.members is None:
        return set()  # the value under that name is the prediction
    frames = source if isinstance(source, list) else []
    keys = {key for atoms in frames for part in with_results(atoms) for key in part}
    keys |= set() if isinstance(source, list) else {*source, *ensemble.columns}
    is_reference = _is_reference(ensemble, mean) and f"REF_{name}" not in keys
    aside = {name} if is_reference else set()
    if name in all_properties and frames and (is_reference or name not in keys):
        for key in keys.intersection(all_properties) - {name}:
            predicted = any(f"{key}{suffix}" in keys for suffix in (*MEMBERS, *ERROR_BARS))
            if f"REF_{key}" not in keys and (is_reference or not predicted):
                aside.add(key)
    return aside


def _is_reference(ensemble: Ensemble, mean: Float64Array) -> bool:
    """Whether what stands under the name of the target is not a prediction of the members.

    A value with an error bar beside it is an earlier prediction, and so is the mean of the members.
    """
    if ensemble.beside is None or ensemble.has_bars:
        return False
    found = False
    for center in (mean, ensemble.mean):
        known = np.isfinite(ensemble.beside) & np.isfinite(center) & np.isfinite(ensemble.std)
        if known.any():
            found = True
            distance = np.median(np.abs(ensemble.beside - center)[known])
            rounding = 1e-9 * np.median(np.abs(center[known]))
            if distance <= _THE_SAME * np.median(ensemble.std[known]) + rounding:
                return False
    return found


# --- what is written ---


def _entries(
    ensemble: Ensemble, stored: Container[str], found: CalibratedValues
) -> dict[str, Float64Array]:
    """Return what is to be stored, by key, a row for each structure or atom, in its old shape.

    Error bars that are `stored` under another key would contradict the new ones: they become new.
    """
    name, shape = ensemble.target, (-1, *ensemble.shape)
    std = found.std.reshape(shape)
    entries = {name: found.mean.reshape(shape), f"{name}_uncertainty": std}
    for suffix in ERROR_BARS:
        if f"{name}{suffix}" in stored:
            entries[f"{name}{suffix}"] = std**2 if suffix in VARIANCES else std
    if found.members is not None:
        assert ensemble.layout is not None
        entries[ensemble.key] = ensemble.layout.stored(found.members)
    return entries


def changed_columns(
    source: Table, ensemble: Ensemble, found: CalibratedValues, aside: Collection[str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the columns of a table that are new or have new values, and those that are no more.

    Parameters
    ----------
    source : Table
        The columns as they are.
    ensemble : Ensemble
        What was read of them.
    found : CalibratedValues
    aside : collection of str
        Keys that are to be kept under another name.
    """
    known, without = dict(ensemble.columns), set[str]()
    changes = {f"REF_{n}": source[n] for key in aside for n in known.get(key, (key,))}
    endings = _endings(ensemble)
    if ensemble.members is not None:
        old = known.get(ensemble.key, (ensemble.key,))
        # Numbered members of vectors take the names of numbered components.
        clash = not {f"{ensemble.target}{ending}" for ending in endings}.isdisjoint(old)
        if clash:
            endings = component_endings(ensemble.n_components)
        if found.members is None or (clash and not endings):
            without.update(old)
            known.pop(ensemble.key, None)
    for key, values in _entries(ensemble, {*source, *known}, found).items():
        flat = values.reshape(len(values), -1)
        names = known.get(key, tuple(f"{key}{ending}" for ending in endings))
        if key not in source and values.ndim > 1 and len(names) == flat.shape[1]:
            changes |= {column: flat[:, i] for i, column in enumerate(names)}
        else:
            changes[key] = values
    return changes, without


def _endings(ensemble: Ensemble) -> tuple[str, ...]:
    """Return how the components of values are called here, after the key; nothing if by no name."""
    members = (ensemble.key, f"{ensemble.target}_absent")
    stem = next((key for key in ensemble.columns if key not in members), "")
    return tuple(name.removeprefix(stem) for name in ensemble.columns.get(stem, ()))


def store(
    atoms: Atoms, ensemble: Ensemble, found: CalibratedValues, aside: Collection[str]
) -> None:
    """Put calibrated values into a structure, in the place of those that it came with.

    Parameters
    ----------
    atoms : Atoms
    ensemble : Ensemble
        What was read of all structures.
    found : CalibratedValues
        Of this one.
    aside : collection of str
        Keys that are to be kept under another name.
    """
    # Keys that ASE knows were read into a calculator; they belong back into the file.
    atoms.info, arrays = with_results(atoms)
    atoms.arrays.update(arrays)
    atoms.calc = None
    for place in (atoms.info, atoms.arrays):
        for key in aside:
            if key in place:
                place[f"REF_{key}"] = place.pop(key)
    place = atoms.arrays if ensemble.per_atom else atoms.info
    if found.members is None and ensemble.members is not None:
        place.pop(ensemble.key, None)
    for key, rows in _entries(ensemble, place, found).items():
        place[key] = rows if ensemble.per_atom else rows[0]
    for key in _MATRICES:
        if key in atoms.info:
            atoms.info[key] = _matrix(atoms.info[key])


def _matrix(value: Any) -> Any:
    """Return a tensor as (3, 3): ASE reads nine numbers as a matrix, and no others at all."""
    numbers = np.asarray(value)
    if numbers.shape == (6,):
        return voigt_6_to_full_3x3_stress(numbers)  # type: ignore[no-untyped-call]
    return numbers.reshape(3, 3) if numbers.shape == (9,) else value
