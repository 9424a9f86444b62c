"""Choosing structures to label: a batch, each given the labels and the choices before it.

What a label teaches depends on where it is, not on its value. Let B be the rows of the candidates
in the posterior (`qualms.active.posterior`), so that BBᵀ is their covariance, and V those of all
labels that a choice will have, relative to their noise: its energy, and its forces and stress if
the model learns them. Afterwards the covariance is

    B (1 + VᵀV)⁻¹ Bᵀ,

and the calibrated variance σ² of a candidate falls in proportion to its posterior variance. Nothing
is trained, and the choices are those of a posterior that is computed again after each.

All of this takes the kernel for right. Errors fall less with further labels than the variance of
the posterior does: of two choices it says which is better, not quite what the error will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from ase import Atoms
from scipy.stats import chi2

from qualms.active.candidates import Candidates, read_candidates
from qualms.active.posterior import make_posterior, read_rows
from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray, check_integer, check_number
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.model import AtomisticModel, structures_of
from qualms.atomistic.predictions import not_predicted
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.structures import FrameFiles, file_of, readable, symbols_of
from qualms.errors import InputError, counted, unknown_choice, warn
from qualms.gp.sparse_gp import Observations
from qualms.resources import default_threads, limited

#: Structures, or the path of a file that has them.
_Structures = Iterable[Atoms] | str | PathLike[str]

STRATEGIES = ("variance", "target", "farthest", "random")
#: Relative difference of scores that are equal up to rounding.
_TIE = 1e-9


@dataclass(frozen=True)
class Selection:
    """Structures to label, in the order of their choice.

    Attributes
    ----------
    frames : list of Atoms
    indices : (n,) array of int
        Numbers of these structures in the pool.
    std : (n,) array
        Expected error of each, given the choices before it: the calibrated standard deviation of
        the components of its forces, if the model learned them, along one random displacement of
        its atoms; otherwise that of the target, per atom if it is extensive. NaN without a model.
    gain : (n,) array
        By how much each lowers the `curve`. Without a model, its distance in the space of features
        from the structures before it.
    reasons : list of str
        Why each was chosen.
    left_out : dict of int to str
        Why structures of the pool were no candidates.
    curve : (n + 1, 3) array, optional
        Expected root mean square error of the pool, or of the targets, after 0, 1, … choices, and
        the limits of its band of 68 %. None without a model.
    quantity : str
        "forces" or "energy", whose errors these are; an empty text without a model.
    """

    frames: list[Atoms]
    indices: IntArray
    std: Float64Array
    gain: Float64Array
    reasons: list[str]
    left_out: dict[int, str]
    curve: Float64Array | None
    quantity: str


def select(
    model: AtomisticModel | None,
    pool: _Structures,
    n: int | None = None,
    *,
    strategy: str = "variance",
    targets: _Structures | None = None,
    labelled: _Structures = (),
    until: float | None = None,
    cost: str | Sequence[float] | None = None,
    per_element: int = 0,
    groups: str | Sequence[object] | None = None,
    min_gap: int = 0,
    max_std: float | None = None,
    max_novelty: float | None = None,
    representation: Any = None,
    seed: int = 0,
) -> Selection:
    """Choose structures whose labels improve a model.

    Left out are structures with elements that the model does not know, that cannot be used (NaN,
    atoms at the same place), whose atoms clash (closer than half of the sum of their covalent
    radii), and those that repeat, or nearly repeat, a labelled structure or one before them.

    Parameters
    ----------
    model : AtomisticModel or None
        Of a property of structures. None: ``strategy="farthest"`` or ``"random"``, by features.
    pool : iterable of Atoms, or path
        Structures without labels; those of a file, or of a sequence such as
        `qualms.atomistic.FrameFiles`, are read one by one, and the choices once more.
    n : int, optional
        Number of structures to choose, at most if there is `until`.
    strategy : {"variance", "target", "farthest", "random"}
        The largest calibrated variance; the largest reduction of the mean variance of the
        `targets`; the largest distance, in the space of features, from all that are labelled or
        chosen; or at random, for comparison and for tests.
    targets : iterable of Atoms, or path, optional
        Structures that the model will be used for.
    labelled : iterable of Atoms, or path
        Structures that have labels. Needed if the model does not store its posterior: it is spanned
        by labels, as models of forces from few labels are, or was trained with ``keep_pp=False``.
    until : float, optional
        Choose until no expected error of a candidate, as in `Selection.std`, exceeds this: in eV/Å
        (units of energy per Å) if the model learned forces, and otherwise in the units of the
        target, per atom if it is extensive.
    cost : str or sequence of float, optional
        What a label costs: "atoms^3", a key of ``atoms.info``, or a number for each structure of
        the pool. The choice is then that of the largest variance, or reduction, per cost.
    per_element : int
        At least so many choices contain each element that candidates have.
    groups : str or sequence, optional
        A label for each structure of the pool, or its key in ``atoms.info``: of structures with the
        same, such as conformers of a molecule, one is chosen at most.
    min_gap : int
        Least difference between the numbers of two choices: consecutive frames of a trajectory are
        similar.
    max_std, max_novelty : float, optional
        Structures with a larger expected error, in the units of `until`, or novelty are unphysical,
        and left out.
    representation : str or dict, optional
        Features, if there is no model: see `AtomisticModel`. Chosen by the elements by default.
    seed : int
        Of the random strategy.

    Examples
    --------
    >>> from qualms import AtomisticModel
    >>> from qualms.active import select
    >>> from qualms.data import qm9
    >>> molecules = qm9(n=300)
    >>> model = AtomisticModel("atomization_energy", n_representatives=100, units="eV")
    >>> chosen = select(model.fit(molecules[:100]), molecules[100:], 10)
    >>> len(chosen.frames), chosen.indices.shape
    (10, (10,))
    """
    forces = _check(model, n, strategy, targets, representation, until, max_std, max_novelty, cost)
    gap, seed = check_integer("min_gap", min_gap, 0), check_integer("seed", seed, 0)
    floor = check_integer("per_element", per_element, 0)
    frames, known = _sequence(pool), _labelled(labelled)
    for name, values in (("cost", cost), ("groups", groups)):
        if not isinstance(values, str) and values is not None and len(values) != len(frames):
            raise InputError(
                f"`{name}` has {counted(len(values), 'value')}, and the pool "
                f"{counted(len(frames), 'structure')}.",
                parameter=name,
            )
    aims = None if targets is None or model is None else _predicted(targets, model.fitted)
    candidates, left_out, of_labelled = read_candidates(
        frames, known, model, representation=representation, forces=forces, cost=cost, groups=groups
    )
    candidates = _within_limits(candidates, left_out, max_std, max_novelty)
    if not len(candidates.numbers):
        limit = "max_std" if max_std is not None else "pool"
        limit = limit if max_novelty is None else "max_novelty"
        raise InputError(_none_left(frames, left_out), parameter=limit)
    state = None if model is None else _State(model, candidates, known, aims, forces=forces)
    distances = _Distances(candidates.features, of_labelled)
    order = np.random.default_rng(seed).permutation(len(candidates.numbers)) + 1.0
    elements = sorted(frozenset().union(*candidates.elements))
    contains = np.array([[z in each for z in elements] for each in candidates.elements])
    available: BoolArray = np.ones(len(order), dtype=bool)
    chosen: list[int] = []
    picks: list[tuple[float, float, str]] = []
    with limited(default_threads(1) if model is None else model.threads):
        while len(chosen) < (n or len(order)) and available.any():
            if until is not None and state and not np.any(state.stds[available] > until):
                break
            if strategy == "random":
                scores = order
            elif strategy == "farthest" or state is None:
                scores = distances.squares
            else:
                scores = state.gains if strategy == "target" else state.variances
            some, remark = available, ""
            supply = contains[available].sum(axis=0)
            lacking = np.flatnonzero((contains[chosen].sum(axis=0) < floor) & (supply > 0))
            if len(lacking):  # the rarest first: it may be all that is left of it
                rarest = lacking[supply[lacking].argmin()]
                some = available & contains[:, rarest]
                remark = f"; contains {symbols_of([elements[rarest]])}"
            scores = np.where(some, scores / candidates.costs, -np.inf)
            # Of equal ones, such as rotated copies, the first: rounding does not decide.
            best = int(np.argmax(scores >= (1 - _TIE) * scores.max()))
            std = float(state.stds[best]) if state else np.nan
            reason = _reason(strategy, candidates, distances, std, best) + remark
            gain = float(np.sqrt(distances.squares[best]))
            available &= np.abs(candidates.numbers - candidates.numbers[best]) > gap
            if groups is not None:
                mine = candidates.groups[best]
                available &= np.array([group != mine for group in candidates.groups])
            available[best] = False
            distances.add(best)
            if state:
                gain = state.observe(frames[int(candidates.numbers[best])])
            chosen.append(best)
            picks.append((std, gain, reason))
    if until is None and n is not None and len(chosen) < n:
        apart = f", {gap} frames apart" if gap else ""
        apart += ", one of each group" if groups is not None else ""
        warn(f"Only {counted(len(chosen), 'structure')} of {n} can be chosen{apart}.")
    if until is not None and state and len(chosen) < len(order):
        largest = float(np.delete(state.stds, chosen).max())
        if largest > until:
            warn(f"`until={until:g}` is not reached: an expected error of {largest:.3g} is left.")
    indices = candidates.numbers[chosen]
    return Selection(
        [frames[int(i)] for i in indices],
        indices,
        np.array([std for std, _, _ in picks]),
        np.array([gain for _, gain, _ in picks]),
        [reason for _, _, reason in picks],
        dict(sorted(left_out.items())),
        np.array(state.curve) if state else None,
        "" if model is None else "forces" if forces else "energy",
    )


class _State:
    """Variances of candidates, and of the structures that the model is for, after the choices."""

    def __init__(
        self,
        model: AtomisticModel,
        candidates: Candidates,
        labelled: Sequence[Atoms],
        aims: Sequence[Atoms] | None,
        *,
        forces: bool,
    ) -> None:
        assert candidates.rows is not None
        known = [atoms for atoms in labelled if not not_predicted(atoms, model.fitted)]
        self.posterior = make_posterior(model, known, candidates.rows)
        #: (N, r): rows whose squares are the calibrated variances, before any choice
        self.rows, noise_scale = self.posterior.calibrated_rows(candidates.rows)
        #: (N,): calibrated variances that are left
        self.variances: Float64Array = np.einsum("ij,ij->i", self.rows, self.rows)
        #: (r, r): what the choices so far do to rows
        self.history = np.eye(self.rows.shape[1])
        record = model.fitted.record.quantities["forces" if forces else TARGET]
        self.noise: Float64Array = record.noise**2 * noise_scale
        self.n_calibrated = record.n_out_of_bag_structures
        rows = self.rows
        if aims is not None:
            read = read_rows(model, enumerate(aims), forces=forces)
            assert read is not None
            rows, _ = self.posterior.calibrated_rows(read)
        # The mean variance is the sum of squares of these rows; k ≤ r.
        weighted = rows / np.sqrt(len(rows))
        is_tall = len(weighted) > weighted.shape[1]
        self.aims = np.asarray(np.linalg.qr(weighted, mode="r")) if is_tall else weighted
        #: (N, k): of candidates and aims, if these were given
        self.covariances = None if aims is None else self.rows @ self.aims.T
        self.of_aims = self.aims @ self.aims.T
        self.curve = [self._expected()]

    @property
    def stds(self) -> Float64Array:
        """Expected error of each candidate: (N,)."""
        return np.asarray(np.sqrt(self.variances))

    @property
    def gains(self) -> Float64Array:
        """By how much the row of each candidate lowers the mean variance of the aims: (N,)."""
        assert self.covariances is not None
        squares = np.einsum("ij,ij->i", self.covariances, self.covariances)
        total = self.variances + self.noise
        return np.asarray(squares / np.where(total > 0, total, 1.0))

    def observe(self, atoms: Atoms) -> float:
        """Add the labels of a structure; return by how much the expected error falls."""
        observed = Observations.of(self.posterior.observed(atoms) @ self.history)
        products = self.rows @ (self.history @ observed.along)
        self.variances = np.maximum(self.variances - observed.reduction(products), 0.0)
        of_aims = self.aims @ observed.along
        if self.covariances is not None:
            self.covariances -= observed.reduction(products, of_aims)
        self.of_aims -= observed.reduction(of_aims, of_aims)
        self.aims, self.history = observed.rows(self.aims), observed.rows(self.history)
        self.curve.append(self._expected())
        return self.curve[-2][0] - self.curve[-1][0]

    def _expected(self) -> tuple[float, float, float]:
        """Return the expected root mean square error of the pool, or of the aims, and its band.

        Errors are correlated: with S the covariance of the rows, the mean square has the mean tr S
        and the variance 2 tr S², as has χ² of ν = (tr S)²/tr S² degrees of freedom. The calibration
        is that of a number of structures n, which leaves 1/ν + 1/n.
        """
        S = self.of_aims
        mean_square = float(np.trace(S))
        if not mean_square > 0:
            return 0.0, 0.0, 0.0
        rmse = np.sqrt(mean_square)
        dof = 1 / (float(np.sum(S**2)) / mean_square**2 + 1 / max(self.n_calibrated, 1))
        low, high = np.sqrt(chi2.ppf([0.16, 0.84], dof) / dof)
        return float(rmse), float(rmse * low), float(rmse * high)


class _Distances:
    """Squared distances of candidates, in the space of features, from all that are there (N,)."""

    def __init__(self, features: FloatArray, others: FloatArray) -> None:
        self.features = features.astype(np.float64)
        self.is_first = not len(others)
        if self.is_first:  # the farthest from the mean
            others = self.features.mean(axis=0, keepdims=True)
        self.squares = np.full(len(features), np.inf)
        for x in others.astype(np.float64):
            self._lower(x)

    def add(self, i: int) -> None:
        """Add a candidate to what is there."""
        if self.is_first:
            self.squares[:], self.is_first = np.inf, False
        self._lower(self.features[i])

    def _lower(self, x: Float64Array) -> None:
        np.minimum(self.squares, np.sum((self.features - x) ** 2, axis=1), out=self.squares)


def _reason(
    strategy: str, candidates: Candidates, distances: _Distances, std: float, i: int
) -> str:
    """Return why a candidate is chosen."""
    if strategy == "random":
        return "at random"
    if strategy == "farthest":
        return f"distance {np.sqrt(distances.squares[i]):.2g} in features"
    per = "" if np.all(candidates.costs == 1) else " per cost"
    text = f"expected error {std:.3g}, the largest{per}"
    if strategy == "target":
        text = f"largest effect on the targets{per}"
    assert candidates.rows is not None
    novelty = candidates.rows.novelty[i]
    return f"{text}; novelty {novelty:.3g}" if novelty > 1 else text


# --- arguments ---


def _sequence(pool: _Structures) -> Sequence[Atoms]:
    """Return structures that can be read twice; those of a file when they are needed."""
    if isinstance(pool, (str, PathLike)) and readable([file_of(pool)]):
        return FrameFiles.open(pool)
    frames = structures_of(pool, "pool")
    return frames if isinstance(frames, Sequence) else list(frames)


def _labelled(labelled: _Structures) -> list[Atoms]:
    """Return structures, whatever their geometry."""
    frames = list(structures_of(labelled, "labelled"))
    for i, atoms in enumerate(frames):
        if not isinstance(atoms, Atoms):
            raise InputError(
                f"Structure {i} of `labelled` is an object of type {type(atoms).__name__}, not "
                "ase.Atoms.",
                parameter="labelled",
            )
    return frames


def _predicted(targets: _Structures, fitted: Fitted) -> list[Atoms]:
    """Return structures, all of which the model can predict."""
    frames = list(structures_of(targets, "targets"))
    if not frames:
        raise InputError("`targets` has no structures.", parameter="targets")
    for i, atoms in enumerate(frames):
        if reason := not_predicted(atoms, fitted):
            raise InputError(f"Structure {i} of `targets` {reason}.", parameter="targets")
    return frames


def _within_limits(
    candidates: Candidates,
    left_out: dict[int, str],
    max_std: float | None,
    max_novelty: float | None,
) -> Candidates:
    """Return candidates without those that are unphysical."""
    if candidates.rows is None or not len(candidates.numbers):
        return candidates
    stays = np.ones(len(candidates.numbers), dtype=bool)
    limits = {
        "an expected error": (np.sqrt(candidates.rows.variance), max_std),
        "a novelty": (candidates.rows.novelty, max_novelty),
    }
    for name, (values, limit) in limits.items():
        if limit is None:
            continue
        for i in np.flatnonzero(stays & (values > limit)).tolist():
            left_out[int(candidates.numbers[i])] = f"has {name} of {values[i]:.3g}"
        stays &= values <= limit
    return candidates.take(stays)


def _none_left(frames: Sequence[Atoms], left_out: dict[int, str]) -> str:
    if not frames:
        return "The `pool` has no structures."
    i, reason = min(left_out.items())
    return (
        f"None of {counted(len(frames), 'structure')} of the `pool` can be chosen: structure {i} "
        f"{reason}."
    )


def _check(
    model: AtomisticModel | None,
    n: int | None,
    strategy: str,
    targets: object,
    representation: object,
    until: float | None,
    max_std: float | None,
    max_novelty: float | None,
    cost: object,
) -> bool:
    """Reject parameters that do not fit together; return whether errors are those of forces."""
    if strategy not in STRATEGIES:
        raise unknown_choice("strategy", strategy, STRATEGIES)
    if (strategy == "target") != (targets is not None):
        raise InputError(
            '`strategy="target"` needs `targets`, structures that the model will be used for, and '
            "the others have none.",
            parameter="targets",
        )
    if n is None and until is None:
        raise InputError(
            "The number of structures `n` is needed, or `until`, the largest expected error.",
            parameter="n",
        )
    if n is not None:
        check_integer("n", n, 1)
    limits = {"until": until, "max_std": max_std, "max_novelty": max_novelty}
    for name, value in limits.items():
        if value is not None:
            check_number(name, value, 0, strict=True)
        if value is not None and model is None:
            raise InputError(f"`{name}` needs a model.", parameter=name)
    if cost is not None and strategy in ("farthest", "random"):
        raise InputError(
            f"`cost` divides the variance or its reduction; strategy {strategy!r} has neither.",
            parameter="cost",
        )
    if model is None:
        if strategy not in ("farthest", "random"):
            raise InputError(
                f"Strategy {strategy!r} needs a `model`; without one: 'farthest', 'random'.",
                parameter="model",
            )
        return False
    if representation is not None:
        raise InputError(
            "The model has a representation; give one of the two.", parameter="representation"
        )
    if model.fitted.per_atom:
        raise InputError(
            "The model predicts a property of atoms; structures are chosen by a property of "
            "structures.",
            parameter="model",
        )
    return "forces" in model.fitted.record.quantities
