"""How error bars depend on the size of the sub-samples: the paper's tables.

Features, representatives, kernel rows and the full model are computed once; only the members are
solved anew for each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.predicting import stream_chunks
from qualms.atomistic.progress import Stages
from qualms.atomistic.settings import Settings
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import make_training_set, resolved_species
from qualms.core.calibration import Calibration, NoCalibration, calibration_data, fit_calibration
from qualms.core.likelihood import log_likelihood
from qualms.core.typing import Float64Array
from qualms.prediction import Prediction

#: Columns of the paper's tables, and the internal calibrations behind them.
INTERNAL = {"Int.": "linear", "Int. N-L": "power", "student": "student", "shrinkage": "shrinkage"}


@dataclass(frozen=True)
class Study:
    """Mean log likelihoods of test points.

    Attributes
    ----------
    rows : mapping from size to mapping from column to float
        Columns Raw, CV, N-L, Int., Int. N-L, student, shrinkage and GPR PP.
    model : AtomisticModel
        Of the size that the settings ask for.
    """

    rows: Mapping[float, Mapping[str, float]]
    model: AtomisticModel


@dataclass(frozen=True)
class _Rows:
    """Kernel rows of labelled structures, in the units of averages over atoms."""

    K_XM: Float64Array
    design: Float64Array
    k_xx: Float64Array
    y: Float64Array


def study_subsamples(
    train: Sequence[Atoms],
    validation: Sequence[Atoms],
    test: Sequence[Atoms],
    settings: Settings,
    sizes: Sequence[float],
    *,
    resources: Resources | None = None,
    stages: Stages | None = None,
) -> Study:
    """Train members of several sizes and judge every way to calibrate them.

    Parameters
    ----------
    train, validation, test : sequences of Atoms
        All labelled; the validation set serves the columns CV and N-L alone.
    settings : Settings
    sizes : sequence of float or int
        Sub-sample sizes, as fractions or numbers.
    resources : Resources, optional
    stages : Stages, optional
    """
    resources, stages = resources or Resources(), stages or Stages()
    with threadpool_limits(limits=resources.threads):
        return _study(train, validation, test, settings, sizes, resources, stages)


def _study(
    train: Sequence[Atoms],
    validation: Sequence[Atoms],
    test: Sequence[Atoms],
    settings: Settings,
    sizes: Sequence[float],
    resources: Resources,
    stages: Stages,
) -> Study:
    data = make_training_set(train, settings)
    settings = resolved_species(settings, data)
    training = Training(data, settings, resources, stages)
    solver = training.prepare()
    chosen = solver.solve(settings, np.random.default_rng(settings.seed))
    with stages.stage("Kernel rows of test structures"):
        held_out = _rows(chosen.fitted, validation, resources.threads)
        new = _rows(chosen.fitted, test, resources.threads)
    rows: dict[float, dict[str, float]] = {}
    for size in sizes:
        sized = settings.model_copy(update={"subsample": size})
        fitted = solver.solve(sized, np.random.default_rng(settings.seed)).fitted
        rows[size] = _scores(fitted, held_out, new)
    return Study(rows, AtomisticModel.from_outcome(data, chosen, stages))


def _rows(fitted: Fitted, frames: Sequence[Atoms], threads: int) -> _Rows:
    data = make_training_set(frames, fitted.settings)
    K, design, k_xx = [], [], []
    for chunk in stream_chunks(fitted, data.frames, threads=threads):
        K.append(chunk.rows())
        design.append(chunk.design)
        k_xx.append(chunk.prior_variance())
    return _Rows(np.concatenate(K), np.concatenate(design), np.concatenate(k_xx), data.y)


def _scores(fitted: Fitted, held_out: _Rows, new: _Rows) -> dict[str, float]:
    members = fitted.members(new.K_XM, new.design)
    seen = calibration_data(held_out.y, fitted.members(held_out.K_XM, held_out.design))

    def judged(calibration: Calibration) -> float:
        prediction = calibration.apply(Prediction(members))
        return log_likelihood(new.y - prediction.mean, prediction.std)

    scores = {
        "Raw": judged(NoCalibration()),
        "CV": judged(fit_calibration(seen, "linear")),
        "N-L": judged(fit_calibration(seen, "power")),
    }
    for column, method in INTERNAL.items():
        if method in fitted.calibrations:
            scores[column] = judged(fitted.calibrations[method])
    if fitted.pp_variance is not None:
        residuals = new.y - fitted.pp_mean(new.K_XM, new.design)
        scores["GPR PP"] = log_likelihood(residuals, fitted.pp_variance.std(new.K_XM, new.k_xx))
    return scores
