"""Which calibration survives a shift, by log likelihood and by coverage."""

from __future__ import annotations

from collections.abc import Sequence

from qualms.reproduce.markdown import minus
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Shifted

#: What intervals should hold, and how far from that they may be and have survived.
_INTERVALS = {"coverage_68": (0.68, 0.05), "coverage_95": (0.95, 0.03)}
#: Error bars as they are: not calibrated.
_NOT_CALIBRATED = ("Raw", PROCESS)
_CRITERION = (
    "A calibration is said to survive if, on every set, its 68 % intervals hold 63 to 73 % of the "
    "errors and its 95 % intervals 92 to 98 %; in single bins of σ it may be wrong all the same."
)


def survivors(sets: Sequence[Shifted]) -> list[str]:
    """Return the calibrations whose intervals hold what they should on all sets."""
    return [
        name
        for name in calibrations(sets)
        if all(
            abs(found.columns[name].scores[interval] - target) <= reach
            for found in sets
            for interval, (target, reach) in _INTERVALS.items()
        )
    ]


def survival_words(sets: Sequence[Shifted]) -> str:
    """Say which calibration survives on sets, of any models, that are not like training sets."""
    if not calibrations(sets):
        return ""
    each = [f"{_listed(survivors([found])) or 'none'} on {found.label}" for found in sets]
    surviving = survivors(sets)
    verdict = f"{_listed(surviving) or 'None'} survive{'' if len(surviving) > 1 else 's'}"
    verdict += " on all of them" if len(sets) > 1 else ""
    verdict += f" ({'; '.join(each)})" if len(sets) > 1 else ""
    return minus(
        f"**Which calibration survives.** {_CRITERION} {verdict}. {_by_likelihood(sets)} "
        f"{_by_coverage(sets)}"
    )


def calibrations(sets: Sequence[Shifted]) -> list[str]:
    """Return the calibrations that all sets have."""
    names = list(sets[0].columns) if sets else []
    shared = [name for name in names if all(name in found.columns for found in sets)]
    return [name for name in shared if name not in _NOT_CALIBRATED]


def _by_likelihood(sets: Sequence[Shifted]) -> str:
    """Name the calibration that is never far below the best of a set."""
    names = calibrations(sets)
    below = dict.fromkeys(names, 0.0)
    for found in sets:
        values = {name: found.columns[name].scores["log_likelihood"] for name in names}
        best = max(values.values())
        below = {name: max(below[name], best - values[name]) for name in names}
    ordered = sorted(names, key=lambda name: below[name])
    others = ", ".join(f"{name} {below[name]:.2f}" for name in ordered[1:])
    text = f"By log likelihood, {ordered[0]} loses least: at most {below[ordered[0]]:.2f} below "
    return f"{text}the best of each set" + (f" ({others})." if others else ".")


def best_coverage(sets: Sequence[Shifted], names: Sequence[str]) -> str:
    """Return the error bars whose intervals are nearest to what they should hold, 68 and 95 %."""
    off = {
        name: max(
            abs(found.columns[name].scores[interval] - target) / reach
            for found in sets
            for interval, (target, reach) in _INTERVALS.items()
        )
        for name in names
    }
    return min(off, key=lambda name: off[name])


def _by_coverage(sets: Sequence[Shifted]) -> str:
    """Name the calibration whose intervals are nearest to what they should hold."""
    nearest = best_coverage(sets, calibrations(sets))
    ranges = []
    for interval, (target, _) in _INTERVALS.items():
        values = [found.columns[nearest].scores[interval] for found in sets]
        low, high = f"{min(values):.0%}", f"{max(values):.0%}"
        held = low if low == high else f"{low} to {high}"
        ranges.append(f"its {target:.0%} intervals hold {held}")
    return f"By coverage, {nearest} is nearest: {' and '.join(ranges)} of the errors."


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
