"""Uncertainties of ensembles of several sub-sample sizes, with every calibration of the paper.

Features, representatives, kernel rows and the full model are computed once per split of the data.
Only the ensemble members are solved again for each sub-sample size.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.labels import collect_labels
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species
from qualms.atomistic.training import (
    Trained,
    compute_rows,
    draw_ensemble,
    fit_ensemble,
    fit_sparse_gp,
)
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import fit_calibration, fit_internally, internal_points
from qualms.calibration.methods import NoCalibration
from qualms.features.soap import stream_features
from qualms.gp.ensemble import internal_prediction
from qualms.metrics import binned_errors, log_likelihood, score_arrays
from qualms.prediction import Prediction
from qualms.progress import Stages
from qualms.reproduce.problems import Problem, ShiftedProblem
from qualms.reproduce.results import (
    EnsembleResult,
    EstimatorResult,
    SeedResult,
    ShiftedSet,
    ShiftResult,
)

#: Columns of the paper's tables, with the methods that are fitted to a validation set, and those
#: that are fitted to out-of-bag points (ours are student and shrinkage).
VALIDATED = {"CV": "linear", "N-L": "power"}
OUT_OF_BAG = {"Int.": "linear", "Int. N-L": "power", "student": "student", "shrinkage": "shrinkage"}
#: The projected process, Eq. (3), as a row of the tables.
PROCESS = "GPR PP"
_N_BINS = 10


# --- adapter: all that is used of the training pipeline ---


@dataclass(frozen=True)
class Points:
    """Labelled points outside the training set; totals are divided by the number of atoms.

    Attributes
    ----------
    K_XM : (n, r) array
    design : (n, S) array
        Design matrix of the baseline.
    k_xx : (n,) array
        Prior variances.
    y : (n,) array
    """

    K_XM: Float64Array
    design: Float64Array
    k_xx: Float64Array
    y: Float64Array


@dataclass(frozen=True)
class Subsampled:
    """The full model and an ensemble of one sub-sample size.

    Attributes
    ----------
    training_members : (N, N_R) array
        Uncalibrated predictions of the training points.
    absent : (N, N_R) array of bool
        Whether a training point is absent from a member.
    out_of_bag : CalibrationData, optional
        Residuals and standard deviations of the out-of-bag points.
    calibrations : mapping of str to Calibration
        Out-of-bag calibrations by method.
    """

    _fitted: Fitted
    training_members: Float64Array
    absent: BoolArray
    out_of_bag: CalibrationData | None
    calibrations: Mapping[str, Calibration]

    def members(self, points: Points) -> Float64Array:
        """Return uncalibrated predictions (n, N_R)."""
        return self._fitted.members(points.K_XM, points.design)

    def full_mean(self, points: Points) -> Float64Array:
        """Return predictions (n,) of the full model."""
        return self._fitted.pp_mean(points.K_XM, points.design)

    def full_std(self, points: Points) -> Float64Array:
        """Return σ_PP (n,) of the full model, Eq. (3), Musil et al. 2019."""
        assert self._fitted.pp_variance is not None, "settings keep it"
        return self._fitted.pp_variance.std(points.K_XM, points.k_xx)


class TrainedOnce:
    """Features, representatives, kernel rows and full model of one training set."""

    def __init__(
        self,
        train: Sequence[Atoms],
        settings: Settings,
        *,
        threads: int = 1,
        memory: str | float | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.stages = stages or Stages()
        self.threads = threads
        self.data = collect_labels(train, settings)
        self.settings = self.data.settings
        baseline = draw_ensemble(self.data).baseline
        rows = compute_rows(self.data, memory=memory, threads=threads, stages=self.stages)
        self._gp = fit_sparse_gp(rows, self.data, baseline, self.stages)
        self.n_representatives = len(rows.origins)
        self.noise = float(self._gp.noise["energy"] ** 0.5)

    def ensemble(self, subsample: float, *, with_replacement: bool = False) -> Subsampled:
        """Draw and solve the members of one sub-sample size, and calibrate them out of bag."""
        fitted, out_of_bag = self._solve(subsample, with_replacement)
        rows = self._gp.rows
        # Weights of the whitened kernel rows: the inverse of `Whitening.kernel_weights`.
        members = rows.Phi @ (rows.whitening.factor.T @ fitted.weights) + fitted.intercepts
        members += fitted.baseline.predict_members(self.data.design_for(fitted.baseline.species))
        absent, calibrations = fitted.membership == 0, fitted.calibrations["energy"]
        return Subsampled(fitted, members, absent, out_of_bag.get("energy"), calibrations)

    def leave_one_out_residuals(self) -> Float64Array:
        """Return the residuals (N,) of the full model without each point, or without its group."""
        grouped = self.settings.resample != "atoms"
        return self._gp.left_out_residuals(self.data.row_groups if grouped else None)

    def points(self, frames: Sequence[Atoms], name: str) -> Points:
        """Compute the kernel rows of the labelled points of further structures."""
        rows, data = self._gp.rows, collect_labels(frames, self.settings)
        check_species(data.frames, rows.representation.species)
        K, k_xx = [], []
        structures = zip(data.frames, data.centers, strict=True)
        with self.stages.stage(f"Kernel rows of the {name} set"):
            for batch in stream_features(rows.representation, structures, n_workers=self.threads):
                K.append(rows.basis.rows(batch.features, batch.offsets))
                k_xx.append(rows.basis.prior_variance(batch.features, batch.offsets))
        design = data.design_for(self.data.species)
        return Points(np.concatenate(K), design, np.concatenate(k_xx), data.y)

    def model(self) -> AtomisticModel:
        """Return the model with the sub-sample size of the settings."""
        trained = self._solve(self.settings.subsample, self.settings.replace)
        return AtomisticModel.from_fitted(trained.fitted, threads=self.threads)

    def _solve(self, subsample: float, with_replacement: bool) -> Trained:
        update = {"subsample": subsample, "replace": with_replacement}
        data = replace(self.data, settings=self.settings.model_copy(update=update))
        return fit_ensemble(self._gp, data, draw_ensemble(data), self.stages)


# --- estimators ---


@dataclass(frozen=True)
class Estimate:
    """Predictions of labelled points by one estimator: (n,) arrays, and members (n, N_R) if any."""

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    calibration: Calibration
    members: Float64Array | None = None

    @property
    def log_likelihood(self) -> float:
        """Mean log likelihood of the reference values, Eq. (6), Musil et al. 2019."""
        return log_likelihood(self.y - self.mean, self.std)

    def result(self) -> EstimatorResult:
        """Return all scores."""
        z = self.y - self.mean
        low, high = np.quantile(self.std, [0.005, 0.995])
        bins = binned_errors(z, self.std, _N_BINS)
        scores = score_arrays(self.y, self.mean, self.std, self.members).as_dict()
        return EstimatorResult(
            scores={name: value for name, value in scores.items() if value is not None},
            alpha=self.calibration.alpha,
            gamma=self.calibration.gamma,
            decades=float(np.log10(high / low)),
            bins=list(zip(bins.rmv.tolist(), bins.rmse.tolist(), strict=True)),
            beyond_4_sigma=float(np.mean(np.abs(z) > 4 * self.std)),
        )


def ensemble_mean_estimates(
    ensemble: Subsampled, validation: Points, test: Points
) -> dict[str, Estimate]:
    """Return estimates of the test points that are centred on the ensemble mean, by column."""
    seen = calibration_data(validation.y, ensemble.members(validation))
    out_of_bag = {
        column: ensemble.calibrations[method]
        for column, method in OUT_OF_BAG.items()
        if method in ensemble.calibrations
    }
    return _of_members(test.y, ensemble.members(test), _validated(seen) | out_of_bag)


def full_model_estimates(
    ensemble: Subsampled, loo_residuals: Float64Array, validation: Points, test: Points
) -> dict[str, Estimate]:
    """Return estimates of the test points that are centred on the full model, by column.

    The paper's numbers are obtained this way. Members are shifted, point by point, so that their
    mean is the prediction of the full model. Out of bag, residuals are those of leave-one-out.

    Parameters
    ----------
    ensemble : Subsampled
    loo_residuals : (N,) array
        `TrainedOnce.leave_one_out_residuals`.
    validation, test : Points
    """
    seen = calibration_data(validation.y, _shifted_members(ensemble, validation))
    absent = internal_prediction(ensemble.training_members, ensemble.absent)
    data = CalibrationData(
        loo_residuals[absent.used], absent.std, absent.n_absent, np.ones(len(absent.std))
    )
    out_of_bag = {
        column: fit_internally(data, OUT_OF_BAG[column]) for column in ("Int.", "Int. N-L")
    }
    return _of_members(test.y, _shifted_members(ensemble, test), _validated(seen) | out_of_bag)


def projected_process_estimates(
    ensemble: Subsampled, validation: Points, test: Points
) -> dict[str, Estimate]:
    """Return estimates of the test points by the projected process, Eq. (3), by column."""
    residuals = validation.y - ensemble.full_mean(validation)
    calibrations = _gaussian_calibrations(residuals, ensemble.full_std(validation))
    mean, std = ensemble.full_mean(test), ensemble.full_std(test)
    return {c: Estimate(test.y, mean, k.std(std, 2), k) for c, k in calibrations.items()}


def _shifted_members(ensemble: Subsampled, points: Points) -> Float64Array:
    members = ensemble.members(points)
    shift = ensemble.full_mean(points) - members.mean(axis=1)
    return np.asarray(members + shift[:, None])


def _validated(seen: CalibrationData) -> dict[str, Calibration]:
    """Return no calibration, and those that are fitted to a validation set."""
    raw: dict[str, Calibration] = {"Raw": NoCalibration()}
    return raw | {column: fit_calibration(seen, method) for column, method in VALIDATED.items()}


def _gaussian_calibrations(residuals: Float64Array, std: Float64Array) -> dict[str, Calibration]:
    """Return calibrations of an estimator without members; linear and power ignore their number."""
    n = len(residuals)
    return _validated(CalibrationData(residuals, std, np.full(n, 2), np.ones(n)))


def _of_members(
    y: Float64Array, members: Float64Array, calibrations: Mapping[str, Calibration]
) -> dict[str, Estimate]:
    raw, estimates = Prediction(members), {}
    for column, calibration in calibrations.items():
        found = calibration.apply(raw)
        estimates[column] = Estimate(y, found.mean, found.std, calibration, found.members)
    return estimates


def _student_t(estimates: Mapping[str, Estimate]) -> float:
    """Return the mean log likelihood under the t density of the student calibration."""
    raw, calibration = estimates["Raw"], estimates["student"].calibration
    assert raw.members is not None, "estimates of members have them"
    densities = calibration.log_density(raw.y - raw.mean, raw.std, raw.members.shape[1])
    return float(np.mean(densities))


# --- studies ---


@dataclass(frozen=True)
class Study:
    """Mean log likelihoods of the test points, centred on the ensemble mean.

    Attributes
    ----------
    rows : mapping from size to mapping from column to float
        Columns Raw, CV, N-L, Int., Int. N-L, student, shrinkage and GPR PP.
    model : AtomisticModel
        The model with the sub-sample size of the settings.
    """

    rows: Mapping[float, Mapping[str, float]]
    model: AtomisticModel


def study_subsamples(
    train: Sequence[Atoms],
    validation: Sequence[Atoms],
    test: Sequence[Atoms],
    settings: Settings,
    sizes: Sequence[float],
    *,
    threads: int = 1,
    memory: str | float | None = None,
    stages: Stages | None = None,
) -> Study:
    """Train ensembles of several sub-sample sizes and compare all calibrations.

    Parameters
    ----------
    train, validation, test : sequences of Atoms
        Labelled. The validation set is used for the columns CV and N-L only.
    settings : Settings
    sizes : sequence of float or int
        Sub-sample sizes, as fractions or numbers.
    threads : int
    memory : str or float, optional
        Memory limit, such as "8GB".
    stages : Stages, optional
    """
    with threadpool_limits(limits=threads):
        once = TrainedOnce(train, settings, threads=threads, memory=memory, stages=stages)
        held_out, new = once.points(validation, "validation"), once.points(test, "test")
        rows: dict[float, dict[str, float]] = {}
        process: float | None = None
        for size in sizes:
            ensemble = once.ensemble(size)
            found = ensemble_mean_estimates(ensemble, held_out, new)
            if process is None:
                process = projected_process_estimates(ensemble, held_out, new)["Raw"].log_likelihood
            rows[size] = {c: e.log_likelihood for c, e in found.items()} | {PROCESS: process}
        return Study(rows, once.model())


def run_seed(
    problem: Problem,
    *,
    threads: int,
    memory: str | float | None,
    stages: Stages,
    report: Callable[[str], None],
) -> tuple[SeedResult, dict[str, Mapping[str, Estimate]]]:
    """Evaluate ensembles of all sub-sample sizes, and a bootstrap, on one split of the data.

    `report` receives a line about each size. Besides the numbers, the estimates of the test points
    are returned, by sub-sample size (or GPR PP) and column.
    """
    started = time.perf_counter()
    with threadpool_limits(limits=threads):
        once = TrainedOnce(
            problem.train, problem.settings, threads=threads, memory=memory, stages=stages
        )
        validation = once.points(problem.validation, "validation")
        test = once.points(problem.test, "test")
        residuals = once.leave_one_out_residuals()
        panels: dict[str, Mapping[str, Estimate]] = {}
        process: dict[str, Estimate] = {}
        ensembles = []
        schemes = [*((n, False) for n in problem.sizes), (problem.n_groups, True)]
        for n, replace in schemes:
            before = time.perf_counter()
            ensemble = once.ensemble(n, with_replacement=replace)
            seconds = time.perf_counter() - before
            if not process:
                process = projected_process_estimates(ensemble, validation, test)
            mean = ensemble_mean_estimates(ensemble, validation, test)
            full = full_model_estimates(ensemble, residuals, validation, test)
            data = ensemble.out_of_bag
            found = EnsembleResult(
                n=n,
                replace=replace,
                n_out_of_bag=0 if data is None else len(data.residuals),
                n_out_of_bag_linear=0
                if data is None
                else int(internal_points(data, "linear").sum()),
                seconds=seconds,
                ensemble_mean={column: e.result() for column, e in mean.items()},
                full_model={column: e.result() for column, e in full.items()},
                student_t=_student_t(mean),
            )
            ensembles.append(found)
            report(_line(found))
            if not replace:
                panels[f"n = {n:,}"] = mean | full
    seed = SeedResult(
        seed=problem.settings.seed,
        n_train=len(once.data.y),
        n_validation=len(validation.y),
        n_test=len(test.y),
        n_environments=once.data.n_environments,
        n_representatives=once.n_representatives,
        noise=once.noise,
        seconds=stages.seconds,
        wall=time.perf_counter() - started,
        memory=_peak_memory(),
        ensembles=ensembles,
        projected_process={column: e.result() for column, e in process.items()},
    )
    return seed, panels | {PROCESS: process}


def run_shift(
    problem: ShiftedProblem, *, threads: int, memory: str | float | None, stages: Stages
) -> ShiftResult:
    """Train one model, and evaluate every calibration on test sets out of its distribution."""
    started = time.perf_counter()
    settings = problem.settings.model_copy(update={"memory": memory, "threads": threads})
    model = AtomisticModel(**settings.model_dump())
    model.fit(problem.train, progress=stages.display or False)
    sets: list[ShiftedSet] = []
    of_members: dict[str, Calibration] = {}
    of_process: dict[str, Calibration] = {}
    for label, frames in problem.tests.items():
        with stages.stage(label):
            y, labelled = _reference_values(model, frames)
            members = model.predict(frames).uncalibrated.members[labelled]
            mean, std = (values[labelled] for values in model.predict_pp(frames))
            extrapolation = float(np.mean(model.extrapolates(frames)))
        if not sets:  # in distribution: serves as the validation set
            of_members = _validated(calibration_data(y, members))
            of_members |= {c: model.fitted.calibrations["energy"][m] for c, m in OUT_OF_BAG.items()}
            of_process = _gaussian_calibrations(y - mean, std)
        estimates = _of_members(y, members, of_members)
        for column, calibration in of_process.items():
            name = PROCESS if column == "Raw" else f"{PROCESS}, {column}"
            estimates[name] = Estimate(y, mean, calibration.std(std, 2), calibration)
        sets.append(
            ShiftedSet(
                label=label,
                n=len(y),
                extrapolation=extrapolation,
                bias=float(np.mean(members.mean(axis=1) - y)),
                estimators={name: e.result() for name, e in estimates.items()},
            )
        )
    return ShiftResult(
        trained_on=problem.trained_on,
        source=problem.source,
        n_train=model.record.quantities["energy"].n_rows,
        n_representatives=len(model.fitted.representatives),
        n_members=settings.n_members,
        subsample=settings.subsample,
        representation=settings.representation.model_dump(mode="json"),
        seconds=time.perf_counter() - started,
        sets=sets,
    )


def _reference_values(
    model: AtomisticModel, frames: Sequence[Atoms]
) -> tuple[Float64Array, BoolArray]:
    """Return the labels of a test set, and which of the predictions have one."""
    target = model.settings.target
    if model.settings.per_atom:
        pairs = zip(frames, model.target_atoms(frames), strict=True)
        y = np.concatenate([atoms.arrays[target][chosen] for atoms, chosen in pairs])
    else:
        y = np.array([atoms.info[target] for atoms in frames], dtype=np.float64)
    labelled: BoolArray = np.isfinite(y)
    return y[labelled], labelled


def _line(found: EnsembleResult) -> str:
    label = "bootstrap" if found.replace else f"n = {found.n:,}"
    values = (found.ensemble_mean | found.full_model).items()
    scores = ", ".join(f"{column} {e.log_likelihood:.3f}" for column, e in values)
    return f"{label}: {scores} ({found.seconds:.0f} s)"


def _peak_memory() -> float:
    """Return the peak resident memory of this process and of its largest worker, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    used = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return float(unit * sum(resource.getrusage(who).ru_maxrss for who in used))
