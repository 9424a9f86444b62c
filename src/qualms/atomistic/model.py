"""AtomisticModel: structures in, properties with calibrated uncertainties out."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import cleandoc
from itertools import pairwise
from os import PathLike
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array, IntArray
from qualms.atomistic import training
from qualms.atomistic.baseline import atom_design, structure_design
from qualms.atomistic.fitted import Fitted, Provenance, Record, describe_size
from qualms.atomistic.forces import (
    ForcePrediction,
    Potential,
    check_frames,
    make_potential,
    predict_with_forces,
)
from qualms.atomistic.labels import state_of
from qualms.atomistic.model_file import read_model, write_model
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.reference import ReferencePotential, make_reference
from qualms.atomistic.settings import (
    Reference,
    Settings,
    as_reference,
    make_settings,
    parameter_list,
    signature,
)
from qualms.atomistic.structures import (
    check_not_single,
    check_species,
    check_structures,
    iter_frames,
    symbols_of,
)
from qualms.calibration.base import CalibrationData
from qualms.calibration.members import member_factors, n_independent
from qualms.errors import InputError, QualmsError, QualmsWarning, counted
from qualms.execution import as_workers
from qualms.features.base import BATCH, Batch, stream_features
from qualms.io.files import check_output
from qualms.metrics import Scores, score
from qualms.notebooks import html_table
from qualms.prediction import Prediction
from qualms.progress import Bars, Display, Stages
from qualms.resources import default_threads, format_time, limited

#: Structures, or the path of a file that has them.
_Structures = Iterable[Atoms] | str | PathLike[str]
#: Rounding of novelties.
_ROUNDING = 1e-6


class AtomisticModel:
    """A property of structures or of atoms, with calibrated uncertainties.

    SOAP environments, a sparse Gaussian process (projected process), and an ensemble trained on
    subsamples that shares its representatives: Musil et al., JCTC 15, 906 (2019).

    Examples
    --------
    >>> from qualms.data import qm9
    >>> molecules = qm9(n=300)
    >>> model = AtomisticModel("atomization_energy", n_representatives=300, units="eV")
    >>> prediction = model.fit(molecules[:250]).predict(molecules[250:])
    >>> prediction.mean.shape, prediction.std.shape
    ((50,), (50,))
    """

    def __init__(self, target: str, kind: str = "extensive", **parameters: Any) -> None:
        settings = make_settings({"target": target, "kind": kind, **parameters})
        self._start(settings, settings.threads, settings.reference)

    def _start(
        self, settings: Settings, threads: int | None, confirmed: Reference | None = None
    ) -> None:
        self.settings = self._given = settings
        if confirmed is not None:  # training uses the potential that the user gave
            same = confirmed.model_copy(update={"then": settings.linear_baseline})
            self._given = settings.model_copy(update={"baseline": same})
        self.threads = default_threads(threads)
        self._fitted: Fitted | None = None
        self._potential: Potential | None = None
        #: The reference potential as the user gave it, rather than a file.
        self._confirmed = confirmed
        self._reference: ReferencePotential | None = None

    def fit(
        self,
        frames: _Structures,
        y: object = None,
        *,
        groups: Sequence[object] | str | None = None,
        progress: bool | Display = False,
        skip_failed: bool = False,
        executor: Executor | Any | None = None,
    ) -> AtomisticModel:
        """Train all members and calibrate them on out-of-bag points.

        Parameters
        ----------
        frames : iterable of Atoms, or path
            Structures, or the file that has them. Those without a label are skipped.
        y : None
            Labels are in the structures, under the key `target`.
        groups : sequence or str, optional
            Labels of structures that belong together, such as snapshots of one trajectory: they are
            in or out of a subsample together. A string is the key of labels in ``atoms.info``.
        progress : bool or Display
            Whether to show the progress on standard error, or what shows it.
        skip_failed : bool
            Whether structures for which the reference potential of the baseline fails are left out
            with a warning, rather than an error.
        executor : concurrent.futures.Executor or dask.distributed.Client, optional
            Workers that compute parts of the structures; see the page on scaling. Structures of
            `qualms.atomistic.FrameFiles` are read part by part.
        """
        if y is not None:
            store = "atoms.arrays" if self._given.per_atom else "atoms.info"
            raise InputError(
                f"Labels are not an argument of fit: store them in the structures, as "
                f"{store}[{self._given.target!r}]. Structures that belong together are named by "
                "`groups`, as a keyword.",
                parameter="y",
            )
        structures = structures_of(frames)
        if not isinstance(structures, Sequence):
            structures = list(structures)
        self._fitted = training.fit(
            structures,
            self._given,
            groups,
            workers=as_workers(executor, self.threads if executor is None else 1),
            threads=self.threads,
            stages=Stages(Bars() if progress is True else progress or None),
            reference=self.reference,  # an error if a file names code that no user confirmed
            skip_failed=skip_failed,
        )
        self._potential = None
        chosen = {"representation": self._fitted.settings.representation}
        self.settings = self._given.model_copy(update=chosen)
        return self

    @classmethod
    def from_fitted(
        cls, fitted: Fitted, *, threads: int | None = None, confirmed: Reference | None = None
    ) -> AtomisticModel:
        """Return the model of a training run or of a file."""
        model = cls.__new__(cls)
        model._start(fitted.settings, threads, confirmed)
        model._fitted = fitted
        return model

    def predict(self, frames: Atoms | _Structures, *, unknown_species: str = "error") -> Prediction:
        """Predict with calibrated uncertainties.

        Parameters
        ----------
        frames : Atoms, iterable of Atoms, or path
        unknown_species : {"error", "ignore"}
            Whether atoms of elements that the model was not trained on are an error, or are
            ignored; so are compositions whose baseline the training set does not determine.
            `extrapolates` flags both.

        Returns
        -------
        Prediction
            One value for each structure, without an axis if it is a single ``Atoms``; for atomic
            properties, one for each of `target_atoms`.
        """
        if isinstance(frames, Atoms):
            found = self.predict([frames], unknown_species=unknown_species)
            return found if self.fitted.per_atom else found[0]
        chunks = self.stream(frames, unknown_species=unknown_species)
        return Prediction.concatenate([chunk.predict(chunk.rows()) for chunk in chunks])

    def score(
        self,
        frames: _Structures,
        *,
        quantity: str = "energy",
        units: str | None = None,
        per: str | None = None,
        unknown_species: str = "error",
    ) -> Scores:
        """Score predictions of labelled structures, as ``qualms evaluate`` does.

        Parameters
        ----------
        frames : iterable of Atoms, or path
            With labels; those without are skipped.
        quantity : {"energy", "forces", "stress"}
            "energy" stands for any target.
        units, per, unknown_species
            See `qualms.atomistic.evaluation.evaluate`: energies are per atom by default.
        """
        from qualms.atomistic.evaluation import evaluate

        structures = [frames] if isinstance(frames, Atoms) else list(structures_of(frames))
        evaluations = evaluate(
            self, structures, units=units, per=per, unknown_species=unknown_species
        )
        if quantity not in evaluations:
            raise InputError(
                f"`quantity={quantity!r}` cannot be scored: the model and the structures have "
                f"{', '.join(evaluations)}.",
                parameter="quantity",
            )
        evaluation = evaluations[quantity]
        return score(evaluation.y, evaluation.prediction)

    def predict_mean(self, frames: _Structures, *, unknown_species: str = "error") -> Float64Array:
        """Predict without uncertainties."""
        chunks = self.stream(frames, unknown_species=unknown_species)
        means = ((self.fitted.mean(c.rows(), c.design) + c.reference) * c.factors for c in chunks)
        return np.concatenate([*means])

    def predict_atoms(
        self, frames: _Structures, *, unknown_species: str = "error"
    ) -> list[Prediction]:
        """Predict the contribution of each atom to each structure, with uncertainties.

        Contributions sum (extensive) or average (intensive) to the prediction, member by member. A
        reference potential has no contributions of atoms: they sum to the difference from it.
        """
        chunks = self.stream(frames, unknown_species=unknown_species)
        return [atom for chunk in chunks for atom in atom_contributions(chunk)]

    def predict_forces(
        self,
        frames: _Structures,
        *,
        stress: bool = False,
        novelty: Float64Array | None = None,
    ) -> ForcePrediction:
        """Predict energies and forces, the derivatives of every member's energy.

        For features by featomic, in float64: energies are those of `predict` up to rounding. With
        `stress`, the stresses of structures whose cells have a volume are predicted, too. If it is
        given, `novelty` (n_structures, 2) is filled with the largest and the mean novelty of the
        environments of each structure.
        """
        structures = list(structures_of(frames))
        check_frames(self.fitted, structures, stress=stress)
        any(warn_of_state(atoms, self.fitted, i) for i, atoms in enumerate(structures))
        with limited(self.threads, sum(map(len, structures))):
            found = predict_with_forces(
                self.fitted, self.potential, structures, stress=stress, novelty=novelty
            )
        if self.reference is None:
            return found
        energies, forces, stresses = self.reference.evaluate(structures, forces=True, stress=stress)
        assert forces is not None
        return replace(
            found,
            energy=found.energy + energies,
            forces=found.forces + np.concatenate(forces),
            stress=None if found.stress is None else found.stress + stresses,
        )

    def predict_pp(
        self, frames: _Structures, *, unknown_species: str = "error"
    ) -> tuple[Float64Array, Float64Array]:
        """Predict with the full projected process, Eq. (3): mean and σ_PP, not calibrated."""
        variance = self.fitted.pp_variance
        if variance is None:
            raise InputError(
                "The model was trained with `keep_pp=False`, so that its projected process has no "
                "variance. Train it with `keep_pp=True`.",
                parameter="keep_pp",
            )
        means, stds = [], []
        for chunk in self.stream(frames, unknown_species=unknown_species):
            rows = chunk.rows()
            mean = self.fitted.pp_mean(rows, chunk.design) + chunk.reference
            means.append(mean * chunk.factors)
            stds.append(variance.std(rows, chunk.prior_variance()) * chunk.factors)
        return np.concatenate(means), np.concatenate(stds)

    def extrapolates(self, frames: _Structures, *, unknown_species: str = "error") -> BoolArray:
        """Return for each structure whether it is an extrapolation: see `Chunk.extrapolates`."""
        flags = []
        for chunk in self.stream(frames, unknown_species=unknown_species):
            novelty = np.empty((len(chunk.frames), 2))
            learned = chunk.predict_learned(chunk.rows(novelty))
            flags.append(chunk.extrapolates(learned, novelty))
        return np.concatenate(flags)

    def stream(
        self, frames: _Structures, *, unknown_species: str = "error", features: bool = True
    ) -> Iterator[Chunk]:
        """Yield structures and their features in chunks; `frames` may be larger than memory.

        Chunks without features are for predictions by `predict_forces`.
        """
        if unknown_species not in ("error", "ignore"):
            raise InputError(
                f"`unknown_species` is 'error' or 'ignore', not {unknown_species!r}.",
                parameter="unknown_species",
            )
        chunk, ignore = None, unknown_species == "ignore"
        with limited(self.threads):
            for chunk in stream_chunks(
                self.fitted,
                structures_of(frames),
                threads=self.threads,
                allow_unknown=ignore,
                potential=self.reference,
                features=features,
            ):
                yield chunk
        if chunk is None:
            raise InputError(
                "There are no structures to predict; at least one is needed.", parameter="frames"
            )

    def target_atoms(self, frames: Sequence[Atoms]) -> list[IntArray]:
        """Return, for an atomic property, the atoms of each structure that `predict` predicts."""
        if self.settings.kind != "atomic":
            raise InputError(
                f"The target is {self.settings.kind}; values of single atoms are predicted for "
                "`kind='atomic'` only. Contributions of atoms are those of `predict_atoms`.",
                parameter="kind",
            )
        return [centers_of(atoms.numbers, self.fitted) for atoms in frames]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the model to one safetensors file, completely or not at all."""
        check_output(path, force=force)
        write_model(path, self.fitted, force=force)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        baseline: str | Mapping[str, Any] | None = None,
        representation: object | None = None,
    ) -> AtomisticModel:
        """Read a model; everything is checked before anything is built.

        Predictions equal those of the saved model to 1e-6 σ: some processors round differently if
        arrays are at other places in memory.

        A model with a reference potential creates it at the first prediction. No code that a file
        names is imported, and no file that it names is opened: give them again.

        Parameters
        ----------
        path : path
        threads : int, optional
            Number of cores; all that are idle by default.
        baseline : str or dict, optional
            The calculator, by import path and with its arguments, that the model was trained with.
            ``{"key": …}`` takes the values from the structures instead, and a model that was
            trained on a key may be given a calculator that computes the same.
        representation : path or object, optional
            The file with the weights of a network, unless they come with its package; or the object
            that the model was trained with.
        """
        confirmed, fitted = as_reference(baseline), read_model(path, representation)
        if baseline is not None and (confirmed is None or fitted.settings.reference is None):
            raise InputError(
                f"`baseline={baseline!r}` does not fit the model: it is a calculator or a key, for "
                "a model that was trained with one.",
                parameter="baseline",
            )
        fitted.representation.prepare()
        model = cls.from_fitted(fitted, threads=threads, confirmed=confirmed)
        if confirmed is not None:
            _ = model.reference  # rejects another one than that of the training
        return model

    def summary(self) -> str:
        """Return settings, data, errors and calibrations of the model, a line each."""
        facts = summarize(self.fitted)
        width = max(map(len, facts))
        # Some of the texts come from files, and could have lines of their own.
        lines = (f"{name:<{width}}  {text}" for name, text in facts.items())
        return "\n".join(line.replace("\n", "\\n") for line in lines)

    @property
    def fitted(self) -> Fitted:
        """The trained model."""
        if self._fitted is None:
            raise QualmsError("The model is not trained: call fit first.")
        return self._fitted

    @property
    def out_of_bag(self) -> Mapping[str, CalibrationData]:
        """Out-of-bag points of each quantity, to which the calibrations were fitted."""
        return self.fitted.points

    @property
    def record(self) -> Record:
        """Data, errors and times of the training."""
        return self.fitted.record

    @property
    def provenance(self) -> Provenance:
        """Versions, date and digest of the data."""
        return self.fitted.provenance

    @property
    def potential(self) -> Potential:
        """The energy of environments by all members, for features by featomic."""
        if self._potential is None:
            self._potential = make_potential(self.fitted, self.fitted.weights)
        return self._potential

    @property
    def reference(self) -> ReferencePotential | None:
        """The reference potential whose values are added to predictions, if there is one."""
        if self._reference is None:
            self._reference = make_reference(
                self.settings, confirmed=self._confirmed, threads=self.threads
            )
        return self._reference

    def __getstate__(self) -> dict[str, Any]:
        # featomic's calculators cannot be pickled, and are made again when they are needed.
        return self.__dict__ | {"_potential": None, "_reference": None}

    def _repr_html_(self) -> str:
        """Return settings, data, errors and calibrations as a table, for notebooks."""
        facts = {} if self._fitted is None else summarize(self._fitted)
        return html_table((), facts.items(), note=repr(self))

    def __repr__(self) -> str:
        state = "trained" if self._fitted is not None else "not trained"
        return f"<AtomisticModel of {self.settings.target} ({self.settings.kind}), {state}>"


AtomisticModel.__signature__ = signature()  # type: ignore[attr-defined]
# Python 3.13 removes the indentation of docstrings, other versions do not.
AtomisticModel.__doc__ = cleandoc(AtomisticModel.__doc__ or "").replace(
    "Examples\n", f"Parameters\n----------\n{dedent(parameter_list())}\n\nExamples\n"
)


def structures_of(frames: _Structures) -> Iterable[Atoms]:
    """Return structures; those of a file are read one by one."""
    if isinstance(frames, (str, PathLike)):
        return iter_frames(frames)
    check_not_single(frames)
    return frames


# --- from new structures to predictions -----------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Some structures to predict, and their features."""

    frames: list[Atoms]  #: as they were given
    known: list[Atoms]  #: without atoms of unknown species
    centers: list[IntArray]  #: the atoms of `frames` whose environments are used
    batch: Batch  #: features of these environments
    fitted: Fitted
    first: int = 0  #: number of the first structure
    potential: ReferencePotential | None = None

    @cached_property
    def reference(self) -> Float64Array:
        """Values of the reference potential, or zeros, to be added to predicted averages."""
        if self.potential is None:
            return np.zeros(len(self.factors))
        indices = range(self.first, self.first + len(self.frames))
        return self.potential.evaluate(self.known, indices=indices).energies / self.sizes

    @property
    def has_unknown(self) -> BoolArray:
        """Whether a structure has atoms of unknown species."""
        return np.array([len(a) > len(b) for a, b in zip(self.frames, self.known, strict=True)])

    @property
    def has_other_state(self) -> BoolArray:
        """Whether a structure has another charge or spin than those of the training."""
        return np.array([differs_in_state(atoms, self.fitted) for atoms in self.frames])

    @property
    def sizes(self) -> Float64Array:
        """Number of atoms of each structure if the target is extensive, otherwise one."""
        if self.fitted.settings.kind != "extensive":
            return np.ones(len(self.frames))
        return np.array([len(known) for known in self.known], dtype=np.float64)

    @property
    def factors(self) -> Float64Array:
        """Factor of each predicted average."""
        return np.ones(len(self.batch.features)) if self.fitted.per_atom else self.sizes

    @property
    def design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each prediction."""
        if self.fitted.per_atom:
            return self.atom_design
        return structure_design(self.known, self.fitted.baseline.species)

    @property
    def center_species(self) -> IntArray:
        """Atomic number at the centre of each environment."""
        pairs = zip(self.frames, self.centers, strict=True)
        return np.concatenate([atoms.numbers[chosen] for atoms, chosen in pairs])

    @property
    def atom_design(self) -> Float64Array:
        """Design matrix of the baseline, a row for each environment."""
        return atom_design(self.center_species, self.fitted.baseline.species)

    def rows(self, novelty: Float64Array | None = None) -> Float64Array:
        """Return the kernel rows K_XM, and fill `novelty` (n_structures, 2) if it is given."""
        return self.fitted.basis.rows(self.batch.features, self.batch.offsets, novelty=novelty)

    def prior_variance(self) -> Float64Array:
        """Return the diagonal of K_XX, a number for each prediction."""
        return self.fitted.basis.prior_variance(self.batch.features, self.batch.offsets)

    def predict(self, rows: Float64Array) -> Prediction:
        """Return the calibrated prediction for kernel rows."""
        learned = self.predict_learned(rows)
        return learned if self.potential is None else learned + self.reference * self.sizes

    def predict_learned(self, rows: Float64Array) -> Prediction:
        """Return the prediction without the reference potential, which has no uncertainty."""
        fitted = self.fitted
        calibrated = fitted.calibrated(
            TARGET,
            fitted.members(rows, self.design),
            numbers=self.center_species if fitted.per_atom else None,
            novelty_std=fitted.novelty_std(rows, self.prior_variance),
        )
        return calibrated * self.sizes if fitted.settings.kind == "extensive" else calibrated

    def atom_novelty(self) -> list[Float64Array]:
        """Return the novelty of each environment, in units of the limit of extrapolation."""
        limit = self.fitted.training_novelty[0] + _ROUNDING
        novelty = self.fitted.basis.novelty(self.batch.features) / limit
        return [novelty[a:b] for a, b in pairwise(self.batch.offsets)]

    def extrapolates(self, prediction: Prediction, novelty: Float64Array) -> BoolArray:
        """Return for each structure, given its novelty, whether it is an extrapolation.

        It is if the largest or the mean novelty of its environments exceeds that of 99 % of the
        training structures, if the ensemble standard deviation exceeds that of all out-of-bag
        points, if it has atoms of unknown species or another charge or spin than the training
        structures, or if its composition has no baseline.
        """
        limits = np.array(self.fitted.training_novelty) + _ROUNDING
        # Members that agree to rounding on all training rows differ by rounding everywhere.
        largest = (self.fitted.largest_ensemble_std or np.inf) * self.factors
        above = prediction.uncalibrated.std > largest
        if self.fitted.per_atom:
            edges = pairwise(self.batch.offsets)
            above = np.array([bool(np.any(above[a:b])) for a, b in edges])
        unknown = self.has_unknown | self.has_other_state
        if not self.fitted.per_atom:
            unknown = unknown | ~self.fitted.baseline.is_determined(self.design)
        return np.asarray(np.any(novelty > limits, axis=1) | above | unknown)


def stream_chunks(
    fitted: Fitted,
    frames: Iterable[Atoms],
    *,
    threads: int = 1,
    allow_unknown: bool = False,
    batch: int | None = None,
    potential: ReferencePotential | None = None,
    features: bool = True,
) -> Iterator[Chunk]:
    """Yield structures, which may come from a generator, with their features, in order.

    Atoms of unknown species are left out if they are allowed, and an error otherwise. A chunk has
    about `batch` environments, by default 30 MB of features: larger arrays are allocated again each
    time, which takes as long as computing the features.
    """
    if batch is None:
        batch = min(max(30_000_000 // (8 * fitted.representation.n_features), 256), BATCH)
    waiting: deque[tuple[Atoms, Atoms, IntArray]] = deque()
    species = fitted.representation.species

    def structures() -> Iterator[tuple[Atoms, IntArray]]:
        is_alike = True
        for index, atoms in enumerate(frames):
            check_structures([atoms], first=index)
            is_alike = is_alike and not warn_of_state(atoms, fitted, index)
            is_known = np.isin(atoms.numbers, species)
            if not allow_unknown:
                check_species([atoms], species, first=index)
                if not fitted.per_atom:
                    fitted.baseline.check_compositions([atoms], first=index)
            elif not is_known.any():
                raise InputError(
                    f"Structure {index} contains {symbols_of(sorted({*atoms.numbers.tolist()}))} "
                    f"alone; the model was trained on {symbols_of(species)}. Leave it out.",
                    parameter="frames",
                )
            kept = np.flatnonzero(is_known)
            known = atoms if len(kept) == len(atoms) else atoms[kept]
            inside = centers_of(known.numbers, fitted)
            waiting.append((atoms, known, kept[inside]))
            yield known, inside

    representation, some, first = fitted.representation, structures(), 0
    batches = stream_features(representation, some, n_workers=threads, batch=batch)
    for found in batches if features else _without_features(some, batch):
        taken = [waiting.popleft() for _ in found.sizes]
        given, known, centers = (list(part) for part in zip(*taken, strict=True))
        yield Chunk(given, known, centers, found, fitted, first, potential)
        first += len(given)


def differs_in_state(atoms: Atoms, fitted: Fitted) -> bool:
    """Return whether a structure has another charge or spin than all of the training, if known."""
    known = fitted.record.state
    return known is not None and dict(state_of(atoms, fitted.settings.keys.values())) != known


def warn_of_state(atoms: Atoms, fitted: Fitted, index: int) -> bool:
    """Warn of a structure with another charge or spin than those of the training."""
    if not differs_in_state(atoms, fitted):
        return False
    known = fitted.record.state or {}
    state = dict(state_of(atoms, fitted.settings.keys.values()))
    keys = " and ".join(repr(k) for k in sorted({*known, *state}) if known.get(k) != state.get(k))
    warnings.warn(
        f"Structure {index}, and perhaps others, differs in {keys} from the structures that the "
        "model was trained on. Predictions do not depend on charge and spin.",
        QualmsWarning,
        stacklevel=2,
    )
    return True


def _without_features(structures: Iterable[tuple[Atoms, IntArray]], batch: int) -> Iterator[Batch]:
    """Yield batches of about `batch` environments, whose features are not computed."""
    sizes: list[int] = []
    for _, centers in structures:
        sizes.append(len(centers))
        if sum(sizes) >= batch:
            yield Batch(np.empty((0, 0)), np.array(sizes))
            sizes = []
    if sizes:
        yield Batch(np.empty((0, 0)), np.array(sizes))


def centers_of(numbers: IntArray, fitted: Fitted) -> IntArray:
    """Return the atoms whose environments are used: all, or those of the species of the target."""
    species = fitted.settings.species
    return np.arange(len(numbers)) if species is None else np.flatnonzero(np.isin(numbers, species))


def atom_contributions(chunk: Chunk) -> list[Prediction]:
    """Return the contribution of each atom to the property of its structure.

    Contributions sum (extensive) or average (intensive) to the prediction of the structure, member
    by member, also after calibration: the members of all atoms of a structure are scaled about
    their means by the factor that calibrates the structure. Of atomic properties, they are the
    predictions; with a reference potential, they sum to the difference from it.
    """
    fitted = chunk.fitted
    whole = chunk.predict_learned(chunk.rows())
    edges = list(pairwise(chunk.batch.offsets))
    if fitted.per_atom:
        return [whole[a:b] for a, b in edges]
    raw = fitted.basis.environment_rows(chunk.batch.features) @ fitted.weights
    raw += fitted.intercepts
    raw += fitted.baseline.predict_members(chunk.atom_design)
    calibration = fitted.calibration
    factors = member_factors(calibration, whole.std, whole.uncalibrated.members)
    return [
        Prediction(raw[a:b]).scaled(calibration, float(factor))
        for (a, b), factor in zip(edges, factors, strict=True)
    ]


# --- summary --------------------------------------------------------------------------------------

#: What a prediction is, by the share of the ensemble mean; otherwise it is a blend.
_CENTRES = {0.0: "full model", 1.0: "ensemble mean"}


def summarize(fitted: Fitted) -> dict[str, str]:
    """Return settings, data, errors and calibrations of a model, a text for each subject."""
    settings, record, provenance = fitted.settings, fitted.record, fitted.provenance
    units = f" in {settings.units}" if settings.units else ""
    of = f" of {symbols_of(settings.species)}" if settings.species else ""
    how = "bootstrap" if settings.replace else f"subsamples of {settings.subsample:g}"
    kinds = [f"{settings.n_members}, {how}"] if settings.n_subsampled else []
    kinds += [f"{settings.n_drawn} of the posterior"] if settings.n_drawn else []
    target = record.quantities[TARGET]
    counts = {
        "unlabelled skipped": target.n_without,
        "isolated atoms": record.n_isolated,
        "duplicates": record.n_duplicates,
    }
    others = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    rows = f"{target.n_rows} atoms of " if fitted.per_atom else ""
    size = f"{record.effective_rank}"
    if record.effective_rank != settings.n_representatives:
        # Environments that are nearly the same, or on which a kernel of low rank is exact.
        size += f" of {settings.n_representatives} requested; the others depend linearly on these"
    if settings.n_representatives == "auto":
        most = max(record.quantities, key=lambda name: record.quantities[name].n_rows)
        curve, limit = record.size_curve, record.size_limit
        size = describe_size(record.effective_rank, curve, limit, settings, most)
    facts = {
        "target": f"{settings.target}{units} ({settings.kind}{of})",
        "trained on": f"{rows}{record.n_structures} structures, {record.n_environments} "
        f"environments{f' ({others})' if others else ''}",
        "elements": symbols_of(fitted.representation.species),
        "representation": f"{record.preset and f'{record.preset}: '}"
        f"{fitted.representation.describe()}",
        "representatives": f"{size}, by {settings.selection}",
        "noise": f"σ = {target.noise:.4g} {settings.units_of(TARGET)}".rstrip()
        + f" ({target.noise / record.target_std:.1e} of the standard deviation of the target)",
        "baseline": _baseline(fitted),
        "members": f"{' and '.join(kinds)}; predictions have {_independent(fitted)}",
        "prediction": f"{_CENTRES.get(record.centre, 'blend')} (share of the ensemble mean: "
        f"λ = {record.centre:.2f})",
    }
    for name, found in record.quantities.items():
        of, units = "" if name == TARGET else f"{name} ", settings.units_of(name)
        if of:
            noise_units = settings.noise_units_of(name)
            counts_of = f"{found.n_rows} components, {found.n_without} structures without"
            facts[name] = f"{counts_of}; σ = {found.noise:.4g} {noise_units}"
        facts[f"{of}error"] = "not available (no out-of-bag errors)"
        if found.rmse is not None:
            errors = f"RMSE {found.rmse:.4g}, MAE {found.mae:.4g} {units}".rstrip()
            facts[f"{of}error"] = f"{errors} ({found.n_out_of_bag} out-of-bag rows)"
        facts[f"{of}calibration"] = "as the energy"
        if (calibration := fitted.calibration_of(name)) is not None:
            structures = counted(found.n_out_of_bag_structures, "structure")
            points = f"{calibration.n_points} points of {structures}"
            described = calibration.describe()
            if not settings.n_subsampled:
                described = described.replace("ŝ", "p")
            if factors := fitted.calibrations[name].elements:
                of_species = ", ".join(f"{f:.2f} ({symbol})" for symbol, f in factors.items())
                described += f", × {of_species}"
            facts[f"{of}calibration"] = f"{described} ({points})"
    facts["time"] = format_time(sum(record.seconds.values()))
    made = f"{provenance.created} by qualms {provenance.packages.get('qualms', '')}"
    return facts | {"made": f"{made}, data {provenance.data_digest[:12]}"}


def _independent(fitted: Fitted) -> str:
    """Return the number of members of predictions, and how many are independent."""
    n = len(fitted.intercepts)
    ranks = {q: n_independent(fitted.calibration_of(q), n) for q in fitted.calibrations}
    each = "; ".join(f"{rank} of {name}" for name, rank in ranks.items())
    independent = next(iter(ranks.values())) if len({*ranks.values()}) == 1 else each
    return f"{fitted.n_members}, independent: {independent}"


def _baseline(fitted: Fitted) -> str:
    reference = fitted.settings.reference
    if reference is None:
        return fitted.baseline.name
    arguments = ", ".join(f"{name}={value}" for name, value in reference.arguments.items())
    return f"{reference.name}{f' ({arguments})' if arguments else ''}, then {fitted.baseline.name}"
