"""Assessment of uncertainties: whether they are calibrated, with the scores that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from qualms.arrays import BoolArray, IntArray
from qualms.errors import InputError, counted
from qualms.evaluation import Evaluation
from qualms.metrics import (
    EXPECTED_WITHIN,
    OneSigma,
    ScoreIntervals,
    bootstrap_one_sigma,
    bootstrap_scores,
    outlying_points,
)
from qualms.report.tables import CALIBRATED_AREA

#: Uncertainties that are wrong by less than this factor count as calibrated.
_TOLERATED = 1.1
#: Fewer points, or structures, are too few for an assessment.
_FEW = 20
#: A confidence interval of the fraction within one σ that is as wide as this is uninformative.
_WIDE = 0.2
#: Deviations of a coverage below this are not mentioned.
_NOTABLE = 0.02
#: A significant miscalibration area above this is mentioned.
_AREA = 0.03
#: Rank correlations below the first are negligible; those that may exceed the second are not.
_NO_ORDER, _SOME_ORDER = 0.1, 0.3

Grade = Literal["calibrated", "partly", "small", "large", "unknown"]


@dataclass(frozen=True)
class Assessment:
    """Whether the uncertainties of a prediction are calibrated.

    Attributes
    ----------
    grade : {"calibrated", "partly", "small", "large", "unknown"}
        "partly": except for outliers or for the tails of the distribution. "small" and "large":
        uncertainties are too small or too large. "unknown": too few points.
    sentence : str
        The same in one sentence, with numbers.
    details : tuple of str
        Further sentences: outliers, before the calibration, 95 % intervals, rank correlation.
    scores : mapping of str to ScoreIntervals
        "before calibration" and "after calibration", or "as predicted".
    """

    grade: Grade
    sentence: str
    details: tuple[str, ...]
    scores: Mapping[str, ScoreIntervals]

    def document(self) -> dict[str, Any]:
        """Return the assessment, without the scores, for JSON."""
        return {"grade": self.grade, "sentence": self.sentence, "details": list(self.details)}


def with_uncertainty(evaluation: Evaluation) -> tuple[Evaluation, list[str]]:
    """Leave out points with σ = 0, which have no score, and return a remark about them."""
    prediction = evaluation.prediction
    kept: BoolArray = (prediction.std > 0.0) & (prediction.uncalibrated.std > 0.0)
    n_lost = int(np.count_nonzero(~kept))
    if not n_lost:
        return evaluation, []
    if n_lost == len(evaluation):
        raise InputError("prediction", "σ = 0 for all points", "at least one σ > 0")
    remark = f"{evaluation.target}: {n_lost} of {len(evaluation)} points have σ = 0; left out."
    return replace(evaluation.some(kept), scores=evaluation.scores), [remark]


def assess(evaluation: Evaluation, *, n_bootstrap: int = 200, seed: int = 0) -> Assessment:
    """Assess uncertainties by their coverage and its confidence interval.

    Parameters
    ----------
    evaluation : Evaluation
        With all σ > 0.
    n_bootstrap : int
        Number of bootstrap samples of the structures.
    seed : int
        Of the bootstrap of the scores.
    """
    prediction, raw = evaluation.prediction, evaluation.prediction.uncalibrated
    compared = {"as predicted": prediction}
    if raw is not prediction:
        compared = {"before calibration": raw, "after calibration": prediction}
    options: dict[str, Any] = {"groups": evaluation.structure, "n_bootstrap": n_bootstrap}
    scores, within = {}, []
    for name, p in compared.items():
        rng = np.random.default_rng(seed)
        arrays = evaluation.y, p.mean, p.std, p.members, p.factor_95
        scores[name] = bootstrap_scores(*arrays, rng=rng, **options)
        within.append(bootstrap_one_sigma(evaluation.residuals, p.std, **options))
    final, one = scores[name], within[-1]
    outliers = outlying_points(evaluation.residuals, prediction.std)
    grade, lead = _lead(one, final, outliers.size)
    sentence = (
        f"{lead}: {_percent(one)} of the reference values lie within one σ of the prediction "
        f"({100 * EXPECTED_WITHIN:.1f} % expected)."
    )
    before = "The prediction is not calibrated."
    if raw is not prediction:
        before = f"Before calibration, {_percent(within[0])} were within one σ."
    tails, conformal = _tails(one, final), _conformal(prediction.factor_95, final)
    details = (_outliers(evaluation, outliers), before, tails, conformal, _order(final))
    return Assessment(grade, sentence, tuple(filter(None, details)), scores)


def _lead(one: OneSigma, scores: ScoreIntervals, n_outliers: int) -> tuple[Grade, str]:
    """Require significance and size, both in the middle and in the tails.

    With many points any deviation is significant, and errors that are not Gaussian have the wrong
    coverage at one level even if uncertainties have the right size.
    """
    if scores.n_groups < _FEW or one.factor_interval is None or one.within_interval is None:
        few = "points" if scores.scores.n_points < _FEW else "structures"
        return "unknown", f"Too few {few} to assess the uncertainties"
    (low, high), (tail_low, tail_high) = one.factor_interval, scores.intervals["coverage_95"]
    if low > 1.0 and one.factor > _TOLERATED and tail_high < 0.95:
        factor = f"{one.factor:.3g} [{low:.3g}, {high:.3g}]"
        return "small", f"The uncertainties are too small by a factor of about {factor}"
    if high < 1.0 and one.factor < 1.0 / _TOLERATED and tail_low > 0.95:
        best, least, most = (1.0 / max(f, 1e-9) for f in (one.factor, high, low))
        factor = f"{best:.3g} [{least:.3g}, {most:.3g}]"
        return "large", f"The uncertainties are too large by a factor of about {factor}"
    if one.within_interval[1] - one.within_interval[0] > _WIDE:
        lead = "The uncertainties are consistent with calibration, as far as so few points show"
    elif _is_rough(one, scores):
        lead = "The uncertainties are approximately calibrated"
    else:
        lead = "The uncertainties are calibrated"
    if tail_high < 0.95 - _NOTABLE:
        return "partly", f"{lead}, but large errors are more frequent than predicted"
    if n_outliers:
        return "partly", f"{lead}, except for {n_outliers} of {scores.scores.n_points} points"
    return "calibrated", lead


def _is_rough(one: OneSigma, scores: ScoreIntervals) -> bool:
    """Whether the coverage is significantly and notably wrong at some levels."""
    low, high = one.within_interval or (0.0, 1.0)
    differs = not low <= EXPECTED_WITHIN <= high and abs(one.within - EXPECTED_WITHIN) > _NOTABLE
    by_chance = CALIBRATED_AREA / scores.n_groups**0.5
    significant = scores.intervals["miscalibration_area"][0] > by_chance
    return differs or (scores.scores.miscalibration_area > _AREA and significant)


def _percent(one: OneSigma) -> str:
    if one.within_interval is None:
        return f"{100 * one.within:.1f} %"
    low, high = one.within_interval
    return f"{100 * one.within:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _outliers(evaluation: Evaluation, outliers: IntArray) -> str:
    if not outliers.size:
        return ""
    worst = int(outliers[0])
    atom = "" if evaluation.atom is None else f", atom {evaluation.atom[worst]},"
    off = abs(evaluation.residuals[worst]) / evaluation.prediction.std[worst]
    return (
        f"{counted(outliers.size, 'outlier')}: the error of structure "
        f"{evaluation.structure[worst]}{atom} is {off:.3g} σ. Check its reference value first; a "
        "single wrong value dominates the root mean squared error and the log likelihood."
    )


def _tails(one: OneSigma, scores: ScoreIntervals) -> str:
    text = f"The 95 % intervals contain {100 * scores.scores.coverage_95:.1f} %"
    heavy = ""
    if "coverage_95" in scores.intervals and one.within_interval is not None:
        low, high = scores.intervals["coverage_95"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
        # More than expected within one σ and fewer within two: no factor corrects both.
        if one.within_interval[0] > EXPECTED_WITHIN and high < 0.95:
            heavy = "; the errors have heavier tails than a Gaussian"
    return f"{text} of the reference values{heavy}."


def _conformal(factor: float | None, scores: ScoreIntervals) -> str:
    if factor is None or scores.scores.coverage_95_conformal is None:
        return ""
    text = f"{100 * scores.scores.coverage_95_conformal:.1f} %"
    if "coverage_95_conformal" in scores.intervals:
        low, high = scores.intervals["coverage_95_conformal"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
    return f"The conformal 95 % intervals, ± {factor:.3g} σ, contain {text}."


def _order(scores: ScoreIntervals) -> str:
    """Describe whether larger uncertainties correspond to larger errors."""
    interval = scores.intervals.get("spearman")
    if interval is None:
        return ""
    low, high = interval
    if low <= 0.0 and high > _SOME_ORDER:
        meaning = "there are too few points to determine it"
    elif high < _NO_ORDER or low <= 0.0:
        meaning = "the uncertainties hardly distinguish small from large errors"
    else:
        meaning = "larger uncertainties correspond to larger errors"
    found = f"{scores.scores.spearman:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")
    return f"The rank correlation of |error| and σ is {found}: {meaning}."
