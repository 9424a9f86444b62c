"""What the paper says in words, checked in numbers; error bars are about the full model, as its."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from qualms.arrays import Float64Array
from qualms.reproduce.over_seeds import (
    bootstrap_of,
    full_model,
    likelihood,
    likelihoods,
    mean_of_members,
    states,
    sub_samples,
    verdict,
    written,
)
from qualms.reproduce.results import Column, Results, Scheme

#: What a verdict needs: differences of log likelihoods, decades of σ, shares.
_INSENSITIVE, _NOTICEABLE, _ADVANTAGE = 0.05, 0.05, 0.01
_ALMOST_TWO, _NARROW, _CLOSE = 1.7, 0.5, 0.1
_STEPS, _SURPRISES = 0.88, 0.005


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what was found.

    Attributes
    ----------
    says : str
    criterion : str
        When it is taken to hold.
    found : str
        Means over seeds; with several of them ± standard errors, of differences paired by seed.
    holds : str
        "yes"; "no"; "from a quarter on", for all sizes of sub-samples but the smallest;
        "undecided", where the criterion lies within the 68 % interval of what was found; or
        "undecided from a quarter on", if only the smallest size is clear, and is a "no".
    """

    says: str
    criterion: str
    found: str
    holds: str


def check_claims(results: Results) -> list[Claim]:
    """Check the sentences of the paper on all seeds of complete results."""
    checks = [_quarter_best, _insensitive, _power_helps, _process, _range]
    checks += [_equal, _narrow] if results.name == "qm9" else [_equal]
    return [check(results) for check in [*checks, _monotonic, _surprises, _bootstrap]]


def how_claims_are_judged(n_seeds: int) -> str:
    """Say what ± and "undecided" mean, or why there are none."""
    if n_seeds == 1:
        return (
            "One seed: there are no standard errors, and nothing says which of these verdicts "
            "another division of the data would turn over."
        )
    return (
        f"± is the standard error over {n_seeds} seeds; differences are paired by seed. Undecided: "
        "the criterion lies within the 68 % confidence interval of what was found, by Student's t."
    )


def _by_size(results: Results, value: Callable[[Scheme], float]) -> Float64Array:
    """Return what each seed has of each size: (n_seeds, n_sizes)."""
    found = [[value(s) for s in sub_samples(seed)] for seed in results.seeds]
    return np.array(found, dtype=np.float64)


def _of_process(results: Results, column: str, value: Callable[[Column], float]) -> Float64Array:
    """Return what the projected process of each seed has: (n_seeds,)."""
    return np.array([value(seed.process[column]) for seed in results.seeds], dtype=np.float64)


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(v, form) for v in values)


def _quarter_best(results: Results) -> Claim:
    raw = likelihoods(results, "Raw", full_model)
    quarter = results.sizes[1]
    others = np.delete(raw, 1, axis=1)
    gains = raw[:, 1] - others[:, others.mean(axis=0).argmax()]
    best = [results.sizes[i] for i in raw.argmax(axis=1)]
    return Claim(
        "Before scaling, sub-samples of a quarter of the training set are best.",
        f"Raw at {quarter:,} is above the best other size",
        f"It is by {written(gains, '+.3f')}. Best raw size, by seed: {_listed(best, ',')}.",
        verdict(states(gains, strict=True)),
    )


def _widest(values: Float64Array) -> Float64Array:
    """Return, of each seed, by how much the two sizes differ that do so most in the mean."""
    mean = values.mean(axis=0)
    return np.asarray(values[:, mean.argmax()] - values[:, mean.argmin()])


def _insensitive(results: Results) -> Claim:
    scaled = likelihoods(results, "CV", full_model)
    everywhere, from_a_quarter = _widest(scaled), _widest(scaled[:, 1:])
    raw = _widest(likelihoods(results, "Raw", full_model))
    margins = _INSENSITIVE - np.stack([everywhere, from_a_quarter], axis=1)
    return Claim(
        "After scaling, the log likelihood is insensitive to the sub-sample size.",
        f"CV varies by at most {_INSENSITIVE}",
        f"CV varies by {written(everywhere, '.3f')}, from a quarter on by "
        f"{written(from_a_quarter, '.3f')} (Raw: by {written(raw, '.2f')}).",
        verdict(states(margins)),
    )


def _power_helps(results: Results) -> Claim:
    gains = likelihoods(results, "N-L", full_model) - likelihoods(results, "CV", full_model)
    return Claim(
        "A non-linear scaling of the uncertainty improves it further.",
        "N-L is above CV at each size",
        f"Gain of N-L over CV, by size: {written(gains, '+.4f')}.",
        verdict(states(gains, strict=True)),
    )


def _process_less(results: Results, column: str) -> Float64Array:
    """Return the log likelihood of the projected process less that of each size, seed by seed."""
    process = _of_process(results, column, likelihood)[:, None]
    return process - likelihoods(results, column, full_model)


def _process(results: Results) -> Claim:
    """Compare the projected process with every size; the two data sets differ in what is said."""
    gains = {column: _process_less(results, column) for column in ("CV", "N-L")}
    listed = "; ".join(f"{written(found, '+.3f')} ({c})" for c, found in gains.items())
    found = f"GPR PP less sub-sampling, by size: {listed}."
    if results.name == "qm9":
        below = [states(-gain, strict=True) for gain in gains.values()]
        return Claim(
            "The GPR estimator is consistently worse, even after scaling.",
            "GPR PP is below every size, CV and N-L",
            found,
            verdict([min(both) for both in zip(*below, strict=True)]),
        )
    return Claim(
        "After rescaling, the GPR PP estimator has a noticeably higher likelihood.",
        f"GPR PP is above every size by {_NOTICEABLE}, CV",
        found,
        verdict(states(gains["CV"] - _NOTICEABLE)),
    )


def _equal(results: Results) -> Claim:
    """Compare both after scaling by a power; in the paper, by 0.27 on QM9 and 0.06 on crystals."""
    less = _process_less(results, "N-L")[:, -1]
    return Claim(
        "Non-linear scaling makes the GPR and the sub-sample estimators more or less equally "
        "reliable."
        if results.name == "qm9"
        else "Non-linear scaling brings sub-sampling close to the level of the GPR PP estimator.",
        f"they differ by at most {_CLOSE} at the largest size, N-L",
        f"GPR PP less sub-sampling: {written(less, '+.3f')}.",
        verdict(states(_CLOSE - np.abs(less))),
    )


def _range(results: Results) -> Claim:
    decades = _by_size(results, lambda s: s.reference["CV"].decades)
    return Claim(
        "Large sub-samples span almost two orders of magnitude in σ.",
        f"99 % of σ span {_ALMOST_TWO} decades or more at the largest size",
        f"They span {written(decades, '.2f')} decades, by size.",
        verdict(states(decades[:, -1] - _ALMOST_TWO)),
    )


def _narrow(results: Results) -> Claim:
    decades = _by_size(results, lambda s: s.reference["N-L"].decades)[:, -1]
    process = _of_process(results, "N-L", lambda p: p.decades)
    return Claim(
        "Even after non-linear scaling, the GPR estimator has a very narrow distribution of σ.",
        "99 % of its σ span at most half as many decades as those of the largest size",
        f"N-L: {written(process, '.2f')} decades, and {written(decades, '.2f')}.",
        verdict(states(_NARROW * decades - process)),
    )


def _rises(column: Column) -> float:
    """Return the share of steps from one bin of σ to the next in which the error grows."""
    return float(np.mean(np.diff([rmse for _, rmse in column.bins]) > 0))


def _monotonic(results: Results) -> Claim:
    shares = _by_size(results, lambda s: _rises(s.reference["CV"]))
    return Claim(
        "Actual errors tend to increase monotonically with σ.",
        "the RMSE rises in eight of nine steps between ten bins of σ",
        f"It rises in {written(shares, '.0%')} of them, by size.",
        verdict(states(shares - _STEPS)),
    )


def _surprises(results: Results) -> Claim:
    shares = _by_size(results, lambda s: s.reference["N-L"].surprises)
    return Claim(
        "Essentially no large error comes with a small σ.",
        f"at most {_SURPRISES:.1%} of the errors are beyond 4σ (N-L)",
        f"Beyond 4σ: {written(shares, '.2%')} by size; a Gaussian has 0.006 %.",
        verdict(states(_SURPRISES - shares)),
    )


def _bootstrap(results: Results) -> Claim:
    """Compare the bootstrap with the size that is best in the mean, seed by seed."""
    gains = {}
    for column, about in (("CV", full_model), ("student", mean_of_members)):
        drawn = [likelihood(about(bootstrap_of(seed))[column]) for seed in results.seeds]
        sizes = likelihoods(results, column, about)
        gains[column] = np.array(drawn) - sizes[:, sizes.mean(axis=0).argmax()]
    listed = ", ".join(f"{written(gain, '+.4f')} ({column})" for column, gain in gains.items())
    ours = verdict(states(_ADVANTAGE - gains["student"]))
    return Claim(
        "Bootstrapping offers no advantage over sub-sampling.",
        f"it is at most {_ADVANTAGE} above the best size, CV",
        f"Bootstrap less the best size: {listed}, the latter about the mean of the members: "
        f"{ours}, there.",
        verdict(states(_ADVANTAGE - gains["CV"])),
    )
