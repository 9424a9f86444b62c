"""What a training run keeps on disk, so that it can be resumed after an interruption.

A checkpoint is a directory: ``manifest.json`` says what data and settings it belongs to and which
stages are complete; each stage has a file of its own, complete before the manifest mentions it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from qualms.errors import InputError
from qualms.storage.files import atomic_output

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
