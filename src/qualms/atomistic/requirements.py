"""Memory and time of each step of a training run, from the sizes of its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qualms.atomistic.compression import sample_size
from qualms.atomistic.environments import BLOCK
from qualms.atomistic.featurize import BATCH, SERIAL
from qualms.atomistic.gradients import BATCH as GRADIENTS
from qualms.atomistic.selection import LANDMARKS

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
