"""A trained model in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic.baseline import atom_design, structure_design
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import (
    Mechanics,
    Potential,
    check_frames,
    make_potential,
    predict_mechanics,
)
from qualms.atomistic.memory import Plan, default_threads, format_time, parse_memory
from qualms.atomistic.model_file import (
    Provenance,
    Record,
    make_provenance,
    make_record,
    read_model,
    write_model,
)
from qualms.atomistic.settings import Settings, make_settings
from qualms.atomistic.structures import check_species, check_structures, refuse_single, symbols_of
from qualms.atomistic.training import Checkpoint, Outcome, Resources, Training, run_key
from qualms.atomistic.training_set import TrainingSet, make_training_set, resolved_species
from qualms.calibration.base import Calibration, CalibrationData
from qualms.calibration.methods import Scaled
from qualms.errors import InputError, QualmsError, counted
from qualms.features.hypers import Compression, Soap
from qualms.features.soap import BATCH, Batch, stream_features
from qualms.io.files import check_output
from qualms.prediction import Prediction
from qualms.progress import Bars, Display, Stages
from qualms.resources import limited

_METHODS = {"pca": "PCA", "pairs": "PCA of pairs of species", "fps": "FPS", "cur": "CUR"}


def describe(fitted: Fitted, record: Record, provenance: Provenance) -> str:
    """Return what a model is and what it learned, a line for each subject."""
    lines = {
        "target": _target(fitted),
        "trained on": _data(record, fitted.per_atom),
        "elements": symbols_of(fitted.representation.species),
        "representation": _representation(fitted),
        "representatives": f"{record.effective_rank} of {fitted.settings.n_representatives} "
        f"asked for, by {fitted.settings.selection}",
        "noise": f"σ = {record.noise:.4g} {units_of(fitted)}".rstrip()
        + f" ({record.noise / record.target_std:.1e} of the spread of the target)",
        "baseline": fitted.baseline.name,
        "members": _members(fitted, record),
        "internal error": _errors(fitted, record),
        "calibration": _calibration(fitted.calibration),
        **_forces(fitted, record),
        "time": format_time(sum(record.seconds.values())),
        "made": f"{provenance.created} by qualms {provenance.packages['qualms']}, "
        f"data {provenance.data_digest[:12]}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def units_of(fitted: Fitted) -> str:
    """Return the units of errors: per atom if the target is extensive."""
    units = fitted.settings.units
    if fitted.settings.kind != "extensive":
        return units
    return f"{units}/atom" if units else "per atom"


def _target(fitted: Fitted) -> str:
    settings = fitted.settings
    units = f" in {settings.units}" if settings.units else ""
    of = f" of {symbols_of(settings.species)}" if settings.species else ""
    return f"{settings.target}{units} ({settings.kind}{of})"


def _data(record: Record, per_atom: bool) -> str:
    rows = f"{record.n_rows} atoms of " if per_atom else ""
    text = f"{rows}{record.n_structures} structures, {record.n_environments} environments"
    skipped = [
        f"{n} {what}"
        for n, what in (
            (record.n_unlabelled, "unlabelled skipped"),
            (record.n_isolated, "isolated atoms"),
            (record.n_duplicates, "duplicates"),
        )
        if n
    ]
    return f"{text} ({', '.join(skipped)})" if skipped else text


def _representation(fitted: Fitted) -> str:
    representation = fitted.representation
    soap = representation.soap
    cutoffs = " + ".join(f"{scale.cutoff:g}" for scale in soap.scales)
    text = f"SOAP by {soap.resolved_engine}, cutoff {cutoffs} Å, ζ = {soap.exponent:g}"
    if not representation.projections:
        return f"{text}, {representation.n_features} features"
    raw = sum(p.matrix.shape[0] for p in representation.projections)
    error = max(p.kernel_error for p in representation.projections)
    standard = "pairs" if fitted.settings.has_forces else "pca"
    method = soap.compression.method if isinstance(soap.compression, Compression) else standard
    kept = f"{raw} → {representation.n_features} features by {_METHODS[method]}"
    return f"{text}, {kept} (kernel ± {error:.1e})"


def _members(fitted: Fitted, record: Record) -> str:
    settings = fitted.settings
    how = "bootstrap" if settings.replace else f"sub-samples of {settings.subsample:g}"
    return f"{settings.n_members}, {how} ({record.solver})"


def _errors(fitted: Fitted, record: Record) -> str:
    if record.rmse is None or record.mae is None:
        return "not known: the members agree to rounding, or none was without a row"
    return (
        f"RMSE {record.rmse:.4g}, MAE {record.mae:.4g} {units_of(fitted)}".rstrip()
        + f" ({record.n_internal} rows, each by members that had not seen it)"
    )


def forces_units_of(fitted: Fitted) -> str:
    """Return the units of forces."""
    return f"{fitted.settings.units}/Å" if fitted.settings.units else "per Å"


def stress_units_of(fitted: Fitted) -> str:
    """Return the units of stresses."""
    return f"{fitted.settings.units}/Å³" if fitted.settings.units else "per Å³"


def _forces(fitted: Fitted, record: Record) -> dict[str, str]:
    """Return lines about forces and stresses, if they were learned."""
    settings, units = fitted.settings, forces_units_of(fitted)
    if not settings.mechanical:
        return {}
    what = "forces" if settings.forces else "stresses"
    parts = [f"{record.n_force_rows} components" if settings.forces else ""]
    of = "of stresses" if settings.forces else "components"
    parts += [f"{record.n_virial_rows} {of}" if settings.stress else ""]
    if settings.forces and record.n_without_forces:
        parts.append(f"{record.n_without_forces} structures without")
    if settings.stress and record.n_without_stress:
        parts.append(f"{record.n_without_stress} without a stress")
    lines = {what: ", ".join(part for part in parts if part)}
    noises = [] if record.forces_noise is None else [f"{record.forces_noise:.4g} {units}"]
    if record.virial_noise is not None:
        noises.append(f"{record.virial_noise:.4g} {units_of(fitted)} of virials")
    lines[what] += f"; σ = {', '.join(noises)}" if noises else ""
    of_forces = (record.forces_rmse, record.forces_mae, record.forces_internal)
    of_stress = (record.stress_rmse, record.stress_mae, record.stress_internal)
    return {
        **lines,
        **_derived("forces'", *of_forces, units, fitted.forces_calibration),
        **_derived("stress'", *of_stress, stress_units_of(fitted), fitted.stress_calibration),
    }


def _derived(
    whose: str,
    rmse: float | None,
    mae: float | None,
    n_structures: int,
    units: str,
    own: Calibration | None,
) -> dict[str, str]:
    """Return lines about errors and error bars of forces, or of stresses."""
    lines = {}
    if rmse is not None:
        lines[f"{whose} error"] = f"RMSE {rmse:.4g}, MAE {mae:.4g} {units} (internal)"
    if own is not None:
        lines[f"{whose} bars"] = _calibration(own, n_structures)
    return lines


def _calibration(calibration: Calibration, n_structures: int = 0) -> str:
    """Describe a calibration; components of one structure are several rows."""
    rows = f"{calibration.n_points} rows"
    if n_structures:
        rows = f"{calibration.n_points} components of {counted(n_structures, 'structure')}"
    return (
        f"{calibration.method}, α = {_short(calibration.alpha)}, γ = {_short(calibration.gamma)} "
        f"({rows})"
    )


def _short(value: float) -> str:
    """Write a number to three decimals, or if it is small to three digits."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


# From new structures to kernel rows, as a stream.
#: What novelties may differ by in rounding.
_NOVEL = 1e-6


@dataclass(frozen=True)
class Chunk:
    """Some of the structures that are to be predicted, and their features.

    Attributes
    ----------
    frames : list of Atoms
        As they were given.
    known : list of Atoms
        Without atoms of species that the model does not know.
    centers : list of arrays of int
        The atoms of `frames` whose environments count.
    batch : Batch
        Features of these environments.
    fitted : Fitted
    """

    frames: list[Atoms]
    known: list[Atoms]
    centers: list[IntArray]
    batch: Batch
    fitted: Fitted

    @property
    def has_unknown(self) -> BoolArray:
        """Whether a structure has atoms of species that the model does not know."""
        pairs = zip(self.frames, self.known, strict=True)
        return np.array([len(given) != len(known) for given, known in pairs])

    @property
    def sizes(self) -> Float64Array:
        """What an average is multiplied by: the number of atoms if the target is extensive."""
        if self.fitted.settings.kind != "extensive":
            return np.ones(len(self.frames))
        return np.array([len(known) for known in self.known], dtype=np.float64)

    @property
    def factors(self) -> Float64Array:
        """What averages are multiplied by, a number for each prediction."""
        return np.ones(len(self.batch.features)) if self.fitted.per_atom else self.sizes

    @property
    def design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each prediction."""
        species = self.fitted.baseline.species
        if self.fitted.per_atom:
            return atom_design(self.center_species, species)
        return structure_design(self.known, species)

    @property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    def rows(self, novelty: Float64Array | None = None) -> Float64Array:
        """Return the kernel rows K_XM."""
        return self.fitted.basis.rows(self.batch.features, self.batch.offsets, novelty=novelty)

    def atom_novelty(self) -> list[Float64Array]:
        """Return how strange each environment of each structure is, relative to the training set.

        One is where `extrapolates` begins: so strange is the strangest environment of one training
        structure in a hundred, representatives of its own not counted.
        """
        limit = self.fitted.training_novelty[0] + _NOVEL
        novelty = self.fitted.basis.novelty(self.batch.features) / limit
        return [novelty[a:b] for a, b in pairwise(self.batch.offsets)]

    def prior_variance(self) -> Float64Array:
        """Return the diagonal of K_XX, a number for each prediction."""
        return self.fitted.basis.prior_variance(self.batch.features, self.batch.offsets)

    def predict(self, rows: Float64Array) -> Prediction:
        """Return the calibrated prediction."""
        raw = Prediction(self.fitted.members(rows, self.design))
        calibrated = raw.calibrated(self.fitted.calibration)
        return calibrated * self.sizes if self.fitted.settings.kind == "extensive" else calibrated

    def extrapolates(self, prediction: Prediction, novelty: Float64Array) -> BoolArray:
        """Return for each structure, given its novelty, whether it looks like extrapolation.

        It does if an environment, or all of them on average, are less like any representative than
        those of 99 % of the training structures were like representatives from other structures,
        if the members disagree more than they did about any training row that they had not seen, or
        if it has atoms of unknown species.
        """
        flags: BoolArray = np.any(novelty > np.array(self.fitted.training_novelty) + _NOVEL, axis=1)
        spread = prediction.uncalibrated.std
        # Members that agreed to rounding on all training rows differ by rounding everywhere.
        largest = self.fitted.training_spread or np.inf
        if self.fitted.per_atom:
            wild = spread > largest
            edges = pairwise(self.batch.offsets)
            flags |= np.array([bool(np.any(wild[a:b])) for a, b in edges])
        else:
            flags |= spread > largest * self.sizes
        return flags | self.has_unknown


def stream_chunks(
    fitted: Fitted,
    frames: Iterable[Atoms],
    *,
    threads: int = 1,
    allow_unknown: bool = False,
    batch: int = BATCH,
) -> Iterator[Chunk]:
    """Yield structures with their features, in order.

    Parameters
    ----------
    fitted : Fitted
    frames : iterable of Atoms
        May be a generator that reads a file.
    threads : int
    allow_unknown : bool
        Whether atoms of species that the model does not know are left out, rather than an error.
    batch : int
        Environments in a chunk, about.
    """
    waiting: deque[tuple[Atoms, Atoms, IntArray]] = deque()

    def structures() -> Iterator[tuple[Atoms, IntArray]]:
        for index, atoms in enumerate(frames):
            check_structures([atoms], first=index)
            kept = _known_atoms(atoms, fitted, index, allow_unknown)
            known = atoms if len(kept) == len(atoms) else atoms[kept]
            inside = centers_of(known.numbers, fitted)
            waiting.append((atoms, known, kept[inside]))
            yield known, inside

    for found in stream_features(
        fitted.representation, structures(), n_workers=threads, batch=batch
    ):
        taken = [waiting.popleft() for _ in found.sizes]
        yield Chunk(
            frames=[given for given, _, _ in taken],
            known=[known for _, known, _ in taken],
            centers=[centers for _, _, centers in taken],
            batch=found,
            fitted=fitted,
        )


def _known_atoms(atoms: Atoms, fitted: Fitted, index: int, allow_unknown: bool) -> IntArray:
    known = np.isin(atoms.numbers, fitted.representation.species)
    if not known.all() and (not allow_unknown or not known.any()):
        check_species([atoms], fitted.representation.species, first=index)
    return np.flatnonzero(known)


def centers_of(numbers: IntArray, fitted: Fitted) -> IntArray:
    """Return the atoms whose environments count: all, or those of the species of the target."""
    species = fitted.settings.species
    if not fitted.per_atom or species is None:
        return np.arange(len(numbers))
    return np.flatnonzero(np.isin(numbers, species))


def atom_contributions(chunk: Chunk) -> list[Prediction]:
    """Return what each atom contributes to the property of its structure.

    Contributions sum (extensive) or average (intensive) to the prediction of the structure, member
    by member, and so after calibration: the members of all atoms of a structure are scaled about
    their means by the factor that calibrates the structure. Of atomic properties, they are the
    predictions.
    """
    fitted = chunk.fitted
    whole = chunk.predict(chunk.rows())
    edges = list(pairwise(chunk.batch.offsets))
    if fitted.per_atom:
        return [whole[a:b] for a, b in edges]
    raw = fitted.basis.environment_rows(chunk.batch.features) @ fitted.weights
    raw += fitted.intercepts
    raw += fitted.baseline.predict_members(
        atom_design(chunk.center_species, fitted.baseline.species)
    )
    spread = whole.uncalibrated.std
    factors = np.divide(whole.std, spread, out=np.ones_like(spread), where=spread > 0)
    return [
        Prediction(raw[a:b]).calibrated(Scaled(float(factor)))
        for (a, b), factor in zip(edges, factors, strict=True)
    ]


def concatenated(predictions: Sequence[Prediction]) -> Prediction:
    """Join the predictions of chunks."""
    return predictions[0] if len(predictions) == 1 else Prediction.concatenate(predictions)


# AtomisticModel: structures in, properties with calibrated error bars out.
class AtomisticModel:
    """A property of structures or of atoms, with error bars that hold.

    SOAP environments, a sparse projected process, and members trained on sub-samples that share its
    representatives: Musil et al., J. Chem. Theory Comput. 15, 906 (2019).

    Parameters
    ----------
    target : str
        Key of the property: in ``atoms.info``, or ``atoms.arrays`` for atomic properties. ``REF_``
        keys and results of calculators are understood.
    kind : {"extensive", "intensive", "atomic"}
        A sum over atoms, such as an energy; an average over atoms; or a value for each atom.
    representation : str, dict or Soap
        A preset ("organic", "nmr", "general"), or hyper-parameters: see `qualms.features.hypers`.
    species : list of str, optional
        Elements that an atomic property is of; those that have labels by default.
    n_representatives : int
        M.
    selection : {"fps", "cur", "random"}
        How representative environments are chosen.
    per_species : bool
        Whether each element gets its share of the representatives, rather than all competing.
    baseline : {"composition", "mean", "atoms", "none"} or dict
        What is subtracted first: least squares in the composition; a constant; energies of isolated
        atoms, given here by element or found in the data (``config_type=isolated_atom``); nothing.
    noise : {"loo", "evidence"} or float
        How to choose the noise variance σ², or σ² itself, in the units of the target squared (per
        atom if it is extensive).
    forces, stress : str, optional
        Keys of forces and of stresses to learn together with the energy.
    forces_noise, stress_noise : "auto" or float
        Noise variances of forces, and of virials per atom (Vσ/n, an energy), in their units
        squared; chosen together with that of the energy by default.
    noise_per : {"atom", "structure"}
        With forces: whether the noise of an energy is that of each atom, or of each structure.
    n_members : int
        N_R.
    subsample : float or int
        Size of the sub-samples, as a fraction or a number.
    resample : {"structures", "atoms"}
        What is drawn for atomic properties: whole structures, since atoms of one crystal are
        near-copies, or single atoms.
    replace : bool
        Bootstrap instead of sub-sampling.
    calibration : {"student", "shrinkage", "linear", "power", "none"}
        How the spread between members is turned into an error bar; fitted internally.
    units : str
        Of the target; kept with the model and shown.
    seed : int
    keep_pp : bool
        Whether the model keeps what the variance of the projected process, Eq. (3), needs: two
        triangular matrices of M rows.
    memory : str or float, optional
        Limit for training, such as ``"8GB"``.
    threads : int, optional
        Cores to use; all by default, or as many as ``OMP_NUM_THREADS`` says.

    Examples
    --------
    >>> from qualms.data import qm9
    >>> molecules = qm9(n=300)
    >>> model = AtomisticModel("atomization_energy", n_representatives=300, units="eV")
    >>> prediction = model.fit(molecules[:250]).predict(molecules[250:])
    >>> prediction.mean.shape, prediction.std.shape
    ((50,), (50,))
    """

    def __init__(
        self,
        target: str,
        kind: str = "extensive",
        *,
        representation: str | Mapping[str, Any] | Soap = "organic",
        species: Sequence[str | int] | str | None = None,
        n_representatives: int = 1000,
        selection: str = "fps",
        per_species: bool = False,
        baseline: str | Mapping[str | int, float] = "composition",
        noise: str | float = "loo",
        forces: str | None = None,
        stress: str | None = None,
        forces_noise: str | float = "auto",
        stress_noise: str | float = "auto",
        noise_per: str = "atom",
        n_members: int = 16,
        subsample: float = 0.5,
        resample: str = "structures",
        replace: bool = False,
        calibration: str | None = "student",
        units: str = "",
        seed: int = 0,
        keep_pp: bool = True,
        memory: str | float | None = None,
        threads: int | None = None,
    ) -> None:
        given = dict(locals())
        for name in ("self", "memory", "threads"):
            given.pop(name)
        self.settings: Settings = make_settings(given)
        parse_memory(memory)
        self.memory = memory
        self.threads = default_threads(threads)
        self._fitted: Fitted | None = None
        self._record: Record | None = None
        self._provenance: Provenance | None = None
        self._internal: CalibrationData | None = None
        self._potential: Potential | None = None

    def fit(
        self,
        frames: Iterable[Atoms],
        groups: Sequence[object] | None = None,
        *,
        checkpoint: str | Path | None = None,
        resume: bool = False,
        keep_checkpoint: bool = False,
        progress: bool | Display = False,
        on_plan: Callable[[Plan, TrainingSet], object] | None = None,
    ) -> AtomisticModel:
        """Train all members and calibrate them internally.

        Parameters
        ----------
        frames : iterable of Atoms
            Structures without a label are skipped.
        groups : sequence, optional
            Labels of structures that belong together, such as snapshots of one trajectory: in or
            out of a sub-sample together.
        checkpoint : path, optional
            Directory for what is needed to resume an interrupted run; removed at the end.
        resume : bool
            Whether to go on from what is in `checkpoint`.
        keep_checkpoint : bool
            Whether it is left in place, to be removed when the model is safely on disk.
        progress : bool or Display
            Whether to show the progress on standard error, or what shows it.
        on_plan : callable, optional
            Called with the plan (memory, time, file sizes) before the work starts.

        Returns
        -------
        self
        """
        refuse_single(frames)
        data = make_training_set(list(frames), self.settings, groups)
        saved = None
        if checkpoint is not None:
            key = run_key(data.digest, self.settings.model_dump_json())
            saved = Checkpoint(Path(checkpoint), key, resume=resume)
        stages = Stages(Bars() if progress is True else progress or None)
        try:
            with threadpool_limits(limits=self.threads):
                training = Training(
                    data,
                    resolved_species(self.settings, data),
                    Resources(self.threads, self.memory, saved),
                    stages,
                )
                if on_plan is not None:
                    on_plan(training.plan, data)
                outcome = training.run()
        except QualmsError:
            if saved is not None and not resume:
                saved.remove()  # the same run would fail again
            raise
        self._keep(data, outcome, stages)
        if saved is not None and not keep_checkpoint:
            saved.remove()
        return self

    def _keep(self, data: TrainingSet, outcome: Outcome, stages: Stages) -> None:
        """Become the outcome of a training run."""
        self._fitted, self._potential = outcome.fitted, None
        self._internal = outcome.internal
        self._record = make_record(data, outcome, stages)
        self._provenance = make_provenance(data.digest)

    @classmethod
    def from_outcome(cls, data: TrainingSet, outcome: Outcome, stages: Stages) -> AtomisticModel:
        """Return the model that a training run ended in."""
        model = cls._empty(outcome.fitted.settings, None)
        model._keep(data, outcome, stages)
        return model

    @classmethod
    def _empty(cls, settings: Settings, threads: int | None) -> AtomisticModel:
        model = cls.__new__(cls)
        model.settings = settings
        model.memory = None
        model.threads = default_threads(threads)
        model._fitted = model._record = model._provenance = model._internal = None
        model._potential = None
        return model

    def predict(self, frames: Sequence[Atoms], *, unknown_species: str = "error") -> Prediction:
        """Predict with calibrated error bars.

        Parameters
        ----------
        frames : sequence of Atoms
        unknown_species : {"error", "ignore"}
            What to do about elements that the model has not been trained on: refuse, or predict as
            if these atoms were not there. `extrapolates` flags such structures.

        Returns
        -------
        Prediction
            One value for each structure; for atomic properties, for each of `target_atoms`.
        """
        chunks = self.stream(frames, unknown_species=unknown_species)
        return concatenated([chunk.predict(chunk.rows()) for chunk in chunks])

    def predict_mean(
        self, frames: Sequence[Atoms], *, unknown_species: str = "error"
    ) -> Float64Array:
        """Predict without error bars: the mean of the committee, Eq. (4)."""
        chunks = self.stream(frames, unknown_species=unknown_species)
        return np.concatenate([self.fitted.mean(c.rows(), c.design) * c.factors for c in chunks])

    def predict_atoms(
        self, frames: Sequence[Atoms], *, unknown_species: str = "error"
    ) -> list[Prediction]:
        """Predict what each atom contributes to each structure, with error bars.

        Contributions sum (extensive) or average (intensive) to the prediction, member by member.
        """
        chunks = self.stream(frames, unknown_species=unknown_species)
        return [atom for chunk in chunks for atom in atom_contributions(chunk)]

    def predict_forces(self, frames: Sequence[Atoms], *, stress: bool = False) -> Mechanics:
        """Predict energies and forces, the derivatives of every member's energy.

        For features by featomic, in float64: energies are those of `predict` up to rounding.

        Parameters
        ----------
        frames : sequence of Atoms
        stress : bool
            Whether to predict stresses, too, of structures whose cells have a volume.
        """
        refuse_single(frames)
        check_frames(self.fitted, frames := list(frames), stress=stress)
        with limited(self.threads, sum(map(len, frames))):
            return predict_mechanics(self.fitted, self.potential, frames, stress=stress)

    def predict_pp(
        self, frames: Sequence[Atoms], *, unknown_species: str = "error"
    ) -> tuple[Float64Array, Float64Array]:
        """Predict with the full projected process, Eq. (3): mean and σ_PP, not calibrated."""
        variance = self.fitted.pp_variance
        if variance is None:
            raise InputError("keep_pp", False, "True when the model was trained")
        means, stds = [], []
        for chunk in self.stream(frames, unknown_species=unknown_species):
            rows = chunk.rows()
            means.append(self.fitted.pp_mean(rows, chunk.design) * chunk.factors)
            stds.append(variance.std(rows, chunk.prior_variance()) * chunk.factors)
        return np.concatenate(means), np.concatenate(stds)

    def extrapolates(self, frames: Sequence[Atoms], *, unknown_species: str = "error") -> BoolArray:
        """Return for each structure whether it looks like extrapolation.

        It does if one of its environments, or all of them on average, are stranger than those of
        99 % of the training structures, if the members disagree more than about any training
        structure that they had not seen, or if it has elements that the model does not know.
        """
        flags = []
        for chunk in self.stream(frames, unknown_species=unknown_species):
            novelty = np.empty((len(chunk.frames), 2))
            flags.append(chunk.extrapolates(chunk.predict(chunk.rows(novelty)), novelty))
        return np.concatenate(flags)

    def stream(self, frames: Iterable[Atoms], *, unknown_species: str = "error") -> Iterator[Chunk]:
        """Yield structures and their features in chunks; `frames` may be larger than memory."""
        if unknown_species not in ("error", "ignore"):
            raise InputError("unknown_species", repr(unknown_species), '"error" or "ignore"')
        refuse_single(frames)
        some = False
        with limited(self.threads):
            ignore = unknown_species == "ignore"
            for chunk in stream_chunks(
                self.fitted, frames, threads=self.threads, allow_unknown=ignore
            ):
                some = True
                yield chunk
        if not some:
            raise InputError("frames", "no structures", "at least one")

    def target_atoms(self, frames: Sequence[Atoms]) -> list[Any]:
        """Return, for an atomic property, the atoms of each structure that `predict` predicts."""
        if self.settings.kind != "atomic":
            raise InputError("kind", repr(self.settings.kind), "'atomic'")
        return [centers_of(atoms.numbers, self.fitted) for atoms in frames]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the model to one safetensors file, completely or not at all."""
        check_output(path, force=force)
        write_model(path, self.fitted, self.record, self.provenance, force=force)

    @classmethod
    def load(cls, path: str | Path, *, threads: int | None = None) -> AtomisticModel:
        """Read a model; everything is checked before anything is built."""
        fitted, record, provenance = read_model(path)
        model = cls._empty(fitted.settings, threads)
        model._fitted, model._record, model._provenance = fitted, record, provenance
        return model

    def summary(self) -> str:
        """Return what the model is and what it learned, in a few lines."""
        return describe(self.fitted, self.record, self.provenance)

    @property
    def fitted(self) -> Fitted:
        """The trained model."""
        if self._fitted is None:
            raise QualmsError("The model is not trained: call fit first.")
        return self._fitted

    @property
    def potential(self) -> Potential:
        """The energy of environments by all members, for features by featomic."""
        if self._potential is None:
            self._potential = make_potential(self.fitted, self.fitted.weights)
        return self._potential

    def __getstate__(self) -> dict[str, Any]:
        # featomic's calculators cannot be pickled, and are made again when they are needed.
        return self.__dict__ | {"_potential": None}

    @property
    def record(self) -> Record:
        """What is known of the training."""
        self.fitted  # noqa: B018
        assert self._record is not None
        return self._record

    @property
    def provenance(self) -> Provenance:
        """Versions, date and digest of the data."""
        self.fitted  # noqa: B018
        assert self._provenance is not None
        return self._provenance

    @property
    def internal(self) -> CalibrationData | None:
        """What the calibration was fitted to; not kept in the model file."""
        return self._internal

    def __repr__(self) -> str:
        state = "trained" if self._fitted is not None else "not trained"
        return f"<AtomisticModel of {self.settings.target} ({self.settings.kind}), {state}>"
