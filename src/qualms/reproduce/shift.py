"""A model far from home: small molecules to large ones, rattled crystals to relaxed ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from qualms.arrays import Float64Array
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import data_hash, species_of, symbols_of
from qualms.atomistic.training import Resources
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import fit_calibration
from qualms.calibration.methods import NoCalibration
from qualms.data import qm9
from qualms.errors import InputError
from qualms.prediction import Prediction
from qualms.progress import Stages
from qualms.reproduce.problems import DIVISORS, Scale, check_characterized
from qualms.reproduce.published import PROCESS
from qualms.reproduce.rattling import displacement
from qualms.reproduce.results import Shift, Shifted, as_column
from qualms.reproduce.study import INTERNAL, VALIDATED, Estimate

#: Of the training set, kept back to see what is usual.
_HELD_OUT = 0.1
#: Molecules of each size that are predicted.
_N_NEW = 5_000
#: Crystals that a small run still takes.
_FEWEST = 20


@dataclass(frozen=True)
class Means:
    """What the work is done with.

    Attributes
    ----------
    resources : Resources
    stages : Stages
    checkpoint : Path
        Directory for what an interrupted training run goes on with; removed when it has ended.
    say : callable
        Tells what has been found.
    """

    resources: Resources
    stages: Stages
    checkpoint: Path
    say: Callable[[str], None]


def qm9_shift(
    source: str | os.PathLike[str],
    scale: Scale,
    settings: Settings,
    means: Means,
    *,
    uncharacterized: str | os.PathLike[str] | None = None,
) -> Shift:
    """Train on molecules of at most seven heavy atoms, predict those of eight and of nine.

    The subset that comes with qualms has few so small: at the small scale eight heavy atoms are
    still for training.

    Parameters
    ----------
    source : str or path
        As `qualms.data.qm9` takes it; all of its molecules.
    scale : {"paper", "small"}
    settings : Settings
        Of the model.
    means : Means
    uncharacterized : str or path, optional
        List of molecules to leave out; the archive must have one.
    """
    check_characterized(source, uncharacterized)
    rng = np.random.default_rng(settings.seed)
    molecules = qm9(source, uncharacterized=uncharacterized)
    heavy = np.array([np.count_nonzero(atoms.numbers > 1) for atoms in molecules])
    largest = 7 if scale == "paper" else 8
    small = rng.permutation(np.flatnonzero(heavy <= largest))
    n_back = int(_HELD_OUT * len(small))
    if n_back < 10:
        raise InputError(
            "data", f"{len(small)} molecules of at most {largest} heavy atoms", "100 or more"
        )
    sets = {f"≤ {largest} heavy atoms, held out": small[:n_back]}
    for n in range(largest + 1, 10):
        of_size = np.flatnonzero(heavy == n)
        sets[f"{n} heavy atoms"] = rng.permutation(of_size)[: _N_NEW // DIVISORS[scale]]
    chosen = {label: [molecules[i] for i in picked] for label, picked in sets.items()}
    trained_on = f"molecules of QM9 of at most {largest} heavy atoms"
    train = [molecules[i] for i in small[n_back:]]
    return _shifted(trained_on, train, chosen, settings, means)


def csd_shift(
    rattled: Sequence[Atoms],
    relaxed: Sequence[Atoms],
    scale: Scale,
    settings: Settings,
    means: Means,
) -> Shift:
    """Train on rattled crystals, predict other crystals, relaxed.

    Parameters
    ----------
    rattled, relaxed : sequences of Atoms
        From `qualms.data.csd`.
    scale : {"paper", "small"}
        The small one takes a tenth of the crystals.
    settings : Settings
        Of the model.
    means : Means
    """
    rng = np.random.default_rng(settings.seed)
    check_relaxed(rattled, relaxed)
    n_rattled = max(len(rattled) // DIVISORS[scale], _FEWEST)
    mixed = [rattled[i] for i in rng.permutation(len(rattled))[:n_rattled]]
    n_back = max(int(_HELD_OUT * len(mixed)), 1)
    train = mixed[n_back:]
    back, others = _with_species_of(train, mixed[:n_back]), _with_species_of(train, relaxed)
    if not back or not others:
        raise InputError(
            "relaxed", "no crystals", "crystals of the elements that the model is trained on"
        )
    n_relaxed = max(len(relaxed) // DIVISORS[scale], _FEWEST)
    new = [others[i] for i in rng.permutation(len(others))[:n_relaxed]]
    sets = {"rattled crystals, held out": back, "relaxed crystals": new}
    found = _shifted("rattled crystals", train, sets, settings, means)
    measured = {"rattled": displacement(rattled), "relaxed": displacement(relaxed)}
    update = {
        "digest": digest_of(relaxed),
        "displacements": {which: value for which, value in measured.items() if value is not None},
    }
    return found.model_copy(update=update)


def is_current(shift: Shift | None) -> bool:
    """Whether there is a study, and not one by an earlier version, which judged less."""
    return shift is not None and shift.n_representatives is not None


def check_relaxed(rattled: Sequence[Atoms], relaxed: Sequence[Atoms]) -> None:
    """Refuse crystals with elements that there is nothing to learn about from."""
    known = species_of(rattled)
    unknown = sorted(set(species_of(relaxed)) - set(known))
    if unknown:
        raise InputError(
            "relaxed",
            f"crystals with {symbols_of(unknown)}",
            f"crystals of the elements of the rattled ones: {symbols_of(known)}",
        )


def digest_of(crystals: Sequence[Atoms]) -> str:
    """Return a digest of crystals and their shieldings."""
    return data_hash(crystals, [atoms.arrays["shielding"] for atoms in crystals])


def _with_species_of(train: Sequence[Atoms], crystals: Sequence[Atoms]) -> list[Atoms]:
    """Return the crystals whose elements a training set has: it may be a part of the data."""
    known = set(species_of(train))
    return [atoms for atoms in crystals if known >= set(atoms.numbers.tolist())]


def _shifted(
    trained_on: str,
    train: Sequence[Atoms],
    sets: Mapping[str, Sequence[Atoms]],
    settings: Settings,
    means: Means,
) -> Shift:
    """Train, and judge all calibrations on each set, of which the first is like the training set.

    The columns CV and N-L need a validation set. It is the first: a test of them are the others.
    """
    started = time.perf_counter()
    model = _trained(train, settings, means)
    found: list[Shifted] = []
    calibrations: dict[str, Calibration] = {}
    for label, frames in sets.items():
        with means.stages.stage(label, len(frames)) as advance:
            predicted = _predicted(model, frames, advance)
        calibrations = calibrations or _calibrations(model, predicted)
        shifted = _judged(label, predicted, calibrations)
        found.append(shifted)
        scores = shifted.columns["student"].scores
        means.say(
            f"{label}: RMSE {scores['rmse']:.4g}, expected {scores['sharpness']:.4g}, within σ "
            f"{scores['coverage_68']:.1%}, flagged {shifted.flagged:.1%}"
        )
    return Shift(
        trained_on=trained_on,
        n_train=model.record.n_rows,
        sets=found,
        seconds=time.perf_counter() - started,
        n_representatives=len(model.fitted.representatives),
        n_members=settings.n_members,
        subsample=settings.subsample,
        representation=settings.representation.model_dump(mode="json"),
    )


def _trained(train: Sequence[Atoms], settings: Settings, means: Means) -> AtomisticModel:
    """Train, going on from what an interrupted run has kept if it can be used."""
    resources = means.resources
    model = AtomisticModel(
        **settings.model_dump(), memory=resources.memory, threads=resources.threads
    )
    means.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    progress = means.stages.display or False
    for resume in (True, False):
        try:
            return model.fit(train, checkpoint=means.checkpoint, resume=resume, progress=progress)
        except InputError as error:
            if error.parameter == "checkpoint":  # no room on the disk
                return model.fit(train, progress=progress)
            if error.parameter != "resume" or not resume:
                raise
            means.say(f"What an interrupted run has kept is not used: {error}")
    raise AssertionError("the second attempt ends one way or the other")


@dataclass(frozen=True)
class _Predicted:
    """Structures of one set: points with labels, and what the model says of them.

    Attributes
    ----------
    y : (n,) array
        Labels.
    members : (n, N_R) array
    mean, std : (n,) arrays
        Of the projected process.
    flagged : float
        Share of the structures that the model calls extrapolation.
    """

    y: Float64Array
    members: Float64Array
    mean: Float64Array
    std: Float64Array
    flagged: float


def _predicted(
    model: AtomisticModel, frames: Sequence[Atoms], advance: Callable[[int], None]
) -> _Predicted:
    """Predict structures in one pass."""
    fitted = model.fitted
    parts: dict[str, list[Any]] = {k: [] for k in ("y", "members", "mean", "std", "flags")}
    done = 0
    for chunk in model.stream(frames):
        novelty = np.empty((len(chunk.frames), 2))
        rows, design = chunk.rows(novelty), chunk.design
        assert fitted.pp_variance is not None, "kept by default"
        parts["y"].append(_labels(fitted.settings.target, chunk.frames, chunk.centers, model))
        parts["members"].append(fitted.members(rows, design))
        parts["mean"].append(fitted.pp_mean(rows, design))
        parts["std"].append(fitted.pp_variance.std(rows, chunk.prior_variance()))
        parts["flags"].append(chunk.extrapolates(chunk.predict(rows), novelty))
        done += len(chunk.frames)
        advance(done)
    whole = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    flagged = float(np.mean(whole.pop("flags")))
    labelled = np.isfinite(whole["y"])
    return _Predicted(**{k: array[labelled] for k, array in whole.items()}, flagged=flagged)


def _calibrations(model: AtomisticModel, home: _Predicted) -> dict[str, Calibration]:
    """Return calibrations of members and of the projected process, by column.

    Parameters
    ----------
    model : AtomisticModel
        Has those that are internal.
    home : _Predicted
        Points like the training set: what the others are fitted to.
    """
    seen = calibration_data(home.y, home.members)
    n = len(home.y)
    # As `qualms.reproduce.study.process_estimate`: a spread that is known, as if of many members.
    process = CalibrationData(home.y - home.mean, home.std, np.full(n, 2), np.ones(n))
    return (
        {"Raw": NoCalibration()}
        | {column: fit_calibration(seen, method) for column, method in VALIDATED.items()}
        | {column: model.fitted.calibrations[method] for column, method in INTERNAL.items()}
        | {PROCESS: NoCalibration()}
        | {f"{PROCESS}, {c}": fit_calibration(process, m) for c, m in VALIDATED.items()}
    )


def _judged(label: str, predicted: _Predicted, calibrations: Mapping[str, Calibration]) -> Shifted:
    """Judge every calibration on one set."""
    y, raw = predicted.y, Prediction(predicted.members)
    columns = {}
    for column, calibration in calibrations.items():
        if column.startswith(PROCESS):
            std = calibration.std(predicted.std, 2)
            estimate = Estimate(y, predicted.mean, std, calibration)
        else:
            p = calibration.apply(raw)
            estimate = Estimate(y, p.mean, p.std, calibration, p.members)
        columns[column] = as_column(estimate)
    return Shifted(
        label=label,
        n=len(y),
        flagged=predicted.flagged,
        bias=float(np.mean(raw.mean - y)),
        columns=columns,
    )


def _labels(
    target: str, frames: Sequence[Atoms], centers: Sequence[Any], model: AtomisticModel
) -> Float64Array:
    if model.fitted.per_atom:
        pairs = zip(frames, centers, strict=True)
        return np.concatenate([atoms.arrays[target][chosen] for atoms, chosen in pairs])
    return np.array([atoms.info[target] for atoms in frames], dtype=np.float64)
