"""Models far from home, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qualms.reproduce.markdown import figure, markdown_table, minus
from qualms.reproduce.results import Results, Shift, Shifted
from qualms.reproduce.texts import CAPTIONS, SHIFT

#: The calibration that the words are about: what a model uses if nothing else is said.
_DEFAULT = "student"
_ONE_SIGMA = 0.68
#: Factors between errors and error bars that are called right.
_RIGHT = (0.9, 1.1)


def shift_parts(found: Sequence[Results], figures: str) -> list[str]:
    """Return the section, for all results that have a model far from home.

    Parameters
    ----------
    found : sequence of Results
    figures : str
        Where the figures are, seen from the page.
    """
    shifted = [(results, results.shift) for results in found if results.shift is not None]
    parts = [SHIFT] if shifted else []
    for results, shift in shifted:
        caption = CAPTIONS["shift"].format(title=results.title)
        parts += [
            f"### {results.title}",
            f"Trained on {shift.n_train:,} labels of {shift.trained_on}.",
            *(_in_words(s, shift.sets[0], results.units) for s in shift.sets),
            _table(shift, results.units),
            figure(f"{figures}{results.name}-shift.png", caption),
        ]
    return parts


def _in_words(found: Shifted, home: Shifted, units: str) -> str:
    """Say plainly where σ is too small, and by how much."""
    column = found.columns[_DEFAULT]
    scores = column.scores
    typical = float(np.median([rmse / sigma for sigma, rmse in column.bins]))
    overall = scores["rmse"] / scores["sharpness"]
    text = (
        f"**{found.label}** ({found.n:,} points): RMSE {scores['rmse']:.4g} {units} (bias "
        f"{found.bias:+.3g}), σ {scores['sharpness']:.4g}. Typically, in the middle of ten bins of "
        f"σ, {_factor(typical)}; in the root mean square, which a few large errors or error bars "
        f"decide, {_factor(overall)}. {scores['coverage_68']:.0%} of the errors are within the "
        f"68 % interval, and their rank correlation with σ is {scores['spearman']:.2f}. The model "
        f"itself calls {found.flagged:.0%} of the structures extrapolation. "
    )
    if found is not home:
        before = home.columns[_DEFAULT].scores
        text += (
            f"Compared with what is like its training set, its error has grown "
            f"{scores['rmse'] / before['rmse']:.1f} times and σ "
            f"{scores['sharpness'] / before['sharpness']:.1f} times. "
        )
    return minus(text + _survivors(found))


def _factor(ratio: float) -> str:
    """Say how errors compare with their error bars."""
    low, high = _RIGHT
    if ratio > high:
        return f"σ is too small by a factor of {ratio:.2f}"
    return f"σ is too large by a factor of {1 / ratio:.2f}" if ratio < low else "σ is right"


def _survivors(found: Shifted) -> str:
    """Say which calibrations are best here."""
    scores = {name: column.scores for name, column in found.columns.items()}
    likely = max(scores, key=lambda name: scores[name]["log_likelihood"])
    covering = min(scores, key=lambda name: abs(scores[name]["coverage_68"] - _ONE_SIGMA))
    return (
        f"The calibration with the highest log likelihood is {likely} "
        f"({scores[likely]['log_likelihood']:.3f}; {_DEFAULT} "
        f"{scores[_DEFAULT]['log_likelihood']:.3f}), the one with the best coverage {covering} "
        f"({scores[covering]['coverage_68']:.0%} within 68 %)."
    )


def _table(shift: Shift, units: str) -> str:
    head = ["set", "error bars", f"RMSE, {units}", f"RMS σ, {units}", "log likelihood"]
    rows = []
    for found in shift.sets:
        for name, column in found.columns.items():
            s = column.scores
            # Without members there is nothing to calibrate the projected process on internally.
            label = f"{name}, not scaled" if column.alpha == 1 and name != "Raw" else name
            cells = [f"{s['rmse']:.4g}", f"{s['sharpness']:.4g}", f"{s['log_likelihood']:.3f}"]
            coverage = [f"{s['coverage_68']:.1%}", f"{s['coverage_95']:.1%}"]
            rows.append([found.label, label, *map(minus, cells), *coverage])
    return markdown_table([*head, "within 68 %", "within 95 %"], rows)
