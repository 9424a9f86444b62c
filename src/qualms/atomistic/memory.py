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
from typing import Any, Literal

import psutil

from qualms.arrays import check_integer
from qualms.atomistic.kernel_rows import LANDMARKS
from qualms.errors import InputError
from qualms.features.compression import sample_size
from qualms.features.gradients import BATCH as GRADIENTS
from qualms.features.soap import BATCH, BLOCK, SERIAL
from qualms.resources import allowed_threads

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


# Memory and time of each step of a training run, from the sizes of its arrays.
Mode = Literal["keep", "spill", "recompute"]

GB = 1e9
#: Interpreter and libraries, in this process and in each process that computes features.
_BASE, _WORKER = 0.5 * GB, 0.25 * GB
#: Seconds of CUR per pick and landmark pair.
_CUR_RATE = 9e-10


@dataclass(frozen=True)
class Requirements:
    """The numbers that memory and time of a run depend on, and what they come to.

    Attributes
    ----------
    n_rows, n_structures, n_environments : int
    d, n_raw : int
        Features of an environment, and how many there were before compression.
    M, n_members, n_workers : int
    selection : {"fps", "cur", "random"}
    n_pairs : int
        Environments times their neighbours, if forces are learned.
    n_scales : int
        Cutoffs, whose features are compressed apart.
    """

    n_rows: int
    n_structures: int
    n_environments: int
    d: int
    n_raw: int
    M: int
    n_members: int
    n_workers: int
    selection: str
    n_pairs: int = 0
    n_scales: int = 1

    @property
    def features(self) -> float:
        """Bytes of the features of all environments, in float32."""
        return 4.0 * self.n_environments * self.d

    @property
    def base(self) -> float:
        """Bytes of interpreter, libraries and structures, as ASE holds them."""
        return _BASE + 4e3 * self.n_structures + 100.0 * self.n_environments

    @property
    def batches(self) -> float:
        """Bytes while features are computed, beside the features."""
        batch = min(BATCH, self.n_environments)
        n = self.n_workers if self.n_environments >= SERIAL else 1
        here = 20.0 * batch * self.n_raw + 4.0 * 2 * n * batch * self.d
        there = n * (_WORKER + 12.0 * batch * self.n_raw) if n > 1 else 0.0
        return here + there

    @property
    def compressing(self) -> float:
        """Bytes while a compression is found: a sample, without a tenth of it, and its Gram."""
        if self.d == self.n_raw:
            return 0.0
        sample = sample_size(self.n_environments)
        return 3 * 4.0 * sample * self.n_raw + 3 * 8.0 * self.n_raw**2

    @property
    def beside_candidates(self) -> float:
        """Bytes beside the candidates of "recompute": batches in flight, or picks and pools."""
        return max(self.batches, 4.0 * self.M * self.d + 100e6, self._landmarks)

    @property
    def _landmarks(self) -> float:
        """Bytes of the kernel between the landmarks of CUR, its eigenvectors and their copies."""
        n = min(LANDMARKS * self.M, self.n_environments)
        return 6 * 8.0 * n**2 + 12.0 * n * self.d if self.selection == "cur" else 0.0

    def memory(self) -> dict[Mode, float]:
        """Return the peak of each way to keep features, in bytes."""
        M, features = self.M, self.features
        picking = 4.0 * M * self.d + 1.2 * features / 16 + 100e6 + self._landmarks
        products = 3 * 4.0 * BLOCK * M + 4.0 * BLOCK * self.d
        rows = 8.0 * self.n_rows * M
        # Derivatives of a batch, and what they give with all representatives; two Gram matrices of
        # five parts, or of one, beside the factors.
        pairs = self.n_pairs / max(self.n_environments, 1)
        products += 2 * 3 * 8.0 * GRADIENTS * pairs * (self.n_raw + M)
        grams = (20 if M <= 800 else 6) * 8.0 * M**2 if self.n_pairs else 0.0
        # Solving a member exactly takes a copy of its rows, in turn; conjugate gradients do not.
        solving = rows + 6 * 8.0 * M**2 + grams + min(0.5 * rows, 2 * GB)
        solving += 16 * 8.0 * self.n_members * self.n_rows
        stages: dict[Mode, tuple[float, ...]] = {
            # Features are let go once the kernel rows are there; a bit of both at the end of that.
            "keep": (features + max(self.batches, picking, rows + products),),
            "spill": (self.batches, picking, rows + products),
            "recompute": (
                self.batches + rows + products,
                self.beside_candidates + 4.4 * M * self.d,
            ),
        }
        return {m: self.base + max(*s, self.compressing, solving) for m, s in stages.items()}

    def seconds(self, mode: Mode) -> float:
        """Return the expected time, by rates measured on two cores of a 2.x GHz server."""
        d, raw, M, n = self.d, self.n_raw, self.M, self.n_environments
        per_environment = 2e-5 + 1.5e-8 * raw + (2.0e-11 * raw * d if d < raw else 0.0)
        spectra = n * per_environment / self.n_workers * (2 if mode == "recompute" else 1)
        compressing = 20.0 * raw**3 / self.n_scales**2 / 4e10 if d < raw else 0.0
        products = 2.0 * n * d * M * (1 + 0.8) / 1.4e11
        solving = (1.5 * self.n_rows * M**2 + 20.0 * M**3 / 3) / 4e10
        picking = _CUR_RATE * min(LANDMARKS * M, n) ** 2 * M if self.selection == "cur" else 0.0
        # By featomic; compressed, half of the features being zero; and multiplied, in float64.
        derivatives = self.n_pairs * (3e-8 * raw + (3.0 * raw * d if d < raw else 0.0) / 5e10)
        derivatives += 6.0 * self.n_pairs * d * M / 5e10
        return 2.0 + derivatives + spectra + compressing + products + solving + picking
