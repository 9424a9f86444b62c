"""AtomisticModel: structures in, properties with calibrated error bars out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from threadpoolctl import threadpool_limits

from qualms.atomistic.checkpoint import Checkpoint, run_key
from qualms.atomistic.feature_stage import Resources
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.hypers import Soap
from qualms.atomistic.mechanics import Mechanics, check_frames, predict_mechanics
from qualms.atomistic.model_file import (
    Provenance,
    Record,
    make_provenance,
    read_model,
    write_model,
)
from qualms.atomistic.plan import Plan, default_threads, parse_memory
from qualms.atomistic.potential import Potential, make_potential
from qualms.atomistic.predicting import (
    Chunk,
    atom_contributions,
    centers_of,
    concatenated,
    stream_chunks,
)
from qualms.atomistic.progress import Display, Stages
from qualms.atomistic.progress_bars import Bars
from qualms.atomistic.records import make_record
from qualms.atomistic.settings import Settings, make_settings
from qualms.atomistic.solving import Outcome
from qualms.atomistic.structures import refuse_single
from qualms.atomistic.summary import describe
from qualms.atomistic.threads import limited
from qualms.atomistic.training import Training
from qualms.atomistic.training_set import TrainingSet, make_training_set, resolved_species
from qualms.core.calibration import CalibrationData
from qualms.core.typing import BoolArray, Float64Array
from qualms.errors import InputError, QualmsError
from qualms.prediction import Prediction
from qualms.storage.files import check_output


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
        A preset ("organic", "nmr", "general"), or hyper-parameters: see `qualms.atomistic.hypers`.
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
