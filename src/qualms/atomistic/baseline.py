"""Baselines: what is subtracted from the target before anything is learned.

A baseline is linear in the design matrix X (n, S), whose rows sum to one: the fraction of each
species in a structure or, for labels of atoms, one for the species of the atom and zero elsewhere.
It is fitted to y (n,), the target per atom if that is extensive, else the target itself. So there
is one coefficient per species, in the units of the target, and a constant is the same coefficient
for every species.

Each ensemble member has its own baseline, fitted to its own rows: the uncertainty of the baseline
is then a part of the ensemble standard deviation.

Coefficients that are fitted determine the baseline of compositions in the span of those of the
training set, and of no others: a model of one molecule has no energy of another. Members share the
choice that is made there, so their standard deviation does not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray, distinct_rows
from qualms.atomistic.structures import composition, symbols_of
from qualms.errors import InputError

#: Singular values below this, relative to the largest, are rounding. Species that always come in
#: the same ratio leave about 1e-15; one molecule with a rare species among a million leaves about
#: 1e-5.
RCOND = 1e-9
#: Fractions of species, beside those of the training set, that are rounding.
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Baseline:
    """A linear function of the composition, for the whole model and for each member."""

    name: str  #: "none", "mean", "atoms" or "composition"
    species: tuple[int, ...]  #: atomic numbers, in the order of the columns of the design matrix
    full: Float64Array  #: (S,): coefficients fitted to all rows, in the units of the target
    members: Float64Array  #: (S, N_R): coefficients fitted to the rows of each member
    span: Float64Array  #: (k, S): orthonormal rows that span compositions whose baseline is known

    def is_determined(self, design: Float64Array) -> BoolArray:
        """Return whether the baseline of each row of the design matrix is known: (n,)."""
        outside = design - design @ self.span.T @ self.span
        return np.asarray(np.abs(outside).max(axis=1) <= TOLERANCE)

    def check_compositions(self, frames: Sequence[Atoms], *, first: int = 0) -> None:
        """Reject structures whose baseline is not known; the first has the number `first`."""
        if len(self.span) == len(self.species):
            return
        determined = self.is_determined(structure_design(frames, self.species))
        for i in np.flatnonzero(~determined)[:1]:
            others = f" (and {np.sum(~determined) - 1} others)" if np.sum(~determined) > 1 else ""
            raise InputError(
                f"Structure {first + i}{others} is {frames[i].get_chemical_formula()}; the energy "
                "of this composition is not a combination of those of the training set. Train with "
                "isolated atoms or more compositions, or use `unknown_species='ignore'` to predict "
                "nevertheless.",
                parameter="frames",
            )

    def predict(self, design: Float64Array) -> Float64Array:
        """Return the baseline of each row of the design matrix (n, S): (n,)."""
        return np.asarray(design @ self.full)

    def predict_members(self, design: Float64Array) -> Float64Array:
        """Return the baselines of all members for each row of the design matrix: (n, N_R)."""
        return np.asarray(design @ self.members)


def structure_design(frames: Sequence[Atoms], species: Sequence[int]) -> Float64Array:
    """Return the fraction of each species in each structure: (N, S), rows sum to one."""
    counts = composition(frames, species)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def atom_design(numbers: IntArray, species: Sequence[int]) -> Float64Array:
    """Return one for the species of each atom, zero elsewhere: (n, S), from numbers (n,)."""
    design: Float64Array = (numbers[:, None] == np.asarray(species)).astype(np.float64)
    unseen = np.unique(numbers[design.sum(axis=1) == 0])
    if len(unseen):
        raise InputError(
            f"There are atoms of {symbols_of(unseen.tolist())}; the baseline is one of "
            f"{symbols_of(species)}.",
            parameter="numbers",
        )
    return design


def fit_baseline(
    baseline: str | Mapping[int, float],
    design: Float64Array,
    y: Float64Array,
    *,
    species: Sequence[int],
    kind: str,
    counts: IntArray,
    isolated: Mapping[int, float],
) -> Baseline:
    """Fit a baseline to all rows, and to those of each member.

    Parameters
    ----------
    baseline : {"none", "mean", "atoms", "composition"} or mapping
        Nothing; one constant; the energies of isolated atoms; or least squares. A mapping from
        atomic numbers to energies is "atoms" with these. They are the same for all members.
    design : (n, S) array
        Rows sum to one; see `structure_design` and `atom_design`.
    y : (n,) array
        The target, per atom if it is extensive.
    species : sequence of S int
        Atomic numbers of the columns.
    kind : {"extensive", "intensive", "atomic"}
    counts : (n, N_R) array of int
        How often each row is in each member.
    isolated : mapping from int to float
        The target of isolated atoms, as found in the data, by atomic number.

    Notes
    -----
    Least squares is fitted to the deviations from the mean of y, and if the rows do not determine
    all coefficients, the solution of smallest norm is taken. Then a composition that the rows do
    not determine gets the mean, rather than the zero of the scale of energies, which may be far.
    """
    weights = np.column_stack([np.ones(len(y)), counts])
    span = np.eye(len(species))
    if isinstance(baseline, Mapping) or baseline == "atoms":
        fixed = _atoms(baseline, species, kind, isolated)
        fitted = np.repeat(fixed[:, None], weights.shape[1], axis=1)
    elif baseline == "none":
        fitted = np.zeros((len(species), weights.shape[1]))
    elif baseline == "mean":
        fitted = np.tile(_means(y, weights), (len(species), 1))
    else:
        fitted, span = _least_squares(design, y, weights), row_space(design)
    name = baseline if isinstance(baseline, str) else "atoms"
    return Baseline(name, tuple(species), fitted[:, 0].copy(), fitted[:, 1:].copy(), span)


def anchors(design: Float64Array) -> IntArray:
    """Return few rows that span all compositions, to be put into members that lack an element.

    A member without fluorine cannot determine the coefficient of fluorine, and would be off by as
    much as the energies of elements differ. The rows are the pivots of a QR factorisation of Xᵀ
    with column pivoting: each row in turn is the farthest from the span of the rows before it, so
    that rare species are represented by the structure that is richest in them.
    """
    R, pivots = scipy.linalg.qr(design.T, mode="r", pivoting=True, check_finite=False)
    diagonal = np.abs(np.diag(R))
    rank = int(np.count_nonzero(diagonal > RCOND * diagonal[0]))
    return np.sort(pivots[:rank]).astype(np.intp)


def spans(design: Float64Array, counts: IntArray) -> BoolArray:
    """Return whether the rows of each member determine what all rows determine: (N_R,)."""
    rows = distinct_rows(design)
    X = design[rows.first]
    full = len(row_space(X))
    present = [np.bincount(rows.inverse, weights=c, minlength=len(X)) > 0 for c in counts.T]
    return np.asarray([len(row_space(X[p])) == full for p in present], dtype=np.bool_)


def row_space(design: Float64Array) -> Float64Array:
    """Return orthonormal rows (k, S) that span the rows of a design matrix (n, S)."""
    X = design[distinct_rows(design).first]
    _, singular, Vt = np.linalg.svd(X, full_matrices=False)
    return np.asarray(Vt[singular > RCOND * singular.max(initial=0.0)])


def _means(y: Float64Array, weights: Float64Array) -> Float64Array:
    """Return the mean of y (n,) under each column of the weights (n, C): (C,)."""
    # About one value, which keeps the digits of differences that are small against the values.
    return np.asarray(y[0] + (y - y[0]) @ weights / weights.sum(axis=0))


def _least_squares(X: Float64Array, y: Float64Array, weights: Float64Array) -> Float64Array:
    """Return the coefficients (S, C) fitted under each column of the weights (n, C).

    Rows of the same composition are merged first, which leaves the solution as it is: each then has
    the sum of the weights, and the weighted mean of y. 131 000 molecules of QM9 become some 600
    rows, so that a solution by singular values, which unlike the normal equations does not square
    the condition number, is affordable for every member.
    """
    rows = distinct_rows(X)
    X = X[rows.first]
    fitted = np.empty((X.shape[1], weights.shape[1]))
    for i, mean in enumerate(_means(y, weights)):
        w = np.bincount(rows.inverse, weights=weights[:, i])
        sums = np.bincount(rows.inverse, weights=weights[:, i] * (y - mean))
        present = w > 0
        root = np.sqrt(w[present])
        A, b = root[:, None] * X[present], sums[present] / root
        # A constant is a combination of the columns, so it may be added to the coefficients.
        fitted[:, i] = mean + np.linalg.lstsq(A, b, rcond=RCOND)[0]
    return fitted


def _atoms(
    baseline: str | Mapping[int, float],
    species: Sequence[int],
    kind: str,
    isolated: Mapping[int, float],
) -> Float64Array:
    """Return the given or found energies of isolated atoms, in the order of the species: (S,)."""
    energies = isolated if isinstance(baseline, str) else baseline
    if kind != "extensive":
        raise InputError(
            f"Energies of isolated atoms are no baseline for a property that is {kind}. Use "
            "'none', 'mean' or 'composition' as `baseline`.",
            parameter="baseline",
        )
    missing = [z for z in species if z not in energies]
    if missing:
        raise InputError(
            f"Energies of isolated atoms are known for {symbols_of(energies)}; that of "
            f"{symbols_of(missing)} is missing. Use a `baseline` such as {{'H': -13.6}}, in the "
            "units of the target, or structures with config_type=isolated_atom.",
            parameter="baseline",
        )
    return np.array([energies[z] for z in species], dtype=np.float64)
