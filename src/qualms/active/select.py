"""Choosing structures to label: a batch, each given the labels and the choices before it.

What a label teaches depends on where it is, not on its value: adding the rows of a structure to the
posterior changes its covariance in closed form (`qualms.gp.sparse_gp.observed_rows`), without a
label and without another training. The calibrated variance of a structure falls in proportion to
its posterior variance.

The posterior is exact for models that are spanned by environments; a choice then teaches its
energy, and its forces and stress if the model learns them. Other models have members that were
drawn from their posterior. These are too few to hold what all forces on a structure say: choices
teach energies alone.

All of this takes the kernel for right. Errors fall less with further labels than the variance of
the posterior does: of two choices it says which is better, not what the error will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.data import covalent_radii

from qualms.arrays import BoolArray, Float64Array, IntArray, check_integer, check_number
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import fill_rows, kernel_terms
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.model import AtomisticModel, structures_of
from qualms.atomistic.predictions import Request, StructurePrediction
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.structures import check_structures, fingerprints, symbols_of
from qualms.errors import InputError, counted, unknown_choice, warn
from qualms.features.densities import find_neighbours
from qualms.gp.sparse_gp import observed_covariances, observed_rows
from qualms.resources import limited

#: Structures, or the path of a file that has them.
_Structures = Iterable[Atoms] | str | PathLike[str]

STRATEGIES = ("variance", "target", "random")
#: Atoms closer than this share of the sum of their covalent radii clash.
MIN_DISTANCE = 0.5
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
        Calibrated standard deviation of each, given the choices before it: of the target, per atom
        if it is extensive.
    left_out : dict of int to str
        Why structures of the pool were no candidates.
    """

    frames: list[Atoms]
    indices: IntArray
    std: Float64Array
    left_out: dict[int, str]


class _Candidates(NamedTuple):
    """What is known of structures: rows of the posterior, and calibrated variances."""

    rows: Float64Array  #: (N, D)
    variance: Float64Array  #: (N,): σ², per atom if extensive
    novelty: Float64Array  #: (N,)

    @property
    def scale(self) -> Float64Array:
        """Calibrated variance in units of the posterior variance."""
        v: Float64Array = np.einsum("ij,ij->i", self.rows, self.rows)
        return np.divide(self.variance, v, out=np.zeros_like(v), where=v > 0)


def select(
    model: AtomisticModel,
    pool: _Structures,
    n: int,
    *,
    strategy: str = "variance",
    targets: _Structures | None = None,
    labelled: _Structures = (),
    min_gap: int = 0,
    max_novelty: float | None = None,
    seed: int = 0,
) -> Selection:
    """Choose structures whose labels improve a model.

    Left out are structures with elements that the model does not know, that cannot be used (NaN,
    atoms at the same place), whose atoms clash (closer than half of the sum of their covalent
    radii), and those that repeat a labelled structure or one before them.

    Parameters
    ----------
    model : AtomisticModel
        Of a property of structures.
    pool : iterable of Atoms, or path
        Structures without labels.
    n : int
        Number of structures to choose.
    strategy : {"variance", "target", "random"}
        The largest calibrated variance; the largest reduction of the mean variance of the
        `targets`; or at random, for comparison and for tests.
    targets : iterable of Atoms, or path, optional
        Structures that the model will be used for.
    labelled : iterable of Atoms, or path
        Structures that have labels.
    min_gap : int
        Least difference between the numbers of two choices: consecutive frames of a trajectory are
        similar.
    max_novelty : float, optional
        Structures with a larger novelty are unphysical, and left out.
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
    _check(model.fitted, n, strategy, targets)
    gap, seed = check_integer("min_gap", min_gap, 0), check_integer("seed", seed, 0)
    if max_novelty is not None:
        check_number("max_novelty", max_novelty, 0, strict=True)
    aimed = None if targets is None else _predicted(targets, model.fitted)
    frames = list(structures_of(pool, "pool"))
    left_out = _unusable(frames, model.fitted, _labelled(labelled))
    usable = np.array([i for i in range(len(frames)) if i not in left_out], dtype=np.intp)
    if not len(usable):
        raise InputError(_none_left(frames, left_out), parameter="pool")
    candidates = _candidates(model, [frames[i] for i in usable], usable.tolist())
    if max_novelty is not None:
        for i, novelty in zip(usable.tolist(), candidates.novelty.tolist(), strict=True):
            if novelty > max_novelty:
                left_out[i] = f"has a novelty of {novelty:.3g}"
        some = candidates.novelty <= max_novelty
        if not some.any():
            raise InputError(_none_left(frames, left_out), parameter="max_novelty")
        usable, candidates = usable[some], _Candidates(*(values[some] for values in candidates))
    aims = None if aimed is None else _candidates(model, aimed)
    state = _State(candidates, aims, model.fitted.record.quantities[TARGET].noise ** 2)
    order = np.random.default_rng(seed).permutation(len(usable)).astype(np.float64)
    ranks: dict[str, Callable[[], Float64Array]] = {
        "variance": lambda: state.variance_left,
        "target": lambda: state.gains,
        "random": lambda: order,
    }
    chosen: list[int] = []
    stds: list[float] = []
    available: BoolArray = np.ones(len(usable), dtype=bool)
    while len(chosen) < n and available.any():
        with limited(model.threads):
            scores = np.where(available, ranks[strategy](), -np.inf)
            # Of equal ones, such as rotated copies, the first: rounding does not decide.
            best = int(np.argmax(scores >= (1 - _TIE) * scores.max()))
            chosen.append(best)
            stds.append(float(np.sqrt(state.scale[best])) * float(np.linalg.norm(state.rows[best])))
            available &= np.abs(usable - usable[best]) > gap
            available[best] = False
            state.observe(_observations(model.fitted, frames[usable[best]], state, best))
    if len(chosen) < n:
        reason = f", {gap} frames apart" if gap else ""
        warn(f"Only {counted(len(chosen), 'structure')} of {n} can be chosen{reason}.")
    indices = usable[chosen]
    return Selection([frames[i] for i in indices], indices, np.array(stds), left_out)


class _State:
    """Candidates, and structures that the model is for, given the choices so far."""

    def __init__(self, candidates: _Candidates, aims: _Candidates | None, noise: float) -> None:
        self.rows, self.scale, self.noise = candidates.rows, candidates.scale, noise
        #: (D, D): what the choices so far do to rows of the posterior
        self.history = np.eye(self.rows.shape[1])
        #: (k, D): the mean calibrated variance of the aims is the sum of its squares; k ≤ D
        self.aims = np.empty((0, self.rows.shape[1]))
        if aims is not None:
            weighted = np.sqrt(aims.scale / len(aims.rows))[:, None] * aims.rows
            is_tall = len(weighted) > weighted.shape[1]
            self.aims = np.asarray(np.linalg.qr(weighted, mode="r")) if is_tall else weighted
        #: (N, k): of candidates and aims
        self.covariances = self.rows @ self.aims.T

    @property
    def variance_left(self) -> Float64Array:
        """Calibrated variance of each candidate: (N,)."""
        return np.asarray(self.scale * np.einsum("ij,ij->i", self.rows, self.rows))

    @property
    def gains(self) -> Float64Array:
        """By how much the energy of each candidate lowers the mean variance of the aims: (N,)."""
        squares = np.einsum("ij,ij->i", self.covariances, self.covariances)
        v: Float64Array = np.einsum("ij,ij->i", self.rows, self.rows) + self.noise
        return np.asarray(squares / v)

    def observe(self, V: Float64Array) -> None:
        """Add observations V (m, D), relative to their noise."""
        self.covariances = observed_covariances(self.covariances, self.rows, self.aims, V)
        self.rows, self.aims = observed_rows(self.rows, V), observed_rows(self.aims, V)
        self.history = observed_rows(self.history, V)


def _observations(fitted: Fitted, atoms: Atoms, state: _State, best: int) -> Float64Array:
    """Return the rows of the labels that a structure will have, relative to their noise: (m, D)."""
    noise = {name: of.noise for name, of in fitted.record.quantities.items()}
    energy = state.rows[best : best + 1] / noise[TARGET]
    if fitted.pp_variance is None:
        return energy
    # A row for each component that is a number: here, that of its noise.
    sigma_stress = noise.get("stress", np.nan) if atoms.cell.rank == 3 else np.nan
    forces = np.full((len(atoms), 3), noise.get("forces", np.nan))
    labels = ForceLabels([forces], np.full((1, 6), sigma_stress))
    if not len(labels.y):
        return energy
    K = np.zeros((1 + len(labels.y), len(fitted.representatives)))
    terms = kernel_terms(fitted.representation, fitted.representatives)
    fill_rows(K[:1], K[1:], [atoms], labels, terms)
    others = fitted.pp_variance.rows(K[1:] * fitted.kernel_scale) @ state.history
    return np.concatenate([energy, others / labels.y[:, None]])


def _candidates(
    model: AtomisticModel, frames: Sequence[Atoms], numbers: Sequence[int] | None = None
) -> _Candidates:
    """Return rows of the posterior and calibrated variances of structures with these numbers."""
    request, parts = Request(rows=True, learned=True), []
    for batch in model.stream(frames, request, numbers=numbers):
        sizes = np.ones(len(batch))
        if model.settings.kind == "extensive":
            sizes = np.array([len(atoms) for atoms in batch.parts.frames], dtype=np.float64)
        variance = (batch.energy.std / sizes) ** 2
        parts.append((_rows(model.fitted, batch, sizes), variance, batch.novelty))
    return _Candidates(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rows(fitted: Fitted, batch: StructurePrediction, sizes: Float64Array) -> Float64Array:
    """Return rows of the posterior: exact ones, or the deviations of members drawn from it."""
    if batch.parts.rows is not None:
        return batch.parts.rows
    first = fitted.settings.n_subsampled if fitted.settings.n_drawn > 1 else 0
    members = batch.energy.uncalibrated.members[:, first:] / sizes[:, None]
    deviations = members - members.mean(axis=1, keepdims=True)
    return np.asarray(deviations / np.sqrt(members.shape[1] - 1))


# --- which structures are candidates ---


def _unusable(frames: Sequence[Atoms], fitted: Fitted, labelled: Sequence[Atoms]) -> dict[int, str]:
    """Return why structures are no candidates, by their number in the pool."""
    reasons: dict[int, str] = {}
    seen = dict.fromkeys(fingerprints(labelled), "is labelled")
    for i, atoms in enumerate(frames):
        if reason := not_predicted(atoms, fitted):
            reasons[i] = reason
            continue
        (print_,) = fingerprints([atoms])
        if print_ in seen:
            reasons[i] = seen[print_]
        elif reason := clash(atoms):
            reasons[i] = reason
        seen.setdefault(print_, f"is the same as structure {i}")
    return reasons


def not_predicted(atoms: Atoms, fitted: Fitted) -> str:
    """Return why the model cannot predict a structure, if it cannot."""
    try:
        check_structures([atoms])
    except InputError as error:
        return str(error).removeprefix("Structure 0 ").rstrip(".")
    if others := {*atoms.numbers.tolist()} - {*fitted.representation.species}:
        return f"contains {symbols_of(sorted(others))}, which the model does not know"
    try:
        fitted.baseline.check_compositions([atoms])
    except InputError:
        return f"is {atoms.symbols}, a composition without a baseline"
    return ""


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


def clash(atoms: Atoms) -> str:
    """Return which atoms are much closer than a bond, if some are."""
    radii = covalent_radii[atoms.numbers]
    pairs = find_neighbours(atoms, 2 * MIN_DISTANCE * float(radii.max()))
    vectors = atoms.positions[pairs.j] - atoms.positions[pairs.i]
    lengths = np.linalg.norm(vectors + pairs.shifts @ np.asarray(atoms.cell), axis=1)
    shares = lengths / (radii[pairs.i] + radii[pairs.j])
    if not len(shares) or shares.min() >= MIN_DISTANCE:
        return ""
    k = int(shares.argmin())
    i, j = int(pairs.i[k]), int(pairs.j[k])
    return (
        f"has atoms {i} ({atoms.symbols[i]}) and {j} ({atoms.symbols[j]}) {lengths[k]:.2f} Å apart"
    )


def _none_left(frames: Sequence[Atoms], left_out: dict[int, str]) -> str:
    if not frames:
        return "The `pool` has no structures."
    i, reason = next(iter(left_out.items()))
    return (
        f"None of {counted(len(frames), 'structure')} of the `pool` can be chosen: structure {i} "
        f"{reason}."
    )


def _check(fitted: Fitted, n: int, strategy: str, targets: object) -> None:
    """Reject parameters that do not fit the model or each other."""
    if fitted.per_atom:
        raise InputError(
            "The model predicts a property of atoms; structures are chosen by a property of "
            "structures.",
            parameter="model",
        )
    if strategy not in STRATEGIES:
        raise unknown_choice("strategy", strategy, STRATEGIES)
    if (strategy == "target") != (targets is not None):
        raise InputError(
            '`strategy="target"` needs `targets`, structures that the model will be used for, and '
            "the others have none.",
            parameter="targets",
        )
    check_integer("n", n, 1)
