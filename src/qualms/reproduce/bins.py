"""Where σ is too small or too large, and by how much: errors in bins of σ, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

#: Bins of σ: its root mean square in each, and the root mean squared error there.
Bins = Sequence[tuple[float, float]]
#: By how much σ may be off and is called right all the same; in small bins chance alone does more.
_RIGHT = 0.10


@dataclass(frozen=True)
class Worst:
    """The bin where σ is furthest from right.

    Attributes
    ----------
    factor : float
        By which σ is too small, or too large.
    bin, of : int
        Its number, from 1, and how many bins there are.
    sigma : float
        σ in it.
    """

    factor: float
    bin: int
    of: int
    sigma: float

    def describe(self, units: str) -> str:
        """Say by which factor, and where."""
        where = f"bin {self.bin} of {self.of}, σ {self.sigma:.2g} {units}"
        return f"{self.factor:.2f} {_place(self.bin, self.bin, self.of)} ({where})"


@dataclass(frozen=True)
class Stretch:
    """Neighbouring bins in which σ is too small, or too large.

    Attributes
    ----------
    first, last, of : int
        Numbers of the bins, from 1, and how many there are.
    sigmas : (float, float)
        σ in the first and in the last of them.
    factors : (float, float)
        By which σ is too small, or too large: the least and the most; both above 1.
    worst : Worst
        The bin of the largest factor.
    """

    first: int
    last: int
    of: int
    sigmas: tuple[float, float]
    factors: tuple[float, float]
    worst: Worst

    def describe(self, units: str = "") -> str:
        """Say by which factor, and in which bins."""
        place = _place(self.first, self.last, self.of)
        return f"{_range(*self.factors, '.2f')} {place} ({self.bins(units)})"

    def short(self) -> str:
        """Say the same in a table."""
        return f"{_range(*self.factors, '.2f', '–')} ({self.bins(to='–')})"

    def bins(self, units: str = "", to: str = " to ") -> str:
        """Name the bins and their σ."""
        numbers = f"bins {self.first}–{self.last}" if self.last > self.first else f"bin {self.last}"
        return f"{numbers}, σ {_range(*self.sigmas, '.2g', to)} {units}".strip()


@dataclass(frozen=True)
class Adequacy:
    """Where error bars are not right.

    Attributes
    ----------
    too_small, too_large : list of Stretch
        The worst first.
    tolerance : float
        By how much σ may be off and is called right.
    """

    too_small: list[Stretch]
    too_large: list[Stretch]
    tolerance: float

    def describe(self, units: str) -> str:
        """Say where σ is too small and too large, and by how much."""
        kinds = {"too small": self.too_small, "too large": self.too_large}
        found = [
            f"{kind} by a factor of {_worst(stretches, units)}"
            for kind, stretches in kinds.items()
            if stretches
        ]
        if not found:
            return f"σ is right, within {self.tolerance:.0%}, in all bins"
        wrong = sum(s.last - s.first + 1 for s in (*self.too_small, *self.too_large))
        of = (*self.too_small, *self.too_large)[0].of
        rest = f"; elsewhere it is right within {self.tolerance:.0%}" if wrong < of else ""
        return f"σ is {'; it is '.join(found)}{rest}"


def adequacy(bins: Bins, n: int) -> Adequacy:
    """Compare errors with error bars.

    Parameters
    ----------
    bins : sequence of (float, float)
        Root mean predicted variance and root mean squared error, by rising σ.
    n : int
        Points in all of them.
    """
    tolerance = max(_RIGHT, _chance(n, len(bins)))
    factors = ratios(bins)
    verdicts = (factors > 1 + tolerance).astype(int) - (1 / factors > 1 + tolerance).astype(int)
    small: list[Stretch] = []
    large: list[Stretch] = []
    for verdict, group in groupby(range(len(bins)), key=lambda i: verdicts[i]):
        if verdict:
            which = list(group)
            off = factors[which] ** verdict
            i = which[int(off.argmax())]
            stretch = Stretch(
                first=which[0] + 1,
                last=which[-1] + 1,
                of=len(bins),
                sigmas=(bins[which[0]][0], bins[which[-1]][0]),
                factors=(float(off.min()), float(off.max())),
                worst=Worst(float(off.max()), i + 1, len(bins), bins[i][0]),
            )
            (small if verdict > 0 else large).append(stretch)
    for stretches in (small, large):
        stretches.sort(key=lambda stretch: -stretch.worst.factor)
    return Adequacy(small, large, tolerance)


def ratios(bins: Bins) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return errors over error bars; above 1, σ is too small."""
    sigma, rmse = np.maximum(np.array(bins, dtype=np.float64).T, np.finfo(np.float64).tiny)
    return np.asarray(rmse / sigma)


def mean_bins(several: Sequence[Bins]) -> Bins:
    """Return bins over several seeds: root mean squares of those that have as many as the first."""
    alike = [bins for bins in several if len(bins) == len(several[0])]
    mean = np.sqrt(np.mean(np.square(alike), axis=0))
    return [(float(sigma), float(rmse)) for sigma, rmse in mean]


def _chance(n: int, n_bins: int) -> float:
    """Return what three standard errors make of the RMSE of a bin, of independent Gaussian errors.

    They are those of its logarithm, so that too small and too large are judged alike. With two, two
    in five sets of ten bins would have one that is wrong by chance.
    """
    return float(np.expm1(3.0 / np.sqrt(2.0 * max(n / n_bins, 1.0))))


def _place(first: int, last: int, of: int) -> str:
    """Say where bins are among all."""
    if first == 1 and last == of:
        return "everywhere"
    if last == of:
        return "where it is largest"
    return "where it is smallest" if first == 1 else "in between"


def _range(low: float, high: float, digits: str, to: str = " to ") -> str:
    first, last = f"{low:{digits}}", f"{high:{digits}}"
    return first if first == last else f"{first}{to}{last}"


def _worst(stretches: Sequence[Stretch], units: str) -> str:
    """Describe the two worst, and say how many bins more there are."""
    texts = [stretch.describe(units) for stretch in stretches[:2]]
    others = stretches[2:]
    if others:
        n = sum(stretch.last - stretch.first + 1 for stretch in others)
        texts.append(f"up to {others[0].worst.factor:.2f} in {n} more")
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
