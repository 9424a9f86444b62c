"""What a training run keeps on disk, so that it can be resumed after an interruption.

A checkpoint is a directory: ``manifest.json`` says what data and settings it belongs to and which
stages are complete; each stage has a file of its own, complete before the manifest mentions it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from ase import Atoms
from ase.neighborlist import neighbor_list
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from threadpoolctl import threadpool_limits

from qualms.arrays import BoolArray, Float64Array, FloatArray, IntArray
from qualms.atomistic.baseline import Baseline, fit_baseline
from qualms.atomistic.fitted import Fitted, ProjectedVariance
from qualms.atomistic.forces import fill_rows, scale_rows
from qualms.atomistic.kernel_rows import Basis, select_representatives
from qualms.atomistic.label_checks import check_conventions, warn_of_doubtful
from qualms.atomistic.labels import ForceLabels
from qualms.atomistic.memory import Mode, Plan, make_plan
from qualms.atomistic.settings import Settings
from qualms.atomistic.training_set import TrainingSet, can_calibrate, draw_counts
from qualms.calibration.base import Calibration, CalibrationData, calibration_data
from qualms.calibration.fitting import METHODS, fit_internally, internal_points
from qualms.calibration.methods import NoCalibration
from qualms.errors import (
    CalibrationError,
    ExactFitError,
    InputError,
    NumericalError,
    QualmsWarning,
    counted,
)
from qualms.features.compression import Projection, sample_size
from qualms.features.hypers import Compression, Soap
from qualms.features.soap import (
    BLOCK,
    Batch,
    KeptFeatures,
    Representation,
    SpilledFeatures,
    fit_representation,
    resolve_compression,
    stop_workers,
    stream_features,
    structure_blocks,
)
from qualms.gp.ensemble import (
    MIN_ABSENT,
    FullModel,
    Members,
    fit_full_model,
    fit_members,
    internal_prediction,
    solve_members,
)
from qualms.gp.kernels import unit_scale
from qualms.gp.linalg import Whitening, whiten
from qualms.gp.noise import JointNoise, select_joint_noise
from qualms.gp.representatives import RowSource
from qualms.gp.sparse_gp import fit_projected_process, gram_matrix, leave_one_out_residuals
from qualms.io.files import atomic_output
from qualms.progress import Stages

_VERSION = 1
_STAGES = ("representation", "features", "selection")


class Checkpoint:
    """A directory with the finished stages of a run.

    Parameters
    ----------
    directory : Path
        Made if it does not exist.
    key : str
        Digest of data and settings: a checkpoint of something else is not used.
    resume : bool
        Whether to go on from what is there; otherwise it is started anew.
    """

    def __init__(self, directory: Path, key: str, *, resume: bool) -> None:
        self.directory = directory
        self._manifest: dict[str, Any] = {"version": _VERSION, "key": key, "stages": {}}
        path = directory / "manifest.json"
        if not _is_free(directory):
            raise InputError(
                "checkpoint", str(directory), "a new directory, or one of an earlier run"
            )
        if resume and path.exists():
            self._manifest = self._read(path, key)
        directory.mkdir(parents=True, exist_ok=True)
        if not self._manifest["stages"]:
            for stage in _STAGES:  # of an earlier run
                self.path(stage).unlink(missing_ok=True)
        self._write()

    def has(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self._manifest["stages"]

    def path(self, stage: str) -> Path:
        """File of a stage."""
        return self.directory / stage

    def save(
        self, stage: str, tensors: Mapping[str, Any], values: Mapping[str, Any] | None = None
    ) -> None:
        """Write the arrays and numbers of a stage, and mark it complete."""
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        with atomic_output(self.path(stage), force=True) as file:
            file.write(save(contiguous))
        self.complete(stage, values)

    def load(self, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays and numbers of a complete stage."""
        try:
            return dict(load_file(self.path(stage))), dict(self._manifest["stages"][stage])
        except (OSError, SafetensorError) as error:
            raise _damaged(self.directory, str(error)) from error

    def complete(self, stage: str, values: Mapping[str, Any] | None = None) -> None:
        """Mark a stage complete whose file the caller has written."""
        self._manifest["stages"][stage] = dict(values or {})
        self._write()

    def remove(self) -> None:
        """Delete the directory: the run has ended well."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self) -> None:
        with atomic_output(self.directory / "manifest.json", force=True) as file:
            file.write(json.dumps(self._manifest).encode())

    def _read(self, path: Path, key: str) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(path.read_bytes())
            belongs = manifest["version"] == _VERSION and manifest["key"] == key
            manifest["stages"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(self.directory, str(error)) from error
        if not belongs:
            raise InputError(
                "resume",
                str(self.directory),
                "a checkpoint of the same data and settings",
                "Run without --resume to start anew.",
            )
        return manifest


def _is_free(directory: Path) -> bool:
    """Whether nothing of anyone else is there: it is new, or empty, or of an earlier run."""
    if not directory.is_dir():
        return not directory.exists()
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
    except OSError:
        return not any(directory.iterdir())
    except ValueError:
        return True  # of an earlier run, and damaged
    return isinstance(manifest, dict) and {"version", "key", "stages"} <= manifest.keys()


def _damaged(directory: Path, why: str) -> InputError:
    return InputError(
        "resume", str(directory), f"a readable checkpoint ({why})", "Run without --resume."
    )


def run_key(*parts: str) -> str:
    """Return a digest of what defines a run."""
    content = hashlib.blake2b(digest_size=16)
    for part in parts:
        content.update(part.encode() + b"\0")
    return content.hexdigest()


# Calibrations of energies, forces and stresses by members that did not see a structure.
#: Components that members agree about to this share of the largest label are zero by symmetry; and
#: to this number, whatever the units of the energy are, if all of them are.
_ROUNDING, _TINY = 1e-10, 1e-12
#: Structures from which on components are calibrated by themselves, and from which on that is
#: nothing to warn of. Those of one structure err together. The factor of energies, of which there
#: are more, does for forces as well or better than one from fewer than ten structures; for stresses
#: it is often too small by half, and three structures tell more.
_ENOUGH = {"Forces": 10, "Stresses": 3}
_WELL = 10
#: Labels whose errors, in units of the spread, are so many times those of energies are doubted: a
#: model that is trained on them learns next to nothing about those of other structures.
_DOUBTFUL = 10.0


@dataclass(frozen=True)
class Derived:
    """What is known of components of forces, or of stresses.

    Attributes
    ----------
    internal : CalibrationData, optional
        Residuals and spreads of those that enough members had not seen.
    calibrations : dict of str to Calibration
        By that; empty if there are none.
    n_structures : int
        How many structures these components are of: those of one structure are not independent.
    """

    internal: CalibrationData | None = None
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    n_structures: int = 0


def calibrate_forces(
    labels: ForceLabels, predicted: Float64Array, counts: IntArray, wanted: str
) -> Derived:
    """Calibrate components of forces; if they are too few, they have no calibration.

    Parameters
    ----------
    labels : ForceLabels
    predicted : (n_rows, N_R) array
        What members say about them.
    counts : (n_structures, N_R) array of int
        How often each structure is in each member.
    wanted : str
        The method that must work.
    """
    rows = np.flatnonzero(~labels.is_virial)
    if not len(rows):
        return Derived()
    ratios = _ratios(labels, predicted, counts)
    rows = _telling(rows, labels.y[rows], predicted[rows])
    if _too_few("Forces", labels, rows, counts, wanted):
        return Derived()
    what, seen = "components of forces", counts[labels.structure[rows]]
    y, members = labels.y[rows], predicted[rows]
    internal = internal_data(y, members, seen, wanted, what, level=6)
    found = _fit_whole(internal, y, members, seen == 0, ratios[rows], wanted)
    return Derived(internal, found, _n_structures(labels, rows, counts))


def calibrate_stresses(
    labels: ForceLabels,
    predicted: Float64Array,
    counts: IntArray,
    per_volume: Float64Array,
    wanted: str,
) -> Derived:
    """Calibrate components of stresses; if they are too few, they have no calibration.

    Parameters
    ----------
    labels, predicted, counts, wanted
        As in `calibrate_forces`.
    per_volume : (n_structures,) array
        Atoms per Å³, which Vσ per atom is multiplied by.
    """
    rows = np.flatnonzero(labels.is_virial)
    if not len(rows):
        return Derived()
    ratios = _ratios(labels, predicted, counts)
    rows = _telling(rows, labels.y[rows], predicted[rows])
    if _too_few("Stresses", labels, rows, counts, wanted):
        return Derived()
    factors = per_volume[labels.structure[rows]]
    y, members = labels.y[rows] * factors, predicted[rows] * factors[:, None]
    absent = counts[labels.structure[rows]] == 0
    try:
        data = calibration_data(y, members, absent)
        found = _fit_whole(data, y, members, absent, ratios[rows], wanted)
    except CalibrationError as error:
        if wanted != "none":
            warnings.warn(
                f"Stresses: {error} Their error bars are scaled as those of energies are.",
                QualmsWarning,
                stacklevel=5,
            )
        return Derived()
    return Derived(data, found, _n_structures(labels, rows, counts))


def _ratios(labels: ForceLabels, predicted: Float64Array, counts: IntArray) -> Float64Array:
    """Return r/ŝ of all rows (n_rows,): the spread of the whole force, or virial, by their own.

    Of the whole as far as it is labelled; one where there is no spread.
    """
    found = internal_prediction(predicted, counts[labels.structure] == 0)
    spread = np.zeros(len(predicted))
    spread[found.used] = found.std
    w, whole = labels.multiplicity, labels.whole
    squares = np.bincount(whole, w * spread**2) / np.maximum(np.bincount(whole, w), 1.0)
    ratios = np.ones_like(spread)
    return np.divide(np.sqrt(squares)[whole], spread, out=ratios, where=spread > 0)


def _fit_whole(
    internal: CalibrationData | None,
    y: Float64Array,
    members: Float64Array,
    absent: BoolArray,
    ratios: Float64Array,
    wanted: str,
) -> dict[str, Calibration]:
    """Fit every method to components (n,) that are multiplied by r/ŝ.

    The density of z is r/ŝ times that of z r/ŝ, and so likelihoods are those of components.
    """
    if internal is None:
        return fit_calibrations(None, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows without a spread, which have been warned of
        data = calibration_data(y * ratios, members * ratios[:, None], absent)
    calibrations = {}
    for method, found in fit_calibrations(data, wanted).items():
        after, before = (of.some(internal_points(of, method)) for of in (data, internal))
        shift = after.mean(np.log(after.spread)) - before.mean(np.log(before.spread))
        calibrations[method] = replace(found, log_likelihood=found.log_likelihood + shift)
    return calibrations


def doubt_labels(
    name: str, key: str, of: Derived, energies: dict[str, Calibration], n_members: int
) -> None:
    """Warn if members are much more wrong about forces, or stresses, than they are about energies.

    Parameters
    ----------
    name : {"forces", "stress"}
    key : str
        Where the labels are.
    of : Derived
    energies : dict of str to Calibration
    n_members : int
        N_R.
    """
    # Of the methods that have one factor: with a power, it has units.
    method = next((m for m in ("student", "linear") if m in of.calibrations and m in energies), "")
    if not method:
        return
    # Error bars in units of the spread: α alone may be zero where the mean of members is right.
    of_labels, of_energies = (
        float(found[method].std(np.ones(1), n_members)[0]) for found in (of.calibrations, energies)
    )
    ratio = of_labels / max(of_energies, np.finfo(np.float64).tiny)
    if ratio >= _DOUBTFUL:
        warnings.warn(
            f"{name}={key!r}: errors of members are {ratio:.0f} times as large in units of their "
            "spread as those of energies. Are these labels derivatives of the same energies, of "
            "the same structures, in the right order, and more than noise?",
            QualmsWarning,
            stacklevel=5,
        )


def telling(y: Float64Array, members: Float64Array) -> BoolArray:
    """Return which components (n,) members (n, N_R) do not agree about up to rounding.

    Components that are zero by symmetry have neither an error nor an error bar.
    """
    largest = float(np.abs(y).max(initial=0.0))
    apart: BoolArray = np.ptp(members, axis=1) > max(_ROUNDING * largest, _TINY)
    return apart


def _telling(rows: IntArray, y: Float64Array, members: Float64Array) -> IntArray:
    """Return the rows that say something; all, if none does."""
    apart = telling(y, members)
    return rows[apart] if apart.any() else rows


def _too_few(what: str, labels: ForceLabels, rows: IntArray, counts: IntArray, wanted: str) -> bool:
    """Return whether energies tell more about error bars than some components, and say so."""
    n = _n_structures(labels, rows, counts)
    judged = int(np.count_nonzero(_judged(counts)))
    too_few = n < min(_ENOUGH[what], judged)
    if wanted != "none" and n < min(_WELL, judged):
        known = f"{what} of {counted(n, 'structure')} that members had not seen are"
        scaled = f"too few to calibrate error bars, which takes {_ENOUGH[what]}: they are scaled as"
        warnings.warn(
            f"{known} {scaled} those of energies are."
            if too_few
            else f"{known} few to calibrate their error bars, whose factor is poorly known.",
            QualmsWarning,
            stacklevel=7,
        )
    return too_few


def _judged(counts: IntArray) -> BoolArray:
    """Return which structures enough members had not seen: (n_structures,)."""
    judged: BoolArray = (counts == 0).sum(axis=1) >= MIN_ABSENT
    return judged


def _n_structures(labels: ForceLabels, rows: IntArray, counts: IntArray) -> int:
    """Return how many structures are judged by the members that had not seen them."""
    return int(np.count_nonzero(_judged(counts)[np.unique(labels.structure[rows])]))


def internal_data(
    y: Float64Array,
    predicted: Float64Array,
    counts: IntArray,
    wanted: str,
    what: str = "targets",
    *,
    level: int = 5,
) -> CalibrationData | None:
    """Return what members that did not see a row say about it, if there is an error at all.

    Parameters
    ----------
    y : (n,) array
    predicted : (n, N_R) array
    counts : (n, N_R) array of int
        How often each row is in each member.
    wanted : str
        Method of calibration.
    what : str
        What the rows are.
    level : int
        How far up the stack a warning belongs.
    """
    if np.ptp(y) == 0:
        warnings.warn(
            f"All {what} are the same: there is nothing to learn, and the error bar is zero.",
            QualmsWarning,
            stacklevel=level,
        )
        return None
    try:
        return calibration_data(y, predicted, counts == 0)
    except CalibrationError as error:
        if wanted != "none" and not isinstance(error, ExactFitError):
            raise
        warnings.warn(f"{error} The spread is used as it is.", QualmsWarning, stacklevel=level)
        return None


def fit_calibrations(internal: CalibrationData | None, wanted: str) -> dict[str, Calibration]:
    """Fit every method, so that they can be compared later; the one that is wanted must work."""
    if internal is None:
        return {"none": NoCalibration(), wanted: NoCalibration()}
    calibrations: dict[str, Calibration] = {}
    for method in METHODS:
        try:
            calibrations[method] = fit_internally(internal, method)
        except CalibrationError:
            if method == wanted:
                raise
    return calibrations


# Energies and their derivatives as one least-squares problem, with a noise for each kind.
#: By how much noise variances are raised at a time, and how often at most.
_RAISE, _ATTEMPTS = 10.0, 8

T = TypeVar("T")


@dataclass(frozen=True)
class JointModel:
    """The full model of energies and forces.

    Attributes
    ----------
    full : FullModel
        Centre and noise are those of the energies, per atom.
    noise : JointNoise
    labels : ForceLabels
    energy_weight : (n,) array
        Of the rows of energies: noise variances are divided by it.
    y : (N,) array
        Labels of all rows, energies less the centre.
    """

    full: FullModel
    noise: JointNoise
    labels: ForceLabels
    energy_weight: Float64Array
    y: Float64Array

    @property
    def weight(self) -> Float64Array:
        """Weight of each row: (N,)."""
        return _row_weight(self.energy_weight, self.labels, self.noise)

    def counts(self, counts: IntArray) -> IntArray:
        """Return how often each row is in each member, given that for energies (n, N_R)."""
        return np.concatenate([counts, counts[self.labels.structure]])

    def with_noise(self, noise: JointNoise, Phi: FloatArray) -> JointModel:
        """Return the model of the same rows Phi (N, r) with other noises of the same ratios."""
        if noise == self.noise:
            return self
        scale, gram = self.full.scale, self.full.process.gram
        relative = noise.energies / float(scale[0]) ** 2
        process = fit_projected_process(
            Phi, self.y / scale, relative, sample_weight=self.weight, gram=gram
        )
        return replace(self, full=replace(self.full, process=process), noise=noise)


def fit_joint_model(
    Phi: FloatArray,
    energies: Float64Array,
    labels: ForceLabels,
    groups: IntArray,
    settings: Settings,
) -> JointModel:
    """Choose the noise of each kind and solve the full model.

    Parameters
    ----------
    Phi : (N, r) array
        Whitened features of all rows.
    energies : (n,) array
        Per atom, without baseline.
    labels : ForceLabels
    groups : (n,) array of int
        Structures that are left out together when the noise is chosen.
    settings : Settings
    """
    n, energy_weight = len(energies), _energy_weight(labels, settings)
    center = 0.0
    if settings.baseline != "none":
        center = float(np.average(energies, weights=energy_weight))
    y = np.concatenate([energies - center, labels.y])
    variance = _prior_variance(Phi[n:], labels.y)
    noise = select_joint_noise(
        Phi,
        y,
        np.concatenate([np.zeros(n, dtype=np.intp), 1 + labels.is_virial]),
        np.concatenate([groups, groups[labels.structure]]),
        prior=variance,
        weight=np.concatenate([energy_weight, np.ones(len(labels.y))]),
        criterion=settings.noise if isinstance(settings.noise, str) else "loo",
        energies=_known(settings.noise),
        forces=_known(settings.forces_noise),
        virials=_known(settings.stress_noise),
    )
    gram = gram_matrix(Phi, _row_weight(energy_weight, labels, noise))
    scale = np.array([np.sqrt(variance)])

    def solve(noise: JointNoise) -> JointModel:
        weight = _row_weight(energy_weight, labels, noise)
        relative = noise.energies / variance
        process = fit_projected_process(Phi, y / scale, relative, sample_weight=weight, gram=gram)
        full = FullModel(process, np.array([center]), scale, centered=False)
        return JointModel(full, noise, labels, energy_weight, y)

    return _solvable(solve, noise)


def _solvable(solve: Callable[[JointNoise], T], noise: JointNoise) -> T:
    """Return what is solved with noises, or with higher ones, of which a warning tells."""
    for attempt in range(_ATTEMPTS):
        tried = noise.times(_RAISE**attempt)
        try:
            found = solve(tried)
        except NumericalError:
            continue
        if attempt:
            warnings.warn(
                f"Noise variances ({_described(noise)}) are lost in rounding; all were raised by "
                f"{_RAISE**attempt:.0e}. Labels that are much larger than all others are one "
                "reason. Noises that are given as numbers must be larger.",
                QualmsWarning,
                stacklevel=8,
            )
        return found
    raise NumericalError(
        f"Noise variances ({_described(noise)}) are lost in rounding, and so are those "
        f"{_RAISE ** (_ATTEMPTS - 1):.0e} times as large. Look for labels that are much larger "
        "than all others, or give larger ones: noise, forces_noise and stress_noise."
    )


def _described(noise: JointNoise) -> str:
    """Return the variances in words, by the parameters that give them."""
    found = [("noise", noise.energies), ("forces_noise", noise.forces)]
    found += [] if noise.virials is None else [("stress_noise", noise.virials)]
    return ", ".join(f"{name} {value:.1e}" for name, value in found)


def _known(noise: str | float) -> float | None:
    """Return a variance that is given, None for the name of a way to find one."""
    return None if isinstance(noise, str) else noise


def _row_weight(
    energy_weight: Float64Array, labels: ForceLabels, noise: JointNoise
) -> Float64Array:
    """Return the weight of each row: (N,)."""
    others = np.where(labels.is_virial, noise.virial_ratio, noise.ratio)
    return np.concatenate([energy_weight, others])


def _energy_weight(labels: ForceLabels, settings: Settings) -> Float64Array:
    """Return the weights of energies per atom: one, or what noise per structure comes to.

    A noise σ of the energy of n atoms is σ/n per atom; so it has the weight n², in units of that of
    a structure of mean size.
    """
    sizes = np.array([len(forces) for forces in labels.forces], dtype=np.float64)
    if settings.noise_per == "atom":
        return np.ones_like(sizes)
    weight: Float64Array = (sizes / sizes.mean()) ** 2
    return weight


def _prior_variance(Phi: FloatArray, y: Float64Array) -> float:
    """Return the prior variance of the weights that gives forces the variance that they have.

    Eq. (17), Musil et al. 2019, for forces: what energies have in common does not count, and of the
    energies of one molecule that is nearly all.
    """
    squares = sum(
        float(np.sum(np.square(Phi[start : start + 4096], dtype=np.float64)))
        for start in range(0, len(Phi), 4096)
    )
    return float(np.sum(y**2)) / squares if squares > 0 and np.any(y) else 1.0


def fit_joint_members(
    joint: JointModel,
    Phi: FloatArray,
    energies: Float64Array,
    counts: IntArray,
    *,
    centered: bool,
) -> Members:
    """Solve all members, with the noises of the full model.

    Parameters
    ----------
    joint : JointModel
    Phi : (N, r) array
    energies : (n, N_R) array
        Per atom, without the baseline of each member.
    counts : (n, N_R) array of int
        How often each structure is in each member.
    centered : bool
        Whether the mean of its energies belongs to a member.
    """
    means = np.zeros(counts.shape[1])
    if centered:
        mine = counts * joint.energy_weight[:, None]
        means = np.sum(energies * mine, axis=0) / mine.sum(axis=0)
    others = np.repeat(joint.labels.y[:, None], len(means), axis=1)
    scale = joint.full.scale[0]
    solution = solve_members(
        Phi,
        np.concatenate([energies - means, others])[:, None, :] / scale,
        joint.counts(counts),
        joint.full.process,
        sample_weight=joint.weight,
    )
    return Members(solution.weights * scale, means[None, :], solution)


def solve_joint_members(
    joint: JointModel,
    Phi: FloatArray,
    energies: Float64Array,
    counts: IntArray,
    *,
    centered: bool,
) -> tuple[JointModel, Members]:
    """Solve all members, and the full model again if they need higher noises than it has.

    Parameters are those of `fit_joint_members`.
    """

    def solve(noise: JointNoise) -> tuple[JointModel, Members]:
        model = joint.with_noise(noise, Phi)
        return model, fit_joint_members(model, Phi, energies, counts, centered=centered)

    return _solvable(solve, joint.noise)


# From kernel rows to the weights of all members, and their calibration.
#: Representatives, and rows, up to which the matrices are small.
_SMALL, _FEW = 500, 50_000


@dataclass
class KernelRows:
    """Kernel rows of a training set.

    Attributes
    ----------
    representation : Representation
    basis : Basis
        Scaled by Eq. (17), Musil et al. 2019.
    origins : (r, 2) array of int
        Structure and atom of each representative.
    whitening : Whitening
        Of the kernel before it was scaled.
    K_NM : (N, r) array
        Scaled. It and the whitening are used up by what solves with them: they are the largest
        arrays of all.
    novelty : (float, float)
        What the strangest environment of a new structure, or all of them on average, must exceed to
        look like extrapolation.
    """

    representation: Representation
    basis: Basis
    origins: IntArray
    whitening: Whitening
    K_NM: Float64Array
    novelty: tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """A trained model and what is known about its training set.

    Attributes
    ----------
    fitted : Fitted
    plan : Plan
    internal : CalibrationData, optional
        Residuals and spreads of training rows by the members that did not see them.
    full : FullModel
    solution : str
        How the members were solved.
    target_std : float
        Standard deviation of the targets less the baseline, per atom if they are extensive.
    predicted : (n, N_R) array
        What members, uncalibrated, say about each training row; `Fitted.membership` has which of
        them saw it.
    of_forces, of_stress : Derived
        Internal errors and calibrations of components of forces, and of stresses.
    joint_noise : JointNoise, optional
        Noise of energies and of forces, if both were learned.
    """

    fitted: Fitted
    plan: Plan
    internal: CalibrationData | None
    full: FullModel
    solution: str
    target_std: float
    predicted: Float64Array
    of_forces: Derived = field(default_factory=Derived)
    of_stress: Derived = field(default_factory=Derived)
    joint_noise: JointNoise | None = None


class Solver:
    """The full model of a training set, ready for members of any size.

    Parameters
    ----------
    data : TrainingSet
    settings : Settings
    rows : KernelRows
        Its whitening and K_NM are used up.
    plan : Plan
    stages : Stages
    """

    def __init__(
        self, data: TrainingSet, settings: Settings, rows: KernelRows, plan: Plan, stages: Stages
    ) -> None:
        self.data = data
        self.rows = rows
        self.plan = plan
        self.stages = stages
        self.design = data.design(per_atom=rows.basis.per_atom)
        root = np.sqrt(rows.basis.scale)
        self.whitening = replace(rows.whitening, factor=rows.whitening.factor * root)
        del rows.whitening
        with stages.stage("Full model"), _few_threads(data, len(rows.origins)):
            self.Phi = np.asarray(self.whitening.features(rows.K_NM, overwrite=True))
            del rows.K_NM
            self.joint: JointModel | None = None
            if data.mechanics is None:
                self.full = self._full_model(settings)
            else:
                given = (self.Phi, self._target(settings), data.mechanics, data.groups, settings)
                check_conventions(*given)
                self.joint = fit_joint_model(*given)
                self.full = self.joint.full
        # With forces, the scale of the full model is that of its prior.
        rms = float(np.sqrt(np.mean((self._target(settings) - self.full.center[0]) ** 2)))
        self.target_std = float(self.full.scale[0]) if self.joint is None else rms or 1.0

    def _target(self, settings: Settings) -> Float64Array:
        """Return the targets less the baseline."""
        return self.data.y - _baseline(self.data, settings, self.design).predict(self.design)

    def _full_model(self, settings: Settings) -> FullModel:
        return fit_full_model(
            self.Phi,
            self._target(settings),
            settings.noise,
            center=settings.baseline != "none",
            groups=self._groups(settings),
        )

    def _groups(self, settings: Settings) -> IntArray | None:
        """Return what is left out together, a number for each row; None for single rows."""
        data = self.data
        return None if settings.resample == "atoms" else data.groups[data.row_structure]

    def left_out_residuals(self, settings: Settings) -> Float64Array:
        """Return labels less what the full model without them says, (n,); groups are left out."""
        full = self.full
        relative = (self._target(settings) - full.center[0]) / full.scale[0]
        groups = self._groups(settings)
        residuals = leave_one_out_residuals(full.process, self.Phi, relative, groups=groups)
        return np.asarray(residuals[:, 0] * full.scale[0])

    def solve(self, settings: Settings, rng: np.random.Generator) -> Outcome:
        """Draw and solve the members, and calibrate them internally.

        Parameters
        ----------
        settings : Settings
            May differ from those of the full model in what concerns the members.
        rng : Generator
        """
        data, Phi, stages = self.data, self.Phi, self.stages
        counts = draw_counts(data, settings, rng)
        baseline = _baseline(data, settings, self.design, counts)
        with stages.stage("Members"), _few_threads(data, Phi.shape[1]):
            offsets = baseline.predict_members(self.design)
            targets = data.y[:, None] - offsets
            if self.joint is None:
                members = fit_members(self.full, Phi, targets[:, None, :], counts)
            else:
                centered = settings.baseline != "none"
                self.joint, members = solve_joint_members(
                    self.joint, Phi, targets, counts, centered=centered
                )
                self.full = self.joint.full
            n = len(data.y)
            predicted = members.predict(Phi[:n])[:, 0] + offsets
        with stages.stage("Calibration"):
            internal = internal_data(data.y, predicted, counts, settings.calibration)
            calibrations = fit_calibrations(internal, settings.calibration)
            derived = Phi[n:] @ members.weights[:, 0]
            of_forces, of_stress = self._derived(derived, counts, settings)
            if self.joint is not None:
                warn_of_doubtful(data, settings, predicted, derived, counts)
            for name, of in (("forces", of_forces), ("stress", of_stress)):
                doubt_labels(name, getattr(settings, name), of, calibrations, counts.shape[1])
        fitted = replace(
            self._assemble(settings, members, baseline, calibrations, counts, internal),
            forces_calibrations=of_forces.calibrations,
            stress_calibrations=of_stress.calibrations,
        )
        return Outcome(
            fitted,
            self.plan,
            internal,
            self.full,
            _how(members),
            self.target_std,
            predicted,
            of_forces,
            of_stress,
            None if self.joint is None else self.joint.noise,
        )

    def _derived(
        self, predicted: Float64Array, counts: IntArray, settings: Settings
    ) -> tuple[Derived, Derived]:
        """Calibrate forces and stresses by members that did not see a structure.

        What members say about each row is `predicted`.
        """
        labels = self.data.mechanics
        if labels is None:
            return Derived(), Derived()
        frames, wanted = self.data.frames, settings.calibration
        forces = calibrate_forces(labels, predicted, counts, wanted)
        if not labels.n_with_virial:
            return forces, Derived()
        densities = np.array([len(a) / a.cell.volume if a.cell.rank == 3 else 0.0 for a in frames])
        return forces, calibrate_stresses(labels, predicted, counts, densities, wanted)

    def _assemble(
        self,
        settings: Settings,
        members: Members,
        baseline: Baseline,
        calibrations: dict[str, Calibration],
        counts: IntArray,
        internal: CalibrationData | None,
    ) -> Fitted:
        rows, whitening = self.rows, self.whitening
        return Fitted(
            settings=settings,
            representation=replace(rows.representation, precise=settings.mechanical),
            representatives=rows.basis.representatives,
            origins=rows.origins,
            kernel_scale=rows.basis.scale,
            weights=whitening.kernel_weights(members.weights)[:, 0],
            intercepts=members.intercepts[0],
            pp_weights=whitening.kernel_weights(self.full.weights)[:, 0],
            pp_intercept=float(self.full.center[0]),
            baseline=baseline,
            calibrations=calibrations,
            pp_variance=_variance(self.full, whitening, settings) if settings.keep_pp else None,
            membership=np.minimum(counts, 255).astype(np.uint8),
            training_novelty=rows.novelty,
            training_spread=0.0 if internal is None else float(internal.spread.max()),
        )


def _few_threads(data: TrainingSet, rank: int) -> threadpool_limits:
    """Use one thread for small matrices: on a busy machine more would wait for one another."""
    small = rank <= _SMALL and data.n_rows <= _FEW
    return threadpool_limits(limits=1 if small else None)


def check_members(data: TrainingSet, settings: Settings) -> None:
    """Refuse data that members and their baselines cannot be had from, before the work."""
    counts = draw_counts(data, settings, np.random.default_rng(settings.seed))
    if not can_calibrate(counts, settings):
        raise InputError(
            "subsample",
            settings.subsample,
            f"sub-samples that leave some of the {len(data.y)} rows out of at least {MIN_ABSENT} "
            f"of {settings.n_members} members, to calibrate on",
            "Use smaller sub-samples, more members or more structures, or calibration='none'.",
        )
    _baseline(data, settings, data.design(per_atom=settings.per_atom), counts)


def _baseline(
    data: TrainingSet, settings: Settings, design: Float64Array, counts: IntArray | None = None
) -> Baseline:
    return fit_baseline(
        cast("str | Mapping[str | int, float]", settings.baseline),
        design,
        data.y,
        species=data.species,
        kind=settings.kind,
        counts=counts,
        isolated=data.isolated,
    )


def _variance(full: FullModel, whitening: Whitening, settings: Settings) -> ProjectedVariance:
    precision = np.float64 if settings.mechanical else np.float32
    return ProjectedVariance(
        whitening=whitening.factor.astype(precision),
        posterior=full.process.factor.astype(precision),
        noise_variance=full.process.noise_variance,
        variance=float(full.scale[0] ** 2),
    )


def _how(members: Members) -> str:
    solution = members.solution
    iterations = f", {solution.n_iterations} iterations" if solution.n_iterations else ""
    return f"{solution.method}{iterations}"


# RowSource of a training set: computed, kept or spilled to disk, and stored for a resumed run.
@dataclass(frozen=True)
class Resources:
    """What a run may use.

    Attributes
    ----------
    threads : int
    memory : str, float, optional
        Limit, such as ``"8GB"``.
    checkpoint : Checkpoint, optional
    """

    threads: int = 1
    memory: str | float | None = None
    checkpoint: Checkpoint | None = None


class FeatureStage:
    """Computes the features of a training set.

    Parameters
    ----------
    data : TrainingSet
    resources : Resources
    stages : Stages
    """

    def __init__(self, data: TrainingSet, resources: Resources, stages: Stages) -> None:
        self.data = data
        self.resources = resources
        self.stages = stages
        self.n_workers = resources.threads

    def representation(
        self, soap: Soap, compression: Compression | None, rng: np.random.Generator
    ) -> Representation:
        """Return the representation, with a compression found from random structures."""
        species = tuple(self.data.species)
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("representation"):
            tensors, values = checkpoint.load("representation")
            errors = values["kernel_errors"]
            projections = tuple(Projection(tensors[str(s)], e) for s, e in enumerate(errors))
            return Representation(soap, species, projections, values["feature_scale"])
        if compression is None and soap.normalize:
            return Representation(soap, species)
        with self.stages.stage("Compression"):
            picked = self._sample(rng)
            frames, centers = self._structures(picked)
            representation = fit_representation(soap, species, frames, centers, compression)
        if checkpoint is not None:
            checkpoint.save(
                "representation",
                {str(s): p.matrix for s, p in enumerate(representation.projections)},
                {
                    "kernel_errors": [p.kernel_error for p in representation.projections],
                    "feature_scale": representation.feature_scale,
                },
            )
        return representation

    def everything(
        self, representation: Representation, mode: Mode, stack: ExitStack
    ) -> KeptFeatures | SpilledFeatures:
        """Return the features of all environments, in memory or, until the stack ends, on disk."""
        n, d = self.data.n_environments, representation.n_features
        checkpoint = self.resources.checkpoint
        features: KeptFeatures | SpilledFeatures
        if mode == "keep":
            features = KeptFeatures(n, d)
        else:
            directory = (
                checkpoint.directory
                if checkpoint is not None
                else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qualms-")))
            )
            features = SpilledFeatures(directory / "features", n, d)
            stack.callback(features.close)
        if checkpoint is not None and checkpoint.has("features"):
            self._reload(features, checkpoint)
        else:
            self._fill(features, representation, np.arange(len(self.data.frames)))
            if checkpoint is not None:
                _store(features, checkpoint)
        return features

    def some(self, representation: Representation, picked: IntArray) -> KeptFeatures:
        """Return the features of some structures, in memory."""
        n = int(np.diff(self.data.offsets)[picked].sum())
        features = KeptFeatures(n, representation.n_features)
        self._fill(features, representation, picked)
        return features

    def blocks(
        self, representation: Representation, features: RowSource | None
    ) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins.

        They are computed, again, if they are not given.
        """
        offsets = self.data.offsets
        if features is None:
            for batch in self._stream(representation, np.arange(len(self.data.frames))):
                yield batch.features, batch.offsets
            return
        for first, last in structure_blocks(offsets):
            block = features[int(offsets[first]) : int(offsets[last])]
            yield block, offsets[first : last + 1] - offsets[first]

    def _sample(self, rng: np.random.Generator) -> IntArray:
        """Structures, in random order, with enough environments to find a compression from.

        The first structure with each pair of elements comes first: the features of a pair that the
        sample lacks would be lost, and the element be invisible.
        """
        order = rng.permutation(len(self.data.frames))
        order = np.concatenate([order[(first := self._with_pairs(order))], np.delete(order, first)])
        sizes = np.diff(self.data.offsets)[order]
        wanted = sample_size(self.data.n_environments)
        enough = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1
        return order[: max(enough, len(first))]

    def _with_pairs(self, order: IntArray) -> IntArray:
        """Return the places in `order` of structures that have a pair of elements first."""
        seen: set[tuple[int, int]] = set()
        places = []
        for place, i in enumerate(order):
            present = np.unique(self.data.frames[i].numbers).tolist()
            pairs = set(combinations_with_replacement(present, 2))
            if not pairs <= seen:
                seen |= pairs
                places.append(place)
        return np.array(places, dtype=np.intp)

    def _structures(self, picked: IntArray) -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        return [self.data.frames[i] for i in picked], [self.data.centers[i] for i in picked]

    def _stream(self, representation: Representation, picked: IntArray) -> Iterator[Batch]:
        structures = ((self.data.frames[i], self.data.centers[i]) for i in picked)
        return stream_features(representation, structures, n_workers=self.n_workers)

    def _fill(
        self,
        features: KeptFeatures | SpilledFeatures,
        representation: Representation,
        picked: IntArray,
    ) -> None:
        with self.stages.stage("Power spectra", len(features)) as advance:
            done = 0
            for batch in self._stream(representation, picked):
                features.append(batch.features)
                done += len(batch.features)
                advance(done)
        stop_workers()

    def _reload(self, features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
        n, d = features.shape
        path = checkpoint.path("features")
        if not path.exists() or path.stat().st_size != 4 * n * d:
            raise InputError(
                "resume", str(path), f"a file of {4 * n * d} bytes", "Run without --resume."
            )
        if isinstance(features, KeptFeatures):
            with self.stages.stage("Reading features", n) as advance:
                stored = SpilledFeatures(path, n, d)
                for begin in range(0, n, BLOCK):
                    features.append(stored[begin : begin + BLOCK])
                    advance(min(begin + BLOCK, n))
                stored.close()


def _store(features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
    if isinstance(features, SpilledFeatures):
        features.flush()
    else:
        n, d = features.shape
        with_file = SpilledFeatures(checkpoint.path("features"), n, d)
        for begin in range(0, n, BLOCK):
            with_file.append(features[begin : begin + BLOCK])
        with_file.flush()
        with_file.close()
    checkpoint.complete("features")


# From labelled structures to a trained model, one stage after the other.
#: Share of the training structures that would not look like extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Kernel rows are float32, or with forces float64: see `qualms.gp.linalg.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: Structures whose neighbours are counted for the plan.
_SAMPLED = 10


class Training:
    """The stages of a training run; `run` goes through them in order.

    Parameters
    ----------
    data : TrainingSet
    settings : Settings
    resources : Resources
    stages : Stages
    """

    def __init__(
        self, data: TrainingSet, settings: Settings, resources: Resources, stages: Stages
    ) -> None:
        self.data = data
        self.settings = settings
        self.resources = resources
        self.stages = stages
        self.features = FeatureStage(data, resources, stages)
        check_members(data, settings)
        self.compression = resolve_compression(
            settings.representation,
            data.species,
            data.n_environments,
            min(settings.n_representatives, data.n_environments),
            derivatives=settings.has_forces,
        )
        self.plan = self._make_plan()
        self.features.n_workers = self.plan.n_workers

    def run(self) -> Outcome:
        """Train."""
        return self.prepare().solve(self.settings, np.random.default_rng(self.settings.seed))

    def prepare(self) -> Solver:
        """Compute everything that members of any size share."""
        return Solver(self.data, self.settings, self.kernel_rows(), self.plan, self.stages)

    def kernel_rows(self) -> KernelRows:
        """Compute features, choose representatives, and compute kernel rows."""
        with ExitStack() as stack:
            representation = self.features.representation(
                self.settings.representation, self.compression, self._rng(1)
            )
            candidates = self._candidates(representation, stack)
            features = None if self.plan.mode == "recompute" else candidates.features
            chosen = self._representatives(representation, candidates)
            whitening, representatives, chosen = self._whitened(
                representation, candidates.features[chosen], chosen
            )
            candidates_rows = candidates.rows
            origins = self._origins(candidates_rows[chosen])
            del candidates
            basis, K, novelty = self._kernel_rows(
                representation,
                representatives,
                self._own(candidates_rows[chosen]),
                features,
            )
            del features  # before the largest matrices of all are made
        return KernelRows(representation, basis, origins, whitening, K, novelty)

    def _rng(self, purpose: int) -> np.random.Generator:
        """Return a generator of its own for each purpose: a resumed run leaves out stages."""
        return np.random.default_rng([self.settings.seed, purpose])

    # -- what there is to do ----------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        widths = Representation(self.settings.representation, tuple(self.data.species)).widths
        most = max(widths) if self.compression is None else self.compression.n_features
        kept = [min(w, most) for w in widths]
        maps = [] if self.compression is None else zip(widths, kept, strict=True)
        checkpoint = self.resources.checkpoint
        return make_plan(
            n_rows=self.data.n_rows,
            n_environments=self.data.n_environments,
            n_features=sum(kept),
            n_raw_features=sum(widths),
            n_scales=len(widths),
            n_representatives=min(self.settings.n_representatives, self.data.n_environments),
            n_members=self.settings.n_members,
            n_workers=self.resources.threads,
            memory=self.resources.memory,
            directory=None if checkpoint is None else checkpoint.directory,
            n_structures=len(self.data.frames),
            selection=self.settings.selection,
            keep_pp=self.settings.keep_pp,
            to_disk=checkpoint is not None,
            n_pairs=self._n_pairs() if self.settings.mechanical else 0,
            n_projection=sum(width * q for width, q in maps),
        )

    def _n_pairs(self) -> int:
        """Estimate the number of neighbours of all environments, from a few structures."""
        frames = self.data.frames[:: max(1, len(self.data.frames) // _SAMPLED)]
        found = 0
        for scale in self.settings.representation.scales:
            for atoms in frames:
                found += len(neighbor_list("i", atoms, scale.cutoff))  # type: ignore[no-untyped-call]
        return int(found / sum(map(len, frames)) * self.data.n_environments)

    # -- representatives --------------------------------------------------------------------------

    def _candidates(self, representation: Representation, stack: ExitStack) -> _Candidates:
        """Return all environments, or, if features are computed twice, as many as fit."""
        if self.plan.mode != "recompute":
            features = self.features.everything(representation, self.plan.mode, stack)
            return _Candidates(features, np.arange(self.data.n_environments))
        picked = self._pool()
        rows = [np.arange(*self.data.offsets[s : s + 2]) for s in picked]
        return _Candidates(self.features.some(representation, picked), np.concatenate(rows))

    def _pool(self) -> IntArray:
        """Return random structures whose environments fit; or those of a choice made before."""
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("selection"):
            return np.unique(self._structures(_chosen_before(checkpoint)))
        order = self._rng(2).permutation(len(self.data.frames))
        fits = np.cumsum(np.diff(self.data.offsets)[order]) <= self.plan.n_candidates
        fits[0] = True
        return np.sort(order[fits])

    def _representatives(self, representation: Representation, candidates: _Candidates) -> IntArray:
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("selection"):
            return np.searchsorted(candidates.rows, _chosen_before(checkpoint))
        with self.stages.stage("Representatives", self.plan.n_representatives) as advance:
            chosen = select_representatives(
                candidates.features,
                representation.kernel,
                self.data.center_species[candidates.rows],
                self.settings,
                self._rng(3),
                advance,
            )
        if checkpoint is not None:
            checkpoint.save("selection", {"environments": candidates.rows[chosen]})
        return chosen

    def _whitened(
        self, representation: Representation, representatives: FloatArray, chosen: IntArray
    ) -> tuple[Whitening, FloatArray, IntArray]:
        with self.stages.stage("Whitening"):
            exact = representatives.astype(np.float64)
            rtol = _RTOL_OF_FORCES if self.settings.mechanical else _RTOL
            whitening = whiten(np.asarray(representation.kernel(exact, exact)), rtol=rtol)
        if whitening.negative > 1e-5:
            warnings.warn(
                "The kernel is not positive semi-definite; what is negative was dropped. "
                "(Use an integer exponent.)",
                QualmsWarning,
                stacklevel=4,
            )
        kept = whitening.pivots
        return whitening, np.ascontiguousarray(representatives[kept]), chosen[kept]

    def _structures(self, environments: IntArray) -> IntArray:
        """Return the structure of each of some environments."""
        return np.searchsorted(self.data.offsets, environments, side="right") - 1

    def _origins(self, environments: IntArray) -> IntArray:
        """Return structure, as given to ``fit``, and atom of some environments: (r, 2)."""
        structure = self._structures(environments)
        place = environments - self.data.offsets[structure]
        atom = [self.data.centers[s][p] for s, p in zip(structure, place, strict=True)]
        return np.stack([self.data.source[structure], np.array(atom)], axis=1).astype(np.int64)

    def _own(self, environments: IntArray) -> list[IntArray]:
        """Return the representatives that come from each structure, or from its group."""
        structure = self._structures(environments)
        groups = self.data.groups[structure]
        order = np.argsort(groups, kind="stable")
        sizes = np.bincount(groups, minlength=int(self.data.groups.max()) + 1)
        by_group = np.split(order, np.cumsum(sizes)[:-1])
        return [by_group[g] for g in self.data.groups]

    # -- kernel rows ------------------------------------------------------------------------------

    def _kernel_rows(
        self,
        representation: Representation,
        representatives: FloatArray,
        own: list[IntArray],
        features: RowSource | None,
    ) -> tuple[Basis, Float64Array, tuple[float, float]]:
        """Return the scaled basis, K_NM, and novelties that few training structures exceed."""
        plain = Basis(representation.kernel, representatives, 1.0, self.settings.per_atom)
        K = np.zeros((self.data.n_rows, len(representatives)))
        diagonal = np.empty(len(self.data.y))
        novelty = np.empty((len(own), 2))
        structure = row = done = 0
        with self.stages.stage("Kernel rows", self.data.n_environments) as advance:
            for block, offsets in self.features.blocks(representation, features):
                here = slice(structure, structure + len(offsets) - 1)
                rows = plain.rows(block, offsets, novelty=novelty[here], own=own[here])
                K[row : row + len(rows)] = rows
                diagonal[row : row + len(rows)] = plain.prior_variance(block, offsets)
                structure, row, done = here.stop, row + len(rows), done + len(block)
                advance(done)
        if self.data.mechanics is not None:
            self._derivative_rows(K, representation, representatives)
        scale = unit_scale(1.0, diagonal)
        K *= scale
        strangest, mean = np.quantile(novelty, _NOT_NOVEL, axis=0).tolist()
        return replace(plain, scale=scale), K, (strangest, mean)

    def _derivative_rows(
        self, K: Float64Array, representation: Representation, representatives: FloatArray
    ) -> None:
        """Fill in the rows of forces and virials, and those of energies anew, in float64."""
        n, labels = len(self.data.y), self.data.mechanics
        assert labels is not None
        with self.stages.stage("Rows of forces", self.data.n_environments) as advance:
            fill_rows(
                K[:n],
                K[n:],
                self.data.frames,
                labels,
                scale_rows(representation, representatives),
                advance,
            )


@dataclass(frozen=True)
class _Candidates:
    """RowSource of environments among which representatives are chosen, and which they are.

    Environments are counted through all structures; `rows` is increasing.
    """

    features: RowSource
    rows: IntArray


def _chosen_before(checkpoint: Checkpoint) -> IntArray:
    """Return the representatives that an interrupted run had chosen."""
    environments: IntArray = checkpoint.load("selection")[0]["environments"]
    return environments
