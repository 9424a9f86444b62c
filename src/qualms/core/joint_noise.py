"""A noise variance for each of several kinds of observations: energies, forces and virials.

What is learned from all kinds, given their variances, and how good it is, says
`qualms.core.joint_scores`; here variances are looked for that make it best.

They are looked for in units of the usual square of a target, that is, of the median over
groups: a mean would be that of the few largest. They may be up to ten times the mean square, at
which a kind counts for nothing, as it should where one wrong label has made the others useless. The
marginal likelihood is one of Gaussians, for which a single group far from all others is reason
enough to call everything noise. It may do so up to three times the usual square, which is more than
labels have that are nothing but noise; where it wants more, a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from qualms.core.joint_scores import Observations, evidence, group_means, left_out_error
from qualms.core.typing import BoolArray, Float64Array, FloatArray, IntArray
from qualms.errors import InputError, NumericalError, QualmsWarning

#: Decades that are tried, relative to the usual square of the targets: first guess and lower limit.
_START, _LOWEST = (-4.0, -3.0, -3.0), -12.0
#: Upper limits: relative to the mean square, and to the usual one for the marginal likelihood.
_HIGHEST, _HIGHEST_OF_EVIDENCE = 1.0, 0.5
#: Steps in decades of the search.
_STEPS = (1.0, 0.5, 0.25)
#: What a step must gain for each decade: one per cent of the errors of one kind. Where the score is
#: flat, it would otherwise walk far for nothing.
_GAIN = 0.01


@dataclass(frozen=True)
class JointNoise:
    """Noise variances of all kinds, and how good they are.

    Attributes
    ----------
    energies, forces : float
        σ_E² and σ_F², in the units of the targets squared.
    score : float
        What was minimised; 0 if there was nothing to choose.
    n_tried : int
        Sets of variances that were tried.
    virials : float, optional
        σ_V², likewise; None if there are no virials.
    """

    energies: float
    forces: float
    score: float
    n_tried: int
    virials: float | None = None

    @property
    def ratio(self) -> float:
        """ρ_F = σ_E²/σ_F²: the weight of a force, if that of an energy is one."""
        return self.energies / self.forces

    @property
    def virial_ratio(self) -> float:
        """ρ_V = σ_E²/σ_V²: that of a virial."""
        return self.ratio if self.virials is None else self.energies / self.virials

    def times(self, factor: float) -> JointNoise:
        """Return all variances times a factor, which leaves the ratios as they are."""
        virials = None if self.virials is None else factor * self.virials
        return replace(
            self, energies=factor * self.energies, forces=factor * self.forces, virials=virials
        )


def select_joint_noise(
    Phi: FloatArray,
    y: Float64Array,
    kind: IntArray | BoolArray,
    groups: IntArray,
    *,
    prior: float,
    weight: Float64Array | None = None,
    criterion: str = "loo",
    energies: float | None = None,
    forces: float | None = None,
    virials: float | None = None,
) -> JointNoise:
    """Choose σ_E², σ_F² and, if there are virials, σ_V².

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features.
    y : (N,) array
        Targets, of zero mean in the prior.
    kind : (N,) array of int or bool
        Kind of each row: 0 for energies, 1 for forces, 2 for virials.
    groups : (N,) array of int
        Rows that are left out together.
    prior : float
        s², in the units of the energies squared.
    weight : (N,) array, optional
        Positive; the noise of a row is that of its kind divided by its weight.
    criterion : {"loo", "evidence"}
        Errors of groups left out, or the log marginal likelihood.
    energies, forces, virials : float, optional
        A variance that is known.

    Returns
    -------
    JointNoise
    """
    if criterion not in ("loo", "evidence"):
        raise InputError("criterion", repr(criterion), '"loo" or "evidence"')
    n_kinds = 3 if np.any(kind == 2) else 2
    given = (energies, forces, virials)[:n_kinds]
    kinds = tuple(np.flatnonzero(kind == k) for k in range(n_kinds))
    if all(value is not None for value in given):
        return _joint_noise([value or 0.0 for value in given], 0.0, 0)
    root = np.ones(len(y)) if weight is None else np.sqrt(weight)
    units = tuple(_usual_square(root[rows] * y[rows], groups[rows]) for rows in kinds)
    make_score = evidence if criterion == "evidence" else left_out_error
    score = make_score(Observations(Phi, y, root, kinds, groups), prior)
    fixed = [
        None if value is None else float(np.log10(value / unit))
        for value, unit in zip(given, units, strict=True)
    ]
    # Of what there is nothing, nothing can be found out.
    fixed = [_START[k] if not len(rows) else fixed[k] for k, rows in enumerate(kinds)]

    def of_decades(decades: Sequence[float]) -> float:
        try:
            return score(*(unit * 10**d for unit, d in zip(units, decades, strict=True)))
        except NumericalError:  # so little noise that it is lost in rounding
            return np.inf

    pairs = zip(kinds, units, strict=True)
    beyond = np.array([_decades_beyond(root[rows] * y[rows], unit) for rows, unit in pairs])
    by_evidence = criterion == "evidence"
    highest = np.full(n_kinds, _HIGHEST_OF_EVIDENCE) if by_evidence else _HIGHEST + beyond
    # Where the usual square and the mean square differ much, either may be the better guess.
    guess = np.array(_START[:n_kinds])
    starts = [np.minimum(guess + shift, highest) for shift in (0.0, beyond)]
    best, least, n_tried = _pattern_search(of_decades, starts, fixed, highest)
    found = [unit * 10**d for unit, d in zip(units, best, strict=True)]
    if by_evidence:
        _warn_of_edge(best, fixed)
    return _joint_noise(found, least, n_tried)


def _joint_noise(variances: Sequence[float], score: float, n_tried: int) -> JointNoise:
    energies, forces, *virials = variances
    return JointNoise(energies, forces, score, n_tried, virials[0] if virials else None)


def _decades_beyond(y: Float64Array, unit: float) -> float:
    """Return by how many decades the mean square is larger than the usual one, if it is."""
    return max(float(np.log10(np.mean(y**2) / unit)), 0.0) if np.any(y) else 0.0


def _warn_of_edge(decades: Sequence[float], fixed: Sequence[float | None]) -> None:
    """Tell of noises that the marginal likelihood would have liked to be even larger."""
    names = ("energies", "forces", "virials")
    pairs = zip(names, decades, fixed, strict=False)
    largest = [name for name, d, f in pairs if f is None and d >= _HIGHEST_OF_EVIDENCE]
    if largest:
        warnings.warn(
            f"By the marginal likelihood the noise of {' and '.join(largest)} is larger than they "
            "usually are themselves, so that little is learned from them. A few structures far "
            "from all others make it so: look at their labels, or choose noises by the errors of "
            "what is left out ('loo').",
            QualmsWarning,
            stacklevel=7,
        )


def _usual_square(y: Float64Array, groups: IntArray) -> float:
    """Return the median over groups of the mean square about the median of all.

    Energies less their mean are all as large as what a few of them made of the mean. Groups without
    any deviation, such as crystals whose forces are zero by symmetry, do not count.
    """
    squares = group_means((y - np.median(y)) ** 2, groups) if len(y) else y
    squares = squares[squares > 0]
    return float(np.median(squares)) if len(squares) else 1.0


def _pattern_search(
    score: Callable[[Sequence[float]], float],
    starts: Sequence[Float64Array],
    fixed: Sequence[float | None],
    highest: Float64Array,
) -> tuple[tuple[float, ...], float, int]:
    """Walk downhill from the best start on a grid that becomes finer; what is fixed stays.

    With three of them the valley is long where all change alike, which leaves the weights of the
    kinds as they are and changes the prior alone: so that is a step, too.
    """
    first = [
        tuple(float(d) if f is None else f for d, f in zip(start, fixed, strict=True))
        for start in starts
    ]
    known = {where: score(where) for where in dict.fromkeys(first)}
    best = min(known, key=known.__getitem__)
    free = [i for i, value in enumerate(fixed) if value is None]
    moves = [np.eye(len(best))[i] for i in free]
    if len(free) > 2:
        moves.append(np.sum(moves, axis=0))
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for move, sign in product(moves, (-1, 1)):
                trial = np.where(move, np.clip(best + sign * step * move, _LOWEST, highest), best)
                where = tuple(trial.tolist())
                if where not in known:
                    known[where] = score(where)
                if known[where] < known[best] - _GAIN * step:
                    best, moved = where, True
    return best, known[best], len(known)
