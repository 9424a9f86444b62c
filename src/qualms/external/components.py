"""In which order the members of vectors and tensors are stored.

A row of R members of k components is R·k numbers: member by member, m0x m0y m0z m1x …, or component
by component, m0x m1x … m0y m1y …. Arrays (n, R, k) and (n, k, R) tell which by their shape, unless
R = k; flat columns do not. Then both readings are compared with what is known of the same rows, the
mean or the truth: with the right one Σ_c y_c m̄_c is larger. The sum of all squares is the same in
both, so that is as if asked in which of them all members are closer to y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr

from qualms.core.typing import Float64Array
from qualms.errors import InputError

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
