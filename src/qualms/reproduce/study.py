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

from qualms.arrays import Float64Array
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species
from qualms.atomistic.training import Outcome, Resources, Training
from qualms.atomistic.training_set import make_training_set, resolved_species
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import fit_calibration, fit_internally
from qualms.calibration.methods import NoCalibration
from qualms.features.soap import stream_features
from qualms.gp.ensemble import internal_prediction
from qualms.metrics import Scores, log_likelihood, score_arrays
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Columns of the paper's tables that are fitted to a validation set, and the methods behind them.
VALIDATED = {"CV": "linear", "N-L": "power"}
#: Columns whose calibrations are internal: the paper's, then those beyond it.
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
class HeldOut:
    """Labelled rows that no member has seen, in the units of averages over atoms.

    Attributes
    ----------
    K_XM : (n, r) array
        Kernel rows.
    design : (n, S) array
        Design matrix of the baseline.
    k_xx : (n,) array
        Prior variances.
    y : (n,) array
        Labels.
    """

    K_XM: Float64Array
    design: Float64Array
    k_xx: Float64Array
    y: Float64Array


@dataclass(frozen=True)
class Estimate:
    """Error bars of one estimator for points with labels.

    Attributes
    ----------
    y, mean, std : (n,) arrays
    calibration : Calibration
        That made them.
    members : (n, N_R) array, optional
        After calibration. Without, the estimator is Gaussian.
    """

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    calibration: Calibration
    members: Float64Array | None = None

    @property
    def log_likelihood(self) -> float:
        """Mean log likelihood of the labels, Eq. (6), Musil et al. 2019."""
        return log_likelihood(self.y - self.mean, self.std)

    def scores(self) -> Scores:
        """Return all scores."""
        return score_arrays(self.y, self.mean, self.std, self.members)


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
        data = make_training_set(train, settings)
        settings = resolved_species(settings, data)
        solver = Training(data, settings, resources, stages).prepare()
        chosen = solver.solve(settings, np.random.default_rng(settings.seed))
        with stages.stage("Kernel rows of test structures"):
            held_out = held_out_rows(chosen.fitted, validation, resources.threads)
            new = held_out_rows(chosen.fitted, test, resources.threads)
        rows: dict[float, dict[str, float]] = {}
        for size in sizes:
            sized = settings.model_copy(update={"subsample": size})
            fitted = solver.solve(sized, np.random.default_rng(settings.seed)).fitted
            found = member_estimates(fitted, held_out, new)
            rows[size] = {column: estimate.log_likelihood for column, estimate in found.items()}
            if fitted.pp_variance is not None:
                rows[size]["GPR PP"] = process_estimate(fitted, new).log_likelihood
        return Study(rows, AtomisticModel.from_outcome(data, chosen, stages))


def held_out_rows(fitted: Fitted, frames: Sequence[Atoms], threads: int) -> HeldOut:
    """Compute the kernel rows of what has a label, and of nothing else."""
    data = make_training_set(frames, fitted.settings)
    check_species(data.frames, fitted.representation.species)
    basis = fitted.basis
    K, k_xx = [], []
    structures = zip(data.frames, data.centers, strict=True)
    for batch in stream_features(fitted.representation, structures, n_workers=threads):
        K.append(basis.rows(batch.features, batch.offsets))
        k_xx.append(basis.prior_variance(batch.features, batch.offsets))
    # The columns of the design are the species of the training set.
    design = data.design(per_atom=fitted.per_atom, species=fitted.baseline.species)
    return HeldOut(np.concatenate(K), design, np.concatenate(k_xx), data.y)


def member_estimates(fitted: Fitted, held_out: HeldOut, new: HeldOut) -> dict[str, Estimate]:
    """Return error bars of the members about their mean, by column of the tables.

    Parameters
    ----------
    fitted : Fitted
    held_out : HeldOut
        What the columns CV and N-L are calibrated on.
    new : HeldOut
        What is predicted.
    """
    raw = Prediction(fitted.members(new.K_XM, new.design))
    seen = calibration_data(held_out.y, fitted.members(held_out.K_XM, held_out.design))
    internal = {
        column: fitted.calibrations[m] for column, m in INTERNAL.items() if m in fitted.calibrations
    }
    return _estimates(new.y, raw, _validated(seen) | internal)


def reference_estimates(
    outcome: Outcome, residuals: Float64Array, held_out: HeldOut, new: HeldOut
) -> dict[str, Estimate]:
    """Return error bars of the members about the prediction of the full model: the paper's columns.

    The paper's tables come out again if the spread of the members is put around what it calls the
    reference, the model of all training points, rather than around their mean, y_RS of Eq. (4).
    Members are moved so that it is their mean.

    Parameters
    ----------
    outcome : Outcome
        Members, and the full model.
    residuals : (n,) array
        Of training rows, by the full model without them: `Solver.left_out_residuals`.
    held_out, new : HeldOut
        As in `member_estimates`.
    """
    fitted = outcome.fitted
    seen = calibration_data(held_out.y, _about_reference(fitted, held_out))
    absent = internal_prediction(outcome.predicted, fitted.membership == 0)
    n = int(np.count_nonzero(absent.used))
    within = CalibrationData(residuals[absent.used], absent.std, absent.n_absent, np.ones(n))
    internal = {column: fit_internally(within, INTERNAL[column]) for column in ("Int.", "Int. N-L")}
    return _estimates(new.y, Prediction(_about_reference(fitted, new)), _validated(seen) | internal)


def _about_reference(fitted: Fitted, rows: HeldOut) -> Float64Array:
    """Return members (n, N_R) that are moved, point by point, to have the full model as mean."""
    members = fitted.members(rows.K_XM, rows.design)
    reference = fitted.pp_mean(rows.K_XM, rows.design)
    return np.asarray(members + (reference - members.mean(axis=1))[:, None])


def _validated(seen: CalibrationData) -> dict[str, Calibration]:
    """Return no calibration at all, and those that are fitted to a validation set."""
    raw: dict[str, Calibration] = {"Raw": NoCalibration()}
    return raw | {column: fit_calibration(seen, method) for column, method in VALIDATED.items()}


def _estimates(
    y: Float64Array, raw: Prediction, calibrations: Mapping[str, Calibration]
) -> dict[str, Estimate]:
    estimates = {}
    for column, calibration in calibrations.items():
        found = calibration.apply(raw)
        estimates[column] = Estimate(y, found.mean, found.std, calibration, found.members)
    return estimates


def process_estimate(
    fitted: Fitted, new: HeldOut, held_out: HeldOut | None = None, method: str = "none"
) -> Estimate:
    """Return the error bars of the projected process, Eq. (3), Musil et al. 2019.

    Parameters
    ----------
    fitted : Fitted
        With its variance kept.
    new : HeldOut
        What is predicted.
    held_out : HeldOut, optional
        What error bars are calibrated on: there are no members to do so internally.
    method : {"none", "linear", "power"}
    """
    assert fitted.pp_variance is not None, "asked of models that keep it"
    calibration: Calibration = NoCalibration()
    if held_out is not None:
        residuals = held_out.y - fitted.pp_mean(held_out.K_XM, held_out.design)
        spread = fitted.pp_variance.std(held_out.K_XM, held_out.k_xx)
        n = len(residuals)
        seen = CalibrationData(residuals, spread, np.full(n, 2), np.ones(n))
        calibration = fit_calibration(seen, method)
    mean = fitted.pp_mean(new.K_XM, new.design)
    std = calibration.std(fitted.pp_variance.std(new.K_XM, new.k_xx), 2)
    return Estimate(new.y, mean, std, calibration)
