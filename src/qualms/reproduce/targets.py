"""Internal calibration, which sets nothing aside, against that on a validation set.

Two targets: student within 0.005 of CV, and shrinkage at least equal to N-L, at every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.arrays import Float64Array
from qualms.reproduce.markdown import markdown_table, minus
from qualms.reproduce.over_seeds import half_width, likelihoods, sub_samples, written
from qualms.reproduce.results import Results

#: How far student may be from CV, above or below it.
WITHIN = 0.005
#: Digits of differences, and how these are written.
_DIGITS = 4
_FORM = f"+.{_DIGITS}f"
#: Parameters that are fitted: to points of the training set, and to the validation set.
_SHRINKAGE, _POWER = 4, 2
_MET, _MISSED = "met", "missed"
_CLOSE, _ONE_SEED = ", not surely", " (one seed)"
_TEXT = f"""
Internal calibration, which sets nothing aside, against calibration on the validation set. Targets:
student within {WITHIN} of CV, above or below it; shrinkage at least equal to N-L. Met or missed is
what the mean over seeds is; not surely, if the target lies within the 68 % confidence interval of
the mean, by Student's t, of differences paired by seed:
"""


@dataclass(frozen=True)
class Target:
    """One target at one size.

    Attributes
    ----------
    n : int
        Size of the sub-samples.
    n_internal, n_well_judged : float
        Points of the internal calibration, and those that Int. and Int. N-L used; means over seeds.
    differences : (n_seeds,) array
        Internal less validated, of each seed.
    shortfall : float
        By how much the mean difference misses the target; not positive if it is met.
    """

    n: int
    n_internal: float
    n_well_judged: float
    differences: Float64Array
    shortfall: float

    @property
    def missed(self) -> bool:
        """Whether the mean misses it, to the digits that are shown."""
        return round(self.shortfall, _DIGITS) > 0

    @property
    def verdict(self) -> str:
        """Whether the mean meets it, and whether seeds are enough to say so."""
        word = _MISSED if self.missed else _MET
        width = half_width(self.differences)
        if width is None:
            return word + _ONE_SEED
        return word + (_CLOSE if abs(self.shortfall) <= float(width) else "")


def student_targets(results: Results) -> list[Target]:
    """Return how far student is from CV, by size."""
    gains = likelihoods(results, "student") - likelihoods(results, "CV")
    return _targets(results, gains, np.abs(gains.mean(axis=0)) - WITHIN)


def shrinkage_targets(results: Results) -> list[Target]:
    """Return how far shrinkage is above N-L, by size."""
    gains = likelihoods(results, "shrinkage") - likelihoods(results, "N-L")
    return _targets(results, gains, -gains.mean(axis=0))


def _targets(results: Results, gains: Float64Array, shortfalls: Float64Array) -> list[Target]:
    points = [
        [(s.n_internal, s.n_well_judged) for s in sub_samples(seed)] for seed in results.seeds
    ]
    internal = np.mean(points, axis=0).tolist()
    return [
        Target(n, internal[i][0], internal[i][1], gains[:, i], float(shortfalls[i]))
        for i, n in enumerate(results.sizes)
    ]


def internal_against_validation(results: Results) -> str:
    """Return the table of both targets at every size, and what is met of them."""
    student, shrinkage = student_targets(results), shrinkage_targets(results)
    rows = [
        [
            f"{a.n:,}",
            f"{a.n_internal:,.0f}",
            f"{a.n_well_judged:,.0f}",
            written(a.differences, _FORM),
            a.verdict,
            written(b.differences, _FORM),
            b.verdict,
        ]
        for a, b in zip(student, shrinkage, strict=True)
    ]
    head = ["n", "points, student and shrinkage", "points, Int. and Int. N-L"]
    head += ["student − CV", f"within {WITHIN}"]
    table = markdown_table([*head, "shrinkage − N-L", "at least equal"], rows)
    words = f"{_summary('student', student)} {_farthest(student)}{_summary('shrinkage', shrinkage)}"
    why = _reason(shrinkage, results.seeds[0].n_validation)
    return f"{_TEXT.strip()}\n\n{table}\n\n{words} {why}".strip()


def _summary(name: str, targets: Sequence[Target]) -> str:
    """Say at how many sizes a target is met, and name the others."""
    missed = [t for t in targets if t.missed]
    if not missed:
        far = max(targets, key=lambda t: t.shortfall)
        return (
            f"The target of {name} is met at each of the {len(targets)} sizes; it is closest to "
            f"being missed at n = {far.n:,}, with {written(far.differences, _FORM)}, "
            f"{far.verdict}."
        )
    listed = "; ".join(f"n = {t.n:,}, {written(t.differences, _FORM)}, {t.verdict}" for t in missed)
    met = len(targets) - len(missed)
    return f"The target of {name} is met at {met} of {len(targets)} sizes and missed at: {listed}."


def _farthest(student: Sequence[Target]) -> str:
    """Say how far single seeds are, which may cancel in the mean."""
    far = max(student, key=lambda t: float(np.abs(t.differences).max()))
    if len(far.differences) < 2:
        return ""
    worst = far.differences[np.abs(far.differences).argmax()]
    return f"The farthest of single seeds is {minus(format(worst, _FORM))}, at n = {far.n:,}. "


def _reason(shrinkage: Sequence[Target], n_validation: int) -> str:
    """Say how much of what shrinkage misses is the price of fitting its parameters."""
    missed = [t for t in shrinkage if t.missed]
    if not missed:
        return ""
    worst = max(missed, key=lambda t: t.shortfall)
    prices = _SHRINKAGE / (2 * worst.n_internal), _POWER / (2 * n_validation)
    return (
        "A fit of k parameters to n independent points costs about k/2n in log likelihood: here, "
        f"at n = {worst.n:,}, {prices[0]:.4f} for the {_SHRINKAGE} of shrinkage and "
        f"{prices[1]:.4f} for the {_POWER} of N-L; more, where points come in groups. Whether the "
        f"rest of the {worst.shortfall:.4f} is chance, of these points and of the test points, or "
        "a bias, so few seeds do not tell."
    )
