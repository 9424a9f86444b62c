"""The predictions that were furthest off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qualms.core.checks import check_integer
from qualms.report.judged import Judged


@dataclass(frozen=True)
class WorstPoint:
    """One prediction that was far off.

    Attributes
    ----------
    point, structure : int
        Its number among the points, and that of its structure.
    formula : str
        Of its structure; empty if there is none.
    atom : int or None
        Its atom.
    element : str
        That of its atom; empty if there is none.
    component : int or None
        Which of the values of its structure or atom it is, if they are several.
    truth, mean, std, error : float
        In the units of the target; the error is truth minus prediction.
    ratio : float
        |error|/σ.
    """

    point: int
    structure: int
    formula: str
    atom: int | None
    element: str
    component: int | None
    truth: float
    mean: float
    std: float
    error: float
    ratio: float


def worst_points(judged: Judged, n: int, by: Literal["ratio", "error"]) -> Sequence[WorstPoint]:
    """Return the points with the largest |z|/σ, or |z|, the worst first.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    n : int
        How many, at most.
    by : {"ratio", "error"}
    """
    check_integer("n_worst", n, 1)
    size = np.abs(judged.residuals)
    if by == "ratio":
        with np.errstate(over="ignore"):
            size = size / judged.prediction.std
    order = np.argsort(-size, kind="stable")[:n]
    return [_point(judged, i) for i in order.tolist()]


def _point(judged: Judged, i: int) -> WorstPoint:
    structure = int(judged.structure[i])
    atom = None if judged.atom is None else int(judged.atom[i])
    atoms = None if judged.frames is None else judged.frames[structure]
    prediction = judged.prediction[i]
    error, std = float(judged.residuals[i]), float(prediction.std)
    return WorstPoint(
        point=i,
        structure=structure,
        formula="" if atoms is None else atoms.symbols.get_chemical_formula(),
        atom=atom,
        element="" if atoms is None or atom is None else str(atoms.symbols[atom]),
        component=None if judged.component is None else int(judged.component[i]),
        truth=float(judged.y[i]),
        mean=float(prediction.mean),
        std=std,
        error=error,
        ratio=abs(error) / std,
    )
