"""What the paper says in words, checked in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from qualms.core.typing import BoolArray, Float64Array
from qualms.reproduce.results import Column, Results, Scheme, Seed

#: What a verdict needs: differences of log likelihoods, decades of σ, shares.
_INSENSITIVE, _NOTICEABLE, _ADVANTAGE = 0.05, 0.05, 0.01
_ALMOST_TWO, _NARROW = 1.7, 0.5
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
    holds : str
        "yes", "no", or "from a quarter on": for all sizes of sub-samples but the smallest.
    """

    says: str
    criterion: str
    found: str
    holds: str


def check_claims(results: Results) -> list[Claim]:
    """Check the sentences of the paper on all seeds of complete results."""
    checks = [_quarter_best, _insensitive, _power_helps, _process, _range]
    checks += [_narrow] if results.name == "qm9" else []
    return [check(results) for check in [*checks, _monotonic, _surprises, _bootstrap]]


def sub_samples(seed: Seed) -> list[Scheme]:
    """Return what was judged of sub-samples, by size."""
    return sorted((s for s in seed.schemes if not s.replace), key=lambda s: s.n)


def likelihoods(seed: Seed, column: str) -> list[float]:
    """Return the log likelihoods of a column, by size of the sub-samples."""
    return [s.columns[column].scores["log_likelihood"] for s in sub_samples(seed)]


def _by_size(results: Results, value: Callable[[Scheme], float]) -> Float64Array:
    """Return the mean over all seeds of what each size has: (n_sizes,)."""
    found = np.array([[value(s) for s in sub_samples(seed)] for seed in results.seeds])
    return np.asarray(found.mean(axis=0), dtype=np.float64)


def _likelihood(results: Results, column: str) -> Float64Array:
    return _by_size(results, lambda s: s.columns[column].scores["log_likelihood"])


def _of_process(results: Results, column: str, value: Callable[[Column], float]) -> float:
    """Return the mean over all seeds of what the projected process has."""
    return float(np.mean([value(seed.process[column]) for seed in results.seeds]))


def _verdict(holds: BoolArray) -> str:
    """Say whether something holds for all sizes, for all but the smallest, or not."""
    if holds.all():
        return "yes"
    return "from a quarter on" if holds[1:].all() else "no"


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(v, form) for v in values)


def _quarter_best(results: Results) -> Claim:
    best = [results.sizes[int(np.argmax(likelihoods(seed, "Raw")))] for seed in results.seeds]
    quarter = results.sizes[1]
    return Claim(
        "Before scaling, sub-samples of a quarter of the training set are best.",
        f"the best raw size is {quarter:,}, with each seed",
        f"Best raw size: {_listed(best, ',')}.",
        "yes" if all(n == quarter for n in best) else "no",
    )


def _insensitive(results: Results) -> Claim:
    scaled = _likelihood(results, "CV")
    ranges = [float(np.ptp(scaled)), float(np.ptp(scaled[1:]))]
    return Claim(
        "After scaling, the log likelihood is insensitive to the sub-sample size.",
        f"CV varies by at most {_INSENSITIVE}",
        f"CV varies by {ranges[0]:.3f}, from a quarter on by {ranges[1]:.3f} (Raw: by "
        f"{np.ptp(_likelihood(results, 'Raw')):.2f}).",
        _verdict(np.array(ranges) <= _INSENSITIVE),
    )


def _power_helps(results: Results) -> Claim:
    gains = _likelihood(results, "N-L") - _likelihood(results, "CV")
    return Claim(
        "A non-linear scaling of the uncertainty improves it further.",
        "N-L is above CV at each size",
        f"Gain of N-L over CV, by size: {_listed(gains, '+.3f')}.",
        _verdict(gains > 0),
    )


def _process(results: Results) -> Claim:
    columns = ("CV", "N-L")
    process = {c: _of_process(results, c, lambda p: p.scores["log_likelihood"]) for c in columns}
    sizes = {c: _likelihood(results, c) for c in columns}
    found = "; ".join(
        f"{c}: GPR PP {process[c]:.3f}, sub-sampling {_listed(sizes[c], '.3f')}" for c in columns
    )
    if results.name == "qm9":
        return Claim(
            "The GPR estimator is consistently worse, even after scaling.",
            "GPR PP is below every size, CV and N-L",
            f"{found}.",
            _verdict(np.all([sizes[c] > process[c] for c in columns], axis=0)),
        )
    return Claim(
        "After rescaling, the GPR PP estimator has a noticeably higher likelihood.",
        f"GPR PP is above every size by {_NOTICEABLE}, CV",
        f"{found}.",
        _verdict(process["CV"] > sizes["CV"] + _NOTICEABLE),
    )


def _range(results: Results) -> Claim:
    decades = _by_size(results, lambda s: s.columns["CV"].decades)
    return Claim(
        "Large sub-samples span almost two orders of magnitude in σ.",
        f"99 % of σ span {_ALMOST_TWO} decades or more at the largest size",
        f"They span {_listed(decades, '.2f')} decades, by size.",
        "yes" if decades[-1] >= _ALMOST_TWO else "no",
    )


def _narrow(results: Results) -> Claim:
    decades = float(_by_size(results, lambda s: s.columns["N-L"].decades)[-1])
    process = _of_process(results, "N-L", lambda p: p.decades)
    return Claim(
        "Even after non-linear scaling, the GPR estimator has a very narrow distribution of σ.",
        "99 % of its σ span at most half as many decades as those of the largest size",
        f"N-L: {process:.2f} decades, and {decades:.2f}.",
        "yes" if process <= _NARROW * decades else "no",
    )


def _rises(column: Column) -> float:
    """Return the share of steps from one bin of σ to the next in which the error grows."""
    return float(np.mean(np.diff([rmse for _, rmse in column.bins]) > 0))


def _monotonic(results: Results) -> Claim:
    shares = _by_size(results, lambda s: _rises(s.columns["CV"]))
    return Claim(
        "Actual errors tend to increase monotonically with σ.",
        "the RMSE rises in eight of nine steps between ten bins of σ",
        f"It rises in {_listed(shares, '.0%')} of them, by size.",
        _verdict(shares >= _STEPS),
    )


def _surprises(results: Results) -> Claim:
    shares = _by_size(results, lambda s: s.columns["N-L"].surprises)
    return Claim(
        "Essentially no large error comes with a small σ.",
        f"at most {_SURPRISES:.1%} of the errors are beyond 4σ (N-L)",
        f"Beyond 4σ: {_listed(shares, '.2%')} by size; a Gaussian has 0.006 %.",
        _verdict(shares <= _SURPRISES),
    )


def _bootstrap(results: Results) -> Claim:
    gains = {}
    for column in ("CV", "student"):
        drawn = [
            s.columns[column].scores["log_likelihood"]
            for seed in results.seeds
            for s in seed.schemes
            if s.replace
        ]
        gains[column] = float(np.mean(drawn) - _likelihood(results, column).max())
    listed = ", ".join(f"{gain:+.3f} ({column})" for column, gain in gains.items())
    return Claim(
        "Bootstrapping offers no advantage over sub-sampling.",
        f"it is at most {_ADVANTAGE} above the best size",
        f"Bootstrap less the best size: {listed}.",
        "yes" if max(gains.values()) <= _ADVANTAGE else "no",
    )
