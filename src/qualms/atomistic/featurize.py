"""Features of many structures as a stream of batches, on several cores.

dscribe holds the interpreter's lock, so work is spread over processes (loky, which, unlike the
standard library's spawn, needs no guarded main module). A batch is computed a little ahead of the
one that is consumed, and never more: what is in flight is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms

from qualms.atomistic.environments import offsets_of
from qualms.atomistic.representation import Representation
from qualms.core.typing import FloatArray, IntArray
from qualms.errors import QualmsError

#: Environments in a batch: enough for matrix products, few enough to bound what is in flight.
BATCH = 4096
#: Below this number of environments starting processes takes longer than the work.
SERIAL = 30_000
#: Batches in flight for each process.
_AHEAD = 2

_executor: Any = None

#: What a process needs of a structure: numbers, positions, cell, pbc, centers. Pickles of Atoms
#: carry everything that hangs on them.
_Lean = tuple[IntArray, FloatArray, FloatArray, Any, IntArray]


@dataclass(frozen=True)
class Batch:
    """Features of consecutive structures.

    Attributes
    ----------
    first : int
        Index of the first structure.
    features : (n_environments, d) array of float32
    sizes : (n_structures,) array of int
        Environments of each structure; may be zero.
    """

    first: int
    features: FloatArray
    sizes: IntArray

    @property
    def offsets(self) -> IntArray:
        """Environments of structure s are rows ``offsets[s]:offsets[s + 1]``."""
        return offsets_of(self.sizes)


def all_atoms(frames: Sequence[Atoms]) -> list[IntArray]:
    """Return every atom of each structure as a centre."""
    return [np.arange(len(atoms)) for atoms in frames]


def stream_features(
    representation: Representation,
    structures: Iterable[tuple[Atoms, IntArray]],
    *,
    n_workers: int = 1,
    batch: int = BATCH,
) -> Iterator[Batch]:
    """Yield the features of structures, in order, batch by batch.

    Parameters
    ----------
    representation : Representation
    structures : iterable of (Atoms, centers)
        May be a generator that reads a file.
    n_workers : int
        Processes; 1 computes in this one, and so does whatever is small.
    batch : int
        Environments in a batch, about.
    """
    batches = _batches(structures, batch)
    if n_workers > 1:
        head: list[tuple[int, list[_Lean]]] = []
        count = 0
        for item in batches:
            head.append(item)
            count += sum(len(lean[-1]) for lean in item[1])
            if count >= SERIAL:
                yield from _parallel(representation, _chain(head, batches), n_workers)
                return
        batches = iter(head)
    for first, lean in batches:
        yield _compute(representation, first, lean)


def _chain(
    head: list[tuple[int, list[_Lean]]], tail: Iterator[tuple[int, list[_Lean]]]
) -> Iterator[tuple[int, list[_Lean]]]:
    while head:
        yield head.pop(0)
    yield from tail


def _batches(
    structures: Iterable[tuple[Atoms, IntArray]], size: int
) -> Iterator[tuple[int, list[_Lean]]]:
    """Group structures to batches of about `size` environments: index of the first, and they."""
    group: list[_Lean] = []
    first = count = 0
    for i, (atoms, centers) in enumerate(structures):
        group.append((atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, centers))
        count += len(centers)
        if count >= size or len(group) >= size:
            yield first, group
            group, count, first = [], 0, i + 1
    if group:
        yield first, group


def _compute(representation: Representation, first: int, lean: list[_Lean]) -> Batch:
    frames = [Atoms(numbers, positions, cell=c, pbc=p) for numbers, positions, c, p, _ in lean]
    centers = [chosen for *_, chosen in lean]
    sizes = np.array([len(chosen) for chosen in centers], dtype=np.intp)
    return Batch(first, representation.features(frames, centers), sizes)


def stop_workers() -> None:
    """End the processes that computed features, and give back their memory."""
    global _executor
    if _executor is not None:
        _executor.shutdown(wait=True)
        _executor = None


def _parallel(
    representation: Representation,
    batches: Iterator[tuple[int, list[_Lean]]],
    n_workers: int,
) -> Iterator[Batch]:
    from loky import get_reusable_executor
    from loky.process_executor import TerminatedWorkerError

    # One thread each: the processes are the parallelism.
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "RAYON")}
    global _executor
    executor = _executor = get_reusable_executor(max_workers=n_workers, env=single, timeout=60)
    pending: deque[Any] = deque()
    try:
        for first, lean in batches:
            pending.append(executor.submit(_compute, representation, first, lean))
            if len(pending) > _AHEAD * n_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except TerminatedWorkerError as error:
        _executor = None
        raise QualmsError(
            "A process that computed features was ended from outside, perhaps for lack of memory. "
            "Use fewer threads, or a lower memory limit."
        ) from error
    except BaseException:
        # Ctrl-C, or a consumer that stops: nobody waits for what is still in flight.
        executor.shutdown(wait=False, kill_workers=True)
        _executor = None
        raise
