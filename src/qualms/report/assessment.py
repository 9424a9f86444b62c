"""Assessment of uncertainties: whether they are calibrated, with the scores that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from qualms.arrays import BoolArray
from qualms.errors import InputError, counted
from qualms.evaluation import Evaluation, describe_outliers
from qualms.metrics import (
    BinnedErrors,
    ConditionalArea,
    OneSigma,
    ScoreIntervals,
    binned_errors,
    bootstrap_one_sigma,
    bootstrap_scores,
    conditional_area,
    expected_within,
)

#: Miscalibration areas that are negligible (that of σ wrong by a factor of 1.1), and that are not
#: (a factor of 1.4).
_NEGLIGIBLE, _LARGE = 0.03, 0.1
#: Errors below this fraction of the largest are rounding.
_ROUNDING = 1e-9
#: Rank correlations below the first are negligible; those that may exceed the second are not.
_NO_ORDER, _SOME_ORDER = 0.1, 0.3
#: Differences of the log likelihood to other calibrations that are mentioned.
_GAIN = 0.05

Grade = Literal["calibrated", "approximate", "wrong"]


@dataclass(frozen=True)
class Assessment:
    """Whether the uncertainties of a prediction are calibrated.

    Attributes
    ----------
    grade : {"calibrated", "approximate", "wrong"}
        By the miscalibration area in bins of σ: see `assess`.
    sentence : str
        The same in one sentence, with numbers.
    details : tuple of str
        Further sentences: warnings, outliers, before the calibration, 95 % intervals, errors in
        bins of σ, rank correlation, other calibrations.
    scores : mapping of str to ScoreIntervals
        "before calibration" and "after calibration", or "as predicted".
    """

    grade: Grade
    sentence: str
    details: tuple[str, ...]
    scores: Mapping[str, ScoreIntervals]
    dof: float | None = None  #: of Student's t that the uncertainties are compared with

    def document(self) -> dict[str, Any]:
        """Return the assessment, without the scores, for JSON."""
        return {"grade": self.grade, "sentence": self.sentence, "details": list(self.details)}


def with_uncertainty(evaluation: Evaluation) -> tuple[Evaluation, list[str]]:
    """Leave out points with σ = 0, which have no score, and return a remark about them.

    It is one of the warnings of the evaluation if the errors of these points are not zero.
    """
    prediction = evaluation.prediction
    kept: BoolArray = (prediction.std > 0.0) & (prediction.uncalibrated.std > 0.0)
    n_lost = int(np.count_nonzero(~kept))
    if not n_lost:
        return evaluation, []
    if n_lost == len(evaluation):
        message = f"The uncertainty of all {counted(n_lost, 'point')} is zero: they have no score."
        raise InputError(message, parameter="prediction")
    remark = f"{evaluation.target}: {n_lost} of {len(evaluation)} points have σ = 0; left out."
    found = replace(evaluation.some(kept), scores=evaluation.scores)
    errors = np.abs(evaluation.residuals)
    if errors[~kept].max() > _ROUNDING * errors.max():
        found = replace(found, warnings=[remark, *found.checked()])
    return found, [remark]


def assess(evaluation: Evaluation, *, n_bootstrap: int = 200, seed: int = 0) -> Assessment:
    """Assess uncertainties by the miscalibration area in bins of σ, `conditional_area`.

    Without the part that is due to chance, it is below 0.03 for "calibrated" uncertainties (or
    within the limit of chance, if there are enough points to notice 0.1), and for "wrong" ones it
    exceeds 0.1 by more than chance. All others are "approximate". Warnings about the data, outliers
    and a coverage of ±σ whose confidence interval excludes the expected one exclude "calibrated".
    Points with σ = 0 are left out. A calibration that found heavy tails out of bag is assessed
    against its Student's t, whose ±σ contains more than 68.3 %.

    Parameters
    ----------
    evaluation : Evaluation
    n_bootstrap : int
        Number of bootstrap samples of the structures.
    seed : int
        Of the bootstrap of the scores.
    """
    evaluation, _ = with_uncertainty(evaluation)
    prediction, raw = evaluation.prediction, evaluation.prediction.uncalibrated
    compared = {"as predicted": prediction}
    if raw is not prediction:
        compared = {"before calibration": raw, "after calibration": prediction}
    options: dict[str, Any] = {"groups": evaluation.structure, "n_bootstrap": n_bootstrap}
    scores, within = {}, []
    dof = prediction.dof if prediction.dof is not None and 2 < prediction.dof < np.inf else None
    expected = expected_within(dof)
    for name, p in compared.items():
        rng = np.random.default_rng(seed)
        arrays = evaluation.y, p.mean, p.std, p.members, p.factor_95
        scores[name] = bootstrap_scores(*arrays, rng=rng, **options)
        within.append(bootstrap_one_sigma(evaluation.residuals, p.std, dof=dof, **options))
    final, one = scores[name], within[-1]
    z, std = evaluation.residuals, prediction.std
    area = conditional_area(z, std, evaluation.structure, dof)
    places = evaluation.structure, evaluation.atom, evaluation.component
    warnings = [*evaluation.checked(), *describe_outliers(z, std, *places)]
    grade, lead = _lead(area, one, expected, bool(warnings), evaluation.n_structures)
    tails = "" if dof is None else f" of Student's t, ν = {dof:.3g}"
    where = f" in {area.n_bins} bins of σ" if area.n_bins > 1 else ""
    sentence = (
        f"{lead}: {_percent(one)} of the reference values lie within one σ of the prediction "
        f"({100 * expected:.1f} % expected{tails}); the miscalibration area{where} is "
        f"{area.area:.3f} (by chance {area.by_chance:.3f}, at most {area.limit:.3f})."
    )
    before = "No calibration was applied."
    if raw is not prediction:
        before = f"Before calibration, {_percent(within[0])} were within one σ."
    conformal = _conformal(prediction.factor_95, final)
    bins = _bins(binned_errors(z, std, area.n_bins))
    gain = _gain(evaluation, final)
    details = (
        *warnings,
        before,
        _tails(one, final, expected),
        conformal,
        bins,
        _order(final),
        gain,
    )
    return Assessment(grade, sentence, tuple(filter(None, details)), scores, dof)


def _lead(
    area: ConditionalArea, one: OneSigma, expected: float, warned: bool, n_structures: int
) -> tuple[Grade, str]:
    """Return the grade, and the beginning of the sentence."""
    if area.area > area.limit and area.excess - (area.limit - area.by_chance) > _LARGE:
        return "wrong", f"The uncertainties are not calibrated{_too_small_or_large(one)}"
    if area.limit > _LARGE and area.area <= area.limit:
        few = counted(n_structures, "structure")
        return "approximate", f"{few} are too few to determine whether uncertainties are calibrated"
    low, high = one.within_interval or (0.0, 1.0)
    covered = low <= expected <= high
    if covered and (area.excess <= _NEGLIGIBLE or area.area <= area.limit):
        if warned:
            return (
                "approximate",
                "The coverage is right, but the data may be wrong (see the warnings)",
            )
        return "calibrated", "The uncertainties are calibrated"
    off = "" if covered else _too_small_or_large(one)
    return "approximate", f"The uncertainties are approximately calibrated{off}"


def _too_small_or_large(one: OneSigma) -> str:
    """Return the factor by which σ is wrong, if that is more than chance."""
    low, high = one.factor_interval or (0.0, np.inf)
    if low > 1.0:
        return f" (too small by a factor of about {_factors(one.factor, low, high)})"
    if high < 1.0:
        inverse = (1.0 / max(f, 1e-9) for f in (one.factor, high, low))
        return f" (too large by a factor of about {_factors(*inverse)})"
    return ""


def _factors(factor: float, low: float, high: float) -> str:
    return f"{factor:.3g} [{low:.3g}, {high:.3g}]"


def _bins(bins: BinnedErrors) -> str:
    """Return errors relative to σ where it is smallest and largest."""
    if len(bins.rmse) < 2:
        return ""
    ratios, errors = bins.rmse / bins.rmv, bins.rmse_stderr / bins.rmv
    first, last = (f"{ratios[k]:.3g} ± {errors[k]:.2g}" for k in (0, -1))
    return f"RMSE/σ is {first} where σ is smallest and {last} where it is largest."


def _gain(evaluation: Evaluation, scores: ScoreIntervals) -> str:
    """Name the out-of-bag calibration that would have a higher log likelihood."""
    suffix = " (out-of-bag)"
    others = {
        name.removesuffix(suffix): other.log_likelihood - scores.scores.log_likelihood
        for name, other in evaluation.scores.items()
        if name.endswith(suffix)
    }
    best = max(others, key=lambda name: others[name], default="")
    if not best or not others[best] > _GAIN:
        return ""
    return (
        f"With the calibration {best!r} the log likelihood would be higher by {others[best]:.2g}."
    )


def _percent(one: OneSigma) -> str:
    if one.within_interval is None:
        return f"{100 * one.within:.1f} %"
    low, high = one.within_interval
    return f"{100 * one.within:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _tails(one: OneSigma, scores: ScoreIntervals, expected: float) -> str:
    text = f"The 95 % intervals contain {100 * scores.scores.coverage_95:.1f} %"
    heavy = ""
    if "coverage_95" in scores.intervals and one.within_interval is not None:
        low, high = scores.intervals["coverage_95"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
        # More than expected within one σ and fewer within two: no factor corrects both.
        if one.within_interval[0] > expected and high < 0.95:
            heavy = "; the errors have heavier tails than expected"
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
    if low == high == 0.0:
        return "All uncertainties, or all errors, are equal."
    if high < 0.0:
        meaning = "larger uncertainties correspond to smaller errors"
    elif low <= 0.0 and high > _SOME_ORDER:
        meaning = "there are too few points to determine it"
    elif high < _NO_ORDER or low <= 0.0:
        meaning = "the uncertainties hardly distinguish small from large errors"
    else:
        meaning = "larger uncertainties correspond to larger errors"
    found = f"{scores.scores.spearman:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")
    return f"The rank correlation of |error| and σ is {found}: {meaning}."
