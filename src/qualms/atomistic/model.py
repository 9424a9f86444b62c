"""AtomisticModel: structures in, properties with calibrated uncertainties out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from inspect import cleandoc
from os import PathLike
from pathlib import Path
from textwrap import dedent
from threading import RLock
from typing import Any

from ase import Atoms

from qualms.arrays import Float64Array, IntArray
from qualms.atomistic import training
from qualms.atomistic.delta import BaselinePotential, make_baseline_potential
from qualms.atomistic.fitted import Fitted, Provenance, Record, describe_size
from qualms.atomistic.forces import Potential, check_model, make_potential
from qualms.atomistic.model_file import read_model, write_model
from qualms.atomistic.predictions import (
    Chunk,
    Request,
    StructurePrediction,
    centers_of,
    predict_chunk,
    stream_chunks,
)
from qualms.atomistic.quantities import TARGET
from qualms.atomistic.settings import (
    PotentialSettings,
    Settings,
    as_potential,
    make_settings,
    parameter_list,
    signature,
)
from qualms.atomistic.structures import check_not_single, iter_frames, symbols_of
from qualms.calibration.members import n_independent
from qualms.calibration.points import CalibrationData
from qualms.errors import InputError, QualmsError, counted
from qualms.execution import as_workers
from qualms.io.files import check_output
from qualms.metrics import Scores, score
from qualms.notebooks import html_table
from qualms.progress import Bars, ProgressDisplay, Stages
from qualms.resources import SMALL, default_threads, format_time, limited

#: Structures, or the path of a file that has them.
_Structures = Iterable[Atoms] | str | PathLike[str]


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
        self._start(settings, settings.threads, settings.baseline_potential)

    @classmethod
    def from_settings(cls, settings: Settings) -> AtomisticModel:
        """Return an untrained model with these settings, which the user gave."""
        model = cls.__new__(cls)
        model._start(settings, settings.threads, settings.baseline_potential)
        return model

    def _start(
        self, settings: Settings, threads: int | None, confirmed: PotentialSettings | None = None
    ) -> None:
        self.settings = self._given = settings
        if confirmed is not None:  # training uses the potential that the user gave
            same = confirmed.model_copy(update={"then": settings.linear_baseline})
            self._given = settings.model_copy(update={"baseline": same})
        self.threads = default_threads(threads)
        self._fitted: Fitted | None = None
        self._lock = RLock()  # of what is made when it is needed: threads may share a model
        self._potential: Potential | None = None
        #: The baseline potential as the user gave it, rather than a file.
        self._confirmed = confirmed
        self._baseline_potential: BaselinePotential | None = None

    def fit(
        self,
        frames: _Structures,
        y: object = None,
        *,
        groups: Sequence[object] | str | None = "auto",
        progress: bool | ProgressDisplay = False,
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
            in or out of a subsample together. A string is the key of labels in ``atoms.info``. By
            default, consecutive frames of trajectories are recognised, and blocks of them belong
            together; None: no structures do, but for duplicates.
        progress : bool or ProgressDisplay
            Whether to show the progress on standard error, or what shows it.
        skip_failed : bool
            Whether structures for which the baseline potential fails are left out
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
            # An error if a file names code that no user confirmed.
            potential=self.baseline_potential,
            skip_failed=skip_failed,
        )
        self._potential = None
        chosen = {k: getattr(self._fitted.settings, k) for k in ("representation", "basis")}
        self.settings = self._given.model_copy(update=chosen)
        return self

    @classmethod
    def from_fitted(
        cls,
        fitted: Fitted,
        *,
        threads: int | None = None,
        confirmed: PotentialSettings | None = None,
    ) -> AtomisticModel:
        """Return the model of a training run or of a file.

        Parameters
        ----------
        fitted : Fitted
        threads : int, optional
        confirmed : PotentialSettings, optional
            The baseline potential that the user named, so that its code may run.
        """
        model = cls.__new__(cls)
        model._start(fitted.settings, threads, confirmed)
        model._fitted = fitted
        return model

    def predict(
        self,
        frames: Atoms | _Structures,
        *,
        forces: bool = False,
        stress: bool = False,
        atoms: bool = False,
        unknown_species: str = "error",
    ) -> StructurePrediction:
        """Predict with calibrated uncertainties; features are computed once.

        Parameters
        ----------
        frames : Atoms, iterable of Atoms, or path
        forces, stress : bool
            Predict derivatives of the energies of all members: forces, and stresses of structures
            whose cells have a volume. For features by featomic or by a network.
        atoms : bool
            Predict the contribution, and the novelty, of each atom.
        unknown_species : {"error", "ignore"}
            Whether atoms of elements that the model was not trained on are an error, or are
            ignored; so are compositions whose baseline the training set does not determine.
            `StructurePrediction.extrapolates` flags both.

        Returns
        -------
        StructurePrediction
            One value for each structure, without an axis if it is a single ``Atoms``; for atomic
            properties, one for each of `target_atoms`. With the novelty of each structure, whether
            it is an extrapolation, and why.
        """
        if isinstance(frames, Atoms):
            options = {"forces": forces, "stress": stress, "atoms": atoms}
            return self.predict([frames], unknown_species=unknown_species, **options).structure(0)
        request = Request(forces, stress, atoms)
        predicted = StructurePrediction.join(
            [*self.stream(frames, request, unknown_species=unknown_species)]
        )
        if stress and not predicted.is_solid.any():
            raise InputError(
                "No structure has a cell with a volume, and without one there is no stress.",
                parameter="stress",
            )
        return predicted

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
            self,
            structures,
            quantities=[quantity],
            units=units,
            per=per,
            unknown_species=unknown_species,
        )
        if quantity not in evaluations:
            raise InputError(
                f"`quantity={quantity!r}` cannot be scored: the model was trained on "
                f"{', '.join(self.settings.keys)}, and the structures must have it as well.",
                parameter="quantity",
            )
        evaluation = evaluations[quantity]
        return score(evaluation.y, evaluation.prediction)

    def predict_pp(
        self, frames: _Structures, *, unknown_species: str = "error"
    ) -> tuple[Float64Array, Float64Array]:
        """Predict with the full projected process, Eq. (3): mean and σ_PP, not calibrated."""
        if self.fitted.pp_variance is None:
            raise InputError(
                "The variance of the projected process is not stored: the model was trained with "
                "`keep_pp=False`, or spanned by labels. Use `keep_pp=True` and "
                "`basis='environments'`.",
                parameter="keep_pp",
            )
        request = Request(novelty=False, process=True)
        batches = self.stream(frames, request, unknown_species=unknown_species)
        process = StructurePrediction.join([*batches]).parts.process
        assert process is not None
        return process[0], process[2]

    def stream(
        self,
        frames: _Structures,
        request: Request = Request(),  # noqa: B008 — immutable
        *,
        unknown_species: str = "error",
        potential: Potential | None = None,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[StructurePrediction]:
        """Yield predictions in chunks of structures; `frames` may be larger than memory.

        Parameters
        ----------
        frames : iterable of Atoms, or path
        request : Request
            What is predicted, beside the target.
        unknown_species : {"error", "ignore"}
            See `predict`.
        potential : Potential, optional
            That of the model, for the steps of a simulation. Energies then come from the features
            that have derivatives, also without these: in this process, and equal to those that come
            with forces.
        numbers : iterable of int, optional
            Of the structures, in messages; 0, 1, … by default.
        """
        derivatives = request.forces or request.stress
        if derivatives:
            check_model(self.fitted)
            if unknown_species == "ignore":
                raise InputError(
                    "Atoms that are ignored have no forces: use `unknown_species='error'`.",
                    parameter="unknown_species",
                )
        if potential is None and (derivatives or self.fitted.has_label_basis):
            potential = self.potential
        baseline = None if request.learned else self.baseline_potential
        chunks = self.chunks(
            frames,
            unknown_species=unknown_species,
            features=potential is None,
            numbers=numbers,
        )
        for chunk in chunks:
            n_atoms = None if potential is None else sum(map(len, chunk.frames))
            threads = 1 if n_atoms is not None and n_atoms <= SMALL else self.threads
            with limited(threads):
                yield predict_chunk(chunk, request, potential, baseline, threads)

    def chunks(
        self,
        frames: _Structures,
        *,
        unknown_species: str = "error",
        features: bool = True,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[Chunk]:
        """Yield structures and their features in chunks.

        Parameters
        ----------
        frames : iterable of Atoms, or path
            May be larger than memory.
        unknown_species : {"error", "ignore"}
            Whether atoms of species that the model was not trained on are an error, or left out.
        features : bool
            Whether features are computed.
        numbers : iterable of int, optional
            See `stream`.
        """
        if unknown_species not in ("error", "ignore"):
            raise InputError(
                f"`unknown_species` is 'error' or 'ignore', not {unknown_species!r}.",
                parameter="unknown_species",
            )
        chunk = None
        chunks = stream_chunks(
            self.fitted,
            structures_of(frames),
            threads=self.threads,
            allow_unknown=unknown_species == "ignore",
            features=features,
            numbers=numbers,
        )
        with limited(self.threads):
            for chunk in chunks:
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
                "`kind='atomic'` only. Contributions of atoms: `predict(..., atoms=True)`.",
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

        A model with a baseline potential creates it at the first prediction. No code that a file
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
        confirmed, fitted = as_potential(baseline), read_model(path, representation)
        if baseline is not None and (
            confirmed is None or fitted.settings.baseline_potential is None
        ):
            raise InputError(
                f"`baseline={baseline!r}` does not fit the model: it is a calculator or a key, for "
                "a model that was trained with one.",
                parameter="baseline",
            )
        fitted.representation.prepare()
        model = cls.from_fitted(fitted, threads=threads, confirmed=confirmed)
        if confirmed is not None:
            _ = model.baseline_potential  # rejects another one than that of the training
        return model

    def with_calibration(self, method: str | None) -> AtomisticModel:
        """Return the model with another calibration method, fitted to its out-of-bag points."""
        fitted = self.fitted.with_calibration(method)
        return self.from_fitted(fitted, threads=self.threads, confirmed=self._confirmed)

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
        with self._lock:
            if self._potential is None:
                self._potential = make_potential(self.fitted, self.fitted.weights)
            return self._potential

    @property
    def baseline_potential(self) -> BaselinePotential | None:
        """The baseline potential whose values are added to predictions, if there is one."""
        if self.settings.baseline_potential is None:
            return None
        with self._lock:
            if self._baseline_potential is None:
                self._baseline_potential = make_baseline_potential(
                    self.settings, confirmed=self._confirmed, threads=self.threads
                )
            return self._baseline_potential

    def __getstate__(self) -> dict[str, Any]:
        # featomic's calculators cannot be pickled, and are made again when they are needed.
        state = self.__dict__ | {"_potential": None, "_baseline_potential": None}
        return {name: value for name, value in state.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

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


def structures_of(frames: _Structures, name: str = "frames") -> Iterable[Atoms]:
    """Return structures, an argument of this name; those of a file are read one by one."""
    if isinstance(frames, (str, PathLike)):
        return iter_frames(frames)
    check_not_single(frames, name)
    if not isinstance(frames, Iterable):
        raise InputError(
            f"`{name}` is {frames!r}; it must be a list of structures, or the path of a file.",
            parameter=name,
        )
    return frames


# --- summary --------------------------------------------------------------------------------------


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
    if record.block_length > 1:
        others += f"{', ' * bool(others)}blocks of up to {record.block_length} consecutive frames"
    centres = {0.0: "full model", 1.0: "ensemble mean"}
    rows = f"{target.n_rows} atoms of " if fitted.per_atom else ""
    size = f"{record.effective_rank}"
    if record.effective_rank != settings.n_representatives:
        # Environments that are nearly the same, or on which a kernel of low rank is exact.
        size += f" of {settings.n_representatives} requested; the others depend linearly on these"
    if settings.n_representatives == "auto":
        most = max(record.quantities, key=lambda name: record.quantities[name].n_rows)
        curve, limit = record.size_curve, record.size_limit
        size = describe_size(record.effective_rank, curve, limit, settings, most)
    basis = f"environments by {settings.selection}"
    if fitted.has_label_basis:
        basis = "combinations of labels"
    facts = {
        "target": f"{settings.target}{units} ({settings.kind}{of})",
        "trained on": f"{rows}{record.n_structures} structures, {record.n_environments} "
        f"environments{f' ({others})' if others else ''}",
        "elements": symbols_of(fitted.representation.species),
        "representation": f"{record.preset and f'{record.preset}: '}"
        f"{fitted.representation.describe()}",
        "representatives": f"{size}, {basis}",
        "noise": f"σ = {target.noise:.4g} {settings.units_of(TARGET)}".rstrip()
        + f" ({target.noise / record.target_std:.1e} of the standard deviation of the target)",
        "baseline": _baseline(fitted),
        "members": f"{' and '.join(kinds)}; predictions have {_independent(fitted)}",
        "prediction": f"{centres.get(record.centre, 'blend')} (share of the ensemble mean: "
        f"λ = {record.centre:.2f})",
    }
    for name, of_quantity in record.quantities.items():
        of, units = "" if name == TARGET else f"{name} ", settings.units_of(name)
        if of:
            noise_units = settings.noise_units_of(name)
            counts_of = (
                f"{of_quantity.n_rows} components, {of_quantity.n_without} structures without"
            )
            facts[name] = f"{counts_of}; σ = {of_quantity.noise:.4g} {noise_units}"
        facts[f"{of}error"] = "not available (no out-of-bag errors)"
        if of_quantity.rmse is not None:
            errors = f"RMSE {of_quantity.rmse:.4g}, MAE {of_quantity.mae:.4g} {units}".rstrip()
            explained = ""
            if of_quantity.explained is not None:
                explained = f"; {100 * of_quantity.explained:.3g} % of the variance explained"
            counted_rows = f"{of_quantity.n_out_of_bag} out-of-bag rows"
            facts[f"{of}error"] = f"{errors} ({counted_rows}{explained})"
        facts[f"{of}calibration"] = "as the energy"
        if (calibration := fitted.calibration_of(name)) is not None:
            structures = counted(of_quantity.n_out_of_bag_structures, "structure")
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
    potential = fitted.settings.baseline_potential
    if potential is None:
        return fitted.baseline.name
    arguments = ", ".join(f"{name}={value}" for name, value in potential.arguments.items())
    return f"{potential.name}{f' ({arguments})' if arguments else ''}, then {fitted.baseline.name}"
