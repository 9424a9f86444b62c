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
    bootstrap_scores,
    conditional_area,
)

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

    def document(self) -> dict[str, Any]:
        """Return the assessment, without the scores, for JSON."""
        return {"grade": self.grade, "sentence": self.sentence, "details": list(self.details)}


def with_uncertainty(evaluation: Evaluation) -> tuple[Evaluation, list[str]]:
    """Leave out points with σ = 0, which have no score, and return a remark about them.

    It is one of the warnings of the evaluation if the errors of these points are not zero.
    """
    prediction = evaluation.prediction
    usable: BoolArray = (prediction.std > 0.0) & (prediction.uncalibrated.std > 0.0)
    n_lost = int(np.count_nonzero(~usable))
    if not n_lost:
        return evaluation, []
    if n_lost == len(evaluation):
        message = f"The uncertainty of all {counted(n_lost, 'point')} is zero: they have no score."
        raise InputError(message, parameter="prediction")
    remark = f"{evaluation.target}: {n_lost} of {len(evaluation)} points have σ = 0; left out."
    points = replace(evaluation.some(usable), scores=evaluation.scores)
    errors = np.abs(evaluation.residuals)
    if errors[~usable].max() > 1e-9 * errors.max():  # smaller ones are rounding
        points = replace(points, warnings=[remark, *points.checked()])
    return points, [remark]


def assess(evaluation: Evaluation, *, n_bootstrap: int = 200, seed: int = 0) -> Assessment:
    """Assess uncertainties by the miscalibration area in bins of σ, `conditional_area`.

    Without the part that is due to chance, it is below 0.03 (that of σ wrong by a factor of 1.1)
    for "calibrated" uncertainties, or within the limit of chance if there are enough points to
    notice 0.1; for "wrong" ones it exceeds 0.1 (a factor of 1.4) by more than chance. All others
    are "approximate". Warnings about the data, outliers and a coverage of ±σ whose confidence
    interval excludes the expected one exclude "calibrated". Points with σ = 0 are left out. A
    calibration that found heavy tails out of bag is assessed against its Student's t, whose ±σ
    contains more than 68.3 %.

    Parameters
    ----------
    evaluation : Evaluation
    n_bootstrap : int
        Number of bootstrap samples of the structures.
    seed : int
        Random seed for the bootstrap of the scores.
    """
    evaluation, _ = with_uncertainty(evaluation)
    prediction, raw = evaluation.prediction, evaluation.prediction.uncalibrated
    compared = {"as predicted": prediction}
    if raw is not prediction:
        compared = {"before calibration": raw, "after calibration": prediction}
    dof = prediction.dof if prediction.dof is not None and 2 < prediction.dof < np.inf else None
    scores = {
        name: bootstrap_scores(
            evaluation.y,
            p,
            groups=evaluation.structure,
            n_bootstrap=n_bootstrap,
            rng=np.random.default_rng(seed),
            dof=dof,
        )
        for name, p in compared.items()
    }
    final = [*scores.values()][-1]
    coverage = final.one_sigma
    z, std = evaluation.residuals, prediction.std
    area = conditional_area(z, std, evaluation.structure, dof)
    places = evaluation.structure, evaluation.atom, evaluation.component
    warnings = [*evaluation.checked(), *describe_outliers(z, std, *places)]
    grade, lead = _lead(area, coverage, bool(warnings), evaluation.n_structures)
    tails = "" if dof is None else f" of Student's t, ν = {dof:.3g}"
    where = f" in {area.n_bins} bins of σ" if area.n_bins > 1 else ""
    sentence = (
        f"{lead}: {_percent(coverage.within, coverage.within_interval)} of the reference values "
        "lie within one σ of the prediction "
        f"({100 * coverage.expected:.1f} % expected{tails}); the miscalibration area{where} is "
        f"{area.area:.3f} (by chance {area.by_chance:.3f}, at most {area.limit:.3f})."
    )
    before = "No calibration was applied."
    if raw is not prediction:
        raw_coverage = scores["before calibration"].one_sigma
        percent = _percent(raw_coverage.within, raw_coverage.within_interval)
        before = f"Before calibration, {percent} were within one σ."
    details = (
        *warnings,
        evaluation.doubt,
        before,
        _tails(final),
        _conformal(prediction.factor_95, final),
        _bins(binned_errors(z, std, area.n_bins)),
        _order(final),
        _gain(evaluation, final),
    )
    return Assessment(grade, sentence, tuple(filter(None, details)), scores)


def _lead(
    area: ConditionalArea, coverage: OneSigma, warned: bool, n_structures: int
) -> tuple[Grade, str]:
    """Return the grade, and the beginning of the sentence."""
    if area.area > area.limit and area.excess - (area.limit - area.by_chance) > 0.1:
        return "wrong", f"The uncertainties are not calibrated{_too_small_or_large(coverage)}"
    if area.limit > 0.1 and area.area <= area.limit:
        few = counted(n_structures, "structure")
        return "approximate", f"{few} are too few to determine whether uncertainties are calibrated"
    low, high = coverage.within_interval or (0.0, 1.0)
    covered = low <= coverage.expected <= high
    if covered and (area.excess <= 0.03 or area.area <= area.limit):
        if warned:
            lead = "The coverage is right, but the data may be wrong (see the warnings)"
            return "approximate", lead
        return "calibrated", "The uncertainties are calibrated"
    off = "" if covered else _too_small_or_large(coverage)
    return "approximate", f"The uncertainties are approximately calibrated{off}"


def _too_small_or_large(coverage: OneSigma) -> str:
    """Return the factor by which σ is wrong, if that is more than chance."""
    low, high = coverage.factor_interval or (0.0, np.inf)
    if low > 1.0:
        return f" (too small by a factor of about {_factors(coverage.factor, low, high)})"
    if high < 1.0:
        inverse = (1.0 / max(f, 1e-9) for f in (coverage.factor, high, low))
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
    if not best or not others[best] > 0.05:
        return ""
    return (
        f"With the calibration {best!r} the log likelihood would be higher by {others[best]:.2g}."
    )


def _percent(fraction: float, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return f"{100 * fraction:.1f} %"
    low, high = interval
    return f"{100 * fraction:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _tails(scores: ScoreIntervals) -> str:
    interval, heavy = scores.intervals.get("coverage_95"), ""
    low, high = (scores.one_sigma.within_interval or (0, 1))[0], (interval or (0, 1))[1]
    if low > scores.one_sigma.expected and high < 0.95:
        # More than expected within one σ and fewer within two: no factor corrects both.
        heavy = "; the errors have heavier tails than expected"
    percent = _percent(scores.scores.coverage_95, interval)
    return f"The 95 % intervals contain {percent} of the reference values{heavy}."


def _conformal(factor: float | None, scores: ScoreIntervals) -> str:
    coverage = scores.scores.coverage_95_conformal
    if factor is None or coverage is None:
        return ""
    percent = _percent(coverage, scores.intervals.get("coverage_95_conformal"))
    return f"The conformal 95 % intervals, ± {factor:.3g} σ, contain {percent}."


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
    elif low <= 0.0 and high > 0.3:
        meaning = "there are too few points to determine it"
    elif high < 0.1 or low <= 0.0:
        meaning = "the uncertainties hardly distinguish small from large errors"
    else:
        meaning = "larger uncertainties correspond to larger errors"
    rank = f"{scores.scores.spearman:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")
    return f"The rank correlation of |error| and σ is {rank}: {meaning}."
