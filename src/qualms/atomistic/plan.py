"""How much memory, disk and time a training run will take, and where its features will live.

The features of all environments are needed twice: to choose representatives and to compute kernel
rows. If they fit into the memory limit they are kept; if not they are written to disk; if there is
no room there either, they are computed twice, and representatives are chosen among as many
environments as fit.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from qualms.atomistic.requirements import Mode, Requirements
from qualms.atomistic.threads import allowed_threads
from qualms.core.checks import check_integer
from qualms.errors import InputError

#: Share of the machine's memory that is used if no limit is given.
_SHARE = 0.75


@dataclass(frozen=True)
class Plan:
    """What a run will take.

    Attributes
    ----------
    mode : {"keep", "spill", "recompute"}
        Where features live.
    n_rows, n_environments, n_features, n_representatives, n_members : int
    memory : float
        Expected peak, in bytes, with the processes that compute features.
    limit : float
    disk : float
        Bytes of features on disk while the run lasts.
    model_size : float
        Bytes of the model file, about.
    seconds : float
        Expected time; within a factor of two or three on another machine.
    n_candidates : int
        Environments among which representatives are chosen.
    n_workers : int
        Processes that compute features: fewer than asked for, if more would not fit.
    """

    mode: Mode
    n_rows: int
    n_environments: int
    n_features: int
    n_representatives: int
    n_members: int
    memory: float
    limit: float
    disk: float
    model_size: float
    seconds: float
    n_candidates: int
    n_workers: int

    def describe(self) -> str:
        """Return the plan in a few lines."""
        where = {
            "keep": "kept in memory"
            + (f", and on disk ({format_bytes(self.disk)})" if self.disk else ""),
            "spill": f"on disk while the run lasts ({format_bytes(self.disk)})",
            "recompute": f"computed twice; representatives among {self.n_candidates:,} of them",
        }[self.mode]
        return (
            f"{self.n_environments:,} environments × {self.n_features:,} features, {where}\n"
            f"{self.n_rows:,} labels, {self.n_representatives:,} representatives, "
            f"{self.n_members} members\n"
            f"memory {format_bytes(self.memory)} of {format_bytes(self.limit)}; "
            f"model file about {format_bytes(self.model_size)}; time about "
            f"{format_time(self.seconds)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as numbers and strings."""
        return asdict(self)


def make_plan(
    *,
    n_rows: int,
    n_environments: int,
    n_features: int,
    n_raw_features: int,
    n_representatives: int,
    n_members: int,
    n_workers: int,
    memory: str | float | None,
    directory: Path | None = None,
    n_structures: int = 0,
    selection: str = "fps",
    keep_pp: bool = True,
    to_disk: bool = False,
    n_pairs: int = 0,
    n_projection: int = 0,
    n_scales: int = 1,
) -> Plan:
    """Decide where features live.

    Parameters
    ----------
    n_rows, n_environments, n_features, n_representatives, n_members : int
    n_raw_features : int
        Before compression.
    n_workers : int
    memory : str, float, optional
        Limit such as ``"8GB"``, or bytes; three quarters of the machine's memory by default.
    directory : Path, optional
        Where features would be written; the system's temporary directory by default.
    n_structures : int
    selection : {"fps", "cur", "random"}
    keep_pp : bool
        Whether the model keeps what the variance of Eq. (3) needs.
    to_disk : bool
        Whether features go to disk in any case, so that the run can be resumed.
    n_pairs : int
        Environments times their neighbours, if forces are learned.
    n_projection : int
        Numbers in the matrices that compress features, which the model keeps.
    n_scales : int
        Cutoffs, whose features are compressed apart.
    """
    limit = parse_memory(memory)
    d, M = n_features, n_representatives
    run = Requirements(
        n_rows,
        n_structures,
        n_environments,
        d,
        n_raw_features,
        M,
        n_members,
        n_workers,
        selection,
        n_pairs,
        n_scales,
    )
    while run.n_workers > 1 and min(run.memory().values()) > limit:
        run = replace(run, n_workers=run.n_workers // 2)
    needed, features = run.memory(), run.features
    mode = _choose(needed, limit, features, directory, to_disk)
    candidates = n_environments
    if mode == "recompute":
        fixed = run.base + run.beside_candidates
        candidates = int(min(n_environments, (limit - fixed) / (4.4 * d)))
        needed[mode] = max(needed[mode], fixed + 4.4 * d * candidates)
    factors = 2 * M if n_pairs else M  # in float64, or float32
    of_each = d + 2 * n_members + (factors if keep_pp else 0)
    return Plan(
        mode=mode,
        n_rows=n_rows,
        n_environments=n_environments,
        n_features=d,
        n_representatives=M,
        n_members=n_members,
        memory=needed[mode],
        limit=limit,
        disk=features if mode == "spill" or (to_disk and mode == "keep") else 0.0,
        model_size=4.0 * (M * of_each + n_projection) + 1e5,
        seconds=run.seconds(mode),
        n_candidates=candidates,
        n_workers=run.n_workers,
    )


def _choose(
    needed: dict[Mode, float], limit: float, features: float, directory: Path | None, to_disk: bool
) -> Mode:
    if to_disk and _room(directory) < 1.1 * features:
        raise InputError(
            "checkpoint",
            str(directory),
            f"a directory with {format_bytes(1.1 * features)} free",
            "Use --no-checkpoint.",
        )
    if needed["keep"] <= limit:
        return "keep"
    if needed["spill"] <= limit and _room(directory) > 1.1 * features:
        return "spill"
    if needed["recompute"] <= limit:
        return "recompute"
    least = min(needed.values())
    raise InputError(
        "memory",
        format_bytes(limit),
        f"at least {format_bytes(1.01 * least)}",
        "Allow more memory, or use fewer representatives or training structures.",
    )


def _room(directory: Path | None) -> float:
    """Return the bytes that are free for features, those of an interrupted run included."""
    where = directory if directory is not None else Path(tempfile.gettempdir())
    before = 0 if directory is None else _size(directory / "features")
    return float(shutil.disk_usage(where).free + before)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def parse_memory(memory: str | float | None) -> float:
    """Return a limit in bytes, given as ``"8GB"``, ``"500 MB"``, ``"16GiB"``, bytes or None."""
    if memory is None:
        return _SHARE * float(psutil.virtual_memory().total)
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        try:
            if match is None:
                raise ValueError
            power = " kmgt".index(match[2] or " ")
            memory = float(match[1]) * (1024.0 if match[3] else 1000.0) ** power
        except ValueError:
            raise InputError("memory", repr(memory), 'a size such as "8GB"') from None
    if not isinstance(memory, (int, float)) or not 0 < memory < float("inf"):
        raise InputError("memory", memory, 'a positive number of bytes, or a size such as "8GB"')
    return float(memory)


def default_threads(threads: int | None = None) -> int:
    """Return the number of cores to use: all that this process may, unless given."""
    return allowed_threads() if threads is None else check_integer("threads", threads, 1)


def format_bytes(n: float) -> str:
    """Return a size for people: "3.1 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit in ("B", "kB") else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def format_time(seconds: float) -> str:
    """Return a duration for people: "3 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
