"""Predictions of many structures: batch by batch for a file, or a table in parts by workers.

A part is a range of the structures, and a task of `qualms.execution`: workers read structures and
model from their files, and write tables themselves.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from ase import Atoms

from qualms.arrays import BoolArray, Float64Array
from qualms.atomistic.forces import ForcePrediction, has_forces
from qualms.atomistic.model import AtomisticModel, Chunk, atom_contributions
from qualms.atomistic.novelty import force_norm
from qualms.atomistic.shards import Part, numbered
from qualms.atomistic.structures import FrameFiles
from qualms.errors import InputError, QualmsError
from qualms.evaluation import energy_factor, per_atom_units
from qualms.execution import Workers
from qualms.io.files import atomic_output
from qualms.io.predictions import EXTRAPOLATES, open_writer
from qualms.prediction import Prediction

#: Structures of a part, and the fewest that are worth a task.
_PART, _FEWEST = 5000, 20
#: Parts for each worker, so that none waits long for the last.
_ROUNDS = 4
#: The file of a table that describes it; readers of tables ignore its name.
_ABOUT = "_qualms.json"


@dataclass(frozen=True)
class ModelFile:
    """A model that each process, or thread, reads once."""

    path: Path
    threads: int | None = None
    baseline: Any = None
    weights: Path | None = None
    digest: str = ""  #: of the content

    @classmethod
    def of(cls, path: Path, *, weights: Path | None = None, **options: Any) -> ModelFile:
        """Return a file that exists, with its digest; names are those that workers know, too."""
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError("path", f"'{path}' ({error.strerror})", "a model file") from error
        absolute = None if weights is None else weights.resolve()
        return cls(path.resolve(), weights=absolute, digest=digest, **options)

    def load(self) -> AtomisticModel:
        """Return the model."""
        if getattr(_LOADED, "file", None) != self:
            options = {"baseline": self.baseline, "representation": self.weights}
            _LOADED.model = AtomisticModel.load(self.path, threads=self.threads, **options)
            _LOADED.file = self
        found: AtomisticModel = _LOADED.model
        return found


#: The model of a thread; calculators of features are not shared by threads.
_LOADED = threading.local()


@dataclass(frozen=True)
class Wanted:
    """What is predicted, and how: see ``qualms predict --help``."""

    ensemble: bool = False
    interval: float | None = None
    forces: bool = False
    stress: bool = False
    atoms: bool = False
    in_units: str | None = None
    per: str | None = None
    ignore_unknown: bool = False
    skip_failed: bool = False

    def units(self, model: AtomisticModel) -> tuple[float, str]:
        """Return the factor to the units of the output, and these."""
        factor, units = energy_factor(model.settings.units, self.in_units)
        return factor, per_atom_units(units) if self.per == "atom" else units


class Predicted(NamedTuple):
    """Predictions of some structures: arguments of `PredictionWriter.write`, and counts."""

    arguments: dict[str, Any]
    counts: dict[str, int]


def predict_batches(
    model: AtomisticModel, numbered: Iterable[tuple[int, Atoms]], wanted: Wanted
) -> Iterator[Predicted]:
    """Predict structures, which may be more than fit into memory, in batches and in order."""
    target, (factor, units) = model.settings.target, wanted.units(model)
    derivatives = wanted.forces or wanted.stress
    if wanted.skip_failed and model.reference is not None:
        how = {"forces": derivatives, "stress": wanted.stress}
        numbered = model.reference.computable(numbered, **how)
    waiting: deque[int] = deque()

    def frames() -> Iterator[Atoms]:
        for number, atoms in numbered:
            waiting.append(number)
            yield atoms

    unknown = "ignore" if wanted.ignore_unknown else "error"
    for chunk in model.stream(frames(), unknown_species=unknown):
        novelty = np.empty((len(chunk.frames), 2))
        prediction = chunk.predict(chunk.rows(novelty))
        arrays: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        found = None
        if derivatives or (wanted.atoms and has_forces(model.fitted)):
            solid = np.array([wanted.stress and one.cell.rank == 3 for one in chunk.known])
            found = model.predict_forces(chunk.known, stress=bool(solid.all()))
            if derivatives:
                prediction = found.energy
            if wanted.forces:
                arrays |= _components("forces", found.forces, wanted)
            if wanted.stress:
                tensors = _stresses(model, chunk.frames, solid, found.stress, wanted)
        if wanted.atoms:
            arrays |= _atom_arrays(chunk, found, wanted)
        extrapolates = chunk.extrapolates(prediction, novelty)
        extra: dict[str, list[Any]] = {EXTRAPOLATES: extrapolates.tolist()}
        if wanted.in_units or wanted.per:
            sizes = [len(known) for known in chunk.known] if wanted.per == "atom" else 1.0
            prediction = prediction * (factor / np.asarray(sizes))
            arrays, tensors = (
                {k: v if k.endswith("_novelty") else v * factor for k, v in part.items()}
                for part in (arrays, tensors)
            )
        if units:
            extra[f"{target}_units"] = [units] * len(chunk.frames)
        arguments = {
            "frames": chunk.frames,
            "prediction": prediction,
            "numbers": [waiting.popleft() for _ in chunk.frames],
            "rows": chunk.centers if model.fitted.per_atom else None,
            "extra": extra,
            "arrays": arrays,
            "tensors": tensors,
        }
        flat = sum(wanted.stress and int(one.cell.rank) < 3 for one in chunk.frames)
        counts = {
            "structures": len(chunk.frames),
            "extrapolating": int(extrapolates.sum()),
            "unknown_species": int(chunk.has_unknown.sum()),
            "without_volume": flat,
        }
        yield Predicted(arguments, counts)


# --- parts ---


def predict_parts(
    frames: FrameFiles, file: ModelFile, wanted: Wanted, workers: Workers
) -> Iterator[Predicted]:
    """Predict structures by workers, in order; see `predict_batches`."""
    workers.check([file.path, *frames.paths])
    size = _part_size(len(frames), workers.number)
    parts = [_part(frames, *edge) for edge in _divided(0, len(frames), size)]
    for batches in workers.map(predict_part, parts, file, wanted):
        yield from batches


def _part_size(n_structures: int, n_workers: int) -> int:
    """Return the number of structures of a part."""
    return min(max(-(-n_structures // (_ROUNDS * n_workers)), _FEWEST), _PART)


def _divided(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Return ranges between multiples of the size."""
    return list(pairwise([first, *range(size * (first // size + 1), last, size), last]))


def _part(frames: FrameFiles, first: int, last: int) -> Part:
    return Part(frames[first:last], np.arange(first, last))


def predict_part(part: Part, file: ModelFile, wanted: Wanted) -> list[Predicted]:
    """Predict a part of the structures."""
    with numbered(part):
        pairs = zip(part.numbers.tolist(), part.frames, strict=True)
        return list(predict_batches(file.load(), pairs, wanted))


# --- tables in parts ---


def write_table(
    directory: Path,
    frames: FrameFiles,
    file: ModelFile,
    wanted: Wanted,
    workers: Workers,
    *,
    force: bool = False,
    advance: Callable[[int], object] = lambda done: None,
) -> dict[str, int]:
    """Write predictions to a directory of Parquet files, one for each part of the structures.

    Parts that exist are kept: a run that was interrupted continues.

    Parameters
    ----------
    directory : Path
        New, or that of a run with the same model, options and structures.
    frames, file, wanted
        Structures, model and options.
    workers : Workers
        Write the parts.
    force : bool
        Whether to start again if the directory exists.
    advance : callable
        Is called with the number of structures that are done.

    Returns
    -------
    dict of str to int
        Counts of all structures in the table: see `Predicted.counts`.
    """
    directory = directory.resolve()  # workers may have another working directory
    size = _open_table(directory, frames, file, wanted, workers.number, force=force)
    workers.check([file.path, *frames.paths, directory / _ABOUT])
    missing = [_part(frames, *edge) for edge in _missing(directory, len(frames), size)]
    done = len(frames) - sum(map(len, missing))
    advance(done)

    def on_done(part: Any) -> None:
        nonlocal done
        advance(done := done + len(part))

    for _ in workers.map(write_part, missing, file, wanted, directory, on_done=on_done):
        pass
    if _missing(directory, len(frames), size):
        raise QualmsError(f"Parts that workers wrote are not in '{directory}': do they share it?")
    _remove_incomplete(directory)
    return _sum_counts(directory)


def write_part(part: Part, file: ModelFile, wanted: Wanted, directory: Path) -> None:
    """Predict a part of the structures, and write its file, completely or not at all."""
    model = file.load()
    path = directory / f"part-{part.numbers[0]:09d}-{part.numbers[-1]:09d}.parquet"
    kind: Literal["atomic", "structure"] = "atomic" if model.fitted.per_atom else "structure"
    counts: Counter[str] = Counter()
    with (
        open_writer(
            path,
            model.settings.target,
            kind=kind,
            ensemble=wanted.ensemble,
            interval=wanted.interval,
            force=True,
        ) as writer,
        numbered(part),
    ):
        pairs = zip(part.numbers.tolist(), part.frames, strict=True)
        for batch in predict_batches(model, pairs, wanted):
            writer.write(**batch.arguments)
            counts.update(batch.counts)
        writer.metadata["qualms"] = json.dumps(counts)


def _open_table(
    directory: Path,
    frames: FrameFiles,
    file: ModelFile,
    wanted: Wanted,
    n_workers: int,
    *,
    force: bool,
) -> int:
    """Create a directory, or open that of an interrupted run; return the size of its parts."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        expected, remedy = "an installation with pyarrow", "pip install 'qualms[tables]'."
        raise InputError("path", f"'{directory}'", expected, remedy) from error
    inputs = [(path.stat().st_size, path.stat().st_mtime_ns) for path in frames.paths]
    content = json.dumps([file.digest, file.baseline, asdict(wanted), inputs], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    about = directory / _ABOUT
    try:
        directory.mkdir(exist_ok=True)
        known = json.loads(about.read_text("utf-8")) if about.exists() else None
        others = known is None and any(directory.iterdir())
        size = 0 if known is None else int(known["part_size"])
    except OSError as error:
        given = f"'{directory}' ({error.strerror})"
        raise InputError("path", given, "a directory that can be written") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("path", f"'{about}' ({error})", "a file that qualms wrote") from error
    if others:
        raise InputError("path", f"'{directory}'", "a new directory, or one with predictions")
    if known is not None and known.get("digest") != digest and not force:
        given = f"'{directory}', of another model, other options or other structures"
        remedy = "Choose another name, or start again with --force (force=True in Python)."
        raise InputError("path", given, "a new directory, or that of the same run", remedy)
    _remove_incomplete(directory)
    if known is not None and not force:
        return size
    for path in directory.glob("part-*.parquet"):
        path.unlink()
    size = _part_size(len(frames), n_workers)
    document = {"format": "qualms predictions", "version": 1, "digest": digest, "part_size": size}
    with atomic_output(about, force=True, mode="w") as stream:
        stream.write(json.dumps(document, indent=2) + "\n")
    return size


def _remove_incomplete(directory: Path) -> None:
    """Remove files of writers that were killed."""
    for path in directory.glob(".part-*"):
        path.unlink()


def _missing(directory: Path, n: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of structures that no part has, divided at multiples of the size."""
    names = [path.stem.split("-") for path in sorted(directory.glob("part-*.parquet"))]
    found = [(int(first), int(last) + 1) for _, first, last in names]
    ranges = []
    for (_, a), (b, _) in pairwise([(0, 0), *found, (n, n)]):
        if a > b:
            raise QualmsError(f"Parts in '{directory}' overlap at structure {b}: use --force.")
        ranges += _divided(a, b, size) if a < b else []
    return ranges


def _sum_counts(directory: Path) -> dict[str, int]:
    """Return the counts that the parts of a table have stored."""
    from pyarrow import parquet

    total: Counter[str] = Counter()
    for path in directory.glob("part-*.parquet"):
        total.update(json.loads(parquet.read_schema(path).metadata[b"qualms"]))
    return dict(total)


# --- forces, stresses and atoms ---


def _stresses(
    model: AtomisticModel,
    frames: Sequence[Any],
    solid: BoolArray,
    stress: Prediction | None,
    wanted: Wanted,
) -> dict[str, Any]:
    """Return stresses of solids, NaN elsewhere; `stress` is known if all structures are solids."""
    n_members = model.fitted.n_members if wanted.ensemble else 0
    widths = {"stress": 6, "stress_uncertainty": 6, "stress_ensemble": 6 * n_members}
    if wanted.interval is not None and "stress" in model.fitted.conformal:
        widths |= {"stress_lower": 6, "stress_upper": 6}
    tensors = {key: np.full((len(frames), n), np.nan) for key, n in widths.items() if n}
    if stress is None and solid.any():
        some = [atoms for atoms, is_solid in zip(frames, solid, strict=True) if is_solid]
        stress = model.predict_forces(some, stress=True).stress
    if stress is not None:
        for key, values in _components("stress", stress, wanted).items():
            tensors[key][solid] = values
    return tensors


def _components(name: str, prediction: Prediction, wanted: Wanted) -> dict[str, Any]:
    """Return means and standard deviations (n, k), and members (n, N_R k) in member order.

    And the limits (n, k) of conformal intervals of this level, if it is given and they are known.
    """
    arrays: dict[str, Any] = {name: prediction.mean, f"{name}_uncertainty": prediction.std}
    if wanted.interval is not None and prediction.conformal is not None:
        limits = prediction.interval(wanted.interval, "conformal")
        arrays |= dict(zip((f"{name}_lower", f"{name}_upper"), limits, strict=True))
    if wanted.ensemble:
        by_member = prediction.members.transpose(0, 2, 1)
        arrays[f"{name}_ensemble"] = by_member.reshape(len(by_member), -1)
    return arrays


def _atom_arrays(chunk: Chunk, found: ForcePrediction | None, wanted: Wanted) -> dict[str, Any]:
    """Return contributions, novelty and uncertainties of atoms; NaN for unknown elements."""
    parts = atom_contributions(chunk)
    name = f"{chunk.fitted.settings.target}_atoms"
    known = np.concatenate(
        [np.isin(np.arange(len(f)), c) for f, c in zip(chunk.frames, chunk.centers, strict=True)]
    )

    def of_all(values: Sequence[Float64Array]) -> Float64Array:
        full = np.full((len(known), *values[0].shape[1:]), np.nan)
        full[known] = np.concatenate(values)
        return full

    arrays = {
        name: of_all([part.mean for part in parts]),
        f"{name}_uncertainty": of_all([part.std for part in parts]),
        f"{name}_novelty": of_all(chunk.atom_novelty()),
    }
    if found is not None:
        arrays[f"{name}_force_uncertainty"] = of_all([force_norm(found.forces.std)])
    if wanted.ensemble:
        arrays[f"{name}_ensemble"] = of_all([part.members for part in parts])
    return arrays
