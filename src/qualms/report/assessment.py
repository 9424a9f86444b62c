"""Whether error bars hold, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qualms.errors import counted
from qualms.metrics import (
    EXPECTED_WITHIN,
    OneSigma,
    ScoreIntervals,
    bootstrap_one_sigma,
    far_points,
)
from qualms.report.judged import Judged
from qualms.report.tables import CALIBRATED_AREA

#: Error bars that are wrong by less than this factor hold for all that anybody does with them.
_TOLERATED = 1.1
#: With fewer points, or structures, nothing can be said about error bars.
_FEW = 20
#: An interval of the fraction within one σ that is as wide as this says little.
_WIDE = 0.2
#: A fraction within one σ that is wrong by less is not worth a word.
_NOTABLE = 0.02
#: A miscalibration area above this is worth a word, if it is not chance.
_AREA = 0.03
#: Rank correlations below this order nothing.
_NO_ORDER = 0.1
#: And if they may be above this, too, nobody knows.
_SOME_ORDER = 0.3

Grade = Literal["hold", "doubtful", "small", "large", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The answer that a report gives.

    Attributes
    ----------
    grade : {"hold", "doubtful", "small", "large", "unknown"}
        Whether error bars hold, do so but for some points that are far off or for the tails, are
        too small, are too large, or cannot be judged.
    sentence : str
        The same in one sentence.
    details : tuple of str
        Further sentences: before the calibration, far errors, and whether error bars order.
    """

    grade: Grade
    sentence: str
    details: tuple[str, ...]


def judge(judged: Judged, scores: ScoreIntervals, *, n_bootstrap: int = 200) -> Verdict:
    """Say whether error bars hold, from their coverage and its confidence interval.

    Parameters
    ----------
    judged : Judged
        With all σ > 0.
    scores : ScoreIntervals
        Of the calibrated prediction.
    n_bootstrap : int
        Number of resamples of the structures.
    """
    one = _one_sigma(judged, judged.prediction.std, n_bootstrap)
    far = far_points(judged.residuals, judged.prediction.std).tolist()
    grade = _grade(one, scores)
    long = grade == "hold" and _has_long_tails(scores)
    if grade == "hold" and (far or long):
        grade = "doubtful"
    lead = _lead(grade, one, scores)
    if long:
        lead += ", but large errors are more frequent than they say"
    elif grade == "doubtful":
        lead += f", but not for {len(far)} of {judged.y.size} points"
    sentence = f"{lead}: {_within(one)}."
    details = [_far(judged, far), _before(judged, n_bootstrap), _tails(one, scores), _order(scores)]
    return Verdict(grade, sentence, tuple(text for text in details if text))


def _one_sigma(judged: Judged, std: object, n_bootstrap: int) -> OneSigma:
    return bootstrap_one_sigma(
        judged.residuals,
        std,  # type: ignore[arg-type]
        groups=judged.structure,
        n_bootstrap=n_bootstrap,
    )


def _grade(one: OneSigma, scores: ScoreIntervals) -> Grade:
    """Ask for significance and for size, both in the middle and in the tails.

    With many points any deviation is significant; and errors that are not Gaussian have the wrong
    coverage at one level even if error bars have the right size.
    """
    if scores.n_groups < _FEW or one.factor_interval is None:
        return "unknown"
    (low, high), (tail_low, tail_high) = one.factor_interval, scores.intervals["coverage_95"]
    if low > 1.0 and one.factor > _TOLERATED and tail_high < 0.95:
        return "small"
    if high < 1.0 and one.factor < 1.0 / _TOLERATED and tail_low > 0.95:
        return "large"
    return "hold"


def _lead(grade: Grade, one: OneSigma, scores: ScoreIntervals) -> str:
    if grade == "unknown" or one.factor_interval is None:
        few = "points" if scores.scores.n_points < _FEW else "structures"
        return f"Too few {few} to judge the error bars"
    low, high = one.factor_interval
    if grade in ("small", "large"):
        # Too large by a factor of 2: σ must be multiplied by one half.
        power = 1.0 if grade == "small" else -1.0
        low, high = sorted(max(end, 1e-9) ** power for end in (low, high))
        factor = f"{max(one.factor, 1e-9) ** power:.3g} [{low:.3g}, {high:.3g}]"
        return f"The error bars are too {grade}, by a factor of about {factor}"
    if one.within_interval and one.within_interval[1] - one.within_interval[0] > _WIDE:
        return "The error bars hold, as far as so few points can tell"
    return "The error bars hold roughly" if _is_rough(one, scores) else "The error bars hold"


def _is_rough(one: OneSigma, scores: ScoreIntervals) -> bool:
    """Whether coverage is wrong, by more than chance and by more than a little, at some levels."""
    low, high = one.within_interval or (0.0, 1.0)
    differs = not low <= EXPECTED_WITHIN <= high and abs(one.within - EXPECTED_WITHIN) > _NOTABLE
    area = scores.scores.miscalibration_area
    by_chance = CALIBRATED_AREA / scores.n_groups**0.5
    return differs or (area > _AREA and scores.intervals["miscalibration_area"][0] > by_chance)


def _has_long_tails(scores: ScoreIntervals) -> bool:
    """Whether 95 % intervals hold too few true values, by more than chance and than a little."""
    return scores.intervals["coverage_95"][1] < 0.95 - _NOTABLE


def _within(one: OneSigma) -> str:
    return (
        f"{_percent(one)} of the true values lie within one σ of the prediction; "
        f"{100 * EXPECTED_WITHIN:.1f} % should"
    )


def _percent(one: OneSigma) -> str:
    if one.within_interval is None:
        return f"{100 * one.within:.1f} %"
    low, high = one.within_interval
    return f"{100 * one.within:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _far(judged: Judged, far: Sequence[int]) -> str:
    """Say which point is furthest off, and that its label may be wrong."""
    if not far:
        return ""
    worst = far[0]
    atom = "" if judged.atom is None else f", atom {judged.atom[worst]},"
    off = abs(judged.residuals[worst]) / judged.prediction.std[worst]
    return (
        f"{counted(len(far), 'point')} far off: structure {judged.structure[worst]}{atom} by "
        f"{off:.3g} error bars. Look at the true value first: one that is wrong spoils the root "
        "mean square error and the log likelihood of all."
    )


def _before(judged: Judged, n_bootstrap: int) -> str:
    if not judged.is_calibrated:
        return "The prediction has not been calibrated."
    raw = judged.prediction.uncalibrated
    return f"Before calibration, {_percent(_one_sigma(judged, raw.std, n_bootstrap))} did."


def _tails(one: OneSigma, scores: ScoreIntervals) -> str:
    """Say how far errors are covered, and whether they have long tails."""
    found = f"{100 * scores.scores.coverage_95:.1f} %"
    if "coverage_95" not in scores.intervals or one.within_interval is None:
        return f"The 95 % intervals hold {found} of the true values."
    low, high = scores.intervals["coverage_95"]
    text = f"The 95 % intervals hold {found} [{100 * low:.1f}, {100 * high:.1f}] of the true values"
    # More than expected within one σ and fewer within two: no factor would mend both.
    if one.within_interval[0] > EXPECTED_WITHIN and high < 0.95:
        return f"{text}: errors have longer tails than Gaussian ones."
    return f"{text}."


def _order(scores: ScoreIntervals) -> str:
    """Say whether larger error bars go with larger errors."""
    interval = scores.intervals.get("spearman")
    if interval is None:
        return ""
    low, high = interval
    found = f"rank correlation {scores.scores.spearman:.2f} [{low:.2f}, {high:.2f}]"
    if low <= 0.0 and high > _SOME_ORDER:
        return (
            "Whether error bars tell good predictions from bad ones cannot be told from so few "
            f"points ({found})."
        ).replace("-", "−")
    if high < _NO_ORDER or low <= 0.0:
        found = f"{found}, which may be none"
        return f"Error bars hardly tell good predictions from bad ones ({found}).".replace("-", "−")
    return f"Larger error bars go with larger errors ({found}).".replace("-", "−")
