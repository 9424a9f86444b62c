"""Uncertainties of ensembles of several subsample sizes, with every calibration of the paper.

Features, representatives, kernel rows and the full model are computed once per split of the data.
Only the ensemble members are solved again for each subsample size.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from paper.problems import Problem, ShiftedProblem
from paper.results import (
    EnsembleResult,
    EstimatorResult,
    SeedResult,
    ShiftedSet,
    ShiftResult,
)
from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.census import take_census
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.kernel_rows import Basis
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.passes import fit_features, pick_representatives, sum_rows
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.settings import Settings
from qualms.atomistic.structures import check_species
from qualms.atomistic.training import (
    calibrate,
    draw_members,
    fit_ensemble,
    fit_sparse_model,
    left_out_errors,
    resolve,
)
from qualms.calibration.choice import fit_out_of_bag, out_of_bag_points
from qualms.calibration.methods import (
    MEMBER_METHODS,
    METHODS,
    Calibration,
    NoCalibration,
    fit_calibration,
)
from qualms.calibration.points import CalibrationData, calibration_data
from qualms.execution import Workers
from qualms.features.base import stream_features
from qualms.gp.ensemble import out_of_bag_prediction
from qualms.metrics import binned_errors, log_likelihood, score
from qualms.prediction import Prediction
from qualms.progress import Stages

#: Columns of the paper's tables, with the methods that are fitted to a validation set, and those
#: that are fitted to out-of-bag points, ours among them.
VALIDATED = {"CV": "linear", "N-L": "power"}
OUR_METHODS = tuple(method for method in MEMBER_METHODS if method in METHODS)
OUT_OF_BAG = {"Int.": "linear", "Int. N-L": "power", **{method: method for method in OUR_METHODS}}
#: Rows and columns of the tables: the projected process, Eq. (3), its posterior part, and the model
#: as it is trained by default.
PROCESS, POSTERIOR, SOURCES = "GPR PP", "GPR PP, posterior part", "sources"
_N_BINS = 10


@dataclass(frozen=True)
class Estimate:
    """Predictions of labelled points by one estimator: (n,) arrays, and members (n, N_R) if any."""

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    members: Float64Array | None = None
    calibration: Calibration = field(default_factory=NoCalibration)

    @classmethod
    def from_members(cls, y: Float64Array, members: Float64Array) -> Estimate:
        """Return the uncalibrated estimate of an ensemble."""
        raw = Prediction(members)
        return cls(y, raw.mean, raw.std, members)

    def compare(
        self, validation: Estimate, out_of_bag: Mapping[str, Calibration] | None = None
    ) -> dict[str, Estimate]:
        """Return this uncalibrated estimate with each calibration, by column of the tables.

        CV and N-L are fitted to `validation`, also uncalibrated; `out_of_bag` are by column.
        """
        if validation.members is None:  # linear and power ignore the number of members
            n = len(validation.y)
            z = validation.y - validation.mean
            data = CalibrationData(z, validation.std, np.full(n, 2), np.ones(n))
        else:
            data = calibration_data(validation.y, validation.members)
        calibrations: dict[str, Calibration] = {"Raw": NoCalibration()}
        calibrations |= {
            column: fit_calibration(data, method) for column, method in VALIDATED.items()
        }
        return {c: self._calibrated(k) for c, k in (calibrations | dict(out_of_bag or {})).items()}

    def _calibrated(self, calibration: Calibration) -> Estimate:
        if self.members is None:
            return replace(self, std=calibration.std(self.std, 2), calibration=calibration)
        calibrated = calibration.apply(Prediction(self.members))
        return Estimate(self.y, calibrated.mean, calibrated.std, calibrated.members, calibration)

    @property
    def log_likelihood(self) -> float:
        """Mean log likelihood of the reference values, Eq. (6), Musil et al. 2019."""
        return log_likelihood(self.y - self.mean, self.std)

    def result(self) -> EstimatorResult:
        """Return all scores."""
        z = self.y - self.mean
        low, high = np.quantile(self.std, [0.005, 0.995])
        bins = binned_errors(z, self.std, _N_BINS)
        prediction = (
            Prediction(mean=self.mean, std=self.std)
            if self.members is None
            else Prediction(self.members)
        )
        scores = score(self.y, prediction).as_dict()
        return EstimatorResult(
            scores={name: value for name, value in scores.items() if value is not None},
            alpha=self.calibration.alpha,
            gamma=self.calibration.gamma,
            decades=float(np.log10(high / low)),
            bins=list(zip(bins.rmv.tolist(), bins.rmse.tolist(), strict=True)),
            beyond_4_sigma=float(np.mean(np.abs(z) > 4 * self.std)),
        )


@dataclass(frozen=True)
class Points:
    """Labelled points outside the training set; totals are divided by the number of atoms."""

    K_XM: Float64Array  #: (n, r)
    design: Float64Array  #: design matrix of the baseline, (n, S)
    k_xx: Float64Array  #: prior variances, (n,)
    y: Float64Array  #: (n,)


@dataclass(frozen=True)
class Subsampled:
    """The full model and an ensemble of one subsample size."""

    fitted: Fitted  #: as in the paper: members that are trained on subsamples alone
    blend: Fitted  #: as the settings have it
    training_members: Float64Array  #: uncalibrated predictions of the training points, (N, N_R)
    absent: BoolArray  #: whether a training point is absent from a member, (N, N_R)

    def ensemble_mean(self, points: Points) -> Estimate:
        """Return the uncalibrated estimate that is centred on the ensemble mean."""
        return Estimate.from_members(points.y, self.fitted.members(points.K_XM, points.design))

    def full_model(self, points: Points) -> Estimate:
        """Return the uncalibrated estimate of members that are shifted to the full model."""
        members = self.fitted.members(points.K_XM, points.design)
        shift = self.fitted.pp_mean(points.K_XM, points.design) - members.mean(axis=1)
        return Estimate.from_members(points.y, np.asarray(members + shift[:, None]))

    def sources(self, points: Points) -> Estimate:
        """Return the calibrated prediction of the model: a blend, with all sources of variance."""
        fitted = self.blend
        raw = Prediction(fitted.members(points.K_XM, points.design))
        q = fitted.novelty_std(points.K_XM, lambda: points.k_xx)
        calibrated = raw.calibrated(fitted.calibration, novelty_std=q)
        return Estimate(
            points.y, calibrated.mean, calibrated.std, calibrated.members, fitted.calibration
        )

    def posterior_part(self, points: Points) -> Estimate:
        """Return the full model with p, the posterior part of σ_PP."""
        assert self.fitted.pp_variance is not None, "settings keep it"
        p2 = self.fitted.pp_variance.parts(points.K_XM, points.k_xx)[0]
        mean = self.fitted.pp_mean(points.K_XM, points.design)
        return Estimate(points.y, mean, np.sqrt(p2))

    def projected_process(self, points: Points) -> Estimate:
        """Return the full model with σ_PP, Eq. (3), Musil et al. 2019."""
        assert self.fitted.pp_variance is not None, "settings keep it"
        mean = self.fitted.pp_mean(points.K_XM, points.design)
        return Estimate(points.y, mean, self.fitted.pp_variance.std(points.K_XM, points.k_xx))

    def full_model_calibrations(self, residuals: Float64Array) -> dict[str, Calibration]:
        """Return the paper's out-of-bag calibrations, centred on the full model, by column.

        `residuals` are those of `TrainedOnce.leave_one_out_residuals`.
        """
        prediction = out_of_bag_prediction(self.training_members, self.absent)
        weights = np.ones(len(prediction.std))
        data = CalibrationData(
            residuals[prediction.used], prediction.std, prediction.n_absent, weights
        )
        return {c: fit_out_of_bag(data, OUT_OF_BAG[c]) for c in ("Int.", "Int. N-L")}


class TrainedOnce:
    """Features, representatives, kernel rows and full model of one training set."""

    def __init__(
        self,
        train: Sequence[Atoms],
        settings: Settings,
        *,
        threads: int = 1,
        memory: str | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.stages = stages or Stages()
        self.threads = threads
        workers, free = Workers(threads=threads), {"draw": "free", "memory": memory}
        settings = settings.model_copy(update=free)
        census = take_census(train, settings, stages=self.stages)
        self.problem = resolve(settings, census, workers, threads)
        self.settings = self.problem.settings
        self.representation = fit_features(self.problem, self.stages)
        representatives, whitening, cache = pick_representatives(
            self.problem, self.representation, workers, self.stages
        )
        self.rows = sum_rows(
            self.problem,
            self.representation,
            representatives,
            representatives,
            whitening,
            cache,
            workers,
            self.stages,
        )
        self.full = fit_sparse_model(self.rows, self.problem, self.stages)

    def ensemble(self, subsample: float, *, with_replacement: bool = False) -> Subsampled:
        """Draw and solve the members of one subsample size, and calibrate them out of bag."""
        update = {"subsample": subsample, "replace": with_replacement}
        settings = self.settings.model_copy(update=update)
        isolated = self.problem.census.isolated
        data, draw, baseline = draw_members(settings, self.problem.data, isolated)
        problem = replace(self.problem, settings=settings, data=data, draw=draw, baseline=baseline)
        points = self.rows.sample.quantities[TARGET].structure  # of free draws, all rows are kept
        if problem.draws_atoms:
            points = np.arange(len(points))
        rows = replace(self.rows, kept=replace(self.rows.kept, draw=draw.take(points)))
        ensemble = fit_ensemble(rows, self.full, problem, self.stages)
        paper = {"uncertainty": "subsampling", "centre": "members", "calibration": "student"}
        of_paper = replace(problem, settings=problem.settings.model_copy(update=paper))
        fitted, blend = (
            calibrate(ensemble, some, self.representation, {}, self.stages)
            for some in (of_paper, problem)
        )
        absent = ensemble.rows.kept.draw.counts == 0
        return Subsampled(fitted, blend, ensemble.members[TARGET], absent)

    def leave_one_out_residuals(self) -> Float64Array:
        """Return the residuals (N,) of the full model without each point, or without its group."""
        return left_out_errors(self.rows, self.full, TARGET, np.inf)[0]

    @property
    def n_groups(self) -> int:
        """Number of points, or groups of them, that are drawn."""
        return len(np.unique(self.rows.kept.groups))

    def points(self, frames: Sequence[Atoms], name: str) -> Points:
        """Compute the kernel rows of the labelled points of further structures."""
        data, rows = take_census(frames, self.settings).data, self.rows
        representation = self.representation.exact()
        check_species(data.frames, representation.species)
        X = rows.representatives.features
        basis = Basis(representation.kernel, X, rows.scale, data.per_atom)
        K, k_xx = [], []
        structures = data.environments_of_frames
        with self.stages.stage(f"Kernel rows of the {name} set"):
            for batch in stream_features(representation, structures, n_workers=self.threads):
                K.append(basis.rows(batch.features, batch.offsets))
                k_xx.append(basis.prior_variance(batch.features, batch.offsets))
        design = data.design(self.problem.data.species)
        return Points(np.concatenate(K), design, np.concatenate(k_xx), data.y)


def out_of_bag_calibrations(fitted: Fitted) -> dict[str, Calibration]:
    """Return the out-of-bag calibrations of a model, centred on the ensemble mean, by column."""
    points = fitted.points[TARGET]
    return {column: fit_out_of_bag(points, method) for column, method in OUT_OF_BAG.items()}


def run_seed(
    problem: Problem,
    *,
    report: Callable[[str], None],
    threads: int = 1,
    memory: str | None = None,
    stages: Stages | None = None,
) -> tuple[SeedResult, dict[str, Mapping[str, Estimate]]]:
    """Evaluate ensembles of all subsample sizes, and a bootstrap, on one split of the data.

    Parameters
    ----------
    problem : Problem
    report : callable
        Is called with a line about each size: log likelihoods by column.
    threads : int
    memory : str, optional
        Memory limit, such as "8GB".
    stages : Stages, optional

    Returns
    -------
    result : SeedResult
        All numbers.
    estimates : dict
        Estimates of the test points, by subsample size (or GPR PP) and column.
    """
    started = time.perf_counter()
    stages = stages or Stages()
    with threadpool_limits(limits=threads):
        once = TrainedOnce(
            problem.train, problem.settings, threads=threads, memory=memory, stages=stages
        )
        validation = once.points(problem.validation, "validation")
        test = once.points(problem.test, "test")
        residuals = once.leave_one_out_residuals()
        n_groups = once.n_groups
        panels: dict[str, Mapping[str, Estimate]] = {}
        process: dict[str, Estimate] = {}
        posterior: dict[str, Estimate] = {}
        ensembles = []
        for n in (*problem.sizes, n_groups):
            bootstrap = n == n_groups
            before = time.perf_counter()
            ensemble = once.ensemble(n, with_replacement=bootstrap)
            seconds = time.perf_counter() - before
            if not process:
                process, posterior = (
                    estimate(test).compare(estimate(validation))
                    for estimate in (ensemble.projected_process, ensemble.posterior_part)
                )
            blend = ensemble.sources(test)
            raw, out_of_bag = ensemble.ensemble_mean(test), ensemble.fitted.points[TARGET]
            calibrations = out_of_bag_calibrations(ensemble.fitted)
            mean = raw.compare(ensemble.ensemble_mean(validation), calibrations)
            full = ensemble.full_model(test).compare(
                ensemble.full_model(validation), ensemble.full_model_calibrations(residuals)
            )
            n_members = np.full(len(raw.y), problem.settings.n_members)
            points = CalibrationData(raw.y - raw.mean, raw.std, n_members, np.ones(len(raw.y)))
            density = calibrations["student"].density_of(points)
            result = EnsembleResult(
                n=n,
                replace=bootstrap,
                n_out_of_bag=len(out_of_bag.residuals),
                n_out_of_bag_linear=int(out_of_bag_points(out_of_bag, "linear").sum()),
                seconds=seconds,
                ensemble_mean={column: e.result() for column, e in mean.items()},
                full_model={column: e.result() for column, e in full.items()},
                student_t=float(np.mean(density)),
                blend=blend.result(),
                centre=ensemble.blend.record.centre,
            )
            ensembles.append(result)
            label = "bootstrap" if bootstrap else f"n = {n:,}"
            every = mean | full | {SOURCES: blend}
            scores = (f"{column} {e.log_likelihood:.3f}" for column, e in every.items())
            report(f"{label}: {', '.join(scores)} ({seconds:.0f} s)")
            if not bootstrap:
                panels[label] = full
    # Peak memory of this process and of its largest worker; macOS counts bytes, Linux KiB.
    used = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = sum(resource.getrusage(who).ru_maxrss for who in used)
    seed = SeedResult(
        seed=problem.settings.seed,
        n_train=len(once.problem.data.y),
        n_validation=len(validation.y),
        n_test=len(test.y),
        n_environments=once.problem.data.n_environments,
        n_representatives=len(once.rows.representatives),
        noise=float(once.full.noise[TARGET] ** 0.5),
        seconds=stages.seconds,
        wall=time.perf_counter() - started,
        memory=float(peak * (1 if sys.platform == "darwin" else 1024)),
        ensembles=ensembles,
        projected_process={column: e.result() for column, e in process.items()},
        posterior_part={column: e.result() for column, e in posterior.items()},
    )
    return seed, panels | {PROCESS: process}


def run_shift(problem: ShiftedProblem, *, threads: int, memory: str, stages: Stages) -> ShiftResult:
    """Train one model, and evaluate every calibration on test sets out of its distribution."""
    started = time.perf_counter()
    settings = problem.settings
    with threadpool_limits(limits=threads):
        once = TrainedOnce(problem.train, settings, threads=threads, memory=memory, stages=stages)
        ensemble = once.ensemble(settings.subsample, with_replacement=settings.replace)
    paper, model = (
        AtomisticModel.from_fitted(fitted, threads=threads)
        for fitted in (ensemble.fitted, ensemble.blend)
    )
    calibrations = out_of_bag_calibrations(paper.fitted)
    sets, validation = [], None
    for label, frames in problem.tests.items():
        with stages.stage(label):
            if settings.per_atom:
                pairs = zip(frames, model.target_atoms(frames), strict=True)
                y = np.concatenate([atoms.arrays[settings.target][i] for atoms, i in pairs])
            else:
                y = np.array([atoms.info[settings.target] for atoms in frames])
            labelled = np.isfinite(y)
            members = paper.predict(frames).uncalibrated.members[labelled]
            raw = Estimate.from_members(y[labelled], members)
            process = Estimate(
                y[labelled], *(values[labelled] for values in model.predict_pp(frames))
            )
            predicted = model.predict(frames)
            of_labels = predicted[labelled]
            blend = Estimate(
                y[labelled],
                of_labels.mean,
                of_labels.std,
                of_labels.members,
                model.fitted.calibration,
            )
            extrapolation = float(np.mean(predicted.extrapolates))
        # The first set is in distribution, and serves as the validation set.
        validation = validation or (raw, process)
        estimates = raw.compare(validation[0], calibrations) | {SOURCES: blend}
        for column, estimate in process.compare(validation[1]).items():
            estimates[PROCESS if column == "Raw" else f"{PROCESS}, {column}"] = estimate
        sets.append(
            ShiftedSet(
                label=label,
                n=len(raw.y),
                extrapolation=extrapolation,
                bias=float(np.mean(raw.mean - raw.y)),
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
        representation=settings.features.model_dump(mode="json"),
        seconds=time.perf_counter() - started,
        sets=sets,
    )
