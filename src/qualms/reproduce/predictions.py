"""Predictions of test points, kept so that figures can be drawn again without computing."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qualms.arrays import Float64Array
from qualms.errors import InputError
from qualms.io.files import atomic_path
from qualms.reproduce.study import Estimate

#: Columns that figures show.
SHOWN = ("CV", "N-L", "student")


def save_estimates(path: Path, estimates: Mapping[str, Estimate]) -> None:
    """Write what figures are made of, in single precision, replacing an earlier file."""
    arrays: dict[str, Any] = {}
    for column in SHOWN:
        if column not in estimates:
            continue
        found = estimates[column]
        parts = {"y": found.y, "mean": found.mean, "std": found.std, "members": found.members}
        for name, array in parts.items():
            if array is not None:
                arrays[f"{column}/{name}"] = array.astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


@dataclass(frozen=True)
class Drawn:
    """What a figure shows of one estimator: (n,) arrays, and members (n, N_R) if it has any."""

    y: Float64Array
    mean: Float64Array
    std: Float64Array
    members: Float64Array | None


def load_estimates(path: Path) -> dict[str, Drawn]:
    """Read what `save_estimates` wrote."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name].astype(np.float64) for name in stored.files}
        columns = dict.fromkeys(name.split("/")[0] for name in arrays)
        return {
            c: Drawn(
                arrays[f"{c}/y"],
                arrays[f"{c}/mean"],
                arrays[f"{c}/std"],
                arrays.get(f"{c}/members"),
            )
            for c in columns
        }
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            "output",
            f"'{path}'",
            f"predictions of an earlier run, which figures are made of ({error})",
            "Run the command that made the results with --force to compute them again.",
        ) from error
