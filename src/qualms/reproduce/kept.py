"""A directory of arrays that are kept, which of its stages are complete, and what they took."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from qualms.arrays import Float64Array
from qualms.errors import InputError
from qualms.io.files import atomic_output, atomic_path
from qualms.reproduce.costs import Costs, peak_memory

_MANIFEST = "manifest.json"
#: What a manifest stands for that names no stages: it was written when all were complete.
_ALL = ("rows", "model", "validation", "test")
#: Stages that are no work of a run that is not interrupted.
_READING = "Reading"


class Kept:
    """Arrays on disk, of one set of data and settings.

    Parameters
    ----------
    directory : Path
        Made if it does not exist.
    key : str
        Digest of data and settings: what belongs to others does not count.

    Attributes
    ----------
    seconds : dict of str to float
        How long stages took.
    earlier : Costs
        Of the processes before this one that worked on what is kept.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = directory
        self.seconds: dict[str, float] = {}
        self.earlier = Costs()
        self._key = key
        self._started = time.perf_counter()
        self._stages: dict[str, dict[str, Any]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        try:
            manifest = json.loads((directory / _MANIFEST).read_bytes())
            if manifest["key"] == key:
                stages = manifest.get("stages", {stage: {} for stage in _ALL})
                self._stages = {stage: dict(values) for stage, values in stages.items()}
                self.seconds = {name: float(s) for name, s in manifest["seconds"].items()}
                # An earlier version did not note what it took.
                costs = manifest.get("costs", {"wall": None, "memory": None})
                self.earlier = Costs(costs["wall"], costs["memory"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._stages = {}

    def has(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self._stages

    def values(self, stage: str) -> dict[str, Any]:
        """Return the numbers of a complete stage."""
        return self._stages[stage]

    def complete(self, stage: str, values: Mapping[str, Any] | None = None) -> None:
        """Mark a stage complete whose arrays have been saved."""
        self._stages[stage] = dict(values or {})
        self._write()

    def forget(self, *stages: str) -> None:
        """Mark stages, or all of them, as not complete."""
        for stage in stages or tuple(self._stages):
            self._stages.pop(stage, None)
        self._note()

    def drop(self, stage: str, *names: str) -> None:
        """Delete the files of a stage that could not be kept: they take room for nothing."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)
        self.forget(stage)

    def note_seconds(self, seconds: Mapping[str, float]) -> None:
        """Note how long stages took.

        One that was interrupted and done again counts once, for what it took at the longest.
        """
        for name, taken in seconds.items():
            if not name.startswith(_READING):
                self.seconds[name] = max(taken, self.seconds.get(name, 0.0))
        self._note()

    def save_array(self, name: str, array: Float64Array) -> None:
        """Write an array in NumPy's format."""
        destination = self.directory / f"{name}.npy"
        with atomic_path(destination, force=True) as path, path.open("wb") as file:
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)

    def load_array(self, name: str, shape: Sequence[int | None]) -> Float64Array:
        """Read an array of finite numbers; lengths that are None may be any."""
        array: Float64Array = np.load(self.directory / f"{name}.npy", allow_pickle=False)
        fits = array.ndim == len(shape) and all(
            wanted in (None, n) for n, wanted in zip(array.shape, shape, strict=True)
        )
        if not fits or array.dtype != np.float64:
            expected = " × ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{name} is {array.dtype} {array.shape}, expected {expected} numbers")
        if not np.isfinite(array.sum()):
            raise ValueError(f"{name} is not finite")
        return array

    def save_tensors(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Write several arrays to one file."""
        contiguous = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
        with atomic_output(self.directory / name, force=True) as file:
            file.write(save(contiguous))

    def load_tensors(self, name: str) -> dict[str, Any]:
        """Read what `save_tensors` wrote."""
        try:
            return dict(load_file(self.directory / name))
        except SafetensorError as error:
            raise ValueError(f"{name}: {error}") from error

    def _note(self) -> None:
        """Write the manifest if there is room for it.

        One that names more than there is does no harm: what cannot be read is computed again.
        """
        with suppress(OSError, InputError):
            self._write()

    def _write(self) -> None:
        costs = self.earlier.plus(time.perf_counter() - self._started, peak_memory())
        document = {
            "key": self._key,
            "seconds": self.seconds,
            "costs": {"wall": costs.wall, "memory": costs.memory},
            "stages": self._stages,
        }
        with atomic_output(self.directory / _MANIFEST, force=True) as file:
            file.write(json.dumps(document).encode())
