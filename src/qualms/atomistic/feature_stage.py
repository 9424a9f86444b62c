"""RowSource of a training set: computed, kept or spilled to disk, and stored for a resumed run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
from ase import Atoms

from qualms.atomistic.checkpoint import Checkpoint
from qualms.atomistic.compression import Projection, sample_size
from qualms.atomistic.environments import (
    BLOCK,
    KeptFeatures,
    SpilledFeatures,
    structure_blocks,
)
from qualms.atomistic.featurize import Batch, stop_workers, stream_features
from qualms.atomistic.hypers import Compression, Soap
from qualms.atomistic.progress import Stages
from qualms.atomistic.representation import Representation, fit_representation
from qualms.atomistic.requirements import Mode
from qualms.atomistic.training_set import TrainingSet
from qualms.core.selection import RowSource
from qualms.core.typing import FloatArray, IntArray
from qualms.errors import InputError


@dataclass(frozen=True)
class Resources:
    """What a run may use.

    Attributes
    ----------
    threads : int
    memory : str, float, optional
        Limit, such as ``"8GB"``.
    checkpoint : Checkpoint, optional
    """

    threads: int = 1
    memory: str | float | None = None
    checkpoint: Checkpoint | None = None


class FeatureStage:
    """Computes the features of a training set.

    Parameters
    ----------
    data : TrainingSet
    resources : Resources
    stages : Stages
    """

    def __init__(self, data: TrainingSet, resources: Resources, stages: Stages) -> None:
        self.data = data
        self.resources = resources
        self.stages = stages
        self.n_workers = resources.threads

    def representation(
        self, soap: Soap, compression: Compression | None, rng: np.random.Generator
    ) -> Representation:
        """Return the representation, with a compression found from random structures."""
        species = tuple(self.data.species)
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("representation"):
            tensors, values = checkpoint.load("representation")
            errors = values["kernel_errors"]
            projections = tuple(Projection(tensors[str(s)], e) for s, e in enumerate(errors))
            return Representation(soap, species, projections, values["feature_scale"])
        if compression is None and soap.normalize:
            return Representation(soap, species)
        with self.stages.stage("Compression"):
            picked = self._sample(rng)
            frames, centers = self._structures(picked)
            representation = fit_representation(soap, species, frames, centers, compression)
        if checkpoint is not None:
            checkpoint.save(
                "representation",
                {str(s): p.matrix for s, p in enumerate(representation.projections)},
                {
                    "kernel_errors": [p.kernel_error for p in representation.projections],
                    "feature_scale": representation.feature_scale,
                },
            )
        return representation

    def everything(
        self, representation: Representation, mode: Mode, stack: ExitStack
    ) -> KeptFeatures | SpilledFeatures:
        """Return the features of all environments, in memory or, until the stack ends, on disk."""
        n, d = self.data.n_environments, representation.n_features
        checkpoint = self.resources.checkpoint
        features: KeptFeatures | SpilledFeatures
        if mode == "keep":
            features = KeptFeatures(n, d)
        else:
            directory = (
                checkpoint.directory
                if checkpoint is not None
                else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qualms-")))
            )
            features = SpilledFeatures(directory / "features", n, d)
            stack.callback(features.close)
        if checkpoint is not None and checkpoint.has("features"):
            self._reload(features, checkpoint)
        else:
            self._fill(features, representation, np.arange(len(self.data.frames)))
            if checkpoint is not None:
                _store(features, checkpoint)
        return features

    def some(self, representation: Representation, picked: IntArray) -> KeptFeatures:
        """Return the features of some structures, in memory."""
        n = int(np.diff(self.data.offsets)[picked].sum())
        features = KeptFeatures(n, representation.n_features)
        self._fill(features, representation, picked)
        return features

    def blocks(
        self, representation: Representation, features: RowSource | None
    ) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins.

        They are computed, again, if they are not given.
        """
        offsets = self.data.offsets
        if features is None:
            for batch in self._stream(representation, np.arange(len(self.data.frames))):
                yield batch.features, batch.offsets
            return
        for first, last in structure_blocks(offsets):
            block = features[int(offsets[first]) : int(offsets[last])]
            yield block, offsets[first : last + 1] - offsets[first]

    def _sample(self, rng: np.random.Generator) -> IntArray:
        """Structures, in random order, with enough environments to find a compression from.

        The first structure with each pair of elements comes first: the features of a pair that the
        sample lacks would be lost, and the element be invisible.
        """
        order = rng.permutation(len(self.data.frames))
        order = np.concatenate([order[(first := self._with_pairs(order))], np.delete(order, first)])
        sizes = np.diff(self.data.offsets)[order]
        wanted = sample_size(self.data.n_environments)
        enough = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1
        return order[: max(enough, len(first))]

    def _with_pairs(self, order: IntArray) -> IntArray:
        """Return the places in `order` of structures that have a pair of elements first."""
        seen: set[tuple[int, int]] = set()
        places = []
        for place, i in enumerate(order):
            present = np.unique(self.data.frames[i].numbers).tolist()
            pairs = set(combinations_with_replacement(present, 2))
            if not pairs <= seen:
                seen |= pairs
                places.append(place)
        return np.array(places, dtype=np.intp)

    def _structures(self, picked: IntArray) -> tuple[Sequence[Atoms], Sequence[IntArray]]:
        return [self.data.frames[i] for i in picked], [self.data.centers[i] for i in picked]

    def _stream(self, representation: Representation, picked: IntArray) -> Iterator[Batch]:
        structures = ((self.data.frames[i], self.data.centers[i]) for i in picked)
        return stream_features(representation, structures, n_workers=self.n_workers)

    def _fill(
        self,
        features: KeptFeatures | SpilledFeatures,
        representation: Representation,
        picked: IntArray,
    ) -> None:
        with self.stages.stage("Power spectra", len(features)) as advance:
            done = 0
            for batch in self._stream(representation, picked):
                features.append(batch.features)
                done += len(batch.features)
                advance(done)
        stop_workers()

    def _reload(self, features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
        n, d = features.shape
        path = checkpoint.path("features")
        if not path.exists() or path.stat().st_size != 4 * n * d:
            raise InputError(
                "resume", str(path), f"a file of {4 * n * d} bytes", "Run without --resume."
            )
        if isinstance(features, KeptFeatures):
            with self.stages.stage("Reading features", n) as advance:
                stored = SpilledFeatures(path, n, d)
                for begin in range(0, n, BLOCK):
                    features.append(stored[begin : begin + BLOCK])
                    advance(min(begin + BLOCK, n))
                stored.close()


def _store(features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
    if isinstance(features, SpilledFeatures):
        features.flush()
    else:
        n, d = features.shape
        with_file = SpilledFeatures(checkpoint.path("features"), n, d)
        for begin in range(0, n, BLOCK):
            with_file.append(features[begin : begin + BLOCK])
        with_file.flush()
        with_file.close()
    checkpoint.complete("features")
