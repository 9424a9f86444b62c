"""Models far from home, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qualms.reproduce.bins import Worst, adequacy, ratios
from qualms.reproduce.facts import described
from qualms.reproduce.markdown import figure, markdown_table, minus
from qualms.reproduce.published import PROCESS
from qualms.reproduce.results import Column, Results, Shift, Shifted
from qualms.reproduce.study import VALIDATED
from qualms.reproduce.survival import best_coverage, calibrations, survival_words
from qualms.reproduce.texts import CAPTIONS, RATTLED, RATTLED_CONTROL, RATTLING_UNKNOWN, SHIFT

#: The calibration that the words are about: what a model uses if nothing else is said.
_DEFAULT = "student"
#: Columns that are fitted to the first set.
_FITTED = (*VALIDATED, *(f"{PROCESS}, {column}" for column in VALIDATED))
#: What the models are about, and what members are sub-samples of, by the beginning of a name.
_HEADINGS = {
    "qm9": "QM9: from small molecules to larger ones",
    "csd": "¹H shieldings: from rattled crystals (CSD-1000R) to relaxed ones (CSD-2k)",
}
_STILL = "**Where calibrated σ is still too small.** By the worst bins of each set:\n"
_SAMPLED = {"qm9": "molecules", "csd": "crystals"}


def shift_parts(found: Sequence[Results], figures: str) -> list[str]:
    """Return the section, for all results that have a model far from home.

    Parameters
    ----------
    found : sequence of Results
    figures : str
        Where the figures are, seen from the page.
    """
    studies = _studies(found)
    if not studies:
        return []
    shifts = [shift for _, shift in studies]
    parts = [
        SHIFT,
        _still_too_small(studies),
        survival_words([found for shift in shifts for found in shift.sets[1:]]),
    ]
    for results, shift in studies:
        heading = _HEADINGS[_data(results)]
        caption = CAPTIONS["shift"].format(title=heading)
        parts += [
            f"### {heading}",
            _model(shift, _SAMPLED[_data(results)]),
            *(_in_words(s, shift.sets[0], results.units) for s in shift.sets),
            _table(shift, results.units),
            figure(f"{figures}{results.name}-shift.png", caption),
        ]
    return parts


def rattling(found: Sequence[Results]) -> str:
    """Say how far rattled crystals are from where they were, if that was measured."""
    measured = [s.displacements for _, s in _studies(found) if "rattled" in s.displacements]
    if not measured:
        return RATTLING_UNKNOWN.strip()
    rattled = measured[0]["rattled"]
    text = RATTLED.format(**rattled.model_dump(), atom=3**0.5 * rattled.rms).strip()
    if "relaxed" in measured[0]:
        control = RATTLED_CONTROL.format(**measured[0]["relaxed"].model_dump())
        text += f"\n  {control.strip()}"
    return text


def _data(results: Results) -> str:
    return results.name.split("-")[0]


def _studies(found: Sequence[Results]) -> list[tuple[Results, Shift]]:
    """Return one study of each kind of data: of crystals it is the same whatever was divided."""
    chosen: dict[str, tuple[Results, Shift]] = {}
    for results in found:
        shift, before = results.shift, chosen.get(_data(results))
        if shift is None:
            continue
        # Those of an earlier version depended on the division, and judged less.
        if before is None or before[1].n_representatives is None:
            chosen[_data(results)] = (results, shift)
    return list(chosen.values())


def _model(shift: Shift, sampled: str) -> str:
    """Say what the model is."""
    text = f"Trained on {shift.n_train:,} labels of {shift.trained_on}"
    if shift.n_representatives is None:
        return f"{text}; its number of representatives was not recorded."
    text += f", with {shift.n_representatives:,} representatives"
    if shift.n_members is not None and shift.subsample is not None:
        text += f" and {shift.n_members} members, sub-samples of {_size(shift.subsample)} {sampled}"
    text += "." if not shift.source else f". The relaxed crystals are those of {shift.source}."
    return f"{text} {described(shift.representation)}" if shift.representation else text


def _size(subsample: float) -> str:
    if subsample >= 1:
        return f"{subsample:,.0f}"
    return "one half of the" if subsample == 0.5 else f"{subsample:.0%} of the"


def _still_too_small(studies: Sequence[tuple[Results, Shift]]) -> str:
    """Say plainly where calibrated σ is too small at worst, and by how much, set by set."""
    texts = []
    for results, shift in studies:
        sets = shift.sets[1:]
        found = [_worst_of_set(s, calibrations(sets), results.units) for s in sets]
        if found:
            texts.append(f"Trained on {shift.trained_on}, σ is too small {'; '.join(found)}.")
    return "\n".join([_STILL, *(f"- {text}" for text in texts)]) if texts else ""


def _worst_of_set(found: Shifted, names: Sequence[str], units: str) -> str:
    """Say by which factor σ is too small in the worst bin, by default and with all the others."""
    worst = {name: _worst(found, name) for name in names}
    default = worst.pop(_DEFAULT)
    text = "nowhere" if default is None else f"by a factor of {default.describe(units)}"
    text = f"for {found.label} {text} with {_DEFAULT}"
    if not worst:
        return text
    factors = {name: 1.0 if w is None else w.factor for name, w in worst.items()}
    ordered = sorted(factors, key=factors.__getitem__)
    ends = [
        f"{name}, {'nowhere' if worst[name] is None else f'{factors[name]:.2f}'}"
        for name in dict.fromkeys((ordered[0], ordered[-1]))
    ]
    return f"{text} (others: {' to '.join(ends)})"


def _worst(found: Shifted, column: str) -> Worst | None:
    too_small = adequacy(found.columns[column].bins, found.n).too_small
    return too_small[0].worst if too_small else None


def _in_words(found: Shifted, home: Shifted, units: str) -> str:
    """Say plainly where σ is too small, and by how much."""
    column = found.columns[_DEFAULT]
    scores = column.scores
    text = (
        f"**{found.label}** ({found.n:,} points): RMSE {scores['rmse']:.4g} {units} (bias "
        f"{found.bias:+.3g}), σ {scores['sharpness']:.4g} in the root mean square, {_DEFAULT}. "
        f"By bins, {adequacy(column.bins, found.n).describe(units)}. "
        f"{scores['coverage_68']:.0%} of the errors are within the 68 % interval and "
        f"{scores['coverage_95']:.0%} within the 95 % interval; their rank correlation with σ is "
        f"{scores['spearman']:.2f}. The model itself calls {found.flagged:.0%} of the structures "
        "extrapolation. "
    )
    if "shrinkage" in found.columns:
        bins = found.columns["shrinkage"].bins
        text += f"With shrinkage, {adequacy(bins, found.n).describe(units)}. "
    if found is not home:
        before = home.columns[_DEFAULT].scores
        text += (
            f"Compared with what is like its training set, its error has grown "
            f"{scores['rmse'] / before['rmse']:.1f} times and σ "
            f"{scores['sharpness'] / before['sharpness']:.1f} times. "
        )
    return minus(text + _best(found, _FITTED if found is home else ()))


def _best(found: Shifted, left_out: Sequence[str]) -> str:
    """Say which calibrations are best here; those that were fitted to this set are left out."""
    columns = {name: c for name, c in found.columns.items() if name not in left_out}
    scores = {name: column.scores for name, column in columns.items()}
    likely = max(scores, key=lambda name: scores[name]["log_likelihood"])
    covering = best_coverage([found], list(scores))
    return (
        f"The calibration with the highest log likelihood is {likely} "
        f"({scores[likely]['log_likelihood']:.3f}; {_DEFAULT} "
        f"{scores[_DEFAULT]['log_likelihood']:.3f}), the one with the best coverage {covering} "
        f"({scores[covering]['coverage_68']:.0%} within 68 %, "
        f"{scores[covering]['coverage_95']:.0%} within 95 %)."
    )


def _table(shift: Shift, units: str) -> str:
    head = ["set", "error bars", f"RMSE, {units}", f"RMS σ, {units}", "log likelihood"]
    head += ["within 68 %", "within 95 %", "RMSE/σ: smallest σ, median bin, largest σ"]
    rows = []
    for i, found in enumerate(shift.sets):
        for name, column in found.columns.items():
            s = column.scores
            cells = [f"{s['rmse']:.4g}", f"{s['sharpness']:.4g}", f"{s['log_likelihood']:.3f}"]
            coverage = [f"{s['coverage_68']:.1%}", f"{s['coverage_95']:.1%}"]
            label = _label(name, fitted_here=i == 0)
            rows.append([found.label, label, *map(minus, cells), *coverage, _by_bin(column)])
    return markdown_table(head, rows)


def _label(name: str, *, fitted_here: bool) -> str:
    if name == PROCESS:
        return f"{name}, not scaled"
    return f"{name} (fitted to this set)" if fitted_here and name in _FITTED else name


def _by_bin(column: Column) -> str:
    factors = ratios(column.bins)
    return f"{factors[0]:.2f}, {np.median(factors):.2f}, {factors[-1]:.2f}"
